"""The conformance tests of latency models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from itertools import accumulate
from random import Random
from typing import Any, ClassVar

import orjson
import pytest

from kvcore.models.cost import attended_pairs
from kvcore.plugins.base import qualified
from kvcore.serving import LatencyModel, StepWork, Windows
from kvcore.serving.latency import StepTimes
from kvcore_testing.plugin import PluginTests, other_hashes, seeds, unshared

_STEPS = 100


class LatencyModelTests(PluginTests[LatencyModel]):
    """Conformance tests of a latency model; a derived `Test...` class makes the model.

    The attribute `latency` is what `make` calls:

        class TestMine(LatencyModelTests):
            latency = Mine

    The tests compute the times of random steps: empty ones, prefill alone, decode alone and
    both, from one token to some hundred thousand.
    """

    base = LatencyModel
    latency: ClassVar[Callable[[], LatencyModel]]

    seed = seeds(4)

    def test_windows_are_distinct(self) -> None:
        """`windows` is a constant tuple of one or more different windows, None or from 1 on."""
        model = self.make()
        windows = model.windows
        assert isinstance(windows, tuple)
        assert windows
        assert len(set(windows)) == len(windows), f"a window is there twice: {windows}"
        assert all(w is None or (type(w) is int and w >= 1) for w in windows), windows
        assert model.windows == windows

    def test_lines_are_integers(self, seed: int) -> None:
        """Each piece has a constant and a slope for each window: integers, no slope below 0."""
        model = self.make()
        for work in _works(seed, model.windows):
            lines = model.pieces(work)
            assert lines, f"pieces() is empty for {work}"
            for line in lines:
                assert len(line) == 1 + len(model.windows), (
                    f"pieces() has {line}, not a constant and a slope for each window"
                )
                assert all(type(value) is int for value in line), (
                    f"pieces() has {line}, not integers (ps), for {work}"
                )
                assert min(line[1:]) >= 0, (
                    f"pieces() has {line}, with a slope below 0, for {work}"
                )

    def test_the_longest_line_is_the_time(self, seed: int) -> None:
        """`duration` is the largest piece at the context of the work, and not negative."""
        model = self.make()
        for work in _works(seed, model.windows):
            times = [
                a + sum(b * tokens for b, tokens in zip(slopes, work.context, strict=True))
                for a, *slopes in model.pieces(work)
            ]
            took = model.duration(work)
            assert took == max(times), (
                f"duration() is {took} ps, and the largest of pieces() {max(times)} ps, of one "
                f"{work}: both must follow from the work alone, by no chance, clock or count "
                "of calls"
            )
            assert max(times) >= 0, f"a negative time for {work}"

    def test_asking_changes_nothing(self, seed: int) -> None:
        """Equal work takes equal time in any order of calls, and no call changes the work."""
        first, other = self.make(), self.make()
        works = list(_works(seed, first.windows))
        copies = [*map(copy, works)]
        times = [first.duration(work) for work in works]
        again = [other.duration(work) for work in reversed(works)][::-1]
        assert times == again, "in another order of calls, equal work took another time"
        assert times == [first.duration(work) for work in works], (
            "the second time, equal work took another time"
        )
        assert works == copies, "duration() changed the work"

    def test_equal_options_give_equal_times(self) -> None:
        """A model built from the `options()` of another has its coefficients and its times."""
        model = self.make()
        works = list(_works(0, model.windows))
        with unshared(model):
            coefficients, times = model.coefficients(), [*map(model.duration, works)]
        with other_hashes():
            again = type(model)(**model.options())
            assert again.options() == model.options()
            assert again.coefficients() == coefficients
            assert [*map(again.duration, works)] == times

    def test_coefficients_are_json(self) -> None:
        """`coefficients`, part of the header of traces, survive a round trip through JSON."""
        coefficients = self.make().coefficients()
        assert orjson.loads(orjson.dumps(coefficients)) == coefficients

    @pytest.mark.parametrize("what", ["prefill", "attended_pairs", "decode", "context"])
    def test_more_work_takes_no_less_time(self, what: str, seed: int) -> None:
        """More work of one kind, and no less of any other, takes no less time."""
        model, random = self.make(), Random(seed)  # noqa: S311
        for work in _works(seed, model.windows):
            for place in (
                range(len(model.windows)) if what in ("attended_pairs", "context") else (None,)
            ):
                more = _more(work, what, place, random)
                assert model.duration(more) >= model.duration(work), (
                    f"{more} takes less time than {work}"
                )

    def test_lines_hold_while_contexts_grow(self, seed: int) -> None:
        """With `jumps`, the pieces do not depend on the context."""
        model = self._jumping()
        for work in _works(seed, model.windows):
            grown = copy(work)
            grown.context = tuple(3 * c + 1 for c in work.context)
            assert list(map(tuple, model.pieces(work))) == list(map(tuple, model.pieces(grown)))

    def test_many_steps_take_what_single_ones_take(self, seed: int) -> None:
        """Decode steps that are summed in closed form take exactly the sum of single steps."""
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
    """Yield the load of steps: (tokens, context) of prefill chunks, lengths of sequences."""
    random = Random(seed)  # noqa: S311
    for index in range(40):
        chunks, sequences = random.randint(0, 3), random.randint(0, 2 ** random.randint(0, 8))
        yield (
            [(_some(random), _some(random) - 1) for _ in range(chunks if index % 3 else 0)],
            [_some(random) for _ in range(sequences if index % 4 else 0)],
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
    more = copy(work)
    setattr(more, what, risen)
    return more


def _unchanging(lengths: list[int], windows: Windows) -> int:
    """Return the number of steps, up to a limit, in which no sequence fills a window."""
    filling = [w - length for w in windows if w for length in lengths if length < w]
    return min([_STEPS, *filling])
