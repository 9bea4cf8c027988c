"""What the optimum would have hit at each admission of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import attrs

from kvcore.trace.layout import Prompt


@attrs.frozen(eq=False)
class Turn:
    """A first admission, and which later ones want its blocks next.

    Attributes:
        prompt: what it admits.
        runs: (admission, first block, end) of those that are wanted again, by the number of
            the admission that is the next to have them, in rising order.
    """

    prompt: Prompt
    runs: list[tuple[int, int, int]] = attrs.field(factory=list)


def optimum_hits(turns: Sequence[Turn], pool: int) -> Iterator[int]:
    """Yield for each of `turns` how many blocks, from its first on, the optimum would hit.

    The optimum serves one after another, in a pool of so many blocks: what a turn hits is
    cached of it; its prompt must fit, its shareable blocks stay; of all others those leave
    that are wanted furthest away, deepest first among equals. In `keys` counting that is
    exactly `kvcore.lab.Optimum`. In `tokens` counting it is the same rule, for blocks that
    are full; the partial one makes room and is gone. Costs O(runs · log turns).

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
    Systems Journal 1966, for the blocks of a prefix tree.
    """
    never = len(turns)
    wanted = [0] * (never + 1)
    # Negated, so that the furthest comes first; those of the past have no blocks, come last.
    furthest: list[int] = []
    held = 0
    for now, turn in enumerate(turns):
        prompt, extent = turn.prompt, wanted[now]
        yield min(extent, prompt.limit)
        held -= extent
        kept = min(prompt.cacheable, pool)
        excess = held + max(min(prompt.blocks, pool), kept) - pool
        while excess > 0:
            last = -furthest[0]
            count = min(wanted[last], excess)
            wanted[last] -= count
            held -= count
            excess -= count
            if not wanted[last]:
                heappop(furthest)
        rest = kept
        for after, first, end in (*turn.runs, (never, 0, kept)):
            count = min(min(end, kept) - min(first, kept), rest)
            if count:
                if not wanted[after]:
                    heappush(furthest, -after)
                wanted[after] += count
                rest -= count
        held += kept
