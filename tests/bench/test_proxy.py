"""The latency that the proxy adds to a request, beside a proxy that only forwards."""

import asyncio
import gc
from contextlib import asynccontextmanager
from statistics import quantiles
from time import perf_counter_ns

import aiohttp
import pytest
from aiohttp import web
from helpers.upstreams import prompt, routed

REQUESTS = 2_000

WARM = 200

TEXT = "The quick brown fox jumps over the lazy dog. " * 90
"""About a thousand tokens."""


@asynccontextmanager
async def passing(upstream):
    """Run a minimal proxy that forwards bodies as they come."""
    async with aiohttp.ClientSession(upstream) as session:

        async def forward(http):
            async with session.post(http.path, data=await http.read()) as answer:
                out = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await out.prepare(http)
                while data := await answer.content.readany():
                    await out.write(data)
                return out

        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/completions", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield client
        await runner.cleanup()


async def timed(client, number, *, stream):
    """Return the microseconds of a request."""
    body = prompt(f"{number % 50} {TEXT}", stream=stream)
    start = perf_counter_ns()
    async with client.post("/v1/completions", json=body) as answer:
        await answer.read()
    assert answer.status == 200
    return (perf_counter_ns() - start) / 1_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_the_proxy_adds_a_bounded_latency(stream, traced, tmp_path):
    """The median latency is less than four times that of a proxy that only forwards.

    Requests go one at a time, alternately to the server, to the bare proxy and to this one, all
    in one process. The bound is far above the latency on an idle machine: it is there to notice
    a lookup whose cost grows.
    """

    async def run():
        options = {"router": "dynamo", "health_interval": 60}
        if traced:
            options["trace"] = tmp_path / "day.jsonl.gz"
        times = {"direct": [], "bare": [], "kvcore route": []}
        async with (
            routed(4, **options) as (_, servers, client),
            passing(servers[0].url) as bare,
            aiohttp.ClientSession(servers[0].url) as direct,
        ):
            clients = dict(zip(times, (direct, bare, client), strict=True))
            gc.collect()
            for index in range(WARM + REQUESTS):
                for name, each in clients.items():
                    times[name].append(await timed(each, index, stream=stream))
                for each in servers:
                    each.calls.clear()
                    each.headers.clear()
        return {name: time[WARM:] for name, time in times.items()}

    found = asyncio.run(run())
    marks = {name: quantiles(each, n=100) for name, each in found.items()}
    kind = f"{'stream' if stream else 'whole'}, {'traced' if traced else 'not traced'}"
    for name, mark in marks.items():
        above = [mark[at] - marks["direct"][at] for at in (49, 98)]
        print(
            f"{kind}, {name}: p50 {mark[49]:,.0f} us, p99 {mark[98]:,.0f} us; above direct "
            f"{above[0]:,.0f} and {above[1]:,.0f} us"
        )
    assert marks["kvcore route"][49] < 4 * marks["bare"][49]
