"""Caches of layers: the K/V, index keys or states that they keep of a sequence, and the cost.

A layer of a transformer used to keep the K/V of all tokens. Layers of today keep that of a
window, of a chunk or of compressed entries, a latent, keys of an indexer beside it, a state of
fixed size, or nothing of their own; and some keep several of these.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

import attrs

from kvcore.errors import InputError
from kvcore.record import Record

CacheKind: TypeAlias = Literal[
    "full", "window", "chunk", "mla", "index", "compressed", "shared", "cross", "state"
]
"""A way of keeping what later tokens need of a sequence."""

CACHE_KINDS: tuple[str, ...] = get_args(CacheKind)

FIXED = "state", "cross"
"""Kinds whose bytes do not depend on the length of the sequence."""

MAX_WIDTH = 2**31 - 1

MAX_BYTES = 2**50


@attrs.frozen(kw_only=True, repr=False)
class LayerCache(Record):
    """One thing that equal layers of a model keep of each sequence, and what using it costs.

    Attributes:
        kind: the way it is kept:

            - `full`: K/V of all tokens, `mla`: a latent of all tokens;
            - `window`: K/V of the last `window` tokens, `chunk`: of those in the current chunk
              of `window` tokens;
            - `index`: keys by which an indexer selects the tokens to attend to;
            - `compressed`: entries that stand for `ratio` tokens each;
            - `shared`: nothing; these layers read what others keep, a window of it if given;
            - `cross`: K/V of `window` tokens of another sequence, such as an image;
            - `state`: a recurrent state of fixed size; with a window, the tokens of it that
              wait to be compressed into an entry, as they were projected.
        layers: number of layers that keep one.
        kv_heads, key_dim, value_dim: K/V heads, and the width of a key and of a value. A latent
            is the key of one head without a value.
        window: tokens that are kept; None: all.
        ratio: tokens that an entry stands for.
        entry_bytes: bytes of an entry beside the numbers of heads, whatever the codec.
        state_bytes: bytes of the state of a layer.
        attended: tokens that a token attends to at most, if fewer than are kept (top-k).
        pair_flop: FLOP that a layer computes for each pair of a token and one that it attends
            to; of a state, for each token.

    Raises:
        InputError: an unknown kind, a number out of range, or numbers that contradict one
            another.
    """

    kind: CacheKind
    layers: int
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    ratio: int = 1
    entry_bytes: int = 0
    state_bytes: int = 0
    attended: int | None = None
    pair_flop: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse an unknown kind, and numbers that do not belong to it."""
        if self.kind not in CACHE_KINDS:
            msg = f"cache of kind {self.kind!r}; known: {', '.join(CACHE_KINDS)}"
            raise InputError(msg)
        for name in _NUMBERS:
            value, least = getattr(self, name), 1 if name in _FROM_ONE else 0
            largest = MAX_BYTES if name.endswith(("bytes", "flop")) else MAX_WIDTH
            is_left_out = value is None and name in ("window", "attended")
            if not is_left_out and not (type(value) is int and least <= value <= largest):
                msg = (
                    f"cache of kind {self.kind!r}: {name} must be {least} to {largest:,}, "
                    f"not {value!r}"
                )
                raise InputError(msg)
        if problem := self._problem():
            msg = f"cache of kind {self.kind!r} {problem}"
            raise InputError(msg)

    def _problem(self) -> str:
        """Return what contradicts the kind; "" if nothing does."""
        numbers = self.kv_heads * (self.key_dim + self.value_dim) + self.entry_bytes
        problems = {
            "needs a window": self.kind in ("window", "chunk", "cross") and not self.window,
            "has no window": self.kind in ("full", "mla") and bool(self.window),
            "needs state_bytes": self.kind == "state" and not self.state_bytes,
            "has no state_bytes": self.kind != "state" and bool(self.state_bytes),
            "has no heads and no entries": self.kind == "state" and numbers > 0,
            "needs kv_heads and key_dim, or entry_bytes": self.kind != "state" and not numbers,
            "has an entry for each token: ratio must be 1": self.ratio > 1
            and self.kind not in ("compressed", "index"),
        }
        return next((text for text, holds in problems.items() if holds), "")

    @property
    def grows(self) -> bool:
        """Whether a token of the sequence adds to it."""
        return self.kind not in (*FIXED, "shared")

    def copies(self, devices: int) -> Fraction:
        """Return how many copies are kept when its heads are divided among `devices`.

        The device with the most heads decides: 8 heads lie on 4 devices once, on 3 devices, of
        which one has 3, as if 9 were held, and on 16 twice. A latent and the key of an indexer
        are one head, so each device holds all of it, and of the tokens of a compressor; a
        recurrent state is divided by channels.
        """
        if self.kind == "state" and self.window is None:
            return Fraction(1)
        heads = max(self.kv_heads, 1)
        return Fraction(devices * -(-heads // devices), heads)

    @property
    def reach(self) -> int | None:
        """Tokens of the sequence that a token attends to at most; None: all before it.

        A state, and another sequence, cost each token the same: as if it attended to itself.
        """
        if self.kind in FIXED:
            return 1
        return min((n for n in (self.window, self.attended) if n is not None), default=None)

    @property
    def moved_bytes(self) -> Fraction:
        """Bytes of the state of a layer that a token reads and writes: all of it, twice.

        Of a window it writes its own part, and an entry reads all parts: where entries overlap
        a part is read twice.
        """
        return self.state_bytes * (Fraction(3, self.window) if self.window else Fraction(2))

    @property
    def each(self) -> int:
        """Number of entries that a token attends to for each token in its reach."""
        return (self.window or 1) if self.kind == "cross" else 1

    def kept(self, tokens: int) -> int:
        """Return the tokens of which a sequence of `tokens` tokens keeps entries."""
        if self.kind == "cross":
            return self.window or 0
        if not self.grows:
            return 0
        return tokens if self.window is None else min(tokens, self.window)

    def with_window(self, window: int) -> LayerCache:
        """Return the cache with the tokens that it keeps limited to `window`."""
        if self.kind in FIXED:
            return self
        kind: CacheKind = "window" if self.kind in ("full", "mla") else self.kind
        shorter = window if self.window is None else min(self.window, window)
        return attrs.evolve(self, kind=kind, window=shorter)

    def __str__(self) -> str:
        """Return the layers and what they keep: `40 layers, window of 1,024 tokens`."""
        plural = "" if self.layers == 1 else "s"
        return f"{self.layers:,} layer{plural}, {self._what}"

    @property
    def _what(self) -> str:
        tokens = "" if self.window is None else f"{self.window:,} tokens"
        return {
            "full": "all tokens",
            "mla": "latent of all tokens",
            "window": f"window of {tokens}",
            "chunk": f"chunk of {tokens}",
            "index": "keys of an indexer",
            "compressed": f"an entry for {self.ratio:,} tokens",
            "shared": "K/V of other layers",
            "cross": f"{tokens} of another sequence",
            "state": f"a state of {tokens}" if tokens else "a state of fixed size",
        }[self.kind]


_NUMBERS = tuple(attrs.fields_dict(LayerCache))[1:]  # all fields but the kind
_FROM_ONE = ("layers", "window", "ratio", "attended")


def merged(caches: list[LayerCache]) -> tuple[LayerCache, ...]:
    """Return one cache for all that differ by their layers alone, in order of the first."""
    counts: dict[Any, int] = {}
    for cache in caches:
        single_layer = attrs.evolve(cache, layers=1)
        counts[single_layer] = counts.get(single_layer, 0) + cache.layers
    return tuple(attrs.evolve(cache, layers=layers) for cache, layers in counts.items())
