"""What a trace says became of its requests, in the columns that a run leaves."""

from __future__ import annotations

from typing import NoReturn

from kvcore.cache.geometry import Geometry
from kvcore.cache.stats import CacheStats
from kvcore.errors import InputError
from kvcore.policy import DecodeSteps, Job
from kvcore.request import SLO
from kvcore.serving.log import RunLog
from kvcore.trace.reader import Line, TraceReader
from kvcore.trace.requests import read_request
from kvcore.trace.schema import EVENTS

BY_HAND = (
    "is no replay of one request after another, so its calls were made by hand; what "
    "`kvcore compare`, `simulate` and `run` have recorded can be run again"
)


class Recorded:
    """The requests of a trace, line by line, as a run would have logged them.

    Args:
        reader: of the trace; named in errors.
        header: its first line.
        slo: what is expected for requests that bring no SLO of their own.

    Attributes:
        log, stats: as those of a run. Without a clock a request ends when it is closed.
        evicted: blocks that left the cache, for room or because they expired.
    """

    def __init__(self, reader: TraceReader, header: Line, slo: SLO | None) -> None:
        self.log = RunLog(header["blocks"], slo)
        self.stats = CacheStats()
        self.evicted = 0
        self._reader = reader
        self._timed = header["mode"] != "untimed"
        self._geometry = Geometry(header["count"], header["block_size"], header["key_tokens"])
        self._jobs: dict[int | str, Job] = {}
        self._open: dict[int, Job] = {}
        self._steps = DecodeSteps()
        self._serial = 0
        events = (name for name in EVENTS if hasattr(self, f"_{name.lower()}"))
        self._take = {name: getattr(self, f"_{name.lower()}") for name in events}

    def take(self, line: Line) -> None:
        """Take in a line after HEADER. O(1), or O(keys) of a request.

        Raises:
            InputError: it is of no run that can be made again.
            TraceError: a request that cannot be.
        """
        take = self._take.get(line["event"])
        if take is not None:
            take(line)

    def _request(self, line: Line) -> None:
        if not self._timed and self._jobs:
            self._by_hand()
        try:
            request = read_request(line)
        except InputError as error:
            self._reader.fail(f"REQUEST: {error}")
        self._serial += 1
        slo = request.slo or self.log.slo
        job = Job(request, self._serial, line["t"], self._steps, request.prompt, slo)
        self._jobs[request.id] = job

    def _hit(self, line: Line) -> None:
        self._admit(line, line["blocks"])

    def _miss(self, line: Line) -> None:
        if line["seq"] not in self._open:
            self._admit(line, 0)

    def _admit(self, line: Line, hit: int) -> None:
        job = self._jobs.get(line["request"])
        again = "again" in line
        if job is None or (again and not self._timed):
            self._by_hand()
        self._open[line["seq"]] = job
        _, tokens, _, _, lookup, _ = self._geometry.prompt(job.request)
        hit_tokens = hit * self._geometry.block_size
        self.stats.admitted(lookup, hit, tokens, hit_tokens, again=again)
        if not again:
            job.admitted, job.hit = line["t"], hit_tokens

    def _evict(self, line: Line) -> None:
        if line["scope"] == "sequence":
            self.stats.forgotten_blocks += line["blocks"]
        else:
            self.evicted += sum(abs(count) for _, count in line["runs"])

    def _free(self, line: Line) -> None:
        if line["reason"] == "rollback":
            self._by_hand()
        elif line["reason"] == "close":
            job = self._open.pop(line["seq"])
            if not self._timed:
                self.log.ended(self._jobs.pop(job.request.id), line["t"])

    def _first_token(self, line: Line) -> None:
        self._jobs[line["request"]].first_token = line["t"]

    def _preempt(self, line: Line) -> None:
        job = self._jobs[line["request"]]
        job.pauses += line["how"] == "pause"
        job.recomputes += line["how"] == "recompute"

    def _finish(self, line: Line) -> None:
        self.log.ended(self._jobs.pop(line["request"]), line["t"])

    def _reject(self, line: Line) -> None:
        self.log.rejected(self._jobs.pop(line["request"]), line["why"])

    def _fork(self, line: Line) -> None:
        del line
        self._by_hand()

    def _end(self, line: Line) -> None:
        del line
        if self._jobs:
            self._by_hand()

    def _by_hand(self) -> NoReturn:
        msg = f"{self._reader.file}:{self._reader.line}: the trace {BY_HAND}"
        raise InputError(msg)
