"""Build the parts of a run with contiguous memory, as servers allocated it before paging."""

from __future__ import annotations

from typing import Any

from kvcore.cache import Recorder
from kvcore.config.parts import RunParts
from kvcore.plugins import Plugin
from kvcore_lab.contiguous.loop import simulate


class ContiguousParts(RunParts):
    """The parts of a run with contiguous memory."""

    runs = ("contiguous",)
    splits_layers = False
    simulate: Any = staticmethod(simulate)

    @property
    def traced(self) -> bool:
        """Whether a run writes a trace of its blocks: contiguous memory has none."""
        return bool(self.config.allocation == "paged")

    def arguments(self, trace: Recorder | None = None) -> dict[str, Any]:
        """Build the keyword arguments of one run, all but its requests."""
        config = self.config
        own = {"allocation": config.allocation, "max_output": config.max_output}
        return super().arguments(trace) | own

    def describe(self, *plugins: Plugin | None) -> dict[str, Any]:
        """Return the configuration and the plugins of a run, without None, for JSON."""
        return super().describe(*plugins) | {"allocation": self.config.allocation}
