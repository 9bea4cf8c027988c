"""The policy of LMCache, without LMCache: a recording of a back end that chunks have left."""

import logging
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import attrs

SOURCE = Path(__file__).parents[2] / "plugins/kvcore-lmcache/kvcore_lmcache/policy.py"
BASE = "lmcache.v1.storage_backend.cache_policy.base_policy"


@attrs.frozen
class ChunkKey:
    """A key of LMCache."""

    chunk_hash: int
    tags: None = None


def test_chunks_that_left_before_the_first_eviction_need_no_room(monkeypatch, tmp_path):
    """A recording has room for what is there at the first eviction, whatever left before."""
    for name in ("lmcache", "lmcache.logging", BASE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lmcache"].__version__ = "0"
    sys.modules["lmcache.logging"].init_logger = logging.getLogger
    sys.modules[BASE].BaseCachePolicy = object
    monkeypatch.setenv("KVCORE_TRACE", str(tmp_path / "day.jsonl"))
    spec = spec_from_file_location("lmcache_policy", SOURCE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    policy = module.KvcorePolicy("lru")
    entries, entry = policy.init_mutable_mapping(), SimpleNamespace(can_evict=True)
    for number in range(6):
        entries[ChunkKey(number)] = entry
        if number in (0, 1, 3):
            del entries[ChunkKey(number)]
    del entries[ChunkKey(4)]
    assert policy.get_evict_candidates(entries) == [ChunkKey(2)]
    del entries[ChunkKey(2)]
    entries[ChunkKey(6)] = entry
    recorder = policy._recorder
    recorder.close()
    assert (recorder.failure, recorder.disagreements) == (None, {})
    assert recorder.evictions.blocks == policy.host.blocks - 1 == 1
