"""The conformance tests of retention policies pass a right policy and fail wrong ones."""

from functools import partial

import pytest
from attrs import evolve
from helpers.faults import faulty, run_test

from kvcore import InputError, KVCache, PolicyError, Request, RetentionPolicy, ScoreRetention
from kvcore.testing import RetentionPolicyTests, held_tokens
from kvcore_engine.retention.kvmerger import KVMerger
from kvcore_engine.retention.quest import Quest
from kvcore_engine.retention.token_retention import Reads, TokenRetention

torch = pytest.importorskip("torch", reason="scores are computed on torch tensors")


class Newest(ScoreRetention):
    """A score that keeps the newest tokens."""

    name = "newest"
    reads = Reads(keys=True)

    def score(self, held):
        """Return the positions."""
        return held.positions.double()


class Requester(Newest):
    """A policy whose budget depends on the identifier of the request."""

    def keeps(self, seq):
        """Return a fixed budget for one identifier."""
        return 20 if seq.request.id == "other" else super().keeps(seq)


class Nothing(TokenRetention):
    """A policy that keeps no token of a long sequence."""

    name = "nothing"

    def keeps(self, seq):
        """Return 0 for more than 60 tokens, and else None."""
        return 0 if seq.held > 60 else None

    def score(self, held):
        """Return the positions."""
        return held.positions.double()


Growing = faulty(
    "A policy that never compacts after the prompt.",
    Newest,
    keeps=lambda self, seq: self.budget if seq.position == seq.target else None,
)
Rough = faulty(
    "A policy that scores in half precision.",
    Newest,
    score=lambda _, held: held.keys.norm(dim=-1).half(),
)
Infinite = faulty(
    "A policy that divides by zero.",
    Newest,
    score=lambda _, held: 1 / held.keys.double().norm(dim=-1),
)


class Greedy(Newest):
    """A policy that changes its input."""

    def score(self, held):
        """Return the norms of the keys, and set the keys to 0."""
        norms = held.keys.double().norm(dim=-1)
        held.keys.zero_()
        return norms


Undeclared = faulty(
    "A policy that reads values without declaring it.",
    Newest,
    score=lambda _, held: held.values.double().norm(dim=-1),
)


class Ranked(Newest):
    """A policy that compares layers."""

    def score(self, held):
        """Return the norms of the keys less their mean over layers."""
        norms = held.keys.double().norm(dim=-1)
        return norms - norms.mean(0)


class Together(Newest):
    """A policy that compares heads."""

    def score(self, held):
        """Return the norms of the keys less their mean over heads."""
        norms = held.keys.double().norm(dim=-1)
        return norms - norms.mean(1, keepdim=True)


Averaged = faulty(
    "A policy that scores by the mean of the positions that the heads hold.",
    Newest,
    score=lambda _, held: (
        held.positions.double().mean(1, keepdim=True).expand_as(held.positions)
    ),
)


class Placed(Newest):
    """A policy that takes the index in the block table for the position."""

    def score(self, held):
        """Return the indices in the table."""
        shape = held.positions.shape
        return torch.arange(shape[-1], dtype=torch.float64).expand(shape)


Blind = faulty(
    "A policy that drops the block of the newest token.",
    RetentionPolicy,
    name="blind",
    droppable=lambda _, seq: [(max(0, seq.computed - 4), seq.computed)],
)


WRONG = [
    (Blind, "keeps_the_newest_token", (64, 1), "block 0 of the newest token was dropped"),
    (Requester, "lengths_alone_decide_how_many_tokens_stay", (64,), "lengths"),
    (Nothing, "forgets", (), "0 of 65 tokens: give 1 or more, or None for all"),
    (Growing, "holds_its_budget", (5,), "11 blocks are held, 10 are the most"),
    (Rough, "scores_are_finite_numbers", ("fp32", 1.0), "float16, too coarse to order tokens"),
    (Infinite, "scores_are_finite_numbers", ("fp32", 0.0), "a score is infinite or NaN"),
    (Greedy, "scores_are_repeatable", (), r"score\(\) changed keys"),
    (Undeclared, "scores_are_finite_numbers", ("fp32", 1.0), "'NoneType' object has no attr"),
    (Ranked, "scores_layers_alone_as_with_others", (), "layer 0 scores otherwise alone"),
    (Together, "scores_a_head_by_its_own_tokens", (), "tokens of another head"),
    (Averaged, "scores_a_head_by_its_own_tokens", (), "tokens of another head"),
    (Placed, "scores_tokens_in_any_order", (), "in another order .* score otherwise"),
]


ERRORS = {Nothing: PolicyError, Undeclared: AttributeError}
"""Errors other than AssertionError with which a conformance test fails."""


@pytest.mark.parametrize(
    ("wrong", "test", "given", "message"), WRONG, ids=[w.__name__ for w, *_ in WRONG]
)
def test_each_mistake_fails_its_conformance_test(wrong, test, given, message):
    """Each mistake fails the conformance test that is made for it; a right policy passes."""
    options = {"budget": 30} if issubclass(wrong, ScoreRetention) else {}
    with pytest.raises(ERRORS.get(wrong, AssertionError), match=message):
        run_test(RetentionPolicyTests, partial(wrong, **options), test, *given)
    run_test(RetentionPolicyTests, partial(Newest, budget=30), test, *given)


class Divided(Quest):
    """A page policy that divides by the norm of a query."""

    def score(self, summaries, queries):
        """Return the bounds by the norms of queries."""
        return super().score(summaries, queries) / queries.norm(dim=-1).sum(-1)[:, None]


class Compared(Quest):
    """A page policy that compares pages."""

    def score(self, summaries, queries):
        """Return the bounds less their mean."""
        scores = super().score(summaries, queries)
        return scores - scores.mean()


class Sorted(Quest):
    """A page policy that changes the keys that it reads."""

    def summarise(self, keys):
        """Return the bounds, and sort the keys."""
        keys.copy_(keys.sort(2).values)
        return super().summarise(keys)


class Wide(Quest):
    """A page policy whose summaries take more than it declares."""

    def summarise(self, keys):
        """Return the bounds twice."""
        return super().summarise(keys).repeat(1, 1, 2, 1)


class Next(KVMerger):
    """A policy that merges a token into the one before it, which may not stay."""

    def merge(self, held, stays):
        """Return the places before those of the tokens that go."""
        into, weights = super().merge(held, stays)
        places = torch.arange(stays.shape[-1]).expand(stays.shape)
        return torch.where(stays, into, (places - 1).clamp_min(0)), weights


class Heavy(KVMerger):
    """A policy whose weights of a mean do not have the sum 1."""

    def merge(self, held, stays):
        """Return weights of 1."""
        into, weights = super().merge(held, stays)
        return into, torch.ones_like(weights)


class Tabled(KVMerger):
    """A policy that takes the order of the block table for that of the text."""

    def merge(self, held, stays):
        """Return merges by places."""
        places = torch.arange(stays.shape[-1]).expand(stays.shape)
        return super().merge(evolve(held, positions=places), stays)


class Layered(KVMerger):
    """A policy whose weights depend on the number of layers in the call."""

    def merge(self, held, stays):
        """Return more means in a call of several layers."""
        self.threshold = 0.0 if len(held.layers) == 1 else -1.0
        return super().merge(held, stays)


@pytest.mark.parametrize(
    ("wrong", "test", "options", "message"),
    [
        (Divided, "scores_of_pages_are_finite_numbers", ("fp32", 0.0), "infinite or NaN"),
        (Compared, "scores_a_page_by_its_own_keys", (), "page 0 of head 0 scores otherwise"),
        (Sorted, "scores_of_pages_are_repeatable", (), "changed keys"),
        (Wide, "summaries_take_what_is_declared", (), "has 32 numbers, not 16"),
        (Next, "merges_into_tokens_that_stay", ("fp32", 1.0), "that does not stay"),
        (Heavy, "merges_into_tokens_that_stay", ("fp32", 1.0), "sum is not 1"),
        (Tabled, "merges_tokens_in_any_order", (), "in another order .* merge otherwise"),
        (Layered, "merges_a_layer_alone_as_with_others", (), "layer 0 merges otherwise"),
    ],
)
def test_each_mistake_in_pages_and_merges_fails_its_test(wrong, test, options, message):
    """Each mistake fails the conformance test made for it, which the right policy passes."""
    right = wrong.__mro__[1]
    thresholds = {"threshold": -1.0} if right is KVMerger else {}
    with pytest.raises(AssertionError, match=message):
        run_test(RetentionPolicyTests, partial(wrong, **thresholds), test, *options)
    run_test(RetentionPolicyTests, partial(right, **thresholds), test, *options)


def test_tests_of_scores_are_skipped_for_a_policy_without_scores():
    """Tests of scores are skipped for a policy without scores, with the reason."""
    blocks = faulty("A retention policy that drops nothing.", RetentionPolicy, name="blocks")
    with pytest.raises(pytest.skip.Exception, match="by position"):
        run_test(RetentionPolicyTests, blocks, "scores_a_single_token")


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
def test_impossible_options_are_refused(options, reason):
    """Impossible options raise InputError with the values that are accepted."""
    with pytest.raises(InputError, match=reason):
        Newest(**options)


def test_held_tokens_of_a_compacted_sequence_are_those_that_its_queries_see():
    """After a compaction each head holds the tokens of queries, which see what they weigh."""
    cache = KVCache(40, 4, retention=Newest(budget=12))
    seq = cache.open(Request(id=0, prompt_tokens=60, keys=[], key_tokens=4))
    cache.commit(seq, 60)
    assert seq.held < seq.position
    held = held_tokens(seq, Reads(queries=3, weights=True))
    positions = held.positions[:, :, None].repeat_interleave(2, 1)
    distance = held.query_positions[:, None] - positions
    assert ((distance == 0).sum(-1) == 1).all()
    reach = torch.tensor([window or 60 for window in held.windows])[:, None, None, None]
    assert not held.weights[(distance < 0) | (distance >= reach)].any()
