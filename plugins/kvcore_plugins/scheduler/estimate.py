"""Estimates of the remaining time of a job, by its true or its predicted length."""

from __future__ import annotations

from math import exp
from random import Random
from typing import Literal

import attrs
from attrs.validators import ge, le

from kvcore import Job, Scheduler
from kvcore_plugins.bounds import bounded, one_of


@attrs.define(slots=False, eq=False)
class Estimating(Scheduler):
    """Base of the schedulers that estimate how long a job takes.

    The output length of a job is the true one, or a prediction made when it arrives:
    `request.predicted_output_tokens` if the workload has it, else the true length times
    e^(error x z), with a z drawn from the standard normal distribution by seed, scheduler and
    request alone. The server's latency model turns a length into a time. A cached prefix
    counts from admission on, since it may be evicted before.

    Options:
        length: `true` or `predicted`.
        error: standard deviation of the logarithm of a prediction, 0 to 10.
        seed: number from which the errors are drawn.
        concurrency: number of sequences that a decode step is assumed to serve.
    """

    length: Literal["true", "predicted"] = one_of("true", "predicted", default="predicted")
    error: float = bounded(0.0, "from 0, always right, to 10", ge(0), le(10))
    seed: int = attrs.field(default=0)
    concurrency: int = bounded(32, "at least 1 sequence", ge(1))

    def expected(self, job: Job) -> int:
        """Return the expected number of output tokens of `job`, which never changes.

        It is 0 only for a request without output.
        """
        if job.data is None:
            job.data = self._foresee(job)
        tokens: int = job.data
        return tokens

    def total_ns(self, job: Job) -> int:
        """Return the ns from arrival to last token if `job` never waited."""
        prompt, server = job.request.prompt_tokens, self.server
        steps = max(self.expected(job) - 1, 0)
        return server.prefill_ns(prompt, 0) + server.decode_ns(steps, prompt, self.concurrency)

    def remaining_prefill_ns(self, job: Job) -> int:
        """Return the ns until `job` generates its next token, if it runs."""
        return self.server.prefill_ns(job.prefill_left, job.computed)

    def remaining_ns(self, job: Job) -> int:
        """Return the ns until `job` generates its last token, if it is never interrupted.

        It never rises while the job runs. A job that exceeds its prediction is always
        expected to have one token left.
        """
        expected = self.expected(job)
        steps = max(expected - job.generated, min(expected, 1))
        if steps and job.prefill_left:
            steps -= 1  # the end of a prefill generates a token
        context = job.request.prompt_tokens + expected - 1 - steps
        decode = self.server.decode_ns(steps, context, self.concurrency)
        return self.remaining_prefill_ns(job) + decode

    def _foresee(self, job: Job) -> int:
        request, true = job.request, job.output_tokens
        if self.length == "true" or not true:
            return true
        if request.predicted_output_tokens is not None:
            predicted = max(request.predicted_output_tokens, 1)
            # A limit of the server ends a text that is shorter than asked for.
            return min(predicted, true) if true < request.output_tokens else predicted
        # Independent of the order of calls. Rounded: libm's last bits differ between machines.
        random = Random(f"{self.seed}/{self.name}/{request.id!r}")  # noqa: S311 - no secret
        return max(round(true * exp(self.error * random.gauss(0, 1))), 1)
