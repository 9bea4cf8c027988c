"""Workloads made of others: a part of one, with shorter requests, and prompts as texts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, ClassVar

import attrs

from kvcore.errors import InputError
from kvcore.request import Request, Retention, TextRequest
from kvcore.units import window_text
from kvcore.workloads.base import Workload


@attrs.define(eq=False)
class WorkloadSample(Workload):
    """A part of a workload: requests that arrive in a window, the first of them, scaled.

    A key stands for `key_tokens / scale` tokens, so requests share what they shared before,
    and hits, in blocks divided by the same number, stay as they were. Prompts are rounded
    down and outputs up, neither to nothing. Times stay as they are. A request that comes
    after one before the window begins its session, at the time recorded for it.

    Attributes:
        source: the workload.
        limit: number of requests to keep; None: all.
        scale: number of tokens of the source that become one.
        window: nanoseconds: a request is kept if it arrives at the first or later, and
            before the second (None: however late); None: all are.

    Raises:
        InputError: there would be no request, or `scale` does not divide a key's tokens.
    """

    source: Workload
    limit: int | None = None
    scale: int = 1
    window: tuple[int, int | None] | None = None

    def __attrs_post_init__(self) -> None:
        """Check `limit` and `scale`."""
        msg, tokens = "", self.source.key_tokens
        if self.limit is not None and self.limit < 1:
            msg = f"the first {self.limit} requests of {self.source.name}: give 1 or more"
        elif self.scale < 1 or tokens % self.scale:
            msg = (
                f"{self.source.name} shrunk {self.scale} times: its keys of {tokens} tokens "
                f"can only be divided by {', '.join(map(str, _divisors(tokens)))}"
            )
        if msg:
            raise InputError(msg)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of the source."""
        requests = islice(self.source if self.window is None else self._timely(), self.limit)
        return requests if self.scale == 1 else map(self._scaled, requests)

    def _timely(self) -> Iterator[Request]:
        """Yield the requests that arrive in the window."""
        start, end = self.window or (0, None)
        left_out: set[int | str] = set()
        kept = 0
        for request in self.source:
            if end is not None and request.arrival >= end:
                break
            if request.arrival < start:
                if request.session is not None:
                    left_out.add(request.id)
                continue
            kept += 1
            if request.after in left_out:
                yield attrs.evolve(request, after=None, think_time=0)
            else:
                yield request
        if not kept:
            shown = window_text((start, end))
            msg = f"window {shown}: no request of {self.source.name} arrives in it"
            raise InputError(msg)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the source."""
        return self.source.name

    @property
    def key_tokens(self) -> int:
        """Tokens a key stands for after the division."""
        return self.source.key_tokens // self.scale

    @property
    def digest(self) -> str:
        """The digest of the source's digest, `limit`, `scale` and the window."""
        text = f"{self.source.digest} {self.limit} {self.scale}"
        if self.window is not None:
            text += f" {self.window}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def size(self) -> int | None:
        """The number of requests, if the source knows its own."""
        known = self.source.size if self.window is None else None
        return known if self.limit is None or known is None else min(known, self.limit)

    @property
    def notes(self) -> Sequence[str]:
        """The notes of the source."""
        return self.source.notes

    def options(self) -> dict[str, Any]:
        """Return the options of the source, `limit`, `scale` as `shrink`, and the window."""
        own: dict[str, Any] = {"limit": self.limit, "shrink": self.scale}
        if self.window is not None:
            own["window"] = window_text(self.window)
        return {**self.source.options(), **own}

    def _scaled(self, request: Request) -> Request:
        factor, size = self.scale, self.key_tokens
        prompt = max(request.prompt_tokens // factor, min(request.prompt_tokens, 1))
        predicted = request.predicted_output_tokens
        return attrs.evolve(
            request,
            prompt_tokens=prompt,
            output_tokens=-(-request.output_tokens // factor),
            keys=request.keys[: -(-prompt // size)],
            key_tokens=size,
            predicted_output_tokens=None if predicted is None else -(-predicted // factor),
            retention=tuple(self._scaled_hint(hint) for hint in request.retention),
        )

    def _scaled_hint(self, hint: Retention) -> Retention:
        end = None if hint.end is None else -(-hint.end // self.scale)
        return attrs.evolve(hint, start=hint.start // self.scale, end=end)


def part_of(
    source: Workload, limit: int | None, window: tuple[int, int | None] | None
) -> Workload:
    """Return the first `limit` requests in a window of time; 0 and None keep all."""
    if not limit and window is None:
        return source
    return WorkloadSample(source, limit or None, window=window)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@attrs.define(eq=False)
class PromptWorkload(Workload):
    """Requests made from texts, which all arrive at once.

    Attributes:
        requests: requests of `text_request`, for blocks of `key_tokens` tokens.
        key_tokens: tokens a key stands for.
    """

    name: ClassVar[str] = "prompts"

    requests: Sequence[TextRequest] = attrs.field(repr=False)
    key_tokens: int = 16

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests."""
        return iter(self.requests)

    @property
    def digest(self) -> str:
        """The digest of all ids, output lengths and tokens."""
        state = blake2b(digest_size=16)
        for request in self.requests:
            state.update(f"{request.id} {request.output_tokens}:".encode())
            state.update(array("Q", request.tokens).tobytes())
        return state.hexdigest()

    @property
    def size(self) -> int:
        """The number of requests."""
        return len(self.requests)

    def options(self) -> dict[str, int]:
        """Return the number of requests; their tokens are no option."""
        return {"requests": len(self.requests)}
