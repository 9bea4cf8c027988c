"""How a prompt lies in blocks: the two countings, and keys coarser or finer than blocks."""

from __future__ import annotations

from collections.abc import Sequence as Keys
from typing import TypeAlias

from kvcore.errors import InputError
from kvcore.request import DEFAULT_PRIORITY, Key, Request

COUNTINGS = ("keys", "tokens")


Prompt: TypeAlias = tuple[Keys[Key], int, int, int, int, int]
"""(keys, tokens, blocks, cacheable blocks, lookup blocks, hit limit in blocks)."""


class Geometry:
    """Lays requests out in blocks.

    With `ratio` = blocks per key, the key of block j is `keys[j // ratio]`. When a block
    is m keys (`tokens` counting only) its key is that of its last part,
    `keys[(j + 1) * m - 1]`, and `ratio` is 1.

    * `keys`: every key is a unit of `ratio` blocks, lengths are ignored, and a full match
      is a full hit.
    * `tokens`: a prompt of L tokens has ceil(L / b) blocks; the first L // b of them that
      have a key are cacheable; at most (L - 1) // b hit, since the last token is always
      computed.

    Raises:
        InputError: an unknown counting, or block and key sizes that do not fit.
    """

    __slots__ = ("_stride", "_unit", "block_size", "count", "key_tokens", "ratio")

    def __init__(self, count: str, block_size: int, key_tokens: int | None = None) -> None:
        """Take the counting, a block's tokens and a key's tokens (None: a block's)."""
        key_tokens = block_size if key_tokens is None else key_tokens
        if count not in COUNTINGS:
            msg = f"counting {count!r} is not known; there are: {', '.join(COUNTINGS)}"
            raise InputError(msg)
        if block_size < 1 or key_tokens < 1:
            msg = f"block size {block_size} and key size {key_tokens} must be positive"
            raise InputError(msg)
        ratio, rest = divmod(key_tokens, block_size)
        stride = 1
        if rest or not ratio:
            ratio = 1
            stride, rest = divmod(block_size, key_tokens)
            if rest:
                msg = (
                    f"block size {block_size} and the workload's keys of {key_tokens} tokens "
                    "do not fit: one must divide the other"
                )
                raise InputError(msg)
            if count == "keys":
                msg = (
                    f"block size {block_size} is larger than the workload's keys of "
                    f"{key_tokens} tokens; in `keys` counting it must divide them"
                )
                raise InputError(msg)
        self.count = count
        self.block_size = block_size
        self.key_tokens = key_tokens
        self.ratio = ratio
        self._stride = stride
        self._unit = count == "keys"

    def prompt(self, request: Request) -> Prompt:
        """Lay `request` out. O(1), or O(keys) where a block is several keys.

        Raises:
            InputError: its keys stand for another number of tokens, or its output keys
                have no prompt keys to follow.
        """
        if request.key_tokens != self.key_tokens:
            msg = (
                f"request {request.id} has keys of {request.key_tokens} tokens; "
                f"this cache was made with key_tokens={self.key_tokens}"
            )
            raise InputError(msg)
        size = self.block_size
        keys = request.keys
        if self._unit:
            blocks = len(keys) * self.ratio
            return keys, blocks * size, blocks, blocks, blocks, blocks
        length = request.prompt_tokens
        full = length // size
        if request.publishes:
            keys = self._with_output(request)
        if self._stride > 1:
            keys = keys[self._stride - 1 :: self._stride]
        keyed = len(keys) * self.ratio
        blocks = -(-length // size)
        if request.publishes:
            cacheable = keyed
        elif keyed < full:
            cacheable = full = keyed
        else:
            cacheable = full
        limit = (length - 1) // size if length else 0
        return keys, length, blocks, cacheable, full, limit if limit < full else full

    def _with_output(self, request: Request) -> Keys[Key]:
        """Return the keys of the prompt's full key blocks and of what follows them."""
        whole = request.prompt_tokens // self.key_tokens
        if len(request.keys) < whole:
            msg = (
                f"request {request.id} has output keys, but only {len(request.keys)} of "
                f"{whole} keys of its prompt, which come before them"
            )
            raise InputError(msg)
        return [*request.keys[:whole], *request.output_keys]


def retention_steps(request: Request, block_size: int) -> list[tuple[int, int, int | None]]:
    """Return the retention hints of `request` by block: (end, priority, duration ns).

    Steps cover positions from 0 on without gaps; after the last step the default
    priority holds. A block gets the highest priority of the hints that touch it.
    """
    length = -(
        -max(request.prompt_tokens, len(request.keys) * request.key_tokens) // block_size
    )
    ranges = [
        (
            hint.start // block_size,
            length if hint.end is None else -(-hint.end // block_size),
            hint.priority,
            hint.duration,
        )
        for hint in request.retention
    ]
    borders = sorted({border for start, end, _, _ in ranges for border in (start, end)} - {0})
    steps: list[tuple[int, int, int | None]] = []
    begin = 0
    for border in borders:
        hints = [(p, d) for start, end, p, d in ranges if start <= begin < end]
        priority, duration = max(
            hints,
            key=lambda hint: (hint[0], hint[1] is None, hint[1] or 0),
            default=(DEFAULT_PRIORITY, None),
        )
        steps.append((border, priority, duration))
        begin = border
    return steps
