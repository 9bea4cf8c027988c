"""Weights beyond the range of floats: their precision and their order."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore_plugins.eviction.lfu import ONE, add, divide, exp2, multiply, power, sort_key

moments = st.integers(0, 10**15)


@given(moments, st.integers(1, 10**12))
def test_exp2_is_two_to_the_power(moment, period):
    """exp2(n, d) is 2^(n / d) to about 30 bits."""
    exponent, mantissa = exp2(moment, period)
    whole, rest = divmod(moment, period)
    assert 1 <= mantissa < 2
    assert mantissa * 2.0 ** (exponent - whole) == pytest.approx(2 ** (rest / period), rel=1e-8)


@given(st.floats(1.0, 4.0), st.integers(0, 200))
def test_power_multiplies_n_times(base, exponent):
    """power(b, n) is b multiplied n times."""
    product = Fraction(base) ** exponent
    found = power(base, exponent)
    assert float(Fraction(found[1]) * Fraction(2) ** found[0] / product) == pytest.approx(1)


@given(st.integers(-40, 40), st.integers(-40, 40))
def test_add_returns_the_sum(one, other):
    """`add` returns the sum of two weights."""
    total = add((one, 1.5), (other, 1.25))
    expected = 1.5 * 2.0**one + 1.25 * 2.0**other
    assert total[1] * 2.0 ** total[0] == pytest.approx(expected)


@given(moments, moments, st.integers(1, 10**12))
def test_sort_key_orders_weights(one, other, period):
    """`sort_key` orders weights, except those that differ by less than 2^-39."""
    low, high = sorted((exp2(one, period), exp2(other, period)))
    assert sort_key(low) <= sort_key(high)
    assert sort_key(low) < sort_key(high) or divide(high, low) == pytest.approx(1, rel=2**-39)


def test_a_mantissa_that_rounds_to_two_carries_over():
    """A mantissa that rounds to 2 gets the sort key of the next power of two."""
    assert sort_key((3, 2.0 - 2**-52)) == sort_key((4, 1.0))


def test_add_ignores_a_tiny_weight():
    """`add` ignores a weight that is 2^100 times smaller than the other."""
    assert add((100, 1.5), (0, 1.5)) == (100, 1.5)


def test_divide_returns_a_finite_float():
    """`divide` returns a float that is finite even where the weights are far apart."""
    assert divide((10, 1.0), (8, 1.0)) == 4.0
    assert divide((10**9, 1.0), ONE) == 2.0**1000
    assert divide(ONE, (10**9, 1.0)) == 2.0**-1000
    assert multiply((3, 1.5), (4, 1.5)) == (8, 1.125)
