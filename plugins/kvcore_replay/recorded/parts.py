"""Build the parts of a recorded run again, some of them different."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import attrs

from kvcore.api import flat_options
from kvcore.cache import LayerPlan, RetentionPolicy
from kvcore.config.options import read_option, renamed
from kvcore.config.parts import RunParts
from kvcore.config.run_config import RunConfig, built_rules
from kvcore.errors import InputError
from kvcore.models.catalogue import find_model
from kvcore.models.cost import PrefillCost, read_cost
from kvcore.models.spec import ModelSpec
from kvcore.plugins import Plugin, Plugins, describe, options_of
from kvcore.serving import Batching, LatencyModel
from kvcore.serving.rules import CHOICES
from kvcore.serving.scheduler import LIMITS
from kvcore.trace.fields import plain, slo_field, slo_of
from kvcore.workloads import Workload
from kvcore_plugins.cache_groups import GroupPlan, LayerGroup
from kvcore_plugins.layer_pools import LayerPools
from kvcore_replay.recorded.config import (
    OF_CACHES,
    OF_SERVERS,
    OPTIONAL,
    config_of_header,
    deployment_options,
    object_of,
    rebuilt,
    redeployed_latency,
    replica_groups,
    unknown_caps,
)

DEPLOYMENT = ("model", "device", "tensor_parallel")
"""Options of the deployment, by which the pool and the times of steps follow."""

SPLIT = ("cache_groups", "layer_pools")
"""Fields of the header that say how layers of a hybrid model share the memory."""

TIMED = (*DEPLOYMENT, *OF_SERVERS, *OPTIONAL, "batching", "like", *LIMITS, "slo", "rate_scale")
"""Options that only a run with a clock has."""


class RecordedParts(RunParts):
    """The parts of a recorded run that is made again, some of them different.

    Args:
        file: the trace, named in errors.
        header: its first line.
        workload: the requests of the trace.
        changes: changed options of `RunConfig`. A block size without a number of blocks keeps
            the memory of the pool. `batching` is a `Batching`, or a table of changed caps.
        plugins: the plugins by name; None: those that are installed.

    Attributes:
        config: the configuration with the changes.
        timed: whether the run has a clock.

    Raises:
        InputError: an option that cannot change, or a header that lacks a field.
    """

    def __init__(
        self,
        file: Path,
        header: Mapping[str, Any],
        workload: Workload,
        changes: Mapping[str, Any],
        plugins: Plugins | None = None,
    ) -> None:
        self._file, self._header = file, header
        self.timed = header["mode"] != "untimed"
        changes = {name: value for name, value in changes.items() if value is not None}
        self._changes, self._changed = changes, changes.keys()
        self._check_changes(changes)
        plugins = plugins or Plugins()
        recorded = config_of_header(file, header, workload, plugins)
        config = self._changed_config(
            recorded, self._with_deployment(changes, recorded, plugins)
        )
        super().__init__(config, plugins, workload=workload, naming=lambda _: "")
        if "slo" in header and "slo" not in changes:
            self.slo = slo_of(header["slo"])

    @property
    def redeployed(self) -> bool:
        """Whether another model, device or number of GPUs takes the place of the recorded."""
        return any(name in self._changed for name in DEPLOYMENT)

    @cached_property
    def layers(self) -> LayerPlan | None:
        """The groups or pools of the recorded cache, whatever the model; None: it had none."""
        header = self._header
        if pools := header.get("layer_pools"):
            return LayerPools.from_record(pools, header["blocks"], header["block_size"])
        recorded = header.get("cache_groups")
        if not recorded:
            return None
        groups = tuple(LayerGroup(**group) for group in recorded["groups"])
        return GroupPlan(groups, 0)  # of a pool whose blocks are counted

    def add_tiers(self, cache: Any) -> None:
        """Build the tiers below `cache` for one run, as recorded in its trace too."""
        super().add_tiers(cache)
        if cache.trace is not None and "tier" not in self._changed:
            # Their paths are in the header still, which was not to open them.
            tiers = [dict(tier) for tier in self._header["tiers"]]
            for tier, level in zip(tiers, cache.tiers.levels, strict=True):
                tier |= {"slots": level.pool.blocks, "slot_bytes": level.slot_bytes}
                # Blocks that an earlier run had left in them are not there now.
                tier.pop("recovered", None)
            cache.trace.describe(tiers=tiers)

    def latency(self, devices: int | None = None) -> LatencyModel:
        """Build the latency model.

        Raises:
            InputError, PluginError: it cannot be built as it was, or has other coefficients.
        """
        latency = super().latency(devices)
        recorded = self._header.get("latency")
        changed = "latency" in self._changed or self.redeployed
        if not changed and plain(latency.coefficients()) != recorded:
            msg = (
                f"{self._file}: latency model {latency.name!r} had other coefficients when "
                "this was recorded, by another version of it. Give "
                f"latency {latency.name}, as it is now, or another one"
            )
            raise InputError(msg)
        if "retention" in self._changed and "latency" not in self._changed:
            options = self._changed_reads()
            if options.keys() <= {option.name for option in options_of(type(latency))}:
                latency = attrs.evolve(cast("Any", latency), **options) if options else latency
        return latency

    def _changed_reads(self) -> dict[str, Any]:
        """Return the options of a latency model by which reads change with the retention."""
        before, reads = self._header["plugins"].get("retention"), {}
        if before is not None:
            policy = rebuilt(self._file, "retention", before, self.plugins)
            reads = dict.fromkeys(cast("RetentionPolicy", policy).timing(self.model), 0)
        if self.config.retention is not None:
            reads |= self.built("retention").timing(self.model)
        return reads

    def recorded(self) -> dict[str, Any]:
        """Return the configuration in which the trace was recorded, for JSON."""
        header = self._header
        names = ("batching", "slo", "rate_scale") if self.timed else ()
        kinds = (*OF_CACHES, *OF_SERVERS, *OPTIONAL, "rules")
        parts = [name for name in ("model", "device") if self.timed]
        deployed = [name for name in parts if "name" in object_of(header.get(name))]
        return {
            **{name: header[name] for name in deployed},
            "blocks": header["blocks"],
            "block_size": header["block_size"],
            **{kind: header["plugins"][kind] for kind in kinds if kind in header["plugins"]},
            **{name: header.get(name) for name in names},
            "tiers": [
                {name: tier[name] for name in ("name", "options", "source") if name in tier}
                for tier in header.get("tiers", ())
            ],
        }

    def rerun(self, plugins: Iterable[Plugin]) -> dict[str, Any]:
        """Return the configuration of the new run in the same form; these plugins ran it."""
        used = [*plugins, *([self.rules] if self.rules.decides() else [])]
        tiers = [plain(describe(plugin)) for plugin in used if plugin.kind == "tier"]
        if "tier" not in self._changed:
            tiers = self.recorded()["tiers"]
        served = {
            "batching": self.batching.as_dict(),
            "slo": None if self.slo is None else slo_field(self.slo),
            "rate_scale": self.config.rate_scale,
        }
        known = self.recorded()
        deployed = RunParts.header(self) if self.redeployed else known
        return {
            **{name: deployed[name] for name in ("model", "device") if name in known},
            "blocks": self.blocks,
            "block_size": self.geometry.block_size,
            **{p.kind: plain(describe(p)) for p in used if p.kind != "tier"},
            **(served if self.timed else {}),
            "tiers": tiers,
        }

    def header(self) -> dict[str, Any]:
        """Return the optional fields of the new header, in their order."""
        required = ("n", "t", "event", "schema", "kvcore", "mode", "count", "block_size")
        # The new run decides by the hashes, so that it runs again as recorded.
        known = (*required, "key_tokens", "blocks", "plugins", "workload", "seed", "anonymised")
        fields = {name: value for name, value in self._header.items() if name not in known}
        if self.slo is None:
            fields.pop("slo", None)
        fields.pop("tiers", None)
        # Tiers, which the cache describes, come after what they are below.
        above = ("model", "device", "recompute", *SPLIT)
        below: dict[str, Any] = {"tiers": []} if self.config.tier else {}
        fields = {name: fields[name] for name in above if name in fields} | below | fields
        if self.redeployed:
            fields |= {n: v for n, v in super().header().items() if n in fields}
        run = {name: self._header[name] for name in ("mode", "workload", "seed")}
        return run | fields

    def _check_changes(self, changes: Mapping[str, Any]) -> None:
        """Refuse a changed option that only a run with a clock has, where there is none."""
        timed = [name for name in TIMED if name in changes]
        if timed and not self.timed:
            msg = (
                f"{self._file} was recorded without a clock: it has no {timed[0]}. "
                "`kvcore simulate trace:FILE` serves its requests under one"
            )
            raise InputError(msg)
        if "memory" in changes or self.redeployed:
            known = deployment_options(self._header)
            missing = [name for name in ("model", "device") if name not in known]
            if missing:
                msg = (
                    f"{self._file}: the header says nothing of the {missing[0]}, so another "
                    "deployment cannot take its place; a pool of another size can: give blocks"
                )
                raise InputError(msg)
        resized = "memory" in changes or "block_size" in changes or self.redeployed
        split = [name.replace("_", " ") for name in SPLIT if name in self._header]
        if split and (resized or not self.timed):
            msg = (
                f"{self._file} was recorded with {split[0]}, whose blocks have the sizes "
                "that the model needs, and which are served under a clock alone: "
                "`kvcore simulate trace:FILE --model NAME` has both"
            )
            raise InputError(msg)

    def _with_deployment(
        self, changes: Mapping[str, Any], recorded: RunConfig, plugins: Plugins
    ) -> dict[str, Any]:
        """Return the changes with those that follow from another deployment or memory.

        A pool that was all that fits beside the weights is that on the new devices too; any
        other one keeps its number of blocks. The latency model is built for the new devices.
        """
        changes = dict(changes)
        if "memory" in changes:
            changes.setdefault("blocks", None)
        if not self.redeployed:
            return changes
        if "latency" not in changes:
            changes["latency"] = redeployed_latency(self._file, self._header, plugins)
        if not changes.keys() & {"blocks", "memory"}:
            (_, server), *_ = replica_groups(self._header)
            before = RecordedParts(self._file, server, recorded.workload, {}, plugins)
            fits = before.deployment.blocks(before.batching.max_seqs)
            if before.blocks + before.null_blocks == fits:
                changes["blocks"] = None
        return changes

    def _changed_config(self, recorded: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
        caps = changes.get("batching", {})
        if isinstance(caps, Batching):
            caps = caps.limits | {"like": caps.rules}
        changes = flat_options({**changes, "batching": caps})
        unknown = caps.keys() - {"like", *LIMITS, *CHOICES}
        if unknown:
            raise unknown_caps(self._file, caps, KeyError(*unknown))
        if caps.keys() & set(CHOICES):
            changes = renamed({"like": built_rules(recorded.like), **changes})
        if "block_size" in changes and "blocks" not in changes:
            size = read_option("block_size", changes["block_size"])
            changes["blocks"] = self._blocks_of(size)
        return recorded.changed(**changes)

    def _blocks_of(self, block_size: int) -> int:
        """Return how many blocks of another size take the memory of the recorded pool."""
        recorded, size = int(self._header["blocks"]), int(self._header["block_size"])
        recorded += bool(self._header.get("batching", {}).get("null_block"))
        if block_size < 1:
            return recorded
        blocks = recorded * size // block_size
        if not blocks:
            msg = (
                f"{self._file}: a pool of {recorded} blocks of {size} tokens is less than a "
                f"block of {block_size}; give blocks too"
            )
            raise InputError(msg)
        return blocks

    def _block_bytes(self) -> int:
        """Return the bytes of a block: the recorded ones, if its size has not changed."""
        tiers, size = self._header.get("tiers"), self._header["block_size"]
        if tiers and self.geometry.block_size == size and not self.redeployed:
            return int(tiers[0]["slot_bytes"])
        return super()._block_bytes()

    def _devices(self) -> int:
        """Return the number of GPUs that share the model; 1 if the header does not give it."""
        if "tensor_parallel" in self._changed:
            return int(self.config.tensor_parallel)
        known = deployment_options(self._header)
        counts = [tier["devices"] for tier in self._header.get("tiers", ())]
        return int(known.get("tensor_parallel") or max(counts, default=1))

    def _recompute(self) -> PrefillCost | None:
        if "recompute" not in self._header:
            return None
        if self.redeployed:
            return super()._recompute()
        try:
            return read_cost(self._header["recompute"])
        except InputError as error:
            msg = f"{self._file}: {error}"
            raise InputError(msg) from error

    def _served(self) -> ModelSpec:
        """Return the model: no file that a header names is opened."""
        model = self.config.model
        if "model" in self._changed or isinstance(model, ModelSpec):
            return super()._served()
        return find_model(str(model))

    def _check_deployment(self) -> None:
        """Check another deployment; the header need not name one, whose pool has its size."""
        if self.redeployed:
            super()._check_deployment()

    def _defaults(self) -> dict[str, Any]:
        """Return the recorded seed and deployment, for plugins that leave them out."""
        return {"seed": self._header["seed"]} | deployment_options(self._header)

    def _timing(self, devices: int | None) -> dict[str, Any]:
        if self.redeployed:
            return super()._timing(devices)
        return {} if devices is None else {"tensor_parallel": devices}
