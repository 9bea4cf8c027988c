"""The step times of `roofline` against AIConfigurator's, composed of measured kernels.

AIConfigurator is Apache-2.0. It is measured as a peer and imported by the benchmarks only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from statistics import median, quantiles
from typing import Any

import pytest

from kvcore import InputError
from kvcore.models.cost import attended_pairs
from kvcore.serving import StepWork
from kvcore_plugins.latency import Roofline

engine = pytest.importorskip("aiconfigurator_core.sdk.engine", reason="run `tox -e bench-aic`")

DEVICES = {
    "a100_sxm": "a100-80g",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "l40s": "l40s",
}
MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}
ENGINES = "vllm", "sglang", "trtllm"
WIDE = {f"{of}_quant_mode": "bfloat16" for of in ("gemm", "moe", "kvcache", "fmha")}

# PREFILL: prompts of a step, tokens of each, and cached tokens before them. DECODE: sequences,
# and the context of each. MIXED: prompt tokens, sequences, and the length of both.
PREFILL = (
    *((1, tokens, 0) for tokens in (128, 512, 1024, 2048, 4096, 8192)),
    *((4, 512, 0), (4, 2048, 0), (16, 512, 0), (1, 2048, 6144), (1, 2048, 14336)),
)
DECODE = (
    *((1, 512), (1, 4096), (1, 16384), (4, 2048), (8, 4096), (16, 1024), (16, 8192)),
    *((32, 2048), (64, 1024), (64, 4096), (128, 1024), (128, 2048), (256, 1024)),
)
MIXED = (
    *((512, 16, 1024), (512, 64, 2048), (1024, 64, 1024), (2048, 32, 2048)),
    *((2048, 128, 1024), (4096, 64, 4096), (8192, 64, 2048)),
)


def steps(composed: Any) -> Iterator[tuple[str, StepWork, float]]:
    """Yield the kind of each step, its work and its milliseconds."""
    for prompts, tokens, before in PREFILL:
        pairs = prompts * attended_pairs(before, tokens)
        work = StepWork(prompts * tokens, (pairs,))
        time = composed.predict_prefill_latency(prompts, before + tokens, before)
        yield "prefill", work, time
    for sequences, context in DECODE:
        work = StepWork(decode=sequences, context=(sequences * (context + 1),))
        yield "decode", work, composed.decode_step_latency(sequences, context, 2)
    for tokens, sequences, length in MIXED:
        chunk = min(tokens, length)
        work = StepWork(
            tokens,
            (tokens // chunk * attended_pairs(0, chunk),),
            sequences,
            (sequences * (length + 128),),
        )
        yield "mixed", work, composed.mixed_step_latency(tokens, sequences, length, 256)


def errors(system: str, engine_name: str, model: str, devices: int) -> list[tuple[str, float]]:
    """Return the kinds and relative errors of a server's steps; none if it is not feasible."""
    try:
        latency = Roofline(model, DEVICES[system], tensor_parallel=devices)
    except InputError:
        return []
    experts = {"moe_tp_size": devices, "moe_ep_size": 1} if "a3b" in model else {}
    found = []
    try:
        spec = engine.compile_engine(
            MODELS[model], system, engine_name, tp_size=devices, **WIDE, **experts
        )
        composed = engine.aiconfigurator_core.AicEngine.from_spec(spec)
        for kind, work, milliseconds in steps(composed):
            found.append((kind, latency.duration(work) / 1e9 / milliseconds - 1))
    except (RuntimeError, ValueError) as missing:
        print(f"{system} {engine_name} {model} x{devices}: {missing!s:.60}")
    return found


def test_the_error_of_rooflines_is_at_most_ten_per_cent() -> None:
    """The median absolute error over all steps of dense models is at most 10 %.

    The roofline has its default options for all of them.
    """
    groups = defaultdict(list)
    servers = list(product(DEVICES, ENGINES, MODELS, (1, 2, 4, 8)))
    for system, engine_name, model, devices in servers:
        for kind, error in errors(system, engine_name, model, devices):
            if "a3b" in model:
                groups["experts"].append(error)
                continue
            for name in ("dense", f"{engine_name} {kind}", f"{system} x{devices} {kind}"):
                groups[name].append(error)
    for name, found in groups.items():
        off = sorted(map(abs, found))
        print(
            f"{name:26} {len(found):5,} steps: {median(found):+7.1%} signed, "
            f"{median(off):6.1%} absolute, {quantiles(off, n=10)[-1]:6.1%} 90th"
        )
    assert median(map(abs, groups["dense"])) <= 0.10
