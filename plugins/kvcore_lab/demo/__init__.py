"""Demonstrations: generation with and without a cache, attention of one head."""

from kvcore_lab.demo.caching import (
    CachingReport,
    DenseSequenceCache,
    Generation,
    NoCache,
    PagedSequenceCache,
    RecordingCache,
    causal_attention,
    generate,
    with_and_without_cache,
)
from kvcore_lab.demo.one_head import WORKED_EXAMPLE, OneHead, head_sections

__all__ = [
    "WORKED_EXAMPLE",
    "CachingReport",
    "DenseSequenceCache",
    "Generation",
    "NoCache",
    "OneHead",
    "PagedSequenceCache",
    "RecordingCache",
    "causal_attention",
    "generate",
    "head_sections",
    "with_and_without_cache",
]
