"""Additions of packages to the command line, and packages that are wrong."""

from __future__ import annotations

import json
import re
import sys

import pytest
from helpers.commands import error_of, run_here
from helpers.distributions import install, install_module

import kvcore
from kvcore.config import RunConfig
from kvcore.errors import KvcoreError

HEAD = """
import click
from contextlib import contextmanager
from kvcore import Mode, Ran, Running, Verb, hookimpl

@contextmanager
def beside(first=lambda: None, **running):
    first()
    yield Running(**running) if running else None

@hookimpl
def """
ACME = "entry point 'acme' of acme 1.0"
TINY = ("simulate", "zipf:requests=3")


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Yield a function that installs packages with one hook each, the first one `acme`."""
    monkeypatch.setenv("KVCORE_PROGRESS_SECONDS", "0")
    site = tmp_path / "site"
    site.mkdir()

    def installed(*hooks, **files):
        for name, hook in zip(("acme", "bcme"), hooks, strict=False):
            install_module(site, name, name, HEAD + hook, **files)
        monkeypatch.syspath_prepend(site)

    yield installed
    for name in ("acme", "acme_far", "bcme"):
        sys.modules.pop(name, None)


def line(tmp_path, number=0):
    """Return the end of an error at a line below the first one of the hook of `acme`."""
    return f"({tmp_path}/site/acme.py:{HEAD.count(chr(10)) + 1 + number})"


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        ("kvcore_commands(): raise KeyError(0)", "kvcore_commands of {} raised KeyError(0) {}"),
        (
            "kvcore_commands(): return [1]",
            "kvcore_commands of {} returned [1], not a dict of V",
        ),
        (
            "kvcore_commands(): return {'a': 'b:c'}",
            "kvcore_commands of {} returned {{'a': 'b:c'",
        ),
        (
            "kvcore_commands(): return {'a': Verb(1, 2)}",
            "kvcore_commands of {} returned {{'a': V",
        ),
        (
            "kvcore_commands(): return {'simulate': Verb('', '')}",
            "kvcore_commands of {}: 'simulate' is ",
        ),
        (
            "kvcore_commands(): return {'help': Verb('', '')}",
            "kvcore_commands of {}: 'help' is ",
        ),
        ("kvcore_ran(): 1\nraise KeyError(0)", "{} (acme) cannot be imported: KeyError: 0 ("),
    ],
    ids=["raises", "list", "text", "fields", "core", "help", "import"],
)
def test_the_list_of_verbs_is_whole_beside_a_broken_package(acme, tmp_path, hook, reason):
    """`kvcore --help` names a broken package in one line, and lists all other verbs."""
    before = run_here("--help").stdout
    acme(hook)
    done = run_here("--help")
    assert (done.returncode, done.stdout) == (0, before)
    assert done.stderr.startswith(f"kvcore: {reason.format(ACME, line(tmp_path))}")
    assert done.stderr.count("\n") == 1


def test_two_packages_with_one_verb_are_named(acme):
    """A verb of two packages is of neither: the list and the error name both."""
    verb = "kvcore_commands(): return {'twin': Verb('acme:x', 'A twin.')}"
    acme(verb, verb)
    reason = (
        f"kvcore_commands: 'twin' is of {ACME} and of entry point 'bcme' of bcme 1.0; rename "
        "one, or skip an entry point with KVCORE_DISABLE_PLUGINS"
    )
    listed, used = run_here("--help"), run_here("twin")
    assert (listed.returncode, listed.stderr) == (0, f"kvcore: {reason}\n")
    assert "A twin." not in listed.stdout
    assert used.returncode == 3
    assert used.stderr == f"kvcore: error: there is no verb 'twin'\n{reason}\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "'far' cannot be loaded from acme_far:x: ModuleNotFoundError: No module named"),
        ("1 / 0", "'far' cannot be loaded from acme_far:x: ZeroDivisionError: .*far.py:1"),
        (
            "import kvcore; raise kvcore.PluginError(1)",
            "'far' cannot be .* from acme_far:x: 1\n",
        ),
        ("y = 1", "'far' cannot be loaded from acme_far:x: AttributeError: module 'acme_far'"),
        ("def x(): 1", "'far': acme_far:x is <function x at .*>, which is no click command"),
    ],
    ids=["module", "line", "error", "name", "function"],
)
def test_a_verb_that_cannot_be_loaded_is_one_line(acme, tmp_path, source, reason):
    """A verb that cannot be loaded is an error of one line with its place, exit code 3."""
    acme("kvcore_commands(): return {'far': Verb('acme_far:x', 'Far.')}")
    if source is not None:
        (tmp_path / "site" / "acme_far.py").write_text(source)
    done = run_here("far")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert re.match(f"kvcore: error: verb {reason}", done.stderr)
    assert "no option '--fra'" in run_here("plugins", "--fra").stderr, "others work on"


def test_a_bug_of_a_verb_names_the_package(acme, tmp_path):
    """A verb of a package that raises is an error of one line with the package and the line."""
    verb = "@click.command()\ndef far(): raise KeyError(0)"
    acme(f"kvcore_commands(): return {{'far': Verb('acme:far', 'Far.')}}\n{verb}")
    done = run_here("far")
    error = f"kvcore: error: {ACME} raised KeyError(0) {line(tmp_path, 2)}\n"
    assert (done.returncode, done.stderr) == (3, error)


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (
            "return [click.option('--blocks')]",
            "an option of {}: `kvcore simulate` has --blocks",
        ),
        (
            "return [click.option('--no-search')]",
            "an option of {}: `kvcore simulate` has --no-s",
        ),
        ("return [click.option('--x', 'slo')]", "an option of {}: `kvcore simulate` has slo"),
        (
            "return [click.option('--search')]",
            "an option of {}: `kvcore simulate` has --search",
        ),
        ("return [click.option('x x')]", "an option of {}: it cannot be made: TypeError("),
        ("return 5", "kvcore_options of {} returned 5, not a list of options"),
        ("raise KeyError(verb)", "kvcore_options of {} raised KeyError('simulate') ("),
    ],
    ids=["flag", "off", "name", "of-kvcore", "made", "number", "raises"],
)
def test_an_option_that_cannot_be_added_is_left_out(acme, hook, reason):
    """An option that cannot be added is named in one line, and the run goes on without it."""
    acme(f"kvcore_options(verb): {hook}")
    done = run_here(*TINY, "--no-search", "--blocks", "64")
    assert done.returncode == 0
    assert "Pool: 64 blocks" in done.stdout
    assert done.stderr.startswith(f"kvcore: {reason.format(ACME)}")
    assert done.stderr.count("\n") == 1


def test_a_verb_without_options_of_packages_works_on(acme):
    """A verb whose function takes no option of a package says so, and works without it."""
    acme("kvcore_options(): return [click.option('--more')]")
    done = run_here("size", "llama-3.1-8b")
    reason = f"an option of {ACME}: `kvcore size` takes none of packages"
    assert (done.returncode, done.stderr) == (0, f"kvcore: {reason}\n")


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        ("kvcore_ran(): raise KeyError(0)", "kvcore_ran of {} raised KeyError(0) {}"),
        ("kvcore_ran(): return 5", "kvcore_ran of {} returned 5, not a Ran"),
        ("kvcore_ran(): raise GeneratorExit", "{} raised GeneratorExit() {}"),
        ("kvcore_running(): raise KeyError(0)", "kvcore_running of {} raised KeyError(0) {}"),
        (
            "kvcore_running(): return 5",
            "kvcore_running of {} returned 5, not a context manager",
        ),
        ("kvcore_running(): return beside(lambda: {}[0])", "{} raised KeyError(0) {}"),
        ("kvcore_running(): return beside(ran=lambda *_: {}[0])", "{} raised KeyError(0) {}"),
    ],
    ids=[
        "ran",
        "ran-number",
        "ran-no-exception",
        "running",
        "running-number",
        "entered",
        "called",
    ],
)
def test_no_file_is_left_by_a_run_that_a_package_breaks(acme, tmp_path, hook, reason):
    """A hook that fails ends the run with an error of one line, and no file is left."""
    acme(hook)
    done = run_here(*TINY, "--out", tmp_path / "out")
    error = f"kvcore: error: {reason.format(ACME, line(tmp_path))}\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", error)
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_no_file_is_left_by_a_run_whose_last_steps_fail(acme, tmp_path):
    """If what runs beside it fails to end, its files are removed, and earlier results stay."""
    late = "@contextmanager\ndef late():\n    yield\n    {}[0]\n"
    acme(f"kvcore_running(): return late()\n\n{late}")
    (tmp_path / "of").mkdir()
    mine = [tmp_path / "of" / name for name in ("notes", "requests.jsonl", "summary.json")]
    for path in mine:
        path.write_text("mine")
    for words in (("--out", "new"), ("--out", "of"), ("--trace", "run.jsonl")):
        done = run_here(*TINY, *words, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (3, "")
        assert f"{ACME} raised KeyError(0)" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of", "site"]
    assert sorted((tmp_path / "of").iterdir()) == mine
    assert {path.read_text() for path in mine} == {"mine"}


def test_what_a_package_does_beside_a_run_may_be_nothing(acme):
    """A context that yields nothing changes nothing of a run."""
    acme("kvcore_running(): return beside()")
    done = run_here(*TINY, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["completed"] == 3


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        ("raise KeyError(0)", "kvcore_modes of {} raised KeyError(0) ("),
        ("return {'run': Mode()}", "kvcore_modes: 'run' is of {} and of entry point 'engine'"),
        (
            "return {'simulate': Mode()}",
            "kvcore_modes of {}: 'simulate' is of the core; rename",
        ),
        (
            "return {'x': Mode(options='acme:y')}",
            "options of mode 'x' of {} (acme:y) cannot be",
        ),
    ],
    ids=["raises", "twice", "core", "place"],
)
def test_a_broken_mode_is_named(acme, hook, reason):
    """A mode that cannot be used is named in one line, and a run in another mode goes on."""
    acme(f"kvcore_modes(): {hook}")
    done = run_here(*TINY)
    assert done.returncode == 0
    assert done.stderr.startswith(f"kvcore: {reason.format(ACME)}")
    assert done.stderr.count("\n") == 1


ASKED = {
    "verb": "record",
    "verb-of-other": "routers",
    "help": "help record",
    "option": "simulate --replicas 2",
    "plugin": "simulate --tier host:memory=1GiB",
    "key": "simulate --config key.toml",
    "format": "simulate events.jsonl",
    "keyword": lambda: kvcore.simulate(replicas=2),
    "mode": lambda: RunConfig("run"),
    "attribute": lambda: RunConfig().replicas,
    "cache": lambda: kvcore.simulate(cache=kvcore.KVCache(9), replicas=2),
}
"""Command lines and calls that ask for what is of a package."""


@pytest.fixture(params=ASKED.values(), ids=ASKED)
def refusal(request, tmp_path, monkeypatch):
    """Return a function that asks for what is of a package, and returns the error."""
    (tmp_path / "key.toml").write_text("replicas = 2")
    (tmp_path / "events.jsonl").write_text('{"worker_id": 0, "event": {}}\n')
    monkeypatch.chdir(tmp_path)

    def ask(code):
        if isinstance(request.param, str):
            text = error_of(*request.param.split(), code=code).removeprefix("kvcore: error: ")
            return text.partition("; formats:\n")[0]
        with pytest.raises((KvcoreError, AttributeError)) as caught:
            request.param()
        assert getattr(caught.value, "exit_code", code) == code
        return str(caught.value)

    return ask


def test_errors_name_skipped_entry_points(refusal, monkeypatch):
    """An error about what skipped entry points have names those, in one line."""
    monkeypatch.setenv("KVCORE_DISABLE_PLUGINS", "cluster,engine,events,tiers")
    (text,) = refusal(2).splitlines()
    assert " (KVCORE_DISABLE_PLUGINS skips cluster, engine, events, tiers)" in text


def test_errors_name_an_outdated_installation(refusal, tmp_path, monkeypatch):
    """An error about what an outdated installation lacks has the command to run, and code 3."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "kvcore"\n[project.entry-points.kvcore]\nlab = "kvcore_lab.hooks"\n'
    )
    url = json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    install(tmp_path, "kvcore", [("builtin", "kvcore_plugins.hooks")], direct_url=url)
    monkeypatch.syspath_prepend(tmp_path)
    _, cause = refusal(3).splitlines()
    assert cause.startswith("the installed entry points of kvcore 1.0 are older than ")
    assert cause.endswith(f"; run `pip install -e .` again in {tmp_path}")


def test_calls_of_a_skipped_entry_point_work(monkeypatch):
    """A package whose entry point is skipped can be imported, and its calls work."""
    monkeypatch.setenv("KVCORE_DISABLE_PLUGINS", "lab")
    assert len(kvcore.compare("zipf:requests=3", "lru", 64).rows) == 1


def test_names_of_no_entry_point_are_said(monkeypatch):
    """Names to skip that no entry point has are named on stderr; others are listed."""
    monkeypatch.setenv("KVCORE_DISABLE_PLUGINS", "kvcore:lab,labs,hosting")
    done = run_here("plugins", "--json")
    start = "kvcore: KVCORE_DISABLE_PLUGINS: no entry point is named 'hosting', 'labs' (did "
    assert done.stderr.startswith(f"{start}you mean 'lab'?). There are: builtin, ")
    assert done.stderr.count("\n") == 1
    *_, row = json.loads(done.stdout)["plugins"]
    reason = "KVCORE_DISABLE_PLUGINS skips it"
    assert (row["kind"], row["name"], row["reason"]) == (None, "lab", reason)
