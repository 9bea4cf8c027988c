"""An engine that owns its blocks, keeps duplicates, and records its decisions."""

from __future__ import annotations

from pathlib import Path
from random import Random

import attrs

from kvcore import Request
from kvcore.plugins import resolve
from kvcore.request import Key
from kvcore_hosting import EngineRecorder, PolicyHost
from kvcore_plugins.traces.digest import EvictionDigest

SIZE = 4


@attrs.define(eq=False)
class Job:
    """A running request, its blocks, and the number of them that are stored."""

    request: Request
    keys: list[Key]
    blocks: list[int]
    stored: int
    output: int = 0


class ToyEngine:
    """An engine that evicts by a hosted policy and records its decisions.

    Blocks are numbers. Two requests that compute the same at once leave two blocks of one key.
    `early` more blocks are evicted than are needed. The digest is computed by the engine
    itself, from every key whose last block was evicted. Blocks below a lost block are lost with
    it, until they are hit again.
    """

    def __init__(
        self, path: Path, policy: str, blocks: int, size: int = 4, *, early: int = 0
    ) -> None:
        self.host = PolicyHost(policy, blocks, size)
        self.recorder = EngineRecorder(
            path,
            blocks=blocks,
            block_size=size,
            eviction=resolve("eviction", policy),
            engine="toy 1.0",
        )
        self.digest = EvictionDigest()
        self.jobs: dict[int | str, Job] = {}
        self.free = list(range(blocks))
        self.blocks_of: dict[Key, list[int]] = {}
        self.hits = 0
        self._keys: dict[int, Key] = {}
        self._parents: dict[Key, Key | None] = {}
        self._lost: set[Key] = set()
        self._size, self._early = size, early

    def arrive(self, request: Request, now: int) -> None:
        """Record a new request."""
        self.recorder.request(request, now)

    def open(
        self, request: Request, now: int, output: int = 0, generated: tuple[Key, ...] = ()
    ) -> bool:
        """Admit a request, or one that was preempted after `output` tokens, if it fits."""
        host, again = self.host, bool(output)
        tokens = request.prompt_tokens + output
        keys = [*request.keys, *generated]
        hits: list[int] = []
        for key in keys[: (tokens - 1) // self._size]:
            found = self.blocks_of.get(key)
            if not found:
                break
            hits.append(found[0])
        need = -(-tokens // self._size) - len(hits)
        for block in reversed(hits):
            host.pin(block)
        if need > len(self.free) + host.evictable:
            for block in reversed(hits):
                host.unpin(block, now)
            return False
        if len(hits) < (request.prompt_tokens - 1) // self._size and not again:
            host.missed(request, len(hits), now)
        evicted = self._evict(need, request, now)
        host.hit(hits, now, request.id, again=again)
        self._lost.difference_update(self._keys[block] for block in hits)
        self.hits += len(hits)
        new = [self.free.pop() for _ in range(need)]
        self.jobs[request.id] = Job(request, keys, hits + new, len(hits), output)
        self.recorder.opened(request.id, hit=len(hits), blocks=need, evicted=evicted, now=now)
        return True

    def compute(self, name: int | str, now: int) -> None:
        """Compute the prompt of a running request, and store its full blocks."""
        job = self.jobs[name]
        self._store(job, (job.request.prompt_tokens + job.output) // self._size, now)
        self.recorder.committed(name, blocks=job.stored, now=now)

    def generate(self, name: int | str, tokens: int, now: int) -> bool:
        """Generate tokens, whose full blocks get keys; return False if there is no room."""
        job = self.jobs[name]
        length = job.request.prompt_tokens + job.output + tokens
        need = max(0, -(-length // self._size) - len(job.blocks))
        if need > len(self.free) + self.host.evictable:
            return False
        evicted = self._evict(need, job.request, now)
        job.blocks += [self.free.pop() for _ in range(need)]
        self.recorder.extended(name, blocks=need, evicted=evicted, now=now)
        job.output += tokens
        full = length // self._size
        new = [hash((name, index)) % 2**62 for index in range(len(job.keys), full)]
        job.keys += new
        self._store(job, full, now)
        self.recorder.committed(name, blocks=job.stored, now=now, keys=new)
        return True

    def close(self, name: int | str, now: int, *, preempted: bool = False) -> Job:
        """End or preempt a request; its stored blocks stay cached."""
        job = self.jobs.pop(name)
        if not preempted:
            self.host.ended(job.request, now)
        for block in reversed(job.blocks[: job.stored]):
            self.host.unpin(block, now)
        self.free += reversed(job.blocks[job.stored :])
        self.recorder.closed(name, now, output=None if preempted else job.output)
        return job

    def lose(self, key: Key, now: int) -> None:
        """Lose a block of `key`, unless it or a block below it is in use."""
        below = [other for other in self._parents if key in self._path(other)]
        blocks = [block for other in below for block in self.blocks_of.get(other, ())]
        if any(block in self.host and self._in_use(block) for block in blocks):
            return
        block = self.blocks_of[key][0]
        self.host.dropped(block, now)
        self._forget(block)
        if key not in self.blocks_of:
            self._lost.update(other for other in below if other in self.blocks_of)
        self.recorder.dropped(key, now)

    def _in_use(self, block: int) -> bool:
        return any(block in job.blocks for job in self.jobs.values())

    def _path(self, key: Key) -> list[Key]:
        path = [key]
        while (parent := self._parents[path[-1]]) is not None:
            path.append(parent)
        return path

    def _evict(self, need: int, request: Request, now: int) -> list[Key]:
        host, missing = self.host, need - len(self.free)
        more = min(self._early, host.evictable - max(missing, 0))
        blocks = host.victims(max(missing, 0) + more, now=now, requester=request.id)
        assert blocks is not None
        evicted = []
        for block in blocks:
            key = self._forget(block)
            evicted.append(key)
            if key not in self.blocks_of:
                if key not in self._lost:
                    self.digest.add(key)
                self._lost.discard(key)
        return evicted

    def _forget(self, block: int) -> Key:
        key = self._keys.pop(block)
        self.blocks_of[key].remove(block)
        if not self.blocks_of[key]:
            del self.blocks_of[key]
        self.free.append(block)
        return key

    def _store(self, job: Job, upto: int, now: int) -> None:
        """Store the blocks of a job up to position `upto`, duplicates included."""
        for index in range(job.stored, min(upto, len(job.keys))):
            block, key = job.blocks[index], job.keys[index]
            parent = job.blocks[index - 1] if index else None
            self.host.stored(block, parent, now, key=key, request=job.request.id)
            self._keys[block] = key
            self.blocks_of.setdefault(key, []).append(block)
            self._parents[key] = job.keys[index - 1] if index else None
            self._lost.discard(key)
            job.stored = index + 1


def random_request(rng: Random, name: int) -> Request:
    """Return a request of one of three families of prompts, which diverge at random places."""
    blocks = rng.randint(0, 7)
    family, part, variant = rng.randrange(3), rng.randint(0, 7), rng.randrange(3)
    keys = [
        1 + index + 100 * family + (1000 * variant + 10_000 * (part + 1)) * (index >= part)
        for index in range(blocks)
    ]
    tokens = blocks * SIZE + rng.randint(0 if blocks else 1, SIZE - 1)
    return Request(id=name, prompt_tokens=tokens, output_tokens=100, keys=keys, key_tokens=SIZE)


def drive(  # noqa: C901 - one step of a server, from top to bottom
    engine: ToyEngine, rng: Random, steps: int, *, loses: bool
) -> None:
    """Serve random requests, preempt some, and lose blocks if `loses` is set."""
    now, waiting, preempted = 1000, list[Request](), list[Job]()
    for name in range(steps):
        now += rng.randrange(100)
        request = random_request(rng, name)
        engine.arrive(request, now)
        waiting.append(request)
        running = [*engine.jobs]
        if preempted and rng.random() < 0.5:
            job = preempted[0]
            generated = tuple(job.keys[len(job.request.keys) :])
            if engine.open(job.request, now, job.output, generated):
                preempted.pop(0)
        elif waiting and len(running) < 4 and engine.open(waiting[0], now):
            waiting.pop(0)
        for each in running:
            chance = rng.random()
            if chance < 0.5:
                engine.compute(each, now)
            elif chance < 0.7 and engine.jobs[each].stored:
                engine.generate(each, rng.randint(1, 6), now)
            elif chance < 0.8 and engine.jobs[each].output:
                preempted.append(engine.close(each, now, preempted=True))
            elif chance < 0.95:
                engine.close(each, now)
        if loses and engine.blocks_of and rng.random() < 0.2:
            engine.lose(rng.choice([*engine.blocks_of]), now)
        engine.host.check_integrity()
    for job in preempted[: len(preempted) // 2]:
        engine.recorder.closed(job.request.id, now, output=job.output)
    engine.recorder.close()
