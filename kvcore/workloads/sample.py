"""A part of a workload, its lengths divided: what can be computed in a minute."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, ClassVar

import attrs

from kvcore.errors import InputError
from kvcore.request import Request, Retention, TextRequest
from kvcore.workloads.base import Workload


@attrs.define(slots=False, eq=False)
class Excerpt(Workload):
    """The first requests of a workload, every length divided by `shrink`.

    A key stands for `key_tokens / shrink` tokens, so what is shared is shared still, and
    what hits, in blocks divided alike, as well. Prompts are rounded down and outputs up,
    neither to nothing. Times stay as they are.

    Attributes:
        source: the workload.
        limit: how many of its requests; None: all.
        shrink: how many of its tokens become one.

    Raises:
        InputError: no request at all, or a `shrink` that does not divide a key's tokens.
    """

    name: ClassVar[str] = "excerpt"

    source: Workload
    limit: int | None = None
    shrink: int = 1

    def __attrs_post_init__(self) -> None:
        """Check the numbers."""
        msg, tokens = "", self.source.key_tokens
        if self.limit is not None and self.limit < 1:
            msg = f"the first {self.limit} requests of {self.source.name}: give 1 or more"
        elif self.shrink < 1 or tokens % self.shrink:
            msg = (
                f"{self.source.name} shrunk {self.shrink} times: its keys of {tokens} tokens "
                f"can only be divided by {', '.join(map(str, _divisors(tokens)))}"
            )
        if msg:
            raise InputError(msg)

    def __iter__(self) -> Iterator[Request]:
        """Yield requests as the source does."""
        requests = islice(self.source, self.limit)
        return requests if self.shrink == 1 else map(self._shrunk, requests)

    @property
    def key_tokens(self) -> int:
        """Tokens that are left of a key."""
        return self.source.key_tokens // self.shrink

    @property
    def digest(self) -> str:
        """The digest of the source's, and of what is made of it."""
        text = f"{self.source.digest} {self.limit} {self.shrink}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def size(self) -> int | None:
        """How many requests there are, where the source knows."""
        known = self.source.size
        return known if self.limit is None or known is None else min(known, self.limit)

    def options(self) -> dict[str, Any]:
        """Return those of the source, and what it is called."""
        own = {"limit": self.limit, "shrink": self.shrink}
        return {"workload": self.source.name, **self.source.options(), **own}

    def _shrunk(self, request: Request) -> Request:
        factor, size = self.shrink, self.key_tokens
        prompt = max(request.prompt_tokens // factor, min(request.prompt_tokens, 1))
        predicted = request.predicted_output_tokens
        return attrs.evolve(
            request,
            prompt_tokens=prompt,
            output_tokens=-(-request.output_tokens // factor),
            keys=request.keys[: -(-prompt // size)],
            key_tokens=size,
            predicted_output_tokens=None if predicted is None else -(-predicted // factor),
            retention=tuple(self._narrowed(hint) for hint in request.retention),
        )

    def _narrowed(self, hint: Retention) -> Retention:
        end = None if hint.end is None else -(-hint.end // self.shrink)
        return attrs.evolve(hint, start=hint.start // self.shrink, end=end)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@attrs.define(eq=False)
class Texts(Workload):
    """Requests from texts, all of which arrive at once.

    Attributes:
        requests: made by `text_request`, for blocks of `key_tokens` tokens.
    """

    name: ClassVar[str] = "prompts"

    requests: Sequence[TextRequest] = attrs.field(repr=False)
    key_tokens: int = 16

    def __iter__(self) -> Iterator[Request]:
        """Yield them."""
        return iter(self.requests)

    @property
    def digest(self) -> str:
        """The digest of all tokens."""
        state = blake2b(digest_size=16)
        for request in self.requests:
            state.update(f"{request.id} {request.output_tokens}:".encode())
            state.update(array("Q", request.tokens).tobytes())
        return state.hexdigest()

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.requests)

    def options(self) -> dict[str, int]:
        """Return how many there are; their tokens are no option."""
        return {"requests": len(self.requests)}
