"""Cache groups whose cached blocks leave in the order of an eviction policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcore.cache.eviction import EvictionPolicy
from kvcore.cache.pool import Ids
from kvcore.request import Request
from kvcore_hosting.host import PolicyHost
from kvcore_plugins.cache_groups.cache import GroupedCache
from kvcore_plugins.cache_groups.groups import GroupSequence, LayerGroup
from kvcore_plugins.cache_groups.named_blocks import NO_BLOCK


class HostedGroups(GroupedCache):
    """A `GroupedCache` that evicts what a policy chooses, by the contract of hosts.

    The policy sees each block with a name as a span::

        full attention    root - [ A ] - [ B ] - [ C ]     each block below the one before it
        window, state     root - [ D']                     by itself: those before it may be
                          root - [ E']                     gone, and leave at other times

    A block of a window or a state has the position and the keys that it has in its text.
    Blocks without a name are allocated first, as with LRU, and no policy sees them.

    Hits end at blocks of `geometry`. Where these are several of a group, each stands for the
    one that it is a part of, without which that does not hit::

        full attention    root - [ A ] - [ B ]     the first halves of blocks of `geometry`
                          root - [ A ] - [ B ]     the second halves

    Args:
        groups, blocks: as for `GroupedCache`, whose further options are taken too.
        eviction: the policy, which may not let spans expire.

    Attributes:
        host: the host of the policy, in which a block has itself as name.

    Raises:
        InputError: as `GroupedCache`; or the policy lets spans expire.
    """

    def __init__(
        self,
        groups: Iterable[LayerGroup],
        blocks: int,
        *,
        eviction: EvictionPolicy | type[EvictionPolicy] | str,
        **options: Any,
    ) -> None:
        super().__init__(groups, blocks, eviction=eviction, **options)
        self.hears_names = True
        self.eviction.one_path = len(self.groups) == 1
        self.host = PolicyHost(self.eviction, blocks, self._size, layout=self.geometry)
        self._resumed = False

    def _problem(self) -> str:
        self.eviction.check_unused()
        if not self.eviction.expires_spans:
            return ""
        return (
            f"eviction {self.eviction.name!r} lets blocks expire, and a block of a group "
            "hits as long as it is cached: give lru, or serve one group"
        )

    def open(
        self, request: Request, *arguments: Any, resumed: bool = False, **options: Any
    ) -> GroupSequence:
        """Admit `request`, as `GroupedCache.open` does."""
        self._resumed = resumed
        return super().open(request, *arguments, resumed=resumed, **options)

    def close(
        self,
        seq: GroupSequence,
        now: int | None = None,
        length: int | None = None,
        *,
        preempted: bool = False,
    ) -> None:
        """Give back all blocks of `seq`, of each group the last one first."""
        self._begin(seq, now)
        if preempted:
            self.host.forget(seq.request.id)
        else:
            self.host.ended(seq.request, self.now)
        super().close(seq, now, length, preempted=preempted)

    def _hold(self, blocks: list[int]) -> None:
        super()._hold(blocks)
        for block in reversed(blocks):
            self.host.pin(block)

    def _hold_loaded(self, seq: GroupSequence, blocks: list[int]) -> None:
        super()._hold_loaded(seq, blocks)
        self.host.hit(blocks, self.now, seq.request.id, again=self._resumed)

    def _allocate(self, seq: GroupSequence, tokens: int) -> None:
        """Allocate for `seq`. The hits of its admission count after the evictions for it."""
        host, request, resumed = self.host, seq.request, self._resumed
        host.admitted(request.id)
        if not resumed and seq.hit_blocks < seq.lookup_blocks:
            host.missed(request, seq.hit_blocks, self.now)
        hits = [table.blocks[:] for table in seq.tables]
        super()._allocate(seq, tokens)
        for blocks in hits:
            host.hit(blocks, self.now, request.id, again=resumed)

    def _stored(self, seq: GroupSequence, group: int, copies: dict[int, bool]) -> None:
        super()._stored(seq, group, copies)
        if not copies:
            return
        own, table, end = self.groups[group], seq.tables[group], max(copies) + 1
        path, parts = self.path(seq, group, end), self._size // own.block_size

        def insert(blocks: list[Any], parent: int | None, position: int) -> None:
            self.host.stored_run(
                blocks, parent, self.now, path=path, start=position // parts,
                request=seq.request.id, tenant=seq.request.tenant,
            )  # fmt: skip

        first, start = table.first, min(copies)
        if own.kind == "full":
            for begin in range(start, min(start + parts, end)):
                above = table.blocks[begin - first - parts] if begin - first >= parts else None
                insert(table.blocks[begin - first : end - first : parts], above, begin)
        else:
            for position in copies:
                insert([table.blocks[position - first]], None, position)

    def _choose(self, count: int, seq: GroupSequence) -> list[int]:
        """Return the victims of the policy, which no sequence holds.

        At last those that it takes for held: a request has hit a block that was stored below
        a copy of them.
        """
        host, victims = self.host, list[Any]()
        if evictable := min(count, host.evictable):
            victims += host.victims(evictable, now=self.now, requester=seq.request.id) or ()
        for block in victims:
            self._blocks.remove(block)
        while len(victims) < count:
            (block,) = self._blocks.pop(1)
            host.dropped(block, self.now, "capacity")
            victims.append(block)
        return victims

    def _free(self, blocks: list[int]) -> Ids:
        freed = super()._free(blocks)
        bare = {NO_BLOCK, *freed}
        self.host.unpin_run([block for block in blocks if block not in bare], self.now)
        return freed
