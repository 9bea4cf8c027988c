"""The base of the torch backends. Torch is imported when the first tensor is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from logging import getLogger
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, Unpack, get_args

import attrs

from kvcore import Backend, InputError, StorageError
from kvcore.engine import AttendOptions, RaggedBatch, Rotation, TensorLayout
from kvcore.lazy import LazyModule
from kvcore.models.codec import Part
from kvcore.models.spec import ModelSpec
from kvcore.units import format_bytes
from kvcore_plugins.host import cpus

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcore_engine.backend._pool import Pool
    from kvcore_engine.backend._sdpa import Sdpa
    from kvcore_engine.backend._step_plan import AttentionKernel, StepPlan
    from kvcore_engine.page_reader import BlockSelection
else:
    torch = LazyModule("torch", globals())


ONE_THREAD = 10**7
"""Parameters that a token passes, up to which one thread computes a step.

A step of some sequences of such a model is a few ms in tens of parallel regions. A second idle
core does not make it faster, and a core that is shared with another process costs each region a
time slice, as long as the step: 6 million parameters, a row, took 2.0 ms with one thread, 2.3
ms with two, and 92 ms with two that had to share their cores.
"""


Attention: TypeAlias = Literal["triton", "sdpa", "flashinfer"]
"""Names of the implementations of attention."""


attention_validator = attrs.validators.optional(attrs.validators.in_(get_args(Attention)))


class DeviceGraph(Protocol):
    """A graph of work on a device."""

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Record the work that `run` launches; return its result, which replays overwrite.

        Raises:
            RuntimeError: the work cannot be recorded: `run` waits for the device, say.
        """

    def replay(self) -> None:
        """Do the recorded work again, on the same memory."""

    def reset(self) -> None:
        """Free the graph and its memory."""


@attrs.define(slots=False, eq=False)
class TorchBackend(Backend):
    """Keeps K/V in one torch tensor, or the planes of a codec, a tensor each.

    A derived class defines the device, and overrides `upload`, `transfer`, `host_rows` and
    `stage` if that is not the host.
    """

    takes_codecs: ClassVar[bool] = True

    attention: Attention | None = attrs.field(
        default="sdpa", validator=attention_validator, kw_only=True
    )

    fallbacks: tuple[str, ...] = attrs.field(init=False, default=())
    """Why torch computes attention in place of a kernel, since `allocate`: each reason once."""

    _pool: Pool = attrs.field(init=False, default=None, repr=False)
    _kernel: Sdpa = attrs.field(init=False, default=None, repr=False)

    @classmethod
    def unavailable(cls) -> str | None:
        """Return that torch is not installed, if it is not."""
        if find_spec("torch") is None:
            return "torch is not installed: pip install 'kvcore[torch]'"
        return None

    @property
    def torch_device(self) -> torch.device:
        """The device that holds K/V: the CPU unless overridden."""
        return torch.device("cpu")

    def upload(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the device."""
        return tensor

    def new_graph(self) -> DeviceGraph | None:
        """Return an empty graph of work on the device; None unless overridden: it has none."""
        return None

    def transfer(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy between host and device, `(into, source)`, and wait for the copies."""
        for into, source in copies:
            into.copy_(source)

    def host_rows(self, rows: int, width: int) -> Tensor:
        """Return memory of the host for blocks, bytes `[rows, width]`."""
        from kvcore_engine.backend._pool import allocate  # noqa: PLC0415 - see the module

        if not rows:
            return torch.empty((0, width), dtype=torch.uint8)
        return allocate(rows * width, torch.uint8, torch.device("cpu")).view(rows, width)

    def stage(self, rows: Tensor) -> Tensor:
        """Return new K or V on the device, whether computed there or on the host."""
        return rows

    def allocate(self, layout: TensorLayout) -> None:
        """Allocate one tensor for all layers.

        Raises:
            InputError: the device cannot take this layout.
            StorageError: there is too little memory.
        """
        from kvcore_engine.backend._coded_pool import CodedPool  # noqa: PLC0415 - likewise
        from kvcore_engine.backend._pool import Pool  # noqa: PLC0415 - see the module
        from kvcore_engine.backend._sdpa import Sdpa  # noqa: PLC0415 - see the module

        self.check(layout)
        free = self.memory().free
        if free is not None and layout.bytes > free:
            raise _too_little(layout, free, str(self.torch_device))
        codec = layout.codec
        try:
            if codec is None or codec.dtype == layout.dtype:
                self._pool = Pool(layout, self.torch_device, self.upload)
            else:
                self._pool = CodedPool(layout, codec, self.torch_device, self.upload)
        except (RuntimeError, OSError, OverflowError) as error:
            # torch has one type for memory that is short and for all else that fails.
            why, *_ = str(error).splitlines() or [repr(error)]
            msg = f"{_too_little(layout, free, str(self.torch_device))} ({why})"
            raise StorageError(msg) from error
        self.fallbacks = ()
        self._kernel = Sdpa(self._pool, self._attention_kernel(), self._fall_back)
        self.layout = layout

    def _attention_kernel(self) -> AttentionKernel | None:
        """Return the kernel that computes new tokens, as far as it can; None: torch does.

        Raises:
            InputError: the option `attention` names a kernel that cannot work here.
        """
        if self.attention == "sdpa":
            return None
        if self.attention == "flashinfer":
            from kvcore_engine.backend import _flashinfer  # noqa: PLC0415 - seldom

            reason = _flashinfer.uncovered(self._pool)
            if reason is None:
                return _flashinfer.FlashInferDecode(self._pool)
        else:
            reason = without_triton()
            if reason is None:
                from kvcore_engine.backend import _triton_attention  # noqa: PLC0415 - Triton's

                reason = _triton_attention.uncovered(self._pool)
                if reason is None:
                    return _triton_attention.TritonAttention(self._pool)
        if self.attention is None:
            self._fall_back(reason)
            return None
        msg = f"{self.name}: attention={self.attention}: {reason}; take attention=sdpa"
        raise InputError(msg)

    def _fall_back(self, reason: str) -> None:
        """Record and log a reason, once, why torch computes in place of a kernel."""
        if reason not in self.fallbacks:
            self.fallbacks += (reason,)
            text = "%s: attention is by torch's sdpa where a kernel was wanted: %s"
            getLogger("kvcore").warning(text, self.name, reason)

    def check(self, layout: TensorLayout) -> None:
        """Raise InputError for a layout that the device cannot take; no-op by default."""

    def tensor(self, data: Any, dtype: str | None = None) -> Tensor:
        """Return `data` as a tensor on the device.

        Raises:
            InputError: the dtype is unknown.
        """
        from kvcore_plugins.codec.dtypes import TORCH_DTYPES  # noqa: PLC0415 - see the module

        if dtype is None:
            tensor = torch.as_tensor(data)
            if not tensor.is_floating_point():
                return self.upload(tensor)
            dtype = self.layout.dtype if self.layout else "fp32"
        elif dtype not in TORCH_DTYPES:
            msg = f"dtype {dtype!r} is not known; there are: {', '.join(TORCH_DTYPES)}"
            raise InputError(msg)
        return self.upload(torch.as_tensor(data, dtype=TORCH_DTYPES[dtype]))

    def plan(self, batch: RaggedBatch) -> StepPlan:
        """Return the slots of the new tokens, and the block tables for attention.

        Raises:
            InputError: there is no sequence, or a block table does not hold its sequence.
        """
        return self._kernel.plan(batch)

    def plan_on_device(self, batch: RaggedBatch, tables: Tensor, contexts: Tensor) -> StepPlan:
        """Return the plan of a step with one new token of each sequence, made on the device.

        What makes it can be recorded in a graph, where the kernel of the backend plans there.

        Args:
            batch: the step; its tables and contexts are not read.
            tables: block ids on the device, `[sequences, blocks]` of int32.
            contexts: number of tokens before the new one on the device, `[sequences]` of int64.
        """
        return self._kernel.plan_on_device(batch, tables, contexts)

    def joined_tables(self, batch: RaggedBatch, width: int) -> Tensor:
        """Return rows of `width` block ids for `plan_on_device`, flat on the host. O(blocks).

        Raises:
            InputError: a block table does not hold its sequence.
        """
        return self._pool.joined_tables(batch, width)[0]

    def store(self, layer: int, plan: StepPlan, keys: Tensor, values: Tensor) -> None:
        """Scatter K/V into the slots.

        Raises:
            InputError: shapes or dtypes do not fit the step and the layout.
        """
        TorchBackend.store_rotated(self, layer, plan, keys, values, None)

    def store_rotated(
        self,
        layer: int,
        plan: StepPlan,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None,
    ) -> None:
        """Scatter rotated keys and values into the slots; kernels rotate on the way.

        Raises:
            InputError: shapes or dtypes do not fit the step and the layout, or tables of the
                rotation do not fit the keys.
        """
        layout, count = self.layout, plan.batch.total_tokens
        if rotation is not None:
            self._check_rotation(rotation, plan)
        self._match("keys", keys, (count, layout.kv_heads, layout.head_dim))
        self._match("values", values, (count, layout.kv_heads, layout.value_dim))
        rows = self.stage(keys.detach()), self.stage(values.detach())
        slots = plan.key_slots, plan.value_slots
        turn = rotation if rotation is not None and rotation.pairs else None
        self._pool.store(layer, slots, rows, plan.writes, turn)

    @property
    def fuses_rotation(self) -> bool:
        """Whether Triton's kernel stores keys."""
        return self._pool.keys[0].target is not None

    def _check_rotation(self, rotation: Rotation, plan: StepPlan) -> None:
        """Raise InputError unless a rotation fits the keys of a step."""
        count, width, tables = plan.batch.total_tokens, self.layout.head_dim, rotation.cos.shape
        wide = len(tables) != 2 or 2 * tables[1] > width  # noqa: PLR2004 - [n, pairs]
        rows = len(rotation.cos if rotation.places is None else rotation.places)
        if rotation.sin.shape != tables or rows != count or wide:
            msg = (
                f"a rotation of {rows} tokens by tables {list(tables)} and "
                f"{list(rotation.sin.shape)}, where the step has {count} tokens and keys are "
                f"{width} wide: give cosines and sines [n, pairs], up to {width // 2} pairs, "
                "with a row for each token, or places that name one for each"
            )
            raise InputError(msg)

    def attend(
        self, layer: int, plan: StepPlan, queries: Tensor, **options: Unpack[AttendOptions]
    ) -> Tensor:
        """Return attention's output for the new tokens.

        Raises:
            InputError: queries do not fit the step, K/V heads do not divide the query heads,
                or the window has no token.
        """
        return self._attended(layer, plan, queries, **options)

    def attend_weighed(
        self, layer: int, plan: StepPlan, queries: Tensor, **options: Unpack[AttendOptions]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output of `attend`, and the summed weights of each sequence.

        Weights of a chunk of a prefill are computed piece by piece (`WEIGHED_BYTES`).

        Raises:
            InputError: as for `attend`.
        """
        sums = self._kernel.zero_sums(plan, queries)
        return self._attended(layer, plan, queries, sums, **options), sums

    def attend_selected(
        self,
        layer: int,
        plan: StepPlan,
        queries: Tensor,
        dense: Sequence[int],
        selected: Iterable[BlockSelection],
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Return the output of `attend` where some new tokens read selected blocks alone.

        `dense` is the number of first new tokens of each sequence that attend to all; each of
        the others is in `selected`. Torch computes these, whatever the kernel.

        Raises:
            InputError: as for `attend`.
        """
        return self._attended(layer, plan, queries, None, dense, selected, **options)

    def _attended(
        self,
        layer: int,
        plan: StepPlan,
        queries: Tensor,
        sums: list[Tensor] | None = None,
        dense: Sequence[int] | None = None,
        selected: Iterable[BlockSelection] = (),
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Check queries and options; return attention's output, and add weights to `sums`."""
        layout = self.layout
        heads = queries.shape[1] if queries.ndim > 1 else layout.kv_heads
        self._match("queries", queries, (plan.batch.total_tokens, heads, layout.head_dim))
        if heads % layout.kv_heads:
            msg = (
                f"{heads} query heads cannot share {layout.kv_heads} K/V heads: use a multiple"
            )
            raise InputError(msg)
        window, sinks = options.get("window"), options.get("sinks", 0)
        if (window is not None and window < 1) or sinks < 0:
            msg = (
                f"window={window}, sinks={sinks}: a window has 1 token or more, sinks 0 or more"
            )
            raise InputError(msg)
        return self._kernel.attend(layer, plan, queries, sums, dense, selected, **options)

    def layer_blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the memory of K and of V of a layer.

        Raises:
            InputError: a codec stores codes there, not K/V.
        """
        return self._pool.layer_blocks(layer)

    def move_tokens(
        self, layer: int, table: Sequence[int], into: Sequence[int], moves: Tensor
    ) -> None:
        """Move tokens of blocks into others; coded bytes are copied as they are if possible."""
        self._pool.keys[layer].move(table, into, moves)
        self._pool.values[layer].move(table, into, moves)

    def read_heads(
        self,
        layer: int,
        part: Part,
        table: Sequence[int],
        tokens: int,
        *,
        reuse: bool = False,
    ) -> Tensor:
        """Return a copy of K or V of the first tokens, `[kv_heads, tokens, width]`.

        Fresh memory costs a CPU more than the copy: `reuse` takes that of attention.
        """
        halves = self._pool.keys if part == "keys" else self._pool.values
        gather = self._kernel.gather(part) if reuse else None
        return self._pool.read_heads(halves[layer], table, gather)[:, :tokens]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks. All sources are read before a target is written."""
        self._pool.copy_blocks(pairs)

    def swap_out(self, blocks: Sequence[int]) -> Any:
        """Return a copy of `blocks` on the host."""
        host = self.host_rows(len(blocks), self.layout.bytes_per_block)
        return self._pool.swap_out(blocks, host, self.transfer)

    def swap_in(self, host: Any, blocks: Sequence[int]) -> None:
        """Write the content that `swap_out` returned.

        Raises:
            InputError: another number of blocks was swapped out.
        """
        if len(host) != len(blocks):
            msg = f"{len(host)} blocks were swapped out, and cannot be put into {len(blocks)}"
            raise InputError(msg)
        self._pool.swap_in(host, blocks, self.transfer)

    def read_blocks(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy the bytes of full blocks into memory of the host.

        Raises:
            InputError: a block is not full, or `into` is of another size or read-only.
        """
        if into.readonly:
            msg = "blocks cannot be read into memory that is read-only: give a buffer"
            raise InputError(msg)
        if len(blocks) or into.nbytes:
            rows = self._pool.host_rows(into, len(blocks))
            self._pool.read_bytes(blocks, rows, self.transfer)

    def write_blocks(self, blocks: Sequence[int], data: memoryview) -> None:
        """Write the bytes that `read_blocks` has read into `blocks`.

        Raises:
            InputError: `data` is of another size.
        """
        if len(blocks) or data.nbytes:
            if data.readonly:  # torch has no tensors that are
                data = memoryview(bytearray(data))
            rows = self._pool.host_rows(data, len(blocks))
            self._pool.write_bytes(blocks, rows, self.transfer)

    def fill(self, value: float, blocks: Sequence[int] | None = None) -> None:
        """Set every number of the blocks."""
        self._pool.fill(value, blocks)

    @contextmanager
    def limit_threads(self, count: int | None, model: ModelSpec) -> Iterator[None]:
        """Limit the threads that torch uses in the body to `count`.

        None: one for a model of up to `ONE_THREAD` parameters, else torch's own number, up to
        the CPUs that this process may use.

        Raises:
            InputError: `count` is not 1 to that number.
        """
        before, cpu_count = torch.get_num_threads(), cpus()
        if count is None:
            count = 1 if model.active_parameters <= ONE_THREAD else min(before, cpu_count)
        if not 1 <= count <= cpu_count:
            msg = f"threads must be 1 to {cpu_count}, the CPUs of this process, not {count}"
            raise InputError(msg)
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @property
    def allocated(self) -> int:
        """Bytes of the pool, of the stages of a codec, and of the gather buffers."""
        pool = self._pool
        return pool.bytes + pool.staged_bytes + self._kernel.bytes if pool else 0

    def _match(self, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Raise InputError unless `tensor` has this shape and the dtype of the pool."""
        if tuple(tensor.shape) != shape or tensor.dtype != self._pool.dtype:
            msg = (
                f"{what} are {list(tensor.shape)} of {tensor.dtype}, where the step and the "
                f"layout need {list(shape)} of {self._pool.dtype}"
            )
            raise InputError(msg)


def without_triton() -> str | None:
    """Return that Triton is not installed, if it is not."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'kvcore[triton]'"
    return None


def _too_little(layout: TensorLayout, free: int | None, device: str) -> StorageError:
    """Return an error with the requested and the free bytes, and the blocks that would fit."""
    request = (
        f"{layout.blocks:,} blocks of {format_bytes(layout.bytes_per_block)} are "
        f"{format_bytes(layout.bytes)}"
    )
    if free is None:
        return StorageError(f"{request}, which {device} does not have: ask for fewer")
    fit = free // layout.bytes_per_block
    left = f"{device} has {format_bytes(free)} free"
    return StorageError(f"{request}, and {left}: {fit:,} blocks would fit")
