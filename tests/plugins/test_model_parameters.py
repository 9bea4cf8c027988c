"""Parameters of models equal those of their classes in transformers, made without memory."""

from __future__ import annotations

import copy
import json

import pytest
from helpers.model_configs import CONFIGS

from kvcore.models.catalogue import MODELS
from kvcore_plugins.models.families import FAMILIES
from kvcore_plugins.models.huggingface import model_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

SAME_CLASS = {"kimi_k2": "deepseek_v3"}
"""Types that transformers reads as another one."""

FLAT = ["qwen2_5_vl", "qwen2_vl"]
"""Types whose config may have the fields of the language model beside `vision_config`."""

NO_CLASS = {"mimo", "nemotron-nas"}

HALF = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}

VARIANTS = [
    ("bamba", {"attn_layer_indices": [3, 7]}),
    ("deepseek_v2", {"n_routed_experts": 8, "num_experts_per_tok": 2}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v32", {}),
    ("deepseek_v4", {}),
    ("falcon_h1", {}),
    ("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True, "attention_bias": True}),
    ("falcon_h1", {"mamba_proj_bias": True, "mlp_bias": True, "mamba_d_ssm": None}),
    ("gemma3n_text", {}),
    ("gemma3n_text", {"num_kv_shared_layers": 0, "altup_correct_scale": False}),
    ("gemma4_text", {}),
    ("gemma4_text", {"num_kv_shared_layers": 10, "use_double_wide_mlp": True}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    ("gemma4_text", {"attention_k_eq_v": True, "max_position_embeddings": 512}),
    ("gemma4_text", {"attention_bias": True, "hidden_size_per_layer_input": 0}),
    ("glm4_moe", {"head_dim": 128, "use_qk_norm": True}),
    ("glm4_moe_lite", {}),
    ("granitemoehybrid", HALF),
    ("granitemoehybrid", HALF | {"mamba_proj_bias": True, "attention_bias": True}),
    ("granitemoehybrid", HALF | {"num_local_experts": 0}),
    ("hunyuan_v1_dense", {"head_dim": 128}),
    ("hunyuan_v1_moe", {"head_dim": 128, "num_experts": 8, "moe_topk": 2}),
    ("jamba", {"mamba_proj_bias": True}),
    ("jamba", {"num_experts": 1}),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 16, "conv_bias": True}),
    ("lfm2", {"block_ffn_dim_multiplier": 1.3}),
    ("lfm2", {"block_auto_adjust_ff_dim": False}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 16}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("ministral", {"head_dim": 128}),
    ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp", "moe"]}),
    ("nemotron_h", {"layers_block_type": ["mamba", "attention"], "use_bias": True}),
    ("qwen2_5_vl_text", {}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("qwen2_vl_text", {}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_5_text", {}),
    ("qwen3_next", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
]


def counted(config):
    """Return the parameters of the class of a config, on the device `meta`.

    Biases by which routers choose experts are buffers there. A class without an output layer
    has one here, as its causal model does.
    """
    with torch.device("meta"):
        try:
            model = transformers.AutoModelForCausalLM.from_config(config)
            head = 0
        except ValueError:
            model = transformers.AutoModel.from_config(config)
            tied = getattr(config, "tie_word_embeddings", False)
            head = 0 if tied else config.vocab_size * config.hidden_size
    biases = ("e_score_correction_bias", "expert_bias")
    buffers = (b.numel() for name, b in model.named_buffers() if name.endswith(biases))
    return head + sum(p.numel() for p in model.parameters()) + sum(buffers)


def made(fields):
    """Return the config of transformers for the fields of the language model of a config."""
    fields = copy.deepcopy(fields)
    text = fields.get("text_config", fields)
    shared = {"tie_word_embeddings": fields.get("tie_word_embeddings", False)}
    fields = (shared if "tie_word_embeddings" in fields else {}) | text
    fields.pop("quantization_config", None)
    kind = fields.pop("model_type")
    return transformers.CONFIG_MAPPING[SAME_CLASS.get(kind, kind)](**fields)


def key(name):
    """Return what the parameters of a model follow from."""
    return json.dumps(CONFIGS[name], sort_keys=True)


DISTINCT = sorted({key(name): name for name in CONFIGS}.values())


def kind_of(name):
    """Return the type of the language model of a config."""
    fields = CONFIGS[name]
    return fields.get("text_config", fields)["model_type"]


@pytest.mark.parametrize("name", [name for name in DISTINCT if kind_of(name) not in NO_CLASS])
def test_a_model_of_the_catalogue_has_the_parameters_of_its_class(name):
    """The class in transformers has as many parameters as the row of the catalogue."""
    assert counted(made(CONFIGS[name])) == MODELS[name].parameters


@pytest.mark.parametrize(("kind", "fields"), VARIANTS)
def test_each_option_of_a_family_changes_the_parameters_as_in_its_class(kind, fields):
    """With other options the class in transformers has as many parameters as the reader."""
    config = transformers.CONFIG_MAPPING[kind](**copy.deepcopy(fields))
    written = {**config.to_dict(), "model_type": kind, "dtype": "bfloat16"}
    assert model_of(written, kind, kind).parameters == counted(config)


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("gemma4_text", None),
        ("gemma4_text", ["sliding_attention"] * 7),
        ("glm4_moe_lite", None),
        ("glm_moe_dsa", None),
    ],
)
def test_types_of_layers_are_those_of_the_class(kind, types):
    """Types that a config leaves out, or that cannot be, are those that its class gives."""
    named = {} if types is None else {"layer_types": [*types]}
    config = transformers.CONFIG_MAPPING[kind](num_hidden_layers=7, **named)
    written = {**config.to_dict(), "model_type": kind, "dtype": "bfloat16"}
    written |= {"layer_types": types, "mlp_layer_types": None}
    model = model_of(written, kind, kind)
    assert model.parameters == counted(config)
    sliding = sum(cache.layers for cache in model.layer_caches if cache.window is not None)
    assert sliding == (getattr(config, "layer_types", None) or []).count("sliding_attention")


@pytest.mark.parametrize("kind", FLAT)
def test_the_fields_of_a_text_model_may_stand_beside_its_vision_tower(kind):
    """A config without `text_config` is one of the language model, as its class reads it."""
    text = transformers.CONFIG_MAPPING[f"{kind}_text"](num_hidden_layers=3).to_dict()
    towers = transformers.CONFIG_MAPPING[kind]().to_dict()
    fields = {**towers, **text, "model_type": kind, "dtype": "bfloat16"}
    del fields["text_config"]
    assert fields["vision_config"]
    config = transformers.CONFIG_MAPPING[kind](**copy.deepcopy(fields)).text_config
    model = model_of(fields, kind, kind)
    assert model.parameters == counted(config)
    assert (model.layers, model.kv_heads) == (3, config.num_key_value_heads)


def test_each_family_of_transformers_is_compared():
    """A family without a class in transformers is named here, any other one is compared."""
    compared = {kind for kind, _ in VARIANTS} | set(map(kind_of, DISTINCT)) | set(FLAT)
    left = set(FAMILIES) - compared - NO_CLASS
    assert left <= SAME_CLASS.keys() | {"granitemoehybrid"}
    assert all(kind not in transformers.CONFIG_MAPPING for kind in NO_CLASS)
