"""Attention of new tokens by Triton: limits, plan and launch of the kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd, log, sqrt
from typing import Any, NamedTuple

import attrs
import torch
import triton
from torch import Tensor
from triton import language as tl

from kvcore_engine.backend._coded_pool import CodedHalf, CodedPool
from kvcore_engine.backend._pool import Half, LayerTensor, Pool
from kvcore_engine.backend._step_plan import AttentionKernel, LayerKind, NewToken
from kvcore_engine.backend.kernels import attention, plan
from kvcore_plugins.codec import E4M3, E5M2, INT4, INT8

TILE = 64
"""Tokens that a program reads at a time."""

STAGES = 2, 3
"""Stages that the pipeline may have: tiles that are copied while one is computed, and that."""

TILE_BYTES = 1 << 16
"""Bytes of K and V of a tile, as they are multiplied; wider heads have fewer tokens a tile.

In fp32, which tensor cores do not multiply exactly, registers hold a quarter of that.
"""

PROGRAMS = 528
"""Programs that run at once without a GPU: four on each multiprocessor of an H100."""

WARP_REGISTERS, RESERVED = 256, 1024
"""Registers of a warp come in units; of shared memory each program takes some bytes more.

Source: NVIDIA, "CUDA C++ Programming Guide", technical specifications of compute capabilities
8.0 to 10.0.
"""

FINER = 4
"""How much shorter chunks are where contexts differ, so that the last ones end together."""

EVEN = 8
"""Contexts are even if the longest is longer than the mean by an eighth at most."""

LEAST_CHUNK = 128
"""Tokens of a chunk at least, unless the context is shorter."""

PARTS = 16
"""Chunks that are combined at a time."""

ENTRIES, OTHERS = 16, 256
"""Entries of a work list that a program writes, and others that it compares them with."""

CHUNK_ROWS = 64
"""Rows of queries, of several tokens and the query heads of a K/V head, that a program takes.

In fp32 a quarter of them, and of wide heads and of fp8 by head a half: registers hold no more.
"""

NO_WINDOW = 1 << 30
"""Tokens of a window that leaves nothing out."""

MOST_GROUP, MOST_WIDTH = 64, 256
"""Query heads that share a K/V head, and numbers of a head, that kernels are made for."""

CAPABILITY = (8, 0)
"""Compute capability from which on there are kernels."""

WAITS = re.compile(r"cp\.async\.wait_group\s+(\w+)")
"""Where compiled code waits until at most so many groups of copies are under way."""

DOTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

INTERPRETED = not isinstance(attention.attend_chunks, triton.JITFunction)
"""Whether kernels run in Triton's interpreter, on the CPU."""


def uncovered(pool: Pool) -> str | None:
    """Return why the kernels cannot attend to a pool; None if they can."""
    layout = pool.layout
    reasons = {
        "on a CPU Triton has its interpreter alone, for tests: set TRITON_INTERPRET=1": (
            pool.device.type == "cpu" and not INTERPRETED
        ),
        "Triton's kernels need a GPU of compute capability 8.0": (
            pool.device.type == "cuda"
            and torch.cuda.get_device_capability(pool.device) < CAPABILITY
        ),
        f"Triton's kernels compute in fp32, fp16 and bf16, not in {layout.dtype}": (
            pool.dtype not in DOTS
        ),
        "Triton's kernels need blocks of a power of two of tokens, not of "
        f"{layout.block_size}": bool(layout.block_size & (layout.block_size - 1)),
        f"Triton's kernels take heads of up to {MOST_WIDTH} numbers": (
            max(layout.head_dim, layout.value_dim) > MOST_WIDTH
        ),
        "Triton's kernels decode fp8, and int8 and int4 by token, but not "
        f"{layout.codec and layout.codec.name} as it is set": not _decodes(pool),
        "Triton's kernels read codes as words of 16 bits, which heads of "
        f"{layout.head_dim} and {layout.value_dim} numbers do not fill": not _fills_words(pool),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _decodes(pool: Pool) -> bool:
    """Return True if kernels can read the numbers of a pool."""
    codec = pool.layout.codec
    if codec is None or not isinstance(pool, CodedPool):
        return True
    return type(codec) in {E4M3, E5M2, INT8, INT4} and pool.by_token


def _fills_words(pool: Pool) -> bool:
    """Return True unless a row of codes ends inside a word of 16 bits."""
    halves = pool.keys[0], pool.values[0]
    return not any(
        isinstance(half, CodedHalf) and half.planes[0].shape[1] // pool.layout.block_size % 2
        for half in halves
    )


@attrs.frozen
class Card:
    """The multiprocessors of a GPU, and the registers and shared memory of one of them."""

    multiprocessors: int
    registers: int
    shared: int

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """Return the card of a CUDA device."""
        properties: Any = torch.cuda.get_device_properties(device)
        return cls(
            properties.multi_processor_count,
            properties.regs_per_multiprocessor,
            properties.shared_memory_per_multiprocessor,
        )

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """Return how many programs a multiprocessor runs at once; at least 1."""
        units = -(-32 * registers // WARP_REGISTERS)
        by_registers = self.registers // (units * WARP_REGISTERS * warps)
        return max(1, min(by_registers, self.shared // (shared + RESERVED)))


class Pipeline(NamedTuple):
    """The stages of a kernel, and the programs that a multiprocessor then runs at once."""

    stages: int
    programs: int


def deepest(kernels: Mapping[int, Any], warps: int, card: Card) -> Pipeline:
    """Return the pipeline that copies most tiles at once; of equals that with fewest stages.

    A kernel that spills registers is worth less than any that does not.

    Args:
        kernels: compiled kernels by their stages. Stages are worth nothing where a kernel
            waits for all of its copies before it computes, as some versions of Triton have it.
        warps: warps of a program.
        card: the GPU.
    """
    tiles = {}
    for stages, kernel in kernels.items():
        programs = card.programs(kernel.n_regs, kernel.metadata.shared, warps)
        waits = {int(count, 0) for count in WAITS.findall(kernel.asm["ptx"])}
        copied = stages - 1 if max(waits, default=0) else 1
        tiles[Pipeline(stages, programs)] = -kernel.n_spills, programs * copied, -stages
    return max(tiles, key=lambda pipeline: tiles[pipeline])


@attrs.frozen
class Coding:
    """How kernels read the numbers of a pool.

    Codes are read as words of 16 bits: matrix units load those transposed, and no bytes.

    Attributes:
        way: the coding, a constant of `kernels.attention` such as `PLAIN`.
        bits: bits of the exponent of fp8; 0 for other codings.
        keys, values: factors of scores and of outputs.
        packed: numbers in a word.
    """

    way: int = attention.PLAIN
    bits: int = 0
    keys: float = 1.0
    values: float = 1.0
    packed: int = 1

    @classmethod
    def from_pool(cls, pool: Pool) -> Coding:
        """Return the coding of a pool."""
        codec = pool.layout.codec
        if not isinstance(pool.keys[0], CodedHalf):
            return cls()
        if isinstance(codec, INT8):
            return cls(attention.INT8_BY_TOKEN, packed=2)
        if isinstance(codec, INT4):
            return cls(attention.INT4_BY_TOKEN, packed=4)
        assert isinstance(codec, (E4M3, E5M2))
        bits, factor = (4, 256.0) if isinstance(codec, E4M3) else (5, 1.0)  # a 256th of E4M3
        if codec.scale == "head":
            return cls(attention.FP8_BY_HEAD, bits, factor, factor, packed=2)
        factor *= codec.factor
        return cls(attention.FP8, bits, factor, factor, packed=2)

    def read(self, half: Half) -> tuple[Tensor, Tensor | None]:
        """Return the words of K or V of a layer, and the scales or grids of its tokens."""
        if isinstance(half, LayerTensor):
            return half.by_token, None
        assert isinstance(half, CodedHalf)
        codes, *rest = half.planes
        words = codes.view(torch.int16)
        if not rest:
            return words, None
        return words, rest[0].view(
            torch.float16 if self.way == attention.FP8_BY_HEAD else torch.int32
        )


class Launch(NamedTuple):
    """How the kernel is launched for new tokens of a kind of layers.

    Attributes:
        tokens: the most new tokens of an entry of the work list.
        stages: stages of the pipeline.
        programs: programs that run at once.
        windowed: whether a chunk may begin inside a block.
    """

    tokens: int
    stages: int
    programs: int
    windowed: bool


@attrs.frozen(eq=False, kw_only=True)
class AttentionPlan:
    """The work list of programs for new tokens of a step, in layers of a kind.

    Attributes:
        work: entries of the work list, on the device, `[entries, 8]` of int32: row of the first
            new token, first block in `tables`, first token of the chunk, the one after its
            last, slot of the partial output; -1: there is one chunk, whose output is that of
            the sequence; slots from one new token to the next, number of new tokens, and
            tokens before them. Longest chunks come first. An empty chunk does nothing.
        splits: row, first slot, and slot after the last of new tokens with several chunks,
            `[tokens, 3]`. One without slots is skipped.
        tables: block ids of all sequences, one sequence after the other.
        slots: number of partial outputs.
        kind: the kind of the layers.
        launch: how the kernel is launched.
        new: the new tokens; none of a plan that is made on the device, where no weights are
            summed up.
        firsts: where the blocks of each of them begin in `tables`.
    """

    work: Tensor
    splits: Tensor
    tables: Tensor
    slots: int
    kind: LayerKind
    launch: Launch
    new: list[NewToken] = attrs.field(factory=list)
    firsts: list[int] = attrs.field(factory=list)


def chunk_of(lengths: list[int], heads: int, programs: int) -> int:
    """Return the most tokens of a chunk, for sequences that attend to `lengths` tokens.

    If lengths are even, chunks make one wave of up to `programs` programs, and no second wave
    with few. If they differ, chunks are so short that the last one to end does not matter.
    """
    count, total, longest = len(lengths), sum(lengths), max(lengths)
    if EVEN * longest * count <= (EVEN + 1) * total:
        chunk = -(-longest // max(1, programs // (count * heads)))
    else:
        chunk = -(-total * heads // (FINER * programs))
    return max(chunk, LEAST_CHUNK)


def most_chunks(count: int, heads: int, programs: int, kind: LayerKind) -> int:
    """Return how many chunks `count` single tokens of any contexts have at most.

    A range of tokens has one chunk more than its share where it ends inside of one, and one
    where it begins inside a block. A single context is even.
    """
    ranges = 2 if kind.window is not None and kind.sinks else 1
    return 2 * ranges * count + (1 if count == 1 else FINER) * programs // heads


def _pieces(new: list[NewToken], tokens: int) -> tuple[list[int], list[NewToken]]:
    """Cut new tokens into pieces of up to `tokens`; return the place in `new` of each, too."""
    owners, pieces = [], []
    for index, (sequence, row, context, length) in enumerate(new):
        for done in range(0, length, tokens):
            count = min(tokens, length - done)
            owners.append(index)
            pieces.append(NewToken(sequence, row + done, context + done, count))
    return owners, pieces


def _attended_ranges(pieces: list[NewToken], kind: LayerKind) -> list[tuple[int, int, int]]:
    """Return the ranges of tokens that new tokens attend to: place in `pieces`, begin, end."""
    ranges = []
    for index, piece in enumerate(pieces):
        end = piece.context + piece.length
        begin = 0 if kind.window is None else max(0, piece.context + 1 - kind.window)
        if begin <= kind.sinks:
            begin = 0
        elif kind.sinks:
            ranges.append((index, 0, kind.sinks))
        ranges.append((index, begin, end))
    return ranges


def _cut(
    ranges: list[tuple[int, int, int]], longest: int, tile: int, part: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chunks of ranges, of up to `longest` tokens: owners, begins and ends.

    Chunks of a range have equally many tiles, up to the end of a tile where `longest` is none.
    Their tiles are counted from a multiple of `part`, at or before the range.
    """
    owners, begins, ends = torch.tensor(ranges).unbind(1)
    firsts = begins // part * part
    counts = -(-(ends - firsts) // longest)
    steps = (ends - firsts + counts * tile - 1) // (counts * tile) * tile
    counts = -(-(ends - firsts) // steps)
    which = torch.repeat_interleave(counts)
    index = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
    lows = torch.maximum(firsts[which] + index * steps[which], begins[which])
    highs = torch.minimum(firsts[which] + (index + 1) * steps[which], ends[which])
    return owners[which], lows, highs


def _current(tensor: Tensor) -> Any:
    """Make the device of a tensor the current one, on which kernels are launched."""
    device: Any = torch.cuda.device_of  # which has no types
    return device(tensor)


class TritonAttention(AttentionKernel):
    """Launches the kernels of `kernels.attention`.

    Where programs keep the memory busy, time is that of reading the attended K/V once. Takes
    memory beside the pool: an output in fp32 for each chunk and query head.

    Attributes:
        programs: programs that run at once, one for each chunk and K/V head; None: as many
            as the GPU has room for.
    """

    plans_on_device = True

    def __init__(self, pool: Pool) -> None:
        """Choose tiles and strides for a pool for which `uncovered` is None."""
        self._pool, layout = pool, pool.layout
        self._coding = coding = Coding.from_pool(pool)
        dot = DOTS[pool.dtype]
        if coding.way and dot != tl.float32:
            dot = tl.float16  # which holds codes exactly
        if INTERPRETED and dot == tl.bfloat16:
            dot = tl.float32  # the interpreter's product of bf16 is wrong
        widths = layout.head_dim // coding.packed, layout.value_dim // coding.packed
        padded = [max(16, triton.next_power_of_2(width)) for width in widths]
        tile = TILE
        size = 16 if pool.dtype == torch.float32 else 2
        while tile > 16 and tile * sum(padded) * coding.packed * size > TILE_BYTES:  # noqa: PLR2004
            tile //= 2
        self._tile = tile
        self._rows = CHUNK_ROWS // (4 if pool.dtype == torch.float32 else 1)
        self._rows //= 1 + (max(padded) * coding.packed > 128)  # noqa: PLR2004
        self._rows //= 1 + (coding.way == attention.FP8_BY_HEAD)
        halves = pool.keys[0], pool.values[0]
        self._strides = [
            half.row_stride * layout.block_size * width
            for half, width in zip(halves, widths, strict=True)
        ]
        units = [
            gcd(16, width, stride) for width, stride in zip(widths, self._strides, strict=True)
        ]
        # Arguments of all kernels, and further ones of those that read values.
        self._keys = {
            "full": layout.head_dim,
            "packed": coding.packed,
            "width": widths[0],
            "padded": padded[0],
            "key_unit": units[0],
            "block_size": layout.block_size,
            "tile": tile,
            "way": coding.way,
            "bits": coding.bits,
            "dot": dot,
        }
        self._values = {
            "value_full": layout.value_dim,
            "value_width": widths[1],
            "value_padded": padded[1],
            "value_unit": units[1],
        }
        self.programs = None if pool.device.type == "cuda" else PROGRAMS
        self._pipelines: dict[tuple[int, int, bool], Pipeline] = {}

    def refusal(self, kind: LayerKind) -> str | None:
        """Return why the kernels cannot attend in layers of a kind; None if they can."""
        if kind.group > MOST_GROUP:
            return (
                f"Triton's kernels take up to {MOST_GROUP} query heads of a K/V head, not "
                f"{kind.group}"
            )
        return None

    def takes_chunks(self, kind: LayerKind) -> bool:
        """Return True unless weights are summed up, or there are too many query heads."""
        return not kind.weighed and self.refusal(kind) is None

    def plan(
        self, tokens: list[NewToken], tables: list[Tensor], kind: LayerKind
    ) -> AttentionPlan:
        """Divide the contexts of new tokens into chunks. O(blocks), one copy to the device."""
        most = triton.next_power_of_2(max(token.length for token in tokens))
        launch = self._launch_of(kind, most)
        owners, pieces = _pieces(tokens, launch.tokens)
        ranges = _attended_ranges(pieces, kind)
        lengths = [0] * len(pieces)
        for index, begin, end in ranges:
            lengths[index] += end - begin
        longest = chunk_of(lengths, self._pool.layout.kv_heads, launch.programs)
        piece, lows, highs = _cut(ranges, longest, self._tile, self._part)
        rows, contexts, counts = (
            torch.tensor([getattr(piece, name) for piece in pieces])
            for name in ("row", "context", "length")
        )
        # A piece in several chunks has a slot for each of them and each of its new tokens.
        chunks = torch.bincount(piece, minlength=len(pieces))
        divided = chunks > 1
        slot_counts = torch.where(divided, chunks * counts, 0)
        firsts = slot_counts.cumsum(0) - slot_counts
        chunk = torch.arange(len(piece)) - (chunks.cumsum(0) - chunks)[piece]
        own = [tables[token.number] for token in tokens]
        sizes = torch.tensor([*map(len, own)])
        table_starts = sizes.cumsum(0) - sizes
        columns = [
            *(rows[piece], table_starts[torch.tensor(owners)][piece], lows, highs),
            *(torch.where(divided[piece], firsts[piece] + chunk, -1), chunks[piece]),
            *(counts[piece], contexts[piece]),
        ]
        work = torch.stack(columns, 1)[(lows - highs).argsort(stable=True)]
        # The rows of divided pieces, and how many rows of the piece are before each of them.
        divided_rows = torch.repeat_interleave(torch.where(divided, counts, 0))
        before = torch.arange(len(divided_rows))
        before -= torch.searchsorted(divided_rows, divided_rows)
        begins = firsts[divided_rows] + before * chunks[divided_rows]
        splits = torch.stack(
            (rows[divided_rows] + before, begins, begins + chunks[divided_rows]), 1
        )
        numbers = [work.flatten(), splits.flatten(), *own]
        sent = self._pool.upload(torch.cat(numbers).to(torch.int32))
        bounds = work.numel(), work.numel() + splits.numel()
        return AttentionPlan(
            work=sent[: bounds[0]].view_as(work),
            splits=sent[bounds[0] : bounds[1]].view_as(splits),
            tables=sent[bounds[1] :],
            slots=int(slot_counts.sum()),
            kind=kind,
            launch=launch,
            new=tokens,
            firsts=table_starts.tolist(),
        )

    def plan_decode(self, tables: Tensor, contexts: Tensor, kind: LayerKind) -> AttentionPlan:
        """Divide contexts on the device, in as many entries as any contexts need."""
        count, width = tables.shape
        heads, launch = self._pool.layout.kv_heads, self._launch_of(kind, 1)
        limit = most_chunks(count, heads, launch.programs, kind)
        chunks, work = (tables.new_empty(limit, 8) for _ in range(2))
        splits = tables.new_empty(count, 3)
        grid = (triton.cdiv(limit, ENTRIES),)
        with _current(tables):
            plan.divide_contexts[grid](
                contexts,
                chunks,
                splits,
                count,
                limit,
                width,
                NO_WINDOW if kind.window is None else kind.window,
                kind.sinks,
                max(1, launch.programs // (count * heads)),
                launch.programs,
                heads=heads,
                finer=FINER,
                even=EVEN,
                least=LEAST_CHUNK,
                tile=self._tile,
                part=self._part,
                rows=triton.next_power_of_2(count),
                entries=ENTRIES,
                num_warps=4,
            )
            plan.order_chunks[grid](
                chunks, work, limit, entries=ENTRIES, others=OTHERS, num_warps=4
            )
        return AttentionPlan(
            work=work,
            splits=splits,
            tables=tables.flatten(),
            slots=limit,
            kind=kind,
            launch=launch,
        )

    @property
    def _part(self) -> int:
        """Tokens whose multiples chunks begin at: those of a block, or of a smaller tile."""
        return min(self._tile, self._pool.layout.block_size)

    def _launch_of(self, kind: LayerKind, longest: int) -> Launch:
        """Return how the kernel is launched for up to `longest` new tokens of a sequence."""
        tokens = min(max(1, self._rows // triton.next_power_of_2(kind.group)), longest)
        windowed = kind.window is not None and (self._part > 1 or tokens > 1)
        stages, programs = STAGES[0], self.programs
        if programs is None:
            card = Card.of(self._pool.device)
            stages, programs = self._pipeline(kind.group, tokens, card, windowed=windowed)
            programs *= card.multiprocessors
        return Launch(tokens, stages, programs, windowed)

    def _shape(self, group: int, tokens: int, *, windowed: bool) -> tuple[dict[str, Any], int]:
        """Return the constants of all kernels, for a group and new tokens, and the warps.

        With a window, more warps hold the masked tiles at both ends of a chunk in registers.
        """
        rows = max(16, triton.next_power_of_2(group) * tokens)
        share = 256 if self._pool.dtype == torch.float32 else 1024
        numbers = rows * self._values["value_padded"] * self._coding.packed
        return {"group": group, "rows": rows, **self._keys}, min(
            8, max(4 if windowed else 2, numbers // share)
        )

    def _pipeline(self, group: int, tokens: int, card: Card, *, windowed: bool) -> Pipeline:
        """Compile the kernel with each number of stages, once; return the one that is best."""
        key = group, tokens, windowed
        if key not in self._pipelines:
            shape, warps = self._shape(group, tokens, windowed=windowed)
            keys, key_grids = self._coding.read(self._pool.keys[0])
            values, value_grids = self._coding.read(self._pool.values[0])
            stored = [
                half if half is None else half.dtype
                for half in (keys, values, key_grids, value_grids)
            ]
            dtype, layout = self._pool.dtype, self._pool.layout
            kernels = {}
            # Chunks of prompts compute more than they copy.
            for stages in STAGES if tokens == 1 else STAGES[:1]:
                # Dtypes stand for tensors.
                kernels[stages] = attention.attend_chunks.warmup(
                    dtype,
                    *stored,
                    *(torch.int32, torch.int32, dtype, torch.float32, torch.float32, None),
                    *(1.5, self._coding.values, *self._strides),
                    *(layout.kv_heads * layout.block_size, NO_WINDOW, 0, tokens),
                    **shape,
                    **self._values,
                    stages=stages,
                    windowed=windowed,
                    num_warps=warps,
                    grid=(1,),
                )
                kernels[stages]._init_handles()  # noqa: SLF001 - which reads its registers
            self._pipelines[key] = deepest(kernels, warps, card)
        return self._pipelines[key]

    def attend(
        self,
        layer: int,
        plan: AttentionPlan,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        sums: list[Tensor] | None,
    ) -> None:
        """Compute the rows of the plan's tokens; add their weights to `sums`."""
        queries = queries.contiguous()
        _, kv_heads, group, width = queries.shape
        pool, coding = self._pool, self._coding
        size, value_width = pool.layout.block_size, out.shape[3]
        keys, key_grids = coding.read(pool.keys[layer])
        values, value_grids = coding.read(pool.values[layer])
        heads, slots = kv_heads * group, max(1, plan.slots)
        partial = queries.new_empty(slots, heads, value_width, dtype=torch.float32)
        logs = queries.new_empty(slots, heads, dtype=torch.float32)
        totals = None
        if sums is not None:
            totals = queries.new_empty(len(queries), heads, dtype=torch.float32)
        scale = 1 / sqrt(width) if scale is None else scale
        scale *= coding.keys / log(2)
        launch, window = plan.launch, plan.kind.window
        shape, warps = self._shape(group, launch.tokens, windowed=launch.windowed)
        grid = kv_heads, len(plan.work)
        grid_stride = kv_heads * size
        with _current(queries):
            attention.attend_chunks[grid](
                queries,
                keys,
                values,
                key_grids,
                value_grids,
                plan.tables,
                plan.work,
                out,
                partial,
                logs,
                totals,
                scale,
                coding.values,
                *self._strides,
                grid_stride,
                NO_WINDOW if window is None else window,
                plan.kind.sinks,
                launch.tokens,
                **shape,
                **self._values,
                stages=launch.stages,
                windowed=launch.windowed,
                num_warps=warps,
            )
            if plan.slots:
                attention.combine_chunks[heads, len(plan.splits)](
                    partial,
                    logs,
                    plan.splits,
                    out,
                    totals,
                    width=value_width,
                    padded=triton.next_power_of_2(value_width),
                    parts=PARTS,
                    num_warps=4,
                )
            if sums is None:
                return
            tokens = len(plan.tables) * size
            masses = queries.new_zeros(kv_heads, tokens, dtype=torch.float32)
            attention.weigh_chunks[grid](
                queries,
                keys,
                key_grids,
                plan.tables,
                plan.work,
                totals,
                masses,
                scale,
                self._strides[0],
                grid_stride,
                tokens,
                **shape,
                num_warps=warps,
            )
            for token, first in zip(plan.new, plan.firsts, strict=True):
                end = first * size + token.context + 1
                sums[token.number] += masses[:, first * size : end]
