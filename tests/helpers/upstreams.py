"""Servers of an API with scripted responses, behind a proxy in the same process."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from kvcore_online.proxy import Proxy
from kvcore_online.route_config import RouteConfig

WORDS = ("one", "two", "three")


class Upstream:
    """A server that responds by its `script`, which a test may change at any time.

    Attributes:
        script: the response to a completion: `answer`, `die` before or `break` within the
            answer, `pause` within or `wait` before it until `gate` is set, `busy` (503), `fail`
            (500), `refuse` (400), `nonsense` (invalid JSON), `empty` (a stream of no bytes),
            `silent` (one whose first byte waits until `gate` is set), or `flood` (an endless
            stream).
        sent: headers of a whole answer besides those of aiohttp, as bytes; then it is written
            to the socket as it is.
        counted: the `usage` of answers.
        tokenize: returns the answer to a prompt that is to be made into tokens.
        help: the lines before its metrics.
        healthy: whether `/health` responds with 200; else with 503.
        calls: bodies of the received completions; `headers` of each.
        left: number of completions whose client disconnected.
    """

    def __init__(self):
        self.script, self.healthy, self.usage = "answer", True, 0.25
        self.calls, self.headers, self.left, self.flooded = [], [], 0, 0
        self.gate = asyncio.Event()
        self.port = 0
        self.tokenize = lambda text: {"tokens": list(map(ord, text))}
        self.sent, self.help = b"", ""
        self.counted = {
            "prompt_tokens": 40,
            "completion_tokens": len(WORDS),
            "prompt_tokens_details": {"cached_tokens": 32},
        }

    @property
    def url(self):
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        """Listen, after a stop at the same port again."""
        app = web.Application(client_max_size=1 << 26)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self):
        """Cut all connections, and stop listening."""
        server = self._runner.server
        for connection in server.connections if server else ():
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _complete(self, http):
        body = await http.json()
        self.calls.append(body)
        self.headers.append(http.headers)
        script = self.script
        try:
            if script == "wait":
                await self.gate.wait()
            if script == "die":
                await _cut(http)
            if script in ("busy", "fail", "refuse"):
                status = {"busy": 503, "fail": 500, "refuse": 400}[script]
                return web.json_response({"error": {"message": script}}, status=status)
            if script == "nonsense":
                return web.Response(body=b"{nonsense", content_type="application/json")
            if self.sent:
                await self._raw(http)
            return await (self._stream(http, body) if body.get("stream") else self._whole(body))
        except asyncio.CancelledError:
            self.left += 1
            raise

    def _answer(self):
        choice = {"index": 0, "text": " ".join(WORDS)}
        return json.dumps({"choices": [choice], "usage": self.counted}).encode()

    async def _raw(self, http):
        """Write an answer with the headers `sent`, and end the connection."""
        body = self._answer()
        length = b"Content-Length: %d\r\n" % len(body)
        http.transport.write(self.sent + length + b"\r\n" + body[:1])
        if self.script == "pause":
            await self.gate.wait()
        http.transport.write(body[1:])
        await asyncio.Event().wait()

    async def _whole(self, body):
        return web.Response(body=self._answer(), content_type="application/json")

    async def _stream(self, http, body):
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(http)
        if self.script == "empty":
            return out
        if self.script == "silent":
            await self.gate.wait()
        while self.script == "flood":
            await out.write(event({"choices": [{"text": "x" * 50_000}]}))
            self.flooded += 50_000
        for index, word in enumerate(WORDS):
            await out.write(event({"choices": [{"index": 0, "text": word}]}))
            if self.script == "break" and index == 1:
                await out.write(b'data: {"choi')
                await _cut(http)
            if self.script == "pause":
                await self.gate.wait()
        if body.get("stream_options", {}).get("include_usage"):
            await out.write(event({"choices": [], "usage": self.counted}))
        await out.write(b"data: [DONE]\n\n")
        return out

    async def _tokenize(self, http):
        body = await http.json()
        return web.json_response(self.tokenize(body["prompt"]))

    async def _models(self, http):
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def _health(self, http):
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, http):
        usage = f'vllm:kv_cache_usage_perc{{model="tiny"}} {self.usage}\n'
        return web.Response(text=self.help + usage)


async def _cut(http):
    """Abort the connection, and wait until the handler is cancelled by that."""
    http.transport.abort()
    await asyncio.Event().wait()


def event(document):
    """Return a document as an event of a stream."""
    return f"data: {json.dumps(document)}\n\n".encode()


@asynccontextmanager
async def routed(servers=2, **options):
    """Yield a proxy, its upstreams (`servers`, or as many new ones) and a client."""
    upstreams = servers
    if isinstance(servers, int):
        upstreams = [await Upstream().start() for _ in range(servers)]
    defaults = {"port": 0, "health_interval": 0.05, "shutdown_timeout": 0.2}
    options = {**defaults, **options}
    replicas = options.pop("replicas", [upstream.url for upstream in upstreams])
    try:
        proxy = Proxy(RouteConfig.from_options(replicas, **options))
        await proxy.start()
        try:
            async with aiohttp.ClientSession(proxy.url) as client:
                yield proxy, upstreams, client
        finally:
            await proxy.stop()
    finally:
        for upstream in upstreams:
            await upstream.stop()


async def until(true, seconds=10):
    """Wait until `true()` holds; fail after some seconds."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def prompt(text="a prompt", **more):
    """Return the body of a completion."""
    return {"model": "tiny", "prompt": text, "max_tokens": 3, **more}
