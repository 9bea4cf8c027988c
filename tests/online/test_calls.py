"""The calls of `kvcore serve` as they are read, without a server: limits, what is passed on."""

import sys

import pytest

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'kvcore[serve]'")

from kvcore.engine import Sampling
from kvcore_online.calls import UNSUPPORTED, WITHOUT_EFFECT, CallReader
from kvcore_online.engine import Tokens
from kvcore_online.listener import ApiError
from kvcore_online.prompts import ASKED_OUTPUT
from kvcore_online.server import Answer, Text, _check, _deltas, _usage
from kvcore_online.simulated import VOCABULARY, SimulatedModel
from kvcore_online.tally import CANCELLED, FAILED, FINISHED, REJECTED

HUGE = 1 << 63


class Recorded(SimulatedModel):
    """A model that records the chats that it encodes."""

    def encode_chat(self, *chat):
        """Record messages and tools."""
        self.chat = chat
        return super().encode_chat(*chat)


def read(body, *, longest=1_000, answers=8, model=None):
    """Return the call of a body: a chat if it has messages, else a completion of `a`."""
    reader = CallReader(model or SimulatedModel(), "tiny", longest, "the cache", answers)
    chat = "messages" in body
    return reader.read(body if chat else {"prompt": "a", **body}, chat=chat)


def user(content="a", **fields):
    """Return a message of a chat."""
    return {"role": "user", "content": content, **fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(
            ({"prompt": prompt}, "prompt")
            for prompt in (None, "", [], [[]], [5, "a"], ["a", 5])
        ),
        *(({"prompt": prompt}, "prompt") for prompt in ([True], [1, True], [-1], [VOCABULARY])),
        *(({"prompt": prompt}, "prompt") for prompt in (["a", ""], [[1], [VOCABULARY]], 5)),
        *(({"max_tokens": tokens}, "max_tokens") for tokens in (0, -1, 1.0, True, "5")),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        *(({"n": choices}, "n") for choices in (0, 9, 129, 1.0, True)),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 3}, "n"),
        *(({"cache_salt": salt}, "cache_salt") for salt in ("", 5, ["a"], "a" * 1_025)),
        *(({"stream": stream}, "stream") for stream in ("yes", 1)),
        *(({"seed": seed}, "seed") for seed in (HUGE + 1, -HUGE - 1, 1.5, True)),
        *(({"top_p": share}, "top_p") for share in (0, 1.001, -0.5, "1")),
        *(({"top_k": tokens}, "top_k") for tokens in (-2, 1.5)),
        *(({"temperature": heat}, "temperature") for heat in (-0.1, float("inf"), True)),
        *(({"stop": stop}, "stop") for stop in (["a"] * 5, ["a", ""], ["a", 5], 5, {"a": 1})),
        ({"tools": [{}]}, "tools"),
        *(({"tool_choice": choice}, "tool_choice") for choice in ("required", {})),
        *(({name: 2}, name) for name in ("best_of", "presence_penalty", "frequency_penalty")),
        *(({name: 2}, name) for name in ("repetition_penalty", "min_p")),
        *(({name: value}, name) for name in ("logprobs", "echo") for value in (True, 0, 1)),
        ({"suffix": "x"}, "suffix"),
        ({"functions": [{}]}, "functions"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        *(({"messages": messages}, "messages") for messages in (None, "hi", [], [3], [[]])),
        *(({"messages": [message]}, "messages") for message in ({}, {"content": "a"})),
        *(({"messages": [user(content)]}, "messages") for content in (None, 5, [5], [{}])),
        ({"messages": [user(role=5)]}, "messages"),
        ({"messages": [user()], "tools": "all"}, "tools"),
        ({"messages": [user()], "tools": [5]}, "tools"),
        ({"messages": [user(tool_calls=[{"function": {}}])]}, "messages"),
        ({"messages": [user(tool_calls=5)]}, "messages"),
        *(
            ({"messages": [user(tool_calls=[{"function": function}])]}, "messages")
            for function in (
                {"name": "f", "arguments": "{"},
                {"name": "f", "arguments": "[1]"},
                {"name": "f", "arguments": 5},
                {"arguments": "{}"},
            )
        ),
    ],
)
def test_a_wrong_field_is_named(fields, param):
    """A body with a value that the API does not allow is a 400 that names the field."""
    with pytest.raises(ApiError) as caught:
        read(fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_another_model_is_not_found():
    """A call for a model of another name is a 404; no name is that of the server's model."""
    with pytest.raises(ApiError) as caught:
        read({"model": "gpt"})
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert read({"model": "tiny"}) == read({"model": None}) == read({})


def test_options_that_change_nothing_are_taken():
    """Values that say what this server does in any case make the same call as no values."""
    neutral = {
        "best_of": 1,
        "logprobs": False,
        "functions": [],
        "response_format": {"type": "text"},
        "suffix": "",
        "echo": False,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "min_p": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "stop": [],
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "n": 1,
        "stream": False,
        "max_tokens": ASKED_OUTPUT,
    }
    for fields in (neutral, dict.fromkeys(neutral), {"top_k": 0, "tool_choice": "auto"}):
        assert read(fields) == read({})


def test_prompts_are_texts_or_tokens_or_lists_of_these():
    """A prompt is a text or token ids; a list of prompts may have both kinds."""
    encode = SimulatedModel().encode
    ids = [0, VOCABULARY - 1]

    def prompts(prompt):
        return list(map(list, read({"prompt": prompt}).prompts))

    assert prompts("a b") == [encode("a b")]
    assert prompts(ids) == [ids]
    assert prompts(["a b", ids]) == [encode("a b"), ids]


def test_a_call_takes_four_bytes_for_a_token():
    """Prompts of calls that wait take the memory of their bodies, not of integers."""
    few, many = (read({"prompt": [5] * tokens}).prompts[0] for tokens in (1, 901))
    assert sys.getsizeof(many) - sys.getsizeof(few) < 4_000


def test_the_lengths_and_answers_of_a_call_are_limited_to_the_last_one():
    """The longest prompt with its output, and all answers, may be as many as the limit."""
    body = {"prompt": [[1], [1, 2, 3, 4]], "max_tokens": 6, "n": 4}
    call = read(body, longest=10, answers=8)
    assert (call.output, call.answers) == (6, 8)
    for limits, param in ({"longest": 9}, "prompt"), ({"answers": 7}, "n"):
        with pytest.raises(ApiError) as caught:
            read(body, **limits)
        assert caught.value.param == param
    assert read({"prompt": [1] * 4}, longest=4 + ASKED_OUTPUT).output == ASKED_OUTPUT
    with pytest.raises(ApiError, match="do not fit into the 19 tokens of the cache"):
        read({"prompt": [1] * 4}, longest=3 + ASKED_OUTPUT)
    with pytest.raises(ApiError) as caught:
        read({"messages": [user("a b c")]}, longest=ASKED_OUTPUT)
    assert caught.value.param == "messages"
    assert read({"n": 128}, answers=129).choices == 128
    with pytest.raises(ApiError, match="n must be a whole number from 1 to 128"):
        read({"n": 129}, answers=129)
    assert read({"max_tokens": 3, "max_completion_tokens": 5}).output == 5


def test_a_call_says_how_its_tokens_are_drawn():
    """Sampling is that of the call where it differs from the generator's own."""
    assert read({"temperature": 0.5, "top_p": 0.25, "top_k": 1}).sampling == Sampling(
        0.5, 1, 0.25
    )
    assert read({"temperature": 2}).sampling == Sampling(2, None, 1.0)
    assert read({}).sampling is None
    for seed in (HUGE, -HUGE, 0, None):
        assert read({"seed": seed}).seed == seed


def test_a_call_says_how_it_is_answered():
    """Stop texts, salt, stream and the usage at its end are those of the body."""
    assert read({"stop": "x"}).stop == ("x",)
    assert read({"stop": ["a", "b", "c", "d"]}).stop == ("a", "b", "c", "d")
    assert read({"cache_salt": "mine"}).salt == "mine"
    call = read({"stream": True, "stream_options": {"include_usage": True}})
    assert (call.stream, call.counted, call.chat) == (True, True, False)
    for options in (None, {}, {"include_usage": False}, {"include_usage": 1}, 5):
        assert not read({"stream": True, "stream_options": options}).counted
    assert read({"messages": [user()]}).chat


def test_messages_reach_the_chat_template_with_calls_of_tools_as_objects():
    """A template gets roles, texts, names and calls; the parts of a text are joined."""
    model = Recorded()
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    read({"messages": [user([{"text": "a"}, {"text": "b"}], name="me", more=1)]}, model=model)
    assert model.chat == ([user("ab", name="me")],)
    bare, null, empty = (
        {"function": {"name": "f", "arguments": each}} for each in ("", None, {})
    )
    assistant = {"role": "assistant", "content": None, "tool_calls": [call, bare, null]}
    tool = {"role": "tool", "content": "2", "tool_call_id": "1", "tool_calls": []}
    read({"messages": [assistant, tool], "tools": [{"name": "f"}]}, model=model)
    known = {"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    assert model.chat == (
        [
            {"role": "assistant", "content": "", "tool_calls": [known, empty, empty]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ],
        [{"name": "f"}],
    )


def test_each_answer_is_a_request_with_a_seed_of_its_own():
    """The answers to a prompt share its keys, and differ in their seeds; no one has an id."""
    call = read({"prompt": [[*range(9)], [5]], "n": 2, "seed": 7, "max_tokens": 3})
    first, second, third, fourth = call.requests(4, "x", publish=True)
    assert first.keys == second.keys
    assert (len(first.keys), third.keys, first.prompt_tokens) == (2, [], 9)
    assert first.seed != second.seed
    assert (first.seed, second.seed) == (third.seed, fourth.seed)
    assert {(made.output_tokens, made.salt, made.publish) for made in (first, fourth)} == {
        (3, "x", True)
    }
    (drawn,) = read({}).requests(4, None, publish=False)
    assert (drawn.id, drawn.seed, drawn.publish) == (0, None, False)


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (REJECTED, 400, "the request was rejected"),
        (FAILED, 503, "the request was failed"),
        (CANCELLED, 503, "the request was cancelled"),
    ],
)
def test_a_request_that_is_not_served_is_an_error_with_its_reason(end, status, words):
    """A request that the engine rejects is a 400, one that it cannot serve a 503."""
    for reason, message in ("the pool is small", "the pool is small"), (None, words):
        with pytest.raises(ApiError) as caught:
            _check(Tokens(end=end, reason=reason))
        assert (caught.value.status, str(caught.value)) == (status, message)
    for end_ in (None, FINISHED):
        _check(Tokens(end=end_))


def answered(*parts, stop=()):
    """Return an answer of parts, each of a byte a token."""
    answer = Answer(Text(lambda ids: bytes(ids).decode(), stop))
    text = "".join(answer.add(part) for part in parts)
    return answer, text


def test_the_usage_counts_each_prompt_once():
    """Tokens of all answers add up; those of a prompt that were cached count once."""
    call = read({"prompt": [[1, 2, 3], [4]], "n": 2})
    answers = [
        answered(Tokens(b"ab", cached=cached), Tokens(b"c", end=FINISHED))[0]
        for cached in (2, 3, 1, 0)
    ]
    assert _usage(call, answers) == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_new_tokens_of_a_stream_are_a_part_and_its_end():
    """A part has the text that tokens add, if any; the last one says why the text has ended."""
    chat, text = read({"messages": [user()]}), read({})

    def parts(call, answer, added):
        return [
            (made["index"], made.get("delta", made.get("text")), made["finish_reason"])
            for made in _deltas(call, 5, answer, added)
        ]

    goes_on, added = answered(Tokens(b"ab"))
    assert parts(text, goes_on, added) == [(5, "ab", None)]
    assert parts(chat, goes_on, added) == [(5, {"content": "ab"}, None)]
    assert parts(chat, goes_on, "") == []
    ended, added = answered(Tokens(b"ab"), Tokens(end=FINISHED))
    assert parts(text, ended, "") == [(5, "", "length")]
    stopped, added = answered(Tokens(b"abc"), stop=("c",))
    assert parts(chat, stopped, added) == [(5, {"content": "ab"}, None), (5, {}, "stop")]


def test_too_many_prompts_are_refused_unread():
    """No prompt of a call with more prompts than requests is made tokens."""

    class Unread(SimulatedModel):
        def encode(self, text):
            raise AssertionError(text)

    model = SimulatedModel()
    model.__class__ = Unread
    with pytest.raises(ApiError, match="more prompts than the 8 requests"):
        read({"prompt": ["a"] * 9}, model=model)


def test_a_chat_without_tokens_is_refused():
    """A template that makes nothing of the messages of a chat is a 400 for its client."""

    class Mute(SimulatedModel):
        def encode_chat(self, *chat):
            return []

    with pytest.raises(ApiError, match="no tokens") as caught:
        read({"messages": [user()]}, model=Mute())
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "fields",
    [
        *({name: ["x"]} for name in ("bad_words", "guided_choice", "documents")),
        *({name: "x"} for name in ("guided_regex", "guided_grammar", "regex", "prompt_embeds")),
        *({name: "x"} for name in ("chat_template", "reasoning_effort", "function_call")),
        *({name: {}} for name in ("guided_json", "audio", "web_search_options")),
        *({name: True} for name in ("use_beam_search", "return_token_ids", "top_logprobs")),
        *({name: False} for name in ("skip_special_tokens", "add_special_tokens")),
        *({name: False} for name in ("parallel_tool_calls", "include_reasoning")),
        {"allowed_token_ids": [7]},
        {"structured_outputs": {"choice": ["x"]}},
        {"prompt_logprobs": 0},
        {"truncate_prompt_tokens": -1},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"verbosity": "low"},
        {"min_tokens": ASKED_OUTPUT + 1},
        {"min_tokens": 1, "stop": "x"},
        {"min_tokens": 1, "stop_token_ids": [7]},
        *({"stop_token_ids": ids} for ids in (7, ["7"], [True])),
        *({name: "yes"} for name in ("ignore_eos", "include_stop_str_in_output")),
        *({"priority": level} for level in (1.5, True, (1 << 31) + 1, ~(1 << 31))),
        {"frobnicate": 0},
        {"messages": [user()], "add_special_tokens": True},
    ],
)
def test_what_a_server_does_not_have_is_refused(fields):
    """An option that would change an answer, and that the server lacks, is a 400 naming it."""
    with pytest.raises(ApiError) as caught:
        read(fields)
    name = next(name for name in fields if name != "messages")
    assert (caught.value.status, caught.value.param) == (400, name)


def test_an_option_that_no_api_has_is_refused_with_the_nearest_one():
    """A misspelt option is told, however long it is; without a value it asks for nothing."""
    with pytest.raises(
        ApiError, match=r"no option 'max_token' .did you mean 'max_tokens'"
    ) as one:
        read({"max_token": 5})
    assert one.value.param == "max_token"
    with pytest.raises(ApiError) as one:
        read({"x" * 1_000_000: 5})
    assert len(str(one.value)) + len(one.value.param) < 500
    assert read({"max_token": None}) == read({})


def test_options_without_an_effect_are_taken():
    """Options that change no answer are taken with any value, others with one of no effect."""
    neutral = {**UNSUPPORTED, **dict.fromkeys(WITHOUT_EFFECT, "x")}
    neutral |= {
        "min_tokens": ASKED_OUTPUT,
        "ignore_eos": True,
        "function_call": "none",
        "priority": 0,
    }
    neutral |= {"stop_token_ids": [], "include_stop_str_in_output": False}
    assert read(neutral) == read(dict.fromkeys(neutral)) == read({})
    chat = {"messages": [user()]}
    assert read({**chat, "add_special_tokens": False}) == read(chat)


def test_an_answer_that_may_end_early_has_no_least_length():
    """Of a model with an end token, a call cannot ask that its answers do not end there."""

    class Ending(SimulatedModel):
        eos_token_ids = frozenset({2})

    for fields in ({"min_tokens": 1}, {"ignore_eos": True}):
        assert read(fields)
        with pytest.raises(ApiError, match="may end early"):
            read(fields, model=Ending())
    assert read({"min_tokens": 0, "ignore_eos": False}, model=Ending())


def test_the_lowest_priority_is_the_most_urgent_as_in_vllm():
    """Requests of a call have its priority for schedulers, of which the highest is first."""
    levels = []
    for level in (-3, 0, 3):
        (made,) = read({"priority": level}).requests(4, None, publish=False)
        levels.append(made.priority)
    assert levels == [3, 0, -3]


def test_tokens_and_texts_that_end_an_answer_are_part_of_it_if_it_says_so():
    """The end of an answer is left out of it unless `include_stop_str_in_output` is true."""
    call = read({"stop_token_ids": [99], "include_stop_str_in_output": True})
    assert (call.stop_ids, call.stop_shown) == ({99}, True)
    for shown, text in (False, "ab"), (True, "abc"):
        for ends in ({"stop": ("c",)}, {"eos": frozenset(b"c")}):
            made = Text(lambda ids: bytes(ids).decode(), **ends, shown=shown)
            answer = Answer(made)
            assert answer.add(Tokens(b"abcd")) == text
            assert (answer.tokens, answer.reason) == (3, "stop")
