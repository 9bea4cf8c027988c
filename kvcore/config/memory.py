"""Build the parts of a run whose use of memory is measured, as paged memory or before paging."""

from __future__ import annotations

from typing import Any

from kvcore.cache import Recorder
from kvcore.config.parts import RunParts
from kvcore.serving.contiguous import simulate


class MemoryParts(RunParts):
    """The parts of a run whose use of memory is measured, or which has contiguous memory."""

    runs = ("memory",)
    simulate: Any = staticmethod(simulate)

    @property
    def traced(self) -> bool:
        """Whether a run writes a trace of blocks: memory in one piece has none."""
        return bool(self.config.allocation == "paged")

    def arguments(self, trace: Recorder | None = None) -> dict[str, Any]:
        """Build the keyword arguments of one run, all but its requests."""
        names = ("allocation", "max_output", "fragmentation")
        measured = {name: getattr(self.config, name) for name in names}
        return super().arguments(trace) | measured

    def describe(self, *plugins: Any) -> dict[str, Any]:
        """Return the configuration and the plugins of a run, without None, for JSON."""
        return super().describe(*plugins) | {"allocation": self.config.allocation}
