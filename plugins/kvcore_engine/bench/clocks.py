"""Clocks of the host and of a GPU: medians of times. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeAlias

import attrs
import torch

from kvcore_engine.bench.result import spread_of

Call: TypeAlias = Callable[[], Any]

LEAST, MOST = 6, 200
"""Samples that a time is a median of, at least and at most."""

WAIT_CYCLES = 40_000_000
"""Cycles of a GPU, some 25 ms, in which the host launches the measured work."""


@attrs.frozen
class Timing:
    """The time of a call.

    Attributes:
        seconds: median.
        spread: difference of the medians of every other sample, by their mean.
        how: how it was timed, if not as usual.
    """

    seconds: float
    spread: float | None
    how: str = ""


def clock_of(device: torch.device) -> Callable[..., list[Timing]]:
    """Return the function that times calls on a device: `time_on_gpu` or `time_on_host`."""
    return time_on_gpu if device.type == "cuda" else time_on_host


def time_on_host(
    versions: Sequence[Sequence[Call]], seconds: float, *, graph: bool = True
) -> list[Timing]:
    """Return the times of calls that are done when they return, one for each version.

    A version is calls that do the same, each on memory of its own, so that no cache holds the
    memory of the next one. Versions are sampled in turn, for about `seconds` each, so that
    other load of the machine is spread over all of them. `graph` is for GPUs. With one thread
    the time is CPU time, which other processes disturb less.
    """
    del graph
    for calls in versions:
        _in_turn(calls)()
    alone = torch.get_num_threads() == 1
    now = process_time if alone else perf_counter
    return _sampled([(_passing(calls, now), "") for calls in versions], seconds)


def time_on_gpu(
    versions: Sequence[Sequence[Call]], seconds: float, *, graph: bool = True
) -> list[Timing]:
    """Return the times of work on a GPU, as `time_on_host` does.

    They are times of events, in a replay of a CUDA graph if the calls can be captured. A graph
    leaves out the time in which the host launches kernels, which an engine that captures its
    decode steps does not spend either. Calls that cannot be captured, or without `graph`, are
    launched while the GPU is kept waiting, which `Timing.how` notes: unless a call waits for
    the GPU, the time of the host is left out as well.
    """
    measures = []
    for calls in versions:
        run = _in_turn(calls)
        run()
        torch.cuda.synchronize()
        replay = _captured(run) if graph else None
        how = "" if replay else "launched, not replayed"
        measures.append((_events(replay or run, len(calls)), how))
    return _sampled(measures, seconds)


def _sampled(
    measures: Sequence[tuple[Callable[[], float], str]], seconds: float
) -> list[Timing]:
    """Return medians of measures, taken in turn."""
    samples: list[list[float]] = [[] for _ in measures]
    end = perf_counter() + seconds * len(measures)
    while len(samples[0]) < LEAST or (perf_counter() < end and len(samples[0]) < MOST):
        for (measure, _), times in zip(measures, samples, strict=True):
            times.append(measure())
    timings = []
    for (_, how), times in zip(measures, samples, strict=True):
        timings.append(Timing(median(times), spread_of(times), how))
    return timings


def _in_turn(calls: Sequence[Call]) -> Call:
    """Return a function that makes all calls, one after the other."""

    def run() -> None:
        for call in calls:
            call()

    return run


def _passing(calls: Sequence[Call], now: Callable[[], float]) -> Callable[[], float]:
    """Return a measure of all calls, one after the other, in seconds for one."""
    run = _in_turn(calls)

    def measure() -> float:
        start = now()
        run()
        return (now() - start) / len(calls)

    return measure


def _events(run: Call, count: int) -> Callable[[], float]:
    """Return a measure of work on the GPU that does `count` calls, in seconds for one."""

    def measure() -> float:
        event: Any = torch.cuda.Event  # which has no types
        wait: Any = torch.cuda._sleep  # noqa: SLF001 - as torch's own tests wait
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        wait(WAIT_CYCLES)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    return measure


def _captured(run: Call) -> Call | None:
    """Return the replay of a graph of a call; None if it cannot be captured."""
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:  # something waits for the device, or allocates beside torch
        torch.cuda.synchronize()
        return None
    replay: Call = graph.replay
    return replay
