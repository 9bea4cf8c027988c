"""KVMerger: neighbours with similar keys become their weighted mean."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore import InputError, ScoreRetention
from kvcore.engine import Tensor
from kvcore_engine.retention.token_retention import HeldTokens, Reads


@attrs.define(slots=False, eq=False, kw_only=True)
class KVMerger(ScoreRetention):
    """Merge runs of tokens with similar keys into one token each, to the budget.

    A text is cut into as many runs as the budget has tokens, where the keys of neighbours have
    the least cosine similarity. The first token of a run is its pivot: it stays, with its
    position. Keys and values of the run become their mean, weighted by a Gaussian kernel:

        weight of token i ~ exp(-|k_i - k_pivot|² / 2 s²)    s²: mean of |k_i - k_pivot|² > 0

    A token is dropped, not merged, if the similarity of its key to that of the pivot is not
    above the threshold. A merged token counts as one token when it is merged again.

    As published the threshold alone decides how many tokens stay, the pivot is the token of a
    run with the most attention, and tokens with much attention are not merged. Here the budget
    decides, since how many stay must depend on lengths alone; and only keys are read for it.

    Options:
        budget, recent, sinks, when: as of every policy with scores.
        threshold: cosine similarity to the pivot above which a token is merged; 1: none is.

    Raises:
        InputError: also for a threshold that is no cosine.

    Source: Wang, Jin, Yu and Zhang, "Model tells you where to merge: adaptive KV cache merging
    for LLMs on long-context tasks", 2024.
    """

    name: ClassVar[str] = "kvmerger"
    reads = Reads(keys=True, values=True)

    threshold: float = attrs.field(default=0.75)

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        if not -1 <= self.threshold <= 1:
            msg = f"kvmerger: threshold={self.threshold}: give a cosine, from -1 to 1"
            raise InputError(msg)
        super().__attrs_post_init__()

    def score(self, held: HeldTokens) -> Tensor:
        """Return by how much each key differs from the one before it in the text, 0 to 2."""
        from kvcore_plugins.codec.dtypes import widened  # noqa: PLC0415 - torch: not in a simulation

        order = held.positions.argsort(-1)
        keys = widened(held.keys).take_along_dim(order[..., None], 2)
        differences = keys.new_full(order.shape, 2.0)  # the first token begins a run
        differences[..., 1:] = 1 - _cosine(keys[..., 1:, :], keys[..., :-1, :])
        return differences.scatter(-1, order, differences)

    def merge(self, held: HeldTokens, stays: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pivot of each token, and its weight in the mean of the run."""
        import torch  # noqa: PLC0415 - likewise

        from kvcore_plugins.codec.dtypes import widened  # noqa: PLC0415 - likewise

        # In the order of the text, the pivot is the last token so far that stays.
        order = held.positions.argsort(-1)
        ranks = torch.arange(order.shape[-1], device=order.device)
        last = torch.where(stays.gather(-1, order), ranks, -1).cummax(-1).values
        pivots = torch.where(last >= 0, order.gather(-1, last.clamp_min(0)), -1)
        pivots = torch.empty_like(order).scatter(-1, order, pivots)
        keys, index = widened(held.keys), pivots.clamp_min(0)
        pivot_keys = keys.take_along_dim(index[..., None], 2)
        merged = stays | ((pivots >= 0) & (_cosine(keys, pivot_keys) > self.threshold))

        def of_run(numbers: Tensor) -> Tensor:
            """Return the sum of the numbers of the run of each token."""
            return torch.zeros_like(numbers).scatter_add(-1, index, numbers).gather(-1, index)

        # The kernel is as wide as the run: equal keys have a distance and a width of 0.
        distances = (keys - pivot_keys).square().sum(-1) * merged
        width = of_run(distances) / of_run((distances > 0).to(keys.dtype)).clamp_min(1)
        scaled = distances / (2 * width).clamp_min(torch.finfo(keys.dtype).tiny)
        weights = (-scaled).exp() * merged
        return pivots.where(merged, -1), weights / of_run(weights).clamp_min(1)


def _cosine(keys: Tensor, neighbours: Tensor) -> Tensor:
    """Return the cosine similarity of keys to others, -1 to 1; 0 for a key of zeros."""
    from torch.nn.functional import cosine_similarity  # noqa: PLC0415 - not in a simulation

    return cosine_similarity(keys, neighbours, dim=-1).clamp(-1, 1)
