"""Results for people and for other programs: tables, sentences, and CSV."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore.report.simulation import SimulationReport, thrashing
    from kvcore.report.tables import counted, setup
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "simulation": "SimulationReport thrashing",
            "tables": "counted setup",
        },
    )

__all__ = ["SimulationReport", "counted", "setup", "thrashing"]
