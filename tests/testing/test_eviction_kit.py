"""The conformance tests of eviction policies pass correct policies and fail wrong ones."""

import subprocess
import sys
from collections import Counter, OrderedDict
from random import random
from typing import Any, ClassVar

import attrs
import pytest
from helpers.faults import faulty, run_test

from kvcore import EvictionPolicy, PolicyError, ScoreEviction
from kvcore.testing import EvictionPolicyTests
from kvcore_plugins.eviction import LRU


@attrs.define(slots=False, eq=False)
class Mine(ScoreEviction):
    """Least recently used, as a third party would write it."""

    name = "mine"

    def score(self, span, _now):
        """Return the order in which the span was last released."""
        return span.released_order


class TestMine(EvictionPolicyTests):
    """The conformance tests of a policy need nothing but the class."""

    eviction = Mine


@attrs.define(slots=False, eq=False)
class Hasty(LRU):
    """A policy whose `victim` removes the victim from the order."""

    def victim(self, _now):
        """Remove the least recent span, and return it."""
        return self._order.popitem(last=False)[0]


Careless = faulty(
    "A policy whose victim is the most recent span, whether it is a leaf or not.",
    LRU,
    victim=lambda self, *_: next(reversed(self._order)),
)
Fickle = faulty("A policy with random scores.", Mine, score=lambda *_: random())
Hashed = faulty(
    "A policy whose scores are hashes of text.",
    Mine,
    score=lambda _, span, *__: hash(f"{span.id}"),
)
Sized = faulty(
    "A policy whose scores depend on the number of blocks, not of tokens.",
    Mine,
    score=lambda _, span, *__: span.blocks > 4,
)


@attrs.define(slots=False, eq=False)
class Hoarder(Mine):
    """A policy that keeps all spans that were inserted."""

    seen: list[Any] = attrs.field(init=False, factory=list)

    def on_insert(self, span, _now):
        """Keep the span."""
        self.seen.append(span)


class Shared(Mine):
    """A policy whose scores depend on an attribute of its class."""

    misses: ClassVar[list[int]] = []

    def on_miss(self, _request, hit_blocks, _now):
        """Record the miss."""
        self.misses.append(hit_blocks)

    def score(self, span, _now):
        """Return the score of LRU or of MRU, depending on the number of misses."""
        return span.released_order if len(self.misses) % 20 < 10 else -span.released_order


DEPTHS = Counter()


class Deep(Mine):
    """A policy that keeps the depths used most, by counts that its module has."""

    def on_access(self, span, now):
        """Count the depth."""
        super().on_access(span, now)
        DEPTHS[span.depth] += 1

    def score(self, span, _now):
        """Return the uses of the depth."""
        return DEPTHS[span.depth], span.released_order


class Drifting(Mine):
    """A correct policy whose scores change with time."""

    drifts = True

    def score(self, span, now):
        """Return the number of hits by age."""
        return (span.hit_count + 1) / (now - span.last_access + 1)


class TestDrifting(EvictionPolicyTests):
    """A correct policy whose scores change with time passes the conformance tests."""

    eviction = Drifting


@attrs.define(slots=False, eq=False)
class Drawing(Drifting):
    """A policy that scores all spans again whenever it is asked for a victim."""

    def victim(self, now):
        """Drop the last answer, and return the victim."""
        self._answer = None
        return super().victim(now)

    def score(self, span, now):
        """Return a greater score than all before."""
        return now, len(self._leaves._heap), span.id


def deadly(callback):
    """Return a policy that lets spans expire in a callback, and does not declare it."""

    def call(self, span, *given):
        getattr(Mine, callback)(self, span, *given)
        span.expires = 10**9

    return faulty("A policy whose spans expire.", Mine, **{callback: call})


Numberless = faulty("A policy whose scores are NaN.", Mine, score=lambda *_: float("nan"))


class Forgetful(Mine):
    """A policy whose `score` returns None."""

    def score(self, span, now):
        """Compute a score, and do not return it."""
        self.last = now - span.last_access


Misspelled = faulty(
    "A policy that overrides a method which does not exist.", Mine, relased=lambda *_: None
)


@attrs.define(slots=False, eq=False)
class Mangled(Mine):
    """A policy with an option that is changed when it is set."""

    share: float = attrs.field(default=0.5, converter=lambda share: share / 2)


Sorted = faulty(
    "A policy that declares a fixed order of victims, although its scores change with time.",
    Drifting,
    fixed_order=True,
)


class Favouring(LRU):
    """A policy that declares a fixed order, and ends with the spans of one request in two."""

    fixed_order = True

    def victim(self, now):
        """Return the last span of the order for requests with an even number."""
        if self.requester % 2 == 0:
            return next(span for span in reversed(self._order) if span.is_leaf)
        return super().victim(now)


Ageing = faulty(
    "A policy whose scores change with time, and who does not say so.",
    Mine,
    score=lambda _, span, now: (span.hit_count + 1) / (now - span.created + 1),
)
Detached = faulty(
    "A policy whose `attach` does not call that of its base class.",
    LRU,
    attach=lambda self, *_: setattr(self, "_order", OrderedDict()),
)


@pytest.mark.parametrize(
    ("policy", "test", "error"),
    [
        (Hasty, "victims_are_unpinned_leaves", PolicyError),
        (Careless, "victims_are_unpinned_leaves", PolicyError),
        (Numberless, "victims_are_unpinned_leaves", PolicyError),
        (Forgetful, "victims_are_unpinned_leaves", PolicyError),
        (Fickle, "decisions_are_repeatable", AssertionError),
        (Hashed, "decisions_are_repeatable", AssertionError),
        (Fickle, "a_copy_makes_the_same_decisions", AssertionError),
        (Shared, "decisions_are_repeatable", AssertionError),
        (Deep, "decisions_are_repeatable", AssertionError),
        (Shared, "a_copy_makes_the_same_decisions", AssertionError),
        (Sized, "block_size_does_not_matter", AssertionError),
        (Hoarder, "forgets_evicted_spans", AssertionError),
        (Mangled, "is_built_from_text", AssertionError),
        (Misspelled, "is_a_named_plugin", AssertionError),
        (Drawing, "many_leaves", PolicyError),
        (deadly("on_access"), "declares_that_spans_expire", PolicyError),
        (Sorted, "victims_leave_in_the_order_it_declares", AssertionError),
        (Favouring, "victims_leave_in_the_order_it_declares", AssertionError),
        (Ageing, "scores_move_as_it_declares", AssertionError),
        (Detached, "victims_are_unpinned_leaves", PolicyError),
    ],
)
def test_each_faulty_policy_fails_the_test_of_its_fault(policy, test, error):
    """A policy with a fault fails the conformance test about it, which LRU passes."""
    run(Mine if test == "scores_move_as_it_declares" else LRU, test)
    with pytest.raises(error):
        run(policy, test)


def test_an_exception_of_a_policy_is_reported_with_its_class():
    """The error about an exception of a policy has the name and the class of the policy."""
    with pytest.raises(PolicyError) as caught:
        run(Hasty, "victims_are_unpinned_leaves")
    assert f"eviction plugin 'lru' ({__name__}.Hasty) raised " in str(caught.value)


@pytest.mark.parametrize("callback", ["on_access", "on_split", "on_pin", "on_leaf"])
def test_an_undeclared_expiry_is_explained(callback):
    """The error about a span that expires has the callback, and says what to declare."""
    message = rf"in {callback}\(\): .* declare expires_spans = True"
    with pytest.raises(PolicyError, match=message):
        run(deadly(callback), "declares_that_spans_expire")


def test_a_forgotten_super_of_attach_is_explained():
    """The error about a policy that does not know the size of its pool says what to call."""
    with pytest.raises(PolicyError, match=r"in attach\(\): .* call super\(\)\.attach"):
        run(Detached, "victims_are_unpinned_leaves")


def test_scores_that_move_are_explained():
    """The error about scores that change with time names what would declare it."""
    with pytest.raises(AssertionError, match=r"drifts = True, or .* changes_at\(\)"):
        run(Ageing, "scores_move_as_it_declares")


BAD = '''
from kvcore import ScoreEviction
from kvcore.testing import EvictionPolicyTests

class Bad(ScoreEviction):
    """A policy whose scores depend on the number of blocks, not of tokens."""
    name = "bad"
    def score(self, span, now):
        return span.blocks > 4

class TestBad(EvictionPolicyTests):
    eviction = Bad
'''


def test_a_failed_conformance_test_shows_the_difference(tmp_path):
    """A failed conformance test of the installed package shows what differed."""
    (tmp_path / "test_bad.py").write_text(BAD)
    command = [
        sys.executable,
        *["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "block_size"],
    ]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "AssertionError: smaller blocks changed what" in ended.stdout
    assert "At index " in ended.stdout


@pytest.mark.parametrize("package", ["pytest", "hypothesis"])
def test_a_missing_extra_is_named(package):
    """Importing the kit without pytest or hypothesis raises an error with what to install."""
    code = f"import sys; sys.modules[{package!r}] = None; import kvcore.testing"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    text = f"ImportError: kvcore.testing needs {package}: run `pip install 'kvcore[testing]'`"
    assert text in ended.stderr


def run(policy, test):
    """Run one conformance test on `policy`."""
    return run_test(EvictionPolicyTests, policy, test, seed=0)


@attrs.define(slots=False, eq=False)
class Opaque(EvictionPolicy):
    """An unavailable policy with expiring spans and an option without a text form."""

    name = "opaque"
    expires_spans = True
    order: Any = attrs.field(factory=list)

    @classmethod
    def unavailable(cls):
        """Return a reason."""
        return "no such device"

    def victim(self, _now):
        """Return None."""


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("is_built_from_text", "options without a text form: order"),
        ("room_for_everything_hits_everything", "lets spans expire"),
        ("requests_without_shared_keys_have_no_hits", "cannot work here: no such device"),
    ],
)
def test_a_skipped_conformance_test_gives_the_reason(test, reason):
    """A conformance test that does not apply to a policy is skipped with the reason."""
    with pytest.raises(pytest.skip.Exception, match=reason):
        run(Opaque, test)


class Unavailable(Mine):
    """A policy that needs an extra which is not installed."""

    @classmethod
    def unavailable(cls):
        """Return what is missing."""
        return "pip install foo"

    def score(self, span, now):
        """Raise the error of a missing module."""
        del span, now
        raise ImportError


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        ("an_engine_gets_the_same_decisions", [0]),
        ("one_span_a_block_hits_as_much", []),
        ("state_machine", []),
        ("many_leaves", [0]),
    ],
)
def test_a_policy_that_cannot_work_here_is_skipped(test, arguments):
    """Tests that serve requests skip, with the reason."""
    with pytest.raises(pytest.skip.Exception, match="cannot work here: pip install foo"):
        run_test(EvictionPolicyTests, Unavailable, test, *arguments)
