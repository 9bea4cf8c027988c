"""Hypothesis strategies: requests over a small trie of prompts, and steps of a cache."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, TypeVar

import attrs
from hypothesis import strategies as st

from kvcore.request import Request
from kvcore.testing.traffic import Draw, Step, Traffic, draw_request, draw_step, numbered

T = TypeVar("T")


def requests(traffic: Traffic | None = None) -> st.SearchStrategy[Request]:
    """Draw a request with id 0. Prompts shrink towards short ones that share all they have."""
    return _requests(traffic or Traffic())


def request_lists(
    traffic: Traffic | None = None, *, most: int = 30
) -> st.SearchStrategy[list[Request]]:
    """Draw up to `most` requests, with ids and arrivals in order."""
    traffic = traffic or Traffic()
    waits = st.integers(0, traffic.longest_wait)
    return _lists(st.tuples(requests(traffic), waits), most).map(_in_order)


def steps(traffic: Traffic | None = None, action: str | None = None) -> st.SearchStrategy[Step]:
    """Draw a step: `action`, or any. The request of an `open` has id 0."""
    return _steps(traffic or Traffic(), action)


def step_lists(
    traffic: Traffic | None = None, *, most: int = 60
) -> st.SearchStrategy[list[Step]]:
    """Draw up to `most` steps, with ids in order. They shrink by dropping steps."""
    return _lists(steps(traffic), most).map(numbered)


def _lists(elements: st.SearchStrategy[T], most: int) -> st.SearchStrategy[list[T]]:
    # Left alone, hypothesis draws five elements or so, too few to fill a cache.
    return st.lists(elements, max_size=most) | st.lists(
        elements, min_size=most // 2, max_size=most
    )


def _drawn_by(draw: Any) -> Draw:
    return lambda low, high: draw(st.integers(low, high))


@st.composite
def _requests(draw: Any, traffic: Traffic) -> Request:
    return draw_request(_drawn_by(draw), traffic)


@st.composite
def _steps(draw: Any, traffic: Traffic, action: str | None) -> Step:
    return draw_step(_drawn_by(draw), traffic, action)


def _in_order(drawn: list[tuple[Request, int]]) -> list[Request]:
    arrivals = accumulate(wait for _, wait in drawn)
    return [
        attrs.evolve(request, id=number, arrival=arrival)
        for number, ((request, _), arrival) in enumerate(zip(drawn, arrivals, strict=True))
    ]
