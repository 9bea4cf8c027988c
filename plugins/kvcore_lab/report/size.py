"""Report on the K/V of a model: bytes, blocks that fit, and bounds of speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvcore.sections import Section, Table
from kvcore.units import DECIMAL, format_bytes, format_number, format_seconds
from kvcore_cli.report.tables import counted

Row = tuple[str, str, str]
"""A quantity, its amount in a unit that fits it, and the amount in another or a remark."""


def size_sections(document: Mapping[str, Any]) -> list[Section]:
    """Return the report on the document of `kvcore size --json`."""
    rows = Table(("quantity", "amount", "that is"), [*_rows(document)], ())
    return [_title(document["model"]), rows, *(f"{note}." for note in document["notes"])]


def _title(model: Mapping[str, Any]) -> str:
    """Return a model in words: its parameters, layers, windows and heads."""
    plural = "" if model["kv_heads"] == 1 else "s"
    heads = f"{model['query_heads']} query heads, {model['kv_heads']} K/V head{plural}"
    if model["latent"]:
        heads = f"{model['query_heads']} heads, {model['latent']} numbers a token"
    active = ""
    if model["experts"]:
        active = f" ({_parameters(model['active_parameters'])} active)"
    windows = [
        f"{window['layers']} with a window of {window['window']:,}"
        for window in model["windows"]
        if window["window"] is not None
    ]
    layers = ", ".join([f"{model['layers']} layers", *windows])
    return (
        f"{model['name']}: {_parameters(model['parameters'])} parameters"
        f"{active}, {layers}, {model['attention']} ({heads})"
    )


def _parameters(parameters: int) -> str:
    """Format a number of parameters with three digits, in billions or millions if large."""
    for unit, factor in (("B", 10**9), ("M", 10**6)):
        if parameters >= factor:
            return f"{format_number(parameters / factor)} {unit}"
    return f"{parameters:,}"


def _rows(report: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the document of `kvcore size --json`."""
    kv, tokens, batch = report["kv"], report["tokens"], report["batch"]
    yield _bytes(f"K/V of a token in {report['codec']}", kv["bytes_per_token"])
    groups = report.get("groups")
    if groups is None:
        yield _bytes(
            f"K/V of a block of {report['block_size']:,} tokens", kv["bytes_per_block"]
        )
    else:
        yield _bytes("K/V of a block of a cache group", groups["bytes_per_block"])
    yield _bytes(f"K/V of a request of {tokens:,} tokens", kv["bytes_per_request"])
    if len(report["caches"]) > 1:
        for cache in report["caches"]:
            yield _bytes(f"- {cache['cache']}", cache["bytes_per_request"])
    yield _bytes(f"K/V of a batch of {batch:,}", kv["bytes_per_batch"])
    if kv["staged_bytes_per_request"]:
        yield _bytes("and each running request stages", kv["staged_bytes_per_request"])
    if "window" in kv:
        yield _bytes(f"K/V of {batch:,} x {kv['window']:,} tokens", kv["window_bytes"])
    model = report["model"]
    mixed = model["expert_dtype"] != model["dtype"]
    experts = f", experts in {model['expert_dtype']}" if mixed else ""
    stored = model["extra_bytes"] or model["extra_expert_bytes"]
    kinds = f"{model['dtype']}{experts}{', as stored' if stored else ''}"
    yield _bytes(f"weights in {kinds}", model["weight_bytes"])
    if "device" not in report:
        return
    device, fit, server = report["device"], report["fit"], report["server"]
    gpus = server["gpus"]
    several = f"{gpus} x " if gpus > 1 else ""
    yield _bytes(f"memory of {several}{device['name']}", gpus * device["hbm_bytes"])
    yield _bytes("reserve", fit["reserve_bytes"])
    if fit["weights_fit"]:
        yield _bytes("left for K/V", fit["kv_budget_bytes"])
    else:
        yield _bytes("missing: the weights do not fit", -fit["kv_budget_bytes"])
    if server["kv_copies"] != 1:
        yield "copies of the K/V", format_number(server["kv_copies"]), "on all GPUs together"
    yield from _pool_rows(report)
    if not fit["weights_fit"]:
        return
    decode, prefill = report["decode"], report["prefill"]
    rate = format_number(decode["tokens_per_second_per_request"])
    total = format_number(decode["tokens_per_second"])
    yield "decode, at most", f"{rate} tokens/s each", f"{total} tokens/s in all"
    work = f"{format_number(prefill['flop'] / 1e12)} TFLOP"
    yield "prefill of a request, at least", format_seconds(prefill["seconds"]), work
    yield "load of its K/V from the host", format_seconds(prefill["load_seconds"]), ""


def _pool_rows(report: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the blocks and the requests that fit: of cache groups, if there are some."""
    fit, batch = report["fit"], report["batch"]
    blocks, requests, remark = fit["blocks"], fit["requests"], ""
    held = f"{blocks * report['block_size']:,} tokens"
    if "grouped_blocks" in fit:
        groups = report["groups"]
        blocks, requests = fit["grouped_blocks"], fit["grouped_requests"]
        held = f"in {counted(len(groups['groups']), 'cache group')}"
        remark = f"{groups['blocks_per_request']:,} blocks each"
    if batch > requests:
        remark = f"the batch of {batch:,} does not"
    yield "blocks that fit", f"{blocks:,}", held
    yield "requests that fit", f"{requests:,}", remark


def _bytes(quantity: str, count: int) -> Row:
    return quantity, format_bytes(count), format_bytes(count, DECIMAL)
