"""The contract of retention policies that score single tokens, and what they score."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import attrs

from kvcore.cache.retention import RetentionPolicy
from kvcore.cache.sequence import Sequence
from kvcore.engine.backend import Tensor
from kvcore.engine.generator import Rotary
from kvcore.errors import InputError


@attrs.frozen(kw_only=True)
class Reads:
    """What a policy needs to score tokens. Nothing else is computed or kept for it.

    Attributes:
        keys, values: the K, or the V, of the held tokens.
        attention: the attention that each held token has got so far.
        queries: of how many of the newest tokens the queries are kept, and the attention
            weights computed.
    """

    keys: bool = False
    values: bool = False
    attention: bool = False
    queries: int = 0


@attrs.frozen(kw_only=True)
class HeldTokens:
    """The tokens that a sequence holds in some of the layers, as a policy scores them.

    Tensors are torch's. A policy may be asked for a few layers at a time: it must not score
    the tokens of one layer by those of another. What `Reads` does not name is None.

    Attributes:
        seq: the sequence. Its lengths are those after its compaction.
        layers: the layers, a range of them.
        positions: position in the text of each token, `[layers, kv_heads, tokens]`. Before
            the first compaction these are alike in all layers and heads.
        keys: `[layers, kv_heads, tokens, head_dim]`.
        values: `[layers, kv_heads, tokens, value_dim]`.
        attention: the sum of the attention weights that each token has got, over all query
            heads of its K/V head and over all tokens that this sequence has computed (not
            those that hit), `[layers, kv_heads, tokens]`.
        queries: queries of the newest tokens, as they attended,
            `[layers, query_heads, n, head_dim]`. n is `Reads.queries`, or fewer where this
            sequence has computed fewer.
        query_positions: positions of these tokens, `[n]`.
        weights: their attention weights over the held tokens,
            `[layers, query_heads, n, tokens]`, causal and within the layer's window.
        windows: attention window of each layer; None: none.
        rotary: the rotary embedding of each layer; None where the model has no such, or
            does not say.
    """

    seq: Sequence
    layers: range
    positions: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    attention: Tensor | None = None
    queries: Tensor | None = None
    query_positions: Tensor | None = None
    weights: Tensor | None = None
    windows: tuple[int | None, ...] = ()
    rotary: tuple[Rotary | None, ...] = ()


class TokenRetention(RetentionPolicy):
    """A retention policy that picks single tokens, by a score.

    How many stay is said by `keeps`, which sees lengths alone; `score` says which. Scores are
    asked for where a sequence has tensors: by a simulation never.

    Attributes:
        reads: what `score` needs.
        recent, sinks: how many of the newest and of the first tokens of the text stay
            whatever their score.
        rebases: whether the tokens that stay are given new positions, one after another up to
            the newest token. Their keys are rotated by what is missing between them, always
            from the key as it was computed. Refused where a layer has no `Generator.rotary`.
    """

    reads = Reads()
    recent = 1
    sinks = 0
    rebases = False

    @abstractmethod
    def score(self, held: HeldTokens) -> Tensor:
        """Return a score of each held token, `[layers, kv_heads, tokens]`; the highest stay.

        Called when a sequence is compacted. Of tokens with the same score the newer stays.
        Tokens that `recent` and `sinks` name stay in any case, and those that no later token
        attends to, since they are out of a layer's window, go first. Must not be NaN.
        """


@attrs.define(slots=False, eq=False, kw_only=True)
class ScoreRetention(TokenRetention):
    """Keep the tokens of the highest score, in each layer and K/V head its own.

    A derived class defines `score`, and `reads` if it needs more than positions.

    The cache compacts a sequence to its budget when its prompt is computed, and (`when` is
    `always`) whenever it fills a block beyond the blocks of its budget. A prompt is computed
    with attention to all of it, so it must fit into the pool whole.

    Options:
        budget: tokens that stay: a whole number of tokens, or a share of the prompt, as in
            0.25.
        recent: how many of the newest tokens stay whatever their score.
        sinks: how many of the first tokens stay whatever their score.
        when: `always`, or `prompt`: once, when the prompt is computed.

    Raises:
        InputError: a budget of no token, or one that `recent` and `sinks` leave no choice.
    """

    budget: int | float = attrs.field(default=1024)
    recent: int = attrs.field(default=1)
    sinks: int = attrs.field(default=0)
    when: Literal["always", "prompt"] = attrs.field(default="always")

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        problem = None
        if not self.budget > 0 or (isinstance(self.budget, float) and self.budget > 1):
            problem = f"budget={self.budget}: give 1 token or more, or a share up to 1.0"
        elif self.recent < 1 or self.sinks < 0:
            problem = f"recent={self.recent}, sinks={self.sinks}: give 1 or more, and 0 or more"
        elif self.when not in ("always", "prompt"):
            problem = f"when={self.when!r} is not known; there are: always, prompt"
        elif isinstance(self.budget, int) and self.recent + self.sinks > self.budget:
            problem = (
                f"recent={self.recent} and sinks={self.sinks} are more than the budget of "
                f"{self.budget} tokens"
            )
        if problem:
            msg = f"{self.name}: {problem}"
            raise InputError(msg)

    def tokens_of(self, seq: Sequence) -> int:
        """Return the budget of `seq` in tokens: 1 or more."""
        if isinstance(self.budget, int):
            return self.budget
        return max(1, int(self.budget * seq.request.prompt_tokens))

    def keeps(self, seq: Sequence) -> int | None:
        """Return the budget at the end of the prompt, and whenever a block more is full."""
        if seq.position < seq.target:
            return None
        budget, size = self.tokens_of(seq), seq.span.geometry.block_size
        if seq.position == seq.target:
            return budget
        if self.when == "always" and seq.held >= (-(-budget // size) + 1) * size:
            return budget
        return None
