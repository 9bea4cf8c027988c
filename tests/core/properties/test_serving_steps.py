"""Times of many steps at once against a loop over single steps."""

from itertools import accumulate
from operator import le

from hypothesis import example, given
from hypothesis import strategies as st

from kvcore import LatencyModel
from kvcore.serving import StepWork
from kvcore.serving.latency import StepTimes, decode_lines

MOST = 60


class Lines(LatencyModel):
    """A latency model of fixed lines."""

    name = "lines"

    def __init__(self, lines):
        self.lines = lines
        self.slopes = len(lines[0]) - 1

    @property
    def windows(self):
        """A window for each slope."""
        return (None,) * self.slopes

    def pieces(self, work):
        """Return the lines."""
        del work
        return self.lines


@st.composite
def decodings(draw):
    """Draw lines, the context of a first step per window, and the growth of each step."""
    windows = draw(st.integers(1, 3))
    slopes = st.integers(0, 3) | st.just(0)
    line = st.tuples(st.integers(0, 200), *(slopes for _ in range(windows)))
    some = st.lists(st.integers(0, 20), min_size=windows, max_size=windows)
    return draw(st.lists(line, min_size=1, max_size=5)), draw(some), draw(some)


def one_by_one(lines, context, growth, steps):
    """Return the time of each step: the longest line at its context."""
    return [
        max(
            a + sum(b * (c + g * step) for b, c, g in zip(slopes, context, growth, strict=True))
            for a, *slopes in lines
        )
        for step in range(steps)
    ]


@given(decodings(), st.integers(0, MOST))
@example(([(5, 0), (5, 0)], [0], [0]), 7)
@example(([(9, 0), (0, 1), (3, 1)], [0], [2]), 40)
def test_total_is_the_sum_of_single_steps(decoding, steps):
    """`total` of the first steps is exactly the sum of their times."""
    assert StepTimes(*decoding).total(steps) == sum(one_by_one(*decoding, steps))


@given(decodings(), st.integers(1, MOST))
def test_segments_give_the_time_of_each_step(decoding, steps):
    """Segments give the time of each step, and no segment is empty."""
    parts = list(StepTimes(*decoding).segments(steps))
    assert all(count > 0 for _, _, count in parts)
    times = [first + slope * step for first, slope, count in parts for step in range(count)]
    assert times == one_by_one(*decoding, steps)


@given(decodings())
def test_there_are_no_more_segments_than_lines(decoding):
    """There are no more segments than lines, since each line is the longest at most once."""
    lines, *_ = decoding
    slopes = [slope for _, slope, _ in StepTimes(*decoding).segments(10**9)]
    assert len(slopes) <= len(lines)
    assert slopes == sorted(set(slopes))


@given(decodings(), st.integers(-5, 5000), st.integers(1, MOST))
@example(([(10, 0)], [0], [0]), 30, MOST)
@example(([(10, 0)], [0], [0]), 31, MOST)
@example(([(0, 1)], [0], [1]), 1, MOST)
@example(([(0, 0)], [0], [0]), 1, MOST)
@example(([(0, 0)], [0], [0]), 0, MOST)
def test_reach_returns_the_fewest_steps(decoding, time, most):
    """`reach` returns the fewest steps whose sum reaches a time, from 1 to `most`."""
    ends = accumulate(one_by_one(*decoding, most))
    expected = next((step for step, end in enumerate(ends, 1) if end >= time), most)
    assert StepTimes(*decoding).reach(time, most) == expected


@given(decodings(), st.integers(1, 10**12), st.integers(0, 10**30))
def test_reach_is_right_for_distant_times(decoding, most, time):
    """`reach` is right for distant times: one step less does not reach the time."""
    times = StepTimes(*decoding)
    steps = times.reach(time, most)
    assert 1 <= steps <= most
    assert steps == 1 or times.total(steps - 1) < time
    assert steps == most or times.total(steps) >= time


@given(decodings())
@example(([(5, 1, 0), (2, 0, 3)], [3, 4], [0, 0]))
def test_the_duration_of_a_step_is_its_longest_line(decoding):
    """The time of a single step is that of the longest line at its contexts."""
    lines, context, _ = decoding
    work = StepWork(0, (0,) * len(context), 1, tuple(context))
    (expected,) = one_by_one(lines, context, [0] * len(context), 1)
    assert Lines(lines).duration(work) == expected


@given(decodings())
def test_lines_that_are_nowhere_the_highest_are_left_out(decoding):
    """Of the lines of decode steps none is below another one, or equal to it, everywhere."""
    lines, *_ = decoding
    below = [
        line
        for line in lines
        if any(line != other and all(map(le, line, other)) for other in lines)
    ]
    assert sorted(decode_lines(Lines(lines), 1)) == sorted({*lines} - {*below})
