"""Step time by two token rates."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, le

from kvcore import LatencyModel
from kvcore.serving import LinearPiece, StepWork
from kvcore.units import NS_PER_S, PS_PER_NS
from kvcore_plugins.bounds import bounded

MILLISECOND = NS_PER_S * PS_PER_NS // 1000
SLOWEST = 1e-6


def _rate(default: float) -> Any:
    """Return an option of a rate; its bounds keep a token between 1 ps and some minutes."""
    what = f"a number of tokens a millisecond, from {SLOWEST:g} to {MILLISECOND:g}"
    return bounded(default, what, ge(SLOWEST), le(MILLISECOND))


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

    prefill: float = _rate(100.0)
    decode: float = _rate(10.0)

    def __attrs_post_init__(self) -> None:
        """Convert the rates to whole picoseconds per token."""
        self._prefill = round(MILLISECOND / Fraction(self.prefill))
        self._decode = round(MILLISECOND / Fraction(self.decode))

    def pieces(self, work: StepWork) -> Sequence[LinearPiece]:
        """Return the only line, which is flat."""
        return ((self._prefill * work.prefill + self._decode * work.decode, 0),)

    def coefficients(self) -> dict[str, Any]:
        """Return the picoseconds a token takes."""
        return {"prefill_ps": self._prefill, "decode_ps": self._decode}
