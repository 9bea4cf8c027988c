"""A program that compiles the kernels that a backend launches, for absent GPUs.

It reads cases as JSON, computes a step of the backend for each, and compiles each kernel where
it is launched, specialized as Triton specializes it. It prints a line of JSON for each case.
Run it in a process of its own, without TRITON_INTERPRET: whether kernels are compiled or
interpreted is fixed when they are decorated.
"""

import io
import json
import re
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcore import Plugins
from kvcore.engine import RaggedBatch, Rotary, TensorLayout
from kvcore_engine.backend import TorchCPU, _coded_pool, _pool, _triton_attention
from kvcore_engine.backend._step_plan import LayerKind
from kvcore_engine.backend.kernels import attention, copy, plan, store

CARDS = {
    80: _triton_attention.Card(108, 1 << 16, 164 << 10),
    90: _triton_attention.Card(132, 1 << 16, 228 << 10),
    100: _triton_attention.Card(148, 1 << 16, 228 << 10),
}
"""An A100, an H100 and a B200, by compute capability.

Source: NVIDIA, "CUDA C++ Programming Guide", technical specifications per compute capability.
"""

KERNELS = [
    (attention, "attend_chunks"), (attention, "combine_chunks"), (attention, "weigh_chunks"),
    (plan, "divide_contexts"), (plan, "order_chunks"), (store, "_store"), (copy, "_move"),
]  # fmt: skip

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global .*?, 0x(\w+)")
ACCESS = re.compile(r"\b(ld|st)\.(shared|global)(?:\.[a-z]\w*)*?(?:\.v(\d))?\.b(\d+)")

CONTEXT = 600
"""Tokens of the sequence of a case: enough for several chunks."""

SEQUENCES = 256
"""Sequences of a step that is planned on the device."""

made = {}
"""Compiled kernels of all cases, by all that tells them apart."""


class Compiler:
    """Stands in for a kernel: compiles the launches of a case, and records them."""

    def __init__(self, kernel, capability, launched):
        """Store the kernel; names and resources of launched kernels go into `launched`."""
        self.kernel, self.capability, self.launched = kernel, capability, launched

    def __getitem__(self, grid):
        """Return the function that takes the arguments of a launch."""
        return self.launch

    def launch(self, *arguments, **options):
        """Compile the kernel, and record its resources."""
        compiled = self.warmup(*arguments, grid=None, **options)
        self.launched[self.kernel.__name__.strip("_")] = compiled.resources

    def warmup(self, *arguments, grid, num_warps, **constants):
        """Compile the kernel for these arguments, unless that is done already."""
        types, constants, attributes = {}, dict(constants), {}
        for index, parameter in enumerate(self.kernel.params[: len(arguments)]):
            name, value = parameter.name, arguments[index]
            dtype, even = getattr(value, "dtype", value), False
            if isinstance(dtype, torch.dtype):
                types[name] = f"*{TYPES[dtype]}"
                even = value is dtype or not value.data_ptr() % 16
                even &= not parameter.do_not_specialize_on_alignment
            elif parameter.do_not_specialize:
                types[name] = "i32"
            elif (
                parameter.is_constexpr
                or value is None
                or (isinstance(value, int) and value == 1)
            ):
                constants[name] = value
            elif isinstance(value, float):
                types[name] = "fp32"
            else:
                types[name], even = "i32", not value % 16
            if even:
                attributes[index,] = [["tt.divisibility", 16]]
        types = {n: types.get(n, "constexpr") for n in self.kernel.arg_names}
        key = self.kernel, self.capability, num_warps, *types.items(), *attributes
        key = (*key, *((name, str(value)) for name, value in sorted(constants.items())))
        if key not in made:
            source = ASTSource(self.kernel, types, constants, attributes)
            made[key] = compiled(source, self.capability, num_warps)
        return made[key]


def compiled(source, capability, warps):
    """Compile a kernel; return the attributes that the backend reads, and its `resources`.

    `copies` are the bytes of asynchronous copies, `widths` those of a thread's accesses, with
    the number of accesses of each width.
    """
    target, log = GPUTarget("cuda", capability, 32), io.StringIO()
    with redirect_stdout(log):
        kernel = triton.compile(source, target=target, options={"num_warps": warps})
    ptx, widths = kernel.asm["ptx"], defaultdict(dict)
    for access, memory, vector, bits in ACCESS.findall(ptx):
        width = int(vector or 1) * int(bits) // 8
        counts = widths[f"{access}.{memory}"]
        counts[width] = counts.get(width, 0) + 1
    registers = int(re.search(r"Used (\d+) registers", log.getvalue()).group(1))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue())))
    resources = {
        "registers": registers,
        "spilled": spilled,
        "shared": kernel.metadata.shared,
        "copies": sorted({int(width, 16) for width in COPY.findall(ptx)}),
        "widths": widths,
    }
    return SimpleNamespace(
        asm=kernel.asm,
        metadata=kernel.metadata,
        n_regs=registers,
        n_spills=spilled,
        resources=resources,
        _init_handles=lambda: None,
    )


def launches(*, numbers, new, capability, group, block_size, window, stages):
    """Return the kernels that a step launches, by name, and the pipeline of its attention.

    `numbers` is the dtype of K/V, or a codec. The step has `new` tokens of one sequence; if it
    is one in large blocks without a window, attention weights are summed up, too. `stages` are
    those that the pipeline is chosen from.
    """
    width, _triton_attention.STAGES = 128, stages
    kv_heads, launched = 8, {}
    dtype, codec = "bf16", None
    if numbers in {"fp32", "fp16", "bf16"}:
        dtype = numbers
    else:
        codec = Plugins().build("codec", numbers)
    backend = TorchCPU(attention="triton")
    layout = TensorLayout(
        blocks=CONTEXT // block_size + 1, block_size=block_size, layers=1, kv_heads=kv_heads,
        head_dim=width, value_dim=width, dtype=dtype, codec=codec,
    )  # fmt: skip
    backend.allocate(layout)
    kernel = backend._kernel._divider.kernel
    kernel.programs, _triton_attention.Card.of = None, lambda _: CARDS[capability]
    for module, name in KERNELS:
        setattr(module, name, Compiler(originals[name], capability, launched))
    step = backend.plan(RaggedBatch([[*range(layout.blocks)]], [CONTEXT - new], [new]))
    if new == 1:
        tables = torch.zeros(SEQUENCES, layout.blocks, dtype=torch.int32)
        contexts = torch.zeros(SEQUENCES, dtype=torch.int64)
        kernel.plan_decode(tables, contexts, LayerKind(group, window, 4))
    speeds = tuple(0.5**i for i in range(width // 2))
    turn = Rotary(speeds, adjacent=group == 1).rotation(torch.arange(new))
    rows = torch.zeros(new, kv_heads * group, width, dtype=backend._pool.dtype)
    backend.store_rotated(0, step, rows[:, :kv_heads], rows[:, :kv_heads], turn)
    weighed = new == 1 and block_size > 16 and window is None
    (backend.attend_weighed if weighed else backend.attend)(0, step, rows, window=window)
    backend.copy_blocks([(0, 1)])
    backend.swap_in(backend.swap_out([0]), [1])
    return {"kernels": launched, "pipeline": next(iter(kernel._pipelines.values()))}


if __name__ == "__main__":
    originals = {name: getattr(module, name) for module, name in KERNELS}
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
    _triton_attention.uncovered = lambda _: None
    for module in (_pool, _coded_pool):
        module.kernels_for = lambda _: True
    for case in json.load(sys.stdin):
        sys.stdout.write(json.dumps(launches(**case)) + "\n")
