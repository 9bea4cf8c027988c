"""The recording of vLLM's CPU tier, without vLLM: the decisions on the first cache group."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from kvcore import read_events

SOURCE = Path(__file__).parents[2] / "plugins/kvcore-vllm/kvcore_vllm"
MODULES = {"vllm.v1.kv_offload.base", "vllm.v1.kv_offload.cpu.policies.base"}


class Chunk:
    """A chunk that is stored."""

    is_ready, ref_cnt = False, 0


class Context:
    """A request with its chunks, as vLLM passes it."""

    kv_hints = None

    def __init__(self, req_id, keys):
        self.req_id = req_id
        self._offload_key_positions = dict.fromkeys(keys, 16)
        self.state = None

    def get_state(self, _kind):
        """Return the state of the policy."""
        return self.state

    def set_state(self, state):
        """Store the state of the policy."""
        self.state = state

    def get_offload_key_position(self, key):
        """Return the end of a chunk in the prompt."""
        return self._offload_key_positions[key]


@pytest.fixture
def tier(monkeypatch, tmp_path):
    """Return the policy of a tier of four chunks, whose keys end with their group."""
    for name in ("vllm", "kvcore_vllm", *MODULES):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__version__ = "0"
    sys.modules["kvcore_vllm"].__path__ = [str(SOURCE)]
    base, policies = (sys.modules[name] for name in sorted(MODULES))
    base.OffloadKey, base.ReqContext = bytes, Context
    base.get_offload_group_idx = lambda key: key[-1]
    policies.ChunkStatus = Chunk
    policies.CachePolicy = type(
        "CachePolicy",
        (),
        {"__init__": lambda self, size: setattr(self, "cache_capacity", size)},
    )
    policies.order_request_keys = lambda groups, _context: [
        key for each in groups for key in each
    ]
    monkeypatch.setenv("KVCORE_TRACE", str(tmp_path / "day.jsonl"))
    monkeypatch.setenv("KVCORE_EVICTION", "lru")
    spec = spec_from_file_location("cpu_tier", SOURCE / "cpu_tier.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.KvcorePolicy(4)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_evictions_of_the_first_group_are_recorded(tier, order):
    """Evictions of the first of two groups are recorded, whichever group is stored first."""
    for number in range(4):
        keys = [bytes((number, group)) for group in order]
        context = Context(f"r{number}", keys)
        tier.on_store_miss(keys, context)
        tier.on_request_access([], context)
        if number > 1:
            assert len(tier.evict(2, set(keys))) == 2
        for key in keys:
            tier.insert(key, Chunk(), context)
        if number == 3:  # the transfer has failed
            for key in keys:
                tier.remove(key)
            continue
        for key in keys:
            tier.mark_evictable(key)
        tier.on_request_finished([[key] for key in keys], set(), set(), context)
    recorder = tier._recording._recorder
    assert (recorder.failure, recorder.disagreements) == (None, {})
    recorder.close()
    events = [event.as_dict() for event in read_events(recorder.path)]
    assert sum(event["event"] == "EVICT" for event in events) == 2
    assert recorder.evictions.blocks == 2
