"""The shape and the parameters of a model, from a Hugging Face `config.json`.

The count is exact, tensor by tensor, for the language model (not for a vision tower, nor
for layers that predict further tokens).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import attrs

from kvcore.errors import InputError, shorten
from kvcore.models.spec import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, ModelSpec, bytes_of
from kvcore_plugins.models.quantisation import Quantisation, read_quantisation

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

_MOST = {
    "num_hidden_layers": MAX_LAYERS,
    "n_routed_experts": MAX_EXPERTS,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
}

_UNSIZED = {
    "index_": "keys of an indexer beside its K/V (sparse attention)",
    "linear_": "layers that keep a state in place of K/V (linear attention)",
    "mamba_": "layers that keep a state in place of K/V (Mamba)",
    "num_kv_shared_layers": "layers that share K/V",
}
"""Beginnings of fields of models whose K/V would be sized wrongly."""

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
    weights = _weights(config, family, kv_heads, head_dim)
    shared, expert = weights.shared, weights.one_expert
    stored = {"dtype": dtype} if dtype else _stored(config, family, weights, experts)
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
            experts=experts,
            experts_per_token=taken,
            windows=windows,
            positions=_positions(config),
            **stored,
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
    for field, what in _UNSIZED.items():
        if any(name.startswith(field) and value for name, value in config.fields.items()):
            config.refuse("model_type", f"is {kind!r}, with {what}, which are not sized")
    if str(kind) not in FAMILIES:
        config.refuse("model_type", f"is {kind!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    return attrs.evolve(config, defaults=family.defaults), family


Matrices: TypeAlias = dict[str, tuple[int, int]]
"""Inputs and outputs of the matrices of a module, by name."""


@attrs.frozen
class _Weights:
    """The matrices of the layers, by the module that they are in, and all other parameters.

    Attributes:
        everywhere, dense, sparse: those of all layers, of layers without experts, and of
            layers with experts, outside these.
        expert: those of one expert of a layer, and its biases.
        has_experts: whether a layer has experts.
        others: parameters outside the experts that are in no such matrix.
    """

    everywhere: dict[str, Matrices]
    dense: dict[str, Matrices]
    sparse: dict[str, Matrices]
    expert: Matrices
    expert_biases: int
    has_experts: list[bool]
    others: int

    @property
    def shared(self) -> int:
        """Parameters outside the experts."""
        layers, sparse = len(self.has_experts), sum(self.has_experts)
        groups = (self.everywhere, layers), (self.dense, layers - sparse), (self.sparse, sparse)
        return self.others + sum(
            count * _size(matrices) for group, count in groups for matrices in group.values()
        )

    @property
    def one_expert(self) -> int:
        """Parameters of one expert in all layers."""
        return sum(self.has_experts) * (_size(self.expert) + self.expert_biases)

    def modules(self, layer: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name, inputs and outputs of each matrix of a layer outside the experts."""
        others = self.sparse if self.has_experts[layer] else self.dense
        for parent, matrices in (self.everywhere | others).items():
            for name, shape in matrices.items():
                yield f"model.layers.{layer}.{parent}.{name}", *shape

    def of_expert(self, layer: int, parent: str) -> Iterator[tuple[str, int, int]]:
        """Yield the name, inputs and outputs of each matrix of the first expert of a layer."""
        if self.has_experts[layer]:
            for name, shape in self.expert.items():
                yield f"model.layers.{layer}.{parent}.experts.0.{name}", *shape


def _size(matrices: Matrices) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices.values())


def _weights(config: _Config, family: _Family, kv_heads: int, head_dim: int) -> _Weights:
    """Return the weights of the model."""
    layers = config.count("num_hidden_layers")
    hidden = config.count("hidden_size")
    vocabulary = config.count("vocab_size")
    mlp_bias = config.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias

    def mlp(width: int) -> Matrices:
        up = {"up_proj": (hidden, width), "down_proj": (width, hidden)}
        return {"gate_proj": (hidden, width), **up} if family.gated else up

    def biases(matrices: Matrices) -> int:
        return mlp_bias * sum(outputs for _, outputs in matrices.values())

    others = vocabulary * hidden * (1 if config.flag("tie_word_embeddings") else 2)
    others += vocabulary * family.head_bias + hidden * family.final_norms
    if family.positions:
        others += config.count("max_position_embeddings") * hidden
    if family.mla:
        attention, vectors = _latent_attention(config)
    else:
        attention, vectors = _attention(config, family, kv_heads, head_dim)
    others += layers * (vectors + hidden * family.norms)

    has_experts = _sparse_layers(config, family)
    sparse = sum(has_experts)
    ratio = family.mlp_ratio
    dense: Matrices = {}
    if sparse < layers or family.expert_width == "intermediate_size":
        width = config.count(family.width, ratio * hidden if ratio else None)
        dense = mlp(width)
        others += (layers - sparse) * biases(dense)
    expert: Matrices = {}
    shared: dict[str, Matrices] = {}
    if family.experts:
        experts = config.count(family.experts)
        width = config.count(family.expert_width)
        expert = mlp(width)
        others += sparse * (hidden * experts + experts * family.router_bias)
        # As wide as so many experts together.
        if more := config.count("n_shared_experts", family.shared_experts, least=0):
            shared = {f"{family.mlp}.shared_experts": mlp(width * more)}
            others += sparse * biases(shared[f"{family.mlp}.shared_experts"])
        if width := config.count("shared_expert_intermediate_size", 0, least=0):
            shared = {f"{family.mlp}.shared_expert": mlp(width)}
            others += sparse * (hidden + biases(mlp(width)))
    return _Weights(
        everywhere={"self_attn": attention},
        dense={family.mlp: dense},
        sparse=shared,
        expert=expert,
        expert_biases=biases(expert),
        has_experts=has_experts,
        others=others,
    )


def _attention(
    config: _Config, family: _Family, kv_heads: int, head_dim: int
) -> tuple[Matrices, int]:
    """Return the matrices of attention in a layer, and its further parameters."""
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    says = config.flag("attention_bias")
    vectors = (
        (heads + 2 * kv_heads)
        * head_dim
        * (says if family.qkv_bias is None else family.qkv_bias)
    )
    vectors += hidden * (says if family.output_bias is None else family.output_bias)
    normed = config.flag("use_qk_norm") if family.qk_norm is None else family.qk_norm
    matrices = {
        "q_proj": (hidden, heads * head_dim),
        "k_proj": (hidden, kv_heads * head_dim),
        "v_proj": (hidden, kv_heads * head_dim),
        "o_proj": (heads * head_dim, hidden),
    }
    return matrices, vectors + 2 * head_dim * normed + heads * family.sinks


def _latent_attention(config: _Config) -> tuple[Matrices, int]:
    """Return the matrices of latent attention in a layer, and the numbers of its norms."""
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    rank = config.count("kv_lora_rank")
    key, rotary = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    value = config.count("v_head_dim")
    matrices = {
        "kv_a_proj_with_mqa": (hidden, rank + rotary),
        "kv_b_proj": (rank, heads * (key + value)),
        "o_proj": (heads * value, hidden),
    }
    if config.get("q_lora_rank") is None:
        return {"q_proj": (hidden, heads * (key + rotary)), **matrices}, rank
    query_rank = config.count("q_lora_rank")
    matrices["q_a_proj"] = hidden, query_rank
    matrices["q_b_proj"] = query_rank, heads * (key + rotary)
    return matrices, rank + query_rank


def _sparse_layers(config: _Config, family: _Family) -> list[bool]:
    """Return for each layer whether it has experts."""
    layers = range(config.count("num_hidden_layers"))
    if not family.experts:
        return [False for _ in layers]
    dense = config.items("mlp_only_layers")
    first = config.count("first_k_dense_replace", 0, least=0)
    step = config.count("interleave_moe_layer_step", config.count("decoder_sparse_step", 1))
    every = config.count("moe_layer_freq", 1)
    return [
        layer >= first and layer not in dense and (layer + 1) % step == 0 and layer % every == 0
        for layer in layers
    ]


def _windows(config: _Config, family: _Family) -> tuple[int | None, ...]:
    layers = config.count("num_hidden_layers")
    if family.windows is None or config.get(family.window) is None:
        return (None,) * layers
    window = config.count(family.window)
    longest = config.get("max_position_embeddings")
    unlimited = isinstance(longest, int) and window >= longest
    if unlimited or not config.flag("use_sliding_window", default=family.windows):
        return (None,) * layers
    # Llama 4 attends in chunks in the layers that have rotary positions.
    kinds = config.items("layer_types") or [
        "chunked_attention" if rotary else "full_attention"
        for rotary in config.items("no_rope_layers")
    ]
    if kinds and len(kinds) != layers:
        config.refuse("layer_types", f"has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
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
    return tuple(None if kind == "full_attention" else window for kind in kinds)


def _positions(config: _Config) -> int:
    """Return the tokens up to which a model has positions; 0 if the config does not say."""
    positions = config.count("max_position_embeddings", 0, least=0)
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return positions
    kind, factor = (scaling.get(name) for name in ("rope_type", "factor"))
    if (kind or scaling.get("type")) == "yarn" and isinstance(factor, int | float):
        original = scaling.get("original_max_position_embeddings")
        return (
            max(positions, int(factor * original)) if isinstance(original, int) else positions
        )
    return positions


def _stored(
    config: _Config, family: _Family, weights: _Weights, experts: int
) -> dict[str, Any]:
    """Return the dtypes of the weights and of the experts, and what they take beside that."""
    dtype = _DTYPES.get(str(config.get("torch_dtype")).removeprefix("torch."))
    given = config.get("quantization_config")
    if given is None:
        if dtype is None:
            written = config.fields.get("torch_dtype", config.fields.get("dtype"))
            what = "is missing" if written is None else f"is {written!r}"
            config.refuse(
                "torch_dtype", f"{what}; give --weights-dtype, or use one of {_NAMES}"
            )
        return {"dtype": dtype}
    if not isinstance(given, dict):
        config.refuse("quantization_config", f"must be an object, not {given!r}")
    formats = read_quantisation(given, partial(config.refuse, "quantization_config"))
    layers = range(len(weights.has_experts))
    shared = [module for layer in layers for module in weights.modules(layer)]
    if not config.flag("tie_word_embeddings"):
        shared.append(("lm_head", config.count("hidden_size"), config.count("vocab_size")))
    expert = [module for layer in layers for module in weights.of_expert(layer, family.mlp)]
    whole = dtype or "bf16"
    dtype, extra = _format(formats, shared, weights.shared, whole)
    if not expert:
        return {"dtype": dtype, "extra_bytes": extra}
    expert_dtype, more = _format(formats, expert, weights.one_expert, whole)
    return {
        "dtype": dtype,
        "expert_dtype": expert_dtype,
        "extra_bytes": extra,
        "extra_expert_bytes": experts * more,
    }


def _format(
    formats: Quantisation, modules: list[tuple[str, int, int]], parameters: int, whole: str
) -> tuple[str, int]:
    """Return the dtype of most of some parameters, and what they take beside it, in bytes."""
    numbers, size = Counter({whole: parameters}), 0
    for name, inputs, outputs in modules:
        scheme = formats.scheme_of(name)
        if scheme is not None:
            numbers[scheme.dtype] += inputs * outputs
            numbers[whole] -= inputs * outputs
            size += scheme.matrix_bytes(inputs, outputs)
    dtype = max(numbers, key=lambda each: numbers[each])
    size += bytes_of(numbers[whole], whole)
    return dtype, size - bytes_of(parameters, dtype)


@attrs.frozen(kw_only=True)
class _Family:
    """The properties that all models of one `model_type` share.

    Attributes:
        norms, final_norms: norm vectors of `hidden_size` in each layer, and after the last.
            A norm with a bias counts as two.
        qkv_bias, output_bias, mlp_bias: whether these have biases; None: a field of the config
            decides.
        qk_norm: whether queries and keys are normalised, by a vector of `head_dim` each; None:
            a field of the config decides.
        sinks: whether each query head has a learned sink.
        gated: whether the MLP has a gate, hence three matrices rather than two.
        mlp: name of the feed-forward module of a layer.
        width: the field with its width, where it has no experts.
        mlp_ratio: MLP width in hidden sizes, where the config leaves it out.
        positions, head_bias: whether there are learned positions, and an output bias.
        mla: whether attention is multi-head latent attention.
        experts: the field with the number of routed experts; None: a dense model.
        expert_width: the field with the width of one.
        shared_experts: number of experts that each token takes, if no field gives it.
        router_bias: whether the router has a bias for each expert.
        windows: whether `sliding_window` applies without `use_sliding_window`; None: never.
        window: the field with the window.
        full_every: every `full_every`-th layer has no window; 0: every layer has one.
        defaults: values of fields that the makers' own configs leave out.
    """

    norms: int = 2
    final_norms: int = 1
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool | None = False
    sinks: bool = False
    gated: bool = True
    mlp: str = "mlp"
    width: str = "intermediate_size"
    mlp_ratio: int | None = None
    positions: bool = False
    head_bias: bool = False
    mla: bool = False
    experts: str | None = None
    expert_width: str = "moe_intermediate_size"
    shared_experts: int = 0
    router_bias: bool = False
    windows: bool | None = None
    window: str = "sliding_window"
    full_every: int = 0
    defaults: Mapping[str, Any] = attrs.field(factory=dict)


_BIASED: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


_QWEN_2: dict[str, Any] = {"qkv_bias": True, "output_bias": False, "windows": False}

_TIED = {"tie_word_embeddings": True}


_DEEPSEEK_V3 = _Family(mla=True, experts="n_routed_experts", router_bias=True)


FAMILIES: Mapping[str, _Family] = {
    "deepseek_v2": _Family(mla=True, experts="n_routed_experts"),
    "deepseek_v3": _DEEPSEEK_V3,
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
    "glm4_moe": _Family(
        output_bias=False, qk_norm=None, experts="n_routed_experts", router_bias=True
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
    "kimi_k2": _DEEPSEEK_V3,
    "llama": _Family(mlp_bias=None),
    "llama4_text": _Family(
        mlp="feed_forward",
        width="intermediate_size_mlp",
        experts="num_local_experts",
        expert_width="intermediate_size",
        shared_experts=1,
        windows=True,
        window="attention_chunk_size",
        full_every=4,
    ),
    "mistral": _Family(windows=True),
    "mixtral": _Family(
        mlp="block_sparse_moe",
        experts="num_local_experts",
        expert_width="intermediate_size",
        windows=True,
    ),
    "phi": _Family(final_norms=2, gated=False, head_bias=True, **_BIASED),
    "phi3": _Family(windows=True),
    "qwen2": _Family(**_QWEN_2),
    "qwen2_moe": _Family(experts="num_experts", **_QWEN_2),
    "qwen3": _Family(qk_norm=True, windows=False),
    "qwen3_moe": _Family(qk_norm=True, experts="num_experts", windows=False),
}
