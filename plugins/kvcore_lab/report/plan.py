"""Report on a plan: fleets that meet an SLO, and why no smaller one does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from kvcore.config.options import option_default, read_option
from kvcore.models.catalogue import DEVICES, MODELS
from kvcore.models.memory import USABLE
from kvcore.plugins.options import as_text
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.trace.fields import version
from kvcore.units import (
    BINARY,
    DECIMAL,
    format_bytes,
    format_dollars,
    format_number,
    format_seconds,
)
from kvcore_cli.report.simulation import overload
from kvcore_cli.report.tables import NONE, cell, counted, share
from kvcore_lab.statistics import share_interval
from kvcore_replay.report.charts import as_percent

SHOWN = 3
"""The most policies that are named as sufficient."""

LIMITS = {
    "policy": "another policy does at this size",
    "capacity": "more memory helps",
    "content": "prompts diverge, and nothing helps but changing them",
    "compute": "no memory is enough",
    "none": "all that were tried do",
}
"""The meaning of each verdict, in a few words."""

GRANTED = {
    "foresight": "if eviction foresaw the future",
    "endless": "with a pool that never fills",
    "seen": "if every prompt had been there before",
}
"""What a fleet has that is simulated with each grant."""


@attrs.frozen
class PlanReport:
    """A plan as a table with sentences.

    Attributes:
        plan: the plan as a JSON object, from `FleetPlan.as_dict()`.
    """

    plan: Mapping[str, Any]

    @property
    def sections(self) -> list[Section]:
        """The whole report on the plan."""
        chart = [self.chart()] if self.plan["plans"] else []
        return [
            saturated(self.plan["plans"], self.plan["setup"]),
            self.headline,
            self.table,
            cautions(self.plan["plans"], self.plan["setup"]),
            counted_memory([self.plan["setup"]["device"]]),
            *chart,
            self.limit,
            start_lines(self.plan["plans"], self.plan),
            self.closing,
        ]

    @property
    def headline(self) -> str:
        """Sentences about the workload, the SLO and the best fleet."""
        return f"{_asked(self.plan, self.plan['setup']['device'])}\n{self.answer}"

    @property
    def answer(self) -> str:
        """Sentences about the best fleet."""
        plan = self.plan
        if not plan["plans"]:
            return f"No fleet of up to {counted(plan['max_gpus'], 'GPU')} does."
        best = plan["plans"][0]
        return f"Take {self.fleet(best)}{_day(best)}: {_met(best)}.{_more(best)}"

    @property
    def table(self) -> Table:
        """The fleets that meet the SLO, the best first."""
        headers = ["replicas", "GPUs each", "GPUs", "pool each", "host RAM each", "within SLO"]
        headers += ["TTFT p99", "TPOT p99", "hits", "busiest"]
        costs = [] if self.plan["gpu_prices"] is None else list(COSTS)
        rows = [
            [
                *_sizes(fleet),
                share(fleet["slo_met"]),
                *(_time((fleet[f"{name}_s"] or {}).get("p99"), fleet) for name in TIMES),
                share(fleet["hit_ratio"]),
                share(fleet["busiest"]),
                *(cell(fleet[name], format_dollars) for name in costs),
            ]
            for fleet in self.plan["plans"]
        ]
        headers += [COSTS[name] for name in costs]
        _add_rejected(headers, rows, self.plan["plans"])
        return Table(headers, rows, headers)

    @property
    def limit(self) -> str:
        """Sentences about why no smaller fleet meets the SLO."""
        limit = self.plan["limit"]
        text = f"Limit: {limit['verdict']}: {LIMITS[limit['verdict']]}."
        if limit["fleet"] is None:
            return text
        beside = partial(_beside, self.plan["percentile"])
        policies = [
            f"{policy['kind']} {policy['name']} {beside(policy['slo_met'])}"
            for policy in limit["policies"]
        ]
        if len(policies) > SHOWN:
            policies[SHOWN:] = [f"{len(policies) - SHOWN} more"]
        others = f"with {', '.join(policies)}; " if policies else ""
        granted = "; ".join(
            f"{GRANTED[grant]}, {beside(met)}" for grant, met in limit["granted"].items()
        )
        return (
            f"{text} Of {self.fleet(limit['fleet'])}, {beside(limit['slo_met'])} of the "
            f"requests meet the SLO; {others}{granted}."
        )

    @property
    def closing(self) -> str:
        """Sentences about the search, and the options that all simulations share."""
        prices = self.plan["gpu_prices"]
        costs = f" Cost: {prices}; {PER_MILLION}" if prices else ""
        busiest = "busiest: the share of the prompt tokens that one replica gets"
        return (
            f"{_routed(self.plan['setup'])}; {busiest}.{costs}\n{_shared(self.plan['setup'])}"
        )

    def chart(self) -> Chart:
        """Return a chart of the GPUs, the memory and the requests in time of each fleet."""
        plan = self.plan
        fleets = {self.fleet(fleet): fleet for fleet in plan["plans"]}

        def bars(value: Callable[[Any], float]) -> dict[str, list[tuple[float, float]]]:
            return {name: [(0, value(fleet))] for name, fleet in fleets.items()}

        gib = BINARY["GiB"]
        pools = bars(lambda fleet: fleet["pool_bytes"] * fleet["replicas"] / gib)
        hosts = bars(lambda fleet: fleet["host_bytes"] * fleet["replicas"] / gib)
        within = bars(lambda fleet: fleet["slo_met"])
        target = ("asked for", plan["percentile"] / 100)
        panels = [
            Panel("GPUs", bars(lambda fleet: fleet["gpus"]), "{:g}".format),
            Panel("K/V memory in all, GiB", pools, format_number),
            Panel("host RAM in all, GiB", hosts, format_number),
            Panel("within the SLO", within, as_percent, target),
        ]
        return Chart(_fleets(plan) if fleets else self.answer, self.closing, "", panels)

    def fleet(self, fleet: Mapping[str, Any]) -> str:
        """Return a fleet in words."""
        return fleet_text(fleet, self.plan["setup"]["device"])


@attrs.frozen
class DevicePlansReport:
    """Plans for several devices as one table with sentences.

    Attributes:
        plans: the plans as a JSON object, from `DevicePlans.as_dict()`.
    """

    plans: Mapping[str, Any]

    @property
    def sections(self) -> list[Section]:
        """The whole report on the plans."""
        fleets, first = self.plans["fleets"], self.plans["plans"][0]
        warning, start = saturated(fleets, first["setup"]), start_lines(fleets, first)
        left_out = "\n".join(f"Left out: {note}" for note in self.left_out)
        caution = [cautions(fleets, first["setup"]), counted_memory(self._devices)]
        told = "\n".join(filter(None, caution))
        return [warning, self.headline, self.table, left_out, told, start, self.reading]

    @property
    def _devices(self) -> list[str]:
        return [plan["setup"]["device"] for plan in self.plans["plans"]]

    @property
    def left_out(self) -> list[str]:
        """The notes on devices that have no plan."""
        of_plans = {note for plan in self.plans["plans"] for note in plan["notes"]}
        return [note for note in self.plans["notes"] if note.split(": ", 1)[1] not in of_plans]

    @property
    def headline(self) -> str:
        """Sentences about the workload, the SLO, and the cheapest fleet."""
        asked = _asked(self.plans["plans"][0], " or ".join(self._devices))
        return f"{asked}\n{self.answer}"

    @property
    def answer(self) -> str:
        """Sentences about the cheapest fleet."""
        if not self.plans["fleets"]:
            most = counted(self.plans["plans"][0]["max_gpus"], "GPU")
            return f"No fleet of up to {most} does."
        best = self.plans["fleets"][0]
        fleet = fleet_text(best, best["device"])
        return f"Take {fleet}{_day(best)}: {_met(best)}.{_more(best)}"

    @property
    def table(self) -> Table:
        """The fleets of all devices that meet the SLO, the cheapest first."""
        headers = ["device", "replicas", "GPUs each", "GPUs", "pool each", "host RAM each"]
        times = ["tokens/s", "TTFT p99", "TPOT p99", "Pareto"]
        rows = [
            [
                fleet["device"],
                *_sizes(fleet),
                *(cell(fleet[name], format_dollars) for name in COSTS),
                cell(fleet["throughput_tokens_s"], format_number),
                *(_time(fleet[f"{name}_p99_s"], fleet) for name in TIMES),
                {True: "*", False: "", None: NONE}[fleet["pareto"]],
            ]
            for fleet in self.plans["fleets"]
        ]
        headers += [*COSTS.values(), *times]
        _add_rejected(headers, rows, self.plans["fleets"])
        return Table(headers, rows)

    @property
    def reading(self) -> str:
        """Sentences about the columns, and the limit and setup of each device."""
        front = (
            "Pareto: no other fleet costs less, generates more tokens a second, or has earlier "
            "first tokens without being worse in another of these."
        )
        lines = [front]
        for plan in self.plans["plans"]:
            report, prices = PlanReport(plan), plan["gpu_prices"]
            cost = prices or f"{plan['setup']['device']} has no price: give --gpu-price"
            lines.append(f"{cost}. {report.limit}")
        first = self.plans["plans"][0]
        alike = {name: value for name, value in first["setup"].items() if name != "device"}
        return "\n".join([*lines, f"{_routed(alike)}. {PER_MILLION}", _shared(alike)])

    def chart(self) -> Chart:
        """Return a chart of the cost, the first tokens and the throughput of each fleet."""
        fleets = {fleet_text(fleet, fleet["device"]): fleet for fleet in self.plans["fleets"]}

        def bars(name: str) -> dict[str, list[tuple[float, float]]]:
            return {text: [(0, fleet[name] or 0)] for text, fleet in fleets.items()}

        panels = [
            Panel("dollars a day", bars("usd_per_day"), format_dollars),
            Panel("TTFT, p99", bars("ttft_p99_s"), format_seconds),
            Panel("generated tokens/s", bars("throughput_tokens_s"), format_number),
        ]
        return Chart(_fleets(self.plans["plans"][0]), self.reading, "", panels)


COSTS = {"usd_per_day": "$ a day", "usd_per_million_output_tokens": "$/M"}
"""Columns of costs, and their headers."""

TIMES = ("ttft", "tpot")
"""The times that an SLO is about."""
PER_MILLION = "$/M: dollars per million generated tokens."


def _routed(setup: Mapping[str, Any]) -> str:
    """Return a sentence on how replicas share requests, without its full stop."""
    by = f"the router {setup['router']}" if "router" in setup else "hash"  # in older documents
    return f"Requests are divided among replicas by {by}"


def _shared(setup: Mapping[str, Any]) -> str:
    """Return a sentence with the options that all simulations of a plan share."""
    parts = [f"{name} {as_text(value)}" for name, value in setup.items() if value is not None]
    return f"Setup: kvcore {version()}; {'; '.join(parts)}."


def saturated(fleets: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """Return a warning if the queue of fleets grows: the figures of the first one of them."""
    growing = [fleet for fleet in fleets if _grows(fleet)]
    if not growing:
        return ""
    first, device = growing[0], growing[0].get("device", setup["device"])
    able = f"{first['tensor_parallel']} x {device}"
    if first["replicas"] > 1:
        able = f"{first['replicas']} replicas of {able}"
    times = "times of every fleet"
    if len(growing) < len(fleets):
        times = f"times marked * ({len(growing)} of {counted(len(fleets), 'fleet')})"
    text = overload(first["saturation"], first["offered_load"], first["slo_met"], able, times)
    return f"SATURATED, {fleet_text(first, device)}: {setup['workload']} {text}"


def _grows(fleet: Mapping[str, Any]) -> bool:
    """Return True if the queue of a fleet grew until the last arrival."""
    return bool((fleet["saturation"] or {}).get("saturated"))


def _time(seconds: float | None, fleet: Mapping[str, Any]) -> str:
    """Return the cell of a time of a fleet, marked if its queue grows."""
    return cell(seconds, format_seconds) + " *" * _grows(fleet)


FEW = 1000
"""Number of judged requests below which a plan warns that single ones decide it."""


def cautions(fleets: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> str:
    """Return sentences on what makes a plan uncertain, and on weights in fp8, if not tried."""
    lines = []
    judged = fleets[0]["judged"] if fleets else FEW
    if judged < FEW:
        lines.append(
            f"Few requests: one is {1 / judged:.2%} of the {judged:,} that were judged; plan "
            f"for {FEW:,} or more."
        )
    if str(setup["latency"]).startswith("roofline"):
        lines.append(
            "First tokens come later on real servers: on 2,263 measured ones the roofline's "
            "mean TTFT is 32% too early in the median, and 39% off "
            "(docs/explanation/fidelity.md)."
        )
    name, best = setup["model"], fleets[0] if fleets else setup
    device = str(best.get("device", setup["device"])).partition(":")[0]
    model, gpu = MODELS.get(name), DEVICES.get(device)
    wide = model is not None and {model.dtype, model.expert_dtype} <= {"bf16", "fp16"}
    if wide and gpu is not None and gpu.fp8_flops and setup.get("weights_dtype") is None:
        lines.append(
            f"Not tried: --weights-dtype fp8, which {gpu.name} computes {name} faster with, "
            "and which leaves more for K/V: often the largest saving. What it does to answers "
            "is not simulated."
        )
    return "\n".join(lines)


def counted_memory(devices: Iterable[str]) -> str:
    """Return a sentence on which memory of GPUs was counted; "" if it was given for all."""
    sheets = [DEVICES[name] for name in devices if name in DEVICES]
    if not sheets:
        return ""
    sizes = ", ".join(f"{format_bytes(gpu.hbm_bytes, DECIMAL)} of {gpu.name}" for gpu in sheets)
    return (
        f"GPU memory is that of data sheets ({sizes}), of which {float(USABLE):.0%} are for "
        "weights and K/V. K/V is what weights leave: give what nvidia-smi reports, mostly "
        f"more, as --device {sheets[0].name}:memory=SIZE."
    )


def _met(fleet: Mapping[str, Any]) -> str:
    """Return how many requests meet the SLO, in words, with the interval of their share."""
    low, high = share_interval(fleet["met"], fleet["judged"])
    text = f"{fleet['slo_met']:.1%} do, {fleet['met']:,} of {fleet['judged']:,} "
    text += f"(95% interval: {low:.1%} to {high:.1%})"
    return f"{text}; {fleet['rejected']:,} are rejected for good" if fleet["rejected"] else text


def _beside(percentile: float, met: float) -> str:
    """Return a share in percent, with the digits that show whether it reaches `percentile`."""
    texts = [f"{met:.{digits}%}" for digits in range(1, 7)]
    short = met < percentile / 100
    return next((text for text in texts if (float(text[:-1]) < percentile) == short), texts[0])


def _add_rejected(
    headers: list[str], rows: Sequence[list[str]], fleets: Sequence[Mapping[str, Any]]
) -> None:
    """Add a column of the rejected requests, unless no fleet rejects any."""
    if any(fleet["rejected"] for fleet in fleets):
        headers.append("rejected")
        for row, fleet in zip(rows, fleets, strict=True):
            row.append(f"{fleet['rejected']:,}")


def start_lines(fleets: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> str:
    """Return the commands that start a replica of each fleet, and what is not in them."""
    if not fleets:
        return ""
    lines = [f"{fleet['replicas']} x {fleet['start']}" for fleet in fleets]
    if absent := plan["not_in_start"]:
        lines.append(f"Not in this command: {', '.join(absent)}.")
    return "\n".join(["Start each replica, with all the K/V memory of its GPUs:", *lines])


def _sizes(fleet: Mapping[str, Any]) -> list[str]:
    """Return the cells of the sizes of a fleet."""
    return [
        *(str(fleet[name]) for name in ("replicas", "tensor_parallel", "gpus")),
        format_bytes(fleet["pool_bytes"]),
        format_bytes(fleet["host_bytes"]) if fleet["host_bytes"] else NONE,
    ]


def fleet_text(fleet: Mapping[str, Any], device: str) -> str:
    """Return a fleet of a device in words."""
    per_replica = " each" if fleet["replicas"] > 1 else ""
    host = ""
    if fleet["host_bytes"]:
        host = f" and {format_bytes(fleet['host_bytes'])} of host RAM"
    return (
        f"{counted(fleet['replicas'], 'replica')} on {fleet['tensor_parallel']} x "
        f"{device},{per_replica} with {format_bytes(fleet['pool_bytes'])} of K/V{host}"
    )


def _day(fleet: Mapping[str, Any]) -> str:
    """Return what a fleet costs a day; "" if that is not known."""
    usd = fleet.get("usd_per_day")
    return "" if usd is None else f", ${format_dollars(usd)} a day"


def _more(fleet: Mapping[str, Any]) -> str:
    """Return a sentence on what all the K/V memory of the GPUs gives; "" if it is no more."""
    whole = fleet["full_pool"]
    if whole["blocks"] == fleet["blocks"]:
        return ""
    times = [
        f"TTFT p99 is {cell((whole['ttft_s'] or {}).get('p99'), format_seconds)}",
        f"TPOT p99 {cell((whole['tpot_s'] or {}).get('p99'), format_seconds)}",
    ]
    has = "each replica has" if fleet["replicas"] > 1 else "its GPUs have"
    return (
        f"\nThat is the least that does: {has} {format_bytes(whole['pool_bytes'])}, with which "
        f"{', '.join(times)} and {share(whole['hit_ratio'])} hit. The command below serves "
        "with all of it."
    )


def _fleets(plan: Mapping[str, Any]) -> str:
    """Return the title of a chart of fleets: what they serve."""
    setup, requests = plan["setup"], counted(plan["requests"], "request")
    return f"Fleets for {setup['workload']}, {requests}, {setup['slo']}"


def _asked(plan: Mapping[str, Any], devices: str) -> str:
    """Return a sentence about the workload, the devices and the SLO of a plan."""
    setup = plan["setup"]
    default = ""
    if read_option("slo", setup["slo"]) == option_default("slo"):
        default = ", the default; --slo ttft=1,tpot=0.05 asks for more"
    return (
        f"{setup['workload']}: {counted(plan['requests'], 'request')} to {setup['model']} "
        f"on {devices}, of which {plan['percentile']:g}% are to meet {setup['slo']}{default}."
    )
