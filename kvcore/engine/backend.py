"""The backend contract: where K/V lies as tensors, and how queries attend to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NoReturn, TypeAlias, TypedDict, Unpack

import attrs

from kvcore.engine.batch import RaggedBatch, Tensor
from kvcore.engine.rotary import Rotation
from kvcore.errors import InputError
from kvcore.models.codec import PLANE_BYTES, TENSOR_DTYPES, Codec, Part
from kvcore.models.spec import ModelSpec
from kvcore.plugins.base import Plugin


@attrs.frozen(kw_only=True)
class TensorLayout:
    """Shape of a pool of K/V blocks, the same for all layers.

    K of a layer is `[blocks, kv_heads, block_size, head_dim]`, V the same with `value_dim`:
    a block is one contiguous run of memory per layer, and within it per head. With
    `together` the layers of a block lie side by side, so that a block is one run for all
    layers, which is swapped fastest.

    Attributes:
        blocks: number of blocks in the pool.
        block_size: number of tokens that a block holds.
        layers: number of layers with K/V of their own.
        kv_heads: number of K/V heads in a layer.
        head_dim: width of a query and of a key.
        value_dim: width of a value.
        dtype: dtype in which K/V is computed, one of `TENSOR_DTYPES`.
        together: whether all layers of a block are one run of memory.
        codec: codes the numbers of a block; None: they are stored as they are computed.

    Raises:
        InputError: a size is not positive, the dtype is unknown, or the codec cannot code
            such blocks.
    """

    blocks: int
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "fp32"
    together: bool = False
    codec: Codec | None = None

    def __attrs_post_init__(self) -> None:
        """Check the sizes and the dtype."""
        if self.dtype not in TENSOR_DTYPES:
            msg = f"dtype {self.dtype!r} is not known; there are: {', '.join(TENSOR_DTYPES)}"
            raise InputError(msg)
        for name in ("blocks", "block_size", "layers", "kv_heads", "head_dim", "value_dim"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                msg = f"tensor layout: {name} must be 1 or more, not {value!r}"
                raise InputError(msg)
        if self.codec is not None:
            self.codec.head_bytes(self.block_size, self.head_dim, self.value_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, K and V, in all layers, the scales of a codec included."""
        if self.codec is not None:
            head = self.codec.head_bytes(self.block_size, self.head_dim, self.value_dim)
            return head * self.kv_heads * self.layers
        numbers = self.kv_heads * self.block_size * (self.head_dim + self.value_dim)
        return numbers * self.layers * PLANE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.bytes_per_block


@attrs.frozen
class DeviceMemory:
    """Bytes of the device on which a backend allocates.

    Attributes:
        allocated: bytes that the backend has allocated, its buffers included.
        free: bytes that can still be allocated; None if unknown.
        total: bytes that the device has; None if unknown.
    """

    allocated: int
    free: int | None
    total: int | None


class AttendOptions(TypedDict, total=False):
    """Options of `Backend.attend`. Those left out have the defaults of that method."""

    scale: float | None
    window: int | None
    sinks: int
    sink_logits: Tensor


class Backend(Plugin):
    """Keeps the K/V of a pool of blocks as tensors, and attends to it through block tables.

    Queries are `[rows, query_heads, head_dim]`, keys `[rows, kv_heads, head_dim]`, values
    `[rows, kv_heads, value_dim]`, outputs `[rows, query_heads, value_dim]`, with one row
    for each new token of a `RaggedBatch`. Query head h reads K/V head
    `h // (query_heads // kv_heads)`.

    Six methods are required. The others work on the tensors of `layer_blocks`, as long as
    these can be indexed with the integers that `tensor` returns; a backend overrides them
    where it has a faster way, and `swap_out` and `swap_in` where its memory is not the
    host's. Tiers need `read_blocks` and `write_blocks`.

    Attributes:
        layout: layout of the allocated pool; set by `allocate`, None before.
        takes_codecs: whether the backend stores K/V as `TensorLayout.codec` codes it;
            otherwise a run with a codec is an InputError.
        moved_bytes: bytes of blocks that `move_blocks` copies at a time, and may put aside.
    """

    kind: ClassVar[str] = "backend"
    takes_codecs: ClassVar[bool] = False
    moved_bytes: ClassVar[int] = 1 << 28

    layout: TensorLayout = None  # type: ignore[assignment]

    @abstractmethod
    def allocate(self, layout: TensorLayout) -> None:
        """Allocate the pool and set `layout`. The content of the blocks is undefined.

        Raises:
            InputError: the dtype, head size or device does not work; names those that would.
            StorageError: there is too little memory; with the requested bytes, the free bytes,
                and the number of blocks that would fit.
        """

    @abstractmethod
    def tensor(self, data: Any, dtype: str | None = None) -> Tensor:
        """Return `data` (nested sequences, numpy, torch) as a tensor on the device.

        `dtype` is one of `TENSOR_DTYPES`. None keeps integers as integers, and converts
        other numbers to the dtype of the layout.
        """

    @abstractmethod
    def plan(self, batch: RaggedBatch) -> Any:
        """Return the plan of a step: slots and gather indices for all layers. O(blocks).

        Called once in a step; `store` and `attend` of each layer get the plan.
        """

    @abstractmethod
    def store(self, layer: int, plan: Any, keys: Tensor, values: Tensor) -> None:
        """Write the K/V of the new tokens into their slots.

        `keys` is `[rows, kv_heads, head_dim]`, `values` `[rows, kv_heads, value_dim]`, in
        the memory of the host or of the device.
        """

    @abstractmethod
    def attend(
        self,
        layer: int,
        plan: Any,
        queries: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: int = 0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Return attention's output for the new tokens, whose own K/V is stored already.

        Attention is causal: a token attends to itself and to the tokens before it; with a
        `window`, only to the last `window` of these, itself included, and to the first
        `sinks` of the sequence. `scale` is 1 / sqrt(head_dim) unless given. `sink_logits`,
        `[query_heads]`, are scores that take a share of the attention and have no value; a
        backend without them leaves the argument out.
        """

    @abstractmethod
    def layer_blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the memory of K and of V of all blocks of a layer, not copies.

        `[blocks, kv_heads, block_size, head_dim]` and `[..., value_dim]`.

        Raises:
            InputError: the blocks hold codes of a codec; use `read`. The methods of this class
                that work on the memory are overridden then.
        """

    def store_rotated(
        self, layer: int, plan: Any, keys: Tensor, values: Tensor, rotation: Rotation | None
    ) -> None:
        """Write the K/V of the new tokens as `store` does, the keys after a rotation, if any.

        For generators and engines that leave the rotary embedding of keys to the cache, and
        rotate queries themselves. Unless overridden, torch rotates, and `store` gets the
        result.
        """
        if rotation is not None:
            keys = self.tensor(rotation.rotate(keys), self.layout.dtype)
        self.store(layer, plan, keys, values)

    @property
    def fuses_rotation(self) -> bool:
        """Whether `store_rotated` takes no pass more than `store`: False unless overridden.

        Generators leave the rotation of their keys to it then. Known after `allocate`.
        """
        return False

    def attend_weighed(
        self, layer: int, plan: Any, queries: Tensor, **options: Unpack[AttendOptions]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output of `attend`, and how much attention each token in the blocks got.

        The latter is `[kv_heads, context + length]` for each sequence, in fp32 or better: sums
        of the attention weights over its new tokens and over the query heads of a K/V head.
        Called in place of `attend` for retention policies that read the sums. Memory does not
        grow with context x tokens.

        Raises:
            InputError: the backend does not sum up weights; unless overridden.
        """
        del layer, plan, queries, options
        msg = (
            f"backend {self.name!r} does not tell how much attention tokens get: take a "
            "retention policy that does not read it, or another backend"
        )
        raise InputError(msg)

    def move_tokens(
        self, layer: int, table: Sequence[int], into: Sequence[int], moves: Tensor
    ) -> None:
        """Move tokens of the blocks `table` into the blocks `into`, in one layer.

        `moves` are integers on the host, `[3, n]`: K/V head, place in `table`, place in `into`
        of each token that moves. The two may have blocks in common; all tokens are read before
        one is written. Places that are not named keep their content.
        """
        size = self.layout.block_size
        old, new = self._block_ids(table), self._block_ids(into)
        heads, sources, targets = self.tensor(moves)
        for part in self.layer_blocks(layer):
            moved = part[old[sources // size], heads, sources % size]
            part[new[targets // size], heads, targets % size] = moved

    def read_heads(
        self,
        layer: int,
        part: Part,
        table: Sequence[int],
        tokens: int,
        *,
        reuse: bool = False,
    ) -> Tensor:
        """Return a copy of K or V of the first `tokens` tokens in the blocks of `table`.

        `[kv_heads, tokens, width]`, in the dtype of the layout. With `reuse` it may lie in
        memory that the next call, or the next step, overwrites.
        """
        del reuse
        blocks = self.layer_blocks(layer)[part == "values"]
        # [table, kv_heads, block_size, width] to [kv_heads, table * block_size, width]
        heads = blocks[self._block_ids(table)].swapaxes(0, 1)
        return heads.reshape(heads.shape[0], -1, heads.shape[3])[:, :tokens]

    def read(self, layer: int, table: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Return copies of K and V of the first `tokens` tokens in the blocks of `table`.

        `[tokens, kv_heads, head_dim]` and `[tokens, kv_heads, value_dim]`.
        """
        keys = self.read_heads(layer, "keys", table, tokens)
        values = self.read_heads(layer, "values", table, tokens)
        return keys.swapaxes(0, 1), values.swapaxes(0, 1)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, target)`, in all layers: copy-on-write.

        All sources are read before a target is written.
        """
        copies = list(pairs)
        if not copies:
            return
        sources, targets = map(self._block_ids, zip(*copies, strict=True))
        for part in self._all_blocks():
            part[targets] = part[sources]

    def move_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Move whole blocks, `(source, target)`, in all layers, as if all at once.

        Any permutation of blocks, its cycles too, and any part of one: no two pairs have the
        same source, nor the same target. The content of a source that is no target is
        undefined afterwards. Unlike one `copy_blocks`, it puts aside no more than
        `moved_bytes`, or a block, at a time: for compacting a pool that fills the device.

        Raises:
            InputError: two pairs share a source or a target; nothing is moved.
        """
        blocks_at_once = max(1, self.moved_bytes // self.layout.bytes_per_block)
        rounds, cycles = _in_rounds(pairs, blocks_at_once)
        for moved in rounds:
            self.copy_blocks(moved)
        for *chain, (source, target) in cycles:
            kept = self.swap_out([source])
            for begin in range(0, len(chain), blocks_at_once):
                self.copy_blocks(chain[begin : begin + blocks_at_once])
            self.swap_in(kept, [target])

    def swap_out(self, blocks: Sequence[int]) -> Any:
        """Return a copy of `blocks`, all layers, in host memory, for `swap_in` alone.

        Unless overridden, the copy is in the memory of the blocks themselves.
        """
        ids = self._block_ids(blocks)
        return [part[ids] for part in self._all_blocks()]

    def swap_in(self, host: Any, blocks: Sequence[int]) -> None:
        """Write the content that `swap_out` returned into `blocks`, an equal number."""
        ids = self._block_ids(blocks)
        for part, content in zip(self._all_blocks(), host, strict=True):
            part[ids] = content

    def host_buffer(self, blocks: int) -> memoryview:
        """Return memory of the host for the bytes of blocks, `[blocks, bytes]`.

        `bytes` is `layout.bytes_per_block`. A backend with its own memory returns the kind of
        host memory that it copies fastest, such as pinned memory. If this is overridden,
        blocks are never copied straight into the memory of a tier, nor out of it.
        """
        size = self.layout.bytes_per_block
        return memoryview(bytearray(blocks * size)).cast("B", (blocks, size))

    def read_blocks(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy the bytes of full `blocks`, all layers, into memory of the host.

        `into` is `[len(blocks), layout.bytes_per_block]`, unsigned bytes, such as
        `host_buffer` returns. The bytes are there when this returns. `write_blocks` takes them
        in this run, or in another one of the same layout: a codec's codes and scales, not K/V.

        Raises:
            InputError: the backend gives no bytes, so that it cannot run with tiers; unless
                overridden. Or a block is not full, so that its codec has not coded it.
        """
        del blocks, into
        self._refuse_bytes()

    def write_blocks(self, blocks: Sequence[int], data: memoryview) -> None:
        """Write the bytes that `read_blocks` has read, `[len(blocks), bytes]`, into `blocks`.

        `data` may be used again when this returns.
        """
        del blocks, data
        self._refuse_bytes()

    def fill(self, value: float, blocks: Sequence[int] | None = None) -> None:
        """Set every number of `blocks` (None: of all) to `value`: 0 clears, NaN poisons."""
        ids = slice(None) if blocks is None else self._block_ids(blocks)
        for part in self._all_blocks():
            part[ids] = value

    def memory(self) -> DeviceMemory:
        """Return the state of the device's memory: the pool alone unless overridden."""
        return DeviceMemory(self.layout.bytes if self.layout else 0, None, None)

    def limit_threads(
        self, count: int | None, model: ModelSpec
    ) -> AbstractContextManager[None]:
        """Return a context in which the host computes with `count` threads.

        None: the number that is fastest for a model of this size. The number that was set
        before is set again afterwards. Has no effect unless overridden.

        Raises:
            InputError: this process may not use `count` CPUs of the host.
        """
        del count, model
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until all submitted work is done. Does nothing unless overridden."""

    def _refuse_bytes(self) -> NoReturn:
        msg = (
            f"backend {self.name!r} does not give the bytes of its blocks, which tiers keep: "
            "leave the tiers out, or take backend torch-cpu"
        )
        raise InputError(msg)

    def _block_ids(self, blocks: Sequence[int]) -> Tensor:
        """Return block ids as an index tensor, `[blocks]`."""
        # The leading 0 keeps the ids integers where there are none.
        return self.tensor([0, *blocks])[1:]

    def _all_blocks(self) -> Iterable[Tensor]:
        """Yield K and V of every layer."""
        for layer in range(self.layout.layers):
            yield from self.layer_blocks(layer)


Pair: TypeAlias = tuple[int, int]


def _in_rounds(pairs: Iterable[Pair], limit: int) -> tuple[list[list[Pair]], list[list[Pair]]]:
    """Return moves in rounds of up to `limit`, and apart from them the cycles that are longer.

    All sources of a round are read before one block is written, so a short cycle stays in one
    round. The last move of a chain, into a block that is free, goes first; all chains take
    their steps together, so that few moves of a round depend on others. The moves of a long
    cycle are in order, and its last move reads the block that its first one overwrites.
    O(pairs).

    Raises:
        InputError: two pairs share a source or a target.
    """
    moves = list(pairs)
    source_of = {target: source for source, target in moves}
    sources = set(source_of.values())
    if not len(sources) == len(source_of) == len(moves):
        msg = "moves share a source or a target: a block goes to one place, from one"
        raise InputError(msg)
    ordered = _take_chains(source_of, sources)
    rounds = [ordered[begin : begin + limit] for begin in range(0, len(ordered), limit)]
    long = []
    for cycle in _take_cycles(source_of):
        if len(cycle) > limit:
            long.append(cycle)
            continue
        if not rounds or len(rounds[-1]) + len(cycle) > limit:
            rounds.append([])
        rounds[-1] += cycle
    return rounds, long


def _take_chains(source_of: dict[int, int], sources: Container[int]) -> list[Pair]:
    """Remove the chains, which end in a block that is no source, from `source_of`.

    Returns their moves in order.
    """
    steps: list[list[Pair]] = []
    for end in [target for target in source_of if target not in sources]:
        target, step = end, 0
        while target in source_of:
            if step == len(steps):
                steps.append([])
            source = source_of.pop(target)
            steps[step].append((source, target))
            target, step = source, step + 1
    return [pair for step in steps for pair in step]


def _take_cycles(source_of: dict[int, int]) -> Iterator[list[Pair]]:
    """Remove the cycles, which are left in `source_of`; yield each, its moves in order."""
    while source_of:
        target, source = source_of.popitem()
        cycle = [(source, target)]
        while source != target:
            before = source_of.pop(source)
            cycle.append((before, source))
            source = before
        yield cycle
