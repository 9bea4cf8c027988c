"""Hit curves: their sizes, the exact ones that take one pass, and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from contextlib import contextmanager
from typing import ClassVar

import attrs
import pytest
from helpers.failing import Deadly, Failing
from helpers.tries import number, requests

from kvcore import InputError, PluginError, PolicyError, Request, Workload
from kvcore.cache.layout import BlockLayout
from kvcore.request import NO_HINTS, Hints
from kvcore_lab.comparison import compare_policies
from kvcore_lab.curves.mrc import Steps, curve, spread_sizes
from kvcore_plugins.eviction import LRU
from kvcore_plugins.workload import Zipf

pytest.importorskip("numba")
from kvcore_lab.curves import _mrc_kernels as kernels
from kvcore_lab.curves._reuse import Reuse

pytestmark = pytest.mark.slow

SMALL = Zipf(requests=80, prefixes=8, prefix_tokens=64, suffix_tokens=48)
SIZES = [3, 10, 30, 90]


@attrs.define(slots=False, eq=False)
class Prompts(Workload):
    """A workload of the given requests."""

    name: ClassVar[str] = "prompts"
    digest: ClassVar[str] = "none"
    key_tokens: ClassVar[int] = 1

    served: list[Request] = attrs.field(factory=list)

    def __iter__(self):
        """Yield the given requests."""
        return iter(self.served)


def hits(curves):
    """Return the hits of each policy."""
    return {each.eviction: each.hit_blocks for each in curves.curves}


@pytest.mark.parametrize("count", ["keys", "tokens"])
def test_a_curve_has_the_hits_of_compare(count):
    """A curve has the hits of `compare`, whether it takes one pass or is replayed."""
    policies = "lru,lfu,optimum" if count == "keys" else "lru,lfu"
    rows = compare_policies(SMALL, policies, SIZES, accounting=count).rows
    expected = {}
    for row in rows:
        expected.setdefault(row.eviction, []).append(row.hit_blocks)
    assert hits(curve(SMALL, policies, SIZES, accounting=count)) == expected


HINTS = [
    *(Hints(pin=50 * 10**9), Hints(demote=True), Hints(share=0), Hints(share=16)),
    Hints(prefetch=10**9),
]


@pytest.mark.parametrize("hints", HINTS, ids=str)
@pytest.mark.parametrize("policies", ["lru", "lru,optimum,fifo"])
def test_a_curve_obeys_the_hints_of_requests(hints, policies):
    """A curve has the hits and the bounds of `compare` where requests have hints."""
    made = [
        attrs.evolve(request, arrival=n * 10**9, hints=hints if n % 2 else NO_HINTS)
        for n, request in enumerate(SMALL)
    ]
    rows = compare_policies(made, policies, SIZES)
    expected = {}
    for row in rows.rows:
        expected.setdefault(row.eviction, []).append(row.hit_blocks)
    found = curve(made, policies, SIZES)
    assert hits(found) == expected
    assert (found.hit_blocks, found.distinct_blocks) == (
        rows.infinite.hit_blocks,
        rows.infinite.distinct_blocks,
    )
    assert found.workload.requests == 80
    assert (found.curves[0].steps is not None) == (hints.prefetch is not None)


@pytest.mark.parametrize("count", ["keys", "tokens"])
def test_a_curve_has_the_bounds_of_compare(count):
    """A curve has the lookups, distinct blocks and infinite hits of `compare`."""
    infinite = compare_policies(SMALL, "lru", 10, accounting=count).infinite
    for policies in ("lru", "fifo"):
        found = curve(SMALL, policies, SIZES, accounting=count)
        assert found.lookup_blocks == infinite.lookup_blocks
        assert found.distinct_blocks == infinite.distinct_blocks
        assert found.hit_blocks == infinite.hit_blocks
        assert found.workload.requests == 80


def test_the_sizes_are_spread_at_even_ratios():
    """Sizes are spread at even ratios from a thousandth of all blocks to all of them.

    No size is repeated, and without blocks the only size is 1.
    """
    assert spread_sizes(1_000_000, 4) == [1_000, 10_000, 100_000, 1_000_000]
    assert spread_sizes(3, 5) == [1, 3]
    assert spread_sizes(0, 9) == [1]


def test_steps_interpolate_and_end_level():
    """`Steps.at` interpolates between two corners and is constant after the last one."""
    steps = Steps(array("q", [0, 2, 5]), array("q", [0, 4, 4]))
    assert [steps.at(blocks) for blocks in (0, 1, 2, 3, 5, 99)] == [0, 2, 4, 4, 4, 4]


def test_steps_are_of_pools_that_there_can_be():
    """There are no hits in a pool of fewer blocks than none."""
    with pytest.raises(InputError, match="a pool of -1 blocks was asked for; give 0 or more"):
        Steps(array("q", [0, 4]), array("q", [0, 4])).at(-1)


@pytest.mark.parametrize(("hits", "size"), [(0, 0), (1, 1), (2, 1), (4, 2), (4.1, None)])
def test_the_size_for_hits_is_the_smallest(hits, size):
    """`Steps.size_for` is the first size with as many hits; None if no pool has as many."""
    steps = Steps(array("q", [0, 2, 5]), array("q", [0, 4, 4]))
    assert steps.size_for(hits) == size


def test_workloads_without_keys_have_curves_without_hits():
    """Requests without keys, and a workload without requests, have curves without hits."""
    for served in ([], [Request(id=0, prompt_tokens=4, key_tokens=1)]):
        found = curve(Prompts(served), "lru,optimum,fifo")
        assert hits(found) == {"lru": [0], "optimum": [0], "fifo": [0]}
        assert found.ratio(0) is None


@pytest.mark.parametrize(
    "key",
    [
        number,
        lambda text: -number(text),
        lambda text: number(text) + 2**70,
        str.encode,
        lambda text: number(text) if len(text) < 3 else text,
        lambda text: number(text) * 2**20,
    ],
    ids=["int", "negative", "large", "bytes", "mixed", "far apart"],
)
def test_keys_of_any_type_give_the_same_curve(key):
    """The type and size of keys do not change the curve, even if types are mixed."""
    texts = ["abcd", "ab", "abce", "xyz", "abcd", "xy", "xyzw", "abce"] * 3
    reuse = Reuse.read(requests(texts, key=key), BlockLayout("keys", 1))
    assert reuse.lru() == Reuse.read(requests(texts), BlockLayout("keys", 1)).lru()


@pytest.mark.parametrize(
    "key", [number, str.encode, lambda text: number(text) if len(text) < 3 else text]
)
def test_the_size_of_portions_does_not_change_the_counts(monkeypatch, key):
    """The number of keys that are read at a time does not change the counts."""
    monkeypatch.setattr("kvcore_lab.curves._reuse.AT_ONCE", 3)
    texts = ["abcd", "ab", "", "abce", "xyz", "abcd", "xy"] * 2
    reuse = Reuse.read(requests(texts, key=key), BlockLayout("keys", 1))
    assert (reuse.lookup_blocks, reuse.distinct_blocks) == (38, 8)


@pytest.mark.parametrize(
    ("prompts", "place", "key"),
    [
        ([[1, 2], [3, 2], [1]], 1, 2),
        ([[1, 2], [2]], 1, 2),
        ([[1], [], [4, 1]], 2, 1),
        ([[5, 5]], 0, 5),
        ([["a", "b"], ["c", "b"]], 1, "'b'"),
    ],
)
def test_a_key_after_two_others_is_refused(prompts, place, key):
    """A key that follows two different keys is refused with its request's place."""
    served = [
        Request(id=n, prompt_tokens=len(keys), keys=keys, key_tokens=1)
        for n, keys in enumerate(prompts)
    ]
    with pytest.raises(InputError, match=f"request at place {place} .*: key {key} does not"):
        Reuse.read(served, BlockLayout("keys", 1))


def test_too_many_keys_for_an_exact_curve_are_refused(monkeypatch):
    """More keys than an exact curve can count are refused with both numbers."""
    monkeypatch.setattr("kvcore_lab.curves._reuse.MOST_KEYS", 3)
    with pytest.raises(InputError, match="has 4 keys, and an exact curve takes at most 3"):
        curve(Prompts(requests(["ab", "ac"])), "lru")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": []}, "nothing to compare"),
        ({"policies": "lru", "blocks": []}, "no pool to make a curve of"),
        ({"policies": "lru", "blocks": [0]}, "a pool of 0 blocks"),
        ({"policies": "lru", "jobs": 0}, "0 jobs"),
        ({"policies": "lru", "accounting": "bytes"}, "accounting 'bytes'"),
    ],
)
def test_invalid_policies_sizes_and_options_are_refused(options, message):
    """Invalid policies, sizes and options raise InputError with the reason."""
    with pytest.raises(InputError, match=message):
        curve(SMALL, **options)


def test_an_object_that_is_no_workload_is_refused():
    """The error of a number in place of a workload shows how to build one."""
    with pytest.raises(InputError, match="17 is no workload"):
        curve(17, "lru")


def test_progress_has_loading_reading_and_replaying():
    """Progress reports loading, reading, the optimum and replays, each with all its steps."""
    reported = []

    @contextmanager
    def progress(what, total):
        done = []
        yield done.append
        reported.append((what.partition(" (")[0], total, sum(done)))

    curve(SMALL, "lru,fifo,optimum", SIZES, progress=progress)
    assert reported == [
        ("loading compiled loops", None, 0),
        ("reading zipf", 80, 80),
        ("the optimum by size", 4, 4),
        ("replaying zipf by size", 4, 4),
    ]


def test_the_result_does_not_depend_on_jobs():
    """One job and two give the same curves, also of policies with random choices and floats."""
    policies = "lfu,random,cost"
    alone = curve(SMALL, policies, SIZES, seed=3)
    assert curve(SMALL, policies, SIZES, seed=3, jobs=2) == alone


def test_an_error_in_another_process_is_the_same_error():
    """An error in another process names the policy, the method and the exception."""
    with pytest.raises(PolicyError, match=r"'failing' .* raised ValueError in victim\(\)"):
        curve(SMALL, Failing, SIZES, jobs=2)


def test_a_process_that_dies_is_reported():
    """The error about a process that died has its exit code and what to try."""
    with pytest.raises(PluginError, match=r"replay of zipf .* died .*exit code 7: .*fewer"):
        curve(SMALL, Deadly, SIZES, jobs=2)


def test_a_policy_that_cannot_be_sent_to_processes_is_refused(monkeypatch):
    """A policy class that cannot be sent to other processes is refused with two jobs only."""
    monkeypatch.setattr("kvcore_lab.workers.can_fork", lambda: False)

    class Local(LRU):
        name = "local"

    with pytest.raises(InputError, match=r"policy 'local' cannot be sent .*one job"):
        curve(SMALL, Local, SIZES, jobs=2)
    assert curve(SMALL, Local, SIZES).curves[0].eviction == "local"


@pytest.mark.parametrize("policies", ["lru", "optimum"])
def test_without_numba_the_extra_is_named(monkeypatch, policies):
    """Without numba exact curves raise PluginError with the extra; others are replayed."""
    monkeypatch.setitem(sys.modules, "kvcore_lab.curves._reuse", None)
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[lab\]'"):
        curve(SMALL, policies, SIZES)
    assert curve(SMALL, "fifo", SIZES).hit_blocks


def test_only_exact_curves_import_numba():
    """Only an exact curve imports numba and numpy, and no curve imports matplotlib."""
    code = """
import sys
import kvcore_lab.cli.curve, kvcore_cli.report
from kvcore_lab.curves.mrc import curve
from kvcore_plugins.workload import Zipf
heavy = {"numba", "numpy", "matplotlib"}
curve(Zipf(requests=5), "fifo", [4])
assert not heavy & set(sys.modules)
curve(Zipf(requests=5), "lru", [4])
assert heavy - set(sys.modules) == {"matplotlib"}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def in_process(code, cache):
    """Run code in a process that keeps its compiled functions in `cache`."""
    env = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, env=env, capture_output=True, text=True)


def test_compiled_functions_are_kept_in_numba_cache_dir(tmp_path):
    """Compiled functions are kept in NUMBA_CACHE_DIR and loaded by the next process.

    If they are damaged, the error says what to delete.
    """
    code = """
from kvcore_lab.curves import _mrc_kernels as kernels
stats = kernels.find_runs.stats
print(stats.cache_path, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""
    first, second = (in_process(code, tmp_path).stdout for _ in range(2))
    assert first.startswith(str(tmp_path))
    assert first.endswith(" 0 1\n")
    assert second.endswith(" 1 0\n")
    for index in tmp_path.rglob("*.nbi"):
        index.write_bytes(b"cut")
    made = in_process("from kvcore_cli.main import run; print(run(['curve']))", tmp_path)
    assert made.stdout == "3\n"
    assert "delete what numba has kept of them, the files kernels.* in NUMBA" in made.stderr


def test_functions_are_compiled_without_a_place_for_a_cache(monkeypatch):
    """Functions are compiled without a cache if there is no place for one."""
    jit = kernels.njit

    def nowhere(*args, cache=False):
        if cache:
            msg = "no locator available"
            raise RuntimeError(msg)
        return jit(*args)

    monkeypatch.setattr(kernels, "njit", nowhere)
    assert kernels.compiled("i8(i8)")(lambda number: number + 1)(2) == 3


def test_uncompiled_functions_give_the_same_results(monkeypatch):
    """The functions that numba compiles give the same results in plain Python."""
    served = requests(["abcd", "ab", "abce", "xyz", "abcd", "xy", "abce"] * 2)
    geometry = BlockLayout("keys", 1)
    compiled = Reuse.read(served, geometry)
    sizes = range(1, 12)
    expected = [compiled.optimum(size, bypass=bypass) for size in sizes for bypass in (0, 1)]
    for name in ("follow", "add"):
        monkeypatch.setattr(kernels, name, getattr(kernels, name).py_func)
    for name in ("find_runs", "reuse_depths", "served_by_belady"):
        plain = getattr(kernels, name).py_func
        monkeypatch.setattr(f"kvcore_lab.curves._reuse.{name}", plain)
    found = Reuse.read(served, geometry)
    assert found.lru() == compiled.lru()
    assert expected == [
        found.optimum(size, bypass=bypass) for size in sizes for bypass in (0, 1)
    ]
