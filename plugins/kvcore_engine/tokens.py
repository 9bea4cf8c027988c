"""Token ids of a request: those of its text, or ids derived from its block keys."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b, shake_128

import attrs

from kvcore.engine import Sampling
from kvcore.errors import InputError
from kvcore.request import Key, Request, TextRequest, block_keys

_BYTES_PER_DRAW = 8
"""Bytes of a digest that one token id is derived from."""


def hashed(*parts: object) -> int:
    """Return a 64-bit hash of the texts of all of `parts`, with blanks between them.

    A text with blanks may come last alone, behind a fixed number of parts: ("a b", "c") and
    ("a", "b c") are equal here.
    """
    written = " ".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(written, digest_size=8).digest(), "little")


def uniform(*parts: object) -> float:
    """Return a number in [0, 1), one of 2^53 evenly spaced, derived from all of `parts`."""
    return (hashed(*parts) >> 11) / 2**53


@attrs.define(kw_only=True)
class SampledRequest(TextRequest):
    """A request whose client says how its tokens are drawn.

    Attributes:
        sampling: the way in which they are drawn; None: as those of the generator.
        seed: seed of its samples; None: it is derived from the run's seed and its id.
    """

    sampling: Sampling | None = None
    seed: int | None = None


class TokenStream:
    """The token ids of one request: its prompt, then the tokens generated so far.

    The token ids of a block are derived from (block key, offset), so that equal keys mean
    equal tokens. That holds for the output as well: where a request has output keys, the
    tokens that they stand for replace those that the model samples. Token ids beyond the
    keys are derived from (request id, position). A `TextRequest` has its own tokens.

    Args:
        request: the request whose tokens these are.
        vocabulary: number of token ids.
        seed: seed of the run.

    Attributes:
        output: token ids generated so far.
        seed: seed of the request's samples, derived from (seed of the run, request id) or from
            its own seed.
        sampling: as of a `SampledRequest`; None for others.

    Raises:
        InputError: the text has a token id that the vocabulary does not have, or fewer tokens
            than the prompt.
    """

    __slots__ = (
        "_chain",
        "_last_key",
        "_published_keys",
        "_request",
        "_vocabulary",
        "output",
        "sampling",
        "seed",
    )

    def __init__(self, request: Request, vocabulary: int, seed: int) -> None:
        if isinstance(request, TextRequest):
            _check_text(request, vocabulary)
        self.output: list[int] = []
        self._published_keys = 0
        self._last_key: bytes | None = None
        parts: tuple[object, ...] = "sample", seed, repr(request.id)
        self.sampling: Sampling | None = None
        if isinstance(request, SampledRequest):
            self.sampling = request.sampling
            if request.seed is not None:
                parts = "request", request.seed
        self.seed = hashed(*parts) >> 1
        self._request = request
        self._vocabulary = vocabulary
        self._chain: Sequence[Key] = request.keys
        if request.output_keys:
            full_blocks = request.prompt_tokens // request.key_tokens
            self._chain = [*request.keys[:full_blocks], *request.output_keys]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the token ids at the positions `[start, stop)`. O(stop - start) in C."""
        prompt = self._request.prompt_tokens
        ids = self._prompt(start, min(stop, prompt)) if start < prompt else []
        if stop > prompt:
            ids += self.output[max(start - prompt, 0) : stop - prompt]
        return ids

    def append(self, token: int) -> int:
        """Append the next output token and return it.

        `token` is the sampled one; an output key at its position takes its place.
        """
        request = self._request
        if request.output_keys and not isinstance(request, TextRequest):
            position = request.prompt_tokens + len(self.output)
            if position // request.key_tokens < len(self._chain):
                (token,) = self._derived(position, position + 1)
        self.output.append(token)
        return token

    def new_keys(self, output: int) -> list[Key]:
        """Return the keys of generated blocks that were completed since the last call.

        Only a `TextRequest` that publishes its output has such keys. O(new tokens); the first
        keys cost O(prompt) as well.

        Args:
            output: number of tokens that the request will have generated at its end.
        """
        request = self._request
        if not (isinstance(request, TextRequest) and request.publish):
            return []
        size = request.key_tokens
        # The K/V of the last token is never computed.
        known = request.prompt_tokens + min(len(self.output), output - 1)
        full_blocks = request.prompt_tokens // size
        first = full_blocks + self._published_keys
        if known // size <= first:
            return []
        if full_blocks and self._last_key is None:
            prompt = request.tokens[: full_blocks * size]
            self._last_key = block_keys(prompt, size, salt=request.salt)[-1]
        keys = block_keys(
            self.token_ids(first * size, known),
            size,
            salt=request.salt,
            parent=self._last_key,
        )
        self._last_key = keys[-1]
        self._published_keys += len(keys)
        return [*keys]

    def _prompt(self, start: int, stop: int) -> list[int]:
        if isinstance(self._request, TextRequest):
            return list(self._request.tokens[start:stop])
        return self._derived(start, stop)

    def _derived(self, start: int, stop: int) -> list[int]:
        """Derive the token ids at `[start, stop)`, one key at a time.

        The digest of a key is a stream of 64-bit words, and the token at an offset is the
        word at that offset, so a range of tokens does not depend on where it was cut.
        """
        size, chain, name = self._request.key_tokens, self._chain, self._request.id
        words = array("Q")
        for block in range(start // size, -(-stop // size)):
            key = chain[block] if block < len(chain) else f"{block} of {name!r}"
            text = key.hex() if isinstance(key, bytes) else str(key)
            low, high = max(start - block * size, 0), min(stop - block * size, size)
            digest = shake_128(f"key {text}".encode()).digest(high * _BYTES_PER_DRAW)
            words.frombytes(digest[low * _BYTES_PER_DRAW :])
        # Digests are read as little-endian on every machine.
        if array("H", [1]).tobytes() != b"\x01\x00":
            words.byteswap()
        return [word % self._vocabulary for word in words]


def _check_text(request: TextRequest, vocabulary: int) -> None:
    """Refuse a text with fewer tokens than its prompt, or with ids beyond the vocabulary."""
    tokens = request.tokens
    if len(tokens) < request.prompt_tokens:
        msg = (
            f"request {request.id!r} has {len(tokens):,} tokens, and a prompt of "
            f"{request.prompt_tokens:,}: give the tokens of the whole prompt"
        )
        raise InputError(msg)
    wrong = [
        t for t in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= t < vocabulary
    ]
    if wrong:
        msg = (
            f"request {request.id!r} has token {wrong[0]}; the generator's are "
            f"0 to {vocabulary - 1}"
        )
        raise InputError(msg)
