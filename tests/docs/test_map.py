"""Tests that the map for contributors, and the docstrings it is made of, are true."""

import ast
import re
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "render_map.py"
PACKAGES = sorted((SCRIPT.parents[1] / "plugins").glob("kvcore_*/__init__.py"))
NAMES = re.compile(r"^    ((?:\w+(?:\.py|/)(?!\w),? *)+)", re.MULTILINE)


def test_the_map_is_made_of_the_docstrings_of_today():
    """The map in docs/contributing.md is what its script makes."""
    script = runpy.run_path(str(SCRIPT))
    is_current = script["text"]() == script["PAGE"].read_text("utf-8")
    assert is_current, "the map is out of date: python docs/render_map.py"


@pytest.mark.parametrize("front", PACKAGES, ids=lambda path: path.parent.name)
def test_a_front_page_names_every_file(front):
    """The docstring of a package names its files and folders once, without `hooks.py`."""
    lines = NAMES.findall(ast.get_docstring(ast.parse(front.read_text("utf-8"))))
    named = [name for line in lines for name in re.findall(r"[^\s,]+", line)]
    files = {path.name for path in front.parent.glob("*.py")} - {"__init__.py", "hooks.py"}
    folders = {f"{path.parent.name}/" for path in front.parent.glob("*/*.*")} - {"__pycache__/"}
    assert sorted(named) == sorted(files | folders)
