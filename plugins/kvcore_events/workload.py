"""The requests behind recorded KV events, where every use or a log of requests is recorded."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs.converters import optional
from attrs.validators import ge
from attrs.validators import optional as if_given

from kvcore import InputError, Request
from kvcore.files import as_path
from kvcore.request import block_keys
from kvcore.units import INT64_LIMIT, NS_PER_S
from kvcore.workloads import file_digest
from kvcore_plugins.workload.from_files import FromFiles
from kvcore_plugins.workload.rows import Row, rows

if TYPE_CHECKING:
    from kvcore_events.block_tracker import StoredRuns
    from kvcore_events.model import BlockStored, PagesStored

MODES = (None, "full")

EXPLANATION = (
    "stored and removed blocks alone cannot be run again: a request that found its blocks "
    "left no event. Say 'lookups=full' if the engine reported every use "
    "(kv_cache_report_mode=full), or 'requests=LOG' for a log of its requests; "
    "`kvcore replay {file}` checks and shows the events"
)

INCREMENTAL = (
    "a run continues block {parent}, at which no request's report ends: the engine did not "
    "report every use, and lookups cannot be told"
)


@attrs.define(eq=False)
class KvEvents(FromFiles):
    """The requests behind recorded KV events.

    With `lookups=full` the engine has reported the reused blocks of each request, too: a run
    without a parent begins a request, and runs that continue it belong to it. Generated blocks
    are among them, since events do not distinguish them from a prompt: there are that many
    lookups too many. Runs without a recorded beginning, or with one in a gap, are left out; how
    many, and what the recording lacks, is in `notes`.

    With `requests` each line of a log is a request: `id`, `time` (seconds by the clock of
    the events), `tokens` (ids of the prompt) or `hashes` (the engine's, of its full blocks)
    with `prompt` (tokens), and `output` (tokens; 0). The recording gives the block size and
    the period: requests outside it are left out, and counted in `notes`.

    Requests are sorted by time, as the batches of several publishers need not be. Times count
    from the earliest batch; one that is earlier than the one before it of its publisher counts
    as simultaneous. A recording that is cut is read up to the cut, with a note.

    Attributes:
        path: the recording.
        lookups: `full` for a recording in full-report mode.
        requests: the log, sorted by time.
        block_size: tokens of a block, for recordings without it.
        group: number of the group of layers that is read, of a model with several.
    """

    name: ClassVar[str] = "kv-events"
    renamed_options: ClassVar[dict[str, str]] = {"file": "path"}
    # The first line of a recording, and of events of TensorRT-LLM and Dynamo.
    line_fields = (("kind", "schema", "format"), ("event_id", "data"), ("worker_id", "event"))

    path: Path = attrs.field(converter=as_path)
    lookups: str | None = attrs.field(default=None)
    requests: Path | None = attrs.field(default=None, converter=optional(as_path))
    block_size: int | None = attrs.field(default=None, validator=if_given(ge(1)))
    group: int = attrs.field(default=0, validator=ge(0))
    _notes: tuple[str, ...] = attrs.field(default=(), init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Raise InputError unless either `lookups` or `requests` is given."""
        if self.lookups not in MODES:
            msg = f"'lookups' must be 'full', not {self.lookups!r}"
            raise InputError(msg)
        if (self.lookups is None) == (self.requests is None):
            both = "'lookups' and 'requests' exclude one another: give one"
            raise InputError(both if self.lookups else EXPLANATION.format(file=self.path))

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests. Memory: one line; with `lookups=full`, all blocks of requests."""
        if self.requests is not None:
            yield from self._logged(self.requests)
            return
        size = self.key_tokens
        arrivals, chains = self._chains(size)
        in_order = sorted(range(len(chains)), key=arrivals.__getitem__)
        for serial, chain in enumerate(in_order):
            keys = chains[chain]
            yield Request(
                id=serial,
                arrival=arrivals[chain],
                prompt_tokens=len(keys) * size,
                keys=keys.tolist(),
                key_tokens=size,
            )

    @property
    def key_tokens(self) -> int:
        """Tokens of a block: those of the option, or of the first stored run."""
        if self.block_size is not None:
            return self.block_size
        for event, *_ in self._reading():
            if size := getattr(event, "block_size", None):
                return int(size)
        msg = f"{self.path}: nothing in it says how many tokens a block has: give 'block_size'"
        raise InputError(msg)

    @property
    def notes(self) -> tuple[str, ...]:
        """The parts that the recording lacks, and lines of the log outside it."""
        return self._notes

    @property
    def digest(self) -> str:
        """The digest of the file's bytes, the options, and the log's."""
        log = None if self.requests is None else file_digest(self.requests)
        options = {"lookups": self.lookups, "block_size": self.block_size, "group": self.group}
        return self._file_digest(self.path, requests=log, **options)

    @classmethod
    def from_file(cls, path: Path) -> KvEvents:
        """Raise InputError that names the option to add."""
        return cls(path=path)

    def _chains(self, size: int) -> tuple[list[int], list[array[int]]]:
        """Return the arrival and the keys of each request; a key numbers a (parent, hash)."""
        arrivals: list[int] = []
        chains: list[array[int]] = []
        numbers: dict[tuple[Any, Any], int] = {}
        ends: dict[tuple[Any, Any], list[int]] = {}
        reported: set[tuple[Any, ...]] = set()
        reading = self._reading()
        for event, now, stream, breaks in reading:
            self._check_size(event, size)
            blocks = list(event.blocks())
            if not blocks:
                continue
            parent = blocks[0].parent
            if parent is None:
                chain = len(chains)
                arrivals.append(now)
                chains.append(array("Q"))
            elif open_chains := ends.get((stream, parent)):
                chain = open_chains.pop()
            elif (stream, breaks, parent) in reported:
                msg = f"{self.path}: {INCREMENTAL.format(parent=parent)}"
                raise InputError(msg)
            else:
                reading.runs += 1
                continue
            keys = chains[chain]
            for block in blocks:
                before = keys[-1] if keys else None
                keys.append(numbers.setdefault((before, block.hash), len(numbers)))
                reported.add((stream, breaks, block.hash))
            ends.setdefault((stream, blocks[-1].hash), []).append(chain)
        self._notes = (*reading.notes, *reading.cut)
        return [arrival - reading.begin for arrival in arrivals], chains

    def _reading(self) -> StoredRuns:
        from kvcore_events.block_tracker import StoredRuns  # noqa: PLC0415 - a slow import

        return StoredRuns(self.path, self.group)

    def _check_size(self, event: BlockStored | PagesStored, size: int) -> None:
        other = getattr(event, "block_size", None)
        if other not in (None, size):
            msg = (
                f"{self.path}: blocks of {other} tokens, before of {size}: choose a 'group' of "
                "layers that has one size"
            )
            raise InputError(msg)

    def _logged(self, log: Path) -> Iterator[Request]:
        size, reading = self.key_tokens, self._reading()
        times = reading.times()
        if not times:
            msg = f"{self.path}: its events have no times: no log can be joined to it"
            raise InputError(msg)
        first, last, self._notes = min(times), max(times), reading.cut
        begin, latest, total, inside = None, 0, 0, 0
        for row in rows(log):
            time = row.nanoseconds("time")
            latest = row.in_order("time", time, latest)
            begin = time if begin is None else begin
            total += 1
            if first <= time <= last:
                inside += 1
                yield _request(row, time - first, size)
        if inside < total:
            many = f"{total - inside} of the {total} lines" if inside else f"all {total} lines"
            outside = (
                f"{many} of {log} lie outside the time of {self.path}: the log goes from "
                f"{_moment(begin or 0)} to {_moment(latest)}, the recording from "
                f"{_moment(first)} to {_moment(last)}"
            )
            if not inside:
                msg = f"{outside}. Is the log by another clock or time zone?"
                raise InputError(msg)
            self._notes = (*reading.cut, outside)


def _moment(time: int) -> str:
    """Return a time in ns as seconds, and as the date that it is if it counts from 1970."""
    if not 0 <= time < INT64_LIMIT:  # of another clock, or none
        return f"{time / NS_PER_S:.3f} s"
    date = datetime.fromtimestamp(time // NS_PER_S, UTC)
    return f"{time / NS_PER_S:.3f} s ({date:%Y-%m-%d %H:%M:%S} UTC)"


def _request(row: Row, arrival: int, size: int) -> Request:
    name = row.identifier("id")
    if "tokens" in row.fields:
        tokens = row.keys("tokens")
        prompt, keys = len(tokens), block_keys(tokens, size)
        if not tokens:
            raise row.error(field="tokens", expected="at least one token id")
    else:
        prompt = row.natural("prompt", 1)
        keys = row.prompt_keys("hashes", prompt, size, 2**64)
    return Request(
        id=name,
        arrival=arrival,
        prompt_tokens=prompt,
        output_tokens=row.optional(row.natural, "output", 0),
        keys=keys,
        key_tokens=size,
    )
