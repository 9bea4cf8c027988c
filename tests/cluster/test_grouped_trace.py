"""The trace of several caches of groups: each is checked as one alone, and routing as ever."""

import pytest
from helpers.requests import keyed
from helpers.traces import lines, seal

from kvcore import InputError, Trace, TraceError, simulate, simulate_cluster
from kvcore_cluster.trace import ClusterTrace
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_replay.check.trace import check_trace
from kvcore_replay.misses.explain import explain
from kvcore_replay.what_if import whatif

WORKLOAD = "zipf:requests=60,rate=4,key_tokens=128"

GROUPS = [LayerGroup("full", 4), LayerGroup("window", 4, 9)]


def serve(cache, request, now):
    """Compute the prompt of a request, which generates one token, at one time."""
    seq = cache.open(request, None, now)
    cache.commit(seq, seq.tokens - seq.computed, now)
    cache.trace.first_token(now, request=request.id, seq=seq.id)
    cache.trace.finish(now, request=request.id, seq=seq.id, output=1)
    cache.close(seq, now)


@pytest.fixture
def recorded(tmp_path):
    """Return the trace of two caches, to which prompts are routed in turn, each twice."""
    path = tmp_path / "trace.jsonl"
    with Trace(path, mode="model") as trace:
        cluster = ClusterTrace(trace)
        caches = [
            GroupedCache(GROUPS, 40, key_tokens=4, trace=cluster.recorder(index))
            for index in range(2)
        ]
        cluster.begin({"name": "round-robin", "options": {}}, routing={"view": "exact"})
        for name in range(8):
            keys = [10 * (name % 4) + index for index in range(4)]
            request = keyed(name, keys, more=1, output_tokens=1)
            number = name % 2
            hit = caches[number].match(request).tokens
            cluster.request(request, name)
            cluster.route(name, request, number, hit)
            serve(caches[number], request, name)
        cluster.flush(8)
    return path


def test_each_replica_is_checked(recorded):
    """The report has the hits of both, and what the router expects is what is cached."""
    report = check_trace(recorded)
    assert report.complete
    assert report.hit["hit_blocks"] == 4 * 4
    assert [replica["routed"] for replica in report.replicas] == [4, 4]
    assert all(len(replica["groups"]) == len(GROUPS) for replica in report.replicas)


@pytest.mark.parametrize(
    ("recorded_on", "changes"),
    [
        (2, {}),
        (2, {"router": "prefix-affinity"}),
        (1, {"replicas": 3, "router": "round-robin"}),
    ],
)
def test_a_cluster_of_groups_is_made_again(recorded_on, changes, tmp_path):
    """A traced cluster is made again as it was, and with another router or other replicas.

    The lines are those of a run with these options.
    """
    options = {"model": "gpt-oss-20b", "block_size": 128, "device": "h100", "blocks": 2000}
    options["tensor_parallel"] = 1

    def record(name, **more):
        run = simulate_cluster if more else simulate
        run(WORKLOAD, trace=tmp_path / name, **options, **more)
        return tmp_path / name

    several = {} if recorded_on == 1 else {"replicas": recorded_on, "router": "round-robin"}
    path, again = record("trace.jsonl", **several), tmp_path / "again.jsonl"
    whatif(path, export=again, **changes)
    assert again.read_bytes() == record("other.jsonl", **{**several, **changes}).read_bytes()


def test_a_wrong_expectation_of_the_router_is_found(recorded):
    """Cached tokens that a router with an exact view has not seen are found."""
    found = lines(recorded)
    line = next(each for each in found if each["event"] == "ROUTE" and each.get("tokens"))
    line["tokens"] -= 4
    seal(recorded, found)
    with pytest.raises(TraceError, match="the router expects 12 cached tokens; 16 are"):
        check_trace(recorded)


@pytest.mark.parametrize(("like", "what"), [(None, "cache groups"), ("sglang", "layer pools")])
def test_layers_that_keep_different_things_have_no_trace_in_common(tmp_path, like, what):
    """Replicas of models of different layers are refused a trace, which no reader took."""
    replicas = [{"model": "gemma-3-12b"}, {"blocks": 300}]
    with pytest.raises(InputError, match=f"different {what}, .* leave the trace out"):
        simulate_cluster(WORKLOAD, replicas=replicas, like=like, trace=tmp_path / "trace.jsonl")


def test_misses_are_explained_for_one_replica(recorded):
    """The misses of one replica are explained; those of all in one are refused."""
    with pytest.raises(TraceError, match="explained for one replica: give replica"):
        explain(recorded)
    assert [request.hit for request in explain(recorded, replica=1).requests.values()] == [
        0,
        0,
        16,
        16,
    ]
