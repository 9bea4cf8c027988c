"""What-if on clusters: recorded requests under another router, or on other replicas."""

from __future__ import annotations

from functools import partial

import pytest
from helpers.clusters import ZIPF, record_cluster
from helpers.requests import keyed
from helpers.traces import lines, seal

import kvcore
from kvcore import InputError
from kvcore.units import NS_PER_S
from kvcore_cluster.config import ClusterParts
from kvcore_cluster.simulate import simulate_cluster
from kvcore_pages.playback import Playback
from kvcore_replay.check.trace import check_trace
from kvcore_replay.recorded_run import recorded_run, verified_log
from kvcore_replay.state.replicas import ServerReader
from kvcore_replay.what_if import whatif

UNLIKE = [{"count": 2}, {"blocks": 40, "eviction": "fifo", "max_seqs": 4}, {"tier": "none"}]

TWO_SIZES = [{"count": 2}, {"blocks": 60}]

RECORDED = {
    "failures": {"fail": ["replica=1,at=0.3,for=0.1", "replica=0,at=0.350000001"]},
    "all fail": {"fail": [f"replica={index},at=0.2" for index in range(3)]},
    "unlike": {"replicas": UNLIKE, "tier": "host:memory=1GiB"},
    "refused": {"blocks": 6, "fail": ()},
    "planned": {
        "autoscale": "throughput:interval=0.2,start_up=0.1,cool_down=0",
        "latency": "token-rate:prefill=1,decode=0.1",
        "slo": "ttft=1",
        "fail": (),
    },
    "one": {"replicas": 1, "fail": "replica=0,at=0.3,for=0.1"},
    "faster": {"rate_scale": 2, "fail": ()},
    "split": {"disaggregate": "prefill=2,decode=1", "fail": ()},
    "split, mixed": {"disaggregate": "prefill=1,decode=1,mixed=1,queue=64", "fail": ()},
    "split, first token by transfer": {
        "disaggregate": "prefill=2,decode=1,first_output=transfer",
        "fail": (),
    },
    "split, first token by decode": {
        "disaggregate": "prefill=2,decode=1",
        "first_output": "decode",
        "fail": (),
    },
    "answers cut short": {"max_model_len": 100, "fail": ()},
    "all too long": {"max_model_len": 80, "fail": ()},
    "split, failing": {"disaggregate": "prefill=2,decode=1,overlap=whole"},
    "split, prefill lost": {
        "disaggregate": "prefill=1,decode=2",
        "fail": [f"replica=0,at={at},for=0.05" for at in (0.1, 0.2, 0.3)],
    },
    "drafts": {"drafter": "acceptance", "fail": ()},
}


def record(path, **options):
    """Record a cluster whose plugins are all built in."""
    return record_cluster(path, **({"router": "least-requests"} | options))


@pytest.mark.parametrize("options", RECORDED.values(), ids=RECORDED)
def test_a_rerun_without_changes_has_the_bytes_of_the_trace(tmp_path, options):
    """Without changes, a what-if run of a cluster exports the bytes of its trace."""
    path, again = record(tmp_path / "trace.jsonl", **options), tmp_path / "again.jsonl"
    found = whatif(path, export=again)
    assert again.read_bytes() == path.read_bytes()
    assert found.recorded == found.rerun
    assert not found.changes


@pytest.mark.parametrize("options", RECORDED.values(), ids=RECORDED)
def test_the_load_of_a_recorded_cluster_is_that_of_its_run(tmp_path, options):
    """Load and queue of the recording and of the rerun are those that the run had."""
    path, given = tmp_path / "trace.jsonl", {"replicas": 3, "blocks": 20, "tensor_parallel": 1}
    given |= {"router": "least-requests", "fail": "replica=1,at=0.3,for=0.1"}
    summary = kvcore.simulate_cluster(ZIPF, trace=path, **(given | options)).summary()
    found = whatif(path)
    for run in (found.recorded, found.rerun):
        assert run.offered_load == summary["offered_load"]
        assert run.saturation == summary["saturation"]
    assert (summary["offered_load"] is None) == bool(
        options.get("drafter") or not summary["completed"]
    )


@pytest.mark.parametrize("options", RECORDED.values(), ids=RECORDED)
def test_lives_of_replicas_add_up_to_their_cluster(tmp_path, options):
    """Each life of a replica is read by itself, also one that decodes what others prefill."""
    path = record(tmp_path / "trace.jsonl", **options)
    whole, replicas = recorded_run(path), check_trace(path).replicas
    parts = []
    for each in replicas:
        for life in range(1, each["failures"] + each["up"] + 1):
            name = f"{each['replica']}:{life}"
            header, *others = ServerReader(path, name)
            assert Playback(path, replica=name).lines == 1 + len(others)
            parts.append(recorded_run(path, replica=name))
            assert parts[-1].config == header.as_dict()
    for field in ("lookup_blocks", "hit_blocks", "lookup_tokens"):
        assert sum(part.hit[field] for part in parts) == whole.hit[field]
    assert sum(part.evicted_blocks for part in parts) == whole.evicted_blocks


def test_a_cap_that_a_header_leaves_out_is_the_default(tmp_path):
    """A cluster whose header says nothing of `max_seqs` is run again with its default."""
    path = record(tmp_path / "trace.jsonl", fail=())
    events = lines(path)
    del events[0]["batching"]["max_seqs"]
    found = whatif(seal(path, events))
    assert found.recorded.saturation == found.rerun.saturation is not None


def test_figures_of_a_trace_equal_those_of_its_result(tmp_path):
    """Figures computed from the trace of a cluster equal those of its result."""
    path = tmp_path / "trace.jsonl"
    given = {"replicas": 3, "blocks": 20, "tensor_parallel": 1, "trace": path}
    result = kvcore.simulate_cluster(ZIPF, fail="replica=1,at=0.3,for=0.1", **given)
    summary, run = result.summary(), recorded_run(path)
    assert result.retried
    for name in ("requests", "completed", "rejected", "hit", "evicted_blocks", "preemptions"):
        assert getattr(run, name) == summary[name]
    for name in ("ttft_s", "tpot_s", "e2e_s", "simulated_s", "goodput"):
        assert getattr(run, name) == summary[name]


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ({"router": "round-robin"}, {"router": "round-robin"}),
        ({"replicas": 5}, {"replicas": 5}),
        ({"replicas": TWO_SIZES}, {"replicas": TWO_SIZES}),
        ({"fail": "none"}, {"fail": ()}),
        ({"fail": "replica=0,at=0.1"}, {"fail": "replica=0,at=0.1"}),
        ({"view": "index"}, {"view": "index"}),
        ({"autoscale": "throughput", "fail": "none"}, {"autoscale": "throughput", "fail": ()}),
        ({"eviction": "fifo", "blocks": 16}, {"eviction": "fifo", "blocks": 16}),
        (
            {"disaggregate": "prefill=1,decode=3", "fail": "none"},
            {"disaggregate": "prefill=1,decode=3", "replicas": 4, "fail": ()},
        ),
    ],
)  # fmt: skip
def test_a_rerun_with_options_has_the_bytes_of_such_a_run(tmp_path, asked, same):
    """A what-if run with options exports the bytes of a run recorded with them."""
    path, again = record(tmp_path / "trace.jsonl"), tmp_path / "again.jsonl"
    whatif(path, export=again, **asked)
    assert again.read_bytes() == record(tmp_path / "same.jsonl", **same).read_bytes()


@pytest.mark.parametrize("options", [{}, {"tier": "host:memory=20MiB"}], ids=["none", "some"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rerun_with_other_tiers_has_the_bytes_of_such_a_run(tmp_path, replicas, options):
    """Tiers that are added, or have other slots, are in the header as those of a new run."""
    run = partial(kvcore.simulate_cluster, replicas=2) if replicas > 1 else kvcore.simulate
    path, again, same = (tmp_path / name for name in ("trace", "again", "same"))
    run(ZIPF, trace=path, **{"blocks": 120} | options)
    whatif(path, export=again, tier="host:memory=1GiB")
    run(ZIPF, trace=same, blocks=120, tier="host:memory=1GiB")
    assert again.read_bytes() == same.read_bytes()
    whatif(path, export=again, block_size=32, blocks=60)
    assert check_trace(again).complete


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_last_conversation_begins_on_any_replica(tmp_path, replicas):
    """A trace tells when the last conversation began, wherever it and its turns were served."""
    path, after = tmp_path / "trace.jsonl", {"after": 0, "think_time": 2 * NS_PER_S}
    turns = [
        (0, 0, {"session": "a"}),
        (1, 1, {"session": "b"}),
        (2, 2, {"session": "a"} | after),
    ]
    requests = [keyed(n, (n,), 16, arrival=s * NS_PER_S, **more) for n, s, more in turns]
    kvcore.simulate_cluster(requests, replicas=replicas, router="round-robin", trace=path)
    assert verified_log(path, None).log.last_start == NS_PER_S
    kvcore.simulate_cluster(requests[:2], replicas=replicas, trace=path)
    assert verified_log(path, None).log.last_start is None


def test_requests_of_a_server_can_be_run_on_two_replicas(tmp_path):
    """The requests of one server can be run again on two replicas of its kind."""
    path, again = tmp_path / "one.jsonl", tmp_path / "again.jsonl"
    kvcore.simulate("zipf:requests=40,rate=50", blocks=100, trace=path)
    found = whatif(path, replicas=2, router="least-requests", export=again)
    report = check_trace(again)
    assert [part["routed"] > 0 for part in report.replicas] == [True, True]
    assert found.rerun.config["replicas"] == 2
    assert found.recorded.config["replicas"] == 1


def test_a_router_for_a_trace_of_one_server_is_refused(tmp_path):
    """A router for a trace of one server is refused; the error suggests --replicas."""
    path = tmp_path / "one.jsonl"
    kvcore.simulate("zipf:requests=5", blocks=100, trace=path)
    with pytest.raises(InputError, match="give --replicas too"):
        whatif(path, router="round-robin")


def test_a_header_without_routing_is_refused(tmp_path):
    """A trace of a cluster without `routing` in its header is refused."""
    path = record(tmp_path / "trace.jsonl")
    events = lines(path)
    del events[0]["routing"]
    with pytest.raises(InputError, match="says nothing of the routing"):
        whatif(seal(path, events))


def test_a_configuration_from_a_trace_has_its_cluster(tmp_path):
    """`recorded_config` has the replicas, view and failures of the trace.

    A run of it has the recorded hits.
    """
    path = record(tmp_path / "trace.jsonl", replicas=UNLIKE)
    config = kvcore.recorded_config(path)
    assert [table["count"] for table in config.replicas] == [2, 1, 1]
    assert config.replicas[1]["blocks"] == 40
    assert (config.view, config.fail) == ("exact", ("replica=1,at=0.3,for=0.1",))
    parts = ClusterParts(config)
    result = simulate_cluster(parts.workload, **parts.cluster())
    assert result.stats.hit_blocks == check_trace(path).hit["hit_blocks"]
