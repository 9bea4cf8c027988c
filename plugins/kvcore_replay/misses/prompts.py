"""Why an API did not read prompt tokens from its cache: TTL, edits, evictions, its rules."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from kvcore.errors import InputError
from kvcore.plugins.options import nearest
from kvcore.progress import Tick, ticked, unseen
from kvcore.request import Key, Request
from kvcore.units import NS_PER_S
from kvcore_plugins.workload.logged import LoggedRequest
from kvcore_replay.billing import Bills, PromptCache, PromptSize, bill, full_keys, live_keys
from kvcore_replay.pricing import PriceModel, find_price

REASONS = {
    "short": "the prompt is shorter than any that is cached",
    "new": "no earlier prompt begins so",
    "edited": "an earlier prompt has these tokens, after a part that was changed",
    "undetermined": "the prompt was edited, and the TTL of the earlier one had lapsed anyway",
    "lapsed": "the last request with the same prefix was longer ago than the TTL",
    "evicted": "the TTL had not lapsed and the rule reads them, but the log does not",
    "unmarked": "an earlier prompt had them, but the rule stores no entry that ends there",
}
"""The reasons why prompt tokens were not read from the cache, each with its meaning."""

RECENT = 1000
"""Number of latest logged prompts among which the original of an edited one is searched."""

CANDIDATES = 3
"""Number of prompts that are compared with a prompt that may have been edited."""

EDIT_TOKENS = 64
"""The least tokens that an edited prompt repeats; fewer may be equal by chance."""

SCHEMA = 1


@attrs.frozen(kw_only=True)
class UnreadTokens:
    """Consecutive tokens of a prompt that were not read from the cache, for one reason.

    Attributes:
        reason: one of `REASONS`.
        first, tokens: the position of the first token, from 0, and the number of tokens.
        other: the last request with the same prefix, or the original of an edited prompt.
        gap_ns: nanoseconds since that request.
        place: the content block in which an edited prompt changed.
    """

    reason: str
    first: int
    tokens: int
    other: int | str | None = None
    gap_ns: int | None = None
    place: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        gap = None if self.gap_ns is None else self.gap_ns / NS_PER_S
        fields = attrs.asdict(self, filter=attrs.filters.exclude("gap_ns"))
        return {**fields, "gap_s": gap}


@attrs.frozen(kw_only=True)
class PromptReads:
    """The cache reads of one prompt, and the reasons why other tokens were not read.

    Attributes:
        request: id of the request.
        arrived_ns: its arrival time.
        tokens: tokens of the prompt, as the API counts them.
        expected: tokens that the API's rule reads.
        reported: tokens read according to the log; None: the log reports none, and `expected`
            counts.
        unread: the tokens that were not read, in the order of the prompt.
    """

    request: int | str
    arrived_ns: int
    tokens: int
    expected: int
    reported: int | None
    unread: list[UnreadTokens]

    @property
    def read(self) -> int:
        """Tokens read from the cache: `reported` if there is a report, otherwise `expected`."""
        return self.expected if self.reported is None else self.reported

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "request": self.request,
            "arrived_s": self.arrived_ns / NS_PER_S,
            "prompt_tokens": self.tokens,
            "read_tokens": self.read,
            "expected_tokens": self.expected,
            "reported_tokens": self.reported,
            "unread": [part.as_dict() for part in self.unread],
        }


@attrs.frozen(kw_only=True)
class PromptExplanation:
    """The result of `explain_prompts`.

    Attributes:
        source: name of the workload.
        bills: its bills.
        prompts: the cache reads of each request, in order of arrival.
    """

    source: str
    bills: Bills
    prompts: list[PromptReads]

    def of(self, request: str) -> PromptReads:
        """Return the cache reads of the request with this id.

        Raises:
            InputError: there is no such request.
        """
        for prompt in self.prompts:
            if str(prompt.request) == request:
                return prompt
        ids = [str(prompt.request) for prompt in self.prompts]
        msg = f"request {request!r} is not in {self.source}{nearest(request, ids)}"
        raise InputError(msg)

    def sums(self) -> dict[str, dict[str, Any]]:
        """Return, by reason, the unread tokens, the requests whose reads ended so, and dollars.

        Dollars are the saving if the tokens had been read: their number times the difference
        between the prices of `input` and `cached`.
        """
        uncached, cached, *_ = self.bills.price.rates
        totals = {reason: {"tokens": 0, "stopped": 0, "usd": 0.0} for reason in REASONS}
        for prompt in self.prompts:
            for part in prompt.unread:
                row = totals[part.reason]
                row["tokens"] += part.tokens
                row["stopped"] += part is prompt.unread[0]
        for row in totals.values():
            row["usd"] = row["tokens"] * (uncached - cached) / 1e6
        return totals

    def as_dict(self) -> dict[str, Any]:
        """Return the bills and the sums over all requests as a JSON object."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "bill": self.bills.as_dict(),
            "prompt_tokens": sum(prompt.tokens for prompt in self.prompts),
            "read_tokens": sum(prompt.read for prompt in self.prompts),
            "expected_tokens": sum(prompt.expected for prompt in self.prompts),
            "lost": self.sums(),
        }


def explain_prompts(
    requests: Iterable[Request],
    price: PriceModel | str,
    *,
    source: str = "requests",
    tick: Tick = unseen,
) -> PromptExplanation:
    """Return the reason why each prompt token was not read from an API's cache.

    If a log reports the tokens that were read, the others are explained; otherwise those that
    the API's rule does not read. Edits are found in logged prompts only, since their contents
    are known. O(keys); memory grows with the distinct keys.

    Args:
        requests: a workload, or its requests, in order of arrival. They are read twice.
        price: the prices and the rule, or their text.
        source: name of the requests in reports.
        tick: called with the number of requests that have been explained.

    Raises:
        InputError: an unknown price, or a request that cannot be read.
    """
    price = find_price(price) if isinstance(price, str) else price
    classifier = _Classifier(price)
    return PromptExplanation(
        source=source,
        bills=bill(requests, price),
        prompts=[classifier.explain(request) for request in ticked(requests, tick)],
    )


def slack(price: PriceModel, expected: int) -> int:
    """Return by how many tokens a log may differ from `expected` reads, as if it did not.

    Positions in a logged prompt are estimates if its tokens are: a difference of up to a tenth,
    or of one step of the API's rule, is none.
    """
    return max(price.step, expected // 10)


class _Classifier:
    """Explains requests one after another, and remembers their prompts."""

    def __init__(self, price: PriceModel) -> None:
        self._price = price
        self._cache = PromptCache(price)
        self._unlapsed = PromptCache(price, lapses=False)
        # By key, when (ns) it was last part of a prompt, and of which request.
        self._used: dict[Key, int] = {}
        self._users: dict[Key, int | str] = {}
        self._originals = _Originals()

    def explain(self, request: Request) -> PromptReads:
        """Return the cache reads of the next request, and remember its prompt."""
        price, now = self._price, request.arrival
        size = PromptSize.from_request(request, price)
        expected = self._cache.charge(request, now).read
        unlapsed = self._unlapsed.charge(request, now).read
        usage = request.usage if isinstance(request, LoggedRequest) else None
        reported = None if usage is None else usage.read_tokens
        read = expected if reported is None else reported
        parts: list[UnreadTokens]
        if size.billed < max(price.min_tokens, 1):
            parts = [UnreadTokens(reason="short", first=read, tokens=size.billed - read)]
        else:
            trusted = read if expected - read <= slack(price, expected) else expected
            early = max(0, expected - trusted)
            parts = list(self._unread(request, size, read, trusted, unlapsed - early, early))
        keys = full_keys(request, size)
        self._used.update(dict.fromkeys(keys, now))
        self._users.update(dict.fromkeys(keys, request.id))
        if isinstance(request, LoggedRequest):
            self._originals.add(request)
        return PromptReads(
            request=request.id,
            arrived_ns=now,
            tokens=size.billed,
            expected=expected,
            reported=reported,
            unread=[part for part in parts if part.tokens > 0],
        )

    def _unread(
        self,
        request: Request,
        size: PromptSize,
        read: int,
        expected: int,
        unlapsed: int,
        early: int,
    ) -> Iterator[UnreadTokens]:
        """Yield the parts of a prompt after its first `read` tokens, in order.

        The rule reads `expected` tokens, and `unlapsed` if no TTL lapsed. The same content
        stands `early` tokens earlier in the log than by its keys.
        """
        now, unit, keys = request.arrival, size.key, full_keys(request, size)
        known = live_keys(keys, self._used, -1)
        start, original, ttl = read, None, self._price.ttl_ns
        text = PromptSize.of_text(request)
        if isinstance(request, LoggedRequest):
            original = self._originals.find(request, known * text.key)
            # The longest TTL that the prompt requests, if any.
            ttl = max((part.ttl_ns or 0 for part in request.parts), default=0) or ttl
        live = live_keys(keys, self._used, now - ttl)
        borders = [("evicted", expected), ("lapsed", unlapsed)]
        if original is None:  # Otherwise the entry of the original would be read.
            borders.append(("unmarked", size.scaled(known * unit) - early))
        for reason, end in borders:
            if end > start:
                # Of lapsed tokens the shortest prefix was used last, of others the longest.
                index = start if reason == "lapsed" else end - 1
                index = index * size.counted // size.billed // unit
                index = max(index, live) if reason == "lapsed" else index
                key = keys[min(index, known - 1)] if known else None
                used = self._used.get(key)
                yield UnreadTokens(
                    reason=reason,
                    first=start,
                    tokens=end - start,
                    other=self._users.get(key),
                    gap_ns=None if used is None else now - used,
                )
                start = end
        if original is not None:
            other, place_of_edit, kept = original
            gap = now - other.arrival
            # The log may report more as read than the edit has left alike.
            tokens = max(0, min(text.scaled(known * text.key + kept), size.billed) - start)
            yield UnreadTokens(
                reason="edited" if gap < ttl else "undetermined",
                first=start,
                tokens=tokens,
                other=other.id,
                gap_ns=gap,
                place=place_of_edit,
            )
            start += tokens
        yield UnreadTokens(reason="new", first=start, tokens=size.billed - start)


class _Originals:
    """The latest logged prompts, sentence by sentence."""

    def __init__(self) -> None:
        self._recent: OrderedDict[int | str, LoggedRequest] = OrderedDict()
        # By sentence, the last of these requests that has it.
        self._holders: dict[int, int | str] = {}

    def add(self, request: LoggedRequest) -> None:
        """Add a prompt; remove the oldest one if there are more than `RECENT`."""
        self._recent[request.id] = request
        self._holders.update((piece, request.id) for piece, _ in _pieces(request))
        if len(self._recent) > RECENT:
            oldest, gone = self._recent.popitem(last=False)
            for piece, _ in _pieces(gone):
                if self._holders.get(piece) == oldest:
                    del self._holders[piece]

    def find(self, request: LoggedRequest, known: int) -> tuple[LoggedRequest, str, int] | None:
        """Return the original of an edited prompt, the changed block, and the repeated tokens.

        A prompt was edited if it repeats at least half of the sentences of another prompt after
        the first one that differs. Their tokens after the first `known` are counted; of several
        such prompts the original is the one with the most. None if the prompt was not edited.
        """
        holders = (self._holders.get(piece) for piece, _ in _pieces(request))
        counts = Counter(id_ for id_ in holders if id_ is not None)
        candidates = (self._recent[id_] for id_, _ in counts.most_common(CANDIDATES))
        kept = (self._kept(request, other, known) for other in candidates)
        return max(filter(None, kept), key=lambda match: match[2], default=None)

    def _kept(
        self, request: LoggedRequest, other: LoggedRequest, known: int
    ) -> tuple[LoggedRequest, str, int] | None:
        pieces, theirs = list(_pieces(request)), list(_pieces(other))
        pairs = enumerate(zip(pieces, theirs, strict=False))
        shorter = min(len(pieces), len(theirs))
        same = next((index for index, (a, b) in pairs if a[0] != b[0]), shorter)
        rest = Counter(piece for piece, _ in theirs[same:])
        left, kept, tokens = rest.total(), 0, 0
        token = start = pieces[same - 1][1] if same else 0
        for piece, end in pieces[same:]:
            if rest[piece] > 0:
                rest[piece] -= 1
                kept += 1
                tokens += max(0, end - max(start, known))
            start = end
        if other.salt != request.salt or 2 * kept < left or tokens < EDIT_TOKENS:
            return None
        label = next(part.label for part in request.parts if part.end > token)
        token_number = PromptSize.of_text(request).scaled(token)
        return other, f"{label}, after token {token_number:,}", tokens


def _pieces(request: LoggedRequest) -> Iterator[tuple[int, int]]:
    """Yield the hash and the end of each sentence of a prompt."""
    for part in request.parts:
        yield from part.pieces
