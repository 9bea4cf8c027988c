"""The proxy: an OpenAI-style API in front of several servers, routed by a plugin."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from io import BytesIO
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NoReturn, cast

import attrs
import orjson

from kvcore.errors import PolicyError
from kvcore.lazy import import_extra
from kvcore.request import Request
from kvcore.untrusted import (
    LONGEST_EVENT,
    LONGEST_TOKENS,
    MOST_VALUES,
    fits_header,
    header_text,
    media_type,
    parse_json,
    token_count,
)
from kvcore_online.fleet import Attempt, Fleet, LiveServer
from kvcore_online.listener import (
    METRICS_HEADERS,
    NO_SERVER,
    Listener,
    error_body,
)
from kvcore_online.prompts import MOST_KEYS, Call, SentCall, token_ids, token_request
from kvcore_online.route_config import RouteConfig
from kvcore_online.supervision import signalled, stopped
from kvcore_online.traffic import Flight

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession, web

PATHS = ("/v1/chat/completions", "/v1/completions")

PASSED_ON = ("authorization", "traceparent", "tracestate", "user-agent", "x-request-id")
"""Headers of clients that are sent on to servers; all others are dropped."""

PASSED_BACK = ("cache-control", "content-type", "retry-after", "x-request-id")
"""Headers of servers that are sent on to clients."""

ELSEWHERE = {429, 502, 503, 504}
"""Statuses after which a request is sent to another server."""

STATUSES = range(200, 600)
"""Statuses that end a request."""

INVALID = range(400, 500)
"""Statuses that say that the request is wrong: it would be at every server."""

MOST_HINTS = 16
"""Most answers of status 1xx, as `103 Early Hints`, before that which ends a request."""

LARGE = 1 << 20
"""Bytes of a body from which on it is sent in parts, and of an answer from which on nothing is
decoded of it but its usage."""

PART = 1 << 16
"""Bytes of a part of a large body."""

LONGEST_USAGE = 1 << 16
"""Largest number of bytes of the usage in an answer of `LARGE` bytes and more."""

IDLE_SECONDS = 3.0
"""Seconds after which an idle connection to a server is closed: vLLM closes it after five."""

GONE = 499
"""Status in the metrics of requests whose client disconnected, as in nginx."""

OK = 200


class UnservedError(Exception):
    """Raised if a server does not answer, or with an answer that cannot be passed on.

    How long an answer is, and how long a whole one takes, its client has asked for, and a
    server may close at a large body that it has sent: it is no failure, or one client could
    have all servers down. One that has died fails its health checks.

    Attributes:
        failure: whether it counts as a failure of the server.
    """

    def __init__(self, why: str, *, failure: bool = True) -> None:
        super().__init__(why)
        self.failure = failure


@attrs.define(eq=False)
class Answer:
    """The answer of a server: a whole one, or the beginning of a stream.

    Attributes:
        response: the response of the server.
        headers: its headers that the client gets.
        data: the first bytes of a stream, or all bytes of a whole answer.
        stream: the events of a stream; None: the answer is whole.
    """

    response: ClientResponse
    headers: dict[str, str]
    data: bytes
    stream: EventStream | None


class EventStream:
    """The events of a streamed answer, which are passed on whole.

    Args:
        flight: the request; the stream counts its lengths.
        counted: whether the client has asked for the usage at the end.

    Attributes:
        rest: the bytes after the last whole event.
        cached: number of prompt tokens that the server reports as cached.
    """

    def __init__(self, flight: Flight, *, counted: bool) -> None:
        self._flight, self._counted = flight, counted
        self.rest = bytearray()
        self.cached = 0

    def feed(self, data: bytes) -> bytes:
        """Return the events that are whole with `data`, the next bytes.

        Raises:
            UnservedError: an event is too long.
        """
        rest = self.rest
        # What came before has no end of an event, at most the beginning of one: to look at it
        # again with each piece would take time with the square of an event's length.
        start = max(0, len(rest) - 2)
        rest += data
        end = max((match.end() for match in _EVENT_ENDS(rest, start)), default=0)
        answers = bytes(rest[:end])
        del rest[:end]
        if len(rest) > LONGEST_EVENT:
            _refuse("an event of its stream is too long")
        self._flight.output += answers.count(b'"choices":[{') + answers.count(b'"choices": [{')
        if b'"usage"' not in answers:
            return answers
        kept, taken = [], False
        for line in answers.splitlines(keepends=True):
            # The empty lines that end an event go with it.
            taken = self._take(line) if line.strip() else taken
            if not taken:
                kept.append(line)
        return b"".join(kept)

    def _take(self, event: bytes) -> bool:
        """Record the usage in an event; return True if the event is to be left out."""
        if not event.startswith(b"data:") or b'"usage"' not in event:
            return False
        try:
            document = _usage_document(event[len(b"data:") :])
        except ValueError:
            return False
        if not isinstance(document, dict) or not isinstance(document.get("usage"), dict):
            return False
        self.cached = take_usage(self._flight, document["usage"])
        return not self._counted and document.get("choices") == []


_EVENT_ENDS = re.compile(rb"\r?\n\r?\n").finditer


_USAGE = re.compile(rb'"usage"\s*+:\s*+\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}').match
"""A field `usage` with its object, and objects in that. No text of JSON has these quotes."""


def _usage_document(data: bytes) -> Any:
    """Return the document of an answer or an event; from `LARGE` on its last usage alone.

    Who asks for many log probabilities has answers of millions of values: nothing else would
    run while they are decoded, for 4 s of 64 MiB.

    Raises:
        ValueError: it is not JSON.
    """
    if len(data) >= LARGE:
        start = max(0, data.rfind(b'"usage"'))
        match = _USAGE(data, start, start + LONGEST_USAGE)
        data = b"{%s}" % match[0] if match else b"{}"
    return parse_json(data, MOST_VALUES)


def take_usage(flight: Flight, usage: dict[str, Any]) -> int:
    """Record the lengths that a server has counted; return its number of cached tokens."""
    flight.prompt = token_count(usage.get("prompt_tokens")) or flight.prompt
    output = token_count(usage.get("completion_tokens"))
    flight.output = flight.output if output is None else output
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return token_count(cached) or 0


class Proxy:
    """The proxy, on the running loop of asyncio.

    Args:
        config: the options.
        clock: returns the time in ns.

    Attributes:
        url: where it listens, once it is started.

    Raises:
        InputError, PluginError: no router or view can be built, or a package is missing.
    """

    def __init__(self, config: RouteConfig, clock: Callable[[], int] = monotonic_ns) -> None:
        self.config = config
        self._aiohttp = import_extra("aiohttp", "a proxy needs aiohttp", "serve")
        self._web: Any = import_extra("aiohttp.web", "a proxy needs aiohttp", "serve")
        self.fleet = Fleet(config, clock)
        self.url = ""
        self._listener = Listener(
            {
                **{f"POST {path}": self._complete for path in PATHS},
                "GET /v1/models": self._models,
                "GET /health": self._health,
                "GET /metrics": self._metrics,
            },
            "a proxy needs aiohttp",
            refuse=self._refusal,
            host=config.host,
            port=config.port,
            body=config.body,
            connections=config.connections,
            files=2,
            client_timeout=config.client_timeout,
            shutdown_timeout=config.shutdown_timeout,
        )
        self._numbers = self._turn = self._busy = 0
        self._closing = False
        self._closed = AsyncExitStack()

    async def start(self) -> None:
        """Check which servers are up, and start to listen. On errors all is closed again.

        Raises:
            InputError: the address of the proxy or of KV events is invalid, or in use.
        """
        try:
            await self._start()
        except BaseException:
            self.fleet.discard()
            await self.stop()
            raise

    async def _start(self) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout)
        self._session: ClientSession = self._aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            request_class=_request_class(self._aiohttp),
            response_class=_response_class(self._aiohttp),
            auto_decompress=False,
            cookie_jar=self._aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
        )
        self._closed.push_async_callback(self._session.close)
        self._closed.push_async_callback(self.fleet.stop)
        await self.fleet.start(self._session)
        self._closed.push_async_callback(self._listener.stop)
        await self._listener.start()
        self.url = self._listener.url
        watching = loop.create_task(self.fleet.watch(self._session))
        self._closed.callback(watching.cancel)

    async def stop(self) -> None:
        """Stop listening, wait for requests in flight, and close all connections."""
        self._closing = True
        await self._closed.aclose()

    def abort(self) -> None:
        """Close the connections of clients, so that `stop` does not wait for their requests."""
        self._listener.abort()

    def _refusal(self, status: int, message: str, param: str | None = None) -> web.Response:
        """Count a refused request, and return its answer."""
        self.fleet.metrics.requests.labels("", str(status)).inc()
        return self._listener.refusal(status, message, param)

    async def _health(self, http: web.Request) -> web.Response:
        """Return how many servers are up; with none, or when closing, the status is 503."""
        del http
        up, servers = len(self.fleet.dispatcher.up), len(self.fleet.servers)
        healthy = up > 0 and not self._closing
        status = "ok" if healthy else "unavailable"
        document = {"status": status, "up": up, "replicas": servers}
        return self._listener.json(document, OK if healthy else NO_SERVER)

    async def _metrics(self, http: web.Request) -> web.Response:
        """Return the metrics."""
        del http
        answer: web.Response = self._web.Response(
            body=self.fleet.metrics.text(), headers=METRICS_HEADERS
        )
        return answer

    async def _models(self, http: web.Request) -> web.StreamResponse:
        """Return the models of the first server that tells."""
        why = "no server is up"
        for replica in self.fleet.dispatcher.up:
            server = self.fleet.servers[replica.number]
            try:
                async with asyncio.timeout(self.config.connect_timeout):
                    response = await self._session.get(
                        f"{server.options.url}/v1/models",
                        headers=self._headers(http),
                        allow_redirects=False,
                    )
                    async with response:
                        headers = _passed_back(response)
                        data = await self._whole(response, b"")
            except (self._aiohttp.ClientError, OSError, UnservedError) as error:
                why = f"{server.options.name}: {str(error) or type(error).__name__}"
                continue
            answer: web.Response = self._web.Response(
                body=data, status=response.status, headers=headers | _named(server)
            )
            return answer
        return self._refusal(NO_SERVER, why)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        """Serve a completion; refuse it above the limit of requests in flight."""
        if self._closing:
            return self._refusal(NO_SERVER, "the proxy is ending")
        if self._busy >= self.config.concurrency:
            return self._refusal(NO_SERVER, "the limit of requests in flight is reached")
        self._busy += 1
        try:
            session = header_text(http.headers.get("x-session-id", ""))
            sent, request, question = await self._listener.read(
                http,
                self.config.client_timeout,
                partial(self._decoded, http.path, session),
            )
            if question is not None and (data := await self._tokenize(http, question)):
                told = partial(_with_tokens, request, data)
                request = await self._listener.in_turn(len(data), told)
            request.id, request.arrival = self._numbers, self.fleet.now()
            self._numbers += sent.answers  # each has a line in the trace
            return await self._serve(http, sent, request)
        finally:
            self._busy -= 1

    def _decoded(
        self, path: str, session: str, body: bytes
    ) -> tuple[SentCall, Request, bytes | None]:
        """Return a call for servers, its request, and the body that asks for its token ids.

        All that takes time with the length of a body is done here.
        """
        call, config = Call.read(path, body), self.config
        request = call.request(
            session,
            tokens=call.tokens,
            key_tokens=config.key_tokens,
            key_chars=config.key_chars,
        )
        asked = config.by_tokens and not isinstance(call.prompt, list)  # tokens, or several
        question = orjson.dumps(call.question) if asked else None
        sent = call.sent(count=config.trace is not None)
        if config.trace is not None:
            parts, choices = call.parts(request, config.key_chars)
            sent = attrs.evolve(sent, parts=parts, choices=choices)
        return sent, request, question

    async def _tokenize(self, http: web.Request, question: bytes) -> bytes | None:
        """Return the answer of a server, by turns, with token ids; None if it gives none."""
        up = self.fleet.dispatcher.up
        if not up:
            return None
        self._turn += 1
        server = self.fleet.servers[up[self._turn % len(up)].number]
        try:
            async with (
                asyncio.timeout(self.config.connect_timeout),
                self._session.post(
                    f"{server.options.url}/tokenize",
                    data=question,
                    headers={**self._headers(http), "Content-Type": "application/json"},
                    allow_redirects=False,
                ) as response,
            ):
                return await self._whole(response, b"", LONGEST_TOKENS)
        except (self._aiohttp.ClientError, OSError, UnservedError):
            return None

    async def _serve(
        self, http: web.Request, call: SentCall, request: Request
    ) -> web.StreamResponse:
        """Serve a request, and record it in the trace."""
        flight = Flight(request, parts=call.parts, choices=call.choices)
        self.fleet.begin(flight)
        try:
            return await self._route(http, call, flight)
        except PolicyError:
            _record_refusal(flight, call, None)
            flight.refused = f"router {self.fleet.dispatcher.router.name} failed"
            raise
        finally:
            self.fleet.finish(flight)

    async def _route(
        self, http: web.Request, call: SentCall, flight: Flight
    ) -> web.StreamResponse:
        """Send a request to servers that the router picks, until one of them answers."""
        up, tried = self.fleet.dispatcher.up, set[int]()
        why = "the router refuses the request" if up else "no server is up"
        while len(tried) <= self.config.retries:
            attempt = self.fleet.send(flight, tried)
            if attempt is None:
                break
            name, number = attempt.server.options.name, attempt.server.replica.number
            tried.add(number)
            answer = None
            try:
                answer = await self._ask(http, call, attempt)
                return await self._pass_on(http, attempt, answer)
            except UnservedError as error:
                why = f"{name}: {error}"
                self.fleet.metrics.retries.labels(name).inc()
                if error.failure:
                    self.fleet.failed(attempt.server)
            except asyncio.CancelledError:
                self.fleet.metrics.requests.labels(name, str(GONE)).inc()
                raise
            finally:
                self.fleet.end(attempt)
                if answer is not None:
                    answer.response.close()
        _record_refusal(flight, call, None)
        return self._refusal(NO_SERVER, why)

    async def _ask(self, http: web.Request, call: SentCall, attempt: Attempt) -> Answer:
        """Return the answer of a server: the beginning of a stream, or a whole answer.

        Raises:
            UnservedError: there is no answer, or none that can be passed on.
        """
        response = None
        attempt.deadline = asyncio.timeout(self.config.first_byte_timeout)
        try:
            async with attempt.deadline:
                response = await self._session.post(
                    f"{attempt.server.options.url}{call.path}",
                    data=call.body if len(call.body) < LARGE else _in_parts(call.body),
                    headers={
                        **self._headers(http),
                        "Content-Type": "application/json",
                        "Content-Length": str(len(call.body)),
                    },
                    allow_redirects=False,
                )
                headers = _passed_back(response)
                data = await response.content.readany()
            attempt.deadline, began = None, self.fleet.now()
            kind = media_type(response.headers.get("Content-Type"))
            streams = response.status == OK and kind == "text/event-stream"
            stream = EventStream(attempt.flight, counted=call.counted) if streams else None
            if stream is None:
                data = await self._whole(response, data)
                if response.status == OK:
                    self._note(attempt, data)
                else:
                    _record_refusal(attempt.flight, call, response.status)
            elif not data:
                _refuse("an empty stream")
            self.fleet.first_byte(attempt, began)
            return Answer(response, headers, data, stream)
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, TimeoutError):
                msg = "it did not answer in time"
                whole = attempt.deadline is not None and not call.stream
                raise UnservedError(msg, failure=attempt.open and not whole) from error
            if isinstance(error, (self._aiohttp.ClientError, OSError)):
                unreached = isinstance(error, self._aiohttp.ClientConnectorError)
                failure = unreached or len(call.body) < LARGE
                why = str(error) or type(error).__name__
                raise UnservedError(why, failure=failure) from error
            raise
        finally:
            attempt.deadline = None

    def _note(self, attempt: Attempt, data: bytes) -> None:
        """Record the usage in a whole answer.

        Raises:
            UnservedError: the answer is shorter than `LARGE`, and not JSON.
        """
        try:
            document = _usage_document(data)
        except ValueError:
            _refuse("its answer is not JSON", failure=True)
        usage = document.get("usage") if isinstance(document, dict) else None
        if isinstance(usage, dict):
            self._count_usage(attempt, take_usage(attempt.flight, usage))

    def _count_usage(self, attempt: Attempt, cached: int) -> None:
        """Count the prompt tokens that a server has reported, and those that hit there."""
        name, metrics = attempt.server.options.name, self.fleet.metrics
        metrics.cached_tokens.labels(name).inc(cached)
        metrics.counted_tokens.labels(name).inc(attempt.flight.prompt or 0)

    async def _pass_on(
        self, http: web.Request, attempt: Attempt, answer: Answer
    ) -> web.StreamResponse:
        """Send an answer to the client; if the server dies meanwhile, it ends with an error."""
        server, response, stream = attempt.server, answer.response, answer.stream
        head = {"status": response.status, "headers": answer.headers | _named(server)}
        out: web.StreamResponse = (
            self._web.Response(body=_body(answer.data), **head)
            if stream is None
            else self._web.StreamResponse(**head)
        )
        status = str(response.status)
        try:
            if stream is None:
                await self._listener.send(http, out)
            else:
                await self._give(out, http, stream.feed(answer.data))
                try:
                    while data := await self._part(response):
                        if events := stream.feed(data):
                            await self._give(out, http, events)
                    last = bytes(stream.rest)
                except (UnservedError, self._aiohttp.ClientError, TimeoutError) as error:
                    if getattr(error, "failure", True):
                        self.fleet.failed(server)
                    status = str(NO_SERVER)
                    reason = str(error) or "it was too slow"
                    why = f"{server.options.name} ended within its answer: {reason}"
                    last = b"data: " + error_body(NO_SERVER, why) + b"\n\n"
                self._count_usage(attempt, stream.cached)
                await self._give(out, http, last, end=True)
        except (_ClientGoneError, ConnectionError, TimeoutError):
            status = str(GONE)
            if http.transport is not None:
                http.transport.abort()
        self.fleet.metrics.requests.labels(server.options.name, status).inc()
        return out

    async def _give(
        self, out: web.StreamResponse, http: web.Request, data: bytes, *, end: bool = False
    ) -> None:
        """Send bytes to the client; with `end` they are the last ones of the answer.

        Raises:
            _ClientGoneError: the client has disconnected, or does not take them in time.
        """
        try:
            async with self._listener.time_to_take(http, len(data)):
                if not out.prepared:
                    await out.prepare(http)
                if end:
                    await out.write_eof(data)
                elif data:
                    await out.write(data)
        except (ConnectionError, TimeoutError):
            raise _ClientGoneError from None

    async def _part(self, response: ClientResponse) -> bytes:
        """Return the next bytes of an answer, also if its server has died; none at its end."""
        content = response.content
        if content.at_eof():
            return b""  # without a timer
        lost = content.exception()
        if lost is not None:
            # aiohttp raises it again, before what has come ahead of it.
            content.set_exception(cast("BaseException", None))
            data = content.read_nowait()
            content.set_exception(lost)
            if data:
                return data
        async with asyncio.timeout(self.config.between_timeout):
            return await content.readany()

    async def _whole(
        self, response: ClientResponse, data: bytes, most: int | None = None
    ) -> bytes:
        """Return all bytes of an answer that begins with `data`.

        Args:
            response: the answer.
            data: the bytes that were read.
            most: largest number of bytes; None: that of the options.

        Raises:
            UnservedError: the answer is too large.
        """
        most = self.config.answer if most is None else most
        parts, size = list[bytes](), 0
        data = data or await self._part(response)
        while data:
            parts.append(data)
            size += len(data)
            if size > most:
                _refuse("its answer is too large")
            data = await self._part(response)
        return b"".join(parts)

    @staticmethod
    def _headers(http: web.Request) -> dict[str, str]:
        """Return the headers of a client's request that are passed on to a server."""
        values = ((name, http.headers.get(name)) for name in PASSED_ON)
        return {name: header_text(value) for name, value in values if value is not None}


def _with_tokens(request: Request, answer: bytes) -> Request:
    """Return a request with keys of the token ids in a server's answer, if it has some."""
    try:
        tokens = token_ids(parse_json(answer, MOST_VALUES)["tokens"])
    except (ValueError, LookupError, TypeError):
        return request
    if tokens is None:
        return request
    names = ("id", "key_tokens", "salt", "session")
    fields = {name: getattr(request, name) for name in names}
    return token_request(tokens, most=MOST_KEYS, **fields) or request


class _ClientGoneError(Exception):
    """Raised if a client has disconnected, or does not take its answer in time."""


def _record_refusal(flight: Flight, call: SentCall, status: int | None) -> None:
    """Record that a request got no answer, but a status of its server; None: it has none.

    So the trace has what it asked for, unless the server calls the request wrong.
    """
    flight.wrong = status in INVALID
    flight.refused = "no server" if status is None else f"status {status}"
    flight.output = call.most_output * call.answers


def _refuse(why: str, *, failure: bool = False) -> NoReturn:
    raise UnservedError(why, failure=failure)


def _request_class(aiohttp: Any) -> Any:
    """Return a class of requests that are not sent on a connection with an unread answer.

    A server that answers a request twice would else give the second answer to the next client.
    """

    class Request(aiohttp.ClientRequest):  # type: ignore[misc]  # imported when needed
        def send(self, conn: Any) -> Any:
            if conn.protocol.should_close:
                msg = "it answers a request twice"
                raise aiohttp.ServerDisconnectedError(msg)
            return super().send(conn)

    return Request


def _response_class(aiohttp: Any) -> Any:
    """Return a class of answers before which a server may send a few of status 1xx.

    aiohttp reads any number of them: a server could keep the proxy busy until a timeout.
    """

    class Response(aiohttp.ClientResponse):  # type: ignore[misc]  # imported when needed
        async def start(self, connection: Any) -> Any:
            protocol, hints = connection.protocol, iter(range(MOST_HINTS + 1))

            async def read() -> Any:
                if next(hints, None) is None:
                    msg = f"more than {MOST_HINTS} answers of status 1xx"
                    raise aiohttp.ClientPayloadError(msg)
                return await type(protocol).read(protocol)

            protocol.read = read
            try:
                return await super().start(connection)
            finally:
                del protocol.read

    return Response


def _passed_back(response: ClientResponse) -> dict[str, str]:
    """Return the headers of an answer that the client gets.

    Raises:
        UnservedError: another server is to be asked, or the status, such a header or the body
            cannot be sent to a client.
    """
    if response.status in ELSEWHERE or response.status not in STATUSES:
        _refuse(f"status {response.status}", failure=response.status not in STATUSES)
    if response.headers.get("Content-Encoding", "identity") != "identity":
        _refuse("its answer is compressed, unasked", failure=True)
    headers = {}
    for name in PASSED_BACK:
        value = response.headers.get(name)
        if value is not None:
            if not fits_header(value):
                _refuse(f"its header {name} has control characters", failure=True)
            headers[name] = value
    return headers


async def _in_parts(body: bytes) -> AsyncIterator[bytes]:
    """Yield the parts of a body to send; before each, what has come meanwhile is read.

    To send on to a server that has refused the body and closed would end the connection with
    that answer unread.
    """
    for start in range(0, len(body), PART):
        yield body[start : start + PART]
        await asyncio.sleep(0)  # the loop finds what has come
        await asyncio.sleep(0)  # and has read it


def _body(data: bytes) -> bytes | BytesIO:
    """Return the bytes of an answer as aiohttp is to send them: many in parts."""
    return data if len(data) < LARGE else BytesIO(data)


def _named(server: LiveServer) -> dict[str, str]:
    """Return the header that names the server of an answer."""
    return {"x-kvcore-replica": str(server.options.name)}


def run(config: RouteConfig, ready: Callable[[Proxy], None]) -> None:
    """Route requests until Ctrl-C or SIGTERM; then let requests in flight end.

    Args:
        config: the options.
        ready: called once the proxy listens.

    Raises:
        InputError, PluginError: as `Proxy` and its `start` raise them.
        StorageError: the disk has ended the trace.
    """
    asyncio.run(_run(Proxy(config), ready))


async def _run(proxy: Proxy, ready: Callable[[Proxy], None]) -> None:
    await proxy.start()
    # Without a trace nothing is rotated, and SIGHUP ends the proxy as it does other programs.
    rotate = proxy.fleet.rotate if proxy.config.trace is not None else None
    with signalled(rotate) as ending:
        try:
            ready(proxy)
            await ending.wait()
        finally:
            await stopped(proxy.stop(), ending, proxy.abort)
    if proxy.fleet.log_error is not None:
        raise proxy.fleet.log_error
