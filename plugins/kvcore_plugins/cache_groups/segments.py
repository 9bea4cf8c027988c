"""Cache groups from which whole segments leave, chosen by a checkpoint policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import filterfalse, takewhile
from typing import Any

import attrs

from kvcore.cache import CheckpointPolicy, Segment
from kvcore.plugins import find_override
from kvcore.request import Request
from kvcore_plugins.cache_groups.cache import GroupedCache
from kvcore_plugins.cache_groups.groups import GroupMatch, GroupSequence, LayerGroup
from kvcore_plugins.cache_groups.named_blocks import Name


@attrs.define(eq=False, slots=True)
class CachedSegment(Segment):
    """A segment with its blocks.

    Attributes:
        above: the segment that ends where it starts; None: it begins a text.
        next: the resumable segments whose `above` it is. Tails are not among them.
        kept: its blocks of windows and states.
        full: its blocks of full attention, from the first one on; of a tail, all of its blocks.
        borrowed: group and name of each block of full attention before its end that neither it
            owns nor one above it: those of other segments are hit in their place.
    """

    above: CachedSegment | None = None
    next: dict[CachedSegment, None] = attrs.field(factory=dict)
    kept: list[int] = attrs.field(factory=list)
    full: list[int] = attrs.field(factory=list)
    borrowed: dict[tuple[int, Name], None] = attrs.field(factory=dict)


@attrs.define(eq=False, slots=True)
class _Text:
    """The text of an open sequence.

    Attributes:
        serial: serial number of its admission.
        above: its last segment so far.
        full: its blocks of full attention that got names after that, and the tokens up to them.
        kept: such blocks of windows and states.
        ends: tokens up to the states among these.
    """

    serial: int
    above: CachedSegment | None
    full: list[tuple[int, int]] = attrs.field(factory=list)
    kept: list[tuple[int, int]] = attrs.field(factory=list)
    ends: set[int] = attrs.field(factory=set)

    def take(self, end: int) -> tuple[list[int], list[int]]:
        """Remove the blocks up to `end` tokens: those of full attention, and the others."""
        full, self.full = _split(self.full, end)
        kept, self.kept = _split(self.kept, end)
        return full, kept

    def lose(self, block: int) -> None:
        """Remove a block that leaves before a segment has it."""
        self.full = [entry for entry in self.full if entry[1] != block]
        self.kept = [entry for entry in self.kept if entry[1] != block]


class SegmentedGroups(GroupedCache):
    r"""A `GroupedCache` from which the segments leave that its checkpoint policy chooses.

    ::

        0 ---- [full] ----> boundary ---- [full] ----> boundary ---- [full] ---- (tail)
                             [kept]  \                  [kept]
                                      ---- [full] ----> boundary
                                                         [kept]

    A boundary is where a state is kept. One behind which texts part stays. Any other can leave:
    its windows and states first, and then its blocks of full attention if nothing is below it;
    else the segment below gets these. When no segment can leave, idle blocks do, the one that
    was freed first before the others, and whatever segment they are of: a branch too. What
    stands then on blocks of other segments, and can be hit while these stay, borrows them; a
    segment is not resumable any more when one that it borrows has left.

    Args:
        groups, blocks: as for `GroupedCache`; one group at least keeps states.
        options: further options of `GroupedCache`.

    Raises:
        InputError: as `GroupedCache`; or no group keeps states.
    """

    def __init__(self, groups: Iterable[LayerGroup], blocks: int, **options: Any) -> None:
        super().__init__(groups, blocks, **options)
        self._seconds = self.geometry.recompute_seconds
        self.hears_names = True
        self._chooser = self.checkpoint
        self._on_changed = find_override(self.checkpoint, "on_changed")
        self.checkpoint.replay = self._replay
        self._segments: OrderedDict[CachedSegment, None] = OrderedDict()  # by their order
        self._order = 0
        self._segment_of: dict[int, CachedSegment] = {}
        self._sizes_of_full = [
            group.block_size for group in self.groups if group.kind in ("full", "chunk")
        ]
        self._borrowers: dict[tuple[int, Name], dict[CachedSegment, None]] = {}
        self._texts: dict[int, _Text] = {}
        self._leaving: CachedSegment | None = None
        self._admissions = 0

    def _problem(self) -> str:
        if self.has_states:
            return super()._problem()
        return (
            f"checkpoint {self.checkpoint.name!r} chooses the states that leave, and these "
            "groups keep none: leave it out"
        )

    def open(
        self, request: Request, *arguments: Any, match: GroupMatch | None = None, **options: Any
    ) -> GroupSequence:
        """Admit `request`; it uses the segment at whose end it resumes."""
        if match is None:
            match = self.match(request, target=options.get("target"))
        seq = super().open(request, *arguments, match=match, **options)
        self._admissions += 1
        above = None
        for group, blocks in zip(self.groups, match.blocks, strict=True):
            if group.kind == "state" and blocks:
                above = self._segment_of.get(blocks[-1])
        if above is not None:
            above.last_use = self._admissions
            self._put_last(above)
            if not above.resumable:
                self._restore(above, seq)
            self._tell(above)
        self._texts[seq.id] = _Text(self._admissions, above)
        return seq

    def store(self, seq: GroupSequence, tokens: int) -> list[tuple[int, Name]]:
        """Give names to the blocks that the first `tokens` tokens of `seq` fill."""
        states = super().store(seq, tokens)
        if states:
            text = self._texts[seq.id]
            for end in sorted(text.ends):
                text.above = self._add(seq, end, *text.take(end))
            text.ends.clear()
        return states

    def end_load(self, seq: GroupSequence, runs: list[list[tuple[int, int]]], now: int) -> None:
        """Count the tokens of `seq` as computed: what was loaded is a segment again.

        If the boundary is still there, its segment gets back what it had lost.
        """
        super().end_load(seq, runs, now)
        text = self._texts[seq.id]
        full, kept = text.take(seq.computed)
        text.ends.clear()
        states = (
            table.blocks[-1]
            for group, table in zip(self.groups, seq.tables, strict=True)
            if group.kind == "state"
        )
        segment = next(filter(None, map(self._segment_of.get, states)), None)
        if segment is None:
            text.above = self._add(seq, seq.computed, full, kept)
            self._borrow_missing(text.above, seq)
            return
        text.above = segment
        segment.last_use = text.serial
        self._own(segment, full, kept)
        if not segment.resumable:
            self._restore(segment, seq)
        self._tell(segment)

    def close(self, seq: GroupSequence, *arguments: Any, **options: Any) -> None:
        """Give back all blocks of `seq`. What follows its last boundary is its tail."""
        self._begin(seq, None)
        text = self._texts[seq.id]
        if tail := [*text.kept, *text.full]:
            self._add(seq, tail[-1][0], [block for _, block in tail], [])
        del self._texts[seq.id]
        super().close(seq, *arguments, **options)

    def _stored(self, seq: GroupSequence, group: int, copies: dict[int, bool]) -> None:
        super()._stored(seq, group, copies)
        kind, size = self.groups[group].kind, self.groups[group].block_size
        table, text = seq.tables[group], self._texts[seq.id]
        named = text.full if kind in ("full", "chunk") else text.kept
        for position in copies:
            named.append(((position + 1) * size, table.blocks[position - table.first]))
            if kind == "state":
                text.ends.add((position + 1) * size)

    def _add(
        self, seq: GroupSequence, end: int, full: list[int], kept: list[int]
    ) -> CachedSegment:
        """Add the segment that follows the last one of the text of `seq`."""
        text = self._texts[seq.id]
        above = text.above
        while above is not None and not above.resumable:
            # It has lost its boundary since: its blocks go to what follows it.
            full = above.full + full
            above.full = []
            above.blocks = 0
            self._segments.pop(above, None)
            self._tell(above)
            above = above.above
        segment = CachedSegment(0, end, bool(kept), text.serial)
        self._own(segment, full, kept)
        self._put_below(segment, above)
        if above is not text.above:  # others may have got some of its blocks
            self._borrow_missing(segment, seq)
        return segment

    def _own(self, segment: CachedSegment, full: list[int], kept: list[int]) -> None:
        """Give blocks to `segment`, `full` before its own; make it the last in the order."""
        segment.full[:0] = full
        segment.kept += kept
        segment.blocks = len(segment.full) + len(segment.kept)
        self._segment_of.update(dict.fromkeys((*full, *kept), segment))
        self._put_last(segment)

    def _put_last(self, segment: CachedSegment) -> None:
        """Make `segment` the last one in the order."""
        self._order += 1
        segment.order = self._order
        self._segments[segment] = None
        self._segments.move_to_end(segment)

    def _put_below(self, segment: CachedSegment, above: CachedSegment | None) -> None:
        """Make `segment` start where `above` ends."""
        segment.above = above
        segment.start = 0 if above is None else above.end
        if segment.resumable:
            segment.seconds = self._seconds(segment.start, segment.end - segment.start)
            if above is not None:
                above.next[segment] = None
                self._count_below(above)
        self._tell(segment)

    def _count_below(self, segment: CachedSegment | None) -> None:
        """Count what is below `segment` and those above it, as far up as that changes."""
        while segment is not None:
            before = segment.children, segment.below
            segment.children = len(segment.next)
            only = next(iter(segment.next)) if segment.children == 1 else None
            segment.below = 0 if only is None else only.below + 1
            if before == (segment.children, segment.below):
                break
            self._tell(segment)
            segment = segment.above

    def _tell(self, segment: CachedSegment) -> None:
        """Notify the policy that `segment` has changed."""
        if self._on_changed is not None:
            self._ask("on_changed", self._on_changed, segment)

    def _replay(self, checkpoint: CheckpointPolicy, requests: Iterable[Request]) -> int:
        """Return the tokens that `requests` hit, one by one, in an empty cache like this."""
        cache = SegmentedGroups(
            self.groups, self.pool.blocks, recompute=self._seconds, checkpoint=checkpoint,
            key_tokens=self.geometry.key_tokens,
        )  # fmt: skip
        for request in requests:
            cache.compute(request, self.in_flight_tokens or request.prompt_tokens)
        return cache.stats.hit_tokens

    # What segments borrow.

    def _borrow(self, segment: CachedSegment, places: Iterable[tuple[int, Name]]) -> None:
        """Note that `segment` stands on blocks of these groups and names, of other segments."""
        for place in places:
            if self.groups[place[0]].kind == "full":  # of chunks a request needs its own alone
                segment.borrowed[place] = None
                self._borrowers.setdefault(place, {})[segment] = None

    def _borrow_missing(self, segment: CachedSegment, seq: GroupSequence) -> None:
        """Borrow for `segment`, of the text of `seq`, those of its blocks that it lacks."""
        tokens = segment.end - segment.start
        whole = sum(tokens // size for size in self._sizes_of_full)
        if not segment.resumable or len(segment.full) >= whole:
            return
        own = set(map(self._blocks.place, segment.full))
        for index, group in enumerate(self.groups):
            size = group.block_size
            names = seq.names[size].at(range(segment.start // size, segment.end // size))
            self._borrow(segment, ((index, name) for name in names if (index, name) not in own))

    def _evict(self, blocks: list[int]) -> None:
        """Remove the names of `blocks`; what borrows the last one of a name cannot be hit."""
        if not self._borrowers:
            super()._evict(blocks)
            return
        places = [*map(self._blocks.place, blocks)]
        super()._evict(blocks)
        for group, name in places:
            if name not in self._cached[group]:
                while borrowers := self._borrowers.get((group, name)):
                    self._part(next(iter(borrowers)))

    def _part(self, segment: CachedSegment) -> None:
        """Bar requests from `segment` and those below: blocks before them have left.

        What they hold stays until the policy chooses it, each for itself.
        """
        if segment.above is not None:
            segment.above.next.pop(segment, None)
            self._count_below(segment.above)
        parted = [segment]
        for each in parted:
            parted += each.next
            each.next.clear()
            each.children = each.below = 0
            each.resumable = False
            each.seconds = 0.0
            self._give_back(each)
            self._tell(each)

    def _restore(self, segment: CachedSegment, seq: GroupSequence) -> None:
        """Readmit requests at `segment`, as `seq` resumes there: what was missing is back."""
        segment.resumable = True
        self._put_below(segment, None)
        self._borrow_missing(segment, seq)

    def _give_back(self, segment: CachedSegment) -> None:
        """Remove all that `segment` borrows."""
        for place in segment.borrowed:
            borrowers = self._borrowers[place]
            del borrowers[segment]
            if not borrowers:
                del self._borrowers[place]
        segment.borrowed.clear()

    # Evictions.

    def _choose(self, count: int, seq: GroupSequence) -> list[int]:
        """Return blocks of the segments that the policy chooses, which no sequence holds.

        A segment that has begun to leave goes on to, as far as it can. When none can leave,
        blocks do, in the order in which they became idle.
        """
        victims: list[int] = []
        while len(victims) < count:
            blocks = [] if self._leaving is None else self._idle(self._leaving)
            if not blocks:
                self._leaving = self._ask_victim()
                if self._leaving is None:
                    rest = self._blocks.pop(count - len(victims))
                    for block in rest:
                        self._lose(block)
                    return victims + rest
                blocks = self._idle(self._leaving)
            for block in blocks[: count - len(victims)]:
                self._blocks.remove(block)
                self._lose(block)
                victims.append(block)
        return victims

    def _ask_victim(self) -> CachedSegment | None:
        """Return the segment that the policy chooses; None if none can leave."""
        segments = _Candidates(self._segments, self._can_leave)
        if next(iter(segments), None) is None:
            return None
        victim = self._ask("victim", self.checkpoint.victim, segments)
        if not isinstance(victim, CachedSegment) or victim not in segments:
            self._refuse("victim()", f"{victim!r}, which cannot leave")
        return victim

    def _can_leave(self, segment: CachedSegment) -> bool:
        """Return True if a block of `segment` can leave now."""
        if segment.children > 1:
            return False
        holders = self._blocks.holders
        if segment.kept:
            return not all(map(holders, segment.kept))
        return not segment.children and not holders(segment.full[-1])

    def _idle(self, segment: CachedSegment) -> list[int]:
        """Return the blocks of `segment` that can leave now, in order."""
        holders = self._blocks.holders
        idle = [*filterfalse(holders, segment.kept)]
        if not segment.children and len(idle) == len(segment.kept):
            idle += takewhile(lambda block: not holders(block), reversed(segment.full))
        return idle

    def _lose(self, block: int) -> None:
        """Remove `block` from its segment, if it has one."""
        segment = self._segment_of.pop(block, None)
        if segment is None:
            if self.groups[self._blocks.place(block)[0]].window is not None:
                for text in self._texts.values():  # its window may have passed the block
                    text.lose(block)
            return
        if block in segment.kept:
            segment.kept.remove(block)
        else:
            if segment.full[-1] == block:  # as a rule
                segment.full.pop()
            else:
                segment.full.remove(block)
            if segment.resumable:
                self._borrow(segment, [self._blocks.place(block)])
        segment.blocks -= 1
        if segment.resumable and not segment.kept:
            self._dissolve(segment)
        if not segment.blocks:
            del self._segments[segment]
        self._tell(segment)

    def _dissolve(self, segment: CachedSegment) -> None:
        """Start the segments below `segment`, which lost its boundary, where it starts.

        The first of them gets its blocks of full attention, and the others borrow these.
        """
        segment.resumable = False
        segment.seconds = 0.0
        above = segment.above
        below = [*segment.next]
        if above is not None:
            del above.next[segment]
        segment.next.clear()
        segment.children = segment.below = 0
        for child in below:
            self._put_below(child, above)
            self._borrow(child, segment.borrowed)
        self._give_back(segment)
        self._count_below(above)
        if below:
            heir = below[0]
            for child in below[1:]:
                self._borrow(child, map(self._blocks.place, segment.full))
            self._segment_of.update(dict.fromkeys(segment.full, heir))
            heir.full[:0] = segment.full
            heir.blocks += len(segment.full)
            segment.blocks -= len(segment.full)
            segment.full = []
            self._tell(heir)


class _Candidates(Sequence[CachedSegment]):
    """The segments that can leave now, by their order; none is copied."""

    def __init__(
        self,
        segments: OrderedDict[CachedSegment, None],
        can_leave: Callable[[CachedSegment], bool],
    ) -> None:
        self._segments, self._can_leave = segments, can_leave

    def __contains__(self, segment: object) -> bool:
        return segment in self._segments and self._can_leave(segment)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[CachedSegment]:
        return filter(self._can_leave, self._segments)

    def __reversed__(self) -> Iterator[CachedSegment]:
        return filter(self._can_leave, reversed(self._segments))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _split(blocks: list[tuple[int, int]], end: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the blocks up to `end` tokens, and the others with their tokens."""
    first = [block for tokens, block in blocks if tokens <= end]
    return first, [entry for entry in blocks if entry[0] > end]
