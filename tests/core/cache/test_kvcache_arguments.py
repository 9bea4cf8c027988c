"""Errors and defaults of a cache's arguments: time, plugins, sizes and requests."""

from __future__ import annotations

import pytest
from helpers.caches import BLOCK, Lines, ask, compute, make, serve, spans

from kvcore import (
    InputError,
    KVCache,
    OutOfBlocks,
    PluginError,
    PolicyError,
    Request,
    ScoreEviction,
    Trace,
)
from kvcore.request import Retention
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_plugins.eviction import LFU, LRU, TTL
from kvcore_plugins.prefix import Radix
from kvcore_plugins.workload import Zipf

SECOND = 10**9


def test_the_time_defaults_to_that_of_the_last_call():
    """A call without `now` happens at the time of the call before it."""
    cache = make(8, TTL(ttl=1))
    seq = compute(cache, cache.open(ask("ab"), now=5 * SECOND))
    cache.close(seq)
    assert cache.now == 5 * SECOND
    assert cache.probe(ask("ab")) == 1


def test_a_cache_that_is_refused_leaves_its_plugins_unused(tmp_path):
    """A policy can be used if the cache was refused because of another plugin, or its trace."""
    policy, index = LRU(), Radix()
    make(8, prefix=index)
    with pytest.raises(InputError, match="prefix plugin 'radix' is in use already"):
        make(8, policy, prefix=index)
    with Trace(tmp_path / "trace.jsonl") as trace:
        make(8, trace=trace)
        with pytest.raises(InputError, match="every cache needs a Trace of its own"):
            make(8, policy, trace=trace)
    assert make(8, policy).eviction is policy


@pytest.mark.parametrize("now", [4, 5.0, 6.5, "6"])
def test_time_never_decreases(now):
    """A time in the past, or that is no whole number, raises InputError and changes nothing."""
    cache = make(8)
    seq = cache.open(ask("ab"), now=5)
    for call in (cache.commit, cache.extend, cache.rollback):
        says = rf"request {seq.request.id} has the time {now!r}, the one before 5: time"
        with pytest.raises(InputError, match=says):
            call(seq, 1, now)
    for call in (cache.close, cache.fork):
        with pytest.raises(InputError, match=r"never decreases"):
            call(seq, now)
    assert (seq.computed, seq.tokens, seq.is_open) == (0, 2 * BLOCK, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": -5},
        {"prompt_tokens": 8.5},
        {"output_tokens": -1},
        {"key_tokens": 0},
        {"arrival": 0.5},
    ],
)
def test_requests_are_checked(fields):
    """Impossible lengths and times of a request raise InputError with the field's value."""
    name, value = next(iter(fields.items()))
    with pytest.raises(InputError, match=rf"request 7: .*{name}={value}"):
        Request(**{"id": 7, "prompt_tokens": 1, "key_tokens": 4} | fields)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"start": -1}, "hint for tokens -1 to None: no tokens"),
        ({"start": 4, "end": 4}, "hint for tokens 4 to 4: no tokens"),
        ({"priority": 0}, "priority must be 1 to 100, not 0"),
        ({"priority": 101}, "priority must be 1 to 100, not 101"),
        ({"duration": 0}, "duration must be whole nanoseconds above 0, not 0"),
        ({"duration": 1.5}, "duration must be whole nanoseconds above 0, not 1.5"),
    ],
)
def test_hints_are_checked(fields, fault):
    """A retention hint for no tokens, out of range or for no time raises InputError."""
    with pytest.raises(InputError, match=f"retention {fault}"):
        Retention(**{"start": 0, "end": None, "priority": 50} | fields)


@pytest.mark.parametrize("blocks", [0, -1, 2**31, 1.5, "8"])
def test_pools_are_checked(blocks):
    """A pool whose number of blocks is no whole number in range raises InputError."""
    with pytest.raises(InputError, match=f"pool of {blocks!r} blocks"):
        make(blocks)


@pytest.mark.parametrize(
    ("plugins", "says"),
    [
        ({"eviction": 8}, "eviction=8 is no eviction plugin: give a name such as 'lru'"),
        ({"eviction": Radix}, "eviction=Radix is no eviction plugin: give a name"),
        ({"eviction": lambda: None}, "eviction=None is no eviction plugin: give a name"),
        ({"prefix": LRU()}, r"prefix=LRU\(\) is no prefix plugin: give a name such as 'radix'"),
        ({"eviction": "lur"}, r"no eviction plugin is named 'lur' \(did you mean 'lru'\?\)"),
        ({"eviction": "lfu:half=3"}, "eviction plugin 'lfu' has no option 'half'"),
    ],
)
def test_plugins_are_checked(plugins, says):
    """A plugin of another kind, an unknown name and a wrong option are errors with advice."""
    with pytest.raises(InputError, match=says):
        KVCache(8, **{"eviction": LRU(), "prefix": Radix()} | plugins)


def test_plugins_may_be_names_classes_or_instances():
    """A plugin may be given as a name with options, a class or function, or an instance."""
    assert KVCache(8, eviction=lambda: "lfu:half_life=30").eviction.half_life == 30
    assert KVCache(8, eviction="lfu:half_life=30").eviction.half_life == 30
    assert type(KVCache(8, eviction=LRU, prefix=Radix).eviction) is LRU
    policy = LRU()
    assert KVCache(8, eviction=policy).eviction is policy


def test_a_plugin_without_a_name_is_refused():
    """A plugin without a name raises PluginError when the cache is made."""

    class Anonymous(ScoreEviction):
        def score(self, span, now):
            return span.released_order

    says = r"eviction plugin .*Anonymous has no name \(None\): .* such as name = 'anonymous'"
    with pytest.raises(PluginError, match=says):
        KVCache(8, eviction=Anonymous())
    with pytest.raises(PluginError, match=says):
        compare_policies(Zipf(requests=5), Anonymous, 10)


@pytest.mark.parametrize(
    "make_traced",
    [
        lambda trace: KVCache(8, BLOCK, trace=trace),
        lambda trace: GroupedCache([LayerGroup("full", BLOCK)], 8, trace=trace),
    ],
    ids=["blocks", "groups"],
)
def test_a_request_has_one_first_admission_in_a_trace(make_traced):
    """A second first admission, and the return of an unknown request, raise InputError."""
    cache, request = make_traced(Lines()), ask("a")
    with pytest.raises(InputError, match="was not admitted before: leave out resumed=True"):
        cache.open(request, resumed=True)
    cache.close(cache.open(request))
    with pytest.raises(
        InputError, match="was admitted before: give another id, or resumed=True"
    ):
        cache.open(request)
    cache.close(cache.open(request, resumed=True))


def test_a_retention_that_drops_nothing_is_not_in_a_trace():
    """A cache whose retention policy keeps all tokens is one without it, as its trace says."""
    trace = Lines()
    assert KVCache(8, BLOCK, retention="full", trace=trace).retention is None
    assert trace.lines[0][1]["plugins"].keys() == {"eviction", "prefix"}


def test_a_request_may_move_between_servers_with_traces():
    """A request that another server admitted first returns here; its successor is new here."""
    cache = KVCache(8, BLOCK, eviction=LRU(), prefix=Radix(), trace=Lines())
    request = ask("a")
    cache.adopt(request)
    cache.close(cache.open(request, resumed=True))
    cache.disown(request)
    cache.disown(request)
    cache.close(cache.open(request))


@pytest.mark.parametrize(("reserve", "evictable"), [(0, 1), (1, 0)])
def test_a_request_without_room_is_told_what_there_is(reserve, evictable):
    """The blocks that a request hits, and those that must stay, do not count as evictable."""
    cache = make(6)
    serve(cache, "ab", "c")
    reason = rf"needs 6 more blocks; 3 of 6 are free and {evictable} can be evicted"
    with pytest.raises(OutOfBlocks, match=reason):
        cache.open(ask("abmnopqr"), reserve=reserve)


def test_a_request_larger_than_the_pool_is_told_that_it_never_fits():
    """A sequence larger than the pool is told so, at admission and later; no other one is."""
    cache = make(6)
    with pytest.raises(OutOfBlocks, match="can be evicted: 7 in all never fit, make"):
        cache.open(ask("abcdefg"))
    with pytest.raises(OutOfBlocks, match="evicted: 7 in all never fit"):
        cache.open(ask("abcd"), reserve=3)
    seq = cache.open(ask("abcd"))
    with pytest.raises(OutOfBlocks, match="evicted: 7 in all never fit"):
        cache.extend(seq, 3 * BLOCK)
    with pytest.raises(OutOfBlocks, match=r"can be evicted$"):
        cache.open(ask("vwxyz"))


def test_a_refused_request_is_in_the_trace():
    """A request whose admission is refused is in the trace."""
    trace = Lines()
    cache = KVCache(1, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
    with pytest.raises(OutOfBlocks):
        cache.open(ask("ab"))
    assert [event for event, _ in trace.lines] == ["HEADER", "REQUEST"]


def test_forks_are_no_admissions():
    """Forks do not advance the clock of `lfu:unit=accesses`, which counts admissions."""
    weights = []
    for forks in (0, 10):
        cache = make(16, LFU(half_life=1, unit="accesses"), accounting="keys")
        seq = cache.open(ask("a"))
        for _ in range(forks):
            cache.close(cache.fork(seq))
        serve(cache, "b")
        weights.append(spans(cache)["|b"].data)
    assert weights[0] == weights[1]


class Broken(ScoreEviction):
    """A policy whose score divides by zero."""

    name = "broken"

    def score(self, span, now):
        """Divide by zero."""
        return 1 // 0


def test_an_error_of_a_policy_names_the_file_and_line():
    """The error of a policy names the file, the line and the function that raised it."""
    cache = make(4, Broken())
    seq = compute(cache, cache.open(ask("ab")))
    with pytest.raises(PolicyError, match=r"\(test_kvcache_arguments\.py:\d+, score\)"):
        cache.close(seq)
