"""The load of a server: what requests offer of its time, and whether its queue grew.

Both go by the requests of a run once it has ended: `load_of` compares their work with the
time in which they came, before any queue; `saturation_of` looks at the queue that there was.
Results call both through the front door, `kvcore.load_of` and `kvcore.saturation_of`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import chain, compress, pairwise, repeat
from math import floor, sqrt
from operator import add, mul, sub
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from kvcore.models.cost import attended_pairs
from kvcore.serving.latency import LatencyModel, StepWork
from kvcore.serving.scheduler import Batching
from kvcore.serving.stats import RunLog, Times, batches
from kvcore.units import NS_PER_S, PS_PER_NS, format_number

if TYPE_CHECKING:
    from kvcore.serving.result import Result

MIN_REQUESTS = 30
"""Requests below which a queue is too short to have a trend."""

MIN_ADMISSION_TIMES = 10
"""Times at which jobs are admitted, below which the queue may be that of one long step."""

PARTS = 64
"""Parts of the time of arrivals: the queue is sampled at their borders, and at both ends."""

LAST_MOMENTS = PARTS // 4
"""How many of the last moments: there the queue of a server that is too slow is never empty."""


Samples: TypeAlias = Sequence[int] | Times
"""Times (ns) that can be iterated over more than once."""


class Saturation(NamedTuple):
    """Whether the queue of a run grew until the last arrival, by the times of its requests.

    In a closed loop the last arrival is that of the last conversation's first request: later
    turns come as fast as earlier ones are served.

    Attributes:
        saturated: whether it did.
        waiting_half, waiting_end: mean number of waiting requests in the eighth of the time
            of arrivals before its half, and before its end.
        arrivals_per_s: requests that arrive a second, from the first arrival to the last; those
            of all conversations over the time in which these begin.
        served_per_s: requests that finish a second, from the first arrival to the last
            finish.
        closed: whether requests follow others, by which they arrive.
    """

    saturated: bool
    waiting_half: float
    waiting_end: float
    arrivals_per_s: float
    served_per_s: float
    closed: bool = False

    @property
    def why(self) -> str:
        """The figures in words."""
        come, served, half, end = map(
            format_number,
            (self.arrivals_per_s, self.served_per_s, self.waiting_half, self.waiting_end),
        )
        if self.closed:
            return (
                f"conversations of {come} requests/s begin and {served}/s are served; {half} "
                f"wait at half of that time, {end} when the last conversations begin"
            )
        return (
            f"{come} requests/s come and {served}/s are served; {half} wait at half time, "
            f"{end} when the last ones arrive"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON. `holds` is None until `simulate` has searched for it."""
        return {**self._asdict(), "why": self.why, "holds": None}


def saturation_of(log: RunLog, max_seqs: int, load: float | None) -> Saturation | None:
    """Return whether the queue of a run grew until the last arrival. O(n).

    None if that is unknown: fewer than `MIN_REQUESTS` requests finished, or all came at once. A
    queue has grown if it is longer at the end of arrivals than at half time, and at the end
    longer than chance makes it: than twice the root of the number of requests. Where the
    offered load is above 1 that is all. Otherwise the queue must also never have been empty
    in the last quarter of the time, so that a burst does not count, and jobs must have been
    admitted at `MIN_ADMISSION_TIMES` times of the second half, so that one long step does
    not count.

    In a closed loop the queue is that of the time in which conversations begin. It must never
    have been empty at its end, whatever the load, and requests must have waited longer than
    they ran, so that conversations that begin in a burst do not count.
    """
    came, admitted, finished = (
        _column_of_finished(log, name) for name in ("arrival", "admitted", "finish")
    )
    queue = Queue.from_times(came, admitted, finished, max_seqs, log.last_start)
    if queue is None:
        return None
    closed = log.last_start is not None
    overloaded = load is not None and load > 1 and not closed
    saturated = queue.grows and (overloaded or queue.persists)
    if closed:
        saturated = saturated and 2 * sum(admitted) > sum(came) + sum(finished)
    come_per_s = (queue.requests - 1) * NS_PER_S / queue.span
    served_per_s = queue.requests * NS_PER_S / (max(finished) - queue.first)
    return Saturation(
        saturated=saturated,
        waiting_half=queue.half,
        waiting_end=queue.end,
        arrivals_per_s=come_per_s,
        served_per_s=served_per_s,
        closed=closed,
    )


class Queue(NamedTuple):
    """The requests that waited in a run, as of its last arrival, or of an earlier time.

    All fields are final by then except `persists`, which may become true later if too few
    jobs were admitted so far.

    Attributes:
        requests: number of requests that arrived.
        first: when the first of them arrived, ns.
        span: ns from the first arrival to the last.
        half, end: waiting requests before half of the time, and before its end.
        grows: whether the queue is longer at the end than before, and than chance makes it.
        persists: whether it was never empty at the end, and jobs were admitted often.
    """

    requests: int
    first: int
    span: int
    half: float
    end: float
    grows: bool
    persists: bool

    @classmethod
    def from_times(
        cls,
        came: Samples,
        admitted: Samples,
        finished: Samples,
        max_seqs: int,
        until: int | None = None,
    ) -> Queue | None:
        """Return the queue, by times (ns) in any order; None if they are too few for a trend.

        `until` is the end of the time that is looked at; None: the last arrival.
        O(n), in memory that does not grow with n.
        """
        requests = sum(map(len, batches(came)))
        if requests < MIN_REQUESTS:
            return None
        first = min(came)
        last = max(came) if until is None else max(first, until)
        span = last - first
        if not span:
            return None
        # The queue at each moment: who has come, less who runs or has ended.
        times = moments(first, last)
        before = _counts(bisect_left, came, times)
        started = _counts(bisect_right, admitted, times)
        ended = _counts(bisect_right, finished, times)
        # Those admitted may be paused: more than `max_seqs` cannot be running.
        queue = [
            here - min(begun, done + max_seqs)
            for here, begun, done in zip(before, started, ended, strict=True)
        ]
        eighth, middle = PARTS // 8, PARTS // 2
        half = sum(queue[middle - eighth + 1 : middle + 1]) / eighth
        end = sum(queue[-eighth:]) / eighth
        return cls(
            requests=requests,
            first=first,
            span=span,
            half=half,
            end=end,
            grows=end > half and end > 2 * sqrt(requests),
            persists=min(queue[-LAST_MOMENTS:]) > 0
            and _admitted_often(admitted, first + span // 2),
        )


def _admitted_often(admitted: Samples, after: int) -> bool:
    """Return True if jobs were admitted at `MIN_ADMISSION_TIMES` later times, or more."""
    times: set[int] = set()
    for time in admitted:
        if time > after:
            times.add(time)
            if len(times) == MIN_ADMISSION_TIMES:
                return True
    return False


def _counts(
    bisect: Callable[[list[int], int], int], events: Samples, times: list[int]
) -> list[int]:
    """Count the `events` before each of `times`; `bisect` is left or right."""
    counts = [0] * len(times)
    for batch in batches(events):
        batch.sort()  # as good as sorted: few requests overtake others
        counts = list(map(add, counts, map(bisect, repeat(batch), times)))
    return counts


def moments(first: int, last: int) -> list[int]:
    """Return the times (ns) at which the queue is sampled, from those of two arrivals."""
    return [first + (last - first) * part // PARTS for part in range(PARTS + 1)]


Work: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Columns of some requests: arrival (ns), and tokens: prompt, hit or loaded, output."""


def finished_work(log: RunLog) -> Iterator[Work]:
    """Yield the work of the requests that finished, some rows at a time."""
    columns = ("arrival", "prompt", "hit", "loaded", "output")
    for arrivals, prompts, hits, loaded, outputs in _of_finished(log, *columns):
        yield arrivals, prompts, list(map(add, hits, loaded)), outputs


def _of_finished(log: RunLog, *names: str) -> Iterator[list[Sequence[int]]]:
    """Yield these columns of the requests that finished, some rows at a time."""
    columns = log.columns()
    for finish, *parts in zip(*(columns[n].parts() for n in ("finish", *names)), strict=True):
        if log.reasons:
            done = [time >= 0 for time in finish]
            yield [array("q", compress(part, done)) for part in parts]
        else:
            yield parts


def _column_of_finished(log: RunLog, name: str) -> Times:
    """Return one of the columns of the requests that finished."""
    return Times(lambda: chain.from_iterable(part for (part,) in _of_finished(log, name)))


class Offered(NamedTuple):
    """The work that requests offer, of those that finished.

    Attributes:
        work: the least time that it takes, ps.
        requests: their number.
        span: ns from the first arrival to the last.
    """

    work: Fraction
    requests: int
    span: int

    def load(self, servers: int = 1) -> float | None:
        """Return arrival rate times the least time a request needs; None without a rate.

        The rate is that of the n requests: n - 1 over the time between the first and the last
        arrival, divided among the servers.
        """
        if not self.span:
            return None
        rate = Fraction(self.requests - 1, self.span * PS_PER_NS)
        return float(self.work / self.requests * rate / servers)


@runtime_checkable
class Bounded(Protocol):
    """A latency model whose step times are no maximum of lines, but are above one."""

    def convex_duration(self, work: StepWork, tokens: int, sequences: int) -> int:
        """Return the picoseconds that `work` takes at least, convex in what it holds.

        Args:
            work: the step.
            tokens: the most tokens of any step.
            sequences: the most of them that decoding sequences generate.
        """


def offered(
    finished: Iterable[Work],
    batching: Batching,
    latency: LatencyModel,
    pool_tokens: int,
    *,
    forgetting: bool,
) -> Offered:
    """Return the work of requests that finished, and the time in which they came.

    Its time is a fluid bound: that of the work (without tokens that hit, and without
    recomputation after preemptions), spread evenly over the fewest steps that hold it. Steps
    are at least

    - all tokens / `max_tokens`;
    - (decode tokens + prefills, each at least one step) / `max_seqs`;
    - tokens of K/V that decoding requests hold, summed over steps and without tokens that
      hit, over the tokens that the pool holds (a block that two requests compute at the same
      time is held once and counted twice).

    Under a retention policy (`forgetting`) the numbers of tokens that sequences hold and
    attend to are unknown here: that work is not counted.

    Where prefill and decode do not share steps, each has steps of its own. One average step
    is no longer than the mean of the steps it averages, since a step's time is a maximum of
    lines (Jensen), or a `Bounded` latency model counts one below it. With `max_seqs` = 1 and
    one line the load is the utilisation of queueing theory, arrival rate x mean service time.
    Above 1 the queue grows for as long as requests arrive. O(n), in memory that does not grow
    with n.

    Args:
        finished: the requests that finished, some at a time.
        batching: the limits of a step.
        latency: gives the time of a step.
        pool_tokens: tokens that the pool holds.
        forgetting: whether there is a retention policy.
    """
    requests = prefill = prefills = decode = held_tokens = 0
    times: list[int] = []
    none = [0] * len(latency.windows)
    pairs, context = none[:], none[:]
    step_tokens = batching.max_tokens
    for arrivals, prompts, hits, outputs in finished:
        if not arrivals:
            continue
        times += min(arrivals), max(arrivals)
        misses = list(map(sub, prompts, hits))
        later = [output - 1 if output else 0 for output in outputs]
        requests += len(arrivals)
        prefill += sum(misses)
        decode += sum(later)
        if batching.chunked:
            prefills += sum([-(-tokens // step_tokens) for tokens in misses])
        else:  # a step holds the longest, and each prefill takes one
            prefills += sum(map(bool, misses))
            step_tokens = max(step_tokens, *misses)
        if not forgetting:
            for index, window in enumerate(latency.windows):
                pairs[index] += _attended(hits, misses, window)
                context[index] += _attended(prompts, later, window)
            held_tokens += _attended(misses, later, None)
    duration = latency.duration
    if isinstance(latency, Bounded):
        most, together = step_tokens, batching.max_seqs
        duration = partial(latency.convex_duration, tokens=most, sequences=together)
    # The fewest steps that hold the work, together or of each kind, and their time.
    seqs, by_memory = batching.max_seqs, Fraction(held_tokens, pool_tokens)
    if batching.steps == "mixed" and seqs > 1:
        by_seqs = Fraction(prefills + decode, seqs)
        fewest = Fraction(prefill + decode, step_tokens), by_seqs, by_memory
        work = _time(duration, prefill, pairs, decode, context, max(fewest))
    else:
        steps = max(Fraction(prefill, step_tokens), Fraction(prefills, seqs))
        work = _time(duration, prefill, pairs, 0, none, steps)
        steps = max(Fraction(decode, seqs), by_memory)
        work += _time(duration, 0, none, decode, context, steps)
    return Offered(work, requests, max(times, default=0) - min(times, default=0))


def load_of(result: Result) -> float | None:
    """Return the offered load of a run that has ended; None with a drafter, as with no rate.

    The least time of steps that verify drafts is unknown.
    """
    return None if result.log.drafts is not None else offered_by(result).load()


def offered_by(result: Result) -> Offered:
    """Return the work of the requests that finished in a run without drafts."""
    cache, work = result.cache, finished_work(result.log)
    tokens = cache.pool.blocks * cache.geometry.block_size
    return offered(work, result.batching, result.latency, tokens, forgetting=cache.forgets)


def _attended(contexts: Sequence[int], tokens: Sequence[int], window: int | None) -> int:
    """Count the (query, key) pairs of requests with `tokens` tokens after `contexts`."""
    if window is not None:
        return sum(map(attended_pairs, contexts, tokens, repeat(window)))
    triangles = (sum(map(mul, tokens, tokens)) + sum(tokens)) // 2
    pairs: int = sum(map(mul, contexts, tokens)) + triangles
    return pairs


def _time(
    duration: Callable[[StepWork], int],
    prefill: int,
    pairs: list[int],
    decode: int,
    context: list[int],
    steps: Fraction,
) -> Fraction:
    """Return the picoseconds that the work takes in `steps` equal steps.

    The work of one of them need not be whole numbers. Its time is the weighted mean of whole
    steps around it, from all parts rounded down to all rounded up, the largest remainder
    first: exact where time is linear.
    """
    if not steps:
        return Fraction(0)
    parts = [part / steps for part in (prefill, decode, *pairs, *context)]
    corner = [floor(part) for part in parts]
    rests = [part % 1 for part in parts]
    order = sorted(range(len(parts)), key=rests.__getitem__, reverse=True)
    levels = [Fraction(1), *(rests[index] for index in order), Fraction(0)]
    time = Fraction(0)
    for index, (upper, lower) in zip([None, *order], pairwise(levels), strict=True):
        if index is not None:
            corner[index] += 1
        if upper > lower:
            tokens, sequences, *sums = corner
            attended = tuple(sums[: len(pairs)]), tuple(sums[len(pairs) :])
            work = StepWork(tokens, attended[0], sequences, attended[1])
            time += (upper - lower) * duration(work)
    return time * steps
