"""Who is told of waiting requests, and when; and what look-ahead makes of it."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
from helpers.caches import ask, make, serve, spans, start
from helpers.schedulers import Urgent
from helpers.serving import ask as request
from helpers.serving import serve as simulate

from kvcore import InputError, Plugins, PolicyError
from kvcore.analysis import replay, served
from kvcore_plugins.eviction import LRU, Lookahead


@attrs.define(slots=False, eq=False)
class Listening(LRU):
    """LRU that writes down who waits, and who does no longer."""

    name: ClassVar[str] = "listening"

    look: int | None = attrs.field(default=0)
    told: list[Any] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self):
        """Look as far ahead as it was made to."""
        self.lookahead = self.look

    def on_queued(self, request, now, *, front=False):
        """Write it down."""
        self.told.append(f"{now} {'^' if front else '+'}{request.id}")

    def on_dequeued(self, request, now):
        """Write it down."""
        self.told.append(f"{now} -{request.id}")


def told_in_replay(look, *arrivals):
    """Return what a policy hears in untimed replay of requests "0", "1", and so on."""
    policy = Listening(look)
    requests = [attrs.evolve(ask("a"), id=n, arrival=at) for n, at in enumerate(arrivals)]
    replay(requests, make(8, policy))
    return policy.told


def test_untimed_replay_tells_of_the_next_ones():
    """Before a request opens, it and the next one wait; once it has closed, it does not."""
    told = ["5 +0", "5 +1", "5 -0", "7 +2", "7 -1", "9 -2"]
    assert told_in_replay(1, 5, 7, 9) == told


def test_untimed_replay_tells_of_none_ahead():
    """Without looking ahead, only the request itself is awaited."""
    assert told_in_replay(0, 5, 7) == ["5 +0", "5 -0", "7 +1", "7 -1"]


def test_untimed_replay_refuses_two_of_one_id_among_those_ahead():
    """Policies know who waits by id: the request is at fault, not the policy."""
    twice = [attrs.evolve(ask("a"), id=name) for name in (1, 2, 1)]
    with pytest.raises(InputError, match=r"request 1 comes twice.*'lookahead'"):
        replay(twice, make(8, Lookahead()))


def test_untimed_replay_tells_of_all():
    """Told of all, a policy knows the last request before the first is opened."""
    assert told_in_replay(None, 5, 7, 9)[:3] == ["5 +0", "5 +1", "5 +2"]


def test_untimed_replay_reads_no_further_than_it_tells():
    """A workload is streamed: with two ahead, the third request is read, not the fourth."""
    read = []

    def requests():
        for number in range(4):
            read.append(number)
            yield ask("a")

    next(served(requests(), make(8, Listening(2))))
    assert read == [0, 1, 2]


def told_in_server(requests, **options):
    """Return what a policy hears in a server."""
    policy = Listening()
    run = simulate(requests, eviction=policy, **options)
    return policy.told, run


def test_a_server_tells_who_queues_up_and_who_gets_a_seat():
    """B arrives while a has the only seat, and waits until it leaves."""
    told, _ = told_in_server([request("a", output=2), request("b", 3)], max_seqs=1)
    assert told == ["0 +a", "0 -a", "3 +b", "20 -b"]


def test_who_is_rejected_never_waits():
    """A request that can never be served does not queue up."""
    told, run = told_in_server([request("a", prompt=400), request("b")], blocks=8)
    assert "a" in run.rejected
    assert told == ["0 +b", "0 -b"]


def test_who_is_preempted_waits_again_before_others():
    """B loses its blocks, is told of as first in the queue, and leaves it with a new seat."""
    keys = {"a": [1, 2, 3], "b": [4, 5, 6]}
    requests = [request(name, ord(name) - 97, 12, 14, keys=keys[name]) for name in keys]
    told, run = told_in_server(requests, blocks=8)
    assert run.rows["b"]["recomputes"] == 1
    assert told == ["0 +a", "0 -a", "1 +b", "10 -b", "50 ^b", "140 -b"]


def test_who_is_paused_waits():
    """B takes the seat of a, which waits with its blocks until b is done."""
    requests = [request("a", output=5, priority=1), request("b", 12)]
    told, run = told_in_server(requests, scheduler=Urgent(), max_seqs=1)
    assert run.rows["a"]["pauses"] == 1
    assert [line.split()[1] for line in told] == ["+a", "-a", "+b", "^a", "-b", "-a"]


def test_lookahead_keeps_what_is_waited_for():
    """The least recent stays, since a request waits for it; LRU would have it go."""
    policy = Lookahead()
    cache = make(2, policy, accounting="keys")
    serve(cache, "a", "b")
    policy.on_queued(ask("a"), 0)
    serve(cache, "c")
    assert set(spans(cache)) == {"|a", "|c"}


def test_lookahead_evicts_what_is_needed_last():
    """Of two that are waited for, that of the later request goes."""
    policy = Lookahead()
    cache = make(2, policy, accounting="keys")
    serve(cache, "a", "b")
    policy.on_queued(ask("b"), 0)
    policy.on_queued(ask("a"), 0)
    serve(cache, "c")
    assert set(spans(cache)) == {"|b", "|c"}


def test_lookahead_puts_the_preempted_first():
    """What comes to the front of the queue is needed first, though it was told of last."""
    policy = Lookahead()
    cache = make(2, policy, accounting="keys")
    serve(cache, "a", "b")
    policy.on_queued(ask("b"), 0)
    policy.on_queued(ask("a"), 0, front=True)
    serve(cache, "c")
    assert set(spans(cache)) == {"|a", "|c"}


def test_lookahead_forgets_who_was_served():
    """Once nobody waits, it is LRU."""
    policy = Lookahead()
    cache = make(2, policy, accounting="keys")
    serve(cache, "a", "b")
    waiting = ask("a")
    policy.on_queued(waiting, 0)
    policy.on_dequeued(waiting, 0)
    serve(cache, "c")
    assert set(spans(cache)) == {"|b", "|c"}


def test_lookahead_lets_a_part_of_a_span_go():
    """The end of a span that nobody needs goes first, then the least recent, then the rest."""
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


def test_lookahead_counts_the_last_of_what_is_left():
    """Three blocks are missing, two of a span are not waited for: those go, and one more."""
    policy = Lookahead()
    cache = make(5, policy, accounting="keys")
    serve(cache, "abcd", "x")
    policy.on_queued(ask("ab"), 0)
    serve(cache, "uvw")
    assert set(spans(cache)) == {"|ab", "|uvw"}


def test_lookahead_knows_what_blocks_of_several_keys_are():
    """Counting tokens in blocks of two keys, waiting requests are matched all the same."""
    policy = Lookahead()
    cache = make(4, policy, key_tokens=2)
    for text in ("ab", "cd", "ef", "gh"):
        serve(cache, text, key_tokens=2)
    policy.on_queued(ask("abxy", key_tokens=2), 0)
    serve(cache, "ij", key_tokens=2)
    assert {text.strip("|") for text in spans(cache)} >= {"a"}


def test_lookahead_keeps_nothing_of_those_served():
    """After a replay it remembers nobody."""
    policy = Lookahead(requests=3)
    replay([ask(text) for text in ("ab", "ac", "b", "abc")], make(3, policy))
    assert (policy._waiting, policy._turns) == ({}, {})


@pytest.mark.parametrize("answer", [0, 3, None, True])
def test_a_tail_must_be_a_part_of_the_victim(answer):
    """A policy that lets go of nothing, or more than there is, is refused by name."""

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
def test_a_failure_names_the_method(method):
    """A policy that raises is named, with the method that did."""

    def fail(*_, **__):
        msg = "no luck"
        raise RuntimeError(msg)

    cls = type("Failing", (LRU,), {"name": "failing", method: fail})
    with pytest.raises(PolicyError, match=rf"'failing' .* raised RuntimeError in {method}\(\)"):
        replay([ask("a"), ask("b")], make(1, cls()))
    if method != "evictable_blocks":
        with pytest.raises(PolicyError, match=rf"raised RuntimeError in {method}\(\)"):
            simulate([request("a")], eviction=cls())


def test_a_negative_window_is_refused():
    """There is nothing to see behind."""
    with pytest.raises(InputError, match="requests=-1 must be 0 or more, or all"):
        Plugins().build("eviction", "lookahead:requests=-1")
