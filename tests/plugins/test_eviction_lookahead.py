"""Calls of `on_queued` and `on_dequeued`, and the policy `lookahead`, which uses them."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
from helpers.caches import ask, make, serve, spans, start
from helpers.schedulers import Urgent
from helpers.serving import ask as request
from helpers.serving import serve as simulate

from kvcore import InputError, PolicyError
from kvcore_plugins.eviction import LRU, Lookahead
from kvcore_replay.untimed import replay, served


@attrs.define(slots=False, eq=False)
class Listening(LRU):
    """LRU that records the requests that are queued and dequeued."""

    name: ClassVar[str] = "listening"

    look: int | None = attrs.field(default=0)
    calls: list[Any] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self):
        """Set the look-ahead."""
        self.lookahead = self.look

    def on_queued(self, request, now, *, front=False):
        """Record the time and the request."""
        self.calls.append(f"{now} {'^' if front else '+'}{request.id}")

    def on_dequeued(self, request, now):
        """Record the time and the request."""
        self.calls.append(f"{now} -{request.id}")


def calls_in_replay(look, *arrivals):
    """Return the calls of a policy in untimed replay of requests "0", "1", and so on."""
    policy = Listening(look)
    requests = [attrs.evolve(ask("a"), id=n, arrival=at) for n, at in enumerate(arrivals)]
    replay(requests, make(8, policy))
    return policy.calls


def test_untimed_replay_queues_the_next_requests():
    """With a look-ahead of 1, a request and the next one are queued before the first opens.

    A request is dequeued when it has closed.
    """
    calls = ["5 +0", "5 +1", "5 -0", "7 +2", "7 -1", "9 -2"]
    assert calls_in_replay(1, 5, 7, 9) == calls


def test_untimed_replay_refuses_equal_ids_within_the_lookahead():
    """Two requests with one id within the look-ahead raise InputError with the id."""
    twice = [attrs.evolve(ask("a"), id=name) for name in (1, 2, 1)]
    with pytest.raises(InputError, match=r"request 1 comes twice.*'lookahead'"):
        replay(twice, make(8, Lookahead()))


def test_untimed_replay_reads_no_further_than_the_lookahead():
    """With a look-ahead of 2, three requests are read when the first one is served."""
    read = []

    def requests():
        for index in range(4):
            read.append(index)
            yield ask("a")

    next(served(requests(), make(8, Listening(2))))
    assert read == [0, 1, 2]


def calls_in_server(requests, **options):
    """Return the calls of a policy in a server, and the run."""
    policy = Listening()
    run = simulate(requests, eviction=policy, **options)
    return policy.calls, run


def test_a_server_queues_on_arrival_and_dequeues_on_admission():
    """A server queues a request on arrival and dequeues it when it is admitted."""
    calls, _ = calls_in_server([request("a", output=2), request("b", 3)], max_seqs=1)
    assert calls == ["0 +a", "0 -a", "3 +b", "20 -b"]


def test_a_rejected_request_is_not_queued():
    """A request that can never be served is not queued."""
    calls, run = calls_in_server([request("a", prompt=400), request("b")], blocks=8)
    assert "a" in run.rejected
    assert calls == ["0 +b", "0 -b"]


def test_a_preempted_request_is_queued_at_the_front():
    """A preempted request is queued at the front, and dequeued when it is admitted again."""
    keys = {"a": [1, 2, 3], "b": [4, 5, 6]}
    requests = [request(name, ord(name) - 97, 12, 14, keys=keys[name]) for name in keys]
    calls, run = calls_in_server(requests, blocks=8)
    assert run.rows["b"]["recomputes"] == 1
    assert calls == ["0 +a", "0 -a", "1 +b", "10 -b", "50 ^b", "140 -b"]


def test_a_paused_request_is_queued():
    """A paused request is queued at the front until it runs again."""
    requests = [request("a", output=5, priority=1), request("b", 12)]
    calls, run = calls_in_server(requests, scheduler=Urgent(), max_seqs=1)
    assert run.rows["a"]["pauses"] == 1
    assert [line.split()[1] for line in calls] == ["+a", "-a", "+b", "^a", "-b", "-a"]


@pytest.mark.parametrize(
    ("calls", "left"),
    [
        (["+a"], {"|a", "|c"}),
        (["+b", "+a"], {"|b", "|c"}),
        (["+b", "^a"], {"|a", "|c"}),
        (["+a", "-a"], {"|b", "|c"}),
    ],
    ids=["one", "the last one is evicted", "one at the front", "none is queued now"],
)
def test_lookahead_keeps_spans_of_queued_requests(calls, left):
    """Spans that queued requests need are kept, those of the first in the queue longest.

    Spans that no queued request needs are evicted by LRU.
    """
    policy = Lookahead()
    cache = make(2, policy, accounting="keys")
    serve(cache, "a", "b")
    requests = {name: ask(name) for name in "ab"}
    for how, name in calls:
        if how == "-":
            policy.on_dequeued(requests[name], 0)
        else:
            policy.on_queued(requests[name], 0, front=how == "^")
    serve(cache, "c")
    assert set(spans(cache)) == left


def test_lookahead_evicts_the_unneeded_end_of_a_span_first():
    """The end of a span that no request needs is evicted first.

    Then come the least recent spans; the part that is needed stays.
    """
    policy = Lookahead()
    cache = make(5, policy, accounting="keys")
    serve(cache, "x", "abcd")
    policy.on_queued(ask("ab"), 0)
    for text, left in (
        ("y", {"|abcd", "|y"}),
        ("z", {"|abc", "|y", "|z"}),
        ("w", {"|ab", "|y", "|z", "|w"}),
        ("uv", {"|ab", "|w", "|uv"}),
    ):
        serve(cache, text)
        assert set(spans(cache)) == left


def test_lookahead_evicts_another_span_if_an_end_does_not_suffice():
    """Where the end of a span does not suffice, it is evicted and another span as well."""
    policy = Lookahead()
    cache = make(5, policy, accounting="keys")
    serve(cache, "abcd", "x")
    policy.on_queued(ask("ab"), 0)
    serve(cache, "uvw")
    assert set(spans(cache)) == {"|ab", "|uvw"}


def test_lookahead_matches_blocks_of_several_keys():
    """Queued requests are matched to blocks of several keys in `tokens` accounting.

    Each text has a block of two keys, of which its span shows the first.
    """
    for queued, left in ((False, {"|c", "|e", "|g", "|i"}), (True, {"|a", "|e", "|g", "|i"})):
        policy = Lookahead()
        cache = make(4, policy, key_tokens=2)
        for text in ("ab", "cd", "ef", "gh"):
            serve(cache, text, key_tokens=2)
        if queued:
            policy.on_queued(ask("abxy", key_tokens=2), 0)
        serve(cache, "ij", key_tokens=2)
        assert set(spans(cache)) == left


def test_lookahead_keeps_no_record_after_a_replay():
    """After a replay `lookahead` has no record of any request."""
    policy = Lookahead(requests=3)
    replay([ask(text) for text in ("ab", "ac", "b", "abc")], make(3, policy))
    assert (policy._waiting, policy._turns) == ({}, {})


@pytest.mark.parametrize("answer", [0, 3, None, True])
def test_evictable_blocks_outside_the_span_are_refused(answer):
    """`evictable_blocks` must return a part of the span, else PolicyError names the policy."""

    class Greedy(LRU):
        name = "greedy"

        def evictable_blocks(self, span):
            return answer

    cache = make(2, Greedy())
    serve(cache, "ab")
    with pytest.raises(
        PolicyError, match=r"'greedy' .* evictable_blocks\(\) of .* give 1 to 2"
    ):
        start(cache, "c")


@pytest.mark.parametrize("method", ["on_queued", "on_dequeued", "evictable_blocks"])
def test_a_policy_that_raises_is_reported_with_the_method(method):
    """The error about a policy that raises has its name and the method."""

    def fail(*_, **__):
        msg = "no luck"
        raise RuntimeError(msg)

    cls = type("Failing", (LRU,), {"name": "failing", method: fail})
    with pytest.raises(PolicyError, match=rf"'failing' .* raised RuntimeError in {method}\(\)"):
        replay([ask("a"), ask("b")], make(1, cls()))
    if method != "evictable_blocks":
        with pytest.raises(PolicyError, match=rf"raised RuntimeError in {method}\(\)"):
            simulate([request("a")], eviction=cls())
