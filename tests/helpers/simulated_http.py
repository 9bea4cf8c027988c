"""Clients and servers of an API on a `SimulatedLoop`, which speak HTTP by hand."""

import asyncio
import json
import math
import re
from functools import partial

import attrs

COMPLETIONS = "/v1/completions"


@attrs.define
class Answer:
    """An answer that a client has got: `body` is what has come, `ended` if it is whole."""

    status: int
    headers: dict
    body: bytes
    ended: bool


def split_answers(data, *, closed):
    """Return the answers in the bytes that a client has got, of which the last may be cut.

    Raises AssertionError for bytes that are no answers.
    """
    answers = []
    while data:
        head, found, data = data.partition(b"\r\n\r\n")
        if not found:
            assert b"HTTP/1.1 ".startswith(head[:9]) or head.startswith(b"HTTP/1.1 ")
            break
        first, *lines = head.decode("latin-1").split("\r\n")
        status = re.fullmatch(r"HTTP/1\.[01] (\d{3}) .*", first)
        assert status, first
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
        }
        if headers.get("transfer-encoding") == "chunked":
            body, data, ended = _chunks(data)
        elif "content-length" in headers:
            size = int(headers["content-length"])
            body, data, ended = data[:size], data[size:], len(data) >= size
        else:
            body, data, ended = data, b"", closed
        answers.append(Answer(int(status[1]), headers, body, ended))
    return answers


def _chunks(data):
    """Return a body in chunks, the bytes after it, and whether it has ended."""
    body = b""
    while found := re.match(rb"([0-9a-fA-F]+)\r\n", data):
        size, start = int(found[1], 16), found.end()
        if not size:
            return body, data[start + 2 :], data[start : start + 2] == b"\r\n"
        body += data[start : start + size]
        if len(data) < start + size + 2:
            break
        assert data[start + size : start + size + 2] == b"\r\n"
        data = data[start + size + 2 :]
    return body, b"", False


def request_bytes(body, session, *, chunked=False):
    """Return a request of a completion."""
    lines = [
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: simulated",
        "Content-Type: application/json",
        f"x-session-id: {session}",
    ]
    if chunked:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        lines.append("Transfer-Encoding: chunked")
    else:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Client(asyncio.Protocol):
    """A client with one connection, on which it sends requests and reads their answers.

    Args:
        loop: the simulated loop.
        requests: the bytes of each request, which are sent at once.
        manner: `plain`; `leave` (abort), `half-close` after `seconds`; `slow send`: the last
            bytes come after `seconds`; `stop`: they never come; `slow read`: it reads nothing
            for `seconds`.

    Attributes:
        data: the bytes received.
        first: time of the first byte of an answer to a single request; else infinite.
        closed: time when the connection was closed; None while it is open.
        refused: whether no connection was made.
    """

    def __init__(self, loop, requests, manner="plain", seconds=0.0):
        """Store what to do."""
        self._loop, self._manner, self._seconds = loop, manner, seconds
        self._requests = requests
        self.data, self.closed, self.refused = bytearray(), None, False
        self.first = math.inf

    async def connect(self, port):
        """Connect to a port, and send."""
        try:
            await self._loop.create_connection(lambda: self, "127.0.0.1", port)
        except ConnectionRefusedError:
            self.refused, self.closed = True, self._loop.time()

    def connection_made(self, transport):
        """Send the requests."""
        self.transport, manner, later = transport, self._manner, self._loop.call_later
        sent = b"".join(self._requests)
        if manner == "slow read":
            transport.pause_reading()
            later(self._seconds, transport.resume_reading)
        if manner in ("slow send", "stop"):
            transport.write(sent[:-3])
            if manner == "slow send":
                later(self._seconds, transport.write, sent[-3:])
            return
        transport.write(sent)
        if manner == "leave":
            later(self._seconds, transport.abort)
        if manner == "half-close":
            later(self._seconds, transport.write_eof)

    def data_received(self, data):
        """Store bytes; close the connection once all answers are whole."""
        if not self.data and len(self._requests) == 1:
            self.first = self._loop.time()
        self.data += data
        ends = self.data.endswith((b"0\r\n\r\n", b"}"))
        if ends and sum(answer.ended for answer in self.answers()) == len(self._requests):
            self.transport.close()

    def eof_received(self):
        """Close the connection."""

    def connection_lost(self, error):
        """Store when the connection was closed."""
        del error
        self.closed = self._loop.time()

    def answers(self):
        """Return the answers so far."""
        return split_answers(bytes(self.data), closed=self.closed is not None)


@attrs.define
class Received:
    """A completion that a server was asked for: by the `session` of which client, and when.

    Calls are numbered in the order of their arrival, whatever their server.

    Attributes:
        sent: number of bytes of the answer that were sent.
    """

    session: str
    number: int
    server: int
    time: float
    script: str
    sent: int = 0


class Upstream:
    """A server of an API on a simulated loop, which does as its script says.

    Attributes:
        script: what happens upon a completion; the methods `_do_...` are all scripts.
        healthy: whether its checks are answered with 200.
        received: the completions that it was asked for.
    """

    def __init__(self, loop, number, calls):
        """Listen at a port of its own; `calls` numbers the completions of all servers."""
        self.loop, self.number, self.port, self.calls = loop, number, 8001 + number, calls
        self.script, self.healthy = "answer", True
        self.received, self._connections = [], {}
        self.switch("up")

    def switch(self, state):
        """Be `up`; `down` (it cuts all connections), `lost` (it answers none) or `sick`."""
        self.healthy = state != "sick"
        self.loop.unreachable.discard(self.port)
        if state in ("up", "sick"):
            self.loop.listeners[self.port] = partial(_Connection, self)
            return
        self.loop.listeners.pop(self.port, None)
        if state == "lost":
            self.loop.unreachable.add(self.port)
            return
        for connection in list(self._connections):
            connection.transport.abort()

    def opened(self, connection):
        """Record a connection."""
        self._connections[connection] = None

    def lost(self, connection):
        """Forget a connection."""
        self._connections.pop(connection, None)

    def close(self):
        """Cut all connections, and stop listening."""
        self.switch("down")


SCRIPTS = (
    *("answer", "answer", "answer", "slow", "hang", "die", "break", "stall", "busy", "limited"),
    *("fail", "nonsense", "usage", "cut", "long", "control", "status", "compressed", "garbage"),
    *("half", "reset", "twice", "large", "interim", "empty", "huge event", "pieces"),
)
"""Scripts of servers, of which some are more frequent."""


class _Connection(asyncio.Protocol):
    """A connection of a client to an `Upstream`."""

    def __init__(self, server):
        self._server, self._data = server, b""
        self._tasks = []
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport):
        self.transport = transport
        self._server.opened(self)

    def connection_lost(self, error):
        del error
        self._server.lost(self)
        for task in self._tasks:
            task.cancel()

    def pause_writing(self):
        self._writable.clear()

    def resume_writing(self):
        self._writable.set()

    def data_received(self, data):
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        size = re.search(rb"(?i)content-length: (\d+)", head)
        size = int(size[1]) if size else 0
        if not found or len(body) < size:
            return
        self._data = body[size:]
        loop, path = self._server.loop, head.split(b" ")[1].decode()
        self._tasks.append(loop.create_task(self._answer(path, head, body[:size])))

    async def _answer(self, path, head, body):
        server = self._server
        if path == "/health":
            self._whole(b"", 200 if server.healthy else 503)
        elif path == "/metrics":
            self._whole(b'vllm:kv_cache_usage_perc{m="x"} 0.25\n')
        elif path == "/tokenize":
            tokens = [ord(letter) for letter in json.loads(body)["prompt"]]
            self._whole(json.dumps({"tokens": tokens}).encode())
        else:
            document = json.loads(body)
            now = server.loop.time()
            number, name = next(server.calls), document["user"]
            call = Received(name, number, server.number, now, server.script)
            server.received.append(call)
            name = "_do_" + server.script.replace(" ", "_")
            await getattr(self, name)(call, document.get("stream") is True, document)

    # The scripts.

    async def _do_answer(self, call, streams, document, words=3, pause=0.0):
        usage = {"prompt_tokens": 40, "completion_tokens": words}
        if not streams:
            await asyncio.sleep(pause)
            self._whole(self._text(call, 0, usage), call=call)
            return
        self._head(call)
        for index in range(words):
            await asyncio.sleep(pause)
            self._event(call, self._text(call, index))
        if (document.get("stream_options") or {}).get("include_usage"):
            self._event(call, json.dumps({"choices": [], "usage": usage}).encode())
        self._event(call, b"[DONE]")
        self._send(call, b"0\r\n\r\n")

    async def _do_slow(self, call, streams, document):
        await self._do_answer(call, streams, document, words=6, pause=0.4)

    async def _do_pieces(self, call, streams, document):
        await self._do_answer(call, streams, document, words=60)

    async def _do_hang(self, call, streams, document):
        await asyncio.Event().wait()

    async def _do_stall(self, call, streams, document):
        self._head(call)
        self._event(call, self._text(call, 0))
        await asyncio.Event().wait()

    async def _do_die(self, call, streams, document):
        self.transport.abort()

    async def _do_break(self, call, streams, document):
        self._head(call)
        self._event(call, self._text(call, 0))
        await asyncio.sleep(0.3)
        self._send(call, b'10\r\ndata: {"choi')
        self.transport.abort()

    async def _do_half(self, call, streams, document):
        self._head(call)
        self._event(call, self._text(call, 0))
        self.transport.write_eof()
        await asyncio.Event().wait()

    async def _do_empty(self, call, streams, document):
        self._head(call)
        self._send(call, b"0\r\n\r\n")

    async def _do_reset(self, call, streams, document):
        await self._do_answer(call, streams, document)
        self.transport.abort()

    async def _do_twice(self, call, streams, document):
        await self._do_answer(call, streams, document)
        await asyncio.sleep(0.05)
        await self._do_answer(call, streams, document)

    async def _do_busy(self, call, streams, document):
        self._whole(b'{"error": {"message": "busy"}}', 503, call=call)

    async def _do_limited(self, call, streams, document):
        self._whole(b'{"error": {"message": "slow down"}}', 429, call=call)

    async def _do_fail(self, call, streams, document):
        self._whole(b'{"error": {"message": "fail"}}', 500, call=call)

    async def _do_nonsense(self, call, streams, document):
        self._whole(b"{nonsense", call=call)

    async def _do_cut(self, call, streams, document):
        self._send(call, b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
        self.transport.close()

    async def _do_long(self, call, streams, document):
        self._whole(b'{"x": "%s"}' % (b"x" * 100_000), call=call)

    async def _do_usage(self, call, streams, document):
        usage = {"prompt_tokens": 2**63, "completion_tokens": -1, "prompt_tokens_details": 7}
        if not streams:
            self._whole(self._text(call, 0, usage), call=call)
            return
        self._head(call)
        self._event(call, self._text(call, 0))
        self._event(call, json.dumps({"choices": [], "usage": usage}).encode())
        self._event(call, b"[DONE]")
        self._send(call, b"0\r\n\r\n")

    async def _do_control(self, call, streams, document):
        self._whole(self._text(call, 0), call=call, headers=b"x-request-id: a\x01b\r\n")

    async def _do_status(self, call, streams, document):
        self._whole(self._text(call, 0), 999, call=call)

    async def _do_compressed(self, call, streams, document):
        self._whole(self._text(call, 0), call=call, headers=b"Content-Encoding: gzip\r\n")

    async def _do_garbage(self, call, streams, document):
        self._send(call, b"\x00\xff no HTTP\r\n\r\n")

    async def _do_interim(self, call, streams, document):
        self._send(call, b"HTTP/1.1 103 Early Hints\r\n\r\n" * 3)
        await self._do_answer(call, streams, document)

    async def _do_huge_event(self, call, streams, document):
        self._head(call)
        for _ in range(90):
            self._send(call, b"10000\r\n" + b"x" * 65_536 + b"\r\n")
            await self._writable.wait()
        await asyncio.Event().wait()

    async def _do_large(self, call, streams, document):
        self._head(call)
        for index in range(50):
            self._event(call, self._text(call, index, more="x" * 20_000))
            await self._writable.wait()
            await asyncio.sleep(0.1)
        self._event(call, b"[DONE]")
        self._send(call, b"0\r\n\r\n")

    # Their parts.

    def _text(self, call, place, usage=None, more=""):
        """Return a choice whose text says which call of which server it answers."""
        text = f"{call.session}|{self._server.number}|{call.number}|{place}|{more}"
        document = {"choices": [{"index": 0, "text": text}]}
        return json.dumps(document | ({"usage": usage} if usage else {})).encode()

    def _head(self, call):
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._send(call, b"HTTP/1.1 200 OK\r\n" + kind)

    def _event(self, call, data):
        data = b"data: " + data + b"\n\n"
        self._send(call, b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, body, status=200, *, call=None, headers=b""):
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%s" % (status, headers)
        self._send(call, head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def _send(self, call, data):
        if call is not None:
            call.sent += len(data)
        if not self.transport.is_closing():
            self.transport.write(data)
