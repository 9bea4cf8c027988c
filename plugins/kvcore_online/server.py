"""The server: the engine of `kvcore run`, or a simulated one, behind an OpenAI-style API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from threading import Lock
from time import perf_counter_ns, time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import attrs
import orjson

from kvcore.cache import KVCache
from kvcore.config import RunParts
from kvcore.engine import Generator
from kvcore.errors import InputError
from kvcore.lazy import import_extra
from kvcore.request import Request
from kvcore.serving.simulate import check_cache, record_run
from kvcore.untrusted import MOST_VALUES, parse_json
from kvcore_engine.config import EngineParts
from kvcore_engine.engine import tensor_executor
from kvcore_engine.generator import HuggingFace
from kvcore_online.calls import Call, CallReader
from kvcore_online.engine import LiveEngine, LiveExecutor, LiveLoop, Tokens
from kvcore_online.listener import METRICS_HEADERS, ApiError, Listener
from kvcore_online.metrics import server_metrics
from kvcore_online.simulated import SimulatedModel, SimulatedTokens
from kvcore_online.stored import StoredBlocks
from kvcore_online.supervision import signalled, stopped, unused_path
from kvcore_online.tally import CANCELLED, FAILED, REJECTED
from kvcore_plugins.traces.keyed import KeyedNames
from kvcore_plugins.traces.live import LiveTrace

if TYPE_CHECKING:
    from aiohttp import web

Pieces: TypeAlias = AsyncGenerator[tuple[int, Tokens], None]
"""The pieces of the answers to a call, as they are generated, with the index of the request."""

T = TypeVar("T")

MOST_HELD = 16
"""Most tokens that are held back for the end of a character: one has at most 4 bytes, and all
that is held back is decoded again with each token."""

MOST_JOINED = 256
"""Most tokens of an answer that are sent as one piece: their text takes about 1 ms."""

THREADED = 1 << 12
"""Bytes of a body from which on it is decoded on a thread: 1 KiB of text takes up to 5 ms."""

MOST_SPEED = 1e6
"""Most times as fast, or as slow, as the wall clock that a simulation runs."""

CONNECTIONS = 4
"""Most open connections, as a multiple of `ServeConfig.requests`; others are closed at once."""


@attrs.frozen(kw_only=True)
class ServeConfig:
    """Address and limits of a server.

    Attributes:
        host, port: address to listen at; port 0 takes a free one.
        name: name of the model for clients; None: the model's own.
        requests: largest number of answers that run or wait, `n` of each prompt; calls with
            further ones get 503.
        body: largest size of a request in bytes.
        client_timeout: seconds in which a client must send its request, and take each part
            of its answer.
        grace: seconds that open requests may take when the server ends.
        kv_events: address at which KV events are published, such as `tcp://127.0.0.1:5557`.
        kv_replay: address at which missing KV events are sent again.
        trace: file to write every decision to; its next piece if an earlier trace has it.
        speed_up: times as fast as the wall clock that a simulation runs; None: no step is
            waited for, as a model on tensors takes its own time.

    Raises:
        InputError: `kv_replay` is given without `kv_events`, or `speed_up` is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8001
    name: str | None = None
    requests: int = 1024
    body: int = 1 << 20
    client_timeout: float = 30.0
    grace: float = 10.0
    kv_events: str | None = None
    kv_replay: str | None = None
    trace: Path | None = None
    speed_up: float | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse replays of events that are not published, and speeds that no clock has."""
        if self.kv_replay is not None and self.kv_events is None:
            msg = "--kv-replay sends the events of --kv-events again: give that too"
            raise InputError(msg)
        if self.speed_up is not None and not 1 / MOST_SPEED <= self.speed_up <= MOST_SPEED:
            msg = f"--speed-up {self.speed_up}: give a number from 1e-6 to 1e6"
            raise InputError(msg)


class StopText:
    """Finds a text in pieces of another one, as they come: O(1) for a character on average.

    Args:
        text: the text to find.

    Attributes:
        begun: number of its characters with which all pieces so far end.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM Journal on
    Computing 1977; of the text only what was begun is looked at.
    """

    def __init__(self, text: str) -> None:
        self.text, self.begun = text, 0
        # Of the first n + 1 characters: with how many of its own, but not all, that text ends.
        self._borders = [0]

    def end(self, piece: str) -> int | None:
        """Return the end of the text in the next piece; None if it does not end there."""
        for index, character in enumerate(piece, 1):
            self.begun = self._longer(self.begun, character)
            if self.begun == len(self.text):
                return index
            if self.begun > len(self._borders):
                border = self._longer(self._borders[-1], character)
                self._borders.append(border)
        return None

    def _longer(self, begun: int, character: str) -> int:
        """Return how much is begun after `character`, if `begun` characters were before it."""
        while begun and self.text[begun] != character:
            begun = self._borders[begun - 1]
        return begun + (self.text[begun] == character)


class Text:
    """Turns tokens into text step by step; neither a character nor a stop text is cut in two.

    Each part is decoded together with the one before it, since the text of a token can depend
    on the token before. Incomplete characters are held back, and so is the beginning of a
    possible stop text.

    Args:
        decode: returns the text of tokens.
        stop: texts that end the text: the one that ends first, of those that end together the
            first in the list.
        eos: token ids that end the text.
        shown: whether the text or the token that ends the text is part of it.

    Attributes:
        stopped: whether a stop text or an end-of-sequence token has come.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: tuple[str, ...] = (),
        eos: frozenset[int] = frozenset(),
        *,
        shown: bool = False,
    ) -> None:
        self._decode, self._eos, self._shown = decode, eos, shown
        self._stops = list(map(StopText, stop))
        self._ids: list[int] = []
        self._begin = self._read_to = 0
        self._held = ""
        self.stopped = False

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that `ids` add; with `last`, also the text held back."""
        others = [token for token in ids if token not in self._eos]
        self.stopped = len(others) < len(ids)
        last |= self.stopped
        self._ids += ids if self._shown else others
        before = self._decode(self._ids[self._begin : self._read_to])
        text = self._decode(self._ids[self._begin :])
        piece = ""
        held_tokens = len(self._ids) - self._read_to
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}")
        if last or whole or held_tokens > MOST_HELD:
            self._begin, self._read_to = self._read_to, len(self._ids)
            piece = text[len(before) :]
        held, self._held = self._held + piece, ""
        before_piece = len(held) - len(piece)
        ends = ((stop, stop.end(piece)) for stop in self._stops)
        found = [(end, len(stop.text)) for stop, end in ends if end is not None]
        if found:
            self.stopped = True
            end, size = min(found, key=itemgetter(0))
            return held[: before_piece + end - (0 if self._shown else size)]
        if last:
            return held
        until = len(held) - max((stop.begun for stop in self._stops), default=0)
        self._held = held[until:]
        return held[:until]


@attrs.define(eq=False)
class Answer:
    """One answer to a call, while it is generated.

    Attributes:
        text: makes its tokens text.
        tokens, cached: number of its tokens, and of the prompt tokens that were not computed.
        ended: whether it needs no more tokens.
        body: its text so far, where it is not streamed.
    """

    text: Text
    tokens: int = 0
    cached: int = 0
    ended: bool = False
    body: str = ""

    def add(self, part: Tokens) -> str:
        """Return the text that new tokens add, up to the one with which it stops."""
        self.cached = max(self.cached, part.cached)
        added = ""
        for token in part.ids:
            self.tokens += 1
            added += self.text.add((token,))
            if self.text.stopped:
                break
        else:
            if part.end is not None:
                added += self.text.add((), last=True)
        self.ended = self.text.stopped or part.end is not None
        return added

    @property
    def reason(self) -> str:
        """Why it has ended, as the API says it."""
        return "stop" if self.text.stopped else "length"


class Parts:
    """The parts of the answers to a call, joined until they are taken.

    An engine may be faster than the loop, and a client slow to read. So a token costs no
    callback of its own, and while it waits no more memory than its place in a list::

        engine   put put put put put put put
        loop         wake ......... take     one callback, and one piece for each answer
    """

    def __init__(self) -> None:
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._lock = Lock()
        # By index of the request: its part, and the ids of parts that were joined.
        self._waiting: dict[int, tuple[Tokens, list[int]]] = {}

    def put(self, index: int, part: Tokens) -> None:
        """Add a part of the answer to a request, on the engine's thread."""
        ids: list[int] = []
        with self._lock:
            wake = not self._waiting
            if index in self._waiting:
                before, ids = self._waiting[index]
                ids = ids or [*before.ids]
                ids += part.ids
                part = Tokens(ids, part.end, part.reason, max(before.cached, part.cached))
            self._waiting[index] = part, ids
        if wake:
            self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> list[tuple[int, Tokens]]:
        """Wait for parts; return pieces of at most `MOST_JOINED` tokens, with their indices."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        pieces = []
        for index, (part, ids) in waiting.items():
            *full, last = range(0, len(ids), MOST_JOINED) or [0]
            pieces += [(index, Tokens(ids[at : at + MOST_JOINED])) for at in full]
            pieces.append((index, attrs.evolve(part, ids=ids[last:]) if full else part))
        return pieces


class Server:
    """The engine and its API.

    Args:
        parts: model, cache and scheduler, as for `kvcore run`, or of a simulation.
        config: address and limits.
        clock: returns the time in ns.

    Attributes:
        url: URL of the server, once it listens.
        engine: the thread that computes.

    Raises:
        InputError, PluginError, StorageError: as for `kvcore run`; an address of KV events that
            is invalid or in use; a missing package.
    """

    def __init__(
        self,
        parts: RunParts,
        config: ServeConfig,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._web = import_extra("aiohttp.web", "a server needs aiohttp", "serve")
        self._listener = Listener(
            {
                "POST /v1/chat/completions": self._complete,
                "POST /v1/completions": self._complete,
                "POST /tokenize": self._tokenize,
                "GET /v1/models": self._models,
                "GET /health": self._health,
                "GET /metrics": self._metrics,
            },
            "a server needs aiohttp",
            host=config.host,
            port=config.port,
            body=config.body,
            connections=CONNECTIONS * config.requests,
            client_timeout=config.client_timeout,
            shutdown_timeout=config.grace,
            threaded=THREADED,
        )
        self.config = config
        self.url = ""
        self._closing = False
        self._ids = count()
        self._busy = 0
        self._failed = asyncio.Event()
        self._stack = ExitStack()
        with ExitStack() as stack:
            trace = self._names = None
            if config.trace is not None:
                # A salt keeps tenants apart as long as none knows that of another: the trace,
                # and the keys of blocks in it, have a keyed hash of it.
                self._names = KeyedNames()
                header = parts.header()
                trace = stack.enter_context(LiveTrace(unused_path(config.trace), **header))
            arguments = parts.arguments(trace)
            cache = arguments["cache"]
            check_cache(cache, "serve")
            latency, batching = arguments["latency"], arguments["batching"]
            latency.bind()
            self._model, executor = _model(parts, arguments, stack)
            stored = None
            if config.kv_events is not None:
                from kvcore_events.publisher import Publisher  # noqa: PLC0415 - zmq

                if not isinstance(cache, KVCache):
                    msg = (
                        f"--kv-events: layers of {parts.model.name} keep different things, "
                        "which no event names: leave it out, or serve the model as one group "
                        "(--disable-hybrid-kv-cache-manager)"
                    )
                    raise InputError(msg)
                publisher = Publisher(config.kv_events, config.kv_replay, waits=False)
                stored = StoredBlocks(cache, publisher)
                stored.start()
                stack.callback(stored.close)
            scheduler = arguments["scheduler"]
            loop = LiveLoop(
                cache, scheduler, executor, batching, stored, clock, speed=config.speed_up
            )
            if trace is not None:
                record_run(
                    trace,
                    parts.workload,
                    scheduler,
                    executor,
                    batching,
                    rate_scale=1.0,
                    slo=None,
                )
            self.cache, self.stored = cache, stored
            self.model = config.name or parts.model.name
            longest, limit = cache.pool.blocks * cache.geometry.block_size, "the cache"
            if batching.max_model_len is not None and batching.max_model_len <= longest:
                longest, limit = batching.max_model_len, "max_model_len"
            if isinstance(self._model, HuggingFace) and self._model.text_length is not None:
                # Else one long call would end the server.
                self._model.text_length.check(longest - 1)
            self._reader = CallReader(
                self._model, self.model, longest, limit, answers=config.requests
            )
            self.engine = LiveEngine(loop, self._fail)
            self._stack = stack.pop_all()

    async def start(self) -> None:
        """Start to serve and to listen.

        Raises:
            InputError: the address is invalid, or in use.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._listener.start()
        except BaseException as error:
            self.discard(error)  # so that an older trace stays
            raise
        self.url = self._listener.url
        self.engine.start()

    async def stop(self) -> None:
        """Stop listening, let open requests end within the grace period, and check the cache.

        Raises:
            PolicyError: the engine has failed.
            AssertionError: the cache is inconsistent.
        """
        self._closing = True
        await self._listener.stop()
        if self.url:
            await asyncio.to_thread(self.engine.close)
        failure = self.engine.failure
        if failure is None:
            try:
                self.cache.check_integrity()
            except AssertionError as error:
                failure = error
        if failure is not None:
            # The trace of a run that failed is not complete: its file keeps the name `.part`.
            self.discard(failure)
            raise failure
        self._stack.close()

    def discard(self, error: BaseException) -> None:
        """Close what is still open, because of `error`; the trace is not completed."""
        self._stack.__exit__(type(error), error, error.__traceback__)

    def abort(self) -> None:
        """Close all connections, so that `stop` does not wait for open requests."""
        self._listener.abort()

    async def failed(self) -> None:
        """Return when the engine has failed."""
        await self._failed.wait()

    def _fail(self, error: BaseException) -> None:
        del error
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._failed.set)

    # The API.

    async def _health(self, http: web.Request) -> web.Response:
        """Return the status `ok`, or 503 once the server ends or its engine has failed."""
        del http
        well = not self._closing and self.engine.failure is None
        return self._listener.json(
            {"status": "ok" if well else "unavailable"}, 200 if well else 503
        )

    async def _metrics(self, http: web.Request) -> web.Response:
        """Return the metrics."""
        del http
        answer: web.Response = self._web.Response(
            text=server_metrics(self.engine.loop, self.cache, self.model, self.stored),
            headers=METRICS_HEADERS,
        )
        return answer

    async def _models(self, http: web.Request) -> web.Response:
        """Return the one model."""
        del http
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "kvcore"}
        return self._listener.json({"object": "list", "data": [model]})

    async def _tokenize(self, http: web.Request) -> web.Response:
        """Return the token ids of a prompt, as vLLM does."""
        tokens, *others = await self._read(
            http, lambda body: self._reader.prompts(body, chat="messages" in body)
        )
        if others:
            raise ApiError(400, "prompt must be one text: give the others apart", "prompt")
        longest, size = self._reader.longest, self.cache.geometry.block_size
        answer = {"count": len(tokens), "max_model_len": longest, "tokens": tokens}
        return self._listener.json(answer | {"block_size": size})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        """Serve a chat or a text completion."""
        chat = http.path.endswith("chat/completions")
        call, requests = await self._read(http, partial(self._called, chat=chat))
        if self._closing or self._busy + call.answers > self.config.requests:
            why = "is ending" if self._closing else f"has {self._busy} requests: try again"
            raise ApiError(503, f"the server {why}")
        for request in requests:
            request.id = next(self._ids)
        self._busy += call.answers
        try:
            async with aclosing(self._generate(requests)) as pieces:
                if call.stream:
                    return await self._stream(http, requests, call, pieces)
                return await self._whole(requests, call, pieces)
        finally:
            self._busy -= call.answers

    def _called(self, document: dict[str, Any], *, chat: bool) -> tuple[Call, list[Request]]:
        """Return the call that a body makes, and its requests, which have no ids yet."""
        call = self._reader.read(document, chat=chat)
        salt = call.salt
        if self._names is not None and salt is not None:
            salt = self._names.name("salt", salt)
        # Cache groups do not learn keys of generated blocks while a request runs.
        publish = not self.cache.grouped
        size = self.cache.geometry.key_tokens
        return call, list(call.requests(size, salt, publish=publish))

    async def _read(self, http: web.Request, read: Callable[[dict[str, Any]], T]) -> T:
        """Return what `read` makes of the JSON object in the body of a request."""
        return await self._listener.read(
            http, self.config.client_timeout, lambda body: read(_document(body))
        )

    async def _generate(self, requests: Sequence[Request]) -> Pieces:
        """Yield the pieces of answers, each with the index of its request.

        Closing the generator cancels the requests that have not ended.
        """
        parts = Parts()
        for index, request in enumerate(requests):
            self.engine.submit(request, partial(parts.put, index))
        running = dict(enumerate(requests))
        try:
            while running:
                taken = await parts.take()
                for index, piece in taken:
                    if piece.end is not None:
                        del running[index]
                    yield index, piece
                    if len(taken) > 1:
                        await asyncio.sleep(0)  # others are served between two pieces
        finally:
            for request in running.values():
                self.engine.cancel(request.id)

    async def _whole(
        self, requests: Sequence[Request], call: Call, pieces: Pieces
    ) -> web.Response:
        """Return the whole texts as an answer."""
        answers = [self._answer(call) for _ in requests]
        left = len(answers)
        async for index, piece in pieces:
            answer = answers[index]
            if answer.ended:
                continue
            _check(piece)
            answer.body += self._add(answer, requests[index], piece)
            left -= answer.ended
            if not left:
                break
        choices = []
        for index, answer in enumerate(answers):
            content: dict[str, Any] = {"text": answer.body}
            if call.chat:
                content = {"message": {"role": "assistant", "content": answer.body}}
            choices.append(_choice(index, content, answer.reason))
        document = self._head(requests[0], call, chunk=False)
        return self._listener.json(
            document | {"choices": choices, "usage": _usage(call, answers)}
        )

    async def _stream(
        self, http: web.Request, requests: Sequence[Request], call: Call, pieces: Pieces
    ) -> web.StreamResponse:
        """Send server-sent events, one for each piece of a text."""
        first = await anext(pieces)
        _check(first[1])
        out: web.StreamResponse = self._web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

        async def send(data: bytes) -> None:
            async with asyncio.timeout(self.config.client_timeout):
                await out.write(b"data: " + data + b"\n\n")

        try:
            await out.prepare(http)
            async for document in self._chunks(requests, call, first, pieces):
                await send(orjson.dumps(document))
            await send(b"[DONE]")
        except (TimeoutError, ConnectionError):
            # Too slow, or gone: the requests end with their generator.
            if http.transport is not None:
                http.transport.abort()
        return out

    async def _chunks(
        self,
        requests: Sequence[Request],
        call: Call,
        first: tuple[int, Tokens],
        pieces: Pieces,
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the documents of streamed answers, of which `first` is the first piece."""
        head = self._head(requests[0], call, chunk=True)
        answers = [self._answer(call) for _ in requests]
        if call.chat:
            opening = {"delta": {"role": "assistant", "content": ""}}
            for index in range(len(answers)):
                yield {**head, "choices": [_choice(index, opening, None)]}
        left, (index, piece) = len(answers), first
        while True:
            if piece.end in (FAILED, REJECTED, CANCELLED):
                message = piece.reason or f"the request was {piece.end}"
                yield {"error": {"message": message, "type": "server_error"}}
                return
            if not answers[index].ended:
                added = self._add(answers[index], requests[index], piece)
                for choice in _deltas(call, index, answers[index], added):
                    yield {**head, "choices": [choice]}
                left -= answers[index].ended
            if not left:
                break
            index, piece = await anext(pieces)
        if call.counted:
            yield {**head, "choices": [], "usage": _usage(call, answers)}

    def _add(self, answer: Answer, request: Request, piece: Tokens) -> str:
        """Return the text that new tokens add; end the request if its text has ended."""
        added = answer.add(piece)
        if answer.text.stopped:
            self.engine.finish(request.id)
        return added

    def _answer(self, call: Call) -> Answer:
        model = self._model
        ends = model.eos_token_ids | call.stop_ids
        return Answer(Text(model.decode, call.stop, ends, shown=call.stop_shown))

    def _head(self, request: Request, call: Call, *, chunk: bool) -> dict[str, Any]:
        """Return the fields with which each document of an answer begins."""
        kind = "chat.completion" if call.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if call.chat else 'cmpl'}-{request.id}",
            "object": f"{kind}.chunk" if chunk and call.chat else kind,
            "created": int(time()),
            "model": self.model,
        }


def _document(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body."""
    try:
        document = parse_json(body, MOST_VALUES)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    return document


def _choice(index: int, content: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    """Return an answer, or a part of it, as the API has it."""
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def _deltas(call: Call, index: int, answer: Answer, added: str) -> Iterator[dict[str, Any]]:
    """Yield what new tokens add to a streamed answer: text, and its end."""
    if added:
        content = {"delta": {"content": added}} if call.chat else {"text": added}
        yield _choice(index, content, None)
    if answer.ended:
        yield _choice(index, {"delta": {}} if call.chat else {"text": ""}, answer.reason)


def _check(part: Tokens) -> None:
    """Raise ApiError if the request was not served."""
    if part.end == REJECTED:
        raise ApiError(400, part.reason or "the request was rejected")
    if part.end in (FAILED, CANCELLED):
        raise ApiError(503, part.reason or f"the request was {part.end}")


def _usage(call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the numbers of tokens; a prompt with several answers counts once."""
    prompt = sum(map(len, call.prompts))
    output = sum(answer.tokens for answer in answers)
    cached = sum(answer.cached for answer in answers[:: call.choices])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _model(
    parts: RunParts, arguments: Mapping[str, Any], stack: ExitStack
) -> tuple[Generator | SimulatedModel, LiveExecutor]:
    """Return the model, and the executor of its steps: on tensors, or simulated."""
    cache, latency = arguments["cache"], arguments["latency"]
    if not isinstance(parts, EngineParts):
        model = SimulatedModel()
        return model, SimulatedTokens(latency, model, parts.config.seed or 0)
    generator, backend = arguments["generator"], arguments["backend"]
    stack.enter_context(backend.limit_threads(arguments["threads"], generator.spec))
    executor = tensor_executor(
        cache,
        generator,
        backend,
        latency,
        dtype=arguments["dtype"],
        codec=arguments["codec"],
        clock="wall",
        stop_at_eos=bool(generator.eos_token_ids),
        seed=arguments["seed"],
        texts=True,
    )
    stack.callback(executor.close, whole=True)
    return generator, executor


def run(parts: RunParts, config: ServeConfig, ready: Callable[[Server], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; a second one does not wait for open requests.

    Args:
        parts: model, cache and scheduler.
        config: address and limits.
        ready: called once the server listens.

    Raises:
        KvcoreError: the server cannot be made or started, or its engine has failed.
        AssertionError: the cache is inconsistent at the end.
    """
    asyncio.run(_run(Server(parts, config), ready))


async def _run(server: Server, ready: Callable[[Server], None]) -> None:
    with signalled() as ending:
        await server.start()
        try:
            ready(server)
            loop = asyncio.get_running_loop()
            waits = [loop.create_task(ending.wait()), loop.create_task(server.failed())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        finally:
            await stopped(server.stop(), ending, server.abort)
