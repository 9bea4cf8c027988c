"""The prefix-index contract: where the cached blocks of a prompt are looked up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from kvcore.cache.span import Span
from kvcore.plugins.base import Plugin
from kvcore.request import Key


class PrefixMatch(NamedTuple):
    """The longest cached prefix of a prompt.

    Attributes:
        span: the deepest span that matches, at least in part.
        blocks: number of blocks that match.
        unpinned_blocks: number of these that no sequence pins, so that they can be evicted.
        expired: the expired span that would match next; None if there is none.
    """

    span: Span
    blocks: int
    unpinned_blocks: int
    expired: Span | None


class PrefixIndex(Plugin):
    """Finds the cached spans that a prompt begins with.

    The `SpanTree` of the cache keeps the spans, with their pins, splits and evictions: an index
    only implements `match`. It can walk the tree by `span.children`, or keep a table of its
    own by `insert`, `split` and `remove`. These three do nothing here; a method that is not
    overridden is never called, so it costs nothing.

    The key of block j of a span or prompt is `keys[j // ratio]`, with `ratio` blocks a key
    (`span.geometry.ratio`). Keys are chained: equal keys mean equal blocks and equal
    everything before them. A cached block's predecessor is always cached.

    One instance serves one cache. A method that raises ends the use of the cache.

    Attributes:
        shares: whether blocks are stored and shared at all.
        evicts_leaves: whether a victim is evicted whole, even if fewer of its blocks would be
            enough; the others become free. May be an option.
        block_spans: whether every span is one block, as in engines that cache block by block.
            May be an option.
        walks_tree: whether `match` does nothing but walk down the tree by `span.children`,
            which the core in C then does itself. It is read from the class that defines
            `match`.
    """

    kind: ClassVar[str] = "prefix"
    shares: ClassVar[bool] = True
    evicts_leaves = False
    block_spans = False
    walks_tree: ClassVar[bool] = False

    @abstractmethod
    def match(self, keys: Sequence[Key], limit: int, after: Span) -> tuple[Span, int]:
        """Return how far the prompt of `keys` is cached: the deepest span, and a position.

        The first `after.end` blocks of the prompt are known to be those down to `after`,
        which is the root, with `end` 0, for a new prompt. Of the blocks from there to
        position `limit`, as many match as are cached, wherever their spans end. The answer
        is the span of the last block that matches, and the position after that block; it is
        `after` and `after.end` if there is none. Pins and expiry do not matter here.

        Changes nothing.
        """

    def insert(self, span: Span, first: int) -> None:
        """Called when the blocks of `span` from position `first` on have become cached.

        The span is new, or its last blocks are. Its parent is in the tree.
        """

    def split(self, upper: Span, lower: Span) -> None:
        """Called when the first blocks of `lower` have moved to the new span `upper`.

        `upper` is the parent of `lower` now, and `lower` begins where it ends.
        """

    def remove(self, span: Span, first: int) -> None:
        """Called when the blocks of `span` from position `first` on are about to leave.

        The span leaves with them if `first` is its start. It has no children.
        """
