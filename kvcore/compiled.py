"""What compiled modules need: marks for the compiler, and division as Python has it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

__all__ = ["divided", "mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:
    Class = TypeVar("Class", bound=type)

    def mypyc_attr(**_: bool) -> Callable[[Class], Class]:
        """Return a decorator that leaves a class as it is."""
        return lambda cls: cls


divided: Callable[[int, int], float] = operator.truediv
"""Divides integers of any size, rounding once. Compiled, `/` makes doubles of both first."""
