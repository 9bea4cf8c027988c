"""HTTP of the server and the proxy: a listener with limits, and errors as in OpenAI's API."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from kvcore.errors import InputError, KvcoreError, PolicyError
from kvcore.lazy import import_extra
from kvcore.untrusted import LONGEST_HEADER, MOST_HEADERS, media_type
from kvcore_cli.report.tables import counted
from kvcore_online.supervision import BACKLOG, Messages, connection_limit, report_errors, warn

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Refuse = Callable[[int, str, str | None], web.Response]

BAD, TOO_SLOW, TOO_LARGE, NOT_JSON, FAILED, NO_SERVER = 400, 408, 413, 415, 500, 503
"""HTTP statuses of answers that refuse a request."""

NOT_FOUND, NO_METHOD = (404, "Not Found"), (405, "Method Not Allowed")
"""Statuses and reasons of answers to requests that no handler is for."""

METRICS_HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
"""Headers of metrics in Prometheus' text format."""

LINGERING_SECONDS = 2.0
"""Seconds to read the rest of a request that was answered before its end."""

LONG = 1 << 16
"""Bytes from which on bodies wait for one another in a lane of their own, and are decoded on a
thread: 1 MiB of text takes up to 5 s."""

BUFFERED = 1 << 14
"""Bytes of an answer that an empty buffer takes: asyncio lets a writer wait beyond 64 KiB, of
which the headers that come from a server are up to 32."""

UNTIMED: AbstractAsyncContextManager[None] = nullcontext()
"""In place of a timer where nothing is waited for."""

T = TypeVar("T")


class ApiError(Exception):
    """Raised by a handler to refuse a request.

    Attributes:
        status: HTTP status of the answer.
        param: name of the wrong field; None if no field is wrong.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class Listener:
    """Listens for requests, hands them to handlers, and answers errors as OpenAI's API does.

    Args:
        routes: the handlers, by method and path: `POST /v1/completions`.
        needed: the beginning of the error if aiohttp is missing, such as `a server`.
        refuse: returns the answer to a refused request; None: `refusal`.
        host, port: address to listen at; port 0 takes a free one.
        body: largest size of a request in bytes.
        connections: largest number of open connections; further ones are closed at once. It
            is less if the process may not open as many files.
        files: number of file descriptors that a connection needs.
        client_timeout: seconds in which a client sends its headers, in which it takes an
            answer that its handler returns whole, and between two requests of a connection.
        shutdown_timeout: seconds that requests in flight may take when the listener stops.
        threaded: bytes of a body from which on it is decoded on a thread, at most `LONG`.

    Attributes:
        url: URL of the listener, once it is started.

    Raises:
        PluginError: aiohttp is not installed.
    """

    def __init__(
        self,
        routes: Mapping[str, Handler],
        needed: str,
        *,
        refuse: Refuse | None = None,
        host: str,
        port: int,
        body: int,
        connections: int,
        files: int = 1,
        client_timeout: float,
        shutdown_timeout: float,
        threaded: int = LONG,
    ) -> None:
        self.url = ""
        self._web: Any = import_extra("aiohttp.web", needed, "serve")
        self._address, self._connections, self._files = (host, port), connections, files
        self._client_timeout, self._shutdown_timeout = client_timeout, shutdown_timeout
        self._messages = Messages()
        self._refuse = refuse or self.refusal
        self._routes, self._body = routes, body
        malformed = import_extra("aiohttp.http_exceptions", needed, "serve").HttpProcessingError
        protocol = import_extra("aiohttp.web_protocol", needed, "serve")
        self._unreadable = protocol.RequestPayloadError
        self._options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "logger": _logger(self._messages, malformed, self._unreadable),
            "handler_cancellation": True,
            "keepalive_timeout": client_timeout,
            "lingering_time": min(client_timeout, LINGERING_SECONDS),
            "max_headers": MOST_HEADERS,
            "max_line_size": LONGEST_HEADER,
            "max_field_size": LONGEST_HEADER,
        }
        self._http: Any = None
        self._server: asyncio.Server | None = None
        self._threaded = threaded
        self._opening = 0  # connections that are accepted and not made yet
        self._open: set[asyncio.Future[None]] = set()  # one for each request in flight
        self._lanes = asyncio.Lock(), asyncio.Lock()  # of short bodies and of long ones

    async def start(self) -> None:
        """Start to listen.

        Raises:
            InputError: the address is invalid, or in use.
        """
        loop = asyncio.get_running_loop()

        def request(message: Any, *parts: Any) -> Any:
            if message.url.absolute:  # no error of its host would be answered, nor end it
                message = message._replace(url=message.url.relative())
            return self._web.Request(message, *parts, loop, client_max_size=self._body)

        # No application of aiohttp: it answers headers that are no text before a handler can.
        self._http = self._web.Server(self._answered, request_factory=request, **self._options)
        report_errors(self._messages)
        wanted, self._connections = (
            self._connections,
            connection_limit(self._connections, self._files),
        )
        if self._connections < wanted:
            warn(
                f"at most {self._connections:,} connections of {wanted:,}: the limit of open "
                "files allows no more; raise it by 'ulimit -n'"
            )
        host, port = self._address
        try:
            self._server = await loop.create_server(
                self._accept, host, port, backlog=min(BACKLOG, self._connections)
            )
        # A port above 65535 overflows, and no name has a part that is empty or too long.
        except (OSError, OverflowError, ValueError) as error:
            number = getattr(error, "errno", None) or 0  # of a name server below 0
            why = os.strerror(number) if number > 0 else getattr(error, "strerror", error)
            msg = f"port {port} of {host}: {why}"
            raise InputError(msg) from error
        host, port, *_ = self._server.sockets[0].getsockname()
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Wait for requests in flight, and stop listening.

        Until they have ended new ones are answered: probes get the status of a server that
        ends, not a refused connection.
        """
        if self._http is None:  # it has not been started
            return
        # aiohttp would wait as long again for handlers that it has asked to end.
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._shutdown_timeout, self.abort)
        if self._open:
            await asyncio.wait(self._open, timeout=self._shutdown_timeout)
        if self._server is not None:
            self._server.close()
        # A connection that was let in is made in a turn of the loop, and waits in the next one.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._http.pre_shutdown()
        await self._http.shutdown(self._shutdown_timeout)
        timer.cancel()

    def abort(self) -> None:
        """Close all connections, which ends the requests in flight."""
        if self._open:
            warn(f"{counted(len(self._open), 'request')} in flight cut off")
        for connection in self._http.connections if self._http else ():
            if connection.transport is not None:
                connection.transport.abort()

    def json(self, document: Any, status: int = 200) -> web.Response:
        """Return `document` as an answer in JSON; of NO_SERVER with when to ask again."""
        return self._of_bytes(orjson.dumps(document), status)

    def _of_bytes(self, body: bytes, status: int) -> web.Response:
        answer: web.Response = self._web.Response(
            body=body, status=status, content_type="application/json"
        )
        if status == NO_SERVER:
            answer.headers["Retry-After"] = "1"
        return answer

    def refusal(self, status: int, message: str, param: str | None = None) -> web.Response:
        """Return the answer to a refused request; TOO_SLOW and TOO_LARGE end the connection."""
        answer = self._of_bytes(error_body(status, message, param), status)
        if status in (TOO_SLOW, TOO_LARGE):
            answer.force_close()
        return answer

    async def read(self, http: web.Request, seconds: float, decode: Callable[[bytes], T]) -> T:
        """Return what `decode` makes of the body of a request, in its turn.

        Raises:
            ApiError: the body is not of type JSON, is compressed, is not encoded as its headers
                say, or takes longer than `seconds`.
        """
        # The forms of web pages are of other types: none can post here unasked.
        if media_type(http.headers.get("Content-Type")) != "application/json":
            raise ApiError(NOT_JSON, "send application/json")
        # A few kilobytes expand to gigabytes, and other requests would wait meanwhile.
        if http.headers.get("Content-Encoding", "identity") != "identity":
            raise ApiError(NOT_JSON, "send the body without Content-Encoding")
        expected = http.headers.get("Expect", "").lower() == "100-continue"
        if expected and http.version > (1, 0):  # clients of 1.0 know no such answer
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            http.writer.output_size = 0  # of the answer, which has not begun
        try:
            # A body that came with its headers is read without a wait, and needs no timer.
            async with UNTIMED if http.content.is_eof() else asyncio.timeout(seconds):
                body = await http.read()
        except TimeoutError:
            raise ApiError(TOO_SLOW, "the request came too slowly") from None
        except self._unreadable:
            raise ApiError(BAD, "the body is not encoded as its headers say") from None
        return await self.in_turn(len(body), partial(decode, body))

    async def in_turn(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, whose time grows with the `size` of a body in bytes.

        Bodies are worked on one after another, those from `LONG` on apart from shorter ones.
        Between two of them all others are served: many bodies that come at once delay a health
        check by the work of one, not of all. A client has as many turns as it sends bodies:
        clients do not say who they are, and behind `route`, or any other proxy, all have one
        address, for which a limit would be one for all.
        """
        lane = self._lanes[size >= LONG]
        await lane.acquire()
        loop = asyncio.get_running_loop()
        if size < self._threaded:
            loop.call_soon(lane.release)  # not before all that is ready now has run
            return work()
        began = loop.time()
        working = loop.run_in_executor(None, work)

        # Not before, although its client may have gone: else any number could be decoded at
        # once. Nor right after: nothing else runs while JSON is parsed, be it on a thread, so
        # bodies that wait for one another leave half of the time to all others.
        def pause(_: object) -> None:
            loop.call_later(loop.time() - began, lane.release)

        working.add_done_callback(pause)
        return await asyncio.shield(working)

    def _accept(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection, which closes it if there are too many."""
        if len(self._http.connections) + self._opening >= self._connections:
            return _Refusal()
        # Several may come at once, and each is made in the turn of the loop after this one.
        self._opening += 1
        asyncio.get_running_loop().call_soon(self._opened)
        protocol: asyncio.BaseProtocol = self._http()
        return protocol

    def _opened(self) -> None:
        """Called just before a connection is made, which is counted from then on."""
        self._opening -= 1

    async def _answered(self, http: web.Request) -> web.StreamResponse:
        """Send the answer to a request to its client, which must take it in time; return it."""
        done = asyncio.get_running_loop().create_future()
        self._open.add(done)
        try:
            return await self._sent(http)
        finally:
            self._open.discard(done)
            done.set_result(None)

    async def _sent(self, http: web.Request) -> web.StreamResponse:
        answer = await self._answer(http)
        if http.writer.output_size and not answer.prepared and http.transport is not None:
            http.transport.abort()  # another one has begun, and cannot become this one
        elif not answer.prepared:
            try:
                await self.send(http, answer)
            except (TimeoutError, ConnectionError):
                if http.transport is not None:
                    http.transport.abort()
        return answer

    async def send(self, http: web.Request, answer: web.StreamResponse) -> None:
        """Send an answer to a client as its handler has made it.

        Raises:
            ConnectionError, TimeoutError: the client has gone, or does not take it in time.
        """
        async with self.time_to_take(http, answer.content_length):
            await answer.prepare(http)
            await answer.write_eof()

    def time_to_take(
        self, http: web.Request, size: int | None
    ) -> AbstractAsyncContextManager[Any]:
        """Return the timer within which a client takes so many bytes; None: any number.

        There is none, which costs 2 % of a request, if the buffer of its connection takes them
        at once.
        """
        connection = http.transport
        if connection is None or connection.get_write_buffer_size() or size is None:
            return asyncio.timeout(self._client_timeout)
        return UNTIMED if size <= BUFFERED else asyncio.timeout(self._client_timeout)

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        """Return the answer to a request by its handler, or to its refusal."""
        path = http.rel_url.path_safe  # in which %2F is no separator
        method = "GET" if http.method == "HEAD" else http.method
        handler = self._routes.get(f"{method} {path}")
        if handler is None:
            known = any(route.endswith(f" {path}") for route in self._routes)
            return self._refuse(*(NO_METHOD if known else NOT_FOUND), None)
        try:
            return await handler(http)
        except ApiError as error:
            return self._refuse(error.status, str(error), error.param)
        except self._web.HTTPException as error:
            return self._refuse(error.status, error.reason, None)
        except KvcoreError as error:
            return self._refuse(*self._told(error), None)
        except Exception as error:  # noqa: BLE001 - of one request, and the others go on
            name = type(error).__name__
            self._messages.warn(f"{http.path} failed: {name}: {error}", name)
            return self._refuse(FAILED, "the request could not be served", None)

    def _told(self, error: KvcoreError) -> tuple[int, str]:
        """Return the status and the text of an error for a client."""
        if isinstance(error, PolicyError):
            # For the operator: it names files, and has the text of an exception.
            self._messages.failed(error)
            return FAILED, "a plugin of the server failed"
        return BAD if isinstance(error, InputError) else FAILED, str(error)


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return the body of an error in the form of OpenAI's API."""
    kind = "server_error" if status >= FAILED else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return orjson.dumps({"error": error})


class _Refusal(asyncio.Protocol):
    """Closes a connection as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class _Logger(logging.Handler):
    """Prints errors of aiohttp in a line each, but not those of malformed requests."""

    def __init__(self, messages: Messages, malformed: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self._messages, self._malformed = messages, malformed

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message of aiohttp."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, self._malformed):
            why = f": {type(error).__name__}: {error}" if error is not None else ""
            self._messages.warn(f"{record.getMessage()}{why}", record.msg)


def _logger(messages: Messages, *malformed: type[Exception]) -> logging.Logger:
    """Return a logger for aiohttp, which would print a traceback for each error."""
    logger = logging.Logger("kvcore_online")  # noqa: LOG001 - each listener has its own
    logger.addHandler(_Logger(messages, malformed))
    return logger
