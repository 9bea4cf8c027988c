"""Offered load: how much of the time the work of a run needs at the very least."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from fractions import Fraction
from itertools import compress, pairwise, repeat
from math import floor
from operator import mul, sub

from kvcore.model import attended_pairs
from kvcore.policy import Batch, LatencyModel
from kvcore.serving.batching import Batching
from kvcore.serving.log import RunLog
from kvcore.units import PICOSECONDS


def offered_load(
    log: RunLog, batching: Batching, latency: LatencyModel, pool_tokens: int
) -> float | None:
    """Return arrival rate times the least time a request needs; None without a rate.

    The rate is that of the n requests that finished: n - 1 over the time between the first
    and the last arrival. The least time is a fluid bound: their work (what hit does not
    count, nor what preemption made the run compute again), spread evenly over the fewest
    steps that hold it, divided by n. Steps are at least

    - all tokens / `max_tokens`;
    - (decode tokens + prefills, each at least one step) / `max_seqs`;
    - tokens of K/V that decoding requests hold, step by step, but for those that hit, over
      the tokens that the pool holds (requests that compute the same block at the same time
      hold it once, and are counted twice).

    Where prefill and decode do not share steps, either has its own. One average step is
    no longer than the mean of the steps it averages as long as a step's time is a maximum
    of lines (Jensen). With `max_seqs` = 1 and one line this is the utilisation of queueing
    theory, arrival rate x mean service time. Above 1 the queue grows for as long as
    requests arrive. Costs O(requests).
    """
    columns: tuple[array[int], ...] = log.arrival, log.prompt, log.hit, log.output
    if log.reasons:
        finished = [finish >= 0 for finish in log.finish]
        columns = tuple(array("q", compress(column, finished)) for column in columns)
    arrivals, prompts, hits, outputs = columns
    requests = len(arrivals)
    span = max(arrivals, default=0) - min(arrivals, default=0)
    if not span:
        return None
    misses = list(map(sub, prompts, hits))
    later = [output - 1 if output else 0 for output in outputs]
    prefill, decode = sum(misses), sum(later)
    pairs = [_attended(hits, misses, window) for window in latency.windows]
    context = [_attended(prompts, later, window) for window in latency.windows]
    longest = 0 if batching.chunked else max(misses)
    most = max(batching.max_tokens, longest)
    prefills = sum([-(-tokens // most) for tokens in misses])
    seats, room = batching.max_seqs, Fraction(_attended(misses, later, None), pool_tokens)
    none = [0] * len(pairs)
    if batching.steps == "mixed" and seats > 1:
        fewest = Fraction(prefill + decode, most), Fraction(prefills + decode, seats), room
        work = _time(latency, prefill, pairs, decode, context, max(fewest))
    else:
        steps = max(Fraction(prefill, most), Fraction(prefills, seats))
        work = _time(latency, prefill, pairs, 0, none, steps)
        steps = max(Fraction(decode, seats), room)
        work += _time(latency, 0, none, decode, context, steps)
    rate = Fraction(requests - 1, span * PICOSECONDS)
    return float(work / requests * rate)


def _attended(contexts: Sequence[int], tokens: Sequence[int], window: int | None) -> int:
    """Count the (query, key) pairs of requests with so many tokens after such contexts."""
    if window is not None:
        return sum(map(attended_pairs, contexts, tokens, repeat(window)))
    triangles = (sum(map(mul, tokens, tokens)) + sum(tokens)) // 2
    pairs: int = sum(map(mul, contexts, tokens)) + triangles
    return pairs


def _time(
    latency: LatencyModel,
    prefill: int,
    pairs: list[int],
    decode: int,
    context: list[int],
    steps: Fraction,
) -> Fraction:
    """Return the picoseconds that so much work takes in `steps` equal steps.

    An equal step need not be whole tokens. It is mixed from the whole batches around it,
    those on the way from all parts rounded down to all rounded up, the largest remainder
    first: exact where time is linear.
    """
    if not steps:
        return Fraction(0)
    parts = [part / steps for part in (prefill, decode, *pairs, *context)]
    corner = [floor(part) for part in parts]
    rests = [part - whole for part, whole in zip(parts, corner, strict=True)]
    order = sorted(range(len(parts)), key=rests.__getitem__, reverse=True)
    levels = [Fraction(1), *(rests[place] for place in order), Fraction(0)]
    time = Fraction(0)
    for place, (upper, lower) in zip([None, *order], pairwise(levels), strict=True):
        if place is not None:
            corner[place] += 1
        if upper > lower:
            tokens, sequences, *sums = corner
            attended = tuple(sums[: len(pairs)]), tuple(sums[len(pairs) :])
            batch = Batch(tokens, attended[0], sequences, attended[1])
            time += (upper - lower) * latency.duration(batch)
    return time * steps
