"""The option `tier`: how text, TOML and Python are read, and the tiers that are built."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest

from kvcore import InputError, KVCache, compare, simulate
from kvcore.config import RunConfig, RunParts
from kvcore.plugins import describe
from kvcore.plugins.options import Spec
from kvcore_lab.sweep import Grid
from kvcore_lab.sweep.cells import CellRun, WorkloadCache
from kvcore_plugins.eviction import LFU
from kvcore_tiers.hierarchy import Tiers
from kvcore_tiers.tier import Host
from tests.helpers.commands import run_here

ZIPF = "zipf:requests=20,prefixes=3"
HOST, DISK = Spec("host", {"memory": "1GiB"}), Spec("disk", {"memory": "2GiB"})


def levels(**options):
    """Return the levels of tiers below a cache of 90 blocks."""
    return RunParts(RunConfig(workload=ZIPF, blocks=90, **options)).cache().tiers.levels


@pytest.mark.parametrize(
    "given",
    [
        "host:memory=1GiB,disk:memory=2GiB",
        ["host:memory=1GiB", "disk:memory=2GiB"],
        ("host:memory=1GiB", DISK),
        [{"name": "host", "memory": "1GiB"}, ["disk:memory=2GiB"], "none"],
    ],
)
def test_several_tiers_are_read(given):
    """Several tiers may be given in one text or in lists, and keep their order."""
    assert RunConfig(tier=given).tier == (HOST, DISK)


@pytest.mark.parametrize("given", [None, "none", (), [], ["none"]])
def test_none_and_empty_lists_mean_no_tiers(given):
    """None, "none" and empty lists all mean a cache without tiers."""
    assert RunConfig(tier=given).tier == ()
    assert RunParts(RunConfig(workload=ZIPF, blocks=90, tier=given)).cache().tiers is None


def test_a_model_with_cache_groups_has_tiers():
    """The blocks of groups are kept in tiers as those of one group are."""
    config = RunConfig(workload=ZIPF, blocks=90, model="gpt-oss-20b", tier="host:memory=1GiB")
    cache = RunParts(config).served_cache()
    assert cache.grouped
    assert [level.name for level in cache.tiers.levels] == ["host"]


@pytest.mark.parametrize(
    "given",
    [
        "host:memory=1GiB",
        Host(memory="1GiB"),
        [Host(memory=2**30)],
        partial(Host, memory="1GiB"),
    ],
)
def test_text_instance_list_and_function_make_the_same_tier(given):
    """Text, an instance, a list and a function make the same tier."""
    (level,) = levels(tier=given)
    assert type(level.tier) is Host
    assert level.tier.memory == 2**30


def test_a_tier_may_have_a_byte():
    """The least memory and bandwidth are a byte, and a byte a second."""
    tier = Host(memory=1, read_bandwidth=1)
    assert (tier.memory, tier.read_bandwidth) == (1, 1)


def test_the_eviction_policy_of_a_tier_may_have_an_option():
    """An eviction policy of a tier may have an option after a second colon.

    A random policy gets the seed of the run.
    """
    first, second = levels(
        tier="host:memory=1GiB,eviction=lfu:half_life=30,disk:memory=1GiB,eviction=random",
        seed=7,
    )
    assert type(first.tree.eviction) is LFU
    assert first.tree.eviction.half_life == 30
    assert second.tree.eviction.seed == 7
    assert describe(first.tier)["options"]["eviction"] == "lfu:half_life=30.0,unit=s"


@pytest.mark.parametrize(
    ("tier", "reason"),
    [
        ("hots:memory=1GiB", "no tier plugin is named 'hots' (did you mean 'host'?)"),
        ("host", "tier plugin 'host' needs a value for option 'memory'"),
        ("host:memory=1kB", "tier 'host' has memory=1000, less than a block, which takes"),
        ("host:memory=1GiB,eviction=lur", "no eviction plugin is named 'lur' (did you mean"),
        ("host:memory=1GiB,keep=all", "option 'keep' of tier plugin 'host' takes inclusive or"),
        ("host:memory=1GiB,write=0", "write=0: give evict, through, or a number of uses"),
        ("host:memory=0", "memory=0: give bytes, 1 or more, such as 64GiB"),
        ("host:memory=1GiB,read_bandwidth=0", "read_bandwidth=0: give bytes a second, 1 or"),
        (Host, "tier plugin 'host' needs a value for option 'memory'"),
    ],
)
def test_a_tier_that_cannot_be_built_is_refused(tier, reason):
    """A tier that cannot be built raises InputError that begins with "tier:"."""
    with pytest.raises(InputError) as refused:
        levels(tier=tier)
    assert str(refused.value).startswith(f"tier: {reason}")


def test_tiers_beside_one_that_is_refused_stay_unused():
    """A call that is refused can be mended with the instances that it had."""
    first = Host(memory="1GiB")
    with pytest.raises(InputError, match="less than a block"):
        levels(tier=[first, "host:memory=1kB"])
    assert [level.tier for level in levels(tier=[first])] == [first]


def test_a_cache_of_the_caller_refuses_the_option_tier():
    """A caller's cache has tiers only if `Tiers` was made for it.

    The option `tier` is refused together with a cache.
    """
    cache = KVCache(900, 16, accounting="tokens")
    Tiers(cache, ["host:memory=1GiB,write=through"], 2**21)
    assert simulate(RunParts(RunConfig(workload=ZIPF)).workload, cache=cache).summary()[
        "tiers"
    ][0]["stored_blocks"]
    with pytest.raises(InputError, match="tier= is for a cache that is built here"):
        simulate(ZIPF, cache=KVCache(90, 16, accounting="tokens"), tier="host:memory=1GiB")


SMALL = 'workload = "zipf:requests=20,prefixes=3"\nblocks = 90\n'


@pytest.mark.parametrize(
    "toml",
    [
        'tier = "host:memory=1GiB,disk:memory=2GiB,path=kv"',
        'tier = ["host:memory=1GiB", {name = "disk", memory = "2GiB", path = "kv"}]',
        '[[tier]]\nname="host"\nmemory="1GiB"\n[[tier]]\nname="disk"\nmemory="2GiB"\npath="kv"\n',
    ],
)
def test_a_toml_file_may_give_tiers_as_text_list_or_tables(toml, tmp_path):
    """A TOML file gives tiers as text, list or tables, with paths relative to the file.

    The JSON output of a run lists them from the nearest on.
    """
    (tmp_path / "run.toml").write_text(SMALL + toml)
    done = run_here("simulate", "--config", tmp_path / "run.toml", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    host, disk = json.loads(done.stdout)["config"]["tiers"]
    assert (host["name"], host["options"]["memory"]) == ("host", 2**30)
    assert (disk["name"], disk["options"]["path"]) == ("disk", str(tmp_path / "kv"))


def test_a_value_of_the_axis_tier_may_name_several_tiers():
    """A value of the axis `tier` may name several tiers; equal values count once.

    Another tier, policy or policy option makes another cell.
    """
    grid = Grid(
        workload=ZIPF,
        blocks=90,
        tier=["none", "host:memory=1GiB", "host:memory=1GiB,disk:memory=2GiB", [HOST, DISK]],
    )
    rows = [CellRun(cell, WorkloadCache()).row["tier"] for cell in grid]
    assert rows == ["none", "host:memory=1GiB", "host:memory=1GiB,disk:memory=2GiB"]
    other = (
        [HOST, DISK],
        "host:memory=1GiB,eviction=lfu",
        "host:memory=1GiB,eviction=lfu:half_life=9",
    )
    cells = (RunConfig(workload=ZIPF, blocks=90, tier=tier) for tier in ("none", HOST, *other))
    assert len({CellRun(cell, WorkloadCache()).digest for cell in cells}) == 5


def test_a_comparison_has_the_hits_of_pool_and_tiers():
    """A comparison reports the hits of the tiers beside those of the pool.

    Together they are bounded by the optimum, and tiers do not change the hits of the pool.
    """
    asked = "zipf:requests=60,prefixes=9", "lru,fifo,optimum", [150, 300]
    found = compare(*asked, tier="host:memory=1GiB,disk:memory=2GiB")
    *policies, small, large = found.rows
    bounds = {row.blocks: row.reused_blocks for row in (small, large)}
    for row in policies:
        assert [tier["tier"] for tier in row.tiers] == ["host", "disk"]
        below = sum(tier["hit_blocks"] for tier in row.tiers)
        assert row.hit_blocks + below == row.reused_blocks <= bounds[row.blocks]
        assert row.tiers[0]["hit_blocks"] > 0
        assert row.reuse_ratio["block"] == row.reused_blocks / row.lookup_blocks
    assert small.tiers is None
    alone = compare(*asked)
    assert [row.hit_blocks for row in found.rows] == [row.hit_blocks for row in alone.rows]
    assert all(row.reuse_ratio is None for row in alone.rows)


def test_kvcore_compare_prints_the_hits_of_pool_and_tiers():
    """`kvcore compare` prints the hits of pool and tiers in rows of their own.

    They show the share of the bound; the JSON output has the same fields.
    """
    command = "compare", ZIPF, "--blocks", "20", "--tier", "host:memory=1GiB"
    done = run_here(*command, "--eviction", "lru,optimum")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^lru \+ tiers +[0-9.]+% \([0-9]+%\)$", done.stdout, re.MULTILINE)
    assert re.search(r"^optimum \+ tiers +[0-9.]+%$", done.stdout, re.MULTILINE)
    assert "tier host:memory=1GiB" in done.stdout.replace("\n", " ")
    (row,) = json.loads(run_here(*command, "--eviction", "lru", "--json").stdout)["rows"]
    assert row["reused_blocks"] == row["hit_blocks"] + row["tiers"][0]["hit_blocks"]
