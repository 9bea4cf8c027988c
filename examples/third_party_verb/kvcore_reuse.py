"""Count the blocks of a workload that a later prompt uses again: what a cache could save."""

from collections import Counter

import click

from kvcore import Plugins, Ran, Verb, hookimpl


@hookimpl
def kvcore_commands():
    """Register the verb."""
    return {"reuse": Verb("kvcore_reuse:reuse", "Count the blocks of WORKLOAD used again.")}


@click.command()
@click.argument("workload", required=False)
def reuse(workload):
    """Count the blocks of WORKLOAD, and those that a later prompt uses again."""
    from kvcore.workloads import find_workload  # noqa: PLC0415 - the list of verbs does without

    click.echo(sentence(*counted(find_workload(workload, Plugins()))))


@hookimpl
def kvcore_options(verb):
    """Add an option to `kvcore simulate`."""
    text = "Count the blocks of the workload that are used again."
    return [click.option("--reuse", is_flag=True, help=text)] if verb == "simulate" else []


@hookimpl
def kvcore_ran(parts, given):
    """Count the blocks of a run with the option: a field of its JSON, and a sentence."""
    if not given.get("reuse"):
        return None
    blocks, again = counted(parts.workload)
    return Ran({"reuse": {"blocks": blocks, "used_again": again}}, [sentence(blocks, again)])


def counted(requests):
    """Return the number of blocks of the prompts, and of those that are used again."""
    uses = Counter(key for request in requests for key in request.keys)
    return len(uses), sum(count > 1 for count in uses.values())


def sentence(blocks, again):
    """Return the counts as a sentence."""
    return f"{again:,} of {blocks:,} blocks are used again ({again / max(blocks, 1):.1%})."
