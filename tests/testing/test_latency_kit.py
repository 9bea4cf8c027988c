"""The conformance tests of latency models accept correct models and find wrong ones."""

from __future__ import annotations

from random import random
from typing import Any, ClassVar

import attrs
import pytest
from helpers.faults import faulty, run_test
from helpers.pages import class_on_page

from kvcore import LatencyModel, PolicyError
from kvcore.serving import StepWork
from kvcore.testing import LatencyModelTests


@attrs.define(slots=False, eq=False)
class Mine(LatencyModel):
    """A model as a third party would write it: 1 ms, 1 us per token, 1 ns per context token."""

    name = "mine"
    work: int = 1_000_000

    def pieces(self, work):
        """Return the one line of this model."""
        return [(10**9 + self.work * (work.prefill + work.decode), 1000)]


class TestMine(LatencyModelTests):
    """Conformance tests of a model that defines only `pieces`."""

    latency = Mine


class TestPage(LatencyModelTests):
    """Conformance tests of the model on the reference page."""

    def make(self):
        """Return the model whose source is on the reference page."""
        return class_on_page("reference/latency.md", "Overlapped")()


class Bent(Mine):
    """A model that is the larger of two lines, one of which begins below 0."""

    def pieces(self, work):
        """Return both lines."""
        return [(10**6 * work.prefill, 10), (-(10**6), 2000)]


class TestBent(LatencyModelTests):
    """Conformance tests of a model that is convex in the context."""

    latency = Bent


class Easy(LatencyModel):
    """A model as a third party would write it that defines only `seconds`."""

    name = "easy"

    def seconds(self, work):
        """Return a time that is not linear in the context."""
        return 1e-3 + 1e-6 * (work.prefill + work.decode) + 1e-6 * work.context[0] ** 0.5


class TestEasy(LatencyModelTests):
    """Conformance tests of a model that defines only `seconds`, which need not be linear."""

    latency = Easy


def test_seconds_alone_do_not_jump():
    """A class that defines only `seconds` has `jumps = False`: each step is computed."""

    class Both(Easy):
        """A model that defines `seconds` and `pieces`."""

        jumps = True
        pieces = Mine.pieces

    assert (Easy.jumps, Both.jumps, LatencyModel.jumps) == (False, True, True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9, "1", None])
def test_an_invalid_time_is_refused(value):
    """A time that is negative, infinite or no number raises PolicyError with the plugin."""

    class Wrong(Easy):
        """A model that returns an invalid time."""

        name = "wrong"

        def seconds(self, work):
            """Return the invalid value."""
            del work
            return value

    with pytest.raises(PolicyError, match=r"'wrong'.* seconds"):
        Wrong().pieces(StepWork())


def test_a_model_without_methods_is_refused():
    """A model that defines no method raises PolicyError that names both choices."""

    class Nothing(LatencyModel):
        """A model that defines no method."""

        name = "nothing"

    with pytest.raises(PolicyError, match=r"'nothing' defines neither seconds\(\) nor pieces"):
        Nothing().duration(StepWork())


class Windowed(Mine):
    """A model with two windows."""

    windows = (None, 100)

    def pieces(self, work):
        """Return a line with a slope for each window."""
        return [(work.decode, 3, 5), (2 * work.prefill, 4, 4)]


class TestWindowed(LatencyModelTests):
    """Conformance tests of a model of attention windows, whose contexts stop growing."""

    latency = Windowed


class Squared(Mine):
    """A model that is not linear in the context, with `jumps = False`."""

    jumps = False

    def pieces(self, work):
        """Return a constant that holds for this context only."""
        return [(work.context[0] ** 2, 0)]


class TestSquared(LatencyModelTests):
    """Conformance tests of a model with `jumps = False`, which need not be linear."""

    latency = Squared


Boastful = faulty(
    "A model that has `jumps = True`, though it is not linear.", Squared, jumps=True
)
Floating = faulty(
    "A model that returns floats.", Mine, pieces=lambda _, work: [(work.prefill / 3, 0)]
)
Falling = faulty(
    "A model whose time falls with the context.", Mine, pieces=lambda *_: [(10**15, -1)]
)
Short = faulty("A model that returns a line without slope.", Mine, pieces=lambda *_: [(1,)])
Silent = faulty("A model that returns no line.", Mine, pieces=lambda *_: [])
Moody = faulty(
    "A model that returns another time in each call.",
    Mine,
    pieces=lambda *_: [(int(random() * 10**15), 0)],
)


class Greedy(Mine):
    """A model that changes its argument."""

    def pieces(self, work):
        """Change the attended pairs, which the line does not need."""
        work.attended_pairs = (1, *work.attended_pairs)
        return super().pieces(work)


Batched = faulty(
    "A model that is faster with more sequences.",
    Mine,
    pieces=lambda _, work: [(10**9 // (1 + work.decode), 0)],
)
Eager = faulty(
    "A model that is faster with more prompt tokens.",
    Mine,
    pieces=lambda _, work: [(10**9 // (1 + work.prefill), 0)],
)
Deep = faulty(
    "A model that is faster with more attended pairs.",
    Mine,
    pieces=lambda _, work: [(10**9 // (1 + work.attended_pairs[0]), 0)],
)


class Double(Mine):
    """A model whose `duration` is not the longest of its lines."""

    def duration(self, batch):
        """Return twice the time."""
        return 2 * super().duration(batch)


@attrs.define(slots=False, eq=False)
class Mangled(Mine):
    """A model with an option that it does not keep as given."""

    share: float = attrs.field(default=0.5, converter=lambda share: share / 2)


Secret = faulty(
    "A model with coefficients that change in JSON.",
    Mine,
    coefficients=lambda self: {"work": (self.work,)},
)
Twice = faulty("A model that lists one window twice.", Mine, windows=(None, None))


@attrs.define(slots=False, eq=False)
class Objects(Mine):
    """A model with an option that is an object."""

    grid: Any = attrs.field(default=(1, 2))


WRONG = [
    (Twice, "windows_are_distinct", "a window is there twice"),
    (Floating, "lines_are_integers", r"has \(0\.0, 0\), not integers"),
    (Short, "lines_are_integers", "not a constant and a slope for each window"),
    (Silent, "lines_are_integers", r"pieces\(\) is empty"),
    (Falling, "lines_are_integers", "with a slope below 0"),
    (Double, "the_longest_line_is_the_time", r"is 2000000000 ps, and .* 1000000000"),
    (Moody, "the_longest_line_is_the_time", "by no chance, clock or count of calls"),
    (Moody, "asking_changes_nothing", "equal work took another time"),
    (Greedy, "asking_changes_nothing", r"duration\(\) changed the work"),
    (Mangled, "equal_options_give_equal_times", r"0\.125} == .*0\.25}"),
    (Mangled, "is_built_from_text", "gave other options"),
    (Secret, "coefficients_are_json", r"\[1000000\]} == {'work': \(1000000,\)}"),
    (Falling, "more_work_takes_no_less_time", r"context=\(3446,\)\) takes less time"),
    (Boastful, "lines_hold_while_contexts_grow", r"\[\(0, 0\)\] == \[\(1, 0\)\]"),
    (Boastful, "many_steps_take_what_single_ones_take", r"^assert \[0, .*\] == \[0, "),
]


@pytest.mark.parametrize(("model", "test", "fault"), WRONG, ids=[test for _, test, _ in WRONG])
def test_each_wrong_model_fails_its_test(model, test, fault):
    """Each wrong model fails the conformance test of the rule that it breaks."""
    with pytest.raises(AssertionError, match=fault):
        run_test(LatencyModelTests, model, test, seed=0, what="context")


@pytest.mark.parametrize(
    ("model", "what"), [(Eager, "prefill"), (Deep, "attended_pairs"), (Batched, "decode")]
)
def test_models_that_get_faster_with_more_work_fail(model, what):
    """The kit finds a model that gets faster with more prefill, pairs or sequences."""
    with pytest.raises(AssertionError, match=rf"{what}=\(?3446.* takes less time than"):
        run_test(LatencyModelTests, model, "more_work_takes_no_less_time", what=what, seed=0)


@pytest.mark.parametrize(
    ("model", "test", "reason"),
    [
        (Squared, "lines_hold_while_contexts_grow", "Squared says jumps = False"),
        (Objects, "is_built_from_text", "options without a text form: grid"),
    ],
)
def test_a_skipped_test_has_a_reason(model, test, reason):
    """A test that does not apply to a model is skipped with the reason."""
    with pytest.raises(pytest.skip.Exception, match=reason):
        run_test(LatencyModelTests, model, test, seed=0, what="context")


def test_a_count_that_models_share_is_found():
    """A model whose class counts the steps fails, since a second one would go on from there."""

    class Warming(Easy):
        """A model that counts the steps of all models."""

        name = "warming"
        steps: ClassVar[list[int]] = [0]

        def seconds(self, work):
            """Count the step."""
            self.steps[0] += 1
            return super().seconds(work)

    with pytest.raises(AssertionError, match="it changed steps of its class"):
        run_test(LatencyModelTests, Warming, "equal_options_give_equal_times")
