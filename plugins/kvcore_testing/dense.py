"""Attention over plain growing tensors, to compare paged caches with. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

import attrs

from kvcore.engine import (
    Attend,
    AttendOptions,
    Backend,
    DeviceMemory,
    Generator,
    RaggedBatch,
    Rotation,
)
from kvcore.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch", globals())


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name."""
    from kvcore_plugins.codec.dtypes import TORCH_DTYPES  # noqa: PLC0415 - torch

    return TORCH_DTYPES[name]


@attrs.frozen
class HostTensors:
    """The part of a backend that a generator needs to load: tensors in host memory.

    Attributes:
        dtype: dtype of numbers for which no other is given.
    """

    dtype: str = "fp64"

    def memory(self) -> DeviceMemory:
        """Return that the memory is unknown."""
        return DeviceMemory(0, None, None)

    def tensor(self, data: Any, dtype: str | None = None) -> Tensor:
        """Return `data` as a tensor, as `Backend.tensor` does."""
        tensor = torch.as_tensor(data)
        if dtype is None and not tensor.is_floating_point():
            return tensor
        return torch.as_tensor(data, dtype=torch_dtype(dtype or self.dtype))


def loaded(generator: Generator, dtype: str = "fp64") -> Generator:
    """Load `generator` on the host, without a pool, and return it."""
    generator.load(cast("Backend", HostTensors(dtype)), dtype)
    return generator


def _copied(tokens: Iterable[int]) -> list[int]:
    return list(tokens)


@attrs.define
class Text:
    """A sequence that is generated.

    Attributes:
        tokens: token ids, the prompt's first; a copy of the given ones.
        prompt: number of tokens of the prompt.
        seed: seed of its samples.
        computed: number of tokens that have K/V.
    """

    tokens: list[int] = attrs.field(converter=_copied)
    prompt: int = attrs.Factory(lambda self: len(self.tokens), takes_self=True)
    seed: int = 0
    computed: int = 0

    @property
    def left(self) -> int:
        """Number of tokens without K/V: one while it decodes."""
        return len(self.tokens) - self.computed


def next_batch(texts: Sequence[Text], counts: Sequence[int]) -> RaggedBatch:
    """Return the batch that computes `counts` more tokens of each text, without block tables.

    Counts are at most `Text.left`. A text whose last token is computed generates the next one.
    """
    spans = [range(t.computed, t.computed + n) for t, n in zip(texts, counts, strict=True)]
    return RaggedBatch(
        token_ids=[t.tokens[i] for t, span in zip(texts, spans, strict=True) for i in span],
        positions=[i for span in spans for i in span],
        lengths=list(counts),
        output_indices=[
            len(t.tokens) - t.prompt if n == t.left else None
            for t, n in zip(texts, counts, strict=True)
        ],
        seeds=[t.seed for t in texts],
    )


class DenseCache:
    """Keeps K and V of each sequence, in each layer, as one growing tensor, without blocks."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, int], tuple[Tensor, Tensor]] = {}

    def attend(self, names: Sequence[Hashable], lengths: Sequence[int]) -> Attend:
        """Return the `Attend` of a step that computes `lengths` more tokens of `names`."""

        def attend(
            layer: int,
            queries: Tensor,
            keys: Tensor,
            values: Tensor,
            *,
            rotation: Rotation | None = None,
            **options: Unpack[AttendOptions],
        ) -> Tensor:
            keys = keys if rotation is None else rotation.rotate(keys)
            rows = (torch.split(x, list(lengths)) for x in (queries, keys, values))
            return torch.cat(
                [
                    attention(q, *self._grown((name, layer), k, v), **options)
                    for name, q, k, v in zip(names, *rows, strict=True)
                ]
            )

        return attend

    def _grown(
        self, place: tuple[Hashable, int], keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        if place in self._kept:
            before = self._kept[place]
            keys, values = torch.cat((before[0], keys)), torch.cat((before[1], values))
        self._kept[place] = keys, values
        return keys, values


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return causal attention of the last tokens of a sequence, computed in fp64.

    `softmax(scale · q · kᵀ) · v` for each head, over `[tokens, heads, width]`; shapes and
    options are those of `Backend.attend`. `positions` are those of the keys, `[K/V heads,
    keys]`; None: 0, 1, 2 and so on. O(queries · keys) memory.
    """
    group = queries.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", queries.double(), k) * scale
    if positions is None:
        positions = torch.arange(len(keys))[None]
    here, there = positions[:, len(keys) - len(queries) :, None], positions[:, None]
    seen = there <= here
    if window is not None:
        seen &= (there > here - window) | (there < sinks)
    shared = len(scores) // len(seen)  # by as many query heads
    scores = scores.masked_fill(~seen.repeat_interleave(shared, 0), float("-inf"))
    if sink_logits is not None:
        column = sink_logits.double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(queries.dtype)


def advance(
    generator: Generator, texts: Sequence[Text], counts: Sequence[int], attend: Attend
) -> list[int | None]:
    """Compute `counts` more tokens of each text; append and return the generated tokens."""
    drawn = generator.forward(next_batch(texts, counts), attend)
    for text, count, token in zip(texts, counts, drawn, strict=True):
        text.computed += count
        if token is not None:
            text.tokens.append(token)
    return drawn


def generate(
    generator: Generator,
    texts: Sequence[Text],
    output: int,
    chunk: int | None = None,
    watch: Callable[[Attend, list[int]], Attend] | None = None,
) -> list[list[int]]:
    """Generate until each text has `output` tokens, in one batch; return these tokens.

    The K/V of all texts are computed again, at most `chunk` tokens a step; None: whole. Given
    the `Attend` of a step and the text of each row, `watch` returns the one to call.
    """
    cache = DenseCache()
    for text in texts:
        text.computed = 0
    while running := [i for i, t in enumerate(texts) if len(t.tokens) - t.prompt < output]:
        batch = [texts[i] for i in running]
        counts = [min(text.left, chunk or text.left) for text in batch]
        attend = cache.attend(running, counts)
        if watch is not None:
            rows = [i for i, n in zip(running, counts, strict=True) for _ in range(n)]
            attend = watch(attend, rows)
        advance(generator, batch, counts, attend)
    return [text.tokens[text.prompt :] for text in texts]
