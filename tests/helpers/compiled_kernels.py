"""A program that compiles decode kernels for absent GPUs and prints results as JSON.

Run it in a process of its own, without TRITON_INTERPRET: whether kernels are compiled or
interpreted is fixed when they are decorated.
"""

import json
import re
import subprocess
import sys
import tempfile
from math import gcd
from pathlib import Path

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcore_engine.backend.kernels import attention

BUFFERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<\d+x(\d+x\d+)x")

WARP = 32


def compiled(capability, stored, computed, kernel=attention.attend_chunks, **given):
    """Compile a kernel, and return its resources; `given` replaces default constants."""
    warps, width = given.pop("warps", 2), given.get("width", 128)
    grids = given.pop("grids", None)
    constants = {
        "tokens": 1, "group": 4, "rows": 16,
        "full": width, "width": width, "value_width": width,
        "padded": triton.next_power_of_2(width),
        "value_padded": triton.next_power_of_2(width),
        "key_unit": gcd(16, width), "value_unit": gcd(16, width), "block_size": 16,
        "tile": 64, "stages": 2, "way": attention.PLAIN, "bits": 0, "windowed": False,
        "parts": 16, "key_grids": None, "value_grids": None,
    } | given  # fmt: skip
    pointers = {
        "masses": "fp32", "splits": "i32", "totals": "fp32",
        "queries": computed, "keys": stored, "values": stored, "tables": "i32", "work": "i32",
        "out": computed, "partial": "fp32", "logs": "fp32",
    }  # fmt: skip
    if grids:
        pointers |= {"key_grids": grids, "value_grids": grids}
        del constants["key_grids"], constants["value_grids"]
    types, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
        elif name in pointers:
            types[name] = f"*{pointers[name]}"
        else:
            types[name] = "fp32" if name in {"scale", "factor"} else "i32"
        if name in pointers or name.endswith("stride"):
            attributes[place,] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in types}
    source = ASTSource(kernel, types, constants, attributes)
    target = GPUTarget("cuda", capability, WARP)
    made = triton.compile(source, target=target, options={"num_warps": warps})
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "wide": len(re.findall(r"cp\.async\.cg\.shared\.global .*0x10", ptx)),
        "narrow": len(re.findall(r"cp\.async\.ca\.shared\.global .*0x[48],", ptx)),
        "buffers": BUFFERS.findall(made.asm["ttgir"]),
        "spilled": spilled(ptx),
    }


def spilled(ptx):
    """Return the bytes of registers that the first assembler that accepts `ptx` spills."""
    target = re.search(r"\.target (\w+)", ptx).group(1)
    programs = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, "utf-8")
        for program in sorted(programs.glob("ptxas*")):
            command = [program, "-v", "--gpu-name", target, source, "-o", f"{folder}/kernel"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                found = re.findall(r"(\d+) bytes spill", done.stderr)
                return sum(map(int, found))
    return None


CHUNKS = {"tokens": 16, "rows": 64, "warps": 8}

VARIANTS = {
    "combining for sm_80": (
        80, "bf16", "bf16", {"kernel": attention.combine_chunks, "warps": 4},
    ),
    "weighing for sm_90": (
        90, "bf16", "bf16", {"kernel": attention.weigh_chunks, "dot": tl.bfloat16},
    ),
    "bf16 for sm_90": (90, "bf16", "bf16", {"dot": tl.bfloat16}),
    "bf16 for sm_80": (80, "bf16", "bf16", {"dot": tl.bfloat16}),
    "windows of fp16, 80 wide, for sm_80": (
        80, "fp16", "fp16", {"dot": tl.float16, "width": 80, "windowed": True},
    ),
    "fp32 for sm_80": (80, "fp32", "fp32", {"dot": tl.float32, "tile": 16, "warps": 8}),
    "chunks of bf16 for sm_90": (90, "bf16", "bf16", {"dot": tl.bfloat16, **CHUNKS}),
    "chunks of bf16 for sm_80": (80, "bf16", "bf16", {"dot": tl.bfloat16, **CHUNKS}),
    "chunks with windows of fp16 for sm_90": (
        90, "fp16", "fp16", {"dot": tl.float16, "windowed": True, **CHUNKS},
    ),
    "chunks of bf16, 256 wide, for sm_90": (
        90, "bf16", "bf16",
        {"dot": tl.bfloat16, "width": 256, **CHUNKS, "tokens": 8, "rows": 32},
    ),
    "chunks of fp32 for sm_80": (
        80, "fp32", "fp32", {"dot": tl.float32, "tile": 16, "tokens": 4, "warps": 8},
    ),
    "chunks of int8 for sm_90": (
        90, "u8", "bf16",
        {
            "dot": tl.float16, "way": attention.INT8_BY_TOKEN, "tile": 32, "grids": "i32",
            **CHUNKS,
        },
    ),
    "chunks of fp8 for sm_90": (
        90, "fp8e4nv", "bf16", {"dot": tl.float16, "way": attention.FP8, **CHUNKS},
    ),
    "fp8 for sm_90": (90, "fp8e4nv", "bf16", {"dot": tl.float16, "way": attention.FP8}),
    "fp8 for sm_80": (80, "u8", "bf16", {"dot": tl.float16, "way": attention.FP8, "bits": 4}),
    "int8 for sm_90": (
        90, "u8", "bf16",
        {"dot": tl.float16, "way": attention.INT8_BY_TOKEN, "tile": 32, "grids": "i32"},
    ),
    "int4 for sm_80": (
        80, "u8", "bf16",
        {
            "dot": tl.float16, "way": attention.INT4_BY_TOKEN, "tile": 32, "grids": "i32",
            "width": 64, "full": 128,
        },
    ),
}  # fmt: skip


if __name__ == "__main__":
    json.dump(
        {name: compiled(*given, **options) for name, (*given, options) in VARIANTS.items()},
        sys.stdout,
    )
