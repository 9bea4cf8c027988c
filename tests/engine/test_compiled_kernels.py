"""Triton's kernels, compiled for GPUs that need not be there, and a table of their limits."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("triton", reason="the kernels are Triton's")

NUMBERS = {
    "fp32": "fp32", "fp16": "16 bits", "bf16": "16 bits", "fp8-e4m3": "fp8", "fp8-e5m2": "fp8",
    "fp8-e4m3:scale=head": "fp8 by head", "int8": "int8", "int4": "int4",
}  # fmt: skip
"""The families of rows of `LIMITS`, by dtype or codec."""

CASES = [
    # numbers, new tokens, capability, query heads of a K/V head, tokens of a block
    ("fp32", 1, 80, 1, 16),
    ("bf16", 1, 90, 8, 16),
    ("fp8-e4m3", 1, 100, 8, 16),
    ("fp8-e4m3:scale=head", 1, 80, 1, 16),
    ("int8", 1, 90, 8, 16),
    ("int4", 1, 100, 8, 64),
    ("bf16", 64, 100, 8, 64),
    ("int8", 64, 90, 8, 16),
]
"""The cases of each run of the tests: each dtype and codec, in steps on different GPUs.

Steps on one GPU have the same shapes, so that a kernel that reads no K/V is compiled once.
"""

EVERY = [*product(NUMBERS, (1, 64), (80, 90, 100), (1, 8), (16, 64))]
"""The cases of the profile `thorough`, in half of which layers have a window."""

LIMITS = {
    # registers, shared memory, copies, narrowest load, tiles under way
    "decode 16 bits": (192, 71_680, [16], 4, 4),
    "decode fp32": (212, 42_048, [16], 4, 2),
    "decode fp8": (255, 38_912, [16], 4, 6),
    "decode fp8 by head": (255, 38_912, [16], 4, 4),
    "decode int4": (199, 23_552, [4, 16], 4, 10),
    "decode int8": (255, 39_936, [4, 16], 4, 8),
    "windowed 16 bits": (184, 71_680, [16], 4, 4),
    "windowed fp32": (208, 42_048, [16], 4, 2),
    "windowed fp8": (200, 38_912, [16], 4, 3),
    "windowed fp8 by head": (200, 38_912, [16], 4, 4),
    "windowed int4": (200, 24_064, [4, 16], 4, 6),
    "windowed int8": (202, 40_448, [4, 16], 4, 4),
    "chunk 16 bits": (180, 82_976, [16], 4, 1),
    "chunk fp32": (68, 25_664, [16], 4, 3),
    "chunk fp8": (255, 57_392, [16], 4, 1),
    "chunk fp8 by head": (237, 28_672, [16], 4, 2),
    "chunk int4": (255, 45_904, [4, 16], 4, 1),
    "chunk int8": (255, 58_160, [4, 16], 4, 1),
    "weigh 16 bits": (54, 20_740, [4, 16], 4, None),
    "weigh fp32": (40, 16_900, [4, 16], 4, None),
    "weigh fp8": (93, 12_548, [4, 16], 4, None),
    "weigh fp8 by head": (92, 12_548, [4, 16], 4, None),
    "weigh int4": (90, 8_452, [4, 16], 4, None),
    "weigh int8": (117, 16_388, [4, 16], 4, None),
    "combine": (40, 2_048, [], 2, None),
    "store 16 bits": (64, 0, [], 16, None),
    "store fp32": (54, 4_096, [], 16, None),
    "store fp8": (78, 4_096, [], 16, None),
    "store fp8 by head": (86, 4_096, [], 2, None),
    "store int8": (86, 4_096, [], 2, None),
    "divide": (80, 1_024, [], 4, None),
    "order": (48, 256, [], 4, None),
    "move": (28, 0, [], 16, None),
}
"""The resources of kernels at most, and the widths of copies and loads, by kernel and numbers.

Registers of a thread; bytes of shared memory; bytes of asynchronous copies, those of 4 being
the grids of tokens; bytes of the narrowest load of shared memory; tiles that are copied while a
multiprocessor computes, at least. Decode with a window has rows of its own: four warps, and so
fewer programs, hold its masked tiles in registers.
"""

SPILLED = {"chunk int4": 8}
"""Bytes of registers that a thread spills at most; of other kernels none.

Two of 255 on sm_80, under a window. With half of the rows a program would spill none, and read
all K/V twice as often.
"""


def compiled(cases, folder):
    """Return the launches of cases, from a process in which kernels are compiled."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    }
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": "."}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "helpers.compiled_kernels"],
        cwd=Path(__file__).parents[1],
        env=environment,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def described(case, *, thorough):
    """Return the arguments of a case for the process that compiles."""
    fields = "numbers", "new", "capability", "group", "block_size"
    described = dict(zip(fields, case, strict=True))
    windowed = thorough and (described["group"] == 1) != (described["block_size"] == 16)
    # In each run a pipeline is chosen once: that compiles a kernel twice.
    chosen = thorough or described["numbers"] == "bf16"
    window, deepest = 50 if windowed else None, 3 if described["new"] == 1 else 2
    return described | {"window": window, "stages": [2, 3] if chosen else [deepest]}


def row_of(name, case):
    """Return the name of the row of `LIMITS` of a kernel in a case."""
    kernel = name.removesuffix("_chunks").removesuffix("_contexts")
    if kernel in {"combine", "divide", "order", "move"}:
        return kernel
    if kernel == "attend":
        kernel = "decode" if case["new"] == 1 else "chunk"
        if kernel == "decode" and case["window"]:
            kernel = "windowed"
    return f"{kernel} {NUMBERS[case['numbers']]}"


def measured(row, kernel, pipeline):
    """Return the columns of `LIMITS` of a compiled kernel."""
    loads = [int(width) for width in kernel["widths"].get("ld.shared", {})]
    stages, programs = pipeline
    tiles = programs * (stages - 1) if row.startswith(("decode", "windowed", "chunk")) else None
    narrowest = min(loads, default=None)
    return kernel["registers"], kernel["shared"], kernel["copies"], narrowest, tiles


def excess(row, kernel, pipeline):
    """Return the columns in which a kernel is beyond its limits."""
    if row not in LIMITS:
        return ["no row"]
    registers, shared, copies, load, tiles = measured(row, kernel, pipeline)
    limits = LIMITS[row]
    beyond = {
        "registers": registers > limits[0],
        "spilled": kernel["spilled"] > SPILLED.get(row, 0),
        "shared": shared > limits[1],
        "copies": not {*copies} <= {*limits[2]},
        "loads": load is not None and load < limits[3],
        "tiles": tiles is not None and tiles < limits[4],
    }
    return [name for name, holds in beyond.items() if holds]


@pytest.mark.slow
def test_kernels_stay_within_the_limits_of_their_rows(tmp_path):
    """All kernels of a step compile for each GPU, within the limits of the table."""
    thorough = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
    cases = [described(case, thorough=thorough) for case in (EVERY if thorough else CASES)]
    beyond, rows = [], set()
    for case, launched in zip(cases, compiled(cases, tmp_path), strict=True):
        for name, kernel in launched["kernels"].items():
            row = row_of(name, case)
            rows.add(row)
            columns = excess(row, kernel, launched["pipeline"])
            if columns:
                beyond.append((row, measured(row, kernel, launched["pipeline"]), columns, case))
    assert not beyond, "\n".join(map(str, beyond))
    assert rows == {*LIMITS} if thorough else rows <= {*LIMITS}
