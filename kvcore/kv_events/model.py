"""What engines say of their KV blocks: stored, removed, cleared, moved; and batches of that.

One vocabulary for all formats; `kvcore.events.codecs` reads and writes each of them:

    decode(payload: bytes) -> Batch
    encode(batch: Batch) -> bytes

`decode` tells the formats apart: `msgpack`, which vLLM, SGLang and TensorRT-LLM publish over
ZMQ; `mooncake`, the Mooncake store's; `trtllm`, TensorRT-LLM's polled JSON; and `dynamo`, a
line of router events. It raises TraceError where a payload is no batch at all; an event that
cannot be read is kept as `Unread`, with its place and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import attrs

Hash: TypeAlias = int | bytes | str
"""A block's chained hash as its engine writes it: unsigned, signed, or bytes; a text where
a store names its objects so."""


Token: TypeAlias = int | str | tuple[int, int]
"""A token id; a text, where an engine has no id for it; or a pair of ids (EAGLE bigrams)."""


SECOND, MILLISECOND = 10**9, 10**6


@attrs.frozen
class Wire:
    """How an event or a batch was written, so that it is written the same way again.

    Attributes:
        array: as a positional array rather than a map.
        names: of its fields, in their order; those of an array, by its layout.
    """

    array: bool
    names: tuple[str, ...]


@attrs.frozen
class Block:
    """One block of a stored run, as a ledger follows it.

    `content` is equal for two blocks of the same tokens in one stream; None: not told.
    """

    hash: Hash
    parent: Hash | None
    content: Any
    medium: str | None


@attrs.frozen(kw_only=True)
class BlockStored:
    """A run of blocks, each the child of the one before it, is in the cache.

    Attributes:
        hashes: of the blocks, first to last.
        parent: hash of the block before the first; None: the run starts a prompt.
        tokens: of all blocks together; None: the stream does not tell tokens.
        block_size: tokens a block; None: not told.
        contents: where there are no tokens, a hash of each block's own.
        medium: the tier: `GPU`, `CPU`, `CPU_PINNED`, `DISK`, ...; None: not told.
        lora_id, lora_name: the adapter.
        extra_keys: per block, what else its hash depends on, untagged.
        group: of layers that share block tables (`group_idx`).
        more: the other fields under their own names, known or not; those of an array
            beyond its layout under `#` and their place.
        wire: how it was written; None: as the format writes it today. Not compared.
    """

    hashes: tuple[Hash, ...]
    parent: Hash | None = None
    tokens: tuple[Token, ...] | None = None
    block_size: int | None = None
    contents: tuple[Hash, ...] | None = None
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)
    wire: Wire | None = attrs.field(default=None, eq=False)

    def blocks(self) -> Iterator[Block]:
        """Yield its blocks, first to last."""
        parent = self.parent
        for value, content in zip(self.hashes, self._contents(), strict=True):
            yield Block(value, parent, content, self.medium)
            parent = value

    def _contents(self) -> tuple[Any, ...]:
        """Return what tells each block's tokens from others; None where that is not clear."""
        count, size = len(self.hashes), self.block_size or 0
        if self.tokens is not None and size and len(self.tokens) == count * size:
            return tuple(self.tokens[i * size : (i + 1) * size] for i in range(count))
        if self.contents is not None and len(self.contents) == count:
            return self.contents
        return (None,) * count


@attrs.frozen(kw_only=True)
class Page:
    """A block of TensorRT-LLM's polled events: tokens are pairs (id, extra id)."""

    hash: int
    tokens: tuple[tuple[int, int], ...]
    level: int
    priority: int
    more: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class PagesStored:
    """`BlockStored` as TensorRT-LLM's polled events tell it: each block has its own level."""

    pages: tuple[Page, ...]
    parent: int | None = None
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)

    def blocks(self) -> Iterator[Block]:
        """Yield its blocks, first to last."""
        parent = self.parent
        for page in self.pages:
            yield Block(page.hash, parent, page.tokens, level_medium(page.level))
            parent = page.hash


@attrs.frozen(kw_only=True)
class BlockRemoved:
    """Blocks are gone from a tier (`medium`; None: from wherever they were)."""

    hashes: tuple[Hash, ...]
    medium: str | None = None
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)
    wire: Wire | None = attrs.field(default=None, eq=False)


@attrs.frozen(kw_only=True)
class AllBlocksCleared:
    """The engine has dropped all of its blocks."""

    more: Mapping[str, Any] = attrs.field(factory=dict)
    wire: Wire | None = attrs.field(default=None, eq=False)


@attrs.frozen(kw_only=True)
class PoolCreated:
    """A pool was made, of so many blocks a cache level (TensorRT-LLM)."""

    levels: tuple[int, ...]
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class BlockUpdated:
    """A block has changed its cache level or its priority: (old, new) each (TensorRT-LLM)."""

    hash: int
    level: tuple[int, int] | None = None
    priority: tuple[int, int] | None = None
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Unread:
    """An event that cannot be read: as it was, and why, beginning with the place."""

    value: Any
    reason: str


Event: TypeAlias = (
    BlockStored
    | PagesStored
    | BlockRemoved
    | AllBlocksCleared
    | PoolCreated
    | BlockUpdated
    | Unread
)


@attrs.frozen
class Batch:
    """Events that were sent together.

    Attributes:
        ts: when, as written: seconds, in `mooncake` milliseconds; None: not told.
        events: in their order.
        dp_rank: the data-parallel rank; None: there is one, or it is not told.
        format: of which `encode` writes it.
        seq: its number in its publisher's stream, in formats that carry it inside.
        source: the publisher, likewise (Dynamo's `worker_id`).
        more: other fields around the events, under their own names.
        wire: how it was written, as an array or a map, trailing items may be left out; None:
            as an array. Not compared.
    """

    ts: float | None
    events: tuple[Event, ...]
    dp_rank: int | None = None
    format: str = "msgpack"
    seq: int | None = None
    source: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)
    wire: Wire | None = attrs.field(default=None, eq=False)

    @property
    def time(self) -> int | None:
        """When, in whole nanoseconds of the publisher's clock; None: not told."""
        if self.ts is None:
            return None
        return round(self.ts * (MILLISECOND if self.format == "mooncake" else SECOND))


def level_medium(level: int) -> str:
    """Return what a TensorRT-LLM cache level is called as a medium: level 0 is the GPU."""
    return f"LEVEL_{level}"
