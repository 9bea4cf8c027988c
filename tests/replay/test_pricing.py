"""Prices of APIs: the built-in table, and prices given as text."""

from __future__ import annotations

import re

import pytest

from kvcore.errors import InputError
from kvcore_replay.cli.trace_options import PRICED
from kvcore_replay.pricing import PRICES, PROVIDERS, find_price


@pytest.mark.parametrize("price", PRICES.values(), ids=str)
def test_built_in_prices_have_a_source_and_a_date(price):
    """Every built-in price has a source and a date, and is found by its own text.

    Cached input costs less than input, and input less than output.
    """
    assert price.source
    assert re.fullmatch(r"2026-\d\d-\d\d", price.read)
    assert 0 < price.cached < price.input < price.output
    assert find_price(str(price)) == price


def test_the_help_of_price_names_the_providers():
    """The help of `--price`, which does not import the table, names exactly its providers."""
    assert set(PRICED) == set(PROVIDERS)


def test_prices_are_read_from_text():
    """A provider stands for its first model; figures replace its own, or make a price alone."""
    known = find_price("anthropic")
    assert known.name == "claude-sonnet-4.5"
    assert find_price("claude-sonnet-4.5, ttl=3600").ttl == 3600
    text = "input=3.00,cached=0.30,write=3.75,write_1h=6.00,ttl=300"
    price = find_price(text)
    assert price.rates == (3, 0.3, 3.75, 6, 0)
    assert find_price(str(price)) == price


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("antropic", "did you mean 'anthropic'"),
        ("anthropic,tll=3", "did you mean 'ttl'"),
        ("input", "price 'input' is not known"),
        ("input=3,input=4", "given twice"),
        ("input=1,min_tokens=1.5", "'min_tokens=1.5': expected a whole number"),
        ("input=cheap", "'input=cheap': give a number, such as 3"),
        ("cached=1", "lacks input="),
        ("input=-1", r"input=-1\.0: give a finite number from 0 on"),
        ("input=nan", "input=nan: give a finite number from 0 on"),
        ("input=1,step=0", "step=0"),
        ("input=1,step=1.5", r"'step=1\.5': expected a whole number"),
        ("input=1,ttl=0", r"ttl=0\.0: give a finite number from 1e-09 on"),
        ("input=1,write_1h=2,ttl=3600", "write_1h=2.0 without write: give both"),
        ("", "price '' is not known"),
    ],
)
def test_wrong_prices_are_refused(text, why):
    """The error for a malformed price names the fault, and may suggest a similar name."""
    with pytest.raises(InputError, match=why):
        find_price(text)


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [(0, 0), (1023, 0), (1024, 1024), (1151, 1024), (1152, 1152), (2006, 1920)],
)
def test_openai_caches_in_steps_of_128_tokens(tokens, cached):
    """OpenAI caches from 1,024 tokens on in steps of 128.

    The example of its guide is 1,920 of 2,006.
    """
    assert find_price("openai").cacheable(tokens) == cached
