"""Chained block keys from token ids."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import orjson

from kvcore.errors import InputError

KEY_BYTES = 16


def block_keys(
    tokens: Sequence[int],
    block_size: int,
    *,
    salt: str | None = None,
    extra: Mapping[int, Mapping[str, str | int]] | None = None,
) -> list[bytes]:
    """Return the chained keys of the full blocks of `tokens`: equal keys, equal prefixes.

    `key_i = H(key_{i-1}, tokens_i)` with BLAKE2b of 128 bits, so that prompts share a key
    only if they share everything up to it (a collision among n keys has probability
    n² / 2¹²⁹). O(tokens) in C.

    Args:
        tokens: token ids, 0 to 2⁶⁴ - 1.
        block_size: tokens in a block. A partial last block has no key.
        salt: what keeps prefixes apart, such as a tenant. Enters the first block.
        extra: by block index, what else its K/V depends on, tagged by kind, such as
            `{0: {"lora": "sql"}, 3: {"image": "9f3c"}}`. Two kinds never collide.

    Raises:
        InputError: a block size below 1, a token id that is no unsigned integer, or a salt
            or extra key that cannot be written down.
    """
    if block_size < 1:
        msg = f"block size {block_size} must be positive"
        raise InputError(msg)
    try:
        # `iter`, because an array made from bytes would take them as its memory.
        ids = array("Q", iter(tokens))
    except (TypeError, OverflowError) as error:
        msg = f"token ids must be integers from 0 to 2^64 - 1: {error}"
        raise InputError(msg) from error
    if array("H", [1]).tobytes() != b"\x01\x00":
        ids.byteswap()
    data = memoryview(ids).cast("B")
    step = block_size * ids.itemsize
    key = b"" if salt is None else _tagged({"salt": salt})
    keys = []
    for index in range(len(ids) // block_size):
        digest = blake2b(key, digest_size=KEY_BYTES)
        digest.update(data[index * step : (index + 1) * step])
        if extra and extra.get(index):
            digest.update(_tagged(extra[index]))
        key = digest.digest()
        keys.append(key)
    return keys


def _tagged(extra: Mapping[str, str | int]) -> bytes:
    """Encode extra keys so that no two sets of them, nor tokens, read alike."""
    try:
        return orjson.dumps(sorted(extra.items()))
    except TypeError as error:
        msg = f"extra keys {dict(extra)!r} must be strings or integers by tag: {error}"
        raise InputError(msg) from error
