"""The conformance tests of generators: a right one passes, wrong ones do not."""

import inspect
import re
from pathlib import Path

import attrs
import pytest

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
    """As a third party would write it: K/V counts, the next token is the one after."""

    name = "mine"
    vocab: int = 50

    @property
    def spec(self) -> ModelSpec:
        """Two layers."""
        return SPEC

    @property
    def vocabulary(self) -> int:
        """Some."""
        return self.vocab

    def load(self, backend, dtype):
        """Refuse what is no dtype."""
        backend.tensor([0.0], "fp64")
        if dtype != "fp64":
            msg = f"mine computes in fp64, not in {dtype}"
            raise InputError(msg)
        super().load(backend, dtype)

    def numbers(self, step):
        """Return a number for each row."""
        return [t + p / 9 for t, p in zip(step.token_ids, step.positions, strict=True)]

    def forward(self, step, attend):
        """Attend twice."""
        x = self.backend.tensor(self.numbers(step), "fp64").reshape(-1, 1, 1)
        for layer, window in self.order():
            wide = x.expand(-1, 2, 2)
            attend(layer, wide, x.expand(-1, 1, 2), x.expand(-1, 1, 2), window=window)
        return self.drawn(step)

    def order(self):
        """Return layers and windows."""
        return enumerate(self.windows)

    def drawn(self, step):
        """Return the next of each."""
        ends = [sum(step.lengths[: i + 1]) - 1 for i in range(len(step.lengths))]
        return [
            None if place is None else (step.token_ids[end] + 1) % self.vocab
            for end, place in zip(ends, step.output_indices, strict=True)
        ]


class TestMine(GeneratorTests):
    """A class with a forward is enough."""

    generator = Mine


class TestPage(GeneratorTests):
    """The generator that the reference page writes."""

    def make(self):
        """Take it from the page."""
        page = Path(__file__).parents[2] / "docs/reference/generators.md"
        (source,) = re.findall(
            r"^```python\n(from [^`]*?\nclass Counting.*?)^```$",
            page.read_text("utf-8"),
            re.DOTALL | re.MULTILINE,
        )
        names = {}
        exec(source, names)  # noqa: S102
        return names["Counting"]()


class Backwards(Mine):
    """Begins with the last layer."""

    def order(self):
        """Return them so."""
        return reversed(list(super().order()))


class Blind(Mine):
    """Forgets its windows."""

    def order(self):
        """Return none."""
        return [(0, None), (1, None)]


class Eager(Mine):
    """Draws within prefills too."""

    def drawn(self, step):
        """Return a token for all."""
        return [1] * len(step.lengths)


class Crowded(Mine):
    """Sees the others of its batch."""

    def numbers(self, step):
        """Add how many they are."""
        return [number + len(step.lengths) for number in super().numbers(step)]


class Hasty(Mine):
    """Counts positions from the start of a chunk."""

    def numbers(self, step):
        """Return places in the step."""
        return [place for length in step.lengths for place in range(length)]


class Forgetful(Mine):
    """Knows how often it was asked."""

    asked = 0

    def drawn(self, step):
        """Return what nobody can repeat."""
        type(self).asked += 1
        return [None if place is None else self.asked % 50 for place in step.output_indices]


class Careless(Mine):
    """Takes any dtype."""

    def load(self, backend, dtype):
        """Take it."""
        self.backend, self.dtype = backend, dtype


class Beyond(Mine):
    """Says tokens that are not in its vocabulary."""

    def drawn(self, step):
        """Return a large one."""
        return [None if place is None else 50 for place in step.output_indices]


class Wordless(Mine):
    """Encodes nothing."""

    def encode(self, text):
        """Return no token."""
        return []


@pytest.mark.parametrize(
    ("generator", "test"),
    [
        (Backwards, "attends_once_in_each_layer_in_order"),
        (Blind, "attends_once_in_each_layer_in_order"),
        (Eager, "draws_where_it_is_asked_to"),
        (Eager, "a_step_without_a_draw"),
        (Beyond, "draws_where_it_is_asked_to"),
        (Crowded, "does_not_depend_on_the_batch"),
        (Hasty, "does_not_depend_on_chunks"),
        (Forgetful, "is_deterministic"),
        (Forgetful, "goes_on_after_recompute"),
        (Wordless, "encodes_text"),
    ],
)
def test_finds_what_is_wrong(generator, test):
    """Each wrong generator fails the test that is about it."""
    with pytest.raises(AssertionError):
        run(generator, test)


def test_finds_who_takes_any_dtype():
    """Not refusing is a failure."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run(Careless, "refuses_a_dtype")


def run(cls, test):
    """Run one test of the kit on a generator class."""

    class Kit(GeneratorTests):
        generator = cls

    method = getattr(Kit(), f"test_{test}")
    values = {"seed": 0, "chunk": 3, "block_size": 4}
    return method(**{name: values[name] for name in inspect.signature(method).parameters})
