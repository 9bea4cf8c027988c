"""The number of blocks that a model leaves room for on its devices."""

from __future__ import annotations

from fractions import Fraction

import attrs
import pytest

from kvcore.errors import InputError
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.memory import Deployment, KVLayout, servers_that_fit, tensor_degrees

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


def test_servers_that_fit_divide_the_heads():
    """The smallest server of the own GPU, and of three others, divides the heads."""
    servers = servers_that_fit(find_model("phi-4"), H100, 1, lambda _, count: count > 2)
    assert servers[0] == "5 x h100"
    assert [server.partition(" x ")[0] for server in servers] == ["5"] * 4


def test_servers_of_the_same_family_come_first():
    """Of other GPUs those with the same letter come first, those with less memory before."""
    servers = servers_that_fit(
        DEEPSEEK, H100, 8, lambda gpu, count: gpu.hbm_bytes * count > 760 * 10**9
    )
    assert servers == ["8 x h20", "8 x h200", "8 x rtx-pro-6000"]


def test_servers_that_fit_have_at_most_eight_gpus():
    """A server has at most 8 GPUs, unless more were given."""
    for given, servers in (1, []), (16, ["16 x h100"]):
        fitting = servers_that_fit(
            DEEPSEEK, H100, given, lambda gpu, count: gpu == H100 and count > 8
        )
        assert fitting == servers


@pytest.mark.parametrize("model", ["phi-4", "llama-3.1-405b", "deepseek-v3", "llama-3-70b"])
def test_remedies_hold_the_model(model):
    """The error for weights that do not fit names the servers that hold them and a block."""
    small = attrs.evolve(H100, name="small", hbm_bytes=20 * 10**9)
    deployment = Deployment(KVLayout(find_model(model)), small)

    def fits(gpu, count):
        return attrs.evolve(deployment, device=gpu, devices=count).fitting(0) > 0

    servers = servers_that_fit(deployment.layout.model, small, 1, fits)
    with pytest.raises(InputError, match=f"It fits on {', '.join(servers)}$"):
        deployment.blocks()


def test_no_server_of_eight_is_said():
    """The error for a model that no server of 8 holds says so, and names no larger number."""
    counts = {"parameters": 10**13, "active_parameters": 10**12}
    model = attrs.evolve(DEEPSEEK.with_weights("bf16"), **counts)
    with pytest.raises(InputError, match=r"No 8 GPUs hold it\. Take a smaller model"):
        Deployment(KVLayout(model), H100, 4).blocks()
