"""Checks that the kits of several kinds of plugins share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from kvcore.plugins import Plugin
from kvcore.plugins.base import qualified, uncalled
from kvcore.plugins.options import as_text, instantiate

_PLAIN = (type(None), bool, int, float, str, Path)


def check_is_named(plugin: Plugin, base: type[Plugin]) -> None:
    """Check that a plugin derives from `base`, and has a name and a docstring of its own.

    A method that nothing calls counts as misspelled if its name is almost that of a method
    which kvcore calls.
    """
    assert isinstance(plugin, base), f"{plugin!r} is no {base.__name__}"
    cls = type(plugin)
    name = getattr(cls, "name", None)
    assert name is not None, f'{qualified(cls)} has no name: add `name = "..."` to the class'
    assert re.fullmatch(r"[\w.-]+", name), f"a name is letters, digits, _ . -: not {name!r}"
    assert cls.__doc__, f"{qualified(cls)} has no docstring"
    hint = uncalled(cls)
    assert hint is None, f"{hint} (a method of your own: begin its name with an underscore)"


def seeds(count: int) -> Any:
    """Return the fixture `seed` of a kit, for `count` runs of each test of random input.

    A derived class may choose other seeds, by a fixture of that name.
    """

    @pytest.fixture(params=range(count))
    def seed(_kit: object, request: pytest.FixtureRequest) -> int:
        """Return the seed of the test's random input."""
        return int(request.param)

    return seed


class PluginTests(ABC):
    """The test that kits of plugins with options have in common."""

    @abstractmethod
    def make(self) -> Plugin:
        """Return a new plugin, with the same options each time."""

    def test_is_built_from_text(self) -> None:
        """Its own options, written as text, make a plugin with equal options."""
        plugin = self.make()
        options = plugin.options().items()
        strange = [name for name, value in options if not isinstance(value, _PLAIN)]
        if strange:
            pytest.skip(f"options without a text form: {', '.join(strange)}")
        text = {name: as_text(value) for name, value in options}
        again = instantiate(type(plugin), text)
        assert again.options() == plugin.options(), f"{text} gave other options"
