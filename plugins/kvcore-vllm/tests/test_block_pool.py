"""vLLM's block pool with a hosted policy, under vLLM's own managers and scheduler."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from warnings import catch_warnings

import attrs
import pytest
from helpers.block_pools import SIZE, CachePool, HostPool, conversations, serve
from helpers.commands import run_here
from helpers.engines import required
from helpers.step_lists import conversation, encode, first_difference, random_server

from kvcore import InputError
from kvcore_plugins import eviction as builtin
from kvcore_replay.check.trace import check_trace

required("vllm")
with catch_warnings(action="ignore"):  # warnings of vLLM's imports
    import torch
    from helpers import vllm_engine
    from helpers.vllm_pool import VllmPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.request import RequestStatus

    import kvcore_vllm
    from kvcore_hosting import HostSettings
    from kvcore_vllm.block_pool import host_blocks

LRU = builtin.LRU
POLICIES = sorted({getattr(builtin, name).name for name in builtin.__all__} | {"ttl:ttl=5"})
HOOKS = ("victim", "on_insert", "on_access", "on_pin", "on_release", "on_remove", "on_end")


@pytest.mark.parametrize("blocks", [2048, 8192, 32_768])
@pytest.mark.slow
def test_lru_evicts_in_vllms_own_order(blocks):
    """`lru` evicts as vLLM does over the whole trace: in vLLM's pool, a host and a KVCache."""
    own = VllmPool(None, blocks)
    wanted = serve(own, conversations())
    assert own.hashes.duplicates == wanted.refused == 0
    assert wanted.evicted > 100_000
    for pool in VllmPool("lru", blocks), HostPool("lru", blocks), CachePool("lru", blocks):
        assert serve(pool, conversations()).decisions() == wanted.decisions()


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_policy_decides_as_in_kvcore(eviction):
    """A policy hits and evicts the same blocks in vLLM, in a host, and in a replay."""
    requests = [*conversations(400)]
    pools = [kind(eviction, 1000) for kind in (VllmPool, HostPool, CachePool)]
    inside, hosted, replayed = (serve(pool, requests).decisions() for pool in pools)
    assert inside == hosted == replayed
    assert inside[1] > 5_000
    assert pools[0].host.failures == 0


def test_compared_policies_evict_differently():
    """The compared policies evict differently: more than eight digests differ."""
    requests = [*conversations(400)]
    found = {serve(HostPool(eviction, 1000), requests).digest for eviction in POLICIES}
    assert len(found) > 8


def test_a_block_computed_twice_is_cached_and_evicted_twice():
    """A last block that is computed twice is cached twice and evicted twice, as in vLLM."""
    requests = [
        attrs.evolve(each, id=f"{each.id}.{time}", prompt_tokens=len(each.keys) * SIZE)
        for each in conversations(300)
        for time in range(2)
        if each.keys
    ]
    own, hosted = VllmPool(None, 1500), VllmPool("lru", 1500)
    assert serve(own, requests).decisions() == serve(hosted, requests).decisions()
    assert own.hashes.duplicates > 100
    assert len(hosted.left) > len({*hosted.left})


# vLLM's scheduler.

SERVERS = [
    *(conversation(400, 512, lag, 120) for lag in (0, 1)),
    *map(random_server, (1, 10, 14, 35, 1113)),
]


def hosted_run(server, monkeypatch, eviction="lru", trace=None):
    """Serve with a hosted policy; return the driver and the outcome."""
    monkeypatch.setenv("KVCORE_EVICTION", eviction)
    if trace is not None:
        monkeypatch.setenv("KVCORE_TRACE", str(trace))
    kind = kvcore_vllm.Scheduler if server.lag else kvcore_vllm.SyncScheduler
    driver = vllm_engine.Driver(server, kind)
    return driver, driver.run()


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_steps_are_those_of_vllm(server, monkeypatch):
    """With `lru`, every step of the scheduler computes the same as in vLLM without kvcore."""
    wanted = vllm_engine.run(server)
    driver, found = hosted_run(server, monkeypatch)
    assert first_difference(encode(found.steps), encode(wanted.steps)) is None
    assert (found.duplicates, found.over) == (wanted.duplicates, wanted.over)
    pool = driver.scheduler.kv_cache_manager.block_pool
    host = pool.free_block_queue.host
    assert host.failures == 0
    assert (
        host.evictable
        == len(host)
        == sum(block.block_hash is not None for block in pool.blocks)
    )
    assert not driver.scheduler.kv_cache_manager.known


def test_other_policies_make_other_steps(monkeypatch):
    """Under `mru` the steps differ from vLLM's, so the comparison of steps can fail."""
    server = random_server(10)
    wanted, found = vllm_engine.run(server), hosted_run(server, monkeypatch, "mru")[1]
    assert first_difference(encode(found.steps), encode(wanted.steps)) is not None


@pytest.mark.parametrize("hook", HOOKS)
def test_a_policy_that_fails_leaves_vllms_order(hook, monkeypatch):
    """If any hook of a policy raises, no step changes: vLLM's own order of eviction is used."""

    class Failing(LRU):
        name, left = "failing", 9

        def fail(self, *args, **more):
            Failing.left -= 1
            if Failing.left < 0:
                raise ZeroDivisionError
            own = getattr(LRU, hook, None)
            return own(self, *args, **more)

    setattr(Failing, hook, Failing.fail)
    monkeypatch.setattr(HostSettings, "build", lambda _: Failing())
    server = random_server(35)
    driver, found = hosted_run(server, monkeypatch)
    assert driver.scheduler.kv_cache_manager.block_pool.free_block_queue.host.failures == 1
    wanted = vllm_engine.run(server)
    assert first_difference(encode(found.steps), encode(wanted.steps)) is None


def test_hooks_of_requests_are_called(monkeypatch):
    """Hooks of requests are called once per request; those of the queue, per preemption too.

    `on_queued` and `on_end` are called once per request, `on_miss` at most once. Each
    preemption adds one `on_queued` with `front=True` and one `on_dequeued`.
    """
    calls = Counter()

    class Recording(LRU):
        name = "hearing"

        def on_queued(self, request, now, *, front=False):
            calls["front" if front else "queued", request.id] += 1

        def on_dequeued(self, request, now):
            calls["dequeued", request.id] += 1

        def on_end(self, request, now):
            calls["end", request.id] += 1

        def on_miss(self, request, hit_blocks, now):
            calls["miss", request.id] += 1

    monkeypatch.setattr(HostSettings, "build", lambda _: Recording())
    server = random_server(14)
    _, found = hosted_run(server, monkeypatch)
    preempted = found.over + sum(len(step.preempted) for step in found.steps)
    assert preempted > 100
    kinds = Counter()
    for (kind, _), count in calls.items():
        kinds[kind] += count
    count = len({name for kind, name in calls if kind == "queued"})
    assert kinds["queued"] == kinds["end"] == count
    assert kinds["front"] == preempted
    assert kinds["dequeued"] == count + preempted
    assert max(count for (kind, _), count in calls.items() if kind == "miss") == 1


def test_evictions_are_recorded(tmp_path):
    """The recording has vLLM's digest of evictions, and `kvcore replay` accepts it."""
    pool = VllmPool("s3fifo", 1500, trace=tmp_path / "pool.jsonl")
    outcome = serve(pool, conversations(300))
    recorder = pool.manager.block_pool.recorder
    recorder.close()
    assert recorder.failure is None
    assert not recorder.disagreements
    assert recorder.evictions.hexdigest == outcome.digest
    run = run_here("replay", tmp_path / "pool.jsonl")
    assert run.returncode == 0, run.stderr
    assert outcome.digest[:16] in run.stdout


def test_blocks_that_expire_are_recorded(tmp_path):
    """Blocks leave the recording when they expire, and `kvcore replay` accepts it."""
    path = tmp_path / "pool.jsonl"
    pool = VllmPool("ttl:ttl=0.5", 1500, trace=path)
    serve(pool, conversations(300), together=1)
    recorder = pool.manager.block_pool.recorder
    recorder.close()
    assert not recorder.disagreements
    assert '"reason":"expired"' in path.read_text()
    assert run_here("replay", path).returncode == 0


def test_a_scheduler_closes_its_recording(monkeypatch, tmp_path):
    """`shutdown` completes a recording with all preemptions, and `kvcore replay` accepts it."""
    path, server = tmp_path / "served.jsonl.gz", random_server(35)
    driver, found = hosted_run(server, monkeypatch, "arc", path)
    driver.scheduler.shutdown()
    recorder = driver.scheduler.kv_cache_manager.block_pool.recorder
    assert recorder.failure is None
    assert not recorder.disagreements
    report = check_trace(path)
    assert report.complete
    assert report.requests == report.finished == len(server.requests)
    preempted = found.over + sum(len(step.preempted) for step in found.steps)
    assert report.preemptions == {"pause": 0, "recompute": preempted, "swap": 0}
    assert preempted > 100
    run = run_here("replay", path)
    assert run.returncode == 0, run.stderr


# Configurations that are refused at the start.


def test_prefix_caching_must_be_on():
    """Without prefix caching, InputError names the option that enables it."""
    manager = vllm_engine.cache_manager(64, 16, enable_caching=False)
    with pytest.raises(InputError, match=r"prefix caching is off.*--enable-prefix-caching"):
        host_blocks(manager, HostSettings())


def test_only_full_attention_is_hosted():
    """A pool with sliding windows raises InputError that names the unsupported manager."""
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float16, sliding_window=64
    )
    config = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], window)])
    manager = KVCacheManager(config, 1024, 16, 16)
    with pytest.raises(InputError, match=r"SlidingWindowManager.*full attention.*vLLM's own"):
        host_blocks(manager, HostSettings())


@pytest.mark.parametrize("lag", [0, 1])
def test_a_scheduler_class_refuses_the_other_kind_of_scheduling(lag):
    """The sync scheduler refuses async scheduling and vice versa, and names the other class."""
    server = conversation(64, 512, lag, 1)
    kinds = kvcore_vllm.Scheduler, kvcore_vllm.SyncScheduler
    with pytest.raises(
        InputError, match=f"--scheduler-cls kvcore_vllm.{kinds[1 - lag].__name__}"
    ):
        vllm_engine.make_scheduler(server, kinds[lag])


def test_a_connector_that_reads_ahead_is_refused(monkeypatch):
    """A connector with `lazy_offload`, which reads the order ahead, raises InputError."""
    server = conversation(64, 512, 1, 1)
    made = vllm_engine.VllmConfig

    def config(**options):
        found = made(**options)
        extra = {"lazy_offload": True}
        found.kv_transfer_config = SimpleNamespace(kv_connector_extra_config=extra)
        return found

    monkeypatch.setattr(vllm_engine, "VllmConfig", config)
    with pytest.raises(InputError, match="lazy_offload=false"):
        vllm_engine.make_scheduler(server, kvcore_vllm.Scheduler)


def test_an_unknown_name_is_refused():
    """`kvcore_vllm` raises AttributeError for a name that it does not have."""
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvcore_vllm.Nothing


# Operations of the queue of free blocks.


@pytest.fixture
def pool():
    """Return a hosted pool of eight blocks with one open request of three full blocks."""
    made = VllmPool("lru", 8)
    (request,) = conversations(1)
    keys = [bytes([each]) * 16 for each in range(3)]
    made.request = attrs.evolve(request, prompt_tokens=3 * SIZE + 1, keys=keys)
    made.held = made.open(made.prepare(made.request), 0)
    made.blocks = made.manager.block_pool
    made.queue = made.blocks.free_block_queue
    made.table = made.manager.tables[made.held.request_id][:]
    return made


def check(pool):
    """Check that vLLM and the host agree on which blocks are free and which are cached."""
    blocks, queue = pool.blocks.blocks[1:], pool.queue
    free = [block for block in blocks if not block.ref_cnt]
    assert queue.num_free_blocks == len(free)
    assert {block.block_id for block in queue.get_all_free_blocks()} == {
        block.block_id for block in free
    }
    cached = {block.block_id for block in blocks if block.block_hash is not None}
    assert {block.block_id for block in blocks if block.block_id in queue.host} == cached


def test_blocks_without_content_go_first(pool):
    """Blocks without content are allocated first, the one freed last before the others."""
    private = pool.table[3]
    pool.close(pool.held, 1)
    check(pool)
    assert pool.queue.popleft() is private
    rest = pool.queue.popleft_n(4)
    assert not {block.block_id for block in rest} & {block.block_id for block in pool.table}
    assert pool.queue.popleft_n(3) == pool.table[2::-1]
    assert pool.queue.num_free_blocks == 0


def test_a_block_evicted_while_in_use_has_no_content(pool):
    """A block evicted while in use is not hit again, and has no content when it is freed."""
    pool.blocks.evict_blocks({pool.table[2].block_id})
    check(pool)
    pool.close(pool.held, 1)
    check(pool)
    assert pool.open(pool.prepare(attrs.evolve(pool.request, id="b")), 2) is not None
    assert pool.hit == 2 * SIZE
    check(pool)


def test_a_block_evicted_while_free_stays_free(pool):
    """A block evicted while free has no content any more, and stays free."""
    pool.close(pool.held, 1)
    pool.blocks.evict_blocks({each.block_id for each in pool.table})
    check(pool)
    assert len(pool.host) == 0


def test_the_cache_is_reset_while_no_block_is_in_use(pool):
    """The cache can only be reset while no block is in use; then all blocks are empty."""
    assert not pool.blocks.reset_prefix_cache()
    pool.close(pool.held, 1)
    assert pool.blocks.reset_prefix_cache()
    check(pool)
    assert len(pool.host) == 0
    assert len(pool.queue.popleft_n(8)) == 8


def test_moved_content_is_hit(pool):
    """Content that is moved to another block is hit there, and evicted like other content."""
    (target,) = pool.blocks.get_new_blocks(1)
    pool.blocks.move_block_hashes(pool.table[2], target)
    check(pool)
    pool.blocks.free_blocks([target])
    pool.close(pool.held, 1)
    check(pool)
    again = pool.open(pool.prepare(attrs.evolve(pool.request, id="b")), 2)
    assert pool.hit == 3 * SIZE
    assert pool.manager.tables["b"][:3] == [*pool.table[:2], target]
    pool.close(again, 3)
    check(pool)
    assert len(pool.queue.popleft_n(5)) == 5
    assert pool.queue.popleft_n(3) == [target, *pool.table[1::-1]]
    assert len(pool.host) == 0


def test_a_block_read_until_its_reuse_is_allocated_last(pool):
    """A block that is read until its reuse is allocated last, and its callback called then."""
    reused = []
    private = pool.table.pop()
    pool.manager.tables[pool.held.request_id].pop()
    pool.blocks.unpin_blocks([private], reused.append)
    pool.close(pool.held, 1)
    check(pool)
    assert pool.blocks.get_new_blocks(7)
    assert not reused
    assert pool.blocks.get_new_blocks(1) == [private] == reused


def test_a_block_held_by_a_connector_is_not_allocated(pool):
    """While a connector holds the last block of a prompt, the other seven can be allocated."""
    pool.close(pool.held, 1)
    pool.blocks.touch([pool.table[2]])
    check(pool)
    new = pool.blocks.get_new_blocks(7)
    assert len({block.block_id for block in new}) == 7
    check(pool)
    pool.blocks.free_blocks([pool.table[2]])
    pool.blocks.free_blocks(new)
    check(pool)
    assert len(pool.blocks.get_new_blocks(8)) == 8


def test_append_and_remove_change_the_number_of_free_blocks(pool):
    """`append` and `remove` change the number of free blocks by one."""
    block = pool.queue.popleft()
    pool.queue.append(block)
    assert pool.queue.num_free_blocks == 4
    pool.queue.remove(block)
    assert pool.queue.num_free_blocks == 3
    assert not [*pool.queue.iter_blocks_after(None)]


def test_hints_of_a_request_set_priorities(pool, caplog):
    """The blocks of a request get the priority of its hints; a malformed hint is logged."""
    pool.close(pool.held, 1)
    keys = [bytes([9]) * 16, *pool.request.keys[1:]]
    request = pool.prepare(attrs.evolve(pool.request, id="b", keys=keys))
    retain = {"priority": 80, "start": 0, "end": SIZE, "seconds": 2}
    payloads = ("kvcore:retain", retain), ("kvcore:session", {"session": "s", "tool": 3})
    payloads += ("kvcore:session", {"session": "s", "tool": "search"}), ("other", {})
    actions = [
        SimpleNamespace(action_id=str(index), action_type=kind, payload=payload)
        for index, (kind, payload) in enumerate(payloads)
    ]
    request.kv_hints = SimpleNamespace(actions=actions)
    pool.open(request, 5)
    known = pool.manager.known["b"].request
    assert (known.session, known.tool) == ("s", "search")
    spans = [pool.host.span(each.block_id) for each in pool.manager.tables["b"][:3]]
    assert [span.priority for span in spans] == [80, 35, 35]
    assert spans[0].priority_until == 5 + 2 * 10**9
    assert "KV hint 1: tool must be text" in caplog.text


def test_no_number_of_output_tokens_ends_the_scheduler(monkeypatch):
    """A request that asks for 2**63 tokens, as an API of vLLM lets clients, is queued."""
    monkeypatch.setenv("KVCORE_EVICTION", "lru")
    server = SERVERS[0]
    driver = vllm_engine.Driver(server, kvcore_vllm.SyncScheduler)
    request = vllm_engine.make_request(server.requests[0], server)
    request.max_tokens = 2**63
    driver.scheduler.add_request(request)
    (known,) = driver.scheduler.kv_cache_manager.known.values()
    assert known.request.output_tokens == 2**63 - 1


def test_a_request_aborted_while_it_waits_is_forgotten(pool):
    """A request that is aborted while it waits leaves the queue, without a call of `on_end`.

    It was tried once, and found no room.
    """
    calls = []

    class Recording(LRU):
        name = "recording"

        def on_queued(self, request, now, *, front=False):
            calls.append(("queued", request.id))

        def on_dequeued(self, request, now):
            calls.append(("dequeued", request.id))

        def on_end(self, request, now):
            calls.append(("end", request.id))

    recorded = VllmPool(Recording(), 8)
    running = recorded.prepare(attrs.evolve(pool.request, id="b"))
    large = {"prompt_tokens": 8 * SIZE + 1, "keys": [b"%16d" % index for index in range(8)]}
    waiting = recorded.prepare(attrs.evolve(pool.request, id="a", **large))
    recorded.queue(waiting, 1)
    assert recorded.open(waiting, 1) is None
    recorded.queue(running, 2)
    assert recorded.manager.known.keys() == {"a", "b"}
    waiting.status = RequestStatus.FINISHED_ABORTED
    recorded.manager.free(waiting)
    assert recorded.manager.known.keys() == {"b"}
    recorded.open(running, 3)
    recorded.close(running, 4)
    assert not recorded.manager.known
    assert not recorded.host._orders
    assert calls == [
        ("queued", "a"), ("queued", "b"), ("dequeued", "a"), ("dequeued", "b"), ("end", "b")
    ]  # fmt: skip
