"""Miss-ratio curves: the hits of each policy by pool size, up to the whole footprint."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.cache import EvictionPolicy
from kvcore.errors import InputError, PluginError
from kvcore.models.cost import PrefillCost
from kvcore.notebook import Shown, data_frame
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import as_text
from kvcore.progress import Progress, silent, ticked
from kvcore.request import Request
from kvcore.workloads import Workload
from kvcore.workloads.selection import open_workload
from kvcore_lab.candidates import Candidate, Policy, candidates_of, refuse_bound
from kvcore_lab.comparison import Reading, ReplaySetup, Source, pool_sizes
from kvcore_lab.workers import Call, call_all, check_jobs
from kvcore_replay.untimed import replay, replay_groups

if TYPE_CHECKING:
    from kvcore_lab.curves._reuse import Reuse
    from kvcore_plugins.cache_groups import LayerGroup

__all__ = ["Curve", "Curves", "Steps", "curve"]


POINTS = 16
"""Number of sizes if none are given."""

SMALLEST = 1000
"""The footprint divided by the smallest of these sizes."""

LRU = "lru"
"""The policy with an exact curve at every size, in `keys` accounting."""


@attrs.frozen
class Steps:
    """Hits at every pool size: a piecewise linear function, constant after its last corner.

    Attributes:
        blocks, hits: coordinates of the corners, both ascending from 0.
    """

    blocks: array[int]
    hits: array[int]

    def at(self, blocks: int) -> int:
        """Return the hits in a pool of `blocks` blocks. O(log corners).

        Raises:
            InputError: fewer than 0 blocks.
        """
        if blocks < 0:
            msg = f"a pool of {blocks} blocks was asked for; give 0 or more"
            raise InputError(msg)
        right = bisect_right(self.blocks, blocks)
        if right == len(self.blocks):
            return self.hits[-1]
        sizes, hits = self.blocks[right - 1 : right + 1], self.hits[right - 1 : right + 1]
        return hits[0] + (hits[1] - hits[0]) // (sizes[1] - sizes[0]) * (blocks - sizes[0])

    def size_for(self, hits: float) -> int | None:
        """Return the smallest pool with as many hits; None: there is none."""
        last = self.blocks[-1]
        return bisect_left(range(last), hits, key=self.at) if self.at(last) >= hits else None


@attrs.frozen(kw_only=True)
class Curve:
    """Hits of one policy by pool size.

    Attributes:
        eviction, options: name and options of the policy.
        blocks: the pool sizes, ascending.
        hit_blocks: blocks hit in a pool of each size.
        steps: the hits at every size; None: they are known at `blocks` alone.
    """

    eviction: str
    options: dict[str, Any]
    blocks: list[int]
    hit_blocks: list[int]
    steps: Steps | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True, repr=False)
class Curves(Shown):
    """The result of `curve`.

    Attributes:
        workload: the workload that was replayed.
        accounting, block_size: the accounting, and the tokens of a block.
        lookup_blocks: number of blocks looked up.
        distinct_blocks: the footprint: the blocks that a cache which never evicts holds in the
            end.
        hit_blocks: the blocks that this cache hits: the bound for all sizes.
        answers_left_out: as in `Infinite`.
        curves: one per policy, in the order of the arguments.
    """

    workload: Source
    accounting: str
    block_size: int
    lookup_blocks: int
    distinct_blocks: int
    hit_blocks: int
    curves: list[Curve]
    answers_left_out: int = 0

    @property
    def notes(self) -> Sequence[str]:
        """The notes of the workload on the requests that were read."""
        return self.workload.notes

    def ratio(self, hit_blocks: int) -> float | None:
        """Return hits as a share of the blocks looked up; None if no block was looked up."""
        return hit_blocks / self.lookup_blocks if self.lookup_blocks else None

    def points(self, curve: Curve) -> Iterator[dict[str, Any]]:
        """Yield the blocks, the hits and their share for each size of a curve."""
        for blocks, hits in zip(curve.blocks, curve.hit_blocks, strict=True):
            yield {"blocks": blocks, "hit_blocks": hits, "hit_ratio": self.ratio(hits)}

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the points: one row per policy and size.

        Raises:
            PluginError: polars is not installed.
        """
        rows = [
            {
                "workload": self.workload.name,
                "digest": self.workload.digest,
                "accounting": self.accounting,
                "block_size": self.block_size,
                "eviction": curve.eviction,
                "options": ",".join(f"{k}={as_text(v)}" for k, v in curve.options.items()),
                **point,
            }
            for curve in self.curves
            for point in self.points(curve)
        ]
        return data_frame(rows, "`curves.curves`", {"digest": "str", "hit_ratio": "float"})


def curve(
    workload: Workload | Iterable[Request] | str | os.PathLike[str],
    policies: Policy | Iterable[Policy],
    blocks: Iterable[int] | None = None,
    *,
    points: int = POINTS,
    block_size: int | None = None,
    accounting: str = "keys",
    recompute: PrefillCost | None = None,
    seed: int | None = None,
    jobs: int = 1,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    groups: Iterable[LayerGroup] = (),
) -> Curves:
    """Return the hits of each policy by pool size: serial, untimed, shared by prefix.

    In `keys` accounting one pass over the workload gives the exact curve of `lru` at every
    size, and the optimum at each of `blocks`; both need the extra `lab`. Other policies are
    replayed once for each size. So is LRU where requests have hints, which pools obey and a
    pass does not know, and in `tokens` accounting: there the partial last block of a prompt
    takes room only while the request runs, so that a smaller pool need not hold the most
    recent blocks of a larger one.

    Args:
        workload: the source of the requests, as for `compare`.
        policies: one or several, as for `compare`.
        blocks: pool sizes; None: `points` sizes are chosen.
        points: number of sizes, at even ratios from a thousandth of the footprint to all of it.
        block_size: tokens of a block; None: the tokens of a key of the workload.
        accounting: `keys` or `tokens`.
        recompute: the seconds to compute a block again, as for `compare`.
        seed: the seed of named policies that have an option `seed` and do not set it.
        jobs: processes that replay; the result does not depend on it.
        plugins: the plugins by which names are resolved; None: those installed.
        progress: shows what is running, and how much of it is done; None: no progress.
        groups: the cache groups of the pools, as for `compare`; empty: there is one.

    Raises:
        InputError: as for `compare`; or fewer than 2 points.
        PluginError: a plugin cannot be used here, or numba is not installed.
        PolicyError: a policy failed.
    """
    plugins = plugins or Plugins()
    setup = ReplaySetup.from_workload(
        open_workload(workload, plugins),
        plugins,
        accounting=accounting,
        block_size=block_size,
        recompute=recompute,
        groups=groups,
    )
    if setup.groups and accounting != "tokens":
        msg = "blocks of cache groups are counted in tokens: give accounting='tokens'"
        raise InputError(msg)
    check_jobs(jobs)
    if blocks is None:
        check_points(points)
    candidates = candidates_of(policies, plugins, seed)
    sizes = None if blocks is None else sorted(pool_sizes(blocks, "to make a curve of"))
    return _CurveMaker(setup, plugins, progress or silent, jobs).curves(
        candidates, sizes, points
    )


def check_points(points: int) -> None:
    """Raise InputError for fewer than 2 points."""
    if points < 2:  # noqa: PLR2004
        msg = f"a curve through {points} sizes was asked for; give 2 or more"
        raise InputError(msg)


def spread_sizes(distinct_blocks: int, points: int) -> list[int]:
    """Return pool sizes at even ratios, from a thousandth of `distinct_blocks` to all."""
    steps = (SMALLEST ** (step / (points - 1)) for step in range(points))
    sizes = (max(1, round(distinct_blocks * step / SMALLEST)) for step in steps)
    return list(dict.fromkeys(sizes))


@attrs.define
class _CurveMaker:
    """Computes the curves of one workload."""

    setup: ReplaySetup
    plugins: Plugins
    progress: Progress
    jobs: int
    reading: Reading = attrs.field(init=False, factory=Reading)

    def curves(
        self, candidates: list[Candidate], sizes: list[int] | None, points: int
    ) -> Curves:
        """Return one curve for each of `candidates`."""
        geometry = self.setup.geometry
        refuse_bound(candidates, geometry.accounting)
        source = Source.from_workload(self.setup.workload)
        reuse = None
        if any(self._in_one_pass(policy) for policy in candidates):
            reuse = self._reuse()
            lookups, hits = reuse.lookup_blocks, reuse.hit_blocks
            distinct = reuse.distinct_blocks
        if reuse is None or not any(self._in_one_pass(policy) for policy in candidates):
            with self._reading() as requests:
                stats, distinct = self.setup.unbounded(requests)
            lookups, hits = stats.lookup_blocks, stats.hit_blocks
        sizes = sizes or spread_sizes(distinct, points)
        exact = {
            place: self._exact(policy, sizes, reuse)
            for place, policy in enumerate(candidates)
            if reuse is not None and self._in_one_pass(policy)
        }
        others = [policy for n, policy in enumerate(candidates) if n not in exact]
        replayed = iter(self._replayed(others, sizes))
        curves = []
        for place, policy in enumerate(candidates):
            found, steps = exact.get(place) or (next(replayed), None)
            curves.append(
                Curve(
                    eviction=policy.name,
                    options=policy.options,
                    blocks=sizes,
                    hit_blocks=found,
                    steps=steps,
                )
            )
        return Curves(
            workload=source.read(self.setup.workload, **self.reading.lengths()),
            accounting=geometry.accounting,
            block_size=geometry.block_size,
            lookup_blocks=lookups,
            distinct_blocks=distinct,
            hit_blocks=hits,
            curves=curves,
            answers_left_out=self.reading.left_out(geometry.accounting),
        )

    def _in_one_pass(self, policy: Candidate) -> bool:
        """Return True if one pass over the workload gives the whole curve of `policy`.

        Not that of LRU once requests with hints were read: what they pin, demote or keep
        private is in another order than that of use. The optimum is a bound in any case.
        """
        if self.setup.geometry.accounting != "keys":
            return False
        named = policy.name == LRU and LRU in self.plugins.names("eviction")
        if not named or self.reading.hinted:
            return policy.optimum is not None
        usual = policy.kind is self.plugins.get("eviction", LRU)
        return usual and not policy.options.get("renew_split")

    def _reuse(self) -> Reuse:
        """Read the reuse of the workload's blocks, for LRU and Belady's bound."""
        what = "loading compiled loops (compiled at their first use, then kept on disk)"
        with self.progress(what, None):
            reuse = compiled_reuse()
        with self._reading() as requests:
            return reuse.read(requests, self.setup.geometry)

    def _exact(
        self, policy: Candidate, sizes: list[int], reuse: Reuse
    ) -> tuple[list[int], Steps | None]:
        """Return the hits of LRU, known at every size too, or of Belady's bound."""
        if policy.optimum is None:
            steps = Steps(*reuse.lru())
            return [steps.at(size) for size in sizes], steps
        hits = []
        with self.progress("the optimum by size", len(sizes)) as tick:
            for size in sizes:
                hits.append(reuse.optimum(size, bypass=policy.optimum.bypass))
                tick(1)
        return hits, None

    def _replayed(self, policies: list[Candidate], sizes: list[int]) -> list[list[int]]:
        """Return the hits of each of `policies` by one replay per size."""
        if not policies:
            return []
        name = self.setup.workload.name
        calls = [
            Call(
                partial(_replayed_hits, self.setup, policy.build(), blocks),
                f"the replay of {name} with {blocks} blocks and policy {policy.name!r}",
            )
            for policy, blocks in product(policies, sizes)
        ]
        hits = [0] * len(calls)
        with self.progress(f"replaying {name} by size", len(calls)) as tick:
            for index, found in call_all(calls, self.jobs):
                hits[index] = found
                tick(1)
        return [hits[start : start + len(sizes)] for start in range(0, len(hits), len(sizes))]

    @contextmanager
    def _reading(self) -> Iterator[Iterable[Request]]:
        """Open the workload's requests, reported as they are read."""
        workload, self.reading = self.setup.workload, Reading()
        with self.progress(f"reading {workload.name}", workload.size) as tick:
            yield ticked(self.reading.of(workload), tick)


def compiled_reuse() -> type[Reuse]:
    """Import the class `Reuse`. Raises PluginError if numba is missing."""
    try:
        from kvcore_lab.curves._reuse import Reuse  # noqa: PLC0415 - extras, and seconds
    except ImportError as error:
        msg = f"exact curves need numba and numpy ({error}): pip install 'kvcore[lab]'"
        raise PluginError(msg) from error
    except Exception as error:  # of numba's pickles
        msg = (
            f"the compiled loops of exact curves cannot be loaded ({error!r}): delete what "
            "numba has kept of them, the files kernels.* in NUMBA_CACHE_DIR or "
            f"{Path(__file__).with_name('__pycache__')}"
        )
        raise PluginError(msg) from error
    return Reuse


def _replayed_hits(setup: ReplaySetup, policy: EvictionPolicy, blocks: int) -> int:
    """Replay a workload under one policy; return the blocks hit."""
    if setup.groups:
        groups = setup.grouped(policy, blocks)
        replay_groups(setup.workload, groups)
        return groups.stats.hit_blocks
    return replay(setup.workload, setup.cache(policy, blocks)).hit_blocks
