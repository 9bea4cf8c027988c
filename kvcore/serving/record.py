"""What the header of a trace says of the run, besides what its cache is made of."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvcore.policy import Recorder, Scheduler, Workload
from kvcore.request import SLO, Request
from kvcore.serving.batching import Batching
from kvcore.serving.executors import Executor


def record_run(
    trace: Recorder,
    workload: Iterable[Request],
    scheduler: Scheduler,
    executor: Executor,
    batching: Batching,
    *,
    rate_scale: float,
    slo: SLO | None,
) -> None:
    """Describe a run to `trace`, so that it can be made again."""
    latency = executor.latency
    expected = {} if slo is None else {"slo": slo}
    trace.describe(
        mode=executor.mode,
        executor=executor.name,
        workload=workload if isinstance(workload, Workload) else None,
        plugins={
            plugin.kind: {"name": plugin.name, "options": plugin.options()}
            for plugin in (scheduler, *executor.plugins)
        },
        batching=attrs.asdict(batching),
        latency=latency.coefficients(),
        rate_scale=rate_scale,
        **expected,
    )
