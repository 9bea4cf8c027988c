"""What compiled modules need: marks for the compiler, types, and division as Python has it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

__all__ = ["Count", "Nanoseconds", "divided", "mypyc_attr"]

COMPILING = False
"""True for the compiler alone, which is told so (`hatch_build.py`)."""

if not COMPILING:
    Count: TypeAlias = int
    """A whole number that a user gives. Compiled code takes anything, and refuses it itself."""
    Nanoseconds: TypeAlias = int
    """A time that a user gives, alike."""
else:
    Count: TypeAlias = Any
    Nanoseconds: TypeAlias = Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    Class = TypeVar("Class", bound=type)

    def mypyc_attr(**_: bool) -> Callable[[Class], Class]:
        """Return a decorator that leaves a class as it is."""
        return lambda cls: cls


divided: Callable[[int, int], float] = operator.truediv
"""Divides integers of any size, rounding once. Compiled, `/` makes doubles of both first."""
