"""The fit of a latency model to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs

from kvcore.errors import InputError
from kvcore.lazy import import_extra
from kvcore.plugins.options import as_text
from kvcore.serving.latency import LatencyModel, StepWork
from kvcore.units import PS_PER_S
from kvcore_plugins.latency.measured_steps import MeasuredStep, read_steps

FOLDS = 5
"""How many times the model is fitted again, without the steps that it is then judged by."""

KINDS = ("prefill", "decode", "mixed")
"""Steps with prompt tokens alone, with sequences that generate alone, and with both."""


@runtime_checkable
class Calibratable(Protocol):
    """A latency model that can be fitted: a step takes the longest of a few sums.

    Attributes:
        fitted_times: options in seconds, each multiplied with a term of a sum.
        fitted_shares: options above 0 and up to 1, by which a term of a sum is divided.
    """

    fitted_times: ClassVar[tuple[str, ...]]
    fitted_shares: ClassVar[tuple[str, ...]]

    def terms(self, works: Sequence[StepWork]) -> Sequence[Sequence[Sequence[float]]]:
        """Return the sums of each of `works`: a term for each of the options, in order."""

    def fixed(self, works: Sequence[StepWork]) -> Sequence[float]:
        """Return the seconds of each of `works` that no option changes."""


@attrs.frozen
class Residual:
    """The difference of a fitted time from the measured one.

    Attributes:
        step: the measured step.
        fitted: its time by the fitted model, in picoseconds.
        held_out: `relative` of a model that is fitted without this step and others.
    """

    step: MeasuredStep
    fitted: int
    held_out: float

    @property
    def relative(self) -> float:
        """The error as a share of the measured time; positive if the fit is too long."""
        return self.fitted / self.step.time - 1


@attrs.frozen
class StepErrors:
    """The absolute relative errors of some steps.

    Attributes:
        steps: one of `KINDS`, or `all`.
        rows: how many steps these are.
        median, p90: of the model that is fitted to all steps.
        held_out_median, held_out_p90: of models that are fitted without the step.
    """

    steps: str
    rows: int
    median: float
    p90: float
    held_out_median: float
    held_out_p90: float


@attrs.frozen
class Calibration:
    """The latency model that fits measured steps best, and the errors of the fit.

    Attributes:
        model: the latency model.
        fitted: the options that were fitted, and their values.
        shares: names of those that are shares; the others are seconds.
        at_bound: names of those that are at a bound, 0 seconds or a share of 1, because other
            values fit worse.
        residuals: one a measured step, in the order of the file.
    """

    model: LatencyModel
    fitted: dict[str, float]
    shares: tuple[str, ...]
    at_bound: tuple[str, ...]
    residuals: list[Residual]

    @property
    def spec(self) -> str:
        """The latency model as the command line takes it, with all its options."""
        options = (f"{name}={as_text(value)}" for name, value in self.model.options().items())
        return f"{self.model.name}:{','.join(options)}"

    @property
    def errors(self) -> list[StepErrors]:
        """The errors by kind of step, as far as there are such, and of all steps."""
        import numpy as np  # noqa: PLC0415

        rows = []
        for kind in (*KINDS, "all"):
            of = [
                residual for residual in self.residuals if kind in (residual.step.kind, "all")
            ]
            if of:
                fits = [[abs(r.relative) for r in of], [abs(r.held_out) for r in of]]
                spread = np.quantile(fits, (0.5, 0.9), axis=1).T.ravel()
                rows.append(StepErrors(kind, len(of), *map(float, spread)))
        return rows

    def worst(self, most: int = 5) -> list[Residual]:
        """Return the steps that are furthest off, as a share of their time."""
        return sorted(self.residuals, key=lambda r: -abs(r.relative))[:most]


def fit_latency(path: Path, model: LatencyModel) -> Calibration:
    """Fit a latency model to the measured steps of a CSV file.

    The fit has the least squared relative error, so that a decode step of 5 ms counts as much
    as a prefill of 500. If the time is a sum, as in `linear`, that is one problem of least
    squares with bounds. If it is the longest of several sums, as in `roofline`, each step is
    assigned to its longest sum and the options are fitted to these, in turns, from several
    starts. The residuals are those of the options as they are printed. O(rows).

    Args:
        path: the measured steps.
        model: gives the class and the options that are not fitted.

    Raises:
        InputError: the file cannot be used, has too few rows, or leaves an option
            undetermined, which the error names. Or the model cannot be fitted.
        PluginError: NumPy or SciPy is missing.
    """
    for package in ("numpy", "scipy.optimize"):
        import_extra(package, "a calibration needs numpy and scipy", "lab")
    import numpy as np  # noqa: PLC0415

    if not isinstance(model, Calibratable):
        msg = f"latency plugin {model.name!r} cannot be fitted; linear and roofline can"
        raise InputError(msg)
    names = (*model.fitted_times, *model.fitted_shares)
    steps = read_steps(path)
    if len(steps) <= len(names):
        msg = (
            f"{path}: {len(steps)} rows for {len(names)} options of {model.name}; measure at "
            f"least {len(names) + 1} different steps, better dozens"
        )
        raise InputError(msg)
    works = [step.work(model.windows) for step in steps]
    terms = np.array(model.terms(works), dtype=float)
    times = np.array([step.time for step in steps]) / PS_PER_S
    fixed = np.array(model.fixed(works), dtype=float)
    # A share divides: its inverse is fitted.
    lowest = np.array([0.0] * len(model.fitted_times) + [1.0] * len(model.fitted_shares))
    best = _least_squares(terms, fixed, times, lowest)
    _check_rank(path, _longest(terms, best), names)
    held_out = np.empty(len(steps))
    order = np.argsort(times, kind="stable")
    for fold in range(FOLDS):
        rest, judged = np.delete(order, np.s_[fold::FOLDS]), order[fold::FOLDS]
        without = _least_squares(terms[rest], fixed[rest], times[rest], lowest)
        fits = (terms[judged] @ without).max(axis=1) + fixed[judged]
        held_out[judged] = fits / times[judged] - 1
    shares = model.fitted_shares
    fitted = {
        name: float(f"{1 / value:.6g}") if name in shares else round(float(value), 12)
        for name, value in zip(names, best, strict=True)
    }
    fitted_model = type(model)(**model.options() | fitted)
    return Calibration(
        fitted_model,
        fitted,
        shares,
        tuple(name for name in names if fitted[name] == (name in shares)),
        [
            Residual(step, fitted_model.duration(work), float(without))
            for step, work, without in zip(steps, works, held_out, strict=True)
        ],
    )


_STARTS = (1.0, 2.0, 5.0)
"""Inverses of shares to begin with."""

_ROUNDS = 50
"""Steps rarely change sums more than a few times, but two may alternate for ever."""


def _least_squares(terms: Any, fixed: Any, times: Any, lowest: Any) -> Any:
    """Return the values, none below `lowest`, with the least squared relative error."""
    import numpy as np  # noqa: PLC0415
    from scipy.optimize import lsq_linear  # type: ignore[import-untyped]  # noqa: PLC0415

    best, least = lowest, np.inf
    for shares in product(_STARTS, repeat=int(lowest.sum())):
        values = lowest.copy()
        values[len(values) - len(shares) :] = shares
        before = None
        for _ in range(_ROUNDS):
            rows = _longest(terms, values) / times[:, None]
            if before is not None and np.array_equal(rows, before):
                break
            before = rows
            # Counts of tokens and of sequences are orders apart.
            scale = np.maximum(rows.max(axis=0), np.finfo(float).tiny)
            bounds = lowest * scale, np.full(len(lowest), np.inf)
            rest = 1 - fixed / times
            values = lsq_linear(rows / scale, rest, bounds, method="bvls").x / scale
            error = np.square(((terms @ values).max(axis=1) + fixed) / times - 1).sum()
            if error < least:
                best, least = values, error
    return best


def _longest(terms: Any, values: Any) -> Any:
    """Return the terms of the sum that takes longest, for each step."""
    return terms[range(len(terms)), (terms @ values).argmax(axis=1)]


_DEPENDENT = 1e-9
"""A scaled column that is this close to a combination of others determines no option."""


def _check_rank(path: Path, terms: Any, names: Sequence[str]) -> None:
    """Refuse columns that leave an option undetermined, naming it."""
    import numpy as np  # noqa: PLC0415

    scaled = terms / np.maximum(terms.max(axis=0), np.finfo(float).tiny)
    known: list[int] = []
    for index in range(len(names)):
        column = scaled[:, index]
        weights = np.linalg.lstsq(scaled[:, known], column, rcond=None)[0]
        if np.abs(column - scaled[:, known] @ weights).max() > _DEPENDENT:
            known.append(index)
            continue
        mixed = [names[known[i]] for i in np.flatnonzero(np.abs(weights) > _DEPENDENT)]
        if mixed:
            problem = f"{', '.join(mixed)} and {names[index]} cannot be told apart"
        else:
            problem = f"{names[index]} cannot be known: no step takes longer by it"
        msg = (
            f"{path}: {problem}; measure more kinds of steps: without and with many prompt "
            "tokens, few and many sequences, short and long contexts, each by itself"
        )
        raise InputError(msg)
