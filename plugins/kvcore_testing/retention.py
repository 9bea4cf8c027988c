"""The conformance tests of retention policies, and random tokens for them to score."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import pytest

from kvcore.cache import KVCache, RetentionPolicy, Sequence
from kvcore.engine import Rotary
from kvcore.lazy import LazyModule
from kvcore.request import Request
from kvcore.serving import simulate
from kvcore_engine.retention.page_selection import PageSelection
from kvcore_engine.retention.token_retention import (
    HeldTokens,
    Reads,
    ScoreRetention,
    TokenRetention,
)
from kvcore_testing.dense import torch_dtype
from kvcore_testing.plugin import PluginTests, other_hashes, unshared

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch", globals())

BLOCK = 4
_lengths = pytest.mark.parametrize("prompt", [1, 7, 64, 400])
_chunks = pytest.mark.parametrize("chunk", [1, 5, 64])
_dtypes = pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
_factors = pytest.mark.parametrize("factor", [0.0, 1.0, 1e4])


class RetentionPolicyTests(PluginTests[RetentionPolicy]):
    """Conformance tests of a retention policy; a derived `Test...` class makes the policy.

    The attribute `retention` is what `make` calls:

        class TestMine(RetentionPolicyTests):
            retention = Mine

    The sequences of the tests have up to 500 tokens, in blocks of 4: a policy with a budget
    needs a smaller one, as in `partial(Mine, budget=64)`. Tests of scores need torch.

    Attributes:
        forgets: whether the policy drops tokens of a sequence of 400.
        per_head: whether the scores of a K/V head depend on its own tokens alone.
    """

    base = RetentionPolicy
    retention: ClassVar[Callable[[], RetentionPolicy]]
    forgets: ClassVar[bool] = True
    per_head: ClassVar[bool] = True

    @_lengths
    @_chunks
    def test_names_computed_tokens(self, prompt: int, chunk: int) -> None:
        """Each range of `droppable` lies within the computed tokens."""
        policy = self.make()
        for seq in _grow(policy, prompt, chunk):
            for start, end in policy.droppable(seq):
                assert 0 <= start <= end <= seq.computed, f"{start} to {end} of {seq.computed}"

    @_lengths
    def test_answers_are_repeatable(self, prompt: int) -> None:
        """Repeated calls of `droppable` and `keeps` agree, and change no sequence."""
        policy, answers = self.make(), []
        with unshared(policy):
            for seq in _grow(policy, prompt, 5):
                before = repr(seq), seq.computed, seq.holes
                once, again = [(list(policy.droppable(seq)), policy.keeps(seq)) for _ in "ab"]
                assert once == again, f"called again for {seq!r}"
                assert (repr(seq), seq.computed, seq.holes) == before, f"{seq!r} has changed"
                answers.append(once)
        with other_hashes():
            other = self.make()
            grown = _grow(other, prompt, 5)
            elsewhere = [(list(other.droppable(seq)), other.keeps(seq)) for seq in grown]
        assert elsewhere == answers, "with other hashes of text it answered otherwise"

    @_lengths
    @_chunks
    def test_keeps_the_newest_token(self, prompt: int, chunk: int) -> None:
        """The block of the newest token stays: the next token attends to it."""
        for seq in _grow(self.make(), prompt, chunk):
            newest = (seq.computed - 1) // BLOCK
            assert not any(start <= newest < end for start, end in seq.holes), (
                f"block {newest} of the newest token was dropped"
            )

    @_lengths
    def test_lengths_alone_decide_how_many_tokens_stay(self, prompt: int) -> None:
        """`keeps` depends on the lengths of a sequence alone, and is never 0."""
        policy = self.make()
        answers: dict[tuple[int, ...], int | None] = {}
        runs = [
            _grow(retention and retention(), prompt, 5, request=request, hit=hit, ids=hit)
            for retention in (None, self.make)
            for request, hit in ((1, False), ("other", False), (2, True))
        ]
        asked_count = 0
        for run in runs:
            for seq in run:
                asked_count += 1
                lengths = seq.held, seq.position, seq.target, seq.compacted
                kept = policy.keeps(seq)
                assert kept is None or kept >= 1
                assert answers.setdefault(lengths, kept) == kept, f"lengths {lengths}"
        assert len(answers) < asked_count, "no lengths came twice"

    def test_forgets(self) -> None:
        """Tokens of a long sequence are dropped, unless `forgets` is False."""
        if not self.forgets:
            pytest.skip("declares that it drops none of 400 tokens: forgets = False")
        *_, seq = _grow(self.make(), 400, 5)
        assert seq.dropped_tokens, "none of 400 tokens was dropped"

    @_chunks
    def test_holds_its_budget(self, chunk: int) -> None:
        """After prefill, a sequence holds at most two blocks more than its budget."""
        policy = self.make()
        if not isinstance(policy, ScoreRetention) or policy.when != "always":
            pytest.skip("only for policies with a budget (when=always)")
        for seq in _grow(policy, 400, chunk):
            if seq.position > seq.target:
                most = -(-policy.tokens_of(seq) // BLOCK) + 2
                assert seq.blocks <= most, f"{seq.blocks} blocks are held, {most} are the most"

    def test_decisions_do_not_depend_on_block_ids(self) -> None:
        """With and without block ids, a cache has the same blocks after every token."""
        runs = (_grow(self.make(), 64, 5, ids=ids) for ids in (True, False))
        for first, other in zip(*runs, strict=True):
            assert first.private_blocks == other.private_blocks
            assert first.held == other.held

    @pytest.mark.parametrize("ids", [False, True])
    def test_serves_many_at_once(self, *, ids: bool) -> None:
        """All requests end that share prompts, and preempt one another for lack of room."""
        keys = range(40)
        requests = [
            Request(
                id=i,
                arrival=i,
                prompt_tokens=90 + i,
                output_tokens=60,
                keys=keys[: 22 + i % 2],
                key_tokens=4,
            )
            for i in range(8)
        ]
        cache = KVCache(80, BLOCK, retention=self.make(), ids=ids)
        result = simulate(requests, cache=cache)
        cache.check_integrity()
        assert result.summary()["completed"] == len(requests)
        assert cache.pool.free_blocks + cache.tree.cached_blocks == cache.pool.blocks

    # Pages, of a policy that selects some to read.

    @_dtypes
    @_factors
    def test_scores_of_pages_are_finite_numbers(self, dtype: str, factor: float) -> None:
        """A finite score for each page and K/V head, whatever the keys and queries."""
        policy, keys, queries = self._pages(dtype=dtype, factor=factor)
        summaries = policy.summarise(keys)
        assert summaries.shape[:2] == keys.shape[:2], "one summary for each head and page"
        scores = policy.score(summaries, queries)
        assert scores.shape == keys.shape[:2], "one score for each head and page"
        assert scores.isfinite().all(), "a score is infinite or NaN"

    def test_scores_of_pages_are_repeatable(self) -> None:
        """Scores depend on keys and queries alone, and these are unchanged."""
        policy, keys, queries = self._pages()
        before = keys.clone(), queries.clone()
        first = policy.score(policy.summarise(keys), queries).clone()
        assert keys.equal(before[0]), "summarise() or score() changed keys"
        assert queries.equal(before[1]), "score() changed queries"
        again = policy.score(policy.summarise(keys), queries)
        assert first.equal(again), "called again, it scored otherwise"

    def test_scores_a_page_by_its_own_keys(self) -> None:
        """The score of a page depends on no other page, and on no other K/V head."""
        policy, keys, queries = self._pages()
        score = policy.score(policy.summarise(keys), queries)
        for head in range(len(keys)):
            for page in range(keys.shape[1]):
                alone = policy.summarise(keys[head : head + 1, page : page + 1])
                computed = policy.score(alone, queries[head : head + 1])
                same = computed[0, 0].allclose(score[head, page], rtol=1e-4)
                assert same, f"page {page} of head {head} scores otherwise alone"

    def test_summaries_take_what_is_declared(self) -> None:
        """The summary of a page takes as many numbers as `summary_keys` keys."""
        policy, keys, _ = self._pages()
        numbers = policy.summarise(keys)[0, 0].numel()
        declared = policy.summary_keys * keys.shape[-1]
        assert numbers == declared, f"a summary has {numbers} numbers, not {declared}"

    def _pages(
        self, *, dtype: str = "fp32", factor: float = 1.0
    ) -> tuple[PageSelection, Tensor, Tensor]:
        """Return the policy, keys of 5 pages in 2 K/V heads, and queries of 3 heads each."""
        torch = pytest.importorskip("torch", reason="pages are scored on torch tensors")
        policy = self.make()
        if not isinstance(policy, PageSelection):
            pytest.skip("the policy selects no pages")
        source = torch.Generator().manual_seed(0)
        shapes = (2, 5, policy.page, 8), (2, 3, 8)
        kind = torch_dtype(dtype)
        keys, queries = (
            ((torch.rand(shape, generator=source) * 2 - 1) * factor).to(kind)
            for shape in shapes
        )
        return policy, keys, queries

    # Scores.

    @_dtypes
    @_factors
    def test_scores_are_finite_numbers(self, dtype: str, factor: float) -> None:
        """`score` returns a finite number for each token, layer and head, in fp32 or better.

        Also for keys, values and queries of zero, and for large ones.
        """
        policy, held = self._held(dtype=dtype, factor=factor)
        score = policy.score(held)
        assert score.shape == held.positions.shape, "one score for each layer, head and token"
        assert score.is_floating_point(), f"scores are {score.dtype}"
        assert torch.finfo(score.dtype).eps <= 2**-23, (
            f"scores are {score.dtype}, too coarse to order tokens: give fp32 or fp64"
        )
        assert score.isfinite().all(), "a score is infinite or NaN"

    def test_scores_a_single_token(self) -> None:
        """The score of a prompt of one token is finite."""
        policy, held = self._held(prompt=1)
        assert policy.score(held).isfinite().all(), "a score is infinite or NaN"

    def test_scores_are_repeatable(self) -> None:
        """Scores depend on the tokens alone, and `score` leaves these unchanged."""
        policy, held = self._held()
        before = {name: tensor.clone() for name, tensor in _tensors(held).items()}
        first = policy.score(held).clone()
        for name, tensor in _tensors(held).items():
            assert tensor.equal(before[name]), f"score() changed {name}"
        twin = self.make()
        assert isinstance(twin, TokenRetention)
        assert first.equal(policy.score(held)), "called again, it scored otherwise"
        assert first.equal(twin.score(held)), "a new policy scored otherwise"

    def test_scores_layers_alone_as_with_others(self) -> None:
        """The scores of a layer are the same with and without other layers in the call."""
        policy, held = self._held()
        score = policy.score(held)
        for row in range(len(held.layers)):
            alone = policy.score(_layer(held, row))[0]
            assert alone.allclose(score[row], rtol=1e-4), f"layer {row} scores otherwise alone"

    def test_scores_a_head_by_its_own_tokens(self) -> None:
        """The scores of a K/V head do not depend on the tokens of others."""
        if not self.per_head:
            pytest.skip("declares that heads are scored together: per_head = False")
        policy, held = self._held()
        _, other = self._held(seed=1)
        other = _reordered(other, _shuffled(other))
        score = policy.score(held)
        # The last K/V head, and the last half of the query heads, which read it.
        for name, tensor in _tensors(held).items():
            if name != "query_positions":
                heads = tensor.shape[1] // 2
                tensor[:, heads:] = getattr(other, name)[:, heads:]
        same = policy.score(held)[:, 0].allclose(score[:, 0], rtol=1e-4)
        assert same, "tokens of another head change the scores of a head"

    def test_scores_tokens_in_any_order(self) -> None:
        """The score of a token does not depend on its place in the block table."""
        policy, held = self._held()
        order = _shuffled(held)
        score = policy.score(_reordered(held, order))
        same = score.allclose(policy.score(held)[..., order], rtol=1e-4, atol=1e-7)
        assert same, "in another order of the block table, tokens score otherwise"

    # Merging, of a policy that does not drop all tokens that go.

    @_dtypes
    @_factors
    def test_merges_into_tokens_that_stay(self, dtype: str, factor: float) -> None:
        """Each token is merged into one that stays, and weights of a mean are shares of 1."""
        policy, held, stays = self._merging(dtype=dtype, factor=factor)
        into, weights = policy.merge(held, stays)
        assert into.shape == weights.shape == stays.shape
        assert ((weights >= 0) & weights.isfinite()).all(), "a weight is negative or infinite"
        assert (weights[stays] > 0).all(), "a token that stays has no weight in its mean"
        merged = into >= 0
        inside = into.clamp_min(0)
        assert stays.gather(-1, inside)[merged].all(), "merged into a token that does not stay"
        own = inside.new_tensor(range(stays.shape[-1])).expand(stays.shape)
        assert into[stays].equal(own[stays]), "a token that stays is merged into another"
        sums = (weights.double() * 0).scatter_add(-1, inside, weights.double() * merged)
        ones = sums.new_ones(()).expand(sums[stays].shape)
        assert sums[stays].allclose(ones, atol=1e-3), "weights of a mean whose sum is not 1"

    def test_merges_are_repeatable(self) -> None:
        """Merges depend on the tokens alone, which `merge` leaves unchanged."""
        policy, held, stays = self._merging()
        before = {name: tensor.clone() for name, tensor in _tensors(held).items()}
        first = [part.clone() for part in policy.merge(held, stays)]
        for name, tensor in _tensors(held).items():
            assert tensor.equal(before[name]), f"merge() changed {name}"
        again = policy.merge(held, stays)
        same = all(part.equal(other) for part, other in zip(first, again, strict=True))
        assert same, "called again, it merged otherwise"

    def test_merges_a_layer_alone_as_with_others(self) -> None:
        """The merges of a layer are the same with and without other layers in the call."""
        policy, held, stays = self._merging()
        into, weights = policy.merge(held, stays)
        for row in range(len(held.layers)):
            alone = policy.merge(_layer(held, row), stays[row : row + 1])
            same = alone[0][0].equal(into[row])
            same = same and alone[1][0].allclose(weights[row], rtol=1e-4)
            assert same, f"layer {row} merges otherwise alone"

    def test_merges_tokens_in_any_order(self) -> None:
        """The merges of a token do not depend on its place in the block table."""
        policy, held, stays = self._merging()
        into, weights = policy.merge(held, stays)
        order = _shuffled(held)
        moved, heavy = policy.merge(_reordered(held, order), stays[..., order])
        index = into.new_tensor(order)
        same = index[moved.clamp_min(0)].where(moved >= 0, -1).equal(into[..., order])
        same = same and heavy.allclose(weights[..., order], rtol=1e-4)
        assert same, "in another order of the block table, tokens merge otherwise"

    def _merging(
        self, *, dtype: str = "fp32", factor: float = 1.0
    ) -> tuple[TokenRetention, HeldTokens, Tensor]:
        """Return the policy, random tokens, and which of them stay: a quarter, the last too."""
        torch = pytest.importorskip("torch", reason="K/V lies in torch tensors")
        policy = self.make()
        if not isinstance(policy, TokenRetention) or not policy.merges:
            pytest.skip("the policy merges no tokens")
        seq = next(_grow(None, 70, 70))
        reads = attrs.evolve(policy.reads, keys=True, values=True)
        held = held_tokens(seq, reads, dtype=dtype, factor=factor)
        draws = torch.rand(held.positions.shape, generator=torch.Generator().manual_seed(2))
        stays = draws >= draws.topk(18, -1).values[..., -1:]
        newest = held.positions == held.positions.amax(-1, keepdim=True)
        return policy, held, stays | newest

    @_lengths
    def test_newest_tokens_stay(self, prompt: int) -> None:
        """`recent_of`, the number of newest tokens that stay, is from 1 to `keeps`."""
        policy = self.make()
        if not isinstance(policy, TokenRetention):
            pytest.skip("the policy forgets by position")
        for seq in _grow(None, prompt, 5):
            kept = policy.keeps(seq)
            assert 1 <= policy.recent_of(seq) <= (kept or 2**63)

    def _held(
        self, *, prompt: int = 70, dtype: str = "fp32", factor: float = 1.0, seed: int = 0
    ) -> tuple[TokenRetention, HeldTokens]:
        """Return the policy, and random tokens of a prompt with the tensors that it reads."""
        pytest.importorskip("torch", reason="scores are computed on torch tensors")
        policy = self.make()
        if not isinstance(policy, TokenRetention):
            pytest.skip("the policy forgets by position, without scores")
        seq = next(_grow(None, prompt, prompt))
        return policy, held_tokens(seq, policy.reads, dtype=dtype, factor=factor, seed=seed)


def held_tokens(
    seq: Sequence,
    reads: Reads,
    *,
    dtype: str = "fp32",
    factor: float = 1.0,
    seed: int = 0,
) -> HeldTokens:
    """Return random tokens for the lengths of `seq`, with the tensors that `reads` declares.

    There are 3 layers of 2 K/V heads and 4 query heads of width 8: the first has a rotary
    embedding, the second a rotary embedding and a window of 8, the third neither. Each head
    holds other tokens, as after a compaction, and those of the queries. Keys, values and
    queries are between -1 and 1, times `factor`.
    """
    kind = torch_dtype(dtype)
    source = torch.Generator().manual_seed(seed)
    layers, heads, group, width = 3, 2, 2, 8
    held, count = seq.held, min(reads.queries, seq.held)

    def numbers(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=source, dtype=torch.float64) * 2 - 1) * factor

    order = torch.rand(layers, heads, seq.position, generator=source)
    order[..., seq.position - count :] = -1  # a query attends to its own token
    positions = order.argsort(-1)[..., :held].sort(-1).values
    windows = (None, 8, None)
    rotary = Rotary((1.0, 0.1, 0.01, 0.001))
    keys = numbers(layers, heads, held, width).to(kind)
    queries = numbers(layers, heads * group, count, width).to(kind)
    query_positions = torch.arange(seq.position - count, seq.position)
    wide = keys.double().repeat_interleave(group, 1)
    logits = queries.double() @ wide.mT / width**0.5
    distance = query_positions[:, None] - positions.repeat_interleave(group, 1)[:, :, None]
    reach = torch.tensor([window or seq.position for window in windows])
    logits[(distance < 0) | (distance >= reach[:, None, None, None])] = -1e300
    weights = logits.softmax(-1).to(torch.promote_types(kind, torch.float32))
    attention = torch.rand(positions.shape, generator=source) * seq.position
    return HeldTokens(
        seq=seq,
        layers=range(5, 5 + layers),
        positions=positions,
        keys=keys if reads.keys else None,
        values=numbers(layers, heads, held, width).to(kind) if reads.values else None,
        attention=attention if reads.attention else None,
        queries=queries if count else None,
        query_positions=query_positions if count else None,
        weights=weights if count and reads.weights else None,
        scales=(None,) * layers,
        windows=windows,
        rotary=(rotary, rotary, None),
    )


def _tensors(held: HeldTokens) -> dict[str, Tensor]:
    """Return the tensors of `held` by name."""
    fields = attrs.asdict(held, recurse=False).items()
    return {name: value for name, value in fields if isinstance(value, torch.Tensor)}


def _shuffled(held: HeldTokens) -> list[int]:
    """Return an order of the tokens that is not that of the text."""
    order = list(range(held.positions.shape[-1]))
    return order[1::2] + order[::2]


def _reordered(held: HeldTokens, order: list[int]) -> HeldTokens:
    """Return the same tokens in another order."""
    moved: dict[str, Any] = {
        name: tensor[..., order, :] if name in ("keys", "values") else tensor[..., order]
        for name, tensor in _tensors(held).items()
        if not name.startswith("quer")
    }
    return attrs.evolve(held, **moved)


def _layer(held: HeldTokens, row: int) -> HeldTokens:
    """Return one layer of `held`."""
    part = slice(row, row + 1)
    tensors: dict[str, Any] = {name: tensor[part] for name, tensor in _tensors(held).items()}
    if held.query_positions is not None:
        tensors["query_positions"] = held.query_positions
    return attrs.evolve(
        held,
        layers=held.layers[part],
        scales=held.scales[part],
        windows=held.windows[part],
        rotary=held.rotary[part],
        **tensors,
    )


def _grow(
    policy: RetentionPolicy | None,
    prompt: int,
    chunk: int,
    *,
    request: int | str = 0,
    hit: bool = False,
    ids: bool = True,
) -> Iterator[Sequence]:
    """Compute a prompt in chunks, then generate 100 tokens; yield the sequence after each.

    With `hit`, an earlier request has cached the first half of the prompt.
    """
    cache = KVCache(1000, BLOCK, retention=policy, ids=ids)
    first = request if isinstance(request, int) else 10_000
    keys = range(first, first + prompt // (2 * BLOCK))
    if hit:
        before = cache.open(
            Request(id="before", prompt_tokens=prompt, keys=keys, key_tokens=BLOCK)
        )
        cache.commit(before, prompt)
        cache.close(before)
    seq = cache.open(Request(id=request, prompt_tokens=prompt, keys=keys, key_tokens=BLOCK))
    while seq.position < prompt:
        cache.commit(seq, min(chunk, prompt - seq.position))
        cache.check_integrity()
        yield seq
    for _ in range(100):
        cache.extend(seq, 1)
        cache.commit(seq, 1)
        cache.check_integrity()
        yield seq
