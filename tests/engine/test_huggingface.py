"""The `huggingface` generator: its models and tokenizers, its tokens, and its errors."""

import json
import os
from copy import deepcopy
from importlib.util import find_spec
from io import StringIO

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from helpers.hugging import (  # noqa: E402
    FAMILIES,
    LENGTHS,
    MIXED,
    SIZES,
    VOCABULARY,
    longrope_fixed,
    paged_cache,
    prompt,
    tiny,
)
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    Cohere2Config,
    DeepseekV3Config,
    DogeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPTBigCodeConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MoshiConfig,
    MoshiForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging  # noqa: E402

from kvcore import InputError, KVCache, Plugins, run  # noqa: E402
from kvcore.engine import RaggedBatch  # noqa: E402
from kvcore.models.spec import ModelSpec  # noqa: E402
from kvcore.request import text_request, word_tokens  # noqa: E402
from kvcore.serving import Batching  # noqa: E402
from kvcore.testing.dense import DenseCache, Text, advance, generate, loaded  # noqa: E402
from kvcore_engine.backend import TorchCPU  # noqa: E402
from kvcore_engine.generator import HuggingFace  # noqa: E402
from kvcore_engine.generator import huggingface as module  # noqa: E402


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_generate(family):
    """Ragged batches in chunks generate the same as `generate` for each prompt alone."""
    model = tiny(family)
    prompts = [prompt(length, seed=length) for length in (9, 1, 14)]
    options = {"do_sample": False, "max_new_tokens": 8}
    expected = [
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
        for ids in prompts
    ]
    texts = [Text(ids[0].tolist()) for ids in prompts]
    found = generate(loaded(HuggingFace(model)), texts, 8, chunk=4)
    assert found == [tokens.tolist() for tokens in expected]


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", ["llama", "gemma3-mixed", "gpt-oss", "glm4-moe"])
def test_halved_weights_are_those_of_transformers(family, dtype, tmp_path):
    """Tensors that transformers keeps wider as it loads a model stay so, from folder or object.

    These are rotary frequencies, and biases of routers.
    """
    experts = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    routed = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    moe = Glm4MoeConfig(**SIZES, **experts, **routed)
    config = {"glm4-moe": moe, **FAMILIES}[family]
    given = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
    given.save_pretrained(tmp_path)
    expected = tensors(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=HALVES[dtype]))
    assert torch.float32 in {tensor.dtype for tensor in expected.values()}
    for model in (tmp_path, given):
        generator = HuggingFace(model)
        generator.load(TorchCPU(), dtype)
        found = tensors(generator.network)
        assert {name: found[name].dtype for name in expected} == {
            name: tensor.dtype for name, tensor in expected.items()
        }
        assert all(found[name].equal(tensor) for name, tensor in expected.items())


def tensors(model):
    """Return the parameters and buffers of a model by their names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("dtype", HALVES)
def test_halved_weights_turn_far_positions_as_in_transformers(dtype, tmp_path):
    """After 2,000 tokens a run in half precision is as near to fp64 as transformers is."""
    width = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes = SIZES | width | {"max_position_embeddings": 4096, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=HALVES[dtype])
    model.save_pretrained(tmp_path)
    ids, rows = prompt(2000), {}
    for name, kind in {"fp64": torch.float64, dtype: HALVES[dtype]}.items():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=kind).eval()
        with torch.no_grad():
            rows[name] = plain(ids, logits_to_keep=1).logits[0, -1].double()

    class Recorded(HuggingFace):
        def logits(self, batch, attend):
            found = super().logits(batch, attend)
            if len(found):
                rows["run"] = found[-1].double()
            return found

    asked = [text_request(0, ids[0].tolist(), output=1, block_size=16)]
    run(asked, generator=Recorded(tmp_path), dtype=dtype, block_size=16, blocks=200)
    off, usual = ((rows[name] - rows["fp64"]).abs().max() for name in ("run", dtype))
    assert off < 1.5 * usual


def test_a_folder_without_a_model_is_refused(tmp_path):
    """An empty folder raises InputError with its name."""
    with pytest.raises(InputError, match=str(tmp_path)):
        _ = HuggingFace(tmp_path).spec


@pytest.mark.parametrize(
    ("files", "config"),
    [
        ("model", {"model_type": "strange", "auto_map": {"AutoConfig": "run.Config"}}),
        ("tokenizer", {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["run.T", None]}}),
    ],
)
def test_code_of_a_folder_is_not_run(tmp_path, monkeypatch, files, config):
    """Code in a model's folder is never run, even if its files and the user ask for it."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "run.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    name = "config.json" if files == "model" else "tokenizer_config.json"
    (tmp_path / name).write_text(json.dumps(config))
    generator = HuggingFace(tmp_path)
    with pytest.raises(
        InputError, match=f"no {files} .* code of its own, and kvcore runs none"
    ):
        _ = generator.spec if files == "model" else generator.encode("a")
    assert not (tmp_path / "was_run").exists()


def test_an_attention_kernel_of_a_folder_is_not_used(tmp_path):
    """A model whose config.json names an attention kernel is read with eager attention.

    A kernel is code, which transformers would fetch from the hub.
    """
    tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"_attn_implementation": "some/kernel"}
    path.write_text(json.dumps(config))
    named = AutoConfig.from_pretrained(tmp_path)
    assert named._attn_implementation == "some/kernel"
    assert HuggingFace(tmp_path).network.config._attn_implementation == "eager"


def test_pickled_weights_that_are_no_tensors_are_refused(tmp_path):
    """Pickled weights that hold more than tensors raise InputError."""
    model = tiny("llama")
    model.config.save_pretrained(tmp_path)
    torch.save({"call": print, **model.state_dict()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="its weights are a pickle of more than tensors"):
        _ = HuggingFace(tmp_path).spec


@pytest.mark.parametrize(
    "name", ["nofolder", "./no/folder", "~/nofolder", "models/no", "a/b/c"]
)
@pytest.mark.parametrize("option", ["model", "tokenizer"])
def test_a_missing_folder_is_refused_at_once(tmp_path, monkeypatch, name, option):
    """A missing folder raises InputError at once.

    Only names of the form org/name may be on the hub.
    """
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    model = name if option == "model" else "org/model"
    with pytest.raises(
        InputError, match=r"there is no such folder.*names of the form org/name"
    ):
        HuggingFace(model, tokenizer=name if option == "tokenizer" else None)
    assert HuggingFace("org/model").model == "org/model"


@pytest.fixture
def tried(monkeypatch):
    """Return a list of the reads of configs by transformers, none of which finds a file."""
    reads = []

    def read(name, **options):
        reads.append((name, options["local_files_only"]))
        msg = "not cached"
        raise OSError(msg)

    monkeypatch.setattr(AutoConfig, "from_pretrained", read)
    monkeypatch.setattr("kvcore_engine.generator.huggingface.getproxies", dict)
    return reads


def test_a_name_of_the_hub_without_a_network_is_refused_at_once(tried, monkeypatch):
    """A model that is not on this machine is an error as soon as the hub cannot be reached."""

    def connect(address, timeout):
        assert timeout <= 5
        msg = f"no {address}"
        raise OSError(msg)

    monkeypatch.setattr("socket.create_connection", connect)
    with pytest.raises(InputError, match=r"^org/model: the model is not in the cache.*folder$"):
        _ = HuggingFace("org/model").spec
    assert tried == [("org/model", True)]


def test_a_download_is_announced(tried, monkeypatch, caplog):
    """Before a model is downloaded a line says so; a failure of transformers is an error."""
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: StringIO())
    with pytest.raises(InputError, match="no model that transformers can read: OSError"):
        _ = HuggingFace("org/model").spec
    assert tried == [("org/model", True), ("org/model", False)]
    assert "org/model: the model is not in the cache of this machine: down" in caplog.text


def test_offline_by_the_environment_no_connection_is_tried(tried, monkeypatch):
    """With HF_HUB_OFFLINE a model that is not cached is refused without a connection."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.create_connection", pytest.fail)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        _ = HuggingFace("org/model").spec
    assert tried == [("org/model", True)]


def test_a_model_of_a_million_layers_is_refused(tmp_path):
    """More layers than any model has are refused by a limit, before they are made."""
    tiny("llama").config.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 10**6}))
    with pytest.raises(InputError, match="1,000,000 layers; 1,024 are the most"):
        _ = HuggingFace(tmp_path).spec


def test_reading_shows_no_progress_in_a_pipe(tmp_path, capfd):
    """Loading weights prints no progress bar into a pipe, and leaves transformers' setting."""
    tiny("llama").save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "Loading weights" in capfd.readouterr().err
    _ = HuggingFace(tmp_path).network
    assert "Loading weights" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


def test_an_object_that_is_no_model_is_refused():
    """An object that is no transformers model raises InputError."""
    with pytest.raises(InputError, match="no transformers model"):
        _ = HuggingFace(3).spec


def test_a_model_without_a_head_is_refused():
    """A model without a head for logits raises InputError."""
    with pytest.raises(InputError, match="LlamaModel makes no next tokens"):
        _ = HuggingFace(LlamaModel(FAMILIES["llama"])).spec


def test_the_spec_has_the_shape_of_the_config():
    """The spec has heads, widths and windows of the config, and the number of parameters."""
    model = tiny("qwen2-mixed")
    spec = HuggingFace(model).spec
    count = sum(parameter.numel() for parameter in model.parameters())
    assert spec == ModelSpec(
        name="qwen2",
        layers=3,
        query_heads=4,
        kv_heads=2,
        head_dim=8,
        hidden_size=32,
        parameters=count,
        dtype="fp32",
        windows=(4, None, 4),
    )


def test_idle_experts_have_no_active_parameters():
    """Active parameters count only the experts that a token uses."""
    spec = HuggingFace(tiny("mixtral")).spec
    experts = 3 * 4 * 3 * 32 * 48
    assert (spec.experts, spec.experts_per_token) == (4, 2)
    assert spec.parameters - spec.active_parameters == experts // 2


def test_vocabulary_and_end_tokens_are_those_of_the_configs():
    """The vocabulary is the config's; end tokens are those of the generation config."""
    model = tiny("llama")
    assert HuggingFace(model).vocabulary == VOCABULARY
    assert HuggingFace(model).eos_token_ids == frozenset()
    model.generation_config.eos_token_id = [7, 8]
    assert HuggingFace(model).eos_token_ids == {7, 8}
    model.generation_config.eos_token_id = 9
    assert HuggingFace(model).eos_token_ids == {9}


@pytest.fixture
def tokenizer():
    """Return a tokenizer of three words."""
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "cache": 2}, unk_token="?"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")  # noqa: S106


ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
ROTARY = {
    **{name: config for name, config in FAMILIES.items() if name != "gpt2"},
    "linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", **ROPE}),
    "llama3": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE
        },
    ),
    "yarn": LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", **ROPE}),
    "cohere2": Cohere2Config(**SIZES, sliding_window=6, layer_types=MIXED),
}  # fmt: skip


def lone_keys(generator, positions):
    """Return each layer's keys of one token at `positions`, attending to itself alone."""
    found = []

    def attend(_layer, queries, keys, values, **_options):
        found.append(keys)
        return values.repeat_interleave(queries.shape[1] // keys.shape[1], 1)

    count = len(positions)
    generator.forward(
        RaggedBatch(
            contexts=[0] * count,
            lengths=[1] * count,
            token_ids=[11] * count,
            positions=positions,
            output_indices=[0] * count,
            seeds=[0] * count,
        ),
        attend,
    )
    return found


@pytest.mark.parametrize("family", ROTARY)
def test_rotary_moves_a_key_to_a_later_position(family, monkeypatch):
    """In each layer a key rotated by d is the key of its token d positions further on.

    It holds even if layers differ in their wavelengths, or if only some layers rotate.
    """
    monkeypatch.setitem(FAMILIES, family, ROTARY[family])
    generator = loaded(HuggingFace(model=tiny(family)))
    for rotary, (here, there) in zip(
        generator.rotary, lone_keys(generator, [40, 157]), strict=True
    ):
        turned = rotary.rotate(here, *rotary.angles(torch.tensor(117)))
        # transformers computes angles in fp32.
        assert turned.allclose(there, atol=1e-4 * float(here.abs().max()))


def test_rotary_embeddings_are_found_without_gradients():
    """The pass that finds the rotary embeddings records nothing for gradients."""
    generator = loaded(HuggingFace(model=tiny("llama")))
    recorded = []
    generator.network.register_forward_pre_hook(
        lambda *_: recorded.append(torch.is_grad_enabled())
    )
    assert generator.rotary
    assert recorded == [False]


def test_layers_that_do_not_rotate_have_no_speeds(monkeypatch):
    """Layers without positions have a rotary embedding without speeds."""
    monkeypatch.setitem(FAMILIES, "cohere2", ROTARY["cohere2"])
    speeds = [each.speeds for each in loaded(HuggingFace(model=tiny("cohere2"))).rotary]
    assert [len(speed) for speed in speeds] == [4, 0, 4]


def test_learned_or_length_dependent_positions_have_no_rotary(monkeypatch):
    """Learned positions, and frequencies that depend on the length, have no `Rotary`."""
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", **ROPE})
    monkeypatch.setitem(FAMILIES, "dynamic", config)
    for family in ("gpt2", "dynamic"):
        assert set(loaded(HuggingFace(model=tiny(family))).rotary) == {None}


def test_texts_are_encoded_by_the_given_tokenizer(tokenizer):
    """`encode` and `decode` use the tokenizer that was given."""
    generator = HuggingFace(tiny("llama"), tokenizer=tokenizer)
    assert generator.encode("a cache") == [1, 2]
    assert generator.decode([2, 1]) == "cache a"


def test_a_tokenizer_that_fails_is_refused(tmp_path, tokenizer):
    """Faults of the files of a tokenizer are told, also where its code in Rust panics."""
    lacking = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    lacking["single"] = [{"SpecialToken": {"id": "nowhere", "type_id": 0}}]
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": lacking}))
    generator = HuggingFace(tiny("llama"), tokenizer=tmp_path)
    with pytest.raises(InputError, match="the tokenizer of the model fails: PanicException: "):
        generator.encode("a cache")


@pytest.mark.parametrize("separate", [False, True])
def test_the_tokenizer_is_read_from_a_folder(tmp_path, tokenizer, separate):
    """The tokenizer is read from the model's folder, or from that of the option `tokenizer`."""
    tiny("llama").save_pretrained(tmp_path / "model")
    place = tmp_path / ("tokenizer" if separate else "model")
    tokenizer.save_pretrained(place)
    where = f",tokenizer={place}" if separate else ""
    generator = Plugins().build("generator", f"huggingface:model={tmp_path / 'model'}{where}")
    assert generator.encode("cache a") == [2, 1]


def test_without_a_tokenizer_words_are_hashed(tmp_path):
    """Without a tokenizer `encode` hashes words, and `decode` prints token ids."""
    tiny("llama").save_pretrained(tmp_path)
    generator = HuggingFace(tmp_path)
    assert generator.encode("a cache") == word_tokens("a cache", VOCABULARY)
    assert generator.decode([2, 1]) == "2 1"


def test_options_of_a_generator_built_in_code_are_text(tokenizer):
    """The options of a generator built in code name its model and tokenizer as text."""
    generator = HuggingFace(tiny("llama"), tokenizer=tokenizer)
    assert generator.options() == {
        "model": "LlamaForCausalLM",
        "tokenizer": type(tokenizer).__name__,
        "temperature": 0.0,
        "top_k": None,
    }


@pytest.mark.parametrize("option", ["temperature=-1", "top_k=0"])
def test_sampling_options_are_checked(option):
    """A temperature below 0 or a `top_k` of 0 raises InputError."""
    with pytest.raises(InputError, match=option.partition("=")[0]):
        Plugins().build("generator", f"huggingface:model=x,{option}")


def test_unusable_without_transformers(monkeypatch):
    """Without transformers, `unavailable()` names the package to install."""
    monkeypatch.setattr(
        module, "find_spec", lambda name: None if name == "transformers" else find_spec(name)
    )
    assert HuggingFace.unavailable() == "needs transformers: pip install 'kvcore[hf]'"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (Gemma2Config(**SIZES, head_dim=8, sliding_window=4), "softcap"),
        (DogeConfig(**SIZES), "DogeAttention asks attention for a mask of its own"),
        (DogeConfig(**SIZES, sliding_window=4), "DogeAttention asks .* a mask of its own"),
    ],
)
def test_attention_that_no_backend_computes_is_refused(config, match):
    """Capped scores and masks that layers make raise InputError with their name."""
    generator = loaded(HuggingFace(AutoModelForCausalLM.from_config(config)), "fp32")
    attend = DenseCache().attend([0], [4])
    with pytest.raises(InputError, match=match):
        advance(generator, [Text(prompt(4)[0].tolist())], [4], attend)


def call_attached(model):
    """Call a model that is attached to a paged cache."""
    with paged_cache().attached(model):
        model(prompt(9))


def generate_attached(model):
    """Generate with a model that is attached to a paged cache."""
    with paged_cache().attached(model):
        model.generate(prompt(9), do_sample=False, max_new_tokens=2)


def serve(model):
    """Generate with a model that is a generator."""
    generate(loaded(HuggingFace(model), "fp32"), [Text(prompt(9)[0].tolist())], 2)


@pytest.mark.parametrize("name", ["DiffLlama", "HrmText"])
@pytest.mark.parametrize("use", [call_attached, generate_attached, serve])
def test_a_layer_that_does_more_than_attend_once_is_refused(name, use):
    """Two attentions of a layer, or K/V under another number, raise InputError by name."""
    config_class = getattr(transformers, f"{name}Config", None)
    model_class = getattr(transformers, f"{name}ForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip(f"this version of transformers has no {name}")
    model = model_class(config_class(**SIZES | {"num_key_value_heads": 4}, head_dim=8)).eval()
    with pytest.raises(InputError, match=f"{name}.* cannot go through a paged cache"):
        use(model)


@pytest.mark.parametrize("use", [call_attached, generate_attached, serve])
def test_a_window_that_attention_does_not_get_is_refused(use):
    """A layer that attends to more than the window of its config raises InputError.

    Blocks of tokens beyond the window would be freed, and read.
    """
    config = MoshiConfig(**SIZES, head_dim=8, ffn_dim=48, sliding_window=8)
    message = "MoshiAttention.* layer 0 attends to all tokens, .* gives it a window of 8"
    with pytest.raises(InputError, match=message):
        use(MoshiForCausalLM(config).eval())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            BertConfig(**SIZES, is_decoder=True),
            "bert cannot .* layer 0 has 4 keys of 8 .* 2 of 8 in",
        ),
        (
            GPTBigCodeConfig(**SIZES, n_head=4, n_embd=32),
            "gpt_bigcode cannot .* has 1 keys of 8",
        ),
    ],
)
@pytest.mark.parametrize("use", [call_attached, serve])
def test_heads_that_the_config_does_not_give_are_refused(config, message, use):
    """K/V of another shape than the config's raises InputError with the layer and both."""
    with pytest.raises(InputError, match=message):
        use(AutoModelForCausalLM.from_config(config).eval())


def test_a_model_without_attention_is_refused():
    """A state-space model, which has no K/V, raises InputError with its kind of layers."""
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(InputError, match="linear_attention"):
        _ = HuggingFace(AutoModelForCausalLM.from_config(config)).spec


def test_a_latent_is_refused():
    """A model with multi-head latent attention raises InputError."""
    config = DeepseekV3Config(**SIZES, n_routed_experts=8, first_k_dense_replace=3)
    with pytest.raises(InputError, match="latent"):
        _ = HuggingFace(AutoModelForCausalLM.from_config(config)).spec


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**SIZES),
        GemmaConfig(**SIZES, head_dim=8, use_bidirectional_attention=True),
        Gemma3TextConfig(**SIZES, head_dim=8, use_bidirectional_attention=True),
        LlamaConfig(**SIZES, is_causal=False),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_attends_to_later_tokens_is_refused(config):
    """Encoders, and decoders told to attend as one, raise InputError when they are read."""
    with pytest.raises(InputError, match="lets tokens attend to later ones"):
        _ = HuggingFace(AutoModelForCausalLM.from_config(config)).spec


def test_a_decoder_that_can_be_an_encoder_is_served():
    """BERT as a decoder generates the same through blocks, with layers for an encoder too."""
    sizes = SIZES | {"num_key_value_heads": 4}
    config = BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    model, ids = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval(), prompt(9)
    options = {"do_sample": False, "max_new_tokens": 4, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    with paged_cache().attached(model):
        assert model.generate(ids, **options).equal(expected)


@pytest.mark.parametrize(
    ("option", "size"),
    [
        ({"global_head_dim": 16}, "head_dim"),
        ({"global_head_dim": 8, "num_global_key_value_heads": 1}, "num_key_value_heads"),
    ],
)
def test_layers_of_several_sizes_are_refused(option, size):
    """A config whose heads differ by layer raises InputError when it is read."""
    config_class = getattr(transformers, "Gemma4TextConfig", None)
    if config_class is None:
        pytest.skip("this version of transformers has no Gemma 4")
    config = config_class(
        **SIZES | option, head_dim=8, attention_k_eq_v=True, layer_types=[*MIXED[:2], MIXED[1]],
        vocab_size_per_layer_input=8, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
    )  # fmt: skip
    with pytest.raises(InputError, match=rf"Gemma4.* layers of several sizes \({size}\)"):
        _ = HuggingFace(AutoModelForCausalLM.from_config(config)).spec


def test_an_encoder_decoder_is_refused():
    """A model with an encoder raises InputError with the name of its class."""
    config = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4
    )
    with pytest.raises(InputError, match="T5ForConditionalGeneration"):
        _ = HuggingFace(T5ForConditionalGeneration(config)).spec


def test_equal_weights_have_one_identity(tmp_path):
    """Equal weights have one identity, changed weights another, in memory and in files."""
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    folder, held = HuggingFace(tmp_path).identity(), HuggingFace(model).identity()
    assert HuggingFace(str(tmp_path)).identity() == folder
    assert HuggingFace(tiny("llama")).identity() == held
    model.get_input_embeddings().weight.data[0, 0] += 1
    assert HuggingFace(model).identity() != held
    model.save_pretrained(tmp_path)
    assert HuggingFace(tmp_path).identity() != folder


def test_files_of_equal_sizes_and_times_have_identities_of_their_own(tmp_path):
    """Other weights in files of the same names, sizes and times have another identity."""
    model, found = tiny("llama"), set()
    for _ in range(2):
        model.save_pretrained(tmp_path)
        for file in tmp_path.iterdir():
            os.utime(file, (1, 1))
        found.add(HuggingFace(tmp_path).identity())
        model.get_input_embeddings().weight.data += 1
    assert len(found) == 2


@pytest.mark.parametrize(("family", "positions"), [("gpt2", 256), ("llama", None)])
def test_a_table_of_positions_bounds_a_sequence(family, positions):
    """A run ends each text at the last position of the model's table, if it has a table."""
    generator = HuggingFace(tiny(family, dtype=torch.float32))
    assert generator.positions == positions
    texts = [
        text_request(index, [1 + index] * length, output=20, block_size=16)
        for index, length in enumerate((4, 245, 256, 300))
    ]
    result = run(
        texts, cache=KVCache(100, 16, ids=True), generator=generator, backend="torch-cpu"
    )
    lengths = {name: len(output) for name, output in result.outputs.items()}
    assert result.batching.max_model_len == positions
    if positions is None:
        assert lengths == dict.fromkeys(range(4), 20)
    else:
        assert lengths == {0: 20, 1: 11}
        assert len(result.log.reasons) == 2


def length_run(model, *lengths, generator=None, **limits):
    """Return the result of texts of `model` with prompts of `lengths` of a common beginning."""
    texts = [
        text_request(tokens, prompt(90)[0, :tokens].tolist(), output=12, block_size=4)
        for tokens in lengths
    ]
    return run(
        texts, cache=KVCache(100, 4, ids=True), generator=generator or HuggingFace(model),
        backend="torch-cpu", dtype="fp64", batching=Batching(**limits),
    )  # fmt: skip


@pytest.mark.parametrize("kind", LENGTHS)
def test_frequencies_that_change_with_the_length_bound_a_run(monkeypatch, kind):
    """A text in the original length gets the tokens that the model itself generates."""
    monkeypatch.setitem(FAMILIES, kind, LENGTHS[kind])
    model, ids = tiny(kind), prompt(90)
    expected = model.generate(ids[:, :52], do_sample=False, max_new_tokens=12)[0, 52:].tolist()
    assert length_run(model, 52).outputs == {52: expected}
    assert length_run(model, 52, 90, max_model_len=64).outputs == {52: expected}


def test_dynamic_frequencies_are_refused_beyond_the_original_length(monkeypatch):
    """A text at which `dynamic` frequencies change is refused by name, with any limit."""
    monkeypatch.setitem(FAMILIES, "dynamic", LENGTHS["dynamic"])
    for longest in (None, 128):
        with pytest.raises(InputError, match=r"'dynamic'.* beyond 64 tokens.*max_model_len=64"):
            length_run(tiny("dynamic"), 52, 90, max_model_len=longest)


def test_longrope_without_a_limit_ends_at_its_original_length(monkeypatch):
    """By default short factors hold, and no text is longer than they do, as in vLLM."""
    monkeypatch.setitem(FAMILIES, "longrope", LENGTHS["longrope"])
    result = length_run(tiny("longrope"), 52, 60, 90)
    assert result.batching.max_model_len == 64
    assert {tokens: len(output) for tokens, output in result.outputs.items()} == {52: 12, 60: 4}


def test_longrope_with_a_longer_limit_has_its_long_factors_throughout(monkeypatch):
    """With a limit beyond the original length all texts have long factors, and share blocks."""
    monkeypatch.setitem(FAMILIES, "longrope", LENGTHS["longrope"])
    model, ids = tiny("longrope"), prompt(90)
    with longrope_fixed(model):
        expected = {
            tokens: model.generate(ids[:, :tokens], do_sample=False, max_new_tokens=12)
            for tokens in (52, 60, 90)
        }
    result = length_run(model, 52, 60, 90, max_model_len=128, max_seqs=1)
    assert result.outputs == {n: ids[0, n:].tolist() for n, ids in expected.items()}
    assert result.cache.stats.hit_tokens == 52 + 60


def test_runs_of_one_generator_have_the_factors_of_their_own_limits(monkeypatch):
    """Factors are those of the run, whatever an earlier run of the generator had."""
    monkeypatch.setitem(FAMILIES, "longrope", LENGTHS["longrope"])
    model = tiny("longrope")
    fresh = [length_run(tiny("longrope"), 52, max_model_len=longest) for longest in (64, 128)]
    generators = [HuggingFace(model) for _ in range(2)]
    again = [
        length_run(model, 52, generator=generator, max_model_len=longest)
        for generator, longest in zip(generators, (64, 128), strict=True)
    ]
    assert [run.outputs for run in again] == [run.outputs for run in fresh]
    assert fresh[0].outputs != fresh[1].outputs
    # Tiers keep the K/V of both apart.
    assert generators[0].identity() != generators[1].identity()


def test_tools_go_through_the_chat_template(tokenizer):
    """The template gets the tools, and calls of them in a message; without tools none."""
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.name }} {% endfor %}"
        "{% for m in messages %}{{ m.content }} {% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    generator = HuggingFace(tiny("llama"), tokenizer)
    call = {"function": {"name": "b", "arguments": {"city": "c"}}}
    messages = [{"role": "assistant", "content": "a", "tool_calls": [call]}]
    tokens = [tokenizer.encode(text) for text in ("a c", "b a c")]
    assert generator.encode_chat(messages) == tokens[0]
    assert generator.encode_chat(messages, [{"name": "b"}]) == tokens[1]


def test_a_chat_that_the_template_refuses(tokenizer):
    """A template that raises is an InputError with its message, not a failure of the plugin."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    generator = HuggingFace(tiny("llama"), tokenizer)
    assert generator.encode_chat([{"role": "user", "content": "a"}]) == tokenizer.encode("a")
    with pytest.raises(InputError, match=r"template of the model refuses .*: no system"):
        generator.encode_chat([{"role": "system", "content": "a"}])
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(InputError, match=r"template of the model refuses .*: division by zero"):
        generator.encode_chat([{"role": "user", "content": "a"}])


def test_texts_have_no_special_tokens(tokenizer):
    """Special tokens are no part of a text, as in vLLM unless a call asks for them."""
    generator = HuggingFace(tiny("llama"), tokenizer=tokenizer)
    assert generator.decode([2, tokenizer.unk_token_id, 1]) == "cache a"
