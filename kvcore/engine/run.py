"""Serve a workload on tensors: what is simulated elsewhere is computed here."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvcore.cache import KVCache
from kvcore.engine.backend import Backend
from kvcore.engine.executor import Clock, TensorExecutor
from kvcore.engine.generator import Generator
from kvcore.plugins.manager import resolve
from kvcore.request import SLO, Request
from kvcore.serving import Batching, LatencyModel, Scheduler
from kvcore.serving.calibration import MeasuredStep
from kvcore.serving.result import Result
from kvcore.serving.simulate import check_cache, serve


@attrs.frozen(slots=False, eq=False, kw_only=True)
class RunResult(Result):
    """What a run on tensors came to: as of a simulation, and what was generated.

    Attributes:
        outputs: token ids generated, by request id.
        steps: what each step took, under the wall clock.
        scheduler: who ran.
    """

    outputs: dict[int | str, list[int]]
    steps: list[MeasuredStep]
    scheduler: Scheduler


def run(
    workload: Iterable[Request],
    *,
    cache: KVCache,
    generator: Generator,
    backend: Backend,
    dtype: str = "fp32",
    scheduler: Scheduler | None = None,
    latency: LatencyModel | None = None,
    batching: Batching | None = None,
    slo: SLO | None = None,
    rate_scale: float = 1.0,
    clock: Clock = "model",
    stop_at_eos: bool = False,
    seed: int = 0,
    fragmentation: bool = False,
    residency: bool = True,
) -> RunResult:
    """Serve `workload` by computing it. All decisions are those of `simulate`.

    Token ids follow from the requests' keys (see `TokenStream`), so that what has an equal
    key has equal K/V. The whole pool is allocated on the backend's device.

    Args:
        workload: as for `simulate`; requests from text are made by `text_request`.
        cache: likewise, with block ids: made with `ids=True` or a trace.
        generator: what computes K/V and next tokens; a new one for each run.
        backend: where K/V lies; a new one for each run.
        dtype: what is computed in, one of `TENSOR_DTYPES`.
        scheduler: as for `simulate`.
        latency: likewise.
        batching: likewise.
        slo: likewise.
        rate_scale: likewise.
        fragmentation: likewise.
        residency: likewise.
        clock: `model`: a step takes as long as `latency` says, so that a trace is that of
            `simulate` but for its header; `wall`: as long as it takes here. Requests
            arrive by the same clock, and nobody waits for them.
        stop_at_eos: whether a text may end before its output is complete; wall clock only.
        seed: of samples.

    Raises:
        InputError: parts that do not fit one another, a dtype or shape that the backend or
            the generator does not take, or a workload out of order.
        PolicyError: a plugin failed, or the scheduler lets nothing run.
        StorageError: the pool does not fit into the device's memory.
    """
    check_cache(cache, "run")
    scheduler = resolve("scheduler", scheduler, "fcfs")
    latency = resolve("latency", latency, "roofline")
    latency.bind()
    batching = Batching() if batching is None else batching
    executor = TensorExecutor(
        cache,
        generator,
        backend,
        latency,
        dtype=dtype,
        clock=clock,
        stop_at_eos=stop_at_eos,
        seed=seed,
    )
    loop, took = serve(
        workload,
        cache,
        scheduler,
        executor,
        batching,
        slo=slo,
        rate_scale=rate_scale,
        fragmentation=fragmentation,
        residency=residency,
    )
    return RunResult(
        log=loop.log,
        cache=cache,
        batching=batching,
        latency=latency,
        fragmentation=loop.fragmentation(),
        wall_s=took,
        outputs={name: stream.output for name, stream in executor.streams.items()},
        steps=executor.measured,
        scheduler=scheduler,
    )
