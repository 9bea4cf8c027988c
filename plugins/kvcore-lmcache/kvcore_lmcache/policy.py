"""A cache policy of LMCache in the order of a kvcore policy."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from hashlib import blake2b
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any, ClassVar, Self

import attrs
from lmcache.logging import init_logger
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy

from kvcore import Request
from kvcore.cache import EvictionPolicy
from kvcore.errors import InputError
from kvcore.plugins import find_override
from kvcore.untrusted import parse_digits
from kvcore_hosting import EngineRecorder, HostSettings, PolicyHost

CHUNKS = "KVCORE_LMCACHE_CHUNKS"
"""Variable with the size of a back end in chunks; without it, that of the first eviction."""

EARLY = 1_000_000
"""Events that are kept until the size is known, beside the stores of chunks that are there."""

REFUSED = {
    "cost": "it weighs what it costs to compute a chunk again, by its position in the prompt",
    "priority": "priorities come with requests",
    "tail-lru": "it counts from the end of a conversation, and LMCache tells no positions",
}
"""Built-in policies that need what LMCache does not provide, with the reason."""

_recorders = count(1)
_log = init_logger("lmcache.kvcore")  # shown as LMCache's own lines are


def refuse_unfit(eviction: EvictionPolicy) -> None:
    """Raise InputError for a policy that needs what LMCache does not provide.

    LMCache calls its policy for each chunk that is stored, hit or lost, without the chunk
    before it and without the request. Which attributes of a span a policy of another
    distribution reads is not checked: every chunk is a span of one block, the first of a
    prompt.
    """
    why = REFUSED.get(eviction.name)
    if why is None and eviction.expires_spans:
        why = "what has expired must not be hit, and LMCache asks nobody on look-up"
    for method in ("on_queued", "on_dequeued"):
        if why is None and find_override(eviction, method):
            why = f"it has to hear of requests (`{method}`), of which LMCache does not tell"
    if why:
        msg = f"eviction policy {eviction.name!r} cannot be used in LMCache: {why}"
        raise InputError(msg)


class KvcorePolicy(BaseCachePolicy):
    """Cache policy of LMCache that runs an eviction policy of kvcore.

    Every chunk is a span of one block, and a child of the root. It is stored when it enters
    the mapping of the back end, and dropped when it leaves, for any reason: so policy and back
    end always have the same chunks.

    LMCache names no request. One is the hits of a look-up and the stores that follow, until the
    next hit, or until room is made again; it ends with each of its uses, as far as a policy
    hears of it. Of its answer, tool and tenant nothing is known.

    A back end makes room before it names the new chunk: `on_miss` of the policy is called right
    before the chunk is stored, after the eviction. A victim that is in use stays, and counts as
    used at that moment.

    The size of a back end in chunks is `KVCORE_LMCACHE_CHUNKS`, or else the number of its
    chunks at its first eviction; the stores and hits of these before that are then passed to
    the policy in their order. If LMCache stores the layers of a chunk one by one, the first
    layer stands for the chunk.

    If the policy fails, the least recently used chunks are evicted (`PolicyHost`).

    Args:
        eviction: the policy, with options; None: that of `KVCORE_EVICTION`.

    Attributes:
        clock: function that returns the time in ns.
        host: the host of the policy; None until the size is known.

    Raises:
        InputError: no such policy, or one that needs what LMCache does not provide.
    """

    clock: ClassVar[Any] = staticmethod(time.monotonic_ns)

    def __init__(self, eviction: str | None = None) -> None:
        settings = HostSettings.from_environment()
        if eviction is not None:
            settings = HostSettings(eviction, settings.trace)
        self._policy = settings.build()
        refuse_unfit(self._policy)
        _log.info("chunks are evicted by kvcore's %s", settings.eviction)
        self._trace = settings.trace
        self._recorder: EngineRecorder | None = None
        self.host: PolicyHost | None = None
        # Back ends call in their own locks, except when a file is missing that they read.
        self._lock = RLock()
        self._early: list[tuple[str, Any, int]] = []
        self._most_early = EARLY
        self._offered: list[Any] = []
        self._evicted: list[Any] = []  # not in the recording yet
        self._accesses = self._requests = 0
        self._has_stored = False  # the latest request
        chunks = os.environ.get(CHUNKS)
        if chunks:
            size = parse_digits(chunks)
            if not size:
                msg = f"{CHUNKS}={chunks!r}: give the size of a back end in chunks, above 0"
                raise InputError(msg)
            self._begin(size)

    # Methods that LMCache calls.

    def init_mutable_mapping(self) -> Entries:
        """Return the mapping in which the back end keeps its entries."""
        return Entries(self)

    def update_on_hit(self, key: Any, cache_dict: Any) -> None:
        """Count a use of a chunk."""
        with self._lock:
            self._tell("hit", key)

    def update_on_put(self, key: Any) -> None:
        """Ignore the call: a chunk counts as soon as it is in the mapping."""

    def update_on_force_evict(self, key: Any) -> None:
        """Ignore the call: a chunk counts until it leaves the mapping."""

    def get_evict_candidates(self, cache_dict: Any, num_candidates: int = 1) -> list[Any]:
        """Return up to `num_candidates` keys whose entries can leave, in order."""
        with self._lock:
            for key in self._offered:
                if key in cache_dict:  # it was not evicted, after all
                    self._tell("stored", key)
            keys: list[Any] = []
            self._offered = keys
            hosted = sum(map(_counts, cache_dict)) if self.host is None else 0
            if self.host is None and hosted:
                self._begin(hosted)
            now = self.clock()
            self._begin_request()

            def usable(key: Any) -> bool:
                entry = cache_dict.get(key)
                return entry is not None and bool(entry.can_evict)

            while self.host is not None and len(keys) < num_candidates:
                key = self.host.victim(usable, now=now)
                if key is None:
                    break
                keys.append(key)
                if hasattr(key, "layer_id"):
                    break  # LMCache evicts all layers of one chunk, however many it asked for
            if self._recorder is not None:
                self._evicted += keys
            return list(keys)

    # Methods that the mapping calls.

    def entered(self, key: Any) -> None:
        """Store a chunk that has entered the mapping."""
        with self._lock:
            self._tell("stored", key)

    def left(self, key: Any) -> None:
        """Drop a chunk that has left the mapping, unless it was evicted."""
        with self._lock:
            self._tell("gone", key)

    # Inside.

    def _begin(self, chunks: int) -> None:
        """Start the policy in a back end of `chunks` chunks."""
        self.host = PolicyHost(self._policy, chunks, 1, fallback=True)
        _log.info("kvcore's %s decides among %d chunks", self._policy.name, chunks)
        if self._trace is not None:
            self._recorder = _recorder(self._trace, chunks, self._policy)
        # Chunks that have left need no room: there is as much as for those that are there.
        self._forget(len(self._early))
        early, self._early = self._early, []
        for what, key, now in early:
            self._apply(what, key, now)

    def _tell(self, what: str, key: Any) -> None:
        """Pass an event of a chunk to the policy, or keep it until the policy starts."""
        if not _counts(key):
            return
        now = self.clock()
        if self.host is not None:
            self._apply(what, key, now)
            return
        self._early.append((what, key, now))
        if len(self._early) > self._most_early:
            self._forget(EARLY // 2)

    def _forget(self, most_hits: int) -> None:
        """Drop what came before a chunk left, and all but the latest hits. O(events)."""
        kept: list[tuple[str, Any, int]] = []
        left, hits = set(), 0
        for event in reversed(self._early):
            what, key, _ = event
            hits += what == "hit"
            if what == "gone":
                left.add(key)
            elif key not in left and (what == "stored" or hits <= most_hits):
                kept.append(event)
        self._early, self._most_early = kept[::-1], len(kept) + EARLY // 2

    def _apply(self, what: str, key: Any, now: int) -> None:
        host = self.host
        assert host is not None
        if (what == "stored") is (key in host):
            return  # an evicted chunk leaves the mapping; a chunk leaves before its hit counts
        if what == "gone":
            host.dropped(key, now)
            if self._recorder is not None:
                self._recorder.dropped(key_of(key), now)
            return
        if what == "hit":
            self._begin_request()
        self._has_stored |= what == "stored"
        name, request_id = key_of(key), self._requests
        request = Request(
            id=request_id, arrival=now, prompt_tokens=1, key_tokens=1, keys=[name]
        )
        if what == "hit":
            host.pin(key)
            host.hit([key], now, request_id)
        else:
            host.missed(request, 0, now)
            host.stored(key, None, now, key=name, request=request_id)
        host.ended(request, now)
        host.unpin(key, now)
        if self._recorder is not None:
            self._accesses += 1
            request = attrs.evolve(request, id=self._accesses)
            self._record(self._recorder, request, hit=what == "hit", now=now)

    def _begin_request(self) -> None:
        """Begin a request if the latest one has stored a chunk."""
        self._requests += self._has_stored
        self._has_stored = False

    def _record(
        self, recorder: EngineRecorder, request: Request, *, hit: bool, now: int
    ) -> None:
        """Record a use as a request of one chunk."""
        evicted, self._evicted = [key_of(key) for key in self._evicted], []
        recorder.request(request, now)
        recorder.opened(request.id, hit=int(hit), blocks=int(not hit), evicted=evicted, now=now)
        recorder.committed(request.id, blocks=1, now=now)
        recorder.closed(request.id, now, output=0)


class Entries(dict[Any, Any]):
    """The entries of a back end; insertions and removals reach its policy.

    Every method that changes the mapping calls `__setitem__` or `__delitem__`. Reads are those
    of a dict.
    """

    def __init__(self, policy: KvcorePolicy) -> None:
        super().__init__()
        self._policy = policy

    def __setitem__(self, key: Any, entry: Any) -> None:
        """Enter or replace an entry."""
        new = key not in self
        super().__setitem__(key, entry)
        if new:
            self._policy.entered(key)

    def __delitem__(self, key: Any) -> None:
        """Remove an entry."""
        super().__delitem__(key)
        self._policy.left(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove an entry and return it, or `default`."""
        if key not in self and default:
            return default[0]
        entry = self[key]
        del self[key]
        return entry

    def __ior__(self, entries: Any) -> Self:  # type: ignore[misc]
        """Enter or replace entries."""
        self.update(entries)
        return self

    clear = MutableMapping.clear
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update


def key_of(key: Any) -> int | bytes:
    """Return the kvcore key of an LMCache key: its hash, if nothing else is in it."""
    chunk = key.chunk_hash
    if isinstance(chunk, int) and 0 <= chunk < 1 << 63 and not key.tags:
        return chunk
    return blake2b(key.to_string().encode(), digest_size=16).digest()


def _counts(key: Any) -> bool:
    """Return True unless `key` is the key of a layer other than the first."""
    return getattr(key, "layer_id", 0) == 0


def _recorder(path: Path, chunks: int, eviction: EvictionPolicy) -> EngineRecorder:
    """Return a recorder, with the process and a number in the name of its file."""
    from lmcache import __version__  # noqa: PLC0415

    name, dot, suffixes = path.name.partition(".")
    path = path.with_name(f"{name}-{os.getpid()}-{next(_recorders)}{dot}{suffixes}")
    return EngineRecorder(
        path, blocks=chunks, block_size=1, eviction=eviction, engine=f"lmcache {__version__}",
        accounting="keys", duplicates=False,
    )  # fmt: skip
