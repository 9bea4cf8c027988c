"""`kvcore new`: of every kind what it writes installs, is found, and passes its kit."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from helpers.commands import run_here, stdout_of

from kvcore.plugins.manager import KINDS
from kvcore_lab.templates.package import KITS, package_files

if sys.platform != "win32":
    import resource

OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")


def test_there_is_a_template_of_every_kind():
    """A kind of plugin that is added needs a template."""
    assert KITS.keys() == KINDS.keys()


@pytest.mark.slow
def test_what_is_written_installs_and_passes_its_kit(tmp_path):
    """A package of each kind is generated, installed offline, listed, and passes its tests."""
    for module in ("torch", "hatchling", "pip"):
        if find_spec(module) is None:
            pytest.skip(f"needs {module}")
    for kind in KITS:
        made = run_here("new", kind, f"my-{kind}", cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        assert "pip install -e '.[test]' && pytest" in made.stdout
    packages = [str(path) for path in sorted(tmp_path.glob("kvcore-my-*"))]
    assert len(packages) == len(KITS)
    site = tmp_path / "site"
    python = [sys.executable, "-m"]
    subprocess.run(
        [*python, "pip", "install", *OFFLINE, "--target", site, *packages], check=True
    )
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    listed = subprocess.run([*python, "kvcore", "plugins"], check=True, **run).stdout
    for kind in KITS:
        assert f"my-{kind}" in listed
    options = ("-v", "-p", "no:cacheprovider", "--import-mode=importlib", "-n0")
    tests = subprocess.run([*python, "pytest", *options, *packages], check=False, **run)
    assert tests.returncode == 0, tests.stdout[-4000:]
    for kind in KITS:
        assert re.search(rf"test_kvcore_my_{kind}\.py::\S+ PASSED", tests.stdout), kind


@pytest.mark.parametrize("kind", KITS)
def test_the_readme_has_commands_that_work(kind):
    """Each command of kvcore in the README of a new package runs."""
    readme = package_files(kind, "mine")["README.md"]
    commands = re.findall(r"^    kvcore (.+)$", readme, re.MULTILINE)
    assert commands
    for command in commands:
        assert kind in stdout_of(*command.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("policy", "mine"), "policy"),
        (("eviction", "My Policy"), "small letters and digits"),
        (("eviction", "lru"), "eviction plugin 'lru' exists: give another name"),
        (("eviction", "replay"), "the module kvcore_replay exists: give another name"),
        (("eviction", "mine", "--dir", "nowhere/else"), ""),
    ],
)
def test_what_cannot_be_written_is_refused(words, reason, tmp_path):
    """An unknown kind and a name that is taken are errors; a directory is made if need be."""
    made = run_here("new", *words, cwd=tmp_path)
    assert made.returncode == (2 if reason else 0)
    assert reason in made.stderr
    assert "Traceback" not in made.stderr
    if not reason:
        assert (tmp_path / "nowhere" / "else" / "kvcore-mine" / "pyproject.toml").exists()


def test_a_package_that_is_there_stays(tmp_path):
    """A folder of that name is not written into."""
    (tmp_path / "kvcore-mine").mkdir()
    made = run_here("new", "router", "mine", cwd=tmp_path)
    assert (made.returncode, list((tmp_path / "kvcore-mine").iterdir())) == (2, [])


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of files")
def test_a_disk_that_refuses_a_file_has_no_half_of_a_package(tmp_path):
    """The files written before are removed, so that the command can be given again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        made = run_here("new", "router", "mine", cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (made.returncode, list(tmp_path.iterdir())) == (3, [])
    assert "cannot write kvcore-mine" in made.stderr


def test_a_class_does_not_hide_the_one_that_it_derives_from():
    """A plugin that is called as its kind gets another class name."""
    for name in ("tier", "score-eviction"):
        kind = name.rpartition("-")[2]
        source = package_files(kind, name)[f"kvcore_{name.replace('-', '_')}.py"]
        compile(source, name, "exec")
        assert "class Tier(Tier)" not in source
        assert "class ScoreEviction(ScoreEviction)" not in source


@pytest.mark.parametrize("kind", KITS)
@pytest.mark.parametrize("name", ["none", "true", "test-x", "any"])
def test_a_name_that_python_or_pytest_has_becomes_another_class(kind, name):
    """Keywords and names of tests are no names of the plugin's class, and of no other one."""
    files = package_files(kind, name)
    module = f"kvcore_{name.replace('-', '_')}"
    for path, text in files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
    (tested,) = re.findall(
        rf"^from {module} import (\w+)$", files[f"tests/test_{module}.py"], re.MULTILINE
    )
    assert not tested.startswith("Test")
    assert re.search(rf"^class {tested}\b", files[f"{module}.py"], re.MULTILINE)
    assert f'name: ClassVar[str] = "{name}"' in files[f"{module}.py"]


def test_the_help_names_every_kind():
    """`kvcore new --help` has the name of each kind of plugin."""
    text = " ".join(run_here("new", "--help").stdout.split())
    named = text.partition("KIND is ")[2].partition(".")[0]
    assert set(named.replace(" or", ",").split(", ")) == KITS.keys()
