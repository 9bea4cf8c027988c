"""Retention of everything."""

from __future__ import annotations

from typing import ClassVar

from kvcore import RetentionPolicy


class Full(RetentionPolicy):
    """Keep everything: what others are compared with. As without any policy, at no cost."""

    name: ClassVar[str] = "full"
