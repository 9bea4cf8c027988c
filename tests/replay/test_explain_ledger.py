"""`LastEventIndex`: the latest eviction of every block, for keys of several blocks."""

from __future__ import annotations

from kvcore_replay.misses.classifier import LastEventIndex
from kvcore_replay.misses.reasons import Eviction

KEYS = ["a", "ab", "abc"]


def eviction(line):
    """Return an eviction that is identified by its line."""
    return Eviction(line, 0, 1, 1, "lru", "x", "y", 0, 0, expired=False)


def pieces_of(ledger, first, end):
    """Return (first, end, line or None) of the pieces."""
    return [(low, high, of and of.line) for low, high, of in ledger.pieces(KEYS, first, end)]


def test_blocks_of_one_eviction_are_one_piece():
    """Blocks of several keys that were evicted together are one piece."""
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 0, 12, eviction(1))
    assert pieces_of(ledger, 0, 12) == [(0, 12, 1)]
    assert pieces_of(ledger, 5, 7) == [(5, 7, 1)]


def test_a_tail_that_left_earlier_keeps_its_own_eviction():
    """Parts of a key that were evicted one after the other are separate pieces."""
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 6, 7, eviction(1))
    ledger.add(KEYS, 5, 6, eviction(2))
    ledger.add(KEYS, 0, 5, eviction(3))
    assert pieces_of(ledger, 0, 8) == [(0, 5, 3), (5, 6, 2), (6, 7, 1), (7, 8, None)]


def test_blocks_stored_again_have_their_latest_eviction():
    """Blocks that were stored and evicted again have their latest eviction.

    The other blocks keep theirs.
    """
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 0, 8, eviction(1))
    ledger.add(KEYS, 5, 6, eviction(2))
    assert pieces_of(ledger, 5, 8) == [(5, 6, 2), (6, 8, 1)]
    ledger.add(KEYS, 4, 8, eviction(3))
    assert pieces_of(ledger, 4, 8) == [(4, 8, 3)]


def test_pieces_are_cut_to_the_given_blocks():
    """Pieces begin and end at the given blocks, even inside a key."""
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 2, 4, eviction(1))
    assert pieces_of(ledger, 3, 5) == [(3, 4, 1), (4, 5, None)]
    assert pieces_of(ledger, 0, 4) == [(0, 2, None), (2, 4, 1)]


def test_an_eviction_inside_a_key_leaves_earlier_ones_around():
    """An eviction inside a key leaves the earlier evictions before and after it."""
    ledger = LastEventIndex(4)
    ledger.add(KEYS, 0, 4, eviction(1))
    ledger.add(KEYS, 1, 3, eviction(2))
    assert pieces_of(ledger, 0, 4) == [(0, 1, 1), (1, 3, 2), (3, 4, 1)]
