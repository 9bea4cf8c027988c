"""Options of built-in workloads, and requests that `jsonl` reads from a trace."""

from pathlib import Path

import orjson
import pytest

from kvcore.plugins.manager import Plugins
from kvcore.request import Hints, Request, Retention
from kvcore.trace.fields import request_fields
from kvcore_plugins import hooks
from kvcore_plugins.workload import Jsonl, Weka, Zipf

DATA = Path(__file__).parents[1] / "data"
FULL = Request(
    id="full",
    arrival=3,
    prompt_tokens=48,
    output_tokens=5,
    keys=[b"\x0b" * 16, 7],
    key_tokens=16,
    salt="blue",
    tenant="acme",
    priority=-1,
    retention=(Retention(0, None, 90, 10**9), Retention(16, 32, 1)),
    hints=Hints(share=32, pin=10**9, prefetch=5),
    tool="grep",
    session="s",
    after=4,
    think_time=9,
    output_keys=[b"\x0c" * 16],
)


def test_options_given_as_text_are_converted():
    """Options given as text are converted to their types, `key_tokens` included."""
    plugins = Plugins(extra=[hooks], entry_points=[])
    workload = plugins.build("workload", "zipf:requests=3,rate=2,key_tokens=32")
    assert workload.options() == Zipf(requests=3, rate=2.0, key_tokens=32).options()


@pytest.mark.parametrize(
    "requests",
    [[FULL], Weka(DATA / "weka_sessions.jsonl.gz"), Zipf(requests=20)],
    ids=["every field", "weka", "zipf"],
)
def test_jsonl_reads_the_requests_of_a_trace(tmp_path, requests):
    """`jsonl` reads the REQUEST lines of a trace as equal requests."""
    path = tmp_path / "t.jsonl"
    lines = [{"event": "REQUEST", "t": r.arrival, **request_fields(r)} for r in requests]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    assert list(Jsonl(path)) == list(requests)
