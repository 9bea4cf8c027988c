"""Tool TTL: keep the prefix of a session while its tool is likely to return soon."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from math import inf
from typing import ClassVar, TypeAlias

import attrs
from attrs.validators import gt, lt

from kvcore import Request, ScoreEviction, Span
from kvcore.request import Key
from kvcore.units import NS_PER_S
from kvcore_plugins.bounds import bounded
from kvcore_plugins.eviction.last_end import LastEnd
from kvcore_plugins.eviction.survival import hazards, indices

_SHIFT = 27
_BUCKETS = 21
"""Ages fall in buckets: below 2^27 ns (0.13 s), up to twice as much, ..., 2^46 ns (20 h)."""

_WIDTHS = [
    (end - start) / NS_PER_S
    for start, end in pairwise([0, *(1 << (_SHIFT + bucket) for bucket in range(_BUCKETS))])
]

_TAIL = 0.3
"""Share of the waits that end in a bucket, of those that reach it, without observations."""

_MOST_SESSIONS = 1 << 16
_MOST_WAITS = 8
_MOST_TOOLS = 1_000
"""Tools whose waits are counted apart: the names are those that clients send."""


@attrs.define
class _Tool:
    """How many waits for a tool have ended in each bucket of age, and were given up in it."""

    ended: list[int] = attrs.field(factory=lambda: [0] * _BUCKETS)
    given_up: list[int] = attrs.field(factory=lambda: [0] * _BUCKETS)


Wait: TypeAlias = tuple[int, Key, str, int]
"""(place, key, tool, since): a prompt with this key at this place ends the wait, which began
at `since` (ns)."""


@attrs.define(slots=False, eq=False, repr=False, on_setattr=attrs.setters.NO_OP)
class ToolTTL(ScoreEviction):
    """Evict the prefix with the lowest expected saving for its memory.

    When a request of a session ends, the session waits for the tool that the answer calls
    (`Request.tool`), or for its user. Keeping its prefix up to an age T saves the seconds to
    compute a block again, or to load it from a tier, if the session returns by then; the cost
    is the memory until it returns, or until T. The score is the best ratio of the two over all
    T. So every prefix has a time to live: it is longer in a larger pool, and for a slower tool.

    The times of tools are estimated online, by a histogram for each name: of the waits that
    reached an age, in powers of two, the share that ended there. With few waits the estimate
    is near that for all tools, and this near a heavy tail, for which older waits are less
    likely to end soon, as in LRU. A wait ends when its session sends a prompt with more than
    the first 15/16 of the keys of the previous one. Prefixes without a session have the heavy
    tail alone. O(log leaves) per event, and at intervals O(sessions); a score changes when the
    age enters the next bucket.

    `span.data` is (tool, ns of the release).

    Options:
        prior: weight of the estimate without observations of the tool, in waits.

    Source: a TTL by the chance of return, the cost of recomputing, and a price of memory: Li
    et al., "Continuum", arXiv 2511.02230, 2025. A rank by value per block-second in place of
    a price: LHD, Beckmann, Chen and Cidon, NSDI 2018. Waits that have not ended count as in
    the estimator of Kaplan and Meier (1958).
    """

    name: ClassVar[str] = "tool-ttl"

    prior: float = bounded(8.0, "a number of waits above 0", gt(0), lt(inf))

    def attach(self, blocks: int, block_size: int) -> None:
        """Store the size of the pool and create empty histograms."""
        super().attach(blocks, block_size)
        self._waits: OrderedDict[str | None, list[Wait]] = OrderedDict()
        self._tools: OrderedDict[str, _Tool] = OrderedDict()
        self._ended = LastEnd()
        self._seen = self._due = 0
        # Values by age: of prefixes without a session, of all tools, and of each.
        self._unknown = self._all = indices([_TAIL] * _BUCKETS, _WIDTHS)
        self._values: dict[str, list[float]] = {}

    def on_queued(self, request: Request, now: int, *, front: bool = False) -> None:
        """End the waits of the session for prompts that begin as this one does.

        A preempted request comes to the front: it was sent before, and ended waits then.
        """
        waits = None if front else self._waits.get(request.session)
        if waits:
            keys, going = request.keys, []
            for wait in waits:
                index, key, tool, since = wait
                if index < len(keys) and keys[index] == key:
                    self._record(tool).ended[_bucket(now - since)] += 1
                    self._seen += 1
                else:
                    going.append(wait)
            waits[:] = going

    def on_end(self, request: Request, now: int) -> None:
        """Start to wait for the next request of the session."""
        self._ended.begin(request, now)
        if request.session is None or not request.keys:
            return
        tool = request.tool or ""
        self._record(tool)
        index = len(request.keys) * 15 // 16
        waits = self._waits.setdefault(request.session, [])
        waits.append((index, request.keys[index], tool, now))
        self._seen += 1
        self._waits.move_to_end(request.session)
        if len(waits) > _MOST_WAITS:
            self._give_up(waits.pop(0), now)
        if len(self._waits) > _MOST_SESSIONS:
            for wait in self._waits.popitem(last=False)[1]:
                self._give_up(wait, now)

    def on_release(self, span: Span, now: int) -> None:
        """Store the tool for which `span` waits from now on."""
        request = self._ended.of(span, now)
        if request is None:
            tool = None if span.data is None else span.data[0]
        elif request.session is None or not request.keys:
            tool = None
        else:
            tool = request.tool or ""
        span.data = tool, now
        super().on_release(span, now)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Copy tool and time to the upper half."""
        upper.data = lower.data
        super().on_split(upper, lower)

    def score(self, span: Span, now: int) -> float:
        """Return the seconds saved per second that a block of the tail is kept."""
        if self._seen >= self._due:
            self._learn(now)
        tool, since = span.data
        values = self._unknown if tool is None else self._values.get(tool, self._all)
        return values[_bucket(now - since)] * span.loss_seconds

    def changes_at(self, span: Span, now: int) -> int | None:
        """Return when the age of `span` enters the next bucket, in ns; None: never."""
        since: int = span.data[1]
        bucket = _bucket(now - since)
        return since + (1 << (_SHIFT + bucket)) if bucket < _BUCKETS - 1 else None

    def _give_up(self, wait: Wait, now: int) -> None:
        self._record(wait[2]).given_up[_bucket(now - wait[3])] += 1

    def _record(self, tool: str) -> _Tool:
        """Return the counts of a tool; beyond `_MOST_TOOLS` those counted least recently go."""
        record = self._tools.get(tool)
        if record is None:
            record = self._tools[tool] = _Tool()
            if len(self._tools) > _MOST_TOOLS:
                self._tools.popitem(last=False)
        else:
            self._tools.move_to_end(tool)
        return record

    def _learn(self, now: int) -> None:
        """Compute the values by tool and age from the waits so far."""
        self._due = self._seen + self._seen // 8 + 8
        # Waits that left a bucket without an end: those given up in it, and the open ones.
        left = {tool: record.given_up[:] for tool, record in self._tools.items()}
        for waits in self._waits.values():
            for _, _, tool, since in waits:
                if tool in left:
                    left[tool][_bucket(now - since)] += 1
        none = [0] * _BUCKETS
        ended_in_all, left_in_all = (
            [sum(column) for column in zip(none, *rows, strict=True)]
            for rows in ([record.ended for record in self._tools.values()], left.values())
        )
        prior = hazards(ended_in_all, left_in_all, [_TAIL] * _BUCKETS, self.prior)
        self._all = indices(prior, _WIDTHS)
        self._values = {
            tool: indices(hazards(record.ended, left[tool], prior, self.prior), _WIDTHS)
            for tool, record in self._tools.items()
        }


def _bucket(age: int) -> int:
    """Return the bucket of an age in ns."""
    return min((age >> _SHIFT).bit_length(), _BUCKETS - 1)
