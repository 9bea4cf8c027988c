"""Cache groups on tensors: layers that keep different things, in the blocks of one pool.

A block of the pool has memory for as many layers as the largest group has. Layers of a kind are
dealt out to the groups of that kind in turn, and the backend knows a layer by its number in its
group alone:

    layer of the model     0 window  1 window  2 full  3 window  4 window  5 full
    group, layer in it     1, 0      2, 0      0, 0    1, 1      2, 1      0, 1

A block of a state group holds states in the memory of K and V. A sequence reads the state of
its last computed token, and writes that of its last new one. These are in one block unless the
last computed token ends its block: so a state that is cached is copied, never written again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Unpack, cast

import attrs

from kvcore.cache import Ids
from kvcore.cache.sequence import Sequence as HeldSequence
from kvcore.engine.backend import AttendOptions, Backend, TensorLayout
from kvcore.engine.batch import RaggedBatch, Tensor
from kvcore.engine.generator import Attend, attend_through
from kvcore.engine.rotary import Rotation
from kvcore.errors import InputError
from kvcore.lazy import LazyModule
from kvcore.models.codec import Codec
from kvcore.models.layers import LayerCache
from kvcore.models.spec import ModelSpec
from kvcore.request import Key
from kvcore.serving import Job
from kvcore.units import format_bytes
from kvcore_engine.executor import ScheduledSequence, TensorExecutor, call, tensor_layout
from kvcore_engine.reads import AttentionReads
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_plugins.cache_groups.groups import GroupSequence, Table

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

STATE_NUMBER_BYTES = 4
"""Bytes of a number of a state by which blocks are planned: fp32, whatever K/V is kept in."""


@attrs.frozen
class GroupedLayers:
    """The place of each layer of a model in cache groups: its group, and its number there.

    Attributes:
        attention: places of the layers with K/V, in order.
        states: places of the layers with a state, in order.
    """

    attention: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, int], ...]

    @classmethod
    def from_groups(cls, spec: ModelSpec, groups: Sequence[LayerGroup]) -> GroupedLayers:
        """Return the places of the layers of a model.

        Raises:
            InputError: the groups are not those of the model.
        """
        states = sum(cache.layers for cache in spec.caches if cache.kind == "state")
        windows = attention_windows(spec)
        kinds = [("full" if window is None else "window", window) for window in windows]
        kinds += [("state", None)] * states
        members: dict[tuple[str, int | None], list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault((group.kind, group.window), []).append(index)
        dealt = dict.fromkeys(members, 0)
        counts, positions = [0] * len(groups), []
        for kind in kinds:
            own = members.get(kind, [])
            if not own:
                break
            index = own[dealt[kind] % len(own)]
            dealt[kind] += 1
            positions.append((index, counts[index]))
            counts[index] += 1
        if len(positions) < len(kinds) or counts != [group.layers for group in groups]:
            layers = "; ".join(map(str, spec.layer_caches))
            msg = (
                f"cache groups {', '.join(map(str, groups))} are not those of model "
                f"{spec.name!r}, which has {layers}"
            )
            raise InputError(msg)
        return cls(tuple(positions[: len(windows)]), tuple(positions[len(windows) :]))


def attention_windows(spec: ModelSpec) -> Sequence[int | None]:
    """Return the attention window of each layer with K/V; None: all tokens."""
    if not spec.caches:
        return spec.windows
    attention = _attention(spec)
    return (attention.window,) * attention.layers


def _attention(spec: ModelSpec) -> LayerCache:
    """Return what the layers with K/V keep, of a model with `caches`.

    Raises:
        InputError: they keep K/V of several kinds, or something else.
    """
    attention = [cache for cache in spec.caches if cache.kind != "state"]
    if [cache.kind for cache in attention] not in (["full"], ["window"]):
        kinds = "; ".join(map(str, spec.caches))
        msg = (
            f"layers of model {spec.name!r} keep different things ({kinds}): on tensors all of "
            "its layers with attention keep K/V heads of one kind, beside states"
        )
        raise InputError(msg)
    return attention[0]


def group_layout(
    spec: ModelSpec,
    groups: Sequence[LayerGroup],
    blocks: int,
    dtype: str,
    codec: Codec | None = None,
) -> TensorLayout:
    """Return the layout of a pool whose blocks any of the groups can take.

    Raises:
        InputError: the groups are not those of the model, have blocks of several sizes, or a
            block cannot hold a state.
    """
    GroupedLayers.from_groups(spec, groups)
    sizes = sorted({group.block_size for group in groups})
    if len(sizes) > 1:
        msg = (
            f"cache groups of model {spec.name!r} have blocks of {sizes} tokens: on tensors "
            "all have as many"
        )
        raise InputError(msg)
    shape = spec
    if spec.caches:
        heads = _attention(spec)
        shape = attrs.evolve(
            spec, caches=(), kv_heads=heads.kv_heads, head_dim=heads.key_dim,
            value_dim=heads.value_dim,
        )  # fmt: skip
    layout = tensor_layout(shape, blocks, sizes[0], dtype, codec)
    layout = attrs.evolve(layout, layers=max(group.layers for group in groups))
    numbers = state_numbers(spec)
    if numbers and codec is not None and codec.dtype != dtype:
        msg = (
            f"codec {codec.name!r} with model {spec.name!r}, whose layers keep states in the "
            "blocks too: they are kept as they are computed; leave the codec out"
        )
        raise InputError(msg)
    needed = numbers * state_number_bytes(dtype)
    if needed > layout.bytes_per_block // layout.layers:
        msg = (
            f"a state of model {spec.name!r} takes {format_bytes(needed)} in a layer, a block "
            f"of {sizes[0]} tokens {format_bytes(layout.bytes_per_block // layout.layers)}: "
            "give larger blocks"
        )
        raise InputError(msg)
    return layout


def state_numbers(spec: ModelSpec) -> int:
    """Return the numbers of the largest state that a layer of a model keeps; 0: none."""
    return max((cache.state_bytes for cache in spec.caches), default=0) // STATE_NUMBER_BYTES


def state_number_bytes(dtype: str) -> int:
    """Return the bytes of a number of a state beside K/V in `dtype`: fp32, or fp64."""
    return 2 * STATE_NUMBER_BYTES if dtype == "fp64" else STATE_NUMBER_BYTES


@attrs.frozen(slots=False)
class StepStates:
    """The states with which the sequences of a step begin, and those that it computes.

    Attributes:
        backend: the backend whose blocks hold them.
        places: the group of each layer with a state, and its number there.
        begins: for each sequence whether it has computed tokens, and thus a state.
        lengths: number of new tokens of each sequence.
        sources, targets: by group, the block of the state of each sequence before the step,
            and after it.
    """

    backend: Backend
    places: Sequence[tuple[int, int]]
    begins: Sequence[bool]
    lengths: Sequence[int]
    sources: Mapping[int, list[int]]
    targets: Mapping[int, list[int]]

    def read(self, layer: int, sequences: Sequence[int], numbers: int) -> Tensor:
        """Return the states before the step of some sequences, `[sequences, numbers]`."""
        group, index = self.places[layer]
        ids = [self.sources[group][sequence] for sequence in sequences]
        pages = torch.cat([half[ids] for half in self._halves(index)], 1)
        wide = self._dtype
        return pages[:, : numbers * wide.itemsize].contiguous().view(wide)

    def write(self, layer: int, sequences: Sequence[int], states: Tensor) -> None:
        """Write the states after the step of some sequences, `[sequences, numbers]`."""
        group, index = self.places[layer]
        ids = [self.targets[group][sequence] for sequence in sequences]
        rest = states.to(self._dtype).contiguous().view(torch.uint8)
        for half in self._halves(index):
            part, rest = rest[:, : half.shape[1]], rest[:, half.shape[1] :]
            half[ids, : part.shape[1]] = part

    @cached_property
    def rounds(self) -> list[list[int]]:
        """The sequences in rounds, each of which is computed at once.

        Single tokens go first, together. A sequence may resume from a state that another one
        computes in this step, if its rules share what is scheduled: it has a later round.
        """
        computed = {block for blocks in self.targets.values() for block in blocks}
        single, others = [], []
        for sequence, length in enumerate(self.lengths):
            resumes = any(
                self.sources[group][sequence] != self.targets[group][sequence]
                and self.sources[group][sequence] in computed
                for group in self.sources
            )
            if length == 1 and self.begins[sequence] and not resumes:
                single.append(sequence)
            else:
                others.append([sequence])
        return [single, *others] if single else others

    @property
    def _dtype(self) -> torch.dtype:
        wide = state_number_bytes(self.backend.layout.dtype) > STATE_NUMBER_BYTES
        return torch.float64 if wide else torch.float32

    def _halves(self, index: int) -> list[Tensor]:
        """Return the memory of a layer in bytes, `[blocks, bytes of K]` and `[..., of V]`."""
        halves = self.backend.layer_blocks(index)
        return [half.flatten(1).view(torch.uint8) for half in halves]


@attrs.frozen
class GroupedAttend:
    """The `Attend` of a step of a model in cache groups.

    Attributes:
        places: the group of each layer with K/V, and its number there.
        through: by group, the `Attend` through the blocks of that group.
        states: the states of its other layers; None: it has no such layers.
    """

    places: Sequence[tuple[int, int]]
    through: Mapping[int, Attend]
    states: StepStates | None

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        rotation: Rotation | None = None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Store K/V of a layer in the blocks of its group; return attention's output."""
        group, index = self.places[layer]
        attend = self.through[group]
        return attend(index, queries, keys, values, rotation=rotation, **options)


class GroupedTensorExecutor(TensorExecutor):
    """Computes steps of a model whose layers are in cache groups.

    Each group has block tables of its own, and thus a plan of the backend.
    """

    _cache: GroupedCache  # type: ignore[assignment]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        windows = attention_windows(self._generator.spec)
        self.reads = AttentionReads(self._backend.layout, windows, None)
        self.graphs = None  # each group has a plan of its own

    def _layout(self, spec: ModelSpec, dtype: str, codec: Codec | None) -> TensorLayout:
        """Return the layout of the pool, and find the layers in the groups."""
        groups, blocks = self._cache.groups, self._cache.pool.blocks
        self._layers = GroupedLayers.from_groups(spec, groups)
        return group_layout(spec, groups, blocks, dtype, codec)

    def _blocks(self, seq: HeldSequence, tokens: int) -> Ids:
        """Return no ids: there is a table for each group."""
        return array("i")

    def _append(
        self, sequences: Sequence[ScheduledSequence], tokens: Sequence[int | None]
    ) -> tuple[list[tuple[Job, int]], list[tuple[Job, Sequence[Key]]]]:
        """Append the generated tokens; their blocks get no keys, which groups do not learn."""
        ended, _ = super()._append(sequences, tokens)
        return ended, []

    def _attend(self, sequences: Sequence[ScheduledSequence], batch: RaggedBatch) -> Attend:
        """Return the function that stores and attends in the groups of each layer."""
        self.reads.add((sequence.seq for sequence in sequences), batch)
        tables = [cast("GroupSequence", sequence.seq).tables for sequence in sequences]
        return grouped_attend(self._backend, self._layers, tables, batch)


def grouped_attend(
    backend: Backend,
    layers: GroupedLayers,
    tables: Sequence[Sequence[Table]],
    batch: RaggedBatch,
) -> GroupedAttend:
    """Return the `Attend` of a step.

    Args:
        backend: the backend whose blocks hold K/V and states.
        layers: the places of the layers of the model.
        tables: of each sequence, its blocks by group.
        batch: the new tokens of the sequences, without block tables.
    """
    size = backend.layout.block_size
    store = partial(call, backend, backend.store_rotated)
    attend = partial(call, backend, backend.attend)
    ends = [
        -(-(context + length) // size)
        for context, length in zip(batch.contexts, batch.lengths, strict=True)
    ]
    through = {}
    for group in {group for group, _ in layers.attention}:
        ids = [_ids(own[group], end) for own, end in zip(tables, ends, strict=True)]
        plan = call(backend, backend.plan, attrs.evolve(batch, block_tables=ids))
        through[group] = attend_through(plan, store, attend)
    states = None
    if layers.states:
        groups = {group for group, _ in layers.states}
        newest = [max(context - 1, 0) // size for context in batch.contexts]
        lasts = [end - 1 for end in ends]
        states = StepStates(
            backend,
            layers.states,
            [context > 0 for context in batch.contexts],
            batch.lengths,
            {group: _blocks_at(group, tables, newest) for group in groups},
            {group: _blocks_at(group, tables, lasts) for group in groups},
        )
    return GroupedAttend(layers.attention, through, states)


def _ids(table: Table, end: int) -> Ids:
    """Return the ids of the first `end` blocks; 0 for those that a window has passed.

    Nothing reads these: a window attends to none of their tokens.
    """
    passed = array("i", bytes(array("i").itemsize * table.first))
    return passed + array("i", table.blocks[: end - table.first])


def _blocks_at(
    group: int, tables: Sequence[Sequence[Table]], positions: Sequence[int]
) -> list[int]:
    """Return the block of each sequence at its position in the table of a group."""
    return [
        own[group].blocks[position - own[group].first]
        for own, position in zip(tables, positions, strict=True)
    ]
