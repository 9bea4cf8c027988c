"""SGLang's radix caches and queue order, imported without a GPU and without its server.

SGLang is installed without its dependencies. Modules that its caches never call, or that need a
GPU or a server, are replaced by empty ones.
"""

from __future__ import annotations

import os
import warnings
from array import array
from types import SimpleNamespace

warnings.simplefilter("ignore")  # warnings of other packages

# These look for installed packages, so they are imported before there are empty modules.
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402
import transformers  # noqa: E402, F401
from helpers.engines import stand_in  # noqa: E402

from kvcore.cache.layout import GENERATED  # noqa: E402

# To refresh the prefixes of waiting requests, SGLang would read the settings of a server.
os.environ["SGLANG_ENABLE_WAITING_PREFIX_REFRESH"] = "0"
# SGLang imports these packages with its caches, which do not call them.
stand_in(
    "IPython",
    "compressed_tensors",
    "gguf",
    "partial_json_parser",
    "psutil",
    "sentencepiece",
    "sglang.srt.function_call",
    "sglang.srt.parser",
    "sglang.srt.sampling.custom_logit_processor",
    "starlette",
    "torchvision",
    "triton",
    "tvm_ffi",
    "xgrammar",
    package="sglang",
)

from sglang.srt.managers.schedule_policy import (  # noqa: E402
    SchedulePolicy,
)
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


class _Slots:
    """An allocator that only counts free slots."""

    page_size = 1
    device = torch.device("cpu")

    def __init__(self, size):
        self.size = self.left = size

    def available_size(self):
        """Return the number of free slots."""
        return self.left

    def free_segment(self, values, *, start_pos=0):
        """Free as many slots as there are values."""
        self.left += len(values)

    free = free_segment

    def mamba_full_cache_donor(self):
        """Return None: there are no Mamba states."""


class TreeRequest:
    """A request with the attributes that SGLang's caches read."""

    session = None

    def __init__(self, rid, tokens=()):
        self.rid = rid
        self.origin_input_ids = tokens
        self.output_ids = []

    def finished(self):
        """Return True: this is only called at the end."""
        return True


class SglangCache:
    """A radix cache of SGLang with pages of one token, which are a block each.

    Calls are those of SGLang's scheduler: match and lock the prompt, evict, insert the computed
    prompt, match and lock it again, and at the end insert once more and unlock.

    Attributes:
        evicted: keys of the evicted blocks, tail first; empty with the core in Rust.
        host: the host of a policy of kvcore; None with SGLang's own policy.
    """

    def __init__(self, blocks, core, eviction="lru", config=None):
        """Create a `radix` cache, or a unified one with the core `python` or `rust`."""
        self.slots = _Slots(blocks)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.slots,
            page_size=1,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=None if core == "radix" else core,
            eviction_policy=eviction,
            eviction_policy_config=config,
        )
        self.core = core
        self.cache = (RadixCache if core == "radix" else UnifiedRadixCache)(params)
        self.names = {}
        self.keys = [None]
        self.evicted = []
        self.host = None
        if core != "rust":
            tree, method = (
                (self.cache, "_delete_leaf")
                if core == "radix"
                else (self.cache.tree_core, "_remove_leaf_from_parent")
            )
            self._observe(tree, method)
            self.host = getattr(tree.eviction_strategy, "host", None)
            if self.host is not None:
                self.host.clock = lambda: 0
                self.host.chain = self._chain

    def _chain(self, _parent, tokens, _page_size):
        """Return the keys of tokens, in place of keys chained by the host."""
        return [self.keys[token] for token in tokens]

    def _observe(self, tree, method):
        """Record the keys of evicted nodes."""
        remove = getattr(tree, method)

        def observed(node):
            self.evicted += reversed([self.keys[token] for token in node.key])
            return remove(node)

        setattr(tree, method, observed)

    def available(self):
        """Return the number of blocks that are free or can be evicted."""
        return self.slots.left + self.cache.evictable_size()

    def _tokens(self, keys):
        """Return a token for each key."""
        names = self.names
        tokens = array("q", [names.setdefault(key, len(names) + 1) for key in keys])
        self.keys += list(names)[len(self.keys) - 1 :]
        return tokens

    def _serve(self, tree_request):
        """Set the request of the next calls, as a checkpoint of a request does."""
        if self.host is not None:
            self.host.request = tree_request

    def _allocate(self, blocks, tree_request):
        self._serve(tree_request)
        if blocks > self.slots.left:
            self.cache.evict(EvictParams(num_tokens=blocks - self.slots.left))
        self.slots.left -= blocks

    def match(self, tokens, limit=None, tree_request=None):
        """Return the match of a prompt, which counts as a use and splits a node at its end."""
        key = RadixKey(tokens, limit=limit)
        return self.cache.match_prefix(MatchPrefixParams(key=key, req=tree_request))

    def insert(self, tokens, protected, tree_request, inserted=0):
        """Insert computed tokens; free those that were cached besides the protected ones.

        `inserted` is the number of tokens that `tree_request` has inserted before.
        """
        values = torch.zeros(len(tokens), dtype=torch.int64)
        params = InsertParams(
            key=RadixKey(tokens), value=values, prev_prefix_len=protected, inserted_len=inserted
        )
        self._serve(tree_request)
        result = self.cache.insert(params)
        if self.core == "radix":
            self.slots.left += result.prefix_len - protected

    def open(self, request):
        """Open a request and compute its prompt; return its state and the number of hits."""
        size = request.key_tokens
        tokens = self._tokens(request.keys)[: request.prompt_tokens // size]
        limit = (request.prompt_tokens - 1) // size
        tree_request = TreeRequest(request.id, tokens)
        match = self.match(tokens, limit, tree_request)
        lock = self.cache.lock(match.last_device_node)
        hit = match.device_prefix_len
        blocks = -(-request.prompt_tokens // size)
        self._allocate(blocks - hit, tree_request)
        self.insert(tokens, hit, tree_request)
        cached = self.match(tokens).last_device_node
        self.cache.unlock(lock)
        lock = self.cache.lock(cached)
        return [request, tree_request, tokens, blocks, lock], hit

    def close(self, opened, *, generates):
        """Close a request, after its output is generated if there is room for it."""
        request, tree_request, tokens, blocks, lock = opened
        size, prompt = request.key_tokens, tokens
        length = request.prompt_tokens + request.output_tokens - 1
        need = -(-length // size) - blocks
        if generates and request.output_tokens > 1 and need <= self.available():
            self._allocate(need, tree_request)
            blocks += need
            new = range(len(tokens), length // size)
            tokens = tokens + self._tokens([(GENERATED, request.id, place) for place in new])
        self.insert(tokens, len(prompt), tree_request, len(prompt))
        if 0 < len(prompt) < len(tokens):
            self.insert(prompt, len(prompt), tree_request, len(prompt))
        self.slots.left += blocks - len(tokens)
        self.cache.unlock(lock)
        tree_request.output_ids = tokens[len(prompt) :]
        self.cache.on_release(tree_request, checkpointed=True)


def waiting(theirs, request):
    """Return a request in the form of SGLang's queue."""
    return SimpleNamespace(
        rid=request.id,
        origin_input_ids=theirs._tokens(request.keys),
        output_ids=array("q"),
        extra_key=None,
        cache_salt=None,
        kv=None,
        _compute_max_prefix_len=lambda length: max(length - 1, 0),
    )


def order(theirs, requests):
    """Return the ids of `requests` in the order of SGLang's policy `lpm`."""
    policy = SchedulePolicy(
        "lpm",
        theirs.cache,
        enable_hierarchical_cache=False,
        enable_priority_scheduling=False,
        schedule_low_priority_values_first=False,
    )
    queue = [waiting(theirs, request) for request in requests]
    policy.calc_priority(queue)
    return [each.rid for each in queue]
