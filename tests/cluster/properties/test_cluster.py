"""Clusters: equality with a server, complete service of all requests, and views of routers."""

from collections import Counter

import attrs
import hypothesis.strategies as st
import orjson
from helpers.clusters import Longest, RandomRouter, serve_cluster, serve_server
from helpers.schedulers import SCHEDULERS
from helpers.serving import Single, early, servers, tiered_servers
from hypothesis import given, settings

from kvcore import Request
from kvcore.testing.harness import lists
from kvcore_cluster.views import EventsView, Holders, SentIndex
from kvcore_engine.retention.window import Window

FEW = settings(max_examples=20, deadline=None)

schedulers = st.sampled_from(SCHEDULERS)
counts = st.integers(1, 4)


@st.composite
def failures(draw, replicas):
    """Draw failures of replicas in small times, each after the return from the last."""
    drawn = []
    for replica in range(draw(st.integers(0, replicas))):
        now = 0
        for _ in range(draw(st.integers(0, 2))):
            now += draw(st.integers(0, 300))
            gone = draw(st.integers(1, 200))
            drawn.append(f"replica={replica},at={now}ns,for={gone}ns")
            now += gone + 1
    return drawn


def unnumbered(run):
    """Return the lines of a trace without numbers, sorted by time and then by replica."""
    lines = [{**line, "n": 0} for line in run.lines]
    return sorted(lines, key=lambda line: (line["t"], line.get("replica", -1)))


def requests_first(lines):
    """Return the bytes of lines without numbers, of one time first requests and rejections.

    A cluster routes or rejects all requests of one time before a replica admits any of them.
    """
    first = ("REQUEST", "REJECT")
    lines = sorted(lines, key=lambda line: (line["t"], *(line["event"] != e for e in first)))
    return [orjson.dumps({**line, "n": 0}) for line in lines]


@FEW
@given(servers() | tiered_servers(), schedulers, st.booleans())
def test_a_cluster_of_one_is_a_server(server, scheduler, forgets):
    """A cluster of one has a server's trace, except for ROUTE lines and names of replicas."""
    # A cluster ignores hints for prefetches: a request is not routed before its arrival.
    requests = [early(request, None) for request in server.requests]
    server = attrs.evolve(server, requests=requests)
    retention = (lambda: Window(tokens=8)) if forgets and not server.tiers else None
    alone = server.run(scheduler, retention=retention and retention())
    cluster = serve_server(server, 1, scheduler=scheduler, retention=retention)
    lines = [line for line in cluster.lines if line["event"] != "ROUTE"]
    for line in lines:
        line.pop("replica", None)
    assert requests_first(lines) == requests_first(alone.lines)
    names = ("arrival", "admitted", "first_token", "finish", "hit", "loaded", "verdict")
    one, other = cluster.result.log, alone.result.log
    assert [sorted(getattr(one, name)) for name in names] == [
        sorted(getattr(other, name)) for name in names
    ]


@FEW
@given(st.data(), servers() | tiered_servers(), counts, st.sampled_from(["exact", "index"]))
def test_jumps_of_replicas_change_no_decision(data, server, replicas, view):
    """Routers and traces are the same whether replicas jump over steps or run each of them."""
    fail = data.draw(failures(replicas))
    lazy, slow = Longest(), Longest()
    one = serve_server(server, replicas, router=lazy, view=view, failures=fail)
    other = serve_server(
        server, replicas, router=slow, view=view, failures=fail, latency=Single
    )
    assert lazy.saw == slow.saw
    assert unnumbered(one) == unnumbered(other)


@FEW
@given(st.data(), servers() | tiered_servers(), counts)
def test_events_without_delay_are_exact(data, server, replicas):
    """A view of events without delay shows routers what an exact view shows.

    Eviction by age is left out: the cache drops expired blocks only when it meets them.
    """
    if "ttl" in server.eviction:  # expired blocks are dropped only when they are met
        server = attrs.evolve(server, eviction="lru")
    fail = data.draw(failures(replicas))
    late, exact = Longest(), Longest()
    one = serve_server(server, replicas, router=late, view="events:delay=0", failures=fail)
    other = serve_server(server, replicas, router=exact, view="exact", failures=fail)
    assert late.saw == exact.saw
    assert unnumbered(one) == unnumbered(other)


@FEW
@given(st.data(), servers() | tiered_servers(), st.integers(2, 4))
def test_every_request_is_served_once_or_rejected(data, server, replicas):
    """Each request has one row and one end, whatever replicas fail.

    The lines of the trace are in order of time, and a second run writes the same bytes.
    """
    fail = data.draw(failures(replicas))
    runs = [
        serve_server(server, replicas, router=RandomRouter(refuses=7), failures=fail)
        for _ in range(2)
    ]
    assert runs[0].trace == runs[1].trace
    run = runs[0]
    log, by_id = run.result.log, {request.id: request for request in server.requests}
    assert Counter(log.ids) == Counter(list(by_id))
    ends = Counter(
        line["request"] for line in run.lines if line["event"] in ("FINISH", "REJECT")
    )
    assert ends == Counter(list(by_id))
    for row, name in enumerate(log.ids):
        done = row not in log.reasons
        assert (log.finish[row] >= 0) == done
        assert not done or log.output[row] == by_id[name].output_tokens
        assert (run.result.replica[row] >= 0) or not done
    assert sum(run.result.served) + len(log.reasons) == len(by_id)
    times = [line["t"] for line in run.lines]
    assert times == sorted(times)
    assert [line["n"] for line in run.lines] == list(range(1, len(times) + 1))
    # All replicas return, so that every lost request is sent again.
    sent = Counter(line["request"] for line in run.of("ROUTE"))
    assert sum(sent.values()) - len(sent) == run.result.retried


# Views alone, against slow and plain implementations.

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
"""Prompts as paths of a tree: a key is the path from the root to its node."""


# Sums of some are the times to live below: an entry ends just then.
gaps = st.sampled_from([0, 1, 12, 13, 25, 40])


def keys_of(path):
    """Return the chained keys of a path."""
    return [path[: index + 1] for index in range(len(path))]


def ask(path, size=4):
    """Return a request whose last key is not full."""
    return Request(
        id=0, arrival=0, prompt_tokens=size * len(path) - 1, output_tokens=1,
        keys=keys_of(path), key_tokens=size,
    )  # fmt: skip


@given(lists(st.tuples(st.integers(0, 70), prompts), 20), prompts)
def test_holders_are_found_by_bisection(held, path):
    """`Holders.find` finds what a scan of every key of every replica finds."""
    index, slow = Holders(), {}
    for replica, each in held:
        index.add(replica, keys_of(each))
        slow.setdefault(replica, set()).update(keys_of(each))
    found = {
        replica: sum(key in keys for key in keys_of(path)) for replica, keys in slow.items()
    }
    assert index.find(keys_of(path), 4, 9) == {
        each: min(count * 4, 9) for each, count in found.items() if count
    }


@given(
    lists(st.tuples(gaps, st.integers(0, 3), prompts, st.booleans()), 30),
    st.sampled_from([None, 25, 100]),
    st.sampled_from([None, 1, 3, 8]),
)
def test_sent_index_holds_recently_sent_keys(steps, ttl, blocks):
    """`SentIndex` holds the keys sent within their time to live, up to a number of entries."""
    index = SentIndex(ttl=ttl, blocks=blocks)
    last, sent, now = {}, [], 0
    for gap, replica, path, fails in steps:
        now += gap
        while sent and ttl is not None and now - sent[0][0] >= ttl:
            _drop_oldest(last, sent)
        request = ask(path)
        found = {}
        for place, key in enumerate(request.keys, 1):
            for each in range(4):
                if (each, key) in last:
                    found[each] = min(place * 4, request.prompt_tokens)
        assert index.find(request, now) == found
        if fails:
            index.lost(replica, now)
            for held in [held for held in last if held[0] == replica]:
                del last[held]
            sent = [each for each in sent if each[1] != replica]
            continue
        index.sent(request, replica, now)
        keys = request.keys[:blocks]
        sent = [each for each in sent if (each[1], each[2][-1]) != (replica, keys[-1])]
        sent.append((now, replica, keys, len(sent) + 1000 * now + id(request)))
        last.update({(replica, key): sent[-1][3] for key in keys})
        while blocks is not None and len(last) > blocks:
            _drop_oldest(last, sent)
        assert len(index) == len(last)


def _drop_oldest(last, sent):
    """Drop the keys that were sent first, unless they were sent again since."""
    _, replica, keys, serial = sent.pop(0)
    for key in keys:
        if last.get((replica, key)) == serial:
            del last[replica, key]


@given(
    lists(st.tuples(st.integers(0, 9), prompts), 12),
    st.integers(0, 20),
    prompts,
)
def test_events_are_visible_after_the_delay(stored, delay, path):
    """An event of a replica is visible from the delay after it on, and not before."""
    view, now, log = EventsView(delay=delay), 0, []
    for gap, each in stored:
        now += gap
        view.stored(0, keys_of(each), now)
        log.append((now, each))
        request = ask(path)
        known = {key for at, each in log if at + delay <= now for key in keys_of(each)}
        count = sum(key in known for key in request.keys)
        hit = min(count * 4, request.prompt_tokens)
        assert view.find(request, now) == ({0: hit} if hit else {})


def test_events_under_way_are_lost_with_their_replica():
    """A failed replica holds nothing, whatever events of it are still on the way."""
    view = EventsView(delay=10)
    view.stored(0, keys_of((1, 2)), 0)
    view.stored(1, keys_of((1,)), 0)
    view.lost(0, 5)
    view.stored(0, keys_of((1,)), 6)
    assert view.find(ask((1, 2)), 10) == {1: 4}
    assert view.find(ask((1, 2)), 16) == {0: 4, 1: 4}
    view.removed(1, keys_of((1,)), 20)
    assert view.find(ask((1, 2)), 30) == {0: 4}


def test_a_prompt_without_keys_hits_nowhere():
    """A prompt without keys hits nowhere and is not added to the index."""
    index = SentIndex()
    request = Request(id=0, arrival=0, prompt_tokens=3, output_tokens=1, key_tokens=4)
    index.sent(request, 0, 0)
    assert index.find(request, 0) == {}
    assert serve_cluster([request]).result.served == [1, 0]
