"""What a cell runs with: its parts, built and checked, and what names it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import orjson

from kvcore.analysis.belady import Future, Optimum
from kvcore.analysis.compare import SHARING
from kvcore.analysis.sweep.grid import Cell, axes_of
from kvcore.cache import EvictionPolicy, KVCache, PrefixIndex, RetentionPolicy
from kvcore.cache.layout import BlockLayout
from kvcore.cache.pool import CountingPool
from kvcore.errors import InputError, PluginError
from kvcore.models.catalogue import MODELS, find_device
from kvcore.models.cost import PrefillCost
from kvcore.models.memory import Deployment, KVLayout
from kvcore.plugins import Plugin
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import Spec
from kvcore.request import SLO
from kvcore.serving import Batching, LatencyModel, Scheduler
from kvcore.serving.arrivals import Arrivals
from kvcore.trace.events import plain, slo_field
from kvcore.units import NS_PER_S, format_bytes
from kvcore.workloads import Workload
from kvcore.workloads.files import file_digest

BLOCK_SIZE = 16
"""Tokens of a block under a clock, where nothing is said: what most servers have."""


DIGEST_BYTES = 16


class Shelf:
    """What the cells of one process have in common: plugins, workloads, the optimum's eyes.

    A workload is opened once and read anew by each cell, so memory holds none of its
    requests, but for the references that the optimum looks ahead with.
    """

    def __init__(self) -> None:
        self.plugins = Plugins()
        self._workloads: dict[tuple[str, int], Workload] = {}
        self._digests: dict[tuple[str, int], str] = {}
        self._files: dict[Path, str] = {}
        self._future: tuple[object, Future] | None = None

    def workload(self, cell: Cell) -> Workload:
        """Return the workload of `cell`."""
        key = str(cell.workload), cell.seed
        if key not in self._workloads:
            workload = self.plugins.build("workload", cell.workload, {"seed": cell.seed})
            self._workloads[key] = workload
        return self._workloads[key]

    def digest(self, cell: Cell) -> str:
        """Return the digest of the workload of `cell`, taken once."""
        key = str(cell.workload), cell.seed
        if key not in self._digests:
            self._digests[key] = self.workload(cell).digest
        return self._digests[key]

    def file(self, path: Path) -> str:
        """Return the digest of a file, taken once."""
        if path not in self._files:
            self._files[path] = file_digest(path)
        return self._files[path]

    def future(self, cell: Cell, geometry: BlockLayout) -> Future:
        """Return what the optimum knows of a workload; the latest is kept."""
        key = self.digest(cell), geometry.accounting, geometry.block_size
        if self._future is None or self._future[0] != key:
            self._future = key, Future.read(self.workload(cell), geometry)
        return self._future[1]


class Parts:
    """The parts of one cell, for one run.

    Attributes:
        cell: what asked for them.
        workload, geometry: what arrives, and how it lies in blocks.
        blocks, bytes_per_block: of the pool.
        recompute: what it costs to compute a block again.
        eviction, prefix, retention, scheduler, latency: plugins; without a clock the last
            three are None.
        batching, slo: what a step holds, and what is expected.

    Raises:
        InputError: a part that cannot be as asked for, or does not fit another one; names
            the field.
        PluginError: a plugin that cannot work here; likewise.
    """

    def __init__(self, cell: Cell, shelf: Shelf) -> None:
        self.cell = cell
        self._shelf = shelf
        self._timed = timed = cell.mode == "simulate"
        with _naming("workload"):
            self.workload = shelf.workload(cell)
        with _naming("block_size", f"workload {cell.workload}: "):
            self.geometry = self._geometry()
        self.recompute = PrefillCost.of(cell.model, find_device(cell.device))
        self._size()
        self.batching = Batching(
            max_tokens=cell.max_tokens,
            max_seqs=cell.max_seqs,
            chunked=cell.chunked,
            steps=cell.steps,  # type: ignore[arg-type]
            watermark=cell.watermark,
        )
        Arrivals((), cell.rate_scale)
        self.slo = None if cell.slo == SLO() else cell.slo
        self.eviction: EvictionPolicy | Optimum = self._evicting()
        self.prefix: PrefixIndex = self._built("prefix", cell.prefix)
        self.retention: RetentionPolicy | None = None
        self.scheduler: Scheduler | None = None
        self.latency: LatencyModel | None = None
        if cell.retention is not None:
            self.retention = self._built("retention", cell.retention)
        if timed:
            self.scheduler = self._built("scheduler", cell.scheduler)
            self.latency = self._built(
                "latency",
                cell.latency,
                # A file's model has no name that plugins know.
                model=cell.model.name if cell.model.name in MODELS else cell.model,
                device=cell.device,
                tensor_parallel=cell.tensor_parallel,
                kv_dtype=cell.kv_dtype,
            )
        self._check_bound()

    def cache(self) -> KVCache:
        """Return a cache of these parts."""
        assert isinstance(self.eviction, EvictionPolicy)
        return KVCache(
            self.blocks,
            self.geometry.block_size,
            eviction=self.eviction,
            prefix=self.prefix,
            retention=self.retention,
            accounting=self.geometry.accounting,
            key_tokens=self.geometry.key_tokens,
            recompute=self.recompute,
        )

    @property
    def row(self) -> dict[str, Any]:
        """The axes of the cell, as a table has them: text, numbers, true or false."""
        cell = self.cell
        row: dict[str, Any] = {name: getattr(cell, name) for name in axes_of(cell.mode)}
        row |= {name: str(value) for name, value in row.items() if isinstance(value, Spec)}
        del row["memory"]
        if self._timed:
            row["slo"] = as_text(cell.slo)
        return row | {
            "model": cell.model.name,
            "block_size": self.geometry.block_size,
            "blocks": self.blocks,
            "pool_bytes": self.blocks * self.bytes_per_block,
        }

    @property
    def digest(self) -> str:
        """What names the cell: BLAKE2b of all that its result depends on, as canonical JSON.

        That is the version of kvcore, the digest of the workload, the sizes, and of every
        plugin its name, its options and the file it is written in: a policy that was edited
        is another one. Files that plugins read count by what is in them.
        """
        text = orjson.dumps(self._description(), option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()

    def _description(self) -> dict[str, Any]:
        cell, geometry = self.cell, self.geometry
        parts = (self.eviction, self.prefix, self.retention, self.scheduler, self.latency)
        described: dict[str, Any] = {
            "kvcore": version("kvcore"),
            "mode": cell.mode,
            "workload": {"name": self.workload.name, "digest": self._shelf.digest(cell)},
            "count": geometry.accounting,
            "key_tokens": geometry.key_tokens,
            "block_size": geometry.block_size,
            "blocks": self.blocks,
            "recompute": attrs.asdict(self.recompute),
            "plugins": [self._described(part) for part in parts if part is not None],
        }
        if self.latency is not None:
            described |= {
                "latency": self.latency.coefficients(),
                "batching": attrs.asdict(self.batching),
                "rate_scale": cell.rate_scale,
                "slo": slo_field(cell.slo),
            }
        return described

    def _described(self, part: Plugin | Optimum) -> dict[str, Any]:
        """Return what a plugin is: its name, its options, and the file of its code."""
        code = getattr(sys.modules[type(part).__module__], "__file__", None)
        return {
            "name": part.name,
            "options": {name: self._content(value) for name, value in part.options().items()},
            "code": code and self._content(Path(code)),
        }

    def _content(self, value: Any) -> Any:
        """Return an option as JSON; of a file, what is in it."""
        is_file = isinstance(value, Path) and value.is_file()
        return self._shelf.file(value) if is_file else plain(value)

    def _geometry(self) -> BlockLayout:
        cell, keys = self.cell, self.workload.key_tokens
        size = cell.block_size
        if size is None:
            size = BLOCK_SIZE if self._timed else keys
        return BlockLayout("tokens" if self._timed else cell.count, size, keys)

    def _size(self) -> None:
        """Find out how many blocks the pool has, and what each takes."""
        cell = self.cell
        with _naming("kv_dtype"):
            layout = KVLayout(cell.model, cell.kv_dtype, self.geometry.block_size)
        with _naming("tensor_parallel"):
            devices = cell.tensor_parallel if self._timed else 1
            deployment = Deployment(layout, find_device(cell.device), devices)
            self.bytes_per_block = deployment.bytes_per_block
            if cell.blocks is None and cell.memory is None:
                self.blocks = deployment.blocks()
                return
        if cell.memory is None:
            assert cell.blocks is not None
            self.blocks = cell.blocks
        else:
            self.blocks = deployment.blocks_in(cell.memory)
        with _naming("blocks" if cell.memory is None else "memory"):
            if not self.blocks and cell.memory is not None:
                block = format_bytes(self.bytes_per_block)
                msg = f"{format_bytes(cell.memory)} is less than a block, which takes {block}"
                raise InputError(msg)
            CountingPool(self.blocks)

    def _evicting(self) -> EvictionPolicy | Optimum:
        spec = self.cell.eviction
        if spec.name == Optimum.name and not self._timed:
            with _naming("eviction"):
                return Optimum.from_text(spec.options)
        policy: EvictionPolicy = self._built("eviction", spec)
        return policy

    def _built(self, kind: str, spec: Spec, **defaults: Any) -> Any:
        with _naming(kind):
            defaults["seed"] = self.cell.seed
            return self._shelf.plugins.build(kind, spec, defaults)

    def _check_bound(self) -> None:
        """Refuse the optimum where it is no bound."""
        if not isinstance(self.eviction, Optimum):
            return
        if self.geometry.accounting != "keys":
            msg = f"count: the optimum is known in `keys` alone, not in {self.geometry.accounting!r}"
            raise InputError(msg)
        if self.prefix.name != SHARING:
            msg = (
                f"prefix: the optimum is a bound for {SHARING!r} alone, not for "
                f"{self.prefix.name!r}"
            )
            raise InputError(msg)


def as_text(slo: SLO) -> str:
    """Return an SLO as the command line takes it, such as `ttft=30,tpot=0.1`."""
    given = slo_field(slo).items()
    return ",".join(f"{name}={time / NS_PER_S:g}" for name, time in given) or "none"


@contextmanager
def _naming(field: str, about: str = "") -> Iterator[None]:
    """Let an error begin with the field of the cell that it is about."""
    try:
        yield
    except (InputError, PluginError) as error:
        msg = f"{field}: {about}{error}"
        raise type(error)(msg) from error
