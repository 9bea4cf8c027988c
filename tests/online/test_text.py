"""The text of an answer as it is made of tokens: whole characters, and stop texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'kvcore[serve]'")

from kvcore_online.server import MOST_HELD, Text


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=1),
)
def test_no_more_is_held_back_than_may_be_a_stop_text(parts, stop):
    """A text is passed on up to the longest beginning of a stop text with which it ends."""
    text = Text(lambda ids: "".join(map(chr, ids)), tuple(stop))
    whole = made = ""
    for part in parts:
        whole += part
        made += text.add(list(map(ord, part)))
        if stop and stop[0] in whole:
            assert text.stopped
            assert made == whole[: whole.index(stop[0])]
            return
        begun = [n for word in stop for n in range(len(word)) if whole.endswith(word[:n])]
        assert made == whole[: len(whole) - max(begun, default=0)]
        assert not text.stopped
    assert made + text.add([], last=True) == whole


def test_some_tokens_are_held_back_for_the_end_of_a_character():
    """As many tokens as the limit are held back, and all are text with a further one."""
    text = Text(lambda ids: bytes(ids).decode(errors="replace"))
    made = [text.add([0xFF]) for _ in range(MOST_HELD + 1)]
    assert made == [""] * MOST_HELD + ["\N{REPLACEMENT CHARACTER}" * (MOST_HELD + 1)]


def test_bytes_that_are_no_characters_are_text_in_the_end():
    """Bytes that make no character are passed on after some tokens, and decoded no more."""
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    text = Text(decode)
    made = "".join(text.add([0xFF]) for _ in range(1_000))
    assert made + text.add([], last=True) == "\N{REPLACEMENT CHARACTER}" * 1_000
    assert longest <= 2 * (MOST_HELD + 1)
