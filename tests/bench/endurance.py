"""Memory, descriptors and threads of `serve` and of `route` in front of it, under mixed load.

Usage: python tests/bench/endurance.py [SECONDS]
"""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.online import ServerProcess, free_port, wait_for
from helpers.storm import storm

REQUESTS = 200
"""Requests of a storm, one in ten of which comes with a rude client."""

ROWS = 10


def used(process):
    """Return the resident MiB, descriptors and threads of a process."""
    folder = Path("/proc") / str(process.pid)
    status = (folder / "status").read_text()
    resident, threads = (
        int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads")
    )
    return round(resident / 1024), len(list((folder / "fd").iterdir())), threads


async def run(seconds):
    """Start both servers, send storms of requests, and print what the servers use."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        serve = ServerProcess(
            *("--blocks", "600", "--trace", str(folder / "serve.jsonl.gz")),
            *("--kv-events", f"tcp://127.0.0.1:{free_port()}"),
        ).wait()
        command = [sys.executable, "-m", "kvcore", "route", serve.url, "--port", str(port)]
        more = ["--router", "prefix-affinity", "--trace", str(folder / "route.jsonl.gz")]
        route = subprocess.Popen([*command, *more], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", route)
        counts, began, row = Counter(), time.monotonic(), 0
        print("seconds | requests | serve: MiB, files, threads | route: MiB, files, threads")
        while True:
            passed = time.monotonic() - began
            if passed >= seconds * row / ROWS:
                row += 1
                print(f"{passed:.0f} | {counts.total()} |", used(serve.process), used(route))
                sys.stdout.flush()
            if passed >= seconds:
                break
            counts += await storm(url, REQUESTS, seed=counts.total())
        route.send_signal(signal.SIGTERM)
        ends = route.wait(60), serve.stop()[0]
        print(dict(counts), "exit codes", ends, flush=True)


if __name__ == "__main__":
    asyncio.run(run(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0))
