"""The parts of which layers are made: matrices, other parameters, and what they keep.

A part is built by a function of the config, the family and the layer. To add a kind of layer,
write one, and name it among the `mixers` of a family in `families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import attrs

from kvcore.models.layers import MAX_WIDTH, CacheKind, LayerCache
from kvcore_plugins.models.config import Config
from kvcore_plugins.models.family import Build, Family, Layer, Matrices, Part
from kvcore_plugins.models.harmless import named

STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of a recurrent state, by the name of its type."""

CONV_BYTES = 2
"""Bytes of a number of the state of a convolution, which engines keep in 16 bits."""


def _biased(matrices: Matrices, *names: str) -> int:
    return sum(matrices[name][1] for name in names)


# Attention.


def attention(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build attention with K/V heads, of all tokens, of a window or of a chunk."""
    hidden = config.count("hidden_size")
    heads = config.count("num_attention_heads")
    kv_heads, head_dim = config.count("num_key_value_heads", heads), head_width(config)
    value_dim = config.count("v_head_dim", head_dim) if family.value_width else head_dim
    gates = 2 if family.gate == "each" else 1
    matrices = {
        "q_proj": (hidden, gates * heads * head_dim),
        "k_proj": (hidden, kv_heads * head_dim),
        "v_proj": (hidden, kv_heads * value_dim),
        "o_proj": (heads * value_dim, hidden),
    }
    own_keys = 0 if layer.shares else 1
    if layer.shares:
        del matrices["k_proj"], matrices["v_proj"]
    elif layer.kind == family.one_projection and config.flag("attention_k_eq_v"):
        del matrices["v_proj"]
    if family.gate == "head":
        matrices["g_proj"] = hidden, heads
    says = config.flag("attention_bias")
    vectors = 0
    if says if family.qkv_bias is None else family.qkv_bias:
        vectors += (heads + own_keys * kv_heads) * head_dim + own_keys * kv_heads * value_dim
    vectors += hidden * (says if family.output_bias is None else family.output_bias)
    if family.qk_norm == "all":
        vectors += (heads + kv_heads) * head_dim
    elif config.flag("use_qk_norm") if family.qk_norm is None else family.qk_norm:
        vectors += (1 + own_keys) * head_dim
    if family.sinks is True or layer.kind in (family.sinks or ()):
        vectors += heads
    kinds: Mapping[str, CacheKind] = {"chunked_attention": "chunk"}
    kind: CacheKind = "full" if layer.window is None else kinds.get(layer.kind, "window")
    cache = LayerCache(
        kind="shared" if layer.shares else kind,
        layers=1,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=value_dim,
        window=layer.window,
        pair_flop=2 * heads * (head_dim + value_dim),
    )
    return [Part("self_attn", matrices, vectors, (cache,))]


def head_width(config: Config) -> int:
    """Return the width of a query or key head."""
    width = config.get("head_dim")
    if width is not None:
        return config.count("head_dim")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if hidden % heads:
        config.refuse("head_dim", f"is missing, and {hidden} / {heads} is not whole")
    return hidden // heads


def latent_attention(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build multi-head latent attention (MLA), with an indexer if the family has one."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    rank = config.count("kv_lora_rank")
    key, rotary = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    value = config.count("v_head_dim")
    matrices = {
        "kv_a_proj_with_mqa": (hidden, rank + rotary),
        "kv_b_proj": (rank, heads * (key + value)),
        "o_proj": (heads * value, hidden),
    }
    vectors = rank
    if config.get("q_lora_rank") is None:
        matrices = {"q_proj": (hidden, heads * (key + rotary)), **matrices}
    else:
        query_rank = config.count("q_lora_rank")
        matrices["q_a_proj"] = hidden, query_rank
        matrices["q_b_proj"] = query_rank, heads * (key + rotary)
        vectors += query_rank
    latent = LayerCache(
        kind="mla",
        layers=1,
        kv_heads=1,
        key_dim=rank + rotary,
        attended=config.count("index_topk") if family.mla == "indexed" else None,
        pair_flop=2 * heads * (key + rotary + value),
    )
    parts = [Part("self_attn", matrices, vectors, (latent,))]
    if family.mla == "indexed" and _has_indexer(config, layer.index):
        parts.append(_indexer(config))
    return parts


def _has_indexer(config: Config, index: int) -> bool:
    """Return True if a layer selects tokens itself, not as the layer before it."""
    kinds = config.of_layers("indexer_types")
    pattern = config.get("index_topk_pattern")
    if pattern and (not isinstance(pattern, str | list) or index >= len(pattern)):
        config.refuse("index_topk_pattern", "is {}, not F or S a layer", pattern)
    every, offset = (
        config.count("index_topk_freq", 1),
        config.count("index_skip_topk_offset", 2),
    )
    if kinds:
        return bool(kinds[index] == "full")
    if pattern:
        return bool(pattern[index] in ("F", "full"))
    return max(index - offset + 1, 0) % every == 0


def _indexer(config: Config) -> Part:
    """Build the indexer of sparse attention, whose keys lie in fp8 with a scale of 4 bytes."""
    hidden, rank = config.count("hidden_size"), config.count("q_lora_rank")
    heads, width = config.count("index_n_heads"), config.count("index_head_dim")
    keys = LayerCache(
        kind="index", layers=1, entry_bytes=index_bytes(width), pair_flop=2 * heads * width
    )
    matrices = {"wq_b": (rank, heads * width), "wk": (hidden, width)}
    vectors = 2 * width + hidden * heads  # A norm with a bias, and weights_proj as it is.
    return Part("self_attn.indexer", matrices, vectors, (keys,))


def index_bytes(width: int) -> int:
    """Return the bytes of a key of an indexer: fp8, and 4 bytes of scale for 128 numbers."""
    return width + 4 * ceil(width / 128)


RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of a compressed entry, by the type of a layer of DeepSeek V4."""


def compressed_attention(config: Config, _family: Family, layer: Layer) -> list[Part]:
    """Build the attention of DeepSeek V4: a window, and perhaps compressed K/V before it.

    Keys and values are one vector. Tokens of an entry that is not full wait as they were
    projected; where entries overlap, those of the entry before it wait too. That is how vLLM
    0.33 keeps them, in fp32.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    width, rank = config.count("head_dim"), config.count("q_lora_rank")
    groups, outputs = config.count("o_groups"), config.count("o_lora_rank")
    matrices = {
        "q_a_proj": (hidden, rank),
        "q_b_proj": (rank, heads * width),
        "kv_proj": (hidden, width),
        "o_a_proj": (heads * width // groups, groups * outputs),
        "o_b_proj": (groups * outputs, hidden),
    }
    shape = {"kv_heads": 1, "key_dim": width, "pair_flop": 4 * heads * width}
    window = config.count("sliding_window")
    caches = [LayerCache(kind="window", layers=1, window=window, **shape)]
    parts = [Part("self_attn", matrices, heads + rank + width, tuple(caches))]
    ratio = RATIOS.get(layer.kind)
    index_heads, index_width = config.count("index_n_heads"), config.count("index_head_dim")
    selected = config.count("index_topk")
    if ratio is None:
        return parts
    # Where the indexer selects entries, these overlap.
    selects = layer.kind == "compressed_sparse_attention"
    entries = LayerCache(
        kind="compressed",
        layers=1,
        ratio=ratio,
        attended=selected * ratio if selects else None,
        **shape,
    )
    parts.append(_compressor(hidden, width, entries, overlaps=selects))
    if selects:
        keys = LayerCache(
            kind="index",
            layers=1,
            ratio=ratio,
            entry_bytes=index_bytes(index_width),
            pair_flop=2 * index_heads * index_width,
        )
        indexer = _compressor(hidden, index_width, keys, overlaps=True)
        matrices = {**indexer.matrices, "q_b_proj": (rank, index_heads * index_width)}
        vectors = indexer.vectors + hidden * index_heads
        name = "self_attn.compressor.indexer"
        parts.append(Part(name, matrices, vectors, indexer.caches))
    return parts


def _compressor(hidden: int, width: int, cache: LayerCache, *, overlaps: bool) -> Part:
    """Build what makes entries of `width` numbers, and keeps the tokens of the next one."""
    wide = 2 * width if overlaps else width
    window = 2 * cache.ratio if overlaps else cache.ratio
    waiting = window * 2 * wide * STATE_BYTES["float32"]
    state = LayerCache(kind="state", layers=1, window=window, state_bytes=waiting)
    matrices = {"kv_proj": (hidden, wide), "gate_proj": (hidden, wide)}
    return Part("self_attn.compressor", matrices, cache.ratio * wide + width, (cache, state))


# Recurrent layers.


def _state(config: Config, conv: int, numbers: int) -> LayerCache:
    """Return the state of a layer: of its convolution, and of its recurrence.

    A token multiplies and adds each number of the recurrence twice, to update and to read it.
    """
    dtype = str(config.get("mamba_ssm_dtype", config.get("mamba_ssm_cache_dtype", "float32")))
    if dtype not in STATE_BYTES:
        config.refuse("mamba_ssm_dtype", f"is {{}}; known: {', '.join(STATE_BYTES)}", dtype)
    size = conv * CONV_BYTES + numbers * STATE_BYTES[dtype]
    return LayerCache(kind="state", layers=1, state_bytes=size, pair_flop=4 * numbers)


def gated_delta_net(config: Config, _family: Family, _layer: Layer) -> list[Part]:
    """Build a gated delta net, the linear attention of Qwen3-Next and Qwen3.5."""
    hidden = config.count("hidden_size")
    key_heads = config.count("linear_num_key_heads")
    value_heads = config.count("linear_num_value_heads")
    key_dim, value_dim = (
        config.count("linear_key_head_dim"),
        config.count("linear_value_head_dim"),
    )
    kernel = config.count("linear_conv_kernel_dim", 4)
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * keys + values
    matrices = {
        "in_proj_qkv": (hidden, mixed),
        "in_proj_z": (hidden, values),
        "in_proj_b": (hidden, value_heads),
        "in_proj_a": (hidden, value_heads),
        "out_proj": (values, hidden),
    }
    state = _state(config, (kernel - 1) * mixed, value_heads * key_dim * value_dim)
    return [
        Part("linear_attn", matrices, 2 * value_heads + mixed * kernel + value_dim, (state,))
    ]


def delta_attention(config: Config, _family: Family, _layer: Layer) -> list[Part]:
    """Build Kimi delta attention (KDA), whose gates are of low rank."""
    hidden, table = config.count("hidden_size"), config.table("linear_attn_config")
    unknown = table.keys() - _KDA_FIELDS
    if unknown:
        config.refuse("linear_attn_config", "has {}, which is not known", min(unknown))
    prefix = f"{config.prefix}linear_attn_config."
    own = attrs.evolve(config, fields=table, prefix=prefix, known=set())
    width = own.count("head_dim", config.count("linear_head_dim", 128))
    heads = own.count("num_heads", config.count("linear_num_heads", 32))
    kernel = own.count("short_conv_kernel_size", config.count("linear_conv_kernel_dim", 4))
    inner = heads * width
    matrices = {
        "q_proj": (hidden, inner),
        "k_proj": (hidden, inner),
        "v_proj": (hidden, inner),
        "f_a_proj": (hidden, width),
        "f_b_proj": (width, inner),
        "b_proj": (hidden, heads),
        "g_a_proj": (hidden, width),
        "g_b_proj": (width, inner),
        "o_proj": (inner, hidden),
    }
    state = _state(config, (kernel - 1) * 3 * inner, heads * width * width)
    return [Part("self_attn", matrices, 3 * inner * kernel + inner + heads + width, (state,))]


_KDA_FIELDS = named("head_dim num_heads short_conv_kernel_size full_attn_layers kda_layers")


def mamba_1(config: Config, _family: Family, _layer: Layer) -> list[Part]:
    """Build a Mamba 1 layer, whose step sizes, inputs and outputs have norms (Jamba)."""
    hidden = config.count("hidden_size")
    inner = config.count("mamba_expand", 2) * hidden
    numbers, kernel = config.count("mamba_d_state", 16), config.count("mamba_d_conv", 4)
    rank = config.get("mamba_dt_rank", "auto")
    rank = ceil(hidden / 16) if rank == "auto" else config.count("mamba_dt_rank")
    matrices = {
        "in_proj": (hidden, 2 * inner),
        "x_proj": (inner, rank + 2 * numbers),
        "dt_proj": (rank, inner),
        "out_proj": (inner, hidden),
    }
    vectors = inner * numbers + inner + inner * kernel + inner + rank + 2 * numbers
    vectors += inner * config.flag("mamba_conv_bias", default=True)
    vectors += _biased(matrices, "in_proj", "out_proj") * config.flag("mamba_proj_bias")
    state = _state(config, (kernel - 1) * inner, inner * numbers)
    return [Part("mamba", matrices, vectors, (state,))]


def mamba_2(config: Config, family: Family, _layer: Layer) -> list[Part]:
    """Build a Mamba 2 layer, with heads and groups."""
    hidden, heads = config.count("hidden_size"), config.count("mamba_n_heads")
    width = config.get("mamba_d_head", "auto")
    inner = config.get("mamba_d_ssm")
    expanded = config.count("mamba_expand", 2) * hidden
    inner = config.count("mamba_d_ssm") if inner is not None else expanded
    width = inner // heads if width == "auto" else config.count("mamba_d_head")
    inner = heads * width
    groups, numbers = config.count("mamba_n_groups", 1), config.count("mamba_d_state")
    kernel = config.count("mamba_d_conv", 4)
    mixed = inner + 2 * groups * numbers
    matrices = {"in_proj": (hidden, inner + mixed + heads), "out_proj": (inner, hidden)}
    vectors = 3 * heads + mixed * kernel
    vectors += mixed * config.flag("mamba_conv_bias", default=True)
    normed = config.flag("mamba_rms_norm") if family.mamba_norm is None else family.mamba_norm
    vectors += inner * normed
    vectors += matrices["in_proj"][1] * config.flag("mamba_proj_bias")
    vectors += hidden * config.flag("projectors_bias", default=config.flag("mamba_proj_bias"))
    state = _state(config, (kernel - 1) * mixed, heads * width * numbers)
    return [Part("mamba", matrices, vectors, (state,))]


def short_convolution(config: Config, _family: Family, _layer: Layer) -> list[Part]:
    """Build a gated short convolution (LFM2), which keeps its last inputs."""
    hidden, kernel = config.count("hidden_size"), config.count("conv_L_cache", 3)
    matrices = {"in_proj": (hidden, 3 * hidden), "out_proj": (hidden, hidden)}
    vectors = hidden * kernel
    vectors += (hidden + _biased(matrices, "in_proj", "out_proj")) * config.flag("conv_bias")
    state = LayerCache(kind="state", layers=1, state_bytes=(kernel - 1) * hidden * CONV_BYTES)
    return [Part("conv", matrices, vectors, (state,))]


def attention_and_mamba(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build attention and a Mamba 2 layer side by side (Falcon-H1)."""
    return [*attention(config, family, layer), *mamba_2(config, family, layer)]


def nothing(*_: Any) -> list[Part]:
    """Build no part: the layer has another one alone."""
    return []


# Feed-forward networks.


def mlp(hidden: int, width: int, *, gated: bool = True) -> Matrices:
    """Return the matrices of a feed-forward network of `width`."""
    up = {"up_proj": (hidden, width), "down_proj": (width, hidden)}
    return {"gate_proj": (hidden, width), **up} if gated else up


def feed_forward(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build the feed-forward network of a layer: dense, or experts with a router."""
    hidden, name = config.count("hidden_size"), family.mlp
    bias = config.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias

    def part(name: str, width: int, *, expert: bool = False, more: int = 0) -> Part:
        matrices = mlp(hidden, width, gated=family.gated)
        return Part(name, matrices, bias * _biased(matrices, *matrices) + more, expert=expert)

    routed = family.experts
    if routed is None or not layer.sparse:
        ratio = family.mlp_ratio
        width = config.count(family.width, ratio * hidden if ratio else None)
        return [part(name, width)]
    experts = config.count(routed.count)
    width = config.count(routed.width)
    # Layers that choose experts by the hash of a token have no bias for each.
    kinds, first = (
        config.of_layers("mlp_layer_types"),
        config.count("num_hash_layers", 0, least=0),
    )
    hashed = kinds[layer.index] == "hash_moe" if kinds else layer.index < first
    router = hidden * experts + experts * (routed.router_bias and not hashed)
    parts = [Part(f"{name}.gate", {}, router), part(f"{name}.experts.0", width, expert=True)]
    # As wide as so many experts together.
    if more := config.count(routed.shared, routed.shared_count, least=0):
        parts.append(part(f"{name}.shared_experts", width * more))
    if width := config.count("shared_expert_intermediate_size", 0, least=0):
        parts.append(part(f"{name}.shared_expert", width, more=hidden))
    return parts


def dense(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build the feed-forward network of a layer without experts."""
    return feed_forward(config, family, attrs.evolve(layer, sparse=False))


def beside(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build experts, if there are any, beside a dense network that all tokens take."""
    hidden = config.count("hidden_size")
    width = config.count("shared_intermediate_size", config.get(family.width))
    parts = [Part("shared_mlp", mlp(hidden, width))]
    if layer.sparse:
        parts += feed_forward(config, family, layer)
    return parts


# What single families have.


def nemotron_experts(config: Config, family: Family, _layer: Layer) -> list[Part]:
    """Build the experts of Nemotron-H, which may work in a narrower latent."""
    hidden, experts = config.count("hidden_size"), config.count("n_routed_experts")
    latent = config.get("moe_latent_size")
    inner = hidden if latent is None else config.count("moe_latent_size")
    matrices = mlp(inner, config.count("moe_intermediate_size"), gated=False)
    parts = [
        Part(
            "mixer.gate",
            {},
            hidden * experts + experts * bool(family.experts and family.experts.router_bias),
        ),
        Part("mixer.experts.0", matrices, expert=True),
    ]
    if shared := config.count("moe_shared_expert_intermediate_size", 0, least=0):
        count = config.count("n_shared_experts", 1)
        parts.append(Part("mixer.shared_experts", mlp(hidden, count * shared, gated=False)))
    if latent is not None:
        narrow = {"fc1_latent_proj": (hidden, inner), "fc2_latent_proj": (inner, hidden)}
        parts.append(Part("mixer", narrow))
    return parts


def nas_layer(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build a layer as its entry in `block_configs` says: parts may be narrower, or missing."""
    blocks = config.of_layers("block_configs")
    if not blocks:
        config.refuse("block_configs", "is missing")
    heads, ffn = (_nas_part(config, blocks[layer.index], *part) for part in _NAS_PARTS)
    hidden, parts = config.count("hidden_size"), list[Part]()
    if heads is not None:
        shared = max(1, config.count("num_attention_heads") // int(heads))
        parts += attention(config.having({"num_key_value_heads": shared}), family, layer)
    if ffn is not None:
        # Two thirds of so many hidden sizes, in whole 256.
        width = int(2 * ffn * hidden / 3)
        parts.append(Part("mlp", mlp(hidden, -(-width // 256) * 256)))
    norms = (heads is not None) + (ffn is not None)
    return [*parts, Part("", {}, norms * hidden)]


_NAS_PARTS = ("attention", "n_heads_in_group"), ("ffn", "ffn_mult")


def _nas_part(config: Config, block: Any, name: str, size: str) -> float | None:
    """Return the size of a part of a block; None if the block has no such part."""
    part = block.get(name) if isinstance(block, dict) else None
    if not isinstance(part, dict):
        config.refuse("block_configs", f"has a layer without {name!r}")
    if part.get("no_op") is True:
        return None
    value = part.get(size)
    kinds = int if size == "n_heads_in_group" else int | float
    if not isinstance(value, kinds) or not 0 < value <= MAX_WIDTH:
        config.refuse("block_configs", f"has {size} {{}} in a layer", value)
    odd = [key for key, other in part.items() if other and key not in (size, "no_op")]
    if odd:
        config.refuse("block_configs", "has {} in a layer, which is not known", odd[0])
    return float(value)


def gemma_4(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build the feed-forward networks of Gemma 4: a dense one, perhaps experts beside it."""
    hidden = config.count("hidden_size")
    width = config.count("intermediate_size")
    wide = config.flag("use_double_wide_mlp") and layer.shares
    parts = [Part("mlp", mlp(hidden, width * (2 if wide else 1)))]
    if config.flag("enable_moe_block"):
        experts = config.count("num_experts")
        # The router has a scale for each input and expert, and the experts three norms.
        router = hidden * experts + hidden + experts + 3 * hidden
        width = config.count("moe_intermediate_size")
        parts += [
            Part("router", {}, router),
            Part("experts.0", mlp(hidden, width), expert=True),
        ]
    return parts + per_layer_input(config, family, layer)


def gemma_3n(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build what a layer of Gemma 3n has beside attention: AltUp, LAuReL, inputs of its own."""
    hidden = config.count("hidden_size")
    width = config.by_layer("intermediate_size", layer.index)
    inputs, rank = config.count("altup_num_inputs", 4), config.count("laurel_rank", 64)
    altup = inputs**2 + inputs**3 + inputs * hidden + 2 * hidden
    laurel = {"linear_left": (hidden, rank), "linear_right": (rank, hidden)}
    return [
        Part("mlp", mlp(hidden, width)),
        Part("altup", {}, altup),
        Part("laurel", laurel, hidden),
        *per_layer_input(config, family, layer),
    ]


def per_layer_input(config: Config, _family: Family, _layer: Layer) -> list[Part]:
    """Build what adds an embedding of its own to a layer, if the model has them."""
    hidden, width = (
        config.count("hidden_size"),
        config.count("hidden_size_per_layer_input", 0, least=0),
    )
    if not width:
        return []
    matrices = {
        "per_layer_input_gate": (hidden, width),
        "per_layer_projection": (width, hidden),
    }
    return [Part("", matrices, hidden)]


def per_layer_embeddings(config: Config) -> int:
    """Return the parameters outside the layers for embeddings of each layer."""
    width = config.count("hidden_size_per_layer_input", 0, least=0)
    wide = width * config.count("num_hidden_layers")
    rows = config.count("vocab_size_per_layer_input", config.count("vocab_size"))
    return rows * wide + wide * config.count("hidden_size") + width if width else 0


def altup_embeddings(config: Config) -> int:
    """Return the parameters outside the layers of Gemma 3n."""
    inputs, hidden = config.count("altup_num_inputs", 4), config.count("hidden_size")
    return per_layer_embeddings(config) + 2 * (inputs - 1) * hidden**2


def hyper_connections(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build experts between residual streams that are mixed before and after each module."""
    streams, hidden = config.count("hc_mult"), config.count("hidden_size")
    mixes = (2 + streams) * streams
    one = mixes * streams * hidden + mixes + 3
    return [*feed_forward(config, family, layer), Part("", {}, 2 * one)]


def hyper_head(config: Config) -> int:
    """Return the parameters of the module that joins the residual streams."""
    streams, hidden = config.count("hc_mult"), config.count("hidden_size")
    return streams * streams * hidden + streams + 1


def lfm_feed_forward(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build the feed-forward network of LFM2, whose width is rounded up from two thirds."""
    width = config.count("intermediate_size")
    adjusts = config.flag("block_auto_adjust_ff_dim", default=True)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    multiple = config.count("block_multiple_of", 256)
    if not isinstance(factor, int | float) or not 0 < factor <= MAX_WIDTH:
        config.refuse("block_ffn_dim_multiplier", "is {}, and no factor", factor)
    if layer.sparse:
        return feed_forward(config, family, layer)
    if adjusts and not family.experts:
        width = int(factor * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return [Part("feed_forward", mlp(config.count("hidden_size"), width))]


def in_mixer(build: Build, config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build parts by `build`, whose module is called `mixer` (Nemotron-H)."""
    return [attrs.evolve(part, name="mixer") for part in build(config, family, layer)]
