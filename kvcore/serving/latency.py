"""How long steps take: latency models, executors of steps, and the simulated one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeAlias

from kvcore.errors import InputError, PolicyError
from kvcore.models.spec import ModelSpec
from kvcore.plugins.base import FAILURES, Plugin, raise_policy_error
from kvcore.request import Key
from kvcore.serving.job import Job
from kvcore.units import PS_PER_S

if TYPE_CHECKING:
    from kvcore.serving.drafter import Drafter

Windows: TypeAlias = tuple[int | None, ...]
"""Attention windows in tokens, None for attention without a window."""

LinearPiece: TypeAlias = tuple[int, ...]
"""`(a, b)`: a + b x context picoseconds. With more attention windows `(a, b, c, ...)`."""


class StepWork:
    """The work of one step, as far as its time depends on it.

    Attributes:
        prefill: prompt tokens, of all chunks together, and drafts that are verified.
        attended_pairs: (query, key) pairs these attend to, by attention window.
        decode: sequences that generate a token.
        context: (query, key) pairs of those tokens, by attention window: without a window
            the lengths of the sequences, the new token included.
    """

    __slots__ = ("attended_pairs", "context", "decode", "prefill")

    def __init__(
        self,
        prefill: int = 0,
        attended_pairs: tuple[int, ...] = (0,),
        decode: int = 0,
        context: tuple[int, ...] = (0,),
    ) -> None:
        self.prefill = prefill
        self.attended_pairs = attended_pairs
        self.decode = decode
        self.context = context

    def __eq__(self, other: object) -> bool:
        """Return True if `other` is the same work."""
        return type(other) is StepWork and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the code that makes an equal object."""
        return (
            f"StepWork(prefill={self.prefill}, attended_pairs={self.attended_pairs}, "
            f"decode={self.decode}, context={self.context})"
        )

    def _fields(self) -> tuple[int, tuple[int, ...], int, tuple[int, ...]]:
        return self.prefill, self.attended_pairs, self.decode, self.context


class LatencyModel(Plugin):
    """Predicts the time of a step of a server. More work never takes less time.

    The easy tier is one function, `seconds`, which is called for every single step.
    The full tier is `pieces`: the time is the largest of a few lines in the context of the
    decoding sequences. Their coefficients are whole picoseconds, so that the core sums k
    steps in closed form and gets exactly the time of k single steps.
    """

    kind: ClassVar[str] = "latency"
    jumps: ClassVar[bool] = True
    """Whether the lines hold while contexts grow. If not, they hold only for `work.context`,
    and `pieces` is called for every step. False where only `seconds` is defined."""

    frontend: float = 0.0
    """Seconds from the arrival of a request until it can be planned: HTTP, tokenizer. May be
    an option."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Set `jumps` to False in a class that defines `seconds` alone."""
        super().__init_subclass__(**options)
        if "seconds" in vars(cls) and "pieces" not in vars(cls):
            cls.jumps = False

    @property
    def windows(self) -> Windows:
        """The attention windows that the model distinguishes: tokens, or None for no window."""
        return (None,)

    def seconds(self, work: StepWork) -> float:
        """Return the seconds that `work` takes. The easy tier."""
        del work
        msg = f"latency plugin {self.name!r} defines neither seconds() nor pieces(): define one"
        raise PolicyError(msg)

    def pieces(self, work: StepWork) -> Sequence[LinearPiece]:
        """Return the lines whose maximum is the time of `work`, in picoseconds. The full tier.

        A line has one slope for each of `windows`. Where `jumps` is true the lines depend on
        `prefill`, `attended_pairs` and `decode` alone. By default there is one flat line, at
        the nearest picosecond to `seconds(work)`.

        Raises:
            PolicyError: `seconds` failed, or did not return a finite number from 0 on.
        """
        try:
            seconds = self.seconds(work)
        except FAILURES as error:
            raise_policy_error(self, "seconds", error)
        try:
            is_time = 0 <= seconds < inf
        except (TypeError, ValueError):
            is_time = False
        if not is_time:
            hint = " (is a `return` missing?)" if seconds is None else ""
            msg = (
                f"latency plugin {self.name!r}: seconds({work}) returned {seconds!r}{hint}; "
                "give a finite number of seconds, 0 or more"
            )
            raise PolicyError(msg)
        return ((round(seconds * PS_PER_S), *(0 for _ in self.windows)),)

    def duration(self, work: StepWork) -> int:
        """Return the picoseconds that `work` takes.

        Raises:
            PolicyError: the model failed, or its lines are no time.
        """
        context = work.context
        try:
            pieces = self.pieces(work)
            if len(pieces) == 1 == len(context):  # as a rule: there is nothing to compare
                a, b = pieces[0]
                times = [a + b * context[0]]
                longest = times[0]
            else:
                times = [
                    piece[0] + sum(b * c for b, c in zip(piece[1:], context, strict=True))
                    for piece in pieces
                ]
                longest = max(times)
            is_time = longest >= 0 and type(sum(times)) is int
        except FAILURES as error:
            raise_policy_error(self, "pieces", error)
        if not is_time:
            wrong = next((time for time in times if type(time) is not int), longest)
            _refuse(self, f"{work} takes {wrong!r} ps; give whole picoseconds, 0 or more")
        return longest

    def coefficients(self) -> dict[str, Any]:
        """Return the coefficients of the model, for the header of a trace."""
        return {}

    def for_model(self, model: ModelSpec | None, parameters: int = 0) -> LatencyModel:
        """Return the latency model of another model on the same server: a draft model's.

        Args:
            model: the model; None: the one that is served.
            parameters: additional weights that every token uses, such as those of heads.

        Raises:
            InputError: the latency model is not computed from a model; unless overridden.
        """
        del model, parameters
        msg = (
            f"latency plugin {self.name!r} knows the times of one model alone: take `roofline` "
            "beside a drafter that computes"
        )
        raise InputError(msg)


class StepResult(NamedTuple):
    """The result of an executor for one step.

    Attributes:
        took_ps: picoseconds the step took.
        ended: jobs whose text ended before its output was complete, with the number of their
            output tokens.
        named: jobs that share generated blocks, with the block keys that are known now.
        verified: if drafts are verified, the number of drafts and of accepted ones, by
            decoding job.
    """

    took_ps: int
    ended: Sequence[tuple[Job, int]] = ()
    named: Sequence[tuple[Job, Sequence[Key]]] = ()
    verified: Sequence[tuple[int, int]] = ()


class Executor(Protocol):
    """Runs steps. The loop is the same for every executor.

    Attributes:
        name: the name in the header of a trace.
        mode: the clock of the run: `model` or `wall`.
        jumps: whether many decode steps may be run at once, in the time of `decode_lines`.
        latency: the latency model that schedulers estimate times with.
    """

    name: str
    mode: str
    jumps: bool
    latency: LatencyModel

    @property
    def plugins(self) -> Sequence[Plugin]:
        """The plugins of the executor, for the header of a trace."""

    @property
    def drafter(self) -> Drafter | None:
        """Drafts tokens, which steps verify (`SpeculativeExecutor`); None: no step does."""

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Run one step.

        Args:
            work: the size of the step.
            chunks: the jobs that prefill, and how many tokens of each.
            decoding: the jobs that generate a token.
        """


class SimulatedExecutor:
    """Computes nothing: a latency model gives the time of each step."""

    name = "simulate"
    mode = "model"
    drafter: Drafter | None = None

    def __init__(self, latency: LatencyModel) -> None:
        self.latency = latency
        self.plugins = (latency,)
        self.jumps = latency.jumps

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Return the time of the step.

        Raises:
            PolicyError: the latency model failed, or returned no time.
        """
        del chunks, decoding
        return StepResult(self.latency.duration(work))


def decode_lines(latency: LatencyModel, jobs: int) -> Sequence[LinearPiece]:
    """Return the lines of decode steps of `jobs` jobs: those that are the highest somewhere.

    Raises:
        PolicyError: the latency model failed, or a line falls, or is no line.
    """
    nothing = (0,) * len(latency.windows)
    try:
        pieces = latency.pieces(StepWork(0, nothing, jobs, nothing))
        sound = max(piece[0] for piece in pieces) >= 0 and all(
            len(piece) == 1 + len(nothing)
            and all(type(number) is int for number in piece)
            and min(piece[1:]) >= 0
            for piece in pieces
        )
    except FAILURES as error:
        raise_policy_error(latency, "pieces", error)
    if not sound:
        _refuse(
            latency,
            f"the lines of {jobs} decoding sequences are {list(pieces)!r}; give whole "
            f"picoseconds, and a slope of 0 or more for each window of {latency.windows!r}",
        )
    return _highest(pieces)


def _refuse(latency: LatencyModel, why: str) -> NoReturn:
    msg = f"latency plugin {latency.name!r}: {why}"
    raise PolicyError(msg)


def _highest(pieces: Sequence[LinearPiece]) -> Sequence[LinearPiece]:
    """Return `pieces` without lines that are below another one whatever the context."""
    kept: list[LinearPiece] = []
    for piece in sorted(pieces, reverse=True):
        if not any(all(a >= b for a, b in zip(other, piece, strict=True)) for other in kept):
            kept.append(piece)
    return kept
