"""`ServiceEstimates`: the decode times that schedulers ask for."""

import pytest
from helpers.serving import Bent, Single

from kvcore import KVCache
from kvcore.serving import StepWork
from kvcore.serving.latency import ServiceEstimates

MAX_SEQS = 8


def server(latency):
    """Return the estimates of a server for 8 sequences."""
    return ServiceEstimates(KVCache(100, 4), latency, MAX_SEQS)


def step_by_step(latency, tokens, context, count):
    """Return the ns of `tokens` decode steps, computed one by one."""
    time = 0
    for length in range(context + 1, context + tokens + 1):
        pairs = tuple(count * min(length, window or length) for window in latency.windows)
        time += latency.duration(StepWork(0, (0,) * len(pairs), count, pairs))
    return time // 1000


@pytest.mark.parametrize("windows", [(None,), (None, 8), (5, None, 20)])
@pytest.mark.parametrize(
    ("tokens", "context"), [(0, 9), (1, 0), (1, 7), (40, 1), (9, 18), (3, 99)]
)
def test_the_decode_estimate_equals_the_time_of_its_steps(windows, tokens, context):
    """With a latency model in lines the estimate is exact, even if windows fill on the way."""
    latency = Bent(reach=windows)
    expected = step_by_step(latency, tokens, context, 3)
    assert server(latency).decode_ns(tokens, context, 3) == expected


@pytest.mark.parametrize("windows", [(None,), (5, None)])
def test_the_prefill_estimate_equals_the_time_of_its_step(windows):
    """A prefill takes a step of its own, to the nanosecond; without a token it takes none."""
    latency = Bent(reach=windows)
    pairs = tuple(sum(min(9 + n, window or 99) for n in range(1, 8)) for window in windows)
    step = StepWork(7, pairs, 0, (0,) * len(windows))
    assert server(latency).prefill_ns(7, 9) == latency.duration(step) // 1000
    assert server(latency).prefill_ns(0, 9) == 0


def test_no_more_sequences_decode_than_may_run():
    """No more sequences than `max_seqs` count in a decode step."""
    asked = server(Bent())
    assert asked.decode_ns(5, 9, 100) == asked.decode_ns(5, 9, MAX_SEQS)


class Attending(Single):
    """A latency model whose steps take a nanosecond for each pair that a prompt attends to."""

    name = "attending"

    def pieces(self, work):
        """Return one piece."""
        return [(1000 * sum(work.attended_pairs), 3)]


@pytest.mark.parametrize(
    ("tokens", "context"), [(0, 255), (1, 0), (256, 0), (300, 255), (600, 9)]
)
def test_without_lines_a_token_takes_the_time_at_the_end_of_its_stretch(tokens, context):
    """Without lines, a token takes the time of the last context of its 256, and no prefill."""
    latency, time_ps = Attending(), 0
    for length in range(context, context + tokens):
        last = 3 * (length // 256 * 256 + 256)
        time_ps += latency.duration(StepWork(0, (0,), 3, (last,)))
    assert server(latency).decode_ns(tokens, context, 3) == time_ps // 1000


def test_without_lines_the_time_left_never_rises():
    """Without lines, the remaining time never rises and is at most 20 % too long."""
    latency = Single()
    asked = server(latency)
    left = [asked.decode_ns(2000 - done, 100 + done, 4) for done in range(2001)]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    exact = step_by_step(latency, 2000, 100, 4)
    assert exact <= left[0] <= 1.2 * exact
