"""The configuration of the proxy, and the requests that it makes of prompts."""

import json
import re
from pathlib import Path

import attrs
import pytest

from kvcore.errors import InputError
from kvcore_online.prompts import Call
from kvcore_online.route_config import RouteConfig

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_prompts_with_the_same_beginning_have_the_same_first_keys():
    """Chats with the same first messages, model and salt share their first keys."""

    def keys(*texts, **more):
        messages = [{"role": "user", "content": text} for text in texts]
        body = json.dumps({"messages": messages, **more}).encode()
        call = Call.read("/v1/chat/completions", body)
        return call.request(0, 0, None, tokens=None, key_tokens=16, key_chars=64).keys

    short, long = keys("x" * 200), keys("x" * 200, "y" * 200)
    assert len(short) < len(long)
    assert long[: len(short)] == short
    assert not set(short) & set(keys("x" * 200, model="other"))
    assert not set(short) & set(keys("x" * 200, cache_salt="mine"))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("rooter = 'x'", "did you mean 'router'"),
        (
            "[[replicas]]\nurl = 'http://a'\nkv_event = 'x'",
            r"replicas\[0\]: there is no option",
        ),
        ("[[replicas]]\nurl = 'ftp://a'", "expected one such as"),
        ("[[replicas]]\nname = 'a'", "expected one such as"),
        ("replicas = ['http://[::1']", "expected one such as"),
        ("replicas = ['http://a:99999']", "expected one such as"),
        ("[[replicas]]\nurl = 'http://a'\nblocks = 0", "blocks of http://a must be above 0"),
        ("replicas = 3", "expected tables"),
        ("replicas = [3]", "expected a table"),
        ("", "0 servers"),
        ("replicas = ['http://a', 'http://a']", "two are called 'a'"),
        ("replicas = ['http://a']\nview = 'events'", "need the address kv_events"),
        ("replicas = ['http://a']\nfailures = 0", "too small"),
        ("replicas = ['http://a']\nclient_timeout = 0", "client_timeout: 0 is not above 0 s"),
        ("replicas = ['http://a']\nport = 'x'", "port: "),
        ("replicas = [", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused(text, wrong, tmp_path):
    """The error for a wrong file has its path, the option, and a similar option if any."""
    path = tmp_path / "replicas.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=wrong) as caught:
        RouteConfig.from_toml(path)
    assert str(path) in str(caught.value)


def test_a_seed_may_be_negative():
    """A negative seed is accepted."""
    assert RouteConfig.from_options(["http://a"], seed=-5).seed == -5


def test_a_file_gives_servers_and_options(tmp_path):
    """Keywords override the options of a file, and paths in it are relative to it."""
    path = tmp_path / "replicas.toml"
    path.write_text(
        "router = 'least-requests'\nbody = '1MiB'\ntrace = 'day.jsonl'\n"
        "[[replicas]]\nurl = 'http://127.0.0.1:8001/v1/'\nname = 'left'\n"
    )
    config = RouteConfig.from_toml(path, port=1)
    assert (config.port, config.body, config.trace) == (1, 1 << 20, tmp_path / "day.jsonl")
    assert (config.replicas[0].url, config.replicas[0].name) == (
        "http://127.0.0.1:8001",
        "left",
    )


NUMBERS = [
    (field.name, field.default)
    for field in attrs.fields(RouteConfig)
    if type(field.default) in (int, float) and field.name != "port"
]


@pytest.mark.parametrize(("name", "default"), NUMBERS)
def test_the_reference_has_the_defaults(name, default):
    """The table of options in the reference has the default of each number."""
    text = REFERENCE.read_text("utf-8")
    rows = [row for row in text.splitlines() if f"`{name}`" in row.partition(" | ")[0]]
    shown = f"{default >> 20}MiB" if name in ("body", "answer") else f"{default:g}"
    assert any(re.search(rf"\({shown}[,)]", row) for row in rows)


def test_servers_of_a_file_are_replicas(tmp_path):
    """A file may say `servers`, the word of the help, in place of `replicas`."""
    path = tmp_path / "route.toml"
    path.write_text('servers = ["http://127.0.0.1:8001"]\nrouter = "random"\n')
    made = RouteConfig.from_toml(path)
    assert [server.url for server in made.replicas] == ["http://127.0.0.1:8001"]
    path.write_text(path.read_text() + 'replicas = ["http://127.0.0.1:8002"]\n')
    with pytest.raises(InputError, match="there is no option 'servers'"):
        RouteConfig.from_toml(path)
