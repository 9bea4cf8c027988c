"""Policies of kvcore in LMCache's own CPU, disk and NIXL back ends."""

import inspect
import logging
import os
from importlib.metadata import entry_points
from itertools import islice
from random import Random
from threading import Thread

import pytest
from helpers.lmcache_package import CPU, Disk, Nixl, Replay, digest, key_of
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING, get_cache_policy
from lmcache.v1.storage_backend.cache_policy.base_policy import BaseCachePolicy

from kvcore.errors import InputError
from kvcore.plugins import Plugins
from kvcore_lmcache.policy import CHUNKS, Entries, KvcorePolicy, refuse_unfit
from kvcore_lmcache.policy import key_of as kvcore_key
from kvcore_plugins.eviction import LRU, SIEVE
from kvcore_replay.check.trace import check_trace

OTHERS = {"random", "hazard", "workload-aware"}
"""Policies that go by chance, or by pauses between requests."""

REFUSED = {
    "cost": "position",
    "lookahead": "on_queued",
    "priority": "requests",
    "tail-lru": "positions",
    "tool-ttl": "on_queued",
    "ttl": "look-up",
}
"""Policies that need data LMCache lacks, with a word of the reason."""

FLAT = sorted({*Plugins().names("eviction")} - REFUSED.keys() - OTHERS)
"""The policies that go by the order of hits and stores alone."""

SAME = {"lru": "LRU", "fifo": "FIFO", "lfu:half_life=inf": "LFU", "mru": "MRU"}


@pytest.fixture(scope="module")
def prompts():
    """Return the first 500 prompts of the bundled trace, as keys."""
    return [each.keys for each in islice(Plugins().build("workload", "mooncake"), 500)]


@pytest.mark.parametrize("policy", FLAT)
def test_lmcache_evicts_as_a_replay_in_kvcore(prompts, policy):
    """The CPU back end evicts the same chunks in the same order as a KVCache on flat keys."""
    served, replay = CPU(f"kvcore:{policy}", 1200), Replay(policy, 1200)
    for prompt in prompts:
        served.serve(prompt)
        replay.serve(prompt)
    assert (served.hits, digest(served.evicted)) == (replay.hits, digest(replay.evicted))
    assert served.hits > 0
    assert len(served.evicted) > 5_000
    assert served.policy.host.failure is None


@pytest.mark.parametrize(("together", "batch"), [(4, False), (1, True)])
@pytest.mark.parametrize("policy", SAME)
def test_equal_algorithms_evict_as_lmcaches_own_policies(
    prompts, policy, together, batch, monkeypatch
):
    """Hosted LRU, FIFO, MRU, and LFU without decay, evict the same chunks as LMCache's own."""
    monkeypatch.setenv("KVCORE_EVICTION", policy)
    hosted, own = CPU("kvcore", 1000), CPU(SAME[policy], 1000)
    for prompt in prompts[:300]:
        hosted.serve(prompt, together=together, batch=batch)
        own.serve(prompt, together=together, batch=batch)
    assert (hosted.hits, digest(hosted.evicted)) == (own.hits, digest(own.evicted))


# Chunks that cannot be evicted.


@pytest.mark.parametrize("policy", ["kvcore:fifo", "FIFO"])
def test_a_pinned_chunk_is_not_evicted(policy):
    """A chunk that a look-up has pinned is not evicted before it is unpinned."""
    cpu = CPU(policy, 3)
    cpu.serve([1, 2, 3])
    assert cpu.backend.contains(key_of(1), pin=True)
    cpu.serve([4])
    assert cpu.evicted == [2]
    cpu.backend.unpin(key_of(1))
    cpu.serve([5])
    assert cpu.evicted == [2, 1]


def test_no_chunk_is_stored_while_all_are_pinned():
    """A chunk is not stored while all others are pinned, but is once they are unpinned."""
    cpu = CPU("kvcore:sieve", 2)
    cpu.serve([1, 2])
    for chunk in (1, 2):
        cpu.backend.pin(key_of(chunk))
    cpu.serve([3])
    assert not cpu.backend.contains(key_of(3))
    for chunk in (1, 2):
        cpu.backend.unpin(key_of(chunk))
    cpu.serve([3])
    assert cpu.backend.contains(key_of(3))


@pytest.mark.parametrize("policy", FLAT)
def test_host_and_back_end_have_the_same_chunks(policy):
    """Host and back end hold the same chunks after any stores, hits, removals and clears."""
    random, cpu = Random(policy), CPU(f"kvcore:{policy}", 12)
    for turn in range(400):
        first = random.randrange(12)
        cpu.serve(range(first, first + random.randrange(1, 6)), together=random.randrange(1, 4))
        if turn % 7 == 0:
            cpu.backend.remove(key_of(random.randrange(17)))
        if turn % 97 == 96:
            cpu.backend.clear()
        host = cpu.policy.host
        assert host is None or set(host._spans) == set(cpu.backend.hot_cache)
    assert host.failure is None
    assert cpu.evicted


def test_host_and_back_end_have_the_same_chunks_after_four_threads():
    """Host and back end hold the same chunks after four threads store, look up and remove."""
    cpu = CPU("kvcore:s3fifo", 16)

    def work(seed):
        random = Random(seed)
        for _ in range(300):
            chunk = random.randrange(40)
            if random.random() < 0.1:
                cpu.backend.remove(key_of(chunk))
            elif not cpu.backend.contains(key_of(chunk), pin=True):
                cpu.store(key_of(chunk))
            else:
                cpu.backend.touch_cache()
                cpu.backend.unpin(key_of(chunk))

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert set(cpu.policy.host._spans) == set(cpu.backend.hot_cache)
    assert cpu.policy.host.failure is None


# The other back ends.


@pytest.mark.parametrize("backend", [Disk, Nixl])
@pytest.mark.parametrize(("policy", "own"), [("kvcore:lru", "LRU"), ("kvcore:fifo", "FIFO")])
def test_other_back_ends_evict_as_under_lmcaches_own_policies(backend, policy, own, tmp_path):
    """The disk and NIXL back ends evict under hosted LRU and FIFO as under LMCache's own."""
    evicted = []
    for name in (policy, own):
        (tmp_path / own).mkdir(exist_ok=True)
        with backend(name, 20, tmp_path / own) as served:
            random = Random(5)
            for _ in range(150):
                served.use(int(random.paretovariate(0.5)) % 60)
            evicted.append(served.evicted)
            if name == policy:
                assert set(served.policy.host._spans) == set(served.entries)
    assert evicted[0] == evicted[1]
    assert len(evicted[0]) > 30


def test_a_batch_gets_as_many_candidates_as_it_needs(tmp_path):
    """NIXL evicts one chunk for each chunk of a batch, in a single call."""
    with Nixl("kvcore:sieve", 8, tmp_path) as served:
        served.put(*range(8))
        served.put(8, 9, 10)
        assert served.evicted == [0, 1, 2]
        assert len(served.policy.host) == 8


def test_layers_of_a_chunk_leave_together():
    """If layers are stored one by one, only the first layer of a chunk is a candidate."""
    policy, entries = _layered(chunks=3)
    candidates = policy.get_evict_candidates(entries, 64)
    assert candidates == [_layer(0, 0)]
    for layer in (0, 1):
        policy.update_on_force_evict(_layer(0, layer))
        entries.pop(_layer(0, layer), None)
    assert set(policy.host._spans) == {_layer(1, 0), _layer(2, 0)}


def test_a_candidate_that_lmcache_does_not_evict_stays():
    """A candidate that LMCache does not evict stays in the host, and is not offered next."""
    policy, entries = _layered(chunks=3)
    assert policy.get_evict_candidates(entries, 64) == [_layer(0, 0)]
    assert policy.get_evict_candidates(entries, 64) == [_layer(1, 0)]
    del entries[_layer(1, 0)]
    assert set(policy.host._spans) == {_layer(0, 0), _layer(2, 0)}


class VictimError(Exception):
    """The exception of a policy that fails."""


class Entry:
    """An entry that can be evicted."""

    can_evict = True


def _layer(chunk, layer):
    key = key_of(chunk)
    return LayerCacheEngineKey("model", 1, 0, key.chunk_hash, key.dtype, layer_id=layer)


def _layered(chunks):
    policy = KvcorePolicy("fifo")
    entries = policy.init_mutable_mapping()
    for chunk in range(chunks):
        for layer in (0, 1):
            entries[_layer(chunk, layer)] = Entry()
            policy.update_on_put(_layer(chunk, layer))
    return policy, entries


# Names and settings of policies.


@pytest.mark.parametrize(("policy", "why"), REFUSED.items())
def test_policies_that_need_data_lmcache_lacks_are_refused(policy, why):
    """A policy that needs data LMCache lacks raises InputError with its name and the reason."""
    with pytest.raises(InputError, match=f"'{policy}' cannot be used in LMCache: .*{why}"):
        CPU(f"kvcore:{policy}", 4)


def test_every_built_in_policy_is_hosted_or_refused():
    """LMCache hosts every built-in policy but those that need data it lacks."""
    CPU("LRU", 1)
    refused = set()
    for name in Plugins().names("eviction"):
        try:
            assert isinstance(get_cache_policy(f"kvcore:{name}"), KvcorePolicy)
        except InputError:
            refused.add(name)
    assert refused == {*REFUSED}


def test_a_third_party_policy_is_refused_if_it_needs_requests():
    """A third-party policy is refused if it overrides a method that needs requests."""

    class Newest(LRU):
        name = "newest"

    class Waiting(Newest):
        name = "waiting"

        def on_queued(self, request, now, *, front=False):
            """Called when a request waits."""

    refuse_unfit(Newest())
    with pytest.raises(InputError, match=r"'waiting' .*on_queued"):
        refuse_unfit(Waiting())


def test_a_look_up_and_its_stores_are_a_request(monkeypatch):
    """A policy hears of the uses of one prompt as those of one request, and of its end."""
    ended = []

    def on_end(self, request, now):  # noqa: ARG001 - the signature of the callback
        ended.append(request.id)

    monkeypatch.setattr(LRU, "on_end", on_end, raising=False)
    monkeypatch.setenv(CHUNKS, "6")
    cache = CPU("kvcore:lru", 6)
    for prompt in ([1, 2, 3], [1, 2, 4], [1, 2, 5]):
        cache.serve(prompt, batch=True)
    assert ended == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_policy_that_learns_keeps_to_lru_until_it_hits_more(prompts):
    """The guard of `hazard` begins with the evictions of `lru` in LMCache too."""
    guarded, lru = CPU("kvcore:hazard", 400), CPU("kvcore:lru", 400)
    for prompt in prompts[:60]:
        guarded.serve(prompt, batch=True)
        lru.serve(prompt, batch=True)
    assert guarded.evicted == lru.evicted
    assert guarded.evicted


def test_the_environment_selects_the_policy(monkeypatch):
    """`kvcore` alone reads KVCORE_EVICTION; an unknown name raises InputError that shows it."""
    monkeypatch.setenv("KVCORE_EVICTION", "slru:protected=0.8")
    policy = CPU("KVcore", 4).policy
    assert (policy._policy.name, policy._policy.protected) == ("slru", 0.8)
    monkeypatch.setenv("KVCORE_EVICTION", "lrru")
    with pytest.raises(InputError, match="KVCORE_EVICTION='lrru'"):
        CPU("kvcore", 4)


def test_the_size_is_the_number_of_chunks_at_the_first_eviction(monkeypatch):
    """The size is the number of chunks at the first eviction, unless a variable sets it.

    The policy starts at the first eviction, or at once with KVCORE_LMCACHE_CHUNKS.
    """
    cpu = CPU("kvcore:lru", 5)
    cpu.serve(range(5))
    assert cpu.policy.host is None
    cpu.serve([7])
    assert cpu.policy.host.blocks == 5
    monkeypatch.setenv(CHUNKS, "9")
    assert CPU("kvcore:lru", 5).policy.host.blocks == 9
    monkeypatch.setenv(CHUNKS, "many")
    with pytest.raises(InputError, match=f"{CHUNKS}='many'"):
        CPU("kvcore:lru", 5)


def test_old_hits_are_dropped_before_the_first_eviction(monkeypatch):
    """Before the first eviction, old hits beyond the limit are dropped, and no store is."""
    monkeypatch.setattr("kvcore_lmcache.policy.EARLY", 10)
    cpu = CPU("kvcore:lfu", 3)
    for _ in range(101):
        cpu.serve([1, 2, 3])
    kept = cpu.policy._early
    assert [key for what, key, _ in kept if what == "stored"] == [*map(key_of, (1, 2, 3))]
    times = [now for what, _, now in kept if what == "hit"]
    assert 5 <= len(times) <= 10
    assert times == [now for now in range(cpu.now + 1) for _ in range(3)][-len(times) :]
    cpu.serve([4])
    assert len(cpu.evicted) == 1
    assert set(cpu.policy.host._spans) == set(cpu.backend.hot_cache)
    assert len(cpu.policy.host) == 3


def test_chunks_that_leave_before_the_first_eviction_take_no_memory(monkeypatch):
    """Events of chunks that were removed before the first eviction are bounded."""
    monkeypatch.setattr("kvcore_lmcache.policy.EARLY", 10)
    cpu = CPU("kvcore:lru", 3)
    for chunk in range(2, 102):
        cpu.serve([1, chunk])
        cpu.backend.remove(next(reversed(cpu.backend.hot_cache)))
    assert ("stored", key_of(1)) in [event[:2] for event in cpu.policy._early]
    assert len(cpu.policy._early) <= 16
    cpu.serve([2, 3, 4])
    assert set(cpu.policy.host._spans) == set(cpu.backend.hot_cache)


# Recordings.


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_a_recording_replays_to_the_same_evictions(prompts, policy, tmp_path, monkeypatch):
    """A recording has a request for each use of a chunk, and replays to the same evictions."""
    monkeypatch.setenv("KVCORE_TRACE", str(tmp_path / "day.jsonl"))
    cpu = CPU(f"kvcore:{policy}", 300)
    for prompt in prompts[:80]:
        cpu.serve(prompt)
    cpu.backend.remove(next(iter(cpu.backend.hot_cache)))
    *evicted, _removed = cpu.evicted
    recorder = cpu.policy._recorder
    recorder.close()
    assert (recorder.failure, recorder.disagreements) == (None, {})
    (path,) = tmp_path.iterdir()
    assert path.name.startswith(f"day-{os.getpid()}-")
    assert recorder.evictions.hexdigest == digest(evicted)
    assert check_trace(path).evictions == recorder.evictions.as_dict()
    again = Replay(policy, 300)
    for each in Plugins().build("workload", f"trace:path={path}"):
        again.now = each.arrival
        again.hits += again.cached(each.keys[0])
        again.use(each.keys[0])
    assert (again.hits, digest(again.evicted)) == (cpu.hits, digest(evicted))


def test_a_recording_of_batches_has_the_evictions_if_the_size_is_given(
    prompts, tmp_path, monkeypatch
):
    """A recording of batches has the evictions if the size is given, and no disagreements."""
    monkeypatch.setenv("KVCORE_TRACE", str(tmp_path / "day.jsonl"))
    monkeypatch.setenv(CHUNKS, "300")
    cpu = CPU("kvcore:slru", 300)
    for prompt in prompts[:80]:
        cpu.serve(prompt, batch=True)
    recorder = cpu.policy._recorder
    recorder.close()
    assert (recorder.failure, recorder.disagreements) == (None, {})
    recorded = [key for key in cpu.evicted if key not in map(kvcore_key, cpu.policy._evicted)]
    assert recorder.evictions.hexdigest == digest(recorded)
    assert recorder.evictions.blocks > 500


# Failures, and the signatures of LMCache.


def test_a_failed_policy_is_replaced_by_lmcaches_lru(monkeypatch, caplog):
    """After a policy fails, LMCache evicts as with its own LRU.

    Nothing is raised, and one warning is logged.
    """
    victim = SIEVE.victim

    def failing(self, now):
        if now > 200:
            raise VictimError
        return victim(self, now)

    monkeypatch.setattr(SIEVE, "victim", failing)
    hosted = CPU("kvcore:sieve", 10)
    random = Random(3)
    with caplog.at_level(logging.WARNING, "kvcore"):
        for _ in range(300):
            hosted.serve([random.randrange(30)])
    host = hosted.policy.host
    assert (host.failures, host.eviction.name) == (1, LRU.name)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "VictimError" in caplog.text
    own = CPU("LRU", 10)
    for key in sorted(hosted.backend.hot_cache, key=lambda key: host.span(key).released_order):
        own.store(key)
    hosted.evicted.clear()
    for _ in range(100):
        chunk = random.randrange(30)
        hosted.serve([chunk])
        own.serve([chunk])
    assert hosted.evicted == own.evicted
    assert len(own.evicted) > 20


def test_signatures_of_a_cache_policy():
    """LMCache calls a cache policy by these methods and parameters; its table is a dict."""
    abstract = {
        name: [*inspect.signature(getattr(BaseCachePolicy, name)).parameters][1:]
        for name in BaseCachePolicy.__abstractmethods__
    }
    assert abstract == {
        "init_mutable_mapping": [],
        "update_on_hit": ["key", "cache_dict"],
        "update_on_put": ["key"],
        "update_on_force_evict": ["key"],
        "get_evict_candidates": ["cache_dict", "num_candidates"],
    }
    assert type(POLICY_MAPPING) is dict
    assert [*inspect.signature(get_cache_policy).parameters] == ["policy_name"]
    assert {"chunk_hash", "tags"} <= set(CacheEngineKey.__slots__)


def test_the_entry_point_for_vllm_adds_the_policy():
    """The entry point for vLLM's general plugins adds the policy to LMCache's table."""
    points = entry_points(group="vllm.general_plugins", name="kvcore_lmcache")
    if not points:
        pytest.skip("kvcore-lmcache is not installed: `tox -e lmcache` does so")
    POLICY_MAPPING.pop("KVCORE", None)
    next(iter(points)).load()()
    assert POLICY_MAPPING["KVCORE"] is KvcorePolicy


def test_the_mapping_calls_the_policy_once_for_each_change():
    """Every way to add or remove entries calls the policy once for each key."""
    called = []

    class Listener:
        def entered(self, key):
            called.append(f"+{key}")

        def left(self, key):
            called.append(f"-{key}")

    entries = Entries(Listener())
    entries["a"] = 1
    entries["a"] = 2
    entries.update(b=1)
    entries.setdefault("c", 1)
    entries |= {"a": 3, "d": 1}
    entries.pop("a")
    entries.pop("a", None)
    del entries["b"]
    entries.clear()
    assert called == ["+a", "+b", "+c", "+d", "-a", "-b", "-c", "-d"]
    assert not entries


def test_the_key_of_a_chunk_is_its_hash_or_a_digest():
    """The key of a chunk is its hash, or a digest if it has a tag or a hash above 63 bits."""
    assert kvcore_key(key_of(7)) == 7
    long = kvcore_key(key_of(1 << 70))
    tagged = CacheEngineKey("model", 1, 0, 7, key_of(7).dtype, {"lmcache.tag.a": "b"})
    assert {len(long), len(kvcore_key(tagged))} == {16}
    assert kvcore_key(tagged) != long
