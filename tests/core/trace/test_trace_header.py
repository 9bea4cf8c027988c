"""The header of a trace: what a run describes in it, and what is refused."""

import os
from pathlib import Path

import pytest
from helpers.traces import CACHE, ask, lines, write

from kvcore import SLO, InputError, KVCache, Request, Trace, distributions
from kvcore_plugins.workload import Mooncake


def test_the_header_describes_the_run(tmp_path):
    """HEADER has the schema, the cache, the clock, the workload, the seed and the model."""
    source = {"name": "mine", "digest": "00", "options": {"rate": 2.5}}
    path = tmp_path / "trace.jsonl"
    with Trace(path, mode="model", workload=source, seed=7, model="llama-3.1-8b") as trace:
        trace.begin(**CACHE)
    header = lines(path)[0]
    run = {"schema": 2, "kvcore": header["kvcore"], "mode": "model", "workload": source}
    assert (
        header
        == {"n": 0, "t": 0, "event": "HEADER", "seed": 7, "model": "llama-3.1-8b"} | run | CACHE
    )


def test_a_workload_plugin_is_written_with_name_and_digest(tmp_path):
    """A workload plugin is written with its name and digest."""
    workload = Mooncake()
    with Trace(tmp_path / "trace.jsonl", workload=workload) as trace:
        trace.begin(**CACHE)
    written = lines(tmp_path / "trace.jsonl")[0]["workload"]
    assert (written["name"], written["digest"]) == ("mooncake", workload.digest)


def test_options_that_json_cannot_hold_are_written_as_text(tmp_path):
    """Infinities, paths and objects in options are written as text without addresses."""
    options = {
        "half_life": float("inf"),
        "path": Path("a/b"),
        "not UTF-8": Path(os.fsdecode(b"a\xff")),
        "score": len,
        "of": {1: (2, Path)},
    }
    plugins = {"eviction": {"name": "mine", "options": options}}
    path = write(tmp_path / "trace.jsonl", plugins=plugins)
    assert lines(path)[0]["plugins"]["eviction"]["options"] == {
        "half_life": "inf",
        "path": "a/b",
        "not UTF-8": r"a\xff",
        "score": "len",
        "of": {"1": [2, "Path"]},
    }


def described(path, **about):
    """Return the header of a trace of CACHE that was then described."""
    with Trace(path, seed=7, model="llama-3.1-8b") as trace:
        trace.begin(**CACHE)
        trace.describe(**about)
    return lines(path)[0]


def test_fields_that_a_run_describes_are_in_the_header(tmp_path):
    """Fields that a run describes before the first line are in the header."""
    about = {
        "batching": {"max_tokens": 8192, "max_seqs": 256},
        "latency": {"lines": [(1, 2), (3, 4)]},
        "rate_scale": 2.5,
        "executor": "simulate",
        "model": "mistral-7b",
    }
    header = described(tmp_path / "trace.jsonl", mode="model", slo=SLO(ttft_ns=9), **about)
    about |= {"latency": {"lines": [[1, 2], [3, 4]]}, "slo": {"ttft": 9}, "mode": "model"}
    assert {name: header[name] for name in about} == about


@pytest.mark.parametrize("first", ["probe", "plan_ahead", "announce", "open"])
def test_the_header_has_the_key_tokens_of_the_first_request(tmp_path, first):
    """The header has the `key_tokens` of the first request, whichever call has it."""
    path = tmp_path / "trace.jsonl"
    request = Request(id=1, prompt_tokens=1024, keys=[7, 8], key_tokens=512)
    with Trace(path) as trace:
        cache = KVCache(100, 16, trace=trace)
        call = getattr(cache, first)
        seq = call(request, 0) if first in ("plan_ahead", "announce") else call(request)
        if first != "open":
            seq = cache.open(request)
        cache.close(seq)
    assert lines(path)[0]["key_tokens"] == 512


def test_a_request_with_keys_of_another_size_is_refused(tmp_path):
    """A request whose keys have another size is refused before a line is written."""
    path = tmp_path / "trace.jsonl"
    with Trace(path) as trace:
        cache = KVCache(100, 16, trace=trace, key_tokens=512)
        with pytest.raises(InputError, match=r"keys of 64 tokens; .* key_tokens=512"):
            cache.announce(Request(id=1, prompt_tokens=64, keys=[7], key_tokens=64), 0)
    assert [line["event"] for line in lines(path)] == ["HEADER", "END"]


def test_the_header_has_the_plugins_of_the_run_and_of_the_cache(tmp_path):
    """The header has the plugins of the cache and those of the run."""
    more = {"scheduler": {"name": "fcfs", "options": {}}}
    header = described(tmp_path / "trace.jsonl", plugins=more)
    assert header["plugins"] == CACHE["plugins"] | more


def test_workload_and_seed_of_the_trace_take_precedence(tmp_path):
    """Workload and seed of the trace take precedence over those of the run."""
    source = {"name": "mine", "digest": "00", "options": {}}
    header = described(tmp_path / "trace.jsonl", workload=source, seed=8)
    assert (header["workload"], header["seed"], header["mode"]) == (source, 7, "untimed")
    with Trace(tmp_path / "trace.jsonl", workload=source) as trace:
        trace.begin(**CACHE)
        trace.describe(workload=Mooncake(), seed=8)
    header = lines(tmp_path / "trace.jsonl")[0]
    assert (header["workload"], header["seed"]) == (source, 8)


def test_a_written_header_cannot_be_changed(tmp_path):
    """Describing a run raises InputError once the header or the end is written."""
    with Trace(tmp_path / "trace.jsonl") as trace:
        trace.describe(seed=1)
        trace.begin(**CACHE)
        trace.request(ask(1, "a"), 0)
        with pytest.raises(InputError, match=r"header is written: describe"):
            trace.describe(seed=2)
    with pytest.raises(InputError, match=r"is written: describe the run before anything"):
        trace.describe(seed=2)


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"mode": "real"}, r"'real' is not known; there are: untimed, model, wall"),
        ({"modle": 2}, r"'modle' is not known; there are: anonymised, batching, cache"),
        ({"replica": 3}, r"'replica' is not known; there are: anonymised, batching, cache"),
        ({"blocks": 3}, r"'blocks' is not known; there are: anonymised, batching, cache"),
        ({"seed": "abc"}, r"header field 'seed' must be an integer or null, not 'abc'"),
        ({"workload": {"name": "x"}}, r"header field 'workload' must be null or an object "),
        ({"workload": "zipf"}, r"header field 'workload' must be null or an object "),
        ({"plugins": {"eviction": 5}}, r"header field 'plugins' must be an object of kinds"),
        ({"key_tokens": 0}, r"header field 'key_tokens' must be an integer from 1 on, not 0"),
        ({"rate_scale": 0}, r"header field 'rate_scale' must be a number above 0, not 0"),
        ({"batching": 8}, r"header field 'batching' must be an object, not 8"),
        ({"slo": {"ttft": 0.5}}, r"header field 'slo' must be an object of any of ttft, "),
    ],
)
def test_a_description_that_readers_would_refuse_is_refused(tmp_path, about, reason):
    """A description that readers would refuse raises InputError and changes nothing."""
    with Trace(tmp_path / "trace.jsonl") as trace:
        trace.begin(**CACHE)
        with pytest.raises(InputError, match=reason):
            trace.describe(**{"seed": 3} | about)
    header = lines(tmp_path / "trace.jsonl")[0]
    described = {"mode": "untimed", "workload": None, "seed": None} | CACHE
    assert {name: header[name] for name in described} == described


def test_key_tokens_may_be_described_before_the_cache_begins(tmp_path):
    """A trace with the tokens of a key, and no cache yet, can be begun, and has that number."""
    with Trace(tmp_path / "trace.jsonl", key_tokens=32) as trace:
        trace.begin(**CACHE)
    assert lines(tmp_path / "trace.jsonl")[0]["key_tokens"] == 32


def test_a_header_that_json_cannot_hold_is_refused(tmp_path):
    """A value that JSON cannot hold raises InputError at the first line.

    No line is written, and the value can be replaced.
    """
    with Trace(tmp_path / "trace.jsonl") as trace:
        trace.begin(**CACHE)
        trace.describe(batching={"max_tokens": 2**70})
        with pytest.raises(InputError, match=r"the header cannot be written to a trace"):
            trace.free(0, seq=1, runs=[], reason="close")
        trace.describe(batching={})
    assert [line["event"] for line in lines(tmp_path / "trace.jsonl")] == ["HEADER", "END"]


def test_a_write_method_bound_before_the_header_still_writes(tmp_path):
    """A `write` method taken before the header is written still writes lines after it."""
    with Trace(tmp_path / "trace.jsonl") as trace:
        trace.begin(**CACHE)
        write = trace.write
        for seq in (1, 2):
            fields = {"seq": seq, "runs": [], "reason": "close"}
            write({"n": 0, "t": 0, "event": "FREE", **fields})
    assert [line.get("seq") for line in lines(tmp_path / "trace.jsonl")] == [None, 1, 2, None]


def test_the_version_of_a_checkout_is_not_installed(tmp_path, monkeypatch):
    """The header has "not installed" as its version if kvcore is not installed."""
    monkeypatch.setattr(distributions, "version", {}.get)
    assert lines(write(tmp_path / "trace.jsonl"))[0]["kvcore"] == "not installed"
