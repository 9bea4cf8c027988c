# ruff: noqa: E402 - a missing package skips the module first
"""`kvcore serve --simulate`: the loop of a simulation in real time, behind the API."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'kvcore[serve]'")
pytest.importorskip("prometheus_client", reason="needs it: pip install 'kvcore[serve]'")
openai = pytest.importorskip("openai", reason="needs openai: pip install openai")
zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install 'kvcore[serve]'")

from helpers.jobs import job
from helpers.online import free_port, metrics, serving, simulated_parts, timers
from helpers.online_scenes import http_request, raw
from helpers.serving import Even
from helpers.upstreams import until

import kvcore
from kvcore import KVCache
from kvcore.request import text_request
from kvcore.serving.latency import StepWork
from kvcore.units import NS_PER_S
from kvcore_events.formats import decode
from kvcore_events.model import BlockRemoved
from kvcore_online.engine import LiveEngine, LiveInbox, LiveLoop, Tokens, share_keys
from kvcore_online.metrics import server_metrics
from kvcore_online.server import ServeConfig, Server, run
from kvcore_online.simulated import WORDS, SimulatedModel, SimulatedTokens
from kvcore_online.tally import CANCELLED, FAILED, FINISHED
from kvcore_plugins.traces.live import LiveTrace
from kvcore_replay.check.trace import replay

TIER = "host:memory=1GiB,load=always,read_bandwidth=50MB"
"""A tier from which blocks take so long that the loop waits for them."""

FAST = ServeConfig(port=0, grace=2, speed_up=1000)


class World:
    """A clock that moves while the loop sleeps or waits, and requests that come meanwhile."""

    def __init__(self, requests):
        """Take the requests, in order of arrival."""
        self.now, self.coming, self.loop = 0, list(requests), None
        self.tokens, self.parts = {}, []

    def clock(self):
        """Return the time in ns, of a clock that began long before."""
        return 7 * NS_PER_S + self.now

    def sleep(self, seconds):
        """Move the clock; requests come at their times."""
        until = self.now + round(seconds * NS_PER_S)
        while self.coming and self.coming[0].arrival <= until:
            self.come()
        self.now = until

    def come(self):
        """Let the next request come."""
        request = self.coming.pop(0)
        self.now, times = max(self.now, request.arrival), []
        self.tokens[request.id] = times

        def listener(part):
            self.parts.append(part)
            times.extend(self.now for _ in part.ids)

        self.loop.listeners[request.id] = listener
        self.loop.inbox.put(request)
        self.loop.inbox.closing = not self.coming

    # As the condition of the inbox.

    def __enter__(self):
        """Do nothing: there is one thread."""

    def __exit__(self, *_):
        """Do nothing."""

    def notify(self):
        """Do nothing: `wait` returns when the next request has come."""

    def wait(self, seconds=None):
        """Let the next request come, or the seconds pass."""
        if seconds is None:
            self.come()
        else:
            self.sleep(seconds)


def served(world, speed=1.0, trace=None, **options):
    """Serve the requests of a world; return the loop that did."""
    arguments = simulated_parts(**options).arguments(trace)
    arguments["latency"].bind()
    executor = SimulatedTokens(arguments["latency"], SimulatedModel(), 0)
    world.loop = loop = LiveLoop(
        arguments["cache"],
        arguments["scheduler"],
        executor,
        arguments["batching"],
        clock=world.clock,
        speed=speed,
        sleep=world.sleep,
    )
    loop.inbox.changed = world
    loop.run()
    return loop


def played(requests, **options):
    """Return the times (ns) of the tokens of requests, by id, and the loop that served them."""
    world = World(requests)
    loop = served(world, **options)
    return world.tokens, loop


def drawn(count=40, gap_s=0.3):
    """Return requests that share beginnings, some of which come while others run."""
    model = SimulatedModel()
    return [
        text_request(
            index,
            model.encode(" ".join([WORDS[index // 2 % 3]] * 300 + [str(index)])),
            output=5 + index % 7,
            block_size=16,
            arrival=round(index * gap_s * NS_PER_S) + index % 5 * 1_300_001,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"like": "vllm:lag=0"},
        {"like": "sglang", "block_size": 16},
        {"tier": [TIER]},
        {"scheduler": "priority:ageing=0.02", "max_seqs": 2},
    ],
)
@pytest.mark.parametrize("gap_s", [0.3, 0.01])
def test_tokens_come_at_the_times_of_a_simulation(more, gap_s):
    """First and last tokens come when `kvcore.simulate` says of the same requests.

    That holds under load too, where requests are evicted and hit, loaded from a tier or
    ranked again: to within the nanosecond to which a clock is read.
    """
    options = {"blocks": 50, "latency": "roofline:frontend=0", **more}
    tokens, loop = played(drawn(gap_s=gap_s), **options)
    result = simulated_parts(**options).run(requests=drawn(gap_s=gap_s))
    rows = result.requests
    for index, name in enumerate(rows["id"]):
        arrived = rows["arrival_s"][index]
        first = rows["ttft_s"][index] + arrived
        assert tokens[name][0] == pytest.approx(first * NS_PER_S, abs=50_000)
        assert tokens[name][-1] == pytest.approx(rows["finish_s"][index] * NS_PER_S, abs=50_000)
    stats = result.cache.stats
    assert loop._cache.stats.hit_tokens == stats.hit_tokens > 0
    assert loop._cache.tree.evicted_blocks == result.cache.tree.evicted_blocks > 0


def test_the_end_of_a_request_comes_with_its_last_token():
    """A request of three tokens wakes its server three times, not once more for its end."""
    _, loop = played([text_request(0, [*range(20)], output=3, block_size=16)])
    parts = [(len(part.ids), part.end) for part in loop.inbox.changed.parts]
    assert parts == [(1, None), (1, None), (1, FINISHED)]


def test_a_faster_clock_changes_no_decision():
    """At ten times the speed all tokens come in a tenth of the time of the clock."""
    requests, options = drawn(count=8, gap_s=0), {"blocks": 50, "tier": [TIER]}
    for request in requests:
        request.arrival = 0
    slow, loop = played(requests, **options)
    fast, _ = played(requests, speed=10.0, **options)
    assert loop._cache.tiers.as_dict()[0]["hit_blocks"]
    for name, times in slow.items():
        assert [time * 10 for time in fast[name]] == pytest.approx(times, abs=10_000)


def test_a_prompt_of_several_chunks_has_its_first_token_after_the_last():
    """Chunks of a prompt generate no token but the last one."""
    tokens, loop = played(
        [text_request(0, range(3000), output=3, block_size=16)], max_tokens=512
    )
    assert len(tokens[0]) == 3
    assert loop.log.output_tokens == 3


def test_a_machine_that_is_too_slow_does_not_slow_the_model():
    """Where a sleep is too long, the next one is shorter: the times of tokens do not drift."""

    class Slow(World):
        def sleep(self, seconds):
            super().sleep(seconds + 0.004)

    request = [text_request(0, range(100), output=200, block_size=16)]
    exact, slow = World(request), Slow(request)
    served(exact)
    served(slow)
    pairs = zip(exact.tokens[0], slow.tokens[0], strict=True)
    assert max(late - time for time, late in pairs) <= 5_000_000


def test_the_time_between_steps_counts_where_steps_take_their_own():
    """Where steps are not paced, each begins at the present, not when the one before ended."""

    class Busy(World):
        def wait(self, seconds=None):
            super().wait(seconds)
            self.loop.listeners[0] = lambda _: self.sleep(1)

    world = Busy([text_request(0, range(100), output=3, block_size=16)])
    loop = served(world, speed=None)
    gaps = loop.log.times["inter_token_latency_seconds"].samples("")
    assert gaps["_sum{}"] == pytest.approx(2, abs=0.1)


def test_no_tensor_library_is_imported():
    """A simulated server computes nothing: torch is not imported, nor numpy."""
    code = (
        "import asyncio, sys\n"
        "from helpers.online import simulated_parts\n"
        "from kvcore_online.server import ServeConfig, Server\n"
        "async def main():\n"
        "    server = Server(simulated_parts(), ServeConfig(port=0, speed_up=1.0))\n"
        "    await server.start()\n"
        "    await server.stop()\n"
        "asyncio.run(main())\n"
        "print({'torch', 'numpy'} & set(sys.modules))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout == "set()\n"


def test_a_server_that_cannot_listen_is_closed():
    """If the port is in use, nothing of the server is left: no listener, no thread."""

    async def main(port):
        server = Server(simulated_parts(), ServeConfig(port=port, speed_up=1.0))
        with pytest.raises(kvcore.InputError, match=f"port {port} of 127.0.0.1"):
            await server.start()
        assert server._listener._server is None
        assert not server.engine._thread.is_alive()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(main(taken.getsockname()[1]))


def test_a_server_that_has_ended_leaves_no_timer():
    """A loop that goes on has nothing to do for a server that was stopped in time."""
    timers = []

    async def main():
        loop = asyncio.get_running_loop()
        later = loop.call_later
        server = Server(simulated_parts(), FAST)
        await server.start()
        loop.call_later = lambda *arguments: timers.append(later(*arguments)) or timers[-1]
        await server.stop()

    asyncio.run(main())
    assert timers
    assert all(timer.cancelled() for timer in timers)


def made(**options):
    """Return a simulated server that does not listen."""
    return Server(simulated_parts(**options), FAST)


def test_a_server_that_ends_or_has_failed_is_not_healthy():
    """`/health` is 200 while requests are served, and 503 at the end or after a failure."""

    def health(server):
        answer = asyncio.run(server._health(None))
        return answer.status, json.loads(answer.body)["status"]

    server = made()
    assert health(server) == (200, "ok")
    assert server.engine._thread.daemon  # it does not keep a process that ends
    asyncio.run(server.stop())
    assert health(server) == (503, "unavailable")
    server = made()
    server.engine.failure = RuntimeError()
    assert health(server) == (503, "unavailable")


def test_a_simulation_that_waits_is_not_behind():
    """A server is behind while it simulates steps by a clock, not else."""
    world = World([])
    for speed_up, idle in ((None, False), (1.0, True), (1.0, False)):
        config = ServeConfig(port=0, speed_up=speed_up)
        world.now = 0
        server = Server(simulated_parts(), config, world.clock)
        assert server.engine.loop.idle
        server.engine.loop.idle = idle
        world.now = 5 * NS_PER_S
        behind = 5.0 if speed_up and not idle else 0.0
        text = server_metrics(server.engine.loop, server.cache, "m", None)
        assert f'kvcore:behind_seconds{{model_name="m"}} {behind}\n' in text


def test_a_simulation_is_idle_while_it_waits_for_requests_and_loads():
    """Waiting for a request or for what a tier loads is no delay; the time of a step is."""
    world, waits, steps = World(drawn(30, 0.6)), set(), set()
    known = world.wait

    def wait(seconds=None):
        waits.add((seconds is None, world.loop.idle))
        known(seconds)

    world.wait = wait
    world.parts = SimpleNamespace(append=lambda _: steps.add(world.loop.idle))
    served(world, blocks=30, tier=[TIER])
    assert (waits, steps) == ({(True, True), (False, True)}, {False})


def test_requests_that_come_during_a_step_wait():
    """A request that the engine has not seen yet, and one that it has queued, are two."""
    server = made()
    loop = server.engine.loop
    for number in range(2):
        server.engine.submit(drawn()[number], print)
    loop.inbox.take()
    loop._arrive(drawn()[0], 0, 0)
    text = server_metrics(loop, server.cache, "m", None)
    assert 'vllm:num_requests_waiting{model_name="m"} 2\n' in text


def test_usage_of_the_cache_is_the_share_of_its_blocks_in_use():
    """A sequence of 100 tokens has 7 of 50 blocks."""
    server = Server(simulated_parts(blocks=50), FAST)
    seq = server.cache.open(text_request(0, range(100), output=1, block_size=16), None, None)
    server.cache.commit(seq, 100, None)
    text = server_metrics(server.engine.loop, server.cache, "m", None)
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.14\n' in text


def test_a_tier_is_asked_for_what_no_nearer_level_held():
    """Of 100 tokens the pool has 20 and the first tier three blocks, which leaves 32."""
    server = made(blocks=50, tier=["host:memory=1GiB"] * 2)
    server.cache.stats.lookup_tokens, server.cache.stats.hit_tokens = 100, 20
    server.cache.tiers.levels[0].stats.hits = 3
    text = server_metrics(server.engine.loop, server.cache, "m", None)
    name = 'vllm:external_prefix_cache_queries_total{model_name="m",tier='
    assert re.findall(rf"^{re.escape(name)}.* (\d+)$", text, re.MULTILINE) == ["80", "32"]


@pytest.mark.parametrize(
    ("longest", "limit"),
    [
        (None, (800, "the cache")),
        (799, (799, "max_model_len")),
        (800, (800, "max_model_len")),
        (801, (800, "the cache")),
    ],
)
def test_a_text_fits_into_the_cache_and_the_model(longest, limit):
    """The longest text is that of the pool, of 50 blocks of 16, or `max_model_len` if less."""
    reader = made(blocks=50, max_model_len=longest)._reader
    assert (reader.longest, reader.limit) == limit


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("chunk", [True, False])
def test_each_document_of_an_answer_says_what_it_is(chat, chunk):
    """Answers, and parts of a streamed chat, are of the kinds that the API has."""
    server = made()
    body = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    call = server._reader.read(body, chat=chat)
    head = server._head(text_request(7, [1], output=1, block_size=16), call, chunk=chunk)
    kind = "chat.completion" if chat else "text_completion"
    assert head["object"] == kind + ".chunk" * (chat and chunk)
    assert head["id"] == ("chatcmpl-7" if chat else "cmpl-7")
    assert head["model"] == server.model == "llama-3-70b"


def test_a_latency_model_serves_one_server():
    """A latency model is in use by its server, as every plugin is by the one that it serves."""
    latency = Even()
    made(latency=latency)
    with pytest.raises(kvcore.InputError, match="'even' is in use already"):
        made(latency=latency)


def test_the_seed_of_a_server_draws_its_words():
    """Answers to requests without a seed follow from the server's, which is 0 by default."""

    def word(**options):
        executor, served = made(**options).engine.loop._tokens, job(drawn(count=1)[0])
        executor.run(StepWork(decode=1, context=(1,)), (), [served])
        return executor.streams[served.request.id].output

    assert word() == word(seed=None) == word(seed=0)
    assert len({str(word(seed=seed)) for seed in range(4)}) > 1


def test_a_server_runs_until_a_signal():
    """`run` serves from `ready` on until SIGTERM."""
    served = []

    def ready(server):
        served.append(server)
        os.kill(os.getpid(), signal.SIGTERM)

    run(simulated_parts(), FAST, ready)
    assert served[0].url.startswith("http://127.0.0.1:")
    assert not served[0].engine._thread.is_alive()


def test_a_server_whose_engine_fails_ends():
    """`run` ends with the error of the engine, without a signal."""

    def ready(server):
        server.engine.loop.begin = fail
        server.engine.loop.inbox.leave("wake", CANCELLED)

    def fail():
        msg = "out of luck"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="out of luck"):
        run(simulated_parts(), FAST, ready)


def test_a_server_is_stopped_whatever_ends_it(tmp_path):
    """If `ready` raises an exception, no thread is left, and the trace is complete."""
    started, trace = [], tmp_path / "day.jsonl"

    def ready(server):
        started.append(server)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(simulated_parts(), attrs.evolve(FAST, trace=trace), ready)
    assert not started[0].engine._thread.is_alive()
    assert replay(trace).complete


def test_an_engine_is_closed_once_its_loop_has_ended():
    """`close` returns after the last request, however long that takes."""
    _, loop = played(drawn(1))
    loop.inbox = LiveInbox(lambda *_: None, int)
    engine = LiveEngine(loop, lambda _: None)
    ended = []

    def serve():
        with loop.inbox.changed:
            loop.inbox.changed.wait_for(lambda: loop.inbox.closing)
        ended.append("the last request")

    loop.run = serve
    engine.start()
    engine.close()
    assert ended == ["the last request"]


def test_a_trace_is_flushed_each_second_and_before_a_wait(tmp_path):
    """Of a server that is killed, the last second is lost, and nothing if it was idle."""
    flushed = []

    class Noted(LiveTrace):
        def flush(self):
            flushed.append(world.now / NS_PER_S)
            super().flush()

    world = World([text_request(0, range(100), output=70, block_size=16)])
    with Noted(tmp_path / "day.jsonl", **simulated_parts().header()) as trace:
        served(world, trace=trace)
    assert flushed == pytest.approx([0, 1, world.now / NS_PER_S], abs=0.1)


@pytest.fixture(scope="module")
def server():
    """Yield a simulated server."""
    with serving(FAST, simulated=True) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    """Yield a client of the server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as made:
        yield made


def ask(client, messages, **options):
    """Return the answer to a chat."""
    return client.chat.completions.create(model="llama-3-70b", messages=messages, **options)


def test_a_server_has_four_connections_for_each_answer():
    """Of a server of one answer at a time, the fifth connection is closed at once."""
    with (
        serving(attrs.evolve(FAST, requests=1), simulated=True) as server,
        ExitStack() as stack,
    ):
        host, port = server.url.removeprefix("http://").split(":")
        clients = [socket.create_connection((host, int(port)), timeout=20) for _ in range(5)]
        answers = []
        for client in map(stack.enter_context, clients):
            with suppress(ConnectionError):
                client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                answers.append(client.recv(15))
    assert list(filter(None, answers)) == [b"HTTP/1.1 200 OK"] * 4


def test_a_server_that_is_aborted_closes_the_connections_of_its_clients():
    """No client is waited for, be it that it has sent nothing or takes nothing."""
    with serving(FAST, simulated=True) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            asyncio.run(until(lambda: server._listener._http.connections))
            server._loop.call_soon_threadsafe(server.abort)
            with suppress(ConnectionError):
                assert client.recv(1) == b""


def test_a_server_that_ends_waits_for_no_step_without_a_client():
    """The last step of a slow simulation, whose client is cut off, has not come to its end."""
    slow = attrs.evolve(FAST, speed_up=0.005, grace=0.1)
    with serving(slow, simulated=True) as server, ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        client = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
        client.sendall(http_request(b'{"prompt": "a"}'))
        asyncio.run(until(lambda: server.engine.loop.open))
    assert server.engine.loop.behind_ns < 0


def test_a_conversation_hits_the_blocks_of_its_answers(client):
    """The text of an answer is read back as the tokens that were generated."""
    messages = [{"role": "user", "content": "hello " * 100}]
    first = ask(client, messages, max_tokens=200)
    said = first.choices[0].message
    messages += [{"role": "assistant", "content": said.content}]
    messages += [{"role": "user", "content": "go on"}]
    second = ask(client, messages, max_tokens=1)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens // 16 * 16 - 16


def test_equal_seeds_give_equal_words(client):
    """A client's seed gives its answer, with whatever temperature, streamed or not."""
    messages = [{"role": "user", "content": "tell me"}]
    options = {"seed": 3, "max_tokens": 20}
    text = ask(client, messages, **options).choices[0].message.content
    parts = ask(client, messages, stream=True, temperature=0.2, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert set(text.split()) <= set(WORDS)
    assert len(text.split()) == 20
    assert ask(client, messages, max_tokens=20).choices[0].message.content != text


def test_a_short_call_starts_no_timer(server):
    """Its body has come with its headers, and the buffer of its connection takes its answer."""
    with timers() as started:
        answer = asyncio.run(
            raw(
                server,
                http_request(b'{"prompt": "hello", "max_tokens": 1}', "Connection: close"),
            )
        )
    assert (answer[:15], started) == (b"HTTP/1.1 200 OK", {})


def test_its_metrics_are_those_of_the_model(server, client):
    """The mean time between tokens is that of the latency model, at any speed of the clock."""
    ask(client, [{"role": "user", "content": "count"}], max_tokens=50)
    found = metrics(server)
    gaps = found["vllm:inter_token_latency_seconds_count",]
    mean = found["vllm:inter_token_latency_seconds_sum",] / gaps
    alone = kvcore.simulate(
        [kvcore.Request(id=0, prompt_tokens=20, output_tokens=50, key_tokens=16)],
        model="llama-3-70b",
    )
    assert mean == pytest.approx(alone.summary()["tpot_s"]["mean"], rel=0.2)


def test_blocks_are_stored_and_evicted_in_events():
    """A small pool evicts real blocks, which KV events report with 32-bit token ids.

    Tokens of requests that have ended are kept for cached blocks alone.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    config = ServeConfig(port=0, grace=2, speed_up=1000, kv_events=address)
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as events,
        serving(config, simulated=True, blocks=40) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        events.connect(address)
        events.subscribe(b"")
        kinds, number = set(), 0
        while len(kinds) < 2:
            ask(client, [{"role": "user", "content": f"{number} word " * 120}], max_tokens=2)
            number += 1
            while events.poll(20):
                *_, payload = events.recv_multipart()
                for event in decode(payload).events:
                    kinds.add(type(event).__name__)
                    assert all(token < 1 << 32 for token in getattr(event, "tokens", ()))
        asyncio.run(until(lambda: not server.engine.loop.open))
        assert server.stored._tokens.keys() == server.stored._stored
    assert kinds == {"BlockStored", "BlockRemoved"}


def test_no_subscriber_of_a_server_is_waited_for(monkeypatch):
    """One that reads nothing keeps no event from others: what it leaves unread is dropped."""
    monkeypatch.setattr("kvcore_events.publisher._QUEUE", 1)
    monkeypatch.setattr("kvcore_events.publisher._LINGER_MS", 0)
    monkeypatch.setattr("kvcore_online.stored.encode", lambda _: bytes(1 << 16))
    config = ServeConfig(port=0, kv_events="tcp://127.0.0.1:*")
    server = Server(simulated_parts(), config)
    publisher, waiting = server.stored._publisher, server.stored._batches

    async def main():
        with zmq.Context() as context, context.socket(zmq.SUB) as stalled:
            stalled.rcvhwm, stalled.rcvbuf = 1, 4_096
            stalled.connect(publisher.address)
            stalled.subscribe(b"")
            await until(lambda: publisher.subscribers)
            for _ in range(200):
                server.stored._put(BlockRemoved(hashes=()))
            await until(waiting.empty)
        await server.stop()

    asyncio.run(main())


def test_the_trace_of_a_simulated_server_is_whole(tmp_path):
    """Its trace replays, tiers included, and is a workload for another deployment."""
    path = tmp_path / "day.jsonl"
    config = ServeConfig(port=0, grace=2, speed_up=1000, trace=path)
    options = {"blocks": 60, "tier": ["host:memory=1GiB"], "like": "vllm:lag=0"}
    with (
        serving(config, simulated=True, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        for index in range(12):
            ask(client, [{"role": "user", "content": f"{index % 6} word " * 100}], max_tokens=9)
    report = replay(path)
    assert (report.complete, report.finished) == (True, 12)
    assert kvcore.simulate(f"trace:{path}", model="llama-3.1-8b").summary()["completed"] == 12


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt-oss-20b", {"like": "vllm:lag=0"}),
        ("gpt-oss-20b", {"like": "sglang"}),
        ("qwen3-next-80b-a3b", {"device": "h200"}),
    ],
)
def test_a_model_with_cache_groups_is_served(tmp_path, model, options):
    """A model whose layers keep different things is served in cache groups, and traced.

    The blocks of its layers may be larger than keys, as those of states are. In the end no
    request holds a block.
    """
    messages = [{"role": "user", "content": "word " * 1200}]
    config = attrs.evolve(FAST, trace=tmp_path / "groups.jsonl")
    with (
        serving(config, simulated=True, model=model, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        cached = [
            client.chat.completions.create(model=model, messages=messages, max_tokens=5)
            .usage.prompt_tokens_details.cached_tokens
            for _ in range(2)
        ]  # fmt: skip
        text = server_metrics(server.engine.loop, server.cache, "m", None)
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.0\n' in text
    assert cached[0] == 0
    assert cached[1] > 200
    assert replay(config.trace).finished == 2


@pytest.mark.parametrize(("stream", "cached"), [(False, 4), (True, 0)])
def test_tokens_that_come_at_once_are_sent_together(stream, cached):
    """Tokens that an engine has before the loop takes them are pieces of 256, and the rest one.

    With a piece for each token no other client was served while a fast engine had many answers.
    """
    tokens = 3 * 256 + 1
    with serving(simulated=True) as server:
        word, *_ = server.engine.loop._tokens._model._tokens

        def submit(_, listener):
            for _ in range(tokens):
                listener(Tokens([word], cached=cached))
            listener(Tokens(end=FINISHED))

        server.engine.submit = submit
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = api.completions.create(
            model=server.model, prompt="of the", max_tokens=tokens, stream=stream, **options
        )
        parts = list(answer) if stream else [answer]
        api.close()
    texts = [choice.text for part in parts for choice in part.choices]
    usage = parts[-1].usage
    assert "".join(texts) == f" {WORDS[0]}" * tokens
    assert usage.completion_tokens == tokens
    assert usage.prompt_tokens_details.cached_tokens == cached
    assert len(texts) == (5 if stream else 1)


def test_others_are_served_between_two_pieces_that_have_come():
    """Pieces that wait are sent in turns of the loop, one for each, without a pause."""
    server, order = made(), []
    server.engine.submit = lambda _, listener: listener(Tokens([5], end=FINISHED))

    def other(turns):
        order.append("other")
        if turns:
            asyncio.get_running_loop().call_soon(other, turns - 1)

    async def scene():
        requests = [text_request(number, [1], output=1, block_size=16) for number in range(3)]
        async for index, _ in server._generate(requests):
            order.append(index)
            if not index:
                asyncio.get_running_loop().call_soon(other, 5)

    asyncio.run(scene())
    assert order[:5] == [0, "other", 1, "other", 2]


def test_a_stop_text_ends_an_answer_before_its_request():
    """A whole answer is sent once its stop text has come: no later token is waited for."""
    with serving(FAST, simulated=True) as server:
        model = server.engine.loop._tokens._model
        server.engine.submit = lambda _, listener: listener(Tokens(model.encode("of the and")))
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="-", timeout=10, max_retries=0
        ) as api:
            answer = api.completions.create(model=server.model, prompt="a", stop="the")
    assert answer.choices[0].text == " of "


def test_a_request_that_comes_as_the_engine_fails_is_told_once(monkeypatch):
    """Be it submitted just before the failure or just after, a request has one end."""
    _, loop = played(drawn(1))
    engine = LiveEngine(loop, lambda _: None)
    ends = []
    monkeypatch.setattr(loop.inbox, "put", lambda _: engine._fail(ValueError("no more")))
    for number in range(2):
        engine.submit(text_request(number, [1], output=1, block_size=16), ends.append)
    assert ends == [Tokens(end=FAILED, reason="no more")] * 2


def test_all_are_told_of_a_failure_that_a_listener_has_caused():
    """If a listener fails, all others and the server are told, and `close` returns."""
    _, loop = played(drawn(1))
    loop.inbox = LiveInbox(lambda *_: None, int)
    ends, failures = [], []
    engine = LiveEngine(loop, failures.append)

    def failing(_):
        msg = "no reader"
        raise RuntimeError(msg)

    def serve():
        for listener in (*loop.listeners.values(),):
            listener(Tokens([1]))

    loop.run = serve
    for number, listener in enumerate((failing, ends.append)):
        engine.submit(text_request(number, [1], output=1, block_size=16), listener)
    engine.start()
    engine.close()
    assert ends == [Tokens(end=FAILED, reason="no reader")]
    assert list(map(str, failures)) == ["no reader"]


def test_an_engine_that_has_not_started_can_be_closed():
    """`close` returns if the thread was never started."""
    _, loop = played(drawn(1))
    loop.inbox = LiveInbox(lambda *_: None, int)
    LiveEngine(loop, lambda _: None).close()


def test_prompts_that_begin_alike_share_their_keys():
    """A cached prompt has keys of its own for what is new in it, and those of others before."""
    cache = KVCache(64, 4)
    kept = []
    for end in range(3):
        request = text_request(
            end, [*range(40), *range(100 + end, 108 + end)], output=1, block_size=4
        )
        seq = cache.open(request, 48, end)
        cache.commit(seq, 48 - seq.computed, end)
        before = list(seq.keys)
        share_keys(seq)
        assert seq.keys == before
        kept.append(seq.keys)
    assert all(
        a is b for keys in kept[1:] for a, b in zip(keys[:10], kept[0][:10], strict=True)
    )
    cache.check_integrity()


def test_a_server_holds_keys_that_prompts_share_once():
    """Of two cached prompts with equal beginnings, the first keys are the same objects."""
    prompts = [[*range(32), *range(end, end + 32)] for end in (100, 200)]
    _, loop = played(
        text_request(index, prompt, output=1, block_size=16, arrival=index * NS_PER_S)
        for index, prompt in enumerate(prompts)
    )
    one, other = (span.path_keys for span in loop._cache.tree.spans() if span.end == 4)
    assert [key is same for key, same in zip(one, other, strict=True)] == [True] * 2 + [
        False
    ] * 2
