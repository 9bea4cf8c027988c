"""The contract of the rules by which engines differ, and the calls of overridden decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import attrs

import kvcore
from kvcore.errors import InputError, shorten
from kvcore.plugins.base import (
    FAILURES,
    Plugin,
    find_override,
    raise_policy_error,
    wrong_answer,
)
from kvcore.serving.job import DECODE, WAITING, Job

if TYPE_CHECKING:
    from kvcore.cache import LayerPlan
    from kvcore.models.memory import KVLayout

Reserve: TypeAlias = Literal["prompt", "chunk", "first-chunk"]
"""The blocks that an admission takes, as the option `reserve` of `Rules` says."""

_LONGEST = 4096
"""The most tokens yet to be generated that `new_token_ratio` counts for one request."""


class StepState(NamedTuple):
    """The step that is being planned, for the decisions of `Rules`. Read it.

    Attributes:
        now: the time, ns.
        max_tokens, max_seqs, chunked: limits of a step, as `Batching` has them.
        block_size: tokens of a block.
        blocks: blocks of the pool.
        available_blocks: blocks that are free or can be evicted.
        watermark_blocks: blocks that the watermark leaves to running jobs.
        running: running jobs, in order of admission.
        paused: jobs off the batch that keep their blocks.
        waiting: number of waiting jobs, the paused ones among them.
        decoding: number of jobs that decode.
        chunks: jobs that prefill in the step, as far as it is planned, and their tokens.
        budget: tokens of the step that are not planned yet.
        preempted: jobs that this step has preempted.
        token_ratio: the share of `new_token_ratio` at this step; None: there is none.
        priority: returns the priority of a job by the scheduler: the lowest goes first.
    """

    now: int
    max_tokens: int
    max_seqs: int
    chunked: bool
    block_size: int
    blocks: int
    available_blocks: int
    watermark_blocks: int
    running: Collection[Job]
    paused: Collection[Job]
    waiting: int
    decoding: int
    chunks: Sequence[tuple[Job, int]]
    budget: int
    preempted: Collection[Job]
    token_ratio: float | None
    priority: Callable[[Job], Any]


@attrs.define(slots=False, kw_only=True, eq=False)
class Rules(Plugin):
    """The rules by which engines differ; this class itself has those of kvcore.

    An engine that differs by other values of the options is a class with other defaults. One
    that decides in another way overrides methods. These are pure: the same arguments have the
    same answer, which no earlier call changes, so that one object serves several servers.
    Methods that are not overridden are never called: the loop does what they say by itself.
    A constructor of its own calls this one, which has the options of all rules.

    Args:
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
        ties: which of the jobs that the scheduler puts last is preempted. `last`: the last by
            (priority, admission). `first`: the last by (priority, time of arrival), and of
            equal ones the one admitted first. The priority is that of the scheduler: under
            `fcfs` no two jobs have the same, and there are no ties.
        lag: steps between a plan and what it knows of decoding and arrivals: 1 under
            asynchronous scheduling, where a step is planned while the one before it runs. Jobs
            that finish or arrive during that step count a step later; prompts do not, since
            how much of them a step computes is known when it is planned.
        null_block: whether a block of the pool is never used. The pool of the cache is
            without it; the watermark is a share of all blocks, rounded down.
        new_token_ratio: beside running jobs an admission leaves room for all tokens that its
            own job will generate, and for this share of those that running jobs will, at most
            4,096 tokens each. The share changes as `TokenRatio` says. A job that finds no room
            ends the admissions until a running job has left. None: the watermark alone counts.
        preempts: which job loses its blocks when decoding jobs find none: the `last` in
            order; or the `shortest` of the decoding ones, with the fewest generated tokens,
            then the longest prompt, whose generated blocks do not stay cached.

    Attributes:
        defaults: options of a run that are its defaults beside these rules, by name: limits
            of a step, policies.
        first_output: where the first token comes from if replicas split the phases, unless
            the run says it: `prefill`, `transfer` or `decode`; None: rules do not say it.

    Raises:
        InputError: a value that an option cannot have.
    """

    kind: ClassVar[str] = "rules"
    name: ClassVar[str] = "kvcore"
    defaults: ClassVar[Mapping[str, Any]] = {}
    first_output: ClassVar[str | None] = None

    unchunked: Literal["alone", "wait"] = "alone"
    max_chunk: int | None = None
    reserve: Reserve = "prompt"
    commit: Literal["computed", "scheduled"] = "computed"
    generated: Literal["keyed", "cached"] = "keyed"
    admit_after_preemption: bool = True
    ties: Literal["last", "first"] = "last"
    lag: int = 0
    null_block: bool = False
    new_token_ratio: float | None = None
    preempts: Literal["last", "shortest"] = "last"

    def __init_subclass__(cls) -> None:
        """Leave a class without a name of its own without one."""
        super().__init_subclass__()
        if "name" not in vars(cls):
            cast("Any", cls).name = None  # which is refused where a name is needed

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        for name, values in _VALUES.items():
            if getattr(self, name) not in values:
                known = ", ".join(values)
                msg = f"{name}={getattr(self, name)!r} is not known; there are: {known}"
                raise InputError(msg)
        for name in ("admit_after_preemption", "null_block"):
            if type(getattr(self, name)) is not bool:
                msg = f"{name}={getattr(self, name)!r} must be True or False"
                raise InputError(msg)
        msg = ""
        ratio, cap = self.new_token_ratio, self.max_chunk
        if type(self.lag) is not int or self.lag not in (0, 1):
            msg = f"lag={self.lag!r}: a plan knows of the step before it (0), or does not (1)"
        elif cap is not None and (type(cap) is not int or cap < 1):
            msg = f"max_chunk={cap!r}: give whole tokens, at least 1, or None"
        elif ratio is not None and (type(ratio) not in (int, float) or not 0 < ratio <= 1):
            msg = f"new_token_ratio={ratio!r}: give a share above 0, at most 1, or None"
        if msg:
            raise InputError(msg)

    def layer_plan(self, layout: KVLayout, devices: int) -> LayerPlan | None:
        """Return how a pool is divided among layers that keep different things.

        By default in cache groups, as vLLM has them; an engine may have a pool for each kind.
        None: it is not divided, and all layers keep all tokens. Called under a clock, of any
        model.

        Args:
            layout: the model and its K/V in blocks.
            devices: number of devices that share it.

        Raises:
            InputError: there is no rule for what a layer keeps.
        """
        if layout.model.uniform:
            return None
        # The front door says where groups are planned: most models have one.
        plan = kvcore.groups_of(layout.model, layout.block_size, layout.codec, devices)
        return plan if plan.splits else None

    def bind(self) -> None:
        """Warn of a method whose name seems to be misspelled; any number of servers use it."""
        super().bind()
        self._bound = False

    def choices(self) -> dict[str, Any]:
        """Return the values of the options that all rules have, by name."""
        return {name: getattr(self, name) for name in CHOICES}

    def decides(self) -> bool:
        """Return True if it overrides a decision, so that its options do not say all."""
        return any(find_override(self, name) is not None for name in DECISIONS)

    def victim(self, jobs: Sequence[Job], state: StepState, requester: Job | None) -> Job:
        """Return the one of `jobs` that loses its blocks, by `preempts` and `ties`.

        Called when too few blocks are free or evictable, until they are enough. O(jobs).

        Args:
            jobs: the jobs with blocks, running ones first, in order of admission.
            state: the step.
            requester: the job that needs blocks for its prompt, which may be the victim;
                None: the decoding ones need a block each.
        """
        if self.preempts == "shortest" and requester is None:
            decoding = [job for job in jobs if job.stage == DECODE]
            if decoding:
                return max(decoding, key=_brevity)
        order = attrgetter("seq.admission" if self.ties == "last" else "arrival")
        return max(jobs, key=lambda job: (state.priority(job), order(job)))

    def headroom(self, job: Job, state: StepState) -> int | None:
        """Return how many blocks must be left for running jobs when `job` is admitted.

        By `new_token_ratio`, `admit_after_preemption` and the watermark. They are blocks that
        stay free or evictable, beside those of the prompt. None: this step admits no job any
        more. Called when `job`, which is first in order, is offered a slot, and again without
        `preempted` jobs when it gets blocks; not if no job has blocks: then none are left.
        """
        if state.preempted and not self.admit_after_preemption:
            return None
        if not (state.running or state.paused):
            return 0
        if state.token_ratio is None:
            return state.watermark_blocks
        size = state.block_size
        tokens = min(job.predicted_left, _LONGEST) + size
        taken = sum(
            min(other.predicted_left, _LONGEST)
            for other in state.running
            if other.stage == DECODE
        )
        # Prompts that end in the planned step count in full; each chunk counts a block.
        for other, chunk in state.chunks:
            if other.computed + chunk == other.target:
                tokens += min(other.predicted_left, _LONGEST)
            tokens += size
        blocks = -(-(int(tokens + taken * state.token_ratio) + 1) // size)
        return max(state.watermark_blocks, blocks)

    def reserved(self, job: Job, state: StepState) -> Reserve:
        """Return which blocks the admission of `job` takes; one of the values of `reserve`.

        Called when a slot and the `headroom` are known; not with tiers, nor where K/V comes
        from another server.
        """
        del job, state
        return self.reserve

    def chunk_tokens(self, job: Job, tokens: int, state: StepState) -> int:
        """Return how many of the next `tokens` prompt tokens of `job` the step computes.

        By `max_chunk`, `unchunked` and `Batching.chunked`. It is at most `state.budget`, or
        for the first prompt of a step all `tokens`. 0: none, nor of jobs that come after it;
        not in a step without other work. Called when `job` is about to be admitted (it is
        `waiting` then, and `tokens` are those that do not hit), and at each step after that.
        """
        limit = state.budget
        if self.max_chunk is not None and len(state.running) + state.waiting > 1:
            limit = min(limit, self.max_chunk)
        if tokens <= limit:
            return tokens
        if state.chunked:
            return limit
        waits = self.unchunked == "wait" and job.stage == WAITING
        return 0 if state.chunks or waits else tokens

    def shares_scheduled(self, job: Job, state: StepState) -> bool:
        """Return True if blocks of `job` can be hit before they are computed, by `commit`.

        Called when a chunk of its prompt is scheduled: the blocks that it fills can then be
        hit by the admissions of the same step. Generated blocks go by `commit` alone.
        """
        del job, state
        return self.commit == "scheduled"

    def keeps_generated(self, job: Job, state: StepState, *, preempted: bool) -> bool:
        """Return True if the blocks that `job` has generated stay cached without a key.

        By `generated` and `preempts`. Called when `job` ends or is `preempted`; not if it is
        paused, or moves to a tier. If `commit` is `scheduled` and the eviction policy has
        `on_insert`, also in each plan in which blocks of `job` are scheduled.
        """
        del job, state
        return self.generated == "cached" and not (preempted and self.preempts == "shortest")


_VALUES = {
    "unchunked": ("alone", "wait"),
    "reserve": ("prompt", "chunk", "first-chunk"),
    "commit": ("computed", "scheduled"),
    "generated": ("keyed", "cached"),
    "ties": ("last", "first"),
    "preempts": ("last", "shortest"),
}

CHOICES = tuple(attrs.fields_dict(Rules))
"""The names of the options that all rules have."""


def described_rules(rules: Rules) -> tuple[object, ...]:
    """Return the class and the options of rules: two that are equal here decide the same."""
    return type(rules), *rules.choices().items(), *rules.options().items()


def with_choices(rules: Rules, choices: Mapping[str, Any]) -> Rules:
    """Return a copy of rules with other values of some options, without their constructor."""
    changed = copy(rules)
    for name, value in choices.items():
        setattr(changed, name, value)
    changed.__attrs_post_init__()
    return changed


def _brevity(job: Job) -> tuple[int, int, int]:
    """Return the sort key of a decoding job, of which the greatest is preempted."""
    assert job.seq is not None
    return -job.generated, job.request.prompt_tokens, job.seq.admission


class Decisions:
    """The decisions of rules: those that they override are asked for, the others made inline.

    What rules override is called and checked, and its failures are reported as their own. The
    batcher makes the other decisions itself, as the methods of `Rules` say; it calls these
    where that costs nothing beside what follows.

    Attributes:
        victim, headroom, reserved, chunk_tokens, shares_scheduled, keeps_generated: the
            methods of the rules; None where they are not overridden.
        whole: whether an admission takes all blocks of a prompt. Those from a tier, or from
            another server, are needed at once.
        publishes: whether blocks can be hit as soon as they are scheduled.
        keeps: whether generated blocks may stay cached.
        chunked: whether prompts are chunked without asking the rules.
        plain: whether a chunk is what is left of a prompt and of the step: nothing is asked.

    Raises (when one is called):
        PolicyError: the rules failed, or gave an answer that cannot be.
    """

    __slots__ = (
        *("chunk_tokens", "headroom", "keeps_generated", "reserved", "shares_scheduled"),
        *("chunked", "keeps", "plain", "publishes", "victim", "whole"),
    )

    chunk_tokens: Callable[[Job, int, StepState], int] | None
    headroom: Callable[[Job, StepState], int | None] | None
    keeps_generated: Callable[..., bool] | None
    reserved: Callable[[Job, StepState], Reserve] | None
    shares_scheduled: Callable[[Job, StepState], bool] | None
    victim: Callable[[Sequence[Job], StepState, Job | None], Job] | None

    def __init__(self, rules: Rules, *, chunked: bool, tiers: bool) -> None:
        rules.bind()
        for name in DECISIONS:
            method = find_override(rules, name)
            setattr(self, name, None if method is None else _checked(rules, name, method))
        self.whole = rules.reserve == "prompt" or tiers
        self.publishes = rules.commit == "scheduled"
        self.keeps = rules.generated == "cached" or self.keeps_generated is not None
        self.chunked = chunked and self.chunk_tokens is None
        asks = self.reserved is not None or self.shares_scheduled is not None
        self.plain = (
            self.chunked
            and self.whole
            and rules.max_chunk is None
            and not (self.publishes or asks)
        )


def _checked(rules: Rules, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method of rules, and checks its answer."""
    fits, expected = DECISIONS[name]

    def decision(subject: Job | Sequence[Job], *arguments: Any, **options: Any) -> Any:
        try:
            answer = method(subject, *arguments, **options)
        except FAILURES as error:
            raise_policy_error(rules, name, error)
        if not fits(answer, subject, *arguments):
            about = f" of {subject!r}" if isinstance(subject, Job) else ""
            why = f"{shorten(repr(answer))}: give {expected}"
            raise wrong_answer(rules, f"{name}(){about}", why)
        return answer

    return decision


def _is_flag(answer: object, *_: object) -> bool:
    return type(answer) is bool


def _is_chunk(answer: object, job: Job, tokens: int, state: StepState) -> bool:
    del job
    if type(answer) is not int or not 0 <= answer <= tokens:
        return False
    if not state.chunks:
        return bool(answer or state.decoding) and (answer <= state.budget or answer == tokens)
    return answer <= state.budget


DECISIONS: Mapping[str, tuple[Callable[..., bool], str]] = {
    "victim": (lambda answer, jobs, *_: answer in jobs, "one of the jobs with blocks"),
    "headroom": (
        lambda answer, *_: answer is None or (type(answer) is int and answer >= 0),
        "a number of blocks, 0 or more, or None",
    ),
    "reserved": (
        lambda answer, *_: answer in _VALUES["reserve"],
        ", ".join(_VALUES["reserve"]),
    ),
    "chunk_tokens": (
        _is_chunk,
        "whole tokens that the prompt and the step have left; 0 only beside other work",
    ),
    "shares_scheduled": (_is_flag, "True or False"),
    "keeps_generated": (_is_flag, "True or False"),
}
"""The methods of rules that decide: whether an answer can be, from it and the arguments, and
what an error asks for instead."""


class TokenRatio:
    """The share of the future tokens of running jobs that an admission leaves room for.

    It falls with each decode step, by a 600th of the way from its first value to 0.14 of that,
    the least. A preemption sets it to the share of their tokens that the remaining jobs have
    generated, with 20 more each. When nothing runs it is reset. O(1) for any number of steps.

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
