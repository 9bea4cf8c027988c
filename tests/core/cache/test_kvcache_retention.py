"""Retention hints: priorities by token range, durations, splits, and raised ancestors."""

import pytest
from helpers.caches import BLOCK, Recorded, ask, compute, make, serve, spans

from kvcore.request import Retention
from kvcore_plugins.eviction import Priority


def hints(cache):
    """Return the priority of every span, and the time at which it ends."""
    return {text: (span.priority, span.priority_until) for text, span in spans(cache).items()}


def hint(first, last, priority, duration=None):
    """Return a hint for the blocks from `first` to `last` (None: to the end)."""
    return Retention(first * BLOCK, None if last is None else last * BLOCK, priority, duration)


def hinted(rows):
    """Return hints from rows of the arguments of `hint`."""
    return tuple(hint(*row) for row in rows)


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        (
            "abcdef",
            [(0, 2, 90), (4, 5, 20)],
            {"|ab": (90, None), "ab|cd": (35, None), "abcd|e": (35, None),
             "abcde|f": (35, None)},
        ),
        (
            "abcd",
            [(2, 3, 80)],
            {"|ab": (80, None), "ab|c": (80, None), "abc|d": (35, None)},
        ),
        ("abc", [(1, None, 5)], {"|a": (35, None), "a|bc": (5, None)}),
        (
            "abcd",
            [(0, 2, 80), (2, None, 80, 100)],
            {"|ab": (80, None), "ab|cd": (80, 100)},
        ),
        ("abcd", [(0, 2, 80, 100), (2, None, 80)], {"|abcd": (80, None)}),
    ],
    ids=[
        "a span for each range", "blocks before a range are raised", "none are lowered",
        "with and without an end", "a later range without end raises an earlier one",
    ],
)  # fmt: skip
def test_a_commit_stores_a_span_for_each_range_of_its_hints(text, rows, expected):
    """Spans split where priorities do; a span has at least the priority of its children."""
    cache = make()
    compute(cache, cache.open(ask(text, retention=hinted(rows))))
    assert hints(cache) == expected


def test_growth_in_place_stays_inside_a_range():
    """Chunks within one range extend a span; those of the next range are its child."""
    cache = make()
    seq = cache.open(ask("abcd", retention=(hint(0, 2, 60),)))
    for _ in range(4):
        compute(cache, seq, BLOCK)
    assert hints(cache) == {"|ab": (60, None), "ab|cd": (35, None)}


def test_chunks_whose_priority_ends_no_earlier_extend_a_span():
    """Chunks of a range, stored at one time or later, extend a span to the end of the last."""
    cache = make()
    seq = cache.open(ask("abc", retention=(hint(0, None, 80, 100),)), now=5)
    for now in (7, 7, 9):
        compute(cache, seq, BLOCK, now)
    assert hints(cache) == {"|abc": (80, 109)}


def test_a_duration_counts_from_the_commit():
    """A duration counts from the commit of the blocks, not from the admission."""
    cache = make()
    seq = cache.open(ask("ab", retention=(hint(0, None, 80, 100),)), now=5)
    compute(cache, seq, now=7)
    assert hints(cache) == {"|ab": (80, 107)}


def test_growth_lengthens_a_duration():
    """A later commit that extends a span restarts the duration of the whole span."""
    cache = make()
    seq = cache.open(ask("ab", retention=(hint(0, None, 80, 100),)))
    compute(cache, seq, BLOCK, now=7)
    compute(cache, seq, BLOCK, now=9)
    assert hints(cache) == {"|ab": (80, 109)}


def test_when_a_duration_ends_the_priority_is_the_default():
    """From `priority_until` on, a span has the default priority."""
    cache = make()
    serve(cache, "ab", retention=(hint(0, None, 80, 100),))
    span = spans(cache)["|ab"]
    assert (span.priority_at(99), span.priority_at(100)) == (80, 35)


def test_the_end_of_a_duration_is_no_expiry():
    """A span still matches after the duration of its hint."""
    cache = make(8, Priority())
    serve(cache, "ab", retention=(hint(0, None, 80, 100),))
    assert cache.probe(ask("abc"), now=1000) == 2


@pytest.mark.parametrize(
    ("stored", "renewed", "now", "resumed", "expected"),
    [
        ([], (0, None, 70), 0, False, (70, None)),
        ([(0, None, 80)], (0, None, 20), 0, False, (80, None)),
        ([(0, None, 80)], (0, None, 80, 5), 0, False, (80, None)),
        ([(0, None, 80, 100)], (0, None, 80, 100), 50, False, (80, 150)),
        ([(0, None, 80, 100)], (0, None, 80, 100), 50, True, (80, 100)),
        ([(0, None, 80, 10)], (0, None, 50), 20, False, (50, None)),
        ([(0, None, 80, 20)], (0, None, 50), 20, False, (50, None)),
        ([(0, None, 80, 21)], (0, None, 50), 20, False, (80, 21)),
    ],
    ids=[
        *("raised", "not lowered", "not shortened", "renewed", "resumed", "ended", "ends"),
        "holds",
    ],
)
def test_a_hit_renews_the_hints_of_its_blocks(stored, renewed, now, resumed, expected):
    """A hit raises a priority or renews its duration, except a resumed request's own hit.

    It never lowers one that holds; one that has ended counts as the default.
    """
    cache = make()
    serve(cache, "abc", retention=hinted(stored))
    cache.open(ask("abcd", retention=hinted([renewed])), now=now, resumed=resumed)
    cache.check_integrity()
    assert hints(cache) == {"|abc": expected}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((0, None, 50, 10), (0, None, 80, 100), {"|abc": (80, 105)}),
        ((0, None, 80, 10), (0, None, 80, 100), {"|abc": (80, 105)}),
        ((0, None, 80, 100), (0, None, 80, 10), {"|abc": (80, 105)}),
        ((0, None, 80, 100), (0, None, 50), {"|abc": (80, 105)}),
        ((0, None, 50), (0, 1, 80), {"|a": (80, None), "a|bc": (50, None)}),
    ],
    ids=["raised", "lengthened", "not shortened", "not lowered", "a part"],
)
def test_hints_hold_for_blocks_that_another_has_committed_meanwhile(first, second, expected):
    """Of two requests that compute one prompt at a time the longest retention holds."""
    cache = make(12)
    one, other = (cache.open(ask("abc", retention=(hint(*row),))) for row in (first, second))
    compute(cache, one, now=5)
    compute(cache, other, now=5)
    assert hints(cache) == expected


def test_hints_hold_for_the_last_block_of_a_prompt_that_is_cached_whole():
    """The last block is computed again and found cached; those before it were hit earlier."""
    cache = make(12)
    serve(cache, "abc")
    seq = cache.open(ask("abc", retention=(hint(0, 1, 90, 9), hint(2, 3, 80, 9))), now=5)
    compute(cache, seq, now=50)
    assert hints(cache) == {"|a": (80, 59), "a|b": (80, 59), "ab|c": (80, 59)}


def test_a_hit_splits_at_the_borders_of_its_hints():
    """A hint of a hit splits spans, and raises only its range and the blocks before it."""
    cache = make(12)
    serve(cache, "abcdef")
    seq = cache.open(ask("abcdefg", retention=(hint(2, 3, 70), hint(4, 5, 90))))
    cache.check_integrity()
    assert hints(cache) == {
        "|ab": (90, None),
        "ab|c": (90, None),
        "abc|d": (90, None),
        "abcd|e": (90, None),
        "abcde|f": (35, None),
    }
    assert {span.ref_count for span in spans(cache).values()} == {1}
    assert seq.span is spans(cache)["abcde|f"]


@pytest.mark.parametrize(
    ("parent", "child", "now"),
    [((80, 10), 50, 20), ((80, 100), 80, 0)],
    ids=["ended", "longer"],
)
def test_an_insertion_raises_its_ancestors(parent, child, now):
    """A parent whose hint has ended, or ends earlier, gets the priority of its new child."""
    cache = make()
    serve(cache, "ab", retention=(hint(0, None, *parent),))
    seq = cache.open(ask("abcd", retention=(hint(2, None, child),)), now=now)
    compute(cache, seq, now=now)
    assert hints(cache) == {"|ab": (child, None), "ab|cd": (child, None)}


def test_an_insertion_lowers_no_ancestor():
    """A parent whose low priority has ended keeps the default above a lower child."""
    cache = make()
    serve(cache, "ab", retention=(hint(0, None, 10, 5),))
    span = spans(cache)["|ab"]
    seq = cache.open(ask("abcd", retention=(hint(2, None, 20),)), now=20)
    compute(cache, seq, now=20)
    assert span.priority_at(20) == 35


def test_a_priority_that_has_ended_raises_no_ancestor():
    """A hit that renews the hint of a parent leaves what has ended below it behind."""
    cache = make()
    serve(cache, "abcd", retention=(hint(2, 4, 80, 10),), now=0)
    serve(cache, "ab!", retention=(hint(0, 2, 50),), now=20)
    serve(cache, "abcd!", retention=(hint(0, 2, 40),), now=30)
    span = spans(cache)["|ab"]
    assert (span.priority, span.priority_until) == (50, None)


def test_a_raised_priority_outlives_the_child():
    """A parent keeps its raised priority after the eviction of the child."""
    cache = make(4)
    serve(cache, "ab")
    serve(cache, "abcd", retention=(hint(2, None, 90),))
    serve(cache, "xy")
    assert hints(cache) == {"|ab": (90, None), "|xy": (35, None)}


def test_on_split_for_hints_comes_before_the_accesses():
    """`on_split` for hints is called after the pins and before the accesses."""
    cache = make(12, Recorded())
    serve(cache, "abcd")
    cache.eviction.callbacks.clear()
    cache.open(ask("abcde", retention=(hint(1, 3, 70),)))
    assert cache.eviction.callbacks == [
        ("on_pin", "|abcd"),
        ("on_split", "abc|d"),
        ("on_split", "a|bc"),
        ("on_access", "abc|d"),
        ("on_access", "a|bc"),
        ("on_access", "|a"),
    ]
