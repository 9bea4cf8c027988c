"""The plugin that SGLang loads: a policy by name, and hooks on its caches.

Each hook calls the host of the policy. SGLang documents hooks and the list of names as ways to
extend it; the table from names to strategies is private, and so are most of the hooked methods:
tests check their signatures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from kvcore import EvictionPolicy, InputError
from kvcore.plugins import resolve
from kvcore.plugins.base import FAILURES
from kvcore_hosting import EngineRecorder, HostSettings
from kvcore_sglang.host import TreeHost, refuse

NAME = "kvcore"
"""The value of `--radix-eviction-policy`."""

_log = logging.getLogger("kvcore")


def register() -> None:
    """Add the policy and the hooks to SGLang, which calls this in each of its processes."""
    from sglang.srt.arg_groups import choices  # noqa: PLC0415
    from sglang.srt.mem_cache import utils  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    if NAME not in choices.RADIX_EVICTION_POLICY_CHOICES:
        choices.add_radix_eviction_policy_choices([NAME])
    utils._EVICTION_POLICY_FACTORIES[NAME] = KvcoreStrategy  # noqa: SLF001
    for target, (kind, hook) in HOOKS.items():
        HookRegistry.register(f"sglang.srt.mem_cache.{target}", hook, HookType[kind])


class KvcoreStrategy:
    """An eviction strategy of SGLang in the order of a kvcore policy.

    Args:
        eviction: name of the policy, with options; None: that of `KVCORE_EVICTION`.
        renew_split: see `TreeHost`.

    Attributes:
        host: the host of the policy; None until SGLang has made the cache.

    Raises:
        ValueError: no such policy or option, or one that cannot run in SGLang.
    """

    def __init__(self, eviction: str | None = None, *, renew_split: bool = False) -> None:
        self.host: TreeHost | None = None
        self._renew_split = renew_split
        self._size = 0, 1
        self._recorder: EngineRecorder | None = None
        try:
            settings = HostSettings.from_environment()
            self._trace = settings.trace
            self._eviction = settings.eviction if eviction is None else eviction
            refuse(self._build())
        except InputError as error:
            msg = f"--radix-eviction-policy {NAME}: {error}"
            raise ValueError(msg) from error

    def _build(self) -> EvictionPolicy:
        policy: EvictionPolicy = resolve("eviction", self._eviction)
        return policy

    @property
    def failures(self) -> int:
        """Return the number of policies that have failed: 0 or 1."""
        return int(self.host is not None and self.host.failure is not None)

    @property
    def chooses(self) -> bool:
        """Return True if the policy chooses each victim, not a priority for each leaf."""
        return self.host is not None and not self.failures and not self.host.scores

    def attach(self, owner: Any, params: Any) -> None:
        """Create the host for a cache or a tree core, `owner`, that SGLang has just made."""
        size = getattr(params.token_to_kv_pool_allocator, "size", 0)
        self._size = max(1, size // owner.page_size), owner.page_size
        group = params.tp_cache_group
        if self._trace is not None and (group is None or group.rank() == 0):
            self._recorder = EngineRecorder(
                self._trace,
                blocks=self._size[0],
                block_size=owner.page_size,
                eviction=self._build(),
                engine=f"sglang {version('sglang')}",
                duplicates=False,
            )
        self._begin()
        _log.info("%s decides what leaves a %s", self._eviction, type(owner).__name__)

    def reset(self) -> None:
        """Start again with a new policy: SGLang has emptied the cache."""
        if self.host is not None and not self.failures:
            if self._recorder is not None:
                self._recorder.cleared(self.host.clock())
            self._begin()

    def _begin(self) -> None:
        self.host = TreeHost(self._build(), *self._size, renew_split=self._renew_split)
        self.host.recorder = self._recorder

    def tell(self, method: str, *args: Any) -> Any:
        """Call a method of the host; if it fails, SGLang continues without the policy."""
        host = self.host
        if host is None or host.failure is not None:
            return None
        try:
            return getattr(host, method)(*args)
        except FAILURES as error:
            host.fail(method, error)
            return None

    def get_priority(self, node: Any) -> Any:
        """Return the place of a leaf in the order of eviction: the lowest leaves first.

        Once the policy has failed, by the time of its last access.
        """
        if self.host is not None and self.host.scores:
            priority = self.tell("priority", node)
            if priority is not None:
                return 0, *priority
        return 1, node.last_access_time


def _strategy(owner: Any) -> KvcoreStrategy | None:
    """Return the strategy of a cache or of a tree core, if it is a `KvcoreStrategy`."""
    strategy = getattr(owner, "eviction_strategy", None)
    return strategy if isinstance(strategy, KvcoreStrategy) else None


def _after(method: Callable[..., None]) -> tuple[str, Callable[..., None]]:
    """Return a hook that calls `method(strategy, result, owner, …)` after the hooked method."""

    def hook(result: Any, owner: Any, *args: Any, **more: Any) -> None:
        strategy = _strategy(owner)
        if strategy is not None:
            method(strategy, result, owner, *args, **more)

    return "AFTER", hook


def _around(method: Callable[..., Any], core: str = "") -> tuple[str, Callable[..., Any]]:
    """Return a hook that calls `method(strategy, original, owner, …)` in place of the method.

    `core`: attribute of the owner that has the strategy.
    """

    def hook(original: Callable[..., Any], owner: Any, *args: Any, **more: Any) -> Any:
        strategy = _strategy(getattr(owner, core) if core else owner)
        if strategy is None:
            return original(owner, *args, **more)
        return method(strategy, original, owner, *args, **more)

    return "AROUND", hook


def _telling(event: str) -> tuple[str, Callable[..., None]]:
    """Return a hook that tells the host what the hooked method has done to its first node."""

    def tell(
        strategy: KvcoreStrategy, _result: Any, owner: Any, node: Any, *_more: Any, **_: Any
    ) -> None:
        strategy.tell(event, _node(owner, node))

    return _after(tell)


# Checks that a cache can be hosted.


def _refuse(what: str, why: str) -> None:
    msg = f"--radix-eviction-policy {NAME} cannot be used with {what}: {why}"
    raise ValueError(msg)


def _made_radix(strategy: KvcoreStrategy, _result: None, cache: Any, params: Any) -> None:
    if type(cache).__name__ != "RadixCache":
        _refuse(f"a {type(cache).__name__}", "it evicts in ways of its own")
    strategy.attach(cache, params)


def _made_core(
    strategy: KvcoreStrategy, _result: None, core: Any, params: Any, components: Any
) -> None:
    others = [component.name for component in components if component.name != "FULL"]
    if others:
        _refuse(f"{' and '.join(others)} layers", "they evict parts of a node by themselves")
    if params.enable_session_radix_cache:
        _refuse("--enable-session-radix-cache", "sessions change what leaves first")
    strategy.attach(core, params)


def _with_tier(_strategy: KvcoreStrategy, _original: Any, _cache: Any, *_args: Any) -> None:
    _refuse("a hierarchical cache or cache linker", "nodes that are evicted stay in its tree")


def _python_core(name: str, params: Any) -> str:
    """Choose the tree core in Python: the core in Rust has built-in policies only."""
    if name == "rust" and params.eviction_policy.lower() == NAME and not params.disable:
        _log.info("--radix-eviction-policy %s takes the tree core in Python", NAME)
        return "python"
    return name


# Calls of the host.


def _match(strategy: KvcoreStrategy, original: Any, owner: Any, params: Any) -> Any:
    strategy.tell("begin")
    result = original(owner, params)
    strategy.tell("matched", _node(owner, result.last_device_node), params.key, params.req)
    return result


def _insert(strategy: KvcoreStrategy, original: Any, owner: Any, params: Any) -> Any:
    strategy.tell("begin")
    done = original(owner, params)
    # A tree core wraps the result, together with the indices to free.
    result = getattr(done, "result", done)
    if result is not None and result.last_device_node is not None:
        strategy.tell("inserted", _node(owner, result.last_device_node))
    return done


def _checkpoint(
    strategy: KvcoreStrategy, original: Any, cache: Any, req: Any, **more: Any
) -> Any:
    host = strategy.host
    if host is None:
        return original(cache, req, **more)
    host.request = req
    try:
        return original(cache, req, **more)
    finally:
        host.request = None


def _ended(strategy: KvcoreStrategy, original: Any, cache: Any, req: Any, **more: Any) -> None:
    original(cache, req, **more)
    strategy.tell("ended", req)


def _split(
    strategy: KvcoreStrategy, result: Any, _owner: Any, _key: Any, child: Any, *_more: Any
) -> None:
    upper = result[0] if isinstance(result, tuple) else result
    strategy.tell("split", upper, child)


def _reset(strategy: KvcoreStrategy, _result: None, _owner: Any) -> None:
    strategy.reset()


def _node(owner: Any, node: Any) -> Any:
    """Return a node; tree cores give its id."""
    return owner.node_by_id(node) if isinstance(node, int) else node


# Eviction. SGLang builds a heap of all leaves by their priorities. Where the policy names the
# victims, that is a heap of one.


def _evict(strategy: KvcoreStrategy, original: Any, cache: Any, params: Any) -> Any:
    strategy.tell("evicting")
    evicted, result = 0, None
    while strategy.chooses and evicted < params.num_tokens and cache.evictable_leaves:
        node = strategy.tell("victim")
        if node is None:
            break
        leaves, cache.evictable_leaves = cache.evictable_leaves, {node}
        try:
            result = original(cache, type(params)(num_tokens=1))
        finally:
            leaves.discard(node)
            leaves |= cache.evictable_leaves
            cache.evictable_leaves = leaves
        evicted += result.num_tokens_evicted
    if result is None or (evicted < params.num_tokens and cache.evictable_leaves):
        result = original(cache, type(params)(num_tokens=params.num_tokens - evicted))
        evicted += result.num_tokens_evicted
    result.num_tokens_evicted = evicted
    return result


def _evict_start(strategy: KvcoreStrategy, original: Any, full: Any, request_cnt: int) -> None:
    strategy.tell("evicting")
    if not strategy.chooses:
        original(full, request_cnt)
        return
    core = full.tree_core
    leaves, core.evictable_device_leaves = core.evictable_device_leaves, set()
    try:
        original(full, request_cnt)
    finally:
        core.evictable_device_leaves = leaves


def _evict_next(
    strategy: KvcoreStrategy, original: Any, full: Any, tracker: Any, *args: Any, **more: Any
) -> Any:
    count = full._evict_device_request_cnt  # noqa: SLF001
    if strategy.chooses and tracker[full.component_type] < count:
        node = strategy.tell("victim") if full.tree_core.evictable_device_leaves else None
        full._evict_device_last_node = None  # noqa: SLF001
        full._evict_device_heap = [] if node is None else [((), node)]  # noqa: SLF001
        if strategy.failures:
            full._evict_device_start(count)  # noqa: SLF001
    return original(full, tracker, *args, **more)


_RADIX = "radix_cache.RadixCache"
_CORE = "unified_cache.unified_tree_core.UnifiedTreeCore"
_UNIFIED = "unified_radix_cache.UnifiedRadixCache"
_FULL = "unified_cache.components.full.FullComponent"

HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "unified_cache.tree_core_registry.select_tree_core_backend": ("AFTER", _python_core),
    f"{_RADIX}.__init__": _after(_made_radix),
    f"{_RADIX}.reset": _after(_reset),
    f"{_RADIX}.match_prefix": _around(_match),
    f"{_RADIX}.insert": _around(_insert),
    f"{_RADIX}.checkpoint": _around(_checkpoint),
    "base_prefix_cache.BasePrefixCache.on_release": _around(_ended),
    f"{_UNIFIED}.on_release": _around(_ended, "tree_core"),
    f"{_RADIX}._split_node": _after(_split),
    f"{_RADIX}._delete_leaf": _telling("removed"),
    f"{_RADIX}.inc_lock_ref": _telling("locked"),
    f"{_RADIX}.dec_lock_ref": _telling("unlocked"),
    f"{_RADIX}.evict": _around(_evict),
    f"{_CORE}.__init__": _after(_made_core),
    f"{_CORE}.reset": _after(_reset),
    f"{_CORE}.match_prefix": _around(_match),
    f"{_CORE}.begin_insert": _around(_insert),
    f"{_UNIFIED}.checkpoint_into_tree": _around(_checkpoint, "tree_core"),
    f"{_CORE}._split_node": _after(_split),
    f"{_CORE}._remove_leaf_from_parent": _telling("removed"),
    f"{_CORE}.inc_lock_ref": _telling("locked"),
    f"{_CORE}.dec_lock_ref": _telling("unlocked"),
    f"{_CORE}.inc_full_pin": _telling("locked"),
    f"{_CORE}.dec_full_pin": _telling("unlocked"),
    f"{_FULL}._evict_device_start": _around(_evict_start, "tree_core"),
    f"{_FULL}._evict_device_next_node": _around(_evict_next, "tree_core"),
    f"{_UNIFIED}.init_hicache": _around(_with_tier, "tree_core"),
    f"{_UNIFIED}.init_cache_linker": _around(_with_tier, "tree_core"),
}
"""Hooks by name of the hooked method, below `sglang.srt.mem_cache`."""
