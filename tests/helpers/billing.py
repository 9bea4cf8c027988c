"""Requests to be billed, and a brute-force model of the cache behind an API."""

from __future__ import annotations

from helpers.requests import keyed, prefixes

from kvcore.units import NS_PER_S
from kvcore_plugins.workload.logged import LoggedRequest, PromptPart


def request(id_, seconds, text, output=0):
    """Return a request whose tokens are letters, with a key for each."""
    arrival = round(seconds * NS_PER_S)
    return keyed(id_, prefixes(text), 1, arrival=arrival, output_tokens=output)


def requests(*rows):
    """Return requests with the arguments of `request` but the id: (seconds, letters, …)."""
    return [request(id_, *row) for id_, row in enumerate(rows)]


def logged(id_, seconds, *blocks, **more):
    """Return a logged request of `blocks`, which are pairs of letters and a TTL.

    A TTL in ns makes a block end in a breakpoint; with None it has none. Each letter counts as
    a sentence.
    """
    text = "".join(letters for letters, _ in blocks)
    parts, end = [], 0
    for index, (letters, ttl) in enumerate(blocks):
        pieces = tuple((ord(letter), end + n + 1) for n, letter in enumerate(letters))
        end += len(letters)
        parts.append(PromptPart(f"messages[{index}]", end, letters.encode(), pieces, ttl))
    fields = {name: getattr(request(id_, seconds, text), name) for name in FIELDS}
    if (usage := more.get("usage")) is not None:
        fields |= {"prompt_tokens": usage.prompt_tokens, "output_tokens": usage.output_tokens}
    return LoggedRequest(**fields, text_tokens=len(text), parts=tuple(parts), **more)


FIELDS = ("id", "arrival", "prompt_tokens", "output_tokens", "keys", "key_tokens")


def prefixes_read(rows, ttl, least, step):
    """Return the longest prefix that each prompt shares with one less than `ttl` before it.

    Prompts are (seconds, letters). Prefixes have `least` tokens or more, in steps of `step`; 0
    if none is shared.
    """
    read = []
    for index, (now, text) in enumerate(rows):
        lengths = [
            length
            for length in range(least, len(text) + 1, step)
            for then, other in rows[:index]
            if length and len(other) >= least and now - then < ttl
            if other[:length] == text[:length]
        ]
        read.append(max(lengths, default=0))
    return read


def entries_read(rows, ttl, least):
    """Return the tokens that each prompt reads from entries, which are earlier prompts."""
    expiries, read = {}, []
    for now, text in rows:
        found = [
            expiry for expiry in expiries if text.startswith(expiry) and expiries[expiry] > now
        ]
        read.append(max(map(len, found), default=0))
        for each in found:
            expiries[each] = now + ttl
        if len(text) >= max(least, 1):
            expiries[text] = now + ttl
    return read
