"""Step time by two token rates."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import attrs

from kvcore import InputError, LatencyModel
from kvcore.serving import LinearPiece, StepWork
from kvcore.units import NS_PER_S, PS_PER_NS

MILLISECOND = NS_PER_S * PS_PER_NS // 1000
SLOWEST = 1e-6


@attrs.define(slots=False, eq=False)
class TokenRate(LatencyModel):
    """A fixed number of tokens a second, one rate for prompts and one for outputs.

    `prompt tokens / prefill + sequences / decode` milliseconds: a server without overhead,
    without batching and without attention, as queueing theory has them. The defaults are
    rounded from `roofline` for Llama 3.1 8B on four H100: prompts of 12,000 tokens, and 64
    sequences of 4,000 that generate together.

    Options:
        prefill: prompt tokens a millisecond.
        decode: generated tokens a millisecond, of all sequences together.
    """

    name: ClassVar[str] = "token-rate"

    prefill: float = attrs.field(default=100.0)
    decode: float = attrs.field(default=10.0)

    def __attrs_post_init__(self) -> None:
        """Convert the rates to whole picoseconds per token."""
        self._prefill = _token_picoseconds("prefill", self.prefill)
        self._decode = _token_picoseconds("decode", self.decode)

    def pieces(self, work: StepWork) -> Sequence[LinearPiece]:
        """Return the only line, which is flat."""
        return ((self._prefill * work.prefill + self._decode * work.decode, 0),)

    def coefficients(self) -> dict[str, Any]:
        """Return the picoseconds a token takes."""
        return {"prefill_ps": self._prefill, "decode_ps": self._decode}


def _token_picoseconds(option: str, rate: float) -> int:
    """Return 1 / rate; the bounds keep it between a picosecond and some minutes."""
    if not SLOWEST <= rate <= MILLISECOND:
        msg = (
            f"token-rate: {option}={rate} must be a number of tokens a millisecond, from "
            f"{SLOWEST:g} to {MILLISECOND:g}"
        )
        raise InputError(msg)
    return round(MILLISECOND / Fraction(rate))
