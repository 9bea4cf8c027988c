"""The conformance tests of generators accept a correct generator and find wrong ones."""

import attrs
import pytest
from helpers.faults import faulty, run_test
from helpers.pages import class_on_page

pytest.importorskip("torch", reason="generators compute on torch")

from kvcore import Generator, InputError
from kvcore.models.catalogue import MODELS
from kvcore.models.spec import ModelSpec
from kvcore.testing import GeneratorTests

SPEC = attrs.evolve(
    MODELS["gpt2"],
    layers=2,
    windows=(None, 3),
    query_heads=2,
    kv_heads=1,
    head_dim=2,
    value_dim=2,
)


@attrs.define(slots=False, eq=False)
class Mine(Generator):
    """A generator as a third party would write it.

    K/V encode tokens and positions; the next token is the last one plus 1.
    """

    name = "mine"
    vocab: int = 50

    @property
    def spec(self) -> ModelSpec:
        """A model of two layers."""
        return SPEC

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return self.vocab

    def load(self, backend, dtype):
        """Raise InputError for a dtype other than fp64."""
        backend.tensor([0.0], "fp64")
        if dtype != "fp64":
            msg = f"mine computes in fp64, not in {dtype}"
            raise InputError(msg)
        super().load(backend, dtype)

    def numbers(self, step):
        """Return a number for each token that encodes its id and its position."""
        return [t + p / 9 for t, p in zip(step.token_ids, step.positions, strict=True)]

    def forward(self, step, attend):
        """Attend once in each layer; return the next tokens."""
        x = self.backend.tensor(self.numbers(step), "fp64").reshape(-1, 1, 1)
        for layer, window in self.order():
            wide = x.expand(-1, 2, 2)
            attend(layer, wide, x.expand(-1, 1, 2), x.expand(-1, 1, 2), window=window)
        return self.drawn(step)

    def order(self):
        """Yield each layer with its window."""
        return enumerate(self.spec.windows)

    def drawn(self, step):
        """Return the next token of each sequence that samples, and None for the others."""
        ends = [sum(step.lengths[: i + 1]) - 1 for i in range(len(step.lengths))]
        return [
            None if place is None else (step.token_ids[end] + 1) % self.vocab
            for end, place in zip(ends, step.output_indices, strict=True)
        ]


class TestMine(GeneratorTests):
    """Conformance tests of a generator that defines little more than `forward`."""

    generator = Mine


class TestPage(GeneratorTests):
    """Conformance tests of the generator on the reference page."""

    def make(self):
        """Return the generator whose source is on the reference page."""
        return class_on_page("reference/generators.md", "Counting")()


class Backwards(Mine):
    """A generator that begins with the last layer."""

    def order(self):
        """Return the layers in reverse order."""
        return reversed(list(super().order()))


Blind = faulty(
    "A generator that ignores its attention windows.",
    Mine,
    order=lambda *_: [(0, None), (1, None)],
)
Eager = faulty(
    "A generator that samples within prefills too.",
    Mine,
    drawn=lambda _, step: [1] * len(step.lengths),
)


class Crowded(Mine):
    """A generator whose K/V depend on the size of the batch."""

    def numbers(self, step):
        """Return the numbers of the tokens plus the number of sequences."""
        return [number + len(step.lengths) for number in super().numbers(step)]


Hasty = faulty(
    "A generator that counts positions from the start of a chunk.",
    Mine,
    numbers=lambda _, step: [index for length in step.lengths for index in range(length)],
)


class Forgetful(Mine):
    """A generator whose tokens depend on the number of calls before."""

    asked = 0

    def drawn(self, step):
        """Return tokens that differ from call to call."""
        type(self).asked += 1
        return [None if place is None else self.asked % 50 for place in step.output_indices]


class Careless(Mine):
    """A generator that accepts any dtype."""

    def load(self, backend, dtype):
        """Store the backend and the dtype without a check."""
        self.backend, self.dtype = backend, dtype


Beyond = faulty(
    "A generator that samples tokens outside its vocabulary.",
    Mine,
    drawn=lambda _, step: [None if place is None else 50 for place in step.output_indices],
)
Wordless = faulty(
    "A generator that encodes every text as no tokens.", Mine, encode=lambda *_: []
)


WRONG = [
    (Backwards, "attends_once_in_each_layer_in_order", r"calls of attend\nassert \[1, 0\]"),
    (Blind, "attends_once_in_each_layer_in_order", r"\(None, None\) == \(None, 3\)"),
    (Eager, "draws_where_it_is_asked_to", r"\[1, 1, 1, 1, 1\], expected at \[True, False"),
    (Eager, "a_step_without_a_draw", r"\[1, 1, 1, 1\] == \[None, None, None, None\]"),
    (Beyond, "draws_where_it_is_asked_to", r"^\[50, 50, 50\]"),
    (Crowded, "does_not_depend_on_the_batch", "not close"),
    (Hasty, "does_not_depend_on_chunks", "not close"),
    (Forgetful, "is_deterministic", "run again, it generated other tokens"),
    (Forgetful, "goes_on_after_recompute", r"^assert \[\[\d+, .*\]\] == \[\[\d+, "),
    (Wordless, "encodes_text", r"^assert \[\]$"),
]


@pytest.mark.parametrize(
    ("generator", "test", "fault"),
    WRONG,
    ids=[test for _, test, _ in WRONG],
)
def test_each_wrong_generator_fails_its_test(generator, test, fault):
    """Each wrong generator fails the conformance test of the rule that it breaks."""
    with pytest.raises(AssertionError, match=fault):
        run_test(GeneratorTests, generator, test, seed=0, chunk=3, block_size=4)


def test_a_generator_that_accepts_any_dtype_fails():
    """A generator that accepts an unknown dtype fails the conformance test."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run_test(GeneratorTests, Careless, "refuses_a_dtype")
