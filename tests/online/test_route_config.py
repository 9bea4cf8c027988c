"""The configuration of the proxy: its file, its defaults and the ranges of its numbers."""

import re
from pathlib import Path

import attrs
import pytest

from kvcore.errors import InputError
from kvcore_online.fleet import _view
from kvcore_online.route_config import MOST_REPLICAS, RouteConfig, Upstream
from kvcore_online.server import ServeConfig

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


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
        ("replicas = ['http://u:secret@a']", r"url 'http://\*\*\*@a': expected one such as"),
        ("replicas = ['http://[::1']", "expected one such as"),
        ("replicas = ['http://a:99999']", "expected one such as"),
        ("[[replicas]]\nurl = 'http://a'\nblocks = 0", "blocks of http://a must be above 0"),
        (
            "[[replicas]]\nurl = 'http://a'\nname = \"b\\n\"",
            r"name 'b\\n' of http://a has control",
        ),
        ("replicas = ['http://a']\ntrace_key = ''", "trace_key: empty path; name a file"),
        ("replicas = 3", "expected tables"),
        ("replicas = [3]", "expected a table"),
        ("", "0 servers"),
        ("replicas = ['http://a', 'http://a']", "two are called 'a'"),
        ("replicas = ['http://a']\nview = 'events'", "need the address kv_events"),
        ("replicas = ['http://a']\nfailures = 0", "failures: 0 is too small; the least is 1"),
        ("replicas = ['http://a']\nretries = -1", "retries: -1 is too small; the least is 0"),
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


def test_options_are_given_by_name():
    """A value is given with the name of its option: these are too many to be counted off."""
    for config, value in (
        (RouteConfig, ()),
        (Upstream, "http://a"),
        (ServeConfig, "127.0.0.1"),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            config(value)


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


@pytest.mark.parametrize("name", ["blocks", "block_size", "max_seqs", "prefill_rate"])
def test_the_reference_has_the_figures_of_a_server(name):
    """The row of a server has the figures that a router sees if none are given."""
    rows = REFERENCE.read_text("utf-8").splitlines()
    (row,) = [row for row in rows if row.startswith("| `[[replicas]]`")]
    shown = f"{getattr(Upstream(url='http://a'), name):g}"
    assert re.search(rf"`{name}` \({shown}[) ]", row.replace(",", ""))


def test_servers_of_a_file_are_replicas(tmp_path):
    """A file may say `servers`, the word of the help, in place of `replicas`."""
    path = tmp_path / "route.toml"
    path.write_text('servers = ["http://127.0.0.1:8001"]\nrouter = "random"\n')
    made = RouteConfig.from_toml(path)
    assert [server.url for server in made.replicas] == ["http://127.0.0.1:8001"]
    path.write_text(path.read_text() + 'replicas = ["http://127.0.0.1:8002"]\n')
    with pytest.raises(InputError, match="there is no option 'servers'"):
        RouteConfig.from_toml(path)


def taken(**options):
    """Return whether a proxy of one server takes these options."""
    try:
        RouteConfig.from_options(options.pop("replicas", ["http://a"]), **options)
    except InputError:
        return False
    return True


@pytest.mark.parametrize(("name", "default"), NUMBERS)
def test_numbers_have_ranges(name, default):
    """Times are above 0 s and at most a day; numbers are 0 or 1 at least, and whole."""
    if type(default) is float:
        low, high = 1e-9, 86_400.0
        assert not taken(**{name: 0.0})
        assert not taken(**{name: 86_400.5})
        assert taken(**{name: high})
    elif name == "seed":
        low = -(2**40)
    else:
        low = name != "retries"
        assert not taken(**{name: low - 1})
    assert taken(**{name: int(low) if type(default) is int else low})


@pytest.mark.parametrize("name", ["blocks", "block_size", "max_seqs", "prefill_rate"])
def test_numbers_of_a_server_are_above_0(name):
    """Each figure of a server that the router knows is above 0."""
    for number in (0, -1):
        assert not taken(replicas=[{"url": "http://a", name: number}])
    assert taken(replicas=[{"url": "http://a", name: 1}])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a", "http://a"),
        ("https://a:1/", "https://a:1"),
        ("http://[::1]:8001/v1", "http://[::1]:8001"),
        ("http://a/b/v1/", "http://a/b"),
        *((url, None) for url in ("", "a", "ftp://a", "http://", "http://a:x", "http://a?b")),
        *((url, None) for url in ("http://a#b", "http://u@a", "http://:p@a", "http://[::1")),
        *((f"http://a{more}", None) for more in ("?", "/#", " b", "\r", "\0b:1")),
        ("http://a:0", "http://a:0"),
    ],
)
def test_urls_of_servers_are_those_of_their_api(url, shown):
    """A URL is that of an API with or without `/v1`, and names the server by its address."""
    if shown is None:
        assert not taken(replicas=[url])
        return
    (server,) = RouteConfig.from_options([url]).replicas
    assert (server.url, server.name) == (shown, shown.split("/")[2])


def test_servers_are_as_many_as_the_proxy_can_check():
    """There is a server at least, there are at most 1,000, and each has its own name."""
    urls = [f"http://a{index}" for index in range(MOST_REPLICAS + 1)]
    assert [taken(replicas=urls[:count]) for count in (0, 1, MOST_REPLICAS, len(urls))] == [
        *(False, True, True, False)
    ]
    assert not taken(replicas=[*urls[:2], urls[0]])
    assert not taken(replicas="http://a")


def test_events_need_an_address_and_the_block_size_of_each_server():
    """A view by events needs `kv_events` of all servers, and blocks of `key_tokens`."""

    def events(*tables, **options):
        return taken(replicas=list(tables), view="events", **options)

    left = {"url": "http://a", "kv_events": "tcp://a:1"}
    right = {"url": "http://b", "kv_events": "tcp://b:1", "block_size": 32}
    assert events(left)
    assert not events(left, {"url": "http://b"})
    assert not events(left, right)
    assert not events(left, key_tokens=32)
    assert events(right, key_tokens=32)
    assert taken(replicas=[left, right])
    configs = [
        RouteConfig.from_options([left], **options)
        for options in ({}, {"view": "events"}, {"prefixes": "tokens"})
    ]
    assert [config.by_tokens for config in configs] == [False, True, True]


@pytest.mark.parametrize(("view", "blocks"), [("index", 1_048_576), ("index:blocks=5", 5)])
def test_the_index_of_a_proxy_is_bounded(view, blocks):
    """The router's own index has a million entries unless its option says how many."""
    config = RouteConfig.from_options(["http://a"], view=view)
    assert _view(config, *[None] * 4).blocks == blocks


def test_paths_of_a_file_are_relative_to_it(tmp_path):
    """The trace and its key are found beside the file that names them."""
    path = tmp_path / "route.toml"
    path.write_text('replicas = ["http://a"]\ntrace = "t"\ntrace-key = "k"\n')
    config = RouteConfig.from_toml(path)
    assert (config.trace, config.trace_key) == (tmp_path / "t", tmp_path / "k")
    path.write_text('replicas = ["http://a"]\n')
    assert RouteConfig.from_toml(path, port=5).trace is None
    with pytest.raises(InputError, match=r"none\.toml: cannot be read: No such file"):
        RouteConfig.from_toml(tmp_path / "none.toml")
