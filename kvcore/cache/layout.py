"""The layout of prompts in blocks: two accountings, and keys coarser or finer than blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

from kvcore.errors import InputError
from kvcore.request import Key, KeyPrefix, Request

ACCOUNTINGS = ("keys", "tokens")

GENERATED: Final = "generated"
"""The first element of the name of a generated block for which the workload has no key."""


class PromptBlocks(NamedTuple):
    """A prompt in blocks.

    Attributes:
        keys: the key of block j is `keys[j // ratio]`.
        tokens: length of the prompt.
        blocks: blocks that it occupies.
        cacheable: its first blocks that may be shared; those of its output, if it has keys,
            too.
        lookup: blocks that are looked up, the denominator of a hit ratio.
        limit: the maximum of blocks that can hit.
    """

    keys: Sequence[Key]
    tokens: int
    blocks: int
    cacheable: int
    lookup: int
    limit: int


class BlockLayout:
    """Lays requests out in blocks; one object for a cache and all its spans.

    With `ratio` = blocks per key, the key of block j is `keys[j // ratio]`. When a block
    is m keys (`tokens` accounting only) its key is that of its last part,
    `keys[(j + 1) * m - 1]`, and `ratio` is 1::

        keys      |   a   |   b   |        | a | b | c | d |
        blocks    | 0 | 1 | 2 | 3 |        |   0   |   1   |
        by key      a   a   b   b              b       d
                     ratio = 2                   m = 2

    * `keys`: every key is a unit of `ratio` blocks, lengths are ignored, and a full match
      is a full hit.
    * `tokens`: a prompt of L tokens has ceil(L / b) blocks; the first L // b of them that
      have a key are cacheable; at most (L - 1) // b hit, since the last token is always
      computed. Of a preempted request L includes the output so far, while at most its
      cacheable blocks hit.

    Args:
        accounting: `keys` or `tokens`.
        block_size: tokens in a block.
        key_tokens: tokens that a key stands for; None: the first request decides.
        recompute: seconds to compute n tokens after a context of c tokens; None:
            Llama-3.1-8B on an H100.

    Attributes:
        accounting, block_size: the arguments.
        key_tokens: tokens that a key stands for; `block_size` until the first request
            decides.
        ratio: blocks per key.
        reload_seconds: seconds to load a block from the nearest tier, in a load of many;
            infinite without a tier. Set by `Tiers`.
        shares_output: whether blocks of an output with keys may be shared.

    Raises:
        InputError: an unknown accounting, or block and key sizes that do not fit.
    """

    def __init__(
        self,
        accounting: str,
        block_size: int,
        key_tokens: int | None = None,
        recompute: Callable[[int, int], float] | None = None,
    ) -> None:
        if accounting not in ACCOUNTINGS:
            msg = f"accounting {accounting!r} is not known; there are: {', '.join(ACCOUNTINGS)}"
            raise InputError(msg)
        self.accounting = accounting
        self.block_size: int = block_size
        self.reload_seconds = inf
        self.shares_output = True
        self._counts_keys = accounting == "keys"
        self._recompute = recompute
        self.set_key_tokens(block_size if key_tokens is None else key_tokens)
        self._in_header = self.key_tokens  # what the header of a trace says
        self._expected: int | None = key_tokens  # of a request; None: the first one decides

    def set_key_tokens(self, key_tokens: int) -> None:
        """Set the number of tokens that a key stands for.

        Raises:
            InputError: neither it nor the block size divides the other, or one is below 1.
        """
        block_size = self.block_size
        if not all(type(size) is int and size > 0 for size in (block_size, key_tokens)):
            msg = (
                f"block size {block_size!r} and key size {key_tokens!r} must be whole numbers "
                "above 0"
            )
            raise InputError(msg)
        if key_tokens % block_size and block_size % key_tokens:
            msg = (
                f"block size {block_size} and the workload's keys of {key_tokens} tokens "
                "do not fit: one must divide the other"
            )
            raise InputError(msg)
        if self._counts_keys and block_size > key_tokens:
            msg = (
                f"block size {block_size} is larger than the workload's keys of "
                f"{key_tokens} tokens; in `keys` accounting it must divide them"
            )
            raise InputError(msg)
        self.key_tokens = key_tokens
        self.ratio = max(1, key_tokens // block_size)
        self._stride = max(1, block_size // key_tokens)  # keys per block
        self._expected = key_tokens

    def prompt(self, request: Request, target: int | None = None) -> PromptBlocks:
        """Return the prompt of `request` in blocks. O(1), or O(keys) if a block has several.

        `target` is the number of tokens to compute before the next one is generated: the
        prompt and, after a preemption, the output so far. None: the prompt.

        Raises:
            InputError: a key stands for another number of tokens; or there are output keys,
                and keys of the prompt before them are missing.
        """
        return PromptBlocks(*self.lay_out(request, target))

    def lay_out(
        self, request: Request, target: int | None = None
    ) -> tuple[Sequence[Key], int, int, int, int, int]:
        """Return the fields of `prompt` as a plain tuple, at half the cost."""
        if request.key_tokens != self._expected:
            self.check_key_tokens(request)
        size = self.block_size
        keys = request.keys
        if type(keys) is KeyPrefix:
            keys = keys.view
        if self._counts_keys:
            blocks = len(keys) * self.ratio
            return keys, blocks * size, blocks, blocks, blocks, blocks
        tokens = request.prompt_tokens
        lookup = tokens // size
        publishes = request.publish or request.output_keys  # `publishes`, without its call
        if publishes:
            keys = self._with_output(request)
        if self._stride > 1:
            keys = keys[self._stride - 1 :: self._stride]
        keyed = len(keys) * self.ratio
        blocks = -(-tokens // size)
        if publishes and self.shares_output:
            cacheable = keyed
        elif keyed < lookup:
            cacheable = lookup = keyed
        else:
            cacheable = lookup
        # The last token is computed; an empty prompt has none.
        limit = ((tokens if target is None else target) - 1) // size if tokens else 0
        limit = limit if limit < cacheable else cacheable
        return keys, tokens, blocks, cacheable, lookup, limit

    def generated_keys(self, request: Request, first: int, end: int) -> list[Key]:
        """Return the keys of a prompt's blocks, and names for the generated ones up to `end`.

        The blocks from position `first` on are generated, at least in part. A name contains
        the id of the request, so no other request hits the block. O(keys).
        """
        prompt_keys = first // self.ratio
        keys = request.keys[self._stride - 1 :: self._stride][:prompt_keys]
        return [*keys, *self.generated_names(request, prompt_keys, end)]

    def generated_names(self, request: Request, first_key: int, end: int) -> Iterator[Key]:
        """Yield names in place of the keys from `first_key` on, for the blocks up to `end`."""
        keys = range(first_key, -(-end // self.ratio))
        return ((GENERATED, request.id, index) for index in keys)

    def recompute_seconds(self, context: int, tokens: int) -> float:
        """Return the seconds it takes to compute `tokens` tokens after `context` others."""
        if self._recompute is None:
            from kvcore.models.cost import default_prefill_cost  # noqa: PLC0415  (a long table)

            self._recompute = default_prefill_cost()
        return self._recompute(context, tokens)

    def check_key_tokens(self, request: Request) -> None:
        """Check the `key_tokens` of `request`; the first request sets those of the layout.

        Raises:
            InputError: the two differ, or the block size does not fit.
        """
        if self._expected is None:
            self.set_key_tokens(request.key_tokens)
        elif request.key_tokens != self._expected:
            msg = (
                f"request {request.id} has keys of {request.key_tokens} tokens; "
                f"this cache was made with key_tokens={self.key_tokens}"
            )
            raise InputError(msg)

    def takes_key_tokens(self, request: Request) -> bool:
        """Return True if the header of a trace has to say the `key_tokens` of `request`.

        Raises:
            InputError: as `check_key_tokens` does.
        """
        self.check_key_tokens(request)
        said, self._in_header = self._in_header, request.key_tokens
        return said != request.key_tokens

    def block_keys(self, request: Request, keys: Sequence[Key], first: int) -> Sequence[Key]:
        """Return those of the output `keys` that blocks go by; `first` others precede them."""
        first += request.prompt_tokens // self.key_tokens
        # Of all keys a block goes by every `_stride`-th one, from that at `_stride` - 1 on.
        return keys[-(first + 1) % self._stride :: self._stride]

    def _with_output(self, request: Request) -> Sequence[Key]:
        """Return the keys of the prompt that are full of tokens, and those of the output."""
        prompt_keys = request.prompt_tokens // self.key_tokens
        if len(request.keys) < prompt_keys:
            msg = (
                f"request {request.id} has output keys, but only {len(request.keys)} of "
                f"{prompt_keys} keys of its prompt, which come before them"
            )
            raise InputError(msg)
        return [*request.keys[:prompt_keys], *request.output_keys]


def common_prefix(
    one: Sequence[Key], other: Sequence[Key], start: int, end: int, ratio: int
) -> int:
    """Return the position, at most `end`, up to which two paths have equal keys.

    The paths are equal up to and including the key at block position `start`, and a key
    stands for `ratio` blocks. Keys are chained, so equal keys mean equal paths before them,
    and bisection finds the first difference: O(log keys).
    """
    low, high = start // ratio, (end - 1) // ratio
    if high <= low or one[high] == other[high]:
        return end
    while high - low > 1:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle
        else:
            high = middle
    return high * ratio
