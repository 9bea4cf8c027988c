"""Build a cluster from a configuration or a trace: its replicas and its router."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, cast

import attrs

from kvcore.cache import Recorder
from kvcore.config.options import find_mode, mode_options, renamed
from kvcore.config.parts import RunParts, plugins_of
from kvcore.config.run_config import RunConfig, built_rules
from kvcore.errors import InputError
from kvcore.plugins import Plugin, describe
from kvcore.request import Request
from kvcore.serving.router import Router
from kvcore.serving.rules import CHOICES
from kvcore.trace import Trace
from kvcore.trace.fields import plain
from kvcore_cluster.cluster import Failure, check_failures
from kvcore_cluster.dispatcher import PrefixView
from kvcore_cluster.phases import Split
from kvcore_cluster.planner import Planner, check_planner, parse_planner
from kvcore_cluster.result import ClusterResult
from kvcore_cluster.simulate import simulate_cluster
from kvcore_cluster.trace import MOST_REPLICAS, ClusterTrace
from kvcore_cluster.views import parse_view


class ClusterParts(RunParts):
    """The parts of a cluster: those of a run, and of its replicas where they differ.

    Args: as for `RunParts`.

    Raises:
        InputError: as `RunParts`; replicas, a failure or an option that cannot be.
    """

    many = True
    runs = ("cluster",)

    def _check(self) -> None:
        """Refuse what replicas cannot have, and numbers of them that do not fit."""
        config = self.config
        members, failures = self.members, self.failures
        with self._about("replicas" if config.drafter is None else "drafter"):
            drafts = any(parts.config.drafter is not None for parts in members)
            if drafts and config.disaggregate is not None:
                msg = "replicas with split phases decode without one: leave it out"
                raise InputError(msg)
        with self._about("first_output"):
            if config.first_output is not None and config.disaggregate is None:
                msg = "no replicas that prefill, and others that decode: give disaggregate too"
                raise InputError(msg)
        with self._about("fail"):
            check_failures(failures, len(members))
        with self._about("disaggregate"):
            if self.split is not None and self.split.replicas != len(members):
                msg = (
                    f"{self.split.replicas} replicas are in its pools, but replicas gives "
                    f"{len(members)}: give as many, or leave replicas out"
                )
                raise InputError(msg)
            _ = self.phases()
        self._check_planner()

    def _check_planner(self) -> None:
        """Refuse a planner that is to have more replicas up than any pool has."""
        planner, split = self.planner(), self.split
        with self._about("autoscale"):
            if planner is not None:
                both = [len(self.members)]
                check_planner(planner, [split.prefill, split.decode] if split else both)

    @cached_property
    def groups(self) -> list[tuple[int, RunParts]]:
        """The groups of identical replicas, each with its count and its parts."""
        groups = self._grouped()
        with self._about("replicas"):
            if sum(count for count, _ in groups) > MOST_REPLICAS:
                msg = f"more than {MOST_REPLICAS:,} are too many"
                raise InputError(msg)
        return groups

    @cached_property
    def members(self) -> list[RunParts]:
        """The parts of each replica, by number."""
        return [parts for count, parts in self.groups for _ in range(count)]

    def _grouped(self) -> list[tuple[int, RunParts]]:
        """Return the groups; `groups` checks how many replicas they have."""
        groups: list[tuple[int, RunParts]] = []
        added, options = mode_options(find_mode("cluster")), self.config.options
        kept = {name: value for name, value in options.items() if name not in added}
        alone = RunConfig(self.config.mode, options=kept)
        for count, own in self.tables:
            # A size of the pool replaces the other one.
            sized = {"blocks": None, "memory": None} if own.keys() & SIZES else {}
            with self._about("replicas"):
                if own.keys() & set(CHOICES):
                    own = renamed({"like": alone.like, **own})  # noqa: PLW2901 - as named today
                defaults = built_rules(own.get("like"), self.plugins).defaults
                mine = alone.changed(**{**sized, **defaults, **own})
                parts = RunParts(mine, self.plugins, workload=self.workload) if own else self
            groups.append((count, parts))
        return groups

    @property
    def _split_anew(self) -> bool:
        """Whether the pools of split phases replace a recorded number of replicas."""
        return False

    @property
    def tables(self) -> list[tuple[int, dict[str, Any]]]:
        """The groups of identical replicas, each with its count and its own options."""
        replicas = self.config.replicas
        if self.split is not None and (replicas == 1 or self._split_anew):
            replicas = self.split.replicas
        if isinstance(replicas, int):
            return [(replicas, {})]
        return [
            (table.get("count", 1), {k: v for k, v in table.items() if k != "count"})
            for table in replicas
        ]

    @cached_property
    def failures(self) -> list[Failure]:
        """The failures, in the order given."""
        with self._about("fail"):
            return [Failure.parse(text) for text in self.config.fail]

    def view(self) -> PrefixView:
        """Build the view that the router has of the caches, for one run."""
        with self._about("view"):
            return parse_view(self.config.view)

    def planner(self) -> Planner | None:
        """Build the planner for one run, if there is one."""
        with self._about("autoscale"):
            text = self.config.autoscale
            return None if text is None else parse_planner(text)

    @cached_property
    def split(self) -> Split | None:
        """The split of the phases, if they are split."""
        with self._about("disaggregate"):
            text, first = self.config.disaggregate, self.config.first_output
            split = None if text is None else Split.parse(text)
        if first is None and "first_output" not in (text or ""):
            first = self.batching.rules.first_output
        if split is None or first is None:
            return split
        return attrs.evolve(split, first_output=first)

    def phases(self) -> dict[str, Any] | None:
        """Build the further arguments of `PhaseCluster` for one run, if phases are split."""
        split = self.split
        if split is None:
            return None
        sizes = {parts.deployment.bytes_per_block for parts in self.members}
        if len(sizes) > 1:
            msg = f"replicas have blocks of {sorted(sizes)} bytes: give all the same K/V"
            raise InputError(msg)
        return {
            "split": split,
            "decode_router": self.plugins.build("router", split.router, self._defaults()),
            "decode_view": self.view(),
            "block_bytes": sizes.pop(),
            "layers": self.model.layers,
        }

    def router(self) -> Router:
        """Build the router for one run."""
        return cast("Router", self.built("router"))

    def describe(self, *plugins: Plugin | None) -> dict[str, Any]:
        """Return the configuration of the first replica, and all replicas."""
        first = self.groups[0][1]
        alone = super().describe(*plugins) if first is self else first.describe(*plugins)
        return alone | {
            "replicas": [
                {
                    "count": count,
                    "model": parts.model.name,
                    "device": parts.device.name,
                    "tensor_parallel": parts.deployment.devices,
                    "codec": str(parts.codec),
                    "blocks": parts.blocks,
                    "bytes_per_block": parts.deployment.bytes_per_block,
                    **(plan.as_dict(parts.blocks, parts.built("checkpoint")) if plan else {}),
                }
                for count, parts in self.groups
                for plan in [parts.layers]
            ],
            "block_size": self.geometry.block_size,
            **self.routed(),
        }

    def document(self, result: ClusterResult) -> dict[str, Any]:
        """Return the JSON document of a run."""
        server = self.members[0]
        used = plugins_of(result.lives[0][0].cache, server.latency(), result.router)
        return {**result.summary(), "config": self.describe(server.scheduler(), *used)}

    def routed(self) -> dict[str, Any]:
        """Return the options of the cluster itself, for JSON; of phases and planner if any."""
        planner = self.planner()
        return {
            "view": self.config.view,
            "fail": [str(failure) for failure in self.failures],
            **({} if planner is None else {"autoscale": plain(describe(planner))}),
            **({} if self.split is None else {"disaggregate": str(self.split)}),
        }

    def run(
        self, trace: Any = None, requests: Iterable[Request] | None = None, **more: Any
    ) -> ClusterResult:
        """Serve the workload once; `more` are further arguments of `simulate_cluster`."""
        served = self.workload if requests is None else requests
        return simulate_cluster(served, **self.cluster(trace), **more)

    def cluster(self, trace: Trace | None = None) -> dict[str, Any]:
        """Build the arguments of `simulate_cluster`, all but its requests."""
        merged = None if trace is None else ClusterTrace(trace)
        return {
            "replicas": [_life(parts) for parts in self.members],
            "router": self.router(),
            "view": self.view(),
            "slo": self.slo,
            "rate_scale": self.config.rate_scale,
            "failures": self.failures,
            "planner": self.planner(),
            "phases": self.phases(),
            "trace": merged,
        }


SIZES = {"blocks", "memory"}
"""Options that give the size of a pool."""


def _life(parts: RunParts) -> Callable[[Recorder | None], dict[str, Any]]:
    """Return the function that builds the parts of one life of a replica."""

    def build(trace: Recorder | None) -> dict[str, Any]:
        arguments = parts.arguments(trace)
        if trace is not None:
            known = ("workload", "seed", "tiers")  # of all replicas, and of the cache
            header = {k: v for k, v in parts.header().items() if k not in known}
            trace.describe(**header)
        return arguments

    return build
