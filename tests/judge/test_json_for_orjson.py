"""The stand-in for `orjson` in the browser writes and reads what `orjson` does."""

import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore_judge.browser import json_for_orjson

NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats()
SMALL = st.builds(math.ldexp, st.floats(-1, 1), st.integers(-60, 60))
TEXTS = st.text() | st.sampled_from(["1e-05", "NaN", '"1e+20', "\\", "9" * 20, "a 2e-07 b"])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | SMALL | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)
OPTIONS = ("OPT_INDENT_2", "OPT_SORT_KEYS", "OPT_APPEND_NEWLINE")
BROKEN = [b"", b"{", b"nul", b'"\xff"', b"NaN", b"-Infinity", b"[1,]", b"1 2", b"[" * 100_000]
BROKEN += [b"1e999", b"[-1e400]", b"9" * 400, rb'"\ud800"', rb'{"\uDFFF": 1}', "\ud800"]


@given(value=VALUES, names=st.sets(st.sampled_from(OPTIONS)))
def test_bytes_are_those_of_orjson(value, names):
    """Any value is written in the same bytes, with any options."""
    written = [
        module.dumps(value, option=sum(getattr(module, name) for name in names))
        for module in (orjson, json_for_orjson)
    ]
    assert written[0] == written[1]


@given(value=VALUES | st.integers())
def test_values_are_those_of_orjson(value):
    """A written value is read as `orjson` reads it, with the same types."""
    text = str(value).encode() if type(value) is int else orjson.dumps(value)
    assert repr(json_for_orjson.loads(text)) == repr(orjson.loads(text))
    assert repr(json_for_orjson.loads(text.decode())) == repr(orjson.loads(text))


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_json_is_refused(text):
    """Both raise JSONDecodeError, a ValueError, for what is no JSON."""
    for module in (orjson, json_for_orjson):
        with pytest.raises(module.JSONDecodeError):
            module.loads(text)
        assert issubclass(module.JSONDecodeError, ValueError)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, {1, 2}, "\ud800"])
def test_what_has_no_json_is_refused(value):
    """Both raise TypeError for integers beyond 64 bits, objects, and half a surrogate pair."""
    for module in (orjson, json_for_orjson):
        with pytest.raises(TypeError):
            module.dumps(value)


def test_other_objects_are_converted_by_default():
    """`default` is called for what has no JSON, as by `orjson`."""
    for module in (orjson, json_for_orjson):
        assert module.dumps({"a": {7}}, default=sorted) == b'{"a":[7]}'


def test_a_fragment_is_written_as_it_is():
    """A text of JSON within a value stands there as it is, as the runs of blocks do."""
    for module in (orjson, json_for_orjson):
        line = {"n": 1, "runs": module.Fragment(b"[[3,-2],[9,1]]")}
        assert module.dumps(line) == b'{"n":1,"runs":[[3,-2],[9,1]]}'
