"""Calls of clients, and the requests that the router gets for them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import attrs
import orjson

from kvcore.errors import InputError
from kvcore.request import KEY_BYTES, Key, Request, block_keys
from kvcore.untrusted import LONGEST_SESSION, MOST_VALUES, parse_json

MOST_KEYS = 8_192
"""Largest number of blocks that get a key: a longer prompt has keys of its beginning."""

MOST_ANSWERS = 128
"""Largest number of answers to a call that have a request each: more are told as one."""

TOKENIZED = (
    *("model", "messages", "prompt", "tools", "add_special_tokens", "add_generation_prompt"),
    *("continue_final_message", "chat_template", "chat_template_kwargs"),
)
"""Fields of a body by which vLLM's `/tokenize` gives the tokens that its prompt has."""

CHAT = "chat/completions"
"""End of the path of a chat."""

ASKED_OUTPUT = 16
"""Output tokens of a completion if neither its client nor its server gives a number."""


@attrs.frozen
class SentCall:
    """A call as it is sent to servers.

    It has no JSON object, which takes 20 times the memory of its bytes while a server answers.

    Attributes:
        path: path of the API, such as `/v1/completions`.
        body: the bytes of the body.
        stream: whether the answer is streamed.
        counted: whether the client asks for the usage at the end of a stream.
        most_output: largest number of output tokens of an answer that the client asks for.
        parts: a request for each prompt, if there are several and they are counted.
        choices: number of answers to each prompt, if they are counted.
    """

    path: str
    body: bytes
    stream: bool
    counted: bool
    most_output: int
    parts: Sequence[Request] = ()
    choices: int = 1

    @property
    def answers(self) -> int:
        """Number of answers to all prompts."""
        return max(1, len(self.parts)) * self.choices


@attrs.define(eq=False)
class Call:
    """A call of the API, as its client made it.

    Attributes:
        path: path of the API, such as `/v1/completions`.
        raw, document: the bytes of the body, and the JSON object in them.
        stream: whether the answer is streamed.
        counted: whether the client asks for the usage at the end of a stream.
    """

    path: str
    raw: bytes
    document: dict[str, Any]
    stream: bool
    counted: bool

    @classmethod
    def read(cls, path: str, body: bytes) -> Call:
        """Return the call of a request body.

        Raises:
            InputError: the body is no JSON object, or has no prompt.
        """
        try:
            document = parse_json(body, MOST_VALUES)
        except ValueError as error:
            msg = f"the body is not JSON: {error}"
            raise InputError(msg) from error
        needed = "messages" if path.endswith(CHAT) else "prompt"
        kinds = (list,) if needed == "messages" else (str, list)
        if not isinstance(document, dict) or not isinstance(document.get(needed), kinds):
            msg = f"the body must be a JSON object with {needed!r}"
            raise InputError(msg)
        options = document.get("stream_options")
        counted = isinstance(options, dict) and options.get("include_usage") is True
        return cls(path, body, document, document.get("stream") is True, counted)

    def sent(self, *, count: bool) -> SentCall:
        """Return the call for a server; with `count` it asks for the usage of a stream."""
        body = self.raw
        if count and self.stream and not self.counted:
            options = self.document.get("stream_options")
            options = options if isinstance(options, dict) else {}
            options = {**options, "include_usage": True}
            body = orjson.dumps({**self.document, "stream_options": options})
        return SentCall(self.path, body, self.stream, self.counted, self.most_output)

    @property
    def question(self) -> dict[str, Any]:
        """The body of a request to a server's `/tokenize`."""
        read = {**self.document, "prompt": self.prompt}
        return {name: read[name] for name in TOKENIZED if read.get(name) is not None}

    @property
    def prompt(self) -> Any:
        """The prompt, or the list of prompts if there are several; None for a chat."""
        if self.path.endswith(CHAT):
            return None
        prompt: Any = self.document["prompt"]
        alone = len(prompt) == 1 and isinstance(prompt[0], (str, list))
        return prompt[0] if alone else prompt

    @property
    def tokens(self) -> list[int] | None:
        """The token ids of the prompt; None if the client sent text."""
        return token_ids(self.prompt)

    @property
    def most_output(self) -> int:
        """Largest number of output tokens that the client asks for."""
        for name in ("max_completion_tokens", "max_tokens"):
            if type(tokens := self.document.get(name)) is int and tokens > 0:
                return min(tokens, 1 << 20)
        return ASKED_OUTPUT

    def parts(self, request: Request, key_chars: int) -> tuple[Sequence[Request], int]:
        """Return requests of the prompts if there are several, and the answers to each.

        Prompts or answers beyond `MOST_ANSWERS` are one prompt, and one answer. All requests
        have no more keys than one may have.

        Args:
            request: the request that the router gets.
            key_chars: bytes of text that stand for a block.
        """
        asked: Any = self.document.get("n")
        prompt: Any = None if self.path.endswith(CHAT) else self.document["prompt"]
        choices = asked if type(asked) is int and 0 < asked <= MOST_ANSWERS else 1
        several = isinstance(prompt, list) and len(prompt) > 1 and type(prompt[0]) is not int
        if not several:
            return (), choices
        if len(prompt) * choices > MOST_ANSWERS:
            return (), 1
        start, parts = self._start(request.salt), list[Request]()
        more: dict[str, Any] = {
            "id": 0,
            "salt": request.salt,
            "key_tokens": request.key_tokens,
            "most": MOST_KEYS // len(prompt) // choices,
        }
        for each in prompt:
            tokens, part = token_ids(each), None
            if isinstance(each, str):
                part = text_request(each.encode(), start, key_chars=key_chars, **more)
            elif tokens is not None:
                part = token_request(tokens, **more)
            if part is None:
                return (), 1  # only a server can refuse it
            parts.append(part)
        return parts, choices

    def request(
        self,
        session: str | None,
        *,
        tokens: list[int] | None,
        key_tokens: int,
        key_chars: int,
    ) -> Request:
        """Return the request that the router gets, without an output length.

        Its id and its arrival are 0: both are known when it is routed.

        Args:
            session: name of the session in a header; None: that of the body, if any.
            tokens: token ids of the prompt; None: its keys are those of its text.
            key_tokens: number of tokens in a block.
            key_chars: bytes of text that stand for a block.
        """
        salt = self.document.get("cache_salt")
        salt = salt if isinstance(salt, str) else None
        session = session or next(
            filter(None, map(self._text, ("prompt_cache_key", "user"))), ""
        )
        more: dict[str, Any] = {
            "id": 0,
            "key_tokens": key_tokens,
            "session": session[:LONGEST_SESSION] or None,
            "most": MOST_KEYS,
        }
        if tokens is not None and (made := token_request(tokens, salt=salt, **more)):
            return made
        start = self._start(salt)
        return text_request(self._prompt(), start, key_chars=key_chars, salt=salt, **more)

    def _start(self, salt: str | None) -> bytes:
        """Return the parent of the first key of a text.

        It is of fixed length too, so that parts cannot be confused.
        """
        model = self._text("model")  # which a server refuses if it is none
        return blake2b(f"{model}\n{salt!r}".encode(), digest_size=KEY_BYTES).digest()

    def _prompt(self) -> bytes:
        """Return the bytes of the prompt, in which common parts of two prompts come first."""
        if isinstance(prompt := self.prompt, str):
            return prompt.encode()
        if prompt is not None:
            return orjson.dumps(prompt)
        tools = self.document.get("tools")
        return (orjson.dumps(tools) if tools else b"") + orjson.dumps(self.document["messages"])

    def _text(self, name: str) -> str | None:
        value = self.document.get(name)
        return value if isinstance(value, str) else None


def token_ids(value: Any) -> list[int] | None:
    """Return a value of JSON if it is a list of integers that is not empty; None if not."""
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    return None


def text_request(
    text: bytes,
    key: bytes,
    *,
    key_tokens: int,
    key_chars: int,
    most: int,
    **more: Any,
) -> Request:
    """Return a request with keys of a text, whose number of tokens is estimated.

    Args:
        text: the text of the prompt.
        key: the parent of its first key.
        key_tokens: number of tokens in a block.
        key_chars: bytes of text that stand for a block.
        most: largest number of keys.
        more: the other fields of the request.
    """
    keys: list[Key] = []
    for end in range(key_chars, min(len(text), most * key_chars) + 1, key_chars):
        key = blake2b(key + text[end - key_chars : end], digest_size=KEY_BYTES).digest()
        keys.append(key)
    length = max(1, len(text) * key_tokens // key_chars)
    return Request(prompt_tokens=length, keys=keys, key_tokens=key_tokens, **more)


def token_request(
    tokens: list[int],
    *,
    key_tokens: int,
    salt: str | None,
    most: int,
    **more: Any,
) -> Request | None:
    """Return a request with keys of these token ids; None: only a server can refuse them.

    The ids are not kept, which take 8 times the memory of their body while a server answers.

    Args:
        tokens: the token ids of the prompt.
        key_tokens: number of tokens in a block.
        salt: the salt of the keys.
        most: largest number of keys.
        more: the other fields of the request.
    """
    try:
        keys = block_keys(tokens[: most * key_tokens], key_tokens, salt=salt)
    except InputError:
        return None
    more |= {"key_tokens": key_tokens, "salt": salt}
    return Request(prompt_tokens=len(tokens), keys=keys, **more)
