"""The cache of groups against a block-by-block reference, on random streams."""

from __future__ import annotations

import pytest
from helpers.group_model import GroupModel
from helpers.group_streams import drive
from hypothesis import settings

STREAMS = max(48, settings.default.max_examples // 12)
PARTS = 8
"""Streams, whose pools have all shapes; the tests that share them."""


class ModelSide:
    """A stream's calls of the reference."""

    def __init__(self, pool):
        self._pool = pool
        self._model = GroupModel(pool.groups, pool.blocks, pool.interval, pool.chunk)
        self._junctions = {}

    def look_up(self, prompt):
        """Return the tokens that hit, and the junction."""
        names = prompt.names(self._pool.groups)
        found = self._model.look_up(names, prompt.request.prompt_tokens)
        self._junctions[prompt.request.id] = found[1]
        return found

    def allocate(self, prompt, computed, tokens, *, first):
        """Allocate for a chunk; return False if there is no room."""
        request = prompt.request
        junction = self._junctions[request.id]
        return self._model.allocate(
            request.id, prompt.names(self._pool.groups), computed, tokens,
            request.prompt_tokens, junction, first=first,
        )  # fmt: skip

    def close(self, prompt):
        """Free the blocks of a request."""
        self._model.close(prompt.request.id)

    @property
    def available(self):
        """Number of free blocks."""
        return len(self._model.queue)

    @property
    def evicted(self):
        """Group and name of the evicted blocks, in order."""
        return self._model.evicted


@pytest.mark.parametrize("part", range(PARTS))
def test_groups_decide_as_the_reference(part):
    """Hits, junctions, refusals, free blocks and evictions equal those of the reference."""
    counts = [drive(seed, ModelSide) for seed in range(part, STREAMS, PARTS)]
    calls, hits, evicted = map(sum, zip(*counts, strict=True))
    assert calls > 200 * len(counts)
    assert hits > 8 * len(counts)
    assert evicted > 20 * len(counts)
