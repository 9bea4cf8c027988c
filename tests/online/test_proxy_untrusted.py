"""A wrong value of one client or one server costs that one, and nothing that others share."""

# ruff: noqa: ARG001 - every scene takes all parts

import asyncio
import json
import socket
import threading
import weakref
from contextlib import asynccontextmanager
from time import process_time

import pytest
from helpers.online_scenes import (
    COMPLETIONS,
    ask,
    http_request,
    play,
    played,
    raw,
    sample,
    sentence,
)
from helpers.upstreams import prompt, until

from kvcore import Request
from kvcore.errors import InputError
from kvcore.request import TextRequest, block_keys
from kvcore.untrusted import LONGEST_EVENT, MOST_NAMES, MOST_VALUES, parse_json
from kvcore_online import proxy as proxy_module
from kvcore_online.listener import LONG, Listener
from kvcore_online.prompts import Call
from kvcore_online.proxy import EventStream, UnservedError, _usage_document
from kvcore_online.traffic import Flight
from kvcore_plugins.workload.recorded import TraceWorkload

web = pytest.importorskip("aiohttp.web", reason="needs aiohttp")

COUNTS = [-1, 0, 2**31, 2**40 + 1, 2**63 - 1, 2**63, 2**64, 1e300, True, "9", None, [], {}]
HEADERS = [bytes([byte]) * 3 for byte in (*range(9), *range(14, 32), 0x7F, 0x80, 0xC3, 0xFF)]
DEPTHS = [255, 900, 1_000, 1_025, 100_000]


def deep(levels, start="[", end="]"):
    """Return JSON that is nested so many levels deep, as text."""
    return start * levels + end * levels


@asynccontextmanager
async def listening(answer, *, requests=1, **options):
    """Listen while a client has sent requests, which `answer` answers, and reads nothing."""
    times = {"client_timeout": 30, "shutdown_timeout": 30, **options}
    address = {"host": "127.0.0.1", "port": 0}
    routes = {"GET /": answer}
    listener = Listener(routes, "a test", **address, body=1, connections=1, **times)
    await listener.start()
    with socket.create_connection(listener._server.sockets[0].getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * requests)
        try:
            yield listener
        finally:
            await listener.stop()


def test_no_header_of_a_client_ends_the_trace(tmp_path):
    """Each request that is answered is in the trace, whatever bytes its headers have."""
    path = tmp_path / "day.jsonl"

    async def scene(proxy, servers, client):
        body = json.dumps(prompt()).encode()
        answered = 0
        for value in HEADERS:
            for name in ("x-session-id", "user-agent", "x-request-id", "authorization"):
                start, end = http_request(body, "Connection: close").split(b"\r\n\r\n", 1)
                head = start + b"\r\n" + name.encode() + b": a" + value + b"b\r\n\r\n"
                status = int((await raw(proxy, head + end))[9:12])
                assert status in (200, 400)
                answered += status == 200
        return answered

    answered = play(scene, count=1, trace=path)
    assert answered >= 12  # the bytes above 0x7F, in four headers
    assert len(list(TraceWorkload(path))) == answered


@pytest.mark.parametrize("stream", [False, True])
def test_no_count_of_a_server_ends_the_trace(stream, tmp_path):
    """Each request is in the trace, whatever a server says that it has counted."""
    path = tmp_path / "day.jsonl"

    async def scene(proxy, servers, client):
        for count in COUNTS:
            for name in ("prompt_tokens", "completion_tokens", "prompt_tokens_details"):
                details = name.endswith("details")
                servers[0].counted = {name: {"cached_tokens": count} if details else count}
                assert (await ask(client, stream=stream))[0] == 200
        servers[0].counted = "nothing"
        assert (await ask(client, stream=stream))[0] == 200

    play(scene, count=1, trace=path)
    found = list(TraceWorkload(path))
    assert len(found) == 3 * len(COUNTS) + 1
    assert all(each.prompt_tokens <= 2**40 for each in found)


def test_a_request_that_cannot_be_written_is_left_out_of_the_trace(tmp_path, capsys):
    """A request that the trace cannot hold is left out, counted and told; the others are in."""
    path = tmp_path / "day.jsonl"

    async def scene(proxy, servers, client):
        for index in range(-3, 0):
            wrong = Request(id=f"\ud800{index}", prompt_tokens=1, key_tokens=16)
            flight = Flight(wrong)
            proxy.fleet.begin(flight)
            await ask(client)
            proxy.fleet.finish(flight)
        assert sample(proxy, "unlogged_total") == 3

    play(scene, trace=path)
    assert [each.id for each in TraceWorkload(path)] == [0, 1, 2]
    assert capsys.readouterr().err.count("a request is left out of the trace") == 1


def test_a_request_that_waits_for_the_trace_keeps_no_prompt(tmp_path):
    """While an older request runs, those that have ended are kept as they will be written."""

    async def scene(proxy, servers, client):
        proxy.fleet.begin(Flight(Request(id=-2, prompt_tokens=1, key_tokens=16)))
        tokens = range(1_600)
        waiting = TextRequest(
            id=-1,
            prompt_tokens=1_600,
            key_tokens=16,
            keys=block_keys(tokens, 16),
            tokens=tokens,
            salt="salt" * 10_000,
        )
        flight = Flight(waiting)
        proxy.fleet.begin(flight)
        proxy.fleet.finish(flight)
        assert type(flight.request) is Request
        assert len(flight.request.salt) == 32

    play(scene, trace=tmp_path / "day.jsonl")


def test_a_client_that_does_not_read_its_answer_is_disconnected():
    """A whole answer is taken in the time of the options, or its connection is closed."""
    answered = []

    async def answer(http):
        answered.append(http)
        return web.Response(body=bytes(64 << 20))

    async def scene():
        async with listening(answer, client_timeout=0.1) as listener:
            await until(lambda: answered and not listener._http.connections)

    asyncio.run(scene())


def test_a_client_that_reads_none_of_many_short_answers_is_disconnected():
    """Answers that fit into a buffer have no time of their own until it is full."""
    read = []

    async def answer(http):
        read.append(http)
        return web.Response(body=bytes(16 << 10))

    async def scene():
        async with listening(answer, client_timeout=0.1, requests=2_000) as listener:
            await until(lambda: read and not listener._http.connections)
        assert len(read) < 2_000

    asyncio.run(scene())


def test_a_request_without_end_is_ended_after_the_time_for_the_end():
    """A listener that stops closes what is open after that time, and waits no second time."""
    begun, ended = [], []

    async def answer(http):
        begun.append(http)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("the request")

    async def scene():
        async with listening(answer, shutdown_timeout=0.1) as listener:
            await until(lambda: begun)
            abort = listener.abort
            listener.abort = lambda: (ended.append("the time"), abort())

    asyncio.run(scene())
    assert ended == ["the time", "the request"]


@pytest.mark.parametrize("levels", DEPTHS)
@played(count=1)
async def test_json_nested_too_deeply_is_refused(proxy, servers, client, levels, capfd):
    """A body nested too deeply gets 400 in the form of the API; nothing is printed."""
    fields = ("prompt", "model", "messages", "stream_options", "user", "tools", "stop", "n")
    for field in fields:
        for text in (deep(levels), deep(levels, '{"a":', "}").replace(":}", ":1}")):
            body = {"prompt": "a", "messages": [], "stream": True, field: "?"}
            data = json.dumps(body).replace('"?"', text).encode()
            path = "/v1/chat/completions" if field in ("messages", "tools") else COMPLETIONS
            headers = {"Content-Type": "application/json"}
            async with client.post(path, data=data, headers=headers) as answer:
                assert answer.status == 400
                kind = (await answer.json())["error"]["type"]
                assert kind == "invalid_request_error"
    assert not servers[0].calls
    assert "Traceback" not in capfd.readouterr().err


@played(count=1)
async def test_json_that_can_be_written_again_is_passed_on(proxy, servers, client):
    """A body of 254 levels, which is the most, reaches its server unchanged."""
    body = json.dumps(prompt(more="?")).replace('"?"', deep(253)).encode()
    headers = {"Content-Type": "application/json"}
    async with client.post(COMPLETIONS, data=body, headers=headers) as answer:
        assert answer.status == 200
    assert servers[0].calls == [json.loads(body)]


@pytest.mark.parametrize(
    "head",
    [
        *(b"HTTP/1.1 200 OK\r\nx-request-id: a%cb\r\n" % byte for byte in (1, 8, 14, 31, 127)),
        b"HTTP/1.1 200 OK\r\nx-request-id: a\xffb\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: \x01\r\n",
        b"HTTP/1.1 200 OK\r\nretry-after: \x1b[31m\r\n",
        b"HTTP/1.1 000 None\r\n",
        b"HTTP/1.1 101 Switching\r\n",
        b"HTTP/1.1 600 Odd\r\n",
        b"HTTP/1.1 999 Odd\r\n",
        b"HTTP/1.1 abc\r\n",
        b"\x00\xff\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: \x01\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 17 + b"HTTP/1.1 200 OK\r\n",
    ],
)
@played(failures=100, health_interval=60)
async def test_an_answer_that_cannot_be_passed_on_is_a_failure_of_its_server(
    proxy, servers, client, head, capfd
):
    """If status or headers of an answer cannot be passed on, another server is tried."""
    servers[0].sent = head
    status, headers, _ = await ask(client)
    assert (status, headers["x-kvcore-replica"]) == (200, servers[1].url[7:])
    assert sample(proxy, "retries_total", replica=servers[0].url[7:]) == 1
    assert proxy.fleet.servers[0].failures == 1
    assert "Traceback" not in capfd.readouterr().err


@played(count=1)
async def test_hints_before_an_answer_are_read(proxy, servers, client):
    """Up to 16 answers of status 1xx may come before that which is passed on."""
    servers[0].sent = b"HTTP/1.1 103 Early Hints\r\n\r\n" * 16 + b"HTTP/1.1 200 OK\r\n"
    assert (await ask(client))[0] == 200
    assert proxy.fleet.servers[0].failures == 0


@played(count=1)
async def test_an_unexpected_error_is_one_line_and_a_500(
    proxy, servers, client, monkeypatch, capsys
):
    """An unexpected error is a 500 of the API, and few lines for many requests."""

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(proxy.fleet, "begin", fail)
    for _ in range(12):
        status, _, text = await ask(client)
        assert (status, json.loads(text)["error"]["type"]) == (500, "server_error")
    monkeypatch.undo()
    assert (await ask(client))[0] == 200
    lines = capsys.readouterr().err.splitlines()
    assert [sentence(line) for line in lines if "ZeroDivisionError" in line] == [
        f"kvcore: {COMPLETIONS} failed: ZeroDivisionError: ",
        f"kvcore: {COMPLETIONS} failed: ZeroDivisionError:  (10 times)",
    ]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1%2Fcompletions"])
@pytest.mark.parametrize("expected", [b"\xff", b"wonders", b"100-continue"])
@played(count=1)
async def test_what_a_client_expects_fails_no_request(proxy, servers, client, expected, path):
    """An unknown expectation is ignored, be it no text; 100-continue is met before a body.

    A path with %2F is another one than that with a slash.
    """
    body = json.dumps(prompt()).encode()
    request = http_request(body, "Expect: ?", "Connection: close").replace(b"?", expected)
    answer = await raw(proxy, request.replace(COMPLETIONS.encode(), path.encode()))
    met = path == COMPLETIONS and expected == b"100-continue"
    first = b"HTTP/1.1 100 Continue\r\n\r\n" if met else b""
    status = b"HTTP/1.1 200 " if path == COMPLETIONS else b"HTTP/1.1 404 "
    assert answer.startswith(first + status)


@played(count=1)
async def test_a_client_of_http_1_0_is_not_told_to_continue(proxy, servers, client):
    """A client of HTTP/1.0 knows no answer before its answer: it gets one."""
    request = http_request(json.dumps(prompt()).encode(), "Expect: 100-continue")
    answer = await raw(proxy, request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.startswith(b"HTTP/1.0 200 ")


@pytest.mark.parametrize("error", [ZeroDivisionError, InputError])
@played(count=1)
async def test_an_error_within_an_answer_cuts_it(proxy, servers, client, monkeypatch, error):
    """An answer that has begun cannot become another one: its connection is closed."""

    def fail(*_):
        raise error

    monkeypatch.setattr(proxy, "_count_usage", fail)
    answer = await raw(proxy, http_request(json.dumps(prompt(stream=True)).encode()))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not answer.endswith(b"0\r\n\r\n")


@played(count=1)
async def test_checks_that_fail_unexpectedly_start_again(proxy, servers, client, monkeypatch):
    """An unexpected error in one job of the background ends neither that job nor another."""
    monkeypatch.setattr("kvcore_online.supervision.PAUSE_SECONDS", 0.0)

    async def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(proxy.fleet, "check", fail)
    await until(lambda: sample(proxy, "restarts_total") > 2)
    monkeypatch.undo()
    servers[0].healthy = False
    await until(lambda: not proxy.fleet.dispatcher.up)


def test_an_event_that_comes_byte_by_byte_is_read_once(monkeypatch):
    """The end of an event of any length is looked for once, however its bytes are split."""
    flight = Flight(Request(id=0, prompt_tokens=1, key_tokens=16))
    stream, ends, read = EventStream(flight, counted=False), proxy_module._EVENT_ENDS, []

    def counted(data, start):
        read.append(len(data) - start)
        return ends(data, start)

    monkeypatch.setattr(proxy_module, "_EVENT_ENDS", counted)
    for _ in range(LONGEST_EVENT // 256 - 1):
        assert not stream.feed(b"x" * 256)
    assert len(stream.feed(b"\r\n\r\ndata: {}")) == LONGEST_EVENT - 256 + 4
    assert sum(read) < 1.1 * LONGEST_EVENT


def test_the_beginning_of_an_event_is_kept_up_to_the_limit():
    """4 MiB without the end of an event are kept, and a byte more is refused."""
    flight = Flight(Request(id=0, prompt_tokens=1, key_tokens=16))
    stream = EventStream(flight, counted=False)
    assert stream.feed(b"x" * LONGEST_EVENT) == b""
    with pytest.raises(UnservedError, match="an event of its stream is too long"):
        stream.feed(b"x")


def test_an_event_with_many_empty_lines_is_read_once(monkeypatch):
    """An event with the usage is read once, however many empty lines end it."""
    flight = Flight(Request(id=0, prompt_tokens=1, key_tokens=16))
    stream, take, read = EventStream(flight, counted=False), EventStream._take, []
    monkeypatch.setattr(
        EventStream, "_take", lambda self, line: (read.append(len(line)), take(self, line))[1]
    )
    event = b'data: {"usage"' + b"x" * (LONGEST_EVENT >> 1)
    lines = b"\n" * (1 << 17)
    assert stream.feed(event + lines) == event + lines
    assert read == [len(event) + 1]


def test_parameters_of_content_types_cost_nothing():
    """The parameters of clients' and servers' content types are not parsed, however many."""
    many = b"; " * 4_000

    async def scene(proxy, servers, client):
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json"
        servers[0].sent = head + many + b"\r\n"
        body, statuses = json.dumps(prompt()).encode(), set()
        for index in range(10):
            request = http_request(body, "Connection: close")
            kind = b"application/json; a=%d" % index + many  # none is as another one was
            statuses.add((await raw(proxy, request.replace(b"application/json", kind)))[9:12])
        return statuses

    began = process_time()
    assert play(scene, count=1) == {b"200"}
    assert process_time() - began < 5


@pytest.mark.parametrize("levels", ["[]", "{}"])
def test_documents_of_many_lists_are_refused_before_they_are_parsed(levels):
    """A body or an answer of few megabytes cannot take the memory of millions of objects."""
    document = b'{"prompt": [' + b",".join([levels.encode()] * (MOST_VALUES + 1)) + b"]}"
    with pytest.raises(InputError, match="1,048,576 lists and objects, and 131,072 names"):
        Call.read(COMPLETIONS, document)


@pytest.mark.parametrize("space", ["", " ", "\t\n"])
@pytest.mark.parametrize("ending", ["", "\\\\", '\\\\\\"'], ids=["plain", "backslash", "quote"])
def test_documents_of_many_names_are_refused_before_they_are_parsed(space, ending):
    """A body of many names, however they are written, would hold the interpreter longest."""
    fields = (f'"{serial:x}{ending}"{space}:0' for serial in range(MOST_NAMES + 1))
    with pytest.raises(InputError, match="1,048,576 lists and objects, and 131,072 names"):
        Call.read(COMPLETIONS, b"{" + ",".join(fields).encode() + b"}")


@pytest.mark.parametrize("text", [":", '{"a": 1}'])
def test_names_in_a_prompt_are_no_names_of_the_body(text):
    """A prompt may hold documents: their names are text."""
    document = json.dumps({"prompt": text * (MOST_NAMES + 1)}).encode()
    assert Call.read(COMPLETIONS, document).raw == document


def test_long_bodies_delay_nobody(monkeypatch):
    """Long bodies are decoded one after another, and short requests do not wait for them."""
    begun, gate, running, most = asyncio.Event(), threading.Event(), [], []
    read = Call.read

    async def scene(proxy, servers, client):
        loop = asyncio.get_running_loop()

        def slow(path, body):
            if len(body) >= 1 << 16:
                running.append(body)
                most.append(len(running))
                loop.call_soon_threadsafe(begun.set)
                gate.wait(20)
                running.pop()
            return read(path, body)

        monkeypatch.setattr(Call, "read", slow)
        waiting = [asyncio.ensure_future(ask(client, text="a" * (1 << 16))) for _ in range(3)]
        await begun.wait()
        try:
            assert (await ask(client))[0] == 200
        finally:
            gate.set()
        return [status for status, _, _ in await asyncio.gather(*waiting)]

    assert play(scene, count=1) == [200] * 3
    assert max(most) == 1


def test_what_grows_with_a_long_body_is_done_beside_the_loop(monkeypatch):
    """Keys and the bytes for a server are made on a thread, as the JSON of a long body is."""
    threads = set()

    def noted(method):
        def call(*arguments, **options):
            threads.add(threading.current_thread())
            return method(*arguments, **options)

        return call

    async def scene(proxy, servers, client):
        for name in ("request", "sent"):
            monkeypatch.setattr(Call, name, noted(getattr(Call, name)))
        return (await ask(client, text="a" * LONG))[0]

    assert play(scene, count=1) == 200
    assert threads
    assert threading.current_thread() not in threads


def test_a_request_is_kept_as_bytes_while_a_server_answers(monkeypatch):
    """The JSON of a request, of up to 20 times its bytes, is gone when a server has it."""
    read, calls = Call.read, []

    def kept(path, body):
        call = read(path, body)
        calls.append(weakref.ref(call))
        return call

    async def scene(proxy, servers, client):
        servers[0].script = "wait"
        monkeypatch.setattr(Call, "read", kept)
        waiting = asyncio.ensure_future(ask(client, stream=True))
        await until(lambda: servers[0].calls)
        assert [call() for call in calls] == [None]
        servers[0].gate.set()
        assert (await waiting)[0] == 200

    play(scene, count=1)


def test_a_model_that_is_no_text_is_the_servers_to_refuse():
    """A model that is no text is in no key: 8 MB of numbers took 2 s to be written."""
    calls = [
        Call.read(COMPLETIONS, b'{"prompt": "a", "model": %s}' % model)
        for model in (b"[1]", b"null")
    ]
    options = {"tokens": None, "key_tokens": 1, "key_chars": 1}
    one, other = (call.request(None, **options).keys for call in calls)
    assert one == other


@played(count=1)
async def test_of_a_long_answer_the_usage_alone_is_decoded(proxy, servers, client, monkeypatch):
    """Nobody is served while JSON is decoded, and a server that says much has not failed.

    What the text says of a usage is no usage.
    """
    decoded = []

    def decode(data, *limits):
        decoded.append(len(data))
        return parse_json(data, *limits)

    text, logprobs = '"usage": {"prompt_tokens": 1}', [{"logprob": -1}] * (MOST_NAMES + 1)
    choices = [{"text": text, "logprobs": logprobs}]
    body = json.dumps({"usage": servers[0].counted, "choices": choices})
    monkeypatch.setattr("kvcore_online.proxy.parse_json", decode)
    monkeypatch.setattr(servers[0], "_answer", body.encode)
    status, _, passed_on = await ask(client)
    assert (status, passed_on) == (200, body)
    assert sample(proxy, "cached_tokens_total") == 32
    assert max(decoded) < 1_000


@pytest.mark.parametrize("longer", [False, True])
def test_of_an_answer_of_1_mib_a_usage_of_64_kib_is_decoded(longer):
    """A longer usage is not looked at; an answer that is shorter is decoded whole."""
    usage = b'"usage": {"prompt_tokens": 7'.ljust((1 << 16) - 1 + longer) + b"}"
    answer = (b'{"id": 1, ' + usage).ljust((1 << 20) - 1) + b"}"
    known = {"usage": {"prompt_tokens": 7}}
    assert _usage_document(answer) == ({} if longer else known)
    assert _usage_document(answer.replace(b" }", b"}", 1)) == {"id": 1, **known}


@played(count=1)
async def test_metrics_of_a_server_are_read_to_their_end(proxy, servers, client):
    """The usage of a server's cache is known although 700 kB are before it in its metrics."""
    servers[0].help, servers[0].usage = "# help\n" * 100_000, 0.75
    await until(lambda: proxy.fleet.servers[0].usage == 0.75)
