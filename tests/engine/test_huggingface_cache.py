"""`PagedCache`: Hugging Face models generate the same through paged blocks."""

from itertools import cycle

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from helpers.caches import Lines  # noqa: E402
from helpers.hugging import (  # noqa: E402
    CACHE,
    FAMILIES,
    LENGTHS,
    SIZES,
    Poisoned,
    longrope_fixed,
    padded,
    paged_cache,
    prompt,
    tiny,
)
from helpers.paged import Paged  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    FuyuConfig,
    FuyuForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
)

from kvcore import InputError, KVCache, OutOfBlocks  # noqa: E402
from kvcore.plugins import resolve  # noqa: E402
from kvcore.testing.dense import loaded  # noqa: E402
from kvcore_engine.backend import TorchCPU  # noqa: E402
from kvcore_engine.generator import HuggingFace  # noqa: E402
from kvcore_engine.generator._hf_model import PackedCache  # noqa: E402
from kvcore_engine.generator.hf_cache import PagedCache  # noqa: E402
from kvcore_tiers.hierarchy import Tiers  # noqa: E402

GREEDY = {"do_sample": False, "max_new_tokens": 12}


def generated(model, ids, paged=None, **options):
    """Return the tokens that `model` generates with its own cache, or through `paged`."""
    options = GREEDY | {"attention_mask": torch.ones_like(ids)} | options
    if paged is None:
        return model.generate(ids, **{CACHE: DynamicCache(config=model.config)}, **options)
    with paged.attached(model):
        return model.generate(ids, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "block_size"), [*zip(FAMILIES, cycle([1, 4, 17]), strict=False)]
)
def test_tokens_equal_those_of_the_dynamic_cache(family, block_size):
    """Greedy tokens equal those of transformers' own cache, for any block size and window.

    Blocks of a size are the same for all families: some with windows and some without have it.
    """
    model, ids = tiny(family), prompt(11)
    expected = generated(model, ids)
    paged = paged_cache(blocks=64, block_size=block_size)
    assert generated(model, ids, paged).tolist() == expected.tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("given", ["call", "config"])
def test_texts_without_a_cache_of_their_own_hit_their_blocks(given, options):
    """With `use_cache=False` each step gives the whole text, and hits what the last one stored.

    Fine-tuned models are often saved with it.
    """
    model, ids, paged = tiny("llama"), prompt(11), paged_cache(block_size=4)
    expected = generated(model, ids, **options)
    if given == "config":
        model.generation_config.use_cache = False
    else:
        options = options | {"use_cache": False}
    assert generated(model, ids, paged, **options).tolist() == expected.tolist()
    assert paged.cache.stats.hit_tokens > 11


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_call_without_use_cache_returns_no_cache(return_dict):
    """The output of `model(ids, use_cache=False)` has no batch, be it a tuple or not."""
    model, paged = tiny("llama"), paged_cache()
    with paged.attached(model):
        output = model(prompt(5), use_cache=False, return_dict=return_dict)
    assert len(output) == 1


RETENTIONS = (
    "h2o:budget=8",
    "expected:budget=8,sinks=1,queries=4",
    "window:tokens=6,sinks=2",
    "window:tokens=6,sinks=2,positions=cache",
    "kvmerger:budget=8,threshold=0",
    "quest:budget=8,page=4,dense_layers=0",
)


@pytest.mark.parametrize("family", ["llama", "gemma3-mixed"])
@pytest.mark.parametrize("retention", RETENTIONS)
def test_retention_keeps_and_reads_what_it_does_in_kvcores_engine(family, retention):
    """Rows of a batch keep and read the same as each prompt alone in kvcore's own engine."""
    ids, mask = padded(17, 9)
    paged = PagedCache(KVCache(64, 4, retention=retention, ids=True), Poisoned())
    found = generated(tiny(family), ids, paged, attention_mask=mask)[:, ids.shape[1] :]
    alone = Paged(loaded(HuggingFace(tiny(family))), 64, 4, resolve("retention", retention))
    for row, real, output in zip(ids, mask, found, strict=True):
        seq = alone.open(row[real.bool()].tolist())
        alone.step({seq: alone.texts[seq].left - 1})
        alone.run(seq, output=12)
        assert alone.texts[seq].tokens[-12:] == output.tolist()
        assert bool(seq.dropped_tokens) != retention.startswith("quest")


def test_beam_search_compacts_under_retention():
    """Beam search under a retention policy compacts several times and keeps integrity."""
    model, ids = tiny("llama"), prompt(13)
    paged = PagedCache(KVCache(64, 4, retention="h2o:budget=8", ids=True), Poisoned())
    generated(model, ids, paged, num_beams=3)
    assert paged.cache.stats.compactions > 1
    paged.cache.check_integrity()


def test_a_shared_prefix_is_not_computed_again():
    """A second prompt hits the blocks that it shares with the first."""
    model, paged = tiny("llama"), paged_cache(block_size=4)
    first = prompt(21)
    second = torch.cat([first[:, :13], prompt(6, seed=5)], dim=1)
    expected = generated(model, second)
    with paged.attached(model):
        model.generate(first, attention_mask=torch.ones_like(first), **GREEDY)
        found = model.generate(second, attention_mask=torch.ones_like(second), **GREEDY)
    assert found.tolist() == expected.tolist()
    assert paged.cache.stats.hit_tokens == 12


@pytest.mark.parametrize("kind", LENGTHS)
def test_frequencies_that_change_with_the_length_bound_a_batch(monkeypatch, kind):
    """A step beyond the constant length is refused before it is cached; the rest is right."""
    monkeypatch.setitem(FAMILIES, kind, LENGTHS[kind])
    model, paged, ids = tiny(kind), paged_cache(block_size=4), prompt(90)
    within = ids[:, :52]
    expected = generated(model, within)
    for too_long, more in ((ids, 1), (within, 14)):
        with pytest.raises(InputError, match=f"'{kind}'.* beyond 64 tokens"):
            generated(model, too_long, paged, max_new_tokens=more)
        assert generated(model, within, paged).tolist() == expected.tolist()
    paged.cache.check_integrity()


def test_longrope_beyond_its_original_length_has_its_long_factors_throughout(monkeypatch):
    """With a longer `max_model_len` short and long texts share blocks of long factors."""
    monkeypatch.setitem(FAMILIES, "longrope", LENGTHS["longrope"])
    model, ids = tiny("longrope"), prompt(90)
    before = generated(model, ids[:, :52])
    with longrope_fixed(model):
        expected = [generated(model, ids[:, :tokens]) for tokens in (52, 60, 90)]
    paged = PagedCache(KVCache(64, 4, ids=True), Poisoned(), max_model_len=102)
    found = [generated(model, ids[:, :tokens], paged) for tokens in (52, 60, 90)]
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    assert paged.cache.stats.hit_tokens == 52 + 60
    assert generated(model, ids[:, :52]).tolist() == before.tolist() != found[0].tolist()


@pytest.mark.parametrize("family", ["llama", "longrope"])
def test_no_text_is_longer_than_the_max_model_len(monkeypatch, family):
    """A step beyond `max_model_len` is refused, whatever the model."""
    monkeypatch.setitem(FAMILIES, "longrope", LENGTHS["longrope"])
    paged = PagedCache(KVCache(64, 4, ids=True), Poisoned(), max_model_len=80)
    with pytest.raises(InputError, match=r"81 tokens .*max_model_len=80: give shorter texts"):
        generated(tiny(family), prompt(75), paged)
    with pytest.raises(InputError, match="max_model_len=0: give whole tokens"):
        PagedCache(KVCache(64, 4, ids=True), Poisoned(), max_model_len=0)


def test_blocks_hit_in_a_later_attachment():
    """Cached blocks can be hit in a later attachment to the same model."""
    model, paged, ids = tiny("llama"), paged_cache(block_size=4), prompt(12)
    first = generated(model, ids, paged)
    assert generated(model, ids, paged).tolist() == first.tolist()
    assert paged.cache.stats.hit_tokens == 8


def test_an_attachment_leaves_the_model_unchanged():
    """After the attachment a model has its own attention, and generates as before."""
    model, ids = tiny("llama"), prompt(8)
    before, expected = model.config._attn_implementation, generated(model, ids)
    generated(model, ids, paged_cache())
    assert model.config._attn_implementation == before
    assert generated(model, ids).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed"])
def test_beams_are_forks(family):
    """Beam search finds the same beams, with forks, pruning and copy-on-write.

    A beam that is pruned closes its sequence before the end.
    """
    model, trace = tiny(family), Lines()
    ids, mask = padded(10, 6)
    options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
    paged = PagedCache(KVCache(128, 4, ids=True, trace=trace), Poisoned())
    found = generated(model, ids, paged, **options)
    assert found.tolist() == generated(model, ids, **options).tolist()
    paged.cache.check_integrity()
    events = trace.events()
    assert {"FORK", "COPY"} <= set(events)
    assert "FREE" in events[: len(events) - events[::-1].index("FORK")]


def test_samples_of_one_prompt_share_its_blocks():
    """Parallel samples fork one prefill, and equal those of transformers' own cache."""
    model, ids, paged = tiny("llama"), prompt(16), paged_cache(blocks=64)
    options = {"do_sample": True, "num_return_sequences": 4}
    torch.manual_seed(3)
    expected = generated(model, ids, **options)
    torch.manual_seed(3)
    assert generated(model, ids, paged, **options).tolist() == expected.tolist()
    assert paged.cache.stats.requests == 1


def test_assisted_generation_rolls_back():
    """Prompt lookup rolls rejected drafts back, and generates the same tokens."""
    model, ids, trace = tiny("llama"), prompt(6).repeat(1, 3), Lines()
    paged = PagedCache(KVCache(64, 1, ids=True, trace=trace), Poisoned())
    options = {"prompt_lookup_num_tokens": 3}
    found = generated(model, ids, paged, **options)
    assert found.tolist() == generated(model, ids).tolist()
    assert "rollback" in [line["reason"] for line in trace.of("FREE")]
    paged.cache.check_integrity()


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3-mixed"])
def test_direct_calls_on_parts_give_the_logits_of_one_call(family):
    """Two direct calls on parts of a text give the logits of one call on the whole."""
    model, ids, paged = tiny(family), prompt(15), paged_cache()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with paged.attached(model):
            batch = paged.batch()
            first = model(ids[:, :9], **{CACHE: batch}).logits
            rest = model(ids[:, 9:], **{CACHE: batch}).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_logits_beside_padding_equal_a_dense_batch(family, counted):
    """Tokens beside padding have the logits of a dense batch, with and without positions."""
    model, paged = tiny(family), paged_cache()
    ids, mask = padded(9, 4, 6)
    inputs = {"attention_mask": mask}
    if counted:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    real = mask.bool()
    with torch.no_grad():
        expected = model(ids, use_cache=False, **inputs).logits[real]
        with paged.attached(model):
            found = model(ids, **inputs).logits[real]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_prompt_at_other_positions_gets_no_hit():
    """A prompt at other positions gets no hit, since its K/V differ."""
    model, paged, ids = tiny("llama"), paged_cache(), prompt(12)
    shifted = {"position_ids": torch.arange(3, 15)[None], "logits_to_keep": 1}
    with torch.no_grad():
        expected = model(ids, use_cache=False, **shifted).logits
        with paged.attached(model):
            model(ids, logits_to_keep=1)
            found = model(ids, **shifted).logits
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert paged.cache.stats.hit_tokens == 0


ROTARY_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_texts_of_a_model_of_images_share_blocks(name):
    """Texts whose positions have a row for each axis of an image generate as without blocks."""
    sizes = SIZES | {"rope_parameters": ROTARY_AXES, "head_dim": 8, "initializer_range": 0.4}
    config = getattr(transformers, f"{name}Config")(
        text_config=sizes, vision_config={"depth": 1, "num_heads": 2, "hidden_size": 32},
        image_token_id=96, video_token_id=95, vision_start_token_id=94, vision_end_token_id=93,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).double().eval()
    ids, mask = padded(20, 9, 13)
    ids = ids.remainder(90)
    paged, expected = paged_cache(), generated(model, ids, attention_mask=mask)
    for hits in (0, 16 + 8 + 12):
        assert generated(model, ids, paged, attention_mask=mask).equal(expected)
        assert paged.cache.stats.hit_tokens == hits


def test_images_are_computed_with_their_prompts():
    """A prompt with an image generates as without blocks, and is shared with no other."""
    sizes = SIZES | {"num_key_value_heads": 4, "initializer_range": 0.4}
    config = FuyuConfig(
        **sizes, text_config=sizes | {"model_type": "persimmon"}, patch_size=4, num_channels=3,
        image_size=8, image_token_id=96,
    )  # fmt: skip
    torch.manual_seed(0)
    model, paged = FuyuForCausalLM(config).double().eval(), paged_cache()
    ids = torch.tensor([[5, 9, *[96] * 4, *range(11, 17)]])
    images = torch.randn((2, 1, 4, 48), dtype=torch.float64)
    expected = [generated(model, ids, pixel_values=image) for image in images]
    assert not expected[0].equal(expected[1])
    for image, tokens in zip(images, expected, strict=True):
        assert generated(model, ids, paged, pixel_values=image).equal(tokens)
    assert paged.cache.stats.lookup_blocks == 0


def test_embeddings_generate_the_same_without_lookups():
    """A prompt of embeddings generates the same tokens, and looks up no blocks."""
    model, ids = tiny("llama"), prompt(9)
    embeds = model.get_input_embeddings()(ids).detach()
    mask = torch.ones_like(ids)
    options = GREEDY | {"inputs_embeds": embeds, "attention_mask": mask}
    expected = model.generate(**options)
    paged = paged_cache()
    with paged.attached(model):
        found = model.generate(**options)
    assert found.tolist() == expected.tolist()
    assert paged.cache.stats.lookup_blocks == 0


def test_a_second_generation_continues_the_batch():
    """A second generation in one batch continues the first with the same tokens."""
    model, paged, ids = tiny("llama"), paged_cache(), prompt(7)
    expected = generated(model, ids, max_new_tokens=12)
    with paged.attached(model):
        batch = paged.batch()
        half = model.generate(ids, **{CACHE: batch}, do_sample=False, max_new_tokens=6)
        whole = model.generate(half, **{CACHE: batch}, do_sample=False, max_new_tokens=6)
    assert whole.tolist() == expected.tolist()


def test_rows_can_be_repeated_and_selected():
    """A batch can repeat its rows as forks, and keep some of its rows."""
    model, paged, ids = tiny("llama"), paged_cache(), prompt(9)
    with paged.attached(model), torch.no_grad():
        batch = paged.batch()
        model(ids, **{CACHE: batch})
        batch.batch_repeat_interleave(3)
        assert len(batch.sequences) == 3
        batch.batch_select_indices(torch.tensor([2]))
        found = model(ids[:, :1], **{CACHE: batch}).logits
    with torch.no_grad():
        expected = model(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert not paged.cache.sequences


def test_out_of_blocks_leaves_all_blocks_available():
    """A batch that does not fit raises OutOfBlocks, and all blocks are available again."""
    model, paged = tiny("llama"), paged_cache(blocks=4, block_size=4)
    with pytest.raises(OutOfBlocks):
        generated(model, prompt(14), paged)
    assert not paged.cache.sequences
    assert paged.cache.available_blocks == 4
    paged.cache.check_integrity()


def test_padding_on_the_right_is_refused():
    """Padding on the right raises InputError that names the side to pad."""
    ids, mask = padded(9, 3)
    with pytest.raises(InputError, match="pad on the left"):
        generated(tiny("llama"), ids.flip(1), paged_cache(), attention_mask=mask.flip(1))


def test_another_model_is_refused():
    """Attaching a second model to one cache raises InputError."""
    paged = paged_cache()
    generated(tiny("llama"), prompt(5), paged)
    with pytest.raises(InputError, match="another model"), paged.attached(tiny("llama")):
        pass


def test_a_body_is_found_under_a_wrong_name():
    """Llama 4, whose `base_model` is the whole model, generates as without blocks."""
    config = Llama4TextConfig(
        **SIZES | {"initializer_range": 0.4}, head_dim=8, layer_types=["full_attention"] * 3,
        num_local_experts=2, intermediate_size_mlp=48,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = Llama4ForCausalLM(config).double().eval(), prompt(20)
    assert model.base_model is model
    assert generated(model, ids, paged_cache()).equal(generated(model, ids))


def test_a_model_without_a_body_is_refused(monkeypatch):
    """A model whose body is not told apart from its head raises InputError when attached."""
    model = tiny("gpt2")
    monkeypatch.setattr(type(model), "base_model_prefix", "none")
    message = "has no `base_model`; generate in the serving loop"
    with pytest.raises(InputError, match=message), paged_cache().attached(model):
        pass


def test_a_model_on_another_device_is_refused():
    """A model on another device than the blocks raises InputError with its device."""
    model = tiny("llama").to("meta")
    with pytest.raises(InputError, match="meta"), paged_cache().attached(model):
        pass


@pytest.mark.parametrize(("other", "name"), [(torch.nn.Linear(2, 2), "Linear"), ([], "list")])
def test_what_is_no_transformers_model_is_refused(other, name):
    """An object that is no transformers model raises InputError with the name of its class."""
    message = f"{name} is no transformers model"
    with pytest.raises(InputError, match=message), paged_cache().attached(other):
        pass


def test_a_refused_model_leaves_the_cache_to_another(monkeypatch):
    """A model that cannot attend through a paged cache takes no cache."""
    refused, paged, ids = tiny("llama"), paged_cache(), prompt(5)
    monkeypatch.setattr(refused, "_supports_attention_backend", False)
    with pytest.raises(InputError, match="AttentionInterface"), paged.attached(refused):
        pass
    assert generated(tiny("llama"), ids, paged).equal(generated(tiny("llama"), ids))


def test_a_batch_of_another_attachment_is_refused():
    """A batch of another cache, or of an attachment that has ended, raises InputError."""
    model, paged, other, ids = tiny("llama"), paged_cache(), paged_cache(), prompt(5)
    with paged.attached(model):
        ended = paged.batch()
    with paged.attached(model), other.attached(tiny("llama")):
        for batch in (ended, other.batch()):
            with pytest.raises(InputError, match="batch is of another attachment"):
                model(ids, **{CACHE: batch})


@pytest.mark.parametrize("same", [True, False])
def test_a_second_attachment_is_refused(same):
    """A second attachment inside the first, to any paged cache, raises InputError."""
    model, paged = tiny("llama"), paged_cache()
    second = paged if same else paged_cache()
    with paged.attached(model), pytest.raises(InputError, match="is attached"):  # noqa: SIM117
        with second.attached(model):
            pass
    generated(model, prompt(5), second)


def test_a_cache_without_ids_is_refused():
    """A cache without block ids raises InputError that names the missing argument."""
    with pytest.raises(InputError, match="ids=True"):
        PagedCache(KVCache(8), TorchCPU())


def test_a_batch_needs_an_attached_model():
    """`batch()` outside an attachment raises InputError."""
    with pytest.raises(InputError, match="attached"):
        paged_cache().batch()


def test_a_filled_foreign_cache_is_refused():
    """A filled cache of transformers raises InputError, since its K/V are not in blocks."""
    model, ids = tiny("llama"), prompt(5)
    with torch.no_grad():
        filled = model(ids, use_cache=True)[CACHE]
    with paged_cache().attached(model), pytest.raises(InputError, match="DynamicCache"):
        model(ids, **{CACHE: filled})


def test_a_batch_of_another_size_is_refused():
    """Input with another number of rows than the batch raises InputError."""
    model, paged, ids = tiny("llama"), paged_cache(), prompt(5)
    with paged.attached(model), torch.no_grad():
        batch = paged.batch()
        model(ids, **{CACHE: batch})
        with pytest.raises(InputError, match="2 rows"):
            model(ids.repeat(2, 1), **{CACHE: batch})


@pytest.mark.parametrize("shape", [(1, 3), (1, 5, 5)])
def test_a_mask_of_another_shape_is_refused(shape):
    """An attention mask that does not cover exactly the tokens raises InputError."""
    with (
        paged_cache().attached(model := tiny("llama")),
        pytest.raises(InputError, match="mask"),
    ):
        model(prompt(5), attention_mask=torch.ones(shape))


def test_a_mask_that_hides_stored_tokens_is_refused():
    """A mask that hides tokens stored before raises InputError."""
    model, paged, ids = tiny("llama"), paged_cache(), prompt(5)
    with paged.attached(model), torch.no_grad():
        batch = paged.batch()
        model(ids, **{CACHE: batch})
        mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
        with pytest.raises(InputError, match="hides other tokens"):
            model(ids[:, :1], **{CACHE: batch}, attention_mask=mask)


def test_attention_without_a_cache_is_refused():
    """A call of the model's body without its paged cache raises InputError.

    It says how to call the model, and what it is if that is how it was called.
    """
    model, paged = tiny("llama"), paged_cache()
    message = r"got no paged cache: call the whole model.*does not pass the cache on"
    with paged.attached(model), pytest.raises(InputError, match=message):
        model.model(prompt(3))


@pytest.mark.parametrize(
    ("layer", "copied", "new"), [(1, False, True), (2, False, False), (1, True, False)]
)
def test_new_keys_and_values_are_attended_to_once(layer, copied, new):
    """K/V that a layer stores are new once, under its number, and as the very tensors."""
    cache = PackedCache(lambda *_, **__: None)
    keys, values = cache.update(torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 1)
    attended = values.clone() if copied else values
    assert cache.is_new(layer, keys, attended) is new
    assert not cache.is_new(1, keys, values)


def test_a_model_in_training_mode_is_refused():
    """A model in training mode raises InputError that names `model.eval`."""
    model = tiny("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with paged_cache().attached(model), pytest.raises(InputError, match=r"model\.eval"):
        model(prompt(3))


def test_tiers_are_refused():
    """A cache with tiers raises InputError, since a paged cache moves no blocks to tiers."""
    cache = KVCache(8, 4, ids=True)
    Tiers(cache, ["host:memory=1MiB"], 64, ids=True)
    with pytest.raises(InputError, match="make its cache without them"):
        PagedCache(cache, TorchCPU())


def test_a_backend_has_a_name_here_too():
    """As in `kvcore.run`; what is no backend is refused, not met later."""
    assert PagedCache(KVCache(8, ids=True), "torch-cpu").backend.name == "torch-cpu"
    assert PagedCache(KVCache(8, ids=True), TorchCPU).backend.name == "torch-cpu"
    with pytest.raises(InputError, match="no backend plugin is named 'torch'"):
        PagedCache(KVCache(8, ids=True), "torch")
