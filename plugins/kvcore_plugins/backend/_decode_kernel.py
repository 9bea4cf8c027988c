"""What attends from decoding sequences to blocks where they lie, in place of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor


class Single(NamedTuple):
    """The only new token of a sequence: number and row in the step, and the tokens before."""

    number: int
    row: int
    context: int


class DecodeKernel(ABC):
    """Computes attention of single new tokens."""

    @abstractmethod
    def refusal(self, group: int, sinks: int, *, weighed: bool) -> str | None:
        """Return why the kernel leaves a kind of layer to torch; None if it does not.

        `group` query heads share a K/V head; `weighed` says that weights are to be summed up.
        """

    @abstractmethod
    def plan(
        self,
        singles: list[Single],
        tables: list[Tensor],
        group: int,
        window: int | None,
        sinks: int,
    ) -> Any:
        """Return what the layers of a kind share; tables of all sequences are on the host."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        plan: Any,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        sums: list[Tensor] | None,
    ) -> None:
        """Compute the rows of the plan, `[rows, kv_heads, group, value_dim]` of `out`.

        Attention weights are added to `sums` where these are given, as `Sdpa.attend` does.
        """
