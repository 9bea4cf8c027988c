"""The shape and the parameters of a model, from a Hugging Face `config.json`.

The count is exact, tensor by tensor, for the language model (not for a vision tower, nor
for layers that predict further tokens). A field that the family of the model does not know is
refused: it may change what a layer keeps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from kvcore.errors import InputError, shorten
from kvcore.models.layers import MAX_WIDTH, LayerCache, merged
from kvcore.models.spec import ModelSpec, bytes_of
from kvcore.untrusted import LONGEST_LINE, load_toml, read_at_most
from kvcore_plugins.models.config import Config
from kvcore_plugins.models.families import FAMILIES
from kvcore_plugins.models.family import Build, Family, Layer, Part
from kvcore_plugins.models.harmless import HARMLESS
from kvcore_plugins.models.parts import attention, feed_forward, head_width
from kvcore_plugins.models.quantisation import Quantisation, Scheme, read_quantisation

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}

_NAMES = ", ".join(_DTYPES)

_SHARED_FIELDS = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")

_MIXERS: Mapping[str, Build] = dict.fromkeys(
    ("full_attention", "sliding_attention", "chunked_attention"), attention
)
"""What layers of a family are by their type, if the family does not say it."""

_KINDS = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "short_conv": "conv",
}
"""Other names of types of layers."""

_REMEDY = (
    "else describe the model by hand, as kvcore.models.spec.ModelSpec or in a file of TOML "
    "with its fields and what layers keep, such as [[caches]] with kind = 'full', layers = 12, "
    "kv_heads = 2, key_dim = 256 and value_dim = 256: see 'A model by hand' in "
    "docs/reference/size.md"
)


def read_config(path: Path | str, dtype: str | None = None) -> ModelSpec:
    """Read the model that a Hugging Face `config.json`, or a table of TOML, describes.

    Args:
        path: the file, or the folder with a `config.json`, after which the model is named. A
            file that ends in `.toml` has the fields of `ModelSpec`.
        dtype: type of the weights, instead of the one in the file.

    Raises:
        InputError: a file that cannot be read, an unknown type of model, a field that is
            missing, not known or cannot be used; the text names file and field.
    """
    path = Path(path)
    if path.suffix == ".toml":
        model = _by_hand(path)
        return model.with_weights(dtype) if dtype else model
    if path.is_dir():
        path /= "config.json"
    name = path.parent.resolve().name if path.stem == "config" else path.stem
    fields, beside = _json(path), path.with_name("hf_quant_config.json")
    # ModelOpt says in a file of its own how it has quantised.
    if path.stem == "config" and fields.get("quantization_config") is None and beside.is_file():
        quantised = _json(beside).get("quantization")
        fields = {**fields, "quantization_config": quantised}
    return model_of(fields, name, path, dtype)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        if (data := read_at_most(path, LONGEST_LINE)) is None:
            msg = f"{path}: it has more than {LONGEST_LINE >> 20} MiB: no configuration has"
            raise InputError(msg)
        fields = json.loads(data)
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror}"
        raise InputError(msg) from None
    except (ValueError, RecursionError) as error:
        msg = f"{path}: not a JSON file: {error}"
        raise InputError(msg) from None
    if not isinstance(fields, dict):
        msg = f"{path}: expected a JSON object, as in a Hugging Face config.json"
        raise InputError(msg)
    return fields


def _by_hand(path: Path) -> ModelSpec:
    """Read a model from a file of TOML with the fields of a `ModelSpec`."""
    try:
        fields = load_toml(path)
    except OSError as error:
        msg = f"{path}: cannot be read: {error.strerror}"
        raise InputError(msg) from None
    except ValueError as error:
        msg = f"{path}: not a TOML file: {error}"
        raise InputError(msg) from None
    fields.setdefault("name", path.stem)
    try:
        listed = fields.pop("caches", [])
        caches = [_made(LayerCache, c) for c in (listed if type(listed) is list else [listed])]
        model: ModelSpec = _made(ModelSpec, fields | {"caches": merged(caches)})
    except InputError as error:
        msg = f"{path}: {error}"
        raise InputError(msg) from None
    return model


def _made(cls: Any, fields: Any) -> Any:
    """Return an object of an attrs class by its fields; refuse others, and other types."""
    known = {name: f for name, f in attrs.fields_dict(cls).items() if name != "windows"}
    what = "a cache" if cls is LayerCache else "a model"
    if not isinstance(fields, dict):
        msg = f"{what} must be a table, not {shorten(repr(fields))}"
        raise InputError(msg)
    unknown = [name for name in fields if name not in known]
    needed = [name for name, field in known.items() if field.default is attrs.NOTHING]
    missing = [name for name in needed if name not in fields]
    if unknown or missing:
        problem = f"has no {missing[0]!r}" if missing else f"has no field {unknown[0]!r}"
        msg = f"{what} {problem}; its fields are {', '.join(known)}"
        raise InputError(msg)
    for name, value in fields.items():
        is_count = name not in ("name", "kind", "dtype", "expert_dtype", "caches")
        if type(value) is not (int if is_count else type(value) if name == "caches" else str):
            kind = "a whole number" if is_count else "text"
            msg = f"{what}: {name} must be {kind}, not {shorten(repr(value))}"
            raise InputError(msg)
    return cls(**fields)


def model_of(
    fields: Mapping[str, Any], name: str, path: Path | str, dtype: str | None = None
) -> ModelSpec:
    """Return the model called `name` that the fields of a config describe.

    Args:
        fields: the fields, of the language model or with it as `text_config`.
        name: name of the model.
        path: the file that errors name.
        dtype: type of the weights, instead of the one in the fields.

    Raises:
        InputError: an unknown type of model, or a field that is missing, not known or cannot
            be used.
    """
    config, family = _opened(fields, Path(path))
    layers = _layers(config, family)
    built: dict[Layer, list[Part]] = {}
    blocks = [_parts(config, family, layer, built) for layer in layers]
    every = [part for block in blocks for part in block]
    one_expert = sum(part.parameters for part in every if part.expert)
    outside = _outside(config, family)
    shared = outside + sum(part.parameters for part in every if not part.expert)
    experts = config.count(family.experts.count) if family.experts and one_expert else 0
    taken = config.count("num_experts_per_tok") if one_expert else 0
    shape = _shape(config, family)
    caches = merged([cache for part in every for cache in part.caches])
    full = next((cache for cache in caches if cache.kind == "full"), None)
    if full is not None:
        heads = {"kv_heads": full.kv_heads, "head_dim": full.key_dim}
        shape |= {**heads, "value_dim": full.value_dim}
    stored = {} if dtype else _stored(config, blocks, outside, experts)
    positions = _positions(config)
    _check_known(config, family)
    try:
        model = ModelSpec(
            name=name,
            layers=len(layers),
            **shape,
            hidden_size=config.count("hidden_size"),
            parameters=shared + experts * one_expert,
            active_parameters=shared + taken * one_expert,
            experts=experts,
            experts_per_token=taken,
            positions=positions,
            **stored,
        )
        model = model.with_weights(dtype) if dtype else model
        windows = [None if layer.shares else layer.window for layer in layers]
        plain = attrs.evolve(model, windows=tuple(windows))
        # Where heads, latent and windows say it, that is all there is to say.
        return plain if plain.layer_caches == caches else attrs.evolve(model, caches=caches)
    except InputError as error:
        msg = f"{config.path}: {error}"
        raise InputError(msg) from None


def _opened(fields: Mapping[str, Any], path: Path) -> tuple[Config, Family]:
    """Return the fields of the language model, and its family."""
    config = Config(path, fields)
    text = fields.get("text_config")
    if isinstance(text, dict):
        shared = {name: fields[name] for name in _SHARED_FIELDS if name in fields}
        config = Config(path, shared | text, "text_config.")
    kind = config.get("model_type")
    if kind is None:
        config.refuse("model_type", "is missing")
    if str(kind) not in FAMILIES:
        known = ", ".join(FAMILIES)
        config.refuse("model_type", f"is {{}}; known: {known}; {_REMEDY}", kind)
    family = FAMILIES[kind]
    return attrs.evolve(config, defaults=family.defaults, names=family.names), family


def _check_known(config: Config, family: Family) -> None:
    """Refuse a field that nothing here has asked for, and that is not known to be harmless."""
    for name, value in family.only.items():
        if config.get(name, value) != value:
            config.refuse(name, f"is {{}}, not {{}}; {_REMEDY}", config.get(name), value)
    kind = config.get("model_type")
    known = config.known | family.known | HARMLESS
    for name, value in config.fields.items():
        # What is null, false, zero or empty is left out.
        if name in known or not value:
            continue
        config.refuse(
            name,
            "is {}, which models of type {} are not known to have: it may change what a layer "
            f"keeps. If it changes neither that nor the parameters, leave it out; {_REMEDY}",
            value,
            kind,
        )


def _layers(config: Config, family: Family) -> list[Layer]:
    """Return the layers: their types and windows, whether they have experts or share K/V."""
    count, kinds = config.layers, config.items("layer_types")
    if not kinds:
        kinds = family.kinds(config) if family.kinds else _by_window(config, family)
    if len(kinds) != count:
        config.refuse("layer_types", f"has {len(kinds)} entries for {count} layers")
    kinds = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if family.window is not None and family.window.full_last:
        kinds[-1] = "full_attention"
    for kind in kinds:
        if not isinstance(kind, str) or kind not in (family.mixers or _MIXERS):
            config.refuse("layer_types", "has {}, whose K/V cannot be sized", kind)
    window, sparse = _window(config, family), _sparse_layers(config, family, count)
    # As wide as there are positions, it bounds nothing.
    window = None if window and 0 < _positions(config) <= window else window
    shared = config.count("num_kv_shared_layers", 0, least=0) if family.shares else 0
    return [
        Layer(
            index=index,
            kind=kind,
            sparse=sparse[index],
            shares=index >= count - shared,
            window=window if kind in ("sliding_attention", "chunked_attention") else None,
        )
        for index, kind in enumerate(kinds)
    ]


def _window(config: Config, family: Family) -> int | None:
    """Return the tokens of the window, or chunk, that some layers may have; None: none has."""
    if family.window is None or config.get(family.window.field) is None:
        return None
    if not config.flag("use_sliding_window", default=family.window.by_default):
        return None
    return config.count(family.window.field)


def _by_window(config: Config, family: Family) -> list[str]:
    """Return the types of layers of which some have a window, or a chunk."""
    layers = config.count("num_hidden_layers")
    if family.window is None or _window(config, family) is None:
        return ["full_attention"] * layers
    limited = "sliding_attention"
    if family.window.field == "attention_chunk_size":
        limited = "chunked_attention"
        # Llama 4 attends in chunks in the layers that have rotary positions.
        if rotary := config.items("no_rope_layers"):
            return [limited if is_limited else "full_attention" for is_limited in rotary]
    first = config.count("max_window_layers", 0, least=0)
    every = config.count(
        "sliding_window_pattern",
        config.count("no_rope_layer_interval", family.window.full_every, least=0),
        least=0,
    )
    return [
        "full_attention" if layer < first or (every and (layer + 1) % every == 0) else limited
        for layer in range(layers)
    ]


def _sparse_layers(config: Config, family: Family, count: int) -> list[bool]:
    """Return for each layer whether it has experts."""
    experts = family.experts
    if experts is None:
        return [False] * count
    fewest = 2 if experts.optional else 1
    if config.count(experts.count, fewest - 1, least=0) < fewest:
        return [False] * count
    kinds = config.of_layers("mlp_layer_types")
    if config.get("moe_layers") is not None:
        indices = config.indices("moe_layers")
        kinds = ["sparse" if layer in indices else "dense" for layer in range(count)]
    frequencies = config.get("moe_layer_freq", 1)
    if isinstance(frequencies, list):
        frequencies = config.of_layers("moe_layer_freq")
        kinds = ["sparse" if frequency else "dense" for frequency in frequencies]
        config = config.having({"moe_layer_freq": 1})
    dense = config.indices("mlp_only_layers")
    first = config.count("first_k_dense_replace", config.get("num_dense_layers", 0), least=0)
    step = config.count("interleave_moe_layer_step", config.count("decoder_sparse_step", 1))
    every = config.count("moe_layer_freq", 1)
    period = config.count("expert_layer_period", 1)
    offset = config.count("expert_layer_offset", 0, least=0)
    return [
        kinds[layer] != "dense"
        if kinds
        else layer >= first
        and layer not in dense
        and (layer + 1) % step == 0
        and layer % every == 0
        and layer % period == offset
        for layer in range(count)
    ]


def _parts(
    config: Config, family: Family, layer: Layer, built: dict[Layer, list[Part]]
) -> list[Part]:
    """Return the parts of a layer; `built` has those of equal layers."""
    own = config.of_layer(layer.index)
    equal = layer if family.by_index or own is not config else attrs.evolve(layer, index=-1)
    if equal not in built:
        norms = family.norms * config.count("hidden_size")
        mixer = (family.mixers or _MIXERS)[layer.kind]
        network = family.network or feed_forward
        built[equal] = [
            *mixer(own, family, layer),
            *network(config, family, layer),
            Part("", {}, norms),
        ]
        for part in built[equal]:
            for matrix, shape in part.matrices.items():
                if min(shape) < 1:
                    what = f"{part.name}.{matrix} of layer {layer.index}".lstrip(".")
                    msg = f"{config.path}: {what} would have {min(shape)} inputs or outputs"
                    raise InputError(msg)
    return built[equal]


def _outside(config: Config, family: Family) -> int:
    """Return the number of parameters outside the layers."""
    hidden, vocabulary = config.count("hidden_size"), config.count("vocab_size")
    outside = vocabulary * hidden * (1 if config.flag("tie_word_embeddings") else 2)
    outside += vocabulary * family.head_bias + hidden * family.final_norms
    if family.positions:
        outside += config.count("max_position_embeddings") * hidden
    if family.outside is not None:
        outside += family.outside(config)
    return outside


def _shape(config: Config, family: Family) -> dict[str, Any]:
    """Return heads and widths of the model's full attention."""
    heads = config.count("num_attention_heads")
    if family.mla:
        rotary = config.count("qk_rope_head_dim")
        return {
            "query_heads": heads,
            "kv_heads": heads,
            "head_dim": config.count("qk_nope_head_dim") + rotary,
            "value_dim": config.count("v_head_dim"),
            "latent": config.count("kv_lora_rank") + rotary,
        }
    width = head_width(config)
    return {
        "query_heads": heads,
        "kv_heads": config.count("num_key_value_heads", heads),
        "head_dim": width,
        "value_dim": config.count("v_head_dim", width) if family.value_width else width,
    }


def _positions(config: Config) -> int:
    """Return the tokens up to which a model has positions; 0 if the config does not say."""
    positions = config.count("max_position_embeddings", 0, least=0)
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return positions
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    if kind != "yarn" or not isinstance(factor, int | float) or not isinstance(original, int):
        return positions
    if not (0 < original <= MAX_WIDTH and 0 < factor * original <= MAX_WIDTH):
        config.refuse("rope_scaling", "has a factor of {} for {} positions", factor, original)
    return max(positions, int(factor * original))


# How weights are stored.


def _stored(
    config: Config, blocks: list[list[Part]], outside: int, experts: int
) -> dict[str, Any]:
    """Return the dtypes of the weights and of the experts, and what they take beside that."""
    dtype = _DTYPES.get(str(config.get("torch_dtype")).removeprefix("torch."))
    quantisation = config.get("quantization_config")
    if quantisation is None:
        if dtype is None:
            written = config.fields.get("torch_dtype", config.fields.get("dtype"))
            what = "is missing" if written is None else "is {}"
            remedy = f"; give --weights-dtype, or use one of {_NAMES}"
            config.refuse("torch_dtype", what + remedy, written)
        return {"dtype": dtype}
    if not isinstance(quantisation, dict):
        config.refuse("quantization_config", "must be an object, not {}", quantisation)
    formats = read_quantisation(quantisation, partial(config.refuse, "quantization_config"))
    shared = list(_modules(blocks, expert=False))
    if not config.flag("tie_word_embeddings"):
        shared.append(("lm_head", config.count("hidden_size"), config.count("vocab_size")))
    expert = list(_modules(blocks, expert=True))
    every = [part for block in blocks for part in block]
    numbers = outside + sum(part.parameters for part in every if not part.expert)
    of_experts = sum(part.parameters for part in every if part.expert)
    dtype_of_rest = dtype or "bf16"
    dtype, extra = _format(formats, shared, numbers, dtype_of_rest)
    if not expert:
        return {"dtype": dtype, "extra_bytes": extra}
    # DeepSeek V4 keeps experts in MXFP4 where other weights are in fp8.
    narrow = config.get("expert_dtype") == "fp4"
    fp4 = (
        Scheme("mxfp4", 32, 1, 8) if narrow and not quantisation.get("config_groups") else None
    )
    expert_dtype, more = _format(formats, expert, of_experts, dtype_of_rest, fp4)
    return {
        "dtype": dtype,
        "expert_dtype": expert_dtype,
        "extra_bytes": extra,
        "extra_expert_bytes": experts * more,
    }


def _modules(blocks: list[list[Part]], *, expert: bool) -> Iterator[tuple[str, int, int]]:
    """Yield the name, inputs and outputs of the matrices of layers, or of an expert of each."""
    for layer, block in enumerate(blocks):
        for part in block:
            if part.expert == expert:
                parent = f"model.layers.{layer}.{part.name}".rstrip(".")
                for name, shape in part.matrices.items():
                    yield f"{parent}.{name}", *shape


def _format(
    formats: Quantisation,
    modules: list[tuple[str, int, int]],
    parameters: int,
    dtype_of_rest: str,
    fixed: Scheme | None = None,
) -> tuple[str, int]:
    """Return the dtype of most of some parameters, and what they take beside it, in bytes."""
    numbers, size = Counter({dtype_of_rest: parameters}), 0
    for name, inputs, outputs in modules:
        scheme = fixed or formats.scheme_of(name)
        if scheme is not None:
            numbers[scheme.dtype] += inputs * outputs
            numbers[dtype_of_rest] -= inputs * outputs
            size += scheme.matrix_bytes(inputs, outputs)
    dtype = max(numbers, key=lambda each: numbers[each])
    size += bytes_of(numbers[dtype_of_rest], dtype_of_rest)
    return dtype, size - bytes_of(parameters, dtype)
