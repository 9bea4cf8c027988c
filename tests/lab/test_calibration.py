"""Fitting latency models: to their own steps, to noisy ones, and to too few measurements."""

from __future__ import annotations

import sys
from itertools import product

import pytest

from kvcore.errors import InputError, PluginError
from kvcore.serving import StepWork
from kvcore_lab.measured.calibration import fit_latency
from kvcore_plugins.latency import Linear, Roofline, TokenRate
from kvcore_plugins.latency.measured_steps import MeasuredStep

HEADER = "prefill_tokens,decode_sequences,context_tokens,seconds"
GRID = list(product((0, 512, 4096), (1, 16, 64), (1000, 90_000)))
TRUTH = Linear(step=0.004, prefill=1.5e-5, decode=3e-5, context=2e-8)


def measured(model, grid=GRID):
    """Return the rows of a measurement of `model` without noise."""
    return [(p, d, c, model.duration(StepWork(p, (0,), d, (c,))) / 10**12) for p, d, c in grid]


@pytest.fixture
def fit(tmp_path):
    """Return a function that fits a model to rows."""

    def fit(rows, model=TRUTH, header=HEADER):
        path = tmp_path / "steps.csv"
        path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
        return fit_latency(path, model)

    return fit


def test_a_linear_model_is_recovered_from_its_own_steps(fit):
    """Fitting the steps of a linear model returns exactly its options, without residuals.

    The options with which the fit begins do not matter.
    """
    found = fit(measured(TRUTH), Linear())
    assert found.fitted == TRUTH.options()
    assert found.model.options() == TRUTH.options()
    assert found.at_bound == ()
    assert {residual.relative for residual in found.residuals} == {0}
    for errors in found.errors:
        assert (errors.median, errors.p90) == (0, 0)
        assert errors.held_out_p90 < 1e-12


def test_the_errors_of_a_fit_by_hand(fit):
    """A fit minimises the squared relative errors, and its errors equal those found by hand.

    Two equal steps that took 1 and 3 are fitted by 1.2: their mean weighted with 1 and 1/9.
    """
    rows = [(0, 0, 0, 1), (0, 0, 0, 3), (1, 0, 0, 4), (0, 1, 0, 4), (0, 0, 1, 5)]
    found = fit(rows)
    assert found.fitted == pytest.approx(
        {"step": 1.2, "prefill": 2.8, "decode": 2.8, "context": 3.8}
    )
    relative = [residual.relative for residual in found.residuals]
    assert relative == pytest.approx([0.2, -0.6, 0, 0, 0])
    prefill, decode, whole = found.errors
    assert [error.steps for error in found.errors] == ["prefill", "decode", "all"]
    assert (prefill.rows, prefill.p90) == (1, pytest.approx(0))
    assert (decode.rows, decode.median, whole.median) == pytest.approx((4, 0.1, 0))
    assert whole.p90 == pytest.approx(0.44)
    assert [residual.step.line for residual in found.worst(2)] == [3, 2]


def test_short_steps_count_as_much_as_long_ones(fit):
    """The fit of short decode steps does not suffer from noise in long prefill steps."""
    decode = [(0, d, c) for d in (1, 16, 64) for c in (1000, 30_000, 90_000)]
    prefill = [(p, 1, 1000) for p in (2048, 4096, 8192)]
    wrong = [(p, d, c, s * 1.3) for p, d, c, s in measured(TRUTH, prefill)]
    found = fit([*measured(TRUTH, decode), *wrong])
    off = {errors.steps: errors.median for errors in found.errors}
    assert off["decode"] < 0.01


def test_a_held_out_error_is_of_a_fit_without_that_step(fit):
    """The held-out error of a step is that of a fit which did not include the step.

    A step that is unlike all others is fitted well only by a fit that includes it.
    """
    rows = [(*counts[:2], 0, s) for *counts, s in measured(Linear(context=0))]
    found = fit([*rows, (0, 1, 90_000, 3.0)])
    *_, lone = found.residuals
    assert abs(lone.relative) < 1e-6
    assert lone.held_out < -0.9


@pytest.mark.parametrize(
    "options",
    [
        {"compute": 0.6, "bandwidth": 0.7, "layer_overhead": 1e-4},
        {"compute": 0.3, "bandwidth": 1.0, "overhead": 0.003},
        {"model": "qwen3-30b-a3b", "tensor_parallel": 2, "compute": 0.4, "bandwidth": 0.7},
        {"model": "gpt-oss-20b", "tensor_parallel": 1, "device": "a100-80g"},
        {"model": "qwen3-30b-a3b", "tensor_parallel": 2, "engine": "vllm"},
    ],
)
def test_a_roofline_is_recovered_from_its_own_steps(fit, options):
    """A roofline is fitted from its own steps, also with experts and with windowed layers."""
    truth = Roofline(**options)
    grid = [(p, d, d * c) for p, d, c in product((0, 512, 8192), (1, 16, 64), (100, 9000))]
    steps = [MeasuredStep(0, *counts, 1).work(truth.windows) for counts in grid]
    rows = [
        (*counts, truth.duration(step) / 1e12) for counts, step in zip(grid, steps, strict=True)
    ]
    found = fit(rows, Roofline(**options | {"compute": 0.5, "bandwidth": 0.5}))
    # The model itself rounds what a token of context takes to picoseconds.
    expected = {name: getattr(truth, name) for name in found.fitted}
    assert found.fitted == pytest.approx(expected, rel=2e-3, abs=1e-6)
    assert max(errors.held_out_p90 for errors in found.errors) < 1e-3


def test_attended_pairs_distinguish_chunks_by_their_context(fit):
    """The column attended_pairs lets a fit distinguish chunks by the context before them."""
    truth = Roofline(compute=0.4)
    rows = []
    for prefill, pairs, decode, context in [
        *((2048, 2048 * before, 0, 0) for before in (2000, 9000, 60_000, 100_000)),
        *((0, 0, decode, 9000 * decode) for decode in (1, 9, 40)),
    ]:
        work = StepWork(prefill, (pairs,), decode, (context,))
        rows.append((prefill, decode, context, pairs, truth.duration(work) / 1e12))
    found = fit(rows, Roofline(), HEADER.replace(",seconds", ",attended_pairs,seconds"))
    assert found.fitted == pytest.approx(
        {"compute": 0.4, "bandwidth": 0.85, "layer_overhead": 4.5e-5}, rel=1e-3
    )


def test_no_coefficient_is_negative(fit):
    """A coefficient that would be negative is held at 0, and the others fit without it."""
    found = fit([(p, d, c, 0.005 + p * 1e-5 + d * 1e-5 - c * 1e-8) for p, d, c in GRID])
    assert found.fitted["context"] == 0
    assert found.at_bound == ("context",)

    def squares(model):
        return sum(
            (model.duration(residual.step.work()) / residual.step.time - 1) ** 2
            for residual in found.residuals
        )

    best = squares(found.model)
    for name in ("step", "prefill", "decode"):
        for change in (0.999, 1.001):
            assert squares(Linear(**found.fitted | {name: found.fitted[name] * change})) > best


def test_too_few_rows_are_refused(fit):
    """As many rows as options are refused, because they fit without any residual."""
    with pytest.raises(InputError, match=r"4 rows for 4 options of linear; measure at least 5"):
        fit(measured(TRUTH, GRID[:4]))


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        (
            [(0, d, c) for _, d, c in GRID],
            "prefill cannot be known: no step takes longer by it",
        ),
        ([(p, 8, c) for p, _, c in GRID], "step and decode cannot be told apart"),
        ([(p, d, 2000 * d) for p, d, _ in GRID], "decode and context cannot be told apart"),
        (
            [(p, d, p + 2 * d) for p, d, _ in GRID],
            "prefill, decode and context cannot be told apart",
        ),
    ],
)
def test_measurements_that_leave_options_open_are_refused(fit, grid, problem):
    """Measurements that do not determine all options are refused.

    The error names these options and the steps to measure.
    """
    with pytest.raises(InputError) as caught:
        fit(measured(TRUTH, grid))
    message = str(caught.value)
    assert f"steps.csv: {problem}" in message
    assert "; measure more kinds of steps: without and with" in message


def test_a_model_that_cannot_be_fitted_is_refused(fit):
    """A latency model that cannot be fitted is refused, and the error names those that can."""
    with pytest.raises(InputError, match="'token-rate' cannot be fitted; linear and roofline"):
        fit(measured(TRUTH), TokenRate())


def test_without_scipy_the_extra_is_named(fit, monkeypatch):
    """Without scipy the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(PluginError, match=r"numpy and scipy .*pip install 'kvcore\[lab\]'"):
        fit(measured(TRUTH))
