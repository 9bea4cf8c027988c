"""Estimates of the remaining time of a job, from what its scheduler may know of its length."""

from __future__ import annotations

from math import exp
from random import Random
from typing import Literal

import attrs

from kvcore import InputError, Job, Request, Scheduler

LENGTHS = ("true", "predicted")


LARGEST_ERROR = 10


@attrs.define(slots=False, eq=False)
class Estimating(Scheduler):
    """Base of the schedulers that estimate how long a job takes.

    The output a job will have is the true one, or a prediction made when it arrives:
    `request.predicted` where the workload has it, else the truth times e^(error x z), with a
    z drawn from the standard normal distribution by seed, scheduler and request alone. A
    length becomes a time through the server's latency model. What a cached prefix saves
    counts from admission on, since nobody knows earlier whether it will still be there.

    Options:
        length: `true` or `predicted`.
        error: standard deviation of the logarithm of a prediction, 0 to 10.
        seed: what the errors are drawn from.
        concurrency: how many sequences a decode step is taken to serve.
    """

    length: Literal["true", "predicted"] = attrs.field(default="predicted")
    error: float = attrs.field(default=0.0)
    seed: int = attrs.field(default=0)
    concurrency: int = attrs.field(default=32)

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        msg = ""
        if self.length not in LENGTHS:
            msg = f"length={self.length!r} is not known; there are: {', '.join(LENGTHS)}"
        elif not 0 <= self.error <= LARGEST_ERROR:
            msg = f"error={self.error} must be from 0, always right, to {LARGEST_ERROR}"
        elif self.concurrency < 1:
            msg = f"concurrency={self.concurrency} must be at least 1 sequence"
        if msg:
            msg = f"{self.name}: {msg}"
            raise InputError(msg)

    def expected(self, job: Job) -> int:
        """Return how many output tokens `job` is taken to have in all, the same throughout.

        0 only for a request that asks for none.
        """
        if job.data is None:
            job.data = self._foresee(job.request)
        tokens: int = job.data
        return tokens

    def total_ns(self, job: Job) -> int:
        """Return the ns that `job` takes from its arrival to its last token, never waiting."""
        prompt, server = job.request.prompt_tokens, self.server
        steps = max(self.expected(job) - 1, 0)
        return server.prefill_ns(prompt, 0) + server.decode_ns(steps, prompt, self.concurrency)

    def remaining_prefill_ns(self, job: Job) -> int:
        """Return the ns until `job` generates its next token, if it runs."""
        return self.server.prefill_ns(job.prefill_left, job.computed)

    def remaining_ns(self, job: Job) -> int:
        """Return the ns until `job` generates its last token, if it runs throughout.

        Never rises while the job runs. One that outlives its prediction has, over and over,
        one token left.
        """
        expected = self.expected(job)
        steps = max(expected - job.generated, min(expected, 1))
        if steps and job.prefill_left:
            steps -= 1  # the end of a prefill generates a token
        context = job.request.prompt_tokens + expected - 1 - steps
        decode = self.server.decode_ns(steps, context, self.concurrency)
        return self.remaining_prefill_ns(job) + decode

    def _foresee(self, request: Request) -> int:
        true = request.output_tokens
        if self.length == "true" or not true:
            return true
        if request.predicted_output_tokens is not None:
            return max(request.predicted_output_tokens, 1)
        # Not by order of call; and rounded, since libm's last bits differ between machines.
        random = Random(f"{self.seed}/{self.name}/{request.id!r}")  # noqa: S311 - no secret
        return max(round(true * exp(self.error * random.gauss(0, 1))), 1)
