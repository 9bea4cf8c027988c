"""Miss classification of a trace of cache groups: which group was short, and why.

A prompt of which earlier requests have sent the first blocks is divided at three positions:

    hit            junction            sent             end
     |  others short  |  first kind short |     new      |

Up to the hit all groups can go on; up to the junction the first kind alone, full attention if
there is any. Beyond it that is short itself. What no earlier request sent is new to all. Each
stretch of others is divided once more, where a cache without bounds would have hit: evictions
have cost what is before it.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterator
from typing import Any

from attrs import evolve

from kvcore.trace import events
from kvcore_replay.misses.classifier import MissClassifier
from kvcore_replay.misses.reasons import EVICTED, Eviction, MissSegment, RequestMisses
from kvcore_replay.state.groups import GroupState, TracedGroup, name_of
from kvcore_replay.state.layout import TracedPrompt


class GroupMisses(MissClassifier):
    """Classifies the misses of every first admission to a cache of groups.

    Attributes:
        state: the state of the cache, rebuilt from the trace.
    """

    # A block knows who stored it, none is damaged, and why they left a tier is not told.
    EVENTS = ("REQUEST", "HIT", "MISS", "KEYS", "REJECT")
    OF_TIERS = ("LOAD_START",)
    has_optimum = False

    state: GroupState

    def __init__(self, header: events.Header, state: GroupState | None = None) -> None:
        """Start with an empty cache, or with a `state` that the caller keeps up to date."""
        super().__init__(header, GroupState(header) if state is None else state)
        # By group and name, the last eviction of a block.
        self._gone: list[dict[Any, Eviction]] = [{} for _ in self.state.groups]

    def before(self, event: Any) -> None:
        """Record the blocks that an event evicts, before it is applied to the state."""
        if event.event != "EVICT":
            return
        victims = [self.state.blocks.get(block) for block in self.state.ids(event.runs)]
        for block in filter(None, victims):
            self._gone[block.group][block.name] = Eviction(
                line=event.n + 1,
                time=event.t,
                span=None,
                blocks=len(victims),
                by=event.by,
                beneficiary=event.requester,
                user=block.user,
                age=event.t - block.last_access,
                hits=block.hits,
            )

    def _hit(self, event: events.Hit) -> None:
        self._miss(event)  # the state keeps the last user of each block

    def _below(
        self, reasons: RequestMisses, prompt: TracedPrompt, hit: int
    ) -> Iterator[MissSegment]:
        """Yield what pool and tiers have together beyond the hit, before any load of it."""
        state, tiers, size = self.state, self.state.tiers, self._size
        if tiers is None:
            return
        tokens = state.reach(prompt.id, state.limit(prompt.id))
        if tokens <= hit * size:
            return
        blocks: dict[str, Counter[int]] = {}
        for _, (group, name) in state.needed(prompt.id, tokens):
            level = None if name in state.names[group] else tiers.has((group, name))
            if level is not None:
                blocks.setdefault(level, Counter())[group] += 1
        now, took = reasons.admitted or 0, 0
        for level, counts in blocks.items():
            tier = tiers.levels[level]
            moved = sum(tier.group_bytes[group] * count for group, count in counts.items())
            took = max(took, tier.done_at(moved, now, write=False) - now)
        # The farthest, without which there would be no such prefix.
        last = max(blocks, key=[*tiers.levels].index)
        yield MissSegment(
            category="recomputed", first=hit * size, tokens=tokens - hit * size, tier=last,
            load_ns=took,
        )  # fmt: skip

    def _load_start(self, event: events.LoadStart) -> None:
        """Record a load for a first admission, which comes in several lines."""
        reasons = self.requests.get(event.request)
        if reasons is None or reasons.seq != event.seq:
            return
        for index, loss in enumerate(reasons.losses):
            if loss.category in ("recomputed", "loaded"):
                took = event.done - event.t
                if loss.category == "loaded":
                    took = max(took, loss.load_ns or 0)
                reasons.losses[index] = evolve(loss, category="loaded", load_ns=took)

    def _lost(
        self, reasons: RequestMisses, prompt: TracedPrompt, hit: int, reach: int
    ) -> Iterator[MissSegment]:
        """Yield the missed segments of blocks that an earlier request contained."""
        assert reasons.seq is not None
        junction = self.state.sequences[reasons.seq].junction // self._size
        start = max(hit, min(junction, reach))
        if start > hit:
            yield from self._segments(prompt, hit, start)
        if start < reach:
            end, other = self._in_flight(reasons, prompt, start, reach)
            if end > start:
                yield self._missed("in_flight", start, end, other=other)
            if end < reach:
                yield from self._segments(prompt, end, reach)

    def _segments(self, prompt: TracedPrompt, first: int, end: int) -> Iterator[MissSegment]:
        """Yield the segments of blocks `[first, end)`: what evictions cost, and the rest.

        Up to `stored` all groups have had what they need: a cache without bounds would hit.
        """
        had = [ChainMap(*each) for each in zip(self.state.names, self._gone, strict=True)]
        stored = max(first, self.state.reach(prompt.id, end * self._size, had) // self._size)
        short, evictions = self._lacking(prompt, first, stored)
        if first == stored or not evictions:
            stored = first  # what it lacks may be in flight alone, before `first`
        else:
            gone = max(evictions, key=lambda event: event.line)
            yield self._missed(
                EVICTED, first, stored, eviction=gone, other=gone.user, groups=short
            )
        if stored < end:
            short, _ = self._lacking(prompt, stored, end)
            never = (
                name not in had[index]
                for index in short
                if self.state.groups[index].kind == "full"
                for name in self._needed(prompt, self.state.groups[index], stored, end)
            )
            category = "unstored" if any(never) else "unkept"
            other = self._sender(prompt.keys, end)
            yield self._missed(category, stored, end, other=other, groups=short)

    def _lacking(
        self, prompt: TracedPrompt, first: int, end: int
    ) -> tuple[tuple[int, ...], list[Eviction]]:
        """Return the groups that cannot go on after block `end`, and what has evicted it."""
        short = [
            group
            for group in self.state.groups
            if not self.state.serves(prompt.id, end * self._size, group)
        ]
        gone = [
            self._gone[group.index].get(name)
            for group in short
            for name in self._needed(prompt, group, first, end)
            if name not in self.state.names[group.index]
        ]
        return tuple(group.index for group in short), [*filter(None, gone)]

    def _needed(
        self, prompt: TracedPrompt, group: TracedGroup, first: int, end: int
    ) -> Iterator[Any]:
        """Return the names of blocks that `group` needs to hit from block `first` to `end`."""
        own, tokens = self.state.prompt_in(group, prompt.id), end * self._size
        start = group.passed(tokens)
        if group.kind == "full":
            start = first * self._size // group.size
        self.state.count_work(tokens // group.size - start)
        return (name_of(own, group, index) for index in range(start, tokens // group.size))
