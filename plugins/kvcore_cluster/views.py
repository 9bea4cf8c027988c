"""Prefix views of routers: an index of sent prompts, delayed events, or the true content.

Times are nanoseconds, of whatever clock: views serve simulated clusters and real proxies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, TypeAlias

import attrs
from attrs.validators import ge, optional

from kvcore.cache import KVCache, ServedCache
from kvcore.cache.layout import BlockLayout
from kvcore.cache.span import Span
from kvcore.cache.tree import Watcher
from kvcore.errors import InputError
from kvcore.plugins.options import nearest, parse
from kvcore.request import Key, Request
from kvcore.units import NS_PER_S, parse_seconds, parse_whole, seconds_text
from kvcore_cluster.dispatcher import PrefixView


class Holders:
    """The replicas that hold the blocks of each key.

    A replica that holds a key is taken to hold those before it in the prompt, since keys are
    chained and caches evict from the tail. So the holders of a prompt's keys shrink from one
    key to the next, and bisection finds where: a lookup costs O(holders · log keys), whatever
    the number of replicas that hold nothing. A key costs one entry; the set of its holders is
    the bits of an integer, shared by all keys with the same single holder.
    """

    __slots__ = ("_bits", "_masks")

    def __init__(self) -> None:
        """Create an empty index."""
        self._masks: dict[Key, int] = {}
        self._bits: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of keys that some replica holds."""
        return len(self._masks)

    def add(self, replica: int, keys: Iterable[Key]) -> None:
        """Record that `replica` holds `keys`, and all before them. O(keys)."""
        masks = self._masks
        bit = self._bits.setdefault(replica, 1 << replica)
        for key in keys:
            masks[key] = masks[key] | bit if key in masks else bit

    def discard(self, replica: int, keys: Iterable[Key]) -> None:
        """Record that `replica` no longer holds `keys`, nor any after them. O(keys)."""
        masks = self._masks
        kept = ~(1 << replica)
        for key in keys:
            left = masks.pop(key, 0) & kept
            if left:
                masks[key] = left

    def drop(self, replica: int) -> None:
        """Record that `replica` holds nothing. O(all keys)."""
        bit = 1 << replica
        self.discard(replica, [key for key, mask in self._masks.items() if mask & bit])

    def find(self, keys: Sequence[Key], size: int, most: int) -> dict[int, int]:
        """Return the tokens of a prompt by holder: `size` for each key, at most `most`."""
        get, end = self._masks.get, len(keys)
        hits: dict[int, int] = {}
        low, holders = 0, get(keys[0], 0) if keys else 0
        while holders:
            # The next key with fewer holders: in steps that double, then by bisection.
            step = 1
            while low + step < end and get(keys[low + step], 0) == holders:
                low += step
                step *= 2
            high = min(low + step, end)
            while high - low > 1:
                middle = (low + high) // 2
                if get(keys[middle], 0) == holders:
                    low = middle
                else:
                    high = middle
            left = get(keys[high], 0) if high < end else 0
            amount = min(high * size, most)
            # Replicas that hold this key and not the next, the last one first.
            ending = f"{holders & ~left:b}"
            last, index = len(ending) - 1, ending.find("1")
            while index >= 0:
                hits[last - index] = amount
                index = ending.find("1", index + 1)
            low, holders = high, left
        return hits


_AT_LEAST_1: Any = optional(ge(1))


@attrs.define(eq=False, on_setattr=attrs.setters.NO_OP)
class SentIndex(PrefixView):
    """The router's own index: a prompt is taken to be cached where it was sent, for some time.

    An entry lasts for `ttl` after its key was last sent to its replica. Above `blocks`
    entries the oldest are removed. Cost: O(new keys) to add a prompt and to remove it,
    O(log keys) to refresh it. Memory: O(entries), also where many prompts begin with the same
    keys: of a prompt the last key is kept, and of each key the one before it.

    Attributes:
        ttl: nanoseconds for which an entry lasts; None: for ever.
        blocks: entries at most, one for each key and replica; None: any number.

    Source: the approximate mode of NVIDIA Dynamo's router (lib/kv-router), which assumes that
    a prompt is cached for 120 s after it was sent, and does not follow evictions.
    """

    ttl: int | None = attrs.field(default=120 * NS_PER_S, validator=_AT_LEAST_1)
    blocks: int | None = attrs.field(default=None, validator=_AT_LEAST_1)
    _holders: Holders = attrs.field(factory=Holders, init=False)
    # By replica, how many keys follow each key; a sent prompt that ends with it counts as one.
    _after: dict[int, dict[Key, int]] = attrs.field(factory=dict, init=False)
    # By replica, the key before each one; None: it is the first.
    _before: dict[int, dict[Key, Key | None]] = attrs.field(factory=dict, init=False)
    # When prompts were sent, oldest first, by replica and last key.
    _sent: OrderedDict[tuple[int, Key], int] = attrs.field(factory=OrderedDict, init=False)
    _entries: int = attrs.field(default=0, init=False)

    def __len__(self) -> int:
        """Return the number of entries."""
        return self._entries

    def find(self, request: Request, now: int) -> Mapping[int, int]:
        """Return the tokens of the prompt that have entries, by replica."""
        self._expire(now)
        return self._holders.find(request.keys, request.key_tokens, request.prompt_tokens)

    def sent(self, request: Request, replica: int, now: int) -> None:
        """Add the prompt for `replica`, or refresh it."""
        keys = request.keys if self.blocks is None else request.keys[: self.blocks]
        if not keys:
            return
        after = self._after.setdefault(replica, {})
        new = bisect_left(keys, 1, key=lambda key: key not in after)
        ending = (replica, keys[-1])
        if new and (new < len(keys) or ending not in self._sent):
            after[keys[new - 1]] += 1
        if added := keys[new:]:
            after.update(dict.fromkeys(added, 1))
            before = keys[new - 1 : -1] if new else [None, *keys[:-1]]
            self._before.setdefault(replica, {}).update(zip(added, before, strict=True))
            self._holders.add(replica, added)
            self._entries += len(added)
        self._sent[ending] = now
        self._sent.move_to_end(ending)
        while self.blocks is not None and self._entries > self.blocks:
            self._forget()

    def lost(self, replica: int, now: int) -> None:
        """Remove all that was sent to a replica. O(keys sent)."""
        keys = self._before.pop(replica, {})
        self._after.pop(replica, None)
        self._holders.discard(replica, keys)
        self._entries -= len(keys)
        for entry in [entry for entry in self._sent if entry[0] == replica]:
            del self._sent[entry]

    def _expire(self, now: int) -> None:
        """Remove entries that were sent `ttl` ago or earlier."""
        sent = self._sent
        while self.ttl is not None and sent:
            if now - next(iter(sent.values())) < self.ttl:
                return
            self._forget()

    def _forget(self) -> None:
        """Remove the oldest prompt sent, except for keys that were sent again since."""
        (replica, key), _ = self._sent.popitem(last=False)
        after, before, gone = self._after[replica], self._before[replica], list[Key]()
        # From the last key up to one with which, or with keys after which, another was sent.
        while key is not None and after[key] == 1:
            gone.append(key)
            del after[key]
            key = before.pop(key)
        if key is not None:
            after[key] -= 1
        self._holders.discard(replica, gone)
        self._entries -= len(gone)

    def __str__(self) -> str:
        """Return the view as `parse_view` reads it."""
        default = attrs.fields(SentIndex)
        texts = []
        if self.ttl != default.ttl.default:
            texts.append(f"ttl={'none' if self.ttl is None else seconds_text(self.ttl)}")
        if self.blocks is not None:
            texts.append(f"blocks={self.blocks}")
        options = ",".join(texts)
        return f"index:{options}" if options else "index"


@attrs.define(eq=False)
class _Size:
    """The blocks of one size that replicas hold.

    Attributes:
        layout: how prompts lie in them; None: a block is a key.
        holders: of keys of which at least one block is held.
        parts: of keys of which not all blocks are: how many, by replica and key.
    """

    layout: BlockLayout | None
    holders: Holders = attrs.field(factory=Holders)
    parts: dict[tuple[int, Key], int] = attrs.field(factory=dict)

    def store(
        self, replica: int, keys: Sequence[Key], first: int, end: int, ratio: int
    ) -> None:
        """Record that blocks `[first, end)` of `keys` were stored; a key stands for `ratio`."""
        if ratio == 1:
            self.holders.add(replica, keys[first:end])
            return
        keys = self._take(replica, keys, first, end, ratio)
        self.holders.add(replica, keys)
        if end % ratio:
            self.parts[replica, keys[-1]] = end % ratio

    def remove(
        self, replica: int, keys: Sequence[Key], first: int, end: int, ratio: int
    ) -> None:
        """Record that blocks `[first, end)` of `keys` have left."""
        if ratio == 1:
            self.holders.discard(replica, keys[first:end])
            return
        keys = self._take(replica, keys, first, end, ratio)
        if first % ratio:
            self.parts[replica, keys[0]] = first % ratio
            keys = keys[1:]
        self.holders.discard(replica, keys)

    def _take(
        self, replica: int, keys: Sequence[Key], first: int, end: int, ratio: int
    ) -> Sequence[Key]:
        """Return the keys of blocks `[first, end)`, no longer counted as held in part."""
        keys = keys[first // ratio : (end - 1) // ratio + 1]
        for key in (keys[0], keys[-1]):
            self.parts.pop((replica, key), None)
        return keys

    def find(self, request: Request) -> Mapping[int, int]:
        """Return the tokens of the prompt that would hit in each replica."""
        if self.layout is None:
            size, prompt_tokens = request.key_tokens, request.prompt_tokens
            return self.holders.find(request.keys, size, prompt_tokens)
        keys, *_, limit = self.layout.lay_out(request)
        size, ratio, parts = self.layout.block_size, self.layout.ratio, self.parts
        keys = keys[: -(-limit // ratio)]
        hits = self.holders.find(keys, ratio * size, limit * size)
        if parts:
            for replica, tokens in hits.items():
                last = (tokens - 1) // (ratio * size)
                part = parts.get((replica, keys[last]))
                if part is not None:
                    hits[replica] = min(tokens, (last * ratio + part) * size)
        return hits

    def drop(self, replica: int) -> None:
        """Record that a replica holds nothing."""
        self.holders.drop(replica)
        for part in [part for part in self.parts if part[0] == replica]:
            del self.parts[part]


_Record: TypeAlias = Callable[..., None]
"""`_Size.store` or `_Size.remove`."""


@attrs.define(eq=False)
class _Place:
    """One life of a replica that reports the blocks that it stores and evicts.

    It watches the tree of its cache, and calls the watcher that was there before.

    Attributes:
        replica: number of the replica.
        size: the index of its block size.
        report: records an event, at once or after the delay.
        below: the watcher of the tree before this one: the tiers.
    """

    replica: int
    size: _Size
    report: Callable[..., None]
    below: Watcher | None = None

    def stored(self, span: Span, blocks: int, now: int) -> None:
        """Called when the last `blocks` blocks of `span` were stored."""
        keys, end, ratio = span.path_keys, span.end, span.geometry.ratio
        self.report(self, now, _Size.store, keys, end - blocks, end, ratio)
        if self.below is not None:
            self.below.stored(span, blocks, now)

    def hit(self, span: Span, now: int) -> None:
        """Called when another request has hit `span`; this concerns tiers alone."""
        if self.below is not None:
            self.below.hit(span, now)

    def leaving(self, span: Span, blocks: int, now: int, reason: str) -> None:
        """Called when the last `blocks` blocks of `span` are about to leave."""
        keys, end, ratio = span.path_keys, span.end, span.geometry.ratio
        self.report(self, now, _Size.remove, keys, end - blocks, end, ratio)
        if self.below is not None:
            self.below.leaving(span, blocks, now, reason)


@attrs.define(eq=False, on_setattr=attrs.setters.NO_OP)
class EventsView(PrefixView):
    """The blocks that replicas have reported as stored and evicted, after a delay.

    Blocks that a time to live has let expire are held until their replica drops them. Costs
    what `Holders` costs, and an entry of a heap for each event that is under way.

    Attributes:
        delay: nanoseconds between an event and its arrival at the router.
    """

    delay: int = attrs.field(default=0, validator=ge(0))
    _sizes: dict[int | None, _Size] = attrs.field(factory=dict, init=False)
    _places: dict[int, _Place] = attrs.field(factory=dict, init=False)
    # Events: the time, a serial, the life of a replica, the function that records it, blocks.
    _coming: list[tuple[int, int, _Place, _Record, Any, Any, Any, Any]] = attrs.field(
        factory=list, init=False
    )
    _serial: int = attrs.field(default=0, init=False)

    wants_events = True

    def connect(self, replica: int, cache: ServedCache) -> None:
        """Subscribe to the stores and evictions of `cache`, which is empty."""
        if not isinstance(cache, KVCache):
            msg = (
                "view 'events' of cache groups, whose blocks are not reported: give view=index "
                "or view=exact, or serve one group (disable_hybrid_kv_cache_manager)"
            )
            raise InputError(msg)
        layout, tree = cache.geometry, cache.tree
        instance = self._place(replica, layout.block_size, layout)
        instance.below, tree.watcher = tree.watcher, instance

    def find(self, request: Request, now: int) -> Mapping[int, int]:
        """Return the prompt tokens that each replica has, according to its events so far."""
        self.catch_up(now)
        hits: dict[int, int] = {}
        for size in self._sizes.values():
            hits.update(size.find(request))
        return hits

    def catch_up(self, now: int) -> None:
        """Apply the events that have arrived by `now`."""
        coming, until = self._coming, now - self.delay
        while coming and coming[0][0] <= until:
            moment, _, instance, record, *blocks = heappop(coming)
            self._record(instance, moment, record, *blocks)

    def stored(self, replica: int, keys: Sequence[Key], now: int) -> None:
        """Called when a real replica reports the blocks of `keys` as stored."""
        self._reported(replica, now, _Size.store, keys)

    def removed(self, replica: int, keys: Sequence[Key], now: int) -> None:
        """Called when a real replica reports the blocks of `keys` as removed."""
        self._reported(replica, now, _Size.remove, keys)

    def lost(self, replica: int, now: int) -> None:
        """Remove the blocks of a replica; its delayed events are dropped on arrival."""
        instance = self._places.pop(replica, None)
        if instance is not None:
            instance.size.drop(replica)

    def _place(self, replica: int, size: int | None, layout: BlockLayout | None) -> _Place:
        """Return a new life of a replica, with blocks of `size` tokens."""
        blocks = self._sizes.setdefault(size, _Size(layout))
        # In a simulated cluster all earlier events are reported before a request is routed.
        report = self._expect if self.delay else self._record
        instance = self._places[replica] = _Place(replica, blocks, report)
        return instance

    def _reported(self, replica: int, now: int, record: _Record, keys: Sequence[Key]) -> None:
        if keys:
            instance = self._places.get(replica) or self._place(replica, None, None)
            self._expect(instance, now, record, keys, 0, len(keys), 1)

    def _expect(self, instance: _Place, ready_at: int, record: _Record, *blocks: Any) -> None:
        """Queue an event of a replica, to be applied after the delay."""
        self._serial += 1
        heappush(self._coming, (ready_at, self._serial, instance, record, *blocks))

    def _record(self, instance: _Place, ready_at: int, record: _Record, *blocks: Any) -> None:
        """Record an event, unless its replica has lost its K/V since."""
        if self._places.get(instance.replica) is instance:
            record(instance.size, instance.replica, *blocks)

    def __str__(self) -> str:
        """Return the view as `parse_view` reads it."""
        return f"events:delay={seconds_text(self.delay)}"


@attrs.define(eq=False)
class ExactView(PrefixView):
    """The current content of each cache, which no real router has. O(replicas)."""

    _caches: dict[int, ServedCache] = attrs.field(factory=dict, init=False)

    wants_events = True

    def connect(self, replica: int, cache: ServedCache) -> None:
        """Read `cache` from now on."""
        self._caches[replica] = cache

    def find(self, request: Request, now: int) -> Mapping[int, int]:
        """Return the tokens of the prompt that would hit in each cache."""
        hits = {
            number: cache.probe(request, now) * cache.geometry.block_size
            for number, cache in self._caches.items()
        }
        return {number: tokens for number, tokens in hits.items() if tokens}

    def lost(self, replica: int, now: int) -> None:
        """Stop reading the cache of a replica."""
        self._caches.pop(replica, None)

    def __str__(self) -> str:
        """Return the view as `parse_view` reads it."""
        return "exact"


def _or_none(read: Callable[[str], int]) -> Callable[[str], int | None]:
    return lambda text: None if text == "none" else read(text)


def _some_time(text: str) -> int:
    """Return a time above 0 in ns. Raises InputError if it is none."""
    ns = parse_seconds(text)
    if ns < 1:
        msg = f"{text!r}: give a time above 0, such as 120s, or none for no end"
        raise InputError(msg)
    return ns


VIEWS: dict[str, tuple[type[PrefixView], dict[str, Callable[[str], int | None]]]] = {
    "index": (SentIndex, {"ttl": _or_none(_some_time), "blocks": _or_none(parse_whole)}),
    "events": (EventsView, {"delay": parse_seconds}),
    "exact": (ExactView, {}),
}
"""The views by name, with the reader of each of their options."""


def parse_view(text: str, views: Iterable[str] = VIEWS) -> PrefixView:
    """Build a view from text: `index:ttl=120s,blocks=1M`, `events:delay=50ms` or `exact`.

    Raises:
        InputError: a name that is none of `views`, another option, or a value that it cannot
            have.
    """
    specs = parse(text)
    if len(specs) != 1 or specs[0].name not in views:
        name = specs[0].name if len(specs) == 1 else text
        hint = nearest(name, views) if len(specs) == 1 else ""
        msg = f"{name!r} is no view{hint}; there are: {', '.join(views)}"
        raise InputError(msg)
    name, settings = specs[0].name, specs[0].options
    view, options = VIEWS[name]
    read: dict[str, Any] = {}
    for option, value in settings.items():
        if option not in options:
            known = ", ".join(options) or "none"
            msg = (
                f"view {name!r} has no option {option!r}{nearest(option, options)}; "
                f"its options: {known}"
            )
            raise InputError(msg)
        try:
            read[option] = options[option](value)
            view(**read)
        except (InputError, ValueError) as error:
            reason = error.args[0]
            msg = f"option {option!r} of view {name!r}: {reason}"
            raise InputError(msg) from error
    return view(**read)
