"""The conformance tests of checkpoint policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import ClassVar

import attrs
import pytest

from kvcore.cache import CheckpointPolicy
from kvcore.errors import InputError
from kvcore.plugins import resolve
from kvcore.request import Key, Request
from kvcore.serving import Batching, simulate
from kvcore_plugins.cache_groups import GroupedCache, GroupPlan, LayerGroup
from kvcore_testing.plugin import PluginTests, other_hashes, seeds, unshared

BLOCK = 8
_REQUESTS, _OTHERS, _CHUNK = 120, 7, 64
_STATE = LayerGroup("state", BLOCK)
_GROUPS = {
    "states": (LayerGroup("full", BLOCK), _STATE, _STATE),
    "a window and states": (LayerGroup("full", BLOCK), LayerGroup("window", BLOCK, 20), _STATE),
}


class CheckpointTests(PluginTests[CheckpointPolicy]):
    """Conformance tests of a checkpoint policy; a derived `Test...` class makes the policy.

    `checkpoint` is its class, or a function that returns a policy with one set of options; a
    method `make` in its place may use fixtures:

        class TestMine(CheckpointTests):
            checkpoint = Mine

    The tests serve random requests, with system prompts and sessions, in pools under pressure.
    Blocks have 8 tokens in all groups, one of which keeps states.
    """

    base = CheckpointPolicy
    checkpoint: ClassVar[Callable[[], CheckpointPolicy]]

    seed = seeds(3)

    @pytest.fixture(params=_GROUPS)
    def groups(self, request: pytest.FixtureRequest) -> tuple[LayerGroup, ...]:
        """Return the cache groups of the test."""
        return _GROUPS[request.param]

    def test_serves_one_cache(self) -> None:
        """A second cache with the same policy is an InputError that names the policy."""
        policy = self.make()
        _cache(policy, _GROUPS["states"])
        with pytest.raises(InputError, match=policy.name):
            _cache(policy, _GROUPS["states"])

    def test_boundaries_are_repeatable(self, seed: int) -> None:
        """Two look-ups without an admission in between have the same boundaries."""
        cache = _cache(self.make(), _GROUPS["states"])
        for request in stream(seed):
            first, second = (cache.match(request).boundaries for _ in "ab")
            assert first == second, f"asked again, it answered {second}, not {first}"
            cache.compute(request, _CHUNK)

    def test_boundaries_lie_in_the_prompt(self, seed: int) -> None:
        """Each boundary is 0 or more, and below the length of the prompt."""
        policy = self.make()
        cache = _cache(policy, _GROUPS["states"])
        for request in stream(seed):
            hit = cache.match(request).tokens
            lengths = list(policy.boundaries(request, hit, 0))
            assert all(0 <= length < request.prompt_tokens for length in lengths), (
                f"boundaries() of a prompt of {request.prompt_tokens} tokens are {lengths}"
            )
            cache.compute(request, _CHUNK)

    def test_hits_end_where_others_have_computed(
        self, seed: int, groups: tuple[LayerGroup, ...]
    ) -> None:
        """A hit is a prefix of an earlier prompt, in whole blocks, and not all of its own."""
        requests, computed = stream(seed), set[Key]()
        for request, (hit, _, _) in zip(
            requests, look_up(self.make(), requests, groups), strict=True
        ):
            blocks = hit // BLOCK
            assert hit == blocks * BLOCK < request.prompt_tokens
            assert computed.issuperset(request.keys[:blocks])
            computed.update(request.keys)

    def test_equal_streams_are_served_equally(
        self, seed: int, groups: tuple[LayerGroup, ...]
    ) -> None:
        """Two policies of equal options decide equally, whatever others have seen between."""
        policy = self.make()
        with unshared(policy):
            first = list(look_up(policy, stream(seed), groups))
        list(look_up(self.make(), stream(seed + 1000)[:_OTHERS], groups))
        with other_hashes():
            second = list(look_up(self.make(), stream(seed), groups))
        assert first == second, "run again, after another policy, it decided otherwise"

    def test_the_future_is_not_known(self, seed: int, groups: tuple[LayerGroup, ...]) -> None:
        """Decisions depend neither on lengths of outputs nor on requests that come later."""
        requests = stream(seed)
        longer = [
            attrs.evolve(request, output_tokens=request.output_tokens * 7)
            for request in requests
        ]
        first, second = (
            list(look_up(self.make(), stream_of_requests, groups))
            for stream_of_requests in (requests, longer)
        )
        assert first == second, "it decided otherwise for requests with longer outputs"
        half = list(look_up(self.make(), requests[: _REQUESTS // 2], groups))
        assert first[: len(half)] == half, "it decided otherwise without the later requests"

    def test_decisions_do_not_depend_on_ids(self, seed: int) -> None:
        """Requests with other ids are served as these."""
        requests = stream(seed)
        renamed = [attrs.evolve(request, id=f"request {request.id}") for request in requests]
        first, second = (
            list(look_up(self.make(), stream_of_requests, _GROUPS["states"]))
            for stream_of_requests in (requests, renamed)
        )
        assert first == second, "it decided otherwise for requests with other ids"

    def test_a_server_stays_whole(self, seed: int, groups: tuple[LayerGroup, ...]) -> None:
        """Requests that run side by side, and generate, leave a cache in which all holds."""
        cache = _cache(self.make(), groups)
        batching = Batching(max_tokens=_CHUNK, max_seqs=6)
        result = simulate(stream(seed), cache=cache, batching=batching)
        cache.check_integrity()
        assert not cache.sequences
        assert result.outcome_fields()["completed"] == _REQUESTS


def look_up(
    policy: CheckpointPolicy, requests: list[Request], groups: tuple[LayerGroup, ...]
) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Compute the prompts of `requests` one after the other; yield what the cache decides.

    That is: the tokens that hit, the lengths at which windows and states of the prompt are
    kept, and the number of blocks that were evicted for it.
    """
    cache = _cache(policy, groups)
    for request in requests:
        before = cache.evicted_blocks
        match = cache.compute(request, _CHUNK)
        cache.check_integrity()
        yield match.tokens, match.boundaries, cache.evicted_blocks - before


def stream(seed: int) -> list[Request]:
    """Return random requests: sessions whose prompts grow, behind four system prompts."""
    dice = Random(seed)  # noqa: S311
    sessions: list[list[int]] = []
    requests: list[Request] = []
    for serial in range(_REQUESTS):
        if not sessions or dice.random() < 1 / 3:
            first = 1000 * dice.randrange(4)
            sessions.append(list(range(first, first + dice.randrange(1, 16))))
        keys = dice.choice(sessions[-6:])
        keys += range(10**6 + 100 * serial, 10**6 + 100 * serial + dice.randrange(1, 6))
        requests.append(
            Request(
                id=serial,
                arrival=serial * 10**6,
                prompt_tokens=len(keys) * BLOCK - dice.randrange(BLOCK),
                output_tokens=dice.randint(1, 40),
                key_tokens=BLOCK,
                keys=keys[:],
            )
        )
    return requests


def _cache(policy: CheckpointPolicy, groups: tuple[LayerGroup, ...]) -> GroupedCache:
    return GroupPlan(groups, 0).cache(
        160, eviction=resolve("eviction", None, "lru"), prefix=None, recompute=None,
        checkpoint=policy, key_tokens=BLOCK, trace=None,
    )  # fmt: skip
