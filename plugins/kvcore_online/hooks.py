"""Registers the server and the proxy."""

from __future__ import annotations

from kvcore import hookimpl
from kvcore.hookspecs import REAL, Verb


@hookimpl
def kvcore_commands() -> dict[str, Verb]:
    """Return the verbs."""
    about = {
        "route": "Route the requests of an OpenAI-style API to several servers.",
        "serve": "Serve a model to clients of an OpenAI-style API, streamed or not.",
    }
    return {
        name: Verb(f"kvcore_online.cli.{name}:{name}", text, REAL)
        for name, text in about.items()
    }
