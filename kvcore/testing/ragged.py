"""Random ragged batches of sequences, computed by a backend and over plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from random import Random
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.policy import Backend, Rows, TensorLayout

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = 2
_HALF = 0.5


def random_layout(random: Random, **fixed: Any) -> TensorLayout:
    """Return a small layout of `LAYERS` layers; what is `fixed` is not random."""
    drawn: dict[str, Any] = {
        "blocks": 1,
        "block_size": random.choice([1, 3, 16, 17]),
        "layers": LAYERS,
        "kv_heads": random.choice([1, 2, 3]),
        "head_dim": random.choice([8, 24]),
        "together": random.random() < _HALF,
    }
    drawn |= fixed
    drawn.setdefault("value_dim", drawn["head_dim"])
    return TensorLayout(**drawn)


@attrs.define(kw_only=True, eq=False)
class RaggedBatch:
    """Sequences with all their K/V and queries, on the host, and their blocks in a backend.

    Attributes:
        backend, layout: whose pool is full of NaN at first.
        tables: blocks of each sequence, in no order. `spare` are nobody's.
        contexts, lengths: tokens before the step, and new ones.
        queries, keys, values: `[layer][sequence]`, of all its tokens, normally distributed.
        numbers: returns a tensor of the backend in fp64 on the host.
        tolerance: how far attention may be off.
    """

    backend: Backend
    layout: TensorLayout
    tables: list[list[int]]
    spare: list[int]
    contexts: Sequence[int]
    lengths: Sequence[int]
    queries: list[list[Tensor]]
    keys: list[list[Tensor]]
    values: list[list[Tensor]]
    numbers: Callable[[Any], Tensor]
    tolerance: float

    @classmethod
    def draw(
        cls,
        seed: int,
        backend: Backend,
        numbers: Callable[[Any], Tensor],
        tolerance: float,
        *,
        contexts: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        group: int | None = None,
        room: int = 3,
        shuffle: int = 0,
        **fixed: Any,
    ) -> RaggedBatch:
        """Return a random batch over a new backend, whose pool it allocates.

        Drawn from `seed`, unless given: contexts, lengths, how many query heads share a K/V
        head (`group`), and fields of the layout (`fixed`). The pool has `room` blocks more
        than needed. `shuffle` changes which blocks are whose, and nothing else.
        """
        import torch  # noqa: PLC0415 - the kits are imported without it

        from kvcore.testing.dense import DTYPES  # noqa: PLC0415 - likewise

        random = Random(seed)  # noqa: S311
        sizes = random_layout(random, **fixed)
        group = group or random.choice([1, 2, 4])
        if lengths is None:
            lengths = [random.choice([1, 1, random.randint(1, 70)]) for _ in range(6)]
        if contexts is None:
            contexts = [random.choice([0, random.randint(1, 200)]) for _ in lengths]
        total = [context + length for context, length in zip(contexts, lengths, strict=True)]
        held = [-(-tokens // sizes.block_size) for tokens in total]
        layout = attrs.evolve(sizes, blocks=sum(held) + room)
        order = [*range(layout.blocks)]
        Random(f"{seed} {shuffle}").shuffle(order)  # noqa: S311
        backend.allocate(layout)
        backend.fill(nan)
        draws = torch.Generator().manual_seed(seed)

        def drawn(heads: int, width: int) -> list[list[Tensor]]:
            rows = [
                torch.randn(tokens, heads, width, generator=draws, dtype=torch.float64)
                for _ in range(LAYERS)
                for tokens in total
            ]
            rounded = [row.to(DTYPES[layout.dtype]) for row in rows]
            return [rounded[: len(total)], rounded[len(total) :]]

        return cls(
            backend=backend,
            layout=layout,
            tables=[[order.pop() for _ in range(blocks)] for blocks in held],
            spare=order,
            contexts=contexts,
            lengths=lengths,
            queries=drawn(layout.kv_heads * group, layout.head_dim),
            keys=drawn(layout.kv_heads, layout.head_dim),
            values=drawn(layout.kv_heads, layout.value_dim),
            numbers=numbers,
            tolerance=tolerance,
        )

    def tokens(self, number: int) -> int:
        """Return how many tokens a sequence has in the end."""
        return self.contexts[number] + self.lengths[number]

    def check(self, **options: Any) -> None:
        """Store contexts, then the new tokens; compare attention with what it should be."""
        self.compare(self.stored(), self.contexts, self.lengths, **options)

    def stored(self) -> Any:
        """Store contexts, then the new tokens; return the plan of the latter."""
        self.store([0] * len(self.contexts), self.contexts)
        return self.store(self.contexts, self.lengths)

    def store(self, begins: Sequence[int], counts: Sequence[int]) -> Any:
        """Store so many tokens of each sequence from `begins` on, in all layers.

        Returns the plan, without the sequences that store none.
        """
        import torch  # noqa: PLC0415 - as above

        chosen = [number for number, count in enumerate(counts) if count]
        if not chosen:
            return None
        plan = self.backend.plan(
            Rows(
                [self.tables[number] for number in chosen],
                [begins[number] for number in chosen],
                [counts[number] for number in chosen],
            )
        )
        spans = {
            number: slice(begins[number], begins[number] + counts[number]) for number in chosen
        }
        for layer in range(LAYERS):
            rows = (
                torch.cat([part[layer][number][span] for number, span in spans.items()])
                for part in (self.keys, self.values)
            )
            keys, values = (self.backend.tensor(part, self.layout.dtype) for part in rows)
            self.backend.store(layer, plan, keys, values)
        return plan

    def attend(
        self,
        layer: int,
        plan: Any,
        begins: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        **options: Any,
    ) -> Tensor:
        """Return attention of the backend for the tokens of a plan, None: for the new ones."""
        import torch  # noqa: PLC0415 - as above

        begins = self.contexts if begins is None else begins
        counts = self.lengths if counts is None else counts
        queries = torch.cat(
            [
                rows[begin : begin + count]
                for rows, begin, count in zip(self.queries[layer], begins, counts, strict=True)
            ]
        )
        given = self.backend.tensor(queries, self.layout.dtype)
        return self.numbers(self.backend.attend(layer, plan, given, **options))

    def compare(
        self, plan: Any, begins: Sequence[int], counts: Sequence[int], **options: Any
    ) -> None:
        """Compare attention of a plan, in all layers, with that over plain tensors in fp64."""
        import torch  # noqa: PLC0415 - as above

        from kvcore.testing.dense import attention  # noqa: PLC0415 - as above

        for layer in range(LAYERS):
            expected = []
            for number, (begin, count) in enumerate(zip(begins, counts, strict=True)):
                queries, keys, values = (
                    part[layer][number][: begin + count].double()
                    for part in (self.queries, self.keys, self.values)
                )
                expected.append(attention(queries[begin:], keys, values, **options))
            found = self.attend(layer, plan, begins, counts, **options)
            torch.testing.assert_close(
                found, torch.cat(expected), atol=self.tolerance, rtol=self.tolerance
            )

    def holds(self, number: int, table: Sequence[int]) -> bool:
        """Return whether these blocks hold, in all layers, the K/V of a sequence, exactly."""
        return all(
            found.equal(whole[layer][number].double())
            for layer in range(LAYERS)
            for found, whole in zip(
                self.read(layer, table, self.tokens(number)),
                (self.keys, self.values),
                strict=True,
            )
        )

    def read(self, layer: int, table: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Return what the backend reads, on the host."""
        keys, values = self.backend.read(layer, table, tokens)
        return self.numbers(keys), self.numbers(values)
