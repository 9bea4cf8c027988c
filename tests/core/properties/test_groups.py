"""The cache of groups against a block-by-block reference, on random streams."""

from __future__ import annotations

import os

import pytest
from helpers.group_model import GroupModel
from helpers.group_streams import drive

QUICK = 32
PER_PART = 50
PARTS = 8 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 3
"""Streams of the quick test, whose pools have all shapes; those of a part of the slow one."""


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


@pytest.mark.parametrize("seed", range(QUICK))
def test_groups_decide_as_the_reference(seed):
    """Hits, junctions, refusals, free blocks and evictions equal those of the reference."""
    drive(seed, ModelSide)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_groups_decide_as_the_reference_on_many_streams(part):
    """On many streams, which hit and evict, groups decide as the reference."""
    calls, hits, evicted = 0, 0, 0
    for seed in range(part * PER_PART, (part + 1) * PER_PART):
        counts = drive(seed, ModelSide)
        calls, hits, evicted = calls + counts[0], hits + counts[1], evicted + counts[2]
    assert calls > 10_000
    assert hits > 500
    assert evicted > 5_000
