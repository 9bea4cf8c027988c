"""The contract of retention policies that score single tokens."""

from __future__ import annotations

from abc import abstractmethod
from fractions import Fraction
from functools import cache
from typing import Literal

import attrs

from kvcore.cache import KVCache
from kvcore.cache.retention import RetentionPolicy
from kvcore.cache.sequence import Sequence
from kvcore.engine.batch import Tensor
from kvcore.engine.rotary import Rotary
from kvcore.errors import InputError
from kvcore.plugins import find_override


@attrs.frozen(kw_only=True)
class Reads:
    """The inputs that a policy needs to score tokens: others are neither computed nor kept.

    Attributes:
        keys, values: the K, or the V, of the held tokens.
        attention: the attention that each held token has got so far.
        queries: number of the newest tokens whose queries are kept.
        weights: whether the attention weights of these tokens are computed from the queries.
    """

    keys: bool = False
    values: bool = False
    attention: bool = False
    queries: int = 0
    weights: bool = True


@attrs.frozen(kw_only=True)
class HeldTokens:
    """The tokens that a sequence holds in some of the layers, as a policy scores them.

    Tensors are torch's, and valid until `score` returns. A policy may get a few layers at a
    time: it must not score the tokens of one layer by the tokens of another. Tensors that
    `Reads` does not name are None.

    Attributes:
        seq: the sequence. Its lengths are those after its compaction.
        layers: the layers, a range of them.
        positions: position in the text of each token, `[layers, kv_heads, tokens]`. Before
            the first compaction these are the same in all layers and heads.
        keys: `[layers, kv_heads, tokens, head_dim]`.
        values: `[layers, kv_heads, tokens, value_dim]`.
        attention: the sum of the attention weights that each token has got, over all query
            heads of its K/V head and over all tokens that this sequence has computed (not
            those that hit), `[layers, kv_heads, tokens]`, in fp32 or better.
        queries: queries of the newest tokens, as they attended,
            `[layers, query_heads, n, head_dim]`. n is `Reads.queries`, or fewer where this
            sequence has computed fewer.
        query_positions: positions of these tokens, `[n]`.
        weights: their attention weights over the held tokens,
            `[layers, query_heads, n, tokens]`, causal and within the layer's window, in fp32
            or better.
        scales: factor of q·k in each layer; None: 1 / sqrt(head_dim). Empty, as `windows` and
            `rotary` may be: None in all layers.
        windows: attention window of each layer; None: the layer has no window.
        rotary: the rotary embedding of each layer; None: the layer has none that is known.
    """

    seq: Sequence
    layers: range
    positions: Tensor
    keys: Tensor = None
    values: Tensor = None
    attention: Tensor = None
    queries: Tensor = None
    query_positions: Tensor = None
    weights: Tensor = None
    scales: tuple[float | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    rotary: tuple[Rotary | None, ...] = ()


class TokenRetention(RetentionPolicy):
    """A retention policy that selects single tokens by a score.

    `keeps`, which reads lengths alone, returns how many tokens stay; `score` decides which. It
    is called if the sequence has tensors, in a simulation never.

    Attributes:
        reads: the tensors that `score` needs.
        sinks: how many of the first tokens of the text stay whatever their score.
        rebases: whether the tokens that stay get new positions, one after another up to the
            newest token. Keys are rotated by the difference, always from the key as it was
            computed. An InputError if a layer has no `Generator.rotary`.
    """

    reads = Reads()
    sinks = 0
    rebases = False

    def recent_of(self, seq: Sequence) -> int:
        """Return how many of the newest tokens stay whatever their score: 1 unless overridden.

        Like `keeps`, it depends on lengths alone.
        """
        return 1

    @abstractmethod
    def score(self, held: HeldTokens) -> Tensor:
        """Return a score of each held token, `[layers, kv_heads, tokens]`; the highest stay.

        Called when a sequence is compacted. Of tokens with the same score the newer stays.
        The newest tokens (`recent_of`) and the `sinks` stay in any case, and tokens that no
        later token attends to, since they are out of a layer's window, go first. Scores are
        finite, and in fp32 or better, so that different scores do not tie. The order of tokens
        has no meaning.
        """

    @property
    def merges(self) -> bool:
        """Whether `merge` is overridden."""
        return type(self).merge is not TokenRetention.merge

    def merge(self, held: HeldTokens, stays: Tensor) -> tuple[Tensor, Tensor]:
        """Return into which token each held one is merged, and its weight there.

        Called after `score` if it is overridden; otherwise tokens that do not stay are dropped.
        K and V of a token that stays become the weighted mean of the tokens merged into it.
        `held` has keys and values; `stays` is True for tokens that stay.

        All are `[layers, kv_heads, tokens]`. The first tensor has the index of a token that
        stays: its own for that one, -1 for a token that is dropped. The second has weights of
        0 or more, whose sum is 1 over the tokens that are merged into one; that one's is above
        0. Tokens that no later token reaches are left out of the means afterwards.
        """
        raise NotImplementedError


def token_retention(cache: KVCache) -> TokenRetention | None:
    """Return the retention policy of `cache` if it selects single tokens, otherwise None.

    Raises:
        InputError: the policy defines how many tokens stay, and not which.
    """
    retention = cache.retention
    if isinstance(retention, TokenRetention):
        return retention
    if retention is not None and find_override(retention, "keeps") is not None:
        msg = (
            f"retention {retention.name!r} says how many tokens stay and not which, so it can "
            "be simulated and not run: derive it from kvcore_engine.retention.TokenRetention, "
            "whose score() says which"
        )
        raise InputError(msg)
    return None


@attrs.define(slots=False, eq=False, kw_only=True)
class ScoreRetention(TokenRetention):
    """Keep the tokens of the highest score, separately in each layer and K/V head.

    A derived class defines `score`, and `reads` if it needs more than positions.

    The cache compacts a sequence to its budget when its prompt is computed, and (`when` is
    `always`) whenever it fills a block beyond the blocks of its budget. A prompt is computed
    with attention to all of it, so it must fit into the pool whole.

    Options:
        budget: tokens that stay: a whole number of tokens, or a share of the prompt, as in
            0.25.
        recent: how many of the newest tokens stay whatever their score: a whole number, or
            a share of the budget.
        sinks: how many of the first tokens stay whatever their score.
        when: `always`, or `prompt`: once, when the prompt is computed.

    Raises:
        InputError: a budget of no token, or of fewer tokens than `recent` and `sinks`. Where it
            is a share, fewer of the newest tokens stay then.
    """

    budget: int | float = attrs.field(default=1024)
    recent: int | float = attrs.field(default=1)
    sinks: int = attrs.field(default=0)
    when: Literal["always", "prompt"] = attrs.field(default="always")

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        problem = None
        recent = self.recent
        if not self.budget > 0 or (isinstance(self.budget, float) and self.budget > 1):
            problem = f"budget={self.budget}: give 1 token or more, or a share up to 1.0"
        elif not recent > 0 or (isinstance(recent, float) and recent > 1):
            problem = f"recent={recent}: give 1 token or more, or a share up to 1.0"
        elif self.sinks < 0:
            problem = f"sinks={self.sinks}: give 0 or more"
        elif self.when not in ("always", "prompt"):
            problem = f"when={self.when!r} is not known; there are: always, prompt"
        elif isinstance(self.budget, int) and (
            tokens_of(recent, self.budget) + self.sinks > self.budget
        ):
            problem = (
                f"recent={recent} and sinks={self.sinks} are more than the budget of "
                f"{self.budget} tokens"
            )
        if problem:
            msg = f"{self.name}: {problem}"
            raise InputError(msg)

    def tokens_of(self, seq: Sequence) -> int:
        """Return the budget of `seq` in tokens: 1 or more."""
        return tokens_of(self.budget, seq.request.prompt_tokens)

    def recent_of(self, seq: Sequence) -> int:
        """Return how many of the newest tokens stay: 1, up to the budget without `sinks`."""
        budget = self.tokens_of(seq)
        return max(1, min(tokens_of(self.recent, budget), budget - self.sinks))

    def keeps(self, seq: Sequence) -> int | None:
        """Return the budget at the end of the prompt, and whenever a block more is full."""
        if seq.position < seq.target:
            return None
        budget = self.tokens_of(seq)
        # The end of the prompt is over where there was no room for the blocks then.
        if (
            seq.position == seq.target
            or (self.when == "always" and has_spare_block(seq, budget))
            or (self.when == "prompt" and budget < seq.target and not seq.compacted)
        ):
            return budget
        return None


def has_spare_block(seq: Sequence, tokens: int) -> bool:
    """Return True if `seq` has filled a block more than `tokens` tokens need."""
    size = seq.span.geometry.block_size
    return seq.held >= (-(-tokens // size) + 1) * size


def tokens_of(amount: float, whole: int) -> int:
    """Return a number of tokens, or a share of `whole`, as tokens: 1 or more."""
    return amount if isinstance(amount, int) else max(1, int(_share(amount) * whole))


@cache
def _share(amount: float) -> Fraction:
    """Return a share as it is written: 0.29 of 100 is 29, not 28.999."""
    return Fraction(str(amount))
