"""The state of a traced cache, rebuilt from its lines and checked against every one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import attrs

from kvcore.cache.pool import BlockPool, Ids
from kvcore.trace.layout import Layout, Prompt
from kvcore.trace.runs import decode_runs, encode_runs

Line: TypeAlias = dict[str, Any]

ADMISSION = frozenset({"EVICT", "SPLIT", "HIT", "MISS", "ALLOC", "COPY"})
SHARING = frozenset({"COMMIT", "SPLIT", "FREE"})


class CacheState:
    """Pool, spans, block tables and pins of a traced cache.

    Shares nothing with the prefix caches but the pool's order of ids: what is cached is a
    count of blocks a key, found by bisection, since no block is cached without those
    before it.

    Attributes:
        pool: the free blocks. `free` counts those that were just evicted as well.
        spans, sequences: by id.
        cached, private: blocks in spans, and blocks of open sequences only.
        lookup_blocks, hit_blocks, self_hit_blocks, looked_up, ratios: of the admissions
            so far; `ratios` is the sum of the hit ratios of `looked_up` requests.
    """

    def __init__(self, header: Line) -> None:
        """Start with an empty pool of the size and layout that HEADER gives.

        Raises:
            ValueError: the sizes do not fit one another.
        """
        self._layout = Layout.of(header)
        self._ratio = self._layout.ratio
        self._policy = header["plugins"].get("eviction", {}).get("name")
        self.pool = BlockPool(header["blocks"])
        self.spans: dict[int, TracedSpan] = {}
        self.sequences: dict[int, TracedSequence] = {}
        self.cached = self.private = 0
        self.requests: dict[int | str, Prompt] = {}
        self.lookup_blocks = self.hit_blocks = self.self_hit_blocks = self.looked_up = 0
        self.ratios = 0.0
        self._root = TracedSpan(-1, 0, array("i"), [], None, 0, None, 0)
        self._blocks_of: dict[Any, int] = {}
        self._opened = self._last_span = 0
        self._victims: Ids = array("i")
        self._victims_for: int | str | None = None
        self._expired_for: int | str | None = None
        self._copied = False
        self._due: tuple[str, int] | None = None
        self._duplicates: Ids | None = None
        self._unpinned = 0
        self._now = 0
        self._apply: dict[str, Callable[[Line], None]] = {
            name: getattr(self, f"_{name.lower()}")
            for name in (
                *("REQUEST", "HIT", "MISS", "SPLIT", "JOIN", "ALLOC", "COMMIT", "EVICT"),
                *("FREE", "FORK", "COPY", "END"),
            )
        }

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.free + len(self._victims)

    def apply(self, line: Line) -> None:
        """Take in the next line after HEADER. O(spans touched + blocks, in C).

        Raises:
            ViolationError: the line contradicts what came before.
        """
        event = line["event"]
        self._now = line["t"]
        if self._due is not None and (event, line.get("seq")) != self._due:
            name, seq = self._due
            violated(f"{event} where {name} of sequence {seq} must follow")
        if self._unpinned and event not in SHARING:
            violated(f"{event} while forked siblings hold committed blocks without a pin")
        if event not in ADMISSION:
            self._expired_for = None
            self._settle()
        self._due = None
        self._apply[event](line)
        total = self.free + self.cached + self.private
        if total != self.pool.blocks:
            violated(
                f"{self.free} free + {self.cached} cached + {self.private} private blocks are "
                f"{total}; the pool has {self.pool.blocks}"
            )

    def _request(self, line: Line) -> None:
        if line["id"] in self.requests:
            violated(f"a second REQUEST {line['id']!r}")
        self.requests[line["id"]] = self._layout.prompt(line)

    def _hit(self, line: Line) -> None:
        seq = self._admit(line, line["blocks"])
        span = self._span(line["span"])
        self._continues(seq, span, line["blocks"])
        seq.span = span
        for held in path(span):
            held.pins += 1
            held.creator = None
            held.last_access = self._now
            held.hits += not seq.again
        if seq.hit < seq.prompt.blocks:
            self._due = ("MISS", seq.id)

    def _miss(self, line: Line) -> None:
        seq = self.sequences.get(line["seq"]) or self._admit(line, 0)
        prompt = seq.prompt
        if seq.id != self._opened or line["block"] != seq.hit or line["request"] != prompt.id:
            violated(f"sequence {seq.id} is of request {prompt.id!r} and hit {seq.hit} blocks")
        if ("again" in line) is not seq.again:
            violated("HIT and MISS disagree on `again`")
        if seq.hit == prompt.limit:
            reasons = ["no keys" if prompt.unkeyed else "partial"]
        elif self._expired_for == prompt.id:
            # What expired may have been dropped for an earlier try that failed.
            reasons = ["expired", "absent"]
        else:
            reasons = ["absent"]
        if line["why"] not in reasons:
            violated(f"block {seq.hit} missed as {line['why']!r}; it is {reasons[0]!r}")

    def _split(self, line: Line) -> None:
        lower, at = self._span(line["span"]), line["at"]
        if not lower.start < at < lower.end:
            violated(f"block {at} is not inside span {lower.id}: {lower.start} to {lower.end}")
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
            violated(f"block {line['first']} cannot be next: sequence {seq.id} has {seq.blocks}")
        self._taken(seq, ids)
        seq.private.extend(ids)

    def _copy(self, line: Line) -> None:
        seq, source = self._sequence(line["seq"]), line["from"]
        if not seq.private or (line["block"], source) != (seq.blocks - 1, seq.private[-1]):
            violated(f"block {source} is not the private tail of sequence {seq.id}")
        if not self.pool.disown(source):
            violated(f"block {source} has one owner, which may write to it")
        self._taken(seq, array("i", [line["to"]]), copy=True)
        seq.private[-1] = line["to"]

    def _commit(self, line: Line) -> None:
        seq, how = self._sequence(line["seq"]), line["how"]
        first, count = line["first"], line["blocks"]
        if first != seq.span.end or count > len(seq.private):
            violated(
                f"blocks {first} to {first + count} of sequence {seq.id}, whose private blocks "
                f"are {seq.span.end} to {seq.blocks}"
            )
        if first + count > seq.prompt.cacheable:
            violated(f"request {seq.prompt.id!r} has {seq.prompt.cacheable} blocks to share")
        held = seq.private[:count]
        if how in ("new", "grown"):
            self._store(seq, held, line)
        else:
            self._switch(seq, held, line)
        del seq.private[:count]

    def _evict(self, line: Line) -> None:
        span, ids, reason = self._span(line["span"]), self._ids(line), line["reason"]
        if span.pins or span.children:
            violated(f"span {span.id} has {span.pins} pins and {span.children} children")
        if not ids or ids != span.ids[: -len(ids) - 1 : -1]:
            violated(f"span {span.id} ends in {encode_runs(span.ids[::-1])}, tail first")
        if line["by"] != self._policy:
            violated(f"evicted by {line['by']!r}; the policy is {self._policy!r}")
        if (line["hits"], line["age"]) != (span.hits, self._now - span.last_access):
            violated(f"span {span.id}: {span.hits} hits, age {self._now - span.last_access} ns")
        self._forget(span, len(ids))
        if reason == "expired" or line["for"] != self._victims_for:
            self._settle()
        if reason == "expired":
            self._expired_for = line["for"]
            self.pool.give(ids, len(ids))
        else:
            self._victims_for = line["for"]
            self._victims.extend(ids)

    def _free(self, line: Line) -> None:
        seq, ids, reason = self._sequence(line["seq"]), self._ids(line), line["reason"]
        duplicates, self._duplicates = self._duplicates, None
        if (duplicates is None) is (reason == "duplicate") or (
            self._unpinned and not duplicates
        ):
            violated(f"no blocks of sequence {seq.id} are to be freed here with reason {reason!r}")
        if duplicates is not None:
            dropped = duplicates
        elif reason == "close":
            dropped = seq.private
            self._close(seq)
        else:
            keep = line.get("first", seq.blocks - len(ids)) - seq.span.end
            if not 0 <= keep < len(seq.private):
                violated(f"sequence {seq.id} has no private blocks to roll back there")
            dropped = seq.private[keep:]
            del seq.private[keep:]
        freed = self.pool.release(dropped[::-1])
        if ids != freed:
            violated(f"sequence {seq.id} frees {encode_runs(freed)}, not {line['runs']}")
        self.private -= len(freed)

    def _fork(self, line: Line) -> None:
        seq = self._sequence(line["seq"])
        child = attrs.evolve(seq, id=line["child"], private=seq.private[:])
        self._open(child)
        self.pool.share(child.private)
        for span in path(seq.span):
            span.pins += 1
            span.creator = None

    def _end(self, line: Line) -> None:
        """Take END: the reader has checked what it says."""

    def _admit(self, line: Line, hit: int) -> TracedSequence:
        """Open the sequence of a first HIT or MISS, whose hit must be what is cached."""
        prompt = self.requests.get(line["request"])
        if prompt is None:
            violated(f"request {line['request']!r} has no REQUEST line before this")
        if self._victims_for != prompt.id:
            self._settle()
        found = min(self._cached_of(prompt.keys), prompt.limit)
        if hit != found:
            violated(f"{hit} blocks of request {prompt.id!r} hit; {found} are cached and may")
        again = "again" in line
        if again and not prompt.admitted:
            violated(f"request {prompt.id!r} cannot be admitted again: it never was")
        prompt.admitted = True
        seq = TracedSequence(line["seq"], prompt, self._root, array("i"), hit, again)
        self._open(seq)
        if again:
            self.self_hit_blocks += hit
        elif prompt.lookup:
            self.looked_up += 1
            self.lookup_blocks += prompt.lookup
            self.hit_blocks += hit
            self.ratios += hit / prompt.lookup
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

    def _cached_of(self, keys: list[Any]) -> int:
        """Return how many blocks of a prompt are cached, from the first on. O(log keys)."""
        cached = self._blocks_of
        missing = bisect_left(keys, True, key=lambda key: key not in cached)  # noqa: FBT003
        return (missing - 1) * self._ratio + cached[keys[missing - 1]] if missing else 0

    def _store(self, seq: TracedSequence, ids: Ids, line: Line) -> None:
        """Move private blocks of `seq` to the deepest span it holds, or to a child of it."""
        parent, keys, ratio = seq.span, seq.prompt.keys, self._ratio
        first, end = parent.end, parent.end + len(ids)
        low, high = first // ratio, (end - 1) // ratio
        cached = self._blocks_of
        later = keys[low + 1 : high + 1]
        if cached.get(keys[low], 0) != first - low * ratio or not cached.keys().isdisjoint(
            later
        ):
            violated(
                f"some of the blocks {first} to {end} of sequence {seq.id} are cached already"
            )
        cached[keys[low]] = ratio
        cached.update(dict.fromkeys(later, ratio))
        cached[keys[high]] = end - high * ratio
        self.cached += len(ids)
        self.private -= len(ids)
        self._unpinned = sum(self.pool.owners.get(block, 0) for block in ids)
        if line["how"] == "grown":
            if line["span"] != parent.id or parent.creator != seq.id:
                violated(f"sequence {seq.id} may not grow span {line['span']} in place")
            parent.ids.extend(ids)
            return
        span = TracedSpan(
            self._new_span(line["span"]), first, ids, keys, parent, 1, seq.id, self._now
        )
        self.spans[span.id] = seq.span = span
        parent.children += 1
        parent.creator = None

    def _switch(self, seq: TracedSequence, ids: Ids, line: Line) -> None:
        """Let `seq` hold a span that another sequence has stored, for blocks of its own."""
        span = self._span(line["span"])
        if span.parent is not seq.span:
            violated(f"span {span.id} does not continue span {seq.span.id}")
        self._continues(seq, span, line["first"] + line["blocks"])
        span.pins += 1
        span.creator = None
        seq.span = span
        if line["how"] == "same":
            self._duplicates = ids
            self._due = ("FREE", seq.id)
            return
        self._unpinned -= len(ids)
        if ids != span.ids or self._unpinned < 0 or not all(map(self.pool.disown, ids)):
            violated(f"sequence {seq.id} does not share the blocks of span {span.id}")

    def _forget(self, span: TracedSpan, count: int) -> None:
        """Take the last `count` blocks of `span` out of the cache."""
        end = span.end - count
        whole, part = divmod(end, self._ratio)
        for key in span.keys[whole : (span.end - 1) // self._ratio + 1]:
            self._blocks_of.pop(key, None)
        if part:
            self._blocks_of[span.keys[whole]] = part
        self.cached -= count
        del span.ids[-count:]
        if not span.ids:
            del self.spans[span.id]
            assert span.parent is not None
            span.parent.children -= 1

    def _continues(self, seq: TracedSequence, span: TracedSpan, end: int) -> None:
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
        return violated(f"no span {serial} is cached") if span is None else span

    def _sequence(self, serial: int) -> TracedSequence:
        seq = self.sequences.get(serial)
        return violated(f"no sequence {serial} is open") if seq is None else seq

    def _ids(self, line: Line) -> Ids:
        try:
            return decode_runs(line["runs"], self.pool.blocks)
        except ValueError as error:
            raise ViolationError(*error.args) from error
