"""Results for people and for other programs: tables, sentences, and CSV."""

from kvcore.report.caching import CachingReport, OneHeadReport
from kvcore.report.curves import CurvesReport
from kvcore.report.paging import PagingReport
from kvcore.report.simulation import SimulationReport
from kvcore.report.tables import ComparisonReport, counted, write_csv
from kvcore.report.whatif import WhatIfReport

__all__ = [
    "CachingReport",
    "ComparisonReport",
    "CurvesReport",
    "OneHeadReport",
    "PagingReport",
    "SimulationReport",
    "WhatIfReport",
    "counted",
    "write_csv",
]
