"""The names of cells of classes that no file describes: typed in, or made by functions."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

import kvcore
from kvcore import InputError, PluginError
from kvcore.config import read_plugin
from kvcore.plugins import Plugins
from kvcore.plugins.options import instantiate
from kvcore_lab.sweep import Grid, Plan
from kvcore_lab.sweep.sources import class_digests
from kvcore_plugins.eviction import LRU
from kvcore_plugins.rules import VLLM
from kvcore_replay.belady import Belady

ZIPF = "zipf:requests=100,rate=5"
HOST = "host:memory=1073741824"

DEEPEST = """\
import kvcore
class Deepest(kvcore.ScoreEviction):
    "Evicts by depth."
    name = "deepest"
    def score(self, span, now):
        return span.depth
"""


def deepest(sign):
    """Return a policy whose method has `sign` in its closure."""

    class Deepest(kvcore.ScoreEviction):
        """Evicts by depth."""

        name = "deepest"

        def score(self, span, now):
            """Return the depth with a sign."""
            return sign * span.depth

    return Deepest


def test_a_class_in_a_file_is_named_by_its_files():
    """The digest of kvcore stands for its classes, in each process."""
    assert class_digests(LRU) == {}


def test_a_journal_has_no_figures_of_another_class(tmp_path):
    """A class of one name, of one file, that does another thing is simulated."""

    def hits(policy, journal=None):
        (row,) = kvcore.sweep(workload=ZIPF, eviction=policy, blocks=600, journal=journal).rows
        return row["hit_ratio_token"]

    for policy in deepest(1), deepest(-1):
        assert hits(policy, tmp_path / "journal") == hits(policy)
    assert hits(deepest(1)) != hits(deepest(-1))


@pytest.mark.parametrize("names", [{}, {"__name__": "__console__"}])
def test_a_console_without_a_module_may_sweep_its_class(names):
    """A class that `exec` has made, or a console, is in no module."""
    exec(DEEPEST, names)  # noqa: S102
    assert len(kvcore.sweep(workload=ZIPF, eviction=names["Deepest"], blocks=600).rows) == 1


def test_the_journal_of_a_plan_knows_classes_too(tmp_path):
    """A plan with another class of the same name takes nothing from the journal."""
    journal, lines = tmp_path / "journal", []
    first = deepest(1)
    for policy in first, first, deepest(-1):
        options = {"slo": "ttft=0.2", "tensor_parallel": 1, "tier": "none", "policies": []}
        kvcore.plan(ZIPF, eviction=policy, journal=journal, **options)
        lines.append(journal.read_text().count('"cell"'))
    assert lines[0] == lines[1] < lines[2]


def test_a_policy_may_keep_what_it_has_seen():
    """A class that a run changes is still that of the next cell."""
    seen = []

    class Seen(deepest(1)):
        def score(self, span, now):
            """Return the depth, and keep it."""
            seen.append(span.depth)
            return span.depth

    rows = kvcore.sweep(workload=ZIPF, eviction=Seen, blocks=[500, 600]).rows
    assert seen
    assert [row["error"] for row in rows] == [None, None]


def test_a_script_on_standard_input_may_sweep_its_class():
    """Its module has the name of a file that does not exist."""
    sweep = f"\nprint(len(kvcore.sweep(workload={ZIPF!r}, eviction=Deepest, blocks=600).rows))"
    script = DEEPEST + sweep
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


KINDS = {
    "eviction": "lru",
    "scheduler": "fcfs",
    "router": "random",
    "tier": HOST,
    "drafter": "acceptance",
    "checkpoint": "default",
    "latency": "roofline",
    "prefix": "radix",
    "retention": "window",
    "codec": "fp16",
    "like": "vllm",
}


@pytest.mark.parametrize("axis", KINDS)
def test_a_class_of_each_kind_notes_when_it_was_loaded(axis):
    """A class has a time of its own, and not that of its base, after which no edit counts."""
    kind = "rules" if axis == "like" else axis
    own = Plugins().get(kind, KINDS[axis].partition(":")[0])
    assert type("Later", (own,), {}).__loaded__ > own.__loaded__


@pytest.mark.parametrize("axis", KINDS)
def test_two_classes_of_one_name_are_refused_in_one_sweep(axis):
    """Rows of one name with other figures are refused, as `compare` refuses them."""
    spec, kind = KINDS[axis], "rules" if axis == "like" else axis
    own = Plugins().get(kind, spec.partition(":")[0])
    names = {"__module__": __name__, "name": own.name}
    other = instantiate(type("Other", (own,), names), read_plugin(spec).options)
    built = Plugins().build(kind, spec)
    for first in [built] if axis == "tier" else [spec, built]:  # a tier built says its links
        with pytest.raises(InputError, match=f"{axis}: two values are named .*Other: give one"):
            Plan.from_grid(
                Grid(**{axis: [[first], [other]] if axis == "tier" else [first, other]})
            )


def test_rules_without_a_name_are_refused_in_a_sweep():
    """Rows have the names of plugins: rules that derive from others need one of their own."""
    with pytest.raises(PluginError, match="has no name"):
        Plan.from_grid(Grid(like=["vllm", type("Other", (VLLM,), {})()]))


def test_one_class_may_be_given_twice():
    """A class and its name are one policy, and options make rows of their own."""
    policies = ["lru", LRU, LRU(), "optimum", "belady", "lfu", "lfu:half_life=5"]
    grid = Grid("compare", workload=ZIPF, eviction=policies, blocks=600)
    assert len(Plan.from_grid(grid).rows) == len(policies)


@pytest.mark.parametrize(
    "axes",
    [
        {"eviction": [LRU(), LRU]},
        {"eviction": ["lru", partial(LRU)]},
        {"eviction": [Belady(), "belady"], "mode": "compare"},
        {"eviction": [partial(LRU), LRU()], "mode": "compare"},
        {"tier": [[Plugins().build("tier", HOST)], HOST]},
    ],
)
def test_a_cell_builds_its_own_of_a_plugin_that_is_given(axes, tmp_path):
    """An instance, or what a function builds, serves each cell, and a journal has its name."""
    axes = {"workload": ZIPF, "blocks": [500, 600], "journal": tmp_path / "journal", **axes}
    rows = kvcore.sweep(**axes).rows
    assert [row["error"] for row in rows] == [None] * 4
    hits = [row["hit_blocks"] for row in rows]
    assert hits[::2] == hits[1::2]


def test_a_mode_in_place_of_the_file_is_told():
    """A mode in the place of the file of a sweep is refused with the words to give it."""
    with pytest.raises(InputError, match="has the options of the sweep: give mode='compare'"):
        kvcore.sweep("compare", workload=ZIPF)
    with pytest.raises(InputError, match="leave blocks out"):
        kvcore.sweep("grid.toml", blocks=5)
