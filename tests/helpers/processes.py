"""`kvcore serve` and `kvcore route` as processes, and a test in which servers are killed."""

import asyncio
import re
import resource
import signal
import sys
from pathlib import Path
from random import Random
from time import perf_counter

import aiohttp
from helpers.online import SMALL
from helpers.storm import storm, text
from helpers.upstreams import until

from kvcore_plugins.workload.recorded import TraceWorkload

CONFIG = """
router = "dynamo"
port = 0
trace = "day.jsonl.gz"
client_timeout = 2
health_interval = 0.5
concurrency = 64
"""

MOST_MEMORY = 250 << 20
"""Most bytes of the proxy's memory; 60 MB are Python, aiohttp and kvcore."""


class Program:
    """A process that listens on a port; `stderr` is its output on stderr.

    `files` is the number of files that it may open: its soft and its hard limit.
    """

    def __init__(self, *arguments, files=None):
        self._files = files
        self._command = (sys.executable, "-m", "kvcore", *map(str, arguments))
        self.url = self.process = None
        self.stderr = b""

    async def start(self):
        """Start the process and wait until it listens; after the first time at its old port."""
        again = ("--port", self.url.rpartition(":")[2]) if self.url else ()
        self.process = await asyncio.create_subprocess_exec(
            *self._command, *again, stderr=asyncio.subprocess.PIPE, preexec_fn=self._limit
        )
        found = None
        async with asyncio.timeout(60):
            while not found:
                line = await self.process.stderr.readline()
                assert line, self.stderr.decode()
                self.stderr += line
                found = re.search(rb" at (http://\S+:\d+);", line)
        self.url = found[1].decode()
        self._listening = asyncio.create_task(self._listen())
        return self

    def _limit(self):
        # Under `nohup` the tests have it ignored, and the process would inherit that.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if self._files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._files)

    async def kill(self):
        """Kill the process."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._listening

    async def stop(self, number=signal.SIGTERM):
        """Send a signal to the process, and return its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        code = await self.process.wait()
        await self._listening
        return code

    def memory(self):
        """Return the resident memory of the process in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    async def _listen(self):
        while line := await self.process.stderr.readline():
            self.stderr += line


async def bad_day(folder, servers, requests, kills):
    """Send requests through a proxy while servers are killed and restarted.

    Other clients misbehave meanwhile. Each request is answered once, or refused before its
    first token; the proxy's memory is bounded; each server exits with 0, which it does only if
    its cache is whole and no sequence is left in it. Prints the counts.
    """
    random, sent = Random(1), 0
    moments = sorted(random.sample(range(requests // 10, requests * 9 // 10), kills))
    programs = [Program("serve", "--port", 0, "--generator", SMALL) for _ in range(servers)]
    path = folder / "replicas.toml"

    def body(number):
        nonlocal sent
        sent = number
        return text(number)

    async def trouble():
        for moment in moments:
            victim = programs[random.randrange(servers)]
            await until(lambda moment=moment: sent >= moment, seconds=300)
            await victim.kill()
            await asyncio.sleep(random.uniform(0, 1))
            await victim.start()

    try:
        await asyncio.gather(*(program.start() for program in programs))
        tables = [f'[[replicas]]\nurl = "{program.url}"' for program in programs]
        path.write_text("\n".join([CONFIG, *tables]))
        proxy = await Program("route", "--config", path).start()
        programs.append(proxy)
        begin, work = perf_counter(), asyncio.create_task(trouble())
        found = await storm(proxy.url, requests, at_once=24, body=body)
        seconds = perf_counter() - begin
        await work
        await settled(proxy.url)
        memory, lost = proxy.memory(), proxy.stderr.count(b" is down")
        codes = await asyncio.gather(*(program.stop() for program in programs))
    finally:
        for program in programs:
            if program.process is not None:
                await program.kill()
    print(  # noqa: T201 - what benchmarks show
        f"{dict(found)} in {seconds:.0f} s; {kills} kills, a server was lost {lost} times; the "
        f"proxy has {memory / 1e6:.0f} MB"
    )
    assert found.total() == requests
    assert found["answered"] > 0.9 * requests
    assert lost >= 1
    assert memory < MOST_MEMORY
    assert codes == [0] * (servers + 1), [program.stderr.decode() for program in programs]
    arrivals = [each.arrival for each in TraceWorkload(folder / "day.jsonl.gz")]
    assert len(arrivals) >= found["answered"] + found["cut"]
    assert arrivals == sorted(arrivals)


async def settled(url):
    """Wait until the proxy has no request in flight."""
    async with asyncio.timeout(30), aiohttp.ClientSession(url) as client:
        while True:
            async with client.get("/metrics") as answer:
                text = await answer.text()
            lines = [line for line in text.splitlines() if "route_in_flight{" in line]
            if lines and all(line.endswith(" 0.0") for line in lines):
                return
            await asyncio.sleep(0.1)
