"""The result of a run: one row a request, a summary, and both as files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import orjson

from kvcore.cache import KVCache
from kvcore.errors import InputError
from kvcore.files import whole_file
from kvcore.policy import LatencyModel
from kvcore.serving.batching import Batching
from kvcore.serving.fragmentation import Fragmentation
from kvcore.serving.log import UNJUDGED, RunLog
from kvcore.serving.metrics import summary
from kvcore.units import NANOSECONDS, PICOSECONDS

SUMMARY, REQUESTS = "summary.json", "requests.jsonl"


@attrs.frozen(slots=False, eq=False)
class Result:
    """What a run came to. See docs/reference/simulate-result.md for every number.

    Attributes:
        log: what was written down while it ran.
        cache: the cache it ran with.
        batching, latency: the caps and the latency model it ran with.
        fragmentation: what memory was used for, where that was measured.
        wall_s: seconds the run took on this machine; all else is the same on every one.
    """

    log: RunLog
    cache: KVCache
    batching: Batching
    latency: LatencyModel
    fragmentation: Fragmentation | None
    wall_s: float = 0.0

    @cached_property
    def requests(self) -> dict[str, list[Any]]:
        """The requests by column, in the order in which they ended.

        Made when first asked for: some 500 bytes a request.
        """
        log = self.log
        finished = [row not in log.reasons for row in range(len(log.ids))]
        return {
            "id": log.ids,
            "status": ["finished" if done else "rejected" for done in finished],
            "reason": [log.reasons.get(row) for row in range(len(log.ids))],
            "tenant": log.tenants,
            "arrival_s": _seconds(log.arrival),
            "admitted_s": _seconds(log.admitted),
            "finish_s": _seconds(log.finish),
            "queue_s": _seconds(_since(log.arrival, log.admitted)),
            "ttft_s": _seconds(_since(log.arrival, log.first_token)),
            "tpot_s": _seconds(log.tpot(), NANOSECONDS * PICOSECONDS),
            "e2e_s": _seconds(_since(log.arrival, log.finish)),
            "prompt": log.prompt.tolist(),
            "output": log.output.tolist(),
            "hit_tokens": log.hit.tolist(),
            "pauses": log.pauses.tolist(),
            "recomputes": log.recomputes.tolist(),
            "met_slo": [None if v == UNJUDGED else bool(v) for v in log.verdict],
        }

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the run as JSON has them.

        Costs O(n log n) for n requests, and O(m) for m events.
        """
        document = summary(self.log, self.cache, self.batching, self.latency, self.wall_s)
        measured = self.fragmentation
        return document | {"fragmentation": measured and attrs.asdict(measured)}

    def write(self, directory: Path | str, **more: Any) -> None:
        """Write `summary.json` and `requests.jsonl` to `directory`, made if need be.

        Both appear when both are whole; what had these names before is replaced. The
        summary has the entries `more` besides its own.

        Raises:
            InputError: the directory cannot be made, or a file not be opened.
            StorageError: the disk refused what was written.
        """
        directory = Path(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"cannot write to the directory {directory}: {error.strerror or error}"
            raise InputError(msg) from error
        with (
            whole_file(directory / SUMMARY) as document,
            whole_file(directory / REQUESTS) as lines,
        ):
            names = list(self.requests)
            for row in zip(*self.requests.values(), strict=True):
                line = orjson.dumps(dict(zip(names, row, strict=True)))
                lines.write(f"{line.decode()}\n")
            text = orjson.dumps(self.summary() | more, option=orjson.OPT_INDENT_2)
            document.write(f"{text.decode()}\n")


def _seconds(times: Iterable[int], second: int = NANOSECONDS) -> list[float | None]:
    return [None if time < 0 else time / second for time in times]


def _since(begin: Iterable[int], end: Iterable[int]) -> list[int]:
    """Return the nanoseconds from `begin` to `end`; -1 where there is no end."""
    return [b - a if b >= 0 else -1 for a, b in zip(begin, end, strict=True)]
