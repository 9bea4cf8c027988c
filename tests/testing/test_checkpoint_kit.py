"""The conformance tests of checkpoint policies fail wrong ones in the test of their fault."""

import pytest
from helpers.faults import faulty, run_test

from kvcore.cache import CheckpointPolicy
from kvcore.testing import CheckpointTests


class Mine(CheckpointPolicy):
    """A policy with the boundaries of the default."""

    name = "mine"


Beyond = faulty(
    "A policy with a boundary at the end of the prompt.",
    Mine,
    boundaries=lambda _, request, *__: [request.prompt_tokens],
)
Below = faulty("A policy with a boundary before the prompt.", Mine, boundaries=lambda *_: [-1])


@pytest.mark.parametrize("wrong", [Beyond, Below])
def test_boundaries_outside_of_the_prompt_fail(wrong):
    """A boundary below 0, or from the length of the prompt on, fails the test about it."""
    run_test(CheckpointTests, Mine, "boundaries_lie_in_the_prompt", seed=0)
    with pytest.raises(AssertionError, match=r"boundaries\(\) of a prompt of"):
        run_test(CheckpointTests, wrong, "boundaries_lie_in_the_prompt", seed=0)
