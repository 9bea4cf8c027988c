"""How long steps take: latency models, executors of steps, and times of many steps at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, isqrt
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, Protocol, TypeAlias

from kvcore.cache import ServedCache
from kvcore.errors import InputError, PolicyError
from kvcore.models.cost import attended_pairs
from kvcore.models.spec import ModelSpec
from kvcore.plugins.base import FAILURES, Plugin, raise_policy_error
from kvcore.request import Key, Request
from kvcore.serving.job import Job
from kvcore.units import PS_PER_NS, PS_PER_S

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


class StepTerms(NamedTuple):
    """The terms of a model whose step time is one line, for the core in C.

    With one attention window, a step of `tokens` tokens, of which `decode` are those of
    decoding sequences, takes `overhead + (fine >> 32) + read * context` picoseconds, where
    `fine` is `by_tokens(tokens) + sequence * decode + pair * attended_pairs`.
    """

    overhead: int
    by_tokens: Callable[[int], int]
    sequence: int
    pair: int
    read: int


class LatencyModel(Plugin):
    """Predicts the time of a step of a server. More work never takes less time.

    The easy tier is one function, `seconds`, which is called for every single step.
    The full tier is `pieces`: the time is the largest of a few lines in the context of the
    decoding sequences. Their coefficients are whole picoseconds, so that the core sums k
    steps in closed form and gets exactly the time of k single steps.
    """

    kind: ClassVar[str] = "latency"
    jumps: bool = True
    """Whether the lines hold while contexts grow. If not, they hold only for `work.context`,
    and `pieces` is called for every step. False where only `seconds` is defined."""

    frontend: float = 0.0
    """Seconds from the arrival of a request until it can be planned: HTTP, tokenizer. May be
    an option."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Time steps by `seconds`, without jumps, in a class that defines that alone."""
        super().__init_subclass__(**options)
        if "seconds" in vars(cls) and "pieces" not in vars(cls):
            cls.jumps, cls.pieces = False, LatencyModel.pieces  # type: ignore[method-assign]

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
            is_time = 0 <= seconds < inf and seconds * PS_PER_S < inf
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

    def terms_of_step(self) -> StepTerms | None:
        """Return terms from which the core in C computes what `pieces` returns; None: it asks.

        They count if the class that defines `pieces` defines them too.
        """
        return None

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
    def drafter(self) -> Plugin | None:
        """The drafter of which steps verify drafts (`SpeculativeExecutor`); None: none does."""

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
    drafter: Plugin | None = None

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
            and all(type(coefficient) is int for coefficient in piece)
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


class StepTimes:
    """The times of consecutive decode steps of the same sequences, in picoseconds.

    Step i takes `max(a + b * i)` over a few lines, since the context grows by the same with
    every step. All methods are exact; they cost O(lines that are the maximum somewhere).

    Attributes:
        line: (a, b) of the only line; None: there are several.
    """

    __slots__ = ("_lines", "line")

    def __init__(
        self, pieces: Sequence[LinearPiece], context: Sequence[int], growth: Sequence[int]
    ) -> None:
        """Turn lines in the context into lines in the number of the step.

        Args:
            pieces: lines in the context.
            context: the context of the first step, by attention window.
            growth: tokens that each step adds to it.
        """
        self._lines: Sequence[tuple[int, int]] = ()
        if len(growth) == 1:
            start, more = context[0], growth[0]
            if len(pieces) == 1:
                a, b = pieces[0]
                self.line: tuple[int, int] | None = (a + b * start, b * more)
                return
            lines = [(a + b * start, b * more) for a, b in pieces]
        else:
            lines = [
                (
                    piece[0] + sum(b * c for b, c in zip(piece[1:], context, strict=True)),
                    sum(b * g for b, g in zip(piece[1:], growth, strict=True)),
                )
                for piece in pieces
            ]
        top, steepest = max(lines), max(line[1] for line in lines)
        if top[1] == steepest:
            lines = [top]
        self._lines, self.line = lines, lines[0] if len(lines) == 1 else None

    def segments(self, steps: int) -> Iterable[tuple[int, int, int]]:
        """Return (ps of the first step, ps that each adds, steps) of straight parts."""
        line = self.line
        return self._parts(steps) if line is None else ((*line, steps),)

    def total(self, steps: int) -> int:
        """Return the picoseconds that the first `steps` steps take together."""
        if self.line is not None:
            a, b = self.line
            return steps * a + b * (steps * (steps - 1) // 2)
        return sum(_sum(first, slope, count) for first, slope, count in self._parts(steps))

    def reach(self, time_ps: int, steps: int) -> int:
        """Return the number of steps (at least 1) until `time_ps` have passed, or `steps`."""
        if self.line is not None:
            a, b = self.line
            if steps * a + b * (steps * (steps - 1) // 2) < time_ps:
                return steps
            return _steps_for(a, b, time_ps)
        done = 0
        for first, slope, count in self._parts(steps):
            part_ps = _sum(first, slope, count)
            if part_ps >= time_ps:
                return done + _steps_for(first, slope, time_ps)
            time_ps -= part_ps
            done += count
        return steps

    def _parts(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """Yield the straight parts of the first `steps` steps."""
        lines, step = self._lines, 0
        while step < steps:
            _, b, a = max((a + b * step, b, a) for a, b in lines)
            # Where a steeper line rises above this one.
            overtakes = [(a - c) // (d - b) + 1 for c, d in lines if d > b]
            end = min([*overtakes, steps])
            yield a + b * step, b, end - step
            step = end


def _sum(first: int, slope: int, count: int) -> int:
    """Return first + (first + slope) + ..., `count` terms."""
    return count * first + slope * (count * (count - 1) // 2)


def _steps_for(first: int, slope: int, time: int) -> int:
    """Return the fewest steps, at least 1, whose sum is at least `time`; there are such."""
    if time <= 0:
        return 1
    if not slope:
        return -(-time // first)
    # The root of first·k + slope·k(k-1)/2 = time, rounded down: if not exact it is one short.
    p = 2 * first - slope
    steps = (isqrt(p * p + 8 * slope * time) - p) // (2 * slope)
    return steps + (_sum(first, slope, steps) < time)


_STRETCH: Final = 256
"""Tokens of context that share one sample of a latency model without lines."""


class ServiceEstimates:
    """Estimates for schedulers (`ServiceTimes`), from the cache and the latency model."""

    def __init__(self, cache: ServedCache, latency: LatencyModel, max_seqs: int) -> None:
        self._cache = cache
        self._latency = latency
        self._windows = latency.windows
        self._max_seqs = max_seqs
        self._decode_pieces: dict[int, Sequence[LinearPiece]] = {}

    def probe(self, request: Request, now: int) -> int:
        """Return how many prompt tokens of `request` would hit."""
        return self._cache.probe(request, now) * self._cache.geometry.block_size

    def prefill_ns(self, tokens: int, context: int) -> int:
        """Return the ns to prefill `tokens` tokens after `context` in a step of their own."""
        if not tokens:
            return 0
        windows = self._windows
        pairs = tuple(attended_pairs(context, tokens, window) for window in windows)
        work = StepWork(tokens, pairs, 0, (0,) * len(windows))
        return self._latency.duration(work) // PS_PER_NS

    def decode_ns(self, tokens: int, context: int, sequences: int) -> int:
        """Return the ns in which `sequences` sequences generate `tokens` tokens each.

        Exact for a latency model with lines. For one without, each token takes the time at the
        end of its stretch of contexts: the stretches are fixed, so that the remaining time
        never rises while tokens are generated.
        """
        count, end, time_ps = min(sequences, self._max_seqs), context + tokens, 0
        part = self._by_lines if self._latency.jumps else self._by_samples
        while context < end:
            context, took_ps = part(count, context, end)
            time_ps += took_ps
        return time_ps // PS_PER_NS

    def _by_lines(self, count: int, context: int, end: int) -> tuple[int, int]:
        """Return the next context at which a window fills, or `end`, and the ps up to it."""
        windows = self._windows
        full = (window - 1 for window in windows if window is not None)
        upto = min((length for length in full if context < length < end), default=end)
        growth = [count if window is None or context + 1 < window else 0 for window in windows]
        pieces = self._decode_pieces.get(count)
        if pieces is None:
            pieces = self._decode_pieces[count] = decode_lines(self._latency, count)
        times = StepTimes(pieces, self._step(count, context).context, growth)
        return upto, times.total(upto - context)

    def _by_samples(self, count: int, context: int, end: int) -> tuple[int, int]:
        """Return where the stretch of `context` ends, at most `end`, and the ps up to it."""
        border = (context // _STRETCH + 1) * _STRETCH
        upto = min(border, end)
        longest = self._latency.duration(self._step(count, border - 1))
        return upto, (upto - context) * longest

    def _step(self, count: int, context: int) -> StepWork:
        """Return a step in which `count` sequences of `context` tokens generate one more."""
        pairs = [min(context + 1, window or context + 1) for window in self._windows]
        return StepWork(0, (0,) * len(pairs), count, tuple(count * pair for pair in pairs))
