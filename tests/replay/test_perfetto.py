"""The export for Perfetto: valid trace events, nested slices, and exact times."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from decimal import Decimal
from json import loads

import pytest
from helpers import traces
from helpers.clusters import record_cluster
from helpers.commands import run_here

from kvcore_replay.report import perfetto
from kvcore_replay.timeline import Timeline

SMALL = [
    "zipf:requests=60,prefixes=12,prefix_tokens=256,suffix_tokens=300,output_tokens=90,rate=60",
    *("--blocks", "220", "--block-size", "16"),
]
KINDS = {"queued", "loading", "prefill", "decode", "preempted"}
FIELDS = {
    "B": {"ph", "pid", "tid", "ts", "name", "cat", "args"},
    "E": {"ph", "pid", "tid", "ts"},
    "i": {"ph", "pid", "tid", "ts", "name", "cat", "args", "s"},
    "C": {"ph", "pid", "tid", "ts", "name", "cat", "args"},
    "M": {"ph", "pid", "tid", "ts", "name", "cat", "args"},
}


class Slice:
    """A slice of a track, with its begin and end in ns, nested slices and instants."""

    def __init__(self, name, begin, args):
        self.name, self.begin, self.args = name, begin, args
        self.end = None
        self.inside, self.instants = [], []


class Document:
    """A document in the trace-event format; all rules of the format are checked.

    Attributes:
        slices: the outermost slices by (process, track), in order.
        instants: (process, track, ns, name, args) of the instants outside of slices.
        counters: the (ns, values) of each (process, name), in order.
        names: names of processes and of tracks, by their numbers.
    """

    def __init__(self, text):
        whole = loads(text, parse_float=Decimal)
        assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
        assert whole["displayTimeUnit"] in ("ms", "ns")
        self.other = whole["otherData"]
        self.events = whole["traceEvents"]
        self.slices, self.counters = defaultdict(list), defaultdict(list)
        self.instants, self.names, self._open = [], {}, defaultdict(list)
        self._last = {}
        for event in self.events:
            assert set(event) == FIELDS[event["ph"]], event
            assert all(type(event[name]) is int for name in ("pid", "tid"))
            assert all(event[name] for name in ("name", "cat") if name in event)
            self.take(event)
        assert not any(self._open.values()), "slices that do not end"
        for pid, tid in {(event["pid"], event["tid"]) for event in self.events}:
            assert pid in self.names
            assert pid == tid or (pid, tid) in self.names
        tracks = [tid for _, tid in (name for name in self.names if isinstance(name, tuple))]
        assert len(tracks) == len(set(tracks)), "a track's number in two processes"

    def take(self, event):
        """Add the next event after checking it."""
        track, now = (event["pid"], event["tid"]), event["ts"] * 1000
        assert now == int(now) >= 0
        if event["ph"] == "M":
            of = track if event["name"].startswith("thread") else event["pid"]
            if event["name"].endswith("_name"):
                assert self.names.setdefault(of, event["args"]["name"]) == event["args"]["name"]
            return
        if event["ph"] == "C":
            assert all(type(n) in (int, Decimal) for n in event["args"].values())
            values = self.counters[event["pid"], event["name"]]
            assert not values or values[-1][0] < now, "a counter twice at a time"
            values.append((int(now), event["args"]))
            return
        assert self._last.get(track, 0) <= now, "a track goes back in time"
        self._last[track] = now
        getattr(self, {"B": "begin", "E": "end", "i": "instant"}[event["ph"]])(
            track, int(now), event
        )

    def begin(self, track, now, event):
        """Open a slice inside the slice that is open."""
        new = Slice(event["name"], now, event["args"])
        siblings = self._open[track][-1].inside if self._open[track] else self.slices[track]
        assert not siblings or siblings[-1].end <= now
        siblings.append(new)
        self._open[track].append(new)

    def end(self, track, now, event):
        """Close the slice that is open."""
        del event
        self._open[track].pop().end = now

    def instant(self, track, now, event):
        """Add an instant to the slice that is open."""
        assert event["s"] == "t"
        if self._open[track]:
            self._open[track][-1].instants.append((event["name"], now, event["args"]))
        else:
            self.instants.append((*track, now, event["name"], event["args"]))

    def requests(self):
        """Return the slices of requests, by name."""
        found = [each for (pid, _), made in self.slices.items() if pid == 1 for each in made]
        by_name = {each.name: each for each in found}
        assert len(by_name) == len(found)
        return by_name


def exported(path, tmp_path):
    """Return the document of a trace, and the lines of the trace."""
    out = tmp_path / "out.json"
    done = run_here("export", path, "--to", "perfetto", "--out", out)
    assert done.returncode == 0, done.stderr
    return Document(out.read_text()), traces.lines(path)


def simulated(path, *more):
    """Record a simulation with evictions, preemptions and chunks."""
    done = run_here("simulate", *SMALL, "--trace", path, *more)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the trace of a busy server."""
    folder = tmp_path_factory.mktemp("server")
    return simulated(folder / "run.jsonl", "--max-tokens", "256")


@pytest.fixture(scope="module")
def server(recorded):
    """Return the document of a busy server, and the lines of its trace."""
    return exported(recorded, recorded.parent)


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """Return the document of a run with tiers, and the lines of its trace."""
    folder = tmp_path_factory.mktemp("tiered")
    tier = "host:memory=64MiB,load=always,write_bandwidth=200MB,read_bandwidth=400MB"
    return exported(simulated(folder / "run.jsonl", "--tier", tier), folder)


def of(lines, event):
    """Return the lines of an event."""
    return [line for line in lines if line["event"] == event]


def test_each_request_has_a_slice(server):
    """Each request has a slice from its arrival to its end, with its prompt tokens."""
    document, lines = server
    finish = {line["request"]: line["t"] for line in of(lines, "FINISH")}
    slices = document.requests()
    asked = of(lines, "REQUEST")
    assert len(slices) == len(asked) == 60
    for line in asked:
        found = slices[f"request {line['id']}"]
        assert (found.begin, found.end) == (line["t"], finish[line["id"]])
        assert found.args["prompt_tokens"] == line["prompt"]


def test_phases_fill_a_request(server):
    """The phases of a request fill its slice without gaps; `queued` can only be first."""
    document, lines = server
    for found in document.requests().values():
        kinds = [each.name for each in found.inside]
        assert set(kinds) <= KINDS
        assert {"prefill", "decode"} <= set(kinds)
        assert "queued" not in kinds[1:]
        times = [(each.begin, each.end) for each in found.inside]
        assert [begin for begin, _ in times] == [found.begin, *(end for _, end in times[:-1])]
        assert times[-1][1] == found.end
    assert {each.name for found in document.requests().values() for each in found.inside} >= {
        *KINDS - {"loading"}
    }
    assert of(lines, "PREEMPT")


def test_preemptions_name_the_request_that_needs_the_blocks(server):
    """Each `preempted` slice has the time of its PREEMPT line, and the request it is for."""
    document, lines = server
    preempted = Counter(
        (name, part.begin, part.args.get("for"))
        for name, found in document.requests().items()
        for part in found.inside
        if part.name == "preempted"
    )
    assert preempted == Counter(
        (f"request {line['request']}", line["t"], str(line["for"]) if "for" in line else None)
        for line in of(lines, "PREEMPT")
    )


def test_evictions_are_instants(server):
    """Each EVICT line is an instant with its request, policy, blocks and age."""
    document, lines = server
    assert [
        (now, args["for"], args["by"], args["blocks"], round(args["age_s"] * 10**9))
        for pid, _, now, name, args in document.instants
        if (pid, name) == (2, "evict")
    ] == [
        (
            *(line["t"], str(line["for"]), line["by"]),
            *(sum(abs(count) for _, count in line["runs"]), line["age"]),
        )
        for line in of(lines, "EVICT")
    ]


def test_counters_are_the_state_of_the_trace(server, recorded):
    """Counters of blocks, requests, evictions and hits are the trace's state at each change."""
    document, lines = server
    series = Timeline.read(recorded).series
    ratios = [
        hits / lookups if lookups else 0
        for hits, lookups in zip(series.hit_blocks, series.lookup_blocks, strict=True)
    ]
    # The trace takes less than a minute.
    columns = {
        "blocks": {name: getattr(series, name) for name in ("free", "cached", "private")},
        "requests": {"waiting": series.waiting, "running": series.running},
        "evicted": {"blocks": series.evicted_blocks},
        "hit ratio": {"in all": ratios, "last 60 s": ratios},
    }
    for counter, parts in columns.items():
        rows = [
            (now, dict(zip(parts, row, strict=True)))
            for now, *row in zip(series.time, *parts.values(), strict=True)
        ]
        changes = [row for before, row in itertools.pairwise(rows) if before[1] != row[1]]
        found = [
            (now, {name: float(value) for name, value in values.items()})
            for now, values in document.counters[2, counter]
        ]
        assert found == [rows[0], *changes], counter
    assert len(document.counters) == len(columns)
    assert {sum(values.values()) for _, values in document.counters[2, "blocks"]} == {220}
    gone = sum(abs(count) for line in of(lines, "EVICT") for _, count in line["runs"])
    assert document.counters[2, "evicted"][-1][1] == {"blocks": gone}


def test_links_of_tiers_have_their_transfers(tiered):
    """Each transfer of a tier is a slice on its link, between its line's time and its end."""
    document, lines = tiered
    (link,) = [made for (pid, _), made in document.slices.items() if pid == 3]
    assert document.names[3] == "tier host"
    moved = [line for line in lines if line["event"] in ("OFFLOAD", "LOAD_START")]
    assert {each.name for each in link} == {"store", "load"}
    assert [
        (each.args["request"], each.args["blocks"], round(each.args["usable_s"] * 10**9))
        for each in link
    ] == [(str(line["request"]), line["blocks"], line["done"]) for line in moved]
    assert all(
        line["t"] <= each.begin < each.end <= line["done"]
        for each, line in zip(link, moved, strict=True)
    )
    kinds = {part.name for found in document.requests().values() for part in found.inside}
    assert "loading" in kinds
    assert max(values["used"] for _, values in document.counters[3, "slots"]) > 0


@pytest.mark.parametrize("most", [256, 10])
def test_requests_have_tracks_or_share_lanes(tmp_path, monkeypatch, most):
    """Each request has a track of its own, or shares the fewest lanes if there are many."""
    monkeypatch.setattr(perfetto, "MOST_TRACKS", most)
    document, _ = exported(simulated(tmp_path / "run.jsonl"), tmp_path)
    tracks = {track: made for track, made in document.slices.items() if track[0] == 1}
    names = [document.names[track] for track in tracks]
    if most == 256:
        assert names == list(document.requests())
        return
    slices = document.requests().values()
    ends = sorted([(each.begin, 1) for each in slices] + [(each.end, -1) for each in slices])
    there = peak = 0
    for _, change in ends:
        there += change
        peak = max(peak, there)
    assert sorted(names) == sorted(f"lane {n + 1}" for n in range(peak))


@pytest.mark.parametrize(
    "make", [traces.serve, traces.serve_tiers, traces.record, traces.drop_blocks]
)
def test_traces_of_any_kind_are_valid_documents(tmp_path, make):
    """Traces without a clock, or with rejections, drops or forks, are valid documents."""
    document, lines = exported(make(tmp_path / "run.jsonl"), tmp_path)
    assert len(document.requests()) == len(of(lines, "REQUEST"))


def test_times_are_exact_where_floats_are_not(tmp_path):
    """Times are exact to the nanosecond even after 200 days."""
    path = traces.serve(tmp_path / "run.jsonl")
    late = 200 * 86_400 * 10**9 + 1
    moved = [{**line, "t": line["t"] + late} for line in traces.lines(path)[1:]]
    document, _ = exported(traces.seal(path, [traces.lines(path)[0], *moved]), tmp_path)
    assert document.requests()["request short"].begin == late + 1


def test_texts_of_a_trace_stay_texts(tmp_path):
    """Ids and names in a trace are JSON strings, whatever characters they have."""
    bad = '"}]</script><script>alert(1)</script>\x1b[31m\u2028\\'
    path = traces.write(tmp_path / "t.jsonl", traces.ask(bad, "ab"))
    events = traces.lines(path)
    events[0]["workload"] = {"name": bad, "digest": "d", "options": {bad: bad}}
    document, _ = exported(traces.seal(path, events), tmp_path)
    assert list(document.requests()) == [f"request {bad}"]
    assert bad in document.other["run"]
    assert set(document.names.values()) == {
        "requests", "pool and queue", "evictions", f"request {bad}",
    }  # fmt: skip


def test_a_cut_trace_is_refused_as_by_replay(tmp_path):
    """An incomplete trace is an error with the message of `replay`, and no file is made."""
    path = traces.serve(tmp_path / "run.jsonl")
    path.write_bytes(path.read_bytes()[:-300])
    done = run_here("export", path, "--to", "perfetto", "--out", tmp_path / "o.json")
    assert done.returncode == 1
    assert done.stderr == run_here("replay", path).stderr
    assert list(tmp_path.iterdir()) == [path]


def test_the_document_is_never_in_memory(tmp_path):
    """The document is written while the trace is read."""
    path = simulated(tmp_path / "run.jsonl")
    read = []
    lines = iter(perfetto.PerfettoTrace(path, read.append))
    assert any("evict" in str(line) and not read for line in lines)


def test_a_second_iteration_yields_the_same_lines(tmp_path):
    """A document that is iterated again begins from the start, its counts too."""
    document = perfetto.PerfettoTrace(simulated(tmp_path / "run.jsonl"))
    first, counts = list(document), dict(document.counts)
    assert list(document) == first
    assert document.counts == counts


def test_equal_traces_make_equal_files(tmp_path):
    """Equal traces make equal compressed files.

    `--format`, the old name of `--to`, prints a notice.
    """
    path = traces.serve(tmp_path / "run.jsonl")
    outs = [tmp_path / f"{n}.json.gz" for n in range(2)]
    for out, option in zip(outs, ("--to", "--format"), strict=True):
        done = run_here("export", path, option, "perfetto", "--out", out)
        assert done.returncode == 0
    assert done.stderr == "kvcore: --format is called --to now; use that\n"
    assert outs[0].read_bytes() == outs[1].read_bytes()


def test_each_replica_of_a_cluster_has_its_processes(tmp_path):
    """Each life of a replica has its own processes, with the requests routed to it.

    Its slices end no later than the life.
    """
    path = record_cluster(tmp_path / "run.jsonl")
    document, lines = exported(path, tmp_path)
    processes = {pid: name for pid, name in document.names.items() if isinstance(pid, int)}
    lives = ["replica 0", "replica 1", "replica 2", "replica 1, life 2"]
    assert {*processes.values()} == {
        f"{life}: {part}" for life in lives for part in ("requests", "pool and queue")
    }
    shown = Counter(
        processes[pid].partition(":")[0]
        for (pid, _), made in document.slices.items()
        for each in made
        if each.name.startswith("request ")
    )
    assert shown.total() == len(of(lines, "ROUTE"))
    (failed,) = of(lines, "FAIL")
    ends = [
        each.end
        for (pid, _), made in document.slices.items()
        if processes[pid] == "replica 1: requests"
        for each in made
    ]
    assert max(ends) <= failed["t"]
