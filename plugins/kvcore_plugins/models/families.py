"""The families of models: by `model_type`, what all models of it have in common.

To add one, give the few properties by which it differs from Llama; a field of its config that
changes neither K/V nor parameters goes to `HARMLESS`. A test compares its parameters to those
of the class in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from kvcore_plugins.models import parts
from kvcore_plugins.models.config import Config
from kvcore_plugins.models.family import Experts, Family, Layer, Part, Window
from kvcore_plugins.models.harmless import named
from kvcore_plugins.models.parts import attention

# Types of layers, where `layer_types` does not list them.


def _all(kind: str, config: Config) -> list[str]:
    return [kind] * config.count("num_hidden_layers")


def _listed(field: str, other: str, missing: str, config: Config) -> list[str]:
    """Return full attention for the layers listed in `field`; without a list all `missing`."""
    if config.get(field) is None:
        return _all(missing, config)
    full, layers = config.indices(field), range(config.count("num_hidden_layers"))
    return ["full_attention" if i in full else other for i in layers]


def _qwen_next(config: Config) -> list[str]:
    every = config.count("full_attention_interval", 4)
    layers = range(1, config.count("num_hidden_layers") + 1)
    return ["full_attention" if i % every == 0 else "linear_attention" for i in layers]


def _jamba(config: Config) -> list[str]:
    period = config.count("attn_layer_period", 8)
    offset = config.count("attn_layer_offset", 4, least=0)
    layers = range(config.count("num_hidden_layers"))
    return ["full_attention" if i % period == offset else "linear_attention" for i in layers]


def _kimi(config: Config) -> list[str]:
    """Return the types of the layers that `linear_attn_config` lists, from 1 on."""
    full = config.table("linear_attn_config").get("full_attn_layers")
    layers = config.count("num_hidden_layers")
    if not isinstance(full, list):
        config.refuse("linear_attn_config", "does not list its 'full_attn_layers'")
    full = config.indices("linear_attn_config", full, first=1)
    return ["full_attention" if i in full else "linear_attention" for i in range(1, layers + 1)]


_NEMOTRON = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def _nemotron(config: Config) -> list[str]:
    pattern = str(config.get("hybrid_override_pattern", ""))
    if not pattern or set(pattern) - _NEMOTRON.keys():
        config.refuse("hybrid_override_pattern", "is {}, not of M, *, E and -", pattern)
    return [_NEMOTRON[letter] for letter in pattern]


_COMPRESSED = {ratio: kind for kind, ratio in parts.RATIOS.items()} | {0: "sliding_attention"}


def _deepseek_v4(config: Config) -> list[str]:
    """Return the types of layers by the ratio of each; those of further layers are left out."""
    ratios = config.items("compress_ratios")[: config.count("num_hidden_layers")]
    if not ratios or any(
        type(ratio) is not int or ratio not in _COMPRESSED for ratio in ratios
    ):
        config.refuse("compress_ratios", "must have 0, 4 or 128 for each layer")
    return [_COMPRESSED[ratio] for ratio in ratios]


def _minimax(config: Config) -> list[str]:
    """Return the types of layers by `attn_type_list`, in which 1 is full attention."""
    kinds = config.items("attn_type_list") or [1] * config.count("num_hidden_layers")
    return ["full_attention" if kind == 1 else str(kind) for kind in kinds]


def _mimo(config: Config) -> list[str]:
    kinds = {"0": "full_attention", "1": "sliding_attention"}
    pattern = map(str, config.of_layers("hybrid_layer_pattern"))
    return [kinds.get(pattern_kind, pattern_kind) for pattern_kind in pattern]


_MIMO_NAMES = {
    "num_attention_heads": "swa_num_attention_heads",
    "num_key_value_heads": "swa_num_key_value_heads",
    "head_dim": "swa_head_dim",
    "v_head_dim": "swa_v_head_dim",
}


def _mimo_window(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build attention in a window by fields of its own, none of them left out."""
    for own in _MIMO_NAMES.values():
        config.count(own)
    return attention(attrs.evolve(config, names={**config.names, **_MIMO_NAMES}), family, layer)


def _global_heads(config: Config, family: Family, layer: Layer) -> list[Part]:
    """Build attention of Gemma 4, whose full layers have heads of their own."""
    heads = config.get("num_global_key_value_heads")
    fields: dict[str, Any] = {"head_dim": config.count("global_head_dim", 512)}
    if config.flag("attention_k_eq_v") and heads is not None:
        fields["num_key_value_heads"] = heads
    if not config.table("per_layer_config"):
        config = config.having(fields)
    return attention(config, family, layer)


_BIASED: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}

_TIED = {"tie_word_embeddings": True}

_MLA: dict[str, Any] = {
    "mla": True,
    "mixers": {"full_attention": parts.latent_attention},
    "known": named("head_dim qk_head_dim num_key_value_heads"),
}

_DEEPSEEK_V3 = Family(experts=Experts("n_routed_experts", router_bias=True), **_MLA)

_INDEXED = attrs.evolve(
    _DEEPSEEK_V3,
    mla="indexed",
    by_index=True,
    mixers=dict.fromkeys(
        ("full_attention", "indexed_attention", "deepseek_sparse_attention"),
        parts.latent_attention,
    ),
    known=named(
        "head_dim qk_head_dim num_key_value_heads index_share_for_mtp_iteration",
        "indexer_rope_interleave",
    ),
)

_QWEN_2: dict[str, Any] = {
    "qkv_bias": True,
    "output_bias": False,
    "window": Window(by_default=False),
    "only": {"qkv_bias": True},
    "known": named("sliding_window max_window_layers decoder_sparse_step"),
}

# A config of these has the fields of the language model beside those of the vision tower.
_QWEN_2_VL = _QWEN_2 | {"known": _QWEN_2["known"] | {"vision_config"}}

_QWEN_3: dict[str, Any] = {
    "qk_norm": True,
    "window": Window(by_default=False),
    "only": {"use_qk_norm": True},
    "known": named("sliding_window max_window_layers decoder_sparse_step"),
}

_QWEN_NEXT: dict[str, Any] = {
    "mixers": {"full_attention": attention, "linear_attention": parts.gated_delta_net},
    "kinds": _qwen_next,
    "qk_norm": True,
    "gate": "each",
    "only": {"attn_output_gate": True},
    "known": named("decoder_sparse_step full_attention_interval"),
}

_GEMMA_3: dict[str, Any] = {"norms": 4, "qk_norm": True}

_PATTERN = named("sliding_window_pattern _sliding_window_pattern")

_MAMBA_NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}

_HUNYUAN: dict[str, Any] = {"qk_norm": True, "only": {"use_qk_norm": True, "use_cla": False}}

_LFM_2: dict[str, Any] = {
    "mixers": {"full_attention": attention, "conv": parts.short_convolution},
    "kinds": partial(_listed, "full_attn_idxs", "conv", "full_attention"),
    "qk_norm": True,
    "qkv_bias": False,
    "output_bias": False,
    "mlp": "feed_forward",
    "network": parts.lfm_feed_forward,
    "names": {"intermediate_size": "block_ff_dim"},
    "defaults": _TIED,
    "only": {"use_expert_bias": True, "block_use_swiglu": True},
    "known": named(
        "block_dim conv_L_cache conv_dim conv_dim_out full_attn_idxs conv_use_xavier_init",
        "block_mlp_init_scale block_out_init_scale block_use_xavier_init block_norm_eps",
        "num_heads use_pos_enc",
    ),
}


FAMILIES: Mapping[str, Family] = {
    "bamba": Family(
        mixers={"full_attention": attention, "linear_attention": parts.mamba_2},
        kinds=partial(_listed, "attn_layer_indices", "linear_attention", "linear_attention"),
        mlp="feed_forward",
        mlp_bias=None,
        known=named("attn_rotary_emb z_loss_coefficient"),
    ),
    "deepseek_v2": Family(experts=Experts("n_routed_experts"), **_MLA),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": Family(
        by_index=True,
        mixers=dict.fromkeys(("sliding_attention", *parts.RATIOS), parts.compressed_attention),
        kinds=_deepseek_v4,
        network=parts.hyper_connections,
        outside=parts.hyper_head,
        experts=Experts("n_routed_experts", router_bias=True),
        only={
            "num_key_value_heads": 1,
            "attention_bias": False,
            "mlp_bias": False,
            "compress_rates": dict(parts.RATIOS),
        },
        known=named(
            "compress_ratios compress_rope_theta hc_eps hc_sinkhorn_iters sliding_window",
            "qk_rope_head_dim",
        ),
    ),
    "falcon_h1": Family(
        mixers={"hybrid": parts.attention_and_mamba},
        kinds=partial(_all, "hybrid"),
        mlp="feed_forward",
        mlp_bias=None,
        mamba_norm=None,
        defaults={"projectors_bias": False},
        known=named(
            "mamba_use_mlp mlp_expansion_factor mamba_norm_before_gate lm_head_multiplier",
            "mlp_multipliers key_multiplier attention_out_multiplier ssm_multipliers",
            "attention_in_multiplier ssm_in_multiplier ssm_out_multiplier",
        ),
    ),
    "gemma": Family(defaults=_TIED),
    "gemma2": Family(
        norms=4,
        window=Window(full_every=2),
        defaults=_TIED | {"sliding_window": 4096},
        # It stands beside `sliding_window`, which alone is read by the class.
        known=named("sliding_window_size"),
    ),
    "gemma3_text": Family(
        **_GEMMA_3,
        window=Window(full_every=6),
        known=_PATTERN,
        defaults=_TIED
        | {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
    ),
    "gemma3n_text": Family(
        shares=True,
        by_index=True,
        **_GEMMA_3,
        window=Window(full_every=5),
        network=parts.gemma_3n,
        outside=parts.altup_embeddings,
        defaults=_TIED | {"num_kv_shared_layers": 15, "sliding_window": 512},
    ),
    "gemma4_text": Family(
        shares=True,
        experts=Experts("num_experts", optional=True),
        **_GEMMA_3,
        window=Window(full_every=6, full_last=True),
        mixers={"full_attention": _global_heads, "sliding_attention": attention},
        one_projection="full_attention",
        network=parts.gemma_4,
        outside=parts.per_layer_embeddings,
        defaults=_TIED | {"hidden_size_per_layer_input": 256, "sliding_window": 512},
        only={"use_bidirectional_attention": "vision"},
        known=named("moe_intermediate_size top_k_experts"),
    ),
    "glm4_moe": Family(
        output_bias=False,
        qk_norm=None,
        experts=Experts("n_routed_experts", router_bias=True),
    ),
    "glm4_moe_lite": attrs.evolve(_DEEPSEEK_V3, defaults={"first_k_dense_replace": 1}),
    "glm_moe_dsa": _INDEXED,
    "gpt2": Family(
        norms=4,
        final_norms=2,
        gated=False,
        mlp_ratio=4,
        positions=True,
        defaults=_TIED | {"torch_dtype": "float32"},
        known=named("n_ctx reorder_and_upcast_attn scale_attn_by_inverse_layer_idx"),
        **_BIASED,
    ),
    "gpt_oss": Family(
        sinks=True,
        experts=Experts("num_local_experts", width="intermediate_size", router_bias=True),
        window=Window(full_every=2),
        defaults={"torch_dtype": "bfloat16"},
        known=named("experts_per_token initial_context_length"),
        **_BIASED,
    ),
    "granitemoehybrid": Family(
        experts=Experts("num_local_experts", width="intermediate_size", optional=True),
        mixers={"full_attention": attention, "linear_attention": parts.mamba_2},
        kinds=partial(_all, "linear_attention"),
        network=parts.beside,
        mlp="block_sparse_moe",
        known=named("normalization_function num_experts_per_tok"),
    ),
    "hunyuan_v1_dense": Family(**_HUNYUAN),
    "hunyuan_v1_moe": Family(
        **_HUNYUAN | {"only": _HUNYUAN["only"] | {"num_shared_expert": 1}},
        network=parts.beside,
        experts=Experts("num_experts", width="intermediate_size"),
        known=named("moe_intermediate_size"),
    ),
    "jamba": Family(
        experts=Experts("num_experts", width="intermediate_size", optional=True),
        mixers={"full_attention": attention, "linear_attention": parts.mamba_1},
        kinds=_jamba,
        mlp="feed_forward",
        known=named(
            "expert_layer_period expert_layer_offset num_experts_per_tok",
            "use_associative_scan use_mambapy",
        ),
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_linear": Family(
        **_MLA
        | {
            "mixers": {
                "full_attention": parts.latent_attention,
                "linear_attention": parts.delta_attention,
            },
        },
        experts=Experts("num_experts", shared="num_shared_experts", router_bias=True),
        kinds=_kimi,
        names={"num_experts": "num_local_experts", "num_shared_experts": "n_shared_experts"},
        only={"mla_use_nope": True},
    ),
    "lfm2": Family(**_LFM_2),
    "lfm2_moe": Family(experts=Experts("num_experts", router_bias=True), **_LFM_2),
    "llama": Family(mlp_bias=None),
    "llama4_text": Family(
        mlp="feed_forward",
        width="intermediate_size_mlp",
        experts=Experts("num_local_experts", width="intermediate_size", shared_count=1),
        window=Window(field="attention_chunk_size", full_every=4),
        # Norms of queries and keys have no parameters.
        known=named("use_qk_norm no_rope_layers no_rope_layer_interval for_llm_compressor"),
    ),
    "minimax_m2": Family(
        qk_norm="all",
        mlp="block_sparse_moe",
        experts=Experts("num_local_experts", width="intermediate_size", router_bias=True),
        kinds=_minimax,
        only={"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True},
        known=named("num_mtp_modules mtp_transformer_layers use_mtp"),
    ),
    "mimo": Family(**_QWEN_2),
    "mimo_v2_flash": Family(
        mixers={"full_attention": attention, "sliding_attention": _mimo_window},
        kinds=_mimo,
        window=Window(),
        value_width=True,
        sinks=("sliding_attention",),
        experts=Experts("n_routed_experts", router_bias=True),
        only={"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
        known=named(
            "sliding_window_size attention_chunk_size attention_value_scale swa_rope_theta"
        ),
    ),
    "ministral": Family(window=Window()),
    "ministral3": Family(window=Window()),
    "mistral": Family(window=Window()),
    "mixtral": Family(
        mlp="block_sparse_moe",
        experts=Experts("num_local_experts", width="intermediate_size"),
        window=Window(),
    ),
    "nemotron-nas": Family(
        by_index=True,
        norms=0,
        mixers={"full_attention": parts.nas_layer},
        network=parts.nothing,
        mlp_bias=None,
        known=named("num_key_value_heads"),
    ),
    "nemotron_h": Family(
        experts=Experts("n_routed_experts", optional=True, router_bias=True),
        norms=1,
        mixers={
            "full_attention": partial(parts.in_mixer, attention),
            "linear_attention": partial(parts.in_mixer, parts.mamba_2),
            "mlp": partial(parts.in_mixer, parts.dense),
            "moe": parts.nemotron_experts,
        },
        kinds=_nemotron,
        network=parts.nothing,
        mlp_bias=None,
        gated=False,
        names=_MAMBA_NAMES,
        only={"sliding_window": None, "mlp_bias": False},
        known=named(
            "moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok",
            "moe_shared_expert_intermediate_size hybrid_override_pattern time_step_rank",
            "moe_shared_expert_overlap mamba_proj_bias moe_latent_size",
        ),
    ),
    "phi": Family(final_norms=2, gated=False, head_bias=True, **_BIASED),
    "phi3": Family(
        window=Window(), only={"full_attn_mod": 1}, known=named("interpolate_factor")
    ),
    "qwen2": Family(**_QWEN_2),
    "qwen2_5_vl": Family(**_QWEN_2_VL),
    "qwen2_5_vl_text": Family(**_QWEN_2),
    "qwen2_moe": Family(experts=Experts("num_experts"), **_QWEN_2),
    "qwen2_vl": Family(**_QWEN_2_VL),
    "qwen2_vl_text": Family(**_QWEN_2),
    "qwen3": Family(**_QWEN_3),
    "qwen3_5_moe_text": Family(**_QWEN_NEXT, experts=Experts("num_experts")),
    "qwen3_5_text": Family(**_QWEN_NEXT),
    "qwen3_moe": Family(**_QWEN_3, experts=Experts("num_experts")),
    "qwen3_next": Family(**_QWEN_NEXT, experts=Experts("num_experts")),
    "qwen3_vl_moe_text": Family(**_QWEN_3, experts=Experts("num_experts")),
    "qwen3_vl_text": Family(**_QWEN_3),
}
