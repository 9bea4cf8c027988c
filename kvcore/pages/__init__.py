"""Pages: a trace, results, and what a KV cache is, as one HTML file each that opens offline."""

from kvcore.pages.shell import Page

__all__ = ["Page"]
