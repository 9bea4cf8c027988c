"""Demonstrations: generation with and without a cache, attention of one head."""

from kvcore.demo.caching import (
    Dense,
    Generation,
    Keeping,
    Nothing,
    Paged,
    causal_attention,
    generate,
    with_and_without_cache,
)
from kvcore.demo.one_head import WORKED_EXAMPLE, OneHead
from kvcore.demo.report import CachingReport, OneHeadReport

__all__ = [
    "WORKED_EXAMPLE",
    "CachingReport",
    "Dense",
    "Generation",
    "Keeping",
    "Nothing",
    "OneHead",
    "OneHeadReport",
    "Paged",
    "causal_attention",
    "generate",
    "with_and_without_cache",
]
