"""The base of data classes that are made at every start."""

from __future__ import annotations

from typing import Any

import attrs


class Record:
    """Base of data classes of attrs, whose fields it shows as attrs does.

    attrs would compile a `__repr__` for each class, which takes a third of the time to make it.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the class and its fields, as code that builds an equal object."""
        fields: Any = attrs.fields(type(self))  # type: ignore[arg-type]  # all are of attrs
        shown = ((f.name, repr if f.repr is True else f.repr) for f in fields if f.repr)
        values = (f"{name}={text(getattr(self, name))}" for name, text in shown)
        return f"{type(self).__qualname__.rpartition('>.')[2]}({', '.join(values)})"
