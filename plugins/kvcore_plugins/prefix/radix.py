"""The radix prefix index: the tree of spans itself, matched by one comparison a span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from kvcore import InputError, PrefixIndex, Span
from kvcore.cache import common_prefix
from kvcore.request import Key


class Radix(PrefixIndex):
    """Walk down the tree of spans, from child to child.

    Block keys are chained, so a span matches iff its last key does, and where it does not
    the divergence is found by bisection: matching costs O(spans on the path + log keys).
    Storing, splitting and evicting cost nothing, since the cache keeps the tree anyway.

    Options:
        evict: `blocks` evicts no more blocks than are missing, from the tail of a leaf; `leaf`
            evicts leaves whole, as SGLang does, and surplus blocks become free. Then the
            blocks of each step of a prompt are a leaf, and all generated blocks another.

    Source: the radix tree of SGLang (Zheng et al., 2024, section 3), with runs of chained
    block keys in place of token strings.
    """

    name: ClassVar[str] = "radix"
    walks_tree: ClassVar[bool] = True
    later_options = ("evict",)

    def __init__(self, evict: Literal["blocks", "leaf"] = "blocks") -> None:
        """Check the option."""
        if evict not in ("blocks", "leaf"):
            msg = f"radix: evict={evict!r} is not known; there are: blocks, leaf"
            raise InputError(msg)
        self.evict = evict
        self.evicts_leaves = evict == "leaf"

    def match(self, keys: Sequence[Key], limit: int, after: Span) -> tuple[Span, int]:
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
                stop = end if end < limit else limit
                return child, common_prefix(child.path_keys, keys, position, stop, ratio)
            span, position = child, end
        return span, position
