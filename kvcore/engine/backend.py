"""The backend contract: where K/V lies as tensors, and how queries read it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import attrs

from kvcore.errors import InputError
from kvcore.plugins.base import Plugin

if TYPE_CHECKING:
    from array import array


Tensor: TypeAlias = Any
"""A tensor of the backend's library. The core never looks inside."""


TENSOR_DTYPES = ("fp64", "fp32", "fp16", "bf16")
"""What K/V can be computed in: fp64 is for references, the others are for use."""


BYTES = dict(zip(TENSOR_DTYPES, (8, 4, 2, 2), strict=True))


@attrs.frozen(kw_only=True)
class TensorLayout:
    """One layout for all layers of a pool of K/V blocks.

    K is `[blocks, kv_heads, block_size, head_dim]` a layer, V the same with `value_dim`:
    a block is one contiguous run of memory per layer, and within it per head. With
    `together` the layers of a block lie side by side, so that a block is one run for all
    layers, as swapping wants it.

    Attributes:
        blocks, block_size: the pool, and tokens a block holds.
        layers, kv_heads: how many have K/V of their own.
        head_dim, value_dim: numbers of a key and of a value.
        dtype: one of `TENSOR_DTYPES`.
        together: whether all layers of a block are one run.

    Raises:
        InputError: a size that is not positive, or an unknown dtype.
    """

    blocks: int
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "fp32"
    together: bool = False

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

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, K and V, in all layers."""
        numbers = self.kv_heads * self.block_size * (self.head_dim + self.value_dim)
        return numbers * self.layers * BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.bytes_per_block


@attrs.frozen
class Rows:
    """Which tokens a step computes, sequence by sequence: a ragged batch without padding.

    Sequence i computes `lengths[i]` new tokens after `contexts[i]` that its blocks hold
    already. The new ones of all sequences are the rows of the step's tensors, one after
    another; their slots are allocated.

    Attributes:
        tables: block ids of each sequence, first to last, up to its last new token's.
        contexts, lengths: tokens before, and new ones (1 or more), of each.
    """

    tables: Sequence[array[int] | Sequence[int]]
    contexts: Sequence[int]
    lengths: Sequence[int]

    @property
    def total(self) -> int:
        """New tokens of all sequences."""
        return sum(self.lengths)


@attrs.frozen
class DeviceMemory:
    """Bytes of the device a backend allocates on.

    `free` is what can still be allocated, `total` all there is; None where nobody knows.
    """

    allocated: int
    free: int | None
    total: int | None


class Backend(Plugin):
    """Keeps the K/V of a pool of blocks as tensors, and attends to it through block tables.

    Queries are `[tokens, query_heads, head_dim]`, keys `[tokens, kv_heads, head_dim]`,
    values `[tokens, kv_heads, value_dim]`, outputs `[tokens, query_heads, value_dim]`; rows
    are those of a `Rows`. Query head h reads K/V head `h // (query_heads // kv_heads)`.

    Attributes:
        layout: what is allocated; set by `allocate`.
    """

    kind: ClassVar[str] = "backend"

    layout: TensorLayout = None  # type: ignore[assignment]

    @abstractmethod
    def allocate(self, layout: TensorLayout) -> None:
        """Allocate the pool. Its content is undefined until it is stored.

        Raises:
            InputError: a dtype, head size or device that does not work: says which would.
            StorageError: too little memory: says how much was asked for, what is free, and
                how many blocks would fit.
        """

    @abstractmethod
    def tensor(self, data: Any, dtype: str | None = None) -> Tensor:
        """Return `data` (nested sequences, numpy, torch) as a tensor on the device.

        `dtype` is one of `TENSOR_DTYPES`; None keeps integers integers, and makes numbers
        the layout's dtype.
        """

    @abstractmethod
    def plan(self, rows: Rows) -> Any:
        """Return what every layer of a step needs of `rows`: slots, gather indices. O(blocks).

        Made once a step and given to `store` and `attend` of each layer.
        """

    @abstractmethod
    def store(self, layer: int, plan: Any, keys: Tensor, values: Tensor) -> None:
        """Put the K/V of the new tokens into their slots.

        From the host in three stages: staged in pinned memory, copied on a stream of its
        own, scattered into the blocks. What is on the device already is only scattered.
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
    ) -> Tensor:
        """Return attention's output for the new tokens; their own K/V is stored already.

        Causal: a token attends to itself and to those before it, with a `window` to the
        last `window` of these, itself included, and to the first `sinks` of the sequence.
        `scale` is 1 / sqrt(head_dim) unless given.
        """

    @abstractmethod
    def read(self, layer: int, table: Sequence[int], tokens: int) -> tuple[Tensor, Tensor]:
        """Return copies of K and V of the first `tokens` tokens in the blocks of `table`.

        `[tokens, kv_heads, head_dim]` and `[tokens, kv_heads, value_dim]`.
        """

    @abstractmethod
    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, target)`, in all layers: copy-on-write."""

    @abstractmethod
    def swap_out(self, blocks: Sequence[int]) -> Tensor:
        """Return a copy of `blocks`, all layers, in host memory."""

    @abstractmethod
    def swap_in(self, host: Tensor, blocks: Sequence[int]) -> None:
        """Put what `swap_out` returned into `blocks`, as many as came out."""

    @abstractmethod
    def fill(self, value: float, blocks: Sequence[int] | None = None) -> None:
        """Set every number of `blocks` (None: of all) to `value`: 0 clears, NaN poisons."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return what the device's memory holds."""

    def synchronize(self) -> None:
        """Wait until everything asked for so far is done. Nothing, unless overridden."""
