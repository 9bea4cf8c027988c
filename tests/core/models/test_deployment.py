"""The number of blocks that a model leaves room for on its devices."""

from __future__ import annotations

from fractions import Fraction

import attrs
import pytest

from kvcore.errors import InputError
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.memory import Deployment, KVLayout, kv_copies

LLAMA, DEEPSEEK = find_model("llama-3-8b"), find_model("deepseek-v3")
H100, H200 = find_device("h100"), find_device("h200")


@pytest.mark.parametrize(
    ("devices", "copies"), [(1, 1), (2, 1), (3, Fraction(9, 8)), (4, 1), (8, 1), (16, 2)]
)
def test_heads_are_divided_among_up_to_eight_devices(devices, copies):
    """Eight K/V heads are stored once on up to 8 devices, if these share them evenly."""
    assert kv_copies(LLAMA, devices) == copies


def test_a_latent_is_stored_on_each_device():
    """A latent is stored on each device, since MLA has no heads to divide."""
    assert kv_copies(DEEPSEEK, 8) == 8


def test_the_pool_has_nine_tenths_of_the_memory_less_the_weights():
    """The pool has 90% of the devices' memory less the weights.

    Llama 3 8B on two H100 leaves 144 GB less 16.06 GB, in blocks of 2 MiB.
    """
    deployment = Deployment(KVLayout(LLAMA, "fp16", 16), H100, 2)
    assert deployment.kv_bytes == 144 * 10**9 - 2 * LLAMA.parameters
    assert deployment.bytes_per_block == 2 * 2**20
    assert deployment.blocks() == deployment.kv_bytes // 2**21


def test_a_block_stored_twice_has_twice_the_bytes():
    """On 16 devices each of eight heads is stored twice, and a block takes twice the bytes."""
    layout = KVLayout(LLAMA, "fp16", 16)
    assert Deployment(layout, H100, 16).bytes_per_block == 2 * layout.bytes_per_block
    assert Deployment(layout, H100, 16).blocks_in(2**23) == 2


def test_the_text_of_a_deployment_has_count_and_device():
    """The text of a deployment has the form `4 x h100`."""
    assert str(Deployment(KVLayout(LLAMA), H100, 4)) == "4 x h100"


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
