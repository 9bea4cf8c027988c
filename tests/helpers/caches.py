"""Short functions to drive a cache and to read its state as text.

A prompt is a text, one letter a block. Its chained keys are its prefixes: "abc" has the keys
"a", "ab" and "abc". A span is shown as the text before it, a bar, and its own text: "ab|c".
"""

from copy import deepcopy
from itertools import count
from typing import Any, ClassVar

import attrs
from helpers.requests import prefixes

from kvcore import KVCache, Request, ScoreEviction
from kvcore.cache import Recorder
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix

BLOCK = 4

serials = count(1)


def ask(text, tokens=None, *, key_tokens=BLOCK, **fields):
    """Return a request for `text`, whose blocks are all full unless `tokens` is given."""
    return Request(
        id=next(serials),
        prompt_tokens=len(text) * key_tokens if tokens is None else tokens,
        keys=prefixes(text),
        key_tokens=key_tokens,
        **fields,
    )


def make(blocks=8, eviction=None, *, prefix=None, **options):
    """Return a cache with LRU and the radix tree, blocks of 4 tokens, and ids."""
    return KVCache(
        blocks,
        **{"block_size": BLOCK, "ids": True} | options,
        eviction=LRU() if eviction is None else eviction,
        prefix=Radix() if prefix is None else prefix,
    )


def compute(cache, seq, tokens=None, now=None):
    """Commit `tokens` more tokens of `seq`; None commits all allocated tokens."""
    cache.commit(seq, seq.tokens - seq.computed if tokens is None else tokens, now)
    cache.check_integrity()
    return seq


def start(cache, text, tokens=None, now=None, **fields):
    """Open a request for `text`, compute its prompt, and return its sequence."""
    return compute(cache, cache.open(ask(text, tokens, **fields), now=now), now=now)


def serve(cache, *texts, now=None, **fields):
    """Open, compute and close a request for each text, one after the other."""
    for text in texts:
        cache.close(start(cache, text, now=now, **fields), now)
        cache.check_integrity()


def spell(span):
    """Return a span as text: the text before it, a bar, and its own text."""
    text = span.keys()[-1]
    return f"{text[: span.start]}|{text[span.start : span.end]}"


def spans(cache):
    """Return the spans of `cache` by their text."""
    return {spell(span): span for span in cache.tree.spans()}


def pins(cache):
    """Return how often each span is pinned, by its text."""
    return {text: span.ref_count for text, span in spans(cache).items()}


def table(cache, seq):
    """Return the block table of `seq` as a list."""
    return list(cache.block_table(seq))


@attrs.define(slots=False, eq=False)
class Recorded(ScoreEviction):
    """LRU by score that records its callbacks as (method, span as text).

    For `on_miss`, the number of hit blocks is recorded.
    """

    name: ClassVar[str] = "recorded"

    callbacks: list[Any] = attrs.field(init=False, factory=list)

    def score(self, span, now):
        """Return the order in which the span was released."""
        del now
        return span.released_order


def _noting(name):
    """Return the method `name` that also records its span; for a split, the lower one."""
    original = getattr(ScoreEviction, name)
    place = 1 if name in {"on_split", "on_miss"} else 0

    def method(self, *args):
        original(self, *args)
        self.callbacks.append((name, args[1] if name == "on_miss" else spell(args[place])))

    return method


for _name in (
    *("on_insert", "on_access", "on_extend", "on_split", "on_pin", "on_release"),
    *("on_trim", "on_remove", "on_miss"),
):
    setattr(Recorded, _name, _noting(_name))


@attrs.define(slots=False, eq=False)
class Mortal(LRU):
    """LRU whose spans expire 10 ns after they were stored or hit."""

    name: ClassVar[str] = "mortal"
    expires_spans: ClassVar[bool] = True

    def on_insert(self, span, now):
        """Start the lifetime of `span`."""
        span.expires = now + 10

    def on_access(self, span, now):
        """Restart the lifetime of `span`."""
        span.expires = now + 10


@attrs.define(slots=False, eq=False)
class Lines(Recorder):
    """A trace in memory, as a list of (event, fields)."""

    lines: list[Any] = attrs.field(factory=list)

    def begin(self, **fields):
        """Record the header."""
        self.lines.append(("HEADER", fields))

    def describe(self, **fields):
        """Add fields to the header."""
        self.lines[0][1].update(fields)

    def request(self, request, now):
        """Record the arrival of a request."""
        del now
        self.lines.append(("REQUEST", {"id": request.id}))

    def write(self, line):
        """Record an event."""
        # The cache goes on changing its arrays: record copies.
        fields = {name: deepcopy(field) for name, field in line.items()}
        event = fields.pop("event")
        del fields["n"], fields["t"]
        self.lines.append((event, fields))

    def events(self):
        """Return the names of the events other than HEADER and REQUEST."""
        return [event for event, _ in self.lines if event not in {"HEADER", "REQUEST"}]

    def of(self, event):
        """Return the fields of every line of `event`."""
        return [fields for name, fields in self.lines if name == event]
