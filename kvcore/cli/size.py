"""`kvcore size`: bytes of a model's K/V, requests that fit on a GPU, and bounds of speed."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from textwrap import fill
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvcore.cli.output import emit_json, json_option, print_sections
from kvcore.cli.verb import Count, plugin_completion, verb
from kvcore.errors import InputError
from kvcore.models.catalogue import DEVICES, MODELS, find_device, load_model
from kvcore.models.cost import PrefillCost, decode_step_bytes, prefill_flop
from kvcore.models.memory import KVLayout, kv_budget
from kvcore.models.spec import MAX_COUNT, WEIGHT_DTYPES, DeviceSpec
from kvcore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

RESERVE = "10%"
WIDTH = 80


def _listed(what: str, names: Iterable[str]) -> str:
    """Return a paragraph of a help page that lists `names`, each on one line."""
    return "\b\n" + fill(f"{what}: {', '.join(names)}.", WIDTH - 4, break_on_hyphens=False)


@verb(
    "kvcore size llama-3-70b --device h200 --tokens 32k --batch 8",
    more=f"{_listed('Models', MODELS)}\n\n{_listed('Devices', DEVICES)}",
    renamed={"--dtype": "--codec"},
)
@click.argument("model")
@click.option("--device", help="GPU that holds the model, such as h200.")
@click.option("--tokens", type=Count(), default=8192, help="Number of tokens of a request.")
@click.option(
    "--batch", type=Count(), default=1, help="Number of requests that are decoded together."
)
@click.option(
    "--codec",
    metavar="PLUGIN",
    default="fp16",
    help="Codec: how K/V is kept, such as fp16, int8 or kivi:bits=2.",
    **plugin_completion("codec"),
)
@click.option(
    "--weights-dtype",
    type=click.Choice(WEIGHT_DTYPES),
    help="Number format of the weights, if not as released.",
)
@click.option("--block-size", type=Count(), default=16, help="Number of tokens in a KV block.")
@click.option(
    "--reserve",
    help="Bytes or share of the GPU's memory to keep free, such as 8GiB.  "
    f"[default: {RESERVE}]",
)
@click.option(
    "--window", type=Count(), help="Largest number of tokens whose K/V a layer keeps."
)
@json_option
def size(
    *,
    model: str,
    device: str | None,
    tokens: int,
    batch: int,
    codec: str,
    weights_dtype: str | None,
    block_size: int,
    reserve: str | None,
    window: int | None,
    as_json: bool,
) -> None:
    """Size the K/V of MODEL: a name of the list below, or the path of a config.json.

    Bytes are exact. Speeds are bounds, set by the bandwidth and FLOP/s of the device.
    """
    gpu = None if device is None else find_device(device)
    kept = 0
    if gpu is not None or reserve is not None:
        kept = _reserve(RESERVE if reserve is None else reserve, gpu)
    spec = load_model(model, weights_dtype)
    if window is not None:
        spec = spec.with_window(window)
    layout = KVLayout(spec, codec, block_size)
    report = {"schema": 1, **_memory(layout, tokens, batch)}
    if window is not None:
        report["kv"] |= {"window": window, "window_bytes": layout.window_bytes(batch, window)}
    if max(report["kv"].values()) > MAX_COUNT:
        msg = f"--tokens {tokens}, --batch {batch}: their K/V exceeds 2^63 bytes; ask for less"
        raise InputError(msg)
    if gpu is not None:
        report |= _bounds(layout, gpu, kept, tokens, batch)
    if as_json:
        emit_json(report)
    else:
        from kvcore.report.size import size_sections  # noqa: PLC0415 - JSON does without it

        print_sections(*size_sections(report), compact=True)


def _reserve(text: str, device: DeviceSpec | None) -> int:
    """Return in bytes a size, or a share of the memory of `device`.

    Raises:
        InputError: the text is neither, there is no device, or no memory is left on it.
    """
    percent = re.fullmatch(r"\s*([0-9]{0,99}\.?[0-9]{1,99})\s*%\s*", text)
    share = Fraction(percent[1]) / 100 if percent else Fraction(0)
    if share >= 1:
        msg = f"reserve {text!r}: nothing is left; give less than 100%"
        raise InputError(msg)
    try:
        size = 0 if percent else parse_bytes(text)
    except InputError:
        msg = f"reserve {text!r}: expected a percentage, such as 10%, or a size, such as 10GiB"
        raise InputError(msg) from None
    if device is None:
        msg = f"--reserve {text}: it is kept free on a device; give --device too"
        raise InputError(msg)
    if size >= device.hbm_bytes:
        memory = format_bytes(device.hbm_bytes)
        msg = f"reserve {text!r}: {device.name} has {memory} in all; reserve less"
        raise InputError(msg)
    return size + int(share * device.hbm_bytes)


def _memory(layout: KVLayout, tokens: int, batch: int) -> dict[str, Any]:
    """Return the sizes that do not depend on a device."""
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
        "codec": str(layout.codec),
        "block_size": layout.block_size,
        "kv": {
            "bytes_per_token": layout.bytes_per_token,
            "bytes_per_block": layout.bytes_per_block,
            "blocks_per_request": layout.blocks_for(tokens),
            "bytes_per_request": layout.request_bytes(tokens),
            "bytes_per_batch": batch * layout.request_bytes(tokens),
            "staged_bytes_per_request": layout.staged_bytes(),
        },
    }


def _bounds(
    layout: KVLayout, gpu: DeviceSpec, reserve: int, tokens: int, batch: int
) -> dict[str, Any]:
    """Return the requests that fit on a device, and if the weights do, the bounds of speed."""
    model = layout.model
    budget = kv_budget(model, gpu, reserve)
    requests = layout.requests_in(budget, tokens)
    fits = {
        "device": attrs.asdict(gpu),
        "fit": {
            "reserve_bytes": reserve,
            "kv_budget_bytes": budget,
            "weights_fit": budget >= 0,
            "blocks": layout.blocks_in(budget),
            "requests": requests,
            "batch_fits": batch <= requests,
        },
    }
    if budget < 0:
        return fits
    step_bytes = decode_step_bytes(layout, tokens, batch)
    step_seconds = step_bytes / gpu.bandwidth
    return fits | {
        "decode": {
            "bytes_per_step": step_bytes,
            "step_seconds": step_seconds,
            "tokens_per_second_per_request": 1 / step_seconds,
            "tokens_per_second": batch / step_seconds,
        },
        "prefill": {
            # A float, since JSON for other programs has no integers past 64 bits.
            "flop": float(prefill_flop(model, tokens)),
            "seconds": PrefillCost.of(model, gpu)(0, tokens),
            "load_seconds": layout.request_bytes(tokens) / gpu.host_link,
        },
    }
