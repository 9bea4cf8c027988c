"""`kvcore size`: bytes of a model's K/V, requests that fit on a GPU, and bounds of speed."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from math import ceil
from textwrap import fill
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvcore.errors import InputError
from kvcore.models.catalogue import DEVICES, MODELS, find_device, load_model
from kvcore.models.cost import prefill_flop
from kvcore.models.memory import SERVER, KVLayout, degree_problem, servers_that_fit
from kvcore.models.spec import MAX_COUNT, WEIGHT_DTYPES, DeviceSpec
from kvcore.units import format_bytes, parse_bytes
from kvcore_cli.output import emit_json, json_option, print_sections
from kvcore_cli.verb import Count, plugin_completion, verb
from kvcore_plugins.cache_groups.plan import GroupPlan, groups_of

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
@click.option(
    "--device",
    help="GPU that holds the model: a name such as h200, figures such as "
    "memory=141GB,bandwidth=4.8TB,flops=989T, or both: h100:memory=84.9GB.",
)
@click.option(
    "--tensor-parallel", type=Count(), default=1, help="Number of GPUs that share the model."
)
@click.option(
    "--data-parallel-attention",
    is_flag=True,
    help="Keep the K/V of a request on one of the GPUs, and all weights but those of experts "
    "on each.",
)
@click.option("--tokens", type=Count(), default=8192, help="Number of tokens of a request.")
@click.option(
    "--batch", type=Count(), default=1, help="Number of requests that are decoded together."
)
@click.option(
    "--codec",
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
    tensor_parallel: int,
    data_parallel_attention: bool,
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
    kept = RESERVE if reserve is None else reserve
    if gpu is not None or reserve is not None:
        _reserve(kept, gpu)
    if gpu is None and (tensor_parallel > 1 or data_parallel_attention):
        msg = "--tensor-parallel, --data-parallel-attention: on which GPUs? give --device too"
        raise InputError(msg)
    spec = load_model(model, weights_dtype)
    if window is not None:
        spec = spec.with_window(window)
    layout = KVLayout(spec, codec, block_size)
    report = {"schema": 1, **_memory(layout, tokens, batch), **_groups(layout, tokens)}
    if window is not None:
        report["kv"] |= {"window": window, "window_bytes": _window_bytes(layout, batch, window)}
    if max(report["kv"].values()) > MAX_COUNT:
        msg = f"--tokens {tokens}, --batch {batch}: their K/V exceeds 2^63 bytes; ask for less"
        raise InputError(msg)
    notes = []
    if 0 < spec.positions < tokens:
        notes.append(
            f"{tokens:,} tokens are beyond the {spec.positions:,} positions of {spec.name}"
        )
    if gpu is not None:
        server = _Server(layout, gpu, tensor_parallel, data_parallel_attention, kept)
        report |= server.bounds(tokens, batch)
        if not report["fit"]["requests"]:
            notes.append(server.remedy(tokens))
    report["notes"] = notes
    if as_json:
        emit_json(report)
    else:
        from kvcore_lab.report.size import size_sections  # noqa: PLC0415 - JSON does without it

        print_sections(*size_sections(report), compact=True)


def _window_bytes(layout: KVLayout, sequences: int, window: int) -> int:
    """Return the bytes of `sequences` sequences of `window` tokens, of blocks that are full."""
    kept = (
        cache.layers * layout.cache_bytes(cache) * cache.kept(window)
        if cache.grows
        else layout.kept_bytes(cache, window)
        for cache in layout.model.layer_caches
    )
    return ceil(sequences * sum(kept))


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
    windows = Counter[int | None]()
    for cache in model.layer_caches:
        if cache.grows and cache.kind != "index":
            windows[cache.window] += cache.layers
    return {
        "model": {
            **attrs.asdict(model, filter=attrs.filters.exclude("windows", "caches")),
            "attention": model.attention,
            "windows": [
                {"window": window, "layers": layers} for window, layers in windows.items()
            ],
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
        "caches": [
            {
                "cache": str(cache),
                **attrs.asdict(cache),
                "bytes_per_token": ceil(cache.layers * layout.cache_bytes(cache))
                if cache.grows
                else 0,
                "bytes_per_request": ceil(layout.kept_bytes(cache, tokens)),
            }
            for cache in model.layer_caches
        ],
    }


def _plan(layout: KVLayout, devices: int = 1) -> GroupPlan | None:
    """Return the cache groups of a model; None if all layers keep all tokens, or no rule."""
    try:
        plan = groups_of(layout.model, layout.block_size, layout.codec, devices)
    except InputError:
        return None
    return plan if plan.splits else None


def _groups(layout: KVLayout, tokens: int) -> dict[str, Any]:
    """Return the cache groups of a model as JSON, if its layers are told apart."""
    plan = _plan(layout)
    if plan is None:
        return {}
    groups = [
        {"cache": str(caches[0]), "block_size": group.block_size}
        for group, caches in zip(plan.groups, plan.caches, strict=True)
    ]
    blocks = plan.blocks_for(tokens)
    size = {"bytes_per_block": plan.bytes_per_block, "blocks_per_request": blocks}
    return {"groups": {**size, "groups": groups}}


@attrs.frozen
class _Server:
    """The GPUs that share a model.

    Attributes:
        layout, gpu: the model with its K/V, and the type of each GPU.
        devices: number of GPUs.
        data_parallel: whether each attends to requests of its own, as vLLM's and SGLang's
            data-parallel attention; experts are divided even so.
        reserve: memory that is kept free on each.
    """

    layout: KVLayout
    gpu: DeviceSpec
    devices: int
    data_parallel: bool
    reserve: str

    def __attrs_post_init__(self) -> None:
        """Refuse a number of GPUs that no engine runs."""
        if not self.data_parallel and (
            problem := degree_problem(self.layout.model, self.devices)
        ):
            msg = f"--tensor-parallel: {self.layout.model.name} on {self}: {problem}"
            raise InputError(msg)

    def __str__(self) -> str:
        """Return the number and type of the GPUs."""
        return f"{self.devices} x {self.gpu.name}"

    @property
    def ranks(self) -> int:
        """Number of GPUs, or groups of them, that have requests of their own."""
        return self.devices if self.data_parallel else 1

    @property
    def sharing(self) -> int:
        """Number of GPUs that share the K/V of a request."""
        return 1 if self.ranks > 1 else self.devices

    @property
    def budget(self) -> int:
        """Bytes left for K/V on all GPUs together; negative if the weights do not fit."""
        left = self.gpu.hbm_bytes - _reserve(self.reserve, self.gpu)
        model = self.layout.model
        return self.devices * left - model.weight_bytes - (self.ranks - 1) * model.shared_bytes

    def requests(self, tokens: int) -> int:
        """Return the number of requests of `tokens` tokens that fit."""
        return self.ranks * self.layout.requests_in(self._of_rank, tokens, self.sharing)

    @property
    def _of_rank(self) -> int:
        """Bytes that a rank has for its K/V, all copies together."""
        return self.budget // self.ranks

    def remedy(self, tokens: int) -> str:
        """Return a sentence with GPUs that hold the weights and a request."""

        def fits(device: DeviceSpec, devices: int) -> bool:
            try:
                other = attrs.evolve(self, gpu=device, devices=devices)
                return other.requests(tokens) > 0
            except InputError:  # The reserve is more than that GPU has.
                return False

        servers = servers_that_fit(self.layout.model, self.gpu, self.devices, fits)
        if not servers:
            return f"No {max(SERVER, self.devices)} GPUs hold the weights and a request"
        return f"The weights and a request fit on {', '.join(servers)} (--tensor-parallel)"

    def bounds(self, tokens: int, batch: int) -> dict[str, Any]:
        """Return the requests that fit, and if the weights do, the bounds of speed."""
        layout, gpu, model = self.layout, self.gpu, self.layout.model
        budget, requests = self.budget, self.requests(tokens)
        fits: dict[str, Any] = {
            "device": attrs.asdict(gpu),
            "server": {
                "gpus": self.devices,
                "data_parallel_attention": self.data_parallel,
                "kv_copies": float(layout.copies(self.sharing)),
            },
            "fit": {
                "reserve_bytes": self.devices * _reserve(self.reserve, gpu),
                "kv_budget_bytes": budget,
                "weights_fit": budget >= 0,
                "blocks": self.ranks * layout.blocks_in(self._of_rank, self.sharing),
                "requests": requests,
                "batch_fits": batch <= requests,
            },
        }
        plan = _plan(layout, self.sharing)
        if plan is not None:
            blocks = plan.blocks_in(self._of_rank)
            fits["fit"]["grouped_blocks"] = self.ranks * blocks
            fits["fit"]["grouped_requests"] = self.ranks * (blocks // plan.blocks_for(tokens))
        if budget < 0:
            return fits
        from kvcore_plugins.latency.roofline import least_prefill  # noqa: PLC0415 - as it runs

        step_bytes = model.weight_bytes_read(batch) + (self.ranks - 1) * model.shared_bytes
        step_bytes += batch * layout.read_bytes(tokens, self.sharing)
        step_seconds = step_bytes / (gpu.bandwidth * self.devices)
        load_bytes = layout.request_bytes(tokens, self.sharing) * self.ranks
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
                "seconds": least_prefill(model, gpu)(0, tokens) / self.devices,
                "load_seconds": float(load_bytes / (gpu.host_link * self.devices)),
            },
        }
