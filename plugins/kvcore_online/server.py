"""The server: the engine of `kvcore run` behind an OpenAI-style API, with one model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from time import perf_counter_ns, time
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from kvcore.errors import InputError, KvcoreError, shorten
from kvcore.lazy import import_extra
from kvcore.plugins.base import FAILURES, raise_policy_error
from kvcore.request import TextRequest, text_request
from kvcore.serving.simulate import check_cache, record_run
from kvcore.trace.writer import LiveTrace
from kvcore.untrusted import parse_json
from kvcore_engine.config import EngineParts
from kvcore_engine.executor import TensorExecutor
from kvcore_online.engine import CANCELLED, FAILED, REJECTED, LiveEngine, LiveLoop, Tokens
from kvcore_online.listener import METRICS_HEADERS, ApiError, Listener
from kvcore_online.metrics import server_metrics
from kvcore_online.stored import StoredBlocks
from kvcore_online.supervision import signalled, stopped
from kvcore_replay.keyed import KeyedNames

if TYPE_CHECKING:
    from aiohttp import web

MOST_STOPS = 4
OUTPUT = 16
"""Largest number of tokens of an answer if the client gives none."""

UNSUPPORTED: Mapping[str, Any] = {
    "logprobs": False,
    "tools": [],
    "response_format": {"type": "text"},
    "suffix": "",
    "echo": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
"""Options of the API that this server does not have, and the values that change nothing."""

CONNECTIONS = 4
"""Open connections for each open request; further ones are closed at once."""


@attrs.frozen(kw_only=True)
class ServeConfig:
    """Address and limits of a server.

    Attributes:
        host, port: address to listen at; port 0 takes a free one.
        name: name of the model for clients; None: the model's own.
        requests: largest number of requests that run or wait; further ones get 503.
        body: largest size of a request in bytes.
        client_timeout: seconds in which a client must send its request, and take each part
            of its answer.
        grace: seconds that open requests may take when the server ends.
        kv_events: address at which KV events are published, such as `tcp://127.0.0.1:5557`.
        kv_replay: address at which missing KV events are sent again.
        trace: file to write every decision to.

    Raises:
        InputError: `kv_replay` is given without `kv_events`.
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

    def __attrs_post_init__(self) -> None:
        """Refuse an address for replays of events that are not published."""
        if self.kv_replay is not None and self.kv_events is None:
            msg = "--kv-replay sends the events of --kv-events again: give that too"
            raise InputError(msg)


@attrs.frozen
class Call:
    """A checked call of the API.

    Attributes:
        chat: whether it is a chat.
        tokens: token ids of the prompt.
        output: largest number of output tokens.
        stream, counted: whether the answer is streamed, and with its usage at the end.
        stop: texts that end the answer.
        salt: text that keeps equal prompts apart in the cache (`cache_salt` in vLLM).
    """

    chat: bool
    tokens: list[int]
    output: int
    stream: bool
    counted: bool
    stop: tuple[str, ...]
    salt: str | None


class Text:
    """Turns tokens into text step by step; neither a character nor a stop text is cut in two.

    Each part is decoded together with the one before it, since the text of a token can depend
    on the token before. Incomplete characters are held back, and so is the beginning of a
    possible stop text.

    Args:
        decode: returns the text of tokens.
        stop: texts that end the text, and are not part of it.
        eos: token ids that end the text, and are not part of it.

    Attributes:
        stopped: whether a stop text or an end-of-sequence token has come.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: tuple[str, ...] = (),
        eos: frozenset[int] = frozenset(),
    ) -> None:
        self._decode, self._stop, self._eos = decode, stop, eos
        self._ids: list[int] = []
        self._begin = self._read_to = 0
        self._held = ""
        self.stopped = False

    def add(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text that `ids` add; with `last`, also the text held back."""
        shown = [token for token in ids if token not in self._eos]
        self.stopped = len(shown) < len(ids)
        last |= self.stopped
        self._ids += shown
        before = self._decode(self._ids[self._begin : self._read_to])
        whole = self._decode(self._ids[self._begin :])
        if last or not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            self._begin, self._read_to = self._read_to, len(self._ids)
            self._held += whole[len(before) :]
        held = self._held
        ends = [held.index(text) for text in self._stop if text in held]
        if ends:
            self.stopped = True
            return held[: min(ends)]
        longest = 0 if last else max(map(len, self._stop), default=0)
        sizes = range(1, min(longest, len(held) + 1))
        begun = (n for n in sizes if any(text.startswith(held[-n:]) for text in self._stop))
        end = len(held) - max(begun, default=0)
        self._held = held[end:]
        return held[:end]


class Server:
    """The engine and its API.

    Args:
        parts: model, cache and scheduler, as for `kvcore run`.
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
        parts: EngineParts,
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
        )
        self.config, self._parts = config, parts
        self.url = ""
        self._closing = False
        self._ids = count()
        self._busy = 0
        self._failed = asyncio.Event()
        self._stack = ExitStack()
        with ExitStack() as stack:
            trace = self._names = None
            if config.trace is not None:
                # A salt keeps tenants apart, as long as none knows that of another.
                self._names = KeyedNames()
                header = parts.header()
                trace = stack.enter_context(LiveTrace(config.trace, **header))
            arguments = parts.arguments(trace)
            cache = arguments["cache"]
            check_cache(cache, "serve")
            generator, backend = arguments["generator"], arguments["backend"]
            latency, batching = arguments["latency"], arguments["batching"]
            latency.bind()
            stack.enter_context(backend.limit_threads(arguments["threads"], generator.spec))
            executor = TensorExecutor(
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
            stored = None
            if config.kv_events is not None:
                from kvcore_events.publisher import Publisher  # noqa: PLC0415 - zmq

                publisher = Publisher(config.kv_events, config.kv_replay)
                stored = StoredBlocks(cache, publisher)
                stored.start()
                stack.callback(stored.close)
            scheduler = arguments["scheduler"]
            loop = LiveLoop(cache, scheduler, executor, batching, stored, clock)
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
            self.cache, self.stored, self._generator = cache, stored, generator
            self.model = config.name or generator.spec.name
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
        except InputError as error:
            await self._listener.stop()
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
        try:
            if self.engine.failure is None:
                self.cache.check_integrity()
        finally:
            # The trace of a run that failed is not complete: its file keeps the name `.part`.
            failure = self.engine.failure
            if failure is not None:
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
        document = await self._document(http)
        tokens = self._prompt(document, chat="messages" in document)
        size = self.cache.geometry.block_size
        answer = {"count": len(tokens), "max_model_len": self._longest, "tokens": tokens}
        return self._listener.json(answer | {"block_size": size})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        """Serve a chat or a text completion."""
        call = self._read(http, await self._document(http))
        if self._closing or self._busy >= self.config.requests:
            why = "is ending" if self._closing else f"has {self._busy} requests: try again"
            raise ApiError(503, f"the server {why}")
        self._busy += 1
        number = next(self._ids)
        try:
            parts = self._generate(number, call)
            if call.stream:
                return await self._stream(http, number, call, parts)
            return await self._whole(number, call, parts)
        finally:
            self._busy -= 1

    @property
    def _longest(self) -> int:
        """Largest number of tokens of a prompt and its output."""
        fits = int(self.cache.pool.blocks * self.cache.geometry.block_size)
        return min(fits, self._parts.batching.max_model_len or fits)

    async def _document(self, http: web.Request) -> dict[str, Any]:
        """Return the JSON object in the body of a request."""
        body = await self._listener.read(http, self.config.client_timeout)
        try:
            document = parse_json(body)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ApiError(400, "the body must be a JSON object")
        return document

    def _read(self, http: web.Request, document: dict[str, Any]) -> Call:
        """Return the call that a body makes."""
        model = document.get("model")
        if model is not None and model != self.model:
            asked = shorten(repr(model))
            raise ApiError(404, f"there is no model {asked}; this is {self.model!r}", "model")
        self._refuse_unsupported(document)
        output = OUTPUT
        for name in ("max_completion_tokens", "max_tokens"):
            if document.get(name) is not None:
                output = document[name]
                if type(output) is not int or output < 1:
                    raise ApiError(400, f"{name} must be a whole number from 1 on", name)
                break
        chat = http.path.endswith("chat/completions")
        tokens = self._prompt(document, chat=chat)
        if len(tokens) + output > self._longest:
            most = self._parts.batching.max_model_len
            limit = (
                "tokens of max_model_len" if self._longest == most else "tokens of the cache"
            )
            msg = (
                f"{len(tokens)} tokens and {output} of output do not fit into the "
                f"{self._longest} {limit}"
            )
            raise ApiError(400, msg, "messages" if chat else "prompt")
        options = document.get("stream_options")
        counted = isinstance(options, dict) and options.get("include_usage") is True
        salt = document.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise ApiError(400, "cache_salt must be a text that is not empty", "cache_salt")
        stop = document.get("stop") or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop) if type(stop) is list else stop
        texts = type(stop) is tuple and all(isinstance(each, str) and each for each in stop)
        if not texts or len(stop) > MOST_STOPS:
            raise ApiError(400, f"stop must be a text, or up to {MOST_STOPS} of them", "stop")
        stream = document.get("stream") or False
        if type(stream) is not bool:
            raise ApiError(400, "stream must be true or false", "stream")
        return Call(chat, tokens, output, stream, counted, stop, salt)

    def _refuse_unsupported(self, document: dict[str, Any]) -> None:
        """Raise ApiError for options of the API that this server does not have."""
        for name in ("n", "best_of"):
            if document.get(name) not in (None, 1):
                raise ApiError(400, f"{name} can be 1 alone", name)
        temperature = document.get("temperature")
        own = getattr(self._generator, "temperature", 0.0)
        if temperature is not None and temperature != own:
            msg = f"temperature is {own} for all requests: leave it out, or restart the server"
            raise ApiError(400, msg, "temperature")
        for name, neutral in UNSUPPORTED.items():
            value = document.get(name)
            # False is no number here: `"logprobs": 0` asks for those of the chosen tokens.
            same = value is neutral if isinstance(neutral, bool) else value == neutral
            if value is not None and not same:
                raise ApiError(400, f"{name} is not supported", name)

    def _prompt(self, document: dict[str, Any], *, chat: bool) -> list[int]:
        """Return the tokens of a prompt or of messages."""
        if chat:
            messages = document.get("messages")
            if not isinstance(messages, list) or not messages:
                raise ApiError(400, "messages must be a list that is not empty", "messages")
            return self._encoded(self._generator.encode_chat, list(map(_message, messages)))
        prompt = document.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            tokens = self._encoded(self._generator.encode, prompt)
        elif isinstance(prompt, list) and prompt and all(type(p) is int for p in prompt):
            tokens = prompt
        else:
            raise ApiError(400, "prompt must be a text, or a list of token ids", "prompt")
        if not tokens or min(tokens) < 0 or max(tokens) >= self._generator.vocabulary:
            raise ApiError(400, "prompt has no tokens, or some that the model lacks", "prompt")
        return tokens

    def _encoded(self, encode: Callable[[Any], list[int]], given: Any) -> list[int]:
        """Return the token ids of a text or a chat, or report that the generator has failed."""
        try:
            return encode(given)
        except KvcoreError:
            raise
        except FAILURES as error:
            raise_policy_error(self._generator, encode.__name__, error)

    async def _generate(self, number: int, call: Call) -> AsyncGenerator[Tokens, None]:
        """Yield the parts of an answer; closing the generator cancels the request."""
        parts: asyncio.Queue[Tokens] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(part: Tokens) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, part)

        size, salt = self.cache.geometry.block_size, call.salt
        if self._names is not None and salt is not None:
            salt = self._names.name("salt", salt)
        request: TextRequest = text_request(
            number,
            call.tokens,
            output=call.output,
            block_size=size,
            salt=salt,
            publish=True,
        )
        self.engine.submit(request, listener)
        ended = False
        try:
            while not ended:
                part = await parts.get()
                ended = part.end is not None
                yield part
        finally:
            if not ended:
                self.engine.cancel(number)

    async def _whole(
        self, number: int, call: Call, parts: AsyncGenerator[Tokens, None]
    ) -> web.Response:
        """Return the whole text as an answer."""
        made, text = self._text(call), ""
        count = cached = 0
        async for part in parts:
            _check(part)
            count += len(part.ids)
            cached = max(cached, part.cached)
            text += made.add(part.ids, last=part.end is not None)
            if made.stopped:
                self.engine.finish(number)
                break
        await parts.aclose()
        reason = "stop" if made.stopped else "length"
        content = (
            {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        answer = self._head(number, call, chunk=False) | {
            "choices": [choice],
            "usage": _usage(call, count, cached),
        }
        return self._listener.json(answer)

    async def _stream(
        self, http: web.Request, number: int, call: Call, parts: AsyncGenerator[Tokens, None]
    ) -> web.StreamResponse:
        """Send server-sent events, one for each part of the text."""
        first = await anext(parts)
        _check(first)
        out: web.StreamResponse = self._web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

        async def send(data: bytes) -> None:
            async with asyncio.timeout(self.config.client_timeout):
                await out.write(b"data: " + data + b"\n\n")

        try:
            await out.prepare(http)
            async for document in self._chunks(number, call, first, parts):
                await send(orjson.dumps(document))
            await send(b"[DONE]")
        except (TimeoutError, ConnectionError):
            # Too slow, or gone: the request ends with its generator.
            if http.transport is not None:
                http.transport.abort()
        finally:
            await parts.aclose()
        return out

    async def _chunks(
        self, number: int, call: Call, part: Tokens, parts: AsyncIterator[Tokens]
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the documents of a streamed answer, of which `part` is the first tokens."""
        head = self._head(number, call, chunk=True)

        def choice(text: str, reason: str | None = None) -> dict[str, Any]:
            content: dict[str, Any] = {"text": text}
            if call.chat:
                content = {"delta": {"content": text} if text else {}}
            return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

        if call.chat:
            opening = choice("") | {"delta": {"role": "assistant", "content": ""}}
            yield {**head, "choices": [opening]}
        text, count, cached = self._text(call), 0, 0
        while True:
            count += len(part.ids)
            cached = max(cached, part.cached)
            if part.end in (FAILED, REJECTED, CANCELLED):
                message = part.reason or f"the request was {part.end}"
                yield {"error": {"message": message, "type": "server_error"}}
                return
            added = text.add(part.ids, last=part.end is not None)
            if added:
                yield {**head, "choices": [choice(added)]}
            if text.stopped:
                self.engine.finish(number)
            if text.stopped or part.end is not None:
                break
            part = await anext(parts)
        yield {**head, "choices": [choice("", "stop" if text.stopped else "length")]}
        if call.counted:
            yield {**head, "choices": [], "usage": _usage(call, count, cached)}

    def _text(self, call: Call) -> Text:
        generator = self._generator
        return Text(generator.decode, call.stop, generator.eos_token_ids)

    def _head(self, number: int, call: Call, *, chunk: bool) -> dict[str, Any]:
        """Return the fields with which each document of an answer begins."""
        kind = "chat.completion" if call.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if call.chat else 'cmpl'}-{number}",
            "object": f"{kind}.chunk" if chunk and call.chat else kind,
            "created": int(time()),
            "model": self.model,
        }


def _message(value: Any) -> dict[str, str]:
    """Return a message as role and text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ApiError(400, "a message needs a role and a content", "messages")
    content = value.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            content = "".join(texts)  # type: ignore[arg-type]  # just checked
    if not isinstance(content, str):
        raise ApiError(400, "the content of a message must be text", "messages")
    return {"role": value["role"], "content": content}


def _check(part: Tokens) -> None:
    """Raise ApiError if the request was not served."""
    if part.end == REJECTED:
        raise ApiError(400, part.reason or "the request was rejected")
    if part.end in (FAILED, CANCELLED):
        raise ApiError(503, part.reason or f"the request was {part.end}")


def _usage(call: Call, output: int, cached: int) -> dict[str, Any]:
    prompt = len(call.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def run(parts: EngineParts, config: ServeConfig, ready: Callable[[Server], None]) -> None:
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
    try:
        with signalled() as ending:
            await server.start()
            ready(server)
            loop = asyncio.get_running_loop()
            waits = [loop.create_task(ending.wait()), loop.create_task(server.failed())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            await stopped(server.stop(), ending, server.abort)
    except BaseException as error:
        server.discard(error)
        raise
