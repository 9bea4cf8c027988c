"""Pages: a trace, results, and what a KV cache is, as one HTML file each that opens offline."""

from kvcore.pages.report import report_page
from kvcore.pages.shell import Page
from kvcore.pages.view import view_page

__all__ = ["Page", "report_page", "view_page"]
