"""The contract of retention policies that keep everything, and select pages to read."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import attrs

from kvcore.cache.retention import RetentionPolicy
from kvcore.cache.sequence import Sequence
from kvcore.engine.batch import Tensor
from kvcore.errors import InputError
from kvcore.models.spec import ModelSpec
from kvcore_engine.retention.token_retention import tokens_of


@attrs.define(slots=False, eq=False, kw_only=True)
class PageSelection(RetentionPolicy):
    """Keep everything; a generated token attends to the pages with the highest scores.

    A page is a run of tokens of a sequence. A derived class defines the summary that is kept
    of a full page (`summarise`), and the score by which a token selects pages from their
    summaries (`score`), in each layer and K/V head by itself. The page of the newest token is
    always read. Tokens of a prompt attend to everything, and so do all tokens in layers with a
    window and in the first `dense_layers`.

    K/V of generated tokens depends on the pages that were read, so an output is never shared.
    Tokens that are computed again after a preemption read what they read before.

    Options:
        budget: tokens that a generated token attends to, rounded up to whole pages: a number
            of tokens, or a share of the prompt, as in 0.25.
        page: tokens of a page: the block size of the cache or a multiple of it.
        dense_layers: number of first layers in which everything is read.

    Raises:
        InputError: a budget, a page or a number of layers below what there can be.

    Attributes:
        summary_keys: number of keys that take as many numbers as the summary of a page.
    """

    reads_all: ClassVar[bool] = False
    summary_keys: ClassVar[int] = 1

    budget: int | float = attrs.field(default=2048)
    page: int = attrs.field(default=16)
    dense_layers: int = attrs.field(default=2)

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        problem = None
        if self.page < 1 or self.dense_layers < 0:
            problem = (
                f"page={self.page}, dense_layers={self.dense_layers}: give 1 token or more, "
                "and 0 layers or more"
            )
        elif isinstance(self.budget, int) and self.budget < self.page:
            problem = f"budget={self.budget}: give {self.page} tokens, a page, or more"
        elif not self.budget > 0 or (isinstance(self.budget, float) and self.budget > 1):
            problem = f"budget={self.budget}: give a number of tokens, or a share up to 1.0"
        if problem:
            msg = f"{self.name}: {problem}"
            raise InputError(msg)

    def pages_of(self, seq: Sequence) -> int:
        """Return how many pages a generated token of `seq` reads, its own included."""
        return -(-tokens_of(self.budget, seq.request.prompt_tokens) // self.page)

    def selection(self, model: ModelSpec) -> float:
        """Return the numbers of summaries, as a share of those of the K/V of their pages."""
        key, token = model.head_dim, model.head_dim + model.value_dim
        if model.latent:  # one latent stands for both
            key = token = model.latent
        return self.summary_keys * key / (self.page * token)

    def timing(self, model: ModelSpec) -> dict[str, Any]:
        """Return the options of sparse attention of `roofline`, for a budget in tokens."""
        from kvcore_plugins.latency.roofline import attends_to_all  # noqa: PLC0415 - for times

        is_all = None in model.windows[self.dense_layers :] and attends_to_all(model)
        if not (isinstance(self.budget, int) and is_all):
            return {}
        return {
            "attended": self.budget,
            "selection": self.selection(model),
            "dense_layers": self.dense_layers,
        }

    @abstractmethod
    def summarise(self, keys: Tensor) -> Tensor:
        """Return the summaries of full pages, `[kv_heads, pages, ...]`.

        `keys` are `[kv_heads, pages, tokens, head_dim]`, and valid until this returns.
        """

    @abstractmethod
    def score(self, summaries: Tensor, queries: Tensor) -> Tensor:
        """Return a score of each page for one token, `[kv_heads, pages]`; the highest are read.

        `summaries` are `[kv_heads, pages, ...]`, `queries` those of the query heads of each
        K/V head, `[kv_heads, group, head_dim]`. Scores are finite. Of pages with the same
        score either may be read.
        """
