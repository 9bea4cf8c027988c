"""Records of a run: a row a request, percentiles, and the use of the pool over time."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice, repeat
from operator import add, eq, mul, sub
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from kvcore.files import Spool
from kvcore.histogram import PERCENTS, Histogram, nearest_rank
from kvcore.request import SLO
from kvcore.serving.job import Job
from kvcore.units import NS_PER_S, PS_PER_NS

PENDING_EVENTS: Final = 512
"""Recorded events from which on they are added up."""

ROWS = 1 << 16
"""Rows of a run that are held in memory, and samples that are sorted there."""

UNJUDGED, MISSED, MET = -1, 0, 1
"""The verdicts on a request by its SLO: none is possible, it missed it, or it met it."""


COLUMNS = (
    *("ids", "tenants", "arrival", "admitted", "first_token", "finish", "prompt", "output"),
    *("hit", "loaded", "swaps", "pauses", "recomputes", "verdict"),
)
"""The names of the columns of a `RunLog`."""


class RunLog:
    """Columns of a run, one row a request, in the order in which these ended.

    Attributes:
        slo: the SLO of requests without one of their own.
        ids, tenants: ids of the requests, and their tenants.
        arrival, admitted, first_token, finish: times of requests, ns; -1 for none.
        prompt, output, hit, loaded: tokens of requests; `loaded` are prompt tokens that were
            loaded from tiers.
        pauses, recomputes, swaps: preemptions of requests, by kind.
        verdict: `MET`, `MISSED` or `UNJUDGED`, by the SLO of the request.
        reasons: by row, why a request was rejected; all other requests have finished.
        itl: times between two tokens of a request.
        pool: the pool's blocks over time.
        steps, busy_ps: steps run, and the picoseconds they took.
        drafts: statistics of the room that verifies drafts; None: there was no drafter.
        own_slos: number of requests with an SLO of their own.
        last_start: when (ns) the last conversation began, if requests follow others; None: the
            loop is open.
    """

    def __init__(self, blocks: int, slo: SLO | None = None) -> None:
        self.slo = slo
        self.ids: Column[int | str] = Column()
        self.tenants: Column[str | None] = Column()
        self.arrival: Column[int] = Column("q")
        self.admitted: Column[int] = Column("q")
        self.first_token: Column[int] = Column("q")
        self.finish: Column[int] = Column("q")
        self.prompt: Column[int] = Column("q")
        self.output: Column[int] = Column("q")
        self.hit: Column[int] = Column("q")
        self.loaded: Column[int] = Column("q")
        self.swaps: Column[int] = Column("i")
        self.pauses: Column[int] = Column("i")
        self.recomputes: Column[int] = Column("i")
        self.verdict: Column[int] = Column("b")
        self.reasons: dict[int, str] = {}
        self.itl = TokenGaps()
        self.pool = PoolTimeline(blocks)
        self.steps = self.busy_ps = self.own_slos = 0
        self.drafts: Any = None
        self.last_start: int | None = None

    def ended(self, job: Job, now: int) -> None:
        """Record a request that finished at `now` (ns); -1: it was rejected."""
        request = job.request
        self.own_slos += request.slo is not None
        verdict = UNJUDGED if job.slo is None else _verdict(job, job.slo, now)
        self.verdict.newest.append(verdict)
        self.ids.newest.append(request.id)
        self.tenants.newest.append(request.tenant)
        self.arrival.newest.append(job.arrival)
        self.admitted.newest.append(-1 if job.admitted is None else job.admitted)
        self.first_token.newest.append(-1 if job.first_token is None else job.first_token)
        self.finish.newest.append(now)
        self.prompt.newest.append(request.prompt_tokens)
        self.output.newest.append(job.output_tokens)
        self.hit.newest.append(job.hit)
        self.loaded.newest.append(job.loaded)
        self.swaps.newest.append(job.swaps)
        self.pauses.newest.append(job.pauses)
        self.recomputes.newest.append(job.recomputes)
        if len(self.verdict.newest) >= ROWS:
            for column in self.columns().values():
                column.store()

    def extend(self, columns: Mapping[str, Any]) -> None:
        """Append rows by column: lists, or the bytes of their machine integers."""
        for name, column in self.columns().items():
            cells, newest = columns[name], column.newest
            add_all = newest.frombytes if isinstance(cells, bytes) else newest.extend
            add_all(cells)
            while len(newest) >= ROWS:
                column.store()

    def rejected(self, job: Job, why: str) -> None:
        """Record a rejected request."""
        self.reasons[len(self.ids)] = why
        self.ended(job, -1)

    def columns(self) -> dict[str, Column[Any]]:
        """Return the columns by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    def tpot(self) -> Times:
        """Return the mean picoseconds of the tokens after the first, where there are any."""
        columns = self.first_token, self.finish, self.output
        return Times(lambda: chain.from_iterable(map(_gaps, *(c.parts() for c in columns))))


Cell = TypeVar("Cell")


class Column(Sequence[Cell]):
    """A column of a log: a sequence that holds only its newest cells in memory.

    The others are in a temporary file, or in memory if none can be written. Reading a cell of
    the file reads `ROWS` of them, unless it is in the part that was read last.

    Attributes:
        newest: the cells that are in no file. Append to it; once it has `ROWS`, call `store`.
    """

    __slots__ = ("_loaded", "_loaded_part", "_parts", "newest")

    def __init__(self, typecode: str = "") -> None:
        """Make an empty column, of integers in an array, or of integers, texts and None."""
        self.newest: Any = array(typecode) if typecode else []
        # Each part as its file, offset and size; or as bytes.
        self._parts: list[tuple[Spool, int, int] | bytes] = []
        self._loaded: int | None = None
        self._loaded_part: Any = None

    def store(self) -> None:
        """Move the oldest `ROWS` cells of `newest` to the file."""
        import pickle  # noqa: PLC0415 - for long runs alone

        part = self.newest[:ROWS]
        del self.newest[:ROWS]
        data = part.tobytes() if isinstance(part, array) else pickle.dumps(part)
        try:
            spool = Spool.shared()
            self._parts.append((spool, spool.store(data), len(data)))
        except OSError:
            self._parts.append(data)

    def append(self, cell: Cell) -> None:
        """Append a cell."""
        self.newest.append(cell)
        if len(self.newest) >= ROWS:
            self.store()

    def extend(self, cells: Iterable[Cell]) -> None:
        """Append the cells of an iterable, in bounded memory."""
        rest = iter(cells)
        while True:
            self.newest.extend(islice(rest, ROWS - len(self.newest)))
            if len(self.newest) < ROWS:
                return
            self.store()

    def parts(self) -> Iterator[Sequence[Cell]]:
        """Yield the cells in order, up to `ROWS` at a time."""
        for index in range(len(self._parts)):
            yield self._part(index)
        yield self.newest

    def count(self, cell: Cell) -> int:
        """Return how many cells are equal to `cell`."""
        return sum([part.count(cell) for part in self.parts()])

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self._parts) * ROWS + len(self.newest)

    def __iter__(self) -> Iterator[Cell]:
        """Iterate over the cells."""
        return chain.from_iterable(self.parts())

    def __getitem__(self, row: Any) -> Any:
        """Return the cell of a row, or the list of those of a slice."""
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        length = len(self)
        if not -length <= row < length:
            msg = f"row {row} of {length}"
            raise IndexError(msg)
        part, offset = divmod(row % length, ROWS)
        return self._part(part)[offset] if part < len(self._parts) else self.newest[offset]

    def __eq__(self, other: object) -> bool:
        """Return True if `other` is a sequence of equal cells."""
        if not isinstance(other, (Column, list, tuple, array)):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        """Show the cells."""
        return f"<Column of {len(self)}: {list(islice(self, 8))}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the cells: the file is of this process."""
        return Column, (getattr(self.newest, "typecode", ""),), None, iter(self)

    def _part(self, index: int) -> Any:
        """Return a stored part; the last one that was read stays in memory."""
        if index != self._loaded:
            import pickle  # noqa: PLC0415 - for long runs alone

            part = self._parts[index]
            data = part if isinstance(part, bytes) else part[0].load(part[1], part[2])
            if isinstance(self.newest, array):
                cells = array(self.newest.typecode)
                cells.frombytes(data)
                self._loaded_part = cells
            else:
                self._loaded_part = pickle.loads(data)  # noqa: S301 - stored by this process
            self._loaded = index
        return self._loaded_part


def _gaps(first: Sequence[int], finish: Sequence[int], output: Sequence[int]) -> list[int]:
    return [gap for gap in mean_gaps(first, finish, output) if gap >= 0]


def mean_gaps(
    first_token: Iterable[int], finish: Iterable[int], output: Iterable[int]
) -> list[int]:
    """Return the mean picoseconds between two of the `output` tokens; -1 for none."""
    return [
        (end - first) * PS_PER_NS // (tokens - 1) if end >= 0 and tokens > 1 else -1
        for first, end, tokens in zip(first_token, finish, output, strict=True)
    ]


def _verdict(job: Job, slo: SLO, now: int) -> int:
    """Judge a job that finished at `now` against its SLO; at -1 it was rejected."""
    if now < 0:
        return UNJUDGED if slo == SLO() else MISSED
    arrival, first, output = job.arrival, job.first_token, job.output_tokens
    verdict = UNJUDGED
    if slo.deadline_ns is not None:
        verdict = MET if now - arrival <= slo.deadline_ns else MISSED
    if first is not None and verdict != MISSED:
        if slo.ttft_ns is not None:
            verdict = MET if first - arrival <= slo.ttft_ns else MISSED
        if slo.tpot_ns is not None and output > 1 and verdict != MISSED:
            verdict = MET if now - first <= slo.tpot_ns * (output - 1) else MISSED
    return verdict


class Percentiles(NamedTuple):
    """Mean and percentiles of times, in seconds. A percentile is the nearest rank."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def from_samples(cls, samples: Iterable[int], second: int) -> Percentiles | None:
        """Return the exact percentiles of integer `samples`; None without samples.

        Args:
            samples: times in some unit. More than `ROWS` of them are counted, not sorted, in
                memory that does not grow with their number: they are iterated over more than
                once, so that an iterator will not do.
            second: how many of these units are a second.
        """
        parts = batches(samples)
        first, more = next(parts, []), next(parts, [])
        if not first:
            return None
        if not more:
            count, total, ordered = len(first), sum(first), sorted(first)
            ranked = [ordered[nearest_rank(percent, count) - 1] for percent in PERCENTS]
        else:
            counts, shift, total = _counted(chain((first, more), parts))
            count = counts.total()
            ranks = [nearest_rank(percent, count) for percent in PERCENTS]
            ranked = _at_ranks(samples, ranks, counts, shift)
        return cls(total / (count * second), *(value / second for value in ranked))

    def as_dict(self) -> dict[str, float]:
        """Return the JSON object: `mean`, `p50`, `p90`, `p95` and `p99`."""
        return self._asdict()


class Times:
    """Samples that are computed each time that they are iterated over."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Iterable[int]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[int]:
        """Iterate over the samples."""
        return iter(self._make())


def batches(samples: Iterable[int]) -> Iterator[list[int]]:
    """Yield the samples, `ROWS` at a time."""
    rest = iter(samples)
    while batch := list(islice(rest, ROWS)):
        yield batch


_BUCKETS = 1 << 14


def _counted(parts: Iterable[Sequence[int]]) -> tuple[Counter[int], int, int]:
    """Return how many samples are in each bucket, `sample >> shift`; the shift; their sum."""
    counts: Counter[int] = Counter()
    shift = total = 0
    for part in parts:
        shift = shift if counts else ((max(part) - min(part)) // _BUCKETS).bit_length()
        total += sum(part)
        counts.update([sample >> shift for sample in part])
        if len(counts) > 2 * _BUCKETS:
            more = ((max(counts) - min(counts)) // _BUCKETS).bit_length()
            shift, narrow, counts = shift + more, counts, Counter()
            for bucket, count in narrow.items():
                counts[bucket >> more] += count
    return counts, shift, total


def _at_ranks(
    samples: Iterable[int], ranks: list[int], counts: Counter[int], shift: int
) -> list[int]:
    """Return the samples at `ranks`, counted from 1 and ascending, of `_counted` samples."""
    buckets = sorted(counts)
    before = list(accumulate([counts[bucket] for bucket in buckets], initial=0))
    wanted: dict[int, list[int]] = {}  # the ranks in each bucket
    for rank in ranks:
        index = bisect_left(before, rank) - 1
        wanted.setdefault(buckets[index], []).append(rank - before[index])
    if not shift:
        return [bucket for bucket, inside in wanted.items() for _ in inside]
    few = {bucket for bucket in wanted if counts[bucket] <= ROWS}  # others: counted again
    near = sorted([sample for sample in samples if sample >> shift in few]) if few else []
    ranked = []
    for bucket, inside in wanted.items():
        if bucket in few:
            ranked += [near[bisect_left(near, bucket << shift) + rank - 1] for rank in inside]
        else:
            here = Times(lambda: (s for s in samples if s >> shift == bucket))  # noqa: B023
            ranked += _at_ranks(here, inside, *_counted(batches(here))[:2])
    return ranked


TokenGap: TypeAlias = tuple[int, int, int, int]
"""(first, slope, steps, jobs): in each of `steps` steps `jobs` jobs got a token, in the first
step `first` ps after the token before, and with each further step `slope` ps more."""


class TokenGaps:
    """The times between two tokens of a request, in picoseconds: inter-token latencies.

    Between two events the same requests decode, and the time of a step grows by the same
    with each: the gaps of k steps of n requests are n times an arithmetic progression. The
    loop appends these four numbers to `pending`; `settle` adds them to a histogram in closed
    form, some hundred at a time.

    Attributes:
        pending: progressions that are not in the histogram yet. Append to it.
    """

    __slots__ = ("_histogram", "pending")

    def __init__(self) -> None:
        self.pending: list[TokenGap] = []
        self._histogram = Histogram()

    @property
    def count(self) -> int:
        """The number of gaps."""
        self.settle()
        return self._histogram.weight

    def percentiles(self, second: int) -> Percentiles | None:
        """Return the mean, exact, and the percentiles, at most 1 % too large."""
        self.settle()
        gaps = self._histogram.percentiles()
        if gaps is None:
            return None
        return Percentiles(
            self._histogram.total / (self._histogram.weight * second),
            *(gaps[f"p{percent}"] / second for percent in PERCENTS),
        )

    def merge(self, other: TokenGaps) -> None:
        """Add the gaps of another run."""
        other.settle()
        self._histogram.merge(other._histogram)

    def settle(self) -> None:
        """Add the pending progressions to the histogram."""
        pending = self.pending
        if not pending:
            return
        histogram, values, weights = self._histogram, [], []
        for first, slope, steps, jobs in pending:
            if slope and steps > 1:
                histogram.add_progression(first, slope, steps, jobs)
            else:
                values.append(first)
                weights.append(steps * jobs)
        if values:
            histogram.extend(values, weights)
        # In place, since the loop appends to this list.
        pending.clear()


MAX_SAMPLES = 512
"""Samples of the timeline. When there are as many, every second one is dropped."""


class PoolTimeline:
    """Use of the blocks of a pool, from event to event.

    A block is *active* if a sequence holds it, *cached* if only the prefix cache does, so
    that it can be evicted, else *free*. The state at an event counts until the next event.
    Means and the peak are those of all events; the samples are thinned out evenly in time.

    Attributes:
        blocks: blocks in the pool.
        pending: events that are not added up yet: time (ns), free blocks, evictable blocks.
            Append to it.
        peak: the most active blocks at any event that is added up.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.pending: list[tuple[int, int, int]] = []
        self.peak = 0
        self._now = self._active = self._cached = 0
        self._active_area = self._cached_area = 0
        self._due = self._interval = 0
        self._times, self._actives, self._cacheds = array("q"), array("i"), array("i")

    def settle(self) -> None:
        """Add up the pending events: columns at a time, in C."""
        if not self.pending:
            return
        times, free, cached = zip(*self.pending, strict=True)
        self.pending.clear()
        active = list(map(sub, repeat(self.blocks), map(add, free, cached)))
        # The state of an event holds until the next: the first of them ends that of the last.
        durations = list(map(sub, times, (self._now, *times)))
        self._active_area += sum(map(mul, durations, (self._active, *active)))
        self._cached_area += sum(map(mul, durations, (self._cached, *cached)))
        self.peak = max(self.peak, *active)
        self._now, self._active, self._cached = times[-1], active[-1], cached[-1]
        index = bisect_left(times, self._due)
        while index < len(times):
            self._sample(times[index], active[index], cached[index])
            index = bisect_left(times, self._due, index + 1)

    def restore(
        self,
        state: tuple[int, int, int, int, int, int],
        active_area: int,
        cached_area: int,
        *samples: bytes,
    ) -> None:
        """Go on where the core in C has stopped: at its last event, areas and samples."""
        self._now, self._active, self._cached, self._due, self._interval, self.peak = state
        self._active_area, self._cached_area = active_area, cached_area
        for column, cells in zip(
            (self._times, self._actives, self._cacheds), samples, strict=True
        ):
            column.frombytes(cells)

    def summary(self, first: int, end: int) -> dict[str, Any]:
        """Return peak, samples, and means from `first` to `end` in ns (None if these equal).

        Before `first` no block was active or cached. An event after `end` is the end.
        """
        self.settle()
        span, since = max(end, self._now) - first, max(end - self._now, 0)
        times, actives, cacheds = self._times[:], self._actives[:], self._cacheds[:]
        last = self._now, self._active, self._cached
        if times and (times[-1], actives[-1], cacheds[-1]) != last:
            times.append(self._now)
            actives.append(self._active)
            cacheds.append(self._cached)
        areas = (
            self._active_area + since * self._active,
            self._cached_area + since * self._cached,
        )
        active, cached = (area / span if span else None for area in areas)
        return {
            "blocks": self.blocks,
            "active": {"mean": active, "peak": self.peak},
            "cached": {"mean": cached},
            "timeline": {
                "t_s": [time / NS_PER_S for time in times],
                "active": actives.tolist(),
                "cached": cacheds.tolist(),
                "free": [self.blocks - a - c for a, c in zip(actives, cacheds, strict=True)],
            },
        }

    def _sample(self, now: int, active: int, cached: int) -> None:
        """Keep a sample; drop every second one when there are too many."""
        times, actives, cacheds = self._times, self._actives, self._cacheds
        times.append(now)
        actives.append(active)
        cacheds.append(cached)
        if len(times) == MAX_SAMPLES:
            del times[1::2], actives[1::2], cacheds[1::2]
            self._interval = max(
                2 * self._interval, (times[-1] - times[0]) // (MAX_SAMPLES // 2)
            )
        self._due = now + self._interval


class Fragmentation(NamedTuple):
    """How well a run used its memory. Shares are of the pool's slots, one token each.

    `used + cached + internal` and the free share are the whole pool. Means are over the time
    from the first arrival on; between two events, lengths and blocks are taken to grow evenly
    with each step.

    Attributes:
        running: mean number of running requests.
        used: mean share of slots with tokens of open requests. Shared ones count once.
        cached: mean share of slots with tokens of no open request, which later ones may hit.
        internal: mean share of slots that open requests hold without a token in them (yet):
            unfilled tails, prompts still to be computed, output still to come.
        uncomputed: mean share of slots that prefill fills next, a part of `internal`.
        internal_peak: the largest `internal` share at any event.
        external: share of the time in which the next request waited for memory although
            enough was free in total, in holes too short for it. In a paged pool there is no
            such time.
        external_free: mean share of free slots at those times; None without any.
    """

    running: float
    used: float
    cached: float
    internal: float
    uncomputed: float
    internal_peak: float
    external: float
    external_free: float | None

    @property
    def filled(self) -> float | None:
        """Share of the slots held by open requests that hold tokens: the effective use."""
        slots = self.used + self.internal
        return self.used / slots if slots else None
