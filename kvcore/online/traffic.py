"""What the proxy tells of its traffic: a trace that can be replayed, and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvcore.cluster import Replica
from kvcore.extras import import_extra
from kvcore.request import Request
from kvcore.trace import Trace
from kvcore.trace.cluster import ClusterTrace

MOST_HELD = 1 << 20
"""Keys of requests that have ended, and wait for one that arrived before them."""

FIRST_BYTE = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Upper bounds of the buckets, in seconds: those of vLLM's time to first token."""


@attrs.define(eq=False)
class Flight:
    """A request in flight, with its record so far.

    Attributes:
        request: as the router saw it.
        routes: when it was sent where, and how many tokens were thought to be cached there.
        prompt, output: tokens, as a server counted them; `output` that of a stream grows.
        refused: why no server got it, if so.
        ended: whether nothing of this changes any more.
        wrong: whether a server has refused it, as any other would: it is in no trace.
    """

    request: Request
    routes: list[tuple[int, int, int]] = attrs.field(factory=list)
    prompt: int | None = None
    output: int = 0
    refused: str | None = None
    ended: bool = False
    wrong: bool = False

    def final(self) -> Request:
        """Return the request with the lengths that it had, and keys for no more than these."""
        request = self.request
        tokens = self.prompt or request.prompt_tokens
        return Request(
            id=request.id,
            arrival=request.arrival,
            prompt_tokens=tokens,
            output_tokens=self.output,
            keys=request.keys[: tokens // request.key_tokens],
            key_tokens=request.key_tokens,
            salt=request.salt,
            session=request.session,
        )


class TrafficLog:
    """Writes REQUEST and ROUTE lines, in order of arrival, each once its lengths are known.

    A request that has ended waits for those that arrived before it. Once too much waits, the
    oldest is written with the lengths that it has by then.

    Args:
        path: the file, which appears once the log is closed.
        router: name and options of the router.
        routing: what else decides where requests go.
        replicas: all replicas.
        key_tokens: tokens in a block of a prompt.
    """

    def __init__(
        self,
        path: Path,
        router: Mapping[str, Any],
        routing: Mapping[str, Any],
        replicas: Sequence[Replica],
        key_tokens: int,
    ) -> None:
        self._file = Trace(path, mode="wall")
        self._trace = ClusterTrace(self._file)
        for each in replicas:
            self._trace.recorder(each.number).begin(
                count="tokens",
                block_size=each.block_size,
                key_tokens=key_tokens,
                blocks=each.blocks,
                plugins={},
            )
        self._trace.begin(router, routing=routing)
        # By id, in order of arrival.
        self._flights: dict[int | str, Flight] = {}
        self._held = 0

    def begin(self, flight: Flight) -> None:
        """Expect the end of a request that has arrived."""
        self._flights[flight.request.id] = flight

    def end(self, flight: Flight) -> None:
        """Write a request that has ended, and others that waited for it."""
        if flight.request.id not in self._flights:
            return  # it was too late
        flight.ended = True
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
        """Write all that need not wait to the file, which can be read up to here."""
        self._flush(now)
        self._file.flush()

    def close(self, now: int) -> None:
        """Write the rest, and END."""
        for flight in list(self._flights.values()):
            self.end(flight)
        self._flush(now + 1)
        self._file.close()

    def discard(self) -> None:
        """Remove the file."""
        self._file.discard()

    def _write(self, flight: Flight) -> None:
        if flight.wrong:
            return
        request = flight.final()
        self._trace.request(request, request.arrival)
        most = len(request.keys) * request.key_tokens
        for now, replica, tokens in flight.routes:
            self._trace.route(now, request, replica, min(tokens, most))
        if flight.refused:
            self._trace.refuse(request.arrival, request, flight.refused)

    def _flush(self, now: int) -> None:
        """Write the lines before `now`, and before the first request that has not ended."""
        first = next(iter(self._flights.values()), None)
        self._trace.flush(now if first is None else min(now, first.request.arrival))


def _size(flight: Flight) -> int:
    return 1 + len(flight.request.keys)


class Metrics:
    """Counts of the proxy in Prometheus' text format.

    Attributes:
        requests: by replica and status; refused ones have no replica.
        retries: by the replica that did not answer.
        first_byte: seconds from arrival to the first byte, by replica.
        hit_tokens: prompt tokens that the router expected to be cached, by replica.
        cached_tokens: those that servers say were.
        prompt_tokens: of requests that were sent.
        in_flight, up: by replica.

    Raises:
        PluginError: the package prometheus_client is not installed.
    """

    def __init__(self) -> None:
        needed = "the metrics of a proxy need prometheus_client"
        made = import_extra("prometheus_client", needed, "serve")
        self._registry = registry = made.CollectorRegistry()
        self._text = made.generate_latest

        def counter(name: str, says: str, *labels: str) -> Any:
            return made.Counter(f"kvcore_route_{name}", says, labels, registry=registry)

        one = "replica"
        self.requests = counter(
            "requests", "Requests by how they were answered.", one, "status"
        )
        self.retries = counter("retries", "Requests sent again elsewhere.", one)
        self.hit_tokens = counter("hit_tokens", "Prompt tokens expected to hit.", one)
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that hit.", one)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, as estimated.", one)
        self.first_byte = made.Histogram(
            "kvcore_route_first_byte_seconds",
            "From arrival to the first byte of the answer.",
            [one],
            buckets=FIRST_BYTE,
            registry=registry,
        )
        gauge, says = made.Gauge, "Requests that a server has."
        self.in_flight = gauge("kvcore_route_in_flight", says, [one], registry=registry)
        self.up = gauge(
            "kvcore_route_up", "1 if it is sent requests.", [one], registry=registry
        )

    def text(self) -> bytes:
        """Return all of them."""
        return bytes(self._text(self._registry))
