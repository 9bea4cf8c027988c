"""vLLM's CPU tier with a policy of kvcore, compared with vLLM's own LRU and with a replay."""

import logging
from collections import Counter
from inspect import signature
from random import Random
from warnings import catch_warnings

import pytest
from helpers.commands import run_here
from helpers.engines import required

from kvcore import InputError, Request
from kvcore.plugins import Plugins

required("vllm")
with catch_warnings(action="ignore"):  # warnings of vLLM's imports
    from helpers.vllm_tier import (
        PASSES_REQUESTS,
        SIZE,
        VllmTier,
        cache_tier,
        conversations,
        host_tier,
        offload_key,
        serve,
    )
    from vllm.v1 import kv_hints
    from vllm.v1.kv_offload.base import LookupResult, ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

    from kvcore_vllm import KvcorePolicy
    from kvcore_vllm.hints import RETAIN, SESSION

POLICIES = [
    name
    for name in Plugins().names("eviction")
    if not Plugins().get("eviction", name).expires_spans
]


@pytest.fixture
def tier(monkeypatch):
    """Return a function that makes a tier with a policy; None selects vLLM's own LRU."""
    return lambda eviction, blocks: VllmTier(eviction, blocks, monkeypatch)


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("chunks", [200, 3000, 10_000])
def test_lru_evicts_as_vllms_lru(tier, chunks, together):
    """`lru` evicts the same chunks as vLLM's LRU, in the same order, over the whole trace."""
    requests = list(conversations())
    own = serve(tier(None, chunks), requests, together)
    assert own.evicted > 100_000
    assert serve(tier("lru", chunks), requests, together) == own


@pytest.mark.parametrize("together", [1, 8])
def test_lru_evicts_as_vllms_lru_while_hits_are_loaded(tier, together):
    """`lru` evicts as vLLM's LRU does while transfers pin the chunks that they read."""
    requests = list(conversations(3000))
    own = serve(tier(None, 1000), requests, together, loads=True)
    assert serve(tier("lru", 1000), requests, together, loads=True) == own


@pytest.mark.skipif(not PASSES_REQUESTS, reason="this vLLM passes hits at the end only")
@pytest.mark.parametrize("eviction", POLICIES)
def test_every_policy_decides_as_in_a_replay(tier, eviction):
    """A policy hits and evicts the same chunks in a `KVCache`, in a host and in vLLM."""
    requests = list(conversations(1500))
    replayed = serve(cache_tier(eviction, 1500), requests)
    assert replayed.evicted > 10_000
    assert serve(host_tier(eviction, 1500), requests) == replayed
    assert serve(tier(eviction, 1500), requests) == replayed


def chain(*names, group=0):
    """Return the offload keys of a prompt, by the numbers of its chunks."""
    return [offload_key(name, group) for name in names]


def ask(tier, number, keys):
    """Return the context of a request for chunks `keys`."""
    return tier.context(Request(id=str(number), prompt_tokens=1, keys=keys, key_tokens=SIZE))


def store(tier, number, keys, *, done=True):
    """Store chunks, complete the store if `done`, and return the context and the victims."""
    context = ask(tier, number, keys)
    stored = tier.manager.prepare_store(keys, context)
    if stored is not None and done:
        tier.manager.complete_store(stored.keys_to_store, context)
    return context, None if stored is None else stored.evicted_keys


def test_a_refused_store_keeps_the_order_of_eviction(tier):
    """If too many chunks are in use, `evict` returns None and keeps the order of eviction."""
    plain, refusing = tier("lru", 4), tier("lru", 4)
    for each in (plain, refusing):
        first, _ = store(each, 1, chain(1, 2))
        second, _ = store(each, 2, chain(3, 4))
        each.close(first)
        each.close(second)
    assert refusing.policy.evict(3, set(chain(3, 4))) is None
    assert refusing.policy.evict(5, set()) is None
    outcomes = [store(each, 3, chain(5, 6, 7))[1] for each in (plain, refusing)]
    assert outcomes[0] == outcomes[1] == chain(2, 1, 4)


def test_a_failed_store_is_forgotten(tier):
    """Chunks of a failed store are not cached; chunks below them are evicted first."""
    each = tier("lru", 4)
    keys = chain(1, 2, 3)
    context = ask(each, 1, keys)
    each.manager.prepare_store(keys[:2], context)
    each.manager.prepare_store(keys[2:], context)
    each.manager.complete_store(keys[2:], context)
    each.manager.complete_store(keys[:2], context, success=False)
    assert [each.policy.get(key) is None for key in keys] == [True, True, False]
    each.close(context)
    other, _ = store(each, 2, chain(8, 9))
    assert store(each, 3, chain(10, 11))[1] == keys[2:]
    each.close(other)


def test_a_chunk_is_not_evicted_while_it_is_loaded(tier):
    """Chunks that are being loaded are not evicted until the load is complete."""
    each = tier("lru", 3)
    keys = chain(1, 2, 3)
    each.close(store(each, 1, keys)[0])
    context = ask(each, 2, keys)
    each.manager.prepare_load(keys[:2], context)
    assert store(each, 3, chain(8, 9))[1] is None
    assert store(each, 4, chain(8))[1] == keys[2:]
    each.manager.complete_load(keys[:2], context)
    each.close(context)
    assert store(each, 5, chain(9))[1] == chain(8)


def test_a_reset_empties_the_tier(tier):
    """A reset drops all chunks, even those being stored, and the tier can be used at once."""
    each = tier("arc", 2)
    store(each, 1, chain(1, 2), done=False)
    each.manager.reset_cache()
    assert each.policy.get(chain(1)[0]) is None
    assert store(each, 2, chain(1, 2))[1] == []
    assert store(each, 3, chain(3))[1] == chain(2)


def test_the_parent_of_a_chunk_is_in_its_group(tier):
    """The parent of a chunk is the chunk before it in the same KV cache group."""
    each = tier("lru", 4)
    keys = [*chain(1, 2), *chain(1, 2, group=1)]
    context = ReqContext(req_id="1")
    for index, key in enumerate(keys):
        context.set_offload_key_position(key, (index % 2 + 1) * SIZE)
    each.manager.on_new_request(context)
    each.manager.prepare_store(keys, context)
    each.manager.complete_store(keys, context)
    each.close(context)
    spans = [each.policy.host.span(key) for key in keys]
    assert [span.start for span in spans] == [0, 1, 0, 1]
    assert spans[3].parent is spans[2]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("eviction", ["lru", "sieve", "tinylfu"])
def test_a_tier_keeps_to_its_size_under_random_calls(tier, eviction, seed):
    """Under random loads and stores a tier keeps to its size, and evicts no chunk in use."""
    random, each, running = Random(seed), tier(eviction, 12), []
    cached, busy = set(), []
    for index in range(150):
        keys = chain(*(random.choice((1, 2, 3)) * 10**index for index in range(5)))
        context = ask(each, index, keys)
        found = [key for key in keys if each.manager.lookup(key, context) == LookupResult.HIT]
        if found and random.random() < 0.5:
            each.manager.prepare_load(found, context)
            busy.append((found, context))
        stored = each.manager.prepare_store(keys, context)
        if stored is not None:
            held = {key for found, _ in busy for key in found}
            assert not held & set(stored.evicted_keys)
            assert cached.issuperset(stored.evicted_keys)
            cached -= set(stored.evicted_keys)
            good = random.random() < 0.9
            each.manager.complete_store(stored.keys_to_store, context, success=good)
            cached |= set(stored.keys_to_store) if good else set()
        running.append(context)
        if busy and random.random() < 0.6:
            each.manager.complete_load(*busy.pop(random.randrange(len(busy))))
        if len(running) > 3:
            each.close(running.pop(0))
        assert {key for key in cached if each.policy.get(key) is None} == set()
        assert len(each.policy.host) == len(cached) <= 12
    assert each.policy.host.failures == 0


def test_a_policy_that_fails_never_stops_the_tier(tier, caplog):
    """After a policy fails, the tier evicts as vLLM's LRU, and one warning is logged."""
    requests = list(conversations(1000))
    own, each = serve(tier(None, 500), requests), tier("lru", 500)
    each.policy._begin(SIZE)

    def fail(_now):
        msg = "no idea"
        raise RuntimeError(msg)

    left = iter(range(1000))
    victim = each.policy.host.eviction.victim
    each.policy.host.eviction.victim = lambda now: (
        victim(now) if next(left) < 999 else fail(now)
    )
    with caplog.at_level(logging.WARNING):
        assert serve(each, requests) == own
    assert each.policy.host.failures == 1
    assert [record.name for record in caplog.records if "no idea" in record.message] == [
        "kvcore"
    ]


def test_wrong_settings_are_errors_at_start(tier):
    """An unknown policy, and a policy whose blocks expire, raise InputError at the start."""
    with pytest.raises(InputError, match="KVCORE_EVICTION='lur'"):
        tier("lur", 4)
    with pytest.raises(InputError, match="'ttl:ttl=3' lets blocks expire"):
        tier("ttl:ttl=3", 4)


@pytest.mark.skipif(not PASSES_REQUESTS, reason="this vLLM has no hints")
class TestHints:
    """Hints that a client or a router sends with a request."""

    def ask(self, tier, number, keys, *actions):
        """Return the context of a request with hints."""
        context = ask(tier, number, keys)
        actions = [
            kv_hints.protocol.KvHintAction(str(index), kind, "1", payload)
            for index, (kind, payload) in enumerate(actions)
        ]
        context.kv_hints = kv_hints.protocol.KvHintsEnvelope("1", "m", actions)
        return context

    def test_a_range_is_retained(self, tier):
        """A hinted range has the priority and the duration of its hint."""
        each = tier("priority", 3)
        high = {"start": 0, "end": SIZE, "priority": 90, "seconds": 2}
        first = self.ask(each, 1, chain(1), (RETAIN, high))
        each.manager.prepare_store(chain(1), first)
        each.manager.complete_store(chain(1), first)
        each.close(first)
        for number in (2, 3):
            each.close(store(each, number, chain(number))[0])
        assert store(each, 4, chain(4))[1] == chain(2)
        each.now = 3 * 10**9
        assert store(each, 5, chain(5))[1] == chain(1)

    def test_a_hit_is_retained_too(self, tier):
        """A hint sets the priority of the chunks that its request hits."""
        each = tier("priority", 2)
        for number in (1, 2):
            each.close(store(each, number, chain(number))[0])
        again = self.ask(each, 3, chain(1), (RETAIN, {"priority": 90}))
        each.manager.prepare_store(chain(1), again)
        each.close(again)
        assert store(each, 4, chain(4))[1] == chain(2)
        assert each.policy.host.span(chain(1)[0]).priority == 90

    def test_a_hint_sets_the_session(self, tier):
        """A hint sets the session of a request, and the tool that it waits for."""
        each = tier("lru", 2)
        context = self.ask(each, 1, chain(1), (SESSION, {"session": "s", "tool": "sh"}))
        request = each.policy._use(context).request
        assert (request.session, request.tool) == ("s", "sh")

    @pytest.mark.parametrize(
        ("kind", "payload"),
        [
            (RETAIN, {}),
            (RETAIN, {"priority": "high"}),
            (RETAIN, {"priority": 200}),
            (RETAIN, {"priority": 90, "start": 9, "end": 3}),
            (SESSION, {"session": 3}),
        ],
    )
    def test_a_malformed_hint_is_logged(self, tier, caplog, monkeypatch, kind, payload):
        """A malformed hint is logged once for a request, which is served without it."""
        monkeypatch.setattr("kvcore_vllm.hints._warned", warned := Counter())
        each = tier("lru", 2)
        context = self.ask(each, 1, chain(1), (kind, payload), ("other", {}))
        with caplog.at_level(logging.WARNING):
            assert each.policy._use(context).request.retention == ()
            context._offload_key_positions[chain(2)[0]] = 2 * SIZE
            assert len(each.policy._use(context).order) == 2
        assert warned.total() == 1
        assert ["KV hint 0" in record.getMessage() for record in caplog.records] == [True]


def test_evictions_are_recorded(tier, tmp_path, monkeypatch):
    """A recording of the tier passes `kvcore replay`, and can be compared as a workload."""
    path = tmp_path / "cpu-tier-day.jsonl"
    monkeypatch.setenv("KVCORE_TRACE", str(tmp_path / "day.jsonl"))
    each = tier("lru", 300)
    short = Request(id="short", prompt_tokens=5, key_tokens=SIZE)
    outcome = serve(each, [short, *conversations(200)])  # the first one has no chunk
    recorder = each.policy._recording._recorder
    assert recorder.failure is None
    assert recorder.disagreements == {}
    recorder.close()
    assert recorder.evictions.blocks == outcome.evicted
    assert recorder.evictions.hexdigest[:16] in run_here("replay", path).stdout
    assert run_here("compare", f"trace:path={path}", "--blocks", "300").returncode == 0


def test_kvcore_policy_has_all_methods_of_vllms_cache_policy():
    """`KvcorePolicy` has all methods of vLLM's `CachePolicy`, with the same parameters."""
    for name in CachePolicy.__abstractmethods__ | {
        "on_store_miss", "on_request_finished", "mark_evictable", "mark_non_evictable",
    }:  # fmt: skip
        theirs, ours = (
            list(signature(getattr(c, name)).parameters) for c in (CachePolicy, KvcorePolicy)
        )
        assert ours[: len(theirs)] == theirs, name
    extra = {name for name in vars(CachePolicy) if not name.startswith("_")} - set(
        vars(KvcorePolicy)
    )
    assert extra == set()
    assert {"ref_cnt", "chunk_id"} == {name for name, _ in ChunkStatus._fields_}
    assert hasattr(ReqContext("1"), "_offload_key_positions")
