"""The conformance tests of tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from io import BytesIO
from random import Random
from typing import Any, ClassVar

import attrs
import orjson
import pytest

from kvcore.cache import KVCache
from kvcore.cache import Sequence as CacheSequence
from kvcore.cache.tiers import StoredBlock, Tier, TierStore
from kvcore.errors import InputError, OutOfBlocks
from kvcore.request import Key, Request
from kvcore.trace import Trace
from kvcore.units import NS_PER_S
from kvcore_testing.harness import Traffic, random_requests
from kvcore_testing.plugin import PluginTests
from kvcore_tiers.hierarchy import Load, Tiers
from kvcore_tiers.level import Level

_BLOCK = 4
_OPEN = 4
_SLOT = 1000
"""Bytes of a block."""
_TRAFFIC = Traffic(key_tokens=_BLOCK, hints=True, most_keys=8, width=3, longest_wait=10**8)
_RULES = [
    {"write": write, "keep": keep, "load": load}
    for write in ("evict", "through", 1, 2)
    for keep in ("inclusive", "exclusive")
    for load in ("cost", "always", "never")
]

_SLOTS = 9
_IDENTITY = b"a model"

Piece = tuple[bytes, Callable[[bytes], object]]
"""Stored bytes of a block, and a function that overwrites them."""


class TierStoreTests:
    """Tests of the bytes that a tier stores; skipped for a tier of simulations alone.

    Whatever the order of slots and calls, a block that is read is the one that was written
    last for the same chain, or is missing. If a store outlives its run (`survives`), a later
    store finds its blocks, and none of another model. The tests damage the bytes that
    `pieces` yields; a kit whose slots are memory of the process says `unchecked = True`.
    """

    survives: ClassVar[bool] = False
    """Whether `recover` finds the blocks of a store that was closed before."""

    unchecked: ClassVar[bool] = False
    """Whether damage is not tested: its slots are memory of the process."""

    store: TierStore
    """The store that was opened last."""

    def make(self, **options: Any) -> Tier:
        """Return a new tier; tiers of one test share storage that outlives a run."""
        raise NotImplementedError

    def pieces(self, block: StoredBlock) -> Iterable[Piece]:
        """Yield the stored bytes of `block`, none by default. Called while a store is open."""
        return ()

    def open(self, slots: int = _SLOTS, size: int = _SLOT, identity: bytes = _IDENTITY) -> Any:
        """Return a store of a new tier, which a `with` block closes."""
        tier = self.make(memory=slots * size)
        if type(tier).open is Tier.open:
            pytest.skip("stores no bytes: it is for simulations alone")
        self.store = tier.open(slots, size, identity)
        return closing(self.store)

    def test_reads_written_blocks(self) -> None:
        """Blocks in any slots are read as they were written, in any order."""
        blocks = _path(5, slots=[3, 4, 8, 1, 0])
        with self.open() as store:
            _write(store, blocks)
            for asked in (blocks, blocks[::-1], blocks[1:2]):
                _check_read(store, asked)

    def test_takes_a_matrix(self) -> None:
        """`write` and `read` accept a matrix with a row for each block."""
        blocks = _path(4)
        with self.open() as store:
            data = bytearray(_data(blocks))
            store.write(blocks, memoryview(data).cast("B", (4, _SLOT)))
            data[:] = bytes(len(data))
            into = memoryview(bytearray(4 * _SLOT)).cast("B", (4, _SLOT))
            assert store.read(blocks, into) == 4  # noqa: PLR2004 - all of them
            _check_read(store, blocks)
            assert into.tobytes() == _data(blocks), "a matrix was not filled as its bytes are"

    def test_memory_is_that_of_the_slots(self) -> None:
        """Rows of `memory`, if a store has it, are slots, and can be written."""
        blocks = _path(4)
        with self.open() as store:
            memory = store.memory
            if memory is None:
                pytest.skip("its slots are not in memory of this process: memory is None")
            assert memory.shape == (_SLOTS, _SLOT)
            assert not memory.readonly
            _write(store, blocks)
            rows = [memory[block.slot : block.slot + 1].tobytes() for block in blocks]
            assert b"".join(rows) == _data(blocks)
            memory[blocks[1].slot : blocks[1].slot + 1].cast("B")[:] = rows[0]
            assert _read(store, blocks) == b"".join([rows[0], rows[0], *rows[2:]])

    def test_empty_calls_do_nothing(self) -> None:
        """Calls without blocks do nothing; a slot that was never written has no block."""
        empty = memoryview(bytearray())
        with self.open() as store:
            store.write([], empty)
            store.drop([])
            assert (store.read([], empty), store.present([])) == (0, 0)
            _check_read(store, _path(2), [])

    @pytest.mark.parametrize("what", ["chain", "position"])
    def test_other_blocks_are_not_there(self, what: str) -> None:
        """A slot is read only for the block that was written to it."""
        blocks = _path(3)
        others: dict[str, Any] = {"chain": b"x" * 16, "position": 7}
        blocks_asked = [blocks[0], attrs.evolve(blocks[1], **{what: others[what]}), blocks[2]]
        with self.open() as store:
            _write(store, blocks)
            _check_read(store, blocks_asked, blocks[:1])
            moved = [attrs.evolve(block, slot=block.slot + 1) for block in blocks[:2]]
            _check_read(store, moved, [])

    def test_a_slot_holds_what_was_written_last(self) -> None:
        """A slot that is written again has the new block, and no longer the old one."""
        old, new = _path(3), _path(3, text=1)
        with self.open() as store:
            _write(store, old)
            _write(store, new[1:])
            _check_read(store, new[1:])
            _check_read(store, old, old[:1])

    def test_dropped_blocks_are_gone(self) -> None:
        """Blocks whose slots were dropped cannot be read; the others can."""
        blocks = _path(4)
        with self.open() as store:
            _write(store, blocks)
            store.drop([2, 3, 7])
            store.drop([2])
            _check_read(store, blocks, blocks[:2])
            _check_read(store, blocks[3:], [])
            _write(store, blocks[2:])
            _check_read(store, blocks)

    def test_present_counts_readable_blocks(self) -> None:
        """`present` counts all blocks if all are there, and never fewer than can be read."""
        blocks = _path(4)
        with self.open() as store:
            _write(store, blocks)
            assert store.present(blocks) == len(blocks)
            store.drop([2])
            assert store.present(blocks) in range(2, len(blocks) + 1)

    def test_closes_twice(self) -> None:
        """A second `close` does nothing."""
        with self.open() as store:
            store.close()

    def test_the_next_run_finds_its_blocks(self) -> None:
        """A new store recovers the blocks of the last one, if `survives`, else none.

        Dropped and overwritten blocks are not among them.
        """
        old, new = _path(6, slots=[0, 1, 2, 3, 4, 5]), _path(2, text=1, slots=[1, 7])
        with self.open() as store:
            _write(store, old)
            _write(store, new)
            store.drop([3])
        kept = [old[0], old[2], old[4], old[5], *new]
        with self.open() as store:
            recovered = list(store.recover())
            if not self.survives:
                assert not recovered
                return
            _check_same(recovered, kept)
            for block in recovered:
                _check_read(store, [block])
            store.drop([block.slot for block in recovered[:3]])
        with self.open() as store:
            _check_same(list(store.recover()), recovered[3:])

    def test_keys_come_back_as_they_were(self) -> None:
        """Integers, bytes and strings are recovered as keys of their type, if at all."""
        numbers, texts = [0, -5, 1 << 80, 1], ["", "é\n", "k" * 99, "1"]
        keys: list[Key] = [*numbers, *texts, b"", b"\0\xff" * 16, b"1"]
        blocks = _keyed(keys)
        with self.open(len(keys)) as store:
            _write(store, blocks)
            _check_read(store, blocks)
        with self.open(len(keys)) as store:
            recovered = list(store.recover())
            if self.survives:
                _check_same(recovered, blocks)

    def test_any_key_serves_its_run(self) -> None:
        """A block with a key that cannot be stored is read in this run at least."""
        keys: list[Key] = ["k" * 5000, (1, "two"), None, 10**3000]
        blocks = _keyed(keys)
        with self.open() as store:
            _write(store, blocks)
            _check_read(store, blocks)
        with self.open() as store:
            assert {block.key for block in store.recover()} <= set(keys)

    @pytest.mark.parametrize(
        "other", [{"identity": b"another model"}, {"size": _SLOT - 8}], ids=str
    )
    def test_blocks_of_another_model_are_not_used(self, other: dict[str, Any]) -> None:
        """A store for another model or layout finds no block, and changes none."""
        blocks = _path(3)
        with self.open() as store:
            _write(store, blocks)
        with self.open(**other) as store:
            assert not list(store.recover())
            into = memoryview(bytearray(3 * other.get("size", _SLOT)))
            assert store.read(blocks, into) == 0
            store.drop([0, 1, 2])
        with self.open() as store:
            recovered = list(store.recover())
            if self.survives:
                _check_same(recovered, blocks)
                _check_read(store, recovered[:1])

    @pytest.mark.parametrize("closed", [False, True], ids=["open", "reopened"])
    def test_flipped_bits_are_found(self, *, closed: bool) -> None:
        """A block with a flipped bit is missing or right, never wrong.

        Bits at both ends of each piece and every 97th are flipped, while the store is open and
        before it is opened again.
        """
        block = _path(1, slots=[5])[0]
        with self.open() as store:
            _write(store, [block])
            pieces = self._pieces(block)
            if not closed:
                _flip(pieces, lambda: [_read(store, [block])])
                _check_read(store, [block])
        if closed:
            _flip(pieces, lambda: self._recovered(block))

    @pytest.mark.parametrize("kept", [0, 1, 100, _SLOT - 1])
    def test_cut_pieces_are_found(self, kept: int) -> None:
        """A block of which only the first bytes are left is missing or right."""
        block = _path(1)[0]
        with self.open() as store:
            _write(store, [block])
            for piece, put in self._pieces(block):
                put(piece[:kept])
                assert _read(store, [block]) in {b"", _data([block])}
                put(piece)

    def _pieces(self, block: StoredBlock) -> list[Piece]:
        """Return the stored bytes of `block`; the test skips where they are `unchecked`."""
        if self.unchecked:
            pytest.skip("it says unchecked = True: damage is not tested")
        pieces = list(self.pieces(block))
        assert pieces, (
            "pieces() yields nothing, so that damage is not tested: let it yield the stored "
            "bytes of a block and what overwrites them (a store checks what it reads), or say "
            "unchecked = True if nobody else can write to its slots"
        )
        return pieces

    def _recovered(self, only: StoredBlock) -> list[bytes]:
        """Return the bytes that a new store reads of the one block that was stored."""
        with self.open() as store:
            recovered = list(store.recover())
            assert _texts(recovered) <= _texts([only]), "another block was recovered"
            return [_read(store, [block]) for block in recovered]

    @pytest.mark.parametrize("seed", range(5))
    def test_random_calls(self, seed: int) -> None:
        """Through random writes, drops and reopenings, blocks are those written last."""
        random = Random(seed)  # noqa: S311
        stored: dict[int, StoredBlock] = {}
        once, serial = self.open, 0
        while serial < 60:  # noqa: PLR2004 - some seconds at most
            with once() as store:
                recovered = {block.slot: block for block in store.recover()}
                _check_same(
                    list(recovered.values()), list(stored.values()) if self.survives else []
                )
                stored = recovered
                for _ in range(random.randrange(12)):
                    slots = random.sample(range(_SLOTS), random.randint(1, 4))
                    if random.random() < 0.3:  # noqa: PLR2004
                        store.drop(slots)
                        gone = [stored.pop(slot) for slot in slots if slot in stored]
                        assert not any(_read(store, [block]) for block in gone), (
                            "a block was read after drop() of its slot"
                        )
                    else:
                        blocks = [
                            attrs.evolve(_path(1, text=serial + n)[0], slot=slot)
                            for n, slot in enumerate(slots)
                        ]
                        serial += len(blocks)
                        _write(store, blocks)
                        stored.update(zip(slots, blocks, strict=True))
                    asked_slots = random.sample(sorted(stored), len(stored))
                    _check_read(store, [stored[slot] for slot in asked_slots])
                serial += 1


def _path(
    blocks: int, *, text: int = 0, slots: Sequence[int] | None = None
) -> list[StoredBlock]:
    """Return the first blocks of a prompt, in slots from 0 on if none are given."""
    chains = [b"", *(b"%8d%8d" % (text, index) for index in range(blocks))]
    return [
        StoredBlock(slot, index, f"{text}-{index}", chains[index + 1], chains[index])
        for index, slot in enumerate(slots or range(blocks))
    ]


def _keyed(keys: list[Key]) -> list[StoredBlock]:
    """Return the first block of a prompt for each key, in slots of their own."""
    return [attrs.evolve(_path(1, text=n)[0], slot=n, key=key) for n, key in enumerate(keys)]


def _data(blocks: Sequence[StoredBlock]) -> bytes:
    """Return the bytes of `blocks`, drawn from their chains."""
    return b"".join(Random(block.chain).randbytes(_SLOT) for block in blocks)  # noqa: S311


def _write(store: TierStore, blocks: Sequence[StoredBlock]) -> None:
    """Write blocks from memory that is overwritten at once, as that of a run is used again."""
    data = bytearray(_data(blocks))
    store.write(blocks, memoryview(data))
    data[:] = bytes(len(data))


def _read(store: TierStore, blocks: Sequence[StoredBlock]) -> bytes:
    """Return the bytes of the blocks that can be read, up to the first that cannot."""
    into = memoryview(bytearray(len(blocks) * _SLOT))
    return bytes(into[: store.read(blocks, into) * _SLOT])


def _check_read(
    store: TierStore, asked: Sequence[StoredBlock], there: Sequence[StoredBlock] | None = None
) -> None:
    """Check that `asked` are read as they were written, up to those that are `there`."""
    read, right = _read(store, asked), _data(asked if there is None else there)
    found, expected = len(read) // _SLOT, len(right) // _SLOT
    assert found == expected, (
        f"read() found {found} of {len(asked)} blocks, not {expected}: those before the first "
        "that is not in its slot, with the position and the chain that were written last"
    )
    assert read == right, (
        "read() gave other bytes than were written: the caller uses its memory again, so that "
        "write() must copy what it keeps (bytes(data), no view), and read() fill whole rows"
    )


def _check_same(recovered: list[StoredBlock], kept: list[StoredBlock]) -> None:
    """Check that two lists have the same blocks, each once; their slots may differ."""
    assert len({block.slot for block in recovered}) == len(recovered), "a slot has two blocks"
    assert _texts(recovered) == _texts(kept), (
        "recover() must give the blocks that the last store had, and none that were dropped, "
        "overwritten or of another model (none at all unless the kit says survives = True)"
    )


def _texts(blocks: list[StoredBlock]) -> set[tuple[Any, ...]]:
    return {(b.position, type(b.key), b.key, b.chain, b.parent) for b in blocks}


def _flip(pieces: list[Piece], read: Callable[[], list[bytes]]) -> None:
    """Flip bits of each piece, one at a time; check the blocks that are read then."""
    right = {b"", _data(_path(1, slots=[5]))}
    for piece, put in pieces:
        assert piece, "pieces() yields a piece without bytes"
        last = 8 * len(piece) - 1
        for bit in {*range(0, last, 97), *range(8), last}:
            wrong = bytearray(piece)
            wrong[bit // 8] ^= 1 << bit % 8
            put(bytes(wrong))
            assert set(read()) <= right, f"bit {bit} of {len(piece)} bytes was not noticed"
            put(piece)


class TierTests(TierStoreTests, PluginTests[Tier]):
    """Conformance tests of a tier; a derived `Test...` class makes the tier.

    `tier` is called with options by name, `memory` among them, and returns a new tier:

        class TestMine(TierTests):
            tier = Mine

    The tests check its options, its times and its decisions in simulations, and whether the
    header of a trace is enough to make it again; those of `TierStoreTests` check its bytes.
    """

    base = Tier
    tier: ClassVar[Callable[..., Tier]]

    def make(self, **options: Any) -> Tier:
        """Return a new tier with these options; without `memory`, with that of 12 slots."""
        return type(self).tier(**({"memory": 12 * _SLOT} | options))

    # The tier in simulations.

    @pytest.mark.parametrize(
        "wrong",
        [
            {"memory": 0},
            {"memory": -1},
            {"read_bandwidth": 0},
            {"write_bandwidth": 0},
            {"latency": -1.0},
            {"max_wait": -1.0},
            {"write": "never"},
            {"write": 0},
            {"keep": "both"},
            {"load": "sometimes"},
        ],
        ids=str,
    )
    def test_impossible_options_are_refused(self, wrong: dict[str, Any]) -> None:
        """An impossible size, rate, time or rule is an InputError that names the option."""
        with pytest.raises(InputError, match=next(iter(wrong))):
            self.make(**wrong)

    def test_sizes_have_units(self) -> None:
        """Memory and bandwidths may be text with a unit, and become bytes."""
        tier = self.make(memory="2KiB", read_bandwidth="3GB", write_bandwidth="4MB")
        sizes = tier.memory, tier.read_bandwidth, tier.write_bandwidth
        assert sizes == (2048, 3 * 10**9, 4 * 10**6)

    def test_slots_are_whole_blocks_of_all_layers(self) -> None:
        """There is a slot for each block, of all layers, that fits into `memory`."""
        (level,) = Tiers(KVCache(4), [self.make(memory=5 * _SLOT - 1)], _SLOT).levels
        assert (level.pool.blocks + 1) * _SLOT == 5 * _SLOT
        with pytest.raises(InputError, match="less than a block"):
            Tiers(KVCache(4), [self.make(memory=_SLOT - 1)], _SLOT)

    def test_serves_one_run(self) -> None:
        """A second cache with the same tier is an InputError."""
        tier = self.make()
        Tiers(KVCache(4), [tier], _SLOT)
        with pytest.raises(InputError):
            Tiers(KVCache(4), [tier], _SLOT)

    def test_header_rebuilds_the_tier(self) -> None:
        """The options in the header of a trace make an equal tier."""
        out = BytesIO()
        trace = Trace(out)
        tier = self.make(eviction="lfu:half_life=3", write=2)
        Tiers(KVCache(4, trace=trace), [tier], _SLOT)
        trace.close()
        (said,) = orjson.loads(out.getvalue().splitlines()[0])["tiers"]
        slots = int(tier.memory) // _SLOT
        assert (said["name"], said["slots"], said["slot_bytes"]) == (tier.name, slots, _SLOT)
        assert type(tier)(**said["options"]).options() == tier.options()

    @pytest.mark.parametrize("blocks", [1, 7])
    def test_a_load_takes_latency_and_bytes_over_bandwidth(self, blocks: int) -> None:
        """A transfer on a free link takes its latency plus bytes over bandwidth."""
        tier = self.make()
        link = Tiers(KVCache(4), [tier], _SLOT).levels[0].link
        size, latency = blocks * 10**6, round(tier.latency * NS_PER_S)
        for rate, duration_of, queued in (
            (int(tier.read_bandwidth), link.load_ns, link.load),
            (int(tier.write_bandwidth), link.store_ns, link.store),
        ):
            now = link.free_at
            took = -(-size * NS_PER_S // rate) + latency
            assert duration_of(size, now) == took
            assert queued(size, now) == now + took

    @pytest.mark.parametrize(
        "rules", _RULES, ids=lambda rules: "-".join(map(str, rules.values()))
    )
    def test_random_traffic(self, rules: dict[str, Any]) -> None:
        """With any rules, tier and cache keep their invariants, and a second run is equal."""
        once, again = (_Traffic(self.make(**rules)).run(_RULES.index(rules)) for _ in range(2))
        assert once == again, "run again, it decided otherwise"

    def test_stored_blocks_are_found(self) -> None:
        """Blocks that the pool has evicted are found in the tier, and loaded."""
        traffic = _Traffic(self.make(memory=100 * _SLOT, load="always"))
        for index, first in enumerate((9, 18, 27, 36, 9)):
            keys = range(first, first + 4)
            traffic.serve(
                Request(id=index, prompt_tokens=4 * _BLOCK + 1, keys=keys, key_tokens=_BLOCK)
            )
        loaded = traffic.level.stats.loaded
        assert (loaded, traffic.level.link.read_bytes) == (4, 4 * _SLOT)


class _Traffic:
    """Serves random requests in a small cache above one tier, several at a time.

    The integrity of both is checked after each step.
    """

    def __init__(self, tier: Tier) -> None:
        self.cache = KVCache(12, _BLOCK, accounting="tokens")
        self.tiers = Tiers(self.cache, [tier], _SLOT)
        self.now = 0
        self.opened: list[tuple[CacheSequence, Load | None]] = []

    @property
    def level(self) -> Level:
        """Return the level of the tier."""
        return self.tiers.levels[0]

    def run(self, seed: int) -> list[tuple[int, ...]]:
        """Serve random requests; return the decisions on each."""
        random = Random(seed)  # noqa: S311
        decided: list[tuple[int, ...]] = []
        for request in random_requests(seed, 60, _TRAFFIC):
            self.now = max(self.now, request.arrival)
            while not self.open(request) and self.opened:
                self.close(random.randrange(len(self.opened)))
            if len(self.opened) == _OPEN:
                self.close(random.randrange(len(self.opened)))
            stats, link = self.level.stats, self.level.link
            decided.append((
                stats.stored, stats.found, stats.loaded, stats.skipped, stats.refused,
                link.free_at, self.level.pool.free_blocks, self.cache.pool.free_blocks,
            ))  # fmt: skip
        while self.opened:
            self.close(0)
        moved = stats.stored * _SLOT, stats.loaded * _SLOT
        assert (link.written_bytes, link.read_bytes) == moved
        used = self.level.pool.blocks - self.level.pool.free_blocks
        assert stats.stored - sum(stats.dropped.values()) == used
        return decided

    def serve(self, request: Request) -> None:
        """Serve `request` by itself."""
        assert self.open(request)
        self.close(0)

    def open(self, request: Request) -> bool:
        """Open `request`, and start to load its misses; return False for lack of room."""
        try:
            seq = self.cache.open(request, None, self.now)
        except OutOfBlocks:
            return False
        load = self.tiers.load(seq, self.now, lambda tokens, _: tokens * 10**6)
        self.opened.append((seq, load))
        self.cache.check_integrity()
        return True

    def close(self, number: int) -> None:
        """Finish the load of an open request, compute the rest, and close it."""
        seq, load = self.opened.pop(number)
        if load is not None:
            self.now = max(self.now, load.ready)
            computed = self.tiers.finish(load, self.now)
            assert computed == load.tokens
            self.cache.check_integrity()
        self.cache.commit(seq, seq.tokens - seq.computed, self.now)
        self.cache.close(seq, self.now)
        self.cache.check_integrity()
