"""Tests of `kvcore route` as a process, and of the trace that it writes."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from helpers.commands import run_here
from helpers.processes import Program, bad_day
from helpers.storm import storm
from helpers.upstreams import Upstream, prompt, routed, until

from kvcore import read_events
from kvcore_cli import main as frame
from kvcore_plugins.workload.recorded import TraceWorkload

pytestmark = pytest.mark.slow


@asynccontextmanager
async def routing(*arguments, count=2, files=None):
    """Yield a process of `kvcore route` and the upstream servers that it routes to."""
    servers = [await Upstream().start() for _ in range(count)]
    urls = [server.url for server in servers]
    program = Program("route", "--port", 0, *arguments, *urls, files=files)
    try:
        yield await program.start(), servers
    finally:
        await program.kill()
        for server in servers:
            await server.stop()


async def ask(url, **more):
    """Send a completion request and return the text of the answer."""
    async with (
        aiohttp.ClientSession(url) as client,
        client.post("/v1/completions", json=prompt(**more)) as answer,
    ):
        return await answer.text()


def test_the_trace_is_complete_after_sigterm(tmp_path):
    """After SIGTERM requests in flight end, and the trace is complete and can be simulated."""
    path = tmp_path / "day.jsonl.gz"

    async def scene():
        options = ("--router", "least-requests", "--trace", path)
        async with routing(*options) as (program, servers):
            for each in servers:
                each.script = "wait"
            asked = asyncio.create_task(ask(program.url, text="x" * 640))
            await until(lambda: any(server.calls for server in servers))
            ending = asyncio.create_task(program.stop())
            await until(lambda: b"ending" in program.stderr)
            async with aiohttp.ClientSession(program.url) as client:
                async with client.get("/health") as answer:
                    assert (answer.status, "unavailable" in await answer.text()) == (503, True)
                async with client.post("/v1/completions", json=prompt()) as answer:
                    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            for each in servers:
                each.gate.set()
            assert "one two three" in await asked
            assert await ending == 0
            assert program.stderr.endswith(b"kvcore: ended\n")

    asyncio.run(scene())
    (request,) = TraceWorkload(path)
    assert (request.prompt_tokens, request.output_tokens) == (40, 3)
    run = run_here("simulate", path, "--replicas", "2", "--router", "least-requests")
    assert "1 completed" in run.stdout, run.stderr
    assert "a proxy has written this trace" in run_here("replay", path).stderr


def test_sighup_and_a_restart_begin_the_next_trace(tmp_path):
    """At SIGHUP the trace is complete, and another one begins; so it does after a restart."""
    path = tmp_path / "day.jsonl"

    async def scene():
        async with routing("--trace", path) as (program, _):
            await ask(program.url)
            program.process.send_signal(signal.SIGHUP)
            await until(path.exists)
            await ask(program.url)
            assert await program.stop() == 0
            await program.start()
            await ask(program.url)
            assert await program.stop() == 0

    asyncio.run(scene())
    files = sorted(tmp_path.glob("day*"))
    assert [file.name for file in files] == [
        "day-000001.jsonl",
        "day-000002.jsonl",
        "day.jsonl",
    ]
    assert [len(list(TraceWorkload(file))) for file in files] == [1, 1, 1]


@pytest.mark.parametrize("files", [(40, 40), (64, 64), (64, 400)])
def test_more_clients_than_files_are_refused_in_few_words(files):
    """With more idle clients than open files the proxy prints a line, and goes on after them.

    The soft limit is raised to the hard one.
    """

    async def scene():
        async with routing(count=1, files=files) as (program, _):
            host, port = program.url.removeprefix("http://").split(":")
            # A client beyond the queue of a listening socket would wait for its own retries.
            clients = range(files[1] + 1)
            idle = [await asyncio.open_connection(host, int(port)) for _ in clients]
            still = [reader for reader, _ in idle if not reader.at_eof()]
            assert len(still) >= files[1] // 8
            for _, writer in idle:
                writer.close()
            async with asyncio.timeout(10):
                while True:
                    try:
                        assert await ask(program.url)
                        break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.05)
            await program.stop()
            return program.stderr.decode().splitlines()

    lines = asyncio.run(scene())
    assert any("the limit of open files allows no more" in line for line in lines)
    assert all(" kvcore: " in line for line in lines)
    assert len(lines) < 10


def test_a_second_signal_does_not_wait_for_requests_in_flight(tmp_path):
    """A second SIGTERM closes the connections of clients, and the trace is still complete."""
    path = tmp_path / "day.jsonl"

    async def scene():
        async with routing("--router", "least-requests", "--trace", path) as (program, servers):
            for server in servers:
                server.script = "wait"
            asked = asyncio.create_task(ask(program.url))
            await until(lambda: any(server.calls for server in servers))
            program.process.send_signal(signal.SIGTERM)
            await until(lambda: b"ending" in program.stderr)
            assert await program.stop() == 0
            with pytest.raises(aiohttp.ClientError):
                await asked

    asyncio.run(scene())
    assert [event.event for event in read_events(path)][-1] == "END"


def test_the_trace_can_be_read_after_sigkill(tmp_path):
    """After SIGKILL the partial trace is readable, up to the last second."""
    path = tmp_path / "day.jsonl.gz"

    async def scene():
        async with routing("--trace", path) as (program, _):
            await ask(program.url)
            (part,) = tmp_path.iterdir()
            await until(lambda: part.stat().st_size > 100)
            await program.kill()
            reader = read_events(part)
            assert [each.event for each in reader] == ["HEADER", "REQUEST", "ROUTE"]
            assert not reader.complete

    asyncio.run(scene())
    assert not path.exists()


def test_each_request_is_answered_once_while_servers_fail(tmp_path):
    """Each valid request is answered once or refused while servers fail and return.

    Afterwards no request is counted as in flight.
    """
    path = tmp_path / "day.jsonl"

    async def scene():
        options = {"router": "least-requests", "trace": path, "client_timeout": 2}
        async with routed(4, **options) as (proxy, servers, _):

            async def trouble():
                for turn in range(6):
                    server = servers[turn % len(servers)]
                    server.script = ("die", "break", "busy", "answer")[turn % 4]
                    await asyncio.sleep(0.05)
                    await server.stop()
                    await asyncio.sleep(0.1)
                    server.script = "answer"
                    await server.start()

            work = asyncio.create_task(trouble())
            found = await storm(proxy.url, 600)
            await work
            await until(lambda: not any(server.attempts for server in proxy.fleet.servers))
            assert found.total() == 600
            assert found["answered"] > 500
            for server in proxy.fleet.servers:
                replica = server.replica
                counts = (replica.requests, replica.waiting, replica.prompt_tokens)
                assert (*counts, replica.waiting_tokens, replica.prompt_blocks) == (0,) * 5
            assert not proxy.fleet.dispatcher._sent
            await until(lambda: not proxy._busy)
        return found

    found = asyncio.run(scene())
    assert len(list(TraceWorkload(path))) >= found.total()


def test_a_cluster_of_kvcore_survives_the_kill_of_a_server(tmp_path):
    """A cluster of two servers survives the kill of one; `bad_day` checks it.

    Each server takes some seconds to start.
    """
    pytest.importorskip("torch", reason="needs torch")
    asyncio.run(bad_day(tmp_path, servers=2, requests=400, kills=1))


@pytest.mark.parametrize("package", ["aiohttp", "prometheus_client"])
def test_a_missing_package_is_named(monkeypatch, capsys, package):
    """Without a needed package `route` exits with code 3 and how to install it."""
    monkeypatch.setitem(sys.modules, package, None)
    assert frame.run(["route", "http://127.0.0.1:1", "--port", "0"]) == 3
    error = capsys.readouterr().err
    assert f" {package} (" in error.partition(" need")[2]
    assert error.endswith("pip install 'kvcore[serve]'\n")
