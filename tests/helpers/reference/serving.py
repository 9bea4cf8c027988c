"""A serving loop without jumps, heaps and columns: a reference for `kvcore.serving`.

It is written to be obviously right, not fast. Every step is planned and run by itself, and a
decoding job generates one token in it. Of kvcore it shares the schedulers, the latency model,
the tiers, and the cache unless it is given a cache of its own; it has its own jobs, arrivals,
plans, clock, and estimates for schedulers.

A turn of the loop is a plan and a step:

    arrivals -> plan: (grow) admit (grow) -> step: clock, arrivals, commits, first tokens, ends

The states of a job, with the blocks that it holds:

    waiting --admit--> loading --loaded--> prefill ----------> decode ----------> done
       ^  none            prompt             prompt |  paused  | prompt and output  none
       |                                            v          v
       +----------------- recompute: none ----------+----------+

Under a `lag` a job that is done holds its slot and its blocks until the next plan is made.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore import EvictionPolicy, OutOfBlocks, Scheduler
from kvcore.models.cost import attended_pairs
from kvcore.request import SLO, Request
from kvcore.serving import LoopState, StepWork
from kvcore.serving.job import DECODE, DONE, LOADING, PAUSED, PREFILL, WAITING

PS = 1000
"""Picoseconds in a nanosecond."""

LONGEST = 4096
"""The most tokens yet to be generated that an admission counts for one request."""


@attrs.define(eq=False)
class Job:
    """A request between arrival and end, with the attributes that schedulers read."""

    request: Request
    serial: int
    arrival: int
    output_tokens: int
    target: int
    slo: SLO | None
    stage: str = WAITING
    seq: Any = None
    computed: int = 0
    generated: int = 0
    rank: Any = None
    data: Any = None
    admitted: int | None = None
    first_token: int | None = None
    finish: int = -1
    hit: int = 0
    loaded: int = 0
    pauses: int = 0
    recomputes: int = 0
    swaps: int = 0

    @property
    def prefill_left(self):
        """Tokens to compute before the next one is generated."""
        return self.target - self.computed

    @property
    def output_left(self):
        """Tokens to generate."""
        return self.output_tokens - self.generated

    @property
    def predicted_left(self):
        """Tokens to generate by the prediction of the request, at least 1 if there are any."""
        predicted = self.request.predicted_output_tokens
        if predicted is None:
            return self.output_left
        return max(predicted - self.generated, min(self.output_left, 1))

    @property
    def length(self):
        """Tokens with K/V: the newest token has none before the next step."""
        if self.prefill_left or not self.generated:
            return self.computed
        return self.request.prompt_tokens + self.generated - 1


@attrs.define
class Arrivals:
    """The requests of a workload by time of arrival, and the prefetches of their hints.

    A request that comes `after` another arrives its think time after the end of that one.
    Others are read up to the first that comes later than the next arrival by the longest
    prefetch hint so far: no server knows the whole workload in advance.
    """

    unread: list
    prefetches: bool
    coming: list = attrs.Factory(list)
    hinted: list = attrs.Factory(list)
    following: list = attrs.Factory(list)
    newest: int = 0
    longest: int = 0
    is_closed: bool = False

    def __attrs_post_init__(self):
        """Number the requests, and read the first."""
        self.unread = list(enumerate(self.unread))
        self.read()

    def read(self):
        """Read requests as far as they are known by now; with sessions, all of them."""
        while self.unread and (
            self.is_closed
            or not self.coming
            or self.newest < min(self.coming)[0] + self.longest
        ):
            index, request = self.unread.pop(0)
            self.is_closed = self.is_closed or request.session is not None
            if request.after is None:
                self.newest = request.arrival
                self.enter(request.arrival, index, request)
            else:
                self.following.append((index, request))

    def enter(self, arrival, index, request):
        """Schedule the arrival of a request, and its prefetch."""
        self.coming.append((arrival, index, request))
        early = request.hints.prefetch
        if self.prefetches and early is not None:
            self.longest = max(self.longest, early)
            self.hinted.append((arrival - early, index, arrival, request))

    def take(self):
        """Remove and return the next request, with its time of arrival."""
        first = min(self.coming)
        self.coming.remove(first)
        self.read()
        return first[0], first[2]

    def ended(self, request, now):
        """Schedule the requests that follow `request`, which has ended."""
        for index, follower in self.following:
            if follower.after == request.id:
                self.enter(now + follower.think_time, index, follower)


@attrs.define
class Estimates:
    """Hits and times of service, for schedulers: sums over single steps."""

    cache: Any
    latency: Any
    max_seqs: int

    def probe(self, request, now):
        """Return how many prompt tokens of `request` would hit."""
        return self.cache.probe(request, now) * self.cache.geometry.block_size

    def prefill_ns(self, tokens, context):
        """Return the ns of a step that computes `tokens` tokens after `context` alone."""
        work = step_work(self.latency.windows, [(context, tokens)], [])
        return self.latency.duration(work) // PS if tokens else 0

    def decode_ns(self, tokens, context, sequences):
        """Return the ns in which equal sequences generate `tokens` tokens each."""
        count, windows = min(sequences, self.max_seqs), self.latency.windows
        lengths = range(context + 1, context + tokens + 1)
        steps = [step_work(windows, [], [length] * count) for length in lengths]
        return sum(self.latency.duration(step) for step in steps) // PS


def step_work(windows, chunks, lengths):
    """Return the work of a step.

    `chunks` are the tokens before those that a prompt computes, and their number; `lengths`
    those of the sequences that generate a token, with that token.
    """
    return StepWork(
        sum(tokens for _, tokens in chunks),
        tuple(sum(attended_pairs(*chunk, window) for chunk in chunks) for window in windows),
        len(lengths),
        tuple(sum(min(length, window or length) for length in lengths) for window in windows),
    )


@attrs.define
class TokenShare:
    """The share of the future tokens of running jobs for which an admission leaves room.

    `value` held at decode step `since`; from then on it falls.
    """

    first: float
    value: float = attrs.Factory(lambda self: self.first, takes_self=True)
    since: int = 0

    def after(self, step):
        """Return the share after `step` decode steps."""
        lowest = self.first * 0.14
        fallen = max(step - self.since, 0) * (self.first - lowest) / 600
        return self.value if not fallen else max(self.value - fallen, lowest)

    def preempted(self, decoding, step):
        """Set the share by the jobs that go on decoding, after a preemption."""
        generated = sum(job.generated + 20 for job in decoding)
        self.value = min(1.0, generated / (sum(job.output_tokens for job in decoding) + 1))
        self.since = step + 1


class Server:
    """A server that serves requests one step at a time.

    `clock` and `busy` are picoseconds, all other times nanoseconds. `jobs` are those that have
    ended, in this order; `reasons` are those of the rejected ones.
    """

    def __init__(self, requests, cache, scheduler, latency, batching):
        self.cache, self.scheduler, self.latency = cache, scheduler, latency
        self.rules = batching
        self.size = cache.geometry.block_size
        self.tiers = cache.tiers
        self.mixed = batching.steps == "mixed"
        # K/V that comes from a tier needs all its blocks at once.
        self.by_chunk = batching.reserve != "prompt" and self.tiers is None
        self.watermark = batching.reserved_blocks(cache.pool.blocks)
        ratio = batching.new_token_ratio
        self.share = None if ratio is None else TokenShare(ratio)
        self.plans = type(scheduler).plan is not Scheduler.plan
        levels = () if self.tiers is None else self.tiers.levels
        policies = [cache.eviction, *(level.tree.eviction for level in levels)]
        self.policies = [each for each in policies if isinstance(each, EvictionPolicy)]
        self.estimates = Estimates(cache, latency, batching.max_seqs)
        scheduler.bind()
        scheduler.attach(self.estimates)
        self.arrivals = Arrivals(requests, prefetches=self.tiers is not None)
        self.clock = self.busy = self.steps = self.decode_steps = self.serial = 0
        self.waiting, self.running, self.paused, self.prefilling = [], [], [], []
        self.jobs, self.reasons = [], {}
        # Times at which priorities change by themselves, and at which loads from tiers end.
        self.timers, self.loads = [], []
        # A plan asks the scheduler only if something but the growth of jobs has happened.
        self.changed = True
        # Whether a job found no room for future tokens, and no running job has left since.
        self.is_full = False
        # The plan: (job, tokens) of the prompts that the step computes, the tokens that are
        # left, the chunks that are not published yet, and the jobs that have lost their blocks.
        self.chunks, self.budget, self.unpublished, self.victims = [], 0, [], []
        # Under a lag: arrivals of which the plan knows nothing, when the last step began, if
        # one has run since the last plan, and what it ended and filled.
        self.unseen, self.began, self.late, self.filled = [], None, [], []

    @property
    def now(self):
        """The time in ns."""
        return self.clock // PS

    @property
    def decoding(self):
        """The jobs that decode, in order of admission."""
        return sorted((job for job in self.running if job.stage == DECODE), key=admission)

    def run(self):
        """Serve all requests."""
        while self.turn() or self.wait():
            pass

    def turn(self):
        """Plan a step and run it; return False if there is nothing to do at this time."""
        now = self.now
        pins = self.cache.tree.pins
        if pins and pins.next_end <= now:
            pins.end(now)
            self.changed = True
        self.take_arrivals()
        # A step that is planned while another one runs knows what came before that began.
        known = now if self.began is None else self.began // PS
        while self.unseen and self.unseen[0].arrival <= known:
            self.queue(self.unseen.pop(0), now)
        self.plan(now)
        self.prefetch(now)
        runs = bool(self.chunks or self.decoding)
        caught_up = self.rules.lag and self.catch_up(now)
        if runs:
            self.step()
        return runs or caught_up

    def wait(self):
        """Move the clock to the next event; return False if there is none."""
        times = [time for time, *_ in (*self.arrivals.coming, *self.arrivals.hinted)]
        times += [time for time, *_ in (*self.loads, *(self.timers if self.waiting else ()))]
        times += [job.arrival for job in self.unseen]
        if times:
            self.clock = max(self.clock, min(times) * PS)
        assert times or not self.waiting, "the scheduler lets nothing run"
        return bool(times)

    # Arrivals and ends.

    def take_arrivals(self):
        """Queue or reject the requests that have arrived by now."""
        while self.arrivals.coming and min(self.arrivals.coming)[0] <= self.now:
            arrival, request = self.arrivals.take()
            self.serial += 1
            output, longest = request.output_tokens, self.rules.max_model_len
            if longest is not None:
                output = min(output, max(longest - request.prompt_tokens, 0))
            prompt, slo = request.prompt_tokens, request.slo
            job = Job(request, self.serial, arrival, output, prompt, slo)
            why = self.unfit(job)
            if why:
                job.stage, self.reasons[request.id] = DONE, why
                self.jobs.append(job)
                self.arrivals.ended(request, arrival)
            elif self.rules.lag:
                self.unseen.append(job)
            else:
                self.queue(job, arrival)

    def unfit(self, job):
        """Return a part of the reason why `job` can never be served; "" if it can be."""
        tokens = job.target + max(job.output_tokens - 1, 0)
        in_one = not self.rules.chunked and self.rules.unchunked == "wait"
        if not job.target:
            return "prompt is empty"
        if job.request.output_tokens and not job.output_tokens:
            return "max_model_len"
        if in_one and tokens > self.rules.max_tokens:
            return "in one step"
        return "the pool has" if self.blocks(tokens) > self.cache.pool.blocks else ""

    def end(self, job, now):
        """Record that `job` has its last token."""
        job.stage, job.finish = DONE, now
        self.jobs.append(job)
        if self.rules.lag:
            self.late.append(job)
        else:
            self.release(job, now)
            self.arrivals.ended(job.request, now)

    def release(self, job, now, *, complete=True):
        """Free the slot and the blocks of `job`, which has ended."""
        self.keep_generated(job, now, complete=complete)
        self.cache.close(job.seq, now)
        self.running.remove(job)
        self.is_full, self.changed = False, True
        self.scheduler.finished(job, now)

    def catch_up(self, now):
        """Under a lag, apply what the last step did; return True if that changes a plan."""
        for seq, length in self.filled:
            if seq.id in self.cache.sequences:
                self.cache.commit(seq, length - seq.computed, now)
                self.changed = True
        for job in sorted(self.late, key=admission):
            if job in self.running:
                self.release(job, now)
            self.arrivals.ended(job.request, now)
        caught_up = self.began is not None or bool(self.late)
        self.began, self.late, self.filled = None, [], []
        return caught_up

    # The queue.

    def queue(self, job, now, *, front=False):
        """Let `job` wait: behind the others, or in front of them after a preemption."""
        self.rank(job, now)
        for policy in self.policies:
            policy.on_queued(job.request, now, front=front)
        self.waiting.insert(0 if front else len(self.waiting), job)
        self.scheduler.queued(job, now)
        self.changed = True

    def rank(self, job, now):
        """Compute the rank of a waiting job, and when to do so again."""
        if not self.plans:
            job.rank = self.scheduler.priority(job, now)
            due = self.scheduler.changes_at(job, now)
            if due is not None:
                self.timers.append((due, job.serial, job))

    def dequeue(self, job, now):
        """Remove `job` from the queue."""
        self.waiting.remove(job)
        for policy in self.policies:
            policy.on_dequeued(job.request, now)

    def first_waiting(self):
        """Return the waiting job of the lowest rank; of equal ones first those with blocks."""
        key = lambda job: (job.rank, job.stage != PAUSED, job.serial)  # noqa: E731
        return min(self.waiting, key=key, default=None)

    # The plan of a step.

    def plan(self, now):
        """Allocate blocks for the next step, and fill `chunks`."""
        self.chunks, self.victims = [], []
        for timer in due(self.timers, now):
            if timer[2] in self.waiting:
                self.rank(timer[2], now)
                self.changed = True
        for _, _, job, load in due(self.loads, now):
            self.loaded(job, load, now)
        self.divide(now, admit=self.changed)
        # Jobs that the victims kept from being offered a slot are so after the next step.
        retry = bool(self.victims) and not self.rules.admit_after_preemption
        if self.victims and all(job.stage == LOADING for job in self.running):
            self.victims = []
            self.divide(now, admit=True)
        self.changed = retry

    def divide(self, now, *, admit):
        """Divide the next step among jobs that decode, prompts and waiting jobs.

        Where prefill goes first, a step decodes only if it computes no prompt.
        """
        if self.mixed:
            self.grow(now)
        if (admit or self.changed) and (self.prefilling or self.waiting):
            self.admit(now)
        if not self.mixed and not self.chunks:
            self.grow(now)

    def grow(self, now):
        """Give each job that decodes the slot of its next token; preempt until all have one."""
        while slotless := [job for job in self.decoding if job.seq.tokens == job.length]:
            full = [job for job in slotless if job.length % self.size == 0]
            fits = self.has_room(len(full), now)
            if fits:
                served = slotless
            else:
                served = full[: self.cache.available_blocks] if self.by_chunk else []
            for job in served:
                self.cache.extend(job.seq, 1, now)
            if not fits:
                self.preempt(self.shortest() or self.last(now), now)

    def admit(self, now):
        """Divide the tokens of the next step among prompts and waiting jobs.

        Prompts that have begun go first. With a preemptive scheduler the two are merged.
        """
        ongoing = list(self.prefilling)
        merged = self.scheduler.preemptive
        if merged:
            ongoing.sort(key=lambda job: (self.scheduler.priority(job, now), job.serial))
        offers = self.offers(now)
        self.budget = self.rules.max_tokens - (len(self.decoding) if self.mixed else 0)
        self.unpublished = []
        while self.budget > 0:
            if ongoing and not (merged and self.goes_before(ongoing[0], now)):
                job = ongoing.pop(0)
                if job.stage == PREFILL:
                    self.allot(job, now)
                continue
            self.publish(now)
            may_admit = self.rules.admit_after_preemption or not self.victims
            job = next(offers, None) if may_admit else None
            if job is not None and self.start(job, now):
                self.allot(job, now)
            elif ongoing:
                offers, merged = iter(()), False
            else:
                break
        self.publish(now)

    def offers(self, now):
        """Yield waiting jobs in the order in which they are offered a slot."""
        if not self.plans:
            return iter(self.first_waiting, None)
        slots = self.rules.max_seqs - len(self.running)
        available = self.cache.available_blocks
        plan = self.scheduler.plan(
            LoopState(now, self.waiting, list(self.running), slots, available, self.estimates)
        )
        for job in plan.pause:
            if job.stage not in (LOADING, DONE):
                self.pause(job, now)
        return (job for job in plan.admit if job.stage != LOADING)

    def goes_before(self, ongoing, now):
        """Return True if the first waiting job goes before a prompt that has begun."""
        if self.plans or not self.waiting:
            return False
        return self.first_waiting().rank < self.scheduler.priority(ongoing, now)

    def allot(self, job, now):
        """Give `job` its tokens of the next step, and their blocks."""
        if job.stage == DECODE:  # it was paused, and goes on
            self.budget -= self.mixed
        if job.stage != PREFILL:
            return
        tokens, limit = job.prefill_left, self.chunk_limit()
        if tokens > limit and self.rules.chunked:
            tokens = limit
        elif tokens > limit and self.chunks:
            self.budget = 0
            return
        if self.by_chunk and not self.take_blocks(job, job.computed + tokens, now):
            return
        self.chunks.append((job, tokens))
        self.unpublished.append((job, tokens))
        self.budget -= tokens

    def chunk_limit(self):
        """Return the most tokens of one prompt in the step that is planned."""
        limit = self.rules.max_chunk
        if limit is None or len(self.running) + len(self.waiting) <= 1:
            return self.budget
        return min(limit, self.budget)

    def publish(self, now):
        """Share the blocks that the step will compute, if they count from the plan on."""
        for job, tokens in self.unpublished:
            if self.rules.commit == "scheduled":
                self.cache.publish(job.seq, tokens, now)
        self.unpublished = []

    # Admission.

    def start(self, job, now):
        """Return True if the waiting `job` runs from now on: with a slot, and with blocks."""
        if self.is_full or job in self.victims:
            return False
        if not (self.rules.chunked or self.fits_in_one(job, now)):
            return False
        if len(self.running) >= self.rules.max_seqs:
            last = self.behind(job, now)
            if last is None or not self.could_start(job, now):
                return False
            self.pause(last, now)
        while not (self.resume(job, now) if job.stage == PAUSED else self.open(job, now)):
            # If nothing runs, no other event frees the blocks of paused jobs.
            if self.running or not self.paused or self.last(now) is job:
                return False
            self.preempt(self.last(now), now)
        self.dequeue(job, now)
        self.running.append(job)
        self.scheduler.admitted(job, now)
        return True

    def fits_in_one(self, job, now):
        """Return True if a prompt that is not chunked may be computed in this step."""
        alone = self.rules.unchunked == "alone" and not self.chunks
        hit = self.cache.match(job.request, now, job.target).blocks * self.size
        return alone or job.stage == PAUSED or job.target - hit <= self.budget

    def behind(self, job, now):
        """Return the last of the running jobs that go after `job`, which may take its slot."""
        if self.plans or not self.scheduler.preemptive:
            return None
        running = [other for other in self.running if other.stage not in (LOADING, DONE)]
        ranks = {other: self.scheduler.priority(other, now) for other in running}
        after = [other for other in running if job.rank < ranks[other]]
        return max(after, key=lambda other: (ranks[other], other.serial), default=None)

    def could_start(self, job, now):
        """Return True if there are blocks for `job`, whose slot another one would lose."""
        if job.stage == PAUSED:
            return self.missing(job) <= self.cache.available_blocks
        return self.fits(job, job.target, self.watermark, now)

    def fits(self, job, tokens, reserve, now):
        """Return True if `job` can get blocks for `tokens` tokens, and `reserve` are left."""
        match = self.cache.match(job.request, now, job.target)
        available = self.cache.available_blocks - match.unpinned_blocks
        return self.blocks(tokens) - match.blocks + reserve <= available

    def open(self, job, now):
        """Return True if `job` gets the blocks that its admission takes, and begins."""
        reserve = self.watermark if self.running or self.paused else 0
        reserve = max(reserve, self.headroom(job))
        hit = self.cache.match(job.request, now, job.target).blocks * self.size
        first = job.target - hit
        if self.by_chunk:
            first = min(first, self.chunk_limit())
        needed = hit + first if self.rules.reserve == "first-chunk" else job.target
        # Alone, a request fits in any case, and the cache ends the pins of clients for it.
        is_alone = not self.cache.sequences
        try:
            if not is_alone and not self.fits(job, needed, reserve, now):
                raise OutOfBlocks(job.request.id)
            resumed, target = job.admitted is not None, job.target
            seq = self.cache.open(job.request, first, now, resumed=resumed, target=target)
        except OutOfBlocks:
            self.is_full = self.share is not None and bool(self.running)
            return False
        job.seq, job.computed = seq, seq.computed
        if not resumed:
            job.admitted, job.hit = now, seq.computed
        load = None
        if self.tiers is not None:
            prefill_ns = self.estimates.prefill_ns
            load = self.tiers.load(seq, now, prefill_ns, resumed=resumed)
        if load is None:
            self.begin_prefill(job)
        elif load.ready > now:
            job.stage = LOADING
            self.loads.append((load.ready, job.serial, job, load))
        else:
            self.loaded(job, load, now)
        return True

    def begin_prefill(self, job):
        """Compute the prompt of `job` from the next step on."""
        job.stage = PREFILL
        self.prefilling.append(job)

    def headroom(self, job):
        """Return how many blocks are left for tokens that are not generated yet."""
        if self.share is None:
            return 0
        if not (self.running or self.paused):
            self.share.value, self.share.since = self.share.first, self.decode_steps
            return 0
        ends = [other for other, chunk in self.chunks if other.prefill_left == chunk]
        certain = sum(min(other.predicted_left, LONGEST) for other in [job, *ends])
        certain += self.size * (1 + len(self.chunks))
        likely = sum(min(other.predicted_left, LONGEST) for other in self.decoding)
        return self.blocks(int(certain + likely * self.share.after(self.decode_steps)) + 1)

    def missing(self, job):
        """Return how many blocks a paused `job` needs to go on in this step."""
        if job.prefill_left or not self.mixed:
            return 0
        return self.blocks(job.length + 1) - self.blocks(job.seq.tokens)

    def resume(self, job, now):
        """Return True if the paused `job` goes on, with the slot of its next token."""
        if not self.has_room(self.missing(job), now):
            return False
        self.paused.remove(job)
        if job.prefill_left:
            self.begin_prefill(job)
            return True
        if self.mixed:
            self.cache.extend(job.seq, job.length + 1 - job.seq.tokens, now)
        job.stage = DECODE
        return True

    # Blocks.

    def blocks(self, tokens):
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.size)

    def has_room(self, blocks, now):
        """Return True if as many blocks are free or evictable, or pins of clients end."""
        return blocks <= self.cache.available_blocks or self.cache.make_room(blocks, now)

    def take_blocks(self, job, tokens, now):
        """Preempt until `job` has blocks for its first `tokens` tokens.

        Return False if `job` was itself the last in order, and has lost its blocks.
        """
        while not self.has_room(self.blocks(tokens) - self.blocks(job.seq.tokens), now):
            last = self.last(now)
            self.preempt(last, now)
            if last is job:
                return False
        self.cache.extend(job.seq, max(tokens - job.seq.tokens, 0), now)
        return True

    def keep_generated(self, job, now, *, complete):
        """Cache the full blocks of generated tokens, if the rules keep them.

        If it is not `complete`, the newest token is not known yet.
        """
        if self.rules.generated == "cached":
            tokens = job.length if complete else max(job.length - 1, job.computed)
            self.cache.keep_generated(job.seq, tokens, now)

    # Preemption.

    def last(self, now):
        """Return the job with blocks that is last in order."""
        jobs = [job for job in (*self.running, *self.paused) if job.stage != LOADING]
        tie = admission if self.rules.ties == "last" else lambda job: job.arrival
        return max(jobs, key=lambda job: (self.scheduler.priority(job, now), tie(job)))

    def shortest(self):
        """Return the decoding job that has generated least, if the rules preempt that."""
        if self.rules.preempts == "last":
            return None
        return max(
            self.decoding,
            key=lambda job: (-job.generated, job.request.prompt_tokens, admission(job)),
            default=None,
        )

    def leave(self, job):
        """Take `job` out of the step that is planned, and out of its slot."""
        if job.stage == PREFILL:
            self.prefilling.remove(job)
        self.chunks = [chunk for chunk in self.chunks if chunk[0] is not job]
        self.unpublished = [chunk for chunk in self.unpublished if chunk[0] is not job]
        self.running.remove(job)
        self.is_full = False

    def pause(self, job, now):
        """Take the slot of `job`; it keeps its blocks."""
        self.leave(job)
        job.stage = PAUSED
        job.pauses += 1
        self.paused.append(job)
        self.queue(job, now, front=True)

    def preempt(self, job, now):
        """Take the blocks of `job`; a tier keeps them if that is faster than computing them."""
        self.victims.append(job)
        if job.stage == DONE:
            self.release(job, now, complete=False)
            return
        was_paused = job.stage == PAUSED
        if was_paused:
            self.paused.remove(job)
            self.dequeue(job, now)
        else:
            # Its tokens of the step go to jobs that are planned after it.
            self.budget += self.mixed if job.stage == DECODE else 0
            self.budget += sum(tokens for other, tokens in self.chunks if other is job)
            self.leave(job)
        tokens, level = job.length, None
        if self.tiers is not None:
            prefill_ns = self.estimates.prefill_ns
            level = self.tiers.can_swap(job.seq, tokens, now, prefill_ns)
        if level is not None:
            job.swaps += 1
            level.park(job.seq, tokens, now)
        else:
            job.recomputes += 1
            if not was_paused and self.rules.preempts == "last":
                has_slot = job.seq.tokens > job.length
                self.keep_generated(job, now, complete=has_slot or not self.rules.lag)
        self.cache.close(job.seq, now, preempted=True)
        job.seq, job.stage = None, WAITING
        job.target, job.computed = job.request.prompt_tokens + job.generated, 0
        self.queue(job, now, front=True)
        if self.share is not None:
            self.share.preempted(self.decoding, self.decode_steps)

    # Tiers.

    def prefetch(self, now):
        """Load blocks of the requests whose hints are due, unless they have arrived."""
        for _, _, arrival, request in due(self.arrivals.hinted, now):
            if arrival > now:
                prefill_ns = self.estimates.prefill_ns
                load = self.tiers.prefetch(request, now, arrival, prefill_ns, self.watermark)
                if load is not None:
                    self.loads.append((load.ready, -load.seq.id, None, load))

    def loaded(self, job, load, now):
        """Go on with the rest of a prompt whose blocks are loaded; None: it was a prefetch."""
        computed = self.tiers.finish(load, now)
        self.changed = True
        if job is not None:
            if not load.resumed:
                job.loaded = computed - job.computed
            job.computed = computed
            self.begin_prefill(job)

    # The step.

    def step(self):
        """Run the step that is planned."""
        chunks, decoding = self.chunks, self.decoding if self.mixed or not self.chunks else []
        parts = [(job.computed, tokens) for job, tokens in chunks]
        lengths = [job.length + 1 for job in decoding]
        took = self.latency.duration(step_work(self.latency.windows, parts, lengths))
        for job in decoding:
            job.generated += 1
        self.began = self.clock
        self.clock += took
        self.busy += took
        self.steps += 1
        self.decode_steps += bool(decoding)
        self.take_arrivals()
        now, done = self.now, []
        for job, tokens in chunks:
            job.computed += tokens
            self.cache.commit(job.seq, tokens, now)
            self.changed = True
        self.commit_generated(decoding, now)
        for job, _ in chunks:
            if not job.prefill_left:
                self.prefilling.remove(job)
                if self.generate_first(job, now):
                    done.append(job)
        done += [job for job in decoding if not job.output_left]
        for job in sorted(done, key=admission):
            self.end(job, now)

    def commit_generated(self, decoding, now):
        """Commit the generated blocks with keys that the step has filled."""
        for job in decoding:
            if job.request.output_keys and job.length % self.size == 0:
                if self.rules.lag:
                    self.filled.append((job.seq, job.length))
                else:
                    self.cache.commit(job.seq, job.length - job.seq.computed, now)
                    self.changed = True

    def generate_first(self, job, now):
        """Generate the token after a prefill; return True if `job` has all its tokens."""
        if not job.output_tokens:
            return True
        if job.first_token is None:
            job.first_token = now
        job.generated += 1
        job.stage = DECODE
        return not job.output_left


def admission(job):
    """Return the serial number of the admission of `job`."""
    return job.seq.admission


def due(events, now):
    """Remove the events up to `now` from a list, and return them by time."""
    taken = sorted(event for event in events if event[0] <= now)
    events[:] = [event for event in events if event[0] > now]
    return taken
