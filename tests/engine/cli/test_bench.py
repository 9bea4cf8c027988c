"""Tests of `kvcore bench`: its suites on small inputs, their output, checks and errors."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import attrs
import pytest
from helpers.commands import run_here

from kvcore import InputError, Plugins
from kvcore_engine.bench import (
    BenchResult,
    Row,
    Settings,
    Target,
    available_suites,
    caches,
    run_suites,
)
from kvcore_engine.bench.report import BenchReport

torch = pytest.importorskip("torch", reason="the suites of tensors need torch")

from kvcore_engine.backend import TorchCPU  # noqa: E402 - needs torch
from kvcore_engine.bench import clocks, paged, tensors  # noqa: E402 - these need torch

SMALL = ("--quick", "--dtype", "fp32")


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch):
    """Limit the suites to 120 requests and 1 MiB of memory, so that they run quickly."""
    from kvcore_engine.bench import ceilings  # noqa: PLC0415 - needs torch

    monkeypatch.setattr(caches, "QUICK", 120)
    monkeypatch.setattr(ceilings, "BYTES", {"cpu": 1 << 20})


def bench_document(*arguments):
    """Run `kvcore bench` with `--json`, require success, and return the document."""
    done = run_here("bench", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tensor_operations_are_timed_and_correct():
    """Each operation on tensors reports a time, a share of a ceiling and a correct result."""
    document = bench_document("cpu", *SMALL, "--only", "store,copy,swap")
    assert document["wrong"] == 0
    assert [ceiling["name"] for ceiling in document["ceilings"]] == ["copy", "read-only sum"]
    assert all(ceiling["first"] > 0 and ceiling["last"] > 0 for ceiling in document["ceilings"])
    assert {row["operation"] for row in document["rows"]} == {"store", "copy", "swap"}
    for row in document["rows"]:
        assert row["seconds"] > 0
        assert row["share"] == pytest.approx(
            row["rate"] / max(document["ceilings"][0]["first"], document["ceilings"][0]["last"])
        )
        assert row["correct"] in (True, None)
    exact = [row for row in document["rows"] if row["by"] == "torch-cpu"]
    assert all(row["error"] in (0, None) for row in exact)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_rotated_keys_are_right_in_every_dtype(dtype):
    """Keys that a correct backend rotates and stores are right, however wide they are."""
    options = ("--quick", "--check", "--only", "store+rope", "--dtype", dtype)
    (row,) = bench_document("cpu", *options)["rows"]
    assert row["correct"]


def test_the_amount_is_all_that_new_tokens_attend_to():
    """The amount of a chunk with a window is the K/V of all that its tokens attend to."""
    rows = bench_document("cpu", *SMALL, "--check", "--only", "chunk")["rows"]
    (row,) = (row for row in rows if row["case"].endswith("5 new, window 100, sinks 4"))
    seen = 0
    for length in (n for n in tensors.POISON if n >= 5):
        new = range(length - 5, length)
        seen += len({x for n in new for x in range(n + 1) if x < 4 or x > n - 100})
    assert row["amount"] == seen * 2 * 8 * 128 * 4


def test_a_wrong_backend_fails_the_check(monkeypatch):
    """With `--check`, a wrong result ends with exit code 1 and is named in the output."""
    right = TorchCPU.attend

    def off(self, *arguments, **options):
        return right(self, *arguments, **options) * 1.001

    monkeypatch.setattr(TorchCPU, "attend", off)
    done = run_here("bench", "cpu", *SMALL, "--check", "--only", "decode")
    assert done.returncode == 1
    assert "Wrong: decode, fp32, poisoned, 1 to 2,049, torch-cpu." in done.stdout


def test_a_case_that_raises_is_a_row_and_the_others_run(monkeypatch):
    """A case that raises becomes a row with the reason, and the other cases still run."""
    right = TorchCPU.copy_blocks

    def broken(self, pairs):
        if self.layout.dtype == "fp32":
            msg = "no such luck"
            raise ValueError(msg)
        right(self, pairs)

    monkeypatch.setattr(TorchCPU, "copy_blocks", broken)
    done = run_here("bench", "cpu", "--quick", "--check", "--only", "copy")
    assert done.returncode == 1
    assert "failed: ValueError: no such luck" in done.stdout
    assert "2 of 3 checked results are right" in done.stdout


def test_a_slot_that_was_never_stored_reads_as_wrong(monkeypatch):
    """A backend that reads a slot that was never stored returns NaN, which is wrong."""
    right = TorchCPU.plan

    def longer(self, batch):
        if {*batch.lengths} == {1}:  # each sequence sees a slot behind its last token
            tables = [[*table, table[0]] for table in batch.block_tables]
            contexts = [context + 1 for context in batch.contexts]
            batch = attrs.evolve(batch, block_tables=tables, contexts=contexts)
        return right(self, batch)

    monkeypatch.setattr(TorchCPU, "plan", longer)
    done = run_here("bench", "cpu", *SMALL, "--check", "--only", "decode")
    assert done.returncode == 1
    assert "WRONG: NaN" in done.stdout


def test_cache_and_sim_suites_are_correct_and_note_missing_peers(tmp_path):
    """Suites `cache` and `sim` find no wrong result, and note each peer that is missing.

    What was timed once has no spread.
    """
    out = tmp_path / "bench.json"
    done = run_here("bench", "cache", "sim", "--quick", "--out", out)
    assert done.returncode == 0
    document = json.loads(out.read_bytes())
    assert document["wrong"] == 0
    assert document["ceilings"] == []
    assert {row["by"] for row in document["rows"]} >= {"OrderedDict", "KVCache", "kvcore"}
    assert {row["spread"] for row in document["rows"]} == {None}
    assert "timed twice" not in done.stdout
    peers = [row for row in document["rows"] if row["by"] == "libcachesim"]
    assert peers
    assert all(row["seconds"] or row["note"].startswith("not available") for row in peers)
    assert "120 requests, blocks of 16" in done.stdout


def test_a_peer_that_fails_is_a_row_with_the_reason(monkeypatch):
    """A peer that is there and fails is a row with the reason, and all others are measured."""
    peer = ModuleType("libcachesim")
    peer.__spec__ = ModuleSpec("libcachesim", None)
    monkeypatch.setitem(sys.modules, "libcachesim", peer)
    rows = bench_document("cache", "--quick")["rows"]
    assert [row["note"] for row in rows[3::4]] == [
        "failed: AttributeError: module 'libcachesim' has no attribute 'TraceType'"
    ] * 2
    assert all(row["seconds"] for row in rows if row["by"] != "libcachesim")
    monkeypatch.setattr(caches, "version", lambda _: "1.0")
    monkeypatch.setattr(caches, "find_spec", lambda _: True)
    monkeypatch.setattr(caches, "REPLAY", "import json; json.no_replay")
    rows = bench_document("sim", "--quick")["rows"]
    assert all(": AttributeError: module 'json' has" in row["note"] for row in rows[1::2])


def test_calls_rotate_over_three_sets_of_blocks_or_more(monkeypatch):
    """All is timed over three sets of blocks or more, so that no cache holds the next one."""
    calls = []

    def clock(versions, _, **__):
        calls.extend(map(len, versions))
        return [clocks.Timing(1.0, 0.0)] * len(versions)

    monkeypatch.setattr(paged, "clock_of", lambda _: clock)
    bench_document("cpu", *SMALL)
    assert min(calls) >= 3


@pytest.mark.parametrize(
    ("graph", "captured", "how"),
    [
        (True, True, ""),
        (True, False, "launched, not replayed"),
        (False, True, "launched, not replayed"),
    ],
)
def test_a_time_of_launched_work_says_so(monkeypatch, graph, captured, how):
    """A time on a GPU says that its work was launched, wherever it is no replay of a graph."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clocks, "_captured", lambda run: run if captured else None)
    monkeypatch.setattr(clocks, "_events", lambda *_: lambda: 1.0)
    (timing,) = clocks.time_on_gpu([[lambda: None]], 0.0, graph=graph)
    assert timing == clocks.Timing(1.0, 0.0, how)


@pytest.mark.parametrize("only", ["lru", "simulate", "copy"])
def test_suites_without_a_wanted_operation_do_not_run(only):
    """Of several suites those alone run that have the operations of `--only`."""
    document = bench_document("cpu", "cache", "sim", *SMALL, "--check", "--only", only)
    assert {row["operation"] for row in document["rows"]} == {only}


def test_check_measures_no_times():
    """With `--check` the tables have a column of results and none of shares."""
    done = run_here("bench", "sim", "--check", "--quick")
    assert done.returncode == 0
    assert "result" in done.stdout
    assert "share" not in done.stdout


@pytest.mark.skipif(
    Plugins().get("backend", "torch-cuda").unavailable() is None, reason="there is a GPU"
)
def test_without_a_gpu_the_error_has_the_reason_and_a_remedy():
    """Without a GPU `bench gpu` exits with code 3, the reason and a command to run elsewhere.

    The suite is not among the available suites.
    """
    done = run_here("bench", "gpu")
    assert done.returncode == 3
    assert "bench gpu needs a GPU: " in done.stderr
    assert "python -m kvcore.testing.gpu" in done.stderr
    assert available_suites() == ["cpu", "cache", "sim"]


@pytest.mark.slow
def test_the_gpu_suite_passes_on_torch_cpu():
    """All checks of the suite `gpu` pass with the backend `torch-cpu`."""
    arguments = ("--backend", "torch-cpu:attention=sdpa", "--check", "--quick")
    document = bench_document(
        "gpu", *arguments, "--dtype", "bf16", "--only", "decode,copy,swap"
    )
    assert document["wrong"] == 0
    assert sum(row["correct"] is True for row in document["rows"]) > 10
    assert any("ragged" in row["case"] for row in document["rows"])


@pytest.mark.parametrize(("operation", "cases"), [("copy", 1), ("lru", 2), ("simulate", 2)])
def test_cases_after_the_deadline_are_not_run(operation, cases):
    """A case that has not begun when the deadline passes is a row with that reason."""
    suites = "cpu", "cache", "sim"
    document = bench_document(*suites, *SMALL, "--only", operation, "--deadline", "0.000001")
    assert [row["note"] for row in document["rows"]] == [
        "not measured: the deadline of 1e-06 s has passed"
    ] * cases


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (Settings(), "not available: torch-cpu has no bf16"),
        (Settings(deadline=1.0, begun=-10.0), "not measured: the deadline of 1 s has passed"),
    ],
)
def test_a_grid_that_cannot_be_measured_has_rows_with_the_reason(monkeypatch, settings, note):
    """Each cell of the grid is a row with the reason if no pool of its dtype can be had."""

    def refuse(_, layout):
        msg = f"torch-cpu has no {layout.dtype}"
        raise InputError(msg)

    monkeypatch.setattr(TorchCPU, "check", refuse)
    suite = paged.TensorSuite("gpu", "torch-cpu", settings, Plugins(), 0.1)
    rows = [*tensors._grid(suite, "bf16")]
    cells = len(tensors.GRID_BATCHES) * len(tensors.GRID_CONTEXTS)
    assert [row.note for row in rows] == [note] * cells


def report(**fields):
    """Return a report with a single row that has these fields."""
    row = Row(suite="gpu", operation="copy", case="bf16", by="torch-cuda", **fields)
    result = BenchResult(machine={}, settings=Settings(), ceilings=[], rows=[row], seconds=1)
    return BenchReport(result)


@pytest.mark.parametrize(
    ("fields", "cell"),
    [
        ({"seconds": 3e-5, "target": Target(seconds=4e-5)}, "≤ 40 µs: reached"),
        ({"seconds": 5e-5, "target": Target(seconds=4e-5)}, "≤ 40 µs: missed"),
        ({"seconds": 1.0, "share": 0.95, "target": Target(share=0.9)}, "≥ 0.90: reached"),
        ({"target": Target(share=0.9)}, "≥ 0.90"),
        ({"seconds": 0.9996, "spread": 0.02}, "1,000 ms ±1%"),
        ({"seconds": 1.2e-5}, "12 µs"),
        ({"error": float("nan")}, "WRONG: NaN"),
        ({"error": 0.5, "allowed": 0.1}, "WRONG: off by 5.0e-01"),
        ({"error": 0.0}, "exact"),
    ],
)
def test_a_cell_shows_time_target_or_correctness(fields, cell):
    """A cell shows a time, whether a target is reached, or whether a result is correct."""
    found = report(**fields)
    assert cell in found.table.rows[0]
    if "seconds" in fields and "target" in fields:
        assert "targets are reached" in found.reading


def test_an_unknown_suite_is_refused():
    """`run_suites` raises InputError for an unknown suite, and the error lists the suites."""
    with pytest.raises(InputError, match="no suite 'tpu'; there are: cpu, gpu, cache, sim"):
        run_suites(["tpu"], Settings())
