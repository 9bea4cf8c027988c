"""Texts as tokens: estimates, and a model's tokenizer with its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import orjson

from kvcore import InputError
from kvcore.blake2 import blake2b
from kvcore.lazy import import_extra
from kvcore.workloads import file_digest
from kvcore_plugins.workload._messages import (
    ANSWER,
    Message,
    image_text,
    remembered,
    text_of,
    tools_of,
)
from kvcore_plugins.workload.rows import Row

ESTIMATES = {
    "words": "tokens are pieces of words, which only estimates what a model's tokenizer makes",
    "bytes": "tokens are bytes, some four times as many as a model's tokenizer makes",
}
_PIECES = re.compile(r"[A-Za-z]{1,7}|[0-9]{1,3}|\n+|[^\sA-Za-z0-9]")


class Encoder:
    """Turns texts into tokens by a function; chats by a template of roles and line ends.

    Args:
        tokens: the function.
        image_tokens: tokens of an image, which texts may have as `image_text`; None: they have
            no images.
    """

    def __init__(
        self, tokens: Callable[[str], list[int]], image_tokens: int | None = None
    ) -> None:
        self._tokens = tokens
        self._image_tokens = image_tokens or 0

    def begin(self, text: str) -> list[int]:
        """Return the tokens of a text that is a prompt, with the special ones of its model."""
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return self._tokens(text) if "\0" not in text else self._mixed(text)

    def _mixed(self, text: str) -> list[int]:
        """Return the tokens of a text with images, whose tokens are numbers of their own."""
        # A text of the log may be written like an image, so the number is not read from it.
        before, *rest = re.split(image_text("([0-9a-f]{32})", self._image_tokens), text)
        tokens = list(self._tokens(before))
        for digest, after in zip(rest[::2], rest[1::2], strict=True):
            first = int(digest[:15], 16)
            tokens += range(first, first + self._image_tokens)
            tokens += self._tokens(after)
        return tokens

    def prompts(
        self, messages: list[Message], places: list[int], body: Row
    ) -> Iterator[tuple[list[int], list[int] | None]]:
        """Yield the tokens of all messages before each of the ascending `places`.

        With them are the tokens up to the end of the tools and of each message; None: unknown.
        """
        tokens: list[int] = []
        ends: list[int] = []
        tools = tools_of(body)
        if tools:
            tokens += self.encode(orjson.dumps(tools).decode())
            ends.append(len(tokens))
        done = 0
        for end in places:
            for message in messages[done:end]:
                # Encoded apart, so that a prompt starts with the prompt and answer before it.
                for text in (f"{message['role']}\n", text_of(message), "\n"):
                    tokens += self.encode(text)
                ends.append(len(tokens))
            done = end
            yield [*tokens, *self.encode(f"{ANSWER}\n")], [*ends]


class _Tokenizer(Encoder):
    """The tokenizer of a model without a chat template."""

    def __init__(self, tokenizer: Any, image_tokens: int | None) -> None:
        super().__init__(partial(tokenizer.encode, add_special_tokens=False), image_tokens)
        self._tokenizer = tokenizer

    def begin(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens


class _Template(_Tokenizer):
    """The tokenizer of a model with a chat template."""

    def prompts(
        self, messages: list[Message], places: list[int], body: Row
    ) -> Iterator[tuple[list[int], None]]:
        for end in places:
            try:
                text = self._tokenizer.apply_chat_template(
                    messages[:end],
                    tools=tools_of(body),
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except Exception as error:
                msg = f"{body.path}:{body.line}: the tokenizer's chat template fails: {error}"
                raise InputError(msg) from error
            yield self.encode(text), None


def encoder_of(tokens: str, tokenizer: Path | None, image_tokens: int | None = None) -> Encoder:
    """Return the encoder of a tokenizer in a folder, or without one of an estimate."""
    if tokenizer is not None:
        pretrained = _pretrained(tokenizer, tokenizer_digests(tokenizer))
        kind = _Tokenizer if pretrained.chat_template is None else _Template
        return kind(pretrained, image_tokens)
    return Encoder(_words if tokens == "words" else _bytes, image_tokens)


def tokenizer_digests(folder: Path) -> tuple[str, ...]:
    """Return the digests of the files that determine the tokens of a tokenizer."""
    kinds = ("*.json", "*.jinja", "*.txt", "*.model")
    return tuple(file_digest(file) for kind in kinds for file in sorted(folder.glob(kind)))


@lru_cache(maxsize=1)
def _pretrained(folder: Path, digests: tuple[str, ...]) -> Any:
    """Return the tokenizer in a folder, whose files have these digests."""
    if not digests:
        why = "it has no tokenizer.json" if folder.is_dir() else "there is no such folder"
        msg = f"tokenizer={folder}: {why}"
        raise InputError(msg)
    needed = "tokenizer=FOLDER needs transformers"
    auto = import_extra("transformers", needed, "hf", ", or leave it out").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason, _, _ = str(error).partition("\n")
        msg = f"tokenizer={folder}: transformers cannot read it: {reason}"
        raise InputError(msg) from error
    # A long prompt would print a warning.
    tokenizer.model_max_length = 1 << 62
    return tokenizer


@remembered
def _pieces(text: str) -> tuple[int, ...]:
    return tuple(map(_piece_id, _PIECES.findall(text)))


def _words(text: str) -> list[int]:
    return list(_pieces(text))


def _bytes(text: str) -> list[int]:
    return list(text.encode())


@lru_cache(maxsize=1 << 18)
def _piece_id(piece: str) -> int:
    return int.from_bytes(blake2b(piece.encode(), digest_size=8).digest(), "little")
