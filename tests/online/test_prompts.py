"""The calls that `kvcore route` passes on, and the requests that its router gets for them."""

import json

import orjson
import pytest

from kvcore.errors import InputError
from kvcore.request import Request, block_keys
from kvcore.untrusted import LONGEST_SESSION
from kvcore_online import prompts
from kvcore_online.prompts import ASKED_OUTPUT, Call

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def read(body):
    """Return the call of a body: of a chat if it has messages."""
    return Call.read(CHATS if "messages" in body else COMPLETIONS, json.dumps(body).encode())


def request(body, session=None, tokens=None):
    """Return the request of a body, in blocks of 4 tokens or 8 bytes."""
    options = {"tokens": tokens, "key_tokens": 4, "key_chars": 8}
    return read(body).request(session, **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            (COMPLETIONS, body)
            for body in ("{", "[]", "{}", '{"prompt": 5}', '{"messages": []}')
        ),
        *((CHATS, body) for body in ('{"messages": "hi"}', '{"prompt": "a"}')),
    ],
)
def test_a_body_without_a_prompt_is_refused(path, body):
    """A body must be a JSON object with a prompt, or with a list of messages for a chat."""
    with pytest.raises(InputError, match="the body"):
        Call.read(path, body.encode())


def test_a_body_is_passed_on_as_it_came_unless_its_usage_is_needed():
    """A stream is asked for its usage where it is counted; all else of the body stays."""
    usage = {"include_usage": True}
    for more in ({}, {"stream_options": {"a": 1}}, {"stream_options": 5}):
        body = {"prompt": "a", "stream": True, **more}
        call = read(body)
        assert (call.stream, call.counted) == (True, False)
        assert call.sent(count=False).body == call.raw
        kept = (
            more.get("stream_options") if isinstance(more.get("stream_options"), dict) else {}
        )
        expected = body | {"stream_options": {**(kept or {}), **usage}}
        assert orjson.loads(call.sent(count=True).body) == expected
    call = read({"prompt": "a", "stream": True, "stream_options": usage})
    assert call.counted
    assert call.sent(count=True).body == call.raw
    for stream in (False, None, 1):
        call = read({"prompt": "a", "stream": stream})
        assert not call.stream
        assert call.sent(count=True).body == call.raw


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({}, ASKED_OUTPUT),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 0}, 5),
        ({"max_tokens": True}, ASKED_OUTPUT),
        ({"max_tokens": "5"}, ASKED_OUTPUT),
        ({"max_tokens": 2**40}, 2**20),
    ],
)
def test_the_output_of_a_call_is_what_it_asks_for(fields, output):
    """The output is at most what a client asks for, if that is a number above 0."""
    assert read({"prompt": "a", **fields}).most_output == output


def test_token_ids_of_a_client_are_those_of_the_prompt():
    """A prompt of token ids needs no tokenizer; texts and several prompts do."""
    for prompt in ([1, 2], [[1, 2]]):
        assert read({"prompt": prompt}).tokens == [1, 2]
    for prompt in ([], [True], [1, "a"], ["a"], [None], [[1], [2]], "a"):
        assert read({"prompt": prompt}).tokens is None
    body = {"prompt": "a", "model": "m", "tools": [], "stream": True}
    for prompt in ("a", ["a"]):
        question = read(body | {"prompt": prompt}).question
        assert question == {"prompt": "a", "model": "m", "tools": []}


def test_a_server_is_asked_with_all_that_its_chat_template_reads():
    """A chat that thinks or not, or goes on with its last message, has other tokens."""
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "b",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert read(body | {"stream": True, "documents": None}).question == body


def test_a_prompt_alone_in_a_list_is_that_prompt():
    """A list of one prompt has the keys and the length of it, as servers read it."""
    for prompt in ("a" * 16, [*range(9)]):
        one, listed = (
            request({"prompt": each}, tokens=read({"prompt": each}).tokens)
            for each in (prompt, [prompt])
        )
        assert (listed.keys, listed.prompt_tokens) == (one.keys, one.prompt_tokens)


def test_a_prompt_beside_the_messages_of_a_chat_is_none():
    """A chat has the keys of its messages, whatever else is in the body."""
    body = {"messages": [{"content": "a" * 40}]}
    for prompt in ([1, 2], "b" * 40):
        call = read(body | {"prompt": prompt})
        assert (call.tokens, call.question) == (None, body)
        assert request(body | {"prompt": prompt}).keys == request(body).keys


def test_the_session_is_that_of_the_header_or_of_the_body():
    """A header goes before the key of the prompt cache, and that before the user."""
    body = {"prompt": "a", "user": "u", "prompt_cache_key": "p"}
    assert request(body, "h").session == "h"
    assert request(body).session == "p"
    for key in ("", 5, None):
        assert request(body | {"prompt_cache_key": key}).session == "u"
    assert request({"prompt": "a"}, "").session is None
    assert request(body, "h" * 500).session == "h" * LONGEST_SESSION


def test_keys_of_tokens_are_those_of_any_other_request(monkeypatch):
    """The keys of token ids depend on them and on the salt alone, up to a number of blocks."""
    tokens = [*range(11)]
    made = request({"prompt": "a", "cache_salt": "s"}, tokens=tokens)
    assert type(made) is Request  # without the ids, which take much memory
    assert (made.id, made.arrival, made.salt, made.prompt_tokens) == (0, 0, "s", 11)
    assert made.keys == block_keys(tokens, 4, salt="s")
    assert request({"prompt": "a", "cache_salt": 5}, tokens=tokens).keys == block_keys(
        tokens, 4
    )
    monkeypatch.setattr(prompts, "MOST_KEYS", 1)
    assert request({"prompt": "a"}, tokens=tokens).keys == block_keys(tokens[:4], 4)
    # Ids that no key can have are left to the server, which refuses them.
    wrong = request({"prompt": "a" * 16}, tokens=[2**64])
    assert wrong.prompt_tokens == 8


@pytest.mark.parametrize(
    ("size", "keys", "tokens"),
    [(0, 0, 1), (1, 0, 1), (7, 0, 3), (8, 1, 4), (15, 1, 7), (16, 2, 8)],
)
def test_a_text_has_a_key_for_each_full_block_of_its_bytes(size, keys, tokens):
    """Each 8 bytes of a text have a key, and each 2 count as a token, of which there is one."""
    made = request({"prompt": "é" * (size // 2) + "a" * (size % 2)})
    assert (len(made.keys), made.prompt_tokens) == (keys, tokens)


def test_keys_of_texts_are_shared_up_to_the_first_difference(monkeypatch):
    """Texts share the keys of their common beginning, in one model and under one salt."""

    def keys(**body):
        return request(body).keys

    one, other = keys(prompt="a" * 8 + "b" * 8), keys(prompt="a" * 8 + "c" * 8)
    assert one[0] == other[0]
    assert not {one[1]} & set(other)
    assert keys(prompt="b" * 8) != [one[1]]
    sent = {}, {"model": "m"}, {"cache_salt": "m"}, {"cache_salt": "None"}
    apart = [keys(prompt="a" * 8, **more) for more in sent]
    assert len({str(each) for each in apart}) == 4
    tools = [{"function": {"name": "f" * 20}}]
    plain, armed = (
        keys(messages=[{"content": "a" * 40}], **more) for more in ({}, {"tools": tools})
    )
    assert not set(plain) & set(armed)
    assert keys(messages=[{"content": "a" * 40}], tools=[]) == plain
    listed = keys(prompt=["a" * 20, "b"])
    assert listed == keys(prompt=json.dumps(["a" * 20, "b"], separators=(",", ":")))
    monkeypatch.setattr(prompts, "MOST_KEYS", 1)
    assert keys(prompt="a" * 8 + "b" * 8) == one[:1]


def parts(body):
    """Return the prompts' lengths and numbers of keys, and the answers to each, of a body."""
    options = {"tokens": None, "key_tokens": 4, "key_chars": 8}
    call = read(body)
    made, choices = call.parts(call.request(None, **options), 8)
    return [(part.prompt_tokens, len(part.keys)) for part in made], choices


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "a" * 16}, ([], 1)),
        ({"prompt": "a" * 16, "n": 3}, ([], 3)),
        ({"messages": [], "n": 3}, ([], 3)),
        ({"messages": [], "prompt": ["a", "b"], "n": 3}, ([], 3)),
        ({"prompt": [1, 2, 3], "n": 3}, ([], 3)),
        ({"prompt": ["a"]}, ([], 1)),
        ({"prompt": ["a" * 16, "b" * 9], "n": 2}, ([(8, 2), (4, 1)], 2)),
        ({"prompt": [[1] * 9, [2]]}, ([(9, 2), (1, 0)], 1)),
        ({"prompt": ["a" * 8, [1] * 4]}, ([(4, 1), (4, 1)], 1)),
        ({"prompt": ["a" * 8] * 64, "n": 2}, ([(4, 1)] * 64, 2)),
    ],
)
def test_a_call_has_a_request_for_each_prompt(body, expected):
    """Several prompts are requests with keys of their own; `n` is the answers to each."""
    assert parts(body) == expected


@pytest.mark.parametrize("n", [0, -1, 129, 10**18, True, "3", 2.0, None, [], {}])
def test_a_number_of_answers_that_is_none_counts_as_one(n):
    """Numbers that a server refuses, and more answers than are told apart, are one answer."""
    assert parts({"prompt": "a", "n": n}) == ([], 1)


@pytest.mark.parametrize(
    "prompt",
    [["a"] * 129, ["a", 5], ["a", []], [[1], [-1]], [[1], [1 << 70]], [None, "a"], [[], []]],
)
def test_prompts_that_are_none_are_not_told_apart(prompt):
    """Too many prompts, or prompts that only a server can refuse, are one request."""
    assert parts({"prompt": prompt, "n": 2}) == ([], 1)


def test_prompts_of_a_call_have_no_more_keys_than_one(monkeypatch):
    """The keys of all answers to all prompts are at most those of one prompt."""
    monkeypatch.setattr(prompts, "MOST_KEYS", 13)
    texts = ["a" * 80, "b" * 80, "c" * 8]
    assert parts({"prompt": texts, "n": 2}) == ([(40, 2), (40, 2), (4, 1)], 2)
