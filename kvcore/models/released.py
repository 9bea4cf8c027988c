"""Models that were released: their shapes, and where these are published.

A row has the shape in a model's `config.json`, and the parameters counted from it, tensor by
tensor, as `read_config` counts them (for multimodal models, those of the language model).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvcore.models.layers import CacheKind, LayerCache
from kvcore.models.spec import ModelSpec


class Source(NamedTuple):
    """Where the shape of a model is from.

    Attributes:
        config: the repository of the maker whose `config.json` has it.
        checked: the day on which the row was compared to it.
    """

    config: str
    checked: str


class _Released(Mapping[str, ModelSpec]):
    """The models by name; each is made when it is first asked for."""

    def __init__(self, rows: dict[str, dict[str, Any]]) -> None:
        self._rows = rows
        self._made: dict[str, ModelSpec] = {}

    def __getitem__(self, name: str) -> ModelSpec:
        """Return the model called `name`."""
        model = self._made.get(name)
        if model is None:
            row = self._rows[name]
            caches = tuple(LayerCache(**each) for each in row.get("caches", ()))
            model = self._made[name] = ModelSpec(**row | {"caches": caches})
        return model

    def __contains__(self, name: object) -> bool:
        """Return True if there is a model called `name`, without making it."""
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._rows)


Row = tuple[str, str, dict[str, Any]]


def _row(
    name: str,
    config: str,
    layers: int,
    heads: tuple[int, int, int],
    hidden_size: int,
    parameters: int,
    **more: Any,
) -> Row:
    """Return a row; `heads` are query heads, K/V heads and their width."""
    query_heads, kv_heads, head_dim = heads
    if "positions" not in more:
        prefix = max((each for each in _POSITIONS if name.startswith(each)), key=len)
        more["positions"] = _POSITIONS[prefix]
    fields = {
        "name": name,
        "layers": layers,
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "parameters": parameters,
    }
    return name, config, fields | more


def _moe(experts: int, per_token: int, active: int, **more: Any) -> dict[str, Any]:
    return {
        "experts": experts,
        "experts_per_token": per_token,
        "active_parameters": active,
        **more,
    }


def _interleaved(layers: int, window: int, full_every: int) -> tuple[int | None, ...]:
    """Return the windows of a model in which every `full_every`-th layer has none."""
    return tuple(None if i % full_every == 0 else window for i in range(1, layers + 1))


# What layers keep, where heads and windows alone do not say it: fields of a `LayerCache`.

_Cache = dict[str, Any]


def _heads(
    kind: CacheKind, layers: int, heads: tuple[int, ...], window: int | None = None
) -> _Cache:
    """Return K/V of `heads`: query heads, K/V heads, their width, and that of values."""
    query_heads, kv_heads, key_dim, *other = heads
    value_dim = other[0] if other else key_dim
    return _Cache(
        kind=kind,
        layers=layers,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        window=window,
        # Keys without values are values too.
        pair_flop=2 * query_heads * (key_dim + (value_dim or key_dim)),
    )


def _latent(
    layers: int, query_heads: int, width: int, widths: int, attended: int | None = None
) -> _Cache:
    """Return a latent of `width`, where a query head has key and value of `widths` together."""
    return _Cache(
        kind="mla",
        layers=layers,
        kv_heads=1,
        key_dim=width,
        attended=attended,
        pair_flop=2 * query_heads * widths,
    )


def _index(layers: int, size: int, pair_flop: int, ratio: int = 1) -> _Cache:
    return _Cache(
        kind="index", layers=layers, entry_bytes=size, pair_flop=pair_flop, ratio=ratio
    )


def _entries(
    layers: int, query_heads: int, width: int, ratio: int, attended: int | None = None
) -> _Cache:
    """Return entries for `ratio` tokens each, that are key and value of all heads."""
    return _Cache(
        kind="compressed",
        layers=layers,
        kv_heads=1,
        key_dim=width,
        ratio=ratio,
        attended=attended,
        pair_flop=4 * query_heads * width,
    )


def _state(layers: int, size: int, numbers: int = 0) -> _Cache:
    """Return states of `size` bytes, of which a token updates and reads `numbers` numbers."""
    return _Cache(kind="state", layers=layers, state_bytes=size, pair_flop=4 * numbers)


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

_ROWS: dict[str, list[Row]] = {"2026-11-20": [
    _row("gpt2", "openai-community/gpt2", 12, (12, 12, 64), 768, 124_439_808, dtype="fp32"),
    _row("gpt2-xl", "openai-community/gpt2-xl", 48, (25, 25, 64), 1600, 1_557_611_200,
         dtype="fp32"),
    _row("llama-2-7b", "meta-llama/Llama-2-7b-hf", 32, (32, 32, 128), 4096, 6_738_415_616,
         **_FP16),
    _row("llama-2-13b", "meta-llama/Llama-2-13b-hf", 40, (40, 40, 128), 5120, 13_015_864_320,
         **_FP16),
    _row("llama-2-70b", "meta-llama/Llama-2-70b-hf", 80, (64, 8, 128), 8192, 68_976_648_192,
         **_FP16),
    # Not a released model: what Llama 2 70B would be with a K/V head for each query head.
    _row("llama-2-70b-mha", "meta-llama/Llama-2-70b-hf", 80, (64, 64, 128), 8192,
         78_371_889_152, **_FP16),
    _row("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 32, (32, 8, 128), 4096, 8_030_261_248),
    _row("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 80, (64, 8, 128), 8192, 70_553_706_496),
    _row("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 32, (32, 8, 128), 4096, 8_030_261_248),
    _row("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 80, (64, 8, 128), 8192, 70_553_706_496),
    _row("llama-3.1-405b", "meta-llama/Llama-3.1-405B", 126, (128, 8, 128), 16384,
         405_853_388_800),
    _row("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 16, (32, 8, 64), 2048, 1_235_814_400),
    _row("llama-3.2-3b", "meta-llama/Llama-3.2-3B", 28, (24, 8, 128), 3072, 3_212_749_824),
    _row("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 80, (64, 8, 128), 8192,
         70_553_706_496),
    # Version 0.1 had a sliding window; 0.2 dropped it; 0.3 has a larger vocabulary.
    _row("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", 32, (32, 8, 128), 4096,
         7_241_732_096, windows=(4096,) * 32),
    _row("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.2", 32, (32, 8, 128), 4096,
         7_241_732_096),
    _row("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", 32, (32, 8, 128), 4096, 7_248_023_552),
    _row("mistral-nemo-12b", "mistralai/Mistral-Nemo-Instruct-2407", 40, (32, 8, 128), 5120,
         12_247_782_400),
    _row("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", 40, (32, 8, 128),
         5120, 23_572_403_200),
    _row("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 32, (32, 8, 128), 4096,
         46_702_792_704, **_moe(8, 2, 12_879_925_248)),
    _row("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", 56, (48, 8, 128), 6144,
         140_620_634_112, **_moe(8, 2, 39_152_031_744)),
    _row("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 24, (14, 2, 64), 896, 494_032_768),
    _row("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", 28, (12, 2, 128), 1536, 1_543_714_304),
    _row("qwen2.5-3b", "Qwen/Qwen2.5-3B", 36, (16, 2, 128), 2048, 3_085_938_688),
    _row("qwen2.5-7b", "Qwen/Qwen2.5-7B", 28, (28, 4, 128), 3584, 7_615_616_512),
    _row("qwen2.5-14b", "Qwen/Qwen2.5-14B", 48, (40, 8, 128), 5120, 14_770_033_664),
    _row("qwen2.5-32b", "Qwen/Qwen2.5-32B", 64, (40, 8, 128), 5120, 32_763_876_352),
    _row("qwen2.5-72b", "Qwen/Qwen2.5-72B", 80, (64, 8, 128), 8192, 72_706_203_648),
    _row("qwen3-0.6b", "Qwen/Qwen3-0.6B", 28, (16, 8, 128), 1024, 596_049_920),
    _row("qwen3-1.7b", "Qwen/Qwen3-1.7B", 28, (16, 8, 128), 2048, 1_720_574_976),
    _row("qwen3-4b", "Qwen/Qwen3-4B", 36, (32, 8, 128), 2560, 4_022_468_096),
    _row("qwen3-8b", "Qwen/Qwen3-8B", 36, (32, 8, 128), 4096, 8_190_735_360),
    _row("qwen3-14b", "Qwen/Qwen3-14B", 40, (40, 8, 128), 5120, 14_768_307_200),
    _row("qwen3-32b", "Qwen/Qwen3-32B", 64, (64, 8, 128), 5120, 32_762_123_264),
    _row("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 48, (32, 4, 128), 2048, 30_532_122_624,
         **_moe(128, 8, 3_353_032_704)),
    _row("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 94, (64, 4, 128), 4096, 235_093_634_560,
         **_moe(128, 8, 22_190_763_520)),
    _row("gemma-2b", "google/gemma-2b", 18, (8, 1, 256), 2048, 2_506_172_416),
    _row("gemma-7b", "google/gemma-7b", 28, (16, 16, 256), 3072, 8_537_680_896),
    _row("gemma-2-2b", "google/gemma-2-2b-it", 26, (8, 4, 256), 2304, 2_614_341_888,
         windows=_interleaved(26, 4096, 2)),
    _row("gemma-2-9b", "google/gemma-2-9b-it", 42, (16, 8, 256), 3584, 9_241_705_984,
         windows=_interleaved(42, 4096, 2)),
    _row("gemma-2-27b", "google/gemma-2-27b-it", 46, (32, 16, 128), 4608, 27_227_128_320,
         windows=_interleaved(46, 4096, 2)),
    _row("gemma-3-1b", "google/gemma-3-1b-it", 26, (4, 1, 256), 1152, 999_885_952,
         windows=_interleaved(26, 512, 6)),
    _row("gemma-3-4b", "google/gemma-3-4b-it", 34, (8, 4, 256), 2560, 3_880_263_168,
         windows=_interleaved(34, 1024, 6)),
    _row("gemma-3-12b", "google/gemma-3-12b-it", 48, (16, 8, 256), 3840, 11_766_034_176,
         windows=_interleaved(48, 1024, 6)),
    _row("gemma-3-27b", "google/gemma-3-27b-it", 62, (32, 16, 128), 5376, 27_009_346_304,
         windows=_interleaved(62, 1024, 6)),
    _row("phi-2", "microsoft/phi-2", 32, (32, 32, 80), 2560, 2_779_683_840, **_FP16),
    _row("phi-3-mini-4k", "microsoft/Phi-3-mini-4k-instruct", 32, (32, 32, 96), 3072,
         3_821_079_552, windows=(2047,) * 32),
    _row("phi-3-medium-128k", "microsoft/Phi-3-medium-128k-instruct", 40, (40, 10, 128), 5120,
         13_960_238_080),
    _row("phi-4", "microsoft/phi-4", 40, (40, 10, 128), 5120, 14_659_507_200),
    _row("phi-4-mini", "microsoft/Phi-4-mini-instruct", 32, (24, 8, 128), 3072, 3_836_021_760),
    # The biases of experts are in bf16.
    _row("gpt-oss-20b", "openai/gpt-oss-20b", 24, (64, 8, 64), 2880, 20_914_757_184,
         windows=_interleaved(24, 128, 2),
         **_moe(32, 4, 4_187_440_704, expert_dtype="mxfp4", extra_expert_bytes=9_745_920)),
    _row("gpt-oss-120b", "openai/gpt-oss-120b", 36, (64, 8, 64), 2880, 116_829_156_672,
         windows=_interleaved(36, 128, 2),
         **_moe(128, 4, 5_711_982_912, expert_dtype="mxfp4", extra_expert_bytes=58_475_520)),
    _row("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 27, (16, 16, 192), 2048,
         15_706_484_224, **_MLA, **_moe(64, 6, 2_661_150_208)),
    _row("deepseek-v2", "deepseek-ai/DeepSeek-V2", 60, (128, 128, 192), 5120, 235_741_434_880,
         **_MLA, **_moe(160, 6, 21_375_800_320)),
    # DeepSeek V3 without its multi-token prediction layer; R1 has the same shape.
    _row("deepseek-v3", "deepseek-ai/DeepSeek-V3", 61, (128, 128, 192), 7168, 671_026_419_200,
         **_MLA, **_moe(256, 8, 37_552_297_472, **_FP8_BLOCKS)),
    _row("deepseek-r1", "deepseek-ai/DeepSeek-R1", 61, (128, 128, 192), 7168, 671_026_419_200,
         **_MLA, **_moe(256, 8, 37_552_297_472, **_FP8_BLOCKS)),
], "2026-11-28": [
    _row("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct", 48, (40, 8, 128), 5120,
         107_769_861_120, positions=10_485_760, **_moe(16, 1, 17_172_894_720),
         caches=[
             _heads("chunk", 36, (40, 8, 128), window=8192), _heads("full", 12, (40, 8, 128)),
         ]),
    _row("llama-4-maverick", "meta-llama/Llama-4-Maverick-17B-128E-Instruct", 48,
         (40, 8, 128), 5120, 400_711_848_960, positions=1_048_576,
         **_moe(128, 1, 17_184_691_200),
         caches=[
             _heads("chunk", 36, (40, 8, 128), window=8192), _heads("full", 12, (40, 8, 128)),
         ]),
    _row("llama-3.3-nemotron-super-49b", "nvidia/Llama-3_3-Nemotron-Super-49B-v1", 80,
         (64, 8, 128), 8192, 49_867_145_216, positions=131_072,
         caches=[_heads("full", 49, (64, 8, 128))]),
    _row("ministral-3-8b", "mistralai/Ministral-3-8B-Base-2512", 34, (32, 8, 128), 4096,
         8_489_553_920, positions=262_144),
    _row("qwen3-coder-480b-a35b", "Qwen/Qwen3-Coder-480B-A35B-Instruct", 62, (96, 8, 128),
         6144, 480_154_875_392, positions=262_144, **_moe(160, 8, 35_474_765_312)),
    _row("qwen3-vl-2b", "Qwen/Qwen3-VL-2B-Instruct", 28, (16, 8, 128), 2048, 1_720_574_976,
         positions=262_144),
    _row("qwen3-vl-4b", "Qwen/Qwen3-VL-4B-Instruct", 36, (32, 8, 128), 2560, 4_022_468_096,
         positions=262_144),
    _row("qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Instruct", 36, (32, 8, 128), 4096, 8_190_735_360,
         positions=262_144),
    _row("qwen3-vl-32b", "Qwen/Qwen3-VL-32B-Instruct", 64, (64, 8, 128), 5120, 32_762_123_264,
         positions=262_144),
    _row("qwen3-vl-30b-a3b", "Qwen/Qwen3-VL-30B-A3B-Instruct", 48, (32, 4, 128), 2048,
         30_532_122_624, positions=262_144, **_moe(128, 8, 3_353_032_704)),
    _row("qwen3-vl-235b-a22b", "Qwen/Qwen3-VL-235B-A22B-Instruct", 94, (64, 4, 128), 4096,
         235_093_634_560, positions=262_144, **_moe(128, 8, 22_190_763_520)),
    _row("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct", 48, (16, 2, 256), 2048,
         79_674_391_296, positions=262_144, **_moe(512, 10, 3_874_929_408),
         caches=[_state(36, 2_146_304, 524_288), _heads("full", 12, (16, 2, 256))]),
    _row("qwen3.5-27b", "Qwen/Qwen3.5-27B", 64, (24, 4, 256), 5120, 26_895_998_464,
         positions=262_144,
         caches=[_state(48, 3_207_168, 786_432), _heads("full", 16, (24, 4, 256))]),
    _row("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", 40, (16, 2, 256), 2048, 34_660_610_688,
         positions=262_144, **_moe(256, 8, 3_454_988_928),
         caches=[_state(30, 2_146_304, 524_288), _heads("full", 10, (16, 2, 256))]),
    _row("qwen3.5-122b-a10b", "Qwen/Qwen3.5-122B-A10B", 48, (32, 2, 256), 3072,
         122_111_526_912, positions=262_144, **_moe(256, 8, 9_771_288_576),
         caches=[_state(36, 4_268_032, 1_048_576), _heads("full", 12, (32, 2, 256))]),
    _row("qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B", 60, (32, 2, 256), 4096,
         396_346_350_336, positions=262_144, **_moe(512, 10, 17_349_040_896),
         caches=[_state(45, 4_268_032, 1_048_576), _heads("full", 15, (32, 2, 256))]),
    _row("gemma-3n-e4b", "google/gemma-3n-E4B", 35, (8, 2, 256), 2048, 6_835_235_568,
         positions=32_768,
         caches=[
             _heads("window", 16, (8, 2, 256), window=512), _heads("full", 4, (8, 2, 256)),
             _heads("shared", 12, (8, 2, 256), window=512), _heads("shared", 3, (8, 2, 256)),
         ]),
    _row("gemma-4-26b-a4b", "google/gemma-4-26B-A4B", 30, (16, 2, 512), 2816, 25_233_141_760,
         positions=262_144, **_moe(128, 8, 3_822_530_560),
         caches=[
             _heads("window", 25, (16, 8, 256), window=1024), _heads("full", 5, (16, 2, 512)),
         ]),
    _row("deepseek-v3.1", "deepseek-ai/DeepSeek-V3.1", 61, (128, 128, 192), 7168,
         671_026_419_200, positions=163_840, value_dim=128, latent=576, dtype="fp8",
         **_moe(256, 8, 37_552_297_472, extra_expert_bytes=159_645_696),
         extra_bytes=1_964_517_216),
    _row("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2", 61, (128, 128, 192), 7168,
         671_877_944_064, positions=163_840, value_dim=128, latent=576, dtype="fp8",
         **_moe(256, 8, 38_403_822_336, extra_expert_bytes=159_645_696),
         extra_bytes=1_992_717_760,
         caches=[_latent(61, 128, 576, 320, attended=2048), _index(61, 132, 16_384)]),
    _row("deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash", 43, (64, 1, 512), 4096,
         284_332_240_471, positions=1_048_576, dtype="fp8",
         **_moe(256, 6, 13_799_632_471, expert_dtype="mxfp4"), extra_bytes=1_146_921_559,
         caches=[
             _heads("window", 43, (64, 1, 512, 0), window=128),
             _entries(21, 64, 512, ratio=4, attended=2048), _state(21, 24_576),
             _index(21, 132, 16_384, ratio=4), _state(21, 6144),
             _entries(20, 64, 512, ratio=128), _state(20, 262_144),
         ]),
    _row("deepseek-v4-pro", "deepseek-ai/DeepSeek-V4-Pro", 61, (128, 1, 512), 7168,
         1_572_997_201_763, positions=1_048_576, dtype="fp8",
         **_moe(384, 6, 49_779_081_059, expert_dtype="mxfp4"), extra_bytes=2_128_082_531,
         caches=[
             _heads("window", 61, (128, 1, 512, 0), window=128),
             _entries(31, 128, 512, ratio=128), _state(31, 262_144),
             _entries(30, 128, 512, ratio=4, attended=4096), _state(30, 24_576),
             _index(30, 132, 16_384, ratio=4), _state(30, 6144),
         ]),
    _row("kimi-k2", "moonshotai/Kimi-K2-Instruct", 61, (64, 64, 192), 7168, 1_026_408_232_448,
         positions=131_072, value_dim=128, latent=576, dtype="fp8",
         **_moe(384, 8, 32_861_500_928, extra_expert_bytes=247_726_080),
         extra_bytes=2_517_245_280),
    _row("kimi-k2.5", "moonshotai/Kimi-K2.5", 61, (64, 64, 192), 7168, 1_026_408_232_448,
         positions=262_144, value_dim=128, latent=576,
         **_moe(384, 8, 32_861_500_928, expert_dtype="int4",
                extra_expert_bytes=63_417_876_480)),
    _row("kimi-linear-48b-a3b", "moonshotai/Kimi-Linear-48B-A3B-Instruct", 27, (32, 32, 192),
         2304, 49_133_081_120, positions=1_048_576, value_dim=128, latent=576,
         **_moe(256, 8, 3_494_859_296),
         caches=[_state(21, 2_170_880, 524_288), _latent(6, 32, 576, 320)]),
    _row("glm-4.5-air", "zai-org/GLM-4.5-Air", 46, (96, 8, 128), 4096, 106_851_591_808,
         positions=131_072, **_moe(128, 8, 13_423_470_208)),
    _row("glm-5", "zai-org/GLM-5", 78, (64, 64, 256), 6144, 743_911_218_432,
         positions=202_752, value_dim=256, latent=576, **_moe(256, 8, 41_784_728_832),
         caches=[_latent(78, 64, 576, 512, attended=2048), _index(78, 132, 8192)]),
    _row("glm-5.1", "zai-org/GLM-5.1", 78, (64, 64, 256), 6144, 743_911_218_432,
         positions=202_752, value_dim=256, latent=576, **_moe(256, 8, 41_784_728_832),
         caches=[_latent(78, 64, 576, 512, attended=2048), _index(78, 132, 8192)]),
    _row("glm-5.2", "zai-org/GLM-5.2", 78, (64, 64, 256), 6144, 743_377_019_904,
         positions=1_048_576, value_dim=256, latent=576, **_moe(256, 8, 41_250_530_304),
         caches=[_latent(78, 64, 576, 512, attended=2048), _index(21, 132, 8192)]),
    _row("glm-5.3", "zai-org/GLM-5.3", 78, (64, 64, 256), 6144, 743_377_019_904,
         positions=1_048_576, value_dim=256, latent=576, **_moe(256, 8, 41_250_530_304),
         caches=[_latent(78, 64, 576, 512, attended=2048), _index(21, 132, 8192)]),
    _row("minimax-m2.5", "MiniMaxAI/MiniMax-M2.5", 62, (48, 8, 128), 3072, 228_689_764_864,
         positions=196_608, dtype="fp8",
         **_moe(256, 8, 11_030_553_088, extra_expert_bytes=54_853_632),
         extra_bytes=1_279_462_912),
    _row("minimax-m2.7", "MiniMaxAI/MiniMax-M2.7", 62, (48, 8, 128), 3072, 228_689_764_864,
         positions=204_800, dtype="fp8",
         **_moe(256, 8, 11_030_553_088, extra_expert_bytes=54_853_632),
         extra_bytes=1_279_462_912),
    _row("mimo-7b", "XiaomiMiMo/MiMo-7B-Base", 36, (32, 8, 128), 4096, 7_622_619_136,
         positions=32_768),
    _row("mimo-v2-flash", "XiaomiMiMo/MiMo-V2-Flash", 48, (64, 4, 192), 4096, 308_778_780_864,
         positions=262_144, value_dim=128, dtype="fp8",
         **_moe(256, 8, 15_445_936_320, extra_expert_bytes=73_924_608),
         extra_bytes=1_300_741_056,
         caches=[
             _heads("full", 9, (64, 4, 192, 128)),
             _heads("window", 39, (64, 8, 192, 128), window=128),
         ]),
    _row("nemotron-h-56b", "nvidia/Nemotron-H-56B-Base-8K", 118, (64, 8, 128), 8192,
         56_324_350_464, positions=8192,
         caches=[_state(54, 16_900_096, 4_194_304), _heads("full", 10, (64, 8, 128))]),
    _row("nemotron-3-nano-30b-a3b", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 52,
         (32, 2, 128), 2688, 31_577_940_288, positions=262_144, **_moe(128, 6, 3_580_076_352),
         caches=[_state(23, 2_134_016, 524_288), _heads("full", 6, (32, 2, 128))]),
    _row("nemotron-3-super-120b-a12b", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 88,
         (32, 2, 128), 4096, 120_668_707_840, positions=262_144, dtype="fp8",
         **_moe(512, 22, 12_770_237_440, extra_expert_bytes=163_840),
         extra_bytes=1_160_405_056,
         caches=[_state(40, 4_255_744, 1_048_576), _heads("full", 8, (32, 2, 128))]),
    _row("nemotron-3-ultra-550b-a55b", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 108,
         (64, 2, 128), 8192, 549_308_993_536, positions=262_144,
         **_moe(512, 22, 56_058_843_136),
         caches=[_state(48, 8_499_200, 2_097_152), _heads("full", 12, (64, 2, 128))]),
    _row("jamba-v0.1", "ai21labs/Jamba-v0.1", 32, (32, 8, 128), 4096, 51_570_323_328,
         positions=262_144, **_moe(16, 2, 12_110_311_296),
         caches=[_state(28, 573_440, 131_072), _heads("full", 4, (32, 8, 128))]),
]}
# fmt: on

MODELS: Mapping[str, ModelSpec] = _Released(
    {name: fields for rows in _ROWS.values() for name, _, fields in rows}
)

SOURCES: Mapping[str, Source] = {
    name: Source(config, checked) for checked, rows in _ROWS.items() for name, config, _ in rows
}
"""Where each model of `MODELS` is from."""
