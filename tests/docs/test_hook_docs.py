"""Tests that the pages on plugins have every hook, and that their examples run."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from helpers.distributions import install

from kvcore import hookspecs
from kvcore.plugins.manager import DISABLE, KINDS, Plugins, base_of

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference" / "plugins.md").read_text("utf-8")
HOW_TO = (DOCS / "how-to" / "write-a-plugin.md").read_text("utf-8")
HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("kvcore_"))


def signature(hook):
    """Return the name and signature of a hook, as its specification has them."""
    found = inspect.signature(getattr(hookspecs, hook))
    parameters = ", ".join(f"{p.name}: {p.annotation}" for p in found.parameters.values())
    return f"{hook}({parameters}) -> {found.return_annotation}"


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_has_a_heading_with_its_signature(hook):
    """Each hook has a heading in the reference with its signature."""
    assert f"\n### `{signature(hook)}`\n" in REFERENCE


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_described_as_in_its_docstring(hook):
    """The text below the heading of a hook is the hook's docstring."""
    text = inspect.getdoc(getattr(hookspecs, hook))
    assert f"### `{signature(hook)}`\n\n{text}\n" in REFERENCE


def test_no_heading_without_a_hook():
    """The reference has no heading of a hook that does not exist."""
    assert sorted(re.findall(r"^### `(kvcore_\w+)\(", REFERENCE, re.MULTILINE)) == HOOKS


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_plugin_has_a_row(kind):
    """Each kind of plugin is in the table, with its hook and its base class."""
    hook, base = KINDS[kind], base_of(kind)
    assert f"| `{kind}` | `{hook}` | `kvcore.{base.__name__}` |" in REFERENCE


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install the package of the how-to, and yield its entry points."""
    files = dict(
        re.findall(r"The file `([^`]+)`.*?```\w+\n(.*?)```", HOW_TO, re.DOTALL),
    )
    assert sorted(files) == [
        "kvcore_newest/hooks.py",
        "kvcore_newest/policy.py",
        "pyproject.toml",
    ]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    points = re.findall(r"\[project.entry-points.kvcore\]\n(\S+) = \"(.*?)\"\n", HOW_TO)
    monkeypatch.delenv(DISABLE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield install(tmp_path, "kvcore-newest", points, "0.1.0")
    for name in [name for name in sys.modules if name.startswith("kvcore_newest")]:
        del sys.modules[name]


def test_the_plugin_of_the_how_to_is_found(installed):
    """The files of the how-to make a distribution whose plugin is found and built."""
    plugins = Plugins(entry_points=installed)
    assert plugins.build("eviction", "newest:keep=512").keep == 512
    (info,) = plugins.listing()
    assert (info.name, info.distribution, info.version) == ("newest", "kvcore-newest", "0.1.0")


@pytest.mark.usefixtures("installed")
def test_the_how_to_registers_a_policy_in_code():
    """The last example of the how-to builds the policy without an installation."""
    example = re.findall(r"```python\n(.*?)```", HOW_TO, re.DOTALL)[-1]
    names = {}
    exec(example.replace("extra=[hooks]", "extra=[hooks], entry_points=()"), names)  # noqa: S102
    assert names["policy"].keep == 512


def test_the_second_plugin_of_the_how_to_is_found():
    """The how-to adds a scheduler to its package by one more hook."""
    (example,) = re.findall(r"```python\n([^`]*def kvcore_schedulers.*?)```", HOW_TO, re.DOTALL)
    module = ModuleType("second")
    exec(example, vars(module))  # noqa: S102
    built = Plugins(extra=[module], entry_points=()).build("scheduler", "patient")
    assert built.name == "patient"


def test_the_verb_of_the_how_to_runs():
    """The verb of the how-to prints how many blocks are used again."""
    (example,) = re.findall(r"```python\n([^`]*@click.*?)```", HOW_TO, re.DOTALL)
    names = {}
    exec(example, names)  # noqa: S102
    assert list(names["kvcore_commands"]()) == ["reuse"]
    workload = "zipf:requests=2,prefixes=1,prefix_tokens=256,suffix_tokens=16"
    assert CliRunner().invoke(names["reuse"], [workload]).output == "16 of 18 blocks\n"
