"""Logs of chats and APIs, kind by kind: what each sibling of a format means, worked by hand."""

import gzip
import json
from pathlib import Path

import pytest
from helpers.rows import write_rows

from kvcore import InputError, KVCache, simulate
from kvcore.plugins.manager import Plugins
from kvcore.request import block_keys
from kvcore.workloads import checked, find_workload
from kvcore_lab.comparison import compare_policies
from kvcore_plugins.latency import Linear
from kvcore_plugins.workload import Chat
from kvcore_plugins.workload.logged import LoggedRequest
from kvcore_plugins.workload.usage import Usage
from kvcore_replay.billing import bill
from kvcore_replay.recorded_run import bill_trace

USER = [{"role": "user", "content": "What is a yawl, and what is a ketch?"}]
ANSWER = {"role": "assistant", "content": "A boat with two masts."}
DONE = {"choices": [{"message": ANSWER}]}


@pytest.fixture
def log(tmp_path):
    """Return a function that writes rows, and returns the workload that is found for them."""

    def log(*rows, **options):
        path = tmp_path / "log.jsonl"
        write_rows(path, *rows)
        if not options:
            return find_workload(str(path), Plugins())
        return Chat(path, **options)

    return log


def call(usage, **more):
    """Return a row of a chat with a usage."""
    return {"messages": USER, "response": DONE | {"usage": usage}} | more


ROWS = Path(__file__).parents[1] / "data" / "usages.jsonl"
USAGES = {
    row["name"]: (row["usage"], row["tokens"])
    for row in map(json.loads, ROWS.read_text("utf-8").splitlines())
}
"""Usages of APIs and gateways, and by hand: (uncached, read, written, written for an hour,
generated, reasoning)."""


@pytest.mark.parametrize("name", USAGES)
def test_usage_means_what_its_api_says(log, name):
    """Prompt tokens are divided as the API or gateway that reports them defines its fields."""
    usage, (uncached, read, written, hour, output, reasoning) = USAGES[name]
    (request,) = log(call(usage))
    assert request.usage == Usage(uncached, read, written, hour, output, reasoning)
    assert request.prompt_tokens == uncached + read + written + hour
    assert request.output_tokens == output


def test_usage_of_gemini_is_read(log):
    """Gemini's prompt holds what is cached, and its thoughts are generated beside the rest."""
    counts = {
        "promptTokenCount": 1000,
        "cachedContentTokenCount": 300,
        "candidatesTokenCount": 40,
        "thoughtsTokenCount": 160,
        "totalTokenCount": 1200,
    }
    parts = [{"text": "hm", "thought": True}, {"text": "A boat."}]
    row = {
        "request": {"contents": [{"role": "user", "parts": [{"text": "What is a yawl?"}]}]},
        "response": {"candidates": [{"content": {"parts": parts}}], "usageMetadata": counts},
    }
    (request,) = log(row)
    assert request.usage == Usage(700, 300, 0, 0, 200, 160)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # Read and written are parts of the input, whoever reports them.
        (
            ("cache_read.input_tokens", "cache_creation.input_tokens"),
            Usage(20, 70, 10, 0, 9, 4),
        ),
        (
            ("cache_read_input_tokens", "cache_creation_input_tokens"),
            Usage(20, 70, 10, 0, 9, 4),
        ),
        (("input_tokens.cached", "input_tokens.cache_write"), Usage(20, 70, 10, 0, 9, 4)),
    ],
)
def test_usage_of_open_telemetry_includes_the_cached(log, names, expected):
    """OpenTelemetry's input tokens are all of the prompt, of Anthropic's models too."""
    counts = dict(zip(("input_tokens", "output_tokens", "reasoning.output_tokens", *names),
                      (100, 9, 4, 70, 10), strict=True))  # fmt: skip
    flat = {f"gen_ai.usage.{name}": count for name, count in counts.items()}
    (request,) = log({"messages": USER, "response": DONE} | flat)
    assert request.usage == expected


@pytest.mark.parametrize("name", USAGES)
def test_bills_of_a_log_add_up(log, name):
    """All bills of a log have the same prompt tokens, and the reported one has the usage's."""
    usage, (uncached, read, written, hour, output, _) = USAGES[name]
    found = bill(log(call(usage)), "input=5,write=6.25,write_1h=10,cached=0.5,output=25")
    expected = uncached * 5 + read * 0.5 + written * 6.25 + hour * 10 + output * 25
    assert found.reported.usd == pytest.approx(expected / 1e6)
    total = uncached + read + written + hour
    assert {found.uncached.prompt_tokens, found.api.prompt_tokens} == {total}
    assert found.uncached.usd == pytest.approx((total * 5 + output * 25) / 1e6)


def test_a_run_of_a_log_and_its_trace_have_the_same_bills(log, tmp_path):
    """Turns with answers have one bill in a run and in its trace, if lengths are reported.

    Texts are counted otherwise than the log counts, in each row by another ratio. A run reads
    what it hit.
    """
    rows, messages = [], []
    for words, prompt in ((60, 100), (50, 190), (40, 290)):
        messages = [*messages, {"role": "user", "content": "sloop " * words}]
        answer = {"role": "assistant", "content": "It floats. " * 10}
        usage = {"prompt_tokens": prompt, "completion_tokens": 40}
        rows.append({"messages": messages, "choices": [{"message": answer}], "usage": usage})
        messages = [*messages, answer]
    workload, trace = log(*rows, key_tokens=8, rate=0.01), tmp_path / "run.jsonl"
    result = simulate(workload, model="llama-3.1-8b", block_size=8, trace=trace)
    price = "input=3,cached=0.3,output=9"
    run, recorded = bill(workload, price, log=result.log), bill_trace(trace, price)
    assert run.run.read_tokens == sum(result.log.hit) > 200
    assert (recorded.run, recorded.api, recorded.uncached) == (run.run, run.api, run.uncached)


def test_every_verb_bills_the_same_usage(log):
    """A comparison and a simulation bill the tokens of the usage, in one step each."""
    usage, _ = USAGES["a gateway before Anthropic"]
    workload, price = log(call(usage, timestamp=0)), "input=5,write=6.25,cached=0.5,output=25"
    bills = compare_policies(workload, "lru", 100, price=price).bills
    assert (bills.reported.usd, bills.uncached.usd) == pytest.approx((0.49575, 0.50025))
    result = simulate(workload, cache=KVCache(10_000, key_tokens=16), latency=Linear())
    run = bill(workload, price, log=result.log)
    assert run.reported.usd == pytest.approx(0.49575)
    assert run.run.prompt_tokens == 100_000


# Each row: the answer, the usage's completion tokens, and the tokens that were generated.
GENERATED = {
    "reasoning": ({"choices": [{"message": ANSWER | {"reasoning_content": "hm"}}]}, 2201),
    "several choices": ({"choices": [{"message": ANSWER}] * 4}, 44),
    "tool calls": (
        {"choices": [{"message": {"content": None, "tool_calls": [{"id": "1"}]}}]},
        31,
    ),
    "fewer than the text's pieces": (DONE, 5),
    "nothing visible": ({"choices": [{"message": {"content": ""}}]}, 512),
}


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tokens_are_those_of_usage(log, name):
    """As many tokens are generated as usage says, whatever is visible of them."""
    response, count = GENERATED[name]
    usage = {"prompt_tokens": 30, "completion_tokens": count}
    workload = log({"messages": USER, "response": response | {"usage": usage}})
    (request,) = workload
    assert (request.prompt_tokens, request.output_tokens) == (30, count)
    assert any("differ from the texts' in 1 prompts" in note for note in workload.notes)


def test_a_key_is_of_as_much_text_as_has_the_tokens_of_a_block(log):
    """If usage counts half of the text's tokens, a key is of twice as much text.

    So prompts share the keys of what they have in common, and no others.
    """
    texts = ["a " * 64 + "b " * 32, "a " * 64 + "c " * 32]
    rows = [
        {"prompt": text, "usage": {"prompt_tokens": 48, "completion_tokens": 1}}
        for text in texts
    ]
    one, other = log(*rows, key_tokens=8)
    assert (one.prompt_tokens, len(one.keys), one.text_tokens) == (48, 6, 96)
    assert one.keys[:4] == other.keys[:4]
    assert not set(one.keys[4:]) & set(other.keys[4:])


def turns(message, usage):
    """Return two rows: a chat, and one that goes on with its answer as clients send it."""
    second = [*USER, ANSWER, {"role": "user", "content": "And a sloop, if I may ask?"}]
    return (
        {"messages": USER, "choices": [{"message": message}], "usage": usage},
        {"messages": second},
    )


@pytest.mark.parametrize(
    ("message", "completion", "hits"),
    [
        (ANSWER, 6, 22),  # the answer follows the prompt: all but its last token are hit
        (ANSWER | {"reasoning_content": "It floats, I think"}, 11, 17),
        (ANSWER | {"reasoning": "It floats, I think"}, 11, 17),
        (ANSWER, 300, 17),  # reasoning that is not recorded
    ],
)
def test_reasoning_stands_between_a_prompt_and_its_answer(log, message, completion, hits):
    """The next turn hits an answer only if nothing was generated before it."""
    prompt = 17
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    workload = log(*turns(message, usage), key_tokens=1, rate=0.01)
    first, _ = workload
    assert (first.prompt_tokens, first.text_tokens) == (prompt, prompt)
    cache = KVCache(2000, 1, key_tokens=1)
    simulate(workload, cache=cache, latency=Linear())
    assert cache.stats.hit_blocks == hits
    hidden = any("not in the file, such as reasoning: 1" in note for note in workload.notes)
    assert hidden is (completion == 300)


@pytest.mark.parametrize(
    ("more", "usage", "reasoning"),
    [
        ([ANSWER | {"reasoning_content": "It floats " * 40}], None, 0),
        ([ANSWER | {"reasoning_content": "It floats " * 40}], 86, 0),
        ([ANSWER], 300, 0),
        ([ANSWER], 300, 294),
        ([ANSWER] * 9, 54, 0),
    ],
)
def test_a_turn_quotes_an_answer_without_its_reasoning(log, more, usage, reasoning):
    """A row that goes on with the answer alone is a turn, whatever else was generated."""
    first, second = turns(ANSWER, {"prompt_tokens": 17, "completion_tokens": usage})
    first |= {"choices": [{"message": message} for message in more]}
    first["usage"] |= {"reasoning_tokens": reasoning}
    if usage is None:
        del first["usage"]
    one, other = log(first | {"created": 1}, second | {"created": 9}, key_tokens=1)
    assert (other.after, other.session) == (one.id, one.session)
    second["messages"][1] = ANSWER | {"content": "Nobody knows, and nobody has asked."}
    *_, other = log(first | {"created": 1}, second | {"created": 9}, key_tokens=1)
    # Where all that was said is recorded, another answer is no turn.
    assert (other.after is None) is (usage != 300 or reasoning > 0)


def test_no_text_is_scaled_to_nothing(log):
    """A text that is less than a reported token is one, where others report fewer tokens."""
    usage = {"prompt_tokens": 22, "completion_tokens": 3}
    rows = [{"prompt": "a b c d " * 10, "usage": usage}] * 3
    *_, short = log(*rows, {"prompt": "a", "completion": "b"})
    assert (short.prompt_tokens, short.output_tokens) == (1, 1)


TENANTS = {
    "salts": ({"cache_salt": "a"}, {"cache_salt": "b"}),
    "a salt beside none": ({"cache_salt": "a"}, {}),
    "salts of clients": ({"extra_body": {"cache_salt": "a"}}, {"extra_body": {}}),
    "adapters": ({"lora_request": {"lora_name": "sql"}}, {"lora_request": None}),
    "adapters by path": ({"lora_path": "sql"}, {"lora_path": "chat"}),
    "keys of SGLang": ({"extra_key": "a"}, {"extra_key": "b"}),
    "models": ({"model": "a"}, {"model": "b"}),
}


@pytest.mark.parametrize("name", TENANTS)
@pytest.mark.parametrize("nested", [False, True])
def test_prompts_of_other_tenants_share_no_keys(log, name, nested):
    """Prompts share keys only with those of the same salt, adapter and model."""
    one, other = TENANTS[name]
    bodies = [{"messages": USER} | fields for fields in (one, other, one)]
    rows = [{"request": body} for body in bodies] if nested else bodies
    a, b, c = log(*rows, key_tokens=1)
    assert not set(a.keys) & set(b.keys)
    assert (a.keys, a.salt) == (c.keys, c.salt)


def test_users_share_a_cache_unless_told_otherwise(log):
    """Users share a cache, which providers do; with `isolate` they do not."""
    rows = [{"messages": USER, "user": name, "metadata": {"org": name}} for name in "ab"]
    one, other = log(*rows, key_tokens=1)
    assert one.keys == other.keys
    for field in ("user", "metadata.org", "user+metadata.org"):
        one, other = log(*rows, key_tokens=1, isolate=field)
        assert not set(one.keys) & set(other.keys)


LEFT_OUT = {
    "models": ({"path": "/v1/models", "method": "GET"}, "of another endpoint"),
    "embeddings": (
        {"url": "https://host/v1/embeddings", "input": "a text", "response": {"data": []}},
        "of another endpoint",
    ),
    "embeddings as prompts": (
        {"call_type": "aembedding", "prompt": "a"},
        "of another endpoint",
    ),
    "rate limit": ({"messages": USER, "status": 429}, "failed"),
    "rate limit of a table": ({"messages": USER, "status": 429.0}, "failed"),
    "status of the response": ({"messages": USER, "response": {"status_code": 500}}, "failed"),
    "status in words": ({"messages": USER, "status": "failure"}, "failed"),
    "error": ({"messages": USER, "response": {"error": {"message": "no"}}}, "failed"),
    "failed elsewhere": (
        {"prompt": "a", "status": 500, "path": "/v1/embeddings", "object": "list"},
        "failed",
    ),
    "error of Anthropic": ({"messages": USER, "response": {"type": "error"}}, "failed"),
    "no tokens": (
        {
            "messages": USER,
            "response": {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 0}},
        },
        "without generated tokens",
    ),
    "null": ({"messages": None}, "without a prompt"),
    "null prompt": ({"prompt": None, "output_tokens": 7}, "without a prompt"),
    "another object": ({"level": "info", "msg": "started"}, "without a prompt"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "with an image: image_tokens=N counts it",
    ),
    "a cache of answers": ({"messages": USER, "cache_hit": True}, "answered by a cache"),
    "empty": ({"conversations": []}, "not readable"),
    "bad": ({"conversations": [{"from": "human"}]}, "not readable"),
    "wrong model": ({"messages": USER, "model": {"name": "m"}}, "not readable"),
    "wrong output": ({"messages": USER, "output_tokens": "12"}, "not readable"),
    "nested too deep in a text": (
        {"request": f'{{"messages": {json.dumps(USER)}, "tools": {"[" * 300 + "]" * 300}}}'},
        "without a prompt",
    ),
    "role of Gemini": ({"contents": [{"role": ["user"], "parts": 1}]}, "not readable"),
    "wrong usage": (
        {"messages": USER, "usage": {"prompt_tokens": -4, "completion_tokens": 1}},
        "not readable",
    ),
    "a prompt beyond 63 bits": (
        {"messages": USER, "usage": {"prompt_tokens": 2**63, "completion_tokens": 1}},
        "not readable",
    ),
    "parts of a prompt beyond 63 bits": (
        {
            "messages": USER,
            "usage": dict.fromkeys(("input_tokens", "cache_read_input_tokens"), 2**62)
            | {"output_tokens": 1},
        },
        "not readable",
    ),
    "an answer beyond 63 bits": (
        {"messages": USER, "usage": {"prompt_tokens": 9, "completion_tokens": 1e30}},
        "not readable",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("index", [0, 2])
def test_rows_that_are_no_requests_are_left_out(log, name, index):
    """A row that is no completion, has failed or cannot be read is left out with a note.

    It may be the first. The others have the keys and times that they have without it. A strict
    reading refuses it.
    """
    row, reason = LEFT_OUT[name]
    good = [{"messages": USER, "timestamp": n, **DONE} for n in range(2)]
    rows = [*good[:index], row | {"timestamp": index}, *good[index:]]
    workload = log(*rows)
    requests = list(checked(workload))
    without = list(log(*good))
    assert [r.keys for r in requests] == [r.keys for r in without]
    assert [r.arrival for r in requests] == [0, 10**9]
    (note,) = (note for note in workload.notes if note.startswith("left out: 1 (1 "))
    assert reason in note
    assert f"log.jsonl:{index + 1}: " in note
    with pytest.raises(InputError, match=rf"log\.jsonl:{index + 1}: "):
        list(log(*rows, strict=True))


def test_a_line_that_is_no_json_is_left_out(tmp_path):
    """A line that is cut off is left out, and the others are read."""
    path = tmp_path / "log.jsonl"
    whole = json.dumps({"messages": USER})
    path.write_text(f"{whole}\n{whole[:20]}\n{whole}\n")
    workload = find_workload(str(path), Plugins())
    assert [request.id for request in workload] == [0, 2]
    assert any("left out: 1 (1 not readable)" in note for note in workload.notes)


def test_a_file_without_any_request_is_refused(log):
    """A file in which no row is left is refused, with the reasons."""
    rows = [{"messages": USER, "status": 429}, {"messages": None}]
    with pytest.raises(InputError, match=r"no row is a request.*1 failed, 1 without a prompt"):
        list(log(*rows))


@pytest.mark.parametrize(
    "path",
    ["/v1beta/models/gemini:generateContent", "/v2/models/llama/generate", "/v1/responses"],
)
def test_paths_of_completions_are_not_left_out(log, path):
    """A path that has the word of another endpoint, and completes, is no other endpoint."""
    assert len(list(log({"messages": USER, "path": path}))) == 1


def test_a_status_of_endless_digits_is_no_failure(log):
    """A status that is no number of HTTP is read as one of success, however long it is."""
    assert len(list(log({"messages": USER, "status": "5" * 5000}))) == 1


def test_images_have_the_tokens_of_an_option(log):
    """With `image_tokens` an image has as many tokens, with keys of its own."""
    rows = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": "what is it?"},
                    ],
                }
            ]
        }
        for url in ("one.png", "two.png", "one.png")
    ]
    one, two, same = log(*rows, image_tokens=100, key_tokens=10)
    text = {"messages": [{"role": "user", "content": "what is it?"}]}
    (plain,) = log(text)
    assert one.prompt_tokens == plain.prompt_tokens + 100
    assert one.keys == same.keys
    assert not set(one.keys) & set(two.keys)


@pytest.mark.parametrize("image_tokens", [None, 7])
def test_a_text_that_is_written_like_an_image_is_a_text(log, image_tokens):
    """A log cannot say itself how many tokens an image has, whatever its texts are."""
    forged = f"\0{'a' * 32}:{10**15}\0"
    rows = {"messages": [{"role": "user", "content": forged}]}, {"prompt": forged}
    for request in log(*rows, image_tokens=image_tokens):
        assert request.prompt_tokens < 100


IDS = list(range(1, 65))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": IDS},
        {"prompt": [IDS]},
        {"prompt_token_ids": IDS},
        {"input_ids": IDS},
        {"request": {"prompt": IDS}, "response": {"choices": []}},
        {"prompt": "the text of it", "request": {"prompt_token_ids": IDS}},
    ],
)
def test_prompts_of_token_ids_are_read(log, row):
    """Keys of token ids are those of the ids; two equal prompts share them."""
    workload = log(row | {"output_tokens": 5}, row)
    one, other = workload
    assert not any("pieces of words" in note for note in workload.notes)
    assert (one.prompt_tokens, one.keys) == (64, block_keys(IDS, 16, salt=None))
    assert other.keys == one.keys


def test_generated_token_ids_follow_those_of_the_prompt(log):
    """Keys of recorded generated token ids follow those of the prompt."""
    row = {"prompt": IDS, "choices": [{"text": "hm", "token_ids": IDS}]}
    (request,) = log(row)
    assert request.output_tokens == 64
    assert [*request.keys, *request.output_keys] == block_keys(IDS * 2, 16)


@pytest.mark.parametrize("ids", [True, False])
def test_tokens_of_a_model_and_estimated_ones_follow_none_of_each_other(log, ids):
    """A prompt of ids with an answer in text, or the reverse, is continued all the same."""
    asked, said = {"role": "user", "content": "hm " * 64}, "ah " * 64
    later = [asked, {"role": "assistant", "content": said}, asked]
    if ids:
        rows = {"prompt": IDS, "completion": said}, {"prompt": IDS * 3}
    else:
        choice = {"message": {"content": said}, "token_ids": IDS}
        rows = {"messages": [asked], "choices": [choice]}, {"messages": later}
    workload = log(*(row | {"created": n} for n, row in enumerate(rows)))
    first, second = workload
    assert (second.after, first.output_tokens, len(first.output_keys)) == (0, 64, 4 * (not ids))
    begun = [*first.keys, *first.output_keys]
    assert second.keys[: len(begun)] == begun
    assert any("pieces of words" in note for note in workload.notes)


def test_responses_are_read_as_chats(log):
    """A call of OpenAI's Responses has the keys of the same chat, and the usage's lengths."""
    items = [{"role": "user", "content": [{"type": "input_text", "text": USER[0]["content"]}]}]
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": ANSWER["content"]}]},
    ]  # fmt: skip
    system = [{"role": "system", "content": "Be brief."}]
    (chat,) = log({"model": "m", "messages": system + USER}, key_tokens=1)
    usage = {"input_tokens": chat.prompt_tokens, "output_tokens": 90,
             "output_tokens_details": {"reasoning_tokens": 80}}  # fmt: skip
    body = {"model": "m", "input": items, "instructions": "Be brief."}
    response = {"object": "response", "output": output, "usage": usage}
    (request,) = log({"request": body, "response": response}, key_tokens=1)
    assert request.keys == chat.keys
    assert request.output_tokens == 90


def test_a_format_is_that_of_most_rows(log):
    """The first rows of a log may be of another kind than most."""
    others = [{"path": "/v1/models"}, {"path": "/health"}, {"timestamp": 1, "prompt": 3}]
    workload = log(*others, *[{"messages": USER}] * 5)
    assert type(workload) is Chat
    assert len(list(workload)) == 5


ODD = {
    "ts": 1_760_000_000_123,
    "payload": {"msgs": USER, "llm": "m"},
    "meta": {"token_usage": {"prompt_tokens": 9, "completion_tokens": 4}, "reply": "fine"},
}
NAMES = {
    "messages": "payload.msgs",
    "model": "payload.llm",
    "usage": "meta.token_usage",
    "answer": "meta.reply",
    "time": "ts",
}


def test_options_name_fields(log):
    """Options name fields by dotted names, for any layout of a row."""
    first, second = log(ODD, ODD | {"ts": ODD["ts"] + 500}, **NAMES)
    assert type(first) is LoggedRequest
    assert (first.salt, first.prompt_tokens, first.output_tokens) == ("m", 9, 4)
    assert second.arrival == 500 * 10**6


@pytest.mark.parametrize("beside", ["messages", "conversations", "conversation", "contents"])
def test_a_named_field_is_read_before_a_usual_one(log, beside):
    """A prompt and a model that are named are read beside others under usual names."""
    row = {"asked": "one two", "llm": "a", "model": "b", beside: USER}
    (request,) = log(row, prompt="asked", model="llm", only_model="a")
    assert (request.prompt_tokens, request.salt) == (2, "a")
    row = {"llm": "a", "request": {"model": "b", "messages": USER}}
    assert [request.salt for request in log(row, model="llm")] == ["a"]


@pytest.mark.parametrize("named", [True, False])
def test_fields_beside_a_named_answer_or_prompt_are_read(log, named):
    """A field that an option names may lie in one object with that of another option."""
    rows = [
        {
            "prompt": {"text": "one two", "user": f"u{n}"},
            "response": {
                "text": "three",
                "choices": [{"text": "another answer"}],
                "created": n,
                "usage": {"prompt_tokens": 2, "completion_tokens": 9},
            },
        }
        for n in range(2)
    ]
    names = {"usage": "response.usage", "time": "response.created"} if named else {}
    names |= {"prompt": "prompt.text", "answer": "response.text", "tenant": "prompt.user"}
    workload = log(*rows, **names, isolate="prompt.user", key_tokens=1)
    first, second = workload
    assert (second.arrival, second.tenant) == (10**9, "u1")
    assert (first.usage.output_tokens, len(first.keys), len(first.output_keys)) == (9, 2, 1)
    assert first.keys != second.keys


def test_a_toml_file_names_fields(log, tmp_path):
    """A TOML file names fields as options do; options win."""
    file = tmp_path / "fields.toml"
    file.write_text("".join(f'{role} = "{name}"\n' for role, name in NAMES.items()))
    assert list(log(ODD, fields=file)) == list(log(ODD, **NAMES))
    file.write_text('massages = "a"')
    with pytest.raises(InputError, match=r"'massages' is none of .*did you mean 'messages'"):
        list(log(ODD, fields=file))


def test_an_unknown_layout_is_answered_with_a_command(log):
    """The error for a file of no format has the command that would read it."""
    with pytest.raises(InputError) as caught:
        log(ODD)
    (command,) = (part for part in str(caught.value).split("'") if part.startswith("kvcore "))
    _, _, text = command.split(" ")
    (request,) = find_workload(text, Plugins())
    assert (request.prompt_tokens, request.output_tokens) == (9, 4)


def test_a_field_of_times_that_is_not_there_is_refused(log):
    """A field of times that no row has is refused, with those that look like times."""
    with pytest.raises(InputError, match=r"no field 'at' .*there are: sent_ts"):
        list(log({"prompt": "a", "sent_ts": 3}, time="at"))


def test_fields_that_change_the_meaning_are_named(log):
    """Fields that are not read and that change the meaning are noted, or refused if strict."""
    row = {"messages": USER, "round_index": 3, "prefix_id": 9, "wait_ms": 40, "color": "red"}
    workload = log(row)
    assert len(list(workload)) == 1
    (note,) = (note for note in workload.notes if "not read" in note)
    assert all(name in note for name in ("round_index", "prefix_id", "wait_ms"))
    assert "color" not in note
    with pytest.raises(
        InputError, match=r"log.jsonl:1: field 'round_index': expected no field"
    ):
        list(log(row, strict=True))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ({"start_ms": 5}, {}),
        ({"start_ms": 5}, {"time": "start_ms"}),
        ({"prefix_id": "x"}, {"isolate": "prefix_id"}),
        ({"meta": {"prefix_id": "x"}}, {"isolate": "meta.prefix_id"}),
        ({"reasoning_model": "x"}, {"model": "reasoning_model"}),
    ],
)
def test_fields_that_are_read_are_not_said_to_be_unread(log, field, options):
    """A time that is found, and what an option names, is read, and no error if strict."""
    workload = log({"messages": USER} | field, **options, strict=True)
    assert len(list(workload)) == 1
    assert not any("fields that are not read" in note for note in workload.notes)


TIMED = [
    {
        "messages": [{"role": "user", "content": f"{'ab ' * n}?"}],
        "ts": 1_760_000_000 + n,
        **DONE,
    }
    for n in (0, 1, 2, 5, 9)
]


def written(form):
    """Return the bytes of a log in one of several forms that mean the same."""
    rows = list(TIMED)
    if form == "order of completion":
        rows = [rows[n] for n in (2, 0, 1, 4, 3)]
    if form == "milliseconds":
        rows = [row | {"ts": row["ts"] * 1000} for row in rows]
    if form == "unit in the name":
        rows = [{"ts_us" if k == "ts" else k: v * 10**6 if k == "ts" else v
                 for k, v in row.items()} for row in rows]  # fmt: skip
    if form == "another day":
        rows = [row | {"ts": row["ts"] + 86_400} for row in rows]
    if form == "permuted fields":
        rows = [dict(reversed(row.items())) for row in rows]
    end = "\r\n" if form == "CRLF" else "\n"
    data = "".join(json.dumps(row) + end for row in rows).encode()
    if form == "BOM":
        data = b"\xef\xbb\xbf" + data
    if form == "array":
        data = json.dumps(rows).encode()
    return gzip.compress(data) if form == "gzip" else data


@pytest.mark.parametrize(
    "form",
    ["order of completion", "milliseconds", "unit in the name", "another day", "CRLF", "BOM",
     "array", "gzip", "permuted fields"],
)  # fmt: skip
def test_forms_of_a_log_give_the_same_requests(tmp_path, form):
    """Order, compression, line ends, marks and units of a log do not change its requests."""
    results = []
    for name in ("plain", form):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(written(name))
        requests = list(find_workload(str(path), Plugins()))
        results.append(
            [(r.arrival, r.prompt_tokens, r.output_tokens, r.keys) for r in requests]
        )
    assert results[0] == results[1]
