"""The state of a traced cache at any moment, rebuilt from its events.

The events are trusted: a trace with the right digest records a real run. `kvcore_replay.check`
checks that the events are possible, whatever the digest is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import attrs

from kvcore.cache.pool import Ids
from kvcore.cache.residency import CacheStats
from kvcore.cache.sequence import Hole, merge_holes
from kvcore.trace import events
from kvcore.trace.events import ViolationError, methods_by_event, unfit, violated
from kvcore.trace.fields import decode_runs
from kvcore.untrusted import MOST_BLOCKS, MOST_COPIES, WORK, WORK_OF_LINE
from kvcore_replay.state.layout import TracedPrompt, TraceLayout
from kvcore_replay.state.tiers import TracedTiers

APPLIED = (
    *("REQUEST", "PREFETCH", "HIT", "MISS", "SPLIT", "ALLOC", "COPY", "COMMIT", "EVICT"),
    *("COMPACT", "FREE", "FORK", "KEYS"),
)
"""Events that change the cache; each is applied by the method of its name."""

TIERED = ("RECOVER", "OFFLOAD", "LOAD_START", "LOAD", "DROP")
"""Events that change the tiers below the pool, where HEADER has some."""


@attrs.define(eq=False)
class TracedSpan:
    """A run of cached blocks: the ids of the positions from `start` on.

    Attributes:
        keys: keys of the whole prompt that stored the span.
        pins: number of sequences that hold it.
        creator: the sequence that may still append to it; None: no sequence may.
        last_access: time in ns of its last hit, or when it was stored.
        hits: number of hits by other requests.
        children: number of spans that continue it.
    """

    id: int
    start: int
    ids: Ids
    keys: list[Any]
    parent: TracedSpan | None
    pins: int
    creator: int | None
    last_access: int
    hits: int = 0
    children: int = 0

    @property
    def end(self) -> int:
        """The position after its last block."""
        return self.start + len(self.ids)


@attrs.define(eq=False)
class TracedSequence:
    """An open sequence: the deepest span it holds, and its private blocks after that.

    Attributes:
        hit: number of blocks of its prompt that hit.
        resumed: whether a preempted request was admitted again.
        holes: the blocks it has dropped, as positions `[first, end)` in its table.
        freed: number of dropped blocks that were private.
        compacted: number of tokens that its compactions, and holes before them, have removed.
        compacted_to: number of tokens that its last compaction has left.
        copies: number of entries that its table, that of a fork, has from another one.
    """

    id: int
    prompt: TracedPrompt
    span: TracedSpan
    private: Ids
    hit: int
    resumed: bool
    holes: tuple[Hole, ...] = ()
    freed: int = 0
    compacted: int = 0
    compacted_to: int = 0
    copies: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks in its table, dropped ones included."""
        span = self.span
        return span.start + len(span.ids) + len(self.private) + self.freed

    @property
    def has_forgotten(self) -> bool:
        """Whether it has dropped blocks, or was compacted, and so shares no more."""
        return bool(self.holes or self.compacted)

    @property
    def forgotten(self) -> list[tuple[int, int]]:
        """The blocks that it has dropped, as (first, count), the form of its closing FREE."""
        return [(first, end - first) for first, end in self.holes]

    def table(self) -> Ids:
        """Return its block table: the ids of the blocks it has not dropped, in order."""
        table: Ids = array("i")
        for part in reversed([span.ids for span in path(self.span)]):
            table.extend(part)
        for first, end in reversed(self.holes):
            del table[first:end]
        return table + self.private

    def private_slice(self, first: int, end: int) -> slice:
        """Return the places in `private` of the private blocks among `[first, end)`."""
        start = max(first, self.span.end)
        # Positions that were dropped before have no entry in `private` any more.
        dropped = sum(
            max(min(high, start) - max(low, self.span.end), 0) for low, high in self.holes
        )
        offset = start - self.span.end - dropped
        return slice(offset, offset + max(end - start, 0))

    def drop(self, first: int, end: int) -> None:
        """Drop the blocks `[first, end)`."""
        own = self.private_slice(first, end)
        del self.private[own]
        self.holes = merge_holes([*self.holes, (first, end)])
        self.freed += own.stop - own.start


def path(span: TracedSpan) -> Iterator[TracedSpan]:
    """Yield `span` and its ancestors, up to the first blocks of the prompt."""
    while span.parent is not None:
        yield span
        span = span.parent


def take_by(methods: Mapping[str, Callable[[Any], object]], event: events.Event) -> None:
    """Call the method for the kind of an event, if there is one.

    Raises:
        ViolationError: the event names what there is not.
    """
    method = methods.get(event.event)
    if method is not None:
        try:
            method(event)
        except (LookupError, ArithmeticError) as error:
            raise unfit(error) from error


Opened = TypeVar("Opened")


class TracedState(Generic[Opened]):
    """Open sequences and prompts of a trace: the part that all its states share.

    Attributes:
        header, layout: the first line, and the layout of prompts in blocks of HEADER.
        sequences: the open sequences by id.
        requests: the prompts of all requests so far, by id, in blocks of HEADER.
        hits: lookups and hits of the admissions so far, whose tokens are those of blocks.
    """

    def __init__(self, header: events.Header) -> None:
        self.header = header
        self.layout = TraceLayout.from_header(header)
        self.sequences: dict[int, Opened] = {}
        self.requests: dict[int | str, TracedPrompt] = {}
        self.hits = CacheStats()
        self._work = self._most_work = 0
        self._runs: list[tuple[int, int]] = []
        self._ids = array("i")
        self._apply: dict[str, Callable[[Any], None]] = {}

    def sequence(self, serial: int) -> Opened:
        """Return the sequence of that id.

        Raises:
            ViolationError: there is no such sequence.
        """
        seq = self.sequences.get(serial)
        return seq or violated(f"no sequence {serial} is open")

    def prompt(self, request: int | str) -> TracedPrompt:
        """Return the prompt of the request of that id.

        Raises:
            ViolationError: it has no REQUEST line yet.
        """
        prompt = self.requests.get(request)
        return prompt or violated(f"request {request!r} has no REQUEST line before this")

    def forget(self, request: int | str) -> None:
        """Remove a request that has no sequence."""
        del self.requests[request]

    def count_hit(self, prompt: TracedPrompt, hit: int, *, resumed: bool) -> None:
        """Count an admission that hit `hit` blocks of a prompt."""
        size = self.layout.block_size
        tokens = prompt.lookup * size, hit * size
        self.hits.admitted(prompt.lookup, hit, *tokens, resumed=resumed)

    def count_work(self, steps: int) -> None:
        """Add to the steps of the trace, whose limit `apply` checks."""
        self._work += steps

    def ids(self, runs: list[tuple[int, int]]) -> Ids:
        """Return the block ids of runs, an array that is not to be changed.

        Raises:
            ViolationError: a run is empty, could be longer, or leaves the pool; or the runs
                stand for too many blocks.
        """
        # A check decodes the runs of a line, and so does the state just after it.
        if runs is not self._runs:
            if len(runs) == 1 and runs[0][1] == 1 and 0 <= runs[0][0] < self.header.blocks:
                ids = array("i", runs[0][:1])  # by far the most lines have one block
            else:
                try:
                    ids = decode_runs(runs, self.header.blocks)
                except ValueError as error:
                    raise ViolationError(*error.args) from error
            self.count_work(len(ids))
            self._runs, self._ids = runs, ids
        return self._ids


class CacheState(TracedState[TracedSequence]):
    """Pool, spans, block tables and pins of a traced cache.

    A few bytes of a trace can name billions of blocks, or the same blocks again and again.
    Limits, which no run of a server comes near, bound the blocks in use, in a line and in
    forks, and the work for each line.

    Attributes:
        spans: the cached spans by id.
        cached, private: number of blocks in spans, and of blocks in sequences alone.
        tiers: the tiers below the pool; None: HEADER has no tiers.
    """

    def __init__(self, header: events.Header) -> None:
        """Start with an empty pool of the size and layout that HEADER gives.

        Raises:
            ValueError: the sizes do not fit one another, or HEADER has cache groups, which
                have a state of their own (`GroupState`).
        """
        if header.cache_groups:
            violated("it has cache groups, whose blocks are in no span: this reads spans alone")
        super().__init__(header)
        self.spans: dict[int, TracedSpan] = {}
        self.cached = self.private = self._copies = 0
        self._root = TracedSpan(-1, 0, array("i"), [], None, 0, None, 0)
        self._apply = methods_by_event(self, *APPLIED)
        self.tiers = TracedTiers(header, self.layout.ratio) if header.tiers else None
        if self.tiers is not None:
            self._apply |= {
                name: partial(method, self.tiers)
                for name, method in methods_by_event(self, *TIERED).items()
            }

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return self.header.blocks - self.cached - self.private

    def apply(self, event: events.Event) -> None:
        """Apply the next event after HEADER. O(spans touched), and its blocks in C.

        Raises:
            ViolationError: it names a span, sequence or request that there is not, or the trace
                is beyond a limit.
        """
        if self._work > self._most_work:
            self._most_work = WORK + WORK_OF_LINE * event.n
            if self._work > self._most_work:
                violated(f"{event.n:,} lines name {self._work:,} blocks and spans: too many")
        take_by(self._apply, event)
        if self.private < 0 or self.cached < 0:
            violated("more blocks become free than are in use")

    def span(self, serial: int) -> TracedSpan:
        """Return the span of that id.

        Raises:
            ViolationError: there is no such span.
        """
        span = self.spans.get(serial)
        return span or violated(f"no span {serial} is cached")

    def keys_of(self, event: events.Commit) -> list[Any]:
        """Return the keys of all blocks up to those of a COMMIT; generated ones get names.

        Raises:
            ViolationError: the sequence has fewer blocks, or there is no key for the last one.
        """
        seq, end = self.sequence(event.seq), event.first + event.blocks
        if end > seq.blocks:
            violated(f"sequence {seq.id} has {seq.blocks} blocks, and none at {end - 1}")
        keys = seq.prompt.keys
        if event.generated is True:
            self.layout.name_generated(seq.prompt, end)
            keys = seq.prompt.generated
        self._check_keys(keys, end)
        return keys

    def fork_copies(self, seq: TracedSequence) -> int:
        """Return how many entries a fork of `seq` adds to the tables of open forks.

        Raises:
            ViolationError: there would be too many.
        """
        copies = 1 + len(seq.private)
        if self._copies + copies > MOST_COPIES:
            violated(f"open forks share more than {MOST_COPIES:,} blocks, which is the most")
        return copies

    def own_blocks(self, seq: TracedSequence) -> Ids:
        """Return the private blocks of `seq` that it shares with no fork."""
        if not self._copies:
            return seq.private
        family = [
            other.private
            for other in self.sequences.values()
            if other.prompt is seq.prompt and other is not seq
        ]
        shared = set[int]().union(*family)
        self._work += len(self.sequences) + len(seq.private) + sum(map(len, family))
        return array("i", [block for block in seq.private if block not in shared])

    def _request(self, event: events.Request) -> None:
        self.requests[event.id] = self.layout.prompt(event)

    def _hit(self, event: events.Hit) -> None:
        self._pin(self._admit(event, event.blocks), event.span, event.t)

    def _pin(self, seq: TracedSequence, span_id: int, now: int) -> None:
        """Pin the path down to a span for `seq`; a first admission counts as a hit of it."""
        seq.span = self.span(span_id)
        for span in path(seq.span):
            self._work += 1
            span.pins += 1
            span.creator = None
            span.last_access = now
            span.hits += not seq.resumed

    def _prefetch(self, event: events.Prefetch) -> None:
        # The path has the id of a request that is yet to arrive.
        end = len(event.keys) * self.layout.ratio
        prompt = self.requests[event.request] = TracedPrompt(
            event.request, 0, event.keys, end, end, 0, end, unkeyed=False, share=None
        )
        seq = TracedSequence(
            event.seq, prompt, self._root, array("i"), event.blocks, resumed=True
        )
        self.sequences[seq.id] = seq
        if event.blocks:
            self._pin(seq, event.span, event.t)  # type: ignore[arg-type]  # the check saw to it

    def _miss(self, event: events.Miss) -> None:
        # After a HIT of the same admission the sequence is open already.
        if event.seq not in self.sequences:
            self._admit(event, 0)

    def _admit(self, event: events.Hit | events.Miss, hit: int) -> TracedSequence:
        """Open the sequence of the first line of an admission."""
        prompt, resumed = self.prompt(event.request), bool(event.again)
        # A request that returns hits the blocks that it has generated, too.
        longer = resumed and len(prompt.generated) > len(prompt.keys)
        self._check_keys(prompt.generated if longer else prompt.keys, hit)
        self.count_hit(prompt, hit, resumed=resumed)
        seq = TracedSequence(event.seq, prompt, self._root, array("i"), hit, resumed)
        self.sequences[seq.id] = seq
        return seq

    def _check_keys(self, keys: list[Any], end: int) -> None:
        """Refuse cached blocks without keys: readers look up the key of any cached block.

        Raises:
            ViolationError: `end` is behind the last block that `keys` name.
        """
        if end > (known := len(keys) * self.layout.ratio):
            violated(f"{end} blocks of a prompt that has keys for {known}")

    def _split(self, event: events.Split) -> None:
        lower = self.span(event.span)
        if not lower.start < event.at < lower.end:
            violated(
                f"span {lower.id} is blocks {lower.start} to {lower.end}: "
                f"no split at {event.at}"
            )
        cut = event.at - lower.start
        self._work += len(lower.ids) >> 4
        upper = attrs.evolve(
            lower, id=event.upper, ids=lower.ids[:cut], creator=None, children=1
        )
        self.spans[upper.id] = upper
        lower.start, lower.ids, lower.parent = event.at, lower.ids[cut:], upper

    def _alloc(self, event: events.Alloc) -> None:
        self.sequence(event.seq).private.extend(self._taken(event.runs))

    def _taken(self, runs: list[tuple[int, int]]) -> Ids:
        """Return the ids of new private blocks, and count them."""
        ids = self.ids(runs)
        self.private += len(ids)
        if self.private + self.cached > MOST_BLOCKS:
            violated(f"more than {MOST_BLOCKS:,} blocks are in use, which is the most")
        return ids

    def _copy(self, event: events.Copy) -> None:
        self.private += 1
        self.sequence(event.seq).private[-1] = event.to

    def _commit(self, event: events.Commit) -> None:
        seq = self.sequence(event.seq)
        self._work += len(seq.private) >> 4
        keys = self.keys_of(event)
        ids = seq.private[: event.blocks]
        del seq.private[: event.blocks]
        if event.how in ("same", "shared"):
            seq.span = self.span(event.span)
            seq.span.pins += 1
            seq.span.creator = None
            return
        self.cached += len(ids)
        self.private -= len(ids)
        parent = seq.span
        self._check_keys(parent.keys if event.how == "grown" else keys, parent.end + len(ids))
        if event.how == "grown":
            parent.ids.extend(ids)
            return
        span = TracedSpan(event.span, parent.end, ids, keys, parent, 1, seq.id, event.t)
        self.spans[span.id] = seq.span = span
        parent.children += 1
        parent.creator = None

    def _evict(self, event: events.Evict | events.Drop) -> None:
        count = run_blocks(event.runs)
        if event.scope == "sequence":
            seq = self.sequence(event.seq)
            self._work += len(seq.holes) << 4
            seq.drop(event.first, event.first + event.blocks)
            self.private -= count
            return
        span = self.span(event.span)
        if not 0 < count <= len(span.ids):
            violated(f"span {span.id} has {len(span.ids)} blocks: {count} cannot leave")
        self.cached -= count
        del span.ids[-count:]
        if not span.ids:
            del self.spans[span.id]
            if span.parent is not None:
                span.parent.children -= 1

    def _free(self, event: events.Free) -> None:
        seq, freed = self.sequence(event.seq), run_blocks(event.runs)
        self.private -= freed
        if event.reason == "rollback":
            # Without `first` exactly the freed blocks were dropped.
            first = event.first if isinstance(event.first, int) else seq.blocks - freed
            del seq.private[first - seq.span.end - seq.freed :]
        elif event.reason == "close":
            self._unpin(seq)
            self._copies -= seq.copies
            del self.sequences[seq.id]

    def _unpin(self, seq: TracedSequence) -> None:
        """Unpin all that `seq` holds."""
        seq.span.creator = None
        for span in path(seq.span):
            self._work += 1
            span.pins -= 1

    def _compact(self, event: events.Compact) -> None:
        seq, freed = self.sequence(event.seq), run_blocks(event.runs)
        self._work += len(seq.private) >> 4
        own = self.own_blocks(seq)
        self.private -= freed
        seq.private = own[: len(own) - freed] + self._taken(event.new or [])
        self._unpin(seq)
        # Blocks that it had dropped before have no place in the new table either.
        forgotten = sum(end - first for first, end in seq.holes) * self.layout.block_size
        seq.compacted += event.held - event.tokens + forgotten
        seq.span, seq.holes, seq.freed = self._root, (), 0
        seq.compacted_to = event.tokens

    def _fork(self, event: events.Fork) -> None:
        seq = self.sequence(event.seq)
        copies = self.fork_copies(seq)
        self._copies += copies
        self._work += copies << 3
        child = attrs.evolve(seq, id=event.child, private=seq.private[:], copies=copies)
        self.sequences[child.id] = child
        for span in path(seq.span):
            self._work += 1
            span.pins += 1
            span.creator = None

    def _keys(self, event: events.Keys) -> None:
        """Append the keys of blocks that a request generates to those it has."""
        self.layout.append(self.prompt(event.request), event.keys)

    def _recover(self, tiers: TracedTiers, event: events.Recover) -> None:
        # The path has a name in place of the id of a request.
        if event.request in self.requests:
            violated(f"{event.request!r} is the name of another path")
        end = event.first + event.blocks
        self.requests[event.request] = TracedPrompt(
            event.request, 0, event.keys, end, end, 0, 0, unkeyed=False, share=None
        )
        self._count_keys(tiers, event.blocks)
        tiers.recover(event)

    def _offload(self, tiers: TracedTiers, event: events.Offload) -> None:
        keys = self.prompt(event.request).keys
        if not event.parked:
            self._count_keys(tiers, event.blocks)
        tiers.offload(event, keys)

    def _load_start(self, tiers: TracedTiers, event: events.LoadStart) -> None:
        if self.sequence(event.seq).prompt.id != event.request:
            violated(f"sequence {event.seq} is not of request {event.request!r}")
        tiers.load_start(event)

    def _load(self, tiers: TracedTiers, event: events.Load) -> None:
        tiers.load(event)

    def _drop(self, tiers: TracedTiers, event: events.Discard) -> None:
        keys = self.prompt(event.request).keys
        if event.reason != "parked":
            self._count_keys(tiers, event.blocks)
        tiers.drop(event, keys)

    def _count_keys(self, tiers: TracedTiers, blocks: int) -> None:
        """Count the steps that blocks of a prompt take in the directory of a tier."""
        self._work += 8 * (1 + blocks // self.layout.ratio) + len(tiers.levels)


def run_blocks(runs: list[tuple[int, int]]) -> int:
    """Return the number of blocks in runs."""
    blocks = 0
    for _, count in runs:
        blocks += abs(count)
    return blocks
