"""`compare` in Python: its policies, sizes, rows and refusals."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import attrs
import pytest
from helpers.requests import keyed

import kvcore
from kvcore import InputError, PolicyError
from kvcore.models.cost import PrefillCost
from kvcore_lab import comparison
from kvcore_lab.comparison import compare_policies, default_sizes
from kvcore_plugins.eviction import LFU, LRU, Cost
from kvcore_plugins.prefix import Hashed, NoPrefix
from kvcore_plugins.scheduler import FCFS
from kvcore_plugins.workload import Jsonl, Mooncake, Zipf
from kvcore_replay.belady import Belady
from kvcore_tiers.tier.host import Host


def small(**options):
    """Return a workload of 60 requests of 6 keys, of which they share 4 with others."""
    shape = {"prefixes": 6, "prefix_tokens": 64, "suffix_tokens": 32, "levels": 2}
    return Zipf(requests=60, **shape | options)


def test_rows_are_by_policy_then_size():
    """Policies and sizes keep the order in which they are given."""
    rows = compare_policies(small(), ["lru", "fifo"], [20, 10]).rows
    assert [(row.eviction, row.blocks) for row in rows] == [
        ("lru", 20),
        ("lru", 10),
        ("fifo", 20),
        ("fifo", 10),
    ]


def test_a_reading_that_begins_during_another_loses_no_requests(monkeypatch):
    """Where requests take too much memory, none of two readings keeps the rest of them."""
    monkeypatch.setattr(comparison, "HELD_BYTES", 30_000)
    workload = comparison.KeptWorkload(Zipf(requests=100))
    first = iter(workload)
    for _ in range(80):
        next(first)
    next(iter(workload))
    assert len(list(first)) == 20
    assert len(list(workload)) == 100


@pytest.mark.parametrize(("limit", "readings"), [(comparison.HELD_BYTES, 1), (10_000, 3)])
def test_a_small_workload_is_read_once(limit, readings, monkeypatch):
    """A small workload is read once, a large one once and again for each row."""
    expected = [row.hit_blocks for row in compare_policies(small(), "lru,fifo", 20).rows]
    begun, read = [], Zipf.__iter__
    monkeypatch.setattr(comparison, "HELD_BYTES", limit)
    monkeypatch.setattr(Zipf, "__iter__", lambda self: begun.append(self) or read(self))
    assert [
        row.hit_blocks for row in compare_policies(small(), "lru,fifo", 20).rows
    ] == expected
    assert len(begun) == readings


def test_equal_names_with_other_options_are_two_policies():
    """Variants of one policy are rows of their own."""
    rows = compare_policies(
        small(), ["lfu,lfu:half_life=inf", "optimum,optimum:bypass=true"], [10]
    ).rows
    assert [
        (row.eviction, row.options.get("bypass", row.options.get("half_life"))) for row in rows
    ] == [
        ("lfu", 300.0),
        ("lfu", "inf"),
        ("optimum", False),
        ("optimum", True),
    ]


def test_one_policy_and_one_size_need_no_list():
    """One policy, in any form, and one size need not be in a list."""
    assert [row.eviction for row in compare_policies(small(), "lru,fifo", 10).rows] == [
        "lru",
        "fifo",
    ]
    for policy in (LRU, Belady()):
        (row,) = compare_policies(small(), policy, 10).rows
        assert (row.eviction, row.blocks) == (policy.name, 10)


def test_two_classes_of_one_name_are_refused():
    """Two classes with one name and equal options, which no table tells apart, are refused."""

    class Other(LRU):
        """LRU by another class."""

    message = r"two policies are named 'lru', kvcore\S+LRU and \S+Other: give one of the"
    with pytest.raises(InputError, match=message):
        compare_policies(small(), [LRU, Other], 10)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        *[(each, "3 cannot be compared: give a name, a policy,") for each in (3, [3])],
        ([FCFS()], "eviction=FCFS.* is no eviction plugin"),
        (lambda: 3, "eviction=3 is no eviction plugin"),
        (lambda: None, "eviction=None is no eviction plugin"),
        (Zipf, "eviction=Zipf is no eviction plugin"),
    ],
)
def test_what_builds_no_policy_is_refused(policies, message):
    """Instances, classes and what functions build are eviction policies."""
    with pytest.raises(InputError, match=message):
        compare_policies(small(), policies, [10])


def test_each_row_has_copies_of_plugins_that_are_instances():
    """An eviction policy, a prefix cache and a tier may be names or instances."""
    policy, sizes = LFU(half_life=5.0), [5, 10]
    plugins = {"prefix": Hashed(), "tier": Host(memory="2MiB")}
    one = kvcore.compare(small(), ["lru", policy], sizes, **plugins)
    named = {"prefix": "hashed", "tier": "host:memory=2MiB"}
    other = kvcore.compare(small(), ["lru", "lfu:half_life=5"], sizes, **named)
    assert [attrs.evolve(row, wall_s=0) for row in one.rows] == [
        attrs.evolve(row, wall_s=0) for row in other.rows
    ]
    kvcore.KVCache(10, eviction=policy)  # as it was given, it serves none


@pytest.mark.parametrize("workload", [Zipf, 17, None])
def test_an_object_that_is_no_workload_is_refused(workload):
    """The error of a class, a number or None in place of a workload shows what to give."""
    with pytest.raises(
        InputError, match=r"is no workload: give .* Plugins\(\).build\('workload'"
    ):
        compare_policies(workload, "lru", 10)


def test_empty_prompts_are_compared(tmp_path):
    """A request without tokens looks up nothing, in both accountings and for the optimum."""
    path = tmp_path / "rows.jsonl"
    line = '{"event":"REQUEST","id":%d,"t":0,"prompt":0,"output":1,"keys":[],"key_tokens":16}\n'
    path.write_text(line % 1 + line % 2)
    for policies, count in (("lru,optimum", "keys"), ("lru", "tokens")):
        for row in compare_policies(Jsonl(path), policies, 5, accounting=count).rows:
            assert (row.requests, row.lookup_blocks) == (2, 0)


def test_share_of_optimum_refers_to_the_optimum_that_must_admit():
    """`share_of_optimum` is the share of the hits of the optimum in an equal pool.

    It is the optimum that must admit, so the one with bypass may exceed it.
    """
    rows = compare_policies(small(), ["lru", "optimum:bypass=true", "optimum"], [8, 16]).rows
    best = {row.blocks: row.hit_blocks for row in rows[4:]}
    assert [row.share_of_optimum for row in rows] == [
        row.hit_blocks / best[row.blocks] for row in rows
    ]
    assert rows[2].share_of_optimum > 1


@pytest.mark.parametrize("prefix", ["none", NoPrefix])
def test_the_optimum_needs_radix_sharing(prefix):
    """The optimum is refused with a prefix cache other than radix sharing."""
    with pytest.raises(InputError, match=r"it says nothing of prefix cache 'none'"):
        compare_policies(small(), ["lru", "optimum"], [10], prefix=prefix)
    alone = compare_policies(small(), ["lru"], [10], prefix=prefix)
    assert (alone.rows[0].hit_blocks, alone.infinite.hit_blocks) == (0, 0)


def test_a_block_may_be_a_part_of_a_key():
    """A quarter of the block size and four times the blocks give four times the hits."""
    coarse = compare_policies(small(), ["lru", "optimum"], [10])
    fine = compare_policies(small(), ["lru", "optimum"], [40], block_size=4)
    assert [row.hit_blocks for row in fine.rows] == [4 * row.hit_blocks for row in coarse.rows]
    assert {row.block_size for row in fine.rows} == {4}


def test_recompute_sets_the_cost_of_a_block():
    """`recompute` sets the cost of a block that policies read from a span."""
    seen = []

    class Curious(Cost):
        def score(self, span, now):
            del now
            seen.append(span.recompute_seconds)
            return 0.0

    compare_policies(small(), [Curious], [10], recompute=PrefillCost(1.0))
    assert set(seen) == {16.0}


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_more_prefill_is_saved_than_a_prompt_takes(jobs):
    """A hit in the last key of a prompt, which the prompt fills in part, saves that part."""
    prompts = [keyed(n, [1, 2], 16, more=-12) for n in range(2)]
    found = kvcore.compare(
        prompts, "lru,fifo,optimum", 10, recompute=PrefillCost(1.0), jobs=jobs
    )
    assert found.infinite.prefill_s == 40
    assert [(row.hit_blocks, row.saved_s) for row in found.rows] == [(2, 20)] * 3


def test_default_sizes_are_parts_of_the_workload():
    """Without sizes, pools are parts of the distinct blocks, rounded to one digit."""
    assert default_sizes(182_790) == [1_000, 3_000, 6_000, 10_000, 30_000]
    assert default_sizes(0) == [1]
    comparison = compare_policies(small(), ["lru"])
    sizes = [row.blocks for row in comparison.rows]
    assert sizes == default_sizes(comparison.infinite.distinct_blocks)


def test_the_result_describes_the_workload():
    """The result has the name, digest, options and number of requests of the workload."""
    workload = small(seed=2)
    source = compare_policies(workload, ["lru"], [10]).workload
    assert (source.name, source.digest, source.requests) == ("zipf", workload.digest, 60)
    assert (source.key_tokens, source.options["seed"]) == (16, 2)


def test_the_digest_is_computed_before_the_run():
    """The digest of the workload is taken before anything is run."""

    class Fleeting(Zipf):
        """A workload whose digest changes once it has been read."""

        digest = "before"

        def __iter__(self):
            yield from super().__iter__()
            self.digest = "after"

    assert compare_policies(Fleeting(requests=3), "lru", 10).workload.digest == "before"


def test_a_trace_does_not_replace_the_file_of_requests(tmp_path):
    """A trace cannot be written to the file from which the requests are read."""
    path = tmp_path / "rows.jsonl"
    compare_policies(small(), "lru", 10, trace=path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"cannot write .*rows.jsonl: the requests come from"):
        compare_policies(Jsonl(path), "lru", 10, trace=path)
    assert path.read_bytes() == before


def test_progress_has_every_request_of_every_row():
    """Progress reports the total number of steps and then each of them."""
    reported = []

    @contextmanager
    def progress(what, total):
        reported.append((what, total))
        yield reported.append

    compare_policies(
        small(), ["lru", "optimum,optimum:bypass=true"], [10, 20], progress=progress
    )
    (what, total), *steps = reported
    assert (what, total) == ("comparing on zipf", 60 * 7)
    assert sum(steps) == total


@pytest.mark.parametrize("blocks", [10.5, "10", ["10"], [[20]], [True], [0], -1])
def test_invalid_pool_sizes_are_refused(blocks):
    """A pool size that is not a whole number of at least 1 is refused."""
    with pytest.raises(InputError, match=r"a pool of .* blocks was asked for; give 1 or more"):
        compare_policies(small(), "lru", blocks)


def test_a_policy_that_fails_leaves_no_trace(tmp_path):
    """A comparison in which a policy raises leaves no trace file."""

    class Broken(LRU):
        def victim(self, now):
            raise RuntimeError(now)

    with pytest.raises(PolicyError, match="Broken"):
        compare_policies(small(), [Broken], [10], trace=tmp_path / "trace.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_workload_beyond_the_largest_pool_is_refused(monkeypatch):
    """A workload with more distinct blocks than the largest pool is refused."""
    monkeypatch.setattr(sys.modules["kvcore_lab.comparison"], "MOST_BLOCKS", 30)
    with pytest.raises(PolicyError, match="the workload has more than 30 distinct blocks"):
        compare_policies(small(), ["lru"], [10])


@pytest.mark.parametrize(
    ("policies", "blocks", "options", "message"),
    [
        ([], [10], {}, "name at least one eviction policy"),
        (["lru"], [], {}, "give at least one size"),
        (["lru"], [10], {"accounts": "keys"}, "there is no option 'accounts'"),
        (["lru"], [10], {"accounting": "words"}, "'words' is not known"),
        (["lru,fifo"], [10], {"trace": "x"}, "policies given: 2, sizes given: 1"),
        (["lru"], None, {"trace": "x"}, "policies given: 1, sizes given: none"),
    ],
)
def test_invalid_policies_sizes_and_options_are_refused(policies, blocks, options, message):
    """Invalid policies, sizes and options raise InputError with the reason."""
    with pytest.raises(InputError, match=message):
        compare_policies(small(), policies, blocks, **options)


def document(comparison):
    """Return a comparison without its wall times."""
    rows = [attrs.evolve(row, wall_s=0.0) for row in comparison.rows]
    return attrs.evolve(comparison, rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("policies", ["lru,random,lfu", "optimum,lru,fifo"])
def test_the_result_does_not_depend_on_jobs(policies):
    """Rows, bills and tiers are the same for one job and for two."""
    options = {"residency": True, "price": "anthropic", "seed": 3, "tier": "host:memory=64MB"}
    alone, shared = (
        document(kvcore.compare(small(), policies, [30, 90], jobs=jobs, **options))
        for jobs in (1, 2)
    )
    assert shared == alone
    assert shared.rows[0].tiers == alone.rows[0].tiers


@pytest.mark.slow
def test_an_error_in_another_process_is_the_same_error(tmp_path):
    """A malformed line raises the same error in this process and in another."""
    path = tmp_path / "requests.jsonl"
    row = '{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}\n'
    path.write_text(f'{row}{{"timestamp":0}}\n')
    for jobs in (1, 2):
        with pytest.raises(InputError, match=r"requests\.jsonl:2: field 'input_length'"):
            compare_policies(Mooncake(path), "lru,fifo", [30], jobs=jobs)


def test_a_policy_that_cannot_be_sent_to_processes_is_refused(monkeypatch):
    """A policy class that cannot be sent to other processes is refused with two jobs."""
    monkeypatch.setattr("kvcore_lab.workers.can_fork", lambda: False)

    class Local(LRU):
        name = "local"

    with pytest.raises(InputError, match=r"policy 'local' cannot be sent .*one job"):
        compare_policies(small(), Local, [30, 40], jobs=2)
