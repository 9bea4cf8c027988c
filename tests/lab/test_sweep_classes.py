"""The names of cells of classes that no file describes: typed in, or made by functions."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import ModuleType

import pytest

import kvcore
from kvcore import InputError
from kvcore.config import read_plugin
from kvcore.plugins import Plugins
from kvcore.plugins.options import instantiate
from kvcore_lab.sweep import Grid, Plan
from kvcore_lab.sweep.classes import class_digest
from kvcore_plugins.eviction import LRU

ZIPF = "zipf:requests=100,rate=5"

DEEPEST = """\
import kvcore
class Deepest(kvcore.ScoreEviction):
    "Evicts by depth."
    name = "deepest"
    def score(self, span, now):
        return sign(span.depth)
"""


def typed(text, name="Deepest"):
    """Return a class that was typed in: its module has no file."""
    module = sys.modules["typed_in"] = ModuleType("typed_in")
    exec(text, vars(module))  # noqa: S102
    return vars(module)[name]


def deepest(sign):
    """Return a policy whose method has `sign` in its closure."""

    class Deepest(kvcore.ScoreEviction):
        """Evicts by depth."""

        name = "deepest"

        def score(self, span, now):
            """Return the depth with a sign."""
            return sign * span.depth

    return Deepest


SIGNED = "def sign(depth): return {}depth\n" + DEEPEST

EDITS = {
    "a method": DEEPEST.replace("sign(", "{}("),
    "a function that a method calls": SIGNED,
    "a cached function": "import functools\n@functools.cache\n" + SIGNED,
    "a value": "scale = {{'depth': {}1}}\n" + DEEPEST.replace("sign(", "scale.get("),
    "a default": DEEPEST.replace("now", "now, by={}1"),
    "an attribute": DEEPEST + "    scale = {}1\n",
    "a property": DEEPEST + "    scale = property(lambda self: {}1)\n",
    "a base": DEEPEST.replace("Deepest", "Base")
    + "    scale = {}1\nclass Deepest(Base): pass\n",
}


@pytest.mark.parametrize("edited", EDITS)
def test_what_a_class_runs_changes_its_digest(edited):
    """An edit of a class that was typed in, or of what it uses, makes another class."""
    text = EDITS[edited]
    first, again, other = (class_digest(typed(text.format(sign))) for sign in ("", "", "-"))
    assert first == again != other


def test_a_class_that_a_function_has_made_has_its_closure_in_its_digest():
    """One text makes many classes, which differ in the values that they hold."""
    assert class_digest(deepest(1)) == class_digest(deepest(1)) != class_digest(deepest(-1))


def test_a_class_that_an_installed_function_has_made_is_known_by_its_closure_too():
    """The name of its package does not say with which values the function was called."""
    digests = []
    for sign in 1, -1:
        policy = deepest(sign)
        policy.__module__ = "kvcore"
        digests.append(class_digest(policy))
    assert None not in digests
    assert digests[0] != digests[1]


def test_a_class_keeps_its_digest_in_another_process():
    """A digest has no addresses, and no order of sets."""
    code = (
        "import attrs, functools, kvcore, random, re\n"
        "from kvcore_lab.sweep.classes import class_digest\n"
        "KNOWN, RULE, DRAW = {'a', 'b', 'c'}, re.compile('a+'), random.Random(3)\n"
        "@attrs.define\n"
        "class Deepest(kvcore.ScoreEviction):\n"
        "    name = 'deepest'\n"
        "    weight: int = attrs.field(default=3, validator=attrs.validators.ge(0))\n"
        "    @functools.lru_cache\n"
        "    def score(self, span, now):\n"
        "        return super().score(span, now) * len(KNOWN) * bool(RULE) * DRAW.random()\n"
        "print(class_digest(Deepest))\n"
    )
    digests = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        for _ in range(2)
    }
    assert len(digests) == 1


def test_what_cannot_be_pickled_makes_a_class_new():
    """Nobody can say whether two locks are the same, so that a journal has no such class."""
    kept = deepest(threading.Lock())
    before = class_digest(kept)
    assert class_digest(kept) == before
    class_digest.cache_clear()
    assert class_digest(kept) != before


def test_an_installed_class_is_named_by_its_package():
    """The digest of kvcore stands for its classes."""
    assert class_digest(LRU) is None


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
    digests = []
    for sign in "", "-":
        exec(DEEPEST.replace("sign(", f"{sign}("), space := {**names})  # noqa: S102
        assert len(kvcore.sweep(workload=ZIPF, eviction=space["Deepest"], blocks=600).rows) == 1
        digests.append(class_digest(space["Deepest"]))
    assert None not in digests
    assert digests[0] != digests[1]


def test_the_journal_of_a_plan_knows_classes_too(tmp_path):
    """A plan with another class of the same name takes nothing from the journal."""
    journal, lines = tmp_path / "journal", []
    for policy in deepest(1), deepest(1), deepest(-1):
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
    script = DEEPEST.replace("sign(", "(") + sweep
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


KINDS = {
    "eviction": "lru",
    "scheduler": "fcfs",
    "router": "random",
    "tier": "host:memory=1073741824",
    "drafter": "acceptance",
    "checkpoint": "default",
    "latency": "roofline",
    "prefix": "radix",
    "retention": "window",
    "codec": "fp16",
    "like": "vllm",
}


@pytest.mark.parametrize("axis", KINDS)
def test_two_classes_of_one_name_are_refused_in_one_sweep(axis):
    """Rows of one name with other figures are refused, as `compare` refuses them."""
    spec, kind = KINDS[axis], "rules" if axis == "like" else axis
    own = Plugins().get(kind, spec.partition(":")[0])
    other = instantiate(
        type("Other", (own,), {"__module__": __name__}), read_plugin(spec).options
    )
    built = Plugins().build(kind, spec)
    for first in [built] if axis == "tier" else [spec, built]:  # a tier built says its links
        with pytest.raises(InputError, match=f"{axis}: two values are named .*Other: give one"):
            Plan.from_grid(
                Grid(**{axis: [[first], [other]] if axis == "tier" else [first, other]})
            )


def test_one_class_may_be_given_twice():
    """A class and its name are one policy, and options make rows of their own."""
    policies = ["lru", LRU, LRU(), "optimum", "belady", "lfu", "lfu:half_life=5"]
    grid = Grid("compare", workload=ZIPF, eviction=policies, blocks=600)
    assert len(Plan.from_grid(grid).rows) == len(policies)
