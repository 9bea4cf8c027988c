"""The latency model `roofline`: its terms computed by hand with round numbers."""

from __future__ import annotations

import attrs
import pytest

from kvcore import InputError
from kvcore.models.catalogue import find_model
from kvcore.models.layers import LayerCache
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.serving import StepWork
from kvcore_engine.retention.quest import Quest
from kvcore_plugins.latency import Roofline
from kvcore_plugins.latency import roofline as module
from kvcore_plugins.latency.engine_times import EngineTimes, ExpertTimes, engine_times

# Weights: 2 GB. K/V: 10,240 bytes a token. FLOP: 2e9 a token and 40,960 a pair.
MODEL = ModelSpec(
    name="round",
    layers=10,
    query_heads=8,
    kv_heads=2,
    head_dim=128,
    hidden_size=1024,
    parameters=10**9,
)
DEVICE = DeviceSpec(
    name="even",
    hbm_bytes=10**11,
    bandwidth=10**12,
    flops=10**14,
    host_link=10**10,
)
PROMPT = StepWork(prefill=1000, attended_pairs=(500_500,))
DECODE = StepWork(decode=10, context=(10_000,))
NVLINK = attrs.evolve(DEVICE, link=10**11)


def roofline(model=MODEL, device=DEVICE, **options):
    """Return a model at half of the device's rates, with an overhead of 1 ms per step."""
    half = {"compute": 0.5, "bandwidth": 0.5, "overhead": 0.001, "layer_overhead": 0}
    return Roofline(model, device, **{"tensor_parallel": 1} | half | options)


def parts(**options):
    """Return the coefficients of a model, by the part of a step."""
    return roofline(**options).coefficients()


# The ps to move 6 + 20 activations of 2 bytes x 1,024 x 10 layers, at 5e11 bytes a second.
MOVED = 26 * 2 * 1024 * 10 * 2
KV = 20_480


def test_a_prompt_is_bound_by_compute():
    """A prompt takes the time of its FLOP, of which attention has 4/5 of the rate.

    Here 1,000 tokens take 40 us each (2e9 FLOP at 5e13 FLOP/s), beside 500,500 pairs.
    """
    others = 512_512_000 + 1000 * (MOVED + KV)
    assert roofline().duration(PROMPT) == 1_000_000_000 + 40_000_000_000 + others


def test_devices_share_the_work():
    """Two devices take half the time of one, except for norms and all-reduces."""
    one, two = (parts(tensor_parallel=n) for n in (1, 2))
    for kernel in ("products", "attention"):
        for name, value in one[kernel].items():
            halves = [x / 2 for x in value] if isinstance(value, list) else value / 2
            assert two[kernel][name] == halves
    assert two["activations"]["token_ps"] == (MOVED * 16 / 26) + KV / 2


@pytest.mark.parametrize(
    ("device", "devices", "token", "step"),
    [
        (NVLINK, 1, 0, 0),
        (NVLINK, 2, 40_960 / 6e10, 2 * 10 * 3e-6),
        (NVLINK, 8, 40_960 * 7 / 4 / 6e10, 2 * 10 * 3e-6),
        (DEVICE, 2, 40_960 / 6e9, 2 * 10 * 3e-6),
        (DEVICE, 4, 40_960 * 3 / 2 / 6e9 * 4, 2 * 10 * 3 * 3e-6),
    ],
)
def test_each_layer_has_two_all_reduces(device, devices, token, step):
    """Each layer has two all-reduces, at 3/5 of the link's rate.

    Without a link, more than two devices share the way by the host.
    """
    found = parts(device=device, tensor_parallel=devices)
    assert found["all_reduces"]["token_ps"] == pytest.approx(token * 1e12, rel=1e-9)
    assert found["fixed_ps"] == pytest.approx(step * 1e12, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "flops", "bytes_share", "speedup"),
    [
        ("fp8", {"fp8_flops": 2 * 10**14}, 1 / 2, 2),
        ("nvfp4", {"fp4_flops": 4 * 10**14}, 18 / 64, 4),  # 18 bytes for 32 weights
    ],
)
def test_narrow_weights(dtype, flops, bytes_share, speedup):
    """Narrow weights save reads, compute at 9/10 of the rate, and cost quantising."""
    device = attrs.evolve(DEVICE, **flops)
    wide, narrow = (parts(model=m, device=device) for m in (MODEL, MODEL.with_weights(dtype)))
    assert narrow["products"]["weights_ps"] == wide["products"]["weights_ps"] * bytes_share
    expected = wide["products"]["token_ps"] / speedup * 10 / 9
    assert narrow["products"]["token_ps"] == pytest.approx(expected, rel=1e-9)
    more = narrow["activations"]["token_ps"] - wide["activations"]["token_ps"]
    assert more == pytest.approx(MOVED * 4 / 26)
    assert narrow["fixed_ps"] == pytest.approx(10 * 14e6)


def test_the_default_times_of_llama_on_four_h100():
    """With all defaults, steps take the time computed by hand for Llama 3.1 8B on four H100."""
    flops, bandwidth = 4 * 989.5e12 * 0.8, 3.35e12 * 0.85
    token, pair = 2 * 8_030_261_248 / flops, 4 * 32 * 32 * 128 / (0.8 * flops)
    hidden = 2 * 4096 * 32
    each = 11 * hidden / bandwidth + 131_072 / (4 * bandwidth)
    each += 2 * 1.5 * hidden / (0.6 * 450e9)
    fixed = 32 * (45e-6 + 2 * 3e-6)
    prompt = StepWork(prefill=8192, attended_pairs=(8192 * 8193 // 2,))
    seconds = fixed + 8192 * (token + each) + prompt.attended_pairs[0] * pair
    assert Roofline().duration(prompt) / 1e12 == pytest.approx(seconds, rel=1e-9)
    decode = StepWork(decode=64, context=(64 * 4096,))
    read = (2 * 8_030_261_248 + 131_072 * 64 * 4096) / (4 * bandwidth)
    assert Roofline().duration(decode) / 1e12 == pytest.approx(
        fixed + 64 * each + read, rel=1e-4
    )


def test_more_devices_than_kv_heads_read_kv_no_faster():
    """With 2 K/V heads, 4 devices read K/V no faster than 2, and weights twice as fast."""
    two, four = (parts(tensor_parallel=n) for n in (2, 4))
    assert four["attention"]["context_ps"] == two["attention"]["context_ps"] == [10_240]
    assert four["products"]["weights_ps"] == two["products"]["weights_ps"] / 2 == 10**9


@pytest.mark.parametrize(
    ("dtype", "rates", "share"),
    [("nvfp4", {"fp8_flops": 2 * 10**14}, 18 / 64), ("fp8", {}, 1 / 2), ("int8", {}, 1 / 2)],
)
def test_weights_are_widened_on_a_device_without_units_for_them(dtype, rates, share):
    """Without units for their format, weights are read as such, and computed in 16 bits."""
    device = attrs.evolve(DEVICE, **rates)
    wide, narrow = (parts(model=m, device=device) for m in (MODEL, MODEL.with_weights(dtype)))
    products = {**wide["products"], "weights_ps": wide["products"]["weights_ps"] * share}
    assert narrow == {**wide, "products": products}


def test_more_devices_than_a_server_has_are_refused():
    """The links between servers are not in the model, so a larger degree is refused."""
    model = attrs.evolve(MODEL, query_heads=32, kv_heads=8)
    rack = attrs.evolve(NVLINK, server_size=72)
    assert Roofline(model, rack, tensor_parallel=32).tensor_parallel == 32
    with pytest.raises(
        InputError, match=r"tensor_parallel=16: a server has 8 x even, and link"
    ):
        Roofline(model, NVLINK, tensor_parallel=16)


@pytest.mark.parametrize("devices", [3, 6, 7])
def test_devices_that_cannot_share_the_heads_are_refused(devices):
    """The error about devices that cannot share the heads names the numbers that can."""
    model = attrs.evolve(MODEL, kv_heads=8)
    with pytest.raises(InputError, match=r"roofline: 8 .* cannot be divided .* 1, 2, 4 or 8"):
        Roofline(model=model, tensor_parallel=devices)


def test_a_draft_model_that_devices_cannot_share_lies_on_one():
    """A draft model with heads that the devices cannot share is served by one of them."""
    latency = Roofline(model="llama-3.1-8b", tensor_parallel=4)
    assert latency.for_model(find_model("qwen2.5-0.5b")).tensor_parallel == 1
    assert latency.for_model(find_model("llama-3.2-1b")).tensor_parallel == 4


def test_a_draft_model_may_have_fewer_layers_than_attend_to_all():
    """Of a draft model with fewer layers than `dense_layers`, all attend to all tokens."""
    latency = Roofline(attended=2048, selection=1 / 16, dense_layers=20)
    draft, plain = (
        each.for_model(find_model("llama-3.2-1b")) for each in (latency, Roofline())
    )
    ((_, all_read, chosen),) = draft.pieces(StepWork(decode=1, context=(0, 0)))
    assert (all_read, chosen) == (plain.pieces(DECODE)[0][1], 0)


def test_a_latent_is_not_shared():
    """With multi-head latent attention every device reads the whole latent."""
    model = attrs.evolve(MODEL, latent=512)
    one, eight = (parts(model=model, tensor_parallel=n)["attention"] for n in (1, 8))
    assert one["context_ps"] == eight["context_ps"] == [20_480]


def test_narrow_kv_is_read_at_a_lower_rate():
    """K/V in fp8 are read at 17/20 of the bandwidth, fp16 and fp32 at all of it."""
    wide, half, narrow = (
        roofline(codec=codec).pieces(DECODE)[0][1] for codec in ("fp32", "fp16", "fp8")
    )
    assert (wide, half, narrow) == (2 * KV, KV, round(KV / 2 * 20 / 17))


# 100 experts of 8,000,000 parameters, of which a token takes 10; 200,000,000 others.
MIXTURE = attrs.evolve(MODEL, experts=100, experts_per_token=10, active_parameters=280 * 10**6)
TIMES = ExpertTimes(layer=1e-5, device=1e-6, token=1e-7, bandwidth=0.5, compute=0.25)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5, 1000])
def test_routed_experts_take_times_of_their_own(monkeypatch, tokens, devices):
    """Experts are read, or computed, at rates of their own, and tokens are routed to them.

    Of the experts those are read that the tokens are expected to select.
    """
    times = EngineTimes(experts=TIMES)
    monkeypatch.setattr(module, "engine_times", lambda *_: times)
    latency = roofline(MIXTURE, NVLINK, tensor_parallel=devices)
    found = latency.coefficients()
    others = found["activations"]["token_ps"] + found["all_reduces"]["token_ps"]
    reading = (MIXTURE.weight_bytes_read(tokens) - MIXTURE.shared_bytes) / (2.5e11 * devices)
    computing = 2 * 80e6 * tokens / (1.25e13 * devices)
    shared = max(4e8 / (5e11 * devices), 2 * 200e6 * tokens / (5e13 * devices))
    layers = 10 * (1e-5 + 1e-6 * (devices - 1) + 1e-7 * tokens + (devices > 1) * 6e-6)
    seconds = 1e-3 + shared + max(reading, computing) + layers + tokens * others / 1e12
    for work in (StepWork(decode=tokens), StepWork(prefill=tokens)):
        ((time, _),) = latency.pieces(work)
        assert time / 1e12 == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
def test_an_engine_adds_a_constant_a_step_and_a_term_a_sequence(engine):
    """The host of an engine takes its time in each step, and for each decoding sequence."""
    times = engine_times(engine, DEVICE.name, "bf16")
    assert times.step > 0 < times.sequence
    for work in (PROMPT, DECODE):
        more = roofline(engine=engine).duration(work) - roofline().duration(work)
        host = times.step + times.sequence * work.decode
        assert more / 1e12 == pytest.approx(host, rel=1e-9)


@pytest.mark.parametrize(
    ("device", "fp4"), [("b200", "mxfp4"), ("b300", "mxfp4"), ("h200", "")]
)
def test_a_device_without_fp4_takes_the_times_of_other_formats(device, fp4):
    """Experts in MXFP4 take times in fp4 on each device with FLOP/s in it, and on no other."""
    latency = Roofline("gpt-oss-120b", device, tensor_parallel=1, engine="vllm")
    times = engine_times("vllm", device, fp4).experts
    token = times.token * 36 * 1e12
    assert latency.coefficients()["experts"]["routed_ps"] == pytest.approx(token, rel=1e-9)


@pytest.mark.parametrize(("rates", "times"), [({}, 1), ({"fp4_flops": 4 * 10**14}, 2)])
def test_experts_in_few_bits_compute_in_the_fewest_bits_that_a_device_can(rates, times):
    """Experts in MXFP4 compute at the rate of fp4, without it of fp8, else of 16 bits."""
    model, device = find_model("gpt-oss-20b"), attrs.evolve(DEVICE, fp8_flops=2 * 10**14)
    wide, narrow = (
        roofline(model, each).coefficients()["experts"]["token_ps"]
        for each in (DEVICE, attrs.evolve(device, **rates))
    )
    assert narrow == pytest.approx(wide / 2 / times * 10 / 9, rel=1e-9)


def test_windows_count_for_their_layers():
    """Pairs and contexts of each window count for the layers with that window."""
    model = attrs.evolve(MODEL, windows=(None, 64) * 4 + (64, 64))
    latency = roofline(model, overhead=0)
    assert latency.windows == (None, 64)
    nothing, pairs = (
        latency.pieces(StepWork(prefill=1, attended_pairs=each, context=(0, 0)))[0]
        for each in ((0, 0), (1000, 64))
    )
    # 4 x 8 x 128 FLOP a pair and layer, at 4/5 of 5e13 a second.
    assert pairs[0] - nothing[0] == pytest.approx((4 * 1000 + 6 * 64) * 102.4, abs=1)
    assert pairs[1:] == (4 * 2048, 6 * 2048)


def test_a_state_is_read_and_written_for_each_sequence():
    """A decoding sequence reads and writes the states of its layers, however long it is.

    Here 8 layers have a state of 1,000,000 bytes, and 5e11 bytes a second are reached.
    """
    full = LayerCache(kind="full", layers=2, kv_heads=2, key_dim=128, value_dim=128)
    state = LayerCache(kind="state", layers=8, state_bytes=10**6)
    latency = roofline(attrs.evolve(MODEL, caches=(full, state)))
    assert latency.windows == (None, 1)
    assert latency.coefficients()["attention"]["context_ps"] == [KV / 5, 32 * 10**6]


def test_sparse_attention_reads_what_it_attends_to_and_what_chooses_it():
    """A decoding token reads `attended` tokens at most, and a share of all to choose them.

    The prompt attends to all of its tokens. A token of the context takes 20,480 ps.
    """
    latency = roofline(attended=100, selection=1 / 16)
    assert latency.windows == (None, 100)
    ((_, choosing, reading),) = latency.pieces(StepWork(decode=1, context=(0, 0)))
    assert (choosing, reading) == (KV / 16, KV)
    work = StepWork(prefill=1000, attended_pairs=(500_500, 95_050), context=(0, 0))
    assert latency.duration(work) == roofline().duration(PROMPT)


def test_the_first_layers_read_all_tokens():
    """In half of the layers all tokens are read, and a share of all in the others."""
    latency = roofline(attended=100, selection=1 / 16, dense_layers=MODEL.layers // 2)
    ((_, all_read, reading),) = latency.pieces(StepWork(decode=1, context=(0, 0)))
    assert (all_read, reading) == (KV / 2 + KV / 2 / 16, KV / 2)


WINDOW = LayerCache(kind="window", layers=10, kv_heads=1, key_dim=64, window=50)
SELECTED = LayerCache(kind="mla", layers=10, kv_heads=1, key_dim=64, attended=50)
KEYS = LayerCache(kind="index", layers=10, entry_bytes=132)


@pytest.mark.parametrize("caches", [(WINDOW,), (SELECTED, KEYS)])
def test_attention_that_reads_a_part_is_not_made_sparse(caches):
    """Windows, and tokens that an indexer selects, leave nothing for `attended` to choose."""
    model = attrs.evolve(MODEL, caches=caches)
    with pytest.raises(InputError, match="attended=100: each layer of round attends to a part"):
        roofline(model, attended=100)
    assert Quest().timing(model) == {}


def test_attended_tokens_on_the_host_are_moved():
    """Tokens that the device does not have are moved at the rate of the host link and read.

    Reading takes 20,480 ps, moving 50 times as long: at 1e10 for 5e11 bytes a second.
    """
    latency = roofline(attended=100, missed=0.1)
    assert latency.pieces(StepWork(decode=1, context=(0, 0)))[0][1:] == (0, 6 * KV)
    shared = roofline(attended=100, missed=0.1, tensor_parallel=2)
    assert shared.pieces(StepWork(decode=1, context=(0, 0)))[0][1:] == (0, 3 * KV)


def test_small_times_are_not_lost():
    """A million pairs of 1/200 ps each take 5,000 ps."""
    tiny = ModelSpec(
        name="tiny",
        layers=1,
        query_heads=1,
        kv_heads=1,
        head_dim=1,
        hidden_size=1,
        parameters=1,
    )
    fast = attrs.evolve(DEVICE, flops=10**15)
    latency = roofline(tiny, fast, compute=1, overhead=0)
    rest, pairs = (
        latency.duration(StepWork(attended_pairs=(number,))) for number in (0, 10**6)
    )
    assert pairs - rest == 5000


def test_weights_that_do_not_fit_are_refused():
    """Weights that exceed the devices raise InputError with the number that suffices."""
    with pytest.raises(InputError) as caught:
        Roofline("llama-3-70b", tensor_parallel=1)
    assert str(caught.value) == (
        "roofline: the weights of llama-3-70b take 141 GB, more than the 80 GB of 1 x h100; "
        "give tensor_parallel=2 or more, a device with more memory, or a smaller model"
    )
    assert Roofline("llama-3-70b", tensor_parallel=2)


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("tensor_parallel", 1.5, "roofline: tensor_parallel=1.5 must be a number of devices"),
        ("bandwidth", 1.1, "roofline: bandwidth=1.1 must be a share"),
        ("layer_overhead", -1, "roofline: layer_overhead=-1 must be a number of seconds"),
        ("engine", "tgi", "roofline: engine='tgi' must be one of vllm, trtllm, sglang"),
        ("attended", -1, "roofline: attended=-1 must be a number of tokens"),
        ("selection", 0.1, "roofline: selection=0.1 needs attended=TOKENS"),
        ("missed", 2, "roofline: missed=2 must be from 0 to 1"),
        ("dense_layers", 33, "roofline: dense_layers=33 must be from 0 to 32"),
        ("dense_layers", 2, "roofline: dense_layers=2 needs attended=TOKENS"),
        ("codec", "fp12", "no codec plugin is named 'fp12' "),
    ],
)
def test_impossible_options_are_refused(option, value, problem):
    """An impossible option raises InputError with its name, its value and what it accepts."""
    with pytest.raises(InputError) as caught:
        Roofline(**{option: value})
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("name", ["h100:memory=84.9GB", " H100 :memory=84.9GB"])
def test_an_engine_has_the_times_of_the_named_device_with_other_figures(name):
    """A device with figures after its name takes the engine's times that are known of it."""
    options = {"tensor_parallel": 2, "engine": "vllm"}
    known, other = (
        Roofline("mixtral-8x7b", device, **options).coefficients() for device in ("h100", name)
    )
    assert other == known | {"device": name}
