"""KV-cache events in one vocabulary for all formats, with the shared parts of their readers.

An engine publishes batches of events: blocks were stored, removed, cleared or moved. The
modules `vllm`, `tensorrt_llm`, `dynamo` and `mooncake` read payloads into these classes by
msgspec Structs with the fields of the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import attrs
import msgspec

from kvcore.errors import InputError, shorten
from kvcore.units import NS_PER_S

__all__ = [
    "AllBlocksCleared",
    "Block",
    "BlockRemoved",
    "BlockStored",
    "BlockUpdated",
    "EventBatch",
    "Page",
    "PagesStored",
    "PoolCreated",
    "UnparsedEvent",
]

NS_PER_MS = 10**6

LONGEST_REASON = 300
"""Most characters of the reason why a payload cannot be read."""

Hash: TypeAlias = int | bytes | str
"""The chained hash of a block as its engine writes it: an unsigned or signed integer, or bytes;
a string where a store names objects."""

Token: TypeAlias = int | str | tuple[int, int]
"""A token id; a string, where an engine has no id; or a pair of ids (EAGLE bigrams)."""


@attrs.frozen
class Block:
    """One block of a stored run.

    Attributes:
        hash: hash of the block and all blocks before it.
        parent: hash of the block before it; None: it begins a prompt.
        content: equal for two blocks with the same tokens in one stream; None: unknown.
        medium: the tier; None: unknown.
    """

    hash: Hash
    parent: Hash | None
    content: Any
    medium: str | None


@attrs.frozen(kw_only=True)
class BlockStored:
    """A run of blocks, each the child of the one before it, is in the cache.

    Attributes:
        hashes: hashes of the blocks, first to last.
        parent: hash of the block before the first; None: the run begins a prompt.
        tokens: tokens of all blocks; None: the format has none.
        block_size: number of tokens of a block; None: unknown.
        contents: for each block, a hash of its own tokens, in formats without tokens.
        medium: the tier, such as `GPU`, `CPU`, `CPU_PINNED` or `DISK`; None: unknown.
        lora_id, lora_name: the adapter; None: no adapter.
        extra_keys: for each block, the values besides tokens that its hash depends on.
        group: number of the group of layers that share block tables (`group_idx`).
        more: all other fields of the event, by their names in the format.
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

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks, first to last."""
        parent = self.parent
        for value, content in zip(self.hashes, self._contents(), strict=True):
            yield Block(value, parent, content, self.medium)
            parent = value

    def _contents(self) -> tuple[Any, ...]:
        """Return the content of each block; None where tokens and blocks do not match."""
        count, size = len(self.hashes), self.block_size or 0
        if self.tokens is not None and size and len(self.tokens) == count * size:
            return tuple(self.tokens[i * size : (i + 1) * size] for i in range(count))
        if self.contents is not None and len(self.contents) == count:
            return self.contents
        return (None,) * count


@attrs.frozen(kw_only=True)
class Page:
    """A block of TensorRT-LLM's polled events.

    Attributes:
        hash: hash of the block and all blocks before it.
        tokens: pairs of token id and extra id.
        level: the cache level; 0 is the GPU.
        priority: retention priority.
        more: all other fields.
    """

    hash: int
    tokens: tuple[tuple[int, int], ...]
    level: int
    priority: int
    more: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class PagesStored:
    """A run of blocks is in the cache, each at a cache level of its own (TensorRT-LLM).

    Attributes:
        pages: the blocks, first to last.
        parent: hash of the block before the first; None: the run begins a prompt.
        group: the group of layers, by its window (`window_size`).
        more: all other fields.
    """

    pages: tuple[Page, ...]
    parent: int | None = None
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks, first to last."""
        parent = self.parent
        for page in self.pages:
            yield Block(page.hash, parent, page.tokens, level_medium(page.level))
            parent = page.hash


@attrs.frozen(kw_only=True)
class BlockRemoved:
    """Blocks were removed from a tier (`medium`; None: from a tier that has them)."""

    hashes: tuple[Hash, ...]
    medium: str | None = None
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class AllBlocksCleared:
    """All blocks of the engine were dropped."""

    more: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class PoolCreated:
    """A pool was created, with its number of blocks at each cache level (TensorRT-LLM)."""

    levels: tuple[int, ...]
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class BlockUpdated:
    """The cache level or the priority of a block, each (old, new), changed (TensorRT-LLM)."""

    hash: int
    level: tuple[int, int] | None = None
    priority: tuple[int, int] | None = None
    group: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class UnparsedEvent:
    """An event that cannot be parsed.

    Attributes:
        value: the event as the payload has it.
        reason: why it cannot be parsed, beginning with the field.
    """

    value: Any
    reason: str


Event: TypeAlias = (
    BlockStored
    | PagesStored
    | BlockRemoved
    | AllBlocksCleared
    | PoolCreated
    | BlockUpdated
    | UnparsedEvent
)


@attrs.frozen
class EventBatch:
    """Events that were published together.

    Attributes:
        ts: the time as the format writes it: seconds, in `mooncake` milliseconds; None: the
            format has no time.
        events: the events in their order.
        dp_rank: the data-parallel rank; None: there is one rank, or it is unknown.
        format: wire format in which `encode` writes the batch.
        seq: number of the batch in the stream of its publisher; None: not in the payload.
        source: the publisher (Dynamo's `worker_id`); None: not in the payload.
        more: all other fields around the events, by their names in the format.
        raw: the decoded payload, which `encode` and recordings write unchanged; None: the
            batch was not decoded. Not compared, and not copied by `attrs.evolve`.
    """

    ts: float | None
    events: tuple[Event, ...]
    dp_rank: int | None = None
    format: str = "msgpack"
    seq: int | None = None
    source: int | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)
    raw: Any = attrs.field(default=None, init=False, eq=False, repr=False)

    @property
    def time(self) -> int | None:
        """Return the time in whole nanoseconds of the publisher's clock; None: it has none."""
        if self.ts is None:
            return None
        return round(self.ts * (NS_PER_MS if self.format == "mooncake" else NS_PER_S))

    def keep_raw(self, value: Any) -> EventBatch:
        """Set `raw` on a batch that its reader has just made; return the batch."""
        object.__setattr__(self, "raw", value)
        return self


def level_medium(level: int) -> str:
    """Return the medium that stands for a cache level of TensorRT-LLM."""
    return f"LEVEL_{level}"


class DecodeError(ValueError):
    """A payload that violates its format; the message begins with the field.

    A message may quote the payload: it is cut, and unprintable characters are escaped.
    """

    def __init__(self, message: str) -> None:
        """Store the message, safe to print."""
        text = shorten(message, LONGEST_REASON)
        safe = (char if char.isprintable() else ascii(char)[1:-1] for char in text)
        super().__init__(text if text.isprintable() else "".join(safe))


# msgspec 0.22 crashes on a union of an integer with bounds and a tuple of fixed length: tokens
# are checked by `check_tokens` instead.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
WireHash: TypeAlias = int | Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def parse(value: Any, struct: type[_Struct], field: str) -> _Struct:
    """Return `value` as a Struct.

    Integers need no bounds of 64 bits: neither msgpack nor orjson reads others as integers.

    Raises:
        DecodeError: a field is missing or wrong; the message names it below `field`.
    """
    try:
        return msgspec.convert(value, struct, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        where = field + path.rstrip("`").removeprefix("$")
        msg = f"{where}: {reason[0].lower()}{reason[1:]}"
        raise DecodeError(msg) from error


def parse_tagged(value: Any, structs: Sequence[type[msgspec.Struct]], field: str) -> Any:
    """Return `value` as the one of the `structs` with its tag.

    Faster than `parse` with a union, which msgspec analyses again at each call (6 µs).

    Raises:
        DecodeError: there is no such Struct, or a field is missing or wrong.
    """
    if type(value) is not dict:
        msg = f"{field} must be a map, not {brief(value)}"
        raise DecodeError(msg)
    name = structs[0].__struct_config__.tag_field or ""
    tag = value.get(name)
    for struct in structs:
        if struct.__struct_config__.tag == tag:
            return parse(value, struct, field)
    tags = ", ".join(str(struct.__struct_config__.tag) for struct in structs)
    msg = f"{field}.{name} must be one of {tags}, not {brief(tag)}"
    raise DecodeError(msg)


def other_fields(value: Mapping[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of `value` that `struct` does not declare."""
    tag = struct.__struct_config__.tag_field
    known = struct.__struct_encode_fields__
    return {name: item for name, item in value.items() if name not in known and name != tag}


def read_or_keep(read: Callable[[Any, str], Event], value: Any, field: str) -> Event:
    """Return the event that `read` makes of `value`; an UnparsedEvent if it cannot."""
    try:
        return read(value, field)
    except DecodeError as error:
        return UnparsedEvent(value, str(error))


def check_tokens(tokens: Sequence[Token], field: str) -> None:
    """Raise DecodeError if an id among the tokens is negative."""
    # Nearly all lists are integers only, which are checked in C.
    if set(map(type, tokens)) == {int} and min(cast("Sequence[int]", tokens)) >= 0:
        return
    for index, token in enumerate(tokens):
        low = min(token) if isinstance(token, tuple) else token
        if isinstance(low, int) and low < 0:
            msg = f"{field}[{index}]: expected token ids from 0 on, got {token}"
            raise DecodeError(msg)


def brief(value: object, limit: int = 60) -> str:
    """Return `value` for a message, cut to `limit` characters."""
    return shorten(
        repr(value[:limit] if isinstance(value, (list, str, bytes)) else value), limit
    )


def unsupported(event: Event, where: str) -> InputError:
    """Return the error for an event that a format cannot express."""
    return InputError(f"{type(event).__name__} cannot be expressed in {where}")
