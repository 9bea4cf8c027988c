"""The catalogue of well-known models agrees with the configs that their makers publish."""

from __future__ import annotations

import re
from datetime import date

import attrs
import pytest
from helpers.model_configs import CONFIGS

from kvcore.errors import InputError
from kvcore.models.catalogue import (
    DEVICES,
    MODELS,
    SOURCES,
    find_device,
    find_model,
    load_model,
)
from kvcore.models.layers import CACHE_KINDS


def test_every_model_of_the_catalogue_has_a_config():
    """Each model of the catalogue has a config here, and only those."""
    assert set(CONFIGS) == set(MODELS)


def test_every_model_of_the_catalogue_has_a_source_and_a_date():
    """Each model names the repository of its config.json, and the day it was compared."""
    assert set(SOURCES) == set(MODELS)
    for source in SOURCES.values():
        assert re.fullmatch(r"[\w-]+/[\w.-]+", source.config)
        assert date(2026, 11, 1) <= date.fromisoformat(source.checked)


def test_the_catalogue_has_models_of_each_way_of_keeping_a_sequence():
    """Of the ways to keep a sequence, cross attention alone has no model here."""
    kinds = {cache.kind for model in MODELS.values() for cache in model.layer_caches}
    assert kinds == set(CACHE_KINDS) - {"cross"}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_model_gives_its_row_of_the_catalogue(read_model, name):
    """The published config of a model gives its entry in the catalogue."""
    model, row = read_model(CONFIGS[name]), find_model(name)
    assert model.positions in (0, row.positions)
    assert attrs.evolve(model, name=name, positions=row.positions) == row


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-3-8b", 8.03),
        ("mistral-7b-v0.1", 7.24),
        ("mixtral-8x7b", 46.7),
        ("deepseek-v3", 671.03),
        ("gpt-oss-120b", 116.83),
        ("kimi-linear-48b-a3b", 49.12),
    ],
)
def test_parameters_are_the_published_number(read_model, name, billions):
    """The number of parameters computed from a config is the published one."""
    parameters = read_model(CONFIGS[name]).parameters
    assert round(parameters / 1e9, 2) == pytest.approx(billions, abs=0.005)


def test_active_parameters_are_the_published_number():
    """The number of active parameters of a model is the published one."""
    active = {name: find_model(name).active_parameters / 1e9 for name in MODELS}
    assert active["mixtral-8x7b"] == pytest.approx(12.9, abs=0.05)
    assert active["qwen3-30b-a3b"] == pytest.approx(3.3, abs=0.06)
    assert active["qwen3-235b-a22b"] == pytest.approx(22, abs=0.2)
    assert active["deepseek-v2"] == pytest.approx(21, abs=0.4)


def test_names_are_found_whatever_their_case():
    """Names of models and devices ignore case and outer spaces, and `_` equals `-`."""
    assert find_model(" Llama-3-8B") is MODELS["llama-3-8b"]
    assert find_device("A100_80G") is DEVICES["a100-80g"]


def test_an_unknown_model_is_refused_with_the_nearest_names():
    """An unknown model raises InputError with similar names and the command for all."""
    with pytest.raises(InputError) as caught:
        find_model("llama3-8b")
    text = str(caught.value)
    assert "unknown model 'llama3-8b'; did you mean llama-3-8b" in text
    assert text.endswith("? `kvcore size --help` lists all")
    assert "qwen3-8b" not in text


def test_an_id_of_a_hub_is_no_path_that_cannot_be_read(tmp_path, monkeypatch):
    """The error names the model that is meant; a folder of that name is read."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="of a hub are not looked up: did you mean qwen3-8b"):
        load_model("Qwen/Qwen3-8B")
    for path in "models/my_own", "Qwen/Qwen3-8B.json", "./Qwen3-8B":
        with pytest.raises(InputError, match="cannot be read: No such file"):
            load_model(path)
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(InputError, match=r"config\.json"):
        load_model("Qwen/Qwen3-8B")
