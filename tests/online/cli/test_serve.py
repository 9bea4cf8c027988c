"""The options of `kvcore serve`."""

from types import SimpleNamespace

import attrs
import click
import pytest
from helpers.online import SMALL

from kvcore.config import RunConfig
from kvcore.config.run_config import built_rules
from kvcore_online.cli.serve import _planned_late, serve
from kvcore_online.supervision import log_as_json


@pytest.mark.parametrize(
    ("like", "lag"),
    [
        (None, 0),
        ("kvcore", 0),
        ("vllm", 0),
        ("vllm:lag=1", 1),
        ("vllm:lag=0", 0),
        ("sglang", 0),
    ],
)
def test_rules_of_an_engine_need_no_lag_to_be_left_out(like, lag):
    """Rules whose default is a lag are taken without it; one that was given is refused."""
    config = _planned_late(RunConfig("run", workload="zipf", like=like))
    assert built_rules(config.like).lag == lag


@pytest.mark.parametrize("as_json", [False, True])
def test_a_server_prints_lines_or_objects(as_json, monkeypatch, capsys):
    """With `--log-json` what the server prints is JSON, from its address on; else sentences."""
    server = pytest.importorskip("kvcore_online.server", reason="needs aiohttp")
    listening = SimpleNamespace(model="tiny", url="http://127.0.0.1:1")
    monkeypatch.setattr(server, "run", lambda *given: given[-1](listening))
    options = ["--simulate", *["--log-json"] * as_json]
    try:
        serve.main(options, standalone_mode=False)
    finally:
        log_as_json(as_json=False)
    assert capsys.readouterr().err.startswith("{") == as_json


def test_a_server_takes_any_number_of_requests(monkeypatch):
    """The workload of a server, which its trace names, has no limit."""
    server = pytest.importorskip("kvcore_online.server", reason="needs aiohttp")
    pytest.importorskip("torch", reason="needs torch")
    served = []
    monkeypatch.setattr(server, "run", lambda parts, *_: served.append(parts))
    serve.main(["--generator", SMALL, "--memory", "4MiB"], standalone_mode=False)
    assert served[0].header()["workload"].options()["limit"] is None


def test_a_server_has_the_defaults_of_its_command():
    """An option of the command and the attribute of its name have one default."""
    server = pytest.importorskip("kvcore_online.server", reason="needs aiohttp")
    context = click.Context(serve)
    options = {option.name: option.get_default(context) for option in serve.params}
    defaults = {
        name: field.default
        for name, field in attrs.fields_dict(server.ServeConfig).items()
        if name in options and type(field.default) in (int, float, str)
    }
    assert set(defaults) == {"host", "port", "requests", "body", "client_timeout", "grace"}
    for name, default in defaults.items():
        assert type(default)(options[name]) == default
