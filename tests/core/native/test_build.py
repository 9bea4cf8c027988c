"""The core in C is used where it was built from the sources there are, or switched off."""

import subprocess
import sys

import pytest
from helpers.native import needs_core

from kvcore.cache.native import core
from kvcore.native import build


@pytest.fixture
def unloaded():
    """Forget the library that this process has loaded, for a test."""
    for remembered in (build._load, core):
        remembered.cache_clear()
    yield
    for remembered in (build._load, core):
        remembered.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_a_variable_switches_the_core_off(monkeypatch):
    """With KVCORE_PURE=1 the library is not used, and the state says so."""
    monkeypatch.setenv(build.PURE, "1")
    assert build.library() is None
    assert core() is None
    assert build.PURE in build.state()


@needs_core
@pytest.mark.usefixtures("unloaded")
def test_a_library_of_other_sources_is_not_used(monkeypatch):
    """A library that is older than its sources is left alone, and the state says what to do."""
    monkeypatch.delenv(build.PURE, raising=False)
    monkeypatch.setattr(build, "source_digest", lambda: "another")
    assert build.library() is None
    assert "install kvcore again" in build.state()


def test_a_missing_compiler_is_said_and_leaves_nothing(monkeypatch, tmp_path):
    """Without the compiler that CC names nothing is built, and the reason is returned."""
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in build.build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(build.source_digest() is None, reason="the C sources are not installed")
def test_the_sources_compile_without_a_warning(tmp_path):
    """The C sources are sound C11 to the compiler of this Python, where there is one."""
    command = [*build.command(tmp_path / "core.so"), "-Wall", "-Wextra", "-Werror"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no compiler: {error}")
    assert done.returncode == 0, done.stderr


def test_the_core_is_loaded_only_where_a_loop_runs():
    """Importing kvcore and printing a version does not load the library."""
    code = "import kvcore, sys; print('kvcore.native._core' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False"
