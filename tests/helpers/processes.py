"""`kvcore serve` and `kvcore route` as processes."""

import asyncio
import re
import sys
from pathlib import Path


class Program:
    """A process that listens; `told` is what it has said on stderr."""

    def __init__(self, *arguments):
        self._command = (sys.executable, "-m", "kvcore", *map(str, arguments))
        self.url = self.process = None
        self.told = b""

    async def start(self):
        """Start it, and wait until it listens; the second time at the same port."""
        again = ("--port", self.url.rpartition(":")[2]) if self.url else ()
        self.process = await asyncio.create_subprocess_exec(
            *self._command, *again, stderr=asyncio.subprocess.PIPE
        )
        found = None
        async with asyncio.timeout(60):
            while not found:
                line = await self.process.stderr.readline()
                assert line, self.told.decode()
                self.told += line
                found = re.search(rb" at (http://\S+:\d+);", line)
        self.url = found[1].decode()
        self._listening = asyncio.create_task(self._listen())
        return self

    async def kill(self):
        """End it at once."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._listening

    async def stop(self):
        """Ask it to end; return its exit code."""
        if self.process.returncode is None:
            self.process.terminate()
        code = await self.process.wait()
        await self._listening
        return code

    def memory(self):
        """Return the bytes that it has in memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    async def _listen(self):
        while line := await self.process.stderr.readline():
            self.told += line
