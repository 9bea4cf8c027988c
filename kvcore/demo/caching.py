"""What a cache saves: one model generates the same tokens without, and with two kinds of it.

Nothing here imports a tensor library: tensors come from the generator, and attention is made
of their own methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter
from typing import Any, ClassVar, Unpack

import attrs

from kvcore.cache import KVCache
from kvcore.engine import (
    AttendOptions,
    Backend,
    Generator,
    Rows,
    Tensor,
    TensorLayout,
    TokenStep,
)
from kvcore.errors import PluginError
from kvcore.models.cost import token_projections
from kvcore.request import Request, block_keys

DTYPE = "fp64"
"""The three ways add in different orders: in double precision no token depends on that."""


class Keeping(ABC):
    """A way to keep the K/V of one sequence between steps; what its `Attend` is.

    Attributes:
        kept: tokens whose K/V is there, so that a step need not compute them again.
        projected: rows of K/V that the model projected and handed over, by layer.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        """Start with nothing."""
        self.kept = 0
        self.projected: Counter[int] = Counter()

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        **how: Unpack[AttendOptions],
    ) -> Tensor:
        """Count the rows, keep them, and attend to all there are: see `Attend`."""
        self.projected[layer] += len(keys)
        return self.attend(layer, queries, keys, values, **how)

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of K/V held between steps, room that is reserved included."""

    def begin(self, tokens: int) -> None:  # noqa: B027 - room is not always made
        """Make room for the `tokens` tokens of a step."""

    @abstractmethod
    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Keep K/V of the step's tokens in `layer`, and attend to all so far."""

    def end(self, tokens: int) -> None:
        """Note that the `tokens` tokens of the step are kept in every layer."""
        self.kept += tokens


class Nothing(Keeping):
    """Keeps no K/V: every step computes the whole sequence again."""

    name = "none"

    @property
    def bytes(self) -> int:
        """Nothing."""
        return 0

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Attend among the step's tokens, which are all there are."""
        del layer
        return causal_attention(queries, keys, values, **options)

    def end(self, tokens: int) -> None:
        """Forget them."""


class Dense(Keeping):
    """Keeps K/V in one piece a layer, reserved at the first step for `capacity` tokens."""

    name = "dense"

    def __init__(self, capacity: int) -> None:
        """Reserve nothing yet: what the rows look like is not known."""
        super().__init__()
        self._capacity = capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes(self) -> int:
        """The reserved pieces of all layers."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Append to the layer's piece, and attend to what it holds."""
        if layer not in self._layers:
            self._layers[layer] = (self._reserved(keys), self._reserved(values))
        upto = self.kept + len(keys)
        held = self._layers[layer]
        for piece, rows in zip(held, (keys, values), strict=True):
            piece[self.kept : upto] = rows
        return causal_attention(queries, *(piece[:upto] for piece in held), **options)

    def _reserved(self, rows: Tensor) -> Tensor:
        return rows.new_empty((self._capacity, *rows.shape[1:]))


class Paged(Keeping):
    """Keeps K/V in blocks that a `KVCache` hands out one by one, on a backend."""

    name = "paged"

    def __init__(self, backend: Backend, request: Request) -> None:
        """Open a sequence without blocks in a pool as large as the backend's."""
        super().__init__()
        layout = backend.layout
        self._backend = backend
        self._cache = KVCache(layout.blocks, layout.block_size, ids=True)
        self._sequence = self._cache.open(request, 0)
        self._plan: Any = None

    @property
    def bytes(self) -> int:
        """The blocks of the sequence, the last perhaps full in part."""
        return self._sequence.blocks * self._backend.layout.bytes_per_block

    def begin(self, tokens: int) -> None:
        """Allocate the blocks that are missing."""
        self._cache.extend(self._sequence, tokens)
        table = self._cache.block_table(self._sequence)
        self._plan = self._backend.plan(Rows([table], [self.kept], [tokens]))

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Store into the blocks, and attend through the block table."""
        self._backend.store(layer, self._plan, keys, values)
        return self._backend.attend(layer, self._plan, queries, **options)

    def end(self, tokens: int) -> None:
        """Commit what is computed."""
        self._cache.commit(self._sequence, tokens)
        super().end(tokens)


@attrs.frozen
class Generation:
    """What one way of keeping K/V came to.

    Attributes:
        keeping: its name.
        tokens: what was generated.
        projections: how often a token was projected to keys and values, counted; in each
            layer so often.
        step_seconds, step_bytes: the wall time of each step, and the K/V held after it.
    """

    keeping: str
    tokens: tuple[int, ...]
    projections: int
    step_seconds: tuple[float, ...]
    step_bytes: tuple[int, ...]


def generate(
    generator: Generator,
    keeping: Keeping,
    prompt: Sequence[int],
    output: int,
    *,
    seed: int = 0,
    done: Callable[[int], None] | None = None,
) -> Generation:
    """Generate `output` tokens after `prompt`, a step each, of the tokens not kept so far.

    `generator` is loaded. `done` is told 1 after every step.
    """
    tokens, seconds, held = list(prompt), [], []
    for place in range(output):
        started = perf_counter()
        kept = keeping.kept
        new = tokens[kept:]
        positions = list(range(kept, len(tokens)))
        keeping.begin(len(new))
        step = TokenStep(new, positions, [len(new)], [place], [seed])
        (token,) = generator.forward(step, keeping)
        keeping.end(len(new))
        seconds.append(perf_counter() - started)
        held.append(keeping.bytes)
        if token is None:
            msg = f"generator {generator.name!r} gave no token for place {place} of its output"
            raise PluginError(msg)
        tokens.append(token)
        if done is not None:
            done(1)
    return Generation(
        keeping.name,
        tuple(tokens[len(prompt) :]),
        max(keeping.projected.values(), default=0),
        tuple(seconds),
        tuple(held),
    )


def with_and_without_cache(
    generator: Generator,
    backend: Backend,
    *,
    prompt_tokens: int = 10,
    output: int = 100,
    block_size: int = 16,
    seed: int = 0,
    done: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Generate the same tokens without a cache, with a dense one, and with a paged one.

    The prompt is random, of `seed`. Neither `generator` nor `backend` may be in use yet.
    Costs O((prompt_tokens + output)³) in attention, because of the first.

    Raises:
        InputError: no prompt token, none to generate, or no block size.
        PluginError: the three are not equal, so a plugin is broken: which, and where.
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
    generator.load(backend, DTYPE)
    backend.allocate(layout)
    random = Random(seed)  # noqa: S311 - a prompt, no secret
    prompt = [random.randrange(generator.vocabulary) for _ in range(prompt_tokens)]
    request = Request(
        id=0,
        prompt_tokens=prompt_tokens,
        output_tokens=output,
        keys=block_keys(prompt, block_size),
        key_tokens=block_size,
    )
    # The first steps of a process are slow, whatever they do.
    generate(generator, Nothing(), prompt, 1, seed=seed)
    generations = [
        generate(generator, keeping, prompt, output, seed=seed, done=done)
        for keeping in (Nothing(), Dense(capacity), Paged(backend, request))
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
    """Return the attention of the last tokens of a sequence to all up to each of them.

    Shapes and options are those of `Backend.attend`, but for K/V of the whole sequence:
    `[all tokens, kv_heads, ...]`. Source: Vaswani et al., "Attention Is All You Need", 2017.
    """
    tokens, heads, width = queries.shape
    context = len(keys) - tokens
    group = heads // keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
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
    first, *others = generations
    for other in others:
        for place, pair in enumerate(zip(first.tokens, other.tokens, strict=True)):
            if pair[0] != pair[1]:
                msg = (
                    f"output token {place} is {pair[0]} without a cache and {pair[1]} with the "
                    f"{other.keeping} one, though the model is the same: generator "
                    f"{generator.name!r} or backend {backend.name!r} is broken"
                )
                raise PluginError(msg)
