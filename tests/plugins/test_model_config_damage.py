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


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_damaged_config_is_read_or_refused(name):
    """No wrong value ends in another error than InputError."""
    for fields in damaged(copy.deepcopy(CONFIGS[name])):
        with suppress(InputError):
            model_of(fields, name, "some/config.json")
