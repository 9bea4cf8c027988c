"""Step times of a deployment composed by NVIDIA's AIConfigurator, where it is installed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from typing import Any, NoReturn

from kvcore.errors import InputError, PluginError
from kvcore_plugins.latency.step_times import (
    CONTEXT,
    DECODE,
    PAIRS,
    PREFILL,
    Deployment,
    StepGrid,
    microseconds,
)

MS_PER_S = 1000

SYSTEMS = {
    "a100-80g": "a100_sxm",
    "a30": "a30",
    "b200": "b200_sxm",
    "h100": "h100_sxm",
    "h100-pcie": "h100_pcie",
    "h200": "h200_sxm",
    "l4": "l4",
    "l40s": "l40s",
}
"""GPUs of the catalogue, and their names in AIConfigurator."""

MODELS = {
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "llama-3-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
    "llama-3.3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
}
"""Models of the catalogue, and models of the same shape that AIConfigurator knows."""

_LENGTHS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_MOST_CONTEXT = 4 << 20
_BEFORE = (0, 512, 2048, 8192, 32768)
_SHORT = 512


def compose_steps(deployment: Deployment) -> StepGrid:
    """Return the step times of a deployment by AIConfigurator's public interface.

    Decode steps of 1 to 512 sequences of 16 to 32,768 tokens and prefill steps of 16 to
    16,384 tokens after 0 to 32,768 others are composed of its measured kernel times, and
    fitted by lines with the least squared relative error, none of which falls with more work.
    Mixed steps are composed at each point. Takes some seconds, most to compile the model.

    Args:
        deployment: `model` and `device` are names of the catalogue, or of AIConfigurator: a
            model of Hugging Face such as `Qwen/Qwen3-32B`, a device such as `gb200`.

    Raises:
        PluginError: aiconfigurator-core or SciPy is not installed.
        InputError: AIConfigurator does not have the deployment; the error lists what it has.
    """
    engine = compile_engine(deployment)
    import numpy as np  # noqa: PLC0415 - not without the extra `lab`

    decode = np.array(DECODE[1:])
    between = sorted({*DECODE[1:], *(3 * n // 2 for n in DECODE[2:-1])})
    samples = [
        (n, n * (length + 1), engine.decode_step_latency(n, length, 2))
        for n in between
        for length in _LENGTHS
        if n * length <= _MOST_CONTEXT
    ]
    alone, context = _lines(decode, samples)

    prefill = np.array(PREFILL[1:])
    # Some kernels in fp8 are much faster for whole multiples, which steps rarely have.
    between = [n * part // 2 - 1 for n in PREFILL[1:] for part in (2, 3)][:-1]
    samples = [
        (
            n,
            before * n + n * (n + 1) // 2,
            engine.predict_prefill_latency(1, n + before, before),
        )
        for n in between
        for before in _BEFORE
    ]
    samples += [
        (count * n, count * n * (n + 1) // 2, engine.predict_prefill_latency(count, n, 0))
        for count in (3, 15)
        for n in between[2:]
        if count * n <= PREFILL[-1]
    ]
    chunk, pairs = _lines(prefill, samples)

    base = np.zeros((len(PREFILL), len(DECODE)))
    base[0, 1:], base[0, 0], base[1:, 0] = alone, alone[0], chunk
    for row, tokens in enumerate(PREFILL[1:], 1):
        length = min(tokens, _SHORT)
        attended = tokens * (length + 1) / 2
        for column, count in enumerate(DECODE[1:], 1):
            time = engine.mixed_step_latency(tokens, count, length, 2) / MS_PER_S
            attention = pairs[row - 1] * attended + context[column - 1] * count * (length + 1)
            base[row, column] = time - attention
    base = np.maximum.accumulate(np.maximum.accumulate(base, axis=0), axis=1)
    return StepGrid(
        [[microseconds(time) for time in row] for row in base.tolist()],
        [microseconds(PAIRS * slope) for slope in (pairs[0], *pairs)],
        [microseconds(CONTEXT * slope) for slope in (context[0], *context)],
    )


def compile_engine(deployment: Deployment) -> Any:
    """Return AIConfigurator's engine of a deployment that it has step times of.

    Raises:
        PluginError, InputError: as `compose_steps` does.
    """
    try:
        import scipy.optimize  # type: ignore[import-untyped]  # noqa: F401, PLC0415
        from aiconfigurator_core.sdk.common import (  # type: ignore # noqa: PGH003, PLC0415
            SupportedSystems,
        )
        from aiconfigurator_core.sdk.engine import (  # type: ignore # noqa: PGH003, PLC0415
            EngineHandle,
        )
    except ImportError as error:
        msg = (
            f"step times of `aic` need the packages aiconfigurator-core and scipy ({error}): "
            "pip install aiconfigurator-core scipy"
        )
        raise PluginError(msg) from error
    model = MODELS.get(deployment.model, deployment.model)
    system = SYSTEMS.get(deployment.device, deployment.device)
    if system not in SupportedSystems:
        known = sorted({*SYSTEMS, *SupportedSystems} - {*SYSTEMS.values()})
        _refuse(f"device {deployment.device!r}; it has {', '.join(known)}")
    if "/" not in model:
        _refuse(
            f"model {deployment.model!r}; it has {', '.join(MODELS)}, and models of Hugging "
            "Face, such as Qwen/Qwen3-32B"
        )
    devices = deployment.tensor_parallel
    dtype = "fp8" if deployment.dtype == "fp8" else "bfloat16"
    logging.getLogger("aiconfigurator_core").setLevel(logging.CRITICAL)
    problem = ""
    # An engine has kernels for attention to K/V in fp8 that compute in one of these. Experts
    # must be divided by name; a dense model has none.
    splits: Sequence[dict[str, int]] = ({}, {"moe_tp_size": devices, "moe_ep_size": 1})
    for attention, split in product(dict.fromkeys(("bfloat16", dtype)), splits):
        modes = {"gemm": dtype, "moe": dtype, "kvcache": dtype, "fmha": attention}
        try:
            engine = EngineHandle.compile(
                model,
                system,
                deployment.engine,
                tp_size=devices,
                **split,
                **{f"{part}_quant_mode": mode for part, mode in modes.items()},
            )
            engine.predict_prefill_latency(1, _SHORT, 0)
            engine.decode_step_latency(1, _SHORT, 2)
            engine.mixed_step_latency(_SHORT, 1, _SHORT, 2)
        except Exception as error:  # noqa: BLE001 - it raises any exception
            problem = str(error).split("\n", maxsplit=1)[0]
        else:
            return engine
    msg = f"AIConfigurator has no step times of {deployment}: {problem}"
    raise InputError(msg)


def _refuse(what: str) -> NoReturn:
    msg = f"AIConfigurator has no step times of {what}"
    raise InputError(msg)


def _lines(knots: Any, samples: Sequence[tuple[int, int, float]]) -> tuple[Any, Any]:
    """Fit `a(n) + b(n) * x` seconds, `a` and `b` linear between knots, to `(n, x, ms)`.

    Neither falls, and `b` stays where it is from the last knot but one on.
    """
    import numpy as np  # noqa: PLC0415
    from scipy.optimize import nnls  # noqa: PLC0415

    counts, work, times = np.array(samples, dtype=float).T
    weights = np.array([np.interp(counts, knots, row) for row in np.eye(len(knots))]).T
    rising = np.tril(np.ones((len(knots), len(knots))))
    slopes = rising[:, :-1]
    rows = np.hstack([weights @ rising, (weights * work[:, None]) @ slopes])
    rows /= times[:, None] / MS_PER_S
    scale = rows.max(axis=0)
    values = nnls(rows / scale, np.ones(len(times)))[0] / scale
    return rising @ values[: len(knots)], slopes @ values[len(knots) :]
