"""Results for people and for other programs: tables, sentences, and files that are whole."""

from kvcore.report.files import whole_file
from kvcore.report.tables import ComparisonReport, write_csv

__all__ = ["ComparisonReport", "whole_file", "write_csv"]
