"""No prefix cache: nothing is shared, every prompt is computed whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Keys
from typing import Any, ClassVar

import attrs

from kvcore import EvictionPolicy, PrefixCache, Span
from kvcore.cache import Ids, Match, Sequence, SpanGeometry, root_span
from kvcore.request import Key


@attrs.define(slots=False, eq=False)
class NoPrefix(PrefixCache):
    """Share nothing: the baseline, and what engines do with prefix caching off."""

    name: ClassVar[str] = "none"

    def attach(
        self, pool: Any, eviction: EvictionPolicy, geometry: SpanGeometry, trace: Any
    ) -> None:
        """Make the empty root on which every sequence stands."""
        super().attach(pool, eviction, geometry, trace)
        self.root = root_span(geometry)

    def probe(self, keys: Keys[Key], limit: int, now: int) -> Match:
        """Match nothing."""
        del keys, limit, now
        return self.root, 0, 0, None

    def open(self, seq: Sequence, match: Match, now: int) -> None:
        """Put `seq` on the root."""
        del match, now
        seq.span = self.root

    def hit(self, seq: Sequence, now: int, *, again: bool) -> None:
        """Do nothing: there is no hit."""

    def undo(self, seq: Sequence, match: Match, now: int) -> None:
        """Do nothing: nothing was pinned."""

    def commit(self, seq: Sequence, upto: int, now: int) -> None:
        """Publish nothing."""

    def close(self, seq: Sequence, now: int) -> None:
        """Do nothing: nothing is pinned."""

    def fork(self, seq: Sequence, child: Sequence) -> None:
        """Do nothing: nothing is pinned."""

    def evict(self, blocks: int, requester: int | str, now: int) -> Ids | None:
        """Evict nothing; there never is anything to evict."""
        del blocks, requester, now
        return array("i")

    def spans(self) -> Iterator[Span]:
        """Yield nothing."""
        return iter(())

    def check_integrity(self) -> None:
        """Nothing can be wrong."""
