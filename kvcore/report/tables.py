"""What reports share: cells of tables, and sentences such as the setup of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs

from kvcore.plugins.options import Spec, as_text
from kvcore.trace.fields import version
from kvcore.units import NS_PER_S, format_bytes

if TYPE_CHECKING:
    from kvcore.analysis import Curve, Row, Source
    from kvcore.models.memory import KVLayout

Named = TypeVar("Named", "Row", "Curve")
"""What is of one policy."""

NONE = "–"
"""The cell of a value that there is none of."""


BARS = "▁▂▃▄▅▆▇█"

TableRow: TypeAlias = list[str]

Section: TypeAlias = str | tuple[Sequence[str], Sequence[Sequence[object]], Sequence[str]]
"""Sentences; or the headers of a table, its rows, and the headers that are flush right."""


def bars(shares: Iterable[float]) -> str:
    """Draw shares as one bar each; a bar of full height is a share of 1."""
    return "".join(BARS[min(int(each * len(BARS)), len(BARS) - 1)] for each in shares)


def share(part: float | None) -> str:
    """Format a share as a percentage: `12.5%`."""
    return NONE if part is None else f"{part:.1%}"


def plugin_text(name: str, options: Mapping[str, Any]) -> str:
    """Return a plugin with its options as the command line takes them; None is left out."""
    return str(
        Spec(name, {key: as_text(value) for key, value in options.items() if value is not None})
    )


def replay_setup(source: Source, block_size: int, accounting: str, **more: Any) -> str:
    """Return `setup` of a replay without a clock; `more` are other fields of a header."""
    header = {
        "kvcore": version(),
        "mode": "untimed",
        "workload": attrs.asdict(source),
        "block_size": block_size,
        "count": accounting,
    }
    return setup(header | more)


CLOCKS = {"model": "by the model's clock", "wall": "by the wall clock"}

SETTINGS = ("allocation", "rate_scale", "slo", "seed")


def _formats(served: Mapping[str, Any]) -> str:
    """Return the number formats of the K/V and of the weights, as far as they are given."""
    kept, weights = served.get("codec", served.get("kv_dtype")), served.get("weights_dtype")
    return (f" in {kept}" if kept else "") + (f", weights in {weights}," if weights else "")


def setup(header: Mapping[str, Any]) -> str:
    """Return a sentence: all that the header of a trace says of its run.

    Options are written as commands take them. Those that only repeat the deployment in the
    latency model are left out, and so is what the header does not have.
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
    # What was run again has its own routing beside that of the header.
    routing: dict[str, Any] = {}
    if header.get("replicas") and header.get("routing"):
        routing = {**header["routing"], **header}
        given = routing["replicas"]
        some = given if isinstance(given, int) else sum(each.get("count", 1) for each in given)
        parts.append(f"{counted(some, 'replica')}, the first with {blocks} of {size}")
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
    for kind, plugin in header.get("plugins", {}).items():
        # A model or a device that is no name has all its fields.
        given = plugin["options"].items()
        options = {n: v.get("name", v) if isinstance(v, Mapping) else v for n, v in given}
        if kind == "latency":
            options = {n: v for n, v in options.items() if v != deployment.get(n)}
        parts.append(f"{kind} {_wrappable(plugin['name'], options)}")
    tiers = header.get("tiers", ())
    parts += [f"tier {_wrappable(tier['name'], tier['options'])}" for tier in tiers]
    parts += [f"{name} {as_text(value)}" for name, value in header.get("batching", {}).items()]
    for name in SETTINGS:
        value = header.get(name)
        if name == "slo" and value:
            value = ", ".join(f"{part}={time / NS_PER_S:g}" for part, time in value.items())
        if value is not None:
            parts.append(f"{name} {as_text(value)}")
    parts += [f"view {routing['view']}"] if "view" in routing else []
    parts += [f"fail {each}" for each in routing.get("fail", ())]
    return f"Setup: {'; '.join(parts)}."


def _wrappable(name: str, options: Mapping[str, Any]) -> str:
    """Return a plugin with spaces between its options, which commands take as well."""
    return plugin_text(name, options).replace(",", ", ")


def _fields(value: Any) -> Mapping[str, Any]:
    """Return a part of a header that a program of its own may have written as it likes."""
    return value if isinstance(value, Mapping) else {} if value is None else {"name": value}


def counted(number: int, what: str) -> str:
    """Format a number of things: `1 block`, `1,000 blocks`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def printable(text: str) -> str:
    """Return text of a file with a sign for each character that has no picture."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def block_bytes(layout: KVLayout) -> str:
    """Return a sentence: the bytes that a block takes."""
    return (
        f"A block of {counted(layout.block_size, 'token')} of {layout.model.name} in "
        f"{layout.codec} takes {format_bytes(layout.bytes_per_block)}."
    )


def memory_fields(layout: KVLayout) -> dict[str, Any]:
    """Return what a block takes as a JSON object."""
    return {
        "model": layout.model.name,
        "codec": str(layout.codec),
        "bytes_per_block": layout.bytes_per_block,
    }


def looked_up(workload: Source, blocks: int, block_size: int, count: str) -> str:
    """Return the sentence that says how many blocks were looked up, by how many requests."""
    look = "looks" if workload.requests == 1 else "look"
    return (
        f"{workload.name}: {counted(workload.requests, 'request')} {look} up "
        f"{counted(blocks, 'block')} of {counted(block_size, 'token')} ({count} counting)."
    )


def named(rows: list[Named]) -> list[tuple[str, Named]]:
    """Put the name of its policy before each row, with options that tell namesakes apart."""
    named = []
    for row in rows:
        others = [other.options for other in rows if other.eviction == row.eviction]
        telling = {
            key: value
            for key, value in row.options.items()
            if any(options.get(key) != value for options in others)
        }
        text = ",".join(option_texts(telling))
        named.append((f"{row.eviction}:{text}" if text else row.eviction, row))
    return named


def option_texts(options: Mapping[str, Any]) -> Iterable[str]:
    """Yield options in the command line's form; None stands for a policy without options."""
    for key, value in options.items():
        if isinstance(value, float):
            yield f"{key}={value:.15g}"
        elif value is not None:
            yield f"{key}={as_text(value)}"
