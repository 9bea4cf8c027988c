"""Chats share the keys of the tokens that they have in common, and no others."""

from itertools import takewhile

from helpers.rows import write_rows
from hypothesis import given
from hypothesis import strategies as st

from kvcore_plugins.workload import Chat

MESSAGE = st.tuples(
    st.sampled_from(["system", "user", "assistant"]), st.text("ab\n", max_size=9)
)
CHAT = st.lists(MESSAGE, min_size=1, max_size=5)


def written(messages):
    """Return the text whose bytes are the tokens of a prompt of these messages."""
    texts = [f"{role}\n{text}\n" for role, text in [*messages, ("user", "?")]]
    return "".join([*texts, "assistant\n"])


@given(chats=st.lists(CHAT, min_size=2, max_size=4), size=st.integers(1, 8), shared=CHAT)
def test_a_shared_prefix_of_whole_blocks_shares_its_keys(tmp_path_factory, chats, size, shared):
    """Two prompts share the keys of their common whole blocks, and no key after them."""
    chats = [*chats, *(shared + chat for chat in chats)]
    path = tmp_path_factory.mktemp("chats") / "c.jsonl"
    rows = (
        {"messages": [{"role": role, "content": text} for role, text in [*chat, ("user", "?")]]}
        for chat in chats
    )
    write_rows(path, *rows)
    requests = list(Chat(path, tokens="bytes", key_tokens=size))
    for one, chat in zip(requests, chats, strict=True):
        assert one.prompt_tokens == len(written(chat))
        for other, its in zip(requests, chats, strict=True):
            pairs = zip(written(chat), written(its), strict=False)
            blocks = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // size
            assert one.keys[:blocks] == other.keys[:blocks]
            assert not set(one.keys[blocks:]) & set(other.keys[blocks:])
