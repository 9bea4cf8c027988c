"""The options of contiguous memory, as servers allocated it before paging."""

from typing import Annotated, Literal

from kvcore.config.options import Option, SimulateOptions
from kvcore.hookspecs import POOL


class ContiguousOptions(SimulateOptions, total=False):
    """Options of a run with contiguous memory."""

    allocation: Annotated[
        Literal["paged", "contiguous"],
        Option(
            "paged",
            "Memory of a request's K/V: blocks as they are needed (paged), or one piece for "
            "the longest output, reported beside a paged run (contiguous).",
            POOL,
        ),
    ]
    max_output: Annotated[
        int | None,
        Option(None, "Largest number of tokens of an output that is reserved.", ""),
    ]
    """Of contiguous memory alone; None: the longest of the workload."""
