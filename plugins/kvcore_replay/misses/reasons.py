"""Reasons why tokens of prompts missed, by request and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import attrs

from kvcore.errors import InputError
from kvcore.models.cost import PrefillCost, default_prefill_cost, read_cost
from kvcore.notebook import Shown, data_frame
from kvcore.plugins.options import nearest
from kvcore.units import NS_PER_S
from kvcore_replay.savings import prefill_seconds

__all__ = ["Explanation"]

Id: TypeAlias = int | str

CATEGORIES = {
    "compulsory": "no request admitted before had these keys",
    "capacity": "stored, then evicted; the optimum would have lost it as well",
    "policy": "stored, then evicted; the optimum would have kept it",
    "expired": "stored, then expired",
    "in_flight": "an earlier request was still computing it",
    "unstored": "sent before, but never stored",
    "loaded": "in a lower tier, and loaded from it in place of a prefill",
    "recomputed": "in a lower tier, but recomputing was cheaper",
    "unreadable": "in a lower tier, and could not be loaded",
    "granularity": "less than a block, or the block of the last token",
    "truncated": "beyond what a pool of this size keeps of one request",
    "no_keys": "without a key to be found by",
}
"""The reasons of misses, each with its meaning; every missed token has one of them."""

OF_CLUSTERS = CATEGORIES | {
    "compulsory": "no request that its replica admitted before had these keys",
    "elsewhere": "on another replica when the request was routed",
}
"""The reasons of misses on a cluster. Tokens that another replica held when the request was
routed are `elsewhere`, whatever the reason is on the chosen replica."""

EVICTED = "evicted"
"""Capacity or policy: the last line of the trace decides between them. Of cache groups, for
which there is no optimum, it is a reason of its own."""

OF_GROUPS = CATEGORIES | {
    EVICTED: "stored, then evicted from a group that needs them to go on there",
    "unkept": "a window or a state was not kept where they end, whatever the memory",
}
"""The reasons of misses in a cache of groups. All blocks up to a position are needed of full
attention, and of a window or a state the last ones before it."""

TOMBSTONE = "tombstone"
"""Of pools: full attention has it, and a window or a state that is needed there was evicted."""

OF_POOLS = OF_GROUPS | {
    EVICTED: "stored, then evicted from full attention",
    TOMBSTONE: "cached of full attention; its window or state was evicted before it",
    "unkept": "cached of full attention; a window or a state was not kept there",
}
"""The reasons of misses in a cache with a pool for each kind of layer."""

WAYS = {
    "starts": "the first block is new",
    "diverges": "an earlier request went on differently",
    "extends": "no earlier request went on",
    "ends": "the last key, which covers a part of a block, is new",
}
"""How the first keys that no earlier prompt has follow the keys before them."""

OPTIMUM = (
    "evicts the block whose next request is furthest, deepest first among equals, and must "
    "admit what is computed; it replays the requests one after another, without a clock, in "
    "the order of their first admission"
)
"""The rule that divides misses by capacity and by policy. Source: Belady, 1966; see
`kvcore_replay.belady.Belady`."""


STATES = ("admitted", "rejected", "decoded", "waiting")
"""The states of requests at the end of a trace."""


def seconds(ns: int | None) -> float | None:
    """Convert nanoseconds to the seconds of JSON; None: there are none."""
    return None if ns is None else ns / NS_PER_S


@attrs.frozen(eq=False)
class Eviction:
    """An EVICT event: the tail of a span that left the cache.

    Attributes:
        line: its number in the file, from 1.
        time: time of the eviction, in ns.
        span, blocks: the id of the span (None: a cache group has none), and the number of
            blocks that left.
        by, beneficiary: the policy, and the request that needed the room.
        user: the request that stored or hit the span last.
        age, hits: ns since the span was stored or last hit, and its hits by other requests.
        expired: True if the span expired; False if its room was needed.
    """

    line: int
    time: int
    span: int | None
    blocks: int
    by: str
    beneficiary: Id
    user: Id
    age: int
    hits: int
    expired: bool = False

    def as_dict(self, now: int) -> dict[str, Any]:
        """Return the eviction as a JSON object; `before_s` counts back from `now` (ns)."""
        return {
            "line": self.line,
            "t_s": seconds(self.time),
            "before_s": seconds(now - self.time),
            "by": self.by,
            "for": self.beneficiary,
            "user": self.user,
            "span": self.span,
            "blocks": self.blocks,
            "age_s": seconds(self.age),
            "hits": self.hits,
        }


@attrs.frozen(eq=False)
class TierDrop:
    """A DROP event: the end of a path that left a lower tier.

    Attributes:
        line: its number in the file, from 1.
        time: time of the drop, in ns.
        tier, reason: the tier, and the reason of the drop.
        beneficiary: the request whose blocks took the room; None for other reasons.
    """

    line: int
    time: int
    tier: str
    reason: str
    beneficiary: Id | None

    def as_dict(self, now: int) -> dict[str, Any]:
        """Return the drop as a JSON object; `before_s` counts back from `now` (ns)."""
        return {
            "line": self.line,
            "t_s": seconds(self.time),
            "before_s": seconds(now - self.time),
            "tier": self.tier,
            "reason": self.reason,
            "for": self.beneficiary,
        }


@attrs.define(eq=False)
class DivergencePoint:
    """A point after which requests with the same keys continue with different ones.

    Attributes:
        first, width: the first token after the common keys, and the tokens of a key: the
            prompts differ somewhere within this key.
        requests: number of requests that were first to continue differently here.
        tokens: tokens of their prompts after this point.
        shares: sum over these requests of the position of the point, as a share of the prompt.
        example: the first of these requests.
        other: the request from which it diverges; None at the start of a prompt.
    """

    first: int
    width: int
    example: Id
    other: Id | None
    requests: int = 0
    tokens: int = 0
    shares: float = 0.0

    def count(self, prompt: int, tokens: int) -> None:
        """Count a request: the tokens of its prompt, and those from this point on."""
        self.requests += 1
        self.tokens += tokens
        self.shares += self.first / prompt

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "first_token": self.first,
            "key_tokens": self.width,
            "prompt_share": self.shares / self.requests,
            "requests": self.requests,
            "tokens": self.tokens,
            "example": self.example,
            "other": self.other,
        }


@attrs.frozen(kw_only=True, eq=False)
class MissSegment:
    """Consecutive tokens of a prompt that missed for the same reason.

    Attributes:
        category: one of `CATEGORIES`, of `OF_CLUSTERS`, of `OF_GROUPS` or of `OF_POOLS`.
        first, tokens: the position of the first token, from 0, and the number of tokens.
        eviction: the eviction of the tokens, if they were evicted.
        other: the request that used evicted tokens last, computes tokens in flight, sent tokens
            that were not stored, or from which a compulsory miss diverges.
        way: one of `WAYS` for a compulsory miss.
        place: the divergence point of a compulsory miss that diverges or starts.
        other_salts: number of earlier requests with other salts, for a miss that starts. Keys
            depend on the salt from the first block on, so equal texts cannot be recognised.
        tier: the lower tier that held the tokens at admission; None: no tier did.
        load_ns: ns that their load took or would have taken, with its queue; None if nothing
            is loaded from the tier.
        drop: the drop by which evicted tokens left the last lower tier that held them.
        replica: the replica that held tokens which are `elsewhere`.
        groups: the cache groups, or the pools, that lacked what is needed to go on at the end,
            by their index in `Explanation.groups`. All others had theirs.
    """

    category: str
    first: int
    tokens: int
    eviction: Eviction | None = None
    other: Id | None = None
    way: str | None = None
    place: DivergencePoint | None = None
    other_salts: int = 0
    tier: str | None = None
    load_ns: int | None = None
    drop: TierDrop | None = None
    replica: int | None = None
    groups: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first + self.tokens

    def between(self, first: int, end: int) -> Iterator[MissSegment]:
        """Yield the part from token `first` up to `end`, unless it is empty."""
        first, end = max(first, self.first), min(end, self.end)
        if first < end:
            yield attrs.evolve(self, first=first, tokens=end - first)

    def split_at(self, best: int) -> Iterator[MissSegment]:
        """Yield the parts of an evicted segment before and after `best`; others are left whole.

        `best` is the position at which the hit of the optimum ends.
        """
        if self.category != EVICTED:
            yield self
            return
        cut = min(max(best, self.first), self.end)
        for category, first, end in (("policy", self.first, cut), ("capacity", cut, self.end)):
            if first < end:
                # `attrs.evolve` takes three times as long; where there is an optimum, an
                # evicted segment has no other field.
                yield MissSegment(
                    category=category, first=first, tokens=end - first,
                    eviction=self.eviction, other=self.other, drop=self.drop,
                )  # fmt: skip


@attrs.define(kw_only=True, eq=False)
class RequestMisses:
    """The hit of a request's first admission, and the reasons for the rest.

    Attributes:
        request, tokens: its id, and the tokens of its prompt as the trace counts them.
        prompt: all tokens of its prompt, with or without keys.
        salt, tenant: from its REQUEST line; None if absent.
        arrived, admitted: times in ns; `admitted` is None if it was never admitted.
        seq: the sequence of its first admission.
        hit: prompt tokens that hit.
        optimum: prompt tokens that the optimum hits in a serial replay of the admissions.
        losses: the missed segments in the order of the prompt, from the end of the hit to the
            end of the prompt: the first one says why the hit ended.
        again: number of further admissions after preemptions. Their hits are no reuse, and
            count nowhere else.
        rejected: the reason of its rejection; None if it was not rejected.
        replica: the replica that served it last; None on one server, or if no replica did.
    """

    request: Id
    tokens: int
    prompt: int
    salt: str | None
    tenant: str | None
    arrived: int
    admitted: int | None = None
    seq: int | None = None
    hit: int = 0
    optimum: int = 0
    losses: list[MissSegment] = attrs.field(factory=list)
    again: int = 0
    rejected: str | None = None
    replica: int | None = None

    @property
    def state(self) -> str:
        """State at the end of the trace: `admitted`, `rejected`, `decoded` or `waiting`.

        `decoded`: with split phases, another replica prefilled it, and admitted it first.
        """
        if self.admitted is not None:
            return "admitted"
        if self.rejected is not None:
            return "rejected"
        return "decoded" if self.again else "waiting"


SCHEMA = 1

RUN = ("mode", "count", "block_size", "key_tokens", "blocks")
"""Fields of HEADER that an explanation repeats."""

TOP = 5
"""Number of places, victims and beneficiaries in a summary."""


@attrs.define
class MissedTokens:
    """Sum of the tokens that missed for one reason.

    Attributes:
        tokens, seconds: number of tokens, and the least seconds of their prefill.
        stopped: requests whose hit ended for this reason.
    """

    tokens: int = 0
    seconds: float = 0.0
    stopped: int = 0

    def add(self, tokens: int, prefill: float, *, first: bool) -> None:
        """Add the tokens of a segment; the first segment of a request ended its hit."""
        self.tokens += tokens
        self.seconds += prefill
        self.stopped += first

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {"tokens": self.tokens, "prefill_s": self.seconds, "stopped": self.stopped}


@attrs.frozen(kw_only=True)
class Summary:
    """Totals of missed tokens over all first admissions, by reason.

    Attributes:
        admitted, rejected, decoded, waiting: number of requests by their state at the end.
        readmitted: admissions after a preemption, which count nowhere else.
        prompt_tokens, hit_tokens: tokens of admitted prompts, and those that hit; in `keys`
            accounting what their keys stand for, which may be more than the prompts have.
        longest_prompt: tokens of the longest of these, with or without keys.
        prefill_s, saved_s: the least seconds to prefill the prompts, and what of them hit.
        categories: each of `Explanation.categories`; their tokens add up to the missed ones.
        groups: each cache group; tokens for which it was short, alone or with others.
        ways: each of `WAYS`; their tokens add up to the compulsory ones.
        salted: compulsory misses that start although requests with other salts came before: at
            most these tokens could be text that another salt has.
        places: the points at which most requests diverge; among equals those with more tokens.
        victims: the requests that lost most tokens to evictions, and these tokens.
        beneficiaries: the requests for which most tokens were evicted that missed later, and
            these tokens.
        load_s: seconds of the loads from lower tiers, which replaced the prefill of `loaded`.
    """

    admitted: int
    rejected: int
    decoded: int
    waiting: int
    readmitted: int
    prompt_tokens: int
    hit_tokens: int
    prefill_s: float
    saved_s: float
    longest_prompt: int
    categories: dict[str, MissedTokens]
    ways: dict[str, MissedTokens]
    salted: MissedTokens
    places: list[DivergencePoint]
    victims: list[tuple[Id, int]]
    beneficiaries: list[tuple[Id, int]]
    load_s: float
    groups: list[MissedTokens]

    @property
    def missed_tokens(self) -> int:
        """Number of prompt tokens that missed."""
        return self.prompt_tokens - self.hit_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "requests": {name: getattr(self, name) for name in (*STATES, "readmitted")},
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "missed_tokens": self.missed_tokens,
            "longest_prompt": self.longest_prompt,
            "prefill_s": self.prefill_s,
            "saved_s": self.saved_s,
            "lost": {name: lost.as_dict() for name, lost in self.categories.items()},
            **({"groups": [lost.as_dict() for lost in self.groups]} if self.groups else {}),
            "load_s": self.load_s,
            "compulsory": {name: lost.as_dict() for name, lost in self.ways.items()},
            "other_salts": self.salted.as_dict(),
            "places": [point.as_dict() for point in self.places],
            "victims": [{"request": id_, "tokens": lost} for id_, lost in self.victims],
            "beneficiaries": [
                {"request": id_, "tokens": lost} for id_, lost in self.beneficiaries
            ],
        }


@attrs.frozen(kw_only=True, repr=False)
class Explanation(Shown):
    """The result of `explain`: miss reasons of every request of a trace.

    Attributes:
        source: name of the trace or of the replay.
        header: the HEADER line.
        complete: whether the trace has its END.
        cut_reason: where an incomplete trace stops; it is explained as if it ended there.
        requests: the requests by id, in the order of their REQUEST lines.
        cost: seconds to prefill tokens, by the cost that the trace names; if it names none, or
            an unknown one, those of Llama 3.1 8B on an H100.
    """

    source: str
    header: Mapping[str, Any] = attrs.field(repr=False)
    complete: bool
    cut_reason: str | None
    requests: Mapping[Id, RequestMisses] = attrs.field(repr=False)
    cost: PrefillCost = attrs.field(init=False)

    @cost.default
    def _recorded_cost(self) -> PrefillCost:
        try:
            return read_cost(self.header["recompute"])
        except (InputError, KeyError, TypeError, ValueError, AttributeError):
            return default_prefill_cost()

    @property
    def categories(self) -> Mapping[str, str]:
        """The reasons of misses in this trace, each with its meaning."""
        if self.header.get("layer_pools"):
            return OF_POOLS
        if self.header.get("cache_groups"):
            return OF_GROUPS
        return OF_CLUSTERS if self.header.get("replicas") else CATEGORIES

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The cache groups of the trace, or its pools; none where all layers are one."""
        pools, record = self.header.get("layer_pools"), self.header.get("cache_groups")
        if pools:
            kinds = {"full": self.header["blocks"], "window": None, "state": None}
            kinds |= {kind: pools.get(f"{kind}_slots") for kind in ("window", "state")}
            return [{"kind": kind, "slots": n} for kind, n in kinds.items() if n is not None]
        return [] if record is None else list(record["groups"])

    def plugin(self, kind: str) -> str:
        """Return the name of the run's plugin of a kind, "unknown" if the trace lacks it."""
        name: str = self.header["plugins"].get(kind, {}).get("name", "unknown")
        return name

    def of(self, request: Id) -> RequestMisses:
        """Return the misses of a request; an integer id may be given as text.

        Raises:
            InputError: the trace has no such request.
        """
        named = request
        if request not in self.requests and isinstance(request, str):
            named = next((id_ for id_ in self.requests if str(id_) == request), request)
        if named not in self.requests:
            msg = f"request {request!r} is not in {self.source}{self._ids(str(request))}"
            raise InputError(msg)
        return self.requests[named]

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the requests, with the tokens each missed by reason.

        Raises:
            PluginError: polars is not installed.
        """
        rows = []
        for request in self.requests.values():
            lost = dict.fromkeys(self.categories, 0)
            for loss in request.losses:
                lost[loss.category] += loss.tokens
            rows.append(
                {
                    "request": str(request.request),
                    "tenant": request.tenant,
                    "salt": request.salt,
                    "state": request.state,
                    "arrived_s": seconds(request.arrived),
                    "admitted_s": seconds(request.admitted),
                    "prompt_tokens": request.tokens,
                    "hit_tokens": request.hit,
                    **{f"{name}_tokens": tokens for name, tokens in lost.items()},
                }
            )
        types = dict.fromkeys(("request", "tenant", "salt", "state"), "str")
        types |= dict.fromkeys(("arrived_s", "admitted_s"), "float")
        types |= dict.fromkeys(("prompt_tokens", "hit_tokens"), "int")
        types |= {f"{name}_tokens": "int" for name in self.categories}
        return data_frame(rows, "`explanation.requests`", types)

    def prefill_seconds(self, loss: MissSegment, prompt: int | None = None) -> float:
        """Return the least seconds to prefill the tokens of `loss` after those before them.

        Args:
            loss: a segment of the keys of a prompt.
            prompt: the tokens of that prompt, where its last key may stand for more.
        """
        end = loss.end if prompt is None else max(loss.first, min(loss.end, prompt))
        return self.cost(loss.first, end - loss.first)

    def summary(self, top: int = TOP) -> Summary:
        """Return the totals over all first admissions. O(segments)."""
        states = Counter(reasons.state for reasons in self.requests.values())
        categories = {name: MissedTokens() for name in self.categories}
        ways = {name: MissedTokens() for name in WAYS}
        groups = [MissedTokens() for _ in self.groups]
        salted, loads = MissedTokens(), 0
        victims: Counter[Id] = Counter()
        beneficiaries: Counter[Id] = Counter()
        points: dict[int, DivergencePoint] = {}
        every = self.requests.values()
        for reasons, loss in ((each, loss) for each in every for loss in each.losses):
            sums = [categories[loss.category], *(groups[index] for index in loss.groups)]
            if loss.way is not None:
                sums.append(ways[loss.way])
            if loss.other_salts:
                sums.append(salted)
            if loss.category == "loaded":
                loads += loss.load_ns or 0
            if loss.place is not None:
                points[id(loss.place)] = loss.place
            if loss.eviction is not None and not loss.eviction.expired:
                victims[reasons.request] += loss.tokens
                beneficiaries[loss.eviction.beneficiary] += loss.tokens
            prefill = self.prefill_seconds(loss, reasons.prompt)
            for missed in sums:
                missed.add(loss.tokens, prefill, first=loss is reasons.losses[0])
        admitted = [each for each in every if each.admitted is not None]
        prompts = [reasons.prompt for reasons in admitted]
        hits = [reasons.hit for reasons in admitted]
        places = sorted(points.values(), key=lambda point: (-point.requests, -point.tokens))
        return Summary(
            **{state: states[state] for state in STATES},
            readmitted=sum(reasons.again for reasons in admitted),
            prompt_tokens=sum(reasons.tokens for reasons in admitted),
            hit_tokens=sum(hits),
            longest_prompt=max((reasons.prompt for reasons in admitted), default=0),
            prefill_s=prefill_seconds(self.cost, prompts),
            saved_s=prefill_seconds(self.cost, [*map(min, hits, prompts)]),
            categories=categories,
            ways=ways,
            salted=salted,
            places=places[:top],
            victims=victims.most_common(top),
            beneficiaries=beneficiaries.most_common(top),
            load_s=loads / NS_PER_S,
            groups=groups,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as a JSON object, without its requests and its summary."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "complete": self.complete,
            "cut_reason": self.cut_reason,
            **{name: self.header[name] for name in RUN},
            "eviction": self.plugin("eviction"),
            "prefix": self.plugin("prefix"),
            "recompute": {"model": self.cost.model, "device": self.cost.device},
            "optimum": None if self.groups else OPTIMUM,
            **({self.parts: self.groups} if self.groups else {}),
        }

    @property
    def parts(self) -> str:
        """The name of the field of HEADER and of JSON that has the `groups`."""
        return "layer_pools" if self.header.get("layer_pools") else "cache_groups"

    def request_dict(self, reasons: RequestMisses) -> dict[str, Any]:
        """Return the misses of one request as a JSON object."""
        return {
            "request": reasons.request,
            "state": reasons.state,
            "rejected": reasons.rejected,
            "salt": reasons.salt,
            "tenant": reasons.tenant,
            "arrived_s": seconds(reasons.arrived),
            "admitted_s": seconds(reasons.admitted),
            "seq": reasons.seq,
            **({} if reasons.replica is None else {"replica": reasons.replica}),
            "readmitted": reasons.again,
            "prompt_tokens": reasons.tokens,
            "hit_tokens": reasons.hit,
            "missed_tokens": sum(loss.tokens for loss in reasons.losses),
            "losses": [self._segment(loss, reasons) for loss in reasons.losses],
        }

    def _segment(self, loss: MissSegment, reasons: RequestMisses) -> dict[str, Any]:
        eviction, point, drop = loss.eviction, loss.place, loss.drop
        now = reasons.admitted or 0
        return {
            "category": loss.category,
            "first_token": loss.first,
            "tokens": loss.tokens,
            "prefill_s": self.prefill_seconds(loss, reasons.prompt),
            "other": loss.other,
            "eviction": None if eviction is None else eviction.as_dict(now),
            "way": loss.way,
            "place": None if point is None else point.as_dict(),
            "other_salts": loss.other_salts,
            "tier": loss.tier,
            "load_s": seconds(loss.load_ns),
            "drop": None if drop is None else drop.as_dict(now),
            **({} if loss.replica is None else {"replica": loss.replica}),
            **({"groups": list(loss.groups)} if loss.groups else {}),
        }

    def _ids(self, wanted: str) -> str:
        """Return a hint for an unknown id: the nearest id and the range of ids."""
        ids = list(map(str, self.requests))
        if not ids:
            return ", which has none"
        some = ", ".join(ids[:3])
        if len(ids) > len(ids[:3]):
            some += f", ..., {ids[-1]}"
        near = "" if wanted.isdigit() else nearest(wanted, ids)  # No number is near another.
        rows, workload = "", self.header.get("workload") or {}
        if ids[0].isdigit() and (log := workload.get("options", {}).get("path")):
            rows = f"; rows of {log}, which `kvcore explain {log} ID --blocks N` takes ids of"
        return f"{near}. Its {len(ids):,} ids: {some}{rows}"
