"""Texts whose generated keys are known from a trace, told as a run on tensors told them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvcore.policy import Batch, Job, LatencyModel
from kvcore.request import Key, Request
from kvcore.serving.decoding import Decoders
from kvcore.serving.executors import SimulatedExecutor
from kvcore.serving.tokens import TextRequest

Told = Mapping[int | str, Sequence[Key]]


class TellingExecutor(SimulatedExecutor):
    """Computes nothing, and names the blocks that texts fill when their tokens would be known.

    Each step is run by itself, as on tensors.

    Args:
        latency: the latency model.
        told: keys of generated blocks by request, in order.
    """

    def __init__(self, latency: LatencyModel, told: Told) -> None:
        super().__init__(latency)
        self.jumps = False
        self.named: list[tuple[Job, Sequence[Key]]] = []
        self._told = told
        self._count = dict.fromkeys(told, 0)

    def run(
        self, batch: Batch, chunks: Sequence[tuple[Job, int]], decoders: Decoders | None
    ) -> int:
        """Return the picoseconds the step takes; `named` has the keys it tells."""
        self.named.clear()
        for job, tokens in chunks:
            if job.computed + tokens == job.target:
                self._tell(job)
        for job in decoders or ():
            self._tell(job)
        return super().run(batch, chunks, decoders)

    def _tell(self, job: Job) -> None:
        """Name the blocks of `job` that are full with the token that this step generates."""
        request = job.request
        if request.id not in self._told:
            return
        # The K/V of the last token is never computed.
        known = request.prompt + min(job.generated + 1, request.output - 1)
        full = known // request.key_tokens - request.prompt // request.key_tokens
        keys = self._told[request.id][self._count[request.id] : full]
        if keys:
            self._count[request.id] = full
            self.named.append((job, keys))


def as_text(request: Request) -> TextRequest:
    """Return a request whose generated keys are not known yet, but will be told."""
    fields = {name: getattr(request, name) for name in _FIELDS}
    return TextRequest(**fields, tokens=(), publish=True)


_FIELDS = tuple(field.name for field in attrs.fields(Request) if field.name != "output_keys")
