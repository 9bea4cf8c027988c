"""Requests from the log of a chat API: the content of prompts, and the billed tokens."""

from __future__ import annotations

import attrs

from kvcore.request import Request


@attrs.frozen
class Usage:
    """The tokens that an API reported for a request.

    Attributes:
        prompt_tokens: of the prompt, cached or not.
        read_tokens: of these, read from the cache.
        written_tokens, written_1h_tokens: of these, written to it, with a TTL below an hour
            and of one.
        output_tokens: generated.
    """

    prompt_tokens: int
    read_tokens: int = 0
    written_tokens: int = 0
    written_1h_tokens: int = 0
    output_tokens: int = 0


@attrs.frozen
class PromptPart:
    """A content block of a prompt: the tools, a message, or one block of a message.

    Attributes:
        label: its place in the request, such as `messages[2].content[0]`.
        end: the prompt's tokens up to its end.
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
    """A request of a chat API's log. Its salt is its model: each has a cache of its own.

    Attributes:
        parts: the content blocks of the prompt, in order.
        explicit: whether the log is of an API that caches at breakpoints alone, so that
            parts without any are not cached.
        usage: the tokens that the API reported; None: the log has none.
    """

    parts: tuple[PromptPart, ...] = ()
    explicit: bool = False
    usage: Usage | None = None
