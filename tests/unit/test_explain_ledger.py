"""`LastEventIndex`: the latest eviction of every block, for keys of several blocks."""

from __future__ import annotations

from kvcore.analysis.miss_classifier import LastEventIndex
from kvcore.analysis.miss_reasons import Eviction

KEYS = ["a", "ab", "abc"]


def eviction(line):
    """Return an eviction that is identified by its line."""
    return Eviction(line, 0, 1, 1, "lru", "x", "y", 0, 0, expired=False)


def told(ledger, first, end):
    """Return (first, end, line or None) of the pieces."""
    return [(low, high, of and of.line) for low, high, of in ledger.pieces(KEYS, first, end)]


def test_what_nothing_evicted_is_one_piece_of_nothing():
    """Blocks that were never evicted are one piece without an eviction."""
    assert told(LastEventIndex(4), 2, 11) == [(2, 11, None)]


def test_blocks_of_one_eviction_are_one_piece():
    """Blocks of several keys that were evicted together are one piece."""
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 0, 12, eviction(1))
    assert told(ledger, 0, 12) == [(0, 12, 1)]
    assert told(ledger, 5, 7) == [(5, 7, 1)]


def test_a_tail_that_left_earlier_keeps_its_own_eviction():
    """Parts of a key that were evicted one after the other are separate pieces."""
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 6, 7, eviction(1))
    ledger.add(KEYS, 5, 6, eviction(2))
    ledger.add(KEYS, 0, 5, eviction(3))
    assert told(ledger, 0, 8) == [(0, 5, 3), (5, 6, 2), (6, 7, 1), (7, 8, None)]


def test_what_was_stored_again_has_its_latest_eviction():
    """Blocks that were stored and evicted again have their latest eviction.

    The other blocks keep theirs.
    """
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 0, 8, eviction(1))
    ledger.add(KEYS, 5, 6, eviction(2))
    assert told(ledger, 5, 8) == [(5, 6, 2), (6, 8, 1)]
    ledger.add(KEYS, 4, 8, eviction(3))
    assert told(ledger, 4, 8) == [(4, 8, 3)]


def test_the_part_that_is_cached_again_is_not_asked_for():
    """Pieces begin and end at the given blocks, even inside a key."""
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 2, 4, eviction(1))
    assert told(ledger, 3, 5) == [(3, 4, 1), (4, 5, None)]
    assert told(ledger, 0, 4) == [(0, 2, None), (2, 4, 1)]


def test_keys_side_by_side_with_equal_pieces_are_told_apart():
    """The pieces of neighbouring keys are separate, even if their offsets are equal."""
    ledger, same = LastEventIndex(4), eviction(1)
    ledger.add(KEYS, 1, 2, same)
    ledger.add(KEYS, 5, 6, same)
    expected = [(0, 1, None), (1, 2, 1), (2, 5, None), (5, 6, 1), (6, 8, None)]
    assert told(ledger, 0, 8) == expected


def test_a_note_on_a_part_leaves_what_was_noted_before_and_after():
    """An eviction inside a key leaves the earlier evictions before and after it."""
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 0, 4, eviction(1))
    ledger.add(KEYS, 1, 3, eviction(2))
    assert told(ledger, 0, 4) == [(0, 1, 1), (1, 3, 2), (3, 4, 1)]
