"""The eviction policy `tool-ttl`, which learns how long each tool takes."""

from types import SimpleNamespace

import pytest
from helpers.caches import ask, make, serve, spans, start

from kvcore import InputError, KVCache
from kvcore_plugins.eviction import LRU, ToolTTL, WorkloadAware, tool_ttl
from kvcore_replay.untimed import replay
from kvcore_tiers.hierarchy import Tiers

SECOND = 10**9


def call(text, now, tool, session="s"):
    """Return a request of a session, at a time in seconds, whose answer calls a tool."""
    return ask(text, arrival=now * SECOND, session=session, tool=tool)


def rounds(tool, seconds, count, start=0):
    """Return sessions that call a tool once and return after some seconds."""
    return [
        call("zy"[:length], start + 1000 * index + after, tool, f"{tool} {index}")
        for index in range(count)
        for length, after in ((1, 0), (2, seconds))
    ]


def kept(eviction, requests, blocks=4):
    """Return the cached spans after `requests`, served in the order of their arrival."""
    cache = make(blocks, eviction, accounting="keys")
    replay(sorted(requests, key=lambda request: request.arrival), cache)
    return set(spans(cache))


def test_a_prefix_that_waits_for_a_slow_tool_outlives_an_overdue_one():
    """A prefix that waits for a slow tool outlives one overdue from a fast tool."""
    lessons = [*rounds("build", 100, 20), *rounds("grep", 1, 20, 500)]
    waiting = [
        call("ab", 30_000, "build", "slow"),
        call("cd", 30_020, "grep", "fast"),
        call("x", 30_060, None, "new"),
    ]
    assert {"|ab", "|c"} <= kept(ToolTTL(), [*lessons, *waiting])
    assert {"|cd", "|a"} <= kept(LRU(), [*lessons, *waiting])


def test_a_prefix_of_a_tool_that_never_returned_is_evicted_first():
    """A prefix whose tool has never returned is evicted before an older one."""
    lessons = [call("z", 1000 * index, "quit", f"quit {index}") for index in range(20)]
    lessons += rounds("build", 100, 20, 500)
    waiting = [
        call("ab", 30_000, "build", "slow"),
        call("cd", 30_020, "quit", "gone"),
        call("x", 30_060, None, "new"),
    ]
    assert {"|ab", "|c"} <= kept(ToolTTL(), [*lessons, *waiting])


def test_requests_without_sessions_are_evicted_as_by_lru():
    """Without sessions, and with equal costs, the policy evicts the blocks that LRU evicts."""
    texts = ["a", "b", "c", "a", "d", "e"]
    for policy in (ToolTTL(), LRU()):
        cache = KVCache(3, 4, eviction=policy, accounting="keys", recompute=lambda _, n: n)
        replay([ask(text, arrival=n * 60 * SECOND) for n, text in enumerate(texts)], cache)
        assert {span.keys()[0] for span in cache.tree.spans()} == {"a", "d", "e"}


@pytest.mark.parametrize(
    ("text", "session", "front", "ended"),
    [
        ("abc", "", False, 1),
        ("xyz", "", False, 0),
        ("a", "", False, 0),
        ("abc", None, False, 0),
        ("abc", "", True, 0),
    ],
)
def test_what_is_sent_in_another_branch_does_not_end_a_wait(text, session, front, ended):
    """A wait ends only with a prompt that extends the waiting prefix, and is sent after it.

    Other requests of the session do not end it, nor those without one or preempted ones.
    """
    policy = ToolTTL()
    replay([call("ab", 0, "grep", "")], make(16, policy))
    policy.on_queued(call(text, 4, "grep", session), 4 * SECOND, front=front)
    assert sum(sum(tool.ended) for tool in policy._tools.values()) == ended


def values(policy, tool, age):
    """Return the score of a prefix that has waited for a tool, for an age in seconds."""
    span = SimpleNamespace(data=(tool, 0), loss_seconds=1.0)
    return policy.score(span, age * SECOND)


def test_a_tool_that_was_never_seen_is_like_all_tools():
    """A prefix that waits for a new tool is worth what the waits for all tools say."""
    policy = ToolTTL()
    replay(rounds("build", 100, 200), make(16, policy, accounting="keys"))
    policy._learn(10**6 * SECOND)
    assert values(policy, "new", 90) > 1.5 * values(policy, None, 90)
    assert values(policy, "new", 90) == pytest.approx(values(policy, "build", 90), rel=0.1)


@pytest.mark.parametrize(
    ("policy", "waits"),
    [
        (ToolTTL(), {"|ab": "grep", "|cd": None}),
        (WorkloadAware(type="tool"), {"|ab": ("grep", 1), "|cd": (None, 1)}),
        (WorkloadAware(), {"|ab": ("of ab", 1), "|cd": ("of cd", 1)}),
    ],
)
def test_a_preemption_when_another_request_ends_is_not_its_end(policy, waits):
    """Of two paths released at one time, that of the request that ended waits for its tool."""
    cache = make(16, policy, accounting="keys")
    sequences = [
        start(cache, text, now=0, session=text, tool="grep", tenant=f"of {text}")
        for text in ("ab", "cd")
    ]
    cache.close(sequences[0], 1)
    cache.close(sequences[1], 1, preempted=True)
    assert {name: span.data[0] for name, span in spans(cache).items()} == waits


def test_a_tool_is_forgotten_with_all_of_its_waits(monkeypatch):
    """Beyond the most tools, that which was counted least recently goes as a whole."""
    monkeypatch.setattr(tool_ttl, "_MOST_TOOLS", 2)
    policy = ToolTTL()
    lessons = [
        *rounds("build", 1, 4),
        *rounds("grep", 1, 4, 9_000),
        *rounds("ls", 1, 4, 20_000),
    ]
    replay(lessons, make(16, policy, accounting="keys"))
    policy._learn(10**6 * SECOND)
    assert policy._tools.keys() == policy._values.keys() == {"grep", "ls"}


def test_a_prior_of_no_weight_is_refused():
    """A prior of no weight raises InputError."""
    with pytest.raises(InputError, match="prior=0 must be a number of waits above 0"):
        ToolTTL(prior=0)


def test_a_block_stored_in_a_tier_costs_its_time_to_load():
    """The cost of losing a block is its time to load from a tier, if that is shorter."""
    cache = make(4, accounting="keys")
    serve(cache, "ab")
    span = spans(cache)["|ab"]
    assert span.loss_seconds == span.recompute_seconds
    Tiers(cache, ["host:memory=1MiB,read_bandwidth=1GB,latency=0"], 100)
    assert span.loss_seconds == 1e-7 < span.recompute_seconds
