"""Build the parts of a recorded cluster again, some of them different."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcore.config.parts import RunParts
from kvcore.plugins import Plugin
from kvcore.trace.fields import plain
from kvcore_cluster.config import ClusterParts
from kvcore_replay.recorded.config import ROUTED, replica_groups
from kvcore_replay.recorded.parts import RecordedParts


class RecordedCluster(RecordedParts, ClusterParts):
    """The parts of a recorded cluster that is run again, some of them different.

    Args: as for `RecordedParts`. Changed options of servers hold for all replicas; changed
    `replicas` have the options of the first recorded one, except those of their own.
    """

    def recorded(self) -> dict[str, Any]:
        """Return the configuration in which the trace was recorded, for JSON."""
        header = self._header
        if "replicas" not in header:
            return super().recorded() | {"replicas": 1, "fail": []}
        records, routing = header["replicas"], header["routing"]
        alike = len(records) == 1
        return super().recorded() | {
            "replicas": records[0]["count"] if alike else records,
            "router": header["plugins"]["router"],
            **{name: routing[name] for name in ROUTED[2:] if name in routing},
        }

    def rerun(self, plugins: Iterable[Plugin]) -> dict[str, Any]:
        """Return the configuration of the new run in the same form; these plugins ran it."""
        replicas = self.recorded()["replicas"]
        if "replicas" in self._changed or self._split_anew:
            replicas = self.config.replicas if self.split is None else len(self.members)
        return super().rerun(plugins) | {"replicas": plain(replicas), **self.routed()}

    def header(self) -> dict[str, Any]:
        """Return the fields of the new header that replicas and router do not write."""
        return {name: self._header[name] for name in ("mode", "workload", "seed")}

    @property
    def _split_anew(self) -> bool:
        """Whether the run has pools of split phases that the trace did not have."""
        return self.split is not None and "disaggregate" in self._changed

    def _check_planner(self) -> None:
        """Refuse a planner that does not fit if it is a new one.

        A recorded one has all replicas up where fewer are left.
        """
        if "autoscale" in self._changed:
            super()._check_planner()

    def _grouped(self) -> list[tuple[int, RunParts]]:
        recorded = replica_groups(self._header)
        same = {name: value for name, value in self._changes.items() if name not in ROUTED}
        groups = [(count, own, same) for count, own in recorded]
        if "replicas" in self._changed or self._split_anew:
            groups = [(count, recorded[0][1], same | own) for count, own in self.tables]
        return [
            (count, RecordedParts(self._file, header, self.workload, changes, self.plugins))
            for count, header, changes in groups
        ]
