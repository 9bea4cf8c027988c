"""Fragmentation of memory, paged and contiguous, in the same units."""

import pytest
from helpers.retention import retentions
from helpers.schedulers import scheduler_of
from helpers.serving import BLOCK, Even, ask, batching_of, servers
from hypothesis import given

from kvcore import KVCache
from kvcore.serving import Batching, Fragmentation
from kvcore_lab.contiguous.loop import simulate


def run(requests, blocks=5, **options):
    """Return the fragmentation of a run with a step every 10 ns, by default in 20 slots."""
    return simulate(
        requests,
        cache=KVCache(blocks, BLOCK),
        latency=Even(),
        batching=Batching(watermark=0),
        fragmentation=True,
        **options,
    ).fragmentation


def alone(held, internal_peak):
    """Return the figures of 4 steps in 20 slots that fill 15 of the `held` ones."""
    return {
        "running": 1,
        "used": 15 / 80,
        "cached": 0,
        "internal": (held - 15) / 80,
        "uncomputed": 4 / 80,
        "internal_peak": internal_peak,
        "external": 0,
        "external_free": None,
    }


def test_a_contiguous_request_wastes_its_reserved_slots():
    """A contiguous piece for 4 + 8 tokens takes 12 slots in each of 4 steps.

    A prompt of 4 tokens and 4 of at most 8 generated ones fill 0, 4, 5 and 6 of them.
    """
    seen = run([ask("a", output=4)], allocation="contiguous", max_output=8)
    assert seen._asdict() == pytest.approx(alone(held=48, internal_peak=12 / 20))
    assert seen.filled == pytest.approx(15 / 48)


def test_a_paged_request_wastes_less_than_a_block():
    """The request in blocks of 4 takes 4, 8, 8, 8 slots and fills 0, 4, 5, 6 of them."""
    seen = run([ask("a", output=4)])
    assert seen._asdict() == pytest.approx(alone(held=28, internal_peak=4 / 20))


def test_holes_too_short_for_a_request_are_external_fragmentation():
    """External fragmentation is the time in which free slots suffice, but no hole does.

    Between 10 and 40 ns 12 slots are free in two holes, and request d needs 10.
    """
    requests = [
        ask("a", output=4),
        ask("b"),
        ask("c", output=4),
        ask("d", prompt=6),
    ]
    seen = run(requests, blocks=7, allocation="contiguous")
    assert (seen.external, seen.external_free) == pytest.approx((30 / 50, 12 / 28))


def test_shared_blocks_count_once():
    """Blocks of a prompt that two open requests share count once."""
    requests = [ask(name, at, 9, 2, keys="xy") for name, at in (("a", 0), ("b", 20))]
    seen = run(requests)
    # Four steps: a holds 0, then 9 tokens; b, which hits 8 of them, 8, then 9.
    assert seen.used == pytest.approx((0 + 9 + 8 + 9) / 80)
    assert seen.cached == 0


def test_time_before_the_first_arrival_does_not_count():
    """Time before the first arrival does not count."""
    late, early = ([ask("a", at, output=4)] for at in (1000, 0))
    assert run(late) == run(early)


@given(servers())
def test_jumps_measure_like_single_steps(server):
    """Jumps over many decode steps give the same numbers as single steps."""
    for allocation in ("contiguous", "paged"):
        steps = measured(server, allocation, jumps=False)
        assert measured(server, allocation) == steps


def measured(server, allocation, *, jumps=True) -> Fragmentation:
    """Return the fragmentation of a run of `server` with steps of 10 ns and preemptions."""
    options = {
        name: value
        for name, value in server.options.items()
        if name not in {"blocks", "block_size", "key_tokens"}
    }
    sizes = server.options["blocks"], server.options["block_size"]
    return simulate(
        server.requests,
        cache=KVCache(*sizes, key_tokens=server.options["key_tokens"]),
        scheduler=scheduler_of("urgent"),
        latency=Even(),
        batching=batching_of(**options),
        allocation=allocation,
        fragmentation=True,
        jumps=jumps,
    ).fragmentation


@given(server=servers(), make_policy=retentions)
def test_dropped_tokens_are_given_back_in_jumps(server, make_policy):
    """With a retention policy, jumps and single steps give equal numbers; shares are 0 to 1."""
    seen = [
        simulate(
            server.requests,
            cache=KVCache(
                server.options["blocks"],
                server.options["block_size"],
                key_tokens=server.options["key_tokens"],
                retention=make_policy(),
            ),
            latency=Even(),
            fragmentation=True,
            jumps=jumps,
        ).fragmentation
        for jumps in (True, False)
    ]
    assert seen[0] == seen[1]
    shares = seen[0].used, seen[0].cached, seen[0].internal, seen[0].uncomputed
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares[:3]) <= 1 + 1e-9
