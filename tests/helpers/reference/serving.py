"""A serving loop without jumps, heaps and columns: a reference for `kvcore.serving`.

It is written to be obviously right, not fast: every step is planned and run by itself, and a
decoding job generates one token in it. It has its own jobs, arrivals, plans, block counts,
clock and estimates. Of kvcore it calls schedulers, latency models, tiers, a cache, which may be
the `ServingCache` beside this file, and the methods of `Rules`, whose decisions kvcore's loop
makes by itself unless they are overridden.

    arrivals -> plan: grow, admit -> step: clock, arrivals, commits, first tokens, ends

The stages of a job:

    waiting --admission--> (loading) --> prefill --> decode --> done
       ^                                  |   ^       |   ^
       |                                  v   |       v   |
       +-------- recompute or swap <----- paused     paused      (blocks kept)

Under a `lag` a job that is done keeps its slot and its blocks until the next step is planned.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import attrs

from kvcore import EvictionPolicy, OutOfBlocks, PolicyError, Scheduler
from kvcore.models.cost import attended_pairs
from kvcore.request import SLO, Request
from kvcore.serving import LoopState, StepWork
from kvcore.serving.job import DECODE, DONE, LOADING, PAUSED, PREFILL, WAITING
from kvcore.serving.rules import StepState

PS = 1000  # picoseconds in a nanosecond


@attrs.define(eq=False)
class Job:
    """A request between arrival and end, with the attributes that schedulers read."""

    request: Request
    serial: int
    arrival: int
    target: int
    output_tokens: int
    slo: SLO | None
    stage: str = WAITING
    seq: Any = None
    computed: int = 0
    generated: int = 0
    rank: Any = None
    data: Any = None
    admitted: int | None = None
    first_token: int | None = None
    last_token: int = 0
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
        """Tokens with K/V: the newest one gets it in the next step."""
        if self.prefill_left or not self.generated:
            return self.computed
        return self.request.prompt_tokens + self.generated - 1


class Arrivals:
    """The requests of a workload by time of arrival, and the prefetches of their hints.

    Of requests that follow no other, those are known that arrive within the longest prefetch
    hint so far after the next arrival, and one more; in a workload with sessions, all.
    """

    def __init__(self, requests, *, prefetches):
        self.unread, self.prefetches = list(enumerate(requests)), prefetches
        # (arrival, index, request), and (time of the prefetch, index, arrival, request).
        self.coming, self.hinted, self.following = [], [], []
        self.newest = self.longest = 0
        self.has_sessions = False
        self.read()

    def read(self):
        """Read the requests that are known by now."""
        while self.unread and (
            self.has_sessions
            or not self.coming
            or self.newest < min(self.coming)[0] + self.longest
        ):
            index, request = self.unread.pop(0)
            self.has_sessions |= request.session is not None
            if request.after is not None:
                self.following.append((index, request))
                continue
            self.newest = request.arrival
            self.enter(request.arrival, index, request)

    def enter(self, arrival, index, request):
        """Schedule an arrival, and the prefetch before it."""
        self.coming.append((arrival, index, request))
        early = request.hints.prefetch
        if self.prefetches and early is not None:
            self.longest = max(self.longest, early)
            self.hinted.append((arrival - early, index, arrival, request))

    def take(self, now):
        """Remove the next request up to `now`; return its arrival and it, or None."""
        first = min(self.coming, default=None)
        if first is None or first[0] > now:
            return None
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
        return self.step_ps([(context, tokens)], []) // PS if tokens else 0

    def decode_ns(self, tokens, context, sequences):
        """Return the ns in which equal sequences generate `tokens` tokens each."""
        count = min(sequences, self.max_seqs)
        lengths = range(context + 1, context + tokens + 1)
        return sum(self.step_ps([], [length] * count) for length in lengths) // PS

    def step_ps(self, chunks, lengths):
        """Return how long a step takes.

        `chunks` are (tokens before it, tokens) of each prompt part; `lengths` those of the
        sequences that decode, the new token included.
        """
        windows = self.latency.windows
        pairs = [sum(attended_pairs(*chunk, window) for chunk in chunks) for window in windows]
        context = [sum(min(n, window or n) for n in lengths) for window in windows]
        prefill = sum(tokens for _, tokens in chunks)
        work = StepWork(prefill, tuple(pairs), len(lengths), tuple(context))
        return self.latency.duration(work)


class TokenShare:
    """The share of the future tokens of running jobs for which an admission leaves room.

    It had `value` up to decode step `since`, and falls from then on.
    """

    def __init__(self, first):
        self.first = self.value = first
        self.since = 0

    def after(self, step):
        """Return the share after `step` decode steps."""
        lowest = self.first * 0.14
        if step <= self.since:
            return self.value
        return max(self.value - (step - self.since) * (self.first - lowest) / 600, lowest)

    def preempted(self, decoding, step):
        """Set the share by what the jobs that go on have generated."""
        generated = sum(job.generated + 20 for job in decoding)
        self.value = min(1.0, generated / (sum(job.output_tokens for job in decoding) + 1))
        self.since = step + 1


class Server:
    """Serves requests one step at a time.

    `clock` and `busy` are picoseconds, all other times nanoseconds. `jobs` are those that have
    ended, in this order; `reasons` are those of the rejected ones, by id.
    """

    def __init__(self, requests, cache, scheduler, latency, batching):
        self.cache, self.scheduler = cache, scheduler
        self.limits, self.rules = batching, batching.rules
        self.tiers, self.size = cache.tiers, cache.geometry.block_size
        self.mixed = batching.steps == "mixed"
        # K/V that comes from a tier needs all its blocks at once.
        self.by_chunk = self.rules.reserve != "prompt" and self.tiers is None
        self.watermark = batching.reserved_blocks(cache.pool.blocks)
        ratio = self.rules.new_token_ratio
        self.share = None if ratio is None else TokenShare(ratio)
        self.has_plan = type(scheduler).plan is not Scheduler.plan
        levels = () if self.tiers is None else self.tiers.levels
        policies = [cache.eviction, *(level.tree.eviction for level in levels)]
        # Whether a plan shares the generated blocks with keys that its step fills; and those
        # without keys too, for policies that go by the order in which blocks are inserted.
        self.plans_output = (
            self.rules.commit == "scheduled"
            and self.mixed
            and not (scheduler.preemptive or self.has_plan)
        )
        ordered = type(cache.eviction).on_insert is not EvictionPolicy.on_insert
        keeps = self.rules.generated == "cached"
        self.names_output = self.plans_output and ordered and keeps
        self.policies = [policy for policy in policies if isinstance(policy, EvictionPolicy)]
        self.estimates = Estimates(cache, latency, batching.max_seqs)
        scheduler.bind()
        scheduler.attach(self.estimates)
        self.arrivals = Arrivals(requests, prefetches=self.tiers is not None)
        self.clock = self.busy = self.steps = self.decode_steps = self.serial = 0
        self.waiting, self.running, self.paused, self.prefilling = [], [], [], []
        self.jobs, self.reasons = [], {}
        # (ns, serial, job) of priorities that change by themselves, and of loads from tiers.
        self.timers, self.loads = [], []
        # The times between two tokens of a request, ps.
        self.gaps = []
        # Jobs are offered slots only if something but growth has happened since the last plan.
        self.changed = True
        # Preemptions since the last token: many are a livelock.
        self.fruitless = 0
        # Whether a job found no room for future tokens, and no running one has left since.
        self.is_full = False
        # The plan: (job, tokens) of prompts in the step, and which of these are to be
        # published; the tokens that the step has left; the jobs that have lost their blocks.
        self.chunks, self.unpublished, self.budget, self.victims = [], [], 0, []
        # Whether the rules let the step admit no job any more; whether pins of clients have
        # ended since jobs were offered slots.
        self.refuses = self.pins_ended = False
        # Under a lag, what the next plan does not know: arrivals, ends and full blocks. When
        # the last step began (ps); None if none has run since the last plan.
        self.unseen, self.late, self.filled, self.began = [], [], [], None

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
        """Plan a step and run it; return False if nothing can happen at this time."""
        pins = self.cache.tree.pins
        if pins and pins.next_end <= self.now:
            pins.end(self.now)
            self.changed = True
        self.take_arrivals()
        known = self.now if self.began is None else self.began // PS
        while self.unseen and self.unseen[0].arrival <= known:
            self.queue(self.unseen.pop(0), self.now)
        self.plan()
        self.prefetch()
        runs = bool(self.chunks or self.decoding)
        caught_up = self.rules.lag and self.catch_up()
        if runs:
            self.step()
        return runs or caught_up

    def wait(self):
        """Move the clock to the next event; return False if there is none."""
        events = [*self.arrivals.coming, *self.arrivals.hinted, *self.loads]
        times = [time for time, *_ in events + (self.timers if self.waiting else [])]
        times += [job.arrival for job in self.unseen]
        assert times or not self.waiting, "the scheduler lets nothing run"
        self.clock = max(self.clock, min(times, default=0) * PS)
        return bool(times)

    # Arrivals and ends.

    def take_arrivals(self):
        """Queue or reject the requests that have arrived."""
        while (taken := self.arrivals.take(self.now)) is not None:
            arrival, request = taken
            self.serial += 1
            prompt, output = request.prompt_tokens, request.output_tokens
            longest = self.limits.max_model_len or prompt + output
            output = min(output, max(longest - prompt, 0))
            job = Job(request, self.serial, arrival, prompt, output, request.slo)
            why = self.unfit(job)
            if why:
                self.reasons[request.id] = why
                self.jobs.append(job)
                self.arrivals.ended(request, arrival)
            elif self.rules.lag:
                self.unseen.append(job)
            else:
                self.queue(job, arrival)

    def unfit(self, job):
        """Return some words of why `job` can never be served; "" if it can be."""
        tokens = job.target + max(job.output_tokens - 1, 0)
        in_one = not self.limits.chunked and self.rules.unchunked == "wait"
        if not job.target:
            return "prompt is empty"
        longest = self.limits.max_model_len
        if longest and job.target + bool(job.request.output_tokens) > longest:
            return "max_model_len"
        if in_one and tokens > self.limits.max_tokens:
            return "in one step"
        return "the pool has" if self.blocks(tokens) > self.cache.pool.blocks else ""

    def end(self, job):
        """Record that `job` has its last token."""
        job.stage, job.finish = DONE, self.now
        self.jobs.append(job)
        if self.rules.lag:
            self.late.append(job)
        else:
            self.release(job)
            self.arrivals.ended(job.request, self.now)

    def release(self, job, *, complete=True):
        """Free the slot and the blocks of `job`, which is done."""
        self.keep_generated(job, complete=complete)
        self.cache.close(job.seq, self.now)
        self.running.remove(job)
        self.is_full, self.changed = False, True
        self.scheduler.finished(job, self.now)

    def catch_up(self):
        """Under a lag, apply what the last step did; return True if a plan may differ now."""
        for seq, length in self.filled:
            if seq.id in self.cache.sequences:
                self.cache.commit(seq, length - seq.computed, self.now)
                self.changed = True
        for job in sorted(self.late, key=admission):
            if job in self.running:
                self.release(job)
            self.arrivals.ended(job.request, self.now)
        caught_up = self.began is not None or bool(self.late)
        self.late, self.filled, self.began = [], [], None
        return caught_up

    # The queue.

    def queue(self, job, now, *, front=False):
        """Add `job` to the waiting ones: behind them, or in front after a preemption."""
        self.rank(job, now)
        for policy in self.policies:
            policy.on_queued(job.request, now, front=front)
        self.waiting.insert(0 if front else len(self.waiting), job)
        self.scheduler.queued(job, now)
        self.changed = True

    def rank(self, job, now):
        """Set the rank of a waiting job, and when to do so again."""
        if self.has_plan:
            return
        job.rank = self.scheduler.priority(job, now)
        due = self.scheduler.changes_at(job, now)
        if due is not None:
            self.timers.append((due, job.serial, job))

    def dequeue(self, job):
        """Remove `job` from the waiting ones."""
        self.waiting.remove(job)
        for policy in self.policies:
            policy.on_dequeued(job.request, self.now)

    def head(self):
        """Return the waiting job of the lowest rank; of equal ones first those with blocks."""
        order = {job: (job.rank, job.stage != PAUSED, job.serial) for job in self.waiting}
        return min(order, key=order.get, default=None)

    # The plan of a step.

    def plan(self):
        """Allocate blocks for the next step, and fill `chunks` with its prompts."""
        self.chunks, self.victims = [], []
        for _, _, job in take_due(self.timers, self.now):
            if job in self.waiting:
                self.rank(job, self.now)
                self.changed = True
        for _, _, job, load in take_due(self.loads, self.now):
            self.loaded(job, load)
        self.divide()
        # Jobs that were not offered a slot because of the victims are after the next step.
        retry = self.refuses or not self.rules.admit_after_preemption
        retry = bool(self.victims) and retry
        if self.victims and all(job.stage == LOADING for job in self.running):
            self.victims, self.changed = [], True
            self.divide()
        self.changed = retry

    def divide(self):
        """Divide the step: among decoding jobs, prompts that have begun, and waiting jobs.

        Where prefill goes first, a step decodes only if it computes no prompt.
        """
        if self.mixed:
            self.grow()
        # Where pins of clients have ended for a running job, waiting ones may fit as well.
        self.changed |= self.pins_ended
        self.pins_ended = False
        if self.plans_output:
            self.fill_output()
        if self.changed and (self.prefilling or self.waiting):
            self.admit()
        self.publish()
        if not (self.mixed or self.chunks):
            self.grow()

    def fill_output(self):
        """Plan to share the generated blocks that the step fills.

        Under a lag these are the blocks that the step before it fills.
        """
        for job in self.decoding:
            length = job.length + 1 - self.rules.lag
            if not (self.names_output or job.request.output_keys) or length % self.size:
                continue
            self.changed = True
            if self.rules.lag:
                self.share_blocks(job, length - job.seq.computed)
            else:
                self.cache.commit(job.seq, job.length - job.seq.computed, self.now)
                self.unpublished.append((job, 1))

    def grow(self):
        """Allocate the slots of the tokens that decoding jobs compute; preempt for them."""
        while slotless := [job for job in self.decoding if job.seq.tokens == job.length]:
            full = [job for job in slotless if job.length % self.size == 0]
            pinned = len(full) > self.cache.available_blocks
            if self.has_room(len(full)):
                self.pins_ended |= pinned
                for job in slotless:
                    self.extend(job)
                return
            if self.by_chunk:
                for job in full[: self.cache.available_blocks]:
                    self.extend(job)
            self.preempt(self.victim(None))

    def extend(self, job):
        """Allocate the slot of the next token of `job`.

        Under a lag its last block is full now, and shared before other jobs get blocks.
        """
        self.cache.extend(job.seq, 1, self.now)
        if self.names_output and self.rules.lag and job.length % self.size == 0:
            self.share_blocks(job, job.length - job.seq.computed)

    def admit(self):
        """Divide the tokens of the step among prompts that have begun, and waiting jobs.

        The former go first; with a preemptive scheduler, in the order of all of them.
        """
        ongoing, merges = list(self.prefilling), self.scheduler.preemptive
        if merges:
            ongoing.sort(key=lambda job: (self.priority(job), job.serial))
        offers, self.refuses = self.offers(), False
        self.budget = self.limits.max_tokens - (len(self.decoding) if self.mixed else 0)
        while self.budget > 0:
            if ongoing and not (merges and self.head_goes_before(ongoing[0])):
                job = ongoing.pop(0)
                if job.stage == PREFILL:
                    self.allot(job)
                continue
            if not ongoing:
                self.publish()
            job = next(offers, None)
            self.refuses = job is not None and self.headroom(job, self.victims) is None
            if job is not None and not self.refuses and self.start(job):
                self.allot(job)
            elif ongoing:
                offers, merges = iter(()), False
            else:
                break
        self.publish()

    def offers(self):
        """Yield waiting jobs, in the order in which they are offered a slot."""
        if not self.has_plan:
            return iter(self.head, None)
        slots = self.limits.max_seqs - len(self.running)
        blocks, running = self.cache.available_blocks, list(self.running)
        state = LoopState(self.now, self.waiting, running, slots, blocks, self.estimates)
        plan = self.scheduler.plan(state)
        unpaused = [job for job in plan.pause if job.stage in (LOADING, DONE)]
        for job in plan.pause:
            if job not in unpaused:
                self.pause(job)
        return (job for job in plan.admit if job not in unpaused)

    def head_goes_before(self, job):
        """Return True if a waiting job goes before `job`, whose prompt has begun."""
        head = None if self.has_plan else self.head()
        return head is not None and head.rank < self.priority(job)

    def allot(self, job):
        """Give `job` its tokens of the step, and under some rules the blocks for them."""
        if job.stage == DECODE:
            self.budget -= self.mixed
        if job.stage != PREFILL:
            return
        tokens = self.rules.chunk_tokens(job, job.prefill_left, self.state())
        if not tokens:
            self.budget = 0
        elif self.take_blocks(job, job.computed + tokens):
            if self.rules.shares_scheduled(job, self.state()):
                self.unpublished.append((job, tokens))
            self.chunks.append((job, tokens))
            self.budget -= tokens

    def publish(self):
        """Share the blocks of the planned chunks that can be hit before they are computed."""
        for job, tokens in self.unpublished:
            self.share_blocks(job, tokens)
        self.unpublished = []

    def share_blocks(self, job, tokens):
        """Share the blocks that the next `tokens` tokens of `job` fill."""
        self.cache.publish(job.seq, tokens, self.now)
        keeps = self.rules.keeps_generated
        if self.names_output and keeps(job, self.state(), preempted=False):
            self.cache.keep_generated(job.seq, job.seq.computed + tokens, self.now)

    def state(self, preempted=None):
        """Return the step that is planned, for the rules."""
        return StepState(
            *(self.now, self.limits.max_tokens, self.limits.max_seqs, self.limits.chunked),
            *(self.size, self.cache.pool.blocks, self.cache.available_blocks, self.watermark),
            *(self.running, self.paused, len(self.waiting), len(self.decoding), self.chunks),
            *(self.budget, self.victims if preempted is None else preempted),
            None if self.share is None else self.share.after(self.decode_steps),
            self.priority,
        )

    # Admission.

    def start(self, job):
        """Return True if the waiting `job` gets a slot and blocks, and runs."""
        if self.is_full or job in self.victims:
            return False
        if job.stage != PAUSED and not self.first_chunk(job):
            return False
        if len(self.running) >= self.limits.max_seqs:
            last = self.last_behind(job)
            if last is None or not self.has_blocks_for(job):
                return False
            self.pause(last)
        while not (self.resume(job) if job.stage == PAUSED else self.open(job)):
            # While nothing runs, nothing else frees the blocks of paused jobs.
            victim = None if self.running or not self.paused else self.victim(job)
            if victim in (None, job):
                return False
            self.preempt(victim)
        self.dequeue(job)
        self.running.append(job)
        self.scheduler.admitted(job, self.now)
        return True

    def first_chunk(self, job):
        """Return how many tokens of `job` the step computes if it is admitted."""
        return self.rules.chunk_tokens(job, job.target - self.hit(job), self.state())

    def last_behind(self, job):
        """Return the last of the running jobs that go after `job`; None: it pauses none."""
        if self.has_plan or not self.scheduler.preemptive:
            return None
        running = [other for other in self.running if other.stage not in (LOADING, DONE)]
        order = {other: (self.priority(other), other.serial) for other in running}
        behind = [other for other in running if job.rank < order[other][0]]
        return max(behind, key=order.get, default=None)

    def has_blocks_for(self, job):
        """Return True if there are blocks for `job` beside those of all running jobs."""
        if job.stage == PAUSED:
            return self.missing_blocks(job) <= self.cache.available_blocks
        return self.fits(job, job.target, self.watermark)

    def fits(self, job, tokens, reserve):
        """Return True if there are blocks for `tokens` tokens of `job`, and `reserve` more."""
        match = self.cache.match(job.request, self.now, job.target)
        available = self.cache.available_blocks - match.unpinned_blocks
        return self.blocks(tokens) - match.blocks + reserve <= available

    def open(self, job):
        """Return True if `job` gets the blocks that its admission takes, and prefills."""
        reserve = self.headroom(job, ())
        if reserve is None:
            return False
        takes, tokens = self.rules.reserved(job, self.state()), job.target - self.hit(job)
        if takes != "prompt" and self.tiers is None:
            tokens = min(self.first_chunk(job), self.budget)
        needed = self.hit(job) + tokens if takes == "first-chunk" else job.target
        resumed, seq = job.admitted is not None, None
        # Alone it fits in any case: the cache ends pins of clients for it.
        if not self.cache.sequences or self.fits(job, needed, reserve):
            with suppress(OutOfBlocks):
                options = {"resumed": resumed, "target": job.target}
                seq = self.cache.open(job.request, tokens, self.now, **options)
        if seq is None:
            self.is_full = self.share is not None and bool(self.running)
            return False
        job.seq, job.computed = seq, seq.computed
        if not resumed:
            job.admitted, job.hit = self.now, seq.computed
        load, prefill_ns = None, self.estimates.prefill_ns
        if self.tiers is not None:
            load = self.tiers.load(seq, self.now, prefill_ns, resumed=resumed)
        if load is None:
            self.prefill(job)
        elif load.ready > self.now:
            job.stage = LOADING
            self.loads.append((load.ready, job.serial, job, load))
        else:
            self.loaded(job, load)
        return True

    def headroom(self, job, preempted):
        """Return how many blocks are left beside `job`; None: the step admits no job."""
        if not (self.running or self.paused):
            if self.share is not None:
                self.share.value, self.share.since = self.share.first, self.decode_steps
            if not preempted:
                return 0
        return self.rules.headroom(job, self.state(preempted))

    def resume(self, job):
        """Return True if the paused `job` goes on, with a block for its next token."""
        if not self.has_room(self.missing_blocks(job)):
            return False
        self.paused.remove(job)
        if job.prefill_left:
            self.prefill(job)
            return True
        job.stage = DECODE
        if self.mixed:
            self.cache.extend(job.seq, job.length + 1 - job.seq.tokens, self.now)
        return True

    def missing_blocks(self, job):
        """Return how many blocks the paused `job` needs in this step."""
        if job.prefill_left or not self.mixed:
            return 0
        return self.blocks(job.length + 1) - self.blocks(job.seq.tokens)

    def prefill(self, job):
        """Let `job` compute its prompt from this step on."""
        job.stage = PREFILL
        self.prefilling.append(job)

    # Blocks.

    def blocks(self, tokens):
        """Return how many blocks hold `tokens` tokens."""
        return -(-tokens // self.size)

    def hit(self, job):
        """Return how many tokens of `job` would hit."""
        return self.cache.match(job.request, self.now, job.target).blocks * self.size

    def has_room(self, blocks):
        """Return True if as many blocks are free or evictable; pins of clients may end."""
        available = self.cache.available_blocks
        return blocks <= available or self.cache.make_room(blocks, self.now)

    def take_blocks(self, job, tokens):
        """Allocate blocks for the first `tokens` tokens of `job`; preempt for them.

        Return False if `job` was itself preempted.
        """
        while not self.has_room(self.blocks(tokens) - self.blocks(job.seq.tokens)):
            victim = self.victim(job)
            self.preempt(victim)
            if victim is job:
                return False
        self.cache.extend(job.seq, max(tokens - job.seq.tokens, 0), self.now)
        return True

    def keep_generated(self, job, *, complete, preempted=False):
        """Cache the full blocks that `job` has generated, if the rules say so.

        If it is not `complete`, its newest token is not known yet.
        """
        if self.rules.keeps_generated(job, self.state(), preempted=preempted):
            tokens = job.length if complete else max(job.length - 1, job.computed)
            self.cache.keep_generated(job.seq, tokens, self.now)

    # Preemption.

    def priority(self, job):
        """Return the priority of `job` at this moment."""
        return self.scheduler.priority(job, self.now)

    def victim(self, requester):
        """Return the job that loses its blocks: to `requester`, or to those that decode."""
        jobs = [job for job in self.running + self.paused if job.stage != LOADING]
        return self.rules.victim(jobs, self.state(), requester)

    def leave(self, job):
        """Take `job` out of its slot, and out of the step."""
        if job.stage == PREFILL:
            self.prefilling.remove(job)
        self.chunks = [chunk for chunk in self.chunks if chunk[0] is not job]
        self.unpublished = [chunk for chunk in self.unpublished if chunk[0] is not job]
        self.running.remove(job)
        self.is_full = False

    def pause(self, job):
        """Take the slot of `job`, which keeps its blocks."""
        self.leave(job)
        job.stage = PAUSED
        job.pauses += 1
        self.paused.append(job)
        self.check_progress()
        self.queue(job, self.now, front=True)

    def preempt(self, job):
        """Take the blocks of `job`: a tier keeps them if that is faster than to recompute."""
        self.victims.append(job)
        if job.stage == DONE:
            self.release(job, complete=False)
            return
        was_paused = job.stage == PAUSED
        if was_paused:
            self.paused.remove(job)
            self.dequeue(job)
        else:
            # Its tokens of the step go to jobs that are planned after it.
            self.budget += self.mixed if job.stage == DECODE else 0
            self.budget += sum(tokens for other, tokens in self.chunks if other is job)
            self.leave(job)
        level, prefill_ns = None, self.estimates.prefill_ns
        if self.tiers is not None:
            level = self.tiers.can_swap(job.seq, job.length, self.now, prefill_ns)
        if level is not None:
            job.swaps += 1
            level.park(job.seq, job.length, self.now)
        else:
            job.recomputes += 1
            if not was_paused:
                complete = job.seq.tokens > job.length or not self.rules.lag
                self.keep_generated(job, complete=complete, preempted=True)
        self.check_progress()
        self.cache.close(job.seq, self.now, preempted=True)
        job.seq, job.stage = None, WAITING
        job.target, job.computed = job.request.prompt_tokens + job.generated, 0
        self.queue(job, self.now, front=True)
        if self.share is not None:
            self.share.preempted(self.decoding, self.decode_steps)

    def check_progress(self):
        """Raise PolicyError if nothing but preemption happens any more."""
        self.fruitless += 1
        limit = 100 + 10 * (len(self.running) + len(self.waiting))
        # Jobs that get their blocks chunk by chunk may lose them at every chunk.
        if self.fruitless > limit * (self.cache.pool.blocks if self.by_chunk else 1):
            msg = f"livelock: {self.fruitless} preemptions without a new token"
            raise PolicyError(msg)

    # Tiers.

    def prefetch(self):
        """Start the prefetches that are due, for requests that have not arrived."""
        for _, _, arrival, request in take_due(self.arrivals.hinted, self.now):
            if arrival <= self.now:
                continue
            prefill_ns = self.estimates.prefill_ns
            load = self.tiers.prefetch(request, self.now, arrival, prefill_ns, self.watermark)
            if load is not None:
                self.loads.append((load.ready, -load.seq.id, None, load))

    def loaded(self, job, load):
        """Let `job` go on with the rest of its prompt; None: the load was a prefetch."""
        computed, self.changed = self.tiers.finish(load, self.now), True
        if job is not None:
            job.loaded += 0 if load.resumed else computed - job.computed
            job.computed = computed
            self.prefill(job)

    # The step.

    def step(self):
        """Run the step that is planned."""
        decoding = self.decoding if self.mixed or not self.chunks else []
        parts = [(job.computed, tokens) for job, tokens in self.chunks]
        took = self.estimates.step_ps(parts, [job.length + 1 for job in decoding])
        self.began = self.clock
        self.clock += took
        self.busy += took
        self.steps += 1
        self.decode_steps += bool(decoding)
        for job in decoding:
            self.generate(job)
        self.take_arrivals()
        for job, tokens in self.chunks:
            job.computed += tokens
            self.cache.commit(job.seq, tokens, self.now)
            self.changed = True
        for job in [] if self.plans_output and not self.rules.lag else decoding:
            if job.request.output_keys and job.length % self.size == 0:
                self.commit_generated(job)
        prefilled = [job for job, _ in self.chunks if not job.prefill_left]
        for job in prefilled:
            self.prefilling.remove(job)
            if job.output_left:
                self.generate(job)
                job.stage = DECODE
        if prefilled or decoding:
            self.fruitless = 0
        ended = [job for job in prefilled + decoding if not job.output_left]
        for job in sorted(ended, key=admission):
            self.end(job)

    def generate(self, job):
        """Give `job` its next token, now."""
        if job.first_token is None:
            job.first_token = self.now
        else:
            self.gaps.append(self.clock - job.last_token)
        job.last_token = self.clock
        job.generated += 1

    def commit_generated(self, job):
        """Share the generated block that `job` has filled, for which the workload has a key."""
        if self.rules.lag:
            self.filled.append((job.seq, job.length))
        else:
            self.cache.commit(job.seq, job.length - job.seq.computed, self.now)
            self.changed = True


def admission(job):
    """Return the serial number of the admission of `job`."""
    return job.seq.admission


def take_due(events, now):
    """Remove the events up to `now`, and return them in order."""
    taken = sorted(event for event in events if event[0] <= now)
    events[:] = [event for event in events if event[0] > now]
    return taken
