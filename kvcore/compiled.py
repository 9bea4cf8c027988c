"""What the compiler of the hot path is told about classes. To Python it means nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    Class = TypeVar("Class", bound=type)

    def mypyc_attr(**_: bool) -> Callable[[Class], Class]:
        """Return a decorator that leaves a class as it is."""
        return lambda cls: cls
