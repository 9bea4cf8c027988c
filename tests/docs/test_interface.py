"""Tests that docs/interface.txt shows a change of the Python interface or of a JSON Schema."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.imports import CORE, ROOTS, module_of

SCRIPT = Path(__file__).parents[2] / "docs" / "interface.py"
INTERNAL = {
    "kvcore.native",
    "kvcore_cli",
    "kvcore_judge",
    "kvcore_online",
    "kvcore_plugins",
    "kvcore_tiers",
}
"""Packages without a public interface: they serve the command line, or register plugins."""


@pytest.fixture(scope="module")
def script():
    """Return the functions of the script that finds the public names."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_the_list_is_current(script):
    """Each module and schema in the list has the digest that its sources give today."""
    listed, current = script.listed(), script.digests()
    changed = [name for name in current if listed.get(name) != current[name]]
    assert changed == [], "If that is meant: python docs/interface.py, and a line in CHANGELOG"


def test_every_public_name_has_a_docstring(script):
    """Every public name, and every method of a public class, has a docstring."""
    assert script.undocumented() == []


def test_every_package_is_listed(script):
    """Every room of the core and every package is in the list, by itself or by its modules."""
    rooms = {module_of(path) for path in CORE.rglob("__init__.py")}
    parents = (name.split(".")[:length] for name in script.modules() for length in range(1, 4))
    assert (rooms | {*ROOTS}) - {*map(".".join, parents)} == INTERNAL


def test_every_public_name_can_be_imported(script):
    """Every public name is an attribute of the module that the list names for it."""
    for name in script.modules():
        module = importlib.import_module(name)
        assert [public for public in script.public(name) if not hasattr(module, public)] == []
