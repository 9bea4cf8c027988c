"""The workload `weka`: sessions of agents with tools and subagents."""

import json
from pathlib import Path
from random import Random

import orjson
import pytest

from kvcore.errors import InputError
from kvcore_plugins.workload import Weka

DATA = Path(__file__).parents[1] / "data"
SECOND = 10**9


def turn(t, keys=(1,), **fields):
    """Return a request in the format of the file."""
    return {"t": t, "type": "n", "in": 100, "out": 7, "hash_ids": list(keys)} | fields


def session(name, *requests, **fields):
    """Return a session in the format of the file."""
    head = {"id": name, "block_size": 64, "hash_id_scope": "local"}
    return head | {"requests": list(requests)} | fields


def write(path, *sessions):
    """Write `sessions` to `path`, one a line."""
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in sessions))
    return path


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the requests of some sessions."""

    def read(*sessions, **options):
        return list(Weka(write(tmp_path / "t.jsonl", *sessions), **options))

    return read


def test_every_request_of_the_extract_is_read():
    """Every request of the recorded sessions is read, those of subagents included."""
    requests = list(Weka(DATA / "weka_sessions.jsonl.gz"))
    sessions = [request.session for request in requests]
    assert len(requests) == 24
    assert sessions.count("trace_0226") == 9
    assert sessions.count("trace_0254") == 9
    assert sessions.count("trace_0620") == 6


def test_without_a_path_the_sessions_that_come_with_kvcore_are_read():
    """Without a path the bundled sessions are read, and a trace does not name their place."""
    workload = Weka()
    assert len({request.session for request in workload}) == 26
    assert workload.options() == {"stagger": 60.0, "seed": 0}
    assert workload.digest == "73ab12ed21261e55675ee9b1fc61bf1c"


def test_recorded_tool_calls_are_read(read):
    """A turn that stopped to call a tool or a subagent has it as its `tool`."""
    agent = {"t": 3, "type": "subagent", "requests": [turn(0, stop="end_turn")]}
    calls = [turn(0, stop="tool_use"), turn(2, stop="tool_use"), agent]
    requests = read(session("a", *calls, turn(9, stop="end_turn"), turn(20)))
    tools = ["tool_use", "subagent", None, None, None]
    assert [request.tool for request in requests] == tools


def test_sessions_of_global_scope_share_keys(read):
    """Equal ids in sessions of global scope have equal keys."""
    scope = {"hash_id_scope": "global"}
    one, two = read(session("a", turn(0, [5]), **scope), session("b", turn(0, [5]), **scope))
    assert one.keys == two.keys == [5]


def test_keys_of_turns_that_extend_each_other_are_stored_once(read):
    """The keys of turns that extend each other are stored once."""
    turns = [turn(0, [3, 1]), turn(1, [3, 1]), turn(2, [3, 1, 40, 41], **{"in": 999})]
    one, two, three = read(session("a", *turns))
    assert one.keys == two.keys == three.keys[:2]
    assert one.keys.path is two.keys.path is three.keys.path


def test_turns_have_the_keys_of_their_line(tmp_path):
    """Each turn has the keys of its line, whatever they share with other turns."""
    random = Random(0)
    lists = [[], [7], [], [70], [7, 70], [7, 7], [7]]
    for _ in range(300):
        before = random.choice(lists[-3:])
        kept = before[: random.randint(0, len(before))]
        lists.append(kept + [random.choice((1, 2, 12, 21, 2**32 - 1)) for _ in range(3)])
    turns = [turn(0, keys, **{"in": 64_000}) for keys in lists]
    for blank in (b"", b" "):
        path = write(tmp_path / "t.jsonl", session("a", *turns))
        path.write_bytes(path.read_bytes().replace(b",", b"," + blank))
        found = [[key - (1 << 32) for key in request.keys] for request in Weka(path)]
        assert found == lists


def test_unknown_fields_are_ignored(read):
    """Fields of an entry that are not needed are ignored."""
    (request,) = read(session("a", turn(0, [1, 2], requests=None) | {"in": 128}))
    assert request.keys == [1 << 32 | 1, 1 << 32 | 2]


@pytest.mark.parametrize(
    ("agents", "reason"),
    [
        (140, "expected values in one another up to 250 deep"),
        # Some Pythons parse that deep: then the entries are counted.
        (900, "(not JSON: depth limit exceeded|expected values in one another up to 250 deep)"),
    ],
)
def test_subagents_nested_too_deep_are_refused(tmp_path, agents, reason):
    """Subagents nested too deep raise InputError with the line."""
    agent = json.dumps(turn(0))
    for _ in range(agents):
        agent = f'{{"t": 0, "type": "subagent", "requests": [{agent}]}}'
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(session("a", 7)).replace("7", agent, 1))
    with pytest.raises(InputError, match=rf"t\.jsonl:1: {reason}"):
        list(Weka(path))


def test_turns_form_a_closed_loop(read):
    """Each turn except the first has the turn before as `after`, and its think time."""
    first, second = read(session("a", turn(0), turn(30.5, api_time=2.5, think_time=19.0)))
    assert (first.id, first.after, first.think_time) == ("a/0", None, 0)
    assert (second.id, second.after, second.think_time) == ("a/1", "a/0", 19 * SECOND)
    assert second.arrival == 30_500_000_000
    assert second.session == "a"


def test_times_of_a_subagent_are_relative_to_its_start(read):
    """The times of a subagent's requests are relative to the start of the subagent."""
    agent = {"t": 20.0, "type": "subagent", "requests": [turn(0), turn(3, think_time=1.0)]}
    requests = read(session("a", turn(0, api_time=5.0), agent, turn(21, think_time=16.0)))
    assert [(r.id, r.arrival // SECOND, r.after, r.think_time // SECOND) for r in requests] == [
        ("a/0", 0, None, 0),
        ("a/1/0", 20, "a/0", 15),
        ("a/2", 21, "a/0", 16),
        ("a/1/1", 23, "a/1/0", 1),
    ]


def test_a_nested_subagent_starts_after_its_parent(read):
    """A nested subagent starts after the last request of its parent."""
    inner = {"t": 2.0, "type": "subagent", "requests": [turn(1)]}
    outer = {"t": 10.0, "type": "subagent", "requests": [turn(0), inner]}
    requests = read(session("a", turn(0), outer))
    assert [(r.id, r.arrival // SECOND, r.after) for r in requests] == [
        ("a/0", 0, None),
        ("a/1/0", 10, "a/0"),
        ("a/1/1/0", 13, "a/1/0"),
    ]


def test_sessions_are_merged_by_arrival(read):
    """Requests of overlapping sessions are merged in the order of arrival."""
    sessions = [session(name, turn(0), turn(1_000)) for name in "abc"]
    requests = read(*sessions, stagger=1.0)
    arrivals = [request.arrival for request in requests]
    assert arrivals == sorted(arrivals)
    assert [request.session for request in requests] == ["a", "b", "c", "a", "b", "c"]


def test_all_sessions_start_at_once_without_a_stagger(read):
    """With a stagger of 0 all sessions start at 0, in the order of the file."""
    requests = read(*[session(name, turn(0), turn(1)) for name in "ab"], stagger=0)
    assert [request.id for request in requests] == ["a/0", "b/0", "a/1", "b/1"]


def test_starts_of_sessions_depend_on_the_seed(read):
    """Another seed gives other starts, except for the first session's at 0."""
    sessions = [session(str(index), turn(0)) for index in range(5)]
    one, same, other = (
        [request.arrival for request in read(*sessions, seed=seed)] for seed in (1, 1, 2)
    )
    assert one == same != other
    assert one[0] == other[0] == 0


def test_sessions_are_parsed_when_they_start(tmp_path):
    """A session is parsed only when it starts, and its errors are raised then."""
    path = write(tmp_path / "t.jsonl", session("a", turn(0), turn(0.001)), session("b"))
    workload = iter(Weka(path, stagger=1e6))
    assert [next(workload).id, next(workload).id] == ["a/0", "a/1"]
    with pytest.raises(InputError, match=r"t\.jsonl:2"):
        next(workload)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (session("a", turn(0)), "field 'id': expected a session that is not on an earlier"),
        (session(7, turn(0)), "field 'id': expected a text, got 7"),
        (session("b", turn(0), block_size=16), "field 'block_size': expected 64, got 16"),
        (
            session("b", turn(0), hash_id_scope="x"),
            "field 'hash_id_scope': expected 'local' or",
        ),
        (session("b"), r"field 'requests': expected at least one request, got \[\]"),
        (session("b", requests=3), "field 'requests': expected a list of objects, got 3"),
        (session("b", None), r"field 'requests\[0\]': expected an object, got null"),
        (session("b", turn(5), turn(4)), r"field 'requests\[1\]\.t': expected no earlier time"),
        (session("b", turn(-1)), r"field 'requests\[0\]\.t': expected a number of seconds"),
        (session("b", turn("0")), r"field 'requests\[0\]\.t': expected a number of seconds"),
        (session("b", turn(1e300)), r"field 'requests\[0\]\.t': expected a number of seconds"),
        (session("b", turn(0, api_time=-1)), r"field 'requests\[0\]\.api_time': expected"),
        (
            session("b", turn(0), turn(0, think_time=True)),
            r"field 'requests\[1\]\.think_time': expected a number of seconds, .*, got true",
        ),
        (session("b", turn(0, [1]), turn(0, [1, -1])), r"field 'requests\[1\]\.hash_ids\[1\]'"),
        (session("b", turn(0, 'a"')), r"field 'requests\[0\]\.hash_ids\[0\]': expected"),
        (session("b", turn(0) | {"hash_ids": 12}), "field .*hash_ids': expected a list"),
        (session("b", turn(0), turn(0) | {"hash_ids": 5}), "field .*hash_ids': expected a"),
        (session("b", turn(0, [2**32])), r"field 'requests\[0\]\.hash_ids\[0\]': expected"),
        (
            session("b", turn(0, [1, 2, 3])),
            r"field 'requests\[0\]\.hash_ids': expected at most 2",
        ),
        (session("b", turn(0) | {"in": 0}), r"field 'requests\[0\]\.in': expected"),
        (session("b", turn(0) | {"out": None}), r"field 'requests\[0\]\.out': .* got null"),
        (
            session("b", {"t": 0, "type": "subagent", "requests": [turn(0), {}]}),
            r"field 'requests\[0\]\.requests\[1\]\.t': .* the field is missing",
        ),
    ],
)
def test_bad_field_is_named(tmp_path, line, complaint):
    """A bad field raises InputError with file, line and the path to the field."""
    path = write(tmp_path / "t.jsonl", session("a", turn(0)), line)
    with pytest.raises(InputError, match=rf"t\.jsonl:2: {complaint}"):
        list(Weka(path))


def test_a_large_number_is_shown_in_full(tmp_path):
    """An error shows an integer of more than 64 bits in full."""
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"id": {2**70}, "block_size": 64, "requests": []}}')
    with pytest.raises(InputError, match=f"field 'id': expected a text, got {2**70}"):
        list(Weka(path))
