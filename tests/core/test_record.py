"""The base of data classes shows fields as attrs does."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from kvcore.record import Record


def fields():
    """Return the fields of a class: shown, hidden, shown by a function, and private."""
    return {
        "first": attrs.field(),
        "hidden": attrs.field(default=0, repr=False),
        "counted": attrs.field(factory=list, repr=lambda value: f"<{len(value)}>"),
        "_own": attrs.field(default=None),
    }


ByAttrs = attrs.make_class("Shown", fields())
ByBase = attrs.make_class("Shown", fields(), (Record,), repr=False)


@given(st.integers() | st.text() | st.none(), st.lists(st.integers()))
def test_fields_are_shown_as_attrs_shows_them(first, counted):
    """A record has the text that attrs would make, functions of fields included."""
    both = (cls(first, counted=counted, own=first) for cls in (ByAttrs, ByBase))
    assert len({*map(repr, both)}) == 1
