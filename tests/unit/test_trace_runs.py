import re
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.trace import decode_runs, encode_runs

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
def test_ids_are_written_in_the_one_maximal_form(ids, runs):
    """From left to right every run is as long as it can be; a single block is [x, 1]."""
    assert encode_runs(array("i", ids)) == runs


@given(st.lists(st.integers(0, 30), unique=True))
def test_decoding_brings_the_ids_back(ids):
    """What `encode_runs` writes, `decode_runs` accepts, and it stands for the same ids."""
    ids = array("i", ids)
    assert decode_runs(encode_runs(ids)) == ids


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(-5, 5)), max_size=4))
def test_only_the_maximal_form_is_accepted(runs):
    """Runs that decode are those that their ids encode to."""
    try:
        ids = decode_runs(runs)
    except ValueError:
        return
    if len(set(ids)) == len(ids):
        assert encode_runs(ids) == runs


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
    """A run that is empty, not maximal or out of range is an error that says which."""
    with pytest.raises(ValueError, match=re.escape(reason)):
        decode_runs(runs, 8)
