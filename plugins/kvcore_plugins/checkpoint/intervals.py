"""Windows and states at fixed distances: vLLM's retention interval."""

from __future__ import annotations

from typing import ClassVar

import attrs
from attrs.validators import ge, instance_of

from kvcore.cache import CheckpointPolicy


class Chunk(CheckpointPolicy):
    """Keep windows and states wherever a chunk ends, generated tokens included.

    Source: vLLM, `--prefix-cache-retention-interval none`.
    """

    name: ClassVar[str] = "chunk"
    interval: int | None = None


@attrs.define(slots=False, eq=False)
class Every(CheckpointPolicy):
    """Keep windows and states at multiples of some tokens, and where the default does.

    A state is there only if a chunk ends at the multiple: chunks are not cut for it.

    Source: vLLM, `--prefix-cache-retention-interval`.

    Options:
        tokens: the distance, a multiple of the block that is whole in all groups.
    """

    name: ClassVar[str] = "every"

    tokens: int = attrs.field(validator=[instance_of(int), ge(1)])

    @property
    def interval(self) -> int | None:  # type: ignore[override]
        """The distance."""
        return self.tokens
