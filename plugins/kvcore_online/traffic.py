"""Records of the proxy's traffic: a trace whose requests can be run again, and metrics."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import attrs

from kvcore.errors import InputError
from kvcore.files import part_path
from kvcore.lazy import import_extra
from kvcore.request import Request
from kvcore.serving.router import Replica
from kvcore_cluster.trace import ClusterTrace
from kvcore_lab.report.prometheus import FIRST_TOKEN
from kvcore_online.prompts import MOST_KEYS
from kvcore_online.supervision import unused_path
from kvcore_plugins.traces.keyed import KeyedNames
from kvcore_plugins.traces.live import LiveTrace

MOST_HELD = 1 << 20
"""Largest number of keys of ended requests that wait for a request that arrived before them."""

REQUEST_KEYS = 16
"""Keys that take as much memory as the other fields of a request that waits: 1 kB."""


@attrs.define(eq=False)
class Flight:
    """A request in flight, with its record so far.

    Attributes:
        request: the request that the router saw.
        parts: the requests of its prompts if there are several; once it has ended, those that
            are written, one an answer.
        choices: number of answers to each prompt.
        routes: of each attempt the time (ns), the number of the replica, and the number of
            tokens that the router expected to hit there.
        prompt, output: numbers of tokens by a server's count, of all prompts and of all
            answers; that of a stream grows.
        refused: the reason if no server answered, or one with an error; None otherwise.
        ended: whether the record is complete.
        wrong: whether a server refused the request as invalid; it is left out of the trace.
    """

    request: Request
    routes: list[tuple[int, int, int]] = attrs.field(factory=list)
    prompt: int | None = None
    output: int = 0
    refused: str | None = None
    ended: bool = False
    wrong: bool = False
    parts: Sequence[Request] = ()
    choices: int = 1

    def final(self, names: KeyedNames) -> list[Request]:
        """Return the requests as they are written: with counted lengths, and hashed names.

        There is one for each answer, prompt by prompt. What the server counted of all is
        divided: between prompts by their estimated lengths, between answers evenly.
        """
        if not self.parts and self.choices == 1:
            return [self._written(names, self.request, self.prompt, MOST_KEYS)]
        parts, first = self.parts or (self.request,), int(self.request.id)
        estimates = [part.prompt_tokens for part in parts]
        lengths = _divided(self.prompt or sum(estimates), estimates)
        answers = len(parts) * self.choices
        ids, outputs = count(first), iter(_divided(self.output, [1] * answers))
        written: list[Request] = []
        for part, length in zip(parts, lengths, strict=True):
            one = self._written(names, part, length or 1, MOST_KEYS // answers)
            written += [
                attrs.evolve(one, id=next(ids), output_tokens=next(outputs))
                for _ in range(self.choices)
            ]
        return written

    def _written(
        self, names: KeyedNames, part: Request, prompt: int | None, most: int
    ) -> Request:
        """Return a request of a prompt as it is written, with at most `most` keys."""
        request = self.request
        tokens = prompt or part.prompt_tokens
        hidden: dict[str, Any] = names.hidden(request, "salt", "session")
        return Request(
            id=request.id,
            arrival=request.arrival,
            prompt_tokens=tokens,
            output_tokens=self.output,
            keys=names.keys(part.keys[: min(tokens // request.key_tokens, most)]),
            key_tokens=request.key_tokens,
            **hidden,
        )


class TrafficLog:
    """Writes REQUEST and ROUTE lines, in order of arrival, each once its lengths are known.

    A request that has ended waits for those that arrived before it. If more than `MOST_HELD`
    keys wait, the oldest request is written with the lengths counted so far.

    Args:
        path: the file, which appears when the log is closed; where an earlier trace has the
            name, and after `rotate`, its next piece.
        router: name and options of the router.
        routing: other options that decide on routes, such as the view.
        replicas: all replicas.
        key_tokens: number of tokens in a block of a prompt.
        names: hashes salts, sessions and keys of blocks.
        unlogged: called with the error of a request that cannot be written, which is left out:
            no value of one request ends the log of all.

    Attributes:
        file: the trace of the lines.
    """

    def __init__(
        self,
        path: Path,
        router: Mapping[str, Any],
        routing: Mapping[str, Any],
        replicas: Sequence[Replica],
        key_tokens: int,
        names: KeyedNames,
        unlogged: Callable[[InputError], None],
    ) -> None:
        self._names = names
        self._unlogged = unlogged
        self._path, self._key_tokens = path, key_tokens
        self._router, self._routing, self._replicas = router, routing, replicas
        self._open(0, 0)
        # By id, in order of arrival; a dict looks for its first among all that have gone.
        self._flights: OrderedDict[int | str, Flight] = OrderedDict()
        self._held = 0

    def _open(self, zero: int, now: int) -> None:
        """Open a file whose times count from `zero`, the date of which is in its header.

        Raises:
            InputError: it cannot be opened.
        """
        self.file = LiveTrace(unused_path(self._path), mode="wall")
        self._trace = ClusterTrace(self.file)
        for replica in self._replicas:
            self._trace.recorder(replica.number).begin(
                count="tokens",
                block_size=replica.block_size,
                key_tokens=self._key_tokens,
                blocks=replica.blocks,
                plugins={},
            )
        began = datetime.now(UTC) - timedelta(microseconds=(now - zero) / 1_000)
        routing = {**self._routing, "began": began.isoformat(timespec="milliseconds")}
        self._trace.begin(self._router, routing=routing)
        self._zero, self._empty = zero, True

    def begin(self, flight: Flight) -> None:
        """Record the arrival of a request."""
        self._flights[flight.request.id] = flight

    def end(self, flight: Flight) -> None:
        """Write a request that has ended, and the requests that waited for it."""
        if flight.request.id not in self._flights:
            return  # already written, with the lengths counted by then
        flight.ended = True
        # What waits is as it is written: without tokens, and no longer than hashes are.
        flight.parts = self._final(flight)
        if not flight.parts:
            del self._flights[flight.request.id]
        else:
            flight.request = flight.parts[0]
            self._held += _size(flight)
        while self._flights:
            first = next(iter(self._flights.values()))
            if not first.ended and self._held <= MOST_HELD:
                break
            del self._flights[first.request.id]
            self._held -= _size(first) if first.ended else 0
            self._write(first)
        if self._trace.is_full:
            self._flush(flight.request.arrival)

    def sync(self, now: int) -> None:
        """Flush all lines that do not wait to the file, which can be read up to them."""
        self._flush(now)
        self.file.flush()

    def rotate(self, now: int) -> None:
        """Close a file that has a request; the next one has those that are not written yet.

        A device or a pipe has no next one, and stays open.

        Raises:
            InputError: the next file cannot be opened.
            StorageError: the disk is full.
        """
        if self._empty or part_path(self._path) == self._path:
            return
        self._trace.flush(now + 1 - self._zero)
        self.file.close()
        first = next(iter(self._flights.values()), None)
        self._open(now if first is None else first.request.arrival, now)

    def close(self, now: int) -> None:
        """Write all requests that are left, and END; discard a later piece without any."""
        for flight in list(self._flights.values()):
            self.end(flight)
        self._flush(now + 1)
        if self._empty and self.file.name != str(self._path):
            self.file.discard()
        self.file.close()

    def _final(self, flight: Flight) -> Sequence[Request]:
        """Return the requests of a flight as they are written; none if it is left out."""
        try:
            return () if flight.wrong else flight.final(self._names)
        except InputError as error:
            self._unlogged(error)
            return ()

    def _write(self, flight: Flight) -> None:
        for request in flight.parts if flight.ended else self._final(flight):
            zero, now = self._zero, request.arrival
            try:
                self._trace.request(request, now - zero)
            except InputError as error:
                self._unlogged(error)
                continue
            self._empty = False
            prompt_tokens = len(request.keys) * request.key_tokens
            for now, replica, tokens in flight.routes:
                self._trace.route(now - zero, request, replica, min(tokens, prompt_tokens))
            if flight.refused:
                self._trace.refuse(now - zero, request, flight.refused)

    def _flush(self, now: int) -> None:
        """Write the lines before `now`, and before the first request that has not ended."""
        first = next(iter(self._flights.values()), None)
        until = now if first is None else min(now, first.request.arrival)
        self._trace.flush(until - self._zero)


def _size(flight: Flight) -> int:
    return sum(REQUEST_KEYS + len(part.keys) for part in flight.parts)


def _divided(total: int, weights: Sequence[int]) -> list[int]:
    """Return shares of `total`, whole numbers whose sum it is, by weights above 0."""
    whole = sum(weights)
    ends = [total * end // whole for end in accumulate(weights)]
    return [end - begin for begin, end in pairwise([0, *ends])]


class Metrics:
    """Counts of the proxy in Prometheus' text format.

    Attributes:
        requests: requests by replica and status; refused ones have no replica.
        retries: requests by the replica that did not answer.
        first_byte: seconds from arrival to the first byte, by replica.
        hit_tokens: prompt tokens that the router expected to hit, by replica.
        cached_tokens, counted_tokens: prompt tokens that hit, and all of the same prompts, by
            the servers' own count, by replica.
        prompt_tokens: prompt tokens of requests that were sent, as estimated, by replica.
        in_flight: requests in flight, by replica.
        unlogged: requests that could not be written to the trace.
        lost_batches: batches of KV events that are lost or cannot be read, by replica.
        ignored_events: KV events of blocks of another size or without tokens, or that cannot
            be read, by replica.
        restarts: background work that has failed and was started again, by what it does.
        up: 1 for replicas that are up, 0 for others.

    Raises:
        PluginError: the package prometheus_client is not installed.
    """

    def __init__(self) -> None:
        needed = "the metrics of a proxy need prometheus_client"
        client = import_extra("prometheus_client", needed, "serve")
        self._registry = registry = client.CollectorRegistry()
        self._text = client.generate_latest

        def made(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            """Return a metric that keeps its samples by labels: few, and looked up often."""
            metric = kind(f"kvcore_route_{name}", text, labels, registry=registry, **more)
            metric.labels = cache(metric.labels)
            return metric

        counter, by = partial(made, client.Counter), "replica"
        self.requests = counter("requests", "Requests by how they were answered.", by, "status")
        self.retries = counter("retries", "Requests that it did not answer.", by)
        self.hit_tokens = counter("hit_tokens", "Prompt tokens expected to hit.", by)
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that hit.", by)
        text = "Prompt tokens of answers with a usage, as servers count."
        self.counted_tokens = counter("counted_tokens", text, by)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, as estimated.", by)
        self.unlogged = counter("unlogged", "Requests left out of the trace.")
        self.lost_batches = counter("lost_batches", "Batches of KV events not read.", by)
        text = "KV events of blocks whose keys are unknown."
        self.ignored_events = counter("ignored_events", text, by)
        self.restarts = counter("restarts", "Background work started again.", "what")
        text = "From arrival to the first byte of the answer."
        self.first_byte = made(
            client.Histogram, "first_byte_seconds", text, by, buckets=FIRST_TOKEN
        )
        self.in_flight = made(client.Gauge, "in_flight", "Requests that a server has.", by)
        self.up = made(client.Gauge, "up", "1 if it is sent requests.", by)

    def text(self) -> bytes:
        """Return all metrics."""
        return bytes(self._text(self._registry))
