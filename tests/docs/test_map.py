"""Tests that the docstrings that the map of the code is made of are true."""

import ast
import re
from pathlib import Path

import pytest

PACKAGES = sorted((Path(__file__).parents[2] / "plugins").glob("kvcore_*/__init__.py"))
NAMES = re.compile(r"^    ((?:\w+(?:\.py|/)(?!\w),? *)+)", re.MULTILINE)


@pytest.mark.parametrize("front", PACKAGES, ids=lambda path: path.parent.name)
def test_a_front_page_names_every_file(front):
    """The docstring of a package names its files and folders once, without `hooks.py`."""
    lines = NAMES.findall(ast.get_docstring(ast.parse(front.read_text("utf-8"))))
    named = [name for line in lines for name in re.findall(r"[^\s,]+", line)]
    files = {path.name for path in front.parent.glob("*.py")} - {"__init__.py", "hooks.py"}
    folders = {f"{path.parent.name}/" for path in front.parent.glob("*/*.*")} - {"__pycache__/"}
    assert sorted(named) == sorted(files | folders)
