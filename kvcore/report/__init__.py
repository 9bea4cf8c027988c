"""Results for people and for other programs: tables, sentences, and CSV."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore.report.comparison import ComparisonReport, write_csv
    from kvcore.report.mrc import CurvesReport
    from kvcore.report.prometheus import comparison_metrics, require_prometheus, run_metrics
    from kvcore.report.simulation import (
        PagingReport,
        ResidencyReport,
        SimulationReport,
        thrashing,
    )
    from kvcore.report.tables import counted, setup
    from kvcore.report.whatif import WhatIfReport
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "comparison": "ComparisonReport write_csv",
            "mrc": "CurvesReport",
            "prometheus": "comparison_metrics require_prometheus run_metrics",
            "simulation": "PagingReport ResidencyReport SimulationReport thrashing",
            "tables": "counted setup",
            "whatif": "WhatIfReport",
        },
    )

__all__ = [
    "ComparisonReport",
    "CurvesReport",
    "PagingReport",
    "ResidencyReport",
    "SimulationReport",
    "WhatIfReport",
    "comparison_metrics",
    "counted",
    "require_prometheus",
    "run_metrics",
    "setup",
    "thrashing",
    "write_csv",
]
