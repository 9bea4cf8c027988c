"""What a router thinks is cached where: its own index, events that come late, or all."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvcore.cache import KVCache
from kvcore.cluster.router import PrefixView
from kvcore.errors import InputError
from kvcore.request import Key, Request


@attrs.define(eq=False)
class SentIndex(PrefixView):
    """Knows what was sent where: the blocks of a prompt are where its last request went."""

    _holders: dict[Key, set[int]] = attrs.field(factory=dict, init=False)

    def find(self, request: Request, now: int) -> Mapping[int, int]:
        """Return the tokens of the prompt that each replica is thought to have."""
        del now
        found: dict[int, int] = {}
        for place, key in enumerate(request.keys, 1):
            holders = self._holders.get(key)
            if not holders:
                break
            for replica in holders:
                found[replica] = place * request.key_tokens
        return found

    def sent(self, request: Request, replica: int, now: int) -> None:
        """Remember that the prompt is cached there."""
        del now
        for key in request.keys:
            self._holders.setdefault(key, set()).add(replica)

    def lost(self, replica: int, now: int) -> None:
        """Forget all that was sent there."""
        del now
        for holders in self._holders.values():
            holders.discard(replica)

    def __str__(self) -> str:
        """Return the view as `parse_view` reads it."""
        return "index"


@attrs.define(eq=False)
class ExactView(PrefixView):
    """Knows what each cache holds at the moment: what no real router can."""

    _caches: dict[int, KVCache] = attrs.field(factory=dict, init=False)

    wants_events = True

    def connect(self, replica: int, cache: KVCache) -> None:
        """Look into `cache` from now on."""
        self._caches[replica] = cache

    def find(self, request: Request, now: int) -> Mapping[int, int]:
        """Return the tokens of the prompt that would hit in each cache."""
        found = {
            number: cache.probe(request, now) * cache.geometry.block_size
            for number, cache in self._caches.items()
        }
        return {number: tokens for number, tokens in found.items() if tokens}

    def lost(self, replica: int, now: int) -> None:
        """Look away from its cache."""
        del now
        self._caches.pop(replica, None)

    def __str__(self) -> str:
        """Return the view as `parse_view` reads it."""
        return "exact"


def parse_view(text: str) -> PrefixView:
    """Build a view from text: `index` or `exact`.

    Raises:
        InputError: another name.
    """
    views = {"index": SentIndex, "exact": ExactView}
    if text not in views:
        msg = f"{text!r} is no view; there are: {', '.join(views)}"
        raise InputError(msg)
    return views[text]()
