"""The suites of tensors: their cases, in order, and their targets. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from random import Random
from typing import Any

import attrs
import torch

from kvcore.errors import KvcoreError
from kvcore.plugins import Plugins
from kvcore_engine.bench.ceilings import measure_ceilings
from kvcore_engine.bench.machine import describe_machine
from kvcore_engine.bench.paged import BLOCK, Bed, DecodeCase, TensorSuite
from kvcore_engine.bench.result import Ceiling, Row, Settings, Target, Tell, with_shares

ATTENTION = ("triton", "sdpa", "flashinfer")
"""Ways to attend that a backend may have; each that is available is checked."""

POISON = (1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 500, 1000, 1023, 2049)
"""Lengths around the sizes of blocks and tiles, in a pool of NaN."""

FEW = 5
"""New tokens of a sequence whose drafts are verified: fewer than a tile has rows."""

GRID_BATCHES = (1, 4, 16, 32, 64, 128, 256)
GRID_CONTEXTS = (1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10)

READ_SHARE = Target(share=0.92)
"""Of the read-only rate, for decode over `LARGE` bytes of K/V or more."""

LARGE = 250_000_000

CODECS = ("int8", "fp8-e4m3", "int4", "kivi:bits=4")


def run_tensor_suite(
    name: str, spec: str, settings: Settings, plugins: Plugins, tell: Tell
) -> tuple[list[Row], list[Ceiling], dict[str, Any]]:
    """Measure the suite `cpu` or `gpu` on a backend.

    Returns its rows, the ceilings of the memory, and the description of the machine.

    Raises:
        InputError: the backend cannot be built.
    """
    brief = 0.05 if settings.quick else 0.5
    rows, first, last = [], {}, {}
    seconds = {"cpu": (0.12, 0.03), "gpu": (0.2, 0.03)}[name][settings.quick]
    suite = TensorSuite(name, spec, settings, plugins, seconds)
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        device = Bed(suite, 1, "fp16").device
        on_gpu: Any = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_gpu:  # clocks and copies are of the current one
            machine = describe_machine(gpu=device.type == "cuda")
            if not settings.check:
                first = measure_ceilings(device, brief)
            for row in _gpu(suite) if name == "gpu" else _cpu(suite):
                rows.append(row)
                tell(row)
            if not settings.check:
                with suppress(RuntimeError):  # a GPU does nothing more after some faults
                    last = measure_ceilings(device, brief)
    finally:
        torch.set_num_threads(threads)
    ceilings = [
        Ceiling(operation, rate, last.get(operation)) for operation, rate in first.items()
    ]
    return with_shares(rows, ceilings), ceilings, machine


def _poisoned(suite: TensorSuite, dtype: str, codec: str | None = None) -> Iterator[Row]:
    """Yield checks of attention at lengths around the sizes of blocks, in every way."""
    plain = DecodeCase(name="poisoned, 1 to 2,049", lengths=POISON)
    chunks = [length for length in POISON if length >= FEW]
    chunk = DecodeCase(name=f"poisoned, {FEW} new", lengths=chunks, new=FEW)
    limits: Any = {"window": 100, "sinks": 4}
    seen = "window 100, sinks 4"
    cases = [
        plain,
        attrs.evolve(plain, name=f"poisoned, {seen}", **limits),
        chunk,
        attrs.evolve(chunk, name=f"{chunk.name}, {seen}", **limits),
    ]
    ways = [suite.spec]
    if suite.name == "gpu" and "attention=" not in suite.spec:
        joint = "," if ":" in suite.spec else ":"
        ways += [f"{suite.spec}{joint}attention={attention}" for attention in ATTENTION]
    checks = attrs.evolve(suite.settings, check=True)
    for attention in ways:
        checked = attrs.evolve(suite, spec=attention, settings=checks)
        bed = Bed(checked, sum(POISON) + 16 * len(POISON), dtype, codec)
        yield from bed.decode(cases, poisoned=True)


def _cpu(suite: TensorSuite) -> Iterator[Row]:
    """Yield the rows of the suite of a CPU: minutes on a slow one, less than one as a rule."""
    settings = suite.settings
    scale = 16 if settings.quick else 1
    cases = [
        DecodeCase.even(8, 2048 // scale),
        DecodeCase.even(1, 8192 // scale),
        DecodeCase.even(64, 256 // scale),
        DecodeCase.even(1, 8192 // scale, window=1024 // scale, sinks=4),
        DecodeCase(
            name=f"{512 // scale:,} new of {4096 // scale:,}",
            lengths=[4096 // scale],
            new=512 // scale,
        ),
    ]
    dtypes = settings.dtypes or ("fp32", "bf16", "fp16")
    room, stored, blocks = 16_384 // scale, 8192 // scale, 512 // scale
    for dtype in dtypes:
        yield from _poisoned(suite, dtype)
        yield from Bed(suite, room * 3, dtype).decode(cases)
        yield from Bed(suite, stored * 3, dtype).store(stored)
        yield from Bed(suite, stored * 3, dtype).store(stored, rotated=True)
        for operation in ("copy", "move"):
            bed = Bed(suite, 2 * blocks * BLOCK * 3, dtype)
            measure = getattr(bed, operation)
            yield from bed.rows(operation, f"{blocks:,} blocks", measure, blocks)
    bed = Bed(suite, 2 * blocks * BLOCK * 3, dtypes[0])
    yield from bed.rows("swap", f"{blocks:,} blocks", bed.swap, blocks)
    # Decode and store with codecs.
    for codec in CODECS:
        size = 128 if codec.startswith("kivi") else BLOCK
        tokens = sum(cases[0].lengths)
        yield from Bed(suite, tokens * 3, dtypes[0], codec, size).decode(cases[:1])
        few = stored // 4
        yield from Bed(suite, few * 3, dtypes[0], codec, size).store(few)


def _gpu(suite: TensorSuite) -> Iterator[Row]:
    """Yield the rows of the GPU suite: those with a target, further checks, the grid.

    What may be cut comes last: each case is checked before it is timed.
    """
    dtypes = suite.settings.dtypes or ("bf16", "fp16")
    yield from _named(suite, dtypes[0])
    yield from _moved(suite, dtypes[0])
    for dtype in dtypes:
        yield from _poisoned(suite, dtype)
    for codec in CODECS[:3]:
        yield from _poisoned(suite, dtypes[0], codec)
    if suite.settings.wants("decode") and not suite.short:
        yield from _grid(suite, dtypes[0])


def _named(suite: TensorSuite, dtype: str) -> Iterator[Row]:
    """Yield the cases of decode that have times to reach."""
    k = 1 << (6 if suite.short else 10)
    ragged = _ragged(64, 128, 32 * max(k, 64))

    def aim(microseconds: float) -> Target | None:
        return None if suite.short else Target(seconds=microseconds / 1e6)

    cases = [
        DecodeCase.even(8, 4 * k, target=aim(40)),
        DecodeCase.even(1, 32 * k, target=aim(41)),
        DecodeCase.even(1, 8 * k, target=aim(16)),
        DecodeCase(name=f"64 ragged, {sum(ragged):,} tokens", lengths=ragged, target=aim(365)),
        DecodeCase.even(32, 8 * k, window=k, sinks=4),
        # Prompts whose beginning was hit, a chunk of a long one, and drafts that are verified.
        DecodeCase.even(8, 4 * k, new=k // 2),
        DecodeCase.even(1, 32 * k, new=2 * k),
        DecodeCase.even(32, 4 * k, new=FEW),
    ]
    wanted = [case.lengths for case in cases if suite.settings.wants(case.operation)]
    rooms = (sum(-(-tokens // 16) * 16 for tokens in lengths) for lengths in wanted)
    room = max(rooms, default=0)
    yield from Bed(suite, 3 * room, dtype).decode(cases)
    coded = DecodeCase.even(32, 4 * k, target=aim(90))
    yield from Bed(suite, 3 * sum(coded.lengths), dtype, "fp8-e4m3").decode([coded])


def _moved(suite: TensorSuite, dtype: str) -> Iterator[Row]:
    """Yield store, copy, move and swap."""

    def aim(share: float) -> Target | None:
        return None if suite.short else Target(share=share)

    tokens, count, total = (512, 64, 4 << 20) if suite.short else (8192, 4096, 256 << 20)
    for codec in (None, "fp8-e4m3", "int8"):
        goal = aim(0.81) if codec is None else None
        yield from Bed(suite, tokens * 16, dtype, codec).store(tokens, goal)
    for codec in (None, "fp8-e4m3", "int8"):
        yield from Bed(suite, tokens * 16, dtype, codec).store(tokens, rotated=True)
    bed = Bed(suite, 2 * count * 16 * 4, dtype)
    yield from bed.rows("copy", f"{count:,} blocks", bed.copy, count, aim(0.9))
    bed = Bed(suite, count * 16 * 4, dtype)
    yield from bed.rows("move", f"{count:,} blocks", bed.move, count)
    for block_size in (16, 64, 128, 1024):
        blocks = max(2, total // (block_size * 4096))
        bed = Bed(suite, 2 * blocks * block_size * 3, dtype, block_size=block_size)
        case = f"{blocks:,} blocks of {block_size:,}"
        yield from bed.rows("swap", case, bed.swap, blocks, aim(0.93))


def _grid(suite: TensorSuite, dtype: str) -> Iterator[Row]:
    """Yield decode at every batch and context, in one pool as large as the memory allows."""
    cells = sorted(
        ((batch, context) for batch in GRID_BATCHES for context in GRID_CONTEXTS),
        key=lambda cell: cell[0] * cell[1],
    )
    cases = []
    for batch, context in cells:
        target = READ_SHARE if batch * context * 4096 >= LARGE else None
        cases.append(DecodeCase.even(batch, context, target=target))
    tokens = GRID_BATCHES[-1] * GRID_CONTEXTS[-1]
    bed = Bed(suite, tokens, dtype)
    while tokens > GRID_CONTEXTS[-1] and not suite.settings.late:
        try:
            _ = bed.backend
            break
        except KvcoreError:  # cells that do not fit get rows with the reason
            tokens //= 2
            bed = Bed(suite, tokens, dtype)
    yield from bed.decode(cases)


def _ragged(count: int, least: int, greatest: int) -> list[int]:
    """Return fixed lengths that are evenly distributed on a logarithmic scale."""
    random = Random(0)  # noqa: S311 - chance, no secret
    return [round(least * (greatest / least) ** random.random()) for _ in range(count)]
