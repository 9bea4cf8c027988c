"""Report on a simulation: the setup, the results, and whether the load is sustainable."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvcore.cache.residency import TIER
from kvcore.sections import Section, Table
from kvcore.serving.result import Reported
from kvcore.serving.stats import Percentiles
from kvcore.units import format_bytes, format_number, format_seconds
from kvcore_cli.report.tables import (
    NONE,
    TableRow,
    bars,
    cell,
    counted,
    setup,
    share,
    slo_of,
)


def thrashing(
    residency: Mapping[str, Any] | None, blocks: int, tiers: Iterable[Mapping[str, Any]] = ()
) -> str:
    """Return a sentence for each tier that thrashes: its figures, and a remedy.

    Args:
        residency: by tier, the fields of `Residency.as_dict()`, as in a summary. The rule is
            `Residency.thrashing`.
        blocks: blocks of the pool.
        tiers: the tiers below the pool, as in a summary.
    """
    below = {tier["tier"]: tier for tier in tiers}
    sentences = []
    for tier, rested in (residency or {}).items():
        if not rested["thrashing"]:
            continue
        gone = sum(rested["evicted_blocks"].values())
        hit = rested["age_at_hit_s"]
        size, more = blocks, f"Twice the pool (--blocks {2 * blocks})"
        if tier in below:
            size, memory = below[tier]["slots"], 2 * below[tier]["memory_bytes"]
            more = f"Twice its memory ({format_bytes(memory)})"
        sentences.append(
            f"THRASHING ({tier}): {rested['never_hit_blocks'] / gone:.0%} of the {gone:,} "
            f"blocks evicted had never been hit, and {rested['restored_blocks']:,} were "
            f"stored again before another {size:,} had gone, while only "
            f"{hit['blocks'] if hit else 0:,} hit. {more} would keep most of these, and "
            "perhaps another policy (--eviction)."
        )
    return "\n".join(sentences)


def overload(
    saturation: Mapping[str, Any],
    load: float | None,
    met: float | None,
    able: str,
    times: str = "times below",
) -> str:
    """Return the predicate of a sentence on a workload whose queue grows.

    Args:
        saturation: the fields of `Saturation.as_dict()`.
        load: the offered load; None: unknown.
        met: share of the requests that met the SLO; None: there is none.
        able: the devices that are overloaded.
        times: the times that say nothing of the system.
    """
    much = f"at least {load:.2f} times what" if load and load > 1 else "more than"
    missed = ""
    if met is not None and met < 1 / 2:
        missed = f"; {1 - met:.0%} of the requests miss the SLO"
    come = "conversations begin" if saturation.get("closed") else "requests arrive"
    return (
        f"asks for {much} {able} can do: {saturation['why']}{missed}. The queue grows for as "
        f"long as {come}, so the {times} tell how long the workload is, not how fast "
        "the system is."
    )


COLUMNS = Percentiles._fields

FULL = 0.9
"""Share of the blocks from which a pool counts as full at its peak."""

WIDTH = 48
"""Number of bars in the line that shows the pool over time."""

TIMES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "e2e_s": "E2E",
    "queue_s": "queueing",
}

RESTING = {
    "age_at_hit_s": "since last use, at a hit",
    "age_at_eviction_s": "since last use, at eviction",
    "lifetime_s": "in the cache, at eviction",
    "hits_at_eviction": "hits, at eviction",
}


def _drafts(drafts: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield the rows about speculative decoding; none without a drafter."""
    if drafts is None:
        return
    drafted, mean = drafts["drafted"], drafts["tokens_per_step"]
    tokens = cell(mean, format_number)
    yield (
        "drafts",
        f"{share(drafts['acceptance'])} of {drafted:,} accepted, {tokens} tokens a step",
    )
    if drafts["speedup"] is not None:
        yield "", f"decode steps {format_number(drafts['speedup'])} times as fast as without"


def group_text(group: Mapping[str, Any]) -> str:
    """Return a cache group in words."""
    kept = {
        "full": "all tokens",
        "window": f"a window of {group['window']} tokens",
        "chunk": f"a chunk of {group['window']} tokens",
        "state": "a state",
    }[group["kind"]]
    layers = counted(group["layers"], "layer")
    return f"{layers}, {kept}, {counted(group['block_size'], 'token')} a block"


def pool_text(blocks: int, size: int, config: Mapping[str, Any], of: str = "") -> str:
    """Return a sentence on a pool, of one kind of layer or of several.

    Args:
        blocks: blocks of the pool.
        size: tokens of a block.
        config: has `bytes_per_block`, `codec`, and how the pool is divided, if it is.
        of: says whose pool it is.
    """
    memory = f"{format_bytes(blocks * config['bytes_per_block'])} in {config['codec']}"
    if "cache_groups" in config:
        groups = Counter(map(group_text, config["cache_groups"]["groups"]))
        listed = "; ".join(f"{count} x {text}" for text, count in groups.items())
        return (
            f"Pool{of}: {counted(blocks, 'block')}, {memory}, of which any goes to any cache "
            f"group: {listed}."
        )
    if "layer_pools" in config:
        slots = config["layer_pools"].items()
        more = " and ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in slots)
        return (
            f"Pools{of}: {counted(blocks, 'block')} of {counted(size, 'token')} of full "
            f"attention, {more}, {memory}."
        )
    return (
        f"Pool{of}: {counted(blocks, 'block')} of {counted(size, 'token')}, "
        f"{blocks * size:,} tokens in all, {memory}."
    )


class SimulationReport(NamedTuple):
    """The summary of a run as sentences and tables, the most important first.

    Attributes:
        summary: the summary, from `Result.summary()`.
        config: the configuration of the run: see docs/reference/cli.md.
        refusal: why the first rejected request was rejected; None if none was.
        searching: whether a search for sustainable options is reported afterwards.
        clock: adjective of its seconds: `simulated` or `measured`.
        done: participle of its steps: `simulated` or `computed`.
        about: further sentences about the run.
    """

    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    refusal: str | None = None
    searching: bool = False
    clock: str = "simulated"
    done: str = "simulated"
    about: str = ""

    @property
    def sections(self) -> list[Section]:
        """The whole report on the run."""
        return [
            self.warning,
            f"{self.headline}\n{self.about}".rstrip(),
            Table(["time", *COLUMNS], self.times),
            Table(["quantity", "amount"], self.amounts, ()),
            *self._details(),
            f"{self.closing}\n{self.setup}",
        ]

    def _details(self) -> list[Section]:
        """Return the sections on tiers and residency."""
        tiers = [tier["tier"] for tier in self.summary.get("tiers") or ()]
        return [
            Table(["tier", *tiers], self.tiers, ()),
            Table(["time of blocks", *COLUMNS], self.resting),
            self.thrashing,
        ]

    @property
    def warning(self) -> str:
        """A warning of overload; empty if the load is sustainable."""
        saturation, summary = self.summary["saturation"], self.summary
        if not saturation or not saturation["saturated"]:
            return ""
        text = overload(saturation, summary["offered_load"], summary["slo"]["met"], self._able)
        last = " The search for what would hold is below." if self.searching else ""
        return f"SATURATED: {self.config['workload']['name']} {text}{last}"

    @property
    def headline(self) -> str:
        """Sentences about the workload, the deployment, and the requests that were served."""
        summary, config, load = self.summary, self.config, self.summary["offered_load"]
        requests = counted(summary["requests"], "request")
        run = (
            f"{config['workload']['name']}: {requests} to {config['model']} on {self._devices},"
            f"{self._rate} in {format_number(summary['simulated_s'])} {self.clock} seconds."
        )
        lines = [run, self._pool, *config.get("notes", ())]
        if load is not None:
            lines.append(f"Load: at least {load:.2f} of what this deployment can do.")
            if load < 1 and self._waits_for_blocks:
                ttft, waits = (
                    format_seconds(summary[key]["mean"]) for key in ("ttft_s", "queue_s")
                )
                lines.append(
                    f"The pool is the limit, not compute: of a mean TTFT of {ttft}, {waits} "
                    "are waiting for room in it. More K/V memory, or GPUs, helps first."
                )
        return "\n".join([*lines, self._ended()])

    @property
    def _waits_for_blocks(self) -> bool:
        """Whether most of the TTFT is waiting, while most blocks are held most of the time."""
        ttft, waits = (self.summary[key] for key in ("ttft_s", "queue_s"))
        blocks, active = (
            self.summary.get("pool", {}).get(name) for name in ("blocks", "active")
        )
        if not (ttft and waits and blocks and active and active["mean"]):
            return False
        full = active["mean"] >= blocks / 2 and active["peak"] >= FULL * blocks
        return bool(full and waits["mean"] >= ttft["mean"] / 2)

    @property
    def times(self) -> list[TableRow]:
        """Rows of the table of times: mean and percentiles."""
        rows = ((name, self.summary[key]) for key, name in TIMES.items())
        return [[name, *_cells(spread, format_seconds)] for name, spread in rows]

    @property
    def amounts(self) -> list[TableRow]:
        """Rows of the table of quantities that are one number."""
        return [list(row) for row in self._amounts()]

    @property
    def resting(self) -> list[TableRow]:
        """Rows of the table of ages of blocks, by tier; empty if residency was not measured."""
        return [
            [
                name if tier == TIER else f"{tier}: {name}",
                *_cells(seen[key], format_seconds if key.endswith("_s") else format_number),
            ]
            for tier, seen in (self.summary["residency"] or {}).items()
            for key, name in RESTING.items()
            if seen[key]
        ]

    @property
    def tiers(self) -> list[TableRow]:
        """Rows of the table of tiers, one column each; empty without tiers."""
        columns = [tier_cells(tier, self.summary) for tier in self.summary.get("tiers") or ()]
        names = dict.fromkeys(name for cells in columns for name in cells)
        return [[name, *(cells.get(name, NONE) for cells in columns)] for name in names]

    @property
    def thrashing(self) -> str:
        """A warning that blocks return soon after their eviction; empty if they do not."""
        summary = self.summary
        blocks = summary["pool"]["blocks"]
        return thrashing(summary["residency"], blocks, summary.get("tiers") or ())

    @property
    def closing(self) -> str:
        """A sentence about the steps and the time they took."""
        steps, seconds = self.summary["steps"], self.summary["wall_s"]
        return f"{counted(steps, 'step')}, {self.done} in {format_seconds(seconds)}."

    @property
    def setup(self) -> str:
        """A sentence with all options of the run."""
        config = self.config
        header = {
            **config,
            "mode": config.get("clock", "model"),
            "model": {
                "name": config["model"],
                "codec": config["codec"],
                "weights_dtype": config.get("weights_dtype"),
            },
            "device": {"name": config["device"], "count": config["tensor_parallel"]},
            "slo": slo_of(self.summary),
            **self._sized,
        }
        return setup(header)

    @property
    def _sized(self) -> dict[str, Any]:
        """The fields of a header on the size of the pool."""
        pool = self.summary["pool"]
        return {
            "count": self.summary["count"],
            "block_size": pool["block_size"],
            "blocks": pool["blocks"],
        }

    @property
    def _pool(self) -> str:
        pool = self.summary["pool"]
        return pool_text(pool["blocks"], pool["block_size"], self.config)

    @property
    def _devices(self) -> str:
        return f"{self.config['tensor_parallel']} x {self.config['device']}"

    @property
    def _able(self) -> str:
        """The devices that a saturated workload overloads."""
        return self._devices

    @property
    def _rate(self) -> str:
        scale = self.config["rate_scale"]
        # With three digits, however slow: 0 times as fast would be no run.
        times = format_number(scale) if scale >= 1 else f"{scale:.3g}"
        return "" if scale == 1 else f" {times} times as fast as recorded,"

    def _ended(self) -> str:
        completed, rejected = self.summary["completed"], self.summary["rejected"]
        ended = f"{completed:,} completed, none rejected."
        if rejected:
            ended = (
                f"{completed:,} completed, {rejected:,} rejected; the first: {self.refusal}."
            )
        if completed and self.summary["ttft_s"] is None:
            ended += (
                "\nLengths of outputs are unknown: no completed request asks for any. Prompts "
                "alone were computed; nothing can be said of TTFT, TPOT, or what is generated."
            )
        return ended

    def _served(self) -> Iterator[tuple[str, str]]:
        """Yield the rows on completed requests, hits and preemptions."""
        summary, hit = self.summary, self.summary["hit"]
        speed = summary["throughput_tokens_s"]
        if speed is not None:
            yield "throughput", f"{format_number(speed)} generated tokens/s"
        if summary["goodput"] is not None:
            yield "goodput", f"{format_number(summary['goodput'])} requests/s within the SLO"
            yield "within the SLO", f"{share(summary['slo']['met'])}{self._slo()}"
        if hit["lookup_blocks"]:
            ratio = hit["ratio"]
            yield "prefix hits", f"{share(ratio['block'])} of {hit['lookup_blocks']:,} blocks"
            yield (
                "",
                f"{share(ratio['token'])} of tokens, {share(ratio['request'])} a request",
            )
            if self._has_tiers:
                ratio = summary["reuse_ratio"]
                yield (
                    "and with tiers",
                    f"{share(ratio['token'])} of tokens, {share(ratio['request'])} a request",
                )
        if hit["self_hit_blocks"]:
            after = "transfer or preemption" if summary.get("phases") else "preemption"
            yield "own blocks again", f"{hit['self_hit_blocks']:,} found after {after}"
        yield from _drafts(summary.get("drafts"))
        counts = summary["preemptions"]
        swapped = f", {counts['swap']:,} swapped" if self._has_tiers else ""
        yield (
            "preemptions",
            f"{counts['pause']:,} paused, {counts['recompute']:,} recomputed{swapped}",
        )

    @property
    def _has_tiers(self) -> bool:
        return bool(self.summary.get("tiers"))

    def _amounts(self) -> Iterator[tuple[str, str]]:
        yield from self._served()
        summary, pool = self.summary, self.summary["pool"]
        if summary["forgotten_blocks"]:
            yield "forgotten", counted(summary["forgotten_blocks"], "block")
        compactions, deferred = summary["compactions"], summary["deferred_compactions"]
        if compactions or deferred:
            removed = counted(summary["compacted_tokens"], "token")
            later = f", {deferred:,} times put off without room" if deferred else ""
            yield "compactions", f"{compactions:,} removed {removed}{later}"
        yield "evicted", counted(summary["evicted_blocks"], "block")
        pins = summary["pins"]
        if any(pins.values()):
            refused = counted(pins["refused_blocks"], "block")
            yield "pins", f"{refused} refused, {pins['yielded']:,} yielded"
        blocks, active = pool["blocks"], pool["active"]
        if active["mean"] is not None:
            cached = pool["cached"]["mean"]
            yield (
                "pool in use",
                f"{share(active['mean'] / blocks)}, {share(cached / blocks)} cached",
            )
        yield "at its peak", f"{share(active['peak'] / blocks)}"
        shares = [count / blocks for count in pool["timeline"]["active"]]
        yield "over time", sparkline(pool["timeline"]["t_s"], shares)

    def _slo(self) -> str:
        slo, requests = self.summary["slo"], self.summary["requests"]
        judged = f" of {slo['judged']:,} judged" if slo["judged"] < requests else ""
        expected = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("deadline_s", "E2E"))
        limits = [f"{name} {slo[key]:g} s" for key, name in expected if slo[key] is not None]
        own = slo["own"]
        if not limits or own == requests:
            return f"{judged} (their own)"
        return f"{judged} ({', '.join(limits)}{f'; {own:,} by their own' if own else ''})"


def tier_cells(tier: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a tier, by the names of the rows."""
    ratio, loads, dropped = tier["ratio"], tier["loads"], dict(tier["dropped_blocks"])
    used, seconds = tier["used_blocks"] / tier["slots"], summary["simulated_s"]
    cells = {
        "memory": f"{format_bytes(tier['memory_bytes'])}, {share(used)} full",
        "hits": f"{share(ratio['token'])} of tokens, {share(ratio['request'])} a request",
        "found": counted(tier["found_blocks"], "block"),
        "loaded": f"{tier['loaded_blocks']:,} in {counted(loads, 'load')}",
    }
    if tier["prefetched_blocks"]:
        cells["of this, ahead of requests"] = (
            f"{tier['prefetched_blocks']:,}, {tier['prefetch_hit_blocks']:,} of them hit"
        )
    cells["computed again"] = f"{tier['recomputed_blocks']:,}, the faster way"
    cells["stored"] = f"{tier['stored_blocks']:,}"
    if tier["parked_blocks"]:
        cells["of this, swapped out"] = f"{tier['parked_blocks']:,}"
    busy = "link busy or tier left alone" if tier["errors"] else "link busy"
    cells["not stored"] = (
        f"{tier['skipped_blocks']:,} {busy}, {tier['refused_blocks']:,} no room"
    )
    if tier["errors"]:
        cells["failed"] = counted(tier["errors"], "call")
    gone = dropped.pop("capacity", 0)
    others = "".join(f", {count:,} {reason}" for reason, count in dropped.items())
    cells["dropped"] = f"{gone:,} for room{others}"
    if loads:
        took, waited = tier["load_s"] / loads, tier["load_wait_s"] / loads
        cells["a load takes"] = (
            f"{format_seconds(took)}, {format_seconds(waited)} of it waiting"
        )
    if seconds:
        cells["link in use"] = share(tier["link_busy_s"] / seconds)
    return cells


def sparkline(times: Sequence[float], shares: Sequence[float], width: int = WIDTH) -> str:
    """Draw a step function, `shares[i]` from `times[i]` on, as bars of equal time."""
    if not times:
        return ""
    first, step = times[0], (times[-1] - times[0]) / width
    moments = (first + (index + 0.5) * step for index in range(width))
    return bars(shares[bisect_right(times, moment) - 1] for moment in moments)


def _cells(spread: Mapping[str, float] | None, write: Any) -> TableRow:
    return [cell(spread and spread[column], write) for column in COLUMNS]


def report_of(result: Reported, document: Mapping[str, Any], **words: Any) -> SimulationReport:
    """Return the report of a run; `words` are further attributes of it."""
    refusal = next(iter(result.log.reasons.values()), None)
    return SimulationReport(document, document["config"], refusal, **words)
