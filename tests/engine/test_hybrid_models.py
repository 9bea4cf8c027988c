"""Hugging Face models with windows and states, generated through cache groups."""

from functools import cache
from itertools import pairwise

import attrs
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from helpers.engine import decided  # noqa: E402
from helpers.hugging import CACHE, HYBRIDS, STATES, Poisoned, padded, prompt, tiny  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

import kvcore  # noqa: E402
from kvcore import GroupedCache, InputError, KVCache, groups_of, run  # noqa: E402
from kvcore.config.values import as_checkpoint  # noqa: E402
from kvcore.engine import RaggedBatch  # noqa: E402
from kvcore.request import text_request  # noqa: E402
from kvcore.serving import Batching  # noqa: E402
from kvcore.testing.dense import DenseCache, Text, advance, loaded  # noqa: E402
from kvcore.workloads import WorkloadSample  # noqa: E402
from kvcore_engine.generator import HuggingFace  # noqa: E402
from kvcore_engine.generator._hf_model import spec_of  # noqa: E402
from kvcore_engine.generator.hf_cache import PagedCache  # noqa: E402
from kvcore_plugins.workload import Mooncake  # noqa: E402

KEY = 4
OUTPUT = 5
SECOND = 10**9


def prompts():
    """Return prompts with equal beginnings, some at the ends of blocks, and another."""
    long = prompt(70, seed=1)
    turns = [torch.cat([long[:, :n], prompt(9, seed=n)], 1) for n in (33, 48, 70)]
    return [long, *turns, long, turns[1][:, :50], prompt(1)]


def requests(every, arrivals, salts=None):
    """Return a request for each prompt; those of different salts share nothing."""
    return [
        text_request(
            n, ids[0].tolist(), output=OUTPUT, block_size=KEY, arrival=arrival,
            salt=str(n) if salts else None,
        )
        for n, (ids, arrival) in enumerate(zip(every, arrivals, strict=True))
    ]  # fmt: skip


def grouped(generator, blocks=200, interval=0):
    """Return a cache with the groups of a generator's model."""
    groups = groups_of(generator.spec, KEY, "fp32").groups
    return GroupedCache(groups, blocks, checkpoint=as_checkpoint(interval), key_tokens=KEY)


def generated(model, every):
    """Return what transformers itself generates after each prompt."""
    options = {"do_sample": False, "max_new_tokens": OUTPUT}
    texts = [
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0] for ids in every
    ]
    return {n: text[-OUTPUT:].tolist() for n, text in enumerate(texts)}


@cache
def expected(family):
    """Return what transformers generates with a family after each of `prompts()`."""
    return generated(tiny(family), prompts())


def serve(generator, every, cache, apart=SECOND, salts=None, **limits):
    """Serve prompts on tensors, each `apart` ns after the one before; return the result."""
    limits = {"max_tokens": 32, "max_seqs": 8} | limits
    return run(
        requests(every, [n * apart for n in range(len(every))], salts),
        cache=cache,
        generator=generator,
        backend=Poisoned(),
        dtype="fp64",
        batching=Batching(**limits),
    )


@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_equal_those_of_transformers(family):
    """Prompts that resume in a cached window or at a cached state have `generate`'s tokens."""
    generator = HuggingFace(tiny(family))
    cache = grouped(generator)
    assert serve(generator, prompts(), cache).outputs == expected(family)
    assert cache.stats.hit_tokens >= 96
    cache.check_integrity()


@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_are_the_same_under_pressure(family):
    """Evictions, preemptions, and steps with many sequences change no token."""
    generator = HuggingFace(tiny(family))
    largest = grouped(generator)
    largest.in_flight_tokens = 24
    cache = grouped(generator, largest.most_blocks(80 + OUTPUT) * 3 // 2, None)
    result = serve(generator, prompts(), cache, apart=1, max_tokens=24)
    assert result.outputs == expected(family)
    assert cache.evicted_blocks
    # What these keep of running requests, windows alone or K/V of few layers, has room.
    assert sum(result.log.recomputes) or family in {
        "mistral-window", "phimoe-window", "jamba",
    }  # fmt: skip
    cache.check_integrity()


class Recorded(HuggingFace):
    """A generator that keeps the logits of each generated token, by seed and index."""

    def logits(self, batch: RaggedBatch, attend):
        """Return the logits of a step, and keep them."""
        rows = super().logits(batch, attend)
        drawn = [
            mark
            for mark in zip(batch.seeds, batch.output_indices, strict=True)
            if mark[1] is not None
        ]
        self.kept = getattr(self, "kept", {}) | dict(zip(drawn, rows, strict=True))
        return rows


@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_after_a_hit_are_those_without_a_cache(family, capsys):
    """A prompt that resumes after small chunks has the logits of one that is computed at once.

    They differ by rounding, far less than the least margin between the two likeliest tokens.
    """
    model, every, kept = tiny(family), prompts()[:4], []
    for salts, chunk in ((False, 16), (True, 256)):
        generator = Recorded(model)
        cache = grouped(generator)
        serve(generator, every, cache, salts=salts, max_tokens=chunk)
        assert bool(cache.stats.hit_tokens) is not salts
        kept.append(generator.kept)
    resumed, alone = kept
    assert resumed.keys() == alone.keys()
    difference = max(float((resumed[mark] - alone[mark]).abs().max()) for mark in alone)
    margin = min(float(-rows.topk(2).values.diff()) for rows in alone.values())
    with capsys.disabled():
        print(  # noqa: T201 - how close rounding comes is worth seeing
            f"\n{family}: largest difference {difference:.1e}, least margin {margin:.1e}"
        )
    assert difference < margin / 2


@pytest.mark.parametrize("family", ["gemma3-mixed", "qwen3-next"])
def test_a_run_on_tensors_decides_as_the_simulation(family, tmp_path):
    """`kvcore.run` of a hybrid model has the trace of `kvcore.simulate` with its spec."""
    generator = HuggingFace(tiny(family, dtype=torch.float32))
    sample = WorkloadSample(Mooncake(), limit=12, scale=64)
    options = {"blocks": 110, "block_size": 8, "checkpoint": "chunk"}
    ran, simulated = tmp_path / "run.jsonl", tmp_path / "simulated.jsonl"
    result = kvcore.run(sample, generator=generator, trace=ran, **options)
    assert isinstance(result.cache, GroupedCache)
    options |= {"model": generator.spec, "codec": "fp32", "tensor_parallel": 1}
    kvcore.simulate(sample, trace=simulated, **options)
    lines = decided(ran.read_bytes())
    assert lines == decided(simulated.read_bytes())
    assert any(b'"EVICT"' in line or b'"passed"' in line for line in lines)


def test_prompts_are_continued_in_groups():
    """Texts go through cache groups too, in which their outputs get no keys."""
    model = tiny("qwen3-next", dtype=torch.float32)
    text = " ".join(f"w{n}" for n in range(40))
    result = kvcore.run(
        prompts=[text, text], max_output=OUTPUT, generator=HuggingFace(model), seed=1
    )
    first, second = result.outputs.values()
    assert first == second
    assert len(first) == OUTPUT


@pytest.mark.parametrize("family", STATES)
def test_a_cached_state_is_never_written_again(family):
    """Prompts that resume at one state, in one step, leave it as it is for later ones."""
    model, long = tiny(family), prompt(70, seed=1)
    every = [long, *(torch.cat([long[:, :66], prompt(5, seed=n)], 1) for n in range(3))] * 2
    wanted = generated(model, every)
    generator = HuggingFace(model)
    cache = grouped(generator)
    arrivals = [0, SECOND, SECOND, SECOND, *[2 * SECOND] * 4]
    result = run(
        requests(every, arrivals), cache=cache, generator=generator, backend=Poisoned(),
        dtype="fp64", batching=Batching(max_tokens=256, max_seqs=8),
    )  # fmt: skip
    assert result.outputs == wanted
    assert cache.stats.hit_tokens >= 7 * 48


@pytest.mark.parametrize("family", HYBRIDS)
def test_an_attached_model_generates_through_groups(family):
    """`generate` through a `PagedCache` of groups has the tokens that it has without."""
    model, every = tiny(family), [prompts()[n] for n in (0, 3, 4)]
    options = {"do_sample": False, "max_new_tokens": OUTPUT}
    ids, mask = padded(5, 14, 9)
    wanted = generated(model, every), model.generate(ids, attention_mask=mask, **options)
    whole = model(every[0]).logits
    cache = GroupedCache(groups_of(spec_of(model), KEY, "fp32").groups, 200)
    with PagedCache(cache, Poisoned()).attached(model):
        assert generated(model, every) == wanted[0]
        assert model.generate(ids, attention_mask=mask, **options).equal(wanted[1])
        assert model(every[0]).logits.allclose(whole, atol=1e-5)
    assert cache.stats.hit_tokens >= 48
    assert not cache.sequences
    cache.check_integrity()
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_attached_body_computes_through_groups():
    """A model without a head, which does not generate, has the states that it has without."""
    body, ids = tiny("gemma3-mixed").base_model, prompt(20)
    wanted = body(ids).last_hidden_state
    cache = GroupedCache(groups_of(spec_of(body), KEY, "fp32").groups, 200)
    with PagedCache(cache, Poisoned()).attached(body):
        assert body(ids).last_hidden_state.allclose(wanted)


# What is refused, before anything is computed.


def test_states_need_cache_groups():
    """A model with states is refused in one group, by the executor and by other caches."""
    model = tiny("qwen3-next")
    cache = KVCache(100, KEY, ids=True)
    with pytest.raises(InputError, match=r"keep different things.*one paged K/V"):
        run([], cache=cache, generator=HuggingFace(model), backend=Poisoned(), dtype="fp64")
    generator = loaded(HuggingFace(model))
    with pytest.raises(InputError, match="keeps states, which only cache groups have room for"):
        advance(generator, [Text([3, 4])], [2], DenseCache().attend([0], [2]))


def test_an_attached_model_with_states_needs_groups():
    """A `PagedCache` without groups refuses a model with states."""
    paged = PagedCache(KVCache(10, KEY, ids=True), Poisoned())
    model = tiny("qwen3-next")
    with pytest.raises(InputError, match="keep different things"), paged.attached(model):
        pass


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"num_beams": 3}, "beam search"),
        ({"num_beams": 2, "do_sample": True}, "beam sample"),
        ({"generation_config": GenerationConfig(num_beams=2)}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    ],
)
def test_beams_and_assisted_generation_are_refused_in_groups(options, mode):
    """Forks of sequences, and tokens taken back, are refused before anything is computed."""
    model, ids = tiny("gemma3-mixed"), prompt(20).repeat(1, 2)
    cache = GroupedCache(groups_of(spec_of(model), KEY, "fp32").groups, 200)
    with PagedCache(cache, Poisoned()).attached(model):
        with pytest.raises(InputError, match=f"^{mode} with cache groups, which neither fork"):
            model.generate(ids, max_new_tokens=24, **options)
        assert not cache.stats.requests
    assert "generate" not in vars(model)


def test_a_model_keeps_methods_of_its_own():
    """After an attachment a model and its layers have the methods that they had before."""
    model = tiny("qwen3-next")
    (layer, *_) = (module for module in model.modules() if hasattr(module, "conv1d"))
    model.generate, layer.forward = own = model.generate, layer.forward
    cache = GroupedCache(groups_of(spec_of(model), KEY, "fp32").groups, 200)
    with PagedCache(cache, Poisoned()).attached(model):
        assert (model.generate, layer.forward) != own
    assert (model.generate, layer.forward) == own


def test_rows_of_groups_are_neither_repeated_nor_cut():
    """A loop of one's own that repeats a row, or takes tokens back, is refused as well."""
    model, ids = tiny("gemma3-mixed"), prompt(20)
    cache = GroupedCache(groups_of(spec_of(model), KEY, "fp32").groups, 200)
    with PagedCache(cache, Poisoned()).attached(model) as paged:
        batch = paged.batch()
        model(ids, **{CACHE: batch})
        with pytest.raises(InputError, match="repeated rows with cache groups"):
            batch.batch_repeat_interleave(2)
        with pytest.raises(InputError, match="taken back with cache groups"):
            batch.crop(-1)
    assert not cache.sequences


def test_samples_of_one_prompt_go_through_groups():
    """Parallel samples have the tokens that they have without a cache of ours."""
    model, ids = tiny("qwen3-next"), prompt(33)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": OUTPUT}
    torch.manual_seed(0)
    wanted = model.generate(ids, **options)
    cache = GroupedCache(groups_of(spec_of(model), KEY, "fp32").groups, 200)
    torch.manual_seed(0)
    with PagedCache(cache, Poisoned()).attached(model):
        assert model.generate(ids, **options).equal(wanted)
    assert cache.stats.hit_tokens == 2 * 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "prompt-lookup"}, "drafter with cache groups, which it does not know"),
        ({"fragmentation": True}, "fragmentation with cache groups, which it does not know"),
        ({"codec": "int8"}, "codec 'int8' with model .* whose layers keep states"),
    ],
)
def test_what_groups_do_not_know_is_refused(options, message):
    """Drafts, measures of memory, and codecs of states are refused with a reason."""
    generator = HuggingFace(tiny("qwen3-next", dtype=torch.float32))
    cache = grouped(generator)
    with pytest.raises(InputError, match=message):
        run([], cache=cache, generator=generator, backend=Poisoned(), **options)


def test_a_model_with_states_has_no_other_group():
    """Where states are kept, the refusal of an option does not advise one group for all."""
    with pytest.raises(InputError, match=r"which drafter does not know: leave it out$"):
        kvcore.run(
            "mooncake", limit=2, drafter="prompt-lookup",
            generator=HuggingFace(tiny("qwen3-next", dtype=torch.float32)),
        )  # fmt: skip


@pytest.mark.parametrize("option", ["tier", "retention", "drafter"])
def test_options_that_groups_do_not_know_are_refused(option):
    """Tiers, retention and drafts are refused by their option, or run on one group."""
    value = {
        "tier": "host:memory=1MiB", "retention": "window:tokens=9", "drafter": "prompt-lookup"
    }[option]  # fmt: skip
    options = {option: value, "limit": 2, "generator": HuggingFace(tiny("gemma3-mixed"))}
    with pytest.raises(
        InputError, match=f"{option}.*in cache groups, which {option} does not know"
    ):
        kvcore.run("mooncake", **options)
    options["generator"] = HuggingFace(tiny("gemma3-mixed"))
    result = kvcore.run("mooncake", disable_hybrid_kv_cache_manager=True, **options)
    assert len(result.outputs) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 2}, "are not those of model"),
        ({"block_size": 4}, r"have blocks of \[4, "),
        ({"window": 8, "kind": "window"}, "are not those of model"),
    ],
)
def test_groups_of_another_model_are_refused(change, message):
    """Groups that do not have the model's layers, or blocks of several sizes, are refused."""
    generator = HuggingFace(tiny("qwen3-next"))
    first, *others = groups_of(generator.spec, KEY, "fp32").groups
    cache = GroupedCache([attrs.evolve(first, **change), *others], 100)
    with pytest.raises(InputError, match=message):
        run([], cache=cache, generator=generator, backend=Poisoned(), dtype="fp64")


def test_blocks_that_cannot_hold_a_state_are_refused():
    """Blocks with fewer bytes than a state are refused with both numbers."""
    generator = HuggingFace(tiny("qwen3-next"))
    groups = [
        attrs.evolve(g, block_size=1) for g in groups_of(generator.spec, KEY, "fp32").groups
    ]
    cache = GroupedCache(groups, 100)
    with pytest.raises(InputError, match=r"a state of model .* takes .* give larger blocks"):
        run([], cache=cache, generator=generator, backend=Poisoned(), dtype="fp64")


def test_layers_of_a_kind_are_dealt_out_to_its_groups():
    """Neighbouring layers of a kind go to neighbouring groups, in their order."""
    from kvcore_engine.groups import GroupedLayers  # noqa: PLC0415

    generator = HuggingFace(tiny("gpt-oss"))
    windows = (6, None, 6, 6, None, 6)
    spec = attrs.evolve(generator.spec, layers=6, windows=windows)
    groups = groups_of(spec, KEY, "fp32").groups
    places = GroupedLayers.from_groups(spec, groups).attention
    for layer, (group, _) in enumerate(places):
        assert groups[group].window == windows[layer]
    assert len(set(places)) == len(places)
    own = [place for place, window in zip(places, windows, strict=True) if window]
    assert all(before[0] != after[0] for before, after in pairwise(own))


@pytest.mark.parametrize(
    ("family", "full", "windows"),
    [("gemma3-mixed", 1, 2), ("gpt-oss", 1, 2), ("qwen3-next", 1, 0), ("jamba", 2, 0)],
)
def test_reads_of_attention_are_those_of_the_layers_that_attend(family, full, windows):
    """A generated token reads all tokens in full layers, a window of 6 in others, no state."""
    model = tiny(family)
    generator = HuggingFace(model)
    result = serve(generator, [prompt(14)], grouped(generator))
    contexts = range(15, 14 + OUTPUT)
    assert result.reads.tokens == len(contexts)
    assert result.reads.layer_tokens == full * sum(contexts) + windows * 6 * len(contexts)
