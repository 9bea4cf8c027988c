"""Helpers of compiled modules: marks for the compiler, exact division."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

__all__ = ["Count", "Nanoseconds", "divided", "mypyc_attr"]

COMPILING = False
"""True for the compiler alone, by an option in `hatch_build.py`."""

if not COMPILING:
    Count: TypeAlias = int
    """A whole number from a user. Compiled code accepts any object, and checks it itself."""
    Nanoseconds: TypeAlias = int
    """A time from a user, checked in the same way."""
else:
    Count: TypeAlias = Any
    Nanoseconds: TypeAlias = Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    Class = TypeVar("Class", bound=type)

    def mypyc_attr(**_: bool) -> Callable[[Class], Class]:
        """Return a decorator that returns its class unchanged."""
        return lambda cls: cls


divided: Callable[[int, int], float] = operator.truediv
"""Divides integers of any size, rounding once. Compiled `/` rounds both to doubles first."""
