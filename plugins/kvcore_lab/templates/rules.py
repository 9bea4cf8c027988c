"""Rules of an engine: what it reserves, when it publishes blocks, which request it preempts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import attrs

from kvcore import Rules


@attrs.define(slots=False, kw_only=True, eq=False)
class Example(Rules):
    """Admit a prompt as soon as its first chunk fits, and cache all that is generated."""

    name: ClassVar[str] = "example"
    defaults: ClassVar[dict[str, Any]] = {"max_tokens": 2048, "max_seqs": 128, "watermark": 0.0}

    reserve: Literal["prompt", "chunk", "first-chunk"] = "first-chunk"
    generated: Literal["keyed", "cached"] = "cached"
