"""Random streams of requests to cache groups, for the cache and for what it is compared to."""

from __future__ import annotations

from math import gcd, lcm
from random import Random

import attrs

from kvcore.config.values import as_checkpoint
from kvcore.errors import OutOfBlocks
from kvcore.request import Request, block_keys
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup

FULL, STATE, WINDOW, DOUBLE, TRIPLE = "full", "state", (1, 0), (2, 3), (3, 1)
CHUNK = "chunk"

SHAPES = {
    "full": [FULL],
    "window": [WINDOW],
    "full, window": [FULL, WINDOW],
    "two windows, full": [WINDOW, WINDOW, FULL],
    "full, two states": [FULL, STATE, STATE],
    "full, window, state": [FULL, WINDOW, STATE],
    "windows of two lengths": [WINDOW, DOUBLE],
    "blocks of two sizes": ["full, twice", WINDOW],
    "full, windows of two lengths": [FULL, WINDOW, TRIPLE],
    "full, chunk": [FULL, CHUNK],
    "full, two chunks": [FULL, CHUNK, CHUNK],
    "compressed": [],
}
"""The groups of a stream: a kind, or a window as a multiple of another and tokens beside it."""


def compressed(size):
    """Return the groups of DeepSeek V4, whose smallest blocks have 4 tokens, for `size`."""
    windows = [(16, 32), (16, 32), (1, 2), (2, 32)]
    groups = [LayerGroup("window", block * size, window * size) for block, window in windows]
    return [*groups[:2], LayerGroup("full", 64 * size), *groups[2:]]


def _group(shape, size, window):
    """Return a group of a shape, with blocks of `size` tokens."""
    if isinstance(shape, tuple):
        factor, more = shape
        return LayerGroup("window", size, factor * window + more)
    if shape == CHUNK:
        return LayerGroup("chunk", size, -(-window // size) * 2 * size)
    kind, _, twice = shape.partition(", ")
    return LayerGroup(kind, 2 * size if twice else size)


@attrs.frozen
class Pool:
    """The groups of a stream, and the pool that they share.

    Attributes:
        shape: the name of the groups.
        groups: the groups.
        blocks: blocks in the pool.
        interval: the retention interval.
        chunk: the most tokens of a chunk.
    """

    shape: str
    groups: list[LayerGroup]
    blocks: int
    interval: int | None
    chunk: int

    @classmethod
    def random(cls, rng):
        """Return a random one."""
        shape = rng.choice(list(SHAPES))
        size, window = rng.choice((4, 8, 16)), rng.choice((2, 5, 9, 17, 33, 64, 100))
        groups = [_group(shape, size, window) for shape in SHAPES[shape]]
        groups = groups or compressed(size // 4)
        size = lcm(*(group.block_size for group in groups))
        interval = rng.choice((None, 0, 0, 2 * size, 4 * size))
        if all(group.kind in ("full", "chunk") for group in groups):
            interval = 0  # vLLM refuses another one
        chunk = rng.choice((1, 3, 8)) * size
        blocks = rng.choice((120, 250, 900)) * (8 if shape == "compressed" else 1)
        return cls(shape, groups, blocks, interval, chunk)

    @property
    def unit(self):
        """Number of tokens that a key stands for."""
        return gcd(*(group.block_size for group in self.groups))


@attrs.frozen
class Prompt:
    """A request of a stream, with its tokens.

    Attributes:
        request: the request. Its output has keys.
        tokens: the tokens of its prompt and its output.
    """

    request: Request
    tokens: list[int]

    def names(self, groups):
        """Return the names of its blocks, by their size, as a `GroupedCache` has them."""
        keys, unit = [*self.request.keys, *self.request.output_keys], self.request.key_tokens
        sizes = {group.block_size for group in groups}
        return {size: keys[size // unit - 1 :: size // unit] for size in sizes}


class CacheSide:
    """A stream's calls of a `GroupedCache`, or of a subclass, which may have options.

    It computes as an executor does: each chunk reads what its first token needs in every group,
    which must be there, and writes its own blocks.

    Attributes:
        evicted: group and name of the evicted blocks, in order.
    """

    def __init__(self, pool, kind=GroupedCache, **options):
        self.evicted = evicted = []

        class Watched(kind):
            def _evict(self, blocks):
                evicted.extend(map(self._blocks.place, blocks))
                super()._evict(blocks)

        self.cache = Watched(
            pool.groups, pool.blocks, checkpoint=as_checkpoint(pool.interval),
            key_tokens=pool.unit, **options,
        )  # fmt: skip
        self.cache.in_flight_tokens = pool.chunk
        self._matches, self._open = {}, {}
        self._memory = {}  # by block: its group, and its name or what it has of one

    def look_up(self, prompt):
        """Return the tokens that hit, and the junction."""
        match = self._matches[prompt.request.id] = self.cache.match(prompt.request)
        return match.tokens, match.junction

    def allocate(self, prompt, computed, tokens, *, first):
        """Allocate for a chunk, and compute it; return False if there is no room."""
        cache, request = self.cache, prompt.request
        if first:
            match = self._matches[request.id]
            if cache.need(match, request.prompt_tokens, whole=True) > cache.available_blocks:
                return False
            try:
                seq = self._open[request.id] = cache.open(request, tokens, match=match)
            except OutOfBlocks:
                return False
        else:
            seq, before = self._open[request.id], cache.available_blocks
            assert cache.free_passed(seq, computed) == (cache.available_blocks > before)
            if not cache.grow(seq, computed + tokens):
                return False
        self._compute(seq, prompt, computed, computed + tokens)
        cache.commit(seq, tokens)
        return True

    def _compute(self, seq, prompt, computed, end):
        """Read what the token after the first `computed` ones needs, and write up to `end`."""
        names = prompt.names(self.cache.groups)
        for index, (group, table) in enumerate(zip(self.cache.groups, seq.tables, strict=True)):
            size, own = group.block_size, names[group.block_size]

            def content(position, tokens, index=index, size=size, own=own):
                whole = (position + 1) * size <= tokens
                return index, own[position] if whole else (prompt.request.id, tokens)

            last = -(-computed // size)
            first = max(last - 1 if group.kind == "state" else 0, group.passed(computed))
            for position in range(first, last):
                block = table.blocks[position - table.first]
                assert self._memory[block] == content(position, computed)
            last = -(-end // size)
            first = last - 1 if group.kind == "state" else max(computed // size, table.first)
            for position in range(first, last):
                block = table.blocks[position - table.first]
                self._memory[block] = content(position, end)

    def close(self, prompt):
        """Free the blocks of a request, and check all invariants."""
        seq = self._open.pop(prompt.request.id, None)
        if seq is not None:
            self.cache.close(seq)
        self.cache.check_integrity()
        assert all(self._memory[block] == place for block, place in self.cache._blocks)

    @property
    def available(self):
        """Number of blocks that are free or can be evicted."""
        return self.cache.available_blocks


def drive(seed, make_side, requests=60):
    """Serve a random stream in a `GroupedCache` and in another side.

    Prompts are new ones, earlier ones, their beginnings, or continue them; up to four requests
    are open. Both sides must agree after every call.

    Args:
        seed: the seed of the stream.
        make_side: returns the other side for a `Pool`.
        requests: number of requests.

    Returns:
        The number of calls, of hits and of evictions.
    """
    rng = Random(f"groups/{seed}")
    pool = Pool.random(rng)
    one, other = CacheSide(pool), make_side(pool)
    prompts, open_prompts, calls, hits = [], [], 0, 0

    def agree(mine, theirs):
        assert mine == theirs, f"seed {seed}, {pool.shape}: {mine} is not {theirs}"

    def both(method, *args, **options):
        nonlocal calls
        calls += 1
        answers = [getattr(side, method)(*args, **options) for side in (one, other)]
        agree(*answers)
        agree(one.available, other.available)
        agree(one.evicted, other.evicted)
        return answers[0]

    for index in range(requests):
        prompt = _prompt(rng, pool, index, prompts)
        length = prompt.request.prompt_tokens
        computed, junction = both("look_up", prompt)
        hits += computed > 0
        first = served = True
        while served and computed < len(prompt.tokens):
            left = length - computed
            tokens = 1
            if left > 0:
                tokens = one.cache.chunk_tokens(
                    computed, min(pool.chunk, left), length, length, (junction,), pool.chunk
                )
            served = both("allocate", prompt, computed, tokens, first=first)
            first = False
            computed += tokens
        if served:
            prompts.append(prompt.tokens)
        open_prompts.append(prompt)
        while len(open_prompts) > rng.choice((0, 1, 3)) or (open_prompts and not served):
            both("close", open_prompts.pop(0))
    return calls, hits, len(one.evicted)


def _prompt(rng, pool, number, earlier):
    """Return the next request of a stream."""
    kind, tokens = rng.random(), []
    if earlier and kind < 3 / 4:
        tokens = rng.choice(earlier[-20:])
        tokens = tokens[: rng.randint(1, len(tokens))] if kind < 1 / 3 else tokens
        tokens = tokens + [rng.randrange(9999) for _ in range(rng.randint(kind > 1 / 2, 60))]
    else:
        tokens = [rng.randrange(9999) for _ in range(rng.randint(1, 300))]
    most = (pool.blocks - 20) // len(pool.groups) * pool.unit
    tokens = tokens[: min(400, most)]
    output = [rng.randrange(9999) for _ in range(rng.choice((0, 0, 5, 40)))]
    keys, whole = block_keys([*tokens, *output], pool.unit), len(tokens) // pool.unit
    request = Request(
        id=number,
        arrival=number,
        prompt_tokens=len(tokens),
        output_tokens=len(output) + 1,
        keys=keys[:whole],
        output_keys=keys[whole:],
        key_tokens=pool.unit,
    )
    return Prompt(request, [*tokens, *output])
