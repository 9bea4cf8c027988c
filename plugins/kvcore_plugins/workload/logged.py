"""Requests from the log of a chat API: the content of prompts, and the billed tokens."""

from __future__ import annotations

import attrs

from kvcore.request import Key, Request
from kvcore_plugins.workload.usage import Usage


@attrs.frozen
class PromptPart:
    """A content block of a prompt: the tools, a message, or one block of a message.

    Attributes:
        label: its place in the request, such as `messages[2].content[0]`.
        end: tokens of the prompt's text up to its end.
        digest: hash of its role and content.
        pieces: for each of its sentences, a hash and the prompt's tokens up to its end.
            Hashes are those of this process.
        ttl_ns: TTL of the entry that a breakpoint here asks for; 0: that of the prices;
            None: there is no breakpoint.
    """

    label: str
    end: int
    digest: bytes
    pieces: tuple[tuple[int, int], ...] = ()
    ttl_ns: int | None = None


@attrs.define(kw_only=True)
class LoggedRequest(Request):
    """A request of an API's log. Its salt is its model and what else isolates its cache.

    Attributes:
        parts: the content blocks of the prompt, in order; none of a prompt that is no chat.
        explicit: whether the log is of an API that caches at breakpoints alone, so that
            parts without any are not cached.
        usage: the tokens that the API reported; None: the log has none.
        text_tokens, key_text_tokens: of the prompt, and of what a key stands for, as texts are
            counted: positions of parts are of this length. None: `prompt_tokens`, `key_tokens`.
        quoted: where later prompts quote another answer than was generated, such as one without
            its reasoning: the last key of the prompt and that answer, and their tokens.
    """

    parts: tuple[PromptPart, ...] = ()
    explicit: bool = False
    usage: Usage | None = None
    text_tokens: int | None = None
    key_text_tokens: int | None = None
    quoted: tuple[Key, int] | None = None
