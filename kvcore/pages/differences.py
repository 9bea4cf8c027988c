"""What two traces of one workload evicted differently: exactly, block by block.

An eviction is an EVICT line of scope `cache`; each block it takes is a *loss*: the request that
needed the room, and the content of the block, which is its key and, where a key covers several
blocks, which of them. Where one request evicts the same content several times, as a preempted
one may, the n-th time is another loss than the first.

An eviction *differs* if any of its losses is not in the other trace. So it does not matter when
a request evicted, in how many lines, or from which spans: only what, and for whom. A content
that both traces evict, but for different requests, differs in both.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import attrs

from kvcore.pages.playback import EvictedContent, Playback

ByRequester = dict[int | str, list[EvictedContent]]


@attrs.frozen
class Differences:
    """The evictions in which two traces differ, the left and the right one.

    Attributes:
        blocks: of each trace a column: how many blocks of each row differ; none if the traces
            cannot be compared.
        note: what a reader must know: why nothing is marked, or which requests are in one
            trace only; empty if there is nothing to say.
    """

    blocks: tuple[array[int], ...]
    note: str = ""


def find_differences(left: Playback, right: Playback) -> Differences:
    """Find the evictions that differ. O(evicted blocks).

    Traces without a common request, or whose blocks or keys stand for other numbers of tokens,
    are not compared: no content of one is a content of the other. They are no error, since two
    pools of other blocks can still be watched side by side.
    """
    for field, name in (("block_size", "Blocks"), ("key_tokens", "Keys")):
        one, other = left.header[field], right.header[field]
        if one != other:
            note = (
                f"{name} stand for {one} tokens on the left and {other} on the right, so their "
                "contents cannot be compared: no eviction is marked."
            )
            return Differences((), note)
    one_ids, other_ids = _prompts(left), _prompts(right)
    common = len(one_ids.items() & other_ids.items())
    if not common:
        note = (
            "No request is in both traces, with the same prompt: no eviction is marked. Record "
            "both from one workload to see what differs."
        )
        return Differences((), note)
    evicted = _by_requester(left), _by_requester(right)
    ratio = left.ratio
    blocks = (
        _mark(len(left.rows["kind"]), evicted[0], evicted[1], ratio),
        _mark(len(right.rows["kind"]), evicted[1], evicted[0], ratio),
    )
    most = max(len(one_ids), len(other_ids))
    note = f"Only {common:,} of {most:,} requests are in both traces." if common < most else ""
    return Differences(blocks, note)


def _prompts(side: Playback) -> dict[int | str, Any]:
    """Return the last key of each prompt, by id: keys are chained, so it stands for all."""
    return dict(zip(side.prompts.ids, side.prompts.last_key, strict=True))


def _by_requester(side: Playback) -> ByRequester:
    found: ByRequester = defaultdict(list)
    for each in side.evicted:
        found[each.requester].append(each)
    return found


def _mark(rows: int, evicted: ByRequester, other: ByRequester, ratio: int) -> array[int]:
    """Return how many blocks of each row `other` has not evicted for the same request."""
    marks = array("i", bytes(4 * rows))
    for requester, lines in evicted.items():
        left_over = Counter(
            content for each in other.get(requester, ()) for content in _contents(each, ratio)
        )
        for each in lines:
            for content in _contents(each, ratio):
                if left_over[content]:
                    left_over[content] -= 1
                else:
                    marks[each.row] += 1
    return marks


def _contents(evicted: EvictedContent, ratio: int) -> Iterator[tuple[Any, int]]:
    """Yield the key of each block, and which of the key's blocks it is."""
    keys = evicted.keys
    return ((keys[at // ratio], at % ratio) for at in range(evicted.first, evicted.end))
