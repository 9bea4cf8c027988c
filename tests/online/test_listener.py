"""The listener of servers: the answers that refuse a request, and the lines for errors."""

import asyncio
import json
import socket
from contextlib import suppress
from types import SimpleNamespace

import pytest
from helpers.online_scenes import sentence
from helpers.upstreams import until

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'kvcore[serve]'")

from kvcore_online.listener import Listener, _logger
from kvcore_online.supervision import Messages

aiohttp = pytest.importorskip("aiohttp")


@pytest.mark.parametrize(
    ("status", "kind", "ends", "retry"),
    [
        (400, "invalid_request_error", False, None),
        (408, "invalid_request_error", True, None),
        (413, "invalid_request_error", True, None),
        (415, "invalid_request_error", False, None),
        (500, "server_error", False, None),
        (503, "server_error", False, "1"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_whether_to_come_again(status, kind, ends, retry):
    """A refusal has the error of the API; a slow or a large request ends its connection."""
    address = {"host": "127.0.0.1", "port": 0, "client_timeout": 1, "shutdown_timeout": 1}
    listener = Listener({}, "a test", body=1, connections=1, **address)
    answer = listener.refusal(status, "not so", "prompt")
    error = {"message": "not so", "type": kind, "param": "prompt", "code": status}
    assert (answer.status, json.loads(answer.body)) == (status, {"error": error})
    assert answer.content_type == "application/json"
    assert (answer.keep_alive is False) is ends
    assert answer.headers.get("Retry-After") == retry


def test_errors_of_aiohttp_are_lines_but_for_malformed_requests(capsys):
    """An error of aiohttp is a line with its cause, and one of what a client sends is none."""
    logger = _logger(Messages(), UnicodeError, LookupError)
    logger.error("closing")
    for error in (OSError("no files"), KeyError("Host"), UnicodeError("\\xff")):
        logger.error("handling %s", "it", exc_info=error)
    lines = capsys.readouterr().err.splitlines()
    assert list(map(sentence, lines)) == [
        "kvcore: closing",
        "kvcore: handling it: OSError: no files",
    ]


@pytest.mark.parametrize(
    "target", ["http://xn--/known", "http://[v1.x]/known", "http:///known"]
)
def test_a_request_is_answered_whatever_its_host(target):
    """A host that no name can have changes no answer, nor keeps a connection for ever."""

    async def known(_):
        return listener.json({})

    address = {"host": "127.0.0.1", "port": 0, "client_timeout": 30, "shutdown_timeout": 1}
    listener = Listener({"GET /known": known}, "a test", body=1, connections=1, **address)

    async def scene():
        await listener.start()
        host, port = listener.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        await listener.stop()
        return answer

    assert asyncio.run(scene()).split()[1] in (b"200", b"400")


@pytest.mark.parametrize("turns", range(3))
def test_a_connection_that_comes_as_a_listener_stops_is_closed_at_once(turns, monkeypatch):
    """A client is not left with a connection that is not read, nor is a request waited for.

    That holds in whichever turn of the loop after it was let in the listener stops.
    """
    address = {"host": "127.0.0.1", "port": 0, "client_timeout": 30, "shutdown_timeout": 30}
    listener = Listener({}, "a test", body=1, connections=1, **address)
    accept, let_in = listener._accept, asyncio.Event()
    monkeypatch.setattr(listener, "_accept", lambda: (accept(), let_in.set())[0])

    async def scene():
        await listener.start()
        with socket.create_connection(listener._server.sockets[0].getsockname(), 5) as client:
            await let_in.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await listener.stop()
            assert await asyncio.to_thread(client.recv, 1) == b""

    asyncio.run(scene())


def test_new_requests_are_answered_until_those_in_flight_have_ended():
    """A listener that stops answers on new and on idle connections until an answer is out."""
    gate, begun = asyncio.Event(), asyncio.Event()

    async def slow(_):
        begun.set()
        await gate.wait()
        return listener.json({})

    async def health(_):
        return listener.json({}, 503)

    address = {"host": "127.0.0.1", "port": 0, "client_timeout": 30, "shutdown_timeout": 30}
    routes = {"GET /slow": slow, "GET /health": health}
    listener = Listener(routes, "a test", body=1, connections=9, **address)

    async def scene():
        await listener.start()
        async with aiohttp.ClientSession(listener.url) as client:
            asked = asyncio.create_task(client.get("/slow"))
            await begun.wait()
            reader, writer = await asyncio.open_connection(
                *listener._server.sockets[0].getsockname()
            )
            for stops in (False, True):
                if stops:
                    stopping = asyncio.create_task(listener.stop())
                    await asyncio.sleep(0)
                writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
                async with asyncio.timeout(10):
                    head = await reader.readuntil(b"\r\n\r\n")
                assert b" 503 " in head
                assert b"Retry-After: 1" in head
                assert await reader.readexactly(2) == b"{}"
            writer.close()
            for _ in range(3):
                async with client.get("/health") as answer:
                    assert answer.status == 503
            assert not stopping.done()
            gate.set()
            async with asyncio.timeout(10):
                assert (await asked).status == 200
                await stopping
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get("/health")

    asyncio.run(scene())


def test_connections_that_come_at_once_keep_to_the_limit():
    """Beside one connection, of two there is room for one of two that come at once."""
    address = {"host": "127.0.0.1", "port": 0, "client_timeout": 30, "shutdown_timeout": 1}
    listener = Listener({}, "a test", body=1, connections=2, **address)

    async def scene():
        await listener.start()
        clients, at = [], listener._server.sockets[0].getsockname()
        for count in (1, 2):
            clients += [socket.create_connection(at, timeout=5) for _ in range(count)]
            await until(lambda: listener._http.connections)
        with suppress(ConnectionError):
            assert await asyncio.to_thread(clients[-1].recv, 1) == b""
        assert len(listener._http.connections) == 2
        for client in clients:
            client.close()
        await listener.stop()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("waiting", "size", "timed"),
    [(0, 1 << 14, False), (0, (1 << 14) + 1, True), (0, None, True), (1, 1, True)],
)
def test_an_answer_that_an_empty_buffer_takes_needs_no_timer(waiting, size, timed):
    """16 KiB are taken at once; what may wait for its client has a time in which it does."""
    address = {"host": "127.0.0.1", "port": 0, "client_timeout": 1, "shutdown_timeout": 1}
    listener = Listener({}, "a test", body=1, connections=1, **address)
    http = SimpleNamespace(transport=SimpleNamespace(get_write_buffer_size=lambda: waiting))

    async def timer():
        return listener.time_to_take(http, size)

    assert isinstance(asyncio.run(timer()), asyncio.Timeout) is timed


def test_others_have_their_turn_between_two_bodies():
    """Of bodies that are there at once one is decoded in a turn of the loop."""
    address = {"host": "127.0.0.1", "port": 0, "client_timeout": 1, "shutdown_timeout": 1}
    order = []

    async def body():
        return b"{}"

    def decode(_):
        order.append("body")
        asyncio.get_running_loop().call_soon(order.append, "other")

    async def scene():
        listener = Listener({}, "a test", body=1, connections=1, **address)
        content = SimpleNamespace(is_eof=lambda: True)
        headers = {"Content-Type": "application/json"}
        http = SimpleNamespace(headers=headers, content=content, read=body)
        await asyncio.gather(*(listener.read(http, 1, decode) for _ in range(3)))

    asyncio.run(scene())
    assert order[:5] == ["body", "other", "body", "other", "body"]
