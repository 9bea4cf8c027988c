"""Plugins found through the entry points of distributions installed in a directory."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import attrs
import pytest
from helpers.distributions import install

from kvcore.errors import InputError, PluginError
from kvcore.plugins import manager as installation
from kvcore.plugins.manager import DISABLE, Plugins, default

HOOKS = """
from kvcore.hookspecs import hookimpl
from kvcore.cache import EvictionPolicy

class Policy(EvictionPolicy):
    name = {name!r}
    def victim(self, now): raise LookupError(now)

@hookimpl
def kvcore_eviction_policies(): return [Policy]
"""


@attrs.frozen
class Site:
    """A directory on `sys.path` in which distributions can be installed."""

    path: Path

    def module(self, name, source=None):
        """Write the module `name`; the default source has one eviction policy of that name."""
        (self.path / f"{name}.py").write_text(source or HOOKS.format(name=name))

    def install(self, name, points, version="1.0", direct_url=None):
        """Install a distribution with the entry points `points`, and return them."""
        files = {} if direct_url is None else {"direct_url": direct_url}
        return install(self.path, name, points, version, **files)

    def checkout(self, name, pyproject, points):
        """Install an editable checkout with `pyproject` but the older entry points `points`."""
        (self.path / name).mkdir()
        (self.path / name / "pyproject.toml").write_text(pyproject)
        url = {"url": (self.path / name).as_uri(), "dir_info": {"editable": True}}
        return self.install(name, points, direct_url=json.dumps(url))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Yield an empty directory on `sys.path`; modules imported from it are removed later."""
    monkeypatch.delenv(DISABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def only(site, monkeypatch):
    """Make the distributions in `site` the only installed ones."""
    monkeypatch.setattr(sys, "path", [str(site.path)])
    default.cache_clear()
    yield
    default.cache_clear()


def error(kind, call, *arguments):
    """Return the message of the error that a call raises, whose type is exactly `kind`."""
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert type(caught.value) is kind
    return str(caught.value)


def loaded(points):
    """Return the plugins of the entry points `points` only."""
    return Plugins(entry_points=points)


def reasons(points):
    """Return why each plugin of the entry points `points` is unusable (or None), by name."""
    return {info.name: info.reason for info in loaded(points).listing()}


def test_entry_points_load_in_order_of_distribution_and_name(site):
    """Entry points load in order of distribution and name, whatever order they are found in."""
    for name in "abcd":
        site.module(
            f"order_{name}",
            f"import builtins\nbuiltins.order.append({name!r})\n" + HOOKS.format(name=name),
        )
    one = site.install("one", [("z", "order_b"), ("y", "order_a")])
    two = site.install("two", [("b", "order_d"), ("a", "order_c")])
    order = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.order", order, raising=False)
        loaded(two + one)
    assert order == ["a", "b", "c", "d"]


def test_entry_points_without_a_distribution_load(site):
    """An entry point made in code, without a distribution, is loaded."""
    site.module("loose")
    (info,) = loaded([EntryPoint("loose", "loose", "kvcore")]).listing()
    assert (info.distribution, info.version) == (None, None)


def test_duplicate_plugin_names_name_both_distributions(site):
    """Two plugins of one name are unusable; the error names both classes and distributions."""
    site.module("dup_one", HOOKS.format(name="same"))
    site.module("dup_two", HOOKS.format(name="same"))
    points = site.install("two", [("two", "dup_two")]) + site.install(
        "one", [("one", "dup_one")]
    )
    plugins = loaded(points)
    assert plugins.names("eviction") == []
    assert [info.usable for info in plugins.listing()] == [False, False]
    assert error(PluginError, plugins.get, "eviction", "same") == (
        "two eviction plugins are named 'same': dup_one.Policy of entry point 'one' of one "
        "1.0, and dup_two.Policy of entry point 'two' of two 1.0; rename one, or skip the "
        "entry point of one with KVCORE_DISABLE_PLUGINS"
    )


def test_a_broken_plugin_fails_alone(site):
    """Other plugins work beside a module that cannot be imported.

    The error for an unknown name reports the failed import, since the missing plugin may be in
    that module.
    """
    site.module("fine")
    site.module("torn", "def (")
    plugins = loaded(site.install("acme", [("one", "torn"), ("two", "fine")], version="0.3"))
    assert plugins.names("eviction") == ["fine"]
    assert plugins.build("eviction", "fine").name == "fine"
    assert error(PluginError, plugins.get, "eviction", "mine") == (
        "no eviction plugin is named 'mine' (did you mean 'fine'?). There are: fine; "
        "in comparisons also the bounds belady, optimum\n"
        "entry point 'one' of acme 0.3 (torn) cannot be imported: SyntaxError: invalid syntax "
        "(torn.py, line 1)"
    )
    info, usable = sorted(plugins.listing(), key=lambda each: each.usable)
    assert (info.kind, info.name, info.distribution, info.module) == (
        None,
        "one",
        "acme",
        "torn",
    )
    assert usable.reason is None


def test_a_broken_hook_or_class_fails_alone(site):
    """A hook that raises or a wrong class leaves the rest of its entry point usable."""
    site.module(
        "mixed",
        HOOKS.format(name="fine").replace("[Policy]", "[Policy, 5]")
        + "@hookimpl\ndef kvcore_schedulers(): raise KeyError('x')\n",
    )
    plugins = loaded(site.install("acme", [("acme", "mixed")]))
    assert plugins.names("eviction") == ["fine"]
    assert plugins.names("scheduler") == []
    text = error(PluginError, plugins.get, "scheduler", "mine")
    reason = "\nkvcore_schedulers of entry point 'acme' of acme 1.0 raised KeyError('x') ("
    assert reason in text
    assert [(i.kind, i.usable) for i in plugins.listing()] == [
        ("eviction", False),
        ("eviction", True),
        ("scheduler", False),
    ]


def test_import_failure_names_distribution_cause_and_place(site):
    """The error of a failed import names the distribution, the cause, the file and the line."""
    site.module("needs_x", "import x_that_is_not_there")
    points = site.install("acme", [("acme", "needs_x")], version="0.3")
    assert reasons(points) == {
        "acme": "entry point 'acme' of acme 0.3 (needs_x) cannot be imported: "
        "ModuleNotFoundError: No module named 'x_that_is_not_there' "
        f"({site.path}/needs_x.py:1)"
    }


@pytest.mark.parametrize(
    "failure", ["class Panic(BaseException): pass\nraise Panic", "raise GeneratorExit"]
)
def test_whatever_an_import_raises_fails_alone(site, failure):
    """A module that raises no Exception, as a panic in Rust is, is unusable; others work."""
    site.module("fine")
    site.module("panics", failure)
    points = site.install("pair", [("panics", "panics"), ("fine", "fine")])
    assert loaded(points).names("eviction") == ["fine"]


def test_an_entry_point_whose_value_is_no_name_fails_alone(site):
    """One that names no object, as an installer may have written it, is unusable."""
    site.module("fine")
    points = site.install("pair", [("fine", "fine")])
    points.append(EntryPoint("torn", "a b c!", "kvcore")._for(points[0].dist))
    found = loaded(points)
    assert found.names("eviction") == ["fine"]
    assert [(info.name, info.module) for info in found.listing() if not info.usable] == [
        ("torn", "a b c!")
    ]


@pytest.mark.usefixtures("only")
def test_metadata_of_another_encoding_fails_nothing(site):
    """Bytes that are no UTF-8 in the entry points of any distribution are no error."""
    site.module("own")
    site.install("kvcore", [("own", "own")])
    site.install("other", [])
    (folder,) = site.path.glob("other*.dist-info")
    (folder / "entry_points.txt").write_bytes(b"[other]\nname = \xff\n")
    assert Plugins().names("eviction") == ["own"]


def test_disabled_entry_points_are_not_imported(site, monkeypatch):
    """Entry points named in KVCORE_DISABLE_PLUGINS are skipped, and the others are loaded."""
    site.module("fine")
    site.module("broken", "1 / 0")
    points = site.install("acme", [("bad", "broken"), ("good", "fine"), ("worse", "broken")])
    monkeypatch.setenv(DISABLE, "bad, worse")
    assert loaded(points).names("eviction") == ["fine"]


def test_one_of_two_entry_points_of_a_name_can_be_disabled(site, monkeypatch):
    """One of two entry points of the same name is skipped by DISTRIBUTION:NAME."""
    site.module("eq_one")
    site.module("eq_two")
    points = site.install("one", [("x", "eq_one")]) + site.install("two", [("x", "eq_two")])
    monkeypatch.setenv(DISABLE, "two:x")
    assert loaded(points).names("eviction") == ["eq_one"]


@pytest.mark.usefixtures("only")
def test_installed_distributions_are_found(site):
    """`Plugins()` loads the entry points of all installed distributions."""
    site.module("own")
    site.module("theirs")
    site.install("kvcore", [("own", "own")])
    site.install("acme", [("theirs", "theirs")])
    assert Plugins().names("eviction") == ["own", "theirs"]


@pytest.mark.usefixtures("only")
@pytest.mark.parametrize("call", [Plugins, partial(default, "eviction", "lru")])
def test_an_uninstalled_kvcore_is_reported_with_the_install_command(call):
    """The error in a checkout that is not installed gives the command that installs it."""
    checkout = Path(installation.__file__).resolve().parents[2]
    assert error(PluginError, call) == (
        "kvcore is not installed, so it has no plugins: they are found through entry points, "
        f"which a checkout on PYTHONPATH does not have; run `pip install -e .` in {checkout}"
    )


@pytest.mark.usefixtures("only")
@pytest.mark.parametrize("call", [Plugins, partial(default, "eviction", "lru")])
def test_a_kvcore_installed_without_entry_points_is_reported(site, call):
    """The error for a kvcore that was installed without entry points names this cause."""
    site.install("kvcore", [], version="0.9")
    assert error(PluginError, call).startswith(
        "kvcore 0.9 is installed without its entry points, so there are no plugins; "
    )


@pytest.mark.usefixtures("only")
def test_default_imports_no_other_distribution(site):
    """`default` finds a class of kvcore, and does not import other distributions."""
    site.module("own")
    site.module("broken", "1 / 0")
    site.install("kvcore", [("own", "own")])
    site.install("acme", [("bad", "broken")])
    assert default("eviction", "own").name == "own"


DECLARES_TWO = """
[project]
name = "acme"
[project.entry-points.kvcore]
first = "stale_first"
second = "stale_second"
"""


@pytest.mark.parametrize(
    ("old", "cause"),
    [
        (
            {"first": "old", "gone": "x"},
            "entry points .* \\(they differ in first, gone, second\\)",
        ),
        ({"first": "stale_first", "second": "stale_second"}, "folders to import from .*toml"),
    ],
    ids=["entry-points", "folders"],
)
def test_failed_import_finds_an_outdated_installation(site, old, cause):
    """The error of a failed import reports an installation older than its pyproject.toml."""
    failures = reasons(site.checkout("acme", DECLARES_TWO, old.items()))
    assert failures.keys() == old.keys()
    for failure in failures.values():
        again = "run `pip install -e .` again"
        assert re.search(f"cannot be imported.*; the installed {cause}; {again}", failure)


def test_an_outdated_installation_is_not_reported_without_a_failure(site, capfd, caplog):
    """As long as nothing fails, an outdated installation has no reason, output or log."""
    site.module("stale_first")
    points = site.checkout("acme", DECLARES_TWO, [("first", "stale_first")])
    plugins = loaded(points)
    assert plugins.get("eviction", "stale_first").name == "stale_first"
    assert [(info.name, info.reason) for info in plugins.listing()] == [("stale_first", None)]
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


@pytest.mark.usefixtures("only")
def test_an_outdated_installation_of_kvcore_is_reported(site):
    """An editable kvcore installed before it declared entry points must be installed again."""
    site.checkout("kvcore", DECLARES_TWO, [])
    assert error(PluginError, Plugins) == (
        f"the installed entry points of kvcore 1.0 are older than {site.path}/kvcore/"
        "pyproject.toml (they differ in first, second); run `pip install -e .` again in "
        f"{site.path}/kvcore"
    )


@pytest.mark.usefixtures("only")
def test_an_outdated_installation_without_entry_points_is_reported(site):
    """An outdated distribution without any installed entry point is reported as well."""
    site.module("own")
    site.install("kvcore", [("own", "own")])
    site.checkout("acme", DECLARES_TWO, [])
    text = error(PluginError, Plugins().get, "eviction", "stale_first")
    assert "the installed entry points of acme 1.0 are older" in text


@pytest.mark.parametrize(
    "pyproject",
    [
        '[project]\n[project.entry-points.kvcore]\nfirst = "cur_first"\n',
        '[project]\ndynamic = ["entry-points"]\n',
        "[tool.other]\n",
        "not toml",
    ],
    ids=["same", "dynamic", "no-project", "damaged"],
)
def test_only_other_declared_entry_points_make_an_installation_outdated(site, pyproject):
    """Only a pyproject.toml that declares other entry points makes an installation outdated."""
    site.module("cur_first")
    points = site.checkout("acme", pyproject, [("first", "cur_first")])
    error(InputError, loaded(points).get, "eviction", "x")


@pytest.mark.parametrize(
    "direct_url",
    [
        '{"url": "file:///nowhere", "dir_info": {}}',
        '{"dir_info": {"editable": true}}',
        "[]",
        "{",
    ],
)
def test_only_an_editable_installation_is_outdated(site, direct_url):
    """A direct_url.json without an editable checkout does not make an installation outdated."""
    site.module("cur_first")
    points = site.install("acme", [("first", "cur_first")], direct_url=direct_url)
    error(InputError, loaded(points).get, "eviction", "x")
