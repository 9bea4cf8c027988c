"""Merged tokens: which ones KVMerger merges, and means in blocks by hand."""

from types import SimpleNamespace
from typing import ClassVar

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from helpers.engine import compute  # noqa: E402 - needs torch
from helpers.paged import Paged, loaded_model  # noqa: E402

from kvcore import InputError, PolicyError, ScoreRetention  # noqa: E402
from kvcore.request import text_request  # noqa: E402
from kvcore_engine.retention.knorm import KNorm  # noqa: E402
from kvcore_engine.retention.kvmerger import KVMerger  # noqa: E402
from kvcore_engine.retention.token_retention import HeldTokens, Reads  # noqa: E402

MODEL = "layers=2,hidden=16,heads=4,kv_heads=2,head_dim=4,vocab_size=61"
PROMPT = [7 * i % 61 for i in range(30)]


def paged(retention=None, model=MODEL):
    """Return paged sequences of a model under a retention policy."""
    return Paged(loaded_model(model), 60, 4, retention)


def written(texts, output=20):
    """Return the tokens of a text that is continued."""
    seq = texts.open(PROMPT)
    texts.run(seq, output=output)
    return texts.texts[seq].tokens


def held(keys, positions=None):
    """Return tokens with these keys, `[tokens, width]`, in a layer with one K/V head."""
    keys = torch.tensor(keys, dtype=torch.float64)[None, None]
    if positions is None:
        positions = torch.arange(keys.shape[2])[None, None]
    seq = SimpleNamespace(position=keys.shape[2])
    return HeldTokens(seq=seq, layers=range(1), positions=positions, keys=keys, values=keys)


def mask(*places, tokens):
    """Return which of some tokens stay."""
    return torch.isin(torch.arange(tokens), torch.tensor(places))[None, None]


# KVMerger.


def test_similar_neighbours_go_first():
    """The tokens that go first are those whose keys are most like the ones before them."""
    tokens = held([[1, 0], [1, 0.1], [0, 1], [0.5, 1], [-1, 0]])
    assert KVMerger().score(tokens)[0, 0].argsort().tolist() == [1, 3, 2, 4, 0]


def test_a_token_is_merged_into_the_one_before_it_that_stays():
    """Tokens between two that stay go into the first of these; unlike ones are dropped."""
    tokens = held([[1, 0], [1, 0.2], [0, 1], [2, 0], [0, 3], [0.1, 3]])
    into, weights = KVMerger().merge(tokens, mask(0, 3, 4, tokens=6))
    assert into[0, 0].tolist() == [0, 0, -1, 3, 4, 4]
    # A token at the mean distance of its run has exp(-1/2) of the weight of the pivot.
    pivot = 1 / (1 + 0.60653066)
    expected = [pivot, 1 - pivot, 0, 1, pivot, 1 - pivot]
    assert weights[0, 0].tolist() == pytest.approx(expected)


def test_nearer_keys_weigh_more():
    """Keys that are nearer to the pivot have larger weights, and equal keys the same."""
    keys = [[1, 0], [1, 0.1], [1, 0.3], [1, 0]]
    _, weights = KVMerger().merge(held(keys), mask(0, tokens=4))
    pivot, near, far, equal = weights[0, 0].tolist()
    assert pivot == equal > near > far > 0
    assert sum((pivot, near, far, equal)) == pytest.approx(1)


def test_a_threshold_of_1_merges_nothing():
    """With a threshold of 1 not even equal keys are merged."""
    into, _ = KVMerger(threshold=1).merge(held([[1, 0], [1, 0]]), mask(0, tokens=2))
    assert into[0, 0].tolist() == [0, -1]


@pytest.mark.parametrize("threshold", [1.1, -1.5, float("nan")])
def test_impossible_thresholds_are_refused(threshold):
    """A threshold that is no cosine is refused."""
    with pytest.raises(InputError, match=r"threshold=.*: give a cosine, from -1 to 1"):
        KVMerger(threshold=threshold)


@given(
    seed=st.integers(0, 999),
    count=st.integers(1, 12),
    threshold=st.sampled_from([-1.0, 0.0, 0.9, 1.0]),
)
def test_weights_of_a_mean_are_shares_of_one(seed, count, threshold):
    """Weights are from 0 to 1, and those of each mean have the sum 1, for any that stay."""
    source = torch.Generator().manual_seed(seed)
    tokens = held(torch.randn(12, 4, generator=source).tolist())
    chosen = torch.randperm(12, generator=source)[:count].tolist()
    into, weights = KVMerger(threshold=threshold).merge(tokens, mask(*chosen, tokens=12))
    merged = into[0, 0] >= 0
    sums = torch.zeros(12, dtype=torch.float64)
    sums.index_add_(0, into[0, 0][merged], weights[0, 0][merged])
    assert ((weights >= 0) & (weights <= 1)).all()
    torch.testing.assert_close(sums[chosen], torch.ones(count, dtype=torch.float64))


# In blocks.


def test_a_budget_of_all_tokens_is_no_policy():
    """A budget that holds the whole text changes no token."""
    assert written(paged(KVMerger(budget=64, threshold=-1))) == written(paged())


class Dropping(ScoreRetention):
    """A policy with the scores of `kvmerger`, which drops what does not stay."""

    name = "dropping"
    reads = Reads(keys=True)
    score = KVMerger.score


def test_merging_nothing_is_dropping():
    """With a threshold of 1 the tokens are those of a policy that drops, by the same scores."""
    merging, dropping = (
        paged(policy) for policy in (KVMerger(budget=12, threshold=1), Dropping(budget=12))
    )
    assert written(merging) == written(dropping)
    seqs = [next(iter(texts.texts)) for texts in (merging, dropping)]
    positions = [
        texts.compactor.positions(seq).sort().values
        for texts, seq in zip((merging, dropping), seqs, strict=True)
    ]
    assert positions[0].equal(positions[1])


@pytest.mark.parametrize("model", [MODEL, MODEL.replace("kv_heads=2", "kv_heads=1")])
def test_blocks_hold_the_weighted_means(model):
    """K and V in the blocks after a compaction are the weighted means of those before it."""
    policy = KVMerger(budget=9, threshold=-1)
    texts, whole = paged(policy, model), paged(model=model)
    seqs = []
    for each in (texts, whole):
        seqs.append(each.open(PROMPT))
        each.step({seqs[-1]: 30})
    positions = texts.compactor.positions(seqs[0])
    for layer, (merged, before) in enumerate(
        zip(texts.kept(seqs[0]), whole.kept(seqs[1]), strict=True)
    ):
        keys, values = (part.transpose(0, 1)[None] for part in before)
        place = torch.arange(30).expand(1, keys.shape[1], -1)
        tokens = HeldTokens(
            seq=seqs[1], layers=range(1), positions=place, keys=keys, values=values
        )
        stays = torch.zeros_like(place, dtype=torch.bool).scatter(2, positions[layer][None], 1)
        into, weights = policy.merge(tokens, stays)
        for head in range(keys.shape[1]):
            for slot, position in enumerate(positions[layer, head].tolist()):
                run = into[0, head] == position
                for part, found in zip((keys, values), merged, strict=True):
                    mean = (part[0, head][run] * weights[0, head][run][:, None]).sum(0)
                    torch.testing.assert_close(found[slot, head], mean)


def test_tokens_out_of_a_window_are_not_merged():
    """A token that no later token of a window reaches is in no mean."""
    model = MODEL.replace("layers=2", "layers=1") + ",window=7"
    texts = paged(KVMerger(budget=12, threshold=-1), model)
    whole = paged(model=model)
    seqs = [each.open(PROMPT) for each in (texts, whole)]
    for each, seq in zip((texts, whole), seqs, strict=True):
        each.step({seq: 30})
    positions = texts.compactor.positions(seqs[0])[0]
    (keys, _), (before, _) = texts.kept(seqs[0])[0], whole.kept(seqs[1])[0]
    for head, kept in enumerate(positions):
        torch.testing.assert_close(keys[:, head], before[kept, head])


def test_preemption_and_a_codec_leave_texts_complete():
    """Texts end that are merged in coded blocks, share prompts and are preempted."""
    texts = [
        text_request(n, [*range(12), *range(n)], output=20 + n, block_size=4, arrival=n)
        for n in range(8)
    ]
    for codec in ("int8", "kivi"):
        result = compute(
            texts,
            retention=KVMerger(budget=12, threshold=0.0),
            generator="transformer:layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,vocab_size=31",
            backend="torch-cpu",
            codec=codec,
            blocks=30,
        ).result
        assert [len(result.outputs[n]) for n in range(8)] == [20 + n for n in range(8)]
        assert result.summary()["compactions"] > 0


@attrs.define(slots=False, eq=False, kw_only=True)
class Answering(KNorm):
    """A policy whose merges are the result of a function."""

    name: ClassVar[str] = "answering"

    answer: object = None

    def merge(self, held, stays):
        """Return the result of the function."""
        return self.answer(held, stays)


def own(stays):
    """Return the index of each token."""
    return torch.arange(stays.shape[-1]).expand(stays.shape)


def swapped(stays):
    """Return merges in which tokens that go take the whole place of those that stay."""
    kept, gone = (mask[0].nonzero()[:, 1].view(2, -1) for mask in (stays, ~stays))
    gone = gone[:, : kept.shape[1]]
    into = torch.full(stays.shape[1:], -1).scatter(1, kept, kept).scatter(1, gone, kept)
    return into[None], torch.zeros(stays.shape).scatter(2, gone[None], 1)


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (lambda _, stays: (own(stays), stays * 0.5), "a mean whose sum is 0.5 off 1"),
        (lambda _, stays: (own(stays), torch.ones(stays.shape)), "tokens that do not stay"),
        (lambda _, stays: (stays.cumsum(-1) * 0, stays * 0.0), "sum is 1 off 1"),
        (lambda _, stays: swapped(stays), "a weight of 0 for a token that stays"),
        (lambda _, stays: own(stays), r"error.* in merge\(\)"),
        (lambda _, stays: (own(stays)[..., :3], stays.double()), r"Error in merge\(\)"),
    ],
    ids=["weights", "targets", "no weights", "no own weight", "one tensor", "a shape"],
)
def test_invalid_merges_are_reported_with_the_plugin(answer, wrong):
    """A wrong answer of `merge` raises PolicyError with the plugin's name."""
    with pytest.raises(PolicyError, match=f"(?i)retention plugin 'answering' .*{wrong}"):
        written(paged(Answering(budget=8, answer=answer)))


def test_a_policy_that_merges_and_rebases_is_refused():
    """A policy that merges tokens and gives them new positions is refused."""
    policy = Answering(budget=8)
    policy.rebases = True
    with pytest.raises(InputError, match="new positions, and merges them"):
        paged(policy)
