"""Tests of the workflows, forms and steps that a checkout describes for others to run."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.lock import locked, required

ROOT = Path(__file__).parents[2]
HUB = ROOT / ".github"
WORKFLOWS = sorted((HUB / "workflows").glob("*.yml"))
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def environments():
    """Return the names of tox's environments."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", "utf-8")
    sections = (name.removeprefix("testenv:") for name in tox.sections())
    return {name.partition("{")[0] for name in sections}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(workflow):
    """A workflow is YAML with jobs, whose environments of tox and scripts exist."""
    yaml = pytest.importorskip("yaml", reason="reads YAML")
    steps = [
        step["run"]
        for job in yaml.safe_load(workflow.read_text("utf-8"))["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    text = "\n".join(steps)
    assert {*re.findall(r"tox run -e (\w+)", text)} <= environments()
    assert all((ROOT / path).is_file() for path in re.findall(r"^\.ci/\w+", text, re.MULTILINE))
    assert steps


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "tox.ini"], ids=lambda path: path.name)
def test_no_host_is_named(path):
    """Workflows and tox use the package index of the machine, whichever that is."""
    assert "://" not in path.read_text("utf-8")


def test_every_package_of_tox_is_locked():
    """Each package that tox installs has a version with hashes, and pins are the same."""
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    names = {pin.partition("==")[0] for pin in locked()}
    required_names = {re.match(r"[\w.-]+", line)[0].lower() for line in required()}
    assert len(required_names) > 40
    assert required_names <= names
    assert {pin for pin in pins if not pin.startswith("#")} <= locked()


def test_nothing_is_published_without_a_person():
    """In the release the one job that may write to the repository waits for an approval."""
    yaml = pytest.importorskip("yaml", reason="reads YAML")
    jobs = yaml.safe_load((HUB / "workflows/release.yml").read_text("utf-8"))["jobs"]
    writers = {
        name: job for name, job in jobs.items() if "write" in str(job.get("permissions"))
    }
    assert {name: job["environment"] for name, job in writers.items()} == {
        "publish": "release",
        "site": "github-pages",
    }
    assert jobs["publish"]["needs"] == ["build", "check"]
    assert jobs["site"]["needs"] == "publish"


@pytest.mark.parametrize(
    "form", sorted((HUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_forms_ask_something(form):
    """An issue form has a name, a description, and a question that must be answered."""
    yaml = pytest.importorskip("yaml", reason="reads YAML")
    fields = yaml.safe_load(form.read_text("utf-8"))
    assert fields["name"]
    assert fields["description"]
    assert any(part.get("validations", {}).get("required") for part in fields["body"])
    assert len({part["id"] for part in fields["body"]}) == len(fields["body"])


def test_a_tag_of_another_version_is_refused(tmp_path):
    """Nothing is built under a tag that is not the version of the package."""
    script = ROOT / "tests/helpers/wheels.py"
    command = [sys.executable, script, tmp_path, "v0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("the tag is v0.0.0, the version in pyproject.toml is ")
    assert not any(tmp_path.iterdir())


def test_contributors_are_told_of_every_folder_of_tests():
    """The table of what a change runs has the folders that pytest runs without arguments."""
    page = (ROOT / "docs/CONTRIBUTING.md").read_text("utf-8")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]
    folders = re.findall(r"\| `pytest -q (tests/\w+)` \| \d+ \|$", page, re.MULTILINE)
    assert sorted(folders) == sorted(settings["ini_options"]["testpaths"])


@pytest.mark.skipif("KVCORE_CONTRIBUTING" not in os.environ, reason="tox run -e contributing")
def test_the_steps_for_contributors_run_as_written(tmp_path):
    """The commands under "Run the checks" succeed in this order, in a copy of the checkout.

    In their environment the tests pass that need the most of what the commands install.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    page = (ROOT / "docs/CONTRIBUTING.md").read_text("utf-8")
    steps = CONSOLE.search(page.partition("## Run the checks")[2])[1].splitlines()
    assert len(steps) >= 4
    steps.append(".venv/bin/pytest -q -n 2 -m 'not slow' tests/pages tests/project")
    own = {"VIRTUAL_ENV", "KVCORE_CONTRIBUTING"}  # the steps do not run this test again
    environment = {name: text for name, text in os.environ.items() if name not in own}
    for step in steps:
        command = ["bash", "-euc", step.removeprefix("$ ")]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=3600)
