"""Quest: pages whose keys may have a large product with the query."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore.engine import Tensor
from kvcore_engine.retention.page_selection import PageSelection


@attrs.define(slots=False, eq=False, kw_only=True)
class Quest(PageSelection):
    """Keep everything, and read the pages that may have the largest products with a query.

    The summary of a page is the least and the greatest number that its keys have in each
    channel. For a query q no key of the page has a product above

        sum over channels c of max(q[c] least[c], q[c] greatest[c])

    The score of a page is that bound, the largest one of the query heads that share the K/V
    head. As published each query head selects pages of its own.

    Options:
        budget, page, dense_layers: as of every policy that selects pages.

    Source: Tang et al., "Quest: query-aware sparsity for efficient long-context LLM inference",
    ICML 2024.
    """

    name: ClassVar[str] = "quest"
    summary_keys: ClassVar[int] = 2

    def summarise(self, keys: Tensor) -> Tensor:
        """Return least and greatest numbers by channel, `[kv_heads, pages, 2, width]`."""
        import torch  # noqa: PLC0415 - not in a simulation

        return torch.stack(keys.aminmax(dim=2), 2)

    def score(self, summaries: Tensor, queries: Tensor) -> Tensor:
        """Return the largest bound of the query heads, `[kv_heads, pages]`."""
        from kvcore_plugins.codec.dtypes import widened  # noqa: PLC0415 - torch: see `summarise`

        least, greatest = widened(summaries).unbind(2)
        query = widened(queries).mT  # [kv_heads, width, group]
        # Of both products the greater has the greatest number where the query is positive.
        bounds = greatest @ query.clamp_min(0) + least @ query.clamp_max(0)
        return bounds.amax(-1)
