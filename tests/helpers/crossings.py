"""Counts of function calls, and of crossings between files, of a command or a request.

Calls of functions in files under the two packages are counted. Not counted are class bodies,
and everything that runs while a module is imported. Ignored as if they were absent are
constructors, which attrs writes for most classes, functions of other packages, code without a
file, and files that find modules to import.
"""

import inspect
import os
import sys
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import kvcore
import kvcore_plugins
from kvcore import KVCache, Request
from kvcore_cli import main as frame

IMPORTING = ("lazy.py", "distributions.py")
"""Files of the package `kvcore` that find and import modules."""

ROOTS = tuple(str(Path(root.__file__).parent) + os.sep for root in (kvcore, kvcore_plugins))
SMALL = "zipf:requests=40,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
BLOCK, PREFIX, PROMPT, OUTPUT = 16, 160, 200, 30
SERVED, MEASURED = 12, 8


class CallCount:
    """The calls while `record` was active.

    Attributes:
        calls: number of function calls.
        crossings: number of calls and returns that led to another file.
        files: calls by file.
    """

    def __init__(self):
        self.calls = self.crossings = 0
        self.files = Counter()
        self._stack = []
        self._importing = 0

    def __str__(self):
        """Return the numbers of calls, crossings and files as a text."""
        return f"{self.calls} calls, {self.crossings} crossings, {len(self.files)} files"

    @contextmanager
    def record(self):
        """Count the calls in the body."""
        self.start()
        try:
            yield
        finally:
            sys.setprofile(None)

    def start(self):
        """Count calls from now on."""
        self._stack = [
            caller.frame.f_code.co_filename
            for caller in reversed(inspect.stack(0))
            if _is_ours(caller.frame.f_code)
        ]
        sys.setprofile(self._called)

    def _called(self, caller, event, _):
        code = caller.f_code
        if event not in {"call", "return"}:
            return
        step = 1 if event == "call" else -1
        if code.co_name == "<module>":
            self._importing += step
        if self._importing or not _is_ours(code):
            return
        file = code.co_filename
        if event == "call":
            self.calls += 1
            self.files[file] += 1
            self.crossings += bool(self._stack) and self._stack[-1] != file
            self._stack.append(file)
        else:
            self._stack.pop()
            self.crossings += bool(self._stack) and self._stack[-1] != file


def _is_ours(code):
    """Return True if `code` is a function of a file under the two packages."""
    # Bodies of modules and classes have no fast local variables.
    is_function = code.co_flags & inspect.CO_OPTIMIZED
    file = code.co_filename
    ours = bool(is_function) and code.co_name != "__init__" and file.startswith(ROOTS)
    return ours and file.removeprefix(ROOTS[0]) not in IMPORTING


def count_calls_of_command(*arguments):
    """Return the way of a command line, which must succeed; its output is dropped."""
    way = CallCount()
    with redirect_stdout(StringIO()), way.record():
        code = frame.run(arguments)
    if code != 0:
        msg = f"{arguments} ended with {code}"
        raise RuntimeError(msg)
    return way


def count_calls_of_request():
    """Return the way of one request in a simulation that has served similar ones.

    Requests come one by one, long after one another, so all calls between reading one request
    and reading the next are those for that request: its prompt hits a prefix, its rest is
    prefilled, and its tokens are generated.
    """
    way = CallCount()
    shared = PREFIX // BLOCK
    own = PROMPT // BLOCK - shared
    requests = [
        Request(
            id=index,
            arrival=index * 10**12,
            prompt_tokens=PROMPT,
            output_tokens=OUTPUT,
            keys=[*range(shared), *range(1000 * index, 1000 * index + own)],
            key_tokens=BLOCK,
        )
        for index in range(1, SERVED)
    ]

    def read():
        for index, request in enumerate(requests):
            if index == MEASURED:
                way.start()
            elif index == MEASURED + 1:
                sys.setprofile(None)
            yield request

    cache = KVCache(1000, BLOCK, accounting="tokens")
    try:
        kvcore.simulate(read(), cache=cache)
    finally:
        sys.setprofile(None)
    if cache.stats.hit_blocks != (len(requests) - 1) * shared:
        msg = f"{cache.stats.hit_blocks} blocks hit, which are not the prefixes alone"
        raise RuntimeError(msg)
    return way
