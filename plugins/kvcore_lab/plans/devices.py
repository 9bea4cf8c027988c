"""Plans for several devices: the fleets of all of them, and those that no other one beats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from kvcore.errors import InputError
from kvcore.notebook import Shown, data_frame
from kvcore.workloads import given_workload
from kvcore_lab.plans.planning import FleetPlan, plan

SPREADS = ("ttft_s", "tpot_s", "slo_met_interval")
"""The fields of a fleet that are percentiles or an interval: of times a row has the p99."""

NESTED = ("saturation", "full_pool")
"""The fields of a fleet that are objects, which a column is not."""

OBJECTIVES = {"usd_per_day": 1, "throughput_tokens_s": -1, "ttft_p99_s": 1}
"""The columns by which fleets are compared, each with the sign that makes less better."""


@attrs.frozen(kw_only=True, repr=False)
class DevicePlans(Shown):
    """The plans for several devices.

    Attributes:
        plans: the plan of each device on which the model fits, in the order given.
        notes: the devices that were left out, with the reason.
    """

    plans: list[FleetPlan]
    notes: list[str]

    @property
    def workload_notes(self) -> list[str]:
        """Remarks of the workload about its requests."""
        return [*dict.fromkeys(note for plan in self.plans for note in plan.workload_notes)]

    @property
    def fleets(self) -> list[dict[str, Any]]:
        """The fleets of all devices that meet the SLO, the cheapest first.

        `pareto` is False if another fleet costs no more, generates no less, and has no later
        first tokens, one of them being better; None where one of the three is unknown.
        """
        fleets = [
            {"device": plan.setup["device"]}
            | {name: value for name, value in fleet.items() if name not in SPREADS}
            | {"ttft_p99_s": (fleet["ttft_s"] or {}).get("p99")}
            | {"tpot_p99_s": (fleet["tpot_s"] or {}).get("p99")}
            for plan in self.plans
            for fleet in plan.as_dict()["plans"]
        ]
        cost = "usd_per_day"  # unknown ones come last
        fleets.sort(key=lambda fleet: (fleet[cost] is None, fleet[cost] or 0, fleet["gpus"]))
        figures = [_objectives(fleet) for fleet in fleets]
        unbeaten = (
            None if own is None else not any(_beats(other, own) for other in figures if other)
            for own in figures
        )
        return [fleet | {"pareto": best} for fleet, best in zip(fleets, unbeaten, strict=True)]

    @property
    def best(self) -> dict[str, Any] | None:
        """The cheapest fleet; None if no fleet meets the SLO."""
        return next(iter(self.fleets), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            "fleets": self.fleets,
            "plans": [plan.as_dict() for plan in self.plans],
            "notes": self.notes,
        }

    def to_frame(self) -> Any:
        """Return a polars DataFrame of `fleets`.

        Raises:
            PluginError: polars is not installed.
        """
        rows = [
            {name: value for name, value in fleet.items() if name not in NESTED}
            | {"saturated": bool((fleet["saturation"] or {}).get("saturated"))}
            for fleet in self.fleets
        ]
        return data_frame(rows, "`plans.fleets`", {"offered_load": "float"})


def plan_devices(devices: Iterable[Any] | str, workload: Any, **options: Any) -> DevicePlans:
    """Return the plans for each of several devices, as `plan` makes them for one.

    Args:
        devices: the devices, also in text, such as `h100,b200`.
        workload: as of `plan`.
        options: as of `plan`; with a journal, that of all devices.

    Raises:
        InputError: there is no device, or as `plan`, if that is so of every device.
        PluginError: as `plan`.
        StorageError: as `plan`.
    """
    plans, notes = [], []
    fault: InputError | None = None
    # What can be read once alone is read here, for all devices.
    if (requests := given_workload(workload)) is not None:
        workload = requests
    options = {
        name: [*value] if isinstance(value, Iterator) else value
        for name, value in options.items()
    }
    for device in devices_of(devices):
        name = getattr(device, "name", device)
        try:
            plans.append(plan(workload, device=device, **options))
        except InputError as error:
            fault = error
            notes.append(f"{name}: {error}")
        else:
            notes += [f"{name}: {note}" for note in plans[-1].notes]
    if not plans:
        msg = "devices: none was given: give one or more, such as h100,b200"
        raise fault or InputError(msg)
    return DevicePlans(plans=plans, notes=notes)


def devices_of(text: Any) -> list[Any]:
    """Return the devices of text such as `h100,b200`; figures with commas are one device."""
    if not isinstance(text, str):
        return [*text] if isinstance(text, Iterable) else [text]
    devices: list[str] = []
    for piece in text.split(","):
        # A figure, `name=value`, belongs to the device before it, if that has figures.
        if "=" in piece and ":" not in piece and devices and "=" in devices[-1]:
            devices[-1] += f",{piece}"
        else:
            devices.append(piece)
    return devices


def _objectives(fleet: Mapping[str, Any]) -> list[float] | None:
    """Return figures of which less is better; None if one is unknown."""
    if any(fleet[name] is None for name in OBJECTIVES):
        return None
    return [fleet[name] * sign for name, sign in OBJECTIVES.items()]


def _beats(first: list[float], other: list[float]) -> bool:
    """Return True if no figure of `first` is above that of `other`, and one is below it."""
    return first != other and all(a <= b for a, b in zip(first, other, strict=True))
