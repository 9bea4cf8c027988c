"""Functions that serve and check clusters of small servers, and routers for tests."""

from io import BytesIO
from random import Random
from typing import Any, ClassVar

import attrs
import orjson
from helpers.policies import build
from helpers.schedulers import scheduler_of
from helpers.serving import BLOCK, SLOT, Bent, Even, batching_of

from kvcore import KVCache, Router, Trace
from kvcore import simulate_cluster as simulate_recorded
from kvcore_cluster.cluster import Failure
from kvcore_cluster.phases import Split
from kvcore_cluster.simulate import simulate_cluster
from kvcore_cluster.trace import ClusterTrace
from kvcore_cluster.views import parse_view
from kvcore_plugins.cache_groups import GroupedCache
from kvcore_tiers.hierarchy import Tiers


@attrs.define(eq=False)
class Longest(Router):
    """A router by the longest cached prefix, which records the replicas that it saw."""

    name: ClassVar[str] = "longest"
    saw: dict[Any, list[Any]] = attrs.field(factory=dict, init=False)

    def route(self, request, replicas, now):
        """Record all replicas, and return the least busy of those that cache the most."""
        self.saw.setdefault(request.id, []).append(
            (
                now,
                [
                    (replica.number, replica.hit_tokens, round(replica.usage, 9))
                    for replica in replicas
                ],
            )
        )
        return min(
            replicas,
            key=lambda each: (-each.hit_tokens, each.usage, each.requests, each.number),
        )


@attrs.define(eq=False)
class RandomRouter(Router):
    """A router that draws replicas by the id of a request, and refuses one in `refuses`."""

    name: ClassVar[str] = "lot"
    uses_hits: ClassVar[bool] = False
    refuses: int = 0

    def route(self, request, replicas, now):
        """Return a random replica, or None."""
        random = Random(f"{request.id}")
        if self.refuses and not random.randrange(self.refuses):
            return None
        return replicas[random.randrange(len(replicas))]


@attrs.frozen
class ClusterRun:
    """The result and the trace of a served cluster.

    Attributes:
        result: the result of the simulation.
        trace: the bytes of the trace; None without one.
    """

    result: Any
    trace: bytes | None

    @property
    def lines(self):
        """The lines of the trace between HEADER and END, as dicts."""
        return [orjson.loads(line) for line in self.trace.splitlines()[1:-1]]

    @property
    def body(self):
        """The lines of the trace between HEADER and END, as bytes."""
        return self.trace.splitlines()[1:-1]

    def of(self, event):
        """Return the lines of `event`."""
        return [line for line in self.lines if line["event"] == event]


def serve_cluster(
    requests,
    replicas=2,
    *,
    router=None,
    view="index",
    failures=(),
    blocks=1000,
    block_size=BLOCK,
    key_tokens=None,
    groups=(),
    eviction="lru",
    scheduler="fcfs",
    latency=Even,
    tiers=(),
    retention=None,
    trace=True,
    rate_scale=1.0,
    split=None,
    decode_router=None,
    layers=4,
    drafter=None,
    planner=None,
    **batching,
):
    """Serve `requests` with equal replicas, and check that no block is lost.

    `view` is a view or its text; `scheduler` is a name or a function that makes one; `failures`
    are texts or failures; a block has 64 bytes. `split` is the text of split phases. With
    `groups` the caches are of these groups.
    """
    phases = None
    if split is not None:
        pools = Split.parse(split)
        replicas = pools.replicas
        phases = {
            "split": pools,
            "decode_router": Longest() if decode_router is None else decode_router,
            "decode_view": parse_view(view),
            "block_bytes": SLOT,
            "layers": layers,
        }
    out = BytesIO()
    merged = ClusterTrace(Trace(out, mode="model")) if trace else None

    def parts(recorder):
        cache = KVCache(
            blocks,
            block_size,
            eviction=build(eviction),
            retention=None if retention is None else retention(),
            accounting="tokens",
            key_tokens=block_size if key_tokens is None else key_tokens,
            trace=recorder,
        )
        if groups:
            cache = GroupedCache(groups, blocks, checkpoint="chunk", trace=recorder)
        if tiers:
            Tiers(cache, tiers, SLOT)
        return {
            "cache": cache,
            "scheduler": scheduler() if callable(scheduler) else scheduler_of(scheduler),
            "latency": latency(),
            "batching": batching_of(**{"watermark": 0} | batching),
            "drafter": None if drafter is None else drafter(),
        }

    result = simulate_cluster(
        requests,
        [parts] * replicas,
        Longest() if router is None else router,
        parse_view(view) if isinstance(view, str) else view,
        failures=[
            Failure.parse(failure) if isinstance(failure, str) else failure
            for failure in failures
        ],
        rate_scale=rate_scale,
        phases=phases,
        planner=planner,
        trace=merged,
    )
    if merged is not None:
        merged._trace.close()
    for lives in result.lives:
        # Without a trace, growth is only counted, and a failed replica does not return it.
        for life in lives if trace else lives[-1:]:
            life.cache.check_integrity()
        last = lives[-1].cache
        assert not last.sequences
        cached = last.unpinned_blocks if groups else last.tree.cached_blocks
        assert last.pool.free_blocks + cached == last.pool.blocks
    return ClusterRun(result, out.getvalue() if trace else None)


def serve_server(server, replicas=2, *, scheduler="fcfs", latency=Bent, **options):
    """Serve the requests of a `helpers.serving.Server` with several replicas of it."""
    given = server.options | options
    return serve_cluster(
        server.requests,
        replicas,
        scheduler=scheduler,
        eviction=server.eviction,
        tiers=server.tiers,
        latency=lambda: latency(reach=server.windows),
        **given,
    )


@attrs.define(eq=False)
class Fewest(Router):
    """A router by the fewest requests, which receives cache hits but does not use them."""

    name: ClassVar[str] = "fewest"

    def cost(self, request, replica):
        """Return the number of requests on a replica."""
        del request
        return replica.requests


ZIPF = "zipf:requests=30,prefixes=4,prefix_tokens=64,suffix_tokens=32,output_tokens=8,rate=50"


def record_cluster(path, **options):
    """Record a cluster of three replicas, one of which fails and recovers; return `path`.

    Its pools are too small, so blocks are evicted; the requests of the failed replica are
    served again elsewhere, and the router's view is exact.
    """
    given = {"replicas": 3, "router": Fewest, "view": "exact", "blocks": 20}
    given |= {"tensor_parallel": 1, "fail": "replica=1,at=0.3,for=0.1"}
    simulate_recorded(ZIPF, trace=path, **(given | options))
    return path
