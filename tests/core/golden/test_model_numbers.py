"""Published figures of K/V sizes, weights and projections, which must be exact."""

from __future__ import annotations

import pytest

from kvcore.models.catalogue import find_model
from kvcore.models.memory import KVLayout

KIB, MIB, GIB = 2**10, 2**20, 2**30


def layout(name, dtype="fp16"):
    """Return the K/V layout of a well-known model."""
    return KVLayout(find_model(name), dtype)


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("llama-2-7b", 512),
        ("llama-2-13b", 800),
        ("llama-2-70b", 320),
        ("llama-2-70b-mha", 2560),
        ("llama-3-8b", 128),
        ("llama-3-70b", 320),
        ("llama-3.1-405b", 504),
        ("mistral-7b", 128),
        ("mistral-7b-v0.1", 128),
        ("mixtral-8x7b", 128),
        ("gemma-2b", 18),
    ],
)
def test_bytes_of_a_token_in_fp16(name, kib):
    """A token has 2 (K and V) x layers x K/V heads x head dimension x 2 bytes."""
    assert layout(name).bytes_per_token == kib * KIB


def test_a_token_of_deepseek_v3():
    """A token of latent attention has (512 + 64) numbers in each of 61 layers, stored once."""
    assert layout("deepseek-v3").bytes_per_token == (512 + 64) * 61 * 2 == 70_272


@pytest.mark.parametrize(
    ("name", "tokens", "size", "gigabytes"),
    [
        ("llama-3-8b", 2048, 268_435_456, 0.268),
        ("llama-3-8b", 8192, 1_073_741_824, 1.07),
        ("llama-3-8b", 32768, 4_294_967_296, 4.29),
        ("mistral-7b", 32768, 4_294_967_296, 4.29),
        ("llama-3-70b", 32768, 10_737_418_240, 10.7),
        ("llama-2-70b-mha", 4096, 10_737_418_240, 10.7),
        ("llama-2-70b-mha", 32768, 85_899_345_920, 85.9),
    ],
)
def test_bytes_of_a_request(name, tokens, size, gigabytes):
    """A request takes these exact bytes, and rounded the GB that are usually quoted."""
    assert layout(name).request_bytes(tokens) == size
    assert float(f"{size / 1e9:.3g}") == gigabytes


def test_llama_3_70b_at_its_longest():
    """131,072 tokens of Llama 3 70B are exactly 40 GiB."""
    assert layout("llama-3-70b").request_bytes(131_072) == 40 * GIB


def test_a_sliding_window_stops_growth():
    """A request of Mistral 7B v0.1 stays at 512 MiB beyond its window of 4,096 tokens."""
    mistral = layout("mistral-7b-v0.1")
    assert mistral.request_bytes(4096) == 512 * MIB
    assert mistral.request_bytes(131_072) == 512 * MIB


def test_a_prefix_of_50_tokens_takes_4_blocks_of_16():
    """A prefix of 50 tokens takes 4 blocks of 16, of which the last is partly filled."""
    assert layout("llama-3-8b").blocks_for(50) == 4


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_weights_are_the_size_of_the_checkpoint(name, gib):
    """Weights in bf16 with MXFP4 experts have the size that the model card states.

    The tolerance covers the experts' biases in bf16.
    """
    assert find_model(name).weight_bytes / GIB == pytest.approx(gib, abs=0.1)
