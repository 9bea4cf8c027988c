"""Serve a workload by computing it on tensors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Unpack, cast

import attrs

from kvcore.cache import KVCache, ServedCache
from kvcore.engine.backend import Backend
from kvcore.engine.generator import Generator
from kvcore.errors import InputError
from kvcore.files import atomic_file, to_json
from kvcore.plugins.base import find_override
from kvcore.plugins.manager import resolve
from kvcore.request import SLO, Request, TextRequest
from kvcore.serving import Batching, LatencyModel, Scheduler
from kvcore.serving.drafter import Drafter
from kvcore.serving.result import Result
from kvcore.serving.simulate import check_cache, serve, served_batching, serving_parts
from kvcore.workloads import notes_of
from kvcore_engine.executor import Computing, TensorExecutor
from kvcore_engine.generator import HuggingFace
from kvcore_engine.reads import AttentionReads
from kvcore_engine.speculation import SpeculativeTensorExecutor
from kvcore_plugins.drafter.measured_acceptance import DraftedStep, write_acceptance
from kvcore_plugins.latency.measured_steps import MeasuredStep

OUTPUTS = "outputs.jsonl"
"""The file of a run that `simulate` does not write."""


@attrs.frozen(slots=False, eq=False, kw_only=True)
class RunResult(Result):
    """Result of a run on tensors: that of a simulation, and the generated tokens.

    Attributes:
        outputs: generated token ids, by request id.
        steps: duration of each step, under the wall clock; empty under the model's.
        scheduler: the scheduler of the run.
        reads: the K/V that attention of generated tokens has read.
        drafted: outcome of the drafts of every step of a request; empty without a drafter.
    """

    outputs: dict[int | str, list[int]] = attrs.field(repr=False)
    steps: list[MeasuredStep] = attrs.field(repr=False)
    scheduler: Scheduler
    reads: AttentionReads = attrs.field(repr=False)
    drafted: list[DraftedStep] = attrs.field(factory=list, repr=False)

    def summary(self) -> dict[str, Any]:
        """Return the numbers of a simulation, and the bytes that attention has read."""
        reads = self.reads
        read = {
            "tokens": reads.tokens,
            "bytes": round(reads.bytes),
            "text_bytes": round(reads.text_bytes),
        }
        return super().summary() | {"attention_reads": read}

    def write(self, directory: Path | str, **more: Any) -> None:
        """Write the files of a simulation, and `outputs.jsonl`, the token ids of each request.

        Its rows are ordered by the requests' ids, whatever a run decided, so that the files of
        two runs are equal if their outputs are.
        """
        super().write(directory, **more)
        with atomic_file(Path(directory) / OUTPUTS) as file:
            for name in sorted(self.outputs, key=lambda name: (isinstance(name, str), name)):
                row = {"id": name, "output_ids": self.outputs[name]}
                line = to_json(row, f"request {name!r} cannot be written as JSON")
                file.write(f"{line.decode()}\n")

    def write_acceptance(self, path: Path | str) -> None:
        """Write which drafts were accepted, for the drafter `acceptance` of simulations.

        Raises:
            InputError: the run had no drafter.
            StorageError: the file cannot be written.
        """
        if self.log.drafts is None:
            msg = "no drafts were verified: run with a drafter, such as prompt-lookup"
            raise InputError(msg)
        with atomic_file(Path(path)) as file:
            write_acceptance(file, self.log.drafts.probabilities(), self.drafted)


def run(
    workload: Iterable[Request],
    *,
    cache: ServedCache,
    generator: Generator | type[Generator] | str,
    backend: Backend | type[Backend] | str,
    drafter: Drafter | type[Drafter] | str | None = None,
    scheduler: Scheduler | None = None,
    latency: LatencyModel | None = None,
    batching: Batching | None = None,
    slo: SLO | None = None,
    rate_scale: float = 1.0,
    fragmentation: bool = False,
    residency: bool = True,
    **computing: Unpack[Computing],
) -> RunResult:
    """Serve `workload` by computing it on tensors. All decisions are those of `simulate`.

    Token ids are derived from the block keys of the requests (see `TokenStream`), so equal
    keys have equal K/V. The whole pool is allocated on the backend's device.

    Args:
        workload: a workload, or requests in order of arrival; `text_request` makes requests
            from text.
        cache: a new cache that counts tokens and has block ids: made with `ids=True` or
            with a trace; or a `GroupedCache` with the groups of the generator's model.
        generator: computes K/V and next tokens; an instance that is not in use, a class, or
            a text such as `transformer:layers=1`.
        backend: stores K/V and computes attention; an instance, a class or a text.
        drafter: drafts tokens that a step verifies; an instance, a class or a text. None: a
            step generates one token a sequence.
        scheduler: decides which jobs run; None is the `fcfs` plugin.
        latency: gives the duration of a step under the model's clock; None is the
            `roofline` plugin.
        batching: caps of a step; None is `Batching()`.
        slo: SLO of the requests that have none of their own.
        rate_scale: factor by which open-loop requests arrive faster than recorded.
        fragmentation: whether to measure the use of memory, as for `simulate`.
        residency: whether to measure how long blocks rest, as for `simulate`.
        computing: how tensors are computed, see `Computing`.

    Raises:
        InputError: the arguments do not fit one another, the backend or the generator
            cannot compute in this dtype or shape, a tier cannot be opened, or the workload is
            out of order.
        PolicyError: a plugin failed, or the scheduler selects nothing to run.
        StorageError: the pool does not fit into the device's memory.
    """
    check_cache(cache, "run")
    scheduler, latency, batching = serving_parts(scheduler, latency, batching, slo)
    batching = served_batching(cache, batching, drafter=drafter, fragmentation=fragmentation)
    shares = find_override(batching.rules, "shares_scheduled") is not None
    if (shares or batching.rules.commit == "scheduled") and scheduler.preemptive:
        msg = (
            f"commit='scheduled' with scheduler {scheduler.name!r}, which pauses: blocks could "
            "be read that are never computed; give commit='computed', or preemptive=false"
        )
        raise InputError(msg)
    built_generator: Generator = resolve("generator", generator)
    built_backend: Backend = resolve("backend", backend)
    batching = within_model(batching, built_generator)
    texts = False
    if cache.tiers is not None:
        requests = iter(workload)
        first = next(requests, None)
        texts = isinstance(first, TextRequest)
        if requests is workload and first is not None:
            workload = chain((first,), requests)
    threads = computing.pop("threads", None)
    with built_backend.limit_threads(threads, built_generator.spec):
        parts = cast("KVCache", cache), built_generator, built_backend, latency
        codec = resolve("codec", computing.get("codec"))
        options: dict[str, Any] = {**computing, "codec": codec, "texts": texts}
        built_drafter: Drafter | None = resolve("drafter", drafter)
        if built_drafter is None:
            executor = tensor_executor(*parts, **options)
        else:
            executor = SpeculativeTensorExecutor(*parts, drafter=built_drafter, **options)
        complete = False
        try:
            loop, memory, took = serve(
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
            complete = True
        finally:
            executor.close(whole=complete)
    return RunResult(
        log=loop.log,
        cache=cache,
        batching=batching,
        latency=latency,
        fragmentation=memory,
        wall_s=took,
        notes=notes_of(workload),
        outputs={name: stream.output for name, stream in executor.streams.items()},
        steps=executor.measured,
        scheduler=scheduler,
        reads=executor.reads,
        drafter=built_drafter,
        drafted=executor.drafted,
    )


def within_model(batching: Batching, generator: Generator) -> Batching:
    """Return the caps with sequences that the model of a generator has positions for.

    A model of Hugging Face takes its rotary factors by the longest sequence there may be.
    """
    if isinstance(generator, HuggingFace):
        generator.max_model_len = batching.max_model_len
    return batching.within(generator.positions)


def tensor_executor(cache: ServedCache, *arguments: Any, **options: Any) -> TensorExecutor:
    """Return the executor for a cache, by the arguments of `TensorExecutor`."""
    if not cache.grouped:
        return TensorExecutor(cast("KVCache", cache), *arguments, **options)
    from kvcore_engine.groups import GroupedTensorExecutor  # noqa: PLC0415 - most have none

    return GroupedTensorExecutor(cast("Any", cache), *arguments, **options)
