"""`kvcore simulate --replicas`: several servers, and a router that picks one for a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvcore.cli.output import STDOUT, emit_json, print_notes, print_sections, progress
from kvcore.cli.simulate import outputs
from kvcore.cli.verb import echo
from kvcore.cluster import ClusterResult, simulate_cluster
from kvcore.config import RunConfig
from kvcore.config.cluster import ClusterParts
from kvcore.errors import InputError
from kvcore.progress import ticked

if TYPE_CHECKING:
    from kvcore.report.cluster import ClusterReport


def simulate_replicas(
    config: RunConfig, given: Mapping[str, Any], naming: Callable[[str], str]
) -> None:
    """Simulate a cluster; print its result, and write the files that options name."""
    if given["live"]:
        msg = "--live shows one server: write a --trace, and see that with kvcore view"
        raise InputError(msg)
    parts = ClusterParts(config, naming=naming)
    with outputs(parts, given) as (trace, write_metrics):
        source = parts.workload
        with progress(f"simulating {source.name}", source.size) as tick:
            requests = ticked(source, tick)
            result = simulate_cluster(requests, **parts.cluster(trace), residency=False)
        document = document_of(parts, result)
        write_metrics(result, document)
        if given["price"] is not None:
            from kvcore.analysis.billing import bill  # noqa: PLC0415 - for prices alone

            document["bill"] = bill(source, given["price"], log=result.log).as_dict()
        if given["out"] is not None:
            more = {name: document[name] for name in ("config", "bill") if name in document}
            result.write(given["out"], **more)
    found = result.saturation
    searching = given["search"] and found is not None and found.saturated
    if given["as_json"]:
        if searching:
            document["saturation"] |= {"holds": _searched(parts, result)}
        emit_json(document)
    elif given["prometheus"] != STDOUT:
        report = _print(document, next(iter(result.log.reasons.values()), None), searching)
        if given["price"] is not None:
            from kvcore.report.billing import bill_sections  # noqa: PLC0415 - as above

            echo()
            print_sections(*bill_sections(document["bill"]))
        if searching:
            print_sections("\n" + report.holding(_searched(parts, result)))
    print_notes(source)


def document_of(parts: ClusterParts, result: ClusterResult) -> dict[str, Any]:
    """Return the JSON document of a cluster."""
    first = result.lives[0][0].cache
    plugins = (parts.scheduler(), first.eviction, first.prefix, first.retention)
    tiers = () if first.tiers is None else (level.tier for level in first.tiers.levels)
    more = parts.latency(), result.router, *tiers
    return {**result.summary(), "config": parts.describe(*plugins, *more)}


def _searched(parts: ClusterParts, result: ClusterResult) -> dict[str, float | int]:
    """Search for what would hold, and show on stderr how many simulations that took."""
    from kvcore.analysis.capacity import find_replicas  # noqa: PLC0415 - nothing else needs it

    with progress("searching for what would hold: simulations", None) as tick:
        return find_replicas(parts, result, tick)


def _print(document: dict[str, Any], refusal: str | None, searching: bool) -> ClusterReport:  # noqa: FBT001
    from kvcore.report.cluster import ClusterReport  # noqa: PLC0415 - JSON does without it

    report = ClusterReport(document, document["config"], refusal, searching)
    columns = report.columns
    print_sections(
        report.warning,
        report.headline,
        (["time", *columns], report.times, columns),
        (["quantity", "amount"], report.amounts, ()),
        (report.headers, report.replicas, report.headers[1:]),
        report.reading,
        f"{report.closing}\n{report.setup}",
    )
    return report
