"""Hostile input in bulk: files, lines, frames, bodies, headers and answers, drawn from a seed.

`tox -e hostile` draws 100,000 of them, the other runs few: `KVCORE_HOSTILE` is their number.
One that is neither read nor refused is written to `tests/data/corpus`, without what may be
left out; what is there is read before any other.
"""

# ruff: noqa: T201 - the counts are printed

import asyncio
import gzip
import json
import os
import random
import resource
from collections import Counter
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from time import process_time

import msgspec
import orjson
import pytest
from helpers.online_scenes import http_request, play, raw
from helpers.traces import lines, seal, serve_tiers
from helpers.upstreams import prompt

from kvcore import Request, read_events
from kvcore.errors import KvcoreError
from kvcore_cli.verb import escaped
from kvcore_events.block_tracker import BlockTracker
from kvcore_events.formats import decode, encode
from kvcore_events.model import BlockRemoved, BlockStored, EventBatch
from kvcore_events.recording import RecordingReader, RecordingWriter
from kvcore_online.fleet import _ReportedBlocks
from kvcore_online.prompts import Call
from kvcore_online.proxy import EventStream, UnservedError
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
CORPUS = DATA / "corpus"

INPUTS = int(os.environ.get("KVCORE_HOSTILE", "3000"))
SHARES = {"frame": 30, "body": 25, "line": 15, "file": 15, "answer": 10, "header": 5}
"""Parts in a hundred of the inputs of each kind."""

SEALED = {"requests", "mooncake"}
"""Readers for which few damaged files are valid: of some tens, there may be none."""

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
    """Draws inputs of each kind, and reads them. Counts what was read and what was refused.

    Attributes:
        readers: functions that read the bytes of an input, by their folders in `CORPUS`.
    """

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
            for index, payload in enumerate(self.batches[:2]):
                recording.batch(decode(payload), seq=index)
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
        files = {
            "trace": (self.trace, check_trace),
            "requests": (self.trace, lambda path: list(TraceWorkload(path))),
            "recording": (folder / "recording.jsonl", lambda path: list(RecordingReader(path))),
            "toml": (toml, RouteConfig.from_toml),
            "azure": (DATA / "azure_2023_conv_head.csv", lambda path: list(Azure(path))),
            "weka": (DATA / "weka_sessions.jsonl.gz", lambda path: list(Weka(path))),
            "chat": (chat, lambda path: list(Chat(path))),
            "mooncake": (mooncake, lambda path: list(Mooncake(path))),
            "config": (config, read_config),
        }
        self.files = {name: path.read_bytes() for name, (path, _) in files.items()}
        of_traces = {
            "export": lambda path: list(event_batches(path)),
            "timeline": lambda path: read_events(path).feed(TimelineBuilder),
        }
        from_files = {name: read for name, (_, read) in files.items()} | of_traces
        self.readers = {
            "frame": read_frame,
            "body": read_body,
            "answer": read_answer,
            **{name: partial(self.read_file, read) for name, read in from_files.items()},
        }

    def read_file(self, read, data):
        """Read bytes as those of a file."""
        path = self.folder / "hostile"
        path.write_bytes(data)
        read(path)

    def frame(self):
        """Return a damaged payload of KV events."""
        return "frame", self.drawn.damaged(self.drawn.choice(self.batches))

    def body(self):
        """Return the body of a request with other values, which may be damaged."""
        document = self.drawn.changed(prompt(messages=[{"role": "user", "content": "x"}]))
        data = json.dumps(document).encode()
        return "body", self.drawn.damaged(data) if self.drawn.random() < 0.4 else data

    def line(self):
        """Return a trace in which one line has other values, and a right digest."""
        changed = list(self.lines)
        index = self.drawn.randrange(len(changed) - 1)
        changed[index] = self.drawn.changed(changed[index])
        changed[index]["event"] = self.lines[index]["event"]
        changed[index]["t"] = self.lines[index]["t"]
        data = seal(self.folder / "line.jsonl", changed).read_bytes()
        return self.drawn.choice(["trace", "export", "timeline"]), data

    def file(self):
        """Return a damaged file."""
        name = self.drawn.choice([*self.files])
        data = self.files[name]
        # What is in a compressed file is damaged too: else its checksum hides the reader.
        if data.startswith(b"\x1f\x8b") and self.drawn.random() < 0.8:
            data = gzip.decompress(data)
            return name, gzip.compress(self.drawn.damaged(data), 1)
        return name, self.drawn.damaged(data)

    def answer(self):
        """Return a server's stream with other counts, which may be damaged."""
        usage = self.drawn.changed({"prompt_tokens": 5, "completion_tokens": 2})
        data = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        return "answer", self.drawn.damaged(data * 2) if self.drawn.random() < 0.5 else data

    def fault(self, name, data):
        """Return the type of the error with which an input is neither read nor refused."""
        began = process_time()
        try:
            self.readers[name](data)
            refused = False
        except REFUSALS as error:
            escaped(str(error)).encode()  # it can be printed
            refused = True
        except Exception as error:  # noqa: BLE001 - of any type
            return type(error)
        self.counts[name, "refused" if refused else "read"] += 1
        return None if process_time() - began < MOST_SECONDS else TimeoutError

    def read(self, kind):
        """Read an input of a kind; one that is not read or refused goes into `CORPUS`."""
        name, data = getattr(self, kind)()
        fault = self.fault(name, data)
        if fault is not None:
            data = shortened(data, lambda part: self.fault(name, part) is fault)
            path = CORPUS / name / blake2b(data, digest_size=6).hexdigest()
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            self.readers[name](data)  # raises
            pytest.fail(f"{path} takes more than {MOST_SECONDS} s")


def shortened(data, fails):
    """Return an input that fails as `data` does, of which no part may be left out."""
    size = len(data) // 2
    while size:
        for start in range(0, len(data), size):
            part = data[:start] + data[start + size :]
            while len(part) < len(data) and fails(part):
                data, part = part, part[:start] + part[start + size :]
        size //= 2
    return data


def read_frame(data):
    """Read a payload of KV events as the follower of a server does."""
    batch = decode(data)
    tracker, reported = BlockTracker(), _ReportedBlocks(4)
    tracker.apply(batch, 0, 0)
    for event in batch.events:
        if isinstance(event, BlockStored):
            reported.stored(event)
    encode(batch)


def read_body(data):
    """Read the body of a request, and what is sent on and written of it."""
    for path in ("/v1/completions", "/v1/chat/completions"):
        call = Call.read(path, data)
        orjson.dumps(call.question)
        call.sent(count=True)
        request = call.request("", tokens=call.tokens, key_tokens=16, key_chars=64)
        assert call.most_output <= 1 << 20
        orjson.dumps([request.session, request.salt])


def read_answer(data):
    """Read the stream of a server, in pieces."""
    flight = Flight(Request(id=0, prompt_tokens=1, key_tokens=16))
    stream = EventStream(flight, counted=False)
    for start in range(0, len(data), 50):
        stream.feed(data[start : start + 50])
    assert 0 <= flight.output <= 2**40
    assert flight.prompt is None or 0 < flight.prompt <= 2**40


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: path.name)
def test_inputs_that_once_failed_are_read_or_refused(path, tmp_path):
    """Each input of the corpus, which once had no answer, is read or refused."""
    assert Hostile(tmp_path).fault(path.parent.name, path.read_bytes()) is None


def test_hostile_input_is_read_or_refused(tmp_path):
    """Each input is read or refused in a sentence, in bounded time and memory."""
    hostile = Hostile(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind, share in SHARES.items():
        if kind != "header":
            for _ in range(INPUTS * share // 100):
                hostile.read(kind)
    print(f"\n{hostile.counts.total():,} inputs:", dict(sorted(hostile.counts.items())))
    for name in hostile.readers:
        assert hostile.counts[name, "refused"] or name == "answer"
        assert hostile.counts[name, "read"] or name in SEALED
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
