"""The suites of benchmarks: their cases, in order, and their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.bench.machine import describe_machine
from kvcore.bench.result import BenchResult, Row, Settings, Target, Tell, with_shares
from kvcore.engine import Backend
from kvcore.engine.backend import TENSOR_DTYPES
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.extras import import_extra
from kvcore.plugins import Plugins

if TYPE_CHECKING:
    from kvcore.bench.paged import Bed, DecodeCase

CPU, CUDA = "torch-cpu", "torch-cuda"

ATTENTION = ("triton", "sdpa", "flashinfer")
"""Ways to attend that a backend may have, each of which is checked where it is there."""

POISON = (1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 500, 1000, 1023, 2049)
"""Lengths around the sizes of blocks and tiles, in a pool of NaN."""

GRID_BATCHES = (1, 4, 16, 32, 64, 128, 256)
GRID_CONTEXTS = (1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10)

READ_SHARE = Target(share=0.92)
"""Of the read-only rate, for decode over `LARGE` bytes of K/V or more."""

LARGE = 250_000_000

CODECS = ("int8", "fp8-e4m3", "int4", "kivi:bits=4")


@attrs.frozen
class Suite:
    """A part of the benchmark.

    Attributes:
        about: what it measures, in a line.
        operations: names that `Settings.only` may have.
        backend: what it measures unless asked otherwise; None: no tensors.
    """

    about: str
    operations: Sequence[str]
    backend: str | None = None


TENSOR_OPERATIONS = ("decode", "store", "store+rope", "copy", "move", "swap")

SUITES: Mapping[str, Suite] = {
    "cpu": Suite("paged K/V in the memory of the host", TENSOR_OPERATIONS, CPU),
    "gpu": Suite("paged K/V in the memory of a GPU", TENSOR_OPERATIONS, CUDA),
    "cache": Suite("the cache's decisions, against a plain loop", ("lru",)),
    "sim": Suite("the simulator, against Dynamo's where it is installed", ("simulate",)),
}
"""The suites by name, in the order in which they run."""


def available_suites(plugins: Plugins | None = None) -> list[str]:
    """Return the suites that can run here: without torch, or without a GPU, fewer."""
    found = plugins or Plugins()
    return [
        name
        for name, suite in SUITES.items()
        if suite.backend is None or not _unavailable(suite.backend, found)
    ]


def run_suites(
    names: Sequence[str],
    settings: Settings,
    *,
    plugins: Plugins | None = None,
    tell: Tell | None = None,
) -> BenchResult:
    """Run suites, one after the other; `tell` is called with each row when it is there.

    What cannot be measured here is a row with the reason. Shares of ceilings are known at the
    end, when these have been measured again.

    Raises:
        InputError: no such suite, operation or dtype, or a backend that cannot be built.
        PluginError: a suite cannot run here at all: there is no torch, or no GPU.
    """
    plugins = plugins or Plugins()
    _check(names, settings)
    begun, rows, found = monotonic(), [], []
    specs = {name: settings.backend or SUITES[name].backend for name in names}
    for name in names:
        if specs[name] is not None:
            _require(name, str(specs[name]), plugins)
    machine = describe_machine(gpu=False)
    for name in names:
        spec = specs[name] if SUITES[name].backend is not None else None
        if spec is None:
            from kvcore.bench.caches import of_cache, of_sim  # noqa: PLC0415 - reads a trace

            for row in {"cache": of_cache, "sim": of_sim}[name](settings):
                rows.append(row)
                if tell is not None:
                    tell(row)
            continue
        device, measured = _of_tensors(name, spec, settings, plugins, tell)
        if device == "cuda":
            machine = describe_machine(gpu=True)
        rows += measured[0]
        found += measured[1]
    return BenchResult(
        machine=machine,
        settings=settings,
        ceilings=found,
        rows=rows,
        seconds=monotonic() - begun,
    )


def _check(names: Sequence[str], settings: Settings) -> None:
    """Raise InputError for an unknown suite, operation or dtype."""
    for name in names:
        if name not in SUITES:
            msg = f"bench: no suite {name!r}; there are: {', '.join(SUITES)}"
            raise InputError(msg)
    known = [operation for name in names for operation in SUITES[name].operations]
    for what, asked, there in (
        ("operation", settings.only, known),
        ("dtype", settings.dtypes, TENSOR_DTYPES),
    ):
        for each in asked:
            if each not in there:
                listed = ", ".join(dict.fromkeys(there))
                msg = f"bench {' '.join(names)}: no {what} {each!r}; there are: {listed}"
                raise InputError(msg)


def _unavailable(spec: str, plugins: Plugins) -> str | None:
    """Return why a backend cannot be built here; None: it can."""
    reason: str | None = plugins.get("backend", spec.partition(":")[0]).unavailable()
    return reason


def _require(name: str, spec: str, plugins: Plugins) -> None:
    """Raise PluginError, saying what to do, unless a suite can run."""
    import_extra("torch", f"bench {name} needs torch", "torch")
    if spec.partition(":")[0] == CUDA and (why := _unavailable(CUDA, plugins)):
        msg = (
            f"bench {name} needs a GPU: {why}. On a machine with one, run `kvcore bench gpu` "
            "or `python -m kvcore.testing.gpu`; here, `kvcore bench cpu`"
        )
        raise PluginError(msg)


def _of_tensors(
    name: str, spec: str, settings: Settings, plugins: Plugins, tell: Tell | None
) -> tuple[str, tuple[list[Row], list[Any]]]:
    """Measure a suite of operations on tensors; return the device, rows and ceilings."""
    import torch  # noqa: PLC0415 - `import kvcore` is light

    from kvcore.bench.ceilings import ceilings, measure_ceilings  # noqa: PLC0415 - likewise

    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    brief = 0.05 if settings.quick else 0.5
    try:
        first, rows = {}, []
        device = _device(spec, plugins)
        if not settings.check:
            first = measure_ceilings(device, brief)
        cases = _gpu(name, spec, settings, plugins) if name == "gpu" else None
        for row in cases or _cpu(name, spec, settings, plugins):
            rows.append(row)
            if tell is not None:
                tell(row)
        last: dict[str, float] = {}
        if not settings.check:
            with suppress(RuntimeError):  # a GPU does nothing more after some faults
                last = measure_ceilings(device, brief)
        found = ceilings(first, last)
        return device.type, (with_shares(rows, found), found)
    finally:
        torch.set_num_threads(threads)


def _device(spec: str, plugins: Plugins) -> Any:
    """Return the device of a backend."""
    from kvcore.engine import TensorLayout  # noqa: PLC0415 - for this alone

    backend: Backend = plugins.build("backend", spec)
    sizes: Any = {"blocks": 1, "layers": 1, "kv_heads": 1, "block_size": 16}
    backend.allocate(TensorLayout(**sizes, head_dim=64, value_dim=64, dtype="fp16"))
    return backend.tensor([0]).device


@attrs.frozen
class _Maker:
    """Makes beds for the cases of a suite, and rows of what fails.

    Attributes:
        suite, spec: names of the suite and of the backend.
        settings: what is measured.
        plugins: where backends and codecs are built.
        seconds: time that a version of a case is sampled for.
    """

    suite: str
    spec: str
    settings: Settings
    plugins: Plugins
    seconds: float

    def bed(self, tokens: int, dtype: str, codec: str | None = None, **fixed: Any) -> Bed:
        """Return a pool and a block table with room for `tokens` tokens."""
        from kvcore.bench.paged import Bed  # noqa: PLC0415 - needs torch

        spec = fixed.pop("spec", self.spec)
        return Bed.make(
            spec,
            self.plugins.build("backend", spec),
            self.suite,
            self.settings,
            tokens=tokens,
            dtype=dtype,
            codec=None if codec is None else self.plugins.build("codec", codec),
            seconds=self.seconds,
            **fixed,
        )

    def rows(
        self, operation: str, case: str, measure: Callable[[], Sequence[Row]], by: str = ""
    ) -> Sequence[Row]:
        """Return what `measure` returns, or the reason why not, as a row."""
        from kvcore.bench.paged import failed_row  # noqa: PLC0415 - needs torch

        by = by or self.spec
        if self.settings.late:
            why = f"not measured: the deadline of {self.settings.deadline:g} s has passed"
            return [Row(suite=self.suite, operation=operation, case=case, by=by, note=why)]
        try:
            return measure()
        except Exception as error:  # noqa: BLE001 - of one case, which must not end the others
            return [failed_row(self.suite, operation, by, case, error)]

    def poisoned(self, dtype: str, codec: str | None) -> Iterator[Row]:
        """Yield checks of attention at lengths around the sizes of blocks, in every way."""
        from kvcore.bench.paged import DecodeCase  # noqa: PLC0415 - needs torch

        cases = [
            DecodeCase(name="poisoned, 1 to 2,049", lengths=POISON),
            DecodeCase(
                name="poisoned, window 100, sinks 4", lengths=POISON, window=100, sinks=4
            ),
        ]
        kind, ways = codec or dtype, [self.spec]
        if self.suite == "gpu" and "attention=" not in self.spec:
            joint = "," if ":" in self.spec else ":"
            ways += [f"{self.spec}{joint}attention={way}" for way in ATTENTION]
        for way in ways:
            try:
                self.plugins.build("backend", way)
            except KvcoreError as error:
                from kvcore.bench.paged import failed_row  # noqa: PLC0415 - needs torch

                yield failed_row(self.suite, "decode", way, f"{kind}, poisoned", error)
                continue
            for case in cases:

                def check(way: str = way, case: DecodeCase = case) -> Sequence[Row]:
                    fast = attrs.evolve(self.settings, check=True)
                    maker = attrs.evolve(self, settings=fast)
                    bed = maker.bed(sum(POISON) + 16 * len(POISON), dtype, codec, spec=way)
                    return bed.decode(case, poisoned=True)

                yield from self.rows("decode", f"{kind}, {case.name}", check, way)


def _cpu(name: str, spec: str, settings: Settings, plugins: Plugins) -> Iterator[Row]:
    """Yield the rows of the suite of a CPU: minutes on a slow one, less than one as a rule."""
    from kvcore.bench.paged import BLOCK, DecodeCase  # noqa: PLC0415 - needs torch

    maker = _Maker(name, spec, settings, plugins, 0.03 if settings.quick else 0.12)
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
    ]
    dtypes = settings.dtypes or ("fp32", "bf16", "fp16")
    room = 16_384 // scale
    for dtype in dtypes:
        if settings.wants("decode"):
            yield from maker.poisoned(dtype, None)
            yield from _decoded(maker, room * 3, dtype, None, cases)
        if settings.wants("store"):
            tokens = 8192 // scale
            made = _lazily(maker, tokens * 3, dtype)
            yield from maker.rows("store", f"{dtype}, {tokens:,} tokens", made("store", tokens))
        if settings.wants("store+rope"):
            yield from _rotated(maker, 8192 // scale, 3, dtype)
        count = 512 // scale
        for operation in filter(settings.wants, ("copy", "move")):
            made = _lazily(maker, 2 * count * BLOCK * 3, dtype)
            case = f"{dtype}, {count:,} blocks"
            yield from maker.rows(operation, case, made(operation, count))
    if settings.wants("swap"):
        count = 512 // scale
        made = _lazily(maker, 2 * count * BLOCK, dtypes[0])
        yield from maker.rows("swap", f"{dtypes[0]}, {count:,} blocks", made("swap", count))
    for codec in CODECS:
        size = {"block_size": 128} if codec.startswith("kivi") else {}
        if settings.wants("decode"):
            yield from _decoded(maker, room, dtypes[0], codec, cases[:1], **size)
        if settings.wants("store"):
            tokens = 2048 // scale
            made = _lazily(maker, tokens * 3, dtypes[0], codec, **size)
            yield from maker.rows("store", f"{codec}, {tokens:,} tokens", made("store", tokens))


def _gpu(name: str, spec: str, settings: Settings, plugins: Plugins) -> Iterator[Row]:
    """Yield the rows of the GPU suite: checks, then rows with a target, then the grid."""
    maker = _Maker(name, spec, settings, plugins, 0.03 if settings.quick else 0.2)
    dtypes = settings.dtypes or ("bf16", "fp16")
    short = settings.quick or settings.check
    if settings.wants("decode"):
        for dtype in dtypes:
            yield from maker.poisoned(dtype, None)
        for codec in CODECS[:3]:
            yield from maker.poisoned(dtypes[0], codec)
        yield from _named(maker, dtypes[0], short=short)
    yield from _moved(maker, dtypes[0], short=short)
    if settings.wants("decode") and not short:
        yield from _grid(maker, dtypes[0])


def _named(maker: _Maker, dtype: str, *, short: bool) -> Iterator[Row]:
    """Yield the cases of decode that have times to reach; `short` ones have none."""
    from kvcore.bench.paged import DecodeCase  # noqa: PLC0415 - needs torch

    k = 1 << (6 if short else 10)
    ragged = _ragged(64, 128, 32 * max(k, 64))

    def aim(microseconds: float) -> Target | None:
        return None if short else Target(seconds=microseconds / 1e6)

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
    room = max(sum(-(-tokens // 16) * 16 for tokens in case.lengths) for case in cases)
    yield from _decoded(maker, 3 * room, dtype, None, cases)
    coded = DecodeCase(name=f"32 x {4 * k:,}", lengths=[4 * k] * 32, target=aim(90))
    yield from _decoded(maker, 3 * sum(coded.lengths), dtype, "fp8-e4m3", [coded])


def _moved(maker: _Maker, dtype: str, *, short: bool) -> Iterator[Row]:
    """Yield store, copy and swap; `short` ones have nothing to reach."""
    wants = maker.settings.wants

    def aim(share: float) -> Target | None:
        return None if short else Target(share=share)

    tokens, count, total = (512, 64, 4 << 20) if short else (8192, 4096, 256 << 20)
    for codec in (None, "fp8-e4m3", "int8") if wants("store") else ():
        made = _lazily(maker, tokens * 16, dtype, codec)
        case = f"{codec or dtype}, {tokens:,} tokens"
        goal = aim(0.81) if codec is None else None
        yield from maker.rows("store", case, made("store", tokens, goal))
    for codec in (None, "fp8-e4m3", "int8") if wants("store+rope") else ():
        yield from _rotated(maker, tokens, 16, dtype, codec)
    if wants("copy"):
        made = _lazily(maker, 2 * count * 16 * 4, dtype)
        yield from maker.rows(
            "copy", f"{dtype}, {count:,} blocks", made("copy", count, aim(0.9))
        )
    if wants("move"):
        made = _lazily(maker, count * 16 * 4, dtype)
        yield from maker.rows("move", f"{dtype}, {count:,} blocks", made("move", count))
    for block_size in (16, 64, 128, 1024) if wants("swap") else ():
        held = max(2, total // (block_size * 4096))
        made = _lazily(maker, 2 * held * block_size, dtype, None, block_size=block_size)
        case = f"{dtype}, {held:,} blocks of {block_size:,}"
        yield from maker.rows("swap", case, made("swap", held, aim(0.93)))


def _grid(maker: _Maker, dtype: str) -> Iterator[Row]:
    """Yield decode at every batch and context, in one pool as large as the memory allows."""
    from kvcore.bench.paged import DecodeCase  # noqa: PLC0415 - needs torch

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
    while tokens > GRID_CONTEXTS[-1]:
        try:
            bed = maker.bed(tokens, dtype)
            break
        except KvcoreError:  # too little memory: the cells that do not fit say so
            tokens //= 2
    else:
        return
    for case in cases:

        def measure(case: DecodeCase = case) -> Sequence[Row]:
            return bed.decode(case)

        yield from maker.rows("decode", f"{dtype}, {case.name}", measure)


def _decoded(
    maker: _Maker,
    tokens: int,
    dtype: str,
    codec: str | None,
    cases: Sequence[DecodeCase],
    **fixed: Any,
) -> Iterator[Row]:
    """Yield the rows of cases that share a pool."""
    beds: list[Bed] = []
    for case in cases:

        def measure(case: DecodeCase = case) -> Sequence[Row]:
            if not beds:
                beds.append(maker.bed(tokens, dtype, codec, **fixed))
            return beds[0].decode(case)

        yield from maker.rows("decode", f"{codec or dtype}, {case.name}", measure)


def _rotated(
    maker: _Maker, tokens: int, sets: int, dtype: str, codec: str | None = None
) -> Iterator[Row]:
    """Yield the rows of a store of keys that are yet to be rotated."""
    made = _lazily(maker, tokens * sets, dtype, codec)
    case = f"{codec or dtype}, {tokens:,} tokens"
    measure = made("store", tokens, rotated=True)
    yield from maker.rows("store+rope", case, measure)


def _lazily(
    maker: _Maker, tokens: int, dtype: str, codec: str | None = None, **fixed: Any
) -> Callable[..., Callable[[], Sequence[Row]]]:
    """Return what makes a measure of an operation of `Bed`, whose pool is allocated in it."""

    def made(operation: str, *arguments: Any, **how: Any) -> Callable[[], Sequence[Row]]:
        def measure() -> Sequence[Row]:
            bed = maker.bed(tokens, dtype, codec, **fixed)
            rows: Sequence[Row] = getattr(bed, operation)(*arguments, **how)
            return rows

        return measure

    return made


def _ragged(count: int, least: int, most: int) -> list[int]:
    """Return fixed lengths that are evenly distributed on a logarithmic scale."""
    from random import Random  # noqa: PLC0415 - for this alone

    random = Random(0)  # noqa: S311 - chance, no secret
    return [round(least * (most / least) ** random.random()) for _ in range(count)]
