"""Text on its way to a terminal: files and servers cannot control it, plugins not add to it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import wraps
from typing import Any, TextIO, TypeVar, cast

import click

VerbT = TypeVar("VerbT", bound=Callable[..., Any])

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]"
)
"""C0 but for tab and newline, C1, line separators, and what turns the direction of text."""


def escaped(text: str) -> str:
    """Return `text` with each control character as `<U+001B>`: visible, ASCII, and inert."""
    return _CONTROLS.sub(lambda found: f"<U+{ord(found[0]):04X}>", text)


def escaped_json(document: bytes) -> bytes:
    r"""Return a JSON document, equal when parsed, with control characters as `\u009b`.

    The encoder has escaped those of ASCII but DEL; all are in texts.
    """
    if document.isascii() and b"\x7f" not in document:
        return document
    text = document.decode()
    # A document's own line ends are the only control characters between its texts.
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print `text` on stdout, or with `err` on stderr, its control characters escaped."""
    click.echo(escaped(text), file=None if err else results(), err=err, nl=nl)


_RESULTS = "kvcore.results"


def results() -> TextIO:
    """Return where results are printed: the stdout that the verb was called with."""
    context = click.get_current_context(silent=True)
    return cast("TextIO", context.meta.get(_RESULTS, sys.stdout) if context else sys.stdout)


def results_alone(verb: VerbT) -> VerbT:
    """Return `verb`, during which only results go to stdout; what plugins print, to stderr."""

    @wraps(verb)
    def called(*args: Any, **options: Any) -> Any:
        click.get_current_context().meta[_RESULTS] = sys.stdout
        with redirect_stdout(sys.stderr):
            return verb(*args, **options)

    return called  # type: ignore[return-value]
