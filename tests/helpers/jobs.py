"""Short functions to drive a scheduler in tests.

Time is counted in steps of the toy server. A prompt takes one step, unless it is longer than
`PROMPT`, and has its first token at the end; each other token takes one more step.
"""

from helpers.requests import prefixes

from kvcore import Job, Request
from kvcore.serving import DecodeSteps
from kvcore.testing import STEP, ToyServer, watched

PROMPT = 16
"""Tokens of a prompt that the toy server computes in one step."""


def ask(name, at=0, output=1, *, keys="", prompt=PROMPT, **fields):
    """Return a request that arrives at step `at` and takes `output` steps."""
    return Request(
        id=name,
        arrival=at * STEP,
        prompt_tokens=prompt,
        output_tokens=output,
        keys=prefixes(keys),
        key_tokens=4,
        **fields,
    )


def job(request, serial=1):
    """Return a job that has just arrived."""
    return Job(
        request, serial, request.arrival, DecodeSteps(), request.prompt_tokens, request.slo
    )


def serve(scheduler, requests, *, what="admitted", max_seqs=1):
    """Serve `requests`, and return their names in the order of calls of `what`.

    `max_seqs` of them run at a time.
    """
    calls = watched(scheduler)
    ToyServer(scheduler, max_seqs, 10**5).run(requests)
    return "".join(name for method, _, name in calls if method == what)
