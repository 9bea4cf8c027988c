"""`kvcore quality`: the loss of quality under bounded or compressed K/V, at equal bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvcore.errors import InputError
from kvcore.hookspecs import MODEL, POLICIES, REQUESTS
from kvcore_cli.options import Command, shared
from kvcore_cli.output import emit_json, input_option, json_option, print_sections, progress
from kvcore_cli.verb import Count, option, plugin_completion, verb
from kvcore_lab.quality import DEFAULTS, FULL, FULL_CODEC, measure
from kvcore_lab.report.quality import QualityReport
from kvcore_replay.cli.plot_option import plot_file, plot_option

RETENTION, CODEC, BUDGET = "h2o,snapkv,window,random", "fp16,int4", "0.1,0.25,0.5"


def _number(flag: str, least: int = 1, **settings: Any) -> Callable[[Command], Command]:
    """Return the option of a number of the texts, with the default of `measure`."""
    default = getattr(DEFAULTS, flag.lstrip("-").replace("-", "_"))
    return option(flag, heading=REQUESTS, type=Count(least), default=default, **settings)


@verb(
    "kvcore quality --plot quality.svg",
    "kvcore quality --generator huggingface:model=DIR --text book.txt --retention snapkv,tova",
)
@shared("generator")
@shared("backend")
@shared("dtype")
@click.option(
    "--retention",
    help="Retention policies, such as h2o,window:sinks=4; `full` is always measured.  "
    f"[default: {RETENTION}; with --codec and no --budget {FULL}]",
    **plugin_completion("retention", "LIST"),
)
@click.option(
    "--codec",
    help="Codecs, such as fp16,kivi:bits=2; the first one keeps the full K/V that budgets are "
    f"shares of.  [default: {CODEC}; with --retention {FULL_CODEC}]",
    **plugin_completion("codec", "LIST"),
)
@option(
    "--budget",
    heading=POLICIES,
    metavar="LIST",
    help="Bytes that a policy may keep, as shares of the bytes of all tokens.  "
    f"[default: {BUDGET}]",
)
@input_option(
    "--text",
    heading=REQUESTS,
    help="Text file to compute.  "
    "[default: random tokens, followed by tokens that the generator samples]",
)
@_number("--prompt-tokens", help="Number of tokens of a prompt.")
@_number("--tokens", help="Number of tokens after a prompt to compare.")
@_number("--texts", help="Number of texts, and of haystacks to search.")
@click.option("--block-size", type=Count(), default=16, help="Number of tokens in a KV block.")
@_number("--needles", least=0, help="Number of questions about each haystack.")
@option(
    "--announce/--no-announce",
    heading=REQUESTS,
    default=DEFAULTS.announced,
    help="End the haystack with the questions, so that policies can see them.",
)
@option(
    "--needle-generator",
    heading=MODEL,
    help="Generator that answers the questions.  [default: induction for transformer, else "
    "that of --generator]",
    **plugin_completion("generator"),
)
@shared("threads")
@shared("seed", default=DEFAULTS.seed, text="Seed of texts, haystacks, and plugins that draw.")
@plot_option
@json_option
def quality(**given: Any) -> None:
    """Measure the loss of quality if a retention policy bounds K/V, or a codec shrinks it.

    A generator computes the same texts with all of its K/V, and with the part of it that each
    policy and codec leave at each budget of bytes. Three differences are measured: those of
    attention's output, of the distribution of the next token, and of the share of needles
    that are found in a haystack.

    Policies alone are measured in one codec, and codecs alone without policies.
    """
    text, policies, codecs = given["text"], given["retention"], given["codec"]
    alone = codecs and not given["budget"]
    given["retention"] = policies or (FULL if alone else RETENTION)
    given["codec"] = codecs or (FULL_CODEC if policies else CODEC)
    with plot_file(given["picture"], [] if text is None else [text]) as write:
        report = QualityReport(
            measure(
                str(given["generator"]),
                backend=str(given["backend"]),
                text=None if text is None else _read(text),
                budgets=_budgets(given["budget"] or BUDGET),
                announced=given["announce"],
                progress=progress,
                **{name: given[name] for name in AS_GIVEN},
            )
        )
        write(report.chart())
    if given["as_json"]:
        emit_json({"schema": 1, **report.document()})
    else:
        print_sections(*report.sections, compact=True)


AS_GIVEN = (
    *("retention", "codec", "dtype", "block_size", "prompt_tokens", "tokens", "texts"),
    *("needles", "needle_generator", "threads", "seed"),
)
"""Options with the names of arguments of `measure`."""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        msg = f"--text {path}: not UTF-8 at byte {error.start}: give a file of text"
        raise InputError(msg) from error


def _budgets(text: str) -> list[float]:
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        msg = f"--budget {text}: expected shares of the full bytes, such as 0.1,0.25"
        raise InputError(msg) from None
