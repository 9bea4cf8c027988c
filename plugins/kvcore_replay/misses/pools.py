"""Miss classification of a trace with a pool for each kind of layer: which pool was short.

A prompt of which earlier requests have sent the first blocks is divided at three positions:

    hit             full            sent            end
     |  pools short  |  full gone    |     new       |

Up to the hit all layers can go on. Up to `full` layers with full attention could, whose blocks
are cached, and the window or the state is not: spans that are tombstones.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from kvcore.trace import events
from kvcore_replay.misses.classifier import MissClassifier
from kvcore_replay.misses.reasons import (
    EVICTED,
    TOMBSTONE,
    Eviction,
    MissSegment,
    RequestMisses,
)
from kvcore_replay.state.cache import TracedSpan
from kvcore_replay.state.layout import TracedPrompt
from kvcore_replay.state.pools import PoolState


class PoolMisses(MissClassifier):
    """Classifies the misses of every first admission to a cache with pools.

    Attributes:
        state: the state of the cache, rebuilt from the trace.
    """

    EVENTS = (*MissClassifier.EVENTS, *events.POOL_EVENTS)
    has_optimum = False

    state: PoolState

    def __init__(self, header: events.Header, state: PoolState | None = None) -> None:
        """Start with empty pools, or with a `state` that the caller keeps up to date."""
        super().__init__(header, PoolState(header) if state is None else state)
        # By pool and span, the last TOMBSTONE; a span that keeps again what it had has none.
        self._lost_by: dict[str, dict[int, Eviction]] = {pool: {} for pool in self.state.kept}

    def _keep(self, event: events.Keep) -> None:
        for span in event.windows or ():
            self._lost_by["window"].pop(span, None)
        if isinstance(event.state, int):
            self._lost_by["state"].pop(event.state, None)

    def _tombstone(self, event: events.Tombstone) -> None:
        span = self.state.spans[event.span]
        self._lost_by[event.pool][span.id] = Eviction(
            line=event.n + 1,
            time=event.t,
            span=span.id,
            blocks=len(span.ids),
            by=event.pool,
            beneficiary=event.requester,
            user=self._users[span.id],
            age=event.t - span.last_access,
            hits=span.hits,
        )

    def _split(self, event: events.Split) -> None:
        super()._split(event)
        lost = self._lost_by.get("window", {})
        if event.span in lost:
            lost[event.upper] = lost[event.span]

    def _evict(self, event: events.Evict, span: TracedSpan, end: int) -> None:
        super()._evict(event, span, end)
        for lost in self._lost_by.values():
            lost.pop(span.id, None)

    def _lost(
        self, reasons: RequestMisses, prompt: TracedPrompt, hit: int, reach: int
    ) -> Iterator[MissSegment]:
        """Yield the missed segments of blocks that an earlier request contained."""
        spans, end = self.state.match(prompt.keys, reach)
        if end > hit:
            yield self._lacking(spans, hit, end, prompt)
        every = tuple(range(1 + len(self.state.kept)))
        for loss in super()._lost(reasons, prompt, max(hit, end), reach):
            # What full attention has lost, no other pool has.
            yield evolve(loss, groups=every) if loss.category == EVICTED else loss

    def _lacking(
        self, spans: list[TracedSpan], hit: int, end: int, prompt: TracedPrompt
    ) -> MissSegment:
        """Return the segment of blocks `[hit, end)` that full attention alone has."""
        state = self.state
        short = state.lacks(spans, end)
        needed = [
            span for span in spans if span.end > end - state.window_blocks and "window" in short
        ]
        gone = [self._lost_by["window"].get(span.id) for span in needed]
        if "state" in short:
            gone.append(self._lost_by["state"].get(spans[-1].id))
        last = max(filter(None, gone), key=lambda event: event.line, default=None)
        return self._missed(
            "unkept" if last is None else TOMBSTONE,
            hit,
            end,
            eviction=last,
            other=self._sender(prompt.keys, end) if last is None else last.user,
            groups=tuple(1 + list(state.kept).index(pool) for pool in short),
        )
