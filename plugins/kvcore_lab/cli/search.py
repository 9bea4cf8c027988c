"""Additions of the lab to a simulation: a search for what would hold, and a paged run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Self, cast

from kvcore.config import RunParts
from kvcore.hookspecs import Ran
from kvcore.units import NS_PER_S, format_number
from kvcore_cli.output import progress
from kvcore_cli.verb import option
from kvcore_lab.cli.lab_options import tell_model
from kvcore_plugins.load import finished_work
from kvcore_replay.gpu_cost import Cost, gpus_of

search_option = option(
    "--search/--no-search",
    default=True,
    help="If the load is too high, search for a request rate, and for numbers of blocks, GPUs "
    "or servers, with which the queue does not grow, by further simulations.",
)
"""The option of the search."""


def search_of(parts: RunParts, result: Any, given: Mapping[str, Any]) -> Ran | None:
    """Return the search for options with which the queue does not grow, if it grows.

    A run with drafts is not searched: a search decodes without them. Of a cluster, a number of
    replicas is searched.
    """
    saturation = result.saturation
    if not given["search"] or saturation is None or not saturation.saturated:
        return None
    if parts.config.drafter is not None and not parts.many:
        return None
    from kvcore_lab.plans import capacity  # noqa: PLC0415 - few runs search

    if parts.many and not capacity.can_find_replicas(cast("Any", parts)):
        return None
    return Ran(later=partial(_searched, parts, result))


def _searched(parts: RunParts, result: Any) -> Ran:
    """Search, and show the progress on stderr."""
    from kvcore_lab.plans import capacity  # noqa: PLC0415 - as above
    from kvcore_lab.report.capacity import holding  # noqa: PLC0415 - as above

    search: Any = capacity.find_replicas if parts.many else capacity.find_capacity
    with progress("searching for what would hold: simulations", None) as tick:
        holds: dict[str, float | int] = search(parts, result, tick)
    return Ran({"saturation": {"holds": holds}}, [holding(holds, many=parts.many)])


def ran_of(parts: RunParts, result: Any, given: Mapping[str, Any]) -> Ran:
    """Return cost and search for a simulation, and paged memory beside contiguous memory."""
    tell_model(parts.workload, parts.model.name)
    ran = search_of(parts, result, given) or Ran()
    if not parts.traced:
        return ran._replace(fields=paged_fields(parts, residency=given["residency"]))
    seconds = result.simulated_s
    gpus = gpus_of(parts, result)
    rates = Rates.from_result(result, sum(gpus.values()))
    cost = Cost.of_log(gpus, given["gpu_price"], result.log, seconds)
    sections = [str(rates)] if cost is None else [f"{rates}\n{cost}"]
    fields: dict[str, Any] = {"rates": rates._asdict()}
    fields["cost"] = None if cost is None else cost.as_dict()
    if parts.config.rate_scale > 1 or (result.saturation and result.saturation.saturated):
        from kvcore_plugins.workload.turns import overlapping  # noqa: PLC0415 - of high loads

        log = result.log
        sent = dict(zip(log.ids, log.arrival, strict=True))
        ended = dict(zip(log.ids, log.finish, strict=True))
        continued, early = overlapping(parts.workload, sent, ended)
        fields["turns"] = {"continued": continued, "early": early}
        if early:
            sections.append(
                f"{early:,} of {continued:,} requests that continue an earlier prompt were "
                "sent before its answer was there: in this workload they are independent. With "
                "turns=true, an option of chat, jsonl, trace and mooncake, they come after it, "
                "and --rate-scale moves the starts of conversations alone."
            )
    return ran._replace(fields=fields, sections=sections)


class Rates(NamedTuple):
    """Figures of a run under the names that `vllm bench serve` gives them, and for each GPU.

    Attributes:
        request_throughput: requests that finish a second.
        output_throughput, total_token_throughput: tokens that are generated a second, and all,
            those of prompts too.
        tokens_per_gpu: all of them, by a GPU.
        running: requests between their admission and their end, in the mean.
    """

    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    tokens_per_gpu: float
    running: float

    @classmethod
    def from_result(cls, result: Any, gpus: float) -> Self:
        """Return the figures of a simulation on `gpus` GPUs, in the mean over time."""
        log, seconds = result.log, result.simulated_s or 1.0
        prompts = sum(sum(prompts) for _, prompts, _, _ in finished_work(log))
        output = result.throughput_tokens_s or 0.0
        total = prompts / seconds + output
        ends = zip(log.admitted, log.finish, strict=True)
        ran = sum(end - begin for begin, end in ends if end >= 0) / NS_PER_S
        requests = (len(log.ids) - len(log.reasons)) / seconds
        return cls(requests, output, total, total / gpus, ran / seconds)

    def __str__(self) -> str:
        """Return a sentence."""
        requests, output, total, per_gpu, running = map(format_number, self)
        tokens = f"{output} generated tokens/s, {total} tokens/s in all, {per_gpu} a GPU; "
        if not self.output_throughput:  # lengths of outputs are unknown
            tokens = ""
        return f"Rates: {requests} requests/s, {tokens}{running} requests running in the mean."


def paged_fields(parts: RunParts, *, residency: bool = True) -> dict[str, Any]:
    """Serve the workload of a contiguous run in paged memory; return the fields for both."""
    config = parts.config.changed(allocation="paged", max_output=None)
    paged = type(parts)(config, parts.plugins, workload=parts.workload)
    result = paged.run(fragmentation=True, residency=residency)
    document = paged.document(result)
    described = document.pop("config") | {"allocation": "contiguous"}
    return {"config": described, "paged": document}
