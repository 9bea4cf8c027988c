import re
from pathlib import Path

import pytest
from helpers.traces import record, serve

from kvcore.trace import EVENTS, read_events
from kvcore.trace.events import COMMON, fault, is_key

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "trace.md").read_text("utf-8")

FREE = {"n": 3, "t": 0, "event": "FREE", "seq": 1, "runs": [[0, 2]], "reason": "close"}


def rows(heading):
    """Return the table under a heading of the reference: what each field holds."""
    section = PAGE.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \| ", section, re.MULTILINE))


def described(event):
    """Return what each field of an event holds, but for those that all lines have."""
    required = {name: kind.says for name, kind in event.required.items()}
    optional = {name: f"{kind.says}, or left out" for name, kind in event.optional.items()}
    return {k: v for k, v in (required | optional).items() if k not in COMMON}


@pytest.mark.parametrize("event", EVENTS)
def test_the_reference_describes_every_field_of(event):
    """The page has each event with each of its fields, what it holds, and no others."""
    assert rows(f"### {event}") == described(EVENTS[event])


def test_the_reference_describes_what_a_sequence_evicts():
    """Likewise the fields of the other scope, which have a table of their own."""
    assert rows("#### EVICT of scope `sequence`") == described(EVENTS["EVICT"].sequence)


def test_the_reference_describes_what_every_line_has():
    """The page has the three fields that every line has."""
    assert rows("## What every line has") == {k: kind.says for k, kind in COMMON.items()}


def test_the_reference_describes_no_other_event():
    """The page has no event that is gone."""
    assert re.findall(r"^### ([A-Z_]+)$", PAGE, re.MULTILINE) == list(EVENTS)


def test_what_the_cache_writes_is_of_the_schema(tmp_path):
    """Every line of a recorded run has the fields of its event, and no others."""
    path = record(tmp_path / "trace.jsonl")
    assert [fault(line) for line in read_events(path)] == [None] * 49


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seq": None}, "FREE field 'seq' must be an integer from 0 on, not None"),
        ({"seq": True}, "FREE field 'seq' must be an integer from 0 on, not True"),
        ({"seq": -1}, "FREE field 'seq' must be an integer from 0 on, not -1"),
        ({"runs": [[0]]}, "FREE field 'runs' must be a list of runs [first, count], not [[0]]"),
        ({"runs": [[0, 1.5]]}, "FREE field 'runs' must be a list of runs"),
        ({"runs": 3}, "FREE field 'runs' must be a list of runs"),
        ({"runs": ["ab"]}, "FREE field 'runs' must be a list of runs"),
        ({"reason": "whim"}, "FREE field 'reason' must be one of close, duplicate, rollback"),
        ({"first": "0"}, "FREE field 'first' must be an integer from 0 on, not '0'"),
        ({"colour": 1}, "FREE has an unknown field 'colour'"),
        ({"event": "GIVE"}, "unknown event 'GIVE'; there are: HEADER, REQUEST"),
        ({"event": ["FREE"]}, "unknown event ['FREE']"),
    ],
)
def test_a_fault_is_told(change, reason):
    """A line that is not of the schema is told with event, field, what it must be and is."""
    assert reason in fault(FREE | change)


@pytest.mark.parametrize("field", FREE)
def test_a_missing_field_is_told(field):
    """Each field of an event must be there."""
    reason = fault({name: value for name, value in FREE.items() if name != field})
    assert reason == f"FREE has no field {field!r}" or "unknown event None" in reason


@pytest.mark.parametrize("hint", [3, [0, 4, 50], [0, "end", 50, None], [0, 4, None, None]])
def test_a_retention_hint_has_four_parts(hint):
    """Start, end or null, priority, and nanoseconds or null: anything else is told."""
    request = {"id": 1, "prompt": 4, "output": 0, "keys": [], "key_tokens": 4}
    line = {"n": 1, "t": 0, "event": "REQUEST", **request}
    assert fault({**line, "retention": [[0, None, 50, None], [4, 8, 50, 9]]}) is None
    assert "REQUEST field 'retention' must be a list of [start," in fault(
        {**line, "retention": [hint]}
    )


@pytest.mark.parametrize("slo", [3, {"ttft": 0}, {"tpot": 1.5}, {"patience": 1}])
def test_expectations_are_whole_nanoseconds(slo):
    """Any of three times in whole nanoseconds above 0, or none: anything else is told."""
    request = {"id": 1, "prompt": 4, "output": 0, "keys": [], "key_tokens": 4}
    line = {"n": 1, "t": 0, "event": "REQUEST", **request}
    assert fault({**line, "slo": {"ttft": 1, "tpot": 2, "deadline": 3}}) is None
    assert fault({**line, "slo": {}}) is None
    assert "REQUEST field 'slo' must be an object of any of ttft, tpot, deadline" in fault(
        {**line, "slo": slo}
    )


def test_what_a_server_does_is_of_the_schema(tmp_path):
    """Every line of a run with a clock has the fields of its event, and no others."""
    path = serve(tmp_path / "trace.jsonl")
    assert [fault(line) for line in read_events(path)] == [None] * 37


def test_a_line_is_an_object():
    """Other JSON is no line."""
    assert fault([1]) == "a line must be a JSON object, not [1]"


def test_what_is_told_is_not_the_whole_value():
    """A huge value is cut short in the reason."""
    assert len(fault(FREE | {"runs": [[0, "x"]] * 1000})) < 150


@pytest.mark.parametrize("key", [0, 2**63 - 1, "00ff" * 8])
def test_keys(key):
    """A key in JSON is an int below 2**63, or 32 hex digits."""
    assert is_key(key)


@pytest.mark.parametrize(
    "key", [-1, 2**63, True, 1.0, None, "00", "zz" * 16, "0 " * 16, b"0" * 32]
)
def test_no_keys(key):
    """Anything else is no key."""
    assert not is_key(key)
