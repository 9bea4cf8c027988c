"""Paged K/V for benchmarks: known numbers in a backend's pool, surrounded by poison.

Shapes are those of a layer of Llama 3.1 8B. Blocks of a sequence lie in random order, and slots
that belong to no sequence are NaN, so that a result that reads one is NaN too. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from importlib import import_module
from itertools import islice
from math import inf, nan, sqrt
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcore.engine import Backend, RaggedBatch, Rotary, Rotation, TensorLayout
from kvcore.errors import InputError, KvcoreError
from kvcore.plugins import Plugins
from kvcore_engine.backend._sdpa import Sdpa
from kvcore_engine.backend.torch_backend import TorchBackend
from kvcore_engine.bench.ceilings import COPY, FROM_HOST, READ, TO_HOST
from kvcore_engine.bench.clocks import Call, clock_of
from kvcore_engine.bench.result import Row, Settings, Target
from kvcore_plugins.codec.dtypes import TORCH_DTYPES

HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16

COLD_BYTES, COLD_SETS = 1 << 29, 64
"""Bytes that calls rotate over, so that caches hold nothing of the next, and sets at most."""

PATTERN = 1021
"""Blocks after which a pool's numbers repeat: prime, so that strides do not hide a mistake."""

CHECKED = 3
"""Sequences of a batch whose attention is compared with float64."""

ROTARY = Rotary(tuple(500_000 ** (-i / 64) for i in range(64)))
"""Llama 3's: all of a key is rotated."""

CODE_STEP = 1 / 8
"""Distance of neighbouring codes, as a part of the greatest number: the largest, of fp8."""

HALF_EPS = 1e-4
"""Relative distance of two numbers that only dtypes of 16 bits exceed."""

PEER_BYTES = 4 << 30
"""Bytes of K/V up to which peers are given copies of it."""


Version: TypeAlias = tuple[str, Sequence[Call] | str, dict[str, Any]]
"""Name of an implementation; its calls, or why there are none; fields of its row."""


@attrs.frozen(kw_only=True)
class DecodeCase:
    """One new token for each of some sequences, or some.

    Attributes:
        name: sizes, as the table names them.
        lengths: tokens of each sequence, the new ones included.
        new: new tokens of each sequence: of a prompt whose beginning was hit, say.
        window, sinks: as in `Backend.attend`.
        target: the goal of the row.
    """

    name: str
    lengths: Sequence[int]
    new: int = 1
    window: int | None = None
    sinks: int = 0
    target: Target | None = None

    @classmethod
    def even(cls, count: int, tokens: int, **options: Any) -> DecodeCase:
        """Return the case of `count` sequences of equal length, named by its sizes."""
        case = cls(name="", lengths=[tokens] * count, **options)
        new = "" if case.new == 1 else f"{case.new:,} new of "
        seen = "" if case.window is None else f", window {case.window:,}, sinks {case.sinks}"
        return attrs.evolve(case, name=f"{count} x {new}{tokens:,}{seen}")

    @property
    def operation(self) -> str:
        """The name of what is measured: `decode` or, of several new tokens, `chunk`."""
        return "decode" if self.new == 1 else "chunk"


@attrs.frozen
class TensorSuite:
    """A suite on a backend.

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


@attrs.define(eq=False, slots=False)
class Bed:
    """A backend with a pool of known numbers, allocated when the first case is measured.

    Attributes:
        suite: the suite.
        tokens: tokens that the pool has room for, beside some spare blocks.
        dtype, codec: dtype of the K/V, and name of its codec, if there is one.
        block_size: tokens of a block.
    """

    suite: TensorSuite
    tokens: int
    dtype: str
    codec: str | None = None
    block_size: int = BLOCK
    _good: int = attrs.field(init=False, default=0)

    @cached_property
    def backend(self) -> Backend:
        """The backend, with its pool.

        Raises:
            KvcoreError: the backend or the codec cannot be built, or there is too little
                memory.
        """
        build, codec = self.suite.plugins.build, None
        if self.codec is not None:
            codec = build("codec", self.codec)
        backend: Backend = build("backend", self.suite.spec)
        backend.allocate(
            TensorLayout(
                blocks=-(-self.tokens // self.block_size) + 8,
                block_size=self.block_size,
                layers=1,
                kv_heads=KV_HEADS,
                head_dim=WIDTH,
                value_dim=WIDTH,
                dtype=self.dtype,
                codec=codec,
            )
        )
        return backend

    @cached_property
    def _order(self) -> list[int]:
        """The blocks of the pool in the order in which sequences take them."""
        return _shuffled(self.backend.layout.blocks)

    def rows(
        self,
        operation: str,
        case: str,
        measure: Callable[..., Sequence[Row]],
        *arguments: Any,
        **options: Any,
    ) -> Sequence[Row]:
        """Return the rows that `measure` returns, or a row with the reason why it has none.

        There is no row of an operation that is not to be measured.
        """
        suite, case = self.suite, f"{self.codec or self.dtype}, {case}"
        if not suite.settings.wants(operation):
            return []
        if why := suite.settings.late:
            return [
                Row(suite=suite.name, operation=operation, case=case, by=suite.spec, note=why)
            ]
        try:
            return measure(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - of one case, which must not end the others
            return [failed_row(suite.name, operation, suite.spec, case, error)]

    @property
    def device(self) -> torch.device:
        """The device of the K/V."""
        torch_device: torch.device = self.backend.tensor([0]).device
        return torch_device

    @property
    def token_bytes(self) -> float:
        """Bytes that K and V of a token take in the blocks."""
        return self.backend.layout.bytes_per_block / self.backend.layout.block_size

    @property
    def kind(self) -> str:
        """The dtype, or the codec, of the stored K/V."""
        codec = self.backend.layout.codec
        return self.backend.layout.dtype if codec is None else str(codec)

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return normally distributed numbers in the dtype of the layout, on the device."""
        draw = torch.Generator().manual_seed(seed)
        drawn = torch.randn(*shape, generator=draw).to(TORCH_DTYPES[self.backend.layout.dtype])
        return drawn.to(self.device)

    def fill(self) -> None:
        """Write numbers into all blocks."""
        size, blocks = self.backend.layout.block_size, self.backend.layout.blocks
        pattern = min(PATTERN, blocks)
        try:
            parts = self.backend.layer_blocks(0)
        except InputError:  # a codec's
            drawn = [self.random(pattern * size, KV_HEADS, WIDTH, seed=s) for s in (1, 2)]
            for first in range(0, blocks, pattern):
                table = [*range(first, min(first + pattern, blocks))]
                self._store(table, 0, *(part[: len(table) * size] for part in drawn))
            return
        for seed, part in enumerate(parts, 1):
            drawn_part = self.random(pattern, KV_HEADS, size, WIDTH, seed=seed)
            for first in range(0, blocks, pattern):
                rows = part[first : first + pattern]
                rows.copy_(drawn_part[: len(rows)])

    def sets(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """Return block tables of sequences, in as many sets as leave no cache warm.

        They hold numbers; the blocks that no table has are NaN.
        """
        size = self.backend.layout.block_size
        counts = [-(-tokens // size) for tokens in lengths]
        wanted = -(-COLD_BYTES // max(int(sum(counts) * size * self.token_bytes), 1))
        room = self.backend.layout.blocks // sum(counts)
        if not room:
            msg = f"{sum(counts):,} blocks are needed, and the pool has {len(self._order):,}"
            raise InputError(msg)
        most = 1 if self.suite.settings.check else min(max(wanted, 3), COLD_SETS, room)
        order, begin = iter(self._order), most * sum(counts)
        sets = [[[*islice(order, blocks)] for blocks in counts] for _ in range(most)]
        if begin > self._good:
            self.fill()
        self._good = begin
        self.backend.fill(nan, self._order[begin:])
        return sets

    def poisoned(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return block tables of sequences that are stored in a pool of NaN, token by token."""
        size, order = self.backend.layout.block_size, iter(self._order)
        self._good = 0
        self.backend.fill(nan)
        tables = []
        for index, tokens in enumerate(lengths):
            tables.append([*islice(order, -(-tokens // size))])
            seeds = 2 * index, 2 * index + 1
            rows = (self.random(tokens, KV_HEADS, WIDTH, seed=seed) for seed in seeds)
            self._store(tables[-1], 0, *rows)
        return tables

    def decode(self, cases: Sequence[DecodeCase], *, poisoned: bool = False) -> Iterator[Row]:
        """Yield the rows of attention in some cases."""
        for case in cases:
            measure = partial(self._decode, case, poisoned=poisoned)
            yield from self.rows(case.operation, case.name, measure)

    def _decode(self, case: DecodeCase, *, poisoned: bool) -> list[Row]:
        """Attend from the new tokens of each sequence; return rows of the backend and peers."""
        backend, lengths, new = self.backend, [*case.lengths], case.new
        sets = [self.poisoned(lengths)] if poisoned else self.sets(lengths)
        options: dict[str, Any] = {"window": case.window, "sinks": case.sinks}
        calls: list[Call] = []
        queries = self.random(new * len(lengths), HEADS, WIDTH, seed=9)
        for tables in sets:
            contexts = [tokens - new for tokens in lengths]
            batch = RaggedBatch(tables, contexts, [new] * len(lengths))
            plan = backend.plan(batch)
            calls.append(partial(backend.attend, 0, plan, queries, **options))
        read = [_seen(tokens, case) for tokens in lengths]
        row = {
            "operation": case.operation,
            "case": f"{self.kind}, {case.name}",
            "amount": sum(read) * self.token_bytes,
            # The time of a chunk is that of its products, not of the memory.
            "of": READ if new == 1 else None,
        }
        # The last new token attends to all others.
        last = slice(new - 1, None, new)
        error, library = self._attention_error(calls[0]()[last], sets[0], queries[last], case)
        # The last place of a result in 16 bits; in more, sums over thousands of tokens.
        eps = torch.finfo(TORCH_DTYPES[backend.layout.dtype]).eps
        allowed = 2 * library + (eps / 2 if eps > HALF_EPS else 32 * eps)
        right = {"error": error, "allowed": allowed}
        versions: list[Version] = [(self.suite.spec, calls, right)]
        if not poisoned and not self.suite.settings.check:
            peers = self._peers if new == 1 else self._chunk_peers
            versions += peers(case, sets, queries)
        return self._rows(row, versions, case.target)

    def store(
        self, tokens: int, target: Target | None = None, *, rotated: bool = False
    ) -> Sequence[Row]:
        """Return the rows of a store of `tokens` tokens, with keys rotated or as they are."""
        measure = partial(self._stored, tokens, target, rotated=rotated)
        return self.rows("store+rope" if rotated else "store", f"{tokens:,} tokens", measure)

    def _stored(self, tokens: int, target: Target | None, *, rotated: bool) -> list[Row]:
        """Write new tokens into blocks; compare them with their codes, decoded.

        With `rotated` the backend rotates keys first: the tables are read too, once.
        """
        backend, size = self.backend, self.backend.layout.block_size
        calls: list[Call] = []
        sets = [tables[0] for tables in self.sets([tokens])]
        self._good = 0
        backend.fill(nan)
        keys, values = (self.random(tokens, KV_HEADS, WIDTH, seed=seed) for seed in (3, 4))
        turn, expected = None, keys
        if rotated:
            angles = ROTARY.angles(torch.arange(tokens, device=self.device))
            wide = torch.promote_types(keys.dtype, torch.float32)
            turn = Rotation(*(table.to(wide) for table in angles))
            expected = Rotation(*angles).rotate(keys.double()).to(keys.dtype)
        theirs: list[Call] = []
        for table in sets:
            plan = backend.plan(RaggedBatch([table], [0], [tokens]))
            calls.append(partial(backend.store_rotated, 0, plan, keys, values, turn))
            if turn is not None:
                theirs.append(partial(_rotate_and_store, backend, plan, keys, values, turn))
        calls[0]()
        error = self._stored_error((expected, values), sets[0], tokens)
        itemsize = TORCH_DTYPES[backend.layout.dtype].itemsize
        read = tokens * 2 * KV_HEADS * WIDTH * itemsize
        codec = backend.layout.codec
        eps = torch.finfo(TORCH_DTYPES[backend.layout.dtype]).eps
        allowed = 0.0 if codec is None else 2 * eps
        if turn is not None:
            read += turn.cos.nbytes + turn.sin.nbytes
            # Rounding may tip a number to the one beside it, a code to the next code.
            allowed = 2 * eps if codec is None else CODE_STEP
        right = {"error": error, "allowed": allowed}
        versions: list[Version] = [(self.suite.spec, calls, right)]
        if turn is not None and self.device.type == "cuda" and not self.suite.settings.check:
            versions.append(("torch rotates, then stored", theirs, {}))
        elif turn is None and codec is None and not self.suite.settings.check:
            versions.append(
                ("torch index_copy_", self._index_copies(sets, (keys, values), size), {})
            )
        row = {
            "operation": "store+rope" if rotated else "store",
            "case": f"{self.kind}, {tokens:,} tokens",
            "amount": read + tokens * self.token_bytes,
            "of": COPY,
        }
        return self._rows(row, versions, target)

    def copy(self, count: int, target: Target | None = None) -> list[Row]:
        """Copy whole blocks to others."""
        backend = self.backend
        tables = self.sets([2 * count * backend.layout.block_size])
        self._good = 0
        pairs = [list(zip(t[:count], t[count:], strict=True)) for (t,) in tables]
        calls = [partial(backend.copy_blocks, pairs_of_call) for pairs_of_call in pairs]
        sources, targets = (list(side) for side in zip(*pairs[0], strict=True))
        before = self._content(sources)
        calls[0]()
        right = {"error": _difference(self._content(targets), before)}
        row = {
            "operation": "copy",
            "case": f"{self.kind}, {count:,} blocks",
            "amount": 2 * count * backend.layout.bytes_per_block,
            "of": COPY,
        }
        versions: list[Version] = [(self.suite.spec, calls, right)]
        if backend.layout.codec is None and not self.suite.settings.check:
            parts = backend.layer_blocks(0)
            sides = [map(self._ids, zip(*some, strict=True)) for some in pairs]
            theirs = [partial(_copy, parts, *both) for both in sides]
            versions.append(("torch index_copy_", theirs, {}))
        return self._rows(row, versions, target, graph=False)

    def move(self, count: int) -> list[Row]:
        """Move blocks to one another's places, in cycles, as compacting a full pool does."""
        backend = self.backend
        tables = [table for (table,) in self.sets([count * backend.layout.block_size])]
        self._good = 0
        order = _shuffled(count)
        pairs = [[(t[a], t[b]) for a, b in enumerate(order)] for t in tables]
        before = self._content([source for source, _ in pairs[0]])
        calls = [partial(backend.move_blocks, pairs_of_call) for pairs_of_call in pairs]
        calls[0]()
        right = {"error": _difference(self._content([to for _, to in pairs[0]]), before)}
        row = {
            "operation": "move",
            "case": f"{self.kind}, {count:,} blocks",
            "amount": 2 * count * backend.layout.bytes_per_block,
            "of": COPY,
        }
        return self._rows(row, [(self.suite.spec, calls, right)], None, graph=False)

    def swap(self, count: int, target: Target | None = None) -> list[Row]:
        """Bring blocks to the host and back, as preemption does, and as tiers do."""
        backend, device = self.backend, self.device.type == "cuda"
        tables = [table for (table,) in self.sets([2 * count * backend.layout.block_size])]
        self._good = 0
        outs, intos = [t[:count] for t in tables], [t[count:] for t in tables]
        before = self._content(outs[0])
        hosts = [*map(backend.swap_out, outs)]
        backend.swap_in(hosts[0], intos[0])
        swapped = {"error": _difference(self._content(intos[0]), before)}
        buffers = [backend.host_buffer(count) for _ in outs]
        backend.fill(nan, intos[0])
        backend.read_blocks(outs[0], buffers[0])
        backend.write_blocks(intos[0], buffers[0])
        moved = {"error": _difference(self._content(intos[0]), before)}
        run = backend.layout.bytes_per_block // 2
        rows: list[Row] = []
        for operation, method, arguments, right, of in (
            ("swap out", backend.swap_out, (outs,), swapped, TO_HOST),
            ("swap in", backend.swap_in, (hosts, intos), {}, FROM_HOST),
            ("read blocks", backend.read_blocks, (outs, buffers), moved, TO_HOST),
            ("write blocks", backend.write_blocks, (intos, buffers), {}, FROM_HOST),
        ):
            if self.suite.settings.check and not right:
                continue
            row = {
                "operation": "swap",
                "case": f"{operation}, {self.kind}, {count:,} runs of {run >> 10} KiB",
                "amount": count * backend.layout.bytes_per_block * (1 if device else 2),
                "of": of if device else COPY,
            }
            calls = [partial(method, *each) for each in zip(*arguments, strict=True)]
            rows += self._rows(row, [(self.suite.spec, calls, right)], target, graph=False)
        return rows

    def _rows(
        self,
        row: dict[str, Any],
        versions: Sequence[Version],
        target: Target | None,
        *,
        graph: bool = True,
    ) -> list[Row]:
        """Time versions side by side; a text in place of calls is the reason for none."""
        common: dict[str, Any] = {"suite": self.suite.name, "unit": "bytes", **row}
        calls_of = [calls for _, calls, _ in versions if not isinstance(calls, str)]
        timings = None
        if not self.suite.settings.check:
            timings = iter(clock_of(self.device)(calls_of, self.suite.seconds, graph=graph))
        rows = []
        for index, (by, calls, right) in enumerate(versions):
            fields = {**common, **right, "by": by, "target": None if index else target}
            if isinstance(calls, str):
                fields |= {"note": calls}
            elif timings is not None:
                timing = next(timings)
                fields |= {"seconds": timing.seconds, "spread": timing.spread}
                fields |= {"note": timing.how}
            rows.append(Row(**fields))
        return rows

    def _peers(
        self, case: DecodeCase, sets: Sequence[Sequence[Sequence[int]]], queries: Tensor
    ) -> list[Version]:
        """Return other implementations that can run this case: torch's function, FlashInfer."""
        plain, gathered = "torch SDPA, contiguous", "torch SDPA, gathered"
        layout, total = self.backend.layout, sum(case.lengths)
        if layout.codec is not None or case.window is not None:
            return []
        peers: list[Version] = []
        if len({*case.lengths}) > 1:
            peers = [(plain, "not for unequal lengths", {})]
        elif total * self.token_bytes * len(sets) > PEER_BYTES:
            why = f"not measured: copies of more than {PEER_BYTES >> 30} GiB"
            peers = [(plain, why, {}), (gathered, why, {})]
        else:
            parts, tokens = self.backend.layer_blocks(0), case.lengths[0]
            group = queries.view(len(queries), KV_HEADS, HEADS // KV_HEADS, WIDTH)
            contiguous: list[Call] = []
            gathering: list[Call] = []
            for index in map(self._ids, sets):
                keys, values = (_gathered(part, index, tokens) for part in parts)
                contiguous.append(partial(scaled_dot_product_attention, group, keys, values))
                gathering.append(partial(_gather_and_attend, group, *parts, index, tokens))
            peers = [(plain, contiguous, {}), (gathered, gathering, {})]
        if self.device.type == "cuda":
            peers.append(("FlashInfer", self._flashinfer(case, sets, queries), {}))
        return peers

    def _chunk_peers(
        self, case: DecodeCase, sets: Sequence[Sequence[Sequence[int]]], queries: Tensor
    ) -> list[Version]:
        """Return other ways to compute several new tokens: by torch, FlashInfer."""
        peers: list[Version] = []
        if isinstance(self.backend, TorchBackend) and self.backend.attention != "sdpa":
            # The same K/V; that torch computes is the intention.
            plain = Sdpa(self.backend._pool, None, lambda _reason: None)  # noqa: SLF001
            by_torch: list[Call] = []
            for tables in sets:
                contexts = [tokens - case.new for tokens in case.lengths]
                plan = plain.plan(RaggedBatch(tables, contexts, [case.new] * len(contexts)))
                attend = partial(plain.attend, window=case.window, sinks=case.sinks)
                by_torch.append(partial(attend, 0, plan, queries))
            peers.append(("torch SDPA, gathered", by_torch, {}))
        if self.device.type == "cuda" and case.window is None:
            peers.append(("FlashInfer", self._flashinfer(case, sets, queries), {}))
        return peers

    def _flashinfer(
        self, case: DecodeCase, sets: Sequence[Sequence[Sequence[int]]], queries: Tensor
    ) -> list[Call] | str:
        """Return calls of FlashInfer over the same blocks, or why there are none."""
        try:
            flashinfer = import_module("flashinfer")
        except ImportError:
            return "not available: flashinfer is not installed"
        layout = self.backend.layout
        calls: list[Call] = []
        size = layout.block_size
        dtype = TORCH_DTYPES[layout.dtype]
        types = {"q_data_type": dtype, "kv_data_type": dtype}
        try:
            # FlashInfer needs zeros.
            workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=self.device)
            for tables in sets:
                counts = torch.tensor([0, *map(len, tables)]).cumsum(0).int().to(self.device)
                last = torch.tensor([(tokens - 1) % size + 1 for tokens in case.lengths])
                paged = (
                    counts,
                    self._ids([block for table in tables for block in table]).int(),
                    last.int().to(self.device),
                    *(HEADS, KV_HEADS, WIDTH, size),
                )
                if case.new == 1:
                    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                        workspace, "HND", use_tensor_cores=True
                    )
                    wrapper.plan(*paged, **types)
                else:
                    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
                    rows = torch.arange(len(tables) + 1, dtype=torch.int32) * case.new
                    wrapper.plan(rows.to(self.device), *paged, causal=True, **types)
                calls.append(partial(wrapper.run, queries, self.backend.layer_blocks(0)))
            calls[0]()
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its own
            return f"failed: {type(error).__name__}: {str(error)[:100]}"
        return calls

    def _attention_error(
        self,
        out: Tensor,
        tables: Sequence[Sequence[int]],
        queries: Tensor,
        case: DecodeCase,
    ) -> tuple[float, float]:
        """Return how far attention, and torch's in the same dtype, is from float64."""
        lengths = [*case.lengths]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        every = self.suite.settings.check or len(lengths) <= CHECKED
        chosen = range(len(lengths)) if every else {0, longest, len(lengths) - 1}
        worst = library = 0.0
        for sequence in chosen:
            keys, values = self.backend.read(0, tables[sequence], lengths[sequence])
            kept = _kept(lengths[sequence], case)
            query = queries[sequence].view(KV_HEADS, -1, WIDTH)
            # [tokens, kv_heads, width] to [kv_heads, tokens, width]
            keys, values = (part[kept].transpose(0, 1) for part in (keys, values))
            scores = query.double() @ keys.double().transpose(1, 2) / sqrt(WIDTH)
            exact = scores.softmax(2) @ values.double()
            theirs = scaled_dot_product_attention(query[None], keys[None], values[None])[0]
            scale = float(exact.abs().max())
            worst = _greater(
                worst, _difference(out[sequence].view_as(exact).double(), exact) / scale
            )
            library = _greater(library, _difference(theirs.double(), exact) / scale)
        return worst, library

    def _stored_error(self, rows: Sequence[Tensor], table: list[int], tokens: int) -> float:
        """Return the greatest difference of stored K/V from given K/V, coded and decoded."""
        codec = self.backend.layout.codec
        worst = 0.0
        stored = self.backend.read(0, table, tokens)
        for part, given, read in zip(("keys", "values"), rows, stored, strict=True):
            expected = given
            if codec is not None:
                heads = given.transpose(0, 1).cpu()
                by_block = not codec.by_token(part)  # type: ignore[arg-type]
                if by_block:
                    size = self.backend.layout.block_size
                    heads = heads.reshape(-1, size, WIDTH)
                coded = codec.encode(part, heads)  # type: ignore[arg-type]
                decoded = codec.decode(part, coded)  # type: ignore[arg-type]
                decoded = decoded.to(given.dtype).reshape(KV_HEADS, tokens, WIDTH)
                expected = decoded.transpose(0, 1).to(given.device)
            scale = float(given.abs().max())
            worst = _greater(worst, _difference(read.double(), expected.double()) / scale)
        # Nothing else was written: as many other blocks are still NaN.
        in_table = {*table}
        others = [block for block in self._order if block not in in_table][: len(table)]
        if others and self.backend.layout.codec is None:
            size = self.backend.layout.block_size
            clean = self.backend.read_heads(0, "keys", others, len(others) * size)
            worst = worst if bool(clean.isnan().all()) else inf
        return worst

    def _index_copies(
        self, sets: Sequence[list[int]], rows: Sequence[Tensor], size: int
    ) -> list[Call]:
        """Return calls that scatter rows with torch's own function."""
        parts = [part.flatten(0, 2) for part in self.backend.layer_blocks(0)]
        new = [part.flatten(0, 1) for part in rows]
        calls: list[Call] = []
        for table in sets:
            blocks = torch.tensor(table)[:, None, None] * KV_HEADS
            slots = (blocks + torch.arange(KV_HEADS)) * size + torch.arange(size)[:, None]
            index = slots.flatten().to(self.device)
            calls.append(partial(_scatter, parts, index, new))
        return calls

    def _store(self, table: list[int], context: int, keys: Tensor, values: Tensor) -> None:
        plan = self.backend.plan(RaggedBatch([table], [context], [len(keys)]))
        self.backend.store(0, plan, keys, values)

    def _content(self, blocks: Sequence[int]) -> Tensor:
        """Return K and V of blocks."""
        tokens = len(blocks) * self.backend.layout.block_size
        return torch.cat(
            [self.backend.read_heads(0, part, blocks, tokens) for part in ("keys", "values")]
        ).clone()

    def _ids(self, blocks: Any) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self.device)


def failed_row(suite: str, operation: str, by: str, case: str, error: Exception) -> Row:
    """Return the row of something that was not measured, with the reason.

    After an error of kvcore, or without enough memory, it is missing; after any other, wrong.
    """
    line = next(iter(str(error).splitlines()), "")
    missing = isinstance(error, KvcoreError | torch.OutOfMemoryError)
    note = f"not available: {line}" if missing else f"failed: {type(error).__name__}: {line}"
    wrong = None if missing else inf
    return Row(suite=suite, operation=operation, case=case, by=by, note=note, error=wrong)


def _shuffled(blocks: int) -> list[int]:
    order: list[int] = torch.randperm(
        blocks, generator=torch.Generator().manual_seed(0)
    ).tolist()
    return order


def _seen(tokens: int, case: DecodeCase) -> int:
    """Return the number of tokens that the new ones of `tokens` tokens attend to."""
    if case.window is None:
        return tokens
    return min(tokens, case.window + case.new - 1 + case.sinks)


def _kept(tokens: int, case: DecodeCase) -> Tensor:
    """Return the places of the tokens that the last of `tokens` tokens attends to."""
    positions = torch.arange(tokens)
    if case.window is None:
        return positions
    return positions[(positions >= tokens - case.window) | (positions < case.sinks)]


def _difference(computed: Tensor, expected: Tensor) -> float:
    """Return the greatest difference; NaN if there is one in either."""
    return float((computed - expected).abs().max()) if computed.numel() else 0.0


def _greater(first: float, other: float) -> float:
    """Return the greater number; NaN if `other` is NaN."""
    return other if other != other or other > first else first  # noqa: PLR0124 - NaN


def _gathered(part: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Return the blocks of sequences, `[sequences, kv_heads, tokens, width]`."""
    heads = torch.arange(KV_HEADS, device=index.device)[:, None]
    rows = (index[:, None] * KV_HEADS + heads).flatten()
    gathered = part.flatten(0, 1).index_select(0, rows)
    return gathered.view(len(index), KV_HEADS, -1, part.shape[3])[:, :, :tokens]


def _rotate_and_store(
    backend: Backend, plan: Any, keys: Tensor, values: Tensor, rotation: Rotation
) -> None:
    """Rotate keys by torch, and store."""
    backend.store(0, plan, rotation.rotate(keys), values)


def _gather_and_attend(
    queries: Tensor, keys: Tensor, values: Tensor, index: Tensor, tokens: int
) -> Tensor:
    """Gather K/V by torch, and attend."""
    keys, values = (_gathered(part, index, tokens) for part in (keys, values))
    return scaled_dot_product_attention(queries, keys, values)


def _scatter(parts: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Store by torch."""
    for part, new in zip(parts, rows, strict=True):
        part.index_copy_(0, index, new)


def _copy(parts: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copy blocks by torch."""
    for part in parts:
        part.index_copy_(0, targets, part.index_select(0, sources))
