"""The cache of an API against brute force, and properties of its bills."""

from __future__ import annotations

import hypothesis.strategies as st
from helpers.billing import entries_read, prefixes_read, request, requests
from hypothesis import given

from kvcore.testing.harness import lists
from kvcore_replay.billing import Bill, PromptCache, bill, hit_charge
from kvcore_replay.pricing import PriceModel

GAPS = st.integers(0, 4)
HITS = lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), 12)
ROWS = lists(st.tuples(GAPS, st.text("ab", max_size=9)), 12).map(
    lambda rows: [
        (sum(gap for gap, _ in rows[: n + 1]), text) for n, (_, text) in enumerate(rows)
    ]
)
FIGURES = {"input": 3.0, "cached": 0.3, "write": 3.75, "write_1h": 6.0, "output": 15.0}
RULES = st.fixed_dictionaries(
    {
        "ttl": st.integers(1, 6).map(float),
        "min_tokens": st.integers(0, 4),
        "step": st.integers(1, 3),
    }
)


def reads(rows, price):
    """Return the tokens that each prompt reads from an API's cache."""
    cache = PromptCache(price)
    return [cache.charge(each, each.arrival).read for each in requests(*rows)]


@given(rows=ROWS, rule=RULES)
def test_any_prefix_is_read_within_its_ttl(rows, rule):
    """Without breakpoints, a prompt reads the whole steps shared with an earlier one."""
    price = PriceModel(**FIGURES, **rule)
    least = max(rule["min_tokens"], 1)
    expected = prefixes_read(rows, rule["ttl"], least, 1)
    assert reads(rows, price) == list(map(price.cacheable, expected))


@given(rows=ROWS, rule=RULES)
def test_entries_are_read_within_their_ttl(rows, rule):
    """With breakpoints at prompt ends, a prompt reads the longest earlier one it extends.

    Of an entry whole steps are read, as whole steps are written.
    """
    price = PriceModel(**FIGURES, **rule, breakpoints=4)
    expected = entries_read(rows, rule["ttl"], rule["min_tokens"])
    assert reads(rows, price) == list(map(price.cacheable, expected))


@given(rows=ROWS, rule=RULES, breakpoints=st.integers(0, 1))
def test_every_token_is_billed_once(rows, rule, breakpoints):
    """Tokens of all kinds add up to the prompts, and dollars to tokens times their prices."""
    price = PriceModel(**FIGURES, **rule, breakpoints=breakpoints)
    bills = bill(requests(*rows), price)
    tokens = sum(len(text) for _, text in rows)
    for each in (bills.uncached, bills.api):
        assert each.prompt_tokens == tokens
        kinds = ("uncached", "read", "written", "written_1h", "output")
        counts = [getattr(each, f"{kind}_tokens") for kind in kinds]
        assert min(counts) >= 0
        assert each.usd == sum(map(float.__mul__, map(float, counts), price.rates)) / 1e6
    assert bills.uncached.uncached_tokens == tokens


@given(rows=ROWS, rule=RULES, hits=HITS)
def test_more_hits_never_cost_more(rows, rule, hits):
    """A cache that hits at least as much in each request costs no more.

    Reading is cheaper than writing here.
    """
    price = PriceModel(**FIGURES, **rule)
    pairs = [
        (request(n, now, text), sorted(min(hit, len(text)) for hit in pair))
        for n, ((now, text), pair) in enumerate(zip(rows, hits, strict=False))
    ]
    fewer, more = (
        Bill.from_charges(price, [hit_charge(price, each, pair[place]) for each, pair in pairs])
        for place in (0, 1)
    )
    assert more.usd <= fewer.usd
    assert more.prompt_tokens == fewer.prompt_tokens
