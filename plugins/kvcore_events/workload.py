"""The requests behind recorded KV events, where every use or a log of requests is recorded."""

from __future__ import annotations

from array import array
from collections import Counter
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
    from kvcore_events.block_tracker import BatchNumbers
    from kvcore_events.model import BlockStored, PagesStored
    from kvcore_events.recording import Lost, Received, Restarted, Skipped

MODES = (None, "full")

FIRST_TIER = (None, "GPU", "LEVEL_0", "device")

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
        for event, *_ in self._stored(_Losses()):
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
        losses = _Losses()
        for event, now, stream, breaks in self._stored(losses):
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
                losses.runs += 1
                continue
            keys = chains[chain]
            for block in blocks:
                before = keys[-1] if keys else None
                keys.append(numbers.setdefault((before, block.hash), len(numbers)))
                reported.add((stream, breaks, block.hash))
            ends.setdefault((stream, blocks[-1].hash), []).append(chain)
        self._notes = (*losses.notes, *losses.cut)
        return [arrival - losses.begin for arrival in arrivals], chains

    def _stored(
        self, losses: _Losses
    ) -> Iterator[tuple[BlockStored | PagesStored, int, Any, tuple[int, int]]]:
        """Yield the runs stored in the first tier and the group; count in `losses` what lacks.

        With each come its time in ns, its stream (the publisher, the source, the rank, and its
        restarts), and the numbers of gaps and restarts before it, of its publisher and of none
        that is named. If all are of other groups, that is an InputError.
        """
        from kvcore_events.model import BlockStored, PagesStored  # noqa: PLC0415 - a slow import
        from kvcore_events.recording import Received  # noqa: PLC0415 - a slow import

        groups: set[int] = set()
        for item, now in self._timed(losses):
            stream = losses.take(item)
            if stream is None or not isinstance(item, Received):
                continue
            for event in item.batch.events:
                if not isinstance(event, (BlockStored, PagesStored)):
                    continue
                groups.add(self.group if event.group is None else event.group)
                tiers = {block.medium for block in event.blocks()}
                if event.group in (None, self.group) and tiers <= set(FIRST_TIER):
                    breaks = losses.breaks[item.publisher], losses.breaks[None]
                    yield event, now, stream, breaks

        if groups and self.group not in groups:
            others = ", ".join(map(str, sorted(groups)))
            msg = f"{self.path}: no blocks are of the 'group' {self.group}; there are: {others}"
            raise InputError(msg)

    def _timed(
        self, losses: _Losses
    ) -> Iterator[tuple[Received | Lost | Restarted | Skipped, int]]:
        """Yield the items of the recording, with the time from its first batch on, in ns.

        The times of a publisher never fall. Those of several do where a recording has history:
        that of one publisher after another's. Where it is cut, and how much earlier than the
        first the earliest batch is, is told to `losses`.
        """
        from kvcore_events.block_tracker import publisher_of  # noqa: PLC0415 - a slow import
        from kvcore_events.recording import Received, RecordingReader  # noqa: PLC0415 - a slow import

        reader = RecordingReader(self.path)
        first, now, latest = None, 0, 0
        times: dict[Any, int] = {}
        for item in reader:
            if isinstance(item, Received):
                publisher = publisher_of(item.batch, item.publisher)
                now, time = times.get(publisher, now), item.batch.time
                if time is not None:
                    first = time if first is None else first
                    now = max(times.get(publisher, time - first), time - first)
                    times[publisher] = now
                losses.begin, latest = min(losses.begin, now), max(latest, now)
            if (span := latest - losses.begin) >= INT64_LIMIT:
                msg = (
                    f"{self.path}:{reader.line}: this batch makes the recording one of "
                    f"{span // NS_PER_S} s, which is further than nanoseconds of 63 bits reach"
                )
                raise InputError(msg)
            yield item, now
        if reader.cut_reason:
            losses.cut = (f"the recording is cut, and read up to there: {reader.cut_reason}",)

    def _check_size(self, event: BlockStored | PagesStored, size: int) -> None:
        other = getattr(event, "block_size", None)
        if other not in (None, size):
            msg = (
                f"{self.path}: blocks of {other} tokens, before of {size}: choose a 'group' of "
                "layers that has one size"
            )
            raise InputError(msg)

    def _logged(self, log: Path) -> Iterator[Request]:
        from kvcore_events.recording import Received  # noqa: PLC0415 - a slow import

        size, losses = self.key_tokens, _Losses()
        times = [
            item.batch.time
            for item, _ in self._timed(losses)
            if isinstance(item, Received) and item.batch.time is not None
        ]
        if not times:
            msg = f"{self.path}: its events have no times: no log can be joined to it"
            raise InputError(msg)
        first, last, self._notes = min(times), max(times), losses.cut
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
            self._notes = (*losses.cut, outside)


def _batch_numbers() -> BatchNumbers:
    from kvcore_events.block_tracker import BatchNumbers  # noqa: PLC0415 - a slow import

    return BatchNumbers()


@attrs.define
class _Losses:
    """The parts of a stream that one reading of its recording finds to be missing.

    Attributes:
        breaks: number of gaps, restarts and messages that were no batch, by publisher.
        numbers: the numbers of the batches.
        messages: number of messages that were no batch.
        events: number of events that cannot be read.
        runs: number of runs that continue a request whose beginning is missing.
        cut: a note on where the recording is cut; empty if it is whole.
        begin: the time of the earliest batch from the first one on (ns): 0 or less.
    """

    breaks: Counter[int | None] = attrs.field(factory=Counter)
    numbers: BatchNumbers = attrs.field(factory=_batch_numbers)
    messages: int = 0
    events: int = 0
    runs: int = 0
    cut: tuple[str, ...] = ()
    begin: int = 0

    def take(self, item: Received | Lost | Restarted | Skipped) -> tuple[Any, ...] | None:
        """Count what an item says or shows to be missing; return the stream of a new batch."""
        from kvcore_events.recording import (  # noqa: PLC0415 - a slow import
            Lost,
            Received,
            Restarted,
            unparsed_reasons,
        )

        numbers, stream = self.numbers, None
        before = numbers.restarts + len(numbers.gaps) + self.messages
        match item:
            case Received(batch, seq, publisher):
                new, _, name = numbers.advance(batch, seq, publisher)
                if new:
                    self.events += len(unparsed_reasons(batch))
                    stream = publisher, batch.source, batch.dp_rank, numbers.starts[name]
            case Lost(publisher=publisher, first=first, count=count):
                numbers.record_gap(publisher, first, count)
            case Restarted(publisher=publisher):
                numbers.restart(publisher)
            case _:
                self.messages += 1
        after = numbers.restarts + len(numbers.gaps) + self.messages
        self.breaks[item.publisher] += after - before
        return stream

    @property
    def notes(self) -> list[str]:
        """A note on each kind of what is missing."""
        missing, gaps = self.numbers.missing, len(self.numbers.gaps)
        notes = {
            f"lost batches: {missing:,} (gaps: {gaps:,}); requests in them are "
            "missing": missing,
            f"messages left out, which were no batch: {self.messages:,}": self.messages,
            f"events left out, which cannot be read: {self.events:,}": self.events,
            f"runs of blocks left out, whose request began before the recording or in what is "
            f"missing: {self.runs:,}": self.runs,
        }
        return [note for note, count in notes.items() if count]


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
