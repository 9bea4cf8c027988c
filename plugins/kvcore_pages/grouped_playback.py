"""A trace of cache groups as columns that a browser can play.

Its rows have the columns of `kvcore_pages.playback`, with other values in these kinds:

| kind | a | b | c | d | e | count |
|---|---|---|---|---|---|---|
| HIT | sequence | blocks | -1 | again | | |
| ALLOC | sequence | first | group | | | taken |
| COMMIT | sequence | first | blocks | how | group | |
| EVICT | group | | | | | freed |
| FREE | sequence | reason | group or -1 | | | freed |
| OFFLOAD | tier | first | blocks | tier it comes from or -1 | group | |
| LOAD_START, LOAD | tier | first | blocks | sequence | group | |
| DROP | tier | first | blocks | reason | group | |

The ids of blocks are sent, since any free block can go to any group: those that a HIT holds,
or the first LOAD_START of a load, an ALLOC takes, a COMMIT names and an EVICT removes, and of
a FREE first those that are free, then the named ones that its sequence held. The browser makes
the state from them alone. `first` is a position in blocks of the group, of which several may
be one block of HEADER.
"""

from __future__ import annotations

import os
from array import array
from typing import Any, ClassVar

from kvcore.trace import events
from kvcore_pages.playback import (
    DROPPED,
    FREED,
    NONE,
    WORDS,
    EvictedContent,
    Playback,
)
from kvcore_replay.state.cache import run_blocks
from kvcore_replay.state.groups import TracedBlock
from kvcore_replay.state.replicas import ServerReader

NAMED = ("new", "copy")


class GroupedPlayback(Playback):
    """The rows of a trace of cache groups, which is checked while it is read."""

    PREPARED = ("EVICT", "LOAD_START", "FREE")
    STRUCTS: ClassVar = {**events.EVENTS, **events.GROUPED_EVENTS}
    words: ClassVar = WORDS | {"committed": NAMED}

    def _start(self, header: events.Header, checker: Any) -> None:
        """Prepare for the lines after HEADER: check them, and find the reasons of misses."""
        # By block, the number of the request that named it, its position, when, and its name.
        self._named: dict[int, tuple[int, int, int, Any]] = {}
        self._ids = array("i")
        self._row_ends = array("i")
        self._given_back: list[TracedBlock] = []
        self._before_load: list[TracedBlock] = []
        super()._start(header, checker)

    def _prepare(self, event: Any) -> None:
        """Record what an event evicts, gives back or adds to, before it is applied."""
        self._inquest.before(event)
        if event.event == "LOAD_START":
            self._before_load = self._held_by(event.seq)
        if event.event != "FREE":
            return
        seq, self._given_back = self._state.sequences.get(event.seq), []
        if seq is not None:
            for index, table in enumerate(seq.tables):
                if event.reason == "close":
                    self._given_back += table.blocks.values()
                elif index == event.group:
                    self._given_back += [block for _, block in table.before(event.first)]

    def _held_by(self, serial: int) -> list[TracedBlock]:
        """Return the blocks in the tables of a sequence; none if it is not open."""
        seq = self._state.sequences.get(serial)
        tables = () if seq is None else seq.tables
        return [block for table in tables for block in table.blocks.values()]

    def _moves(
        self, event: Any, ids: list[int], request: int, *values: int, **more: int
    ) -> None:
        """Append a row, and the ids of the blocks that it is about."""
        rows = self._count
        self._row(event, request, *values, **more)
        if self._count > rows:
            # Rows of other kinds, which stand between, move no block.
            missing = rows - len(self._row_ends)
            self._row_ends.extend([len(self._ids)] * missing)
            self._ids.extend(ids)
            self._row_ends.append(len(self._ids))

    def _hit(self, event: Any) -> None:
        request = self._admit(event)
        ids = [block.id for block in self._held_by(event.seq)]
        self._moves(event, ids, request, event.seq, event.blocks, NONE, bool(event.again))

    def _alloc(self, event: Any) -> None:
        ids, owner = self._state.ids(event.runs).tolist(), self._of_sequence[event.seq]
        values = event.seq, event.first, event.group
        self._moves(event, ids, owner, *values, count=len(ids))

    def _commit(self, event: Any) -> None:
        owner = self._of_sequence[event.seq]
        seq = self._state.sequences[event.seq]
        table = seq.tables[event.group].blocks
        positions = range(event.first, event.first + event.blocks)
        blocks = [table[position] for position in positions]
        ids = [block.id for block in blocks]
        for block, position in zip(blocks, positions, strict=True):
            self._named[block.id] = owner, position, event.t, (block.group, block.name)
        if event.generated is True:
            prompt, layout = seq.prompt, self._state.layout
            tokens = (event.first + event.blocks) * self._state.groups[event.group].size
            layout.name_generated(prompt, -(-tokens // layout.block_size))
            self.prompts.name(owner, prompt.generated)
        how = NAMED.index(event.how)
        values = event.seq, event.first, event.blocks, how, event.group
        self._moves(event, ids, owner, *values)

    def _evict(self, event: Any, victim: Any) -> None:
        del victim
        ids, row = self._state.ids(event.runs).tolist(), self._count
        for block in ids:
            *_, name = self._named.pop(block)
            if self._compared and self._stage == "inside":
                self.evicted.append(EvictedContent(row, event.requester, [name], 0, 1))
        requester = self._numbers[event.requester]
        self._moves(event, ids, requester, event.group, count=len(ids))

    def _free(self, event: Any) -> None:
        named = [block.id for block in self._given_back if block.name is not None]
        free = self._state.ids(event.runs).tolist()
        if event.reason == "close":
            del self._lives.opened[event.seq]
        group = event.group if isinstance(event.group, int) else NONE
        values = event.seq, FREED.index(event.reason), group
        owner = self._of_sequence[event.seq]
        self._moves(event, free + named, owner, *values, count=run_blocks(event.runs))

    def _offload(self, event: Any) -> None:
        source = self._tiers[event.source] if event.source else NONE
        self._transfer(event, source, [], event.done - event.t)

    def _load_start(self, event: Any) -> None:
        before = {block.id for block in self._before_load}
        held = [block.id for block in self._held_by(event.seq) if block.id not in before]
        self._transfer(event, event.seq, held, event.done - event.t)

    def _load(self, event: Any) -> None:
        self._transfer(event, event.seq, [], 0)

    def _drop(self, event: Any) -> None:
        self._transfer(event, DROPPED.index(event.reason), [], 0)

    def _transfer(self, event: Any, d: int, ids: list[int], age: int) -> None:
        """Append the row of blocks of a group that go to a tier, or leave it."""
        values = self._tiers[event.tier], event.first, event.blocks, d, event.group
        self._moves(event, ids, self._numbers[event.request], *values, age=age)

    def _snapshot(self) -> dict[str, Any]:
        """Return the state as a JSON value; a block is a span of its own."""
        state, hits = self._state, self._state.hits
        blocks = [block for block in state.blocks.values() if block.name is not None]
        named = [self._named[block.id] for block in blocks]
        private = [
            [block.id for block in self._held_by(seq) if block.name is None]
            for seq in state.sequences
        ]
        groups = [(block.id, block.group) for block in state.blocks.values()]
        return {
            "spans": {
                "id": [block.id for block in blocks],
                "parent": [NONE] * len(blocks),
                "start": [position for _, position, _, _ in named],
                "ids": [[block.id] for block in blocks],
                "hits": [block.hits for block in blocks],
                "last": [block.last_access for block in blocks],
                "request": [owner for owner, _, _, _ in named],
                "stored": [stored for _, _, stored, _ in named],
                "pins": [block.holders for block in blocks],
            },
            "sequences": {
                "id": list(state.sequences),
                "request": [self._of_sequence[seq] for seq in state.sequences],
                "span": [NONE] * len(private),
                "ids": private,
                "opened": [self._lives.opened[seq] for seq in state.sequences],
                "again": [seq.resumed for seq in state.sequences.values()],
            },
            "freed": [],
            "fresh": self._checker.pool.high_water,
            "owners": [],
            "lookups": hits.lookup_blocks,
            "hits": hits.hit_blocks,
            "tiers": [
                {"used": tier.used, "ends": [], "parked": []}
                for tier in (state.tiers.levels.values() if state.tiers else ())
            ],
            "groups": groups,
        }

    def columns(self) -> dict[str, bytearray]:
        """Return the rows with the ids of their blocks, and numbers of the requests."""
        rows = len(self.rows["kind"])
        self._row_ends.extend([len(self._ids)] * (rows - len(self._row_ends)))
        del self._row_ends[rows:]
        self.rows["ends"] = self._row_ends
        self.rows["moved"] = self._ids[: self._row_ends[-1]]
        return super().columns()


def playback_of(file: str | os.PathLike[str], replica: int | str | None) -> type[Playback]:
    """Return the kind of playback of a trace: of cache groups if it has some."""
    header = next(iter(ServerReader(file, replica)), None)
    return GroupedPlayback if getattr(header, "cache_groups", None) else Playback
