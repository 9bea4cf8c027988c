"""A cache with memory: what each block contains, written and moved as an executor does it.

    text of a request     tokens, each of which stands for itself and all tokens before it
      |  commit, publish     the executor writes K/V
    memory[block]         <- on_copy, on_compact
      |  store, park   ^
      v                |  finish
    slots[level][slot]       the mover of the tiers

After each call all that can be read is checked against the texts: the blocks of each open
sequence, of each cached span, and of each block in a tier. A block that is allocated, or has
left a tier, is empty, so that no call reads what was there before.
"""

from __future__ import annotations

from collections import Counter
from io import BytesIO
from random import Random
from tempfile import NamedTemporaryFile

import attrs
from helpers.policies import POLICIES, build
from helpers.retention import Eager
from helpers.serving import SLOT, TIER_EVICTIONS
from hypothesis import settings

from kvcore import InputError, KVCache, OutOfBlocks, Request, Trace
from kvcore.cache import RetentionPolicy
from kvcore.testing import Traffic
from kvcore.testing.harness import draw_request
from kvcore_replay.check.trace import check_trace
from kvcore_replay.state.residency import rebuild_residency
from kvcore_tiers.hierarchy import Tiers

KEY = 6

LAYOUTS = [("keys", 6), ("keys", 2), ("tokens", 6), ("tokens", 2), ("tokens", 12)]
"""(accounting, block size): one and three blocks a key; in `tokens` also two keys a block."""

CALLS = {
    "open": 12, "commit": 14, "extend": 5, "publish": 2, "close": 5, "fork": 2, "rollback": 2,
    "compact": 2, "keep": 2, "preempt": 4, "resume": 4, "prefetch": 3, "finish": 8,
}  # fmt: skip
"""Relative frequencies of calls."""

PROGRAMS, LENGTH = max(10, settings.default.max_examples // 10), 200
"""Programs of a layout, 500 in the profile `thorough`, and their calls."""


def run_programs(accounting, size, *, tiered):
    """Run the programs of a layout; return how often each call was made, and its effects."""
    counts = Counter()
    for seed in range(PROGRAMS):
        try:
            counts += Program(seed, accounting, size, tiered=tiered).run(LENGTH)
        except Exception as error:
            error.add_note(f"program {seed}")
            raise
    return counts


@attrs.define
class Published(Request):
    """A request whose generated blocks get keys while it runs."""

    publish = True


@attrs.define(slots=False, eq=False)
class Middle(RetentionPolicy):
    """A policy that drops what is neither among the first nor among the last tokens."""

    name = "middle"

    def droppable(self, seq):
        """Return the range between the first 4 and the last 9 tokens."""
        return [(4, seq.computed - 9)] if seq.computed > 13 else []


def prefill_ns(tokens, context):
    """Return the ns to compute tokens, which grow with the context."""
    return 100 * tokens + tokens * context


def tier(rnd):
    """Return the text of a tier that is fast enough for most loads."""
    return (
        f"{rnd.choice(('host', 'host', 'disk'))}:memory={SLOT * rnd.choice((8, 20, 60))}"
        f",eviction={rnd.choice(('lru', rnd.choice(TIER_EVICTIONS)))}"
        f",write={rnd.choice(('evict', 'through', 1, 2))}"
        f",keep={rnd.choice(('inclusive', 'exclusive'))}"
        f",load={rnd.choice(('cost', 'always'))}"
        f",read_bandwidth={rnd.choice(('640GB', '16GB'))},latency={rnd.choice((0, 3e-8))}"
        f",write_bandwidth={rnd.choice(('640GB', '16GB'))},max_wait={rnd.choice((1, 2e-8))}"
    )


class Memory:
    """The blocks of the pool and the slots of the tiers: a `Mover` that may lose blocks.

    Attributes:
        pool: the tokens in each block, by its id.
        slots: the tokens in each slot, by its level.
        damaged: number of blocks that stores have lost.
    """

    def __init__(self, blocks, size, levels, rnd, faults):
        self.pool = [[None] * size for _ in range(blocks)]
        self.slots = {level: [None] * level.pool.blocks for level in levels}
        self.damaged, self._size = 0, size
        self._rnd, self._faults, self._lost = rnd, faults, []

    def clear(self, blocks):
        """Empty blocks of the pool."""
        for block in blocks:
            self.pool[block] = [None] * self._size

    def copy(self, source, target):
        """Copy a block of the pool."""
        self.pool[target] = [*self.pool[source]]

    def read(self, table, tokens):
        """Return the first `tokens` tokens of a block table."""
        return [token for block in table for token in self.pool[block]][:tokens]

    def write(self, table, first, tokens):
        """Write tokens into a block table from its position `first` on."""
        for index, token in enumerate(tokens, first):
            self.pool[table[index // self._size]][index % self._size] = token

    def _fails(self):
        failed = self._rnd.random() < self._faults
        self.damaged += failed
        return failed

    # The calls of tiers.

    def is_ready(self, level):
        """Return False now and then, as after a failure of the store."""
        del level
        return not self._fails()

    def store(self, level, source, ids, holder):
        """Copy blocks of the pool or of a level into a level."""
        above = self.pool if source is None else self.slots[source]
        for block, slot in zip(ids, holder.private, strict=True):
            assert self.slots[level][slot] is None
            self.slots[level][slot] = [*above[block]]
        if self._fails():
            lost = self._rnd.randrange(len(ids))
            self._lost.append((level, holder, holder.blocks - len(ids) + lost))

    def park(self, level, ids, holder):
        """Copy the blocks of a preempted sequence into a level."""
        for block, slot in zip(ids, holder.private, strict=True):
            assert self.slots[level][slot] is None
            self.slots[level][slot] = [*self.pool[block]]

    def load(self, part):
        """Remember what a load is to read: its slots are pinned until it ends."""
        part.data = [self.slots[part.level][slot] for slot in part.slots]

    def finish(self, part, ids):
        """Copy the blocks of a load; return how many are intact."""
        read = [self.slots[part.level][slot] for slot in part.slots]
        assert read == part.data
        assert len(ids) == len(read)
        right = self._rnd.randrange(len(ids)) if self._fails() else len(ids)
        for block, tokens in zip(ids[:right], read, strict=False):
            self.pool[block] = [*tokens]
        return right

    def dropped(self, level, slots):
        """Empty slots of a level."""
        for slot in slots:
            assert self.slots[level][slot] is not None
            self.slots[level][slot] = None

    def present(self, level, slots):
        """Return how many of the first `slots` the store has not lost."""
        assert slots
        assert None not in [self.slots[level][slot] for slot in slots]
        return self._rnd.randrange(len(slots)) if self._fails() else len(slots)

    def lost(self):
        """Yield the writes that have failed, once each."""
        while self._lost:
            yield self._lost.pop()


@attrs.define(eq=False)
class Open:
    """An open sequence.

    Attributes:
        seq: the sequence.
        text: its tokens, as far as they are known.
        branch: what tells the tokens that it generates from those of its forks.
        rows: the tokens at the positions of its table.
    """

    seq: object
    text: list
    branch: int = 0
    rows: list = attrs.Factory(list)

    def upto(self, tokens):
        """Return its first tokens; those not known yet are generated."""
        for index in range(len(self.text), tokens):
            self.text.append((self.seq.request.id, self.branch, index))
        return self.text[:tokens]

    @property
    def held(self):
        """The tokens of `rows` that no retention policy has dropped."""
        size = self.seq.span.geometry.block_size
        rows = [*self.rows]
        for first, end in reversed(self.seq.holes):
            del rows[first * size : end * size]
        return rows


class Program:
    """Random calls of one cache, perhaps with tiers, checked against the contents of blocks.

    Args:
        seed: the seed of all that is drawn.
        accounting, size: those of the cache.
        tiered: whether there are tiers below it.

    Attributes:
        counts: how often each call was made, and what came of it.
    """

    def __init__(self, seed, accounting, size, *, tiered):
        self.rnd = rnd = Random(f"contents/{seed}/{accounting}/{size}/{tiered}")
        self.size, self.now, self.serial, self.counts = size, 0, 0, Counter()
        blocks = rnd.randint(4, 16) * max(1, KEY // size)
        # A trace would need the lines of a server about what it swaps and what it publishes.
        self.file = None if tiered or rnd.random() < 1 / 2 else BytesIO()
        self.trace = None if self.file is None else Trace(self.file)
        # Retention makes many sequences private, which then neither share nor swap.
        retention = rnd.choice([None] * 6 + [Middle(), Eager(9)])
        self.cache = cache = KVCache(
            blocks, size, accounting=accounting, key_tokens=KEY, ids=True,
            eviction=build(rnd.choice([*POLICIES, *["lru"] * len(POLICIES)])),
            prefix=rnd.choice(("radix", "radix", "hashed")), retention=retention,
            trace=self.trace,
        )  # fmt: skip
        cache.on_copy, cache.on_fork = self._copied, self._forked
        cache.on_compact = self._compacted
        cache.record_residency()
        if self.trace is not None:
            self.trace.describe(batching={"generated": "cached"})
        levels = ()
        if tiered:
            tiers = [tier(rnd) for _ in range(rnd.randint(1, 2))]
            levels = Tiers(cache, tiers, SLOT, ids=True).levels
        faults = rnd.choice((0, 0, 0.02, 0.2))
        self.memory = Memory(blocks, size, levels, rnd, faults)
        if tiered:
            cache.tiers.move_with(self.memory)
        self.traffic = Traffic(key_tokens=KEY, width=3, hints=True, pins=rnd.random() < 0.5)
        self.most = rnd.choice((1, 3, 6))
        self.open, self.waiting, self.expected, self.loads = [], [], [], []
        self.texts, self.meaning, self.in_blocks, self.published = {}, {}, {}, {}

    def run(self, calls):
        """Make so many random calls, end all sequences, and return the counts."""
        for index in range(calls):
            name = self.rnd.choices([*CALLS], [*CALLS.values()])[0]
            crowded = name in ("open", "resume", "fork") and len(self.open) > self.most
            self.call(index, "close" if crowded else name)
        while self.loads or self.open or self.waiting:
            name = "finish" if self.loads else "close" if self.open else "resume"
            self.call("end", name)
        cache = self.cache
        pins = cache.pins.blocks if cache.pins else 0
        assert cache.tree.unpinned_blocks + pins == cache.tree.cached_blocks
        assert cache.pool.free_blocks + cache.tree.cached_blocks == cache.pool.blocks
        for level in cache.tiers.levels if cache.tiers else ():
            assert not level.parked
            assert not any(span.ref_count for span in level.tree.spans())
        if self.trace is not None:
            self._check_trace()
        self.counts["damaged blocks"] = self.memory.damaged
        return self.counts

    def _check_trace(self):
        """Check that the trace makes the states that it was made by."""
        self.trace.close()
        with NamedTemporaryFile(suffix=".jsonl") as copy:
            copy.write(self.file.getvalue())
            copy.flush()
            report = check_trace(copy.name)
            assert report.pool["free"] == self.cache.pool.free_blocks
            assert rebuild_residency(copy.name).as_dict() == self.cache.tree.residency.as_dict()
        self.counts["traces"] += 1

    def call(self, index, name):
        """Make one call of a name, unless nothing is there for it, and check all contents."""
        self.now += self.rnd.randint(0, 4)
        self.counts[name] += 1
        try:
            getattr(self, f"_{name}")()
        except OutOfBlocks:
            self.counts[f"{name} refused"] += 1
        except InputError:
            self.counts[f"{name} refused"] += 1
            if name not in ("fork", "rollback", "compact"):
                raise
        try:
            self.check()
        except AssertionError as error:
            error.add_note(f"call {index}: {name}")
            raise

    # Texts.

    def _meaning(self, key):
        """Return the tokens that a key stands for."""
        return self.meaning.setdefault(key, [(key, index) for index in range(KEY)])

    def _text(self, request):
        """Return the known tokens of a request, and record what its blocks contain."""
        if (text := self.texts.get(request.id)) is not None:
            return [*text]
        whole = request.prompt_tokens // KEY
        keys = request.keys
        if request.publishes:
            keys = [*keys[:whole], *request.output_keys]
        text = [token for key in keys for token in self._meaning(key)]
        if self.cache.geometry.accounting == "tokens" and not request.output_keys:
            text = text[: request.prompt_tokens]
        text += [(request.id, 0, index) for index in range(len(text), request.prompt_tokens)]
        layout = self.cache.geometry.prompt(request)
        for block in range(layout.cacheable):
            own = text[block * self.size : (block + 1) * self.size]
            if len(own) == self.size:
                self._contains(layout.keys[block // self.cache.geometry.ratio], block, own)
        self.texts[request.id] = text
        return [*text]

    def _contains(self, key, block, tokens):
        """Record the tokens of the block with a key at a position: they are always the same."""
        assert self.in_blocks.setdefault((key, block), tokens) == tokens

    def _prompt_tokens(self, request):
        if self.cache.geometry.accounting == "keys":
            return len(request.keys) * KEY
        return request.prompt_tokens

    def _hits(self, request, target):
        """Return how many first blocks of a request are cached, wherever they may be found."""
        if self.cache.geometry.accounting == "keys":
            limit = len(request.keys) * KEY // self.size
        else:
            limit = ((target or request.prompt_tokens) - 1) // self.size
        text = self._text(request)
        if request.publishes or target is None:
            layout = self.cache.geometry.prompt(request)
            limit = min(limit, layout.cacheable)
        cached = {tuple(tokens) for _, tokens in self._cached(self.cache.tree)}
        for block in range(limit):
            if tuple(text[block * self.size : (block + 1) * self.size]) not in cached:
                return block
        return limit

    def _cached(self, tree):
        """Yield the id and the right tokens of each cached block."""
        for span in tree.spans():
            for index, block in enumerate(span.ids):
                position = span.start + index
                key = span.path_keys[position // span.geometry.ratio]
                yield block, self.in_blocks[key, position]

    # Calls.

    def _pick(self, fits=None):
        """Return an open sequence that waits for no load, and fits; None: there is none."""
        loading = [load.seq for load in self.loads]
        ready = [own for own in self.open if own.seq not in loading]
        return self.rnd.choice([own for own in ready if fits is None or fits(own)] or [None])

    def _request(self):
        """Return a new request: one that is known before, or which continues another's text."""
        rnd, self.serial = self.rnd, self.serial + 1
        request = draw_request(rnd.randint, self.traffic)
        request = attrs.evolve(request, id=self.serial, output_tokens=10**6)
        if self.cache.geometry.accounting == "keys" or rnd.random() < 2 / 3:
            return request
        whole = request.prompt_tokens // KEY
        if len(request.keys) < whole:
            return request
        # Keys of a run are those of blocks.
        if self.trace is not None or self.cache.geometry.ratio > 1 or rnd.random() < 1 / 2:
            above = 10**6 + 1000 * sum(request.keys[:whole][-1:])
            keys = draw_request(rnd.randint, self.traffic).keys
            return attrs.evolve(request, output_keys=[above + key for key in keys])
        fields = {field.name: getattr(request, field.name) for field in attrs.fields(Request)}
        return Published(**fields)

    def _open(self):
        known = self.expected and self.rnd.random() < 1 / 2
        request = self.expected.pop(0) if known else self._request()
        self._admit(request, resumed=False, target=None)

    def _resume(self):
        if not self.waiting:
            return
        request, target = self.waiting[0]
        if max(target, self._prompt_tokens(request)) > self.cache.pool.blocks * self.size:
            self._abandon(request)
            return
        if self.cache.geometry.accounting == "keys":
            target = None
        self._admit(request, resumed=True, target=target)
        del self.waiting[0]

    def _abandon(self, request):
        """Forget a preempted request, which has become longer than the pool."""
        for level in self.cache.tiers.levels if self.cache.tiers else ():
            if request.id in level.parked:
                level.unpark(request.id, self.now)
        del self.waiting[0]

    def _admit(self, request, *, resumed, target):
        cache, rnd = self.cache, self.rnd
        text = self._text(request)
        first = None
        if cache.tiers is None and rnd.random() < 1 / 4:
            first = rnd.randint(0, 2 * KEY)
        probed = cache.probe(request, self.now, target)
        expected = self._hits(request, target)
        assert probed == expected or (probed < expected and cache.eviction.expires_spans)
        pinned = bool(cache.pins)
        seq = cache.open(
            request, first, self.now, resumed=resumed, target=target,
            reserve=rnd.choice((0, 0, 1, 2)),
        )  # fmt: skip
        assert seq.hit_blocks == probed or pinned
        own = Open(seq, text, rows=text[: seq.computed])
        self.open.append(own)
        self.counts["hit blocks"] += seq.hit_blocks
        self.memory.clear(cache.block_table(seq)[seq.hit_blocks :])
        if cache.tiers is not None:
            load = cache.tiers.load(seq, self.now, prefill_ns, resumed=resumed)
            if load is not None:
                self.loads.append(load)

    def _prefetch(self):
        cache = self.cache
        if cache.tiers is None:
            return
        request = self._request()
        hints = attrs.evolve(request.hints, prefetch=self.rnd.randint(1, 300))
        request = attrs.evolve(request, hints=hints)
        self._text(request)
        arrival = self.now + hints.prefetch
        reserve = self.rnd.choice((0, 0, 2))
        load = cache.tiers.prefetch(request, self.now, arrival, prefill_ns, reserve)
        self.expected.append(request)
        if load is not None:
            self.loads.append(load)
            self.counts["prefetched"] += 1

    def _finish(self):
        """End the load that ends first; one that awaits it comes later."""
        if not self.loads:
            return
        load = min(self.loads, key=lambda load: (load.ready, load.awaited is not None))
        self.loads.remove(load)
        self.now = max(self.now, load.ready)
        tokens = self.cache.tiers.finish(load, self.now)
        for own in self.open:
            if own.seq is load.seq:
                assert tokens == own.seq.position
                self.counts["loaded blocks"] += tokens // self.size - own.seq.hit_blocks
                text = own.upto(tokens)
                own.rows = own.rows if own.seq.compacted else text

    def _commit(self):
        if own := self._pick(lambda own: own.seq.computed < own.seq.tokens):
            left, first = own.seq.tokens - own.seq.computed, own.seq.position
            tokens = left if self.rnd.random() < 2 / 3 else self.rnd.randint(0, left)
            self._write(own, tokens)
            own.rows += own.upto(first + tokens)[first:]
            self._name_output(own, first + tokens)
            self.cache.commit(own.seq, tokens, self.now)

    def _write(self, own, tokens):
        """Write the next tokens of a sequence, as its executor does."""
        seq = own.seq
        new = own.upto(seq.position + tokens)[seq.position :]
        self.memory.write(self.cache.block_table(seq), seq.held, new)

    def _name_output(self, own, tokens):
        """Append the keys of generated blocks, once all of their tokens are computed."""
        seq = own.seq
        if not isinstance(seq.request, Published):
            return
        keys = []
        for block in range(len(seq.keys), tokens // self.size):
            text = own.text[block * self.size : (block + 1) * self.size]
            keys.append(self.published.setdefault(text[-1], 10**9 + len(self.published)))
            self._contains(keys[-1], block, text)
        self.cache.append_keys(seq, keys)

    def _publish(self):
        if own := self._pick(lambda own: own.seq.computed < own.seq.tokens):
            tokens = self.rnd.randint(1, own.seq.tokens - own.seq.computed)
            self._write(own, tokens)
            self.cache.publish(own.seq, tokens, self.now)

    def _extend(self):
        if own := self._pick():
            before = len(self.cache.block_table(own.seq))
            self.cache.extend(own.seq, self.rnd.randint(0, 2 * KEY), self.now)
            self.memory.clear(self.cache.block_table(own.seq)[before:])

    def _close(self):
        if own := self._pick():
            self.cache.close(own.seq, self.now)
            self.open.remove(own)

    def _keep(self):
        own = self._pick(self._is_root)
        if own and self.cache.geometry.accounting == "tokens":
            self._keep_generated(own)

    def _keep_generated(self, own):
        self._name_generated(own.seq.request, own.upto(own.seq.position))
        self.cache.keep_generated(own.seq, own.seq.computed, self.now)

    def _name_generated(self, request, text):
        """Record what the blocks contain that have names of a request."""
        size, ratio = self.size, self.cache.geometry.ratio
        # The key of the prompt inside which it ends has such a name in this path, too.
        first = request.prompt_tokens // size // ratio * ratio
        for block in range(first, len(text) // size):
            name = "generated", request.id, block // ratio
            self._contains(name, block, text[block * size : (block + 1) * size])

    def _is_root(self, own):
        """Return True for the sequence of a request that was never forked nor compacted."""
        return own.seq.family is None and not own.seq.compacted

    def _preempt(self):
        cache = self.cache
        own = self._pick(self._is_root)
        if own is None:
            return
        seq, request, level = own.seq, own.seq.request, None
        if cache.tiers is not None and cache.geometry.accounting == "tokens":
            level = cache.tiers.can_swap(seq, seq.computed, self.now, prefill_ns)
        if level is not None:
            level.park(seq, seq.computed, self.now)
            self.counts["swapped"] += 1
        elif cache.geometry.accounting == "tokens" and self.rnd.random() < 1 / 2:
            self._keep_generated(own)
        self.open.remove(own)
        cache.close(seq, self.now, preempted=True)
        target = max(request.prompt_tokens, seq.position + self.rnd.randint(0, 1))
        self.texts[request.id] = own.upto(max(len(own.text), target))
        self._name_generated(request, self.texts[request.id])
        self.waiting.append((request, target))

    def _fork(self):
        if own := self._pick():
            count = len(self.open)
            self.cache.fork(own.seq, self.now)
            assert len(self.open) == count + 1

    def _forked(self, seq, child):
        (own,) = [own for own in self.open if own.seq is seq]
        self.open.append(Open(child, [*own.text], child.id, [*own.rows]))

    def _rollback(self):
        if own := self._pick():
            tokens = self.rnd.randint(0, min(KEY, own.seq.tokens))
            self.cache.rollback(own.seq, tokens, self.now)
            del own.rows[own.seq.computed :]

    def _compact(self):
        if own := self._pick(lambda own: own.seq.held > 1):
            self.cache.compact(own.seq, self.rnd.randint(1, own.seq.held - 1), self.now)
            self.counts["compacted"] += 1

    def _compacted(self, seq, table, held):
        """Keep some tokens of a sequence, drawn at random."""
        (own,) = [own for own in self.open if own.seq is seq]
        kept = sorted(self.rnd.sample(range(held), seq.held))
        read = self.memory.read(table, held)
        own.rows = [read[index] for index in kept]
        table = self.cache.block_table(seq)
        self.memory.clear(table)
        self.memory.write(table, 0, own.rows)

    def _copied(self, source, target):
        self.memory.copy(source, target)
        self.counts["copied"] += 1

    # Checks.

    def check(self):
        """Check that all that can be read is right."""
        cache, memory = self.cache, self.memory
        cache.check_integrity()
        assert len(cache.sequences) == len(self.open) + sum(
            getattr(load, "ahead", False) for load in self.loads
        )
        for own in self.open:
            seq = own.seq
            assert len(own.rows) == seq.computed
            table = cache.block_table(seq)
            assert len(table) == seq.blocks - seq.dropped
            held = own.held
            assert len(held) == seq.held
            assert memory.read(table, len(held)) == held
        for block, tokens in self._cached(cache.tree):
            assert memory.pool[block] == tokens
        for level, slots in memory.slots.items():
            for slot, tokens in self._cached(level.tree):
                assert slots[slot] == tokens
            assert all(slots[slot] is None for slot in level.pool.free_ids())
            for request, holder in level.parked.items():
                first = holder.span.end * self.size
                tokens = [token for slot in holder.private for token in slots[slot]]
                tokens = tokens[: holder.tokens - first]
                assert tokens == self.texts[request][first : holder.tokens]
