"""The prose of docstrings: every noun is named, in the words of today's English."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORDS = r"\b(alike|anew|but for|likewise|nobody|somebody|whoever|whom|whomever)\b"

BEGINNINGS = r"(Likewise|Neither|Nor|What|Whatever|Who|Whose)\b(?!-if)"

AVOIDED = re.compile(f"{WORDS}|^{BEGINNINGS}")
"""Words that leave a noun to the reader, or that a reader of today stumbles over."""

MENTIONED = re.compile(f'{WORDS}|"""{BEGINNINGS}')
"""The same in a whole file: to search it takes a tenth of the time that parsing takes."""

FOLDERS = ("examples", "kvcore", "plugins", "tests")


def docstrings(path):
    """Yield the line and the text of each docstring of a module that may have such a word."""
    if not MENTIONED.search(path.read_text()):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_name_their_nouns(folder):
    """No docstring has a word that stands for a noun it does not name."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r}"
        for path in paths
        for line, text in docstrings(path)
        if (match := AVOIDED.search(text.replace("`alike`", "")))
    ]
    assert not found
