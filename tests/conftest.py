"""How hypothesis runs (always the same few examples; `thorough`: many), processes, coverage.

What is measured for coverage are the tests of the folders `cli` and `unit`, with the processes
that they start, but for those marked `slow` and a few files, and some conformance kits: they
get the mark `measured`. The others run hardly anything that is not run by these, take several
times as long while they are measured, and are slower even after others have been in the same
process.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "short",
    derandomize=True,
    deadline=None,
    max_examples=10,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("short"), max_examples=5000)
# Processes that tests start take kvcore from where it is installed, not from the checkout
# that happens to be the working directory.
os.environ["PYTHONSAFEPATH"] = "1"
# A shell without job control starts what runs in its background with SIGINT ignored, and
# processes that tests start, to interrupt them, would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests run side by side: threads that wait for one another's time slices take far longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's kernels run in its interpreter, on the CPU: the variable is read on import.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Lines of progress come by the clock.
os.environ["KVCORE_PROGRESS_SECONDS"] = "0"

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

TESTS = Path(__file__).parent
PROCESSES = ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
MEASURED = {"cli", "unit"}
KITS = {"test_drafters.py", "test_prefix.py", "test_router.py", "test_tiers.py"}
"""Conformance tests that are measured: quick ones, whose kits nothing else runs."""
UNMEASURED = {
    "cli/test_plan.py",
    "cli/test_record.py",
    "cli/test_simulate.py",
    "cli/test_view_compare.py",
    "cli/test_view_pool.py",
    "cli/test_view_timeline.py",
    "cli/test_whatif.py",
    "unit/test_imports.py",
    "unit/test_routers.py",
    "unit/test_serving_load.py",
    "unit/test_speculation_simulated.py",
    "unit/test_trace_cluster.py",
}
"""Tests that take twice as long while they are measured, and run what others run as well."""


def may_be_measured(path):
    """Return True if tests of a file are measured, but for slow ones."""
    file = path.relative_to(TESTS)
    if file.parts[0] == "conformance":
        return file.name in KITS
    return file.parts[0] in MEASURED and file.as_posix() not in UNMEASURED


def pytest_ignore_collect(collection_path, config):
    """Import no file that has nothing of what is asked for: measured tests, or the others."""
    asked, needless = config.option.markexpr, False
    if collection_path.suffix == ".py" and asked == "measured":
        needless = not may_be_measured(collection_path)
    elif collection_path.suffix == ".py" and asked == "not measured":
        text = collection_path.read_text("utf-8")
        needless = may_be_measured(collection_path) and "slow" not in text
    return True if needless else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that are measured, before any are chosen by their marks."""
    for item in items:
        if may_be_measured(item.path) and item.get_closest_marker("slow") is None:
            item.add_marker("measured")


def forget_garbage():
    """Collect garbage, and leave all that remains out of later collections."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    """Leave modules and tests out of garbage collections, of which they would take seconds.

    Collections are as rare as they are in the program `kvcore`.
    """
    gc.set_threshold(50_000, 20, 20)
    forget_garbage()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Leave out what the tests of a file have loaded and cached, once the file ends."""
    if nextitem is None or nextitem.path != item.path:
        forget_garbage()


def pytest_sessionfinish(session, exitstatus):
    """Accept that of the tests that were asked for none has the mark that was asked for."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture
def unmeasured_processes(monkeypatch):
    """Measure no coverage in processes, which are to be interrupted.

    A KeyboardInterrupt that comes while coverage holds its lock leaves the lock held, and the
    process waits for it for ever.
    """
    for name in PROCESSES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def browser():
    """Run a browser for all tests of a file that want one."""
    from helpers.browser import browsing  # noqa: PLC0415 - for few tests

    with browsing() as started:
        yield started


@pytest.fixture(scope="session")
def redis_server():
    """Run a server of Redis or Valkey for all tests that want one."""
    from helpers.redis_server import running  # noqa: PLC0415 - for few tests

    with running() as server:
        yield server


@pytest.fixture
def redis_client(redis_server):
    """Return a client of the server, which is empty."""
    with redis_server.client() as client:
        client.flushall()
        yield client
