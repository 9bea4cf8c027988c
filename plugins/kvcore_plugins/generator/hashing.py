"""Numbers that look random and depend on nothing but what they are made from."""

from __future__ import annotations

from hashlib import blake2b


def hashed(*parts: int) -> int:
    """Return 64 bits that depend on all of `parts`."""
    written = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(written, digest_size=8).digest(), "little")


def uniform(*parts: int) -> float:
    """Return a number in [0, 1), one of 2^53 evenly spaced, that depends on all of `parts`."""
    return (hashed(*parts) >> 11) / 2**53
