"""What became of each token of a prompt, and of those that did not hit, why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import attrs

from kvcore.units import NANOSECONDS

Id: TypeAlias = int | str

CATEGORIES = {
    "compulsory": "no request admitted before had these keys",
    "capacity": "stored, then evicted; the optimum would have lost it as well",
    "policy": "stored, then evicted; the optimum would have kept it",
    "expired": "stored, then expired",
    "in_flight": "an earlier request was still computing it",
    "unstored": "sent before, but never stored",
    "granularity": "less than a block, or the block of the last token",
    "truncated": "beyond what a pool of this size keeps of one request",
    "no_keys": "without a key to be found by",
}
"""Where hits are lost: every missed token is in one of these."""

EVICTED = "evicted"
"""Capacity or policy: which of them is known when all requests are."""

WAYS = {
    "starts": "the first block is new",
    "diverges": "an earlier request went on differently",
    "extends": "no earlier request went on",
    "ends": "the last key, which covers a part of a block, is new",
}
"""How the keys that nobody sent before begin."""

OPTIMUM = (
    "evicts the block whose next request is furthest, deepest first among equals, and must "
    "admit what is computed; it replays the requests one after another, without a clock, in "
    "the order of their first admission"
)
"""What decides between capacity and policy. Source: Belady, 1966; see `kvcore.lab.Optimum`."""


def seconds(ns: int) -> float:
    """Return nanoseconds as JSON has them."""
    return ns / NANOSECONDS


@attrs.frozen(eq=False)
class Eviction:
    """A line EVICT: the tail of a span that left the cache.

    Attributes:
        line: its number in the file, from 1.
        time: of the eviction, in ns.
        span, blocks: what left, and how much.
        by, beneficiary: the policy, and the request that needed the room.
        user: the request that stored it or hit it last.
        age, hits: ns since the span was stored or last hit, and how often others hit it.
        expired: whether its time was over, rather than room needed.
    """

    line: int
    time: int
    span: int
    blocks: int
    by: str
    beneficiary: Id
    user: Id
    age: int
    hits: int
    expired: bool

    def as_dict(self, now: int) -> dict[str, Any]:
        """Return it as JSON has it, for a use at `now`."""
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


@attrs.define(eq=False)
class Place:
    """Where prompts part: after the same keys, each of them goes on with others.

    Attributes:
        first, width: the token after the common ones, and how many a key covers: what
            changed begins within these.
        requests: how many first sent something new here.
        tokens: of theirs, from here on.
        shares: the sum of the positions as shares of their prompts.
        example: the first of these requests.
        other: the request that it parted from; None at a prompt's start.
    """

    first: int
    width: int
    example: Id
    other: Id | None
    requests: int = 0
    tokens: int = 0
    shares: float = 0.0

    def count(self, prompt: int, tokens: int) -> None:
        """Count a request with so many tokens, of which so many are from here on."""
        self.requests += 1
        self.tokens += tokens
        self.shares += self.first / prompt

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
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
class Loss:
    """Consecutive tokens of a prompt that missed for one reason.

    Attributes:
        category: one of `CATEGORIES`.
        first, tokens: the first of them, counted from 0, and how many.
        eviction: what evicted them, where they were.
        other: the request that used evicted tokens last, is computing those in flight, sent
            those that were not stored, or from which a compulsory miss parts.
        way: of a compulsory miss, one of `WAYS`.
        place: of one that diverges or starts, where that is.
        other_salts: requests of other salts before one that starts. Keys depend on the salt
            from the first block on, so whether one has the same text cannot be told.
    """

    category: str
    first: int
    tokens: int
    eviction: Eviction | None = None
    other: Id | None = None
    way: str | None = None
    place: Place | None = None
    other_salts: int = 0

    @property
    def end(self) -> int:
        """The token after the last."""
        return self.first + self.tokens

    def judged(self, best: int) -> Iterator[Loss]:
        """Yield it, divided at `best`, up to where the optimum hits, if it was evicted."""
        if self.category != EVICTED:
            yield self
            return
        cut = min(max(best, self.first), self.end)
        for category, first, end in (
            ("policy", self.first, cut),
            ("capacity", cut, self.end),
        ):
            if first < end:
                yield attrs.evolve(self, category=category, first=first, tokens=end - first)


@attrs.define(kw_only=True, eq=False)
class Reasons:
    """A request of a trace: what hit at its first admission, and why the rest did not.

    `losses` are in the order of the prompt, from where the hit ends to its end: the first
    says why the hit ended.

    Attributes:
        request, tokens: its id, and the tokens of its prompt as the trace counts them.
        salt, tenant: as in its REQUEST line; None where not given.
        arrived, admitted: in ns; admitted is None if it never was.
        seq: the sequence of its first admission.
        hit: prompt tokens that hit.
        losses: the tokens that did not.
        again: how often it was admitted again, after preemptions. That is no reuse, and
            counts nowhere else.
        rejected: why it was turned away.
    """

    request: Id
    tokens: int
    salt: str | None
    tenant: str | None
    arrived: int
    admitted: int | None = None
    seq: int | None = None
    hit: int = 0
    losses: list[Loss] = attrs.field(factory=list)
    again: int = 0
    rejected: str | None = None

    @property
    def state(self) -> str:
        """Whether it was `admitted` or `rejected`, or is `waiting` where the trace ends."""
        if self.admitted is not None:
            return "admitted"
        return "waiting" if self.rejected is None else "rejected"
