"""Bills of requests: rules, breakpoints, TTLs, logs, and runs."""

from __future__ import annotations

import pytest
from helpers.billing import logged, request, requests

import kvcore
from kvcore.analysis.billing import Charge, PromptCache, bill, hit_charge
from kvcore.analysis.comparison import compare
from kvcore.models.pricing import PriceModel, find_price
from kvcore.units import NS_PER_S
from kvcore.workloads.logged import Usage
from kvcore_plugins.workload import Zipf

HOUR = 3600 * NS_PER_S
PRICE = PriceModel(
    input=4, cached=1, write=5, write_1h=8, output=10, ttl=300, breakpoints=4, min_tokens=2
)


def charges(*served, price=PRICE):
    """Return what each request is charged."""
    cache = PromptCache(price)
    return [cache.charge(each, each.arrival) for each in served]


def test_a_bill_by_hand():
    """Tokens of each kind times their prices, of two prompts of which one extends the other."""
    found = bill([request(0, 0, "abc", 2), request(1, 10, "abcde", 1)], PRICE)
    assert (found.api.written_tokens, found.api.read_tokens) == (5, 3)
    assert found.api.usd == pytest.approx((5 * 5 + 3 * 1 + 3 * 10) / 1e6)
    assert found.uncached.usd == pytest.approx((8 * 4 + 3 * 10) / 1e6)
    assert (found.reported, found.run) == (None, None)


def test_entries_end_at_breakpoints():
    """A common prefix is read only if an entry ends there; without breakpoints any is."""
    rows = requests((0, "abcd"), (1, "abce"))
    assert [each.read for each in charges(*rows)] == [0, 0]
    automatic = find_price("input=4,cached=1,write=5")
    assert [each.read for each in charges(*rows, price=automatic)] == [0, 3]


def test_each_use_renews_the_ttl():
    """An entry that is read every 200 s lives beyond 300 s; one that is not lapses."""
    used = requests((0, "ab"), (200, "ab"), (400, "ab"))
    assert [each.read for each in charges(*used)] == [0, 2, 2]


@pytest.mark.parametrize("price", [PRICE, find_price("input=4,cached=1")])
@pytest.mark.parametrize(("seconds", "read"), [(299.9, 2), (300, 0)])
def test_a_ttl_lapses_when_it_is_over(price, seconds, read):
    """The last instant at which a prompt is read is before the TTL is over, by either rule."""
    rows = requests((0, "ab"), (299, "cd"), (seconds, "ab"))
    assert charges(*rows, price=price)[2].read == read


def test_short_prompts_are_not_cached():
    """A prompt below the least length is neither written nor read."""
    assert charges(*requests((0, "a"), (1, "a"))) == [Charge(1, 0, 0, 0, 0)] * 2


def test_short_prefixes_are_no_entries():
    """A breakpoint before the least length writes nothing, in a prompt that is long enough."""
    rows = [logged(0, 0, ("a", 0), ("b", None)), logged(1, 1, ("a", 0), ("cd", None))]
    assert charges(*rows) == [Charge(2, 0, 0, 0, 0), Charge(3, 0, 0, 0, 0)]


def test_writing_without_a_price_is_input():
    """Where writing has no price of its own, what is not read is uncached."""
    price = find_price("input=4,cached=1")
    assert charges(*requests((0, "abc"), (1, "abcd")), price=price) == [
        Charge(3, 0, 0, 0, 0),
        Charge(1, 3, 0, 0, 0),
    ]


def test_logged_breakpoints():
    """An entry ends at each marked block; what follows the last is not written."""
    first = logged(0, 0, ("abc", 0), ("d", None))
    second = logged(1, 1, ("abc", 0), ("xy", 0))
    assert charges(first, second) == [Charge(1, 0, 3, 0, 0), Charge(0, 3, 2, 0, 0)]


def test_entries_of_an_hour():
    """What ends at a breakpoint of an hour is written at its price, and lives an hour."""
    blocks = ("abc", HOUR), ("de", 0)
    first, late = logged(0, 0, *blocks), logged(1, 3000, *blocks)
    assert charges(first, late) == [Charge(0, 0, 2, 3, 0), Charge(0, 3, 2, 0, 0)]
    long = charges(
        request(0, 0, "abc"), price=find_price("input=4,write=5,write_1h=8,ttl=3600")
    )
    assert long == [Charge(0, 0, 0, 3, 0)]


def test_entries_are_looked_for_some_blocks_back():
    """An entry further back than the look-back is not found, unless a breakpoint is near."""
    first = logged(0, 0, ("ab", 0))
    blocks = [(letter, None) for letter in "cdef"]
    far = logged(1, 1, ("ab", None), *blocks, ("g", 0))
    near = logged(1, 1, ("ab", 0), *blocks, ("g", 0))
    price = find_price("input=4,cached=1,write=5,breakpoints=4,lookback=5")
    assert [charges(first, each, price=price)[1].read for each in (far, near)] == [0, 2]


def test_a_log_without_breakpoints():
    """Nothing is cached where the log's API takes breakpoints; else the prompt's end is one."""
    for explicit, read in ((True, 0), (False, 2)):
        rows = [logged(n, n, ("ab", None), explicit=explicit) for n in range(2)]
        assert charges(*rows)[1].read == read


def test_only_the_last_breakpoints_count():
    """Of more than a prompt may have, the last ones."""
    price = find_price("input=4,cached=1,write=5,breakpoints=1")
    first = logged(0, 0, ("ab", 0), ("c", 0))
    assert charges(first, logged(1, 1, ("ab", 0), ("d", None)), price=price)[1].read == 0


def test_models_have_caches_of_their_own():
    """The salt of a logged request is its model."""
    rows = [logged(n, n, ("ab", 0), salt=f"m{n}") for n in range(2)]
    assert [each.read for each in charges(*rows)] == [0, 0]


def test_logged_prompts_are_as_long_as_reported():
    """Positions are scaled to the tokens that the API counted."""
    usage = Usage(80, read_tokens=20, written_tokens=30, written_1h_tokens=10, output_tokens=7)
    each = logged(0, 0, ("abcd", 0), usage=usage)
    assert charges(each) == [Charge(0, 0, 80, 0, 7)]
    assert hit_charge(PRICE, each, 1) == Charge(0, 20, 60, 0, 7)
    found = bill([each], PRICE)
    assert found.reported.usd == pytest.approx((20 * 4 + 20 + 30 * 5 + 10 * 8 + 7 * 10) / 1e6)


def test_hits_count_in_whole_steps():
    """A hit of one's own cache is read as far as the API could have cached it."""
    price = find_price("input=4,cached=1,write=5,min_tokens=4,step=2")
    each = request(0, 0, "abcdefghi")
    assert [hit_charge(price, each, hit).read for hit in (3, 5, 6)] == [0, 4, 6]
    assert hit_charge(price, each, 5) == Charge(1, 4, 4, 0, 0)


def test_reported_if_all_is():
    """There is no bill of a log of which some requests report nothing."""
    rows = [logged(0, 0, ("ab", 0), usage=Usage(2)), logged(1, 1, ("ab", 0))]
    assert bill(rows[:1], PRICE).reported is not None
    assert bill(rows, PRICE).reported is None


def test_rows_of_a_comparison_are_billed():
    """By the hits of their pools: the optimum is no dearer than a policy, nor unbounded LRU."""
    work = Zipf(requests=60, prefixes=6, prefix_tokens=64, suffix_tokens=32, levels=2)
    found = compare(work, ["lru", "optimum"], [20, 1000], price="input=3,cached=0.3")
    small, large, best, most = (row.bill for row in found.rows)
    assert most.usd == large.usd < small.usd
    assert most.usd <= best.usd <= small.usd < found.bills.uncached.usd
    hits = found.rows[0].hit_blocks * found.rows[0].block_size
    assert small.read_tokens == hits
    forever = compare(work, "lru", 1000, price="input=3,cached=0.3,ttl=1e9")
    assert forever.bills.api.read_tokens == large.read_tokens
    assert compare(work, "lru", 20).rows[0].bill is None


def test_what_tiers_load_is_read():
    """Tokens that a tier below the pool gave back are billed as those that hit."""
    work = Zipf(requests=60, prefixes=4, prefix_tokens=512, suffix_tokens=32, rate=0.1)
    result = kvcore.simulate(work, blocks=60, tier="host:memory=1GiB")
    loaded = sum(result.log.loaded)
    assert loaded > 0
    found = bill(work, "input=3,cached=0.3", log=result.log)
    assert found.run.read_tokens == sum(result.log.hit) + loaded


def test_a_run_is_billed_by_its_hits():
    """Requests arrive when they did in the run, and those that it rejected are left out."""
    work = Zipf(requests=40, prefixes=4, prefix_tokens=64, suffix_tokens=32, rate=100)
    result = kvcore.simulate(work, blocks=60, block_size=16)
    found = bill(work, "input=3,cached=0.3,output=9", log=result.log)
    assert found.run.read_tokens == sum(result.log.hit)
    assert found.run.requests == found.api.requests == 40
    assert found.run.output_tokens == sum(result.log.output)
    slow, fast = (
        bill(work, "input=3,ttl=1", log=kvcore.simulate(work, blocks=60, rate_scale=scale).log)
        for scale in (0.01, 100)
    )
    assert slow.api.read_tokens < fast.api.read_tokens
    result = kvcore.simulate(work, blocks=5, block_size=16)
    assert bill(work, "openai", log=result.log).run.requests == 40 - len(result.log.reasons)
