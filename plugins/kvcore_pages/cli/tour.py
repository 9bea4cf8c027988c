"""`kvcore tour`: a page that explains the KV cache to learners."""

from __future__ import annotations

from pathlib import Path

from kvcore_cli.output import page_option, write_page
from kvcore_cli.verb import verb


@verb("kvcore tour -o tour.html")
@page_option(required=True)
def tour(*, out: Path) -> None:
    """Make a page that explains the KV cache, for learners.

    Six questions, each answered by pictures of what a small model and a real cache do while
    the page is made. It is one file, which a browser opens without a server or a network.
    Needs torch.
    """
    from kvcore_pages.tour import tour_page  # noqa: PLC0415 - it imports the engine

    write_page(out, tour_page)
