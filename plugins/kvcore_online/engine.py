"""The engine of a server: the loop of `kvcore run` on a thread, fed while it runs.

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
from time import perf_counter_ns
from typing import Any

import attrs

from kvcore.cache import KVCache
from kvcore.errors import InputError
from kvcore.request import Key, Request, TextRequest
from kvcore.serving.arrivals import NEVER, Arrivals
from kvcore.serving.job import DONE, Job
from kvcore.serving.loop import ServingLoop
from kvcore.serving.scheduler import Batching, Scheduler
from kvcore.serving.stats import RunLog
from kvcore.trace import Trace
from kvcore.units import NS_PER_S, PS_PER_NS, PS_PER_S
from kvcore_engine.executor import TensorExecutor
from kvcore_online.stored import StoredBlocks

FINISHED, REJECTED, CANCELLED, FAILED = "finished", "rejected", "cancelled", "failed"
"""The ways in which a request ends."""

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


class LiveInbox(Arrivals):
    """Requests that arrive while the loop runs; any thread may add, cancel and close."""

    def __init__(self, on_ended: Callable[[Request, int], None]) -> None:
        super().__init__(())
        self._on_ended = on_ended
        self._coming: deque[Request] = deque()
        self.changed = threading.Condition()
        self.left: dict[int | str, str] = {}
        self.closing = False

    def put(self, request: Request) -> None:
        """Add a request."""
        with self.changed:
            self._coming.append(request)
            self.next_at = 0
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

    def take(self) -> tuple[int, Request]:
        """Remove and return the next request, with the time 0, which stands for now."""
        with self.changed:
            request = self._coming.popleft()
            self.next_at = 0 if self._coming else NEVER
        return 0, request

    def ended(self, request: Request, now: int) -> None:
        """Called when a request has ended, in any way."""
        self._on_ended(request, now)


class Tally(RunLog):
    """The log of a server that never ends: counts in place of a row for each request.

    Attributes:
        requests: numbers of ended requests, by the way in which they ended.
        prompt_tokens, output_tokens: sums over finished requests.
        ttft_ns, e2e_ns: sums of the times of finished requests.
        why: reason of the last rejection.
        cancelled: id of the last request that was aborted since its client has disconnected.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.requests = dict.fromkeys((FINISHED, REJECTED, CANCELLED), 0)
        self.prompt_tokens = self.output_tokens = 0
        self.ttft_ns = self.e2e_ns = 0
        self.why = ""
        self.cancelled: int | str | None = None

    def ended(self, job: Job, now: int) -> None:
        """Count a request that has ended."""
        if job.request.id == self.cancelled:
            self.requests[CANCELLED] += 1
            return
        self.requests[FINISHED] += 1
        self.prompt_tokens += job.request.prompt_tokens
        self.output_tokens += job.output_tokens
        self.ttft_ns += (job.first_token or now) - job.arrival
        self.e2e_ns += now - job.arrival

    def rejected(self, job: Job, why: str) -> None:
        """Count a request that was rejected, or aborted for its client."""
        self.why = why
        how = CANCELLED if job.request.id == self.cancelled else REJECTED
        self.requests[how] += 1


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


class LiveLoop(ServingLoop):
    """The serving loop by the wall clock, with clients that connect and disconnect.

    Args:
        cache, scheduler, executor, batching: as for `ServingLoop`.
        stored: publisher of stored and removed blocks; None: they are not published.
        clock: returns the time in ns.

    Attributes:
        inbox: the queue of new requests.
        open: requests that have arrived and not ended, by id.
        listeners: listeners of requests in the inbox, by id; set before the request is put.
    """

    log: Tally
    _cache: KVCache

    def __init__(
        self,
        cache: KVCache,
        scheduler: Scheduler,
        executor: TensorExecutor,
        batching: Batching,
        stored: StoredBlocks | None = None,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        if batching.rules.lag:
            msg = "lag=1: this engine plans a step once the one before has ended; give lag=0"
            raise InputError(msg)
        self.inbox = LiveInbox(self._gone)
        tally = Tally(cache.pool.blocks)
        super().__init__(self.inbox, cache, scheduler, executor, batching, log=tally)
        self.open: dict[int | str, OpenRequest] = {}
        self.listeners: dict[int | str, Listener] = {}
        self._tensors = executor
        self._stored = stored
        self._leaving: dict[int | str, str] = {}
        self._clock, self._began_ns = clock, clock()
        self._trace = cache.trace if isinstance(cache.trace, Trace) else None
        self._flush_at_ps = FLUSH_PS

    def begin(self) -> bool:
        """Advance the clock, abort requests that need no more tokens, and plan a step."""
        elapsed_ps = (self._clock() - self._began_ns) * PS_PER_NS
        self.clock_ps = max(self.clock_ps, elapsed_ps)
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
        self._tensors.measured.clear()
        streams = self._tensors.streams
        for name in list(streams):
            each = self.open[name]
            new = streams[name].output[each.sent :]
            if new:
                each.sent += len(new)
                each.listener(Tokens(new, cached=each.cached))
            if each.ended:
                del streams[name], self.open[name]
                each.listener(Tokens(end=FINISHED, cached=each.cached))

    def _take_arrivals(self, now: int) -> None:
        inbox = self.inbox
        while inbox.next_at <= now:
            _, request = inbox.take()
            self._arrive(request, now, now)

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
                self._stored.generated(job, keys, self._tensors.streams[job.request.id])
        super()._name(named, now)

    def _wait(self) -> bool:
        """Wait until a request arrives, or a load or timer is due; return False at the end."""
        batcher, inbox = self.batcher, self.inbox
        due = [heap[0][0] for heap in (batcher.timers, batcher.loads) if heap]
        now = self.clock_ps // PS_PER_NS
        seconds = max((min(due) - now) / NS_PER_S, 0) if due else None
        if self._trace is not None and not self.open:
            self._flush(self._trace)  # nothing may happen for long
        with inbox.changed:
            if inbox.next_at == NEVER and not inbox.left:
                if inbox.closing and not self.open:
                    return False
                inbox.changed.wait(seconds)
        return True

    def _gone(self, request: Request, now: int) -> None:
        """Called when a request has ended, in any way."""
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
            each = self.open.get(name)
            # A request that is not open is in the inbox, or has ended.
            if each is not None and self._abort(each, end):
                continue
            if each is not None or name in self.listeners:
                self._leaving[name] = end

    def _abort(self, each: OpenRequest, end: str) -> bool:
        """Abort a request; return False if it cannot be aborted before it runs again."""
        name = each.job.request.id
        if end == CANCELLED:
            self.log.cancelled = name
        if not self.abort(each.job, GONE):
            return False
        self._tensors.streams.pop(name, None)
        del self.open[name]
        each.listener(Tokens(end=end, cached=each.cached))
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
        self.loop.listeners[request.id] = listener
        self.loop.inbox.put(request)
        if self.failure is not None:
            listener(Tokens(end=FAILED, reason=str(self.failure)))

    def cancel(self, request: int | str) -> None:
        """Cancel a request of a client that has disconnected."""
        self.loop.inbox.leave(request, CANCELLED)

    def finish(self, request: int | str) -> None:
        """End a request before its last token, since its text has ended."""
        self.loop.inbox.leave(request, FINISHED)

    def close(self) -> None:
        """Wait until all requests have ended and the thread has stopped."""
        self.loop.inbox.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - a thread would drop it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End all requests because of `error`."""
        self.failure = error
        ended = Tokens(end=FAILED, reason=str(error))
        for listener in (
            *(each.listener for each in self.loop.open.values()),
            *self.loop.listeners.values(),
        ):
            listener(ended)
        self._on_failure(error)
