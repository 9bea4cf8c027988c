"""The conformance tests of codecs."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import attrs
import pytest

from kvcore.errors import KvcoreError
from kvcore.lazy import LazyModule
from kvcore.models.codec import Codec, Part
from kvcore.plugins import Plugins
from kvcore_testing.backend import LAYERS, RandomBatch
from kvcore_testing.dense import attention, torch_dtype
from kvcore_testing.plugin import PluginTests, seeds

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch", globals())

_parts = pytest.mark.parametrize("part", get_args(Part))
_dtypes = pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
HEADS = 6
"""Number of heads, of one or several blocks, in a call of `encode`."""

_BOUND = (
    "`error` of the kit, or its bound(), is the largest error as a fraction of the largest "
    "number of a head in a block; give what the codec promises, and let each head have a scale"
)

_OTHERS = (
    "blocks have other codes than encode() gives for their rows alone: the codes of a head of "
    "a block may not depend on other heads and blocks, nor on how many a call has"
)


class CodecTests(PluginTests[Codec]):
    """Conformance tests of a codec; a derived `Test...` class makes the codec.

    The attribute `codec` is what `make` calls, and `error` bounds that of a decoded number:

        class TestMine(CodecTests):
            codec = Mine
            error = 1 / 250

    The tests encode and decode rows by the codec alone, then in blocks of the `torch-cpu`
    backend. Needs torch.

    Attributes:
        error: largest error of a number, as a fraction of the largest absolute number of its
            head in its block. Override `bound` if it depends on more.
        block_size, width: sizes that the codec supports: tokens of a block, width of a head.
    """

    base = Codec
    codec: ClassVar[Callable[[], Codec]]
    error: ClassVar[float]
    block_size: ClassVar[int] = 32
    width: ClassVar[int] = 64

    def bound(self, part: Part, rows: Tensor) -> Tensor:
        """Return the largest error of `rows`, `[n, tokens of a block, width]`.

        The tensor is fp64, of a shape that can be expanded to that of `rows`.
        """
        return self.error * rows.double().abs().amax((1, 2), keepdim=True)

    seed = seeds(2)

    @_parts
    def test_planes_match_encoded_rows(self, part: Part) -> None:
        """Encoded rows have the shapes and the bytes that `planes` declares."""
        codec = self.make()
        rows = _rows(self.block_size, self.width)
        planes = codec.planes(part, self.block_size, self.width)
        coded = codec.encode(part, rows)
        for plane, data in zip(planes, coded, strict=True):
            assert tuple(data.shape) == (HEADS, *plane.shape), plane.name
            assert data.nbytes == HEADS * plane.bytes, plane.name
        widths = (self.width, 0) if part == "keys" else (0, self.width)
        bytes_ = sum(plane.bytes for plane in planes)
        assert codec.head_bytes(self.block_size, *widths) == bytes_

    @_parts
    @_dtypes
    def test_round_trip(self, part: Part, dtype: str) -> None:
        """Decoded numbers are within the bound: small, large, with offset or outlier."""
        codec = self.make()
        normal = _rows(self.block_size, self.width)
        spiked = normal.clone()
        spiked[:, :, 3] *= 20  # as keys have it
        for rows in (normal, normal / 100, normal * 50, normal + 10, spiked):
            rows_given = rows.to(torch_dtype(dtype))
            before = rows_given.clone()
            decoded = codec.decode(part, codec.encode(part, rows_given))
            assert decoded.is_floating_point()
            assert decoded.shape == rows_given.shape
            assert rows_given.equal(before), "encode() changed its argument"
            errors = (decoded.double() - rows_given.double()).abs()
            bounds = self.bound(part, rows_given).expand_as(errors)
            at = (errors - bounds).argmax()
            error, bound = errors.flatten()[at], bounds.flatten()[at]
            assert error <= bound, f"an error is {error:.3g}, the bound {bound:.3g}: {_BOUND}"
            assert not torch.isnan(decoded).any()

    @_parts
    def test_heads_do_not_mix(self, part: Part) -> None:
        """A head has the same codes, and the same decoded numbers, alone and with others."""
        self._check_alone(part, 0, "head")

    @_parts
    def test_tokens_are_coded_alone(self, part: Part) -> None:
        """With `by_token`, the codes of a token do not depend on other tokens."""
        codec = self.make()
        if not codec.by_token(part):
            pytest.skip(f"{part} are encoded by blocks: by_token is False")
        planes = codec.planes(part, self.block_size, self.width)
        assert all(plane.shape[0] == self.block_size for plane in planes), (
            "with by_token, the first dimension of each plane is the token"
        )
        self._check_alone(part, 1, "token")

    def _check_alone(self, part: Part, dimension: int, what: str) -> None:
        """Check that each head or token, a slice of `dimension`, is coded alone as in rows."""
        codec, rows = self.make(), _rows(self.block_size, self.width)
        together = codec.encode(part, rows)
        decoded = codec.decode(part, together)
        for index in range(rows.shape[dimension]):
            only = dimension, index, 1
            alone = codec.encode(part, rows.narrow(*only))
            codes = zip(together, alone, strict=True)
            assert all(_same(plane.narrow(*only), own) for plane, own in codes), (
                f"{what} {index} has other codes alone than with other {what}s"
            )
            assert _same(decoded.narrow(*only), codec.decode(part, alone)), (
                f"{what} {index} decodes otherwise alone than with other {what}s"
            )

    @_parts
    @pytest.mark.parametrize("constant", [0.0, 0.1, -3.0, 12.5])
    def test_constant_rows(self, part: Part, constant: float) -> None:
        """Rows of a constant decode to a constant within the bound; zeros to zeros."""
        rows = _rows(self.block_size, self.width) * 0 + constant
        codec = self.make()
        decoded = codec.decode(part, codec.encode(part, rows)).double()
        assert decoded.min() == decoded.max(), f"rows of {constant} do not decode to a constant"
        assert ((decoded - rows).abs() <= self.bound(part, rows)).all(), (
            f"rows of {constant} decode to {decoded.min()}, above the bound: {_BOUND}"
        )
        assert constant or not decoded.any(), "zeros do not decode to zeros"

    @_parts
    def test_nan_is_not_lost(self, part: Part) -> None:
        """A NaN decodes to NaN; so may numbers of its head and block, and no others."""
        rows = _rows(self.block_size, self.width)
        rows[1, 2, 3] = nan
        codec = self.make()
        decoded = codec.decode(part, codec.encode(part, rows))
        assert decoded[1, 2, 3].isnan(), f"a NaN decodes to {decoded[1, 2, 3]}"
        assert not decoded[[0, *range(2, HEADS)]].isnan().any(), "other heads decode to NaN"

    @_parts
    @pytest.mark.parametrize("sign", [1, -1])
    def test_infinity_stays_the_greatest(self, part: Part, sign: int) -> None:
        """An infinite number decodes to NaN, or to more than all others of its token."""
        rows = _rows(self.block_size, self.width)
        rows[1, 2, 3] = sign * inf
        codec = self.make()
        decoded = codec.decode(part, codec.encode(part, rows)) * sign
        infinite, rest = decoded[1, 2, 3], decoded[1, 2, [*range(3), *range(4, self.width)]]
        assert infinite.isnan() or infinite > rest.max().clamp(0), (
            f"{sign * inf} decodes to {infinite * sign}, not the greatest of its token"
        )

    def test_attends_to_decoded_rows(self, seed: int) -> None:
        """Attention over blocks equals attention in fp64 over decoded rows."""
        batch = self._ragged(seed)
        plan = batch.stored()
        coded = self.coded(batch)
        windows: list[dict[str, Any]] = [{}, {"window": 20, "sinks": 3}, {"window": 1}]
        for options in (*windows, {"scale": 0.3}):
            coded.compare(plan, batch.contexts, batch.lengths, **options)

    def test_attention_is_near(self, seed: int) -> None:
        """Attention over blocks is as near to that over the rows as the bound implies.

        Scores change by at most d, the scale times the sum of |query| * bound of a key. The
        weights of a softmax then change by a total variation of at most tanh(d / 2), and its
        output by that share of the range of the values, and by the error of a value.
        """
        batch = self._ragged(seed)
        plan = batch.stored()
        for layer in range(LAYERS):
            exact, allowed = [], []
            for sequence, context in enumerate(batch.contexts):
                queries, keys, values = (
                    part[layer][sequence].double()
                    for part in (batch.queries, batch.keys, batch.values)
                )
                new_queries = queries[context:]
                exact.append(attention(new_queries, keys, values))
                group = queries.shape[1] // keys.shape[1]
                key_errors, value_errors = (
                    self._errors(part, rows).repeat_interleave(group, 1)
                    for (part, _), rows in zip(_halves(batch), (keys, values), strict=True)
                )
                shift = torch.einsum("qhd,khd->qhk", new_queries.abs(), key_errors).amax(-1)
                change = (shift * queries.shape[2] ** -0.5 / 2).tanh()[..., None]
                spread = (values.amax(0) - values.amin(0)).repeat_interleave(group, 0)
                allowed.append(change * spread + value_errors.amax(0) + batch.tolerance)
            error = (batch.attend(layer, plan) - torch.cat(exact)).abs()
            over = (error - torch.cat(allowed)).max()
            assert over <= 0, f"an output is {over:.3g} above the bound: {_BOUND}"

    def test_chunks_are_one_prefill(self, seed: int) -> None:
        """A prompt that is stored in chunks has the K/V of one stored at once."""
        random = Random(seed)  # noqa: S311
        tokens = 2 * self.block_size + random.randint(1, self.block_size)
        batch = self.batch(seed, contexts=[0], lengths=[tokens])
        cuts = sorted(random.sample(range(1, tokens), 5))
        for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            batch.store([begin], [end - begin])
        assert self.coded(batch).is_stored(), _OTHERS

    def test_token_by_token(self) -> None:
        """Sequences stored token by token have the K/V of sequences stored at once."""
        lengths = [self.block_size + 3, 2 * self.block_size]
        batch = self.batch(0, contexts=[0, 0], lengths=lengths)
        for token in range(max(lengths)):
            counts = [int(token < length) for length in lengths]
            batch.store([min(token, length) for length in lengths], counts)
        assert self.coded(batch).is_stored(), _OTHERS

    def test_a_block_is_written_again(self) -> None:
        """After a rollback into a full block, kept tokens are near, and later ones new."""
        size = self.block_size
        batch = self.batch(1, contexts=[0], lengths=[2 * size + 1])
        batch.stored()
        back = size + size // 2
        batch.store([back], [size - size // 2 + 1])
        rows_read = batch.read(0, batch.tables[0], 2 * size)
        for (part, half), rows in zip(_halves(batch), rows_read, strict=True):
            stored = half[0][0][: 2 * size]
            near = 2 * self._errors(part, stored) + batch.tolerance
            assert ((rows - stored).abs() <= near).all(), (
                f"after a rollback, {part} are more than twice the bound away: {_BOUND}"
            )
            first = self._coded_rows(part, stored)[:size]
            torch.testing.assert_close(rows[:size], first, atol=0, rtol=0)

    def test_copies_part_in_two(self) -> None:
        """A copy of a block, full or not, has its K/V; after that they are independent."""
        size = self.block_size
        batch = self.batch(3, contexts=[0, 0], lengths=[2 * size, 2 * size])
        shared = size + 5
        for half in (batch.keys, batch.values):
            for layer in half:
                layer[1][:shared] = layer[0][:shared]
        batch.store([0, 0], [shared, 0])
        batch.backend.copy_blocks(zip(*batch.tables, strict=True))
        batch.backend.copy_blocks([])
        batch.store([shared, shared], [size - 5, size - 5])
        assert self.coded(batch).is_stored(), _OTHERS

    def test_moves(self) -> None:
        """Blocks that move keep their K/V, full or not, and can be filled up after it."""
        size = self.block_size
        batch = self.batch(5, contexts=[0, 0], lengths=[2 * size, size + 9], room=1)
        batch.store([0, 0], [size + 5, size + 3])
        (a, b), (c, d), (e,) = *batch.tables, batch.spare
        batch.backend.move_blocks([(a, b), (b, a), (c, d), (d, e)])
        moved = attrs.evolve(batch, tables=[[b, a], [d, e]])
        moved.store([size + 5, size + 3], [size - 5, 6])
        assert self.coded(moved).is_stored(), _OTHERS

    def test_swaps(self) -> None:
        """Blocks that are swapped out and in keep their K/V, and can be filled up after it."""
        size = self.block_size
        batch = self.batch(4, contexts=[0, 0], lengths=[size + 5, size + 9], room=4)
        batch.store([0, 0], [size + 5, size + 3])
        table, other = batch.tables
        host = batch.backend.swap_out(other)
        batch.backend.fill(nan, other)
        targets = batch.spare[: len(other)]
        batch.backend.swap_in(host, targets)
        moved = attrs.evolve(batch, tables=[table, targets])
        moved.store([0, size + 3], [0, 6])
        assert self.coded(moved).is_stored(), _OTHERS

    def test_gives_and_takes_bytes(self) -> None:
        """Bytes from `read_blocks`, written to other blocks, are the same K/V."""
        size = self.block_size
        batch = self.batch(4, contexts=[0, 0], lengths=[2 * size, size + 9], room=4)
        batch.store([0, 0], [2 * size, size + 3])
        backend, (table, other) = batch.backend, batch.tables
        buffer = backend.host_buffer(3)
        backend.read_blocks([*table, other[0]], buffer)
        backend.fill(nan, [*table, other[0]])
        targets = batch.spare[:3]
        backend.write_blocks(targets, buffer)
        moved = attrs.evolve(batch, tables=[targets[:2], [targets[2], other[1]]])
        moved.store([0, size + 3], [0, 6])
        assert self.coded(moved).is_stored(), _OTHERS

    def test_fills(self) -> None:
        """`fill` sets the given blocks, full or not, and no others."""
        size = self.block_size
        batch = self.batch(5, contexts=[0, 0], lengths=[size + 5, size + 5])
        batch.stored()
        table, other = batch.tables
        batch.backend.fill(0, table)
        assert all(not rows.any() for rows in batch.read(0, table, 2 * size))
        assert self.coded(batch).is_stored(numbers=[1])
        batch.backend.fill(nan)
        assert all(rows.isnan().all() for rows in batch.read(0, other, 2 * size))

    @pytest.mark.parametrize("second", ["none", "last", "new"])
    def test_moves_tokens(self, seed: int, second: str) -> None:
        """A compaction keeps the chosen tokens of each head, in fewer blocks.

        Tokens that are encoded by themselves keep their codes; others are within the bound.
        """
        random, size = Random(seed), self.block_size  # noqa: S311
        tokens, kept = 3 * size + 7, size + (0 if second == "none" else 5)
        batch = self.batch(seed, contexts=[0], lengths=[tokens], room=2)
        batch.stored()
        (table,) = batch.tables
        before = [self._coded_rows(p, r[0][0]).double() for p, r in _halves(batch)]
        # Its own first block alone, with its last one, or with a new one.
        into = table[:1] + {"none": [], "last": table[-1:], "new": batch.spare[:1]}[second]
        moves = []
        chosen = torch.empty(kept, batch.layout.kv_heads, dtype=torch.int64)
        for head in range(batch.layout.kv_heads):
            stay = random.sample(range(size), size // 2)
            come = random.sample(range(size, tokens), kept - len(stay))
            free = [index for index in range(kept) if index not in stay]
            chosen[stay, head] = torch.tensor(stay)
            chosen[free, head] = torch.tensor(come)
            moves += [(head, *pair) for pair in zip(come, free, strict=True)]
        batch.backend.move_tokens(0, table, into, torch.tensor(moves).t())
        rows_read = batch.read(0, into, kept)
        for (part, _), rows, rows_before in zip(_halves(batch), rows_read, before, strict=True):
            index = chosen[..., None].expand(-1, -1, rows_before.shape[2])
            expected = rows_before.gather(0, index)
            near = torch.zeros(())
            if not self.make().by_token(part):
                near = 2 * self._errors(part, expected) + batch.tolerance
            assert ((rows - expected).abs() <= near).all()

    def batch(self, seed: int, **fixed: Any) -> RandomBatch:
        """Return a random batch over a new backend that stores K/V by this codec."""
        try:
            backend = Plugins().build("backend", "torch-cpu")
        except KvcoreError as error:
            pytest.skip(str(error))
        return RandomBatch.draw(
            seed,
            backend,
            lambda tensor: tensor.double(),
            1e-10,
            dtype="fp64",
            codec=self.make(),
            block_size=self.block_size,
            head_dim=self.width,
            together=False,
            **fixed,
        )

    def coded(self, batch: RandomBatch) -> RandomBatch:
        """Return the batch with its K/V as decoded from full blocks."""
        keys, values = (
            [[self._coded_rows(part, rows) for rows in layer] for layer in half]
            for part, half in _halves(batch)
        )
        return attrs.evolve(batch, keys=keys, values=values)

    def _ragged(self, seed: int) -> RandomBatch:
        """Return a batch of prefill and decode, with last blocks that are full or not."""
        size = self.block_size
        contexts = [0, 2 * size + 3, size - 1, size, 5]
        return self.batch(seed, contexts=contexts, lengths=[size + 5, 1, 4, 1, 1])

    def _coded_rows(self, part: Part, rows: Tensor) -> Tensor:
        """Return `[tokens, heads, width]` as decoded; a block may be encoded only once full."""
        codec, done = self.make(), len(rows)
        if not codec.by_token(part):
            done -= done % self.block_size
        out = rows.clone()
        if done:
            tokens = 1 if codec.by_token(part) else self.block_size
            # [blocks * heads, tokens of a block, width]
            blocks = rows[:done].view(-1, tokens, *rows.shape[1:]).transpose(1, 2)
            decoded = codec.decode(part, codec.encode(part, blocks.flatten(0, 1)))
            decoded = decoded.to(rows.dtype).view(blocks.shape)
            out[:done] = decoded.transpose(1, 2).flatten(0, 1)
        return out

    def _errors(self, part: Part, rows: Tensor) -> Tensor:
        """Return the largest error of each number of `[tokens, heads, width]`."""
        count = -(-len(rows) // self.block_size) * self.block_size
        padded = rows[[min(index, len(rows) - 1) for index in range(count)]]
        blocks = padded.view(-1, self.block_size, *rows.shape[1:]).transpose(1, 2)
        flat = blocks.flatten(0, 1)
        bounds = self.bound(part, flat).expand(flat.shape).reshape(blocks.shape)
        errors = bounds.transpose(1, 2).flatten(0, 1)
        return errors[: len(rows)]


def _halves(batch: RandomBatch) -> list[tuple[Part, list[list[Tensor]]]]:
    """Return the keys and the values of a batch."""
    return [("keys", batch.keys), ("values", batch.values)]


def _rows(tokens: int, width: int) -> Tensor:
    """Return normally distributed rows, `[HEADS, tokens, width]`, in fp64."""
    draws = torch.Generator().manual_seed(tokens * width)
    return torch.randn(HEADS, tokens, width, generator=draws, dtype=torch.float64)


def _same(first: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal, a NaN to a NaN."""
    return bool(((first == other) | (first.isnan() & other.isnan())).all())
