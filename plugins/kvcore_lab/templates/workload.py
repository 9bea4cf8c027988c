"""A workload: requests, from a file or made up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import ClassVar

import attrs

from kvcore import Request, Workload
from kvcore.workloads import poisson_arrivals


@attrs.define(slots=False, eq=False)
class Example(Workload):
    """Questions about a few documents, which arrive at random.

    Options:
        requests, rate: number of requests, and requests a second.
        documents, blocks: number of documents, and blocks of 16 tokens of each.
        seed: seed of arrivals and choices.
    """

    name: ClassVar[str] = "example"
    key_tokens: ClassVar[int] = 16

    requests: int = attrs.field(default=500, validator=attrs.validators.ge(1))
    rate: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))
    documents: int = attrs.field(default=20, validator=attrs.validators.ge(1))
    blocks: int = attrs.field(default=60, validator=attrs.validators.ge(1))
    seed: int = 0

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order of arrival."""
        random = Random(self.seed)  # noqa: S311 - no secret
        arrivals = islice(poisson_arrivals(random.random, self.rate), self.requests)
        for index, arrival in enumerate(arrivals):
            document = random.randrange(self.documents)
            first = document * self.blocks
            question = self.documents * self.blocks + index
            yield Request(
                id=index,
                arrival=arrival,
                prompt_tokens=(self.blocks + 1) * self.key_tokens,
                output_tokens=random.randint(10, 100),
                keys=[*range(first, first + self.blocks), question],
                key_tokens=self.key_tokens,
            )
