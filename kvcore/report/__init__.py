"""Results for people and for other programs: tables, sentences, and CSV."""

from kvcore.report.caching import CachingReport, OneHeadReport
from kvcore.report.curves import CurvesReport
from kvcore.report.paging import PagingReport
from kvcore.report.prometheus import comparison_metrics, require_prometheus, run_metrics
from kvcore.report.residency import ResidencyReport, thrashing
from kvcore.report.simulation import SimulationReport
from kvcore.report.tables import ComparisonReport, counted, write_csv
from kvcore.report.whatif import WhatIfReport

__all__ = [
    "CachingReport",
    "ComparisonReport",
    "CurvesReport",
    "OneHeadReport",
    "PagingReport",
    "ResidencyReport",
    "SimulationReport",
    "WhatIfReport",
    "comparison_metrics",
    "counted",
    "require_prometheus",
    "run_metrics",
    "thrashing",
    "write_csv",
]
