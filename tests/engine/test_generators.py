"""The built-in generators: the effects of their options, sampling, and their errors."""

import subprocess
import sys

import attrs
import pytest

torch = pytest.importorskip("torch", reason="generators compute on torch")

from kvcore import InputError, KVCache, Plugins, StorageError, run  # noqa: E402
from kvcore.engine import DeviceMemory, RaggedBatch, Sampling  # noqa: E402
from kvcore.models.catalogue import MODELS  # noqa: E402
from kvcore.models.spec import bytes_of  # noqa: E402
from kvcore.testing.dense import (  # noqa: E402
    DenseCache,
    HostTensors,
    Text,
    attention,
    generate,
    loaded,
    next_batch,
)
from kvcore_engine.backend import TorchCPU  # noqa: E402
from kvcore_engine.generator import SinCos, Transformer  # noqa: E402
from kvcore_engine.generator.sampling import sample  # noqa: E402


def stored(generator, tokens, positions=None):
    """Return the K and V that a step of `tokens` stores, layer by layer."""
    found = []

    def attend(_layer, queries, keys, values, **_how):
        found.append((keys, values))
        return queries

    step = next_batch([Text(list(tokens))], [len(tokens)])
    generator.forward(attrs.evolve(step, positions=positions or step.positions), attend)
    return found


def logits_of(generator, tokens):
    """Return the logits of the token that follows `tokens`."""
    step = next_batch([Text(list(tokens))], [len(tokens)])
    return generator.logits(step, DenseCache().attend([0], [len(tokens)]))[0]


def test_listing_generators_does_not_import_torch():
    """`Plugins().listing()` lists all plugins without importing torch."""
    code = "import sys, kvcore; kvcore.Plugins().listing(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_transformer_without_torch_names_the_missing_package(monkeypatch):
    """Without torch, `transformer` is unusable and its reason names the package to install."""
    monkeypatch.setattr("kvcore_engine.generator.sampling.find_spec", lambda _: None)
    info = next(i for i in Plugins().listing() if i.name == "transformer")
    assert not info.usable
    assert "pip install 'kvcore[torch]'" in Transformer.unavailable()


def test_sincos_has_the_size_of_its_model():
    """By default the K/V of `sincos` have the layers, heads and widths of its model."""
    assert SinCos(model="llama-3-8b").spec == MODELS["llama-3-8b"]


def test_options_replace_the_sizes_of_the_model():
    """Options replace layers, K/V heads and widths; the query heads per K/V head stay."""
    spec = SinCos(model="llama-3-8b", layers=3, kv_heads=2, head_dim=6).spec
    sizes = spec.layers, spec.query_heads, spec.kv_heads, spec.head_dim, spec.value_dim
    assert sizes == (3, 8, 2, 6, 6)


def test_layers_keep_their_windows():
    """The first layers have the windows of the model's layers; more layers repeat them."""
    windows = MODELS["gpt-oss-20b"].windows
    assert SinCos(model="gpt-oss-20b", layers=3).spec.windows == windows[:3]
    assert SinCos(model="gpt-oss-20b", layers=25).spec.windows == (*windows, windows[0])


def test_sincos_kv_differ_by_token_and_position():
    """K/V of `sincos` differ by token, position and layer, even in half precision."""
    generator = loaded(SinCos(layers=2, kv_heads=1, heads=1, head_dim=8), "bf16")
    tokens = list(range(64))
    for part in (0, 1):
        rows = [
            tuple(layer[part][row].flatten().tolist())
            for positions in (tokens, tokens[::-1])
            for layer in stored(generator, tokens, positions)
            for row in tokens
        ]
        assert len(set(rows)) == len(rows) == 256


def test_sincos_keys_and_values_are_on_a_circle():
    """Keys of `sincos` are sines, and values are cosines of the same phases."""
    ((keys, values), *_) = stored(loaded(SinCos(layers=1, kv_heads=2, head_dim=4)), range(9))
    torch.testing.assert_close(keys**2 + values**2, torch.ones_like(keys))


@pytest.mark.parametrize("model", [None, "gpt-oss-20b", "minimax-m2.5"])
def test_the_parameter_count_of_transformer_is_that_of_its_weights(model):
    """`transformer` counts the numbers of its weights, and nothing else of its model's."""
    sizes = {"layers": 3, "hidden": 24, "heads": 6, "kv_heads": 2, "head_dim": 4}
    generator = loaded(Transformer(model=model, **sizes))
    decoder = generator._decoder
    weights = [decoder.embedding, decoder.head, decoder.last_gain]
    weights += [weight for layer in decoder.layers for weight in attrs.astuple(layer)]
    spec = generator.spec
    assert spec.parameters == sum(weight.numel() for weight in weights)
    assert spec.weight_bytes_read(3) == bytes_of(spec.parameters, spec.dtype)


def test_weights_of_a_layer_ignore_later_layers():
    """The weights of a layer do not depend on the number of layers after it."""
    two, three = (loaded(Transformer(layers=layers)) for layers in (2, 3))
    for (k, v), (keys, values) in zip(stored(two, [1, 2]), stored(three, [1, 2]), strict=False):
        assert torch.equal(k, keys)
        assert torch.equal(v, values)


def test_a_window_changes_logits_only_beyond_the_window():
    """A window changes the logits only of texts that are longer than the window."""
    free, narrow = loaded(Transformer(layers=1)), loaded(Transformer(layers=1, window=4))
    assert torch.equal(logits_of(free, range(4)), logits_of(narrow, range(4)))
    assert not torch.allclose(logits_of(free, range(5)), logits_of(narrow, range(5)))


def test_rotary_moves_a_key_to_a_later_position():
    """A key of the model, rotated by d, is the key of the same token d positions further on."""
    generator = loaded(Transformer(layers=3, rope_theta=500.0))
    (first, second, far), _ = stored(generator, [7] * 3, [2, 3, 902])[0]
    (rotary,) = set(generator.rotary)
    assert len(generator.rotary) == 3
    for key, distance in ((second, 1), (far, 900)):
        turn = rotary.angles(torch.tensor(distance))
        assert rotary.rotate(first, *turn).allclose(key, atol=1e-10)


def test_greedy_sampling_returns_the_likeliest_token():
    """Greedy generation returns the token with the largest logit."""
    generator = loaded(Transformer())
    (drawn,) = generate(generator, [Text([3, 1, 4])], 1)
    assert drawn == [int(logits_of(generator, [3, 1, 4]).argmax())]


def test_sample_frequencies_are_the_probabilities():
    """Over many positions of one sequence, the share of each token is its probability."""
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    logits = chances.log().expand(4000, 4) * 2
    tokens = sample(logits, [(7, index) for index in range(4000)], [Sampling(2.0)] * 4000)
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / 4000
    assert (shares - chances).abs().max() < 0.03


def test_top_k_samples_only_the_k_likeliest_tokens():
    """With `top_k`, only the k likeliest tokens are sampled."""
    logits = torch.tensor([0.3, 0.1, 0.2, 0.0], dtype=torch.float64).expand(500, 4)
    drawn = set(sample(logits, [(1, index) for index in range(500)], [Sampling(1.0, 2)] * 500))
    assert drawn == {0, 2}


def test_top_p_samples_only_the_likeliest_tokens_that_have_it_together():
    """With `top_p`, the fewest of the likeliest tokens with that probability are sampled."""
    chances = torch.tensor([0.2, 0.45, 0.05, 0.3], dtype=torch.float64).log()
    for top_p, tokens in (
        (0.5, {1, 3}),
        (1e-9, {1}),
        (0.0, {1}),
        (0.9, {0, 1, 3}),
        (1.0, {0, 1, 2, 3}),
    ):
        drawn = sample(
            chances.expand(500, 4),
            [(1, index) for index in range(500)],
            [Sampling(1.0, top_p=top_p)] * 500,
        )
        assert set(drawn) == tokens


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_give_no_token(wrong):
    """Rows of NaN, or with an infinite logit, are an error, and no id beyond the vocabulary."""
    logits = torch.tensor([[0.0, 1.0, wrong]])
    with pytest.raises(InputError, match="logits of a step are NaN or infinite"):
        sample(logits, [(0, 0)], [Sampling(1.0)])


def test_probabilities_are_those_of_each_sequence():
    """The distributions of a step are those by which its sequences are sampled."""
    generator = loaded(Transformer())
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    generator.logits = lambda *_: logits
    samplings = [Sampling(1.0), None, Sampling(2.0, 2)]
    batch = RaggedBatch(
        [[0]] * 3, [0] * 3, [1] * 3, [1] * 3, [0] * 3, [0] * 3, [0] * 3, samplings
    )
    chances = generator.probabilities(batch, None)
    assert chances[0].allclose(logits[0].double().softmax(-1))
    assert chances[1].tolist() == [0, 0, 1]
    assert chances[2].allclose(torch.tensor([float("-inf"), 0.5, 1.0]).double().softmax(-1))


def test_rows_that_are_drawn_in_other_ways_do_not_change_a_sample():
    """A row is drawn as if it were alone, whatever the other rows of its batch are."""
    ways = [
        Sampling(),
        Sampling(0.7),
        Sampling(1.5, 3),
        Sampling(1.0, None, 0.6),
        Sampling(2, 9),
    ]
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    rows = [ways[index % len(ways)] for index in range(50)]
    marks = [(index, index) for index in range(50)]
    alone = [
        sample(logits[index : index + 1], [marks[index]], [rows[index]])[0]
        for index in range(50)
    ]
    assert sample(logits, marks, rows) == alone


def test_dense_attention_equals_torch():
    """Causal dense attention equals torch's scaled-dot-product attention, also for a suffix."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, h, 4, generator=source, dtype=torch.float64) for h in (6, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(attention(q, k, v), expected)
    torch.testing.assert_close(attention(q[3:], k, v), expected[3:])


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (SinCos, {"model": "llama-9"}, "did you mean llama-3-8b"),
        (SinCos, {"model": "deepseek-v3"}, "'deepseek-v3' stores a latent"),
        (SinCos, {"model": "llama-4-scout"}, "'llama-4-scout' keep different things"),
        (SinCos, {"layers": 0}, "layers must be at least 1"),
        (SinCos, {"vocab_size": 2**18 + 1}, "1 to 262,144, not 262145"),
        (SinCos, {"heads": 4}, "4 query heads cannot share 8"),
        (Transformer, {"head_dim": 5}, "even, not 5"),
        (Transformer, {"rope_theta": 0.0}, "rope_theta must be above 0, not 0.0"),
        (Transformer, {"temperature": float("nan")}, "temperature must be .*, not nan"),
        (Transformer, {"window": 0}, "window must be at least 1 token"),
        (Transformer, {"hidden": 0}, "hidden_size must be at least 1, not 0"),
    ],
)
def test_impossible_options_are_refused(build, options, message):
    """Impossible option values raise InputError with the reason."""
    with pytest.raises(InputError, match=message):
        build(**options)


def test_weights_that_do_not_fit_are_refused():
    """Weights and a pool that exceed the device's memory raise StorageError before loading.

    The error names both sizes, the free memory and what would help.
    """

    class Small(TorchCPU):
        def memory(self):
            return DeviceMemory(0, 10**6, 10**6)

    generator = Transformer(layers=3)
    assert generator.weight_bytes("fp32") < 10**6
    cache = KVCache(100, 16, ids=True)
    with pytest.raises(StorageError) as caught:
        run([], cache=cache, generator=generator, backend=Small())
    assert generator._decoder is None
    assert str(caught.value) == (
        "the weights of tiny take 798 KiB in fp32, the pool of K/V 1.17 MiB, and torch-cpu "
        "has 977 KiB free: take fewer layers, as in generator transformer:layers=2, a smaller "
        "dtype or model, or fewer blocks"
    )


@pytest.mark.parametrize("error", [RuntimeError("can't allocate\nat ..."), MemoryError()])
def test_weights_that_cannot_be_allocated_are_refused(monkeypatch, error):
    """A failed allocation of weights raises StorageError with the allocator's reason."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(torch, "randn", fail)
    reason = "can't allocate" if isinstance(error, RuntimeError) else "too little memory"
    with pytest.raises(
        StorageError, match=rf"cannot be made: give fewer layers.*\({reason}\)$"
    ):
        Transformer().load(HostTensors(), "fp32")


@pytest.mark.parametrize("name", ["transformer", "induction"])
def test_a_backend_with_other_tensors_is_refused(name):
    """A generator that computes with torch refuses a backend whose tensors are others."""

    class Lists(TorchCPU):
        name = "lists"

        def tensor(self, data, dtype=None):
            return list(data)

    with pytest.raises(InputError, match=rf"{name}' computes with torch.* 'lists' are others"):
        Plugins().build("generator", name).load(Lists(), "fp32")
