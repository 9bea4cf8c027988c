"""The cells of a sweep: their results and the digests that identify them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import import_module, reload
from pathlib import Path
from time import time_ns

import pytest
from helpers.distributions import install
from helpers.serving import BLOCK, ask

import kvcore
from kvcore import InputError, KVCache, PluginError, ScoreEviction, simulate
from kvcore.config import RunConfig
from kvcore.plugins import Plugins
from kvcore.workloads import RequestList
from kvcore_lab.comparison import compare_policies
from kvcore_lab.sweep import Grid, Journal, Plan, Processes, RayCluster, sweep
from kvcore_lab.sweep.cells import CellRun, CellRunner, Outcome, Task, WorkloadCache
from kvcore_lab.sweep.executors import ThisProcess, executor_named
from kvcore_lab.sweep.sources import _beside, class_digests, kvcore_digest
from kvcore_plugins.eviction import LRU
from kvcore_plugins.latency import Roofline
from kvcore_plugins.workload import Zipf

ZIPF = "zipf:requests=60,prefixes=4"


class Here:
    """An executor that runs tasks in this process, in reverse, and records them."""

    def __init__(self):
        self.ran = []

    def run(self, tasks):
        """Yield the outcome of each task."""
        runner = CellRunner()
        for task in reversed(list(tasks)):
            self.ran.append(task.digest)
            yield runner(task)


@pytest.fixture
def swept(tmp_path):
    """Return a function that sweeps a grid in this process."""

    def run(mode, executor=None, **axes):
        with Journal(tmp_path / "journal") as journal:
            return sweep(
                Plan.from_grid(Grid(mode, **axes)), journal, executor=executor or Here()
            )

    return run


def digest(**fields):
    """Return the digest of a cell."""
    config = RunConfig(**{"workload": ZIPF, "blocks": 90, **fields})
    return CellRun(config, WorkloadCache()).digest


def test_an_untimed_cell_is_a_row_of_a_comparison(swept):
    """An untimed cell has the hits, evictions and share of the optimum of `compare`."""
    policies = ["belady", "lru", "lfu:half_life=5", "optimum:bypass=true"]
    rows = swept("compare", workload=ZIPF, eviction=policies, blocks=[40, 160]).rows
    by_size = compare_policies(Zipf(requests=60, prefixes=4, seed=0), policies, [40, 160]).rows
    expected = sorted(by_size, key=lambda row: row.blocks)
    for row, other in zip(rows, expected, strict=True):
        assert row["hit_blocks"] == other.hit_blocks
        assert row["evicted_blocks"] == other.evicted_blocks
        assert row["share_of_optimum"] == other.share_of_optimum
        assert row["reuse_share_of_optimum"] == row["share_of_optimum"]
        assert row["hit_ratio_request"] == other.hit_ratio["request"]


def test_with_tiers_there_are_shares_of_hits_and_of_what_is_reused(swept):
    """A share of the optimum is that of hits in the pool, another of what pool or tier had."""
    axes = {
        "eviction": ["optimum", "lru"],
        "blocks": [20],
        "tier": ["none", "host:memory=64MiB"],
    }
    rows = swept("compare", workload=ZIPF, **axes).rows
    optima = {row["tier"]: row for row in rows if row["eviction"] == "optimum"}
    for row in rows:
        most = optima[row["tier"]]
        assert row["share_of_optimum"] == row["hit_blocks"] / most["hit_blocks"]
        assert row["reuse_share_of_optimum"] == row["reused_blocks"] / most["reused_blocks"]
    assert any(row["reused_blocks"] > row["hit_blocks"] for row in rows)


def test_a_cell_that_lacks_a_column_is_run_again(swept, tmp_path):
    """A cell that lacks a column in the journal is run again, and no other cell is."""
    axes = {"workload": ZIPF, "blocks": [40, 160]}
    whole = swept("compare", **axes).rows
    journal = tmp_path / "journal"
    journal.write_text(journal.read_text().replace('"lookup_blocks":', '"looks":', 1))
    again = swept("compare", **axes)
    assert (again.rows, again.found, again.ran) == (whole, 1, 1)


def test_a_timed_cell_is_a_simulation(swept):
    """A timed cell has the values of the summary of `simulate`."""
    (row,) = swept("simulate", workload=ZIPF, blocks=900, tensor_parallel=2, seed=3).rows
    workload = Zipf(requests=60, prefixes=4, seed=3)
    summary = simulate(
        workload, cache=KVCache(900, 16), latency=Roofline(tensor_parallel=2)
    ).summary()
    assert row["ttft_s_p99"] == summary["ttft_s"]["p99"]
    assert row["step_count"] == summary["steps"]
    assert row["hit_blocks"] == summary["hit"]["hit_blocks"]
    assert row["pool_active_peak"] == summary["pool"]["active"]["peak"]
    assert row["slo_met"] is not None


def test_equal_cells_are_run_once(swept):
    """Cells that differ only by a spelled-out default are run once, and have a row each."""
    executor = Here()
    rows = swept(
        "compare", executor, workload=ZIPF, eviction=["lfu", "lfu:half_life=none"], blocks=40
    ).rows
    assert len(executor.ran) == 1
    assert [row["eviction"] for row in rows] == ["lfu", "lfu:half_life=none"]
    assert rows[0]["hit_blocks"] == rows[1]["hit_blocks"]


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "compare"},
        {"workload": "zipf:requests=61,prefixes=4"},
        {"blocks": 91},
        {"block_size": 8},
        {"eviction": "fifo"},
        {"eviction": "lfu:half_life=9"},
        {"prefix": "none"},
        {"scheduler": "srpt"},
        {"latency": "linear"},
        {"device": "a100-80g"},
        {"model": "llama-3-70b"},
        {"tensor_parallel": 2},
        {"codec": "fp32"},
        {"retention": "window:tokens=32"},
        {"max_seqs": 9},
        {"max_tokens": 999},
        {"steps": "prefill-first"},
        {"chunked": False},
        {"watermark": 0.5},
        {"rate_scale": 2},
        {"slo": None},
        {"seed": 1},
    ],
)
def test_every_option_that_may_change_a_result_changes_the_digest(fields):
    """Every option that may change a result changes the digest."""
    assert digest(**fields) != digest()


@pytest.mark.parametrize("fields", [{"codec": "fp8"}, {"tensor_parallel": 2}])
def test_what_changes_the_blocks_of_a_tier_changes_the_digest(fields):
    """Bytes of a block are part of the digest, also where no time depends on them."""
    same = {"latency": "linear", "tier": "host:memory=64MiB"}
    assert digest(**same, **fields) != digest(**same)


def test_the_seed_changes_the_digest_of_random_policies_only():
    """The seed changes the digest of a random policy, but not of a deterministic one.

    The workload has a seed of its own.
    """
    fields = {"workload": f"{ZIPF},seed=5", "eviction": "random"}
    assert digest(**fields, seed=1) != digest(**fields, seed=2)
    fields["eviction"] = "lru"
    assert digest(**fields, seed=1) == digest(**fields, seed=2)


def test_another_code_of_kvcore_changes_the_digest(monkeypatch, tmp_path):
    """Code of kvcore that was edited changes the digest, whatever the version is."""
    before = kvcore_digest()
    copy = shutil.copytree(Path(kvcore.__file__).parent, tmp_path / "kvcore")
    monkeypatch.setattr(kvcore, "__file__", str(copy / "__init__.py"))
    assert kvcore_digest.__wrapped__() == before
    with (copy / "serving" / "loop.py").open("a") as file:
        file.write("# edited\n")
    assert kvcore_digest.__wrapped__() != before
    monkeypatch.setattr("kvcore_lab.sweep.cells.kvcore_digest", kvcore_digest.__wrapped__)
    assert digest() != before


def test_equal_runs_have_equal_digests():
    """Equal runs have equal digests, however their options are written.

    Such are memory for as many blocks, a default spelled out, and a model's name in capitals.
    """
    assert digest(blocks=None, memory="180MiB") == digest()
    assert digest(model="Llama-3.1-8B", latency="roofline:compute=0.8") == digest()


def test_the_content_of_a_workload_file_changes_the_digest(tmp_path):
    """The content of a workload file changes the digest, and its path does not."""
    row = {"timestamp": 0, "input_length": 50, "output_length": 3, "hash_ids": [1]}
    paths = [tmp_path / name for name in "abc"]
    for path, length in zip(paths, (50, 50, 51), strict=True):
        path.write_text(json.dumps(row | {"input_length": length}))
    first, moved, changed = (digest(workload=f"mooncake:path={path}") for path in paths)
    assert first == moved != changed


POLICY = """
from base import worth
from kvcore import ScoreEviction

class Worth(ScoreEviction):
    name = "worth"

    def score(self, span, now):
        return worth(span)
"""

WORTH = "def worth(span):\n    return span.last_access\n"


def of_policy(folder, policy=POLICY, base=WORTH):
    """Return the digest of a cell with a policy in a file that imports another one."""
    folder.mkdir(exist_ok=True)
    (folder / "base.py").write_text(base)
    (folder / "policy.py").write_text(policy)
    sys.path.insert(0, str(folder))
    try:
        return digest(eviction=f"{folder}/policy.py:Worth")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["base"]


@pytest.mark.parametrize("edited", ["policy", "base"])
def test_the_code_of_a_plugin_changes_the_digest(edited, tmp_path):
    """The file of a plugin and one that it imports change the digest; a folder does not."""
    before = of_policy(tmp_path / "one")
    assert of_policy(tmp_path / "other") == before
    text = {"policy": POLICY, "base": WORTH}[edited] + "# edited\n"
    assert of_policy(tmp_path / "edited", **{edited: text}) != before


def test_a_folder_without_init_is_a_package_of_a_plugin(tmp_path):
    """Modules imported from a folder without `__init__.py` are part of the digest."""
    policy = POLICY.replace("from base", "import base\nfrom parts.worth")
    digests = []
    for name in ("one", "other", "edited"):
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "parts" / "worth.py").write_text(WORTH + f"# {name[0]}\n")
        digests.append(of_policy(tmp_path / name, policy))
        del sys.modules["parts"], sys.modules["parts.worth"]
    assert digests[0] == digests[1] != digests[2]


def test_what_is_installed_is_no_code_of_a_plugin(tmp_path, monkeypatch):
    """Modules of the standard library, those in C too, and of `site-packages` are left out."""
    (tmp_path / "policy.py").write_text("import math, attrs, pytest\n" + POLICY)
    (tmp_path / "base.py").write_text(WORTH)
    monkeypatch.syspath_prepend(tmp_path)
    policy = Plugins().get("eviction", f"{tmp_path}/policy.py:Worth")
    del sys.modules["base"]
    assert class_digests(policy).keys() == {"__main__", "base"}


def edit_later(path):
    """Give a file the time of an edit that comes after all that this process has loaded."""
    late = time_ns() + 10**9
    os.utime(path, ns=(late, late))


def test_a_plugin_that_was_edited_after_it_was_loaded_has_no_digest(tmp_path, monkeypatch):
    """A file that a process has loaded and that was edited since is refused, with its name."""
    (tmp_path / "policy.py").write_text(POLICY)
    (tmp_path / "base.py").write_text(WORTH)
    monkeypatch.syspath_prepend(tmp_path)
    policy = Plugins().get("eviction", f"{tmp_path}/policy.py:Worth")
    del sys.modules["base"]
    edit_later(tmp_path / "base.py")
    with pytest.raises(InputError, match=r"base.py was edited after this process had loaded"):
        class_digests(policy)


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """Return a function that writes a package with a policy, and returns the policy."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(package):
        folder = tmp_path / package
        (folder / "__pycache__").mkdir(parents=True)
        for name, text in {
            "__init__.py": "",
            "policies.py": POLICY.replace("from base", "from .base"),
            "base.py": WORTH,
            "weights.json": "[1]",
            ".hidden": "",
            "__pycache__/cached": "",
        }.items():
            (folder / name).write_text(text)
        return import_module(f"{package}.policies").Worth

    return write


@pytest.mark.parametrize("file", ["base.py", "weights.json"])
def test_a_file_of_a_package_changes_the_digest_of_its_plugins(packaged, file):
    """All modules and data of the package of a plugin are part of the digest, no caches."""
    policies = [packaged(f"{file[0]}_{name}") for name in ("first", "second")]
    with Path(sys.modules[policies[1].__module__].__file__).with_name(file).open("a") as edited:
        edited.write("\n")
    os.utime(edited.name, ns=(0, 0))
    first, second = map(class_digests, policies)
    names = {"__init__.py", "policies.py", "base.py", "weights.json"}
    assert first.keys() == second.keys() == names
    assert {name for name in first if first[name] != second[name]} == {file}


def test_data_that_change_while_a_process_runs_change_the_digest(packaged, tmp_path):
    """A plugin may read its data whenever it is built, so that they are read again."""
    policy = packaged("of_data")
    before = class_digests(policy)
    (tmp_path / "of_data" / "weights.json").write_text("[2]")
    edit_later(tmp_path / "of_data" / "weights.json")
    assert class_digests(policy)["weights.json"] != before["weights.json"]


def test_a_folder_that_is_no_package_has_no_data(packaged, tmp_path):
    """A folder without `__init__.py` may hold the journal that grows, and has code alone."""
    policy = packaged("of_results")
    (tmp_path / "of_results" / "__init__.py").unlink()
    assert class_digests(policy).keys() == {"policies.py", "base.py"}


def test_a_package_that_was_edited_after_it_was_loaded_has_no_digest(packaged, tmp_path):
    """The code of a package that is not what runs is refused, with the name of the file."""
    policy = packaged("of_code")
    edit_later(tmp_path / "of_code" / "base.py")
    with pytest.raises(InputError, match=r"of_code/base.py was edited after this process"):
        class_digests(policy)


def test_a_module_that_was_loaded_again_has_its_new_digest(packaged, tmp_path):
    """A module that a notebook loads again after an edit is what runs, and is digested."""
    policy = packaged("of_reloads")
    before = class_digests(policy)
    path = tmp_path / "of_reloads" / "policies.py"
    path.write_text(path.read_text() + "# edited\n")
    again = reload(sys.modules[policy.__module__]).Worth
    assert class_digests(again)["policies.py"] != before["policies.py"]
    assert class_digests(policy) == before


def test_a_package_beside_those_of_kvcore_is_not_its_code(packaged, tmp_path, monkeypatch):
    """A package that another distribution has installed is that of a plugin, by any name."""
    policy = packaged("kvcore_others")
    (tmp_path / "kvcore_other-1.0.dist-info").mkdir()
    sources = tmp_path / "kvcore_lab" / "sweep" / "sources.py"
    for name in ("kvcore_lab", "kvcore_cli"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.setattr("kvcore_lab.sweep.sources.__file__", str(sources))
    beside = _beside.__wrapped__
    install(tmp_path, "kvcore", [])
    assert [package.name for package in beside()] == [
        *("kvcore_cli", "kvcore_lab", "kvcore_others")
    ]
    record = "kvcore_cli/__init__.py,,\nkvcore_lab/__init__.py,,\n"
    (tmp_path / "kvcore-1.0.dist-info" / "RECORD").write_text(record)
    assert [package.name for package in beside()] == ["kvcore_cli", "kvcore_lab"]
    monkeypatch.setattr("kvcore_lab.sweep.sources._beside", beside)
    assert class_digests(policy)


def test_a_worker_with_another_digest_refuses_the_cell():
    """A worker whose digest of a cell differs from the plan returns an error."""
    outcome = CellRunner()(Task("00", RunConfig(workload=ZIPF)))
    assert outcome.result is None
    assert "this process would run another cell" in outcome.error


def test_an_exception_is_the_outcome_of_its_cell():
    """An unexpected exception is the outcome of its cell, with the place."""
    outcome = CellRunner()(Task("00", None))
    assert outcome == Outcome("00", None, outcome.error)
    assert outcome.error.startswith("AttributeError in ")


def test_a_failed_cell_is_run_again_by_the_next_sweep(swept, tmp_path):
    """A failed cell has a row with its error, and is run again by the next sweep."""
    path = tmp_path / "cut.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 900, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": "long", "output_length": 3, "hash_ids": [1]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    axes = {"workload": [f"mooncake:path={path}", ZIPF], "blocks": 40}
    result = swept("compare", **axes)
    (failed,) = result.failed
    assert failed is result.rows[0]
    assert "input_length" in failed["error"]
    assert failed["hit_blocks"] is None
    assert (result.rows[1]["error"], swept("compare", **axes).ran) == (None, 1)


def test_worker_processes_give_the_rows_of_one_process(swept, tmp_path):
    """Worker processes give the same rows as a sweep in one process."""
    axes = {"workload": ZIPF, "eviction": ["lru", "fifo", "optimum"], "blocks": [20, 40]}
    here = swept("compare", **axes)
    with Journal(tmp_path / "other") as journal:
        there = sweep(Plan.from_grid(Grid("compare", **axes)), journal, executor=Processes(2))
    assert here.rows == there.rows
    assert there.ran == 6


@pytest.mark.parametrize(
    ("text", "executor"),
    [
        ("local", Processes(3)),
        ("ray", RayCluster("auto", 3)),
        ("ray:10.0.0.1:6379", RayCluster("10.0.0.1:6379", 3)),
        ("ray://head:10001", RayCluster("ray://head:10001", 3)),
    ],
)
def test_executors_are_selected_by_name(text, executor):
    """An executor is selected by name, with the address of a cluster after a colon."""
    assert executor_named(text, 3) == executor


def test_a_cluster_needs_ray(monkeypatch):
    """Without ray the error gives the install command."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[ray\]'"):
        next(RayCluster().run([Task("00", RunConfig())]))


def test_what_a_script_has_made_is_a_cell_too(tmp_path):
    """A class of a policy and a list of requests are written as texts, and found again."""

    class Deepest(ScoreEviction):
        """Evicts what lies deepest."""

        name = "deepest"

        def score(self, span, now):
            """Return the negative depth."""
            return -span.depth

    requests = RequestList([ask(n, keys=[n % 3], key_tokens=BLOCK) for n in range(9)])
    policies = [Deepest, LRU]
    grid = Grid("compare", workload=requests, eviction=policies, blocks=[2])
    for found in 0, 2:
        with Journal(tmp_path / "journal") as journal:
            done = sweep(Plan.from_grid(grid), journal, executor=ThisProcess())
        assert done.found == found
        assert [row["eviction"] for row in done.rows] == ["deepest", "lru"]
        assert {row["workload"] for row in done.rows} == {"requests:requests=9"}


def test_an_array_of_numpy_has_the_values_of_an_axis():
    """Sizes are often computed."""
    numpy = pytest.importorskip("numpy")
    grid = Grid("compare", workload="zipf", blocks=numpy.array([10, 20]))
    assert grid.axes["blocks"] == (10, 20)
