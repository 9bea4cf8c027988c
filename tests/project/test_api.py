"""`kvcore.simulate`, `run` and `compare`: names and objects of plugins give equal results."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import partial

import pytest

import kvcore
from kvcore import (
    SLO,
    InputError,
    KVCache,
    PluginError,
    Request,
    ScoreEviction,
    Workload,
    find_capacity,
    read_events,
)
from kvcore.config.options import option_names
from kvcore.serving import Batching
from kvcore_cli import main as frame
from kvcore_cluster.options import ClusterOptions
from kvcore_engine.options import EngineOptions
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.scheduler import SRPT
from kvcore_plugins.workload import Zipf
from kvcore_replay.what_if import whatif

ZIPF = "zipf:requests=40,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8"


class Oldest(ScoreEviction):
    """A policy that evicts the span that was created first."""

    name = "oldest"

    def score(self, span, now):
        """Return the id of the span, which ascends in the order of creation."""
        return span.id


def without_wall_time(result):
    """Return the summary of a result without the wall time, which differs from run to run."""
    return {key: value for key, value in result.summary().items() if key != "wall_s"}


def test_plugin_names_give_the_numbers_of_the_command(capsys):
    """`kvcore.simulate` with plugin names gives the numbers of `kvcore simulate --json`."""
    options = {"model": "llama-3-70b", "device": "h200", "tensor_parallel": 4}
    result = kvcore.simulate(ZIPF, **options, scheduler="srpt", blocks=60, max_seqs=5)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    caps = ["--scheduler", "srpt", "--blocks", "60", "--max-seqs", "5"]
    assert frame.run(["simulate", ZIPF, *flags, *caps, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    ours = json.loads(json.dumps(without_wall_time(result)))
    assert ours == {key: document[key] for key in ours}


def test_plugin_objects_give_the_same_run_as_names():
    """Plugin instances and classes, a `Batching` and an `SLO` give the same run as names."""
    named = kvcore.simulate(ZIPF, scheduler="srpt", blocks=60, max_seqs=5, slo="ttft=1")
    built = kvcore.simulate(
        Zipf(
            requests=40,
            prefixes=4,
            prefix_tokens=64,
            suffix_tokens=32,
            output_tokens=8,
            seed=0,
        ),
        scheduler=SRPT,
        blocks=60,
        batching=Batching(max_seqs=5),
        slo=SLO(ttft_ns=10**9),
    )
    assert without_wall_time(named) == without_wall_time(built)


def test_a_given_cache_is_used_and_excludes_pool_options():
    """`simulate` runs on the cache that it is given, and then refuses options of the pool."""
    cache = KVCache(60, 16)
    result = kvcore.simulate(ZIPF, cache=cache, scheduler="srpt", slo="ttft=1")
    assert result.cache is cache
    with pytest.raises(InputError, match="replicas= is for a cache that is built here"):
        kvcore.simulate(ZIPF, cache=KVCache(60, 16), replicas=2)
    with pytest.raises(InputError, match="blocks= is for a cache that is built here"):
        kvcore.simulate(ZIPF, cache=KVCache(60, 16), blocks=60)


def test_batching_is_an_object_or_a_table():
    """`batching` is a `Batching` or a table of its fields, with and without a given cache.

    A cap in any form gives the same number of steps, and another one than without a cap.
    Unknown fields, other types and caps that are given twice are refused.
    """
    steps = {
        kvcore.simulate(ZIPF, **options).summary()["steps"]
        for options in (
            {"blocks": 60, "batching": {"max_seqs": 1}},
            {"blocks": 60, "batching": Batching(max_seqs=1)},
            {"blocks": 60, "max_seqs": 1},
            {"cache": KVCache(60, 16), "batching": {"max_seqs": 1}, "slo": "none"},
        )
    }
    assert len(steps) == 1
    assert kvcore.simulate(ZIPF, blocks=60).summary()["steps"] not in steps
    for cache in (None, KVCache(60, 16)):
        with pytest.raises(InputError, match=r"no option 'max_seq' .did you mean 'max_seqs'"):
            kvcore.simulate(ZIPF, cache=cache, batching={"max_seq": 1})
    with pytest.raises(InputError, match="max_seqs is given by itself and in batching"):
        kvcore.simulate(ZIPF, blocks=60, max_seqs=1, batching=Batching())
    with pytest.raises(InputError, match="give a Batching, or a table of its fields"):
        kvcore.simulate(ZIPF, blocks=60, batching=[1])


def test_a_string_as_prompts_is_one_request():
    """A string as `prompts` is one request, not one for each letter."""
    result = kvcore.run(prompts="ab", max_output=1)
    assert result.summary()["requests"] == 1


def test_both_names_of_the_codec_are_refused():
    """`compare` with `codec` and its earlier name `kv_dtype` raises InputError."""
    with pytest.raises(InputError, match="give one of them"):
        kvcore.compare("zipf:requests=3", "lru", 9, codec="fp8-e4m3", kv_dtype="bf16")


def test_a_comparison_has_no_options_of_servers():
    """`compare` refuses an option that only a run under a clock has."""
    with pytest.raises(InputError, match="there is no option 'scheduler'"):
        kvcore.compare("zipf:requests=3", "lru", 9, scheduler="fcfs")


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"prompts": []}, "prompts: there is none"),
        ({"prompts": [b"a"]}, "prompt b'a' is no text"),
        ({"prompts": [3]}, "prompt 3 is no text"),
        ({"prompts": "a", "limit": 1}, "limit= is not for prompts"),
        ({"prompts": "a", "workload": "zipf"}, "workload= is not for prompts"),
        ({"max_output": 3}, "max_output= is for prompts alone"),
        ({"prompts": "a", "cache": KVCache(9, ids=True)}, "prompts= is for a cache that is"),
    ],
)
def test_wrong_prompts_are_refused(options, wrong):
    """Prompts that are none, or beside what says something else, raise InputError."""
    with pytest.raises(InputError, match=wrong):
        kvcore.run(**options)


def test_listed_requests_are_served_like_their_workload():
    """A list or generator of requests gives the result of the workload that yields them."""
    source = Zipf(requests=30)
    served = kvcore.simulate(source, blocks=900).summary() | {"wall_s": 0}
    for requests in (list(source), (request for request in source)):
        assert kvcore.simulate(requests, blocks=900).summary() | {"wall_s": 0} == served
    assert kvcore.simulate(list(source), cache=KVCache(900, 16)).summary()["completed"] == 30
    hits = [kvcore.compare(each, "lru", 900).rows[0].hit_blocks for each in (source, [*source])]
    assert hits[0] == hits[1] > 0
    spread = [
        kvcore.simulate_cluster(each, replicas=2, blocks=900).summary() | {"wall_s": 0}
        for each in (source, list(source))
    ]
    assert spread[0] == spread[1]


def test_a_trace_of_listed_requests_replays(tmp_path):
    """The header names the workload `requests`, and the trace replays without the objects."""
    path = tmp_path / "run.jsonl"
    kvcore.simulate(list(Zipf(requests=3)), blocks=900, trace=path)
    assert next(iter(read_events(path))).workload.name == "requests"
    assert frame.run(["replay", str(path)]) == 0


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "an empty list of requests is no workload"),
        ([17], "number 1 of the requests is 17, which is no Request"),
        (
            [Request(id=n, prompt_tokens=1, key_tokens=n) for n in (16, 32)],
            "request 32, number 2: a key of it stands for 32 tokens, in this workload for 16",
        ),
        (17, "expected a workload: a plugin's name with options, a file, or requests"),
    ],
)
@pytest.mark.parametrize("call", [kvcore.simulate, kvcore.compare, kvcore.plan])
def test_objects_that_are_no_workload_are_refused(call, requests, message):
    """The error names the object, or the request, and what a workload needs."""
    with pytest.raises(InputError, match=message):
        call(requests)


def test_whole_numbers_of_numpy_are_numbers(tmp_path):
    """Options take NumPy's integers and floats, and write them to traces as Python's."""
    numpy = pytest.importorskip("numpy")
    given = {"blocks": numpy.int64(60), "limit": numpy.int32(4), "rate_scale": numpy.float32(2)}
    result = kvcore.simulate(ZIPF, **given, trace=tmp_path / "run.jsonl")
    assert len(result.requests["id"]) == 4
    assert len(kvcore.simulate_cluster(ZIPF, replicas=numpy.int64(2), blocks=60).served) == 2
    with pytest.raises(InputError, match="blocks: expected a whole number, not true"):
        kvcore.simulate(ZIPF, blocks=True)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "longdouble"])
def test_floats_of_numpy_are_numbers_of_any_option(kind, tmp_path):
    """NumPy's floats of each width are the number itself, float64 too, which is a `float`."""
    half = getattr(pytest.importorskip("numpy"), kind)(0.5)
    paths = [tmp_path / f"{number}.jsonl" for number in range(2)]
    for value, path in zip((0.5, half), paths, strict=True):
        kvcore.simulate(ZIPF, watermark=value, rate_scale=value, limit=4, trace=path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_times_and_options_of_plugins_may_be_fractions(tmp_path):
    """Times of an SLO and options in a table of a plugin take fractions, as numbers do."""
    paths = []
    for number in (0.5, Fraction(1, 2)):
        paths.append(tmp_path / f"{type(number).__name__}.jsonl")
        policy = {"name": "lfu", "half_life": number}
        slo = {"ttft": number}
        kvcore.simulate(ZIPF, slo=slo, eviction=policy, limit=4, trace=paths[-1])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_window_in_seconds_is_text():
    """A window of a few ns in a tuple raises InputError that shows the text in seconds."""
    with pytest.raises(InputError, match=r"\(0, 3600\) has nanoseconds; .* the text '0:3600'"):
        kvcore.simulate(ZIPF, window=(0, 3600))
    with pytest.raises(InputError, match="the text '60:'"):
        kvcore.simulate(ZIPF, window=(60, None))
    assert kvcore.simulate(ZIPF, window=(0, 10**12)).summary()["completed"]


def test_a_workload_without_a_name_is_refused():
    """`simulate` and `compare` refuse a workload class that has no name.

    They do so before a trace or a table has to print the name.
    """

    class Nameless(Workload):
        """A workload without a name."""

        key_tokens = 16

        def __iter__(self):
            """Yield no requests."""
            return iter(())

    for serve in (
        kvcore.simulate,
        partial(kvcore.compare, policies="lru"),
        partial(compare_policies, policies="lru"),
    ):
        with pytest.raises(PluginError, match=r"Nameless has no name .*such as name ="):
            serve(Nameless())


def test_a_trace_has_the_bytes_of_the_command(tmp_path):
    """`kvcore.simulate` with `trace` writes the same bytes as `kvcore simulate --trace`."""
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    kvcore.simulate(ZIPF, blocks=60, trace=ours)
    assert frame.run(["simulate", ZIPF, "--blocks", "60", "--trace", str(theirs)]) == 0
    assert ours.read_bytes() == theirs.read_bytes()


def test_compare_takes_policies_and_sizes_in_any_form():
    """`kvcore.compare` takes names, classes and the optimum, and sizes in blocks or bytes."""
    found = kvcore.compare(ZIPF, ["lru", Oldest, "optimum"], blocks=[30])
    assert [row.eviction for row in found.rows][:2] == ["lru", "oldest"]
    assert found.rows[2].hit_blocks >= found.rows[0].hit_blocks
    found = kvcore.compare(ZIPF, "lru", memory=["64MiB", 2**27])
    assert [row.blocks for row in found.rows] == [32, 64]


def test_to_frame_has_a_row_for_each_policy_and_size():
    """`to_frame()` has a row for each policy and pool size, and hit ratios as columns."""
    pytest.importorskip("polars", reason="needs the extra `lab`")
    found = kvcore.compare(
        ZIPF, ["lru", "lfu:half_life=5", "belady"], blocks=[30, 60]
    ).to_frame()
    assert found.shape[0] == 6
    assert found["eviction"].to_list()[::2] == ["lru", "lfu", "optimum"]
    assert found["options"].to_list()[2] == "half_life=5.0,unit=s,decay=none"
    assert found["hit_ratio_block"].dtype.is_float()


def test_run_takes_names_prompts_and_a_cache():
    """`kvcore.run` runs a sample of a workload, prompts, or requests on a given cache."""
    pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
    result = kvcore.run(ZIPF, limit=3, latency="linear", memory="4MiB")
    assert result.summary()["completed"] == 3
    result = kvcore.run(prompts=["one two"], max_output=3, latency="linear", memory="4MiB")
    assert [len(tokens) for tokens in result.outputs.values()] == [3]
    requests = list(Zipf(requests=2, prefix_tokens=16, suffix_tokens=16, output_tokens=4))
    cache = KVCache(64, 16, ids=True)
    assert len(kvcore.run(requests, cache=cache, latency="linear").outputs) == 2


def test_typed_keywords_are_the_options_of_a_run():
    """The keywords that type checkers know are exactly the options of a run."""
    own = {"workload", "accounting", "allocation", "max_output"}
    known = {*EngineOptions.__annotations__, *ClusterOptions.__annotations__}
    assert known - {"batching"} == set(option_names()) - own


def test_a_device_by_figures_is_recorded_and_run_again(tmp_path):
    """A device that is given by its figures is simulated as its like, and recorded by them."""
    figures = "memory=80GB,bandwidth=3.35TB/s,flops=989.5T,fp8_flops=1979T,link=450GB/s"
    path, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"
    found = kvcore.simulate(ZIPF, device=figures, trace=path)
    assert found.summary() == kvcore.simulate(ZIPF, device="h100").summary() | {
        "wall_s": found.wall_s
    }
    whatif(path, export=again)
    assert again.read_bytes() == path.read_bytes()
    assert kvcore.recorded_config(path).device == figures


def test_find_capacity_proposes_gpus_that_can_share_the_model():
    """The next number of GPUs that is proposed divides the heads: 5 after 2 for phi-4."""
    crowd = "zipf:requests=200,prefix_tokens=512,suffix_tokens=512,rate=31"
    found = find_capacity(crowd, model="phi-4", tensor_parallel=2, device="a100-80g")
    assert found["tensor_parallel"] == 5


def test_each_simulation_of_find_capacity_has_a_copy_of_an_instance():
    """A scheduler may be an instance, though the capacity is found by several simulations."""
    crowd = "zipf:requests=200,prefix_tokens=512,suffix_tokens=512,rate=500"
    found = find_capacity(crowd, scheduler=SRPT())
    assert found
    assert found == find_capacity(crowd, scheduler="srpt")


def test_find_capacity_refuses_a_drafter():
    """`find_capacity` refuses a drafter, because runs with drafts go step by step."""
    with pytest.raises(InputError, match="leave it out"):
        find_capacity(ZIPF, drafter="acceptance:accept=0.5")


def test_the_error_for_a_name_that_is_none_has_one_that_is_like_it():
    """A verb whose call has a longer name is not found without that name."""
    with pytest.raises(AttributeError, match="did you mean 'compare_routers'"):
        kvcore.routers  # noqa: B018 - it raises
