"""Configs of the models of the catalogue, as their makers publish them but shorter."""

from __future__ import annotations

import json
from pathlib import Path

NUMBERS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)


def family(model_type, **more):
    """Return a function that builds configs of a family, from `NUMBERS` and other fields."""
    common = {"model_type": model_type, "torch_dtype": "bfloat16"}

    def config(*numbers, **extra):
        return {**common, **dict(zip(NUMBERS, numbers, strict=True)), **more, **extra}

    return config


LLAMA = family("llama", tie_word_embeddings=False)
LLAMA_2 = family("llama", torch_dtype="float16")
MISTRAL = family("mistral", sliding_window=None)
QWEN_2 = family("qwen2", use_sliding_window=False, sliding_window=131072, max_window_layers=28)
QWEN_3 = family("qwen3", head_dim=128, attention_bias=False, sliding_window=None)
QWEN_3_MOE = family(
    "qwen3_moe",
    head_dim=128,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    num_experts=128,
    num_experts_per_tok=8,
)
MIXTRAL = family("mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
GEMMA = family("gemma", head_dim=256)
GEMMA_2 = family("gemma2", head_dim=256, sliding_window=4096, max_position_embeddings=8192)
PHI_3 = family("phi3", attention_bias=False)
GPT_OSS = family(
    "gpt_oss",
    torch_dtype=None,
    head_dim=64,
    num_experts_per_tok=4,
    sliding_window=128,
    quantization_config={"quant_method": "mxfp4"},
)
MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
DEEPSEEK_V2 = family("deepseek_v2", **MLA, first_k_dense_replace=1, n_shared_experts=2)
DEEPSEEK_V3 = family(
    "deepseek_v3",
    **MLA,
    first_k_dense_replace=3,
    n_shared_experts=1,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)


def gpt2(layers, heads, hidden):
    """Return a config in GPT-2's own field names."""
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": hidden,
        "n_positions": 1024,
        "n_inner": None,
        "vocab_size": 50257,
    }


def gemma3(layers, hidden, width, **more):
    """Return a config as Gemma 3 has it: nested, without its usual values."""
    text = {
        "model_type": "gemma3_text",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "sliding_window": 1024,
        **more,
    }
    return {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}


CONFIGS = {
    "gpt2": gpt2(12, 12, 768),
    "gpt2-xl": gpt2(48, 25, 1600),
    "llama-2-7b": LLAMA_2(32, 32, 32, 4096, 11008, 32000),
    "llama-2-13b": LLAMA_2(40, 40, 40, 5120, 13824, 32000),
    "llama-2-70b": LLAMA_2(80, 64, 8, 8192, 28672, 32000),
    "llama-2-70b-mha": LLAMA_2(80, 64, None, 8192, 28672, 32000),
    "llama-3-8b": LLAMA(32, 32, 8, 4096, 14336, 128256),
    "llama-3-70b": LLAMA(80, 64, 8, 8192, 28672, 128256),
    "llama-3.1-8b": LLAMA(32, 32, 8, 4096, 14336, 128256),
    "llama-3.1-70b": LLAMA(80, 64, 8, 8192, 28672, 128256),
    "llama-3.1-405b": LLAMA(126, 128, 8, 16384, 53248, 128256),
    "llama-3.2-1b": LLAMA(16, 32, 8, 2048, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": LLAMA(
        28, 24, 8, 3072, 8192, 128256, head_dim=128, tie_word_embeddings=True
    ),
    "llama-3.3-70b": LLAMA(80, 64, 8, 8192, 28672, 128256),
    "mistral-7b-v0.1": MISTRAL(
        32, 32, 8, 4096, 14336, 32000, sliding_window=4096, max_position_embeddings=32768
    ),
    "mistral-7b": MISTRAL(32, 32, 8, 4096, 14336, 32000),
    "mistral-7b-v0.3": MISTRAL(32, 32, 8, 4096, 14336, 32768),
    "mistral-nemo-12b": MISTRAL(40, 32, 8, 5120, 14336, 131072, head_dim=128),
    "mistral-small-24b": MISTRAL(40, 32, 8, 5120, 32768, 131072, head_dim=128),
    "mixtral-8x7b": MIXTRAL(32, 32, 8, 4096, 14336, 32000),
    "mixtral-8x22b": MIXTRAL(56, 48, 8, 6144, 16384, 32000),
    "qwen2.5-0.5b": QWEN_2(24, 14, 2, 896, 4864, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": QWEN_2(28, 12, 2, 1536, 8960, 151936, tie_word_embeddings=True),
    "qwen2.5-3b": QWEN_2(36, 16, 2, 2048, 11008, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": QWEN_2(28, 28, 4, 3584, 18944, 152064),
    "qwen2.5-14b": QWEN_2(48, 40, 8, 5120, 13824, 152064),
    "qwen2.5-32b": QWEN_2(64, 40, 8, 5120, 27648, 152064),
    "qwen2.5-72b": QWEN_2(80, 64, 8, 8192, 29568, 152064),
    "qwen3-0.6b": QWEN_3(28, 16, 8, 1024, 3072, 151936, tie_word_embeddings=True),
    "qwen3-1.7b": QWEN_3(28, 16, 8, 2048, 6144, 151936, tie_word_embeddings=True),
    "qwen3-4b": QWEN_3(36, 32, 8, 2560, 9728, 151936, tie_word_embeddings=True),
    "qwen3-8b": QWEN_3(36, 32, 8, 4096, 12288, 151936),
    "qwen3-14b": QWEN_3(40, 40, 8, 5120, 17408, 151936),
    "qwen3-32b": QWEN_3(64, 64, 8, 5120, 25600, 151936),
    "qwen3-30b-a3b": QWEN_3_MOE(48, 32, 4, 2048, 6144, 151936, moe_intermediate_size=768),
    "qwen3-235b-a22b": QWEN_3_MOE(94, 64, 4, 4096, 12288, 151936, moe_intermediate_size=1536),
    "gemma-2b": GEMMA(18, 8, 1, 2048, 16384, 256000),
    "gemma-7b": GEMMA(28, 16, 16, 3072, 24576, 256000),
    "gemma-2-2b": GEMMA_2(26, 8, 4, 2304, 9216, 256000),
    "gemma-2-9b": GEMMA_2(42, 16, 8, 3584, 14336, 256000),
    "gemma-2-27b": GEMMA_2(46, 32, 16, 4608, 36864, 256000, head_dim=128),
    "gemma-3-1b": family("gemma3_text")(
        26,
        4,
        1,
        1152,
        6912,
        262144,
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
        max_position_embeddings=32768,
    ),
    "gemma-3-4b": gemma3(34, 2560, 10240),
    "gemma-3-12b": gemma3(48, 3840, 15360, num_attention_heads=16, num_key_value_heads=8),
    "gemma-3-27b": gemma3(
        62, 5376, 21504, num_attention_heads=32, num_key_value_heads=16, head_dim=128
    ),
    "phi-2": family("phi", torch_dtype="float16")(32, 32, None, 2560, 10240, 51200),
    "phi-3-mini-4k": PHI_3(
        32, 32, 32, 3072, 8192, 32064, sliding_window=2047, max_position_embeddings=4096
    ),
    "phi-3-medium-128k": PHI_3(
        40, 40, 10, 5120, 17920, 32064, sliding_window=131072, max_position_embeddings=131072
    ),
    "phi-4": PHI_3(40, 40, 10, 5120, 17920, 100352, sliding_window=None),
    "phi-4-mini": PHI_3(
        *(32, 24, 8, 3072, 8192, 200064),
        sliding_window=262144,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "gpt-oss-20b": GPT_OSS(
        *(24, 64, 8, 2880, 2880, 201088),
        num_local_experts=32,
        layer_types=["sliding_attention", "full_attention"] * 12,
    ),
    "gpt-oss-120b": GPT_OSS(36, 64, 8, 2880, 2880, 201088, num_local_experts=128),
    "deepseek-v2-lite": DEEPSEEK_V2(
        *(27, 16, 16, 2048, 10944, 102400),
        q_lora_rank=None,
        n_routed_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
    ),
    "deepseek-v2": DEEPSEEK_V2(
        *(60, 128, 128, 5120, 12288, 102400),
        q_lora_rank=1536,
        n_routed_experts=160,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
    ),
    "deepseek-v3": DEEPSEEK_V3(
        *(61, 128, 128, 7168, 18432, 129280),
        q_lora_rank=1536,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
    ),
}
CONFIGS["deepseek-r1"] = CONFIGS["deepseek-v3"]

MORE = Path(__file__).parents[1] / "data" / "model_configs.jsonl"
CONFIGS |= {
    row["name"]: row["config"] for row in map(json.loads, MORE.read_text().splitlines())
}
