"""`kvcore.simulate_cluster`: several servers that share requests, from names."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Unpack

from kvcore.api import Source, flat_options, traced
from kvcore.config import RunConfig
from kvcore.plugins import Plugins
from kvcore.progress import Progress, silent, ticked
from kvcore_cluster.config import ClusterParts
from kvcore_cluster.result import ClusterResult

if TYPE_CHECKING:
    from kvcore_cluster.options import ClusterOptions


def simulate_cluster(
    workload: Source = "mooncake",
    *,
    residency: bool = False,
    trace: str | PathLike[str] | None = None,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[ClusterOptions],
) -> ClusterResult:
    """Serve a workload with several replicas, among which a router divides the requests.

    `kvcore.simulate_cluster("mooncake", replicas=8, router="least-requests")` runs what
    `kvcore simulate --replicas 8` runs. Unlike replicas are tables of options, each with a
    `count`: `replicas=[{"count": 2, "device": "h200"}, {"count": 6, "max_seqs": 64}]`.

    Args:
        workload: the requests: a plugin with options, a file, a workload, or an iterable of
            `Request`.
        residency: whether to measure how long blocks rest, in the caches of `result.lives`.
        trace: the file to write every decision to.
        plugins: the plugins by name; None: those that are installed.
        progress: shows the number of requests that have arrived; None: shows nothing.
        options: options of `RunConfig`, and `batching`, which gives several of them.

    Raises:
        InputError: an option that there is not, parts that do not fit one another, a replica
            that fails and is not there, or a workload out of order.
        PluginError: a plugin that cannot work here.
        PolicyError: a plugin failed, or a scheduler lets nothing run.
    """
    config = RunConfig("simulate", plugins, workload=workload, **flat_options(options))
    parts = ClusterParts(config, plugins)
    source = parts.workload
    with (
        traced(parts, trace) as written,
        (progress or silent)(f"simulating {source.name}", source.size) as tick,
    ):
        return parts.run(written, ticked(source, tick), residency=residency)
