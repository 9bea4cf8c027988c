"""Block ids in a trace, written as runs."""

import re
from array import array
from itertools import pairwise, product

import orjson
import pytest
from helpers.native import needs_core
from hypothesis import given
from hypothesis import strategies as st

from kvcore.native import library
from kvcore.trace import decode_runs, encode_runs, fields
from kvcore_plugins.traces.expansion import join_runs

CASES = [
    ([], []),
    ([5], [(5, 1)]),
    ([0, 1, 2], [(0, 3)]),
    ([9, 8, 7], [(9, -3)]),
    ([9, 8, 7, 3], [(9, -3), (3, 1)]),
    ([4, 6, 7, 8, 5], [(4, 1), (6, 3), (5, 1)]),
    ([1, 2, 0, 3], [(1, 2), (0, 1), (3, 1)]),
    ([3, 2, 4, 5], [(3, -2), (4, 2)]),
]


@pytest.mark.parametrize(("ids", "runs"), CASES)
def test_ids_are_encoded_in_maximal_runs(ids, runs):
    """From left to right every run is as long as possible; a single block is [x, 1]."""
    assert encode_runs(array("i", ids)) == runs


@given(st.lists(st.integers(0, 30), unique=True))
def test_decoded_runs_are_the_encoded_ids(ids):
    """`decode_runs` returns the ids that `encode_runs` has encoded."""
    ids = array("i", ids)
    assert decode_runs(encode_runs(ids)) == ids


NEIGHBOURS = st.lists(st.integers(0, 12), unique=True)


ARRAYS = st.lists(
    st.one_of(NEIGHBOURS, st.permutations(range(6)), st.just([4, 5, 3, 6, 2]))
).map(lambda lists: [array("i", ids) for ids in lists])


def rendered(arrays):
    """Return the runs of each of `arrays` as JSON."""
    return [orjson.dumps(encode_runs(ids)) for ids in arrays]


@needs_core
@given(ARRAYS)
def test_the_core_renders_the_runs_of_an_array(arrays):
    """The core in C finds the runs that Python finds."""
    assert list(fields.render_all_runs(arrays)) == rendered(arrays)


@needs_core
def test_the_core_renders_the_largest_ids():
    """The core renders runs of the largest block ids, up and down; a list is refused."""
    ids = array("i", [2**31 - 1, 2**31 - 2, 0, 2**31 - 3])
    assert library().render_runs(ids) == b"[[2147483647,-2],[0,1],[2147483645,1]]"
    with pytest.raises(TypeError):
        library().render_runs([1, 2])


def test_runs_are_rendered_without_the_core(monkeypatch):
    """Without the core in C runs are rendered by Python."""
    monkeypatch.setattr(fields, "library", lambda: None)
    arrays = [array("i", ids) for ids, _ in CASES]
    assert list(fields.render_all_runs(arrays)) == rendered(arrays)


@given(NEIGHBOURS, st.lists(st.integers(0, 12)))
def test_joined_runs_are_those_of_all_ids(ids, cuts):
    """The runs of parts, joined, are the runs of the whole."""
    borders = [0, *sorted(cuts), len(ids)]
    parts = [encode_runs(array("i", ids[a:b])) for a, b in pairwise(borders)]
    assert join_runs(parts) == encode_runs(array("i", ids))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_only_the_maximal_form_is_accepted(length):
    """Runs of distinct ids are accepted exactly if their ids encode to them.

    The runs are all combinations of small ones.
    """
    accepted = 0
    for runs in product(product(range(5), range(-3, 4)), repeat=length):
        steps = [(first, count, 1 if count > 0 else -1) for first, count in runs]
        ids = [id_ for first, count, step in steps for id_ in range(first, first + count, step)]
        if len(set(ids)) < len(ids):
            continue
        try:
            found = list(decode_runs(runs, 6))
        except ValueError:
            found = None
        maximal = set(ids) <= set(range(6)) and encode_runs(array("i", ids)) == list(runs)
        assert found == (ids if maximal else None)
        accepted += maximal
    assert accepted >= 20


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([[3, 0]], "none is no run"),
        ([[3, -1]], "a single block is [3, 1]"),
        ([[3, 2], [5, 1]], "could be longer"),
        ([[3, 1], [2, 1]], "could be longer"),
        ([[3, -2], [1, 4]], "could be longer"),
        ([[1, -3]], "ids, which are 0 to 7"),
        ([[6, 3]], "ids, which are 0 to 7"),
        ([[8, 1]], "ids, which are 0 to 7"),
        ([[0, 10**12]], "ids, which are 0 to 7"),
    ],
)
def test_other_forms_are_refused(runs, reason):
    """A run that is empty, not maximal or out of range raises ValueError with the reason."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        decode_runs(runs, 8)
