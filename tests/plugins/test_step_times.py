"""The step times in the package: held-out steps, names, and their composition."""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest
from helpers.aic import FakeEngine, fake_aic

from kvcore import InputError, PluginError
from kvcore.models.catalogue import MODELS
from kvcore.serving import StepWork
from kvcore_lab.measured.aic import compose_steps
from kvcore_plugins.latency import Table
from kvcore_plugins.latency.measured_steps import write_steps
from kvcore_plugins.latency.step_times import (
    DECODE,
    PREFILL,
    Deployment,
    shipped_grid,
    shipped_grids,
)

HELD_OUT = Path(__file__).parents[1] / "data" / "aic_steps.json.gz"
ASKED = Deployment("llama-3.1-8b", "h100", 1, "vllm", "bf16")


def built(name):
    """Return the latency model of a deployment."""
    return Table(
        engine=name.engine,
        model=name.model,
        device=name.device,
        tensor_parallel=name.tensor_parallel,
        weights_dtype=name.dtype,
    )


def test_held_out_steps_are_within_three_per_cent():
    """The median error of held-out steps is at most 3 %, in total and in each group.

    Groups are kinds of steps, GPUs, engines, models and formats.
    """
    held_out = json.loads(gzip.decompress(HELD_OUT.read_bytes()))
    assert [tuple(name) for name, _ in held_out] == list(shipped_grids())
    groups = defaultdict(list)
    for fields, steps in held_out:
        name = Deployment(*fields)
        table = built(name)
        for kind, prefill, decode, context, pairs, milliseconds in steps:
            work = StepWork(prefill, (pairs,), decode, (context,))
            error = abs(table.duration(work) / 10**9 / milliseconds - 1)
            for group in ("all", kind, *map(str, name)):
                groups[group].append(error)
    assert {name: round(median(e), 3) for name, e in groups.items() if median(e) > 0.03} == {}
    assert len(groups["all"]) > 500


def test_every_grid_is_found_by_its_name_and_allows_jumps():
    """Every grid is complete, is found by its own name and allows jumps."""
    for name, grid in shipped_grids().items():
        assert shipped_grid(*name) is grid
        assert (len(grid.base), len(grid.base[0])) == (len(PREFILL), len(DECODE))
        assert built(name).jumps


def test_a_model_of_the_same_shape_has_the_same_times():
    """Models of the same shape have the same times, and fp8 weights have others.

    Llama 3.3 has the shape of 3.1.
    """
    found = shipped_grid("llama-3.3-70b", "h100", 4, "trtllm")
    assert found is shipped_grid("llama-3.1-70b", "h100", 4, "trtllm")
    fp8 = MODELS["llama-3.1-70b"].with_weights("fp8")
    assert shipped_grid(fp8, "h100", 4, "trtllm").base[0][1] < found.base[0][1]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("qwen3-32b", "int4"), ("qwen3-32b", "fp32"), ("qwen3-30b-a3b", "nvfp4")],
)
def test_weights_in_another_format_have_no_times_of_bf16(model, dtype):
    """Weights that are in neither bf16, fp16 nor fp8 are refused, and so are such experts."""
    assert shipped_grid(MODELS[model].with_weights("fp16"), "h100", 2, "vllm")
    with pytest.raises(InputError, match=f"no step times of .*,weights_dtype={dtype};"):
        shipped_grid(MODELS[model].with_weights(dtype), "h100", 2, "vllm")


def test_composed_steps_are_those_of_the_engine(monkeypatch, tmp_path):
    """Composed steps, written and read again, are within 1 % of the engine's times."""
    fake_aic(monkeypatch)
    path = tmp_path / "steps.csv"
    with path.open("w") as file:
        write_steps(file, compose_steps(ASKED).steps())
    table, engine = Table(path), FakeEngine()
    assert table.jumps
    for tokens, before in ((100, 0), (3000, 0), (700, 5000)):
        work = StepWork(tokens, (before * tokens + tokens * (tokens + 1) // 2,))
        expected = engine.predict_prefill_latency(1, tokens + before, before)
        assert table.duration(work) / 10**9 == pytest.approx(expected, rel=0.01)
    for sequences, length in ((1, 700), (50, 3000), (300, 1000)):
        work = StepWork(0, (0,), sequences, (sequences * (length + 1),))
        expected = engine.decode_step_latency(sequences, length, 2)
        assert table.duration(work) / 10**9 == pytest.approx(expected, rel=0.01)
    work = StepWork(1000, (500_500,), 40, (40 * 1001,))
    expected = engine.mixed_step_latency(1000, 40, 1000, 2)
    assert table.duration(work) / 10**9 == pytest.approx(expected, rel=0.01)


def test_fp8_applies_to_weights_and_kv_but_not_to_attention(monkeypatch):
    """fp8 applies to weights, experts and K/V, while attention computes in bf16."""
    calls = fake_aic(monkeypatch)
    compose_steps(Deployment("qwen3-32b", "h200", 2, "sglang", "fp8"))
    (model, system, backend), modes = calls[-1]
    assert (model, system, backend) == ("Qwen/Qwen3-32B", "h200_sxm", "sglang")
    assert modes["tp_size"] == 2
    assert {name: mode for name, mode in modes.items() if name.endswith("mode")} == {
        "gemm_quant_mode": "fp8",
        "moe_quant_mode": "fp8",
        "kvcache_quant_mode": "fp8",
        "fmha_quant_mode": "bfloat16",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "v100-16g"}, "device 'v100-16g'; it has .*h200"),
        ({"model": "gpt2"}, "model 'gpt2'; it has .*qwen3-32b.*Hugging Face"),
        ({"model": "no/such"}, "engine=vllm,model=no/such.*: no such model"),
    ],
)
def test_unsupported_devices_and_models_are_refused(monkeypatch, changes, message):
    """The error for an unsupported device or model lists the supported ones or the reason."""
    fake_aic(monkeypatch)
    with pytest.raises(InputError, match=message):
        compose_steps(ASKED._replace(**changes))


def test_without_aiconfigurator_the_error_gives_the_install_command(monkeypatch):
    """Without aiconfigurator the error gives the install command."""
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(PluginError, match="pip install aiconfigurator-core"):
        compose_steps(ASKED)


def test_composed_by_the_real_package():
    """The real package reproduces the step times that kvcore ships."""
    pytest.importorskip("aiconfigurator_core.sdk.engine", reason="aiconfigurator-core")
    made, there = (
        [step.time for step in grid.steps()]
        for grid in (compose_steps(ASKED), shipped_grids()[ASKED])
    )
    assert made == pytest.approx(there, rel=1e-3)
