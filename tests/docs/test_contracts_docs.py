"""The page on contracts has an entry for all there is, and the kits pass on the how-tos."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore import (
    SLO,
    Backend,
    EvictionPolicy,
    Generator,
    Job,
    LatencyModel,
    PrefixIndex,
    Request,
    RetentionPolicy,
    Scheduler,
    ScoreEviction,
    Span,
    Workload,
)
from kvcore.cache import BlockLayout, GhostTree
from kvcore.engine import DeviceMemory, RaggedBatch, TensorLayout
from kvcore.plugins import Plugin, find_override, policy_error
from kvcore.request import Retention
from kvcore.serving import LoopState, ServiceTimes, StepPlan, StepWork

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "contracts.md").read_text("utf-8")
CONTRACTS = (
    Plugin,
    EvictionPolicy,
    GhostTree,
    ScoreEviction,
    Span,
    BlockLayout,
    PrefixIndex,
    RetentionPolicy,
    Scheduler,
    Job,
    LoopState,
    StepPlan,
    ServiceTimes,
    LatencyModel,
    StepWork,
    Backend,
    TensorLayout,
    RaggedBatch,
    DeviceMemory,
    Generator,
    Workload,
    Request,
    SLO,
    Retention,
)
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def section(title):
    """Return what stands under a heading of the page."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]


def entries(title):
    """Return what the tables of a section have an entry for: the code in the first cells."""
    cells = re.findall(r"^\| (`.*?`) \|", section(title), re.MULTILINE)
    return {entry for cell in cells for entry in re.findall(r"`([^`]+)`", cell)}


def listed(cls):
    """Return the names that the docstring of `cls` lists as its attributes."""
    _, _, rest = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    block = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return {
        name
        for names in re.findall(r"^    (\w[\w, ]*):", block, re.MULTILINE)
        for name in names.split(", ")
    }


def members(cls):
    """Return the public names that `cls` adds to its bases, and what must be written."""
    names = {*vars(cls), *inspect.get_annotations(cls), *listed(cls)}
    public = {name for name in names if not name.startswith("_")}
    public |= getattr(cls, "__abstractmethods__", set()) & set(vars(cls))
    return public.difference(*map(members, cls.__mro__[1:]))


def entry(cls, name):
    """Return how a member is written: a method with its parameters."""
    member = getattr(cls, name, None)
    if not inspect.isroutine(member):
        return name
    return f"{name}{parameters(member)}"


def parameters(function):
    """Return the parameters of a function in brackets, without self and annotations."""
    found = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    return str(inspect.Signature(found))


@pytest.mark.parametrize("cls", CONTRACTS, ids=lambda cls: cls.__name__)
def test_each_member_has_an_entry(cls):
    """Each public attribute and method is in its class's tables, and nothing that is gone."""
    assert entries(cls.__name__) == {entry(cls, name) for name in members(cls)}


def test_each_helper_has_an_entry():
    """The functions that plugin authors call are there, with their parameters."""
    helpers = (policy_error, find_override)
    assert entries("Helpers") == {f"{f.__name__}{parameters(f)}" for f in helpers}


def test_what_score_eviction_overrides_is_said():
    """A subclass has to know which methods need `super()`."""
    overrides = set(vars(ScoreEviction)) & members(EvictionPolicy)
    sentence = re.search(r"\nIt overrides (.*?):", section("ScoreEviction"), re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", sentence)) == overrides


@pytest.mark.parametrize(
    "page", ["write-a-policy", "write-a-prefix-cache", "write-a-scheduler", "write-a-workload"]
)
def test_the_kit_passes_on_the_how_to(page, tmp_path):
    """A how-to's snippets make one file; pytest collects the kit at its end, which passes."""
    text = (DOCS / "how-to" / f"{page}.md").read_text("utf-8")
    (tmp_path / "test_page.py").write_text("\n".join(FENCE.findall(text)), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "96"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
