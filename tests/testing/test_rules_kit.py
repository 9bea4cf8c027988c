"""The conformance tests of rules pass right rules and fail wrong ones."""

from itertools import count

import attrs
import pytest
from helpers.faults import faulty, run_test

from kvcore.serving import Rules
from kvcore.testing import RulesTests
from kvcore_plugins.rules import VLLM


@attrs.define(slots=False, kw_only=True, eq=False)
class Mine(Rules):
    """Rules as a third party would write them: large chunks for later jobs."""

    name = "mine"

    def chunk_tokens(self, job, tokens, state):
        """Return the chunk of the base class, at most 8 tokens for every other job."""
        tokens = super().chunk_tokens(job, tokens, state)
        return min(tokens, 8) if job.serial % 2 else tokens


class TestMine(RulesTests):
    """Rules that decide by a method pass."""

    rules = Mine


@pytest.mark.parametrize("members", [{}, {"name": "vllm"}])
def test_the_name_of_another_class_fails(members):
    """A class without a name of its own fails, and one that repeats that of its base."""
    with pytest.raises(AssertionError, match="its own name"):
        run_test(RulesTests, faulty("No name.", VLLM, **members), "have_a_name_of_their_own")


def test_each_decision_is_asked_twice():
    """Each time that a server asks the rules, the kit asks them twice, also for another one."""
    asked = []

    class Counted(Mine):
        """Rules that note each call."""

        name = "counted"

        def chunk_tokens(self, job, tokens, state):
            """Return the chunk of the base class."""
            asked.append(job.serial)
            return super().chunk_tokens(job, tokens, state)

    run_test(RulesTests, Counted, "decisions_are_pure", 0, "ample")
    once = len(asked) // 6  # one server as it is, two asked twice, one with other hashes
    assert len(asked) == 6 * once


def test_an_answer_that_changes_fails():
    """Rules whose answer depends on earlier calls fail."""
    calls = count()
    fickle = faulty(
        "Alternates.", Mine, name="fickle", chunk_tokens=lambda *_: 1 + next(calls) % 2
    )
    with pytest.raises(Exception, match=r"answered|otherwise"):
        run_test(RulesTests, fickle, "decisions_are_pure", 0, "ample")
