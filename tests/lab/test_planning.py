"""Plans: the best fleet, the tests that find its limit, and the router of its replicas."""

from __future__ import annotations

import json
from itertools import count
from random import Random

import pytest
from helpers.requests import keyed

from kvcore import InputError, KVCache, PluginError, Request, plan, simulate, simulate_cluster
from kvcore.cache.layout import BlockLayout
from kvcore.workloads import Workload
from kvcore_lab.plans.fleet import Fleet
from kvcore_lab.plans.planning import Limit, _worthwhile
from kvcore_lab.plans.planning import plan as search
from kvcore_lab.report.plan import _beside
from kvcore_lab.sweep import Grid, Journal, Plan
from kvcore_lab.sweep.cells import CellRunner
from kvcore_lab.sweep.executors import ThisProcess
from kvcore_replay.belady import Belady, Foresight, Future
from kvcore_replay.untimed import replay

KEY = 512

GPU = "roofline:compute=0.5,bandwidth=0.8,overhead=0.002,layer_overhead=0"
"""A GPU that takes 0.13 s for a prompt of 8 keys."""

ONE = {"tensor_parallel": 1, "latency": GPU, "max_gpus": 1, "tier": "none", "policies": []}
"""Options of a search among pools of one GPU that tries no other policies."""


@pytest.fixture
def served(tmp_path):
    """Return a function that plans for prompts, given by keys, at one per second."""

    def invoke(prompts, *, gap=1000, output=1, **options):
        rows = (
            {
                "timestamp": gap * index,
                "input_length": KEY * len(keys),
                "output_length": output,
                "hash_ids": keys,
            }
            for index, keys in enumerate(prompts)
        )
        path = tmp_path / "requests.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return plan(path, **{"slo": "ttft=0.1", **ONE, **options})

    return invoke


def unique():
    """Return a function that returns a new prompt of 8 keys in each call."""
    fresh = count(1000)
    return lambda: [next(fresh) for _ in range(8)]


def blocks(prompts):
    """Return the number of 16-token blocks of `prompts` prompts of 8 keys, plus 8."""
    return prompts * 8 * KEY // 16 + 8


def test_an_slo_that_any_fleet_meets_has_no_limit():
    """An SLO that even the smallest pool meets has no limit."""
    short = [Request(id=n, prompt_tokens=4, output_tokens=1, key_tokens=4) for n in range(4)]
    found = plan(Requests(short), slo="ttft=9", blocks=64, **ONE)
    assert found.limit == Limit(verdict="none")
    assert found.best.fleet == Fleet(replicas=1, devices=1, blocks=2)


def test_the_command_serves_with_all_the_memory_of_the_gpus():
    """The least memory is told, what all of it gives too, and the command takes all of it."""
    found = plan("zipf:requests=200,prefixes=40,rate=5", slo="ttft=1", **ONE | {"tier": "none"})
    (row,), whole = found.as_dict()["plans"], found.best.whole
    assert row["blocks"] < row["full_pool"]["blocks"] == whole.blocks
    assert row["full_pool"]["pool_bytes"] == whole.blocks * 2**21
    assert f"--kv-cache-memory-bytes {row['full_pool']['pool_bytes']} " in row["start"]
    config = {"tensor_parallel": 1, "latency": GPU, "blocks": whole.blocks}
    alone = simulate("zipf:requests=200,prefixes=40,rate=5", **config)
    assert row["full_pool"]["ttft_s"] == alone.ttft.as_dict()
    text = " ".join(str(found).split())
    assert "That is the least that does: its GPUs have 52.1 GiB, with which TTFT p99 is" in text


def test_a_memory_that_was_given_is_all_there_is():
    """With a largest pool the command takes no more than that."""
    options = {**ONE, "tier": "none", "memory": "8GiB"}
    found = plan("zipf:requests=60,prefixes=4,rate=5", slo="ttft=1", **options)
    assert f"--kv-cache-memory-bytes {8 * 2**30} " in found.as_dict()["plans"][0]["start"]


def test_no_executor_is_the_local_one():
    """`executor=None` plans on this machine, as `local` does."""
    workload, options = "zipf:requests=20,rate=5", ONE | {"tier": "none"}
    plans = [plan(workload, executor=name, **options).as_dict() for name in (None, "local")]
    assert plans[0]["plans"] == plans[1]["plans"]


@pytest.mark.parametrize(("slo", "told"), [({}, True), ({"slo": "ttft=1,tpot=0.05"}, False)])
def test_the_default_slo_is_named(slo, told):
    """A plan for the default SLO says that it is that, and how to ask for more."""
    found = plan("zipf:requests=20,rate=5", **ONE | {"tier": "none"}, **slo)
    text = " ".join(str(found).split())
    asked = "ttft=30,tpot=0.1, the default; --slo ttft=1,tpot=0.05 asks for more."
    assert (asked in text) is told


def test_a_fleet_whose_queue_grows_is_told():
    """A short burst meets its SLO on a fleet that is no server for it; a plan says so."""
    zipf = "zipf:requests=300,rate=300"
    options = {"tensor_parallel": 1, "max_gpus": 1, "tier": "none", "policies": []}
    found = plan(zipf, slo="ttft=30", **options)
    served = found.best.served
    assert served.attainment == 1.0
    assert served.saturated
    assert served.offered_load > 1
    assert found.as_dict()["plans"][0]["saturation"]["why"] in " ".join(str(found).split())
    assert str(found).startswith("SATURATED, 1 replica on 1 x h100, with ")
    assert " s *" in str(found)


def test_a_fleet_that_keeps_up_has_no_warning():
    """A fleet whose queue does not grow has no warning, and no marked times."""
    options = {"tensor_parallel": 1, "max_gpus": 1, "tier": "none", "policies": []}
    found = plan("zipf:requests=300,rate=5", slo="ttft=0.3", **options)
    assert not found.best.served.saturated
    assert "SATURATED" not in str(found)
    assert " s *" not in str(found)


def test_a_plan_has_only_degrees_that_engines_run(served):
    """Degrees that do not divide the heads are left out with a note, and no plan has them."""
    options = {"model": "phi-4", "latency": "roofline", "max_gpus": 8, "slo": "ttft=0.5"}
    found = served([[1, 2]] * 3, **options | {"tensor_parallel": [1, 2, 4, 5, 8]})
    assert {option.fleet.devices for option in found.options} <= {1, 2, 5}
    assert set(found.block_bytes) == {1, 2, 5}
    assert [note.partition(":")[0] for note in found.notes] == [
        "4 GPUs a replica", "8 GPUs a replica"
    ]  # fmt: skip
    with pytest.raises(InputError, match="give 1, 2, 5, 10, 20 or 40"):
        served([[1, 2]] * 3, **options | {"tensor_parallel": 8})


def test_no_pool_is_below_what_the_longest_request_needs(served):
    """A request that a larger pool holds is served, though the SLO allows to miss it."""
    prompts = [[1, 2]] * 199 + [[*range(100, 180)]]
    found = served(prompts, slo="ttft=9", output=20)
    tokens = 80 * KEY + 20
    assert found.max_model_len == {1: tokens}
    assert tokens // 16 + 1 < found.best.fleet.blocks <= 1.1 * tokens / 16
    assert (found.best.served.rejected, found.limit.verdict) == (0, "none")


def test_no_pool_of_cache_groups_is_below_what_the_longest_request_needs():
    """Layers with windows hold less of the longest request than the others."""
    lengths = [64] * 99 + [20_000]
    requests = [
        Request(id=n, prompt_tokens=tokens, output_tokens=2, key_tokens=4)
        for n, tokens in enumerate(lengths)
    ]
    options = {"model": "gpt-oss-20b", "device": "h100", "latency": "roofline"}
    found = plan(Requests(requests), **ONE | options, slo="ttft=9", percentile=90)
    assert found.best.served.rejected == 0
    assert 20_000 // 16 < found.best.fleet.blocks < 2 * 20_000 // 16


def test_a_context_length_that_is_given_is_the_least_pool(served):
    """An engine does not start if its pool holds no sequence of `max_model_len` tokens."""
    found = served([[1, 2]] * 4, slo="ttft=9", max_model_len=4096)
    assert found.max_model_len == {1: 4096}
    assert 4096 // 16 < found.best.fleet.blocks <= 1.1 * 4096 / 16 + 1
    with pytest.raises(InputError, match="takes 256 blocks; the pool has 64: give less"):
        served([[1, 2]] * 4, slo="ttft=9", max_model_len=4096, blocks=64)


def test_requests_that_no_pool_holds_are_told(served):
    """A plan that rejects requests says how many, of how many, and why."""
    found = served([[1, 2]] * 19 + [[*range(10, 18)]], slo="ttft=9", percentile=90, blocks=128)
    assert found.best.served.rejected == 1
    assert found.max_model_len == {1: 2 * KEY + 1}
    (note,) = found.notes
    assert note == (
        "1 GPU a replica: 1 of 20 requests are rejected even by the largest pool; the first: "
        "it needs 256 blocks; the pool has 128"
    )
    assert "; 1 are rejected for good." in " ".join(str(found).split())


def test_what_rejected_requests_ask_for_is_not_generated(served):
    """The throughput of a fleet has the answers of the requests that it serves alone."""
    prompts = [[*range(10, 18)], *([[1, 2]] * 19)]
    found = served(prompts, output=10, slo="ttft=9", percentile=90, blocks=128)
    assert found.best.served.rejected == 1
    # The last of 19 answers of 10 tokens begins after 19 s, and takes a fraction of a second.
    assert 190 / 19.5 < found.best.served.throughput_tokens_s < 190 / 19


def test_prompts_beyond_the_positions_of_the_model_are_told(served):
    """A context length is no longer than the positions, unless a prompt is, which is told."""
    found = served([[1]] * 4, model="llama-3-8b", slo="ttft=90", output=10_000)
    assert (found.max_model_len, found.workload_notes) == ({1: 8192}, [])
    found = served([[1], [*range(10, 30)]], model="llama-3-8b", slo="ttft=90")
    assert found.max_model_len == {1: 20 * KEY + 1}
    (note,) = found.workload_notes
    assert note.startswith(
        "prompts of up to 10,240 tokens are beyond the 8,192 positions of llama-3-8b (1 of 2)"
    )


def test_the_best_pool_is_the_smallest_that_meets_the_slo(served):
    """The best pool is the smallest that meets the SLO, and a smaller one is its limit."""
    one, other = range(8), range(50, 58)
    found = served([[*one], [*other]] * 20, slo="ttft=0.03", percentile=95)
    assert 0.9 * blocks(2) <= found.best.fleet.blocks <= 1.1 * blocks(2)
    assert found.limit.verdict == "capacity"
    assert found.limit.fleet.blocks < found.best.fleet.blocks


def test_the_limit_is_policy_if_another_policy_meets_the_slo(served):
    """The limit is `policy` if another policy meets the SLO, as `slru` keeps hot prompts."""
    fresh, hot = unique(), [*range(8)]
    prompts = [hot, hot, *(each for _ in range(12) for each in (fresh(), fresh(), hot))]
    options = {"percentile": 30, "blocks": blocks(2)}
    assert served(prompts, **options).limit.verdict == "capacity"
    limit = served(prompts, **options, policies=[("eviction", "slru")]).limit
    assert limit.verdict == "policy"
    assert limit.policies[("eviction", "slru")] > 0.3 > limit.attainment


def test_the_limit_is_capacity_if_the_optimum_meets_the_slo(served):
    """The limit is `capacity` if foresight with the same memory meets the SLO."""
    parts = [[100 * n + key for key in range(8)] for n in range(3)]
    limit = served(parts * 12, percentile=40, blocks=blocks(2)).limit
    assert limit.verdict == "capacity"
    assert limit.grants["foresight"] >= 0.4 > limit.attainment
    assert limit.grants["foresight"] < limit.grants["endless"]


def test_the_limit_is_capacity_if_only_more_memory_helps(served):
    """The limit is `capacity` if only an endless pool meets the SLO."""
    parts = [[100 * n + key for key in range(8)] for n in range(3)]
    limit = served(parts * 12, percentile=90, blocks=blocks(2)).limit
    assert limit.verdict == "capacity"
    assert limit.grants["foresight"] < 0.9 <= limit.grants["endless"]


def test_the_limit_is_compute_if_hits_are_not_enough(served):
    """The limit is `compute` if a step takes too long even with all blocks cached."""
    found = served([[1, 2, 3]] * 20, slo="ttft=0.001")
    assert (found.best, found.limit.verdict) == (None, "compute")
    assert found.limit.grants["seen"] == 0


def test_the_limit_is_compute_if_only_more_gpus_help(served):
    """The limit is `compute` if diverging prompts are met only by more GPUs."""
    fresh = unique()
    prompts = [fresh() for _ in range(40)]
    found = served(prompts, gap=100, slo="ttft=0.2", max_gpus=8, percentile=75)
    assert found.best.fleet.replicas > 1
    assert (found.limit.verdict, found.limit.grants["seen"]) == ("compute", 1)
    assert found.limit.fleet.gpus < found.best.fleet.gpus


def test_the_limit_of_a_part_is_found_at_another_rate(served):
    """Prompts that are taken as seen have come when the first request of a window comes."""
    options = {"slo": "ttft=0.001", "rate_scale": 2}
    whole, part = (
        served([[1, 2, 3]] * 9, **options),
        served([[1, 2, 3]] * 69, **options, window="60:69"),
    )
    assert part.limit == whole.limit


def test_host_memory_replaces_replicas(served):
    """Host memory for evicted blocks makes one replica suffice, and is sized to the data."""
    parts = [[100 * n + key for key in range(8)] for n in range(6)]
    options = {"percentile": 80, "blocks": blocks(2), "max_gpus": 32}
    bare = served(parts * 6, **options).best.fleet
    helped = served(parts * 6, **options | {"tier": "host:memory=64GiB"}).best.fleet
    assert bare.replicas > helped.replicas == 1
    six = 6 * 8 * KEY * 131_072
    assert 0.5 * six < helped.host_bytes < 1.2 * six


def test_the_size_of_a_disk_tier_is_not_searched(served):
    """A disk tier is part of every fleet, and its size is not searched."""
    parts = [[100 * n + key for key in range(8)] for n in range(6)]
    tier = "disk:path=kv,memory=64GiB,read_bandwidth=500GB,write_bandwidth=500GB"
    found = served(parts * 8, percentile=80, blocks=blocks(2), tier=tier).best.fleet
    assert (found.replicas, found.host_bytes) == (1, 0)


def test_a_hybrid_model_with_a_tier_is_planned_for_in_cache_groups_too():
    """A model with windows needs no more K/V memory above a tier than without one."""
    options = {
        **ONE, "model": "gpt-oss-20b", "latency": "roofline", "device": "h100",
        "slo": "ttft=1", "block_size": 16, "limit": 60,
    }  # fmt: skip
    workload = "zipf:requests=60,rate=20,key_tokens=16"
    alone = plan(workload, **options)
    above = plan(workload, **{**options, "tier": "disk:memory=1GiB,path=unused"})
    sizes = [each.best.pool_bytes for each in (above, alone)]
    assert 0 < sizes[0] <= sizes[1]


HYBRID = {
    **ONE, "latency": "roofline", "device": "h200", "tensor_parallel": 2, "max_gpus": 2,
    "slo": "ttft=0.001", "block_size": 16,
}  # fmt: skip
"""Options of plans for hybrid models whose SLO no fleet meets."""


def test_a_model_with_blocks_of_several_sizes_has_the_limit_of_foresight():
    """Eviction with foresight orders blocks of several sizes, too."""
    found = plan("zipf:requests=20,rate=20,key_tokens=16", **HYBRID, model="deepseek-v4-flash")
    assert found.limit.grants.keys() == {"foresight", "endless", "seen"}


def test_where_a_checkpoint_policy_chooses_what_leaves_there_is_no_foresight():
    """Where no cache can evict with foresight, the limit is found by the other grants."""
    found = plan(
        "zipf:requests=20,rate=20,key_tokens=16", **HYBRID, model="qwen3-next-80b-a3b",
        checkpoint="marconi",
    )  # fmt: skip
    assert (found.options, found.limit.grants.keys()) == ([], {"endless", "seen"})
    assert any(note.startswith("foresight could not be judged: ") for note in found.notes)
    assert "with a pool that never fills" in str(found)
    assert "foresaw" not in str(found)


def test_a_plan_resumed_from_its_journal_is_the_same(served, tmp_path):
    """A plan resumed from its journal, or from a part of it, is the same."""
    parts = [[100 * n + key for key in range(8)] for n in range(3)]
    options = {"percentile": 40, "blocks": blocks(2), "journal": tmp_path / "journal"}
    first = served(parts * 12, **options)
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    assert served(parts * 12, **options) == first
    with Journal(tmp_path / "journal") as journal:
        assert len(journal.results) == first.simulations
    (tmp_path / "journal").write_bytes(b"".join(lines[:4]))
    assert served(parts * 12, **options) == first


def test_progress_reaches_its_end(served):
    """The ticks of progress are never negative, and add up to the total."""
    totals = []

    def progress(_, total):
        totals.append(total)
        return _Ticking(totals)

    served([[1, 2]] * 8, slo="ttft=9", progress=progress)
    total, *ticks = totals
    assert sum(ticks) == total
    assert all(tick >= 0 for tick in ticks)


class _Ticking:
    """A progress context whose tick records the number it is called with."""

    def __init__(self, totals):
        self._totals = totals

    def __enter__(self):
        return self._totals.append

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"percentile": 0}, "percentile 0"),
        ({"percentile": 101}, "percentile 101"),
        ({"slo": "none"}, "nothing is expected"),
        ({"tensor_parallel": []}, r"tensor_parallel: \[\] was given; give numbers"),
        ({"replicas": 0}, r"replicas: \[0\] was given; give numbers"),
        ({"replicas": 9}, "9 x 1 GPUs are more than 1"),
        ({"tensor_parallel": 4}, "1 x 4 GPUs are more than 1"),
        ({"model": "llama-3-70b"}, "llama-3-70b on 1 x h100: weights"),
        ({"tier": "nowhere:memory=1GiB"}, "tier: no tier plugin is named 'nowhere'"),
        ({"blokcs": 9}, r"no axis 'blokcs' \(did you mean 'blocks'"),
        ({"scheduler": ["fcfs", "lpm"]}, "scheduler: 2 values were given"),
        (
            {"policies": [("cache", "lru")]},
            r"policies: \('cache', 'lru'\) was given; give pairs of 'eviction' or",
        ),
        ({"policies": ["lfu"]}, "policies: 'lfu' was given; give pairs"),
        ({"tensor_parallel": "1"}, r"tensor_parallel: \['1'\] was given; give numbers"),
        ({"replicas": [1.5]}, r"replicas: \[1.5\] was given; give numbers"),
        ({"max_gpus": 1.5}, r"max_gpus: \[1.5\] was given; give numbers"),
        ({"percentile": "99"}, "percentile '99': give a percentage"),
        ({"router": "randm"}, "router: no router plugin is named 'randm'"),
        ({"router": ["random", "session"]}, "router: 2 values were given"),
        ({"fail": "replica=0,at=1"}, "fail: the replicas of a plan are always up"),
        ({"autoscale": "load"}, "autoscale: the replicas of a plan are always up"),
    ],
)
def test_impossible_options_are_refused(served, options, fault):
    """An option that cannot be planned raises InputError with its name."""
    with pytest.raises(InputError, match=fault):
        served([[1, 2]], **options)


def test_a_good_drafter_halves_the_time_per_output_token(served):
    """A good drafter more than halves the mean time per output token."""
    prompts = [each() for each in [unique()] * 10]
    options = {"slo": "ttft=10", "blocks": blocks(10)}
    plain, drafted = (
        served(prompts, output=100, drafter=drafter, **options).best.served.tpot_s["mean"]
        for drafter in (None, "acceptance:tokens=3,probability=0.9")
    )
    assert drafted < plain / 2


def test_a_fleet_that_cannot_hold_the_draft_model_is_left_out():
    """Weights that fit alone, but not beside those of drafts, are left out with a note."""
    drafter = "acceptance:draft=llama-3-70b"
    config = {"workload": "zipf:requests=2", "tensor_parallel": [1, 4], "drafter": drafter}
    found = plan(**config)
    assert found.best.fleet.devices == 4
    assert "16.1 GB and 141 GB for drafts" in found.notes[0]


def test_a_policy_that_cannot_serve_is_left_out_with_a_note(served):
    """A policy that cannot be built is skipped with a note."""
    parts = [[100 * n + key for key in range(8)] for n in range(3)]
    found = served(
        parts * 12, percentile=40, blocks=blocks(2), policies=[("eviction", "nothing")]
    )
    assert found.limit.verdict == "capacity"
    assert found.notes[0].startswith("nothing could not be judged: eviction: ")


def test_policies_that_are_the_same_are_simulated_once(served):
    """Two names of one policy are judged by one simulation, with the limit of one name."""
    parts = [[100 * n + key for key in range(8)] for n in range(3)]
    options = {"percentile": 40, "blocks": blocks(2)}
    names = [("scheduler", name) for name in ("slo", "slo:seed=0")]
    one, both = (served(parts * 12, policies=given, **options) for given in (names[:1], names))
    assert both.limit == one.limit
    assert both.simulations == one.simulations + 1


def test_a_simulation_that_fails_ends_the_search(served, monkeypatch):
    """A failed simulation raises PluginError with its fleet and the error."""
    monkeypatch.setattr("kvcore_lab.plans.fleet.read_traffic", _broken)
    with pytest.raises(PluginError, match="1 x 1 GPUs could not be simulated: ZeroDivision"):
        served([[1, 2]])


def _broken(_):
    """Fail as a bug does."""
    return 1 / 0


# The requests, and the router that divides them among replicas.


class Requests(Workload):
    """A workload of given requests."""

    name = "requests"
    key_tokens = 4

    def __init__(self, requests):
        self.requests = requests

    def __iter__(self):
        """Yield the requests."""
        return iter(self.requests)


def asked(number, keys, session=None):
    """Return a request of the given keys."""
    return keyed(number, keys, session=session)


def test_a_workload_that_is_no_plugin_is_planned_for():
    """Workload instances are simulated as they are, even with the name of a plugin."""

    def traffic(count):
        return Requests(
            [
                Request(id=n, prompt_tokens=4, output_tokens=1, keys=[n % 20], key_tokens=4)
                for n in range(count)
            ]
        )

    once, again = traffic(20), traffic(40)
    again.name = "zipf"
    assert [plan(each, slo="ttft=1", **ONE).requests for each in (once, again)] == [20, 40]
    tasks = Plan.from_grid(Grid("compare", workload=[once, again], blocks=100)).tasks
    assert [each.result["requests"] for each in ThisProcess().run(tasks)] == [20, 40]


BUSY = "zipf:requests=300,prefixes=20,rate=60"
"""Requests that one GPU cannot serve in time."""


@pytest.mark.parametrize("router", ["llm-d", "least-requests", "session", "mooncake"])
def test_a_fleet_serves_as_a_cluster_with_its_router_does(router):
    """The share and the times of a fleet are those that its cluster has in a simulation."""
    options = {"slo": "ttft=0.5", "router": router}
    found = plan(BUSY, **ONE | options, replicas=1, percentile=1)
    fleets = plan(BUSY, **ONE | options | {"max_gpus": 3}, replicas=3, percentile=50)
    whole, served = fleets.best.whole, fleets.best.whole_served
    pool = {"replicas": 3, "blocks": whole.blocks, "tensor_parallel": 1}
    told = simulate_cluster(BUSY, latency=GPU, **options, **pool).summary()
    assert found.setup["router"] == router
    assert served.attainment == told["slo"]["met"] > found.best.whole_served.attainment
    assert (served.ttft_s, served.tpot_s) == (told["ttft_s"], told["tpot_s"])
    assert served.offered_load == told["offered_load"]
    assert served.rejected == told["rejected"]


def test_without_a_router_one_looks_at_the_load_and_at_prefixes():
    """The router of a plan is `llm-d`, if none is given."""
    assert plan(BUSY, **ONE, slo="ttft=9").setup["router"] == "llm-d"


def test_the_number_of_replicas_is_that_of_the_router():
    """A router that sends all requests to one replica needs more than one that does not."""
    options = ONE | {"max_gpus": 4, "slo": "ttft=0.2", "percentile": 95}
    least, alone = (
        plan(BUSY, **options, router=router)
        for router in ("least-requests", "session:points=1,bound=1000")
    )
    assert least.best.fleet.replicas > 1
    assert alone.best is None or alone.best.fleet.replicas > least.best.fleet.replicas


@pytest.mark.parametrize("view", ["index", "exact", "events:delay=50ms"])
def test_a_limit_is_found_whatever_the_router_sees(view):
    """Foresight knows what each replica will be asked for; each has seen every prompt."""
    options = {"max_gpus": 2, "replicas": 2, "view": view, "slo": "ttft=0.001"}
    limit = plan(BUSY, **ONE | options).limit
    assert limit.fleet.replicas == 2
    assert limit.grants.keys() == {"foresight", "endless", "seen"}


class Backwards:
    """An executor that runs the latest of the tasks that wait first."""

    def __init__(self):
        self.runner = CellRunner()

    def run(self, tasks):
        """Yield the outcomes of the tasks, the latest first."""
        while tasks:
            yield self.runner(tasks.pop())


def test_a_plan_does_not_depend_on_which_simulation_ends_first():
    """Of fleets that miss by as much, with as many GPUs, the limit is always that of one."""
    # Two GPUs serve two prompts at a time, either way; nothing serves the long one in time.
    prompts = [(n // 2 * 10**10, 4096) for n in range(10)] + [(10**11, 40_000)]
    requests = [
        Request(id=n, arrival=at, prompt_tokens=tokens, output_tokens=1, key_tokens=4)
        for n, (at, tokens) in enumerate(prompts)
    ]
    options = ONE | {"tensor_parallel": [1, 2], "max_gpus": 2, "slo": "ttft=0.2"}
    plans = [plan(Requests(requests), **options, executor=each) for each in (None, Backwards())]
    assert plans[0] == plans[1]
    assert plans[0].limit.attainment == 10 / 11
    assert plans[0].limit.fleet.gpus == 2 * plans[0].limit.fleet.devices == 2


@pytest.mark.parametrize("pool", [3, 7, 12, 40])
def test_foresight_hits_as_many_blocks_as_the_optimum(pool):
    """In a serial replay `Foresight` hits as many blocks as the optimum."""
    draw = Random(pool)
    prompts = [[0, *(10 * draw.randrange(6) + n for n in range(1, 5))] for _ in range(80)]
    prompts = [[str(keys[: n + 1]) for n in range(5)] for keys in prompts]
    requests = [asked(index, keys) for index, keys in enumerate(prompts)]
    layout = BlockLayout("keys", 4, 4)
    cache = KVCache(pool, 4, accounting="keys", eviction=Foresight(requests, layout))
    found = replay(requests, cache).hit_blocks
    best, _ = Belady().replay(Future.read(requests, layout), pool, 4)
    assert found == best.hit_blocks


class Lossy:
    """An executor that takes tasks and yields no outcomes."""

    def run(self, tasks):
        """Take one task and yield nothing."""
        tasks.popleft()
        yield from ()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, True),
        ({"device": "h100:memory=84.9GB"}, True),
        ({"weights_dtype": "fp8"}, False),
        ({"device": "a100-80g"}, False),
        ({"model": "gpt-oss-20b"}, False),
    ],
)
def test_weights_in_fp8_are_told_of_where_they_would_help(options, told):
    """A plan names the flag if weights have 16 bits, and the device computes with fp8."""
    found = plan("zipf:requests=9", **ONE | {"latency": "roofline"} | options, slo="ttft=9")
    assert (
        "Not tried: --weights-dtype fp8, which h100" in " ".join(str(found).split())
    ) is told


@pytest.mark.parametrize(
    ("percentile", "met", "told"),
    [
        (95, 0.9496, "94.96%"),
        (95, 0.95, "95.0%"),
        (95, 0.881, "88.1%"),
        (99, 0.98999, "98.999%"),
        (99.9, 0.999, "99.9%"),
    ],
)
def test_a_share_that_misses_its_percentage_does_not_look_as_if_it_met_it(
    percentile, met, told
):
    """A share has one digit, or as many as it takes to show that it is less than is asked."""
    assert _beside(percentile, met) == told


def test_an_executor_that_loses_tasks_is_named():
    """An executor without an outcome for each task raises PluginError with its name."""
    with pytest.raises(PluginError, match="Lossy: it ended without an outcome for each task"):
        search("zipf:requests=20,rate=4", slo="ttft=0.2", executor=Lossy(), **ONE)


def test_host_memory_that_saves_no_replica_is_left_out():
    """Of fleets with several numbers of replicas, the fewest without host memory count."""
    bare = [Fleet(replicas=number, devices=1, blocks=100) for number in (2, 4)]
    helped = [
        Fleet(replicas=number, devices=1, blocks=100, host_bytes=1 << 30) for number in (1, 2)
    ]
    assert _worthwhile([*bare, *helped]) == [*bare, helped[0]]
