"""The recorder: one method for every decision that a trace writes down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias

from kvcore.cache.layout import BlockLayout
from kvcore.cache.pool import Ids
from kvcore.cache.sequence import Sequence as CacheSequence
from kvcore.errors import InputError
from kvcore.request import Key, Request

Id: TypeAlias = int | str

Growth: TypeAlias = tuple[int, int, int, int]
"""(time in ns, sequence, index in its block table, block): a sequence got a block."""

Victim: TypeAlias = tuple[int, int, int, int]
"""(span, blocks, hits, accessed): blocks were evicted from the tail of a span, which requests
had hit so often, at last at the time `accessed` (ns)."""


class Recorder(ABC):
    """Records decisions: `kvcore.Trace` in a file, a class of your own anywhere else.

    Each method but `admission` and `missed` makes one line, a dict with the fields of
    `kvcore.trace.events`, and passes it to `write`. Times (`now`) are ns. A call costs as
    much as making the dict and one call of `write`: the reader checks the fields.

    Blocks that a running sequence drops by its retention policy are an EVICT of scope
    `sequence` (`drop`), and `forgotten_blocks` of a summary; DROP is of tiers.

    Attributes:
        write: called with every line except the header. Its `n` is 0, and is set where lines
            are numbered; `runs` is an array of block ids, or None if the pool only counts.
    """

    write: Callable[[dict[str, Any]], None]

    @abstractmethod
    def begin(
        self,
        *,
        count: str,
        block_size: int,
        key_tokens: int,
        blocks: int,
        plugins: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Store the settings of the cache. Called once, by the cache."""

    @abstractmethod
    def request(self, request: Request, now: int) -> None:
        """Write REQUEST when `request` arrives; a second call for the same id does nothing."""

    @abstractmethod
    def describe(self, **header: Any) -> None:
        """Add to the header. Called by a run before its first line."""

    def describe_keys(self, request: Request, layout: BlockLayout) -> None:
        """Add the `key_tokens` of `request` to the header, if it is the first to say them.

        Raises:
            InputError: as `BlockLayout.check_key_tokens` does.
        """
        if layout.takes_key_tokens(request):
            self.describe(key_tokens=request.key_tokens)

    def admission(
        self,
        now: int,
        seq: CacheSequence,
        prompt_blocks: int,
        limit: int,
        *,
        expired: bool,
        again: bool,
    ) -> None:
        """Write HIT, MISS and ALLOC of the sequence `seq`, as far as each applies.

        At most `limit` of the `prompt_blocks` blocks of its prompt could hit. `expired`: the
        block after the hit is in a span that has expired.
        """
        request, hit = seq.request, seq.hit_blocks
        if hit:
            span = seq.span.id
            self.hit(now, request=request.id, seq=seq.id, blocks=hit, span=span, again=again)
        self.missed(now, seq, prompt_blocks, limit, expired=expired, again=again)
        if seq.private:
            self.alloc(now, seq=seq.id, first=hit, runs=seq.private)

    def missed(
        self,
        now: int,
        seq: CacheSequence,
        prompt_blocks: int,
        limit: int,
        *,
        expired: bool,
        again: bool,
    ) -> None:
        """Write MISS of the sequence `seq`, unless all of its prompt hit; an empty one misses.

        The arguments are those of `admission`.
        """
        request, hit, size = seq.request, seq.hit_blocks, seq.span.geometry.block_size
        if not hit or hit < prompt_blocks:
            why: Literal["absent", "partial", "expired", "no keys"]
            if hit < limit:
                why = "expired" if expired else "absent"
            elif not seq.keys or limit < (request.prompt_tokens - 1) // size:
                why = "no keys"  # of a block before the last token
            else:
                why = "partial"
            self.miss(now, request=request.id, seq=seq.id, block=hit, why=why, again=again)

    def hit(
        self, now: int, *, request: Id, seq: int, blocks: int, span: int, again: bool = False
    ) -> None:
        """Write HIT: sequence `seq` opened, and its first `blocks` blocks were cached."""
        line = {
            "n": 0, "t": now, "event": "HIT",
            "request": request, "seq": seq, "blocks": blocks, "span": span,
        }  # fmt: skip
        if again:
            line["again"] = True
        self.write(line)

    def miss(
        self,
        now: int,
        *,
        request: Id,
        seq: int,
        block: int,
        why: Literal["absent", "partial", "expired", "no keys"],
        again: bool = False,
    ) -> None:
        """Write MISS: the hit of sequence `seq` ended before block `block` of its prompt."""
        line = {
            "n": 0, "t": now, "event": "MISS",
            "request": request, "seq": seq, "block": block, "why": why,
        }  # fmt: skip
        if again:
            line["again"] = True
        self.write(line)

    def prefetch(
        self,
        now: int,
        *,
        request: Id,
        seq: int,
        keys: Iterable[Key],
        blocks: int,
        span: int | None = None,
    ) -> None:
        """Write PREFETCH: `seq` loads blocks of the path of `keys` before `request` arrives.

        The first `blocks` of them are cached, up to the end of `span`.
        """
        line = {
            "n": 0, "t": now, "event": "PREFETCH",
            "request": request, "seq": seq, "keys": keys, "blocks": blocks,
        }  # fmt: skip
        if span is not None:
            line["span"] = span
        self.write(line)

    def split(self, now: int, *, span: int, upper: int, at: int) -> None:
        """Write SPLIT: `span` lost the blocks before position `at` to the new span `upper`."""
        self.write({
            "n": 0, "t": now, "event": "SPLIT", "span": span, "upper": upper, "at": at,
        })  # fmt: skip

    def alloc(self, now: int, *, seq: int, first: int, runs: Ids | None) -> None:
        """Write ALLOC: private blocks `runs` continue the table of `seq` from `first` on."""
        self.write({
            "n": 0, "t": now, "event": "ALLOC", "seq": seq, "first": first, "runs": runs,
        })  # fmt: skip

    def commit(
        self,
        now: int,
        *,
        seq: int,
        span: int,
        first: int,
        blocks: int,
        how: Literal["new", "grown", "same", "shared"],
        generated: bool = False,
    ) -> None:
        """Write COMMIT: `blocks` blocks of `seq`, from `first` on, belong to `span` now.

        `generated`: they are output without keys, which only this request can hit again.
        """
        line = {
            "n": 0, "t": now, "event": "COMMIT",
            "seq": seq, "span": span, "first": first, "blocks": blocks, "how": how,
        }  # fmt: skip
        if generated:
            line["generated"] = True
        self.write(line)

    def keep_slots(
        self,
        now: int,
        *,
        seq: int,
        windows: Sequence[int] | None = None,
        state: int | None = None,
    ) -> None:
        """Write KEEP: the spans `windows` got window slots of `seq`, and `state` a state slot.

        What `seq` had of them for blocks that it shares, and what no span got, is free. Spans
        are left out if there are none.
        """
        line: dict[str, Any] = {"n": 0, "t": now, "event": "KEEP", "seq": seq}
        if windows:
            line["windows"] = windows
        if state is not None:
            line["state"] = state
        self.write(line)

    def evict(
        self,
        now: int,
        *,
        span: int,
        runs: Ids | None,
        by: str,
        requester: Id,
        age: int,
        hits: int,
        reason: Literal["capacity", "expired", "gone"],
    ) -> None:
        """Write EVICT of scope `cache`: the blocks `runs`, tail first, left the cache."""
        self.write({
            "n": 0, "t": now, "event": "EVICT",
            "span": span, "runs": runs, "by": by, "for": requester, "age": age, "hits": hits,
            "reason": reason, "scope": "cache",
        })  # fmt: skip

    def tombstone(
        self, now: int, *, span: int, pool: Literal["window", "state"], requester: Id
    ) -> None:
        """Write TOMBSTONE: `span` lost its windows or its state, which `requester` needed."""
        self.write({
            "n": 0, "t": now, "event": "TOMBSTONE", "span": span, "pool": pool,
            "for": requester,
        })  # fmt: skip

    def grow(
        self,
        now: int,
        *,
        grown: Sequence[Growth],
        by: str | None = None,
        victims: Sequence[Victim] | None = None,
        requesters: Sequence[Id] | None = None,
    ) -> None:
        """Write ALLOC for each of `grown`, and before it EVICT, if its block was a victim's.

        The last of the blocks are those of `victims`, in order, evicted for `requesters`. A
        recorder may write GROW instead, which stands for these lines.
        """
        del now
        for (t, seq, first, block), victim in growth(grown, victims or (), requesters or ()):
            runs = array("i", (block,))
            if victim is not None:
                assert by is not None
                span, hits, accessed, requester = victim
                self.evict(
                    t, span=span, runs=runs, by=by, requester=requester, age=t - accessed,
                    hits=hits, reason="capacity",
                )  # fmt: skip
            self.alloc(t, seq=seq, first=first, runs=runs)

    def drop(
        self, now: int, *, seq: int, first: int, blocks: int, runs: Ids | None, by: str
    ) -> None:
        """Write EVICT of scope `sequence`: `seq` dropped `blocks` blocks from `first` on.

        `runs` are the private ones among them, which are free now, deepest first.
        """
        self.write({
            "n": 0, "t": now, "event": "EVICT",
            "seq": seq, "first": first, "blocks": blocks, "runs": runs, "by": by,
            "reason": "retention", "scope": "sequence",
        })  # fmt: skip

    def compact(
        self,
        now: int,
        *,
        seq: int,
        tokens: int,
        held: int,
        runs: Ids | None,
        new: Ids | None = None,
        ahead: int = 0,
    ) -> None:
        """Write COMPACT: of the `held` tokens of `seq`, `tokens` stay, in private blocks.

        Its block table is then the first of its private blocks, and the blocks `new` after
        them; `runs` are its other private blocks, which are free now, deepest first. `ahead`
        tokens are allocated and not computed. Its shared blocks are unpinned. An empty `new`
        and an `ahead` of 0 are left out.
        """
        line = {
            "n": 0, "t": now, "event": "COMPACT",
            "seq": seq, "tokens": tokens, "held": held, "runs": runs,
        }  # fmt: skip
        if new:
            line["new"] = new
        if ahead:
            line["ahead"] = ahead
        self.write(line)

    def free(
        self,
        now: int,
        *,
        seq: int,
        runs: Ids | None,
        reason: Literal["close", "duplicate", "rollback", "passed"],
        first: int | None = None,
        forgotten: Iterable[tuple[int, int]] | None = None,
        compacted: int = 0,
    ) -> None:
        """Write FREE: private blocks `runs` of `seq` are free, deepest first.

        `first` is the first block that a rollback removed from the table, `forgotten` the
        ranges `(first, count)` that a closing sequence had dropped, or of blocks whose window
        slots are free since the window has `passed`, and `compacted` the tokens that its
        compactions had removed. Without any they are left out.
        """
        line = {
            "n": 0, "t": now, "event": "FREE", "seq": seq, "runs": runs, "reason": reason,
        }  # fmt: skip
        if first is not None:
            line["first"] = first
        if forgotten:
            line["forgotten"] = forgotten
        if compacted:
            line["compacted"] = compacted
        self.write(line)

    def group_hit(
        self, now: int, *, request: Id, seq: int, blocks: int, again: bool = False
    ) -> None:
        """Write HIT of cache groups: all of them can go on after `blocks` blocks."""
        line = {
            "n": 0, "t": now, "event": "HIT", "request": request, "seq": seq, "blocks": blocks,
        }  # fmt: skip
        if again:
            line["again"] = True
        self.write(line)

    def group_alloc(
        self, now: int, *, seq: int, group: int, first: int, runs: Ids | None
    ) -> None:
        """Write ALLOC: blocks `runs` continue the table of `seq` in `group` from `first`."""
        self.write({
            "n": 0, "t": now, "event": "ALLOC",
            "seq": seq, "group": group, "first": first, "runs": runs,
        })  # fmt: skip

    def group_commit(
        self,
        now: int,
        *,
        seq: int,
        group: int,
        first: int,
        blocks: int,
        how: Literal["new", "copy"],
        generated: bool = False,
    ) -> None:
        """Write COMMIT: blocks of `seq` in `group` have names, by which others can hit them.

        `how` is `copy` if there are blocks with these names. `generated` is that of `commit`.
        """
        line = {
            "n": 0, "t": now, "event": "COMMIT",
            "seq": seq, "group": group, "first": first, "blocks": blocks, "how": how,
        }  # fmt: skip
        if generated:
            line["generated"] = True
        self.write(line)

    def group_evict(
        self,
        now: int,
        *,
        group: int,
        runs: Ids | None,
        by: str,
        requester: Id,
    ) -> None:
        """Write EVICT of scope `cache`: the blocks `runs` of `group` lost their names."""
        self.write({
            "n": 0, "t": now, "event": "EVICT", "group": group, "runs": runs, "by": by,
            "for": requester, "reason": "capacity", "scope": "cache",
        })  # fmt: skip

    def group_free(
        self,
        now: int,
        *,
        seq: int,
        runs: Ids | None,
        reason: Literal["close", "passed"],
        group: int | None = None,
        first: int | None = None,
    ) -> None:
        """Write FREE: `seq` is closed, or needs no block of `group` before `first` any more.

        Those among them without a name, `runs`, are free now, deepest first.
        """
        line = {
            "n": 0, "t": now, "event": "FREE", "seq": seq, "runs": runs, "reason": reason,
        }  # fmt: skip
        if group is not None:
            line["group"] = group
            line["first"] = first
        self.write(line)

    def fork(self, now: int, *, seq: int, child: int) -> None:
        """Write FORK: `child` shares all blocks of `seq`."""
        self.write({"n": 0, "t": now, "event": "FORK", "seq": seq, "child": child})

    def copy(self, now: int, *, seq: int, block: int, source: int, to: int) -> None:
        """Write COPY: at `block` of its table `seq` has `to` instead of the shared `source`."""
        self.write({
            "n": 0, "t": now, "event": "COPY",
            "seq": seq, "block": block, "from": source, "to": to,
        })  # fmt: skip

    def first_token(self, now: int, *, request: Id, seq: int) -> None:
        """Write FIRST_TOKEN: a step that generated the first token of `request` has ended."""
        self.write({"n": 0, "t": now, "event": "FIRST_TOKEN", "request": request, "seq": seq})

    def preempt(
        self,
        now: int,
        *,
        request: Id,
        seq: int,
        how: Literal["pause", "recompute", "swap"],
        requester: Id | None = None,
    ) -> None:
        """Write PREEMPT: `request` no longer runs, to free blocks for `requester` if given."""
        line = {
            "n": 0, "t": now, "event": "PREEMPT", "request": request, "seq": seq, "how": how,
        }  # fmt: skip
        if requester is not None:
            line["for"] = requester
        self.write(line)

    def resume(self, now: int, *, request: Id, seq: int) -> None:
        """Write RESUME: `request`, which was paused, runs again."""
        self.write({"n": 0, "t": now, "event": "RESUME", "request": request, "seq": seq})

    def recover(
        self,
        now: int,
        *,
        tier: str,
        request: Id,
        keys: Iterable[Key],
        first: int,
        blocks: int,
    ) -> None:
        """Write RECOVER: blocks of the path of `keys` are in `tier`, left by an earlier run.

        These are `blocks` blocks from position `first` on; an earlier call recovered the blocks
        before them. Later lines call their path `request`, a name that no request has.
        """
        self.write({
            "n": 0, "t": now, "event": "RECOVER", "tier": tier, "request": request,
            "keys": keys, "first": first, "blocks": blocks,
        })  # fmt: skip

    def offload(
        self,
        now: int,
        *,
        tier: str,
        request: Id,
        first: int,
        blocks: int,
        done: int,
        source: str | None = None,
        parked: bool = False,
        group: int | None = None,
    ) -> None:
        """Write OFFLOAD: blocks of the prompt of `request` are written into `tier`.

        They can be used from `done` (ns) on. `source` is the tier that they come from; None
        stands for the pool, and is left out. `parked`: they belong to a preempted sequence.
        `group` is that of cache groups.
        """
        line = {
            "n": 0, "t": now, "event": "OFFLOAD",
            "tier": tier, "request": request, "first": first, "blocks": blocks, "done": done,
        }  # fmt: skip
        if source is not None:
            line["from"] = source
        if parked:
            line["parked"] = True
        self.write(line | _of_group(group))

    def load_start(
        self, now: int, *, tier: str, request: Id, seq: int, first: int, blocks: int, done: int,
        group: int | None = None, hit: int | None = None,
    ) -> None:  # fmt: skip
        """Write LOAD_START: `seq` waits for blocks from `tier`, which arrive at `done` (ns).

        Of cache groups, `hit` is how many first blocks, of HEADER's, it has after all loads.
        """
        self.write({
            "n": 0, "t": now, "event": "LOAD_START", "tier": tier, "request": request,
            "seq": seq, "first": first, "blocks": blocks, "done": done,
        } | _of_group(group, hit))  # fmt: skip

    def load(
        self, now: int, *, tier: str, request: Id, seq: int, first: int, blocks: int,
        group: int | None = None, hit: int | None = None,
    ) -> None:  # fmt: skip
        """Write LOAD: blocks from `tier` were loaded into private blocks of `seq`."""
        self.write({
            "n": 0, "t": now, "event": "LOAD", "tier": tier, "request": request,
            "seq": seq, "first": first, "blocks": blocks,
        } | _of_group(group, hit))  # fmt: skip

    def drop_from_tier(
        self, now: int, *, tier: str, request: Id, first: int, blocks: int, reason: str,
        group: int | None = None,
    ) -> None:  # fmt: skip
        """Write DROP: blocks of the prompt of `request` are no longer in `tier`."""
        self.write({
            "n": 0, "t": now, "event": "DROP", "tier": tier, "request": request,
            "first": first, "blocks": blocks, "reason": reason,
        } | _of_group(group))  # fmt: skip

    def keys(self, now: int, *, request: Id, keys: Iterable[Key]) -> None:
        """Write KEYS: keys of generated blocks, which continue the keys of `request`."""
        self.write({"n": 0, "t": now, "event": "KEYS", "request": request, "keys": keys})

    def finish(
        self,
        now: int,
        *,
        request: Id,
        seq: int,
        output: int,
        output_keys: Iterable[Key] | None = None,
    ) -> None:
        """Write FINISH: `request` has all of its `output` tokens.

        `output_keys` are the keys of its output that REQUEST does not have; left out if empty.
        """
        line = {
            "n": 0, "t": now, "event": "FINISH",
            "request": request, "seq": seq, "output": output,
        }  # fmt: skip
        if output_keys:
            line["output_keys"] = output_keys
        self.write(line)

    def reject(self, now: int, *, request: Id, why: str) -> None:
        """Write REJECT: `request` was turned away, and was never admitted."""
        self.write({"n": 0, "t": now, "event": "REJECT", "request": request, "why": why})


def growth(
    grown: Sequence[Growth], victims: Iterable[Victim], requesters: Sequence[Id]
) -> Iterator[tuple[Growth, tuple[int, int, int, Id] | None]]:
    """Yield each of `grown`, and what its block was evicted from; None if it was free.

    That is (span, hits, accessed, requester). The arguments are the fields of GROW.
    """
    free = len(grown) - len(requesters)
    for row in grown[:free]:
        yield row, None
    rest = zip(grown[free:], requesters, strict=True)
    for span, blocks, hits, accessed in victims:
        for row, requester in islice(rest, blocks):
            yield row, (span, hits, accessed, requester)


def check_admission(request: Request, admitted: set[Id], *, resumed: bool) -> None:
    """Check that `request` is resumed if, and only if, it is among the `admitted` ones.

    Raises:
        InputError: a request is admitted first for the second time, or resumed without a
            first admission.
    """
    if resumed != (request.id in admitted):
        why = "was admitted before: give another id, or resumed=True if it returns"
        if resumed:
            why = "was not admitted before: leave out resumed=True"
        msg = f"request {request.id!r} {why}"
        raise InputError(msg)


def _of_group(group: int | None, hit: int | None = None) -> dict[str, int]:
    """Return the fields that a line about a tier has of cache groups alone."""
    fields = {"group": group, "hit": hit}
    return {name: value for name, value in fields.items() if value is not None}
