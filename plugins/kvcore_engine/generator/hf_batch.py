"""A batch of a Hugging Face model: the rows of one generation, and their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcore import Backend, InputError, KVCache, Request
from kvcore.cache import Ids, Sequence
from kvcore.engine import RaggedBatch, attend_through, row_positions
from kvcore.request import block_keys
from kvcore_engine.compaction import Compactor
from kvcore_engine.generator._hf_model import (
    AttentionCache,
    PackedCache,
    TextLength,
    cache_argument,
)

if TYPE_CHECKING:
    from torch.nn import Module


_OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache_position", "use_cache"}
    | {"logits_to_keep", "return_dict"}
)
"""Arguments of a model that give it tokens, and ask for nothing but their last logits."""


class PagedBatch(AttentionCache):
    """The cache of one batch: row i of the batch is the sequence i of a `KVCache`.

    Give it to a model as `cache` (`past_key_values` before transformers 5.24); a model called
    without one gets a batch of its own. Tokens that the attention mask hides have no slot.
    Blocks are held until `reset`.

    A prompt's blocks are shared with other batches when only its last logits are wanted
    (`logits_to_keep=1`, as `generate` sets it), its positions count its own tokens, and these
    are all that the model is given: then cached tokens are not computed again, and the rest
    is computed without padding.

    Attributes:
        sequences: one sequence for each row; empty before the first step.
    """

    def __init__(
        self,
        cache: KVCache,
        backend: Backend,
        body: Module,
        serials: Iterator[int],
        compactor: Compactor,
        text_length: TextLength | None,
    ) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []
        self._cache = cache
        self._backend = backend
        self._body = body
        self._text_length = text_length
        self._serials = serials
        self._compactor = compactor
        self._columns = 0
        self._step = 0
        self._lengths: list[int] = []
        self._plan: Any = None
        self._attend: Callable[..., Any] = backend.attend

    def begin(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Allocate the slots of a step; return its inputs, without tokens that are cached.

        Raises:
            InputError: padding cannot be left out, this is another batch than before, or
                a text is longer than it may be.
            OutOfBlocks: there are too few free blocks; the batch has freed all its blocks.
        """
        try:
            real = self._real_tokens(inputs)
            if self._text_length is not None:  # Else no position is read from a device.
                positions = inputs.get("position_ids")
                end = self._columns + real.shape[1]
                self._text_length.check(end - 1 if positions is None else int(positions.max()))
            if not self.sequences:
                inputs, real = self._admit(inputs, real)
            self._plan_step(real)
        except Exception:
            self.reset()
            raise
        return inputs

    def end(self) -> None:
        """Commit the tokens of the step, which is computed."""
        for sequence, tokens in zip(self.sequences, self._lengths, strict=True):
            self._cache.commit(sequence, tokens)
        self._columns += self._step

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the K/V of a layer's new tokens, without padding, in their slots.

        Both are `[batch, kv_heads, columns, width]`.
        """
        self._backend.store(layer, self._plan, self._packed(keys), self._packed(values))

    def attention(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        **options: Any,
    ) -> Tensor:
        """Return attention over the stored K/V, `[batch, columns, heads, width]`.

        A hidden token gets zeros.
        """
        out = self._attend(layer, self._plan, self._packed(queries), **options)
        return self.spread(out, queries.shape[0], queries.shape[2])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns so far, padding included, as transformers counts them."""
        return self._columns

    def reset(self) -> None:
        """Close the sequences: shared blocks stay cached, the others are freed."""
        rows, self.sequences, self._columns = self.sequences, [], 0
        for sequence in rows:
            self._cache.close(sequence)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i continue row `beam_idx[i]`, by forks that copy no block."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork every row into `repeats` neighbours."""
        rows = torch.arange(len(self.sequences))
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of `indices`; fork a row for each repetition, close all other rows."""
        before = self.sequences
        chosen = indices.tolist()
        kept: set[int] = set()
        self.sequences = []
        for row in chosen:
            sequence = before[row]
            if row in kept:
                sequence = self._cache.fork(sequence)
            self.sequences.append(sequence)
            kept.add(row)
        for row, sequence in enumerate(before):
            if row not in kept:
                self._cache.close(sequence)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest `-tokens_to_remove` tokens of every row, such as rejected drafts.

        Raises:
            InputError: some of the tokens are in shared blocks, or were there when the
                retention policy made room.
        """
        for sequence in self.sequences:
            self._cache.rollback(sequence, -tokens_to_remove)
        self._columns += tokens_to_remove

    def _real_tokens(self, inputs: dict[str, Any]) -> Tensor:
        """Return which of the step's tokens are no padding, bool `[batch, columns]`.

        Raises:
            InputError: the batch or the attention mask does not continue the steps before,
                or a row ends in padding.
        """
        tokens = inputs.get("input_ids")
        embedded = inputs["inputs_embeds"] if tokens is None else tokens
        batch, columns = embedded.shape[:2]
        if self.sequences and batch != len(self.sequences):
            msg = f"a step of {batch} rows for a paged cache that holds {len(self.sequences)}"
            raise InputError(msg)
        mask = inputs.get("attention_mask")
        if mask is None:
            return torch.ones((batch, columns), dtype=torch.bool, device=embedded.device)
        if mask.shape != (batch, self._columns + columns):
            msg = (
                f"attention mask of shape {list(mask.shape)} for {columns} tokens after "
                f"{self._columns}: a paged cache takes [{batch}, {self._columns + columns}]"
            )
            raise InputError(msg)
        real: Tensor = mask[:, self._columns :].bool()
        stored = [sequence.position for sequence in self.sequences] or [0] * batch
        if mask[:, : self._columns].sum(1).tolist() != stored:
            msg = "the attention mask hides other tokens than it did when they were stored"
            raise InputError(msg)
        if not bool(real[:, -1].all()):
            msg = "a row ends in padding: pad on the left (padding_side='left')"
            raise InputError(msg)
        return real

    def _admit(self, inputs: dict[str, Any], real: Tensor) -> tuple[dict[str, Any], Tensor]:
        """Open the sequences; return the inputs and the real tokens left to compute.

        If only the last logits are wanted, all columns but the last are computed here.
        """
        tokens, columns = inputs.get("input_ids"), real.shape[1]
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(columns, device=real.device)
        # Keys of blocks stand for tokens at positions that count from 0 without padding.
        # Models of images have a row of them for each axis of an image.
        counted = bool(((positions == real.cumsum(1) - 1) | ~real).all())
        if tokens is None or not counted or not _last_logits_only(inputs):
            for length in real.sum(1).tolist():
                self._open((), length)
            return inputs, real
        self._prefill([row[kept].tolist() for row, kept in zip(tokens, real, strict=True)])
        self._columns = columns - 1
        end = real.sum(1, keepdim=True) - 1
        last = {
            "input_ids": tokens[:, -1:],
            "position_ids": end.expand(*positions.shape[:-2], *end.shape),
        }
        return inputs | last, real[:, -1:]

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Compute all but the last token of the prompts, without padding, equal ones once."""
        first: dict[tuple[int, ...], Sequence] = {}
        rows: dict[tuple[int, ...], int] = {}
        for prompt in map(tuple, prompts):
            if prompt not in first:
                rows[prompt] = len(first)
                first[prompt] = self._open(prompt, len(prompt))
        missing = {
            sequence: prompt[sequence.computed : -1]
            for prompt, sequence in first.items()
            if sequence.computed < len(prompt) - 1
        }
        if missing:
            batch = self._ragged_batch(missing, map(len, missing.values()))
            self._run(missing, batch, [*chain.from_iterable(missing.values())])
        for sequence, tokens in missing.items():
            self._cache.commit(sequence, len(tokens))
        self.batch_select_indices(torch.tensor([rows[tuple(prompt)] for prompt in prompts]))

    def _packed_cache(self, sequences: list[Sequence], batch: RaggedBatch) -> PackedCache:
        """Return the cache of a ragged batch of prompts."""
        backend = self._backend
        attend = self._compactor.attend(sequences, batch)
        return PackedCache(attend_through(backend.plan(batch), backend.store_rotated, attend))

    def _run(
        self, sequences: Iterable[Sequence], batch: RaggedBatch, tokens: list[int]
    ) -> None:
        """Run the model's layers over a ragged batch, as one row of tokens."""
        device = self._body.get_input_embeddings().weight.device  # type: ignore[operator]
        packed = self._packed_cache(list(sequences), batch)
        packed.spec = self.spec
        with torch.no_grad():
            self._body(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([batch.positions], device=device),
                use_cache=True,
                paged=packed,
                **{cache_argument(self._body): packed},
            )

    def _open(self, prompt: tuple[int, ...], length: int) -> Sequence:
        """Open a sequence of `length` tokens, with blocks for all tokens of `prompt` but one.

        `prompt` is empty if the token ids are unknown or must not be shared.
        """
        size = self._cache.geometry.block_size
        keys = block_keys(prompt, size)
        request = Request(
            id=f"row-{next(self._serials)}", prompt_tokens=length, keys=keys, key_tokens=size
        )
        first = max(0, len(prompt) - 1 - self._cache.probe(request) * size)
        # Blocks of groups are allocated chunk by chunk.
        sequence = self._cache.open(request, 0 if self._cache.grouped else first)
        self.sequences.append(sequence)
        return sequence

    def _plan_step(self, real: Tensor) -> None:
        """Allocate the slots of a step's real tokens, and make the backend's plan."""
        self._step = real.shape[1]
        self._lengths = real.sum(1).tolist()
        for sequence, length in zip(self.sequences, self._lengths, strict=True):
            missing = sequence.computed + length - sequence.tokens
            self._cache.extend(sequence, max(0, missing))
        self._begin_attention(self._ragged_batch(self.sequences, self._lengths))
        dense = sum(self._lengths) == real.numel()
        self._rows = None if dense else real.flatten().nonzero().squeeze(1)

    def _begin_attention(self, batch: RaggedBatch) -> None:
        """Make the backend's plan of a step."""
        self._plan = self._backend.plan(batch)
        self._attend = self._compactor.attend(self.sequences, batch)

    def _table(self, sequence: Sequence) -> Ids | tuple[()]:
        """Return the block ids of a sequence for a batch."""
        return self._cache.block_table(sequence)

    def _ragged_batch(
        self, sequences: Iterable[Sequence], lengths: Iterable[int]
    ) -> RaggedBatch:
        """Return the batch that computes `lengths` more tokens of `sequences`."""
        sequences, lengths = list(sequences), list(lengths)
        contexts = [sequence.held for sequence in sequences]
        return RaggedBatch(
            block_tables=[self._table(sequence) for sequence in sequences],
            contexts=contexts,
            lengths=lengths,
            positions=row_positions((sequence.position for sequence in sequences), lengths),
            held_positions=self._compactor.held_positions(sequences, contexts),
        )

    def _packed(self, states: Tensor) -> Tensor:
        """Return the rows of `[batch, heads, columns, width]` that are no padding."""
        return self.pack(states.transpose(1, 2))


def _last_logits_only(inputs: dict[str, Any]) -> bool:
    """Return True if the model is to return only the logits after the last token."""
    # Anything more may be an image, or ask for what all tokens become.
    more = [value for name, value in inputs.items() if name not in _OF_TEXT]
    asked = any(isinstance(value, Tensor) or value for value in more)
    kept = inputs.get("logits_to_keep")
    return isinstance(kept, int) and kept == 1 and not asked
