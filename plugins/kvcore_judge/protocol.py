"""The protocol: panels of streams, sizes of pools, and which cells a policy was tuned on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import ge, instance_of, optional

from kvcore.errors import InputError
from kvcore.plugins.manager import Plugins
from kvcore.request import Request
from kvcore.untrusted import load_toml
from kvcore.workloads import Workload, check_keys
from kvcore.workloads.selection import find_workload

BUILT_IN = ("public", "quick")
"""The panels that come with kvcore; others are TOML files."""

SHARES = (5, 10, 20, 50, 100, 200, 500)
"""Pool sizes, in thousandths of the footprint of a stream: the blocks that it ever uses."""

TIMED_SHARES = (10, 50, 200)
"""The sizes in which a stream is also served under a clock."""

STRETCHES = 20
"""Parts of equal numbers of requests by which the spread within a stream is estimated."""


@attrs.frozen
class Stream:
    """A workload on which policies are judged.

    Attributes:
        name: name in tables.
        workload: the text that names the workload, as on a command line.
        limit: number of its first requests that are used; None: all.
        timed: whether it is served under a clock, too, in the sizes of `TIMED_SHARES`.
        digest: the digest that the workload must have; None: any.
    """

    name: str = attrs.field(validator=instance_of(str))
    workload: str = attrs.field(validator=instance_of(str))
    limit: int | None = attrs.field(default=None, validator=optional([instance_of(int), ge(1)]))
    timed: bool = attrs.field(default=False, validator=instance_of(bool))
    digest: str | None = attrs.field(default=None, validator=optional(instance_of(str)))

    @limit.validator
    def _is_number(self, _attribute: object, limit: object) -> None:
        if isinstance(limit, bool):
            msg = f"limit {limit}: give a number of requests"
            raise TypeError(msg)

    def source(self) -> Workload:
        """Return the workload.

        Raises:
            InputError: there is no such workload, or it has another digest.
        """
        workload = find_workload(self.workload, Plugins())
        if self.digest not in (None, workload.digest):
            msg = (
                f"stream {self.name!r}: {self.workload} has the digest {workload.digest}, and "
                f"the panel names {self.digest}: it is another file, or has other options"
            )
            raise InputError(msg)
        return workload


@attrs.frozen
class Footprint:
    """The requests of a stream, and what follows from them.

    Attributes:
        requests: the requests.
        digest: digest of the workload.
        key_tokens: tokens of a key, and of a block.
        blocks: distinct blocks.
        notes: remarks of the workload about the requests, such as rows that it has left out.
    """

    requests: Sequence[Request] = attrs.field(repr=False)
    digest: str
    key_tokens: int
    blocks: int
    notes: tuple[str, ...] = ()

    def pool(self, share: int) -> int:
        """Return the blocks of a pool of `share` thousandths of the footprint."""
        return max(1, self.blocks * share // 1000)


def cell_name(stream: str, share: int) -> str:
    """Return the name of a cell: stream and size in percent of the footprint."""
    return f"{stream} {share / 10:g}%"


@lru_cache(maxsize=8)
def read_stream(stream: Stream) -> Footprint:
    """Read a stream; the result is kept, since every cell of it needs the same requests."""
    workload = stream.source()
    requests: list[Request] = []
    keys: set[Any] = set()
    for request in check_keys(workload, every=True):
        if len(requests) == stream.limit:
            break
        requests.append(request)
        keys.update(request.keys)
    if not keys:
        msg = (
            f"stream {stream.name!r}: its requests have no keys, so that nothing can hit; of "
            f"texts, {workload.key_tokens} tokens have one"
        )
        raise InputError(msg)
    notes, size = (*workload.notes,), workload.key_tokens
    return Footprint(requests, workload.digest, size, len(keys), notes)


@attrs.frozen
class Panel:
    """Streams and pool sizes.

    Attributes:
        name: name of the panel, or path of its file.
        streams: the streams.
        shares: pool sizes, in thousandths of a stream's footprint.
    """

    name: str
    streams: tuple[Stream, ...]
    shares: tuple[int, ...] = SHARES

    @property
    def notes(self) -> list[str]:
        """Remarks about the requests of its streams, each after the name of the stream."""
        return [
            f"{stream.name}: {note}"
            for stream in self.streams
            for note in read_stream(stream).notes
        ]

    @property
    def names(self) -> list[tuple[str, int]]:
        """The stream and the share of each cell."""
        return [(stream.name, share) for stream in self.streams for share in self.shares]

    def tuned(self, policy: str) -> frozenset[str]:
        """Return the names of the streams on whose workload a policy was tuned."""
        workloads = TUNED.get(policy, frozenset())
        return frozenset(stream.name for stream in self.streams if stream.workload in workloads)


TUNED: Mapping[str, frozenset[str]] = {"hazard": frozenset({"mooncake", "weka"})}
"""The workloads on which a built-in policy was tuned: its cells there are marked, and its
headline is made of the others."""


def find_panel(name: str) -> Panel:
    """Return the panel `public` or `quick`, or that of a TOML file.

    A file has a table `[[stream]]` for each stream, with `name` and `workload`, and perhaps
    `digest`, `limit` and `timed`; and perhaps `shares`, in thousandths of the footprint.

    Raises:
        InputError: there is no such panel, or the file is none.
    """
    if name == "public":
        return Panel(
            name,
            (
                Stream("conversation", "mooncake", timed=True),
                Stream("agentic", "weka", timed=True),
                Stream("popular", "zipf:requests=8000,prefixes=2000,seed=1"),
                Stream("tools", "agents:seed=1"),
                Stream("recency", "recency:seed=1"),
            ),
        )
    if name == "quick":
        return Panel(
            name,
            (
                Stream("conversation", "mooncake", limit=2000),
                Stream("tools", "agents:seed=1", limit=2000),
                Stream("recency", "recency:seed=1", limit=2000),
            ),
            shares=(20, 100),
        )
    return _panel_of_file(Path(name))


def _panel_of_file(path: Path) -> Panel:
    try:
        document = load_toml(path)
    except OSError as error:
        msg = f"--panel {path}: {error}; there are public and quick, or give a TOML file"
        raise InputError(msg) from error
    except ValueError as error:
        msg = f"--panel {path}: {error}"
        raise InputError(msg) from error
    try:
        streams = tuple(Stream(**stream) for stream in document.pop("stream"))
        shares = tuple(document.pop("shares", SHARES))
        sound = not document and streams and shares and all(type(s) is int for s in shares)
        sound = sound and all(0 < share <= 1000 for share in shares)  # noqa: PLR2004
        # A cell is named by its stream and its share.
        names = {stream.name for stream in streams}
        sound = sound and (len(names), len({*shares})) == (len(streams), len(shares))
        clocked = any(stream.timed for stream in streams)
    except (TypeError, ValueError, KeyError):
        sound = clocked = False
    if not sound:
        msg = (
            f"--panel {path}: give [[stream]] tables with a name of its own and a workload, "
            "and perhaps digest, limit (1 or more) and timed (true); and perhaps shares = "
            "[5, 100], thousandths of the footprint, none twice"
        )
        raise InputError(msg)
    if clocked and not {*shares} & {*TIMED_SHARES}:
        msg = (
            f"--panel {path}: a stream is timed, and of its shares {shares} none is served "
            f"under a clock: add one of {', '.join(map(str, TIMED_SHARES))}, or leave out timed"
        )
        raise InputError(msg)
    return Panel(str(path), streams, shares)
