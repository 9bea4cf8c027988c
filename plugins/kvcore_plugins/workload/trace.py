"""A recorded run as a workload: its requests, with the digest of the recorded workload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvcore import Request
from kvcore.files import as_path
from kvcore_plugins.workload.from_files import FromFiles
from kvcore_plugins.workload.turns import Turns

if TYPE_CHECKING:
    from kvcore_plugins.workload.recorded import TraceWorkload


@attrs.define(eq=False)
class Recording(FromFiles):
    """The requests of a complete kvcore trace, every line of which is checked.

    Open-loop requests arrive as in the recorded workload, whatever the rate of the run. The
    digest is that of the recorded workload where these are exactly its requests, so that
    results on both can be compared; otherwise that of the file. `jsonl` reads the same lines
    without these checks, also from a cut file or one written by hand.

    Attributes:
        path: the trace.
        turns: whether requests without a session follow those that they continue, as rows of
            `chat` do; else each comes at its time.
    """

    name: ClassVar[str] = "trace"
    later_options = ("turns",)

    path: Path = attrs.field(converter=as_path)
    turns: bool = False

    @property
    def _recorded(self) -> TraceWorkload:
        # Imported late: commands import this module to look at files.
        from kvcore_plugins.workload.recorded import TraceWorkload  # noqa: PLC0415

        return TraceWorkload(self.path)

    def __iter__(self) -> Iterator[Request]:
        """Yield a request for each REQUEST line. Memory: one line.

        Raises:
            TraceError: a line is damaged, or the file is cut.
        """
        requests = iter(self._recorded)
        return Turns().link(requests) if self.turns else requests

    @property
    def key_tokens(self) -> int:
        """Number of tokens of a key."""
        return self._recorded.key_tokens

    @property
    def served_model(self) -> str | None:
        """The model of the recorded run."""
        match self._recorded.header.model:
            case {"name": str(name)}:
                return name
        return None

    @property
    def served_router(self) -> tuple[str, Any] | None:
        """Name and options of the router of a proxy's trace."""
        header = self._recorded.header
        record = header.plugins.get("router") if header.mode == "wall" else None
        return None if record is None else (record.name, record.options)

    @property
    def digest(self) -> str:
        """The digest of the recorded workload, or of the file. Reads the file."""
        if self.turns:
            return self._file_digest(self.path, turns=True)
        recorded = self._recorded
        return recorded.digest if recorded.restores else self._file_digest(self.path)
