"""A draft model: a smaller generator, with K/V of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, ClassVar

import attrs
from attrs.validators import ge

from kvcore import Backend, Generator, InputError, LatencyModel
from kvcore.cache import Ids
from kvcore.engine import Attend, RaggedBatch, Tensor, attend_through, row_positions
from kvcore.lazy import LazyModule
from kvcore.plugins.manager import installed
from kvcore.plugins.options import Spec
from kvcore.serving import StepWork
from kvcore_engine.drafter.token_drafter import Draft, DraftSequence, TokenDrafter
from kvcore_engine.executor import tensor_layout
from kvcore_engine.speculation import inverted
from kvcore_engine.tokens import uniform
from kvcore_plugins.drafter.cost import ModelCost

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())


@attrs.define(slots=False, eq=False)
class DraftModel(TokenDrafter):
    """Draft with a smaller model that continues the text, token by token.

    Its K/V lies in a pool of its own, with the number of blocks and the block tables of the
    served model: tokens that are hit, preempted or rolled back there are so here. It computes a
    prompt in the same steps as the served model, and tokens in blocks that a tier has loaded,
    which bring no K/V for it, before it drafts after them.

    Options:
        tokens: drafts a step, k.
        generator: the draft model: the name of a generator; in code also an instance. It
            needs the token ids of the served model.
        model, layers, hidden, heads, kv_heads, head_dim, vocab_size: options of that generator,
            if they are given.
        temperature: 0: the likeliest token is drafted; else drafts are drawn, and accepted
            by rejection sampling: at best with the temperature of the served model.
        seed: seed of the generator, if it has one.

    Raises:
        InputError: the generator is unknown, has other token ids or too few positions, or is
            an instance beside options of a generator.

    Source: Leviathan et al., "Fast inference from transformers via speculative decoding",
    2023; Chen et al., "Accelerating large language model decoding with speculative
    sampling", 2023.
    """

    name: ClassVar[str] = "draft-model"

    tokens: int = attrs.field(default=4)
    generator: str | Generator = attrs.field(default="transformer")
    model: str | None = attrs.field(default=None)
    layers: int | None = attrs.field(default=None)
    hidden: int | None = attrs.field(default=None)
    heads: int | None = attrs.field(default=None)
    kv_heads: int | None = attrs.field(default=None)
    head_dim: int | None = attrs.field(default=None)
    vocab_size: int | None = attrs.field(default=None)
    temperature: float = attrs.field(default=0.0, validator=ge(0))
    seed: int = attrs.field(default=0)

    _drafting: Generator = attrs.field(init=False, repr=False)
    _pool: Backend = attrs.field(init=False, repr=False)
    _cost: ModelCost = attrs.field(init=False, repr=False)
    # By request: tokens with K/V in this pool, and the drafts after these that have some too.
    _known: dict[int | str, tuple[int, list[int]]] = attrs.field(
        init=False, repr=False, factory=dict
    )
    # Blocks that are in the served model's pool alone, or were computed after such blocks.
    _absent: set[int] = attrs.field(init=False, repr=False, factory=set)

    def __attrs_post_init__(self) -> None:
        """Build the generator."""
        names = ("model", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab_size")
        values = {name: getattr(self, name) for name in names}
        options = {name: str(value) for name, value in values.items() if value is not None}
        if isinstance(self.generator, Generator):
            given = [*options, *["seed"] * (self.seed != 0)]
            if given:
                msg = (
                    f"draft-model: {', '.join(given)} beside a generator that is built: give "
                    "them to that generator, or give its name"
                )
                raise InputError(msg)
            self._drafting = self.generator
            return
        if self.temperature:
            options["temperature"] = str(self.temperature)
        spec = Spec(self.generator, options)
        self._drafting = installed().build("generator", spec, {"seed": self.seed})

    def attach(self, latency: LatencyModel, seed: int = 0) -> None:
        """Build the cost of the draft model."""
        super().attach(latency, seed)
        self._cost = ModelCost(latency, self._drafting.spec)

    def load(self, generator: Generator, backend: Backend, seed: int) -> None:
        """Load the draft model, and allocate its pool."""
        drafting = self._drafting
        if drafting.vocabulary != generator.vocabulary:
            msg = (
                f"draft-model: {drafting.name} has {drafting.vocabulary} token ids, the "
                f"served model {generator.vocabulary}: take a draft model with the same ones"
            )
            raise InputError(msg)
        drafting.bind()
        layout = backend.layout
        self._pool = type(backend)(**backend.options())
        self._pool.bind()
        drafting.load(self._pool, layout.dtype)
        own = tensor_layout(drafting.spec, layout.blocks, layout.block_size, layout.dtype)
        self._pool.allocate(own)
        # The last tokens of a shared block may never be computed here.
        self._pool.fill(0)

    def on_prefill(self, requests: Sequence[int | str], batch: RaggedBatch) -> None:
        """Compute K/V of prompt tokens."""
        self._drafting.forward(
            attrs.evolve(batch, output_indices=[None] * len(requests)), self._attend(batch)
        )
        for request, table, context, length in zip(
            requests, batch.block_tables, batch.contexts, batch.lengths, strict=True
        ):
            self._known[request] = context + length, []
            before, new = self._split(table, context)
            if self._absent.isdisjoint(before):
                self._absent.difference_update(new)
            else:
                self._absent.update(new)

    def on_loaded(self, blocks: Ids) -> None:
        """Note that no K/V of this model is in `blocks`."""
        self._absent.update(blocks)

    def on_end(self, requests: Sequence[int | str]) -> None:
        """Forget requests."""
        for request in requests:
            self._known.pop(request, None)

    def drafts(self, sequences: Sequence[DraftSequence]) -> list[Draft]:
        """Draft for all sequences together, a pass for each position."""
        texts: list[list[int]] = [[] for _ in sequences]
        weights: list[list[Tensor]] = [[] for _ in sequences]
        # Tokens that were accepted since, and the newest one, are computed first.
        starts = [self._first_unknown(sequence) for sequence in sequences]
        computed = [
            self._split(sequence.block_table, start)[1]
            for sequence, start in zip(sequences, starts, strict=True)
        ]
        news = [
            sequence.stream.token_ids(start, sequence.position + 1)
            for sequence, start in zip(sequences, starts, strict=True)
        ]
        for step in range(max(sequence.most for sequence in sequences)):
            going = [n for n, sequence in enumerate(sequences) if sequence.most > step]
            batch = self._batch([(sequences[n], starts[n], news[n]) for n in going], step)
            for n, (token, row) in zip(going, self._next(batch), strict=True):
                texts[n].append(token)
                weights[n].append(row)
                starts[n] += len(news[n])
                news[n] = [token]
        for sequence, text in zip(sequences, texts, strict=True):
            self._known[sequence.request] = sequence.position + 1, text[:-1]
        self._absent.difference_update(*computed)
        if not self.temperature:
            return [Draft(text) for text in texts]
        return [
            Draft(text, torch.stack(rows)) for text, rows in zip(texts, weights, strict=True)
        ]

    def duration(self, work: StepWork, drafts: Sequence[int]) -> int:
        """Return the time of the passes of the draft model."""
        return self._cost.duration(work, drafts)

    def _first_unknown(self, sequence: DraftSequence) -> int:
        """Return the position of the first token that is to be computed."""
        known, drafted = self._known.get(sequence.request, (0, []))
        # Drafts that were rejected count for nothing, however many steps had none since.
        text = sequence.stream.token_ids(known, min(known + len(drafted), sequence.position))
        known += len([*takewhile(bool, map(eq, text, drafted))])
        before, _ = self._split(sequence.block_table, known)
        absent = (index for index, block in enumerate(before) if block in self._absent)
        return min(known, next(absent, len(before)) * self._pool.layout.block_size)

    def _split(self, table: Sequence[int], tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the blocks of the first `tokens` tokens, and those that begin after them."""
        blocks = -(-tokens // self._pool.layout.block_size)
        return table[:blocks], table[blocks:]

    def _batch(
        self, parts: Sequence[tuple[DraftSequence, int, list[int]]], step: int
    ) -> RaggedBatch:
        """Return the batch of a pass: of each sequence some tokens, from a position on."""
        size = self._pool.layout.block_size
        starts, lengths = [start for _, start, _ in parts], [len(new) for _, _, new in parts]
        return RaggedBatch(
            block_tables=[
                sequence.block_table[: -(-(start + len(new)) // size)]
                for sequence, start, new in parts
            ],
            contexts=starts,
            lengths=lengths,
            token_ids=[token for _, _, new in parts for token in new],
            positions=row_positions(starts, lengths),
            output_indices=[sequence.index + step for sequence, _, _ in parts],
            seeds=[sequence.stream.seed for sequence, _, _ in parts],
        )

    def _next(self, batch: RaggedBatch) -> list[tuple[int, Tensor]]:
        """Return the next token of each sequence, and the distribution of a drawn one."""
        attend = self._attend(batch)
        if not self.temperature:
            return [(token or 0, None) for token in self._drafting.forward(batch, attend)]
        rows = self._drafting.probabilities(batch, attend)
        return [
            (inverted(row.tolist(), uniform("draft", seed, index or 0)), row)
            for row, seed, index in zip(rows, batch.seeds, batch.output_indices, strict=True)
        ]

    def _attend(self, batch: RaggedBatch) -> Attend:
        """Return the function through which a pass reaches the pool of the draft model.

        Raises:
            InputError: the draft model has not so many positions.
        """
        pool, limit = self._pool, self._drafting.positions
        if limit is not None and max(batch.positions) >= limit:
            msg = (
                f"draft-model: {self._drafting.name} has {limit} positions, and a text has "
                f"more tokens: give max_model_len={limit}, or take a draft model with more"
            )
            raise InputError(msg)
        return attend_through(pool.plan(batch), pool.store_rotated, pool.attend)
