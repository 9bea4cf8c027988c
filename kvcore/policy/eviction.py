"""The eviction contract: which unpinned leaf leaves when blocks are missing."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import attrs

from kvcore.policy.plugin import Plugin
from kvcore.policy.span import Span
from kvcore.request import Request


@attrs.define(slots=False, eq=False)
class EvictionPolicy(Plugin):
    """Keeps an order of the evictable spans; the core asks it for one victim at a time.

    Every method but `victim` does nothing here: override what the policy needs to know.
    What is not overridden is never called, so it costs nothing. `now` is in nanoseconds
    and never decreases. Spans are told apart by identity.

    One instance serves one cache.

    Attributes:
        expires_spans: whether the policy ever sets `span.expires`.
        blocks, block_size: the pool it serves, set by `attach`.
        beneficiary: id of the request for whom victims are being asked.
        ahead: how many requests to come untimed replay tells it of (None: all of them),
            since nothing waits there; see `awaited`. Set it before the cache is made.
    """

    kind: ClassVar[str] = "eviction"
    expires_spans: ClassVar[bool] = False

    blocks: int = attrs.field(init=False, default=0, repr=False)
    block_size: int = attrs.field(init=False, default=0, repr=False)
    beneficiary: int | str | None = attrs.field(init=False, default=None, repr=False)
    ahead: int | None = attrs.field(init=False, default=0, repr=False)

    def attach(self, blocks: int, block_size: int) -> None:
        """Learn the pool's size in blocks and a block's in tokens. Called once."""
        self.blocks = blocks
        self.block_size = block_size

    def inserted(self, span: Span, now: int) -> None:
        """Learn that `span` was committed as a new span. It is pinned."""

    def accessed(self, span: Span, now: int) -> None:
        """Learn that another request's admission hit `span`. It is pinned."""

    def grown(self, span: Span, blocks: int) -> None:
        """Learn that its creator appended `blocks` blocks to `span`. It is pinned."""

    def split(self, upper: Span, lower: Span) -> None:
        """Learn that `lower` lost its head to the new span `upper`, its parent now.

        `lower` keeps its place and its `data`. `upper` starts pinned, with copied
        statistics and no data: copy `lower.data` here if the policy uses it.
        """

    def joined(self, upper: Span, lower: Span) -> None:
        """Learn that a split was taken back (a later step of the same call failed)."""

    def pinned(self, span: Span) -> None:
        """Learn that the pins of `span` rose from 0: it may not be a victim now."""

    def released(self, span: Span, now: int) -> None:
        """Learn that the pins of `span` fell to 0.

        Called along a path from leaf to root, so for inner spans as well.
        """

    def unpinned(self, span: Span, now: int) -> None:
        """Learn that a pin was taken back (a later step of the same call failed).

        The pins of `span` are 0 again, its recency is what it was, and it belongs where
        it stood before `pinned`. Unless overridden this is `released`.
        """
        self.released(span, now)

    def leaf(self, span: Span) -> None:
        """Learn that an unpinned span lost its last child."""

    def trimmed(self, span: Span, blocks: int) -> None:
        """Learn that the last `blocks` blocks of `span` were evicted; the rest stays."""

    def removed(self, span: Span, reason: str) -> None:
        """Learn that `span` leaves the cache (`capacity` or `expired`).

        `span.keys()` and `span.parent` can still be read.
        """

    def missed(self, request: Request, hit_blocks: int, now: int) -> None:
        """Learn that a first admission hit only `hit_blocks` blocks of its prompt."""

    def awaited(self, request: Request, now: int, *, front: bool = False) -> None:
        """Learn that `request` waits to be served: it arrived, or was preempted.

        It goes behind those that wait already, or with `front` before them: the order in
        which they queued up, not the scheduler's.
        """

    def unawaited(self, request: Request, now: int) -> None:
        """Learn that `request` waits no longer: it has a seat, or is about to wait anew."""

    @abstractmethod
    def victim(self, now: int) -> Span:
        """Return the unpinned leaf to evict next, without forgetting it.

        The core evicts from its tail as much as it misses, and says so by `trimmed` or
        `removed`. Asked only while an unpinned leaf exists.
        """

    def tail(self, span: Span) -> int:
        """Return how many blocks, 1 or more, at the end of a victim may leave at once.

        Before more of it goes, `victim` is asked again: for policies to which not all
        blocks of a span are worth the same. Unless overridden, all of them.
        """
        return span.end - span.start

    def state(self) -> Any:
        """Return a value that two policies which decide alike compare equal by.

        It may refer to spans. `restore` brings it back while those spans are cached.
        """
        return None

    def restore(self, state: Any) -> None:
        """Go back to what `state()` returned."""
