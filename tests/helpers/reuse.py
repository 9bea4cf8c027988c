"""Workloads of known reuse: one for LRU, one whose meaning flips every hour, and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import ClassVar

import attrs

from kvcore import Request, Workload

SECOND = 10**9
KEY_TOKENS = 64


def requests_of(rows: Iterable[tuple[float, list[int], int, str | None]]) -> list[Request]:
    """Return requests from (second, keys, output tokens, tool), in the order of time."""
    return [
        Request(
            id=index,
            arrival=int(second * SECOND),
            prompt_tokens=KEY_TOKENS * len(keys),
            output_tokens=output,
            keys=keys,
            key_tokens=KEY_TOKENS,
            tool=tool,
        )
        for index, (second, keys, output, tool) in enumerate(sorted(rows, key=lambda r: r[0]))
    ]


def recency(seed: int, count: int = 8000) -> list[Request]:
    """Return prompts with a stack distance of a heavy tail, for which LRU is right."""
    draw, second = Random(seed), 0.0
    stack: list[int] = []
    rows = []
    for index in range(count):
        second += draw.expovariate(10)
        new = not stack or draw.random() < 0.35
        prompt = index if new else stack.pop(-min(len(stack), int(draw.paretovariate(0.7))))
        stack.append(prompt)
        rows.append(
            (second, [100 * prompt + block for block in range(8 + prompt % 57)], 64, None)
        )
    return requests_of(rows)


def flips(seed: int, hours: int = 6) -> list[Request]:
    """Return conversations that one tool continues in even hours, another in odd ones."""
    draw, second, key, rows = Random(seed), 0.0, 0, []
    while second < 3600 * hours:
        second += draw.expovariate(0.25)
        start, keys, tool, goes_on = second, list[int](), draw.choice("ab"), True
        while goes_on:
            size = draw.randint(4, 40)
            keys, key = [*keys, *range(key, key + size)], key + size
            rows.append((start, keys, 100, tool))
            likely = (tool == "a") == (int(start / 3600) % 2 == 0)
            goes_on = draw.random() < (0.85 if likely else 0.15)
            start += draw.lognormvariate(4.0, 0.6)
    return requests_of(rows)


def agents(seed: int, sessions: int = 300) -> list[Request]:
    """Return loops of slow and fast tools, with system prompts and pauses of users."""
    draw, start, key, rows = Random(seed), 0.0, 1000, []
    systems = [list(range(1000 * tenant, 1000 * tenant + 80)) for tenant in range(-6, 0)]
    tools = {"grep": (1.0, 0.5), "test": (3.2, 0.8), "web": (2.0, 0.7)}
    for _ in range(sessions):
        start += draw.expovariate(1 / 20)
        second, keys = start, list(draw.choice(systems))
        for _ in range(1 + int(draw.expovariate(1 / 3))):
            steps = 1 + int(draw.expovariate(1 / 8))
            for step in range(steps):
                size, output = draw.randint(2, 60), draw.randint(20, 800)
                keys, key = [*keys, *range(key, key + size)], key + size
                tool = draw.choice(list(tools)) if step < steps - 1 else None
                rows.append((second, keys, output, tool))
                pause = tools[tool] if tool else (4.5, 1.0)
                second += output / 50 + draw.lognormvariate(*pause)
    return requests_of(rows)


def phases(seed: int) -> list[Request]:
    """Return conversations of which first the long ones go on, then the short ones."""
    draw, key, rows = Random(seed), 0, []
    for phase in range(4):
        for _ in range(500):
            second, keys, goes_on = 4000 * phase + 3000 * draw.random(), list[int](), True
            while goes_on:
                size = draw.randint(4, 40)
                first = not keys
                keys, key = [*keys, *range(key, key + size)], key + size
                rows.append((second, keys, 100, None))
                chances = (0.7, 0.1) if phase % 2 else (0.2, 0.85)
                goes_on = draw.random() < chances[not first]
                second += draw.lognormvariate(2.5 if phase % 2 else 4.5, 0.6)
    return requests_of(rows)


def scans(seed: int) -> list[Request]:
    """Return popular prompts, a loop over more than a cache holds, and prompts used once."""
    draw, second, key, rows = Random(seed), 0.0, 10**6, []
    popular = [list(range(1000 * i, 1000 * i + draw.randint(8, 64))) for i in range(400)]
    for index in range(8000):
        second += draw.expovariate(5)
        keys = popular[min(399, int(draw.paretovariate(0.8)) - 1)]
        if index // 500 % 3 == 1:
            keys = popular[index % 150]
        elif index // 500 % 3:
            keys, key = list(range(key, key + 40)), key + 40
        rows.append((second, keys, 64, None))
    return requests_of(rows)


GENERATORS = {
    "recency": recency,
    "flips": flips,
    "agents": agents,
    "phases": phases,
    "scans": scans,
}


@attrs.define(eq=False)
class Reuse(Workload):
    """The requests of one of the generators above, by its name."""

    name: ClassVar[str] = "reuse"
    key_tokens: ClassVar[int] = KEY_TOKENS

    generator: str = "recency"
    seed: int = 0

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests."""
        yield from GENERATORS[self.generator](self.seed)
