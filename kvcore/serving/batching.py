"""What a server takes into one step."""

from __future__ import annotations

from math import ceil
from typing import Literal

import attrs

from kvcore.errors import InputError


@attrs.frozen(kw_only=True)
class Batching:
    """The caps of continuous batching.

    Attributes:
        max_tokens: tokens of a step: one for each sequence that decodes, the rest prefill.
        max_seqs: sequences that prefill or decode at a time.
        chunked: whether a prompt may be computed over several steps. If not, one for which
            decoding leaves too little of `max_tokens` is a step's only prefill.
        steps: `mixed` steps prefill and decode together; `prefill-first` lets decoding
            wait while there is anything to prefill.
        watermark: share of the blocks that an admission must leave free or evictable for
            those that run already to grow into.

    Raises:
        InputError: a cap that lets nothing run.
    """

    max_tokens: int = 8192
    max_seqs: int = 256
    chunked: bool = True
    steps: Literal["mixed", "prefill-first"] = "mixed"
    watermark: float = 0.01

    def __attrs_post_init__(self) -> None:
        """Check the caps."""
        msg = ""
        if type(self.max_tokens) is not int or type(self.max_seqs) is not int:
            msg = (
                f"max_tokens={self.max_tokens!r} and max_seqs={self.max_seqs!r}: give whole "
                "numbers"
            )
        elif self.max_seqs < 1 or self.max_tokens < self.max_seqs:
            msg = (
                f"max_tokens={self.max_tokens} and max_seqs={self.max_seqs}: a step has a "
                "token for each sequence, so give at least 1 sequence, and no fewer tokens"
            )
        elif self.steps not in ("mixed", "prefill-first"):
            msg = f"steps={self.steps!r} is not known; there are: mixed, prefill-first"
        elif type(self.chunked) is not bool:
            msg = f"chunked={self.chunked!r} must be True or False"
        elif type(self.watermark) not in (int, float):
            msg = f"watermark={self.watermark!r} is no number: give 0 or more, below 1"
        elif not 0 <= self.watermark < 1:
            msg = (
                f"watermark={self.watermark} is no share of the blocks: give 0 or more, below 1"
            )
        if msg:
            raise InputError(msg)

    def spare(self, blocks: int) -> int:
        """Return how many of `blocks` blocks the watermark keeps."""
        return ceil(self.watermark * blocks)
