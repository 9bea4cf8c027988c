"""Validation of simulations against measured rows: how rows are read, run and compared."""

import csv
import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from helpers.rows import write_rows
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.errors import InputError, PluginError
from kvcore.plugins.options import Spec
from kvcore_lab.measured import rows as measured
from kvcore_lab.measured import samples as samples_module
from kvcore_lab.measured.validation import Errors
from kvcore_lab.report.validation import ValidationReport, command

PUBLISHED = Path(__file__).parents[1] / "data" / "tensorrt_llm_1_0.csv"

ROW = {
    "model": "llama-3.1-8b",
    "device": "h100",
    "tensor_parallel": 1,
    "input_tokens": 128,
    "output_tokens": 16,
    "concurrency": 2,
    "tpot": 0.01,
}

SILICON = {
    "id": "a",
    "silicon_data_source": "x; silicon_concurrency=2",
    "backend": "trtllm",
    "backend_version": "1.0",
    "model_path": "meta-llama/Llama-3.1-8B-Instruct-FP8",
    "system": "h100_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "128",
    "osl": "16",
    "gemm_quant_mode": "fp8_block",
    "batch_size": "2",
    "tp_size": "1",
    "pp_size": "1",
    "silicon_ttft_ms": "20",
    "silicon_tpot_ms": "5",
}


BENCH = {
    "date": "20260105-101010", "backend": "vllm", "label": None, "num_prompts": 9,
    "model_id": "meta-llama/Llama-3.1-8B-Instruct", "request_rate": "inf",
    "max_concurrency": 2, "duration": 3.0, "completed": 8, "total_input_tokens": 1024,
    "total_output_tokens": 132, "output_throughput": 44.0, "mean_ttft_ms": 20.0,
    "median_ttft_ms": 1.0, "mean_tpot_ms": 5.0, "mean_itl_ms": 5.1,
}  # fmt: skip
"""A result of `vllm bench serve --save-result`; SGLang's has the same fields, but the model."""


def write_csv(path, *rows):
    """Write rows as a table with the columns of the first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_lines(path, *rows):
    """Write rows as JSON Lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def path(tmp_path):
    """Return the path of a file to write."""
    return tmp_path / "rows"


def refused(path, *rows):
    """Return the error about a file of these rows."""
    with pytest.raises(InputError) as error:
        kvcore.validate(write_rows(path, *rows))
    return str(error.value)


loads = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b"]),
        "device": st.sampled_from(["h100", "h200"]),
        "tensor_parallel": st.sampled_from([1, 2]),
        "weights_dtype": st.sampled_from(["bf16", "fp8"]),
        "codec": st.sampled_from(["fp16", "fp8"]),
        "max_seqs": st.sampled_from([3, 256]),
        "input_tokens": st.integers(1, 3_000),
        "output_tokens": st.integers(2, 40),
        "requests": st.integers(1, 12),
        "spread": st.sampled_from([0, 0.2]),
    }
)
LOAD = ("input_tokens", "output_tokens", "requests", "spread", "concurrency", "rate")


@given(row=loads, load=st.sampled_from([{"concurrency": 3}, {"rate": 20}, {"rate": "inf"}]))
def test_rows_measured_by_kvcore_have_errors_of_zero(tmp_path_factory, row, load):
    """Rows that `kvcore.simulate` has measured are validated with errors of exactly 0."""
    row |= load
    options = {name: value for name, value in row.items() if name not in LOAD}
    bench = ",".join(f"{name}={row[name]}" for name in LOAD if name in row)
    result = kvcore.simulate(f"bench:{bench}", **options)
    row |= {"ttft": result.ttft.mean, "tpot": result.tpot.mean}
    row |= {"throughput": result.throughput_tokens_s}
    path = tmp_path_factory.mktemp("rows") / "rows"
    for write in (write_csv, write_rows):
        found = kvcore.validate(write(path, row))
        assert not found.left_out
        assert [found.errors(name) for name in found.measures] == [Errors(1, 0, 0, 0)] * 3


def test_a_row_without_requests_has_rounds_of_its_clients(path):
    """A row without `requests` sends `rounds` requests for each of its clients."""
    rows = write_rows(path, ROW, ROW | {"requests": 3, "spread": 0})
    drawn, given_ = kvcore.validate(rows, rounds=4, spread=0.5).compared
    assert drawn.config.workload.options["requests"] == "8"
    assert drawn.config.workload.options["spread"] == "0.5"
    assert given_.config.workload.options["requests"] == "3"
    assert given_.config.workload.options["spread"] == "0.0"


def test_the_columns_of_a_row_take_precedence_over_options(path):
    """A row's own value of a column takes precedence over an option of the call."""
    rows = write_rows(path, ROW, ROW | {"max_seqs": 7})
    found = kvcore.validate(rows, max_seqs=5).compared
    assert [each.config.max_seqs for each in found] == [5, 7]


def test_a_row_of_a_known_engine_is_simulated_by_its_rules(path):
    """A row of a known engine is simulated like that engine, unless `like` is None.

    A row of another engine is simulated with the defaults.
    """
    rows = write_rows(path, ROW | {"engine": "vllm"}, ROW | {"engine": "trtllm"})
    found = kvcore.validate(rows).compared
    assert [each.config.like for each in found] == [Spec("vllm"), None]
    assert [each.config.build().batching.rules.lag for each in found] == [1, 0]
    found = kvcore.validate(rows, like=None).compared
    assert [each.config.like for each in found] == [None, None]


def test_rows_that_cannot_be_simulated_are_counted_by_reason(path):
    """Rows that cannot be simulated are counted by reason; the others are simulated."""
    unknown, large = ROW | {"model": "llama-9-8b"}, ROW | {"model": "llama-3.1-70b"}
    found = kvcore.validate(write_rows(path, unknown, ROW, large, unknown))
    assert len(found.compared) == 1
    (first, first_rows), (second, second_rows) = found.left_out.items()
    assert "unknown model 'llama-9-8b'" in first
    assert "llama-3.1-70b on 1 x h100" in second
    assert (first_rows, second_rows) == (2, 1)


def test_a_row_with_rejected_requests_is_left_out(path):
    """A row whose requests are rejected is left out, with the reason."""
    found = kvcore.validate(write_lines(path, ROW, ROW | {"input_tokens": 20_000}), blocks=100)
    assert [each.row.line for each in found.compared] == [1]
    assert "rejected" in next(iter(found.left_out))


def test_a_row_of_which_nothing_is_simulated_is_left_out(path):
    """A time per token is that of a second one: a report on such rows alone had no measure."""
    found = kvcore.validate(write_rows(path, ROW, ROW | {"output_tokens": 1}))
    assert [each.row.line for each in found.compared] == [1]
    assert [*found.left_out] == ["its simulation has no tpot, which is all that was measured"]


def test_rows_are_told_apart_by_numbers_as_a_table_has_them(path):
    """A rate of 2 is asked for as `2`, and groups of numbers are in the order of these."""
    rates = [{"rate": rate, "chunked": "true"} for rate in (10, "inf", 2, 0.5)]
    row = {name: value for name, value in ROW.items() if name != "concurrency"}
    write_csv(path, *({**row, **rate, "requests": 2} for rate in rates))
    assert [*kvcore.validate(path).groups("rate")] == ["0.5", "2", "10", "inf"]
    for rate in ("2", "2.0"):
        (found,) = kvcore.validate(path, where={"rate": rate, "chunked": "true"}).compared
        assert found.row.load["rate"] == 2


def test_rows_are_told_apart_by_what_was_measured(path):
    """Columns of measures are columns as well: rows are chosen and grouped by them."""
    write_csv(path, ROW, ROW | {"tpot": 0.5})
    (found,) = kvcore.validate(path, where={"tpot": "0.5"}).compared
    assert found.row.line == 3
    assert "0.5" in kvcore.validate(path).groups("tpot")


def test_the_csv_has_each_column_once(path):
    """The CSV of a report is a table, also of rows that name the rules of an engine."""
    report = ValidationReport(kvcore.validate(write_csv(path, ROW | {"like": "vllm"})))
    report.write_csv(file := io.StringIO())
    (names, *_) = csv.reader(file.getvalue().splitlines())
    assert len(names) == len({*names})
    assert "like" in names


def test_the_command_of_a_row_is_one_that_a_shell_reads(path):
    """Each tier has a flag of its own, and what a shell would divide is quoted."""
    tiers = ["host:memory=1GiB", f"disk:path={path.parent / 'a b'},memory=1GiB"]
    (compared,) = kvcore.validate(write_csv(path, ROW), tier=tiers, chunked=True).compared
    words = shlex.split(command(compared))
    assert [words[place + 1] for place, word in enumerate(words) if word == "--tier"] == tiers
    assert {"--chunked", "--device"} < {*words}


def test_a_file_without_a_usable_row_is_refused(path):
    """If no row can be simulated, InputError has the first reason."""
    reason = refused(path, ROW | {"device": "h900"})
    assert "none of 1 rows can be simulated; the first: " in reason
    assert "unknown device 'h900'" in reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tpto": 1}, "there is no column 'tpto' (did you mean 'tpot'?). There are: id,"),
        ({"concurrency": 1.5}, "concurrency 1.5: expected a whole number from 1"),
        ({"concurrency": True}, "concurrency true: expected a whole number from 1"),
        ({"tpot": -1}, "tpot -1: expected a number above 0"),
        ({"tpot": "fast"}, "tpot 'fast': expected a number above 0"),
        ({"rate": "inf", "tpot": "inf"}, "tpot 'inf': expected a number above 0"),
        ({"rate": 0}, "rate 0: expected a number above 0"),
        ({"spread": -0.1}, "spread -0.1: expected a share"),
        ({"spread": 5}, "spread 5: expected a share below 1"),
        ({"tpot": ""}, "a row needs something measured: ttft, tpot, throughput"),
        ({"concurrency": None}, "a row needs a concurrency"),
        ({"model": ""}, "a row needs a value of model"),
        ({"codec": "fp8:"}, "codec: "),
        ({"max_seqs": "many"}, "max_seqs: "),
        ({"weights_dtype": "fp3"}, "weights_dtype: 'fp3' is not one of"),
        ({"slo": "ttft=1"}, "there is no column 'slo'"),
    ],
)
def test_a_bad_cell_is_named(path, change, reason):
    """A bad cell raises InputError with its file, line and column."""
    assert f"{path}:2: {reason}" in refused(path, ROW, ROW | change)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("model,model\na,b\n", ":1: two columns are called 'model'"),
        ("model,device\na\n", ":2: 1 cells under 2 columns"),
        ('{"model": \n', ":1: not a JSON object"),
        ('model\n"a\n', ":2: not a row of a table: a quoted cell has no end on this line"),
        ("model,device\n", "none of 0 rows can be simulated"),
    ],
)
def test_a_file_that_is_no_table_is_refused(path, text, reason):
    """A file that is no table raises InputError that names the file."""
    path.write_text(text)
    with pytest.raises(InputError, match=f"^{path}.*{reason}"):
        kvcore.validate(path)


def test_errors_are_medians_and_a_nearest_rank():
    """Errors are medians, signed and absolute, and the 90th percentile by nearest rank."""
    assert Errors.from_errors([0.2, -0.1, -0.5, 0.3]) == Errors(
        4, pytest.approx(0.05), 0.25, 0.5
    )
    assert Errors.from_errors([]) is None


def test_silicon_samples_are_read(path):
    """A silicon sample has models, units and codecs converted to those of kvcore."""
    (row,) = measured.read_measured(write_csv(path, SILICON))
    assert row.options.items() >= {"model": "llama-3.1-8b", "device": "h100"}.items()
    assert (row.options["weights_dtype"], str(row.options["codec"])) == ("fp8", "fp8")
    assert row.load == {"input_tokens": 128, "output_tokens": 16, "concurrency": 2}
    assert row.values == {"ttft": 0.02, "tpot": 0.005}
    assert row.labels == {"id": "a", "engine": "trtllm", "version": "1.0", "split": "fitted"}
    assert len(kvcore.validate(path).compared) == 1


def test_samples_of_fixed_lengths_have_no_spread(path):
    """The requests of a gap analysis all have the same length; those of others vary."""
    source = "x-gap-analysis/a.csv; silicon_concurrency=2"
    fixed = SILICON | {"silicon_data_source": source, "silicon_ttft_ms": "9"}
    found = kvcore.validate(write_csv(path, SILICON, fixed)).compared
    spreads = [each.config.workload.options["spread"] for each in found]
    assert spreads == ["0.2", "0.0"]


def samples(*changes):
    """Return samples with these changes, each with times of its own."""
    return [
        SILICON | {"silicon_ttft_ms": str(20 + index / 8)} | change
        for index, change in enumerate(changes)
    ]


def clients(number):
    """Return the columns of a sample with so many clients."""
    return {"silicon_data_source": f"silicon_concurrency={number}", "batch_size": str(number)}


R1, V3 = (
    {"model_path": f"deepseek-ai/DeepSeek-{name}", "tp_size": "8"} for name in ("R1", "V3")
)
ON_H200 = {"system": "h200_sxm"}


@pytest.mark.parametrize(
    ("rows", "reasons"),
    [
        # One measurement, twice in the file: the first is taken.
        ([SILICON, SILICON | {"id": "b"}], [None, "the same measurement"]),
        # Once with all digits, once in hundredths of a millisecond.
        (
            [SILICON | {"silicon_tpot_ms": "5.1234"}, SILICON | {"silicon_tpot_ms": "5.12"}],
            [None, "the same measurement"],
        ),
        # One measurement, of two servers: neither is known to be the one that was measured.
        ([SILICON, SILICON | {"tp_size": "2"}], ["one measurement of several servers"] * 2),
        # Measured twice, with times that differ a little, or much.
        (samples({}, {"silicon_tpot_ms": "6"}), [None, None]),
        (samples({}, {"silicon_tpot_ms": "7"}), ["measured again with quite another TPOT"] * 2),
        # Models of one shape are one model.
        (
            samples(R1 | ON_H200, V3 | ON_H200 | {"silicon_tpot_ms": "7"}),
            ["measured again with quite another TPOT"] * 2,
        ),
        # More clients take longer, if all are served at once.
        (
            samples(clients(8), clients(16) | {"silicon_tpot_ms": "3"}),
            [None, "faster with more clients, so some waited"],
        ),
        (samples(clients(8), clients(16) | {"silicon_tpot_ms": "4.5"}), [None, None]),
        # Eight GPUs are a server.
        (samples(R1 | ON_H200 | {"tp_size": "16"}), ["more devices than a server has"]),
    ],
)
def test_samples_that_others_contradict_are_left_out(path, rows, reasons):
    """Samples that contradict others are left out, each with its reason."""
    found = list(measured.read_measured(write_csv(path, *rows)))
    assert [row if isinstance(row, str) else None for row in found] == reasons


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mode": "disagg"}, "prefill and decode on servers of their own"),
        ({"silicon_data_source": "x"}, "no concurrency recorded"),
        ({"batch_size": "1"}, "attention or requests divided among replicas"),
        ({"pp_size": "2"}, "pipeline stages"),
        ({"model_path": "a/b-9"}, "model b-9 is not in the catalogue"),
        ({"system": "gb900"}, "device gb900 is not in the catalogue"),
    ],
)
def test_silicon_samples_that_cannot_be_simulated_are_left_out(path, change, why):
    """Silicon samples that kvcore cannot simulate are left out, with the reason."""
    found = kvcore.validate(write_csv(path, SILICON, SILICON | change))
    assert found.left_out == {why: 1}


@pytest.mark.parametrize("cell", ["n/a", [9]])
def test_a_time_of_a_sample_that_is_no_number_is_named(path, cell):
    """The error for a time that cannot be read names its line and column."""
    write_rows(path, SILICON, SILICON | {"silicon_ttft_ms": cell})
    with pytest.raises(InputError, match=r"rows:2: silicon_ttft_ms '.*': expected a number"):
        kvcore.validate(path)


def test_a_sample_may_lack_its_engine(path):
    """A sample without an engine is simulated by kvcore's own rules."""
    (compared,) = kvcore.validate(write_csv(path, SILICON | {"backend": ""})).compared
    assert "engine" not in compared.row.labels


def test_weights_without_a_format_are_as_released(path):
    """Samples without a format use weights as released, and so do those of mxfp4 models."""
    bare = SILICON | {"gemm_quant_mode": "", "precision": ""}
    oss = SILICON | {"gemm_quant_mode": "nvfp4", "model_path": "openai/gpt-oss-120b"}
    oss |= {"tp_size": "2"}
    for row in measured.read_measured(write_csv(path, bare, oss | {"silicon_ttft_ms": "9"})):
        assert "weights_dtype" not in row.options
        assert str(row.options["codec"]) == "fp16"


def test_weights_in_nvfp4_come_with_kv_in_fp8(path):
    """Samples in NVFP4 have weights in it, and K/V in fp8, as the checkpoints have."""
    (row,) = measured.read_measured(write_csv(path, SILICON | {"gemm_quant_mode": "nvfp4"}))
    assert (row.options["weights_dtype"], str(row.options["codec"])) == ("nvfp4", "fp8")


@pytest.mark.parametrize(
    ("model", "rules"), [("qwen3.5-27b", None), ("qwen3-32b", "sglang")], ids=["states", "none"]
)
def test_states_are_served_by_rules_that_have_a_pool_for_them(path, model, rules):
    """A row of a model with states is served by kvcore's rules if its engine's have no pool."""
    server = {"device": "h200", "tensor_parallel": 4, "engine": "sglang"}
    (compared,) = kvcore.validate(write_rows(path, ROW | server | {"model": model})).compared
    assert compared.options.get("like") == rules


def test_the_samples_of_an_installed_package_are_read(tmp_path, monkeypatch):
    """The source `aic` reads the samples of an installed package without importing it.

    Without the package, PluginError suggests to install it.
    """
    with monkeypatch.context() as without:
        without.setattr(samples_module, "find_spec", lambda _: None)
        with pytest.raises(
            PluginError, match="pip install aiconfigurator-core, or name a file"
        ):
            kvcore.validate("aic")
    package = tmp_path / "aiconfigurator_core"
    (package / "systems").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError")
    write_csv(package / "systems" / "silicon_sample.csv", SILICON)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(kvcore.validate("aic").compared) == 1
    assert "aiconfigurator_core" not in sys.modules


def test_a_published_throughput_is_simulated_within_60_percent():
    """One of the 60 published throughputs of TensorRT-LLM is simulated within 60 %."""
    where = {"model": "llama-3.1-405b", "device": "h100", "input_tokens": "1000"}
    found = kvcore.validate(PUBLISHED, where=where | {"output_tokens": "1000"})
    assert found.measures == ["throughput"]
    assert found.errors("throughput").rows == 1
    assert found.errors("throughput").absolute < 0.6


def test_rows_that_nothing_matches_are_told_apart_from_rows_that_cannot_be_simulated(path):
    """If no row has the values of `where`, the error names them."""
    write_csv(path, ROW)
    with pytest.raises(InputError, match=r"simulated: no row has device=h200,l4, engine=none$"):
        kvcore.validate(path, where={"device": "h200,l4", "engine": "none"})


@pytest.mark.parametrize("indent", [None, 1])
def test_results_of_benchmarks_are_rows(path, indent):
    """A result of a benchmark is a row: mean lengths, its load, means in seconds."""
    path.write_text(json.dumps(BENCH, indent=indent))
    (compared,) = kvcore.validate(path, device="h100", tensor_parallel=1).compared
    row = compared.row
    assert row.options["model"] == "llama-3.1-8b"
    assert (row.options["device"], row.options["tensor_parallel"]) == ("h100", 1)
    load = {"input_tokens": 128, "output_tokens": 16, "concurrency": 2, "requests": 8}
    assert row.load == load | {"spread": 0.0}
    assert row.values == {"ttft": 0.02, "tpot": 0.005, "throughput": 44.0}
    assert row.labels == {"id": "20260105-101010", "engine": "vllm"}


@pytest.mark.parametrize(
    ("name", "metadata", "options", "formats"),
    [
        ("Qwen/Qwen3-32B-FP8", {}, {}, ("fp8", "fp8")),
        ("nvidia/Qwen3-32B-NVFP4", {}, {}, ("nvfp4", "fp8")),
        ("Qwen/Qwen3-32B-FP8", {"codec": "fp16"}, {}, ("fp8", "fp16")),
        ("Qwen/Qwen3-32B-FP8", {}, {"codec": "fp16"}, ("fp8", "fp16")),
        ("Qwen/Qwen3-32B", {}, {}, ("None", "None")),
    ],
)
def test_the_name_of_a_benchmarked_model_tells_its_formats(
    path, name, metadata, options, formats
):
    """A model released in FP8 or NVFP4 has weights in it, K/V in fp8, if nothing says else."""
    write_rows(path, BENCH | {"model_id": name} | metadata)
    options = {"device": "h100", "tensor_parallel": 2} | options
    (row,) = [compared.row for compared in kvcore.validate(path, **options).compared]
    found = (str(row.options.get(option)) for option in ("weights_dtype", "codec"))
    assert (row.options["model"], *found) == ("qwen3-32b", *formats)


@pytest.mark.parametrize(
    ("change", "load"),
    [
        ({"max_concurrency": None}, {"rate": float("inf")}),
        ({"request_rate": 2.5, "max_concurrency": None}, {"rate": 2.5}),
        ({"backend": "sglang", "device": "h200", "tensor_parallel": "2"}, {"concurrency": 2}),
    ],
)
def test_loads_of_benchmarks(path, change, load):
    """A rate or a number of clients is the load; metadata may name the server."""
    options = {"device": "h100", "tensor_parallel": 1}
    (compared,) = kvcore.validate(write_rows(path, BENCH | change), **options).compared
    known = compared.row.load
    assert {name: known[name] for name in ("rate", "concurrency") if name in known} == load
    if "device" in change:
        assert (compared.row.options["device"], compared.row.labels["engine"]) == (
            "h200", "sglang",
        )  # fmt: skip


@pytest.mark.parametrize("indent", [None, 1])
def test_an_infinite_rate_is_read_as_python_writes_it(path, indent):
    """SGLang writes an infinite rate as `Infinity`, which is no JSON; texts keep the word."""
    server = {"device": "h100", "tensor_parallel": 1, "label": '"request_rate": Infinity'}
    unlimited = {"request_rate": float("inf"), "max_concurrency": None}
    path.write_text(json.dumps(BENCH | server | unlimited, indent=indent))
    (row,) = measured.read_measured(path)
    assert (row.load["rate"], row.labels["id"]) == (float("inf"), server["label"])


def test_a_benchmark_with_a_rate_and_a_limit_of_clients_is_left_out(path):
    """A benchmark with a rate whose requests also wait for one another cannot be simulated."""
    server = {"device": "h100", "tensor_parallel": 1}
    both = BENCH | {"request_rate": 2.5}
    (why,) = kvcore.validate(write_rows(path, BENCH, both), **server).left_out
    assert "concurrency=2 and rate=2.5: clients that wait for answers have no rate" in why


def test_what_a_result_of_a_benchmark_lacks_is_named(path):
    """A server that neither the result nor an option names is asked for."""
    assert "a row needs a value of device, or the option --device" in refused(path, BENCH)
    assert "completed 0: expected a whole number" in refused(path, BENCH | {"completed": 0})
    for name in ("total_input_tokens", "mean_ttft_ms"):
        assert f"{name} 'x': expected a number" in refused(path, BENCH | {name: "x"})
