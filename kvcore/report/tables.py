"""Comparison as a table and CSV, and the sentences that reports share, such as the setup."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

import attrs

from kvcore.analysis import SHARING, Belady, Comparison, Curve, Infinite, Row, Source
from kvcore.models.cost import PrefillCost
from kvcore.models.memory import KVLayout
from kvcore.plugins.options import Spec, as_text
from kvcore.trace.fields import version
from kvcore.units import NS_PER_S, format_bytes

Named = TypeVar("Named", Row, Curve)
"""What is of one policy."""

CSV_COLUMNS = (
    *("workload", "count", "eviction", "options", "blocks", "block_size", "requests"),
    *("lookup_blocks", "hit_blocks", "hit_ratio_block", "hit_ratio_token"),
    *("hit_ratio_request", "evicted_blocks", "share_of_optimum"),
    *(
        "reused_blocks",
        "reuse_ratio_block",
        "reuse_ratio_token",
        "reuse_ratio_request",
        "wall_s",
    ),
)

WEIGHS_COST = "cost"
"""The policy whose ranking depends on what a block costs to compute again."""


@attrs.frozen
class ComparisonReport:
    """A comparison as a table with a headline and sentences.

    Attributes:
        comparison: what is reported.
        memory: for pools given in bytes, what to call each size in blocks.
        prefix: the prefix cache of the pools.
        recompute: what it costs to compute a block again; None: not told.
        tiers: the tiers below the pool, as `describe` says them.
    """

    comparison: Comparison
    memory: Mapping[int, str] | None = None
    prefix: str = SHARING
    recompute: PrefillCost | None = None
    tiers: Sequence[Mapping[str, Any]] = ()

    @property
    def headline(self) -> str:
        """One sentence that says what the numbers of the table are."""
        source, infinite = self.comparison.workload, self.comparison.infinite
        by = "blocks in the pool" if self.memory is None else "the pool's K/V memory"
        if not infinite.lookup_blocks:
            requests = counted(source.requests, "request")
            return f"{source.name}: {requests}.\n{self._nothing()}"
        size, accounting = self.comparison.rows[0].block_size, self.comparison.accounting
        brackets = "; in brackets, the share of the optimum's hits" if self._ranked else ""
        return (
            f"{looked_up(source, infinite.lookup_blocks, size, accounting)}\n"
            f"The share of these that hit, by {by}{brackets}."
        )

    @property
    def setup(self) -> str:
        """What was run, but for what the rows say."""
        found = self.comparison
        return replay_setup(
            found.workload,
            found.rows[0].block_size,
            found.accounting,
            plugins={"prefix": {"name": self.prefix, "options": {}}},
            tiers=self.tiers,
        )

    @property
    def empty(self) -> bool:
        """True if nothing is looked up, so that the headline says everything."""
        return not self.comparison.infinite.lookup_blocks

    @property
    def headers(self) -> list[str]:
        """Headers of the table: one column a pool size."""
        sizes = dict.fromkeys(row.blocks for row in self.comparison.rows)
        return ["eviction", *(f"{self._size(size):>5}" for size in sizes)]

    @property
    def rows(self) -> list[list[str]]:
        """Rows of the table: one a policy, and one of the infinite cache."""
        table: dict[str, list[str]] = {}
        for name, row in named(self.comparison.rows):
            table.setdefault(name, []).append(_cell(row))
            if self._tiered:
                table.setdefault(f"{name} + tiers", []).append(self._reuse_cell(row))
        infinite = _cell(self.comparison.infinite)
        table["infinite"] = [infinite] * (len(self.headers) - 1)
        return [[name, *cells] for name, cells in table.items()]

    @property
    def reading(self) -> str:
        """Sentences about what the table shows."""
        infinite = self.comparison.infinite
        if not infinite.hit_blocks:
            if self.prefix != SHARING:
                return f"With prefix cache {self.prefix!r} nothing can hit."
            return "No request shares a block with an earlier one: nothing can hit."
        blocks = counted(infinite.distinct_blocks, "block")
        lines = (
            f"infinite: a cache that never evicts ({blocks} in the end). No pool hits more.",
            self._tiers(),
            self._most_hits(),
            self._saturation(),
            self._options(),
        )
        return "\n".join(line for line in lines if line)

    @property
    def _ranked(self) -> bool:
        return any(row.share_of_optimum is not None for row in self.comparison.rows)

    @property
    def _tiered(self) -> bool:
        return any(row.reuse_ratio is not None for row in self.comparison.rows)

    def _reuse_cell(self, row: Row) -> str:
        """Return what the pool and the tiers had, and its share of the most they could have."""
        rows, reused = self.comparison.rows, row.reused_blocks
        most = {each.blocks: each.reused_blocks for each in rows if _is_optimum(each)}
        bound = None if _is_optimum(row) else most.get(row.blocks)
        ratio = None if row.reuse_ratio is None else row.reuse_ratio["block"]
        return _reused(ratio, reused / bound if bound and reused is not None else None)

    def _nothing(self) -> str:
        keys = "The requests have no keys"
        if self.comparison.accounting != "keys":
            keys += ", or none that fills a block"
        return f"{keys}: there is nothing to look up."

    def _size(self, blocks: int) -> str:
        return f"{blocks:,}" if self.memory is None else self.memory[blocks]

    def _sizes(self, sizes: list[str]) -> str:
        unit = "" if self.memory else " block" if sizes == ["1"] else " blocks"
        return f"{_enumerated(sizes)}{unit}"

    def _policies(self) -> list[tuple[str, Row]]:
        rows = named(self.comparison.rows)
        return [(name, row) for name, row in rows if row.eviction != Belady.name]

    def _tiers(self) -> str:
        """Return the sentence about the rows with tiers."""
        found = next((row.tiers for row in self.comparison.rows if row.tiers), None)
        if not found:
            return ""
        sizes = (f"{counted(tier['slots'], 'block')} in {tier['tier']}" for tier in found)
        below = _enumerated(list(sizes))
        bound = ", of which optimum + tiers is the most" if self._ranked else ""
        return f"+ tiers: what the pool or a tier below it had ({below}){bound}."

    def _most_hits(self) -> str:
        """Return the sentence about the policy that hits most at each pool size."""
        policies = self._policies()
        won: dict[str, list[str]] = {}
        for size in dict.fromkeys(row.blocks for _, row in policies):
            ranking = sorted(
                ((row.hit_blocks, name) for name, row in policies if row.blocks == size),
                reverse=True,
            )
            if len(ranking) > 1 and ranking[0][0] > ranking[1][0]:
                won.setdefault(ranking[0][1], []).append(self._size(size))
        winners = [f"{name} with {self._sizes(sizes)}" for name, sizes in won.items()]
        return f"Most hits: {'; '.join(winners)}." if winners else ""

    def _saturation(self) -> str:
        """Return the sentence about the size from which the optimum hits all that can hit."""
        enough = [
            row.blocks
            for row in self.comparison.rows
            if _is_optimum(row) and row.hit_blocks == self.comparison.infinite.hit_blocks
        ]
        if not enough:
            return ""
        return (
            f"With {counted(min(enough), 'block')} the optimum hits all that can hit: from "
            "there on, policies lack foresight, not memory."
        )

    def _options(self) -> str:
        """Return the options that the policies' names do not show."""
        texts: dict[str, str] = {}
        for name, row in self._policies():
            rest = (text for text in _texts(row.options) if text not in name)
            texts[row.eviction] = ", ".join(rest)
        told = [f"{name} {text}" for name, text in texts.items() if text]
        if WEIGHS_COST in texts and self.recompute is not None:
            whose = f"{self.recompute.model} on {self.recompute.device}"
            told.append(f"{WEIGHS_COST}: recompute cost of {whose}")
        options = "; ".join(told)
        return f"Options: {options}." if options else ""


NONE = "–"
"""The cell of a value that there is none of."""


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


def write_csv(comparison: Comparison, file: TextIO) -> None:
    """Write the rows of a comparison as CSV with a header, ratios in full precision.

    The options are one column, as JSON. An empty cell is no value.
    """
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in comparison.rows:
        fields: dict[str, Any] = {name: getattr(row, name, None) for name in CSV_COLUMNS}
        fields |= {"workload": comparison.workload.name, "count": comparison.accounting}
        fields |= {f"hit_ratio_{kind}": ratio for kind, ratio in row.hit_ratio.items()}
        reused = row.reuse_ratio or {}
        fields |= {f"reuse_ratio_{kind}": ratio for kind, ratio in reused.items()}
        writer.writerow(fields | {"options": json.dumps(row.options)})


def _is_optimum(row: Row) -> bool:
    return row.eviction == Belady.name and not row.options["bypass"]


def _reused(ratio: float | None, part: float | None) -> str:
    """Return a hit ratio, and in brackets the share of the most there could be."""
    text = f"{'-' if ratio is None else f'{ratio:.1%}':>5}"
    return text if part is None else f"{text} {f'({part:.0%})':>5}"


def _cell(result: Row | Infinite) -> str:
    part = None
    if isinstance(result, Row) and not _is_optimum(result):
        part = result.share_of_optimum
    return _reused(result.hit_ratio["block"], part)


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
        text = ",".join(_texts(telling))
        named.append((f"{row.eviction}:{text}" if text else row.eviction, row))
    return named


def _texts(options: Mapping[str, Any]) -> Iterable[str]:
    """Yield options in the command line's form; None stands for a policy without options."""
    for key, value in options.items():
        if isinstance(value, float):
            yield f"{key}={value:.15g}"
        elif value is not None:
            yield f"{key}={as_text(value)}"


def _enumerated(words: list[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
