"""Comparisons of policies in the cache groups of a model."""

import re
from contextlib import contextmanager
from itertools import islice

import attrs
import pytest
from helpers.commands import error_of, json_of, run_here

import kvcore
from kvcore import CheckpointPolicy, InputError
from kvcore_lab.comparison import compare_policies
from kvcore_lab.curves.mrc import curve
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_plugins.checkpoint import Chunk
from kvcore_plugins.workload import Mooncake
from kvcore_replay.untimed import replay_groups
from kvcore_tiers.grouped import GroupTiers
from kvcore_tiers.hierarchy import Tiers

GROUPS = [LayerGroup("full", 512), LayerGroup("window", 512, 1024)]


def test_rows_are_replays_of_groups():
    """A row has the hits of prompts that are computed one by one, in chunks of 8,192."""
    source = list(islice(Mooncake(), 300))
    comparison = compare_policies(
        source, "lru,arc", 900, accounting="tokens", block_size=512, groups=GROUPS
    )
    cache = GroupedCache(GROUPS, 900)
    for request in source:
        cache.compute(request, 8192)
    lru, arc, bound = comparison.rows
    assert lru.hit_ratio == cache.stats.ratios()
    assert lru.evicted_blocks == cache.evicted_blocks > 0
    assert arc.hit_blocks > 0
    assert comparison.infinite.hit_blocks >= bound.hit_blocks >= lru.hit_blocks


def test_groups_are_counted_alike_with_and_without_checkpoint_policies():
    """The default checkpoint policy has the rows that it has without `--checkpoint`."""
    command = "compare --model gpt-oss-20b --memory 4GiB --accounting tokens --limit 60"
    without, named = (
        run_here(*command.split(), "--eviction", "lru", *more).stdout.splitlines()
        for more in ((), ("--checkpoint", "default"))
    )
    assert [line.split()[0] for line in without[4:7]] == ["lru", "bound", "infinite"]
    assert [line.split()[1:] for line in without[4:7]] == [
        line.split()[1:] for line in named[4:7]
    ]
    assert without[1] == named[1]


def test_checkpoint_policies_may_be_names_classes_or_instances():
    """Each row has a checkpoint policy of its own, however the policy is given."""
    options = {"memory": "1GiB", "model": "gpt-oss-20b", "accounting": "tokens", "limit": 40}
    one, other = (
        kvcore.compare("mooncake", "lru", checkpoint=policies, **options).rows
        for policies in ("chunk,default", [Chunk(), CheckpointPolicy])
    )
    assert [attrs.evolve(row, wall_s=0) for row in one] == [
        attrs.evolve(row, wall_s=0) for row in other
    ]
    assert [row.checkpoint for row in other[:2]] == ["chunk", "default"]


def test_two_policies_that_choose_are_refused_before_a_replay():
    """A checkpoint policy that chooses what leaves is refused beside `arc` before any row."""
    ticks = []

    @contextmanager
    def progress(*_):
        yield ticks.append

    options = {"memory": "1GiB", "model": "qwen3-next-80b-a3b", "accounting": "tokens"}
    with pytest.raises(InputError, match="'arc': checkpoint 'marconi' chooses what leaves"):
        kvcore.compare(
            "mooncake", "lru,arc", checkpoint="default,marconi", progress=progress, **options
        )
    assert ticks == []


def test_rows_with_tiers_are_replays_above_them():
    """Hits of pool and tiers together are those of the same prompts, one by one."""
    source, tier = list(islice(Mooncake(), 300)), "host:memory=4MiB"

    def below(cache):
        kind = GroupTiers if cache.grouped else Tiers  # the bound counts the slots of one pool
        return kind(cache, [tier], 1024)

    options = {"accounting": "tokens", "block_size": 512, "groups": GROUPS, "tiers": below}
    row, _ = compare_policies(source, "lru", 300, **options).rows
    cache = GroupedCache(GROUPS, 300)
    tiers = below(cache)
    hits = replay_groups(source, cache)
    assert row.hit_blocks == sum(hits) < row.reused_blocks == tiers.hit_stats().hit_blocks
    (document,) = row.tiers
    assert document["slots"] == 4096
    assert document["loaded_blocks"] == tiers.levels[0].stats.loaded > 0


def test_a_bound_with_tiers_is_that_of_both():
    """The optimum above a tier is that of full attention in as many blocks as both have."""
    source = list(islice(Mooncake(), 300))

    def below(cache):
        kind = GroupTiers if cache.grouped else Tiers
        return kind(cache, ["host:memory=400KiB"], 1024)

    options = {"accounting": "tokens", "groups": GROUPS, "checkpoint": "default"}
    lru, best = compare_policies(source, "lru", 300, tiers=below, **options).rows
    _, both = compare_policies(source, "lru", 700, **options).rows
    assert lru.reused_blocks <= best.reused_blocks == both.hit_blocks
    assert best.hit_blocks < best.reused_blocks


def test_a_tier_has_slots_as_large_as_blocks_of_the_groups():
    """On the command line, and in Python, a tier of a model has the slots of its groups."""
    options = {"memory": "4GiB", "model": "gpt-oss-20b", "accounting": "tokens", "limit": 40}
    row, _ = kvcore.compare("mooncake", "lru", tier="host:memory=1GiB", **options).rows
    command = " ".join(f"--{name} {value}" for name, value in options.items())
    command = f"compare {command} --eviction lru --tier host:memory=1GiB --json"
    shown, _ = json_of(*command.split())["rows"]
    assert row.tiers[0]["slots"] == shown["tiers"][0]["slots"] == 2**30 // (512 * 12 * 2048)
    assert row.reused_blocks == shown["reused_blocks"]


def test_memory_in_tokens_is_that_of_the_groups_of_the_model():
    """In tokens, the same memory has more and smaller blocks than with all layers as one."""
    options = {"memory": "64GiB", "model": "gemma-3-12b", "accounting": "tokens", "limit": 2000}
    groups, _ = kvcore.compare("mooncake", "lru", **options).rows
    (one,) = kvcore.compare(
        "mooncake", "lru", disable_hybrid_kv_cache_manager=True, **options
    ).rows
    assert (groups.blocks, one.blocks) == (2048, 341)
    assert groups.hit_blocks > 1.1 * one.hit_blocks


def test_groups_with_blocks_of_several_sizes_are_compared_by_lru():
    """Without `--eviction`, a row has the one policy that such groups can have."""
    options = ("--model", "deepseek-v4-flash", "--memory", "8GiB", "--accounting", "tokens")
    document = json_of("compare", *options, "--limit", "50", "--json")
    assert {row["eviction"] for row in document["rows"]} == {"lru", "optimum"}


def test_the_document_has_the_groups():
    """The JSON document has the groups, and the bytes of a block of any of them."""
    command = "compare --memory 8GiB --model gpt-oss-20b --accounting tokens --limit 20 --json"
    memory = json_of(*command.split(), "--eviction", "lru")["memory"]
    assert memory["bytes_per_block"] == 512 * 12 * 2048
    assert [group["kind"] for group in memory["cache_groups"]] == ["window", "full"]


@pytest.mark.parametrize(
    "options", [{"accounting": "keys"}, {"price": "anthropic:model=opus"}, {"residency": True}]
)
def test_what_is_not_known_of_groups_is_refused(options):
    """Keys, prices and residency are refused beside groups, in one line."""
    options = {"accounting": "tokens", **options}
    with pytest.raises(InputError, match="are compared by their hits, in tokens"):
        compare_policies("mooncake", "lru", 900, groups=GROUPS, **options)


def test_curves_have_the_hits_of_rows():
    """A curve of pools in groups has the hits that `compare` has at its sizes."""
    source, sizes = list(islice(Mooncake(), 200)), [100, 900]
    options = {"accounting": "tokens", "block_size": 512, "groups": GROUPS}
    rows = compare_policies(source, "lru,arc", sizes, **options).rows
    curves = curve(source, "lru,arc", sizes, **options)
    assert [hits for line in curves.curves for hits in line.hit_blocks] == [
        row.hit_blocks for row in rows if row.eviction != "optimum"
    ]
    with pytest.raises(InputError, match="groups are counted in tokens"):
        curve(source, "lru", sizes, groups=GROUPS)


def test_the_curve_of_a_model_counts_its_groups():
    """In tokens, `curve --model` has the pool of the model's groups, and says which."""
    command = "curve --model gpt-oss-20b --accounting tokens --limit 20 --sizes 3 --json"
    document = json_of(*command.split(), "--eviction", "lru")
    assert document["memory"]["bytes_per_block"] == 512 * 12 * 2048
    assert len(document["memory"]["cache_groups"]) == 2
    assert len(document["curves"][0]["points"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--memory 4GiB", "counted in tokens: give --accounting tokens"),
        ("--memory 4GiB --accounting tokens --block-size 16", "Give block_size=512"),
        ("--memory 2MiB --accounting tokens", "A block of any cache group of .* takes 36 MiB"),
    ],
)
def test_a_model_with_states_says_how_it_is_compared(options, message):
    """The message has what `compare` needs for a model that has cache groups."""
    command = f"compare --model qwen3-next-80b-a3b --limit 2 --checkpoint default {options}"
    assert re.search(message, error_of(*command.split()))


@pytest.mark.parametrize("model", ["gpt-oss-20b", "llama-3.1-8b"])
@pytest.mark.parametrize(
    ("memory", "reason"), [(40e9, "expected a number of bytes"), (-5, "less than a block")]
)
def test_a_memory_that_is_no_size_is_refused(model, memory, reason):
    """A number of another type, or below one block, is refused by its name, with groups too."""
    options = {"accounting": "tokens", "limit": 5, "model": model, "block_size": 512}
    for given in (memory, [memory]):
        with pytest.raises(InputError, match=reason):
            kvcore.compare("mooncake", "lru", memory=given, **options)
