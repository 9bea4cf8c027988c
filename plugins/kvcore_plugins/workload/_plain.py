"""The core in C beside workloads: it makes their plain requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from kvcore.cache.native import core
from kvcore.request import Request

Reader: TypeAlias = Callable[[bytes, int], Request | None]
"""Returns the request of a line, whose id is the given number, and whose arrival is its time in
ns; None if the line is not plain, or has an error, which is for Python to read."""


def json_reader(
    names: tuple[str, str, str, str], factor: int, key_tokens: int
) -> Reader | None:
    """Return the reader of lines with four fields alone; None without the core.

    Args:
        names: those of the time, of the lengths of prompt and output, and of the list of keys.
        factor: nanoseconds of the unit of times.
        key_tokens: number of prompt tokens of a key.
    """
    native = core()
    return native and partial(native.json_request, names, _pattern(key_tokens), factor)


def csv_reader(order: tuple[int, int, int], key_tokens: int) -> Reader | None:
    """Return the reader of rows of three cells; None without the core.

    Args:
        order: the places of the time, and of the lengths of prompt and output.
        key_tokens: number of prompt tokens of a key.
    """
    native = core()
    return native and partial(native.csv_request, order, _pattern(key_tokens))


def request_maker(
    prompt_tokens: int, output_tokens: int, key_tokens: int
) -> Callable[[int, int, Sequence[int]], Request]:
    """Return what makes requests of these lengths, of an id, a time of arrival and keys.

    In C a request is a copy of the first one, whose lengths alone are checked.
    """

    def request(name: int, arrival: int, keys: Sequence[int]) -> Request:
        return Request(
            id=name,
            arrival=arrival,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            keys=keys,
            key_tokens=key_tokens,
        )

    native = core()
    return request if native is None else partial(native.request_like, request(0, 0, ()))


def _pattern(key_tokens: int) -> Request:
    return Request(id=0, prompt_tokens=0, key_tokens=key_tokens)
