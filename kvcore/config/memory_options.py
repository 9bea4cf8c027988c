"""The options of memory as servers allocated it before paging, and of measuring its use."""

from typing import Annotated, Literal

from kvcore.config.options import POOL, Option, SimulateOptions


class MemoryOptions(SimulateOptions, total=False):
    """Options of a run whose use of memory is measured."""

    allocation: Annotated[
        Literal["paged", "contiguous"],
        Option(
            "paged",
            "Memory of a request's K/V: blocks as they are needed (paged), or one piece for the "
            "longest output, reported beside a paged run (contiguous).",
            POOL,
        ),
    ]
    max_output: Annotated[
        int | None,
        Option(
            None, "Largest number of tokens of an output, for which memory is reserved.", ""
        ),
    ]
    """For `contiguous` alone; None: the longest of the workload."""
    fragmentation: Annotated[
        bool,
        Option(default=False, help="Measure how memory is used.", heading=""),
    ]
