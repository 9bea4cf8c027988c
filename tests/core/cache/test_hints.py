"""Hints of requests: sharing, pinning, and demoting the blocks of their prompts."""

import attrs
import pytest
from helpers.caches import BLOCK, Mortal, ask, compute, make, serve, spans, start
from helpers.serving import ask as arrive
from helpers.serving import serve as simulate

from kvcore import InputError, OutOfBlocks
from kvcore.request import NO_HINTS, Hints
from kvcore_plugins.eviction import LRU, MRU, SIEVE
from kvcore_replay.check.trace import check_trace

PIN = {"hints": Hints(pin=50)}
DEMOTE = {"hints": Hints(demote=True)}


@pytest.mark.parametrize(
    ("hints", "complaint"),
    [
        ({"share": -1}, "hint share=-1: give True, False, or tokens, from 0 on"),
        ({"share": 1.5}, "hint share=1.5"),
        ({"pin": 0}, "hint pin=0: give whole nanoseconds, from 1 on"),
        ({"pin": 2.0}, "hint pin=2.0"),
        ({"prefetch": 2**63}, "hint prefetch=9223372036854775808"),
        ({"demote": 1}, "hint demote=1 must be True or False"),
        ({"demote": True, "pin": 5}, "and False beside a pin"),
    ],
)
def test_impossible_hints_are_refused(hints, complaint):
    """An impossible hint raises InputError with its name, its value and the valid values."""
    with pytest.raises(InputError, match=complaint):
        Hints(**hints)


@pytest.mark.parametrize(
    ("share", "cached"),
    [(True, {"|abcd"}), (False, set()), (2 * BLOCK, {"|ab"}), (2 * BLOCK + 1, {"|ab"})],
)
def test_only_whole_shared_blocks_are_published(share, cached):
    """Only whole blocks of the shared tokens stay cached; the others are freed at the end."""
    cache = make(8)
    serve(cache, "abcd", hints=Hints(share=share))
    assert set(spans(cache)) == cached
    assert cache.pool.free_blocks == 8 - cache.tree.cached_blocks


def test_no_generated_block_is_published_beyond_the_share():
    """Generated blocks beyond the shared tokens are not cached, even if they have keys."""
    shape = {"prompt": 8, "output": 20, "keys": [1, 2], "output_keys": [3, 4, 5]}
    cached = [
        simulate([arrive("a", hints=hints, **shape)], blocks=16).result.cache.tree.cached_blocks
        for hints in (NO_HINTS, Hints(share=4))
    ]
    assert cached == [5, 1]


@pytest.mark.parametrize("policy", [LRU, MRU, SIEVE])
def test_a_pin_outlasts_pressure_under_every_policy(policy):
    """A pinned prefix is not evicted before its pin ends, and can be evicted afterwards."""
    cache = make(4, policy())
    serve(cache, "ab", **PIN)
    serve(cache, *"wxyz", now=49)
    assert {"|ab"} <= set(spans(cache))
    serve(cache, "mnop", now=50)
    assert set(spans(cache)) == {"|mnop"}
    assert not cache.tree.pins.yielded


def test_a_pin_begins_when_the_request_ends():
    """The duration of a pin counts from the end of its request."""
    cache = make(4)
    seq = start(cache, "ab", **PIN)
    cache.close(seq, 1000)
    serve(cache, "wx", "yz", now=1049)
    assert {"|ab"} <= set(spans(cache))


def test_a_pinned_prefix_does_not_expire():
    """A pinned prefix outlives the lifetime that the policy gives to spans."""
    for hints, hits in ((NO_HINTS, 0), (PIN["hints"], 1)):
        cache = make(8, Mortal())
        serve(cache, "ab", hints=hints)
        assert cache.probe(ask("ab"), 40) == hits


def test_pins_hold_at_most_half_of_the_pool():
    """Pins hold at most half of the pool; blocks beyond that are not pinned, but counted."""
    cache = make(8)
    serve(cache, "abcdef", **PIN)
    assert (cache.tree.pins.blocks, cache.tree.pins.refused_blocks) == (4, 2)
    serve(cache, "xy", **PIN)
    assert (cache.tree.pins.blocks, cache.tree.pins.refused_blocks) == (4, 4)
    serve(cache, "stuv", now=40)
    assert cache.probe(ask("abcdefg"), 40) == 4


def test_a_pin_that_splits_a_span_does_so_when_its_request_ends(tmp_path):
    """A pin of part of a span splits it at the end of its request, and the trace is valid."""
    requests = [
        arrive(0, 0, prompt=24, output=9, keys=[*range(6)], hints=Hints(pin=10**6)),
        arrive(1, 3, prompt=4, output=1),
    ]
    run = simulate(requests, blocks=10)
    times = [line["t"] for line in run.lines if line["event"] == "SPLIT"]
    assert times == [line["t"] for line in run.lines if line.get("request") == 0][-1:]
    (tmp_path / "t.jsonl").write_bytes(run.trace)
    assert check_trace(tmp_path / "t.jsonl").complete


def test_a_prefix_may_have_several_pins():
    """Blocks of two pins count once, and stay as long as the longer pin holds."""
    cache = make(8)
    serve(cache, "ab", **PIN)
    serve(cache, "abc", now=30, **PIN)
    assert cache.tree.pins.blocks == 3
    serve(cache, "wxyz", "stuv", now=60)
    assert cache.probe(ask("abcd"), 60) == 3
    assert len(cache.tree.pins) == 1


def test_pins_yield_if_no_sequence_is_open():
    """If no sequence is open, the pins that end first yield to a request that lacks blocks."""
    cache = make(8)
    serve(cache, "ab", hints=Hints(pin=90))
    serve(cache, "yz", hints=Hints(pin=80))
    serve(cache, "mnopqr")
    assert (cache.tree.pins.yielded, len(cache.tree.pins)) == (1, 1)
    assert {"|ab", "|mnopqr"} == set(spans(cache))


def test_pins_yield_to_the_reserve_of_a_request():
    """Pins yield for the blocks that must stay free beside a request, if there are as many."""
    cache = make(8)
    serve(cache, "ab", **PIN)
    with pytest.raises(OutOfBlocks):
        cache.open(ask("mnop"), reserve=5)
    assert len(cache.tree.pins) == 1
    cache.open(ask("mnop"), reserve=4)
    assert (cache.tree.pins.yielded, cache.available_blocks) == (1, 4)


def test_a_split_pin_ends_as_a_whole():
    """If a request splits a pinned span, both halves stay pinned and are unpinned together."""
    cache = make(8)
    serve(cache, "abc", **PIN)
    serve(cache, "axy", now=10)
    assert len(cache.tree.pins.held) == 2
    cache.tree.pins.end(50)
    assert (cache.tree.pins.blocks, cache.tree.pins.held) == (0, {})
    assert not any(span.ref_count for span in cache.tree.spans())
    cache.check_integrity()


def test_pins_of_blocks_in_use_do_not_yield():
    """A pin of the growing sequence's own prefix does not yield, since it frees no blocks."""
    cache = make(4)
    serve(cache, "ab", **PIN)
    start(cache, "abcd", now=1)
    assert not cache.make_room(1, 2)
    assert len(cache.tree.pins) == 1


def test_pins_hold_while_another_sequence_is_open():
    """Pins do not yield while another sequence is open: the request raises OutOfBlocks."""
    cache = make(8)
    serve(cache, "abcd", **PIN)
    other = start(cache, "xy")
    with pytest.raises(OutOfBlocks):
        cache.open(ask("mnop"))
    with pytest.raises(OutOfBlocks):
        cache.open(ask("stuvw"))
    cache.close(other)
    compute(cache, cache.open(ask("mnopq")))
    assert cache.tree.pins.yielded == 1


def test_a_request_that_never_fits_ends_no_pin():
    """A request larger than the pool raises OutOfBlocks, and no pin yields to it."""
    cache = make(4)
    serve(cache, "ab", **PIN)
    with pytest.raises(OutOfBlocks):
        cache.open(ask("mnopq"))
    assert len(cache.tree.pins) == 1


def test_pins_yield_to_the_only_open_sequence():
    """A pin yields to `extend` of the only open sequence."""
    cache = make(4)
    serve(cache, "ab", **PIN)
    seq = start(cache, "xy")
    cache.extend(seq, 2 * BLOCK)
    assert cache.tree.pins.yielded == 1


def test_a_demoted_prefix_is_evicted_first():
    """Blocks that only a demoted prefix has are evicted before less recently used ones."""
    cache = make(8)
    serve(cache, "xyz", "abc")
    serve(cache, "abd", "m", **DEMOTE)
    serve(cache, "uv")
    assert set(spans(cache)) == {"|xyz", "|ab", "ab|c", "|uv"}


@pytest.mark.parametrize(
    ("text", "cached"),
    [("abc", {"|x", "|ab", "ab|c", "|m", "|n"}), ("ab", {"|xy", "|a", "a|b", "|m", "|n"})],
)
def test_a_hit_cancels_a_demotion(text, cached):
    """After a hit, the blocks of a demoted prefix are evicted in their turn."""
    cache = make(6)
    serve(cache, "xyz")
    serve(cache, "ab", **DEMOTE)
    serve(cache, text, "m", "n")
    assert set(spans(cache)) == cached


def test_a_preemption_creates_no_pin():
    """The pin that a request asks for is created when it ends, not when it is preempted."""
    cache = make(8)
    request = ask("ab", **PIN)
    cache.close(compute(cache, cache.open(request)), preempted=True)
    assert not cache.tree.pins
    cache.close(compute(cache, cache.open(request, resumed=True)))
    assert len(cache.tree.pins) == 1


def test_a_server_full_of_pins_serves_all_requests(tmp_path):
    """Requests that pin all their blocks are all served, since pins yield."""
    shape = {"prompt": 24, "output": 20, "hints": Hints(pin=10**9)}
    requests = [
        arrive(index, index, keys=range(6 * index, 6 * index + 6), **shape)
        for index in range(12)
    ]
    run = simulate(requests, blocks=12)
    assert len(run.rows) == 12
    summary = run.result.summary()
    assert summary["pins"]["yielded"] > 0
    (tmp_path / "t.jsonl").write_bytes(run.trace)
    assert check_trace(tmp_path / "t.jsonl").complete
    free = simulate([attrs.evolve(request, hints=NO_HINTS) for request in requests], blocks=12)
    assert free.result.summary()["pins"] == {"refused_blocks": 0, "yielded": 0}
