"""Every kind of plugin has its hook, and what the hook returns is found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcore import hookspecs
from kvcore.hookspecs import hookimpl
from kvcore.plugins.manager import KINDS, Plugins, base_of


def named(kind):
    """Return a class of that kind which defines all it must."""
    base = base_of(kind)
    must = dict.fromkeys(base.__abstractmethods__)
    return type("Named", (base,), must | {"name": f"some-{kind}"})


@pytest.mark.parametrize("kind", KINDS)
def test_classes_of_a_hook_are_plugins_of_its_kind(kind):
    """What the hook of a kind returns can be looked up by kind and name."""
    cls = named(kind)

    @hookimpl
    def hook():
        return [cls]

    plugins = Plugins([SimpleNamespace(**{KINDS[kind]: hook})], entry_points=())
    assert plugins.get(kind, f"some-{kind}") is cls


def test_every_hook_has_a_kind():
    """Each hook belongs to one kind."""
    hooks = sorted(name for name in vars(hookspecs) if name.startswith("kvcore_"))
    assert hooks == sorted(KINDS.values())


def test_kinds_are_the_base_classes_own():
    """A kind's name in look-ups is the `kind` of its base class."""
    assert {kind: base_of(kind).kind for kind in KINDS} == {k: k for k in KINDS}
