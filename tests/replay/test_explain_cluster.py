"""Reasons for misses on a cluster: those of one server, and blocks in other replicas."""

from __future__ import annotations

import pytest
from helpers.clusters import record_cluster
from helpers.traces import lines, seal
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import read_events
from kvcore.errors import TraceError
from kvcore_replay.check.trace import check_event
from kvcore_replay.misses.explain import Holders, explain
from kvcore_replay.report.misses import RequestReport
from kvcore_replay.state.replicas import ServerReader


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the trace of a cluster in which one replica fails and returns."""
    return record_cluster(tmp_path_factory.mktemp("cluster") / "trace.jsonl")


def test_every_missed_token_has_one_reason(path):
    """The hit and the losses of each request add up to its prompt.

    The summary adds up the losses of all requests.
    """
    found = explain(path)
    for reasons in found.requests.values():
        assert reasons.hit + sum(loss.tokens for loss in reasons.losses) == reasons.tokens
        at = reasons.hit
        for loss in reasons.losses:
            assert loss.first == at
            at = loss.end
    summary = found.summary()
    assert summary.admitted == 30
    assert sum(lost.tokens for lost in summary.categories.values()) == summary.missed_tokens


def test_a_request_is_explained_by_its_last_replica(path):
    """Requests are in the order of arrival, each with the replica of its last ROUTE."""
    routed, came = {}, {}
    for event in read_events(path):
        if event.event == "ROUTE":
            routed[event.request] = event.replica
        elif event.event == "REQUEST":
            came[event.id] = event.t
    found = explain(path).requests
    assert {name: each.replica for name, each in found.items()} == routed
    assert [*found] == [*came]
    assert {name: each.arrived for name, each in found.items()} == came


def test_elsewhere_losses_were_held_by_the_fullest_other_replica(path):
    """A loss is `elsewhere` as far as the fullest other replica held more than the hit.

    The caches are rebuilt by the check of each line, and searched key by key.
    """
    checker, best = None, {}
    reader = read_events(path)
    for event in reader:
        if event.event == "ROUTE":
            prompt = next(request for request in checker._placed.requests.values()
                          if request.id == event.request)  # fmt: skip
            best[event.request] = max(
                each.life.cached_tokens(prompt)
                for index, each in enumerate(checker.replicas)
                if index != event.replica
            )
        checker = check_event(reader, checker, event)
    lost = 0
    for name, reasons in explain(path).requests.items():
        elsewhere = [loss for loss in reasons.losses if loss.category == "elsewhere"]
        assert sum(loss.tokens for loss in elsewhere) == max(0, best[name] - reasons.hit)
        for loss in elsewhere:
            assert loss.replica not in (None, reasons.replica)
            assert (loss.first, loss.eviction, loss.place) == (reasons.hit, None, None)
        lost += len(elsewhere)
    assert lost


def test_one_replica_is_explained_like_a_server(path):
    """`replica=` explains the requests of one replica, without the reason `elsewhere`."""
    whole, part = explain(path), explain(path, replica=0)
    assert part.requests.keys() == {
        event.id for event in ServerReader(path, 0) if event.event == "REQUEST"
    }
    assert "elsewhere" not in part.categories
    ended_here = [name for name in part.requests if whole.requests[name].replica == 0]
    assert ended_here
    for name in ended_here:
        assert part.requests[name].hit == whole.requests[name].hit


def test_json_and_text_have_the_replica(path):
    """The JSON and the text of a request name its replica and the one that had its blocks."""
    found = explain(path)
    reasons = next(
        request
        for request in found.requests.values()
        if any(loss.category == "elsewhere" for loss in request.losses)
    )
    document = found.request_dict(reasons)
    (loss,) = [loss for loss in document["losses"] if loss["category"] == "elsewhere"]
    assert document["replica"] != loss["replica"]
    text = str(RequestReport(found, reasons))
    assert f"of replica {document['replica']}" in text
    assert f"Replica {loss['replica']} had them" in text


def test_a_new_prompt_is_new_to_its_replica(path):
    """Of a prompt whose keys its replica lacks, it is not said that no request had them."""
    found = explain(path)
    texts = [
        str(RequestReport(found, reasons))
        for reasons in found.requests.values()
        if any(loss.way == "starts" for loss in reasons.losses)
    ]
    sentence = "No request that its replica admitted before begins with this block."
    assert texts
    assert all(sentence in text for text in texts)


def test_refused_requests_are_rejected_with_the_reason(tmp_path):
    """Requests that were rejected before an admission have the reason, and no losses.

    Their replica is that of the last ROUTE. Request 7 was routed to replica 2, the last one to
    fail; the requests after request 8 were never routed.
    """
    fail = [f"replica={index},at=0.2" for index in range(3)]
    found = explain(record_cluster(tmp_path / "trace.jsonl", fail=fail))
    refused = {
        name: request for name, request in found.requests.items() if request.state == "rejected"
    }
    replicas = {name: each.replica for name, each in refused.items()}
    assert replicas == {7: 2} | dict.fromkeys(range(9, 30))
    assert {each.rejected for each in refused.values()} == {"all replicas have failed"}
    assert not any(each.losses for each in refused.values())


def test_reject_of_an_unknown_request_is_refused(tmp_path):
    """REJECT of an unknown request raises TraceError."""
    fail = [f"replica={index},at=0.2" for index in range(3)]
    path = record_cluster(tmp_path / "trace.jsonl", fail=fail)
    events = lines(path)
    refused = next(
        event for event in events if event["event"] == "REJECT" and "replica" not in event
    )
    refused["request"] = "unknown"
    seal(path, events)
    with pytest.raises(TraceError, match="REJECT: request 'unknown' does not exist"):
        explain(path)


PROMPTS = [(0, 1, 2, 3), (0, 1, 4), (0, 5, 6), (7, 8)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(PROMPTS), st.integers(0, 8))),
    st.sampled_from((1, 2)),
)
@settings(max_examples=60)
def test_holders_equals_a_search_of_every_other_replica(calls, ratio):
    """`Holders` finds what a search of the blocks of every other replica finds."""
    holders, held = Holders(ratio), [{}, {}, {}]
    for replica, keys, to in calls:
        mine = held[replica]
        has = sum(mine.get(key, 0) for key in keys)
        end = min(to, len(keys) * ratio)
        if end > has:
            holders.store(replica, keys, has, end)
        elif any(  # a prefix cannot leave before its continuation
            mine.get(key) for other in PROMPTS if other != keys
            for key in other if key not in keys and other[0] == keys[0]
        ):  # fmt: skip
            holders.lose(replica)
            mine.clear()
            end = 0
        elif end < has:
            holders.remove(replica, keys, end, has)
        for index, key in enumerate(keys):
            mine[key] = max(0, min(ratio, end - index * ratio))
        for me in range(3):
            for prompt in PROMPTS:
                best = max(
                    (sum(held[n].get(key, 0) for key in prompt), -n)
                    for n in range(3)
                    if n != me
                )
                expected = (best[0], -best[1]) if best[0] else (0, None)
                assert holders.find(prompt, me) == expected
