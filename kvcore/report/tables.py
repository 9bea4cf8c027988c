"""A comparison as a table for people, as a few sentences, and as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import attrs

from kvcore.lab import Comparison, Infinite, Optimum, Row

CSV_COLUMNS = (
    "workload",
    "count",
    "eviction",
    "options",
    "blocks",
    "block_size",
    "requests",
    "lookup_blocks",
    "hit_blocks",
    "hit_ratio_block",
    "hit_ratio_token",
    "hit_ratio_request",
    "evicted_blocks",
    "share_of_optimum",
    "wall_s",
)


@attrs.frozen
class ComparisonReport:
    """A comparison for people.

    Attributes:
        comparison: what is reported.
        memory: for pools given in bytes, what to call each size in blocks.
    """

    comparison: Comparison
    memory: Mapping[int, str] | None = None

    @property
    def headline(self) -> str:
        """What the numbers of the table are."""
        source, infinite = self.comparison.workload, self.comparison.infinite
        by = "blocks in the pool" if self.memory is None else "the pool's K/V memory"
        ranked = any(row.share_of_optimum is not None for row in self.comparison.rows)
        return (
            f"{source.name}: {source.requests:,} requests look up {infinite.lookup_blocks:,} "
            f"blocks of {self.comparison.rows[0].block_size:,} tokens "
            f"({self.comparison.count} counting).\n"
            f"The share of these that hit, by {by}"
            f"{'; in brackets, hits per hit of the optimum' if ranked else ''}."
        )

    @property
    def headers(self) -> list[str]:
        """The headers of the table: one a pool size."""
        sizes = dict.fromkeys(row.blocks for row in self.comparison.rows)
        return ["eviction", *(f"{self._size(size):>5}" for size in sizes)]

    @property
    def rows(self) -> list[list[str]]:
        """The rows of the table: one a policy, and one of the infinite cache."""
        table: dict[str, list[str]] = {}
        for name, row in _named(self.comparison.rows):
            table.setdefault(name, []).append(_cell(row))
        infinite = _cell(self.comparison.infinite)
        table["infinite"] = [infinite] * (len(self.headers) - 1)
        return [[name, *cells] for name, cells in table.items()]

    @property
    def reading(self) -> str:
        """What the table shows, in a few sentences."""
        infinite = self.comparison.infinite
        if not infinite.hit_blocks:
            return "No request shares a block with an earlier one: nothing can hit."
        blocks = f"{infinite.distinct_blocks:,} blocks"
        lines = (
            f"infinite: a cache that never evicts ({blocks} in the end). No pool hits more.",
            self._most_hits(),
            self._saturation(),
            self._options(),
        )
        return "\n".join(line for line in lines if line)

    def _size(self, blocks: int) -> str:
        return f"{blocks:,}" if self.memory is None else self.memory[blocks]

    def _policies(self) -> list[tuple[str, Row]]:
        rows = _named(self.comparison.rows)
        return [(name, row) for name, row in rows if row.eviction != Optimum.name]

    def _most_hits(self) -> str:
        """Name the policy that hits most, by pool size, where there is one."""
        policies = self._policies()
        won: dict[str, list[str]] = {}
        for size in dict.fromkeys(row.blocks for _, row in policies):
            ranking = sorted(
                ((row.hit_blocks, name) for name, row in policies if row.blocks == size),
                reverse=True,
            )
            if len(ranking) > 1 and ranking[0][0] > ranking[1][0]:
                won.setdefault(ranking[0][1], []).append(self._size(size))
        unit = " blocks" if self.memory is None else ""
        winners = [f"{name} with {_enumerated(sizes)}{unit}" for name, sizes in won.items()]
        return f"Most hits: {'; '.join(winners)}." if winners else ""

    def _saturation(self) -> str:
        """Say from which size on the optimum hits all that can hit."""
        enough = [
            row.blocks
            for row in self.comparison.rows
            if _is_optimum(row) and row.hit_blocks == self.comparison.infinite.hit_blocks
        ]
        if not enough:
            return ""
        return (
            f"With {min(enough):,} blocks the optimum hits all that can hit: from there on, "
            "policies lack foresight, not memory."
        )

    def _options(self) -> str:
        """List the options that the names of the policies do not show."""
        texts: dict[str, str] = {}
        for name, row in self._policies():
            rest = (text for text in _texts(row.options) if text not in name)
            texts[row.eviction] = ", ".join(rest)
        options = "; ".join(f"{name} {text}" for name, text in texts.items() if text)
        return f"Options: {options}." if options else ""


def write_csv(comparison: Comparison, file: TextIO) -> None:
    """Write the rows of a comparison as CSV with a header, ratios in full precision.

    The options are one column, as JSON. An empty cell is no value.
    """
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in comparison.rows:
        fields: dict[str, Any] = {name: getattr(row, name, None) for name in CSV_COLUMNS}
        fields |= {"workload": comparison.workload.name, "count": comparison.count}
        fields |= {f"hit_ratio_{kind}": ratio for kind, ratio in row.hit_ratio.items()}
        writer.writerow(fields | {"options": json.dumps(row.options)})


def _is_optimum(row: Row) -> bool:
    return row.eviction == Optimum.name and not row.options["bypass"]


def _cell(result: Row | Infinite) -> str:
    ratio = result.hit_ratio["block"]
    text = f"{'-' if ratio is None else f'{ratio:.1%}':>5}"
    share = result.share_of_optimum if isinstance(result, Row) else None
    if share is None or (isinstance(result, Row) and _is_optimum(result)):
        return text
    return f"{text} {f'({share:.0%})':>5}"


def _named(rows: list[Row]) -> list[tuple[str, Row]]:
    """Put the name of its policy before each row, with options that tell namesakes apart."""
    named = []
    for row in rows:
        others = [other.options for other in rows if other.eviction == row.eviction]
        telling = {
            key: value
            for key, value in row.options.items()
            if any(options.get(key) != value for options in others)
        }
        text = ",".join(_texts(telling))
        named.append((f"{row.eviction}:{text}" if text else row.eviction, row))
    return named


def _texts(options: Mapping[str, Any]) -> Iterable[str]:
    """Yield options as the command line takes them; None is what it is without."""
    for key, value in options.items():
        if isinstance(value, float):
            yield f"{key}={value:.15g}"
        elif value is not None:
            yield f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _enumerated(words: list[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
