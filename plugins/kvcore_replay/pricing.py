"""Prices of chat APIs that cache prompts: rates, and the rule by which each caches.

Prices are USD per million tokens, as the providers' pages had them on the day in `read`; they
change, so look before you rely on them. Rules leave out what no page states exactly: how a
provider routes requests to machines, and that it may evict earlier than the TTL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvcore.errors import InputError
from kvcore.plugins.options import nearest
from kvcore.units import NS_PER_S, format_seconds, parse_whole

HOUR = 3600.0
"""Seconds from which on a TTL is the long one, which is written at another price."""


@attrs.frozen(kw_only=True)
class PriceModel:
    """The prices of an API for tokens, and its rules for caching them.

    The first tokens of a prompt are read from the cache as far as an earlier prompt had the
    same ones, less than `ttl` seconds ago. Each use renews the time.

    Attributes:
        name, provider: the model and its provider; empty for prices of one's own.
        input, output: USD per million tokens of prompts that were not cached, and generated.
        cached: USD per million tokens that were read from the cache; None: `input`.
        write: USD per million tokens that were written to it; None: writing costs nothing
            beside `input`.
        write_1h: the same with a TTL of an hour or more; None: `write`.
        ttl: seconds an entry lives after its last use.
        min_tokens: tokens of the shortest prefix that is cached.
        step: tokens by which a cached prefix grows beyond that.
        breakpoints: how many breakpoints a prompt may have. An entry ends at a breakpoint,
            and only entries are found again. 0: there are none; any common prefix is found.
        lookback: content blocks that are searched for an entry, from a breakpoint back.
        source, read: where and when the figures were read.
        note: conditions that the figures leave out.

    Raises:
        InputError: a figure that is negative or not finite, or `write_1h` without `write`.
    """

    name: str = ""
    provider: str = ""
    input: float
    output: float = 0.0
    cached: float | None = None
    write: float | None = None
    write_1h: float | None = None
    ttl: float = 300.0
    min_tokens: int = 0
    step: int = 1
    breakpoints: int = 0
    lookback: int = 20
    source: str = ""
    read: str = ""
    note: str = ""

    def __attrs_post_init__(self) -> None:
        """Check the figures."""
        least = {"ttl": 1e-9, "step": 1, "lookback": 1}
        for key in KEYS:
            value = getattr(self, key)
            if value is not None and not least.get(key, 0) <= value < math.inf:
                msg = f"price: {key}={value}: give a finite number from {least.get(key, 0)} on"
                raise InputError(msg)
        if self.write is None and self.write_1h is not None:
            msg = f"price: write_1h={self.write_1h} without write: give both; they may be equal"
            raise InputError(msg)

    def __str__(self) -> str:
        """Return the text that `find_price` reads: a name, or all figures."""
        known = PRICES.get(self.name)
        figures = [
            f"{key}={getattr(self, key):.15g}"
            for key in KEYS
            if getattr(self, key) not in (None, getattr(known, key, None))
        ]
        return ",".join([self.name, *figures] if known else figures)

    @property
    def ttl_ns(self) -> int:
        """`ttl` in nanoseconds."""
        return round(self.ttl * NS_PER_S)

    @property
    def rates(self) -> tuple[float, float, float, float, float]:
        """USD per million tokens uncached, read, written, written for an hour, and output."""
        write = self.input if self.write is None else self.write
        long = write if self.write_1h is None else self.write_1h
        cached = self.input if self.cached is None else self.cached
        return self.input, cached, write, long, self.output

    def cacheable(self, tokens: int) -> int:
        """Return how many of the first `tokens` of a prompt can be cached: whole steps."""
        if tokens < max(self.min_tokens, 1):
            return 0
        return tokens - (tokens - self.min_tokens) % self.step

    def rule(self) -> str:
        """Return the rule in words."""
        shortest = f"prefixes from {self.min_tokens:,} tokens on" if self.min_tokens else "all"
        steps = f", in steps of {self.step}" if self.step > 1 else ""
        ends = f", up to {self.breakpoints} breakpoints" if self.breakpoints else ""
        return f"{shortest}{steps}{ends}, for {format_seconds(self.ttl)} after their last use"


KEYS: Mapping[str, Callable[[str], float]] = {
    **dict.fromkeys(("input", "output", "cached", "write", "write_1h", "ttl"), float),
    **dict.fromkeys(("min_tokens", "step", "breakpoints", "lookback"), parse_whole),
}
"""The figures that text can give, and the function that reads each."""


def find_price(text: str) -> PriceModel:
    """Return the prices that `text` names: a model or provider, figures, or both.

    `anthropic`, `claude-haiku-4.5,ttl=3600`, or
    `input=3.00,cached=0.30,write=3.75,write_1h=6.00,ttl=300`: figures replace those of the
    name before them.

    Raises:
        InputError: an unknown name or figure, or none where it is needed.
    """
    first, *rest = (piece.strip() for piece in text.split(","))
    known: dict[str, Any] = {}
    if "=" in first:
        rest = [first, *rest]
    else:
        price = PRICES.get(PROVIDERS.get(first, first))
        if price is None:
            names = [*PROVIDERS, *PRICES]
            msg = (
                f"price {first!r} is not known{nearest(first, names)}. There are: "
                f"{', '.join(names)}; or give figures: input=3.00,cached=0.30,write=3.75"
            )
            raise InputError(msg)
        known = attrs.asdict(price)
    figures: dict[str, Any] = {}
    for piece in rest:
        key, equals, value = (part.strip() for part in piece.partition("="))
        if key not in KEYS or not equals or key in figures:
            why = "is given twice" if key in figures else f"is no figure{nearest(key, KEYS)}"
            msg = f"price: {piece!r} {why}. There are: {', '.join(KEYS)}, each as KEY=NUMBER"
            raise InputError(msg)
        try:
            figures[key] = KEYS[key](value)
        except (ValueError, InputError) as error:
            why = str(error) if isinstance(error, InputError) else "give a number, such as 3.00"
            msg = f"price: {piece!r}: {why}"
            raise InputError(msg) from None
    if not known and "input" not in figures:
        msg = f"price {text!r} lacks input=, the USD per million tokens of prompts"
        raise InputError(msg)
    return PriceModel(**known | figures)


def _models(*rows: Mapping[str, Any], **rule: Any) -> list[PriceModel]:
    return [PriceModel(**{**rule, **row}) for row in rows]


def _claude(name: str, dollars: float, output: float, min_tokens: int) -> dict[str, Any]:
    """Return a row: cache writes are 1.25 and 2 times the input price, reads a tenth."""
    writes = {"write": round(1.25 * dollars, 4), "write_1h": 2 * dollars}
    row = {"name": name, "input": dollars, "output": output, "min_tokens": min_tokens}
    return {**row, **writes, "cached": round(dollars / 10, 4)}


def _row(name: str, dollars: float, cached: float, output: float) -> dict[str, Any]:
    return {"name": name, "input": dollars, "cached": cached, "output": output}


_TABLE = [
    # Multipliers, breakpoints, look-back and least lengths: the provider's guide on prompt
    # caching, platform.claude.com/docs/en/build-with-claude/prompt-caching.
    *_models(
        _claude("claude-sonnet-4.5", 3.0, 15.0, 1024),
        _claude("claude-opus-4.5", 5.0, 25.0, 4096),
        _claude("claude-haiku-4.5", 1.0, 5.0, 4096),
        _claude("claude-haiku-3.5", 0.8, 4.0, 2048),
        provider="anthropic",
        breakpoints=4,
        source="platform.claude.com/docs/en/about-claude/pricing",
        read="2026-11-22",
    ),
    # Least length and idle time: developers.openai.com/api/docs/guides/prompt-caching; steps
    # of 128: the provider's cookbook, "Prompt caching 201".
    *_models(
        _row("gpt-5.4", 2.5, 0.25, 15.0),
        _row("gpt-4.1", 2.0, 0.5, 8.0),
        _row("gpt-4o", 2.5, 1.25, 10.0),
        provider="openai",
        min_tokens=1024,
        step=128,
        source="developers.openai.com/api/docs/pricing",
        read="2026-11-05",
        note="idle for 5 to 10 minutes, at most an hour; extended retention: ttl=86400",
    ),
    # Least length: ai.google.dev/gemini-api/docs/caching.
    *_models(
        _row("gemini-3.1-pro", 2.0, 0.2, 12.0),
        provider="gemini",
        min_tokens=4096,
        source="ai.google.dev/gemini-api/docs/pricing",
        read="2026-10-07",
        note="implicit caching, prompts up to 200,000 tokens; no TTL is published",
    ),
    # Units of 64 tokens and lives of hours to days: api-docs.deepseek.com/news/news0802.
    *_models(
        _row("deepseek-flash", 0.15, 0.003, 0.6),
        _row("deepseek-v4-pro", 0.66, 0.022, 1.98),
        provider="deepseek",
        min_tokens=64,
        step=64,
        ttl=24 * HOUR,
        source="api-docs.deepseek.com/quick_start/pricing",
        read="2026-10-27",
        note="off-peak prices; entries live for hours to days",
    ),
    *_models(
        _row("grok-4.7", 2.0, 0.5, 6.0),
        provider="xai",
        source="docs.x.ai/developers/advanced-api-usage/prompt-caching",
        read="2026-09-29",
        note="prompts below 200,000 tokens; neither TTL nor least length is published",
    ),
]

PRICES: Mapping[str, PriceModel] = {price.name: price for price in _TABLE}
"""The known prices by the name of the model."""

PROVIDERS: Mapping[str, str] = {price.provider: price.name for price in reversed(_TABLE)}
"""The first model of each provider, which its name alone means."""
