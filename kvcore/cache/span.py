"""A span: a run of consecutive cached blocks that share one access history."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvcore.cache.layout import GENERATED, BlockLayout
from kvcore.request import DEFAULT_PRIORITY, Key


class Span:
    """A node of the prefix tree: the unit that an eviction policy orders.

    Only the cache writes to it, except that the policy writes `data`, and a TTL policy
    `expires`. Positions count blocks from the start of the prompt.

    Attributes:
        id: serial number of the span, never reused.
        start, end: block positions `[start, end)` in every prompt that contains it.
        parent: the span before it; None once it has left the cache.
        children: the spans that continue it, by their first key; None or empty for a leaf.
        ref_count: number of pins, of open sequences and clients. A pinned span is never
            evicted.
        created, last_access: times in ns. Several spans may have the same; the serial numbers
            below order them.
        created_order: serial number of its creation.
        created_by: id of the request that stored it; None for the root.
        last_hit_order: serial number of the last admission that hit it, or that stored it.
        last_request: id of the request of that admission.
        released_order: serial number of the release that last made `ref_count` 0. A path is
            numbered from leaf to root, so a parent has a higher number than its children.
        hit_count: number of first admissions of other requests that hit it.
        priority, priority_until: retention priority, and when (ns) it ends; None: never.
        expires: the time (ns) from which on it no longer matches; None: never.
        tenant: tenant of the request that stored it.
        data: data of the eviction policy; not copied on a split.
        geometry: the layout of blocks and keys, the same for all spans of a cache.
        path_keys: the keys of a prompt that contains it; block j has
            `path_keys[j // geometry.ratio]`.
        ids: ids of its blocks, first to last; None where the pool only counts.
        creator: the sequence that may still append to it; None once that has closed, or
            another one has used the span.
    """

    __slots__ = (
        "children", "created", "created_by", "created_order", "creator", "data", "end",
        "expires", "geometry", "hit_count", "id", "ids", "last_access", "last_hit_order",
        "last_request", "parent", "path_keys", "priority", "priority_until", "ref_count",
        "released_order", "start", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        id: int,  # noqa: A002 - as it is read
        start: int,
        end: int,
        parent: Span | None,
        geometry: BlockLayout,
        path_keys: Sequence[Key],
        ids: array[int] | None,
        now: int,
        created_order: int,
        last_hit_order: int,
        last_request: int | str,
        tenant: str | None = None,
    ) -> None:
        """Make a leaf that was never hit, pinned by who stores it at `now` (ns)."""
        self.id = id
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[Key, Span] | None = None
        self.ref_count = 1
        self.created = now
        self.last_access = now
        self.created_order = created_order
        self.last_hit_order = last_hit_order
        self.last_request = last_request
        self.created_by: int | str | None = last_request
        self.released_order = 0
        self.hit_count = 0
        self.priority = DEFAULT_PRIORITY
        self.priority_until: int | None = None
        self.expires: int | None = None
        self.tenant = tenant
        self.data: Any = None
        self.geometry = geometry
        self.path_keys = path_keys
        self.ids = ids
        self.creator: object | None = None

    def head(self, id: int, end: int, key: Key) -> Span:  # noqa: A002 - as above
        """Return a new span of the blocks before position `end`, pinned once more than this.

        It has a copy of the statistics, and this span as its child, by the `key` at `end`.
        """
        span = Span(
            id, self.start, end, self.parent, self.geometry, self.path_keys, None, self.created,
            self.created_order, self.last_hit_order, self.last_request, self.tenant,
        )  # fmt: skip
        span.children = {key: self}
        span.created_by = self.created_by
        span.ref_count = self.ref_count + 1
        span.last_access, span.released_order = self.last_access, self.released_order
        span.hit_count = self.hit_count
        span.priority, span.priority_until = self.priority, self.priority_until
        span.expires = self.expires
        return span

    @property
    def blocks(self) -> int:
        """Number of blocks in it."""
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Number of tokens in it."""
        return (self.end - self.start) * self.geometry.block_size

    @property
    def depth(self) -> int:
        """Number of tokens before it."""
        return self.start * self.geometry.block_size

    @property
    def turn(self) -> int:
        """Number of requests that stored its path, each after the last. O(spans above)."""
        span, turn = self, 0
        while span.parent is not None:
            turn += span.created_by != span.parent.created_by
            span = span.parent
        return turn

    @property
    def is_leaf(self) -> bool:
        """Whether it has no children."""
        return not self.children

    @property
    def is_generated(self) -> bool:
        """Whether it is output without keys, which one request alone can hit."""
        # Output begins a span of its own (`keep_generated`), so the last key is as all are.
        key = self.path_keys[(self.end - 1) // self.geometry.ratio]
        return type(key) is tuple and key[0] == GENERATED

    @property
    def recompute_seconds(self) -> float:
        """Seconds to compute its last block again while all blocks before it are cached."""
        size = self.geometry.block_size
        return self.geometry.recompute_seconds((self.end - 1) * size, size)

    @property
    def loss_seconds(self) -> float:
        """The lower of `recompute_seconds` and the seconds to load a block from a tier."""
        return min(self.recompute_seconds, self.geometry.reload_seconds)

    def priority_at(self, now: int) -> int:
        """Return the retention priority that holds at `now`; the default once it has ended."""
        if self.priority_until is not None and self.priority_until <= now:
            return DEFAULT_PRIORITY
        return self.priority

    def keys(self) -> list[Key]:
        """Return the keys that cover it, first to last. Costs O(keys)."""
        ratio = self.geometry.ratio
        return list(self.path_keys[self.start // ratio : (self.end - 1) // ratio + 1])

    def __copy__(self) -> Span:
        """Raise TypeError: a tree has one span at each position of a path."""
        msg = f"{self!r} cannot be copied: keep the span itself, or what is read from it"
        raise TypeError(msg)

    def __repr__(self) -> str:
        """Show id, place and pins."""
        return f"<Span {self.id}: blocks {self.start}-{self.end}, pins {self.ref_count}>"
