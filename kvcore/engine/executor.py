"""Serve a workload on tensors: what is simulated elsewhere is computed here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import Any, Literal, NoReturn, Unpack

from kvcore.cache import BlockPool, Ids, KVCache
from kvcore.engine.backend import Backend, Rows, Tensor, TensorLayout
from kvcore.engine.generator import AttendOptions, Generator, TokenStep
from kvcore.engine.tokens import TokenStream
from kvcore.errors import InputError, KvcoreError, PolicyError
from kvcore.models.spec import ModelSpec
from kvcore.plugins import policy_error
from kvcore.request import Key
from kvcore.serving import Job, LatencyModel, StepResult, StepWork
from kvcore.serving.calibration import MeasuredStep
from kvcore.serving.latency import SimulatedExecutor
from kvcore.units import PS_PER_NS

Clock = Literal["model", "wall"]


class TensorExecutor:
    """Computes every step: a generator's K/V in the blocks of a backend.

    The rows of a step are those of its prefill chunks, in the order of the plan, then one
    for each job that decodes. Costs O(blocks of the jobs) a step besides.

    Args:
        cache: whose block tables say where K/V lies.
        generator, backend: what computes, and where; neither may be in use.
        latency: how long a step takes by the model's clock, and what schedulers ask.
        dtype, clock, stop_at_eos, seed: as for `run`.

    Attributes:
        streams: the tokens of the requests that have run, by id.
        measured: the steps so far, under the wall clock.

    Raises:
        InputError, StorageError: as `run` does.
    """

    name = "run"
    jumps = False

    def __init__(
        self,
        cache: KVCache,
        generator: Generator,
        backend: Backend,
        latency: LatencyModel,
        *,
        dtype: str = "fp32",
        clock: Clock = "model",
        stop_at_eos: bool = False,
        seed: int = 0,
    ) -> None:
        _check(cache, generator, clock, stop_at_eos=stop_at_eos)
        self.mode: str = clock
        self.latency = latency
        self._timed = SimulatedExecutor(latency)
        self.plugins = (latency, generator, backend)
        self.streams: dict[int | str, TokenStream] = {}
        self.measured: list[MeasuredStep] = []
        self._cache = cache
        self._size = cache.geometry.block_size
        self._generator, self._backend = generator, backend
        self._wall = clock == "wall"
        self._ends = generator.ends if stop_at_eos else frozenset()
        self._seed = seed
        generator.bind()
        backend.bind()
        generator.load(backend, dtype)
        backend.allocate(tensor_layout(generator.spec, cache.pool.blocks, self._size, dtype))

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Compute one step; return its time by the clock of the run, and what it ended."""
        began = perf_counter_ns()
        step = Step(self._size)
        for job, tokens in chunks:
            draws = job.computed + tokens == job.target and job.output_tokens
            self._add(step, job, job.computed, tokens, job.generated if draws else None)
        for job in decoding:
            self._add(step, job, job.length, 1, job.generated)
        ended, named = self._take(step, self._forward(step))
        if not self._wall:
            took_ps = self._timed.run(work, chunks, decoding).took_ps
        else:
            self._backend.synchronize()
            took_ps = (perf_counter_ns() - began) * PS_PER_NS
            self._measure(step, work, took_ps)
        return StepResult(took_ps, ended, named)

    def decode_times(
        self, jobs: int, context: Sequence[int], growth: Sequence[int]
    ) -> NoReturn:
        """Refuse: every step has to be run."""
        del context, growth
        msg = f"steps of {jobs} jobs are computed, not foreseen: run them one by one"
        raise InputError(msg)

    def _add(self, step: Step, job: Job, context: int, tokens: int, draw: int | None) -> None:
        """Add the rows of `job`: `tokens` tokens after `context` that are in its blocks."""
        request, seq = job.request, job.seq
        assert seq is not None
        stream = self.streams.get(request.id)
        if stream is None:
            stream = TokenStream(request, self._generator.vocabulary, self._seed)
            self.streams[request.id] = stream
        step.add(
            job,
            stream,
            self._cache.block_table(seq),
            stream.between(context, context + tokens),
            context,
            draw,
        )

    def _forward(self, step: Step) -> list[int | None]:
        """Run the generator, whose K/V goes to the backend and whose queries read it there."""
        generator = self._generator
        plan = self._ask("plan", Rows(step.tables, step.contexts, step.lengths))
        try:

            def attend(
                layer: int,
                queries: Tensor,
                keys: Tensor,
                values: Tensor,
                **how: Unpack[AttendOptions],
            ) -> Tensor:
                self._ask("store", layer, plan, keys, values)
                return self._ask("attend", layer, plan, queries, **how)

            return generator.forward(
                TokenStep(step.tokens, step.positions, step.lengths, step.draws, step.seeds),
                attend,
            )
        except KvcoreError:
            raise
        except Exception as error:
            raise policy_error(generator, "forward", error) from error

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the backend; what it raises is told as its own."""
        try:
            return getattr(self._backend, method)(*arguments, **options)
        except KvcoreError:
            raise
        except Exception as error:
            raise policy_error(self._backend, method, error) from error

    def _take(
        self, step: Step, drawn: Sequence[int | None]
    ) -> tuple[list[tuple[Job, int]], list[tuple[Job, Sequence[Key]]]]:
        """Add the new tokens to their streams; return jobs that ended, and new keys."""
        ended: list[tuple[Job, int]] = []
        named: list[tuple[Job, Sequence[Key]]] = []
        wanted = [draw is not None for draw in step.draws]
        if [token is not None for token in drawn] != wanted:
            name, count = self._generator.name, len(step.draws)
            msg = (
                f"generator plugin {name!r}: forward() returned {drawn!r} for {count} "
                f"sequences, of which {sum(wanted)} draw: a token id for each of these, None "
                "for the others"
            )
            raise PolicyError(msg)
        for job, stream, token in zip(step.jobs, step.streams, drawn, strict=True):
            if token is None:
                continue
            token = stream.add(token)  # noqa: PLW2901 - what is known already counts
            output = job.output_tokens
            if token in self._ends and len(stream.output) < output:
                output = len(stream.output)
                ended.append((job, output))
            keys = stream.new_keys(output)
            if keys:
                named.append((job, keys))
        return ended, named

    def _measure(self, step: Step, work: StepWork, took_ps: int) -> None:
        decoding = step.contexts[len(step.contexts) - work.decode :]
        context = sum(decoding) + work.decode
        line = len(self.measured) + 2
        self.measured.append(MeasuredStep(line, work.prefill, work.decode, context, took_ps))


def tensor_layout(spec: ModelSpec, blocks: int, block_size: int, dtype: str) -> TensorLayout:
    """Return how the K/V of a model lies in a pool of blocks.

    Raises:
        InputError: the model stores a latent, not K/V heads.
    """
    if spec.latent:
        msg = (
            f"model {spec.name!r} stores a latent (MLA), no K/V heads, so it cannot be run on "
            "paged K/V; take one with attention MHA, GQA or MQA"
        )
        raise InputError(msg)
    return TensorLayout(
        blocks=blocks,
        block_size=block_size,
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        dtype=dtype,
    )


def _check(cache: KVCache, generator: Generator, clock: str, *, stop_at_eos: bool) -> None:
    """Refuse a clock or an end that is not there, and a cache that only counts blocks."""
    msg = ""
    if clock not in ("model", "wall"):
        msg = f"clock={clock!r} is not known; there are: model, wall"
    elif stop_at_eos and clock != "wall":
        msg = (
            "stop_at_eos under the model's clock: requests there have the output they ask for, "
            "as in a simulation; take clock='wall'"
        )
    elif stop_at_eos and not generator.ends:
        msg = (
            f"stop_at_eos with generator {generator.name!r}, which has no token that ends a "
            "text: leave it out"
        )
    elif not isinstance(cache.pool, BlockPool):
        msg = "run with a cache that only counts blocks: make it with ids=True, or with a trace"
    if msg:
        raise InputError(msg)


class Step:
    """The rows of a step, as they are put together.

    Attributes:
        jobs, streams: of each sequence.
        tables, contexts, lengths: as in `Rows`.
        tokens, positions, draws, seeds: as in `TokenStep`.
    """

    __slots__ = (
        *("contexts", "draws", "jobs", "lengths", "positions", "seeds", "size"),
        *("streams", "tables", "tokens"),
    )

    def __init__(self, block_size: int) -> None:
        """Start empty."""
        self.size = block_size
        self.jobs: list[Job] = []
        self.streams: list[TokenStream] = []
        self.tables: list[Ids] = []
        self.contexts: list[int] = []
        self.lengths: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.draws: list[int | None] = []
        self.seeds: list[int] = []

    def add(
        self,
        job: Job,
        stream: TokenStream,
        table: Ids,
        tokens: Sequence[int],
        context: int,
        draw: int | None,
    ) -> None:
        """Add a sequence that computes `tokens` after the `context` tokens it has.

        `table` is without the blocks it has forgotten: K/V carries its position, so that it
        is attended to alike wherever it lies.
        """
        assert job.seq is not None
        kept = context - job.seq.forgotten_tokens
        end = context + len(tokens)
        self.jobs.append(job)
        self.streams.append(stream)
        self.tables.append(table[: -(-(kept + len(tokens)) // self.size)])
        self.contexts.append(kept)
        self.lengths.append(len(tokens))
        self.tokens.extend(tokens)
        self.positions.extend(range(context, end))
        self.draws.append(draw)
        self.seeds.append(stream.seed)
