"""The contract of schedulers, and the limits and rules of continuous batching."""

from __future__ import annotations

from abc import abstractmethod
from collections import abc
from collections.abc import Collection, Iterable
from math import ceil
from typing import Any, ClassVar, Literal, Protocol

import attrs

from kvcore.errors import InputError
from kvcore.plugins.base import Plugin
from kvcore.request import Request
from kvcore.serving.job import Job


@attrs.frozen(kw_only=True)
class Batching:
    """The limits of continuous batching, and the rules by which engines differ.

    The defaults are those of kvcore; `kvcore simulate --like vllm --show` prints those of an
    engine.

    Attributes:
        max_tokens: tokens of a step: one for each sequence that decodes, the rest prefill.
        max_seqs: sequences that prefill or decode at a time.
        chunked: whether a prompt may be computed over several steps.
        steps: `mixed` steps prefill and decode together; with `prefill-first` decoding
            waits while there is anything to prefill.
        watermark: share of the blocks that an admission must leave free or evictable for
            the growth of running sequences; rounded up.
        unchunked: how a prompt is scheduled that may not be chunked, and for which decoding
            leaves too little of `max_tokens`: `alone`, as the only prefill of a step, which
            then has more tokens; or it has to `wait` for a step with room for it.
        max_chunk: the most prompt tokens of one sequence in a step, as long as there is
            another sequence; None: `max_tokens` alone bounds them.
        reserve: the blocks that an admission allocates: those of the whole `prompt`; those of
            its first `chunk`, although those of the whole must be free or evictable; or those
            of its `first-chunk`, however few are left then. With tiers, the whole prompt.
        commit: when blocks can be hit: once they are `computed`, or as soon as they are
            `scheduled`, so that the next admission of the same step shares them.
        generated: which generated blocks stay cached: those that are `keyed` by the workload;
            or all of them are `cached`, under keys that no other request has.
        admit_after_preemption: whether a step that preempts may admit.
        ties: which of the jobs that are last in order is preempted: of equal priority the
            one admitted `last`; or of equal priority and arrival the one admitted `first`.
        lag: steps between a plan and the state it is based on: 1 under asynchronous
            scheduling, where a step is planned while the one before it runs. Jobs that finish
            or arrive during that step count a step later.
        null_block: whether a block of the pool is never used. The pool of the cache is
            without it; the watermark is a share of all blocks, rounded down.
        max_model_len: the most tokens of a sequence: a longer prompt is rejected, and a text
            ends there; None: unbounded.
        new_token_ratio: beside running jobs an admission leaves room for all tokens that its
            own job will generate, and for this share of those that running jobs will, at most
            4,096 tokens each. The share changes as `TokenRatio` says. A job that finds no room
            ends the admissions until a running job has left. None: the watermark alone counts.
        preempts: which job loses its blocks when decoding jobs find none: the `last` in
            order; or the `shortest` of the decoding ones, with the fewest generated tokens,
            then the longest prompt, whose generated blocks do not stay cached.

    Raises:
        InputError: the limits let nothing run, or a rule is unknown.
    """

    max_tokens: int = 8192
    max_seqs: int = 256
    chunked: bool = True
    steps: Literal["mixed", "prefill-first"] = "mixed"
    watermark: float = 0.01
    unchunked: Literal["alone", "wait"] = "alone"
    max_chunk: int | None = None
    reserve: Literal["prompt", "chunk", "first-chunk"] = "prompt"
    commit: Literal["computed", "scheduled"] = "computed"
    generated: Literal["keyed", "cached"] = "keyed"
    admit_after_preemption: bool = True
    ties: Literal["last", "first"] = "last"
    lag: int = 0
    null_block: bool = False
    max_model_len: int | None = None
    new_token_ratio: float | None = None
    preempts: Literal["last", "shortest"] = "last"

    def __attrs_post_init__(self) -> None:
        """Check the limits."""
        msg = ""
        if type(self.max_tokens) is not int or type(self.max_seqs) is not int:
            msg = (
                f"max_tokens={self.max_tokens!r} and max_seqs={self.max_seqs!r}: give whole "
                "numbers"
            )
        elif self.max_seqs < 1 or self.max_tokens < self.max_seqs:
            msg = (
                f"max_tokens={self.max_tokens} and max_seqs={self.max_seqs}: a step has a "
                "token for each sequence, so give at least 1 sequence, and no fewer tokens"
            )
        elif type(self.watermark) not in (int, float):
            msg = f"watermark={self.watermark!r} is no number: give 0 or more, below 1"
        elif not 0 <= self.watermark < 1:
            msg = (
                f"watermark={self.watermark} is no share of the blocks: give 0 or more, below 1"
            )
        elif type(self.lag) is not int or self.lag not in (0, 1):
            msg = f"lag={self.lag!r}: a plan knows of the step before it (0), or does not (1)"
        elif self.max_chunk is not None and not self.chunked:
            msg = f"max_chunk={self.max_chunk}: prompts are not chunked; leave out one of both"
        else:
            msg = self._wrong_rule()
        if msg:
            raise InputError(msg)

    def _wrong_rule(self) -> str:
        """Return why a rule is wrong; an empty text if none is."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                return f"{name}={value!r} is not known; there are: {', '.join(choices)}"
        for name in ("chunked", "admit_after_preemption", "null_block"):
            if type(getattr(self, name)) is not bool:
                return f"{name}={getattr(self, name)!r} must be True or False"
        for name in ("max_chunk", "max_model_len"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                return f"{name}={value!r}: give whole tokens, at least 1, or None"
        ratio = self.new_token_ratio
        if ratio is not None and (type(ratio) not in (int, float) or not 0 < ratio <= 1):
            return f"new_token_ratio={ratio!r}: give a share above 0, at most 1, or None"
        return ""

    def reserved_blocks(self, blocks: int) -> int:
        """Return how many of the `blocks` blocks of a pool the watermark keeps."""
        if self.null_block:
            return int(self.watermark * (blocks + 1))
        return ceil(self.watermark * blocks)

    def within(self, tokens: int | None) -> Batching:
        """Return these caps with sequences of at most `tokens` tokens; None: no other limit."""
        if tokens is None or (self.max_model_len or tokens + 1) <= tokens:
            return self
        return attrs.evolve(self, max_model_len=tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the limits, and those rules that are not the defaults."""
        given = attrs.asdict(self)
        return {
            name: value
            for name, value in given.items()
            if name in _LIMITS or value != getattr(_DEFAULTS, name)
        }


_LIMITS = ("max_tokens", "max_seqs", "chunked", "steps", "watermark")

_CHOICES = {
    "steps": ("mixed", "prefill-first"),
    "unchunked": ("alone", "wait"),
    "reserve": ("prompt", "chunk", "first-chunk"),
    "commit": ("computed", "scheduled"),
    "generated": ("keyed", "cached"),
    "ties": ("last", "first"),
    "preempts": ("last", "shortest"),
}

_DEFAULTS = Batching()


class TokenRatio:
    """The share of the future tokens of running jobs that an admission leaves room for.

    It falls with each decode step, within 600 steps to 0.14 of its first value. A preemption
    sets it to the share of their tokens that the remaining jobs have generated, with 20 more
    each. When nothing runs it is reset. O(1) for any number of steps.

    Source: `new_token_ratio` of SGLang 0.5 and its constants.
    """

    __slots__ = ("_first", "_since", "_value")

    def __init__(self, first: float) -> None:
        """Start with the share `first`, at decode step 0."""
        self._first = self._value = first
        self._since = 0

    def at(self, step: int) -> float:
        """Return the share after `step` decode steps."""
        if step <= self._since:
            return self._value
        low = self._first * 0.14
        return max(self._value - (step - self._since) * (self._first - low) / 600, low)

    def restart(self, step: int) -> None:
        """Reset to the initial ratio: nothing runs."""
        self._value, self._since = self._first, step

    def preempted(self, left: Iterable[Job], step: int) -> None:
        """Set the share by the remaining jobs, in the step that has preempted others."""
        jobs = list(left)
        generated = sum(job.generated for job in jobs) + 20 * len(jobs)
        self._value = min(1.0, generated / (sum(job.output_tokens for job in jobs) + 1))
        self._since = step + 1


class ServiceTimes(Protocol):
    """Hits and times of service of a server, for its scheduler."""

    def probe(self, request: Request, now: int) -> int:
        """Return how many prompt tokens of `request` would hit in the cache. Pure."""

    def prefill_ns(self, tokens: int, context: int) -> int:
        """Return the ns to prefill `tokens` tokens after `context` in a step of their own."""

    def decode_ns(self, tokens: int, context: int, sequences: int) -> int:
        """Return the ns in which a sequence with `context` tokens generates `tokens` more.

        It decodes together with `sequences - 1` others of its length, or with as many as
        `max_seqs` allows.
        """


@attrs.define
class LoopState:
    """The input of a plan. Read it; the loop executes plans.

    Attributes:
        now: the time, ns.
        waiting: waiting jobs, in the order in which they queued up, preempted ones first.
            Those whose stage is `paused` hold blocks.
        running: running jobs, in order of admission.
        free_slots: how many more jobs may run: `max_seqs` less the running ones.
        available_blocks: blocks that are free or can be evicted.
        server: hits and times of service.
    """

    now: int
    waiting: Collection[Job]
    running: abc.Sequence[Job]
    free_slots: int
    available_blocks: int
    server: ServiceTimes


@attrs.frozen
class StepPlan:
    """The jobs to admit and the jobs to pause.

    Attributes:
        admit: waiting jobs in the order in which they are offered a free slot, best as a
            generator: the next is taken from it once the one before runs. The first job that
            finds no slot, or no blocks, ends the admissions.
        pause: running jobs to remove from the batch; they keep their blocks.
    """

    admit: Iterable[Job] = ()
    pause: Iterable[Job] = ()


class Scheduler(Plugin):
    """Orders the jobs of a server. The easy tier is one function, `priority`.

    It is called only at events (an arrival, a step with prefill, a first token, a completion,
    a preemption, a time returned by `changes_at`), never step by step: k decode steps with
    the same sequences are one event. Methods that are not overridden are never called.

    The priority of a job is computed when it queues up, and compared with priorities from
    other times: it must not depend on the clock. Return a deadline, not a slack. A scheduler
    that is `preemptive` pauses the running job that is last in its order for a waiting one
    that is before it; the priority of a running job may then only improve, relative to
    waiting ones.

    A running job loses only its slot in that way. A job that finds no blocks for its prompt
    waits, however urgent, since making room would throw work away. When running jobs need
    blocks to go on and there are none, the running or paused job last in order at that
    moment is preempted: its blocks are freed, and it computes them again later.
    """

    kind: ClassVar[str] = "scheduler"

    preemptive = False
    """Whether a waiting job may take the slot of a running one. May be an option."""

    server: ServiceTimes

    def attach(self, server: ServiceTimes) -> None:
        """Store the server whose jobs it orders. Called once."""
        self.server = server

    @abstractmethod
    def priority(self, job: Job, now: int) -> Any:
        """Return the sort key of `job`: the lowest goes first.

        Any values that can be compared with one another will do, except None and NaN. Of equal
        ones the job that arrived first goes first.
        """

    def changes_at(self, job: Job, now: int) -> int | None:
        """Return when (ns, after `now`) the priority of a waiting job changes by itself.

        `priority` is called again then. None: it does not change.
        """
        del job, now
        return None

    def queued(self, job: Job, now: int) -> None:
        """Called when `job` starts to wait: it arrived, or was preempted."""

    def admitted(self, job: Job, now: int) -> None:
        """Called when `job` starts to run: for the first time, again, or after a pause."""

    def finished(self, job: Job, now: int) -> None:
        """Called when `job`, which ran, has ended."""

    def withdrawn(self, job: Job, now: int) -> None:
        """Called when a waiting `job` is removed: its client has gone, or its K/V is lost."""

    def plan(self, state: LoopState) -> StepPlan:
        """Return which jobs to admit and to pause. The full tier: override it as a whole.

        Unless overridden it is not called: the loop does the same, without sorting.
        """
        now, priority = state.now, self.priority
        waiting = sorted(state.waiting, key=lambda job: (priority(job, now), job.serial))
        pause: list[Job] = []
        if self.preemptive:
            running = sorted(state.running, key=lambda job: (priority(job, now), job.serial))
            for job in waiting[state.free_slots :]:
                if not running or priority(running[-1], now) <= priority(job, now):
                    break
                pause.append(running.pop())
        return StepPlan(waiting, pause)
