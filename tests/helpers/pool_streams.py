"""Random streams of requests to a cache with a pool for each kind of layer."""

from __future__ import annotations

from hashlib import sha256
from random import Random

import attrs

from kvcore.errors import OutOfBlocks
from kvcore.request import Request
from kvcore_plugins.layer_pools import PooledCache
from kvcore_plugins.layer_pools.tree import PooledTree


@attrs.frozen
class Pools:
    """The pools of a stream.

    Attributes:
        page: tokens of a block.
        blocks: blocks of full attention.
        window: tokens that a token attends to, itself included; None: no layer has a window.
        window_slots: window slots, a block each.
        state_slots: slots of states; None: no layer has a state.
        chunk: the most tokens of a chunk.
    """

    page: int
    blocks: int
    window: int | None
    window_slots: int
    state_slots: int | None
    chunk: int

    @classmethod
    def random(cls, rng, kind):
        """Return random ones for layers with a `window` or a `state` beside full attention."""
        page = rng.choice((1, 1, 4, 16))
        blocks = rng.choice((700, 1200, 3000)) // page
        if kind == "window":
            window = rng.choice((2, 9, 33, 100))
            slots = int(blocks * rng.choice((0.5, 0.8, 1)))
            least = 2 * -(-(window - 1) // page) + 128 // page + 2
            chunk = rng.choice((64, 100, 400)) // page * page
            return cls(page, blocks, window, max(slots, least + chunk // page), None, chunk)
        chunk = rng.choice((64, 128, 320))
        return cls(page, blocks, None, 0, rng.choice((15, 20, 40)), chunk)


class CacheSide:
    """A stream's calls of a `PooledCache`.

    Attributes:
        cache: the cache.
        evicted: the keys of blocks of full attention that left, in order.
    """

    def __init__(self, pools, eviction):
        self.pools = pools
        self.evicted = evicted = []

        class Watched(PooledTree):
            __slots__ = ()

            def _remove(self, span, reason):
                evicted.extend(reversed(span.path_keys[span.start : span.end]))
                super()._remove(span, reason)

        self.cache = PooledCache(
            pools.blocks, pools.page, window=pools.window, window_slots=pools.window_slots,
            state_slots=pools.state_slots, eviction=eviction, prefix="radix:evict=leaf",
            key_tokens=pools.page, tree=Watched,
        )  # fmt: skip
        self._open = {}

    def open(self, request):
        """Admit a request with its first chunk; return the tokens that hit, or None."""
        cache, chunk = self.cache, self.pools.chunk
        hit = cache.probe(request) * self.pools.page
        tokens = min(chunk, request.prompt_tokens - hit)
        try:
            self._open[request.id] = cache.open(request, tokens)
        except OutOfBlocks:
            return None
        return hit

    def compute(self, request):
        """Compute the allocated chunk; return how many tokens of the prompt are left."""
        seq = self._open[request.id]
        self.cache.commit(seq, seq.tokens - seq.computed)
        return request.prompt_tokens - seq.tokens

    def extend(self, request, tokens):
        """Allocate for `tokens` more tokens; return False if there is no room."""
        seq = self._open[request.id]
        try:
            self.cache.extend(seq, tokens)
        except OutOfBlocks:
            return False
        return True

    def decode(self, request):
        """Generate a token; return False if there is no room for it."""
        return self.extend(request, 1)

    def close(self, request, *, complete):
        """End a request, or give back its blocks if it is not `complete`."""
        cache, seq = self.cache, self._open.pop(request.id)
        if complete:
            cache.commit(seq, seq.tokens - seq.computed)
            cache.keep_generated(seq, seq.tokens, cache.now)
        cache.close(seq, preempted=not complete)
        cache.check_integrity()

    @property
    def room(self):
        """Blocks and slots that are free, and those that are free or can be evicted."""
        cache, tree = self.cache, self.cache.tree
        sides = [(side.free, side.available) for side in tree.sides]
        return [(cache.pool.free_blocks, cache.full_blocks), *sides]


def drive(  # noqa: C901 - a stream, from its first request to its last
    seed, kind, make_side=None, requests=60, eviction="lru:renew_split=true"
):
    """Serve a random stream in a `PooledCache`, and in another side if one is given.

    Prompts are new ones, earlier ones, their beginnings, or continue them; up to three requests
    are open, and decode in turn. Both sides must agree after every call.

    Args:
        seed: the seed of the stream.
        kind: the layers beside those with full attention: `window` or `state`.
        make_side: returns the other side for `Pools`; None: there is none.
        requests: number of requests.
        eviction: the policy of the `PooledCache`.

    Returns:
        The number of calls, of hits and of evicted blocks, and a digest of all answers.
    """
    rng = Random(f"pools/{kind}/{seed}")
    pools = Pools.random(rng, kind)
    one = CacheSide(pools, eviction)
    sides = [one] if make_side is None else [one, make_side(pools)]
    prompts, running, counts, answers = [], {}, [0, 0], sha256()

    def agree(mine, theirs):
        assert mine == theirs, f"seed {seed}, {pools}: {mine} is not {theirs}"

    def call(method, *args, **options):
        counts[0] += 1
        answer, *others = [getattr(side, method)(*args, **options) for side in sides]
        for other, theirs in zip(sides[1:], others, strict=True):
            agree(answer, theirs)
            agree(one.room, other.room)
            agree(one.evicted, other.evicted)
        answers.update(repr((answer, one.room)).encode())
        return answer

    def close_oldest(*, complete):
        call("close", running.pop(next(iter(running))), complete=complete)

    for index in range(requests):
        prompt = _prompt(rng, pools, index, prompts)
        while not _fits(one.cache, prompt, pools.chunk):
            close_oldest(complete=rng.random() < 0.7)
        counts[1] += call("open", prompt) > 0
        prompts.append(prompt.keys)
        running[prompt.id] = prompt
        left = call("compute", prompt)
        while left and prompt.id in running:
            tokens = min(left, pools.chunk)
            if -(-tokens // pools.page) < one.cache.available_blocks - 1:
                call("extend", prompt, tokens)
                left = call("compute", prompt)
            else:
                close_oldest(complete=len(running) > 1)
        for _ in range(rng.choice((0, 5, 40, 300))):
            for request in list(running.values()):
                if request is prompt and left:
                    continue
                if one.cache.available_blocks < len(running) + 1:
                    break
                call("decode", request)
        while len(running) > rng.choice((0, 1, 2)):
            if left and next(iter(running)) == prompt.id:
                break
            close_oldest(complete=True)
    return *counts, len(one.evicted), answers.hexdigest()


def _fits(cache, request, chunk):
    match = cache.match(request, cache.now)
    blocks = -(-request.prompt_tokens // cache.geometry.block_size) - match.blocks
    if blocks + 1 >= cache.full_blocks - match.unpinned_blocks:
        return False
    return not cache.lacks_slots(request, match, request.prompt_tokens, chunk)


def _prompt(rng, pools, number, earlier):
    """Return the next request of a stream."""
    kind, keys = rng.random(), []
    more = max(1, rng.randint(1, 200) // pools.page)
    if earlier and kind < 3 / 4:
        keys = rng.choice(earlier[-12:])
        keys = keys[: rng.randint(1, len(keys))] if kind < 1 / 3 else keys
        more = more if kind > 1 / 2 else 0
    else:
        more *= 2
    keys = (*keys, *((number, index) for index in range(more)))[: 450 // pools.page]
    tokens = len(keys) * pools.page + rng.randrange(pools.page)
    return Request(
        id=number, arrival=number, prompt_tokens=tokens, output_tokens=301, keys=keys,
        key_tokens=pools.page,
    )  # fmt: skip
