"""The latency models `linear` and `token-rate`: their times computed by hand, and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvcore
from kvcore import InputError, Plugins
from kvcore.plugins.base import REQUIRED, options_of
from kvcore.serving import StepWork
from kvcore_plugins.latency import Linear, Roofline, TokenRate

PAGE = (Path(__file__).parents[2] / "docs/reference/latency.md").read_text("utf-8")
MILLISECOND = 10**9
MICROSECOND = 10**6


def test_linear_adds_four_terms():
    """`linear` adds its step, prompt tokens, sequences and context tokens.

    Here: 5 ms, 1,000 prompt tokens of 20 us, 8 sequences of 50 us and 4,000 context tokens of
    10 ns.
    """
    model = Linear(step=0.005, prefill=2e-5, decode=5e-5, context=1e-8)
    batch = StepWork(prefill=1000, attended_pairs=(500_500,), decode=8, context=(4000,))
    assert model.pieces(batch) == ((25_400 * MICROSECOND, 10_000),)
    assert model.duration(batch) == 25_440 * MICROSECOND


def test_linear_quantises_its_options_once():
    """`linear` rounds its options once, to whole picoseconds."""
    model = Linear(step=0, prefill=1e-9 / 3, decode=0, context=0)
    assert model.duration(StepWork(prefill=1000)) == 333_000
    assert model.coefficients() == {
        "step_ps": 0,
        "prefill_ps": 333,
        "decode_ps": 0,
        "context_ps": 0,
    }


@pytest.mark.parametrize("model", [Linear, TokenRate, Roofline])
def test_a_model_that_derives_from_one_with_lines_takes_its_own_seconds(model):
    """A class that defines `seconds` takes these times, whatever model it derives from."""

    class Own(model):
        """A model that takes a second for each step."""

        name = f"own-{model.name}"

        def seconds(self, work):
            """Return a second."""
            return 1.0

    result = kvcore.simulate("bench:requests=1,input_tokens=4,output_tokens=3", latency=Own())
    assert result.simulated_s == 3


def test_token_rate_divides_by_rates():
    """`token-rate` divides prompt tokens and sequences by their rates in a millisecond."""
    model = TokenRate(prefill=40, decode=2)
    assert model.duration(StepWork(prefill=300, decode=5)) == 10 * MILLISECOND


def test_token_rate_ignores_contexts():
    """In `token-rate` neither attended pairs nor contexts take time."""
    model = TokenRate(prefill=1, decode=1)
    batch = StepWork(prefill=2, attended_pairs=(10**9,), decode=1, context=(10**9,))
    assert model.pieces(batch) == ((3 * MILLISECOND, 0),)


def test_token_rate_of_a_whole_number_of_picoseconds_is_exact():
    """At one token per ms, a step of k sequences takes exactly k ms."""
    model = TokenRate(prefill=1, decode=1)
    assert [model.duration(StepWork(decode=k)) for k in (1, 7)] == [
        MILLISECOND,
        7 * MILLISECOND,
    ]


@pytest.mark.parametrize("option", ["prefill", "decode"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e10])
def test_token_rate_refuses_invalid_rates(option, value):
    """A rate out of bounds raises InputError with the option and the bounds."""
    with pytest.raises(InputError) as caught:
        TokenRate(**{option: value})
    assert str(caught.value) == (
        f"token-rate: {option}={value} must be a number of tokens a millisecond, from 1e-06 to "
        "1e+09"
    )


@pytest.mark.parametrize("name", Plugins().names("latency"))
def test_the_reference_has_every_option(name):
    """The reference's row of a model has all options, their defaults, and whether it jumps."""
    cls = Plugins().get("latency", name)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    for field in options_of(cls):
        default = re.search(rf"`{field.name}(?:=([^`]*))?`", row)[1]
        assert default is None or type(field.default)(default) == field.default
        assert (default is None) == (field.default in (REQUIRED, None))
    assert row.endswith("| yes |") == cls.jumps
