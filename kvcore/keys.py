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

    `key_i = H(key_{i-1}, tokens_i, H(extra_i))` with BLAKE2b of 128 bits, and block size
    and salt hashed in place of the first parent. All parts have fixed lengths, so prompts
    share a key only if they share everything up to it (a collision among n keys has
    probability n² / 2¹²⁹). O(tokens) in C.

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
    key = _hash(_written([block_size, salt]))
    keys = []
    for index in range(len(ids) // block_size):
        more = extra.get(index) if extra else None
        tail = _hash(_written(sorted(more.items()))) if more else b""
        key = _hash(key, data[index * step : (index + 1) * step], tail)
        keys.append(key)
    return keys


def word_tokens(text: str, vocabulary: int) -> list[int]:
    """Return a token id below `vocabulary` for each word of `text`: its hash. O(text)."""
    return [
        int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little") % vocabulary
        for word in text.split()
    ]


def _hash(*parts: bytes | memoryview) -> bytes:
    """Hash parts of fixed length, so that none can be taken for a part of another."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _written(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError as error:
        msg = f"a salt is text, extra keys are text or integers by tag, not {value!r}: {error}"
        raise InputError(msg) from error
