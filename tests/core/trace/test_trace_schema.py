"""The schema of trace lines, and its agreement with the reference and the recorder."""

import inspect
import json
import re
from array import array
from pathlib import Path

import msgspec
import pytest
from helpers.traces import CACHE, drop_blocks, lines, record, serve, serve_tiers

from kvcore import read_events
from kvcore.cache import Recorder
from kvcore.request import Request
from kvcore.trace import Trace
from kvcore.trace.events import (
    CLUSTER_EVENTS,
    EVENTS,
    GROUPED_EVENTS,
    Drop,
    Header,
    decode,
    describe_fields,
    find_fault,
)
from kvcore_cluster.trace import ClusterTrace

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"

PAGE = (REFERENCE / "trace.md").read_text("utf-8")

COMMON = ["n", "t", "event", "replica"]

FREE = {"n": 3, "t": 0, "event": "FREE", "seq": 1, "runs": [[0, 2]], "reason": "close"}


def rows(heading):
    """Return the table under a heading of the reference: the type of each field."""
    section = PAGE.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \| ", section, re.MULTILINE))


def described(event):
    """Return the type of each field of an event, without those that all lines have."""
    return {
        name: field.holds if field.required else f"{field.holds}, or left out"
        for name, field in describe_fields(event).items()
        if name not in COMMON
    }


@pytest.mark.parametrize("event", EVENTS)
def test_the_reference_describes_every_field_of_an_event(event):
    """The reference describes exactly the fields of each event, with their types."""
    assert rows(f"### {event}") == described(EVENTS[event])


def test_the_reference_describes_evictions_of_a_sequence():
    """The reference has a table of its own for EVICT of scope `sequence`."""
    assert rows("#### EVICT of scope `sequence`") == described(Drop)


@pytest.mark.parametrize("event", GROUPED_EVENTS)
def test_the_reference_describes_the_lines_of_cache_groups(event):
    """The reference has a table of its own for each event with other fields for groups."""
    assert rows(f"### {event} of cache groups") == described(GROUPED_EVENTS[event])


def test_the_reference_describes_the_fields_of_every_line():
    """The reference describes the fields that every line has or may have."""
    fields = describe_fields(EVENTS["FORK"])
    expected = {name: fields[name].holds for name in COMMON}
    expected["replica"] += ", or left out"
    assert rows("## What every line has") == expected


def test_the_reference_describes_no_other_event():
    """The reference has a heading for each event, in order, and for no other."""
    assert re.findall(r"^### ([A-Z_]+)$", PAGE, re.MULTILINE) == list(EVENTS)


@pytest.mark.parametrize(("made", "count"), [(record, 49), (serve, 34), (serve_tiers, 90)])
def test_every_line_of_a_run_matches_the_schema(tmp_path, made, count):
    """Every line of a cache, of a server and of a server with tiers matches the schema."""
    path = made(tmp_path / "trace.jsonl")
    assert [find_fault(line) for line in lines(path)] == [None] * count


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
def test_a_fault_is_described_by_event_and_field(change, reason):
    """A line that breaks the schema is described by event, field, expected type and value."""
    assert reason in find_fault(FREE | change)


@pytest.mark.parametrize("field", FREE)
def test_a_missing_field_is_a_fault(field):
    """Leaving out any field of an event is a fault."""
    reason = find_fault({name: value for name, value in FREE.items() if name != field})
    if field == "event":
        assert reason.startswith("unknown event None; there are: HEADER, REQUEST")
    else:
        assert reason == f"FREE has no field {field!r}"


@pytest.mark.parametrize("hint", [3, [0, 4, 50], [0, "end", 50, None], [0, 4, None, None]])
def test_a_retention_hint_has_four_parts(hint):
    """A retention hint that is not a valid [start, end, priority, duration] is a fault."""
    request = {"id": 1, "prompt": 4, "output": 0, "keys": [], "key_tokens": 4}
    line = {"n": 1, "t": 0, "event": "REQUEST", **request}
    assert find_fault({**line, "retention": [[0, None, 50, None], [4, 8, 50, 9]]}) is None
    assert "REQUEST field 'retention' must be a list of [start," in find_fault(
        {**line, "retention": [hint]}
    )


@pytest.mark.parametrize("slo", [3, {"ttft": 0}, {"tpot": 1.5}, {"patience": 1}])
def test_an_slo_has_whole_nanoseconds(slo):
    """An SLO with other names, or with values that are no whole ns above 0, is a fault."""
    request = {"id": 1, "prompt": 4, "output": 0, "keys": [], "key_tokens": 4}
    line = {"n": 1, "t": 0, "event": "REQUEST", **request}
    assert find_fault({**line, "slo": {"ttft": 1, "tpot": 2, "deadline": 3}}) is None
    assert find_fault({**line, "slo": {}}) is None
    assert "REQUEST field 'slo' must be an object of any of ttft, tpot, deadline" in find_fault(
        {**line, "slo": slo}
    )


def test_the_description_of_a_fault_shortens_a_huge_value():
    """The description of a fault shortens a huge value."""
    assert len(find_fault(FREE | {"runs": [[0, "x"]] * 1000})) < 150


def keyed(key):
    """Return a KEYS line with one key."""
    return {"n": 0, "t": 0, "event": "KEYS", "request": 1, "keys": [key]}


@pytest.mark.parametrize("key", [0, 2**63 - 1, "00ff" * 8, "00FF" * 8])
def test_ints_and_hex_digits_are_keys(key):
    """A key in JSON is an int below 2**63 or 32 hex digits."""
    assert decode(json.dumps(keyed(key)).encode()).keys == [key]


@pytest.mark.parametrize(
    "key", [-1, 2**63, True, 1.0, None, "00", "zz" * 16, "0 " * 16, "0" * 32 + "\n"]
)
def test_other_values_are_no_keys(key):
    """Keys of any other type, range or spelling are refused."""
    with pytest.raises(ValueError, match="KEYS field 'keys' must be a list of integers"):
        decode(json.dumps(keyed(key)).encode())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not JSON: "),
        (b'{"n":0', "not JSON: unexpected end of data, at column 7"),
        (b"[1]", r"a line must be a JSON object, not \[1\]"),
        (b'{"n":0,"t":0,"event":"FORK","seq":1,"child":2.0}', "FORK field 'child' must be an"),
        (b'{"n":0,"t":0,"event":"FORK","seq":1}', "FORK has no field 'child'"),
        (b'{"n":0,"t":0,"event":"FORK","seq":1,"child":"\xff"}', "not JSON: "),
    ],
)
def test_bytes_that_are_no_line_are_refused(raw, reason):
    """Bytes that are no line of the schema raise ValueError with the words of the schema."""
    with pytest.raises(ValueError, match=f"^{reason}"):
        decode(raw)


def test_the_fields_of_a_line_may_have_any_order():
    """A line is decoded the same whatever the order of its fields."""
    line = {"scope": "sequence", "reason": "retention", "by": "window", "blocks": 1}
    line |= {"runs": [], "first": 0, "seq": 1, "event": "EVICT", "t": 0, "n": 3}
    found = decode(json.dumps(line).encode())
    assert type(found) is Drop
    assert (found.n, found.seq, found.by, found.blocks) == (3, 1, "window", 1)
    assert decode(json.dumps(dict(reversed(line.items()))).encode()) == found


def test_as_dict_returns_the_fields_of_a_line_in_order(tmp_path):
    """`as_dict` returns the fields of the line in the file, in their order."""
    for path in (record(tmp_path / "a"), serve(tmp_path / "b"), drop_blocks(tmp_path / "c")):
        text = path.read_text().splitlines()
        assert [json.dumps(json.loads(line)) for line in text] == [
            json.dumps(decode(line.encode()).as_dict()) for line in text
        ]


BLOCKS = {"tier": "disk", "request": "r", "first": 1, "blocks": 2}
"""Blocks of a request in a tier."""

CALLS = {
    "prefetch": {"request": "r", "seq": 1, "keys": [1, 2], "blocks": 1, "span": 2},
    "hit": {"request": "r", "seq": 1, "blocks": 2, "span": 3, "again": True},
    "miss": {"request": 1, "seq": 1, "block": 2, "why": "no keys", "again": True},
    "split": {"span": 1, "upper": 2, "at": 3},
    "alloc": {"seq": 1, "first": 2, "runs": array("i", [3])},
    "commit": {
        "seq": 1,
        "span": 2,
        "first": 3,
        "blocks": 4,
        "how": "grown",
        "generated": True,
    },
    "evict": {
        "span": 1,
        "runs": array("i", [5, 4]),
        "by": "lru",
        "requester": "r",
        "age": 2,
        "hits": 3,
        "reason": "expired",
    },
    "drop": {"seq": 1, "first": 2, "blocks": 3, "runs": array("i"), "by": "window"},
    "grow": {
        "grown": [(7, 1, 2, 3), (9, 2, 9, 4)],
        "by": "lru",
        "victims": [(7, 1, 0, 6)],
        "requesters": ["r"],
    },
    "compact": {
        "seq": 1,
        "tokens": 4,
        "held": 9,
        "runs": array("i", [3]),
        "new": array("i", [5, 6]),
        "ahead": 2,
    },
    "free": {
        "seq": 1,
        "runs": array("i", [1, 2]),
        "reason": "close",
        "first": 1,
        "forgotten": [(1, 2)],
        "compacted": 9,
    },
    "group_hit": {"request": "r", "seq": 1, "blocks": 2, "again": True},
    "group_alloc": {"seq": 1, "group": 0, "first": 2, "runs": array("i", [3])},
    "group_commit": {
        "seq": 1,
        "group": 0,
        "first": 3,
        "blocks": 4,
        "how": "copy",
        "generated": True,
    },
    "group_evict": {
        "group": 1,
        "runs": array("i", [5, 4]),
        "by": "lru",
        "requester": "r",
    },
    "group_free": {
        "seq": 1,
        "runs": array("i", [1, 2]),
        "reason": "passed",
        "group": 1,
        "first": 3,
    },
    "keep_slots": {"seq": 1, "windows": [4, 7], "state": 7},
    "tombstone": {"span": 4, "pool": "window", "requester": "r"},
    "fork": {"seq": 1, "child": 2},
    "copy": {"seq": 1, "block": 2, "source": 3, "to": 4},
    "first_token": {"request": "r", "seq": 1},
    "preempt": {"request": "r", "seq": 1, "how": "pause", "requester": 3},
    "resume": {"request": "r", "seq": 1},
    "recover": BLOCKS | {"request": "disk:1", "keys": [b"0123456789abcdef", 7]},
    "offload": BLOCKS | {"done": 3, "source": "host", "parked": True, "group": 0},
    "load_start": BLOCKS | {"seq": 1, "done": 4, "group": 0, "hit": 2},
    "load": BLOCKS | {"seq": 1, "group": 0, "hit": 2},
    "drop_from_tier": BLOCKS | {"reason": "capacity", "group": 0},
    "keys": {"request": "r", "keys": [b"0123456789abcdef", 7]},
    "finish": {"request": "r", "seq": 1, "output": 2, "output_keys": [b"0123456789abcdef"]},
    "reject": {"request": "r", "why": "too long"},
}
"""Arguments of each method of a recorder, with every field of its event."""

STRUCTS = {name.lower(): struct for name, struct in EVENTS.items()}
STRUCTS |= {"drop": Drop, "drop_from_tier": EVENTS["DROP"]}
STRUCTS["keep_slots"] = STRUCTS.pop("keep")
STRUCTS |= {f"group_{name.lower()}": struct for name, struct in GROUPED_EVENTS.items()}

GROUPED = {
    "prefix_cache_retention_interval": 0,
    "groups": [{"kind": "full", "block_size": 4, "window": None, "layers": 1}] * 2,
}


def test_a_recorder_has_a_method_for_each_event():
    """A recorder has a method for each event but HEADER, REQUEST, END and routing events."""
    of_clusters = {name.lower() for name in CLUSTER_EVENTS}
    assert STRUCTS.keys() - CALLS.keys() == {"header", "request", "end"} | of_clusters


def test_each_routing_event_is_written_by_a_method_of_a_cluster(tmp_path):
    """Each routing event is written by a cluster's method, with all of its fields."""
    path, asked = tmp_path / "trace.jsonl", Request(id="r", prompt_tokens=2, key_tokens=1)
    with Trace(path) as trace:
        cluster = ClusterTrace(trace)
        cluster.recorder(0).begin(**CACHE)
        cluster.begin({"name": "random", "options": {}}, routing={"view": "index"})
        cluster.request(asked, 1)
        cluster.route(1, asked, 0, 32, "prefill")
        cluster.transfer(1, asked, 0, 1, 2, 1024, 9)
        cluster.change(2, 0, "LEAVE")
        cluster.change(3, 0, "FAIL")
        cluster.change(4, 0, "RETURN")
        cluster.refuse(5, asked, "full")
        cluster.flush(6)
    header, _, *lines, reject, _ = read_events(path)
    names = ["ROUTE", "TRANSFER", "LEAVE", "FAIL", "RETURN"]
    assert [type(line) for line in lines] == [EVENTS[name] for name in names]
    for line in lines:
        fields = {*describe_fields(type(line))}
        # A transfer names two replicas in fields of its own.
        fields -= {"replica"} if line.event == "TRANSFER" else set()
        assert line.as_dict().keys() == fields
    assert (lines[0].request, lines[0].tokens, lines[0].replica) == ("r", 32, 0)
    assert (reject.request, reject.why, reject.replica) == ("r", "full", msgspec.UNSET)
    assert [record.count for record in header.replicas] == [1]
    assert header.plugins["router"].name == "random"


@pytest.mark.parametrize("method", CALLS)
def test_a_recorder_method_has_the_fields_of_its_event(method):
    """The parameters of a recorder method are the fields of its event.

    Their order is the same, and so are those with a default.
    """
    _, now, *parameters = inspect.signature(getattr(Recorder, method)).parameters.values()
    fields = [
        field
        for field in msgspec.structs.fields(STRUCTS[method])
        if field.name not in ("n", "t", "replica", "scope")
    ]
    reasons = {"drop": "reason", "group_evict": "reason"}
    left_out = {**reasons, "alloc": "evicted"}.get(method)
    fields = [field for field in fields if field.name != left_out]
    assert now.name == "now"
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    assert [parameter.name for parameter in parameters] == [field.name for field in fields]
    assert [parameter.default is parameter.empty for parameter in parameters] == [
        field.default is msgspec.NODEFAULT for field in fields
    ]


@pytest.mark.parametrize("method", CALLS)
def test_a_recorder_method_writes_its_event(method, tmp_path):
    """A recorder method writes all arguments in the order of the fields, without defaults."""
    given = CALLS[method]
    _, _, *parameters = inspect.signature(getattr(Recorder, method)).parameters.values()
    short = {p.name: given[p.name] for p in parameters if p.default is p.empty}
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        trace.begin(**CACHE)
        if method.startswith("group_"):
            trace.describe(cache_groups=GROUPED)
        getattr(trace, method)(7, **given)
        getattr(trace, method)(8, **short)
    grouped = method.startswith("group_")
    _, full, least, _ = (decode(raw, grouped=grouped) for raw in path.read_bytes().splitlines())
    assert type(full) is type(least) is STRUCTS[method]
    assert (full.t, least.t) == (7, 8)
    text = [list(json.loads(line)) for line in path.read_text().splitlines()]
    names = describe_fields(type(full)).keys() - {"replica", "evicted"}
    assert text[1] == [name for name in describe_fields(type(full)) if name in names]
    required = [field.name for field in describe_fields(type(full)).values() if field.required]
    assert text[2] == required
    for name, value in given.items():
        if name not in ("runs", "new", "keys", "output_keys"):
            assert getattr(full, name) == value


def test_a_header_requires_every_field_of_the_cache():
    """HEADER requires every field that describes the cache."""
    required = {field.name for field in describe_fields(Header).values() if field.required}
    assert required >= CACHE.keys()
