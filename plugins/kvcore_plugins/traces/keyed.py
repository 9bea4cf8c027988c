"""Names of people and prompts as keyed hashes: equal names in one recording stay equal.

Who does not have the key can neither read a name nor find out whether a guess is right.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Self

from kvcore.blake2 import blake2b
from kvcore.errors import InputError
from kvcore.files import unreadable_reason
from kvcore.request import KEY_BYTES, Key, Request
from kvcore.untrusted import read_at_most

SECRET_BYTES = 32

_REMEMBERED = 1 << 16
"""Keys whose hashes are remembered, some 200 bytes each."""

LEAST_SECRET, MOST_SECRET = 16, 1 << 20
"""Smallest and largest number of bytes of a file with a key."""


class KeyedNames:
    """Hashes names and keys of blocks, each behind a secret key of 32 bytes.

    BLAKE2b cannot be continued from a digest, so that a secret prefix makes a MAC of it, as its
    keyed mode does, which costs twice as much: it pads the key to a block of its own.

    Args:
        secret: the key, 32 bytes, which is written nowhere; None: one is drawn.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        # Requests share prefixes: most keys have come before.
        self._hashed = lru_cache(_REMEMBERED)(self._hash)

    @classmethod
    def from_file(cls, file: Path | None) -> Self:
        """Return the names by the key in a file; None: by a key that is drawn.

        Raises:
            InputError: the file cannot be read, or has less than 16 bytes, or more than 1 MiB.
        """
        if file is None:
            return cls()
        try:
            secret = read_at_most(file, MOST_SECRET)
        except OSError as error:
            msg = f"{file}: cannot be read: {unreadable_reason(file, error)}"
            raise InputError(msg) from error
        if secret is None:
            msg = f"{file}: a key has at most {MOST_SECRET >> 20} MiB: give a smaller file"
            raise InputError(msg)
        if len(secret) < LEAST_SECRET:
            msg = (
                f"{file}: a key of {len(secret)} bytes can be guessed: give at least "
                f"{LEAST_SECRET}, such as those of `head -c 32 /dev/urandom`"
            )
            raise InputError(msg)
        return cls(blake2b(secret, digest_size=SECRET_BYTES).digest())

    def name(self, kind: str, value: str) -> str:
        """Return the hash of a name, 32 hex digits; equal names of two kinds differ."""
        content = f"{kind}\0{value}".encode("utf-8", "surrogatepass")
        return blake2b(self._secret + content, digest_size=KEY_BYTES).hexdigest()

    def hidden(self, request: Request, *fields: str) -> dict[str, str | None]:
        """Return fields of a request that are names, or None, with hashes of the names."""
        values = {field: getattr(request, field) for field in fields}
        return {
            field: None if value is None else self.name(field, value)
            for field, value in values.items()
        }

    def keys(self, keys: Iterable[Key]) -> list[bytes]:
        """Return the hashes of keys of blocks: 16 bytes, or 32 hex digits, or integers."""
        return list(map(self._hashed, keys))

    def _hash(self, key: Key) -> bytes:
        content = key if type(key) is bytes else _bytes(key)
        return blake2b(self._secret + content, digest_size=KEY_BYTES).digest()


def _bytes(key: Key) -> bytes:
    """Return a key of another form as bytes; those of the two forms of one key are equal."""
    return bytes.fromhex(key) if isinstance(key, str) else f"int {key}".encode()
