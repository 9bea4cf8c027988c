"""Tests of the example plugins, installed in a fresh environment as users would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "third_party_policy"
RETENTION = ROOT / "examples" / "third_party_retention"
CODEC = ROOT / "examples" / "third_party_codec"
VERB = ROOT / "examples" / "third_party_verb"
HOW_TO = ROOT / "docs" / "how-to" / "write-a-plugin.md"

pytestmark = [pytest.mark.slow, pytest.mark.network]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Install kvcore, its kit and the examples in a fresh environment; return its scripts.

    What builds the five packages is installed once, not in an environment for each of them.
    """
    home = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "install", "--quiet"]
    pins = ["--no-compile", "--constraint", ROOT / "constraints.txt"]
    newest = written(HOW_TO.read_text("utf-8"), home.parent / "newest")
    packages = [f"{ROOT}[testing]", EXAMPLE, RETENTION, CODEC, VERB, "--editable", newest]
    subprocess.run([*pip, *pins, "hatchling", "editables"], check=True)
    python_alone = {**os.environ, "KVCORE_PURE": "1"}  # of the core in C others are the tests
    subprocess.run(
        [*pip, *pins, "--no-build-isolation", *packages], check=True, env=python_alone
    )
    return scripts


def written(page, folder):
    """Write the files of the how-to, each named above its block, and return their folder."""
    for name, body in re.findall(r"The file `([^`]+)`.*?```\w+\n(.*?)```", page, re.DOTALL):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body, "utf-8")
    return folder


def run(*command, cwd):
    """Run a command outside the checkout, without PYTHONPATH and variables of coverage."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    clean.pop("PYTHONPATH", None)
    return subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )


def test_each_example_is_found_through_its_entry_point(scripts, tmp_path):
    """`kvcore plugins` lists each plugin with its distribution."""
    done = run(scripts / "kvcore", "plugins", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {p["name"]: p["distribution"] for p in json.loads(done.stdout)["plugins"]}
    assert found["deepest"] == "kvcore-depth-policy"
    assert found["big-values"] == "kvcore-big-values"
    assert found["shared-exponent"] == "kvcore-shared-exponent"
    assert found["newest"] == "kvcore-newest", "the plugin of the how-to, installed as it says"


def test_the_example_policy_is_compared_by_name(scripts, tmp_path):
    """`kvcore compare` accepts the name of the example policy."""
    command = ["compare", "zipf:requests=200", "--eviction", "lru,deepest", "--blocks", "100"]
    done = run(scripts / "kvcore", *command, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["eviction"] for row in json.loads(done.stdout)["rows"]] == ["lru", "deepest"]


def test_the_bundled_trace_is_compared_without_extras(scripts, tmp_path):
    """`kvcore compare` runs on the bundled trace where no extra but the kit is installed."""
    done = run(scripts / "kvcore", "compare", "--limit", "500", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.partition(" ")[0] for line in done.stdout.splitlines()}
    assert {"lru", "optimum", "infinite"} < rows


def test_the_example_adds_a_verb(scripts, tmp_path):
    """The verb of the example is listed, has a help page, and prints what it counts."""
    listed, page, used = (
        run(scripts / "kvcore", *words, cwd=tmp_path)
        for words in (["--help"], ["reuse", "--help"], ["reuse", "zipf:requests=9"])
    )
    assert [done.returncode for done in (listed, page, used)] == [0, 0, 0], used.stderr
    assert re.search(r"^  reuse +Count the blocks of WORKLOAD", listed.stdout, re.MULTILINE)
    assert page.stdout.startswith("Usage: kvcore reuse [OPTIONS] [WORKLOAD]")
    assert " blocks are used again (" in used.stdout


def test_the_example_adds_an_option_to_simulate(scripts, tmp_path):
    """The option is on the help page, a key of a file, and adds a sentence and a field."""
    (tmp_path / "run.toml").write_text('workload = "zipf:requests=9"\nreuse = true\n')
    command = [scripts / "kvcore", "simulate", "zipf:requests=9"]
    page, shown, document = (
        run(*command, *words, cwd=tmp_path)
        for words in (["--help"], ["--reuse"], ["--config", "run.toml", "--json"])
    )
    assert [done.returncode for done in (page, shown, document)] == [0, 0, 0], document.stderr
    assert re.search(r"^  --reuse +Count the blocks", page.stdout, re.MULTILINE)
    counts = json.loads(document.stdout)["reuse"]
    sentence = f"{counts['used_again']:,} of {counts['blocks']:,} blocks are used again"
    assert sentence in shown.stdout.splitlines()[-1]


def test_a_verb_takes_at_most_fifteen_lines():
    """The verb that the README of the example shows is that of its file, of few lines."""
    readme = (VERB / "README.md").read_text("utf-8")
    (shown,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert shown in (VERB / "kvcore_reuse.py").read_text("utf-8")
    assert len(shown.splitlines()) <= 15


def test_the_kits_pass_on_the_examples(scripts, tmp_path):
    """The tests of the examples, which use kits or run them, pass and are not empty."""
    tests = [example / "tests" for example in (EXAMPLE, RETENTION, VERB)]
    words = ["-m", "pytest", "-rA", "-p", "no:cacheprovider", *tests]
    done = run(scripts / "python", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for example in (EXAMPLE, RETENTION):
        assert re.search(rf"^PASSED .*{example.name}/tests/", done.stdout, re.MULTILINE)
