"""Pages of a trace, of results, and for learners: each one HTML file that opens offline."""

from kvcore.pages.report import report_page
from kvcore.pages.shell import Page
from kvcore.pages.view import view_page

__all__ = ["Page", "report_page", "view_page"]
