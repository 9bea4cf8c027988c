"""Render the JSON Schemas of configuration files, from the options of verbs, and of traces.

    python docs/render_schemas.py FOLDER

writes `config.schema.json`, for `--config` of `simulate` and `run`, `route.schema.json`, for
that of `route`, `sweep.schema.json`, for the file of `sweep`, and `trace.schema.json`, for the
lines of a trace. `tox -e docs` writes them into build/docs/schemas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import attrs
import orjson

from kvcore.config.options import find_option, option_named
from kvcore.config.values import (
    as_bytes,
    as_checkpoint,
    as_device,
    as_model,
    as_natural,
    as_plugin,
    as_slo,
    as_tiers,
    as_window,
    as_workload,
)
from kvcore.serving.rules import CHOICES
from kvcore.serving.scheduler import LIMITS
from kvcore.trace.fields import EXPECTATIONS
from kvcore_cli.main import loaded_verb
from kvcore_cli.options import toml_types
from kvcore_cluster.options import OF_REPLICAS, as_failures, as_replicas
from kvcore_lab.cli.sweep import sweep
from kvcore_lab.sweep.grid import sweep_keys
from kvcore_online.route_config import RouteConfig, Upstream
from kvcore_plugins.traces.reader import json_schema
from kvcore_replay.cli.trace_options import as_gpu_prices

MODE = "Mode of all cells: simulate them under a clock, or compare: replay them without one."

DRAFT = "https://json-schema.org/draft/2020-12/schema"

_SIMPLE: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    Path: "string",
}

_READ: Mapping[Callable[[object], Any], Any] = {
    as_plugin: {"$ref": "#/$defs/plugin"},
    as_workload: {"$ref": "#/$defs/plugin"},
    as_checkpoint: {
        "anyOf": [{"$ref": "#/$defs/plugin"}, {"type": "integer", "minimum": 0}],
    },
    as_tiers: {
        "anyOf": [
            {"$ref": "#/$defs/plugin"},
            {"type": "array", "items": {"$ref": "#/$defs/plugin"}},
        ],
    },
    as_replicas: {
        "anyOf": [
            {"type": "integer", "minimum": 1},
            {"type": "array", "items": {"$ref": "#/$defs/replicas"}, "minItems": 1},
        ],
    },
    as_failures: {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    },
    as_gpu_prices: {"type": ["string", "number"]},
    as_model: {"type": "string"},
    as_device: {"type": "string"},
    as_bytes: {"type": "string"},
    as_slo: {"$ref": "#/$defs/slo"},
    as_natural: {"type": "integer", "minimum": 0},
    as_window: {"type": "string", "pattern": "^[^:]*:[^:]*$"},
}

_DEFINITIONS: Mapping[str, Any] = {
    "plugin": {
        "description": "A plugin: its name, with options as in lfu:half_life=300, or a table.",
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
                "additionalProperties": {"type": ["string", "number", "boolean"]},
            },
        ],
    },
    "slo": {
        "description": "Expected latency in seconds: ttft=30,tpot=0.1 as text, or a table.",
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {
                    name: {"type": "number", "exclusiveMinimum": 0} for name in EXPECTATIONS
                },
                "additionalProperties": False,
            },
        ],
    },
}


def config_schema() -> dict[str, Any]:
    """Return the schema of the file that `--config` of `simulate` and `run` names."""
    properties: dict[str, Any] = {}
    for verb in map(loaded_verb, ("run", "simulate")):
        texts = {option.name: getattr(option, "help", None) for option in verb.params}
        for key, (name, kind) in toml_types(verb).items():
            if key not in CHOICES:  # keys of the release before
                properties[key] = _described(key, kind, texts.get(name))
    return _document("Options of kvcore simulate and kvcore run", properties)


def sweep_schema() -> dict[str, Any]:
    """Return the schema of the file of a sweep, whose options may have lists of values."""
    texts = {option.name: getattr(option, "help", None) for option in sweep.params}
    texts["mode"] = MODE
    properties = {
        key: _described(key, kind, texts.get(key)) for key, kind in sweep_keys().items()
    }
    listed = {
        key: schema if key in texts else _listed(schema) for key, schema in properties.items()
    }
    return _document("Axes of kvcore sweep", listed)


def route_schema() -> dict[str, Any]:
    """Return the schema of the file that `--config` of `route` names."""

    def of(cls: type, required: str) -> dict[str, Any]:
        fields = attrs.fields(attrs.resolve_types(cls))
        described = {
            each.name: {"description": each.metadata["help"], **_type(each.type)}
            for each in fields
            if each.name != "replicas"
        }
        return {
            "type": "object",
            "properties": _spelled(described),
            "required": [required],
            "additionalProperties": False,
        }

    document = of(RouteConfig, "replicas")
    server = {"anyOf": [of(Upstream, "url"), {"type": "string"}]}
    servers = {"description": "The servers.", "type": "array", "minItems": 1, "items": server}
    document["properties"]["replicas"] = servers
    about = {"$schema": DRAFT, "title": "Options of kvcore route"}
    return {**about, **document, "$defs": {"plugin": _DEFINITIONS["plugin"]}}


def _document(title: str, properties: dict[str, Any]) -> dict[str, Any]:
    caps = {name: properties[name] for name in LIMITS}
    properties["batching"] = {
        "type": "object",
        "description": "Caps of a step, in a table of their own.",
        "properties": _spelled(caps),
        "additionalProperties": False,
    }
    return {
        "$schema": DRAFT,
        "title": title,
        "type": "object",
        "properties": _spelled(properties),
        "additionalProperties": False,
        "$defs": {**_DEFINITIONS, "replicas": _replicas()},
    }


def _replicas() -> dict[str, Any]:
    """Return the schema of the options that servers of a cluster have of their own."""
    count = {"count": {"type": "integer", "minimum": 1}}
    own = {name: _described(name, option_named(name).type, None) for name in OF_REPLICAS}
    return {
        "description": "Servers that are alike: how many, and the options they have.",
        "type": "object",
        "properties": count | _spelled(own),
        "additionalProperties": False,
    }


def _spelled(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties under both spellings of their names: with `_` and with `-`."""
    spelled: dict[str, Any] = {}
    for name, schema in properties.items():
        spelled |= {name: schema, name.replace("_", "-"): schema}
    return spelled


def _described(name: str, kind: Any, text: str | None) -> dict[str, Any]:
    """Return the schema of an option; its text is that of the verb, or of `RunConfig`."""
    option = find_option(name)
    if option is not None and option.heading:  # else a verb may have another of that name
        text = option.help
        if option.choices:
            return {"description": text, "enum": list(option.choices)}
    return {"description": (text or "").partition("  [default")[0], **_type(kind)}


def _listed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an option that may have one value or a list of them."""
    description, one = schema["description"], {**schema}
    del one["description"]
    return {
        "description": description,
        "anyOf": [one, {"type": "array", "items": one, "minItems": 1}],
    }


def _type(kind: Any) -> dict[str, Any]:
    """Return the schema of a type. TOML has no null: what may be None is left out there."""
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    origin: Any = get_origin(kind)
    if origin is Annotated:
        return dict(_READ[get_args(kind)[1]])
    if origin is Literal:
        return {"enum": list(get_args(kind))}
    (member,) = (each for each in get_args(kind) if each is not NoneType)
    return _type(member)


def documents() -> dict[str, Any]:
    """Return the schemas by the names of their files."""
    return {
        "config.schema.json": config_schema(),
        "route.schema.json": route_schema(),
        "sweep.schema.json": sweep_schema(),
        "trace.schema.json": json_schema(),
    }


def main(folder: Path) -> None:
    """Write all schemas into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in documents().items():
        option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        (folder / name).write_bytes(orjson.dumps(document, option=option))


if __name__ == "__main__":
    folder, *others = sys.argv[1:] or ["--help"]
    if others or folder.startswith("-"):
        sys.exit("usage: python docs/render_schemas.py FOLDER")
    main(Path(folder))
