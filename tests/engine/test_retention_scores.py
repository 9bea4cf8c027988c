"""The built-in retention scores: which tokens they keep in constructed cases, and formulas."""

from types import SimpleNamespace

import pytest

from kvcore import KVCache, PolicyError, Request, ScoreRetention
from kvcore.engine import Rotary
from kvcore.plugins.options import instantiate
from kvcore_engine.compaction import Compactor
from kvcore_engine.retention.expected import Expected
from kvcore_engine.retention.h2o import H2O
from kvcore_engine.retention.knorm import KNorm
from kvcore_engine.retention.random import Random
from kvcore_engine.retention.snapkv import SnapKV
from kvcore_engine.retention.token_retention import HeldTokens, Reads
from kvcore_engine.retention.tova import TOVA
from kvcore_engine.retention.window import Window

torch = pytest.importorskip("torch", reason="scores are computed on torch tensors")

TOKENS = 24


def held(*, request=0, layers=(0,), kv_heads=1, **fields):
    """Return the tokens of a text whose last token is computed, each at its position."""
    positions = torch.arange(TOKENS).expand(len(layers), kv_heads, -1)
    seq = SimpleNamespace(position=TOKENS, request=SimpleNamespace(id=request))
    return HeldTokens(
        seq=seq, layers=range(layers[0], layers[-1] + 1), **({"positions": positions} | fields)
    )


def looking(at, queries):
    """Return weights of `queries` newest tokens for one head, all on the token `at`."""
    weights = torch.zeros(1, 1, queries, TOKENS)
    weights[..., at] = 1
    return weights


def best(score, count=1):
    """Return the tokens with the highest scores in the first head."""
    return set(score[0, 0].topk(count).indices.tolist())


def test_h2o_scores_the_attention_of_all_queries():
    """`h2o` scores the attention of all queries so far, `tova` that of the newest token."""
    got = torch.full((1, 1, TOKENS), 0.1)
    got[..., 3] = 5.0
    tokens = held(attention=got, weights=looking(17, 1))
    assert best(H2O().score(tokens)) == {3}
    assert best(TOVA().score(tokens)) == {17}


def test_h2o_splits_its_budget():
    """`h2o` reserves half of its budget, or the option `recent`, for the newest tokens."""
    seq = SimpleNamespace(request=SimpleNamespace(prompt_tokens=40))
    assert H2O(budget=9).recent_of(seq) == 4
    assert H2O(budget=0.5, recent=0.25).recent_of(seq) == 5
    assert H2O(budget=0.5, recent=64).recent_of(seq) == 20


def test_the_newest_tokens_leave_room_for_sinks():
    """Where the budget is a share, sinks come before all of the newest tokens but one."""
    seq = SimpleNamespace(request=SimpleNamespace(prompt_tokens=40))
    assert KNorm(budget=0.25, recent=64, sinks=4).recent_of(seq) == 6
    assert KNorm(budget=0.25, recent=64, sinks=40).recent_of(seq) == 1


@pytest.mark.parametrize(("share", "tokens"), [(0.29, 29), (0.57, 57), (0.07, 7), (0.299, 29)])
def test_a_share_is_taken_as_it_is_written(share, tokens):
    """A share of a prompt of 100 tokens has the whole tokens that its digits say."""
    seq = SimpleNamespace(request=SimpleNamespace(prompt_tokens=100))
    assert KNorm(budget=share).tokens_of(seq) == tokens


def test_tova_decides_for_all_heads_of_a_layer_together():
    """`tova` averages the heads of a layer, so every K/V head has the same scores."""
    weights = torch.rand(2, 4, 1, TOKENS, dtype=torch.float64)
    score = TOVA().score(held(layers=(0, 1), kv_heads=2, weights=weights))
    assert score[:, 0].equal(score[:, 1])
    assert score[:, 0].allclose(weights[:, :, 0].mean(1))


def test_snapkv_scores_the_neighbours_of_an_attended_token():
    """`snapkv` scores the five tokens around the attended one, and no others."""
    score = SnapKV(window=4).score(held(weights=looking(10, 4)))
    assert best(score, 5) == {8, 9, 10, 11, 12}
    assert score[0, 0].count_nonzero() == 5


def test_snapkv_counts_no_votes_inside_the_window():
    """Attention to tokens of the window does not spread to the tokens before it."""
    score = SnapKV(window=4).score(held(weights=looking(TOKENS - 4, 4)))
    assert not score.count_nonzero()


def test_snapkv_pools_in_the_order_of_the_text():
    """`snapkv` pools neighbours in the text, not in the block table."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    tokens = held(
        weights=looking(10, 4)[..., order], positions=torch.arange(TOKENS)[order][None, None]
    )
    kept = SnapKV(window=4).score(tokens)[0, 0].nonzero()[:, 0]
    assert set(order[kept].tolist()) == {8, 9, 10, 11, 12}


def compactions(policy, prompt, output, blocks=100):
    """Return (position, tokens held) at each compaction of a sequence."""
    cache = KVCache(blocks, 4, retention=policy)
    seq = cache.open(Request(id=0, prompt_tokens=prompt, key_tokens=4))
    found = []
    for tokens in (prompt, *[1] * output):
        if tokens == 1:
            cache.extend(seq, 1)
        before = seq.compacted
        cache.commit(seq, tokens)
        if seq.compacted > before:
            found.append((seq.position, seq.held))
    return found


def test_snapkv_compacts_once():
    """`snapkv` compacts once, at the end of the prompt, and keeps all generated tokens."""
    assert compactions(SnapKV(budget=16, window=8), 40, 60) == [(40, 16)]


def test_tokens_beyond_the_budget_are_compacted_block_by_block():
    """With `when=always`, tokens beyond the budget are compacted whenever they fill blocks.

    The first compaction is at the end of the prompt.
    """
    assert compactions(KNorm(budget=14), 40, 20) == [(40, 14), (46, 14), (52, 14), (58, 14)]


def test_a_share_is_of_the_prompt():
    """A budget given as a share is that of the prompt, and at least one token."""
    assert compactions(KNorm(budget=0.25), 40, 0) == [(40, 10)]
    assert compactions(KNorm(budget=0.001), 40, 0) == [(40, 1)]


def test_a_compaction_without_free_blocks_is_deferred():
    """A compaction without free blocks for the copy is deferred until there are some."""
    cache = KVCache(7, 4, retention=KNorm(budget=8, when="prompt"))
    prompt = Request(id=0, prompt_tokens=20, keys=range(5), key_tokens=4)
    seq = cache.open(prompt)
    other = cache.open(Request(id=1, prompt_tokens=8, key_tokens=4))
    cache.commit(seq, 20)
    assert (seq.held, cache.stats.deferred_compactions) == (20, 1)
    cache.close(other)
    found = []
    for _ in range(12):
        cache.extend(seq, 1)
        cache.commit(seq, 1)
        found.append(seq.compacted)
    assert (found, seq.held) == ([13] * 12, 19)


def test_knorm_keeps_the_smallest_keys():
    """`knorm` keeps the tokens whose keys have the smallest norms."""
    keys = torch.ones(1, 1, TOKENS, 4, dtype=torch.float16)
    keys[0, 0, 5] = 0.5
    keys[0, 0, 6] = -0.25
    assert best(KNorm().score(held(keys=keys)), 2) == {5, 6}


def test_random_keeps_every_position_about_equally_often():
    """Over requests, layers and heads, `random` keeps every position about equally often."""
    tokens, drawn = 64, 0
    positions = torch.arange(tokens).expand(8, 4, -1)
    for request in range(40):
        score = Random().score(held(request=request, layers=(0, 7), positions=positions))
        drawn = drawn + (score.argsort(-1) >= 48).sum((0, 1))
    # 1,280 draws of probability 1/4 each: a standard deviation is 15.5.
    assert drawn.sum() == 40 * 32 * 16
    assert (drawn - 320).abs().max() < 4.5 * 15.5


def test_random_draws_depend_on_seed_request_layer_and_head():
    """Draws of `random` depend on seed, request, layer and head, and on nothing else."""
    one = Random().score(held(layers=(3, 4), kv_heads=2))
    others = [one[0, 1], one[1, 0], Random(seed=1).score(held(layers=(3,)))[0, 0]]
    others.append(Random().score(held(layers=(3,), request="0"))[0, 0])
    assert all((other != one[0, 0]).all() for other in others)
    assert Random().score(held(layers=(3,)))[0, 0].equal(one[0, 0])


def test_a_kept_token_keeps_its_random_draw():
    """A token that is kept has the same draw at the next compaction."""
    first = Random().score(held())
    some = torch.tensor([20, 3, 11])
    later = Random().score(held(positions=some[None, None]))
    assert later[0, 0].equal(first[0, 0, some])


SPEEDS = (1.0, 0.2, 0.04, 0.008)


def gaussian(heads, width, *, spread=0.6):
    """Return mean and covariance of random queries, and a factor to sample them."""
    source = torch.Generator().manual_seed(3)
    mean = torch.randn(heads, width, generator=source, dtype=torch.float64)
    factor = torch.randn(heads, width, width, generator=source, dtype=torch.float64)
    factor *= spread / width**0.5
    return mean, factor @ factor.mT, factor


def test_expected_attention_is_the_mean_over_gaussian_queries():
    """The closed form equals the mean of exp(s q·k) over sampled Gaussian queries."""
    from kvcore_engine.retention.expected import log_expected  # noqa: PLC0415 - needs torch

    source = torch.Generator().manual_seed(5)
    mean, covariance, factor = gaussian(4, 8)
    keys = torch.randn(2, 5, 8, generator=source, dtype=torch.float64)
    noise = torch.randn(4, 100_000, 8, generator=source, dtype=torch.float64)
    queries = mean[:, None] + noise @ factor.mT
    logits = queries @ keys.repeat_interleave(2, 0).mT * 0.5
    sampled = logits.exp().mean(1).view(2, 2, 5)
    assert log_expected(keys, mean, covariance, 0.5).exp().allclose(sampled, rtol=0.02)


def test_expected_attention_in_parts(monkeypatch):
    """A long text scored in parts has the same scores as the whole text."""
    whole = Expected().score(expectable())
    monkeypatch.setattr("kvcore_engine.retention.expected._TOKENS", 5)
    assert Expected().score(expectable()).allclose(whole)


@pytest.mark.parametrize("adjacent", [False, True])
def test_future_queries_are_rotated_past_ones(adjacent):
    """Future queries have the statistics of past ones at the average future rotation.

    Mean and covariance are those of the queries without their rotation.
    """
    from kvcore_engine.retention.expected import future_queries  # noqa: PLC0415 - needs torch

    rotary = Rotary(SPEEDS, adjacent)
    plain = torch.randn(2, 40, 10, generator=torch.Generator().manual_seed(0)).double()
    past, future = torch.arange(60, 100), torch.arange(100, 116)
    seen = rotary.rotate(plain, *rotary.angles(past))
    average = torch.stack(
        [rotary.rotate(torch.eye(10).double(), *rotary.angles(at)).mT for at in future]
    ).mean(0)
    mean, covariance = future_queries(seen, rotary, past, future)
    for head in range(2):
        of_plain = plain[head].T.cov(correction=0)
        assert mean[head].allclose(average @ plain[head].mean(0))
        assert covariance[head].allclose(average @ of_plain @ average.T)


def expectable(**changes):
    """Return tokens whose past queries all point at the same token, in one head."""
    source = torch.Generator().manual_seed(2)
    keys = torch.randn(1, 1, TOKENS, 8, generator=source, dtype=torch.float64)
    queries = torch.randn(1, 2, 12, 8, generator=source, dtype=torch.float64) / 4
    queries += 2 * keys[:, :, 6:7]
    fields = {
        "keys": keys,
        "values": torch.ones(1, 1, TOKENS, 4, dtype=torch.float64),
        "queries": queries,
        "query_positions": torch.arange(TOKENS - 12, TOKENS),
    }
    return held(**(fields | changes))


def test_expected_weighs_values():
    """A token whose value is 0 has a score of 0, whatever its attention."""
    values = torch.ones(1, 1, TOKENS, 4, dtype=torch.float64)
    values[0, 0, 6] = 0
    score = Expected().score(expectable(values=values))
    assert score[0, 0, 6] == 0


def test_expected_sums_to_one_within_the_window():
    """Expected attention sums to 1 over the tokens within the window of the next token."""
    score = Expected().score(expectable(windows=(8,))) / 2  # values have the norm 2
    assert score[0, 0, : TOKENS - 7].count_nonzero() == 0
    assert score.sum().item() == pytest.approx(1)


def test_expected_leaves_out_queries_of_sinks():
    """`expected` ignores the queries of sinks: a huge query there changes no score."""
    positions = torch.arange(12)
    tokens = expectable(query_positions=positions)
    tokens.seq.position = 12
    strange = tokens.queries.clone()
    strange[:, :, 2] = 1e3
    again = expectable(query_positions=positions, queries=strange)
    again.seq.position = 12
    assert Expected(sinks=3).score(again).equal(Expected(sinks=3).score(tokens))
    assert not Expected(sinks=2).score(again).allclose(Expected(sinks=2).score(tokens))


def test_expected_uses_the_scale_of_the_layer():
    """Doubling the scale of a layer has the effect of doubling its queries."""
    twice = Expected().score(expectable(scales=(2 * 8**-0.5,)))
    longer = Expected().score(expectable(queries=expectable().queries * 2))
    assert twice.allclose(longer)


def test_a_closing_window_holds_sinks_and_window():
    """`window:positions=cache` compacts to sinks and window, in the prompt too.

    With positions of the text, the window drops tokens and compacts nothing.
    """
    closing = Window(tokens=9, sinks=2, positions="cache")
    assert compactions(closing, 40, 10) == [(40, 11), (45, 11), (50, 11)]
    assert closing.rebases
    assert not closing.droppable(SimpleNamespace(computed=40))
    assert compactions(Window(tokens=9, sinks=2), 40, 10) == []
    assert best(closing.score(held())) == {TOKENS - 1}


def test_full_makes_a_cache_without_a_retention_policy():
    """`retention="full"` makes a cache without a retention policy."""
    cache = KVCache(20, 4, retention="full")
    assert cache.retention is None


def test_a_share_is_written_with_a_point():
    """A budget of 1.0 is the whole prompt, 1 is one token, and 1.5k are 1,500 tokens."""
    budgets = [instantiate(KNorm, {"budget": text}).budget for text in ("1.0", "1", "1.5k")]
    assert budgets == [1.0, 1, 1500]
    assert [type(budget) for budget in budgets] == [float, int, int]


@pytest.mark.parametrize("reads", ["keys", Reads(queries=-3), Reads(queries=0.5)])
def test_a_wrong_reads_attribute_is_refused_by_name(reads):
    """A wrong `reads` raises PolicyError that names the plugin, before any computation."""

    class Wrong(ScoreRetention):
        """A retention policy whose `reads` is set by the test."""

        name = "wrong"

        def score(self, held):
            """Return the positions."""
            return held.positions.float()

    Wrong.reads = reads
    with pytest.raises(PolicyError, match=r"plugin 'wrong'.* answered reads with .*: give"):
        Compactor(KVCache(4, 4, retention=Wrong()), None, [None], [None])
