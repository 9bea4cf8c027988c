"""Adaptive eviction: several policies, weighted by how little they regret."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from kvcore import EvictionPolicy, InputError, Plugins, Request, Span
from kvcore.blake2 import blake2b
from kvcore.plugins import find_override
from kvcore_plugins.eviction.ghost import GhostTree

DRAW_BITS = 53


class ExpertSpan:
    """A span for one expert of `Adaptive`, with `data` of that expert.

    All other public attributes are properties that read those of the span, in C.
    """

    __slots__ = ("_expert", "data", "span")

    def __init__(self, span: Span, expert: int) -> None:
        """Store the span and the index of the expert."""
        self.span = span
        self._expert = expert
        self.data: Any = None

    @property
    def parent(self) -> Any:
        """The parent of the span, for the same expert."""
        parent = self.span.parent
        return parent if parent is None or parent.data is None else parent.data[self._expert]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the attribute `name` of the span."""

    def __repr__(self) -> str:
        """Return the class and the data of the expert."""
        return f"<ExpertSpan {self.data!r}>"


for _name in dir(Span):
    if not (_name.startswith("_") or hasattr(ExpertSpan, _name)):
        setattr(ExpertSpan, _name, property(attrgetter(f"span.{_name}")))


class Adaptive(EvictionPolicy):
    """Evict the victims of one of several policies: more often of one whose victims miss less.

    For every request that needs blocks one expert is drawn, by weight, and its victims are
    evicted. The keys of their blocks become ghosts of all experts that had the same victim.
    If a request misses keys among the ghosts of an expert, the weight of that expert shrinks
    by `rate` times their share of the missed tokens; then `discount` of all weight is
    distributed evenly, so that old errors lose influence and every expert keeps some weight
    (fixed share).

    A draw depends only on the seed and the id of the request that needs blocks. A victim
    stays the victim until it has left or is used. Every expert keeps its order of all spans:
    time and memory are the sums over the experts.

    `span.data` is a tuple with the `ExpertSpan` of each expert.

    Options:
        experts: names, with `+` between them, such as `lru+lfu:half_life=inf`; in code also
            policies. At least two; none that sets `span.expires`.
        rate: the learning rate, 0 to 1.
        discount: the share of all weight that is distributed evenly after each miss, 0 to 1.
        ghosts: tokens of ghosts for each expert, as a share of the pool.
        seed: number from which all draws are derived.

    Source: Vietri et al., "Driving cache replacement with ML-based LeCaR", HotStorage 2018
    (regret on ghost entries); Arora, Hazan and Kale, "The multiplicative weights update
    method", 2012 (linear losses, which are exact on all machines); Herbster and Warmuth,
    "Tracking the best expert", 1998 (fixed share).
    """

    name: ClassVar[str] = "adaptive"

    # The victim, the index of the expert drawn, and those of all experts with that victim.
    _chosen: tuple[Span, int, tuple[int, ...]] | None = None

    def __init__(
        self,
        experts: str | Sequence[EvictionPolicy] = "lru+lfu",
        rate: float = 0.45,
        discount: float = 0.005,
        ghosts: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Store the options and build the experts, with equal weights."""
        for option, share in (("rate", rate), ("discount", discount)):
            if not 0 <= share <= 1:
                msg = f"adaptive: {option}={share} must be 0 to 1"
                raise InputError(msg)
        if not 0 <= ghosts <= 1000:  # noqa: PLR2004 - more than anybody has
            msg = f"adaptive: ghosts={ghosts} must be a share of the pool, 0 to 1,000"
            raise InputError(msg)
        self.experts = experts
        self.rate = rate
        self.discount = discount
        self.ghosts = ghosts
        self.seed = seed
        self._experts = _build(experts)
        self._weights = [1 / len(self._experts)] * len(self._experts)
        self._on_insert, self._on_access = map(self._calls, ("on_insert", "on_access"))
        self._on_extend, self._on_split = map(self._calls, ("on_extend", "on_split"))
        self._on_pin, self._on_release = map(self._calls, ("on_pin", "on_release"))
        self._on_leaf, self._on_trim = map(self._calls, ("on_leaf", "on_trim"))
        self._on_remove, self._on_miss = map(self._calls, ("on_remove", "on_miss"))
        self._on_queued, self._on_dequeued = map(self._calls, ("on_queued", "on_dequeued"))
        self._on_end = self._calls("on_end")
        reaches = [expert.lookahead for expert in self._experts]
        self.lookahead = None if None in reaches else max(reach or 0 for reach in reaches)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each expert by its name; they add up to 1."""
        names = [expert.name for expert in self._experts]
        return dict(zip(names, self._weights, strict=True))

    def attach(self, blocks: int, block_size: int) -> None:
        """Attach every expert, and create the ghosts."""
        super().attach(blocks, block_size)
        tokens = int(self.ghosts * blocks * block_size)
        self._ghosts = [GhostTree(tokens) for _ in self._experts]
        for expert in self._experts:
            expert.attach(blocks, block_size)

    def on_insert(self, span: Span, now: int) -> None:
        """Remove the ghosts of `span`, which is cached again."""
        span.data = self._expert_spans(span)
        for ghost in self._ghosts:
            ghost.forget(span)
        for index, on_insert in self._on_insert:
            on_insert(span.data[index], now)

    def on_extend(self, span: Span, blocks: int) -> None:
        """Remove the ghosts of `span`, which is cached again."""
        for ghost in self._ghosts:
            ghost.forget(span)
        for index, on_extend in self._on_extend:
            on_extend(span.data[index], blocks)

    def on_split(self, upper: Span, lower: Span) -> None:
        """Call the experts, with a span of their own for `upper`."""
        upper.data = self._expert_spans(upper)
        for index, on_split in self._on_split:
            on_split(upper.data[index], lower.data[index])

    def on_pin(self, span: Span) -> None:
        """Call the experts. A span that is used is no longer the victim."""
        if self._chosen is not None and self._chosen[0] is span:
            self._chosen = None
        for index, on_pin in self._on_pin:
            on_pin(span.data[index])

    def on_access(self, span: Span, now: int) -> None:
        """Call the experts."""
        for index, on_access in self._on_access:
            on_access(span.data[index], now)

    def on_release(self, span: Span, now: int) -> None:
        """Call the experts."""
        for index, on_release in self._on_release:
            on_release(span.data[index], now)

    def on_leaf(self, span: Span) -> None:
        """Call the experts."""
        for index, on_leaf in self._on_leaf:
            on_leaf(span.data[index])

    def on_trim(self, span: Span, blocks: int) -> None:
        """Remember the blocks that left, for the experts that chose them."""
        if self._chosen is not None and self._chosen[0] is span:
            self._remember(span, blocks)
        for index, on_trim in self._on_trim:
            on_trim(span.data[index], blocks)

    def on_remove(self, span: Span, reason: str) -> None:
        """Remember the blocks that left, for the experts that chose them."""
        if self._chosen is not None and self._chosen[0] is span:
            self._remember(span, span.blocks)
            self._chosen = None
        for index, on_remove in self._on_remove:
            on_remove(span.data[index], reason)

    def on_miss(self, request: Request, hit_blocks: int, now: int) -> None:
        """Reduce the weight of the experts whose victims `request` misses."""
        tokens = len(request.keys) * request.key_tokens - hit_blocks * self.block_size
        regrets = [ghost.match(request) for ghost in self._ghosts]
        if any(regrets):
            reduced = [
                weight * (1 - self.rate * regret / tokens)
                for weight, regret in zip(self._weights, regrets, strict=True)
            ]
            total, even = sum(reduced), self.discount / len(reduced)
            if total:
                keep = 1 - self.discount
                self._weights = [keep * weight / total + even for weight in reduced]
        for _, on_miss in self._on_miss:
            on_miss(request, hit_blocks, now)

    def on_queued(self, request: Request, now: int, *, front: bool = False) -> None:
        """Call the experts."""
        for _, on_queued in self._on_queued:
            on_queued(request, now, front=front)

    def on_dequeued(self, request: Request, now: int) -> None:
        """Call the experts."""
        for _, on_dequeued in self._on_dequeued:
            on_dequeued(request, now)

    def on_end(self, request: Request, now: int) -> None:
        """Call the experts."""
        for _, on_end in self._on_end:
            on_end(request, now)

    def victim(self, now: int) -> Span:
        """Return the victim of the expert that is drawn for the request."""
        if self._chosen is None:
            drawn, victims, requester = self._draw(), [], self.requester
            for expert in self._experts:
                expert.requester = requester
                answer: Any = expert.victim(now)
                victims.append(answer.span if type(answer) is ExpertSpan else answer)
            victim = victims[drawn]
            choosers = tuple([at for at, other in enumerate(victims) if other is victim])
            self._chosen = victim, drawn, choosers
        return self._chosen[0]

    def evictable_blocks(self, span: Span) -> int:
        """Return the answer of the expert that chose `span`."""
        assert self._chosen is not None
        drawn = self._chosen[1]
        return self._experts[drawn].evictable_blocks(span.data[drawn])

    def _expert_spans(self, span: Span) -> tuple[ExpertSpan, ...]:
        return tuple([ExpertSpan(span, index) for index in range(len(self._experts))])

    def _calls(self, callback: str) -> list[tuple[int, Callable[..., Any]]]:
        """Return the index and the bound method of each expert that defines `callback`."""
        found = ((at, find_override(each, callback)) for at, each in enumerate(self._experts))
        return [(at, override) for at, override in found if override is not None]

    def _draw(self) -> int:
        """Return the index of an expert, drawn by weight for the request."""
        text = f"{self.seed}/{self.name}/{self.requester!r}"
        digest = blake2b(text.encode(), digest_size=8).digest()
        share = (int.from_bytes(digest) >> (64 - DRAW_BITS)) / 2**DRAW_BITS
        for index, weight in enumerate(self._weights[:-1]):
            if share < weight:
                return index
            share -= weight
        return len(self._weights) - 1

    def _remember(self, span: Span, blocks: int) -> None:
        """Remember the last `blocks` blocks of the victim, for the experts that chose it."""
        assert self._chosen is not None
        for index in self._chosen[2]:
            self._ghosts[index].add(span, blocks)


def _build(experts: str | Sequence[EvictionPolicy]) -> list[EvictionPolicy]:
    """Build the experts, and mark them as in use.

    Raises:
        InputError: fewer than two, or one that is no eviction policy or lets spans expire.
    """
    built: list[EvictionPolicy]
    if isinstance(experts, str):
        plugins = Plugins()
        built = [plugins.build("eviction", name) for name in experts.split("+")]
    else:
        built = list(experts)
    if len(built) < 2:  # noqa: PLR2004
        msg = f"adaptive: experts={experts!r} must be two or more, as in lru+lfu"
        raise InputError(msg)
    for expert in built:
        if not isinstance(expert, EvictionPolicy):
            msg = f"adaptive: {expert!r:.60} is no eviction policy, and so no expert"
            raise InputError(msg)
        if expert.expires_spans:
            msg = f"adaptive: {expert.name!r} lets spans expire, so it cannot be an expert"
            raise InputError(msg)
        expert.bind()
    return built
