"""The words of `kvcore route` and `kvcore serve`, without a server that runs."""

import pytest
from helpers.commands import error_of, run_here

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install 'kvcore[serve]'")

from kvcore_engine.config import EngineParts
from kvcore_online import proxy, server, supervision


class Proxy:
    """A proxy that only listens."""

    url = "http://here"
    model = "tiny"


@pytest.fixture
def ran(monkeypatch):
    """Return the arguments with which a server or a proxy was run, before `ready`."""
    calls = []

    def run(*arguments):
        *others, ready = arguments
        calls.append(others)
        ready(Proxy())

    for module in (proxy, server):
        monkeypatch.setattr(module, "run", run)
    yield calls
    supervision.log_as_json(as_json=False)


def test_servers_of_a_proxy_are_named_or_in_a_file(ran, tmp_path):
    """URLs on the command line win over those of a file; without either it is an error."""
    file = tmp_path / "route.toml"
    file.write_text('replicas = ["http://a"]\nport = 5\nrouter = "random"\n')
    for words in (["http://b", "http://c"], ["--config", file], ["http://b", "--config", file]):
        assert run_here("route", *words).returncode == 0
    assert run_here("route", "--config", file, "--port", 7, "--view", "index").returncode == 0
    assert [[each.url for each in config.replicas] for (config,) in ran] == [
        ["http://b", "http://c"],
        ["http://a"],
        ["http://b"],
        ["http://a"],
    ]
    assert [config.port for (config,) in ran] == [8000, 5, 5, 7]
    assert "name the servers: kvcore route" in error_of("route")


@pytest.mark.usefixtures("ran")
def test_messages_are_json_where_that_is_asked_for():
    """With `--log-json` a line on stderr is an object, else a sentence."""
    done = run_here("route", "http://b", "--log-json")
    assert done.stderr.startswith('{"time":')
    assert '"message":"1 server at http://here; Ctrl-C ends"' in done.stderr
    assert (
        "kvcore: 2 servers at http://here" in run_here("route", "http://b", "http://c").stderr
    )


def test_a_simulated_server_has_no_tensors_and_its_own_clock(ran):
    """`serve` computes on tensors as fast as it can, or simulates at the speed of its clock."""
    assert run_here("serve", "--simulate", "--speed-up", 3).returncode == 0
    assert run_here("serve", "--simulate").returncode == 0
    done = run_here("serve", "--blocks", 50, "--block-size", 8)
    (fast, faster), (slow, normal), (real, by_wall) = ran
    assert [made.speed_up for made in (faster, normal, by_wall)] == [3.0, 1.0, None]
    assert [type(made) is EngineParts for made in (fast, slow, real)] == [False, False, True]
    assert (real.config.clock, real.config.blocks) == ("wall", 50)
    assert real.workload.key_tokens == 8
    assert slow.workload.key_tokens == 16
    assert "kvcore: tiny at http://here; Ctrl-C ends" in done.stderr
