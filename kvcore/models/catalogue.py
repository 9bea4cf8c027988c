"""Tables of well-known models and GPUs, found by name.

Models: shapes from the `config.json` their makers publish; parameters counted from those
shapes, tensor by tensor, as from a `config.json` (for multimodal models,
those of the language model). GPUs: the makers' data sheets; see `docs/reference/size.md`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import kvcore
from kvcore.errors import InputError
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.units import parse_bytes, parse_rate, parse_whole

Spec = TypeVar("Spec", ModelSpec, DeviceSpec)


def find_model(name: str) -> ModelSpec:
    """Return the well-known model called `name`, such as `llama-3-8b`.

    Raises:
        InputError: no such model; names the nearest ones.
    """
    return _find("model", MODELS, name)


def load_model(text: str, weights_dtype: str | None = None) -> ModelSpec:
    """Return the well-known model called `text`, or the one that the file at `text` describes.

    A text with a separator, or one that ends in `.json`, is a path. A name of the catalogue is
    that model, even if a file has the name; any other name of a file or folder is a path.

    Args:
        text: a name, the path of a Hugging Face `config.json`, or the folder it lies in.
        weights_dtype: number format of the weights; None: as released.

    Raises:
        InputError: no known name, and no file that can be used.
    """
    is_path = text.endswith(".json") or os.sep in text
    if is_path or (text not in MODELS and os.path.exists(text)):  # noqa: PTH110 - never raises
        near = _near(MODELS, text.partition("/")[2]) if _is_hub_id(text) else []
        if near:
            msg = (
                f"{text}: there is no such file or folder; ids of a hub are not looked up: "
                f"did you mean {' or '.join(near)}, or the config.json of that model?"
            )
            raise InputError(msg)
        # The front door says where files are read: most runs name a model of the table.
        return kvcore.read_config(text, weights_dtype)
    try:
        model = find_model(text)
    except InputError as error:
        msg = f"{error}; or give the path of a model's config.json"
        raise InputError(msg) from None
    return model.with_weights(weights_dtype) if weights_dtype else model


def _flops(text: str) -> int:
    return parse_whole(text.upper().removesuffix("FLOP/S").removesuffix("FLOPS"))


BY_FIGURES = "memory=141GB,bandwidth=4.8TB,flops=989T"

_FIGURES: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "memory": ("hbm_bytes", parse_bytes),
    "bandwidth": ("bandwidth", parse_rate),
    "flops": ("flops", _flops),
    "fp8_flops": ("fp8_flops", _flops),
    "host_link": ("host_link", parse_rate),
    "link": ("link", parse_rate),
}


def find_device(name: str) -> DeviceSpec:
    """Return the well-known GPU called `name`, such as `h100`, or one that is given by figures.

    Figures are `memory=141GB,bandwidth=4.8TB,flops=989T`, and if they are known `fp8_flops`,
    `host_link` (else that of PCIe 5) and `link`. The text is the name of that device.

    Raises:
        InputError: no such GPU; names the nearest ones. Figures that are none, or are missing.
    """
    if "=" not in name:
        return _find("device", DEVICES, name)
    try:
        return _by_figures(name)
    except InputError as error:
        msg = f"device {name!r}: {error}; give such as {BY_FIGURES}"
        raise InputError(msg) from None


def _by_figures(text: str) -> DeviceSpec:
    figures: dict[str, Any] = {"host_link": _PCIE5 * 10**9}
    for piece in text.split(","):
        figure, _, value = (part.strip() for part in piece.partition("="))
        if figure not in _FIGURES:
            msg = f"{piece!r} is none of {', '.join(_FIGURES)}, with = and a value"
            raise InputError(msg)
        field, read = _FIGURES[figure]
        figures[field] = read(value)
    missing = [
        name for name in ("memory", "bandwidth", "flops") if _FIGURES[name][0] not in figures
    ]
    if missing:
        msg = f"there is no {' and no '.join(missing)}"
        raise InputError(msg)
    return DeviceSpec(name=text, **figures)


def _find(what: str, table: Mapping[str, Spec], name: str) -> Spec:
    key = name.strip().lower().replace("_", "-")
    if key in table:
        return table[key]
    near = _near(table, key)
    hint = f"known: {', '.join(sorted(table))}"
    if near:
        hint = f"did you mean {' or '.join(near)}? `kvcore size --help` lists all"
    if what == "device":
        hint += f"; or give its figures, such as {BY_FIGURES}"
    msg = f"unknown {what} {name!r}; {hint}"
    raise InputError(msg)


def _is_hub_id(text: str) -> bool:
    """Return True if `text` is written as `owner/name`, and no file has that path."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)", text)
    return named is not None and not os.path.exists(text)  # noqa: PTH110 - never raises


def _near(table: Iterable[str], name: str) -> list[str]:
    """Return the names of a table that are most like `name`, at most three."""
    from difflib import get_close_matches  # noqa: PLC0415 - for errors alone

    return get_close_matches(name.lower(), table, n=3, cutoff=0.5)


def _interleaved(layers: int, window: int, full_every: int) -> tuple[int | None, ...]:
    """Return the windows of a model in which every `full_every`-th layer has none."""
    return tuple(None if i % full_every == 0 else window for i in range(1, layers + 1))


def _model(
    name: str,
    layers: int,
    heads: tuple[int, int, int],
    hidden_size: int,
    parameters: int,
    **more: Any,
) -> ModelSpec:
    """Return a row; `heads` are query heads, K/V heads and their width."""
    query_heads, kv_heads, head_dim = heads
    prefix = max((each for each in _POSITIONS if name.startswith(each)), key=len)
    return ModelSpec(
        name=name,
        positions=_POSITIONS[prefix],
        layers=layers,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        parameters=parameters,
        **more,
    )


def _moe(experts: int, per_token: int, active: int, **more: Any) -> dict[str, Any]:
    return {
        "experts": experts,
        "experts_per_token": per_token,
        "active_parameters": active,
        **more,
    }


def _by_name(specs: Iterable[Spec]) -> dict[str, Spec]:
    return {spec.name: spec for spec in specs}


_FP16: dict[str, Any] = {"dtype": "fp16"}


_MLA: dict[str, Any] = {"value_dim": 128, "latent": 512 + 64}

# Embeddings and output layer in bf16, and a scale of fp32 for each block of 128 x 128.
_FP8_BLOCKS = {"dtype": "fp8", "extra_bytes": 1_964_517_216, "extra_expert_bytes": 159_645_696}


# fmt: off
# By the beginnings of names: the longest counts.
_POSITIONS = {
    "gpt2": 1024, "phi-2": 2048, "llama-2": 4096, "phi-3-mini-4k": 4096, "gemma": 8192,
    "llama-3-": 8192, "phi-4": 16_384, "mistral": 32_768, "mixtral": 32_768, "qwen2.5": 32_768,
    "gemma-3-1b": 32_768, "qwen3": 40_960, "mixtral-8x22b": 65_536, "llama-3.": 131_072,
    "mistral-nemo": 131_072, "gemma-3": 131_072, "gpt-oss": 131_072, "phi-3-medium": 131_072,
    "phi-4-mini": 131_072, "deepseek": 163_840,
}

MODELS: Mapping[str, ModelSpec] = _by_name([
    _model("gpt2", 12, (12, 12, 64), 768, 124_439_808, dtype="fp32"),
    _model("gpt2-xl", 48, (25, 25, 64), 1600, 1_557_611_200, dtype="fp32"),
    _model("llama-2-7b", 32, (32, 32, 128), 4096, 6_738_415_616, **_FP16),
    _model("llama-2-13b", 40, (40, 40, 128), 5120, 13_015_864_320, **_FP16),
    _model("llama-2-70b", 80, (64, 8, 128), 8192, 68_976_648_192, **_FP16),
    # Not a released model: what Llama 2 70B would be with a K/V head for each query head.
    _model("llama-2-70b-mha", 80, (64, 64, 128), 8192, 78_371_889_152, **_FP16),
    _model("llama-3-8b", 32, (32, 8, 128), 4096, 8_030_261_248),
    _model("llama-3-70b", 80, (64, 8, 128), 8192, 70_553_706_496),
    _model("llama-3.1-8b", 32, (32, 8, 128), 4096, 8_030_261_248),
    _model("llama-3.1-70b", 80, (64, 8, 128), 8192, 70_553_706_496),
    _model("llama-3.1-405b", 126, (128, 8, 128), 16384, 405_853_388_800),
    _model("llama-3.2-1b", 16, (32, 8, 64), 2048, 1_235_814_400),
    _model("llama-3.2-3b", 28, (24, 8, 128), 3072, 3_212_749_824),
    _model("llama-3.3-70b", 80, (64, 8, 128), 8192, 70_553_706_496),
    # Version 0.1 had a sliding window; 0.2 dropped it; 0.3 has a larger vocabulary.
    _model("mistral-7b-v0.1", 32, (32, 8, 128), 4096, 7_241_732_096, windows=(4096,) * 32),
    _model("mistral-7b", 32, (32, 8, 128), 4096, 7_241_732_096),
    _model("mistral-7b-v0.3", 32, (32, 8, 128), 4096, 7_248_023_552),
    _model("mistral-nemo-12b", 40, (32, 8, 128), 5120, 12_247_782_400),
    _model("mistral-small-24b", 40, (32, 8, 128), 5120, 23_572_403_200),
    _model("mixtral-8x7b", 32, (32, 8, 128), 4096, 46_702_792_704,
           **_moe(8, 2, 12_879_925_248)),
    _model("mixtral-8x22b", 56, (48, 8, 128), 6144, 140_620_634_112,
           **_moe(8, 2, 39_152_031_744)),
    _model("qwen2.5-0.5b", 24, (14, 2, 64), 896, 494_032_768),
    _model("qwen2.5-1.5b", 28, (12, 2, 128), 1536, 1_543_714_304),
    _model("qwen2.5-3b", 36, (16, 2, 128), 2048, 3_085_938_688),
    _model("qwen2.5-7b", 28, (28, 4, 128), 3584, 7_615_616_512),
    _model("qwen2.5-14b", 48, (40, 8, 128), 5120, 14_770_033_664),
    _model("qwen2.5-32b", 64, (40, 8, 128), 5120, 32_763_876_352),
    _model("qwen2.5-72b", 80, (64, 8, 128), 8192, 72_706_203_648),
    _model("qwen3-0.6b", 28, (16, 8, 128), 1024, 596_049_920),
    _model("qwen3-1.7b", 28, (16, 8, 128), 2048, 1_720_574_976),
    _model("qwen3-4b", 36, (32, 8, 128), 2560, 4_022_468_096),
    _model("qwen3-8b", 36, (32, 8, 128), 4096, 8_190_735_360),
    _model("qwen3-14b", 40, (40, 8, 128), 5120, 14_768_307_200),
    _model("qwen3-32b", 64, (64, 8, 128), 5120, 32_762_123_264),
    _model("qwen3-30b-a3b", 48, (32, 4, 128), 2048, 30_532_122_624,
           **_moe(128, 8, 3_353_032_704)),
    _model("qwen3-235b-a22b", 94, (64, 4, 128), 4096, 235_093_634_560,
           **_moe(128, 8, 22_190_763_520)),
    _model("gemma-2b", 18, (8, 1, 256), 2048, 2_506_172_416),
    _model("gemma-7b", 28, (16, 16, 256), 3072, 8_537_680_896),
    _model("gemma-2-2b", 26, (8, 4, 256), 2304, 2_614_341_888,
           windows=_interleaved(26, 4096, 2)),
    _model("gemma-2-9b", 42, (16, 8, 256), 3584, 9_241_705_984,
           windows=_interleaved(42, 4096, 2)),
    _model("gemma-2-27b", 46, (32, 16, 128), 4608, 27_227_128_320,
           windows=_interleaved(46, 4096, 2)),
    _model("gemma-3-1b", 26, (4, 1, 256), 1152, 999_885_952, windows=_interleaved(26, 512, 6)),
    _model("gemma-3-4b", 34, (8, 4, 256), 2560, 3_880_263_168,
           windows=_interleaved(34, 1024, 6)),
    _model("gemma-3-12b", 48, (16, 8, 256), 3840, 11_766_034_176,
           windows=_interleaved(48, 1024, 6)),
    _model("gemma-3-27b", 62, (32, 16, 128), 5376, 27_009_346_304,
           windows=_interleaved(62, 1024, 6)),
    _model("phi-2", 32, (32, 32, 80), 2560, 2_779_683_840, **_FP16),
    _model("phi-3-mini-4k", 32, (32, 32, 96), 3072, 3_821_079_552, windows=(2047,) * 32),
    _model("phi-3-medium-128k", 40, (40, 10, 128), 5120, 13_960_238_080),
    _model("phi-4", 40, (40, 10, 128), 5120, 14_659_507_200),
    _model("phi-4-mini", 32, (24, 8, 128), 3072, 3_836_021_760),
    _model("gpt-oss-20b", 24, (64, 8, 64), 2880, 20_914_757_184,
           windows=_interleaved(24, 128, 2),
           # The biases of experts are in bf16.
           **_moe(32, 4, 4_187_440_704, expert_dtype="mxfp4", extra_expert_bytes=9_745_920)),
    _model("gpt-oss-120b", 36, (64, 8, 64), 2880, 116_829_156_672,
           windows=_interleaved(36, 128, 2),
           **_moe(128, 4, 5_711_982_912, expert_dtype="mxfp4", extra_expert_bytes=58_475_520)),
    _model("deepseek-v2-lite", 27, (16, 16, 192), 2048, 15_706_484_224,
           **_MLA, **_moe(64, 6, 2_661_150_208)),
    _model("deepseek-v2", 60, (128, 128, 192), 5120, 235_741_434_880,
           **_MLA, **_moe(160, 6, 21_375_800_320)),
    # DeepSeek V3 without its multi-token prediction layer; R1 has the same shape.
    _model("deepseek-v3", 61, (128, 128, 192), 7168, 671_026_419_200,
           **_MLA, **_moe(256, 8, 37_552_297_472, **_FP8_BLOCKS)),
    _model("deepseek-r1", 61, (128, 128, 192), 7168, 671_026_419_200,
           **_MLA, **_moe(256, 8, 37_552_297_472, **_FP8_BLOCKS)),
])


# fmt: on


def _device(
    name: str,
    memory: int,
    bandwidth: int,
    tflops: float,
    host_link: int,
    link: int = 0,
    *,
    fp8: bool = False,
) -> DeviceSpec:
    """Return a row of GB, GB/s, dense fp16 TFLOP/s and, one way, GB/s to host and peers.

    A GPU with `fp8` has twice the FLOP/s in fp8.
    """
    giga = 10**9
    flops = round(tflops * 1000) * giga
    return DeviceSpec(
        name=name,
        hbm_bytes=memory * giga,
        bandwidth=bandwidth * giga,
        flops=flops,
        host_link=host_link * giga,
        link=link * giga,
        fp8_flops=2 * flops if fp8 else 0,
    )


# Two GPUs of a GB200 or GB300 share the link to their CPU.
_PCIE3, _PCIE4, _PCIE5, _NVLINK_C2C, _SHARED_C2C = 16, 32, 64, 450, 225

# Half of what data sheets name, which is both ways together: of 6, 12 and 18 links of 25 GB/s,
# of 18 of 50, and of 7 of 64 and of 77. Bridges that are sold apart (A30, A40, H100 PCIe,
# RTX 3090) and join two GPUs are not counted.
_NVLINK2, _NVLINK3, _NVLINK4, _NVLINK5, _INFINITY, _INFINITY4 = 150, 300, 450, 900, 448, 537


DEVICES: Mapping[str, DeviceSpec] = _by_name(
    [
        _device("v100-16g", 16, 900, 125, _PCIE3, _NVLINK2),
        _device("v100-32g", 32, 900, 125, _PCIE3, _NVLINK2),
        _device("a10", 24, 600, 125, _PCIE4),
        _device("a10g", 24, 600, 70, _PCIE4),
        _device("a30", 24, 933, 165, _PCIE4),
        _device("a40", 48, 696, 149.7, _PCIE4),
        _device("a100-40g", 40, 1555, 312, _PCIE4, _NVLINK3),
        _device("a100-80g", 80, 2039, 312, _PCIE4, _NVLINK3),
        _device("rtx-3090", 24, 936, 71, _PCIE4),
        _device("rtx-4090", 24, 1008, 165.2, _PCIE4, fp8=True),
        _device("rtx-5090", 32, 1792, 209.5, _PCIE5, fp8=True),
        _device("rtx-pro-6000", 96, 1792, 503.8, _PCIE5, fp8=True),
        _device("l4", 24, 300, 121, _PCIE4, fp8=True),
        _device("l40s", 48, 864, 362, _PCIE4, fp8=True),
        _device("h20", 96, 4000, 148, _PCIE5, _NVLINK4, fp8=True),
        _device("h100", 80, 3350, 989.5, _PCIE5, _NVLINK4, fp8=True),
        _device("h100-pcie", 80, 2000, 756.5, _PCIE5, fp8=True),
        _device("h100-nvl", 94, 3900, 835.5, _PCIE5, 300, fp8=True),
        _device("gh200", 96, 4000, 989.5, _NVLINK_C2C, _NVLINK4, fp8=True),
        _device("h200", 141, 4800, 989.5, _PCIE5, _NVLINK4, fp8=True),
        _device("b200", 180, 8000, 2250, _PCIE5, _NVLINK5, fp8=True),
        _device("b300", 288, 8000, 2250, _PCIE5, _NVLINK5, fp8=True),
        _device("gb200", 186, 8000, 2500, _SHARED_C2C, _NVLINK5, fp8=True),
        _device("gb300", 288, 8000, 2500, _SHARED_C2C, _NVLINK5, fp8=True),
        _device("mi300x", 192, 5300, 1307.4, _PCIE5, _INFINITY, fp8=True),
        _device("mi325x", 256, 6000, 1307.4, _PCIE5, _INFINITY, fp8=True),
        _device("mi355x", 288, 8000, 2516.6, _PCIE5, _INFINITY4, fp8=True),
    ]
)
