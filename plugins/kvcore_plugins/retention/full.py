"""Retention of everything."""

from __future__ import annotations

from typing import ClassVar

from kvcore import RetentionPolicy


class Full(RetentionPolicy):
    """Keep everything, at no cost, as without a policy: the reference of comparisons."""

    name: ClassVar[str] = "full"
