"""Recordings of small runs: a replay without a clock, and a simulation in steps of 10 ns."""

from helpers.schedulers import scheduler_of
from helpers.serving import BLOCK, Even, Tally, batching_of
from helpers.traces import ask as ask_for
from helpers.traces import lines

from kvcore import KVCache, Plugins, Trace
from kvcore.hookspecs import hookimpl
from kvcore.serving import simulate
from kvcore_plugins.eviction import LRU
from kvcore_replay.untimed import replay


class StepModels:
    """The latency models of these tests, as a plugin."""

    @hookimpl
    def kvcore_latency_models(self):
        """Return the latency models."""
        return [Even, Tally]


PLUGINS = Plugins(extra=[StepModels()])


def untimed(path, texts, blocks=4, **cache):
    """Record a replay of a request per text, with a block per letter, all arriving at once."""
    with Trace(path) as trace:
        cache = KVCache(blocks, 4, eviction=LRU(), accounting="keys", trace=trace, **cache)
        replay([ask_for(index, text) for index, text in enumerate(texts)], cache)
    return path


def timed(path, requests, *, blocks=100, latency=None, header=None, **options):
    """Record a simulation by FCFS with steps of 10 ns, and return the path."""
    caps = batching_of(**{"watermark": 0} | options.pop("batching", {}))
    with Trace(path, seed=5, **header or {}) as trace:
        simulate(
            requests,
            cache=KVCache(blocks, BLOCK, eviction=LRU(), trace=trace),
            scheduler=scheduler_of("fcfs"),
            latency=Even() if latency is None else latency,
            batching=caps,
            **options,
        )
    return path


def ended(path):
    """Return by request the time (ns) at which it finished."""
    return {e["request"]: e["t"] for e in lines(path) if e["event"] == "FINISH"}
