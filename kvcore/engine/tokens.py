"""Which token ids a request has: those of its text, or such as its block keys stand for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b, shake_128

from kvcore.errors import InputError
from kvcore.request import Key, Request, TextRequest, block_keys

WORD = 8
"""Bytes that a token id is drawn from."""


class TokenStream:
    """The tokens of one request: its prompt's, then those it has generated.

    What has a key is what the key stands for: its token ids are drawn from (key, offset), so
    that equal keys mean equal tokens. That holds for the output as well: of a request with
    output keys it is known, and what the model draws instead is put aside. What has no key
    is drawn from (request id, position). A `TextRequest` has its own tokens.

    Args:
        request: whose tokens.
        vocabulary: token ids there are.
        seed: of the run.

    Attributes:
        output: generated so far.
        seed: what its samples are drawn from: (seed of the run, request id).

    Raises:
        InputError: a text with a token id that the vocabulary does not have.
    """

    __slots__ = ("_chain", "_named", "_request", "_vocabulary", "output", "seed")

    def __init__(self, request: Request, vocabulary: int, seed: int) -> None:
        if isinstance(request, TextRequest) and max(request.tokens, default=0) >= vocabulary:
            msg = (
                f"request {request.id!r} has token {max(request.tokens)}; the generator's are "
                f"0 to {vocabulary - 1}"
            )
            raise InputError(msg)
        self.output: list[int] = []
        self._named = 0
        self.seed = int.from_bytes(_text_hash(f"sample {seed} {request.id!r}"), "little") >> 1
        self._request = request
        self._vocabulary = vocabulary
        self._chain: Sequence[Key] = request.keys
        if request.output_keys:
            whole = request.prompt_tokens // request.key_tokens
            self._chain = [*request.keys[:whole], *request.output_keys]

    def between(self, start: int, stop: int) -> list[int]:
        """Return the tokens at the positions `[start, stop)`. O(their number) in C."""
        prompt = self._request.prompt_tokens
        tokens = self._prompt(start, min(stop, prompt)) if start < prompt else []
        if stop > prompt:
            tokens += self.output[max(start - prompt, 0) : stop - prompt]
        return tokens

    def add(self, token: int) -> int:
        """Take the next token that the model drew; return the one that counts."""
        request = self._request
        if request.output_keys and not isinstance(request, TextRequest):
            position = request.prompt_tokens + len(self.output)
            if position // request.key_tokens < len(self._chain):
                (token,) = self._drawn(position, position + 1)
        self.output.append(token)
        return token

    def new_keys(self, output: int) -> list[Key]:
        """Return keys of blocks that have become known since the last call. O(tokens).

        `output` is how many tokens the request will have generated at its end.
        """
        request = self._request
        if not (isinstance(request, TextRequest) and request.publish):
            return []
        size = request.key_tokens
        # The K/V of the last token is never computed.
        known = request.prompt_tokens + min(len(self.output), output - 1)
        first = request.prompt_tokens // size + self._named
        if known // size <= first:
            return []
        tokens = [*request.tokens, *self.output[: known - request.prompt_tokens]]
        keys: list[Key] = [*block_keys(tokens, size, salt=request.salt)[first:]]
        self._named += len(keys)
        return keys

    def _prompt(self, start: int, stop: int) -> list[int]:
        if isinstance(self._request, TextRequest):
            return list(self._request.tokens[start:stop])
        return self._drawn(start, stop)

    def _drawn(self, start: int, stop: int) -> list[int]:
        """Draw the tokens at `[start, stop)` from what identifies them, a key at a time."""
        size, chain, name = self._request.key_tokens, self._chain, self._request.id
        drawn = array("Q")
        for place in range(start // size, -(-stop // size)):
            key = chain[place] if place < len(chain) else f"{place} of {name!r}"
            text = key.hex() if isinstance(key, bytes) else str(key)
            low, high = max(start - place * size, 0), min(stop - place * size, size)
            drawn.frombytes(shake_128(f"key {text}".encode()).digest(high * WORD)[low * WORD :])
        if array("H", [1]).tobytes() != b"\x01\x00":
            drawn.byteswap()
        return [word % self._vocabulary for word in drawn]


def _text_hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
