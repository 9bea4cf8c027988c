"""A request of a workload: its times, lengths, block keys, SLO and hints."""

from __future__ import annotations

import copyreg
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, overload

import attrs

from kvcore.blake2 import blake2b
from kvcore.errors import InputError
from kvcore.record import Record
from kvcore.units import INT64_LIMIT, NS_PER_S

KEY_BYTES = 16


def block_keys(
    tokens: Sequence[int],
    block_size: int,
    *,
    salt: str | None = None,
    extra: Mapping[int, Mapping[str, str | int]] | None = None,
    parent: bytes | None = None,
) -> list[bytes]:
    """Return the chained keys of the full blocks of `tokens`: equal keys, equal prefixes.

    `key_i = H(key_{i-1}, tokens_i, H(extra_i))` with BLAKE2b of 128 bits, and block size
    and salt hashed in place of the first parent. All parts have fixed lengths, so prompts
    share a key only if they share everything up to it (a collision among n keys has
    probability n² / 2¹²⁹). O(tokens) in C.

    Args:
        tokens: token ids, 0 to 2⁶⁴ - 1.
        block_size: tokens in a block. A partial last block has no key.
        salt: text that makes the keys of equal prompts differ, such as a tenant. It is hashed
            into the first block.
        extra: by block index, other inputs of its K/V by kind, such as
            `{0: {"lora": "sql"}, 3: {"image": "9f3c"}}`. Two kinds never collide.
        parent: key of the block before `tokens`, in place of `salt`; None: they begin a prompt.

    Raises:
        InputError: a block size below 1, a token id that is no unsigned integer, or a salt
            or extra key that is not JSON.
    """
    if block_size < 1:
        msg = f"block size {block_size} must be positive"
        raise InputError(msg)
    try:
        # Else `iter`, since `array` copies bytes as memory, not as a sequence of integers.
        ids = array("Q", tokens if type(tokens) is list else iter(tokens))
    except (TypeError, OverflowError) as error:
        msg = f"token ids must be integers from 0 to 2^64 - 1: {error}"
        raise InputError(msg) from error
    if array("H", [1]).tobytes() != b"\x01\x00":
        ids.byteswap()
    data, step = ids.tobytes(), block_size * ids.itemsize
    key = _hash(_written([block_size, salt])) if parent is None else parent
    keys = []
    for index in range(len(ids) // block_size):
        content = key + data[index * step : (index + 1) * step]
        if extra and (more := extra.get(index)):
            content += _hash(_written(sorted(more.items())))
        key = _hash(content)
        keys.append(key)
    return keys


def chain_keys(hashes: Iterable[Key]) -> list[bytes]:
    """Return the chained keys of blocks from the hashes of their contents.

    `key_i = H(key_{i-1}, hash_i)`: equal keys mean equal hashes up to that block. O(hashes).
    """
    key, keys = b"", []
    for value in hashes:
        # By `repr` the integer 1 and the text "1" differ.
        key = _hash(key + repr(value).encode())
        keys.append(key)
    return keys


def word_tokens(text: str, vocabulary: int) -> list[int]:
    """Return a token id below `vocabulary` for each word of `text`: its hash. O(text)."""
    return [
        int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little") % vocabulary
        for word in text.split()
    ]


def _hash(content: bytes) -> bytes:
    """Return the hash of parts of fixed length, so that equal content means equal parts."""
    return blake2b(content, digest_size=KEY_BYTES).digest()


def _written(value: object) -> bytes:
    import orjson  # noqa: PLC0415 - most requests have no salt

    try:
        return orjson.dumps(value)
    except TypeError as error:
        msg = f"a salt is text, extra keys are text or integers by tag, not {value!r}: {error}"
        raise InputError(msg) from error


Key: TypeAlias = Hashable
"""A chained block key: equal keys mean equal blocks *and* equal everything before them."""


class KeyPrefix(Sequence[int]):
    """The first keys of a path that several requests share, by reference.

    A turn of a session continues the previous turn: the keys of all turns are one array, of
    which each turn has a prefix. It compares equal to a list of the same keys.

    Args:
        path: integers from 0 to 2^63 - 1, type code `q`. Its length must not change while a
            prefix of it exists.
        count: number of keys, at most the length of `path`.

    Attributes:
        path: the array.
        view: a memory view of the first `count` keys, which is read at half the cost.
    """

    __slots__ = ("path", "view")

    def __init__(self, path: array[int], count: int) -> None:
        """Refer to the first `count` keys of `path`. O(1)."""
        self.path = path
        self.view = memoryview(path)[:count]

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.view)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        """Return a key; for a slice from the start a prefix, for any other slice a list."""
        if isinstance(index, slice):
            first, end, step = index.indices(len(self.view))
            if first == 0 and step == 1:
                return KeyPrefix(self.path, end)
            return self.view[index].tolist()
        return self.view[index]

    def __iter__(self) -> Iterator[int]:
        """Yield the keys."""
        return iter(self.view)

    def __eq__(self, other: object) -> bool:
        """Return True if `other` is a sequence of the same keys. O(keys)."""
        if isinstance(other, KeyPrefix):
            if self.path is other.path:
                return len(self.view) == len(other.view)
            return self.view == other.view
        return isinstance(other, (list, tuple)) and self.view.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it without the rest of its path."""
        return KeyPrefix, (array("q", self.view), len(self.view))

    def __repr__(self) -> str:
        """Show the keys."""
        return repr(self.view.tolist())


# Spans and statistics of residency refer to views, and are pickled with the result of a run.
copyreg.pickle(memoryview, lambda view: (memoryview, (array(view.format, view),)))

DEFAULT_PRIORITY: Final = 35
"""Retention priority of a block without a hint (1 is evicted first, 100 last)."""

HIGHEST_PRIORITY = 100


@attrs.frozen(repr=False)
class Retention(Record):
    """A hint that sets the retention priority of the tokens `[start, end)` of a prompt.

    A block gets the highest priority of the hints that touch it.

    Attributes:
        start: the first token.
        end: the token after the last; None: the end of the prompt.
        priority: from 1, evicted first, to 100. Blocks without a hint have
            `DEFAULT_PRIORITY`, 35.
        duration: nanoseconds after the blocks were stored or hit for which the priority
            holds; None: for ever.

    Raises:
        InputError: the range is empty, or a number is out of range.
    """

    start: int
    end: int | None
    priority: int
    duration: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check the range and the priority."""
        end = INT64_LIMIT if self.end is None else self.end
        if not (type(self.start) is type(end) is int and 0 <= self.start < end <= INT64_LIMIT):
            msg = f"retention hint for tokens {self.start} to {self.end}: no tokens"
            raise InputError(msg)
        if type(self.priority) is not int or not 1 <= self.priority <= HIGHEST_PRIORITY:
            msg = f"retention priority must be 1 to {HIGHEST_PRIORITY}, not {self.priority}"
            raise InputError(msg)
        if self.duration is not None and (type(self.duration) is not int or self.duration <= 0):
            msg = f"retention duration must be whole nanoseconds above 0, not {self.duration!r}"
            raise InputError(msg)


def _tokens(share: int | None) -> int | None:
    """Return the number of tokens that True (None: all) and False stand for."""
    return (None if share else 0) if type(share) is bool else share


@attrs.frozen(kw_only=True, repr=False)
class Hints(Record):
    """A client's hints about the K/V of one request, beside `Retention`.

    The cache applies `pin`, `demote` and `share` with every eviction policy. Times are
    relative to events, whose times are not known in advance in a closed loop.

    Attributes:
        share: number of first tokens of the request whose blocks are shared, so that later
            requests can hit them; None or True: all, False: 0. Its other blocks stay private,
            and are freed at its end. It hits cached blocks in any case. To share blocks within
            one session or tenant, give its keys a `salt` instead.
        pin: nanoseconds after the end of the request for which its shared prefix is neither
            evicted nor expires. All pins together hold at most half of the pool; of a longer
            prefix the beginning is pinned. Pins end early, in the order of their times, for
            a request that lacks blocks while no other request is open.
        demote: whether its blocks, as far as no other request shares them, are evicted before
            all others after its end, unless they are used again before.
        prefetch: nanoseconds before its arrival at which the blocks of its prefix in lower
            tiers are loaded, into blocks that are free or evictable, if a server knows of the
            request by then.

    Raises:
        InputError: a number is out of range, or both `pin` and `demote` are given.
    """

    share: int | None = attrs.field(default=None, converter=_tokens)
    pin: int | None = None
    demote: bool = False
    prefetch: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("share", 0), ("pin", 1), ("prefetch", 1)):
            value = getattr(self, name)
            if value is None or (type(value) is int and least <= value < INT64_LIMIT):
                continue
            unit = "True, False, or tokens" if name == "share" else "whole nanoseconds"
            msg = f"hint {name}={value!r}: give {unit}, from {least} on"
            raise InputError(msg)
        if type(self.demote) is not bool or (self.demote and self.pin is not None):
            msg = f"hint demote={self.demote!r} must be True or False, and False beside a pin"
            raise InputError(msg)


NO_HINTS = Hints()
"""The hints of a request without hints."""


@attrs.frozen(kw_only=True, repr=False)
class SLO(Record):
    """Latency targets of a client, in nanoseconds; None: no target.

    `SLO.in_seconds` makes one from times in seconds.

    Attributes:
        ttft_ns: time from arrival to the first token.
        tpot_ns: mean time from one token to the next, after the first.
        deadline_ns: time from arrival to the last token.

    Raises:
        InputError: a time is no whole number above 0.
    """

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    deadline_ns: int | None = None

    def __attrs_post_init__(self) -> None:
        """Check that every time given is a positive number of nanoseconds."""
        for name in ("ttft_ns", "tpot_ns", "deadline_ns"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value <= 0):
                msg = (
                    f"SLO {name} must be whole nanoseconds above 0, not {value!r}; in seconds: "
                    f"SLO.in_seconds({name.removesuffix('_ns')}=...)"
                )
                raise InputError(msg)

    @classmethod
    def in_seconds(
        cls,
        *,
        ttft: float | None = None,
        tpot: float | None = None,
        deadline: float | None = None,
    ) -> SLO:
        """Return an SLO whose times are given in seconds, rounded to nanoseconds.

        Raises:
            InputError: a time that is not a finite number from a nanosecond on.
        """
        times: dict[str, int] = {}
        for name, time in (("ttft", ttft), ("tpot", tpot), ("deadline", deadline)):
            if time is None:
                continue
            if isinstance(time, str) or not 1 <= time * NS_PER_S < INT64_LIMIT:
                msg = f"SLO {name}={time!r}: give seconds, from 1e-9 to 9.2e9"
                raise InputError(msg)
            times[f"{name}_ns"] = round(time * NS_PER_S)
        return cls(**times)


@attrs.define(kw_only=True, repr=False)
class Request(Record):
    """A request as a workload yields it. Treat it as immutable.

    Attributes:
        id: an integer or a string, unique in its workload.
        arrival: nanoseconds since the workload's start.
        prompt_tokens: prompt length in tokens.
        output_tokens: tokens to generate.
        keys: chained block keys of the prompt, `key_tokens` tokens each; the last may
            cover a partial block. May be shorter than the prompt, or empty. A list, or where
            requests share integer keys a `KeyPrefix`.
        key_tokens: tokens a key stands for.
        salt: text that makes the keys of equal prompts differ. `keys` depend on it already.
        tenant: the client that sent the request.
        priority: scheduling priority (higher is more urgent).
        slo: the latency targets of its client; None: those of the run.
        predicted_output_tokens: output tokens that a predictor expects; None: no prediction.
        retention: retention hints by token range.
        hints: other hints of its client about its K/V.
        session, after, think_time: closed-loop traffic. This request is sent `think_time`
            nanoseconds after request `after` of the same session has finished.
        tool: name of the tool that its answer calls, for whose result its session waits before
            the next request; None: it calls none.
        output_keys: keys of the blocks that follow the full blocks of the prompt, if known.

    Raises:
        InputError: a length or time is no whole number, or out of range; a key cannot be
            hashed; or an SLO or hints are none.
    """

    id: int | str
    arrival: int = 0
    prompt_tokens: int
    output_tokens: int = 0
    keys: Sequence[Key] = ()
    key_tokens: int
    salt: str | None = None
    tenant: str | None = None
    priority: int = 0
    slo: SLO | None = None
    predicted_output_tokens: int | None = None
    retention: tuple[Retention, ...] = ()
    hints: Hints = NO_HINTS
    session: str | None = None
    after: int | str | None = None
    think_time: int = 0
    tool: str | None = None
    output_keys: Sequence[Key] = ()

    publish = False  # a field of `TextRequest`

    @property
    def publishes(self) -> bool:
        """Whether its generated blocks are shared, with known keys or keys of the run."""
        return self.publish or bool(self.output_keys)

    def __attrs_post_init__(self) -> None:
        """Check the lengths and times."""
        prompt, output, arrival = self.prompt_tokens, self.output_tokens, self.arrival
        keys, think_time, predicted = self.keys, self.think_time, self.predicted_output_tokens
        if not (
            type(prompt) is type(output) is type(arrival) is type(self.key_tokens) is int
            and 0 <= prompt < INT64_LIMIT
            and 0 <= output < INT64_LIMIT
            and 1 <= self.key_tokens < INT64_LIMIT
        ):
            msg = (
                f"request {self.id!r}: arrival (ns), prompt_tokens, output_tokens and "
                f"key_tokens are whole numbers (int), lengths from 0 to 2^63 - 1, key_tokens "
                f"from 1 on; given: arrival={self.arrival!r}, "
                f"prompt_tokens={self.prompt_tokens!r}, output_tokens={self.output_tokens!r}, "
                f"key_tokens={self.key_tokens!r}"
            )
            raise InputError(msg)
        try:
            # Not all: there may be a million keys.
            if len(keys):
                hash((keys[0], keys[-1]))
        except (TypeError, LookupError) as error:
            msg = f"request {self.id!r}: keys={keys!r:.60}: give integers or bytes in a list: "
            raise InputError(msg + str(error)) from error
        slo, hints = self.slo, self.hints
        if not (isinstance(hints, Hints) and (slo is None or isinstance(slo, SLO))):
            msg = (
                f"request {self.id!r}: slo={slo!r:.60} and hints={hints!r:.60}: give an SLO or "
                "None, and Hints"
            )
            raise InputError(msg)
        if type(think_time) is not int or think_time < 0:
            msg = f"request {self.id!r}: think_time={think_time!r} must be whole ns, 0 or more"
            raise InputError(msg)
        if predicted is not None and (type(predicted) is not int or predicted < 0):
            msg = (
                f"request {self.id!r}: predicted_output_tokens={predicted!r} must be tokens, "
                "0 or more"
            )
            raise InputError(msg)


@attrs.define(kw_only=True, repr=False)
class TextRequest(Request):
    """A request with the tokens of its prompt, from which its keys are computed.

    Attributes:
        tokens: token ids of the prompt.
        publish: whether its generated blocks are shared when they are full. The run computes
            their keys; this object does not change.
    """

    tokens: Sequence[int]
    publish: bool = False


def whole_key_tokens(tokens: int, keys: int, key_tokens: int) -> int:
    """Return the tokens of a prompt up to the end of its last whole key.

    No longer prompt shares more with it: there the last key has more tokens, and so is another.

    Args:
        tokens: tokens of the prompt.
        keys: number of its keys, which may be too few for it.
        key_tokens: tokens that a key stands for.
    """
    return min(tokens // key_tokens, keys) * key_tokens


def text_request(
    name: int | str,
    tokens: Sequence[int],
    *,
    output: int,
    block_size: int,
    arrival: int = 0,
    salt: str | None = None,
    publish: bool = False,
) -> TextRequest:
    """Return a request for `output` tokens after `tokens`, for a cache of this block size.

    Raises:
        InputError: a token id or a length is out of range.
    """
    return TextRequest(
        id=name,
        arrival=arrival,
        prompt_tokens=len(tokens),
        output_tokens=output,
        keys=block_keys(tokens, block_size, salt=salt),
        key_tokens=block_size,
        salt=salt,
        tokens=tokens,
        publish=publish,
    )
