"""The suites of tensors: their cases, in order, and their targets. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from random import Random
from typing import Any

import attrs
import torch

from kvcore.engine import Backend, TensorLayout
from kvcore.errors import KvcoreError
from kvcore.models.codec import Codec
from kvcore.plugins import Plugins
from kvcore_engine.bench.ceilings import measure_ceilings
from kvcore_engine.bench.machine import describe_machine
from kvcore_engine.bench.paged import BLOCK, Bed, DecodeCase, failed_row
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
    name: str, spec: str, settings: Settings, plugins: Plugins, tell: Tell | None
) -> tuple[list[Row], list[Ceiling], dict[str, Any]]:
    """Measure the suite `cpu` or `gpu` on a backend.

    Returns its rows, the ceilings of the memory, and the description of the machine.

    Raises:
        InputError: the backend cannot be built.
    """
    brief = 0.05 if settings.quick else 0.5
    rows, first, last = [], {}, {}
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        device = _device(spec, plugins)
        on_gpu: Any = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_gpu:  # clocks and copies are of the current one
            machine = describe_machine(gpu=device.type == "cuda")
            if not settings.check:
                first = measure_ceilings(device, brief)
            seconds = {"cpu": (0.12, 0.03), "gpu": (0.2, 0.03)}[name][settings.quick]
            suite = _Suite(name, spec, settings, plugins, seconds)
            for row in _gpu(suite) if name == "gpu" else _cpu(suite):
                rows.append(row)
                if tell is not None:
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


def _device(spec: str, plugins: Plugins) -> torch.device:
    """Return the device of a backend, on which a small pool could be allocated."""
    backend: Backend = plugins.build("backend", spec)
    layout = TensorLayout(
        blocks=1,
        block_size=16,
        layers=1,
        kv_heads=1,
        head_dim=64,
        value_dim=64,
        dtype="fp16",
    )
    backend.allocate(layout)
    device: torch.device = backend.tensor([0]).device
    return device


@attrs.frozen
class _Suite:
    """A suite on a backend: makes pools for its cases.

    Attributes:
        name, spec: names of the suite and of the backend.
        settings: selection of the measurements.
        plugins: where backends and codecs are built.
        seconds: time that a version of a case is sampled for.
    """

    name: str
    spec: str
    settings: Settings
    plugins: Plugins
    seconds: float

    @property
    def short(self) -> bool:
        """Whether cases are small, so that they have no targets."""
        return self.settings.quick or self.settings.check

    def pool(
        self, tokens: int, dtype: str, codec: str | None = None, block_size: int = BLOCK
    ) -> _Pool:
        """Return a pool with room for `tokens` tokens, which is not allocated yet."""
        return _Pool(self, tokens, dtype, codec, block_size)

    def poisoned(self, dtype: str, codec: str | None = None) -> Iterator[Row]:
        """Yield checks of attention at lengths around the sizes of blocks, in every way."""
        cases = [
            DecodeCase(name="poisoned, 1 to 2,049", lengths=POISON),
            DecodeCase(
                name="poisoned, window 100, sinks 4", lengths=POISON, window=100, sinks=4
            ),
        ]
        chunks = [length for length in POISON if length >= FEW]
        cases += [
            DecodeCase(name=f"poisoned, {FEW} new", lengths=chunks, new=FEW),
            DecodeCase(
                name=f"poisoned, {FEW} new, window 100, sinks 4",
                lengths=chunks,
                new=FEW,
                window=100,
                sinks=4,
            ),
        ]
        cases = [case for case in cases if self.settings.wants(case.operation)]
        ways = [self.spec]
        if self.name == "gpu" and "attention=" not in self.spec:
            joint = "," if ":" in self.spec else ":"
            ways += [f"{self.spec}{joint}attention={attention}" for attention in ATTENTION]
        checks = attrs.evolve(self.settings, check=True)
        for attention in ways:
            suite = attrs.evolve(self, spec=attention, settings=checks)
            pool = suite.pool(sum(POISON) + 16 * len(POISON), dtype, codec)
            for case in cases:
                yield from pool.rows(case.operation, case.name, Bed.decode, case, poisoned=True)


@attrs.define(eq=False)
class _Pool:
    """A pool for some cases, allocated when the first of them is measured.

    Attributes:
        suite: the suite.
        tokens: tokens that it has room for.
        dtype, codec: dtype of the K/V, and name of its codec, if there is one.
        block_size: tokens of a block.
    """

    suite: _Suite
    tokens: int
    dtype: str
    codec: str | None
    block_size: int
    _bed: Bed | None = attrs.field(init=False, default=None)

    def rows(
        self,
        operation: str,
        case: str,
        measure: Callable[..., Sequence[Row]],
        *arguments: Any,
        **options: Any,
    ) -> Sequence[Row]:
        """Return the rows of a method of `Bed`, or a row with the reason why it has none."""
        suite, case = self.suite, f"{self.codec or self.dtype}, {case}"
        if why := suite.settings.late:
            return [
                Row(suite=suite.name, operation=operation, case=case, by=suite.spec, note=why)
            ]
        try:
            return measure(self.bed(), *arguments, **options)
        except Exception as error:  # noqa: BLE001 - of one case, which must not end the others
            return [failed_row(suite.name, operation, suite.spec, case, error)]

    def bed(self) -> Bed:
        """Return the allocated pool.

        Raises:
            KvcoreError: the backend or the codec cannot be built, or there is too little
                memory.
        """
        if self._bed is None:
            suite = self.suite
            codec: Codec | None = None
            if self.codec is not None:
                codec = suite.plugins.build("codec", self.codec)
            self._bed = Bed.make(
                suite.spec,
                suite.plugins.build("backend", suite.spec),
                suite.name,
                suite.settings,
                tokens=self.tokens,
                dtype=self.dtype,
                codec=codec,
                block_size=self.block_size,
                seconds=suite.seconds,
            )
        return self._bed

    def decode(self, cases: Sequence[DecodeCase]) -> Iterator[Row]:
        """Yield the rows of attention in some cases."""
        for case in cases:
            yield from self.rows(case.operation, case.name, Bed.decode, case)

    def store(
        self, tokens: int, target: Target | None = None, *, rotated: bool = False
    ) -> Sequence[Row]:
        """Return the rows of a store of `tokens` tokens."""
        operation, case = "store+rope" if rotated else "store", f"{tokens:,} tokens"
        return self.rows(operation, case, Bed.store, tokens, target, rotated=rotated)


def _cpu(suite: _Suite) -> Iterator[Row]:
    """Yield the rows of the suite of a CPU: minutes on a slow one, less than one as a rule."""
    settings = suite.settings
    scale = 16 if settings.quick else 1
    cases = [
        DecodeCase(name=f"8 x {2048 // scale:,}", lengths=[2048 // scale] * 8),
        DecodeCase(name=f"1 x {8192 // scale:,}", lengths=[8192 // scale]),
        DecodeCase(name=f"64 x {256 // scale:,}", lengths=[256 // scale] * 64),
        DecodeCase(
            name=f"1 x {8192 // scale:,}, window {1024 // scale:,}, sinks 4",
            lengths=[8192 // scale],
            window=1024 // scale,
            sinks=4,
        ),
        DecodeCase(
            name=f"{512 // scale:,} new of {4096 // scale:,}",
            lengths=[4096 // scale],
            new=512 // scale,
        ),
    ]
    dtypes = settings.dtypes or ("fp32", "bf16", "fp16")
    room, stored, blocks = 16_384 // scale, 8192 // scale, 512 // scale
    for dtype in dtypes:
        if settings.wants("decode") or settings.wants("chunk"):
            yield from suite.poisoned(dtype)
        wanted = [case for case in cases if settings.wants(case.operation)]
        yield from suite.pool(room * 3, dtype).decode(wanted)
        if settings.wants("store"):
            yield from suite.pool(stored * 3, dtype).store(stored)
        if settings.wants("store+rope"):
            yield from suite.pool(stored * 3, dtype).store(stored, rotated=True)
        for operation, measure in (("copy", Bed.copy), ("move", Bed.move)):
            if settings.wants(operation):
                pool = suite.pool(2 * blocks * BLOCK * 3, dtype)
                yield from pool.rows(operation, f"{blocks:,} blocks", measure, blocks)
    if settings.wants("swap"):
        pool = suite.pool(2 * blocks * BLOCK * 3, dtypes[0])
        yield from pool.rows("swap", f"{blocks:,} blocks", Bed.swap, blocks)
    yield from _coded(suite, dtypes[0], cases[0], stored // 4)


def _coded(suite: _Suite, dtype: str, case: DecodeCase, stored: int) -> Iterator[Row]:
    """Yield decode and store with codecs, the store of `stored` tokens."""
    wants = suite.settings.wants
    for codec in CODECS:
        size = 128 if codec.startswith("kivi") else BLOCK
        if wants("decode"):
            yield from suite.pool(sum(case.lengths) * 3, dtype, codec, size).decode([case])
        if wants("store"):
            yield from suite.pool(stored * 3, dtype, codec, size).store(stored)


def _gpu(suite: _Suite) -> Iterator[Row]:
    """Yield the rows of the GPU suite: those with a target, further checks, the grid.

    What may be cut comes last: each case is checked before it is timed.
    """
    settings = suite.settings
    dtypes = settings.dtypes or ("bf16", "fp16")
    attends = settings.wants("decode") or settings.wants("chunk")
    if attends:
        yield from _named(suite, dtypes[0])
    yield from _moved(suite, dtypes[0])
    if attends:
        for dtype in dtypes:
            yield from suite.poisoned(dtype)
        for codec in CODECS[:3]:
            yield from suite.poisoned(dtypes[0], codec)
    if settings.wants("decode") and not suite.short:
        yield from _grid(suite, dtypes[0])


def _named(suite: _Suite, dtype: str) -> Iterator[Row]:
    """Yield the cases of decode that have times to reach."""
    k = 1 << (6 if suite.short else 10)
    ragged = _ragged(64, 128, 32 * max(k, 64))

    def aim(microseconds: float) -> Target | None:
        return None if suite.short else Target(seconds=microseconds / 1e6)

    cases = [
        DecodeCase(name=f"8 x {4 * k:,}", lengths=[4 * k] * 8, target=aim(40)),
        DecodeCase(name=f"1 x {32 * k:,}", lengths=[32 * k], target=aim(41)),
        DecodeCase(name=f"1 x {8 * k:,}", lengths=[8 * k], target=aim(16)),
        DecodeCase(name=f"64 ragged, {sum(ragged):,} tokens", lengths=ragged, target=aim(365)),
        DecodeCase(
            name=f"32 x {8 * k:,}, window {k:,}, sinks 4",
            lengths=[8 * k] * 32,
            window=k,
            sinks=4,
        ),
    ]
    # Prompts whose beginning was hit, a chunk of a long one, and drafts that are verified.
    for count, tokens, new in ((8, 4 * k, k // 2), (1, 32 * k, 2 * k), (32, 4 * k, FEW)):
        name = f"{count} x {new:,} new of {tokens:,}"
        cases.append(DecodeCase(name=name, lengths=[tokens] * count, new=new))
    cases = [case for case in cases if suite.settings.wants(case.operation)]
    room = max(sum(-(-tokens // 16) * 16 for tokens in case.lengths) for case in cases)
    yield from suite.pool(3 * room, dtype).decode(cases)
    if not suite.settings.wants("decode"):
        return
    coded = DecodeCase(name=f"32 x {4 * k:,}", lengths=[4 * k] * 32, target=aim(90))
    yield from suite.pool(3 * sum(coded.lengths), dtype, "fp8-e4m3").decode([coded])


def _moved(suite: _Suite, dtype: str) -> Iterator[Row]:
    """Yield store, copy, move and swap."""
    wants = suite.settings.wants

    def aim(share: float) -> Target | None:
        return None if suite.short else Target(share=share)

    tokens, count, total = (512, 64, 4 << 20) if suite.short else (8192, 4096, 256 << 20)
    for codec in (None, "fp8-e4m3", "int8") if wants("store") else ():
        goal = aim(0.81) if codec is None else None
        yield from suite.pool(tokens * 16, dtype, codec).store(tokens, goal)
    for codec in (None, "fp8-e4m3", "int8") if wants("store+rope") else ():
        yield from suite.pool(tokens * 16, dtype, codec).store(tokens, rotated=True)
    if wants("copy"):
        pool = suite.pool(2 * count * 16 * 4, dtype)
        yield from pool.rows("copy", f"{count:,} blocks", Bed.copy, count, aim(0.9))
    if wants("move"):
        pool = suite.pool(count * 16 * 4, dtype)
        yield from pool.rows("move", f"{count:,} blocks", Bed.move, count)
    for block_size in (16, 64, 128, 1024) if wants("swap") else ():
        blocks = max(2, total // (block_size * 4096))
        pool = suite.pool(2 * blocks * block_size * 3, dtype, block_size=block_size)
        case = f"{blocks:,} blocks of {block_size:,}"
        yield from pool.rows("swap", case, Bed.swap, blocks, aim(0.93))


def _grid(suite: _Suite, dtype: str) -> Iterator[Row]:
    """Yield decode at every batch and context, in one pool as large as the memory allows."""
    cells = sorted(
        ((batch, context) for batch in GRID_BATCHES for context in GRID_CONTEXTS),
        key=lambda cell: cell[0] * cell[1],
    )
    cases = [
        DecodeCase(
            name=f"{batch} x {context:,}",
            lengths=[context] * batch,
            target=READ_SHARE if batch * context * 4096 >= LARGE else None,
        )
        for batch, context in cells
    ]
    tokens = GRID_BATCHES[-1] * GRID_CONTEXTS[-1]
    pool = suite.pool(tokens, dtype)
    while tokens > GRID_CONTEXTS[-1] and not suite.settings.late:
        try:
            pool.bed()
            break
        except KvcoreError:  # cells that do not fit get rows with the reason
            tokens //= 2
            pool = suite.pool(tokens, dtype)
    yield from pool.decode(cases)


def _ragged(count: int, least: int, greatest: int) -> list[int]:
    """Return fixed lengths that are evenly distributed on a logarithmic scale."""
    random = Random(0)  # noqa: S311 - chance, no secret
    return [round(least * (greatest / least) ** random.random()) for _ in range(count)]
