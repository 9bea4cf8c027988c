"""Registers the verbs of the judge, and the workloads of its panel."""

from __future__ import annotations

from kvcore import hookimpl
from kvcore.hookspecs import ASK, CHECK, LOOK, Verb


@hookimpl
def kvcore_commands() -> dict[str, Verb]:
    """Return the verbs."""
    about = {
        "judge": "Judge the eviction policy in FILE: its rules, then its score.",
        "leaderboard": "Rank eviction policies by one protocol.",
        "workbench": "Make a site that scores an eviction policy in the browser.",
    }
    groups = {"judge": CHECK, "leaderboard": ASK, "workbench": LOOK}
    return {
        name: Verb(f"kvcore_judge.cli.{name}:{name}", text, groups[name])
        for name, text in about.items()
    }


@hookimpl
def kvcore_workloads() -> dict[str, str]:
    """Return the workloads that are made for the public panel."""
    classes = {"agents": "Agents", "recency": "Recency"}
    return {name: f"kvcore_judge.streams:{place}" for name, place in classes.items()}


@hookimpl
def kvcore_formats() -> dict[str, list[set[str]]]:
    """Return that the generated workloads read no files."""
    return {"agents": [], "recency": []}
