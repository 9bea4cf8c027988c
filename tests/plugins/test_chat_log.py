"""Logs of chat APIs: the ends of blocks, their breakpoints, and rows that are refused."""

from __future__ import annotations

import pytest
from helpers.rows import write_rows

from kvcore.errors import InputError
from kvcore_plugins.workload import Chat

HOUR = 3600 * 10**9
TEXT = {"type": "text", "text": "What is a yawl? And a ketch?"}
MARK = {"type": "ephemeral"}
ANTHROPIC = {
    "model": "m",
    "system": [TEXT | {"cache_control": MARK | {"ttl": "1h"}}],
    "tools": [{"name": "look", "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "A boat."},
                TEXT | {"cache_control": MARK},
            ],
        },
    ],
}


@pytest.fixture
def read(tmp_path):
    """Return a function that reads rows as a chat workload of bytes, in keys of one token."""

    def read(*rows, **options):
        path = tmp_path / "log.jsonl"
        write_rows(path, *rows)
        return list(Chat(path, **{"key_tokens": 1, "tokens": "bytes"} | options))

    return read


def test_content_blocks_are_parts(read):
    """Tools, system and content blocks are parts in order, with ends and breakpoints."""
    (request,) = read({"request": ANTHROPIC, "response": {"content": [TEXT]}})
    assert [(part.label, part.ttl_ns) for part in request.parts] == [
        ("tools[0]", 0),
        ("system[0]", HOUR),
        ("messages[0]", None),
        ("messages[1].content[0]", None),
        ("messages[2].content[0]", None),
        ("messages[2].content[1]", 0),
    ]
    ends = [part.end for part in request.parts]
    assert ends == sorted(ends)
    assert ends[0] == len('[{"name":"look"}]')
    assert ends[1] - ends[0] == len(f"system\n{TEXT['text']}\n")
    assert ends[-1] == request.prompt_tokens - len("assistant\n")
    assert (request.explicit, request.salt) == (True, "m")
    assert request.output_tokens == len(TEXT["text"])


def test_an_answer_at_the_end_of_the_messages_is_no_part(read):
    """With `usage` beside them, messages that end with the answer have parts of the others."""
    question = {"role": "user", "content": "Look it up."}
    answer = {"role": "assistant", "content": "A boat."}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    (whole,) = read({"messages": [question, answer], "usage": usage})
    (apart,) = read(
        {"messages": [question], "usage": usage, "answer": "A boat."}, answer="answer"
    )
    assert [part.label for part in whole.parts] == ["messages[0]"]
    assert whole == apart


def test_equal_sentences_have_equal_hashes(read):
    """Equal sentences have equal hashes in different prompts; the last ends with its part."""
    one, other = read(
        *(
            {"messages": [{"role": "user", "content": f"{n} is it. What is a yawl?"}]}
            for n in "12"
        )
    )
    (a, b), (c, d) = ([hash_ for hash_, _ in each.parts[0].pieces][1:] for each in (one, other))
    assert a != c
    assert b == d
    assert one.parts[0].pieces[-1][1] == one.parts[0].end


def test_automatic_breakpoints_are_at_the_end(read):
    """A breakpoint beside the messages is at their end, one in a message is at its end."""
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    marked = {"messages": [chat["messages"][0] | {"cache_control": MARK}, chat["messages"][1]]}
    end, first = read(chat | {"cache_control": MARK}, marked)
    assert [part.ttl_ns for part in end.parts] == [None, 0]
    assert [part.ttl_ns for part in first.parts] == [0, None]
    assert end.explicit


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (
            {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}},
            "usage",
        ),
        ({"usage": {"prompt_tokens": "5"}}, "usage.prompt_tokens"),
        ({"cache_control": {"ttl": "2h"}}, "cache_control"),
        ({"cache_control": MARK | {"ttl": ["1h"]}}, "cache_control"),
        ({"cache_control": MARK | {"ttl": {"of": "1h"}}}, "cache_control"),
        ({"cache_control": {"type": "bogus"}}, "cache_control"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "content[0]"),
    ],
)
def test_wrong_rows_are_refused(read, row, field):
    """A malformed row is refused, and the error names the field."""
    with pytest.raises(InputError, match=rf"field '{field}'".replace("[", r"\[")):
        read({"messages": [{"role": "user", "content": "a"}], **row})
