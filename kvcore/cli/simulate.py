"""`kvcore simulate`: simulate serving a workload, on one server or on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import click
from click.core import ParameterSource

from kvcore.cli.options import (
    batching_options,
    cluster_options,
    config_of,
    names_from_file,
    naming,
    output_options,
    part_options,
    policy_options,
    price_option,
    server_options,
    shared,
    traffic_options,
    workload_argument,
)
from kvcore.cli.output import (
    STDOUT,
    emit_json,
    json_option,
    metrics_file,
    print_notes,
    print_sections,
    progress,
)
from kvcore.cli.verb import echo, verb
from kvcore.config import RunConfig, RunParts
from kvcore.config.options import option_default, option_help
from kvcore.errors import InputError
from kvcore.files import make_directory, refuse_overwrite
from kvcore.plugins.options import as_text
from kvcore.progress import silent, ticked, unseen
from kvcore.serving import Batching, Result, Scheduler
from kvcore.serving.contiguous import Allocation
from kvcore.serving.contiguous import simulate as run_simulation
from kvcore.serving.result import REQUESTS, SUMMARY, TRACE, Reported
from kvcore.trace import Trace

if TYPE_CHECKING:
    from kvcore.cluster.result import ClusterResult
    from kvcore.config.cluster import ClusterParts
    from kvcore.report.cluster import ClusterReport
    from kvcore.report.simulation import SimulationReport


@verb(
    "kvcore simulate",
    "kvcore simulate zipf:requests=1000 --device h200 --scheduler slo",
    "kvcore simulate requests.jsonl --window 0:600 --trace run.jsonl.gz",
)
@workload_argument
@part_options
@policy_options
@server_options
@batching_options
@shared("allocation")
@cluster_options
@traffic_options
@output_options
@click.option(
    "--search/--no-search",
    default=True,
    help="If the load is too high, search for a request rate, and for numbers of blocks, GPUs "
    "or servers, with which the queue does not grow, by further simulations.",
)
@price_option
@click.option(
    "--show",
    is_flag=True,
    help="Print the limits and rules that these options give, and exit.",
)
@json_option
@click.pass_context
def simulate(ctx: click.Context, /, **given: Any) -> None:  # noqa: C901 - one run, its steps in turn
    """Simulate serving WORKLOAD: latency, throughput, goodput, hits, preemptions.

    The defaults are Llama 3 8B on four H100 GPUs, which can serve the trace that comes with
    kvcore; one GPU cannot. Plugins take options after a colon, as in --scheduler
    srpt:preemptive=false.
    """
    from_file = names_from_file(ctx, given)
    config = config_of(given, "simulate")
    named = naming(given["config"], from_file)
    if given["show"]:
        _show_rules(config)
        return
    if config.is_cluster:
        parts: RunParts = _cluster_parts(config, given, named)
    else:
        _check_alone(ctx, named)
        parts = RunParts(config, naming=named)
    with outputs(parts, given) as (trace, write_metrics):
        result, document = _simulated(parts, trace, given)
        write_metrics(result, document)
        if config.allocation == "contiguous":
            paged, asked = _run(parts, None, "paged", residency=given["residency"])
            document |= {"config": asked["config"], "paged": paged.summary()}
        if given["price"] is not None:
            from kvcore.analysis.billing import bill  # noqa: PLC0415 - for prices alone

            document["bill"] = bill(parts.workload, given["price"], log=result.log).as_dict()
        if given["out"] is not None:
            parted = ("config", "paged", "bill")
            more = {name: document[name] for name in parted if name in document}
            result.write(given["out"], **more)
    saturation = result.saturation
    searching = given["search"] and saturation is not None and saturation.saturated
    # A run with drafts is not searched: a search decodes without them.
    searching = searching and not (isinstance(result, Result) and result.drafter)
    searching = searching and _can_search(parts)
    if given["as_json"]:
        if searching:
            document["saturation"] |= {"holds": _searched(parts, result)}
        emit_json(document)
    elif given["prometheus"] != STDOUT:
        report = _print(result, document, searching=searching)
        if given["price"] is not None:
            from kvcore.report.billing import bill_sections  # noqa: PLC0415 - as above

            echo()
            print_sections(*bill_sections(document["bill"]))
        if searching:
            print_sections("\n" + report.holding(_searched(parts, result)))
    print_notes(parts.workload)


def _show_rules(config: RunConfig) -> None:
    """Print the limits of a step and the rules of a configuration, with their meanings."""
    from kvcore.config.like import LIKENESSES  # noqa: PLC0415 - `--show` alone

    names = (*attrs.fields_dict(Batching), "scheduler", "eviction", "prefix")
    rows = [
        (
            name,
            as_text(getattr(config, name)),
            as_text(option_default(name)),
            option_help(name).rstrip("."),
        )
        for name in names
    ]
    about = "" if config.like is None else LIKENESSES[config.like].text
    print_sections(about, (("option", "value", "kvcore", "meaning"), rows, ()))


def _check_alone(ctx: click.Context, named: Callable[[str], str]) -> None:
    """Refuse the options of clusters if there is one server."""
    source = ctx.get_parameter_source
    for name in ("router", "view"):
        alone = source("replicas") is ParameterSource.DEFAULT
        if alone and source(name) is ParameterSource.COMMANDLINE:
            msg = f"{named(name)}one server gets all requests: give --replicas too"
            raise InputError(msg)


def _can_search(parts: RunParts) -> bool:
    """Return True if there are options to search for: of a cluster, a number of replicas."""
    from kvcore.analysis import capacity  # noqa: PLC0415 - nothing else needs it

    return not parts.many or capacity.can_find_replicas(cast("ClusterParts", parts))


def _searched(parts: RunParts, result: Any) -> dict[str, float | int]:
    """Return options under which the queue does not grow; show the search on stderr."""
    from kvcore.analysis import capacity  # noqa: PLC0415 - nothing else needs it

    search: Any = capacity.find_replicas if parts.many else capacity.find_capacity
    with progress("searching for what would hold: simulations", None) as tick:
        found: dict[str, float | int] = search(parts, result, tick)
    return found


def _cluster_parts(
    config: RunConfig, given: Mapping[str, Any], naming: Callable[[str], str]
) -> ClusterParts:
    from kvcore.config.cluster import ClusterParts  # noqa: PLC0415 - of several servers

    if given["live"]:
        msg = "--live shows one server: write a --trace, and see that with kvcore view"
        raise InputError(msg)
    return ClusterParts(config, naming=naming)


def _simulated(
    parts: RunParts, trace: Any, given: Mapping[str, Any]
) -> tuple[Result | ClusterResult, dict[str, Any]]:
    """Return the result of one server or several, and its JSON document."""
    allocation, measured = parts.config.allocation, given["residency"]
    if not parts.many:
        return _run(parts, trace, allocation, residency=measured, live=given["live"])
    from kvcore.cluster.simulate import simulate_cluster  # noqa: PLC0415 - of several servers

    several, source = cast("ClusterParts", parts), parts.workload
    with progress(f"simulating {source.name}", source.size) as tick:
        requests = ticked(source, tick)
        result = simulate_cluster(requests, **several.cluster(trace), residency=False)
    return result, cluster_document(several, result)


def _run(
    parts: RunParts,
    trace: Trace | None,
    allocation: Allocation,
    *,
    residency: bool,
    live: bool = False,
) -> tuple[Result, dict[str, Any]]:
    """Return the result of a run, and its JSON document."""
    source, made = parts.workload, parts.arguments(trace)
    longest = None
    if allocation == "contiguous":
        longest = max((request.output_tokens for request in source), default=0)
    with (silent if live else progress)(f"simulating {source.name}", source.size) as tick:
        result = run_simulation(
            source if tick is unseen else ticked(source, tick),
            **made,
            allocation=allocation,
            max_output=longest,
            fragmentation=parts.config.allocation == "contiguous",
            residency=residency,
        )
    return result, document_of(parts, result, made["scheduler"])


def _print(
    result: Result | ClusterResult, document: dict[str, Any], *, searching: bool
) -> SimulationReport | ClusterReport:
    if not isinstance(result, Result):
        return _print_cluster(result, document, searching=searching)
    from kvcore.report.paging import PagingReport  # noqa: PLC0415 - JSON does without it

    report = report_of(result, document, searching=searching)
    if "paged" not in document:
        print_report(report)
        return report
    paging = PagingReport(document, document["paged"], result.max_output or 0)
    table = paging.headers, paging.rows, paging.headers[1:]
    headlines = report.warning, report.headline, paging.headline
    print_sections(*headlines, table, f"{paging.reading}\n{report.setup}")
    return report


def _print_cluster(
    result: ClusterResult, document: dict[str, Any], *, searching: bool
) -> ClusterReport:
    from kvcore.report.cluster import ClusterReport  # noqa: PLC0415 - JSON does without it

    refusal = next(iter(result.log.reasons.values()), None)
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


# Shared with `run`: the files of a run, and its report.


@contextmanager
def outputs(
    parts: RunParts, given: Mapping[str, Any]
) -> Iterator[tuple[Trace | None, Callable[[Reported, dict[str, Any]], None]]]:
    """Open the files of a run; yield its trace, if any, and a function that writes metrics.

    If the body raises, no file is left, and no directory that was made for the files.
    """
    path, out, others = given["trace"], given["out"], []
    if out is not None:
        path, *others = (out / name for name in (TRACE, SUMMARY, REQUESTS))
        if parts.config.allocation == "contiguous":
            path = None
    for written in filter(None, (path, *others)):
        refuse_overwrite(written, parts.workload.options().values())
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(_directory(out))
        trace = None
        if given["live"]:
            from kvcore.cli.live import live_trace  # noqa: PLC0415 - no other option needs it

            if parts.config.allocation == "contiguous":
                msg = "--live shows blocks, which --allocation contiguous has none of"
                raise InputError(msg)
            shown = live_trace(path, parts.workload.size, parts.header())
            trace = stack.enter_context(shown)
        elif path is not None:
            trace = stack.enter_context(Trace(path, **parts.header()))
        written = metrics_file(given["prometheus"], parts.workload, as_json=given["as_json"])
        yield trace, partial(_write_metrics, stack.enter_context(written))


def _write_metrics(
    write: Callable[[str], object] | None, result: Reported, document: dict[str, Any]
) -> None:
    if write is not None:
        from kvcore.report.prometheus import run_metrics  # noqa: PLC0415 - no other option needs it

        write(run_metrics(document, result.requests))


@contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Make a directory; if the body raises, remove it unless it was there before."""
    made = not path.exists()
    make_directory(path)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                path.rmdir()
        raise


def document_of(parts: RunParts, result: Result, scheduler: Scheduler) -> dict[str, Any]:
    """Return the JSON document of a run."""
    cache = result.cache
    plugins = (
        scheduler,
        cache.eviction,
        cache.prefix,
        cache.retention,
        result.latency,
        result.drafter,
    )
    tiers = () if cache.tiers is None else (level.tier for level in cache.tiers.levels)
    return {**result.summary(), "config": parts.describe(*plugins, *tiers)}


def cluster_document(parts: ClusterParts, result: ClusterResult) -> dict[str, Any]:
    """Return the JSON document of a cluster."""
    first, server = result.lives[0][0].cache, parts.members[0]
    plugins = (server.scheduler(), first.eviction, first.prefix, first.retention)
    tiers = () if first.tiers is None else (level.tier for level in first.tiers.levels)
    more = server.latency(), result.router, *tiers
    return {**result.summary(), "config": parts.describe(*plugins, *more)}


def report_of(result: Result, document: dict[str, Any], **words: Any) -> SimulationReport:
    """Return the report of a run; `words` are further attributes of it."""
    from kvcore.report.simulation import SimulationReport  # noqa: PLC0415 - JSON does without it

    refusal = next(iter(result.log.reasons.values()), None)
    return SimulationReport(document, document["config"], refusal=refusal, **words)


def print_report(report: SimulationReport, *more: str) -> None:
    """Print the report of a run, with the sentences `more` below its headline."""
    columns, tiers = report.columns, report.tiers
    names = [tier["tier"] for tier in report.summary.get("tiers") or ()]
    print_sections(
        report.warning,
        "\n".join([report.headline, *more]),
        (["time", *columns], report.times, columns),
        (["quantity", "amount"], report.amounts, ()),
        *([(["tier", *names], tiers, ())] if tiers else []),
        (["time of blocks", *columns], report.resting, columns),
        report.thrashing,
        f"{report.closing}\n{report.setup}",
    )
