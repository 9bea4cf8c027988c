"""The requests of a benchmark: of given lengths, from a number of clients or at a rate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from random import Random
from typing import ClassVar

import attrs
from attrs.validators import ge, le, lt
from attrs.validators import optional as if_given

from kvcore import InputError, Request, Workload
from kvcore.units import as_float
from kvcore.workloads import poisson_arrivals

_MANY = 10_000_000


@attrs.define(eq=False)
class Bench(Workload):
    """Unrelated prompts of given lengths, by clients that wait for answers, or at a rate.

    With `concurrency` clients, each sends a request, waits until it is complete, and sends
    the next: a closed loop. All start together, as `vllm bench serve --max-concurrency` does
    where its rate is infinite. Without, requests arrive at `rate`. Nothing is ever hit.

    Lengths are drawn from the last `spread` of the given ones, so that clients fall out of
    step: `spread=0.2` draws from 80 % to 100 %.

    Attributes:
        requests: number of requests.
        concurrency: number of clients; None: the loop is open.
        rate: requests a second of an open loop, at random times (Poisson); `inf`: all at once.
        input_tokens, output_tokens: lengths, at most.
        spread: share of a length by which it may be shorter.
        key_tokens: tokens a key would stand for; the block size of a cache that serves it.
        seed: seed of every random choice.
    """

    name: ClassVar[str] = "bench"

    requests: int = attrs.field(default=1_000, validator=[ge(1), le(_MANY)])
    concurrency: int | None = attrs.field(default=None, validator=if_given([ge(1), le(_MANY)]))
    rate: float = attrs.field(default=inf, converter=as_float, validator=ge(1e-9))
    input_tokens: int = attrs.field(default=1_024, validator=[ge(1), le(_MANY)])
    output_tokens: int = attrs.field(default=128, validator=[ge(0), le(_MANY)])
    spread: float = attrs.field(default=0.0, converter=as_float, validator=[ge(0), lt(1)])
    key_tokens: int = attrs.field(default=16, validator=ge(1))
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse a rate for clients that wait for answers."""
        if self.concurrency is not None and self.rate != inf:
            msg = (
                f"concurrency={self.concurrency} and rate={self.rate}: clients that wait for "
                "answers have no rate: give one of them"
            )
            raise InputError(msg)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests; in a closed loop request n comes after n - `concurrency`."""
        clients = self.concurrency
        draw = Random(f"{self.seed}/lengths").random  # noqa: S311 - a workload, not a secret
        times = Random(f"{self.seed}/arrivals").random  # noqa: S311 - as above
        arrivals = poisson_arrivals(times, self.rate) if clients is None else iter(int, 1)
        for serial, arrival in enumerate(islice(arrivals, self.requests)):
            waits = clients is not None and serial >= clients
            yield Request(
                id=serial,
                arrival=arrival,
                prompt_tokens=self._drawn(self.input_tokens, draw()),
                output_tokens=self._drawn(self.output_tokens, draw()),
                key_tokens=self.key_tokens,
                session=None if clients is None else str(serial % clients),
                after=serial - clients if waits else None,  # type: ignore[operator]
            )

    @property
    def size(self) -> int:
        """The number of requests."""
        return self.requests

    def _drawn(self, longest: int, variate: float) -> int:
        """Return a length of at least (1 - `spread`) x `most`, and 1 if that is not 0."""
        return longest - int(
            variate * (longest - max(round(longest * (1 - self.spread)), longest > 0) + 1)
        )
