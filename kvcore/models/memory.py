"""Memory of K/V: the bytes of a block, and the blocks that fit beside the weights."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil

import attrs

from kvcore.errors import InputError
from kvcore.models.spec import (
    KV_DTYPES,
    DeviceSpec,
    ModelSpec,
    bytes_of,
    count_field,
)
from kvcore.units import DECIMAL, format_bytes

USABLE = Fraction(9, 10)
"""The share of a device's memory that weights and K/V may take; the rest is for activations."""


_SUGGESTIONS = 3
"""How many other devices an error names at most."""


def kv_copies(model: ModelSpec, devices: int) -> Fraction:
    """Return how many copies of the K/V are kept when its heads are divided among `devices`.

    The device with the most heads decides: 8 heads lie on 4 devices once, on 3 devices, of
    which one has 3, as if 9 were held, and on 16 twice. A latent (MLA) has no heads, so
    each device holds all of it.
    """
    if model.latent:
        return Fraction(devices)
    return Fraction(devices * -(-model.kv_heads // devices), model.kv_heads)


MOST_DEVICES = 65_536
"""More than share one model anywhere."""


@attrs.frozen
class Deployment:
    """One copy of a model: weights and K/V heads divided by a few equal devices.

    Attributes:
        layout: the model, and the layout of its K/V in blocks.
        device: the type of each device.
        devices: number of devices (the degree of tensor parallelism).

    Raises:
        InputError: no device at all, or more than `MOST_DEVICES`.
    """

    layout: KVLayout
    device: DeviceSpec
    devices: int = 1

    def __attrs_post_init__(self) -> None:
        """Refuse a deployment on no device."""
        if not 1 <= self.devices <= MOST_DEVICES:
            msg = f"{self.layout.model.name} on {self}: give 1 to {MOST_DEVICES:,} devices"
            raise InputError(msg)

    def __str__(self) -> str:
        """Return the number and type of the devices: `4 x h100`."""
        return f"{self.devices} x {self.device.name}"

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block on all devices together."""
        return ceil(self.layout.bytes_per_block * kv_copies(self.layout.model, self.devices))

    @property
    def kv_bytes(self) -> int:
        """Bytes left for K/V on all devices together; negative if the weights do not fit."""
        usable = USABLE * self.device.hbm_bytes * self.devices
        return int(usable) - self.layout.model.weight_bytes

    def blocks_in(self, size: int) -> int:
        """Return how many blocks fit into `size` bytes, on all devices together."""
        return max(0, size) // self.bytes_per_block

    def blocks(self) -> int:
        """Return how many blocks fit beside the weights.

        Raises:
            InputError: none; says how much is missing, and on what it would fit.
        """
        blocks = self.blocks_in(self.kv_bytes)
        if not blocks:
            weights = format_bytes(self.layout.model.weight_bytes, DECIMAL)
            missing = format_bytes(self.bytes_per_block - self.kv_bytes, DECIMAL)
            msg = (
                f"{self.layout.model.name} on {self}: weights of {weights} and a block of K/V "
                f"need {missing} more than {float(USABLE):.0%} of the memory. {self._remedy()}"
            )
            raise InputError(msg)
        return blocks

    def _remedy(self) -> str:
        """Return a sentence with devices on which the model would fit."""
        from kvcore.models.catalogue import DEVICES  # noqa: PLC0415 - a long table

        least = self.layout.model.weight_bytes // int(USABLE * self.device.hbm_bytes) + 1
        more = (attrs.evolve(self, devices=count) for count in (least, least + 1))
        other = (attrs.evolve(self, device=device) for device in DEVICES.values())
        fitting = [
            *[str(one) for one in more if one.blocks_in(one.kv_bytes)][:1],
            *[str(one) for one in other if one.blocks_in(one.kv_bytes)][:_SUGGESTIONS],
        ]
        if not fitting:
            return "Take a smaller model, or smaller blocks"
        return f"It fits on {', '.join(fitting)}"


@attrs.frozen
class KVLayout:
    """The layout of a model's K/V in blocks, and the bytes that it takes.

    Scales of quantised K/V are not counted.

    Attributes:
        model: the model.
        dtype: type of a stored number, one of `KV_DTYPES`.
        block_size: tokens in a block, which holds their K/V of all layers.

    Raises:
        InputError: the dtype is none of K/V, or a block would hold no tokens.
    """

    model: ModelSpec
    dtype: str = attrs.field(default="fp16")
    block_size: int = count_field(default=16)

    @dtype.validator
    def _known(self, _: object, value: str) -> None:
        if value not in KV_DTYPES:
            msg = f"K/V cannot be kept in {value!r}; known dtypes: {', '.join(KV_DTYPES)}"
            raise InputError(msg)

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one token in one layer."""
        return bytes_of(self.model.kv_width, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.bytes_per_layer * self.model.layers

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: `block_size` tokens in all layers."""
        return self.bytes_per_token * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens occupy, the last perhaps in part."""
        return -(-tokens // self.block_size)

    def request_bytes(self, tokens: int) -> int:
        """Return the bytes a request of `tokens` tokens occupies, in whole blocks.

        A layer with a window keeps no more than the window, rounded up to blocks (a ring of
        blocks written round and round).
        """
        return sum(
            layers * self.bytes_per_layer * self.block_size * self.blocks_for(kept)
            for kept, layers in self._kept(tokens)
        )

    def read_bytes(self, tokens: int) -> int:
        """Return the bytes of K/V read to decode one token with `tokens` tokens of context."""
        return sum(layers * self.bytes_per_layer * kept for kept, layers in self._kept(tokens))

    def window_bytes(self, sequences: int, window: int) -> int:
        """Return the bytes of `sequences` sequences that each keep `window` tokens."""
        return sequences * window * self.bytes_per_token

    def blocks_in(self, budget: int) -> int:
        """Return how many blocks fit into `budget` bytes."""
        return max(0, budget) // self.bytes_per_block

    def requests_in(self, budget: int, tokens: int) -> int:
        """Return how many requests of `tokens` tokens (1 or more) fit into `budget` bytes."""
        return max(0, budget) // self.request_bytes(tokens)

    def _kept(self, tokens: int) -> list[tuple[int, int]]:
        """Return pairs of the tokens that a layer keeps, and the number of such layers."""
        kept = Counter(tokens if w is None else min(tokens, w) for w in self.model.windows)
        return list(kept.items())


def kv_budget(model: ModelSpec, device: DeviceSpec, reserve: int = 0) -> int:
    """Return the bytes left for K/V after the weights and `reserve` bytes.

    Negative when the weights do not fit: that much is missing.
    """
    return device.hbm_bytes - model.weight_bytes - reserve
