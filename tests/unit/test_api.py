"""`kvcore.simulate`, `run` and `compare`: names and objects say the same."""

from __future__ import annotations

import json
from functools import partial

import pytest

import kvcore
from kvcore import SLO, InputError, KVCache, PluginError, Request, ScoreEviction, Workload
from kvcore.analysis import compare
from kvcore.api import ClusterOptions, EngineOptions, find_capacity
from kvcore.cli import main as frame
from kvcore.config.options import option_names
from kvcore.serving import Batching
from kvcore_plugins.scheduler import SRPT
from kvcore_plugins.workload import Zipf

ZIPF = "zipf:requests=40,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8"


class Oldest(ScoreEviction):
    """Evicts what was created first."""

    name = "oldest"

    def score(self, span, now):
        """Return when the span was created."""
        return span.id


def but_for_wall_time(result):
    """Return the summary of a result without what differs from run to run."""
    return {key: value for key, value in result.summary().items() if key != "wall_s"}


def test_names_build_what_the_command_builds(capsys):
    """Same pool, same plugins, same numbers."""
    options = {"model": "llama-3-70b", "device": "h200", "tensor_parallel": 4}
    result = kvcore.simulate(ZIPF, **options, scheduler="srpt", blocks=60, max_seqs=5)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    caps = ["--scheduler", "srpt", "--blocks", "60", "--max-seqs", "5"]
    assert frame.run(["simulate", ZIPF, *flags, *caps, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    ours = json.loads(json.dumps(but_for_wall_time(result)))
    assert ours == {key: document[key] for key in ours}


def test_objects_say_the_same_as_names():
    """Instances, classes, and a `Batching` in place of its caps."""
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
    assert but_for_wall_time(named) == but_for_wall_time(built)


def test_a_cache_of_the_callers_is_used():
    """With names for what serves; options of the pool are refused."""
    cache = KVCache(60, 16)
    result = kvcore.simulate(ZIPF, cache=cache, scheduler="srpt", slo="ttft=1")
    assert result.cache is cache
    with pytest.raises(InputError, match="blocks= is for a cache that is built here"):
        kvcore.simulate(ZIPF, cache=KVCache(60, 16), blocks=60)


def test_caps_are_a_batching_or_a_table():
    """Also beside a cache of the caller's; but not twice, or as anything else."""
    steps = {
        kvcore.simulate(ZIPF, **options).summary()["steps"]
        for options in (
            {"blocks": 60, "batching": {"max_seqs": 1}},
            {"blocks": 60, "max_seqs": 1},
            {"cache": KVCache(60, 16), "batching": {"max_seqs": 1}, "slo": "none"},
        )
    }
    assert len(steps) == 1
    for cache in (None, KVCache(60, 16)):
        with pytest.raises(InputError, match=r"no option 'max_seq' .did you mean 'max_seqs'"):
            kvcore.simulate(ZIPF, cache=cache, batching={"max_seq": 1})
    with pytest.raises(InputError, match="max_seqs is given by itself and in batching"):
        kvcore.simulate(ZIPF, blocks=60, max_seqs=1, batching=Batching())
    with pytest.raises(InputError, match="give a Batching, or a table of its fields"):
        kvcore.simulate(ZIPF, blocks=60, batching=[1])


def test_a_single_prompt_is_not_its_letters():
    """It is one request."""
    result = kvcore.run(prompts="ab", max_output=1)
    assert result.summary()["requests"] == 1


def test_no_prompts_at_all_are_refused():
    """The bundled trace would be served in their place."""
    with pytest.raises(InputError, match="prompts: there is none"):
        kvcore.run(prompts=[])


def test_requests_alone_are_a_workload():
    """With a cache of their own or without one, in all calls, and in traces."""
    requests = list(Zipf(requests=3))
    assert kvcore.simulate(requests, cache=KVCache(900, 16)).summary()["completed"] == 3
    assert kvcore.simulate(requests, blocks=900, trace="few.jsonl").summary()["completed"] == 3
    (row,) = kvcore.compare(requests, "lru", 900).rows
    assert row.hit_blocks == kvcore.compare(Zipf(requests=3), "lru", 900).rows[0].hit_blocks
    assert sum(kvcore.simulate_cluster(requests, replicas=2, blocks=900).served) == 3


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (iter([Request(id=1, prompt_tokens=9, key_tokens=4)]), "is no workload: give a name"),
        (["a.jsonl"], "item 0 of the requests is no kvcore.Request: 'a.jsonl'"),
        (
            [Request(id=n, prompt_tokens=9, key_tokens=n) for n in (4, 8)],
            "request 8 has keys of 8 tokens, and others have keys of 4",
        ),
    ],
)
def test_what_is_no_list_of_requests_is_refused(requests, message):
    """A stream that can be read once, a list of something else, and keys of several sizes."""
    with pytest.raises(InputError, match=message):
        kvcore.compare(requests, "lru", 10)


def test_whole_numbers_of_numpy_are_numbers():
    """They come from sizes that were computed, and are written to traces as others are."""
    numpy = pytest.importorskip("numpy")
    given = {"blocks": numpy.int64(60), "limit": numpy.int32(4), "rate_scale": numpy.float32(2)}
    result = kvcore.simulate(ZIPF, **given, trace="numpy.jsonl")
    assert len(result.requests["id"]) == 4
    assert len(kvcore.simulate_cluster(ZIPF, replicas=numpy.int64(2), blocks=60).served) == 2
    with pytest.raises(InputError, match="blocks: expected a whole number, not true"):
        kvcore.simulate(ZIPF, blocks=True)


def test_a_window_in_seconds_is_text():
    """A tuple has ns, in which an hour of seconds would be a window of 3.6 us."""
    with pytest.raises(InputError, match=r"\(0, 3600\) has nanoseconds; .* the text '0:3600'"):
        kvcore.simulate(ZIPF, window=(0, 3600))
    with pytest.raises(InputError, match="the text '60:'"):
        kvcore.simulate(ZIPF, window=(60, None))
    assert kvcore.simulate(ZIPF, window=(0, 10**12)).summary()["completed"]


def test_a_workload_without_a_name_is_refused():
    """Before a trace or a table has to name it, as plugins of other kinds."""

    class Nameless(Workload):
        """Yields nothing."""

        key_tokens = 16

        def __iter__(self):
            """Yield nothing."""
            return iter(())

    for serve in (
        kvcore.simulate,
        partial(kvcore.compare, policies="lru"),
        partial(compare, policies="lru"),
    ):
        with pytest.raises(PluginError, match=r"Nameless has no name .*such as name ="):
            serve(Nameless())


def test_a_trace_is_written(tmp_path):
    """With the header that the command writes."""
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    kvcore.simulate(ZIPF, blocks=60, trace=ours)
    assert frame.run(["simulate", ZIPF, "--blocks", "60", "--trace", str(theirs)]) == 0
    assert ours.read_bytes() == theirs.read_bytes()


def test_policies_are_compared():
    """Names, classes and the optimum, in pools of blocks or of bytes."""
    found = kvcore.compare(ZIPF, ["lru", Oldest, "optimum"], blocks=[30])
    assert [row.eviction for row in found.rows][:2] == ["lru", "oldest"]
    assert found.rows[2].hit_blocks >= found.rows[0].hit_blocks
    found = kvcore.compare(ZIPF, "lru", memory=["64MiB", 2**27])
    assert [row.blocks for row in found.rows] == [32, 64]


def test_a_comparison_is_a_frame():
    """One row a policy and size, hit ratios in columns."""
    pytest.importorskip("polars", reason="needs the extra `lab`")
    found = kvcore.compare(
        ZIPF, ["lru", "lfu:half_life=5", "belady"], blocks=[30, 60]
    ).to_frame()
    assert found.shape[0] == 6
    assert found["eviction"].to_list()[::2] == ["lru", "lfu", "optimum"]
    assert found["options"].to_list()[2] == "half_life=5.0,unit=s,decay=none"
    assert found["hit_ratio_block"].dtype.is_float()


def test_what_cannot_be_compared_is_refused():
    """The message names the option."""
    with pytest.raises(InputError, match="both say how large the pool is"):
        kvcore.compare(ZIPF, "lru", blocks=3, memory="1GiB")
    with pytest.raises(InputError, match="unknown device 'h10'"):
        kvcore.compare(ZIPF, "lru", blocks=3, device="h10")


def test_tensors_are_computed_from_names():
    """What `kvcore run` runs: a sample of a workload, or texts."""
    pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
    result = kvcore.run(ZIPF, limit=3, latency="linear", memory="4MiB")
    assert result.summary()["completed"] == 3
    result = kvcore.run(prompts=["one two"], max_output=3, latency="linear", memory="4MiB")
    assert [len(tokens) for tokens in result.outputs.values()] == [3]
    requests = list(Zipf(requests=2, prefix_tokens=16, suffix_tokens=16, output_tokens=4))
    cache = KVCache(64, 16, ids=True)
    assert len(kvcore.run(requests, cache=cache, latency="linear").outputs) == 2


def test_every_option_has_a_type_for_checkers():
    """The keywords that type checkers know are the options of a run."""
    own = {"mode", "workload", "accounting"}
    known = {*EngineOptions.__annotations__, *ClusterOptions.__annotations__}
    assert known - {"batching"} == set(option_names()) - own


def test_capacity_is_searched_without_drafts():
    """A drafter is refused: its runs go step by step, and are not searched."""
    with pytest.raises(InputError, match="leave it out"):
        find_capacity(ZIPF, drafter="acceptance:accept=0.5")
