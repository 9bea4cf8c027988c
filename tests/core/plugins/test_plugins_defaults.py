"""Default options that a program passes beside the text of a plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.errors import InputError
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import takes_path


@pytest.fixture(scope="module")
def plugins():
    """Return the installed plugins."""
    return Plugins()


def test_a_default_is_used_if_the_text_omits_the_option(plugins):
    """A default is used if the text omits the option, and ignored if the text sets it."""
    assert plugins.build("eviction", "random", {"seed": 7}).seed == 7
    assert plugins.build("eviction", "random:seed=3", {"seed": 7}).seed == 3


def test_a_default_may_be_a_value_without_a_text_form(plugins):
    """A default is passed as a Python value, and can supply a required option."""
    with pytest.raises(InputError, match="needs a value for option 'path'"):
        plugins.build("workload", "jsonl", {"seed": 7})
    assert plugins.build("workload", "jsonl", {"path": Path("a.jsonl")}).path == Path("a.jsonl")


def test_takes_path_finds_options_that_accept_a_path(plugins):
    """`takes_path` returns True if a path is one of the values that the option may have."""
    assert takes_path(plugins.get("latency", "table"), "path")
    assert takes_path(plugins.get("workload", "mooncake"), "path")
    assert not takes_path(plugins.get("workload", "zipf"), "skew")
    assert not takes_path(plugins.get("workload", "zipf"), "path")
