"""Poisson arrivals at servers of one seat, and means within their confidence intervals.

A job's output is its service time, a token a microsecond, and its prompt a single token.
"""

from math import ceil, exp, sqrt
from random import Random
from statistics import mean, stdev

import attrs
from helpers.serving import ask

REQUESTS = 20_000
LOAD = 0.7
TOKENS = 1000
"""Mean output: so fine-grained that a step matters less than the interval is wide."""

SERVICE = TOKENS * 1000
"""Mean service time, ns."""

BATCHES = 20
STUDENT_T = 3.883
"""The 0.9995 quantile with 19 degrees of freedom."""


@attrs.frozen
class Service:
    """A distribution of service times with mean 1: how to draw it, and its density."""

    draw: object
    density: object
    longest: float


EXPONENTIAL = Service(lambda random: random.expovariate(1), lambda x: exp(-x), 30)
UNIFORM = Service(lambda random: random.uniform(0, 2), lambda _: 0.5, 2)
FIXED = Service(lambda _: 1, None, 1)


def arrivals(service, *, seed=1, load=LOAD, servers=1):
    """Yield requests whose work is `load` times what the servers can do."""
    random, now = Random(seed), 0.0
    for number in range(REQUESTS):
        now += random.expovariate(load * servers / SERVICE)
        output = max(ceil(service.draw(random) * TOKENS), 1)
        yield ask(number, int(now), prompt=1, output=output, key_tokens=1 << 20)


def check(samples, expected):
    """Check a mean (in service times) against theory, and that the interval says something.

    The tolerance is the run's own: a 99.9 % confidence interval of the mean from 20 batch
    means, by Student's t with 19 degrees of freedom. So a right simulator fails once in a
    thousand seeds; the seed is fixed.
    """
    size = len(samples) // BATCHES
    means = [mean(samples[i * size : (i + 1) * size]) for i in range(BATCHES)]
    half = STUDENT_T * stdev(means) / sqrt(BATCHES)
    assert half < expected / 4
    assert abs(mean(means) - expected) <= half
