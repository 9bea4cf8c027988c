"""The conformance tests of latency models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random
from typing import Any, ClassVar

import attrs
import orjson
import pytest

from kvcore.models.cost import attended_pairs
from kvcore.plugins.base import qualified
from kvcore.serving import LatencyModel, StepWork, Windows
from kvcore.serving.service_times import StepTimes
from kvcore.testing.plugin import check_is_built_from_text, check_is_named

_STEPS = 100
_seeds = pytest.mark.parametrize("seed", range(4))


class LatencyModelTests:
    """What holds of every latency model. Derive a `Test...` class and say how to make yours.

    `latency` (or `make`, if that needs fixtures of the instance) returns a new model, made
    with the same options each time:

        class TestMine(LatencyModelTests):
            latency = Mine

    The tests ask for the times of random steps: of nothing, of prompts alone, of decoding
    sequences alone and of both, from a token to some hundred thousand.
    """

    latency: ClassVar[Callable[[], LatencyModel]]

    def make(self) -> LatencyModel:
        """Return a new latency model."""
        return type(self).latency()

    def test_is_a_named_model(self) -> None:
        """Its class derives from LatencyModel and has a name and a docstring of its own."""
        check_is_named(self.make(), LatencyModel)

    def test_windows_are_told_apart(self) -> None:
        """There is at least one, none twice, each None or at least a token; always the same."""
        model = self.make()
        windows = model.windows
        assert isinstance(windows, tuple)
        assert windows
        assert len(set(windows)) == len(windows), f"a window is there twice: {windows}"
        assert all(w is None or (type(w) is int and w >= 1) for w in windows), windows
        assert model.windows == windows

    @_seeds
    def test_lines_are_integers(self, seed: int) -> None:
        """Each line has an `a` and a slope for each window, integers, no slope below 0."""
        model = self.make()
        for work in _works(seed, model.windows):
            lines = model.pieces(work)
            assert lines, f"no line for {work}"
            for line in lines:
                assert len(line) == 1 + len(model.windows), f"{line} for {model.windows}"
                assert all(type(number) is int for number in line), f"{line} for {work}"
                assert min(line[1:]) >= 0, f"{line} for {work}"

    @_seeds
    def test_the_longest_line_is_the_time(self, seed: int) -> None:
        """`duration` is the largest of the lines at the work's context, and not negative."""
        model = self.make()
        for work in _works(seed, model.windows):
            times = [
                a + sum(b * tokens for b, tokens in zip(slopes, work.context, strict=True))
                for a, *slopes in model.pieces(work)
            ]
            assert model.duration(work) == max(times), work
            assert max(times) >= 0, f"a negative time for {work}"

    @_seeds
    def test_asking_changes_nothing(self, seed: int) -> None:
        """Equal work takes equal time, asked in any order, and is left as it is."""
        one, other = self.make(), self.make()
        works = list(_works(seed, one.windows))
        copies = [attrs.evolve(work) for work in works]
        times = [one.duration(work) for work in works]
        assert times == [other.duration(work) for work in reversed(works)][::-1]
        assert times == [one.duration(work) for work in works]
        assert works == copies

    def test_equal_options_give_equal_times(self) -> None:
        """A model rebuilt from its own `options()` has its coefficients and its times."""
        model = self.make()
        again = type(model)(**model.options())
        assert again.options() == model.options()
        assert again.coefficients() == model.coefficients()
        for work in _works(0, model.windows):
            assert again.duration(work) == model.duration(work)

    def test_is_built_from_text(self) -> None:
        """Its own options, written as text, make a model with equal options."""
        check_is_built_from_text(self.make())

    def test_coefficients_are_json(self) -> None:
        """What goes into the header of a trace is JSON, and comes back as it went."""
        coefficients = self.make().coefficients()
        assert orjson.loads(orjson.dumps(coefficients)) == coefficients

    @_seeds
    @pytest.mark.parametrize("what", ["prefill", "attended_pairs", "decode", "context"])
    def test_more_work_takes_no_less_time(self, what: str, seed: int) -> None:
        """The time never falls when only one of the numbers of its work rises."""
        model, random = self.make(), Random(seed)  # noqa: S311
        for work in _works(seed, model.windows):
            for place in (
                range(len(model.windows)) if what in ("attended_pairs", "context") else (None,)
            ):
                more = _more(work, what, place, random)
                assert model.duration(more) >= model.duration(work), f"{more}, {work}"

    @_seeds
    def test_lines_hold_while_contexts_grow(self, seed: int) -> None:
        """Where the model lets the simulator jump, lines do not depend on the context."""
        model = self._jumping()
        for work in _works(seed, model.windows):
            grown = attrs.evolve(work, context=tuple(3 * c + 1 for c in work.context))
            assert list(map(tuple, model.pieces(work))) == list(map(tuple, model.pieces(grown)))

    @_seeds
    def test_many_steps_take_what_single_ones_take(self, seed: int) -> None:
        """Any number of decode steps, summed in closed form, takes exactly their sum."""
        model = self._jumping()
        for _, lengths in _loads(seed):
            if not lengths:
                continue
            steps = _unchanging(lengths, model.windows)
            singles = [
                model.duration(_work((), [length + step for length in lengths], model.windows))
                for step in range(steps)
            ]
            first = _work((), lengths, model.windows)
            growth = [
                sum(window is None or length < window for length in lengths)
                for window in model.windows
            ]
            many = StepTimes(model.pieces(first), first.context, growth)
            totals = [many.total(count) for count in range(steps + 1)]
            assert totals == list(accumulate(singles, initial=0))

    def _jumping(self) -> LatencyModel:
        model = self.make()
        if not model.jumps:
            pytest.skip(f"{qualified(type(model))} says jumps = False")
        return model


_Load = tuple[list[tuple[int, int]], list[int]]


def _loads(seed: int) -> Iterator[_Load]:
    """Yield what steps compute: (tokens, context) of prefill chunks, lengths of sequences."""
    random = Random(seed)  # noqa: S311
    for number in range(40):
        chunks, sequences = random.randint(0, 3), random.randint(0, 2 ** random.randint(0, 8))
        yield (
            [(_some(random), _some(random) - 1) for _ in range(chunks if number % 3 else 0)],
            [_some(random) for _ in range(sequences if number % 4 else 0)],
        )


def _some(random: Random) -> int:
    """Draw a number of tokens, small as often as large."""
    return random.randint(1, 2 ** random.randint(0, 17))


def _work(
    chunks: list[tuple[int, int]] | tuple[()], lengths: list[int], windows: Windows
) -> StepWork:
    return StepWork(
        prefill=sum(tokens for tokens, _ in chunks),
        attended_pairs=tuple(
            sum(attended_pairs(context, tokens, window) for tokens, context in chunks)
            for window in windows
        ),
        decode=len(lengths),
        context=tuple(
            sum(length if window is None else min(length, window) for length in lengths)
            for window in windows
        ),
    )


def _works(seed: int, windows: Windows) -> Iterator[StepWork]:
    return (_work(chunks, lengths, windows) for chunks, lengths in _loads(seed))


def _more(work: StepWork, what: str, place: int | None, random: Random) -> StepWork:
    risen: Any = getattr(work, what)
    if place is None:
        risen += _some(random)
    else:
        risen = (*risen[:place], risen[place] + _some(random), *risen[place + 1 :])
    return attrs.evolve(work, **{what: risen})


def _unchanging(lengths: list[int], windows: Windows) -> int:
    """Return the number of steps, up to a limit, in which each context grows equally."""
    filling = [w - length for w in windows if w for length in lengths if length < w]
    return min([_STEPS, *filling])
