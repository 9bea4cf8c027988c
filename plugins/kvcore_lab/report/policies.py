"""Parts of reports on policies without a clock: their names, their setup, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from kvcore.plugins.options import as_text
from kvcore.trace.fields import version
from kvcore.units import format_bytes
from kvcore_cli.report.simulation import group_text
from kvcore_cli.report.tables import counted, setup

if TYPE_CHECKING:
    from kvcore.models.memory import KVLayout
    from kvcore_lab.comparison import Row, Source
    from kvcore_lab.curves.mrc import Curve
    from kvcore_plugins.cache_groups.plan import GroupPlan

Named = TypeVar("Named", "Row", "Curve")
"""A result of one policy."""


def replay_setup(source: Source, block_size: int, accounting: str, **more: Any) -> str:
    """Return the `setup` of a replay without a clock; `more` are further fields of a header."""
    header = {
        "kvcore": version(),
        "mode": "untimed",
        "workload": attrs.asdict(source),
        "block_size": block_size,
        "count": accounting,
    }
    return setup(header | more)


def block_bytes(layout: KVLayout, plan: GroupPlan | None = None) -> str:
    """Return a sentence about the bytes of a block, of cache groups if there is a plan."""
    if plan is not None:
        groups = Counter(group_text(group.as_dict()) for group in plan.groups)
        listed = "; ".join(f"{count} x {text}" for text, count in groups.items())
        return (
            f"A block of {layout.model.name} in {layout.codec} takes "
            f"{format_bytes(plan.bytes_per_block)}, and any goes to any cache group: {listed}."
        )
    return (
        f"A block of {counted(layout.block_size, 'token')} of {layout.model.name} in "
        f"{layout.codec} takes {format_bytes(layout.bytes_per_block)}. {layout.pool_note}"
    ).rstrip()


def memory_fields(layout: KVLayout, plan: GroupPlan | None = None) -> dict[str, Any]:
    """Return the bytes of a block, with model, codec and cache groups, as a JSON object."""
    fields = {
        "model": layout.model.name,
        "codec": str(layout.codec),
        "bytes_per_block": (plan or layout).bytes_per_block,
    }
    if plan is not None:
        return {**fields, "cache_groups": [group.as_dict() for group in plan.groups]}
    return {**fields, **({"note": layout.pool_note} if layout.pool_note else {})}


def looked_up(workload: Source, blocks: int, block_size: int, count: str) -> str:
    """Return a sentence about the blocks that were looked up, and the requests."""
    look = "looks" if workload.requests == 1 else "look"
    return (
        f"{workload.name}: {counted(workload.requests, 'request')} {look} up "
        f"{counted(blocks, 'block')} of {counted(block_size, 'token')} ({count} counting)."
    )


def named(rows: list[Named]) -> list[tuple[str, Named]]:
    """Return each row with the name of its policy, and options that distinguish equal names."""
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


def enumerated(words: list[str]) -> str:
    """Return words as a list in a sentence: `a, b and c`."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def option_texts(options: Mapping[str, Any]) -> Iterable[str]:
    """Yield options as on the command line; those of None are left out."""
    for key, value in options.items():
        if isinstance(value, float):
            yield f"{key}={value:.15g}"
        elif value is not None:
            yield f"{key}={as_text(value)}"


def left_out(answers: int) -> str:
    """Return a sentence, after a space, on answers that a replay by keys leaves out, if any."""
    if not answers:
        return ""
    return (
        f" It holds prompts alone: {counted(answers, 'answer')} with keys would be cached too "
        "under a clock, and hit by what continues them. --accounting tokens counts them."
    )
