"""Memory of K/V: the bytes of a block, and the blocks that fit beside the weights.

Read `KVLayout` first, the bytes of blocks; a `Deployment` has devices, and blocks that fit.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from math import ceil
from typing import Any, NamedTuple, cast

import attrs

from kvcore.errors import InputError
from kvcore.models.codec import PLANE_BYTES, Codec, Part
from kvcore.models.layers import LayerCache
from kvcore.models.spec import DeviceSpec, ModelSpec, count_field
from kvcore.plugins import FAILURES, policy_error, resolve, wrong_answer
from kvcore.plugins.base import raise_policy_error
from kvcore.plugins.options import Spec
from kvcore.record import Record
from kvcore.units import DECIMAL, format_bytes

USABLE = Fraction(9, 10)
"""Share of the memory of a device for weights and K/V; the rest is for activations."""

SERVER = 8
"""GPUs of a server: remedies take no more, unless more were given."""

MOST_DEVICES = 65_536
"""Largest number of devices that share a model."""

_SUGGESTIONS = 3
"""Largest number of other devices that an error names."""

_NOT_IN_BLOCKS = "state", "compressed", "cross"
"""Kinds of caches that have no entry for each token of a block."""


def can_share(model: ModelSpec, devices: int) -> bool:
    """Return True if engines divide the attention of `model` among `devices` devices.

    Query heads are divided evenly. K/V heads are too, or each is copied to as many devices; a
    latent (MLA) is copied to all.
    """
    if not 1 <= devices <= MOST_DEVICES or model.query_heads % devices:
        return False
    heads = [cache.kv_heads for cache in model.layer_caches if cache.kv_heads > 1]
    return all(not count % devices or not devices % count for count in heads)


def tensor_degrees(model: ModelSpec, start: int = 1, stop: int = SERVER) -> list[int]:
    """Return the degrees of tensor parallelism of `model` from `start` to `stop`, ascending.

    `stop` is at least `start`: a server of more GPUs was given.
    """
    return [degree for degree in range(start, max(start, stop) + 1) if can_share(model, degree)]


def servers_that_fit(
    model: ModelSpec, device: DeviceSpec, devices: int, fits: Callable[[DeviceSpec, int], bool]
) -> list[str]:
    """Return servers that hold `model`: the smallest of `device`, then others, kin first."""
    from kvcore.models.catalogue import DEVICES  # noqa: PLC0415 - a long table

    degrees, kin = tensor_degrees(model, devices), device.name[0]
    gpus = [gpu for gpu in DEVICES.values() if gpu != device]
    gpus.sort(key=lambda gpu: (gpu.name[0] != kin, gpu.hbm_bytes))
    own = (f"{count} x {device.name}" for count in degrees if fits(device, count))
    more = (f"{count} x {gpu.name}" for count in degrees for gpu in gpus if fits(gpu, count))
    return [*islice(own, 1), *islice(more, _SUGGESTIONS)]


def degree_problem(model: ModelSpec, devices: int) -> str:
    """Return why no engine divides `model` among `devices`, and the degrees; "" if one does."""
    if can_share(model, devices):
        return ""
    kv = f" and {model.kv_heads} K/V head{'s' * (model.kv_heads > 1)}"
    heads = f"{model.query_heads} query heads{'' if model.latent else kv}"
    *degrees, last = tensor_degrees(model, 1, min(model.query_heads, MOST_DEVICES))
    known = f"{', '.join(map(str, degrees))} or {last}" if degrees else f"{last}"
    return f"{heads} cannot be divided among {devices} devices; give {known}"


class DraftMemory(NamedTuple):
    """Bytes of weights, and of K/V a token, that drafting adds on all devices together."""

    weight_bytes: int = 0
    token_bytes: Fraction | int = 0


@attrs.frozen(repr=False)
class Deployment(Record):
    """One copy of a model: weights and K/V heads divided by identical devices.

    Attributes:
        layout: the model, and the layout of its K/V in blocks.
        device: the type of each device.
        devices: number of devices (the degree of tensor parallelism).
        group_block_bytes: bytes of a block of the cache groups of the model, on all devices
            together; None: a block has the K/V of all layers.
        drafter: a `Drafter`, whose weights and K/V lie beside the model's; None: there is none.
        drafting: the bytes that it adds.

    Raises:
        InputError: no engine divides the heads of the model among so many devices.
    """

    layout: KVLayout
    device: DeviceSpec
    devices: int = 1
    group_block_bytes: int | None = None
    drafter: Any = None
    drafting: DraftMemory = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Refuse a number of devices among which the heads cannot be divided."""
        if problem := degree_problem(self.layout.model, self.devices):
            msg = f"{self.layout.model.name} on {self}: {problem}"
            raise InputError(msg)

    def __str__(self) -> str:
        """Return the number and type of the devices: `4 x h100`."""
        return f"{self.devices} x {self.device.name}"

    @drafting.default
    def _ask_drafter(self) -> DraftMemory:
        """Return what the drafter adds; raise PolicyError if it does not tell."""
        if self.drafter is None:
            return DraftMemory()
        try:
            kept = DraftMemory(*self.drafter.memory(self.layout, self.devices))
            if min(kept) < 0:
                raise wrong_answer(self.drafter, "memory()", f"{kept}, not 0 bytes or more")
        except FAILURES as error:
            raise_policy_error(self.drafter, "memory", error)
        return kept

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block on all devices together, with K/V of drafts: groups have none."""
        token_bytes = self.layout.token_bytes(self.devices) + self.drafting.token_bytes
        return self.group_block_bytes or ceil(self.layout.block_size * token_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes left for K/V on all devices together; negative if the weights do not fit."""
        usable = USABLE * self.device.hbm_bytes * self.devices
        return int(usable) - self.layout.model.weight_bytes - self.drafting.weight_bytes

    def staged_bytes(self, sequences: int) -> int:
        """Return the bytes that unfinished blocks of `sequences` sequences stage, together."""
        return ceil(sequences * self.layout.staged_bytes() * self.layout.copies(self.devices))

    def blocks(self, sequences: int = 0) -> int:
        """Return how many blocks fit beside the weights and the staged bytes.

        Args:
            sequences: how many may run at a time, each with a block that is not full.

        Raises:
            InputError: no block fits; names the missing bytes, and devices on which one does.
        """
        blocks = self.fitting(sequences)
        if not blocks:
            weights = format_bytes(self.layout.model.weight_bytes, DECIMAL)
            if drafting := self.drafting.weight_bytes:
                weights += f" and {format_bytes(drafting, DECIMAL)} for drafts"
            needed = self.bytes_per_block + self.staged_bytes(sequences)
            missing = format_bytes(needed - self.kv_bytes, DECIMAL)
            staged = (
                f", the unfinished blocks of {sequences} sequences,"
                if self.layout.staged_bytes()
                else ""
            )
            msg = (
                f"{self.layout.model.name} on {self}: weights of {weights}{staged} and a block "
                f"of K/V need {missing} more than {float(USABLE):.0%} of the memory. "
                f"{self._remedy(sequences)}"
            )
            raise InputError(msg)
        return blocks

    def fitting(self, sequences: int) -> int:
        """Return how many blocks fit, as `blocks` does; 0 if none does."""
        free = self.kv_bytes - self.staged_bytes(sequences)
        return max(0, free) // self.bytes_per_block

    def _remedy(self, sequences: int) -> str:
        """Return a sentence with servers on which the model would fit."""

        def fits(device: DeviceSpec, devices: int) -> bool:
            return attrs.evolve(self, device=device, devices=devices).fitting(sequences) > 0

        servers = servers_that_fit(self.layout.model, self.device, self.devices, fits)
        if servers:
            return f"It fits on {', '.join(servers)}"
        gpus = max(SERVER, self.devices)
        return f"No {gpus} GPUs hold it. Take a smaller model, or smaller blocks"


def is_pooled(model: ModelSpec) -> bool:
    """Return True if blocks, each of some tokens in all layers, hold what a model keeps."""
    return not any(cache.kind in _NOT_IN_BLOCKS for cache in model.layer_caches)


def check_pool(model: ModelSpec) -> None:
    """Refuse a model of which a pool of blocks, each of some tokens in all layers, is no cache.

    Raises:
        InputError: layers keep what such blocks cannot hold.
    """
    others = [cache for cache in model.layer_caches if cache.kind in _NOT_IN_BLOCKS]
    if others:
        msg = (
            f"{model.name} keeps more than K/V of tokens ({'; '.join(map(str, others))}), and "
            "a pool has blocks of tokens alone, so hits and memory would be wrong. "
            "`kvcore size` sizes it; here, give a model whose layers keep K/V"
        )
        raise InputError(msg)


def _built(codec: Codec | type[Codec] | Spec | str | None) -> Codec:
    return cast("Codec", resolve("codec", codec, "fp16"))


@attrs.frozen(repr=False)
class KVLayout(Record):
    """The layout of a model's K/V in blocks, and the bytes that it takes.

    Bytes are those of the codec's planes, scales included. A latent (MLA) is coded as the
    keys of one head.

    Attributes:
        model: the model.
        codec: how K/V lies in a block; also as a class or a text (`kivi:bits=2`); None: fp16.
        block_size: tokens in a block, which holds their K/V of all layers.

    Raises:
        InputError: there is no such codec, it cannot code such blocks, or a block would
            hold no tokens.
        PolicyError: the codec failed, or has no bytes.
    """

    model: ModelSpec
    codec: Codec = attrs.field(default=None, converter=_built)
    block_size: int = count_field(default=16)

    def __attrs_post_init__(self) -> None:
        """Refuse blocks that the codec cannot code, as it says when asked for their bytes."""
        if self.bytes_per_block < 1:
            raise wrong_answer(self.codec, "planes()", "none, so K/V would take no bytes")

    def cache_bytes(self, cache: LayerCache) -> Fraction:
        """Return the bytes of one token in one layer of a cache: its part of a block, exact."""
        numbers: Fraction | int = 0
        if cache.kv_heads:
            widths = cache.key_dim, cache.value_dim
            coded = cache.kv_heads * self.codec.head_bytes(self.block_size, *widths)
            numbers = Fraction(coded, self.block_size)
        return (numbers + cache.entry_bytes) / Fraction(cache.ratio)

    def token_bytes(self, devices: int = 1) -> Fraction:
        """Return the bytes that a token adds to the caches of all layers, exact.

        Args:
            devices: number of devices that share the model, and have heads in several copies.
        """
        return sum(
            (
                cache.layers * self.cache_bytes(cache) * cache.copies(devices)
                for cache in self.model.layer_caches
                if cache.grows
            ),
            Fraction(0),
        )

    def block_bytes(self, devices: int = 1) -> Fraction:
        """Return the bytes of a block on all of `devices` devices together, exact."""
        return self.block_size * self.token_bytes(devices)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token adds to all layers, rounded up."""
        return ceil(self.token_bytes())

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: `block_size` tokens in all layers."""
        return ceil(self.block_bytes())

    @property
    def pool_note(self) -> str:
        """A sentence on what a pool keeps that no layer needs; "" if there is nothing."""
        short = [cache for cache in self.model.layer_caches if cache.grows and cache.window]
        if not short:
            return ""
        return (
            "The pool keeps all tokens in all layers, as an engine without cache groups: "
            f"{self.model.name} needs less ({'; '.join(map(str, short))}), so in an engine "
            "with them more requests fit and hit."
        )

    def staged_bytes(self, dtype: str | None = None) -> int:
        """Return the bytes of a running sequence that are outside its blocks.

        What a codec codes block by block lies as it was computed until its block is full:
        a block of such numbers for each running sequence.

        Args:
            dtype: dtype in which K/V is computed; None: that of the model's weights, but
                bf16 for weights that are quantised.
        """
        if dtype is None:
            dtype = self.model.dtype if self.model.dtype in ("fp32", "fp16") else "bf16"
        parts: tuple[Part, ...] = ("keys", "values")
        try:
            by_token = [self.codec.by_token(part) for part in parts]
        except FAILURES as error:
            raise policy_error(self.codec, "by_token", error) from error
        numbers: Fraction | int = 0
        for cache in self.model.layer_caches:
            if cache.grows:
                widths = cache.key_dim, cache.value_dim
                staged = sum(w for w, alone in zip(widths, by_token, strict=True) if not alone)
                numbers += Fraction(staged * cache.kv_heads * cache.layers, cache.ratio)
        return ceil(numbers * self.block_size * PLANE_BYTES[dtype])

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens occupy, the last perhaps in part."""
        return -(-tokens // self.block_size)

    def request_bytes(self, tokens: int, devices: int = 1) -> int:
        """Return the bytes a request of `tokens` tokens occupies, in whole blocks.

        A layer with a window keeps no more than the window, rounded up to blocks (a ring of
        blocks written round and round). A state takes its bytes once.

        Args:
            tokens: tokens of the request.
            devices: number of devices that share the model, on all of which together it is.
        """
        caches = self.model.layer_caches
        return ceil(sum(self.kept_bytes(cache, tokens, devices) for cache in caches))

    def kept_bytes(self, cache: LayerCache, tokens: int, devices: int = 1) -> Fraction:
        """Return the bytes that the layers of a cache keep of a request of `tokens` tokens."""
        blocks = self.blocks_for(cache.kept(tokens))
        layer_bytes = blocks * self.block_size * self.cache_bytes(cache) + cache.state_bytes
        return cache.layers * layer_bytes * cache.copies(devices)

    def read_bytes(self, tokens: int, devices: int = 1) -> int:
        """Return the bytes of K/V read to decode one token with `tokens` tokens of context.

        Rounded up, where the tokens of a block share scales.
        """
        reads = self.reads(devices).items()
        return ceil(sum(size * min(tokens, reach or tokens) for reach, size in reads))

    def reads(self, devices: int = 1) -> dict[int | None, Fraction]:
        """Return by reach the bytes read for each token in it, in all layers that have it.

        A state costs the bytes of it that are read and written.
        """
        reads: dict[int | None, Fraction] = {}
        for cache in self.model.layer_caches:
            layer_tokens = cache.each * self.cache_bytes(cache) + cache.moved_bytes
            size = cache.layers * layer_tokens * cache.copies(devices)
            reads[cache.reach] = reads.get(cache.reach, Fraction(0)) + size
        return reads

    def blocks_in(self, budget: int, devices: int = 1) -> int:
        """Return how many blocks fit into `budget` bytes on `devices` devices together."""
        return int(max(0, budget) // self.block_bytes(devices))

    def requests_in(self, budget: int, tokens: int, devices: int = 1) -> int:
        """Return how many requests of `tokens` tokens (1 or more) fit into `budget` bytes.

        Each takes its blocks and states, and the bytes that it stages, on `devices` devices.
        """
        caches = self.model.layer_caches
        kept = sum(self.kept_bytes(cache, tokens, devices) for cache in caches)
        return int(max(0, budget) // (kept + self.staged_bytes() * self.copies(devices)))

    def copies(self, devices: int) -> Fraction:
        """Return how many copies of the K/V of a token devices keep, all layers together."""
        return self.token_bytes(devices) / self.token_bytes() if devices > 1 else Fraction(1)
