"""The bytes of K/V are those of the codec, wherever memory is counted."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvcore import Codec, PolicyError
from kvcore.config import RunConfig
from kvcore.engine import Plane
from kvcore.errors import InputError
from kvcore.models.catalogue import MODELS, find_device, find_model
from kvcore.models.memory import Deployment, KVLayout
from kvcore.models.spec import ModelSpec
from kvcore.plugins.options import spec_of
from kvcore_engine.config import EngineParts
from kvcore_plugins.codec import FP16, INT8, KIVI
from kvcore_plugins.latency import Roofline
from kvcore_plugins.latency.roofline import NARROW_KV

LLAMA = find_model("llama-3-8b")
HEADS = 32 * 8
"""K/V heads of Llama 3 8B in all layers, each 128 numbers wide."""

MIB = 2**20

# Bytes of the K and V of one head in a block of 16 tokens: codes, scales and zeros.
HEAD_BYTES = {
    "fp64": 16 * 256 * 8,
    "fp32": 16 * 256 * 4,
    "fp16": 16 * 256 * 2,
    "bf16": 16 * 256 * 2,
    "fp8-e4m3": 16 * 256,
    "fp8-e5m2": 16 * 256,
    "fp8-e4m3:scale=head": 16 * (256 + 2 * 2),
    "int8": 16 * (256 + 2 * 4),
    "int8:keys=channel": 16 * 256 + 128 * 4 + 16 * 4,
    "int4": 16 * (128 + 2 * 4),
    "int4:keys=channel": 16 * 128 + 128 * 4 + 16 * 4,
    "kivi": 16 * 64 + 128 * 4 + 16 * 4 * 4,
    "kivi:bits=4,group=8": 16 * 128 + 2 * 128 * 4 + 16 * 16 * 4,
}


class Thirds(Codec):
    """A codec of 3 bytes a number and some bytes a block, which codes keys by full blocks."""

    name = "thirds"

    def __init__(self, more=1):
        self.more = more

    def planes(self, part, tokens, width):
        """Return the plane of the numbers and that of the additional bytes."""
        del part
        return Plane("bytes", "uint8", (tokens, 3 * width)), Plane("top", "int8", (self.more,))

    def encode(self, part, rows):
        """Raise NotImplementedError, as these tests only need sizes."""
        raise NotImplementedError

    decode = encode

    def by_token(self, part):
        """Return True for values."""
        return part == "values"


def tiny(**more):
    """Return a model with round numbers."""
    shape = {"layers": 3, "query_heads": 4, "kv_heads": 2, "head_dim": 4, "hidden_size": 16}
    return ModelSpec(name="tiny", **{**shape, "parameters": 1000, **more})


@pytest.mark.parametrize("codec", HEAD_BYTES)
def test_a_block_has_the_bytes_of_its_codec(codec):
    """A block takes the bytes of its codec's formula, and a token its share of the block."""
    layout = KVLayout(LLAMA, codec, 16)
    assert layout.bytes_per_block == HEADS * HEAD_BYTES[codec]
    assert layout.bytes_per_token == HEADS * HEAD_BYTES[codec] / 16
    assert str(layout.codec) == codec


# In `kivi` heads of 80 numbers need group=16.
@pytest.mark.parametrize("codec", sorted(HEAD_BYTES.keys() - {"kivi"}))
def test_every_known_model_has_a_layout(codec):
    """Each model of the catalogue has a layout under each codec."""
    assert all(KVLayout(model, codec).bytes_per_token > 0 for model in MODELS.values())


def test_kivi_has_its_published_size():
    """KIVI with 2 bits, groups of 32 and two fp16 numbers a group takes 3 bits a number."""
    layout = KVLayout(LLAMA, "kivi:group=32,residual=128", 128)
    assert layout.bytes_per_block == HEADS * 128 * 256 * 3 // 8


def test_a_latent_is_stored_as_the_keys_of_one_head():
    """Under MLA a token has one latent vector a layer, stored as keys, and no values."""
    layout = KVLayout(tiny(latent=10), INT8, 4)
    assert layout.bytes_per_block == 3 * 4 * (10 + 4)
    assert KVLayout(tiny(latent=10), Thirds, 4).staged_bytes() == 3 * 4 * 10 * 2


def test_shared_bytes_of_a_block_are_rounded_up_once():
    """Bytes that the tokens of a block share are rounded up once, not for each token."""
    layout = KVLayout(tiny(), Thirds(), 5)
    heads = 2 * 3
    assert layout.token_bytes() / 3 == 2 * (24 + Fraction(2, 5))
    assert layout.bytes_per_token == heads * 24 + 3
    assert [layout.read_bytes(tokens) for tokens in (1, 2, 5)] == [147, 293, heads * 122]
    assert layout.request_bytes(5) == layout.bytes_per_block


@pytest.mark.parametrize(
    ("codec", "block_size", "numbers"),
    [("int8", 16, 0), ("int4:keys=channel", 16, 16 * 128), ("kivi", 32, 32 * 256)],
)
def test_a_partial_block_is_staged_uncoded(codec, block_size, numbers):
    """A codec of whole blocks stages one block of plain numbers for each sequence."""
    layout = KVLayout(LLAMA, codec, block_size)
    assert layout.staged_bytes() == HEADS * numbers * 2
    assert layout.staged_bytes("fp32") == HEADS * numbers * 4


def test_a_staged_block_has_as_many_entries_as_a_block():
    """Of what stands for several tokens, a block stages an entry for so many of its tokens."""
    layout = KVLayout(find_model("deepseek-v4-flash"), "kivi", 256)
    entries = 43 * 256 + 21 * 256 // 4 + 20 * 256 // 128
    assert layout.staged_bytes() == entries * 512 * 2


def test_a_request_needs_its_blocks_and_its_staged_block():
    """A request needs the bytes of its blocks and of its staged block, and fits in no less."""
    layout = KVLayout(tiny(), Thirds(), 16)
    need = layout.request_bytes(20) + layout.staged_bytes()
    assert [layout.requests_in(size, 20) for size in (need - 1, need)] == [0, 1]


def test_a_deployment_reserves_a_staged_block_for_each_sequence():
    """A deployment reserves a staged bf16 block for each sequence before it sizes the pool."""
    deployment = Deployment(KVLayout(LLAMA, "kivi", 16), find_device("h100"))
    staged, block = 2 * MIB, HEADS * HEAD_BYTES["kivi"]
    assert deployment.staged_bytes(10) == 10 * staged
    assert deployment.blocks(10) == (deployment.kv_bytes - 10 * staged) // block
    with pytest.raises(InputError, match="the unfinished blocks of 90000 sequences, and a b"):
        deployment.blocks(90_000)


def test_the_roofline_reads_the_coded_bytes():
    """The roofline reads exactly the bytes that the codec stores for a token of context."""
    model = find_model("llama-3-8b")
    found = Roofline(codec="kivi", block_size=16, tensor_parallel=1, bandwidth=1.0)
    per_token = Fraction(HEADS * HEAD_BYTES["kivi"], 16)
    (ps,) = found.coefficients()["attention"]["context_ps"]
    assert ps == round(per_token / find_device("h100").bandwidth / NARROW_KV * 10**12)
    assert found.codec == "kivi"
    assert Roofline(model, codec=KIVI(bits=4)).options()["codec"].bits == 4


def test_a_codec_with_faulty_planes_is_reported_by_name():
    """A codec that raises in `planes` or returns no planes raises PolicyError with its name."""
    with pytest.raises(
        PolicyError, match=r"codec plugin 'thirds' .* raised ValueError in plane"
    ):
        KVLayout(LLAMA, Thirds("x"))

    class Nothing(Thirds):
        """A codec without planes."""

        def planes(self, *_):
            """Return no planes."""
            return ()

    with pytest.raises(PolicyError, match=r"'thirds' .* answered planes\(\) with none"):
        KVLayout(LLAMA, Nothing)


def test_the_text_of_a_codec_has_its_changed_options():
    """The text of a codec has its name and the options that are not the defaults."""
    named = [str(codec) for codec in (FP16(), KIVI(), KIVI(bits=4))]
    assert named == ["fp16", "kivi", "kivi:bits=4"]
    assert spec_of(Thirds(3)).options == {"more": "3"}


def test_a_pool_of_tensors_reserves_staged_blocks_in_the_dtype():
    """A pool of tensors has the blocks that fit beside two sequences' staged blocks in fp32."""

    def blocks(**options):
        config = RunConfig("run", workload="zipf:requests=1", max_seqs=2, **options)
        return EngineParts(config)

    spec = blocks().model
    numbers = spec.layers * spec.kv_heads * spec.head_dim * 16
    heads = spec.layers * spec.kv_heads
    block = 2 * 3 * numbers + 2 * heads
    staged = 2 * 4 * numbers
    parts = blocks(codec=Thirds(), memory=10 * block + staged)
    assert parts.blocks == 10
    assert parts.arguments()["codec"] is parts.codec
    assert parts.describe()["codec"] == parts.header()["model"]["codec"] == "thirds"
    assert blocks(memory=10 * 2 * 4 * numbers).blocks == 10
