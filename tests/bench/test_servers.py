"""TPOT of simulated servers against that of measured ones, by AIConfigurator's samples."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import kvcore
from kvcore.models.catalogue import find_model
from kvcore_lab.measured.validation import Compared

if find_spec("aiconfigurator_core") is None:
    pytest.skip("run `tox -e bench-aic`", allow_module_level=True)

LARGE = 30
"""Rows of a group from which its median says something."""

OUTSIDE = {"llama-3.1-8b sglang h200"}
"""Groups that are further off; why is in `docs/explanation/fidelity.md`."""


def _is_mixture(compared: Compared) -> bool:
    return find_model(compared.row.options["model"]).experts > 0


def test_tpot_of_models_that_were_held_out() -> None:
    """The median absolute error of TPOT is bounded, of models to which nothing was fitted.

    It is at most 8 % for dense models and 12 % for mixtures of experts. No model, engine and
    GPU with 30 rows or more is more than 25 % off.
    """
    found = kvcore.validate("aic")
    held_out = found.groups("split")["held-out"]
    for name, mixture, most in (("dense", False, 0.08), ("mixtures", True, 0.12)):
        rows = [each for each in held_out if _is_mixture(each) == mixture]
        errors = found.errors("tpot", rows)
        assert errors is not None
        print(f"\n{name}: {errors.rows} rows, {errors.signed:+.1%}, {errors.absolute:.1%}")
        assert errors.absolute <= most
    for server, rows in found.groups("model+engine+device").items():
        errors = found.errors("tpot", rows)
        assert errors is not None
        if errors.rows >= LARGE and server not in OUTSIDE:
            assert errors.absolute <= 0.25, server
