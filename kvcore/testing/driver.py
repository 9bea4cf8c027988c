"""Drive a cache through concurrent steps or serially, writing down what it decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias
from weakref import WeakSet

import attrs

from kvcore.cache import BlockPool, KVCache, Sequence
from kvcore.errors import InputError, OutOfBlocks
from kvcore.lab import served
from kvcore.policy import EvictionPolicy, Span
from kvcore.request import Key, Request
from kvcore.testing.traffic import Step

Gone: TypeAlias = tuple[str, Key, int]
"""A block that left: (reason, its key, its position in its prompt)."""


@attrs.frozen
class Decision:
    """What a cache decided in one step.

    Attributes:
        action: the step's; `idle` if there was no sequence to do it to.
        refused: name of the error that it raised, if it raised one that is no fault.
        hit: blocks hit by an `open` or a `serve`.
        free: blocks free afterwards.
        evicted: blocks that left: the expired, sorted, then those that made room, in order.
    """

    action: str
    refused: str | None
    hit: int | None
    free: int
    evicted: tuple[Gone, ...]


@attrs.define(slots=False, eq=False)
class Witness(EvictionPolicy):
    """Passes every call on to `policy`, checks its answers, and writes evictions down.

    Raises AssertionError in `victim`, hence PolicyError in the cache, if asking twice gives
    two answers or an answer is no unpinned leaf of the cache; likewise if a span expires that
    should not. Errors name the policy: the class of a witness goes by the names of its class.

    Attributes:
        policy: may be exchanged for another one in the same state.
        evicted: the blocks that left, deepest first for each victim.
        gone: the spans that have left and that something still refers to.
    """

    name = "witness"

    policy: EvictionPolicy
    evicted: list[Gone] = attrs.field(init=False, factory=list)
    gone: WeakSet[Span] = attrs.field(init=False, factory=WeakSet)

    def __attrs_post_init__(self) -> None:
        """Go by the names of the policy's class."""
        cls = type(self.policy)
        names = {name: getattr(cls, name) for name in ("name", "__module__", "__qualname__")}
        self.__class__ = type(cls.__name__, (type(self),), names)
        self.ahead = self.policy.ahead

    @property
    def expires_spans(self) -> bool:  # type: ignore[override]
        """Whether the policy sets `span.expires`."""
        return self.policy.expires_spans

    def attach(self, blocks: int, block_size: int) -> None:
        """Pass it on."""
        super().attach(blocks, block_size)
        self.policy.attach(blocks, block_size)

    def inserted(self, span: Span, now: int) -> None:
        """Pass it on."""
        self.policy.inserted(span, now)
        self._check_expiry(span)

    def accessed(self, span: Span, now: int) -> None:
        """Pass it on."""
        self.policy.accessed(span, now)
        self._check_expiry(span)

    def grown(self, span: Span, blocks: int) -> None:
        """Pass it on."""
        self.policy.grown(span, blocks)

    def split(self, upper: Span, lower: Span) -> None:
        """Pass it on."""
        self.policy.split(upper, lower)

    def joined(self, upper: Span, lower: Span) -> None:
        """Pass it on."""
        self.policy.joined(upper, lower)

    def pinned(self, span: Span) -> None:
        """Pass it on."""
        self.policy.pinned(span)

    def released(self, span: Span, now: int) -> None:
        """Pass it on."""
        self.policy.released(span, now)
        self._check_expiry(span)

    def unpinned(self, span: Span, now: int) -> None:
        """Pass it on."""
        self.policy.unpinned(span, now)

    def leaf(self, span: Span) -> None:
        """Pass it on."""
        self.policy.leaf(span)

    def trimmed(self, span: Span, blocks: int) -> None:
        """Write the blocks down and pass it on."""
        self._write(span, span.end, span.end + blocks, "capacity")
        self.policy.trimmed(span, blocks)

    def removed(self, span: Span, reason: str) -> None:
        """Write the blocks down and pass it on."""
        self._write(span, span.start, span.end, reason)
        self.gone.add(span)
        self.policy.removed(span, reason)

    def missed(self, request: Request, hit_blocks: int, now: int) -> None:
        """Pass it on."""
        self.policy.missed(request, hit_blocks, now)

    def awaited(self, request: Request, now: int, *, front: bool = False) -> None:
        """Pass it on."""
        self.policy.awaited(request, now, front=front)

    def unawaited(self, request: Request, now: int) -> None:
        """Pass it on."""
        self.policy.unawaited(request, now)

    def victim(self, now: int) -> Span:
        """Ask twice, and check the answer."""
        self.policy.beneficiary = self.beneficiary
        span = self.policy.victim(now)
        again = self.policy.victim(now)
        assert again is span, f"asked twice for a victim, it answered {span!r}, then {again!r}"
        if not isinstance(span, Span):
            return span  # the cache refuses it
        assert span.parent is not None, f"{span!r} has left the cache"
        assert not span.pins, f"{span!r} is pinned"
        assert span.is_leaf, f"{span!r} is no leaf"
        return span

    def tail(self, span: Span) -> int:
        """Ask twice, and check that asking changes nothing."""
        blocks = self.policy.tail(span)
        again = self.policy.tail(span)
        assert again == blocks, f"asked twice for a tail, it answered {blocks}, then {again}"
        return blocks

    def state(self) -> Any:
        """Return the policy's."""
        return self.policy.state()

    def restore(self, state: Any) -> None:
        """Pass it on."""
        self.policy.restore(state)

    def _check_expiry(self, span: Span) -> None:
        assert self.policy.expires_spans or span.expires is None, (
            "it sets span.expires, and does not declare expires_spans = True"
        )

    def _write(self, span: Span, start: int, end: int, reason: str) -> None:
        ratio = span.shape.ratio
        self.evicted += [
            (reason, span.path_keys[position // ratio], position)
            for position in reversed(range(start, end))
        ]


class Driver:
    """Takes steps on a cache, and checks its integrity after each.

    Args:
        cache: a `KVCache`, or anything that is called alike.
        evicted: where it writes down the blocks that leave; emptied after each step.
    """

    def __init__(self, cache: KVCache, evicted: list[Gone] | None = None) -> None:
        """Start at time 0, without sequences."""
        self.cache = cache
        self.sequences: list[Sequence] = []
        self._closed: list[Request] = []
        self.now = 0
        self._evicted = [] if evicted is None else evicted

    def run(self, steps: Iterable[Step]) -> list[Decision]:
        """Take all of `steps`."""
        return [self.step(step) for step in steps]

    def step(self, step: Step) -> Decision:
        """Take one step."""
        self.now += step.wait
        action, refused, hit = step.action, None, None
        try:
            if action in ("open", "serve"):
                hit = self._open(step)
                if action == "serve":
                    self._act("commit", self.sequences[-1], None)
                    self._act("close", self.sequences[-1], None)
            elif candidates := self._candidates(action):
                self._act(action, candidates[step.which % len(candidates)], step.tokens)
            else:
                action = "idle"
        except (OutOfBlocks, InputError) as error:
            refused = type(error).__name__
        self.cache.check_integrity()
        evicted = _canonical(self._evicted)
        self._evicted.clear()
        return Decision(action, refused, hit, self.cache.pool.free, evicted)

    def careful_step(self, step: Step) -> Decision:
        """Take one step; check that a probe before it, and a refusal of it, change nothing."""
        before = snapshot(self.cache)
        if step.request is not None:
            self.cache.probe(step.request, self.now + step.wait)
            assert snapshot(self.cache) == before, "probe() changed something"
        decision = self.step(step)
        if decision.refused is not None:
            assert snapshot(self.cache) == before, f"a refused {step.action} changed something"
        return decision

    def _open(self, step: Step) -> int:
        request = step.request
        assert request is not None
        again = step.again and bool(self._closed)
        if again:
            request = self._closed[step.which % len(self._closed)]
        seq = self.cache.open(request, step.tokens, self.now, again=again)
        self.sequences.append(seq)
        return seq.hit_blocks

    def _candidates(self, action: str) -> list[Sequence]:
        if action == "commit":
            return [seq for seq in self.sequences if seq.computed < seq.tokens]
        return self.sequences

    def _act(self, action: str, seq: Sequence, tokens: int | None) -> None:
        cache, now = self.cache, self.now
        if action == "extend":
            cache.extend(seq, tokens or 0, now)
        elif action == "commit":
            left = seq.tokens - seq.computed
            cache.commit(seq, left if tokens is None else min(tokens, left), now)
        elif action == "rollback":
            cache.rollback(seq, min(tokens or 0, seq.tokens), now)
        elif action == "fork":
            self.sequences.append(cache.fork(seq, now))
        else:
            self.sequences.remove(seq)
            self._closed.append(seq.request)
            cache.close(seq, now)


def replay(
    cache: KVCache, requests: Iterable[Request], evicted: list[Gone] | None = None
) -> list[Decision]:
    """Replay `requests` serially, untimed; return what was decided for each."""
    return list(decided(cache, requests, evicted))


def decided(
    cache: KVCache, requests: Iterable[Request], evicted: list[Gone] | None = None
) -> Iterator[Decision]:
    """Replay `requests` likewise; yield what was decided for each, as it is."""
    evicted = [] if evicted is None else evicted
    for seq in served(requests, cache):
        gone = _canonical(evicted)
        evicted.clear()
        yield Decision("open", None, seq.hit_blocks, cache.pool.free, gone)


def snapshot(cache: KVCache) -> Any:
    """Return all that a refused call must leave as it was, as a value that compares equal.

    Covers the pool, spans with their pins and the policy's data, sequences, statistics and
    the policy's state. Costs O(blocks).
    """
    pool, prefix = cache.pool, cache.prefix
    blocks = (list(pool.freed()), dict(pool.owners)) if isinstance(pool, BlockPool) else None
    return (
        (pool.free, blocks),
        (prefix.cached, prefix.unpinned, prefix.evicted, prefix.expired_blocks),
        [_span_fields(span) for span in prefix.spans()],
        [_sequence_fields(seq) for seq in cache.sequences.values()],
        attrs.astuple(cache.stats),
        cache.eviction.state(),
    )


def _span_fields(span: Span) -> dict[str, Any]:
    fields = {name: getattr(span, name) for name in _PLAIN}
    return fields | {
        "parent": None if span.parent is None else span.parent.id,
        "children": [child.id for child in (span.children or {}).values()],
        "ids": None if span.ids is None else list(span.ids),
        "keys": span.keys(),
        "data": repr(span.data),
    }


_PLAIN = [
    field.name
    for field in attrs.fields(Span)
    if field.name not in ("parent", "children", "ids", "path_keys", "data", "shape")
]


def _sequence_fields(seq: Sequence) -> tuple[Any, ...]:
    private = None if seq.private is None else list(seq.private)
    return seq.id, seq.tokens, seq.computed, seq.blocks, seq.span.id, private, seq.is_open


def _canonical(evicted: list[Gone]) -> tuple[Gone, ...]:
    """Sort the expired: which of two branches is dropped first says nothing."""
    expired = sorted(gone for gone in evicted if gone[0] == "expired")
    return (*expired, *(gone for gone in evicted if gone[0] != "expired"))
