"""Retention by chance."""

from __future__ import annotations

from typing import ClassVar
from zlib import crc32

import attrs

from kvcore import ScoreRetention
from kvcore.engine import Tensor
from kvcore_engine.retention.token_retention import HeldTokens

_LOW = 0xFFFFFFFF


@attrs.define(slots=False, eq=False, kw_only=True)
class Random(ScoreRetention):
    """Keep tokens at random: the baseline that any useful policy beats.

    A token's draw depends on the seed, the request, the layer, the K/V head and the token's
    position, and so never changes: after any number of compactions, the tokens that stay are a
    uniform sample of the text so far.

    Options:
        budget, recent, sinks, when: as of every policy with scores.
        seed: number from which all draws are derived.
    """

    name: ClassVar[str] = "random"

    seed: int = attrs.field(default=0)

    def score(self, held: HeldTokens) -> Tensor:
        """Return the draw of each token, 0 up to 1, in fp64."""
        positions = held.positions
        layers = positions.new_tensor([*held.layers])[:, None, None]
        heads = positions.new_tensor([*range(positions.shape[1])])[:, None]
        # Hashed one after another: sums of them would be equal for many tokens.
        draw = layers ^ crc32(f"{self.seed}/{held.seq.request.id!r}".encode())
        draw = _mixed(_mixed(_mixed(draw) ^ heads) ^ positions)
        return draw.double() / (_LOW + 1)


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of 32 bits of each whole number of 32 bits, in 64-bit integers.

    Products wrap around at 64 bits, which leaves their lower 32 as they are. The finaliser of
    Appleby's MurmurHash3.
    """
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _LOW
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _LOW
    return x ^ (x >> 16)
