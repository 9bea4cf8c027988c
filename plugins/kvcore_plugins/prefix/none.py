"""No prefix index: no block is shared, every prompt is computed whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvcore import PrefixIndex, Span
from kvcore.request import Key


class NoPrefix(PrefixIndex):
    """Share no blocks: a baseline, as engines without prefix caching do."""

    name: ClassVar[str] = "none"
    shares: ClassVar[bool] = False

    def match(self, keys: Sequence[Key], limit: int, after: Span) -> tuple[Span, int]:
        """Return `after`: no block is stored."""
        return after, after.end
