"""The `induction` generator: it repeats the token that followed before, found by its K/V."""

import attrs
import pytest

torch = pytest.importorskip("torch", reason="generators compute on torch")

from kvcore import InputError, Plugins  # noqa: E402
from kvcore.testing.dense import (  # noqa: E402
    DenseCache,
    Text,
    attention,
    loaded,
    next_batch,
)
from kvcore_engine.generator import Induction  # noqa: E402

KEY, VALUE = 700, 800


def built(options="", dtype="fp32"):
    """Return a loaded `induction` generator."""
    return loaded(Plugins().build("generator", f"induction:{options}".rstrip(":")), dtype)


def others(count, vocabulary=600):
    """Return tokens other than KEY and VALUE."""
    source = torch.Generator().manual_seed(5)
    return torch.randint(1, vocabulary, (count,), generator=source).tolist()


def next_probabilities(generator, tokens, attend=None):
    """Return the probabilities of the token after `tokens`."""
    attend = attend or DenseCache().attend([0], [len(tokens)])
    logits = generator.logits(next_batch([Text(tokens)], [len(tokens)]), attend)
    return logits[0].double().softmax(-1)


def without(place, layer=1, heads=slice(None)):
    """Return an `attend` that lacks the K/V of one position in one layer."""

    def attend(at, queries, keys, values, **_):
        if at != layer:
            return attention(queries, keys, values)
        gone = values.clone()
        keys = keys.clone()
        keys[place, heads], gone[place, heads] = 0, 0
        return attention(queries, keys, gone)

    return attend


@pytest.mark.parametrize("dtype", ["fp64", "fp16"])
def test_positions_are_distinguished_far_into_a_text(dtype):
    """At positions beyond 100,000 a token still attends to the one just before it."""
    generator, tokens = built(dtype=dtype), [*others(50), KEY, VALUE, *others(50), KEY]
    step = next_batch([Text(tokens)], [len(tokens)])
    far = attrs.evolve(step, positions=[131_071 + place for place in step.positions])
    logits = generator.logits(far, DenseCache().attend([0], [len(tokens)]))
    assert int(logits.argmax()) == VALUE


def test_each_key_is_answered_by_its_own_head():
    """Keys of all residues are answered, each by the one K/V head that looks it up."""
    generator = built()
    for key in range(KEY, KEY + 4):
        tokens = [*others(20), key, VALUE, *others(30), key]
        assert next_probabilities(generator, tokens)[VALUE] > 0.999
        head = key % 4 // 2
        missed = next_probabilities(generator, tokens, without(21, heads=head))
        assert missed[VALUE] < 0.01
        found = next_probabilities(generator, tokens, without(21, heads=1 - head))
        assert found[VALUE] > 0.999


def test_a_value_without_kv_is_not_generated():
    """Without the K/V of the value in layer 1 the value is not generated."""
    tokens = [*others(50), KEY, VALUE, *others(50), KEY]
    missed = next_probabilities(built(), tokens, without(51))
    assert int(missed.argmax()) != VALUE
    assert missed[VALUE] < 0.01


def test_rotary_moves_a_key_to_a_later_position():
    """A key of layer 0 rotated by d is the key of its position plus d."""
    generator = built(dtype="fp64")
    rotary, none = generator.rotary
    keys = []

    def attend(_layer, queries, k, _values, **_):
        keys.append(k)
        return queries

    generator.logits(next_batch([Text(others(9))], [9]), attend)
    angles = 3 * torch.tensor(rotary.speeds, dtype=torch.float64)
    a, b = keys[0][5, 0].chunk(2)
    turned = torch.cat(
        (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    )
    torch.testing.assert_close(turned, keys[0][8, 0])
    assert none.speeds == ()


def test_accepted_codes_are_distinguishable():
    """The narrowest codes that are accepted have cosines of less than 0.7."""
    for size, width in ((16, 24), (1024, 58), (4096, 70)):
        with pytest.raises(
            InputError, match=f"head_dim={width - 2} must be .* {width} or more"
        ):
            Induction(vocab_size=size, head_dim=width - 2)
        generator = loaded(Induction(vocab_size=size, head_dim=width))
        cosines = generator._codes @ generator._codes.T
        assert float(cosines.fill_diagonal_(0).max()) < 0.7


@pytest.mark.parametrize("seed", [194, 4561])
def test_codes_that_are_alike_are_refused(seed):
    """A seed whose codes could be mistaken for one another is refused when it is loaded."""
    generator = Induction(vocab_size=3, head_dim=12, seed=seed)
    with pytest.raises(InputError, match=f"with seed={seed} .* above 0.7, .* another seed"):
        loaded(generator)


def test_the_codes_of_many_tokens_are_compared_by_parts(monkeypatch):
    """The largest cosine of two codes does not depend on how many are compared at a time."""
    monkeypatch.setattr("kvcore_engine.generator.induction._CHUNK", 1)
    with pytest.raises(InputError, match=r"a cosine of 0\.78"):
        loaded(Induction(vocab_size=3, head_dim=12, seed=194))


@pytest.mark.parametrize("tokens", [[5], [5, 6, 7, 8, 9], [0, 1, 0, 2], others(300, 1024)])
def test_a_text_without_an_answer_goes_on_with_the_blank(tokens):
    """A token that was not there before has no answer: all logits are 0, and token 0 comes."""
    generator = built()
    tokens = [token for token in tokens if token != KEY] + [KEY]
    step = next_batch([Text(tokens)], [len(tokens)])
    logits = generator.logits(step, DenseCache().attend([0], [len(tokens)]))
    assert not logits.any()
    assert generator.sampled(logits, step) == [0]


@pytest.mark.parametrize("option", ["heads", "kv_heads", "head_dim", "vocab_size", "seed"])
def test_sizes_are_whole_numbers(option):
    """A size with a fraction is refused, and named."""
    with pytest.raises(InputError, match=rf"induction: {option}=4.0: give a whole number"):
        Induction(**{option: 4.0})


def test_without_torch_the_reason_names_the_package(monkeypatch):
    """Without torch, `unavailable()` names the package to install."""
    monkeypatch.setattr("kvcore_engine.generator.sampling.find_spec", lambda _: None)
    assert "pip install 'kvcore[torch]'" in Induction.unavailable()
