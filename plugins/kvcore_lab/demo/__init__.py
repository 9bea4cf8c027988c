"""Demonstrations: generation with and without a cache, attention of one head."""

from kvcore_lab.demo.one_head import OneHead

__all__ = ["OneHead"]
