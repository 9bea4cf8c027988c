"""Contiguous allocation: first fit in one address space, one piece for each request."""

from itertools import pairwise

import pytest
from helpers.schedulers import Urgent, scheduler_of
from helpers.serving import BLOCK, Even, ask, servers
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InputError, Job, KVCache, Trace
from kvcore.serving import Batching, DecodeSteps
from kvcore.serving.decode_batch import DecodeBatch
from kvcore.serving.stats import TokenGaps
from kvcore.testing.harness import lists
from kvcore_lab.contiguous.loop import (
    AddressSpace,
    ContiguousAllocator,
    contiguous_cache,
    simulate,
)
from kvcore_tiers.hierarchy import Tiers


def taken(size, *lengths):
    """Return an address space with pieces of these lengths, from slot 0 on."""
    space = AddressSpace(size)
    for length in lengths:
        space.take(length)
    return space


def memory(blocks=5, max_output=4):
    """Return contiguous memory of 20 slots for outputs of up to 4 tokens."""
    cache = contiguous_cache(KVCache(blocks, BLOCK))
    batch = DecodeBatch(DecodeSteps(), BLOCK, (None,), TokenGaps())
    return ContiguousAllocator(cache, batch, max_output)


def opened(allocator, request):
    """Return a job for `request`, without a sequence if no hole is long enough."""
    job = Job(request, 1, 0, DecodeSteps(), request.prompt_tokens)
    job.seq = allocator.open(job, 0, 0)
    return job


def run(requests, *, blocks=5, scheduler=None, trace=None, max_seqs=8, **options):
    """Serve `requests` in contiguous memory, by default of 20 slots."""
    options = {"allocation": "contiguous"} | options
    return simulate(
        requests,
        cache=KVCache(blocks, BLOCK, trace=trace),
        scheduler=scheduler_of("fcfs") if scheduler is None else scheduler,
        latency=Even(),
        batching=Batching(max_seqs=max_seqs, watermark=0),
        **options,
    )


@pytest.mark.parametrize(
    ("start", "holes"),
    [
        (0, [(0, 2), (4, 6), (10, 12)]),
        (2, [(2, 6), (10, 12)]),
        (6, [(4, 8), (10, 12)]),
        (8, [(4, 6), (8, 12)]),
    ],
    ids=["alone", "below one", "above one", "below the last"],
)
def test_adjacent_holes_are_merged(start, holes):
    """A freed piece joins the holes before and after it, if they touch."""
    space = taken(12, 2, 2, 2, 2, 2)
    space.give(4, 2)
    space.give(start, 2)
    assert space.holes == holes


@given(lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), 60))
def test_pieces_and_holes_tile_the_space(turns):
    """After any allocations no slot is lost or allocated twice, and no two holes touch."""
    allocator, jobs = memory(25, 0), []
    cache = allocator._cache
    for index, (length, leaving) in enumerate(turns):
        request = ask(index, prompt=length, output=0)
        fits = allocator.space.largest >= length
        job = opened(allocator, request)
        assert (job.seq is not None) == fits
        if fits:
            jobs.append(job)
        if leaving < len(jobs):
            allocator.close(jobs.pop(leaving), 0)
        pieces, holes = [allocator.piece(job.seq) for job in jobs], allocator.space.holes
        taken_slots = sorted([*((begin, begin + size) for begin, size in pieces), *holes])
        assert [0, *(end for _, end in taken_slots)] == [*(s for s, _ in taken_slots), 100]
        assert all(end < start for (_, end), (start, _) in pairwise(holes))
        held = sum(size for _, size in pieces)
        assert allocator.space.free == 100 - held
        assert cache.pool.free_blocks == allocator.space.free // BLOCK
        assert len(cache.sequences) == len(jobs)


def test_a_request_reserves_the_longest_output():
    """A piece has the prompt and the longest output, or the request's own if longer."""
    allocator = memory(max_output=4)
    jobs = [opened(allocator, ask(name, output=n)) for name, n in (("short", 1), ("long", 6))]
    assert [allocator.piece(job.seq) for job in jobs] == [(0, 8), (8, 10)]


def test_contiguous_prompts_share_nothing():
    """A prompt that was computed before, and still is in memory, does not hit."""
    allocator = memory()
    cache = allocator._cache
    first = opened(allocator, ask("a", keys="x"))
    cache.commit(first.seq, BLOCK)
    again = ask("b", keys="x")
    assert cache.probe(again) == 0
    assert opened(allocator, again).seq.computed == 0
    assert (cache.stats.lookup_blocks, cache.stats.hit_blocks) == (2, 0)


def test_a_refused_admission_changes_no_state():
    """An admission without a long enough hole makes no sequence and counts no access."""
    allocator = memory()
    opened(allocator, ask("a", prompt=10))
    assert opened(allocator, ask("b")).seq is None
    cache = allocator._cache
    assert (len(cache.sequences), allocator.space.free, cache.stats.requests) == (1, 6, 1)


def test_growth_stays_in_the_piece():
    """A sequence grows within its piece and takes no other slots."""
    allocator = memory()
    job = opened(allocator, ask("a"))
    assert allocator.can_extend(job.seq)
    allocator.extend(job.seq, 4, 0)
    assert (job.seq.tokens, allocator.space.free) == (8, 12)


def test_a_request_longer_than_the_memory_is_rejected():
    """A request longer than the memory is rejected with the sizes; others are served."""
    log = run([ask("huge", prompt=17), ask("small", output=4)]).log
    assert log.ids == ["huge", "small"]
    assert log.reasons == {
        0: "it needs a piece of 21 slots, 17 for its prompt and 4 for the longest output; "
        "the memory has 20"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allocation": "piecewise"}, "allocation='piecewise' is not known; .* paged, cont"),
        ({"max_output": -1}, "max_output=-1 must be a number of tokens, 0 or more"),
        ({"max_output": 1.5}, "max_output=1.5 must be a number of tokens"),
        ({"allocation": "paged", "max_output": 4}, "is for allocation='contiguous' alone"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    """An invalid argument is refused, and the error says what is valid."""
    with pytest.raises(InputError, match=message):
        run([ask("a")], **options)


def test_requests_that_are_read_once_need_max_output():
    """Requests that can be read only once need `max_output`, and are served with it."""
    with pytest.raises(InputError, match="can be read but once: give max_output, or a list"):
        run(iter([ask("a")]))
    assert run(iter([ask("a")]), max_output=1).log.ids == ["a"]


def test_a_trace_of_contiguous_memory_is_refused(tmp_path):
    """A trace of contiguous allocation is refused, and no file is written."""
    path = tmp_path / "trace.jsonl"
    with pytest.raises(InputError, match="trace of contiguous alloc"), Trace(path) as trace:
        run([ask("a")], trace=trace)
    assert not path.exists()


def test_tiers_with_contiguous_memory_are_refused():
    """Contiguous allocation is refused with tiers, which store blocks."""
    cache = KVCache(10, BLOCK, accounting="tokens")
    Tiers(cache, ["host:memory=1kB"], 100)
    with pytest.raises(InputError, match="a tier could hold: leave out"):
        simulate([ask("a")], cache=cache, allocation="contiguous", max_output=1)


def test_a_paused_request_keeps_its_piece():
    """A paused request keeps its piece, and computes nothing again when it goes on."""
    requests = [ask("slow", output=6, priority=1), ask("quick", at=20)]
    result = run(requests, scheduler=Urgent(), max_seqs=1)
    assert result.log.ids == ["quick", "slow"]
    assert result.summary()["preemptions"] == {"pause": 1, "recompute": 0, "swap": 0}
    assert list(result.log.finish) == [30, 70]


@given(servers(), st.sampled_from(("fcfs", "srpt", "sjf", "urgent", "planning")))
def test_every_request_ends_once(server, scheduler):
    """Every request is served, or rejected if it cannot fit, and all memory is free again."""
    options = {name: server.options[name] for name in ("max_seqs", "max_tokens", "chunked")}
    size, blocks = server.options["block_size"], server.options["blocks"]
    result = simulate(
        server.requests,
        cache=KVCache(blocks, size, key_tokens=server.options["key_tokens"]),
        scheduler=scheduler_of(scheduler),
        latency=Even(),
        batching=Batching(steps=server.options["steps"], **options),
        allocation="contiguous",
    )
    cache, log = result.cache, result.log
    assert sorted(log.ids) == [request.id for request in server.requests]
    assert {log.ids[row] for row in log.reasons} == {
        request.id
        for request in server.requests
        if not 0 < request.prompt_tokens <= blocks * size - result.max_output
    }
    assert cache.pool.free_blocks == blocks
    cache.check_integrity()


def test_paging_starts_more_requests_at_once():
    """Of 16 requests contiguous allocation starts with 3 and paging with 8; both serve all."""
    requests = [ask(index, output=4 if index % 4 else 28) for index in range(16)]
    pieces = run(requests, blocks=24)
    pages = run(requests, blocks=24, allocation="paged", fragmentation=True)
    assert sorted(pieces.log.ids) == sorted(pages.log.ids) == list(range(16))
    assert pieces.log.admitted.count(0) == 3
    assert pages.log.admitted.count(0) == 8
    assert pieces.fragmentation.running < pages.fragmentation.running
