"""Registers the verbs that make pages."""

from __future__ import annotations

from kvcore import hookimpl
from kvcore.hookspecs import LOOK, Verb


@hookimpl
def kvcore_commands() -> dict[str, Verb]:
    """Return the verbs."""
    about = {
        "report": "Make a page that reports results: one file to send, which opens offline.",
        "tour": "Make a page that explains the KV cache, for learners.",
        "view": "Make a page that plays the TRACE of a run, or TRACE and OTHER side by side.",
    }
    return {
        name: Verb(f"kvcore_pages.cli.{name}:{name}", text, LOOK)
        for name, text in about.items()
    }
