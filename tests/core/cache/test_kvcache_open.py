"""Admission: its hooks, its trace, and refusals that change nothing."""

import pytest
from helpers.caches import BLOCK, Lines, Recorded, ask, compute, make, serve, spans

from kvcore import InputError, KVCache, OutOfBlocks, Request
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import NoPrefix, Radix


def test_first_tokens_are_allocated_after_the_hit():
    """`first_tokens` is the number of tokens to allocate after the hit."""
    cache = make()
    serve(cache, "abc")
    seq = cache.open(ask("abcdef"), 6)
    assert (seq.hit_blocks, seq.tokens, seq.blocks) == (3, 18, 5)


def test_negative_first_tokens_are_refused(snapshot):
    """A negative `first_tokens` raises InputError and changes nothing."""
    cache = make()
    serve(cache, "abc")
    before = snapshot(cache)
    with pytest.raises(InputError, match="first -5 tokens"):
        cache.open(ask("abcd"), -5)
    assert snapshot(cache) == before


@pytest.mark.parametrize("text", ["abcdefgh", "xyz", "xyzxyzxyz"])
def test_a_refused_admission_changes_nothing(text, snapshot):
    """A refused admission changes nothing: no split, pin, access or eviction."""
    cache = make(6, Recorded())
    held = cache.open(ask("mnop"))
    compute(cache, held, now=1)
    serve(cache, "ab", now=2)
    before, callbacks = snapshot(cache), list(cache.eviction.callbacks)
    with pytest.raises(OutOfBlocks):
        cache.open(ask(text), now=9)
    assert snapshot(cache) == before
    assert cache.eviction.callbacks == callbacks


def test_an_error_of_the_trace_is_raised_unchanged():
    """An error of the trace is raised as it is, and not as an error of a plugin."""

    class Full(Lines):
        """A trace whose disk is full at the first eviction."""

        def write(self, line):
            if line["event"] == "EVICT":
                msg = "disk full"
                raise OSError(msg)
            super().write(line)

    cache = make(4, trace=Full())
    serve(cache, "ab", "xy")
    with pytest.raises(OSError, match="disk full"):
        cache.open(ask("abcd"))


def test_out_of_blocks_names_all_the_numbers():
    """OutOfBlocks names the numbers of missing, free, all and evictable blocks.

    Blocks of the hit do not count as evictable.
    """
    cache = make(6)
    cache.open(ask("mn"))
    serve(cache, "ab", "xy")
    with pytest.raises(
        OutOfBlocks, match=r"needs 3 more .* 0 of 6 are free and 2 can be evicted"
    ):
        cache.open(ask("abcde"))


def test_the_hooks_of_an_admission_are_called_in_order():
    """An admission calls hooks in order: split, pins, miss, evictions, accesses.

    Pins go from the root to the leaf, accesses from the leaf to the root.
    """
    cache = make(6, Recorded())
    serve(cache, "ab", "abcd", "xy")
    cache.eviction.callbacks.clear()
    cache.open(ask("abcmn"))
    assert cache.eviction.callbacks == [
        ("on_split", "abc|d"),
        ("on_pin", "|ab"),
        ("on_miss", 3),
        ("on_remove", "abc|d"),
        ("on_trim", "|x"),
        ("on_access", "ab|c"),
        ("on_access", "|ab"),
    ]


def test_on_miss_is_called_once_for_each_miss():
    """`on_miss` is called once for each miss, with the number of blocks that hit.

    It is not called if all blocks hit that could, nor for a resumed request. The last block
    of a prompt cannot hit.
    """
    cache = make(40, Recorded())
    serve(cache, "abc")
    cache.eviction.callbacks.clear()
    for text in ("abc", "abx", "m"):
        cache.open(ask(text))
    cache.open(ask("abxyz"), resumed=True)
    assert "on_miss" not in dict(cache.eviction.callbacks)
    for text in ("abcde", "axy", "mn"):
        cache.open(ask(text))
    misses = [hit for method, hit in cache.eviction.callbacks if method == "on_miss"]
    assert misses == [3, 1, 0]


def test_the_trace_of_an_admission():
    """An admission writes SPLIT, EVICT, HIT, MISS and ALLOC, with the span of the hit."""
    trace = Lines()
    cache = make(4, trace=trace)
    serve(cache, "abcd")
    trace.lines.clear()
    request = ask("abxy")
    seq = cache.open(request, now=3)
    upper = spans(cache)["|ab"]
    assert trace.events() == ["SPLIT", "EVICT", "HIT", "MISS", "ALLOC"]
    assert trace.of("HIT") == [
        {"request": request.id, "seq": seq.id, "blocks": 2, "span": upper.id}
    ]
    assert trace.of("MISS") == [
        {"request": request.id, "seq": seq.id, "block": 2, "why": "absent"}
    ]
    assert list(trace.of("EVICT")[0]["runs"]) == list(trace.of("ALLOC")[0]["runs"]) == [3, 2]


@pytest.mark.parametrize(
    ("text", "tokens", "why"),
    [("axx", 12, "absent"), ("abc", 12, "partial"), ("ab", 16, "no keys"), ("", 11, "no keys")],
)
def test_why_a_hit_ended(text, tokens, why):
    """MISS has the reason why the hit ended: `absent`, `partial` or `no keys`."""
    trace = Lines()
    cache = make(trace=trace)
    serve(cache, "abc")
    cache.open(ask(text, tokens))
    assert trace.of("MISS")[-1]["why"] == why


def test_a_full_hit_in_keys_accounting_is_no_miss():
    """A full hit in `keys` accounting writes only HIT, and no MISS or ALLOC."""
    trace = Lines()
    cache = make(trace=trace, accounting="keys")
    serve(cache, "abc")
    trace.lines.clear()
    cache.open(ask("abc"))
    assert trace.events() == ["HIT"]


@pytest.mark.parametrize("used", ["eviction", "prefix"])
def test_a_plugin_serves_one_cache(used):
    """A policy or prefix index that another cache uses raises InputError with its name."""
    plugins = {"eviction": LRU(), "prefix": Radix()}
    KVCache(4, **plugins)
    fresh = {"eviction": LRU(), "prefix": Radix()} | {used: plugins[used]}
    with pytest.raises(InputError, match=f"{used} plugin '{plugins[used].name}' is in use"):
        KVCache(4, **fresh)


def test_key_tokens_must_be_positive():
    """`key_tokens=0` raises InputError."""
    with pytest.raises(InputError, match="key size 0"):
        make(key_tokens=0)


def test_a_cache_without_ids_has_no_block_tables():
    """Without block ids, `block_table` raises InputError that names `ids=True`."""
    cache = make(ids=False)
    seq = cache.open(ask("ab"))
    with pytest.raises(InputError, match="ids=True"):
        cache.block_table(seq)


def test_without_a_prefix_cache_nothing_is_shared():
    """With the prefix index `none` no block is shared or stays cached."""
    cache = make(prefix=NoPrefix())
    serve(cache, "abc")
    assert cache.probe(ask("abc")) == 0
    assert cache.pool.free_blocks == 8


def test_a_request_without_tokens_occupies_no_blocks():
    """A request of 0 tokens opens and closes, and takes no blocks."""
    cache = make()
    seq = cache.open(Request(id="empty", prompt_tokens=0, key_tokens=BLOCK))
    cache.close(seq)
    assert cache.pool.free_blocks == 8
    cache.check_integrity()
