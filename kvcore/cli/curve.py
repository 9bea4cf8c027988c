"""`kvcore curve`: what policies hit, by pool size from a thousandth of the footprint up."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import click
import orjson

from kvcore.analysis import curve as make_curves
from kvcore.analysis.mrc import POINTS
from kvcore.analysis.sweep.executors import cpus
from kvcore.cache.layout import ACCOUNTINGS
from kvcore.cli.compare import DEVICE, KV_DTYPE, MODEL
from kvcore.cli.model import find_or_read
from kvcore.cli.output import (
    emit_json,
    file_path,
    json_option,
    print_table,
    print_text,
    progress,
)
from kvcore.cli.workload import find_workload
from kvcore.errors import InputError
from kvcore.files import whole_file
from kvcore.models.catalogue import find_device
from kvcore.models.cost import PrefillCost
from kvcore.models.memory import KVLayout
from kvcore.models.spec import KV_DTYPES
from kvcore.plugins.manager import Plugins
from kvcore.report import CurvesReport
from kvcore.report.mrc import FORMS, matplotlib, plot
from kvcore.workloads.files import spare

POLICIES = "lru,lfu"
MOST_POINTS = 100_000
KINDS = (*FORMS, "csv", "json")
"""What `--out` can write, by the end of the file's name."""


@click.command()
@click.argument("workload", required=False)
@click.option(
    "--eviction",
    metavar="LIST",
    help=f"Policies, such as lru,lfu:half_life=300,optimum.  [default: {POLICIES},optimum]",
)
@click.option(
    "--sizes",
    metavar="N|LIST",
    default=str(POINTS),
    show_default=True,
    help="How many pool sizes, or which, in blocks, such as 1000,3000.",
)
@click.option("--block-size", type=int, help="Tokens in a block.  [default: as in a key]")
@click.option(
    "--count",
    type=click.Choice(ACCOUNTINGS),
    default="keys",
    show_default=True,
    help="Count whole keys, or tokens.",
)
@click.option("--model", help="Tell sizes in bytes of its K/V as well; as for `size`.")
@click.option(
    "--kv-dtype", type=click.Choice(KV_DTYPES), help=f"Of that K/V.  [default: {KV_DTYPE}]"
)
@click.option("--seed", type=int, help="For policies that draw random numbers.")
@click.option("--jobs", type=int, help="Processes that replay.  [default: one a CPU]")
@click.option(
    "--out",
    callback=file_path,
    metavar="FILE",
    help=f"Write a plot or the numbers instead: .{', .'.join(KINDS)}.",
)
@json_option
def curve(
    *,
    workload: str | None,
    eviction: str | None,
    sizes: str,
    block_size: int | None,
    count: str,
    model: str | None,
    kv_dtype: str | None,
    seed: int | None,
    jobs: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Show what policies hit on WORKLOAD, by pool size up to one that holds everything.

    WORKLOAD is a workload plugin with options, such as zipf:requests=1000,skew=1.5, or a
    file of any known format. Without it, it is the trace that comes with kvcore.

    Requests are replayed one after another, without a clock. In `keys` counting LRU takes
    one pass for all sizes and the optimum next to nothing for each; other policies are
    replayed once a size.
    """
    plugins = Plugins()
    source = find_workload(workload, plugins)
    kind = _kind(out)
    if out is not None:
        spare(source, out)
    if kv_dtype is not None and model is None:
        msg = "--kv-dtype says what a token takes of the K/V of --model: give that too"
        raise InputError(msg)
    spec = find_or_read(MODEL if model is None else model)
    tokens = source.key_tokens if block_size is None else block_size
    layout = None if model is None else KVLayout(spec, kv_dtype or KV_DTYPE, tokens)
    points, blocks = _sizes(sizes)
    if kind in FORMS:
        matplotlib()
    with ExitStack() as stack:
        file = None if out is None else stack.enter_context(whole_file(out))
        curves = make_curves(
            source,
            _contest(count) if eviction is None else eviction,
            blocks,
            points=points,
            block_size=block_size,
            accounting=count,
            recompute=PrefillCost.of(spec, find_device(DEVICE)),
            seed=seed,
            jobs=cpus() if jobs is None else jobs,
            plugins=plugins,
            progress=progress,
        )
        report = CurvesReport(curves, layout)
        if file is not None:
            _write(report, kind, file)
    if as_json:
        emit_json({"schema": 1, **report.document()})
    elif out is None:
        print_text(report.headline)
        if not report.empty:
            print_table(report.headers, report.rows, right=report.headers)
            print_text(report.reading)


def _contest(count: str) -> str:
    """Return the policies where none are given: the optimum where it is known."""
    return f"{POLICIES},optimum" if count == "keys" else POLICIES


def _write(report: CurvesReport, kind: str, file: TextIO) -> None:
    """Write what was asked for."""
    if kind == "csv":
        report.write_csv(file)
    elif kind == "json":
        document = {"schema": 1, **report.document()}
        option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        file.buffer.write(orjson.dumps(document, option=option))
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
    if not re.fullmatch(r"\s*[0-9]{1,10}\s*(,\s*[0-9]{1,10}\s*)*", text):
        msg = (
            f"--sizes {text!r:.60}: expected a number of sizes, such as {POINTS}, or sizes in "
            "blocks, such as 1000,3000"
        )
        raise InputError(msg)
    numbers = [int(number) for number in text.split(",")]
    if len(numbers) > 1:
        return POINTS, numbers
    if numbers[0] > MOST_POINTS:
        msg = f"--sizes {text}: that many points are too many; give {MOST_POINTS} or fewer"
        raise InputError(msg)
    return numbers[0], None
