"""How long blocks rest, as a table for people, and a sentence where the cache thrashes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import attrs

from kvcore.lab import Comparison, Row
from kvcore.report.tables import named
from kvcore.units import format_seconds

NONE = "–"


def thrashing(residency: Mapping[str, Any] | None, blocks: int) -> str:
    """Say of each tier that thrashes what the figures are, and what to do; else nothing.

    `residency` is that of a summary: by tier, what `Residency.as_dict()` says, which is also
    where the rule stands (`Residency.thrashing`). `blocks` are those of the pool.
    """
    sentences = []
    for tier, rested in (residency or {}).items():
        if not rested["thrashing"]:
            continue
        gone = sum(rested["evicted_blocks"].values())
        hit = rested["age_at_hit_s"]
        sentences.append(
            f"THRASHING ({tier}): {rested['never_hit_blocks'] / gone:.0%} of the {gone:,} "
            f"blocks evicted had never been hit, and {rested['restored_blocks']:,} were "
            f"stored again before another {blocks:,} had gone, while only "
            f"{hit['blocks'] if hit else 0:,} hit. Twice the pool (--blocks {2 * blocks}) "
            "would keep most of these; `kvcore compare` shows what another policy keeps."
        )
    return "\n".join(sentences)


@attrs.frozen
class ResidencyReport:
    """What blocks went through under each policy of a comparison, in each pool.

    Attributes:
        comparison: one that was made with `residency=True`.
    """

    comparison: Comparison

    headers: ClassVar[tuple[str, ...]] = (
        *("eviction", "blocks", "age at hit", "age at eviction", "lifetime"),
        *("never hit", "stored again"),
    )

    @property
    def rows(self) -> list[list[str]]:
        """The rows of the table: a policy in a pool each, medians of times."""
        return list(_rows(named(self.comparison.rows)))

    @property
    def reading(self) -> str:
        """What the columns are, and which policies thrash in which pools."""
        columns = (
            "Ages are medians, by block, in the workload's own time: from arrival to arrival, "
            "since no clock runs here. Never hit: of what was evicted. Stored again: of what "
            "was stored, after at most a pool of other evictions."
        )
        lines = [columns]
        for name, row in named(self.comparison.rows):
            told = thrashing(row.residency, row.blocks)
            lines.extend([f"{name}, {row.blocks:,} blocks: {told}"] if told else [])
        return "\n".join(lines)


def _rows(rows: Iterable[tuple[str, Row]]) -> Iterator[list[str]]:
    for name, row in rows:
        for rested in (row.residency or {}).values():
            ages = (rested[key] for key in ("age_at_hit_s", "age_at_eviction_s", "lifetime_s"))
            gone = sum(rested["evicted_blocks"].values())
            yield [
                name,
                f"{row.blocks:,}",
                *(NONE if age is None else format_seconds(age["p50"]) for age in ages),
                _share(rested["never_hit_blocks"], gone),
                _share(rested["restored_blocks"], rested["stored_blocks"]),
            ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else NONE
