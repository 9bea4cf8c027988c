"""A digest of what a cache has evicted, by which runs of different kinds are compared."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from kvcore.request import KEY_BYTES, Key


class EvictionDigest:
    """Digests evicted blocks in order: equal digests, equal decisions.

    SHA-256 over the key of each block: the 16 bytes of a key, or the 16 bytes, big-endian, of
    an int. It depends neither on the spans of a cache nor on an engine's names for blocks.
    Generated blocks without keys are left out.

    Attributes:
        blocks: number of blocks that were added.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._sha = sha256()

    def add(self, key: Key, blocks: int = 1) -> None:
        """Add `blocks` evicted blocks of one key, which may be 32 hex digits. Costs 0.5 µs."""
        if isinstance(key, int):
            key = key.to_bytes(KEY_BYTES, "big")
        elif isinstance(key, str):
            key = bytes.fromhex(key)
        if isinstance(key, bytes):
            self._sha.update(key * blocks)
            self.blocks += blocks

    @classmethod
    def joined(cls, parts: Iterable[EvictionDigest]) -> EvictionDigest:
        """Return the digest of the digests of several caches, and the sum of their blocks."""
        digest = cls()
        for part in parts:
            digest.blocks += part.blocks
            digest._sha.update(part._sha.digest())  # noqa: SLF001 - of the same class
        return digest

    @property
    def hexdigest(self) -> str:
        """The digest so far, 64 hex digits."""
        return self._sha.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the number of blocks and the digest, for JSON."""
        return {"blocks": self.blocks, "digest": self.hexdigest}
