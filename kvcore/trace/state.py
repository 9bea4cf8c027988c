"""The state of a traced cache, rebuilt from its lines and checked against every one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from kvcore.cache.pool import Ids
from kvcore.trace.allocation_order import Supply
from kvcore.trace.events import EVENTS, decode_runs, encode_runs
from kvcore.trace.layout import Layout, Prompt
from kvcore.trace.lifecycle import Lives
from kvcore.trace.spans import Hits, TracedSequence, TracedSpan, ViolationError, path, violated


class CachedKeys:
    """Counts the cached blocks of every key, for prompts whose keys stand for `ratio` blocks.

    A prompt's hit is then a bisection over its keys, whatever spans they are stored in.
    """

    def __init__(self, ratio: int) -> None:
        """Start with nothing cached."""
        self._ratio = ratio
        self._blocks: dict[Any, int] = {}

    def match(self, keys: list[Any]) -> int:
        """Return how many blocks are cached of a prompt, from the first on. O(log keys)."""
        cached = self._blocks
        missing = bisect_left(keys, 1, key=lambda key: key not in cached)
        return (missing - 1) * self._ratio + cached[keys[missing - 1]] if missing else 0

    def store(self, keys: list[Any], first: int, end: int) -> bool:
        """Store the blocks `[first, end)` of a prompt; say whether none of them was there."""
        cached, ratio = self._blocks, self._ratio
        low, high = first // ratio, (end - 1) // ratio
        later = keys[low + 1 : high + 1]
        if cached.get(keys[low], 0) != first - low * ratio or not cached.keys().isdisjoint(
            later
        ):
            return False
        cached[keys[low]] = ratio
        cached.update(dict.fromkeys(later, ratio))
        cached[keys[high]] = end - high * ratio
        return True

    def forget(self, keys: list[Any], first: int, end: int) -> None:
        """Take the last blocks stored of a prompt, `[first, end)`, out again."""
        whole, part = divmod(first, self._ratio)
        for key in keys[whole : (end - 1) // self._ratio + 1]:
            self._blocks.pop(key, None)
        if part:
            self._blocks[keys[whole]] = part


Line: TypeAlias = dict[str, Any]


# Events between the first victim of a call and the lines that take its block.
ADMISSION = frozenset({"EVICT", "SPLIT", "HIT", "MISS", "ALLOC", "COPY"})


# Events between a commit and the pins of the forked siblings that share its blocks.
SHARING = frozenset({"COMMIT", "SPLIT", "FREE"})


class CacheState:
    """Pool, spans, block tables and pins of a traced cache.

    Shares nothing with the prefix caches but the pool's order of ids: what is cached is a
    count of blocks a key, and a prompt's hit a bisection, since no block is cached without
    those before it.

    Attributes:
        spans, sequences: those cached and those open, by id.
        requests, lives: those heard of, by id, and how far each has come.
        cached, private: blocks in spans, and blocks that only open sequences hold.
        hits: what the admissions so far looked up and hit.
    """

    def __init__(self, header: Line) -> None:
        """Start with an empty pool of the size and layout that HEADER gives.

        Raises:
            ValueError: the sizes do not fit one another.
        """
        self.spans: dict[int, TracedSpan] = {}
        self.sequences: dict[int, TracedSequence] = {}
        self.requests: dict[int | str, Prompt] = {}
        self.lives = Lives(header["mode"])
        self.cached = self.private = 0
        self.hits = Hits()
        self._blocks = header["blocks"]
        plugins = header["plugins"]
        self._policy = plugins.get("eviction", {}).get("name")
        self._retention = plugins.get("retention", {}).get("name")
        self._layout = Layout.of(header)
        self._ratio = self._layout.ratio
        self._supply = Supply(self._blocks)
        self._owners = self._supply.pool.owners
        self._root = TracedSpan(-1, 0, array("i"), [], None, 0, None, 0)
        self._known = CachedKeys(self._ratio)
        self._opened = self._last_span = self._now = 0
        self._expired_for: int | str | None = None
        self._duplicates: Ids = array("i")
        self._shared = 0
        self._next: tuple[str, int, str | None] | None = None
        self._expected: tuple[str, int, str | None] | None = None
        self._apply: dict[str, Callable[[Line], None]] = {
            name: getattr(self, f"_{name.lower()}", self._live)
            for name in EVENTS
            if name != "HEADER"
        }

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self._supply.free

    def apply(self, line: Line) -> None:
        """Take in the next line after HEADER. O(spans touched), and its blocks in C.

        Raises:
            ViolationError: the line contradicts what came before.
        """
        event = line["event"]
        self._now = line["t"]
        self._expected = self._next
        if self._next is not None and self._next[:2] != (event, line.get("seq")):
            name, seq, _ = self._next
            violated(f"{name} of sequence {seq} must come before this")
        if self._shared and event not in SHARING:
            violated("forked sequences still hold blocks that are cached now, without a pin")
        if event not in ADMISSION:
            self._expired_for = None
            self._supply.settle()
        self._next = None
        self._apply[event](line)
        total = self.free + self.cached + self.private
        if total != self._blocks:
            violated(
                f"{self.free} free + {self.cached} cached + {self.private} private blocks are "
                f"{total}; the pool has {self._blocks}"
            )

    def _request(self, line: Line) -> None:
        if line["id"] in self.requests:
            violated(f"request {line['id']!r} has a REQUEST line already")
        self.requests[line["id"]] = self._layout.prompt(line)
        self.lives.arrive(line["id"], line["output"])

    def _hit(self, line: Line) -> None:
        seq = self._admit(line, line["blocks"])
        seq.span = self._span(line["span"])
        self._must_hold(seq, seq.span, line["blocks"])
        for span in path(seq.span):
            span.pins += 1
            span.creator = None
            span.last_access = self._now
            span.hits += not seq.again
        if seq.hit < seq.prompt.blocks:
            self._next = ("MISS", seq.id, None)

    def _miss(self, line: Line) -> None:
        seq = self._sequence(line["seq"]) if self._expected else self._admit(line, 0)
        prompt = seq.prompt
        told = line["request"], line["block"], "again" in line
        if told != (prompt.id, seq.hit, seq.again):
            violated(f"sequence {seq.id} is of request {prompt.id!r} and hit {seq.hit} blocks")
        if seq.hit == prompt.limit:
            reasons = ["no keys" if prompt.unkeyed else "partial"]
        elif self._expired_for == prompt.id:
            # What expired may have been dropped by an earlier call, which then failed.
            reasons = ["expired", "absent"]
        else:
            reasons = ["absent"]
        if line["why"] not in reasons:
            violated(f"block {seq.hit} missed as {line['why']!r}; it is {reasons[0]!r}")

    def _split(self, line: Line) -> None:
        lower, at = self._span(line["span"]), line["at"]
        if not lower.start < at < lower.end:
            violated(
                f"span {lower.id} is blocks {lower.start} to {lower.end}: no split at {at}"
            )
        cut = at - lower.start
        upper = attrs.evolve(
            lower,
            id=self._new_span(line["upper"]),
            ids=lower.ids[:cut],
            creator=None,
            children=1,
        )
        self.spans[upper.id] = upper
        lower.start, lower.ids, lower.parent = at, lower.ids[cut:], upper

    def _join(self, line: Line) -> None:
        lower, upper = self._span(line["span"]), self._span(line["upper"])
        if lower.parent is not upper or upper.children != 1 or upper.pins != lower.pins:
            violated(f"spans {upper.id} and {lower.id} are not the halves of a split")
        lower.start, lower.ids, lower.parent = upper.start, upper.ids + lower.ids, upper.parent
        del self.spans[upper.id]

    def _alloc(self, line: Line) -> None:
        seq, ids = self._sequence(line["seq"]), self._ids(line)
        if line["first"] != seq.blocks:
            violated(f"sequence {seq.id} has {seq.blocks} blocks: {line['first']} is not next")
        self.lives.grow(seq.prompt.id, seq.id)
        self._supply.take(ids, seq.prompt.id)
        self.private += len(ids)
        seq.private.extend(ids)

    def _copy(self, line: Line) -> None:
        seq, source = self._sequence(line["seq"]), line["from"]
        if not seq.private or (line["block"], source) != (seq.blocks - 1, seq.private[-1]):
            violated(f"block {source} is not the private tail of sequence {seq.id}")
        if not self._supply.pool.unshare(source):
            violated(f"block {source} has one owner, who may write to it")
        self._supply.take(array("i", [line["to"]]), seq.prompt.id, copy=True)
        self.private += 1
        seq.private[-1] = line["to"]

    def _commit(self, line: Line) -> None:
        seq, first, count = self._sequence(line["seq"]), line["first"], line["blocks"]
        end = first + count
        if first != seq.span.end or end > seq.blocks:
            violated(
                f"the private blocks of sequence {seq.id} are {seq.span.end} to {seq.blocks}"
            )
        if seq.gaps:
            violated(f"sequence {seq.id} has forgotten blocks, so it has none to share")
        if end > seq.prompt.cacheable:
            violated(f"request {seq.prompt.id!r} has {seq.prompt.cacheable} blocks to share")
        ids = seq.private[:count]
        if line["how"] in ("new", "grown"):
            self._store(seq, ids, line)
        else:
            self._switch(seq, ids, line)
        del seq.private[:count]

    def _evict(self, line: Line) -> None:
        if line["scope"] == "sequence":
            self._retain(line)
            return
        span, ids = self._span(line["span"]), self._ids(line)
        if span.pins or span.children:
            violated(f"span {span.id} has {span.pins} pins and {span.children} children")
        if not ids or ids != span.ids[: -len(ids) - 1 : -1]:
            violated(f"span {span.id} is {encode_runs(span.ids[::-1])}, tail first")
        age = self._now - span.last_access
        if (line["by"], line["hits"], line["age"]) != (self._policy, span.hits, age):
            violated(
                f"span {span.id}: by {self._policy!r}, age {age} ns, {span.hits} hits "
                f"expected; the line says by {line['by']!r}, age {line['age']} ns, "
                f"{line['hits']} hits"
            )
        self._forget(span, len(ids))
        if line["reason"] == "expired":
            self._supply.expired(ids)
            self._expired_for = line["for"]
        else:
            self._supply.evicted(ids, line["for"])

    def _retain(self, line: Line) -> None:
        """Let a sequence forget blocks: its own are free."""
        self._supply.settle()
        seq, first = self._sequence(line["seq"]), line["first"]
        if line["by"] != self._retention:
            violated(f"by retention policy {self._retention!r}, not {line['by']!r}")
        if not self._owners.keys().isdisjoint(seq.private):
            violated(f"sequence {seq.id} shares private blocks with a fork: it keeps them")
        freed = seq.forget(first, first + line["blocks"])
        if self._ids(line) != freed:
            violated(f"sequence {seq.id} frees {encode_runs(freed)}, not {line['runs']}")
        self._supply.pool.release(freed)
        self.private -= len(freed)

    def _free(self, line: Line) -> None:
        seq, ids, reason = self._sequence(line["seq"]), self._ids(line), line["reason"]
        if self._expected is not None:
            fits = reason == self._expected[2]
        else:
            fits = reason != "duplicate" and not self._shared
        if not fits:
            violated(f"sequence {seq.id} has no blocks to free with reason {reason!r} here")
        if reason == "duplicate":
            dropped = self._duplicates
        else:
            keep = 0
            if reason == "rollback":
                first = line.get("first", seq.blocks - len(ids))
                keep = first - seq.span.end - seq.returned
                if not 0 <= keep < len(seq.private):
                    violated(f"blocks {seq.span.end} to {seq.blocks} can be rolled back")
            dropped = seq.private[keep:]
            del seq.private[keep:]
        freed = self._supply.pool.release(dropped[::-1])
        if ids != freed:
            violated(f"sequence {seq.id} frees {encode_runs(freed)}, not {line['runs']}")
        self.private -= len(freed)
        if reason == "close":
            if line.get("forgotten", []) != seq.forgotten:
                violated(f"sequence {seq.id} has forgotten {seq.forgotten}, as first and count")
            if self._expected is None:
                self.lives.close(seq.prompt.id, seq.id)
            self._close(seq)

    def _fork(self, line: Line) -> None:
        seq = self._sequence(line["seq"])
        child = attrs.evolve(seq, id=line["child"], private=seq.private[:])
        self._open(child)
        self._supply.pool.share(child.private)
        for span in path(seq.span):
            span.pins += 1
            span.creator = None

    def _keys(self, line: Line) -> None:
        """Take in keys of blocks that a request generates: they follow those it has."""
        prompt = self.requests.get(line["request"])
        if prompt is None:
            violated(f"request {line['request']!r} has no REQUEST line before this")
        prompt.keys.extend(line["keys"])
        prompt.cacheable = len(prompt.keys)

    def _live(self, line: Line) -> None:
        """Take what a server tells of a request; a sequence it names must be open."""
        seq = self._sequence(line["seq"]).id if "seq" in line else 0
        if self.lives.apply(line):
            self._next = ("FREE", seq, "close")

    def _end(self, line: Line) -> None:
        """Take END: the reader has checked what it says."""
        del line
        self.lives.end(len(self.sequences))

    def _admit(self, line: Line, hit: int) -> TracedSequence:
        """Open the sequence of a first HIT or MISS; its hit must be what is cached."""
        prompt = self.requests.get(line["request"])
        if prompt is None:
            violated(f"request {line['request']!r} has no REQUEST line before this")
        self._supply.serve(prompt.id)
        cached = min(self._known.match(prompt.keys), prompt.limit)
        if hit != cached:
            violated(f"{hit} blocks hit; {cached} are cached and may hit")
        again = "again" in line
        self.lives.admit(prompt.id, line["seq"], again=again)
        self.hits.count(prompt.lookup, hit, again=again)
        seq = TracedSequence(line["seq"], prompt, self._root, array("i"), hit, again)
        self._open(seq)
        return seq

    def _open(self, seq: TracedSequence) -> None:
        self._opened += 1
        if seq.id != self._opened:
            violated(f"sequence {seq.id} opens; the next one is {self._opened}")
        self.sequences[seq.id] = seq

    def _close(self, seq: TracedSequence) -> None:
        seq.span.creator = None
        for span in path(seq.span):
            span.pins -= 1
        del self.sequences[seq.id]

    def _store(self, seq: TracedSequence, ids: Ids, line: Line) -> None:
        """Move private blocks of `seq` into the deepest span it holds, or a child of it."""
        if self._shared:
            violated("forked sequences still hold blocks that are cached now, without a pin")
        parent, keys = seq.span, seq.prompt.keys
        first, end = parent.end, parent.end + len(ids)
        if not self._known.store(keys, first, end):
            violated(f"some of the blocks {first} to {end} of sequence {seq.id} are cached")
        self.cached += len(ids)
        self.private -= len(ids)
        if self._owners:
            self._shared = sum(self._owners.get(block, 0) for block in ids)
        if line["how"] == "grown":
            if line["span"] != parent.id or parent.creator != seq.id:
                violated(f"sequence {seq.id} may not grow span {line['span']} in place")
            parent.ids.extend(ids)
            return
        serial = self._new_span(line["span"])
        span = TracedSpan(serial, first, ids, keys, parent, 1, seq.id, self._now)
        self.spans[serial] = seq.span = span
        parent.children += 1
        parent.creator = None

    def _switch(self, seq: TracedSequence, ids: Ids, line: Line) -> None:
        """Let `seq` hold a span that another sequence stored, for blocks of its own."""
        span = self._span(line["span"])
        if span.parent is not seq.span:
            violated(f"span {span.id} does not continue what sequence {seq.id} holds")
        self._must_hold(seq, span, line["first"] + line["blocks"])
        span.pins += 1
        span.creator = None
        seq.span = span
        if line["how"] == "same":
            self._duplicates = ids
            self._next = ("FREE", seq.id, "duplicate")
            return
        self._shared -= len(ids)
        if ids != span.ids or not all(map(self._supply.pool.unshare, ids)):
            violated(f"sequence {seq.id} does not hold the blocks of span {span.id}")

    def _forget(self, span: TracedSpan, count: int) -> None:
        """Take the last `count` blocks of `span` out of the cache."""
        self._known.forget(span.keys, span.end - count, span.end)
        self.cached -= count
        del span.ids[-count:]
        if not span.ids:
            del self.spans[span.id]
            if span.parent is not None:
                span.parent.children -= 1

    def _must_hold(self, seq: TracedSequence, span: TracedSpan, end: int) -> None:
        last = (end - 1) // self._ratio
        if span.end != end or span.keys[last] != seq.prompt.keys[last]:
            violated(f"span {span.id} is not what sequence {seq.id} has up to block {end}")

    def _new_span(self, serial: int) -> int:
        if serial <= self._last_span:
            violated(f"span {serial} is not new: the last one was {self._last_span}")
        self._last_span = serial
        return serial

    def _span(self, serial: int) -> TracedSpan:
        span = self.spans.get(serial)
        return span or violated(f"no span {serial} is cached")

    def _sequence(self, serial: int) -> TracedSequence:
        seq = self.sequences.get(serial)
        return seq or violated(f"no sequence {serial} is open")

    def _ids(self, line: Line) -> Ids:
        try:
            return decode_runs(line["runs"], self._blocks)
        except ValueError as error:
            raise ViolationError(*error.args) from error
