"""The host of an eviction policy for the radix tree of SGLang."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Any, overload
from weakref import WeakKeyDictionary

import attrs

from kvcore import EvictionPolicy, InputError, Request, ScoreEviction, Span
from kvcore.blake2 import blake2b
from kvcore.cache import BlockLayout
from kvcore.cache.tree import root_span
from kvcore.plugins import find_override, policy_error, wrong_answer
from kvcore.plugins.base import has_no_order
from kvcore.request import Key
from kvcore_hosting import EngineRecorder

_log = logging.getLogger("kvcore")

_MASK = (1 << 63) - 1


def chain(parent: Key, units: Any, page_size: int) -> list[Key]:
    """Return the chained keys of the pages in `units`, which follow the key `parent`. O(units).

    Hashes of integers, and of tuples of integers, are the same in every process.
    """
    tokens = iter(units)
    if page_size == 1:
        steps: Any = tokens
    else:
        steps = iter(lambda: tuple(islice(tokens, page_size)), ())
    keys = accumulate(steps, lambda key, page: hash((key, page)) & _MASK, initial=parent)
    return list(keys)[1:]


class Path(Sequence[Key]):
    """The keys of a path from the root, computed when one of them is read."""

    __slots__ = ("_above", "_chain", "_keys", "_length", "_start", "_units")

    def __init__(
        self, above: Path | None, start: int, length: int, units: Any, chain: Any
    ) -> None:
        """Store the pages `units` from position `start` on, and the path before them."""
        self._above = above
        self._start = start
        self._length = length
        self._units = units
        self._chain = chain
        self._keys: list[Key] | None = None

    def _own(self) -> list[Key]:
        # Those above first: a conversation has a path a turn, and the stack of Python an end.
        path, above = self, []
        while path._keys is None and path._above is not None:
            path = path._above
            above.append(path)
        while above:
            above.pop()._own()  # noqa: SLF001
        if self._keys is None:
            before = self._above[self._start - 1] if self._above is not None else None
            self._keys = self._chain(before, self._units)
            self._units = None
        return self._keys

    def __len__(self) -> int:
        """Return the number of pages from the root on."""
        return self._start + self._length

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> list[Key]: ...
    def __getitem__(self, index: int | slice) -> Key | list[Key]:
        """Return the key of a page, or a list of keys."""
        if isinstance(index, slice):
            return [self[offset] for offset in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        offset, path = index % len(self), self
        while offset < path._start:
            path = path._above  # type: ignore[assignment]
        return path._own()[offset - path._start]  # noqa: SLF001


@attrs.define(eq=False)
class _Admission:
    """A matched request, which SGLang may have admitted.

    Attributes:
        request: the request of SGLang; None while it waits: it may be aborted.
        node: the node at which its match ends.
        prompt: the key that was matched.
        locks: number of locks of `node` for the request.
        missed: whether its miss has been counted.
    """

    node: Any
    prompt: Any
    request: Any = None
    locks: int = 0
    missed: bool = False


class TreeHost:
    """Runs an `EvictionPolicy` on the nodes of SGLang's radix tree.

    A node is a span of many blocks, a page each, and is evicted whole: the tree is the cache
    of `radix:evict=leaf`. The host calls the policy as `KVCache` does, and delays calls that
    SGLang makes in another order:

    - The lock of a request moves from one node to another by an unlock and a lock. A node
      counts as released only when another call comes after the unlock. New nodes, heads of
      split nodes, and all nodes above them, count as in use until then.
    - A waiting request is matched often, and locked on trial. It counts as admitted, with its
      hits, if its lock holds at the next insertion; its miss counts at the next eviction.

    Args:
        eviction: a policy not yet in use.
        blocks, page_size: size of the cache in pages, and of a page in tokens.
        renew_split: whether the lower part of a node that a match has split counts as used, as
            with all policies of SGLang.

    Attributes:
        eviction: the policy.
        scores: whether `score` alone decides, so that SGLang's own heap of leaves is enough.
        clock: function that returns the time in ns.
        chain: function that computes the chained keys of pages.
        request: the request for which SGLang evicts or inserts now; None: unknown.
        failure: the error of the policy, after which it is not called again; None: no error.
        evicted: number of evicted blocks.
        recorder: the recording of the decisions; None: there is none.
    """

    def __init__(
        self,
        eviction: EvictionPolicy,
        blocks: int,
        page_size: int,
        *,
        renew_split: bool = False,
    ) -> None:
        refuse(eviction)
        self.eviction = eviction
        self.page_size = page_size
        self.renew_split = renew_split
        self.clock: Callable[[], int] = time.monotonic_ns
        self.chain: Callable[..., list[Key]] = chain
        self.request: Any = None
        self.failure: BaseException | None = None
        self.evicted = 0
        self.recorder: EngineRecorder | None = None
        kind = type(eviction)
        self.scores = (
            isinstance(eviction, ScoreEviction)
            and kind.victim is ScoreEviction.victim
            and kind.on_remove is ScoreEviction.on_remove
        )
        self._geometry = BlockLayout("tokens", page_size, page_size)
        self._on_access = find_override(eviction, "on_access")
        self._on_miss = find_override(eviction, "on_miss")
        eviction.bind()
        self.clear()
        eviction.attach(blocks, page_size)

    def clear(self) -> None:
        """Drop all nodes: SGLang has just made its tree."""
        self._root = root_span(self._geometry)
        self._spans: dict[Any, Span] = {}
        self._nodes: dict[Span, Any] = {}
        self._held: dict[Span, None] = {}
        self._matched: WeakKeyDictionary[Any, _Admission] = WeakKeyDictionary()
        self._admitted: list[_Admission] = []
        self._orders: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # Number of blocks of each request in the recording.
        self._blocks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        # Number of keys of each request in the recording, also after a retraction.
        self._named: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._gone: list[Key] = []
        self._unlocked = False
        self._last_id = self._released = self._admissions = 0

    def span(self, node: Any) -> Span:
        """Return the span of a node. Raises KeyError for a node that is not in the tree."""
        return self._spans[node]

    # Calls for what SGLang does.

    def begin(self) -> None:
        """Release the unlocked nodes: SGLang matches or inserts next."""
        if self._unlocked:
            self._release()

    def matched(self, node: Any, prompt: Any, request: Any) -> None:
        """Store the node at which the match of a waiting request ends."""
        if request is not None:
            self._matched.pop(request, None)  # the latest match is the last
            self._matched[request] = _Admission(node, prompt)

    def locked(self, node: Any) -> None:
        """Pin the path to `node`. O(spans of the path, and waiting requests)."""
        self._unlocked = False
        span = self._spans.get(node, self._root)
        while span is not self._root:
            if span in self._held:
                del self._held[span]
            else:
                span.ref_count += 1
                if span.ref_count == 1:
                    self.eviction.on_pin(span)
            span = span.parent  # type: ignore[assignment]
        # SGLang locks for the request that it has matched last, of those that end here.
        waiting = reversed(list(self._matched.items()))
        request = next((request for request, each in waiting if each.node is node), None)
        if request is not None:
            self._admitted.append(self._matched.pop(request))
            self._admitted[-1].request = request
        # That admission, or one that has been locked here before.
        admission = self._admission_at(node)
        if admission is not None:
            admission.locks += 1

    def unlocked(self, node: Any) -> None:
        """Unpin the path to `node`, unless its lock moves to another. O(spans of the path)."""
        self.begin()
        self._unlocked = True
        admission = self._admission_at(node)
        if admission is not None:
            admission.locks -= 1
            if not admission.locks:
                self._admitted.remove(admission)
                self._matched.setdefault(admission.request, admission)
                admission.request = None
        span = self._spans.get(node, self._root)
        while span is not self._root:
            if span.ref_count == 1:
                self._held[span] = None
            else:
                span.ref_count -= 1
            span = span.parent  # type: ignore[assignment]

    def split(self, upper: Any, lower: Any) -> None:
        """Called when the head of the node `lower` became the node `upper`."""
        span = self._spans[lower]
        middle = span.start + len(upper.key) // self.page_size
        parent: Span = span.parent  # type: ignore[assignment]
        siblings: Any = parent.children
        self._last_id += 1
        first = upper.key.child_key(self.page_size)
        head = span.head(self._last_id, middle, lower.key.child_key(self.page_size))
        head.ref_count = max(span.ref_count, 1)
        siblings[first] = head
        span.parent = head
        span.start = middle
        self._spans[upper], self._nodes[head] = head, upper
        if not span.ref_count or span in self._held:
            self._held[head] = None
        self.eviction.on_split(head, span)
        self._hold(parent)
        if self.renew_split and not span.ref_count:
            span.ref_count = 1
            self.eviction.on_pin(span)
            self._end(span)

    def inserted(self, node: Any) -> None:
        """Called when SGLang has inserted a path that ends at `node`. O(its spans)."""
        self._unlocked = False
        now = self.clock()
        self._admit(now)
        if node in self._spans or node.parent is None:
            self._hold(self._spans.get(node, self._root))
            self._record_commit(self._spans.get(node, self._root), now)
            return
        parent = self._spans.get(node.parent, self._root)
        self._hold(parent)
        self._last_id += 1
        start, blocks = parent.end, len(node.key) // self.page_size
        above: Any = None if parent is self._root else parent.path_keys
        span = Span(
            id=self._last_id,
            start=start,
            end=start + blocks,
            parent=parent,
            geometry=self._geometry,
            path_keys=Path(above, start, blocks, node.key, self._keys),
            ids=None,
            now=now,
            created_order=self._last_id,
            last_hit_order=self._order(self.request),
            last_request=getattr(self.request, "rid", ""),
        )
        span.children = {}
        siblings: Any = parent.children
        siblings[node.key.child_key(self.page_size)] = span
        self._spans[node], self._nodes[span] = span, node
        self._held[span] = None
        self._hold(parent)
        self.eviction.on_insert(span, now)
        self._record_commit(span, now)

    def removed(self, node: Any) -> None:
        """Called when a leaf has left the tree."""
        span = self._spans.pop(node)
        del self._nodes[span]
        parent: Span = span.parent  # type: ignore[assignment]
        siblings: Any = parent.children
        del siblings[node.key.child_key(self.page_size)]
        self.evicted += span.blocks
        if self.recorder is not None:
            self._gone += reversed(span.keys())
        self.eviction.on_remove(span, "capacity")
        span.parent = None
        if not siblings and not parent.ref_count:
            self.eviction.on_leaf(parent)

    def ended(self, request: Any) -> None:
        """Called when a request has ended, or was retracted and comes again."""
        if self.recorder is not None and self._blocks.pop(request, None) is not None:
            output = len(request.output_ids) if request.finished() else None
            self.recorder.closed(request.rid, self.clock(), output=output)

    def evicting(self) -> None:
        """Called before SGLang evicts: nodes without a lock can be evicted from now on."""
        self._release()
        now = self.clock()
        for admission in self._admitted:
            self._miss(admission, now)
        if self.request is not None:
            self.eviction.requester = self.request.rid

    def victim(self) -> Any:
        """Return the node that the policy evicts. Raises PolicyError if it cannot go."""
        span = self.eviction.victim(self.clock())
        node = self._nodes.get(span)
        if node is None or span.ref_count or span.children:
            why = f"{span!r}, which is no unpinned leaf of this tree"
            raise wrong_answer(self.eviction, "victim()", why)
        return node

    def priority(self, node: Any) -> Any:
        """Return the place of a leaf in the order of eviction; the lowest is evicted first."""
        span = self._spans[node]
        policy: Any = self.eviction
        score = policy.score(span, self.clock())
        if has_no_order(score):
            raise wrong_answer(self.eviction, "score()", f"{score!r}, which has no order")
        return score, span.released_order, -span.start, span.id

    def fail(self, method: str, error: BaseException) -> None:
        """Call the policy no more; SGLang evicts least recently used nodes from now on."""
        self.failure = policy_error(self.eviction, method, error)
        _log.warning(
            "%s; SGLang evicts least recently used nodes from now on",
            self.failure,
            exc_info=error,
        )

    # Inside.

    def _keys(self, parent: Key | None, units: Any) -> list[Key]:
        """Return the keys of `units` after the key `parent`; None: they begin a prompt."""
        if parent is None:
            namespace = (units.extra_key, units.cache_salt)
            parent = 0
            if any(namespace):  # of a client, who must not choose the key that it begins with
                text = repr(namespace).encode("utf-8", "surrogatepass")
                parent = int.from_bytes(blake2b(text, digest_size=8).digest()) & _MASK
        return self.chain(parent, units, self.page_size)

    def _order(self, request: Any) -> int:
        """Return the serial number of the admission of `request`; None: of the latest one."""
        return (
            self._admissions if request is None else self._orders.get(request, self._admissions)
        )

    def _hold(self, span: Span) -> None:
        """Pin a path without locks until the next release."""
        while span is not self._root:
            if span in self._held:
                del self._held[span]
                self._held[span] = None
            elif not span.ref_count:
                span.ref_count = 1
                self._held[span] = None
                self.eviction.on_pin(span)
            span = span.parent  # type: ignore[assignment]

    def _release(self) -> None:
        """Release the held spans."""
        self._unlocked = False
        spans, self._held = self._held, {}
        for span in spans:
            self._end(span)

    def _end(self, span: Span) -> None:
        """Release a span."""
        span.ref_count = 0
        self._released += 1
        span.released_order = self._released
        self.eviction.on_release(span, self.clock())

    def _admission_at(self, node: Any) -> _Admission | None:
        """Return the latest admission whose match ended at `node`; None: there is none."""
        return next(
            (admission for admission in reversed(self._admitted) if admission.node is node),
            None,
        )

    def _miss(self, admission: _Admission, now: int) -> None:
        """Number an admission and tell of it, the first time its request comes here."""
        request = admission.request
        self.eviction.requester = request.rid
        if admission.missed or request in self._orders:
            return
        admission.missed = True
        self._admissions += 1
        self._orders[request] = self._admissions
        self._tell(admission, now)

    def _tell(self, admission: _Admission, now: int) -> None:
        """Record a request, and call `on_miss` of the policy unless the whole prompt hits."""
        hit = self._spans.get(admission.node, self._root).end
        on_miss = self._on_miss if hit < len(admission.prompt) // self.page_size else None
        if on_miss is None and self.recorder is None:
            return
        asking = self._asked(admission)
        if self.recorder is not None:
            self.recorder.request(asking, now)
        if on_miss is not None:
            on_miss(asking, hit, now)

    def _asked(self, admission: _Admission) -> Request:
        """Return a request as policies and traces see it. O(tokens of its prompt)."""
        prompt, request = admission.prompt, admission.request
        units = type(prompt)(
            prompt.token_ids, prompt.extra_key, prompt.is_bigram, None, prompt.cache_salt
        )
        sampling = getattr(request, "sampling_params", None)
        return Request(
            id=request.rid,
            prompt_tokens=len(prompt.token_ids),
            output_tokens=max(1, getattr(sampling, "max_new_tokens", None) or 1),
            keys=self._keys(None, units.page_aligned(self.page_size)),
            key_tokens=self.page_size,
        )

    def _record_commit(self, span: Span, now: int) -> None:
        """Record that the path to `span` is cached for the inserting request."""
        request, recorder = self.request, self.recorder
        blocks = None if request is None or recorder is None else self._blocks.get(request)
        if blocks is None or recorder is None:
            return
        more = span.end - blocks
        if more > 0:
            gone, self._gone = self._gone, []
            recorder.extended(request.rid, blocks=more, evicted=gone, now=now)
            self._blocks[request] = span.end
        named = self._named.get(request, len(request.origin_input_ids) // self.page_size)
        self._named[request] = max(named, span.end)
        recorder.committed(
            request.rid, blocks=span.end, now=now, keys=span.path_keys[named : span.end]
        )

    def _admit(self, now: int) -> None:
        """Count the hits of the requests that SGLang has admitted."""
        admitted, self._admitted = self._admitted, []
        for admission in admitted:
            resumed = admission.request in self._orders and not admission.missed
            self._miss(admission, now)
            span = last = self._spans.get(admission.node, self._root)
            while span is not self._root:
                span.last_access = now
                if not resumed:
                    span.hit_count += 1
                    span.last_hit_order = self._orders[admission.request]
                    span.last_request = admission.request.rid
                span = span.parent  # type: ignore[assignment]
            if self.recorder is not None:
                gone, self._gone = self._gone, []
                more = -(-len(admission.prompt.token_ids) // self.page_size) - last.end
                self._blocks[admission.request] = last.end + more
                self.recorder.opened(
                    admission.request.rid, hit=last.end, blocks=more, evicted=gone, now=now
                )
            if self._on_access is None or resumed:
                continue
            while last is not self._root:
                self._on_access(last, now)
                last = last.parent  # type: ignore[assignment]


def refuse(policy: EvictionPolicy) -> None:
    """Raise InputError for a policy that needs what SGLang does not offer."""
    if policy.expires_spans:
        why = "lets blocks expire, and SGLang would go on to hit them"
    elif policy.lookahead != 0:
        why = "looks ahead into a queue of requests, which SGLang's caches do not see"
    elif policy.name == "tool-ttl":
        why = "reads of tool calls in requests, which SGLang's caches do not see"
    else:
        return
    msg = f"the eviction policy {policy.name!r} cannot run in SGLang: it {why}"
    raise InputError(msg)
