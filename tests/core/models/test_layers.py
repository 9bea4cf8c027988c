"""Caches of layers: their errors, their bytes, and the FLOP of using them."""

from __future__ import annotations

from fractions import Fraction

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import RunConfig
from kvcore.errors import InputError
from kvcore.models.catalogue import MODELS, find_device, find_model
from kvcore.models.cost import attended_pairs, pair_flop, prefill_flop
from kvcore.models.layers import CACHE_KINDS, LayerCache, merged
from kvcore.models.memory import KVLayout, can_share, check_pool
from kvcore.models.spec import ModelSpec

FULL = LayerCache(kind="full", layers=2, kv_heads=4, key_dim=8, value_dim=8, pair_flop=100)
WINDOW = LayerCache(kind="window", layers=3, kv_heads=2, key_dim=8, value_dim=4, window=20)
LATENT = LayerCache(kind="mla", layers=2, kv_heads=1, key_dim=24, attended=50, pair_flop=7)
INDEX = LayerCache(kind="index", layers=2, entry_bytes=12, ratio=4, pair_flop=9)
ENTRIES = LayerCache(kind="compressed", layers=1, kv_heads=1, key_dim=16, ratio=8)
SHARED = LayerCache(kind="shared", layers=4, kv_heads=4, key_dim=8, value_dim=8, pair_flop=10)
CROSS = LayerCache(
    kind="cross", layers=1, kv_heads=4, key_dim=8, value_dim=8, window=30, pair_flop=5
)
STATE = LayerCache(kind="state", layers=5, state_bytes=1000, pair_flop=11)
EVERY = FULL, WINDOW, LATENT, INDEX, ENTRIES, SHARED, CROSS, STATE

lengths = st.integers(1, 300)


def model(*caches, **more):
    """Return a model of 5 layers that keep `caches`."""
    numbers = {"name": "toy", "layers": 5, "query_heads": 8, "kv_heads": 4, "head_dim": 8}
    return ModelSpec(hidden_size=64, parameters=1000, caches=caches, **numbers, **more)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kind": "ssm"}, f"known: {', '.join(CACHE_KINDS)}"),
        ({"layers": 0}, "layers must be 1 to"),
        ({"key_dim": -1}, "key_dim must be 0 to"),
        ({"key_dim": True}, "key_dim must be 0 to 2,147,483,647, not True"),
        ({"kind": "window"}, "needs a window"),
        ({"kind": "chunk", "window": 0}, "window must be 1 to"),
        ({"window": 5}, "'full' has no window"),
        ({"kind": "state"}, "needs state_bytes"),
        ({"state_bytes": 5}, "has no state_bytes"),
        ({"kind": "state", "state_bytes": 5}, "has no heads and no entries"),
        ({"kv_heads": 0}, "needs kv_heads and key_dim, or entry_bytes"),
        ({"ratio": 4}, "ratio must be 1"),
        ({"kind": "compressed", "ratio": 0}, "ratio must be 1 to"),
        ({"state_bytes": 2**60}, "state_bytes must be 0 to"),
    ],
)
def test_a_cache_that_contradicts_its_kind_is_refused(fields, problem):
    """A cache with numbers that its kind does not have raises InputError."""
    with pytest.raises(InputError) as caught:
        attrs.evolve(FULL, **fields)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("caches", "more", "problem"),
    [
        ([attrs.evolve(FULL, layers=6)], {}, "a cache of more than its 5 layers"),
        ([STATE], {}, "none of its caches grows with a token"),
        ([FULL], {"windows": (4,) * 5}, "windows of layers beside caches"),
    ],
)
def test_a_model_that_contradicts_its_caches_is_refused(caches, more, problem):
    """Caches that do not fit the model raise InputError."""
    with pytest.raises(InputError, match=problem):
        model(*caches, **more)


def test_equal_caches_are_one():
    """Caches that differ by their layers alone are one, where the first was."""
    assert merged([FULL, STATE, FULL]) == (attrs.evolve(FULL, layers=4), STATE)


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-12b", "deepseek-v3"])
def test_caches_that_say_what_heads_and_windows_say_size_the_same(name):
    """A model of heads, latents and windows is that of the caches that follow from them."""
    plain = find_model(name)
    caches = plain.layer_caches
    said = attrs.evolve(plain, windows=(None,) * plain.layers, caches=caches)
    one, other = KVLayout(plain), KVLayout(said)
    for tokens in (1, 1000, 5000):
        assert one.request_bytes(tokens) == other.request_bytes(tokens)
        assert prefill_flop(plain, tokens) == prefill_flop(said, tokens)
    assert KVLayout(plain).copies(16) == KVLayout(said).copies(16)


@given(lengths, st.integers(1, 40))
def test_a_request_keeps_each_kind_of_layer_by_its_own_rule(tokens, block_size):
    """The bytes of a request are those of each kind, counted by hand in 16 bits."""
    layout = KVLayout(model(*EVERY), "fp16", block_size)

    def padded(count):
        return -(-count // block_size) * block_size

    by_hand = {
        "full": 2 * padded(tokens) * 4 * 16 * 2,
        "window": 3 * padded(min(tokens, 20)) * 2 * 12 * 2,
        "mla": 2 * padded(tokens) * 24 * 2,
        "index": Fraction(2 * padded(tokens) * 12, 4),
        "compressed": Fraction(padded(tokens) * 16 * 2, 8),
        "shared": 0,
        "cross": padded(30) * 4 * 16 * 2,
        "state": 5 * 1000,
    }
    assert {c.kind: layout.kept_bytes(c, tokens) for c in EVERY} == by_hand
    assert layout.request_bytes(tokens) == -(-sum(by_hand.values()) // 1)


@given(lengths)
def test_decoding_reads_what_each_kind_attends_to(tokens):
    """A step reads K/V in reach, and reads and writes states; shared K/V is read again."""
    by_hand = [
        2 * tokens * 4 * 16 * 2,
        3 * min(tokens, 20) * 2 * 12 * 2,
        2 * min(tokens, 50) * 24 * 2,
        Fraction(2 * tokens * 12, 4),
        Fraction(tokens * 16 * 2, 8),
        4 * tokens * 4 * 16 * 2,
        30 * 4 * 16 * 2,
        2 * 5 * 1000,
    ]
    layout = KVLayout(model(*EVERY))
    assert layout.read_bytes(tokens) == -(-sum(by_hand) // 1)


@given(lengths, lengths)
def test_prefill_computes_pairs_in_reach(context, tokens):
    """The FLOP of a prefill are those of the parameters, and of the pairs of each kind."""
    spec = model(FULL, LATENT, INDEX, SHARED, CROSS, STATE)
    pairs, short = attended_pairs(context, tokens), attended_pairs(context, tokens, 50)
    everywhere = 2 * 100 + 4 * 10 + -(-2 * 9 // 4)
    by_hand = everywhere * pairs + 2 * 7 * short + (30 * 5 + 5 * 11) * tokens
    assert prefill_flop(spec, tokens, context) == 2 * 1000 * tokens + by_hand


def test_devices_copy_what_has_one_head_and_divide_states():
    """Latents and index keys lie on each device, states are divided, heads as they can be."""
    copies = {cache.kind: cache.copies(8) for cache in EVERY}
    whole = {"mla": 8, "index": 8, "compressed": 8}
    assert copies == whole | {"full": 2, "shared": 2, "cross": 2, "window": 4, "state": 1}
    layout = KVLayout(model(*EVERY))
    assert layout.kept_bytes(LATENT, 100, 8) == 8 * layout.kept_bytes(LATENT, 100)
    assert layout.kept_bytes(STATE, 100, 8) == layout.kept_bytes(STATE, 100)


def test_all_heads_of_a_model_decide_how_it_is_divided():
    """Devices that divide the heads of one kind of layer but not of another are too many."""
    three = attrs.evolve(WINDOW, kv_heads=3)
    spec = attrs.evolve(model(FULL, three), query_heads=24)
    assert [count for count in range(1, 25) if can_share(spec, count)] == [1, 12, 24]


@pytest.mark.parametrize(("window", "reach"), [(20, 20), (200, 50)])
def test_a_token_attends_to_no_more_than_the_window_and_the_selection(window, reach):
    """Of the tokens of a window and those that an indexer selects, the fewer are in reach."""
    assert LATENT.with_window(window).reach == reach


def test_limiting_the_window_limits_what_grows():
    """`with_window` leaves states and other sequences as they are."""
    limited = model(*EVERY).with_window(10)
    kinds = [(cache.kind, cache.window) for cache in limited.caches]
    assert kinds == [
        ("window", 10), ("window", 10), ("window", 10), ("index", 10), ("compressed", 10),
        ("shared", 10), ("cross", 30), ("state", None),
    ]  # fmt: skip


@pytest.mark.parametrize("cache", [STATE, CROSS, ENTRIES])
def test_a_pool_of_blocks_refuses_what_is_no_kv_of_tokens(cache):
    """A model with a state, compressed entries or cross attention has no pool of blocks."""
    with pytest.raises(InputError, match=f"keeps more than K/V of tokens.*{cache}"):
        check_pool(model(FULL, cache))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_pool_that_it_fills_or_is_refused(name):
    """As many requests fit into a pool as `size` says; fewer where it keeps past a window."""
    spec = find_model(name)
    if {cache.kind for cache in spec.layer_caches} & {"state", "compressed", "cross"}:
        with pytest.raises(InputError, match="`kvcore size` sizes it"):
            check_pool(spec)
        return
    check_pool(spec)
    layout, budget, tokens = KVLayout(spec), 10 * 2**40, 32_768
    in_pool = layout.blocks_in(budget) // layout.blocks_for(tokens)
    in_size = layout.requests_in(budget, tokens)
    assert in_pool < in_size if layout.pool_note else in_pool == in_size


def test_the_note_on_a_pool_says_which_layers_need_less():
    """The pool of a model with windows keeps more than an engine with cache groups."""
    note = KVLayout(find_model("gemma-3-12b")).pool_note
    assert "as an engine without cache groups" in note
    assert "(40 layers, window of 1,024 tokens)" in note
    assert not KVLayout(find_model("deepseek-v3.2")).pool_note


def test_simulate_says_what_its_pool_keeps_past_a_window():
    """The document of a run has the note, and only if there is one."""

    def notes(**options):
        return RunConfig(workload="zipf", **options).build().describe().get("notes")

    note = KVLayout(find_model("gemma-3-12b")).pool_note
    one = {"tensor_parallel": 1, "disable_hybrid_kv_cache_manager": True}
    assert notes(model="gemma-3-12b", **one) == [note]
    assert notes(model="gemma-3-12b", tensor_parallel=1) is None
    assert notes() is None


def test_roofline_reads_and_writes_states_whatever_the_context():
    """A step with states takes as long at any context, except for the layers with K/V."""
    from kvcore_plugins.latency.roofline import Roofline  # noqa: PLC0415 - a plugin

    latency = Roofline("qwen3-next-80b-a3b", device="h200", tensor_parallel=2)
    assert latency.windows == (None, 1)
    state, full = find_model("qwen3-next-80b-a3b").caches
    seconds = 2 * state.layers * state.state_bytes / (0.85 * 2 * find_device("h200").bandwidth)
    context = latency.coefficients()["attention"]["context_ps"]
    assert context[1] == pytest.approx(seconds * 1e12, rel=1e-6)
    assert dict(pair_flop(find_model("qwen3-next-80b-a3b"))) == {
        1: state.layers * state.pair_flop,
        None: full.layers * full.pair_flop,
    }
