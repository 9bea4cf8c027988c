"""How a traced request lies in blocks, told from HEADER and REQUEST lines alone.

Written apart from the cache's own arithmetic, which a replay is there to check.
"""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(eq=False)
class Prompt:
    """A traced request in blocks.

    Attributes:
        id: the request's.
        keys: the key of block j is `keys[j // ratio]`, `ratio` being the layout's.
        blocks: what the whole prompt occupies.
        cacheable: how many blocks from the first on may be shared.
        lookup: how many are looked up.
        limit: how many can hit at most.
        unkeyed: whether it is for want of keys that no more can hit.
    """

    id: int | str
    keys: list[Any]
    blocks: int
    cacheable: int
    lookup: int
    limit: int
    unkeyed: bool


@attrs.frozen
class Layout:
    """The two countings over keys coarser or finer than a block.

    `ratio` is blocks a key; where a block is several keys, `stride` is how many.
    """

    count: str
    block_size: int
    key_tokens: int
    ratio: int
    stride: int

    @classmethod
    def of(cls, header: dict[str, Any]) -> Layout:
        """Read the layout from HEADER.

        Raises:
            ValueError: block size and key size do not fit.
        """
        count, size, tokens = header["count"], header["block_size"], header["key_tokens"]
        fits = tokens % size == 0 or (size % tokens == 0 and count == "tokens")
        if not fits:
            msg = f"blocks of {size} tokens do not fit keys of {tokens} in {count!r} counting"
            raise ValueError(msg)
        return cls(count, size, tokens, max(1, tokens // size), max(1, size // tokens))

    def prompt(self, line: dict[str, Any]) -> Prompt:
        """Lay out the request of a REQUEST line.

        Raises:
            ValueError: its keys stand for another number of tokens than the header says.
        """
        if line["key_tokens"] != self.key_tokens:
            msg = f"keys of {line['key_tokens']} tokens; HEADER says {self.key_tokens}"
            raise ValueError(msg)
        keys = line["keys"]
        if self.count == "keys":
            blocks = len(keys) * self.ratio
            return Prompt(line["id"], keys, blocks, blocks, blocks, blocks, unkeyed=not keys)
        size, length = self.block_size, line["prompt"]
        full = length // size
        output_keys = line.get("output_keys")
        if output_keys:
            keys = keys[: length // self.key_tokens] + output_keys
        keys = keys[self.stride - 1 :: self.stride]
        keyed = len(keys) * self.ratio
        most = max(0, length - 1) // size
        return Prompt(
            line["id"],
            keys,
            blocks=-(-length // size),
            cacheable=keyed if output_keys else min(full, keyed),
            lookup=min(full, keyed),
            limit=min(most, keyed),
            unkeyed=keyed < most or not keys,
        )
