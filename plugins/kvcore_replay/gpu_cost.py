"""Prices of GPU hours, and what a deployment costs by them."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from kvcore.errors import InputError
from kvcore.models.catalogue import find_device
from kvcore.units import NS_PER_S, format_dollars
from kvcore_plugins.load import finished_work

if TYPE_CHECKING:
    from kvcore.config import RunParts
    from kvcore.serving.result import Reported
    from kvcore.serving.stats import RunLog

HOURS_OF_DAY, SECONDS_OF_HOUR = 24, 3600

ANY = ""
"""The key of a price that holds for every device without one of its own."""


class GpuPrice(NamedTuple):
    """The price of a GPU.

    Attributes:
        usd: dollars an hour.
        source: who asked for it, and the day on which it was read.
    """

    usd: float
    source: str


_RUNPOD, _LAMBDA = "RunPod, read {}", "Lambda, read {}"

PRICES: Mapping[str, GpuPrice] = {
    "v100-16g": GpuPrice(0.79, _LAMBDA.format("2026-09-20")),
    "a10": GpuPrice(1.29, _LAMBDA.format("2026-09-20")),
    "a100-40g": GpuPrice(1.99, _LAMBDA.format("2026-09-20")),
    "gh200": GpuPrice(2.29, _LAMBDA.format("2026-09-20")),
    "rtx-4090": GpuPrice(0.74, _RUNPOD.format("2026-09-25")),
    "l40s": GpuPrice(1.09, _RUNPOD.format("2026-09-25")),
    "a100-80g": GpuPrice(1.79, _RUNPOD.format("2026-11-09")),
    "h100-pcie": GpuPrice(2.89, _RUNPOD.format("2026-11-09")),
    "h100-nvl": GpuPrice(3.19, _RUNPOD.format("2026-11-09")),
    "h100": GpuPrice(3.99, _RUNPOD.format("2026-11-09")),
    "h200": GpuPrice(4.59, _RUNPOD.format("2026-10-07")),
    "b200": GpuPrice(6.79, _RUNPOD.format("2026-10-07")),
    "b300": GpuPrice(7.89, _RUNPOD.format("2026-10-07")),
}
"""Prices on demand, by the names of the catalogue of devices: examples, not the cheapest.

Sources: the public price lists https://lambda.ai/instances (of one GPU, or of eight where fewer
are not let) and https://www.runpod.io/pricing (Secure Cloud), as public copies of them
had it on the days in the table. Prices change: give those that you pay.
"""


def read_gpu_prices(given: str | Mapping[str, float] | None) -> dict[str, float]:
    """Return dollars an hour by device, from text such as `h100=2.5,b200=5`, or `2.5` for all.

    Those of a mapping are checked as well, and devices named as the catalogue does; None: none.

    Raises:
        InputError: an unknown device, no price of 0 or more, or two prices of a device.
    """
    if isinstance(given, str):
        pieces = given.split(",")
    else:
        pieces = [f"{name}={usd}" if name else f"{usd}" for name, usd in (given or {}).items()]
    prices: dict[str, float] = {}
    for piece in pieces:
        name, equals, amount = piece.rpartition("=")
        try:
            usd = float(amount)
        except ValueError:
            usd = -1.0
        if not 0 <= usd < float("inf") or bool(equals) != bool(name.strip()):
            msg = f"{piece!r}: give dollars an hour, such as h100=2.5,b200=5, or 2.5 for all"
            raise InputError(msg)
        device = find_device(name).name if equals else ANY
        if device in prices:
            msg = f"{given!r}: two prices of {device or 'all devices'}: leave out one of them"
            raise InputError(msg)
        prices[device] = usd
    return prices


COLUMNS = ("usd_per_day", "usd_per_million_output_tokens")
"""The columns of costs in tables of deployments."""


class Cost(NamedTuple):
    """The cost of a deployment.

    Attributes:
        usd_per_hour: dollars that its GPUs cost an hour.
        usd_per_million_output_tokens: the same for a million generated tokens, at the rate at
            which they were generated; None if there were none.
        usd_per_million_tokens: the same of all tokens, those of prompts too; None: unknown.
        prices: the price of each device, in words.
    """

    usd_per_hour: float
    usd_per_million_output_tokens: float | None
    usd_per_million_tokens: float | None
    prices: str

    @classmethod
    def for_gpus(
        cls,
        gpus: Mapping[str, float],
        given: Mapping[str, float],
        output_tokens_s: float | None,
        tokens_s: float | None = None,
    ) -> Self | None:
        """Return the cost of some GPUs; None if one of them has no price.

        Args:
            gpus: number of GPUs of each device, in the mean over time.
            given: dollars an hour by device, in place of those of `PRICES`.
            output_tokens_s: tokens that they generate a second; None: none.
            tokens_s: tokens that they prefill and generate a second; None: unknown.
        """
        usd, words = 0.0, []
        for device, count in gpus.items():
            known = device.partition(":")[0]  # with other figures it costs the same
            price = PRICES.get(known)
            own = [given[name] for name in (device, known, ANY) if name in given]
            if own:
                price = GpuPrice(own[0], "given")
            if price is None:
                return None
            usd += count * price.usd
            words.append(f"{device} at ${format_dollars(price.usd)} an hour, {price.source}")

        def per_million(tokens: float | None) -> float | None:
            return 1e6 * usd / SECONDS_OF_HOUR / tokens if tokens else None

        return cls(usd, per_million(output_tokens_s), per_million(tokens_s), "; ".join(words))

    @classmethod
    def of_log(
        cls, gpus: Mapping[str, float], given: Mapping[str, float], log: RunLog, seconds: float
    ) -> Self | None:
        """Return the cost of the GPUs that served the requests of a log in `seconds`."""
        seconds = seconds or inf
        prompts = outputs = 0
        for _, lengths, _, generated in finished_work(log):
            prompts, outputs = prompts + sum(lengths), outputs + sum(generated)
        return cls.for_gpus(gpus, given, outputs / seconds, (prompts + outputs) / seconds)

    @property
    def usd_per_day(self) -> float:
        """Dollars a day."""
        return HOURS_OF_DAY * self.usd_per_hour

    def columns(self) -> dict[str, Any]:
        """Return the columns of a table of deployments."""
        return {name: getattr(self, name) for name in COLUMNS}

    def as_dict(self) -> dict[str, float | str | None]:
        """Return the fields as a JSON object."""
        fields = self._asdict()
        hour = fields.pop("usd_per_hour")
        return {"usd_per_hour": hour, "usd_per_day": self.usd_per_day, **fields}

    def __str__(self) -> str:
        """Return a sentence."""
        rates = {
            "generated tokens": self.usd_per_million_output_tokens,
            "tokens in all": self.usd_per_million_tokens,
        }
        known = {what: usd for what, usd in rates.items() if usd is not None}
        rest = [f"${format_dollars(usd)} per million {what}" for what, usd in known.items()]
        hour, day = map(format_dollars, (self.usd_per_hour, self.usd_per_day))
        ends = f"; {', '.join(rest)}" if rest else ""
        return f"Cost: ${hour} an hour, ${day} a day ({self.prices}){ends}."


def gpus_of(parts: RunParts, result: Reported) -> dict[str, float]:
    """Return the mean number of GPUs of each device that a run paid for.

    A planner may have started and stopped some replicas, each with devices of its own.
    """
    members: list[RunParts] = parts.members if parts.many else [parts]  # type: ignore[attr-defined]  # of a cluster
    rented, span_ns = getattr(result, "rented_ns", None), result.simulated_s * NS_PER_S
    up = [ns / span_ns for ns in rented] if rented and span_ns else [1.0] * len(members)
    gpus = dict.fromkeys((member.device.name for member in members), 0.0)
    for member, share in zip(members, up, strict=True):
        gpus[member.device.name] += share * member.deployment.devices
    return gpus


def gpus_of_config(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the number of GPUs of each device in the configuration of a `RunSummary`.

    Empty: it names no device, or a planner started and stopped replicas.
    """
    device, replicas = config.get("device"), config.get("replicas", 1)
    gpus: dict[str, float] = {}
    if device is not None and not config.get("autoscale"):
        groups: list[dict[str, Any]]
        groups = [{"count": replicas}] if isinstance(replicas, int) else replicas
        for group in groups:
            # A header has the device with its number; options of a replica have the name.
            own = group.get("device", device)
            own = own if isinstance(own, Mapping) else {**device, "name": str(own)}
            count = group.get("count", 1) * group.get("tensor_parallel", own.get("count", 1))
            gpus[own["name"]] = gpus.get(own["name"], 0.0) + count
    return gpus


def row_cost(row: Mapping[str, Any], given: Mapping[str, float]) -> Cost | None:
    """Return the cost of a simulated row of a sweep; None if it failed, or lacks a price.

    The replicas of a row may have options of their own: what they cost is unknown here.
    """
    seconds, replicas = row["simulated_s"], row.get("replicas") or 1
    if not seconds or not isinstance(replicas, int):
        return None
    up = (row.get("replica_s") or seconds) / seconds
    gpus = {row["device"]: up * row["tensor_parallel"]}
    return Cost.for_gpus(gpus, given, row["throughput_tokens_s"])
