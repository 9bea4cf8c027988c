"""The contract of schedulers, and the limits of continuous batching."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import abc
from collections.abc import Collection, Iterable
from math import ceil
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

import attrs

from kvcore.errors import InputError
from kvcore.plugins.base import Plugin
from kvcore.plugins.manager import resolve
from kvcore.plugins.options import nearest, spec_of
from kvcore.request import Request
from kvcore.serving.job import Job
from kvcore.serving.rules import CHOICES, Rules, described_rules, with_choices


@attrs.frozen(init=False)
class Batching:
    """The limits of a step of continuous batching, and the rules that steps are made by.

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
        max_model_len: the most tokens of a sequence: a longer prompt is rejected, and a text
            ends there; None: unbounded.
        rules: the rules by which engines differ: a plugin of that kind, or what names one.

    Raises:
        InputError: the limits let nothing run.
    """

    max_tokens: int = 8192
    max_seqs: int = 256
    chunked: bool = True
    steps: Literal["mixed", "prefill-first"] = "mixed"
    watermark: float = 0.01
    max_model_len: int | None = None
    rules: Rules = attrs.field(factory=Rules, eq=described_rules)

    def __init__(self, *, rules: object = None, **limits: Any) -> None:
        built = Rules() if rules is None else resolve("rules", rules)
        former = {name: limits.pop(name) for name in CHOICES if name in limits}
        if former:
            built = with_choices(built, former)
            text = f"{', '.join(former)}: rules of engines are a plugin of Batching now: write "
            warnings.warn(f"{text}rules={str(spec_of(built))!r}", FutureWarning, stacklevel=2)
        for name in sorted(limits.keys() - set(LIMITS)):
            msg = f"Batching has no limit {name!r}{nearest(name, LIMITS)}: give one of {LIMITS}"
            raise TypeError(msg)
        # The generated constructor, for one release beside the earlier fields.
        cast("Any", self).__attrs_init__(**limits, rules=built)

    def __attrs_post_init__(self) -> None:
        """Check the limits."""
        msg, longest = "", self.max_model_len
        step = f"max_tokens={self.max_tokens!r} and max_seqs={self.max_seqs!r}"
        if type(self.max_tokens) is not int or type(self.max_seqs) is not int:
            msg = f"{step}: give whole numbers"
        elif self.max_seqs < 1 or self.max_tokens < self.max_seqs:
            msg = (
                f"{step}: a step has a token for each sequence, so give at least 1 sequence, "
                "and no fewer tokens"
            )
        elif type(self.watermark) not in (int, float) or not 0 <= self.watermark < 1:
            msg = f"watermark={self.watermark!r}: give a share of blocks, 0 or more, below 1"
        elif self.rules.max_chunk is not None and not self.chunked:
            msg = f"max_chunk={self.rules.max_chunk} of whole prompts: leave out one of both"
        elif self.steps not in ("mixed", "prefill-first"):
            msg = f"steps={self.steps!r} is not known; there are: mixed, prefill-first"
        elif type(self.chunked) is not bool:
            msg = f"chunked={self.chunked!r} must be True or False"
        elif longest is not None and (type(longest) is not int or longest < 1):
            msg = f"max_model_len={longest!r}: give whole tokens, at least 1, or None"
        if msg:
            raise InputError(msg)

    def reserved_blocks(self, blocks: int) -> int:
        """Return how many of the `blocks` blocks of a pool the watermark keeps."""
        if self.rules.null_block:
            return int(self.watermark * (blocks + 1))
        return ceil(self.watermark * blocks)

    def within(self, tokens: int | None) -> Batching:
        """Return these caps with sequences of at most `tokens` tokens; None: no other limit."""
        if tokens is None or (self.max_model_len or tokens + 1) <= tokens:
            return self
        return Batching(**self.limits | {"max_model_len": tokens}, rules=self.rules)

    @property
    def limits(self) -> dict[str, Any]:
        """The limits by name."""
        return {name: getattr(self, name) for name in LIMITS}

    def as_dict(self, *, complete: bool = False) -> dict[str, Any]:
        """Return the limits, and the choices of the rules that are not those of kvcore.

        In the form of trace headers; if `complete`, with those of kvcore too.
        """
        fields, plain = self.limits | self.rules.choices(), Rules().choices()
        plain["max_model_len"] = None
        return {
            name: fields[name]
            for name in _RECORDED
            if complete or name not in plain or fields[name] != plain[name]
        }


LIMITS = tuple(name for name in attrs.fields_dict(Batching) if name != "rules")
"""The names of the limits of a step."""

_RECORDED = (*LIMITS[:-1], *CHOICES[:-2], "max_model_len", *CHOICES[-2:])
"""The fields of `batching` in trace headers, in their order."""


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


class LoopState(NamedTuple):
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


class StepPlan(NamedTuple):
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
    moment is preempted: its private blocks are freed, its shared ones can be evicted, and it
    computes again later what it does not hit then.
    """

    kind: ClassVar[str] = "scheduler"

    by_arrival: ClassVar[bool] = False
    """Whether `priority` is the order of arrival, for the core in C. It is read from the class
    that defines `priority`."""

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

        Unless overridden it is not called: the loop does the same, without sorting, but pauses
        a job only if the one that takes its slot finds tokens of the step, and blocks.
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
