"""Logs of chat APIs: the ends of blocks, their breakpoints, and the reported usage."""

from __future__ import annotations

import json

import pytest

from kvcore.errors import InputError
from kvcore_plugins.workload import Chat
from kvcore_plugins.workload.logged import LoggedRequest
from kvcore_plugins.workload.usage import Usage
from kvcore_replay.billing import bill

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
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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


def test_breakpoints_change_no_keys_and_digests(read):
    """Breakpoints change neither the keys of a prompt nor the digests of its parts."""
    bare = json.loads(json.dumps(ANTHROPIC).replace("cache_control", "x-mark"))
    for tool in bare["tools"]:
        tool.pop("x-mark")
    one, other = read({"request": ANTHROPIC}, {"request": bare})
    assert one.keys == other.keys
    assert [part.digest for part in one.parts] == [part.digest for part in other.parts]
    assert [part.ttl_ns for part in other.parts] == [None] * 6


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
    ("usage", "expected", "explicit"),
    [
        (
            {
                "prompt_tokens": 2006,
                "completion_tokens": 300,
                "prompt_tokens_details": {"cached_tokens": 1920},
            },
            Usage(86, 1920, 0, 0, 300),
            False,
        ),
        (
            {
                "input_tokens": 50,
                "input_tokens_details": {"cached_tokens": 40},
                "output_tokens": 3,
            },
            Usage(10, 40, 0, 0, 3),
            False,
        ),
        (
            {
                "input_tokens": 21,
                "cache_creation_input_tokens": 100,
                "cache_read_input_tokens": 50,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": 70,
                    "ephemeral_1h_input_tokens": 30,
                },
                "output_tokens": 9,
            },
            Usage(21, 50, 70, 30, 9),
            True,
        ),
        (
            {"prompt_tokens": 90, "prompt_cache_hit_tokens": 64, "completion_tokens": 1},
            Usage(26, 64, 0, 0, 1),
            False,
        ),
        ({"completion_tokens": 5}, None, False),
        (None, None, False),
    ],
)
def test_usage_of_each_api_is_read(read, usage, expected, explicit):
    """Usage is read as chat completions, responses, messages and DeepSeek report it.

    Without a usage, or without its prompt tokens, it is None.
    """
    chat = {"messages": [{"role": "user", "content": "a"}]}
    (request,) = read({"request": chat, "response": {"choices": [], "usage": usage}})
    assert (request.usage, request.explicit) == (expected, explicit)
    if expected is not None:
        assert request.output_tokens == expected.output_tokens


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (
            {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}},
            "usage",
        ),
        ({"usage": {"prompt_tokens": "5"}}, "usage.prompt_tokens"),
        ({"cache_control": {"ttl": "2h"}}, "cache_control"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "content[0]"),
    ],
)
def test_wrong_rows_are_refused(read, row, field):
    """A malformed row is refused, and the error names the field."""
    with pytest.raises(InputError, match=rf"field '{field}'".replace("[", r"\[")):
        read({"messages": [{"role": "user", "content": "a"}], **row})


def test_models_have_different_keys(read):
    """Equal prompts to different models have different keys."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    one, other, same = read(*(chat | {"model": name} for name in "xyx"))
    assert one.keys != other.keys
    assert one.keys == same.keys


def test_only_logged_requests_have_parts(read):
    """A recorded conversation gives plain requests: it is no log of what an API was sent."""
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    (request,) = read({"messages": turns})
    assert not isinstance(request, LoggedRequest)


def test_a_log_is_billed_as_reported(read):
    """The bills of a log use the token counts that it reports, not those of its text."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 400}}
    found = bill(read({**chat, "usage": usage, "choices": []}), "input=4,cached=1")
    assert found.reported.usd == pytest.approx((600 * 4 + 400) / 1e6)
    assert found.uncached.prompt_tokens == 1000
