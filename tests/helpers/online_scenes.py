"""Scenes with a proxy, its servers and a client in one process."""

import asyncio
import json
import re
from contextlib import suppress
from functools import partial, wraps
from inspect import Signature, signature

from helpers.upstreams import prompt, routed

COMPLETIONS = "/v1/completions"


def play(scene, count=2, seconds=30, **options):
    """Run a scene with a proxy, its servers and a client, and return the scene's result."""

    async def run():
        async with asyncio.timeout(seconds), routed(count, **options) as parts:
            return await scene(*parts)

    return asyncio.run(run())


def played(**options):
    """Return a decorator of a test that plays it as a scene, with these options of `play`."""

    def decorate(scene):
        @wraps(scene)
        def test(**given):
            play(partial(scene, **given), **options)

        # pytest is to give the parameters behind those of the proxy.
        test.__signature__ = Signature(list(signature(scene).parameters.values())[3:])
        return test

    return decorate


async def ask(client, *, path=COMPLETIONS, headers=None, **more):
    """Post a request, and return status, headers and text of the response."""
    async with client.post(path, json=prompt(**more), headers=headers) as answer:
        return answer.status, answer.headers, await answer.text()


async def raw(proxy, data):
    """Send bytes, and return all bytes received until the proxy closes the connection."""
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = b""
    try:
        with suppress(ConnectionError):
            answer = await reader.read()
    finally:
        writer.transport.abort()
    return answer


def sentence(line):
    """Return a line of a server's messages without its time."""
    return line[line.index("kvcore: ") :]


def events(text):
    """Return the JSON documents of an event stream."""
    return [json.loads(data) for data in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]


def sample(proxy, name, **labels):
    """Return the value of a metric, summed over all samples with these labels."""
    line = re.compile(rf"^kvcore_route_{name}(?:{{(.*)}})? (\S+)$", re.MULTILINE)
    found = line.findall(proxy.fleet.metrics.text().decode())
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    return sum(float(value) for about, value in found if wanted <= set(about.split(",")))


def http_request(body, *headers):
    """Return the bytes of a request."""
    lines = [
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
