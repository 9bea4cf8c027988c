"""A batch of a Hugging Face model whose windows and states are in cache groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from transformers.generation import GenerationMode

from kvcore import Backend, InputError
from kvcore.cache import Sequence
from kvcore.engine import RaggedBatch
from kvcore_engine.compaction import Compactor
from kvcore_engine.generator._hf_model import (
    PackedCache,
    TextLength,
    attention_numbers,
    body_of,
    layer_types,
    spec_of,
)
from kvcore_engine.generator.hf_batch import PagedBatch
from kvcore_engine.groups import GroupedAttend, GroupedLayers, grouped_attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcore_plugins.cache_groups import GroupedCache


class GroupedBatch(PagedBatch):
    """The cache of one batch: row i of the batch is the sequence i of a `GroupedCache`.

    Prompts are computed one after the other, in chunks that end where a state can be cached, so
    that equal ones hit as well. Sequences are not forked, and their tokens not taken back.
    """

    _cache: GroupedCache  # type: ignore[assignment]
    _attend: GroupedAttend

    def __init__(
        self,
        cache: GroupedCache,
        backend: Backend,
        serials: Iterator[int],
        compactor: Compactor,
        model: PreTrainedModel,
        text_length: TextLength | None,
    ) -> None:
        body = body_of(model)
        super().__init__(cache, backend, body, serials, compactor, text_length)  # type: ignore[arg-type]
        self._layers = GroupedLayers.from_groups(spec_of(model), cache.groups)
        self._numbers = attention_numbers(layer_types(model))

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Do nothing: `attention` stores the K/V."""

    def attention(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Store the step's K/V and attend, in the blocks of the group of the layer."""
        rows = (self._packed(part) for part in (queries, keys, values))
        out = self._attend(self._numbers.get(layer, layer), *rows, **options)
        return self.spread(out, queries.shape[0], queries.shape[2])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of `indices`, each once; close all other rows.

        Raises:
            InputError: a row is repeated.
        """
        if len(set(indices.tolist())) < len(indices):
            _refuse("repeated rows")
        super().batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back.

        Raises:
            InputError: there are some to take.
        """
        if tokens_to_remove:
            _refuse("tokens that are taken back")

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Compute all but the last token of the prompts, each in its chunks."""
        cache = self._cache
        for prompt in prompts:
            self._open(tuple(prompt), length := len(prompt))
            sequence = cache.sequences[self.sequences[-1].id]
            while rest := length - 1 - (done := sequence.computed):
                tokens = cache.chunk_tokens(
                    done, rest + 1, length, length, sequence.boundaries, length
                )
                tokens = min(tokens, rest)
                cache.extend(sequence, done + tokens - sequence.tokens)
                batch = self._ragged_batch([sequence], [tokens])
                self._run([sequence], batch, prompt[done : done + tokens])
                cache.commit(sequence, tokens)

    def _table(self, sequence: Sequence) -> tuple[()]:
        """Return no ids: there is a table for each group."""
        return ()

    def _begin_attention(self, batch: RaggedBatch) -> None:
        """Make the plans of a step, and the states that it begins with."""
        self._attend = self._through(self.sequences, batch)
        self.states = self._attend.states

    def _through(self, sequences: list[Sequence], batch: RaggedBatch) -> GroupedAttend:
        tables = [self._cache.sequences[sequence.id].tables for sequence in sequences]
        return grouped_attend(self._backend, self._layers, tables, batch)

    def _packed_cache(self, sequences: list[Sequence], batch: RaggedBatch) -> PackedCache:
        """Return the cache of a ragged batch of prompts."""
        return PackedCache(self._through(sequences, batch), self._numbers)


def generate_through_groups(model: PreTrainedModel) -> Callable[..., Any]:
    """Return `model.generate`; first of all it refuses what groups cannot do."""
    generate = model.generate

    @wraps(generate)
    def checked(
        inputs: Any = None,
        generation_config: Any = None,
        *arguments: Any,
        assistant_model: Any = None,
        **options: Any,
    ) -> Any:
        config = deepcopy(model.generation_config)
        own = {} if generation_config is None else generation_config.to_diff_dict()
        config.update(**own | options)
        mode = config.get_generation_mode(assistant_model)
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            _refuse(mode.value.replace("_", " "))
        return generate(inputs, generation_config, *arguments, **options)

    return checked


def _refuse(what: str) -> NoReturn:
    msg = (
        f"{what} with cache groups, which neither fork sequences nor take tokens back: "
        "generate greedily or by samples, or make a KVCache for a model without states"
    )
    raise InputError(msg)
