"""The easy tier: one function, in the order it says."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest
from helpers.caches import make, serve, spans

from kvcore import ScoreEviction


class Backwards(ScoreEviction):
    """The ten-line policy of the documentation: the deepest span goes first."""

    name = "backwards"

    def score(self, span, now):
        """Return the depth, the greatest first."""
        del now
        return -span.depth


class Alike(ScoreEviction):
    """A policy to which all spans are alike."""

    name = "alike"

    def score(self, span, now):
        """Return the same for all."""
        del span, now
        return 0


@attrs.define(slots=False, eq=False)
class Drifting(ScoreEviction):
    """Scores that cross: a span is worth its hits at first, and its age in the end."""

    name: ClassVar[str] = "drifting"
    drifts: ClassVar[bool] = True

    def score(self, span, now):
        """Return a score in which older spans rise faster."""
        return (now - span.created) * (span.created_order == 1) - (span.created_order == 1)


def test_the_lowest_score_goes_first():
    """The victim is the leaf with the lowest score."""
    cache = make(5, Backwards(), accounting="keys")
    serve(cache, "ab", "abc", "x", "y", "z")
    assert set(spans(cache)) == {"|ab", "|x", "|y", "|z"}


def test_ties_go_to_the_least_recent():
    """Among equal scores the policy is LRU."""
    cache = make(3, Alike(), accounting="keys")
    serve(cache, "a", "b", "c", "a", "d")
    assert set(spans(cache)) == {"|a", "|c", "|d"}


def test_ties_go_to_the_deeper_of_one_path():
    """A split leaves halves of equal recency; the lower goes first."""
    cache = make(4, Alike(), accounting="keys")
    serve(cache, "ab", "x")
    serve(cache, "y", "z")
    assert "|ab" not in spans(cache)
    assert "|a" in spans(cache)


@pytest.mark.parametrize(("now", "left"), [(0, {"|b", "|c"}), (10, {"|a", "|c"})])
def test_drifting_scores_are_those_of_the_moment(now, left):
    """A policy that drifts is asked for its scores when a victim is needed."""
    cache = make(2, Drifting(), accounting="keys")
    serve(cache, "a", "b")
    serve(cache, "c", now=now)
    assert set(spans(cache)) == left


def test_the_heap_does_not_grow_with_time():
    """Entries that no longer count are dropped: memory is that of the spans cached now."""
    policy = Alike()
    cache = make(4, policy, accounting="keys")
    serve(cache, *["a", "b", "c"] * 300)
    assert len(policy._leaves._heap) <= 40


class Ticking(ScoreEviction):
    """A policy that drifts: what is old falls fastest."""

    name = "ticking"
    drifts = True

    def score(self, span, now):
        """Return less the older a span is, and the more so the later it is."""
        return -(now - span.created) * (span.created_order % 7 + 1)


def test_a_drifting_policy_gives_one_answer():
    """However many leaves there are, the victim stays the same until something changes."""
    policy = Ticking()
    cache = make(200, policy, accounting="keys")
    serve(cache, *map(chr, range(1000, 1200)))
    answers = {policy.victim(50) for _ in range(5)}
    assert len(answers) == 1
    serve(cache, "x", now=50)
    assert answers.isdisjoint(cache.tree.spans())


def test_a_score_may_depend_on_size():
    """What a split leaves of a span is scored as what it is now."""

    class Longest(ScoreEviction):
        name = "longest"

        def score(self, span, now):
            return -span.blocks

    cache = make(10, Longest(), accounting="keys")
    serve(cache, "abcdef", "wxy", "abcd!")
    assert cache.eviction.victim(0) is spans(cache)["|wxy"]
