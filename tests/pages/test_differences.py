"""The evictions in which two traces differ are those that a count by block ids finds."""

import pytest
from helpers import traces
from helpers.evictions import TraceBlocks, differing

from kvcore import KVCache, Trace
from kvcore_cli import main as frame
from kvcore_pages.playback import Playback, Window
from kvcore_pages.view import find_differences
from kvcore_plugins.eviction import FIFO, LRU
from kvcore_plugins.prefix import Radix

ZIPF = "zipf:prefixes=20,prefix_tokens=96,output_tokens=24,"
SAME = ZIPF + "requests=150,suffix_tokens=32"
UNTIMED = ("compare", SAME, "--blocks", "40")
SMALL_BLOCKS = ("compare", SAME, "--blocks", "160", "--block-size", "4")
LARGE_KEYS = ("compare", f"{SAME},key_tokens=32", "--blocks", "40", "--block-size", "16")
OTHERS = ("compare", ZIPF + "requests=5,suffix_tokens=64", "--blocks", "40")
PREEMPTING = ("simulate", SAME + ",rate=60", "--block-size", "16", "--blocks", "30")


def record(path, words, eviction):
    """Record a run of the command line, and return the path of its trace."""
    assert frame.run([*words, "--eviction", eviction, "--trace", str(path)]) == 0
    return path


def pair(folder, words, left="lru", right="lfu"):
    """Record two runs of one workload, and return the paths of their traces."""
    return record(folder / "left.jsonl", words, left), record(
        folder / "right.jsonl", words, right
    )


def found(left, right):
    """Return the number of differing blocks by row for both sides, and the note."""
    differences = find_differences(Playback(left), Playback(right))
    marks = [
        {row: blocks for row, blocks in enumerate(column) if blocks}
        for column in differences.blocks
    ]
    return marks, differences.note


def play(path, blocks, steps, eviction=LRU):
    """Record a cache that opens, computes and closes requests, one after another."""
    with Trace(path) as trace:
        cache = KVCache(blocks, traces.BLOCK, eviction=eviction(), prefix=Radix(), trace=trace)
        seen = set()
        for now, (name, *prompt) in enumerate(steps, 1):
            request = traces.ask(name, *prompt)
            seq = cache.open(request, None, now, resumed=name in seen)
            cache.commit(seq, request.prompt_tokens - seq.computed, now)
            cache.close(seq, now)
            seen.add(name)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("right", ["lfu", "random", "lookahead:requests=all"])
@pytest.mark.parametrize(
    "words", [UNTIMED, PREEMPTING, SMALL_BLOCKS], ids=["untimed", "preempting", "small blocks"]
)
def test_marks_equal_a_count_by_block_ids(tmp_path, words, right):
    """The marked rows and their blocks are those that a count by block ids finds."""
    one, other = pair(tmp_path, words, "lru", right)
    left, right = TraceBlocks(one), TraceBlocks(other)
    marks, note = found(one, other)
    expected = [differing(left, right), differing(right, left)]
    assert marks == expected
    assert all(expected)
    assert any(
        len(mark) < len(side.evictions) for mark, side in zip(marks, (left, right), strict=True)
    )
    assert note == ""


def test_equal_traces_do_not_differ(tmp_path):
    """Equal traces have no marked row and no note."""
    assert found(*pair(tmp_path, PREEMPTING, "lru", "lru")) == ([{}, {}], "")


def test_a_single_differing_eviction_is_marked_on_both_sides(tmp_path):
    """LRU and FIFO differ in one eviction, which is marked on both sides.

    LRU keeps the prompt that was used again, FIFO the one that was stored last.
    """
    steps = [("one", "ab"), ("two", "cd"), ("three", "ab", 9), ("four", "ef")]
    left = play(tmp_path / "left.jsonl", 5, steps, LRU)
    right = play(tmp_path / "right.jsonl", 5, steps, FIFO)
    marks, _ = found(left, right)
    for mark, path, text in zip(marks, (left, right), ("cd", "ab"), strict=True):
        (eviction,) = TraceBlocks(path).evictions
        assert eviction.contents == [(traces.key(text), 0)]
        assert mark == {eviction.row: 1}


def test_only_the_second_of_two_equal_evictions_is_marked(tmp_path):
    """If one request evicts a content twice, only the second eviction is marked."""
    once = [("one", "ab"), ("two", "wxyz")]
    again = [*once, ("three", "ab"), ("two", "wxyz")]
    left = play(tmp_path / "left.jsonl", 4, again)
    right = play(tmp_path / "right.jsonl", 4, once)
    first, second = [
        eviction for eviction in TraceBlocks(left).evictions if eviction.line["for"] == "two"
    ]
    assert first.contents == second.contents
    marks, _ = found(left, right)
    assert marks[0][second.row] == 2
    assert first.row not in marks[0]
    assert marks[1] == {}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (OTHERS, "No request is in both traces"),
        (SMALL_BLOCKS, "Blocks stand for 16 tokens on the left and 4 on the right"),
        (LARGE_KEYS, "Keys stand for 16 tokens on the left and 32 on the right"),
    ],
    ids=["workload", "block size", "key tokens"],
)
def test_incomparable_traces_have_a_note_with_the_reason(tmp_path, words, reason):
    """Traces that cannot be compared have no marks, and the note gives the reason."""
    left = record(tmp_path / "left.jsonl", UNTIMED, "lru")
    marks, note = found(left, record(tmp_path / "right.jsonl", words, "lru"))
    assert marks == []
    assert reason in note


def test_only_requests_of_both_traces_are_compared(tmp_path):
    """Only requests in both traces are compared, and the note gives their number."""
    left = record(tmp_path / "left.jsonl", UNTIMED, "lru")
    right = record(tmp_path / "right.jsonl", (*UNTIMED, "--limit", "100"), "lru")
    (marks, none), note = found(left, right)
    assert note == "Only 100 of 150 requests are in both traces."
    assert none == {}
    assert marks
    assert {TraceBlocks(left).lines[row]["for"] for row in marks} <= set(range(100, 150))


def test_evictions_behind_the_last_row_of_a_page_are_left_out(tmp_path):
    """A page of the first rows of two traces marks these rows, wherever its limit falls."""
    one, other = pair(tmp_path, UNTIMED)
    whole = find_differences(Playback(one), Playback(other)).blocks
    for most in range(200, 240):
        sides = [Playback(path, window=Window(max_rows=most)) for path in (one, other)]
        blocks = find_differences(*sides).blocks
        assert [len(column) for column in blocks] == [len(side.rows["kind"]) for side in sides]
    assert any(whole[0])
