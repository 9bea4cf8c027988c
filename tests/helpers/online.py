"""Servers and proxies for tests, as processes or in a thread of this one."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

from kvcore.config import RunConfig, RunParts
from kvcore_engine.config import EngineParts
from kvcore_online.clients import ClientWorkload
from kvcore_online.server import ServeConfig, Server

SMALL = "transformer:layers=1,hidden=32,heads=2,kv_heads=1"
READY_SECONDS = 60


def free_port():
    """Return a free port of the loopback address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def timers():
    """Yield a count of the timers that modules of servers start meanwhile, by module."""
    started, timeout = Counter(), asyncio.timeout

    def count(seconds):
        module = sys._getframe(1).f_globals["__name__"]
        if module.startswith("kvcore_online."):
            started[module] += 1
        return timeout(seconds)

    with patch.object(asyncio, "timeout", count):
        yield started


class ServerProcess:
    """`kvcore serve` in a process of its own, which may not be ready yet."""

    def __init__(self, *options, port=None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Without this the kernels of torch run on all CPUs in each of several servers.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "kvcore", "serve", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--generator", SMALL, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self):
        """Return the server once it is healthy."""
        wait_for(f"{self.url}/health", self.process)
        return self

    def kill(self):
        """Kill the process."""
        self.process.kill()
        self.process.communicate()

    def stop(self):
        """Send SIGTERM to the process; return its exit code and its output."""
        self.process.send_signal(signal.SIGTERM)
        printed, _ = self.process.communicate(timeout=READY_SECONDS)
        return self.process.returncode, printed


def wait_for(url, process):
    """Wait until `url` responds with status 200."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.05)  # for another process to start
    msg = f"{url} does not answer"
    raise AssertionError(msg)


def parts(block_size=16, **options):
    """Return the engine parts of a small model."""
    config = RunConfig(
        "run",
        workload=ClientWorkload(block_size),
        generator=options.pop("generator", SMALL),
        block_size=block_size,
        clock="wall",
        memory=options.pop("memory", "4MiB"),
        **options,
    )
    return EngineParts(config)


def simulated_parts(**options):
    """Return the parts of a simulated model, by default of a large one."""
    options = {"model": "llama-3-70b", "device": "h100", **options}
    return RunParts(RunConfig("simulate", workload=ClientWorkload(16), **options))


def metrics(server):
    """Return the samples of a server's metrics, by name and labels but that of the model."""
    from prometheus_client.parser import (  # noqa: PLC0415 - an extra
        text_string_to_metric_families,
    )

    with urllib.request.urlopen(f"{server.url}/metrics") as answer:  # noqa: S310 - of a test
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    for sample in samples:
        del sample.labels["model_name"]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


@contextmanager
def serving(config=None, *, simulated=False, **options):
    """Yield a server that listens in a thread of this process."""
    make = simulated_parts if simulated else parts
    started, stopping = threading.Event(), []
    made = []

    async def main():
        server = Server(make(**options), config or ServeConfig(port=0, grace=2))
        await server.start()
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        stopping.append(lambda: loop.call_soon_threadsafe(stopped.set))
        made.append(server)
        started.set()
        await stopped.wait()
        await server.stop()

    failures = []

    def run():
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        if failures:
            raise failures[0]
        yield made[0]
    finally:
        for stop in stopping:
            stop()
        thread.join()
    if failures:
        raise failures[0]
