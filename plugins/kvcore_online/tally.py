"""The counts of a server that never ends, and histograms of its times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from kvcore.serving.job import Job
from kvcore.serving.stats import RunLog
from kvcore.units import NS_PER_S, PS_PER_NS
from kvcore_lab.report.prometheus import FIRST_TOKEN, LATENCY, LATER_TOKENS

FINISHED, REJECTED, CANCELLED, FAILED = "finished", "rejected", "cancelled", "failed"
"""The ways in which a request ends."""

TIMES: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST_TOKEN),
    "inter_token_latency_seconds": ("From one token of a request to the next.", LATER_TOKENS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", LATENCY),
    "request_queue_time_seconds": ("From arrival to admission.", LATENCY),
    "request_prefill_time_seconds": ("From admission to the first token.", LATENCY),
    "request_decode_time_seconds": ("From the first token to the last.", LATENCY),
}
"""The histograms of vLLM, each with its text and the upper bounds of its buckets (s)."""

Samples: TypeAlias = Mapping[str, float]
"""Values by what follows the name of a family: labels, after `_sum` for instance."""


class BucketCounts:
    """A histogram of times. One thread adds, and others may read.

    Args:
        bounds: upper bounds of the buckets, in seconds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._bounds_ns = [round(bound * NS_PER_S) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._total_ns = 0

    def add(self, time_ns: int, count: int = 1) -> None:
        """Add a time in ns, as many times as `count`. O(log of the buckets)."""
        self._counts[bisect_left(self._bounds_ns, time_ns)] += count
        self._total_ns += time_ns * count

    def samples(self, labels: str) -> Samples:
        """Return the buckets, the sum and the count, as the text format has them."""
        *upto, count = accumulate(self._counts)
        buckets = zip((*map(str, self.bounds), "+Inf"), (*upto, count), strict=True)
        samples: dict[str, float] = {
            f'_bucket{{{labels},le="{bound}"}}': number for bound, number in buckets
        }
        total = self._total_ns / NS_PER_S
        return samples | {f"_sum{{{labels}}}": total, f"_count{{{labels}}}": count}


class Tally(RunLog):
    """The log of a server that never ends: counts in place of a row for each request.

    Attributes:
        requests: numbers of ended requests, by the way in which they ended.
        prompt_tokens, output_tokens: sums over finished requests.
        times: histograms of times, by the name of the metric: of finished requests, and of
            the tokens of all.
        why: reason of the last rejection.
        cancelled: id of the last request that was aborted since its client has disconnected.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.requests = dict.fromkeys((FINISHED, REJECTED, CANCELLED), 0)
        self.prompt_tokens = self.output_tokens = 0
        self.times = {name: BucketCounts(bounds) for name, (_, bounds) in TIMES.items()}
        self._ttft, self._itl, self._e2e, self._queue, self._prefill, self._decode = (
            self.times.values()
        )
        self.why = ""
        self.cancelled: int | str | None = None

    def ended(self, job: Job, now: int) -> None:
        """Count a request that has ended."""
        if job.request.id == self.cancelled:
            self.requests[CANCELLED] += 1
            return
        self.requests[FINISHED] += 1
        self.prompt_tokens += job.request.prompt_tokens
        self.output_tokens += job.output_tokens
        self._e2e.add(now - job.arrival)
        if job.admitted is not None and job.first_token is not None:
            self._queue.add(job.admitted - job.arrival)
            self._prefill.add(job.first_token - job.admitted)
            self._decode.add(now - job.first_token)

    def got_first_token(self, job: Job, now: int) -> None:
        """Record the time to the first token of a request."""
        self._ttft.add(now - job.arrival)

    def later_tokens(self) -> None:
        """Record the times between tokens of the last step."""
        pending = self.itl.pending
        for gap_ps, _, steps, jobs in pending:
            self._itl.add(gap_ps // PS_PER_NS, steps * jobs)
        pending.clear()

    def rejected(self, job: Job, why: str) -> None:
        """Count a request that was rejected, or aborted for its client."""
        self.why = why
        how = CANCELLED if job.request.id == self.cancelled else REJECTED
        self.requests[how] += 1
