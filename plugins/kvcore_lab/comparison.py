"""Comparison of eviction policies with Belady's bound and an unbounded cache."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import product
from math import lcm
from numbers import Integral
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

import attrs

import kvcore
from kvcore.cache import CheckpointPolicy, EvictionPolicy, KVCache, PrefixIndex, Span
from kvcore.cache.layout import BlockLayout
from kvcore.cache.pool import MOST_BLOCKS
from kvcore.cache.residency import CacheStats
from kvcore.config.options import check_names
from kvcore.errors import InputError, shorten
from kvcore.files import refuse_overwrite
from kvcore.models.cost import PrefillCost, cost_fields, default_prefill_cost
from kvcore.notebook import Shown, data_frame
from kvcore.plugins.manager import Plugins, check_name, resolve
from kvcore.plugins.options import as_text
from kvcore.progress import Progress, Tick, silent, ticked, unseen
from kvcore.request import NO_HINTS, Request
from kvcore.trace import Trace
from kvcore.trace.fields import plain
from kvcore.workloads import Workload, WorkloadSample, check_keys, notes_of
from kvcore.workloads.selection import open_workload
from kvcore_lab.candidates import (
    Candidate,
    Checkpoint,
    Policy,
    candidates_of,
    copies,
    has_bound,
    refuse_bound,
    with_checkpoints,
)
from kvcore_lab.workers import Call, call_all, check_jobs
from kvcore_replay.belady import Belady, Future
from kvcore_replay.savings import prefill_seconds
from kvcore_replay.untimed import hits_of, replay, replay_groups

if TYPE_CHECKING:
    from kvcore_plugins.cache_groups import GroupedCache, LayerGroup

    # Imported when there are prices.
    from kvcore_replay.billing import Bill, Bills
    from kvcore_replay.pricing import PriceModel

__all__ = ["SHARING", "Comparison", "Infinite", "Row", "Source", "compare_policies"]

PARTS = (180, 60, 30, 18, 6)
"""The pool sizes if none are given: the distinct blocks of the workload divided by these."""

HELD_BYTES = 32 << 20
REQUEST_BYTES, KEY_BYTES = 500, 8
"""The most memory in which the requests of a workload are held, and about how much a request
and each of its keys take."""

SHARING = "radix"
"""The prefix cache for which the optimum is a bound; also the default."""


@attrs.frozen(kw_only=True)
class Row:
    """One eviction policy in a pool of one size.

    Attributes:
        eviction, options: name and options of the policy.
        blocks, block_size: blocks of the pool, and tokens of a block.
        requests: number of requests that were replayed.
        lookup_blocks, hit_blocks: blocks looked up, and blocks hit before the first miss.
        hit_ratio: share of the lookups that hit, weighted by `block`, `token` or `request`
            (the mean over requests with a lookup block); None if no block was looked up.
        reused_blocks, reuse_ratio: the same for hits in the pool or in a tier below it; None
            without tiers. For the optimum: the most that any policies of both can reach.
        tiers: transfers and drops of each tier, as from `Tiers.as_dict()`; None without tiers
            and for the optimum.
        saved_s: seconds of prefill that the hits save, at the cost of computing them alone.
        evicted_blocks: blocks that left the cache, for room or because they expired.
        share_of_optimum: hits of the row divided by those of the optimum (without bypass) in
            the same pool; None if the optimum was not run or hits nothing.
        residency: how long blocks stayed, by tier, as from `Residency.as_dict()`, in the time
            of the workload; None if it was not measured and for the optimum.
        bill: the bill of an API that has this cache; None without prices.
        checkpoint: the checkpoint policy of a pool with cache groups, as text; None: none was
            asked for.
        wall_s: seconds that the row took, the reading of the workload included. Rows of the
            optimum share one reading, which is part of no row.
    """

    eviction: str
    options: dict[str, Any]
    blocks: int
    block_size: int
    requests: int
    lookup_blocks: int
    hit_blocks: int
    hit_ratio: dict[str, float | None]
    saved_s: float
    evicted_blocks: int
    share_of_optimum: float | None = None
    reused_blocks: int | None = None
    reuse_ratio: dict[str, float | None] | None = None
    tiers: list[dict[str, Any]] | None = None
    residency: dict[str, Any] | None = None
    bill: Bill | None = None
    checkpoint: str | None = None
    wall_s: float


@attrs.frozen(kw_only=True)
class Infinite:
    """Hits of a cache that never evicts: the upper bound for every pool size.

    Attributes:
        distinct_blocks: blocks in the cache at the end; in `keys` accounting, a pool of that
            size hits as much.
        lookup_blocks, hit_blocks, hit_ratio: the same as in `Row`.
        prefill_s: seconds of prefill of all prompts without a cache, as `saved_s` of a row.
        answers_left_out: requests whose answers have keys, which `keys` accounting leaves out;
            under a clock their blocks are cached too.
    """

    distinct_blocks: int
    lookup_blocks: int
    hit_blocks: int
    hit_ratio: dict[str, float | None]
    prefill_s: float
    answers_left_out: int = 0


@attrs.frozen(kw_only=True)
class Source:
    """The workload of a comparison, without its requests.

    Attributes:
        name, digest, key_tokens, options: those of the workload.
        requests: number of its requests.
        longest_prompt: number of tokens of the longest prompt; 0: it was not measured.
        reported_hit_ratio: the share of the prompt tokens that a log reports as cached; None:
            it does not say.
        notes: what the workload says of the requests that were read.
    """

    name: str
    digest: str
    requests: int
    key_tokens: int
    options: dict[str, Any]
    longest_prompt: int = 0
    reported_hit_ratio: float | None = None
    notes: Sequence[str] = ()

    def read(self, workload: Workload, **found: Any) -> Source:
        """Return this with what `workload` says once it was read, and what was `found`."""
        ratio = workload.reported_hit_ratio
        return attrs.evolve(self, reported_hit_ratio=ratio, notes=notes_of(workload), **found)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them: the ratio if there is one, and no notes."""
        fields = attrs.asdict(self, filter=attrs.filters.exclude("notes"))
        if self.reported_hit_ratio is None:
            del fields["reported_hit_ratio"]
        return fields

    def told(self) -> dict[str, Any]:
        """Return the field of a JSON document that has the notes; none without notes."""
        return {"notes": self.notes} if self.notes else {}

    @classmethod
    def from_workload(cls, workload: Workload) -> Source:
        """Describe `workload`; its requests are not read, and `requests` is 0."""
        return cls(
            name=workload.name,
            digest=workload.digest,
            requests=0,
            key_tokens=workload.key_tokens,
            options=plain(workload.options()),
        )


@attrs.frozen(kw_only=True, repr=False)
class Comparison(Shown):
    """The result of a comparison: one row per policy and size, in the order of the arguments.

    Attributes:
        workload: the workload that was replayed.
        accounting: the accounting of blocks, `keys` or `tokens`.
        rows: the policies.
        infinite: the hits of a cache that never evicts.
        bills: the bills of an API by its own rule and without any cache; None without prices.
    """

    workload: Source
    accounting: str
    rows: list[Row]
    infinite: Infinite
    bills: Bills | None = None

    @property
    def notes(self) -> Sequence[str]:
        """The notes of the workload on the requests that were read."""
        return self.workload.notes

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the rows, with hit ratios in columns of their own.

        Frames of several comparisons have the same columns, and say of what they are.

        Raises:
            PluginError: polars is not installed.
        """
        units = ("block", "token", "request")
        left_out = attrs.filters.exclude(
            "options", "hit_ratio", "reuse_ratio", "residency", "tiers", "bill"
        )
        rows = [
            {"workload": self.workload.name, "digest": self.workload.digest}
            | {"accounting": self.accounting}
            | attrs.asdict(row, filter=left_out)
            | {"options": ",".join(f"{k}={as_text(v)}" for k, v in row.options.items())}
            | {f"hit_ratio_{unit}": ratio for unit, ratio in row.hit_ratio.items()}
            | {f"reuse_ratio_{unit}": (row.reuse_ratio or {}).get(unit) for unit in units}
            | {"bill_usd": None if row.bill is None else row.bill.usd}
            for row in self.rows
        ]
        ratios = (f"{name}_ratio_{unit}" for name in ("hit", "reuse") for unit in units)
        types = {**types_of(Row), **dict.fromkeys((*ratios, "bill_usd"), "float")}
        return data_frame(rows, "`comparison.rows`", types)


class ReplayOptions(TypedDict, total=False):
    """How a workload is replayed, whatever the policy and the size."""

    block_size: int | None
    """Tokens of a block; None: the tokens of a key of the workload."""
    accounting: str
    """`keys`, the default, or `tokens`."""
    prefix: str | PrefixIndex | Callable[[], PrefixIndex]
    """The prefix cache: a name, an instance, a class, or a function; `radix` by default."""
    groups: Iterable[LayerGroup]
    """The cache groups of the pools, for models whose layers keep different things, with blocks
    of their sizes, in `tokens` accounting; prompts are computed in chunks of 8,192 tokens. None
    by default: all layers keep all tokens."""
    checkpoint: Checkpoint | Iterable[Checkpoint] | None
    """The checkpoint policies of these groups: each is compared with each eviction policy.
    None: the default alone. The last row of a size is a bound: what full attention alone could
    hit in the pool."""
    recompute: PrefillCost | None
    """The seconds to compute a block again, for policies that weigh them; None: those of
    Llama 3.1 8B on an H100."""
    tiers: Callable[[Any], object] | None
    """Puts tiers below a cache, as `Tiers(cache, ...)` does, and `GroupTiers` below one of
    cache groups, new ones for each row; None: no tiers. Loads from them take no time, since no
    clock runs."""


def compare_policies(
    workload: Workload | Iterable[Request] | str | os.PathLike[str],
    policies: Policy | Iterable[Policy],
    blocks: int | Iterable[int] | None = None,
    *,
    seed: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    residency: bool = False,
    price: PriceModel | str | None = None,
    jobs: int = 1,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[ReplayOptions],
) -> Comparison:
    """Compare policies as `kvcore.compare` does, which builds these arguments from options.

    The workload is read once for each row, unless its requests take less than `HELD_BYTES`:
    then they are held in memory. A row takes the memory of one cache. Equal policies and equal
    sizes are run once.

    Arguments and errors are those of `kvcore.compare`, except that `seed` is that of policies
    alone, and that `options` are those of `ReplayOptions`.
    """
    plugins = plugins or Plugins()
    requested: Workload = open_workload(workload, plugins)
    setup = ReplaySetup.from_workload(requested, plugins, **options)
    if setup.groups:
        alone = options.get("prefix", SHARING) == SHARING
        if setup.geometry.accounting != "tokens" or residency or price or trace or not alone:
            msg = (
                "cache groups are compared by their hits, in tokens: give accounting='tokens', "
                "and leave prefix, price, trace and residency out"
            )
            raise InputError(msg)
    candidates = candidates_of(policies, plugins, seed)
    sizes = None if blocks is None else pool_sizes(blocks, "to compare in")
    _check(candidates, sizes, setup, trace)
    candidates = _in_groups(candidates, options.get("checkpoint"), setup, plugins)
    check_jobs(jobs)
    if trace is not None:
        refuse_overwrite(trace, requested.options().values())
    source = Source.from_workload(requested)
    if isinstance(price, str):
        from kvcore_replay.pricing import find_price  # noqa: PLC0415 - for prices alone

        price = find_price(price)
    maker = _RowMaker(setup, residency, price)
    replays = 1 + len(candidates) * len(PARTS if sizes is None else sizes)
    steps = None if requested.size is None else requested.size * replays
    with (progress or silent)(f"comparing on {requested.name}", steps) as maker.tick:
        infinite = maker.infinite(bounded=has_bound(candidates))
        if sizes is None:
            sizes = default_sizes(infinite.distinct_blocks)
        if trace is None:
            rows = maker.rows(candidates, sizes, jobs)
        else:
            cost = cost_fields(setup.recompute)
            with Trace(trace, workload=setup.workload, seed=seed, recompute=cost) as decisions:
                rows = [maker.row(candidates[0], sizes[0], decisions)]
    source = source.read(requested, **maker.reading.lengths())
    bills = None
    if price is not None:
        from kvcore_replay.billing import bill  # noqa: PLC0415 - as above

        bills = bill(requested, price)
    return Comparison(
        workload=source,
        accounting=setup.geometry.accounting,
        rows=_with_shares(rows),
        infinite=infinite,
        bills=bills,
    )


def default_sizes(distinct_blocks: int) -> list[int]:
    """Return pool sizes from tight to roomy for a workload, of one digit and zeros."""
    sizes = (distinct_blocks // part for part in PARTS)
    return list(dict.fromkeys(max(1, round(size, 1 - len(str(size)))) for size in sizes))


@attrs.frozen(slots=False)
class ReplaySetup:
    """A workload and all settings of its untimed replays but the policy and the pool size.

    Attributes:
        workload: the source of the requests; they are held if they take little memory.
        geometry: the layout of their keys in blocks.
        recompute: the seconds to compute a block again.
        make_prefix: builds a prefix cache.
        put_tiers: puts tiers below a cache; None: no tiers.
        groups: the cache groups; empty: there is one.
    """

    workload: KeptWorkload
    geometry: BlockLayout
    recompute: PrefillCost
    make_prefix: Callable[[], PrefixIndex]
    put_tiers: Callable[[Any], object] | None = None
    groups: tuple[LayerGroup, ...] = ()

    @classmethod
    def from_workload(
        cls, workload: Workload, plugins: Plugins, **options: Unpack[ReplayOptions]
    ) -> ReplaySetup:
        """Return the setup of a workload.

        Raises:
            InputError: no workload, an unknown option, or an accounting or block size that
                does not fit its keys.
            PluginError: the workload has no name, or the prefix cache cannot be used here.
        """
        if not isinstance(workload, Workload):
            msg = (
                f"{shorten(repr(workload))} is no workload: give requests, or an instance "
                "such as one of Plugins().build('workload', 'zipf:skew=1.5')"
            )
            raise InputError(msg)
        check_name(workload)
        check_names(options, ReplayOptions.__annotations__)
        keys = workload.key_tokens
        block_size, groups = options.get("block_size"), tuple(options.get("groups", ()))
        if groups:
            block_size = lcm(*(group.block_size for group in groups))
        prefix = options.get("prefix", SHARING)
        return cls(
            workload=KeptWorkload(workload),
            geometry=BlockLayout(
                options.get("accounting", "keys"),
                keys if block_size is None else block_size,
                keys,
            ),
            recompute=options.get("recompute") or default_prefill_cost(),
            make_prefix=partial(resolve, "prefix", copies(prefix), plugins=plugins),
            put_tiers=options.get("tiers"),
            groups=groups,
        )

    def cache(
        self, eviction: EvictionPolicy, blocks: int, trace: Trace | None = None
    ) -> KVCache:
        """Return an empty cache of `blocks` blocks under `eviction`."""
        return KVCache(
            blocks,
            self.geometry.block_size,
            eviction=eviction,
            prefix=self.make_prefix(),
            accounting=self.geometry.accounting,
            key_tokens=self.geometry.key_tokens,
            trace=trace,
            recompute=self.recompute,
        )

    def grouped(
        self, eviction: EvictionPolicy, blocks: int, checkpoint: CheckpointPolicy | None = None
    ) -> GroupedCache:
        """Return an empty cache of groups under `eviction`, and a policy of checkpoints."""
        from kvcore_plugins.cache_groups import GroupPlan  # noqa: PLC0415 - hybrid models alone

        cache = GroupPlan(self.groups, 0).cache(
            blocks,
            eviction=eviction,
            prefix=None,
            recompute=self.recompute,
            checkpoint=checkpoint or CheckpointPolicy(),
            key_tokens=self.geometry.key_tokens,
        )
        if self.put_tiers is not None:
            self.put_tiers(cache)
        return cache

    def attention_blocks(self, blocks: int) -> int:
        """Return how many blocks of all groups a pool has if it keeps full attention alone."""
        size = self.geometry.block_size
        taken = sum(size // group.block_size for group in self.groups if group.kind == "full")
        return blocks // taken if taken else MOST_BLOCKS

    @cached_property
    def slots(self) -> int:
        """Number of slots in all tiers below a cache together."""
        if self.put_tiers is None:
            return 0
        cache = self.cache(_NoEviction(), 1)
        self.put_tiers(cache)
        return sum(tier["slots"] for tier in cache.tiers.as_dict()) if cache.tiers else 0

    def unbounded(self, requests: Iterable[Request]) -> tuple[CacheStats, int]:
        """Replay in a cache that never evicts; return its counts and its final blocks."""
        if self.groups:
            groups = kvcore.GroupedCache(
                self.groups, MOST_BLOCKS, key_tokens=self.geometry.key_tokens
            )
            replay_groups(requests, groups)
            return groups.stats, groups.unpinned_blocks
        cache = self.cache(_NoEviction(), MOST_BLOCKS)
        return replay(requests, cache), cache.tree.cached_blocks


def types_of(rows: type) -> dict[str, str]:
    """Return the types of the fields of an attrs class that are text or numbers, or None."""
    types = ((f.name, str(f.type).removesuffix(" | None")) for f in attrs.fields(rows))
    return {name: kind for name, kind in types if kind in ("str", "int", "float", "bool")}


def _bytes_of(request: Request) -> int:
    """Return about the bytes of memory that a request takes."""
    return REQUEST_BYTES + KEY_BYTES * len(request.keys)


class KeptWorkload(WorkloadSample):
    """A workload that is read once: its requests are kept if they take little memory.

    All else is that of the workload itself, its digest and options too. A process that is no
    fork of this one gets none of the requests, and reads the workload itself.
    """

    def __init__(self, source: Workload) -> None:
        super().__init__(source)
        self._kept: list[Request] = []

    def __reduce__(self) -> tuple[type[KeptWorkload], tuple[Workload]]:
        """Pickle the workload without its requests."""
        return KeptWorkload, (self.source,)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests, kept ones if there are any."""
        return iter(self._kept) if self._kept else self._read()

    def _read(self) -> Iterator[Request]:
        # A second reading may begin before the first has ended: each counts what is its own.
        kept: list[Request] = []
        size = 0
        for request in self.source:
            size += _bytes_of(request)
            if size <= HELD_BYTES:
                kept.append(request)
            else:
                kept.clear()
            yield request
        self._kept = kept

    def hold(self) -> None:
        """Read the requests and keep them, unless they take much memory."""
        size = 0
        for request in () if self._kept else self._read():
            size += _bytes_of(request)
            if size > HELD_BYTES:
                break

    def release(self) -> None:
        """Keep no requests, until they are read again."""
        self._kept = []

    @property
    def digest(self) -> str:
        """The digest of the workload."""
        return self.source.digest

    def options(self) -> dict[str, Any]:
        """Return the options of the workload."""
        return self.source.options()


@attrs.define
class Reading:
    """Figures of the requests of a workload, found when they are first read.

    Attributes:
        prompts: tokens of the prompt of each request.
        answers: number of requests whose answers have keys.
        hinted: whether a pool may do something else for the hints of a request.
    """

    prompts: array[int] = attrs.field(repr=False, factory=partial(array, "q"))
    answers: int = 0
    hinted: bool = False

    def of(self, workload: Workload) -> Iterator[Request]:
        """Yield the requests of `workload`, checked, and look at each."""
        for request in check_keys(workload):
            self.prompts.append(request.prompt_tokens)
            self.answers += bool(request.output_keys)
            self.hinted = self.hinted or is_hinted(request)
            yield request

    def lengths(self) -> dict[str, int]:
        """Return the fields of a `Source` that were found."""
        return {
            "requests": len(self.prompts),
            "longest_prompt": max(self.prompts, default=0),
        }

    def left_out(self, accounting: str) -> int:
        """Return the number of answers that an accounting leaves out."""
        return self.answers if accounting == "keys" else 0


def is_hinted(request: Request) -> bool:
    """Return True if a pool may do something else for the hints of a request."""
    hints = request.hints
    return hints is not NO_HINTS and attrs.evolve(hints, prefetch=None) != NO_HINTS


@attrs.define
class _RowMaker:
    """Makes the rows of a comparison: one replay of the workload each."""

    setup: ReplaySetup
    residency: bool
    price: PriceModel | None
    tick: Tick = attrs.field(default=unseen, repr=False)
    future: Future | None = None
    reading: Reading = attrs.field(factory=Reading)

    def infinite(self, *, bounded: bool) -> Infinite:
        """Return the hits of a cache without bounds.

        With `bounded`, for comparisons with Belady's bound, they follow from the future that
        the bound needs anyway; else from a replay.
        """
        requests = ticked(self.reading.of(self.setup.workload), self.tick)
        if bounded:
            geometry = self.setup.geometry
            self.future = future = Future.read(requests, geometry)
            stats = future.stats(future.reused, geometry.block_size)
            distinct = stats.lookup_blocks - stats.hit_blocks
            if self.setup.groups:
                # The optimum with memory for all: windows and states at each block.
                distinct *= len(self.setup.groups)
                _, stats = self._limited(future.reused)
        else:
            stats, distinct = self.setup.unbounded(requests)
        return Infinite(
            distinct_blocks=distinct,
            lookup_blocks=stats.lookup_blocks,
            hit_blocks=stats.hit_blocks,
            hit_ratio=stats.ratios(),
            prefill_s=round(prefill_seconds(self.setup.recompute, self.reading.prompts), 3),
            answers_left_out=self.reading.left_out(self.setup.geometry.accounting),
        )

    def rows(self, policies: list[Candidate], sizes: list[int], jobs: int) -> list[Row]:
        """Return the row of each policy in a pool of each size, made by `jobs` processes."""
        pairs = list(product(policies, sizes))
        # The future that the bound needs is read in this process: it takes more memory than a
        # row.
        sent = [n for n, pair in enumerate(pairs) if pair[0].optimum is None and jobs > 1]
        made: dict[int, Row] = {}
        for place, row in call_all([self._call(*pairs[n]) for n in sent], jobs):
            made[sent[place]] = row
            self.tick(row.requests)
        return [made[n] if n in made else self.row(*pair) for n, pair in enumerate(pairs)]

    def _call(self, policy: Candidate, blocks: int) -> Call[Row]:
        """Return the call that makes the row of a policy, in this process or another."""
        name, prefix = self.setup.workload.name, partial(_prebuilt, self.setup.make_prefix())
        setup = attrs.evolve(self.setup, make_prefix=prefix)
        sent = attrs.evolve(self, setup=setup, tick=unseen, future=None)
        built = attrs.evolve(
            policy,
            make=partial(_prebuilt, policy.build()),
            make_checkpoint=partial(_prebuilt, policy.make_checkpoint()),
        )
        return Call(
            partial(sent.row, built, blocks),
            f"the replay of {name} with {blocks} blocks and policy {policy.name!r}",
        )

    def row(self, policy: Candidate, blocks: int, trace: Trace | None = None) -> Row:
        """Replay under one policy in a pool of one size."""
        begin = perf_counter()
        cache: KVCache | GroupedCache | None = None
        reused: CacheStats | None = None
        charged = None
        hits: Sequence[int]
        if policy.optimum is not None:
            hits, stats, evicted = self._optimum(policy.optimum, blocks)
            self.tick(len(hits))
            read = hits
            if self.setup.slots:
                # Pool and tiers hit at most what one cache hits that need not keep its prompts.
                most = blocks + self.setup.slots
                read, reused, _ = self._optimum(Belady(bypass=True), most)
            if self.price is not None:
                charged = self._bill(zip(self.setup.workload, read, strict=True))
        elif self.setup.groups:
            cache = self.setup.grouped(policy.build(), blocks, policy.make_checkpoint())
            hits = replay_groups(ticked(self.setup.workload, self.tick), cache)
            stats, evicted = cache.stats, cache.evicted_blocks
        else:
            cache = self.setup.cache(policy.build(), blocks, trace)
            if self.setup.put_tiers is not None:
                self.setup.put_tiers(cache)
            if self.residency:
                cache.record_residency()
            loaded = None if cache.tiers is None or self.price is None else array("q")
            hits = hits_of(ticked(self.setup.workload, self.tick), cache, loaded)
            stats = cache.stats
            if self.price is not None:
                reads = hits if loaded is None else map(add, hits, loaded)
                charged = self._bill(zip(self.setup.workload, reads, strict=True))
            evicted = cache.tree.evicted_blocks + cache.tree.expired_blocks
        tiers: Any = None if cache is None else cache.tiers
        if tiers is not None:
            reused = tiers.hit_stats()
        return Row(
            eviction=policy.name,
            options=policy.options,
            blocks=blocks,
            block_size=self.setup.geometry.block_size,
            requests=stats.requests,
            lookup_blocks=stats.lookup_blocks,
            hit_blocks=stats.hit_blocks,
            hit_ratio=stats.ratios(),
            saved_s=self._saved(hits),
            evicted_blocks=evicted,
            reused_blocks=None if reused is None else reused.hit_blocks,
            reuse_ratio=None if reused is None else reused.ratios(),
            tiers=None if tiers is None else tiers.as_dict(),
            residency=None if cache is None else cache.residency_by_tier(),
            bill=charged,
            checkpoint=policy.checkpoint,
            wall_s=round(perf_counter() - begin, 6),
        )

    def _optimum(self, bound: Belady, blocks: int) -> tuple[array[int], CacheStats, int]:
        """Return the hits of a bound in a pool, their statistics, and the evicted blocks."""
        assert self.future is not None, "`infinite` has read it"
        if self.setup.groups:
            pool = self.setup.attention_blocks(blocks)
            hits, evicted = bound.hits(self.future, pool)
            return *self._limited(hits), evicted
        hits, evicted = bound.hits(self.future, blocks)
        return hits, self.future.stats(hits, self.setup.geometry.block_size), evicted

    def _limited(self, hits: Iterable[int]) -> tuple[array[int], CacheStats]:
        """Return `hits` without the blocks of last tokens of prompts, and their statistics."""
        geometry, limited, stats = self.setup.geometry, array("i"), CacheStats()
        for request, hit in zip(self.setup.workload, hits, strict=True):
            _, tokens, _, _, lookup, limit = geometry.lay_out(request)
            limited.append(min(hit, limit))
            reused = limited[-1]
            stats.admitted(lookup, reused, tokens, reused * geometry.block_size, resumed=False)
        return limited, stats

    def _saved(self, hits: Iterable[int]) -> float:
        """Return the seconds of prefill of requests that hit these numbers of blocks each.

        The last block of a prompt, which hits in `keys` accounting, may be a part of one.
        """
        size = self.setup.geometry.block_size
        pairs = zip(hits, self.reading.prompts, strict=True)
        lengths = [min(size * hit, prompt) for hit, prompt in pairs]
        return round(prefill_seconds(self.setup.recompute, lengths), 3)

    def _bill(self, hits: Iterable[tuple[Request, int]]) -> Bill:
        """Return the bill of requests; each comes with the number of blocks that it reads."""
        from kvcore_replay.billing import Bill, hit_charge  # noqa: PLC0415 - for prices alone

        size = self.setup.geometry.block_size
        assert self.price is not None
        price = self.price
        return Bill.from_charges(
            price, (hit_charge(price, charge, hit * size) for charge, hit in hits)
        )


def _prebuilt(part: Any) -> Any:
    """Return `part`: with `partial`, a function that builds it and can be pickled."""
    return part


@attrs.define(slots=False, eq=False)
class _NoEviction(EvictionPolicy):
    """The policy of a cache that never evicts."""

    name: ClassVar[str] = "no eviction"

    def victim(self, now: int) -> Span:
        """Raise LookupError: even the largest possible pool is full."""
        del now
        msg = f"the workload has more than {MOST_BLOCKS} distinct blocks"
        raise LookupError(msg)


def pool_sizes(blocks: int | Iterable[int], purpose: str) -> list[int]:
    """Return pool sizes without repetitions.

    `purpose` completes the error message for no size: `to compare in`.

    Raises:
        InputError: a size that no pool can have, or no size.
    """
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        blocks = [blocks]
    sizes: list[Any] = list(blocks)
    for size in sizes:
        is_whole = isinstance(size, Integral) and not isinstance(size, bool)
        if not is_whole or not 0 < size <= MOST_BLOCKS:
            msg = (
                f"a pool of {size!r} blocks was asked for; give 1 or more, at most "
                f"{MOST_BLOCKS}"
            )
            raise InputError(msg)
    if not sizes:
        msg = f"there is no pool {purpose}: give at least one size"
        raise InputError(msg)
    return list(dict.fromkeys(map(int, sizes)))


def _in_groups(
    candidates: list[Candidate],
    checkpoints: Checkpoint | Iterable[Checkpoint] | None,
    setup: ReplaySetup,
    plugins: Plugins,
) -> list[Candidate]:
    """Return candidates with each checkpoint policy, and the bound of cache groups, if any.

    Raises:
        InputError, PluginError: as `with_checkpoints`; or there are no groups, or two policies
            both choose what leaves.
    """
    if not setup.groups:
        if checkpoints is None:
            return candidates
        msg = (
            "checkpoint policies are those of cache groups: give the memory of a pool of a "
            "model that has them, in tokens accounting"
        )
        raise InputError(msg)
    if checkpoints is None:
        return [*candidates, Candidate.bound(Belady(bypass=True))]
    candidates = with_checkpoints(candidates, checkpoints, plugins)
    bare = attrs.evolve(setup, put_tiers=None)
    for policy in candidates:
        if policy.optimum is None:  # a pair that no cache takes is refused before any replay
            bare.grouped(policy.build(), MOST_BLOCKS, policy.make_checkpoint())
    return candidates


def _check(
    candidates: list[Candidate],
    sizes: list[int] | None,
    setup: ReplaySetup,
    trace: str | os.PathLike[str] | None,
) -> None:
    """Refuse combinations of arguments that have no meaning."""
    refuse_bound(candidates, setup.geometry.accounting)
    optimum = has_bound(candidates)
    prefix = getattr(setup.make_prefix(), "name", None) if optimum else SHARING
    if prefix != SHARING:
        msg = (
            f"the optimum is a bound for sharing by prefix, as {SHARING!r} does it; it says "
            f"nothing of prefix cache {prefix!r}: leave it out"
        )
        raise InputError(msg)
    if trace is None:
        return
    if sizes is None or len(candidates) * len(sizes) > 1:
        count = "none" if sizes is None else len(sizes)
        msg = (
            "a trace is of one policy in a pool of one size: "
            f"policies given: {len(candidates)}, sizes given: {count}"
        )
        raise InputError(msg)
    if optimum:
        msg = "the optimum is a bound and decides nothing: there is no trace of it"
        raise InputError(msg)


def _with_shares(rows: list[Row]) -> list[Row]:
    """Return the rows, each with its share of the hits of the optimum in the same pool."""
    optimum = Belady()
    best = {
        row.blocks: row.hit_blocks
        for row in rows
        if (row.eviction, row.options) == (optimum.name, optimum.options())
    }
    return [
        attrs.evolve(row, share_of_optimum=row.hit_blocks / best[row.blocks])
        if best.get(row.blocks)
        else row
        for row in rows
    ]
