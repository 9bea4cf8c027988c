"""Additions of the lab to a simulation: a search for what would hold, and a paged run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from kvcore.cli.output import progress
from kvcore.cli.verb import option
from kvcore.config import RunParts
from kvcore.hookspecs import Ran
from kvcore.serving.result import finished_work
from kvcore.serving.stats import RunLog
from kvcore.workloads import Workload
from kvcore_lab.gpu_cost import Cost, gpus_of
from kvcore_plugins.workload.turns import overlapping

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
    ran = search_of(parts, result, given) or Ran()
    if not parts.traced:
        return ran._replace(fields=paged_fields(parts, residency=given["residency"]))
    cost = cost_of(parts, result, given["gpu_price"])
    sections = [] if cost is None else [str(cost)]
    fields: dict[str, Any] = {"cost": None if cost is None else cost.as_dict()}
    if parts.config.rate_scale > 1 or (result.saturation and result.saturation.saturated):
        continued, early = early_turns(parts.workload, result.log)
        fields["turns"] = {"continued": continued, "early": early}
        if early:
            sections.append(
                f"{early:,} of {continued:,} requests that continue an earlier prompt were "
                "sent before its answer was there: in this workload they are independent. With "
                "turns=true, an option of chat, jsonl, trace and mooncake, they come after it, "
                "and --rate-scale moves the starts of conversations alone."
            )
    return ran._replace(fields=fields, sections=sections)


def early_turns(workload: Workload, log: RunLog) -> tuple[int, int]:
    """Count the requests that continue another one, and those sent before its answer ended."""
    sent, ended = (
        dict(zip(log.ids, column, strict=True)) for column in (log.arrival, log.finish)
    )
    return overlapping(workload, sent, ended)


def cost_of(parts: RunParts, result: Any, given: Mapping[str, float]) -> Cost | None:
    """Return the cost of the deployment of a simulation; None without prices of its GPUs."""
    seconds, output = result.simulated_s, result.throughput_tokens_s
    gpus = gpus_of(parts, seconds, getattr(result, "replica_s", None))
    prompts = sum(sum(prompts) for _, prompts, _, _ in finished_work(result.log))
    tokens = prompts / seconds + (output or 0) if seconds else None
    return Cost.of(gpus, given, output, tokens)


def paged_fields(parts: RunParts, *, residency: bool = True) -> dict[str, Any]:
    """Serve the workload of a contiguous run in paged memory; return the fields for both."""
    config = parts.config.changed(allocation="paged", max_output=None)
    paged = type(parts)(config, parts.plugins, workload=parts.workload)
    result = paged.run(fragmentation=True, residency=residency)
    document = paged.document(result)
    described = document.pop("config") | {"allocation": "contiguous"}
    return {"config": described, "paged": document}
