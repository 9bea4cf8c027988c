"""Hits and saved prefill by the size of the pool and of one tier below it: a plane.

Take a pool of G blocks under LRU, above an exclusive tier of T blocks into which the blocks go
that the pool evicts. Together they hold the G + T blocks that were used last: they are one LRU
cache of G + T blocks. Its hits at every size follow from one pass over the workload
(`kvcore_lab.curves._reuse`). Its hits beyond those of the pool alone are hits in the tier.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs

from kvcore.cache import EvictionPolicy
from kvcore.cache.tiers import Tier
from kvcore.errors import InputError, shorten
from kvcore.models.memory import KVLayout
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import Spec
from kvcore.progress import Progress, silent, ticked
from kvcore.request import Request
from kvcore.units import INT64_LIMIT
from kvcore.workloads import Workload, check_keys
from kvcore.workloads.selection import open_workload
from kvcore_lab.candidates import Candidate, Policy, candidates_of
from kvcore_lab.comparison import ReplaySetup, Source, is_hinted, pool_sizes
from kvcore_lab.curves.mrc import LRU, check_points, compiled_reuse, spread_sizes
from kvcore_lab.workers import Call, call_all, check_jobs
from kvcore_replay.untimed import served
from kvcore_tiers.hierarchy import Tiers

if TYPE_CHECKING:
    from kvcore_lab.curves._mrc_kernels import Array

POINTS = 7
"""Number of sizes of the pool, and of the tier, if no number is given."""

Hits: TypeAlias = "tuple[Array, Array]"
"""For each request, the blocks that hit in the pool, and those that hit in pool or tier."""


@attrs.frozen(kw_only=True)
class PlanePoint:
    """The hits of a pool of one size above a tier of one size.

    Attributes:
        pool_blocks, tier_blocks: the sizes.
        hit_blocks: blocks that hit in the pool.
        found_blocks: blocks that missed in the pool and were in the tier.
        loaded_blocks: those of `found_blocks` that were loaded: with `load=cost`, if loading
            them is faster than prefill.
        saved_s: seconds of prefill that are saved, less the seconds to load.
    """

    pool_blocks: int
    tier_blocks: int
    hit_blocks: int
    found_blocks: int
    loaded_blocks: int
    saved_s: float


@attrs.frozen(kw_only=True)
class Plane:
    """The result of `plane`.

    Attributes:
        workload: the workload that was replayed.
        tier: the tier below the pool.
        eviction: name of the eviction policy of the pool.
        exact: True if the hierarchy was replayed at each point; False if it was modelled as one
            LRU cache.
        block_size: tokens of a block.
        lookup_blocks, distinct_blocks: blocks looked up, and the footprint.
        hit_blocks: blocks that a cache which never evicts hits.
        prefill_s: seconds of prefill if nothing hits.
        pools, tiers: the sizes in blocks, ascending.
        points: `points[i][j]` has a tier of `tiers[i]` blocks and a pool of `pools[j]`.
    """

    workload: Source
    tier: Tier
    eviction: str
    exact: bool
    block_size: int
    lookup_blocks: int
    distinct_blocks: int
    hit_blocks: int
    prefill_s: float
    pools: list[int]
    tiers: list[int]
    points: list[list[PlanePoint]]

    def ratio(self, point: PlanePoint) -> float:
        """Return the share of the blocks looked up that hit in the pool or are loaded."""
        return (point.hit_blocks + point.loaded_blocks) / (self.lookup_blocks or 1)

    def saved(self, point: PlanePoint) -> float:
        """Return the share of the seconds of prefill that is saved."""
        return point.saved_s / (self.prefill_s or 1)


def plane(
    workload: Workload | Iterable[Request] | str,
    tier: Tier | str | Spec,
    layout: KVLayout,
    *,
    pools: Iterable[int] | None = None,
    points: int = POINTS,
    eviction: Policy = LRU,
    exact: bool = False,
    recompute: Any = None,
    seed: int | None = None,
    jobs: int = 1,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
) -> Plane:
    """Return the hits in a pool and a tier, and the prefill that they save, by both sizes.

    Serial, untimed, in `keys` accounting. One pass over the workload models the hierarchy as
    one LRU cache of both sizes; docs/reference/curve.md says for which rules that is exact.
    With `exact` the hierarchy is replayed at each point, with the tier's own rules and eviction
    policy.

    Args:
        workload: the source of the requests, as for `curve`.
        tier: the tier; its memory is the largest size of the plane.
        layout: the bytes of a block.
        pools: sizes of the pool in blocks; None: `points` sizes, as for `curve`.
        points: number of sizes of the tier, besides none.
        eviction: the eviction policy of the pool.
        exact: whether to replay the hierarchy.
        recompute: the seconds to compute a block again, as for `compare`.
        seed: the seed of a named policy that has an option `seed` and does not set it.
        jobs: processes that replay; the result does not depend on it.
        plugins: the plugins by which names are resolved; None: those installed.
        progress: shows what is running, and how much of it is done; None: no progress.

    Raises:
        InputError: as for `curve`; no tier; several policies; or, without `exact`, rules that
            are not those of one LRU cache, or requests with hints that a pool obeys.
        PluginError: numba is not installed, or a plugin cannot be used here.
        PolicyError: a policy failed.
    """
    check_jobs(jobs)
    check_points(points)
    plugins = plugins or Plugins()
    if isinstance(tier, str | Spec):
        tier = cast("Tier", plugins.build("tier", tier))
    if not isinstance(tier, Tier):
        msg = f"{shorten(repr(tier))} is no tier: give one, or its text: 'host:memory=64GiB'"
        raise InputError(msg)
    setup = ReplaySetup.from_workload(
        open_workload(workload, plugins),
        plugins,
        block_size=layout.block_size,
        recompute=recompute,
    )
    policy, *more = candidates_of(eviction, plugins, seed)
    if more or policy.optimum is not None:
        msg = f"eviction {eviction!r}: a plane is of one policy, which is not the optimum"
        raise InputError(msg)
    below = tier.options()["eviction"]
    wrong = [
        f"eviction={policy.name}" if policy.name != LRU else "",
        f"the tier's eviction={below}" if below != LRU else "",
        f"write={tier.write}" if tier.write != "evict" else "",
    ]
    if not exact and any(wrong):
        rules = " and ".join(filter(None, wrong))
        msg = f"{rules}: one pass knows LRU and write=evict alone: add --exact (exact=True)"
        raise InputError(msg)
    maker = _PlaneMaker(setup, tier, layout, policy, jobs, progress or silent)
    sizes = None if pools is None else pool_sizes(pools, "to show")
    return maker.plane(sizes, points, exact=exact)


@attrs.define
class _PlaneMaker:
    """Computes the points of one plane."""

    setup: ReplaySetup
    tier: Tier
    layout: KVLayout
    policy: Candidate
    jobs: int
    progress: Progress

    def plane(self, pools: list[int] | None, points: int, *, exact: bool) -> Plane:
        """Return the plane."""
        import numpy as np  # noqa: PLC0415 - an extra

        workload, source = self.setup.workload, Source.from_workload(self.setup.workload)
        reuse_class = compiled_reuse()
        whole = array("d")

        def timed(requests: Iterable[Request]) -> Iterator[Request]:
            for request in requests:
                whole.append(self.setup.recompute(0, request.prompt_tokens))
                if not exact and is_hinted(request):
                    msg = (
                        f"request {request.id!r} has hints, {request.hints!r:.80}: one pass "
                        "knows requests without pin, demote and share alone: add --exact "
                        "(exact=True)"
                    )
                    raise InputError(msg)
                yield request

        with self.progress(f"reading {workload.name}", workload.size) as tick:
            requests = timed(ticked(check_keys(workload), tick))
            reuse = reuse_class.read(requests, self.setup.geometry)
        pools = sorted(pools or spread_sizes(reuse.distinct_blocks, points))
        largest = self.tier.slots(self.layout.bytes_per_block)
        tiers = [0, *spread_sizes(largest, points)]
        size = self.setup.geometry.block_size
        longest = int(reuse.lengths.max(initial=0))
        seconds = np.array([self.setup.recompute(0, n * size) for n in range(longest + 1)])
        prompts = np.array(whole)

        def prefill(blocks: Array) -> Any:
            # A prompt may fill its last block in part.
            return np.minimum(seconds[blocks], prompts)

        grid = list(product(tiers, pools))
        in_one_pass = (
            ((below, above), (reuse.lru_hits(above), reuse.lru_hits(above + below)))
            for below, above in grid
        )
        hits = self._replayed(grid) if exact else in_one_pass
        by_sizes = {
            point: self._point(*point, *hits_of_sizes, prefill) for point, hits_of_sizes in hits
        }
        return Plane(
            workload=source.read(workload, requests=len(reuse.lengths)),
            tier=self.tier,
            eviction=self.policy.name,
            exact=exact,
            block_size=size,
            lookup_blocks=reuse.lookup_blocks,
            distinct_blocks=reuse.distinct_blocks,
            hit_blocks=reuse.hit_blocks,
            prefill_s=float(prompts.sum()),
            pools=pools,
            tiers=tiers,
            points=[[by_sizes[below, above] for above in pools] for below in tiers],
        )

    def _point(
        self,
        below: int,
        above: int,
        in_pool: Array,
        in_all: Array,
        prefill: Callable[[Array], Any],
    ) -> PlanePoint:
        """Return the point of a tier of `below` blocks and a pool of `above`.

        Each request hits `in_pool` blocks in the pool, and `in_all` in both together;
        `prefill` returns the seconds of a number of blocks of each.
        """
        tier = self.tier
        in_tier = in_all - in_pool
        block_s = self.layout.bytes_per_block / int(tier.read_bandwidth)
        load = in_tier * block_s + tier.latency
        hit_s = prefill(in_pool)
        gain = (prefill(in_all) - hit_s - load) * (in_tier > 0)
        loaded = {"cost": gain > 0, "always": in_tier > 0, "never": in_tier < 0}[tier.load]
        return PlanePoint(
            pool_blocks=above,
            tier_blocks=below,
            hit_blocks=int(in_pool.sum()),
            found_blocks=int(in_tier.sum()),
            loaded_blocks=int(in_tier[loaded].sum()),
            saved_s=float(hit_s.sum() + gain[loaded].sum()),
        )

    def _replayed(self, grid: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Hits]]:
        """Yield each point with its hits: those of a replay."""
        name, policy = self.setup.workload.name, f"policy {self.policy.name!r}"
        calls = [
            Call(
                partial(_hits, self.setup, self.policy.build(), self.tier, self.layout, *point),
                f"the replay of {name} with sizes {list(point)} and {policy}",
            )
            for point in grid
        ]
        with self.progress("replaying by size", len(grid)) as tick:
            for index, hits in call_all(calls, self.jobs):
                tick(1)
                yield grid[index], hits


def _hits(
    setup: ReplaySetup,
    policy: EvictionPolicy,
    tier: Tier,
    layout: KVLayout,
    below: int,
    above: int,
) -> Hits:
    """Replay a tier of `below` blocks under a pool of `above`; return the hits."""
    import numpy as np  # noqa: PLC0415 - an extra

    cache = setup.cache(policy, above)
    level = None
    if below:
        # Without a clock links are never busy, so that all writes are done.
        free = attrs.evolve(
            tier,
            memory=below * layout.bytes_per_block,
            eviction=deepcopy(tier.eviction),
            read_bandwidth=INT64_LIMIT - 1,
            write_bandwidth=INT64_LIMIT - 1,
            latency=0.0,
        )
        (level,) = Tiers(cache, [free], layout.bytes_per_block).levels
    in_pool, below_pool = [], [0]
    # Nothing is loaded with load=never, so that what is found has no other count.
    count = "found" if tier.load == "never" else "loaded"
    for seq in served(setup.workload, cache):
        in_pool.append(seq.hit_blocks)
        below_pool.append(0 if level is None else getattr(level.stats, count))
    return np.array(in_pool), np.array(in_pool) + np.diff(below_pool)
