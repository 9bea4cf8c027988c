"""The bills of a comparison as sections."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.sections import Section, Table
from kvcore.units import format_dollars
from kvcore_cli.report.tables import TableRow
from kvcore_lab.comparison import Comparison
from kvcore_lab.report.policies import named
from kvcore_replay.report.billing import BILLS, setup_of


def comparison_bill(
    comparison: Comparison, memory: Mapping[int, str] | None = None
) -> list[Section]:
    """Return a table of dollars by policy and pool size, and sentences about the prices.

    Args:
        comparison: a comparison with prices.
        memory: names of the pool sizes, by blocks, if the sizes were given in bytes.
    """
    bills = comparison.bills
    assert bills is not None
    sizes = dict.fromkeys(row.blocks for row in comparison.rows)
    names = (f"{size:,}" if memory is None else memory[size] for size in sizes)
    table: dict[str, TableRow] = {}
    for name, row in named(comparison.rows):
        assert row.bill is not None
        table.setdefault(name, []).append(format_dollars(row.bill.usd))
    # These do not depend on the pool.
    for key, name in BILLS.items():
        bill = getattr(bills, key)
        if bill is not None:
            table[name] = [format_dollars(bill.usd)] * len(sizes)
    headers = ["bill in USD", *(f"{name:>5}" for name in names)]
    about = (
        "What the API would charge if its cache were this pool, with its prices, least length "
        f"and steps.\n{setup_of(bills.price)}"
    )
    return [Table(headers, [[name, *cells] for name, cells in table.items()]), about]
