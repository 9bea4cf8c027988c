"""One batch of a Hugging Face model, its K/V in paged blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcore import InputError, KVCache, Request
from kvcore.cache import Sequence
from kvcore.engine import Rows
from kvcore.request import block_keys
from kvcore_plugins.generator.hf_model import Packed, Paged, in_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Module

    from kvcore import Backend
    from kvcore.engine import Attend


class PagedBatch(Paged):
    """The cache of one batch: row i of the batch is the sequence i of a `KVCache`.

    Give it to a model as `past_key_values`; a model without one gets one of its own. Tokens
    that the attention mask hides have no slot. Blocks are held until `reset`.

    A prompt's blocks are shared with other batches when only its last logits are wanted
    (`logits_to_keep=1`, as `generate` says) and its positions count its own tokens: then
    what hits is not computed again, and the rest is computed without padding.

    Attributes:
        sequences: one a row; empty before the first step.
    """

    def __init__(
        self, cache: KVCache, backend: Backend, body: Module, serials: Iterator[int]
    ) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []
        self._cache = cache
        self._backend = backend
        self._body = body
        self._serials = serials
        self._columns = 0
        self._step = 0
        self._lengths: list[int] = []
        self._rows: Tensor | None = None
        self._plan: Any = None

    def begin(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Allocate what a step stores; return its inputs, less what need not be computed.

        Raises:
            InputError: padding that cannot be left out, or another batch than before.
            OutOfBlocks: there is no room; the batch has given back all its blocks.
        """
        try:
            real = self._real(inputs)
            if not self.sequences:
                inputs, real = self._admit(inputs, real)
            self._grow(real)
        except Exception:
            self.reset()
            raise
        return inputs

    def end(self) -> None:
        """Say that the step is computed."""
        for sequence, tokens in zip(self.sequences, self._lengths, strict=True):
            self._cache.commit(sequence, tokens)
        self._columns += self._step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the K/V of a layer's new tokens, without padding, in their slots."""
        keys, values = self._packed(key_states), self._packed(value_states)
        self._backend.store(layer_idx, self._plan, keys, values)
        return key_states, value_states

    def attention(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        **options: Any,
    ) -> Tensor:
        """Attend to what is stored; a hidden token gets zeros."""
        out = self._backend.attend(layer, self._plan, self._packed(queries), **options)
        batch, _, columns, _ = queries.shape
        if self._rows is not None:
            spread = out.new_zeros((batch * columns, *out.shape[1:]))
            out = spread.index_copy_(0, self._rows, out)
        return out.unflatten(0, (batch, columns))  # type: ignore[no-any-return]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns so far, padding included, as transformers counts them."""
        return self._columns

    def reset(self) -> None:
        """Close the sequences: shared blocks stay cached, the others are free again."""
        for sequence in self.sequences:
            self._cache.close(sequence)
        self.sequences = []
        self._columns = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from row `beam_idx[i]`: forks, without copying a block."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork every row into `repeats` neighbours."""
        rows = torch.arange(len(self.sequences))
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of `indices`; one named again is forked, one not named closed."""
        before = self.sequences
        chosen = indices.tolist()
        kept: set[int] = set()
        self.sequences = []
        for row in chosen:
            again = row in kept
            self.sequences.append(self._cache.fork(before[row]) if again else before[row])
            kept.add(row)
        for row, sequence in enumerate(before):
            if row not in kept:
                self._cache.close(sequence)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest `-tokens_to_remove` tokens of every row, as rejected drafts.

        Raises:
            InputError: it would reach into blocks that are shared.
        """
        for sequence in self.sequences:
            self._cache.rollback(sequence, -tokens_to_remove)
        self._columns += tokens_to_remove

    def _real(self, inputs: dict[str, Any]) -> Tensor:
        """Return which of the step's tokens are no padding, `[batch, columns]`."""
        tokens = inputs.get("input_ids")
        given = inputs["inputs_embeds"] if tokens is None else tokens
        batch, columns = given.shape[:2]
        if self.sequences and batch != len(self.sequences):
            msg = f"a step of {batch} rows for a paged cache that holds {len(self.sequences)}"
            raise InputError(msg)
        mask = inputs.get("attention_mask")
        if mask is None:
            return torch.ones((batch, columns), dtype=torch.bool, device=given.device)
        if mask.shape != (batch, self._columns + columns):
            msg = (
                f"attention mask of shape {list(mask.shape)} for {columns} tokens after "
                f"{self._columns}: a paged cache takes [{batch}, {self._columns + columns}]"
            )
            raise InputError(msg)
        real: Tensor = mask[:, self._columns :].bool()
        held = [sequence.computed for sequence in self.sequences] or [0] * batch
        if mask[:, : self._columns].sum(1).tolist() != held:
            msg = "the attention mask hides other tokens than it did when they were stored"
            raise InputError(msg)
        if not bool(real[:, -1].all()):
            msg = "a row ends in padding: pad on the left (padding_side='left')"
            raise InputError(msg)
        return real

    def _admit(self, inputs: dict[str, Any], real: Tensor) -> tuple[dict[str, Any], Tensor]:
        """Open the sequences; compute all but the last column if only that is wanted."""
        tokens, columns = inputs.get("input_ids"), real.shape[1]
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(columns, device=real.device)
        counted = bool((positions == real.cumsum(1) - 1)[real].all())
        if tokens is None or not counted or not _last_logits_only(inputs):
            for length in real.sum(1).tolist():
                self._open((), length)
            return inputs, real
        self._prefill([row[kept].tolist() for row, kept in zip(tokens, real, strict=True)])
        self._columns = columns - 1
        last = {"input_ids": tokens[:, -1:], "position_ids": real.sum(1, keepdim=True) - 1}
        return inputs | last, real[:, -1:]

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Compute all but the last token of each prompt, once, as one row of tokens."""
        first: dict[tuple[int, ...], Sequence] = {}
        for prompt in map(tuple, prompts):
            if prompt not in first:
                first[prompt] = self._open(prompt, len(prompt))
        missing = {
            sequence: prompt[sequence.computed : -1]
            for prompt, sequence in first.items()
            if sequence.computed < len(prompt) - 1
        }
        if missing:
            rows = self._rows_of(missing, map(len, missing.values()))
            self._run(rows, [token for tokens in missing.values() for token in tokens])
        for sequence, tokens in missing.items():
            self._cache.commit(sequence, len(tokens))
        order = list(first)
        self.batch_select_indices(torch.tensor([order.index(tuple(p)) for p in prompts]))

    def _run(self, rows: Rows, tokens: list[int]) -> None:
        """Run the model's layers over the rows of a ragged batch."""
        device = self._body.get_input_embeddings().weight.device  # type: ignore[operator]
        positions = [
            position
            for context, length in zip(rows.contexts, rows.lengths, strict=True)
            for position in range(context, context + length)
        ]
        packed = Packed(through(self._backend, self._backend.plan(rows)))
        with torch.no_grad():
            self._body(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                past_key_values=packed,
                use_cache=True,
                paged=packed,
            )

    def _open(self, prompt: tuple[int, ...], length: int) -> Sequence:
        """Admit a row with room for all its tokens but the last that are known."""
        size = self._cache.geometry.block_size
        keys = block_keys(prompt, size)
        request = Request(
            id=f"row-{next(self._serials)}", prompt_tokens=length, keys=keys, key_tokens=size
        )
        first = max(0, len(prompt) - 1 - self._cache.probe(request) * size)
        sequence = self._cache.open(request, first)
        self.sequences.append(sequence)
        return sequence

    def _grow(self, real: Tensor) -> None:
        """Make room for a step's tokens, and plan where they go."""
        self._step = real.shape[1]
        self._lengths = real.sum(1).tolist()
        for sequence, length in zip(self.sequences, self._lengths, strict=True):
            missing = sequence.computed + length - sequence.tokens
            self._cache.extend(sequence, max(0, missing))
        self._plan = self._backend.plan(self._rows_of(self.sequences, self._lengths))
        whole = sum(self._lengths) == real.numel()
        self._rows = None if whole else real.flatten().nonzero().squeeze(1)

    def _rows_of(self, sequences: Iterable[Sequence], lengths: Iterable[int]) -> Rows:
        sequences = list(sequences)
        tables = [self._cache.block_table(sequence) for sequence in sequences]
        return Rows(tables, [sequence.computed for sequence in sequences], list(lengths))

    def _packed(self, states: Tensor) -> Tensor:
        rows = in_rows(states)
        return rows if self._rows is None else rows[self._rows]


def through(backend: Backend, plan: Any) -> Attend:
    """Return what stores and attends by `plan`, a layer a call."""

    def attend(
        layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        backend.store(layer, plan, keys, values)
        out: Tensor = backend.attend(layer, plan, queries, **options)
        return out

    return attend


def _last_logits_only(inputs: dict[str, Any]) -> bool:
    """Say whether nothing of a prompt is wanted but the logits after its last token."""
    more = ("output_hidden_states", "output_attentions", "token_type_ids", "labels")
    kept = inputs.get("logits_to_keep")
    return isinstance(kept, int) and kept == 1 and not any(_wants(inputs, m) for m in more)


def _wants(inputs: dict[str, Any], name: str) -> bool:
    value = inputs.get(name)
    return value is not None and value is not False
