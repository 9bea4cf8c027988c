"""The conformance tests of schedulers."""

from __future__ import annotations

import gc
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from weakref import WeakSet

import attrs
import pytest

from kvcore.cache import KVCache
from kvcore.policy import Job, Scheduler
from kvcore.request import SLO, Request
from kvcore.serving import Batching, simulate
from kvcore.specs import as_text, instantiate, qualified
from kvcore.testing.server import STEP, Call, Steady, ToyServer, watched
from kvcore.testing.traffic import Traffic, random_requests

_KEY = 4
_SEATS = 3
_AMPLE = 10**5
_PLAIN = (type(None), bool, int, float, str, Path)
_LONG = "long"
_seeds = pytest.mark.parametrize("seed", range(4))
_servers = pytest.mark.parametrize("server", ["toy", "loop"])


class SchedulerTests(ABC):
    """What holds of every scheduler. Derive a `Test...` class and say how to make yours.

        class TestMine(SchedulerTests):
            def make(self):
                return Mine()

    It serves random traffic twice: for a toy server, which checks each of its answers, and
    in the serving loop itself. Steps take 10 ms in both.

    Attributes:
        starves: whether a job may wait for as long as others keep coming. If not, a long one
            of low priority has to be served within seconds of overload.
    """

    starves: ClassVar[bool] = False

    @abstractmethod
    def make(self) -> Scheduler:
        """Return a new scheduler, with the same options each time."""

    def test_is_a_named_scheduler(self) -> None:
        """Its class derives from Scheduler and has a name and a docstring of its own."""
        scheduler = self.make()
        assert isinstance(scheduler, Scheduler), f"{scheduler!r} is no Scheduler"
        name = type(scheduler).name
        assert re.fullmatch(r"[\w.-]+", name), f"a name is letters, digits, _ . -: not {name!r}"
        assert type(scheduler).__doc__, f"{qualified(type(scheduler))} has no docstring"

    def test_is_built_from_text(self) -> None:
        """Its own options, written as text, make a scheduler with equal options."""
        scheduler = self.make()
        options = scheduler.options().items()
        strange = [name for name, value in options if not isinstance(value, _PLAIN)]
        if strange:
            pytest.skip(f"options without a text form: {', '.join(strange)}")
        text = {name: as_text(value) for name, value in options}
        again = instantiate(type(scheduler), text)
        assert again.options() == scheduler.options(), f"{text} gave other options"

    @_servers
    @_seeds
    def test_serves_everyone_once(self, seed: int, server: str) -> None:
        """With less room than the seats could use, every request ends, and exactly once."""
        requests = _requests(seed)
        calls = self.serve(server, requests, tokens=64)
        ended = Counter(job for method, _, job in calls if method == "finished")
        assert ended == Counter(request.id for request in requests)

    @_servers
    @_seeds
    def test_takes_no_more_seats_than_there_are(self, seed: int, server: str) -> None:
        """At no time do more jobs run than there are seats, and none runs twice at once."""
        running: set[object] = set()
        for method, now, job in self.serve(server, _requests(seed), tokens=64):
            if method == "admitted":
                assert job not in running, f"{now}: request {job} has a seat already"
                running.add(job)
                assert len(running) <= _SEATS, f"{now}: {running} run on {_SEATS} seats"
            elif method in {"queued", "finished"}:
                running.discard(job)

    @_servers
    @_seeds
    def test_leaves_no_seat_empty(self, seed: int, server: str) -> None:
        """With ample room nobody waits for longer than a step while a seat is free."""
        running: set[object] = set()
        waiting: set[object] = set()
        since = 0
        for method, now, job in self.serve(server, _requests(seed)):
            if method not in {"queued", "admitted", "finished"}:
                continue
            idle = len(running) < _SEATS and waiting
            assert not idle or now - since <= STEP + _AMPLE, (
                f"from {since} to {now} {waiting} waited while only {running} ran"
            )
            since = now
            running.discard(job)
            waiting.discard(job)
            if method != "finished":
                (waiting if method == "queued" else running).add(job)

    @_servers
    @_seeds
    def test_decides_alike_when_run_again(self, seed: int, server: str) -> None:
        """Two new schedulers decide alike: nothing depends on addresses or chance."""
        requests = _requests(seed)
        once, again = (self.serve(server, requests, tokens=64) for _ in range(2))
        assert once == again, "run again, it decided otherwise"

    @_seeds
    def test_is_told_the_same_with_event_jumps(self, seed: int) -> None:
        """Many decode steps at once, or one by one: it is told and asked the same."""
        requests = _requests(seed)
        at_once = self.serve("loop", requests, tokens=64)
        assert at_once == self.serve("loop", requests, tokens=64, jumps=False)

    @pytest.mark.parametrize("jumps", [True, False])
    def test_is_asked_only_at_events(self, jumps: bool) -> None:  # noqa: FBT001
        """A hundred times as many tokens lead to no more calls."""
        calls = {
            tokens: self.serve(
                "loop", [_request(n, output=tokens) for n in range(3)], jumps=jumps
            )
            for tokens in (30, 3000)
        }
        short, long = ([(call[0], call[2]) for call in these] for these in calls.values())
        assert short == long

    @_servers
    def test_starves_nobody(self, server: str) -> None:
        """A long job of low priority ends while shorter ones keep coming, more than fit."""
        if self.starves:
            pytest.skip("declares that jobs may starve: starves = True")
        requests = [
            _request(n, 3 * n * STEP, output=10 + n % 2, priority=5) for n in range(600)
        ]
        arrival = requests[20].arrival
        long = _request(_LONG, arrival, prompt=40 * _KEY, output=40, tenant="b")
        requests.insert(20, long)
        calls = self.serve(server, requests)
        (end,) = [now for method, now, job in calls if (method, job) == ("finished", _LONG)]
        assert end < requests[300].arrival, (
            f"it came at {arrival} ns, needed {50 * STEP}, and ended at {end}"
        )

    @_servers
    def test_forgets_who_is_done(self, server: str) -> None:
        """When all have finished it refers to none of them."""
        scheduler = self.make()
        jobs: WeakSet[Job] = WeakSet()
        self.serve(server, _requests(0), tokens=64, scheduler=scheduler, jobs=jobs)
        gc.collect()
        assert not jobs, f"it still refers to {sorted(map(repr, jobs))}"

    def serve(
        self,
        server: str,
        requests: Sequence[Request],
        *,
        tokens: int = _AMPLE,
        jumps: bool = True,
        scheduler: Scheduler | None = None,
        jobs: WeakSet[Job] | None = None,
    ) -> list[Call]:
        """Serve `requests` with 3 seats and room for so many tokens; return what was called.

        Args:
            server: `toy` or `loop`.
            requests: what to serve, in order of arrival.
            tokens: room for prompts and outputs.
            jumps: whether the loop may run many steps at once.
            scheduler: None for a new one.
            jobs: where to put those that arrive.
        """
        scheduler = scheduler or self.make()
        reason = scheduler.unusable()
        if reason is not None:
            pytest.skip(f"cannot work here: {reason}")
        calls = watched(scheduler, jobs)
        if server == "toy":
            ToyServer(scheduler, _SEATS, tokens).run(requests)
            return calls
        cache = KVCache(tokens // _KEY, _KEY, count="tokens", key_tokens=_KEY)
        simulate(
            requests,
            cache=cache,
            scheduler=scheduler,
            latency=Steady(),
            batching=Batching(max_seqs=_SEATS),
            jumps=jumps,
        )
        cache.check_integrity()
        assert not cache.sequences, f"{cache.sequences} were never closed"
        return calls


def _request(
    name: int | str, arrival: int = 0, *, prompt: int = 4 * _KEY, **fields: Any
) -> Request:
    keys = [f"{name}/{place}" for place in range(prompt // _KEY)]
    return Request(
        id=name, arrival=arrival, prompt=prompt, keys=keys, key_tokens=_KEY, **fields
    )


def _requests(seed: int) -> list[Request]:
    """Return requests of all kinds, more than three seats can serve as they come."""
    random = Random(seed)  # noqa: S311 - nothing secret
    traffic = Traffic(key_tokens=_KEY, longest_wait=2)
    return [
        attrs.evolve(
            request,
            arrival=request.arrival * STEP // 2,
            output=random.choice((0, 1, 3, 10, 20)),
            priority=random.randint(-1, 2),
            predicted=random.choice((None, None, 1, 10, 30)),
            slo=random.choice(_SLOS),
        )
        for request in random_requests(seed, 60, traffic)
    ]


_SLOS = (
    None,
    SLO(deadline=10 * STEP),
    SLO(deadline=100 * STEP),
    SLO(ttft=20 * STEP),
    SLO(ttft=5 * STEP, tpot=2 * STEP),
    SLO(ttft=5 * STEP, deadline=50 * STEP),
)
