"""Files of other tools, session tables, and times: each kind with its right values by hand."""

import gzip
import json
import pickle
from itertools import permutations

import pytest

from kvcore.errors import InputError
from kvcore.plugins.manager import Plugins
from kvcore.workloads import checked, find_workload
from kvcore_plugins.workload import Lengths
from kvcore_plugins.workload.times import WINDOW
from kvcore_plugins.workload.usage import UNKNOWN_PROMPTS

SESSIONS = """\
session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms
a,0,0,0,300,40,250
a,0,1,340,60,40,50
b,120,0,0,200,10,80
a,0,2,440,100,40,0
b,120,1,210,90,50,0
"""


def read(tmp_path, text, name="rows", **options):
    """Write a file, recognise it as a user's is, and return its requests and its notes."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    workload = find_workload(str(path), Plugins())
    if options:
        workload = type(workload)(path, **options)
    requests = list(checked(workload))
    return requests, list(workload.notes)


def figures(requests):
    """Return what a simulation uses of requests: arrivals in ms, lengths, and waits in ms."""
    ids = {request.id: index for index, request in enumerate(requests)}
    return [
        (
            request.arrival / 10**6,
            request.prompt_tokens,
            request.output_tokens,
            None if request.after is None else ids[request.after],
            request.think_time / 10**6,
        )
        for request in requests
    ]


SESSION_FIGURES = [
    (0, 300, 40, None, 0),
    (120, 200, 10, None, 0),
    (200, 300, 50, 1, 80),
    (250, 400, 40, 0, 250),
    (300, 540, 40, 3, 50),
]
"""By hand: prompts of `prefix_len + input_len`, each after the answer and the wait before."""


def renamed(text, **names):
    """Return a table with other names of columns."""
    header, _, rows = text.partition("\n")
    return ",".join(names.get(name, name) for name in header.split(",")) + "\n" + rows


def permuted(text, order):
    """Return a table with its columns in another order."""
    lines = [line.split(",") for line in text.splitlines()]
    return "".join(",".join(cells[n] for n in order) + "\n" for cells in lines)


def in_seconds(text):
    """Return the table of sessions with its times in seconds, by the names of its columns."""
    header, *rows = text.splitlines()
    header = header.replace("arrival_time", "arrival_time_s").replace("after_ms", "after_s")
    cells = [row.split(",") for row in rows]
    for row in cells:
        row[1], row[6] = str(int(row[1]) / 1000), str(int(row[6]) / 1000)
    return "\n".join([header, *map(",".join, cells)])


def sessions_table():
    """Return the session table in many forms that all mean the same."""
    header, *rows = SESSIONS.splitlines()
    return {
        "as published": SESSIONS,
        "rounds apart": "\n".join([header, *(rows[n] for n in (4, 3, 2, 1, 0))]),
        "columns permuted": permuted(SESSIONS, (6, 2, 0, 5, 3, 1, 4)),
        "other names": renamed(
            SESSIONS, session_id="conversation", arrival_time="start_ms", round_idx="turn",
            prefix_len="history_tokens", input_len="new_tokens", output_len="output_tokens",
            tool_wait_after_ms="wait_after_ms",
        ),
        "sessions by id": renamed(SESSIONS, session_id="id"),
        "seconds by name": in_seconds(SESSIONS),
        "CRLF": SESSIONS.replace("\n", "\r\n"),
        "byte order mark": b"\xef\xbb\xbf" + SESSIONS.encode(),
        "gzip": gzip.compress(SESSIONS.encode()),
        "tabs": SESSIONS.replace(",", "\t"),
        "a constant later": SESSIONS.replace("a,0,", "a,77000,").replace(",120,", ",77120,"),
    }  # fmt: skip


@pytest.mark.parametrize("form", sessions_table())
def test_session_tables_with_increments(tmp_path, form):
    """A prompt is its prefix and its input, rounds are a closed loop, waits have their unit."""
    requests, notes = read(tmp_path, sessions_table()[form])
    assert figures(requests) == SESSION_FIGURES
    assert sum(request.prompt_tokens for request in requests) == 1_740
    assert any("together" in note for note in notes)


def test_a_prefix_shares_its_full_blocks(tmp_path):
    """A round has the keys of the full blocks of its prefix, answers included, and new ones."""
    requests, _ = read(tmp_path, SESSIONS)
    first, _, _, second, third = requests
    # 340 tokens of prompt and answer fill 21 blocks of 16.
    assert len(first.keys) == 18
    assert len(first.output_keys) == 3
    assert [*first.keys, *first.output_keys] == list(second.keys)[:21]
    assert [*second.keys, *second.output_keys][:27] == list(third.keys)[:27]
    # Nothing else is shared: the last prompts of the two sessions have all keys.
    assert len({key for request in requests for key in request.keys}) == 540 // 16 + 300 // 16


def test_a_compacted_context_shares_what_it_kept(tmp_path):
    """A shorter prefix than the context before shares its beginning alone."""
    rows = "session,turn,prefix_len,input_len,output_len\ns,0,0,160,16\ns,1,40,100,8\n"
    (first, second), notes = read(tmp_path, rows)
    assert second.prompt_tokens == 140
    assert list(second.keys)[:2] == list(first.keys)[:2]
    assert not set(list(second.keys)[2:]) & {*first.keys, *first.output_keys}
    assert any("no times" in note for note in notes)


def test_a_prefix_may_be_part_of_the_input(tmp_path):
    """Inputs that hold their prefix in every row are not added to it."""
    rows = "time,session,turn,prefix_len,prompt_tokens,output_tokens\n"
    turns = ["0,s,0,0,100,20\n", "1,s,1,120,150,30\n", "5,s,2,180,260,10\n"]
    for order in permutations(turns):
        requests, notes = read(tmp_path, rows + "".join(order))
        assert [request.prompt_tokens for request in requests] == [100, 150, 260]
        assert [request.think_time // 10**9 for request in requests] == [0, 1, 4]
        assert not any("together" in note for note in notes)


def test_new_tokens_continue_the_context_of_their_session(tmp_path):
    """Where only new tokens are given, the prompt is all before them and these."""
    rows = "time,conversation_id,turn,new_tokens,output_tokens\n"
    rows += "0,s,1,100,20\n3,s,2,30,20\n4,u,1,50,5\n"
    requests, notes = read(tmp_path, rows)
    assert [request.prompt_tokens for request in requests] == [100, 150, 50]
    assert "prompts are the context of their session and 'new_tokens'" in notes


def aiperf(number, session, turn, start, end, tokens, output, **change):
    """Return a line of AIPerf's `profile_export.jsonl`."""
    return {
        "metadata": {
            "session_num": number, "x_correlation_id": session, "conversation_id": "c0",
            "turn_index": turn, "request_start_ns": start, "request_ack_ns": start + 10,
            "request_end_ns": end, "benchmark_phase": "profiling", "was_cancelled": False,
        },
        "metrics": {
            "input_sequence_length": {"value": tokens, "unit": "tokens"},
            "output_token_count": {"value": output - 2, "unit": "tokens"},
            "output_sequence_length": {"value": output, "unit": "tokens"},
            "request_latency": {"value": (end - start) / 1e6, "unit": "ms"},
        },
        "error": None,
    } | change  # fmt: skip


NS = 1_759_813_207_532_900_363
FAILED = {"metrics": {"error_isl": {"value": 5, "unit": "tokens"}}, "error": {"code": 499}}


def guidellm(start, tokens, output):
    """Return a request of GuideLLM's report."""
    return {
        "request_id": f"r{start}", "output": "a text", "prompt_tokens": tokens,
        "output_tokens": output, "request_start_time": start, "request_end_time": start + 2,
        "info": {"timings": {"request_start": start, "request_end": start + 2}},
        "input_metrics": {"text_tokens": tokens}, "output_metrics": {"text_tokens": output},
    }  # fmt: skip


def span(start, tokens, output, **change):
    """Return a span of OTLP's JSON."""
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    if tokens is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": tokens,
            "gen_ai.usage.output_tokens": output,
        }
    pairs = [
        {"key": key, "value": {"stringValue": value} if isinstance(value, str)
         else {"intValue": str(value)}}
        for key, value in attributes.items()
    ]  # fmt: skip
    times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 10**9)}
    return {"name": "chat m", **times, "attributes": pairs, "status": {}} | change


def otlp(*spans):
    """Return a line of an OTLP file exporter."""
    return {
        "resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [*spans]}]}]
    }


def jsonl(*rows):
    """Return rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


LATER = NS + 500_000_000
TOOLS = {
    "AIPerf": jsonl(
        aiperf(1, "b", 0, LATER, LATER + 10**9, 220, 30),
        aiperf(0, "a", 0, NS, NS + 2 * 10**9, 110, 20),
    ),
    "AIPerf, the first row failed": jsonl(
        aiperf(2, "x", 0, NS + 5, NS + 6, 5, 0, **FAILED),
        aiperf(0, "a", 0, NS, NS + 2 * 10**9, 110, 20),
        aiperf(1, "b", 0, LATER, LATER + 10**9, 220, 30),
    ),
    "GuideLLM": json.dumps({"metadata": {"version": 2}, "config": {}, "benchmarks": [
        {"requests": {"successful": [guidellm(8.5, 220, 30), guidellm(8.0, 110, 20)],
                      "errored": [guidellm(8.1, 7, 0)], "incomplete": [guidellm(9.0, 9, 3)]}},
    ]}),
    "GuideLLM, indented": json.dumps({"benchmarks": [
        {"requests": {"successful": [guidellm(8.0, 110, 20)], "errored": []}},
        {"requests": {"successful": [guidellm(8.5, 220, 30)], "errored": []}},
    ]}, indent=1),
    "inference-perf": json.dumps([
        {"start_time": start, "end_time": start + 1, "request": '{"prompt": "text"}',
         "response": "...", "info": {"input_tokens": tokens, "response_metrics": {
             "output_tokens": output, "output_token_times": [0.5]}},
         "error": error}
        for start, tokens, output, error in [
            (27.5, 110, 20, None), (27.6, 3, 0, {"error_type": "Timeout"}),
            (28.0, 220, 30, None)]
    ], indent=2),
    "OpenTelemetry": jsonl(
        otlp(span(LATER, 220, 30), span(NS + 7, None, None)),
        otlp(span(NS, 110, 20), span(NS + 9, 8, 0, status={"code": 2})),
    ),
    "spans as objects": jsonl(*(
        {"name": "chat", "start_time": start, "attributes": {
            "gen_ai.usage.input_tokens": tokens, "gen_ai.usage.output_tokens": output}}
        for start, tokens, output in [
            ("2026-01-05T10:00:00.500Z", 220, 30), ("2026-01-05T12:00:00+02:00", 110, 20)]
    )),
    "LLMServingSim": jsonl(
        {"input_toks": 110, "output_toks": 20, "arrival_time_ns": 3_000},
        {"input_toks": 220, "output_toks": 30, "arrival_time_ns": 500_003_000},
    ),
    "OpenAI's batches": jsonl(*(
        {"id": f"b{n}", "custom_id": f"c{n}", "error": None, "response": {
            "status_code": code, "body": {"created": time, "choices": [], "usage": {
                "prompt_tokens": tokens, "completion_tokens": output, "total_tokens": 9}}}}
        for n, (time, code, tokens, output) in enumerate([
            (1_763_600_000.5, 200, 220, 30), (1_763_600_000.0, 200, 110, 20),
            (1_763_600_000.2, 429, 5, 5)])
    )),
    "plain rows": jsonl(
        {"arrival": 2.0, "prompt_tokens": 110, "output_tokens": 20},
        {"arrival": 2.5, "prompt_tokens": 220, "output_tokens": 30},
    ),
    "a spend log": jsonl(*(
        {"startTime": f"2026-01-05 10:00:{time}", "endTime": "2026-01-05 10:01:00",
         "prompt_tokens": tokens, "completion_tokens": output, "messages": {}, "user": "u",
         "status": status}
        for time, tokens, output, status in [
            ("01", 110, 20, "success"), ("01.25", 4, 0, "failure"),
            ("01.5", 220, 30, "success")]
    )),
    "GuideLLM's data": jsonl(
        {"timestamp": 1234500.0, "input_length": 110, "output_length": 20},
        {"timestamp": 1234500.5, "input_length": 220, "output_length": 30},
    ),
    "vLLM's result": json.dumps({
        "model_id": "m", "request_rate": 2.0, "input_lens": [220, 9, 110],
        "output_lens": [30, 0, 20], "start_times": [7.5, 7.1, 7.0], "errors": ["", "gone", ""],
    }),
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_files_of_other_tools(tmp_path, tool):
    """Requests of other tools' files are read by start, without failed ones."""
    requests, _ = read(tmp_path, TOOLS[tool])
    assert figures(requests) == [(0, 110, 20, None, 0), (500, 220, 30, None, 0)]


@pytest.mark.parametrize(
    ("tool", "note"),
    [
        ("AIPerf, the first row failed", "failed requests left out: 1"),
        ("GuideLLM", "failed requests left out: 2"),
        ("inference-perf", "failed requests left out: 1"),
        ("OpenTelemetry", "failed requests left out: 1"),
        ("OpenTelemetry", "rows without lengths left out, such as spans of tools: 1"),
        ("OpenAI's batches", "failed requests left out: 1"),
        ("a spend log", "failed requests left out: 1"),
        (
            "AIPerf",
            "rows that stood after later ones, sorted by 'metadata.request_start_ns': 1",
        ),
    ],
)
def test_what_is_left_out_is_noted(tmp_path, tool, note):
    """Failed requests, spans of tools and sorted rows are counted in notes."""
    assert any(told.startswith(note) for told in read(tmp_path, TOOLS[tool])[1])


@pytest.mark.parametrize(
    ("column", "failed", "done"),
    [
        ("status", 503.0, 200.0),
        ("status_code", 500.0, 200.0),
        ("success", 0.0, 1.0),
        ("is_error", 1.0, 0.0),
        ("error", "boom", "nan"),
        ("status", {"code": 2}, {"code": 202}),
    ],
)
def test_a_column_that_lacks_values_tells_what_failed(tmp_path, column, failed, done):
    """Numbers with a point, as tables write them beside missing values, mean the same."""
    row = {"arrival": 2.0, "prompt_tokens": 110, "output_tokens": 20}
    values = failed, done, None
    texts = [str(value) if type(value) is float else value for value in values]
    for cells in (values, texts):
        requests, notes = read(tmp_path, jsonl(*(row | {column: cell} for cell in cells)))
        assert len(requests) == 2
        assert any(note.startswith("failed requests left out: 1 ") for note in notes)


@pytest.mark.parametrize("column", ["status", "status_code"])
def test_a_status_of_endless_digits_is_no_failure(tmp_path, column):
    """A status that is no number of HTTP leaves nothing out, however many digits it has."""
    row = {"arrival": 2.0, "prompt_tokens": 110, "output_tokens": 20}
    requests, _ = read(tmp_path, jsonl(row | {column: "200"}, row | {column: "5" * 5000}))
    assert len(requests) == 2


def test_turns_of_aiperf_are_a_closed_loop(tmp_path):
    """A turn is sent after the answer before it, and the recorded time between the two."""
    rows = jsonl(
        aiperf(0, "a", 0, NS, NS + 2 * 10**9, 100, 20),
        aiperf(0, "a", 1, NS + 2_750_000_000, NS + 4 * 10**9, 160, 20),
        aiperf(1, "b", 0, NS + 10**9, NS + 3 * 10**9, 100, 20),
    )
    assert figures(read(tmp_path, rows)[0]) == [
        (0, 100, 20, None, 0), (1_000, 100, 20, None, 0), (2_750, 160, 20, 0, 750),
    ]  # fmt: skip


def test_turns_of_aiperf_traces_continue_their_session(tmp_path):
    """A turn without ids has all that its session said before, and a delay in ms."""
    rows = jsonl(
        {"session_id": "a", "input_length": 300, "output_length": 40},
        {"session_id": "b", "input_length": 50, "output_length": 5},
        {"session_id": "a", "delay": 200, "input_length": 150, "output_length": 20},
    )
    requests, notes = read(tmp_path, rows)
    assert figures(requests) == [
        (0, 300, 40, None, 0), (0, 50, 5, None, 0), (200, 490, 20, 0, 200),
    ]  # fmt: skip
    assert "the table has no times: all sessions begin at once; rate= spreads them" in notes


def test_conversations_of_wildchat_are_chats(tmp_path):
    """A `conversation` of messages is read as chats are: a request for each answer."""
    turns = [("user", "Why do ships float?"), ("assistant", "They are light."),
             ("user", "And stones?"), ("assistant", "They sink.")]  # fmt: skip
    messages = [{"role": role, "content": text, "toxic": False} for role, text in turns]
    rows = jsonl(
        {"conversation_hash": "x", "model": "m", "timestamp": "2023-04-09T00:02:53+00:00",
         "conversation": messages, "turn": 2},
        {"conversation_hash": "y", "model": "m", "timestamp": "2023-04-09T00:02:54+00:00",
         "conversation": messages[:2], "turn": 1},
    )  # fmt: skip
    requests, _ = read(tmp_path, rows)
    assert [request.after for request in requests if request.after] == ["0/0"]
    assert sorted({request.arrival for request in requests}) == [0, 10**9]


def test_rows_that_are_left_out_may_lack_a_prefix(tmp_path):
    """A failed row among the first ones is left out, whatever it lacks."""
    text = "session,time_s,input,output,prefix_len,status\n"
    rows = "a,0,10,5,0,ok\na,1,10,,,error\na,2,30,5,15,ok\n"
    requests, notes = read(tmp_path, text + rows)
    assert [request.after for request in requests] == [None, 0]
    assert notes[0] == "failed requests left out: 1"


@pytest.mark.parametrize("columns", ["start_ms,end", "start_ms,end_ms", "start,end,wait_ms"])
def test_an_end_has_the_unit_of_the_start(tmp_path, columns):
    """The time between an answer and the next turn is in one unit, if one name tells it."""
    text = f"session,turn,input,output,{columns}\na,0,5,3,0,2000\na,1,5,3,5000,6000\n"
    (_, second), _ = read(tmp_path, text)
    assert second.think_time == 3 * 10**9


def test_token_ids_are_keys(tmp_path):
    """Rows of LLMServingSim with token ids share blocks of equal beginnings, answers too."""
    ids, answer = [*range(40)], [7] * 10
    row = {"input_toks": 40, "output_toks": 10, "arrival_time_ns": 0, "input_tok_ids": ids}
    more = {"input_toks": 90, "output_toks": 1, "arrival_time_ns": 9}
    rows = jsonl(
        row | {"output_tok_ids": answer}, more | {"input_tok_ids": [*ids, *answer, *ids]}
    )
    (first, second), _ = read(tmp_path, rows)
    assert len(first.keys) == 2
    assert [*first.keys, *first.output_keys] == list(second.keys)[:3]


def test_ids_of_a_part_of_a_prompt_are_keys_of_that_part(tmp_path):
    """An answer to a prompt with fewer ids than tokens has no keys: its place is unknown."""
    row = {"output_toks": 32, "arrival_time_ns": 0, "input_tok_ids": [*range(32)]}
    rows = [row | {"input_toks": count, "output_tok_ids": [*range(32)]} for count in (64, 33)]
    requests, _ = read(tmp_path, jsonl(*rows))
    assert [(len(r.keys), len(r.output_keys)) for r in requests] == [(2, 0), (2, 0)]


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ({"input_tok_ids": [1.5]}, "'input_tok_ids': expected a list of token ids, got"),
        ({"input_tok_ids": [[1]]}, "'input_tok_ids': expected a list of token ids, got"),
        ({"input_tok_ids": [1], "output_tok_ids": 7}, "'output_tok_ids': expected a list of"),
        ({"input_tok_ids": [1] * 41}, "'input_tok_ids': expected at most 40 token ids"),
    ],
)
def test_token_ids_that_are_none_are_named(tmp_path, ids, complaint):
    """Ids that are no tokens, or more than the prompt has, raise InputError with their row."""
    row = {"input_toks": 40, "output_toks": 10, "arrival_time_ns": 0}
    with pytest.raises(InputError, match=f"rows:1: field {complaint}"):
        read(tmp_path, jsonl(row | ids))


def test_sessions_of_llmservingsim_are_closed_loops(tmp_path):
    """Requests of a session follow one another after the tool's time, its beginning at its."""
    session = {"session_id": "s", "arrival_time_ns": 5_000_000, "sub_requests": [
        {"input_toks": 100, "output_toks": 9, "tool_duration_ns": 2_000_000},
        {"input_toks": 150, "output_toks": 9, "tool_duration_ns": 0},
    ]}  # fmt: skip
    alone = {"input_toks": 70, "output_toks": 9, "arrival_time_ns": 6_000_000}
    assert figures(read(tmp_path, jsonl(session, alone))[0]) == [
        (0, 100, 9, None, 0), (1, 70, 9, None, 0), (2, 150, 9, 0, 2),
    ]  # fmt: skip


TIMES = {
    "ms by name": ("timestamp_ms", "1000", "1500"),
    "us by name": ("created_at_us", "1000000", "1500000"),
    "ns by name": ("startTimeUnixNano", "1763600000000000000", "1763600000500000000"),
    "ms in camel case": ("arrivalTimeMs", "4", "504"),
    "unit in brackets": ("Time (ms)", "4", "504"),
    "seconds by name": ("t_s", "0", "0.5"),
    "ts": ("ts", "1763600000.25", "1763600000.75"),
    "epoch in ms": ("startTime", "1763600000000", "1763600000500"),
    "epoch in us": ("timestamp", "1763600000000000", "1763600000500000"),
    "epoch in ns": ("time", "1763600000000000001", "1763600000500000001"),
    "ISO with a zone": ("@timestamp", "2026-01-05T10:00:00.9Z", "2026-01-05T12:00:01.4+02:00"),
    "ISO without a zone": ("request_time", "2026-01-05 10:00:00", "2026-01-05 10:00:00.5"),
    "negative": ("time", "-2.25", "-1.75"),
}


@pytest.mark.parametrize("rows", [(0, 1), (1, 0)])
@pytest.mark.parametrize("form", TIMES)
def test_times_have_the_unit_of_their_name_or_size(tmp_path, form, rows):
    """Half a second is half a second in each unit, in either order of the rows."""
    name, *times = TIMES[form]
    lengths = ["110,20", "220,30"]
    text = f"{name},input_tokens,output_tokens\n"
    text += "".join(f"{times[n]},{lengths[n]}\n" for n in rows)
    requests, notes = read(tmp_path, text)
    assert figures(requests) == [(0, 110, 20, None, 0), (500, 220, 30, None, 0)]
    assert any("stood after later ones" in note for note in notes) is (rows == (1, 0))
    guessed = form in {"ts", "epoch in ms", "epoch in us", "epoch in ns", "negative"}
    assert any(": unit= says" in note for note in notes) is guessed


def test_the_finest_of_several_times_is_taken(tmp_path):
    """Of times in one row, the one with the smallest steps is the arrival."""
    rows = jsonl(
        {"created": 1_763_600_001, "ts": "2025-11-20T00:53:21.250Z", "input": 1, "output": 1},
        {"created": 1_763_600_001, "ts": "2025-11-20T00:53:21.875Z", "input": 1, "output": 1},
    )
    requests, _ = read(tmp_path, rows)
    assert [request.arrival // 10**6 for request in requests] == [0, 625]


def test_an_implausible_span_is_noted(tmp_path):
    """Times that span years for a few rows are noted with the option of their unit."""
    _, notes = read(tmp_path, "time,input,output\n0,1,1\n208000000,1,1\n")
    assert any("span 2,407.4 days for 2 rows" in note and "unit=" in note for note in notes)


def test_rows_may_be_late(tmp_path):
    """After the first rows a row may be late by as many places as are read ahead, no more."""
    times = [*range(2 * WINDOW), WINDOW + 1, *range(2 * WINDOW, 4 * WINDOW)]
    text = "time,input,output\n" + "".join(f"{time},1,1\n" for time in times)
    requests, notes = read(tmp_path, text)
    assert [request.arrival // 10**9 for request in requests] == sorted(times)
    assert "rows that stood after later ones, sorted by 'time': 1" in notes
    times = [*range(3 * WINDOW), 1, *range(3 * WINDOW, 4 * WINDOW)]
    text = "time,input,output\n" + "".join(f"{time},1,1\n" for time in times)
    with pytest.raises(InputError, match=rf":{3 * WINDOW + 2}: field 'time': .*sort the rows"):
        read(tmp_path, text)


def test_a_request_that_generated_nothing_has_failed(tmp_path):
    """Rows without a generated token are left out where others have some, with a note."""
    text = "time,input,output\n0,5,3\n1,6,0\n2,7,4\n"
    requests, notes = read(tmp_path, text)
    assert [request.prompt_tokens for request in requests] == [5, 7]
    assert "requests that generated nothing left out, as failed ones: 1" in notes
    requests, _ = read(tmp_path, text.replace(",3", ",0").replace(",4", ",0"))
    assert len(requests) == 3


def test_columns_that_change_the_meaning_are_named(tmp_path):
    """Columns that are not read, though they would change what a row means, are noted."""
    text = "time_s,input,output,reasoning_tokens,cache_salt,model\n0,5,3,1,x,m\n"
    _, notes = read(tmp_path, text)
    unread = "columns that are not read, and may change what a row means: "
    assert notes[1:] == [f"{unread}reasoning_tokens, cache_salt"]


def test_columns_of_sessions_are_not_read_without_one(tmp_path):
    """A prefix without a session is noted as not read, and refused if an option names it."""
    text = "time_s,input,output,prefix_len\n0,5,3,1\n"
    _, notes = read(tmp_path, text)
    unread = "columns that are not read, and may change what a row means: prefix_len"
    assert notes == [UNKNOWN_PROMPTS, unread]
    with pytest.raises(InputError, match=r"rows:1: prefix=prefix_len needs a session"):
        read(tmp_path, text, prefix="prefix_len")


@pytest.mark.parametrize("role", ["turn", "wait"])
def test_named_columns_of_nested_rows_close_the_loop(tmp_path, role):
    """Rows with objects are a closed loop if an option names the turn or the wait."""
    row = {"session": "a", "n": {"input_tokens": 5, "output_tokens": 3}}
    rows = jsonl(row | {"time": 0, "x": 0}, row | {"time": 1, "x": 1})
    (first, second), _ = read(tmp_path, rows, **{role: "x"})
    assert second.after == first.id


@pytest.mark.parametrize("rate", [None, 1])
def test_sessions_without_times_may_stand_in_any_order(tmp_path, rate):
    """Sessions without times are read whatever the order of their turns in the file."""
    turns = [("a", turn) for turn in range(300)]
    turns += [(f"s{n}", turn) for turn in range(2) for n in range(300)]
    rows = "".join(f"{session},{turn},5,3\n" for session, turn in turns)
    requests, notes = read(tmp_path, f"session,turn,input,output\n{rows}", rate=rate)
    assert len(requests) == 900
    assert sum(request.after is None for request in requests) == 301
    assert any("no times" in note for note in notes) is (rate is None)


def test_a_turn_comes_after_the_one_that_it_follows(tmp_path):
    """Of turns that arrive at one time the earlier one comes first, wherever it stands."""
    rows = "session,turn,wait_s,input,output\na,2,0,3,1\na,0,0,1,1\na,1,5,2,1\n"
    requests, _ = read(tmp_path, rows)
    assert [request.prompt_tokens for request in requests] == [1, 2, 3]
    assert [request.arrival // 10**9 for request in requests] == [0, 5, 5]


@pytest.mark.parametrize("wait", ["2023-11-16 18:15:46", "-1", "1e18", "soon"])
def test_a_wait_that_is_none_is_named(tmp_path, wait):
    """A wait that is a date, negative, no number or too long raises InputError."""
    text = f"session,time,input,output,wait_s\na,0,5,3,{wait}\n"
    with pytest.raises(InputError, match="rows:2: field 'wait_s': expected a time to wait"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("when,ctx,gen,who\n1,5,3,ann\n", "time=when,input=ctx,output=gen"),
        ("who,ctx,ts,output_tokens\nann,5,1,3\n", "time=ts,input=ctx,output=output_tokens"),
        (",when,ctx,gen\n0,2026-01-02,5,3\n", "time=when,input=ctx,output=gen"),
        ('{"at":1,"read":5,"made":3,"who":"ann"}\n', "time=at,input=read,output=made"),
        (
            '{"nr":1,"ptok":30,"when":"2026-01-02T03:04:05Z","gen":7}\n',
            "time=when,input=ptok,output=gen",
        ),
    ],
)
def test_an_unknown_table_gets_the_command_that_names_its_columns(tmp_path, text, options):
    """The error of a file that is not recognised has its columns filled in."""
    path = tmp_path / "rows"
    path.write_text(text)
    with pytest.raises(InputError, match="no known workload format") as caught:
        find_workload(str(path), Plugins())
    assert f"'kvcore simulate lengths:path={path},{options}'" in str(caught.value)


def test_a_log_of_lines_gets_the_command_that_cuts_it_to_a_table(tmp_path):
    """The error says what requests need, and a command whose table is recognised."""
    path = tmp_path / "access.log"
    path.write_text('10.0.0.1 - - [10/Oct/2026:13:55:36 +0000] "POST /v1 HTTP/1.1" 200 2326\n')
    with pytest.raises(InputError, match="no known workload format") as caught:
        find_workload(str(path), Plugins())
    assert "cut times and tokens of input and output to a table: (echo " in str(caught.value)
    header = str(caught.value).partition("(echo ")[2].partition(";")[0]
    assert Lengths.recognises(header.encode())


def test_named_fields_of_json_rows_are_read(tmp_path):
    """Options name fields of JSON rows as they name columns, those of objects with a dot."""
    path = tmp_path / "rows"
    path.write_text(jsonl({"at": 1, "cost": {"read": 5, "made": 3}}))
    text = f"lengths:path={path},time=at,input=cost.read,output=cost.made"
    (request,) = Plugins().build("workload", text)
    assert (request.prompt_tokens, request.output_tokens) == (5, 3)
    assert isinstance(Plugins().build("workload", text), Lengths)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("time,input,output,cached\n1,5,3,2\n", "cached; strict=true refuses them"),
        ("time,input,output\n1,5,3\n2,5,0\n", r"rows:3: field 'output': expected an answer"),
    ],
)
def test_strict_reading_refuses_what_is_otherwise_noted(tmp_path, text, error):
    """With `strict` a column that is not read, or a row that is left out, is an error."""
    path = tmp_path / "rows"
    path.write_text(text)
    lengths = Lengths(path)
    assert list(lengths)
    assert lengths.notes
    with pytest.raises(InputError, match=error):
        list(Lengths(path, strict=True))


def test_a_workload_that_was_read_can_be_sent_to_a_process(tmp_path):
    """A workload is pickled by its options, whatever it has read."""
    path = tmp_path / "rows"
    path.write_text("time,input,output\n1,5,3\n2,5,1\n")
    lengths = Lengths(path)
    requests = list(lengths)
    assert list(pickle.loads(pickle.dumps(lengths))) == requests  # noqa: S301 - its own bytes


@pytest.mark.parametrize(
    "above",
    [
        "sep=;\n",
        '"sep=;"\n',
        "# exported by a gateway\n# in 2026\n",
        "# a, b\nSEP=;\n",
        "# ",
        "#",
    ],
)
def test_comments_and_a_separator_before_the_header_are_skipped(tmp_path, above):
    """Lines above a header are skipped; a comment that has rows below it is the header."""
    table = f"{above}time;input_tokens;output_tokens\n0;100;10\n1;200;20\n"
    requests, _ = read(tmp_path, table)
    assert [(each.prompt_tokens, each.output_tokens) for each in requests] == [
        (100, 10),
        (200, 20),
    ]


def test_a_comment_above_json_is_skipped(tmp_path):
    """A row of JSON is no row of numbers, whatever lists it has: the comment is no header."""
    row = '{"time":%d,"input_tokens":100,"output_tokens":10,"more":[1,2,3]}\n'
    requests, _ = read(tmp_path, f"# of a gateway\n{row % 0}{row % 1}")
    assert [each.prompt_tokens for each in requests] == [100, 100]


def test_a_table_of_a_separator_alone_has_no_columns(tmp_path):
    """A file with `sep=;` and nothing else is refused as a table without a time."""
    path = tmp_path / "rows.csv"
    path.write_text("sep=;\n")
    with pytest.raises(InputError, match=r"rows.csv:1: no column that looks like 'time'"):
        list(Lengths(path))
