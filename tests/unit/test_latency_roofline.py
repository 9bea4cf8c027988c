"""The latency model `roofline`, computed by hand for round numbers."""

from __future__ import annotations

import attrs
import pytest

from kvcore import InputError
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.serving import StepWork
from kvcore_plugins.latency import Roofline

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


def roofline(model=MODEL, **options):
    """Return the model on one device that reaches half of everything, and 1 ms a step."""
    half = {"tensor_parallel": 1, "compute": 0.5, "bandwidth": 0.5, "overhead": 0.001}
    return Roofline(model, DEVICE, **half | options)


def test_a_prompt_is_bound_by_compute():
    """1 ms, 1,000 tokens of 40 us (2e9 FLOP at 5e13 a second), 500,500 pairs of 819.2 ps."""
    assert roofline().duration(PROMPT) == 1_000_000_000 + 40_000_000_000 + 410_009_600


def test_decoding_is_bound_by_memory():
    """1 ms, 4 ms to read the weights (at 5e11 bytes/s), 20,480 ps for each K/V."""
    expected = 1_000_000_000 + 4_000_000_000 + 10_000 * 20_480 + 10 * 20_480
    assert roofline().duration(DECODE) == expected


def test_the_two_lines():
    """Computing comes first, then reading; slopes are in whole picoseconds."""
    compute, memory = roofline().pieces(DECODE)
    assert compute == (1_000_000_000 + 10 * 40_000_000, 819)
    assert memory == (5_000_000_000 + 10 * 20_480, 20_480)


def test_the_defaults():
    """Llama 3 8B on four H100, half of the FLOP/s, 80 % of the bandwidth, 2 ms a step."""
    flops, bandwidth = 4 * 989.5e12 * 0.5, 4 * 3.35e12 * 0.8
    token, pair = 2 * 8_030_261_248 / flops, 4 * 32 * 32 * 128 / flops
    prompt = StepWork(prefill=8192, attended_pairs=(8192 * 8193 // 2,))
    seconds = 0.002 + 8192 * token + prompt.attended_pairs[0] * pair
    assert Roofline().duration(prompt) / 1e12 == pytest.approx(seconds, rel=1e-9)
    decode = StepWork(decode=64, context=(64 * 4096,))
    seconds = 0.002 + (2 * 8_030_261_248 + 131_072 * (64 * 4096 + 64)) / bandwidth
    assert Roofline().duration(decode) / 1e12 == pytest.approx(seconds, rel=1e-4)


def test_devices_share_the_work():
    """Two devices take half of what one takes, but for the overhead."""
    for batch in (PROMPT, DECODE):
        one, two = (roofline(tensor_parallel=n, overhead=0).duration(batch) for n in (1, 2))
        assert two == one // 2


def test_kv_heads_are_shared_by_as_many_devices_as_there_are_heads():
    """With 2 K/V heads, 4 devices read K/V no faster than 2, and weights twice as fast."""
    two, four = (roofline(tensor_parallel=n).coefficients()["memory"] for n in (2, 4))
    assert four["context_ps"] == two["context_ps"] == [10_240]
    assert four["weights_ps"] == two["weights_ps"] / 2 == 10**9


def test_the_device_with_most_heads_decides():
    """Of 8 K/V heads on 6 devices, some have 2: as slow as on 4."""
    model = attrs.evolve(MODEL, kv_heads=8)
    four, six = (roofline(model, tensor_parallel=n).coefficients() for n in (4, 6))
    assert four["memory"]["context_ps"] == six["memory"]["context_ps"]


def test_a_latent_is_not_shared():
    """Under MLA every device reads all of it."""
    model = attrs.evolve(MODEL, latent=512)
    one, eight = (roofline(model, tensor_parallel=n).coefficients() for n in (1, 8))
    assert one["memory"]["context_ps"] == eight["memory"]["context_ps"] == [20_480]


def test_quantised_kv_is_read_faster():
    """A codec of half the bytes halves what is read of K/V, and nothing else."""
    wide, narrow = (roofline(codec=codec).pieces(DECODE) for codec in ("fp32", "fp16"))
    assert (wide[0], wide[1][1]) == (narrow[0], 2 * narrow[1][1])


def test_experts_are_read_as_they_are_taken():
    """A step reads the weights that its tokens, prompt or not, are expected to take."""
    model = find_model("mixtral-8x7b")
    latency = roofline(model, overhead=0)
    for tokens in (1, 5, 1000):
        seconds = model.weight_bytes_read(tokens) / 5e11 + tokens * 131_072 / 5e11
        for batch in (StepWork(decode=tokens), StepWork(prefill=tokens)):
            _, (reading, _) = latency.pieces(batch)
            assert reading / 1e12 == pytest.approx(seconds, rel=1e-9)


def test_windows_count_for_their_layers():
    """Four full layers and six with a window of 64: each context has its slope."""
    model = attrs.evolve(MODEL, windows=(None, 64) * 4 + (64, 64))
    latency = roofline(model, overhead=0)
    assert latency.windows == (None, 64)
    compute, memory = latency.pieces(
        StepWork(prefill=1, attended_pairs=(1000, 64), context=(0, 0))
    )
    assert compute == (40_000_000 + (4 * 1000 + 6 * 64) * 8192 // 100, 328, 492)
    assert memory[1:] == (4 * 2048, 6 * 2048)


def test_windows_without_a_full_layer():
    """Only those that there are, the narrowest first."""
    model = attrs.evolve(MODEL, windows=(64,) * 5 + (16,) * 5)
    assert roofline(model).windows == (16, 64)


def test_small_times_are_not_lost():
    """A million pairs of a 250th of a picosecond take 4,000 ps."""
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
    latency = Roofline(tiny, fast, tensor_parallel=1, compute=1, overhead=0)
    compute, _ = latency.pieces(StepWork(attended_pairs=(10**6,)))
    assert compute == (4000, 0)


def test_names_and_specifications_mean_the_same():
    """A name is looked up in the catalogue."""
    model, device = find_model("llama-3-8b"), find_device("h100")
    assert Roofline(model, device).coefficients() == Roofline().coefficients()


def test_weights_that_do_not_fit_are_refused():
    """The error says how many devices would do."""
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
        ("tensor_parallel", 0, "roofline: tensor_parallel=0 must be a number of devices"),
        ("tensor_parallel", 1.5, "roofline: tensor_parallel=1.5 must be a number of devices"),
        ("compute", 0, "roofline: compute=0 must be a share, above 0 and at most 1"),
        ("compute", float("nan"), "roofline: compute=nan must be a share"),
        ("bandwidth", 1.1, "roofline: bandwidth=1.1 must be a share"),
        ("overhead", -1, "roofline: overhead=-1 must be a number of seconds"),
        ("codec", "fp12", "no codec plugin is named 'fp12' "),
        ("model", "lama-3-8b", "unknown model 'lama-3-8b'; did you mean llama-3-8b"),
        ("device", "h1000", "unknown device 'h1000'; did you mean h100"),
    ],
)
def test_refuses_what_cannot_be(option, value, problem):
    """Each option says what it takes."""
    with pytest.raises(InputError) as caught:
        Roofline(**{option: value})
    assert str(caught.value).startswith(problem)
