"""The compactor: it reads only what a policy declares, and refuses impossible compactions."""

import gc
from functools import partial
from typing import ClassVar
from weakref import ref

import attrs
import pytest

from kvcore_engine.retention.random import Random

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from helpers.engine import compute  # noqa: E402 - needs torch
from helpers.paged import Paged, loaded_model  # noqa: E402
from helpers.retention import Eager  # noqa: E402

from kvcore import InputError, PolicyError, Request, ScoreRetention  # noqa: E402
from kvcore.testing.dense import loaded  # noqa: E402
from kvcore_engine.compaction import SAMPLED, _bar  # noqa: E402
from kvcore_engine.generator import SinCos  # noqa: E402
from kvcore_engine.retention.knorm import KNorm  # noqa: E402
from kvcore_engine.retention.token_retention import Reads  # noqa: E402
from kvcore_engine.retention.window import Window  # noqa: E402

MODEL = "layers=2,hidden=16,heads=4,kv_heads=2,head_dim=4,vocab_size=61"


@attrs.define(slots=False, eq=False, kw_only=True)
class Scored(ScoreRetention):
    """A retention policy that scores the held tokens by a function."""

    name: ClassVar[str] = "scored"

    answer: object = None
    needs: Reads = attrs.Factory(Reads)

    @property
    def reads(self):
        """Reads that the policy declares."""
        return self.needs

    def score(self, held):
        """Return the result of the function."""
        return self.answer(held)


def by_position(held):
    """Return the positions of tokens as their scores."""
    return held.positions.double()


def paged(retention, blocks=40, size=4, model=MODEL):
    """Return paged sequences under a retention policy."""
    return Paged(loaded_model(model), blocks, size, retention)


def prefilled(texts, length=30, seed=0):
    """Open a sequence and compute its prompt in one step."""
    seq = texts.open([7 * i % 61 for i in range(length)], seed=seed)
    texts.step({seq: texts.texts[seq].left})
    return seq


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda held: held.positions[0], r"score\(\) with \[2, 30\] where .* \[1, 2, 30\]"),
        (lambda held: held.positions.tolist(), r"score\(\) with list where"),
        (lambda held: held.positions * 1j, r"score\(\) with torch.complex64: give integers"),
        (lambda held: held.positions / 0 * 0, r"score\(\) with NaN for 60 of 60 tokens"),
        (lambda held: held.nothing, r"AttributeError in score\(\)"),
    ],
    ids=["a shape", "a type", "complex", "NaN", "a raise"],
)
def test_invalid_scores_are_reported_with_the_plugin(answer, message):
    """Invalid scores raise PolicyError with the plugin's name, as does every later call."""
    texts = paged(Scored(budget=8, answer=answer))
    with pytest.raises(PolicyError, match=rf"retention plugin 'scored' .*{message}") as caught:
        prefilled(texts)
    with pytest.raises(PolicyError) as again:
        texts.cache.check_integrity()
    assert str(again.value) == str(caught.value)


def test_infinite_scores_are_scores():
    """Infinite scores are valid, and the newest token stays whatever its score."""
    texts = paged(Scored(budget=3, answer=lambda held: (held.positions - 5.0) ** -2))
    positions = texts.compactor.positions(prefilled(texts))
    assert positions.sort().values.tolist() == [[[5, 6, 29]] * 2] * 2


def test_tokens_outside_the_next_window_are_removed_first():
    """Tokens outside the window of the next token are removed first.

    A window of 7 includes that token, so six tokens before it are visible.
    """
    model = MODEL + ",window=7"
    texts = paged(Scored(budget=3, answer=lambda held: -by_position(held)), model=model)
    positions = texts.compactor.positions(prefilled(texts))
    assert positions.sort().values.tolist() == [[[24, 25, 29]] * 2] * 2


def test_tokens_moved_into_the_window_are_visible():
    """Tokens that were moved into the window by rebased positions count as visible.

    Token 24 is at place 25, in the window of the next token, 31.
    """
    policy = Scored(budget=5, answer=lambda held: -by_position(held))
    policy.rebases = True
    texts = paged(policy, model=MODEL + ",window=7")
    seq = prefilled(texts)
    texts.step({seq: 1})
    texts.cache.compact(seq, 4)
    positions = texts.compactor.positions(seq)
    assert positions.sort().values.tolist() == [[[24, 25, 26, 30]] * 2] * 2


def test_integers_are_scores():
    """Scores may be integers; of tokens with equal scores the newer ones stay."""
    texts = paged(Scored(budget=4, answer=lambda held: held.positions // 16 * 0))
    positions = texts.compactor.positions(prefilled(texts))
    assert positions.sort().values.tolist() == [[[26, 27, 28, 29]] * 2] * 2


def attended(needs, answer, **options):
    """Compute and compact a prompt of a model that attends with `options`."""

    class Optional(SinCos):
        def forward(self, batch, attend):
            return super().forward(batch, partial(attend, **options))

    model = loaded(Optional(layers=2, heads=4, kv_heads=2, head_dim=4))
    policy = Scored(
        budget=8, needs=needs, answer=lambda held: answer(held) or by_position(held)
    )
    prefilled(Paged(model, 40, 4, policy))


def test_every_policy_is_told_the_scale_of_a_layer():
    """The scale of attention is told also to a policy that observes no attention."""
    scales = []
    attended(Reads(), lambda held: scales.append(held.scales), scale=0.5)
    assert scales == [(0.5,), (0.5,)]


@pytest.mark.parametrize("options", [{}, {"sink_logits": torch.tensor([0.5, 1.0, -1.0, 2.0])}])
def test_weights_of_queries_are_those_of_attention(options):
    """Weights of all queries add up to what attention gave, with and without learned sinks."""
    seen = []
    attended(Reads(attention=True, queries=30), seen.append, **options)
    for held in seen:
        sums = held.weights.unflatten(1, (2, 2)).sum((2, 3))
        torch.testing.assert_close(sums, held.attention)


def test_undeclared_reads_are_not_given(monkeypatch):
    """A policy that declares no reads is given no K/V, weights or queries."""
    seen = []
    texts = paged(Scored(budget=8, answer=lambda held: seen.append(held) or by_position(held)))
    for name in ("read_heads", "attend_weighed"):
        monkeypatch.setattr(texts.backend, name, None)
    prefilled(texts)
    assert len(seen) == 2
    wanted = ("keys", "values", "attention", "queries", "query_positions", "weights")
    assert all(getattr(held, name) is None for held in seen for name in wanted)


@pytest.mark.parametrize("name", ["keys", "values", "attention"])
def test_declared_reads_are_given(name):
    """Keys, values and attention are each read for all tokens if declared."""
    seen = []
    needs = Reads(**{name: True})
    texts = paged(
        Scored(
            budget=8,
            needs=needs,
            answer=lambda h: seen.append(getattr(h, name)) or by_position(h),
        )
    )
    prefilled(texts)
    assert [each.shape[:3] for each in seen] == [(1, 2, 30)] * 2


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_attention_is_summed_in_fp32(dtype):
    """Attention is summed and read in fp32, whatever the dtype of K/V."""
    seen = []
    policy = Scored(
        budget=8,
        needs=Reads(attention=True),
        answer=lambda held: seen.append(held.attention) or held.attention,
    )
    request = Request(id=0, prompt_tokens=30, keys=(), key_tokens=4, output_tokens=2)
    compute(
        [request],
        retention=policy,
        generator=f"transformer:{MODEL}",
        backend="torch-cpu",
        dtype=dtype,
    )
    assert [each.dtype for each in seen] == [torch.float32] * 2
    for each in seen:
        # Each of 30 tokens has given 1 in each of the 4 query heads.
        torch.testing.assert_close(each.sum((1, 2)), torch.tensor([120.0]), atol=0.5, rtol=0)


def test_a_compaction_moves_at_most_a_block_a_head(monkeypatch):
    """In the long run a compaction moves at most a block of tokens in each head."""
    texts = paged(Random(budget=24))
    moved = []
    move = texts.backend.move_tokens

    def counted(layer, table, into, moves):
        moved.append(moves.shape[1])
        move(layer, table, into, moves)

    monkeypatch.setattr(texts.backend, "move_tokens", counted)
    seq = prefilled(texts, length=48)
    first = max(moved)
    moved.clear()
    texts.run(seq, output=60)
    assert moved
    assert max(moved) <= 2 * 4 < first


def test_a_closed_sequence_is_forgotten():
    """The record that the compactor has of a sequence is freed when that is closed."""
    texts = paged(KNorm(budget=8))
    seq = prefilled(texts)
    record = ref(seq.data)
    texts.close(seq)
    del seq
    gc.collect()
    assert record() is None


def test_a_rolled_back_token_leaves_no_attention():
    """A token in the slot of a rejected draft starts without the attention to the draft."""
    sums = []
    for drafts in (1, 5):
        texts = paged(Scored(budget=90, needs=Reads(attention=True), answer=by_position))
        seq = prefilled(texts)
        texts.texts[seq].tokens[30:] = [3, 5, 8, 13, 21]
        texts.step({seq: drafts})
        texts.cache.rollback(seq, drafts)
        texts.texts[seq].computed = 30
        texts.step({seq: 2})
        sums.append(seq.data.attention[:, :, 30:32])
    assert (sums[0] > 0).all()
    torch.testing.assert_close(*sums)


def test_queries_of_rejected_drafts_are_not_kept():
    """Queries of rejected drafts are not kept; those of later tokens have their positions."""
    asked = []
    policy = Scored(
        budget=90,
        needs=Reads(queries=4),
        answer=lambda held: asked.append(held.query_positions.tolist()) or by_position(held),
    )
    texts = paged(policy)
    seq = prefilled(texts)
    texts.texts[seq].tokens[30:] = [3, 5, 8, 13, 21]
    texts.step({seq: 5})
    texts.cache.rollback(seq, 5)
    texts.texts[seq].computed = 30
    texts.step({seq: 1})
    texts.cache.compact(seq, 8)
    texts.step({seq: 3})
    texts.cache.compact(seq, 4)
    assert asked == [[30], [30], [30, 31, 32, 33], [30, 31, 32, 33]]


def test_a_policy_that_drops_blocks_and_compacts_is_refused():
    """A policy that drops blocks and compacts is refused, as the tokens left are unknown."""

    class Both(KNorm):
        """A policy that drops the first block and compacts."""

        name = "both"

        def droppable(self, seq):
            return [(0, 4)] if seq.computed > 8 else []

    with pytest.raises(PolicyError, match="drops blocks or compacts, not both"):
        prefilled(paged(Both(budget=8)))


def test_a_policy_without_queries_to_read_fails():
    """A sequence whose tokens all hit has no queries, so a policy that reads them fails."""
    texts = paged(Scored(budget=90, needs=Reads(queries=4), answer=by_position))
    texts.close(prefilled(texts))
    seq = texts.open([7 * i % 61 for i in range(30)])
    with pytest.raises(
        PolicyError, match="no token whose queries 'scored' could read: compact"
    ):
        texts.cache.compact(seq, 4)


def test_compaction_by_hand_needs_a_policy():
    """Compacting a sequence by hand needs a policy that picks the tokens."""
    texts = paged(None)
    with pytest.raises(PolicyError, match="no retention policy that says which tokens stay"):
        texts.cache.compact(prefilled(texts), 4)


def test_a_policy_without_scores_is_refused_on_tensors():
    """A policy that only gives the number of tokens that stay is refused on tensors."""
    request = Request(id=0, prompt_tokens=9, keys=(), key_tokens=4)
    with pytest.raises(InputError, match="retention 'eager' says how many tokens stay and not"):
        compute([request], retention=Eager())


def test_rebasing_without_a_declared_rotary_embedding_is_refused():
    """Rebased positions are refused for a model that does not declare its rotary embedding."""
    generator = loaded(SinCos(layers=1, kv_heads=1, heads=1, head_dim=4, vocab_size=61))
    with pytest.raises(InputError, match="'window' gives tokens new positions, and layer 0 of"):
        Paged(generator, 8, 4, Window(tokens=4, positions="cache"))


class Turned(KNorm):
    """A policy that keeps tokens anywhere and rebases their positions."""

    rebases = True


@pytest.mark.parametrize("policy", ["window", "scores"])
def test_keys_are_rotated_once_from_their_computed_values(policy):
    """After many compactions a key equals the computed one, rotated once to its new place.

    The places end at the newest token, without holes.
    """
    window = Window(tokens=5, sinks=2, positions="cache")
    texts, whole = paged(window if policy == "window" else Turned(budget=7)), paged(None)
    seq = prefilled(texts)
    texts.run(seq, output=25)
    full = whole.open(texts.texts[seq].tokens[: seq.position])
    whole.step({full: seq.position})
    (keys, _), (found, _) = whole.kept(full)[0], texts.kept(seq)[0]
    places = torch.arange(seq.position - seq.held, seq.position)
    rotary = texts.generator.rotary[0]
    for head, at in enumerate(texts.compactor.positions(seq)[0]):
        order = at.argsort()
        turn = rotary.angles(places - at[order])
        expected = rotary.rotate(keys[at[order], head], *turn)
        torch.testing.assert_close(found[order, head], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_rebasing_with_a_rounding_codec_is_refused(codec):
    """Rebased positions are refused with a codec that rounds keys at every compaction."""
    request = Request(id=0, prompt_tokens=9, keys=(), key_tokens=4)
    with pytest.raises(InputError, match=f"codec '{codec}' would round its keys anew"):
        compute(
            [request],
            retention=Window(tokens=4, positions="cache"),
            generator=f"transformer:{MODEL}",
            backend="torch-cpu",
            codec=codec,
        )


@pytest.mark.parametrize("few", [1, 7, 40])
@pytest.mark.parametrize("values", [2, 9, 10_000])
def test_bar_returns_the_lowest_score_that_stays(few, values):
    """`_bar` returns the lowest score that stays, even if the sample it takes misleads."""
    source = torch.Generator().manual_seed(few * values)
    scores = torch.randint(values, (3, 900), generator=source).float()
    scores[1, ::SAMPLED] += values
    best_first = scores.sort(dim=1, descending=True).values
    torch.testing.assert_close(_bar(scores, few), best_first[:, few - 1 : few], rtol=0, atol=0)
