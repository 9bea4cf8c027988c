"""Reading a Hugging Face config.json: shapes, parameter counts, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import pytest
from helpers.configs import LLAMA_3_8B as LLAMA
from helpers.model_configs import CONFIGS

from kvcore.errors import InputError
from kvcore.models.memory import KVLayout
from kvcore_plugins.models.config import Config
from kvcore_plugins.models.families import FAMILIES
from kvcore_plugins.models.harmless import HARMLESS
from kvcore_plugins.models.huggingface import model_of, read_config

QWEN = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4"},
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
}


KIMI, GLM, QWEN_NEXT = (
    CONFIGS[name] for name in ("kimi-k2", "glm-4.5-air", "qwen3-next-80b-a3b")
)
LLAMA_4 = CONFIGS["llama-4-scout"]["text_config"] | {
    "intermediate_size_mlp": 16384,
    "torch_dtype": "bfloat16",
    "no_rope_layers": [1, 1, 1, 0] * 12,
}


def kept(model):
    """Return what the layers of a model keep, in words."""
    return list(map(str, model.layer_caches))


def without(fields, *names):
    """Return `fields` without those in `names`."""
    return {name: value for name, value in fields.items() if name not in names}


def test_a_model_is_named_after_its_folder(tmp_path):
    """A model is named after the folder of its config.json."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(folder).name == "my-model"
    assert read_config(str(folder / "config.json")).name == "my-model"


def test_the_new_name_of_the_dtype_field_is_read(read_model):
    """The field `dtype` means the same as `torch_dtype`."""
    fields = without(LLAMA, "torch_dtype")
    assert read_model({**fields, "dtype": "float16"}).dtype == "fp16"


def test_a_given_dtype_replaces_that_of_the_file(read_model):
    """The dtype that the caller gives holds for all weights."""
    model = read_model(without(GPT_OSS, "torch_dtype"), dtype="int8")
    assert (model.dtype, model.expert_dtype) == ("int8", "int8")


def test_a_given_dtype_is_that_of_a_model_of_the_catalogue(read_model):
    """The dtype that the caller gives means the same of a file and of the catalogue."""
    assert read_model(GPT_OSS, dtype="nvfp4") == read_model(GPT_OSS).with_weights("nvfp4")


@pytest.mark.parametrize(
    ("quantised", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
    ],
)
def test_quantised_weights_have_their_own_size(read_model, quantised, dtype):
    """The dtype of quantised weights is that of the quantisation."""
    fields = LLAMA | {"quantization_config": quantised}
    assert read_model(fields).dtype == dtype


def test_qwen_windows_hold_from_max_window_layers_on(read_model):
    """Qwen2 layers from `max_window_layers` on have windows; those before have none."""
    assert read_model(QWEN | {"max_window_layers": 20}).windows == (None,) * 20 + (4096,) * 12


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(("scaling", "window"), [(None, None), (YARN, 4096)])
def test_a_window_of_all_positions_bounds_nothing(read_model, scaling, window):
    """A window is none if it has all positions, those to which YaRN extends them included."""
    fields = {"max_position_embeddings": 4096, "rope_scaling": scaling}
    assert set(read_model(QWEN | fields).windows) == {window}


def test_a_layer_whose_window_bounds_nothing_has_the_heads_of_its_type(read_model):
    """Layers of Gemma 4 with a window have heads of their own, however wide it is."""
    fields = CONFIGS["gemma-4-26b-a4b"]["text_config"] | {"dtype": "bfloat16"}
    model = read_model(fields | {"max_position_embeddings": 1024})
    assert model.parameters == read_model(fields).parameters
    assert [cache.kv_heads for cache in model.layer_caches] == [8, 2]


def test_a_field_that_the_family_does_not_know_is_refused(read_model):
    """A field that may change what a layer keeps is refused, with ways to go on."""
    with pytest.raises(InputError) as caught:
        read_model(LLAMA | {"sliding_window": 4096})
    text = str(caught.value)
    assert "config.json: field 'sliding_window' is 4096, which models of type 'llama'" in text
    assert "leave it out; else describe the model by hand" in text
    assert "[[caches]] with kind = 'full', layers = 12" in text


def test_a_width_of_each_layer_is_refused_where_layers_are_alike(read_model):
    """A list in place of a width is refused, except in families whose layers differ."""
    with pytest.raises(InputError, match="'intermediate_size' must be an integer of at least"):
        read_model(LLAMA | {"intermediate_size": [14336] * 32})


def test_a_number_that_layers_have_alike_may_be_a_list(read_model):
    """Hunyuan's experts of each layer are read where all take as many, and else refused."""
    fields = LLAMA | {"model_type": "hunyuan_v1_moe", "num_experts": 64, "use_qk_norm": True}
    layers = LLAMA["num_hidden_layers"]
    listed = {"moe_topk": [8] * layers, "num_shared_expert": [1] * layers}
    listed["moe_intermediate_size"] = [LLAMA["intermediate_size"]] * layers
    assert read_model(fields | listed) == read_model(fields | {"moe_topk": 8})
    for several in ([8] * (layers - 1) + [4], [8], []):
        with pytest.raises(InputError, match="'num_experts_per_tok'"):
            read_model(fields | listed | {"moe_topk": several})
    with pytest.raises(InputError, match="'num_shared_expert' is 2, not 1"):
        read_model(fields | listed | {"num_shared_expert": [2] * layers})


def test_layers_with_experts_may_be_listed(read_model):
    """`moe_layers` lists the layers with experts, in place of every so many.

    Where it lists none, no layer reads the number of experts that a token takes.
    """
    every = read_model({"text_config": LLAMA_4 | {"interleave_moe_layer_step": 2}})
    listed = read_model({"text_config": LLAMA_4 | {"moe_layers": list(range(1, 48, 2))}})
    assert listed == every
    with pytest.raises(InputError, match=r"num_experts_per_tok\' is 1, which models"):
        read_model({"text_config": LLAMA_4 | {"moe_layers": []}})


def test_a_type_of_layer_that_is_not_known_is_refused(read_model):
    """A MiniMax M2 with a layer of another type than full attention is refused."""
    fields = LLAMA | {"model_type": "minimax_m2", "num_local_experts": 8}
    fields |= {"num_experts_per_tok": 2}
    assert read_model(fields | {"attn_type_list": [1] * 32}) == read_model(fields)
    with pytest.raises(InputError, match="has '0', whose K/V cannot be sized"):
        read_model(fields | {"attn_type_list": [1] * 31 + [0]})


@pytest.mark.parametrize("field", ["rope_theta", "rms_norm_eps", "eos_token_id", "auto_map"])
def test_a_harmless_field_is_passed_over(read_model, field):
    """Positions, norms, tokens and names of classes change neither K/V nor parameters."""
    assert read_model(LLAMA | {field: 5}) == read_model(LLAMA)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gemma-2-9b", {"sliding_window_size": 4096}),
        ("phi-4-mini", {"full_attn_mod": 1, "interpolate_factor": 1}),
    ],
)
def test_a_field_of_the_makers_that_no_class_reads_is_passed_over(read_model, name, fields):
    """Fields that a published config has beside those of its class change nothing."""
    assert read_model(CONFIGS[name] | fields) == read_model(CONFIGS[name])


def test_gemma_2_has_the_window_of_its_class_where_none_is_named(read_model):
    """A second field for the window is no window, and leaves that of the class."""
    fields = CONFIGS["gemma-2-9b"]
    unnamed = without(fields, "sliding_window") | {"sliding_window_size": 512}
    assert read_model(unnamed) == read_model(fields)


def test_no_family_reads_a_harmless_field():
    """A field that some family reads for its size is not harmless in another one."""
    read = {"sliding_window", "num_kv_shared_layers", "index_topk", "kv_lora_rank", "head_dim"}
    assert not HARMLESS & (
        read | {field for family in FAMILIES.values() for field in family.only}
    )


def test_a_field_may_have_one_known_value(read_model):
    """A field with one value that is sized is refused with any other."""
    fields = LLAMA | {"model_type": "minimax_m2", "num_local_experts": 8, "use_qk_norm": True}
    fields |= {"num_experts_per_tok": 2}
    assert read_model(fields).experts == 8
    with pytest.raises(InputError, match="field 'qk_norm_type' is 'per_head', not 'per_layer'"):
        read_model(fields | {"qk_norm_type": "per_head"})


def test_shared_experts_and_dense_layers_are_counted(read_model):
    """A tiny Qwen2 MoE has the parameters counted by hand, shared experts included."""
    fields = {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 8,
        "intermediate_size": 16,
        "vocab_size": 10,
        "torch_dtype": "bfloat16",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3,
        "shared_expert_intermediate_size": 5,
        "mlp_only_layers": [0],
    }
    attention = 8 * 8 + 2 * (8 * 4) + 8 * 8 + (8 + 4 + 4)
    dense = 3 * 8 * 16
    sparse = 8 * 4 + 3 * 8 * 5 + 8
    expert = 3 * 8 * 3
    shared = 2 * 10 * 8 + 2 * (attention + 2 * 8) + dense + sparse + 8
    model = read_model(fields)
    assert model.parameters == shared + 4 * expert
    assert model.active_parameters == shared + 2 * expert


def test_llama_biases_are_counted_if_the_config_has_them(read_model):
    """`attention_bias` adds the q, k, v and o biases; `mlp_bias` gate, up and down."""
    biased = read_model(LLAMA | {"attention_bias": True, "mlp_bias": True})
    extra = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert biased.parameters - read_model(LLAMA).parameters == 32 * extra


@pytest.mark.parametrize(
    "name",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "torch_dtype",
        "model_type",
    ],
)
def test_a_missing_field_is_named_with_its_file(read_model, tmp_path, name):
    """A missing field raises InputError with its name and the file."""
    with pytest.raises(InputError) as caught:
        read_model(without(LLAMA, name))
    assert f"{tmp_path / 'config.json'}: field '{name}' is missing" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "field", "value", "problem"),
    [
        (LLAMA, "num_hidden_layers", "32", "must be an integer of at least 1, not '32'"),
        (LLAMA, "num_hidden_layers", True, "must be an integer of at least 1, not True"),
        (LLAMA, "vocab_size", 0, "must be an integer of at least 1, not 0"),
        (LLAMA, "tie_word_embeddings", "no", "must be true or false, not 'no'"),
        (LLAMA, "model_type", "mamba", "is 'mamba'; known: bamba, deepseek_v2, deepseek_v3"),
        (LLAMA, "model_type", ["llama"], "is ['llama']; known: bamba, deepseek_v2"),
        (LLAMA, "torch_dtype", "complex64", "is 'complex64'; give --weights-dtype"),
        (LLAMA, "quantization_config", 4, "must be an object, not 4"),
        (LLAMA, "quantization_config", {"quant_method": "exl2"}, "by 'exl2', of unknown size"),
        (LLAMA, "quantization_config", {"quant_method": "exl2"}, "give --weights-dtype"),
        (LLAMA, "quantization_config", {"quant_method": "gptq"}, "by 'gptq' with None bits"),
        (LLAMA, "quantization_config", {"quant_method": [4]}, "by [4], of unknown size"),
        (LLAMA, "quantization_config", {}, "does not name its 'quant_method'; give --weights"),
        (LLAMA, "num_hidden_layers", 10**23, "must be at most 100,000, not 1000000000000"),
        (LLAMA, "hidden_size", 4 * 10**30, "must be at most 2,147,483,647, not 4000000000"),
        (LLAMA, "vocab_size", 10**400, "0000..."),
        (GPT_OSS, "num_local_experts", 10**9, "must be at most 10,000, not 1000000000"),
        (GPT_OSS, "layer_types", ["full_attention"], "has 1 entries for 32 layers"),
        (GPT_OSS, "layer_types", ["linear_attention"] * 32, "has 'linear_attention'"),
        (GPT_OSS, "layer_types", [[]] * 32, "has [], whose K/V cannot be sized"),
        (GPT_OSS, "layer_types", "full", "must be a list, not 'full'"),
        (DEEPSEEK, "v_head_dim", None, "is missing"),
        (
            LLAMA,
            "rope_scaling",
            YARN | {"original_max_position_embeddings": 10**400},
            "has a factor of 4.0 for 1000000000",
        ),
    ],
)
def test_a_wrong_field_is_named_with_value_and_remedy(read_model, model, field, value, problem):
    """A field of a wrong value raises InputError with the field, the value and the remedy."""
    with pytest.raises(InputError) as caught:
        read_model({**model, field: value})
    text = str(caught.value)
    assert problem in text
    assert f"config.json: field '{field}' " in text


def test_heads_that_do_not_divide_the_hidden_size_need_a_head_dim(read_model):
    """Without `head_dim`, heads that do not divide the hidden size raise InputError."""
    with pytest.raises(
        InputError,
        match=r"config\.json: field 'head_dim' is missing, and 4096 / 3 is not whole",
    ):
        read_model(LLAMA | {"num_attention_heads": 3})


def test_a_nested_field_is_named_with_its_parent(read_model):
    """An error of a field in `text_config` names it `text_config.…`."""
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34}
    fields = {"model_type": "gemma3", "text_config": text}
    with pytest.raises(InputError, match=r"field 'text_config\.hidden_size' is missing"):
        read_model(fields)


def test_windows_can_be_named_layer_by_layer(read_model):
    """`layer_types` sets the windows instead of the family's pattern."""
    kinds = ["full_attention"] * 30 + ["sliding_attention"] * 2
    assert read_model(GPT_OSS | {"layer_types": kinds}).windows == (None,) * 30 + (128,) * 2


def test_experts_can_be_smaller_than_the_other_weights(read_model):
    """MXFP4 holds for the routed experts; other weights have the file's dtype."""
    model = read_model(GPT_OSS)
    assert (model.dtype, model.expert_dtype) == ("bf16", "mxfp4")


def test_heads_that_contradict_are_an_error_with_the_file(read_model, tmp_path):
    """Heads that do not fit each other raise InputError that also names the file."""
    with pytest.raises(InputError) as caught:
        read_model(LLAMA | {"num_key_value_heads": 5})
    assert str(tmp_path) in str(caught.value)
    assert "32 query heads cannot share 5 K/V heads" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "\x00", "[1", "nonsense", "[" * 100_000])
def test_a_file_that_is_no_json_is_refused(read_model, text):
    """A file that is not JSON raises InputError."""
    with pytest.raises(InputError, match="not a JSON file"):
        read_model(text)


def test_a_file_that_is_no_object_is_refused(read_model):
    """A JSON file that holds no object raises InputError."""
    with pytest.raises(InputError, match="expected a JSON object"):
        read_model("[]")


@pytest.mark.parametrize(
    ("fields", "billions", "active", "bytes_per_token"),
    [
        # The makers state 1 T and 32 B, 106 B and 12 B (without embeddings), 109 B (of which
        # the vision tower has one) and 17 B.
        (KIMI, 1026.4, 32.9, 61 * 576 * 2),
        (GLM, 106.9, 13.4, 46 * 2 * 8 * 128 * 2),
        ({"text_config": LLAMA_4}, 107.8, 17.2, 48 * 2 * 8 * 128 * 2),
    ],
)
def test_families_have_their_published_parameters(
    read_model, fields, billions, active, bytes_per_token
):
    """Parameters of a family are those that its makers state, and so is its K/V."""
    model = read_model(fields)
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert model.active_parameters / 1e9 == pytest.approx(active, abs=0.05)
    assert KVLayout(model).bytes_per_token == bytes_per_token


def test_kimi_is_deepseek_v3_of_other_sizes(read_model):
    """Kimi K2 has the parts of DeepSeek V3, counted here by hand."""
    attention = 7168 * (1536 + 576) + 1536 * (1 + 64 * 192) + 512 * (1 + 64 * 256) + 7168 * 8192
    layers = 61 * (attention + 2 * 7168) + 3 * 7168 * 18432
    sparse = 60 * (385 * 3 * 7168 * 2048 + 384 * 7169)
    model = read_model(KIMI)
    assert model.parameters == 2 * 163840 * 7168 + 7168 + layers + sparse
    assert model == read_model(KIMI | {"model_type": "deepseek_v3"})


def test_glm_normalises_queries_if_its_config_says_so(read_model):
    """GLM 4.5 has norms of queries and keys, GLM 4.5 Air has not."""
    assert (
        read_model(GLM | {"use_qk_norm": True}).parameters
        == read_model(GLM).parameters + 46 * 2 * 128
    )


def test_llama_4_looks_back_a_chunk_where_it_has_rotary_positions(read_model):
    """Llama 4 attends to all tokens in the layers without rotary positions, a fourth."""
    expected = ["36 layers, chunk of 8,192 tokens", "12 layers, all tokens"]
    assert kept(read_model({"text_config": LLAMA_4})) == expected
    assert kept(read_model({"text_config": without(LLAMA_4, "no_rope_layers")})) == expected
    assert read_model({"text_config": LLAMA_4 | {"attention_chunk_size": None}}).uniform


@pytest.mark.parametrize(
    ("listed", "attends"), [({}, range(32)), ({"full_attn_idxs": [2, 5, 31]}, (2, 5, 31))]
)
def test_lfm_2_attends_in_the_layers_that_it_lists(read_model, listed, attends):
    """`full_attn_idxs` gives the layers that are no convolutions; without it, none is one."""
    fields = LLAMA | {"model_type": "lfm2", "conv_L_cache": 3}
    types = ["full_attention" if i in attends else "conv" for i in range(32)]
    named = read_model(fields | {"layer_types": types})
    read = read_model(fields | listed | {"block_mlp_init_scale": 1.0, "num_heads": 32})
    assert (kept(read), read.parameters) == (kept(named), named.parameters)


def test_every_second_layer_of_llama_4_may_have_experts(read_model):
    """Layers without experts have a feed-forward network of their own width (Maverick)."""
    other = read_model({"text_config": LLAMA_4 | {"interleave_moe_layer_step": 2}})
    expert, dense, router = 3 * 5120 * 8192, 3 * 5120 * 16384, 5120 * 16
    lost = 24 * (17 * expert + router - dense)
    assert other.parameters == read_model({"text_config": LLAMA_4}).parameters - lost


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (LLAMA | {"index_topk": 2048, "index_head_dim": 128}, "index_topk"),
        (DEEPSEEK | {"v_head_dim": 128, "index_n_heads": 64}, "index_n_heads"),
        (LLAMA | {"linear_num_key_heads": 16}, "linear_num_key_heads"),
        (LLAMA | {"mamba_d_state": 128}, "mamba_d_state"),
        (LLAMA | {"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
        (GLM | {"sparse_attention_config": {"a": 1}}, "sparse_attention_config"),
        (KIMI | {"compress_ratios": [4] * 61}, "compress_ratios"),
    ],
)
def test_what_would_size_kv_wrongly_is_refused(read_model, fields, field):
    """A family whose layers keep K/V refuses fields of indexers, states and shared K/V."""
    with pytest.raises(InputError, match=rf"field '{field}' is .* are not known to have"):
        read_model(fields)


SPARSE_MLA = CONFIGS["deepseek-v3.2"]


@pytest.mark.parametrize(
    ("fields", "bytes_per_token", "caches"),
    [
        (KIMI, 70_272, ["61 layers, latent of all tokens"]),
        (GLM, 188_416, ["46 layers, all tokens"]),
        ({"text_config": LLAMA_4}, 196_608, ["36 layers, chunk of 8,192 tokens",
                                             "12 layers, all tokens"]),
        (QWEN_NEXT, 24_576, ["36 layers, a state of fixed size", "12 layers, all tokens"]),
        # A key of 128 numbers in fp8 with 4 bytes of scale beside each latent.
        (SPARSE_MLA, 61 * (576 * 2 + 132), ["61 layers, latent of all tokens",
                                            "61 layers, keys of an indexer"]),
    ],
)  # fmt: skip
def test_bytes_that_grow_with_a_token(read_model, fields, bytes_per_token, caches):
    """The bytes that a token adds to the layers are counted kind by kind, in 16 bits."""
    model = read_model(fields)
    assert KVLayout(model).bytes_per_token == bytes_per_token
    assert kept(model) == caches


def test_a_state_has_bytes_of_its_convolution_and_of_its_recurrence(read_model):
    """A gated delta net keeps 3 x 8,192 numbers in 16 bits and 32 x 128 x 128 in 32."""
    state, _ = read_model(QWEN_NEXT).caches
    assert state.state_bytes == 3 * 8192 * 2 + 32 * 128 * 128 * 4 == 2_146_304
    half, _ = read_model(QWEN_NEXT | {"mamba_ssm_dtype": "bfloat16"}).caches
    assert half.state_bytes == 3 * 8192 * 2 + 32 * 128 * 128 * 2
    with pytest.raises(InputError, match="'mamba_ssm_dtype' is 'int8'; known: float32"):
        read_model(QWEN_NEXT | {"mamba_ssm_dtype": "int8"})


def test_a_layer_may_have_fields_of_its_own(read_model):
    """`per_layer_config` has heads of single layers; other fields there are refused."""
    fields = LLAMA | {"model_type": "qwen3", "head_dim": 128}
    own = read_model(fields | {"per_layer_config": {"3": {"num_key_value_heads": 2}}})
    assert [(cache.layers, cache.kv_heads) for cache in own.caches] == [(31, 8), (1, 2)]
    with pytest.raises(InputError, match=r"field 'per_layer_config' has .* for layer 3"):
        read_model(fields | {"per_layer_config": {"3": {"sliding_window": 2}}})


@pytest.mark.parametrize("name", ["1" * 5000, "-1", "x"])
def test_a_layer_with_fields_of_its_own_has_a_number(read_model, name):
    """Names of `per_layer_config` that are no numbers of layers, however long, are refused."""
    fields = LLAMA | {"model_type": "qwen3", "head_dim": 128, "per_layer_config": {name: {}}}
    with pytest.raises(InputError, match="must have numbers of layers as names"):
        read_model(fields)


def test_layers_of_a_long_config_are_looked_up():
    """Fields of a layer are kept by its number, and the layers in a list are a set."""
    tables = {"03": {"head_dim": 2}}
    fields = {"num_hidden_layers": 9, "per_layer_config": tables, "first": [2, 1]}
    config = Config(Path("config.json"), fields)
    assert config.of_layer(2) is config
    tables.clear()  # read once
    assert config.of_layer(3).count("head_dim") == 2
    assert config.indices("first") == frozenset({1, 2})
    with pytest.raises(InputError, match="field 'first' must list numbers of layers, not"):
        config.indices("first", ["1"])


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            CONFIGS["kimi-linear-48b-a3b"]
            | {"linear_attn_config": {"full_attn_layers": [27], "head_dim": "128"}},
            "field 'linear_attn_config.head_dim' must be an integer of at least 1, not '128'",
        ),
        (
            LLAMA | {"model_type": "lfm2", "block_ffn_dim_multiplier": "1.3"},
            "field 'block_ffn_dim_multiplier' is '1.3', and no factor",
        ),
        (
            LLAMA | {"model_type": "lfm2", "block_ffn_dim_multiplier": -1},
            "field 'block_ffn_dim_multiplier' is -1, and no factor",
        ),
        (
            CONFIGS["nemotron-h-56b"] | {"mamba_num_heads": 10**9},
            "mixer.out_proj of layer 0 would have 0 inputs or outputs",
        ),
    ],
)
def test_widths_that_are_none_are_refused(read_model, fields, fault):
    """A width that is no number, or that others leave none of, is refused with its place."""
    with pytest.raises(InputError, match=re.escape(fault)):
        read_model(fields)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"per_layer_config": {"1": {}, "01": {}}}, "has two names of a layer, such as '1'"),
        ({"per_layer_config": {"32": {}}}, "'per_layer_config' has layer 32 of 0 to 31"),
    ],
)
def test_fields_of_a_layer_are_of_one_that_there_is(read_model, fields, fault):
    """A layer has one name in `per_layer_config`, and is one of the model's."""
    with pytest.raises(InputError, match=fault):
        read_model(LLAMA | {"model_type": "qwen3", "head_dim": 128} | fields)


@pytest.mark.parametrize(("first", "wrong"), [(0, 48), (0, -1), (1, 0), (1, 49)])
def test_listed_layers_are_those_of_the_model(first, wrong):
    """A list of layers has none before the first, or past the end."""
    config = Config(Path("config.json"), {"num_hidden_layers": 48, "moe_layers": [2, wrong]})
    with pytest.raises(InputError, match=f"has layer {wrong} of {first} to {first + 47}"):
        config.indices("moe_layers", first=first)


LONG = "x" * 10_000


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3-8b", {"model_type": LONG}),
        ("qwen3-8b", {"torch_dtype": LONG}),
        ("qwen3-8b", {"tie_word_embeddings": LONG}),
        ("qwen3-8b", {"layer_types": LONG}),
        ("kimi-linear-48b-a3b", {"linear_attn_config": LONG}),
        ("qwen3-8b", {"use_qk_norm": LONG}),
        ("qwen3-8b", {"quantization_config": LONG}),
        ("qwen3-8b", {"quantization_config": {"quant_method": LONG}}),
        ("qwen3-8b", {"quantization_config": {"quant_method": "awq", "bits": LONG}}),
        ("qwen3-8b", {"layer_types": [LONG] * 36}),
        ("qwen3-next-80b-a3b", {"mamba_ssm_dtype": LONG}),
        ("nemotron-h-56b", {"hybrid_override_pattern": LONG}),
        ("kimi-linear-48b-a3b", {"linear_attn_config": {"full_attn_layers": [1], LONG: 1}}),
    ],
)
def test_a_long_value_of_a_config_is_shortened(name, fields):
    """The error about a value that is none has its beginning, whatever field it is of."""
    with pytest.raises(InputError, match=r"x{50,}\.\.\.") as caught:
        model_of(CONFIGS[name] | fields, name, "config.json")
    assert len(str(caught.value)) < 2000


BY_HAND = """
layers = 48
query_heads = 16
kv_heads = 2
head_dim = 256
hidden_size = 2048
parameters = 79_674_391_296
active_parameters = 3_874_929_408
experts = 512
experts_per_token = 10

[[caches]]
kind = "state"
layers = 36
state_bytes = 2_146_304
pair_flop = 2_097_152

[[caches]]
kind = "full"
layers = 12
kv_heads = 2
key_dim = 256
value_dim = 256
pair_flop = 16_384
"""


def test_a_model_by_hand_is_that_of_its_config(read_model, tmp_path):
    """A table of TOML with what layers keep describes the model that a config does."""
    path = tmp_path / "config.toml"
    path.write_text(BY_HAND)
    assert attrs.evolve(read_config(path), name="") == attrs.evolve(
        read_model(QWEN_NEXT), name="", positions=0
    )
    assert read_config(path, "fp8").dtype == "fp8"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("layers = ", "not a TOML file"),
        (
            "layers = 4",
            "a model has no 'query_heads'; its fields are name, layers, query_",
        ),
        (BY_HAND.replace("kv_heads = 2\nhead_dim", "head_dim", 1), "a model has no 'kv_heads'"),
        (BY_HAND.replace("state_bytes", "bytes"), "a cache has no field 'bytes'"),
        (BY_HAND.replace("layers = 36", "layers = 96"), "a cache of more than its 48 layers"),
        (BY_HAND.replace("2_146_304", "'2'"), "a cache: state_bytes must be a whole number"),
        (BY_HAND.replace('"state"', '"ssm"'), "cache of kind 'ssm'; known: full, window"),
        ("caches = 5", "a cache must be a table, not 5"),
        ("windows = [1]\n" + BY_HAND, "a model has no field 'windows'"),
    ],
)
def test_a_wrong_model_by_hand_is_refused(tmp_path, text, problem):
    """A table of TOML that is no model raises InputError with the file and the field."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({}, 0),
        ({"max_position_embeddings": 8192}, 8192),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": YARN | {"original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn"}}, 4096),
    ],
)
def test_positions_are_those_of_the_config(read_model, fields, positions):
    """A model has the positions of its config, and those that YaRN extends them to."""
    assert read_model(LLAMA | fields).positions == positions
