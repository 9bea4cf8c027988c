"""The core in C beside the loop: what it runs, and how the loop goes on where it stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from kvcore.cache.native import core, defines, known_plugins, why_not
from kvcore.cache.sequence import Sequence
from kvcore.serving.decode_batch import DecodeAllocator
from kvcore.serving.job import DECODE, DONE, PREFILL, WAITING, Job
from kvcore.serving.latency import LatencyModel, SimulatedExecutor, StepWork, decode_lines
from kvcore.serving.stats import RunLog
from kvcore.units import INT64_LIMIT

_STAGES: Final = (WAITING, PREFILL, DECODE, DONE)
"""The stages of jobs by their numbers in the core."""

Loop: TypeAlias = Any
"""A `ServingLoop`, whose module imports this one."""


def reason(loop: Loop) -> str:
    """Return why the core does not run `loop`, which has not begun; "" if it does."""
    batcher = loop.batcher
    parts = (
        (loop.allocator, DecodeAllocator),
        (loop._executor, SimulatedExecutor),
        (loop.log, RunLog),
    )
    for part, plain in parts:
        if type(part) is not plain:
            return f"a {type(part).__name__}"
    scheduler, rules = batcher._scheduler, batcher._rules
    in_cache = why_not(loop._cache)
    reasons = (
        (in_cache, in_cache),
        ("transfers", batcher.moved),
        ("a drafter", loop._drafts),
        ("a meter", loop._meter),
        ("single steps", not loop._jumps),
        ("attention windows", loop._windows != (None,)),
        ("calls at first tokens", loop.on_first_token),
        ("rules that decide by methods of their own", rules.decides()),
        ("rules by future tokens", batcher._ratio is not None or rules.preempts != "last"),
        ("a scheduler that pauses or plans", scheduler.preemptive or not scheduler.ranks),
        ("a scheduler that hears of events", scheduler.heard or scheduler.changes),
        ("a run that has begun", loop.clock_ps or loop.log.steps or len(loop.log.ids)),
        ("a run that has begun", loop._serial),
    )
    for name, holds in reasons:
        if holds:
            return name
    if max(loop.arrivals.scale.as_integer_ratio()) >= INT64_LIMIT:
        return "a scale of the rate with many digits"
    return ""


def serves(loop: Loop) -> bool:
    """Return True if the core runs `loop`, which has not begun."""
    return core() is not None and not reason(loop)


def run(loop: Loop, turns: int = -1) -> None:
    """Serve as many requests of `loop`, which has not begun, as the core takes.

    Args:
        loop: the serving loop.
        turns: turns after which the loop goes on in Python in any case; -1: never.
    """
    native = core()
    if native is None or reason(loop):
        return
    # All that the core asks of the parts, once: numbers, and what it calls.
    batcher, batching, latency = loop.batcher, loop.batcher.batching, loop._executor.latency
    cache, above_below = loop._cache, loop.arrivals.scale.as_integer_ratio()
    scheduler, rules = batcher._scheduler, batcher._rules
    limits = {
        "max_tokens": batching.max_tokens,
        "max_seqs": batching.max_seqs,
        "reserve": batcher._reserve,
        "max_model_len": batching.max_model_len,
        "max_chunk": rules.max_chunk,
        "in_one": loop._in_one,
        "frontend": loop._frontend_ns,
        "mixed": batcher._mixed,
        "admit_after_preemption": rules.admit_after_preemption,
        "last_of_ties": rules.ties == "last",
        "chunked": batching.chunked,
        "alone": rules.unchunked == "alone",
        "by_chunk": rules.reserve != "prompt",
        "fits_prompt": rules.reserve != "first-chunk",
        "publishes": rules.commit == "scheduled",
        "keeps": rules.generated == "cached",
        "names_output": batcher.names_output,
        "lag": rules.lag,
        "scale_above": above_below[0],
        "scale_below": above_below[1],
    }
    # A scheduler by arrival is not asked, nor a latency model that is one line.
    plugin = scheduler.scheduler
    in_order = plugin.by_arrival and defines(plugin, "by_arrival", "priority")

    def priority(fields: Mapping[str, Any], now: int) -> tuple[Job, Any]:
        job = _job(loop, fields)
        return job, scheduler.priority(job, now)

    terms = None
    if type(latency).duration is LatencyModel.duration and defines(
        latency, "terms_of_step", "pieces"
    ):
        terms = latency.terms_of_step()
        if terms is not None and max(terms[:1] + terms[2:]) >= INT64_LIMIT:
            terms = None
    state = native.serve(
        loop,
        None if loop.arrivals.closed else loop.arrivals.restart(),
        {name: -1 if limit is None else limit for name, limit in limits.items()},
        None if in_order else priority,
        lambda jobs: decode_lines(latency, jobs),
        latency.duration,
        StepWork,
        terms,
        known_plugins(cache),
        turns,
    )
    if state is None:  # all have ended
        loop.arrivals.next_at, batcher.changed = INT64_LIMIT, False
    else:
        _continue(loop, state)


def _continue(loop: Loop, state: Mapping[str, Any]) -> None:
    """Make the jobs of Python of those of the core, between two turns."""
    # The jobs, with the sequences and ends of those that have blocks.
    batcher, batch, allocator, lag = loop.batcher, loop.batch, loop.allocator, loop._lag
    jobs: dict[int, Job] = {}
    ends: dict[int, tuple[int, int, int, Job]] = {}
    for fields in (*state["running"], *state["waiting"], *state["unseen"]):
        job = _job(loop, fields)
        jobs[job.serial] = job
        if job.rank is None:
            job.rank = job.serial
        if (seq := job.seq) is not None:
            ends[job.serial] = fields["end"], seq.admission, fields["residue"], job
            loop._cache.sequences[seq.id] = seq
            if seq.span.creator is fields["token"]:
                seq.span.creator = seq
    # Where each of them is.
    for fields in state["waiting"]:
        job = jobs[fields["serial"]]
        batcher.waiting.enter(job, 0)
    for fields in state["running"]:
        batcher.running[jobs[fields["serial"]]] = None
    for serial in state["prefilling"]:
        batcher.prefilling[jobs[serial]] = None
    fresh = {fields["serial"] for fields in state["running"] if fields["is_fresh"]}
    batch.restore(
        [ends[serial] for serial in state["batch"]],
        [jobs[serial] for serial in state["batch"] if serial in fresh],
        state["context"],
        state["last_step_ps"],
    )
    # What the next plan has to know of the last one.
    batcher.blocked_job = jobs.get(state["blocked"])
    batcher.changed = bool(state["changed"])
    batcher.without_progress = state["without_progress"]
    allocator.allocated_until = state["allocated_until"]
    for fields in state["unseen"]:
        loop._unseen.append((fields["visible"], jobs[fields["serial"]]))
    if lag is not None:
        lag.began_ps = state["began_ps"] if state["stepped"] else None
        lag.filled = [(jobs[n], jobs[n].seq, length) for n, length in state["filled"]]
        lag.late = [job for job in batcher.running if job.stage == DONE]


_SAME = (
    *("output_tokens", "target", "computed", "hit", "generated_before", "recomputes"),
    *("last_token_ps", "rank"),
)
"""Attributes of a job that the core has by the same names, and with the same values."""


def _job(loop: Loop, fields: Mapping[str, Any]) -> Job:
    """Return a job of Python with the fields of one of the core, and its sequence."""
    request = fields["request"]
    job: Job | None = fields["job"]
    if job is None:
        target = request.prompt_tokens
        job = Job(
            request, fields["serial"], fields["arrival"], loop.steps, target, fields["slo"]
        )
    for name in _SAME:
        setattr(job, name, fields[name])
    for name in ("admitted", "first_token", "joined"):
        setattr(job, name, None if fields[name] < 0 else fields[name])
    job.stage = _STAGES[fields["stage"]]
    job.seq = None
    if fields["span"] is not None:
        job.seq = Sequence(
            fields["admission"],
            fields["admission"],
            request,
            fields["keys"],
            fields["cacheable"],
            fields["lookup_blocks"],
            fields["hit_blocks"],
            fields["tokens"],
            fields["committed"],
            fields["blocks"],
            job.target,
            fields["span"],
        )
    return job
