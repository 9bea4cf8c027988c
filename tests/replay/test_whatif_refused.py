"""What-if: traces, headers and options that are refused."""

import pytest
from helpers.recordings import PLUGINS, timed, untimed
from helpers.serving import ask
from helpers.traces import ask as ask_for
from helpers.traces import lines, record, seal
from helpers.traces import serve as serve_by_hand

from kvcore import SLO, InputError, KVCache, PluginError, Trace, TraceError
from kvcore_plugins.eviction import LRU
from kvcore_plugins.scheduler import FCFS
from kvcore_replay.what_if import whatif


class TestRefused:
    """Traces, headers and options that are refused, without leaving a file of the export."""

    def refused(self, path, kind, message, **asked):
        """Check that the run is refused, and that no file is left of the export."""
        with pytest.raises(kind, match=message):
            whatif(path, export=path.with_name("new.jsonl"), **{"plugins": PLUGINS} | asked)
        assert not list(path.parent.glob("new.jsonl*"))

    @pytest.mark.parametrize(
        "asked",
        [
            {"scheduler": FCFS},
            {"latency": "linear"},
            {"batching": {"max_seqs": 1}},
            {"slo": SLO(ttft_ns=1)},
            {"rate_scale": 2.0},
        ],
        ids=lambda asked: next(iter(asked)),
    )
    def test_options_of_a_server_are_refused_without_a_clock(self, tmp_path, asked):
        """Options of a server are refused for a trace without a clock."""
        path = untimed(tmp_path / "trace.jsonl", ["ab"])
        message = f"without a clock: it has no {next(iter(asked))}.*kvcore simulate trace:FILE"
        self.refused(path, InputError, message, **asked)

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"codec": "int8"}, "codec: a run is made again with the codec that its trace has"),
            ({"evict": "lru"}, "there is no option 'evict'"),
            ({"block_size": "x"}, "block_size: expected a whole number"),
            ({"batching": "8"}, "batching='8': give a Batching, or a table"),
            ({"batching": {"max_seqs": 1}, "max_seqs": 2}, "by itself and in batching"),
            ({"price": "acme"}, "price 'acme' is not known"),
        ],
    )
    def test_options_that_a_recorded_run_cannot_have_are_refused(
        self, tmp_path, asked, message
    ):
        """An option that changes no recorded run is refused, as what no option can be is."""
        path = timed(tmp_path / "trace.jsonl", [ask("a")])
        self.refused(path, InputError, message, **asked)

    def test_a_trace_with_too_many_requests_for_its_size_is_refused(
        self, tmp_path, monkeypatch
    ):
        """A trace with more requests than its file size allows is refused."""
        path = timed(tmp_path / "trace.jsonl", [ask("a"), ask("b"), ask("c")])
        monkeypatch.setattr("kvcore_replay.recorded_run.FREE_REQUESTS", 2)
        monkeypatch.setattr(
            "kvcore_replay.recorded_run.BYTES_OF_REQUEST", path.stat().st_size + 1
        )
        self.refused(path, TraceError, "of this size has at most 2 requests")

    def test_a_trace_under_the_wall_clock_is_refused(self, tmp_path):
        """A trace under the wall clock is refused, since it cannot be repeated."""
        path = timed(tmp_path / "trace.jsonl", [ask("a")])
        events = lines(path)
        events[0]["mode"] = "wall"
        self.refused(seal(path, events), InputError, "by the wall clock.*simulate trace:FILE")

    @pytest.mark.parametrize(
        ("make", "reason"),
        [(record, "made by hand"), (serve_by_hand, "says nothing of the batching")],
    )
    def test_a_trace_of_calls_made_by_hand_is_refused(self, tmp_path, make, reason):
        """Traces of calls made by hand are refused."""
        self.refused(make(tmp_path / "trace.jsonl"), InputError, reason)

    def test_a_model_of_an_older_version_is_refused(self, tmp_path):
        """A model whose fields are not those of this version is refused, with the file."""
        path = timed(tmp_path / "trace.jsonl", [ask("a")])
        events = lines(path)
        events[0]["plugins"]["latency"]["options"]["model"] = {"name": "tiny", "layers": 2}
        message = r"trace\.jsonl: its model has other fields .*kvcore simulate FILE"
        self.refused(seal(path, events), InputError, message)

    def test_a_request_that_was_never_admitted_is_refused(self, tmp_path):
        """An untimed trace with a request that was never admitted is refused."""
        path = tmp_path / "trace.jsonl"
        with Trace(path) as trace:
            cache = KVCache(2, 4, eviction=LRU(), trace=trace)
            trace.request(ask_for("a", "abc"), 0)
            cache.close(cache.open(ask_for("b", "ab")))
        self.refused(path, InputError, r"trace\.jsonl:3: .*made by hand")

    def test_an_inconsistent_trace_is_refused(self, tmp_path):
        """An inconsistent trace raises TraceError with its file and line."""
        path = untimed(tmp_path / "trace.jsonl", ["ab", "ab"])
        events = lines(path)
        hit = next(event for event in events if event["event"] == "HIT")
        hit["blocks"] = 1
        message = rf"trace\.jsonl:{hit['n'] + 1}: HIT: 1 blocks hit; 2 are cached"
        self.refused(seal(path, events), TraceError, message)

    def test_a_missing_plugin_is_refused_unless_it_is_replaced(self, tmp_path):
        """A missing plugin raises PluginError that names it, unless it is replaced."""
        path = untimed(tmp_path / "trace.jsonl", ["ab"])
        events = lines(path)
        events[0]["plugins"]["eviction"]["name"] = "mine"
        seal(path, events)
        message = (
            "eviction plugin 'mine', which is not installed here: install .*--eviction NAME"
        )
        self.refused(path, PluginError, message)
        assert whatif(path, eviction="lru").rerun.completed == 1

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            (
                "lfu",
                {"half_life": -1, "unit": "s", "decay": None},
                "cannot be built as recorded",
            ),
            ("lru", {"old": 1}, "recorded with options {'old': 1}, of which .* makes {}"),
            ("lru", {"old": "1"}, "cannot be built as recorded: .*no option 'old'"),
        ],
    )
    def test_a_plugin_with_other_options_than_recorded_is_refused(
        self, tmp_path, name, options, message
    ):
        """A plugin that cannot be built with exactly the recorded options is refused."""
        path = untimed(tmp_path / "trace.jsonl", ["ab"])
        events = lines(path)
        events[0]["plugins"]["eviction"] = {"name": name, "options": options}
        self.refused(seal(path, events), InputError, message)

    def test_a_file_named_by_the_header_is_not_opened(self, tmp_path):
        """A file named by the header is not opened, unless the caller names it again."""
        table = tmp_path / "steps.csv"
        head = "prefill_tokens,decode_sequences,context_tokens,seconds\n"
        table.write_text(f"{head}0,0,0,1e-8\n")
        text = f"table:path={table}"
        latency = PLUGINS.build("latency", text)
        path = timed(tmp_path / "trace.jsonl", [ask("a")], latency=latency)
        assert whatif(path, latency=text).changes == []
        table.write_text("a secret\n")
        message = r"no file is opened because a trace names it.*: latency table:path=FILE$"
        self.refused(path, InputError, message)

    @pytest.mark.parametrize("option", ["load", "save"])
    def test_no_policy_reads_or_writes_the_file_of_a_header(self, tmp_path, option):
        """The counts of `hazard` are neither read nor written where a header says."""
        path = untimed(tmp_path / "trace.jsonl", ["ab"])
        events = lines(path)
        options = {option: str(tmp_path / "counts.json")}
        events[0]["plugins"]["eviction"] = {"name": "hazard", "options": options}
        message = "no file is opened because a trace names it"
        self.refused(seal(path, events), InputError, message)

    def test_a_latency_model_with_other_coefficients_is_refused(self, tmp_path):
        """A latency model with other coefficients than recorded is refused."""
        path = timed(tmp_path / "trace.jsonl", [ask("a")])
        events = lines(path)
        events[0]["latency"] = {"step_ps": 1}
        self.refused(seal(path, events), InputError, "had other coefficients when this was")

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("batching", {"max_seqs": 4, "seats": 9}, r"trace\.jsonl: batching .*'seats'"),
            ("batching", {"max_seqs": "4"}, "give whole numbers"),
            ("recompute", "dear", r"trace\.jsonl: what it costs .* read from 'dear'"),
            ("recompute", {"model": "mine", "device": "h100"}, "unknown model 'mine'"),
            ("recompute", {"model": 3, "device": None}, "cannot be read from"),
        ],
    )
    def test_invalid_batching_and_costs_of_a_header_are_refused(
        self, tmp_path, field, value, message
    ):
        """Invalid batching and costs in a header raise InputError."""
        path = timed(tmp_path / "trace.jsonl", [ask("a")])
        events = lines(path)
        events[0][field] = value
        self.refused(seal(path, events), InputError, message)
