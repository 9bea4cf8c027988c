"""Bills of requests: the rules of prompt caches, TTLs, logs, comparisons and runs."""

from __future__ import annotations

import attrs
import pytest
from helpers.billing import logged, request, requests

import kvcore
from kvcore.units import NS_PER_S
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.workload import Zipf
from kvcore_plugins.workload.usage import Usage
from kvcore_replay.billing import Charge, PromptCache, bill, hit_charge
from kvcore_replay.pricing import PriceModel, find_price
from kvcore_replay.recorded_run import bill_trace

HOUR = 3600 * NS_PER_S
PRICE = PriceModel(
    input=4, cached=1, write=5, write_1h=8, output=10, ttl=300, breakpoints=4, min_tokens=2
)


def charges(*served, price=PRICE):
    """Return the charge of each request."""
    cache = PromptCache(price)
    return [cache.charge(each, each.arrival) for each in served]


def test_a_bill_equals_one_made_by_hand():
    """The bill of two prompts, of which one extends the other, equals one made by hand."""
    found = bill([request(0, 0, "abc", 2), request(1, 10, "abcde", 1)], PRICE)
    assert (found.api.written_tokens, found.api.read_tokens) == (5, 3)
    assert found.api.usd == pytest.approx((5 * 5 + 3 * 1 + 3 * 10) / 1e6)
    assert found.uncached.usd == pytest.approx((8 * 4 + 3 * 10) / 1e6)
    assert (found.reported, found.run) == (None, None)


def test_entries_end_at_breakpoints():
    """With breakpoints a common prefix is read only if an entry ends there; without, always."""
    rows = requests((0, "abcd"), (1, "abce"))
    assert [charge.read for charge in charges(*rows)] == [0, 0]
    automatic = find_price("input=4,cached=1,write=5")
    assert [charge.read for charge in charges(*rows, price=automatic)] == [0, 3]


def test_each_use_renews_the_ttl():
    """An entry with a TTL of 300 s that is read every 200 s does not expire."""
    used = requests((0, "ab"), (200, "ab"), (400, "ab"))
    assert [charge.read for charge in charges(*used)] == [0, 2, 2]


def test_logged_entries_end_at_marked_blocks():
    """Entries end at the marked blocks of a log; tokens after the last one are not written."""
    first = logged(0, 0, ("abc", 0), ("d", None))
    second = logged(1, 1, ("abc", 0), ("xy", 0))
    assert charges(first, second) == [Charge(1, 0, 3, 0, 0), Charge(0, 3, 2, 0, 0)]


def test_one_hour_breakpoints_have_their_own_price_and_ttl():
    """Tokens up to a one-hour breakpoint are charged at its price and cached for an hour."""
    blocks = ("abc", HOUR), ("de", 0)
    first, late = logged(0, 0, *blocks), logged(1, 3000, *blocks)
    assert charges(first, late) == [Charge(0, 0, 2, 3, 0), Charge(0, 3, 2, 0, 0)]
    long = charges(
        request(0, 0, "abc"), price=find_price("input=4,write=5,write_1h=8,ttl=3600")
    )
    assert long == [Charge(0, 0, 0, 3, 0)]


def test_entries_are_found_within_lookback_blocks():
    """An entry is found only within `lookback` blocks before a breakpoint."""
    first = logged(0, 0, ("ab", 0))
    blocks = [(letter, None) for letter in "cdef"]
    far = logged(1, 1, ("ab", None), *blocks, ("g", 0))
    near = logged(1, 1, ("ab", 0), *blocks, ("g", 0))
    price = find_price("input=4,cached=1,write=5,breakpoints=4,lookback=5")
    assert [charges(first, each, price=price)[1].read for each in (far, near)] == [0, 2]


def test_a_log_without_breakpoints_caches_as_its_api_does():
    """A log without breakpoints caches nothing if its API takes them, else whole prompts."""
    for explicit, read in ((True, 0), (False, 2)):
        rows = [logged(n, n, ("ab", None), explicit=explicit) for n in range(2)]
        assert charges(*rows)[1].read == read


def test_only_the_last_allowed_breakpoints_count():
    """If a prompt has more breakpoints than allowed, only the last ones count."""
    price = find_price("input=4,cached=1,write=5,breakpoints=1")
    first = logged(0, 0, ("ab", 0), ("c", 0))
    assert charges(first, logged(1, 1, ("ab", 0), ("d", None)), price=price)[1].read == 0


def test_logged_positions_are_scaled_to_reported_tokens():
    """Positions in a logged prompt are scaled to the number of tokens that the API reported."""
    usage = Usage(20, read_tokens=20, written_tokens=30, written_1h_tokens=10, output_tokens=7)
    each = logged(0, 0, ("abcd", 0), usage=usage)
    assert charges(each) == [Charge(0, 0, 80, 0, 7)]
    found = bill([each], PRICE)
    assert found.reported.usd == pytest.approx((20 * 4 + 20 + 30 * 5 + 10 * 8 + 7 * 10) / 1e6)


def test_hit_charge_rounds_down_to_a_cacheable_length():
    """`hit_charge` rounds a hit down to a length that the API could have cached."""
    price = find_price("input=4,cached=1,write=5,min_tokens=4,step=2")
    each = request(0, 0, "abcdefghi")
    assert [hit_charge(price, each, hit).read for hit in (3, 5, 6)] == [0, 4, 6]
    assert hit_charge(price, each, 5) == Charge(1, 4, 4, 0, 0)


def test_a_reported_bill_needs_the_usage_of_all_requests():
    """A log has a reported bill only if all of its requests report their usage."""
    rows = [logged(0, 0, ("ab", 0), usage=Usage(2)), logged(1, 1, ("ab", 0))]
    assert bill(rows[:1], PRICE).reported is not None
    assert bill(rows, PRICE).reported is None


def test_each_row_of_a_comparison_is_billed_by_its_hits():
    """Each row of a comparison with a price is billed by the hits of its pool.

    The optimum costs no more than LRU in the same pool, and LRU no less than in a larger one.
    """
    work = Zipf(requests=60, prefixes=6, prefix_tokens=64, suffix_tokens=32, levels=2)
    found = compare_policies(work, ["lru", "optimum"], [20, 1000], price="input=3,cached=0.3")
    small, large, best, most = (row.bill for row in found.rows)
    assert most.usd == large.usd < small.usd
    assert most.usd <= best.usd <= small.usd < found.bills.uncached.usd
    hits = found.rows[0].hit_blocks * found.rows[0].block_size
    assert small.read_tokens == hits
    forever = compare_policies(work, "lru", 1000, price="input=3,cached=0.3,ttl=1e9")
    assert forever.bills.api.read_tokens == large.read_tokens
    assert compare_policies(work, "lru", 20).rows[0].bill is None


def test_tokens_loaded_from_a_tier_are_billed_as_read():
    """Tokens that are loaded from a tier are billed as read, like hits in the pool."""
    work = Zipf(requests=60, prefixes=4, prefix_tokens=512, suffix_tokens=32, rate=0.1)
    result = kvcore.simulate(work, blocks=60, tier="host:memory=1GiB")
    loaded = sum(result.log.loaded)
    assert loaded > 0
    found = bill(work, "input=3,cached=0.3", log=result.log)
    assert found.run.read_tokens == sum(result.log.hit) + loaded


def test_a_comparison_bills_what_its_tiers_loaded(tmp_path):
    """A row of a comparison has the bill of its trace: what its tiers loaded is read too.

    The optimum costs no more: its bill is that of what pool and tiers can hit at most.
    """
    work, price = Zipf(requests=60, prefixes=8), "input=3,cached=0.3"
    options = {"tier": "host:memory=1GiB", "price": price, "accounting": "tokens"}
    (row,) = kvcore.compare(work, "lru", 100, trace=tmp_path / "t.jsonl", **options).rows
    assert row.bill == bill_trace(tmp_path / "t.jsonl", price).run
    assert row.bill.read_tokens > row.hit_blocks * row.block_size
    lru, best = kvcore.compare(
        work, "lru,optimum", 100, **options | {"accounting": "keys"}
    ).rows
    assert best.bill.usd <= lru.bill.usd


def test_a_run_is_billed_for_what_it_generated():
    """Tokens that a limit of the run cut off are in no bill."""
    work = Zipf(requests=10, prefix_tokens=96, suffix_tokens=32, output_tokens=50)
    result = kvcore.simulate(work, max_model_len=150)
    assert sum(result.log.output) == 10 * 22
    found = bill(work, "input=3,cached=0.3,output=9", log=result.log)
    charges = (found.uncached, found.api, found.run)
    assert [charge.output_tokens for charge in charges] == [220] * 3


def test_a_run_is_billed_by_its_hits():
    """The bill of a run uses its hits and arrival times, and leaves out rejected requests."""
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
    huge = attrs.evolve(list(work)[-1], id="huge", prompt_tokens=80_000, keys=())
    result = kvcore.simulate([*work, huge], blocks=60, block_size=16)
    assert len(result.log.reasons) == 1
    found = bill([*work, huge], "openai", log=result.log)
    assert found.run.requests == found.api.requests == 40
