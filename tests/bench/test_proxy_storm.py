"""Ten thousand requests through real servers, of which one is killed and restarted."""

import asyncio
from random import Random
from time import perf_counter

import aiohttp
import pytest
from helpers.online import SMALL
from helpers.processes import Program
from helpers.storm import storm, text
from helpers.upstreams import until

from kvcore.trace import TraceWorkload

CONFIG = """
router = "dynamo"
port = 0
trace = "day.jsonl.gz"
client_timeout = 2
health_interval = 0.5
concurrency = 64
"""

MOST_MEMORY = 250 << 20
"""Bytes that the proxy may have; 60 MB are Python, aiohttp and kvcore."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "requests", "kills"), [(2, 400, 1), (4, 10_000, 5)], ids=["few", "many"]
)
def test_each_request_is_answered_once_or_refused(servers, requests, kills, tmp_path):
    """While a server is killed at random times, and clients misbehave.

    No server keeps a sequence: it ends with 0 only if its cache is whole and nothing is open.
    """
    random, sent = Random(1), 0
    moments = sorted(random.sample(range(requests // 10, requests * 9 // 10), kills))

    def body(number):
        nonlocal sent
        sent = number
        return text(number)

    async def trouble(victim):
        for moment in moments:
            await until(lambda moment=moment: sent >= moment, seconds=300)
            await victim.kill()
            await asyncio.sleep(random.uniform(0, 1))
            await victim.start()

    async def run():
        programs = [Program("serve", "--port", 0, "--generator", SMALL) for _ in range(servers)]
        path = tmp_path / "replicas.toml"
        try:
            await asyncio.gather(*(each.start() for each in programs))
            tables = [f'[[replicas]]\nurl = "{each.url}"' for each in programs]
            path.write_text("\n".join([CONFIG, *tables]))
            proxy = await Program("route", "--config", path).start()
            programs.append(proxy)
            begin, work = perf_counter(), asyncio.create_task(trouble(programs[0]))
            found = await storm(proxy.url, requests, at_once=24, body=body)
            seconds = perf_counter() - begin
            await work
            await settled(proxy.url)
            memory = proxy.memory()
            lost = proxy.told.count(b" is down")
            codes = await asyncio.gather(*(each.stop() for each in programs))
        finally:
            for each in programs:
                if each.process is not None:
                    await each.kill()
        print(
            f"{dict(found)} in {seconds:.0f} s; a server was lost {lost} times; "
            f"the proxy has {memory / 1e6:.0f} MB"
        )
        assert codes == [0] * (servers + 1), [each.told.decode() for each in programs]
        assert lost >= 1
        assert memory < MOST_MEMORY
        return found

    found = asyncio.run(run())
    assert found.total() == requests
    assert found["answered"] > 0.9 * requests
    recorded = list(TraceWorkload(tmp_path / "day.jsonl.gz"))
    assert len(recorded) >= found["answered"] + found["cut"]
    assert [each.arrival for each in recorded] == sorted(each.arrival for each in recorded)


async def settled(url):
    """Wait until the proxy has nothing in flight."""
    async with asyncio.timeout(30), aiohttp.ClientSession(url) as client:
        while True:
            async with client.get("/metrics") as answer:
                text = await answer.text()
            lines = [line for line in text.splitlines() if "route_in_flight{" in line]
            if lines and all(line.endswith(" 0.0") for line in lines):
                return
            await asyncio.sleep(0.1)
