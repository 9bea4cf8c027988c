"""Registers the verbs of experiments, and what they add to a run: metrics, and a search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore import hookimpl
from kvcore.hookspecs import ASK, CHECK, LOOK, PLUMBING, REAL, Mode, Ran, Running, Verb

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from kvcore.config import RunParts


@hookimpl
def kvcore_commands() -> dict[str, Verb]:
    """Return the verbs."""
    about = {
        "calibrate": "Fit a latency model to the measured steps of the CSV file STEPS.",
        "compare": "Compare eviction policies on WORKLOAD, by pool size.",
        "curve": "Show the hit ratios of eviction policies on WORKLOAD, by pool size.",
        "demo": "Watch what a KV cache does, on a model small enough to follow.",
        "explain": (
            "Explain why the prompt of REQUEST missed, or with --summary where hits were lost."
        ),
        "new": "Write a package with a plugin of KIND, called NAME: kvcore-NAME.",
        "plan": (
            "Find the fewest GPUs, and the least K/V memory and host RAM, for the SLO of "
            "WORKLOAD."
        ),
        "quality": (
            "Measure the loss of quality if a retention policy bounds K/V, or a codec shrinks "
            "it."
        ),
        "routers": (
            "Compare routers: simulate serving WORKLOAD with several servers under each of "
            "them."
        ),
        "size": (
            "Size the K/V of MODEL: a name of the list below, or the path of a config.json."
        ),
        "sweep": (
            "Run each combination of the workloads, policies, sizes and other options in "
            "NAME.TOML."
        ),
        "validate": (
            "Simulate the measured rows of FILE, and compare TTFT, TPOT and throughput."
        ),
    }
    groups = {
        "calibrate": CHECK,
        "validate": CHECK,
        "demo": LOOK,
        "quality": REAL,
        "new": PLUMBING,
    }
    return {
        name: Verb(f"kvcore_lab.cli.{name}:{name}", text, groups.get(name, ASK))
        for name, text in about.items()
    }


@hookimpl
def kvcore_modes() -> dict[str, Mode]:
    """Return the mode of contiguous memory."""
    return {
        "contiguous": Mode(
            parts="kvcore_lab.contiguous.config:ContiguousParts",
            report="kvcore_lab.report.paging:report_of",
            options="kvcore_lab.contiguous.options:ContiguousOptions",
            chosen_by=("allocation", "max_output"),
            refusal="memory is paged here: leave it out",
        )
    }


@hookimpl
def kvcore_options(verb: str) -> list[Any]:
    """Return the file for metrics of a run, and for simulations the search and prices."""
    if verb not in ("run", "simulate"):
        return []
    from kvcore_lab.cli.metrics import prometheus_option  # noqa: PLC0415 - of two verbs
    from kvcore_lab.cli.search import search_option  # noqa: PLC0415 - as above

    if verb == "run":
        return [prometheus_option]
    from kvcore_replay.cli.trace_options import gpu_price_option  # noqa: PLC0415 - as above

    return [prometheus_option, search_option, gpu_price_option]


@hookimpl
def kvcore_running(
    parts: RunParts, given: Mapping[str, Any]
) -> AbstractContextManager[Running] | None:
    """Write metrics of the run, with `--prometheus`; say where contiguous memory is now."""
    if not parts.traced:
        from kvcore_cli.verb import echo  # noqa: PLC0415 - few runs are contiguous

        now = "`kvcore demo paging` now; use that"
        echo(f"kvcore: --allocation contiguous is {now}", err=True)
    if given.get("prometheus") is None:
        return None
    from kvcore_lab.cli.metrics import measuring  # noqa: PLC0415 - for --prometheus alone

    return measuring(parts, given)


@hookimpl
def kvcore_ran(parts: RunParts, result: Any, given: Mapping[str, Any]) -> Ran | None:
    """Cost a simulation, search where its load is too high, and page contiguous memory."""
    if "search" not in given:
        return None
    from kvcore_lab.cli.search import ran_of  # noqa: PLC0415 - of simulations

    return ran_of(parts, result, given)
