"""Values of a trace that no run has: each verb refuses them, by the types of the lines."""

import sys
from copy import deepcopy

import msgspec
import pytest
from helpers.commands import run_here
from helpers.pooled_traces import pooled_run
from helpers.traces import lines, seal, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.inspect import IntType, type_info

from kvcore import read_events
from kvcore.errors import TraceError
from kvcore.trace.events import EVENTS, Drop, Runs

EDGES = (2**63, 2**64 - 1)

VERBS = [
    ["replay"],
    ["explain", "--summary"],
    ["view", "-o", "out"],
    ["watch", "--speed", "inf"],
    ["plot", "--kind", "ages", "-o", "out.png"],
    ["plot", "--kind", "timeline", "-o", "out.png"],
    *(["export", "--to", kind, "--out", "out"] for kind in ("vllm", "dynamo", "perfetto")),
]


def integers(kind):
    """Yield the integer types within the type of a field, without those of runs."""
    if kind == type_info(Runs):
        return
    if isinstance(kind, IntType):
        yield kind
    for name in ("type", "item_type", "key_type", "value_type"):
        if (inner := getattr(kind, name, None)) is not None:
            yield from integers(inner)
    for name in ("types", "item_types"):
        for inner in getattr(kind, name, ()):
            yield from integers(inner)
    for field in getattr(kind, "fields", ()):
        yield from integers(field.type)


@pytest.mark.parametrize("struct", [*EVENTS.values(), Drop], ids=lambda each: each.__name__)
def test_every_integer_of_a_line_has_64_bits(struct):
    """No field of a line takes an integer that overflows where readers count.

    `decode_runs` checks those of runs.
    """
    found = [kind for field in msgspec.inspect.type_info(struct).fields
             for kind in integers(field.type)]  # fmt: skip
    assert found
    for kind in found:
        assert kind.le is not None
        assert kind.le <= 2**63 - 1
        assert kind.ge is not None or kind.gt is not None


@pytest.fixture
def trace(tmp_path):
    """Return the path of the trace of a short run, and its lines."""
    path = serve(tmp_path / "trace.jsonl")
    return path, lines(path)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("field", ["id", "prompt", "output", "key_tokens", "priority"])
def test_numbers_beyond_64_bits_are_refused_with_their_field(trace, edge, field):
    """The error of a number beyond 64 bits names line, field and number."""
    path, found = trace
    number = next(n for n, line in enumerate(found, 1) if line["event"] == "REQUEST")
    found[number - 1][field] = edge
    seal(path, found)
    with pytest.raises(TraceError, match=rf"jsonl:{number}: REQUEST field '{field}' must be"):
        list(read_events(path))


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize(
    "change", [{"keys": []}, {"prompt": 2**64 - 1}, {"output": 2**63}], ids=str
)
def test_each_verb_refuses_requests_that_no_run_has(trace, verb, change, tmp_path):
    """A request with fewer keys than hits, or too many tokens, is one line on stderr."""
    path, found = trace
    for line in found:
        line.update(change if line["event"] == "REQUEST" else {})
    seal(path, found)
    done = run_here(verb[0], path, *verb[1:], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("kvcore: error: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    """Return the lines of the trace of a server with a pool for each kind of layer."""
    path = tmp_path_factory.mktemp("pooled") / "trace.jsonl"
    pooled_run(0, path, count=15)
    return lines(path)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("SPLIT", {"at": 10**6}),
        ("SPLIT", {"at": 0}),
        ("EVICT", {"runs": [[699, -700]]}),
        ("EVICT", {"runs": []}),
        ("FREE", {"runs": [[0, 2**31]]}),
    ],
    ids=str,
)
def test_each_verb_refuses_blocks_that_are_not_there(pooled, verb, event, change, tmp_path):
    """A line that splits, evicts or frees what is not in the cache is one line on stderr."""
    found = deepcopy(pooled)
    next(line for line in found if line["event"] == event).update(change)
    seal(tmp_path / "trace.jsonl", found)
    done = run_here(verb[0], "trace.jsonl", *verb[1:], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("kvcore: error: trace.jsonl:")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("levels", [255, 900, 5_000, 100_000])
@pytest.mark.parametrize("field", ["keys", "unknown", "hints"])
def test_a_line_nested_too_deeply_is_refused(trace, levels, field):
    """A line nested more deeply than any run writes is refused with its number."""
    path, _ = trace
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    deep = b'"%s":' % field.encode() + b"[" * levels + b"]" * levels
    path.write_bytes(b"".join([first, second[:-2] + b"," + deep + b"}\n", *rest]))
    with pytest.raises(TraceError, match=r"jsonl:2: "):
        list(read_events(path))


@pytest.fixture(scope="module")
def opened():
    """Return the names of the files that were opened since, as a set that grows."""
    names, ends = set(), []

    def note(event, arguments):
        if event == "open" and not ends:
            names.add(str(arguments[0]))

    sys.addaudithook(note)  # which cannot be removed
    yield names
    ends.append(True)


SPREAD = ["--replicas", "2", "--disaggregate", "prefill=1,decode=1"]
SERVERS = {"tiers": ["--tier", "host:memory=1GiB", "--eviction", "hazard"], "cluster": SPREAD}


def texts(value, where=()):
    """Yield where texts and nulls are in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        if isinstance(item, (dict, list)):
            yield from texts(item, (*where, key))
        elif item is None or isinstance(item, str):
            yield (*where, key)


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
def test_no_text_of_a_header_is_run_or_opened(server, tmp_path, opened):
    """No file is touched that a plugin, a path or another value of a header names."""
    path, other = tmp_path / "day.jsonl", tmp_path / "other.py"
    run = ["simulate", "zipf:requests=4", "--model", "llama-3.1-8b", "--blocks", "300", *server]
    assert run_here(*run, "--trace", path).returncode == 0
    found = lines(path)
    other.write_text("raise SystemExit('the file has run')\n")
    opened.clear()
    for n, where in enumerate(sorted({*texts(found[0])} - {("event",)}, key=str)):
        for value, verb in ((f"{other}:Policy", "whatif"), (7, ("whatif", "compare")[n % 2])):
            changed = deepcopy(found)
            part = changed[0]
            for key in where[:-1]:
                part = part[key]
            part[where[-1]] = value
            seal(path, changed)
            assert run_here(verb, path).returncode in range(4)
    assert str(other) not in opened


SERVED = ["--model", "llama-3.1-8b", "--blocks", "40"]
RECORDINGS = {
    "tiers": [*SERVED, *SERVERS["tiers"], "--drafter", "acceptance"],
    "planner": [*SERVED, "--replicas", "3", "--autoscale", "load"],
    "split": [*SERVED, *SPREAD, "--fail", "replica=1,at=9"],
    "groups": ["--model", "gpt-oss-20b", "--like", "vllm", "--blocks", "99"],
}
SMALL = "zipf:requests=4,prefix_tokens=64,suffix_tokens=32,output_tokens=6"

JSON = [None, True, -1, 0, 1.5, 1e300, 2**63 - 1, "text", "", [], [1], ["a"], {}, {"a": 1}]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Return a path, and the lines of a short run of each kind of server."""
    path = tmp_path_factory.mktemp("headers") / "day.jsonl"
    found = []
    for options in RECORDINGS.values():
        assert run_here("simulate", SMALL, *options, "--trace", path).returncode == 0
        found.append(lines(path))
    return path, found


def fields_within(value, where=()):
    """Yield where values are in a document, at any depth."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*where, key)
        if isinstance(item, (dict, list)):
            yield from fields_within(item, (*where, key))


def with_value(found, where, value):
    """Return the lines of a trace with another value in HEADER."""
    header = part = deepcopy(found[0])
    for key in where[:-1]:
        part = part[int(key) if isinstance(part, list) else key]
    part[where[-1]] = value
    return [header, *found[1:]]


def refuses_or_reads(verb, path):
    """Run a verb on a trace; require an answer, or one line that says what is wrong."""
    done = run_here(verb[0], path, *verb[1:], cwd=path.parent)
    assert done.returncode in range(4)
    if done.returncode in (1, 2):
        assert done.stderr.startswith("kvcore: error: ")
        assert done.stderr.count("\n") == 1
    return done


@pytest.mark.parametrize(
    ("kind", "where", "value"),
    [
        ("tiers", "model", 5),
        ("tiers", "device", {"a": 1}),
        ("tiers", "device", ["h100"]),
        ("tiers", "device.count", "many"),
        ("tiers", "plugins.drafter.options.draft", [1]),
        ("tiers", "tiers.0.options.latency", 1e300),
        ("planner", "routing.autoscale", True),
        ("planner", "routing.autoscale.options", 1.5),
        ("planner", "routing.up", 1.5),
        ("planner", "replicas", []),
        ("split", "routing.disaggregate", 7),
    ],
    ids=str,
)
@pytest.mark.parametrize("verb", ["replay", "whatif"])
def test_headers_that_no_run_writes_are_no_tracebacks(recordings, verb, kind, where, value):
    """Models, devices and routers of other types are refused, or say nothing."""
    path, found = recordings
    found = found[list(RECORDINGS).index(kind)]
    seal(path, with_value(found, where.split("."), value))
    refuses_or_reads([verb], path)


@given(data=st.data())
@settings(max_examples=60)
def test_any_value_in_a_header_is_read_or_refused_by_each_verb(recordings, data):
    """Any JSON in any field of HEADER, digest made right, is no traceback of any verb."""
    path, found = recordings
    found = data.draw(st.sampled_from(found))
    places = [where for where in fields_within(found[0]) if where != ("event",)]
    where, value = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(JSON))
    seal(path, with_value(found, where, value))
    refuses_or_reads(data.draw(st.sampled_from([*VERBS, ["whatif"], ["compare"]])), path)


def test_parts_of_a_header_that_are_no_objects_are_read(recordings):
    """A model or a device may be any JSON, as of other programs: it is shown, and replayed."""
    path, found = recordings
    for value in ("llama-3.1-8b", 7, ["a"], None):
        seal(path, with_value(found[0], ["model"], value))
        assert refuses_or_reads(["replay"], path).returncode == 0
