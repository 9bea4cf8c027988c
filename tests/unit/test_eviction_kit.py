"""The conformance tests of eviction policies: a right policy passes, wrong ones do not."""

import subprocess
import sys
from pathlib import Path
from random import random
from typing import Any, ClassVar

import attrs
import pytest

from kvcore import EvictionPolicy, PolicyError, ScoreEviction
from kvcore.testing import EvictionPolicyTests
from kvcore_plugins.eviction import LRU


@attrs.define(slots=False, eq=False)
class Mine(ScoreEviction):
    """Least recently used, as a third party would write it."""

    name = "mine"

    def score(self, span, _now):
        """Return when it was last released."""
        return span.released_order


class TestMine(EvictionPolicyTests):
    """The three lines of the docstring are enough."""

    def make(self):
        """Make it."""
        return Mine()


@attrs.define(slots=False, eq=False)
class Hasty(LRU):
    """Forgets the victim when asked for it."""

    def victim(self, _now):
        """Take the least recent span out."""
        return self._order.popitem(last=False)[0]


@attrs.define(slots=False, eq=False)
class Careless(LRU):
    """Offers what was used last, a leaf or not."""

    def victim(self, _now):
        """Return the most recent span."""
        return next(reversed(self._order))


class Fickle(Mine):
    """Scores at random."""

    def score(self, _span, _now):
        """Return anything."""
        return random()


class Sized(Mine):
    """Counts blocks where it should count tokens."""

    def score(self, span, _now):
        """Return whether it has more than four blocks."""
        return span.blocks > 4


@attrs.define(slots=False, eq=False)
class Hoarder(Mine):
    """Never forgets a span."""

    seen: list[Any] = attrs.field(init=False, factory=list)

    def on_insert(self, span, _now):
        """Keep it."""
        self.seen.append(span)


class Shared(Mine):
    """Keeps in its class what its scores depend on."""

    misses: ClassVar[list[int]] = []

    def on_miss(self, _request, hit_blocks, _now):
        """Count misses."""
        self.misses.append(hit_blocks)

    def score(self, span, _now):
        """Alternate between LRU and MRU."""
        return span.released_order if len(self.misses) % 20 < 10 else -span.released_order


class Drifting(Mine):
    """Ages all the time, as it should."""

    drifts = True

    def score(self, span, now):
        """Weigh hits by age."""
        return (span.hit_count + 1) / (now - span.last_access + 1)


class TestDrifting(EvictionPolicyTests):
    """A lawful policy whose scores drift passes as well."""

    def make(self):
        """Make it."""
        return Drifting()


@attrs.define(slots=False, eq=False)
class Drawing(Drifting):
    """Scores the next ones anew each time it is asked."""

    def victim(self, now):
        """Forget the last answer."""
        self._answer = None
        return super().victim(now)

    def score(self, span, now):
        """Fall behind whatever was scored before."""
        return now, len(self._leaves._heap), span.id


class Deadly(Mine):
    """Does not say that its spans expire."""

    def on_access(self, span, now):
        """Give it a while."""
        span.expires = now + 5


class Numberless(Mine):
    """Scores with a number that is none."""

    def score(self, span, now):
        """Return NaN."""
        return float("nan")


class Forgetful(Mine):
    """Computes a score and forgets to return it."""

    def score(self, span, now):
        """Return nothing."""
        self.last = now - span.last_access


class Misspelled(Mine):
    """Overrides a method that does not exist."""

    def relased(self, span, now):
        """Keep the time."""


@attrs.define(slots=False, eq=False)
class Mangled(Mine):
    """Has an option that it does not keep as given."""

    share: float = attrs.field(default=0.5, converter=lambda share: share / 2)


class Sorted(Drifting):
    """Says that its victims have one order, which changes with the time."""

    fixed_order = True


@pytest.mark.parametrize(
    ("policy", "test", "error"),
    [
        (Hasty, "victims_are_unpinned_leaves", PolicyError),
        (Careless, "victims_are_unpinned_leaves", PolicyError),
        (Numberless, "victims_are_unpinned_leaves", PolicyError),
        (Forgetful, "victims_are_unpinned_leaves", PolicyError),
        (Fickle, "decides_alike_when_run_again", AssertionError),
        (Fickle, "a_copy_decides_alike", AssertionError),
        (Shared, "a_copy_decides_alike", AssertionError),
        (Sized, "block_size_does_not_matter", AssertionError),
        (Hoarder, "forgets_what_has_left", AssertionError),
        (Mangled, "is_built_from_text", AssertionError),
        (Misspelled, "is_a_named_policy", AssertionError),
        (Drawing, "many_leaves", PolicyError),
        (Deadly, "declares_that_spans_expire", PolicyError),
        (Sorted, "victims_leave_in_the_order_it_declares", AssertionError),
    ],
)
def test_catches(policy, test, error):
    """The test named fails for a policy with that fault."""
    with pytest.raises(error):
        run(policy, test)


def test_what_raises_is_named():
    """By the name and class of the policy, whatever the kit wraps it in."""
    with pytest.raises(PolicyError) as caught:
        run(Hasty, "victims_are_unpinned_leaves")
    assert f"eviction plugin 'lru' ({__name__}.Hasty) raised " in str(caught.value)


def test_an_undeclared_expiry_is_explained():
    """The message says what to declare."""
    with pytest.raises(PolicyError, match=r"Deadly\) raised .* declare expires_spans = True"):
        run(Deadly, "declares_that_spans_expire")


def test_failures_are_explained(tmp_path):
    """Where the kit is imported from an installed package, pytest shows what differed."""
    source = Path(__file__).read_text().split("class TestMine")[0]
    kit = "class TestBad(EvictionPolicyTests):\n    def make(self):\n        return Bad()\n"
    bad = "class Bad(Mine):\n    def score(self, span, _now):\n        return span.blocks > 4\n"
    (tmp_path / "test_bad.py").write_text(source + bad + kit)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "block_size",
    ]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "AssertionError: smaller blocks changed what" in ended.stdout
    assert "At index " in ended.stdout


@pytest.mark.parametrize("package", ["pytest", "hypothesis"])
def test_a_missing_extra_is_named(package):
    """Importing the kit without its extra says what to install."""
    code = f"import sys; sys.modules[{package!r}] = None; import kvcore.testing"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    text = f"ImportError: kvcore.testing needs {package}: run `pip install 'kvcore[testing]'`"
    assert text in ended.stderr


def run(policy, test):
    """Run one test of the kit on `policy`."""

    class Kit(EvictionPolicyTests):
        def make(self):
            return policy()

    method = getattr(Kit(), f"test_{test}")
    return method(0) if "seed" in method.__annotations__ else method()


@attrs.define(slots=False, eq=False)
class Opaque(EvictionPolicy):
    """Lets spans expire, has an option without a text form, cannot work."""

    name = "opaque"
    expires_spans = True
    order: Any = attrs.field(factory=list)

    @classmethod
    def unavailable(cls):
        """Say why."""
        return "no such device"

    def victim(self, _now):
        """Return nothing."""


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("is_built_from_text", "options without a text form: order"),
        ("room_for_everything_hits_everything", "lets spans expire"),
        ("nothing_shared_nothing_hit", "cannot work here: no such device"),
    ],
)
def test_says_why_it_skips(test, reason):
    """What cannot be tested of a policy is skipped, with the reason."""
    with pytest.raises(pytest.skip.Exception, match=reason):
        run(Opaque, test)
