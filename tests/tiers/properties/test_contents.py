"""Tiers against the contents of their slots, as in `tests/core/properties/test_contents.py`."""

import pytest
from helpers.contents import LAYOUTS, run_programs


@pytest.mark.parametrize(("count", "size"), LAYOUTS)
def test_what_tiers_load_is_what_was_written(count, size):
    """After any moves between pool and tiers each sequence reads its own text.

    Blocks are loaded for requests and ahead of them, sequences are swapped, stores lose blocks
    and pause.
    """
    counts = run_programs(count, size, tiered=True)
    assert counts["loaded blocks"]
    assert counts["prefetched"]
    assert counts["damaged blocks"]
    assert count == "keys" or counts["swapped"]
