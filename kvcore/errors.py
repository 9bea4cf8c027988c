"""The errors kvcore raises: each says what was asked, what is wrong, and what to do."""

from __future__ import annotations

import re
from typing import ClassVar


class KvcoreError(Exception):
    """Base of every error a user of kvcore can cause or meet.

    `exit_code` is what the command line exits with when the error reaches it.
    """

    exit_code: ClassVar[int] = 2


class InputError(KvcoreError):
    """An argument, option, file or row that cannot be used as given."""


class PluginError(KvcoreError):
    """A plugin that cannot be loaded, found, or used here."""

    exit_code = 3


class PolicyError(PluginError):
    """A policy plugin raised, or answered with something that is not allowed."""


class OutOfBlocks(KvcoreError):
    """The pool cannot hold the request, even after evicting all evictable blocks.

    Nothing has changed when this is raised.
    """

    exit_code = 3


class StorageError(KvcoreError):
    """The disk refused a write: it is full, or gone."""

    exit_code = 3


class TraceError(KvcoreError):
    """A trace file that is damaged or contradicts itself."""

    exit_code = 1


def shorten(text: str, most: int = 60) -> str:
    """Return `text` for a message, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def redact(text: str) -> str:
    """Return `text` without users, passwords and queries of the URLs in it."""
    text = re.sub(r"(://[^\s,?]*)\?[^\s,]*", r"\1", text)
    return re.sub(r"://[^\s,]*@", "://***@", text)
