"""Attention of single new tokens by FlashInfer, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import attrs
import torch
from torch import Tensor

from kvcore_engine.backend._pool import LayerTensor, Pool
from kvcore_engine.backend._step_plan import AttentionKernel, LayerKind, NewToken

WIDTHS = (64, 128, 256)
"""Numbers of a head that FlashInfer is built for."""

GROUPS = (1, 2, 4, 8, 16)
"""Numbers of query heads that share a K/V head, of the same builds."""

WORKSPACE_BYTES = 128 << 20
"""Memory for the parts of split contexts, as FlashInfer recommends it."""


def uncovered(pool: Pool) -> str | None:
    """Return why FlashInfer cannot attend to a pool; None if it can."""
    layout = pool.layout
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install flashinfer-python"
    if pool.device.type != "cuda":
        return "FlashInfer needs a GPU"
    if pool.dtype not in {torch.float16, torch.bfloat16}:
        return f"FlashInfer computes in fp16 and bf16, not in {layout.dtype}"
    if layout.head_dim not in WIDTHS or layout.value_dim != layout.head_dim:
        return (
            f"FlashInfer takes keys and values of {', '.join(map(str, WIDTHS))} numbers, not "
            f"{layout.head_dim} and {layout.value_dim}"
        )
    if not isinstance(pool.keys[0], LayerTensor):
        return "codes of a codec are nothing that FlashInfer reads"
    return None


@attrs.frozen(eq=False)
class FlashInferPlan:
    """The decoding sequences of a step, as arguments of FlashInfer.

    Attributes:
        rows: their rows in the step.
        table: `indptr`, `indices` and `last_page_len` of its `plan`, in host memory.
        window: number of tokens that each attends to; None: all.
    """

    rows: Tensor
    table: tuple[Tensor, Tensor, Tensor]
    window: int | None


class FlashInferDecode(AttentionKernel):
    """Calls `BatchDecodeWithPagedKVCacheWrapper`, with tensor cores, on the blocks of a pool.

    Source: Ye et al., "FlashInfer: efficient and customizable attention engine for LLM
    inference serving", MLSys 2025; the interface of its versions 0.2 to 0.7.
    """

    def __init__(self, pool: Pool, make: Callable[..., Any] | None = None) -> None:
        """Store a pool for which `uncovered` is None; `make` stands in for the wrapper."""
        self._pool = pool
        self._make = make or import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        # FlashInfer needs zeros.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        # By query heads, window and scale: a wrapper, and the plan that it has.
        self._wrappers: dict[tuple[int, int | None, float | None], list[Any]] = {}

    def refusal(self, kind: LayerKind) -> str | None:
        """Return why FlashInfer cannot attend in layers of a kind; None if it can."""
        if kind.group not in GROUPS:
            return f"FlashInfer does not take {kind.group} query heads of a K/V head"
        if kind.sinks:
            return "FlashInfer's windows have no sinks"
        if kind.weighed:
            return "FlashInfer does not return attention weights"
        return None

    def plan(
        self, singles: list[NewToken], tables: list[Tensor], kind: LayerKind
    ) -> FlashInferPlan:
        """List the blocks of the sequences. O(blocks)."""
        size = self._pool.layout.block_size
        attended = [tables[single.number][: single.context // size + 1] for single in singles]
        counts = torch.tensor([0, *map(len, attended)], dtype=torch.int32)
        last = [single.context % size + 1 for single in singles]
        table = (
            counts.cumsum(0, dtype=torch.int32),
            torch.cat(attended).to(torch.int32),
            torch.tensor(last, dtype=torch.int32),
        )
        rows = torch.tensor([single.row for single in singles])
        return FlashInferPlan(self._pool.upload(rows), table, kind.window)

    def attend(
        self,
        layer: int,
        plan: FlashInferPlan,
        queries: Tensor,
        out: Tensor,
        scale: float | None,
        sums: list[Tensor] | None,
    ) -> None:
        """Compute the rows of the plan."""
        assert sums is None
        wrapper = self._planned(plan, queries.shape[2], scale)
        rows = queries.index_select(0, plan.rows)
        output = wrapper.run(rows.flatten(1, 2), self._pool.layer_blocks(layer))
        out.index_copy_(0, plan.rows, output.view_as(rows))

    def _planned(self, plan: FlashInferPlan, group: int, scale: float | None) -> Any:
        """Return the wrapper for `group` query heads a K/V head and a scale, with the plan.

        The plan is passed once for all layers of a kind, since that is work of the host.
        """
        key = group, plan.window, scale
        kept = self._wrappers.get(key)
        if kept is None:
            made = self._make(self._workspace, "HND", use_tensor_cores=True)
            kept = self._wrappers[key] = [made, None]
        wrapper, known = kept
        if known is not plan:
            layout = self._pool.layout
            wrapper.plan(
                *plan.table,
                layout.kv_heads * group,
                layout.kv_heads,
                layout.head_dim,
                layout.block_size,
                # The tokens before the new one, which it counts apart.
                window_left=-1 if plan.window is None else plan.window - 1,
                q_data_type=self._pool.dtype,
                kv_data_type=self._pool.dtype,
                sm_scale=scale,
            )
            kept[1] = plan
        return wrapper
