"""The real SGLang beside kvcore under `--like sglang`: hits, and orders of a queue."""

from __future__ import annotations

import os
from importlib.util import find_spec
from random import Random

import pytest
from helpers.cache_streams import CONVERSATION, STREAMS, SYNTHETIC, KvcoreCache, digest, hits_of
from helpers.jobs import job
from helpers.requests import keyed

from kvcore.plugins import Plugins
from kvcore.serving import LoopState

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from helpers.sglang_engine import SglangCache, order

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the package

CORES = ("radix", "python", "rust")
QUEUES = 60
LIMIT = 128
"""Most waiting requests that SGLang orders by their hits."""
TOKENS = 600
"""Longest prompt of a random queue."""


def ask(draw, number, stems):
    """Return a request that begins with a part of one of `stems`, with a key per token."""
    stem = stems[draw.randrange(len(stems))]
    shared = stem[: draw.randint(0, len(stem))]
    keys = [*shared, *((number, index) for index in range(draw.randint(1, TOKENS // 2)))]
    return keyed(number, keys, 1, output_tokens=1)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("stream", STREAMS[CONVERSATION], ids=str)
def test_sglang_has_the_recorded_hits(stream, core):
    """Each of SGLang's three caches has the recorded hits of the golden tests."""
    assert (
        digest(hits_of(stream, SglangCache(stream.blocks, core)))
        == STREAMS[CONVERSATION][stream]
    )


@pytest.mark.skipif("KVCORE_MOONCAKE_SYNTHETIC" not in os.environ, reason="no such trace")
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("stream", STREAMS[SYNTHETIC], ids=str)
def test_a_held_out_trace_hits_as_in_sglang(stream, core):
    """SGLang's three caches hit the same as kvcore on the synthetic trace of Mooncake."""
    found = digest(hits_of(stream, SglangCache(stream.blocks, core)))
    assert found == STREAMS[SYNTHETIC][stream]
    assert found == digest(hits_of(stream, KvcoreCache.like("sglang", stream.blocks)))


class _Server:
    """The state of a server that `lpm` reads: the hits of a prompt in a cache."""

    def __init__(self, cache):
        self.probe = cache.probe


@pytest.mark.parametrize("seed", range(QUEUES))
def test_lpm_orders_a_queue_as_sglang_does(seed):
    """`lpm` orders a queue as SGLang does, given equal caches.

    Queues have up to 200 waiting requests. Beyond SGLang's limit of 128 they stay in the order
    of arrival; below it they do not.
    """
    draw = Random(seed)
    stems = [[("stem", name, index) for index in range(TOKENS)] for name in range(12)]
    waiting = draw.choice((30, 128, 129, 200))
    requests = [ask(draw, index, stems) for index in range(waiting + waiting // 3)]
    served, queue = requests[:-waiting], requests[-waiting:]
    options = Plugins().get("rules", "sglang").defaults
    ours = KvcoreCache(20_000, 1, options["eviction"], options["prefix"])
    theirs = SglangCache(20_000, "radix")
    for cache in (ours, theirs):
        for request in served:
            cache.close(cache.open(request)[0], generates=False)
    scheduler = Plugins().build("scheduler", options["scheduler"])
    jobs = [job(request, serial) for serial, request in enumerate(queue, 1)]
    plan = scheduler.plan(LoopState(0, jobs, [], 256, 0, _Server(ours.cache)))
    ordered = [each.request.id for each in plan.admit]
    assert ordered == order(theirs, queue)
    assert (ordered == sorted(ordered)) is (waiting > LIMIT)
