"""`Belady`, the optimum, on prompts small enough to follow by hand."""

from __future__ import annotations

import pytest
from helpers.tries import requests

from kvcore import InputError, Request
from kvcore.cache.layout import BlockLayout
from kvcore_replay.belady import Belady, Future


def read(prompts, ratio=1):
    """Return the future of prompts whose letters are keys of `ratio` blocks."""
    return Future.read(requests(prompts.split(), ratio), BlockLayout("keys", 1, ratio))


def play(prompts, blocks, *, bypass=False, ratio=1):
    """Return (hits, evicted blocks) of the optimum."""
    stats, evicted = Belady(bypass).replay(read(prompts, ratio), blocks, 1)
    return stats.hit_blocks, evicted


@pytest.mark.parametrize(
    ("prompts", "blocks", "options", "found"),
    [
        # The block whose next request is furthest goes first: `b`, and not `a`.
        ("a b c a b", 2, {}, (1, 2)),
        # A block that is never requested again goes first: `b` before `a`.
        ("a b c c a", 2, {}, (2, 1)),
        # Of blocks that one request needs next, the deepest goes first.
        ("abc x abc", 3, {}, (2, 2)),
        # Without bypass the requested blocks must be cached; with it, `b` does not evict `a`.
        ("a b a", 1, {}, (0, 2)),
        ("a b a", 1, {"bypass": True}, (1, 1)),
        # With bypass a part of a request can be cached: of `cde` only `c`, beside `ab`.
        ("ab cde ab c", 3, {"bypass": True}, (3, 2)),
        # With three blocks per key, evicting one block costs one hit, not three.
        ("ab x ab", 8, {"ratio": 3}, (5, 2)),
        # With three blocks per key, a pool of four blocks holds a key and a third.
        ("ab ab", 4, {"ratio": 3}, (4, 0)),
    ],
)
def test_hits_and_evictions_are_those_by_hand(prompts, blocks, options, found):
    """Hits and evicted blocks of small workloads are those found by hand."""
    assert play(prompts, blocks, **options) == found


def test_a_request_without_keys_is_no_lookup():
    """A request without keys is counted as a request, but not as a lookup."""
    future = Future.read(
        [Request(id=0, prompt_tokens=9, key_tokens=1), *requests(["a"])],
        BlockLayout("keys", 1, 1),
    )
    stats, _ = Belady().replay(future, 1, 1)
    assert (stats.requests, stats.looked_up) == (2, 1)


def test_hit_ratios_are_weighted_by_block_token_and_request():
    """Hit ratios are weighted by block, by token (here the same), and by request."""
    stats, _ = Belady().replay(read("ab abc"), 3, 1)
    assert stats.ratios() == {"block": 2 / 5, "token": 2 / 5, "request": (0 + 2 / 3) / 2}


def test_the_future_is_kept_in_runs():
    """The future of a prompt is stored as runs of blocks with the same next request.

    Blocks that no later request needs are in no run.
    """
    future = read("abcd ab abc")
    runs = list(zip(future.wanted, future.ends, strict=True))
    assert runs[future.starts[0] : future.starts[1]] == [(1, 2), (2, 3)]
    assert runs[future.starts[1] : future.starts[2]] == [(2, 2)]
    assert list(future.reused) == [0, 2, 3]


def test_a_key_under_two_parents_has_no_future():
    """A key that follows two different keys raises InputError with the request and the key."""
    wrong = [
        Request(id="first", prompt_tokens=2, keys=["a", "b"], key_tokens=1),
        Request(id="second", prompt_tokens=2, keys=["c", "b"], key_tokens=1),
        Request(id="third", prompt_tokens=2, keys=["a", "b"], key_tokens=1),
    ]
    with pytest.raises(InputError, match="request 'second': key 'b' does not follow"):
        Future.read(wrong, BlockLayout("keys", 1, 1))


@pytest.mark.parametrize("prompts", ["ab b b", "b ab", "aa", "ab cab", "ab a b"])
def test_a_key_that_first_stood_elsewhere_has_no_future(prompts):
    """A key keeps its place: one that began no prompt begins none later, and the reverse."""
    wrong = [
        Request(id=n, prompt_tokens=len(keys), keys=list(keys), key_tokens=1)
        for n, keys in enumerate(prompts.split())
    ]
    with pytest.raises(InputError, match="does not follow the keys it followed"):
        Future.read(wrong, BlockLayout("keys", 1, 1))


def test_a_request_reuses_no_more_blocks_than_it_has():
    """Of a last key with more tokens than the prompt has left, its blocks alone are reused."""
    twice = [Request(id=n, prompt_tokens=24, keys=[1, 2], key_tokens=16) for n in range(2)]
    future = Future.read(twice, BlockLayout("tokens", 8, 16))
    assert (list(future.lengths), list(future.reused)) == ([3, 3], [0, 3])


@pytest.mark.parametrize(
    ("options", "bypass"),
    [({}, False), ({"bypass": "true"}, True), ({"bypass": "false"}, False)],
)
def test_bypass_is_parsed_from_text(options, bypass):
    """The option `bypass` is true or false in text, and false by default."""
    assert Belady.from_text(options) == Belady(bypass=bypass)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bypas": "true"}, r"bound plugin 'optimum' has no option 'bypas' \(did you mean"),
        ({"bypass": "1"}, "option 'bypass' of bound plugin 'optimum' takes true or false, not"),
    ],
)
def test_another_option_than_bypass_is_refused(options, message):
    """An unknown option, and a value that is none, raise InputError as for plugins."""
    with pytest.raises(InputError, match=message):
        Belady.from_text(options)
