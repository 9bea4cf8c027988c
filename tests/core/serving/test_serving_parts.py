"""The calls of a loop to its parts: meters, clients, schedulers that plan, the pool."""

from types import SimpleNamespace
from typing import ClassVar

import attrs
import pytest
from helpers.schedulers import Planning, scheduler_of
from helpers.serving import BLOCK, STEP, Even, ask, batching_of, serve

from kvcore import KVCache, MeasuredAllocator
from kvcore.request import Hints, text_request
from kvcore.serving import StepPlan
from kvcore.serving.decode_batch import DecodeAllocator
from kvcore.serving.latency import SimulatedExecutor, StepResult
from kvcore.serving.loop import ServingLoop
from kvcore.units import PS_PER_NS
from kvcore.workloads.arrivals import Arrivals
from kvcore_plugins.scheduler import FCFS


def loop_of(requests, *, meter=None, executor=None, scheduler=None, **batching):
    """Return a loop that has not begun, in steps of 10 ns and with 100 blocks of 4 tokens."""
    return ServingLoop(
        Arrivals(requests),
        KVCache(100, BLOCK, key_tokens=BLOCK, accounting="tokens"),
        scheduler or FCFS(),
        executor or SimulatedExecutor(Even()),
        batching_of(watermark=0, **batching),
        meter=meter,
    )


class Tape:
    """A meter that records what it is told."""

    def __init__(self):
        self.plans, self.parts = [], []

    def planned(self, loop, now):
        """Record the time of a plan, and the free blocks after it."""
        self.plans.append((now, loop._cache.pool.free_blocks))

    def passed(self, loop, *part):
        """Record the time that has passed, and what steps did in it."""
        assert loop.clock_ps == sum(took_ps for took_ps, *_ in [*self.parts, part]) + 5000
        self.parts.append(part)


def test_a_meter_is_told_of_each_plan_and_of_all_that_passes():
    """A meter gets the tokens of each step or jump, and the time without steps in between.

    The time before the first request is none.
    """
    tape = Tape()
    loop_of(
        [ask("a", 5, 6, 3), ask("b", 1000, 3, 1)], meter=tape, max_tokens=4, max_seqs=2
    ).run()
    assert tape.parts == [
        (STEP * PS_PER_NS, 4, 0, 1),
        (STEP * PS_PER_NS, 2, 0, 1),
        (2 * STEP * PS_PER_NS, 0, 2, 2),
        ((1000 - 45) * PS_PER_NS, 0, 0, 0),
        (STEP * PS_PER_NS, 3, 0, 1),
    ]
    assert tape.plans == [
        (0, 100),
        (5, 98),
        (15, 98),
        (25, 98),
        (45, 100),
        (1000, 99),
        (1010, 100),
    ]


def test_a_jump_ends_when_a_priority_changes():
    """Decode steps are one jump up to the time from which on a waiting job ranks otherwise.

    The priority of b changes at 307 ns, and the step that runs then ends at 315.
    """
    tape = Tape()
    requests = [ask("a", 5, 4, 61), ask("b", 6, 4, 1)]
    loop_of(requests, meter=tape, scheduler=scheduler_of("impatient"), max_seqs=1).run()
    assert [steps for *_, steps in tape.parts] == [1, 30, 30, 1]


def test_a_run_that_is_broken_off_leaves_each_block_to_a_sequence():
    """Blocks that were counted for the batch as a whole are those of its sequences then."""
    loop = loop_of([ask("a", 0, 4, 40), ask("b", 0, 7, 40)])
    loop._jumps = False
    jobs, pool = _begun(loop, tokens=9), loop._cache.pool
    loop.break_off(loop.clock_ps // PS_PER_NS)
    assert sum(job.seq.blocks for job in jobs) == pool.blocks - pool.free_blocks


def test_a_sequence_of_a_full_pool_can_have_the_slots_of_its_last_block():
    """A paused request goes on in a full pool for as long as its last block is not full."""
    cache = KVCache(2, BLOCK, accounting="tokens")
    seq, allocator = cache.open(ask("a", 0, 7)), DecodeAllocator(cache, None)
    assert (cache.available_blocks, allocator.can_extend(seq)) == (0, True)
    allocator.extend(seq, 1, 0)
    assert allocator.can_extend(seq) is False


@pytest.mark.parametrize(("prefill_left", "fits"), [(1, True), (0, False)])
def test_a_job_paused_in_its_prefill_fits_into_a_full_pool(prefill_left, fits):
    """A paused job that has the blocks of its next step needs none; one that decodes needs one.

    The step for which the batch has slots is still to run, and the job's last block is full.
    """
    loop = loop_of([])
    seq = loop._cache.open(ask("a", 0, 100 * BLOCK))
    loop.allocator.allocated_until = 1
    job = SimpleNamespace(seq=seq, prefill_left=prefill_left, length=100 * BLOCK)
    assert loop.batcher._fits(job, 0, None) is fits


def test_free_blocks_are_never_in_holes_too_short_for_a_request():
    """A pool of pages is not fragmented: the blocks of a sequence may lie anywhere."""
    loop = loop_of([])
    allocator = MeasuredAllocator(loop._cache, loop.batch)
    assert allocator.is_fragmented(ask("a")) is False


def test_a_client_is_told_of_its_first_token_once():
    """A first token is told at its time, and not again after a preemption."""
    told = []
    loop = loop_of([ask("a", 0, 300, 60), ask("b", 5, 60, 100), ask("c", 7, 4, 0)])
    loop.on_first_token = lambda job, now: told.append((job.request.id, now))
    loop.run()
    assert sum(loop.log.recomputes) > 0
    assert told == [("a", 10), ("b", 20)]


class Naming(SimulatedExecutor):
    """Names each block that a job fills by its number, as one that generates tokens does."""

    def __init__(self):
        super().__init__(Even())
        self.jumps = False

    def run(self, work, chunks, decoding):
        """Return the keys of the blocks that the step fills."""
        full = [job for job in decoding if (job.length + 1) % BLOCK == 0]
        named = [(job, [job.length // BLOCK]) for job in full]
        return StepResult(super().run(work, chunks, decoding).took_ps, (), named)


def test_generated_blocks_are_shared_under_the_keys_that_become_known():
    """Blocks whose keys are known once their tokens are generated are hit by later requests."""
    first = text_request("a", range(4), output=10, block_size=BLOCK, publish=True)
    again = ask("b", 500, 13, 1, keys=[*first.keys, 1, 2])
    loop = loop_of([first, again], executor=Naming())
    loop.run()
    assert list(loop.log.hit) == [0, 12]


class Ending(SimulatedExecutor):
    """Ends the text of each request after as many tokens as `ends` has for it."""

    def __init__(self, ends):
        super().__init__(Even())
        self.jumps, self._ends = False, ends

    def run(self, work, chunks, decoding):
        """Return the jobs to which the step gives their last token."""
        first = [job for job, tokens in chunks if tokens == job.prefill_left]
        ended = [
            (job, count)
            for job in (*first, *decoding)
            if job.generated + 1 == (count := self._ends[job.request.id])
        ]
        return StepResult(super().run(work, chunks, decoding).took_ps, ended)


@pytest.mark.parametrize("steps", ["mixed", "prefill-first"])
def test_a_text_that_ends_early_ends_its_request(steps):
    """A request finishes in the step that ends its text, be that of its prompt or a later one.

    Others go on: `c` has all its tokens.
    """
    ends = {"a": 1, "b": 3, "c": 5}
    loop = loop_of([ask(name, 0, 6, 5) for name in ends], executor=Ending(ends), steps=steps)
    loop.run()
    rows = dict(
        zip(loop.log.ids, zip(loop.log.output, loop.log.finish, strict=True), strict=True)
    )
    assert rows == {name: (count, STEP * count) for name, count in ends.items()}


def test_a_preempted_request_hits_blocks_whose_keys_became_known():
    """A request that is admitted again hits the blocks that it has generated and named."""
    named = text_request("a", range(4), output=40, block_size=BLOCK, publish=True)
    loop = loop_of([named], executor=Naming())
    (job,) = _begun(loop, tokens=9)
    loop.batcher._take_blocks(job, loop.clock_ps // PS_PER_NS)
    assert loop.begin()
    assert (job.target, job.computed) == (13, 12)


@pytest.mark.parametrize(("lag", "blocks"), [(0, 3), (1, 2)])
def test_an_aborted_request_leaves_the_blocks_that_it_has_generated(lag, blocks):
    """Where generated blocks stay cached, those of a request that is aborted do, if full.

    Under a lag its newest token, the last of a block, is not known yet.
    """
    loop = loop_of([ask("a", 0, 4, 40, keys=[1])], generated="cached", lag=lag)
    loop._jumps = False
    (job,) = _begun(loop, tokens=9)
    assert job.length == 12
    assert loop.abort(job, "gone")
    assert loop._cache.tree.cached_blocks == blocks


def test_a_scheduler_hears_of_the_end_of_an_aborted_request():
    """`finished` of a scheduler is called for a request that ran and is aborted, once."""
    heard = []

    class Hearing(FCFS):
        """A scheduler that records which requests end."""

        name: ClassVar[str] = "hearing"

        def finished(self, job, now):
            """Record the request and the time."""
            heard.append((job.request.id, now))

    loop = loop_of([ask("a", 0, 4, 40)], scheduler=Hearing())
    loop._jumps = False
    (job,) = _begun(loop, tokens=2)
    assert loop.abort(job, "gone")
    assert heard == [("a", loop.clock_ps // PS_PER_NS)]


@pytest.mark.parametrize(("planned", "blocks"), [(False, 2), (True, 3)])
def test_a_newest_token_is_known_once_the_slot_of_the_next_is_planned(planned, blocks):
    """Under a lag, a preempted job leaves the block of its newest token if that has come."""
    loop = loop_of([ask("a", 0, 4, 40, keys=[1])], generated="cached", lag=1)
    loop._jumps = False
    (job,) = _begun(loop, tokens=9)
    if planned:
        assert loop.begin()
    loop.batcher._take_blocks(job, loop.clock_ps // PS_PER_NS)
    assert loop._cache.tree.cached_blocks == blocks


@pytest.mark.parametrize("lag", [0, 1])
def test_tokens_that_were_computed_again_are_known(lag):
    """A request that is aborted while it computes its tokens again leaves all their blocks."""
    rules = {"generated": "cached", "preempts": "shortest", "lag": lag}
    loop = loop_of([ask("a", 0, 4, 40, keys=[1])], max_tokens=4, max_seqs=1, **rules)
    loop._jumps = False
    (job,) = _begun(loop, tokens=9)
    loop.batcher._take_blocks(job, loop.clock_ps // PS_PER_NS)
    while job.computed != 8:
        assert loop.begin()
        loop.end()
    assert job.prefill_left
    assert loop.abort(job, "gone")
    assert loop._cache.tree.cached_blocks == 2


def _begun(loop, tokens):
    """Run a loop until its jobs have generated that many tokens; return the jobs."""
    while not loop.batch.size or min(job.generated for job in loop.batch) < tokens:
        if loop.begin():
            loop.end()
    return list(loop.batcher.running)


@attrs.define(slots=False, eq=False)
class Heard(FCFS):
    """Records when it hears of each job."""

    name: ClassVar[str] = "heard"

    times: list = attrs.field(init=False, factory=list)

    def queued(self, job, now):
        """Record that a job waits."""
        self.times.append((job.request.id, now))


def test_a_scheduler_hears_of_a_job_when_it_arrives():
    """A job waits from its arrival on, which may be within a step, not from the next plan."""
    heard = Heard()
    serve([ask("a", 0, 4, 9), ask("b", 33)], scheduler=heard)
    assert heard.times == [("a", 0), ("b", 33)]


@attrs.define(slots=False, eq=False)
class Told(Planning):
    """Admits jobs as they have queued up, and records each state that it is asked about.

    Attributes:
        pauses: the time of the plan that pauses the first running job.
    """

    name: ClassVar[str] = "told"

    pauses: int = -1
    states: list = attrs.field(init=False, factory=list)

    def plan(self, state):
        """Record the state."""
        waiting, running = ("".join(job.request.id for job in jobs) for jobs in state[1:3])
        self.states.append((state.now, waiting, running, *state[3:5]))
        return StepPlan(list(state.waiting), state.running[: state.now == self.pauses])


def test_a_plan_knows_jobs_slots_and_blocks():
    """A scheduler that plans is told who waits and runs, and what is free at that moment."""
    told = Told()
    requests = [ask("a", 0, 8, 3), ask("b", 0, 8, 2), ask("c", 5, 4, 1)]
    serve(requests, blocks=10, max_seqs=2, scheduler=told)
    assert told.states == [
        (0, "ab", "", 2, 10),
        (10, "c", "ab", 0, 4),
        (20, "c", "a", 1, 7),
    ]


def test_a_job_off_the_batch_is_the_first_that_waits():
    """A job that loses its slot, or its blocks, goes before those that have waited longer."""
    told = Told(pauses=10)
    run = serve([ask(name, 0, 4, 4) for name in "abc"], max_seqs=1, scheduler=told)
    assert run.timeline("PREEMPT", "RESUME") == ["10 PREEMPT a", "50 RESUME a"]
    assert [waiting for _, waiting, *_ in told.states] == ["abc", "bc", "ac", "ac", "c"]
    told = Told()
    run = serve([ask(name, 0, 12, 14) for name in "abc"], blocks=8, scheduler=told)
    assert run.timeline("PREEMPT")[0].endswith(" b")
    assert [waiting for _, waiting, *_ in told.states][:4] == ["abc", "c", "bc", "bc"]


def test_the_pool_is_recorded_when_a_prefetch_begins():
    """The blocks that a prefetch loads into are in use from its beginning, not from its end."""
    requests = [
        ask("a", 0, 17, 1, keys=range(4)),
        ask("b", 1_000, 33, 1),
        ask("c", 20_000, 17, 1, keys=range(4), hints=Hints(prefetch=10_000)),
    ]
    tier = "host:memory=64kB,load=always,read_bandwidth=64MB,write=through"
    pool = serve(requests, blocks=9, tiers=(tier,)).result.summary()["pool"]["timeline"]
    states = zip(pool["t_s"], pool["active"], pool["free"], strict=True)
    assert (10_000 / 10**9, 4, 5) in states
