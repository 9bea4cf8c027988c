"""Hit curves as a table for people, a few sentences, CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any, TextIO

import attrs

from kvcore.lab import Curves
from kvcore.model import KVLayout
from kvcore.report.tables import counted, named
from kvcore.units import format_bytes

COLUMNS = (
    "workload",
    "count",
    "block_size",
    "eviction",
    "options",
    "blocks",
    "bytes",
    "hit_blocks",
    "hit_ratio",
)


@attrs.frozen
class CurvesReport:
    """Hit curves for people and for other programs.

    Attributes:
        curves: what is reported.
        layout: what a block takes; None: sizes are told in blocks alone.
    """

    curves: Curves
    layout: KVLayout | None = None

    @property
    def headline(self) -> str:
        """What the numbers are."""
        curves, source = self.curves, self.curves.workload
        requests = counted(source.requests, "request")
        if self.empty:
            return f"{source.name}: {requests}.\nNothing in them has a key to look up."
        look = "looks" if source.requests == 1 else "look"
        return (
            f"{source.name}: {requests} {look} up {counted(curves.lookup_blocks, 'block')} of "
            f"{counted(curves.block_size, 'token')} ({curves.count} counting).\n"
            "The share of these that hit, by the size of the pool."
        )

    @property
    def empty(self) -> bool:
        """Whether nothing is looked up, so that the headline is all there is to say."""
        return not self.curves.lookup_blocks

    @property
    def headers(self) -> list[str]:
        """The headers of the table: the size, then one a policy."""
        memory = [] if self.layout is None else ["memory"]
        return ["blocks", "of all", *memory, *self.names]

    @property
    def names(self) -> list[str]:
        """The policies, with options that tell namesakes apart."""
        return [name for name, _ in named(self.curves.curves)]

    @property
    def rows(self) -> Iterator[list[str]]:
        """The rows of the table: one a pool size."""
        curves = self.curves.curves
        for place, blocks in enumerate(curves[0].blocks):
            taken = self.bytes_of(blocks)
            memory = [] if taken is None else [format_bytes(taken)]
            yield [
                f"{blocks:,}",
                percent(blocks / self.curves.distinct_blocks),
                *memory,
                *(f"{self.curves.ratio(c.hit_blocks[place]):.1%}" for c in curves),
            ]

    @property
    def reading(self) -> str:
        """What the table shows, in a few sentences."""
        curves = self.curves
        text = (
            f"A cache that never evicts holds {counted(curves.distinct_blocks, 'block')} in "
            f"the end and hits {curves.ratio(curves.hit_blocks):.1%}."
        )
        if self.layout is not None:
            text += (
                f"\nA block of {counted(curves.block_size, 'token')} of "
                f"{self.layout.model.name} in {self.layout.dtype} takes "
                f"{format_bytes(self.layout.bytes_per_block)}."
            )
        return text

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        curves = self.curves
        document = {
            "workload": attrs.asdict(curves.workload),
            "count": curves.count,
            "block_size": curves.block_size,
            "weighting": "block",
            "lookup_blocks": curves.lookup_blocks,
            "infinite": {
                "distinct_blocks": curves.distinct_blocks,
                "hit_blocks": curves.hit_blocks,
                "hit_ratio": curves.ratio(curves.hit_blocks),
            },
            "curves": [
                {
                    "eviction": curve.eviction,
                    "options": curve.options,
                    "every_size": curve.steps is not None,
                    "points": [
                        {
                            "blocks": blocks,
                            "hit_blocks": hits,
                            "hit_ratio": curves.ratio(hits),
                        }
                        for blocks, hits in zip(curve.blocks, curve.hit_blocks, strict=True)
                    ],
                }
                for curve in curves.curves
            ],
        }
        if self.layout is not None:
            document["memory"] = {
                "model": self.layout.model.name,
                "kv_dtype": self.layout.dtype,
                "bytes_per_block": self.layout.bytes_per_block,
            }
        return document

    def write_csv(self, file: TextIO) -> None:
        """Write a row a policy and size, with a header; ratios in full precision.

        The options are one column, as JSON. An empty cell is no value.
        """
        curves = self.curves
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for curve in curves.curves:
            for blocks, hits in zip(curve.blocks, curve.hit_blocks, strict=True):
                writer.writerow(
                    [
                        curves.workload.name,
                        curves.count,
                        curves.block_size,
                        curve.eviction,
                        json.dumps(curve.options),
                        blocks,
                        self.bytes_of(blocks),
                        hits,
                        curves.ratio(hits),
                    ]
                )

    def bytes_of(self, blocks: int) -> int | None:
        """Return what so many blocks take; None where that is not known."""
        return None if self.layout is None else blocks * self.layout.bytes_per_block


def percent(share: float) -> str:
    """Write the share of a footprint with about two digits: `0.1%`, `1.6%`, `100%`."""
    return f"{float(f'{100 * share:.2g}'):.10g}%"
