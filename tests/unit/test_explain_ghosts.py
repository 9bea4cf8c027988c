"""Ghosts: the latest eviction of every block, where keys stand for several."""

from __future__ import annotations

from kvcore.lab.explaining.ghosts import Ghosts
from kvcore.lab.explaining.reasons import Eviction

KEYS = ["a", "ab", "abc"]


def eviction(line):
    """Return an eviction that is told by its line."""
    return Eviction(line, 0, 1, 1, "lru", "x", "y", 0, 0, expired=False)


def told(ghosts, first, end):
    """Return (first, end, line or None) of the pieces."""
    return [(low, high, of and of.line) for low, high, of in ghosts.pieces(KEYS, first, end)]


def test_what_nothing_evicted_is_one_piece_of_nothing():
    """Blocks that never left have no eviction."""
    assert told(Ghosts(4), 2, 11) == [(2, 11, None)]


def test_blocks_of_one_eviction_are_one_piece():
    """Keys evicted together are told together."""
    ghosts = Ghosts(4)
    ghosts.add(KEYS, 0, 12, eviction(1))
    assert told(ghosts, 0, 12) == [(0, 12, 1)]
    assert told(ghosts, 5, 7) == [(5, 7, 1)]


def test_a_tail_that_left_earlier_keeps_its_own_eviction():
    """Evictions inside a key stand side by side, tail first."""
    ghosts = Ghosts(4)
    ghosts.add(KEYS, 6, 7, eviction(1))
    ghosts.add(KEYS, 5, 6, eviction(2))
    ghosts.add(KEYS, 0, 5, eviction(3))
    assert told(ghosts, 0, 8) == [(0, 5, 3), (5, 6, 2), (6, 7, 1), (7, 8, None)]


def test_what_was_stored_again_has_its_latest_eviction():
    """After a second life the part that left in it is told anew, the rest as before."""
    ghosts = Ghosts(4)
    ghosts.add(KEYS, 0, 8, eviction(1))
    ghosts.add(KEYS, 5, 6, eviction(2))
    assert told(ghosts, 5, 8) == [(5, 6, 2), (6, 8, 1)]
    ghosts.add(KEYS, 4, 8, eviction(3))
    assert told(ghosts, 4, 8) == [(4, 8, 3)]


def test_the_part_that_is_cached_again_is_not_asked_for():
    """Pieces begin where they are asked to, inside a key too."""
    ghosts = Ghosts(4)
    ghosts.add(KEYS, 2, 4, eviction(1))
    assert told(ghosts, 3, 5) == [(3, 4, 1), (4, 5, None)]
    assert told(ghosts, 0, 4) == [(0, 2, None), (2, 4, 1)]
