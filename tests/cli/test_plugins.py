"""Tests of `kvcore plugins` as a process, with distributions in a temporary directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers.commands import error_of, json_of, run_here
from helpers.distributions import install_module

import kvcore.plugins.manager
from kvcore_cli import main
from kvcore_plugins.eviction import FIFO

PROGRAM = "from kvcore.__main__ import main; main()"
HOOKS = """
from kvcore.hookspecs import hookimpl
from kvcore.cache import EvictionPolicy

class Policy(EvictionPolicy):
    name = {name!r}
    def victim(self, now): raise LookupError(now)
    @classmethod
    def unavailable(cls): return {reason!r}

@hookimpl
def kvcore_eviction_policies(): return [Policy]
"""


@pytest.fixture
def site(tmp_path):
    """Return a directory in which the only plugin of kvcore is the eviction policy `plain`."""
    install_module(tmp_path, "kvcore", "kv_plain", HOOKS.format(name="plain", reason=None))
    return tmp_path


def run(site, *arguments, flags=(), **environment):
    """Run kvcore with the distributions of `site` before all others on the path."""
    path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *flags, "-c", PROGRAM, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_json_has_every_field(site):
    """`--json` prints name, kind, distribution, version, module and usability."""
    done = run(site, "plugins", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "schema": 1,
        "command": ["kvcore", "plugins"],
        "plugins": [
            {
                "kind": "eviction",
                "name": "plain",
                "distribution": "kvcore",
                "version": "1.0",
                "module": "kv_plain",
                "usable": True,
                "reason": None,
            }
        ],
        "additions": [],
    }


def test_the_table_has_the_reason_why_a_plugin_is_unusable(site):
    """The table has a row for each plugin, or import that fails, with the reason."""
    install_module(
        site, "acme", "acme_gpu", HOOKS.format(name="fast", reason="there is no GPU")
    )
    install_module(site, "bcme", "bcme_bad", "import x_that_is_not_there")
    done = run(site, "plugins")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split(maxsplit=5) for line in done.stdout.splitlines() if "1.0" in line]
    *rows, failed = [[cell.strip() for cell in row] for row in rows]
    assert rows == [
        ["eviction", "fast", "acme", "1.0", "acme_gpu", "there is no GPU"],
        ["eviction", "plain", "kvcore", "1.0", "kv_plain", "yes"],
    ]
    assert failed[:5] == ["-", "bcme_bad", "bcme", "1.0", "bcme_bad"]
    assert failed[5].startswith("entry point 'bcme_bad' of bcme 1.0 (bcme_bad) cannot be imp")


@pytest.mark.parametrize(("columns", "shown"), [(80, False), (99, False), (100, True)])
def test_narrow_terminals_have_no_column_of_modules(monkeypatch, capsys, columns, shown):
    """The column of modules is shown on a terminal of at least 100 columns."""
    monkeypatch.setattr("kvcore_cli.plugins.terminal_width", lambda: columns)
    assert main.run(["plugins"]) == 0
    assert ("kvcore_plugins.eviction.lru" in capsys.readouterr().out) is shown


def test_output_of_a_plugin_on_import_goes_to_stderr(site):
    """Output of a plugin on import or in a hook goes to stderr, and the document is whole."""
    noisy = HOOKS.format(name="noisy", reason=None).replace(
        "return [Policy]", "print('in the hook'); return [Policy]"
    )
    install_module(site, "acme", "acme_noisy", "print('on import')\n" + noisy)
    done = run(site, "plugins", "--json")
    assert (done.returncode, done.stderr) == (0, "on import\nin the hook\n")
    assert {plugin["name"] for plugin in json.loads(done.stdout)["plugins"]} == {
        "plain",
        "noisy",
    }


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_output_of_a_policys_method_goes_to_stderr(monkeypatch, arguments):
    """Output of a policy's method goes to stderr, so that tables and documents are whole."""
    victim = FIFO.victim
    monkeypatch.setattr(
        FIFO, "victim", lambda *args: (sys.stdout.write("noise\n"), victim(*args))[1]
    )
    command = [
        "simulate",
        "zipf:requests=20",
        "--blocks",
        "160",
        "--eviction",
        "fifo",
        *arguments,
    ]
    done = run_here(*command)
    assert done.returncode == 0
    assert "noise\n" in done.stderr
    assert "fifo" in done.stdout
    assert "noise" not in done.stdout


def test_checkout_that_is_not_installed_exits_3(tmp_path):
    """A checkout on PYTHONPATH that is not installed exits with code 3 and the remedy."""
    packages = Path(sysconfig.get_path("purelib"))
    for entry in packages.iterdir():
        if entry.suffix not in {".dist-info", ".pth"} and entry.name != "kvcore":
            (tmp_path / entry.name).symlink_to(entry)
    checkout = Path(kvcore.plugins.manager.__file__).resolve().parents[2]
    (tmp_path / "kvcore").symlink_to(checkout / "kvcore")
    done = run(tmp_path, "plugins", flags=["-S"], PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "kvcore: error: kvcore is not installed, so it has no plugins: they are found through "
        "entry points, which a checkout on PYTHONPATH does not have; run `pip install -e .` in "
        f"{checkout}\n"
    )


@pytest.mark.parametrize("arguments", [["plugins"], ["plugins", "--json"]])
def test_built_ins_are_listed(capsys, arguments):
    """The plugins, verbs and modes of kvcore are listed, in the table and in the document."""
    pytest.importorskip("kvcore_lab")
    assert main.run(arguments) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("lru", "radix", "mooncake", "compare", "cluster"))


@pytest.mark.parametrize("kind", ["eviction", "verb"])
def test_a_kind_lists_its_plugins_alone(kind):
    """With a kind the list has its plugins, or the verbs of packages, and no others."""
    pytest.importorskip("kvcore_lab")
    listed = json_of("plugins", kind)
    assert {info["kind"] for info in listed["plugins"] + listed["additions"]} == {kind}


def test_another_kind_is_refused_with_all():
    """A kind that there is not is refused with those that there are."""
    refusal = error_of("plugins", "policy")
    assert "'policy' is not one of 'eviction', 'prefix'" in refusal
