"""How SGLang loads the adapter, which internals it uses, and how failures are handled."""

import inspect
import logging
from pkgutil import resolve_name

import pytest
from helpers.engines import required

required("sglang")
required("kvcore_sglang")

from helpers.cache_streams import CONVERSATION, Stream  # noqa: E402
from helpers.hosted_trees import hosted, in_sglang  # noqa: E402
from helpers.sglang_engine import SglangCache, TreeRequest  # noqa: E402
from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.mem_cache.utils import get_eviction_strategy  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from kvcore import EvictionPolicy, ScoreEviction  # noqa: E402
from kvcore.plugins import resolve  # noqa: E402
from kvcore_sglang import plugin  # noqa: E402
from kvcore_sglang.host import TreeHost, chain  # noqa: E402

load_plugins()

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of SGLang itself

CORES = ("radix", "python")
STREAM = Stream(CONVERSATION, 2048, 16, generates=True, limit=300)

SIGNATURES = {
    "unified_cache.tree_core_registry.select_tree_core_backend": "params",
    "radix_cache.RadixCache.__init__": "self params",
    "radix_cache.RadixCache.reset": "self",
    "radix_cache.RadixCache.match_prefix": "self params",
    "radix_cache.RadixCache.insert": "self params",
    "radix_cache.RadixCache.checkpoint": "self req up_to",
    "base_prefix_cache.BasePrefixCache.on_release": "self req checkpointed",
    "unified_radix_cache.UnifiedRadixCache.on_release": "self req checkpointed",
    "radix_cache.RadixCache._split_node": "self key child split_len",
    "radix_cache.RadixCache._delete_leaf": "self node",
    "radix_cache.RadixCache.inc_lock_ref": "self node",
    "radix_cache.RadixCache.dec_lock_ref": "self node params",
    "radix_cache.RadixCache.evict": "self params",
    "unified_cache.unified_tree_core.UnifiedTreeCore.__init__": "self params components",
    "unified_cache.unified_tree_core.UnifiedTreeCore.reset": "self",
    "unified_cache.unified_tree_core.UnifiedTreeCore.match_prefix": "self params",
    "unified_cache.unified_tree_core.UnifiedTreeCore.begin_insert": "self params",
    "unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree": "self req up_to kwargs",
    "unified_cache.unified_tree_core.UnifiedTreeCore._split_node": "self key child split_len",
    "unified_cache.unified_tree_core.UnifiedTreeCore._remove_leaf_from_parent": "self node",
    "unified_cache.unified_tree_core.UnifiedTreeCore.inc_lock_ref": (
        "self node_id skip_lock_components"
    ),
    "unified_cache.unified_tree_core.UnifiedTreeCore.dec_lock_ref": (
        "self node_id params skip_swa"
    ),
    "unified_cache.unified_tree_core.UnifiedTreeCore.inc_full_pin": "self node_id",
    "unified_cache.unified_tree_core.UnifiedTreeCore.dec_full_pin": "self node_id",
    "unified_cache.components.full.FullComponent._evict_device_start": "self request_cnt",
    "unified_cache.components.full.FullComponent._evict_device_next_node": (
        "self tracker device_frees host_frees cache_actions"
    ),
    "unified_radix_cache.UnifiedRadixCache.init_hicache": "self server_args params",
    "unified_radix_cache.UnifiedRadixCache.init_cache_linker": "self cache_linker",
}
"""The hooked functions, with their parameters in SGLang 0.5.23."""


def params(**more):
    """Return SGLang's parameters of a cache."""
    given = {
        "disable": False,
        "req_to_token_pool": None,
        "token_to_kv_pool_allocator": None,
        "page_size": 1,
        "eviction_policy": "kvcore",
        "eviction_policy_config": {"eviction": "sieve"},
        "tree_components": (ComponentType.FULL,),
    }
    return CacheInitParams(**given | more)


@pytest.fixture
def named(monkeypatch):
    """Return a function that makes the adapter use a policy class, and returns its name."""

    def choose(policy):
        def found(kind, name):
            return policy() if name == "own" else resolve(kind, name)

        monkeypatch.setattr(plugin, "resolve", found)
        return "own"

    return choose


def test_the_entry_point_adds_the_policy_and_all_hooks():
    """`load_plugins` adds the policy `kvcore` and patches every target of `HOOKS`."""
    assert "kvcore" in RADIX_EVICTION_POLICY_CHOICES
    assert isinstance(
        get_eviction_strategy("kvcore", {"eviction": "sieve"}), plugin.KvcoreStrategy
    )
    targets = {f"sglang.srt.mem_cache.{target}" for target in plugin.HOOKS}
    assert targets <= HookRegistry._patched


def test_signatures_of_the_hooked_functions():
    """The hooked functions have the parameters that they had in SGLang 0.5.23."""
    found = {}
    for target in plugin.HOOKS:
        function = inspect.unwrap(resolve_name(f"sglang.srt.mem_cache.{target}"))
        found[target] = " ".join(inspect.signature(function).parameters)
    assert found == SIGNATURES


def test_attributes_that_the_host_reads():
    """Nodes, keys and trees of SGLang have the attributes that the host reads."""
    for core in CORES:
        theirs = SglangCache(8, core, "kvcore", {"eviction": "sieve"})
        theirs.insert(theirs._tokens([1, 2, 3]), 0, None)
        tree = theirs.cache if core == "radix" else theirs.cache.tree_core
        node = next(iter(tree.root_node.children.values()))
        assert tree.root_node.parent is None
        assert node.parent is tree.root_node
        assert node.last_access_time
        assert list(node.key) == [1, 2, 3]
        assert node.key.child_key(1) == 1
        assert node.key.extra_key is node.key.cache_salt is None
        leaves = tree.evictable_leaves if core == "radix" else tree.evictable_device_leaves
        assert leaves == {node}
    assert {field.name for field in EvictParams.__dataclass_fields__.values()} >= {"num_tokens"}
    assert "req" in MatchPrefixParams.__dataclass_fields__


def test_policies_of_sglang_have_no_host():
    """Without `--radix-eviction-policy kvcore`, SGLang's caches have no host."""
    theirs = SglangCache(8, "radix")
    assert theirs.host is None
    assert in_sglang(STREAM, "radix", "lru")[1]


def test_the_environment_selects_the_policy(monkeypatch):
    """Without a config, `KVCORE_EVICTION` selects the policy and its options."""
    monkeypatch.setenv("KVCORE_EVICTION", "slru:protected=0.8")
    cache = RadixCache(params(eviction_policy_config=None))
    policy = cache.eviction_strategy.host.eviction
    assert (policy.name, policy.protected) == ("slru", 0.8)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"eviction": "nonsense"}, "nonsense"),
        ({"eviction": "ttl"}, "lets blocks expire"),
        ({"eviction": "lookahead"}, "looks ahead"),
        ({"eviction": "tool-ttl"}, "tool calls"),
    ],
)
def test_a_policy_that_cannot_run_is_refused(config, why):
    """A policy that is unknown or cannot run in SGLang raises ValueError with the reason."""
    with pytest.raises(ValueError, match=why):
        RadixCache(params(eviction_policy_config=config))


def test_caches_that_cannot_host_are_refused():
    """Window caches, Mamba layers, sessions and tiers raise ValueError with the reason."""
    with pytest.raises(ValueError, match="PureSWARadixCache"):
        PureSWARadixCache(params())
    with pytest.raises(ValueError, match="sessions"):
        UnifiedRadixCache(params(enable_session_radix_cache=True))
    cache = UnifiedRadixCache(params())
    with pytest.raises(ValueError, match="hierarchical"):
        cache.init_hicache(None, None)
    components = (ComponentType.FULL, ComponentType.MAMBA)
    with pytest.raises(ValueError, match="MAMBA"):
        plugin._made_core(None, None, None, params(), components)


def test_kvcore_uses_the_tree_core_in_python():
    """With `kvcore`, SGLang uses the tree core in Python; with other policies, that in Rust."""
    assert plugin._python_core("rust", params()) == "python"
    assert plugin._python_core("rust", params(eviction_policy="lru")) == "rust"
    assert type(UnifiedRadixCache(params()).tree_core).__name__ == "UnifiedTreeCore"


def test_a_reset_starts_with_an_empty_tree():
    """After `reset`, a new host starts with an empty tree."""
    theirs = SglangCache(64, "radix", "kvcore", {"eviction": "sieve"})
    theirs.insert(theirs._tokens([1, 2, 3]), 0, None)
    strategy, before = theirs.cache.eviction_strategy, theirs.host
    theirs.cache.reset()
    assert strategy.host is not before
    theirs.insert(theirs._tokens([1, 2, 3]), 0, None)
    assert strategy.host.failure is None


class Raises(EvictionPolicy):
    """A policy whose `victim` raises."""

    name = "raises"

    def victim(self, now):
        """Raise RuntimeError."""
        raise RuntimeError


class Nonsense(EvictionPolicy):
    """A policy whose victim is not a span."""

    name = "nonsense"

    def victim(self, now):
        """Return a text."""
        return "the first one"


class Unordered(ScoreEviction):
    """A policy whose score is None."""

    name = "unordered"

    def score(self, span, now):
        """Return None."""
        return


class FailsOnInsert(EvictionPolicy):
    """A policy whose `on_insert` raises."""

    name = "fails-on-insert"

    def on_insert(self, span, now):
        """Raise KeyError."""
        raise KeyError(span)

    def victim(self, now):
        """Return None; never called."""


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", [Raises, Nonsense, Unordered, FailsOnInsert])
def test_a_policy_that_fails_leaves_sglang_its_own_order(policy, core, named, caplog):
    """If a policy fails, SGLang hits and evicts as with `lru`, and one warning is logged."""
    with caplog.at_level(logging.WARNING, "kvcore"):
        found = hosted(STREAM, core, named(policy))
    assert found == in_sglang(STREAM, core, "lru")
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert policy().name in record.message
    assert "least recently used" in record.message


def test_failures_are_counted(named):
    """The strategy counts the failure of a policy, and a reset does not restore that policy."""
    theirs = SglangCache(64, "radix", "kvcore", {"eviction": named(FailsOnInsert)})
    strategy = theirs.cache.eviction_strategy
    assert strategy.failures == 0
    theirs.insert(theirs._tokens([1, 2, 3]), 0, None)
    assert strategy.failures == 1
    theirs.cache.reset()
    theirs.insert(theirs._tokens([1, 2, 3]), 0, None)
    assert strategy.failures == 1  # the policy would have failed again


def test_scores_go_through_get_priority(named):
    """A score policy evicts leaves in the order of its scores, through SGLang's own heap."""

    class Longest(ScoreEviction):
        name = "longest"

        def score(self, span, now):
            return -span.blocks

    theirs = SglangCache(64, "radix", "kvcore", {"eviction": named(Longest)})
    assert not theirs.cache.eviction_strategy.chooses
    for keys in ([1, 2], [11, 12, 13], [21]):
        theirs.insert(theirs._tokens(keys), 0, None)
    theirs.cache.evict(EvictParams(num_tokens=4))
    assert theirs.evicted == [13, 12, 11, 2, 1]


def test_a_lock_that_is_undone_is_no_hit():
    """Only a lock that is kept until the next call counts as a hit, not one that is undone."""
    theirs = SglangCache(64, "radix", "kvcore", {"eviction": "lfu:half_life=inf"})
    theirs.insert(theirs._tokens([1, 2, 3]), 0, None)
    request = TreeRequest("a")
    for _ in range(3):
        node = theirs.match(theirs._tokens([1, 2, 3]), None, request).last_device_node
        theirs.cache.unlock(theirs.cache.lock(node))
    span = theirs.host.span(node)
    theirs.insert(theirs._tokens([7]), 0, None)
    assert span.hit_count == 0
    trial = theirs.cache.lock(node)
    kept = theirs.cache.lock(node)
    theirs.cache.unlock(trial)
    theirs.insert(theirs._tokens([8]), 0, None)
    assert span.hit_count == 1
    assert span.last_request == "a"
    theirs.cache.unlock(kept)


class Tokens(tuple):  # noqa: SLOT001 - with salts of their own
    """A key of tokens."""

    extra_key = cache_salt = None

    def child_key(self, page_size):
        """Return the tokens of the first page."""
        return self[:page_size]


class Node:
    """A node of a tree, with its parent and its key."""

    def __init__(self, parent, key):
        self.parent, self.key = parent, key


def test_keys_of_pages_are_chained():
    """The key of a page depends on all pages before it and their order, and on nothing else."""
    whole = chain(0, [1, 2, 3, 4, 5, 6], 2)
    assert len(whole) == 3
    assert whole[1:] == chain(whole[0], [3, 4, 5, 6], 2)
    assert len({*whole, *chain(0, [3, 4, 1, 2, 5, 6], 2)}) == 6
    assert chain(0, [1, 2, 3], 1)[0] != chain(1, [1, 2, 3], 1)[0]


def test_a_client_does_not_choose_the_key_that_its_prompt_begins_with():
    """Keys of two salts differ, where the bytes of these are equal modulo 2^63 - 1."""
    host, prompt = TreeHost(resolve("eviction", "lru"), 16, 1), Tokens([1, 2])
    keys = []
    # 63 letters lie between the ends: 2^(8 * 63) is 1, modulo 2^63 - 1.
    for prompt.cache_salt in (None, "a" * 63 + "b", "b" + "a" * 63, "\ud800"):
        keys += host._keys(None, prompt)
    assert len(set(keys)) == 8


def test_a_long_conversation_has_its_keys():
    """Keys that are first read below thousands of nodes are those of the whole prompt."""
    host = TreeHost(resolve("eviction", "s3fifo"), 1 << 20, 1)
    node = Node(None, Tokens())
    for token in range(5000):
        node = Node(node, Tokens([token]))
        host.inserted(node)
    assert host.span(node).path_keys[-2:] == chain(0, range(5000), 1)[-2:]
    host.evicting()
    host.removed(node)


def test_pages_of_many_tokens():
    """With pages of four tokens, a node of eight is a span of two blocks, with chained keys."""
    host = TreeHost(resolve("eviction", "arc"), 16, 4)
    root = Node(None, Tokens())
    key = Tokens(range(8))
    node = Node(root, key)
    host.inserted(node)
    span = host.span(node)
    assert (span.blocks, span.tokens) == (2, 8)
    assert span.keys() == chain(0, range(8), 4)
