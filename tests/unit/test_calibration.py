"""Fitting `linear`: what comes out of steps it made, of noise, and of too little."""

from __future__ import annotations

import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Plugins
from kvcore.errors import InputError
from kvcore.serving import StepWork
from kvcore.serving.calibration import fit_linear
from kvcore_plugins.latency import Linear

HEADER = "prefill_tokens,decode_sequences,context_tokens,seconds"
GRID = list(product((0, 512, 4096), (1, 16, 64), (1000, 90_000)))
TRUTH = Linear(step=0.004, prefill=1.5e-5, decode=3e-5, context=2e-8)


def write(path, rows):
    """Write rows as CSV and return the path."""
    path.write_text("\n".join([HEADER, *(",".join(map(str, row)) for row in rows)]))
    return path


def measured(model, grid=GRID):
    """Return the rows that `model` itself would measure."""
    return [(p, d, c, model.duration(StepWork(p, (0,), d, (c,))) / 10**12) for p, d, c in grid]


@pytest.fixture
def fit(tmp_path):
    """Return a function that fits rows."""
    return lambda rows: fit_linear(write(tmp_path / "steps.csv", rows))


def test_finds_the_model_that_made_the_steps(fit):
    """Exactly, to the picosecond, with no residual."""
    found = fit(measured(TRUTH))
    assert found.coefficients == {
        "step": 4 * 10**9,
        "prefill": 15_000_000,
        "decode": 30_000_000,
        "context": 20_000,
    }
    assert (found.rms, found.largest, found.largest_relative, found.r2) == (0, 0, 0, 1)
    assert found.held == ()


@given(st.tuples(*[st.integers(0, 10**9)] * 3))
def test_finds_any_model(tmp_path_factory, coefficients):
    """Whatever its coefficients, 0 among them."""
    prefill, decode, context = (ps / 10**12 for ps in coefficients)
    model = Linear(step=0.001, prefill=prefill, decode=decode, context=context)
    path = write(tmp_path_factory.mktemp("fit") / "steps.csv", measured(model))
    assert tuple(fit_linear(path).coefficients.values()) == (10**9, *coefficients)


def test_the_spec_builds_the_fitted_model(fit):
    """The text gives back each coefficient, to the picosecond."""
    found = fit([(p, d, c, s * (1 + d / 1000)) for p, d, c, s in measured(TRUTH)])
    built = Plugins().build("latency", found.spec).coefficients()
    assert built == {f"{name}_ps": ps for name, ps in found.coefficients.items()}


def test_the_residuals_are_those_of_the_spec(fit):
    """What the built model says of each row is what is reported as fitted."""
    found = fit([(p, d, c, s * (1 + d / 1000)) for p, d, c, s in measured(TRUTH)])
    model = Plugins().build("latency", found.spec)
    for residual in found.residuals:
        prefill, decode, context = residual.step.counts
        assert residual.fitted == model.duration(StepWork(prefill, (0,), decode, (context,)))


def test_the_errors_of_a_fit_by_hand(fit):
    """Four coefficients, five rows of which two differ: each is off by half the difference."""
    rows = [(0, 0, 0, 1), (0, 0, 0, 3), (1, 0, 0, 4), (0, 1, 0, 4), (0, 0, 1, 5)]
    found = fit(rows)
    assert list(found.coefficients.values()) == [2 * 10**12, *[2 * 10**12] * 2, 3 * 10**12]
    assert [residual.error for residual in found.residuals] == [10**12, -(10**12), 0, 0, 0]
    assert found.rms == pytest.approx((2 / 5) ** 0.5)
    assert (found.mean, found.largest) == (0.4, 1)
    assert found.mean_relative == pytest.approx((1 + 1 / 3) / 5)
    assert found.largest_relative == 1
    assert found.r2 == pytest.approx(1 - 2 / 9.2)
    assert [residual.step.line for residual in found.worst(2)] == [2, 3]


def test_no_coefficient_is_negative(fit):
    """Where contexts seem to save time, they cost nothing, and the others fit without them."""
    rows = [(p, d, c, 0.005 + p * 1e-5 + d * 1e-5 - c * 1e-8) for p, d, c in GRID]
    found = fit(rows)
    assert found.coefficients["context"] == 0
    assert found.held == ("context",)
    without = Linear(
        context=0, **{n: ps / 10**12 for n, ps in found.coefficients.items() if ps}
    )
    best = sum(residual.error**2 for residual in found.residuals)
    for name in ("step", "prefill", "decode"):
        for change in (0.999, 1.001):
            other = Linear(**without.options() | {name: getattr(without, name) * change})
            off = [
                other.duration(StepWork(r.step.prefill, (0,), r.step.decode, (0,)))
                - r.step.time
                for r in found.residuals
            ]
            assert sum(error**2 for error in off) >= best


def test_equal_times_have_no_variance_to_explain(fit):
    """R² is then unknown."""
    assert fit([(*counts, 0.005) for counts in GRID]).r2 is None


def test_too_few_rows_are_refused(fit):
    """Four rows would be fitted without any residual."""
    with pytest.raises(InputError, match=r"4 rows for 4 coefficients; measure at least 5"):
        fit(measured(TRUTH, GRID[:4]))


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        (
            [(0, d, c) for _, d, c in GRID],
            "prefill cannot be known: prefill_tokens is 0 in every row",
        ),
        (
            [(p, 8, c) for p, _, c in GRID],
            "step and decode cannot be told apart: decode_sequences is 8 in every row",
        ),
        (
            [(p, d, 2000 * d) for p, d, _ in GRID],
            "decode and context cannot be told apart: context_tokens follows from",
        ),
        (
            [(p, d, p + 2 * d) for p, d, _ in GRID],
            "prefill, decode and context cannot be told apart: context_tokens follows from",
        ),
    ],
)
def test_columns_that_say_too_little_are_refused(fit, grid, problem):
    """The error names the coefficients, and what to measure."""
    with pytest.raises(InputError) as caught:
        fit(measured(TRUTH, grid))
    message = str(caught.value)
    assert f"steps.csv: {problem}" in message
    assert message.endswith("in every row; measure steps in which it varies by itself")


def test_without_scipy_the_extra_is_named(fit, monkeypatch):
    """What to install is part of the error."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InputError, match=r"numpy and scipy .*pip install 'kvcore\[lab\]'"):
        fit(measured(TRUTH))
