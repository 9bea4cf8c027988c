"""The base of the checks of a cache of one server: its state, its requests, its report."""

from __future__ import annotations

from functools import cache
from typing import Any, Generic, TypeVar

import attrs

from kvcore.cache.pool import Ids
from kvcore.cache.residency import CacheStats
from kvcore.errors import KvcoreError
from kvcore.plugins.manager import default
from kvcore.trace import events
from kvcore.trace.events import violated
from kvcore.trace.fields import encode_runs
from kvcore_plugins.traces.digest import EvictionDigest
from kvcore_replay.state.cache import CacheState
from kvcore_replay.state.groups import GroupState
from kvcore_replay.state.lifecycle import Lifecycles

State = TypeVar("State", CacheState, GroupState)


@attrs.frozen
class Caps:
    """The limits of a server that decide which requests it rejects.

    Attributes:
        longest: the most tokens of a sequence.
        in_one: the most tokens of one that is computed in one step or never.
    """

    longest: int | None
    in_one: int | None

    @classmethod
    def from_header(cls, header: events.Header) -> Caps:
        """Return the limits that HEADER gives; None: there is no such limit."""
        caps = header.batching or {}
        longest, waits = caps.get("max_model_len"), caps.get("unchunked") == "wait"
        in_one = caps.get("max_tokens") if waits and caps.get("chunked") is False else None
        return cls(
            longest if isinstance(longest, int) else None,
            in_one if isinstance(in_one, int) else None,
        )

    def output(self, request: events.Request) -> int:
        """Return the number of tokens that a request can get."""
        if self.longest is None:
            return request.output
        return min(request.output, max(0, self.longest - request.prompt))

    def refuses(self, prompt: int, tokens: int) -> bool:
        """Return True if no pool is large enough for a prompt, and a sequence of `tokens`."""
        if not prompt or (self.longest is not None and prompt >= self.longest):
            return True
        return self.in_one is not None and tokens > self.in_one


class CacheChecker(Generic[State]):
    """Base of the checks of a cache: each event against the state before it.

    Attributes:
        state: the cache after the events so far.
        lifecycles: the life cycles of the requests so far.
        evictions: digest of the blocks that were evicted for capacity.
        digests: whether to add to it, for a report.
    """

    def __init__(self, state: State) -> None:
        """Start with an empty cache, whose HEADER has the limits and plugins of the run."""
        header = state.header
        self.state: State = state
        self.lifecycles = Lifecycles(header.mode)
        self.evictions = EvictionDigest()
        self.digests = True
        self._caps = Caps.from_header(header)
        self._lag = bool((header.batching or {}).get("lag"))
        self._size = header.block_size
        eviction = header.plugins.get("eviction")
        self._eviction = None if eviction is None else eviction.name
        self._last_sequence = 0
        # The request for which blocks were evicted that no sequence has taken yet.
        self._evicting: int | str | None = None
        self._now = 0

    def report(self) -> dict[str, Any]:
        """Return the state, and counts, as fields of a `Report`."""
        state, lifecycles = self.state, self.lifecycles
        return {
            "pool": {
                "free": state.free,
                "cached": state.cached,
                "private": state.private,
                "spans": len(state.spans),
            },
            "finished": lifecycles.finished,
            "rejected": lifecycles.rejected,
            "preemptions": dict(lifecycles.preemptions),
            "evictions": self.evictions.as_dict(),
            "hit": hit_counts(state.hits),
            "tiers": [] if state.tiers is None else state.tiers.as_dict(),
            "header": state.header.as_dict(),
        }

    def forget(self, request: int | str) -> None:
        """Remove `request`, which does not run here, and is served elsewhere from now on."""
        self.lifecycles.forget(request)
        self.state.forget(request)

    def _evict_for(self, request: int | str) -> None:
        """Check that blocks may be evicted for `request`, and for no other one meanwhile."""
        if self._evicting is None:
            self.lifecycles.want(request)
            self._evicting = request
        elif self._evicting != request:
            self._refuse_victims()

    def _refuse_victims(self) -> None:
        violated(f"blocks were evicted for request {self._evicting!r}, which takes none")

    def _must_open(self, seq: int) -> None:
        """Check that `seq` is the next sequence."""
        self._last_sequence += 1
        if seq != self._last_sequence:
            violated(f"sequence {seq} opens; the next one is {self._last_sequence}")

    def _must_free(self, seq: int, runs: list[tuple[int, int]], freed: Ids) -> None:
        """Check that `seq` frees these blocks."""
        if self.state.ids(runs) != freed:
            told = [list(run) for run in runs]
            violated(f"sequence {seq} frees {encode_runs(freed)}, not {told}")

    def _must_cache_output(self) -> None:
        """Check that generated blocks without keys may be cached."""
        header = self.state.header
        decided = "rules" in header.plugins  # which may keep blocks of some requests
        if not decided and (header.batching or {}).get("generated") != "cached":
            violated("HEADER does not say that generated blocks stay cached without keys")

    def _end(self, event: events.End) -> None:
        """Check that no request or sequence is open; the reader has checked its fields."""
        self.lifecycles.end(len(self.state.sequences))


def hit_counts(stats: CacheStats) -> dict[str, Any]:
    """Return lookups and hits of admissions, and the hit ratios, as a `Report` has them."""
    counts = ("lookup_blocks", "hit_blocks", "self_hit_blocks")
    ratios = stats.ratios()
    return {name: getattr(stats, name) for name in counts} | {
        "ratio": {unit: ratios[unit] for unit in ("block", "request")}
    }


def expires(eviction: str) -> bool:
    """Return True if an eviction policy may expire spans, or is not built in."""
    return of_own("eviction", eviction, "expires_spans", otherwise=True)


@cache
def of_own(kind: str, name: str, attribute: str, *, otherwise: bool = False) -> bool:
    """Return an attribute of the class of a built-in plugin; `otherwise` for any other one."""
    try:
        return bool(getattr(default(kind, name), attribute))
    except KvcoreError:
        return otherwise
