"""Tiers in a trace: their contents follow from the lines, and forged lines are refused."""

from functools import partial
from random import Random

import attrs
import orjson
import pytest
from helpers.requests import keyed
from helpers.serving import Even
from helpers.serving import ask as arrive
from helpers.serving import serve as simulate_server
from helpers.traces import BLOCK, TIERS, ask, lines, seal, serve, serve_tiers

import kvcore
from kvcore import KVCache, Request, Trace, TraceError, read_events
from kvcore.request import Hints
from kvcore.serving import Batching, simulate
from kvcore.trace.events import decode, find_fault
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workload import Zipf
from kvcore_replay.check.server import TraceChecker
from kvcore_replay.check.trace import check_trace
from kvcore_replay.misses.explain import explain
from kvcore_replay.state import tiers as traced
from kvcore_replay.state.cache import CacheState
from kvcore_tiers.hierarchy import Tiers

LINES = ("OFFLOAD", "LOAD_START", "LOAD", "DROP")


@pytest.fixture
def trace(tmp_path):
    """Return the path of a trace with every line that tiers have in a simulation."""
    return serve_tiers(tmp_path / "trace.jsonl")


def error_of(path, events):
    """Return the error of the check of these lines; None if they are valid."""
    try:
        check_trace(seal(path, events))
    except TraceError as error:
        return str(error).split(": ", 1)[1]
    return None


def forged(path, n, **fields):
    """Return the error of the check with other fields in line `n`.

    A field of value None is removed; return None if the lines are valid.
    """
    events = lines(path)
    events[n] |= fields
    for name in [name for name, value in fields.items() if value is None]:
        del events[n][name]
    return error_of(path, events)


def test_the_report_has_each_tier(trace):
    """The report has each tier, nearest first, with its slots, contents and transfers."""
    host, disk = check_trace(trace).tiers
    assert host == {
        "tier": "host",
        "slots": 6,
        "used_blocks": 6,
        "parked_blocks": 0,
        "loading_blocks": 0,
        "recovered_blocks": 0,
        "stored_blocks": 21,
        "loads": 2,
        "loaded_blocks": 3,
        "dropped_blocks": {"capacity": 13, "moved": 1, "parked": 1},
        "read_bytes": 3000,
        "written_bytes": 21000,
        "link_busy_s": 24e-9,
    }
    assert (disk["tier"], disk["used_blocks"], disk["link_busy_s"]) == ("disk", 9, 46e-9)


@pytest.mark.parametrize(
    ("at", "loading", "parked", "used"),
    [
        (299, [0, 0], [0, 0], [6, 4]),
        (300, [1, 3], [0, 0], [6, 4]),
        (550, [0, 0], [1, 0], [6, 9]),
    ],
)
def test_the_report_of_a_moment_has_blocks_that_load_or_are_parked(
    trace, at, loading, parked, used
):
    """The report of a moment has the blocks that are loading and those that are parked."""
    tiers = check_trace(trace, at).tiers
    assert [tier["loading_blocks"] for tier in tiers] == loading
    assert [tier["parked_blocks"] for tier in tiers] == parked
    assert [tier["used_blocks"] for tier in tiers] == used


def refused(events):
    """Return True if the checker refuses these events, or if their time goes back."""
    checker = TraceChecker(events[0])
    now = 0
    for event in events[1:-1]:
        if event.t < now:
            return True
        now = event.t
        try:
            checker.apply(event)
        except (ValueError, LookupError):
            return True
    return False


WORDS = {
    "tier": ["host", "disk", "tape"],
    "from": ["host", "disk", None],
    "parked": [True, None],
    # These requests name different blocks, except "a" and "again", which share a prefix.
    "request": ["a", "b", "c", "p", "r", "nobody"],
    "reason": ["capacity", "expired", "moved", "parked", "corrupt", "gone", "failed"],
}


def forgeries(event):
    """Yield each field of a line with a value that is not its own."""
    for name, value in event.items():
        if type(value) is int and name != "n":
            yield from ((name, value + step) for step in (-1, 1) if value + step >= 0)
    for name, words in WORDS.items():
        if name in event or (event["event"] == "OFFLOAD" and name in ("from", "parked")):
            yield from ((name, word) for word in words if word != event.get(name))


@pytest.mark.parametrize("event", LINES)
def test_no_field_of_a_line_can_be_forged(trace, event):
    """A line of tiers with any other value in any field is refused."""
    events = lines(trace)
    read = [decode(orjson.dumps(line)) for line in events]
    for n, line in enumerate(events):
        if line["event"] != event:
            continue
        for name, value in forgeries(line):
            if {"a", "again"} == {line["request"], value}:
                continue
            other = {key: v for key, v in (line | {name: value}).items() if v is not None}
            if find_fault(other) is None:
                assert refused([*read[:n], decode(orjson.dumps(other)), *read[n + 1 :]]), other


@pytest.mark.parametrize("event", ["OFFLOAD", "LOAD_START", "LOAD"])
def test_a_moved_transfer_is_refused(trace, event):
    """A transfer moved down by two lines is refused."""
    events = lines(trace)
    for n, line in enumerate(events):
        if line["event"] == event:
            assert error_of(
                trace, [*events[:n], *events[n + 1 : n + 3], line, *events[n + 3 :]]
            )


@pytest.mark.parametrize(
    ("n", "fields", "reason"),
    [
        (10, {"tier": "tape"}, "OFFLOAD: no tier is 'tape'; there are: host, disk"),
        (
            10,
            {"first": 1, "blocks": 3, "done": 108},
            "OFFLOAD: 0 blocks of the prompt are ther",
        ),
        (10, {"done": 108}, "OFFLOAD: by the link of tier 'host' it is done at 109 ns"),
        (10, {"from": "disk"}, "OFFLOAD: tier 'host' takes blocks from the pool"),
        (10, {"request": "b"}, "OFFLOAD: 0 blocks of request 'b' are cached, not 4"),
        (10, {"blocks": 5, "done": 110}, "OFFLOAD: request 'a' has 4 keys: none for block 4"),
        (20, {"from": None}, "OFFLOAD: tier 'disk' takes blocks from 'host'"),
        (20, {"request": "b"}, "OFFLOAD: tier 'host' has not the blocks up to 4"),
        (21, {"first": 0}, "DROP: the blocks up to 3 are not the end of a path"),
        (21, {"reason": "moved"}, "DROP: nothing was loaded just before from an exclusive"),
        (21, {"reason": "expired"}, "DROP: the eviction policy of tier 'host' expires nothing"),
        (21, {"reason": "gone"}, "DROP: no bytes are moved here, so none are gone"),
        (21, {"blocks": 2}, "DROP: the blocks up to 3 are not the end of a path"),
        (22, {"blocks": 6}, "OFFLOAD: 7 slots of tier 'host' would be in use; it has 6"),
        (32, {"blocks": 2}, "LOAD_START: 1 blocks of request 'again' are in tier 'host'"),
        (32, {"seq": 3}, "LOAD_START: no sequence 3 is open"),
        (33, {"done": 325}, "LOAD_START: by the link of tier 'disk' it is done at 326 ns"),
        (33, {"tier": "host"}, "LOAD_START: tier 'host' is not asked after 'host'"),
        (33, {"first": 2}, "LOAD_START: sequence 4 has 5 blocks, 1 of them already"),
        (34, {"t": 325}, "LOAD: what sequence 4 loads is there at 326 ns"),
        (34, {"blocks": 0}, "LOAD: 1 blocks are loaded, not 0"),
        (34, {"tier": "disk"}, "LOAD: sequence 4 loads 0 from 'host' next"),
        (37, {"blocks": 3}, "COMMIT: sequence 4 has loaded blocks up to 4, and must commit"),
        (62, {"how": "recompute"}, "DROP: FREE of sequence 6 must come before this"),
        (69, {"parked": None}, "OFFLOAD: request 'r' has 4 keys: none for block 4"),
        (67, {"request": "p", "blocks": 2}, "OFFLOAD: tier 'host' dropped 2 more blocks than"),
        (69, {"first": 3}, "OFFLOAD: sequence 6 has 5 blocks; 4 of them are shared, and in"),
        (81, {"blocks": 2}, "DROP: request 'r' has not parked blocks 4 to 6"),
    ],
)
def test_a_forged_line_is_refused_with_the_reason(trace, n, fields, reason):
    """A forged line raises TraceError with the event and the reason."""
    found = forged(trace, n, **fields)
    assert found.startswith(reason), found


@pytest.mark.parametrize(
    ("n", "reason"),
    [
        (20, "LOAD_START: 0 blocks of request 'again' are in tier 'disk'"),
        (21, "OFFLOAD: 9 slots of tier 'host' would be in use; it has 6"),
        (22, "MISS: tier 'host' dropped blocks to make room for nothing"),
        (34, "DROP: request 'again' needs block 0 in tier 'host'"),
        (36, "COMMIT: sequence 4 waits for a load that is done"),
        (37, "COMMIT: sequence 4 has loaded blocks up to 4, and must commit them"),
        (69, "FREE: tier 'host' dropped blocks to make room for nothing"),
        (81, "COMMIT: request 'r' has parked blocks in 'host' still"),
    ],
)
def test_a_line_that_others_depend_on_cannot_be_left_out(trace, n, reason):
    """A trace without a transfer, drop or commit that other lines depend on is refused."""
    events = lines(trace)
    found = error_of(trace, events[:n] + events[n + 1 :])
    assert found.startswith(reason), found


def test_lines_of_tiers_need_tiers(trace):
    """A DROP without tiers in HEADER is refused."""
    events = lines(trace)
    drop = events[21] | {"t": 10}
    del events[0]["tiers"]
    assert error_of(trace, [*events[:8], drop, *events[8:]]) == "DROP: HEADER has no tiers"


def test_swaps_need_tiers(tmp_path):
    """A PREEMPT by swap without tiers in HEADER is refused."""
    path = serve(tmp_path / "trace.jsonl")
    (n,) = [n for n, line in enumerate(lines(path)) if line.get("how") == "recompute"]
    assert forged(path, n, how="swap") == "PREEMPT: HEADER has no tiers"


@pytest.mark.parametrize(
    ("n", "fields", "reason"),
    [
        (32, {"request": "nobody"}, "LOAD_START: sequence 4 is not of request 'nobody'"),
        (32, {"seq": 9}, "LOAD_START: no sequence 9 is open"),
        (34, {"request": "nobody"}, "LOAD: sequence 4 is not of request 'nobody'"),
        (34, {"seq": 9}, "LOAD: it does not fit the lines before it"),
        (
            20,
            {"request": "nobody"},
            "OFFLOAD: request 'nobody' has no REQUEST line before this",
        ),
        (20, {"blocks": 10**9}, "OFFLOAD: it does not fit the lines before it"),
        (21, {"blocks": 10**9}, "DROP: it does not fit the lines before it"),
        (21, {"tier": "tape"}, "DROP: no tier is 'tape'; there are: host, disk"),
        (35, {"request": "nobody"}, "DROP: request 'nobody' has no REQUEST line before this"),
    ],
)
def test_readers_without_checks_raise_trace_error(trace, n, fields, reason):
    """Readers that skip the check raise TraceError for inconsistent lines of tiers."""
    events = lines(trace)
    events[n] |= fields
    with pytest.raises(TraceError, match=f":{n + 1}: {reason}"):
        explain(seal(trace, events))


def test_a_request_cannot_have_the_name_of_a_recovered_path(recovered):
    """A request cannot have the name of a recovered path."""
    events = lines(recovered)
    (n,) = [n for n, line in enumerate(events) if line["event"] == "MISS"][:1]
    events[n]["request"] = "disk:1"
    with pytest.raises(
        TraceError, match=f":{n + 1}: MISS: it does not fit the lines before it"
    ):
        explain(seal(recovered, events))
    reason = "MISS: request 'disk:1' has no REQUEST line before this"
    assert error_of(recovered, events) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tier": "disk"}, "HEADER: two tiers are called 'disk'"),
        ({"options": {}}, "HEADER: tier 'host' has the bandwidths [None, None]"),
        (
            {"options": {"read_bandwidth": 1, "write_bandwidth": 0, "latency": 0}},
            "HEADER: tier 'host' has the bandwidths [1, 0] and the latency 0",
        ),
        (
            {"options": {"read_bandwidth": 1, "write_bandwidth": 1, "latency": -1}},
            "HEADER: tier 'host' has the bandwidths [1, 1] and the latency -1",
        ),
        ({"slots": 0}, "HEADER field 'tiers' must be a list of tiers, each with tier, name"),
        ({"colour": 1}, "HEADER field 'tiers' must be a list of tiers, each with tier, name"),
        ({"slots": 5}, "OFFLOAD: 6 slots of tier 'host' would be in use; it has 5"),
        ({"slots": 7}, "OFFLOAD: tier 'host' dropped 1 more blocks than were missing"),
        ({"slot_bytes": 1001}, "OFFLOAD: by the link of tier 'host' it is done at"),
        ({"devices": 2}, "OFFLOAD: by the link of tier 'host' it is done at"),
    ],
)
def test_impossible_tiers_of_a_header_are_refused(trace, change, reason):
    """Invalid names, links or sizes of tiers in HEADER are refused.

    So are valid ones that do not match the lines.
    """
    events = lines(trace)
    events[0]["tiers"][0] |= change
    assert error_of(trace, events).startswith(reason)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("write", "through", "OFFLOAD: 3 blocks of request 'a' are cached, not 4"),
        ("write", 1, "OFFLOAD: 3 blocks of request 'a' are cached, not 4"),
        (
            "keep",
            "inclusive",
            "DROP: nothing was loaded just before from an exclusive 'host'",
        ),
        ("load", "never", "LOAD_START: nothing is loaded from tier 'host'"),
        ("max_wait", 1e300, "OFFLOAD: it does not fit the lines before it (OverflowError("),
    ],
)
def test_a_trace_against_the_rules_of_its_header_is_refused(trace, option, value, reason):
    """A trace is refused if HEADER has other rules to write, keep, load or wait."""
    events = lines(trace)
    events[0]["tiers"][0]["options"][option] = value
    assert error_of(trace, events).startswith(reason)


def test_the_report_of_a_cut_trace_has_the_tiers_at_the_cut(trace):
    """The report of a cut trace has the tiers as of the cut, loads in progress included."""
    whole = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(whole[:34]))
    report = check_trace(trace)
    assert not report.complete
    assert [tier["loading_blocks"] for tier in report.tiers] == [1, 3]


def test_an_offload_that_waits_longer_than_max_wait_is_refused(tmp_path):
    """An OFFLOAD that waits for its link longer than `max_wait` is refused."""
    slow = TIERS[0].replace("write_bandwidth=1TB", "write_bandwidth=10GB")
    path = serve_tiers(tmp_path / "trace.jsonl", (slow,))
    assert check_trace(path).complete
    events = lines(path)
    events[0]["tiers"][0]["options"]["max_wait"] = 1e-7
    reason = "OFFLOAD: the link of tier 'host' is busy for longer than it may be"
    assert error_of(path, events) == reason


@pytest.fixture
def planned(tmp_path):
    """Return the path of a trace whose blocks are shared by plans, and written through."""
    path = tmp_path / "trace.jsonl"
    requests = [keyed(n, [1, 2, 3, 10 + n, 20 + n], arrival=0) for n in range(3)]
    tiers = ["host:memory=2MiB,write=through", "disk:memory=3MiB,write=through"]
    model = {"like": "vllm:lag=0", "blocks": 60, "block_size": 4}
    kvcore.simulate(requests, **model, tier=tiers, trace=path)
    return path


def test_what_a_plan_shares_goes_down_when_it_is_computed(planned):
    """It goes down after its step, also to make room, and not when its sequence is admitted."""
    assert check_trace(planned).complete
    events = lines(planned)
    names = [line["event"] for line in events]
    commit, offload = names.index("COMMIT"), names.index("OFFLOAD")
    line = events.pop(offload)
    early = line["t"] - events[commit]["t"]
    assert early > 0
    events.insert(commit + 1, line | {"t": line["t"] - early, "done": line["done"] - early})
    reason = f"OFFLOAD: block 0 of request {line['request']} is not computed yet"
    assert error_of(planned, events) == reason


def test_only_a_run_on_tensors_may_lose_blocks_of_a_load(trace):
    """Only a run on tensors may lose blocks of a load to a DROP."""
    events = lines(trace)[:42]
    events[36] |= {"blocks": 1}
    events[37] |= {"blocks": 2}
    events[38] |= {"first": 2, "blocks": 3}
    wrong = {"n": 0, "t": 326, "event": "DROP", "tier": "disk", "request": "again"}
    wrong |= {"first": 2, "blocks": 2, "reason": "corrupt"}
    events.insert(37, wrong)
    assert error_of(trace, events) == "LOAD: 3 blocks are loaded, not 1"
    events[0]["executor"] = "run"
    assert error_of(trace, events) is None
    assert check_trace(trace).tiers[1]["dropped_blocks"] == {"corrupt": 2}
    events[34] |= {"blocks": 0}
    del events[35]
    assert error_of(trace, events) == "LOAD: 0 blocks are loaded, not 1"


@pytest.fixture
def recovered(tmp_path):
    """Return a trace of a server whose disk has two paths from the start, "abcd" and "abx"."""
    path = tmp_path / "trace.jsonl"
    with Trace(path, mode="model") as trace:
        cache = KVCache(8, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        tiers = Tiers(cache, TIERS, 1000, ids=True)
        disk = tiers.levels[1]
        slots = disk.pool.allocate(5)
        disk.restore(ask("", "abcd").keys, slots[:4])
        disk.restore(ask("", "abx").keys, slots[:2] + slots[4:])
        disk.stats.recovered = 5
        tiers.describe()
        requests = [
            ask("a", "abcde", output_tokens=1, arrival=0),
            ask("b", "fghijklm", output_tokens=1, arrival=100),
            ask("c", "nopqrstu", output_tokens=1, arrival=200),
            ask("d", "vwxyzABC", output_tokens=1, arrival=300),
            ask("e", "DEFGHIJK", output_tokens=1, arrival=400),
        ]
        simulate(requests, cache=cache, latency=Even(), batching=Batching(watermark=0.0))
    events = lines(path)
    # Only a run on tensors may recover blocks.
    events[0]["executor"] = "run"
    return seal(path, events)


def test_recovered_paths_are_recorded_first(recovered):
    """Recovered paths are recorded first; they can be loaded, and dropped by their names."""
    events = lines(recovered)
    recovers = [(line["request"], line["first"], line["blocks"]) for line in events[1:3]]
    assert [line["event"] for line in events[1:4]] == ["RECOVER", "RECOVER", "REQUEST"]
    assert recovers == [("disk:1", 0, 4), ("disk:2", 2, 1)]
    assert [line["blocks"] for line in events if line["event"] == "LOAD"] == [4]
    assert "disk:2" in [line["request"] for line in events if line["event"] == "DROP"]
    assert check_trace(recovered).complete
    loaded, rest_of_it = explain(recovered).of("a").losses
    assert (loaded.category, rest_of_it.way, rest_of_it.other) == ("loaded", "extends", None)


@pytest.mark.parametrize(
    ("n", "fields", "reason"),
    [
        (0, {"executor": "simulate"}, "RECOVER: only a run on tensors finds blocks of an"),
        (1, {"tier": "tape"}, "RECOVER: no tier is 'tape'"),
        (1, {"tier": "host"}, "RECOVER: 0 blocks of the prompt are there already, so 2 is not"),
        (1, {"first": 1, "blocks": 3}, "RECOVER: 0 blocks of the prompt are there already"),
        (1, {"blocks": 10}, "RECOVER: tier 'disk' has 9 slots"),
        (1, {"blocks": 3}, "RECOVER: 3 blocks have not 4 keys"),
        (2, {"request": "disk:1"}, "RECOVER: 'disk:1' is the name of another path"),
        (2, {"t": 1}, "RECOVER: only a run on tensors finds blocks of an earlier one, before"),
        (3, {"id": "disk:1"}, "REQUEST: request 'disk:1' has a REQUEST line already"),
    ],
)
def test_a_forged_recover_is_refused(recovered, n, fields, reason):
    """A RECOVER with another tier, position, size, name or time is refused."""
    found = forged(recovered, n, **fields)
    assert found.startswith(reason), found


def test_all_recovered_blocks_come_before_the_first_request(recovered):
    """RECOVER lines before the first REQUEST must have as many blocks as HEADER names."""
    events = lines(recovered)
    reason = "tier 'disk' had 5 blocks from an earlier run by HEADER, and 4 by RECOVER"
    assert error_of(recovered, [*events[:2], *events[3:]]) == f"REQUEST: {reason}"
    late = [*events[:2], events[3], events[2], *events[4:]]
    assert error_of(recovered, late) == f"REQUEST: {reason}"


def test_a_drop_of_needed_blocks_is_refused(trace):
    """A DROP of blocks that are loading, or that a parked sequence needs, is refused."""
    events = lines(trace)
    events[0]["executor"] = "run"
    gone = {"n": 0, "event": "DROP", "reason": "gone", "blocks": 1}
    late = gone | {"t": 300, "tier": "disk", "request": "a", "first": 3}
    reason = error_of(trace, [*events[:34], late, *events[34:]])
    assert reason == "DROP: request 'again' needs block 3 in tier 'disk'"
    late = gone | {"t": 550, "tier": "host", "request": "r", "first": 3}
    reason = error_of(trace, [*events[:71], late, *events[71:]])
    assert reason == "DROP: request 'r' needs block 3 in tier 'host'"


def test_blocks_equal_to_parked_ones_may_be_dropped(tmp_path):
    """Blocks that equal a parked sequence's own blocks may be dropped while it returns."""
    shapes = [(0, 8, 7, 1), (1, 4, 9, 1), (2, 4, 11, 2)]
    requests = [
        arrive(index, time, prompt, output, keys=[key], key_tokens=8)
        for index, (time, prompt, output, key) in enumerate(shapes)
    ]
    tier = "host:memory=320,write=through,load=always,latency=1e-7"
    shape = {"blocks": 7, "block_size": 2, "key_tokens": 8, "max_seqs": 3}
    run = simulate_server(requests, tiers=(tier,), **shape)
    # Request 1 has parked its block 2, and loads it while the host drops block 2 of request 0.
    events = [(line["event"], line.get("request")) for line in run.lines]
    loading = run.lines[events.index(("LOAD_START", 1)) : events.index(("LOAD", 1))]
    drops = [line for line in loading if line["event"] == "DROP"]
    assert [(line["request"], line["first"], line["blocks"]) for line in drops] == [(0, 2, 2)]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(run.trace)
    assert check_trace(path).preemptions["swap"] == 1


QUEST = {"retention": "quest", "blocks": 12, "block_size": 16}
VLLM = {"like": "vllm", "eviction": "workload-aware", "blocks": 16, "block_size": 4}


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (
            [(name, 0, (name, name + 10), 0, 60, [name + 20, name + 30]) for name in range(3)],
            QUEST,
        ),
        ([(0, 0, (1, 2), 0, 1, ())] + [(n, 10**9, (1, 2), -8, 30, ()) for n in (1, 2)], VLLM),
    ],
    ids=["an answer with keys that no policy shares", "a prompt that ends within a key"],
)
def test_private_blocks_of_a_swapped_answer_are_parked_and_loaded(tmp_path, requests, options):
    """Blocks that a swapped sequence does not share are parked, and loaded without a COMMIT."""
    path = tmp_path / "trace.jsonl"
    asked = [
        keyed(name, keys, 16, arrival=at, more=more, output_tokens=output, output_keys=answer)
        for name, at, keys, more, output, answer in requests
    ]
    kvcore.simulate(asked, trace=path, tier="host:memory=1GiB,load=always", **options)
    assert check_trace(path).preemptions["swap"] > 0


def test_a_prefetch_under_a_retention_policy_commits_what_it_has_loaded(tmp_path):
    """Blocks that are loaded ahead of a request are shared under a retention policy too."""
    path = tmp_path / "trace.jsonl"
    asked = [keyed(name, (name, name + 10), 16, arrival=name * 10**9) for name in range(3)]
    again = attrs.evolve(asked[0], id=9, arrival=5 * 10**9, hints=Hints(prefetch=10**8))
    options = {"retention": "quest", "tier": "host:memory=1GiB,load=always"}
    kvcore.simulate([*asked, again], trace=path, blocks=4, block_size=16, **options)
    assert check_trace(path).tiers[0]["loads"] > 0
    assert any(line["event"] == "PREFETCH" for line in lines(path))


def test_every_transfer_of_an_untimed_trace_ends_at_once(tmp_path):
    """Without a clock every transfer ends at once, and no link is busy."""
    path, host = tmp_path / "trace.jsonl", "host:memory=100MiB,max_wait=0"
    tiers = partial(Tiers, tiers=[host], slot_bytes=2**20)
    compare_policies(Zipf(requests=60, prefixes=6), "lru", 60, tiers=tiers, trace=path)
    (host,) = check_trace(path).tiers
    assert (host["loads"] > 0, host["read_bytes"] > 0, host["link_busy_s"]) == (True, True, 0)
    events = lines(path)
    first = next(line for line in events if line["event"] == "OFFLOAD")
    first["done"] += 1
    assert "by the link of tier 'host' it is done at" in error_of(path, events)


def test_the_keys_in_all_tiers_are_limited(trace, monkeypatch):
    """The keys in all tiers together are limited, so that a small file takes little memory."""
    monkeypatch.setattr(traced, "MOST_TIER_KEYS", 10)
    with pytest.raises(TraceError, match="tiers hold more than 10 keys, which is the most"):
        check_trace(trace)


def test_keys_of_lines_of_tiers_count_as_work(tmp_path, monkeypatch):
    """The keys of lines of tiers count towards the limit of work.

    Without them the same requests keep within it.
    """
    monkeypatch.setattr("kvcore_replay.state.cache.WORK", 300)
    monkeypatch.setattr("kvcore_replay.state.cache.WORK_OF_LINE", 1)
    assert check_trace(serve_tiers(tmp_path / "trace.jsonl", ())).complete
    with pytest.raises(TraceError, match=r"lines name [0-9]+ blocks and spans: too many"):
        check_trace(serve_tiers(tmp_path / "trace.jsonl"))


class Watching(Trace):
    """A trace that records the contents of the tiers at every FINISH."""

    tiers = None

    def finish(self, now, **fields):
        """Write FINISH, and record the contents of each tier."""
        super().finish(now, **fields)
        self.seen.append([self.held(level) for level in self.tiers.levels])

    def held(self, level):
        """Return the blocks by key, the parked blocks, used slots and link of a level."""
        blocks = {}
        for span in level.tree.spans():
            for index in range(span.start, span.end):
                name = span.path_keys[index // span.geometry.ratio]
                blocks[name] = blocks.get(name, 0) + 1
        parked = {name: holder.blocks for name, holder in level.parked.items()}
        used = level.pool.blocks - level.pool.free_blocks
        link = level.link
        return blocks, parked, used, (link.free_at, link.read_bytes, link.written_bytes)


def random_run(path, seed):
    """Record a server with random tiers and requests; return the tiers at each FINISH."""
    random = Random(seed)
    tiers = [
        f"{random.choice(['host', 'disk'])}:memory={random.randint(4, 30) * 1000},"
        f"eviction={random.choice(['lru', 'fifo', 'lfu'])},"
        f"write={random.choice(['evict', 'through', '1', '2'])},"
        f"keep={random.choice(['inclusive', 'exclusive'])},"
        f"load={random.choice(['cost', 'always'])},latency=1e-8,"
        f"read_bandwidth={random.choice(['1TB', '100GB'])},write_bandwidth=500GB,"
        f"max_wait={random.choice(['1', '1e-7'])}"
        for _ in range(random.randint(1, 3))
    ]
    texts, requests, ratio = [[]], [], random.choice([1, 2])
    for serial in range(30):
        text = random.choice(texts)
        text = text[: random.randint(0, len(text))]
        text = text + [serial * 8 + new for new in range(random.randint(0, 4))]
        texts.append(text)
        requests.append(
            Request(
                id=serial,
                arrival=serial * 40,
                prompt_tokens=max(1, len(text) * BLOCK * ratio + random.randint(0, 2)),
                output_tokens=random.randint(0, 20),
                keys=text,
                key_tokens=BLOCK * ratio,
            )
        )
    with Watching(path, mode="model", executor="simulate") as trace:
        trace.seen = []
        pool = random.randint(14, 30)
        cache = KVCache(pool, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        trace.tiers = Tiers(cache, tiers, 1000)
        batching = Batching(watermark=0.0, max_seqs=random.randint(2, 6))
        simulate(requests, cache=cache, latency=Even(), batching=batching)
    return trace.seen


@pytest.mark.parametrize("seed", range(12))
def test_the_rebuilt_tiers_equal_those_of_the_run(tmp_path, seed):
    """The tiers rebuilt from a trace equal those of the run after every FINISH."""
    path = tmp_path / "trace.jsonl"
    seen = iter(random_run(path, seed))
    assert check_trace(path).complete
    header, *events = read_events(path)
    state = CacheState(header)
    for event in events:
        state.apply(event)
        if event.event == "FINISH":
            assert next(seen) == [
                (
                    tier.directory._blocks,
                    {name: end for name, (_, end) in tier.parked.items()},
                    tier.used,
                    (tier.free_at, tier.read_bytes, tier.written_bytes),
                )
                for tier in state.tiers.levels.values()
            ]
    assert next(seen, None) is None
