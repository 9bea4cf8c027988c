"""What-if with tiers, which are built again from the header, replaced or left out."""

import attrs
import pytest
from helpers.commands import run_here
from helpers.traces import lines, seal

from kvcore import InputError, KvcoreError, Request, api, compare
from kvcore.request import Hints
from kvcore.units import NS_PER_S
from kvcore_plugins.workload import Zipf
from kvcore_replay.check.trace import check_trace
from kvcore_replay.what_if import whatif

HOST = "host:memory=100MiB,eviction=lfu:half_life=60,keep=exclusive,load=always"


@pytest.fixture
def path(tmp_path):
    """Return a trace of a simulation in a pool that is too small, above two tiers."""
    api.simulate(
        Zipf(requests=60, prefixes=8, seed=3),
        model="llama-3.1-8b",
        blocks=300,
        tier=[HOST, f"disk:memory=1GiB,load=always,write=through,path={tmp_path / 'kv'}"],
        trace=tmp_path / "trace.jsonl",
    )
    return tmp_path / "trace.jsonl"


def test_a_rerun_with_tiers_has_the_bytes_of_the_trace(path, tmp_path):
    """A rerun with tiers writes the same bytes, and opens no path of the header."""
    found = whatif(path, export=tmp_path / "new.jsonl")
    assert found.changes == []
    assert (tmp_path / "new.jsonl").read_bytes() == path.read_bytes()
    assert not (tmp_path / "kv").exists()
    assert check_trace(path).events["LOAD"] > 0


def test_a_tier_in_a_file_is_no_change_if_it_is_the_recorded_one(tmp_path):
    """A rerun with the tier that is recorded, from a file as it was then, has no changes."""
    file, trace = tmp_path / "mine.py", tmp_path / "trace.jsonl"
    file.write_text(
        "import attrs\n"
        "from kvcore_tiers.tier.host import Host\n"
        "@attrs.define(eq=False, kw_only=True)\n"
        "class Mine(Host):\n"
        "    name = 'mine'\n"
    )
    tier = f"{file}:memory=100MiB"
    work = Zipf(requests=20, prefixes=8, seed=3)
    api.simulate(work, model="llama-3.1-8b", blocks=300, tier=[tier], trace=trace)
    assert whatif(trace, tier=[tier]).changes == []


@pytest.mark.parametrize("memory", [None, "64MiB"])
def test_a_rerun_of_a_hybrid_model_has_the_bytes_of_the_trace(tmp_path, memory):
    """A run with cache groups, with or without a tier, has its bytes when it is made again."""
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    tier = [] if memory is None else [f"host:memory={memory}"]
    work = Zipf(requests=20, prefixes=8, seed=3)
    api.simulate(work, model="gemma-3-12b", blocks=600, tier=tier, trace=old)
    whatif(old, export=new)
    assert new.read_bytes() == old.read_bytes()


@pytest.mark.parametrize("shared", [10, 5])
def test_a_rerun_with_prefetches_has_the_figures_of_the_run(tmp_path, shared):
    """A run whose prefetches loaded from a tier has its own figures as recorded, and again.

    What a prefetch brings counts as a hit, not as loaded by the request; 10 of 10 keys of a
    prompt are in the tier, or 5.
    """
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    requests = [
        Request(
            id=n,
            arrival=n * NS_PER_S,
            prompt_tokens=650,
            output_tokens=10,
            keys=[n % 6 * 100 + k if k < shared else 10_000 + n * 20 + k for k in range(10)],
            key_tokens=64,
            hints=Hints(prefetch=NS_PER_S // 3 if n % 2 else None),
        )
        for n in range(24)
    ]
    run = api.simulate(requests, blocks=130, tier="host:memory=256MiB", trace=old)
    found = whatif(old, export=new)
    assert new.read_bytes() == old.read_bytes()
    assert attrs.asdict(found.recorded) == attrs.asdict(found.rerun)
    assert found.recorded.loaded_tokens == sum(run.log.loaded) > 0
    assert found.recorded.hit["hit_blocks"] == run.cache.stats.hit_blocks > 0


def test_a_rerun_without_a_clock_bills_what_its_tiers_loaded(tmp_path):
    """Without a clock too, a rerun has what it loaded from tiers, and is billed for it."""
    work, path = Zipf(requests=60, prefixes=8, seed=3), tmp_path / "trace.jsonl"
    compare(work, "lru", 100, tier="host:memory=1GiB", trace=path)
    found = whatif(path, price="input=3,cached=0.3")
    assert attrs.asdict(found.recorded) == attrs.asdict(found.rerun)
    assert found.rerun.loaded_tokens > 0


@pytest.mark.parametrize("tier", ["none", "disk:memory=2GiB", ["host:memory=1GiB", HOST]])
def test_given_tiers_replace_the_recorded_ones(path, tmp_path, tier):
    """Other tiers replace the recorded ones, in the new trace as well."""
    found = whatif(path, tier=tier, export=tmp_path / "new.jsonl")
    asked = [] if tier == "none" else [tier] if isinstance(tier, str) else tier
    names = [each.partition(":")[0] for each in asked]
    assert [tier["name"] for tier in found.rerun.config["tiers"]] == names
    assert len(check_trace(tmp_path / "new.jsonl").tiers) == len(names)


def test_another_block_size_keeps_the_memory_of_tiers(path, tmp_path):
    """Another block size changes the slots of tiers, and keeps their memory."""
    whatif(path, block_size=32, export=tmp_path / "new.jsonl")
    old, new = (lines(file)[0]["tiers"] for file in (path, tmp_path / "new.jsonl"))
    assert [tier["slot_bytes"] for tier in new] == [2 * tier["slot_bytes"] for tier in old]
    assert [tier["slots"] for tier in new] == [tier["slots"] // 2 for tier in old]


def test_kvcore_replay_prints_or_replaces_the_tiers(path):
    """`kvcore whatif --tier none` removes the tiers; without the option it prints them."""
    printed = run_here("whatif", path, "--tier", "none").stdout
    assert "tiers: none instead of" in " ".join(printed.split())
    assert "tier host: blocks of" in run_here("replay", path).stdout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "tape"}, "was recorded with tier plugin 'tape', which is not installed"),
        ({"options": {"memory": 1}}, "less than a block, which takes"),
    ],
)
def test_a_header_with_tiers_that_cannot_be_built_is_refused(path, change, reason):
    """A header whose tiers cannot be built is refused with the reason."""
    events = lines(path)
    events[0]["tiers"][0] |= change
    with pytest.raises(KvcoreError, match=reason):
        whatif(seal(path, events))


def test_the_policy_of_a_tier_opens_no_file(path, monkeypatch):
    """A recorded option that is a path is refused in the policy of a tier, too."""
    monkeypatch.setattr(
        "kvcore_replay.recorded.config.takes_path", lambda _, name: name == "half_life"
    )
    with pytest.raises(InputError, match="no file is opened because a trace names it"):
        whatif(path)
