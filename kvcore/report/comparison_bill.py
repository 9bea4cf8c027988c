"""The bills of a comparison as a table."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvcore.analysis import Comparison
from kvcore.report.billing import BILLS, dollars, setup_of
from kvcore.report.policies import named
from kvcore.report.sections import Section, Table
from kvcore.report.tables import TableRow


@attrs.frozen
class ComparisonBill:
    """The bills of an API that has the cache of each row of a comparison.

    Attributes:
        comparison: a comparison with prices.
        memory: names of the pool sizes, by blocks, if the sizes were given in bytes.
    """

    comparison: Comparison
    memory: Mapping[int, str] | None = None

    @property
    def sections(self) -> list[Section]:
        """The page on the bills."""
        return [Table(self.headers, self.rows), self.reading]

    @property
    def headers(self) -> TableRow:
        """Headers of the table: one column per pool size."""
        sizes = dict.fromkeys(row.blocks for row in self.comparison.rows)
        names = (f"{size:,}" if self.memory is None else self.memory[size] for size in sizes)
        return ["bill in USD", *(f"{name:>5}" for name in names)]

    @property
    def rows(self) -> list[TableRow]:
        """Rows of dollars: one per policy, and the bills that do not depend on the pool."""
        table: dict[str, TableRow] = {}
        for name, row in named(self.comparison.rows):
            assert row.bill is not None
            table.setdefault(name, []).append(dollars(row.bill.usd))
        bills, columns = self.comparison.bills, len(self.headers) - 1
        for key, name in BILLS.items():
            bill = getattr(bills, key)
            if bill is not None:
                table[name] = [dollars(bill.usd)] * columns
        return [[name, *cells] for name, cells in table.items()]

    @property
    def reading(self) -> str:
        """Sentences about the table and the prices."""
        assert self.comparison.bills is not None
        return (
            "What the API would charge if its cache were this pool, with its prices, least "
            f"length and steps.\n{setup_of(self.comparison.bills.price)}"
        )
