"""Exports of a trace: KV events as of vLLM or Dynamo, and requests as of Mooncake."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain
from typing import Any

import attrs
import orjson
from msgspec import UNSET

from kvcore.progress import Tick, ticked, unseen
from kvcore.trace import events
from kvcore.trace.jsonl_file import BUFFER_BYTES, BackgroundFile
from kvcore.units import NS_PER_S
from kvcore.untrusted import MOST_VALUES
from kvcore_events.model import (
    NS_PER_MS,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from kvcore_plugins.traces.reader import read_events
from kvcore_plugins.workload.recorded import TraceWorkload
from kvcore_replay.check.trace import refuse
from kvcore_replay.state.cache import CacheState, TracedSpan
from kvcore_replay.state.replicas import ServerReader

MEDIUM = "GPU"

MEDIUMS = {"host": "CPU", "disk": "DISK", "redis": "EXTERNAL"}
"""Names of media in vLLM, by plugin of the tier; others have the name of the tier."""

TIERS = {"GPU": "device", "CPU": "host_pinned", "DISK": "disk", "EXTERNAL": "external"}
"""Names of tiers in Dynamo, by medium in vLLM."""

UNSUPPORTED = (
    *("salt", "tenant", "priority", "slo", "predicted"),
    *("retention", "session", "after", "think", "output_keys"),
)
"""Fields of a REQUEST that Mooncake's format cannot express."""

STORED = ("new", "grown")
"""Kinds of COMMIT that add blocks to the cache."""

_HASH_TOKENS, _TOKEN_BITS = 4, 31
"""Number of placeholder tokens with the hash of a block, and the most bits of one."""

_EVENT_VALUES = 1 << 16
"""Most hashes and token ids of a batch; a larger block has an event of its own."""


@attrs.frozen
class ExportSize:
    """Size of an export of a trace as vLLM's events, counted beforehand.

    Attributes:
        blocks: number of stores of a block.
        tokens: number of written token ids.
    """

    blocks: int
    tokens: int

    @classmethod
    def from_trace(
        cls,
        trace: str | os.PathLike[str],
        tick: Tick = unseen,
        replica: int | str | None = None,
    ) -> ExportSize:
        """Count the stored blocks in one pass over the trace. Costs about 8 µs a line.

        Raises:
            InputError: the file cannot be opened.
            TraceError: a line is damaged, or the trace is incomplete.
        """
        reader = ServerReader(trace, replica)
        blocks, size = 0, 0
        for line in ticked(reader, tick):
            if isinstance(line, events.Header):
                size = line.block_size
            elif isinstance(line, events.Commit) and line.how in STORED:
                blocks += line.blocks
            elif isinstance(line, (events.Offload, events.Recover)):
                blocks += 0 if getattr(line, "parked", False) else line.blocks
        reader.require_complete()
        return cls(blocks, blocks * size)

    def bytes(self, *, compressed: bool) -> int:
        """Return the approximate size of the recording in bytes; less if hashes are short.

        A block has a hash of up to 20 digits where it is stored and where it is removed, and
        nearly all its token ids are zeros with a comma, which compress to nothing.
        """
        if compressed:
            return 32 * self.blocks + self.tokens // 500
        return 80 * self.blocks + 2 * self.tokens


def event_batches(
    trace: str | os.PathLike[str], tick: Tick = unseen, replica: int | str | None = None
) -> Iterator[EventBatch]:
    """Yield the events of a run as vLLM would have published them, a batch for each time.

    The events of one time are in several batches if one would have too many values to be read.

    A block that is committed for the first time is stored, one that is evicted removed; so is
    one that is written into a tier or leaves it, with the tier as its medium. Keys of
    the trace are the hashes: integers as they are, digests by their last 64 bits, as in vLLM;
    where a key is several blocks, a hash of the key and of the position of the block in it. A
    trace has no token ids: placeholders are written, equal only for equal blocks. The trace is
    read to its END, and its digest checked; `tick` is called with the number of bytes read.
    Costs about 20 µs a line, and some µs a block. In the trace of a cluster, `replica` selects
    the server.

    Raises:
        InputError: the file cannot be opened.
        TraceError: the trace is damaged or incomplete, or an event cannot be applied.
    """
    reader = ServerReader(trace, replica)
    maker: _EventMaker | None = None
    now, values, pending = 0, 0, list[BlockStored | BlockRemoved]()
    for line in ticked(reader, tick):
        if line.t > now and pending:
            yield _batch(now, pending)
            values, pending = 0, []
        now = line.t
        try:
            if isinstance(line, events.Header):
                maker = _EventMaker(line)
            elif maker is not None:
                for event in maker.apply(line):
                    added = maker.values(event)
                    if pending and values + added > _EVENT_VALUES:
                        yield _batch(now, pending)
                        values, pending = 0, []
                    pending.append(event)
                    values += added
        except (LookupError, ArithmeticError, ValueError) as error:
            refuse(reader, line, error)
    if pending:
        yield _batch(now, pending)
    reader.require_complete()


def dynamo_batches(
    trace: str | os.PathLike[str],
    worker: int = 0,
    tick: Tick = unseen,
    replica: int | str | None = None,
) -> Iterator[EventBatch]:
    """Yield the events of a run as router events of Dynamo, numbered from 0: one event a batch.

    A trace does not have the hash of the tokens of a block: it is replaced by the block's hash.
    Raises as `event_batches`.
    """
    batches = event_batches(trace, tick, replica)
    for sequence, event in enumerate(event for batch in batches for event in batch.events):
        assert isinstance(event, BlockStored | BlockRemoved)
        tier = TIERS.get(str(event.medium), str(event.medium).lower())
        yield EventBatch(
            ts=None,
            events=(_routed(event, tier),),
            dp_rank=0,
            format="dynamo",
            seq=sequence,
            source=worker,
            more={"storage_tier": tier, "residency_domain": "worker"},
        )


@attrs.define
class MooncakeRows:
    """The requests of a trace as rows of Mooncake's format: JSON, each with its newline.

    `hash_ids` are the keys of the trace, or 63 bits of a digest. Times are rounded down to
    milliseconds. The output of a text is as long as it was. The format does not have the number
    of tokens of a key; readers assume 512.

    Attributes:
        trace: path of the trace.
        tick: called with the number of bytes read.
        rows: number of rows so far.
        key_tokens: number of tokens of a key; 0 before the first request.
        left_out: number of requests with a field that the format cannot express, by field; `t`
            counts rounded times.

    Raises:
        InputError: the file cannot be opened.
        TraceError: a line is damaged, the trace is incomplete, or its keys have different
            numbers of tokens.
    """

    trace: str | os.PathLike[str]
    tick: Tick = unseen
    rows: int = 0
    key_tokens: int = 0
    left_out: Counter[str] = attrs.field(factory=Counter)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the rows. Memory: one line."""
        self.rows, self.left_out = 0, Counter()
        reader = read_events(self.trace)
        generated = TraceWorkload(self.trace).generated
        for line in ticked(reader, self.tick):
            if not isinstance(line, events.Request):
                continue
            self.key_tokens = self.key_tokens or line.key_tokens
            if line.key_tokens != self.key_tokens:
                reader.fail(
                    f"keys of {line.key_tokens} tokens, before of {self.key_tokens}: "
                    "Mooncake's format has one size"
                )
            self.rows += 1
            self.left_out.update(
                name for name in UNSUPPORTED if getattr(line, name) is not UNSET
            )
            milliseconds, rest = divmod(line.t, NS_PER_MS)
            self.left_out.update(["t"] if rest else [])
            row = {
                "timestamp": milliseconds,
                "input_length": line.prompt,
                "output_length": generated.get(line.id, line.output),
                "hash_ids": [block_hash(key) >> (type(key) is str) for key in line.keys],
            }
            yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        reader.require_complete()


def write_lines(out: str | os.PathLike[str], lines: Iterable[bytes]) -> int:
    """Write lines to a file that is whole or absent, compressed by its name; return the count.

    Raises:
        InputError: the file cannot be opened for writing.
        StorageError: the disk is full. An exception from `lines` leaves no file either.
    """
    sink, count = BackgroundFile(out, kind="file"), 0
    try:
        with io.BufferedWriter(sink, BUFFER_BYTES) as buffer:
            for count, line in enumerate(lines, 1):  # noqa: B007 - the last one is returned
                buffer.write(line)
            buffer.flush()
            sink.finish()
    except BaseException:
        sink.discard()
        raise
    return count


def block_hash(key: int | str | tuple[Any, ...], position: int = 0, blocks: int = 1) -> int:
    """Return the 64-bit hash of block number `position` of the `blocks` of `key`.

    The key of a generated block that the workload does not have is a tuple.
    """
    if blocks > 1 or isinstance(key, tuple):
        text = f"{key}/{position}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
    return key if isinstance(key, int) else int.from_bytes(bytes.fromhex(key)[-8:], "big")


class _EventMaker:
    """The KV events of the lines of a trace, with the state of its cache."""

    def __init__(self, header: events.Header) -> None:
        """Start with the empty cache that HEADER describes."""
        self._state = CacheState(header)
        self._size = header.block_size
        if self._size > MOST_VALUES // 2:
            msg = f"blocks of {self._size:,} tokens: events have no room for their token ids"
            raise ValueError(msg)
        self._ratio = max(1, header.key_tokens // self._size)
        self._most_blocks = max(1, _EVENT_VALUES // (self._size + 1))
        count = min(self._size, _HASH_TOKENS)
        self._token_bits = min(_TOKEN_BITS, -(-64 // count))
        self._shifts = [index * self._token_bits for index in range(count)]
        self._zeros = [0] * (self._size - count)
        self._mediums: dict[str, str] = {}
        for tier in header.tiers or ():
            medium = MEDIUMS.get(tier.name, tier.tier.upper())
            taken = medium in self._mediums.values()
            self._mediums[tier.tier] = tier.tier.upper() if taken else medium

    def values(self, event: BlockStored | BlockRemoved) -> int:
        """Return the number of hashes and token ids of an event."""
        return len(event.hashes) * (self._size + 1 if isinstance(event, BlockStored) else 1)

    def apply(self, line: events.Event) -> Iterator[BlockStored | BlockRemoved]:
        """Apply a line to the state; yield its events."""
        state = self._state
        if isinstance(line, events.Evict):
            span = state.spans.get(line.span)
            keys, end = ([], 0) if span is None else (span.keys, span.end)
            before = state.cached
            state.apply(line)
            yield from self._removed(keys, end - (before - state.cached), end, MEDIUM)
            return
        state.apply(line)
        if isinstance(line, events.Commit):
            if line.how in STORED:
                span = state.sequences[line.seq].span
                above = span if line.how == "grown" else span.parent
                end = line.first + line.blocks
                yield from self._stored(span.keys, line.first, end, MEDIUM, above)
        elif isinstance(line, (events.Offload, events.Recover, events.Discard)):
            yield from self._moved(line)

    def _moved(
        self, line: events.Offload | events.Recover | events.Discard
    ) -> Iterator[BlockStored | BlockRemoved]:
        """Yield the events of a tier, without parked blocks, which no other request can hit."""
        state = self._state
        if state.tiers is None or getattr(line, "parked", False):
            return
        keys, end = state.requests[line.request].keys, line.first + line.blocks
        medium = self._mediums[line.tier]
        if not isinstance(line, events.Discard):
            yield from self._stored(keys, line.first, end, medium)
        elif line.reason != "parked":
            yield from self._removed(keys, line.first, end, medium)

    def _removed(
        self, keys: list[Any], first: int, end: int, medium: str
    ) -> Iterator[BlockRemoved]:
        """Yield events that remove blocks, the deepest first."""
        gone = range(end - 1, first - 1, -1)
        for begin in range(0, len(gone), _EVENT_VALUES):
            part = gone[begin : begin + _EVENT_VALUES]
            hashes = tuple(self._hash(keys, block) for block in part)
            yield BlockRemoved(hashes=hashes, medium=medium)

    def _stored(
        self,
        keys: list[Any],
        begin: int,
        end: int,
        medium: str,
        above: TracedSpan | None = None,
    ) -> Iterator[BlockStored]:
        """Yield events that store blocks; the one before them is in `above`, if that is given.

        A prompt may end within a key of several blocks, and its answer has another key there.
        """
        before = keys if above is None else above.keys
        for first in range(begin, end, self._most_blocks):
            part = range(first, min(end, first + self._most_blocks))
            hashes = tuple(self._hash(keys, block) for block in part)
            yield BlockStored(
                hashes=hashes,
                parent=self._hash(before, first - 1) if first else None,
                tokens=tuple(chain.from_iterable(map(self._tokens, hashes))),
                block_size=self._size,
                medium=medium,
            )
            before = keys

    def _hash(self, keys: list[Any], block: int) -> int:
        index, offset = divmod(block, self._ratio)
        return block_hash(keys[index], offset, self._ratio)

    def _tokens(self, value: int) -> list[int]:
        """Return placeholders for token ids: the block's hash in the first few, then zeros.

        They show the equality of blocks and nothing else; a file with zeros has a fifth of the
        size of one with random ids, and a thousandth of it if compressed.
        """
        mask = (1 << self._token_bits) - 1
        return [value >> shift & mask for shift in self._shifts] + self._zeros


def _batch(now: int, events: list[BlockStored | BlockRemoved]) -> EventBatch:
    return EventBatch(ts=now / NS_PER_S, events=tuple(events), dp_rank=0)


def _routed(event: BlockStored | BlockRemoved, tier: str) -> BlockStored | BlockRemoved:
    """Return the event of Dynamo's router for an event of vLLM."""
    if isinstance(event, BlockRemoved):
        return attrs.evolve(event, medium=tier)
    return BlockStored(
        hashes=event.hashes,
        parent=event.parent,
        contents=event.hashes,
        medium=tier,
        more={"blocks": [{"mm_extra_info": None}] * len(event.hashes)},
    )
