"""The exceptions of kvcore. A message has the request, the fault, and the remedy."""

from __future__ import annotations

import re
from typing import ClassVar


class KvcoreError(Exception):
    """Base of all errors that kvcore raises for its users.

    `exit_code` is the exit status of a command that the error ends.
    """

    exit_code: ClassVar[int] = 2


class InputError(KvcoreError):
    """An argument, option, file or row that is not valid."""


class PluginError(KvcoreError):
    """A plugin that cannot be loaded, found, or used here."""

    exit_code = 3


class PolicyError(PluginError):
    """A plugin that raised an exception, or returned a value outside its contract."""


class OutOfBlocks(KvcoreError):
    """The pool cannot hold the request, even after evicting all evictable blocks.

    Nothing has changed when this is raised.
    """

    exit_code = 3


class StorageError(KvcoreError):
    """A write to a disk that failed, as on a full disk."""

    exit_code = 3


class TraceError(KvcoreError):
    """A trace file that is damaged or contradicts itself."""

    exit_code = 1


def shorten(text: str, limit: int = 60) -> str:
    """Return `text` for a message, cut to `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def redact(text: str) -> str:
    """Return `text` without users, passwords and queries of the URLs in it.

    A password may have any character, so more is left out where an `@` or a `?` can be read in
    two ways.
    """
    option = r"(?=,\w+=|\Z)"  # where a query ends: another option of a spec, or nothing
    text = re.sub(rf"(?s)://[^?@]*\?.*@.*?{option}", "://***", text)
    text = re.sub(r"(?s)://.*@", "://***@", text)
    return re.sub(rf"(?s)(://[^?]*)\?.*?{option}", r"\1", text)
