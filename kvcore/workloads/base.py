"""The workload contract: a source of requests that can be read again and again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

from kvcore.plugins.base import Plugin
from kvcore.request import Request


class Workload(Plugin):
    """A named, repeatable stream of requests.

    Iterating starts from the beginning each time and *streams*: memory must not grow
    with the number of requests. Arrivals never decrease, ids are unique, a key never
    turns up under two parents, and equal options give equal requests.

    A workload that reads files also says how to recognise one: `recognises`.
    """

    kind: ClassVar[str] = "workload"

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Yield requests in order of arrival.

        Raises:
            InputError: a row that cannot be used, naming file, line and field.
        """

    @property
    @abstractmethod
    def key_tokens(self) -> int:
        """Tokens a block key of this workload stands for.

        A class attribute will do. An option of this name needs a class in slots, as
        `@attrs.define(eq=False)` makes it: an instance attribute cannot override a property.
        """

    @property
    @abstractmethod
    def digest(self) -> str:
        """A hex digest of all that determines the requests (file content or options)."""

    @property
    def size(self) -> int | None:
        """How many requests there are; None if that is not known without reading them."""
        return None

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Say whether a file that starts with `first_line` is of this format.

        The line is whole, decompressed, and the first that is not blank.
        """
        del first_line
        return False

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Build the workload that reads `path`. Called after `recognises` said yes."""
        return cls(path=path)  # type: ignore[call-arg]
