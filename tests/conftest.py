"""Settings of all tests: hypothesis, processes, garbage collection and coverage.

Hypothesis always tries the same few examples, or many with the profile `thorough`. Coverage,
where it is measured, is that of the tests with the mark `measured`, with the processes that
they start: of all but those marked `slow`, those in `UNMEASURED_FOLDERS` (among which a few
conformance kits are measured) and a few files. The unmeasured ones run hardly any code that the
others do not run, and take several times as long while they are measured.
"""

import gc
import json
import os
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "short",
    derandomize=True,
    deadline=None,
    max_examples=10,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("short"), max_examples=5000)
# A mutant is noticed by any failure: to look for its shortest example takes minutes.
settings.register_profile(
    "mutants", settings.get_profile("short"), phases=[Phase.explicit, Phase.generate]
)
# Processes that tests start import the installed kvcore, not the checkout that happens to be
# the working directory.
os.environ["PYTHONSAFEPATH"] = "1"
# A shell without job control starts background processes with SIGINT ignored. Processes that
# tests start in order to interrupt them would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests run side by side; threads that wait for each other's time slices take far longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's kernels run in its interpreter, on the CPU: the variable is read on import.
os.environ.setdefault("TRITON_INTERPRET", "1")

# No lines of progress are printed: when they are depends on the clock.
os.environ["KVCORE_PROGRESS_SECONDS"] = "0"

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

TESTS = Path(__file__).parent
PROCESSES = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
UNMEASURED_FOLDERS = {"bench", "conformance", "docs", "golden", "peers", "properties"}
KITS = {"test_drafters.py", "test_prefix.py", "test_router.py", "test_tiers.py"}
"""Conformance tests that are measured: quick ones, whose kits no other test runs."""
UNMEASURED = {
    "cluster/test_routers.py",
    "cluster/test_trace_cluster.py",
    "core/serving/test_serving_load.py",
    "core/serving/test_speculation_simulated.py",
    "events/cli/test_record.py",
    "lab/cli/test_plan.py",
    "pages/cli/test_view_compare.py",
    "pages/cli/test_view_pool.py",
    "pages/cli/test_view_timeline.py",
    "project/cli/test_simulate.py",
    "project/test_imports.py",
    "replay/cli/test_whatif.py",
}
"""Tests that take twice as long while measured, and run code that other tests run too."""


def may_be_measured(path):
    """Return True if coverage is measured for the tests of a file that are not slow."""
    file = path.relative_to(TESTS)
    if UNMEASURED_FOLDERS & {*file.parts}:
        return "conformance" in file.parts and file.name in KITS
    return file.as_posix() not in UNMEASURED


def pytest_addoption(parser):
    """Add the option for the environment `core`, which has no packages."""
    parser.addoption("--core", action="store_true", help="skip files that cannot be imported")


def pytest_ignore_collect(collection_path, config):
    """Skip files without a test that `-m measured` selects, or that `--core` cannot import."""
    if collection_path.suffix != ".py":
        return None
    if config.getoption("core", default=False):
        from helpers.imports import can_import  # noqa: PLC0415 - for one environment

        return None if can_import(collection_path) else True
    selecting = config.option.markexpr == "measured"
    return True if selecting and not may_be_measured(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the measured tests before any are selected by their marks."""
    for item in items:
        if may_be_measured(item.path) and item.get_closest_marker("slow") is None:
            item.add_marker("measured")


def forget_garbage():
    """Collect garbage, and exclude all remaining objects from later collections."""
    gc.collect()
    gc.freeze()


def replace_language_once():
    """Let Triton's interpreter replace the functions of its language for good.

    It does so at each launch, and at each call of a device function, and puts them back, which
    takes longer than the kernels. A process that interprets kernels compiles none.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        interpreter._patch_lang = cache(interpreter._patch_lang)
        interpreter._LangPatchScope.restore = lambda _: None


def pytest_collection_finish():
    """Exclude modules and tests from garbage collections, which they would slow down.

    Collections are as rare as they are in the program `kvcore`.
    """
    replace_language_once()
    gc.set_threshold(50_000, 20, 20)
    forget_garbage()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Exclude objects that the tests of a file have loaded from collections when it ends."""
    if nextitem is None or nextitem.path != item.path:
        forget_garbage()


@pytest.fixture
def unmeasured_processes(monkeypatch):
    """Measure no coverage in processes that are to be interrupted.

    A KeyboardInterrupt that comes while coverage holds its lock leaves the lock held, and the
    process waits for it for ever.
    """
    for name in PROCESSES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def snapshot():
    """Return the kits' function that returns the state of a cache as a value to compare."""
    return pytest.importorskip("kvcore.testing").snapshot


@pytest.fixture
def read_model(tmp_path):
    """Return a function that reads a model from a config.json with the given fields or text."""
    from kvcore_plugins.models.huggingface import read_config  # noqa: PLC0415 - for few tests

    def read_model(fields, **options):
        path = tmp_path / "config.json"
        path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
        return read_config(path, **options)

    return read_model


@pytest.fixture(scope="module")
def browser():
    """Yield a browser for all tests of a file."""
    from helpers.browser import browsing  # noqa: PLC0415 - for few tests

    with browsing() as started:
        yield started


@pytest.fixture(scope="session")
def redis_server():
    """Yield a server of Redis or Valkey for all tests."""
    from helpers.redis_server import running  # noqa: PLC0415 - for few tests

    with running() as server:
        yield server


@pytest.fixture
def redis_client(redis_server):
    """Yield a client of the server, which is empty."""
    with redis_server.client() as client:
        client.flushall()
        yield client
