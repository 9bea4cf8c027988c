"""Results in Python: their texts, short forms, frames that go together, and calls."""

import pytest
from helpers.commands import run_here
from helpers.rows import write_rows

import kvcore
from kvcore import KVCache, compare, simulate, whatif

ZIPF = "zipf:requests=40,prefixes=6"


def test_a_printed_comparison_is_the_table_of_the_command():
    """`print` of a comparison has the lines of `kvcore compare`."""
    text = str(compare(ZIPF, "lru,lfu", [100]))
    done = run_here("compare", ZIPF, "--eviction", "lru,lfu", "--blocks", 100)
    shown = set(done.stdout.splitlines())
    assert {"lru", "lfu"} <= {line.split()[0] for line in text.splitlines() if line}
    assert all(line in shown for line in text.splitlines() if line.startswith("l"))


def test_a_printed_simulation_has_its_times():
    """`print` of a simulation has the table of times."""
    text = str(simulate(ZIPF))
    assert any(line.startswith("TTFT ") for line in text.splitlines())


@pytest.mark.parametrize("name", ["compare", "simulate", "whatif", "explain", "curve"])
def test_the_short_form_of_a_result_is_a_line(tmp_path, name):
    """`repr` of a result is one short line with its class, without rows and objects."""
    path = tmp_path / "trace.jsonl"
    simulate(ZIPF, blocks=400, trace=path)
    made = {
        "compare": lambda: compare(ZIPF, "lru,lfu", [100, 200]),
        "simulate": lambda: simulate(ZIPF),
        "whatif": lambda: whatif(path, eviction="lfu"),
        "explain": lambda: kvcore.explain(path),
        "curve": lambda: kvcore.curve(kvcore.Plugins().build("workload", ZIPF), "lru"),
    }[name]()
    text = repr(made)
    assert text.startswith(f"{type(made).__name__}(")
    assert "\n" not in text
    assert " at 0x" not in text
    assert len(text) < 300


def test_the_short_form_of_a_simulation_has_its_size():
    """`repr` of a simulation has the numbers of its requests and of its simulated seconds."""
    assert repr(simulate("zipf:requests=40,rate=20")).startswith("Result(40 requests, ")


@pytest.fixture
def log(tmp_path):
    """Return the path of a log of chats, of which one row cannot be read."""
    row = {"messages": [{"role": "user", "content": "A question. " * 20}]}
    row |= {"ts": 1, "output_tokens": 9}
    return write_rows(tmp_path / "log.jsonl", row, {"ts": 2}, row | {"ts": 3}, row | {"ts": 4})


CALLS = {
    "simulate": simulate,
    "simulate with a cache": lambda log: simulate(log, cache=KVCache(99, key_tokens=16)),
    "simulate_cluster": lambda log: kvcore.simulate_cluster(log, replicas=2),
    "compare": lambda log: compare(log, "lru", [99]),
    "curve": lambda log: kvcore.curve(log, "lru"),
    "compare_routers": lambda log: kvcore.compare_routers(log, "random", 2),
    "plan": lambda log: kvcore.plan(log, max_gpus=1, tensor_parallel=1, tier="none"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_result_has_the_notes_of_its_workload(log, name):
    """A result of a call has the notes on the requests, which its text and its HTML show."""
    result = CALLS[name](log)
    notes = result.workload_notes if name == "plan" else result.notes
    assert any(note.startswith("chat: left out: 1 (1 without a prompt)") for note in notes)
    assert str(result).count("chat: left out: 1 (1 without a prompt)") == 1
    assert result._repr_html_().count("<p>chat: left out: 1 (1 without a prompt)") == 1


@pytest.mark.parametrize("name", ["simulate", "simulate_cluster", "compare", "curve"])
def test_a_result_without_notes_has_none(name):
    """A workload without notes leaves a result without, and its text as it was."""
    result = CALLS[name](ZIPF)
    assert len(result.notes) == 0
    assert "zipf: " not in str(result).partition("\n")[2]


def test_frames_of_comparisons_go_together():
    """Frames of comparisons have equal columns and types, and name their workload."""
    polars = pytest.importorskip("polars")
    plain = compare(ZIPF, "lru", [100])
    other = compare(
        f"{ZIPF},seed=5", "lru,optimum", [100], tier="host:memory=1GiB", residency=True
    )
    frame = polars.concat([plain.to_frame(), other.to_frame()])
    assert frame["digest"].n_unique() == 2
    assert set(frame["workload"]) == {"zipf"}
    assert frame["share_of_optimum"].dtype == polars.Float64
    assert frame["reused_blocks"].dtype == polars.Int64


def test_frames_of_simulations_go_together():
    """Frames of simulations have equal types, whether a request was rejected or judged."""
    polars = pytest.importorskip("polars")
    judged = simulate(ZIPF)
    rejected = simulate(ZIPF, blocks=3, slo="none")
    frame = polars.concat([judged.to_frame(), rejected.to_frame()])
    assert frame["reason"].dtype == polars.String
    assert frame["met_slo"].dtype == polars.Boolean
    assert frame["ttft_s"].dtype == polars.Float64


@pytest.mark.parametrize(
    "name", ["whatif", "explain", "curve", "compare_routers", "plan_devices"]
)
def test_verbs_have_their_calls_at_the_top(name):
    """The calls of verbs are names of `kvcore`."""
    assert callable(getattr(kvcore, name))
    assert name in kvcore.__all__
