"""Generated workloads of the public panel, from integers alone: equal on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import ClassVar

import attrs
from attrs.validators import ge

from kvcore import Request, Workload
from kvcore.units import NS_PER_S

_MS = NS_PER_S // 1000


@attrs.define(eq=False)
class Recency(Workload):
    """Prompts that return soon or not at all: the workload for which LRU is right.

    A third of the requests bring a new prompt. The others repeat the prompt that was used d
    prompts ago; the chance of a depth between 2^k and 2^(k+1) is half of that of one between
    2^(k-1) and 2^k. So the prompt that was used last is the likeliest to return, and of two
    others the one that was used later is at least as likely. The oldest prompt alone, which
    stands for all depths beyond it, may be likelier than some that were used after it.

    Attributes:
        requests: number of requests.
        seed: seed of every random choice.
    """

    name: ClassVar[str] = "recency"
    key_tokens: ClassVar[int] = 64

    requests: int = attrs.field(default=8000, validator=ge(1))
    seed: int = 0

    @property
    def size(self) -> int:
        """The number of requests."""
        return self.requests

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests. Keeps one number for each prompt in memory."""
        draw = Random(f"{self.seed}/recency")  # noqa: S311 - a workload, not a secret
        by_use: list[int] = []  # prompts, the one that was used last at the end
        arrival = 0
        for index in range(self.requests):
            if by_use and draw.randrange(3):
                octave = 0
                while octave < 16 and draw.randrange(2):  # noqa: PLR2004 - 65,536 prompts
                    octave += 1
                depth = min(len(by_use), (1 << octave) + draw.randrange(1 << octave))
                prompt = by_use.pop(-depth)
            else:
                prompt = index
            by_use.append(prompt)
            keys = range(100 * prompt, 100 * prompt + 8 + prompt % 57)
            yield Request(
                id=index,
                arrival=arrival,
                prompt_tokens=self.key_tokens * len(keys),
                output_tokens=64,
                keys=list(keys),
                key_tokens=self.key_tokens,
            )
            arrival += draw.randrange(200 * _MS)


@attrs.define(eq=False)
class Agents(Workload):
    """Sessions of agents: a shared system prompt, then turns with loops of tool calls.

    A turn is a loop of up to 15 calls of tools, whose answers take 1 to 30 s by the tool; then
    the user thinks for 20 s to 10 min, or leaves. Each call appends to the prompt. Which tool
    is called tells when, and the end of a turn whether, the prompt returns.

    Under a clock a call is sent when the one before it has been answered and the tool or the
    user is done. `arrival`, by which replays without a clock order the calls, has a guess of
    20 ms for each generated token.

    Attributes:
        sessions: number of sessions, one every 20 s on average.
        seed: seed of every random choice.
    """

    name: ClassVar[str] = "agents"
    key_tokens: ClassVar[int] = 64

    sessions: int = attrs.field(default=400, validator=ge(1))
    seed: int = 0

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order of arrival. Keeps the open sessions in memory."""
        draw = Random(f"{self.seed}/agents")  # noqa: S311 - a workload, not a secret
        systems = [list(range(1000 * tenant, 1000 * tenant + 80)) for tenant in range(6)]
        fresh = 10_000
        start = count = 0
        # (arrival, session, prompt, calls, the request before it, the wait after its answer)
        coming: list[tuple[int, int, list[int], int, int | None, int]] = []
        push = partial(heappush, coming)
        for session in range(self.sessions):
            push((start, session, draw.choice(systems), draw.randrange(16), None, 0))
            start += draw.randrange(40 * NS_PER_S)
        while coming:
            arrival, session, prompt, calls, before, waited = heappop(coming)
            size = draw.randint(2, 60)
            keys = [*prompt, *range(fresh, fresh + size)]
            fresh += size
            tool = draw.choice(tuple(_TOOLS)) if calls else None
            output = draw.randint(20, 800)
            yield Request(
                id=count,
                arrival=arrival,
                prompt_tokens=self.key_tokens * len(keys),
                output_tokens=output,
                keys=keys,
                key_tokens=self.key_tokens,
                session=str(session),
                after=before,
                think_time=waited,
                tool=tool,
            )
            if tool is not None:
                least, longest = _TOOLS[tool]
                wait = draw.randint(least, longest)
                arrival += 20 * output * _MS + wait
                push((arrival, session, keys, calls - 1, count, wait))
            elif draw.randrange(3):
                wait = draw.randint(20 * NS_PER_S, 600 * NS_PER_S)
                push((arrival + wait, session, keys, draw.randrange(16), count, wait))
            count += 1


_TOOLS = {
    "search": (1 * NS_PER_S, 3 * NS_PER_S),
    "test": (8 * NS_PER_S, 30 * NS_PER_S),
    "web": (2 * NS_PER_S, 12 * NS_PER_S),
}
"""The shortest and the longest time (ns) that the answer of each tool takes."""
