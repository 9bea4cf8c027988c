"""The conformance tests of eviction policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from random import Random
from typing import Any, ClassVar, cast

import attrs
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcore.cache import EvictionPolicy, KVCache, PrefixIndex, ScoreEviction, Span
from kvcore.plugins import resolve
from kvcore.request import Request, Retention
from kvcore_testing.harness import (
    FORKS,
    Decision,
    Driver,
    RecordingPolicy,
    Traffic,
    cache_machine,
    random_requests,
    random_steps,
    replay,
)
from kvcore_testing.hosted import HostedCache
from kvcore_testing.plugin import PluginTests, other_hashes, seeds, unshared

_KEY = 6
_BLOCKS = 15
_HINTS = Traffic(key_tokens=_KEY, hints=True)
_OTHERS = Traffic(key_tokens=_KEY, most_keys=12, width=2)
# Evicted spans that a policy may refer to until it compacts its heap.
_SLACK = 128
_MANY = 100
_STAY, _AS_MUCH = 0.5, 0.9
_TOKENS = (
    "count in tokens (span.tokens, blocks * block_size), also what a ghost or a queue holds; "
    "spans, keys and blocks are of other sizes in other pools"
)


class EvictionPolicyTests(PluginTests[EvictionPolicy]):
    """Conformance tests of an eviction policy; a derived `Test...` class makes the policy.

    The attribute `eviction` is what `make` calls:

        class TestMine(EvictionPolicyTests):
            eviction = Mine

    The tests drive caches with random calls, with many sequences open at once and with one
    after the other, and compare decisions: hits, victims, refusals. `copy.deepcopy` copies
    cache and policy together, and the copy must decide as the original does: all state of a
    policy is in its attributes and in `span.data`, none of it in its class, in its module, or
    in objects that cannot be copied (files, locks, generators).

    Attributes:
        machine_examples: number of runs of the state machine.
    """

    base = EvictionPolicy
    eviction: ClassVar[Callable[[], EvictionPolicy]]
    machine_examples: ClassVar[int] = 8

    def make_prefix(self) -> PrefixIndex | None:
        """Return a new prefix index; None for the `radix` plugin."""
        return None

    seed = seeds(4)

    def test_victims_are_unpinned_leaves(self, seed: int) -> None:
        """Each victim is an unpinned leaf, and a second call of `victim` returns it again."""
        decisions = self.driver().run(random_steps(seed, 200, _HINTS))
        assert any(decision.evicted for decision in decisions), "nothing was evicted"

    def test_many_leaves(self, seed: int) -> None:
        """Victims are unpinned leaves, also of more leaves than are scored at once."""
        traffic = Traffic(key_tokens=_KEY, most_keys=2, width=2 * _MANY, longest_wait=2)
        decisions = self.replay(random_requests(seed, 3 * _MANY, traffic), _MANY)
        assert any(decision.evicted for decision in decisions), "nothing was evicted"

    def test_declares_that_spans_expire(self, seed: int) -> None:
        """A policy that sets `span.expires` declares `expires_spans = True`."""
        self.driver().run(random_steps(seed, 100, _HINTS))

    def test_decisions_are_repeatable(self, seed: int) -> None:
        """Two new policies make the same decisions: by no address, chance or `hash`.

        Nor by what another policy has seen in between, with longer prompts.
        """
        steps = random_steps(seed, 200, _HINTS)
        driver = self.driver()
        with unshared(_recording(driver).policy):
            once = driver.run(steps)
        self.driver().run(random_steps(seed + 1000, 60, _OTHERS))
        with other_hashes():
            again = self.driver().run(steps)
        assert once == again, "run again, after another policy, it decided otherwise"

    def test_victims_leave_in_the_order_it_declares(self, seed: int) -> None:
        """With `fixed_order`, blocks evicted one at a time have the order of all at once.

        Of a few leaves that were used often, and of many that were used once or twice.
        """
        if not vars(type(self.make())).get("fixed_order"):
            pytest.skip("its class does not say that the order of victims is fixed")
        many = Traffic(key_tokens=_KEY, most_keys=2, width=_MANY)
        for start in (self._closed, lambda seed: self._served(seed, many)):
            orders = []
            for at_once in (True, False):
                driver = start(seed)
                tree, policy = driver.cache.tree, _recording(driver)
                policy.evicted.clear()
                blocks = tree.unpinned_blocks
                if at_once:
                    tree.evict(blocks, 0, driver.now)
                else:
                    for index in range(blocks):
                        tree.evict(1, index, driver.now + index * 10**12)
                orders.append(policy.evicted[:])
            assert orders[0] == orders[1], (
                "one by one, at other times and for other requests, other blocks left than at "
                "once: victim() must not read `now` or `requester`, or fixed_order is wrong"
            )
            assert orders[0], "nothing was evicted"

    def test_scores_move_as_it_declares(self, seed: int) -> None:
        """Without `drifts` or `changes_at`, leaves have the same order of scores later on.

        A policy whose scores change by uses alone passes, and so does one whose scores all
        change by the same amount.
        """
        policy = self._working()
        if not isinstance(policy, ScoreEviction):
            pytest.skip("keeps an order of its own: it is no ScoreEviction")
        if policy.drifts or type(policy).changes_at is not ScoreEviction.changes_at:
            pytest.skip("says that its scores change with time")
        driver = self._served(seed, Traffic(key_tokens=_KEY, most_keys=2, width=8))
        policy, now = cast("ScoreEviction", _recording(driver).policy), driver.now
        leaves = [span for span in driver.cache.tree.spans() if span.is_leaf]
        assert len(leaves) > 1, "there is one leaf: nothing to order"

        def order(after: int) -> list[Span]:
            return sorted(
                leaves,
                key=lambda span: (
                    policy.score(span, now + after),
                    span.released_order,
                    span.id,
                ),
            )

        first = order(0)
        if order(0) != first:
            pytest.skip("scores are not the same if they are computed twice")
        for after in (10**3, 10**6, 10**9, 10**12):
            assert order(after) == first, (
                f"{after} ns later, its scores put the leaves in another order, but they are "
                "kept from the last use: set drifts = True, or return the time of the next "
                "change from changes_at(), or leave `now` out of score()"
            )

    def test_victims_leave_in_the_order_of_their_releases(self, seed: int) -> None:
        """With `by_release`, the victim is the unpinned span that was released first."""
        policy = self.make()
        if "by_release" not in vars(type(policy)) or not policy.by_release:
            pytest.skip("it does not say that victims leave in the order of releases")
        driver = self._closed(seed)
        tree, evicted = driver.cache.tree, 0
        while unpinned := [span for span in tree.spans() if not span.ref_count]:
            first = min(unpinned, key=lambda span: span.released_order)
            assert driver.cache.eviction.victim(driver.now) is first, (
                "another span leaves first"
            )
            evicted += first.end - first.start
            tree.evict(first.end - first.start, "r", driver.now)
        assert evicted, "nothing was evicted"

    def test_decisions_do_not_depend_on_block_ids(self, seed: int) -> None:
        """A pool that counts blocks and one with ids lead to the same decisions."""
        traffic = attrs.evolve(_HINTS, mix={"open": 5, "commit": 6, "close": 4, "extend": 1})
        steps = random_steps(seed, 200, traffic)
        counting, with_ids = self.driver(ids=False).run(steps), self.driver(ids=True).run(steps)
        assert counting == with_ids, "with block ids, it decided otherwise"

    @pytest.mark.parametrize("seed", range(2))
    def test_clients_may_pin_and_demote(self, seed: int) -> None:
        """Spans that a client has pinned are no victims; spans that it has demoted can be."""
        traffic = attrs.evolve(_HINTS, pins=True)
        driver = self.driver()
        decisions = driver.run(random_steps(seed, 200, traffic))
        assert any(decision.evicted for decision in decisions), "nothing was evicted"

    def test_a_copy_makes_the_same_decisions(self, seed: int) -> None:
        """A deep copy of cache and policy makes the decisions of the original."""
        steps = random_steps(seed, 150, _HINTS)
        driver = self.driver()
        for start in range(0, len(steps), 50):
            copied = deepcopy(driver)
            expected = driver.run(steps[start : start + 50])
            decisions = copied.run(steps[start : start + 50])
            assert decisions == expected, "copied together with its cache, it decided otherwise"

    def test_refusals_and_probes_change_nothing(self, seed: int) -> None:
        """A run without its refused calls and its probes has the same decisions."""
        steps = random_steps(seed, 150, attrs.evolve(_HINTS, mix=FORKS))
        careful, plain = self.driver(blocks=8), self.driver(blocks=8)
        decisions = [careful.careful_step(step) for step in steps]
        assert any(decision.refused for decision in decisions), "nothing was refused"
        for step, decision in zip(steps, decisions, strict=True):
            if decision.refused is None:
                assert plain.step(step) == decision, (
                    "a refused call or a probe changed something"
                )
            else:
                plain.now += step.wait

    def test_an_engine_gets_the_same_decisions(self, seed: int) -> None:
        """A `PolicyHost`, for blocks that an engine owns, has the victims of a `KVCache`."""
        mix = {"open": 5, "commit": 6, "close": 4, "serve": 3, "extend": 1}
        steps = random_steps(seed, 200, attrs.evolve(_HINTS, mix=mix))
        policy, hosted = RecordingPolicy(self._working()), RecordingPolicy(self._working())
        prefix = resolve("prefix", "hashed:spans=block")
        cache = KVCache(
            _BLOCKS, _KEY, accounting="keys", eviction=policy, prefix=prefix, recompute=_flat
        )
        engine: Any = HostedCache(hosted, _BLOCKS, _KEY, _flat)
        drivers = Driver(cache, policy.evicted), Driver(engine, hosted.evicted)
        cached, owned = (driver.run(steps) for driver in drivers)
        assert any(decision.evicted for decision in cached), "nothing was evicted"
        assert owned == cached, "asked by a host, it decided otherwise"

    def test_one_span_a_block_hits_as_much(self) -> None:
        """With one span a block, as in engines, it hits at least nine tenths as much.

        A policy that hits less is not wrong: the test skips, and tells the loss.
        """
        requests = random_requests(0, 1000, Traffic(key_tokens=_KEY, most_keys=12, width=3))
        hits = []
        for prefix in ("radix", "hashed:spans=block"):
            policy = self._working()
            cache = KVCache(60, _KEY, accounting="keys", eviction=policy, prefix=prefix)
            hits.append(sum(d.hit or 0 for d in replay(cache, requests, [])))
            cache.check_integrity()
        if hits[1] < _AS_MUCH * hits[0]:
            pytest.skip(f"with one span a block it hits {hits[1]} blocks, else {hits[0]}")

    def test_spans_may_leave_without_being_victims(self) -> None:
        """Spans that are no victims leave too: a tier drops loaded and damaged ones."""
        random, driver = Random(0), self.driver()  # noqa: S311
        tree, left = driver.cache.tree, 0
        for step in random_steps(0, 150, _HINTS):
            driver.step(step)
            spans = [span for span in tree.spans() if not span.ref_count]
            if not spans or random.random() < _STAY:
                continue
            span, before = random.choice(spans), tree.cached_blocks
            if random.random() < _STAY:
                tree.vacate(span, driver.now)
            else:
                tree.discard(span, driver.now, "corrupt")
            left += before - tree.cached_blocks
            driver.cache.check_integrity()
        assert left, "no block has left"

    def test_requests_without_shared_keys_have_no_hits(self) -> None:
        """Requests that share no key have no hits."""
        requests = [_request(index, range(5 * index, 5 * index + 5)) for index in range(40)]
        hits = [decision.hit for decision in self.replay(requests)]
        assert not any(hits), f"blocks hit by each request: {hits}"

    def test_room_for_everything_hits_everything(self, seed: int) -> None:
        """In a pool with room for all blocks, each key that an earlier request had is hit."""
        if self.make().expires_spans:
            pytest.skip("lets spans expire, however much room there is")
        requests = random_requests(seed, 60, Traffic(key_tokens=_KEY))
        seen: set[Any] = set()
        bound = []
        for request in requests:
            bound.append(sum(key in seen for key in request.keys))
            seen.update(request.keys)
        hits = [decision.hit for decision in self.replay(requests, blocks=1000)]
        assert hits == bound, "not all that was seen before was hit"

    def test_requests_may_be_longer_than_the_pool(self, seed: int) -> None:
        """A request with more blocks than the pool keeps its leading ones."""
        requests = random_requests(seed, 60, _HINTS)
        for blocks in (1, 3):
            for accounting in ("keys", "tokens"):
                hits = [
                    decision.hit
                    for decision in self.replay(requests, blocks, accounting=accounting)
                ]
                assert max(hit or 0 for hit in hits) <= blocks, "hits exceed the pool"

    def test_block_size_does_not_matter(self, seed: int) -> None:
        """Three blocks a key, in a pool of three times the blocks, give the same decisions.

        Every token costs the same to compute, wherever it stands.
        """
        requests = random_requests(seed, 150, Traffic(key_tokens=_KEY))
        coarse, fine = self.replay(requests), self.replay(requests, ratio=3)
        hits = [3 * (d.hit or 0) for d in coarse]
        assert hits == [d.hit for d in fine], f"smaller blocks changed what hit: {_TOKENS}"
        evicted = [3 * [key] for d in coarse for _, key, _ in d.evicted]
        assert evicted == _by_three(fine), f"smaller blocks changed what was evicted: {_TOKENS}"

    def test_forgets_evicted_spans(self) -> None:
        """Its references to evicted spans are bounded by the pool, not by the run."""
        hint = (Retention(0, None, 60, 10**18),)
        requests = [_request(index, [index], hint) for index in range(600)]
        driver = self.driver(blocks=8)
        replay(driver.cache, requests)
        kept = len(_recording(driver).removed)
        assert kept <= _SLACK, f"it still refers to {kept} spans that have left an 8-block pool"

    def test_state_machine(self) -> None:
        """Random calls of every kind keep the invariants of the cache."""
        self._working()
        run_state_machine_as_test(
            cache_machine(self.make, self.make_prefix),
            settings=settings(
                max_examples=self.machine_examples,
                stateful_step_count=30,
                deadline=None,
                # To shrink a failing run takes minutes, and the other tests are small.
                phases=[Phase.generate],
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def driver(self, *, blocks: int = _BLOCKS, ratio: int = 1, **options: Any) -> Driver:
        """Return the driver of a new cache with a new policy; `options` are `KVCache`'s."""
        recording = RecordingPolicy(self._working())
        cache = KVCache(
            blocks * ratio,
            _KEY // ratio,
            eviction=recording,
            prefix=self.make_prefix(),
            key_tokens=_KEY,
            recompute=_flat,
            **{"accounting": "keys"} | options,
        )
        return Driver(cache, recording.evicted)

    def _closed(self, seed: int) -> Driver:
        """Return a driver after random steps, all of whose sequences are closed."""
        driver = self.driver()
        driver.run(random_steps(seed, 200, _HINTS))
        for seq in [*driver.cache.sequences.values()]:
            driver.cache.close(seq, driver.now)
        return driver

    def _served(self, seed: int, traffic: Traffic) -> Driver:
        """Return a driver after requests that were served one after the other."""
        driver = self.driver(blocks=_MANY)
        requests = random_requests(seed, 2 * _MANY, traffic)
        replay(driver.cache, requests)
        driver.now = requests[-1].arrival
        return driver

    def replay(
        self, requests: Iterable[Request], blocks: int = _BLOCKS, **options: Any
    ) -> list[Decision]:
        """Serve `requests` one after the other in a new cache; return the decisions."""
        driver = self.driver(blocks=blocks, **options)
        return replay(driver.cache, requests, _recording(driver).evicted)

    def _working(self) -> EvictionPolicy:
        """Return a new policy; the test skips where it cannot work."""
        policy: EvictionPolicy = self.make()
        reason = policy.unavailable()
        if reason is not None:
            pytest.skip(f"cannot work here: {reason}")
        return policy


def _recording(driver: Driver) -> RecordingPolicy:
    policy = driver.cache.eviction
    assert isinstance(policy, RecordingPolicy)
    return policy


def _request(index: int, keys: Any, retention: tuple[Retention, ...] = ()) -> Request:
    return Request(
        id=index,
        arrival=index,
        prompt_tokens=len(keys) * _KEY,
        keys=list(keys),
        key_tokens=_KEY,
        retention=retention,
    )


def _by_three(decisions: list[Decision]) -> list[list[Any]]:
    keys = [key for decision in decisions for _, key, _ in decision.evicted]
    return [keys[start : start + 3] for start in range(0, len(keys), 3)]


def _flat(_context: int, tokens: int) -> float:
    """Return a cost per token that is the same everywhere, and exact in floats."""
    return tokens / 1024
