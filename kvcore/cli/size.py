"""`kvcore size`: what a model's K/V takes, how much of it fits, and how fast it can go."""

from __future__ import annotations

import os
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvcore.catalogue import MODELS, find_device, find_model
from kvcore.cli.output import emit_json, json_option, print_table
from kvcore.errors import InputError
from kvcore.hf_config import read_config
from kvcore.model import (
    KV_DTYPES,
    WEIGHT_DTYPES,
    DeviceSpec,
    KVLayout,
    ModelSpec,
    PrefillCost,
    decode_step_bytes,
    kv_budget,
    prefill_flop,
)
from kvcore.units import DECIMAL, format_bytes, format_number, format_seconds, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    Row = tuple[str, str, str]

COUNT = click.IntRange(min=1)


@click.command(context_settings={"show_default": True})
@click.argument("model")
@click.option("--device", help="GPU to fit the model on, such as h200.")
@click.option("--tokens", type=COUNT, default=8192, help="Tokens a request has.")
@click.option("--batch", type=COUNT, default=1, help="Requests that are decoded together.")
@click.option("--dtype", type=click.Choice(KV_DTYPES), default="fp16", help="Of the K/V.")
@click.option("--weights-dtype", type=click.Choice(WEIGHT_DTYPES), help="If not as released.")
@click.option("--block-size", type=COUNT, default=16, help="Tokens in a block.")
@click.option("--reserve", default="10%", help="Memory to keep free, such as 10% or 8GiB.")
@click.option("--window", type=COUNT, help="Keep at most so many tokens in every layer.")
@json_option
def size(
    *,
    model: str,
    device: str | None,
    tokens: int,
    batch: int,
    dtype: str,
    weights_dtype: str | None,
    block_size: int,
    reserve: str,
    window: int | None,
    as_json: bool,
) -> None:
    """Size the K/V of MODEL: a well-known name, or the path of a config.json.

    Bytes are exact. Speeds are bounds, set by the bandwidth and FLOP/s of the device.
    """
    spec = _model(model, weights_dtype)
    if window is not None:
        spec = spec.with_window(window)
    layout = KVLayout(spec, dtype, block_size)
    report = {"schema": 1, **_memory(layout, tokens, batch)}
    if window is not None:
        report["kv"] |= {"window": window, "window_bytes": layout.window_bytes(batch, window)}
    if device is not None:
        gpu = find_device(device)
        report |= _bounds(layout, gpu, _reserve(reserve, gpu.hbm_bytes), tokens, batch)
    if as_json:
        emit_json(report)
    else:
        click.echo(_title(report["model"]))
        print_table(["quantity", "amount", "that is"], _rows(report))


def _model(text: str, weights_dtype: str | None) -> ModelSpec:
    """Find a model by name or read it from a file."""
    path = Path(text)
    if text.endswith(".json") or os.sep in text or (text not in MODELS and path.exists()):
        return read_config(path, weights_dtype)
    try:
        model = find_model(text)
    except InputError as error:
        msg = f"{error}; or give the path of a model's config.json"
        raise InputError(msg) from None
    return model.with_weights(weights_dtype) if weights_dtype else model


def _reserve(text: str, memory: int) -> int:
    """Read a share of `memory` or a size in bytes."""
    percent = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", text)
    try:
        return int(memory * Fraction(percent[1]) / 100) if percent else parse_bytes(text)
    except InputError:
        msg = f"reserve {text!r}: expected a percentage, such as 10%, or a size, such as 8GiB"
        raise InputError(msg) from None


def _memory(layout: KVLayout, tokens: int, batch: int) -> dict[str, Any]:
    """Report what is known without a device."""
    model = layout.model
    windows = Counter(model.windows).items()
    return {
        "model": {
            **attrs.asdict(model, filter=attrs.filters.exclude("windows")),
            "attention": model.attention,
            "windows": [{"window": window, "layers": layers} for window, layers in windows],
            "weight_bytes": model.weight_bytes,
        },
        "tokens": tokens,
        "batch": batch,
        "dtype": layout.dtype,
        "block_size": layout.block_size,
        "kv": {
            "bytes_per_token": layout.bytes_per_token,
            "bytes_per_block": layout.bytes_per_block,
            "blocks_per_request": layout.blocks_for(tokens),
            "bytes_per_request": layout.request_bytes(tokens),
            "bytes_per_batch": batch * layout.request_bytes(tokens),
        },
    }


def _bounds(
    layout: KVLayout, gpu: DeviceSpec, reserve: int, tokens: int, batch: int
) -> dict[str, Any]:
    """Report what fits on a device, and the bounds it sets to decoding and prefill."""
    model = layout.model
    budget = kv_budget(model, gpu, reserve)
    requests = layout.requests_in(budget, tokens)
    step_bytes = decode_step_bytes(layout, tokens, batch)
    step_seconds = step_bytes / gpu.bandwidth
    return {
        "device": attrs.asdict(gpu),
        "fit": {
            "reserve_bytes": reserve,
            "kv_budget_bytes": budget,
            "weights_fit": budget >= 0,
            "blocks": layout.blocks_in(budget),
            "requests": requests,
            "batch_fits": batch <= requests,
        },
        "decode": {
            "bytes_per_step": step_bytes,
            "step_seconds": step_seconds,
            "tokens_per_second_per_request": 1 / step_seconds,
            "tokens_per_second": batch / step_seconds,
        },
        "prefill": {
            "flop": prefill_flop(model, tokens),
            "seconds": PrefillCost.of(model, gpu)(0, tokens),
            "load_seconds": layout.request_bytes(tokens) / gpu.host_link,
        },
    }


def _title(model: dict[str, Any]) -> str:
    plural = "" if model["kv_heads"] == 1 else "s"
    heads = f"{model['query_heads']} query heads, {model['kv_heads']} K/V head{plural}"
    if model["latent"]:
        heads = f"{model['query_heads']} heads, {model['latent']} numbers a token"
    active = ""
    if model["experts"]:
        active = f" ({format_number(model['active_parameters'] / 1e9)} billion active)"
    windows = [
        f"{window['layers']} with a window of {window['window']:,}"
        for window in model["windows"]
        if window["window"] is not None
    ]
    layers = ", ".join([f"{model['layers']} layers", *windows])
    return (
        f"{model['name']}: {format_number(model['parameters'] / 1e9)} billion parameters"
        f"{active}, {layers}, {model['attention']} ({heads})"
    )


def _rows(report: dict[str, Any]) -> Iterator[Row]:
    kv, tokens, batch = report["kv"], report["tokens"], report["batch"]
    yield _bytes(f"K/V of a token in {report['dtype']}", kv["bytes_per_token"])
    yield _bytes(f"K/V of a block of {report['block_size']:,} tokens", kv["bytes_per_block"])
    yield _bytes(f"K/V of a request of {tokens:,} tokens", kv["bytes_per_request"])
    yield _bytes(f"K/V of a batch of {batch:,}", kv["bytes_per_batch"])
    if "window" in kv:
        yield _bytes(f"K/V of {batch:,} x {kv['window']:,} tokens", kv["window_bytes"])
    model = report["model"]
    mixed = model["expert_dtype"] != model["dtype"]
    experts = f", experts in {model['expert_dtype']}" if mixed else ""
    yield _bytes(f"weights in {model['dtype']}{experts}", model["weight_bytes"])
    if "device" not in report:
        return
    device, fit = report["device"], report["fit"]
    decode, prefill = report["decode"], report["prefill"]
    yield _bytes(f"memory of {device['name']}", device["hbm_bytes"])
    yield _bytes("reserve", fit["reserve_bytes"])
    if fit["weights_fit"]:
        yield _bytes("left for K/V", fit["kv_budget_bytes"])
    else:
        yield _bytes("missing: the weights do not fit", -fit["kv_budget_bytes"])
    room = fit["blocks"] * report["block_size"]
    yield "blocks that fit", f"{fit['blocks']:,}", f"{room:,} tokens"
    enough = "" if fit["batch_fits"] else f"fewer than the batch of {batch:,}"
    yield "requests that fit", f"{fit['requests']:,}", enough
    each = format_number(decode["tokens_per_second_per_request"])
    total = format_number(decode["tokens_per_second"])
    yield "decode, at most", f"{each} tokens/s a request", f"{total} tokens/s in all"
    took = format_seconds(prefill["seconds"])
    yield (
        "prefill of a request, at least",
        took,
        f"{format_number(prefill['flop'] / 1e12)} TFLOP",
    )
    yield "load of its K/V from the host", format_seconds(prefill["load_seconds"]), ""


def _bytes(what: str, number: int) -> Row:
    return what, format_bytes(number), format_bytes(number, DECIMAL)
