"""A tier in a Redis or Valkey server."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from time import monotonic
from typing import Any, ClassVar, NoReturn, TypeAlias

import attrs

from kvcore import InputError
from kvcore.cache.tiers import StoredBlock, Tier, TierStore, bandwidth
from kvcore.errors import redact
from kvcore.lazy import import_extra
from kvcore.units import picoseconds
from kvcore.untrusted import escaped
from kvcore_tiers.tier._sealing import Sealer

CHUNK_BYTES = 4 << 20
"""Bytes of a value, which keep a server busy for about a millisecond."""

BATCH_BYTES = 16 << 20
"""Bytes in one request: the answers need as much memory again."""

BATCH_KEYS = 1000

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds without a request after a failure; each further failure doubles them."""

SCAN_S = 30.0
"""The maximum of seconds of the search for blocks of earlier runs."""

Command: TypeAlias = tuple[Any, ...]
"""A command to the server: its method in the package redis, and the arguments of this."""


@attrs.define(eq=False, kw_only=True)
class Redis(Tier):
    """Store blocks in a Redis or Valkey server, which other clients may use too.

    The defaults of its link are those of a network of 10 Gbit/s.

    In a run on tensors a block is one hash, named by model and text, so runs of the same
    model share blocks. It has a checksum; a block that does not match it is computed again.
    `memory` limits the blocks of this run; the run detects blocks that the server has evicted.

    Attributes:
        url: the address of the server: `redis://`, `rediss://` or `unix://`, in the format of
            the package redis. User, password and query are never shown.
        ttl: seconds without use after which the server drops a block; None: it does not.
        timeout: seconds that a connection, and each part of an answer, may take; all answers
            to a call have `call_timeout`. After a failure the run makes no request for 0.1 s,
            and for twice as long after each further one, up to 30 s.
    """

    name: ClassVar[str] = "redis"

    url: str = attrs.field(default="redis://127.0.0.1:6379/0", repr=redact)
    ttl: float | None = 86400.0
    timeout: float = 1.0
    read_bandwidth: int | str = bandwidth("1.2GB")
    write_bandwidth: int | str = bandwidth("1.2GB")
    latency: float = 5e-4

    def __attrs_post_init__(self) -> None:
        """Check the times."""
        super().__attrs_post_init__()
        for name in ("ttl", "timeout"):
            value = getattr(self, name)
            if value is not None and picoseconds(value, name) < 10**9:
                msg = f"{name}={value!r}: give seconds, 0.001 or more"
                raise InputError(msg)

    def options(self) -> dict[str, Any]:
        """Return the options, with `url` without user, password and query."""
        return super().options() | {"url": redact(self.url)}

    def open(self, slots: int, slot_bytes: int, identity: bytes) -> TierStore:
        """Return a store in the server, after a test of the connection.

        Raises:
            InputError: the server does not answer, or refuses the connection.
            PluginError: the package redis is not installed.
        """
        return RedisStore(self, slots, slot_bytes, identity)


class RedisStore(TierStore):
    """Keeps a block as a hash: K/V in fields of up to 4 MiB, then the header that seals them.

    All methods except `close` raise OSError if the server cannot be reached, answers too late,
    or sends an invalid answer; in the pause after a failure they raise it without a request.
    """

    def __init__(self, tier: Redis, slots: int, slot_bytes: int, identity: bytes) -> None:
        """Connect."""
        package = import_extra("redis", "tier redis needs the package redis", "redis")
        self._where = redact(tier.url)
        try:
            self._client: Any = package.Redis.from_url(
                tier.url,
                socket_timeout=tier.timeout,
                socket_connect_timeout=tier.timeout,
                retry=package.retry.Retry(package.backoff.NoBackoff(), 0),
                decode_responses=False,
                protocol=2,
            )
        except (ValueError, TypeError, package.RedisError):
            # Their messages may contain the password.
            msg = f"tier redis: url={self._where} cannot be read: redis://HOST:PORT/DATABASE"
            raise InputError(msg) from None
        self._sealer = Sealer(identity, slot_bytes)
        self._slots, self._size = slots, slot_bytes
        self._name: bytes = b"kvcore:1:" + self._sealer.owner.hex().encode() + b":"
        self._ttl_ms = None if tier.ttl is None else int(tier.ttl * 1000)
        self._fields = [b"%d" % index for index in range(-(-slot_bytes // CHUNK_BYTES))]
        self._held: dict[int, StoredBlock] = {}
        self._pause = self._again = 0.0
        try:
            self._ask([("ping",)])
        except OSError as error:
            self.close()
            msg = f"{error}: start the server, or give another url"
            raise InputError(msg) from error

    def write(self, blocks: Sequence[StoredBlock], data: memoryview) -> None:
        """Send the K/V of each block, and its header after it."""
        data, size = data.cast("B"), self._size
        self.drop([block.slot for block in blocks])
        for start, end in self._batches(len(blocks)):
            self._held.update((block.slot, block) for block in blocks[start:end])
            self._ask(
                command
                for index in range(start, end)
                for command in self._send(blocks[index], data[index * size :][:size])
            )

    def _send(self, block: StoredBlock, data: memoryview) -> Iterator[Command]:
        name = self._key(block)
        yield "delete", name
        for index, field in enumerate(self._fields):
            yield "hset", name, field, data[index * CHUNK_BYTES :][:CHUNK_BYTES]
            if not index:
                yield from self._touch(name)
        sealed = attrs.evolve(block, slot=0)  # each run numbers its own slots
        yield "hset", name, b"header", self._sealer.seal(sealed, data)

    def read(self, blocks: Sequence[StoredBlock], into: memoryview) -> int:
        """Get blocks, up to the first that is missing or does not match its header."""
        into, size = into.cast("B"), self._size
        known = self._known(blocks)
        for start, end in self._batches(known):
            names = [*map(self._key, blocks[start:end])]
            commands: list[Command] = [
                ("hmget", name, b"header", *self._fields) for name in names
            ]
            answers = self._ask(chain(commands, *map(self._touch, names)))
            for index in range(start, end):
                block_bytes = into[index * size : (index + 1) * size]
                block = attrs.evolve(blocks[index], slot=0)
                if not self._unpack(block, answers[index - start], block_bytes):
                    return index
        return known

    def _unpack(self, block: StoredBlock, answer: Any, into: memoryview) -> bool:
        """Decode an answer into `into`; return True if it is `block`."""
        if not isinstance(answer, list) or len(answer) != 1 + len(self._fields):
            return False
        header, *pieces = answer
        if not all(isinstance(field, bytes) for field in answer):
            return False
        if sum(map(len, pieces)) != self._size:
            return False
        start = 0
        for piece in pieces:
            into[start : start + len(piece)] = piece
            start += len(piece)
        return self._sealer.matches(block, header, into)

    def drop(self, slots: Sequence[int]) -> None:
        """Delete the blocks in `slots`."""
        names = [self._key(self._held.pop(slot)) for slot in slots if slot in self._held]
        if names:
            self._ask([("unlink", *names)])

    def recover(self) -> Iterator[StoredBlock]:
        """Yield blocks of this model that are in the server, in order of their positions.

        Scans all keys of the database, for 30 s at most.
        """
        blocks_by_name: dict[bytes, StoredBlock] = {}
        until = monotonic() + SCAN_S
        for names in self._scan():
            headers = self._ask(self._get_headers(names))
            for name, header in zip(names, headers, strict=True):
                block = self._sealer.unseal(header) if isinstance(header, bytes) else None
                if block is not None and self._key(block) == name and block.key is not None:
                    blocks_by_name[name] = block
            if len(blocks_by_name) >= 2 * self._slots or monotonic() > until:
                text = "kvcore: tier redis: %s has more blocks than were looked at"
                logging.getLogger("kvcore").warning(text, self._where)
                break
        first = sorted(blocks_by_name.values(), key=lambda block: (block.position, block.chain))
        for slot, block in enumerate(first[: self._slots]):
            self._held[slot] = attrs.evolve(block, slot=slot)
            yield self._held[slot]

    def _scan(self) -> Iterator[list[bytes]]:
        cursor: Any = None
        while cursor != 0:
            [answer] = self._ask([("scan", cursor or 0, self._name + b"*", BATCH_KEYS)])
            cursor, names = answer
            yield names

    @staticmethod
    def _get_headers(names: Any) -> Iterator[Command]:
        for name in names:  # of another kind of server, anything
            yield "hget", name, b"header"

    def present(self, blocks: Sequence[StoredBlock]) -> int:
        """Return the number of `blocks` before the first that the server does not have."""
        known = self._known(blocks)
        asked = (("exists", self._key(block)) for block in blocks[:known])
        answers = self._ask(asked) if known else []
        return next((index for index, present in enumerate(answers) if present != 1), known)

    def close(self) -> None:
        """Disconnect; blocks stay until their `ttl` has passed."""
        self._client.close()

    def _known(self, blocks: Sequence[StoredBlock]) -> int:
        """Return the number of `blocks` before the first that this run has not stored."""
        for index, block in enumerate(blocks):
            held = self._held.get(block.slot)
            if held is None or (held.position, held.chain) != (block.position, block.chain):
                return index
        return len(blocks)

    def _key(self, block: StoredBlock) -> bytes:
        return self._name + block.chain.hex().encode()

    def _touch(self, name: bytes) -> list[Command]:
        return [] if self._ttl_ms is None else [("pexpire", name, self._ttl_ms)]

    def _batches(self, blocks: int) -> Iterator[tuple[int, int]]:
        step = min(max(1, BATCH_BYTES // self._size), BATCH_KEYS)
        return ((start, min(start + step, blocks)) for start in range(0, blocks, step))

    def _ask(self, commands: Iterable[Command]) -> list[Any]:
        """Send commands in one pipeline, and return the answers."""
        if monotonic() < self._again:
            msg = f"tier redis: {self._where} is left alone for {self._pause:g} s"
            raise ConnectionError(msg)
        try:
            with self._client.pipeline(transaction=False) as pipe:
                for method, *arguments in commands:
                    getattr(pipe, method)(*arguments)
                answers: list[Any] = pipe.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001 - another kind of server may answer anything
            self._fail(error)
        self._pause = 0.0
        refusal = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if refusal is not None:
            msg = f"tier redis: {self._where} refused: {escaped(str(refusal))}"
            raise OSError(msg) from refusal
        return answers

    def _fail(self, error: Exception) -> NoReturn:
        self._client.connection_pool.disconnect()
        self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
        self._again = monotonic() + self._pause
        msg = f"tier redis: {self._where} does not answer as it should: {escaped(str(error))}"
        raise ConnectionError(msg) from error
