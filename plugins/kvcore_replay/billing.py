"""The bill of a workload: the price of its tokens at an API that caches prompts.

Tokens of a prompt are read from the cache, written to it, or neither: each kind has its price.
The tokens that are read follow from the hits of a simulated cache, or from the rule of the API:
a cache without bounds, whose entries live for a TTL after their last use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import add
from typing import Any, NamedTuple, Self

import attrs

from kvcore.request import Key, Request, chain_keys
from kvcore.serving.stats import RunLog
from kvcore.units import NS_PER_S
from kvcore_plugins.workload.logged import LoggedRequest
from kvcore_plugins.workload.usage import Usage
from kvcore_replay.pricing import HOUR, PriceModel, find_price

_HOUR_NS = int(HOUR) * NS_PER_S


class Charge(NamedTuple):
    """The tokens of one request by price. All but the output add up to its prompt."""

    uncached: int
    read: int
    written: int
    written_1h: int
    output: int


@attrs.frozen(kw_only=True)
class Bill:
    """The tokens and dollars of a workload.

    Attributes:
        requests: number of requests that were billed.
        uncached_tokens, read_tokens, written_tokens, written_1h_tokens: tokens of their
            prompts, each counted once; without a price for writing no token counts as written.
        output_tokens: generated tokens.
        usd: tokens times their prices.
    """

    requests: int
    uncached_tokens: int
    read_tokens: int
    written_tokens: int
    written_1h_tokens: int
    output_tokens: int
    usd: float

    @classmethod
    def from_charges(cls, price: PriceModel, charges: Iterable[Charge]) -> Self:
        """Add up `charges`. O(requests), and no memory."""
        requests, sums = 0, [0] * len(Charge._fields)
        for charge in charges:
            requests += 1
            for index, tokens in enumerate(charge):
                sums[index] += tokens
        usd = sum(tokens * rate for tokens, rate in zip(sums, price.rates, strict=True)) / 1e6
        fields = [f"{name}_tokens" for name in Charge._fields]
        return cls(requests=requests, usd=usd, **dict(zip(fields, sums, strict=True)))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        written = self.written_tokens + self.written_1h_tokens
        return self.uncached_tokens + self.read_tokens + written


@attrs.frozen(kw_only=True)
class Bills:
    """The bills of a workload at an API, and that of a run.

    Attributes:
        price: the prices of tokens, and the rule of the API.
        uncached: the bill without any cache.
        api: the bill by the API's own rule.
        reported: the bill of the tokens that a log reports as billed; None if a request has no
            such report.
        run: the bill with the hits of a run under a policy; None without a run.
    """

    price: PriceModel
    uncached: Bill
    api: Bill
    reported: Bill | None
    run: Bill | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return attrs.asdict(self)


class PromptSize(NamedTuple):
    """The length of a prompt as the API counts it, and as its positions are counted.

    Positions of keys are of the API's tokens, as in a simulated cache. Those of content blocks
    are of the text, which another tokenizer or an estimate counts: they are scaled by the
    ratio of the two lengths.

    Attributes:
        billed: tokens of the prompt for the API.
        counted: tokens of the prompt as positions are counted.
        key: tokens that a key stands for, as positions are counted.
    """

    billed: int
    counted: int
    key: int

    @classmethod
    def from_request(cls, request: Request, price: PriceModel) -> Self:
        """Return the lengths of a prompt: by content blocks if entries of `price` end there."""
        if price.breakpoints and isinstance(request, LoggedRequest) and request.parts:
            return cls.of_text(request)
        return cls(request.prompt_tokens, request.prompt_tokens, request.key_tokens)

    @classmethod
    def of_text(cls, request: Request) -> Self:
        """Return the lengths of a prompt by its text."""
        billed, key = request.prompt_tokens, request.key_tokens
        if isinstance(request, LoggedRequest) and request.text_tokens is not None:
            return cls(billed, request.text_tokens, request.key_text_tokens or key)
        return cls(billed, billed, key)

    def scaled(self, tokens: int) -> int:
        """Return the tokens that the API counts up to the position `tokens`."""
        return min(tokens, self.counted) * self.billed // self.counted if self.counted else 0


def hit_charge(price: PriceModel, request: Request, hit: int) -> Charge:
    """Return the charge of a request of which a simulated cache hit `hit` tokens.

    Lengths are rounded to those that the API caches; tokens with keys that missed are written.
    """
    prompt, keyed = request.prompt_tokens, len(request.keys) * request.key_tokens
    read, stored = (price.cacheable(min(tokens, prompt)) for tokens in (hit, keyed))
    stored = max(read, stored)
    return _charge(price, request, read, stored if price.ttl_ns >= _HOUR_NS else read, stored)


def _charge(price: PriceModel, request: Request, read: int, long: int, stored: int) -> Charge:
    """Return the charge of a prompt whose tokens from `read` to `stored` are written.

    Those up to `long` are written for an hour. Where writing has no price, none are.
    """
    if price.write is None:
        long = stored = read
    uncached = request.prompt_tokens - stored
    return Charge(uncached, read, stored - long, long - read, request.output_tokens)


class PromptCache:
    """The cache of an API: no bounds, exact prefixes, a TTL that each use renews.

    Prompts come in order of arrival, and are cached from their arrival on. A prompt of a
    workload has a breakpoint at its end. A prompt of a log has its own breakpoints; one at its
    end if it has none and its API needs none.

    O(keys) a prompt; memory grows with the distinct keys.

    Args:
        price: the rule.
        lapses: whether TTLs lapse.
    """

    def __init__(self, price: PriceModel, *, lapses: bool = True) -> None:
        self._price = price
        self._lapses = lapses
        # By key, when (ns) it was last part of a prompt.
        self._used: dict[Key, int] = {}
        # By key, when (ns) an entry expires, and its TTL.
        self._entries: dict[Key, tuple[int, int]] = {}

    def charge(self, request: Request, now: int) -> Charge:
        """Return the charge of a request that arrives at `now` (ns), and store its prompt."""
        serve = self._entry if self._price.breakpoints else self._prefix
        return serve(request, PromptSize.from_request(request, self._price), now)

    def _prefix(self, request: Request, size: PromptSize, now: int) -> Charge:
        """Serve a prompt by a rule that finds any common prefix again."""
        price, used = self._price, self._used
        keys = full_keys(request, size)
        live = live_keys(keys, used, now - price.ttl_ns if self._lapses else -1)
        used.update(dict.fromkeys(keys, now))
        read, stored = (
            price.cacheable(size.scaled(count * size.key)) for count in (live, len(keys))
        )
        long = stored if price.ttl_ns >= _HOUR_NS else read
        return _charge(price, request, read, long, stored)

    def _entry(self, request: Request, size: PromptSize, now: int) -> Charge:
        """Serve a prompt by a rule that finds only prefixes that end at a breakpoint."""
        price, entries = self._price, self._entries
        ends, path, marks, lookback = self._path(request, size)
        read = reached = 0
        for mark, _ in marks:
            for index in range(mark, max(-1, mark - lookback), -1):
                if self._lives(path[index], now):
                    read, reached = max((read, reached), (ends[index], index + 1))
                    break
        for key in path[:reached]:
            if self._lives(key, now):
                _, ttl = entries[key]
                entries[key] = now + ttl, ttl
        stored = long = read
        for mark, ttl in marks:
            if (end := ends[mark]) > read:
                entries[path[mark]] = now + ttl, ttl
                stored = max(stored, end)
                long = max(long, end) if ttl >= _HOUR_NS else long
        return _charge(price, request, read, long, stored)

    def _lives(self, key: Key, now: int) -> bool:
        """Return True if there is an entry of `key` within its TTL."""
        entry = self._entries.get(key)
        return entry is not None and (entry[0] > now or not self._lapses)

    def _path(
        self, request: Request, size: PromptSize
    ) -> tuple[list[int], list[Key], list[tuple[int, int]], int]:
        """Return cacheable ends, keys of entries, breakpoints (place, TTL), and look-back."""
        price = self._price
        if not isinstance(request, LoggedRequest) or not request.parts:
            keys = list(full_keys(request, size))
            ends = [price.cacheable(size.scaled(n * size.key)) for n in range(1, len(keys) + 1)]
            return ends, keys, [(len(keys) - 1, price.ttl_ns)] if keys else [], len(keys)
        parts = request.parts
        path: list[Key] = [*chain_keys([request.salt or "", *(p.digest for p in parts)])]
        marks = [
            (index, part.ttl_ns or price.ttl_ns)
            for index, part in enumerate(parts)
            if part.ttl_ns is not None
        ]
        if not marks and not request.explicit:
            marks = [(len(parts) - 1, price.ttl_ns)]
        ends = [price.cacheable(size.scaled(part.end)) for part in parts]
        return ends, path[1:], marks[-price.breakpoints :], price.lookback


def full_keys(request: Request, size: PromptSize) -> Any:
    """Return the keys of a prompt that stand for whole blocks of it, and of no answer."""
    return request.keys[: size.counted // size.key]


def live_keys(keys: Any, used: Mapping[Key, int], since: int) -> int:
    """Return the number of first keys that were used after `since` (ns).

    A prompt uses all of its keys at once, so no key is used later than the one before it.
    """
    return bisect_left(keys, x=True, key=lambda key: key not in used or used[key] <= since)


def reported_charge(price: PriceModel, usage: Usage) -> Charge:
    """Return the charge that a log reports."""
    written, long = usage.written_tokens, usage.written_1h_tokens
    if price.write is None:
        written = long = 0
    uncached = usage.prompt_tokens - usage.read_tokens - written - long
    return Charge(uncached, usage.read_tokens, written, long, usage.output_tokens)


def bill(
    requests: Iterable[Request], price: PriceModel | str, *, log: RunLog | None = None
) -> Bills:
    """Return the bills of an API for `requests`, in order of arrival.

    With the `log` of a run of these requests, arrival times and output tokens are those of the
    run, and its hits are billed too; requests that it rejected are left out of all bills.
    O(keys); with a `log`, the requests are held in memory.

    Args:
        requests: a workload, or its requests.
        price: the prices, or their text.
        log: the log of a run, such as `result.log`.

    Raises:
        InputError: an unknown price, or a request that cannot be read.
    """
    price = find_price(price) if isinstance(price, str) else price
    cache = PromptCache(price)
    rows: dict[int | str, int] = {}
    arrived = requests
    if log is not None:
        rows = {id_: row for row, id_ in enumerate(log.ids) if row not in log.reasons}
        served = (request for request in requests if request.id in rows)
        came, hits = list(log.arrival), list(map(add, log.hit, log.loaded))
        outputs = list(log.output)
        arrived = sorted(served, key=lambda request: came[rows[request.id]])
    uncached, api, reported, run = (list[Charge]() for _ in range(4))
    for request in arrived:
        now = request.arrival
        if log is not None:
            row = rows[request.id]
            now = came[row]
            if request.output_tokens != outputs[row]:
                request = attrs.evolve(request, output_tokens=outputs[row])  # noqa: PLW2901
            run.append(hit_charge(price, request, hits[row]))
        uncached.append(Charge(request.prompt_tokens, 0, 0, 0, request.output_tokens))
        api.append(cache.charge(request, now))
        if isinstance(request, LoggedRequest) and request.usage is not None:
            reported.append(reported_charge(price, request.usage))
    all_reported = len(reported) == len(uncached) > 0
    return Bills(
        price=price,
        uncached=Bill.from_charges(price, uncached),
        api=Bill.from_charges(price, api),
        reported=Bill.from_charges(price, reported) if all_reported else None,
        run=None if log is None else Bill.from_charges(price, run),
    )
