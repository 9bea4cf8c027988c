"""The executor that computes the steps of the serving loop on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

import attrs

from kvcore.cache import BlockPool, Ids, KVCache
from kvcore.cache.sequence import Sequence as HeldSequence
from kvcore.engine.backend import Backend, TensorLayout
from kvcore.engine.batch import RaggedBatch, row_positions
from kvcore.engine.generator import Attend, Generator, attend_through
from kvcore.errors import InputError, KvcoreError, PolicyError, StorageError
from kvcore.models.codec import Codec
from kvcore.models.cost import attended_pairs
from kvcore.models.spec import ModelSpec
from kvcore.plugins import FAILURES, Plugin, policy_error
from kvcore.request import Key
from kvcore.serving import Job, LatencyModel, StepResult, StepWork
from kvcore.serving.latency import SimulatedExecutor
from kvcore.units import PS_PER_NS, format_bytes
from kvcore_engine.compaction import Compactor
from kvcore_engine.graphs import StepGraphs
from kvcore_engine.retention.token_retention import token_retention
from kvcore_engine.tokens import TokenStream
from kvcore_plugins.drafter.measured_acceptance import DraftedStep
from kvcore_plugins.latency.measured_steps import MeasuredStep

if TYPE_CHECKING:
    from kvcore.serving.drafter import Drafter
    from kvcore_engine.mover import TensorMover
    from kvcore_tiers.hierarchy import Tiers

Clock = Literal["model", "wall"]
"""Clock of a run: the latency model's, or the wall clock of this machine."""


@attrs.frozen
class ScheduledSequence:
    """The new tokens of one job in a step; the batch has a column for each field.

    Attributes:
        job, seq: the job, and its sequence in the cache.
        stream: the token ids of its request.
        block_table, context: as in `RaggedBatch`.
        position: position of the first new token in the sequence.
        token_ids: the new tokens.
        output_index: as in `RaggedBatch`.
    """

    job: Job
    seq: HeldSequence
    stream: TokenStream
    block_table: Ids
    context: int
    position: int
    token_ids: list[int]
    output_index: int | None


class Computing(TypedDict, total=False):
    """How tensors are computed: options of a run, all but `threads` of `TensorExecutor` too.

    Attributes:
        dtype: dtype of the computation, one of `TENSOR_DTYPES`.
        codec: codes the stored K/V, such as `int8`; None: K/V is stored as it is computed.
        clock: `model`: a step takes the duration that the latency model returns, so that a
            trace is that of `simulate` except for its header; `wall`: the time that it takes
            on this machine. Requests arrive by the same clock, without waiting for it.
        stop_at_eos: whether a text ends at an end-of-text token; wall clock only.
        seed: seed of token ids and samples.
        threads: number of threads of the host that compute; None: one for a tiny model, else
            the default of the backend's library, up to the CPUs of this process. Set for the
            run alone.
    """

    dtype: str
    codec: Codec | type[Codec] | str | None
    clock: Clock
    stop_at_eos: bool
    seed: int
    threads: int | None


class TensorExecutor:
    """Computes every step with a generator, its K/V in the blocks of a backend.

    The batch of a step has the prefill chunks, in the order of the plan, then one token for
    each decoding job. Costs O(blocks of the jobs) a step besides the computation.

    Args:
        cache: the cache with the block tables of the sequences.
        generator: computes K/V and next tokens; must not be in use.
        backend: stores K/V and computes attention; must not be in use.
        latency: gives the duration of a step under the model's clock, and the estimates
            for schedulers.
        dtype, codec, clock, stop_at_eos, seed: see `Computing`; the codec is built.
        texts: whether requests have token ids of their own, for tiers that outlive the run.

    Attributes:
        streams: token ids of the requests that have run, by request id.
        measured: duration of each step so far, under the wall clock.
        reads: what attention of generated tokens has read.
        graphs: replays decode steps; None: each kernel is launched.
        drafted: outcome of the drafts of each step of a sequence, in a derived class that
            verifies drafts.

    Raises:
        InputError: the arguments do not fit one another, or the generator or the backend
            cannot compute in `dtype` or in this shape.
        StorageError: the weights or the pool do not fit into the device's memory.
    """

    name = "run"
    jumps = False
    drafter: Drafter | None = None

    def __init__(
        self,
        cache: KVCache,
        generator: Generator,
        backend: Backend,
        latency: LatencyModel,
        *,
        dtype: str = "fp32",
        codec: Codec | None = None,
        clock: Clock = "model",
        stop_at_eos: bool = False,
        seed: int = 0,
        texts: bool = False,
    ) -> None:
        _check(cache, generator, clock, stop_at_eos=stop_at_eos)
        self.mode: str = clock
        self.latency = latency
        self._timed = SimulatedExecutor(latency)
        self.plugins: tuple[Plugin, ...] = (latency, generator, backend)
        self.streams: dict[int | str, TokenStream] = {}
        self.measured: list[MeasuredStep] = []
        self.drafted: list[DraftedStep] = []
        self._cache = cache
        self._generator, self._backend = generator, backend
        self._wall = clock == "wall"
        self._eos_token_ids = generator.eos_token_ids if stop_at_eos else frozenset()
        self._seed = seed
        for plugin in (generator, backend):
            plugin.check_unused()  # they are bound once nothing refuses the run
        layout = self._layout(generator.spec, dtype, codec)
        _check_codec(backend, layout)
        _check_memory(generator, backend, layout)
        generator.bind()
        backend.bind()
        generator.load(backend, dtype)
        backend.allocate(layout)
        self._compactor = Compactor.for_run(cache, backend, generator)
        self.graphs = StepGraphs.of(generator, backend)
        self.reads = self._compactor.reads
        self._mover: TensorMover | None = None
        if cache.tiers is not None:
            from kvcore_engine.mover import TensorMover, identity  # noqa: PLC0415 - most have none

            whose = identity(cache, generator, backend, seed, texts=texts)
            self._mover = TensorMover(cast("Tiers", cache.tiers), backend, whose)

    def _layout(self, spec: ModelSpec, dtype: str, codec: Codec | None) -> TensorLayout:
        """Return the layout of the pool for a model."""
        blocks, block_size = self._cache.pool.blocks, self._cache.geometry.block_size
        return tensor_layout(spec, blocks, block_size, dtype, codec)

    def close(self, *, whole: bool) -> None:
        """Close the tiers; if `whole`, after all queued blocks are written."""
        if self._mover is not None:
            self._mover.close(whole=whole)

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Compute one step; return its duration by the clock of the run, and its effects."""
        began_ns = perf_counter_ns()
        sequences = [self._prefilled(job, tokens) for job, tokens in chunks]
        sequences += [self._scheduled(job, job.length, 1, job.generated) for job in decoding]
        ended, named = self._append(sequences, self._forward(sequences))
        if self._wall:
            took_ps = self._spent_ps(began_ns, sequences, work)
        else:
            took_ps = self._timed.run(work, (), ()).took_ps
        return StepResult(took_ps, ended, named)

    def _spent_ps(
        self, began_ns: int, sequences: Sequence[ScheduledSequence], work: StepWork
    ) -> int:
        """Return the picoseconds of the step that began at `began_ns`, and record them."""
        self._backend.synchronize()
        took_ns = perf_counter_ns() - began_ns
        if self._mover is not None:
            # Time in which the loop has copied, and waited, since the last step.
            took_ns += self._mover.spent_ns
            self._mover.spent_ns = 0
        self._measure(sequences, work, took_ns * PS_PER_NS)
        return took_ns * PS_PER_NS

    def _prefilled(self, job: Job, tokens: int) -> ScheduledSequence:
        """Return a chunk of a prefill; the last one generates a token if there is output."""
        last = job.computed + tokens == job.target and job.output_tokens
        return self._scheduled(job, job.computed, tokens, job.generated if last else None)

    def _scheduled(
        self, job: Job, position: int, tokens: int, output_index: int | None
    ) -> ScheduledSequence:
        """Return the part of `job` in a step: `tokens` tokens from `position` on."""
        request, seq = job.request, job.seq
        assert seq is not None
        stream = self.streams.get(request.id)
        if stream is None:
            stream = TokenStream(request, self._generator.vocabulary, self._seed)
            self.streams[request.id] = stream
        # The table is without the blocks that a retention policy has dropped. K/V carries
        # its position, so its place in the table makes no difference to attention.
        context = position - seq.dropped_tokens
        return ScheduledSequence(
            job,
            seq,
            stream,
            self._blocks(seq, context + tokens),
            context,
            position,
            stream.token_ids(position, position + tokens),
            output_index,
        )

    def _blocks(self, seq: HeldSequence, tokens: int) -> Ids:
        """Return the ids of the blocks of the first `tokens` tokens that `seq` holds."""
        blocks = -(-tokens // self._cache.geometry.block_size)
        return self._cache.block_table(seq)[:blocks]

    def _batch(self, sequences: Sequence[ScheduledSequence]) -> RaggedBatch:
        """Return the batch of the new tokens of sequences."""
        contexts = [sequence.context for sequence in sequences]
        lengths = [len(sequence.token_ids) for sequence in sequences]
        samplings = [sequence.stream.sampling for sequence in sequences]
        return RaggedBatch(
            block_tables=[sequence.block_table for sequence in sequences],
            contexts=contexts,
            lengths=lengths,
            token_ids=[token for sequence in sequences for token in sequence.token_ids],
            positions=row_positions((sequence.position for sequence in sequences), lengths),
            output_indices=[sequence.output_index for sequence in sequences],
            seeds=[sequence.stream.seed for sequence in sequences],
            samplings=samplings if any(samplings) else (),
            held_positions=self._compactor.held_positions(
                [sequence.seq for sequence in sequences], contexts
            ),
            fuses_rotation=self._backend.fuses_rotation,
        )

    def _forward(
        self,
        sequences: Sequence[ScheduledSequence],
        forward: Callable[[RaggedBatch, Attend], list[Any]] | None = None,
    ) -> list[Any]:
        """Run the generator, or `forward` in its place, over the step; return its outcomes.

        Raises:
            PolicyError: a plugin failed, or there is not a token id, or what `forward` returns,
                for each sequence that samples, and None for the others.
        """
        generator, batch = self._generator, self._batch(sequences)
        run: Callable[[], list[Any]]
        if self.graphs is not None and forward is None:
            observed = self._compactor.attend([sequence.seq for sequence in sequences], batch)
            run = partial(
                self.graphs.forward, batch, observed, partial(self._through, observed)
            )
        else:
            run = partial(forward or generator.forward, batch, self._attend(sequences, batch))
        try:
            outcomes = run()
        except KvcoreError:
            raise
        except FAILURES as error:
            raise policy_error(generator, "forward", error) from error
        wanted = [sequence.output_index is not None or None for sequence in sequences]
        known = generator.vocabulary
        given = [
            None
            if outcome is None
            else forward is not None
            or (isinstance(outcome, Integral) and 0 <= int(outcome) < known)
            for outcome in (outcomes if isinstance(outcomes, list | tuple) else ())
        ]
        if given != wanted:
            msg = (
                f"generator plugin {generator.name!r}: forward() returned {outcomes!r} for "
                f"{len(sequences)} sequences, of which {wanted.count(True)} draw: a token id "
                f"below {known} for each of these, None for the others"
            )
            raise PolicyError(msg)
        return outcomes

    def _attend(self, sequences: Sequence[ScheduledSequence], batch: RaggedBatch) -> Attend:
        """Return the function that stores and attends in each layer of a step."""
        attend = self._compactor.attend([sequence.seq for sequence in sequences], batch)
        return self._through(attend, call(self._backend, self._backend.plan, batch))

    def _through(self, attend: Callable[..., Any], plan: Any) -> Attend:
        """Return the function that stores and attends by a plan, with `attend`."""
        backend = self._backend
        return attend_through(
            plan,
            partial(call, backend, backend.store_rotated),
            partial(call, backend, attend),
        )

    def _append(
        self, sequences: Sequence[ScheduledSequence], tokens: Sequence[int | None]
    ) -> tuple[list[tuple[Job, int]], list[tuple[Job, Sequence[Key]]]]:
        """Append the generated tokens to their streams.

        Returns the jobs that have ended early, with their numbers of output tokens, and the
        jobs that publish their output, with the keys of newly completed blocks.
        """
        ended: list[tuple[Job, int]] = []
        named: list[tuple[Job, Sequence[Key]]] = []
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is None:
                continue
            job, stream = sequence.job, sequence.stream
            # An output key of the request may stand for another token than the sampled one.
            appended = stream.append(token)
            output = job.output_tokens
            if appended in self._eos_token_ids and len(stream.output) < output:
                output = len(stream.output)
                ended.append((job, output))
            keys = stream.new_keys(output)
            if keys:
                named.append((job, keys))
        return ended, named

    def _measure(
        self, sequences: Sequence[ScheduledSequence], work: StepWork, took_ps: int
    ) -> None:
        """Record the duration and the counts of a step, for `calibrate`.

        Decoding sequences are the last of the step.
        """
        decoding = sequences[len(sequences) - work.decode :]
        context = sum(sequence.context for sequence in decoding) + work.decode
        pairs = sum(
            attended_pairs(sequence.context, len(sequence.token_ids))
            for sequence in sequences[: len(sequences) - work.decode]
        )
        line = len(self.measured) + 2
        counts = work.prefill, work.decode, context
        self.measured.append(MeasuredStep(line, *counts, took_ps, pairs))


def call(plugin: Plugin, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method of a plugin; raise its exceptions as PolicyErrors of the plugin."""
    try:
        return method(*arguments, **options)
    except KvcoreError:
        raise
    except FAILURES as error:
        raise policy_error(plugin, method.__name__, error) from error


def tensor_layout(
    spec: ModelSpec, blocks: int, block_size: int, dtype: str, codec: Codec | None = None
) -> TensorLayout:
    """Return the layout of the K/V of a model in a pool of blocks.

    Raises:
        InputError: the model stores a latent (MLA), not K/V heads, or its layers keep different
            things.
    """
    if spec.caches:
        kinds = "; ".join(map(str, spec.caches))
        msg = (
            f"layers of model {spec.name!r} keep different things ({kinds}), so it cannot be "
            "run on one paged K/V: take a GroupedCache of its groups, or another model"
        )
        raise InputError(msg)
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
        codec=codec,
    )


def _check_codec(backend: Backend, layout: TensorLayout) -> None:
    """Raise InputError for a codec that the backend would ignore."""
    codec = layout.codec
    if codec is not None and codec.dtype != layout.dtype and not backend.takes_codecs:
        msg = (
            f"backend {backend.name!r} stores K/V as it is computed, in {layout.dtype}, not as "
            f"codec {codec.name!r} codes it: leave the codec out, or take backend torch-cpu"
        )
        raise InputError(msg)


def _check_memory(generator: Generator, backend: Backend, layout: TensorLayout) -> None:
    """Raise StorageError if the weights, which are made later, do not fit beside the pool."""
    weights, free = generator.weight_bytes(layout.dtype), backend.memory().free
    if weights and free is not None and weights + layout.bytes > free:
        msg = (
            f"the weights of {generator.spec.name} take {format_bytes(weights)} in "
            f"{layout.dtype}, the pool of K/V {format_bytes(layout.bytes)}, and {backend.name} "
            f"has {format_bytes(free)} free: take fewer layers, as in generator "
            f"{generator.name}:layers=2, a smaller dtype or model, or fewer blocks"
        )
        raise StorageError(msg)


def _check(cache: KVCache, generator: Generator, clock: str, *, stop_at_eos: bool) -> None:
    """Raise InputError for an unknown clock, impossible ends, or a cache without ids."""
    msg = ""
    if clock not in ("model", "wall"):
        msg = f"clock={clock!r} is not known; there are: model, wall"
    elif stop_at_eos and clock != "wall":
        msg = (
            "stop_at_eos under the model's clock: requests there have the output they ask for, "
            "as in a simulation; take clock='wall'"
        )
    elif stop_at_eos and not generator.eos_token_ids:
        msg = (
            f"stop_at_eos with generator {generator.name!r}, which has no token that ends a "
            "text: leave it out"
        )
    elif not isinstance(cache.pool, BlockPool):
        msg = "run with a cache that only counts blocks: make it with ids=True, or with a trace"
    if msg:
        raise InputError(msg)
    token_retention(cache)
