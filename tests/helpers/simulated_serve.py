"""`kvcore serve` in a simulated world: clients, steps that take time, the disk, signals."""

import asyncio
import json
from functools import cache
from random import Random
from unittest import mock

import attrs
from helpers.online import parts
from helpers.simulation import MANNERS, Ask, Disk, Signal, Simulation

import kvcore
from kvcore.errors import PolicyError, StorageError
from kvcore_engine import executor
from kvcore_online import server as servers
from kvcore_online.engine import LiveEngine
from kvcore_online.server import ServeConfig, Server, _run
from kvcore_replay.check.trace import replay

GENERATOR = "transformer:layers=1,hidden=16,heads=2,kv_heads=1"
BLOCKS = 12
"""Blocks of the pool: few, so that requests wait, are preempted and evict each other."""

MANY = 1_000
"""A limit of requests that is never reached."""

EXACT = 180
"""Words of a prompt that fills all `BLOCKS` with an output of 12 tokens."""

TOO_LONG = 300
"""Words of a prompt that fits into no pool of `BLOCKS`."""


@attrs.frozen
class Break:
    """The next step of the engine fails."""

    time: float


@attrs.frozen(kw_only=True)
class ServeWorld:
    """The options and events of a run.

    Attributes:
        seed: seed of the network and of the times of steps.
        traced: whether a trace is written.
        requests: limit of open requests.
        options: options of the engine.
        events: what happens, in order of time.
    """

    seed: int
    traced: bool
    requests: int
    options: dict
    events: tuple


def draw_serve(seed):
    """Return the world of a seed."""
    random = Random(seed)
    calm, seconds = seed % 5 == 0, random.choice([1.0, 3.0])

    def time():
        return round(random.uniform(0, seconds), 2)

    events = []
    for _ in range(random.choice([3, 6, 12])):
        plain = calm or random.random() < 0.6
        options = {"max_tokens": random.choice([1, 3, 12])}
        if random.random() < 0.2:
            options["cache_salt"] = random.choice(["x", "y"])
        if random.random() < 0.2:
            options["stop"] = random.choice(["1", "2 ", "77"])
        ask = Ask(
            time(),
            stream=random.random() < 0.5,
            text=random.choice("abc"),
            size=random.choice([1, 20, 40, 60, EXACT, TOO_LONG]),
            copies=random.choice([1, 1, 1, 2]),
            manner="plain" if plain else random.choice(MANNERS),
            seconds=random.choice([0.0, 0.01, 0.1, 5.0]),
            options=options,
        )
        events.append(ask)
    if not calm:
        if random.random() < 0.15:
            events.append(Break(time()))
        if random.random() < 0.15:
            events.append(Disk(time(), random.choice([0, 300])))
        if random.random() < 0.5:
            events.append(Signal(time()))
            if random.random() < 0.3:
                events.append(Signal(events[-1].time + random.choice([0.0, 1.0])))
    return ServeWorld(
        seed=seed,
        traced=random.random() < 0.5,
        requests=MANY if calm else random.choice([3, MANY]),
        options={"scheduler": random.choice(["fcfs", "srpt"]), "eviction": "lru"},
        events=tuple(sorted(events, key=lambda event: event.time)),
    )


@cache
def expected(text, size):
    """Return the words with which the generator goes on, by a run of its own."""
    result = kvcore.run(
        prompts=[" ".join([text] * size)], max_output=12, generator=GENERATOR, memory="4MiB"
    )
    return tuple(map(str, result.outputs[0]))


class Condition:
    """A condition where there are no threads: `wait` returns at once, and stores the time.

    Attributes:
        waits: seconds to wait; infinite: until it is notified; None: `wait` was not called.
    """

    def __init__(self):
        """Start without anybody who waits."""
        self.waits, self._changed = None, asyncio.Event()

    def __enter__(self):
        """Do nothing."""

    def __exit__(self, *_):
        """Do nothing."""

    def notify(self):
        """Wake who waits."""
        self._changed.set()

    def wait(self, seconds=None):
        """Store for how long to wait."""
        self.waits = float("inf") if seconds is None else seconds
        self._changed.clear()

    async def waited(self):
        """Wait as `wait` was told to."""
        seconds, self.waits = self.waits, None
        try:
            async with asyncio.timeout(None if seconds == float("inf") else seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


class SteppedEngine(LiveEngine):
    """The engine as a task of the loop in place of a thread; its steps take simulated time."""

    breaks = False

    def __init__(self, loop, on_failure):
        """Replace what the thread waits for."""
        super().__init__(loop, on_failure)
        loop.inbox.changed = self._condition = Condition()
        self.random, self._task = Random(0), None

    def start(self):
        """Start the task."""
        self._task = asyncio.get_running_loop().create_task(self._turns())

    def close(self):
        """Let all requests end, and return the task, which is waited for as for a thread."""
        self.loop.inbox.close()
        return self._task

    async def _turns(self):
        loop = self.loop
        try:
            while True:
                if loop.begin():
                    await asyncio.sleep(self.random.choice([0.0, 0.001, 0.05]))
                    self._compute()
                    await asyncio.sleep(0)
                elif not loop._wait():
                    break
                elif self._condition.waits is not None:
                    await self._condition.waited()
            loop.arrivals.check_all_came()
        except Exception as error:  # noqa: BLE001 - as the thread does
            self._fail(error)

    def _compute(self):
        if self.breaks:
            msg = "the device has failed"
            raise PolicyError(msg)
        self.loop.end()


class ServeSimulation(Simulation):
    """A server with a small model, and its clients."""

    def start(self):
        """Make the server."""
        world = self.world
        config = ServeConfig(
            port=0,
            requests=world.requests,
            client_timeout=3,
            grace=3,
            trace=self.path if world.traced else None,
        )
        made = parts(generator=GENERATOR, memory=None, blocks=BLOCKS, **world.options)
        self.server = Server(made, config, self.loop.now_ns)
        self.server.engine.random = Random(world.seed)
        return self.server, _run(self.server, lambda _: None)

    def outside(self, stack):
        """Replace the thread of the engine, and the clock of its steps."""
        stack.enter_context(mock.patch.object(servers, "LiveEngine", SteppedEngine))
        clock = mock.patch.object(executor, "perf_counter_ns", self.loop.now_ns)
        stack.enter_context(clock)

    def document(self, ask, name):
        """Return the body of a request."""
        body = {"prompt": " ".join([ask.text] * ask.size), "user": name, **ask.options}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return body | (usage if ask.stream else {})

    def on_break(self, event):
        """Let the next step fail."""
        del event
        self.server.engine.breaks = True

    # Checks.

    def check_step(self):
        """Check that no more requests are open than may be."""
        loop = self.server.engine.loop
        assert 0 <= self.server._busy <= self.world.requests
        assert len(loop.listeners) + len(loop.open) <= len(self.asked)

    def check_end(self):
        """Check that nothing of a request is left, that counts add up, and the trace."""
        engine, cache_ = self.server.engine, self.server.cache
        loop, tally = engine.loop, engine.loop.log
        assert self.server._busy == 0
        if engine.failure is not None:
            assert self.error is not None
            assert not self.path.exists()
            self.counts["failed"] += 1
            return
        if self.full:
            assert isinstance(self.error, StorageError)
            assert not self.path.exists()
            self.counts["full"] += 1
        else:
            assert self.error is None, self.error
        left = (loop.open, loop.listeners, loop.inbox.left, loop._leaving)
        assert not any(left), left
        assert not loop._tokens.streams
        assert cache_.available_blocks == cache_.pool.blocks, "blocks are pinned"
        assert sum(tally.requests.values()) == next(self.server._ids), "requests are lost"
        if self.world.traced and not self.full:
            found = replay(self.path)
            assert found.complete
            self.counts["traced"] += 1

    def check_answer(self, asked, answer):
        """Check an answer: the text of a run alone, or a refusal with its reason."""
        ask = asked.ask
        if answer.status != 200:
            if answer.ended:
                error = json.loads(answer.body)["error"]
                assert error["code"] == answer.status
                allowed = (400,) if ask.size == TOO_LONG else (503, 408)
                assert answer.status in (*allowed, 503, 408), error
            return
        text, count, ended = self._text(asked, answer)
        words = expected(ask.text, ask.size)[: ask.options["max_tokens"]]
        whole = " ".join(words)
        stop = ask.options.get("stop")
        if stop is not None and stop in whole:
            whole = whole[: whole.index(stop)]
        assert whole.startswith(text) if not ended else text == whole, (text, whole)
        assert count is None or stop is not None or count == len(words)

    def _text(self, asked, answer):
        """Return the text of an answer, its number of tokens, and whether it is whole."""
        if not asked.ask.stream:
            if not answer.ended:
                return "", None, False
            document = json.loads(answer.body)
            usage = document["usage"]["completion_tokens"]
            return document["choices"][0]["text"], usage, True
        text, count, ended = "", None, False
        events = answer.body.split(b"\n\n")[:-1]
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                ended = True
                continue
            assert not ended, "an event after the end"
            document = json.loads(data)
            if "error" in document:
                self.counts["broken"] += 1
                return text, None, False
            text += "".join(choice["text"] for choice in document["choices"])
            count = document.get("usage", {}).get("completion_tokens", count)
        assert ended or not answer.ended, "a stream without an end"
        return text, count, ended
