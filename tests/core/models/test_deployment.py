"""The number of blocks that a model leaves room for on its devices."""

from __future__ import annotations

from fractions import Fraction

import attrs
import pytest

from kvcore.errors import InputError
from kvcore.models.catalogue import DEVICES, find_device, find_model
from kvcore.models.memory import Deployment, KVLayout, tensor_degrees

LLAMA, DEEPSEEK = find_model("llama-3-8b"), find_model("deepseek-v3")
H100, H200 = find_device("h100"), find_device("h200")


@pytest.mark.parametrize(
    ("devices", "copies"), [(1, 1), (2, 1), (3, Fraction(9, 8)), (4, 1), (8, 1), (16, 2)]
)
def test_heads_are_divided_among_up_to_eight_devices(devices, copies):
    """Eight K/V heads are stored once on up to 8 devices, if these share them evenly."""
    assert KVLayout(LLAMA).copies(devices) == copies


def test_the_pool_has_nine_tenths_of_the_memory_less_the_weights():
    """The pool has 90% of the devices' memory less the weights.

    Llama 3 8B on two H100 leaves 144 GB less 16.06 GB, in blocks of 2 MiB.
    """
    deployment = Deployment(KVLayout(LLAMA, "fp16", 16), H100, 2)
    assert deployment.kv_bytes == 144 * 10**9 - 2 * LLAMA.parameters
    assert deployment.bytes_per_block == 2 * 2**20
    assert deployment.blocks() == deployment.kv_bytes // 2**21


def test_weights_that_do_not_fit_are_refused_with_enough_devices():
    """Weights that do not fit are refused, and the error says on how many devices they would.

    Llama 3 70B has 141 GB of weights; two H100 have 144 GB to offer.
    """
    deployment = Deployment(KVLayout(find_model("llama-3-70b"), "fp16", 16), H100, 1)
    with pytest.raises(
        InputError, match=r"need 69\.1 GB more than 90% .* fits on 2 x h100, 1 x"
    ):
        deployment.blocks()
    assert attrs.evolve(deployment, devices=2).blocks() > 0


def test_a_block_that_no_device_holds_is_refused():
    """A block that no number of devices can hold is refused, with other advice."""
    layout = KVLayout(LLAMA, "fp16", 10**9)
    with pytest.raises(InputError, match="Take a smaller model, or smaller blocks"):
        Deployment(layout, H100, 1).blocks()


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("phi-4", [1, 2, 5, 10, 20, 40]),
        ("phi-3-medium-128k", [1, 2, 5, 10, 20, 40]),
        ("llama-3-8b", [1, 2, 4, 8, 16, 32]),
        ("qwen2.5-7b", [1, 2, 4, 28]),
        ("qwen2.5-0.5b", [1, 2, 14]),
        ("gpt2-xl", [1, 5, 25]),
        ("gemma-3-1b", [1, 2, 4]),
        ("deepseek-v3", [1, 2, 4, 8, 16, 32, 64, 128]),
    ],
)
def test_degrees_divide_the_heads(model, degrees):
    """Degrees divide query heads, and K/V heads or are multiples of these; MLA has none."""
    assert tensor_degrees(find_model(model), 1, 200) == degrees


@pytest.mark.parametrize("devices", [-1, 0, 3, 4, 8, 80, 10**9])
def test_a_degree_that_no_engine_runs_is_refused(devices):
    """The error about a degree that no engine runs names those that engines run."""
    with pytest.raises(
        InputError, match=r"phi-4 on .*40 query.*10 K/V.* 1, 2, 5, 10, 20 or 40"
    ):
        Deployment(KVLayout(find_model("phi-4")), H100, devices)


@pytest.mark.parametrize("memory", [2, 20, 60])
@pytest.mark.parametrize("model", ["phi-4", "llama-3.1-405b", "deepseek-v3", "llama-3-70b"])
def test_remedies_are_degrees_of_one_server(model, memory):
    """Each remedy divides the heads, and is at most 8 GPUs, which hold the model."""
    small = attrs.evolve(H100, name="small", hbm_bytes=memory * 10**9)
    deployment = Deployment(KVLayout(find_model(model)), small)
    try:
        assert deployment.blocks()
    except InputError as error:
        remedies = str(error).partition("fits on ")[2].split(", ")
        for count, _, name in (remedy.partition(" x ") for remedy in remedies):
            device = {"small": small, **DEVICES}[name]
            assert int(count) <= 8
            assert attrs.evolve(deployment, device=device, devices=int(count)).blocks() > 0


def test_no_server_of_eight_is_said():
    """The error for a model that no server of 8 holds says so, and names no larger number."""
    model = attrs.evolve(DEEPSEEK, parameters=10**13, expert_dtype="bf16", dtype="bf16")
    with pytest.raises(InputError, match=r"No 8 GPUs hold it\. Take a smaller model"):
        Deployment(KVLayout(model), H100, 4).blocks()
