"""Report on a comparison: a table with a headline and sentences, CSV, and a chart."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, TextIO, TypeAlias

import attrs

from kvcore.cache.residency import TIER
from kvcore.models.cost import PrefillCost
from kvcore.models.memory import KVLayout
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import format_dollars, format_seconds
from kvcore_cli.report.simulation import thrashing
from kvcore_cli.report.tables import cell, counted, no_full_block, share
from kvcore_lab.comparison import SHARING, Comparison, Infinite, Row
from kvcore_lab.report.policies import (
    block_bytes,
    enumerated,
    left_out,
    looked_up,
    named,
    option_texts,
    replay_setup,
)
from kvcore_replay.belady import Belady
from kvcore_replay.report.charts import TIERS, as_percent

CSV_COLUMNS = (
    *("workload", "count", "eviction", "options", "blocks", "block_size", "requests"),
    *("lookup_blocks", "hit_blocks", "hit_ratio_block", "hit_ratio_token"),
    *("hit_ratio_request", "saved_s", "evicted_blocks", "share_of_optimum", "reused_blocks"),
    *("reuse_ratio_block", "reuse_ratio_token", "reuse_ratio_request", "wall_s"),
)

_Shares: TypeAlias = tuple[float | None, float | None]
"""Hits as a share of lookups, and of the most possible hits; None: not known, or not told."""

AGES = {
    "age_at_hit_s": "age at hit",
    "age_at_eviction_s": "age at eviction",
    "lifetime_s": "lifetime",
}

FEW = 2
"""Policies that are named where all have the same figure."""

WEIGHS_COST = "cost"
"""The policy that ranks blocks by the cost of computing them again."""


@attrs.frozen
class ComparisonReport:
    """A comparison as a table with a headline and sentences.

    Attributes:
        comparison: the comparison.
        memory: names of the pool sizes, by blocks, if the sizes were given in bytes.
        prefix: name of the prefix cache of the pools.
        recompute: the cost of computing a block again; None: it is not reported.
        tiers: the tiers below the pool, from `describe`.
        layout: the bytes of a block; None: they are not reported.
        residency: whether residency is reported, if it was measured.
        savings: whether the prefill that hits save, and the time of a request, are reported.
        grouped: whether pools have cache groups.
        apart: whether the share of the optimum has columns of its own, as papers want it.
    """

    comparison: Comparison
    memory: Mapping[int, str] | None = None
    prefix: str = SHARING
    recompute: PrefillCost | None = None
    tiers: Sequence[Mapping[str, Any]] = ()
    layout: KVLayout | None = None
    residency: bool = True
    savings: bool = False
    grouped: bool = False
    apart: bool = False

    @property
    def sections(self) -> list[Section]:
        """The whole report on the comparison: hits, and if measured, residency and bills."""
        if self.empty:
            return [self.headline]
        about = [self.reading, *([] if self.layout is None else [block_bytes(self.layout)])]
        sections: list[Section] = [self.headline, self.table, "\n".join(about), self.chart()]
        if self.savings:
            sections += [self.saved, self.pace]
        if self.residency:
            sections += residency_sections(self.comparison)
        return [*sections, *self._bill(), self.setup]

    @property
    def _unit(self) -> str:
        """The unit of hits: tokens of cache groups, whose blocks are many of them.

        Their rows have a bound, which else there is in `keys` accounting alone.
        """
        rows, by_tokens = self.comparison.rows, self.comparison.accounting == "tokens"
        bounded = by_tokens and any(row.eviction == Belady.name for row in rows)
        return "token" if bounded or any(row.checkpoint for row in rows) else "block"

    @property
    def _what(self) -> str:
        """The kind of the policies that the rows are named by."""
        several = any(row.checkpoint for row in self.comparison.rows)
        return "checkpoint" if several else "eviction"

    @property
    def _named(self) -> list[tuple[str, Row]]:
        """The rows and their names: of the policies that are compared."""
        rows = named(self.comparison.rows)
        if self._unit == "block":
            return rows
        evictions = {name for name, row in rows if row.checkpoint}
        return [
            (
                "bound"
                if row.eviction == Belady.name
                else name
                if row.checkpoint is None
                else row.checkpoint
                if len(evictions) == 1
                else f"{row.checkpoint}, {name}",
                row,
            )
            for name, row in rows
        ]

    @property
    def headline(self) -> str:
        """Sentences about the workload and the numbers of the table."""
        source, infinite = self.comparison.workload, self.comparison.infinite
        by = "blocks in the pool" if self.memory is None else "the pool's K/V memory"
        if not infinite.lookup_blocks:
            requests = counted(source.requests, "request")
            return f"{source.name}: {requests}.\n{self._nothing()}"
        size, accounting = self.comparison.rows[0].block_size, self.comparison.accounting
        where = "beside it" if self.apart else "in brackets"
        brackets = f"; {where}, the share of the optimum's hits" if self._ranked else ""
        return (
            f"{looked_up(source, infinite.lookup_blocks, size, accounting)}\n"
            f"The share of {'these' if self._unit == 'block' else 'their tokens'} that hit, by "
            f"{by}{brackets}."
        )

    @property
    def setup(self) -> str:
        """A sentence with the options of the comparison, without those of the rows."""
        comparison = self.comparison
        return replay_setup(
            comparison.workload,
            comparison.rows[0].block_size,
            comparison.accounting,
            plugins={"prefix": {"name": self.prefix, "options": {}}},
            tiers=self.tiers,
        )

    @property
    def empty(self) -> bool:
        """True if nothing was looked up, so that there is nothing but the headline."""
        return not self.comparison.infinite.lookup_blocks

    @property
    def table(self) -> Table:
        """Hits by pool size: a row per policy, and one of the infinite cache."""
        sizes = dict.fromkeys(row.blocks for row in self.comparison.rows)
        table: dict[str, list[_Shares]] = {}
        tiered = any(row.reuse_ratio is not None for row in self.comparison.rows)
        for name, row in self._named:
            table.setdefault(name, []).append(_hits(row, self._unit))
            if tiered:
                table.setdefault(f"{name} + tiers", []).append(self._reuse(row))
        table["infinite"] = [_hits(self.comparison.infinite, self._unit)] * len(sizes)
        headers = [f"{self._size(size):>5}" for size in sizes]
        if self.apart and self._ranked:
            headers = [text for size in headers for text in (size, f"{size}, of optimum")]
            rows = [
                [name, *(text for shares in cells for text in _apart(*shares))]
                for name, cells in table.items()
            ]
        else:
            rows = [[name, *starmap(_beside, cells)] for name, cells in table.items()]
        return Table([self._what, *headers], rows, None if self.apart else (), split=True)

    @property
    def saved(self) -> Table:
        """Prefill that hits save and the time of a request: a row per policy and pool."""
        prefill, rows = self.comparison.infinite.prefill_s, []
        for name, row in self._named:
            part = row.saved_s / prefill if prefill else None
            pace = f"{row.wall_s * 1e6 / row.requests:.1f}"
            texts = format_seconds(row.saved_s), share(part), pace
            rows.append([name, self._size(row.blocks), *texts])
        unit = "blocks" if self.memory is None else "memory"
        return Table((self._what, unit, "prefill saved", "of all", "\u00b5s a request"), rows)

    @property
    def pace(self) -> str:
        """A sentence about the columns of `saved`."""
        return (
            "Prefill saved: what computing the hits would take alone. \u00b5s a request: the "
            "replay by this machine, the policy and the reading of the workload included."
        )

    @property
    def reading(self) -> str:
        """Sentences about the results in the table."""
        infinite = self.comparison.infinite
        if not infinite.hit_blocks:
            if self.prefix != SHARING:
                return f"With prefix cache {self.prefix!r} nothing can hit."
            return "No request shares a block with an earlier one: nothing can hit."
        blocks = counted(infinite.distinct_blocks, "block")
        lines = (
            f"infinite: a cache that never evicts ({blocks} in the end)."
            # What windows and states keep depends on what hits.
            + ("" if self.grouped and self._unit == "block" else " No pool hits more.")
            + left_out(infinite.answers_left_out),
            self._bound(),
            self._tiers(),
            self._most_hits(),
            self._savings(),
            self._saturation(),
            self._options(),
        )
        return "\n".join(line for line in lines if line)

    def chart(self) -> Chart:
        """Return a chart of the share of blocks that hit, by the size of the pool."""
        comparison, memory = self.comparison, self.memory
        lines: dict[str, list[tuple[float, float]]] = {}
        for name, row in self._named:
            for suffix, ratios in (("", row.hit_ratio), (TIERS, row.reuse_ratio)):
                if ratios is not None and ratios[self._unit] is not None:
                    points = lines.setdefault(f"{name}{suffix}", [])
                    points.append((row.blocks, ratios[self._unit] or 0.0))
        never = comparison.infinite.hit_ratio[self._unit]
        bound = None if never is None else ("never evicts", never)
        tokens = counted(comparison.rows[0].block_size, "token")
        return Chart(
            f"{comparison.workload.name}, {counted(comparison.workload.requests, 'request')}, "
            f"{comparison.accounting} counting",
            self.setup,
            f"pool, blocks of {tokens}" if memory is None else "K/V memory of the pool",
            [Panel(f"{self._unit}s looked up that hit", lines, as_percent, bound)],
            lambda blocks: self._size(int(blocks)),
        )

    def _bill(self) -> list[Section]:
        """Return a table of dollars by policy and pool size, and sentences about the prices."""
        bills = self.comparison.bills
        if bills is None:
            return []
        from kvcore_replay.report.billing import BILLS, setup_of  # noqa: PLC0415 - for prices

        sizes = dict.fromkeys(row.blocks for row in self.comparison.rows)
        table: dict[str, list[str]] = {}
        for name, row in named(self.comparison.rows):
            assert row.bill is not None
            table.setdefault(name, []).append(format_dollars(row.bill.usd))
        # These do not depend on the pool.
        for key, name in BILLS.items():
            bill = getattr(bills, key)
            if bill is not None:
                table[name] = [format_dollars(bill.usd)] * len(sizes)
        headers = ["bill in USD", *(f"{self._size(size):>5}" for size in sizes)]
        about = (
            "What the API would charge if its cache were this pool, with its prices, least "
            f"length and steps.\n{setup_of(bills.price)}"
        )
        return [Table(headers, [[name, *cells] for name, cells in table.items()]), about]

    @property
    def _ranked(self) -> bool:
        return any(row.share_of_optimum is not None for row in self.comparison.rows)

    def _reuse(self, row: Row) -> _Shares:
        """Return the hits of pool and tiers as a share of lookups, and of the most possible."""
        rows, reused = self.comparison.rows, row.reused_blocks
        optima = {row.blocks: row.reused_blocks for row in rows if _is_optimum(row)}
        bound = None if _is_optimum(row) else optima.get(row.blocks)
        ratio = None if row.reuse_ratio is None else row.reuse_ratio[self._unit]
        return ratio, reused / bound if bound and reused is not None else None

    def _bound(self) -> str:
        """Return the sentence about the bounds of checkpoint policies."""
        if self._unit == "block":
            return ""
        return (
            "With a state at each block it is the optimum, where memory is enough. bound: the "
            "whole pool for full attention, with foreknowledge, and none of it for windows and "
            "states. No policy hits more; one that hits as much is optimal."
        )

    def _nothing(self) -> str:
        comparison = self.comparison
        longest, size = comparison.workload.longest_prompt, comparison.rows[0].block_size
        if short := no_full_block(longest, size):
            return short
        if comparison.accounting != "keys":
            why = "The requests have no keys, or none that fills a block"
            return f"{why}: there is nothing to look up."
        return (
            "The requests have no keys: there is nothing to look up. Lengths do not tell what "
            "prompts share; texts, token ids and hashes of blocks do."
        )

    def _size(self, blocks: int) -> str:
        return f"{blocks:,}" if self.memory is None else self.memory[blocks]

    def _sizes(self, sizes: list[str]) -> str:
        unit = "" if self.memory else " block" if sizes == ["1"] else " blocks"
        return f"{enumerated(sizes)}{unit}"

    def _policies(self) -> list[tuple[str, Row]]:
        return [(name, row) for name, row in self._named if row.eviction != Belady.name]

    def _tiers(self) -> str:
        """Return the sentence about the rows with tiers."""
        found = next((row.tiers for row in self.comparison.rows if row.tiers), None)
        if not found:
            return ""
        sizes = (f"{counted(tier['slots'], 'block')} in {tier['tier']}" for tier in found)
        below = enumerated(list(sizes))
        bound = ", of which optimum + tiers is the most" if self._ranked else ""
        return f"+ tiers: what the pool or a tier below it had ({below}){bound}."

    def _most_hits(self) -> str:
        """Return the sentence about the policies whose figure is the highest at each size."""
        policies = self._policies()
        won: dict[str, list[str]] = {}
        for size in dict.fromkeys(row.blocks for _, row in policies):
            ratios = {
                name: row.hit_ratio[self._unit] or 0.0
                for name, row in policies
                if row.blocks == size
            }
            most = share(max(ratios.values()))
            names = [name for name, ratio in ratios.items() if share(ratio) == most]
            if len(ratios) > 1:
                names = ["all"] if len(names) == len(ratios) > FEW else names
                won.setdefault(enumerated(names), []).append(self._size(size))
        winners = [f"{name} with {self._sizes(sizes)}" for name, sizes in won.items()]
        return f"Most hits: {'; '.join(winners)}." if winners else ""

    def _savings(self) -> str:
        """Return the sentence about the prefill that the best policy saves."""
        prefill = self.comparison.infinite.prefill_s
        known = [(row.saved_s, name, row) for name, row in self._policies() if row.saved_s]
        if not known:
            return ""
        saved, name, row = max(known, key=lambda entry: entry[0])
        device = f" on one {self.recompute.device}" if self.recompute else ""
        return (
            f"Prefix caching saves up to {format_seconds(saved)} of prefill{device}, of "
            f"{format_seconds(prefill)} in all: {name} with "
            f"{self._sizes([self._size(row.blocks)])}."
        )

    def _saturation(self) -> str:
        """Return the sentence about the size from which the optimum hits all that can hit."""
        enough = [
            row.blocks
            for row in self.comparison.rows
            if _is_optimum(row) and row.hit_blocks == self.comparison.infinite.hit_blocks
        ]
        if not enough:
            return ""
        return (
            f"With {self._sizes([self._size(min(enough))])} the optimum hits all that can hit: "
            "from there on, policies lack foresight, not memory."
        )

    def _options(self) -> str:
        """Return the options that the policies' names do not show."""
        texts: dict[str, str] = {}
        for name, row in self._policies():
            rest = (text for text in option_texts(row.options) if text not in name)
            texts[row.eviction] = ", ".join(rest)
        parts = [f"{name} {text}" for name, text in texts.items() if text]
        if WEIGHS_COST in texts and self.recompute is not None:
            deployment = f"{self.recompute.model} on {self.recompute.device}"
            parts.append(f"{WEIGHS_COST}: recompute cost of {deployment}")
        return f"Options: {'; '.join(parts)}." if parts else ""


def write_csv(comparison: Comparison, file: TextIO) -> None:
    """Write the rows of a comparison as CSV with a header, ratios in full precision.

    The options are one column, as JSON. An empty cell is a missing value. Checkpoint policies
    have a column of their own, the last, if there are any.
    """
    several = any(row.checkpoint for row in comparison.rows)
    columns = [*CSV_COLUMNS, *(["checkpoint"] if several else [])]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    for row in comparison.rows:
        fields: dict[str, Any] = {name: getattr(row, name, None) for name in columns}
        fields |= {"workload": comparison.workload.name, "count": comparison.accounting}
        fields |= {f"hit_ratio_{kind}": ratio for kind, ratio in row.hit_ratio.items()}
        reused = row.reuse_ratio or {}
        fields |= {f"reuse_ratio_{kind}": ratio for kind, ratio in reused.items()}
        writer.writerow(fields | {"options": json.dumps(row.options)})


def _is_optimum(row: Row) -> bool:
    return row.eviction == Belady.name and not row.options["bypass"]


def _beside(ratio: float | None, part: float | None) -> str:
    """Format a hit ratio, and in brackets the share of the most possible hits."""
    text = f"{share(ratio):>5}"
    return text if part is None else f"{text} {f'({part:.0%})':>5}"


def _apart(ratio: float | None, part: float | None) -> tuple[str, str]:
    """Format both for columns of their own."""
    return share(ratio), "" if part is None else f"{part:.0%}"


def _hits(result: Row | Infinite, unit: str) -> _Shares:
    """Return the hits as a share of lookups, and of the most possible; None: not told."""
    part = None
    if isinstance(result, Row) and not _is_optimum(result):
        part = result.share_of_optimum
    return result.hit_ratio[unit], part


def residency_sections(comparison: Comparison) -> list[Section]:
    """Return how long blocks rest, and warnings of thrashing; empty if it was not measured.

    The table has a row per policy, pool and tier below it, with medians of times.
    """
    rows = []
    columns = (
        "Ages are medians, by block, in the workload's own time: from arrival to arrival, "
        "since no clock runs here. Never hit: of what was evicted. Stored again: of what "
        "was stored, after at most a pool of other evictions."
    )
    lines = [columns]
    for name, row in named(comparison.rows):
        for tier, rested in (row.residency or {}).items():
            gone, stored = sum(rested["evicted_blocks"].values()), rested["stored_blocks"]
            times = [cell(age and age["p50"], format_seconds) for age in map(rested.get, AGES)]
            never = share(rested["never_hit_blocks"] / gone if gone else None)
            again = share(rested["restored_blocks"] / stored if stored else None)
            of = name if tier == TIER else f"{name} ({tier})"
            rows.append([of, f"{row.blocks:,}", *times, never, again])
        warning = thrashing(row.residency, row.blocks, row.tiers or ())
        if warning:
            lines.append(f"{name}, {row.blocks:,} blocks: {warning}")
    headers = ("eviction", "blocks", *AGES.values(), "never hit", "stored again")
    return [Table(headers, rows), "\n".join(lines)] if rows else []
