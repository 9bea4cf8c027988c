"""Merging of K/V: tokens that stay become weighted means, as a policy says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.lazy import LazyModule
from kvcore.plugins import FAILURES, policy_error, wrong_answer
from kvcore_engine.retention.token_retention import HeldTokens, TokenRetention

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

WEIGHT_ERROR = 1e-3
"""How far the sum of the weights of a mean may be from 1: policies compute in fp32."""


def merged(
    policy: TokenRetention,
    tokens: HeldTokens,
    stays: torch.Tensor,
    reachable: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the held tokens of a layer after merging, `[kv_heads, held, width]`.

    In fp32 or better; those of tokens that do not stay are 0. `stays` and `reachable`, bool
    `[kv_heads, held]`, are the tokens that stay, and those that a later token could attend to:
    others are dropped whatever the policy answers, and means are of those that are left.

    Raises:
        PolicyError: `merge` fails, or answers with another shape, with tokens that do not
            stay, with weights whose sums are not 1, or with a weight of 0 for one that stays.
    """
    from kvcore_plugins.codec.dtypes import widened  # noqa: PLC0415 - torch

    halves = [widened(part[0]) for part in (tokens.keys, tokens.values)]
    try:
        into, weights = (part[0] for part in policy.merge(tokens, stays[None]))
        merges, into = into >= 0, into.clamp_min(0)
        weights = weights.to(halves[0].dtype) * merges
        sums = torch.zeros_like(weights).scatter_add(1, into, weights)
    except FAILURES as error:
        raise policy_error(policy, "merge", error) from error
    error_of_sums = float((sums[stays] - 1).abs().max())
    wrong = ""
    if not error_of_sums < WEIGHT_ERROR:
        wrong = f"weights of a mean whose sum is {error_of_sums:.3g} off 1"
    elif not bool((weights[stays] > 0).all()):
        wrong = "a weight of 0 for a token that stays: give it some of the mean"
    elif not bool(stays.gather(1, into)[merges].all()):
        wrong = "tokens that do not stay: merge into those that do, or -1"
    if wrong:
        raise wrong_answer(policy, "merge()", wrong)
    weights = weights * reachable
    sums = torch.zeros_like(weights).scatter_add(1, into, weights)
    weights = weights / torch.where(stays, sums, 1).gather(1, into)
    keys, values = (
        torch.zeros_like(part).scatter_add(
            1, into[..., None].expand(part.shape), part * weights[..., None]
        )
        for part in halves
    )
    return keys, values
