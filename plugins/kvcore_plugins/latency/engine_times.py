"""Times of a step beside the kernels of a data sheet: of an engine, and of routed experts.

All constants are fitted to the mean TPOT of measured servers, those that come with
AIConfigurator 0.12 (Apache-2.0), of the models that `kvcore_lab.measured.samples` names as
fitted: those of the host once for each engine, the others for each engine and device.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

EngineName: TypeAlias = Literal["vllm", "trtllm", "sglang"]
"""Engines whose servers and kernels were measured."""


class ExpertTimes(NamedTuple):
    """The times of routed experts in one layer, in seconds and as shares.

    Attributes:
        layer: routing, sorting tokens by expert, and launching small products.
        device: additional seconds for each further device that shares the experts.
        token: bringing a token to its experts and back; devices do not divide it.
        bandwidth: the bandwidth at which the weights of experts are read, as a share of that of
            other weights. Above 1 where fewer experts are read than a choice that is uniform
            and independent would take.
        compute: the FLOP/s of products with few tokens for each expert, as a share of those of
            other products.
    """

    layer: float = 16e-6
    device: float = 1.4e-6
    token: float = 1.9e-7
    bandwidth: float = 1.16
    compute: float = 0.51


class EngineTimes(NamedTuple):
    """The times of an engine on a device.

    Attributes:
        step: seconds of the host in each step.
        sequence: seconds of the host in each step for each sequence that generates a token:
            sampling, stop conditions, detokenizing.
        compute: factor on the FLOP/s of products.
        experts: the times of routed experts.
    """

    step: float = 0.0
    sequence: float = 0.0
    compute: float = 1.0
    experts: ExpertTimes = ExpertTimes()


# No option changes a time of a dense model: those of experts are the medians of the others.
KERNELS = EngineTimes()
"""The times without an engine."""

_HOST = {
    "vllm": EngineTimes(step=3.9e-4, sequence=1.3e-5),
    "trtllm": EngineTimes(step=1.1e-4, sequence=9.5e-6),
    "sglang": EngineTimes(step=3.8e-4, sequence=1.6e-5),
}

_COMPUTE = {("vllm", "h100"): 0.74, ("trtllm", "h100"): 0.87}

_EXPERTS = {
    ("vllm", "h100"): ExpertTimes(16e-6, 1.2e-6, 3.2e-7, 1.16, 0.39),
    ("vllm", "h200"): ExpertTimes(17e-6, 1.2e-6, 1.9e-7, 0.80, 0.23),
    ("trtllm", "h200"): ExpertTimes(71e-6, 2.5e-6, 2.9e-7, 1.14, 0.51),
    ("sglang", "h200"): ExpertTimes(28e-6, 1.9e-6, 1.7e-7, 1.04, 0.59),
    ("sglang", "b200"): ExpertTimes(37e-6, 1.9e-6, 3.3e-7, 1.10, 0.17),
}

_VLLM_FP4 = ExpertTimes(3.6e-6, 2.4e-6, 6e-8, 1.17, 0.625)

# Fitted on a B200; they hold for every device that multiplies in fp4. Those of vLLM are fitted
# with MXFP4 alone, and SGLang takes the same times in fp8 and in NVFP4.
_EXPERTS_IN_FP4 = {
    ("vllm", "mxfp4"): _VLLM_FP4,
    ("vllm", "nvfp4"): _VLLM_FP4,
    ("trtllm", "mxfp4"): ExpertTimes(1.7e-6, 0.9e-6, 6e-8, 1.17, 0.625),
    ("trtllm", "nvfp4"): ExpertTimes(45e-6, 2.4e-6, 9.1e-8, 1.12, 1.1),
}


def known_name(device: str) -> str:
    """Return the name in the catalogue of a device with figures of its own after it."""
    return device.partition(":")[0].strip().lower().replace("_", "-")


def engine_times(engine: EngineName | None, device: str, fp4: str = "") -> EngineTimes:
    """Return the times of an engine on a device, of a name in the catalogue.

    Without an engine they are `KERNELS`; on a device without measurements, only those of the
    engine's host differ from these.

    Args:
        engine: the engine.
        device: the device.
        fp4: format of experts that are computed with in fp4; any other: they are not.
    """
    if engine is None:
        return KERNELS
    key = engine, device
    return _HOST[engine]._replace(
        compute=_COMPUTE.get(key, 1.0),
        experts=_EXPERTS_IN_FP4.get((engine, fp4)) or _EXPERTS.get(key, ExpertTimes()),
    )
