"""Report on a search for options with which the queue of a server does not grow."""

from __future__ import annotations

from collections.abc import Mapping


def holding(options: Mapping[str, float], *, many: bool = False) -> str:
    """Return a sentence about the `options` with which the queue does not grow.

    `many` says that a number of servers was searched.
    """
    if not options:
        if many:
            return "No number of replicas was found with which it would hold."
        return "Neither a lower rate nor more GPUs were found with which it would hold."
    flags = (f"--{name.replace('_', '-')} {n:.12g}" for name, n in options.items())
    return (
        f"It would hold with {' or '.join(flags)}: simulated with "
        f"{'each' if len(options) > 1 else 'it'}, the queue does not grow to the end."
    )
