"""The plugins that come with kvcore, found through installed entry points like any others."""

from __future__ import annotations

import pytest
from helpers.policies import POLICIES

from kvcore import KVCache, Request
from kvcore.plugins.manager import DISABLE, KINDS, Plugins, default

NAMES = {
    "backend": "torch-cpu torch-cuda",
    "codec": "bf16 fp16 fp32 fp64 fp8-e4m3 fp8-e5m2 int4 int8 kivi",
    "eviction": " ".join(sorted(name for name in POLICIES if ":" not in name)),
    "drafter": "acceptance draft-model medusa prompt-lookup",
    "checkpoint": "chunk default every marconi seglen sparse",
    "rules": "kvcore sglang vllm",
    "generator": "huggingface induction sincos transformer",
    "latency": "linear roofline table token-rate",
    "prefix": "hashed none radix",
    "retention": "expected full h2o knorm kvmerger quest random snapkv tova window",
    "scheduler": "fair fcfs lpm priority sjf slo srpt",
    "router": "dynamo least-requests llm-d lmetric loadaware mooncake power-of-two "
    "preble prefix-affinity random round-robin session sglang",
    "tier": "disk host redis",
    "workload": "agents azure bench chat jsonl kv-events lengths lmcache mooncake recency "
    "trace weka zipf",
}

BUILT_IN = {"codec", "eviction", "latency", "prefix", "scheduler"}
"""The kinds of which no plugin is of another package than `kvcore_plugins`."""


@pytest.fixture(autouse=True)
def _nothing_disabled(monkeypatch):
    monkeypatch.delenv(DISABLE, raising=False)
    default.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_built_ins_are_found(kind):
    """Every built-in of the kind is found through kvcore's entry points."""
    pytest.importorskip("kvcore_plugins" if kind in BUILT_IN else "kvcore_lab")
    found = [
        i.name for i in Plugins().listing() if (i.kind, i.distribution) == (kind, "kvcore")
    ]
    assert found == NAMES[kind].split()


def test_built_ins_work_with_kvcore_alone():
    """Every built-in except backends and generators works with kvcore alone."""
    infos = [i for i in Plugins().listing() if i.distribution == "kvcore"]
    plain = [i for i in infos if i.kind not in {"backend", "generator"}]
    assert [i.name for i in plain if not i.usable] == []


@pytest.mark.parametrize(("kind", "name"), [("eviction", "lru"), ("prefix", "radix")])
def test_default_is_the_class_that_plugins_find(kind, name):
    """The default of a kind is the plugin of that name."""
    assert default(kind, name) is Plugins().get(kind, name)


def test_no_hook_is_called_while_a_cache_works(monkeypatch):
    """A running cache calls no hook: hooks are only for looking plugins up."""
    plugins = Plugins()
    eviction, prefix = plugins.build("eviction", "lru"), plugins.build("prefix", "radix")
    calls = []
    plugins._manager.add_hookcall_monitoring(lambda *_: calls.append("pluggy"), lambda *_: None)
    monkeypatch.setattr(Plugins, "_collect", lambda *_: calls.append("kvcore"))
    cache = KVCache(blocks=100, block_size=16, eviction=eviction, prefix=prefix)
    for index in range(500):
        keys = [(index % 40, block) for block in range(20)]
        request = Request(id=index, prompt_tokens=320, keys=keys, key_tokens=16)
        sequence = cache.open(request, now=index)
        cache.commit(sequence, sequence.tokens - sequence.computed, now=index)
        cache.close(sequence, now=index)
    assert cache.tree.evicted_blocks > 0
    assert calls == []
