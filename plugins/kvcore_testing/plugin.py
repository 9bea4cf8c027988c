"""Checks that the kits of several kinds of plugins share."""

from __future__ import annotations

import builtins
import re
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from kvcore.plugins import Plugin
from kvcore.plugins.base import qualified, uncalled
from kvcore.plugins.options import as_text, instantiate

_PLAIN = (type(None), bool, int, float, str, Path)


def seeds(number: int) -> Any:
    """Return the fixture `seed` of a kit, for `number` runs of each test of random input.

    A derived class may choose other seeds, by a fixture of that name.
    """

    @pytest.fixture(params=range(number))
    def seed(_kit: object, request: pytest.FixtureRequest) -> int:
        """Return the seed of the test's random input."""
        return int(request.param)

    return seed


@contextmanager
def other_hashes() -> Iterator[None]:
    """Let `hash` answer for text as in another interpreter, until the block ends.

    Whatever calls it by its name gets the other answers; a set of text keeps its order, and
    `__hash__` its answers, by which dicts that exist find their keys.
    """
    builtins.hash = _other_hash
    try:
        yield
    finally:
        builtins.hash = _own_hash


_own_hash = hash


def _other_hash(value: object, /) -> int:
    own = _is_of_object(sys._getframe(1))  # noqa: SLF001
    return _own_hash((value,) if not own and _has_text(value) else value)


def _is_of_object(frame: FrameType | None) -> bool:
    """Return True if a frame, or one of those that called it last, is a `__hash__`."""
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_name in ("__hash__", "_hash"):  # the latter of collections.abc.Set
            return True
        frame = frame.f_back
    return False


def _has_text(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_has_text, value))
    return isinstance(value, (str, bytes))


@contextmanager
def unshared(plugin: object) -> Iterator[None]:
    """Check that the block changes no data of the class of `plugin`, which all instances share.

    Of its base classes too. Data are numbers, text, containers and counters.
    """
    before = _data_of(type(plugin))
    yield
    after = _data_of(type(plugin))
    changed = [name for name in after if before.get(name) != after[name]]
    assert not changed, (
        f"it changed {', '.join(changed)} of its class, which all instances share: keep in "
        "each of them what it learns"
    )


_DATA = (int, float, str, bytes, tuple, list, dict, set, deque, array, count)


def _data_of(cls: type) -> dict[str, str]:
    """Return the attributes of a class that are data, as text by name."""
    return {
        name: repr(value)
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, _DATA) and not name.startswith("__")
    }


def disguise(watcher: object, plugin: object, **methods: Any) -> None:
    """Give `watcher` a class of its own: `methods`, and the names of the class of `plugin`."""
    cls = type(plugin)
    names = {name: getattr(cls, name) for name in ("name", "__module__", "__qualname__")}
    watcher.__class__ = type(cls.__name__, (type(watcher),), names | methods)


P = TypeVar("P", bound=Plugin)


class NamedTests(Generic[P]):
    """Base of all kits: makes plugins of a kind, and checks the class of one.

    Attributes:
        base: the class that plugins of the kind derive from.
    """

    base: ClassVar[type[Plugin]]

    def make(self) -> P:
        """Return a new plugin: what the attribute with the name of its kind returns.

        That is a class, or a function that takes no arguments; options are the same each time.
        Where fixtures of the instance are needed, a derived class overrides this method.
        """
        plugin: P = getattr(type(self), self.base.kind)()
        return plugin

    def test_is_a_named_plugin(self) -> None:
        """Its class derives from the base of its kind, and has a name and a docstring.

        A method that nothing calls counts as misspelled if its name is almost that of a method
        which kvcore calls.
        """
        plugin, base = self.make(), self.base
        assert isinstance(plugin, base), f"{plugin!r} is no {base.__name__}"
        cls = type(plugin)
        name = getattr(cls, "name", None)
        assert name is not None, (
            f'{qualified(cls)} has no name: add `name = "..."` to the class'
        )
        assert re.fullmatch(r"[\w.-]+", name), f"a name is letters, digits, _ . -: not {name!r}"
        assert cls.__doc__, f"{qualified(cls)} has no docstring"
        hint = uncalled(cls)
        assert hint is None, f"{hint} (a method of your own: begin its name with an underscore)"


class PluginTests(NamedTests[P]):
    """The tests that kits of plugins with options have in common."""

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
