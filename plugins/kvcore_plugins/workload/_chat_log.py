"""Logs of chat APIs: content blocks with their breakpoints, and the tokens that were billed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import attrs
import orjson

from kvcore.blake2 import blake2b
from kvcore.units import NS_PER_S
from kvcore_plugins.workload._messages import MARK, block_text, remembered, unmarked
from kvcore_plugins.workload.logged import PromptPart
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


def log_parts(
    body: Row, ends: Sequence[int] | None, total: int
) -> tuple[tuple[PromptPart, ...], bool]:
    """Return the content blocks of a logged prompt, and whether it has breakpoints.

    Args:
        body: row of the request.
        ends: the tokens up to the end of the tools and of each message; None: `total` is
            divided by the lengths of their texts.
        total: tokens of the prompt's text.
    """
    groups = list(message_blocks(body))
    marked = any(block.ttl_ns is not None for group in groups for block in group)
    if ends is None:
        ends = _divided([sum(len(block.text) for block in group) for group in groups], 0, total)
    parts = prompt_parts(body, groups, ends)
    return parts, marked or _ttl(body) is not None


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
        blocks = list(_blocks(message, "content", f"messages[{n}]", role, ".content"))
        if calls := message.fields.get("tool_calls"):
            text = orjson.dumps(calls).decode()
            blocks.append(Block(f"messages[{n}].tool_calls", text, None))
        if message.fields.get(MARK) is not None and blocks:
            blocks[-1] = blocks[-1]._replace(ttl_ns=_ttl(message))
        yield blocks


def _blocks(
    row: Row, name: str, label: str, role: str = "system", inside: str = ""
) -> Iterator[Block]:
    content = row.fields.get(name)
    if type(content) is list:
        for n, part in enumerate(row.inner(name)):
            text = block_text(row, n, part, 0)  # those of images have their tokens
            yield Block(f"{label}{inside}[{n}]", f"{role}\n{text}", _ttl(part))
    else:
        yield Block(label, f"{role}\n{content or ''}", None)


def _ttl(row: Row) -> int | None:
    """Return the TTL in ns of a breakpoint in `row`, as in `PromptPart`; None without one."""
    mark = row.fields.get(MARK)
    if mark is None:
        return None
    if type(mark) is dict and mark.get("type", "ephemeral") == "ephemeral":
        ttl = mark.get("ttl")
        if ttl is None or (type(ttl) is str and ttl in _TTLS):
            return _TTLS[ttl]
    raise row.error(field=MARK, expected='{"type": "ephemeral"}, with a ttl of 5m or 1h')


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
            digest, hashes, lengths = _sentences(block.text)
            pieces = tuple(zip(hashes, _divided(lengths, first, last), strict=True))
            parts.append(PromptPart(block.label, last, digest, pieces, block.ttl_ns))
    mark = _ttl(body)
    if mark is not None and parts:
        parts[-1] = attrs.evolve(parts[-1], ttl_ns=mark)
    return tuple(parts)


@remembered
def _sentences(text: str) -> tuple[bytes, list[int], list[int]]:
    """Return the digest of a text, and the hash and the length of each of its sentences."""
    sentences = _SENTENCE.findall(text)
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return digest, list(map(hash, sentences)), list(map(len, sentences))


def _divided(lengths: Sequence[int], start: int, end: int) -> list[int]:
    """Return the ends of consecutive texts of these lengths, from `start` to `end`."""
    total = sum(lengths) or 1
    return [start + (end - start) * length // total for length in accumulate(lengths)]
