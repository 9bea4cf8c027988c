"""When an allocation fails, the core ends with an exception, and nothing worse."""

import subprocess
import sys
from functools import cache

import pytest
from helpers.native import needs_core

pytestmark = needs_core

RUN = """
import _testcapi
from kvcore import KVCache, Request
from kvcore.cache import native as cached
from kvcore.serving import native as served
from kvcore.serving import simulate

core, failing = cached.core(), 10**9


class Scarce:
    def __getattr__(self, name):
        return getattr(core, name)

    def serve(self, *arguments):
        _testcapi.set_nomemory(failing, failing + 1)
        try:
            return core.serve(*arguments)
        finally:
            _testcapi.remove_mem_hooks()


def run():
    requests = [
        Request(
            id=n,
            arrival=n * 10**7,
            prompt_tokens=16 * (n % 9 + 1) + 3,
            output_tokens=n % 50,
            keys=[n % 4, *range(100 * n, 100 * n + n % 9)],
            key_tokens=16,
        )
        for n in range(60)
    ]
    cache = KVCache(40, 16, eviction=EVICTION, prefix=PREFIX, key_tokens=16)
    return simulate(requests, cache=cache, scheduler=SCHEDULER)


served.core = Scarce
run()
errors = 0
for failing in range(1, 4000, 29):
    try:
        run()
    except Exception as error:
        errors += "MemoryError" in f"{type(error).__name__} {error}"
print(errors)
"""


PYTHON_ALONE = """
import _testcapi

def total(numbers):
    return sum(number for number in numbers)

for failing in range(400):
    _testcapi.set_nomemory(failing, failing + 1)
    try:
        [total([n]) for n in range(20)]
    except MemoryError:
        pass
    finally:
        _testcapi.remove_mem_hooks()
"""


@cache
def run_python(code):
    """Run `code` in a process of its own; return the process that has ended."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "plugins",
    [
        ("lru", "radix", "fcfs"),
        ("arc", "hashed", "srpt:preemptive=false"),
        ("lfu", "hashed:spans=block", "fcfs"),
    ],
    ids="-".join,
)
def test_a_failed_allocation_is_an_exception(plugins):
    """A process in which allocation after allocation fails goes on, with an error each time."""
    pytest.importorskip(
        "_testcapi", reason="this Python has no module to make allocations fail"
    )
    if run_python(PYTHON_ALONE).returncode < 0:  # CPython 3.13.0, where a generator begins
        pytest.skip("this Python crashes by itself where an allocation fails")
    names = dict(zip(("EVICTION", "PREFIX", "SCHEDULER"), plugins, strict=True))
    code = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + RUN
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
