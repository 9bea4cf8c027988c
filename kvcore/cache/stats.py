"""What a cache has looked up and hit."""

from __future__ import annotations

import attrs


@attrs.define
class CacheStats:
    """Counts of first admissions; a preempted request's own blocks are counted apart.

    Attributes:
        requests: first admissions.
        lookup_blocks, hit_blocks: blocks looked up, and hit from the first on.
        lookup_tokens, hit_tokens: prompt tokens, and those in blocks that hit.
        self_hit_blocks: blocks that preempted requests found of their own.
        forgotten_blocks: blocks that open sequences have forgotten.
        lost_tokens: tokens that whole blocks kept from hitting, at most: what is left of a
            prompt, but for its last token, after every full block of it has hit.
        looked_up: requests with at least one lookup block.
        ratio_sum: the sum of their hit ratios.
    """

    requests: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    self_hit_blocks: int = 0
    forgotten_blocks: int = 0
    lost_tokens: int = 0
    looked_up: int = 0
    ratio_sum: float = 0.0

    def admitted(
        self, lookup: int, hit: int, tokens: int, hit_tokens: int, *, again: bool
    ) -> None:
        """Count an admission that hit `hit` of `lookup` blocks of `tokens` tokens."""
        if again:
            self.self_hit_blocks += hit
            return
        self.requests += 1
        self.lookup_tokens += tokens
        if lookup:
            self.looked_up += 1
            self.lookup_blocks += lookup
            if hit:
                self.hit_blocks += hit
                self.hit_tokens += hit_tokens
                self.ratio_sum += hit / lookup
                rest = tokens - 1 - hit_tokens
                if 0 < rest * hit < hit_tokens:
                    self.lost_tokens += rest

    def ratios(self) -> dict[str, float | None]:
        """Return the hit ratio weighted by block, by token and by request.

        Without a single lookup block there is none: all are None.
        """
        if not self.looked_up:
            return dict.fromkeys(("block", "token", "request"))
        return {
            "block": self.hit_blocks / self.lookup_blocks,
            "token": self.hit_tokens / self.lookup_tokens,
            "request": self.ratio_sum / self.looked_up,
        }
