"""Words of every verb on the log that it reads: rows left out, and the model of the log."""

from __future__ import annotations

import json
from functools import partial

import pytest
from helpers.commands import run_here

VERBS = {
    "simulate": (),
    "compare": ("--blocks", 99),
    "curve": (),
    "routers": ("--replicas", 2, "--routers", "random", "--jobs", 1),
    "plan": ("--max-gpus", 1, "--tensor-parallel", 1, "--tier", "none", "--jobs", 1),
}
HUB_ID = "meta-llama/Llama-3.1-70B-Instruct"


@pytest.fixture
def log(tmp_path):
    """Return the path of a log of chats with a model, of which one has failed."""
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for index in range(4):
            messages = [{"role": "user", "content": f"Question {index}. " * 20}]
            row = {"ts": index, "model": HUB_ID, "messages": messages, "max_tokens": 9}
            row["response"] = {"choices": [{"message": {"content": "An answer."}}]}
            file.write(json.dumps(row | {"status": 500 if index == 1 else 200}) + "\n")
    return path


@pytest.mark.parametrize("verb", VERBS)
def test_a_log_is_told_of(log, tmp_path, verb):
    """The rows that are left out are noted, and the model that the log names."""
    done = run_here(verb, log, *VERBS[verb], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kvcore: chat: left out: 1 (1 failed)" in done.stderr
    named = f"names the model {HUB_ID}, and times and memory are those of llama-3.1-8b"
    assert f"{named}: --model llama-3.1-70b takes it" in done.stderr


@pytest.mark.parametrize("verb", ["simulate", "compare"])
def test_a_model_that_was_chosen_is_not_told_of(log, verb):
    """With `--model` the model of the log is not mentioned."""
    done = run_here(verb, log, *VERBS[verb], "--model", "qwen3-8b")
    assert "left out: 1" in done.stderr
    assert HUB_ID not in done.stderr


@pytest.fixture
def cached(tmp_path):
    """Return the path of a log of four equal prompts, that has three of them as cached."""
    path = tmp_path / "cached.jsonl"
    row = {"messages": [{"role": "user", "content": "A question. " * 40}]}
    counts = ({"prompt_tokens": 120, "cached_tokens": cached} for cached in (0, 96, 96, 96))
    rows = (row | {"ts": ts, "usage": usage} for ts, usage in enumerate(counts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("verb", ["simulate", "compare", "curve"])
def test_the_cached_tokens_of_a_log_are_told(cached, log, verb):
    """The share that a log has as cached is in a note, and in JSON beside its hits."""
    done = run_here(verb, cached, *VERBS[verb], "--json")
    assert "kvcore: chat: the log reports 60.0% of its prompt tokens as cached" in done.stderr
    document = json.loads(done.stdout)
    told = document if verb == "simulate" else document["workload"]
    assert told["reported_hit_ratio"] == 3 * 96 / 480
    other = run_here(verb, log, *VERBS[verb], "--json")
    assert "reported_hit_ratio" not in other.stdout
    assert "the log reports" not in other.stderr


@pytest.mark.parametrize(
    "verb",
    [
        ("simulate",),
        ("simulate", "--replicas", 2),
        ("compare", "--blocks", 99),
        ("curve",),
        ("curve", "--tier", "host:memory=1GiB", "--sizes", 2),
    ],
)
def test_documents_have_the_notes_there_are(log, verb):
    """JSON has the notes of a log, and no field for them where there are none."""
    document = json.loads(run_here(*verb, log, "--json").stdout)
    assert any(note.startswith("chat: left out: 1") for note in document["notes"])
    assert "notes" not in document["workload" if "workload" in document else "config"]
    assert '"notes"' not in run_here(*verb, "zipf:requests=9", "--json").stdout


def test_the_files_of_a_run_have_what_its_log_reports(cached, tmp_path):
    """The summary that `--out` writes has the share that the log reports as cached."""
    run_here("simulate", cached, "--limit", 2, "--out", tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["reported_hit_ratio"] == 96 / 240


def test_a_sweep_tells_of_each_log(log, tmp_path):
    """A sweep has the notes of a log that another process has read, and its model."""
    grid = tmp_path / "grid.toml"
    grid.write_text(f'workload = ["zipf:requests=9", "{log}"]\nblocks = 99\n')
    done = run_here("sweep", grid, "--jobs", 1)
    assert done.stderr.count("kvcore: chat: left out: 1 (1 failed)") == 1
    assert "model = llama-3.1-70b takes it" in done.stderr


def test_a_sweep_tells_of_prompts_beyond_the_positions(tmp_path):
    """A sweep tells once of each model that has no positions for prompts of its cells."""
    grid = tmp_path / "grid.toml"
    axes = 'model = ["llama-3-8b", "llama-3.1-8b"]\nscheduler = ["fcfs", "srpt"]\n'
    grid.write_text(f'workload = "zipf:requests=9,prefix_tokens=9000"\n{axes}')
    done = run_here("sweep", grid, "--jobs", 1)
    (note,) = (line for line in done.stderr.splitlines() if "positions of" in line)
    beyond = "prompts of up to 9,256 tokens are beyond the 8,192 positions of llama-3-8b"
    assert note.startswith(f"kvcore: zipf: {beyond} (9 of 9)")


FAIR = "scheduler fair divides among tenants, and no request has one"


def test_fairness_among_nobody_is_told(log):
    """A run under `fair` tells of a log without tenants, and of no other one."""
    assert FAIR in run_here("simulate", log, "--scheduler", "fair").stderr
    assert FAIR not in run_here("simulate", log).stderr
    named = run_here("simulate", f"chat:{log},tenant=model", "--scheduler", "fair")
    assert named.returncode == 0
    assert FAIR not in named.stderr


def test_a_sweep_tells_of_fairness_among_nobody(tmp_path):
    """A sweep tells once of each workload that `fair` cannot divide."""
    grid = tmp_path / "grid.toml"
    grid.write_text('workload = "zipf:requests=9"\nscheduler = ["fair", "fcfs", "srpt"]\n')
    done = run_here("sweep", grid, "--jobs", 1)
    assert done.stderr.count(f"kvcore: zipf: {FAIR}") == 1


def test_explain_takes_the_model_of_a_log(log):
    """The seconds of prefill of a log's misses are those of the model that it names."""
    done = run_here("explain", log, "--summary", "--blocks", 99, "--json")
    assert json.loads(done.stdout)["recompute"]["model"] == "llama-3.1-70b"


@pytest.mark.parametrize("named", ["trace:{}", "{}"])
def test_a_trace_is_told_of(tmp_path, named):
    """The model in the header of a trace is told of, unless it is that of the new run."""
    path = tmp_path / "run.jsonl"
    run_here("simulate", "zipf:requests=9", "--model", "llama-3-70b", "--trace", path)
    again = run_here("simulate", named.format(path))
    assert "names the model llama-3-70b" in again.stderr
    same = run_here("simulate", named.format(path), "--model", "llama-3-70b")
    assert "names the model" not in same.stderr


@pytest.mark.parametrize(
    "verb", [("simulate", "--no-search"), ("routers", "--replicas=2", "--routers=round-robin")]
)
def test_prompts_beyond_the_positions_of_a_model_are_told(verb):
    """A run tells of prompts that engines refuse, unless it refuses them itself."""
    run = partial(run_here, *verb, "zipf:requests=9,prefix_tokens=8192")
    beyond = (
        "prompts of up to 8,448 tokens are beyond the 8,192 positions of llama-3-8b (9 of 9)"
    )
    assert beyond in run("--model", "llama-3-8b").stderr
    assert "beyond" not in run().stderr
    assert "beyond" not in run("--model", "llama-3-8b", "--max-model-len", "8192").stderr


@pytest.mark.parametrize(("pool", "times"), [('memory = "1GiB"', 1), ("blocks = 99", 0)])
def test_a_sweep_tells_that_pools_keep_more_than_a_hybrid_model_needs(pool, times, tmp_path):
    """Untimed cells of a hybrid model with memory say of its layers what `compare` says."""
    grid = tmp_path / "grid.toml"
    models = '["gpt-oss-20b", "llama-3-8b"]'
    grid.write_text(
        f'mode = "compare"\nworkload = "zipf:requests=9"\nmodel = {models}\n{pool}\n'
    )
    told = run_here("sweep", grid).stderr
    assert told.count("The pool keeps all tokens in all layers") == times
    assert told.count("gpt-oss-20b needs less") == times


def test_a_rate_that_leaves_the_times_of_a_planner_is_told():
    """A run at another rate under a planner tells that start-ups take as long as before."""
    words = ("simulate", "zipf:requests=9", "--replicas", 2, "--autoscale", "load:start_up=30")
    told = (
        "rate_scale 20 makes requests come 20 times as fast, and leaves the times of autoscale"
    )
    assert told in run_here(*words, "--rate-scale", 20).stderr
    assert "rate_scale" not in run_here(*words).stderr
    assert "rate_scale" not in run_here(*words[:4], "--rate-scale", 20).stderr
