"""Step lists, which record what each step computes, to compare kvcore with vLLM.

Two schedulers are compared by their step lists for the same server. A compact file keeps the
step lists of some servers.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import attrs
import orjson

import kvcore
from kvcore import KVCache, Request
from kvcore.cache import EvictionPolicy, ServedCache, Span
from kvcore.config import RunConfig
from kvcore.config.values import as_checkpoint
from kvcore.plugins.manager import resolve
from kvcore.serving import Job, StepResult, StepWork
from kvcore.serving.job import DONE
from kvcore.serving.latency import SimulatedExecutor
from kvcore.serving.simulate import serve
from kvcore.units import NS_PER_S
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_plugins.latency import Linear
from kvcore_plugins.rules import VLLM
from kvcore_plugins.workload import Mooncake

GOLDEN = Path(__file__).parents[1] / "core" / "golden" / "vllm" / "steps.jsonl.xz"

GROUPED = GOLDEN.with_name("groups.jsonl.xz")
"""The step lists of servers with cache groups."""

HOSTED = GOLDEN.with_name("evictions.json")
"""What policies of kvcore evict in vLLM, by server: by policy the number and a checksum."""

HOSTED_SEEDS = (0, 1, 2, 5, 7, 9, 10, 11)
"""Seeds of the servers in `HOSTED`."""

POLICIES = ("arc", "s3fifo", "sieve", "slru")
"""Policies that go by the order in which blocks are inserted, each in another way."""

SEEDS = (0, 1, 10, 11, 12, 14, 15, 19, 23, 29, 32, 33, 35, 37, 39, 58, 61, 64, 100, 103)
"""Seeds of the random servers in `GOLDEN`: all kinds of servers, without duplicate blocks."""

GROUPED_SEEDS = (*range(6), 7, 8, 9, 10, 12, 15, 17, 19, 21, 22, 81)
"""Seeds of the servers in `GROUPED`."""

DUPLICATED_SEEDS = (1, 3, 4, 6)
"""Seeds of the servers in `GROUPED` with one group, whose prompts come again."""

STEP_NS = 20_000_000
"""Nanoseconds of a step, whatever it computes."""

FREE_STEPS = 256
"""Number of steps whose numbers of free blocks share a checksum in a file."""


@attrs.frozen
class Step:
    """The contents of one step.

    Attributes:
        tokens: scheduled tokens by request.
        admitted: tokens that hit at the admission, by request that this step admits.
        preempted: requests that lose their blocks in this step, sorted.
        free: free or evictable blocks when the step begins and those before it have ended.
    """

    tokens: dict[int, int]
    admitted: dict[int, int]
    preempted: list[int]
    free: int


@attrs.frozen(kw_only=True)
class Server:
    """A server and its requests.

    Attributes:
        name: the name of the server in a file.
        blocks: number of blocks as vLLM counts them, with one that is never used.
        block_size: tokens of a block.
        requests: the requests, with numbers from 0 on as ids.
        max_tokens, max_seqs, chunked, watermark: as in `Batching`.
        lag: 1 if a step is planned while the one before it runs, else 0.
        by_priority: whether requests run by priority; else in the order of arrival.
        options: other options of `Batching`, and of its rules, by name.
        groups: the cache groups, whose smallest blocks have `block_size` tokens; empty: full
            attention in one group, served by a `KVCache`.
        interval: the retention interval of the groups.
    """

    name: str
    blocks: int
    block_size: int
    requests: Sequence[Request]
    max_tokens: int = 8192
    max_seqs: int = 256
    chunked: bool = True
    watermark: float = 0.0
    lag: int = 0
    by_priority: bool = False
    options: dict[str, Any] = attrs.field(factory=dict)
    groups: Sequence[LayerGroup] = ()
    interval: int | None = 0


def conversation(blocks: int, block_size: int, lag: int, requests: int = 600) -> Server:
    """Return a server for the first requests of the bundled conversation trace."""
    return Server(
        name=f"conversation, {blocks} blocks of {block_size}, lag {lag}",
        blocks=blocks,
        block_size=block_size,
        requests=list(islice(Mooncake(), requests)),
        lag=lag,
    )


def random_server(seed: int, requests: int = 150, **options: Any) -> Server:
    """Return a server under load, whose requests share prefixes of each other.

    Only `Random.random` is used, whose numbers are the same in every version of Python.
    """
    rng = Random(seed)

    def below(end: float) -> int:
        return int(rng.random() * end)

    block_size = 8 << below(4)
    max_tokens = 256 << below(6)
    max_seqs = 4 << below(6)
    chunked = rng.random() < 2 / 3
    longest = 64 << below(6)
    if not chunked:
        longest = min(longest, max_tokens // 4)
    urgencies = 1 + 2 * below(2)
    outputs = 16 << below(6)
    if not chunked:
        outputs = min(outputs, max_tokens // 4)
    # Steps between arrivals, from far beyond the capacity of the server to just within it.
    apart = outputs / max_seqs * (0.2 + rng.random())
    whole = rng.random() < 1 / 16  # some prompts end where a block does
    made: list[Request] = []
    prompts: list[list[int]] = []
    arrival = fresh = 0
    for index in range(requests):
        shared: list[int] = []
        if prompts and rng.random() < 3 / 4:
            earlier = prompts[below(len(prompts))]
            shared = earlier[: 1 + below(len(earlier))]
        tokens = max(1, len(shared) * block_size + 1 + below(longest * rng.random() ** 2))
        tokens = min(tokens, 2 * longest - 1)
        if whole and rng.random() < 1 / 4:
            tokens = max(1, tokens // block_size) * block_size
        full = tokens // block_size
        keys = shared[:full]
        keys += range(fresh, fresh + full - len(keys))
        fresh += full
        prompts.append(keys)
        # A third of the requests arrive together with the one before them.
        if rng.random() < 2 / 3:
            arrival += int(rng.random() * 3 * apart * STEP_NS)
        made.append(
            Request(
                id=index,
                arrival=arrival,
                prompt_tokens=tokens,
                output_tokens=1 + below(2 * outputs * rng.random()),
                keys=keys,
                key_tokens=block_size,
                priority=below(urgencies),
            )
        )
    need = max(-(-(each.prompt_tokens + each.output_tokens) // block_size) for each in made)
    return Server(
        name=f"seed {seed}",
        blocks=2 + need + int(need * 5 * rng.random()),
        block_size=block_size,
        requests=made,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        chunked=chunked,
        watermark=(0.0, 0.01, 0.05)[below(3)],
        lag=below(2),
        by_priority=urgencies > 1,
        options=options,
    )


def grouped_server(seed: int) -> Server:
    """Return a random server under load with random cache groups, and chunks if it needs them.

    Its pool is that of `random_server` for each of the groups.
    """
    server, rng = random_server(seed), Random(f"groups/{seed}")

    def below(end: int) -> int:
        return int(rng.random() * end)

    size = server.block_size
    full, state = LayerGroup("full", size), LayerGroup("state", size)
    short, long = (LayerGroup("window", size, 2 + below(most)) for most in (40, 600))
    groups = [
        [full, short],
        [full, long, long],
        [full, short, long],
        [full, state, state],
        [full, long, state],
        [short, long],
        [long],
    ][below(7)]
    if state in groups:
        server = attrs.evolve(server, chunked=True)
    return attrs.evolve(
        server,
        name=f"groups, seed {seed}",
        blocks=server.blocks * len(groups) + 8,
        groups=groups,
        interval=(0, 0, None, 4 * size)[below(4)],
    )


def compressed_server(seed: int) -> Server:
    """Return a random server under load with cache groups as those of DeepSeek V4.

    Blocks of several sizes, which are nearer to one another, so that its prompts fill some.
    """
    server, rng = random_server(seed), Random(f"compressed/{seed}")
    size = server.block_size
    windows = [(4, 8), (4, 8), (1, 2), (2, 8)]
    groups = [LayerGroup("window", block * size, window * size) for block, window in windows]
    return attrs.evolve(
        server,
        name=f"compressed, seed {seed}",
        blocks=3 * server.blocks,
        groups=[*groups[:2], LayerGroup("full", 8 * size), *groups[2:]],
        interval=(0, 0, None, 16 * size)[int(rng.random() * 4)],
    )


def duplicated_server(seed: int) -> Server:
    """Return a random server of prompts that come again, half of them of whole blocks.

    So many blocks are computed twice. Its one group has full attention.
    """
    server, rng = random_server(seed), Random(f"duplicates/{seed}")
    size, requests = server.block_size, list[Request]()
    for request in server.requests:
        keys, tokens = list(request.keys), request.prompt_tokens
        if rng.random() < 1 / 2:
            tokens = max(1, tokens // size) * size
            keys = keys[: tokens // size] or [-1 - len(requests)]
        if requests and rng.random() < 2 / 5:
            earlier = requests[-1 - int(rng.random() * min(8, len(requests)))]
            keys, tokens = list(earlier.keys), earlier.prompt_tokens
        requests.append(attrs.evolve(request, prompt_tokens=tokens, keys=keys))
    return attrs.evolve(
        server, name=f"duplicates, seed {seed}", requests=requests,
        groups=[LayerGroup("full", size)],
    )  # fmt: skip


class StepRecorder(SimulatedExecutor):
    """An executor whose steps all take the same time, and that records their contents."""

    def __init__(self, cache: ServedCache) -> None:
        super().__init__(Linear(step=STEP_NS / NS_PER_S, prefill=0, decode=0, context=0))
        self.jumps = False
        self.steps: list[Step] = []
        self._seen: dict[Job, tuple[Any, int]] = {}
        self._cache = cache

    def run(
        self, work: StepWork, chunks: Iterable[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Record the step and return its result."""
        seen = self._seen
        chunks = list(chunks)
        preempted = []
        for job, (_, recomputes) in [*seen.items()]:
            if job.recomputes > recomputes:
                preempted.append(job.request.id)
            if job.seq is None or job.stage == DONE:
                del seen[job]
        admitted = {}
        for job, _ in chunks:
            if job not in seen or job.seq is not seen[job][0]:
                admitted[job.request.id] = job.computed
        tokens = {job.request.id: count for job, count in chunks}
        tokens |= {job.request.id: 1 for job in decoding}
        for job in chain((job for job, _ in chunks), decoding):
            seen[job] = (job.seq, job.recomputes)
        self.steps.append(
            Step(tokens, admitted, sorted(preempted), self._cache.available_blocks)
        )
        return super().run(work, chunks, decoding)


def kvcore_steps(server: Server, eviction: EvictionPolicy | None = None) -> list[Step]:
    """Return the steps of kvcore for `server` with `like="vllm"`.

    `eviction` is another policy than vLLM's own, for single blocks as in a `PolicyHost`.
    """
    choices = {"lag": server.lag, **server.options}
    longest = choices.pop("max_model_len", None)
    config = RunConfig(
        like=VLLM(**choices),
        max_model_len=longest,
        scheduler="priority" if server.by_priority else "fcfs",
        max_tokens=server.max_tokens,
        max_seqs=server.max_seqs,
        chunked=server.chunked,
        watermark=server.watermark,
    )
    batching = config.build().batching
    blocks = server.blocks - batching.rules.null_block
    cache: ServedCache
    if server.groups:
        kind = kvcore.HostedGroups if eviction else GroupedCache
        cache = kind(
            server.groups, blocks, checkpoint=as_checkpoint(server.interval), eviction=eviction
        )
    else:
        prefix = "hashed:spans=block" if eviction else config.prefix
        cache = KVCache(
            blocks, server.block_size, eviction=eviction or config.eviction, prefix=prefix
        )
    recorder = StepRecorder(cache)
    serve(
        server.requests,
        cache,
        resolve("scheduler", config.scheduler),
        recorder,
        batching,
        slo=None,
        rate_scale=1.0,
        residency=False,
        jumps=False,
    )
    return recorder.steps


def block_name(request: Request, block: int, block_size: int) -> str:
    """Return the name of a block: of its key, or of its request if it has none."""
    index, part = divmod(block, request.key_tokens // block_size)
    keys = [*request.keys[: request.prompt_tokens // request.key_tokens], *request.output_keys]
    in_prompt = (block + 1) * block_size <= request.prompt_tokens
    if index < len(keys) and (in_prompt or request.output_keys):
        return f"{keys[index]}, {part}"
    return f"{block} of {request.id}"


def kvcore_evictions(server: Server, eviction: str) -> list[str]:
    """Return the names of the blocks that kvcore evicts by a policy, in this order.

    Keys of the requests stand for a block.
    """
    policy, evicted = resolve("eviction", eviction), []

    class Recorded(type(policy)):  # type: ignore[misc]
        def on_remove(self, span: Span, reason: str) -> None:
            for key in reversed(span.path_keys[span.start : span.end]):
                generated = isinstance(key, tuple)
                evicted.append(f"{key[2]} of {key[1]}" if generated else f"{key}, 0")
            super().on_remove(span, reason)

    Recorded.__name__ = type(policy).__name__
    policy.__class__ = Recorded
    kvcore_steps(server, policy)
    return evicted


def checksum(evicted: Sequence[str]) -> list[int]:
    """Return the number of evicted blocks, and a checksum of their names in order."""
    return [len(evicted), crc32("\n".join(evicted).encode())]


def hosted_server(seed: int) -> Server:
    """Return a random server for a policy that decides in vLLM; with chunks also of chats.

    A chat goes on long after its last answer, whose blocks have keys. No prompt ends where a
    block does, so that no two blocks have the same content.
    """
    server, rng = random_server(seed), Random(f"hosted/{seed}")
    size, fresh, requests = server.block_size, 1 << 30, list[Request]()
    chats = server.chunked and rng.random() < 2 / 3
    for request in server.requests:
        keys, prompt = list(request.keys), request.prompt_tokens
        if chats and len(requests) > 60 and rng.random() < 1 / 2:
            earlier = requests[int(rng.random() * (len(requests) - 60))]
            keys = [*earlier.keys, *earlier.output_keys]
            prompt = len(keys) * size + 1 + int(rng.random() * 3 * size)
        prompt += prompt % size == 0
        total = (prompt + request.output_tokens) // size
        end = total if chats else prompt // size
        keys += range(fresh, fresh + end - len(keys))
        fresh += end
        requests.append(
            attrs.evolve(
                request, prompt_tokens=prompt, keys=keys[: prompt // size], priority=0,
                output_keys=keys[prompt // size : end],
            )
        )  # fmt: skip
    most = max(request.prompt_tokens + request.output_tokens for request in requests)
    blocks = 3 + int(most // size * (1 + 3 * rng.random()))
    return attrs.evolve(server, requests=requests, by_priority=False, blocks=blocks)


def golden_servers() -> list[Server]:
    """Return the servers whose step lists are in the file `GOLDEN`."""
    pools = ((1024, 512), (400, 512), (16_384, 16))
    traces = [conversation(*pool, lag) for pool in pools for lag in (0, 1)]
    return [*traces, *map(random_server, SEEDS)]


def grouped_servers() -> list[Server]:
    """Return the servers whose step lists are in the file `GROUPED`."""
    duplicated = map(duplicated_server, DUPLICATED_SEEDS)
    return [*map(grouped_server, GROUPED_SEEDS), *duplicated]


def encode(steps: Iterable[Step]) -> dict[str, Any]:
    """Return a step list as plain values: runs of equal steps, each as a difference.

    A run is [steps, [request, tokens, …] that changed, [request, hit, …], [preempted, …]]; 0
    tokens are those of a request that is not in the step any more. Of the numbers of free
    blocks only a checksum per `FREE_STEPS` steps is kept.
    """
    runs: list[list[Any]] = []
    frees: list[int] = []
    before: dict[int, int] = {}
    for step in steps:
        frees.append(step.free)
        if step.tokens == before and not step.admitted and not step.preempted:
            runs[-1][0] += 1
            continue
        changed = {name: 0 for name in before if name not in step.tokens}
        changed |= {name: n for name, n in step.tokens.items() if before.get(name) != n}
        runs.append([1, _flat(changed), _flat(step.admitted), step.preempted])
        before = step.tokens
    parts = (frees[index : index + FREE_STEPS] for index in range(0, len(frees), FREE_STEPS))
    return {"runs": runs, "free": [crc32(orjson.dumps(part)) for part in parts]}


def decode(
    runs: Iterable[Sequence[Any]],
) -> list[tuple[dict[int, int], dict[int, int], list[int]]]:
    """Return the tokens, admissions and preempted requests of each step of `runs`."""
    steps: list[tuple[dict[int, int], dict[int, int], list[int]]] = []
    tokens: dict[int, int] = {}
    for count, changed, admitted, preempted in runs:
        tokens = tokens | _pairs(changed)
        tokens = {name: token for name, token in tokens.items() if token}
        steps.append((tokens, _pairs(admitted), preempted))
        steps += [(tokens, {}, [])] * (count - 1)
    return steps


def first_difference(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> tuple[int, str, int] | None:
    """Return the first difference of two encoded lists; None if they are equal.

    It is the number of equal steps before the difference, a description, and the last step that
    can be the first to differ.
    """
    found: tuple[int, str, int] | None = None
    pairs = zip_longest(decode(ours["runs"]), decode(theirs["runs"]))
    for at, (one, other) in enumerate(pairs):
        if one != other:
            found = at, f"step {at}: {one} where vLLM has {other}", at
            break
    for part, (crc, other) in enumerate(zip(ours["free"], theirs["free"], strict=False)):
        at, last = part * FREE_STEPS, (part + 1) * FREE_STEPS - 1
        if crc != other and (found is None or last < found[0]):
            return at, f"free blocks differ in some step from {at} to {last}", last
    return found


def write(path: Path, servers: dict[str, dict[str, Any]]) -> None:
    """Write encoded step lists by the name of their server, one per line, compressed."""
    lines = (orjson.dumps({"server": name, **server}) for name, server in servers.items())
    path.write_bytes(lzma.compress(b"\n".join(lines), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the encoded step lists in a file by the name of their server."""
    lines = map(orjson.loads, lzma.decompress(path.read_bytes()).splitlines())
    return {line.pop("server"): line for line in lines}


def _flat(pairs: dict[int, int]) -> list[int]:
    return [value for pair in sorted(pairs.items()) for value in pair]


def _pairs(flat: Sequence[int]) -> dict[int, int]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
