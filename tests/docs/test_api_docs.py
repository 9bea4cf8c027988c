"""The page on the Python interface is what its script renders from the docstrings."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import kvcore

SCRIPT = Path(__file__).parents[2] / "docs" / "render_api.py"
INTERNAL = {"kvcore.testing.gpu", "kvcore.cli", "kvcore.demo", "kvcore.online", "kvcore.report"}
"""Packages that serve the command line, and are no interface for programs."""


@pytest.fixture(scope="module")
def script():
    """Return the module that renders the page."""
    spec = importlib.util.spec_from_file_location("render_api", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_page_is_current(script):
    """Rendering it again gives the same text."""
    current = script.PAGE.read_text("utf-8") == script.render()
    assert current, f"{script.PAGE.name} is not what the docstrings say: run {script.COMMAND}"


def test_every_public_name_has_a_docstring(script):
    """Names, and the methods of public classes."""
    assert script.undocumented() == []


def test_every_package_is_on_the_page(script):
    """A new package is made public, or listed as internal."""
    core = Path(kvcore.__file__).parent
    packages = {
        ".".join(("kvcore", *path.parent.relative_to(core).parts))
        for path in core.rglob("__init__.py")
    }
    assert packages - INTERNAL == packages & set(script.ROOMS)


def test_every_room_imports_what_it_lists(script):
    """The script reads sources; this is what Python sees."""
    for room in script.rooms():
        names = script.names_of(room)
        module = importlib.import_module(room.name)
        assert [name for name in names if not hasattr(module, name)] == []
