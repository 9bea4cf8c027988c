"""Features of all conformance kits: explained asserts, and advice about a plugin's class."""

from __future__ import annotations

import sys

import pytest
from helpers.faults import run_test

import kvcore.testing
from kvcore import KVCache, PolicyError, Request, ScoreEviction
from kvcore.testing import EvictionPolicyTests, PrefixIndexTests, snapshot
from kvcore_plugins.prefix import Hashed


def test_pytest_explains_the_asserts_of_every_kit():
    """Pytest rewrites the asserts of every module of `kvcore.testing`, except `assertions`."""
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
    """A policy without a name."""

    def score(self, span, now):
        """Return a constant."""
        return 0


class NamelessTests(EvictionPolicyTests):
    """Conformance tests of the policy without a name."""

    eviction = Nameless


def test_a_class_without_a_name_is_reported_with_the_line_to_add():
    """The kit reports a class without a name, with the line to add."""
    with pytest.raises(AssertionError, match=r'Nameless has no name: add `name = "\.\.\."`'):
        NamelessTests().test_is_a_named_plugin()


class Inner(ScoreEviction):
    """A policy that evicts spans which have children."""

    name = "inner"

    def score(self, span, now):
        """Return a constant."""
        return 0

    def victim(self, now):
        """Return the parent of a leaf."""
        span = super().victim(now)
        return span.parent or span


class InnerTests(EvictionPolicyTests):
    """Conformance tests of the policy that evicts inner spans."""

    eviction = Inner


def test_a_failing_state_machine_ends_in_seconds(monkeypatch):
    """A failing state machine is reported without shrinking, after fewer than 50 runs."""
    runs = []
    begin = kvcore.testing.harness.CacheMachine.__init__
    monkeypatch.setattr(
        kvcore.testing.harness.CacheMachine,
        "__init__",
        lambda self: (runs.append(1), begin(self))[1],
    )
    with pytest.raises(PolicyError, match=r"'inner' .* raised AssertionError in victim\(\)"):
        InnerTests().test_state_machine()
    assert 0 < len(runs) < 50


class Hoarding(Hashed):
    """A prefix index that keeps evicted spans."""

    name = "hoarding"

    def remove(self, span, first):
        """Keep the span, which is the error."""


class HoardingTests(PrefixIndexTests):
    """Conformance tests of the index that keeps evicted spans."""

    prefix = Hoarding


def test_an_index_that_finds_evicted_spans_is_reported():
    """An index that finds evicted spans raises PolicyError with its name and `remove()`."""
    with pytest.raises(PolicyError, match=r"'hoarding'.* has left the cache: remove\(\) must"):
        HoardingTests().test_decides_as_the_default(0, {"accounting": "keys", "block_size": 4})


class Stale(Hashed):
    """A prefix index that still has the rows of the last two blocks of a span of nine."""

    def match(self, keys, limit, after):
        """Return a match with these blocks."""
        span, end = super().match(keys, limit, after)
        return span, min(limit, 9) if span.id else end


def test_an_index_that_finds_blocks_of_a_cut_span_is_told_to_remove_them():
    """An index that finds the evicted tail of a span is told which rows to forget."""
    with pytest.raises(AssertionError, match="must forget the rows of the blocks from `first`"):
        run_test(PrefixIndexTests, Stale, "finds_the_rest_of_a_victim")


@pytest.mark.parametrize("name", ["hit_blocks", "lookup_blocks", "target", "dropped", "freed"])
def test_a_snapshot_has_each_length_of_a_sequence(name):
    """A call that changes a length of an open sequence changes the snapshot."""
    cache = KVCache(8, 4)
    seq = cache.open(Request(id=0, prompt_tokens=8, keys=[1, 2], key_tokens=4))
    before = snapshot(cache)
    setattr(seq, name, getattr(seq, name) + 1)
    assert snapshot(cache) != before
