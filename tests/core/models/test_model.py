"""Arithmetic of models: the errors of specs, and properties of the formulas."""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InputError
from kvcore.models.catalogue import MODELS, find_device, find_model
from kvcore.models.cost import (
    PrefillCost,
    attended_pairs,
    default_prefill_cost,
    prefill_flop,
)
from kvcore.models.memory import KVLayout
from kvcore.models.spec import DeviceSpec, ModelSpec, bytes_of

lengths = st.integers(0, 300)
windows = st.none() | st.integers(1, 100)


def tiny(**more):
    """Return a model small enough to count by hand: 16 numbers per token and layer."""
    numbers = {
        "name": "tiny",
        "layers": 3,
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "hidden_size": 16,
        "parameters": 1000,
    }
    return ModelSpec(**(numbers | more))


def device(**more):
    """Return a device of round numbers."""
    numbers = {"hbm_bytes": 10_000, "bandwidth": 100, "flops": 1000, "host_link": 10}
    return DeviceSpec(name="toy", **(numbers | more))


def test_importing_the_arithmetic_is_light():
    """Importing the specs loads neither the catalogue nor a heavy package."""
    heavy = "{'numpy', 'torch', 'click', 'rich', 'kvcore.models.catalogue'}"
    code = f"import sys, kvcore.models.spec; print({heavy} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"layers": 0}, "layers must be at least 1, not 0"),
        ({"layers": 10**23}, "layers must be at most 100,000, not 1"),
        ({"parameters": 2**60 + 1}, "parameters must be at most 1,152,921,504,606,846,976"),
        ({"experts": 10_001}, "experts must be at most 10,000, not 10001"),
        ({"parameters": -1}, "parameters must be at least 1"),
        ({"kv_heads": 3}, "4 query heads cannot share 3 K/V heads"),
        ({"windows": (None,)}, "1 attention windows for 3 layers"),
        ({"windows": (None, 0, 1)}, "an attention window must be at least 1 token"),
        ({"latent": -1}, "latent must be 0 to 2,147,483,647, not -1"),
        ({"experts": 2, "experts_per_token": 3}, "a token cannot take 3 of 2 experts"),
        ({"active_parameters": 2000}, "2000 of 1000 parameters are active"),
        ({"active_parameters": 500}, "only a model with experts"),
        ({"dtype": "fp12"}, "unknown dtype 'fp12'; known: fp32, fp16"),
        ({"expert_dtype": "fp12"}, "unknown dtype 'fp12'"),
        ({"extra_bytes": -3000}, "weights of less than 0 bytes"),
        ({"extra_expert_bytes": -1}, "weights of less than 0 bytes"),
        ({"extra_bytes": -3000, "extra_expert_bytes": 5000}, "weights of less than 0 bytes"),
        ({"extra_bytes": 10**400}, "or of more than 9,223,372,036,854,775,807"),
        ({"positions": -1}, "positions must be 0 to 9,223,372,036,854,775,807, not -1"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(fields, problem):
    """A contradictory model raises InputError with the wrong count."""
    with pytest.raises(InputError) as caught:
        tiny(**fields)
    assert problem in str(caught.value)


def test_a_device_without_bandwidth_is_refused():
    """A device with a figure of 0 raises InputError."""
    with pytest.raises(InputError, match="bandwidth must be at least 1"):
        device(bandwidth=0)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"codec": "mxfp4"}, "no codec plugin is named 'mxfp4'"),
        ({"codec": 4}, "codec=4 is no codec plugin: give a name such as 'fp16'"),
        ({"block_size": 0}, "block_size must be at least 1"),
    ],
)
def test_an_impossible_layout_is_refused(fields, problem):
    """A K/V layout with an unknown codec or a block size of 0 raises InputError."""
    with pytest.raises(InputError, match=problem):
        KVLayout(tiny(), **fields)


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "latent", "label"),
    [(4, 4, 0, "MHA"), (4, 2, 0, "GQA"), (4, 1, 0, "MQA"), (4, 4, 24, "MLA"), (1, 1, 0, "MHA")],
)
def test_attention_is_labelled_by_its_heads(query_heads, kv_heads, latent, label):
    """The label of attention follows from the K/V heads and the latent."""
    model = tiny(query_heads=query_heads, kv_heads=kv_heads, latent=latent)
    assert model.attention == label


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("fp32", 400), ("fp16", 200), ("bf16", 200), ("fp8", 100), ("int8", 100), ("int4", 50)],
)
def test_bytes_of_a_hundred_numbers(dtype, size):
    """The bytes of numbers are their bits divided by 8."""
    assert bytes_of(100, dtype) == size


@pytest.mark.parametrize(("dtype", "size"), [("mxfp4", 34), ("nvfp4", 36)])
def test_fp4_adds_a_byte_of_scale_to_its_blocks(dtype, size):
    """In mxfp4, 32 numbers take 16 bytes, and 1 byte for their scale; in nvfp4, 16 have one."""
    assert bytes_of(64, dtype) == size


def test_experts_alone_are_in_nvfp4():
    """Of a mixture of experts in nvfp4, other weights have 16 bits; a dense model has none."""
    mixture = find_model("deepseek-v3").with_weights("nvfp4")
    assert (mixture.dtype, mixture.expert_dtype) == ("bf16", "nvfp4")
    dense = find_model("llama-3-8b").with_weights("nvfp4")
    assert (dense.dtype, dense.expert_dtype) == ("nvfp4", "nvfp4")


@given(lengths, lengths, windows)
def test_attended_pairs_equal_those_of_a_mask(context, tokens, window):
    """The closed form of attended pairs equals counting key by key."""
    count = sum(
        min(position + 1, window or position + 1)
        for position in range(context, context + tokens)
    )
    assert attended_pairs(context, tokens, window) == count


@given(lengths, lengths, lengths, windows)
def test_chunked_prefill_attends_to_the_same_pairs(context, first, second, window):
    """Chunked prefill attends to as many pairs as prefill in one piece."""
    whole = attended_pairs(context, first + second, window)
    chunks = attended_pairs(context, first, window)
    assert whole == chunks + attended_pairs(context + first, second, window)


def test_bytes_per_token_and_block_by_hand():
    """A token's K/V are heads x (key + value dim) x layers numbers."""
    layout = KVLayout(tiny(), "fp16", 5)
    assert layout.bytes_per_token == 2 * 8 * 3 * 2
    assert layout.bytes_per_block == 5 * layout.bytes_per_token


def test_a_latent_is_stored_in_place_of_heads():
    """A latent is stored once, in place of keys and values."""
    assert KVLayout(tiny(latent=9)).token_bytes() == 3 * 9 * 2


@given(st.integers(1, 500), st.integers(1, 40), windows)
def test_a_window_layer_keeps_the_window_in_whole_blocks(tokens, block_size, window):
    """A layer stores the smaller of request and window, in whole blocks."""
    layout = KVLayout(tiny(windows=(None, window, window)), "fp16", block_size)

    def blocks(kept):
        return -(-kept // block_size)

    kept = blocks(tokens) + 2 * blocks(min(tokens, window or tokens))
    assert layout.request_bytes(tokens) == kept * block_size * layout.token_bytes() / 3


def test_decoding_reads_no_more_than_the_window():
    """Decoding reads tokens, not blocks, up to each layer's window."""
    layout = KVLayout(tiny(windows=(None, 10, 20)), "fp16", 16)
    assert layout.read_bytes(15) == (15 + 10 + 15) * layout.token_bytes() / 3


@given(st.integers(0, 10**6), st.integers(1, 200))
def test_requests_that_fit_follow_from_blocks_that_fit(budget, tokens):
    """The requests that fit are the blocks that fit, divided by blocks per request."""
    layout = KVLayout(tiny(), "fp32", 16)
    assert layout.requests_in(budget, tokens) == layout.blocks_in(budget) // layout.blocks_for(
        tokens
    )


def moe(**more):
    """Return a model with 8 experts of 100 parameters, of which a token uses 2."""
    return tiny(active_parameters=400, experts=8, experts_per_token=2, **more)


def test_expert_parameters_follow_from_the_active_ones():
    """The parameters of all experts follow from the idle ones.

    Here 600 idle parameters are 6 of 8 experts.
    """
    assert moe().expert_parameters == 800
    assert tiny().expert_parameters == 0


def test_experts_can_have_a_dtype_of_their_own():
    """Weights of experts count in `expert_dtype`, and the others in `dtype`."""
    assert moe(expert_dtype="fp8").weight_bytes == 400 + 800
    assert moe(expert_dtype="fp8").with_weights("fp32").weight_bytes == 4000


def test_experts_that_no_token_takes_are_not_read():
    """A step reads the other weights alone."""
    assert tiny(experts=8, extra_expert_bytes=100).weight_bytes_read(3) == 2000


@pytest.mark.parametrize("name", MODELS)
def test_reads_grow_with_the_batch_and_stay_below_all_weights(name):
    """Reads of weights grow with the batch, up to all weights, for each known model."""
    model = MODELS[name]
    reads = [model.weight_bytes_read(batch) for batch in (1, 2, 8, 64, 4096)]
    assert reads == sorted(reads)
    assert reads[-1] <= model.weight_bytes


def test_prefill_flop_by_hand():
    """Prefill takes 2 FLOP per parameter and token, and the attention per pair and layer."""
    pairs = attended_pairs(10, 5) + 2 * attended_pairs(10, 5, 4)
    model = tiny(windows=(None, 4, 4))
    assert prefill_flop(model, 5, context=10) == 2 * 1000 * 5 + 4 * 2 * 8 * pairs


@given(lengths, lengths)
def test_the_prefill_cost_is_flop_over_flops(context, tokens):
    """The prefill cost is the FLOP of the formula divided by the device's FLOP/s."""
    model, gpu = tiny(windows=(None, 4, 4)), device(flops=7919)
    seconds = PrefillCost.for_model(model, gpu)(context, tokens)
    assert seconds == pytest.approx(prefill_flop(model, tokens, context) / 7919)


def test_the_default_prefill_cost_is_named():
    """The default prefill cost is that of Llama 3.1 8B on an H100."""
    cost = default_prefill_cost()
    assert (cost.model, cost.device) == ("llama-3.1-8b", "h100")
    assert cost == PrefillCost.for_model(find_model("llama-3.1-8b"), find_device("h100"))


def test_the_default_cost_of_a_block_is_constant():
    """The default costs are the same to the bit, since they order evictions."""
    cost = default_prefill_cost()
    assert cost(0, 512).hex() == "0x1.12971aa7c57bbp-7"
    assert cost(65_536, 512).hex() == "0x1.ac9583506332dp-6"


def test_a_cost_can_be_made_from_its_fields():
    """The fields of a cost are plain numbers from which an equal one can be made."""
    cost = default_prefill_cost()
    assert PrefillCost(**attrs.asdict(cost, recurse=False)) == cost
