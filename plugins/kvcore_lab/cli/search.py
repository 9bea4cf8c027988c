"""Additions of the lab to a simulation: a search for what would hold, and a paged run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from kvcore.cli.output import progress
from kvcore.cli.verb import option
from kvcore.config import RunParts
from kvcore.hookspecs import Ran

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


def ran_of(parts: RunParts, result: Any, given: Mapping[str, Any]) -> Ran | None:
    """Return the search for a simulation, and paged memory beside contiguous memory."""
    search = search_of(parts, result, given)
    if parts.traced:
        return search
    return (search or Ran())._replace(fields=paged_fields(parts, residency=given["residency"]))


def paged_fields(parts: RunParts, *, residency: bool = True) -> dict[str, Any]:
    """Serve the workload of a contiguous run in paged memory; return the fields for both."""
    config = parts.config.changed(allocation="paged", max_output=None)
    paged = type(parts)(config, parts.plugins, workload=parts.workload)
    result = paged.run(fragmentation=True, residency=residency)
    document = paged.document(result)
    described = document.pop("config") | {"allocation": "contiguous"}
    return {"config": described, "paged": document}
