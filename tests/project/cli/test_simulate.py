"""Tests of `kvcore simulate`: what it runs, prints and writes, and its errors."""

from __future__ import annotations

import json
from functools import partial
from itertools import chain

import pytest
from helpers.commands import error_of, json_of, run_here, stdout_of
from helpers.rows import write_rows

from kvcore import find_capacity
from kvcore_cli import main as frame

SMALL = "zipf:requests=40,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8"
run = partial(stdout_of, "simulate")
report = partial(json_of, "simulate")
refused = partial(error_of, "simulate")


def without_wall_time(document):
    """Return a document without `wall_s`, which differs from run to run."""
    return {key: value for key, value in document.items() if key != "wall_s"}


def header(path):
    """Return the header of a trace."""
    return json.loads(path.read_text().partition("\n")[0])


def test_equal_runs_have_equal_documents():
    """The document is the same for each run, except for the wall time."""
    assert without_wall_time(report(SMALL)) == without_wall_time(report(SMALL))


def test_the_report_has_pool_outcome_and_options():
    """The report begins with the pool and the outcome, and ends with all options."""
    plugins = ["--eviction", "lfu:half_life=60", "--retention", "window:tokens=32"]
    lines = run(SMALL, "--blocks", 50, "--scheduler", "srpt", *plugins).splitlines()
    assert lines[1] == "Pool: 50 blocks of 16 tokens, 800 tokens in all, 100 MiB in fp16."
    assert lines[3] == "40 completed, none rejected."
    _, _, setup = " ".join(lines).partition("Setup: kvcore ")
    for words in (
        "llama-3.1-8b in fp16 on 4 x h100; 50 blocks of 16 tokens",
        "eviction lfu:half_life=60.0, unit=s",
        "retention window:tokens=32, sinks=0",
        "concurrency=32, preemptive=true, length=true; latency roofline:",
        "latency roofline:compute=0.8, bandwidth=0.85, overhead=0.0, layer_overhead=4.5e-05",
        "max_tokens 8192",
        "slo ttft=30, tpot=0.1; seed 0.",
    ):
        assert words in setup


@pytest.mark.parametrize("like", ["kvcore", "vllm", "sglang"])
def test_rules_are_shown_as_a_document(like):
    """`--show --json` is a document with each limit and rule, and each has a meaning."""
    shown = report("--like", like, "--show")
    assert (shown["schema"], shown["rules"]) == (1, like)
    options = shown["options"]
    assert [name for name, each in options.items() if not each["meaning"]] == []
    assert options["max_seqs"]["kvcore"] == 256
    assert (options["lag"]["value"] == 1) is (like == "vllm")


@pytest.mark.parametrize(
    ("rate", "given", "options"),
    [
        (50, {"blocks": 300}, {"rate_scale", "blocks"}),
        (50, {"blocks": 300, "like": "vllm"}, {"rate_scale", "blocks"}),
        (100, {"tensor_parallel": 1}, {"rate_scale", "tensor_parallel"}),
    ],
)
def test_proposed_options_are_enough_for_the_load(rate, given, options):
    """Each option that is proposed for a saturated run gives a run that is not saturated.

    The report and `find_capacity` propose the same options; a pool is a doubling of that given.
    """

    def words(options):
        return chain.from_iterable((f"--{k.replace('_', '-')}", v) for k, v in options.items())

    crowd = f"zipf:requests=200,prefix_tokens=512,suffix_tokens=512,rate={rate}"
    first = report(crowd, *words(given))["saturation"]
    assert first["saturated"]
    assert options <= set(first["holds"])
    assert first["holds"].get("blocks", 300) % 300 == 0
    printed = " ".join(run(crowd, *words(given)).rpartition("\n\n")[2].split())
    for name, value in first["holds"].items():
        assert " ".join(words({name: f"{value:g}"})) in printed
        assert not report(crowd, *words({**given, name: value}))["saturation"]["saturated"]
    assert find_capacity(crowd, **given) == first["holds"]


def test_no_option_is_proposed_with_no_search_or_below_saturation():
    """No option is proposed with `--no-search`, or for a run that is not saturated."""
    crowd = "zipf:requests=200,prefix_tokens=512,suffix_tokens=512,rate=300"
    assert report(crowd, "--no-search")["saturation"]["holds"] is None
    assert "It would hold" not in run(SMALL)


def test_a_rejected_request_is_counted_and_explained():
    """Requests that are too large for the pool are rejected, with a count and the reason."""
    out = run(SMALL, "--blocks", 5)
    assert "0 completed, 40 rejected; the first: it needs 7 blocks; the pool has 5." in out


def test_unknown_outputs_are_reported(tmp_path):
    """A workload without outputs has no speeds and no SLO, and the report has the reason."""
    row = {"timestamp": 0, "input_length": 50, "output_length": 0, "hash_ids": [1]}
    path = tmp_path / "mine.jsonl"
    write_rows(path, *(row | {"timestamp": t} for t in range(3)))
    out = run(path)
    assert "Lengths of outputs are unknown: no completed request asks for any." in out
    assert not [name for name in ("within the SLO", "goodput", "tokens/s") if name in out]


def test_the_slo_is_in_seconds():
    """Times of `--slo` are seconds, and the defaults are Mooncake's 30 s and 0.1 s."""
    assert report(SMALL, "--slo", "ttft=0.000000001")["goodput"] == 0
    slo = report(SMALL)["slo"]
    assert (slo["ttft_s"], slo["tpot_s"], slo["met"]) == (30, 0.1, 1)


def test_the_default_pool_is_device_memory_less_weights():
    """The default pool fills nine tenths of the devices' memory, less the weights."""
    left = 9 * 4 * 80 * 10**9 // 10 - 2 * 8_030_261_248
    assert report(SMALL)["pool"]["blocks"] == left // 2**21


def test_memory_is_divided_into_blocks_of_the_codec():
    """`--memory 40MiB` is 20 blocks in fp16, and 10 in fp32."""
    pools = [
        report(SMALL, "--memory", "40MiB", "--codec", codec)["pool"]["blocks"]
        for codec in ("fp16", "fp32")
    ]
    assert pools == [20, 10]


def test_the_deployment_sets_the_options_of_the_roofline():
    """The roofline has the model, device, number of devices and codec of the deployment."""
    where = ["--model", "llama-3-70b", "--device", "h200", "--tensor-parallel", 8]
    options = report(SMALL, *where, "--codec", "fp32")["config"]["plugins"]["latency"][
        "options"
    ]
    assert options["model"] == "llama-3-70b"
    assert (options["device"], options["tensor_parallel"]) == ("h200", 8)
    assert options["codec"] == "fp32"


def test_options_of_the_roofline_override_the_deployment():
    """A device in the options of the roofline overrides `--device` for times alone."""
    document = report(SMALL, "--latency", "roofline:device=a100-80g")
    assert document["config"]["device"] == "h100"
    assert document["config"]["plugins"]["latency"]["options"]["device"] == "a100-80g"


def test_a_model_can_be_a_file(tmp_path):
    """`--model` accepts a config.json, which sets the bytes of a block and the times."""
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    small, large = (report(SMALL, "--model", model) for model in (path, "llama-3.1-8b"))
    assert small["config"]["bytes_per_block"] == 2 * 2 * 256 * 2 * 16
    assert small["ttft_s"]["mean"] < large["ttft_s"]["mean"]


def test_the_seed_reaches_every_plugin_that_draws():
    """`--seed` seeds workload, scheduler and eviction, unless they have a seed of their own."""
    plugins = ["--eviction", "random:seed=3", "--scheduler", "srpt"]
    config = report(SMALL, "--seed", 8, *plugins)["config"]
    assert config["workload"]["options"]["seed"] == 8
    assert config["plugins"]["scheduler"]["options"]["seed"] == 8
    assert config["plugins"]["eviction"]["options"]["seed"] == 3
    assert config["seed"] == 8


def test_rate_scale_shortens_a_run():
    """`--rate-scale 10` shortens the simulated time of a run to less than a fifth."""
    slow, fast = (report(SMALL, "--rate-scale", scale) for scale in (1, 10))
    assert [document["config"]["rate_scale"] for document in (slow, fast)] == [1, 10]
    assert slow["simulated_s"] > 5 * fast["simulated_s"]


def test_the_limits_of_a_step_are_set():
    """The options of batching set the limits of a step."""
    caps = ["--max-tokens", 64, "--max-seqs", 2, "--steps", "prefill-first", "--no-chunked"]
    assert report(SMALL, *caps, "--watermark", 0)["config"]["batching"] == {
        "max_tokens": 64,
        "max_seqs": 2,
        "chunked": False,
        "steps": "prefill-first",
        "watermark": 0,
    }


def test_the_header_of_a_trace_has_the_whole_configuration(tmp_path):
    """The header of the trace has the whole configuration, and equal runs write equal bytes."""
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for path in paths:
        run(SMALL, "--blocks", 30, "--rate-scale", 2, "--seed", 5, "--trace", path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    head = header(paths[0])
    assert (head["mode"], head["executor"], head["seed"]) == ("model", "simulate", 5)
    assert set(head["plugins"]) == {"eviction", "prefix", "scheduler", "latency"}
    assert head["plugins"]["latency"]["options"]["tensor_parallel"] == 4
    assert head["latency"]["overhead_ps"] == 32 * 45 * 10**6
    assert head["batching"]["max_seqs"] == 256
    assert head["slo"] == {"ttft": 30 * 10**9, "tpot": 10**8}
    assert (head["rate_scale"], head["workload"]["name"]) == (2, "zipf")
    assert head["model"] == {"name": "llama-3.1-8b", "codec": "fp16"}
    assert head["device"] == {"name": "h100", "count": 4}


def test_out_has_three_files(tmp_path):
    """`--out` makes a folder with the summary, a line for each request, and the trace."""
    out = tmp_path / "deep" / "run"
    document = report(SMALL, "--out", out)
    assert sorted(path.name for path in out.iterdir()) == [
        *("requests.jsonl", "summary.json", "trace.jsonl.gz"),
    ]
    written = json.loads((out / "summary.json").read_text())
    assert without_wall_time(written) == without_wall_time(document)
    assert len((out / "requests.jsonl").read_text().splitlines()) == 40
    assert frame.run(["replay", str(out / "trace.jsonl.gz"), "--json"]) == 0


def test_out_replaces_an_earlier_run(tmp_path):
    """`--out` replaces the files of an earlier run and leaves other files."""
    (tmp_path / "notes").write_text("mine")
    report(SMALL, "--out", tmp_path)
    report("zipf:requests=7", "--out", tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["requests"] == 7
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 7
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_failed_run_names_the_row_and_leaves_no_file(tmp_path):
    """A bad row of the workload is named, and no file or folder is left."""
    rows = [
        {"timestamp": 1, "input_length": n, "output_length": 1, "hash_ids": [1]} for n in (5, 0)
    ]
    source = tmp_path / "trace.jsonl"
    write_rows(source, *rows)
    out = tmp_path / "of" / "a" / "run"
    assert "trace.jsonl:2" in refused(source, "--block-size", 512, "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.jsonl"]


def test_a_failed_run_leaves_earlier_files_unchanged(tmp_path):
    """A failed run leaves the files of an earlier run unchanged."""
    report(SMALL, "--out", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused(SMALL, "--out", tmp_path, "--max-tokens", 1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_larger_blocks_are_told_with_the_reason():
    """Where a state and the keys need larger blocks than 16 tokens, a note says which and why.

    A size that was given stays, and is refused with the flag that would do.
    """
    asked = ("simulate", "--model", "jamba-v0.1", "--limit", "5", "--no-search")
    done = run_here(*asked)
    assert done.returncode == 0
    assert "512 tokens a block" in " ".join(done.stdout.split())
    assert done.stderr.startswith("kvcore: blocks have 512 tokens, not 16: those of jamba-v0.1")
    error = refused(*asked[1:], "--block-size", "16")
    assert "Give block_size=512, on the command line --block-size 512" in error
