"""The requests of a trace, as those of the workload that it has recorded."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvcore import Request, Workload
from kvcore.errors import InputError, TraceError
from kvcore.files import as_path
from kvcore.request import Key
from kvcore.trace import events
from kvcore.trace.events import Event, Header
from kvcore.workloads import file_digest
from kvcore_plugins.traces.reader import TraceReader, read_keys, read_request
from kvcore_plugins.workload.jsonl import generates_texts


@attrs.define(slots=False, eq=False)
class TraceWorkload(Workload):
    """The requests of a trace, as those of the recorded workload.

    Name, digest, options and key size are those of the recorded workload; where HEADER has
    none, the name is `trace` and the digest that of the file. Requests come in order of
    arrival. Requests of an open loop arrive when the workload let them, whatever the rate of
    the run: run at that rate again, they arrive as recorded (a trace at a rate above 1 has
    lost up to `rate_scale` ns of each time). A request that came after another one arrives
    as recorded. The output of a text is as long as it was: a client of a server or an engine
    asks for the most tokens, and its text may end before.

    Attributes:
        file: path of a kvcore trace of any mode.

    Raises:
        InputError: the file cannot be read.
        TraceError: while reading: a line is damaged, or the file is cut.
    """

    _unnamed: ClassVar[str] = "trace"

    file: Path = attrs.field(converter=as_path)

    def __iter__(self) -> Iterator[Request]:
        """Yield a request for each REQUEST line. Memory: one request, and what texts became."""
        scale, recorded_keys, generated = self._scale, self.recorded_keys, self.generated
        for reader, event in self._events():
            if not isinstance(event, events.Request):
                continue
            # Rounded up, since the run rounds down.
            arrival = -(-event.t * scale.numerator // scale.denominator)
            try:
                request = read_request(event, arrival)
            except InputError as error:
                reader.fail(f"REQUEST: {error}")
            if request.id in recorded_keys:
                request.output_keys = recorded_keys[request.id]
            request.output_tokens = generated.get(request.id, request.output_tokens)
            yield request

    @cached_property
    def header(self) -> Header:
        """The first line.

        Raises:
            InputError, TraceError: there is none.
        """
        reader = TraceReader(self.file)
        for event in reader:
            return event  # type: ignore[return-value]  # the reader has seen to it
        msg = f"{self.file}: incomplete: {reader.cut_reason}"
        raise TraceError(msg)

    @property
    def recorded_keys(self) -> dict[int | str, list[Key]]:
        """Keys of generated blocks that the workload did not have, by request, in order.

        Runs on texts and engines record them.
        """
        return self._texts[0]

    @property
    def generated(self) -> dict[int | str, int]:
        """Tokens of generated texts, by request: all that were asked for, or fewer."""
        return self._texts[1]

    @cached_property
    def _texts(self) -> tuple[dict[int | str, list[Key]], dict[int | str, int]]:
        """The keys and the lengths of generated texts; a trace of no texts is not read."""
        keys: dict[int | str, list[Key]] = {}
        lengths: dict[int | str, int] = {}
        header = self.header
        if generates_texts(header.executor, header.mode, header.engine):
            for _, event in self._events():
                if isinstance(event, events.Keys):
                    keys.setdefault(event.request, []).extend(read_keys(event.keys))
                elif isinstance(event, events.Finish):
                    lengths[event.request] = event.output
        return keys, lengths

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the recorded workload."""
        source = self.header.workload
        return source.name if source else self._unnamed

    @property
    def digest(self) -> str:
        """The digest of the recorded workload."""
        source = self.header.workload
        return source.digest if source else file_digest(self.file)

    @property
    def key_tokens(self) -> int:
        """Tokens of a key."""
        return self.header.key_tokens

    @property
    def restores(self) -> bool:
        """Whether the requests are exactly those of the recorded workload. Reads the file.

        They are not where requests came after others under a clock, where the run has recorded
        keys of its own, where texts have ended early, or where the rate has rounded the times.
        """
        if self.header.workload is None or self._scale > 1 or self.recorded_keys:
            return False
        generated = self.generated
        if self.header.mode == "untimed" and not generated:
            return True
        return not any(
            isinstance(event, events.Request)
            and (
                isinstance(event.after, (int, str))
                or generated.get(event.id, event.output) != event.output
            )
            for _, event in self._events()
        )

    def options(self) -> dict[str, Any]:
        """Return the options of the recorded workload."""
        source = self.header.workload
        return dict(source.options) if source else {}

    @property
    def _scale(self) -> Fraction:
        return Fraction(str(self.header.rate_scale or 1))

    def _events(self) -> Iterator[tuple[TraceReader, Event]]:
        """Yield the events with their reader; raise TraceError if the file is cut."""
        reader = TraceReader(self.file)
        for event in reader:
            yield reader, event
        reader.require_complete()
