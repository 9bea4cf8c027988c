"""The conformance tests of retention policies: a right policy passes, wrong ones do not."""

from functools import partial

import pytest

from kvcore import InputError, PolicyError, RetentionPolicy, ScoreRetention
from kvcore.engine import Reads, TokenRetention
from kvcore.testing import RetentionPolicyTests

torch = pytest.importorskip("torch", reason="scores are computed on torch tensors")


class Newest(ScoreRetention):
    """Keeps the newest tokens."""

    name = "newest"
    reads = Reads(keys=True)

    def score(self, held):
        """Return their positions."""
        return held.positions.double()


class Requester(Newest):
    """Keeps less of some requests than of others of the same lengths."""

    def keeps(self, seq):
        """Ask for the identifier."""
        return 20 if seq.request.id == "other" else super().keeps(seq)


class Nothing(TokenRetention):
    """Keeps no token of a long sequence."""

    name = "nothing"

    def keeps(self, seq):
        """Return 0."""
        return 0 if seq.held > 60 else None

    def score(self, held):
        """Return their positions."""
        return held.positions.double()


class Growing(Newest):
    """Never compacts again."""

    def keeps(self, seq):
        """Ask at the end of the prompt alone."""
        return self.budget if seq.position == seq.target else None


class Rough(Newest):
    """Scores in half precision."""

    def score(self, held):
        """Return key norms in fp16."""
        return held.keys.norm(dim=-1).half()


class Infinite(Newest):
    """Divides by zero."""

    def score(self, held):
        """Return the inverse of key norms."""
        return 1 / held.keys.double().norm(dim=-1)


class Greedy(Newest):
    """Writes into what it is given."""

    def score(self, held):
        """Return key norms, and clear the keys."""
        norms = held.keys.double().norm(dim=-1)
        held.keys.zero_()
        return norms


class Undeclared(Newest):
    """Reads what it has not declared."""

    def score(self, held):
        """Return value norms."""
        return held.values.double().norm(dim=-1)


class Ranked(Newest):
    """Compares layers with one another."""

    def score(self, held):
        """Return key norms less those of the mean layer."""
        norms = held.keys.double().norm(dim=-1)
        return norms - norms.mean(0)


class Together(Newest):
    """Compares heads with one another."""

    def score(self, held):
        """Return key norms less those of the mean head."""
        norms = held.keys.double().norm(dim=-1)
        return norms - norms.mean(1, keepdim=True)


class Placed(Newest):
    """Takes the place in the table for the position."""

    def score(self, held):
        """Return places."""
        shape = held.positions.shape
        return torch.arange(shape[-1], dtype=torch.float64).expand(shape)


WRONG = [
    (Requester, "test_lengths_alone_say_how_many_stay", (64,)),
    (Nothing, "test_forgets", ()),
    (Growing, "test_holds_its_budget", (5,)),
    (Rough, "test_scores_are_finite_numbers", ("fp32",)),
    (Infinite, "test_scores_of_extreme_tokens_are_finite", ("fp32", 0.0)),
    (Greedy, "test_scores_alike_when_asked_again", ()),
    (Undeclared, "test_scores_are_finite_numbers", ("fp32",)),
    (Ranked, "test_scores_layers_alone_as_with_others", ()),
    (Together, "test_scores_a_head_by_its_own_tokens", ()),
    (Placed, "test_scores_tokens_in_any_order", ()),
]


@pytest.mark.parametrize(("wrong", "test", "given"), WRONG, ids=[w.__name__ for w, *_ in WRONG])
def test_a_wrong_policy_fails(wrong, test, given):
    """Each mistake is found by the test that is made for it."""
    options = {"budget": 30} if issubclass(wrong, ScoreRetention) else {}

    class Kit(RetentionPolicyTests):
        retention = partial(wrong, **options)

    with pytest.raises((AssertionError, AttributeError, PolicyError)):
        getattr(Kit(), test)(*given)


def test_a_policy_that_forgets_by_position_has_no_scores():
    """Tests of scores are skipped for it, and say so."""

    class Blocks(RetentionPolicy):
        """Forgets nothing."""

        name = "blocks"

    class Kit(RetentionPolicyTests):
        retention = Blocks

    with pytest.raises(pytest.skip.Exception, match="by position"):
        Kit().test_scores_a_single_token()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"budget": 0}, "budget=0: give 1 token or more, or a share up to 1.0"),
        ({"budget": 1.5}, "budget=1.5: give"),
        ({"budget": float("nan")}, "budget=nan: give"),
        ({"recent": 0}, "recent=0: give 1 token or more"),
        ({"recent": 1.1}, "recent=1.1: give"),
        ({"sinks": -1}, "sinks=-1: give 0 or more"),
        ({"when": "often"}, "when='often' is not known; there are: always, prompt"),
        ({"budget": 8, "recent": 6, "sinks": 3}, "more than the budget of 8 tokens"),
    ],
)
def test_options_are_checked(options, reason):
    """Options that leave no choice are refused, with what to give."""
    with pytest.raises(InputError, match=reason):
        Newest(**options)
