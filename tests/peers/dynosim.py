"""kvcore under the step times of DynoSim, the offline replay of NVIDIA Dynamo 1.6.1.

DynoSim simulates an engine with step times of its own; it is compiled into the package
ai-dynamo-runtime. Its rules are options of kvcore: `RULES`. Its step times were found by
replaying single requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import attrs
import orjson

from kvcore import KVCache, Request
from kvcore.serving import Batching
from kvcore.serving.job import Job
from kvcore.serving.latency import LatencyModel, StepResult, StepWork
from kvcore.serving.loop import ServingLoop
from kvcore.units import PS_PER_NS
from kvcore.workloads.arrivals import Arrivals
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.scheduler import FCFS
from kvcore_plugins.workload import Mooncake, Zipf

RULES = Batching(
    watermark=0.0,
    rules="kvcore:reserve=chunk,commit=scheduled,generated=cached,admit_after_preemption=false",
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
    """The report of DynoSim on a workload, served by one worker.

    Attributes:
        trace: a name of `WORKLOADS`, or `synthetic`, a trace that is not bundled.
        blocks, block_size: the size of the worker's pool.
        report: reused tokens as a share of all prompt tokens, and times in ms.
    """

    trace: str
    blocks: int
    block_size: int
    report: Mapping[str, float]

    def __str__(self) -> str:
        """Return the name of the trace and the pool."""
        return f"{self.trace}, {self.blocks} blocks of {self.block_size}"


RECORDED = [
    Recorded(**load)
    for load in orjson.loads(Path(__file__).with_name("dynosim.json").read_bytes())
]


def prefill_ms(tokens: int) -> float:
    """Return DynoSim's time for the prompt tokens of a step."""
    return 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142 if tokens else 0.0


def decode_ms(share: float) -> float:
    """Return DynoSim's time for generating tokens, by their context's share of the pool."""
    return max(-25.74 * share**2 + 54.01 * share + 5.74, 1.0)


WORKLOADS = {
    "conversation": Mooncake(),
    "generated": Zipf(
        requests=4_000,
        rate=3.0,
        prefixes=300,
        prefix_tokens=4_096,
        suffix_tokens=1_000,
        output_tokens=300,
        key_tokens=KEY_TOKENS,
    ),
}
"""The workloads that need no file: the bundled trace, and one with popular prefixes."""


class EmptyServerTimes(LatencyModel):
    """DynoSim's time of a step in an empty server, for schedulers that need an estimate."""

    name = "dynosim"

    def seconds(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        return (prefill_ms(work.prefill) + decode_ms(0.0)) / 1e3


class DynoSimExecutor:
    """An executor with DynoSim's step times, by context tokens and means of the prompts."""

    name = "dynosim"
    mode = "model"
    jumps = False

    def __init__(self, cache: KVCache) -> None:
        self.latency = EmptyServerTimes()
        self.plugins = (self.latency,)
        self.drafter = None
        self._tokens = cache.pool.blocks * cache.geometry.block_size

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Return the time of prompts plus that of decoding sequences, each in whole ns."""
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
        if work.decode:
            took += round(decode_ms(work.context[0] / self._tokens) * NS_PER_MS)
        return StepResult(took * PS_PER_NS)


def serve(
    requests: Iterable[Request], blocks: int, block_size: int
) -> tuple[dict[str, float], int]:
    """Serve requests under DynoSim's step times; return its figures and the preemptions."""
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
    loop.run()
    log = loop.log
    times = {
        "ttft": [
            first - came for came, first in zip(log.arrival, log.first_token, strict=True)
        ],
        "tpot": [each / PS_PER_NS for each in log.tpot() if each >= 0],
        "e2e_latency": [end - came for came, end in zip(log.arrival, log.finish, strict=True)],
    }
    figures = {REUSE: sum(log.hit) / sum(log.prompt)}
    for metric, taken in times.items():
        ranked = sorted(taken)
        figures[f"mean_{metric}_ms"] = fmean(ranked) / NS_PER_MS
        for name, share in PERCENTILES.items():
            nearest = ranked[int(share * (len(ranked) - 1) + 0.5)]
            figures[f"{name}_{metric}_ms"] = nearest / NS_PER_MS
    return figures, sum(log.recomputes)
