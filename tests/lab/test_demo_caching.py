"""One model that generates without a cache, with a dense one, and with a paged one."""

from collections.abc import Callable
from typing import ClassVar

import attrs
import pytest

from kvcore import Generator, InputError, PluginError
from kvcore.models.spec import ModelSpec
from kvcore.plugins.manager import Plugins
from kvcore_lab.demo import OneHead
from kvcore_lab.demo.caching import (
    causal_attention,
    token_projections,
    with_and_without_cache,
)

torch = pytest.importorskip("torch")


def generations(generator="transformer", **options):
    """Return the generations of a model with each of the three caches."""
    plugins = Plugins()
    if isinstance(generator, str):
        generator = plugins.build("generator", generator)
    return with_and_without_cache(generator, plugins.build("backend", "torch-cpu"), **options)


@attrs.define(slots=False, eq=False)
class Scripted(Generator):
    """A generator that returns a function of a step's tokens: by default, their number."""

    name: ClassVar[str] = "scripted"
    answer: Callable = attrs.field(default=len)

    @property
    def spec(self):
        """Return the shape of a tiny model."""
        return ModelSpec(
            name="scripted",
            layers=1,
            query_heads=1,
            kv_heads=1,
            head_dim=2,
            hidden_size=2,
            parameters=1,
        )

    @property
    def vocabulary(self):
        """Return the size of the vocabulary."""
        return 100

    def forward(self, step, attend):
        """Return the result of the function."""
        return [self.answer(step.token_ids)]


class Products(torch.overrides.TorchFunctionMode):
    """A mode of torch that counts the rows multiplied with matrices of `columns` columns."""

    def __init__(self, columns):
        """Start at 0 rows."""
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Count the rows of a product, and compute it."""
        if "matmul" in function.__name__ and tuple(args[1].shape) == (64, self.columns):
            self.rows += len(args[0])
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def default():
    """Return the generations of 100 tokens after a prompt of 10."""
    return generations()


def test_all_three_caches_generate_the_same_tokens(default):
    """The tokens are the same without a cache, with a dense one, and with a paged one."""
    none, dense, paged = default
    assert len(none.tokens) == 100
    assert none.tokens == dense.tokens == paged.tokens


def test_projections_of_a_long_output():
    """Without a cache, 200 new tokens take 104 times the projections, 1,000 take 505 times."""
    small = Plugins().build("generator", "transformer:layers=1,hidden=8,heads=1,kv_heads=1")
    counts = [generation.token_projections for generation in generations(small, output=200)]
    assert counts == [21_900, 209, 209]
    assert [token_projections(10, 1_000, cached=cached) for cached in (False, True)] == [
        509_500,
        1_009,
    ]


def test_projections_are_the_rows_of_the_matrix_products():
    """The counted projections are the rows that are multiplied with the Q, K, V weights."""
    generator = Plugins().build("generator", "transformer:layers=3")
    # 4 query heads and 2 + 2 of keys and values, 16 wide.
    with Products(columns=128) as products:
        counts = [
            generation.token_projections for generation in generations(generator, output=7)
        ]
    warm_up = 10
    assert products.rows == 3 * (sum(counts) + warm_up)


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (1, 9), (17, 1), (32, 5)])
def test_token_projections_equals_the_counted_ones(prompt, output):
    """`token_projections` computes the number that a generation counts."""
    naive, *cached = generations(prompt_tokens=prompt, output=output)
    assert naive.token_projections == token_projections(prompt, output, cached=False)
    for each in cached:
        assert each.token_projections == token_projections(prompt, output, cached=True)


@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
def test_held_bytes_of_each_cache(block_size):
    """A generation holds no bytes, all bytes from the start, or whole blocks as needed.

    These are those without a cache, with a dense one, and with a paged one.
    """
    none, dense, paged = generations(output=30, block_size=block_size)
    token = 2 * 2 * 2 * 16 * 8  # K and V, layers, K/V heads, width, bytes
    assert set(none.step_kv_bytes) == {0}
    assert set(dense.step_kv_bytes) == {39 * token}
    blocks = [-(-(10 + step) // block_size) for step in range(30)]
    assert list(paged.step_kv_bytes) == [block_size * token * count for count in blocks]


def test_every_step_is_timed_and_reported():
    """Each step has a time, and `done` is called after each step of each generation."""
    steps = []
    found = generations(output=5, done=steps.append)
    assert [len(each.step_seconds) for each in found] == [5, 5, 5]
    assert steps == [1] * 15


def test_the_seed_determines_the_output():
    """Equal seeds give equal outputs, and another seed gives another."""
    first, second, third = (generations(output=8, seed=seed)[0].tokens for seed in (1, 1, 2))
    assert first == second != third


def test_a_cache_that_changes_tokens_is_reported():
    """If a cache changes the tokens, the error gives the first one that differs."""
    with pytest.raises(PluginError, match="output token 1 is 11 without a cache and 1 with"):
        generations(Scripted())


def test_a_generator_without_a_token_is_reported():
    """A generator that returns no token raises PluginError with the place."""
    with pytest.raises(PluginError, match="'scripted' gave no token for place 0"):
        generations(Scripted(lambda _: None))


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (3, 0), (1, 0), (2, 2), (50, 1)])
def test_grouped_windowed_attention_equals_one_head(window, sinks):
    """With grouped heads, windows and sinks, each row of each head equals `OneHead`."""
    source = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(shape, generator=source, dtype=torch.float64)
        for shape in ((4, 6, 8), (9, 2, 8), (9, 2, 5))
    )
    found = causal_attention(queries, keys, values, window=window, sinks=sinks)
    assert found.shape == (4, 6, 5)
    for row in range(4):
        place = 5 + row
        seen = [
            index
            for index in range(place + 1)
            if window is None or index > place - window or index < sinks
        ]
        for head in range(6):
            one = OneHead(
                (queries[row, head] / 8**0.5).tolist(),
                keys[seen, head // 3].tolist(),
                values[seen, head // 3].tolist(),
            )
            assert found[row, head].tolist() == pytest.approx(one.output, abs=1e-12)


@pytest.mark.parametrize(
    ("output", "naive", "cached"), [(1, 10, 10), (100, 5_950, 109), (1_000, 509_500, 1_009)]
)
def test_projections_after_a_prompt_of_10_tokens(output, naive, cached):
    """Without a cache, projections grow with the square of the output; with one, linearly."""
    assert token_projections(10, output, cached=False) == naive
    assert token_projections(10, output, cached=True) == cached


@pytest.mark.parametrize(("prompt", "output"), [(0, 5), (5, 0)])
def test_an_empty_prompt_or_output_is_refused(prompt, output):
    """An empty prompt or output raises InputError with both numbers."""
    with pytest.raises(InputError, match=f"{output} new tokens after a prompt of {prompt}"):
        token_projections(prompt, output, cached=True)
