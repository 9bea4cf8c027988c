"""The conformance tests of generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import attrs
import pytest

from kvcore.engine import (
    AttendOptions,
    Backend,
    Generator,
    RaggedBatch,
    Rotation,
    attend_through,
)
from kvcore.errors import InputError, KvcoreError
from kvcore.lazy import LazyModule
from kvcore.models.spec import ModelSpec
from kvcore.plugins.manager import Plugins
from kvcore_engine.executor import tensor_layout
from kvcore_testing.dense import (
    DenseCache,
    HostTensors,
    Text,
    advance,
    generate,
    loaded,
    torch_dtype,
)
from kvcore_testing.plugin import NamedTests, other_hashes, seeds

if TYPE_CHECKING:
    import torch

    from kvcore.engine import Attend, Tensor
else:
    torch = LazyModule("torch", globals())

BLOCK = 4


class GeneratorTests(NamedTests[Generator]):
    """Conformance tests of a generator; a derived `Test...` class makes the generator.

    The attribute `generator` is what `make` calls. It is small enough to compute hundreds of
    tokens quickly:

        class TestMine(GeneratorTests):
            generator = Mine

    The generator continues a few short texts in fp64, over a dense and over a paged cache; its
    calls of `attend` are recorded. Needs torch.

    Attributes:
        tolerance: allowed absolute and relative difference between the same numbers computed
            in different batches and chunks; 0: they are equal to the bit.
    """

    base = Generator
    generator: ClassVar[Callable[[], Generator]]
    tolerance: ClassVar[float] = 1e-10

    seed = seeds(3)

    def test_describes_itself_before_load(self) -> None:
        """Shape, vocabulary and end tokens are known before `load`, and consistent."""
        generator = self.make()
        assert isinstance(generator.spec, ModelSpec)
        assert generator.vocabulary >= 1
        assert all(0 <= token < generator.vocabulary for token in generator.eos_token_ids)

    def test_has_an_identity(self) -> None:
        """Equal options have one `identity`, by which tiers keep K/V; it is not empty."""
        assert self.make().identity() == self.make().identity() != ""

    def test_refuses_a_dtype(self) -> None:
        """`load` with an unknown dtype raises an InputError that names the dtype."""
        host: Any = HostTensors()
        with pytest.raises(InputError, match="fp7"):
            self.make().load(host, "fp7")

    def test_attends_once_in_each_layer_in_order(self) -> None:
        """A step calls `attend` once for each layer, in order, with the window of the layer."""
        generator = loaded(self.make())
        calls = self._watched(generator, _texts(generator, 0), chunk=5)
        layers = list(range(generator.spec.layers))
        for step in calls:
            assert [call.layer for call in step] == layers, "layers of the calls of attend"
            assert tuple(call.window for call in step) == tuple(generator.spec.windows)

    def test_shapes(self) -> None:
        """Queries, keys and values are `[tokens, heads, width]` of the spec, in the dtype."""
        generator = loaded(self.make())
        spec, dtype = generator.spec, torch_dtype(generator.dtype)
        for step in self._watched(generator, _texts(generator, 0), chunk=5):
            for call in step:
                shapes = [tuple(x.shape) for x in (call.queries, call.keys, call.values)]
                assert shapes == [
                    (call.count, spec.query_heads, spec.head_dim),
                    (call.count, spec.kv_heads, spec.head_dim),
                    (call.count, spec.kv_heads, spec.value_dim),
                ], f"queries, keys, values in layer {call.layer}"
                dtypes = {x.dtype for x in (call.queries, call.keys, call.values)}
                assert dtypes == {dtype}, f"{dtypes} in layer {call.layer}"

    def test_draws_where_it_is_asked_to(self) -> None:
        """A step returns a token for each text whose last token it computes, else None."""
        generator = loaded(self.make())
        texts = _texts(generator, 1)
        counts = [max(1, text.left - index % 2) for index, text in enumerate(texts)]
        wanted = [count == text.left for count, text in zip(counts, texts, strict=True)]
        attend = DenseCache().attend(range(len(texts)), counts)
        drawn = advance(generator, texts, counts, attend)
        assert [token is not None for token in drawn] == wanted, (
            f"{drawn}, expected at {wanted}"
        )
        tokens = [token for token in drawn if token is not None]
        assert all(type(token) is int for token in tokens), tokens
        assert all(0 <= token < generator.vocabulary for token in tokens), tokens

    def test_a_step_without_a_draw(self) -> None:
        """A step that computes the last token of no text returns None for each."""
        generator = loaded(self.make())
        texts = [text for text in _texts(generator, 0) if text.left > 1]
        counts = [1] * len(texts)
        attend = DenseCache().attend(range(len(texts)), counts)
        assert advance(generator, texts, counts, attend) == [None] * len(texts)

    def test_is_deterministic(self, seed: int) -> None:
        """Two generators with equal options compute equal bits and equal tokens."""
        runs = []
        for meanwhile in (nullcontext, other_hashes):
            with meanwhile():
                generator = loaded(self.make())
                texts = _texts(generator, seed)
                rows = _by_text(texts, self._watched(generator, texts))
            runs.append((rows, [text.tokens for text in texts]))
        (first, tokens), (second, tokens_again) = runs
        assert tokens == tokens_again, "run again, it generated other tokens"
        for run, two in zip(first, second, strict=True):
            _close(run, two, 0)

    def test_does_not_depend_on_the_batch(self, seed: int) -> None:
        """The K/V and the output of a text are the same alone and in a batch."""
        generator = loaded(self.make())
        together, alone = _texts(generator, seed), _texts(generator, seed)
        rows = _by_text(together, self._watched(generator, together))
        for index, text in enumerate(alone):
            (mine,) = _by_text([text], self._watched(generator, [text]))
            assert text.tokens == together[index].tokens, f"text {index}"
            _close(mine, rows[index], self.tolerance)

    @pytest.mark.parametrize("chunk", [1, 3, 8])
    def test_does_not_depend_on_chunks(self, chunk: int, seed: int) -> None:
        """The K/V and the output of a prompt are the same in chunks and at once."""
        generator = loaded(self.make())
        at_once, parts = _texts(generator, seed), _texts(generator, seed)
        expected = _by_text(at_once, self._watched(generator, at_once))
        rows = _by_text(parts, self._watched(generator, parts, chunk=chunk))
        assert [text.tokens for text in parts] == [text.tokens for text in at_once]
        for mine, others in zip(rows, expected, strict=True):
            _close(mine, others, self.tolerance)

    def test_goes_on_after_recompute(self, seed: int) -> None:
        """A text whose K/V are recomputed after a preemption continues unchanged."""
        generator = loaded(self.make())
        once, twice = _texts(generator, seed), _texts(generator, seed)
        expected = generate(generator, once, 8)
        generate(generator, twice, 3)
        assert generate(generator, twice, 8, chunk=5) == expected

    @pytest.mark.parametrize("block_size", [1, BLOCK, 16])
    def test_paged_is_dense(self, block_size: int, seed: int) -> None:
        """Over shuffled blocks, NaN at first, it generates the tokens of a dense cache."""
        try:
            backend = Plugins().build("backend", "torch-cpu")
        except KvcoreError as error:
            pytest.skip(str(error))
        generator = self.make()
        generator.load(backend, "fp64")
        dense, paged = _texts(generator, seed), _texts(generator, seed)
        tables = _tables(dense, 6, block_size, Random(seed))  # noqa: S311
        backend.allocate(
            tensor_layout(generator.spec, sum(map(len, tables)), block_size, "fp64")
        )
        backend.fill(float("nan"))
        for _ in range(6):
            counts = [text.left for text in paged]
            batch = RaggedBatch(tables, [text.computed for text in paged], counts)
            advance(generator, paged, counts, _paged(backend, batch))
        generate(generator, dense, 6)
        assert [text.tokens for text in paged] == [text.tokens for text in dense]

    def test_encodes_text(self) -> None:
        """`encode` returns the same tokens of the vocabulary each time, `decode` text."""
        generator = self.make()
        tokens = generator.encode("a cache of keys, and of values")
        assert tokens
        assert all(type(token) is int for token in tokens)
        assert all(0 <= token < generator.vocabulary for token in tokens)
        assert tokens == self.make().encode("a cache of keys, and of values")
        assert isinstance(generator.decode(tokens), str)

    def _watched(
        self, generator: Generator, texts: list[Text], output: int = 4, chunk: int | None = None
    ) -> list[list[_Call]]:
        """Generate over a dense cache; return the calls of `attend` of each step."""
        steps: list[list[_Call]] = []

        def watch(attend: Attend, rows: list[int]) -> Attend:
            steps.append([])
            return _watching(attend, rows, steps[-1])

        generate(generator, texts, output, chunk, watch)
        return steps


@attrs.frozen(eq=False)
class _Call:
    """A recorded call of `attend`; `texts` has the text of each row."""

    texts: list[int]
    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    window: int | None

    @property
    def count(self) -> int:
        return len(self.texts)


def _watching(attend: Attend, texts: list[int], calls: list[_Call]) -> Attend:
    def watched(
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        rotation: Rotation | None = None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        keys = keys if rotation is None else rotation.rotate(keys)
        calls.append(_Call(texts, layer, queries, keys, values, options.get("window")))
        return attend(layer, queries, keys, values, **options)

    return watched


def _texts(generator: Generator, seed: int) -> list[Text]:
    """Return texts of different lengths; two have the same prompt and different seeds."""
    random = Random(seed)  # noqa: S311
    prompts = [
        [random.randrange(generator.vocabulary) for _ in range(length)]
        for length in (1, 2 * BLOCK, random.randint(2, 12), random.randint(2, 12))
    ]
    return [Text(p, seed=n) for n, p in enumerate([*prompts, prompts[-1]])]


def _by_text(texts: Sequence[Text], steps: list[list[_Call]]) -> list[dict[Any, list[Tensor]]]:
    """Return the rows of each text, in order, by layer and name of the tensor."""
    rows_of_texts: list[dict[Any, list[Tensor]]] = [{} for _ in texts]
    for call in (call for step in steps for call in step):
        for row, text in enumerate(call.texts):
            for name in ("queries", "keys", "values"):
                rows = rows_of_texts[text].setdefault((call.layer, name), [])
                rows.append(getattr(call, name)[row])
    return rows_of_texts


def _close(
    computed: dict[Any, list[Tensor]], expected: dict[Any, list[Tensor]], tolerance: float
) -> None:
    assert computed.keys() == expected.keys()
    for key, rows in computed.items():
        got, two = torch.stack(rows), torch.stack(expected[key])
        torch.testing.assert_close(got, two, rtol=tolerance, atol=tolerance)


def _tables(
    texts: Sequence[Text], output: int, block_size: int, random: Random
) -> list[list[int]]:
    """Return shuffled block tables that hold each text and its output."""
    needs = [-(-(text.prompt + output) // block_size) for text in texts]
    ids = list(range(sum(needs)))
    random.shuffle(ids)
    return [[ids.pop() for _ in range(need)] for need in needs]


def _paged(backend: Backend, batch: RaggedBatch) -> Attend:
    """Return the `Attend` of `batch` over the blocks of `backend`."""
    return attend_through(backend.plan(batch), backend.store_rotated, backend.attend)
