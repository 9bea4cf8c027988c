"""The recorder of an engine: its decisions as a kvcore trace."""

from __future__ import annotations

import atexit
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Self

import attrs

from kvcore.cache import EvictionPolicy, KVCache, PrefixIndex, Span
from kvcore.cache import Sequence as CacheSequence
from kvcore.cache.prefix import PrefixMatch
from kvcore.errors import KvcoreError
from kvcore.plugins import describe, resolve
from kvcore.request import NO_HINTS, Key, Request
from kvcore.units import INT64_LIMIT, NS_PER_S
from kvcore.untrusted import LONGEST_SESSION
from kvcore_hosting.host import extended_path
from kvcore_plugins.traces.digest import EvictionDigest
from kvcore_plugins.traces.keyed import KeyedNames
from kvcore_plugins.traces.live import LiveTrace

Id = int | str
Lost = Literal["gone", "expired"]

FLUSH_NS = 5 * NS_PER_S
"""Time after which lines are flushed: a killed engine leaves all but the last seconds."""

MOST_NAMES = 1 << 16
"""Largest number of ids that are kept, so that no two requests of a trace have the same."""

_log = logging.getLogger("kvcore")
_P = ParamSpec("_P")


class _Recording(LiveTrace):
    """A live trace whose evictions have a reason."""

    reason: Literal["capacity", "expired", "gone"] = "capacity"

    def evict(self, now: int, **fields: Any) -> None:
        """Write EVICT with the present reason."""
        super().evict(now, **(fields | {"reason": self.reason}))


class _FollowedIndex(PrefixIndex):
    """Finds cached blocks by their keys, up to the number of hits in the engine.

    A key that is cached in two paths, where hashes of an engine collide, names the later block.
    """

    name: ClassVar[str] = "followed"
    block_spans = True

    def __init__(self) -> None:
        self.spans: dict[Key, Span] = {}
        self.limit: int | None = None

    def match(self, keys: Sequence[Key], limit: int, after: Span) -> tuple[Span, int]:
        """Return the span of the last cached block, and its end. O(blocks)."""
        span = after
        for key in keys[after.end : limit if self.limit is None else min(limit, self.limit)]:
            below = (span.children or {}).get(key)
            if below is None:
                break
            span = below
        return span, span.end

    def insert(self, span: Span, first: int) -> None:
        """Insert a block; its path shares its list of keys with those that begin as it does."""
        self.spans[key := span.path_keys[first]] = span
        assert span.parent is not None
        span.path_keys = extended_path(span.parent, [key])

    def remove(self, span: Span, first: int) -> None:
        """Delete a block."""
        if self.spans.get(key := span.path_keys[first]) is span:
            del self.spans[key]


class _FollowedEviction(EvictionPolicy):
    """Evicts the blocks that the engine has evicted."""

    name: ClassVar[str] = "followed"

    def __init__(self) -> None:
        self.chosen: Any = None

    def victim(self, now: int) -> Span:
        """Return the span of the evicted block."""
        del now
        span: Span = self.chosen
        return span


@attrs.define(eq=False)
class _Recorded:
    """A request that has arrived and not ended.

    Attributes:
        request: the request as in the trace, with the keys of its generated blocks.
        seq: its sequence; None while it waits.
        admitted: whether it was ever admitted.
        answered: whether it has its first token.
        refused: whether the trace had no room for it, though the engine has admitted it.
        output: the most tokens that it can have generated before it was preempted.
    """

    request: Request
    seq: CacheSequence | None = None
    admitted: bool = False
    answered: bool = False
    refused: bool = False
    output: int = 0


def _guarded(
    method: Callable[Concatenate[EngineRecorder, _P], None],
) -> Callable[Concatenate[EngineRecorder, _P], None]:
    """Return `method`; if it raises, the recording ends, and later calls do nothing."""

    @wraps(method)
    def guarded(self: EngineRecorder, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.failure is None and not self._closed:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the engine must go on
                self._stop(error)

    return guarded


class EngineRecorder:
    """Writes the decisions of an engine as a kvcore trace of mode `wall`.

    The engine calls a method after each of its decisions. A `KVCache` with spans of one block
    repeats the decision, evicts the blocks that the engine has evicted, and writes the lines:
    so `kvcore replay` accepts the trace, and every decision in it is the engine's. A decision
    that the cache cannot repeat is counted as a disagreement, and the first is logged:

    - The engine hits more blocks than are cached: in the trace they are computed at once. If
      it hits fewer, so does the trace, which is no disagreement.
    - It evicts a block that is in use in the trace, or has cached blocks below it: the block
      leaves the trace as soon as it can, with reason `gone`.
    - It has room and the trace has none: the least recently used block leaves. Where all are
      in use, the request is not admitted in the trace, or does not grow there.

    Three things are no disagreement: a second block of a key (a duplicate) is counted, and the
    key leaves the trace with the last of its blocks; blocks may leave before their room is
    needed; and the blocks below a lost block leave with it, with reason `gone`.

    What clients choose neither ends it nor can be read in it: salts, tenants and sessions are
    written as keyed hashes (`KeyedNames`). So are ids and tools that are long or no plain text.

    No method raises. A file that cannot be written ends the recording with a warning in the
    log; the lines so far stay in `<path>.part`. The recording is closed when the process ends;
    a killed process leaves a `.part` with all but the last few seconds.

    Times are ns of one clock of the engine; the trace begins at 0.

    Args:
        path: the trace; compressed by its name, `.gz` or `.zst`.
        blocks, block_size: size of the engine's cache in blocks, and of a block in tokens.
        eviction: the policy that chooses victims, for its name and options.
        engine: name of the engine, and its version: `vllm 0.33.0`.
        accounting: `tokens`: the last token of a prompt is always computed, so that its block
            does not hit; `keys`: all blocks can hit.
        duplicates: whether the engine keeps a second block of a key; False: it frees the
            second, and uses the first.

    Attributes:
        evictions: digest of the evicted blocks, as `kvcore replay` prints it.
        disagreements: number of decisions that the trace could not repeat, by kind.
        failure: the error that has ended the recording before it was closed; None: no error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        blocks: int,
        block_size: int,
        eviction: EvictionPolicy,
        engine: str,
        accounting: str = "tokens",
        duplicates: bool = True,
    ) -> None:
        self.path = os.fspath(path)
        self.evictions = EvictionDigest()
        self.disagreements: Counter[str] = Counter()
        self.failure: Exception | None = None
        self._closed = False
        self._trace: _Recording  # there is none if its file cannot be opened
        self._size = block_size
        self._accounting = accounting
        self._duplicates = duplicates
        self._begun: int | None = None
        self._now = self._flushed = 0
        self._requests: dict[Id, _Recorded] = {}
        # The first ids, which stand in the trace as they are, and the last number after others.
        self._names: set[Id] = set()
        self._suffix = 1
        self._hashed = KeyedNames()
        # Number of blocks of a key in the engine, where it is not one; and number of blocks of
        # keys that cannot be hit.
        self._copies: dict[Key, int] = {}
        self._orphans: dict[Key, int] = {}
        # Keys that the engine has lost or evicted while they were in use in the trace, and why
        # they will leave it.
        self._late: dict[Key, Lost] = {}
        self._index = _FollowedIndex()
        self._policy = _FollowedEviction()
        # EVICT lines name the policy of the engine.
        self._policy.name = eviction.name  # type: ignore[misc]
        try:
            trace = self._trace = _Recording(path, mode="wall", engine=engine)
            self._cache = KVCache(
                blocks, block_size, eviction=self._policy, prefix=self._index,
                accounting=accounting, key_tokens=block_size, trace=trace,
            )  # fmt: skip
            hashed = resolve("prefix", "hashed:spans=block")
            parts = {"eviction": describe(eviction), "prefix": describe(hashed)}
            trace.describe(plugins=parts)
        except Exception as error:  # noqa: BLE001 - the engine must go on
            self._stop(error)
            return
        self._process = os.getpid()
        atexit.register(self._at_exit)

    @_guarded
    def request(self, request: Request, now: int) -> None:
        """Record that `request`, with a key for each block, has arrived.

        If an ended request had its id, or after `MOST_NAMES` ids, which are all that is known
        of ended requests, the id in the trace gets a number as suffix.
        """
        if request.id in self._requests:
            return
        name, hints = self._plain("id", request.id), request.hints
        if name in self._names or len(self._names) >= MOST_NAMES:
            self._suffix += 1
            name = f"{name}#{self._suffix}"
        else:
            self._names.add(name)
        # The engine has not followed these hints, and so the cache must not.
        hints = attrs.evolve(hints, share=None, pin=None, demote=False) if hints else NO_HINTS
        keys = request.keys
        if self._accounting == "tokens":
            keys = keys[: request.prompt_tokens // self._size]
        hidden: dict[str, Any] = self._hashed.hidden(request, "salt", "tenant", "session")
        kept = attrs.evolve(
            request, id=name, keys=keys, hints=hints, tool=self._plain("tool", request.tool),
            priority=max(-INT64_LIMIT, min(request.priority, INT64_LIMIT - 1)), **hidden,
        )  # fmt: skip
        self._cache.announce(kept, self._at(now))
        self._requests[request.id] = _Recorded(kept)

    @_guarded
    def opened(
        self, request_id: Id, *, hit: int, blocks: int, evicted: Iterable[Key] = (), now: int
    ) -> None:
        """Record that a request is admitted, for the first time or after a preemption.

        Args:
            request_id: id of the request, which has arrived.
            hit: number of blocks that it hits, from the first of its prompt on; after a
                preemption also of its output.
            blocks: number of blocks allocated for it, besides those.
            evicted: keys of the blocks that were evicted for it, in order.
            now: time in ns.
        """
        recorded = self._of(request_id, running=False)
        if recorded is None:
            return
        now = self._at(now)
        self._evict(evicted, recorded.request.id, now)
        cache, request, size = self._cache, recorded.request, self._size
        target = max(request.prompt_tokens, hit * size + 1) if recorded.admitted else None
        self._index.limit = hit
        match = cache.match(request, now, target)
        more = hit - match.blocks
        recorded.refused = not self._make_room(blocks + more, match, request.id, now)
        if recorded.refused:
            self._index.limit = None
            return
        recorded.seq = seq = cache.open(
            request, (blocks + more) * size, now, resumed=recorded.admitted, target=target
        )
        self._index.limit = None
        recorded.admitted = True
        if more:
            for key in seq.keys[seq.span.end : hit]:
                copies = self._orphans.pop(key, 0)
                if copies > 1:
                    self._copies[key] = copies
                elif not copies and key not in self._index.spans:
                    self._disagree("hit", "it hits blocks that are not cached")
            self._commit(seq, hit, now)

    @_guarded
    def extended(
        self, request_id: Id, *, blocks: int, evicted: Iterable[Key] = (), now: int
    ) -> None:
        """Record that `blocks` more were allocated for a running request; see `opened`."""
        recorded = self._of(request_id)
        if recorded is not None and recorded.seq is not None:
            now = self._at(now)
            self._evict(evicted, recorded.request.id, now)
            nothing = PrefixMatch(self._cache.tree.root, 0, 0, None)
            if self._make_room(blocks, nothing, recorded.request.id, now):
                self._cache.extend(recorded.seq, blocks * self._size, now)

    @_guarded
    def committed(
        self, request_id: Id, *, blocks: int, now: int, keys: Iterable[Key] = ()
    ) -> None:
        """Record that the first `blocks` blocks of a running request can be hit.

        `keys` are the keys of the blocks that its output has filled since the last call.
        """
        recorded = self._of(request_id)
        if recorded is None or recorded.seq is None:
            return
        now, seq, named = self._at(now), recorded.seq, list(keys)
        if named:
            request = recorded.request
            self._trace.keys(now, request=request.id, keys=named)
            output = [*request.output_keys, *named]
            recorded.request = attrs.evolve(request, output_keys=output)
            seq.keys = [*seq.keys, *named]
            seq.cacheable += len(named)
        new = seq.keys[seq.span.end : blocks]
        known = [key in self._index.spans for key in new]
        self._commit(seq, blocks, now)
        for key, cached in zip(new, known, strict=True):
            self._late.pop(key, None)
            more = self._orphans.pop(key, 0) + (cached and self._duplicates)
            if more:
                self._copies[key] = self._copies.get(key, 1) + more

    @_guarded
    def answered(self, request_id: Id, now: int) -> None:
        """Record that a running request has generated its first token.

        Without this call, the first token of a request is at its end.
        """
        recorded = self._of(request_id)
        if (
            recorded is not None
            and recorded.seq is not None
            and self._most_output(recorded, recorded.seq) > 0
        ):
            self._answer(recorded, recorded.seq, self._at(now))

    @_guarded
    def closed(self, request_id: Id, now: int, *, output: int | None = None) -> None:
        """Record that a request has ended with `output` tokens; None: it was preempted.

        A request may end in any state, as when its client has left.
        """
        recorded = self._requests.get(request_id)
        if recorded is None:
            self._disagree("request", f"request {request_id!r} is not known")
            return
        self._close(request_id, recorded, self._at(now), output)
        if output is not None:  # both know each request of a run, which has no end here
            self._cache.disown(recorded.request)
            self._trace.forget(recorded.request)

    @_guarded
    def dropped(self, key: Key, now: int, reason: Lost = "gone") -> None:
        """Record that the engine has dropped a block of `key`.

        The `reason` is `gone`, as after a failed store, or `expired`.
        """
        now = self._at(now)
        if self._forget(key):
            return
        top = self._index.spans.get(key)
        if top is None:
            self._disagree("lost", "it loses a block that is not cached")
            return
        order = [top]
        for span in order:
            order.extend((span.children or {}).values())
        for span in reversed(order):
            name = span.path_keys[span.start]
            if span is not top:
                self._orphans[name] = self._copies.pop(name, 1)
            self._lose(span, now, reason)
        self._lose_late(now)

    @_guarded
    def cleared(self, now: int) -> None:
        """Record that the engine has dropped all blocks; those in use leave when released."""
        now = self._at(now)
        for span in reversed([*self._cache.tree.spans()]):
            self._lose(span, now)
        self._copies.clear()
        self._orphans.clear()

    def close(self) -> None:
        """Finish the recording, and rename the file to its path. A second call does nothing.

        Open requests end here, with one output token if they were `answered`, else with none.
        """
        self._seal()
        self._closed = True
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        """Return the recorder."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the recording."""
        self.close()

    # Inside.

    def _plain(self, kind: str, name: Any) -> Any:
        """Return a name as it may stand in a trace; `#` is for the suffixes of ids."""
        if not isinstance(name, str):
            return name
        plain = name.isascii() and name.isprintable() and "#" not in name
        plain = plain and len(name) <= LONGEST_SESSION
        return name if plain else self._hashed.name(kind, name)

    def _evict(self, keys: Iterable[Key], requester: Id, now: int) -> None:
        """Evict the blocks that the engine has evicted."""
        for key in keys:
            if self._forget(key):
                continue
            span = self._index.spans.get(key)
            if span is None:
                self._disagree("evicted", "it evicts a block that is not cached")
            elif span.ref_count or span.children:
                self._disagree("evicted", "it evicts a block that is in use")
                self._late[key] = "gone"
            else:
                self._leave(span, requester, now)
        self._lose_late(now)

    def _forget(self, key: Key) -> bool:
        """Return True if a block of `key` leaves the engine without a change of the trace."""
        for counts, last in (self._copies, 1), (self._orphans, 0):
            if key in counts:
                counts[key] -= 1
                if counts[key] == last:
                    del counts[key]
                return True
        return False

    def _lose(self, span: Span, now: int, reason: Lost = "gone") -> None:
        """Remove a block that the engine has lost, now or as soon as it is an unpinned leaf."""
        if span.ref_count or span.children:
            self._late[span.path_keys[span.start]] = reason
            return
        self._trace.reason = reason
        self._leave(span, span.last_request, now)
        self._trace.reason = "capacity"

    def _lose_late(self, now: int) -> None:
        """Remove the late blocks that can leave now, the deepest first."""
        late = [(span.end, key) for key in self._late if (span := self._index.spans.get(key))]
        self._late = {key: self._late[key] for _, key in late}
        for _, key in sorted(late, key=itemgetter(0), reverse=True):
            span = self._index.spans[key]
            if not (span.ref_count or span.children):
                self._lose(span, now, self._late.pop(key))

    def _leave(self, span: Span, requester: Id, now: int) -> None:
        """Remove an unpinned leaf, and free its block."""
        if self._trace.reason == "capacity":
            self.evictions.add(span.path_keys[span.start])
        self._policy.chosen = span
        ids = self._cache.tree.evict(1, requester, now)
        self._cache.pool.free(ids, 1)

    def _commit(self, seq: CacheSequence, blocks: int, now: int) -> None:
        """Count the first `blocks` blocks of `seq` as computed."""
        more = min(blocks, seq.blocks) * self._size - seq.computed
        if more > 0:
            self._cache.commit(seq, more, now)

    def _close(self, name: Id, recorded: _Recorded, now: int, output: int | None) -> None:
        """Close the sequence of a request, if it has one, and record its end."""
        trace, cache, seq, request = self._trace, self._cache, recorded.seq, recorded.request
        if output is None:
            if seq is None:
                self._disagree("request", f"request {name!r} is preempted and does not run")
                return
            recorded.output = self._most_output(recorded, seq)
            trace.preempt(now, request=request.id, seq=seq.id, how="recompute")
            cache.close(seq, now, preempted=True)
            recorded.seq = None
        else:
            del self._requests[name]
            if not recorded.admitted:
                why = "it left before it was admitted"
                if recorded.refused:
                    why = "the trace had no room for it"
                trace.reject(now, request=request.id, why=why)
                return
            if seq is not None:
                most = self._most_output(recorded, seq)
            else:
                # It ends while it is preempted; only a sequence can end in a trace.
                self._index.limit = 0
                recorded.seq = seq = cache.open(request, 0, now, resumed=True)
                self._index.limit = None
                most = recorded.output if recorded.answered else 0
            output = max(min(output, most), int(recorded.answered))
            if output:
                self._answer(recorded, seq, now)
            trace.finish(now, request=request.id, seq=seq.id, output=output)
            cache.close(seq, now)
        self._lose_late(now)

    def _answer(self, recorded: _Recorded, seq: CacheSequence, now: int) -> None:
        """Write FIRST_TOKEN, once a request."""
        if not recorded.answered:
            recorded.answered = True
            self._trace.first_token(now, request=recorded.request.id, seq=seq.id)

    def _most_output(self, recorded: _Recorded, seq: CacheSequence) -> int:
        """Return the most tokens that a request can have generated in the blocks it has."""
        request = recorded.request
        if not request.output_tokens:
            return 0
        if self._accounting == "keys":
            return request.output_tokens if seq.blocks >= len(request.keys) else 0
        return max(0, seq.blocks * self._size - request.prompt_tokens + 1)

    def _of(self, request_id: Id, *, running: bool = True) -> _Recorded | None:
        """Return a request that runs, or waits; None, and a disagreement, if it does not."""
        recorded = self._requests.get(request_id)
        if recorded is None or (recorded.seq is not None) is not running:
            how = "does not run" if running else "does not wait"
            self._disagree("request", f"request {request_id!r} {how}")
            return None
        return recorded

    def _at(self, now: int) -> int:
        """Return a time of the engine as a time of the trace; flush the file now and then."""
        if self._begun is None:
            self._begun = now
        self._now = now = max(now - self._begun, self._now)
        if now > self._flushed + FLUSH_NS:
            self._flushed = now
            self._trace.flush()
        return now

    def _make_room(self, blocks: int, match: PrefixMatch, requester: Id, now: int) -> bool:
        """Evict least recently used blocks, none of `match`, until `blocks` are free.

        Returns False if there are not as many beside those in use.
        """
        cache, kept, span = self._cache, set(), match.span
        if blocks > cache.available_blocks - match.unpinned_blocks:
            self._disagree("room", "it has room for blocks, and in the trace all are in use")
            return False
        while span.parent is not None:
            kept.add(span)
            span = span.parent
        while blocks > cache.pool.free_blocks:
            self._disagree("room", "it has room for blocks, and the trace has none")
            unused = (s for s in cache.tree.spans() if not (s.ref_count or s.children))
            leaves = (span for span in unused if span not in kept)
            self._leave(min(leaves, key=attrgetter("released_order")), requester, now)
        return True

    def _disagree(self, kind: str, what: str) -> None:
        """Count a disagreement of the engine with the trace, and log the first."""
        if not self.disagreements:
            _log.warning(
                "%s: the engine and its recording disagree: %s; the recording goes on",
                self.path,
                what,
            )
        self.disagreements[kind] += 1

    @_guarded
    def _seal(self) -> None:
        """Write the ends of open requests, and END."""
        for name, recorded in [*self._requests.items()]:
            self._close(name, recorded, self._now, 0)
        self._trace.close()

    def _stop(self, error: Exception) -> None:
        """Finish the recording early, because of `error`."""
        self.failure = error
        what = error if isinstance(error, KvcoreError) else repr(error)
        _log.warning("%s: the recording ends here: %s", self.path, what)
        with suppress(Exception):
            self._trace.flush()
        with suppress(Exception):
            self._trace.give_up(error)
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        # A forked child has the recorder too; the file is its parent's.
        if os.getpid() == self._process:
            self.close()
