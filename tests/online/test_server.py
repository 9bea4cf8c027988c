# ruff: noqa: E402 - a missing package skips the module first
"""`kvcore serve`: its responses equal `kvcore run`, and no client disturbs it."""

import asyncio
import gzip
import http.client
import json
import queue
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'kvcore[serve]'")
openai = pytest.importorskip("openai", reason="needs openai: pip install openai")
zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install 'kvcore[serve]'")
pytest.importorskip("prometheus_client", reason="needs it: pip install 'kvcore[serve]'")

from helpers.commands import run_here
from helpers.online import SMALL, ServerProcess, free_port, metrics, serving
from helpers.upstreams import until
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore
from kvcore import Span, read_events
from kvcore.errors import InputError, PolicyError
from kvcore.request import text_request
from kvcore.untrusted import parse_json
from kvcore_engine.generator import HuggingFace
from kvcore_engine.mover import TensorMover
from kvcore_events.formats import decode
from kvcore_events.model import BlockRemoved, BlockStored
from kvcore_online import calls
from kvcore_online.listener import LONG
from kvcore_online.server import THREADED, ServeConfig, StopText, Text
from kvcore_online.tally import CANCELLED
from kvcore_replay.check.trace import replay
from kvcore_tiers.tier.disk import DiskStore

PROMPT = " ".join(f"word{index}" for index in range(40))


CLIENTS = {}


def client(server):
    """Return the OpenAI client of a server."""
    if server.url not in CLIENTS:
        url = f"{server.url}/v1"
        CLIENTS[server.url] = openai.OpenAI(base_url=url, api_key="-", max_retries=0)
    return CLIENTS[server.url]


@pytest.fixture(autouse=True, scope="module")
def _closing():
    """Close the connections of all clients at the end."""
    yield
    for each in CLIENTS.values():
        each.close()


def cached_keys(cache):
    """Return the hashes of all cached blocks, as events have them."""
    keys = [key for span in cache.tree.spans() for key in list(Span.keys(span))]
    return {int.from_bytes(key[-8:], "big") for key in keys}


def ask(server, path, body, headers=None):
    """Send raw bytes, and return status and document of the response."""
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request(
        "POST", path, body, {"Content-Type": "application/json", **(headers or {})}
    )
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data) if data.startswith(b"{") else data


@pytest.fixture(scope="module")
def server():
    """Yield a server for tests that do not change its state."""
    with serving() as made:
        yield made


def complete(server, prompt=PROMPT, tokens=8, **options):
    """Return the text of a completion."""
    answer = client(server).completions.create(
        model="tiny", prompt=prompt, max_tokens=tokens, **options
    )
    return answer.choices[0].text


def test_greedy_text_over_http_equals_that_of_a_run(server):
    """Greedy output over HTTP equals that of `kvcore run --prompt`."""
    result = kvcore.run(prompts=[PROMPT], max_output=8, generator=SMALL, memory="4MiB")
    assert complete(server) == " ".join(map(str, result.outputs[0]))


def test_the_parts_of_a_stream_add_up_to_the_text(server):
    """The parts of a stream add up to the whole text, with the usage at the end."""
    parts = client(server).completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(parts)
    text = "".join(choice.text for part in parts for choice in part.choices)
    assert text == complete(server)
    assert parts[-1].usage.completion_tokens == 8
    assert parts[-2].choices[0].finish_reason == "length"
    assert {part.object for part in parts} == {"text_completion"}


def test_a_chat_is_answered_equally_with_and_without_streaming(server):
    """A chat gets the same response of the assistant with and without streaming."""
    messages = [{"role": "user", "content": "how are you"}]
    chats = client(server).chat.completions
    whole = chats.create(model="tiny", messages=messages, max_tokens=5)
    parts = list(chats.create(model="tiny", messages=messages, max_tokens=5, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == text


def test_a_repeated_prompt_reports_cached_tokens():
    """The second request with a prompt reports its full blocks as cached tokens."""
    with serving() as server:
        usages = [
            client(server).completions.create(model="tiny", prompt=PROMPT, max_tokens=2).usage
            for _ in range(2)
        ]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [0, 32]


def test_a_hybrid_model_is_served_in_cache_groups():
    """A model with states resumes at a cached one, and draws several answers from it."""
    from helpers.hugging import tiny  # noqa: PLC0415 - needs transformers
    from torch import float32  # noqa: PLC0415 - skipped without it above

    with serving(generator=HuggingFace(tiny("qwen3-next", dtype=float32))) as server:
        create = client(server).completions.create
        first = create(model=server.model, prompt=PROMPT, max_tokens=4)
        again = create(model=server.model, prompt=PROMPT, max_tokens=4, n=2)
        assert server.cache.grouped
    assert {choice.text for choice in again.choices} == {first.choices[0].text}
    assert again.usage.prompt_tokens_details.cached_tokens == 32


def test_a_salt_keeps_prompts_apart(server):
    """A request hits only blocks of requests with the same `cache_salt`."""
    prompt = f"salted {PROMPT}"
    cached = [
        client(server)
        .completions.create(
            model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        .usage.prompt_tokens_details.cached_tokens
        for salt in ("one", "two", "one")
    ]
    assert cached == [0, 0, 32]


def test_concurrent_requests_have_the_texts_of_serial_ones(server):
    """Concurrent requests with shared prefixes return the same texts as serial ones."""
    prompts = [f"{PROMPT} and {index % 4}" for index in range(16)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda each: complete(server, each), prompts))
    assert together == [complete(server, prompt) for prompt in prompts]


def test_the_sequence_of_a_disconnected_client_is_cancelled():
    """If a client disconnects, its sequence is cancelled and other requests are served."""
    with serving() as server:
        stream = client(server).completions.create(
            model="tiny", prompt="a b", max_tokens=3000, stream=True
        )
        next(iter(stream))
        stream.close()
        assert complete(server, tokens=3)
        loop = server.engine.loop
        for _ in range(1000):
            if not loop.open:
                break
            complete(server, "z", tokens=1)
        assert not loop.open
        assert loop.log.requests["cancelled"] == 1
        assert not server.cache.sequences


ONE = b'{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize(
    ("body", "headers", "status", "what"),
    [
        (b"{", {}, 400, "not JSON"),
        (b"[]", {}, 400, "must be a JSON object"),
        (b"{}", {}, 400, "prompt must be a text"),
        (b'{"prompt": "a", "model": "gpt"}', {}, 404, "there is no model 'gpt'"),
        pytest.param(b'"' + b"a" * (2 << 20), {}, 413, "Too Large", id="2 MiB"),
        # A form of a browser is not declared as JSON; a small compressed body may be huge.
        (ONE, {"Content-Type": "text/plain"}, 415, ""),
        *(
            pytest.param(
                gzip.compress(ONE), {"Content-Encoding": encoding}, 415, "Content-", id=encoding
            )
            for encoding in ("gzip", "deflate", "br", "identity, gzip")
        ),
    ],
)
def test_a_wrong_request_is_refused(server, body, headers, status, what):
    """A wrong request gets an error of the API, and later requests are served."""
    answered, document = ask(server, "/v1/completions", body, headers)
    assert answered == status
    assert what in document["error"]["message"]
    assert document["error"]["code"] == status
    assert complete(server, tokens=1)


def sampled(server, prompt=PROMPT, **options):
    """Return the texts of a completion that is drawn from logits."""
    options = {"temperature": 1.0, "max_tokens": 8, **options}
    answer = client(server).completions.create(model="tiny", prompt=prompt, **options)
    return [choice.text for choice in answer.choices]


def test_equal_seeds_draw_equal_tokens_whatever_else_runs(server):
    """A seed gives its text beside requests that are drawn in other ways, and no other seed."""
    alone = sampled(server, seed=5)
    ways = [{"temperature": 0.0}, {"seed": 6}, {"top_p": 0.3, "seed": 7}, {"temperature": 2.0}]
    with ThreadPoolExecutor(12) as pool:
        others = [
            pool.submit(sampled, server, f"{PROMPT} {index % 3}", **ways[index % 4])
            for index in range(12)
        ]
        beside = [pool.submit(sampled, server, seed=5) for _ in range(4)]
        assert all(each.result() == alone for each in beside)
        assert all(other.result() for other in others)
    assert sampled(server, seed=6) != alone
    assert sampled(server, seed=5, temperature=0.0) == [complete(server)]


def test_a_client_without_a_seed_gets_another_text_each_time(server):
    """Requests without a seed are drawn with seeds of their own."""
    texts = {tuple(sampled(server)) for _ in range(4)}
    assert len(texts) == 4


@pytest.mark.parametrize("option", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}])
def test_the_likeliest_token_alone_is_the_greedy_text(server, option):
    """Drawn from the likeliest token alone, a text is the greedy one."""
    assert sampled(server, **option) == [complete(server)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_has_the_answers_of_its_prompts(server, stream):
    """Answers to several prompts, `n` to each, are those to the prompts one by one."""
    prompts = [PROMPT, "a b c", PROMPT + " more"]
    options = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 8}
    alone = [text for prompt in prompts for text in sampled(server, prompt, **options)]
    made = client(server).completions.create(
        model="tiny",
        prompt=prompts,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
        **options,
    )
    texts, usage = [""] * 6, None
    for part in made if stream else [made]:
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == alone
    assert texts[0] != texts[1]
    assert usage.prompt_tokens == 40 + 3 + 41
    assert usage.completion_tokens == 6 * 8


def test_several_choices_of_a_chat_stop_each_at_its_text(server):
    """Each choice of a chat ends at its own stop text, streamed or not."""
    messages = [{"role": "user", "content": "how are you"}]
    options = {"messages": messages, "temperature": 1.0, "seed": 1, "n": 3, "max_tokens": 12}
    chats = client(server).chat.completions
    whole = chats.create(model="tiny", **options)
    stop = f" {whole.choices[1].message.content.split()[4]}"
    expected = [choice.message.content.split(stop)[0] for choice in whole.choices]
    stopped = chats.create(model="tiny", stop=stop, **options)
    assert [choice.message.content for choice in stopped.choices] == expected
    assert stopped.choices[1].finish_reason == "stop"
    texts = ["", "", ""]
    for part in chats.create(model="tiny", stop=stop, stream=True, **options):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected


def test_more_answers_than_a_server_takes_are_refused():
    """A call for more answers than the limit of requests is a 400; it never fits."""
    with serving(ServeConfig(port=0, requests=2)) as server:
        status, document = ask(server, "/v1/completions", b'{"prompt": "a", "n": 3}')
        assert (status, document["error"]["param"]) == (400, "n")
        assert len(sampled(server, n=2)) == 2


def test_short_calls_are_answered_while_long_ones_are_read(monkeypatch):
    """Long calls are read one after another, and short calls do not wait for them."""
    begun, gate, running, most = threading.Event(), threading.Event(), [], []
    encode, parsed = kvcore.Generator.encode, []
    prompt = "a" * (LONG - len('{"prompt": ""}'))

    def parse(body, objects):
        parsed.append(len(body) >= LONG)
        return parse_json(body, objects)

    def slow(self, text):
        if len(text) < len(prompt):
            return encode(self, text)
        running.append(text)
        most.append(len(running))
        begun.set()
        gate.wait(20)
        running.pop()
        return [1]

    monkeypatch.setattr(kvcore.Generator, "encode", slow)
    monkeypatch.setattr("kvcore_online.server.parse_json", parse)
    long = json.dumps({"prompt": prompt}).encode()
    with serving(ServeConfig(port=0)) as server, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(ask, server, "/tokenize", long) for _ in range(3)]
        assert begun.wait(20)
        assert ask(server, "/tokenize", b'{"prompt": "a"}')[0] == 200
        assert sum(parsed) == 1  # JSON takes up to 20 times the memory of its bytes
        gate.set()
        assert [future.result()[1]["tokens"] for future in waiting] == [[1]] * 3
    assert max(most) == 1


def test_text_of_some_length_is_read_beside_the_loop(monkeypatch):
    """Prompts of a few kilobytes are made tokens, and these keys, on a thread."""
    threads = []

    def noted(owner, name):
        method = getattr(owner, name)

        def call(*arguments, **options):
            threads.append(threading.current_thread().name)
            return method(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    noted(kvcore.Generator, "encode")
    noted(calls, "block_keys")
    body = json.dumps({"prompt": "a", "user": "u" * THREADED}).encode()
    with serving(ServeConfig(port=0)) as server:
        assert ask(server, "/v1/completions", body)[0] == 200
    assert [name.startswith("asyncio_") for name in threads] == [True, True]


def test_a_generator_that_draws_no_samples_refuses_a_temperature():
    """Of a generator without logits, a way of drawing is refused, and a neutral one taken."""
    with serving(generator="sincos:layers=1,heads=1,kv_heads=1,head_dim=2") as server:
        body = {"prompt": "a", "max_tokens": 1, "temperature": 0.7}
        status, document = ask(server, "/v1/completions", json.dumps(body).encode())
        assert (status, document["error"]["param"]) == (400, "temperature")
        assert "draws no samples; leave it out" in document["error"]["message"]
        body |= {"temperature": 0, "top_p": 1, "seed": 3}
        assert ask(server, "/v1/completions", json.dumps(body).encode())[0] == 200


def test_tools_and_their_calls_reach_the_chat_template(server):
    """Tools, calls of them and their results are part of the prompt."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "warm?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "21", "tool_call_id": "1"},
    ]
    counts = []
    for body in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "auto"}):
        data = json.dumps({"messages": messages, "max_tokens": 1, **body}).encode()
        status, document = ask(server, "/v1/chat/completions", data)
        assert status == 200, document
        assert document["object"] == "chat.completion"
        counts.append(document["usage"]["prompt_tokens"])
    assert counts[0] < counts[1] == counts[2]


def test_a_huge_header_is_refused(server):
    """A header beyond the limit gets status 400."""
    status, _ = ask(server, "/v1/completions", b"{}", {"X-Long": "a" * 100_000})
    assert status == 400


def test_a_body_that_does_not_arrive_in_time_is_refused():
    """A body that does not arrive in time gets status 408."""
    with serving(ServeConfig(port=0, client_timeout=0.2)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as slow:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"
            slow.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_requests_beyond_the_limit_get_a_retry_after_header():
    """Requests beyond the limit get status 503 and the header Retry-After."""
    with serving(ServeConfig(port=0, requests=1)) as server:
        stream = client(server).completions.create(
            model="tiny", prompt="a", max_tokens=3000, stream=True
        )
        next(iter(stream))
        with pytest.raises(openai.InternalServerError, match="try again") as caught:
            complete(server)
        assert caught.value.response.headers["retry-after"] == "1"
        stream.close()


def test_the_server_lists_models_tokenizes_and_exports_metrics(server):
    """The server lists its model, tokenizes prompts and exports metrics."""
    (model,) = client(server).models.list()
    known = {"id": "tiny", "object": "model", "created": 0, "owned_by": "kvcore"}
    assert model.to_dict() == known
    status, document = ask(server, "/tokenize", json.dumps({"prompt": PROMPT}).encode())
    assert (status, document["count"], len(document["tokens"])) == (200, 40, 40)
    status, document = ask(server, "/tokenize", b'{"prompt": ["a", "b"]}')
    assert (status, document["error"]["param"]) == (400, "prompt")
    complete(server, PROMPT, tokens=1)
    found = metrics(server)
    assert ("vllm:prefix_cache_hits_total",) in found
    assert found["kvcore:requests_total", "finished"]
    for name in (
        *("vllm:kv_cache_usage_perc", "vllm:num_requests_running"),
        *("vllm:num_requests_waiting", "kvcore:kv_events_dropped_total"),
        "kvcore:behind_seconds",
    ):
        assert found[name,] == 0


def test_times_are_histograms_under_the_names_of_vllm():
    """Each finished request is in the histograms of times, each later token in that of gaps.

    The first token comes within the time to the last, and the buckets are vLLM's.
    """
    with serving() as server:
        for index in range(3):
            complete(server, f"{index} {PROMPT}", tokens=5)
        loop = server.engine.loop
        asyncio.run(until(lambda: loop.log.requests["finished"] == 3))
        found = metrics(server)
    for name in (
        *("time_to_first_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        "request_decode_time_seconds",
    ):
        assert found[f"vllm:{name}_count",] == found[f"vllm:{name}_bucket", "+Inf"] == 3
    assert found["vllm:inter_token_latency_seconds_count",] == 3 * 4
    total = found["vllm:e2e_request_latency_seconds_sum",]
    parts = ("queue", "prefill", "decode")
    assert sum(found[f"vllm:request_{part}_time_seconds_sum",] for part in parts) == (
        pytest.approx(total)
    )
    assert 0 < found["vllm:time_to_first_token_seconds_sum",] < total
    assert found["vllm:time_to_first_token_seconds_bucket", "2560.0"] == 3
    assert ("vllm:inter_token_latency_seconds_bucket", "0.025") in found


def test_what_a_tier_gives_back_is_counted():
    """Tokens that a tier gave back are `cached_tokens`; metrics have them, and bytes, by tier.

    The tier is asked for what the cache does not hold.
    """
    prompts = [" ".join(f"{name}{index}" for index in range(200)) for name in "abcd"]
    with serving(blocks=20, memory=None, tier=["host:memory=4MiB,load=always"]) as server:
        create = client(server).completions.create
        cached = [
            create(
                model="tiny", prompt=each, max_tokens=2
            ).usage.prompt_tokens_details.cached_tokens
            for each in [*prompts * 2, prompts[-1]]
        ]
        found = metrics(server)
    assert cached == [0] * 4 + [192] * 5
    assert found["vllm:external_prefix_cache_hits_total", "host"] == 4 * 192
    assert found["vllm:external_prefix_cache_queries_total", "host"] == 9 * 200 - 192
    moved = "vllm:kv_offload_total_bytes_total"
    block = 16 * 2 * 1 * 16 * 4
    assert found[moved, "host", "load"] == 4 * 12 * block
    assert found[moved, "host", "store"] >= 4 * 12 * block


def test_blocks_stored_and_not_removed_by_events_are_cached():
    """Blocks stored and not removed by KV events are cached.

    Only blocks stored before the subscription are missing.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        serving(ServeConfig(port=0, kv_events=address), memory="64KiB") as server,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket_,
    ):
        socket_.connect(address)
        socket_.subscribe(b"")
        socket_.rcvtimeo = 30_000
        held = set()
        # No event arrives until the subscription has reached the publisher.
        unseen = 0
        while not socket_.poll(200):
            complete(server, f"start {unseen} " * 20, tokens=1)
            unseen += 1
        for index in range(12):
            complete(server, f"{index} {PROMPT}", tokens=20)
        while socket_.poll(500):
            *_, payload = socket_.recv_multipart()
            for event in decode(payload).events:
                if isinstance(event, BlockStored):
                    held |= set(event.hashes)
                    assert len(event.tokens) == 16 * len(event.hashes)
                elif isinstance(event, BlockRemoved):
                    held -= set(event.hashes)
        cached = cached_keys(server.cache)
        assert held <= cached
        # Two blocks of each request before the subscription.
        assert len(cached - held) <= 2 * unseen
        assert len(held) > 20
        assert server.cache.tree.evicted_blocks


@pytest.mark.slow
def test_sigterm_finishes_the_requests_and_the_trace(tmp_path):
    """On SIGTERM the server finishes its requests, checks the cache and completes the trace.

    A server takes any number of requests: its trace names no limit of them.
    """
    trace = tmp_path / "day.jsonl.gz"
    server = ServerProcess("--trace", str(trace)).wait()
    try:
        texts = [complete(server, f"{PROMPT} {index}", 4) for index in range(3)]
        stream = client(server).completions.create(
            model="tiny", prompt="left behind", max_tokens=2000, stream=True
        )
        next(iter(stream))
        stream.close()
        code, printed = server.stop()
    finally:
        server.kill()
    assert len(set(texts)) == 3
    assert code == 0, printed
    report = replay(trace)
    assert report.complete
    assert report.requests == report.finished + report.rejected == 4
    assert next(iter(read_events(trace))).workload.options.get("limit") is None


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_open_requests(tmp_path):
    """A second SIGTERM closes the connections of clients, and the trace is still complete.

    Until then `/health` says 503, whatever is still open.
    """
    trace = tmp_path / "day.jsonl"
    server = ServerProcess("--trace", str(trace), "--grace", "600").wait()
    try:
        stream = client(server).completions.create(
            model="tiny", prompt="endless", max_tokens=30_000, stream=True
        )
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        asyncio.run(until(lambda: health(server) == 503))
        code, printed = server.stop()
        assert "1 request in flight cut off" in printed
        assert printed.splitlines()[-1].endswith("kvcore: ended")
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    finally:
        server.kill()
    assert code == 0, printed
    assert "Traceback" not in printed
    report = replay(trace)
    assert (report.complete, report.requests) == (True, 1)


def health(server):
    """Return the status of `/health` of a server."""
    host = server.url.removeprefix("http://")
    with closing(http.client.HTTPConnection(host, timeout=5)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status


@pytest.mark.slow
def test_the_trace_can_be_read_after_sigkill(tmp_path):
    """The unfinished trace of a killed server has the requests that finished."""
    server = ServerProcess("--trace", str(tmp_path / "day.jsonl.gz")).wait()
    try:
        complete(server, PROMPT, 4)
        (part,) = tmp_path.iterdir()
        asyncio.run(until(lambda: "FINISH" in events_of(part)))
    finally:
        server.kill()
    assert "REQUEST" in events_of(part)


def events_of(path):
    """Return the events of a trace that may be cut off."""
    return [event.event for event in read_events(path)] if path.stat().st_size else []


def test_open_requests_get_503_if_the_engine_fails(tmp_path):
    """If the engine fails, requests get 503 with the reason.

    The server raises the error when it ends, and keeps the trace of the requests before as
    `.part`.
    """

    def forward(batch, attend):
        del batch, attend
        msg = "out of luck"
        raise RuntimeError(msg)

    def end():
        with serving(ServeConfig(port=0, grace=2, trace=tmp_path / "day.jsonl")) as server:
            complete(server, "before", 3)
            server._model.forward = forward
            answers = [
                ask(server, "/v1/completions", b'{"prompt": "a"}'),
                ask(server, "/v1/completions", b'{"prompt": "a", "stream": true}'),
            ]
            for status, document in answers:
                assert status == 503
                assert "out of luck" in document["error"]["message"]
            assert server.engine.failure is not None

    with pytest.raises(PolicyError, match="out of luck"):
        end()
    (part,) = tmp_path.iterdir()
    assert part.name == "day.jsonl.part"
    assert events_of(part).count("FINISH") == 1


def test_times_of_a_file_may_be_numbers(tmp_path):
    """Times in a configuration file may be numbers of seconds or text, a speed is a number."""
    (tmp_path / "serve.toml").write_text(
        'client_timeout = 5\ngrace = "500ms"\nsimulate = true\nspeed_up = 2.5\nblocks = 0\n'
    )
    run = run_here("serve", "--config", "serve.toml", cwd=tmp_path)
    assert "serve.toml: blocks: a pool of 0 blocks" in run.stderr


def test_text_is_returned_in_whole_characters():
    """A text that grows byte by byte is returned in whole characters."""
    whole = "naïve ☃ 🎉 end"
    data = whole.encode()
    text = Text(lambda ids: bytes(ids).decode(errors="replace"))
    parts = [text.add([byte]) for byte in data]
    parts.append(text.add([], last=True))
    assert "".join(parts) == whole
    assert all("\ufffd" not in part for part in parts)


def test_a_stop_text_is_found_where_it_ends_first():
    """Of texts that begin as they do or not, all stop texts are found as `str.find` does."""
    stops = ["".join(letters) for size in range(1, 5) for letters in product("ab", repeat=size)]
    for text in map("".join, product("ab", repeat=7)):
        for stop in stops:
            end = text.find(stop) + len(stop) if stop in text else None
            assert StopText(stop).end(text) == end


def test_a_stop_text_costs_what_the_answer_is_long():
    """A character of an answer that begins as its stop text does is compared a few times."""

    class Counted(str):
        __slots__ = ()
        read = 0

        def __getitem__(self, index):
            Counted.read += 1
            return super().__getitem__(index)

    answer = "ab" * 2_000
    text = Text(lambda ids: bytes(ids).decode(), (Counted(f"{answer}c"),))
    parts = [text.add([ord(character)]) for character in answer]
    assert parts == [""] * len(answer)
    assert text.add(b"ab") == "ab"
    assert Counted.read < 8 * len(answer)


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1), max_size=3))
@example(["aba"], ["b", "aba"])
@example(["ab"], ["b", "ab"])
@example(["ababb"], ["aba", "bb"])
def test_a_text_ends_before_the_stop_text_that_ends_first(pieces, stops):
    """However a text comes in pieces, it ends before the first text in it that is a stop text.

    First is what ends first, of those that end together what is first in the list. A beginning
    of a stop text that is not completed remains in the text.
    """
    whole = "".join(pieces)
    ends = (whole[:end] for end in range(len(whole) + 1))
    cut = [text.removesuffix(stop) for text in ends for stop in stops if text.endswith(stop)]
    text, parts = Text(lambda ids: bytes(ids).decode(), tuple(stops)), []
    for piece in pieces:
        parts.append(text.add(piece.encode()))
        if text.stopped:
            break
    else:
        parts.append(text.add([], last=True))
    assert text.stopped is bool(cut)
    assert "".join(parts) == (cut[0] if cut else whole)


def test_an_incomplete_stop_text_is_returned_at_the_end():
    """A text that ends with the beginning of a stop text is returned whole."""
    for ids, last in ((b"", True), (b"\0", False)):
        text = Text(lambda ids: bytes(ids).decode(), ("END",), frozenset({0}))
        assert text.add(b"the EN") + text.add(ids, last=last) == "the EN"
        assert text.stopped is not last


def test_a_stop_text_ends_a_response(server):
    """A response ends before the stop text, streamed or not, and computes no further tokens."""
    whole = complete(server, tokens=12).split()
    stop = f" {whole[4]} {whole[5]}"
    expected = " ".join(whole).split(stop)[0]
    ask_ = client(server).completions.create
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "stop": [stop]}
    answer = ask_(**options)
    parts = [part.choices[0] for part in ask_(**options, stream=True)]
    assert answer.choices[0].text == "".join(part.text for part in parts) == expected
    assert answer.choices[0].finish_reason == parts[-1].finish_reason == "stop"
    assert answer.usage.completion_tokens < 12


def test_a_stopped_server_leaves_no_thread(tmp_path):
    """A server that has stopped leaves no thread running, of its tiers and events neither."""
    before = set(threading.enumerate())
    config = ServeConfig(port=0, grace=2, kv_events=f"tcp://127.0.0.1:{free_port()}")
    tiers = [f"disk:memory=4MiB,path={tmp_path}"]
    with serving(config, blocks=20, memory=None, tier=tiers) as server:
        for index in range(4):
            complete(server, f"{index} " * 200, tokens=1)
        started = {thread.name for thread in set(threading.enumerate()) - before}
    assert {"kvcore-engine", "kvcore tier disk", "kvcore-kv-events"} <= started
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("kvcore")]


def test_a_stopped_server_has_written_what_its_tiers_store(tmp_path, monkeypatch):
    """A server that stops waits for blocks that are not in their tier yet."""
    closing, written, write, close = threading.Event(), [], DiskStore.write, TensorMover.close

    def late(store, blocks, data):
        closing.wait()
        write(store, blocks, data)
        written.extend(blocks)

    def closed(mover, *, whole):
        closing.set()
        close(mover, whole=whole)

    monkeypatch.setattr(DiskStore, "write", late)
    monkeypatch.setattr(TensorMover, "close", closed)
    tiers = [f"disk:memory=4MiB,path={tmp_path}"]
    with serving(blocks=20, memory=None, tier=tiers) as server:
        for index in range(4):
            complete(server, f"{index} " * 200, tokens=1)
    (tier,) = server.cache.tiers.as_dict()
    assert len(written) == tier["stored_blocks"] > 20


def test_what_a_server_has_stored_is_read_by_a_run(tmp_path):
    """K/V that a server leaves in a tier is that of a run with the same prompt."""
    tier = f"disk:memory=4MiB,path={tmp_path},write=through,load=always"
    options = {"blocks": 40, "memory": None, "tier": [tier]}
    with serving(**options) as server:
        complete(server, tokens=1)
    result = kvcore.run(prompts=[PROMPT], max_output=1, generator=SMALL, **options)
    assert result.cache.tiers.as_dict()[0]["hit_blocks"] == len(PROMPT.split()) // 16 > 0


def test_a_server_computes_in_as_many_threads_as_it_is_given(monkeypatch):
    """`--threads` limits the threads of torch, as long as the server runs."""
    before, used, set_threads = torch.get_num_threads(), [], torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: used.append(n) or set_threads(n))
    monkeypatch.setattr("kvcore_engine.backend.torch_backend.cpus", lambda: before + 1)
    with serving(threads=before + 1):
        assert used == [before + 1]
    assert used == [before + 1, before]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_stop_text_ends_has_finished(stream):
    """A stop text ends a request as its last token would: its tokens are counted."""
    with serving() as server:
        whole = complete(server, tokens=40)
        answer = client(server).completions.create(
            model="tiny", prompt=PROMPT, max_tokens=40, stop=whole.split()[4], stream=stream
        )
        list(answer)  # reads the stream
        asyncio.run(until(lambda: sum(server.engine.loop.log.requests.values()) == 2))
        log = server.engine.loop.log
        assert log.requests == {"finished": 2, "rejected": 0, "cancelled": 0}
        assert log.prompt_tokens == 2 * len(PROMPT.split())
        assert 40 < log.output_tokens < 80


def test_a_text_beyond_the_positions_of_the_model_is_refused():
    """A request for more tokens than the model has positions gets 400; the server goes on."""
    hugging = pytest.importorskip("helpers.hugging", reason="needs transformers")
    model = hugging.tiny("gpt2", dtype=hugging.torch.float32)
    with serving(generator=HuggingFace(model)) as server:
        body = {"prompt": [5] * 250, "max_tokens": 7}
        status, document = ask(server, "/v1/completions", json.dumps(body).encode())
        assert status == 400
        assert (
            "250 tokens and 7 of output do not fit into the 256" in document["error"]["message"]
        )
        body["max_tokens"] = 6
        status, document = ask(server, "/v1/completions", json.dumps(body).encode())
        assert status == 200
        assert document["usage"]["completion_tokens"] == 6
        _, document = ask(server, "/tokenize", b'{"prompt": [5]}')
        assert document["max_model_len"] == 256


def test_a_server_of_length_dependent_frequencies_needs_their_length(monkeypatch):
    """No server starts that takes texts at which rotary frequencies change; a limit helps."""
    hugging = pytest.importorskip("helpers.hugging", reason="needs transformers")
    monkeypatch.setitem(hugging.FAMILIES, "dynamic", hugging.LENGTHS["dynamic"])
    model = hugging.tiny("dynamic", dtype=hugging.torch.float32)
    with (
        pytest.raises(InputError, match=r"'dynamic'.* beyond 64 tokens.*max_model_len=64"),
        serving(generator=HuggingFace(model)),
    ):
        pytest.fail("it serves")
    with serving(generator=HuggingFace(model), max_model_len=64) as server:
        body = json.dumps({"prompt": [5] * 90, "max_tokens": 2}).encode()
        assert ask(server, "/v1/completions", body)[0] == 400
        body = json.dumps({"prompt": [5] * 60, "max_tokens": 4}).encode()
        assert ask(server, "/v1/completions", body)[0] == 200


@pytest.mark.parametrize(("longest", "served"), [(None, 64), (128, 128)])
def test_a_server_of_longrope_serves_the_length_that_its_factors_hold_for(
    monkeypatch, longest, served
):
    """Short factors serve texts of the original length; with a longer limit long ones do."""
    hugging = pytest.importorskip("helpers.hugging", reason="needs transformers")
    monkeypatch.setitem(hugging.FAMILIES, "longrope", hugging.LENGTHS["longrope"])
    model = hugging.tiny("longrope", dtype=hugging.torch.float32)
    with serving(generator=HuggingFace(model), max_model_len=longest) as server:
        for tokens, status in ((served, 200), (served + 1, 400)):
            body = json.dumps({"prompt": [5] * (tokens - 2), "max_tokens": 2}).encode()
            assert ask(server, "/v1/completions", body)[0] == status


def test_the_trace_of_a_cache_that_is_inconsistent_stays(tmp_path, monkeypatch):
    """If the check of the cache fails at the end, the trace is kept as `.part`."""

    def end():
        with serving(ServeConfig(port=0, grace=2, trace=tmp_path / "day.jsonl")) as server:
            complete(server, "before", 3)
            monkeypatch.setattr(type(server.cache), "check_integrity", fail)

    def fail(_):
        raise AssertionError

    with pytest.raises(AssertionError):
        end()
    (part,) = tmp_path.iterdir()
    assert part.name == "day.jsonl.part"


def test_a_port_in_use_leaves_an_older_trace(server, tmp_path):
    """The error for a port in use names it, and an older trace stays as it is."""
    port, trace = int(server.url.rpartition(":")[2]), tmp_path / "day.jsonl"
    trace.write_text("yesterday")
    config = ServeConfig(port=port, trace=trace)
    error = f"port {port} of 127.0.0.1: Address already in use"
    with pytest.raises(kvcore.InputError, match=error), serving(config):
        pass
    assert list(tmp_path.iterdir()) == [trace]
    assert trace.read_text() == "yesterday"


def test_a_generator_that_cannot_encode_is_reported(capsys):
    """An exception of `encode` or `encode_chat` is a line that names the plugin, and a 500."""

    def fail(_):
        raise KeyError

    with serving() as server:
        server._model.encode = server._model.encode_chat = fail
        for path, body in (
            ("/v1/completions", b'{"prompt": "a"}'),
            ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}'),
            ("/tokenize", b'{"prompt": "a"}'),
        ):
            status, document = ask(server, path, body)
            assert status == 500
            assert document["error"]["message"] == "a plugin of the server failed"
    told = capsys.readouterr().err
    assert told.count("'transformer'") == told.count("raised KeyError in fail()") == 1


def test_a_server_with_a_trace_keeps_nothing_of_ended_requests(tmp_path):
    """The server forgets each request that has ended, however that was.

    The salt of a request, which keeps tenants apart, is in the trace as a keyed hash.
    """
    trace = tmp_path / "day.jsonl"
    with serving(ServeConfig(port=0, grace=2, trace=trace)) as server:
        for index in range(20):
            body = {"prompt": f"{index} a b c", "max_tokens": 2, "cache_salt": "TOP-SECRET"}
            assert ask(server, "/v1/completions", json.dumps(body))[0] == 200
            body = {"prompt": f"{index} d e", "max_tokens": 3, "stop": ["a", "b"]}
            assert ask(server, "/v1/completions", json.dumps(body))[0] == 200
        cache, loop = server.cache, server.engine.loop
        # A request is answered just before the loop has let go of it.
        asyncio.run(until(lambda: not (loop.open or loop.inbox.left or loop._leaving)))
        kept = [cache._admitted, cache.trace._seen, loop.open, loop.listeners, loop._leaving]
        kept.append(loop._tokens.measured)
        assert [len(each) for each in kept] == [0] * 6
    assert replay(trace).complete
    assert "TOP-SECRET" not in trace.read_text()
    salts = {event.salt for event in read_events(trace) if event.event == "REQUEST"}
    assert len(salts) == 2


def test_a_cancelled_request_has_an_end(server):
    """The listener of a request that is cancelled gets its end, as that of any other."""
    parts = queue.Queue()
    request = text_request("left", list(range(20)), output=500, block_size=16)
    server.engine.submit(request, parts.put)
    server.engine.cancel("left")
    while (part := parts.get(timeout=60)).end is None:
        assert part.ids
    assert part.end == CANCELLED


def test_a_call_has_end_tokens_of_its_own(server):
    """An answer ends before the first of its `stop_token_ids`, and the rest is not made."""
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6}
    create = client(server).completions.create
    words = create(**options).choices[0].text.split()
    token = next(word for word in words[1:] if word != words[0])
    answer = create(**options, extra_body={"stop_token_ids": [int(token)]})
    assert answer.choices[0].text.split() == words[: words.index(token)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == words.index(token) + 1
