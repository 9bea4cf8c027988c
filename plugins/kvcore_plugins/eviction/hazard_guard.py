"""The guard of `hazard`: LRU, until two shadows of the pool show that it hits less."""

from __future__ import annotations

from math import sqrt
from zlib import crc32

from kvcore import EvictionPolicy, KVCache, Request
from kvcore.request import Key
from kvcore_plugins.eviction.lru import LRU

_WINDOW = 2000
"""Requests after which a difference of hits counts for 1/e."""

_START, _LIMIT = 2.0, 2.5
"""Spreads that the sum of differences must exceed to end LRU; and its maximum."""

_LEAST = 20
"""Requests that must have differed by then: the spread of fewer is itself uncertain."""

_SMALLEST = 750
"""Blocks of a pool below four times which the shadows see every conversation."""


class Guard:
    """Decides between LRU and another order, which it compares in two shadows of the pool.

    The shadows are caches that count blocks of one key, and hold none. When a request has
    ended both replay the one before: one evicts by LRU, one by `policy`. The differences of
    their hits, faded over requests, make a sum with a spread, the root of the sum of their
    squares. Above two spreads LRU ends, and below 0 it begins again. Since this is asked after
    every request, a sum that only chance moves would exceed fewer spreads every now and then.

    Shadows of large pools replay a share of the conversations, and are smaller by this share:
    1/2 from 3,000 blocks, 1/4 from 12,000, and so on.

    Attributes:
        is_lru: whether to evict as LRU.
    """

    def __init__(self, blocks: int, block_size: int, policy: EvictionPolicy) -> None:
        """Begin as LRU in a pool of `blocks` blocks of `block_size` tokens."""
        self._tokens, self._policy, self.is_lru = blocks * block_size, policy, True
        self._shadows: tuple[KVCache, KVCache] | None = None
        self._share = 1
        self._sum = self._squares = self._differences = 0.0
        self._request: Request | None = None

    def on_end(self, request: Request, conversation: Key | None, now: int) -> None:
        """Replay the request before `request`, which has ended, and decide.

        `conversation` is the first key of that before; None if it released nothing.
        """
        before, self._request = self._request, request
        if before is None or conversation is None or not before.keys:
            return
        size = before.key_tokens
        if self._shadows is None:
            blocks = max(1, self._tokens // size)
            self._share = 1 << max(0, (blocks // _SMALLEST).bit_length() - 1) // 2
            lru, other = (
                KVCache(max(1, blocks // self._share), size, eviction=policy, accounting="keys")
                for policy in (LRU(), self._policy)
            )
            self._shadows = lru, other
        lru, other = self._shadows
        sampled = self._share == 1 or not crc32(repr(conversation).encode()) % self._share
        if not sampled or size != lru.geometry.block_size:
            return
        gain = _hits(other, before, now) - _hits(lru, before, now)
        keep = 1 - self._share / _WINDOW
        self._squares = self._squares * keep * keep + gain * gain
        self._differences = self._differences * keep + (gain != 0)
        spread = sqrt(self._squares)
        # Without a limit the gains of an hour would have to be lost before LRU begins again.
        limit = _LIMIT * spread
        self._sum = max(-limit, min(self._sum * keep + gain, limit))
        if self._sum > _START * spread and self._differences > _LEAST:
            self.is_lru = False
        elif self._sum < 0:
            self.is_lru = True


def _hits(shadow: KVCache, request: Request, now: int) -> int:
    """Return the blocks of `request` that hit in a shadow, which serves it at once."""
    size = shadow.geometry.block_size
    tokens, room = len(request.keys) * size, shadow.pool.blocks * size
    first = None if tokens <= room else room - shadow.probe(request, now) * size
    seq = shadow.open(request, first, now)
    shadow.commit(seq, seq.tokens - seq.computed, now)
    shadow.close(seq, now)
    return seq.hit_blocks
