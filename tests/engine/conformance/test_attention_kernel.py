"""Triton's attention of decoding sequences: any shape in its interpreter."""

import os
from itertools import product
from math import nan

import pytest
from helpers.engine import compute
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Plugins
from kvcore.engine import DeviceMemory, RaggedBatch, TensorLayout
from kvcore.request import text_request
from kvcore_engine.backend import TorchCPU
from kvcore_engine.generator import HuggingFace

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("triton", reason="needs Triton: pip install 'kvcore[triton]'")

from helpers.decoding import Decoding  # noqa: E402 - needs torch

from kvcore_engine.backend import _triton_attention  # noqa: E402 - needs Triton
from kvcore_engine.backend._step_plan import LayerKind  # noqa: E402

pytestmark = pytest.mark.skipif(
    not _triton_attention.INTERPRETED,
    reason=f"TRITON_INTERPRET={os.getenv('TRITON_INTERPRET')}",
)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("lengths", "new"),
    [([1, 15, 16, 17, 63, 64, 65, 130], None), ([5, 16, 90, 9, 140], [5, 2, 40, 1, 3])],
    ids=["one", "several"],
)
def test_attention_with_any_number_of_tokens(lengths, new, dtype):
    """Attention is right if the last tile, block or chunk is full, partly full or one token.

    New tokens attend to the context and to one another.
    """
    Decoding(lengths, new=new, dtype=dtype).check()


@pytest.mark.parametrize("group", [1, 8, 16, 20])
def test_attention_with_any_number_of_query_heads(group):
    """Attention is right for group sizes that are padded to the size of a matrix unit.

    A group consists of the query heads that share a K/V head.
    """
    Decoding([40, 70], group=group, kv_heads=2, dtype="fp16").check()


@pytest.mark.parametrize(
    ("width", "value", "together"),
    [(80, 80, True), (96, 96, False), (128, 64, True), (256, 256, False), (8, 24, True)],
)
def test_attention_with_any_width_of_keys_and_values(width, value, together):
    """Keys and values may differ in width, and a width need not be a power of two."""
    made = Decoding([70, 20], head_dim=width, value_dim=value, together=together, dtype="fp16")
    made.check(scale=0.3)


@pytest.mark.parametrize("block_size", [2, 32, 64, 128])
def test_attention_with_any_block_size(block_size):
    """A block may be smaller or larger than a tile of the kernel."""
    Decoding([200, 31], block_size=block_size, dtype="fp32").check()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "codec",
    [
        "fp8-e4m3:factor=0.5",
        "fp8-e4m3:scale=head",
        "fp8-e5m2",
        "fp8-e5m2:scale=head",
        "int8",
        "int4",
    ],
)
def test_attention_over_encoded_kv(codec, dtype):
    """Attention over encoded K/V equals attention over the rows that `read` decodes."""
    Decoding([70, 17], codec=codec, dtype=dtype, head_dim=80).check()
    if dtype == "fp16":  # new tokens attend to what is stored of one another
        Decoding([70, 37], new=[20, 4], codec=codec, dtype=dtype, head_dim=80).check()


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (20, 3), (150, 40), (64, 0), (400, 4)])
@pytest.mark.parametrize(
    ("lengths", "new"),
    [([300, 21, 140], None), ([130, 20, 141, 9], [40, 20, 2, 5])],
    ids=["one", "several"],
)
def test_attention_with_windows_and_sinks(lengths, new, window, sinks):
    """A new token attends to its own window, wherever that begins in a block, and to sinks."""
    Decoding(lengths, new=new, dtype="fp32").check(window=window, sinks=sinks)


def test_blocks_that_left_the_window_are_not_read():
    """Attention does not read blocks between the sinks and the window."""
    made = Decoding([300], dtype="fp32")
    batch = RaggedBatch(made.tables, [299], [1])
    before = made.backend.attend(0, made.backend.plan(batch), made.queries, window=100, sinks=5)
    made.backend.fill(nan, made.tables[0][1:12])
    after = made.backend.attend(0, made.backend.plan(batch), made.queries, window=100, sinks=5)
    assert after.equal(before)


@pytest.mark.parametrize(
    ("codec", "options"),
    [(None, {}), ("int4", {"window": 50, "sinks": 3}), ("fp8-e4m3:scale=head", {})],
)
def test_attention_returns_the_weights_of_tokens(codec, options):
    """The output comes with the weights of the tokens, summed over the query heads."""
    made = Decoding([300, 17], kv_heads=2, codec=codec, dtype="fp16")
    made.check(weighed=True, **options)


def test_kv_beyond_2_to_the_31_numbers_is_read():
    """Attention reads K/V that lies beyond 2^31 numbers in the pool's memory.

    Memory that is never touched costs nothing, so the pool may be that large.
    """
    numbers = 16 * 8 * 256
    blocks = 2**31 // numbers + 8
    made = Decoding.__new__(Decoding)
    made.new = [1]
    layout = TensorLayout(
        blocks=blocks, block_size=16, layers=1, kv_heads=8, head_dim=256, value_dim=256,
        dtype="fp16",
    )  # fmt: skip
    backend = TorchCPU(attention="triton")
    backend.memory = lambda: DeviceMemory(0, None, None)
    backend.allocate(layout)
    made.backend, made.lengths = backend, [33]
    made.tables = [[blocks - 1, 0, blocks - 2]]
    draw = torch.Generator().manual_seed(7)
    plan = backend.plan(RaggedBatch(made.tables, [0], [33]))
    rows = [torch.randn(33, 8, 256, generator=draw).half() for _ in range(2)]
    backend.store(0, plan, *rows)
    made.queries = torch.randn(1, 8, 256, generator=draw).half()
    made.check()


SIZES = "heads=4,kv_heads=2,head_dim=8,vocab_size=97"
GENERATORS = {
    "transformer": f"transformer:layers=2,hidden=32,{SIZES}",
    "sincos": f"sincos:layers=2,{SIZES}",
    "induction": "induction:vocab_size=97",
    "huggingface": "llama",
}
"""The generators with small sizes; of Hugging Face's a tiny random Llama."""

PAIRS = [
    *(("transformer", None), ("transformer", "fp64"), ("transformer", "kivi")),
    *(("sincos", "int8"), ("sincos", "bf16"), ("sincos", "fp16")),
    *(("induction", "fp8-e4m3:scale=head"), ("huggingface", "int4")),
]
"""Generators and codecs of each run of the tests; all with all in the profile `thorough`."""

if os.environ.get("HYPOTHESIS_PROFILE") == "thorough":
    codecs = [None, "fp8-e4m3:scale=head", *Plugins().names("codec")]
    PAIRS = [*product(GENERATORS, codecs)]

TORCH_ALONE = {"fp64", "fp16", "bf16", "kivi"}
"""Codecs of a pool in fp32 whose K/V the kernels do not read."""


def served(name, codec, attention):
    """Return the result of three requests by a small generator, with K/V in a codec.

    Their texts repeat eight tokens, so that `induction` has an answer. Where it has none all
    tokens are as likely, and codes make other ones the likeliest from differences of 1e-7.
    """
    texts = ([*range(11 + n % 2 * 30, 19 + n % 2 * 30)] * 4 for n in range(3))
    requests = [
        text_request(n, text[: 18 + 3 * n], output=4 + n, block_size=4, arrival=n * 5)
        for n, text in enumerate(texts)
    ]
    if name == "huggingface":
        pytest.importorskip("transformers", reason="needs transformers")
        from helpers.hugging import tiny  # noqa: PLC0415 - takes seconds to import

        generator = HuggingFace(tiny(GENERATORS[name]))
    else:
        generator = Plugins().build("generator", GENERATORS[name])
    return compute(
        requests,
        generator=generator,
        backend=TorchCPU(attention=attention),
        codec=None if codec is None else Plugins().build("codec", codec),
        blocks=13,
        max_tokens=16,
        max_seqs=4,
    ).result


def test_each_generator_computes_by_the_kernels():
    """No generator is without a case of the tokens below."""
    assert {*GENERATORS} == {*Plugins().names("generator")}


@pytest.mark.parametrize(("name", "codec"), PAIRS)
def test_the_engine_computes_the_tokens_of_torch(name, codec):
    """A run that preempts, evicts and shares prefixes has the tokens of torch's attention.

    K/V in a codec that the kernels do not read is attended to by torch.
    """
    expected = served(name, codec, "sdpa").outputs
    result = served(name, codec, None if codec in TORCH_ALONE else "triton")
    assert result.outputs == expected
    assert sum(result.log.recomputes) > 0
    assert result.cache.tree.evicted_blocks > 0
    assert result.cache.stats.hit_blocks > 0


def test_chunks_of_a_context_are_combined_for_each_new_token():
    """Few new tokens after long contexts are computed in chunks, which are combined."""
    made = Decoding([700, 400, 90], new=[3, 8, 5], dtype="fp16")
    made.check()
    (part,) = made.backend.plan(made.batch).parts(LayerKind(4, None, 0))
    assert part.plan.slots > 8
    made.check(window=300, sinks=20)


@given(st.data())
def test_attention_of_any_step(data):
    """Any step of prompts, chunks and single tokens is right, over any blocks and heads."""
    draw = data.draw
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    window = draw(st.none() | st.integers(1, 100))
    made = Decoding(
        lengths,
        new=[draw(st.integers(1, length)) for length in lengths],
        group=draw(st.sampled_from([1, 3, 4, 24])),
        kv_heads=draw(st.integers(1, 2)),
        block_size=draw(st.sampled_from([4, 16, 128])),
        head_dim=draw(st.sampled_from([8, 64])),
        codec=draw(st.sampled_from([None, None, "int8", "fp8-e5m2"])),
        dtype="fp32",
    )
    made.kernel.programs = draw(st.sampled_from([1, 528]))
    made.check(window=window, sinks=draw(st.integers(0, 30)))
