"""A recorded run as a workload: its requests, with the digest of the recorded workload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import attrs

from kvcore import Request, Workload, trace
from kvcore.files import as_path
from kvcore.workloads import file_digest
from kvcore_plugins.workload.turns import Turns


@attrs.define(eq=False)
class Recording(Workload):
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

    def __iter__(self) -> Iterator[Request]:
        """Yield a request for each REQUEST line. Memory: one line.

        Raises:
            TraceError: a line is damaged, or the file is cut.
        """
        requests = iter(trace.TraceWorkload(self.path))
        return Turns().link(requests) if self.turns else requests

    @property
    def key_tokens(self) -> int:
        """Number of tokens of a key."""
        return trace.TraceWorkload(self.path).key_tokens

    @property
    def digest(self) -> str:
        """The digest of the recorded workload, or of the file. Reads the file."""
        if self.turns:
            return file_digest(self.path, turns=True)
        recorded = trace.TraceWorkload(self.path)
        return recorded.digest if recorded.restores else file_digest(self.path)
