"""Expected attention: tokens that future queries are expected to attend to."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import InputError, ScoreRetention
from kvcore.engine import Rotary, Tensor
from kvcore_engine.retention.token_retention import HeldTokens, Reads

_TOKENS = 4096
"""Tokens whose expected attention is computed at a time."""

_MOST = 1 << 20
"""Most queries, and most positions: a row each lies in memory."""


@attrs.define(slots=False, eq=False, kw_only=True)
class Expected(ScoreRetention):
    """Keep the tokens that future queries are expected to attend to most.

    Queries are assumed to be normally distributed before their rotation. For a query q of mean
    m and covariance C, rotated by the average R of the rotations at the next `ahead` positions,

        E[exp(s k·q)] = exp(s k·Rm + s² k·RCRᵀk / 2)        s: the scale of attention

    Normalised over the held tokens, averaged over the query heads of a K/V head, and times the
    norm of its value, that is a token's score.

    As published the mean and the covariance are those of all tokens of the prompt; here, of the
    `queries` newest ones, without the `sinks`: others are not kept. Layers without a rotary
    embedding are scored without R.

    Options:
        budget, recent, when: as of every policy with scores.
        sinks: how many of the first tokens stay; their queries count for nothing.
        queries: number of newest tokens whose queries give mean and covariance.
        ahead: number of next positions that are averaged over.

    Raises:
        InputError: also for less than one query or position, or more than 2^20.

    Source: Devoto, Jeblick and Jégou, "Expected attention: KV cache compression by estimating
    attention from future queries distribution", 2025.
    """

    name: ClassVar[str] = "expected"

    sinks: int = attrs.field(default=4)
    queries: int = attrs.field(default=128)
    ahead: int = attrs.field(default=512)

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        if not (1 <= self.queries <= _MOST and 1 <= self.ahead <= _MOST):
            msg = (
                f"expected: queries={self.queries}, ahead={self.ahead}: give 1 or more of "
                f"each, and at most {_MOST:,}"
            )
            raise InputError(msg)
        super().__attrs_post_init__()

    @property
    def reads(self) -> Reads:  # type: ignore[override] # of the instance
        """Keys, values, and the newest queries without their weights."""
        return Reads(keys=True, values=True, queries=self.queries, weights=False)

    def score(self, held: HeldTokens) -> Tensor:
        """Return the expected attention to each token, times the norm of its value."""
        from kvcore_plugins.codec.dtypes import widened  # noqa: PLC0415 - torch: not in a simulation

        keys, queries = widened(held.keys), widened(held.queries)
        position, count = held.seq.position, queries.shape[2]
        outliers = min(max(0, self.sinks - position + count), count - 1)
        queries, past = queries[:, :, outliers:], held.query_positions[outliers:]
        future = past.new_tensor([*range(position, position + self.ahead)])
        norms = widened(held.values).norm(dim=-1)
        for row in range(len(held.layers)):
            rotary = held.rotary[row] if held.rotary else None
            window = held.windows[row] if held.windows else None
            mean, covariance = future_queries(queries[row], rotary, past, future)
            scale = held.scales[row] if held.scales else None
            scale = keys.shape[-1] ** -0.5 if scale is None else scale
            exponents = log_expected(keys[row], mean, covariance, scale)
            if window is not None:
                out = held.positions[row] <= position - window
                exponents = exponents.masked_fill(out[:, None], float("-inf"))
            norms[row] *= exponents.softmax(-1).mean(1)
        return norms


def future_queries(
    queries: Tensor, rotary: Rotary | None, past: Tensor, future: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the queries to come, at an average of their rotations.

    `[heads, width]` and `[heads, width, width]`, from queries `[heads, n, width]` as they were
    rotated at the positions `past`, `[n]`. `future` are the positions to come.
    """
    if rotary is not None:
        queries = rotary.rotate(queries, *rotary.angles(-past))
    mean = queries.mean(1)
    centred = queries - mean[:, None]
    covariance = centred.mT @ centred / queries.shape[1]
    if rotary is not None:
        turn = [part.mean(0) for part in rotary.angles(future)]
        mean = rotary.rotate(mean, *turn)
        covariance = rotary.rotate(rotary.rotate(covariance, *turn).mT, *turn)
    return mean, covariance


def log_expected(keys: Tensor, mean: Tensor, covariance: Tensor, scale: float) -> Tensor:
    """Return log E[exp(scale q·k)] for normally distributed q, `[kv_heads, group, tokens]`.

    `keys` are `[kv_heads, tokens, width]`, `mean` `[query_heads, width]`, and `covariance`
    `[query_heads, width, width]`.
    """
    import torch  # noqa: PLC0415 - not in a simulation

    heads = keys.shape[0]
    keys = keys[:, None] * scale
    mean, covariance = (part.unflatten(0, (heads, -1)) for part in (mean, covariance))
    # In parts: the products are as large as the keys of all query heads.
    squares = [((part @ covariance) * part).sum(-1) for part in keys.split(_TOKENS, 2)]
    return (keys @ mean[..., None])[..., 0] + torch.cat(squares, -1) / 2
