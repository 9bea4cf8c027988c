"""Miss-ratio curves: the hits of each policy by pool size, up to the whole footprint."""

from __future__ import annotations

import pickle
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from kvcore.analysis.belady import Belady
from kvcore.analysis.comparison import Candidate, Policy, Source, candidates_of
from kvcore.analysis.untimed import replay
from kvcore.analysis.workers import WorkerDied, work_all
from kvcore.cache import EvictionPolicy, KVCache
from kvcore.cache.layout import BlockLayout
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.cache.residency import CacheStats
from kvcore.errors import InputError, PluginError
from kvcore.models.cost import PrefillCost, default_prefill_cost
from kvcore.plugins.manager import Plugins
from kvcore.progress import Progress, silent, ticked
from kvcore.request import Request
from kvcore.trace.fields import plain
from kvcore.workloads import Workload

if TYPE_CHECKING:
    from kvcore.analysis._reuse import Reuse


POINTS = 16
"""How many sizes there are where none are given."""


SMALLEST = 1000
"""The smallest of them is the footprint divided by this."""


LRU = "lru"
"""The policy whose curve is known at every size, in `keys` counting."""


@attrs.frozen
class Steps:
    """Hits at every pool size: a piecewise linear function, constant after its last corner.

    Attributes:
        blocks, hits: of the corners, both ascending, from 0 on.
    """

    blocks: array[int]
    hits: array[int]

    def at(self, blocks: int) -> int:
        """Return the hits in a pool of `blocks` blocks. O(log corners)."""
        right = bisect_right(self.blocks, blocks)
        if right == len(self.blocks):
            return self.hits[-1]
        sizes, hits = self.blocks[right - 1 : right + 1], self.hits[right - 1 : right + 1]
        return hits[0] + (hits[1] - hits[0]) // (sizes[1] - sizes[0]) * (blocks - sizes[0])


@attrs.frozen(kw_only=True)
class Curve:
    """Hits of one policy by pool size.

    Attributes:
        eviction, options: the policy.
        blocks: the pool sizes, ascending.
        hit_blocks: blocks hit in a pool of each size.
        steps: hits at every size, where they are known; None: at `blocks` alone.
    """

    eviction: str
    options: dict[str, Any]
    blocks: list[int]
    hit_blocks: list[int]
    steps: Steps | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True)
class Curves:
    """The result of `curve`.

    Attributes:
        workload: whose curves these are.
        accounting, block_size: how blocks were counted, and a block's tokens.
        lookup_blocks: blocks looked up.
        distinct_blocks: the footprint: what a cache holds in the end that never evicts.
        hit_blocks: what that cache hits: the bound for all sizes.
        curves: one a policy, as they were asked for.
    """

    workload: Source
    accounting: str
    block_size: int
    lookup_blocks: int
    distinct_blocks: int
    hit_blocks: int
    curves: list[Curve]

    def ratio(self, hit_blocks: int) -> float | None:
        """Return hits as a share of the blocks looked up; None where there were none."""
        return hit_blocks / self.lookup_blocks if self.lookup_blocks else None


def curve(
    workload: Workload,
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
) -> Curves:
    """Return the hits of each policy by pool size: serial, untimed, shared by prefix.

    In `keys` counting the curve of `lru` comes from one pass over the workload and is exact
    at every size, and so is the optimum at each size asked for; both need the extra `lab`.
    All else is replayed once a size: in `tokens` counting LRU as well, where a prompt's
    partial last block takes room that it gives back, so that a smaller pool need not hold
    what is most recent of a larger one.

    Args:
        workload: where the requests come from.
        policies: one or several, as for `compare`.
        blocks: pool sizes; None: `points` of them.
        points: how many sizes, at even ratios from a thousandth of the footprint to all.
        block_size: tokens a block holds; None: as many as a key of the workload.
        accounting: `keys` or `tokens`, the two accountings.
        recompute: what it costs to compute a block again, as for `compare`.
        seed: of the named policies that have an option `seed` and do not set it.
        jobs: processes that replay; the result does not depend on it.
        plugins: where names are looked up; None: what is installed.
        progress: is told what is done and how much of it; None: nobody is.

    Raises:
        InputError: as for `compare`, fewer than 2 points or than 1 job, or what several jobs
            cannot share.
        PluginError: a plugin that cannot work here, or numba is not installed.
        PolicyError: a policy failed.
    """
    if not isinstance(workload, Workload):
        msg = (
            f"{workload!r:.60} is no workload: give an instance, such as one of "
            "Plugins().build('workload', 'zipf:skew=1.5')"
        )
        raise InputError(msg)
    plugins = plugins or Plugins()
    bench = _CurveMaker(
        Replays(
            workload,
            accounting,
            workload.key_tokens if block_size is None else block_size,
            recompute or default_prefill_cost(),
        ),
        plugins,
        progress or silent,
        jobs,
    )
    return bench.curves(
        candidates_of(policies, plugins, seed),
        None if blocks is None else _checked(blocks),
        points,
    )


def spread_sizes(distinct_blocks: int, points: int) -> list[int]:
    """Return pool sizes at even ratios, from a thousandth of `distinct_blocks` to all.

    Raises:
        InputError: fewer than 2.
    """
    if points < 2:  # noqa: PLR2004
        msg = f"a curve through {points} sizes was asked for; give 2 or more"
        raise InputError(msg)
    steps = (SMALLEST ** (step / (points - 1)) for step in range(points))
    sizes = (max(1, round(distinct_blocks * step / SMALLEST)) for step in steps)
    return list(dict.fromkeys(sizes))


@attrs.define
class _CurveMaker:
    """Computes the curves of one workload."""

    replays: Replays
    plugins: Plugins
    progress: Progress
    jobs: int
    requests: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        """Refuse fewer than one job, and an accounting or block size unfit for the keys."""
        if self.jobs < 1:
            msg = f"{self.jobs} jobs were asked for; give 1 or more"
            raise InputError(msg)
        _ = self.replays.geometry

    def curves(
        self, candidates: list[Candidate], sizes: list[int] | None, points: int
    ) -> Curves:
        """Return one curve for each of `candidates`."""
        workload, accounting = self.replays.workload, self.replays.accounting
        if accounting != "keys" and any(policy.kind is Belady for policy in candidates):
            msg = (
                f"the optimum is known in `keys` accounting alone, not in {accounting!r}: "
                "leave it out"
            )
            raise InputError(msg)
        if sizes is None:
            spread_sizes(1, points)
        digest = workload.digest
        reuse = None
        if any(self._in_one_pass(policy) for policy in candidates):
            reuse = self._reuse()
            bounds = reuse.lookup_blocks, reuse.distinct_blocks, reuse.hit_blocks
        else:
            bounds = self._bounds()
        sizes = sizes or spread_sizes(bounds[1], points)
        made = self._exact(candidates, sizes, reuse) | self._replayed(candidates, sizes)
        return Curves(
            workload=Source(
                name=workload.name,
                digest=digest,
                requests=self.requests,
                key_tokens=workload.key_tokens,
                options=plain(workload.options()),
            ),
            accounting=accounting,
            block_size=self.replays.block_size,
            lookup_blocks=bounds[0],
            distinct_blocks=bounds[1],
            hit_blocks=bounds[2],
            curves=[made[place] for place in range(len(candidates))],
        )

    def _in_one_pass(self, policy: Candidate) -> bool:
        """Return True if one pass over the workload gives the whole curve of `policy`."""
        if self.replays.accounting != "keys":
            return False
        if policy.name != LRU or LRU not in self.plugins.names("eviction"):
            return policy.kind is Belady
        return policy.kind is self.plugins.get("eviction", LRU)

    def _reuse(self) -> Reuse:
        """Read the reuse of the workload's blocks, for LRU and Belady's bound."""
        what = "loading compiled loops (compiled at their first use, then kept on disk)"
        with self.progress(what, None):
            reuse = _compiled()
        with self._reading() as requests:
            return reuse.read(requests, self.replays.geometry)

    def _bounds(self) -> tuple[int, int, int]:
        """Replay without bounds; return blocks looked up, kept in the end, and hit."""
        cache = self.replays.cache(None, MOST_BLOCKS)
        with self._reading() as requests:
            stats = replay(requests, cache)
        return stats.lookup_blocks, cache.tree.cached_blocks, stats.hit_blocks

    def _exact(
        self, candidates: list[Candidate], sizes: list[int], reuse: Reuse | None
    ) -> dict[int, Curve]:
        """Return the curves, by place, of candidates for which one pass is enough."""
        made: dict[int, Curve] = {}
        for place, policy in enumerate(candidates):
            if reuse is None or not self._in_one_pass(policy):
                continue
            steps = None
            if isinstance(policy.make, Belady):
                bypass = policy.make.bypass
                with self.progress("the optimum by size", len(sizes)) as tick:
                    hits = []
                    for size in sizes:
                        hits.append(reuse.optimum(size, bypass=bypass))
                        tick(1)
            else:
                steps = Steps(*reuse.lru())
                hits = [steps.at(size) for size in sizes]
            made[place] = _curve(policy, sizes, hits, steps)
        return made

    def _replayed(self, candidates: list[Candidate], sizes: list[int]) -> dict[int, Curve]:
        """Return the curves, by place, of candidates that need one replay a size."""
        replayed = {
            place: policy.make
            for place, policy in enumerate(candidates)
            if not self._in_one_pass(policy) and not isinstance(policy.make, Belady)
        }
        entries = [(make(), size) for make in replayed.values() for size in sizes]
        hits = [0] * len(entries)
        if entries:
            what = f"replaying {self.replays.workload.name} by size"
            with self.progress(what, len(entries)) as tick:
                for number, stats in self.replays.run_all(entries, self.jobs):
                    hits[number] = stats.hit_blocks
                    tick(1)
        rows = (hits[begin : begin + len(sizes)] for begin in range(0, len(hits), len(sizes)))
        return {
            place: _curve(candidates[place], sizes, row)
            for place, row in zip(replayed, rows, strict=True)
        }

    @contextmanager
    def _reading(self) -> Iterator[Iterable[Request]]:
        """Open the workload's requests, counted and reported as they are read."""
        workload = self.replays.workload
        with self.progress(f"reading {workload.name}", workload.size) as tick:

            def count(done: int) -> None:
                self.requests += done
                tick(done)

            yield ticked(workload, count)


def _curve(
    policy: Candidate, sizes: list[int], hits: list[int], steps: Steps | None = None
) -> Curve:
    return Curve(
        eviction=policy.name, options=policy.options, blocks=sizes, hit_blocks=hits, steps=steps
    )


def _compiled() -> type[Reuse]:
    """Import the class `Reuse`, which needs numba."""
    try:
        from kvcore.analysis._reuse import Reuse  # noqa: PLC0415 - extras, and seconds
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


def _checked(blocks: Iterable[int]) -> list[int]:
    sizes = sorted(set(blocks))
    for size in sizes:
        if not 0 < size <= MOST_BLOCKS:
            msg = (
                f"a pool of {size} blocks was asked for; give 1 or more, at most {MOST_BLOCKS}"
            )
            raise InputError(msg)
    if not sizes:
        msg = "there is no pool to make a curve of: give at least one size"
        raise InputError(msg)
    return sizes


Entry: TypeAlias = tuple[EvictionPolicy, int]
"""A policy that has served no cache yet, and the blocks of its pool."""


Task: TypeAlias = tuple[int, bytes, int]
"""The place of an entry, its policy as another process can have it, and the blocks."""


@attrs.frozen
class Replays:
    """Replays a workload, serial and untimed, each time in a cache of its own.

    Attributes:
        workload: where the requests come from.
        accounting, block_size: how blocks are counted, and a block's tokens.
        recompute: what it costs to compute a block again.
    """

    workload: Workload
    accounting: str
    block_size: int
    recompute: PrefillCost

    @property
    def geometry(self) -> BlockLayout:
        """Layout of requests in blocks."""
        return BlockLayout(self.accounting, self.block_size, self.workload.key_tokens)

    def cache(self, policy: EvictionPolicy | None, blocks: int) -> KVCache:
        """Return a cache that shares prefixes; `policy` None means LRU."""
        return KVCache(
            blocks,
            self.block_size,
            eviction=policy,
            accounting=self.accounting,
            key_tokens=self.workload.key_tokens,
            recompute=self.recompute,
        )

    def run(self, policy: EvictionPolicy, blocks: int) -> CacheStats:
        """Replay under `policy` in a pool of `blocks` blocks."""
        return replay(self.workload, self.cache(policy, blocks))

    def run_all(
        self, entries: Sequence[Entry], jobs: int = 1
    ) -> Iterator[tuple[int, CacheStats]]:
        """Yield (place in `entries`, statistics) of each replay, as they are done.

        With several `jobs` they run in so many processes, none of which outlives the
        generator. What they come to is the same.

        Raises:
            InputError: as for `replay`, or a workload or policy that cannot be sent to
                another process.
            PolicyError: a policy failed.
            PluginError: the processes of a replay died.
        """
        if jobs == 1 or len(entries) < 2:  # noqa: PLR2004
            for place, (policy, blocks) in enumerate(entries):
                yield place, self.run(policy, blocks)
            return
        tasks = [
            (place, self._packed(policy), blocks)
            for place, (policy, blocks) in enumerate(entries)
        ]
        with closing(work_all(_replaying, tasks, jobs)) as done:
            for (place, _, blocks), outcome in done:
                if isinstance(outcome, WorkerDied):
                    msg = (
                        f"the replay of {self.workload.name} with {blocks} blocks failed: "
                        f"{outcome}"
                    )
                    raise PluginError(msg)
                if isinstance(outcome, Exception):
                    raise outcome
                yield place, outcome

    def _packed(self, policy: EvictionPolicy) -> bytes:
        try:
            return pickle.dumps((self, policy))
        except Exception as error:
            msg = (
                f"workload {self.workload.name!r} with policy {policy.name!r} cannot be sent "
                f"to another process ({error}): define their classes at the top of a module, "
                "or use one job"
            )
            raise InputError(msg) from error


def _replaying() -> Callable[[Task], CacheStats | Exception]:
    """Return the function that a worker process calls."""
    return _attempt


def _attempt(task: Task) -> CacheStats | Exception:
    """Run an entry packed by `Replays._packed`; an exception is its outcome."""
    _, parcel, blocks = task
    try:
        replays, policy = pickle.loads(parcel)  # noqa: S301 - of the parent's making
    except Exception as error:  # noqa: BLE001 - whatever the classes do
        return InputError(
            f"the workload or a policy cannot be read by another process ({error}): use one job"
        )
    try:
        stats: CacheStats = replays.run(policy, blocks)
    except Exception as error:  # noqa: BLE001 - raised again by the parent
        return error
    return stats
