"""The engine of a server: the serving loop on a thread, fed while it runs.

HTTP (asyncio)                          engine (one thread)
--------------                          -------------------
submit ----> inbox --------------------> begin: take, plan
cancel ----> left  --------------------> abort
queue  <---- call_soon_threadsafe <----- end: a step, tokens out
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, Protocol

import attrs

from kvcore.cache import KVCache, ServedCache
from kvcore.cache import Sequence as CacheSequence
from kvcore.errors import InputError
from kvcore.request import Key, Request, TextRequest
from kvcore.serving.job import DONE, Job
from kvcore.serving.latency import Executor
from kvcore.serving.loop import ServingLoop
from kvcore.serving.scheduler import Batching, Scheduler
from kvcore.trace import Trace
from kvcore.units import NS_PER_S, PS_PER_NS, PS_PER_S
from kvcore.workloads.arrivals import NEVER, Arrivals
from kvcore_engine.tokens import TokenStream
from kvcore_online.stored import StoredBlocks
from kvcore_online.tally import CANCELLED, FAILED, FINISHED, REJECTED, Tally
from kvcore_plugins.latency.measured_steps import MeasuredStep

GONE = "its client has gone"

FLUSH_PS = PS_PER_S
"""Picoseconds between two flushes of the trace, in case the process is killed."""


@attrs.frozen
class Tokens:
    """New tokens of a request, or its end.

    Attributes:
        ids: the new token ids.
        end: the way in which the request has ended; None: it goes on.
        reason: the reason of an end that is no FINISHED; None where there is none.
        cached: number of prompt tokens that were not computed: they hit, or a tier had them.
    """

    ids: Sequence[int] = ()
    end: str | None = None
    reason: str | None = None
    cached: int = 0


Listener = Callable[[Tokens], None]
"""Called on the engine's thread with each part of a request's output, and with its end."""


class LiveExecutor(Executor, Protocol):
    """Runs steps, and generates tokens: on tensors, or simulated.

    Attributes:
        streams: token ids of the requests that run, by request id.
        measured: the steps that were measured since the list was cleared.
    """

    streams: dict[int | str, TokenStream]
    measured: list[MeasuredStep]


class LiveInbox(Arrivals):
    """Requests that arrive while the loop runs; any thread may add, cancel and close.

    Args:
        on_ended: called with each request that has ended, and the time (ns).
        clock: returns the time in ns, by the clock of the loop.
    """

    def __init__(
        self, on_ended: Callable[[Request, int], None], clock: Callable[[], int]
    ) -> None:
        super().__init__(())
        self._on_ended, self._clock = on_ended, clock
        self._coming: deque[tuple[int, Request]] = deque()
        self.changed = threading.Condition()
        self.left: dict[int | str, str] = {}
        self.closing = False

    def put(self, request: Request) -> None:
        """Add a request."""
        with self.changed:
            self._coming.append((self._clock(), request))
            self.next_at = self._coming[0][0]
            self.changed.notify()

    def leave(self, request: int | str, end: str) -> None:
        """Record that a request needs no more tokens; the first `end` of a request holds."""
        with self.changed:
            self.left.setdefault(request, end)
            self.changed.notify()

    def close(self) -> None:
        """End the loop once all requests have ended."""
        with self.changed:
            self.closing = True
            self.changed.notify()

    def wait_closed(self, seconds: float) -> None:
        """Wait for some seconds, or until the inbox is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing, seconds)

    def take(self) -> tuple[int, Request]:
        """Remove and return the next request, with its time of arrival (ns)."""
        with self.changed:
            arrival, request = self._coming.popleft()
            self.next_at = self._coming[0][0] if self._coming else NEVER
        return arrival, request

    def ended(self, request: Request, now: int) -> None:
        """Pass on that a request has ended, in any way."""
        self._on_ended(request, now)


@attrs.define(eq=False)
class OpenRequest:
    """A request between its arrival and its end.

    Attributes:
        job: the job of the request.
        listener: called with its output.
        sent: number of output tokens that the listener has got.
        ended: whether the request has ended; the listener gets that after the last tokens.
    """

    job: Job
    listener: Listener
    sent: int = 0
    ended: bool = False

    @property
    def cached(self) -> int:
        """Number of prompt tokens that hit, or were loaded from tiers."""
        return self.job.hit + self.job.loaded


def share_keys(seq: CacheSequence) -> None:
    """Make the keys of the blocks that a sequence shares those of their first prompt. O(keys).

    A cached block holds the keys of its whole prompt: equal ones of many prompts take memory
    once, and 8 bytes a prompt in place of 57.
    """
    keys, above = seq.keys, seq.span
    while above.parent is not None and above.path_keys is keys:
        above = above.parent
    if isinstance(keys, list):
        known = above.end // above.geometry.ratio
        keys[:known] = above.path_keys[:known]


class LiveLoop(ServingLoop):
    """The serving loop by the wall clock, with clients that connect and disconnect.

    Args:
        cache, scheduler, executor, batching: as for `ServingLoop`.
        stored: publisher of stored and removed blocks; None: they are not published.
        clock: returns the time in ns.
        speed: times as fast as `clock` that a step is to pass, which the executor has only
            computed the time of; None: a step has taken the time that the executor says.
        sleep: waits for some seconds of `clock`; None: at most until the inbox is closed, when
            no client waits for tokens any more.

    Attributes:
        inbox: the queue of new requests.
        open: requests that have arrived and not ended, by id.
        listeners: listeners of requests in the inbox, by id; set before the request is put.
        paced: whether steps are to take the time that the executor says.
        idle: whether it waits for requests, or for what tiers load: no step is to run.
    """

    log: Tally

    def __init__(
        self,
        cache: ServedCache,
        scheduler: Scheduler,
        executor: LiveExecutor,
        batching: Batching,
        stored: StoredBlocks | None = None,
        clock: Callable[[], int] = perf_counter_ns,
        *,
        speed: float | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if batching.rules.lag:
            msg = "lag=1: this engine plans a step once the one before has ended; give lag=0"
            raise InputError(msg)
        self.inbox = LiveInbox(self._gone, self.elapsed_ns)
        tally = Tally(cache.pool.blocks)
        super().__init__(self.inbox, cache, scheduler, executor, batching, log=tally)
        self.open: dict[int | str, OpenRequest] = {}
        self.listeners: dict[int | str, Listener] = {}
        self._tokens = executor
        self._stored = stored
        self._leaving: dict[int | str, str] = {}
        self._clock, self._began_ns = clock, clock()
        self.paced, self._speed = speed is not None, speed or 1.0
        self._sleep = sleep or self.inbox.wait_closed
        self.idle = True
        self.on_first_token = self._answered
        self._trace = cache.trace if isinstance(cache.trace, Trace) else None
        self._flush_at_ps = FLUSH_PS

    def elapsed_ns(self) -> int:
        """Return the time (ns) since the start, as the loop counts it."""
        return int((self._clock() - self._began_ns) * self._speed)

    @property
    def behind_ns(self) -> int:
        """How long ago (ns) the last step has ended; below 0: it ends in the future."""
        return self.elapsed_ns() - self.clock_ps // PS_PER_NS

    def begin(self) -> bool:
        """Abort requests that need no more tokens, and plan a step, which begins now.

        A step with a given time begins when the one before has ended, however late it is.
        """
        if not self.paced:
            self._keep_up()
        if self._trace is not None and self.clock_ps >= self._flush_at_ps:
            self._flush(self._trace)
        if self.inbox.left or self._leaving:
            self._let_go()
        return super().begin()

    def _flush(self, trace: Trace) -> None:
        trace.flush()
        self._flush_at_ps = self.clock_ps + FLUSH_PS

    def end(self) -> None:
        """Run a step, and pass its tokens to the listeners."""
        super().end()
        self._tokens.measured.clear()
        self.log.later_tokens()
        if self.paced and (behind_ns := self.behind_ns) < 0:
            self._sleep(-behind_ns / NS_PER_S / self._speed)
        streams = self._tokens.streams
        for name in list(streams):
            opened = self.open[name]
            new = streams[name].output[opened.sent :]
            opened.sent += len(new)
            if opened.ended:
                del streams[name], self.open[name]
                opened.listener(Tokens(new, FINISHED, cached=opened.cached))
            elif new:
                opened.listener(Tokens(new, cached=opened.cached))

    def _answered(self, job: Job, now: int) -> None:
        self.log.got_first_token(job, now)
        if isinstance(self._cache, KVCache) and job.seq is not None:
            share_keys(job.seq)

    def _take_arrivals(self, now: int) -> None:
        inbox = self.inbox
        while inbox.next_at <= now:
            arrival, request = inbox.take()
            # A trace goes on at the time of its last line.
            self._arrive(request, now, arrival)

    def _arrive(self, request: Request, now: int, arrival: int, **known: Any) -> Job:
        if self._stored is not None and isinstance(request, TextRequest):
            self._stored.opened(request)
        job = super()._arrive(request, now, arrival, **known)
        listener = self.listeners.pop(request.id)
        if job.stage == DONE:
            listener(Tokens(end=REJECTED, reason=self.log.why))
        else:
            self.open[request.id] = OpenRequest(job, listener)
        return job

    def _name(self, named: Iterable[tuple[Job, Sequence[Key]]], now: int) -> None:
        named = list(named)
        if self._stored is not None:
            for job, keys in named:
                self._stored.generated(job, keys, self._tokens.streams[job.request.id])
        super()._name(named, now)

    def _wait(self) -> bool:
        """Wait until a request arrives, or a load or timer is due; return False at the end."""
        batcher, inbox, self.idle = self.batcher, self.inbox, True
        due = [heap[0][0] for heap in (batcher.timers, batcher.loads) if heap]
        now = self.elapsed_ns()
        seconds = max((min(due) - now) / NS_PER_S / self._speed, 0) if due else None
        if self._trace is not None and not self.open:
            self._flush(self._trace)  # nothing may happen for long
        with inbox.changed:
            if inbox.next_at == NEVER and not inbox.left:
                if inbox.closing and not self.open:
                    return False
                inbox.changed.wait(seconds)
        self._keep_up()
        self.idle = False
        return True

    def _keep_up(self) -> None:
        """Advance the clock to the present, unless a step ends later."""
        self.clock_ps = max(self.clock_ps, self.elapsed_ns() * PS_PER_NS)

    def _gone(self, request: Request, now: int) -> None:
        """Mark a request as ended, in any way, and forget what only an open one needs."""
        del now
        if request.id in self.open:
            self.open[request.id].ended = True
        if self._stored is not None and isinstance(request, TextRequest):
            self._stored.closed(request)
        if self._trace is not None:
            # Both know each request of a run, which has no end here.
            self._trace.forget(request)
            self._cache.disown(request)

    def _let_go(self) -> None:
        """Abort requests that need no more tokens.

        A request that waits for a transfer, or for its blocks after a preemption, is aborted
        when it runs again.
        """
        inbox = self.inbox
        with inbox.changed:
            left, inbox.left = {**inbox.left, **self._leaving}, {}
        self._leaving = {}
        for name, end in left.items():
            opened = self.open.get(name)
            # A request that is not open is in the inbox, or has ended.
            if opened is not None and self._abort(opened, end):
                continue
            if opened is not None or name in self.listeners:
                self._leaving[name] = end

    def _abort(self, opened: OpenRequest, end: str) -> bool:
        """Abort a request; return False if it cannot be aborted before it runs again."""
        name = opened.job.request.id
        if end == CANCELLED:
            self.log.cancelled = name
        if not self.abort(opened.job, GONE):
            return False
        self._tokens.streams.pop(name, None)
        del self.open[name]
        opened.listener(Tokens(end=end, cached=opened.cached))
        return True


class LiveEngine:
    """The thread that runs the loop.

    Args:
        loop: the loop.
        on_failure: called on the engine's thread with an error that has ended the loop.

    Attributes:
        failure: that error; None if there is none.
    """

    def __init__(self, loop: LiveLoop, on_failure: Callable[[BaseException], None]) -> None:
        self.loop = loop
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="kvcore-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Serve `request`; `listener` is called on the engine's thread, last with an end."""
        with self.loop.inbox.changed:
            if self.failure is None:
                self.loop.listeners[request.id] = listener
                self.loop.inbox.put(request)
                return
        listener(Tokens(end=FAILED, reason=str(self.failure)))

    def cancel(self, request: int | str) -> None:
        """Cancel a request of a client that has disconnected."""
        self.loop.inbox.leave(request, CANCELLED)

    def finish(self, request: int | str) -> None:
        """End a request before its last token, since its text has ended."""
        self.loop.inbox.leave(request, FINISHED)

    def close(self) -> None:
        """Wait until all requests have ended and the thread has stopped, if it has started."""
        self.loop.inbox.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - a thread would drop it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End all requests because of `error`."""
        with self.loop.inbox.changed:  # a request is submitted before, or refused: told once
            self.failure = error
            listeners = [*self.loop.listeners.values()]
        listeners += [opened.listener for opened in self.loop.open.values()]
        for listener in listeners:
            # A listener may have caused the failure: the others are told all the same.
            with suppress(Exception):
                listener(Tokens(end=FAILED, reason=str(error)))
        self._on_failure(error)
