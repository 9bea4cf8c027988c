"""kvcore with `--like vllm` makes the steps that vLLM 0.33.0 made: see `vllm/README.md`."""

from __future__ import annotations

import orjson
import pytest
from helpers.step_lists import (
    GOLDEN,
    GROUPED,
    HOSTED,
    POLICIES,
    checksum,
    decode,
    encode,
    first_difference,
    golden_servers,
    grouped_servers,
    hosted_server,
    kvcore_evictions,
    kvcore_steps,
    read,
)

COUNTS = 111_726, 1_331, 2_690_808
"""Steps, preemptions, and tokens that hit."""

SERVERS = {server.name: server for server in golden_servers()}


@pytest.fixture(scope="module")
def real():
    """Return the step lists of vLLM by name of the server."""
    return read(GOLDEN)


@pytest.mark.parametrize("name", SERVERS)
def test_steps_are_those_of_vllm(real, name):
    """Every step has vLLM's requests, tokens, admissions, hits, preemptions and free blocks."""
    assert first_difference(encode(kvcore_steps(SERVERS[name])), real[name]) is None


def test_recorded_steps_cover_all_kinds_of_servers(real):
    """The recorded steps have preemptions and hits, from servers of all eight kinds."""
    assert SERVERS.keys() == real.keys()
    steps = [step for each in real.values() for step in decode(each["runs"])]
    preempted = sum(len(lost) for _, _, lost in steps)
    hits = sum(sum(admitted.values()) for _, admitted, _ in steps)
    assert (len(steps), preempted, hits) == COUNTS
    kinds = {(server.lag, server.chunked, server.by_priority) for server in SERVERS.values()}
    assert len(kinds) == 8


GROUPED_COUNTS = 41_747, 342, 93_264

GROUPS = {server.name: server for server in grouped_servers()}


@pytest.fixture(scope="module")
def grouped():
    """Return the step lists of vLLM with cache groups, by name of the server."""
    return read(GROUPED)


@pytest.mark.parametrize("name", GROUPS)
def test_steps_of_cache_groups_are_those_of_vllm(grouped, name):
    """Windows, states and full attention in one pool make the steps of vLLM, duplicates too."""
    assert first_difference(encode(kvcore_steps(GROUPS[name])), grouped[name]) is None


def test_recorded_steps_cover_all_kinds_of_groups(grouped):
    """The recorded steps have preemptions and hits, of all kinds of groups with either lag."""
    assert GROUPS.keys() == grouped.keys()
    steps = [step for each in grouped.values() for step in decode(each["runs"])]
    preempted = sum(len(lost) for _, _, lost in steps)
    hits = sum(sum(admitted.values()) for _, admitted, _ in steps)
    assert (len(steps), preempted, hits) == GROUPED_COUNTS
    kinds = {group.kind for each in GROUPS.values() for group in each.groups}
    assert kinds == {"full", "window", "state"}
    assert {group.lag for group in GROUPS.values()} == {0, 1}


HOSTED_BY_VLLM = orjson.loads(HOSTED.read_bytes())


ROTATED = [
    (seed, POLICIES[n % 4 - by]) for n, seed in enumerate(HOSTED_BY_VLLM) for by in (1, 3)
]
"""Servers with two policies, those that `tests/hosting` does not run on cache groups."""


@pytest.mark.parametrize(("seed", "policy"), ROTATED)
def test_policies_evict_as_in_vllm(seed, policy):
    """A policy evicts the blocks that it evicted in vLLM's own scheduler, in this order.

    Generated blocks without keys are inserted when they are scheduled there, too.
    """
    evicted = kvcore_evictions(hosted_server(int(seed)), policy)
    assert checksum(evicted) == HOSTED_BY_VLLM[seed][policy]
