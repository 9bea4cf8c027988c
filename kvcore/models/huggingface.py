"""The shape and the parameters of a model, from a Hugging Face `config.json`.

The count is exact, tensor by tensor, for the language model (not for a vision tower, nor
for layers that predict further tokens).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs

from kvcore.errors import InputError, shorten
from kvcore.models.spec import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, ModelSpec

_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "sliding_window_pattern": "_sliding_window_pattern",
    "torch_dtype": "dtype",
}

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}

_NAMES = ", ".join(_DTYPES)

_QUANTISED = {"fp8": "fp8", "fbgemm_fp8": "fp8", "int4": "int4", "int8": "int8"}

_MOST = {
    "num_hidden_layers": MAX_LAYERS,
    "n_routed_experts": MAX_EXPERTS,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
}


_SHARED_FIELDS = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")


@attrs.frozen
class _Config:
    """The fields of a config file; errors name file and field."""

    path: Path
    fields: Mapping[str, Any]
    prefix: str = ""
    defaults: Mapping[str, Any] = attrs.field(factory=dict)

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raise InputError for a problem of the field `name`."""
        msg = f"{self.path}: field '{self.prefix}{name}' {problem}"
        raise InputError(msg)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, under either of its names; null counts as left out."""
        for key in (name, _ALIASES.get(name)):
            if self.fields.get(key or name) is not None:
                return self.fields[key or name]
        return self.defaults.get(name, default)

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer field, from `least` up to the largest that a model may have."""
        value = self.get(name, default)
        if value is None:
            also = f" (and so is '{_ALIASES[name]}')" if name in _ALIASES else ""
            self.refuse(name, f"is missing{also}")
        if type(value) is not int or value < least:
            self.refuse(
                name, f"must be an integer of at least {least}, not {shorten(repr(value))}"
            )
        most = _MOST.get(name, MAX_WIDTH)
        if value > most:
            self.refuse(name, f"must be at most {most:,}, not {shorten(repr(value))}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a field that is true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {value!r}")
        return value

    def items(self, name: str) -> list[Any]:
        """Return a field that is a list; empty if left out."""
        value = self.get(name, [])
        if not isinstance(value, list):
            self.refuse(name, f"must be a list, not {value!r}")
        return value


def read_config(path: Path | str, dtype: str | None = None) -> ModelSpec:
    """Read the model that a Hugging Face `config.json` describes.

    Args:
        path: the file, or the folder with a `config.json`, after which the model is named.
        dtype: type of the weights, instead of the one in the file.

    Raises:
        InputError: a file that cannot be read, an unknown type of model, a field that is
            missing or cannot be used; the text names file and field.
    """
    config, family = _open(Path(path))
    heads = config.count("num_attention_heads")
    hidden = config.count("hidden_size")
    if family.mla:
        rotary = config.count("qk_rope_head_dim")
        head_dim = config.count("qk_nope_head_dim") + rotary
        value_dim = config.count("v_head_dim")
        latent = config.count("kv_lora_rank") + rotary
        kv_heads = heads
    else:
        if config.get("head_dim") is None and hidden % heads:
            config.refuse("head_dim", f"is missing, and {hidden} / {heads} is not whole")
        head_dim = value_dim = config.count("head_dim", hidden // heads)
        latent = 0
        kv_heads = config.count("num_key_value_heads", heads)
    experts = config.count(family.experts) if family.experts else 0
    taken = config.count("num_experts_per_tok") if experts else 0
    shared, expert = _parameters(config, family, kv_heads, head_dim)
    weights, expert_weights = (dtype, dtype) if dtype else _dtypes(config)
    windows = _windows(config, family)
    name = (
        config.path.parent.resolve().name if config.path.stem == "config" else config.path.stem
    )
    try:
        return ModelSpec(
            name=name,
            layers=len(windows),
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            hidden_size=hidden,
            parameters=shared + experts * expert,
            active_parameters=shared + taken * expert,
            dtype=weights,
            experts=experts,
            experts_per_token=taken,
            expert_dtype=expert_weights,
            windows=windows,
            latent=latent,
        )
    except InputError as error:
        msg = f"{config.path}: {error}"
        raise InputError(msg) from None


def _open(path: Path) -> tuple[_Config, _Family]:
    if path.is_dir():
        path /= "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror}"
        raise InputError(msg) from None
    except (ValueError, RecursionError) as error:
        msg = f"{path}: not a JSON file: {error}"
        raise InputError(msg) from None
    if not isinstance(fields, dict):
        msg = f"{path}: expected a JSON object, as in a Hugging Face config.json"
        raise InputError(msg)
    config = _Config(path, fields)
    text = fields.get("text_config")
    if isinstance(text, dict):
        shared = {name: fields[name] for name in _SHARED_FIELDS if name in fields}
        config = _Config(path, shared | text, "text_config.")
    kind = config.get("model_type")
    if kind is None:
        config.refuse("model_type", "is missing")
    if str(kind) not in FAMILIES:
        config.refuse("model_type", f"is {kind!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    return attrs.evolve(config, defaults=family.defaults), family


def _parameters(
    config: _Config, family: _Family, kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Return the parameters outside the routed experts, and of one expert in all layers."""
    layers = config.count("num_hidden_layers")
    hidden = config.count("hidden_size")
    vocabulary = config.count("vocab_size")
    mlp_bias = config.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias

    def mlp(width: int) -> int:
        ups = 2 if family.gated else 1
        return (ups + 1) * hidden * width + (ups * width + hidden if mlp_bias else 0)

    total = vocabulary * hidden * (1 if config.flag("tie_word_embeddings") else 2)
    total += vocabulary * family.head_bias + hidden * family.final_norms
    if family.positions:
        total += config.count("max_position_embeddings") * hidden
    if family.mla:
        attention = _latent_attention(config)
    else:
        attention = _attention(config, family, kv_heads, head_dim)
    total += layers * (attention + hidden * family.norms)

    sparse = _sparse_layers(config, family)
    ratio = family.mlp_ratio
    if sparse < layers or family.expert_width == "intermediate_size":
        width = config.count("intermediate_size", ratio * hidden if ratio else None)
        total += (layers - sparse) * mlp(width)
    if not family.experts:
        return total, 0
    experts = config.count(family.experts)
    width = config.count(family.expert_width)
    total += sparse * (hidden * experts + experts * family.router_bias)
    total += sparse * mlp(width) * config.count("n_shared_experts", 0, least=0)
    shared = config.count("shared_expert_intermediate_size", 0, least=0)
    if shared:
        total += sparse * (mlp(shared) + hidden)
    return total, sparse * mlp(width)


def _attention(config: _Config, family: _Family, kv_heads: int, head_dim: int) -> int:
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    says = config.flag("attention_bias")
    qkv = (heads + 2 * kv_heads) * head_dim
    total = hidden * (qkv + heads * head_dim)
    total += qkv * (says if family.qkv_bias is None else family.qkv_bias)
    total += hidden * (says if family.output_bias is None else family.output_bias)
    return total + 2 * head_dim * family.qk_norm + heads * family.sinks


def _latent_attention(config: _Config) -> int:
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    rank = config.count("kv_lora_rank")
    key, rotary = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    value = config.count("v_head_dim")
    query = heads * (key + rotary)
    if config.get("q_lora_rank") is None:
        total = hidden * query
    else:
        query_rank = config.count("q_lora_rank")
        total = query_rank * (hidden + 1 + query)
    total += hidden * (rank + rotary) + rank * (1 + heads * (key + value))
    return total + heads * value * hidden


def _sparse_layers(config: _Config, family: _Family) -> int:
    """Return the number of layers that have experts."""
    if not family.experts:
        return 0
    dense = config.items("mlp_only_layers")
    first = config.count("first_k_dense_replace", 0, least=0)
    step = config.count("decoder_sparse_step", 1)
    every = config.count("moe_layer_freq", 1)
    return sum(
        layer >= first and layer not in dense and (layer + 1) % step == 0 and layer % every == 0
        for layer in range(config.count("num_hidden_layers"))
    )


def _windows(config: _Config, family: _Family) -> tuple[int | None, ...]:
    layers = config.count("num_hidden_layers")
    if family.windows is None or config.get("sliding_window") is None:
        return (None,) * layers
    window = config.count("sliding_window")
    longest = config.get("max_position_embeddings")
    unlimited = isinstance(longest, int) and window >= longest
    if unlimited or not config.flag("use_sliding_window", default=family.windows):
        return (None,) * layers
    kinds = config.items("layer_types")
    if kinds and len(kinds) != layers:
        config.refuse("layer_types", f"has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.refuse("layer_types", f"has {kind!r}, whose K/V cannot be sized")
    if not kinds:
        first = config.count("max_window_layers", 0, least=0)
        every = config.count("sliding_window_pattern", family.full_every, least=0)
        kinds = [
            "full_attention"
            if layer < first or (every and (layer + 1) % every == 0)
            else "sliding_attention"
            for layer in range(layers)
        ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtypes(config: _Config) -> tuple[str, str]:
    """Return the dtypes of the weights and of the routed experts' weights."""
    dtype = _DTYPES.get(str(config.get("torch_dtype")).removeprefix("torch."))
    quantised = config.get("quantization_config")
    if quantised is None:
        if dtype is None:
            given = config.fields.get("torch_dtype", config.fields.get("dtype"))
            what = "is missing" if given is None else f"is {given!r}"
            config.refuse(
                "torch_dtype", f"{what}; give --weights-dtype, or use one of {_NAMES}"
            )
        return dtype, dtype
    if not isinstance(quantised, dict):
        config.refuse("quantization_config", f"must be an object, not {quantised!r}")
    method = quantised.get("quant_method")
    if method is None:
        config.refuse(
            "quantization_config", "does not name its 'quant_method'; give --weights-dtype"
        )
    if method == "mxfp4":
        return dtype or "bf16", "mxfp4"
    bits = f" with {quantised.get('bits')} bits" if method in ("gptq", "awq") else ""
    weights = f"int{quantised.get('bits')}" if bits else str(method)
    if weights not in _QUANTISED:
        config.refuse(
            "quantization_config",
            f"has weights by {method!r}{bits}, of unknown size; give --weights-dtype",
        )
    return _QUANTISED[weights], _QUANTISED[weights]


@attrs.frozen(kw_only=True)
class _Family:
    """The properties that all models of one `model_type` share.

    Attributes:
        norms, final_norms: norm vectors of `hidden_size` in each layer, and after the last.
            A norm with a bias counts as two.
        qkv_bias, output_bias, mlp_bias: whether these have biases; None: a field of the config
            decides.
        qk_norm: whether queries and keys are normalised, by a vector of `head_dim` each.
        sinks: whether each query head has a learned sink.
        gated: whether the MLP has a gate, hence three matrices rather than two.
        mlp_ratio: MLP width in hidden sizes, where the config leaves it out.
        positions, head_bias: whether there are learned positions, and an output bias.
        mla: whether attention is multi-head latent attention.
        experts: the field with the number of routed experts; None: a dense model.
        expert_width: the field with the width of one.
        router_bias: whether the router has a bias for each expert.
        windows: whether `sliding_window` applies without `use_sliding_window`; None: never.
        full_every: every `full_every`-th layer has no window; 0: every layer has one.
        defaults: values of fields that the makers' own configs leave out.
    """

    norms: int = 2
    final_norms: int = 1
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    sinks: bool = False
    gated: bool = True
    mlp_ratio: int | None = None
    positions: bool = False
    head_bias: bool = False
    mla: bool = False
    experts: str | None = None
    expert_width: str = "moe_intermediate_size"
    router_bias: bool = False
    windows: bool | None = None
    full_every: int = 0
    defaults: Mapping[str, Any] = attrs.field(factory=dict)


_BIASED: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


_QWEN_2: dict[str, Any] = {"qkv_bias": True, "output_bias": False, "windows": False}

_TIED = {"tie_word_embeddings": True}


FAMILIES: Mapping[str, _Family] = {
    "deepseek_v2": _Family(mla=True, experts="n_routed_experts"),
    "deepseek_v3": _Family(mla=True, experts="n_routed_experts", router_bias=True),
    "gemma": _Family(defaults=_TIED),
    "gemma2": _Family(norms=4, windows=True, full_every=2, defaults=_TIED),
    "gemma3_text": _Family(
        norms=4,
        qk_norm=True,
        windows=True,
        full_every=6,
        defaults=_TIED
        | {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
    ),
    "gpt2": _Family(
        norms=4,
        final_norms=2,
        gated=False,
        mlp_ratio=4,
        positions=True,
        defaults=_TIED | {"torch_dtype": "float32"},
        **_BIASED,
    ),
    "gpt_oss": _Family(
        sinks=True,
        experts="num_local_experts",
        expert_width="intermediate_size",
        router_bias=True,
        windows=True,
        full_every=2,
        defaults={"torch_dtype": "bfloat16"},
        **_BIASED,
    ),
    "llama": _Family(mlp_bias=None),
    "mistral": _Family(windows=True),
    "mixtral": _Family(
        experts="num_local_experts", expert_width="intermediate_size", windows=True
    ),
    "phi": _Family(final_norms=2, gated=False, head_bias=True, **_BIASED),
    "phi3": _Family(windows=True),
    "qwen2": _Family(**_QWEN_2),
    "qwen2_moe": _Family(experts="num_experts", **_QWEN_2),
    "qwen3": _Family(qk_norm=True, windows=False),
    "qwen3_moe": _Family(qk_norm=True, experts="num_experts", windows=False),
}
