"""`kvcore new`: of every kind what it writes installs, is found, and passes its kit."""

import re
import sys
from zipfile import ZipFile

import pytest
from helpers.commands import run_here, stdout_of
from helpers.seeds import FirstSeeds

from kvcore.plugins.manager import KINDS
from kvcore_lab.templates.package import KITS, package_files

if sys.platform != "win32":
    import resource


def test_there_is_a_template_of_every_kind():
    """A kind of plugin that is added needs a template."""
    assert KITS.keys() == KINDS.keys()


@pytest.mark.slow
def test_what_is_written_installs_and_passes_its_kit(tmp_path, monkeypatch, capsys):
    """A package of each kind is generated, built, unpacked, listed, and passes its tests.

    The wheels are built and the tests run in this process: most of a process is its start.
    """
    pytest.importorskip("torch")
    build = pytest.importorskip("hatchling.build")
    site = tmp_path / "site"
    for kind in KITS:
        made = run_here("new", kind, f"my-{kind}", cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        assert "pip install -e '.[test]' && pytest" in made.stdout
        monkeypatch.chdir(tmp_path / f"kvcore-my-{kind}")
        ZipFile(tmp_path / build.build_wheel(str(tmp_path))).extractall(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(site)
    listed = stdout_of("plugins")
    for kind in KITS:
        assert f"my-{kind}" in listed
    capsys.readouterr()
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--import-mode=importlib"]
    code = pytest.main([*options, "."], plugins=[FirstSeeds()])
    printed = capsys.readouterr().out
    assert code == 0, printed[-4000:]
    for kind in KITS:
        assert re.search(rf"^PASSED \S*test_kvcore_my_{kind}\.py::", printed, re.MULTILINE), (
            kind
        )


def test_an_editable_install_needs_no_package_beside_hatchling(tmp_path, monkeypatch):
    """Offline, without isolation, `pip install -e` does without the package `editables`."""
    build = pytest.importorskip("hatchling.build")
    run_here("new", "eviction", "mine", cwd=tmp_path)
    monkeypatch.chdir(tmp_path / "kvcore-mine")
    monkeypatch.setitem(sys.modules, "editables", None)
    with ZipFile(tmp_path / build.build_editable(str(tmp_path))) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        assert wheel.read(path).decode().strip() == str(tmp_path / "kvcore-mine")


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
