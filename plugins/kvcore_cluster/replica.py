"""A simulated replica: a serving loop whose turns a cluster begins and ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcore.cache.served import ServedCache, held_blocks
from kvcore.request import SLO, Request
from kvcore.serving.drafter import Drafter
from kvcore.serving.latency import LatencyModel, SimulatedExecutor, StepTimes
from kvcore.serving.loop import ServingLoop
from kvcore.serving.router import Replica
from kvcore.serving.scheduler import Batching, Scheduler
from kvcore.serving.simulate import served_batching
from kvcore.units import NS_PER_S, PS_PER_NS
from kvcore.workloads.arrivals import NEVER, Arrivals
from kvcore_plugins.drafter.speculation import SpeculativeSimulator


class Inbox(Arrivals):
    """The requests that a router has sent to one replica, and that it has not taken yet.

    Args:
        on_ended: called with each request that has ended here, and the time (ns).
    """

    def __init__(self, on_ended: Callable[[Request, int], None]) -> None:
        super().__init__(())
        self._on_ended = on_ended
        self._sent: deque[tuple[int, int, Request]] = deque()

    def put(self, request: Request, now: int, arrival: int) -> None:
        """Add a request that is sent at `now`, and came to the cluster at `arrival`, ns."""
        self._sent.append((now, arrival, request))
        self._update()

    def remove(self, request: int | str) -> bool:
        """Remove the request of this id; return True if it was there."""
        left = [entry for entry in self._sent if entry[2].id != request]
        removed = len(left) < len(self._sent)
        self._sent = deque(left)
        self._update()
        return removed

    def ended(self, request: Request, now: int) -> None:
        """Called when a request has ended; calls the cluster."""
        self._on_ended(request, now)

    def take_sent(self) -> tuple[int, int, Request]:
        """Remove the next request; return when it was sent, when it arrived, and itself."""
        taken = self._sent.popleft()
        self._update()
        return taken

    def _update(self) -> None:
        """Set when the next request was sent."""
        self.next_at = self._sent[0][0] if self._sent else NEVER


class ReplicaLoop(ServingLoop):
    """The serving loop of a replica; the cluster begins and ends its turns.

    Args:
        cache, scheduler, batching, slo: as for `ServingLoop`.
        latency: gives the time of a step.
        on_first_token: called with each request whose first token comes, and the time (ns).
        on_ended: called with each request that has ended, and the time (ns).
        drafter: gives the number of accepted drafts; None: steps verify none.

    Attributes:
        handed: rows of its log whose requests are decoded by another replica.
    """

    def __init__(
        self,
        cache: ServedCache,
        scheduler: Scheduler,
        latency: LatencyModel,
        batching: Batching,
        *,
        slo: SLO | None,
        on_first_token: Callable[[Request, int], None],
        on_ended: Callable[[Request, int], None],
        drafter: Drafter | None = None,
    ) -> None:
        batching = served_batching(cache, batching)
        self.inbox = Inbox(on_ended)
        self.executor = (
            SimulatedExecutor(latency)
            if drafter is None
            else SpeculativeSimulator(latency, drafter)
        )
        super().__init__(self.inbox, cache, scheduler, self.executor, batching, slo=slo)
        self.cache = cache
        self.handed: set[int] = set()
        self.on_first_token = lambda job, now: on_first_token(job.request, now)
        # The steps of a jump that has begun and is not run yet, and their times.
        self._ahead: tuple[int, StepTimes] | None = None

    def due(self, horizon: Callable[[], int], *, reporting: bool) -> int:
        """Return when (ps) the turn that has begun ends, if no request comes before.

        A jump over decode steps is run when it ends, or when a request comes (`interrupt`).
        If its growth may preempt a job, or evict blocks whose eviction must be reported at
        its time, it is run at once, up to `horizon`. So it is with cache groups, where a window
        that passes a block may end it for a job that waits.

        Args:
            horizon: returns the time (ns) before which nothing comes to this replica.
            reporting: whether evictions are reported to a router.
        """
        if self.batcher.chunks or not self._jumps:
            self._computed = self._compute()
            return self.clock_ps + self._computed.took_ps
        lines, event = self._foreseen()
        steps, times = self.allocator.foresee(lines, self.clock_ps, event)
        if steps > 1 and (
            self.cache.grouped or self._growth(steps) > self._room(reporting=reporting)
        ):
            self._jumped = self._jump(horizon())
            return self.clock_ps + self._jumped[1]
        self._ahead = steps, times
        return self.clock_ps + times.total(steps)

    def interrupt(self, now: int) -> int | None:
        """Cut the jump that is under way short at `now` (ns); return when (ps) it ends.

        None if no jump is under way that could end earlier.
        """
        if self._ahead is None:
            return None
        steps, times = self._ahead
        if steps > 1:
            steps = times.reach(now * PS_PER_NS - self.clock_ps, steps)
        return self._run_ahead(steps, times)

    def break_off(self, now: int) -> None:
        """End the current turn at `now` (ns); no other follows."""
        self.interrupt(now)
        super().break_off(now)

    def end(self) -> None:
        """Run the current turn to its end."""
        if self._ahead is not None:
            self._run_ahead(*self._ahead)
        super().end()

    def _run_ahead(self, steps: int, times: StepTimes) -> int:
        """Run `steps` steps of the jump that is under way; return when (ps) they end."""
        self._ahead = None
        self._jumped = self.allocator.run(steps, times, self.clock_ps)
        return self.clock_ps + self._jumped[1]

    def _growth(self, steps: int) -> int:
        """Return the blocks that the batch allocates after the first of `steps` steps."""
        first = self.batch.steps.count + 1
        return self.batch.growth_between(first, first + steps - 1)

    def _room(self, *, reporting: bool) -> int:
        """Return the blocks that a jump may allocate without an event before its end."""
        cache = self.cache
        # A tier that stores evicted blocks may use others for it.
        if reporting or cache.tiers:
            return cache.pool.free_blocks
        return cache.available_blocks

    def receive(self, request: Request, now: int, arrival: int) -> None:
        """Enqueue a request sent at `now`, which came to the cluster at `arrival` (both ns).

        A request that can never be served is rejected at once, even during a step, so that
        the next one of its session is not routed too late.
        """
        if self.unfit(request):
            self._arrive(request, now, arrival)
        else:
            self.inbox.put(request, now, arrival)

    def wake(self, now: int) -> None:
        """Move the clock of an idle loop to `now` (ns)."""
        if self.clock_ps < now * PS_PER_NS:
            self.clock_ps = now * PS_PER_NS

    def usage(self, now: int) -> float:
        """Return the share of the blocks that running requests hold at `now`, ns.

        The blocks that a jump takes while it is under way are counted as its steps begin.
        """
        used = held_blocks(self.cache)
        elapsed_ps = now * PS_PER_NS - self.clock_ps
        if self._ahead is not None and elapsed_ps > 0:
            steps, times = self._ahead
            used += self._growth(times.reach(elapsed_ps, steps))
        return used / self.cache.pool.blocks

    def replica(self, number: int) -> Replica:
        """Return this replica as a router sees it."""
        cache, max_seqs = self.cache, self.batcher.batching.max_seqs
        return Replica(number, cache.pool.blocks, cache.geometry.block_size, max_seqs)

    def join(self, replica: Replica, clock: Callable[[], int]) -> None:
        """Make `replica` read its load from this loop, at the time (ns) of `clock`."""
        replica.connect(lambda: self.usage(clock()), self._prefill_seconds)

    def _prefill_seconds(self, tokens: int, context: int) -> float:
        return self.batcher.server.prefill_ns(tokens, context) / NS_PER_S

    def _take_arrivals(self, now: int) -> None:
        inbox = self.inbox
        while inbox.next_at <= now:
            sent, arrival, request = inbox.take_sent()
            self._arrive(request, sent, arrival)


class Server:
    """A replica of the cluster: its loop, and the loops it had before it failed.

    Attributes:
        number: number of the replica.
        loop: the loop that serves now.
        lives: all loops so far, the present one last.
        sent: requests in flight, with their time of arrival, by id.
        turn: serial number of its present turn. Events in the heap have that of theirs: those
            of earlier turns are void.
        busy: whether a turn has begun.
        up: whether it is sent requests.
        draining: since when (ns) it was paid for, if it is to stop; else None.
    """

    def __init__(self, number: int, start: Callable[[], ReplicaLoop]) -> None:
        self.number = number
        self._start = start
        self.lives: list[ReplicaLoop] = []
        self.sent: dict[int | str, tuple[int, Request]] = {}
        self.turn = 0
        self.up = False
        self.draining: int | None = None
        self.restart()

    def restart(self) -> None:
        """Start again with an empty cache."""
        self.loop = self._start()
        self.lives.append(self.loop)
        self.busy = False
