"""Loading a model for the command line: by name, from a file, or from a folder."""

from __future__ import annotations

import json

import pytest

from kvcore.errors import InputError
from kvcore.models.catalogue import find_model, load_model

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change into a folder with configs under several names, and return it."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine/config.json", "shape", "gpt2"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("text", ["mine/config.json", "mine", "shape", "./gpt2"])
def test_a_model_is_read_from_a_file_or_its_folder(folder, text):
    """A model is read from a config.json, from its folder, or from a file of any other name."""
    assert load_model(text).layers == 2
    assert load_model(str(folder / text)).layers == 2


@pytest.mark.usefixtures("folder")
def test_a_known_name_precedes_a_file():
    """The name of a known model takes precedence over a file of that name."""
    assert load_model("gpt2") == find_model("gpt2")


@pytest.mark.parametrize("text", ["gpt2", "mine"])
@pytest.mark.usefixtures("folder")
def test_the_dtype_of_the_weights_can_be_set(text):
    """The dtype of the weights can be set for a known model and for one from a file."""
    assert load_model(text, "int4").dtype == "int4"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("llama-3-8", "did you mean llama-3-8b"),
        ("llama-3-8", "or give the path of a model's config.json"),
        ("nowhere/config.json", "nowhere/config.json: cannot be read: No such file"),
        ("x" * 5000, "unknown model"),
        ("nul\0", "unknown model"),
    ],
)
def test_an_unknown_model_is_refused_with_ways_to_name_one(text, problem):
    """The error about an unknown model gives the problem and the other ways to name one."""
    with pytest.raises(InputError) as caught:
        load_model(text)
    assert problem in str(caught.value)


def test_a_config_without_an_end_is_refused(tmp_path):
    """A folder of others may have a link to a device in place of a file."""
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="more than 16 MiB"):
        load_model(str(tmp_path))
