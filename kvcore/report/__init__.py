"""Results for people and for other programs: tables, sentences, and CSV."""

from kvcore.report.caching import CachingReport, OneHeadReport
from kvcore.report.paging import PagingReport
from kvcore.report.simulation import SimulationReport
from kvcore.report.tables import ComparisonReport, counted, write_csv

__all__ = [
    "CachingReport",
    "ComparisonReport",
    "OneHeadReport",
    "PagingReport",
    "SimulationReport",
    "counted",
    "write_csv",
]
