"""The radix prefix index: the tree of spans itself, matched by one comparison a span."""

from __future__ import annotations

from collections.abc import Sequence as Keys
from typing import ClassVar

from kvcore import PrefixIndex, Span
from kvcore.request import Key


class Radix(PrefixIndex):
    """Walk down the tree of spans, from child to child.

    Block keys are chained, so a span matches iff its last key does, and where it does not
    the divergence is found by bisection: matching costs O(spans on the path + log keys).
    Storing, splitting and evicting cost nothing, since the tree is kept anyhow.

    Source: the radix tree of SGLang (Zheng et al., 2024, section 3), with runs of chained
    block keys in place of token strings.
    """

    name: ClassVar[str] = "radix"

    def match(self, keys: Keys[Key], limit: int, after: Span) -> tuple[Span, int]:
        """Return the deepest span that matches. O(spans on the path + log keys)."""
        span, position = after, after.end
        ratio = after.geometry.ratio
        while position < limit:
            children = span.children
            if not children:
                break
            child = children.get(keys[position // ratio])
            if child is None:
                break
            end = child.end
            last = (end - 1) // ratio
            if end > limit or keys[last] != child.path_keys[last]:
                return child, _end_of_match(child, keys, end if end < limit else limit)
            span, position = child, end
        return span, position


def _end_of_match(span: Span, keys: Keys[Key], stop: int) -> int:
    """Return the position where `keys` part from `span`, at most `stop`, by bisection.

    The key at `span.start` is known to match.
    """
    ratio = span.geometry.ratio
    own = span.path_keys
    low, high = span.start // ratio, (stop - 1) // ratio
    if keys[high] == own[high]:
        return stop
    while high - low > 1:
        middle = (low + high) // 2
        if keys[middle] == own[middle]:
            low = middle
        else:
            high = middle
    return high * ratio
