"""Step time as a sum of four terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs

from kvcore import LatencyModel
from kvcore.serving import LinearPiece, StepWork
from kvcore.units import picoseconds


@attrs.define(slots=False, eq=False)
class Linear(LatencyModel):
    """Add up the times of a step, its prompt tokens, its sequences and their context.

    `step + prefill · prompt tokens + decode · sequences + context · tokens attended to`.
    The defaults are those of Llama 3.1 8B on four H100, rounded from the lines of `roofline`;
    `kvcore calibrate` fits them to a measured server.

    Options:
        step: seconds of a step without work.
        prefill: seconds for each prompt token.
        decode: seconds for each sequence that generates a token.
        context: seconds for each token that these sequences attend to.
    """

    name: ClassVar[str] = "linear"
    fitted_times: ClassVar[tuple[str, ...]] = ("step", "prefill", "decode", "context")
    fitted_shares: ClassVar[tuple[str, ...]] = ()

    step: float = attrs.field(default=0.0035)
    prefill: float = attrs.field(default=1e-5)
    decode: float = attrs.field(default=1e-5)
    context: float = attrs.field(default=1.2e-8)

    def __attrs_post_init__(self) -> None:
        """Convert the options to whole picoseconds."""
        self._step = picoseconds(self.step, "linear: step")
        self._prefill = picoseconds(self.prefill, "linear: prefill")
        self._decode = picoseconds(self.decode, "linear: decode")
        self._context = picoseconds(self.context, "linear: context")

    def pieces(self, work: StepWork) -> Sequence[LinearPiece]:
        """Return the only line."""
        a = self._step + self._prefill * work.prefill + self._decode * work.decode
        return ((a, self._context),)

    def fixed(self, works: Sequence[StepWork]) -> list[float]:
        """Return 0 for each of `works`: every term is fitted."""
        return [0.0] * len(works)

    def terms(self, works: Sequence[StepWork]) -> list[list[list[float]]]:
        """Return the counts of each of `works`, for a fit of the options."""
        return [[[1, work.prefill, work.decode, work.context[0]]] for work in works]

    def coefficients(self) -> dict[str, Any]:
        """Return the four options in picoseconds."""
        return {
            "step_ps": self._step,
            "prefill_ps": self._prefill,
            "decode_ps": self._decode,
            "context_ps": self._context,
        }
