"""What-if runs: options that may change, and parts that are built again from a trace."""

from functools import partial

import attrs
import orjson
import pytest
from helpers.recordings import PLUGINS, StepModels, ended, timed, untimed
from helpers.requests import keyed
from helpers.serving import ask
from helpers.traces import ask as ask_for
from helpers.traces import lines

import kvcore
from kvcore import SLO, InputError, KVCache, PluginError, Plugins, Trace, hookimpl, simulate
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.cost import PrefillCost, cost_fields, read_cost
from kvcore.plugins import describe
from kvcore.serving import Batching, Rules
from kvcore.units import NS_PER_S
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.eviction import MRU
from kvcore_plugins.latency import Linear, Roofline
from kvcore_plugins.workload import Zipf
from kvcore_replay.untimed import replay
from kvcore_replay.what_if import whatif


@attrs.define(slots=False, kw_only=True, eq=False)
class OneByOne(Rules):
    """Rules that leave many blocks to the running jobs; the class is its own hook."""

    name = "one-by-one"
    blocks: int = 0

    def headroom(self, job, state):
        """Return the same number of blocks for every job."""
        del job, state
        return self.blocks

    @staticmethod
    @hookimpl
    def kvcore_rules():
        """Return the rules."""
        return [OneByOne]


class TestAnotherPolicy:
    """A trace of six requests on which LRU and MRU differ."""

    @pytest.fixture
    def path(self, tmp_path):
        """Return a trace of three prompts of a block, each sent twice, in a pool of two."""
        return untimed(tmp_path / "trace.jsonl", "abcabc", blocks=2)

    @pytest.mark.parametrize("eviction", ["mru", MRU, MRU(), partial(MRU)])
    def test_name_class_instance_and_function_give_the_same_policy(self, path, eviction):
        """A name, a class, an instance and a function give the same eviction policy."""
        found = whatif(path, eviction=eviction)
        assert found.rerun.config["eviction"] == {"name": "mru", "options": {}}
        assert found.recorded.config["eviction"] == {"name": "lru", "options": {}}
        assert (found.recorded.hit["hit_blocks"], found.rerun.hit["hit_blocks"]) == (0, 2)

    def test_changes_have_the_requests_with_other_hits(self, path):
        """`changes` has each request whose hits differ, with its hits in both runs."""
        found = whatif(path, eviction="mru")
        assert [(c.request, c.prompt, c.tokens) for c in found.gained()] == [
            (3, 4, 4),
            (5, 4, 4),
        ]
        assert found.changes == found.gained()
        assert found.lost() == found.sooner() == found.later() == []
        back = whatif(path, blocks=1)
        assert back.changes == []

    def test_the_exported_trace_is_that_of_a_fresh_run(self, path, tmp_path):
        """The exported trace has the bytes of a fresh run under the new policy."""
        whatif(path, eviction="mru", export=tmp_path / "new.jsonl")
        with Trace(tmp_path / "fresh.jsonl") as trace:
            cache = KVCache(2, 4, eviction=MRU(), accounting="keys", trace=trace)
            replay([ask_for(index, text) for index, text in enumerate("abcabc")], cache)
        assert (tmp_path / "new.jsonl").read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()

    def test_an_option_may_be_infinite(self, tmp_path):
        """An infinite option is text in the header and a number again in the policy."""
        path = tmp_path / "trace.jsonl"
        compare_policies(Zipf(requests=50), "lfu:half_life=inf", 30, trace=path)
        found = whatif(path, export=tmp_path / "new.jsonl")
        assert found.changes == []
        assert (tmp_path / "new.jsonl").read_bytes() == path.read_bytes()

    def test_a_random_policy_gets_the_seed_of_the_run(self, tmp_path):
        """A random policy given by name gets the recorded seed."""
        path = tmp_path / "trace.jsonl"
        compare_policies(Zipf(requests=50), "lru", 30, trace=path, seed=9)
        options = whatif(path, eviction="random").rerun.config["eviction"]["options"]
        assert options == {"seed": 9}


class TestAnotherPool:
    """Blocks of another size, and pools of another number of blocks."""

    def test_another_block_size_keeps_the_memory_of_the_pool(self, tmp_path):
        """Another block size keeps the memory of the pool, unless `blocks` is given."""
        path = untimed(tmp_path / "trace.jsonl", ["abc", "abd", "abc"], blocks=4)
        config = whatif(path, block_size=2).rerun.config
        assert (config["block_size"], config["blocks"]) == (2, 8)
        config = whatif(path, block_size=1, blocks=5).rerun.config
        assert (config["block_size"], config["blocks"]) == (1, 5)

    def test_a_block_size_that_does_not_fit_the_keys_is_refused(self, tmp_path):
        """A block size that does not fit the keys raises InputError with both sizes."""
        path = untimed(tmp_path / "trace.jsonl", ["abc"])
        with pytest.raises(InputError, match=r"block size 3 and .* keys of 4 tokens"):
            whatif(path, block_size=3)

    def test_a_block_size_larger_than_the_pool_is_refused(self, tmp_path):
        """A block size larger than the whole pool raises InputError."""
        path = timed(tmp_path / "trace.jsonl", [ask("a")], blocks=2)
        with pytest.raises(InputError, match="2 blocks of 4 tokens is less than a block of 16"):
            whatif(path, block_size=16, plugins=PLUGINS)


class TestUnderAClock:
    """Schedulers, latency models, batching, rates and SLOs."""

    def test_a_turn_arrives_a_think_time_after_the_turn_before(self, tmp_path):
        """A turn arrives a think time after the end of the turn before, in each run."""
        turns = [
            ask("a", 0, output=3, session="s"),
            ask("b", 1, session="s", after="a", think_time=100),
        ]
        path = timed(tmp_path / "trace.jsonl", turns)
        assert ended(path) == {"a": 30, "b": 140}
        slow = tmp_path / "slow.jsonl"
        whatif(path, latency=Linear(step=1e-6, prefill=0, decode=0, context=0), export=slow,
               plugins=PLUGINS)  # fmt: skip
        assert ended(slow) == {"a": 3000, "b": 4100}

    def test_another_scheduler_changes_the_times_of_requests(self, tmp_path):
        """`sooner` and `later` have the requests whose times differ, in nanoseconds."""
        requests = [ask("long", 0, output=2), ask("late", 1), ask("dear", 1, priority=1)]
        path = timed(tmp_path / "trace.jsonl", requests, batching={"max_seqs": 1})
        found = whatif(path, scheduler="priority", plugins=PLUGINS)
        assert [(c.request, c.ttft) for c in found.sooner()] == [("dear", -10)]
        assert [(c.request, c.ttft) for c in found.later()] == [("late", 10)]
        assert found.rerun.config["scheduler"]["name"] == "priority"
        assert found.gained() == found.lost() == []

    def test_a_cap_that_is_not_given_stays_as_recorded(self, tmp_path):
        """A cap that is not given stays as recorded; a whole `Batching` replaces all."""
        path = timed(
            tmp_path / "trace.jsonl", [ask("a")], batching={"max_tokens": 64, "max_seqs": 8}
        )
        config = whatif(path, batching={"max_seqs": 1}, plugins=PLUGINS).rerun.config
        assert (config["batching"]["max_seqs"], config["batching"]["max_tokens"]) == (1, 64)
        config = whatif(path, batching=Batching(), plugins=PLUGINS).rerun.config
        assert config["batching"] == Batching().as_dict()
        with pytest.raises(InputError, match="max_seqs=0"):
            whatif(path, batching={"max_seqs": 0}, plugins=PLUGINS)

    def test_a_cap_may_be_given_by_itself(self, tmp_path):
        """A cap by itself changes what it changes in `batching`."""
        path = timed(tmp_path / "trace.jsonl", [ask("a")], batching={"max_seqs": 8})
        alone = whatif(path, max_seqs=1, plugins=PLUGINS).rerun
        assert alone == whatif(path, batching={"max_seqs": 1}, plugins=PLUGINS).rerun
        assert alone.config["batching"]["max_seqs"] == 1

    def test_other_rules_leave_the_limits_as_recorded(self, tmp_path):
        """`like` changes rules alone; limits of a step and policies stay as recorded."""
        path = timed(tmp_path / "trace.jsonl", [ask("a")], batching={"max_seqs": 8})
        config = whatif(path, like="vllm:lag=0", plugins=PLUGINS).rerun.config
        assert (config["batching"]["max_seqs"], config["batching"]["ties"]) == (8, "first")
        with pytest.warns(FutureWarning, match=r"ties: options of the rules"):
            config = whatif(path, batching={"ties": "first"}, plugins=PLUGINS).rerun.config
        assert config["batching"]["ties"] == "first"

    def test_rules_that_decide_are_recorded_by_name(self, tmp_path):
        """Rules that override a decision are in the header, and found there where installed."""
        requests = [ask("a", 0, output=4), ask("b", 0, output=4)]
        batching = {"rules": partial(OneByOne, blocks=10**6)}
        path = timed(tmp_path / "trace.jsonl", requests, batching=batching)
        recorded = describe(OneByOne(blocks=10**6))
        assert lines(path)[0]["plugins"]["rules"] == recorded
        known = Plugins(extra=[StepModels(), OneByOne])
        found = whatif(path, plugins=known)
        assert found.recorded.config == found.rerun.config
        assert found.rerun.config["rules"] == recorded
        assert found.sooner() == found.later() == []
        assert [c.request for c in whatif(path, like="kvcore", plugins=known).sooner()] == ["b"]
        with pytest.raises(PluginError, match=r"'one-by-one', which is not .* --like NAME"):
            whatif(path, plugins=PLUGINS)

    def test_another_rate_is_relative_to_the_workload(self, tmp_path):
        """`rate_scale` is relative to the workload, whatever the rate of the recorded run."""
        requests = [ask(index, index * 1000) for index in range(4)]
        path = timed(tmp_path / "trace.jsonl", requests, rate_scale=4)
        whatif(path, rate_scale=2, export=tmp_path / "new.jsonl", plugins=PLUGINS)
        arrivals = [e["t"] for e in lines(tmp_path / "new.jsonl") if e["event"] == "REQUEST"]
        assert arrivals == [0, 500, 1000, 1500]

    def test_a_new_slo_applies_to_both_runs(self, tmp_path):
        """A new SLO applies to the recorded run as well."""
        path = timed(tmp_path / "trace.jsonl", [ask("a"), ask("b", 100)])
        assert whatif(path, plugins=PLUGINS).recorded.slo_met is None
        found = whatif(path, slo=SLO(ttft_ns=9), plugins=PLUGINS)
        assert (found.recorded.slo_met, found.rerun.slo_met) == (0, 0)
        found = whatif(path, slo=SLO(ttft_ns=10), plugins=PLUGINS)
        assert (found.recorded.slo_met, found.rerun.slo_met) == (1, 1)

    def test_a_retention_policy_can_be_added_kept_or_removed(self, tmp_path):
        """A retention policy can be added, kept or removed."""
        path = timed(tmp_path / "trace.jsonl", [ask("a", prompt=40, output=9)])
        windowed = tmp_path / "windowed.jsonl"
        found = whatif(path, retention="window:tokens=8", export=windowed, plugins=PLUGINS)
        assert (found.recorded.forgotten_blocks, found.rerun.forgotten_blocks) == (0, 10)
        back = whatif(windowed, retention="none", plugins=PLUGINS)
        assert (back.recorded.forgotten_blocks, back.rerun.forgotten_blocks) == (10, 0)
        assert "retention" not in back.rerun.config
        assert whatif(windowed, plugins=PLUGINS).rerun == found.rerun

    def test_steps_take_the_time_of_what_another_policy_reads(self, tmp_path):
        """A what-if between policies that read other parts has the trace of a new run."""
        sizes = "requests=5,prefix_tokens=2048,suffix_tokens=64,output_tokens=30"
        options = {"memory": "2GiB", "tensor_parallel": 1}
        traces = {"none": tmp_path / "dense", "quest:budget=64": tmp_path / "sparse"}
        for retention, path in traces.items():
            given = {} if retention == "none" else {"retention": retention}
            kvcore.simulate(f"zipf:{sizes}", **options, **given, trace=path)
        for retention, path in traces.items():
            (other,) = set(traces.values()) - {path}
            whatif(other, retention=retention, export=tmp_path / "new", plugins=PLUGINS)
            new, right = (each.read_bytes().splitlines() for each in (tmp_path / "new", path))
            assert new[1:-1] == right[1:-1]
            (tmp_path / "new").unlink()

    def test_a_latency_model_uses_the_recorded_model_and_device(self, tmp_path):
        """A latency model given by name uses the recorded model and device by default."""
        about = {
            "model": {"name": "llama-3.1-8b", "kv_dtype": "bf16"},
            "device": {"name": "h200", "count": 2},
        }
        path = timed(tmp_path / "trace.jsonl", [ask("a")], header=about)
        options = whatif(
            path, latency="roofline:device=a100-80g", plugins=PLUGINS
        ).rerun.config["latency"]["options"]
        assert (options["device"], options["codec"]) == ("a100-80g", "bf16")
        assert options["tensor_parallel"] == 2

    def test_a_model_outside_the_catalogue_is_built_again(self, tmp_path):
        """A model that is in no catalogue is built again from its fields."""
        model = attrs.evolve(find_model("gemma-2-2b"), name="mine")
        latency = Roofline(model=model, device=find_device("h100"), tensor_parallel=1)
        path = timed(tmp_path / "trace.jsonl", [ask("a"), ask("b")], latency=latency)
        whatif(path, export=tmp_path / "new.jsonl")
        assert (tmp_path / "new.jsonl").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "cost",
    [
        PrefillCost.for_model(find_model("gemma-2-2b"), find_device("a100-80g")),
        PrefillCost.for_model(
            attrs.evolve(find_model("llama-3.1-8b"), name="mine"), find_device("h100")
        ),
        PrefillCost(0.25, ((None, 0.5), (8, 1e-9))),
        PrefillCost(1.0, (), "llama-3.1-8b", "h100"),
    ],
)
def test_a_cost_read_from_the_header_equals_the_recorded_cost(cost):
    """A cost read from the header equals the recorded cost.

    Entries of the catalogue are recorded by name, others with their seconds.
    """
    assert read_cost(orjson.loads(orjson.dumps(cost_fields(cost)))) == cost


@pytest.mark.parametrize(
    "wrong",
    [
        {"pair_seconds": [["x", 1e-9]]},
        {"pair_seconds": [[-5, 1e-9]]},
        {"pair_seconds": [[None, -1e-9]]},
        {"pair_seconds": [[None]]},
        {"pair_seconds": None},
        {"token_seconds": "nan"},
        {"token_seconds": -1.0},
        {"model": ["m"]},
        {"device": 3},
    ],
)
def test_a_cost_of_other_types_is_refused(wrong):
    """A cost whose fields have other types than recorded ones, or are negative, is refused."""
    fields = cost_fields(PrefillCost(0.25, ((None, 0.5), (8, 1e-9)), "m", "d"))
    with pytest.raises(InputError, match="cannot be read from"):
        read_cost(fields | wrong)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "llama-4-scout", "gemma-3-12b"])
def test_a_model_of_several_kinds_of_layers_is_rebuilt_from_the_header(tmp_path, name):
    """Step times of a model with caches, or windows, follow from its record in the header."""
    path = tmp_path / "trace.jsonl"
    options = {"model": name, "device": "b300", "tensor_parallel": 8, "weights_dtype": "fp8"}
    options["disable_hybrid_kv_cache_manager"] = True
    simulate("zipf", limit=20, trace=path, **options)
    (header,) = lines(path)[:1]
    model = header["plugins"]["latency"]["options"]["model"]
    assert ("caches" in model) == bool(find_model(name).caches)
    assert whatif(path).changes == []


def test_overload_of_a_closed_loop_is_the_same_in_a_run_and_in_its_trace(tmp_path):
    """Conversations that ask for too much saturate a server, its trace, and a cluster.

    At the rate that the search finds, or served together, they do not.
    """
    turns = [
        keyed(
            f"{chat}/{turn}",
            (),
            16,
            more=64,
            arrival=chat * NS_PER_S // 5,
            output_tokens=40,
            session=str(chat),
            after=f"{chat}/{turn - 1}" if turn else None,
            think_time=NS_PER_S if turn else 0,
        )
        for chat in range(80)
        for turn in range(3)
    ]
    options, trace = {"max_seqs": 1, "blocks": 100}, tmp_path / "run.jsonl"
    result = kvcore.simulate(turns, trace=trace, **options)
    assert (result.saturation.closed, result.saturation.saturated) == (True, True)
    found = whatif(trace, max_seqs=64)
    assert found.recorded.saturation == result.saturation.as_dict()
    assert (found.recorded.saturated, found.rerun.saturated) == (True, False)
    clusters = (kvcore.simulate_cluster(turns, replicas=n, **options) for n in (1, 2))
    assert [cluster.saturation.saturated for cluster in clusters] == [True, False]
    rate = kvcore.find_capacity(turns, **options)["rate_scale"]
    assert not kvcore.simulate(turns, rate_scale=rate, **options).saturation.saturated


@pytest.mark.parametrize("retention", ["full", "window:tokens=512", "quest"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_configuration_of_a_rerun_is_the_recorded_one(tmp_path, retention, replicas):
    """Both runs name the same retention policy, if it changes something, and have one load."""
    path = tmp_path / "trace.jsonl"
    run = partial(kvcore.simulate_cluster, replicas=2) if replicas > 1 else kvcore.simulate
    result = run("zipf:requests=5", retention=retention, blocks=900, trace=path)
    found = whatif(path)
    assert found.recorded.config == found.rerun.config
    if replicas == 1:
        loads = {run.offered_load for run in (found.recorded, found.rerun)}
        assert loads == {result.summary()["offered_load"]}
    assert ("retention" in found.rerun.config) is (retention != "full")
