"""The trace of a cluster, checked line by line, and read as the traces of its replicas."""

from __future__ import annotations

from hashlib import sha256

import pytest
from helpers.clusters import Longest, record_cluster, serve_cluster
from helpers.serving import ask
from helpers.traces import lines, record, seal

import kvcore
from kvcore import InputError, TraceError, read_events
from kvcore_events.model import BlockStored
from kvcore_replay.check.server import TraceChecker
from kvcore_replay.check.trace import check_event, check_trace
from kvcore_replay.export import event_batches
from kvcore_replay.state.replicas import ServerReader
from kvcore_replay.state.residency import rebuild_residency
from kvcore_replay.timeline import Timeline

SCALED = {
    "autoscale": "throughput:interval=0.2,start_up=0.1,cool_down=0",
    "latency": "token-rate:prefill=1,decode=0.1",
    "slo": "ttft=1",
    "fail": (),
}
"""Options of a cluster that starts two replicas and stops both."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the trace of a cluster in which one replica fails and returns."""
    return record_cluster(tmp_path_factory.mktemp("cluster") / "trace.jsonl")


@pytest.fixture
def forge(tmp_path):
    """Return a function that writes forged lines and returns the error of their check."""

    def forged(events):
        with pytest.raises(TraceError) as caught:
            check_trace(seal(tmp_path / "forged.jsonl", events))
        return str(caught.value)

    return forged


class Refusing(Longest):
    """A router that refuses every request."""

    def route(self, request, replicas, now):
        """Return no replica."""


def places(events, name):
    """Return the indices of the lines of an event."""
    return [n for n, line in enumerate(events) if line["event"] == name]


class TestCheck:
    """`check_trace` of a cluster: its replicas, and the routing between them."""

    def test_of_a_life_that_ended_counts_are_kept_and_no_report(self, path, monkeypatch):
        """A report is made of each replica once, at the end: a trace may have many failures."""
        made, report = [], TraceChecker.report
        monkeypatch.setattr(TraceChecker, "report", lambda self: made.append(1) or report(self))
        assert sum(part["failures"] for part in check_trace(path).as_dict()["replicas"]) == 1
        assert len(made) == 3

    def test_the_counts_of_a_report_are_the_sums_over_its_replicas(self, path):
        """The counts of the report are the sums of the counts of its replicas."""
        report = check_trace(path)
        document = report.as_dict()
        parts = document["replicas"]
        assert report.complete
        assert (report.requests, report.finished, report.rejected) == (30, 30, 0)
        assert sum(part["routed"] for part in parts) == document["events"]["ROUTE"] > 30
        assert [part["failures"] for part in parts] == [0, 1, 0]
        for name in ("finished", "rejected"):
            assert document[name] == sum(part[name] for part in parts)
        for name in ("pool", "preemptions"):
            for key, total in document[name].items():
                assert total == sum(part[name][key] for part in parts)
        for key in ("lookup_blocks", "hit_blocks", "self_hit_blocks"):
            assert document["hit"][key] == sum(part["hit"][key] for part in parts)
        # Evictions: their digests are hashed together, those of ended lives included.
        evictions = [part["evictions"] for part in parts]
        assert document["evictions"]["blocks"] == sum(
            eviction["blocks"] for eviction in evictions
        )
        digests = b"".join(bytes.fromhex(eviction["digest"]) for eviction in evictions)
        assert document["evictions"]["digest"] == sha256(digests).hexdigest()

    def test_the_hits_of_a_trace_are_those_of_its_run(self, tmp_path):
        """The hits of a trace, lives before a failure included, are those of the run."""
        given = {"replicas": 2, "blocks": 40, "tensor_parallel": 1, "limit": 30}
        trace = tmp_path / "trace.jsonl"
        result = kvcore.simulate_cluster(
            "zipf:requests=60,rate=50", trace=trace, fail="replica=0,at=0.2,for=1", **given
        )
        report = check_trace(trace)
        assert report.hit["hit_blocks"] == result.stats.hit_blocks
        assert report.hit["lookup_blocks"] == result.stats.lookup_blocks

    def test_a_failed_replica_is_down_with_an_empty_pool(self, path):
        """A replica that has failed is down with an empty pool until it returns."""
        down = check_trace(path, at=350_000_000).replicas[1]
        assert not down["up"]
        assert (down["pool"]["cached"], down["pool"]["private"]) == (0, 0)
        assert check_trace(path, at=600_000_000).replicas[1]["up"]

    @pytest.mark.parametrize("fail", ["replica=0,at=0.1", "replica=1,at=0.123456789,for=0.5"])
    def test_a_replica_may_fail_at_any_time_and_for_ever(self, tmp_path, fail):
        """A replica may fail at any nanosecond, and may not return."""
        trace = record_cluster(tmp_path / "trace.jsonl", fail=fail)
        assert check_trace(trace).finished == 30

    def test_a_header_may_say_that_there_is_no_planner_and_no_split(self, path, tmp_path):
        """A header with null for planner and pools is that of a cluster without them."""
        events = lines(path)
        events[0]["routing"] |= {"autoscale": None, "disaggregate": None}
        assert check_trace(seal(tmp_path / "null.jsonl", events)).finished == 30


class TestForgeries:
    """Forged lines are refused even in a file with correct numbers, counts and digest."""

    def test_no_routing_line_can_be_left_out_or_repeated(self, path, forge):
        """No REQUEST, ROUTE, FAIL, RETURN or FINISH can be left out or repeated."""
        events = lines(path)
        for name in ("REQUEST", "ROUTE", "FAIL", "RETURN", "FINISH"):
            for n in places(events, name):
                assert forge(events[:n] + events[n + 1 :])
                assert forge(events[: n + 1] + events[n:])

    def test_a_line_of_another_replica_is_refused(self, path, forge):
        """A line with another replica, an unknown one, or none is refused."""
        events = lines(path)
        for n, line in [*enumerate(events)][::5]:
            if "replica" in line:
                before, after = events[:n], events[n + 1 :]
                other = line | {"replica": (line["replica"] + 1) % 3}
                assert forge([*before, other, *after])
                assert "'replica' must be one from 0 to 2" in forge(
                    [*before, line | {"replica": 3}, *after]
                )
                none = {name: value for name, value in line.items() if name != "replica"}
                assert "'replica' must be one from 0 to 2" in forge([*before, none, *after])

    def test_a_route_with_another_field_is_refused(self, path, forge):
        """A ROUTE with another request, time or number of tokens is refused."""
        events = lines(path)
        given = [n for n in places(events, "ROUTE") if "tokens" in events[n]]
        assert given
        for n in given:
            line, before, after = events[n], events[:n], events[n + 1 :]
            for change, reason in (
                ({"request": line["request"] + 1}, f"request {line['request'] + 1} "),
                ({"request": "x"}, "request 'x' does not wait to be routed"),
                ({"tokens": line["tokens"] + 16}, "cached tokens; "),
                ({"tokens": line["tokens"] - 1}, "cached tokens; "),
                ({"t": line["t"] + 1}, f"waits since {line['t']} ns, with replicas up"),
                ({"t": line["t"] - 1}, "time goes back"),
            ):
                assert reason in forge([*before, line | change, *after])

    def test_a_router_cannot_expect_more_tokens_than_it_has_sent(self, path, forge):
        """ROUTE cannot estimate more cached tokens than were ever sent to the replica.

        This holds for routers without the exact view.
        """
        events = lines(path)
        events[0]["routing"]["view"] = "index"
        (n, *_) = [n for n in places(events, "ROUTE") if "tokens" in events[n]]
        line = events[n] | {"tokens": 1 << 20}
        reason = forge([*events[:n], line, *events[n + 1 :]])
        assert "were ever sent" in reason

    @pytest.mark.parametrize(
        ("name", "of_another"),
        [("FAIL", "HEADER has no such failure next"), ("RETURN", " is up")],
    )
    def test_a_failure_unlike_that_of_the_header_is_refused(
        self, path, forge, name, of_another
    ):
        """FAIL and RETURN of another time or replica than the header's are refused."""
        events = lines(path)
        (n,) = places(events, name)
        line, before, after = events[n], events[:n], events[n + 1 :]
        for change, reason in (
            ({"replica": 0}, of_another),
            ({"replica": 2}, of_another),
            ({"t": line["t"] - 1}, "HEADER has no such failure next"),
            ({"t": line["t"] + 1}, "HEADER has no such failure next"),
        ):
            assert forge([*before, line | change, *after]).endswith(reason)

    def test_a_router_rejects_only_requests_that_wait(self, tmp_path, forge):
        """A REJECT of the router is refused for a request that does not wait.

        It cannot be left out, repeated, or given to a replica, and no ROUTE may follow.
        """
        fail = [f"replica={index},at=0.2" for index in range(3)]
        events = lines(record_cluster(tmp_path / "trace.jsonl", fail=fail))
        (n, *_) = places(events, "REJECT")
        line, before, after = events[n], events[:n], events[n + 1 :]
        route = events[places(events, "ROUTE")[0]] | {"t": line["t"], "request": 8}
        for changed, reason in (
            ([line, route], "ROUTE: request 8 does not wait to be routed"),
            ([], "END: requests that are not served: 1"),
            ([line, line], "REJECT: request 8 does not wait to be routed"),
            ([line | {"request": "x"}], "REJECT: request 'x' does not wait to be routed"),
            ([line | {"replica": 0}], "REJECT: replica 0 is not up"),
        ):
            assert reason in forge([*before, *changed, *after])

    def test_a_forged_line_of_disaggregation_is_refused(self, tmp_path, forge):
        """With disaggregation a wrong replica, estimate, transfer time or header is refused."""
        split = {"replicas": 1, "disaggregate": "prefill=1,decode=2,overlap=whole"}
        events = lines(record_cluster(tmp_path / "trace.jsonl", fail=(), **split))
        routes, moves = places(events, "ROUTE"), places(events, "TRANSFER")
        decode = next(n for n in routes if events[n]["leg"] == "decode")
        prefill = next(n for n in routes if events[n]["leg"] == "prefill")
        done = events[moves[0]]["done"]
        for n, change, reason in (
            (decode, {"tokens": 1 << 20}, "were ever sent"),
            (decode, {"replica": 0}, "not in a pool for decode"),
            (prefill, {"replica": 1}, "not in a pool for prefill"),
            (moves[0], {"done": done + 1}, f"goes on at {done + 1} ns"),
            (moves[0], {"done": done - 1}, f"goes on at {done - 1} ns"),
            (
                0,
                {"routing": events[0]["routing"] | {"disaggregate": "prefill=x"}},
                "pools that cannot be",
            ),
            (
                0,
                {"routing": events[0]["routing"] | {"disaggregate": 7}},
                "HEADER field 'routing.disaggregate': expected `str | null`, got `int`",
            ),
        ):
            assert reason in forge([*events[:n], events[n] | change, *events[n + 1 :]])

    def test_a_request_that_the_decode_router_refuses_goes_nowhere(self, tmp_path, forge):
        """A request that was prefilled, and that no replica decodes, is refused, not routed."""
        requests = [ask("a", prompt=8, output=4)]
        run = serve_cluster(
            requests, split="prefill=1,decode=1,latency=0s", decode_router=Refusing()
        )
        (tmp_path / "trace.jsonl").write_bytes(run.trace)
        events = lines(tmp_path / "trace.jsonl")
        report = check_trace(tmp_path / "trace.jsonl")
        assert (report.complete, report.finished, report.rejected) == (True, 0, 1)
        route, refused = events[places(events, "ROUTE")[0]], places(events, "REJECT")[0]
        again = route | {"t": events[refused]["t"]}
        assert "with replicas up" in forge([*events[:refused], again, *events[refused:]])

    def test_a_replica_that_leaves_must_stop(self, tmp_path, forge):
        """A replica that leaves must stop after its last request."""
        events = lines(record_cluster(tmp_path / "trace.jsonl", **SCALED))
        for n in places(events, "FAIL"):
            assert "does not stop" in forge(events[:n] + events[n + 1 :])

    @pytest.mark.parametrize(
        ("replicas", "reason"),
        [
            ([{"count": 2}], "ROUTE: field 'replica' must be one from 0 to 1"),
            ([{"count": 20_000}], "HEADER has more than 10,000 replicas"),
            ([{"count": 2}, {"count": 1, "blocks": 19}], "ALLOC: run [19, 1] leaves the block"),
            ([], "HEADER field 'replicas': expected `array` of length >= 1"),
        ],
    )
    def test_the_header_of_other_replicas_is_refused(self, path, forge, replicas, reason):
        """A header with other replicas or pools than the lines is refused."""
        events = lines(path)
        assert reason in forge([events[0] | {"replicas": replicas}, *events[1:]])

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"fail": []}, "FAIL: HEADER has no such failure next"),
            ({"fail": ["replica=x"]}, "HEADER has failures that cannot be: ['replica=x']"),
            ({"fail": 7}, "HEADER field 'routing.fail': expected `array`, got `int`"),
            ({"up": [9]}, "routing says that [9] of 3 replicas are up"),
            ({"up": [0, 1]}, "ROUTE: replica 2 is not up"),
        ],
    )
    def test_the_header_of_another_routing_is_refused(self, path, forge, change, reason):
        """A header with other failures, or other replicas that are up, is refused."""
        events = lines(path)
        events[0]["routing"] |= change
        assert reason in forge(events)

    def test_a_trace_of_one_server_has_no_line_with_a_replica(self, tmp_path, forge):
        """A trace of one server has no ROUTE and no line with a replica."""
        events = lines(record(tmp_path / "one.jsonl"))
        for n in range(1, len(events) - 1):
            placed = events[n] | {"replica": 0}
            assert "HEADER has no replicas" in forge([*events[:n], placed, *events[n + 1 :]])
        request = next(line["id"] for line in events if line["event"] == "REQUEST")
        route = {"n": 0, "t": events[-2]["t"], "event": "ROUTE", "request": request}
        assert "HEADER has no replicas" in forge([*events[:-1], route, events[-1]])


class TestServerReader:
    """`ServerReader` reads a replica of a cluster as one server."""

    @pytest.mark.parametrize("replica", ["0", "1:1", "1:2", "2:1", 2])
    def test_each_life_is_the_trace_of_a_server(self, path, replica):
        """The lines of one life pass the check of one server, and are numbered from 0 on."""
        reader, checker, numbers = ServerReader(path, replica), None, []
        for event in reader:
            checker = check_event(reader, checker, event)
            numbers.append(event.n)
        assert reader.complete
        assert type(checker) is TraceChecker
        assert numbers == [*range(len(numbers))]
        assert len(numbers) > 10

    def test_lives_have_all_lines_of_replicas(self, path):
        """The lives have every line of their replicas, and one REQUEST for every ROUTE."""
        found = [
            event.event
            for replica in ("0", "1:1", "1:2", "2")
            for event in ServerReader(path, replica)
        ]
        whole = [event.event for event in read_events(path)]
        for name in ("HIT", "ALLOC", "COMMIT", "EVICT", "FINISH", "FREE"):
            assert found.count(name) == whole.count(name) > 0
        assert found.count("REQUEST") == whole.count("ROUTE")

    @pytest.mark.parametrize(
        ("replica", "reason"),
        [
            (None, "is the trace of 3 replicas: say which one, replica 0 to 2"),
            (3, "is the trace of 3 replicas"),
            (1, "give replica 1:1 for what was before"),
            ("1:3", "lives 1 to 2, and no 3"),
            ("1:0", "lives 1 to 2, and no 0"),
            ("first", "is no replica: give its number"),
            pytest.param("1" * 5000, "is no replica", id="endless"),
            pytest.param("1:" + "1" * 5000, "is no replica", id="endless life"),
        ],
    )
    def test_a_missing_or_unknown_replica_is_refused(self, path, replica, reason):
        """A missing, unknown or ambiguous replica raises InputError with the choices."""
        with pytest.raises(InputError, match=reason):
            list(ServerReader(path, replica))

    def test_the_only_replica_of_a_trace_is_named(self, tmp_path):
        """A trace of one replica that is read without naming it says which one there is."""
        one = record_cluster(tmp_path / "trace.jsonl", replicas=1, fail=())
        with pytest.raises(InputError, match=r"the trace of 1 replica: give replica 0$"):
            list(ServerReader(one, None))

    def test_a_replica_that_was_never_up_has_no_life(self, tmp_path):
        """The first life of a replica that no planner has started is refused."""
        planned = record_cluster(
            tmp_path / "trace.jsonl", fail=(), autoscale="load:interval=99"
        )
        with pytest.raises(InputError, match="replica 2 was never up"):
            list(ServerReader(planned, "2:1"))

    def test_damage_after_the_last_line_of_a_replica_raises_an_error(self, path, tmp_path):
        """Damage after the last line of a replica raises TraceError, too."""
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(path.read_bytes().replace(b'"output":8}', b'"output":9}'))
        reader = ServerReader(cut, "1:1")
        with pytest.raises(TraceError, match="digest"):
            list(reader)

    def test_timeline_residency_and_events_are_read_for_one_replica(self, path):
        """Timeline, residency and KV events can be read for one replica of a cluster."""
        timeline = Timeline.read(path, replica="1:2")
        finished = sum(time >= 0 for time in timeline.requests.finish)
        assert finished == len(timeline.requests) > 0
        life = [event for event in ServerReader(path, "1:2") if event.event == "COMMIT"]
        new = sum(event.blocks for event in life if event.how in ("new", "grown"))
        assert rebuild_residency(path, "1:2").as_dict()["stored_blocks"] == new > 0
        found = [event for batch in event_batches(path, replica=0) for event in batch.events]
        life = [event for event in ServerReader(path, 0) if event.event == "COMMIT"]
        new = sum(event.blocks for event in life if event.how in ("new", "grown"))
        stored = [event for event in found if isinstance(event, BlockStored)]
        assert sum(len(event.hashes) for event in stored) == new > 0
        for read in (Timeline.read, rebuild_residency):
            with pytest.raises(InputError, match="say which one"):
                read(path)
