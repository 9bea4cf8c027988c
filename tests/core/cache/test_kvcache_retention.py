"""Retention hints: priorities by token range, durations, splits, and raised ancestors."""

from helpers.caches import BLOCK, Recorded, ask, compute, make, serve, spans, start

from kvcore.request import Retention
from kvcore_plugins.eviction import Priority


def hints(cache):
    """Return the priority of every span, and the time at which it ends."""
    return {text: (span.priority, span.priority_until) for text, span in spans(cache).items()}


def hint(first, last, priority, duration=None):
    """Return a hint for the blocks from `first` to `last` (None: to the end)."""
    return Retention(first * BLOCK, None if last is None else last * BLOCK, priority, duration)


def test_spans_split_at_the_borders_of_hints():
    """A commit stores one span for each range of its hints."""
    cache = make()
    serve(cache, "abcdef", retention=(hint(0, 2, 90), hint(4, 5, 20)))
    assert hints(cache) == {
        "|ab": (90, None),
        "ab|cd": (35, None),
        "abcd|e": (35, None),
        "abcde|f": (35, None),
    }


def test_ancestors_have_at_least_the_priority_of_their_children():
    """A hint also raises the priority of the blocks before its range."""
    cache = make()
    serve(cache, "abcd", retention=(hint(2, 3, 80),))
    assert hints(cache) == {"|ab": (80, None), "ab|c": (80, None), "abc|d": (35, None)}


def test_a_low_priority_reaches_to_the_end_of_its_range():
    """A priority below the default holds for its range only, and not for ancestors."""
    cache = make()
    serve(cache, "abc", retention=(hint(1, None, 5),))
    assert hints(cache) == {"|a": (35, None), "a|bc": (5, None)}


def test_growth_in_place_stays_inside_a_range():
    """Chunks within one range extend a span; those of the next range are its child."""
    cache = make()
    seq = cache.open(ask("abcd", retention=(hint(0, 2, 60),)))
    for _ in range(4):
        compute(cache, seq, BLOCK)
    assert hints(cache) == {"|ab": (60, None), "ab|cd": (35, None)}


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


def test_equal_priorities_with_and_without_an_end_are_two_spans():
    """Equal priorities with and without an end are two spans."""
    cache = make()
    seq = cache.open(ask("abcd", retention=(hint(0, 2, 80), hint(2, None, 80, 100))))
    compute(cache, seq)
    assert hints(cache) == {"|ab": (80, None), "ab|cd": (80, 100)}


def test_a_later_range_without_end_raises_an_earlier_one():
    """A range without end makes the ranges before it endless."""
    cache = make()
    seq = cache.open(ask("abcd", retention=(hint(0, 2, 80, 100), hint(2, None, 80))))
    compute(cache, seq)
    assert hints(cache) == {"|abcd": (80, None)}


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


def test_a_hit_raises_priorities():
    """A hint of a request raises the priorities of the blocks that it hits."""
    cache = make()
    serve(cache, "abc")
    cache.open(ask("abcd", retention=(hint(0, None, 70),)))
    cache.check_integrity()
    assert hints(cache) == {"|abc": (70, None)}


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


def test_a_hit_never_lowers_a_priority():
    """A hit with a lower priority or a shorter duration changes no priority."""
    cache = make()
    serve(cache, "abc", retention=(hint(0, None, 80),))
    cache.open(ask("abcd", retention=(hint(0, None, 20),)))
    cache.open(ask("abcd", retention=(hint(0, None, 80, 5),)), 0)
    assert hints(cache) == {"|abc": (80, None)}


def test_a_hit_renews_a_duration():
    """A hit with the same priority restarts its duration."""
    cache = make()
    serve(cache, "abc", retention=(hint(0, None, 80, 100),))
    cache.open(ask("abcd", retention=(hint(0, None, 80, 100),)), now=50)
    assert hints(cache) == {"|abc": (80, 150)}


def test_a_hit_after_the_end_of_a_hint_counts_against_the_default():
    """After the end of a hint, a hit with a lower priority sets that priority."""
    cache = make()
    serve(cache, "abc", retention=(hint(0, None, 80, 10),))
    cache.open(ask("abcd", retention=(hint(0, None, 50),)), now=20)
    assert hints(cache) == {"|abc": (50, None)}


def test_an_insertion_after_the_end_of_a_hint_raises_its_ancestors():
    """A parent whose hint has ended gets the priority of its new child."""
    cache = make()
    serve(cache, "ab", retention=(hint(0, None, 80, 10),))
    seq = cache.open(ask("abcd", retention=(hint(2, None, 50),)), now=20)
    compute(cache, seq, now=20)
    assert hints(cache) == {"|ab": (50, None), "ab|cd": (50, None)}


def test_an_insertion_lowers_no_ancestor():
    """A parent whose low priority has ended keeps the default above a lower child."""
    cache = make()
    serve(cache, "ab", retention=(hint(0, None, 10, 5),))
    span = spans(cache)["|ab"]
    seq = cache.open(ask("abcd", retention=(hint(2, None, 20),)), now=20)
    compute(cache, seq, now=20)
    assert span.priority_at(20) == 35


def test_an_insertion_lengthens_its_ancestors():
    """A parent of equal priority gets the longer duration of its new child."""
    cache = make()
    serve(cache, "ab", retention=(hint(0, None, 80, 100),))
    seq = cache.open(ask("abcd", retention=(hint(2, None, 80),)))
    compute(cache, seq)
    assert hints(cache) == {"|ab": (80, None), "ab|cd": (80, None)}


def test_a_raised_priority_outlives_the_child():
    """A parent keeps its raised priority after the eviction of the child."""
    cache = make(4)
    serve(cache, "ab")
    serve(cache, "abcd", retention=(hint(2, None, 90),))
    serve(cache, "xy")
    assert hints(cache) == {"|ab": (90, None), "|xy": (35, None)}


def test_a_resumed_request_renews_no_hints():
    """A resumed request does not renew hints of its own blocks."""
    cache = make()
    serve(cache, "abc", retention=(hint(0, None, 80, 100),))
    cache.open(ask("abcd", retention=(hint(0, None, 80, 100),)), now=50, resumed=True)
    assert hints(cache) == {"|abc": (80, 100)}


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


def test_the_lowest_priority_is_evicted_first():
    """The policy `priority` evicts the lowest priority first, even if it is most recent."""
    cache = make(6, Priority())
    serve(cache, "ab")
    serve(cache, "lm", retention=(hint(0, None, 20),))
    start(cache, "xyz")
    assert spans(cache).keys() == {"|ab", "|l", "|xyz"}
