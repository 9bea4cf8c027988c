"""Runs on tensors whose blocks move to tiers and back generate the same text as without."""

from threading import Event
from threading import enumerate as threads
from typing import ClassVar

import attrs
import pytest
from helpers.engine import CODECS, SPEC, Exact, Slots, compute, slot_bytes_of
from helpers.serving import ask

from kvcore import InputError, KVCache, PolicyError, run
from kvcore.cache.tiers import StoredBlock, Tier, TierStore
from kvcore.plugins import resolve
from kvcore_engine import mover as engine_tiers
from kvcore_engine.executor import tensor_layout
from kvcore_replay.check.trace import check_trace
from kvcore_tiers.hierarchy import Tiers

MODEL = "transformer:layers=2,hidden=16,heads=2,kv_heads=1,head_dim=8,mlp=16,vocab_size=64"


def sessions(turns=3, users=4, prompt=40, output=9, gap=400):
    """Return requests of users whose prompts extend their earlier prompts."""
    found = []
    for turn in range(turns):
        for user in range(users):
            blocks = (prompt * (turn + 1)) // 4
            keys = [user * 1000 + index for index in range(blocks)]
            at = (turn * users + user) * gap
            found.append(ask(len(found), at, 4 * blocks, output, keys=keys))
    return found


def tier(name="host", blocks=40, size=None, **options):
    """Return the option of a tier with this many slots that loads whenever it can."""
    size = slot_bytes_of(SPEC, 4) if size is None else size
    options = {"memory": blocks * size, "latency": 0, "load": "always"} | options
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())


def moved(run, column="loaded"):
    """Return how many blocks were loaded, by level."""
    return [getattr(level.stats, column) for level in run.result.cache.tiers.levels]


def coded(codec, blocks, **options):
    """Run eight requests that share prefixes on a model whose K/V a codec stores.

    Outputs end in a block after that of the end of the prompt.
    """
    requests = [
        ask(
            n,
            100 * n,
            prompt,
            8,
            keys=[*range(n % 4, 60, 10)][: -(-prompt // 16)],
            key_tokens=16,
        )
        for n in range(8)
        for prompt in [60 + 16 * (n % 3)]
    ]
    model = {"generator": MODEL, "backend": "torch-cpu", "codec": codec, "block_size": 16}
    return compute(requests, blocks=blocks, **model, **options)


@pytest.fixture(scope="module", params=CODECS)
def plain(request):
    """Return a codec, and the outputs of a run with it in a pool with room for everything.

    In that pool a swapped request resumes exactly, while one that is recomputed at once may
    read coded blocks that were not full before.
    """
    pytest.importorskip("torch", reason="K/V lies in tensors")
    return request.param, coded(request.param, 200, max_seqs=3).result.outputs


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [False, True], ids=["evicted", "swapped"])
def test_tiers_do_not_change_the_text(plain, swaps, tmp_path):
    """Loads and swaps with a small pool do not change the text, whatever the codec."""
    codec, outputs = plain
    size = slot_bytes_of(resolve("generator", MODEL).spec, 16, codec=codec)
    write = "through" if swaps else "evict"
    tiers = [
        tier("host", 9, size, write=write),
        tier("disk", 40, size, path=tmp_path, write=write),
    ]
    run = coded(codec, 9 if swaps else 14, max_seqs=3 if swaps else 1, tiers=tiers)
    assert run.result.outputs == outputs
    host, disk = moved(run)
    assert host
    assert disk
    assert sum(run.result.log.swaps) >= swaps
    assert moved(run, "errors") == [0, 0]


@pytest.mark.parametrize("write", ["through", 1])
@pytest.mark.parametrize("like", ["vllm", "vllm:lag=0"])
def test_tiers_keep_what_was_computed_under_rules_that_share_plans(like, write, tmp_path):
    """K/V that a run like vLLM has left on a disk is right, whenever it was written."""
    common = {"limit": 12, "shrink": 64, "block_size": 8, "blocks": 400, "dtype": "fp64"}
    disk = f"disk:path={tmp_path / 'kv'},memory=64MiB,load=always,write={write}"
    plain = run("mooncake", **common).outputs
    trace = tmp_path / "trace.jsonl"
    assert run("mooncake", **common, like=like, tier=[disk], trace=trace).outputs == plain
    assert check_trace(trace).complete
    later = run("mooncake", **common, tier=[disk])
    assert later.summary()["tiers"][0]["loaded_blocks"]
    assert later.outputs == plain


class Buffered(Slots):
    """A backend with buffers of its own for copies to and from the host."""

    name = "buffered"

    def host_buffer(self, blocks):
        """Return a buffer of the default kind."""
        return super().host_buffer(blocks)


MEMORY = {
    "memory": (["host"], Slots, {"host"}),
    "short runs": (["host"], Slots, {"host"}),
    "above a disk": (["host", "disk"], Slots, {"host"}),
    "above memory": (["host", "host"], Slots, {"host-1", "host-2"}),
    "below a disk": (["disk", "host"], Slots, set()),
    "of a backend with buffers": (["host"], Buffered, set()),
}


@pytest.mark.parametrize("write", ["evict", "through"])
@pytest.mark.parametrize("how", MEMORY)
def test_slots_in_memory_are_copied_without_a_thread(how, write, tmp_path, monkeypatch):
    """Slots of a memory tier next to the pool are copied without a thread.

    This holds for long and short runs of slots, and while loads and swaps are in progress.
    """
    names, backend, direct = MEMORY[how]
    called = set()
    serve = engine_tiers._Channel._serve

    def served(self):
        if self._queue[0].what != "close":
            called.add(self.level.name)
        serve(self)

    def has_long_runs(*_):
        return how != "short runs"

    monkeypatch.setattr(engine_tiers._Channel, "_serve", served)
    monkeypatch.setattr(engine_tiers._Channel, "has_long_runs", has_long_runs)
    monkeypatch.setattr(engine_tiers, "CHUNK_BYTES", 3 * slot_bytes_of(SPEC, 4))
    tiers = [
        tier(name, 45 + 30 * index, write=write, latency=2e-6)
        + (f",path={tmp_path}" if name == "disk" else "")
        for index, name in enumerate(names)
    ]
    requests, options = sessions(output=20, gap=100), {"blocks": 45, "max_seqs": 3}
    run = compute(requests, tiers=tiers, backend=backend(), **options)
    assert run.result.outputs == compute(requests, **options).result.outputs
    assert all(moved(run))
    assert called == {level.name for level in run.result.cache.tiers.levels} - direct
    # Blocks that the disk has evicted need not be in the memory below it.
    assert sum(run.result.log.swaps) or how == "below a disk"


@attrs.define(slots=False, eq=False, kw_only=True)
class Faulty(Tier):
    """A tier that keeps blocks in a dict, and whose calls fail as a test asks."""

    name: ClassVar[str] = "faulty"

    memory: int = 400 * slot_bytes_of(SPEC, 4)
    latency: float = 0
    load: str = "always"
    fault: str = "none"
    after: int = 0

    def open(self, slots, slot_bytes, identity):
        """Return the store."""
        del slots, identity
        self.opened = self.made(slot_bytes)
        return self.opened

    def made(self, size):
        """Make the store, unless a test replaces this method."""
        return FaultyStore(self, size)


class FaultyStore(TierStore):
    """A store whose calls fail after the first `after` ones."""

    def __init__(self, tier, size):
        self.tier, self.size = tier, size
        self.held, self.calls, self.closed = {}, 0, False
        self.go_on = Event()

    def _meet(self, fault):
        self.calls += 1
        return self.tier.fault == fault and self.calls > self.tier.after

    def write(self, blocks, data):
        """Keep the blocks."""
        if self._meet("full disk"):
            raise OSError(28, "No space left on device")
        if self._meet("hangs in write"):
            self.go_on.wait(20)
        rows = bytes(data)
        for index, block in enumerate(blocks):
            self.held[block.slot] = block, rows[index * self.size : (index + 1) * self.size]

    def read(self, blocks, into):
        """Return how many blocks were read."""
        if self._meet("unreadable"):
            raise OSError(5, "Input/output error")
        if self._meet("hangs in read"):
            self.go_on.wait(20)
        if self._meet("garbage"):
            return "yes"
        if self._meet("counts too many"):
            return len(blocks) + 1
        for index, block in enumerate(blocks):
            found, data = self.held.get(block.slot, (None, b""))
            if found != block or (self._meet("short") and index >= len(blocks) // 2):
                return index
            into.cast("B")[index * self.size : (index + 1) * self.size] = data
        return len(blocks)

    def present(self, blocks):
        """Return the number of blocks, or half of it with the fault "gone"."""
        if self._meet("fails in present"):
            raise OSError
        if self._meet("gone"):
            return len(blocks) // 2
        return len(blocks)

    def drop(self, slots):
        """Remove the blocks."""
        if self._meet("fails to drop"):
            raise RuntimeError
        for slot in slots:
            self.held.pop(slot, None)

    def close(self):
        """Record that the store was closed."""
        self.closed = True
        if self._meet("fails to close"):
            raise OSError


FAULTS = {
    "full disk": ("failed", True),
    "unreadable": ("failed", True),
    "garbage": ("failed", True),
    "counts too many": ("failed", True),
    "hangs in write": ("failed", True),
    "hangs in read": ("failed", True),
    "short": ("corrupt", False),
    "gone": ("gone", False),
    "fails to drop": (None, True),
    "fails to close": (None, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tier_does_not_change_the_text(fault, after, monkeypatch, tmp_path):
    """A fault is counted, its blocks have DROP lines, and the text does not change."""
    monkeypatch.setattr(engine_tiers, "FIRST_PAUSE", 0.0)
    requests, options = sessions(), {"blocks": 40, "max_seqs": 2}
    keep = "exclusive" if fault == "fails to drop" else "inclusive"
    faulty = Faulty(keep=keep, fault=fault, after=after, call_timeout=0.05)
    try:
        run = compute(requests, tiers=[faulty], **options)
    finally:
        faulty.opened.go_on.set()
    assert run.result.outputs == compute(requests, **options).result.outputs
    reason, counted = FAULTS[fault]
    (stats,) = (level.stats for level in run.result.cache.tiers.levels)
    assert bool(stats.errors) == counted
    dropped = [line for line in run.lines if line["event"] == "DROP"]
    if reason is not None:
        assert stats.dropped[reason] > 0
        assert stats.dropped[reason] == sum(
            line["blocks"] for line in dropped if line["reason"] == reason
        )
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(run.trace)
    assert check_trace(trace).complete


def test_a_late_read_overwrites_no_other_block():
    """The buffer of a read that is still in progress is not reused for another block."""
    above, below = Faulty(fault="hangs in read", call_timeout=0.05), Faulty()
    cache = KVCache(8, 4, accounting="tokens", key_tokens=4, ids=True)
    tiers = Tiers(cache, [above, below], above.memory // 400, ids=True)
    backend = Slots()
    backend.allocate(tensor_layout(SPEC, 8, 4, "fp32", None))
    mover = engine_tiers.TensorMover(tiers, backend, b"")
    seq = cache.open(ask(0, 0, 16, 1, keys=[1, 2, 3, 4]))
    cache.commit(seq, 16)
    first, second = tiers.levels
    first.store(seq.span, 4, 0, None)
    span = first.tree.root.children[1]
    second.store(span, 4, 0, first)
    late = mover._writes[-1].buffer
    mover._wait(lambda: mover._writes[-1].done)
    assert mover._room(mover._channels[second], 1) is not late
    above.opened.go_on.set()
    mover.close(whole=False)


def test_a_tier_that_failed_once_is_used_again(monkeypatch):
    """A tier that failed once is used again after its pause."""
    monkeypatch.setattr(engine_tiers, "FIRST_PAUSE", 0.0)
    flaky = Faulty(fault="unreadable")

    class Once(FaultyStore):
        def _meet(self, fault):
            met = super()._meet(fault)
            if met:
                self.tier.fault = "none"
            return met

    flaky.made = lambda size: Once(flaky, size)
    run = compute(sessions(), tiers=[flaky], blocks=40, max_seqs=2)
    (stats,) = (level.stats for level in run.result.cache.tiers.levels)
    assert stats.errors == 1
    assert run.result.cache.tiers.levels[0].stats.loaded > stats.dropped["failed"]


def test_a_tier_whose_present_fails_loses_no_block(monkeypatch):
    """A tier whose `present` fails loses no block: the error is counted, nothing dropped."""
    monkeypatch.setattr(engine_tiers, "FIRST_PAUSE", 1e6)
    faulty = Faulty(fault="fails in present", after=20)
    run = compute(sessions(), tiers=[faulty], blocks=40, max_seqs=2)
    (stats,) = (level.stats for level in run.result.cache.tiers.levels)
    assert (stats.errors, stats.dropped) == (1, {})


@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyboardInterrupt, KeyboardInterrupt), (PermissionError, PolicyError)],
)
def test_threads_end_and_stores_close_when_a_run_fails(error, raised):
    """After an error or Ctrl-C no thread of a tier is left, and its store is closed."""

    class Stops(Exact):
        name = "stops"
        steps = 0

        def forward(self, batch, attend):
            self.steps += 1
            if self.steps == 60:
                raise error
            return super().forward(batch, attend)

    faulty = Faulty()
    with pytest.raises(raised):
        compute(sessions(), tiers=[faulty], blocks=40, max_seqs=2, generator=Stops())
    assert faulty.opened.held
    assert faulty.opened.closed
    assert not [thread for thread in threads() if thread.name.startswith("kvcore tier")]


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"generator": Exact(ending=1)}, {"retention": "window:tokens=99"}]
)
def test_a_run_of_another_model_recovers_no_block(other, tmp_path):
    """A run with another generator, seed or retention policy recovers no block."""
    tiers = [tier("disk", 400, path=tmp_path, write="through")]
    compute(sessions(), tiers=tiers)
    run = compute(sessions(), tiers=tiers, **other)
    assert not run.result.cache.tiers.levels[0].stats.recovered


def test_the_identity_of_a_store_depends_on_the_kind_of_keys():
    """The identity of a store differs with the tokens of a key, and between texts and ids.

    The chain of a block differs between an integer key and a text.
    """
    backend = Slots()
    backend.allocate(tensor_layout(SPEC, 8, 4, "fp32", None))
    found = {
        engine_tiers.identity(KVCache(8, 4, key_tokens=size), Exact(), backend, 0, texts=texts)
        for size in (4, 8)
        for texts in (False, True)
    }
    assert len(found) == 4
    assert engine_tiers.chained(b"", 0, 1) != engine_tiers.chained(b"", 0, "1")


def moving(faulty):
    """Return the mover of a pool above a tier."""
    cache = KVCache(8, 4, accounting="tokens", key_tokens=4, ids=True)
    tiers = Tiers(cache, [faulty], faulty.memory // 400, ids=True)
    backend = Slots()
    backend.allocate(tensor_layout(SPEC, 8, 4, "fp32", None))
    return engine_tiers.TensorMover(tiers, backend, b"")


def told_pauses(caplog):
    """Return the seconds for which a tier is left alone, by its messages."""
    messages = [record.getMessage() for record in caplog.records]
    return [float(message.split(" for ")[1].split()[0]) for message in messages]


def test_pauses_grow_up_to_a_limit(caplog):
    """The pause doubles with each failure up to 60 s; a call that succeeds resets it."""
    mover = moving(Faulty())
    (channel,) = mover._channels.values()
    for _ in range(8):
        channel._fail("test")
        channel._again = 0.0  # its pause is over
    task = channel.submit(engine_tiers._Task("drop"))
    mover._wait(lambda: task.done and channel._running is None)
    channel._fail("test")
    mover.close(whole=True)
    assert told_pauses(caplog) == [1, 2, 4, 8, 16, 32, 60, 60, 1]


def test_calls_that_fail_within_a_pause_are_no_further_outage(caplog):
    """A call queued before a tier was left alone is counted; the pause gets no longer."""
    mover = moving(Faulty())
    (channel,) = mover._channels.values()
    for _ in range(5):
        channel._fail("test")
    mover.close(whole=False)
    assert (told_pauses(caplog), channel.level.stats.errors) == ([1], 5)


def test_recovered_blocks_without_their_prefix_are_dropped():
    """Recovered blocks that do not continue a chain from a first block are dropped."""

    def blocks(_):
        first = StoredBlock(3, 0, 7, engine_tiers.chained(b"", 0, 7), b"")
        chain = engine_tiers.chained(first.chain, 1, 8)
        second = StoredBlock(1, 1, 8, chain, first.chain)
        yield second
        yield first
        yield attrs.evolve(second, slot=0)
        yield StoredBlock(5, 2, 9, engine_tiers.chained(b"x" * 16, 2, 9), b"x" * 16)
        yield StoredBlock(6, 1, 9, b"y" * 16, first.chain)
        yield attrs.evolve(first, slot=10**6)

    class Left(FaultyStore):
        dropped: ClassVar[list[int]] = []
        recover = blocks

        def drop(self, slots):
            self.dropped += slots

    kept = Faulty()
    kept.made = lambda size: Left(kept, size)
    run = compute([], tiers=[kept])
    (level,) = run.result.cache.tiers.levels
    assert level.stats.recovered == 2
    assert Left.dropped[:3] == [0, 5, 6]
    (span,) = level.tree.spans()
    assert (list(span.ids), list(span.path_keys)) == ([3, 1], [7, 8])
    level.check_integrity()


def test_a_tier_that_hangs_when_recovered_blocks_are_dropped_costs_a_timeout():
    """A store that hangs in its first `drop` holds up a run for `call_timeout`, and no more."""
    go_on, returned = Event(), []

    class Hangs(FaultyStore):
        def recover(self):
            yield StoredBlock(0, 0, 7, b"y" * 16, b"")

        def drop(self, slots):
            go_on.wait(20)
            returned.extend(slots)

    slow = Faulty(call_timeout=0.05)
    slow.made = lambda size: Hangs(slow, size)
    try:
        (level,) = compute([], tiers=[slow]).result.cache.tiers.levels
        assert (level.stats.errors, level.stats.recovered, returned) == (1, 0, [])
    finally:
        go_on.set()


def test_a_second_close_waits_for_nothing():
    """Closing twice closes the stores once, and a drop after that is not queued."""
    faulty = Faulty()
    mover = moving(faulty)
    (channel,) = mover._channels.values()
    mover.close(whole=True)
    calls = faulty.opened.calls
    late = channel.submit(engine_tiers._Task("drop"))
    mover.close(whole=True)
    mover.close(whole=False)
    assert (faulty.opened.calls, late.failed, len(channel._queue)) == (calls, True, 0)


@pytest.mark.parametrize("where", ["open", "recover"])
def test_a_tier_that_hangs_when_it_is_opened_is_refused(where):
    """A tier that hangs while it is opened is refused after `call_timeout`."""
    go_on = Event()

    class Hangs(FaultyStore):
        def recover(self):
            yield StoredBlock(0, 0, 7, engine_tiers.chained(b"", 0, 7), b"")
            go_on.wait(20)

    def made(size):
        if where == "open":
            go_on.wait(20)
        return Hangs(slow, size)

    slow = Faulty(call_timeout=0.05)
    slow.made = made
    try:
        with pytest.raises(
            InputError, match=r"has not answered for 0\.05 s while it was opened"
        ):
            compute([], tiers=[slow])
    finally:
        go_on.set()


def test_a_backend_that_cannot_copy_bytes_is_refused():
    """A backend without `read_blocks` and `write_blocks` is refused together with tiers."""

    class Dumb(Slots):
        name = "dumb"

    for name in ("read_blocks", "write_blocks"):
        setattr(Dumb, name, getattr(Slots.__mro__[1], name))
    with pytest.raises(
        InputError, match="backend 'dumb' does not give the bytes of its blocks"
    ):
        compute(sessions(), tiers=[tier()], backend=Dumb())


@pytest.mark.parametrize(
    ("size", "ids", "reason"), [(1, True, "slots of 1 bytes"), (64, False, "only count slots")]
)
def test_tiers_of_another_shape_are_refused(size, ids, reason):
    """A run refuses tiers with slots of another size than its blocks, or without ids."""
    cache = KVCache(40, 4, accounting="tokens", key_tokens=4, ids=True)
    Tiers(cache, [tier()], size, ids=ids)
    with pytest.raises(InputError, match=reason):
        run([], cache=cache, generator=Exact(), backend=Slots())


def test_a_late_load_lengthens_its_step_under_the_wall_clock():
    """Under the wall clock a slow load lengthens the step that needs it."""
    slow = Faulty(write="through")

    class Slow(FaultyStore):
        def read(self, blocks, into):
            Event().wait(0.05)
            return super().read(blocks, into)

    slow.made = lambda size: Slow(slow, size)
    first, again = (ask(n, n * 10**9, 40, 1, keys=[*range(10)]) for n in range(2))
    other = ask(5, 5, 120, 1)
    run = compute([first, other, attrs.evolve(again)], tiers=[slow], blocks=30, clock="wall")
    assert moved(run) == [9]
    assert max(step.time for step in run.result.steps) >= 5 * 10**10


def test_a_refused_tier_closes_the_tiers_before_it(tmp_path):
    """If the second tier is refused, the first is closed and its directory released."""
    one = tier("disk", 40, path=tmp_path)
    with pytest.raises(InputError, match="is in use by this process: each tier needs its own"):
        compute(sessions(), tiers=[one, one])
    assert not [thread for thread in threads() if thread.name.startswith("kvcore tier")]
    assert compute(sessions(), tiers=[one]).result.outputs
