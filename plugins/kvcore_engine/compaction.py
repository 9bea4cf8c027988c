"""Retention on tensors: which tokens of a sequence stay, and where their K/V goes.

A compaction in one K/V head, to 4 tokens in blocks of 2. The sequence has block 9 from a
shared prefix, and 5 and 3 of its own; it goes on with 5 and 3 (its own blocks come first):

    place    0  1    2  3    4  5                 0  1    2  3
    block    9  9    5  5    3  3                 5  5    3  3
    token    a  b    c  d    e  f    keep b c e f c  b    e  f

c, e and f lie where they may stay; only b moves, into the place that d leaves. The order of
tokens in a table means nothing: K/V carries its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.cache import Ids, KVCache
from kvcore.cache.sequence import Sequence
from kvcore.engine.backend import Backend
from kvcore.engine.batch import RaggedBatch, Tensor
from kvcore.engine.generator import Generator
from kvcore.engine.rotary import Rotary
from kvcore.errors import InputError, PolicyError
from kvcore.lazy import LazyModule
from kvcore.models.codec import Part
from kvcore.plugins import FAILURES, policy_error, wrong_answer
from kvcore_engine.merging import merged
from kvcore_engine.page_reader import PageReader
from kvcore_engine.reads import AttentionReads
from kvcore_engine.retention.page_selection import PageSelection
from kvcore_engine.retention.token_retention import (
    HeldTokens,
    Reads,
    TokenRetention,
    token_retention,
)

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

FEW, SAMPLED = 8, 16
"""How many tokens there are for each that stays, and which of them `_bar` looks at first."""


def _check_reads(policy: TokenRetention) -> None:
    """Raise PolicyError if `policy.reads` is not a valid `Reads`."""
    reads = policy.reads
    if not isinstance(reads, Reads):
        wrong = f"{reads!r}: give kvcore_engine.retention.Reads, such as Reads(keys=True)"
    elif not isinstance(reads.queries, int) or reads.queries < 0:
        wrong = f"queries={reads.queries!r}: give the number of newest tokens, 0 or more"
    else:
        return
    raise wrong_answer(policy, "reads", wrong)


@attrs.define(eq=False)
class _Record:
    """Positions and scores of the tokens that a sequence holds.

    Attributes:
        positions: positions in the text of the tokens that its last compaction kept,
            `[layers, kv_heads, kept]`; the tokens behind them are all those that it has
            computed since. None before the first: all tokens are at their places.
        turned: with rebased positions, the positions of these tokens for attention, of the
            same shape.
        originals: with rebased positions, for each layer the number that a place of
            `positions` has among the keys that were turned, -1 for none, `[kv_heads, kept]`,
            and these keys as they were computed, `[turned, head_dim]`.
        attention: sums of attention weights, `[layers, kv_heads, at least held]`.
        queries: for each layer the queries of the newest n tokens, `[n, heads, head_dim]`;
            the one at position p is row p % n.
        asked: position of each row of `queries`; -1: the row is empty.
        summaries: summaries of its pages by layer, for a policy that selects pages.
    """

    positions: torch.Tensor | None = None
    turned: torch.Tensor | None = None
    originals: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    attention: torch.Tensor | None = None
    queries: dict[int, torch.Tensor] = attrs.field(factory=dict)
    asked: list[int] = attrs.field(factory=list)
    summaries: dict[int, torch.Tensor] = attrs.field(factory=dict)

    def copy(self) -> _Record:
        """Return the record of a fork, which shares the tensors that only compactions set."""
        return attrs.evolve(
            self,
            attention=None if self.attention is None else self.attention.clone(),
            queries={layer: rows.clone() for layer, rows in self.queries.items()},
            asked=[*self.asked],
            summaries={**self.summaries},
        )

    def add_attention(
        self, layer: int, layers: int, context: int, weights: torch.Tensor
    ) -> None:
        """Add the weights of a step, `[kv_heads, context + length]`, to those before it."""
        heads, total = weights.shape
        before = self.attention
        if before is None or before.shape[2] < total:
            self.attention = weights.new_zeros(layers, heads, total + total // 4 + 64)
            if before is not None:
                self.attention[:, :, : before.shape[2]] = before
        assert self.attention is not None
        sums = self.attention[layer]
        sums[:, :context] += weights[:, :context]
        # Behind the context there may be sums of tokens that have been rolled back.
        sums[:, context:total] = weights[:, context:]


class Compactor:
    """Runs the retention policy of a cache on tensors.

    It records the inputs of the policy, and nothing else, where a step attends; moves K/V when
    the cache compacts a sequence; and returns the positions of held tokens for layers with
    windows. For a policy that selects pages it lets tokens read these. The records of a
    sequence end with the sequence.

    Args:
        cache: the cache, whose `on_fork` and `on_compact` are set. Without a policy that picks
            single tokens it cannot be compacted.
        backend: the backend with its K/V.
        windows: attention window of each layer.
        rotary: rotary embedding of each layer, as in `Generator.rotary`.

    Raises:
        InputError: the policy cannot be run: it selects no single tokens, or rebases positions
            of keys that cannot be rotated.
        PolicyError: its `reads` are no `Reads`, or of a negative number of queries.

    Attributes:
        reads: what generated tokens have read so far.
    """

    def __init__(
        self,
        cache: KVCache,
        backend: Backend,
        windows: Iterable[int | None],
        rotary: Iterable[Rotary | None],
    ) -> None:
        self._policy = token_retention(cache)
        self._backend = backend
        self._windows, self._rotary = tuple(windows), tuple(rotary)
        self._has_windows = any(window is not None for window in self._windows)
        self._options: dict[int, dict[str, Any]] = {}
        self._merges = False
        if self._policy is not None:
            _check_reads(self._policy)
            self._merges = self._policy.merges
            if self._policy.rebases:
                self._check_rebasing(self._policy)
        retention = cache.retention
        self._reader: PageReader | None = None
        if isinstance(retention, PageSelection):
            self._reader = PageReader(retention, backend)
        self.reads = AttentionReads(backend.layout, self._windows, self._reader)
        cache.on_fork, cache.on_compact = self._fork, self._compact

    @classmethod
    def for_run(cls, cache: KVCache, backend: Backend, generator: Generator) -> Compactor:
        """Return the compactor of a run of `generator`.

        Raises:
            InputError: the retention policy cannot be run.
        """
        # A model may have to compute tokens to find its rotary embedding.
        rotary = generator.rotary if cache.retention is not None else ()
        return cls(cache, backend, generator.spec.windows, rotary)

    def attend(
        self, sequences: Iterable[Sequence], batch: RaggedBatch
    ) -> Callable[..., Tensor]:
        """Return the function that attends in a step of `sequences`, as `Backend.attend` does.

        It is the backend's own, unless there is something to record for the policy.
        """
        backend, policy = self._backend, self._policy
        sequences = list(sequences)
        self.reads.add(sequences, batch)
        if self._reader is not None:
            summaries = [self._record(seq).summaries for seq in sequences]
            return self._reader.attend(sequences, summaries, batch)
        if policy is None:
            return backend.attend
        reads = policy.reads
        # The first step tells the options of each layer, which stay.
        told = len(self._options) == backend.layout.layers
        if told and not (reads.attention or reads.queries):
            return backend.attend
        records = [self._record(seq) for seq in sequences]
        newest = self._newest(records, sequences, batch, reads.queries)

        def attend(layer: int, plan: Any, queries: Tensor, **options: Any) -> Tensor:
            self._options[layer] = options
            for record, (rows, slots) in zip(records, newest, strict=False):
                kept = record.queries.get(layer)
                if kept is None:
                    kept = queries.new_zeros(reads.queries, *queries.shape[1:])
                    record.queries[layer] = kept
                kept[slots] = queries[rows]
            if not reads.attention:
                return backend.attend(layer, plan, queries, **options)
            out, sums = backend.attend_weighed(layer, plan, queries, **options)
            for record, context, weights in zip(records, batch.contexts, sums, strict=True):
                record.add_attention(layer, backend.layout.layers, context, weights)
            return out

        return attend

    def summary_bytes(self, sequences: Iterable[Sequence]) -> int:
        """Return the bytes of the summaries that are kept of the pages of sequences."""
        records = (self._record(seq) for seq in sequences)
        return sum(kept.nbytes for record in records for kept in record.summaries.values())

    def _fork(self, seq: Sequence, child: Sequence) -> None:
        """Called when `seq` is forked: `child` gets a copy of its record."""
        if seq.data is not None:
            child.data = seq.data.copy()

    def held_positions(
        self, sequences: Iterable[Sequence], contexts: Iterable[int]
    ) -> dict[int, Any]:
        """Return `RaggedBatch.held_positions` of a step; empty if no layer needs them."""
        if not self._has_windows:
            return {}
        return {
            index: self._positions_of(seq, context)
            for index, (seq, context) in enumerate(zip(sequences, contexts, strict=True))
            if seq.compacted or seq.holes
        }

    def positions(self, seq: Sequence) -> Tensor:
        """Return the position in the text of each token that `seq` holds.

        `[layers, kv_heads, held]`, integers on the host.
        """
        known = self._known(self._record(seq).positions, seq.held, seq.compacted)
        if seq.holes:
            known = torch.tensor(self._positions_of(seq, seq.held)).expand(known.shape)
        return known

    def _positions_of(self, seq: Sequence, context: int) -> Any:
        """Return the positions by which windows see the tokens of `seq`; it has lost some."""
        if seq.compacted:
            record = self._record(seq)
            known = record.positions if record.turned is None else record.turned
            return self._known(known, context, seq.compacted)
        size = seq.span.geometry.block_size
        edges = [edge * size for hole in seq.holes for edge in hole]
        edges = [0, *edges, context + seq.dropped_tokens]
        ranges = zip(edges[::2], edges[1::2], strict=True)
        return [position for first, end in ranges for position in range(first, end)]

    def _known(self, kept: torch.Tensor | None, held: int, compacted: int) -> torch.Tensor:
        """Return the positions of `held` tokens: `kept`, then those of later tokens."""
        layout = self._backend.layout
        start = 0 if kept is None else kept.shape[2]
        shape = layout.layers, layout.kv_heads, held - start
        newer = torch.arange(start + compacted, held + compacted).expand(shape)
        return newer if kept is None else torch.cat((kept, newer), 2)

    def _record(self, seq: Sequence) -> _Record:
        """Return the record of `seq`, a new one if it has none."""
        record: _Record | None = seq.data
        if record is None:
            record = seq.data = _Record()
            if self._policy is not None:
                record.asked = [-1] * self._policy.reads.queries
        return record

    def _newest(
        self, records: list[_Record], sequences: list[Sequence], batch: RaggedBatch, limit: int
    ) -> list[tuple[slice, Tensor]]:
        """Return which rows of the step's queries are kept, and in which rows of a record."""
        if not limit:
            return []
        rows_and_slots = []
        ends = accumulate(batch.lengths)
        steps = zip(records, sequences, batch.contexts, batch.lengths, ends, strict=True)
        for record, seq, context, length, end in steps:
            last = seq.dropped_tokens + context + length
            positions = range(last - min(length, limit), last)
            slots = [position % limit for position in positions]
            for slot, position in zip(slots, positions, strict=True):
                record.asked[slot] = position
            rows = slice(end - len(slots), end)
            rows_and_slots.append((rows, self._backend.tensor(torch.tensor(slots))))
        return rows_and_slots

    def _compact(self, seq: Sequence, table: Ids, held: int) -> None:
        """Move the tokens that stay of `seq`, which had `held` tokens in the blocks `table`.

        Called by the cache. Costs the scores of the policy, O(layers · heads · held) to choose
        tokens, and a copy of the tokens that move.
        """
        backend, policy = self._backend, self._policy
        if policy is None:
            msg = (
                f"sequence {seq.id} is compacted, and the cache has no retention policy that "
                "says which tokens stay: give it one that does"
            )
            raise PolicyError(msg)
        # Without the blocks of tokens to come: for a codec all blocks but the last are full.
        kept = seq.computed
        into = seq.table()[: -(-kept // backend.layout.block_size)]
        record = self._record(seq)
        compacted = seq.compacted - (held - kept)
        if compacted and record.positions is None:
            msg = (
                f"sequence {seq.id} has lost tokens of which the compactor does not know: a "
                "policy drops blocks or compacts, not both"
            )
            raise InputError(msg)
        text = self._known(record.positions, held, compacted)
        seen = text if record.turned is None else self._known(record.turned, held, compacted)
        back = _places_before(into, table, backend.layout.block_size, kept, held)
        tokens_of_layer, positions, turned, originals = [], [], [], []
        with torch.no_grad():
            for layer in range(backend.layout.layers):
                tokens = self._read(seq, record, layer, text[layer], seen[layer], table)
                scores = self._ranked(policy, tokens, text[layer], seen[layer])
                chosen = _choose(scores, text[layer], kept)
                sources, stays = _assign(chosen, back)
                tokens_of_layer.append(sources)
                positions.append(text[layer].gather(1, sources))
                if self._merges:
                    reachable = chosen | (scores > -torch.inf)
                    masks = (backend.tensor(mask) for mask in (chosen, reachable))
                    self._write(layer, into, merged(policy, tokens, *masks), sources)
                    continue
                shift = None
                if policy.rebases:
                    ranks = positions[-1].argsort(1).argsort(1)
                    turned.append(ranks + seq.position - kept)
                    shift = turned[-1] - positions[-1]
                    originals.append(self._originals(record, layer, table, sources, shift))
                heads, moved = (~stays).nonzero().unbind(1)
                if len(heads):
                    moves = torch.stack((heads, sources[heads, moved], moved))
                    backend.move_tokens(layer, table, into, moves)
                if shift is not None:
                    self._write_turned(layer, into, shift, originals[-1][1])
        record.positions = torch.stack(positions)
        if policy.rebases:
            record.turned, record.originals = torch.stack(turned), originals
        if record.attention is not None:
            order = backend.tensor(torch.stack(tokens_of_layer))
            record.attention = record.attention.gather(2, order)

    def _write(
        self,
        layer: int,
        into: Ids,
        held: tuple[torch.Tensor, torch.Tensor],
        sources: torch.Tensor,
    ) -> None:
        """Store K/V of the held tokens at the places `sources` in the blocks `into`."""
        backend, kept = self._backend, sources.shape[1]
        order = backend.tensor(sources)[..., None]
        plan = backend.plan(RaggedBatch(block_tables=[into], contexts=[0], lengths=[kept]))
        dtype = backend.layout.dtype
        rows = (
            backend.tensor(part.take_along_dim(order, 1).transpose(0, 1).contiguous(), dtype)
            for part in held
        )
        backend.store(layer, plan, *rows)

    def _read(
        self,
        seq: Sequence,
        record: _Record,
        layer: int,
        positions: torch.Tensor,
        seen: torch.Tensor,
        table: Ids,
    ) -> HeldTokens:
        """Return the held tokens of a layer, with the tensors that the policy reads.

        Their `positions` are in the text; attention sees them at `seen`, `[kv_heads, held]`.
        """
        assert self._policy is not None
        backend, reads, held = self._backend, self._policy.reads, positions.shape[1]
        contents: dict[str, Any] = {}
        weighs = reads.queries > 0 and reads.weights
        halves: tuple[tuple[Part, bool], ...] = (
            ("keys", reads.keys or weighs or self._merges),
            ("values", reads.values or self._merges),
        )
        for part, wanted in halves:
            if wanted:
                contents[part] = backend.read_heads(layer, part, table, held, reuse=True)
        if reads.attention:
            # A fork may be compacted that has computed nothing.
            sums = record.attention
            if sums is None:
                contents["attention"] = backend.tensor(torch.zeros(positions.shape), "fp32")
            else:
                contents["attention"] = sums[layer, :, :held]
        options = self._options.get(layer, {})
        scale = options.get("scale")
        if reads.queries:
            rows = [
                (position, row)
                for row, position in enumerate(record.asked)
                if 0 <= position < seq.position
            ]
            if not rows:
                msg = (
                    f"sequence {seq.id} has computed no token whose queries "
                    f"{self._policy.name!r} could read: compact it after a step"
                )
                raise InputError(msg)
            asking, order = (torch.tensor(column) for column in zip(*sorted(rows), strict=True))
            queries = record.queries[layer][backend.tensor(order)].transpose(0, 1)
            contents["queries"] = queries
            if weighs:
                reach = backend.tensor(self._reach(layer, seen[:, None], asking[:, None]))
                learned = options.get("sink_logits")
                contents["weights"] = _weights(queries, contents["keys"], reach, scale, learned)
        if not reads.keys and not self._merges:
            contents.pop("keys", None)
        return HeldTokens(
            seq=seq,
            layers=range(layer, layer + 1),
            positions=backend.tensor(positions)[None],
            query_positions=backend.tensor(asking) if reads.queries else None,
            scales=(scale,),
            windows=(self._windows[layer],),
            rotary=self._rotary[layer : layer + 1],
            **{name: tensor[None] for name, tensor in contents.items()},
        )

    def _reach(self, layer: int, seen: torch.Tensor, query_positions: Any) -> torch.Tensor:
        """Return which tokens at `seen` a query at the positions `asked` attends to, bool."""
        window = self._windows[layer]
        reach: torch.Tensor = seen <= query_positions
        if window is not None:
            sinks = self._options.get(layer, {}).get("sinks", 0)
            reach &= (seen > query_positions - window) | (seen < sinks)
        return reach

    def _ranked(
        self,
        policy: TokenRetention,
        tokens: HeldTokens,
        positions: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """Return the scores of a layer on the host, with tokens that stay or go in any case.

        Raises:
            PolicyError: there is not one number for each token.
        """
        try:
            answer = policy.score(tokens)
        except FAILURES as error:
            raise policy_error(policy, "score", error) from error
        shape = [1, *positions.shape]
        if not isinstance(answer, torch.Tensor) or list(answer.shape) != shape:
            got = list(answer.shape) if hasattr(answer, "shape") else type(answer).__name__
            raise wrong_answer(policy, "score()", f"{got} where the held tokens are {shape}")
        if answer.is_complex():
            raise wrong_answer(policy, "score()", f"{answer.dtype}: give integers or floats")
        scores = answer[0].detach().cpu()
        if not scores.is_floating_point():
            scores = scores.double()
        low, high = scores.aminmax()
        if low.isnan():
            count = int(scores.isnan().sum())
            raise wrong_answer(policy, "score()", f"NaN for {count} of {scores.numel()} tokens")
        limits = torch.finfo(scores.dtype)
        if low < limits.min or high > limits.max:
            scores = scores.clamp(limits.min, limits.max)
        now = tokens.seq.position
        if self._windows[tokens.layers[0]] is not None:
            gone = ~self._reach(tokens.layers[0], seen, now)
            scores = scores.masked_fill(gone, -torch.inf)
        stays = positions >= now - policy.recent_of(tokens.seq)
        return scores.masked_fill(stays | (positions < policy.sinks), torch.inf)

    def _check_rebasing(self, policy: TokenRetention) -> None:
        """Raise InputError where `policy` gives tokens new positions that keys cannot have."""
        plain = [layer for layer, rotary in enumerate(self._rotary) if rotary is None]
        layout = self._backend.layout
        codec = layout.codec
        why = ""
        if self._merges:
            why = "merges them, where each key must be rotated as it was computed"
        elif plain:
            why = (
                f"layer {plain[0]} of the model has no rotary embedding that it tells of, so "
                "its keys cannot be rotated to them"
            )
        elif codec is not None and codec.dtype != layout.dtype:
            why = (
                f"codec {codec.name!r} would round its keys anew with every rotation: take "
                f"{layout.dtype}, as they are computed"
            )
        if why:
            msg = f"retention {policy.name!r} gives tokens new positions, and {why}"
            raise InputError(msg)

    def _originals(
        self,
        record: _Record,
        layer: int,
        table: Ids,
        sources: torch.Tensor,
        shift: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys to be rotated, as they were computed: see `_Record.originals`.

        `sources` are their places in `table`, `shift` by how far, `[kv_heads, kept]`.
        """
        heads, targets = shift.nonzero().unbind(1)
        from_ = sources[heads, targets]
        stored = self._backend.layer_blocks(layer)[0]
        rows: torch.Tensor = stored[self._slots(table, heads, from_)]
        before = None if record.originals is None else record.originals[layer]
        if before is not None:
            numbers, kept = before
            known = from_ < numbers.shape[1]
            row_numbers = torch.full_like(from_, -1)
            row_numbers[known] = numbers[heads[known], from_[known]]
            again = row_numbers >= 0
            rows[self._backend.tensor(again)] = kept[self._backend.tensor(row_numbers[again])]
        numbers = torch.full_like(shift, -1)
        numbers[heads, targets] = torch.arange(len(heads))
        return numbers, rows

    def _write_turned(
        self,
        layer: int,
        into: Ids,
        shift: torch.Tensor,
        keys: torch.Tensor,
    ) -> None:
        """Write the keys that are rotated into their places in `into`."""
        from kvcore_plugins.codec.dtypes import widened  # noqa: PLC0415 - torch

        rotary = self._rotary[layer]
        assert rotary is not None
        heads, targets = shift.nonzero().unbind(1)
        shift_by = self._backend.tensor(shift[heads, targets])
        turned = rotary.rotate(widened(keys), *rotary.angles(shift_by))
        index = self._slots(into, heads, targets)
        self._backend.layer_blocks(layer)[0][index] = turned.to(keys.dtype)

    def _slots(
        self, table: Ids, heads: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the index of `places` of `table` in `Backend.layer_blocks`."""
        size, tensor = self._backend.layout.block_size, self._backend.tensor
        blocks = torch.tensor(table)[tokens // size]
        return tensor(blocks), tensor(heads), tensor(tokens % size)


def _weights(
    queries: torch.Tensor,
    keys: torch.Tensor,
    reach: torch.Tensor,
    scale: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention weights, `[query_heads, n, tokens]`, in fp32 or better.

    `queries` are `[query_heads, n, head_dim]`, `keys` `[kv_heads, tokens, head_dim]`, `reach`
    is True for tokens that are attended to, `[kv_heads, n, tokens]`, and `sink_logits` as in
    `Backend.attend`. A query that reaches no token has zeros.
    """
    from kvcore_plugins.codec.dtypes import widened  # noqa: PLC0415 - torch

    (heads, count, width), (kv_heads, tokens, _) = queries.shape, keys.shape
    scaled = widened(queries).reshape(kv_heads, -1, width)
    scaled = scaled * (width**-0.5 if scale is None else scale)
    scores = torch.bmm(scaled, widened(keys).transpose(1, 2)).view(kv_heads, -1, count, tokens)
    scores.masked_fill_(~reach[:, None], -torch.inf)
    if sink_logits is not None:
        learned = sink_logits.to(scores).view(kv_heads, -1, 1, 1)
        scores = torch.cat((scores, learned.expand(-1, -1, count, 1)), -1)
    return scores.softmax(-1)[..., :tokens].nan_to_num_(0).reshape(heads, count, tokens)


def _choose(scores: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Return which `count` tokens of each head stay, bool `[kv_heads, tokens]`.

    The tokens of the highest scores stay; of tokens with the same score, the newer. O(tokens).
    """
    bar = _bar(scores, count)
    keep = scores >= bar
    if int(keep.count_nonzero()) > count * len(keep):
        above = scores > bar
        newest = torch.where(keep & ~above, positions, -1)
        room = count - above.count_nonzero(1)[:, None]
        oldest = newest.sort(1, descending=True).values.gather(1, room - 1)
        keep = above | (newest >= oldest)
    return keep


def _bar(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count`-th highest score of each head, `[kv_heads, 1]`.

    If few tokens of many stay, most others are left out first: those below a bar that is
    estimated from every 16th token, a little too low. That takes a third of the time.
    """
    if scores.shape[1] < FEW * count:
        return scores.kthvalue(scores.shape[1] - count + 1, dim=1, keepdim=True).values
    sample, rank = scores[:, ::SAMPLED], count // SAMPLED
    rank += int(4 * rank**0.5) + 4
    low = sample.kthvalue(max(1, sample.shape[1] - rank + 1), dim=1).values
    bars = []
    for row, guess in zip(scores, low, strict=True):
        likely = row[row >= guess]
        if len(likely) < count:
            likely = row
        bars.append(likely.kthvalue(len(likely) - count + 1, keepdim=True).values)
    return torch.stack(bars)


def _places_before(into: Ids, table: Ids, size: int, kept: int, held: int) -> torch.Tensor:
    """Return the places in `table`, of `held` tokens, of the first `kept` places of `into`.

    -1 for a place in a new block, or behind the last token.
    """
    index_of = {block: index for index, block in enumerate(table)}
    blocks = torch.tensor([index_of.get(block, -1) for block in into])
    places = blocks.repeat_interleave(size) * size + torch.arange(size).repeat(len(blocks))
    places[places >= held] = -1
    return places[:kept].clamp(min=-1)


def _assign(keep: torch.Tensor, back: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place before of each place after, and whether its token stays in place.

    Both `[kv_heads, kept]`. `keep` is True for each place before with a token that stays, and
    `back` has the place before of each place after (`_places_before`).
    """
    moved = back >= 0
    stays = torch.zeros(len(keep), len(back), dtype=torch.bool)
    stays[:, moved] = keep[:, back[moved]]
    moving = keep.clone()
    moving[:, back[moved]] = False
    # In each head as many tokens move as places are free for them, both in order.
    sources = back.expand(stays.shape).clone()
    sources[~stays] = moving.nonzero()[:, 1]
    return sources, stays
