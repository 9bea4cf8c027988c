"""Logs of chat APIs: content blocks with their breakpoints, and the tokens that were billed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import NamedTuple

import orjson

from kvcore.units import NS_PER_S
from kvcore_plugins.workload._messages import MARK, block_text, unmarked
from kvcore_plugins.workload.logged import LoggedRequest, PromptPart, Usage
from kvcore_plugins.workload.rows import Row

_TTLS = {None: 0, "5m": 300 * NS_PER_S, "1h": 3600 * NS_PER_S}
_SENTENCE = re.compile(r"[^.!?\n]{1,200}[.!?\n]*|[.!?\n]+")


class Block(NamedTuple):
    """A content block of a logged prompt.

    Attributes:
        label: its place in the request.
        text: its role and content.
        ttl_ns: TTL of its breakpoint, as in `PromptPart`.
    """

    label: str
    text: str
    ttl_ns: int | None


def logged(
    body: Row,
    response: Row,
    ends: Callable[[Sequence[int], int], Iterable[int]],
    total: int,
) -> Callable[..., LoggedRequest]:
    """Return the function that builds the request of a logged chat.

    Args:
        body: row of the request.
        response: row of the answer.
        ends: returns the tokens up to the end of the tools and of each message, from the
            lengths of their texts and `total`.
        total: tokens of the prompt.
    """
    usage, explicit = usage_of(response)
    groups = list(message_blocks(body))
    marks = [block.ttl_ns for group in groups for block in group]
    lengths = [sum(len(block.text) for block in group) for group in groups]
    return partial(
        LoggedRequest,
        parts=prompt_parts(body, groups, ends(lengths, total)),
        explicit=explicit or _ttl(body) is not None or any(m is not None for m in marks),
        usage=usage,
    )


def message_blocks(body: Row) -> Iterator[list[Block]]:
    """Yield the blocks of the tools, of the system prompt, and of each message."""
    tools = body.fields.get("tools")
    if type(tools) is list and tools:
        yield [
            Block(f"tools[{n}]", orjson.dumps(unmarked(tool.fields)).decode(), _ttl(tool))
            for n, tool in enumerate(body.inner("tools"))
        ]
    elif tools:
        yield [Block("tools", orjson.dumps(tools).decode(), None)]
    if body.fields.get("system") is not None:
        yield list(_blocks(body, "system", "system"))
    for n, message in enumerate(body.inner("messages")):
        role = f"{message.fields.get('role')}"
        found = list(_blocks(message, "content", f"messages[{n}]", role, ".content"))
        if calls := message.fields.get("tool_calls"):
            text = orjson.dumps(calls).decode()
            found.append(Block(f"messages[{n}].tool_calls", text, None))
        if message.fields.get(MARK) is not None and found:
            found[-1] = found[-1]._replace(ttl_ns=_ttl(message))
        yield found


def _blocks(
    row: Row, name: str, label: str, role: str = "system", inside: str = ""
) -> Iterator[Block]:
    content = row.fields.get(name)
    if type(content) is list:
        for n, part in enumerate(row.inner(name)):
            text = block_text(row, n, part)
            yield Block(f"{label}{inside}[{n}]", f"{role}\n{text}", _ttl(part))
    else:
        yield Block(label, f"{role}\n{content or ''}", None)


def _ttl(row: Row) -> int | None:
    """Return the TTL in ns of a breakpoint in `row`, as in `PromptPart`; None without one."""
    mark = row.fields.get(MARK)
    if mark is None:
        return None
    ttl = mark.get("ttl") if type(mark) is dict else ""
    if ttl not in _TTLS:
        raise row.error(field=MARK, expected='{"type": "ephemeral"}, with a ttl of 5m or 1h')
    return _TTLS[ttl]


def prompt_parts(
    body: Row, groups: Sequence[Sequence[Block]], ends: Iterable[int]
) -> tuple[PromptPart, ...]:
    """Return the parts of a prompt whose `groups` of blocks end at `ends`, in tokens.

    Within a group, positions are divided by the lengths of the texts.
    """
    parts: list[PromptPart] = []
    for group, (start, end) in zip(groups, pairwise([0, *ends]), strict=True):
        cuts = _divided([len(block.text) for block in group], start, end)
        for block, first, last in zip(group, [start, *cuts], cuts, strict=False):
            found = _SENTENCE.findall(block.text)
            borders = _divided(list(map(len, found)), first, last)
            pieces = tuple(zip(map(hash, found), borders, strict=True))
            digest = blake2b(block.text.encode("utf-8", "surrogatepass"), digest_size=16)
            parts.append(PromptPart(block.label, last, digest.digest(), pieces, block.ttl_ns))
    mark = _ttl(body)
    if mark is not None and parts:
        *others, part = parts
        parts = [*others, PromptPart(part.label, part.end, part.digest, part.pieces, mark)]
    return tuple(parts)


def _divided(lengths: list[int], start: int, end: int) -> list[int]:
    """Return the ends of consecutive texts of these lengths, from `start` to `end`."""
    whole = sum(lengths) or 1
    return [start + (end - start) * length // whole for length in accumulate(lengths)]


def usage_of(response: Row) -> tuple[Usage | None, bool]:
    """Return the tokens that an API reported, and whether it caches at breakpoints alone.

    Fields are those of OpenAI's chat completions and responses, of Anthropic's messages, and
    of DeepSeek.

    Raises:
        InputError: a field that is no number of tokens, or a prompt shorter than its parts.
    """
    fields = response.fields.get("usage")
    if type(fields) is not dict:
        return None, False
    row = Row(response.path, response.line, fields, f"{response.prefix}usage.")

    def count(name: str, holder: Row = row) -> int:
        return holder.optional(holder.natural, name, 0)

    def inner(name: str) -> Row:
        found = fields.get(name)
        inside = found if type(found) is dict else {}
        return Row(row.path, row.line, inside, f"{row.prefix}{name}.")

    explicit = any(fields.get(f"cache_{what}_input_tokens") is not None
                   for what in ("read", "creation"))  # fmt: skip
    output = count("completion_tokens") or count("output_tokens")
    if explicit:
        read, written = count("cache_read_input_tokens"), count("cache_creation_input_tokens")
        long = count("ephemeral_1h_input_tokens", inner("cache_creation"))
        prompt = count("input_tokens") + read + written
    else:
        prompt = count("prompt_tokens") or count("input_tokens")
        details = (inner(f"{name}_tokens_details") for name in ("prompt", "input"))
        read = sum(count("cached_tokens", each) for each in details)
        read = read or count("prompt_cache_hit_tokens")
        written = long = 0
    if not prompt:
        return None, explicit
    if read > prompt or long > written:
        raise response.error(field="usage", expected="no part larger than the whole")
    return Usage(prompt, read, written - long, long, output), explicit
