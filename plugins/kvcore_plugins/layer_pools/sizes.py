"""How the memory of a hybrid model is divided among the pools of its kinds of layers."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar, Final

import attrs

from kvcore.cache import CheckpointPolicy
from kvcore.errors import InputError
from kvcore.models.memory import KVLayout
from kvcore_plugins.layer_pools.cache import PooledCache

WINDOW_RATIO: Final = Fraction(8, 10)
"""Tokens in the pool of windows for each token in that of full attention."""

STATE_RATIO: Final = Fraction(9, 10)
"""Bytes of the pool of states for each byte of the pools of K/V."""


@attrs.frozen
class LayerPools:
    """Pools of layers with full attention, of those with a window, and of those with states.

    A `LayerPlan`.

    Source: SGLang 0.5.23, with its defaults of `--swa-full-tokens-ratio` and
    `--mamba-full-memory-ratio`.

    Attributes:
        block_size: tokens of a block.
        window: tokens that a token attends to in layers with a window, itself included; None:
            there are no such layers.
        bytes_per_block: bytes of all pools for each block of full attention.
        states_per_block: state slots for each block of full attention; None: there are none.
        windows_per_block: window slots for each block of full attention, if there are any.
    """

    where: ClassVar[str] = "pools of their own"
    takes_tiers: ClassVar[bool] = False

    block_size: int
    window: int | None
    bytes_per_block: int
    states_per_block: Fraction | None
    windows_per_block: Fraction = WINDOW_RATIO

    @classmethod
    def from_layout(cls, layout: KVLayout, devices: int) -> LayerPools | None:
        """Return the pools of a model; None if SGLang has none for what its layers keep."""
        full = windows = state = Fraction(0)
        sizes: set[int] = set()
        for cache in layout.model.layer_caches:
            copies = cache.layers * cache.copies(devices)
            size = copies * layout.cache_bytes(cache) * layout.block_size
            if cache.kind == "state":
                state += copies * cache.state_bytes
            elif cache.kind in ("window", "chunk") and cache.window is not None:
                windows += size
                # A chunk is kept as a window of as many tokens before the newest one.
                sizes.add(cache.window + (cache.kind == "chunk"))
            elif cache.grows and cache.kind != "compressed":
                full += size
            elif cache.kind != "shared":
                return None
        if not full or len(sizes) > 1 or not (sizes or state):
            return None
        kv = full + WINDOW_RATIO * windows
        return cls(
            layout.block_size,
            sizes.pop() if sizes else None,
            ceil(kv * (1 + STATE_RATIO) if state else kv),
            kv * STATE_RATIO / state if state else None,
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], blocks: int, block_size: int) -> LayerPools:
        """Return the pools of a trace: `layer_pools` of its header, beside `blocks` blocks.

        The slots of a larger or a smaller pool are in the same ratio to its blocks.
        """
        names = "window", "window_slots", "state_slots"
        window, windows, states = map(record.get, names)
        return cls(
            block_size,
            window,
            0,  # its pool is counted in blocks
            None if states is None else Fraction(states, blocks),
            WINDOW_RATIO if windows is None else Fraction(windows, blocks),
        )

    def slots(self, blocks: int) -> tuple[int, int | None]:
        """Return the slots of windows and of states beside `blocks` of full attention."""
        windows = 0 if self.window is None else int(blocks * self.windows_per_block)
        states = self.states_per_block
        return windows, None if states is None else int(blocks * states)

    def check_keys(self, model: str, key_tokens: int) -> None:
        """Do nothing: blocks have the size that the configuration gives."""

    def cache(
        self, blocks: int, *, checkpoint: CheckpointPolicy, **options: Any
    ) -> PooledCache:
        """Return a cache of these pools: `LayerPlan.cache`.

        Raises:
            InputError: another checkpoint policy than the default: SGLang has rules of its own.
        """
        if type(checkpoint) is not CheckpointPolicy:
            msg = (
                f"checkpoint {checkpoint.name!r}: pools as SGLang's keep states by its own "
                "rules; leave it out"
            )
            raise InputError(msg)
        windows, states = self.slots(blocks)
        return PooledCache(
            blocks, self.block_size, window=self.window, window_slots=windows,
            state_slots=states, **options,
        )  # fmt: skip

    def as_dict(self, blocks: int, checkpoint: CheckpointPolicy) -> dict[str, Any]:
        """Return the slots beside `blocks` of full attention for JSON: `LayerPlan.as_dict`."""
        windows, states = self.slots(blocks)
        sizes = {"window_slots": windows, "state_slots": states}
        return {"layer_pools": {name: slots for name, slots in sizes.items() if slots}}
