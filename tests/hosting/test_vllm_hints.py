"""KV hints that clients send to vLLM, without vLLM: what cannot be read ends no engine."""

import logging
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

SOURCE = Path(__file__).parents[2] / "plugins/kvcore-vllm/kvcore_vllm/hints.py"
RETAIN, SESSION = "kvcore:retain", "kvcore:session"


@pytest.fixture
def read(caplog):
    """Return a function that reads actions, each a kind and a payload, and the log's lines."""
    spec = spec_from_file_location("hints", SOURCE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def reading(*actions, name=None):
        caplog.clear()
        envelope = SimpleNamespace(
            actions=[
                SimpleNamespace(action_id=name or str(index), action_type=kind, payload=payload)
                for index, (kind, payload) in enumerate(actions)
            ]
        )
        with caplog.at_level(logging.WARNING):
            hints = module.read_hints("r", envelope)
        return hints, [record.getMessage() for record in caplog.records]

    reading.short_name = module.short_name
    return reading


@pytest.mark.parametrize(
    "payload",
    [
        *({"priority": 80, "seconds": value} for value in (1e308, 1e300, "1" * 40, [1], True)),
        *({"priority": 80, "start": value} for value in (float("nan"), 1e999, 0.5, 1 << 63)),
        {"priority": 80, "end": 1e999},
        {"priority": 80.5},
        [],
        None,
    ],
    ids=str,
)
def test_a_hint_of_any_value_is_logged_and_left_out(read, payload):
    """A hint of any value costs its client that hint, not others their engine or memory."""
    hints, lines = read((RETAIN, payload), (RETAIN, {"priority": 90}))
    assert [hint.priority for hint in hints["retention"]] == [90]
    assert [line.startswith("request r: KV hint 0: ") for line in lines] == [True]
    assert len(lines[0]) < 400


def test_a_client_writes_no_line_of_the_log(read):
    """Line ends and escape sequences in what a client calls a hint are written as escapes."""
    hints, lines = read((RETAIN, None), name="a\nINFO: all is well \x1b[2J")
    assert not hints
    assert lines[0].startswith(r"request r: KV hint a\nINFO: all is well \x1b[2J: ")


def test_a_hint_that_comes_again_is_counted(read):
    """Of equal warnings few are logged, with their count, and few of those that differ."""
    lines = [line for _ in range(120) for line in read((RETAIN, None))[1]]
    assert [line[line.rindex(":") :] for line in lines[1:]] == [
        f"{lines[0][lines[0].rindex(':') :]} ({count} times)" for count in (10, 100)
    ]
    lines = [line for name in range(1_000) for line in read((RETAIN, None), name=f"{name}")[1]]
    assert len(lines) < 260


def test_of_many_hints_the_first_are_read(read):
    """Each hint is looked at for each block of its request: there are at most 128."""
    hints, lines = read(*[(RETAIN, {"priority": 90})] * 1_000, (RETAIN, None))
    assert len(hints["retention"]) == 128
    assert lines == ["request r: of its 1,001 KV hints the first 128 are read"]


def test_names_that_policies_keep_are_short(read):
    """Names of sessions and tools have up to 128 characters, salts as tenants 1,024."""
    short = {"session": "s", "tool": "x" * 128}
    assert read((SESSION, short)) == (short, [])
    hints, lines = read((SESSION, short | {"tool": "x" * 129}))
    assert not hints
    assert lines == ["request r: KV hint 0: tool must be text of at most 128 characters"]
    assert read.short_name("x" * 1024) == "x" * 1024
    assert read.short_name("x" * 1025) is None


@pytest.mark.parametrize("session", [{}, {"session": None}])
def test_a_hint_of_a_tool_leaves_the_session(read, session):
    """A hint sets what it names: the session may be that of the request, or of another hint."""
    assert read((SESSION, session | {"tool": "x"}))[0] == {"tool": "x"}
    both = read((SESSION, {"session": "s"}), (SESSION, session | {"tool": "x"}))
    assert both == ({"session": "s", "tool": "x"}, [])
