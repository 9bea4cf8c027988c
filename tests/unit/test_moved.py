"""The names of the release before: found in their rooms, with a notice."""

from importlib import import_module

import pytest

from kvcore.moved import MOVED

pytest.importorskip("kvcore_lab")


@pytest.mark.parametrize("room", MOVED)
def test_names_that_moved_work_with_a_notice(room):
    """A name of a room is the object of today, with one FutureWarning for its user."""
    for module, names in MOVED[room].items():
        for name in names.split():
            with pytest.warns(FutureWarning, match=f"{name} is {module}.{name} now") as notices:
                former = getattr(import_module(room), name)
            assert former is getattr(import_module(module), name)
            assert [notice.filename for notice in notices] == [__file__]
