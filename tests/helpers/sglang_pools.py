"""SGLang's unified radix cache with windows or states beside full attention, on a CPU.

Calls are those of SGLang's scheduler; its caches, allocators and the calls that share and free
the K/V of a request are its own.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import torch
from helpers.sglang_engine import CacheInitParams, ComponentType, MatchPrefixParams, RadixKey
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import mamba
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvcore.cache.layout import GENERATED

ROWS, LONGEST = 64, 4096


class _WindowPool(BaseSWAKVPool):
    """K/V of windows, of which only the places are known."""

    def __init__(self):
        """Hold nothing."""

    def register_mapping(self, full_to_swa_index_mapping):
        """Store where the window of a token is."""
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices):
        """Return where the windows of tokens are."""
        return self.full_to_swa_index_mapping[kv_indices]


_WindowPool.__abstractmethods__ = frozenset()


class Req:
    """A request with the attributes that SGLang's caches read."""

    session = session_id = priority = extra_key = cache_salt = None
    kv_rotation_base = lock = swa_branching_seqlen = mamba_branching_seqlen = None
    skip_radix_cache_insert = False

    def __init__(self, request, tokens, row):
        self.rid, self.origin_input_ids, self.ids = request.id, tokens, array("q", tokens)
        self.kv = ReqKvInfo()
        self.row, self.computed, self.is_finished = row, 0, False

    @property
    def full_untruncated_fill_ids(self):
        """The tokens of its text."""
        return self.ids

    def get_fill_ids(self):
        """Return the tokens that are allocated."""
        return self.ids

    def finished(self):
        """Return True if the request has all its tokens."""
        return self.is_finished


class SglangSide:
    """A stream's calls of SGLang's cache.

    Attributes:
        evicted: the keys of blocks of full attention that left, in order.
    """

    def __init__(self, pools):
        self.pools = pools
        page = pools.page
        self.grid = max(64, page)
        mamba.mamba_cache_chunk_size = lambda: self.grid
        mamba.mamba_checkpoint_grid = lambda _: self.grid
        options = SimpleNamespace(
            mamba_max_states_per_path=-1,
            enable_mamba_extra_buffer=True,
            enable_mamba_extra_buffer_lazy=False,
        )
        mamba.get_exec = lambda: SimpleNamespace(mamba=options)
        parts, rows = [ComponentType.FULL], ReqToTokenPool.__new__(ReqToTokenPool)
        sizes = {"dtype": torch.float16, "device": "cpu", "need_sort": False}
        if pools.window is not None:
            parts.append(ComponentType.SWA)
            kv = _WindowPool()
            self.slots = SWATokenToKVPoolAllocator(
                pools.blocks * page, pools.window_slots * page, page, kvcache=kv, **sizes
            )
            kv.register_mapping(self.slots.full_to_swa_index_mapping)
        else:
            parts.append(ComponentType.MAMBA)
            kinds = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)
            more = () if page == 1 else (page,)
            self.slots = kinds[page > 1](pools.blocks * page, *more, kvcache=None, **sizes)
            rows = HybridReqToTokenPool.__new__(HybridReqToTokenPool)
            rows.mamba_allocator = MambaSlotAllocator(pools.state_slots, "cpu")
            rows.mamba_ping_pong_track_buffer_size = rows.mamba_initial_tracking_slots = 2
            rows.enable_mamba_extra_buffer = True
            rows.mamba_ckpt_pool = None
            rows.mamba_pool = SimpleNamespace(replayssm_write_pos=None)
            rows.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros(
                (ROWS, 2), dtype=torch.int64
            )
        rows.device, self.rows = "cpu", rows
        rows.req_to_token = torch.zeros((ROWS, LONGEST), dtype=torch.int64)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=self.slots,
                page_size=page,
                tree_components=tuple(parts),
                tree_core_backend="python",
                sliding_window_size=None if pools.window is None else pools.window - 1,
                enable_mamba_extra_buffer=pools.window is None,
            )
        )
        self.evicted, self._open, self._names = [], {}, {}
        self._keys, self._free_rows = [None], list(range(ROWS))
        tree = self.cache.tree_core
        remove = tree._remove_leaf_from_parent

        def observed(node):
            tokens = node.key.token_ids[: len(node.key)]
            self.evicted += [self._keys[token // page] for token in tokens[::page]][::-1]
            return remove(node)

        tree._remove_leaf_from_parent = observed

    def _token(self, key, offset):
        """Return a token of the block of a key."""
        if key not in self._names:
            self._names[key] = len(self._keys)
            self._keys.append(key)
        return self._names[key] * self.pools.page + offset

    def _tokens(self, request, first, end):
        """Return tokens of the text of a request, whose keys name the blocks of its prompt."""
        tokens = array("q")
        for position in range(first, end):
            block, offset = divmod(position, self.pools.page)
            key = GENERATED, request.id, block
            key = request.keys[block] if block < len(request.keys) else key
            tokens.append(self._token(key, offset))
        return tokens

    def _allocate(self, req, tokens):
        """Allocate for `tokens` more tokens, in whole pages."""
        page, row, start = self.pools.page, self.rows.req_to_token[req.row], req.allocated
        count = -(-(start + tokens) // page) - -(-start // page)
        if count:
            self.slots.evict_to_free_tokens(self.cache, count * page)
            first = -(-start // page) * page
            if page == 1 or self.pools.window is None:
                row[first : first + count * page] = self.slots.alloc(count * page)
            else:
                full = self.slots.full_attn_allocator.alloc(count * page)
                window = self.slots.swa_attn_allocator.alloc(count * page)
                self.slots.set_full_to_swa_mapping(full, window)
                row[first : first + count * page] = full
        req.allocated = start + tokens

    def open(self, request):
        """Admit a request with its first chunk; return the tokens that hit."""
        cache, rows, length = self.cache, self.rows, request.prompt_tokens
        req = Req(request, self._tokens(request, 0, length), self._free_rows.pop())
        self._open[request.id] = req
        is_hybrid = self.pools.window is None
        key = RadixKey(req.ids, limit=length - 1)
        match = cache.match_prefix(MatchPrefixParams(key=key, cow_mamba=is_hybrid, req=req))
        hit = match.device_prefix_len
        req.swa_branching_seqlen = match.swa_branching_seqlen
        req.mamba_branching_seqlen = match.mamba_branching_seqlen
        req.lock = cache.lock(match.last_device_node)
        req.kv.req_pool_idx, req.kv.cache_protected_len = req.row, hit
        req.computed = req.allocated = hit
        rows.req_to_token[req.row, :hit] = cache.path_device_indices(match.last_device_node)
        if is_hybrid:
            needed = 2 + (not req.kv.holds_mamba)
            free = rows.mamba_allocator.available_size()
            if free < needed:
                cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=needed - free))
            if not req.kv.holds_mamba:
                req.kv.mamba_pool_idx = rows.mamba_allocator.alloc(1)[0]
            rows._alloc_ping_pong_buffer(req)
            rows.set_mamba_ping_pong_slot(req, 0, req.kv.mamba_ping_pong_track_buffer[0])
        self._allocate(req, min(self.pools.chunk, length - hit))
        return hit

    def compute(self, request):
        """Compute the allocated chunk; return how many tokens of the prompt are left."""
        req, text = self._open[request.id], self._open[request.id].ids
        start, end = req.computed, req.allocated
        if self.pools.window is None and (end - start) >= self.grid:
            kept = start + (end - start) // self.grid * self.grid
            junction = req.mamba_branching_seqlen
            is_inside = junction is not None and start < junction < end + (kept < end)
            if is_inside and (junction - start) % self.grid == 0:
                kept = junction
            req.kv.mamba_last_track_idx = req.kv.mamba_next_track_idx
            req.kv.mamba_next_track_idx = 1 - req.kv.mamba_next_track_idx
            req.kv.mamba_last_track_seqlen = kept
        req.computed, req.ids = end, text[:end]
        self.cache.checkpoint_into_tree(req, up_to=end)
        req.ids = text
        return request.prompt_tokens - end

    def extend(self, request, tokens):
        """Allocate for `tokens` more tokens."""
        self._allocate(self._open[request.id], tokens)
        return True

    def decode(self, request):
        """Generate a token."""
        req, pools = self._open[request.id], self.pools
        length = req.computed
        if pools.window is not None:
            window, evicted = pools.window - 1, req.kv.get_evicted_seqlen(ComponentType.SWA)
            if length - window >= evicted + 128:
                common.free_swa_out_of_window_slots(
                    req, length, sliding_window_size=window, page_size=pools.page,
                    req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.slots,
                )  # fmt: skip
        req.ids += self._tokens(request, len(req.ids), length + 1)
        self._allocate(req, 1)
        req.computed += 1
        if pools.window is None and req.computed % max(256, self.grid) == 0:
            kv = req.kv
            kv.mamba_last_track_idx = kv.mamba_next_track_idx
            kv.mamba_next_track_idx = 1 - kv.mamba_next_track_idx
            kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
            kv.mamba_last_track_seqlen = req.computed
        return True

    def close(self, request, *, complete):
        """End a request, or give back its blocks if it is not `complete`."""
        req, cache = self._open.pop(request.id), self.cache
        req.is_finished = complete
        if complete:
            cache.checkpoint_into_tree(req, up_to=req.computed)
        cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.computed)])
        self._renew(req.lock.node)
        cache.unlock(req.lock)
        cache.on_release(req, checkpointed=complete)
        self._free_rows.append(req.row)

    def _renew(self, node_id):
        """Make the K/V of full attention down to a node the most recent.

        SGLang does so when a request ends and shares blocks, kvcore whenever blocks are
        released.
        """
        tree, path = self.cache.tree_core, []
        node = tree.node_by_id(node_id)
        while node is not tree.root_node:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            tree._touch_node(node)

    @property
    def room(self):
        """Blocks and slots that are free, and those that are free or can be evicted."""
        page, cache = self.pools.page, self.cache
        if self.pools.window is None:
            free = self.slots.available_size() // page
            states = self.rows.mamba_allocator.available_size()
            sides = [(states, states + cache.mamba_evictable_size())]
        else:
            free = self.slots.full_available_size() // page
            windows = self.slots.swa_available_size()
            sides = [(windows // page, (windows + cache.swa_evictable_size()) // page)]
        return [(free, free + cache.full_evictable_size() // page), *sides]
