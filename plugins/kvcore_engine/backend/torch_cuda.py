"""K/V in the memory of an NVIDIA GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvcore import InputError
from kvcore.engine import DeviceMemory, TensorLayout
from kvcore.lazy import LazyModule
from kvcore_engine.backend.torch_backend import (
    Attention,
    DeviceGraph,
    TorchBackend,
    attention_validator,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch", globals())

DRIVERS = ("libcuda.so.1", "nvcuda.dll")


@attrs.define(slots=False, eq=False)
class TorchCUDA(TorchBackend):
    """Keep K/V on a GPU and attend to it with torch's CUDA kernels.

    K/V that comes from the host is staged in pinned memory and copied on a stream of its
    own. The host waits for the device where blocks are copied to the host or from it, and in
    `synchronize`. Takes fp64, fp32, fp16 and, from compute capability 8.0, bf16. Needs torch
    with CUDA, and a driver.

    Options:
        attention: implementation of attention: `triton` is a kernel that
            reads blocks in place, `sdpa` torch's own function over gathered K/V, `flashinfer`
            the package of that name. None: `triton`, or `sdpa` if Triton is missing or its
            kernel does not cover the case, which is logged.
        device: number of the GPU.
        pin: whether to stage in pinned memory.
        graphs: whether decode steps are captured as CUDA graphs, by batch size, and replayed.
            Off by default: tests run it on a stand-in for graphs, and no GPU has yet.
    """

    name: ClassVar[str] = "torch-cuda"

    attention: Attention | None = attrs.field(
        default=None, validator=attention_validator, kw_only=True
    )
    device: int = attrs.field(default=0, validator=attrs.validators.ge(0), kw_only=True)
    pin: bool = attrs.field(default=True, kw_only=True)
    graphs: bool = attrs.field(default=False, kw_only=True)

    @classmethod
    def unavailable(cls) -> str | None:
        """Return which part is missing: torch, a driver, CUDA in torch, or a GPU."""
        reason = super().unavailable()
        if reason is None and not any(map(_loads, DRIVERS)):
            # Before the import of torch, which takes seconds.
            return "there is no NVIDIA driver: use torch-cpu"
        return reason or _without_gpu()

    @cached_property
    def torch_device(self) -> torch.device:
        """The GPU.

        Raises:
            InputError: there is no GPU of this number.
        """
        count = torch.cuda.device_count()
        if self.device >= count:
            msg = f"torch-cuda: device={self.device} is not there; there are {count}, from 0"
            raise InputError(msg)
        return torch.device("cuda", self.device)

    @cached_property
    def _copy_stream(self) -> torch.cuda.Stream:
        """The stream on which K/V is copied from the host."""
        make: Any = torch.cuda.Stream  # which has no types
        stream: torch.cuda.Stream = make(self.torch_device)
        return stream

    def check(self, layout: TensorLayout) -> None:
        """Raise InputError for bf16 on a GPU that cannot compute in it."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        if layout.dtype == "bf16" and major < 8:  # noqa: PLR2004 - Ampere
            msg = (
                f"bf16 needs compute capability 8.0, and GPU {self.device} has "
                f"{major}.{minor}: use fp16, or fp32"
            )
            raise InputError(msg)

    @cached_property
    def _graph_memory(self) -> Any:
        """Memory that graphs share: one of them is replayed at a time."""
        return torch.cuda.graph_pool_handle()

    def new_graph(self) -> DeviceGraph | None:
        """Return an empty CUDA graph; None unless `graphs` is on."""
        return CUDAGraph(self._graph_memory) if self.graphs else None

    def upload(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the GPU, copied in the order of the current stream."""
        if self.pin and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self.torch_device, non_blocking=True)

    def transfer(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy between host and GPU on a stream of its own, after earlier submissions.

        The host waits for these copies alone: other work goes on meanwhile.
        """
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._copy_stream):
            for into, source in copies:
                into.copy_(source, non_blocking=True)
        self._copy_stream.synchronize()

    def host_rows(self, rows: int, width: int) -> Tensor:
        """Return memory of the host for blocks, pinned unless `pin` is off."""
        return torch.empty((rows, width), dtype=torch.uint8, pin_memory=self.pin)

    def stage(self, rows: Tensor) -> Tensor:
        """Return new K or V on the GPU; from the host it is copied beside the computation.

        The host does not wait: the copy runs on a stream of its own, and later work of the
        current stream waits for it there. Without `pin` copies are from pageable memory, and
        block.
        """
        if rows.device.type != "cpu":
            return rows
        # Torch caches pinned memory, and does not reuse it while a copy reads it.
        pinned = rows.pin_memory() if self.pin else rows
        current = torch.cuda.current_stream(self.torch_device)
        with torch.cuda.stream(self._copy_stream):
            moved = pinned.to(self.torch_device, non_blocking=True)
        current.wait_stream(self._copy_stream)
        # Memory of the copy stream may not be reused while the current one reads it.
        moved.record_stream(current)
        return moved

    def host_buffer(self, blocks: int) -> memoryview:
        """Return pinned memory for the bytes of blocks, unless `pin` is off."""
        if not self.pin:
            return super().host_buffer(blocks)
        pinned: Any = self.host_rows(blocks, self.layout.bytes_per_block).numpy()
        return memoryview(pinned)

    def memory(self) -> DeviceMemory:
        """Return the memory of the GPU; memory that torch keeps for later counts as free."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allocated = torch.cuda.memory_allocated(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device) - allocated
        return DeviceMemory(allocated, free + kept, total)

    def synchronize(self) -> None:
        """Wait for all streams of the GPU."""
        torch.cuda.synchronize(self.torch_device)


class CUDAGraph:
    """A `DeviceGraph` of kernels of the current GPU."""

    def __init__(self, memory: Any) -> None:
        """Store the pool of memory that the graph shares with others."""
        self._graph: Any = torch.cuda.CUDAGraph()
        self._memory = memory

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        """Record kernels; other threads, which move blocks, go on meanwhile."""
        graph: Any = torch.cuda.graph  # which has no types
        with graph(self._graph, pool=self._memory, capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        """Launch the kernels again."""
        self._graph.replay()

    def reset(self) -> None:
        """Free the graph and its memory."""
        self._graph.reset()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _without_gpu() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install one with it"
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use"
    return None
