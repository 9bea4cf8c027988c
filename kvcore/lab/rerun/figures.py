"""Two runs of the same requests: what each came to, and who fared differently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from kvcore.cache.stats import CacheStats
from kvcore.serving.log import MET, UNJUDGED, RunLog
from kvcore.serving.quantiles import Distribution, distribution
from kvcore.units import NANOSECONDS, PICOSECONDS

SECOND = NANOSECONDS * PICOSECONDS


@attrs.frozen(kw_only=True)
class Figures:
    """What a run came to, as far as a trace can tell. Times are None without a clock.

    Attributes:
        config: what it was run with: `blocks`, `block_size`, plugins by kind, and with a
            clock `batching`, `slo` (ns) and `rate_scale`.
        requests, completed, rejected: how many there were.
        hit: `lookup_blocks`, `hit_blocks`, `self_hit_blocks`, `lookup_tokens`, `hit_tokens`
            and `ratio` by `block`, `token` and `request`, as in a simulation's summary.
        evicted_blocks: blocks that left the cache, for room or because they expired.
        forgotten_blocks: blocks that running sequences forgot.
        preemptions: by kind, `pause` and `recompute`.
        ttft_s, tpot_s, e2e_s, queue_s: distributions in seconds.
        simulated_s: from the first arrival to the last end.
        throughput_tokens_s: generated tokens a second.
        goodput: requests a second that met their SLO; None where none was expected.
        slo_met: their share of all that had one.
    """

    config: dict[str, Any]
    requests: int
    completed: int
    rejected: int
    hit: dict[str, Any]
    evicted_blocks: int
    forgotten_blocks: int
    preemptions: dict[str, int]
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    queue_s: Distribution | None
    simulated_s: float | None
    throughput_tokens_s: float | None
    goodput: float | None
    slo_met: float | None

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        log: RunLog,
        stats: CacheStats,
        evicted: int,
        *,
        timed: bool,
    ) -> Figures:
        """Count up a run. O(n log n) in its requests."""
        begin, end = min(log.arrival, default=0), max((*log.arrival, *log.finish), default=0)
        seconds = (end - begin) / NANOSECONDS if timed else 0
        generated = sum(log.output) - sum(log.output[row] for row in log.reasons)
        judged, met = len(log.verdict) - log.verdict.count(UNJUDGED), log.verdict.count(MET)
        return cls(
            config=config,
            requests=len(log.ids),
            completed=len(log.ids) - len(log.reasons),
            rejected=len(log.reasons),
            hit={
                "lookup_blocks": stats.lookup_blocks,
                "hit_blocks": stats.hit_blocks,
                "self_hit_blocks": stats.self_hit_blocks,
                "lookup_tokens": stats.lookup_tokens,
                "hit_tokens": stats.hit_tokens,
                "ratio": stats.ratios(),
            },
            evicted_blocks=evicted,
            forgotten_blocks=stats.forgotten_blocks,
            preemptions={"pause": sum(log.pauses), "recompute": sum(log.recomputes)},
            ttft_s=_times(log.arrival, log.first_token) if timed else None,
            tpot_s=distribution([t for t in log.tpot() if t >= 0], SECOND) if timed else None,
            e2e_s=_times(log.arrival, log.finish) if timed else None,
            queue_s=_times(log.arrival, log.admitted) if timed else None,
            simulated_s=seconds if timed else None,
            throughput_tokens_s=generated / seconds if seconds else None,
            goodput=met / seconds if seconds and judged else None,
            slo_met=met / judged if timed and judged else None,
        )


@attrs.frozen
class Fate:
    """What became of a request in one run.

    Attributes:
        hit_tokens: prompt tokens that hit at first admission.
        ttft: ns to its first token; None without a clock, or where there was none.
        rejected: whether it was turned away.
    """

    hit_tokens: int
    ttft: int | None
    rejected: bool


@attrs.frozen
class Change:
    """A request that fared differently.

    Attributes:
        request: its id.
        prompt: its prompt, in tokens.
        recorded, rerun: what became of it.
    """

    request: int | str
    prompt: int
    recorded: Fate
    rerun: Fate

    @property
    def tokens(self) -> int:
        """Hit tokens it gained; below 0: lost."""
        return self.rerun.hit_tokens - self.recorded.hit_tokens

    @property
    def ttft(self) -> int:
        """Nanoseconds by which its first token comes later; 0 where one of the two is none."""
        before, after = self.recorded.ttft, self.rerun.ttft
        return 0 if before is None or after is None else after - before

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        recorded, rerun = (
            {
                "hit_tokens": fate.hit_tokens,
                "ttft_s": None if fate.ttft is None else fate.ttft / NANOSECONDS,
                "rejected": fate.rejected,
            }
            for fate in (self.recorded, self.rerun)
        )
        return {"id": self.request, "prompt": self.prompt, "recorded": recorded, "rerun": rerun}


def changes(recorded: RunLog, rerun: RunLog) -> Iterator[Change]:
    """Yield the requests that fared differently, in the order in which they ended. O(n)."""
    fates = dict(_fates(rerun))
    prompts = dict(zip(recorded.ids, recorded.prompt, strict=True))
    for name, fate in _fates(recorded):
        if fates[name] != fate:
            yield Change(name, prompts[name], fate, fates[name])


def _fates(log: RunLog) -> Iterator[tuple[int | str, Fate]]:
    columns = zip(log.ids, log.hit, log.arrival, log.first_token, strict=True)
    for row, (name, hit, arrival, first) in enumerate(columns):
        ttft = None if first < 0 else first - arrival
        yield name, Fate(hit, ttft, rejected=row in log.reasons)


def _times(begin: Iterable[int], end: Iterable[int]) -> Distribution | None:
    """Return the distribution of the times to each end there is."""
    return distribution([b - a for a, b in zip(begin, end, strict=True) if b >= 0], NANOSECONDS)
