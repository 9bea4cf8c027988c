"""Random traffic over a small trie of prompts, as data: it can be repeated and shrunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import TypeAlias

import attrs

from kvcore.request import Request, Retention

Draw: TypeAlias = Callable[[int, int], int]
"""Draws an integer between two bounds, both included."""

EVEN = {"open": 5, "commit": 6, "close": 4, "serve": 3, "extend": 1, "fork": 1, "rollback": 1}
"""How often the actions come: as many blocks go as come, so neither room nor work runs out."""

FORKS = {"open": 2, "commit": 4, "close": 2, "serve": 1, "extend": 1, "fork": 3, "rollback": 3}
"""As above, with many sequences that share private blocks."""


@attrs.frozen(kw_only=True)
class Traffic:
    """What random requests look like: each prompt walks down one trie of block keys.

    Attributes:
        key_tokens: tokens a key stands for.
        most_keys: keys of the longest prompt.
        width: keys that may follow one. With 2 prompts share a lot.
        hints: whether some requests carry retention hints.
        longest_wait: ns between two steps, at most.
        mix: how often each action comes.
    """

    key_tokens: int = 6
    most_keys: int = 6
    width: int = 2
    hints: bool = False
    longest_wait: int = 4
    mix: Mapping[str, int] = EVEN


@attrs.frozen(kw_only=True)
class Step:
    """One call to a cache.

    Attributes:
        action: `open`, `commit`, `close`, `extend`, `fork` or `rollback`; or `serve`, which
            opens a request, commits all of it and closes it.
        which: of the sequences open by then, counted round. `commit` counts those that have
            tokens to commit, `open` the requests closed before if `again`.
        tokens: how many; None for all there are. Unused by `fork`, `close` and `serve`.
        wait: ns since the step before.
        request: what `open` or `serve` opens.
        again: whether not `request` but one that was closed before is opened, as after a
            preemption, if there is one.
    """

    action: str
    which: int = 0
    tokens: int | None = None
    wait: int = 0
    request: Request | None = None
    again: bool = False


def draw_request(draw: Draw, traffic: Traffic) -> Request:
    """Draw a request; its id is 0. Its last key may cover a part of a block, or be missing."""
    keys: list[int] = []
    for _ in range(draw(0, traffic.most_keys)):
        # A number names the whole path to it, as a chained key does.
        above = keys[-1] if keys else 0
        branch = max(1, draw(-1, traffic.width))
        keys.append(above * traffic.width + branch)
    spare = draw(1 - traffic.key_tokens, traffic.key_tokens)
    length = max(1, len(keys) * traffic.key_tokens + spare)
    hints = [_draw_hint(draw, length) for _ in range(draw(0, 2) if traffic.hints else 0)]
    return Request(
        id=0,
        prompt=length,
        keys=keys,
        key_tokens=traffic.key_tokens,
        tenant=(None, "a", "b")[draw(0, 2)],
        retention=tuple(hints),
    )


def _draw_hint(draw: Draw, length: int) -> Retention:
    start = draw(0, length - 1)
    end = draw(start + 1, length + 1)
    return Retention(
        start,
        end if end <= length else None,
        (10, 60, 90)[draw(0, 2)],
        (None, 5, 40)[draw(0, 2)],
    )


def draw_step(draw: Draw, traffic: Traffic, action: str | None = None) -> Step:
    """Draw a step; `action` says which, None any. The id of its request is 0."""
    if action is None:
        actions = [name for name, often in traffic.mix.items() for _ in range(often)]
        action = actions[draw(0, len(actions) - 1)]
    most = {
        "open": traffic.most_keys * traffic.key_tokens,
        "commit": 2 * traffic.key_tokens,
        "extend": 2 * traffic.key_tokens,
        "rollback": traffic.key_tokens,
    }.get(action)
    some = most is not None and draw(1, 4) <= {"open": 1, "commit": 3}.get(action, 4)
    return Step(
        action=action,
        which=draw(0, 7),
        tokens=draw(0, most) if some and most is not None else None,
        wait=draw(0, traffic.longest_wait),
        request=draw_request(draw, traffic) if action in ("open", "serve") else None,
        again=action == "open" and draw(0, 9) == 0,
    )


def numbered(steps: Iterable[Step]) -> list[Step]:
    """Return `steps` with the requests' ids made unique: their places."""
    return [
        attrs.evolve(step, request=attrs.evolve(step.request, id=number))
        if step.request is not None
        else step
        for number, step in enumerate(steps)
    ]


def random_steps(seed: int, count: int, traffic: Traffic | None = None) -> list[Step]:
    """Return `count` steps drawn from `seed`."""
    draw, traffic = _drawn_from(seed), traffic or Traffic()
    return numbered(draw_step(draw, traffic) for _ in range(count))


def random_requests(seed: int, count: int, traffic: Traffic | None = None) -> list[Request]:
    """Return `count` requests drawn from `seed`, in order of arrival."""
    draw, traffic = _drawn_from(seed), traffic or Traffic()
    requests, now = [], 0
    for number in range(count):
        now += draw(0, traffic.longest_wait)
        request = draw_request(draw, traffic)
        requests.append(attrs.evolve(request, id=number, arrival=now))
    return requests


def _drawn_from(seed: int) -> Draw:
    return Random(seed).randint  # noqa: S311 - nothing secret
