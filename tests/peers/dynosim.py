"""kvcore under the step times of DynoSim, with DynoSim's rules of preemption added.

DynoSim is the offline replay of NVIDIA Dynamo 1.2.1 (`python -m dynamo.replay`): it simulates
an engine with step times of its own. Its rules were read in its sources, `lib/mocker` and
`lib/kvbm-logical`, and confirmed by measurements. As long as it preempts no request, they are
options of kvcore: `RULES`. Its behaviour under preemption is that of no engine, and is
reproduced only here. Two rules with hardly any effect are not reproduced: a prompt that is
cached to its last block is hit completely, so that none of it is computed; and the last token
of a text, which no step computes, has a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import orjson

from kvcore import KVCache, Request
from kvcore.serving import Batching
from kvcore.serving.batcher import Batcher
from kvcore.serving.job import Job
from kvcore.serving.latency import LatencyModel, StepResult, StepWork
from kvcore.serving.loop import Arrivals, ServingLoop
from kvcore.units import PS_PER_NS
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.scheduler import FCFS

RULES = Batching(
    watermark=0.0,
    rules="kvcore:reserve=first-chunk,commit=scheduled,generated=cached,"
    "admit_after_preemption=false",
)

KEY_TOKENS = 512
NS_PER_MS = 1_000_000
PERCENTILES = {"median": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
REUSE = "prefix_cache_reused_ratio"
FIGURES = tuple(
    f"{which}_{metric}_ms"
    for metric in ("ttft", "tpot", "e2e_latency")
    for which in ("mean", *PERCENTILES)
)


@attrs.frozen
class Recorded:
    """The report of DynoSim on a trace of Mooncake, served by one worker.

    Attributes:
        trace: `conversation`, which is bundled, or `synthetic`.
        blocks, block_size: the size of the worker's pool.
        preempts: whether DynoSim preempts; then kvcore is within 0.1 %, otherwise equal.
        report: reused tokens as a share of all prompt tokens, and times in ms.
    """

    trace: str
    blocks: int
    block_size: int
    preempts: bool
    report: Mapping[str, float]

    def __str__(self) -> str:
        """Return the name of the trace and the pool."""
        return f"{self.trace}, {self.blocks} blocks of {self.block_size}"


RECORDED = [
    Recorded(**each)
    for each in orjson.loads(Path(__file__).with_name("dynosim.json").read_bytes())
]


def prefill_ms(tokens: int) -> float:
    """Return DynoSim's time for the prompt tokens of a step."""
    return 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142 if tokens else 0.0


def decode_ms(held: float) -> float:
    """Return DynoSim's time for generating tokens, by the share of all blocks in use."""
    return max(-25.74 * held**2 + 54.01 * held + 5.74, 1.0)


class EmptyServerTimes(LatencyModel):
    """DynoSim's time of a step in an empty server, for schedulers that need an estimate."""

    name = "dynosim"

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return (prefill_ms(work.prefill) + decode_ms(0.0)) / 1e3


class DynoSimExecutor:
    """An executor with DynoSim's step times, by blocks in use and means of the prompts."""

    name = "dynosim"
    mode = "model"
    jumps = False

    def __init__(self, cache: KVCache) -> None:
        self.latency = EmptyServerTimes()
        self.plugins = (self.latency,)
        self.drafter = None
        self._cache = cache

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Return the time of prompts plus that of generated tokens, each in whole ns.

        A step that completes no prompt and decodes nothing generates no token.
        """
        del decoding
        prompts = [
            (job.computed, min(job.computed + tokens, job.request.prompt_tokens))
            for job, tokens in chunks
            if job.computed < job.request.prompt_tokens
        ]
        took = 0
        if prompts:
            # DynoSim computes prompts times the difference of two means, in whole tokens.
            before, after = (sum(ends) // len(prompts) for ends in zip(*prompts, strict=True))
            took = round(prefill_ms(len(prompts) * (after - before)) * NS_PER_MS)
        if work.decode or any(job.computed + tokens == job.target for job, tokens in chunks):
            held = 1 - self._cache.available_blocks / self._cache.pool.blocks
            took += round(decode_ms(held) * NS_PER_MS)
        return StepResult(took * PS_PER_NS)


class DynoSimBatcher(Batcher):
    """A batcher that preempts by DynoSim's rules.

    Attributes:
        hits: the most prompt tokens that each job hit in any of its admissions. DynoSim
            reports these as reused, though a preempted job hits blocks of its own.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hits: dict[Job, int] = {}
        self._fronts: dict[Job, int] = {}

    def _open(self, job: Job, now: int) -> bool:
        """Preempt for `job`, which is new, until its first chunk has its blocks."""
        budget = self._budget
        while not super()._open(job, now):
            if not self.running:
                return False
            self._take_blocks(self._choose_victim(now, job), now, job)
            self._budget = budget  # no job gets the tokens of the preempted one
        self.hits[job] = max(self.hits.get(job, 0), job.computed)
        return True

    def _choose_victim(self, now: int, requester: Job | None) -> Job:
        """Return the job that was admitted last."""
        del now, requester
        return next(reversed(self.running))

    def _take_blocks(self, job: Job, now: int, requester: Job | None = None) -> None:
        """Put `job` before all waiting jobs, whatever their order of arrival."""
        self._fronts[job] = -1 - sum(other.recomputes for other in self._fronts)
        super()._take_blocks(job, now, requester)

    def _rank(self, job: Job, now: int) -> None:
        """Rank jobs by arrival, except those that were preempted."""
        del now
        job.rank = self._fronts.get(job, 0)

    def _allot(self, job: Job, now: int) -> None:
        """Make the blocks of a prompt shareable that a chunk fills in part."""
        planned = len(self.chunks)
        super()._allot(job, now)
        for _, tokens in self.chunks[planned:]:
            self._publish_begun(job, job.computed + tokens, now)

    def _has_blocks(self, job: Job, tokens: int, now: int) -> bool:
        """Make blocks shareable that `job` took although they are too few for its chunk."""
        seq, size = job.seq, self._cache.geometry.block_size
        assert seq is not None
        there = (seq.blocks + self._cache.available_blocks) * size
        if seq.tokens < there < tokens:
            self._allocator.extend(seq, there - seq.tokens, now)
            self._publish_begun(job, there, now)
        return super()._has_blocks(job, tokens, now)

    def _publish_begun(self, job: Job, tokens: int, now: int) -> None:
        """Make the prompt's blocks shareable that hold the first `tokens` tokens of `job`."""
        seq = job.seq
        assert seq is not None
        upto = min(-(-tokens // self._cache.geometry.block_size), seq.cacheable)
        if upto > seq.span.end:
            self._cache.tree.commit(seq, upto, now)


def serve(
    requests: Iterable[Request], blocks: int, block_size: int, *, preempts: bool
) -> tuple[dict[str, float], int]:
    """Serve requests under DynoSim's step times; return its figures and the preemptions.

    With `preempts`, jobs are preempted by DynoSim's rules instead of kvcore's; `RULES` apply in
    any case.
    """
    cache = KVCache(
        blocks,
        block_size,
        eviction=LRU(),
        prefix=Radix(),
        accounting="tokens",
        key_tokens=KEY_TOKENS,
        ids=False,
    )
    scheduler = FCFS()
    loop = ServingLoop(
        Arrivals(requests), cache, scheduler, DynoSimExecutor(cache), RULES, jumps=False
    )
    over = DynoSimBatcher(
        cache, scheduler, RULES, loop.batch, loop.allocator, loop.batcher.server
    )
    if preempts:
        loop.batcher = over
    loop.run()
    log = loop.log
    times = {
        "ttft": [
            first - came for came, first in zip(log.arrival, log.first_token, strict=True)
        ],
        "tpot": [each / PS_PER_NS for each in log.tpot() if each >= 0],
        "e2e_latency": [end - came for came, end in zip(log.arrival, log.finish, strict=True)],
    }
    reused = sum(over.hits.values()) if preempts else sum(log.hit)
    figures = {REUSE: reused / sum(log.prompt)}
    for metric, taken in times.items():
        ranked = sorted(taken)
        figures[f"mean_{metric}_ms"] = fmean(ranked) / NS_PER_MS
        for name, share in PERCENTILES.items():
            nearest = ranked[int(share * (len(ranked) - 1) + 0.5)]
            figures[f"{name}_{metric}_ms"] = nearest / NS_PER_MS
    return figures, sum(log.recomputes)
