"""Why the tokens of a replay missed: by a trace of it, which is explained and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvcore import KVCache, Request, Trace
from kvcore_replay.misses.explain import explain
from kvcore_replay.misses.reasons import CATEGORIES, WAYS
from kvcore_replay.untimed import replay

if TYPE_CHECKING:
    from kvcore_replay.misses.reasons import Summary

_NEW = "compulsory"


def replay_summary(requests: Iterable[Request], cache: Callable[..., KVCache]) -> Summary:
    """Replay requests, serial and without a clock; return the summary of hits and misses.

    Args:
        requests: the requests, or a workload.
        cache: builds the empty cache; called with `trace`.

    Raises:
        InputError: a request cannot be read, or the block size does not fit its keys.
        PolicyError: the eviction policy failed.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        with Trace(path) as trace:
            replay(requests, cache(trace=trace))
        return explain(path).summary()


def missed_tokens(summary: Summary) -> dict[str, int]:
    """Return the tokens that missed by reason, without the reasons that have none.

    What no request had before is told apart by where prompts part from earlier ones.
    """
    tokens = {f"{_NEW}, {way}": lost.tokens for way, lost in summary.ways.items()}
    tokens |= {name: lost.tokens for name, lost in summary.categories.items() if name != _NEW}
    return {reason: count for reason, count in tokens.items() if count}


def meaning(reason: str) -> str:
    """Return the meaning of a reason, in words."""
    name, _, way = reason.partition(", ")
    return WAYS[way] if way else CATEGORIES[name]
