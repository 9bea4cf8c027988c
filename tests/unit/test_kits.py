"""What all conformance kits share: explained asserts, and advice on the class of a plugin."""

from __future__ import annotations

import sys

import pytest

import kvcore.testing
from kvcore import PolicyError, ScoreEviction
from kvcore.testing import EvictionPolicyTests, PrefixIndexTests
from kvcore_plugins.prefix import Hashed


def test_pytest_explains_the_asserts_of_every_kit():
    """Each module of the package is rewritten by pytest, wherever it is installed."""
    prefix = f"{kvcore.testing.__name__}."
    kits = {name: sys.modules[name] for name in sys.modules if name.startswith(prefix)}
    plain = {
        name
        for name, module in kits.items()
        if type(module.__spec__.loader).__name__ != "AssertionRewritingHook"
    }
    assert plain == {f"{prefix}assertions"}
    assert {f"{prefix}{kit}" for kit in ("codec", "drafter", "router", "tier")} < set(kits)


class Nameless(ScoreEviction):
    """Its author has forgotten the name."""

    def score(self, span, now):
        """Return a constant."""
        return 0


class NamelessTests(EvictionPolicyTests):
    """As that author tests it."""

    def make(self):
        """Return the policy."""
        return Nameless()


def test_a_class_without_a_name_is_reported_with_the_line_to_add():
    """The message shows the class, and what is missing in it."""
    with pytest.raises(AssertionError, match=r'Nameless has no name: add `name = "\.\.\."`'):
        NamelessTests().test_is_a_named_policy()


class Inner(ScoreEviction):
    """Evicts spans that have children."""

    name = "inner"

    def score(self, span, now):
        """Return a constant."""
        return 0

    def victim(self, now):
        """Return the parent of a leaf."""
        span = super().victim(now)
        return span.parent or span


class InnerTests(EvictionPolicyTests):
    """The kit of a policy that is wrong."""

    def make(self):
        """Return the policy."""
        return Inner()


def test_a_failing_state_machine_ends_in_seconds(monkeypatch):
    """A failing run is reported as it was found: to shrink it would take minutes."""
    runs = []
    begin = kvcore.testing.harness.CacheMachine.__init__
    monkeypatch.setattr(
        kvcore.testing.harness.CacheMachine,
        "__init__",
        lambda self: (runs.append(1), begin(self))[1],
    )
    with pytest.raises(Exception, match="inner"):
        InnerTests().test_state_machine()
    assert 0 < len(runs) < 50


class Hoarding(Hashed):
    """An index that keeps what was evicted."""

    name = "hoarding"

    def remove(self, span, first):
        """Keep the span."""


class HoardingTests(PrefixIndexTests):
    """The kit of an index that is wrong."""

    prefix = Hoarding


def test_an_index_that_finds_evicted_spans_is_named_with_the_method_to_look_at():
    """The error is that of the index, not one of the cache that follows from it."""
    with pytest.raises(PolicyError, match=r"'hoarding'.* has left the cache: remove\(\) must"):
        HoardingTests().test_decides_as_the_default(0, {"accounting": "keys", "block_size": 4})
