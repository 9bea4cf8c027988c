"""Rows of a log that continue one another: each comes after the answer that it quotes."""

import json

import attrs
import pytest
from helpers.commands import run_here
from helpers.requests import keyed
from helpers.rows import write_rows

from kvcore import Request, simulate
from kvcore.workloads import checked
from kvcore_plugins.workload import Chat, Jsonl, Mooncake
from kvcore_plugins.workload.turns import Turns, overlapping

SECOND = 10**9
SYSTEM = "You are a helpful assistant who answers at length. " * 8


def prompt(name, *keys, arrival=0, output=0, answer=(), size=4):
    """Return a request of full keys, and one of an answer."""
    return keyed(name, keys, size, arrival=arrival, output_tokens=output, output_keys=answer)


def linked(*requests):
    """Return (session, after, think time) of each request."""
    return [(r.session, r.after, r.think_time) for r in Turns().link(requests)]


def test_a_prompt_that_begins_with_prompt_and_answer_comes_after_it():
    """A turn is of the session of the first one, and waits for the time between the rows."""
    first = prompt("a", 1, 2, output=4, answer=[3], arrival=5)
    second = prompt("b", 1, 2, 3, 4, output=4, answer=[5], arrival=25)
    third = prompt("c", 1, 2, 3, 4, 5, 6, arrival=125)
    assert linked(first, second, third) == [
        ("a", None, 0),
        ("a", "a", 20),
        ("a", "b", 100),
    ]


def test_a_prompt_without_the_answer_comes_at_its_time():
    """A prompt that begins with the prompt and another answer is independent."""
    first = prompt("a", 1, 2, output=4, answer=[3])
    other = prompt("b", 1, 2, 9, 4)
    assert linked(first, other)[1] == ("b", None, 0)


def test_an_answer_without_keys_is_known_by_its_length():
    """Where keys of answers are unknown, a later prompt is longer by the answer at least."""
    first, short = prompt("a", 1, 2, output=8), prompt("b", 1, 2, 3)
    assert linked(first, short) == [("a", None, 0), ("b", None, 0)]
    first, long = prompt("a", 1, 2, output=8), prompt("c", 1, 2, 3, 4, arrival=2)
    assert linked(first, long)[1] == ("a", "a", 2)


def test_what_several_prompts_go_on_from_is_no_turn():
    """A prompt that others go on from in different ways is shared, from the second way on."""
    system = prompt("a", 1)
    others = [prompt(name, 1, 10 + name) for name in range(4)]
    assert [after for _, after, _ in linked(system, *others)] == [None, "a", None, None, None]


def test_requests_of_sessions_stay_as_they_are():
    """A request that has a session already is not changed."""
    first = prompt("a", 1, 2)
    own = Request(
        id="b", prompt_tokens=12, keys=[1, 2, 3], key_tokens=4, session="s", after=None
    )
    assert linked(first, own)[1] == ("s", None, 0)
    named = attrs.evolve(own, session=None, after="c")
    assert linked(first, prompt("c", 7), named)[2] == (None, "c", 0)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return a log of 40 conversations of 4 turns, of which each row is one request."""
    path = tmp_path_factory.mktemp("log") / "chats.jsonl"
    rows = []
    for chat in range(40):
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(4):
            question = f"Question {turn} of chat {chat}: what is {chat * turn}? " * 6
            answer = f"Answer {turn} in chat {chat} is {chat + turn}. " * 40
            messages.append({"role": "user", "content": question})
            body = {"messages": list(messages)}
            response = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
            rows.append({"ts": 5.0 * chat + 20.0 * turn, "request": body, "response": response})
            messages.append({"role": "assistant", "content": answer})
    rows.sort(key=lambda row: row["ts"])
    return write_rows(path, *rows)


def early(workload, **options):
    """Return how many turns a simulation has, and how many come before their answer."""
    log = simulate(workload, **options).log
    sent, ended = (dict(zip(log.ids, c, strict=True)) for c in (log.arrival, log.finish))
    return overlapping(Chat(path=workload.path, turns=False), sent, ended)


def test_turns_of_a_log_never_come_before_the_answer(log):
    """However fast the log is run, no turn comes before the answer that it quotes."""
    assert early(Chat(path=log, turns=False), rate_scale=200, device="l4")[1] > 0
    assert early(Chat(path=log), rate_scale=200, device="l4") == (120, 0)


def test_the_rate_scales_the_starts_of_conversations_alone(log):
    """At 10 times the rate conversations begin 10 times as fast; turns are as far apart."""
    requests = {request.id: request for request in Chat(path=log)}
    run = simulate(Chat(path=log), rate_scale=10).log
    sent = dict(zip(run.ids, run.arrival, strict=True))
    ended = dict(zip(run.ids, run.finish, strict=True))
    for request in requests.values():
        if request.after is None:
            assert sent[request.id] == request.arrival // 10
        else:
            assert sent[request.id] == ended[request.after] + 20 * SECOND


def test_the_workload_keeps_its_contract(log):
    """Linked requests are in order, and every one follows an earlier one of its session."""
    sessions = {}
    for request in checked(Chat(path=log)):
        if request.after is not None:
            assert sessions[request.after] == request.session
        sessions[request.id] = request.session
    assert len(set(sessions.values())) == 40


def test_rows_without_times_are_not_linked(tmp_path, log):
    """Rows without times keep their order alone."""
    path = tmp_path / "untimed.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(row['request'])}\n" for row in rows))
    assert {request.after for request in Chat(path=path)} == {None}


@pytest.mark.parametrize("name", ["trace", "jsonl"])
def test_a_trace_of_independent_rows_can_be_linked(tmp_path, log, name):
    """`turns=true` links the requests of a trace, whose digest is another one then."""
    path = tmp_path / "trace.jsonl"
    simulate(Chat(path=log, turns=False), trace=path)
    done = run_here("simulate", f"{name}:path={path},turns=true", "--json")
    assert done.returncode == 0
    plain = run_here("simulate", f"{name}:path={path}", "--json")
    digests = {json.loads(run.stdout)["config"]["workload"]["digest"] for run in (done, plain)}
    assert len(digests) == 2
    if name == "jsonl":
        assert sum(r.after is not None for r in Jsonl(path=path, turns=True)) == 120


def test_rows_of_mooncake_can_be_linked(tmp_path):
    """`turns=true` links rows of hashes without sessions, also beside rows with some."""
    path = tmp_path / "hashes.jsonl"
    rows = [(0, [1, 2], 512), (30_000, [1, 2, 3, 4], 0), (31_000, [9], 0)]
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": time,
                    "input_length": 512 * len(ids),
                    "output_length": output,
                    "hash_ids": ids,
                }
            )
            + "\n"
            for time, ids, output in rows
        )
    )
    plain, turns = Mooncake(path=path), Mooncake(path=path, turns=True)
    assert [request.after for request in plain] == [None] * 3
    assert [request.after for request in turns] == [None, 0, None]
    assert plain.digest != turns.digest
    with path.open("a") as file:
        for time in (32_000, 33_000):
            row = {"timestamp": time, "input_length": 8, "output_length": 1, "hash_ids": []}
            file.write(json.dumps(row | {"session_id": "s"}) + "\n")
    turns = Mooncake(path=path, turns=True)
    assert [request.after for request in turns] == [None, 0, None, None, 3]


def test_a_simulation_that_is_too_fast_says_so(log):
    """`simulate` counts the turns that came before their answers, and names the option."""
    pytest.importorskip("kvcore_lab")  # which counts them
    fast = ("--rate-scale", 200, "--device", "l4", "--no-search")
    done = run_here("simulate", f"chat:path={log},turns=false", *fast)
    text = " ".join(done.stdout.split())
    assert "of 120 requests that continue an earlier prompt were sent before its" in text
    assert "turns=true" in text
    linked = run_here("simulate", log, *fast)
    assert "were sent before its" not in " ".join(linked.stdout.split())
    assert "rows that continue an earlier one: 120" in linked.stderr
