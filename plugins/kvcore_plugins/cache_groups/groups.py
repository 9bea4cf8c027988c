"""A group of layers and a request in it: block tables, names of blocks, cached prefixes.

LayerGroup        what its layers keep of a sequence, and which blocks have passed
BlockNames        the names by which blocks of a request are found again
GroupMatch        the cached prefix of a request
GroupSequence     an open request, with a `Table` of blocks a group
GroupsBelow       the tiers below the pool
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import chain
from math import gcd, inf
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

import attrs

from kvcore.cache.layout import GENERATED, BlockLayout
from kvcore.cache.sequence import Sequence as CacheSequence
from kvcore.cache.tiers import LowerTiers
from kvcore.errors import InputError
from kvcore.request import Request
from kvcore_plugins.cache_groups.named_blocks import Name

GroupKind: TypeAlias = Literal["full", "window", "chunk", "state"]
"""What a group keeps of a sequence."""


@attrs.frozen
class LayerGroup:
    """Layers that keep the same of a sequence, with one table of blocks.

    Attributes:
        kind: `full`: K/V of all tokens; `window`: that of the last `window` tokens; `chunk`:
            that of those in the current one of chunks of `window` tokens; `state`: the state
            after the last token.
        block_size: tokens of a block; a state stands for all tokens up to the end of a block.
        window: tokens that a token attends to, itself included; None except for a `window`
            and a `chunk`.
        layers: number of layers.
        block_bytes: bytes of a block of it, where layers of the groups have pages of several
            sizes; None: blocks of groups have bytes as they have layers.

    Raises:
        InputError: an unknown kind, or numbers that do not belong to it.
    """

    kind: GroupKind
    block_size: int
    window: int | None = None
    layers: int = 1
    block_bytes: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check the fields."""
        problem = ""
        if self.kind not in get_args(GroupKind):
            problem = f"there are: {', '.join(get_args(GroupKind))}"
        elif any(type(n) is not int or n < 1 for n in (self.block_size, self.layers)):
            problem = "give whole tokens of a block and layers, 1 or more"
        elif (self.kind in ("window", "chunk")) != (self.window is not None):
            problem = "give a window or a chunk, and these alone, the tokens that it has"
        elif self.window is not None and (type(self.window) is not int or self.window <= 1):
            problem = "a window has 2 or more whole tokens"
        if problem:
            msg = f"{self}: {problem}"
            raise InputError(msg)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, without `block_bytes` of None."""
        fields = attrs.asdict(self)
        if self.block_bytes is None:
            del fields["block_bytes"]
        return fields

    @property
    def kept(self) -> int:
        """Number of last tokens that the next one needs wherever it is; not of `full`."""
        if self.window is None:
            return 1
        return self.window - 1 if self.kind == "window" else 0

    @property
    def needed(self) -> int:
        """Number of blocks before a position that a request needs to go on there; as `kept`."""
        return -(-self.kept // self.block_size)

    def passed(self, tokens: int) -> int:
        """Return how many first blocks no token after the first `tokens` needs."""
        if self.kind == "full":
            return 0
        if self.kind == "chunk" and self.window is not None:
            tokens -= tokens % self.window
        return max(0, tokens - self.kept) // self.block_size

    def passes_at(self, position: int) -> float:
        """Return after how many tokens no later one needs the block at `position`."""
        if self.kind == "full":
            return inf
        tokens = (position + 1) * self.block_size + self.kept
        if self.kind == "chunk" and self.window is not None:
            tokens = -(-tokens // self.window) * self.window
        return tokens

    def blocks_for(self, tokens: int) -> int:
        """Return the most blocks that a decoding request holds until it has `tokens` tokens.

        Of a state the last one is kept beside the one that is written.
        """
        blocks = self.most_blocks(tokens, 0)
        return min(blocks, 2) if self.kind == "state" else blocks

    def most_blocks(self, tokens: int, in_flight: int) -> int:
        """Return the most blocks that a sequence holds until it has `tokens` tokens.

        Of states that is all. `in_flight` tokens may be computed before passed ones leave.
        """
        blocks = -(-tokens // self.block_size)
        if self.window is None:
            return blocks
        # A window begins anywhere in its first block, a chunk where a multiple of it can be.
        step = gcd(self.window, self.block_size) if self.kind == "chunk" else 1
        return min(blocks, -(-(self.window + in_flight - step) // self.block_size) + 1)


class Table:
    """The blocks of a sequence in one group.

    Attributes:
        first: position of the first block of `blocks`; nothing before it is kept.
        blocks: the ids of the blocks from there on, or `NO_BLOCK`.
        stored: number of first positions whose blocks have a name, if they are to have one.
    """

    __slots__ = ("blocks", "first", "stored")

    def __init__(self, first: int, blocks: list[int], stored: int) -> None:
        self.first = first
        self.blocks = blocks
        self.stored = stored

    @property
    def end(self) -> int:
        """The position after the last block."""
        return self.first + len(self.blocks)


_BATCH: Final = 64
"""Names of blocks that a walk makes at once."""


class BlockNames:
    """The names of the blocks of a request, for one size of blocks.

    Attributes:
        keys: the keys of the workload, as in `PromptBlocks`.
        keyed: number of first blocks with one of these keys.
        end: number of first blocks with a name; those beyond `keyed` are generated ones, which
            only the same request can hit.
        shared: number of first blocks that others can hit once they are full.
    """

    __slots__ = ("_numbered", "_ratio", "_request", "end", "keyed", "keys", "shared")

    def __init__(self, layout: BlockLayout, request: Request) -> None:
        keys, _, _, cacheable, _, _ = layout.lay_out(request)
        self.keys: Sequence[Any] = keys
        self._ratio = layout.ratio
        self._request = request.id
        # The name of a block whose key is a number is one too: it is found faster than a pair.
        self._numbered = self._ratio > 1 and all(type(key) is int for key in keys)
        self.keyed = self.end = self.shared = cacheable
        share = request.hints.share
        if share is not None:
            self.shared = min(cacheable, share // layout.block_size)

    def __getitem__(self, position: int) -> Name:
        """Return the name of the block at `position`, below `end`."""
        if position >= self.keyed:
            return GENERATED, self._request, position
        key, ratio = self.keys[position // self._ratio], self._ratio
        if ratio == 1:
            return key
        return key * ratio + position % ratio if type(key) is int else (key, position)

    def at(self, positions: Sequence[int]) -> list[Name]:
        """Return the names of the blocks at `positions`, in ascending order, below `end`."""
        keys, ratio = self.keys, self._ratio
        if positions and positions[-1] < self.keyed:
            if ratio == 1:
                return [keys[position] for position in positions]
            if self._numbered and type(positions) is range:
                first, end = positions[0], positions[-1] + 1
                names = (
                    range(key * ratio, (key + 1) * ratio)
                    for key in keys[first // ratio : -(-end // ratio)]
                )
                skipped = first // ratio * ratio
                return list(chain.from_iterable(names))[first - skipped : end - skipped]
        return [self[position] for position in positions]

    def walk(self, start: int, end: int, step: int = 1) -> Iterator[tuple[int, Name]]:
        """Yield positions in `[start, end)` and their names, the last first if `step` is -1."""
        for first in range(start, end, _BATCH)[::step]:
            positions = range(first, min(first + _BATCH, end))
            yield from zip(positions[::step], self.at(positions)[::step], strict=True)


class GroupMatch(NamedTuple):
    """The cached prefix of a request.

    Attributes:
        tokens: its length, which all groups can serve.
        junction: the longest prefix that a single group has, if that is longer; else 0. Others
            share it, and a group has not kept what is needed to resume at its end.
        blocks: for each group the cached blocks that the request needs, up to its end.
        boundaries: the lengths at which windows and states of the request are kept.
    """

    tokens: int
    junction: int
    blocks: tuple[list[int], ...]
    boundaries: tuple[int, ...]


class GroupSequence(CacheSequence):
    """The block tables of an open request: one a group. It has no spans.

    Attributes:
        tables: its blocks, by group.
        names: the names of its blocks, by their size.
        boundaries: those of its `GroupMatch`.
        settled: tokens that it had before its last `grow`.
        committed_at: the time (ns) of its last commit.
        fresh: the states that have a name and that it has not computed yet, by group and name.
        planned: tokens after the last step whose plan has given its blocks names.
        room: tokens for which it has blocks in all groups.
        fills_at: number of tokens that fill the next block that can get a name.
        passes_at: number of tokens after which the next block is passed in a group.
    """

    __slots__ = (
        "boundaries", "committed_at", "fills_at", "fresh", "names", "passes_at", "planned",
        "room", "settled", "tables",
    )  # fmt: skip

    tables: list[Table]
    names: dict[int, BlockNames]
    boundaries: tuple[int, ...]
    settled: int
    committed_at: int | None
    fresh: list[tuple[int, Name]]
    planned: int
    room: int
    fills_at: float
    passes_at: float


class GroupsBelow(LowerTiers, Protocol):
    """The tiers below a pool of groups, and what the cache calls of them.

    Attributes:
        anywhere: by group, the names of the blocks that are in the pool or can be loaded.
    """

    anywhere: list[Container[Name]]

    def store(self, seq: GroupSequence, group: int, positions: list[int], now: int) -> None:
        """Called when blocks of `seq` got names in the pool."""

    def hit(self, blocks: Sequence[list[int]], now: int) -> None:
        """Called when an admission hits these blocks of the pool, by group."""

    def leave(self, victims: list[int], now: int) -> None:
        """Called before blocks leave the pool, in this order."""


def name_generated(names: dict[int, BlockNames], request: Request, tokens: int) -> None:
    """Give names to the blocks of the first `tokens` tokens that `request` has generated.

    Not if the workload has keys for its output, or lacks some of its prompt, or if a hint
    limits the blocks that others can hit.
    """
    if request.publishes or request.hints.share is not None:
        return
    for size, own in names.items():
        if own.keyed == request.prompt_tokens // size:
            own.end = own.shared = max(own.end, tokens // size)
