"""`ScoreEviction`: spans are evicted in the order of their scores."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest
from helpers.caches import make, serve, spans

from kvcore import PolicyError, ScoreEviction


class Backwards(ScoreEviction):
    """A policy that evicts the deepest span first; the example of the documentation."""

    name = "backwards"

    def score(self, span, now):
        """Return the negative depth."""
        del now
        return -span.depth


class Constant(ScoreEviction):
    """A policy with equal scores for all spans."""

    name = "constant"

    def score(self, span, now):
        """Return 0."""
        del span, now
        return 0


@attrs.define(slots=False, eq=False)
class Drifting(ScoreEviction):
    """A policy whose scores cross: the first span is worth less at first, and more later."""

    name: ClassVar[str] = "drifting"
    drifts: ClassVar[bool] = True

    def score(self, span, now):
        """Return a score that rises with age for the first span alone."""
        return (now - span.created) * (span.created_order == 1) - (span.created_order == 1)


def test_the_lowest_score_goes_first():
    """The leaf with the lowest score is evicted."""
    cache = make(5, Backwards(), accounting="keys")
    serve(cache, "ab", "abc", "x", "y", "z")
    assert set(spans(cache)) == {"|ab", "|x", "|y", "|z"}


def test_ties_go_to_the_least_recent():
    """Of leaves with equal scores the least recently used is evicted."""
    cache = make(3, Constant(), accounting="keys")
    serve(cache, "a", "b", "c", "a", "d")
    assert set(spans(cache)) == {"|a", "|c", "|d"}


def test_ties_go_to_the_deeper_of_one_path():
    """Of two halves of a split with equal scores the lower is evicted."""
    cache = make(4, Constant(), accounting="keys")
    serve(cache, "ab", "x")
    serve(cache, "y", "z")
    assert "|ab" not in spans(cache)
    assert "|a" in spans(cache)


@pytest.mark.parametrize(("now", "left"), [(0, {"|b", "|c"}), (10, {"|a", "|c"})])
def test_drifting_scores_are_computed_when_a_victim_is_needed(now, left):
    """Scores of a policy with `drifts` are computed when a victim is needed."""
    cache = make(2, Drifting(), accounting="keys")
    serve(cache, "a", "b")
    serve(cache, "c", now=now)
    assert set(spans(cache)) == left


def test_the_heap_does_not_grow_with_time():
    """Outdated entries are removed from the heap, whose size is bounded by the cached spans."""
    policy = Constant()
    cache = make(4, policy, accounting="keys")
    serve(cache, *["a", "b", "c"] * 300)
    assert len(policy._leaves._heap) <= 40


class Ticking(ScoreEviction):
    """A policy whose scores fall at different speeds."""

    name = "ticking"
    drifts = True

    def score(self, span, now):
        """Return the negative age, times a factor of the span."""
        return -(now - span.created) * (span.created_order % 7 + 1)


def test_a_drifting_policy_has_one_victim_until_the_cache_changes():
    """The victim of a policy with `drifts` is the same until the cache changes."""
    policy = Ticking()
    cache = make(200, policy, accounting="keys")
    serve(cache, *map(chr, range(1000, 1200)))
    answers = {policy.victim(50) for _ in range(5)}
    assert len(answers) == 1
    serve(cache, "x", now=50)
    assert answers.isdisjoint(cache.tree.spans())


def test_a_score_may_depend_on_size():
    """After a split the remaining span is scored by its new size."""

    class Longest(ScoreEviction):
        name = "longest"

        def score(self, span, now):
            return -span.blocks

    cache = make(10, Longest(), accounting="keys")
    serve(cache, "abcdef", "wxy", "abcd!")
    assert cache.eviction.victim(0) is spans(cache)["|wxy"]


def test_a_score_that_changes_no_more_is_not_computed_again():
    """A time at which a score would have changed is forgotten if there is none any more."""

    class Ending(ScoreEviction):
        name = "ending"
        end, computed = 5, 0

        def score(self, span, now):
            self.computed += 1
            return 0

        def changes_at(self, span, now):
            return self.end

    policy = Ending()
    cache = make(4, policy, accounting="keys")
    serve(cache, "a", now=0)
    policy.end = None
    policy.rescore(spans(cache)["|a"])
    policy.victim(10)
    assert policy.computed == 2


@pytest.mark.parametrize("due", [float("nan"), float("inf"), 7.5, 3, -5, "soon"])
def test_a_time_of_change_that_is_none_is_refused(due):
    """A `changes_at` that is no whole number, or not in the future, raises PolicyError."""
    policy = type(
        "Wrong",
        (ScoreEviction,),
        {"name": "wrong", "score": lambda *_: 0, "changes_at": lambda *_: due},
    )()
    cache = make(4, policy, accounting="keys")
    with pytest.raises(PolicyError, match=rf"'wrong' .* is {due!r}: give whole ns after 3, or"):
        serve(cache, "a", now=3)
