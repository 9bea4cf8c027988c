"""Configs with wrong values anywhere are read, or refused."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
from helpers.model_configs import CONFIGS

from kvcore.errors import InputError
from kvcore_plugins.models.huggingface import model_of

VALUES = ("x", "", [], [[]], ["x"], [1], {}, {"a": 1}, -1, 0, 1, 0.5, 1e400, True, None, 10**30)


def kind_of(name):
    """Return the type of the language model of a config."""
    fields = CONFIGS[name]
    return fields.get("text_config", fields)["model_type"]


ONE_OF_EACH = sorted({kind_of(name): name for name in CONFIGS}.values())


LAYERS = {"gemma3n_text": 24, "kimi_linear": 27}
"""Layers of types that need more: 15 of Gemma 3n share what others cache, Kimi numbers its."""


def shortened(fields):
    """Return a config with few layers: as many as still have one of each kind."""
    text = fields.get("text_config", fields)
    layers = text.get("num_hidden_layers", 0)
    kept = min(layers, LAYERS.get(text["model_type"], 8))

    def cut(value):
        if isinstance(value, dict):
            short = {name: cut(inner) for name, inner in value.items()}
            return short | ({"num_hidden_layers": kept} if value is text and layers else {})
        is_by_layer = isinstance(value, list | str) and len(value) >= layers > kept
        return value[: len(value) - layers + kept] if is_by_layer else value

    return cut(fields)


def damaged(fields):
    """Yield copies of `fields` that each have another value in one place."""
    for name, value in fields.items():
        if isinstance(value, dict):
            for inner in damaged(value):
                yield {**fields, name: inner}
        if isinstance(value, list) and value:
            for other in ([], value[:1], value[1:], [*value, value[0]], ["x"] * len(value)):
                yield {**fields, name: other}
            if isinstance(value[0], dict):
                for inner in damaged(value[0]):
                    yield {**fields, name: [inner, *value[1:]]}
        for other in VALUES:
            yield {**fields, name: other}
        yield {key: kept for key, kept in fields.items() if key != name}


def kinds_of_caches(fields, name):
    """Return what the layers of a model cache, without how many do."""
    return {cache.kind for cache in model_of(fields, name, "some/config.json").layer_caches}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_damaged_config_is_read_or_refused(name):
    """No wrong value ends in another error than InputError."""
    whole, short = CONFIGS[name], shortened(CONFIGS[name])
    assert kinds_of_caches(whole, name) == kinds_of_caches(short, name)
    for fields in damaged(copy.deepcopy(short)):
        with suppress(InputError):
            model_of(fields, name, "some/config.json")
