"""Bytes of quantised weights, by hand for the shape of Llama 3.1 8B, and of checkpoints."""

from __future__ import annotations

import json

import pytest
from helpers.configs import LLAMA_3_8B as LLAMA
from helpers.model_configs import CONFIGS

from kvcore.errors import InputError
from kvcore.models.catalogue import find_model
from kvcore_plugins.models.huggingface import read_config

LAYERS = 32
MATRICES = {
    "q_proj": (4096, 4096),
    "k_proj": (4096, 1024),
    "v_proj": (4096, 1024),
    "o_proj": (4096, 4096),
    "gate_proj": (4096, 14336),
    "up_proj": (4096, 14336),
    "down_proj": (14336, 4096),
}
INPUTS = LAYERS * sum(inputs for inputs, _ in MATRICES.values())
OUTPUTS = LAYERS * sum(outputs for _, outputs in MATRICES.values())
LINEAR = LAYERS * sum(inputs * outputs for inputs, outputs in MATRICES.values())
HEAD = 128256 * 4096
KEPT = 2 * (2 * HEAD + 4096 * (2 * LAYERS + 1))
"""Bytes of embeddings, output layer and norms in bf16."""

LAYER = LINEAR // LAYERS
ATTENTION = 2 * 4096 * (4096 + 1024)
DOWN = 14336 * 4096


def by_groups(weights, **more):
    """Return a config of compressed-tensors with one group for all matrices."""
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def gptq(bits=4, group_size=128, **more):
    """Return a config of GPTQ."""
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


def awq(group_size=128, **more):
    """Return a config of AWQ in 4 bits."""
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, **more}


def fp8(**more):
    """Return a config of fp8."""
    return {"quant_method": "fp8", **more}


def bnb(bits, **more):
    """Return a config of bitsandbytes."""
    return {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True, **more}


INT4 = {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
TWO_GROUPS = {
    "group_0": {"targets": ["Linear"], "weights": FP8 | {"strategy": "tensor"}},
    "group_1": {"targets": "re:.*mlp.*", "weights": {"type": "int"} | INT4},
}
GPTQ = 1 / 2 + 2.5 / 128
"""Bytes of a weight in 4 bits with a scale and a zero for each group of 128."""
MLP = [["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]
MLP_INPUTS = 2 * 4096 + 14336

# Each row: a config, and the bytes of what it quantises, by hand.
QUANTISED = {
    "gptq": (gptq(), LINEAR * GPTQ + 4 * INPUTS),
    "gptq, no groups": (gptq(8, -1), LINEAR + 3 * OUTPUTS + 4 * INPUTS),
    "gptq, output layer": (
        gptq(lm_head=True), (LINEAR + HEAD) * GPTQ + 4 * (INPUTS + 4096) - 2 * HEAD,
    ),
    **{
        f"gptq, mlp alone, in a {type(mlp).__name__}": (
            gptq(modules_in_block_to_quantize=mlp),
            LAYERS * (2 * ATTENTION + 3 * DOWN * GPTQ + 4 * MLP_INPUTS),
        )
        for mlp in (MLP, "mlp")
    },
    "gptq, dynamic": (
        gptq(dynamic={r"-:.*attn.*": {}, r"+:.*\.down_proj": {"bits": 8}}),
        LAYERS * (2 * ATTENTION + 2 * DOWN * GPTQ + DOWN * (1 + 3 / 128) + 4 * MLP_INPUTS),
    ),
    "awq": (awq(zero_point=True), LINEAR * GPTQ),
    **{
        f"awq, a layer kept, in a {type(kept).__name__}": (
            awq(64, modules_to_not_convert=kept),
            (LINEAR - LAYER) * (1 / 2 + 2.5 / 64) + 2 * LAYER,
        )
        for kept in (["model.layers.3."], "model.layers.3.")
    },
    "auto-round": (gptq() | {"quant_method": "auto-round", "sym": True}, LINEAR * GPTQ),
    "compressed-tensors": (by_groups(INT4), LINEAR / 2 + LINEAR / 128 * 2),
    "compressed-tensors, zeros": (
        by_groups(INT4 | {"symmetric": False, "group_size": 32}),
        LINEAR / 2 + LINEAR / 32 * 2.5,
    ),
    "compressed-tensors, int8": (
        by_groups({"num_bits": 8, "strategy": "channel"}), LINEAR + 2 * OUTPUTS,
    ),
    "compressed-tensors, fp8": (by_groups(FP8 | {"strategy": "channel"}), LINEAR + 4 * OUTPUTS),
    "compressed-tensors, fp8 blocks": (
        by_groups(FP8 | {"strategy": "block", "block_structure": [128, 128]}),
        LINEAR + 4 * LINEAR / 128**2,
    ),
    "compressed-tensors, patterns": (
        by_groups(INT4, ignore=["lm_head", "re:.*down_proj"]),
        (LINEAR - LAYERS * DOWN) * (1 / 2 + 2 / 128) + 2 * LAYERS * DOWN,
    ),
    "compressed-tensors, nothing ignored": (
        by_groups(INT4, ignore=[]), (LINEAR + HEAD) * (1 / 2 + 2 / 128) - 2 * HEAD,
    ),
    "compressed-tensors, two groups": (
        by_groups({}, config_groups=TWO_GROUPS),
        LAYERS * (ATTENTION + 4 * 4 + 3 * DOWN * (1 / 2 + 2 / 128)),
    ),
    "fp8 blocks": (fp8(weight_block_size=[128, 128]), LINEAR + 4 * LINEAR / 128**2),
    "fp8, excluded": (
        fp8(modules_to_not_convert=["lm_head", "model.layers.0", "model.layers.31.mlp"]),
        LINEAR + LAYER + 3 * DOWN + 4 * (7 * 30 + 4),
    ),
    "fp8, ignored layers": (
        fp8(ignored_layers=[f"model.layers.{n}.self_attn.qkv_proj" for n in range(LAYERS)]),
        LINEAR + LAYERS * 4096 * 6144 + 4 * 4 * LAYERS,
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", "self_attn"]},
        LAYERS * (3 * DOWN + 2 * ATTENTION + 4 * (2 * 14336 + 4096)),
    ),
    "bitsandbytes": (bnb(4), LINEAR / 2 + LINEAR / 64 * 4),
    "bitsandbytes, scales quantised": (
        bnb(4, bnb_4bit_use_double_quant=True), LINEAR / 2 + LINEAR / 64 * (1 + 4 / 256),
    ),
    "bitsandbytes, 8 bits": (bnb(8), LINEAR + 4 * OUTPUTS),
    "bitsandbytes, skipped": (
        bnb(8, llm_int8_skip_modules=["lm_head", "o_proj"]),
        LINEAR + LAYERS * 4096**2 + 4 * (OUTPUTS - LAYERS * 4096),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, LINEAR + 4 * 7 * LAYERS),
    "modelopt, 4 bits": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        LINEAR / 2 + LINEAR / 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "quantised"), QUANTISED.values(), ids=QUANTISED)
def test_weights_have_their_scales_and_what_is_not_quantised(read_model, config, quantised):
    """Quantised matrices take codes and scales; all else takes two bytes a number."""
    model = read_model(LLAMA | {"quantization_config": config})
    assert model.weight_bytes == KEPT + quantised
    assert model.parameters == 8_030_261_248


@pytest.mark.parametrize(("group", "dtype"), [(16, "nvfp4"), (32, "mxfp4")])
def test_weights_in_fp4_are_told_apart_by_their_scales(read_model, group, dtype):
    """Groups of 16 weights in fp4 are NVFP4, of 32 MXFP4; both have scales of 8 bits."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": group}
    model = read_model(LLAMA | {"quantization_config": by_groups(weights)})
    assert model.dtype == dtype
    assert model.weight_bytes == KEPT + LINEAR / 2 + LINEAR / group


@pytest.mark.parametrize(
    ("config", "gigabytes"),
    [
        ("gptq", 5.73),
        ("awq", 5.73),
        ("fp8 blocks", 9.08),
        ("bitsandbytes, scales quantised", 5.7),
    ],
)
def test_weights_are_the_size_of_published_checkpoints(read_model, config, gigabytes):
    """Llama 3.1 8B takes as many bytes as its published quantised checkpoints."""
    model = read_model(LLAMA | {"quantization_config": QUANTISED[config][0]})
    assert model.weight_bytes / 1e9 == pytest.approx(gigabytes, abs=0.005)


KIMI_IGNORE = [
    *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]
EXPERTS = {
    "kimi-k2": (by_groups(INT4 | {"group_size": 32}, ignore=KIMI_IGNORE), 594.2),
    "qwen3-30b-a3b": (
        fp8(
            weight_block_size=[128, 128],
            modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"],
        ),
        31.17,
    ),
    "mixtral-8x7b": (awq(modules_to_not_convert=["gate"]), 24.65),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_the_size_of_published_checkpoints(read_model, name):
    """Models with quantised experts take as many bytes as their published checkpoints."""
    config, gigabytes = EXPERTS[name]
    model = read_model(CONFIGS[name] | {"quantization_config": config})
    assert model.weight_bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)


@pytest.mark.parametrize(
    ("name", "size"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)]
)
def test_gpt_oss_is_the_size_of_its_checkpoint(name, size):
    """The weights of gpt-oss take the bytes of its checkpoint, biases of experts included."""
    assert find_model(name).weight_bytes == size


def test_fp16_is_kept_where_the_file_has_it(read_model):
    """Weights that are not quantised have the dtype of the file; the label is that of most."""
    config = LLAMA | {"torch_dtype": "float32", "quantization_config": QUANTISED["awq"][0]}
    model = read_model(config)
    assert model.dtype == "int4"
    assert model.weight_bytes == 2 * KEPT + QUANTISED["awq"][1]


def test_weights_in_another_format_have_no_scales(read_model):
    """A format that is given holds for all weights, without scales."""
    model = read_model(LLAMA | {"quantization_config": QUANTISED["gptq"][0]})
    assert model.with_weights("fp8").weight_bytes == model.parameters


def test_experts_are_quantised_apart_from_all_else(read_model):
    """Routers and excluded attention stay in bf16, experts and shared experts do not."""
    fields = LLAMA | {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 384,
        "vocab_size": 10,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "quantization_config": fp8(
            weight_block_size=[128, 128], modules_to_not_convert=["self_attn"]
        ),
    }
    # 128 x 256 numbers of a key and a query, 192 of the latent, and so on, by hand.
    attention = 128 * 256 + 128 * 192 + 128 * 256 + 128 * 128
    norms = 3 * (2 * 128 + 128) + 128
    router = 2 * (128 * 4 + 4)
    kept = 2 * (2 * 10 * 128 + 3 * attention + norms + router)
    dense, expert = 3 * 128 * 256, 3 * 128 * 384
    model = read_model(fields)
    assert model.expert_bytes == 2 * 4 * (expert + 4 * expert // 128**2)
    shared = dense + 2 * expert
    assert model.shared_bytes == kept + shared + 4 * shared // 128**2


@pytest.mark.parametrize("fields", [{}, {"quantization_config": None}])
def test_model_opt_may_say_in_a_file_of_its_own_how_it_quantised(tmp_path, fields):
    """`hf_quant_config.json` beside the config is read if the config says nothing."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | fields))
    said = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    assert read_config(path).dtype == "fp8"
    inside = {"quantization_config": {"quant_method": "modelopt", **said}}
    path.write_text(json.dumps(LLAMA | inside))
    (tmp_path / "hf_quant_config.json").unlink()
    assert read_config(path).dtype == "fp8"


def test_mixed_precision_is_read_module_by_module(read_model):
    """Modules that `quantized_layers` names have the format that it names, others have none."""
    said = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
            "model.layers.1.mlp": {"quant_algo": "NVFP4", "group_size": 16},
        },
    }
    plain = read_model(LLAMA)
    model = read_model(LLAMA | {"quantization_config": {"quant_method": "modelopt", **said}})
    one = 4096 * 14336
    # One matrix in bytes with a scale, three in halves of bytes with one for each 16 numbers.
    saved = one * 1 - 4 + 3 * (2 * one - one // 2 - one // 16)
    assert plain.weight_bytes - model.weight_bytes == saved


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {**by_groups({"num_bits": 4, "type": "float"}), "quant_method": "fp8"},
            "has groups beside blocks of fp8",
        ),
        ({"quant_method": "gptq", "bits": 3}, "by 'gptq' with 3 bits, of unknown size"),
        ({"quant_method": "aqlm"}, "by 'aqlm', of unknown size"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}}, "cannot be read"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": 3}, "cannot be read"),
        (by_groups({"num_bits": 4, "type": "float"}, ignore=[["a"]]), "cannot be read"),
        (by_groups({}), "cannot be read"),
        (by_groups(INT4, ignore=["re:(a|[a-z.])+x"]), "repeats a group"),
        (by_groups(INT4, ignore=["re:" + ".*a" * 5]), "more than 4 repetitions"),
        (by_groups(INT4, ignore=["a*" * 30]), "more than 4 repetitions"),
        ({"quant_method": "fp8", "weight_block_size": [1, 2, 3]}, "cannot be read"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(read_model, config, problem):
    """A quantisation that cannot be read is refused, with what to give instead."""
    with pytest.raises(
        InputError, match=r"quantization_config.*give --weights-dtype"
    ) as caught:
        read_model(LLAMA | {"quantization_config": config})
    assert problem in str(caught.value)
