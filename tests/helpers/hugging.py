"""Tiny random Hugging Face models, and paged caches for them."""

from contextlib import contextmanager
from copy import deepcopy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from kvcore import KVCache
from kvcore_engine.backend import TorchCPU
from kvcore_engine.generator._hf_model import cache_argument
from kvcore_engine.generator.hf_cache import PagedCache

torch.set_num_threads(1)

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-mixed": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, layer_types=MIXED
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "gemma3-mixed": Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=6, layer_types=MIXED
    ),
    "mixtral": MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    ),
    "gpt-oss": GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6,
        layer_types=MIXED, experts_implementation="eager",
    ),
    "phimoe-window": PhimoeConfig(
        **SIZES, sliding_window=5, num_local_experts=4, experts_implementation="eager"
    ),
    "qwen2-moe-mixed": Qwen2MoeConfig(
        **SIZES, use_sliding_window=True, sliding_window=4, layer_types=MIXED, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        experts_implementation="eager",
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=2, n_head=4,
        bos_token_id=1, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    ),
}  # fmt: skip

STATES = {
    "qwen3-next": Qwen3NextConfig(
        **SIZES, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "jamba": JambaConfig(
        **SIZES | {"num_hidden_layers": 4}, attn_layer_period=2, attn_layer_offset=1,
        num_experts=2, num_experts_per_tok=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_d_state=8, mamba_dt_rank=4, experts_implementation="eager",
    ),
    "nemotron-h": NemotronHConfig(
        **SIZES, head_dim=8, layers_block_type=["mamba", "attention", "mlp", "mamba"],
        ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=8, n_groups=2, chunk_size=8,
    ),
}  # fmt: skip
"""Models with layers that keep a state."""

LENGTHS = {
    "dynamic": LlamaConfig(
        **SIZES | {"max_position_embeddings": 64},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    ),
    "longrope": Phi3Config(
        **SIZES, original_max_position_embeddings=64, rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4, "original_max_position_embeddings": 64,
        },
    ),
}  # fmt: skip
"""Models whose rotary frequencies change beyond 64 tokens."""

HYBRIDS = (
    "mistral-window", "qwen2-mixed", "gemma3-mixed", "gpt-oss", "phimoe-window",
    "qwen2-moe-mixed", *STATES,
)  # fmt: skip


CACHE = cache_argument(LlamaForCausalLM)
"""The argument of a model that takes a cache, by the installed version of transformers."""


def tiny(family, seed=0, dtype=torch.float64):
    """Return a model of `family` with weights large enough to make varied texts."""
    torch.manual_seed(seed)
    # A model that a generator converts keeps its config, so each gets a copy.
    config = deepcopy((FAMILIES | STATES)[family])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.dim() > 1 else None
    return model


def prompt(length, seed=0):
    """Return a prompt of `length` random tokens without padding, `[1, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (1, length), generator=generator)


def padded(*lengths):
    """Return prompts of `lengths`, padded on the left, and their attention mask."""
    longest = max(lengths)
    ids = torch.zeros((len(lengths), longest), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = prompt(length, seed=row)
    return ids, (ids != 0).long()


@contextmanager
def longrope_fixed(model):
    """Give a model with `longrope` its long factors at all lengths, by its tables."""
    rotary = model.base_model.rotary_emb
    short = rotary.original_inv_freq
    rotary(torch.zeros(1), torch.tensor([[1000]]))
    rotary.original_inv_freq = rotary.long_inv_freq
    yield
    rotary.original_inv_freq = short


class Poisoned(TorchCPU):
    """A pool that is NaN until tokens are stored, so that wrong reads show."""

    def allocate(self, layout):
        """Allocate the pool and fill it with NaN."""
        super().allocate(layout)
        self.fill(float("nan"))


def paged_cache(blocks=64, block_size=4):
    """Return a paged cache whose blocks are NaN at first."""
    return PagedCache(KVCache(blocks, block_size, ids=True), Poisoned())
