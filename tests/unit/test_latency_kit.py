"""The conformance tests of latency models: a right model passes, wrong ones do not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from random import random
from typing import Any

import attrs
import pytest

from kvcore import LatencyModel, PolicyError
from kvcore.serving import StepWork
from kvcore.testing import LatencyModelTests


@attrs.define(slots=False, eq=False)
class Mine(LatencyModel):
    """As a third party would write it: 1 ms, 1 us a token, 1 ns a token of context."""

    name = "mine"
    work: int = 1_000_000

    def pieces(self, work):
        """Return the one line."""
        return [(10**9 + self.work * (work.prefill + work.decode), 1000)]


class TestMine(LatencyModelTests):
    """A class with a method is enough."""

    latency = Mine


class TestPage(LatencyModelTests):
    """The model that the reference page writes."""

    def make(self):
        """Take it from the page."""
        page = Path(__file__).parents[2] / "docs/reference/latency.md"
        (source,) = re.findall(
            r"^```python\n(from [^`]*?\nclass Overlapped.*?)^```$",
            (page.read_text("utf-8")),
            re.DOTALL | re.MULTILINE,
        )
        names = {}
        exec(source, names)  # noqa: S102
        return names["Overlapped"]()


class Bent(Mine):
    """The larger of two lines, one of which begins below 0."""

    def pieces(self, work):
        """Return both."""
        return [(10**6 * work.prefill, 10), (-(10**6), 2000)]


class TestBent(LatencyModelTests):
    """A convex function of the context, approximated from below."""

    latency = Bent


class Easy(LatencyModel):
    """As a third party would write it who thinks in seconds."""

    name = "easy"

    def seconds(self, work):
        """Return what is no line in the context."""
        return 1e-3 + 1e-6 * (work.prefill + work.decode) + 1e-6 * work.context[0] ** 0.5


class TestEasy(LatencyModelTests):
    """A model in seconds need not be a line, and is never jumped."""

    latency = Easy


def test_seconds_alone_do_not_jump():
    """A class that writes `seconds` alone is asked for every step; with `pieces` it is not."""

    class Both(Easy):
        """Has lines as well."""

        jumps = True
        pieces = Mine.pieces

    assert (Easy.jumps, Both.jumps, LatencyModel.jumps) == (False, True, True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9, "1", None])
def test_no_time(value):
    """What is no finite number from 0 on is refused, naming the plugin."""

    class Wrong(Easy):
        """Returns what is no time."""

        name = "wrong"

        def seconds(self, work):
            """Return it."""
            del work
            return value

    with pytest.raises(PolicyError, match=r"'wrong'.* seconds"):
        Wrong().pieces(StepWork())


def test_neither_tier():
    """A model without a method says which to write."""

    class Nothing(LatencyModel):
        """Has no method."""

        name = "nothing"

    with pytest.raises(PolicyError, match=r"'nothing' defines neither seconds\(\) nor pieces"):
        Nothing().duration(StepWork())


class Windowed(Mine):
    """Tells two windows apart."""

    windows = (None, 100)

    def pieces(self, work):
        """Return a slope for each."""
        return [(work.decode, 3, 5), (2 * work.prefill, 4, 4)]


class TestWindowed(LatencyModelTests):
    """Contexts that stop growing are followed."""

    latency = Windowed


class Squared(Mine):
    """Takes more the longer the context: no line."""

    jumps = False

    def pieces(self, work):
        """Return what holds for this context."""
        return [(work.context[0] ** 2, 0)]


class TestSquared(LatencyModelTests):
    """A model that says so need not be a line."""

    latency = Squared


class Boastful(Squared):
    """Says that it is a line."""

    jumps = True


class Floating(Mine):
    """Computes in floats."""

    def pieces(self, work):
        """Return one."""
        return [(work.prefill / 3, 0)]


class Falling(Mine):
    """Rewards long contexts."""

    def pieces(self, work):
        """Return a line that falls."""
        return [(10**15, -1)]


class Short(Mine):
    """Forgets the slope."""

    def pieces(self, work):
        """Return half a line."""
        return [(1,)]


class Silent(Mine):
    """Says nothing."""

    def pieces(self, work):
        """Return no line."""
        return []


class Moody(Mine):
    """Never says the same again."""

    def pieces(self, work):
        """Return anything."""
        return [(int(random() * 10**15), 0)]


class Greedy(Mine):
    """Changes what it is given."""

    def pieces(self, work):
        """Count a token more."""
        work.prefill += 1
        return super().pieces(work)


class Batched(Mine):
    """Is faster with more sequences."""

    def pieces(self, work):
        """Return less for more."""
        return [(10**9 // (1 + work.decode), 0)]


class Eager(Mine):
    """Is faster with more prompt tokens."""

    def pieces(self, work):
        """Return less for more."""
        return [(10**9 // (1 + work.prefill), 0)]


class Deep(Mine):
    """Is faster with more pairs."""

    def pieces(self, work):
        """Return less for more."""
        return [(10**9 // (1 + work.attended_pairs[0]), 0)]


class Double(Mine):
    """Says one thing in lines, and another in time."""

    def duration(self, batch):
        """Return twice the time."""
        return 2 * super().duration(batch)


@attrs.define(slots=False, eq=False)
class Mangled(Mine):
    """Has an option that it does not keep as given."""

    share: float = attrs.field(default=0.5, converter=lambda share: share / 2)


class Secret(Mine):
    """Shows what no JSON can hold."""

    def coefficients(self):
        """Return a set."""
        return {"work": (self.work,)}


class Twice(Mine):
    """Has the same window twice."""

    windows = (None, None)


@attrs.define(slots=False, eq=False)
class Objects(Mine):
    """Has an option that is an object."""

    grid: Any = attrs.field(default=(1, 2))


def run(model, test):
    """Run one test of the kit on a model class."""

    class Kit(LatencyModelTests):
        latency = model

    method = getattr(Kit(), f"test_{test}")
    values = {"seed": 0, "what": "context"}
    return method(**{name: values[name] for name in inspect.signature(method).parameters})


@pytest.mark.parametrize(
    ("model", "test"),
    [
        (Twice, "windows_are_told_apart"),
        (Floating, "lines_are_integers"),
        (Short, "lines_are_integers"),
        (Silent, "lines_are_integers"),
        (Falling, "lines_are_integers"),
        (Double, "the_longest_line_is_the_time"),
        (Moody, "asking_changes_nothing"),
        (Greedy, "asking_changes_nothing"),
        (Mangled, "equal_options_give_equal_times"),
        (Mangled, "is_built_from_text"),
        (Secret, "coefficients_are_json"),
        (Falling, "more_work_takes_no_less_time"),
        (Boastful, "lines_hold_while_contexts_grow"),
        (Boastful, "many_steps_take_what_single_ones_take"),
    ],
)
def test_finds_what_is_wrong(model, test):
    """Each wrong model fails the test that is about it."""
    with pytest.raises(AssertionError):
        run(model, test)


@pytest.mark.parametrize(
    ("model", "what"), [(Eager, "prefill"), (Deep, "attended_pairs"), (Batched, "decode")]
)
def test_finds_what_gets_faster_with_more(model, what):
    """Each of the numbers is tested by itself."""

    class Kit(LatencyModelTests):
        latency = model

    with pytest.raises(AssertionError):
        Kit().test_more_work_takes_no_less_time(what, 0)


@pytest.mark.parametrize(
    ("model", "test", "reason"),
    [
        (Squared, "lines_hold_while_contexts_grow", "Squared says jumps = False"),
        (Objects, "is_built_from_text", "options without a text form: grid"),
    ],
)
def test_says_why_it_skips(model, test, reason):
    """What cannot be tested of a model is skipped, with the reason."""
    with pytest.raises(pytest.skip.Exception, match=reason):
        run(model, test)
