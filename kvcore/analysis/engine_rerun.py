"""The calls of an engine's recording, made again in a cache that decides otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.cache import KVCache, Sequence
from kvcore.errors import InputError, OutOfBlocks
from kvcore.progress import Tick, unseen
from kvcore.request import Request
from kvcore.serving import DecodeSteps
from kvcore.serving.loop import RunLog
from kvcore.serving.scheduler import Job
from kvcore.trace.fields import read_keys, read_request
from kvcore.trace.reader import TraceReader
from kvcore.trace.state import run_blocks

if TYPE_CHECKING:
    from kvcore.trace import events


@attrs.define(eq=False)
class _Asked:
    """A request of the recording.

    Attributes:
        request: with the keys of what it has generated so far.
        job: its row in the log.
        resumed: whether it was admitted before.
        preempted: whether its sequence closes next because it was preempted.
    """

    request: Request
    job: Job
    resumed: bool = False
    preempted: bool = False


class EngineRerun:
    """Makes the calls of a recording again: admissions, growth, commits and ends.

    Each comes when it came in the engine, in the same order, whatever hits. So nothing is
    assumed of how the engine would have scheduled with other hits, or how fast. Blocks that
    the engine had lost are not lost here, and none is evicted before its room is needed.

    Args:
        file: the recording.
        cache: the cache, as large as the engine's or not.
        tick: called with 1 for each request.

    Attributes:
        log: what became of the requests, at the engine's times.
    """

    def __init__(self, file: Path, cache: KVCache, tick: Tick = unseen) -> None:
        self.log = RunLog(cache.pool.blocks)
        self._file, self._cache, self._tick = file, cache, tick
        self._steps = DecodeSteps()
        self._asked: dict[int | str, _Asked] = {}
        self._seqs: dict[int, tuple[_Asked, Sequence]] = {}
        # The admission whose ALLOC, if it has one, is the next line.
        self._admitted: events.Hit | events.Miss | None = None
        self._calls: dict[str, Callable[[Any], None]] = {
            name: getattr(self, f"_{name.lower()}")
            for name in (
                *("REQUEST", "ALLOC", "KEYS", "COMMIT", "PREEMPT", "FREE"),
                *("FIRST_TOKEN", "FINISH", "REJECT"),
            )
        }

    def run(self) -> None:
        """Make all calls.

        Raises:
            InputError: at some time the blocks in use are more than the cache has.
        """
        for event in TraceReader(self._file):
            try:
                if event.event in ("HIT", "MISS"):
                    self._admitted = self._admitted or event  # type: ignore[assignment]
                    continue
                if self._admitted is not None and event.event != "ALLOC":
                    self._open(self._admitted, 0)
                call = self._calls.get(event.event)
                if call is not None:
                    call(event)
            except OutOfBlocks as error:
                msg = (
                    f"{self._file}: at line {event.n + 1} the engine had more in use than "
                    f"there is room for: {error}; give more blocks"
                )
                raise InputError(msg) from error

    def _request(self, event: events.Request) -> None:
        request, serial = read_request(event), len(self._asked) + 1
        job = Job(request, serial, event.t, self._steps, request.prompt_tokens)
        self._asked[event.id] = _Asked(request, job)
        self._cache.announce(request, event.t)
        self._tick(1)

    def _open(self, event: events.Hit | events.Miss, allocated: int) -> None:
        """Admit the request of `event`, whose table has `allocated` blocks after its hit."""
        self._admitted = None
        asked, cache, size = self._asked[event.request], self._cache, self._size
        request = asked.request
        hit = event.blocks if event.event == "HIT" else 0  # type: ignore[union-attr]
        blocks = hit + allocated
        # Of what it has computed before, the last token is computed again.
        end = max(request.prompt_tokens, (blocks - 1) * size + 1)
        target = end if asked.resumed else None
        found = cache.match(request, event.t, target).blocks
        first = max(0, blocks - found) * size
        seq = cache.open(request, first, event.t, resumed=asked.resumed, target=target)
        if not asked.resumed:
            asked.job.admitted, asked.job.hit = event.t, seq.hit_blocks * size
        asked.resumed = True
        self._seqs[event.seq] = asked, seq

    def _alloc(self, event: events.Alloc) -> None:
        blocks = run_blocks(event.runs)
        if self._admitted is not None:
            self._open(self._admitted, blocks)
            return
        _, seq = self._seqs[event.seq]
        missing = event.first + blocks - seq.blocks
        if missing > 0:
            self._cache.extend(seq, missing * self._size, event.t)

    def _keys(self, event: events.Keys) -> None:
        asked, keys = self._asked[event.request], read_keys(event.keys)
        output = [*asked.request.output_keys, *keys]
        asked.request = attrs.evolve(asked.request, output_keys=output)
        for owner, seq in self._seqs.values():
            if owner is asked:
                seq.keys = [*seq.keys, *keys]
                seq.cacheable += len(keys)
        if self._cache.trace is not None:
            self._cache.trace.keys(event.t, request=event.request, keys=keys)

    def _commit(self, event: events.Commit) -> None:
        _, seq = self._seqs[event.seq]
        tokens = (event.first + event.blocks) * self._size - seq.computed
        if tokens > 0:
            self._cache.commit(seq, tokens, event.t)

    def _preempt(self, event: events.Preempt) -> None:
        asked, seq = self._seqs[event.seq]
        asked.preempted = True
        asked.job.recomputes += 1
        if self._cache.trace is not None:
            self._cache.trace.preempt(
                event.t, request=event.request, seq=seq.id, how="recompute"
            )

    def _first_token(self, event: events.FirstToken) -> None:
        self._asked[event.request].job.first_token = event.t
        if self._cache.trace is not None:
            seq = self._seqs[event.seq][1].id
            self._cache.trace.first_token(event.t, request=event.request, seq=seq)

    def _finish(self, event: events.Finish) -> None:
        asked, seq = self._seqs[event.seq]
        if self._cache.trace is not None:
            self._cache.trace.finish(
                event.t, request=event.request, seq=seq.id, output=event.output
            )
        self.log.ended(asked.job, event.t)

    def _reject(self, event: events.Reject) -> None:
        if self._cache.trace is not None:
            self._cache.trace.reject(event.t, request=event.request, why=event.why)
        self.log.rejected(self._asked[event.request].job, event.why)

    def _free(self, event: events.Free) -> None:
        if event.reason != "close":
            return
        asked, seq = self._seqs.pop(event.seq)
        self._cache.close(seq, event.t, preempted=asked.preempted)
        asked.preempted = False

    @property
    def _size(self) -> int:
        return self._cache.geometry.block_size
