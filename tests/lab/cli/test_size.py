"""Tests of `kvcore size`: the figures that it prints as text and as JSON."""

from __future__ import annotations

import json
import re
from functools import partial
from math import lcm
from pathlib import Path

import pytest
from helpers.commands import error_of, json_of, stdout_of, words_of
from helpers.configs import LLAMA_3_8B

from kvcore.config import RunConfig
from kvcore.errors import OutOfBlocks
from kvcore.models.catalogue import DEVICES, MODELS, load_model
from kvcore.models.cost import attended_pairs
from kvcore.models.memory import KVLayout
from kvcore.plugins import Plugins
from kvcore.request import Request
from kvcore.serving import StepWork
from kvcore.units import PS_PER_S
from kvcore_lab.cli.size import size
from kvcore_plugins.cache_groups import GroupedCache
from kvcore_plugins.cache_groups.plan import groups_of
from kvcore_plugins.latency import Roofline
from kvcore_plugins.models.huggingface import FAMILIES
from kvcore_plugins.workload import Zipf

run = partial(stdout_of, "size")


def report(*words):
    """Return the document of a size, without the words that it was asked for with."""
    document = json_of("size", *words)
    assert document.pop("command") == ["kvcore", "size", *words]
    return document


def test_the_memory_of_a_request():
    """A request of 32,768 tokens to Llama 3 8B takes 4 GiB, and a batch of eight 32 GiB."""
    kv = report("llama-3-8b", "--tokens", "32768", "--batch", "8")["kv"]
    assert kv == {
        "bytes_per_token": 131072,
        "bytes_per_block": 2097152,
        "blocks_per_request": 2048,
        "bytes_per_request": 4 * 2**30,
        "bytes_per_batch": 32 * 2**30,
        "staged_bytes_per_request": 0,
    }


def test_a_device_holds_whole_blocks_beside_weights_and_reserve():
    """On an H200 the weights and a reserve of a tenth leave the rest for whole blocks."""
    fit = report("llama-3-8b", "--device", "h200", "--tokens", "32768", "--batch", "26")["fit"]
    budget = 141 * 10**9 - 14_100_000_000 - 2 * 8_030_261_248
    assert fit == {
        "reserve_bytes": 14_100_000_000,
        "kv_budget_bytes": budget,
        "weights_fit": True,
        "blocks": budget // 2097152,
        "requests": 25,
        "batch_fits": False,
    }


def test_weights_that_do_not_fit_leave_no_blocks_and_no_speeds():
    """If weights and reserve exceed the device, the budget is negative and no block fits.

    Nor is there a speed of decode, prefill or loading.
    """
    document = report("llama-3-70b", "--device", "h200")
    fit, printed = document["fit"], run("llama-3-70b", "--device", "h200")
    assert fit["weights_fit"] is False
    assert fit["kv_budget_bytes"] < 0
    assert (fit["blocks"], fit["requests"]) == (0, 0)
    assert "the weights do not fit" in printed
    assert not {"decode", "prefill"} & document.keys()
    assert [word for word in ("decode", "prefill", "load") if word in printed] == []


def test_the_decode_ceiling_is_bandwidth_over_bytes_read():
    """A decode step reads the weights once and the K/V of every request."""
    document = report("llama-3-8b", "--device", "h100", "--tokens", "1024", "--batch", "4")
    decode = document["decode"]
    assert decode["bytes_per_step"] == 2 * 8_030_261_248 + 4 * 1024 * 131072
    assert decode["step_seconds"] == decode["bytes_per_step"] / 3_350_000_000_000
    assert decode["tokens_per_second"] == pytest.approx(4 / decode["step_seconds"])


def test_the_prefill_floor_is_flop_over_flop_per_second():
    """Prefill takes 2 FLOP a parameter and token, and 4 a pair, layer, head and dimension."""
    prefill = report("llama-3-8b", "--device", "h100", "--tokens", "1000")["prefill"]
    pairs = 1000 * 1001 // 2
    assert prefill["flop"] == 2 * 8_030_261_248 * 1000 + 4 * 32 * 32 * 128 * pairs
    assert prefill["seconds"] == pytest.approx(prefill["flop"] / 989.5e12)


@pytest.mark.parametrize("model", ["qwen3-32b", "gpt-oss-20b", "deepseek-v3", "mixtral-8x7b"])
@pytest.mark.parametrize("dtype", [None, "fp8", "nvfp4", "int4"])
@pytest.mark.parametrize("device", ["h100", "b200", "a100-80g"])
def test_the_prefill_floor_is_below_the_roofline(model, dtype, device):
    """No prefill is simulated to take less than the bound, in any format of weights."""
    weights = ["--weights-dtype", dtype] if dtype else []
    gpus = ["--device", device, "--tensor-parallel", "8", "--tokens", "8k"]
    found = report(model, *gpus, *weights)
    if "prefill" not in found:
        return  # the weights do not fit
    latency = Roofline(
        model=load_model(model, dtype),
        device=device,
        tensor_parallel=8,
        compute=1,
        bandwidth=1,
        layer_overhead=0,
    )
    pairs = tuple(attended_pairs(0, 8192, window) for window in latency.windows)
    work = StepWork(8192, pairs, 0, (0,) * len(pairs))
    assert found["prefill"]["seconds"] <= latency.duration(work) / PS_PER_S


def test_the_prefill_floor_is_computed_in_the_format_of_the_weights():
    """Products of weights in fp8 take the FLOP/s of fp8, attention those of 16 bits."""
    options = ["qwen3-32b", "--device", "h100", "--tensor-parallel", "2", "--tokens", "32768"]
    narrow = report(*options, "--weights-dtype", "fp8")["prefill"]
    wide = report(*options)["prefill"]
    products = 2 * MODELS["qwen3-32b"].active_parameters * 32768 / 2
    assert wide["seconds"] - narrow["seconds"] == pytest.approx(
        products * (1 / 989.5e12 - 1 / 1979e12)
    )


@pytest.mark.parametrize(
    ("codec", "bytes_per_token"), [("fp32", 262144), ("fp16", 131072), ("bf16", 131072)]
)
def test_the_codec_sets_the_bytes_of_a_number(codec, bytes_per_token):
    """K/V takes four bytes a number in fp32, and two in fp16 and bf16."""
    document = report("llama-3-8b", "--codec", codec)
    assert (document["codec"], document["kv"]["bytes_per_token"]) == (codec, bytes_per_token)


@pytest.mark.parametrize(
    ("model", "sequence_bytes"),
    [
        ("llama-2-7b", 4096 * 512 * 1024),
        ("gemma-3-12b", (40 * 1024 + 8 * 4096) * 8 * 1024),  # 40 layers have one of 1,024
    ],
)
def test_a_window_bounds_every_layer(model, sequence_bytes):
    """With `--window` the K/V of a sequence is limited to that of the window."""
    arguments = (model, "--tokens", "28672", "--batch", "8", "--window", "4096")
    kv = report(*arguments)["kv"]
    assert kv["window_bytes"] == 8 * sequence_bytes
    assert kv["bytes_per_batch"] == kv["window_bytes"]
    assert "K/V of 8 x 4,096 tokens" in run(*arguments)


@pytest.mark.parametrize(
    ("reserve", "size_bytes"),
    [
        ("10%", 8_000_000_000),
        ("2.5 %", 2_000_000_000),
        ("8GiB", 8 * 2**30),
        ("0", 0),
        ("0%", 0),
    ],
)
def test_the_reserve_is_a_share_or_a_size(reserve, size_bytes):
    """`--reserve` is a percentage of the device's memory, or a number of bytes."""
    document = report("llama-3-8b", "--device", "h100", "--reserve", reserve)
    assert document["fit"]["reserve_bytes"] == size_bytes


def test_a_config_file_is_sized(tmp_path):
    """A config.json has the figures of the same model in the catalogue.

    The model is named after the folder.
    """
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    document = report(str(folder / "config.json"), "--device", "h100")
    assert document["model"]["name"] == "mine"
    assert document["fit"] == report("llama-3-8b", "--device", "h100")["fit"]
    assert report(str(folder)) == report(str(folder / "config.json"))


def test_weights_dtype_replaces_a_missing_dtype(tmp_path):
    """`--weights-dtype` replaces the dtype that a config.json lacks."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_3_8B, "torch_dtype": None}))
    assert "'torch_dtype' is missing" in error_of("size", path)
    assert report(str(path), "--weights-dtype", "fp16")["model"]["dtype"] == "fp16"


def test_large_requests_are_sized_as_json():
    """Figures beyond 64 bits are printed as JSON numbers."""
    document = report("llama-3-8b", "--device", "h200", "--tokens", "1e7", "--batch", "1e6")
    assert document["tokens"] == 10_000_000
    assert document["prefill"]["flop"] > 2**64


def test_the_help_lists_models_and_devices():
    """The help page lists every model and device by its whole name."""
    printed = run("--help").replace(",", " ").replace(".\n", " ").split()
    assert [name for name in (*MODELS, *DEVICES) if name not in printed] == []


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("llama-2-7b", "MHA (32 query heads, 32 K/V heads)"),
        ("llama-3-8b", "GQA (32 query heads, 8 K/V heads)"),
        ("gemma-2b", "MQA (8 query heads, 1 K/V head)"),
        ("deepseek-v3", "MLA (128 heads, 576 numbers a token)"),
        ("mistral-7b-v0.1", "32 layers, 32 with a window of 4,096"),
        ("mixtral-8x7b", "46.7 B parameters (12.9 B active)"),
        ("gpt2", "124 M parameters"),
    ],
)
def test_the_head_describes_the_model(model, label):
    """The head of the output has the kind of attention, its heads, and the parameters."""
    assert label in run(model).split("quantity")[0].replace("\n", " ")


@pytest.mark.parametrize("model", ["llama-3.1-405b", "qwen3-235b-a22b", "gpt-oss-120b"])
def test_lines_fit_80_columns(model):
    """No line is longer than 80 columns, for models with long heads."""
    printed = run(model, "--device", "h200", "--weights-dtype", "int4", "--tokens", "131072")
    assert max(map(len, printed.splitlines())) <= 80


def test_the_table_is_readable_in_a_pipe():
    """Each figure has a line of its own, with binary and decimal units."""
    lines = run("llama-3-8b", "--device", "h200", "--tokens", "32768").splitlines()
    table = {line.split("  ")[0].strip(): line.split() for line in lines}
    assert table["K/V of a request of 32,768 tokens"][-4:] == ["4", "GiB", "4.29", "GB"]
    assert table["requests that fit"][-1] == "25"
    assert "tokens/s" in table["decode, at most"]


REFERENCE = (Path(__file__).parents[3] / "docs/reference/size.md").read_text()


def test_the_output_is_the_example_of_the_reference():
    """The output is the example of the reference, except for spaces and rules of the table."""
    block = REFERENCE.split("```console\n$ kvcore size ")[1].split("```")[0]
    command, expected = block.split("\n", 1)
    assert words_of(run(*command.split())) == words_of(expected)


def test_every_codec_is_in_the_reference():
    """The reference lists every codec, with the bytes of a token of Llama 3 8B."""
    table = REFERENCE.split("## Bytes of a codec")[1].split("##")[0]
    rows = [line.split("|")[1:4:2] for line in table.splitlines() if line.startswith("| `")]
    listed = {
        name: int(size.replace(",", ""))
        for names, size in rows
        for name in re.findall("`(.*?)`", names)
    }
    model = MODELS["llama-3-8b"]
    assert listed == {name: KVLayout(model, name).bytes_per_token for name in listed}
    assert {name.partition(":")[0] for name in listed} == set(Plugins().names("codec"))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_in_the_reference(name):
    """The reference lists every model, with its parameters, layers and bytes of a token."""
    model = MODELS[name]
    row = next(line for line in REFERENCE.splitlines() if line.startswith(f"| `{name}` |"))
    assert f"| {model.parameters / 1e9:.2f} B" in row
    assert f"| {model.layers} |" in row
    assert row.endswith(f"| {KVLayout(model).bytes_per_token:,} |")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_is_in_the_reference(name):
    """The reference lists every device with its figures; an unknown figure is an empty cell."""
    gpu = DEVICES[name]
    figures = (
        gpu.hbm_bytes / 1e9,
        gpu.bandwidth / 1e9,
        gpu.flops / 1e12,
        gpu.fp8_flops / 1e12,
        gpu.fp4_flops / 1e12,
        gpu.host_link / 1e9,
        gpu.link / 1e9,
        gpu.server_size,
    )
    cells = (f"{figure:,.10g}" if figure else "" for figure in figures)
    assert f"| `{name}` | {' | '.join(cells)} |" in REFERENCE


def test_every_option_and_model_type_is_in_the_reference():
    """The reference lists every option and every model type that is read."""
    options = [option for parameter in size.params for option in parameter.opts]
    assert [o for o in options if o.startswith("--") and f"| `{o}` |" not in REFERENCE] == []
    assert ", ".join(f"`{kind}`" for kind in FAMILIES) in REFERENCE


def test_requests_fit_into_the_cache_groups_that_an_engine_plans():
    """Blocks and requests that fit are those of the pool of `simulate`, in cache groups."""
    printed = run("gemma-3-12b", "--device", "h100", "--tokens", "32768")
    assert re.search(r"blocks that fit +46,222 +in 6 cache groups", printed)
    assert re.search(r"requests that fit +19 +2,373 blocks each", printed)
    document = report("gemma-3-12b", "--device", "h100", "--tokens", "32768")
    plan, fit = groups_of(MODELS["gemma-3-12b"]), document["fit"]
    blocks = fit["kv_budget_bytes"] // plan.bytes_per_block
    assert fit["grouped_requests"] == blocks // plan.blocks_for(32_768) <= fit["requests"]
    assert "groups" not in report("llama-3-8b")


def hold(groups, blocks, tokens, count):
    """Compute `count` requests of `tokens` tokens block by block; all of them stay open."""
    cache, step = GroupedCache(groups, blocks), min(group.block_size for group in groups)
    for name in range(count):
        request = Request(
            id=name, prompt_tokens=tokens, output_tokens=1, key_tokens=cache.geometry.block_size
        )
        seq = cache.open(request, step)
        cache.commit(seq, seq.tokens)
        while seq.tokens < tokens:
            cache.extend(seq, min(step, tokens - seq.tokens))
            cache.commit(seq, seq.tokens - seq.computed)


@pytest.mark.parametrize("name", MODELS)
def test_as_many_requests_fit_as_the_pool_of_simulate_holds(name):
    """Blocks are those of the pool of a run, and requests as many as hold their blocks there.

    The length is one at which each group has the most blocks that it ever has.
    """
    plan = groups_of(MODELS[name])
    size = lcm(*(group.block_size for group in plan.groups))
    chunk = max((g.window for g in plan.groups if g.kind == "chunk"), default=0)
    tokens = 2 * chunk or 9_000 // size * size + size + 1
    device = "memory=8TB,bandwidth=3TB,flops=1P"
    fit = report(name, "--device", device, "--tokens", str(tokens))["fit"]
    config = RunConfig(model=name, device=device, tensor_parallel=1, codec="fp16")
    parts = config.build(workload=Zipf(requests=1, key_tokens=size))
    need = plan.blocks_for(tokens)
    assert fit.get("grouped_blocks", fit["blocks"]) == parts.blocks
    assert fit.get("grouped_requests", fit["requests"]) == parts.blocks // need
    hold(plan.groups, 2 * need, tokens, 2)
    with pytest.raises(OutOfBlocks):
        hold(plan.groups, 2 * need - 1, tokens, 2)


def test_the_model_by_hand_of_the_reference_is_that_of_the_catalogue(tmp_path):
    """The example of a model by hand takes the bytes of the model that it describes."""
    path = tmp_path / "model.toml"
    path.write_text(REFERENCE.split("```toml\n")[1].split("```")[0])
    assert report(str(path))["kv"] == report("qwen3-next-80b-a3b")["kv"]


def fit(*arguments):
    """Return the part of the report that says what fits."""
    return report(*arguments)["fit"]


def test_several_gpus_share_weights_and_kv():
    """Four GPUs leave four memories less four reserves and the weights, and each K/V once."""
    document = report("llama-3-70b", "--device", "h200", "--tensor-parallel", "4")
    budget = 4 * (141 * 10**9 - 14_100_000_000) - 2 * 70_553_706_496
    assert document["server"] == {
        "gpus": 4, "data_parallel_attention": False, "kv_copies": 1
    }  # fmt: skip
    assert document["fit"]["kv_budget_bytes"] == budget
    assert document["fit"]["requests"] == budget // (8192 * 327_680)
    bytes_read = 2 * 70_553_706_496 + 8192 * 327_680
    assert document["decode"]["step_seconds"] == bytes_read / (4 * 4.8e12)
    assert "memory of 4 x h200" in run(
        "llama-3-70b", "--device", "h200", "--tensor-parallel", "4"
    )


@pytest.mark.parametrize(
    ("model", "devices", "copies"),
    [
        ("llama-3-8b", 8, 1),
        ("llama-3-8b", 16, 2),
        ("qwen3-30b-a3b", 8, 2),
        ("deepseek-v3", 8, 8),
    ],
)
def test_kv_is_copied_where_heads_are_fewer_than_gpus(model, devices, copies):
    """A head lies on several GPUs if there are more of these; a latent lies on all."""
    arguments = (model, "--device", "b300", "--tensor-parallel", str(devices), "--tokens", "64")
    document = report(*arguments)
    one = document["kv"]["bytes_per_request"]
    assert document["server"]["kv_copies"] == copies
    assert document["fit"]["requests"] == document["fit"]["kv_budget_bytes"] // copies // one
    assert ("copies of the K/V" in run(*arguments)) == (copies > 1)


def test_data_parallel_attention_has_a_latent_once():
    """Each GPU has the K/V of its own requests, an eighth of the experts, and all else."""
    document = report(
        *("deepseek-v3", "--device", "h200", "--tensor-parallel", "8"),
        *("--data-parallel-attention", "--tokens", "32000"),
    )
    model = MODELS["deepseek-v3"]
    rank = 141 * 10**9 - 14_100_000_000 - model.shared_bytes - model.expert_bytes / 8
    assert document["fit"]["kv_budget_bytes"] == pytest.approx(8 * rank, abs=8)
    assert document["fit"]["requests"] == 8 * int(rank // (32000 * 70_272))
    assert document["server"]["kv_copies"] == 1


def test_data_parallel_attention_divides_no_heads():
    """With data-parallel attention heads lie whole on each GPU, so that any number will do."""
    assert fit(
        "phi-4", "--device", "h100", "--tensor-parallel", "3", "--data-parallel-attention"
    )


@pytest.mark.parametrize("devices", ["3", "4", "8"])
def test_gpus_that_cannot_share_the_heads_are_refused(devices):
    """A number of GPUs that no engine runs is refused with those that engines run."""
    error = error_of("size", "phi-4", "--device", "h100", "--tensor-parallel", devices)
    assert f"phi-4 on {devices} x h100: 40 query heads and 10 K/V heads cannot" in error
    assert "give 1, 2, 5, 10, 20 or 40" in error


@pytest.mark.parametrize("option", ["--tensor-parallel=2", "--data-parallel-attention"])
def test_several_gpus_need_a_device(option):
    """How many GPUs there are means nothing without their type."""
    assert "on which GPUs? give --device too" in error_of("size", "llama-3-8b", option)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama-3-70b", ["--device", "h100"]),
        ("deepseek-v3", ["--device", "h100"]),
        ("llama-3-8b", ["--device", "l4", "--reserve", "20GB"]),
        ("llama-3.1-405b", ["--device", "a100-80g", "--tensor-parallel", "8"]),
        ("llama-3-8b", ["--device", "rtx-4090", "--tokens", "100000"]),
    ],
)
def test_each_hint_is_a_server_that_fits(model, arguments):
    """Where no request fits, the servers that the last line names do hold one."""
    notes = report(model, *arguments)["notes"]
    (hint,) = (note for note in notes if "fit on" in note)
    servers = re.findall(r"(\d+) x ([\w-]+)", hint)
    assert servers
    rest = arguments[2:]
    if "--tensor-parallel" in rest:
        rest = []
    for count, device in servers:
        assert int(count) <= 8
        given = ["--device", device, "--tensor-parallel", count, *rest]
        assert fit(model, *given)["requests"] > 0


@pytest.mark.parametrize(
    ("model", "tokens", "positions"),
    [("phi-4", 16385, 16384), ("llama-3-8b", 8193, 8192), ("gpt2", 1025, 1024)],
)
def test_tokens_beyond_the_positions_are_noted(model, tokens, positions):
    """A request longer than the positions of the model is noted, one as long is not."""
    note = f"{tokens:,} tokens are beyond the {positions:,} positions of {model}"
    assert report(model, "--tokens", str(tokens))["notes"] == [note]
    assert f"{note}." in " ".join(run(model, "--tokens", str(tokens)).split())
    assert report(model, "--tokens", str(positions))["notes"] == []


FIGURES = "memory=141GB,bandwidth=4.8TB,flops=989.5T,link=450GB/s,fp8_flops=1.979P"


@pytest.mark.parametrize(
    "text",
    [
        FIGURES,
        "flops=989.5TFLOPS,fp8_flops=1979T,link=450GB,memory=141GB,bandwidth=4800GB/s",
        "memory = 141 GB, bandwidth=4.8 TB/s,flops=989.5 TFLOP/s,fp8_flops=1979e12,link=450GB",
    ],
)
def test_a_device_may_be_given_by_its_figures(text):
    """A device by the figures of another one is that device, except for its name."""
    found = report("llama-3-8b", "--device", text)
    known = report("llama-3-8b", "--device", "h200")
    assert found["device"].pop("name") == text
    known["device"].pop("name")
    assert found == known


def test_figures_after_a_name_replace_its_own():
    """An H100 with the memory that drivers report has that alone changed, and more K/V."""
    sheet, own = (
        report("qwen3-32b", "--device", device) for device in ("h100", "h100:memory=84.9GB")
    )
    assert own["device"] == sheet["device"] | {
        "name": "h100:memory=84.9GB",
        "hbm_bytes": 84_900_000_000,
    }
    budgets = (found["fit"]["kv_budget_bytes"] / 2**30 for found in (sheet, own))
    assert [round(budget, 2) for budget in budgets] == [6.03, 10.14]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("memory=141GB,bandwidth=4.8TB", "there is no flops"),
        ("memory=141GB", "there is no bandwidth and no flops"),
        ("memory=141,bandwidth=4.8TB,flops=989T", "the unit is missing"),
        ("ram=141GB,bandwidth=4.8TB,flops=989T", "'ram=141GB' is none of memory, bandwidth"),
        ("memory=0B,bandwidth=4.8TB,flops=989T", "hbm_bytes must be at least 1"),
        ("memory=141GB,bandwidth=4.8TB,flops=fast", "expected a whole number"),
        ("h100=1", "'h100=1' is none of memory"),
        ("h100:memry=84.9GB", "'memry=84.9GB' is none of memory"),
        ("h10:memory=84.9GB", "unknown device 'h10'; did you mean h100"),
        ("h100:memory=", "expected a number"),
        ("h100:link=1GB,link=2GB", "'link=2GB' is none of memory"),
    ],
)
def test_figures_that_cannot_be_are_refused(text, problem):
    """Figures that are missing or cannot be are refused, with an example."""
    error = error_of("size", "llama-3-8b", "--device", text)
    assert problem in error
    assert "give such as memory=141GB,bandwidth=4.8TB,flops=989T" in error
