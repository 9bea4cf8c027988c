"""What a cache refuses to do with a sequence, and what it says then."""

from __future__ import annotations

from typing import NoReturn

from kvcore.cache.sequence import Sequence
from kvcore.errors import InputError


def refuse_stranger(seq: Sequence) -> NoReturn:
    """Refuse a sequence that is closed, or open in another cache."""
    why = "not of this cache" if seq.is_open else "closed"
    msg = f"sequence {seq.id} (request {seq.request.id}) is {why}"
    raise InputError(msg)


def refuse_commit(seq: Sequence, tokens: int) -> NoReturn:
    """Refuse a commit of more tokens than are allocated, or of fewer than none."""
    msg = (
        f"commit of {tokens} tokens to sequence {seq.id}: {seq.computed} of its "
        f"{seq.tokens} allocated tokens are committed; give 0 to "
        f"{seq.tokens - seq.computed}"
    )
    raise InputError(msg)


def check_fork(seq: Sequence, block_size: int) -> None:
    """Refuse a fork of tokens that are not computed, beyond the prompt.

    Raises:
        InputError: the two would compute different tokens in the same place.
    """
    known = max(seq.request.prompt_tokens, seq.cacheable * block_size)
    if seq.computed < seq.tokens and known < seq.tokens:
        msg = (
            f"fork of sequence {seq.id}: {seq.tokens - seq.computed} allocated tokens are "
            "not committed; commit them or roll them back first"
        )
        raise InputError(msg)


def check_rollback(seq: Sequence, tokens: int, block_size: int) -> None:
    """Refuse to drop tokens that are shared, or more than there are since a gap.

    Raises:
        InputError: says how many tokens stay.
    """
    left = seq.tokens - tokens
    fixed = max(seq.span.end, seq.gaps[-1][1] if seq.gaps else 0) * block_size
    if tokens and not fixed <= left <= seq.tokens:
        msg = (
            f"rollback of {tokens} tokens of sequence {seq.id}: it has {seq.tokens}, of "
            f"which the first {fixed} are shared or forgotten, and stay"
        )
        raise InputError(msg)
