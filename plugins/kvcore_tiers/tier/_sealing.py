"""The format of blocks outside the process, each with a header that identifies it.

    offset  bytes
       0      4    b"KVB1": the format
       4      1    type of the key: 0 not stored, 1 integer (decimal), 2 bytes, 3 text (UTF-8)
       5      1    bytes of `parent`: 16, or 0 for the first block of a prompt
       6      2    bytes of the key, n
       8      8    slot, 0 if the store has no numbered slots
      16      8    position in the prompt, in blocks
      24     16    chain: hash of all keys up to this one
      40     16    chain of the block before it
      56     16    XXH3-128 of the K/V
      72      n    key
    72 + n   16    XXH3-128 of the owner, then of all bytes before

The owner is the XXH3-128 of the size of a block in bytes, as 8 bytes, and of the identity of
the K/V. Numbers are little-endian. A header is intact if its own hash is right. K/V are intact
if their header is, if it has the slot, position and chain of the requested block, and if it
has their hash.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple

from kvcore.cache.tiers import StoredBlock
from kvcore.lazy import import_extra
from kvcore.request import Key

HEADER_BYTES = 512
"""Bytes reserved for a header, which a disk writes as a whole."""

_FIELDS = Struct("<4sBBHQQ16s16s16s")
_MAGIC = b"KVB1"
_SUM_BYTES = 16
_LONGEST_KEY = HEADER_BYTES - _FIELDS.size - _SUM_BYTES


class _Header(NamedTuple):
    """The fields of a header before the key, in their order."""

    magic: bytes
    kind: int
    parent_bytes: int
    key_bytes: int
    slot: int
    position: int
    chain: bytes
    parent: bytes
    data_sum: bytes


class Sealer:
    """Makes and checks headers of blocks of `size` bytes of one `identity`.

    Attributes:
        owner: hash of size and identity, 16 bytes.
    """

    def __init__(self, identity: bytes, size: int) -> None:
        """Store the hash function, and compute `owner`."""
        package = import_extra("xxhash", "checksums of a tier need xxhash", "torch")
        self._hash: Any = package.xxh3_128
        self.owner: bytes = self._hash(size.to_bytes(8, "little") + identity).digest()

    def seal(self, block: StoredBlock, data: memoryview) -> bytes:
        """Return the header of `block`, whose K/V are `data`."""
        kind, key = _encoded(block.key)
        fields = _FIELDS.pack(
            _MAGIC, kind, len(block.parent), len(key), block.slot, block.position,
            block.chain, block.parent, self._hash(data).digest(),
        ) + key  # fmt: skip
        return fields + self._sum(fields)

    def unseal(self, header: bytes) -> StoredBlock | None:
        """Return the block of `header`; None if it is damaged, or of another identity."""
        found = self._fields(header)
        if found is None:
            return None
        key = _decoded(found.kind, header[_FIELDS.size : _FIELDS.size + found.key_bytes])
        parent = found.parent[: found.parent_bytes]
        return StoredBlock(found.slot, found.position, key, found.chain, parent)

    def matches(self, block: StoredBlock, header: bytes, data: memoryview) -> bool:
        """Return True if `header` is that of `block`, and has the hash of `data`."""
        found, place = self._fields(header), (block.slot, block.position, block.chain)
        return (
            found is not None
            and (found.slot, found.position, found.chain) == place
            and found.data_sum == self._hash(data).digest()
        )

    def _fields(self, header: bytes) -> _Header | None:
        """Return the fields of a header; None if it is damaged, or of another owner."""
        if len(header) < _FIELDS.size or not header.startswith(_MAGIC):
            return None
        fields = _Header._make(_FIELDS.unpack_from(header))
        end = _FIELDS.size + fields.key_bytes
        right = header[end : end + _SUM_BYTES] == self._sum(header[:end])
        return fields if right else None

    def _sum(self, fields: bytes) -> bytes:
        digest: bytes = self._hash(self.owner + fields).digest()
        return digest


def _encoded(key: Key) -> tuple[int, bytes]:
    """Return the type of a key and its bytes; 0 and no bytes if it does not fit a header."""
    kind, text = 0, b""
    if type(key) is int and key.bit_length() < 8 * _LONGEST_KEY:  # else it is slow to write
        kind, text = 1, b"%d" % key
    elif isinstance(key, bytes):
        kind, text = 2, key
    elif isinstance(key, str):
        kind, text = 3, key.encode("utf-8", "surrogatepass")
    return (kind, text) if len(text) <= _LONGEST_KEY else (0, b"")


def _decoded(kind: int, text: bytes) -> Key:
    if kind == 1:
        return int(text)
    if kind == 2:  # noqa: PLR2004 - the module docstring lists the types
        return text
    return text.decode("utf-8", "surrogatepass") if kind else None
