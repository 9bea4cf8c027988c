"""Registers the verbs that read traces, and what they show of a run while it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore import hookimpl
from kvcore.hookspecs import ASK, CHECK, LOOK, PLUMBING, Ran, Running, Verb

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from kvcore.config import RunParts


@hookimpl
def kvcore_commands() -> dict[str, Verb]:
    """Return the verbs."""
    about = {
        "export": (
            "Export the TRACE of a run as KV events, requests or tracks, for other tools."
        ),
        "plot": (
            "Plot a TRACE, or the RESULT of a run: a directory that `--out` of simulate or "
            "run wrote."
        ),
        "replay": (
            "Replay the trace FILE: rebuild the cache line by line, and check every line."
        ),
        "watch": (
            "Watch the TRACE of a run: its pool and queue, hits and evictions, by its clock."
        ),
        "whatif": (
            "Run the requests of the trace FILE again, with other options, beside the recorded "
            "run."
        ),
    }
    groups = {"export": PLUMBING, "replay": CHECK, "whatif": ASK}
    return {
        name: Verb(f"kvcore_replay.cli.{name}:{name}", text, groups.get(name, LOOK))
        for name, text in about.items()
    }


@hookimpl
def kvcore_options(verb: str) -> list[Any]:
    """Return options that show a run while it is made, and bill it."""
    if verb not in ("run", "simulate"):
        return []
    from kvcore_replay.cli.trace_options import live_option, price_option  # noqa: PLC0415 - of two verbs

    return [live_option] if verb == "run" else [live_option, price_option]


@hookimpl
def kvcore_running(
    parts: RunParts, given: Mapping[str, Any]
) -> AbstractContextManager[Running] | None:
    """Show the run while it is made, with `--live`."""
    if not given.get("live"):
        return None
    from kvcore_replay.cli.live import showing  # noqa: PLC0415 - for --live alone

    return showing(parts, given)


@hookimpl
def kvcore_ran(parts: RunParts, result: Any, given: Mapping[str, Any]) -> Ran | None:
    """Return what hits saved in a simulation, and the bill of the run, with `--price`."""
    ran = Ran()
    if parts.config.mode == "simulate" and parts.traced:
        from kvcore_replay.savings import savings_of  # noqa: PLC0415 - of simulations

        ran = savings_of(parts, result)
    if given.get("price") is not None:
        from kvcore_replay.cli.trace_options import billed  # noqa: PLC0415 - for --price alone

        bills = billed(parts, result, given)
        ran = Ran({**ran.fields, **bills.fields}, [*ran.sections, *bills.sections])
    return ran
