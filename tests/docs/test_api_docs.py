"""Tests that the page on the Python interface is rendered from the docstrings."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import kvcore

SCRIPT = Path(__file__).parents[2] / "docs" / "render_api.py"
INTERNAL = {"kvcore.testing.gpu", "kvcore.cli", "kvcore.demo", "kvcore.online", "kvcore.report"}
"""Packages that serve the command line and have no public interface."""


@pytest.fixture(scope="module")
def script():
    """Yield the module that renders the page."""
    spec = importlib.util.spec_from_file_location("render_api", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_page_is_current(script):
    """The page is the text that the script renders from the current docstrings."""
    current = script.PAGE.read_text("utf-8") == script.render()
    assert current, f"{script.PAGE.name} is not what the docstrings say: run {script.COMMAND}"


def test_every_public_name_has_a_docstring(script):
    """Every public name, and every method of a public class, has a docstring."""
    assert script.undocumented() == []


def test_every_package_is_on_the_page(script):
    """Every package is on the page, unless it is listed as internal."""
    core = Path(kvcore.__file__).parent
    packages = {
        ".".join(("kvcore", *path.parent.relative_to(core).parts))
        for path in core.rglob("__init__.py")
    }
    assert packages - INTERNAL == packages & set(script.ROOMS)


def test_every_module_has_the_names_that_the_page_lists(script):
    """Every name that the page lists for a module is an attribute of the module."""
    for room in script.rooms():
        names = script.names_of(room)
        module = importlib.import_module(room.name)
        assert [name for name in names if not hasattr(module, name)] == []
