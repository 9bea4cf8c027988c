"""The bound on the hits of every policy: those of the optimum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import attrs
import hypothesis.strategies as st
from helpers.policies import POLICIES
from hypothesis import given, settings

from kvcore import Request, Workload
from kvcore_lab.comparison import compare_policies

BOUNDS = ("optimum", "optimum:bypass=true")


@attrs.define(slots=False, eq=False)
class Prompts(Workload):
    """A workload with a request per text, one a second; each letter is a key of 3 tokens."""

    name: ClassVar[str] = "prompts"
    key_tokens: ClassVar[int] = 3
    digest: ClassVar[str] = "00"

    texts: list[str]

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests."""
        for index, text in enumerate(self.texts):
            yield Request(
                id=index,
                arrival=index * 10**9,
                prompt_tokens=len(text) * 3,
                keys=[text[: end + 1] for end in range(len(text))],
                key_tokens=3,
            )


@given(
    texts=st.lists(st.text("abc", max_size=7), min_size=1, max_size=40),
    pool=st.integers(1, 40),
    block_size=st.sampled_from([1, 3]),
)
@settings(max_examples=30, deadline=None)
def test_no_policy_hits_more_than_the_optimum(texts, pool, block_size):
    """hits(policy) ≤ hits(optimum) ≤ hits(optimum with bypass) ≤ hits(infinite cache)."""
    comparison = compare_policies(
        Prompts(texts), [*POLICIES, *BOUNDS], [pool], block_size=block_size
    )
    *rows, optimum, bypass = comparison.rows
    for row in rows:
        assert row.hit_blocks <= optimum.hit_blocks, row
    assert optimum.hit_blocks <= bypass.hit_blocks <= comparison.infinite.hit_blocks
