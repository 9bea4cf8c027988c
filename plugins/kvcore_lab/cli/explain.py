"""`kvcore explain`: the reasons of misses in a trace or a workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from kvcore.config import find_workload
from kvcore.errors import InputError
from kvcore.files import input_path
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.cost import PrefillCost
from kvcore.plugins.manager import Plugins
from kvcore.workloads import Workload, part_of
from kvcore_cli.options import part_options, shared
from kvcore_cli.output import (
    emit_json,
    json_option,
    print_notes,
    print_sections,
    progress,
    reading,
    trace_in,
)
from kvcore_cli.verb import Count, complete_workload, flag_of, plugin_completion, verb
from kvcore_events.recording import first_json
from kvcore_lab.cli.compare import DEVICE, MODEL
from kvcore_lab.cli.lab_options import known_model
from kvcore_lab.comparison import SHARING, compare_policies
from kvcore_plugins.workload._tables import row_ids
from kvcore_plugins.workload.file_workload import FileWorkload
from kvcore_plugins.workload.mooncake import Mooncake
from kvcore_replay.cli.trace_options import price_option, replica_option
from kvcore_replay.misses.explain import explain as explain_trace
from kvcore_replay.misses.reasons import Explanation, Id
from kvcore_replay.report.misses import RequestReport, SummaryReport

if TYPE_CHECKING:
    from kvcore_replay.pricing import PriceModel

EVICTION = "lru"
ACCOUNTING = "keys"

TOP = 5
"""Rows in each ranking of a summary, unless --top says otherwise."""

SHOWN = 3
"""The most ids that an error names, beside the last."""


@verb(
    "kvcore explain run.jsonl.gz --summary",
    "kvcore explain run.jsonl.gz 7",
    "kvcore explain mooncake 7 --blocks 5000 --eviction lfu",
)
@click.argument("source", default="mooncake", shell_complete=complete_workload)
@click.argument("request", required=False)
@click.option("--summary", is_flag=True, help="Explain all requests together.")
@click.option(
    "--top",
    type=Count(),
    help=f"With --summary: number of rows in each ranking.  [default: {TOP}]",
)
@replica_option
@part_options
@shared("blocks", text="Of a workload: number of KV blocks in the pool of its replay.")
@click.option(
    "--eviction",
    **plugin_completion("eviction"),
    help=f"Of a workload: eviction policy of its replay.  [default: {EVICTION}]",
)
@shared(
    "block_size",
    text="Of a workload: number of tokens in a KV block.",
    otherwise="as in a key",
)
@shared(
    "accounting",
    default=None,
    text="Of a workload: count blocks by keys, or by tokens.",
    otherwise=ACCOUNTING,
)
@click.option(
    "--prefix",
    **plugin_completion("prefix"),
    help=f"Of a workload: prefix cache of its replay.  [default: {SHARING}]",
)
@shared("seed", default=None, text="Of a workload: seed of policies that draw random numbers.")
@price_option
@json_option
def explain(
    source: str,
    request: str | None,
    *,
    summary: bool,
    top: int | None,
    price: PriceModel | None,
    replica: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Explain why the prompt of REQUEST missed, or with --summary where hits were lost.

    SOURCE is a trace, as --trace of compare, simulate and run writes it, or the directory that
    --out of simulate or run wrote, or a workload as for compare (by default the trace that
    comes with kvcore), which is then replayed in --blocks blocks, one request after another.
    An unfinished trace is explained up to its cut. REQUEST is an id of kvcore, mostly the row
    from 0; of a log also an id that its row has, in any field whose name ends in "id".

    With --price, SOURCE is a workload, such as the log of a chat API; the command explains why
    the API did not read more from its own cache: lapsed TTLs, edited prompts, evictions.

    In the trace of a cluster, each request is explained by the replica that served it last;
    blocks that another replica had when the request was routed were lost by the router.
    """
    if (request is None) is not summary:
        msg = "say what to explain: a REQUEST, such as `kvcore explain FILE 7`, or --summary"
        raise InputError(f"{msg}, not both" if summary else msg)
    if top is not None and (request is not None or price is not None):
        whose = "--price has none" if request is None else f"{request} is one request"
        msg = f"--top is of the rankings of a --summary, and {whose}: leave it out"
        raise InputError(msg)
    plugins = Plugins()
    source = trace_in(source)
    is_trace = price is None and _is_trace(source, plugins)
    workload: Workload | None = None
    if replica is not None and not is_trace:
        msg = f"{source} is a workload, which has no replicas: leave --replica out"
        raise InputError(msg)
    if price is not None:
        _billed(source, request, price, given, plugins, as_json=as_json)
        return
    if is_trace:
        _refuse(source, given)
        path = input_path(source)
        with reading("explaining", path) as tick:
            explanation = explain_trace(path, replica=replica, tick=tick)
    else:
        workload = find_workload(source, plugins, given["seed"])
        explanation = _replayed(workload, source, plugins, given)
    report: SummaryReport | RequestReport
    if request is None:
        sums = explanation.summary(TOP if top is None else top)
        report, fields = SummaryReport.from_explanation(explanation, sums), sums.as_dict()
    else:
        reasons = explanation.of(_named(request, explanation.requests, workload))
        report, fields = RequestReport(explanation, reasons), explanation.request_dict(reasons)
    if as_json:
        emit_json(explanation.as_dict() | fields)
    else:
        print_sections(*report.sections)


def _named(request: str, ids: Iterable[Id], source: Workload | None) -> str:
    """Return the id of the request that has the id `request`, or has it in its log.

    Raises:
        InputError: it is that of several, or of none.
    """
    names = [str(name) for name in ids]
    if request in names or not isinstance(source, FileWorkload | Mooncake):
        return request
    if source.path is None:  # the trace that comes with kvcore has no ids
        return request
    rows, some = set[str](), dict[str, str]()
    for row, own in row_ids(source):
        some = some or own
        if request in own.values():
            rows.add(str(row))
    parts = [(name, *name.partition("/")[::2]) for name in names]
    matches = [name for name, row, turn in parts if row in rows or (turn and row == request)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        why = f"{len(matches)} requests have this id: give one of {', '.join(matches[:SHOWN])}"
    elif rows:
        why = (
            f"row {', '.join(sorted(rows))} of {source.path}, from 0, was left out, or is not "
            "within --limit and --window"
        )
    else:
        examples = [f"{field} such as {name}" for field, name in some.items()]
        few = names if len(names) <= SHOWN else [*names[:SHOWN], "...", names[-1]]
        shown = "; or ".join([", ".join(few), *examples])
        why = f"{source.path} has none. Its {len(names):,} ids: {shown}"
    msg = f"request {request!r}: {why}"
    raise InputError(msg)


def _billed(
    source: str,
    request: str | None,
    price: PriceModel,
    given: Mapping[str, Any],
    plugins: Plugins,
    *,
    as_json: bool,
) -> None:
    """Explain which tokens of prompts an API did not read from its cache."""
    from kvcore_replay.misses.prompts import explain_prompts  # noqa: PLC0415 - for prices alone

    kept = ("limit", "window", "seed")
    needless = [name for name in given if name not in kept and given[name] is not None]
    if needless:
        options = ", ".join(map(flag_of, needless))
        msg = f"--price explains the cache of an API, which has no {options}: leave it out"
        raise InputError(msg)
    whole = find_workload(source, plugins, given["seed"])
    workload = part_of(whole, given["limit"], given["window"])
    with progress(f"explaining {workload.name}", workload.size) as tick:
        explanation = explain_prompts(workload, price, source=workload.name, tick=tick)
    chosen = None
    if request is not None:
        ids = [prompt.request for prompt in explanation.prompts]
        chosen = explanation.of(_named(request, ids, whole))
    if as_json:
        emit_json(explanation.as_dict() | ({} if chosen is None else chosen.as_dict()))
    else:
        from kvcore_replay.report.billing import PromptReport  # noqa: PLC0415 - as above

        report = PromptReport(explanation)
        print_sections(*(report.sections if chosen is None else [report.about(chosen)]))
    print_notes(workload)


def _is_trace(source: str, plugins: Plugins) -> bool:
    """Return True if `source` is the file of a trace, and names no workload plugin."""
    path = input_path(source)
    name = source.partition(":")[0].strip()
    if name in plugins.names("workload") or not path.is_file():
        return False
    line = first_json(path)
    return isinstance(line, dict) and line.get("event") == "HEADER"


def _refuse(source: str, given: Mapping[str, object]) -> None:
    """Refuse options of workloads: those of a trace are in its header."""
    options = [flag_of(name) for name, value in given.items() if value is not None]
    if options:
        msg = (
            f"{source} is a trace: what it was recorded with is in it, so {', '.join(options)} "
            "cannot change; `kvcore whatif` runs its requests under another policy"
        )
        raise InputError(msg)


def _replayed(
    whole: Workload, source: str, plugins: Plugins, named: Mapping[str, Any]
) -> Explanation:
    """Replay a workload into a temporary trace, and explain that."""
    workload = part_of(whole, named["limit"], named["window"])
    if named["blocks"] is None:
        msg = f"{source} is a workload: say how large the pool is, such as --blocks 1000"
        msg += ", or what an API charges, such as --price openai"
        raise InputError(msg)
    # The seconds are those of the model in the log, if the catalogue has it.
    model = find_model(known_model(workload) or MODEL)
    with TemporaryDirectory(prefix="kvcore-") as folder:
        trace = Path(folder) / "trace.jsonl"
        compare_policies(
            workload,
            named["eviction"] or EVICTION,
            named["blocks"],
            block_size=named["block_size"],
            accounting=named["accounting"] or ACCOUNTING,
            prefix=named["prefix"] or SHARING,
            recompute=PrefillCost.for_model(model, find_device(DEVICE)),
            seed=named["seed"],
            trace=trace,
            plugins=plugins,
            progress=progress,
        )
        print_notes(workload)
        with reading("explaining", trace) as tick:
            return explain_trace(trace, source=workload.name, tick=tick)
