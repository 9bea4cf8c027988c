"""Parts of reports: cells of tables, and sentences such as the setup of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvcore.plugins.manager import KINDS
from kvcore.plugins.options import Spec, as_text
from kvcore.units import BINARY, NS_PER_S

if TYPE_CHECKING:
    from kvcore.config import RunParts
    from kvcore.serving.stats import RunLog

NONE = "–"
"""The cell of a missing value."""


BARS = "▁▂▃▄▅▆▇█"

TableRow: TypeAlias = list[str]


def bars(shares: Iterable[float]) -> str:
    """Draw shares as one bar each; a bar of full height is a share of 1."""
    return "".join(BARS[min(int(ratio * len(BARS)), len(BARS) - 1)] for ratio in shares)


Value = TypeVar("Value")


def cell(value: Value | None, write: Callable[[Value], str]) -> str:
    """Format the value of a cell with `write`, unless it is missing."""
    return NONE if value is None else write(value)


def share(part: float | None) -> str:
    """Format a share as a percentage: `12.5%`."""
    return cell(part, "{:.1%}".format)


def plugin_text(name: str, options: Mapping[str, Any]) -> str:
    """Format a plugin with its options as on the command line; options of None are left out."""
    texts = {key: as_text(value) for key, value in options.items() if value is not None}
    memory, gib = options.get("memory"), BINARY["GiB"]
    if isinstance(memory, int) and memory and memory % gib == 0:
        texts["memory"] = f"{memory // gib}GiB"
    return str(Spec(name, texts))


CLOCKS = {"model": "by the model's clock", "wall": "by the wall clock"}

SETTINGS = ("allocation", "rate_scale", "slo", "seed")


def _formats(served: Mapping[str, Any]) -> str:
    """Return the codec of the K/V and the dtype of the weights, if the header has them."""
    kept, weights = served.get("codec", served.get("kv_dtype")), served.get("weights_dtype")
    return (f" in {kept}" if kept else "") + (f", weights in {weights}," if weights else "")


def setup(header: Mapping[str, Any]) -> str:
    """Return a sentence with all options of a run, from the header of its trace.

    Options are written as on the command line. Options of the latency model that only repeat
    the deployment are left out, and so are missing fields.
    """
    served, device, cost = (_fields(header.get(n)) for n in ("model", "device", "recompute"))
    parts = [f"kvcore {header['kvcore']} {CLOCKS.get(header['mode'], 'without a clock')}"]
    parts += [f"decided by {engine}" for engine in [header.get("engine")] if engine]
    if workload := header.get("workload"):
        parts.append(f"workload {_wrappable(workload['name'], workload['options'])}")
    if served:
        dtype = _formats(served)
        where = f" on {device.get('count', 1)} x {device.get('name')}" if device else ""
        parts.append(f"{served.get('name')}{dtype}{where}")
    elif cost:
        parts.append(f"recompute cost of {cost.get('model')} on {cost.get('device')}")
    blocks = counted(header["blocks"], "block") if "blocks" in header else "blocks"
    size = counted(header["block_size"], "token")
    # A what-if adds the routing of the new run to the fields of the header.
    routing: dict[str, Any] = {}
    if header.get("replicas") and header.get("routing"):
        routing = {**header["routing"], **header}
        replicas = routing["replicas"]
        if not isinstance(replicas, int):
            replicas = sum(group.get("count", 1) for group in replicas)
        parts.append(f"{counted(replicas, 'replica')}, the first with {blocks} of {size}")
    else:
        parts.append(f"{blocks} of {size} ({header['count']} counting)")
    deployment = {
        "model": served.get("name"),
        "codec": served.get("codec"),
        "kv_dtype": served.get("kv_dtype"),
        "block_size": header["block_size"],
        "device": device.get("name"),
        "tensor_parallel": device.get("count"),
    }
    plugins = header.get("plugins", {})
    # A trace and a summary have their plugins in other orders.
    for kind in sorted(plugins, key=[*KINDS, *plugins].index):
        options = _named(plugins[kind]["options"])
        if kind == "latency":
            options = {n: v for n, v in options.items() if v != deployment.get(n)}
        parts.append(f"{kind} {_wrappable(plugins[kind]['name'], options)}")
    tiers = header.get("tiers", ())
    parts += [f"tier {_wrappable(tier['name'], tier['options'])}" for tier in tiers]
    parts += [f"{name} {as_text(value)}" for name, value in header.get("batching", {}).items()]
    parts += [*_settings(header), *_routed(routing)]
    return f"Setup: {'; '.join(parts)}."


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which a model or a device of a file is its name, without its fields."""
    return {n: v.get("name", v) if isinstance(v, Mapping) else v for n, v in options.items()}


def slo_times(slo: Mapping[str, int | None]) -> str:
    """Format the SLO of a header, which has ns, as on the command line: `ttft=30,tpot=0.1`."""
    seconds = {name: Decimal(round(ns)) / NS_PER_S for name, ns in slo.items() if ns}
    return ",".join(f"{n}={time.normalize():f}" for n, time in seconds.items()) or "none"


def nanoseconds(seconds: float) -> int:
    """Return a time of a document, which may be damaged, in ns. TypeError: it is no number."""
    return round(seconds * float(NS_PER_S))  # a list times an integer would be a long list


def slo_of(summary: Mapping[str, Any]) -> dict[str, int]:
    """Return the SLO of the document of a run as a header has it, in ns."""
    times = {name: summary["slo"][f"{name}_s"] for name in ("ttft", "tpot", "deadline")}
    return {name: nanoseconds(time) for name, time in times.items() if time is not None}


def _settings(header: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a run that belong to none of its parts."""
    for name in SETTINGS:
        value = header.get(name)
        if name == "slo" and isinstance(value, Mapping):
            value = slo_times(value).replace(",", ", ")
        if value not in (None, "paged"):  # no trace says that its allocation is paged
            yield f"{name} {as_text(value)}"


def _routed(routing: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a cluster that are no plugins of its servers."""
    if "view" in routing:
        yield f"view {routing['view']}"
    yield from (f"fail {failure}" for failure in routing.get("fail", ()))
    if planner := routing.get("autoscale"):
        yield f"autoscale {_wrappable(planner['name'], planner['options'])}"
    if split := routing.get("disaggregate"):
        yield f"disaggregate {split.replace(',', ', ')}"


def _wrappable(name: str, options: Mapping[str, Any]) -> str:
    """Format a plugin with spaces between its options, so that lines can break there."""
    return plugin_text(name, options).replace(",", ", ")


def _fields(value: Any) -> Mapping[str, Any]:
    """Return a part of a header as a mapping; other programs may have written any value."""
    return value if isinstance(value, Mapping) else {} if value is None else {"name": value}


def counted(number: int, what: str) -> str:
    """Format a number of things: `1 block`, `1,000 blocks`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def no_full_block(prompt: int, block_size: int, *, alone: bool = False) -> str:
    """Return why prompts that fill no block have no lookups, and what to do; "" if one does.

    `prompt` is the number of tokens of the longest prompt, or of one that stands `alone`.
    """
    if not 0 < prompt < block_size:
        return ""
    which = "The prompt fills no" if alone else "No prompt fills a"
    has = f"{'it' if alone else 'the longest'} has {prompt:,}"
    return (
        f"{which} block of {counted(block_size, 'token')} ({has}): there is nothing to look "
        "up. With key_tokens=N of the workload, texts and token ids have smaller blocks."
    )


def beyond_positions(parts: RunParts, prompts: Iterable[int]) -> str:
    """Return a note if prompts have more tokens than the model has positions; else "".

    Under `--max-model-len` there is none: the run refuses longer prompts itself.
    """
    model, bounded = parts.model, parts.batching.max_model_len is not None
    tokens = list(prompts) if model.positions and not bounded else []
    longer = [prompt for prompt in tokens if prompt > model.positions]
    if not longer:
        return ""
    return (
        f"prompts of up to {max(longer):,} tokens are beyond the {model.positions:,} positions "
        f"of {model.name} ({len(longer):,} of {len(tokens):,}): engines refuse them, and such "
        "a context length; give a --model with more positions"
    )


def larger_blocks(parts: RunParts) -> str:
    """Return a note if blocks are larger than by default, so that layers fit the keys."""
    from kvcore.config.parts import BLOCK_SIZE  # noqa: PLC0415 - most reports have no parts

    size = parts.geometry.block_size
    chosen = parts.config.block_size is None and parts.config.timed and parts.layers is not None
    if not chosen or size == BLOCK_SIZE:
        return ""
    return (
        f"blocks have {size:,} tokens, not {BLOCK_SIZE}: those of {parts.model.name} are so "
        "large that a state fits, as in vLLM, and keys of the workload have "
        f"{parts.workload.key_tokens:,} tokens, of which a block is to be a multiple "
        f"(--block-size {size})"
    )


def told_of_run(parts: RunParts, log: RunLog) -> list[str]:
    """Return notes on a run: prompts without positions, larger blocks, tenants, rates."""
    notes = [beyond_positions(parts, log.prompt), larger_blocks(parts)]
    fair = getattr(parts.config.scheduler, "name", "") == "fair"
    if fair and len(log.ids) and all(tenant is None for tenant in log.tenants):
        notes.append(
            "scheduler fair divides among tenants, and no request has one: all are served as "
            "of one, first come, first served; tenant=FIELD of `chat` takes a field of a log"
        )
    rate = parts.config.rate_scale
    if rate != 1 and getattr(parts.config, "autoscale", None) is not None:
        notes.append(
            f"rate_scale {rate:g} makes requests come {rate:g} times as fast, and leaves the "
            "times of autoscale (interval, start_up, cool_down) as they are: give them divided "
            f"by {rate:g}, if they are to be what they are to the hours of the workload"
        )
    return [note for note in notes if note]


def printable(text: str) -> str:
    """Return text with a replacement for each character that cannot be printed."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )
