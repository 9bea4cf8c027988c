"""The generated streams of the panel."""

import orjson

import kvcore
from kvcore.units import NS_PER_S


def test_a_call_of_agents_waits_for_the_answer_before_it(tmp_path):
    """In a pool that is too small, a call arrives a tool's or a user's time after an answer."""
    file = tmp_path / "trace.jsonl"
    kvcore.simulate("agents:sessions=20", tensor_parallel=1, memory="16GiB", trace=file)
    sessions: dict[int, str] = {}
    finished: dict[str, int] = {}
    waits = []
    for event in map(orjson.loads, file.read_bytes().splitlines()):
        if event["event"] == "REQUEST":
            sessions[event["id"]] = session = event["session"]
            if session in finished:
                waits.append(event["t"] - finished.pop(session))
        elif event["event"] in {"FINISH", "REJECT"}:
            finished[sessions[event["request"]]] = event["t"]
    assert len(waits) == len(sessions) - len(set(sessions.values()))
    assert min(waits) >= NS_PER_S
