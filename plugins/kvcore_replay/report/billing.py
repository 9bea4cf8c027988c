"""Bills as tables: known prices, runs, comparisons, and prompts that were not read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from kvcore.sections import Section, Table
from kvcore.units import NS_PER_S, format_dollars, format_seconds
from kvcore_cli.report.tables import TableRow, cell, counted, share
from kvcore_replay.misses.prompts import (
    REASONS,
    PromptExplanation,
    PromptReads,
    UnreadTokens,
    slack,
)
from kvcore_replay.pricing import PriceModel

PRICE_HEADERS = ["price", "input", "cached", "write", "write, 1 h", "output", "caches", "read"]

BILLS = {
    "uncached": "without a cache",
    "api": "by the API's rule",
    "reported": "as the log reports",
    "run": "with this cache",
}
"""The bills of a workload, and their names in tables."""

OF_TRACE = "A trace has neither the usage that a log reports nor a log's breakpoints."
"""What the bills of a trace leave out."""

KINDS = ("uncached", "read", "written", "written_1h", "output")


def price_rows(prices: Iterable[PriceModel]) -> list[TableRow]:
    """Return a row for each of `prices`, under `PRICE_HEADERS`: USD per million tokens."""
    rows = []
    for price in prices:
        rates = price.input, price.cached, price.write, price.write_1h, price.output
        cells = (cell(rate, "{:g}".format) for rate in rates)
        rows.append([price.name, *cells, price.rule(), f"{price.source}, {price.read}"])
    return rows


def setup_of(price: PriceModel) -> str:
    """Return a sentence with the prices, the rule, and the source of both."""
    names = ("input", "read", "written", "written for an hour", "output")
    rates = (
        f"{name} {rate:g}"
        for name, rate in zip(names, price.rates, strict=True)
        if price.write is not None or not name.startswith("written")
    )
    source = f" ({price.source}, read {price.read})" if price.source else ""
    note = f" {price.note[0].upper()}{price.note[1:]}." if price.note else ""
    return (
        f"Prices: {price.name or 'given'}{source}, USD per million tokens: {', '.join(rates)}. "
        f"Cached: {price.rule()}.{note}"
    )


def bill_sections(
    bills: Mapping[str, Any], again: Mapping[str, Any] | None = None
) -> list[Section]:
    """Return a table of the bills from `Bills.as_dict()`, and a sentence about the prices.

    Kinds of tokens that no bill has are left out. `again` is the bill of another run.
    """
    called = {name: bills[key] for key, name in BILLS.items()} | {"what if": again}
    named_bills = {name: bill for name, bill in called.items() if bill is not None}
    kinds = [
        kind for kind in KINDS if any(bill[f"{kind}_tokens"] for bill in named_bills.values())
    ]
    headers = ["bill", *(kind.replace("_1h", ", 1 h") for kind in kinds), "USD"]
    rows = [
        [name, *(f"{bill[f'{kind}_tokens']:,}" for kind in kinds), format_dollars(bill["usd"])]
        for name, bill in named_bills.items()
    ]
    return [Table(headers, rows), setup_of(PriceModel(**bills["price"]))]


@attrs.frozen
class PromptReport:
    """Text about why an API did not read prompts from its cache.

    Attributes:
        explanation: the explanation.
    """

    explanation: PromptExplanation

    @property
    def sections(self) -> list[Section]:
        """The whole report on all prompts."""
        return [
            self.headline,
            self.table,
            self.agreement,
            *bill_sections(self.explanation.bills.as_dict()),
        ]

    @property
    def headline(self) -> str:
        """A sentence: the tokens that were read."""
        prompts = self.explanation.prompts
        tokens, read = (sum(getattr(p, name) for p in prompts) for name in ("tokens", "read"))
        ratio = share(read / tokens if tokens else None)
        rule = "as the log reports" if self._reported else "by the API's rule"
        if 0 < self._reported < len(prompts):
            rule += ", or by the API's rule where it does not"
        return (
            f"{self.explanation.source}: {counted(len(prompts), 'request')}. Of "
            f"{counted(tokens, 'prompt token')}, {read:,} were read from the cache {rule} "
            f"({ratio})."
        )

    @property
    def table(self) -> Table:
        """The tokens by reason; reasons without tokens are left out."""
        headers = ["not read", "tokens", "of unread", "USD", "stopped", "because"]
        sums = self.explanation.sums()
        unread = sum(row["tokens"] for row in sums.values())
        rows = [
            [
                reason,
                f"{row['tokens']:,}",
                share(row["tokens"] / unread),
                format_dollars(row["usd"]),
                f"{row['stopped']:,}",
                REASONS[reason],
            ]
            for reason, row in sums.items()
            if row["tokens"]
        ]
        return Table(headers, rows, headers[1:5])

    @property
    def agreement(self) -> str:
        """A sentence that compares the reports of a log with the API's rule, if any."""
        if not self._reported:
            return ""
        reports = [p for p in self.explanation.prompts if p.reported is not None]
        less = sum(any(u.reason == "evicted" for u in report.unread) for report in reports)
        price = self.explanation.bills.price
        more = sum(p.read - p.expected > slack(price, p.expected) for p in reports)
        expected = sum(report.expected for report in reports)
        return (
            f"The rule reads {expected:,} tokens, the log {sum(p.read for p in reports):,}. "
            f"{counted(less, 'request')} read less than the rule says, {more:,} more, "
            f"{len(reports) - less - more:,} about as much."
        )

    @property
    def _reported(self) -> int:
        return sum(prompt.reported is not None for prompt in self.explanation.prompts)

    def about(self, prompt: PromptReads) -> str:
        """Return the sentences about one prompt."""
        return "\n".join(self._lines(prompt))

    def _lines(self, prompt: PromptReads) -> Iterator[str]:
        came = format_seconds(prompt.arrived_ns / NS_PER_S)
        yield f"Request {prompt.request} of {self.explanation.source}, which arrived at {came}:"
        reported = "" if prompt.reported is None else f", and the log {prompt.reported:,}"
        yield (
            f"Of {counted(prompt.tokens, 'token')}, the API's rule reads "
            f"{prompt.expected:,} from the cache{reported}."
        )
        for part in prompt.unread:
            tokens = counted(part.tokens, "token")
            end = part.first + part.tokens
            yield f"- from token {part.first:,} to {end:,} ({tokens}): {_why(part)}"


def _why(part: UnreadTokens) -> str:
    """Return the reason of unread tokens, with its request and its place."""
    text = f"{part.reason}, {REASONS[part.reason]}."
    if part.other is not None and part.gap_ns is not None:
        before = format_seconds(part.gap_ns / NS_PER_S)
        which = "Edited from" if part.place else "Last sent by"
        text += f" {which} request {part.other}, {before} before"
        text += f": {part.place}." if part.place else "."
    return text
