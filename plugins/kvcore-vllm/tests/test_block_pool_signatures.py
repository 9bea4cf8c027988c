"""The internals of vLLM that the adapter of the GPU block pool uses.

Versions 0.32 and 0.33 are supported. None of these internals is a public interface, so these
tests are the first to fail when vLLM changes.
"""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path
from warnings import catch_warnings

import pytest
from helpers.engines import required

required("vllm")
with catch_warnings(action="ignore"):  # warnings of vLLM's imports
    from helpers import vllm_engine  # noqa: F401 - stands in for what vLLM does not need here
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

    from kvcore_vllm import block_pool

VLLM = Path(find_spec("vllm").submodule_search_locations[0])

SIGNATURES = {
    BlockPool: {
        "touch": ["blocks"],
        "get_new_blocks": ["num_blocks"],
        "get_cached_block": ["block_hash", "kv_cache_group_ids"],
        "cache_full_blocks": ["request", "blocks", "num_cached_blocks", "num_full_blocks"],
        "free_blocks": ["ordered_blocks"],
        "evict_blocks": ["block_ids"],
        "move_block_hashes": ["src_block", "dst_block"],
        "reset_prefix_cache": [],
        "unpin_blocks": ["blocks", "on_reuse"],
        "_maybe_evict_cached_block": ["block"],
    },
    KVCacheManager: {
        "allocate_slots": ["request"],
        "free": ["request"],
        "pop_blocks_for_free": ["request"],
    },
    Scheduler: {
        "__init__": ["vllm_config", "kv_cache_config"],
        "add_request": ["request"],
        "_preempt_request": ["request"],
        "shutdown": [],
    },
    FreeKVCacheBlockQueue: {
        "popleft": [],
        "popleft_n": ["n"],
        "prepend_n": ["blocks"],
        "append": ["block"],
        "append_n": ["blocks"],
        "remove": ["block"],
        "get_all_free_blocks": [],
        "iter_blocks_after": ["cursor"],
    },
}


@pytest.mark.parametrize(
    ("kind", "method"), [(kind, name) for kind in SIGNATURES for name in SIGNATURES[kind]]
)
def test_a_method_has_the_expected_parameters(kind, method):
    """The first parameters of each method have the expected names and order."""
    names = [*inspect.signature(getattr(kind, method)).parameters][1:]
    wanted = SIGNATURES[kind][method]
    assert names[: len(wanted)] == wanted


def test_policy_queue_has_every_method_of_vllms_queue():
    """`PolicyQueue` has every public method of vLLM's queue of free blocks."""
    own = {name for name in vars(FreeKVCacheBlockQueue) if not name.startswith("_")}
    assert own <= {*dir(block_pool.PolicyQueue)}
    assert SIGNATURES[FreeKVCacheBlockQueue].keys() == own


def test_only_known_classes_use_the_queue():
    """Only the block pool and the connector that reads ahead use the queue of free blocks."""
    users = {
        path.relative_to(VLLM).as_posix()
        for path in VLLM.glob("v1/**/*.py")
        if "free_block_queue" in path.read_text("utf-8")
    }
    users |= {
        path.relative_to(VLLM).as_posix()
        for path in VLLM.glob("distributed/**/*.py")
        if "free_block_queue" in path.read_text("utf-8")
    }
    assert users == {"v1/core/block_pool.py", "v1/simple_kv_offload/manager.py"}


def test_only_known_methods_change_block_hashes():
    """Only known methods of the pool change block hashes: the adapter wraps or refuses each."""
    tree = ast.parse((VLLM / "v1/core/block_pool.py").read_text("utf-8"))
    (pool,) = (each for each in tree.body if getattr(each, "name", "") == "BlockPool")
    hooks = {"_insert_block_hash", "_remove_cached_block_hashes", "_maybe_evict_cached_block"}
    callers = {
        method.name
        for method in pool.body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and node.attr in hooks
    }
    assert callers - hooks == {
        "cache_full_blocks",
        "cache_partial_block",  # where a block has several hashes: refused
        "evict_blocks",
        "get_new_blocks",
        "move_block_hashes",
    }


def test_attributes_that_the_adapter_uses():
    """Requests, blocks, managers and schedulers have the attributes that the adapter uses."""
    source = inspect.getsource(Request)
    for name in ("cache_salt", "session_id", "priority", "num_preemptions", "block_hashes"):
        assert f"self.{name}" in source
    assert {"is_finished", "num_output_tokens"} <= {*dir(Request)}
    assert {"block_id", "ref_cnt", "is_null"} <= {*inspect.signature(KVCacheBlock).parameters}
    assert isinstance(KVCacheBlock.block_hash, property)
    assert "self.req_to_blocks" in inspect.getsource(SingleTypeKVCacheManager)
    assert "self.kv_cache_manager = KVCacheManager(" in inspect.getsource(Scheduler)
    assert issubclass(AsyncScheduler, Scheduler)
