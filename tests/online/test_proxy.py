"""The proxy: its routing, the limits of clients and servers, its metrics and its trace."""

# ruff: noqa: ARG001 - every scene takes all parts

import asyncio
import gzip
import json
import os
import re
import signal
import socket
from collections import Counter
from io import BytesIO
from itertools import accumulate, pairwise
from types import SimpleNamespace

import attrs
import orjson
import pytest
from helpers.faults import fail, faulty
from helpers.online import timers
from helpers.online_scenes import (
    COMPLETIONS,
    ask,
    events,
    http_request,
    play,
    played,
    raw,
    sample,
    sentence,
)
from helpers.upstreams import Upstream, prompt, routed, until
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcore import Request, read_events
from kvcore.errors import InputError, StorageError
from kvcore.files import AtomicFile
from kvcore.request import block_keys
from kvcore.serving.router import Router
from kvcore.untrusted import LONGEST_EVENT
from kvcore_events.formats import encode
from kvcore_events.model import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvcore_events.publisher import Publisher
from kvcore_online.fleet import Fleet
from kvcore_online.prompts import Call
from kvcore_online.proxy import (
    LARGE,
    PART,
    EventStream,
    Proxy,
    _in_parts,
    _with_tokens,
    run,
    take_usage,
)
from kvcore_online.route_config import RouteConfig
from kvcore_online.traffic import Flight, TrafficLog
from kvcore_plugins.workload.recorded import TraceWorkload

aiohttp = pytest.importorskip("aiohttp", reason="needs aiohttp")
web = pytest.importorskip("aiohttp.web", reason="needs aiohttp")


class Hits(Router):
    """A router that prefers the replica with the most hit tokens."""

    name = "hits"

    def cost(self, request, replica):
        """Return the negative number of hit tokens."""
        return -replica.hit_tokens


Failing = faulty("A router that raises in `cost`.", Router, name="failing", cost=fail)
Refusing = faulty(
    "A router that refuses every request.", Router, name="refusing", route=lambda *_: None
)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
@played()
async def test_a_response_is_passed_on_with_the_name_of_its_server(
    proxy, servers, client, path
):
    """A response has the status, type and body of its server, and a header that names it."""
    body = {"messages": [{"role": "user", "content": "hello"}]}
    status, headers, text = await ask(client, path=path, **body)
    assert (status, json.loads(text)["choices"][0]["text"]) == (200, "one two three")
    assert headers["x-kvcore-replica"] == servers[0].url.removeprefix("http://")
    assert headers["content-type"].startswith("application/json")
    assert json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert sample(proxy, "cached_tokens_total") == 32
    assert sample(proxy, "counted_tokens_total") == json.loads(text)["usage"]["prompt_tokens"]
    assert sample(proxy, "requests_total", status="200") == 1


@played(router=Hits())
async def test_a_server_that_gets_nearly_all_requests_is_told(
    proxy, servers, client, monkeypatch, capsys
):
    """A router that follows a shared prefix to one server says so once, not at each request."""
    monkeypatch.setattr("kvcore_online.fleet.WATCHED", 5)
    for _ in range(30):
        await ask(client, text="x" * 640)
    told = [line for line in capsys.readouterr().err.splitlines() if " got " in line]
    assert len(told) == 1
    assert "got 10 of the last 10 requests while 2 servers are up: hits follows" in told[0]


@played(count=1)
async def test_a_short_answer_needs_one_timer(proxy, servers, client):
    """That until it begins: what the client's connection takes at once needs no other."""
    with timers() as started:
        await ask(client)
    assert (started["kvcore_online.proxy"], started["kvcore_online.listener"]) == (1, 0)


@pytest.mark.parametrize("traced", [False, True])
def test_a_stream_is_passed_on_unchanged(traced, tmp_path):
    """A stream is passed on unchanged, and has the usage only if the client asked for it.

    A proxy that writes a trace asks its servers for the usage in any case, and counts the
    cached tokens in it.
    """

    async def scene(proxy, servers, client):
        _, headers, text = await ask(client, stream=True)
        assert headers["content-type"] == "text/event-stream"
        assert [event["choices"][0]["text"] for event in events(text)] == [
            "one",
            "two",
            "three",
        ]
        assert text.endswith("data: [DONE]\n\n")
        asked = servers[0].calls[0].get("stream_options")
        assert asked == ({"include_usage": True} if traced else None)
        assert sample(proxy, "cached_tokens_total") == (32 if traced else 0)
        assert (sample(proxy, "counted_tokens_total") > 0) == traced
        _, _, text = await ask(client, stream=True, stream_options={"include_usage": True})
        assert events(text)[-1]["usage"]["completion_tokens"] == 3

    play(scene, **({"trace": tmp_path / "day.jsonl"} if traced else {}))


@pytest.mark.parametrize("more", [{}, {"prefixes": "tokens", "key_tokens": 4}])
def test_a_prompt_goes_to_the_server_that_has_its_prefix(more):
    """A prompt is routed to the server that has its prefix.

    Prefixes are known by blocks of characters, or by tokens that a server returns.
    """
    texts = [letter * 64 for letter in "abcd"]

    async def scene(proxy, servers, client):
        where = {}
        for text in texts:
            _, headers, _ = await ask(client, prompt=text)
            where[text] = headers["x-kvcore-replica"]
        assert len(set(where.values())) == 2
        for text in reversed(texts):
            _, headers, _ = await ask(client, prompt=text + " and more")
            assert headers["x-kvcore-replica"] == where[text]
        assert sample(proxy, "hit_tokens_total") == 4 * (64 if more else 16)
        assert sample(proxy, "prompt_tokens_total") == 4 * (64 + 73 if more else 16 + 18)

    play(scene, router=Hits(), **more)


def test_token_ids_of_a_server_are_whole_numbers_from_0_on():
    """A prompt has the token ids that its server tells; all else that it tells is none."""
    call = Call.read(COMPLETIONS, json.dumps(prompt()).encode())
    request = call.request("s", tokens=None, key_tokens=1, key_chars=64)
    for tokens in ([0, 1], [5, 2**31], [2**64 - 1]):
        told = _with_tokens(request, orjson.dumps({"tokens": tokens}))
        assert told == call.request("s", tokens=tokens, key_tokens=1, key_chars=64)
        assert told.keys == block_keys(tokens, 1)
    wrong = ([], [-1], [True], ["a"], "a", [2**64], None)
    for answer in (5, [], {}, *({"tokens": tokens} for tokens in wrong)):
        assert _with_tokens(request, json.dumps(answer).encode()) is request
    assert _with_tokens(request, b"{") is request


@pytest.mark.parametrize("script", ["die", "busy", "nonsense", "empty"])
@played()
async def test_a_request_without_a_response_is_sent_to_another_server(
    proxy, servers, client, script
):
    """A request is sent to another server if one dies, is busy, or returns no JSON or event."""
    servers[0].script = script
    status, headers, _ = await ask(client, stream=script == "empty")
    assert (status, headers["x-kvcore-replica"]) == (200, servers[1].url[7:])
    assert [len(server.calls) for server in servers] == [1, 1]
    assert sample(proxy, "retries_total", replica=servers[0].url[7:]) == 1
    assert sample(proxy, "in_flight") == 0


@played()
async def test_a_stream_that_breaks_off_ends_with_an_error_event(proxy, servers, client):
    """A stream that breaks off is not retried; it ends with its whole events and an error."""
    servers[0].script = "break"
    status, _, text = await ask(client, stream=True)
    *words, error = events(text)
    assert (status, [word["choices"][0]["text"] for word in words]) == (200, ["one", "two"])
    assert error["error"]["code"] == 503
    assert "[DONE]" not in text
    assert not servers[1].calls


@played()
async def test_what_comes_just_before_a_server_dies_is_passed_on(proxy, servers, client):
    """Bytes that came before the connection was lost are read before its error is raised."""
    protocol = aiohttp.base_protocol.BaseProtocol(asyncio.get_running_loop())
    content = aiohttp.StreamReader(protocol, 1 << 16)
    content.feed_data(b"data: 1\n\n")
    content.feed_data(b"data: 2\n\n")
    content.set_exception(aiohttp.ClientPayloadError("cut"))
    response = SimpleNamespace(content=content)
    assert await proxy._part(response) == b"data: 1\n\ndata: 2\n\n"
    with pytest.raises(aiohttp.ClientPayloadError, match="cut"):
        await proxy._part(response)


@played()
async def test_a_response_500_is_passed_on_and_not_retried(proxy, servers, client):
    """A response 500 is returned to the client and not retried at another server."""
    servers[0].script = "fail"
    status, _, text = await ask(client)
    assert (status, json.loads(text)["error"]["message"]) == (500, "fail")
    assert not servers[1].calls


@played()
async def test_without_a_server_requests_are_refused(proxy, servers, client):
    """With all servers down, requests and health checks get 503, with an error of the API."""
    for server in servers:
        await server.stop()
    await until(lambda: not proxy.fleet.dispatcher.up)
    status, headers, text = await ask(client)
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(text)["error"]["type"] == "server_error"
    for path in ("/health", "/v1/models"):
        async with client.get(path) as answer:
            assert answer.status == 503


@played(count=1, router=Hits())
async def test_a_restarted_server_is_used_again(proxy, servers, client):
    """A server that restarts at its address is used again, and its prefixes are forgotten."""
    (server,) = servers
    await ask(client, prompt="x" * 640)
    await server.stop()
    await until(lambda: not proxy.fleet.dispatcher.up)
    assert sample(proxy, "up") == 0
    await server.start()
    await until(lambda: proxy.fleet.dispatcher.up)
    status, _, _ = await ask(client, prompt="x" * 640)
    assert status == 200
    assert sample(proxy, "hit_tokens_total") == 0


@played(failures=3, health_interval=60)
async def test_three_failed_checks_in_a_row_make_a_server_down(proxy, servers, client, capsys):
    """A server is down after three failed checks in a row, and up again after a success.

    A line tells either. Its replica has the usage of its cache.
    """
    server, states = proxy.fleet.servers[0], []
    assert server.replica.usage == 0.25
    for healthy in (False, False, True, False, False, False, True):
        servers[0].healthy = healthy
        await proxy.fleet.check(server, proxy._session)
        states.append(server.replica.up)
    assert states == [*[True] * 5, False, True]
    said = map(sentence, capsys.readouterr().err.splitlines())
    name = f"kvcore: {servers[0].url[7:]} is"
    assert [line for line in said if line.startswith(name)] == [
        f"{name} {state}" for state in ("up", "down", "up")
    ]


@played()
async def test_a_request_that_waits_at_a_lost_server_is_sent_to_another(proxy, servers, client):
    """A request that waits at a server is sent to another one as soon as the first is down."""
    servers[0].script = "wait"
    asked = asyncio.create_task(ask(client))
    await until(lambda: servers[0].calls)
    servers[0].healthy = False
    status, headers, _ = await asked
    assert (status, headers["x-kvcore-replica"]) == (200, servers[1].url[7:])
    assert [server.replica.requests for server in proxy.fleet.servers] == [0, 0]


@played(first_byte_timeout=0.1)
async def test_a_request_is_sent_to_another_server_after_the_timeout(proxy, servers, client):
    """A request is sent to another server after the first-byte timeout, or gets 503."""
    servers[0].script = "wait"
    assert (await ask(client))[0] == 200
    servers[1].script = "wait"
    assert (await ask(client))[0] == 503
    await until(lambda: servers[0].left == 2)


@played(first_byte_timeout=0.05)
async def test_the_connection_of_an_answer_without_a_byte_is_closed(proxy, servers, client):
    """A server whose answer has headers and no more is left."""
    servers[0].script = "silent"
    assert (await ask(client, stream=True))[0] == 200
    await until(lambda: servers[0].left == 1)


@played(between_timeout=0.1)
async def test_a_stream_that_pauses_for_too_long_ends(proxy, servers, client):
    """A stream that pauses for longer than its timeout ends with an error event."""
    servers[0].script = "pause"
    _, _, text = await ask(client, stream=True)
    assert "error" in events(text)[-1]
    await until(lambda: servers[0].left == 1)


@pytest.mark.parametrize("stream", [False, True])
@played()
async def test_the_request_of_a_disconnected_client_is_cancelled(
    proxy, servers, client, stream
):
    """A request whose client disconnects is cancelled at its server and no longer in flight."""
    servers[0].script = "pause" if stream else "wait"
    asked = asyncio.create_task(ask(client, stream=stream))
    await until(lambda: servers[0].calls)
    asked.cancel()
    await until(lambda: servers[0].left == 1)
    await until(lambda: sample(proxy, "in_flight") == 0)
    assert proxy.fleet.servers[0].replica.requests == 0
    await until(lambda: sample(proxy, "requests_total", status="499") == 1)


@played(client_timeout=0.3)
async def test_a_client_that_does_not_read_is_disconnected(proxy, servers, client):
    """A client that does not read is disconnected, and the proxy buffers a bounded amount."""
    servers[0].script = "flood"
    body = json.dumps(prompt(stream=True)).encode()
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(http_request(body))
    await until(lambda: servers[0].left == 1)
    assert servers[0].flooded < 50_000_000
    assert sample(proxy, "in_flight") == 0
    await until(lambda: not proxy._listener._http.connections)
    writer.transport.abort()
    del reader


@played(client_timeout=0.2)
async def test_a_client_that_does_not_read_a_whole_answer_is_disconnected(
    proxy, servers, client
):
    """A client that does not take a whole answer in time is counted as one that has gone."""
    servers[0].counted = {"prompt_tokens": 40, "text": "x" * (8 << 20)}
    host, port = proxy.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect((host, int(port)))
        slow.sendall(http_request(json.dumps(prompt()).encode()))
        await until(lambda: sample(proxy, "requests_total", status="499") == 1)
        await until(lambda: not proxy._listener._http.connections)
    assert sample(proxy, "in_flight") == 0


@played(client_timeout=0.2)
async def test_a_client_that_sends_slowly_is_disconnected(proxy, servers, client):
    """A client that sends its body too slowly gets 408; without headers it gets nothing."""
    whole = http_request(json.dumps(prompt()).encode())
    answer = await raw(proxy, whole[:-5])
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"the request came too slowly"' in answer
    assert await raw(proxy, whole[:40]) == b""
    assert not any(server.calls for server in servers)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b"{nonsense", "application/json"),
        (400, b"[1]", "application/json"),
        (400, b'{"messages": []}', "application/json"),
        (400, b'{"prompt": "\xff"}', "application/json"),
        (400, b"[" * 100_000, "application/json"),
        (413, b" " * 600_000, "application/json"),
        (415, b"{}", "text/plain"),
    ],
)
@played(count=1, body="500kB")
async def test_a_malformed_request_is_refused(proxy, servers, client, status, body, kind):
    """A malformed request gets an error of the API, and does not reach a server."""
    async with client.post(COMPLETIONS, data=body, headers={"Content-Type": kind}) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["type"] == "invalid_request_error"
    assert not servers[0].calls


@played(count=1)
async def test_a_large_request_is_passed_on(proxy, servers, client):
    """A request of 1.8 MB, below the limit, reaches its server whole."""
    body = BytesIO(json.dumps(prompt(["x" * 900_000, "y" * 900_000])).encode())
    kind = {"Content-Type": "application/json"}
    async with client.post(COMPLETIONS, data=body, headers=kind) as answer:
        assert answer.status == 200
    assert len(servers[0].calls[0]["prompt"][1]) == 900_000


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Huge: " + "x" * 100_000],
        [f"X-{index}: x" for index in range(1_000)],
        ["Transfer-Encoding: chunked"],
        ["Content-Length: 3"],
        ["Bad Header: x"],
        ["X-Fold: a\r\n b\x00"],
    ],
)
@played(count=1)
async def test_wrong_headers_are_refused(proxy, servers, client, headers):
    """Headers that are too long, too many, malformed or contradictory get status 400."""
    answer = await raw(proxy, http_request(json.dumps(prompt()).encode(), *headers))
    assert answer[9:12] == b"400"
    assert not servers[0].calls


@played(count=1)
async def test_headers_of_the_connection_end_at_the_proxy(proxy, servers, client):
    """The server gets headers of the API; cookies and headers of the connection are removed."""
    sent = {
        "Authorization": "Bearer key",
        "X-Request-Id": "7",
        "Connection": "x-secret, keep-alive",
        "X-Secret": "1",
        "Cookie": "a=b",
        "Proxy-Authorization": "x",
        "X-Forwarded-For": "10.0.0.1",
    }
    await ask(client, headers=sent)
    (got,) = servers[0].headers
    assert (got["authorization"], got["x-request-id"]) == ("Bearer key", "7")
    assert not {"x-secret", "cookie", "proxy-authorization", "x-forwarded-for"} & {
        name.lower() for name in got
    }


@pytest.mark.parametrize(
    "line",
    ["GET http://example.com/ HTTP/1.1", "GET /tokenize HTTP/1.1", "CONNECT a:1 HTTP/1.1"],
)
@played(count=1)
async def test_requests_for_other_paths_or_hosts_are_refused(proxy, servers, client, line):
    """Requests for other paths or other hosts get status 404, and do not reach a server."""
    answer = await raw(
        proxy, f"{line}\r\nHost: example.com\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b'"message":"Not Found"' in answer
    assert not servers[0].calls


@played(count=1, concurrency=1)
async def test_requests_above_the_limit_are_refused(proxy, servers, client):
    """A request beyond the concurrency limit gets 503 at once; later ones are served."""
    servers[0].script = "wait"
    asked = asyncio.create_task(ask(client))
    await until(lambda: servers[0].calls)
    assert (await ask(client))[0] == 503
    servers[0].gate.set()
    assert (await asked)[0] == 200
    assert (await ask(client))[0] == 200


@played(count=1)
async def test_requests_are_in_flight_side_by_side(proxy, servers, client):
    """Requests do not wait for each other at the proxy."""
    servers[0].script = "wait"
    asked = [asyncio.create_task(ask(client)) for _ in range(5)]
    await until(lambda: len(servers[0].calls) == 5)
    assert sample(proxy, "in_flight") == 5
    servers[0].gate.set()
    assert [(await each)[0] for each in asked] == [200] * 5


@played(count=1, connections=1)
async def test_connections_above_the_limit_are_closed(proxy, servers, client):
    """A connection beyond the limit is closed without a response."""
    assert (await ask(client))[0] == 200  # its connection stays open
    assert await raw(proxy, http_request(b"{}")) == b""


class FailingCallback(Router):
    """A router that raises in the callbacks named to its constructor."""

    name = "failing-callback"

    def __init__(self, *methods):
        self._failing = methods

    def cost(self, request, replica):
        """Return the same cost for every replica."""
        return 0


def _failing(method):
    def called(self, *_):
        if method in self._failing:
            raise ZeroDivisionError

    return called


for _method in ("on_routed", "on_first_token", "on_ended", "on_joined", "on_left"):
    setattr(FailingCallback, _method, _failing(_method))


class Stubborn(Router):
    """A router that sends every request to the first replica it has seen."""

    name = "stubborn"

    def __init__(self):
        self._first = None

    def route(self, request, replicas, now):
        """Return the first replica."""
        self._first = self._first or replicas[0]
        return self._first


@pytest.mark.parametrize(
    ("method", "status"),
    [("on_routed", 500), ("on_first_token", 200), ("on_ended", 200), ("on_joined", 200)],
)
def test_a_callback_of_a_router_that_raises_leaves_the_counts_right(method, status, capsys):
    """After a callback of the router has raised, no answered request counts as in flight.

    Its error is a line on stderr, whether it refuses the request or not.
    """

    async def scene(proxy, servers, client):
        assert (await ask(client))[0] == status
        for replica in proxy.fleet.dispatcher.replicas:
            counts = (
                replica.requests,
                replica.waiting,
                replica.waiting_tokens,
                replica.prompt_tokens,
            )
            assert counts == (0, 0, 0, 0)

    play(scene, router=FailingCallback(method))
    assert f"ZeroDivisionError in {method}()" in capsys.readouterr().err


@played(count=1, router=FailingCallback("on_left"), failures=1)
async def test_a_router_that_raises_in_on_left_does_not_end_the_checks(proxy, servers, client):
    """A server that recovers is found even if the router raised in `on_left`."""
    servers[0].healthy = False
    await until(lambda: len(proxy.fleet.dispatcher.up) == 0)
    servers[0].healthy = True
    await until(lambda: len(proxy.fleet.dispatcher.up) == 1)
    assert (await ask(client))[0] == 200


@played(router=Stubborn())
async def test_a_router_may_not_return_a_replica_that_refused_the_request(
    proxy, servers, client
):
    """If the router returns a replica that has refused the request, the client gets 500."""
    servers[0].script = "busy"
    assert (await ask(client))[0] == 500
    assert len(servers[0].calls) == 1


@pytest.mark.parametrize(
    ("status", "headers"), [(503, {}), (429, {}), (200, {"Content-Encoding": "gzip"})]
)
@played()
async def test_models_are_those_of_the_first_server_that_tells(
    proxy, servers, client, status, headers
):
    """A server that is busy, or whose answer cannot be passed on, has the next one asked."""

    async def answer(_):
        return web.Response(status=status, headers=headers)

    await servers[0].stop()
    servers[0]._models = answer
    await servers[0].start()
    async with client.get("/v1/models") as got:
        assert (got.status, got.headers["x-kvcore-replica"]) == (200, servers[1].url[7:])
        assert (await got.json())["data"] == [{"id": "tiny"}]


@played(count=1)
async def test_the_usage_of_a_server_of_several_engines_is_their_mean(proxy, servers, client):
    """A server of data-parallel ranks, each with a pool, tells a share of each."""
    servers[0].help, servers[0].usage = 'vllm:kv_cache_usage_perc{engine="1"} 0.75\n', 0.5
    await until(lambda: proxy.fleet.servers[0].usage == 0.625)


@pytest.mark.parametrize(("usage", "share"), [("nan", 0), ("inf", 0), ("-1", 0), ("1", 1)])
@played(count=1)
async def test_a_cache_usage_that_is_no_share_counts_as_0(proxy, servers, client, usage, share):
    """The usage of a replica's cache is what its server tells, and 0 if that is no share."""
    servers[0].usage = usage
    server = proxy.fleet.servers[0]
    server.usage = 0.5
    await until(lambda: server.usage != 0.5)
    assert server.usage == share


@played()
async def test_a_redirect_is_not_followed(proxy, servers, client):
    """A redirect of a server is returned to the client, and not followed by the proxy."""

    async def elsewhere(http):
        to = f"{servers[1].url}{http.path}"
        raise web.HTTPTemporaryRedirect(to)

    first = servers[0]
    await first.stop()
    for name in ("_complete", "_models", "_metrics"):
        setattr(first, name, elsewhere)
    await first.start()
    assert (await ask(client))[0] == 307
    async with client.get("/v1/models", allow_redirects=False) as answer:
        assert answer.status == 307
    assert not servers[1].calls
    checked = proxy.fleet.servers[0]
    checked.usage = 0.5
    await proxy.fleet.check(checked, proxy._session)
    assert (checked.usage, checked.replica.up) == (0.0, True)
    await first.stop()
    first._health = elsewhere
    await first.start()
    await until(lambda: not checked.replica.up)


@played(count=1, prefixes="tokens")
async def test_a_redirect_of_tokens_is_no_answer(proxy, servers, client):
    """A prompt goes to no other address than its server's; without tokens it is served too."""
    asked = []

    def elsewhere(text):
        asked.append(text)
        raise web.HTTPTemporaryRedirect(servers[0].url + "/tokenize")

    servers[0].tokenize = elsewhere
    assert (await ask(client))[0] == 200
    assert asked == ["a prompt"]


@played(count=1)
async def test_a_proxy_with_one_server_up_is_healthy(proxy, servers, client):
    """One server that is up is enough for a proxy to be healthy."""
    async with client.get("/health") as answer:
        assert (answer.status, await answer.json()) == (
            200,
            {"status": "ok", "up": 1, "replicas": 1},
        )


@played(count=1)
async def test_head_is_answered_as_get_without_a_body(proxy, servers, client):
    """A check by HEAD, as many load balancers make it, gets the status of GET, and no body."""
    line = b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    head, _, body = (await raw(proxy, line)).partition(b"\r\n\r\n")
    assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"")


@played(count=1)
async def test_a_proxy_that_ends_is_not_healthy(proxy, servers, client):
    """The health check of a proxy that ends tells a load balancer to send it no more."""
    await proxy.stop()
    answer = await proxy._health(None)
    assert (answer.status, json.loads(answer.body)["status"]) == (503, "unavailable")


@played(health_interval=60)
async def test_a_compressed_response_is_not_passed_on(proxy, servers, client):
    """A request with a compressed response is sent to another server: the first has failed."""

    async def packed(http):
        body = gzip.compress(b"data: [DONE]\n\n")
        headers = {"Content-Encoding": "gzip", "Content-Type": "text/event-stream"}
        return web.Response(body=body, headers=headers)

    first = servers[0]
    await first.stop()
    first._complete = packed
    await first.start()
    status, headers, _ = await ask(client, stream=True)
    assert proxy.fleet.servers[0].failures == 1
    assert (status, headers["x-kvcore-replica"]) == (
        200,
        proxy.fleet.servers[1].options.name,
    )


@pytest.mark.parametrize(
    ("router", "status", "why"), [(Failing(), 500, "plugin"), (Refusing(), 503, "refuses")]
)
def test_a_router_may_fail_or_refuse(router, status, why):
    """Requests get 500 if the router raises and 503 if it refuses; the proxy goes on."""

    async def scene(proxy, servers, client):
        for _ in range(2):
            found, _, text = await ask(client)
            assert (found, why in text) == (status, True)

    play(scene, router=router)


def test_a_router_that_fails_is_told_to_the_operator_alone(capsys):
    """Its error is a line on stderr, of many a few; clients learn neither text nor files."""

    async def scene(proxy, servers, client):
        for _ in range(10):
            status, _, text = await ask(client)
            assert (status, "a plugin of the server failed" in text) == (500, True)
            assert not {"failing", "raised", ".py", "cost"} & set(re.split(r"[^\w.]+", text))

    play(scene, router=Failing())
    lines = [line for line in capsys.readouterr().err.splitlines() if "'failing'" in line]
    assert [line.endswith("(10 times)") for line in lines] == [False, True]
    assert all("in cost()" in line or "in route()" in line for line in lines)


def test_the_trace_has_requests_and_routes(tmp_path):
    """The trace has requests and routes in order of arrival, and can be run as a workload.

    Its requests have the lengths that servers counted.
    """
    path = tmp_path / "day.jsonl.gz"

    async def scene(proxy, servers, client):
        servers[1].script = "die"
        servers[0].script = "wait"
        first = asyncio.create_task(ask(client, prompt="a" * 640))
        await until(lambda: servers[0].calls)
        second = asyncio.create_task(ask(client, headers={"x-session-id": "s"}, stream=True))
        await until(lambda: len(servers[0].calls) == 2)
        servers[0].gate.set()
        await asyncio.gather(first, second)
        return [server.url for server in servers]

    play(scene, trace=path)
    found = list(read_events(path))
    assert [each.event for each in found] == [
        *("HEADER", "REQUEST", "ROUTE", "REQUEST", "ROUTE", "ROUTE", "END")
    ]
    routes = [each.replica for each in found if each.event == "ROUTE"]
    assert routes == [0, 1, 0]
    first, second = TraceWorkload(path)
    assert (first.prompt_tokens, first.output_tokens, len(first.keys)) == (40, 3, 2)
    assert (second.prompt_tokens, second.output_tokens, len(second.session)) == (40, 3, 32)


def test_the_trace_has_a_request_for_each_answer(tmp_path):
    """Answers to one call, and its prompts, are requests with numbers of their own."""
    path = tmp_path / "day.jsonl"

    async def scene(proxy, servers, client):
        for prompts, choices in (("a" * 640, 2), (["a" * 640, "b" * 640], 1), ("a", 1)):
            assert (await ask(client, prompt=prompts, n=choices))[0] == 200

    play(scene, count=1, trace=path)
    found = list(TraceWorkload(path))
    assert [each.id for each in found] == [*range(5)]
    assert [each.output_tokens for each in found] == [1, 2, 1, 2, 3]
    assert [each.prompt_tokens for each in found] == [40, 40, 20, 20, 40]
    keys = [[*each.keys] for each in found]
    assert keys[0] == keys[1]
    assert (keys[2], keys[2] != keys[3]) == (keys[0][: len(keys[2])], True)


@pytest.mark.parametrize(
    ("router", "status", "why"),
    [(Refusing(), 503, "no server"), (Failing(), 500, "router failing failed")],
)
def test_a_request_that_the_router_sends_nowhere_is_in_the_trace(router, status, why, tmp_path):
    """A request at which the router refuses or raises has max_tokens as its output.

    The reason names a router that raises.
    """
    path = tmp_path / "day.jsonl"

    async def scene(proxy, servers, client):
        assert (await ask(client, max_tokens=7))[0] == status

    play(scene, router=router, trace=path)
    _, _, reject, _ = events = list(read_events(path))
    assert [event.event for event in events] == ["HEADER", "REQUEST", "REJECT", "END"]
    assert reject.why == why
    assert [each.output_tokens for each in TraceWorkload(path)] == [7]


def test_a_request_refused_by_a_server_is_not_in_the_trace(tmp_path):
    """A request that a server refuses as invalid is not in the trace."""

    async def scene(proxy, servers, client):
        servers[0].script = "refuse"
        assert (await ask(client))[0] == 400
        servers[0].script = "answer"
        assert (await ask(client))[0] == 200

    play(scene, count=1, trace=tmp_path / "day.jsonl")
    assert [each.id for each in TraceWorkload(tmp_path / "day.jsonl")] == [1]


USAGE = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9, '
    b'"prompt_tokens_details": {"cached_tokens": 4}}}'
)
PASSED = [
    b'data: {"choices":[{"text":"a"}]}',
    b'data: {"choices": [{"text": "b"}], "usage": null}',
    b'data: {"choices": [{"text": "c"}], "usage": {}}',
    b'data: {"usage": nonsense',
    b'data: ["usage"]',
    b'data: {"usage": 5, "choices": []}',
    b': ping of the "usage"',
    b'event: x\ndata: {"choices":[{}]}',
    b"",
]
ENDS = [b"\n\n", b"\r\n\r\n"]


@settings(max_examples=max(settings.default.max_examples, 50))
@given(
    st.lists(st.tuples(st.sampled_from([USAGE, *PASSED]), st.sampled_from(ENDS)), max_size=5),
    st.lists(st.integers(1, 60), max_size=20),
    st.booleans(),
)
@example([(b"", b"\n\n")], [], False)  # noqa: FBT003 - as hypothesis has it
def test_a_stream_is_passed_on_in_whole_events(events, sizes, counted):
    """A stream is passed on in whole events, however its bytes are split.

    Only the usage that the client has not asked for is left out.
    """
    flight = Flight(Request(id=0, prompt_tokens=1, key_tokens=16))
    stream = EventStream(flight, counted=counted)
    data = b"".join(event + end for event, end in events) + b"data: [DO"
    cuts = [*accumulate(sizes, initial=0), len(data)]
    parts = [stream.feed(data[begin:end]) for begin, end in pairwise(cuts)]
    kept = [event + end for event, end in events if counted or event != USAGE]
    assert b"".join(parts) == b"".join(kept)
    assert stream.rest == b"data: [DO"
    assert all(part.endswith(b"\n") for part in parts if part)
    told = USAGE in dict(events)
    assert flight.prompt == (7 if told else None)
    assert told or flight.output == b"".join(kept).replace(b" ", b"").count(b'"choices":[{')


@pytest.mark.parametrize(
    ("usage", "prompt", "output", "cached"),
    [
        ({}, 5, 6, 0),
        ({"prompt_tokens": 7, "completion_tokens": 0}, 7, 0, 0),
        ({"prompt_tokens": 0, "completion_tokens": -1}, 5, 6, 0),
        ({"prompt_tokens_details": {"cached_tokens": 3}}, 5, 6, 3),
        ({"prompt_tokens_details": {"cached_tokens": True}}, 5, 6, 0),
        ({"prompt_tokens_details": 4}, 5, 6, 0),
    ],
)
def test_lengths_are_those_that_a_server_has_counted(usage, prompt, output, cached):
    """Lengths that a server counts replace those of the proxy, if they are numbers."""
    flight = Flight(Request(id=0, prompt_tokens=1, key_tokens=16), prompt=5, output=6)
    assert take_usage(flight, usage) == cached
    assert (flight.prompt, flight.output) == (prompt, output)


def test_a_proxy_runs_until_a_signal(tmp_path, monkeypatch, capsys):
    """`run` routes from `ready` on until SIGTERM; it raises what has ended the trace.

    At the signal it says how to end at once. An error of `ready` leaves a whole trace too.
    """
    served = []

    def ready(proxy):
        served.append(proxy.url)
        os.kill(os.getpid(), signal.SIGTERM)

    config = RouteConfig.from_options(["http://127.0.0.1:9"], port=0, trace=tmp_path / "day")
    run(config, ready)
    assert served[0].startswith("http://127.0.0.1:")
    assert [line.event for line in read_events(tmp_path / "day")] == ["HEADER", "END"]
    assert "ending; a second signal does not wait" in capsys.readouterr().err
    (tmp_path / "day").unlink()
    with pytest.raises(ZeroDivisionError):
        run(config, lambda _: 1 // 0)
    assert [line.event for line in read_events(tmp_path / "day")] == ["HEADER", "END"]

    def full(*_):
        msg = "no space left"
        raise StorageError(msg)

    monkeypatch.setattr(TrafficLog, "close", full)
    with pytest.raises(StorageError, match="no space left"):
        run(config, ready)


@played(count=1)
async def test_a_proxy_that_starts_has_nothing_to_warn_of(proxy, servers, client, capsys):
    """Where all connections may be open, no limit is told; that a server is up is."""
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence(line) == f"kvcore: {servers[0].url[7:]} is up"
    assert sample(proxy, "up") == 1


def test_a_connection_of_a_client_has_two_open_files(monkeypatch, capsys):
    """The other one is to a server: half as many connections fit below the limit."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (1_024, 1_024))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)

    async def scene(proxy, servers, client):
        pass

    play(scene, count=1)
    assert "at most 384 connections of 4,096:" in capsys.readouterr().err


def test_a_server_whose_metrics_fail_stays_up(capsys):
    """A healthy server whose cache usage cannot be read is up, at a usage of 0; told once."""

    async def scene(proxy, servers, client):
        (server,) = proxy.fleet.servers
        await until(lambda: server.usage == 0.25)
        servers[0].usage = "0,5"
        for _ in range(5):
            await proxy.fleet.check(server, proxy._session)
            assert (server.replica.up, server.failures, server.usage) == (True, 0, 0.0)

    play(scene, count=1)
    told = capsys.readouterr().err
    assert told.count("its cache usage is unknown, and counts as 0: /metrics: ValueError") == 1
    assert " is down" not in told


def test_a_server_that_is_down_at_the_start_is_in_the_metrics():
    """The metrics have each server from the start, whether it is up or not."""

    async def scene(proxy, servers, client):
        assert (
            'kvcore_route_up{replica="127.0.0.1:9"} 0.0' in proxy.fleet.metrics.text().decode()
        )

    play(scene, count=0, replicas=["http://127.0.0.1:9"])


@played(count=1)
async def test_an_abort_ends_the_requests_in_flight(proxy, servers, client):
    """After `abort` no request is waited for: its client gets no answer."""
    servers[0].script = "wait"
    asked = asyncio.create_task(ask(client))
    await until(lambda: servers[0].calls)
    proxy.abort()
    with pytest.raises(aiohttp.ClientError):
        await asked
    await until(lambda: servers[0].left == 1)


@played(prefixes="tokens")
async def test_servers_make_tokens_by_turns(proxy, servers, client):
    """The work of `/tokenize` is shared among the servers that are up.

    They are asked for the tokens of one text: none has an answer to several.
    """
    counts = Counter()
    for index, server in enumerate(servers):
        server.tokenize = lambda _, index=index: counts.update([index]) or {"tokens": [1]}
    for _ in range(4):
        await ask(client)
        await ask(client, prompt=["a", "b"])
        await ask(client, prompt=[1, 2])
    assert counts == {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("status", "again"),
    [
        *((status, True) for status in (429, 502, 503, 504)),
        *((status, False) for status in (400, 404, 500, 501, 599)),
    ],
)
@played(failures=100)
async def test_a_busy_server_is_no_failure_and_another_one_is_asked(
    proxy, servers, client, status, again
):
    """Statuses of a server that is busy or going down have a request sent to another one."""
    servers[0].sent = b"HTTP/1.1 %d No\r\nContent-Type: application/json\r\n" % status
    got, headers, _ = await ask(client)
    assert got == (200 if again else status)
    assert headers["x-kvcore-replica"] == servers[again].url[7:]
    assert proxy.fleet.servers[0].failures == 0


@pytest.mark.parametrize(("length", "failures"), [(1, 1), (LARGE, 0)])
@played(count=1, failures=100, health_interval=60)
async def test_a_connection_lost_at_a_large_body_is_no_failure(
    proxy, servers, client, length, failures
):
    """A server that closes at what a client has sent it is not down for all others."""
    servers[0].script = "die"
    body = json.dumps(prompt("a" * length)).encode()
    answer = await raw(proxy, http_request(body, "Connection: close"))
    assert answer[9:12] == b"503"
    assert proxy.fleet.servers[0].failures == failures


def test_what_has_come_is_read_before_each_part_of_a_large_body():
    """A server that refuses a body while it is sent has its answer read, though it closes."""

    async def scene():
        here, there = socket.socketpair()
        with here, there:
            came = []
            asyncio.get_running_loop().add_reader(here, lambda: came.append(here.recv(1)))
            async for part in _in_parts(b"a" * 3 * PART):
                assert len(part) == PART
                there.send(b"b")
                sent = len(came)
            assert sent == 2
            asyncio.get_running_loop().remove_reader(here)

    asyncio.run(scene())


@pytest.mark.parametrize(("less", "status"), [(0, 200), (1, 503)])
@played(health_interval=60)
async def test_an_answer_may_be_as_large_as_the_limit(proxy, servers, client, less, status):
    """The models that a server tells are passed on up to the limit of an answer.

    A refusal names the server that was asked last, and says what is wrong with its answer.
    """
    async with client.get("/v1/models") as answer:
        data = await answer.read()
    proxy.config = attrs.evolve(proxy.config, answer=len(data) - less)
    async with client.get("/v1/models") as answer:
        assert answer.status == status
        text = await answer.text()
    assert text == data.decode() or f"{servers[-1].url[7:]}: its answer is too large" in text


@played(answer=10, health_interval=60)
async def test_an_answer_that_is_too_large_is_no_failure(proxy, servers, client):
    """A whole answer beyond the limit is not passed on; its length is its client's choice."""
    status, _, text = await ask(client)
    assert status == 503
    assert "its answer is too large" in text
    assert [server.failures for server in proxy.fleet.servers] == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
@played(first_byte_timeout=0.1, health_interval=60, failures=100)
async def test_only_a_stream_that_does_not_begin_in_time_is_a_failure(
    proxy, servers, client, stream
):
    """The first byte of a whole answer comes at its end, which is its client's choice."""
    for server in servers:
        server.script = "wait"
    status, _, text = await ask(client, stream=stream)
    assert status == 503
    assert "it did not answer in time" in text
    assert [server.failures for server in proxy.fleet.servers] == [stream, stream]


@played(count=1, health_interval=60)
async def test_an_event_that_is_too_long_is_no_failure(proxy, servers, client):
    """An event beyond the limit ends its stream alone: it has what its client asked for."""

    async def long(http):
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(http)
        await out.write(b"data: {}\n\n")
        await out.write(b"x" * (LONGEST_EVENT + 1))
        return out

    (server,) = servers
    await server.stop()
    server._complete = long
    await server.start()
    _, _, text = await ask(client, stream=True)
    assert "an event of its stream is too long" in text
    assert proxy.fleet.servers[0].failures == 0


def test_a_port_in_use_is_refused(tmp_path):
    """The error for a port in use names it; no trace and no connection to a server is left."""

    async def scene(proxy, servers, client):
        port = int(proxy.url.rpartition(":")[2])
        trace = tmp_path / "day.jsonl"
        other = Proxy(RouteConfig.from_options([servers[0].url], port=port, trace=trace))
        error = f"port {port} of 127.0.0.1: Address already in use"
        with pytest.raises(InputError, match=error):
            await other.start()
        assert other._session.closed

    play(scene, count=1)
    assert not list(tmp_path.iterdir())


@played(count=1)
async def test_a_whole_answer_begins_with_its_first_byte(proxy, servers, client, monkeypatch):
    """The time to the first byte of an answer that comes in two parts is that of the first."""
    now = [0]
    monkeypatch.setattr(proxy.fleet, "now", lambda: now[0])
    servers[0].script = "pause"
    servers[0].sent = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    asked = asyncio.create_task(ask(client))
    await until(lambda: [each for each in proxy.fleet.servers[0].attempts if not each.deadline])
    now[0] = 5 * 10**9
    servers[0].gate.set()
    assert (await asked)[0] == 200
    assert sample(proxy, "first_byte_seconds_sum") == 0


def test_the_time_to_the_first_byte_counts_from_the_arrival():
    """A request that came at 5 s and whose answer begins at 7 s has waited for 2 s."""
    now = [0]
    fleet = Fleet(RouteConfig.from_options(["http://127.0.0.1:9"]), lambda: now[0])
    fleet._join(fleet.servers[0])
    asked = Request(id=0, arrival=5 * 10**9, prompt_tokens=1, key_tokens=16)
    attempt = fleet.send(Flight(asked))
    fleet.first_byte(attempt, 7 * 10**9)
    told = 'first_byte_seconds_sum{replica="127.0.0.1:9"} 2.0'
    assert told in fleet.metrics.text().decode()


def test_a_router_is_told_how_long_a_server_computes_a_prompt():
    """Of 50 tokens, a server that computes 100 tokens a second computes half a second."""
    replica = {"url": "http://127.0.0.1:9", "prefill_rate": 100.0}
    (server,) = Fleet(RouteConfig.from_options([replica]), lambda: 0).servers
    assert server.replica.prefill_seconds(50, 7) == 0.5


def test_the_openai_client_reads_responses_streams_and_errors():
    """The client of the package openai reads completions, streams, models and errors."""
    openai = pytest.importorskip("openai", reason="needs openai")

    async def scene(proxy, servers, client):
        async with openai.AsyncOpenAI(
            base_url=f"{proxy.url}/v1", api_key="none", max_retries=0
        ) as user:
            answer = await user.completions.create(model="tiny", prompt="a")
            assert answer.choices[0].text == "one two three"
            assert [each.id async for each in user.models.list()] == ["tiny"]
            servers[1].script = "break"
            stream = await user.completions.create(model="tiny", prompt="a", stream=True)
            with pytest.raises(openai.APIError, match="ended within its answer"):
                [each async for each in stream]
            for server in servers:
                server.script = "die"
            with pytest.raises(openai.InternalServerError):
                await user.completions.create(model="tiny", prompt="a")

    play(scene)


def test_kv_events_of_servers_update_the_replicas_of_a_prefix():
    """KV events of servers update at once which replica holds a prefix.

    Blocks are added when stored, and removed when evicted, cleared or lost with their server.
    """
    pytest.importorskip("zmq", reason="needs pyzmq")
    tokens = [ord(letter) for letter in "abcdefgh"]
    stored = BlockStored(hashes=(1, 2), tokens=tuple(tokens), block_size=4, medium="GPU")
    later = BlockStored(hashes=(3,), parent=2, tokens=(105,) * 4, block_size=4, medium="GPU")
    salted = BlockStored(hashes=(7,), tokens=(120,) * 4, block_size=4, extra_keys=(["s"],))

    async def scene(proxy, servers, client):
        def found(text):
            call = Call.read(COMPLETIONS, json.dumps({"prompt": text}).encode())
            codes = [ord(letter) for letter in text]
            request = call.request(None, tokens=codes, key_tokens=4, key_chars=64)
            return dict(view.find(request, proxy.fleet.now()))

        view = proxy.fleet.dispatcher.view
        for publisher in publishers:
            assert await asyncio.to_thread(publisher.wait_for, 1, 10)
        publish_batch(publishers[1], stored, salted)
        publish_batch(publishers[1], later)
        await until(lambda: found("abcdefghiiii") == {1: 12})
        assert found("xxxx") == {}
        for _ in range(2):
            _, headers, _ = await ask(client, prompt="abcdefghiiii")
            assert headers["x-kvcore-replica"] == servers[1].url[7:]
        publish_batch(publishers[1], BlockRemoved(hashes=(3, 2), medium="GPU"))
        await until(lambda: found("abcdefghiiii") == {1: 4})
        publish_batch(publishers[0], stored)
        await until(lambda: found("abcdefghiiii") == {0: 8, 1: 4})
        publish_batch(publishers[0], AllBlocksCleared())
        await until(lambda: found("abcdefghiiii") == {1: 4})
        servers[1].healthy = False
        await until(lambda: found("abcdefghiiii") == {})

    async def run():
        servers = [await Upstream().start() for _ in publishers]
        tables = [
            {"url": server.url, "kv_events": publisher.address, "block_size": 4}
            for server, publisher in zip(servers, publishers, strict=True)
        ]
        async with routed(
            servers, replicas=tables, view="events", key_tokens=4, router=Hits()
        ) as parts:
            await scene(*parts)

    with Publisher("tcp://127.0.0.1:*") as left, Publisher("tcp://127.0.0.1:*") as right:
        publishers = [left, right]
        asyncio.run(run())


def publish_batch(publisher, *events):
    """Publish `events` in one batch."""
    publisher.publish(encode(EventBatch(ts=1.0, events=events)))


def test_keys_of_the_proxy_match_the_events_of_a_kvcore_server():
    """With a server of kvcore, the proxy's keys match the server's tokens and KV events."""
    pytest.importorskip("torch", reason="needs torch")
    from helpers.online import free_port, serving  # noqa: PLC0415 - imports torch

    from kvcore_online.server import ServeConfig  # noqa: PLC0415 - as above

    live, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))

    async def run(url):
        table = {"url": url, "kv_events": live, "kv_replay": replay}
        text = " ".join(map(str, range(40)))
        async with routed([], replicas=[table], view="events", router=Hits()) as parts:
            proxy, _, client = parts
            async with asyncio.timeout(30):
                while sample(proxy, "hit_tokens_total") < 32:
                    _, _, answer = await ask(client, prompt=text)
                    assert json.loads(answer)["usage"]["prompt_tokens"] == 40
            assert json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32

    config = ServeConfig(port=0, name="tiny", grace=2, kv_events=live, kv_replay=replay)
    with serving(config) as server:
        asyncio.run(run(server.url))


def test_a_full_disk_leaves_the_trace_up_to_it(tmp_path, monkeypatch, capsys):
    """On a full disk the proxy goes on without a trace, and keeps what it has written.

    The error is kept for the exit code.
    """
    path = tmp_path / "day.jsonl"

    async def scene(proxy, servers, client):
        await ask(client)
        proxy.fleet.log.sync(proxy.fleet.now())
        proxy.fleet.log.file._sink._wait()

        def full(*_):
            msg = "cannot write the trace: No space left on device"
            raise StorageError(msg)

        monkeypatch.setattr(AtomicFile, "write", full)
        for _ in range(3):  # a write that fails is noticed by the next one
            await ask(client)
            proxy.fleet._write(lambda log: log.sync(proxy.fleet.now()))
        assert proxy.fleet.log is None
        assert (await ask(client))[0] == 200
        return proxy.fleet.log_error

    assert isinstance(play(scene, trace=path), StorageError)
    (part,) = tmp_path.iterdir()
    assert part.name == "day.jsonl.part"
    assert [event.event for event in read_events(part)] == ["HEADER", "REQUEST", "ROUTE"]
    assert f"{part} keeps what was written before; the proxy goes on" in capsys.readouterr().err


def test_the_trace_tells_nobody_what_was_asked(tmp_path):
    """Salts, sessions, users and keys of prompts are in the trace as keyed hashes alone.

    Two recordings by one key agree; without that key a guessed prompt cannot be confirmed.
    """
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    secret = {"cache_salt": "TOP-SECRET-SALT", "user": "alice@example.org"}

    async def scene(proxy, servers, client):
        await ask(client, prompt="a" * 640, **secret)
        await ask(client, prompt="a" * 640, headers={"x-session-id": "Alice"})
        assert servers[0].calls[0]["cache_salt"] == secret["cache_salt"]

    found = []
    for index, trace_key in enumerate([key, key, None, None]):
        path = tmp_path / f"{index}.jsonl"
        play(scene, count=1, trace=path, trace_key=trace_key)
        text = path.read_text()
        assert not [word for word in (*secret.values(), "Alice") if word in text]
        known = Call.read(COMPLETIONS, json.dumps(prompt("a" * 640)).encode()).request(
            None, tokens=None, key_tokens=16, key_chars=64
        )
        requests = list(TraceWorkload(path))
        assert not set(known.keys) & {key for request in requests for key in request.keys}
        found.append([(request.salt, request.session, request.keys) for request in requests])
    assert found[0] == found[1]
    assert len({str(each) for each in found}) == 3


def test_a_request_at_which_a_server_fails_is_in_the_trace(tmp_path):
    """A request that gets a status 500 is in the trace, with what it asked for, and refused."""
    path = tmp_path / "day.jsonl"

    async def scene(proxy, servers, client):
        servers[0].script = "fail"
        assert (await ask(client, max_tokens=7))[0] == 500
        servers[0].script = "answer"
        assert (await ask(client, max_tokens=7))[0] == 200

    play(scene, count=1, trace=path)
    read = list(read_events(path))
    assert [line.why for line in read if line.event == "REJECT"] == ["status 500"]
    assert sum(line.event == "ROUTE" for line in read) == 2
    assert [each.output_tokens for each in TraceWorkload(path)] == [7, 3]
