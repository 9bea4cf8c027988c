"""The cache against the contents of its blocks: a million calls in the profile `thorough`.

Half of them are made here, and half with tiers, in `tests/tiers/properties/test_contents.py`.
"""

import pytest
from helpers.contents import LAYOUTS, run_programs


@pytest.mark.parametrize(("count", "size"), LAYOUTS)
def test_what_is_read_is_what_was_written(count, size):
    """After any calls each sequence reads its own text, and each span has its own.

    A trace of the calls makes the same states, and the same statistics.

    Sequences hit all that is cached of their text, share, fork, generate, are compacted, drop
    ranges, are preempted and return; clients pin, demote and keep blocks to themselves.
    """
    counts = run_programs(count, size, tiered=False)
    assert counts["hit blocks"]
    assert counts["traces"]
    assert counts["compacted"]
    assert counts["copied"]
