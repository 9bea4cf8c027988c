"""The workload `chat`: conversations, logged requests and prompts with their texts."""

import json
from itertools import islice

import pytest
from helpers.rows import write_rows

from kvcore import KVCache, simulate
from kvcore.errors import InputError
from kvcore.workloads import WorkloadSample, checked, recognise
from kvcore_cli import main
from kvcore_plugins.latency import Linear
from kvcore_plugins.workload import Chat, Lengths, Mooncake

SECOND = 10**9
CHAT = [
    {"role": "system", "content": "You know all about ships."},
    {"role": "user", "content": "What is a yawl?"},
    {"role": "assistant", "content": "A boat with two masts, the smaller one far aft."},
    {"role": "user", "content": "And a ketch?"},
    {"role": "assistant", "content": "Likewise, but its mizzen stands before the rudder."},
]

SAID = CHAT[4]["content"]


@pytest.fixture
def read(tmp_path):
    """Return a function that reads rows as a chat workload, in keys of one token."""

    def read(*rows, **options):
        path = write_rows(tmp_path / "chats.jsonl", *rows)
        return list(checked(Chat(path, **{"key_tokens": 1} | options)))

    return read


def test_a_conversation_is_a_request_for_each_answer(read):
    """Each answer of a conversation is a request.

    A turn begins with the prompt and the answer before it, and waits for that answer and the
    think time.
    """
    first, second = read({"messages": CHAT}, think=2.5)
    begun = [*first.keys, *first.output_keys]
    assert second.keys[: len(begun)] == begun
    assert len(second.keys) == second.prompt_tokens > len(begun)
    assert (first.id, second.id, second.after, second.session) == ("0/0", "0/1", "0/0", "0")
    assert (second.think_time, second.arrival) == (5 * SECOND // 2, 5 * SECOND // 2)
    assert first.output_tokens == len(first.output_keys) == 12


def test_sharegpt_is_read(tmp_path):
    """A JSON array of conversations in the format of ShareGPT is read."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names.get(m["role"], "system"), "value": m["content"]} for m in CHAT]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"id": "a", "conversations": turns[:4]}], indent=2))
    workload = recognise(path, [Chat, Lengths, Mooncake])
    workload.key_tokens = 1
    first, last = workload
    chat = list(Chat(write_rows(tmp_path / "c.jsonl", {"messages": CHAT}), key_tokens=1))
    assert [first.keys, last.keys] == [request.keys for request in chat]
    assert (last.id, last.output_tokens, last.output_keys) == ("0/1", 0, ())


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT[:4], "choices": [{"message": CHAT[4]}], "created": 30},
        {
            "body": {"messages": CHAT[:4]},
            "response": {"body": {"choices": [{"message": CHAT[4]}]}},
        },
        {"request": {"messages": CHAT[:4]}, "response": {"choices": [{"message": CHAT[4]}]}},
        {"request": {"body": {"messages": CHAT[:4]}}, "response": CHAT[4]["content"]},
        *(
            {"messages": CHAT[:4], name: answer}
            for name in ("response", "output", "completion", "answer", "message")
            for answer in (CHAT[4], [CHAT[4]], CHAT[4] | {"content": [{"text": SAID}]})
        ),
        *({"messages": CHAT[:4], "response": {name: SAID}} for name in ("content", "text")),
        *(
            {"messages": CHAT[:4], name: [SAID]}
            for name in ("response", "output", "completion")
        ),
        {"messages": CHAT[:4], "completion": {"choices": [{"message": CHAT[4]}]}},
        {"messages": CHAT[:4], "response": json.dumps(CHAT[4])},
    ],
)
def test_logged_requests_are_read(read, row):
    """A logged request and its answer are read, however the log nests them."""
    (request,) = read(row)
    *_, turn = read({"messages": CHAT})
    assert (request.keys, request.output_keys) == (turn.keys, turn.output_keys)


@pytest.mark.parametrize("text", ['{"city": "Paris"}', "[1, 2]", '[{"city": "Paris"}]'])
def test_an_answer_in_json_is_a_text(read, text):
    """JSON that a model was asked for is its answer, and no response with one inside."""
    logged = [read({"prompt": "where", name: text})[0] for name in ("response", "completion")]
    assert logged[0].output_keys == logged[1].output_keys != ()


@pytest.mark.parametrize(
    ("rest", "options", "hint"),
    [
        ({"response": {"reply": SAID}}, {}, "FIELD names it, such as answer=response.reply"),
        ({"response": {"generations": [[{"text": SAID}]]}}, {}, "=response.generations"),
        (
            {"final_output": [CHAT[4], CHAT[4]]},
            {},
            "answer=FIELD names it, such as answer=final",
        ),
        ({"reply": SAID}, {"answer": "said"}, "answer=said has none, such as answer=reply"),
    ],
)
def test_answers_that_are_not_found_are_noted(tmp_path, rest, options, hint):
    """A field that looks like an answer and is not read as one is named, with the option."""
    rows = [{"messages": CHAT[:4], "usage": {"prompt_tokens": 40}} | rest] * 2
    workload = Chat(write_rows(tmp_path / "c.jsonl", *rows), rate=1, **options)
    assert [request.output_keys for request in workload] == [(), ()]
    (note,) = (note for note in workload.notes if "not found" in note)
    assert note.startswith("rows whose answer was not found: 2 (answer=")
    assert hint in note


@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"response": {"id": "call", "output_tokens": 9}, "response_format": {"type": "text"}},
        {"message": CHAT[3]},
    ],
)
def test_rows_without_an_answer_are_told_so(tmp_path, rest):
    """Where no row has an answer, none is said to differ in length, and none is missed."""
    row = {"messages": CHAT[:4], "usage": {"prompt_tokens": 40}} | rest
    workload = Chat(write_rows(tmp_path / "c.jsonl", row), rate=1)
    assert [request.output_keys for request in workload] == [()]
    assert not any("not found" in note for note in workload.notes)
    assert any("in 1 rows without an answer" in note for note in workload.notes)


USED = {"prompt_tokens": 2, "completion_tokens": 8}


@pytest.mark.parametrize(
    ("row", "output"),
    [
        ({"prompt": "one two"}, 5),
        ({"prompt": "one two", "output_tokens": 9}, 9),
        ({"request": {"prompt": "one two"}, "output_tokens": 9}, 9),
        ({"prompt": "one two", "response": {"output_tokens": 9}}, 9),
        ({"prompt": "one two", "completion": "three four"}, 2),
        ({"prompt": "one two", "choices": [{"text": "three"}]}, 1),
        ({"prompt": "one two", "choices": [], "usage": {"completion_tokens": 8}}, 8),
        ({"prompt": "one two", "choices": [{"message": {"content": None}}]}, 5),
        ({"prompt": "one two", "messages": None}, 5),
        ({"prompt": "one two", "conversations": None}, 5),
        ({"prompt": "one two", "response": {"usage": {}}, "usage": USED}, 8),
        ({"prompt": "one two", "output": [{"content": [{"refusal": "three four"}]}]}, 2),
    ],
)
def test_prompts_are_read(read, row, output):
    """The output of a prompt is as long as its answer, as recorded, or as the option."""
    (request,) = read(row, output_tokens=5)
    assert (request.prompt_tokens, request.output_tokens, request.id) == (2, output, 0)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("caching", 1), ("cacheable", 2), ("12345", 2), ("a b,c\n\n", 5), ("日本", 2)],
)
def test_the_tokens_of_words_are_estimated(read, text, count):
    """Words count a token per seven letters, numbers per three digits, signs one each."""
    (request,) = read({"prompt": f"x {text}"})
    assert request.prompt_tokens == 1 + count


def test_parts_and_tool_calls_are_text(read):
    """Text parts are joined, tool calls are part of the output, and tools of the prompt."""
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a yawl?"}]
    calls = [{"function": {"name": "look", "arguments": "{}"}}]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    (request,) = read({"messages": [{"role": "user", "content": parts}, answer]})
    (plain,) = read({"messages": [CHAT[1], CHAT[2]]})
    assert request.keys == plain.keys
    assert request.output_tokens == len(request.output_keys) > 10
    (tools,) = read({"messages": [CHAT[1]], "tools": [{"name": "look"}]})
    assert tools.prompt_tokens > request.prompt_tokens


def test_times_are_read(read):
    """Times are read from any known field or the named one, relative to the first row."""
    rows = [{"prompt": "a", "created": 1000}, {"prompt": "b", "created": 1001}]
    assert [request.arrival for request in read(*rows)] == [0, SECOND]
    rows = [
        {"body": {"prompt": "a"}, "response": {"created": t, "choices": []}} for t in (5, 9)
    ]
    assert [request.arrival for request in read(*rows, unit="ms")] == [0, 4 * 10**6]
    rows = [{"prompt": "a", "timestamp": f"2024-05-10T00:00:0{n}Z"} for n in range(2)]
    assert [request.arrival for request in read(*rows)] == [0, SECOND]
    rows = [{"prompt": "a", "at": 3}, {"prompt": "b", "at": 5}]
    assert [request.arrival for request in read(*rows, time="at")] == [0, 2 * SECOND]


@pytest.mark.parametrize(("name", "options"), [("time", {}), ("hour", {"time": "hour"})])
def test_a_date_and_a_time_of_day_are_one_time(tmp_path, name, options):
    """The time of a row counts from its date, and neither is a field that is not read."""
    days = ((9, "23:59:59"), (10, "0:00:01"))
    rows = [{"prompt": "a", "date": f"2024-05-{day:02}", name: time} for day, time in days]
    workload = Chat(write_rows(tmp_path / "l.jsonl", *rows), **options)
    assert [request.arrival for request in workload] == [0, 2 * SECOND]
    assert f"times are 'date' and {name!r} together" in workload.notes
    assert not any("not read" in note for note in workload.notes)


def test_rows_without_times_arrive_at_a_rate(read):
    """Rows without times arrive at random at `rate`, or all at once without it.

    The times are equal for equal seeds.
    """
    rows = [{"prompt": str(n)} for n in range(400)]
    times = [request.arrival for request in read(*rows, rate=4)]
    assert 80 < times[-1] / SECOND < 120
    assert times == [request.arrival for request in read(*rows, rate=4)]
    assert times != [request.arrival for request in read(*rows, rate=4, seed=1)]
    assert {request.arrival for request in read(*rows)} == {0}


def test_notes_name_estimates_and_missing_values(tmp_path):
    """After a reading the notes name estimates and missing times and answers."""
    workload = Chat(
        write_rows(tmp_path / "c.jsonl", {"prompt": "a"}, {"prompt": "b"}), tokens="bytes"
    )
    assert list(workload.notes) == []
    assert len([*islice(WorkloadSample(workload, limit=1), 1)]) == 1
    assert len(workload.notes) == 3
    assert len(list(workload)) == 2
    estimate, times, outputs = workload.notes
    assert "tokens are bytes" in estimate
    assert "rate=PER_SECOND" in times
    assert "without an answer: 2, each of which is said to generate output_tokens=0" in outputs


def test_notes_are_printed(tmp_path, capsys):
    """A command prints the notes on stderr, and only JSON on stdout."""
    pytest.importorskip("kvcore_lab")  # which has the command
    path = write_rows(tmp_path / "c.jsonl", {"messages": CHAT})
    assert main.run(["compare", str(path), "--eviction", "lru", "--blocks", "9", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["workload"]["name"] == "chat"
    assert "kvcore: chat: tokens are pieces of words" in printed.err


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": 5}, r"field 'prompt': expected a text, got 5"),
        ({"prompt": " "}, r"field 'prompt': expected at least one token"),
        ({"messages": []}, r"field 'messages': expected at least one message"),
        ({"messages": ["hi"]}, r"field 'messages\[0\]': expected an object"),
        ({"messages": [{"content": ""}]}, r"field 'messages\[0\].role': expected a text"),
        (
            {"body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}},
            r"field 'body.messages\[0\].content\[0\]': expected a part with a text",
        ),
        ({"conversations": [{"from": "gpt"}]}, r"field 'conversations\[0\].value'"),
        ({"prompt": "a", "output_tokens": -1}, "field 'output_tokens': expected a whole"),
    ],
)
def test_bad_rows_are_named(read, row, complaint):
    """A row that cannot be used raises InputError with file, line and field."""
    with pytest.raises(InputError, match=rf"chats\.jsonl:1: {complaint}"):
        read(row)


@pytest.mark.parametrize("place", ["content", "tool_calls", "tools"])
def test_values_nested_too_deep_are_refused(read, place):
    """Values nested more than 250 deep raise InputError with file and line."""
    deep = []
    for _ in range(300):
        deep = [deep]
    message = {"role": "user", "content": "hi"}
    row = {"messages": [message], "usage": {"prompt_tokens": 1}}
    (row if place == "tools" else message)[place] = deep
    with pytest.raises(InputError, match=r"chats\.jsonl:1: .* up to 250 deep"):
        read(row)


@pytest.mark.parametrize(
    ("times", "options", "complaint"),
    [
        ([2, 1], {"strict": True}, "2: field 'time': .*sort the rows"),
        ([2, 3, None], {"strict": True}, "3: field 'time': expected a time, as the first"),
        ([None, None, 2], {"strict": True}, "3: field 'time': expected none, as in the first"),
        ([2], {"rate": 3}, r"1: it has times \('time'\): leave out rate=3"),
        ([2], {"tokenizer": "gone"}, "tokenizer=gone: there is no such folder"),
        ([2], {"tokenizer": "/dev"}, "tokenizer=/dev: it has no tokenizer.json"),
    ],
)
def test_unsorted_times_and_wrong_options_are_refused(read, times, options, complaint):
    """Unsorted or partly missing times, a rate beside times and bad tokenizers are refused."""
    with pytest.raises(InputError, match=complaint):
        read(*({"prompt": "a", "time": time} for time in times), **options)


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"REQUEST","id":1,"t":0,"prompt":1,"output":1,"keys":[]}',
        b'{"id":1,"time":0,"prompt":5,"hashes":[]}',
        b'["prompt"]',
        b"prompt,output",
    ],
)
def test_other_files_are_no_chats(line):
    """Lines of other formats are not recognised, even with a field called "prompt"."""
    assert not Chat.recognises(line)


def test_answers_are_hit_by_the_next_turn(tmp_path):
    """In a simulated server the next turn hits the blocks of the answer before it."""
    workload = Chat(write_rows(tmp_path / "c.jsonl", {"messages": CHAT}), key_tokens=1)
    cache = KVCache(500, 1, key_tokens=1)
    simulate(workload, cache=cache, latency=Linear())
    first, second = workload
    # The last generated token has no K/V, and so no block, yet.
    assert cache.stats.hit_blocks == first.prompt_tokens + first.output_tokens - 1
    assert cache.stats.requests == 2
    assert second.prompt_tokens > cache.stats.hit_blocks


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }} <end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """Return a function that saves a small tokenizer, with a chat template or without."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")

    def save(template):
        words = {text for m in CHAT for text in m["content"].split()}
        marks = ["<unk>", "<s>", "<system>", "<user>", "<assistant>", "<end>"]
        known = {word: index for index, word in enumerate([*marks, *sorted(words)])}
        unknown = {"unk_token": marks[0]}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, **unknown))
        model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=model, **unknown, additional_special_tokens=marks[2:]
        )
        fast.chat_template = template
        fast.save_pretrained(tmp_path / "tokenizer")
        return tmp_path / "tokenizer"

    return save


def test_a_tokenizer_gives_tokens_and_the_chat_template(read, folder):
    """With a tokenizer, tokens are the model's and messages are in its chat template."""
    path = folder(TEMPLATE)
    first, second = read({"messages": CHAT}, tokenizer=path)
    assert first.prompt_tokens == sum(len(m["content"].split()) + 2 for m in CHAT[:2]) + 1
    assert first.output_tokens == 10
    begun = [*first.keys, *first.output_keys]
    assert second.keys[: len(begun)] == begun
    (prompt,) = read({"prompt": "What is a yawl?"}, tokenizer=path)
    assert prompt.prompt_tokens == 5


def test_parts_of_a_templated_prompt_share_its_tokens(read, folder):
    """The parts of a templated prompt divide its tokens by the lengths of the messages."""
    (request,) = read({"messages": CHAT[:4]}, tokenizer=folder(TEMPLATE))
    ends = [part.end for part in request.parts]
    assert ends == sorted(ends)
    assert ends[-1] == request.prompt_tokens
    lengths = [len(f"{m['role']}\n{m['content']}") for m in CHAT[:4]]
    assert ends[0] == request.prompt_tokens * lengths[0] // sum(lengths)


def test_turns_extend_each_other_without_a_chat_template(read, folder):
    """Without a chat template each turn still begins with the turn before and its answer."""
    first, second = read({"messages": CHAT}, tokenizer=folder(None))
    begun = [*first.keys, *first.output_keys]
    assert second.keys[: len(begun)] == begun


def test_an_error_of_a_chat_template_is_reported(read, folder):
    """An error of a chat template raises InputError with the file and line."""
    path = folder("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        InputError, match=r"jsonl:1: the tokenizer's chat template fails: roles"
    ):
        read({"messages": CHAT}, tokenizer=path)


def test_the_digest_depends_on_the_files_of_the_tokenizer(tmp_path, folder):
    """The digest depends on the tokenizer's files, and no code of its folder is run."""
    chats = write_rows(tmp_path / "c.jsonl", {"messages": CHAT})
    path = folder(TEMPLATE)
    digest = Chat(chats, tokenizer=path).digest
    assert digest != Chat(chats).digest
    (path / "chat_template.jinja").write_text("other")
    assert digest != Chat(chats, tokenizer=path).digest
    (path / "tok.py").write_text("raise SystemExit('run')\n")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["tok.Mine", None]}, "tokenizer_class": "Mine"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="transformers cannot read it"):
        list(Chat(chats, tokenizer=path))


def of_model(name, **more):
    """Return a row that was answered by a model."""
    return (
        {"messages": CHAT[:4], "response": {"role": "assistant", "content": SAID}}
        | more
        | {"model": name}
    )


def test_several_models_are_counted(tmp_path):
    """A note has the models with the most rows, and the option that takes one of them."""
    rows = [of_model(name) for name in "aabccccdde"] + [{"prompt": "of none"}]
    workload = Chat(write_rows(tmp_path / "c.jsonl", *rows), rate=1)
    assert len([*workload]) == 11
    (note,) = (note for note in workload.notes if "models" in note)
    assert note.startswith("rows are of 5 models: c (4), a (2), d (2) and 2 more, all read as")
    assert "only_model=NAME" in note
    assert workload.served_model == "c"


@pytest.mark.parametrize("request_in", [None, "request"])
def test_the_rows_of_one_model_are_read(tmp_path, request_in):
    """With `only_model` the rest is left out, ids stay those of the file, a note tells."""
    rows = [of_model(name) for name in "aba"]
    if request_in is not None:
        rows = [{request_in: {"messages": CHAT[:4]}, "model": name} for name in "aba"]
    path = write_rows(tmp_path / "c.jsonl", *rows)
    workload = Chat(path, rate=1, only_model="a")
    assert [request.id for request in workload] == [0, 2]
    assert "rows are of 2 models: a (2), b (1); those of a alone are read" in workload.notes
    assert workload.served_model == "a"
    assert workload.digest != Chat(path, rate=1).digest


def test_a_model_of_no_row_is_refused_by_those_that_are(tmp_path):
    """A model that no row names is an error, which has the models that are named."""
    path = write_rows(tmp_path / "c.jsonl", of_model("qwen3-32b"), of_model("llama"))
    with pytest.raises(InputError, match=r"'qwen'; there are: qwen3-32b \(1\), llama \(1\)"):
        list(Chat(path, only_model="qwen"))
    write_rows(path, {"model": "qwen", "messages": []}, of_model("llama"))
    with pytest.raises(InputError, match="expected at least one message"):
        list(Chat(path, only_model="qwen"))


def test_a_model_beside_the_request_keeps_prompts_apart(read):
    """Equal prompts of two models share nothing, also with the model beside a request."""
    first, second = read(*({"request": {"messages": CHAT[:4]}, "model": name} for name in "ab"))
    assert not {*first.keys} & {*second.keys}


@pytest.mark.parametrize(
    ("row", "options", "tenant"),
    [
        ({"tenant": "harbour"}, {}, "1"),
        ({"tenant": "harbour"}, {"tenant": "tenant"}, "harbour"),
        ({"tenant": 7}, {"tenant": "tenant"}, "7"),
        ({"user": "ann"}, {}, None),
        ({"user": "ann", "tenant": "harbour"}, {"tenant": "user"}, "ann"),
        ({"meta": {"org": "harbour"}}, {"tenant": "meta.org"}, "harbour"),
        ({"tenant": ""}, {}, None),
        ({"tenant": ["a"]}, {}, None),
        ({"user": "ann"}, {"tenant": "team"}, None),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_the_tenant_of_a_row_is_read(read, row, options, tenant, inside):
    """The tenant is the field `tenant` of a row or its request, or the one that is named.

    A user is none unless that is asked for, and a name that is not asked for is a number.
    """
    rows = {"request": {"messages": CHAT} | row} if inside else {"messages": CHAT} | row
    assert {request.tenant for request in read(rows, **options)} == {tenant}


def test_rows_without_the_tenant_that_is_named_are_counted(tmp_path):
    """A note counts the rows that lack the field that was named."""
    rows = [{"prompt": "a", "user": "ann"}, {"prompt": "b", "tenant": "x"}]
    rows += [{"prompt": "c", "user": None}]
    workload = Chat(write_rows(tmp_path / "c.jsonl", *rows), rate=1, tenant="user")
    assert [request.tenant for request in workload] == ["ann", None, None]
    assert "rows without tenant=user: 2" in workload.notes


@pytest.mark.parametrize("role", ["usage", "model", "isolate"])
def test_rows_without_a_field_that_is_named_are_counted(tmp_path, role):
    """A misspelt name of a usage, a model or what isolates prompts is noted."""
    path = write_rows(tmp_path / "c.jsonl", {"prompt": "a"}, {"prompt": "b"})
    workload = Chat(path, rate=1, **{role: "meta.usr"})
    assert len(list(workload)) == 2
    assert f"rows without {role}=meta.usr: 2" in workload.notes
