"""A real Redis or Valkey server on loopback."""

import socket
import socketserver
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest
from helpers.programs import required

START_S = 20


class Server:
    """A server on a free port of loopback, without persistence, that can be restarted.

    Attributes:
        port: the port of the server.
        url: the URL of its database 0.
    """

    def __init__(self, folder):
        """Choose the port; skip the test if no server is installed."""
        self._program = required("redis-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process = None

    def start(self, **config):
        """Start the server, and wait until it answers."""
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "dir": self._folder}
        command = [self._program]
        for name, value in (options | config).items():
            command += [f"--{name}", str(value)]
        with (Path(self._folder) / "log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        with self.client() as client:
            client.ping()

    def stop(self):
        """Stop the server; its data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self, **options):
        """Return a client that retries until a starting server answers."""
        redis = pytest.importorskip("redis")
        retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.02), 50 * START_S)
        return redis.Redis.from_url(self.url, retry=retry, **options)


@contextmanager
def running(**config):
    """Yield a server for as long as the body runs; skip the test if none is installed."""
    with TemporaryDirectory() as folder:
        server = Server(folder)
        try:
            server.start(**config)
            yield server
        finally:
            server.stop()


@contextmanager
def answering(answer, *, greets=True):
    """Yield the URL of a server that answers each command with `answer`.

    Also yields the list of the names of the commands that it received. With `greets` it answers
    greetings as Redis does; if `answer` is None it answers nothing else.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            with suppress(OSError, ValueError):
                while count := self.rfile.readline():
                    words = [
                        self.rfile.read(int(self.rfile.readline()[1:]) + 2)
                        for _ in range(int(count[1:]))
                    ]
                    name = words[0].strip().decode()
                    asked.append(name)
                    polite = {"CLIENT": b"+OK\r\n", "PING": b"+PONG\r\n"}.get(name)
                    reply = polite if greets and polite else answer
                    if reply is not None:
                        self.wfile.write(reply)

    asked = []
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}/0", asked
        finally:
            server.shutdown()
            thread.join()
