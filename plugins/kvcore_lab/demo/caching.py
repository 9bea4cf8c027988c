"""The savings of a cache: a model generates the same tokens without one, and with two kinds.

Nothing here imports a tensor library: tensors come from the generator, and attention is
computed by their own methods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, ClassVar, Unpack

import attrs

from kvcore.cache import KVCache
from kvcore.engine import (
    AttendOptions,
    Backend,
    Generator,
    RaggedBatch,
    Rotation,
    Tensor,
    TensorLayout,
)
from kvcore.errors import InputError, PluginError
from kvcore.models.spec import ModelSpec
from kvcore.request import Request, block_keys
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import format_bytes, format_seconds
from kvcore_cli.report.tables import BARS, counted
from kvcore_lab.demo.one_head import OneHead

DTYPE = "fp64"
"""The three add numbers in different orders; in double precision no token depends on that."""

_TIME_RANGES = 4
"""Number of ranges of the output whose step times are reported."""

_BARS, _STEPS = 20, 5
"""Largest number of bars that show step times, and least number of steps of one of them.

A bar is the median of its steps, so that one slow step is not seen in it.
"""

_SHOWN_TOKENS = 12
"""Number of output tokens that are shown."""


def token_projections(prompt: int, output: int, *, cached: bool) -> int:
    """Return how many tokens are projected to keys and values to generate `output` tokens.

    Each step computes one token. Without a cache it projects the whole sequence so far;
    with one (`cached`) the first step projects the prompt, and every later one the token
    that the step before it computed. The last token is projected in neither case.

    Raises:
        InputError: no prompt token, or none to generate.
    """
    if prompt < 1 or output < 1:
        msg = f"{output} new tokens after a prompt of {prompt}: give at least 1 of each"
        raise InputError(msg)
    if cached:
        return prompt + output - 1
    return output * prompt + output * (output - 1) // 2


class NoCache:
    """Keeps no K/V of a sequence: every step computes the whole sequence again.

    An `Attend` of a generator, and the base of caches, which keep K/V between steps.

    Attributes:
        name: name in reports.
        cached_tokens: number of tokens whose K/V is kept, and not computed again in a step.
        projected: number of rows of K/V that the model has projected, by layer.
    """

    name: ClassVar[str] = "none"

    def __init__(self) -> None:
        self.cached_tokens = 0
        self.projected: Counter[int] = Counter()

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        rotation: Rotation | None = None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Count and keep the rows, and attend to all tokens so far: see `Attend`."""
        self.projected[layer] += len(keys)
        keys = keys if rotation is None else rotation.rotate(keys)
        return self.attend(layer, queries, keys, values, **options)

    @property
    def bytes(self) -> int:
        """Bytes of K/V held between steps, reserved slots included."""
        return 0

    def begin(self, tokens: int) -> None:
        """Allocate slots for the `tokens` tokens of a step, if the cache needs any."""

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Attend from the step's tokens in `layer`, whose K/V a cache keeps, to all so far.

        Shapes are those of `Attend`.
        """
        del layer
        return causal_attention(queries, keys, values, **options)

    def end(self, tokens: int) -> None:
        """Count the `tokens` tokens of the step as cached, if they are kept."""


class DenseSequenceCache(NoCache):
    """Keeps K/V in one tensor a layer, reserved at the first step for `capacity` tokens."""

    name = "dense"

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes(self) -> int:
        """The reserved tensors of all layers."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Append to the layer's tensors, and attend to the tokens in them."""
        if layer not in self._layers:
            self._layers[layer] = (self._reserved(keys), self._reserved(values))
        end = self.cached_tokens + len(keys)
        stored = self._layers[layer]
        for tensor, rows in zip(stored, (keys, values), strict=True):
            tensor[self.cached_tokens : end] = rows
        return causal_attention(queries, *(tensor[:end] for tensor in stored), **options)

    def end(self, tokens: int) -> None:
        """Count the tokens, which are in the tensors of every layer."""
        self.cached_tokens += tokens

    def _reserved(self, rows: Tensor) -> Tensor:
        return rows.new_empty((self._capacity, *rows.shape[1:]))


class RecordingCache(DenseSequenceCache):
    """A dense cache that keeps the queries as well, and the outputs of attention.

    Attributes:
        outputs: outputs of the heads of each layer in the last step, `[tokens, heads, width]`.
    """

    name = "recording"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.outputs: dict[int, Tensor] = {}
        self._queries: dict[int, list[Tensor]] = {}

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Keep the queries, scaled as the scores are, and attend as a dense cache does."""
        scale = options.get("scale")
        factor = queries.shape[-1] ** -0.5 if scale is None else scale
        self._queries.setdefault(layer, []).extend(queries * factor)
        self.outputs[layer] = super().attend(layer, queries, keys, values, **options)
        return self.outputs[layer]

    def head(self, layer: int, head: int, position: int) -> OneHead:
        """Return the attention of a query head for the token at `position`, its query scaled.

        Copies the K/V up to `position`, and ignores windows.
        """
        query = self._queries[layer][position]
        keys, values = self._layers[layer]
        kv_head = head // (len(query) // keys.shape[1])
        seen = (tensor[: position + 1, kv_head].tolist() for tensor in (keys, values))
        return OneHead(query[head].tolist(), *seen)


class PagedSequenceCache(NoCache):
    """Keeps K/V in blocks that a `KVCache` allocates one by one, on a backend."""

    name = "paged"

    def __init__(self, backend: Backend, request: Request) -> None:
        """Open a sequence without blocks in a cache with as many blocks as the backend."""
        super().__init__()
        layout = backend.layout
        self._backend = backend
        self._cache = KVCache(layout.blocks, layout.block_size, ids=True)
        self._sequence = self._cache.open(request, 0)
        self._plan: Any = None

    @property
    def bytes(self) -> int:
        """The blocks of the sequence, the last one perhaps partly filled."""
        return self._sequence.blocks * self._backend.layout.bytes_per_block

    def begin(self, tokens: int) -> None:
        """Allocate the missing blocks, and make the plan of the step."""
        self._cache.extend(self._sequence, tokens)
        table = self._cache.block_table(self._sequence)
        self._plan = self._backend.plan(RaggedBatch([table], [self.cached_tokens], [tokens]))

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Store into the blocks, and attend through the block table."""
        self._backend.store(layer, self._plan, keys, values)
        return self._backend.attend(layer, self._plan, queries, **options)

    def end(self, tokens: int) -> None:
        """Commit the computed tokens."""
        self._cache.commit(self._sequence, tokens)
        self.cached_tokens += tokens


@attrs.frozen
class Generation:
    """The output generated with one cache, and its cost.

    Attributes:
        cache: name of the cache.
        tokens: generated token ids.
        token_projections: number of projections of a token to its key and value, in each
            layer.
        step_seconds: wall time of each step.
        step_kv_bytes: bytes of K/V held after each step.
        step_projections: number of tokens that each step projected, in each layer.
    """

    cache: str
    tokens: tuple[int, ...]
    token_projections: int
    step_seconds: tuple[float, ...]
    step_kv_bytes: tuple[int, ...]
    step_projections: tuple[int, ...]


def generate(
    generator: Generator,
    cache: NoCache,
    prompt: Sequence[int],
    output: int,
    *,
    seed: int = 0,
    done: Callable[[int], None] | None = None,
) -> Generation:
    """Generate `output` tokens after `prompt`, one per step, computing what is not cached.

    Args:
        generator: the model, loaded.
        cache: the cache of the sequence, empty, or none.
        prompt: token ids of the prompt.
        output: number of tokens to generate.
        seed: seed of the samples.
        done: called with 1 after every step.

    Raises:
        PluginError: the generator returned no token.
    """
    tokens, seconds, kept_bytes = list(prompt), [], []
    projected = [0]
    for step in range(output):
        started = perf_counter()
        cached = cache.cached_tokens
        new = tokens[cached:]
        cache.begin(len(new))
        batch = RaggedBatch(
            lengths=[len(new)],
            token_ids=new,
            positions=list(range(cached, len(tokens))),
            output_indices=[step],
            seeds=[seed],
        )
        (token,) = generator.forward(batch, cache)
        cache.end(len(new))
        seconds.append(perf_counter() - started)
        kept_bytes.append(cache.bytes)
        projected.append(max(cache.projected.values(), default=0))
        if token is None:
            msg = f"generator {generator.name!r} gave no token for place {step} of its output"
            raise PluginError(msg)
        tokens.append(token)
        if done is not None:
            done(1)
    return Generation(
        cache.name,
        tuple(tokens[len(prompt) :]),
        projected[-1],
        tuple(seconds),
        tuple(kept_bytes),
        tuple(after - before for before, after in pairwise(projected)),
    )


def with_and_without_cache(
    generator: Generator,
    backend: Backend,
    *,
    prompt_tokens: int = 10,
    output: int = 100,
    block_size: int = 16,
    seed: int = 0,
    threads: int | None = None,
    done: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Generate the same tokens without a cache, with a dense one, and with a paged one.

    Costs O((prompt_tokens + output)³) in attention, because of the first.

    Args:
        generator: the model; must not be in use.
        backend: stores the paged cache; must not be in use.
        prompt_tokens: number of tokens of the prompt, which is random.
        output: number of tokens to generate.
        block_size: number of tokens in a block of the paged cache.
        seed: seed of the prompt and of the samples.
        threads: number of threads that compute; None: 1 for a tiny model, else one a CPU.
        done: called with 1 after every step of each of the three.

    Raises:
        InputError: there is no prompt token, none to generate, or no block size.
        PluginError: the three outputs differ, so a plugin is broken; names it and the
            first token that differs.
    """
    token_projections(prompt_tokens, output, cached=True)
    model = generator.spec
    capacity = prompt_tokens + output - 1
    layout = TensorLayout(
        blocks=-(-capacity // max(block_size, 1)),
        block_size=block_size,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        value_dim=model.value_dim,
        dtype=DTYPE,
    )
    random = Random(seed)  # noqa: S311 - a prompt, no secret
    prompt = [random.randrange(generator.vocabulary) for _ in range(prompt_tokens)]
    request = Request(
        id=0,
        prompt_tokens=prompt_tokens,
        output_tokens=output,
        keys=block_keys(prompt, block_size),
        key_tokens=block_size,
    )
    with backend.limit_threads(threads, model):
        generator.load(backend, DTYPE)
        backend.allocate(layout)
        # The first steps of a process are slow, whatever they do.
        generate(generator, NoCache(), prompt, 1, seed=seed)
        generations = [
            generate(generator, cache, prompt, output, seed=seed, done=done)
            for cache in (
                NoCache(),
                DenseSequenceCache(capacity),
                PagedSequenceCache(backend, request),
            )
        ]
    _check_equal(generations, generator, backend)
    return generations


def causal_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """Return the causal attention of the last tokens of a sequence.

    Shapes and options are those of `Backend.attend`, but K/V is that of the whole sequence,
    `[all tokens, kv_heads, width]`. Source: Vaswani et al., "Attention Is All You Need", 2017.
    """
    tokens, heads, width = queries.shape
    context = len(keys) - tokens
    group = heads // keys.shape[1]
    keys, values = (
        tensor.repeat_interleave(group, 1).transpose(0, 1) for tensor in (keys, values)
    )
    # A triangle, moved right by the context; a window cuts off its lower left, except sinks.
    seen = queries.new_ones(tokens, context + tokens).tril(context)
    if window is not None:
        recent = seen.triu(context - window + 1)
        recent[:, :sinks] = seen[:, :sinks]
        seen = recent
    scores = queries.transpose(0, 1) @ keys.transpose(1, 2)
    scores *= width**-0.5 if scale is None else scale
    weights = scores.masked_fill_(seen == 0, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1)


def _check_equal(
    generations: Sequence[Generation], generator: Generator, backend: Backend
) -> None:
    """Raise PluginError if the generations have different tokens."""
    first, *others = generations
    for other in others:
        for index, pair in enumerate(zip(first.tokens, other.tokens, strict=True)):
            if pair[0] != pair[1]:
                msg = (
                    f"output token {index} is {pair[0]} without a cache and {pair[1]} with the "
                    f"{other.cache} one, though the model is the same: generator "
                    f"{generator.name!r} or backend {backend.name!r} is broken"
                )
                raise PluginError(msg)


@attrs.frozen
class CachingReport:
    """Report on the same output, generated without a cache and with two kinds of it.

    Attributes:
        generations: the three generations, without a cache first; their tokens are equal.
        model: shape of the model.
        dtype: dtype of the computation.
        prompt_tokens: number of tokens of the prompt.
        block_size: number of tokens in a block of the paged cache.
    """

    generations: Sequence[Generation]
    model: ModelSpec
    dtype: str
    prompt_tokens: int
    block_size: int

    @property
    def sections(self) -> list[Section]:
        """The whole report on the three generations."""
        return [self.headline, self.table, self.times, self.chart(), self.reading]

    @property
    def headline(self) -> str:
        """The model, the lengths, and the output that all three have in common."""
        tokens = self.generations[0].tokens
        shown = " ".join(map(str, tokens[:_SHOWN_TOKENS])) + (
            " ..." if len(tokens) > _SHOWN_TOKENS else ""
        )
        model = self.model
        return (
            f"{model.name}: {counted(model.layers, 'layer')} with "
            f"{counted(model.query_heads, 'query head')} and "
            f"{counted(model.kv_heads, 'K/V head')}, in {self.dtype}.\n"
            f"{counted(self.prompt_tokens, 'prompt token')}, then "
            f"{counted(len(tokens), 'new one')}: equal in all three, {shown}"
        )

    @property
    def table(self) -> Table:
        """The counts, one row for each cache."""
        rows = [
            [
                generation.cache,
                f"{generation.token_projections:,}",
                format_bytes(generation.step_kv_bytes[0]),
                format_bytes(generation.step_kv_bytes[-1]),
            ]
            for generation in self.generations
        ]
        return Table(["cache", "token projections", "K/V after step 1", "K/V at the end"], rows)

    @property
    def reading(self) -> str:
        """Explanation of the counts."""
        steps, first = len(self.generations[0].tokens), self.prompt_tokens
        naive, *cached = (generation.token_projections for generation in self.generations)
        sums = [f"{first + index:,}" for index in range(min(steps, 3))]
        if steps > len(sums):
            sums[2:] = ["...", f"{first + steps - 1:,}"]
        fewer = f", {naive / cached[0]:,.0f} times fewer" if steps > 1 else ""
        return (
            "A token projection makes the key and the value of one token, in every layer. "
            "Without a cache each step makes those of all tokens so far: "
            f"{' + '.join(sums)} = {naive:,}. With one, the first step makes the prompt's, and "
            "each later one those of the one token that is new: "
            f"{first:,} + {steps - 1:,} = {cached[0]:,}{fewer}.\n"
            "The dense cache reserves room for the last token before the first is there; the "
            f"paged one takes a block of {counted(self.block_size, 'token')} when it needs "
            "one. It reads a block table in every step, a constant cost that shows in a tiny "
            "model alone: compare how the times grow."
        )

    def chart(self) -> Chart:
        """Return a chart of step times and K/V, over the output."""
        ends = [end for _, end in _bounds(len(self.generations[0].tokens), _BARS)]
        times, sizes = {}, {}
        for generation in self.generations:
            medians = _medians(generation.step_seconds, _BARS)
            times[generation.cache] = list(zip(ends, medians, strict=True))
            sizes[generation.cache] = [(end, generation.step_kv_bytes[end - 1]) for end in ends]
        panels = [
            Panel("time of a step, median", times, format_seconds),
            Panel("K/V held", sizes, lambda size: format_bytes(int(size))),
        ]
        title, across = self.headline.partition(".\n")[0], "generated token"
        return Chart(title, self.headline, across, panels, logarithmic=False)

    @property
    def times(self) -> Table:
        """Median time of a step in each range of the output, and a line of bars."""
        bounds = _bounds(len(self.generations[0].tokens), _TIME_RANGES)
        spans = (f"{n + 1:,}" if n + 1 == end else f"{n + 1:,}–{end:,}" for n, end in bounds)
        count = max(_TIME_RANGES, min(_BARS, len(self.generations[0].tokens) // _STEPS))
        lines = [_medians(generation.step_seconds, count) for generation in self.generations]
        longest = max(map(max, lines))
        bars = [
            "".join(BARS[int(time / longest * (len(BARS) - 1))] for time in line)
            for line in lines
        ]
        rows = [
            [
                generation.cache,
                *map(format_seconds, _medians(generation.step_seconds, _TIME_RANGES)),
                bar,
            ]
            for generation, bar in zip(self.generations, bars, strict=True)
        ]
        return Table(["time of a step", *spans, ""], rows)

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        fields = (
            *("name", "layers", "query_heads", "kv_heads"),
            *("head_dim", "hidden_size", "parameters"),
        )
        no_tokens = attrs.filters.exclude("tokens")  # they are equal in all
        return {
            "model": {name: getattr(self.model, name) for name in fields},
            "dtype": self.dtype,
            "tokens": self.generations[0].tokens,
            "caches": [attrs.asdict(each, filter=no_tokens) for each in self.generations],
        }


def _bounds(steps: int, parts: int) -> list[tuple[int, int]]:
    """Return the bounds of `parts` ranges of about equal length, none of them empty."""
    parts = min(parts, steps)
    cuts = [steps * part // parts for part in range(parts + 1)]
    return list(pairwise(cuts))


def _medians(seconds: Sequence[float], parts: int) -> list[float]:
    """Return the median of each of `parts` ranges of steps."""
    return [median(seconds[begin:end]) for begin, end in _bounds(len(seconds), parts)]
