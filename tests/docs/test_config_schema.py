"""Tests of the JSON Schemas of configuration files: they accept documented files."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
from helpers.commands import run_here

from kvcore.errors import InputError
from kvcore_online.route_config import RouteConfig

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "render_schemas.py"))
names = ("config_schema", "route_schema", "sweep_schema")
config_schema, route_schema, sweep_schema = map(SCRIPT.get, names)


def shown(page):
    """Return the TOML blocks of a page of the docs."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


SWEEPS = [path.read_text("utf-8") for path in sorted((ROOT / "examples").glob("*.toml"))]


@pytest.mark.parametrize("make", [config_schema, route_schema, sweep_schema])
def test_each_schema_is_valid(make):
    """Each schema is valid by the rules of draft 2020-12."""
    jsonschema.Draft202012Validator.check_schema(json.loads(json.dumps(make())))


@pytest.mark.parametrize("toml", shown("reference/cli.md"))
def test_documented_configuration_files_are_valid(toml):
    """The files of `--config` in the CLI reference are valid."""
    jsonschema.validate(tomllib.loads(toml), config_schema())


@pytest.mark.parametrize("toml", shown("how-to/serve.md"))
def test_documented_configurations_of_proxies_are_valid(toml, tmp_path):
    """The configurations of proxies in the how-to are valid, and `RouteConfig` reads them."""
    jsonschema.validate(tomllib.loads(toml), route_schema())
    path = tmp_path / "replicas.toml"
    path.write_text(toml)
    RouteConfig.from_toml(path)


@pytest.mark.parametrize(
    "toml", ["", "replicas = []", "replicas = [{}]", "replicas = ['a']\nrooter = 'x'"]
)
def test_configurations_that_route_refuses_are_invalid(toml, tmp_path):
    """A configuration that `RouteConfig` refuses is invalid."""
    path = tmp_path / "replicas.toml"
    path.write_text(toml)
    with pytest.raises(InputError):
        RouteConfig.from_toml(path)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(toml), route_schema())


@pytest.mark.parametrize("toml", [*SWEEPS, *shown("how-to/sweeps.md")])
def test_documented_sweeps_are_valid(toml):
    """The sweeps of the examples and of the how-to are valid."""
    jsonschema.validate(tomllib.loads(toml), sweep_schema())


@pytest.mark.parametrize(
    "toml",
    [
        "bloks = 3",
        "blocks = 3.5",
        "memory = 40",
        "steps = 'mixt'",
        "codec = 3",
        "[batching]\nmax_token = 3",
        "[slo]\nttft = 0",
        "[eviction]\nhalf_life = 3",
        "blocks = [1, 2]",
        "accounting = 'keys'",
        "replicas = 0",
        "[[replicas]]\nblock_size = 32",
    ],
)
def test_configurations_that_simulate_refuses_are_invalid(toml, tmp_path):
    """A configuration that `kvcore simulate` refuses is invalid."""
    (tmp_path / "c.toml").write_text(toml)
    done = run_here("simulate", "zipf:requests=5", "--config", "c.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("kvcore: error: c.toml: ")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(toml), config_schema())


def test_only_an_axis_may_have_a_list():
    """An axis of a sweep may be a list, and a key that is no axis may not."""
    jsonschema.validate({"blocks": [1, 2], "max-seqs": 4}, sweep_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"jobs": [1, 2]}, sweep_schema())
