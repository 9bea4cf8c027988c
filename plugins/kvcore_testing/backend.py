"""The conformance tests of backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from itertools import pairwise
from math import nan
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import pytest

from kvcore.engine import Backend, RaggedBatch, Rotary, Rotation, TensorLayout
from kvcore.errors import InputError, StorageError
from kvcore.lazy import LazyModule
from kvcore.models.codec import TENSOR_DTYPES
from kvcore.plugins import Plugins
from kvcore.plugins.base import qualified
from kvcore_testing.dense import attention, torch_dtype
from kvcore_testing.plugin import PluginTests, seeds

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch", globals())


_dtypes = pytest.mark.parametrize("dtype", TENSOR_DTYPES)
_together = pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
_block_sizes = pytest.mark.parametrize("block_size", [1, 16, 17, 256])
_adjacent = pytest.mark.parametrize("adjacent", [False, True], ids=["halves", "adjacent"])
_windows = pytest.mark.parametrize(
    ("window", "sinks"), [(None, 0), (1, 0), (20, 0), (20, 3), (33, 40), (10_000, 4)]
)

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}
"""Allowed difference of attention from attention in fp64 over the same numbers, by dtype.

Numbers are normally distributed, so outputs are below 5, and a tolerance is a few units in
their last place."""


class BackendTests(PluginTests[Backend]):
    """Conformance tests of a backend; a derived `Test...` class makes the backend.

    The attribute `backend` is what `make` calls:

        class TestMine(BackendTests):
            backend = Mine

    Attention of random ragged batches, over pools that are full of NaN at first, is compared
    with attention in fp64 over dense tensors. Needs torch. Override `numbers` for a backend
    with tensors of another library.

    Attributes:
        dtypes: dtypes that the backend supports; tests in others are skipped.
        tolerances: allowed absolute and relative difference of attention, by dtype.
    """

    base = Backend
    backend: ClassVar[Callable[[], Backend]]
    dtypes: ClassVar[Sequence[str]] = TENSOR_DTYPES
    tolerances: ClassVar[dict[str, float]] = TOLERANCES

    def numbers(self, tensor: Any) -> Tensor:
        """Return a tensor of the backend as one of torch, in fp64, on the host."""
        return torch.as_tensor(tensor).detach().cpu().double()

    seed = seeds(6)

    @_dtypes
    def test_paged_is_dense(self, seed: int, dtype: str) -> None:
        """Attention over block tables equals attention over dense tensors, in any dtype."""
        self.batch(seed, dtype).check()

    @_block_sizes
    def test_any_block_size(self, seed: int, block_size: int) -> None:
        """The block size makes no difference to the output."""
        self.batch(seed, block_size=block_size).check()

    @_windows
    def test_windows_and_sinks(self, seed: int, window: int | None, sinks: int) -> None:
        """A token attends to the last `window` tokens and the first `sinks`."""
        self.batch(seed).check(window=window, sinks=sinks)

    def test_learned_sinks(self, seed: int) -> None:
        """Scores of learned sinks take their share of the attention."""
        try:
            signature(self.make().attend).bind(0, None, None, sink_logits=None)
        except TypeError:
            pytest.skip("attend() takes no sink_logits")
        for batch in (self.batch(seed), self.batch(seed, lengths=[1] * 9)):
            heads = batch.queries[0][0].shape[1]
            logits = batch.backend.tensor([head - 1.5 for head in range(heads)])
            batch.check(window=30, sink_logits=logits)

    def test_decode_alone(self, seed: int) -> None:
        """A batch of decode alone, of short and long contexts, with and without a window."""
        batch = self.batch(seed, lengths=[1] * 9)
        batch.check()
        batch.check(window=30, sinks=2)

    @pytest.mark.parametrize("group", [1, 2, 8])
    @pytest.mark.parametrize("kv_heads", [1, 2, 3])
    def test_query_heads_share(self, kv_heads: int, group: int) -> None:
        """Neighbouring query heads share a K/V head: all of them, some, or none."""
        self.batch(kv_heads, kv_heads=kv_heads, group=group).check()

    @_together
    def test_values_of_another_width(self, together: bool) -> None:  # noqa: FBT001
        """Keys and values need not be equally wide."""
        for widths in ((24, 16), (8, 40)):
            width, value = widths
            batch = self.batch(0, head_dim=width, value_dim=value, together=together)
            batch.check()
            batch.check(window=9, sinks=1)

    def test_scale(self) -> None:
        """A given scale replaces 1 / sqrt(head_dim)."""
        self.batch(1).check(scale=0.3)

    def test_chunks_are_one_prefill(self, seed: int) -> None:
        """A prompt computed in chunks has the output of a prompt computed at once."""
        random = Random(seed)  # noqa: S311
        tokens = random.randint(40, 120)
        batch = self.batch(seed, contexts=[0], lengths=[tokens], room=0)
        at_once = batch.attend(0, batch.stored())
        cuts = sorted(random.sample(range(1, tokens), random.randint(1, 12)))
        batch.backend.fill(nan)
        parts = []
        for begin, end in pairwise([0, *cuts, tokens]):
            plan = batch.store([begin], [end - begin])
            parts.append(batch.attend(0, plan, [begin], [end - begin]))
        batch.near(torch.cat(parts), at_once)

    def test_a_reused_block_leaks_nothing(self, seed: int) -> None:
        """The earlier content of a reused block is not read."""
        batch = self.batch(seed)
        batch.stored()
        used = [block for table in batch.tables for block in table]
        batch.backend.fill(nan, used)
        shorter = [max(1, length // 2) for length in batch.lengths]
        batch.store([0] * len(batch.contexts), batch.contexts)
        batch.compare(batch.store(batch.contexts, shorter), batch.contexts, shorter)

    def test_blocks_outside_the_window_are_not_read(self, seed: int) -> None:
        """Blocks outside of window and sinks, which may belong to others, are not read."""
        window, sinks = 21, 5
        batch = self.batch(
            seed, lengths=[1, 7, 1, 30, 1, 1], contexts=[90, 80, 200, 100, 9, 333]
        )
        plan = batch.stored()
        size = batch.layout.block_size
        for table, context in zip(batch.tables, batch.contexts, strict=True):
            reached = max(0, context - window + 1)
            dead = table[-(-sinks // size) : reached // size]
            batch.backend.fill(nan, dead)
        batch.compare(plan, batch.contexts, batch.lengths, window=window, sinks=sinks)

    @_together
    @_dtypes
    def test_reads_stored_rows(self, dtype: str, together: bool) -> None:  # noqa: FBT001
        """`read` returns exactly the stored numbers of each layer."""
        batch = self.batch(2, dtype, together=together)
        batch.stored()
        assert batch.is_stored()

    @_adjacent
    @_dtypes
    def test_stores_rotated_keys(self, dtype: str, adjacent: bool) -> None:  # noqa: FBT001
        """`store_rotated` stores keys as fp64 rotates them, and values unchanged."""
        batch = self.batch(7, dtype, head_dim=24)
        for layer, exact in enumerate(self._store_rotated(batch, adjacent=adjacent)):
            for sequence, table in enumerate(batch.tables):
                keys, values = batch.read(layer, table, batch.tokens(sequence))
                batch.near(keys, exact[sequence])
                assert values.equal(batch.values[layer][sequence].double())

    @pytest.mark.parametrize("codec", ["fp8-e4m3", "int8", "int4"])
    @_adjacent
    def test_codes_rotated_keys(self, adjacent: bool, codec: str) -> None:  # noqa: FBT001
        """Keys that `store_rotated` encodes have the codes of keys rotated before `store`.

        Up to 1 % of the codes may differ, by rounding. Skipped for a backend without codecs.
        """
        if not self.make().takes_codecs:
            pytest.skip("supports no codecs: takes_codecs is False")
        built = Plugins().build("codec", codec)
        batch, plain = (self.batch(7, "fp32", head_dim=24, codec=built) for _ in range(2))
        rotated = self._store_rotated(batch, adjacent=adjacent)
        plain = attrs.evolve(plain, keys=[[x.float() for x in rows] for rows in rotated])
        plain.stored()
        for layer in range(LAYERS):
            for sequence, table in enumerate(batch.tables):
                (keys, values), (other, same) = (
                    batch_read.read(layer, table, batch.tokens(sequence))
                    for batch_read in (batch, plain)
                )
                assert ((keys - other).abs() > _TIPPED).double().mean() <= _TIPPED
                assert values.equal(same)

    def _store_rotated(self, batch: RandomBatch, *, adjacent: bool) -> list[list[Tensor]]:
        """Store all tokens, two thirds of each key rotated; return the keys as fp64 has them.

        The first layer uses tables with a row for each token, the second tables with a row for
        each position.
        """
        backend, lengths = batch.backend, [batch.tokens(n) for n in range(len(batch.tables))]
        pairs = batch.layout.head_dim // 3
        rotary = Rotary(tuple(0.7**i for i in range(pairs)), adjacent)
        spans = [torch.arange(tokens) + 5 for tokens in lengths]
        positions = torch.cat(spans)
        wide = "fp64" if "fp64" in self.dtypes else "fp32"
        plan = backend.plan(RaggedBatch(batch.tables, [0] * len(lengths), lengths))
        for layer, places in enumerate((None, backend.tensor(positions))):
            rows = positions if places is None else torch.arange(max(lengths) + 5)
            cos, sin = (backend.tensor(table, wide) for table in rotary.angles(rows))
            keys, values = (
                backend.tensor(torch.cat(part[layer]), batch.layout.dtype)
                for part in (batch.keys, batch.values)
            )
            turn = Rotation(cos, sin, places, adjacent=adjacent)
            backend.store_rotated(layer, plan, keys, values, turn)
        angles = [[angle[:, None] for angle in rotary.angles(span)] for span in spans]
        return [
            [
                rotary.rotate(rows.double(), *angles_of_layer)
                for rows, angles_of_layer in zip(layer, angles, strict=True)
            ]
            for layer in batch.keys
        ]

    def test_reads_copies(self) -> None:
        """Tensors that `read` has returned do not change when their block is written."""
        batch = self.batch(2)
        batch.stored()
        keys, _ = batch.backend.read(0, batch.tables[0], 1)
        batch.backend.fill(0)
        assert self.numbers(keys).equal(batch.keys[0][0][:1].double())

    @_windows
    def test_weighs_tokens(self, seed: int, window: int | None, sinks: int) -> None:
        """`attend_weighed` has the output of `attend`, and sums of the attention weights.

        Skipped if the backend raises InputError: it does not return weights.
        """
        self.batch(seed).check_weighed(window=window, sinks=sinks)
        self.batch(seed, lengths=[1] * 9).check_weighed(window=window, sinks=sinks)

    @pytest.mark.parametrize("alike", [False, True], ids=["by head", "alike"])
    def test_windows_go_by_position(self, seed: int, alike: bool) -> None:  # noqa: FBT001
        """After a compaction, a window is counted in positions, not in held tokens.

        Skipped if the backend refuses such a plan by InputError.
        """
        contexts, lengths = [30, 25, 0, 60], [1, 20, 30, 7]
        batch = self.batch(seed, contexts=contexts, lengths=lengths, value_dim=16)
        batch.check_by_position(seed, window=20, sinks=3, alike=alike)

    @_together
    @_dtypes
    def test_moves_tokens(self, dtype: str, together: bool) -> None:  # noqa: FBT001
        """`move_tokens` moves the tokens of each head as if all at once."""
        batch = self.batch(6, dtype, contexts=[0], lengths=[50], room=1, together=together)
        batch.stored()
        (table,), heads = batch.tables, range(batch.layout.kv_heads)
        turn = [torch.randperm(50, generator=torch.Generator().manual_seed(h)) for h in heads]
        moves = [
            (head, int(source), index)
            for head, order in enumerate(turn)
            for index, source in enumerate(order)
            if index != source
        ]
        batch.backend.move_tokens(1, table, table, torch.tensor(moves).T)
        for part, stored in zip(
            batch.read(1, table, 50), (batch.keys, batch.values), strict=True
        ):
            for head, order in enumerate(turn):
                assert part[:, head].equal(stored[1][0][order, head].double())
        assert batch.is_stored([0]), "tokens of another layer have moved"

    @_together
    def test_copies_blocks(self, together: bool) -> None:  # noqa: FBT001
        """A copy of a block has its K/V in all layers, and is independent of it."""
        batch = self.batch(3, contexts=[0], lengths=[40], room=40, together=together)
        batch.stored()
        (table,) = batch.tables
        targets = batch.spare[: len(table)]
        batch.backend.copy_blocks(zip(table, targets, strict=True))
        batch.backend.copy_blocks([])
        batch.backend.fill(nan, table)
        assert attrs.evolve(batch, tables=[targets]).is_stored()

    @_together
    def test_moves_blocks(
        self,
        seed: int,
        together: bool,  # noqa: FBT001
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """`move_blocks` moves blocks as if all at once, in chains and cycles of any length.

        The number of bytes that are copied at a time makes no difference.
        """
        batch = self.batch(seed, together=together, room=20)
        size = batch.layout.bytes_per_block * (1, 5, 1000)[seed % 3]
        monkeypatch.setattr(type(batch.backend), "moved_bytes", size)
        batch.stored()
        blocks = [*range(batch.layout.blocks)]
        Random(f"moves {seed}").shuffle(blocks)  # noqa: S311
        moved = [block for table in batch.tables for block in table]
        stay = {block for block in moved if block % 4 == 0}  # so chains have ends
        free = [block for block in blocks if block not in stay]
        to = {block: block if block in stay else free.pop() for block in moved}
        batch.backend.move_blocks([pair for pair in to.items() if pair[0] not in stay])
        batch.backend.move_blocks([])
        tables = [[to[block] for block in table] for table in batch.tables]
        assert attrs.evolve(batch, tables=tables).is_stored()

    def test_refuses_moves_to_one_place(self) -> None:
        """Two moves that share a source or a target are refused, and change nothing."""
        batch = self.batch(0, room=3)
        batch.stored()
        (first, second, *_), (third, *_) = batch.spare, batch.tables[0]
        for pairs in ([(first, third), (second, third)], [(third, first), (third, second)]):
            with pytest.raises(InputError, match="share a source or a target"):
                batch.backend.move_blocks(pairs)
        assert batch.is_stored()

    @_together
    @_dtypes
    def test_swaps(self, dtype: str, together: bool) -> None:  # noqa: FBT001
        """Blocks that are swapped out, and into other blocks, keep their K/V; others stay."""
        fixed: Any = {"contexts": [0, 0], "lengths": [40, 30], "room": 40}
        batch = self.batch(4, dtype, together=together, **fixed)
        batch.stored()
        table, other = batch.tables
        host = batch.backend.swap_out(table)
        batch.backend.fill(nan, table)
        targets = batch.spare[: len(table)]
        batch.backend.swap_in(host, targets)
        assert attrs.evolve(batch, tables=[targets, other]).is_stored()

    @_together
    @_dtypes
    def test_gives_and_takes_bytes(self, dtype: str, together: bool) -> None:  # noqa: FBT001
        """Bytes from `read_blocks`, written to other blocks, are the same K/V; others stay.

        The buffer belongs to the caller. Skipped if `read_blocks` raises InputError.
        """
        fixed: Any = {"contexts": [0, 0], "lengths": [48, 30], "room": 60, "block_size": 16}
        batch = self.batch(4, dtype, together=together, value_dim=8, head_dim=24, **fixed)
        batch.stored()
        backend, (table, other) = batch.backend, batch.tables
        buffer = backend.host_buffer(len(table))
        assert buffer.nbytes == len(table) * batch.layout.bytes_per_block
        try:
            backend.read_blocks(table, buffer)
        except InputError as error:
            pytest.skip(str(error))
        backend.fill(nan, table)
        kept, targets = bytes(buffer), batch.spare[: len(table)]
        backend.write_blocks(targets, buffer)
        buffer.cast("B")[:] = bytes(buffer.nbytes)
        assert attrs.evolve(batch, tables=[targets, other]).is_stored()
        backend.read_blocks(targets[1:], buffer[1:])
        size = batch.layout.bytes_per_block
        assert bytes(buffer)[size:] == kept[size:]
        backend.read_blocks([], buffer[:0])
        backend.write_blocks([], memoryview(b""))

    @_together
    def test_fills(self, together: bool) -> None:  # noqa: FBT001
        """`fill` sets all numbers of the given blocks, or of all blocks, and no others."""
        batch = self.batch(5, room=40, together=together)
        size = batch.layout.block_size
        spare, *others = batch.spare
        batch.backend.fill(2)
        batch.backend.fill(0, [spare])
        for layer in range(LAYERS):
            for part in batch.read(layer, [spare], size):
                assert part.eq(0).all()
            for part in batch.read(layer, others, size * len(others)):
                assert part.eq(2).all()

    def test_tensors(self) -> None:
        """Integers stay integers, other numbers get the given dtype, or the layout's."""
        last = self.dtypes[-1]  # the coarsest of all dtypes, which rounds integers
        backend = self.batch(0, last).backend
        assert self.numbers(backend.tensor([[1, 2**40 + 1]])).tolist() == [[1, 2**40 + 1]]
        exact = torch.tensor([0.1, 0.2], dtype=torch.float64)
        for dtype, given in ((last, None), *zip(self.dtypes, self.dtypes, strict=True)):
            rounded = exact.to(torch_dtype(dtype)).tolist()
            assert self.numbers(backend.tensor([0.1, 0.2], given)).tolist() == rounded
            again = backend.tensor(backend.tensor([0.5, 3.0]), given)
            assert self.numbers(again).tolist() == [0.5, 3.0]

    def test_reports_its_memory(self) -> None:
        """`memory` counts the pool at least, and no more free bytes than there are in total."""
        batch = self.batch(0)
        memory = batch.backend.memory()
        assert memory.allocated >= batch.layout.bytes
        if memory.free is not None and memory.total is not None:
            assert 0 <= memory.free <= memory.total

    def test_refuses_a_pool_that_does_not_fit(self) -> None:
        """A pool that is too large is a StorageError with its size; no memory is kept."""
        backend = self.make()
        layout = random_layout(Random(0), dtype=self._wide, blocks=2**44)  # noqa: S311
        before = backend.memory().allocated
        with pytest.raises(StorageError, match=f"{2**44:,} blocks"):
            backend.allocate(layout)
        assert backend.layout is None
        assert backend.memory().allocated == before

    def test_equal_steps_are_equal(self, seed: int) -> None:
        """Equal steps have equal bits, wherever in the pool their blocks are."""
        first, other = (self.batch(seed, shuffle=shuffle) for shuffle in (1, 2))
        assert first.attend(0, first.stored()).equal(other.attend(0, other.stored()))

    @property
    def _wide(self) -> str:
        """Return the widest of `dtypes`."""
        return next(dtype for dtype in TENSOR_DTYPES if dtype in self.dtypes)

    def batch(self, seed: int, dtype: str | None = None, **fixed: Any) -> RandomBatch:
        """Return a random batch over a new backend; `fixed` arguments are not random."""
        dtype = dtype or self._wide
        if dtype not in self.dtypes:
            pytest.skip(f"{qualified(type(self))} does not declare the dtype {dtype}")
        return RandomBatch.draw(
            seed, self.make(), self.numbers, self.tolerances[dtype], dtype=dtype, **fixed
        )


_TIPPED = 0.01
"""Difference of decoded keys above rounding, and the fraction that may have it."""

LAYERS = 2
"""Number of layers of random layouts."""

_HALF = 0.5


def random_layout(random: Random, **fixed: Any) -> TensorLayout:
    """Return a small layout of `LAYERS` layers; `fixed` fields are not random."""
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
class RandomBatch:
    """Sequences with all their K/V and queries on the host, and their blocks in a backend.

    Attributes:
        backend: the backend.
        layout: layout of its pool, which is full of NaN at first.
        tables: block ids of each sequence, in random order.
        spare: block ids that belong to no sequence.
        contexts: number of tokens before the step, of each sequence.
        lengths: number of new tokens of each sequence.
        queries, keys, values: `[layer][sequence]` tensors `[tokens, heads, width]` of
            normally distributed numbers.
        numbers: function that returns a tensor of the backend in fp64 on the host.
        tolerance: allowed difference of attention.
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
    ) -> RandomBatch:
        """Return a random batch over a new backend, whose pool it allocates.

        Drawn from `seed`, unless given: contexts, lengths, the number of query heads that
        share a K/V head (`group`), and fields of the layout (`fixed`). The pool has `room`
        spare blocks. `shuffle` changes the block tables, and nothing else.
        """
        random = Random(seed)  # noqa: S311
        sizes = random_layout(random, **fixed)
        group = group or random.choice([1, 2, 4])
        if lengths is None:
            lengths = [random.choice([1, 1, random.randint(1, 70)]) for _ in range(6)]
        if contexts is None:
            contexts = [random.choice([0, random.randint(1, 200)]) for _ in lengths]
        total = [context + length for context, length in zip(contexts, lengths, strict=True)]
        blocks_of = [-(-tokens // sizes.block_size) for tokens in total]
        layout = attrs.evolve(sizes, blocks=sum(blocks_of) + room)
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
            rounded = [row.to(torch_dtype(layout.dtype)) for row in rows]
            return [rounded[: len(total)], rounded[len(total) :]]

        return cls(
            backend=backend,
            layout=layout,
            tables=[[order.pop() for _ in range(blocks)] for blocks in blocks_of],
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
        """Return the number of tokens of a sequence after the step."""
        return self.contexts[number] + self.lengths[number]

    def check(self, **options: Any) -> None:
        """Store contexts, then the new tokens; compare attention with that in fp64."""
        self.compare(self.stored(), self.contexts, self.lengths, **options)

    def stored(self) -> Any:
        """Store contexts, then the new tokens; return the plan of the new tokens."""
        self.store([0] * len(self.contexts), self.contexts)
        return self.store(self.contexts, self.lengths)

    def store(self, begins: Sequence[int], counts: Sequence[int]) -> Any:
        """Store `counts` tokens of each sequence from `begins` on, in all layers.

        Returns the plan, without sequences of count 0.
        """
        chosen = [sequence for sequence, count in enumerate(counts) if count]
        if not chosen:
            return None
        plan = self.backend.plan(
            RaggedBatch(
                [self.tables[sequence] for sequence in chosen],
                [begins[sequence] for sequence in chosen],
                [counts[sequence] for sequence in chosen],
            )
        )
        spans = {
            sequence: slice(begins[sequence], begins[sequence] + counts[sequence])
            for sequence in chosen
        }
        for layer in range(LAYERS):
            rows = (
                torch.cat([part[layer][sequence][span] for sequence, span in spans.items()])
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
        """Return the backend's attention for the tokens of a plan; None: for the new ones."""
        begins = self.contexts if begins is None else begins
        counts = self.lengths if counts is None else counts
        queries = torch.cat(
            [
                rows[begin : begin + count]
                for rows, begin, count in zip(self.queries[layer], begins, counts, strict=True)
            ]
        )
        stored_queries = self.backend.tensor(queries, self.layout.dtype)
        return self.numbers(self.backend.attend(layer, plan, stored_queries, **options))

    def compare(
        self,
        plan: Any,
        begins: Sequence[int],
        counts: Sequence[int],
        positions: Sequence[Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Compare the attention of a plan, in all layers, with that in fp64.

        `positions` are those of the tokens of each sequence, `[layers, K/V heads, tokens]`;
        None: 0, 1, 2 and so on.
        """
        exact = dict(options)
        if "sink_logits" in exact:
            exact["sink_logits"] = self.numbers(exact["sink_logits"])
        for layer in range(LAYERS):
            expected = []
            for sequence, (begin, count) in enumerate(zip(begins, counts, strict=True)):
                queries, keys, values = (
                    part[layer][sequence][: begin + count].double()
                    for part in (self.queries, self.keys, self.values)
                )
                if positions is not None:
                    exact["positions"] = positions[sequence][layer]
                expected.append(attention(queries[begin:], keys, values, **exact))
            self.near(self.attend(layer, plan, begins, counts, **options), torch.cat(expected))

    def check_weighed(self, **options: Any) -> None:
        """Compare the attention and its summed weights, in all layers, with those in fp64."""
        plan = self.stored()
        for layer in range(LAYERS):
            new = [rows[n:] for rows, n in zip(self.queries[layer], self.contexts, strict=True)]
            stored_queries = self.backend.tensor(torch.cat(new), self.layout.dtype)
            try:
                out, sums = self.backend.attend_weighed(layer, plan, stored_queries, **options)
            except InputError as error:
                pytest.skip(str(error))
            expected = self.attend(layer, plan, **options)
            self.near(self.numbers(out), expected, 8)
            for queries, keys, sums_of_sequence in zip(
                new, self.keys[layer], sums, strict=True
            ):
                # Attention over values of which each has a dimension of its own.
                tokens, heads = keys.shape[:2]
                apart = torch.eye(tokens).double()[:, None].expand(-1, heads, -1)
                weights = attention(queries.double(), keys, apart, **options)
                summed = weights.reshape(len(queries), heads, -1, tokens).sum((0, 2))
                self.near(self.numbers(sums_of_sequence), summed, 8)

    def near(self, computed: Tensor, expected: Tensor, times: int = 1) -> None:
        """Check that numbers differ by no more than so many times the tolerance."""
        most = times * self.tolerance
        torch.testing.assert_close(computed, expected, atol=most, rtol=most)

    def check_by_position(self, seed: int, *, window: int, sinks: int, alike: bool) -> None:
        """Compare attention within a window where tokens have random positions, in no order.

        All layers and heads have equal positions if `alike`.
        """
        draw, lost = torch.Generator().manual_seed(seed), 40
        shape = (1, 1) if alike else (LAYERS, self.layout.kv_heads)
        held_positions = [
            torch.rand(*shape, n + lost, generator=draw).argsort(2)[..., :n]
            for n in self.contexts
        ]
        starts = [n + lost for n in self.contexts]  # a context of none: all tokens are lost
        positions = [
            torch.arange(start, start + length)
            for start, length in zip(starts, self.lengths, strict=True)
        ]
        self.stored()
        batch = RaggedBatch(
            self.tables,
            self.contexts,
            self.lengths,
            positions=torch.cat(positions).tolist(),
            held_positions={
                index: positions_held[0, 0] if alike else positions_held
                for index, positions_held in enumerate(held_positions)
            },
        )
        try:
            plan = self.backend.plan(batch)
        except InputError as error:
            pytest.skip(str(error))
        of_all = LAYERS, self.layout.kv_heads, -1
        both = [
            torch.cat((old.expand(of_all), own.expand(of_all)), 2)
            for old, own in zip(held_positions, positions, strict=True)
        ]
        self.compare(plan, self.contexts, self.lengths, both, window=window, sinks=sinks)

    def is_stored(
        self, layers: Sequence[int] = range(LAYERS), numbers: Sequence[int] | None = None
    ) -> bool:
        """Return True if the tables hold exactly the K/V of sequences, in these layers.

        `numbers` are those of the sequences; None: of all.
        """
        return all(
            read.equal(stored[layer][number].double())
            for layer in layers
            for number, table in enumerate(self.tables)
            if numbers is None or number in numbers
            for read, stored in zip(
                self.read(layer, table, self.tokens(number)),
                (self.keys, self.values),
                strict=True,
            )
        )

    def read(self, layer: int, table: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Return what `Backend.read` returns, in fp64 on the host."""
        keys, values = self.backend.read(layer, table, tokens)
        return self.numbers(keys), self.numbers(values)
