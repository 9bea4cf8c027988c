"""Good and rude HTTP clients that run at once, with checks of the responses."""

# ruff: noqa: ARG001 - rude clients have the same parameters

import asyncio
import json
from collections import Counter
from contextlib import suppress
from random import Random

import aiohttp

GOOD = ("whole", "stream")
"""Clients that send a request and read the response."""

RUDE = ("leave", "malformed", "huge headers", "slow", "half")
"""Clients that disconnect early, or send an invalid request."""


async def storm(url, requests, *, at_once=16, seed=0, rude=0.1, body=None, client_seconds=60):
    """Send `requests` good requests and some rude ones; count the outcomes of the good.

    An outcome is `answered` (all of it, once), `refused` (503, without any output) or `cut`
    (its stream had begun, and ended with an error). Anything else fails.
    """
    random = Random(seed)
    found, free = Counter(), asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=client_seconds)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

        async def one(number, kind):
            try:
                if kind in GOOD:
                    found[await good(session, (body or text)(number), kind)] += 1
                else:
                    await RUDENESS[kind](session, url)
            finally:
                free.release()

        async with asyncio.TaskGroup() as tasks:
            for index in range(requests):
                kinds = [random.choice(GOOD)]
                if random.random() < rude:
                    kinds.append(random.choice(RUDE))
                for kind in kinds:
                    await free.acquire()
                    tasks.create_task(one(index, kind))
    return found


def text(number):
    """Return the body of a completion; some bodies share the start of their prompt."""
    prompt = f"document {number % 7} says that {'and ' * (number % 5)} {number}"
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2 + number % 3}


async def good(session, body, kind):
    """Send a request, check its response, and return the outcome."""
    body = {**body, "stream": kind == "stream"}
    async with session.post("/v1/completions", json=body) as answer:
        data = await answer.text()
    if answer.status == 503:
        assert json.loads(data)["error"]["code"] == 503
        return "refused"
    assert answer.status == 200, data
    if kind == "whole":
        assert len(json.loads(data)["choices"]) == 1
        return "answered"
    *events, last = data.removesuffix("\n\n").split("\n\n")
    if last == "data: [DONE]":
        assert events
        assert "data: [DONE]" not in events
        assert all("choices" in json.loads(event.removeprefix("data: ")) for event in events)
        return "answered"
    assert "error" in json.loads(last.removeprefix("data: ")), data
    return "cut"


async def leave(session, url):
    """Send a request, and disconnect before or while it is answered."""
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(0.02),
            session.post("/v1/completions", json={**text(0), "stream": True}) as answer,
        ):
            await answer.content.readany()
            answer.close()


async def malformed(session, url):
    """Send bodies that are not JSON or have no valid prompt."""
    for data in (b"{", b"[1, 2]", b'{"prompt": 3}', b'{"prompt": "\xff"}'):
        headers = {"Content-Type": "application/json"}
        async with session.post("/v1/completions", data=data, headers=headers) as answer:
            assert answer.status in (400, 503)


async def huge_headers(session, url):
    """Send headers that are too long."""
    await _raw(url, b"POST /v1/completions HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n")


async def slow(session, url):
    """Send headers, and no byte of the body that they announce."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    await _raw(url, head + b"Content-Length: 100\r\n\r\n")


async def half(session, url):
    """Send half of the headers."""
    await _raw(url, b"POST /v1/compl")


RUDENESS = {
    "leave": leave,
    "malformed": malformed,
    "huge headers": huge_headers,
    "slow": slow,
    "half": half,
}


async def _raw(url, data):
    """Send bytes, wait a little for a response, and disconnect."""
    host, port = url.removeprefix("http://").split(":")
    with suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            async with asyncio.timeout(0.05):
                await reader.read()
        finally:
            writer.transport.abort()
