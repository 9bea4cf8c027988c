"""A model on its devices: how much memory they leave for K/V, and how many blocks that is."""

from __future__ import annotations

from fractions import Fraction

import attrs

from kvcore.catalogue import DEVICES
from kvcore.errors import InputError
from kvcore.model import DeviceSpec, KVLayout, ModelSpec
from kvcore.units import DECIMAL, format_bytes

USABLE = Fraction(9, 10)
"""The share of a device's memory that weights and K/V may take; the rest is for activations."""


@attrs.frozen
class Deployment:
    """One copy of a model, its weights and K/V heads divided by a few equal devices.

    Attributes:
        layout: the model, and how its K/V lies in blocks.
        device: each of the devices.
        devices: how many there are (the degree of tensor parallelism).

    Raises:
        InputError: no device at all.
    """

    layout: KVLayout
    device: DeviceSpec
    devices: int = 1

    def __attrs_post_init__(self) -> None:
        """Refuse a deployment on nothing."""
        if self.devices < 1:
            msg = f"{self.layout.model.name} on {self.devices} devices: give at least 1"
            raise InputError(msg)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block on all devices together.

        K/V heads are divided as evenly as may be, and the busiest device decides: where
        there are fewer heads than devices, several hold the same. A latent (MLA) has no
        heads, and each device holds it whole.
        """
        model, devices = self.layout.model, self.devices
        whole = self.layout.bytes_per_block * devices
        return whole if model.latent else -(-whole * -(-model.kv_heads // devices)) // (
            model.kv_heads
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes left for K/V on all devices together; negative if the weights do not fit."""
        usable = int(USABLE * self.device.hbm_bytes * self.devices)
        return usable - self.layout.model.weight_bytes

    def blocks_in(self, size: int) -> int:
        """Return how many blocks fit into `size` bytes, all devices together."""
        return max(0, size) // self.bytes_per_block

    def blocks(self) -> int:
        """Return how many blocks fit next to the weights.

        Raises:
            InputError: none; says what is missing, and on what they would fit.
        """
        blocks = self.blocks_in(self.kv_bytes)
        if not blocks:
            model = self.layout.model
            missing = format_bytes(self.bytes_per_block - self.kv_bytes, DECIMAL)
            msg = (
                f"{model.name} on {self}: weights of "
                f"{format_bytes(model.weight_bytes, DECIMAL)} and a block of K/V do not fit "
                f"into {float(USABLE):.0%} of its memory: {missing} are missing. {self._enough()}"
            )
            raise InputError(msg)
        return blocks

    def __str__(self) -> str:
        """Return the devices as people write them: `4 x h100`."""
        return f"{self.devices} x {self.device.name}"

    def _enough(self) -> str:
        """Say on how many of these devices it would fit, and on which others."""
        count = self.devices
        while attrs.evolve(self, devices=count)._holds_none():  # noqa: SLF001 - its own
            count += 1
        larger = [
            device.name
            for device in DEVICES.values()
            if not attrs.evolve(self, device=device)._holds_none()  # noqa: SLF001 - its own
        ]
        others = f"; so would {self.devices} x {' or '.join(larger[:3])}" if larger else ""
        return f"{count} x {self.device.name} would do{others}"

    def _holds_none(self) -> bool:
        return not self.blocks_in(self.kv_bytes)
