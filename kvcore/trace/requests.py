"""The requests of a trace: its REQUEST lines, read back into what arrived."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import attrs

from kvcore.errors import InputError, TraceError
from kvcore.keys import KEY_BYTES
from kvcore.policy import Workload
from kvcore.request import SLO, Key, Request, Retention
from kvcore.trace.reader import Line, TraceReader
from kvcore.workloads import file_digest

_SAME = ("id", "prompt", "output", "key_tokens")
_AS_WRITTEN = ("salt", "tenant", "priority", "predicted", "session", "after", "think")
_DIGITS = 2 * KEY_BYTES


def read_request(line: Line, arrival: int | None = None) -> Request:
    """Return the request of a REQUEST line; written again, it is that line. O(keys).

    It arrives at `arrival` (ns), or at the time of the line.

    Raises:
        InputError: a field with a value that no request has.
    """
    fields: dict[str, Any] = {name: line[name] for name in _SAME}
    fields |= {name: line[name] for name in _AS_WRITTEN if name in line}
    if "slo" in line:
        fields["slo"] = SLO(**line["slo"])
    if "retention" in line:
        fields["retention"] = tuple(Retention(*hint) for hint in line["retention"])
    if "output_keys" in line:
        fields["output_keys"] = read_keys(line["output_keys"])
    return Request(
        arrival=line["t"] if arrival is None else arrival,
        keys=read_keys(line["keys"]),
        **fields,
    )


def read_keys(written: list[Any]) -> list[Key]:
    """Return block keys from JSON: ints, and the 16 bytes that 32 lower-case digits are.

    Other digits stay text, so that every key is written again as it was.
    """
    if all(type(key) is int for key in written):
        return written
    return [_key(key) for key in written]


@attrs.define(slots=False, eq=False)
class TraceWorkload(Workload):
    """The requests of a trace, as the workload of which it is a recording.

    Its name, digest, options and key size are those of the recorded workload; without one
    it is `trace`, with the digest of the file. Requests come in the order in which they
    arrived. Those of an open loop arrive as the workload had them, whatever the rate at
    which they were run: at that rate they arrive when they did (a trace that was run faster
    than real time has lost up to `rate_scale` ns of each). One that came after another
    arrives when it did.

    Attributes:
        file: the trace; a kvcore trace of any mode.

    Raises:
        InputError: the file cannot be read.
        TraceError: while reading: a line is damaged, or the file is cut.
    """

    _unnamed: ClassVar[str] = "trace"

    file: Path = attrs.field(converter=Path)

    def __iter__(self) -> Iterator[Request]:
        """Yield a request a REQUEST line. Holds one at a time, and keys that FINISH tells."""
        scale = self._scale
        told = self.told
        for reader, line in self._lines():
            if line["event"] != "REQUEST":
                continue
            # Rounded up, as running it rounds down.
            arrival = -(-line["t"] * scale.numerator // scale.denominator)
            try:
                request = read_request(line, arrival)
            except InputError as error:
                reader.fail(f"REQUEST: {error}")
            if request.id in told:
                request.output_keys = told[request.id]
            yield request

    @cached_property
    def header(self) -> Line:
        """The first line.

        Raises:
            InputError, TraceError: there is none.
        """
        reader = TraceReader(self.file)
        for line in reader:
            return line
        msg = f"{self.file}: {reader.cut_reason}"
        raise TraceError(msg)

    @cached_property
    def told(self) -> dict[int | str, list[Key]]:
        """Keys of generated blocks that only the run could tell, by request, in order.

        Of a run on texts; others have none, and are not read for it.
        """
        told: dict[int | str, list[Key]] = {}
        if self.header.get("executor") == "run":
            for _, line in self._lines():
                if line["event"] == "KEYS":
                    told.setdefault(line["request"], []).extend(read_keys(line["keys"]))
        return told

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the recorded workload."""
        return self._source["name"] if self._source else self._unnamed

    @property
    def digest(self) -> str:
        """The digest of the recorded workload."""
        return self._source["digest"] if self._source else file_digest(self.file)

    @property
    def key_tokens(self) -> int:
        """Tokens a key stands for."""
        tokens: int = self.header["key_tokens"]
        return tokens

    @property
    def restores(self) -> bool:
        """Whether the requests are exactly those of the recorded workload. Reads the file.

        They are not where requests were sent after others under a clock, where a run on
        texts told keys, or where the rate rounded the times.
        """
        if not self._source or self._scale > 1 or self.told:
            return False
        timed = self.header["mode"] != "untimed"
        return not any("after" in line for _, line in self._lines() if timed)

    def options(self) -> dict[str, Any]:
        """Return the options of the recorded workload."""
        return dict(self._source["options"]) if self._source else {}

    @property
    def _source(self) -> dict[str, Any] | None:
        source: dict[str, Any] | None = self.header["workload"]
        return source

    @property
    def _scale(self) -> Fraction:
        return Fraction(str(self.header.get("rate_scale", 1)))

    def _lines(self) -> Iterator[tuple[TraceReader, Line]]:
        """Yield the lines with their reader, and see that the end is there."""
        reader = TraceReader(self.file)
        for line in reader:
            yield reader, line
        if not reader.complete:
            msg = f"{self.file}: incomplete: {reader.cut_reason}"
            raise TraceError(msg)


def _key(written: Any) -> Key:
    if type(written) is str and len(written) == _DIGITS and written == written.lower():
        return bytes.fromhex(written)
    return cast("Key", written)
