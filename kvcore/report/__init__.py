"""Results for people and for other programs: tables, sentences, and CSV."""

from kvcore.report.mrc import CurvesReport
from kvcore.report.prometheus import comparison_metrics, require_prometheus, run_metrics
from kvcore.report.simulation import PagingReport, ResidencyReport, SimulationReport, thrashing
from kvcore.report.tables import ComparisonReport, counted, setup, write_csv
from kvcore.report.whatif import WhatIfReport

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
