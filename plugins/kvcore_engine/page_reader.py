"""Reads of selected pages: which blocks a generated token attends to in each K/V head.

A token that reads 3 pages of 2 blocks of a sequence with 11 blocks, in one K/V head::

    page        0     1     2     3     4     5
    blocks     a b   c d   e f   g h   i j   k
    score      0.3   2.0   0.1   0.5   1.7    -      the page of the token itself has none
    read             c d               i j   k

Other heads read other pages, and as many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcore.cache.sequence import Sequence
from kvcore.engine.backend import Backend
from kvcore.engine.batch import RaggedBatch, Tensor
from kvcore.errors import InputError
from kvcore.lazy import LazyModule
from kvcore.plugins import FAILURES, policy_error, wrong_answer
from kvcore_engine.retention.page_selection import PageSelection

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())


class BlockSelection(NamedTuple):
    """The blocks that a new token reads, others in each K/V head.

    Attributes:
        row: row of the token in the step.
        blocks: block ids on the device, `[kv_heads, n]`; the last is that of the token.
        tokens: number of tokens in them, up to the new one.
    """

    row: int
    blocks: Tensor
    tokens: int


class _Rows(NamedTuple):
    """The new tokens of a sequence in a step of which each selects its own pages.

    Attributes:
        seq: the sequence.
        summaries: summaries of its pages by layer, kept from step to step.
        table: its block table, on the device.
        first: row of the first of these tokens in the step.
        contexts: number of tokens before each of them.
    """

    seq: Sequence
    summaries: dict[int, Tensor]
    table: Tensor
    first: int
    contexts: range


class PageReader:
    """Restricts the attention of generated tokens to the pages that a policy selects.

    Summaries of full pages are made when a token first selects among them, from K as it is
    stored, so it makes no difference whether a page was computed, hit, loaded or copied.

    Args:
        policy: the policy.
        backend: the backend with the K/V.

    Attributes:
        summary_bytes: bytes of summaries that have been read.

    Raises:
        InputError: pages are no whole blocks, or the backend cannot read blocks by head.
    """

    def __init__(self, policy: PageSelection, backend: Backend) -> None:
        size = backend.layout.block_size
        attend = getattr(backend, "attend_selected", None)
        why = ""
        if policy.page % size:
            why = f"pages of {policy.page} tokens, no whole blocks of {size}: give page={size}"
        elif attend is None:
            why = (
                f"other blocks in each head, which backend {backend.name!r} cannot: take "
                "torch-cpu or torch-cuda"
            )
        if attend is None or why:
            msg = f"retention {policy.name!r} reads {why}"
            raise InputError(msg)
        self._policy, self._backend = policy, backend
        self._attend: Callable[..., Tensor] = attend
        self.summary_bytes = 0

    def reads_all(self, layer: int, window: int | None) -> bool:
        """Return True if every token attends to all that it can see in a layer."""
        return window is not None or layer < self._policy.dense_layers

    def tokens_read(self, seq: Sequence, context: int) -> int:
        """Return how many tokens a generated token of `seq` after `context` others reads."""
        page = self._policy.page
        read = min(context // page, self._policy.pages_of(seq) - 1)
        return read * page + context % page + 1

    def attend(
        self,
        sequences: Iterable[Sequence],
        summaries: Iterable[dict[int, Tensor]],
        batch: RaggedBatch,
    ) -> Callable[..., Tensor]:
        """Return the function that attends in a step of `sequences`, as `Backend.attend` does.

        `summaries` are those of each sequence so far, by layer; new ones are added.
        """
        backend, dense, selecting, row = self._backend, [], [], 0
        columns = zip(
            sequences, summaries, batch.block_tables, batch.contexts, batch.lengths, strict=True
        )
        for seq, known, table, context, length in columns:
            # Tokens of drafts, and tokens that were rolled back, may have been replaced since.
            final = seq.position // self._policy.page
            for layer, kept in known.items():
                known[layer] = kept[:, :final]
            end = context + length
            # Tokens of the prompt come first.
            start = min(max(context, seq.request.prompt_tokens), end)
            if self.tokens_read(seq, end - 1) == end:
                start = end
            dense.append(start - context)
            if start < end:
                tensor = backend.tensor(torch.tensor(table))
                first = row + start - context
                selecting.append(_Rows(seq, known, tensor, first, range(start, end)))
            row += length
        if not selecting:
            return backend.attend

        def attend(layer: int, plan: Any, queries: Tensor, **options: Any) -> Tensor:
            if self.reads_all(layer, options.get("window")):
                return backend.attend(layer, plan, queries, **options)
            selected = [
                self._selected(layer, rows, row, context, queries)
                for rows in selecting
                for row, context in enumerate(rows.contexts, rows.first)
            ]
            return self._attend(layer, plan, queries, dense, selected, **options)

        return attend

    def _selected(
        self, layer: int, rows: _Rows, row: int, context: int, queries: Tensor
    ) -> BlockSelection:
        """Return the blocks that the token of a row reads in a layer."""
        policy, layout = self._policy, self._backend.layout
        size, pages = layout.block_size, context // policy.page
        by_page = policy.page // size
        newest = rows.table[pages * by_page : context // size + 1]
        wanted = min(policy.pages_of(rows.seq) - 1, pages)
        blocks = newest.expand(layout.kv_heads, -1)
        if wanted:
            summaries = self._summaries(layer, rows, pages)
            query = queries[row].unflatten(0, (layout.kv_heads, -1))
            chosen = self._scored(summaries, query).topk(wanted, 1).indices.sort(1).values
            inside = torch.arange(by_page, device=chosen.device)
            columns = (chosen[:, :, None] * by_page + inside).flatten(1)
            blocks = torch.cat((rows.table[columns], blocks), 1)
        return BlockSelection(row, blocks, wanted * policy.page + context % policy.page + 1)

    def _summaries(self, layer: int, rows: _Rows, pages: int) -> Tensor:
        """Return the summaries of the first pages, which are kept for the next tokens."""
        policy, page = self._policy, self._policy.page
        known = [rows.summaries[layer]] if layer in rows.summaries else []
        count = known[0].shape[1] if known else 0
        if count < pages:
            blocks = rows.table[count * page // self._backend.layout.block_size :].tolist()
            tokens = (pages - count) * page
            keys = self._backend.read_heads(layer, "keys", blocks, tokens, reuse=True)
            try:
                new = policy.summarise(keys.unflatten(1, (-1, page)))
            except FAILURES as error:
                raise policy_error(policy, "summarise", error) from error
            if not isinstance(new, torch.Tensor) or new.shape[:2] != (len(keys), pages - count):
                wanted = f"summaries of {len(keys)} heads x {pages - count} pages"
                raise wrong_answer(policy, "summarise()", f"{_shape(new)}: give {wanted}")
            if known and new.shape[2:] != known[0].shape[2:]:
                wrong = f"{_shape(new)}, and before with {_shape(known[0])}: give equal numbers"
                raise wrong_answer(policy, "summarise()", f"{wrong} for each page")
            rows.summaries[layer] = torch.cat((*known, new), 1)
        read = rows.summaries[layer][:, :pages]
        self.summary_bytes += read.nbytes
        return read

    def _scored(self, summaries: Tensor, queries: Tensor) -> Tensor:
        """Return the score of each page.

        Raises:
            PolicyError: there is not one integer or float for each page.
        """
        policy, shape = self._policy, summaries.shape[:2]
        try:
            scores = policy.score(summaries, queries)
        except FAILURES as error:
            raise policy_error(policy, "score", error) from error
        if not isinstance(scores, torch.Tensor) or scores.shape != shape:
            wrong = f"{_shape(scores)} where the pages are {list(shape)}"
            raise wrong_answer(policy, "score()", wrong)
        if scores.dtype.is_complex or scores.dtype is torch.bool:
            raise wrong_answer(policy, "score()", f"{scores.dtype}: give integers or floats")
        if bool(scores.isnan().any()):
            count = int(scores.isnan().sum())
            raise wrong_answer(policy, "score()", f"NaN for {count} of {scores.numel()} pages")
        return scores


def _shape(answer: Any) -> Any:
    return list(answer.shape) if hasattr(answer, "shape") else type(answer).__name__
