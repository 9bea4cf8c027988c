"""Hostile input in bulk: files, lines, frames, bodies, headers and answers, drawn from a seed.

`tox -e hostile` draws 100,000 of them, the other runs few: `KVCORE_HOSTILE` is their number.
"""

# ruff: noqa: T201 - the counts are printed

import asyncio
import json
import os
import random
import resource
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import process_time

import msgspec
import orjson
import pytest
from helpers.online_scenes import http_request, play, raw
from helpers.traces import lines, seal, serve_tiers
from helpers.upstreams import prompt

from kvcore import Request
from kvcore.cli.verb import escaped
from kvcore.errors import KvcoreError
from kvcore.trace import read_events
from kvcore_events.block_tracker import BlockTracker
from kvcore_events.formats import decode, encode
from kvcore_events.model import BlockRemoved, BlockStored, EventBatch
from kvcore_events.recording import RecordingReader, RecordingWriter
from kvcore_online.fleet import _ReportedBlocks
from kvcore_online.prompts import Call
from kvcore_online.proxy import EventStream, UnservedError, take_usage
from kvcore_online.route_config import RouteConfig
from kvcore_online.traffic import Flight
from kvcore_plugins.models.huggingface import read_config
from kvcore_plugins.workload.azure import Azure
from kvcore_plugins.workload.chat import Chat
from kvcore_plugins.workload.mooncake import Mooncake
from kvcore_plugins.workload.recorded import TraceWorkload
from kvcore_plugins.workload.weka import Weka
from kvcore_replay.check.trace import check_trace
from kvcore_replay.export import event_batches
from kvcore_replay.timeline import TimelineBuilder

pytest.importorskip("aiohttp", reason="needs aiohttp")

DATA = Path(__file__).parents[1] / "data"

INPUTS = int(os.environ.get("KVCORE_HOSTILE", "3000"))
SHARES = {"frame": 30, "body": 25, "line": 15, "file": 15, "answer": 10, "header": 5}
"""Parts in a hundred of the inputs of each kind."""

REFUSALS = (KvcoreError, UnservedError)
MOST_SECONDS = 10.0
MOST_MEMORY = 400 << 20
"""Bytes by which the process may grow: a payload alone may take 64 MiB."""

VALUES = [
    *(0, -1, 1, 2**31, 2**40 + 1, 2**63 - 1, 2**63, 2**64 - 1, 1e308, -0.5),
    *(True, None, "", "x", "\x1b[31m", "\0", "\u202e", "é" * 300, [], {}, [[]], {"a": {}}),
    *([1] * 50, ["a", None], "9" * 400),
]
FIELDS = [
    *("prompt", "messages", "max_tokens", "max_completion_tokens", "model", "stream", "user"),
    *("stream_options", "stop", "cache_salt", "n", "tools", "prompt_cache_key", "suffix"),
]
HEADER_NAMES = [b"x-session-id", b"user-agent", b"authorization", b"x-request-id", b"a b", b""]


class Drawn(random.Random):
    """Draws hostile inputs from valid ones."""

    def damaged(self, data):
        """Return bytes with some of them changed, cut, doubled, or nested deeper."""
        data = bytearray(data)
        for _ in range(self.choice([1, 1, 1, 2, 5])):
            place = self.randrange(len(data) + 1)
            match self.randrange(7):
                case 0 | 1 if place < len(data):
                    data[place] = self.randrange(256)
                case 2:
                    del data[place : place + self.choice([1, 1, 10, 1000])]
                case 3:
                    data[place:place] = data[place : place + 40]
                case 4:
                    data[place:place] = self.choice([b"[", b'{"a":', b"\x91"]) * self.choice(
                        [1, 20, 300, 2_000]
                    )
                case 5:
                    data[place:place] = self.choice(
                        [b"\0", b"\xff", b"\xed\xa0\x80", b'"', b"\r\n", b"9" * 30, b"\\ud800"]
                    )
                case _:
                    data[place:] = self.randbytes(self.choice([1, 8, 100]))
        return bytes(data)

    def changed(self, document):
        """Return a document with some values of it replaced by `VALUES`."""
        document = dict(document)
        for _ in range(self.choice([1, 1, 2, 4])):
            name = self.choice([*document, *FIELDS])
            value = self.choice(VALUES)
            if self.random() < 0.1:
                value = json.loads("[" * 200 + "]" * 200)
            document[name] = value
        return document


class Hostile:
    """One input of each kind, and who reads it. Counts what was read and what was refused."""

    def __init__(self, folder):
        self.drawn = Drawn(20_261_128)
        self.counts = Counter()
        self.folder = folder
        self.trace = serve_tiers(folder / "valid.jsonl")
        self.lines = lines(self.trace)
        stored = BlockStored(hashes=(1, 2), tokens=tuple(range(8)), block_size=4, medium="GPU")
        removed = BlockRemoved(hashes=(1,), medium="GPU")
        self.batches = [
            encode(EventBatch(ts=1.0, events=(stored, removed))),
            msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1] * 4, 4, None]], 0]),
            orjson.dumps({"event_id": 1, "data": {"type": "removed", "block_hashes": [1]}}),
            orjson.dumps({"worker_id": 1, "event": {"event_id": 1, "data": {"stored": {}}}}),
        ]
        with RecordingWriter(folder / "recording.jsonl") as recording:
            for number, payload in enumerate(self.batches[:2]):
                recording.batch(decode(payload), seq=number)
        toml = folder / "route.toml"
        toml.write_text('port = 0\n[[replicas]]\nurl = "http://127.0.0.1:1"\nblocks = 9\n')
        chat = folder / "chat.jsonl"
        messages = [{"role": "user", "content": "how are you"}]
        row = {"messages": messages, "response": "well", "timestamp": 1, "user": "a"}
        chat.write_text("".join(json.dumps(row | {"timestamp": t}) + "\n" for t in range(4)))
        mooncake = folder / "mooncake.jsonl"
        row = {"timestamp": 1, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}
        mooncake.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
        first, *_ = (DATA / "model_configs.jsonl").read_text().splitlines()
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(first)["config"]))
        self.files = [
            (self.trace, check_trace),
            (self.trace, lambda path: list(TraceWorkload(path))),
            (folder / "recording.jsonl", lambda path: list(RecordingReader(path))),
            (toml, RouteConfig.from_toml),
            (DATA / "azure_2023_conv_head.csv", lambda path: list(Azure(path))),
            (DATA / "weka_sessions.jsonl.gz", lambda path: list(Weka(path))),
            (chat, lambda path: list(Chat(path))),
            (mooncake, lambda path: list(Mooncake(path))),
            (config, read_config),
        ]
        self.files = [(path.read_bytes(), read) for path, read in self.files]

    def frame(self):
        """Read a damaged payload of KV events as the follower of a server does."""
        batch = decode(self.drawn.damaged(self.drawn.choice(self.batches)))
        tracker, reported = BlockTracker(), _ReportedBlocks(4)
        tracker.apply(batch, 0, 0)
        for event in batch.events:
            if isinstance(event, BlockStored):
                reported.stored(event)
        encode(batch)

    def body(self):
        """Read the body of a request, and what is sent on and written of it."""
        document = self.drawn.changed(prompt(messages=[{"role": "user", "content": "x"}]))
        data = json.dumps(document).encode()
        if self.drawn.random() < 0.4:
            data = self.drawn.damaged(data)
        call = Call.read(self.drawn.choice(["/v1/completions", "/v1/chat/completions"]), data)
        orjson.dumps(call.question)
        call.body(count=True)
        request = call.request(0, 0, "", tokens=call.tokens, key_tokens=16, key_chars=64)
        assert call.most_output <= 1 << 20
        orjson.dumps([request.session, request.salt])

    def line(self):
        """Read a trace in which one line has other values, and a right digest."""
        found = list(self.lines)
        place = self.drawn.randrange(len(found) - 1)
        found[place] = self.drawn.changed(found[place])
        found[place]["event"] = self.lines[place]["event"]
        found[place]["t"] = self.lines[place]["t"]
        path = seal(self.folder / "line.jsonl", found)
        match self.drawn.randrange(3):
            case 0:
                check_trace(path)
            case 1:
                list(event_batches(path))
            case _:
                read_events(path).feed(TimelineBuilder)

    def file(self):
        """Read a damaged file."""
        data, read = self.drawn.choice(self.files)
        path = self.folder / "damaged"
        path.write_bytes(self.drawn.damaged(data))
        read(path)

    def answer(self):
        """Read a server's stream, in pieces."""
        flight = Flight(Request(id=0, prompt_tokens=1, key_tokens=16))
        stream = EventStream(flight, counted=False)
        usage = self.drawn.changed({"prompt_tokens": 5, "completion_tokens": 2})
        take_usage(flight, usage)
        data = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        data = self.drawn.damaged(data * 2)
        for place in range(0, len(data), 50):
            stream.feed(data[place : place + 50])
        assert 0 <= flight.output <= 2**40
        assert flight.prompt is None or 0 < flight.prompt <= 2**40

    def read(self, kind):
        """Read an input of a kind; it is read, or refused in a sentence without controls."""
        began = process_time()
        try:
            getattr(self, kind)()
            self.counts[kind, "read"] += 1
        except REFUSALS as error:
            escaped(str(error)).encode()
            self.counts[kind, "refused"] += 1
        assert process_time() - began < MOST_SECONDS, kind


def test_hostile_input_is_read_or_refused(tmp_path):
    """Each input is read or refused in a sentence, in bounded time and memory."""
    hostile = Hostile(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, share in SHARES.items():
        if kind != "header":
            for _ in range(INPUTS * share // 100):
                hostile.read(kind)
    print(f"\n{hostile.counts.total():,} inputs:", dict(sorted(hostile.counts.items())))
    for kind in SHARES.keys() - {"header"}:
        assert hostile.counts[kind, "refused"] or kind == "answer"
        assert hostile.counts[kind, "read"]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MOST_MEMORY


def test_hostile_requests_are_answered_or_refused(tmp_path, capfd):
    """A proxy answers each request or closes its connection, and then answers a plain one.

    The trace has all that were answered, and few words are printed.
    """
    path = tmp_path / "day.jsonl"
    drawn, counts = Drawn(1), Counter()

    async def one(proxy, number):
        body = json.dumps(drawn.changed(prompt())).encode()
        name = drawn.choice(HEADER_NAMES)
        start, end = http_request(body, "Connection: close").split(b"\r\n\r\n", 1)
        data = start + b"\r\n" + name + b": " + drawn.randbytes(8) + b"\r\n\r\n" + end
        if number % 3 == 0:
            data = drawn.damaged(data)
        with suppress(TimeoutError):  # it waits for the rest of what was announced
            async with asyncio.timeout(1):
                answer = await raw(proxy, data)
                counts[answer[9:12].decode("latin-1")] += 1
                return
        counts["waits"] += 1

    async def scene(proxy, servers, client):
        numbers = range(INPUTS * SHARES["header"] // 100)
        for first in numbers[::20]:
            await asyncio.gather(
                *(one(proxy, number) for number in numbers[first : first + 20])
            )
            async with client.post("/v1/completions", json=prompt()) as plain:
                assert plain.status == 200
            servers[0].calls.clear()
            servers[0].headers.clear()
            counts["plain"] += 1

    async def whole(proxy, servers, client):
        await scene(proxy, servers, client)
        return proxy.fleet.log_error

    assert play(whole, count=1, seconds=550, trace=path) is None
    assert set(counts) <= {"200", "400", "404", "405", "408", "413", "415", "417", "plain", "",
                           "waits", "505", "501"}  # fmt: skip
    assert len(list(TraceWorkload(path))) >= counts["200"] + counts["plain"]
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert len(err.splitlines()) < 50
    print(f"{counts.total():,} requests:", dict(sorted(counts.items())))
