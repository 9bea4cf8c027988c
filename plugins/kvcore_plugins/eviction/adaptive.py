"""Adaptive eviction: experts, trusted by how little they regret."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, ClassVar

import attrs

from kvcore import EvictionPolicy, InputError, Plugins, Request, Span
from kvcore.cache import GhostTree
from kvcore.plugins import find_override

HEARD = (
    *("on_insert", "on_access", "on_extend", "on_split", "joined", "on_pin", "on_release"),
    *("unpinned", "on_leaf", "on_trim", "on_remove", "on_miss", "on_queued", "on_dequeued"),
)
"""What experts are told, if they override it."""

BITS = 53


class View:
    """A span as one expert sees it: all of it, but `data` is the expert's own."""

    __slots__ = ("_place", "data", "span")

    def __init__(self, span: Span, place: int) -> None:
        """Look at `span` as the expert at `place` does."""
        self.span = span
        self._place = place
        self.data: Any = None

    @property
    def parent(self) -> Span | None:
        """The span before it, as the same expert sees it."""
        parent = self.span.parent
        return parent if parent is None or parent.data is None else parent.data[self._place]

    def __getattr__(self, name: str) -> Any:
        """Return what the span has under that name."""
        return getattr(self.span, name)

    def __repr__(self) -> str:
        """Show the expert's data."""
        return f"<View {self.data!r}>"


@attrs.define(slots=False, eq=False)
class Adaptive(EvictionPolicy):
    """Let one of several policies choose the victims: more often the one that errs less.

    For every request that needs room one expert is drawn, by weight, and its victims leave.
    What leaves is remembered, as keys, against all experts that would have had it leave. If
    a request misses what an expert is remembered for, its weight shrinks by
    `rate` × the share of the missed tokens that are; then `discount` of all weight is
    shared out evenly, so that errors of long ago are forgiven and no expert is lost for good
    (fixed share).

    Draws depend on the seed and the request for which room is made alone. A victim stays
    the victim until it is gone or used. Every expert keeps its order of all spans: time and
    memory are the sum of theirs.

    Options:
        experts: names, with `+` between them, such as `lru+lfu:half_life=inf`; in code also
            policies. At least two; none that lets spans expire.
        rate: the learning rate, 0 to 1.
        discount: the share of what was learned that is forgotten with every regret, 0 to 1.
        ghosts: tokens remembered per expert, as a share of the pool's.
        seed: what the draws come from.

    Source: Vietri et al., "Driving cache replacement with ML-based LeCaR", HotStorage 2018
    (regret on ghost entries); Arora, Hazan and Kale, "The multiplicative weights update
    method", 2012 (linear losses, which are exact on all machines); Herbster and Warmuth,
    "Tracking the best expert", 1998 (fixed share).
    """

    name: ClassVar[str] = "adaptive"

    experts: str | Sequence[EvictionPolicy] = attrs.field(default="lru+lfu")
    rate: float = attrs.field(default=0.45)
    discount: float = attrs.field(default=0.005)
    ghosts: float = attrs.field(default=1.0)
    seed: int = attrs.field(default=0)

    _experts: list[EvictionPolicy] = attrs.field(init=False, repr=False)
    _weights: list[float] = attrs.field(init=False, repr=False)
    _listeners: dict[str, list[tuple[int, Callable[..., Any]]]] = attrs.field(
        init=False, repr=False
    )
    _ghosts: list[GhostTree] = attrs.field(init=False, factory=list, repr=False)
    _chosen: tuple[Span, int, tuple[int, ...]] | None = attrs.field(
        init=False, default=None, repr=False
    )

    @rate.validator
    @discount.validator
    def _is_share(self, field: attrs.Attribute[float], value: float) -> None:
        if not 0 <= value <= 1:
            msg = f"adaptive: {field.name}={value} must be 0 to 1"
            raise InputError(msg)

    @ghosts.validator
    def _is_amount(self, _: object, value: float) -> None:
        if not 0 <= value < float("inf"):
            msg = f"adaptive: ghosts={value} must be a share of the pool, 0 or more"
            raise InputError(msg)

    def __attrs_post_init__(self) -> None:
        """Build the experts, and trust all alike."""
        if isinstance(self.experts, str):
            plugins = Plugins()
            names = self.experts.split("+")
            self._experts = [plugins.build("eviction", name) for name in names]
        else:
            self._experts = list(self.experts)
        if len(self._experts) < 2:  # noqa: PLR2004
            msg = f"adaptive: experts={self.experts!r} must be two or more, as in lru+lfu"
            raise InputError(msg)
        for expert in self._experts:
            if not isinstance(expert, EvictionPolicy):
                msg = f"adaptive: {expert!r:.60} is no eviction policy, and so no expert"
                raise InputError(msg)
            if expert.expires_spans:
                msg = f"adaptive: {expert.name!r} lets spans expire, so it cannot be an expert"
                raise InputError(msg)
            expert.bind()
        self._weights = [1 / len(self._experts)] * len(self._experts)
        self._listeners = {method: self._overriding(method) for method in HEARD}
        reaches = [expert.lookahead for expert in self._experts]
        self.lookahead = None if None in reaches else max(reach or 0 for reach in reaches)

    @property
    def weights(self) -> dict[str, float]:
        """How far each expert is trusted, by its name; they add up to 1."""
        names = [expert.name for expert in self._experts]
        return dict(zip(names, self._weights, strict=True))

    def attach(self, blocks: int, block_size: int) -> None:
        """Let every expert know, and work out how much to remember."""
        super().attach(blocks, block_size)
        tokens = int(self.ghosts * blocks * block_size)
        self._ghosts = [GhostTree(tokens) for _ in self._experts]
        for expert in self._experts:
            expert.attach(blocks, block_size)

    def on_insert(self, span: Span, now: int) -> None:
        """Forget that it had left."""
        span.data = self._views(span)
        for ghost in self._ghosts:
            ghost.forget(span)
        self._tell("on_insert", span, now)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Forget that it had left."""
        for ghost in self._ghosts:
            ghost.forget(span)
        self._tell("on_extend", span, blocks)

    def on_access(self, span: Span, now: int) -> None:
        """Pass it on."""
        self._tell("on_access", span, now)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Let every expert see the new span."""
        upper.data = self._views(upper)
        for place, hear in self._listeners["on_split"]:
            hear(upper.data[place], lower.data[place])

    def joined(self, upper: Span, lower: Span) -> None:
        """Pass it on."""
        for place, hear in self._listeners["joined"]:
            hear(upper.data[place], lower.data[place])

    def on_pin(self, span: Span) -> None:
        """Pass it on; a victim that is used is none any more."""
        self._let_go(span)
        self._tell("on_pin", span)

    def on_release(self, span: Span, now: int) -> None:
        """Pass it on."""
        self._tell("on_release", span, now)

    def unpinned(self, span: Span, now: int) -> None:
        """Pass it on."""
        for expert, view in zip(self._experts, span.data, strict=True):
            expert.unpinned(view, now)

    def on_leaf(self, span: Span) -> None:
        """Pass it on."""
        self._tell("on_leaf", span)

    def on_trim(self, span: Span, blocks: int) -> None:
        """Remember what left, against those who wanted it."""
        self._remember(span, blocks)
        self._tell("on_trim", span, blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remember what left, against those who wanted it."""
        self._remember(span, span.blocks)
        self._let_go(span)
        self._tell("on_remove", span, reason)

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """Trust those less whose victims `request` misses."""
        tokens = len(request.keys) * request.key_tokens - hit_blocks * self.block_size
        regrets = [ghost.match(request) for ghost in self._ghosts]
        if any(regrets):
            shrunk = [
                weight * (1 - self.rate * regret / tokens)
                for weight, regret in zip(self._weights, regrets, strict=True)
            ]
            total, even = sum(shrunk), self.discount / len(shrunk)
            if total:
                keep = 1 - self.discount
                self._weights = [keep * weight / total + even for weight in shrunk]
        for _, hear in self._listeners["on_miss"]:
            hear(request, hit_blocks, now)

    def on_queued(self, request: Request, now: int, *, front: bool = False) -> None:
        """Pass it on."""
        for _, hear in self._listeners["on_queued"]:
            hear(request, now, front=front)

    def on_dequeued(self, request: Request, now: int) -> None:
        """Pass it on."""
        for _, hear in self._listeners["on_dequeued"]:
            hear(request, now)

    def victim(self, now: int) -> Span:
        """Return the victim of the expert drawn for the request."""
        if self._chosen is None:
            place, victims = self._draw(), []
            for expert in self._experts:
                expert.requester = self.requester
                victims.append(_seen(expert.victim(now)))
            victim = victims[place]
            blamed = tuple(at for at, other in enumerate(victims) if other is victim)
            self._chosen = victim, place, blamed
        return self._chosen[0]

    def evictable_blocks(self, span: Span) -> int:
        """Return what the expert that chose `span` says."""
        assert self._chosen is not None
        place = self._chosen[1]
        return self._experts[place].evictable_blocks(span.data[place])

    def state(self) -> Any:
        """Return the states of experts and ghosts, the weights, and the victim."""
        experts = tuple(expert.state() for expert in self._experts)
        ghosts = tuple(ghost.state() for ghost in self._ghosts)
        return experts, ghosts, tuple(self._weights), self._chosen

    def restore(self, state: Any) -> None:
        """Take all of it from `state`."""
        experts, ghosts, weights, self._chosen = state
        for expert, its in zip(self._experts, experts, strict=True):
            expert.restore(its)
        for ghost, its in zip(self._ghosts, ghosts, strict=True):
            ghost.restore(its)
        self._weights = list(weights)

    def _views(self, span: Span) -> tuple[View, ...]:
        return tuple(View(span, place) for place in range(len(self._experts)))

    def _overriding(self, method: str) -> list[tuple[int, Callable[..., Any]]]:
        """Return `method` of each expert that overrides it, and the expert's place."""
        found = [find_override(expert, method) for expert in self._experts]
        return [(place, hear) for place, hear in enumerate(found) if hear is not None]

    def _tell(self, method: str, span: Span, *args: Any) -> None:
        for place, hear in self._listeners[method]:
            hear(span.data[place], *args)

    def _draw(self) -> int:
        """Return the place of an expert, drawn by weight for the request."""
        text = f"{self.seed}/{self.name}/{self.requester!r}"
        digest = blake2b(text.encode(), digest_size=8).digest()
        share = (int.from_bytes(digest) >> (64 - BITS)) / 2**BITS
        for place, weight in enumerate(self._weights[:-1]):
            if share < weight:
                return place
            share -= weight
        return len(self._weights) - 1

    def _remember(self, span: Span, blocks: int) -> None:
        """Remember that the last `blocks` blocks of the victim left."""
        if self._chosen is not None:
            for place in self._chosen[2]:
                self._ghosts[place].add(span, blocks)

    def _let_go(self, span: Span) -> None:
        if self._chosen is not None and self._chosen[0] is span:
            self._chosen = None


def _seen(answer: Any) -> Any:
    """Return the span that an expert's answer is a view of."""
    return answer.span if isinstance(answer, View) else answer
