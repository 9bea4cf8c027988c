"""The gate of pytest: a baseline is written, kept, and told when hits fall below it."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.rows import write_rows

from kvcore_judge.gate import Hits, add_baselines, regression

SYSTEM = "You are a careful assistant of a library. " * 40

TEST = """
def test_hits(kvcore_hits):
    hits = kvcore_hits("chat", "prompts.jsonl", blocks=1000{setting})
    assert hits.requests == 20
"""


def prompts(folder, change="", *, salt=False):
    """Write 20 prompts with one system prompt; `change` comes before it, by number."""
    rows = []
    for index in range(20):
        text = change.format(index) + SYSTEM
        row = {"messages": [{"role": "system", "content": text}]}
        row["messages"].append({"role": "user", "content": f"question {index} " * 20})
        rows.append(row | ({"cache_salt": f"user-{index}"} if salt else {}))
    path = folder / "prompts.jsonl"
    write_rows(path, *rows)


def run(folder, *options, setting=""):
    """Run pytest on a test of the gate; return its exit code and output."""
    (folder / "conftest.py").write_text('pytest_plugins = ["kvcore_judge.gate"]\n')
    (folder / "test_app.py").write_text(TEST.format(setting=setting))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # starts twice as fast
    done = subprocess.run(
        [*command, *options], cwd=folder, env=alone, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the file of a baseline, which is written."""
    folder = tmp_path_factory.mktemp("baseline")
    prompts(folder)
    code, said = run(folder, "--kvcore-hits", "hits.json", "--kvcore-hits-update")
    assert code == 0, said
    return folder / "hits.json"


@pytest.fixture
def baseline(written, tmp_path):
    """Return the options that compare with the baseline, of the prompts that are there."""
    prompts(tmp_path)
    shutil.copy(written, tmp_path)
    return "--kvcore-hits", "hits.json"


def test_same_prompts_pass(baseline, tmp_path):
    """The same prompts pass; without the option nothing is compared."""
    assert run(tmp_path, *baseline)[0] == 0
    assert run(tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("change", "salt", "reason"),
    [
        ("It is {} o'clock. ", False, "the first block is new"),
        ("", True, "the first block is new"),
    ],
    ids=["a clock in the system prompt", "a salt for each user"],
)
def test_a_regression_fails_with_its_reason(baseline, change, salt, reason, tmp_path):
    """Prompts that share nothing any more fail, and the test's line says why."""
    prompts(tmp_path, change, salt=salt)
    code, said = run(tmp_path, *baseline)
    assert code == 1
    assert "in the baseline" in said
    assert reason in said
    assert "test_app.py:3: Failed" in said


def test_another_block_size_does_not_compare(baseline, tmp_path):
    """A measurement with another setting says so, and does not pass or fail by its hits."""
    code, said = run(tmp_path, *baseline, setting=", block_size=64")
    assert code == 1
    assert "do not compare" in said


@pytest.mark.parametrize("content", ["[1]", '{"schema": 1, "baselines": {"chat": {}}}', None])
def test_a_file_without_baselines_is_told(baseline, content, tmp_path):
    """A file that is none of the gate's, or a folder, fails the test with the way out."""
    path = tmp_path / "hits.json"
    path.unlink()
    path.mkdir() if content is None else path.write_text(content)
    assert "Failed: hits.json has no baselines: remove it" in run(tmp_path, *baseline)[1]


def test_an_update_needs_a_file(tmp_path):
    """To update the baselines of no file is refused: nothing would be written."""
    assert run(tmp_path, "--kvcore-hits-update")[0] == pytest.ExitCode.USAGE_ERROR


def test_hits_may_fall_by_the_tolerance():
    """A fall by the tolerance, in decimal digits, is none; a further token is one."""
    before = Hits(1, 1000, 800, {}, {})
    assert not regression("chat", Hits(1, 1000, 700, {}, {}), before, 0.1)
    assert regression("chat", Hits(1, 1000, 699, {}, {}), before, 0.1)


def test_processes_of_one_run_write_one_baseline(tmp_path):
    """Each adds its own to those of the others, as pytest does with --numprocesses."""
    path, hits = tmp_path / "hits.json", Hits(1, 1000, 800, {}, {})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: add_baselines(path, {name: hits}), map(str, range(40))))
    assert len(json.loads(path.read_bytes())["baselines"]) == 40


def test_an_unknown_baseline_says_how_to_write_it(tmp_path):
    """Without a baseline of that name the message has the option that writes one."""
    prompts(tmp_path)
    code, said = run(tmp_path, "--kvcore-hits", "hits.json")
    assert code == 1
    assert "--kvcore-hits-update" in said
