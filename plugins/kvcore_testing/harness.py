"""Random traffic over a small trie of prompts, as data: it can be repeated and shrunk."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any, TypeAlias, TypeVar

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.cache import (
    BlockLayout,
    BlockPool,
    EvictionPolicy,
    KVCache,
    PrefixIndex,
    Sequence,
    Span,
)
from kvcore.errors import InputError, OutOfBlocks
from kvcore.request import NO_HINTS, Hints, Key, Request, Retention
from kvcore_replay.untimed import served
from kvcore_testing.plugin import disguise

Draw: TypeAlias = Callable[[int, int], int]
"""Draws an integer between two bounds, both included."""

EVEN = {"open": 5, "commit": 6, "close": 4, "serve": 3, "extend": 1, "fork": 1, "rollback": 1}
"""Relative frequencies of actions: about as many blocks are freed as are allocated."""

FORKS = {"open": 2, "commit": 4, "close": 2, "serve": 1, "extend": 1, "fork": 3, "rollback": 3}
"""Frequencies for many sequences that share private blocks."""

COMPACTIONS = EVEN | {"open": 6, "extend": 3, "fork": 2, "compact": 4}
"""Frequencies for many sequences that are compacted."""


@attrs.frozen(kw_only=True)
class Traffic:
    """The distribution of random requests: each prompt is a path in one trie of block keys.

    Attributes:
        key_tokens: number of tokens of a key.
        most_keys: number of keys of the longest prompt.
        width: number of different keys that may follow a key; with 2, prompts share a lot.
        hints: whether some requests have retention hints.
        pins: whether some requests pin or demote their blocks, or share only some of them.
        longest_wait: longest time (ns) between two steps.
        mix: relative frequency of each action.
    """

    key_tokens: int = 6
    most_keys: int = 6
    width: int = 2
    hints: bool = False
    pins: bool = False
    longest_wait: int = 4
    mix: Mapping[str, int] = attrs.field(default=EVEN, hash=False)


@attrs.frozen(kw_only=True)
class Step:
    """One call to a cache.

    Attributes:
        action: `open`, `commit`, `close`, `extend`, `fork`, `rollback` or `compact`; or
            `serve`, which opens a request, commits all of it and closes it.
        which: number of the sequence, modulo the number of open sequences; for `commit` and
            `compact`, of those with tokens to commit or to drop; for `open` with `again`,
            number of a closed request.
        tokens: number of tokens; None: all for `open`, `serve` and `commit`, for others none.
            Unused by `fork` and `close`.
        wait: time (ns) since the step before.
        request: the request to `open` or `serve`.
        again: whether a closed request, if there is one, is opened in place of `request`, as
            after a preemption.
    """

    action: str
    which: int = 0
    tokens: int | None = None
    wait: int = 0
    request: Request | None = None
    again: bool = False


def draw_request(draw: Draw, traffic: Traffic) -> Request:
    """Draw a request; its id is 0. Its last key may cover a part of a block, or be missing."""
    keys: list[int] = []
    for _ in range(draw(0, traffic.most_keys)):
        # A number stands for the whole path to it, as a chained key does.
        above = keys[-1] if keys else 0
        branch = max(1, draw(-1, traffic.width))
        keys.append(above * traffic.width + branch)
    spare = draw(1 - traffic.key_tokens, traffic.key_tokens)
    length = max(1, len(keys) * traffic.key_tokens + spare)
    hints = [_draw_hint(draw, length) for _ in range(draw(0, 2) if traffic.hints else 0)]
    return Request(
        id=0,
        prompt_tokens=length,
        keys=keys,
        key_tokens=traffic.key_tokens,
        tenant=(None, "a", "b")[draw(0, 2)],
        retention=tuple(hints),
        hints=_draw_pin(draw, length) if traffic.pins else NO_HINTS,
    )


def _draw_pin(draw: Draw, length: int) -> Hints:
    share = draw(-length, length)
    demote = not draw(0, 3)
    pin = None if demote or draw(0, 1) else draw(1, 40)
    return Hints(share=True if share < 0 else share, pin=pin, demote=demote)


def _draw_hint(draw: Draw, length: int) -> Retention:
    start = draw(0, length - 1)
    end = draw(start + 1, length + 1)
    return Retention(
        start,
        end if end <= length else None,
        (10, 60, 90)[draw(0, 2)],
        (None, 5, 40)[draw(0, 2)],
    )


def draw_step(draw: Draw, traffic: Traffic, action: str | None = None) -> Step:
    """Draw a step with `action`; None: with any. The id of its request is 0."""
    if action is None:
        actions = [name for name, often in traffic.mix.items() for _ in range(often)]
        action = actions[draw(0, len(actions) - 1)]
    limit = {
        "open": traffic.most_keys * traffic.key_tokens,
        "commit": 2 * traffic.key_tokens,
        "extend": 2 * traffic.key_tokens,
        "rollback": traffic.key_tokens,
        "compact": 3 * traffic.key_tokens,
    }.get(action)
    some = limit is not None and draw(1, 4) <= {"open": 1, "commit": 3}.get(action, 4)
    return Step(
        action=action,
        which=draw(0, 7),
        tokens=draw(0, limit) if some and limit is not None else None,
        wait=draw(0, traffic.longest_wait),
        request=draw_request(draw, traffic) if action in ("open", "serve") else None,
        again=action == "open" and draw(0, 9) == 0,
    )


def numbered(steps: Iterable[Step]) -> list[Step]:
    """Return `steps` with unique ids of requests: the positions of their steps."""
    return [
        attrs.evolve(step, request=attrs.evolve(step.request, id=index))
        if step.request is not None
        else step
        for index, step in enumerate(steps)
    ]


@cache
def random_steps(seed: int, count: int, traffic: Traffic | None = None) -> tuple[Step, ...]:
    """Return `count` steps drawn from `seed`."""
    draw, traffic = _drawn_from(seed), traffic or Traffic()
    return tuple(numbered(draw_step(draw, traffic) for _ in range(count)))


@cache
def random_requests(
    seed: int, count: int, traffic: Traffic | None = None
) -> tuple[Request, ...]:
    """Return `count` requests drawn from `seed`, in order of arrival."""
    draw, traffic = _drawn_from(seed), traffic or Traffic()
    requests, now = [], 0
    for index in range(count):
        now += draw(0, traffic.longest_wait)
        request = draw_request(draw, traffic)
        requests.append(attrs.evolve(request, id=index, arrival=now))
    return tuple(requests)


def _drawn_from(seed: int) -> Draw:
    return Random(seed).randint  # noqa: S311 - nothing secret


@st.composite
def requests(draw: Any, traffic: Traffic | None = None) -> Request:
    """Draw a request with id 0. Prompts shrink towards short ones with shared keys."""
    return draw_request(_drawn_by(draw), traffic or Traffic())


def request_lists(
    traffic: Traffic | None = None, *, most: int = 30
) -> st.SearchStrategy[list[Request]]:
    """Draw up to `most` requests, with ids and arrivals in order."""
    traffic = traffic or Traffic()
    waits = st.integers(0, traffic.longest_wait)
    return lists(st.tuples(requests(traffic), waits), most).map(_in_order)


@st.composite
def steps(draw: Any, traffic: Traffic | None = None, action: str | None = None) -> Step:
    """Draw a step with `action`; None: with any. The id of its request is 0."""
    return draw_step(_drawn_by(draw), traffic or Traffic(), action)


def step_lists(
    traffic: Traffic | None = None, *, most: int = 60
) -> st.SearchStrategy[list[Step]]:
    """Draw up to `most` steps, with ids in order. They shrink by dropping steps."""
    return lists(steps(traffic), most).map(numbered)


def lists(elements: st.SearchStrategy[T], most: int) -> st.SearchStrategy[list[T]]:
    """Draw lists of up to `most` elements, half of them of at least half of that."""
    # By itself hypothesis draws some five elements, too few to fill a cache.
    return st.lists(elements, max_size=most) | st.lists(
        elements, min_size=most // 2, max_size=most
    )


def _drawn_by(draw: Any) -> Draw:
    return lambda low, high: draw(st.integers(low, high))


def _in_order(drawn: list[tuple[Request, int]]) -> list[Request]:
    arrivals = accumulate(wait for _, wait in drawn)
    return [
        attrs.evolve(request, id=index, arrival=arrival)
        for index, ((request, _), arrival) in enumerate(zip(drawn, arrivals, strict=True))
    ]


Gone: TypeAlias = tuple[str, Key, int]
"""A block that left the cache: (reason, its key, its position in its prompt)."""


@attrs.frozen
class Decision:
    """The decision of a cache in one step.

    Attributes:
        action: action of the step; `idle` if there was no sequence for it.
        refused: name of the error of a refused call; None: the call succeeded.
        hit: number of blocks that an `open` or a `serve` hit; None for other actions.
        free: number of free blocks after the step.
        evicted: blocks that left: the expired ones, sorted, then the victims in order.
    """

    action: str
    refused: str | None
    hit: int | None
    free: int
    evicted: tuple[Gone, ...]


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls that of the wrapped policy, and checks `span.expires`."""

    def call(self: RecordingPolicy, *args: Any, **options: Any) -> None:
        getattr(self.policy, name)(*args, **options)
        assert self.policy.expires_spans or all(
            span.expires is None for span in args if isinstance(span, Span)
        ), "it sets span.expires, and does not declare expires_spans = True"

    return call


T = TypeVar("T")


def living(cls: type[T]) -> list[T]:
    """Return all objects of the class `cls` that are still referred to. O(all objects)."""
    gc.collect()
    return [instance for instance in gc.get_objects() if type(instance) is cls]


class RecordingPolicy(EvictionPolicy):
    """Passes every call to another policy, checks its answers, and records the evictions.

    `victim` raises AssertionError, which the cache turns into PolicyError, if two calls return
    different spans, or a span that is no unpinned leaf of the cache. A callback does if it
    sets `span.expires` and the policy does not declare `expires_spans`, and `attach` if the
    policy does not know the size of the pool then. Errors name the wrapped policy: the
    instance has a class with the names of that policy's class.

    Args:
        policy: the wrapped policy.

    Attributes:
        evicted: the blocks that left, deepest first for each victim.
    """

    name = "recording"

    def __init__(self, policy: EvictionPolicy) -> None:
        """Store the policy; give the instance a class with the names of the policy's."""
        self.policy = policy
        self.evicted: list[Gone] = []
        self._geometry: BlockLayout | None = None
        disguise(self, policy)
        self.lookahead = policy.lookahead

    @property
    def removed(self) -> list[Span]:
        """Return the evicted spans that are still referred to. O(all objects)."""
        return [
            span
            for span in living(Span)
            if span.geometry is self._geometry and span.parent is None and span.id
        ]

    @property
    def expires_spans(self) -> bool:  # type: ignore[override]
        """Return True if the policy sets `span.expires`."""
        return self.policy.expires_spans

    def attach(self, blocks: int, block_size: int) -> None:
        """Attach the policy."""
        super().attach(blocks, block_size)
        policy = self.policy
        policy.one_path = self.one_path
        policy.attach(blocks, block_size)
        assert (policy.blocks, policy.block_size) == (blocks, block_size), (
            f"its pool has {policy.blocks} blocks of {policy.block_size} tokens, the cache "
            f"{blocks} of {block_size}: let attach() call super().attach(blocks, block_size)"
        )

    on_insert = _forwarded("on_insert")
    on_access = _forwarded("on_access")
    on_release = _forwarded("on_release")
    on_extend = _forwarded("on_extend")
    on_split = _forwarded("on_split")
    on_pin = _forwarded("on_pin")
    on_leaf = _forwarded("on_leaf")
    on_miss = _forwarded("on_miss")
    on_queued = _forwarded("on_queued")
    on_dequeued = _forwarded("on_dequeued")
    on_end = _forwarded("on_end")

    def on_trim(self, span: Span, blocks: int) -> None:
        """Record the blocks, and call the policy."""
        self._record(span, span.end, span.end + blocks, "capacity")
        self.policy.on_trim(span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Record the blocks, and call the policy."""
        self._record(span, span.start, span.end, reason)
        self._geometry = span.geometry
        self.policy.on_remove(span, reason)

    def victim(self, now: int) -> Span:
        """Return the victim of the policy, after checking it and a second call."""
        self.policy.requester = self.requester
        span = self.policy.victim(now)
        again = self.policy.victim(now)
        assert again is span, f"called twice, victim() returned {span!r}, then {again!r}"
        if not isinstance(span, Span):
            return span  # the cache refuses it
        assert span.parent is not None, f"{span!r} has left the cache"
        assert not span.ref_count, f"{span!r} is pinned"
        assert span.is_leaf, f"{span!r} is no leaf"
        return span

    def evictable_blocks(self, span: Span) -> int:
        """Return the answer of the policy, after checking that a second call repeats it."""
        blocks = self.policy.evictable_blocks(span)
        again = self.policy.evictable_blocks(span)
        assert again == blocks, (
            f"called twice, evictable_blocks({span!r}) returned {blocks}, then {again}"
        )
        return blocks

    def _record(self, span: Span, start: int, end: int, reason: str) -> None:
        ratio = span.geometry.ratio
        self.evicted += [
            (reason, span.path_keys[position // ratio], position)
            for position in reversed(range(start, end))
        ]


class Driver:
    """Runs steps on a cache, and checks its integrity after each.

    Args:
        cache: a `KVCache`, or an object with the same methods.
        evicted: list to which the policy of the cache appends the blocks that leave; emptied
            after each step.
    """

    def __init__(self, cache: KVCache, evicted: list[Gone] | None = None) -> None:
        """Store the cache; the time is 0, and no sequence is open."""
        self.cache = cache
        self.sequences: list[Sequence] = []
        self._closed: list[Request] = []
        self.now = 0
        self._evicted = [] if evicted is None else evicted

    def run(self, steps: Iterable[Step]) -> list[Decision]:
        """Run `steps`; return the decision in each."""
        return [self.step(step) for step in steps]

    def step(self, step: Step) -> Decision:
        """Run `step`; return the decision."""
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
        return Decision(action, refused, hit, self.cache.pool.free_blocks, evicted)

    def careful_step(self, step: Step) -> Decision:
        """Run `step`; check that a probe before it, or a refusal of it, changes nothing."""
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
        seq = self.cache.open(request, step.tokens, self.now, resumed=again)
        self.sequences.append(seq)
        return seq.hit_blocks

    def _candidates(self, action: str) -> list[Sequence]:
        if action == "commit":
            return [seq for seq in self.sequences if seq.computed < seq.tokens]
        if action == "compact":
            return [seq for seq in self.sequences if seq.computed > 1]
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
        elif action == "compact":
            cache.compact(seq, min(tokens or 0, seq.computed - 1), now)
        elif action == "fork":
            self.sequences.append(cache.fork(seq, now))
        else:
            self.sequences.remove(seq)
            self._closed.append(seq.request)
            cache.close(seq, now)


def replay(
    cache: KVCache, requests: Iterable[Request], evicted: list[Gone] | None = None
) -> list[Decision]:
    """Serve `requests` one after the other, untimed; return the decision for each.

    `evicted` is the list to which the policy of the cache appends the blocks that leave.
    """
    evicted = [] if evicted is None else evicted
    decisions = []
    for seq in served(requests, cache):
        gone = _canonical(evicted)
        evicted.clear()
        decisions.append(Decision("open", None, seq.hit_blocks, cache.pool.free_blocks, gone))
    return decisions


def snapshot(cache: KVCache) -> Any:
    """Return the state of a cache as a value to compare: a refused call must not change it.

    It has the pool, the spans with their pins and the policy's data, the sequences and the
    statistics. O(blocks).
    """
    pool, tree = cache.pool, cache.tree
    blocks = (list(pool.free_ids()), dict(pool.owners)) if isinstance(pool, BlockPool) else None
    return (
        (pool.free_blocks, blocks),
        (tree.cached_blocks, tree.unpinned_blocks, tree.evicted_blocks, tree.expired_blocks),
        [_span_fields(span) for span in tree.spans()],
        [_sequence_fields(seq) for seq in cache.sequences.values()],
        attrs.astuple(cache.stats),
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
    name
    for name in Span.__slots__
    if name not in ("parent", "children", "ids", "path_keys", "data", "geometry")
]


def _sequence_fields(seq: Sequence) -> dict[str, Any]:
    fields = {name: getattr(seq, name) for name in _LENGTHS}
    return fields | {
        "span": seq.span.id,
        "private": None if seq.private is None else list(seq.private),
        "priorities": repr(seq.priorities),
        "family": [member.id for member in seq.family or ()],
    }


_LENGTHS = [
    name
    for name in Sequence.__slots__
    if name not in ("data", "family", "keys", "priorities", "private", "request", "span")
]


def _canonical(evicted: list[Gone]) -> tuple[Gone, ...]:
    """Return the expired blocks, sorted, and the victims: branches expire in no fixed order."""
    expired = sorted(gone for gone in evicted if gone[0] == "expired")
    return (*expired, *(gone for gone in evicted if gone[0] != "expired"))


_KEY = 6
_TRAFFIC = Traffic(key_tokens=_KEY, hints=True)

# (counting, block size): one and three blocks a key, and in `tokens` two keys a block.
_LAYOUTS = [("tokens", 2), ("tokens", 6), ("tokens", 12), ("keys", 2), ("keys", 6)]
_some_open = precondition(lambda self: bool(self.driver.sequences))


def _rule_of(action: str) -> Any:
    """Return the rule of the state machine that takes a step with `action`, if it can."""

    def act(self: CacheMachine, step: Step) -> None:
        self.take(step)

    act.__name__ = action
    return rule(step=steps(_TRAFFIC, action))(act)


class CacheMachine(RuleBasedStateMachine):
    """Opens, commits, extends, forks, compacts and closes at random, small caches included.

    After each step the invariants of the cache hold. A refused call, and a probe, change
    nothing: pool, spans, pins, statistics, the policy's data. Victims are unpinned leaves. At
    the end all sequences close, and no pin is left.
    """

    driver: Driver

    @abstractmethod
    def make_eviction(self) -> EvictionPolicy:
        """Return a new eviction policy."""

    def make_prefix(self) -> PrefixIndex | None:
        """Return a new prefix index; None for the `radix` plugin."""
        return None

    @initialize(blocks=st.integers(1, 40), layout=st.sampled_from(_LAYOUTS), ids=st.booleans())
    def begin(self, blocks: int, layout: tuple[str, int], ids: bool) -> None:  # noqa: FBT001
        """Make the cache."""
        recording = RecordingPolicy(self.make_eviction())
        accounting, size = layout
        cache = KVCache(
            blocks,
            size,
            eviction=recording,
            prefix=self.make_prefix(),
            accounting=accounting,
            key_tokens=_KEY,
            ids=ids,
        )
        self.driver = Driver(cache, recording.evicted)
        self.requests = 0

    open, serve = _rule_of("open"), _rule_of("serve")
    commit, extend, fork, rollback, compact, close = (
        _some_open(_rule_of(action))
        for action in ("commit", "extend", "fork", "rollback", "compact", "close")
    )

    @_some_open
    @rule(step=steps(_TRAFFIC, "extend"))
    def ask_too_much(self, step: Step) -> None:
        """Allocate more blocks for a sequence than the pool has; it must be refused."""
        cache = self.driver.cache
        tokens = (cache.pool.blocks + 1) * cache.geometry.block_size
        assert self.take(attrs.evolve(step, tokens=tokens)).refused == "OutOfBlocks"

    @invariant()
    def evictable_unless_pinned(self) -> None:
        """Exactly the blocks of spans without pins count as evictable."""
        tree = self.driver.cache.tree
        assert tree.unpinned_blocks == sum(s.blocks for s in tree.spans() if not s.ref_count)

    def take(self, step: Step) -> Decision:
        """Run a step with a unique id of its request; check that a refusal changes nothing."""
        if step.request is not None:
            self.requests += 1
            step = attrs.evolve(step, request=attrs.evolve(step.request, id=self.requests))
        return self.driver.careful_step(step)

    def teardown(self) -> None:
        """Close every sequence: nothing is private or pinned any more."""
        if not hasattr(self, "driver") or self.driver.cache.tree.failure is not None:
            return
        while self.driver.sequences:
            self.take(Step(action="close"))
        cache = self.driver.cache
        assert cache.tree.unpinned_blocks == cache.tree.cached_blocks
        assert cache.pool.free_blocks + cache.tree.cached_blocks == cache.pool.blocks


def cache_machine(
    make_eviction: Callable[[], EvictionPolicy],
    make_prefix: Callable[[], PrefixIndex | None] = lambda: None,
) -> type[CacheMachine]:
    """Return the state machine for caches with these plugins.

    Its `TestCase` attribute is a unittest class that pytest collects; or pass it to
    `hypothesis.stateful.run_state_machine_as_test`.
    """

    class Machine(CacheMachine):
        def make_eviction(self) -> EvictionPolicy:
            return make_eviction()

        def make_prefix(self) -> PrefixIndex | None:
            return make_prefix()

    return Machine
