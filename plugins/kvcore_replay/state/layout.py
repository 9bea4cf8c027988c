"""The blocks of traced requests, computed from HEADER and REQUEST lines alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container
from typing import Any

import attrs

from kvcore.cache.layout import GENERATED
from kvcore.trace import events


@attrs.define(eq=False)
class TracedPrompt:
    """A traced request in blocks.

    Attributes:
        id: id of the request.
        tokens: tokens of the prompt.
        keys: the key of block j is `keys[j // ratio]`, `ratio` being the layout's.
        blocks: number of blocks of the whole prompt.
        cacheable: number of blocks, from the first on, that may be shared.
        lookup: number of blocks that are looked up.
        limit: largest number of blocks that can hit.
        unkeyed: whether `limit` is lower because keys are missing.
        share: number of blocks that its client lets others use; None: all.
        generated: `keys`, and names for the blocks of output without keys that stay cached.
        full: number of keys of the workload that its text has filled, of which `keys` are some.
    """

    id: int | str
    tokens: int
    keys: list[Any]
    blocks: int
    cacheable: int
    lookup: int
    limit: int
    unkeyed: bool
    share: int | None
    generated: list[Any] = attrs.field(factory=list)
    full: int = 0


@attrs.frozen
class TraceLayout:
    """The blocks of requests, computed from HEADER and REQUEST lines alone.

    Independent of the arithmetic of `kvcore.cache.layout`, which the check of a trace tests.

    Attributes:
        count: `keys` or `tokens`, by which blocks are counted.
        block_size, key_tokens: tokens of a block, and of a key.
        ratio: blocks of a key; 1 where a block has several keys.
        stride: keys of a block; 1 where a key has several blocks.
    """

    count: str
    block_size: int
    key_tokens: int
    ratio: int
    stride: int

    @classmethod
    def from_header(cls, header: events.Header) -> TraceLayout:
        """Return the layout that HEADER gives.

        Raises:
            ValueError: block size and key size do not fit.
        """
        count, size, tokens = header.count, header.block_size, header.key_tokens
        fits = tokens % size == 0 or (size % tokens == 0 and count == "tokens")
        if not fits:
            msg = f"blocks of {size} tokens do not fit keys of {tokens} in {count!r} counting"
            raise ValueError(msg)
        return cls(count, size, tokens, max(1, tokens // size), max(1, size // tokens))

    def prompt(self, request: events.Request) -> TracedPrompt:
        """Return the prompt of a REQUEST in blocks.

        Raises:
            ValueError: its keys have another number of tokens than those of HEADER.
        """
        if request.key_tokens != self.key_tokens:
            msg = f"keys of {request.key_tokens} tokens; HEADER says {self.key_tokens}"
            raise ValueError(msg)
        keys: list[Any] = request.keys
        shares = request.hints.get("share", True) if request.hints else True
        share = None if shares is True else shares // self.block_size
        if self.count == "keys":
            blocks = len(keys) * self.ratio
            return TracedPrompt(
                *(request.id, request.prompt, keys, blocks),
                *(blocks, blocks, blocks),
                unkeyed=not keys,
                share=share,
            )
        size, length = self.block_size, request.prompt
        full = length // size
        output_keys = request.output_keys
        if output_keys:
            keys = keys[: length // self.key_tokens] + output_keys
        keys = keys[self.stride - 1 :: self.stride]
        keyed = len(keys) * self.ratio
        # The last token is always computed: its logits are the first step of the output.
        limit = max(0, length - 1) // size
        return TracedPrompt(
            request.id,
            length,
            keys,
            blocks=-(-length // size),
            cacheable=keyed if output_keys else min(full, keyed),
            lookup=min(full, keyed),
            limit=min(limit, keyed),
            unkeyed=keyed < limit or not keys,
            share=share,
            full=length // self.key_tokens + len(output_keys or ()),
        )

    def append(self, prompt: TracedPrompt, keys: list[Any]) -> None:
        """Append the `keys` that the text of `prompt` has filled since."""
        # A block that has several keys goes by the last of them.
        prompt.keys.extend(keys[-(prompt.full + 1) % self.stride :: self.stride])
        prompt.full += len(keys)
        prompt.cacheable = len(prompt.keys) * self.ratio

    def name_generated(self, prompt: TracedPrompt, end: int) -> None:
        """Name the blocks from the end of `prompt` up to position `end`."""
        # In place, and each name once: spans that grow have this list.
        names, first = prompt.generated, prompt.tokens // self.block_size // self.ratio
        known = prompt.keys[:first]
        names += known[len(names) :]
        start, stop = first + len(names) - len(known), -(-end // self.ratio)
        names += [(GENERATED, prompt.id, index) for index in range(start, stop)]

    def tokens_of(self, prompt: TracedPrompt, output: int) -> int:
        """Return the number of tokens with K/V of a request with `output` generated tokens.

        The K/V of its last token is never computed; where keys are counted, only that of the
        prompt is, in whole blocks.
        """
        if self.count == "keys":
            return prompt.blocks * self.block_size
        return prompt.tokens + max(output - 1, 0)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens fill."""
        return -(-tokens // self.block_size)


def count_known(keys: list[Any], known: Container[Any]) -> int:
    """Return the number of keys of a prompt in `known`, from the first on. O(log keys).

    Keys are chained: where `known` has a key, it has all keys before it.
    """
    return bisect_left(keys, 1, key=lambda key: key not in known)
