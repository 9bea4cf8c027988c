"""`kvcore curve`: what policies hit, by pool size from a thousandth of the footprint up."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import click
import orjson

from kvcore.analysis import curve as make_curves
from kvcore.analysis.mrc import POINTS
from kvcore.cli.compare import CODEC, DEVICE, MODEL, pool_sizes
from kvcore.cli.options import (
    block_size_option,
    part_options,
    policies_option,
    shared,
    tokens_of,
    workload_argument,
)
from kvcore.cli.output import (
    emit_json,
    file_path,
    json_option,
    print_notes,
    print_table,
    print_text,
    progress,
)
from kvcore.cli.verb import Count, verb
from kvcore.config import find_workload
from kvcore.errors import InputError
from kvcore.files import atomic_file, refuse_overwrite
from kvcore.host import cpus
from kvcore.models.catalogue import find_device, load_model
from kvcore.models.cost import PrefillCost
from kvcore.models.memory import KVLayout
from kvcore.plugins.manager import Plugins
from kvcore.report import CurvesReport
from kvcore.report.mrc import FORMS, matplotlib, plot
from kvcore.workloads import part_of

POLICIES = "lru,lfu"
MOST_POINTS = 100_000
KINDS = (*FORMS, "csv", "json")
"""What `--out` can write, by the end of the file's name."""


@verb(
    "kvcore curve --out curve.svg",
    "kvcore curve requests.jsonl --eviction lru,s3fifo --sizes 1000,2000,4000",
)
@workload_argument
@part_options
@policies_option(POLICIES)
@click.option(
    "--sizes",
    metavar="N|LIST",
    default=str(POINTS),
    help="Number of pool sizes, or a list of them in blocks, such as 1000,3000.",
)
@block_size_option
@shared("accounting", default="keys")
@shared("model", default=None, text="Model whose K/V sizes are shown in bytes besides blocks.")
@shared(
    "codec",
    default=None,
    text=f"Codec: how that K/V is kept, such as int8.  [default: {CODEC}]",
)
@shared("seed", default=None)
@click.option(
    "--jobs", type=Count(), help="Number of processes that replay.  [default: one a CPU]"
)
@click.option(
    "--out",
    callback=file_path,
    metavar="FILE",
    help=f"File for a plot, or for the numbers: .{', .'.join(KINDS)}.",
)
@json_option
def curve(workload: str | None, **given: Any) -> None:
    """Show what policies hit on WORKLOAD, by pool size up to one that holds everything.

    WORKLOAD is a workload plugin with options, such as zipf:requests=1000,skew=1.5, or a
    file of any known format; `-` reads stdin. Without it, it is the trace that comes with
    kvcore.

    Requests are replayed one after another, without a clock. In `keys` counting LRU takes
    one pass for all sizes and the optimum next to nothing for each; other policies are
    replayed once a size.
    """
    plugins = Plugins()
    source = part_of(find_workload(workload, plugins), given["limit"], given["window"])
    out, model = given["out"], given["model"]
    kind = _kind(out)
    if out is not None:
        refuse_overwrite(out, source.options().values())
    if given["codec"] is not None and model is None:
        msg = "--codec says what a token takes of the K/V of --model: give that too"
        raise InputError(msg)
    spec = load_model(MODEL if model is None else model)
    layout = None
    if model is not None:
        codec = plugins.build("codec", given["codec"] or CODEC)
        layout = KVLayout(spec, codec, tokens_of(source, given))
    points, blocks = _sizes(given["sizes"])
    policies = given["eviction"]
    if policies is None:  # the optimum where it is known
        policies = f"{POLICIES},optimum" if given["accounting"] == "keys" else POLICIES
    if kind in FORMS:
        matplotlib()
    with nullcontext() if out is None else atomic_file(out) as file:
        curves = make_curves(
            source,
            policies,
            blocks,
            points=points,
            block_size=given["block_size"],
            accounting=given["accounting"],
            recompute=PrefillCost.of(spec, find_device(DEVICE)),
            seed=given["seed"],
            jobs=cpus() if given["jobs"] is None else given["jobs"],
            plugins=plugins,
            progress=progress,
        )
        report = CurvesReport(curves, layout)
        if file is not None:
            _write(report, kind, file)
    if given["as_json"]:
        emit_json({"schema": 1, **report.document()})
    elif out is None:
        print_text(report.headline)
        if not report.empty:
            print_table(report.headers, report.rows, right=report.headers)
            print_text(f"{report.reading}\n{report.setup}")
    print_notes(source)


def _write(report: CurvesReport, kind: str, file: TextIO) -> None:
    """Write what was asked for."""
    if kind == "csv":
        report.write_csv(file)
    elif kind == "json":
        option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        file.buffer.write(orjson.dumps({"schema": 1, **report.document()}, option=option))
    else:
        file.buffer.write(plot(report, kind))


def _kind(out: Path | None) -> str:
    """Return what `--out` is to be, by its name."""
    kind = "" if out is None else out.suffix[1:].lower()
    if out is not None and kind not in KINDS:
        msg = f"--out {out}: a name says what is written; end it with .{', .'.join(KINDS)}"
        raise InputError(msg)
    return kind


def _sizes(text: str) -> tuple[int, list[int] | None]:
    """Read how many sizes, or which: (number, None) or (any number, sizes)."""
    hint = f"expected a number of sizes, such as {POINTS}, or sizes in blocks"
    numbers = pool_sizes("--sizes", text, hint)
    if len(numbers) > 1:
        return POINTS, numbers
    if numbers[0] > MOST_POINTS:
        msg = f"--sizes {text}: that many points are too many; give {MOST_POINTS} or fewer"
        raise InputError(msg)
    return numbers[0], None
