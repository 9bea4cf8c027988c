"""What a Hugging Face config leaves unsaid: the habits of each `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Family:
    """What the models of one `model_type` have in common.

    Attributes:
        norms, final_norms: norm vectors of `hidden_size` in each layer, and after the last.
            A norm with a bias counts as two.
        qkv_bias, output_bias, mlp_bias: whether these have biases; None: the config says.
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
        full_every: one layer in so many has no window; 0: every layer has one.
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

FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(mla=True, experts="n_routed_experts"),
    "deepseek_v3": Family(mla=True, experts="n_routed_experts", router_bias=True),
    "gemma": Family(defaults=_TIED),
    "gemma2": Family(norms=4, windows=True, full_every=2, defaults=_TIED),
    "gemma3_text": Family(
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
    "gpt2": Family(
        norms=4,
        final_norms=2,
        gated=False,
        mlp_ratio=4,
        positions=True,
        defaults=_TIED | {"torch_dtype": "float32"},
        **_BIASED,
    ),
    "gpt_oss": Family(
        sinks=True,
        experts="num_local_experts",
        expert_width="intermediate_size",
        router_bias=True,
        windows=True,
        full_every=2,
        defaults={"torch_dtype": "bfloat16"},
        **_BIASED,
    ),
    "llama": Family(mlp_bias=None),
    "mistral": Family(windows=True),
    "mixtral": Family(
        experts="num_local_experts", expert_width="intermediate_size", windows=True
    ),
    "phi": Family(final_norms=2, gated=False, head_bias=True, **_BIASED),
    "phi3": Family(windows=True),
    "qwen2": Family(**_QWEN_2),
    "qwen2_moe": Family(experts="num_experts", **_QWEN_2),
    "qwen3": Family(qk_norm=True, windows=False),
    "qwen3_moe": Family(qk_norm=True, experts="num_experts", windows=False),
}
