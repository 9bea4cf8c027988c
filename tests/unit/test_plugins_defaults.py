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


def test_a_default_is_used_where_the_text_says_nothing(plugins):
    """A default is used if the text omits the option, and ignored if the text sets it."""
    assert plugins.build("eviction", "random", {"seed": 7}).seed == 7
    assert plugins.build("eviction", "random:seed=3", {"seed": 7}).seed == 3


def test_a_default_without_such_an_option_is_left_out(plugins):
    """A default for an option that the plugin does not have is ignored: `lru` has no seed."""
    assert plugins.build("eviction", "lru", {"seed": 7}).options() == {}


def test_a_default_may_be_what_has_no_text(plugins):
    """A default is passed as a Python value, and can supply a required option."""
    with pytest.raises(InputError, match="needs a value for option 'path'"):
        plugins.build("workload", "jsonl", {"seed": 7})
    assert plugins.build("workload", "jsonl", {"path": Path("a.jsonl")}).path == Path("a.jsonl")


def test_options_that_are_paths_are_known(plugins):
    """`takes_path` returns True if a path is one of the values that the option may have."""
    assert takes_path(plugins.get("latency", "table"), "path")
    assert takes_path(plugins.get("workload", "mooncake"), "path")
    assert not takes_path(plugins.get("workload", "zipf"), "skew")
    assert not takes_path(plugins.get("workload", "zipf"), "path")
