"""Blocks as they lie outside the process: each with a header that says what it should be.

    offset  bytes
       0      4    b"KVB1": the format
       4      1    what the key is: 0 not kept, 1 integer (decimal), 2 bytes, 3 text (UTF-8)
       5      1    bytes of `parent`: 16, or 0 for the first block of a prompt
       6      2    bytes of the key, n
       8      8    slot, 0 where slots have no places
      16      8    position in the prompt, in blocks
      24     16    chain: stands for all keys up to and with this one
      40     16    chain of the block before it
      56     16    XXH3-128 of the K/V
      72      n    key
    72 + n   16    XXH3-128 of identity and size of the blocks, then of all before

Numbers are little-endian. A header is right if its own hash is, and K/V are right if the header
is, if it is that of the block that was asked for, and if their hash is the one it has.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

from kvcore.extras import import_extra
from kvcore.request import Key
from kvcore.tiers import StoredBlock

HEADER_BYTES = 512
"""Room for a header: what a disk writes as a whole."""

_FIELDS = Struct("<4sBBHQQ16s16s16s")
_MAGIC = b"KVB1"
_SUM_BYTES = 16
_LONGEST_KEY = HEADER_BYTES - _FIELDS.size - _SUM_BYTES


class Sealer:
    """Makes headers and checks them, for blocks of `size` bytes of one `identity`.

    Attributes:
        owner: 16 bytes that stand for both.
    """

    def __init__(self, identity: bytes, size: int) -> None:
        """Store the hash function, and whose blocks these are."""
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
        """Return the block of `header`; None if it is damaged, or another model's."""
        fields = self._fields(header)
        if fields is None:
            return None
        _, kind, parent_bytes, key_bytes, slot, position, chain, parent, _ = fields
        key = _decoded(kind, header[_FIELDS.size : _FIELDS.size + key_bytes])
        return StoredBlock(slot, position, key, chain, parent[:parent_bytes])

    def matches(self, block: StoredBlock, header: bytes, data: memoryview) -> bool:
        """Return True if `header` is that of `block`, and `data` what it was made for."""
        fields = self._fields(header)
        return (
            fields is not None
            and fields[4:7] == (block.slot, block.position, block.chain)
            and fields[8] == self._hash(data).digest()
        )

    def _fields(self, header: bytes) -> tuple[Any, ...] | None:
        if len(header) < _FIELDS.size or not header.startswith(_MAGIC):
            return None
        fields = _FIELDS.unpack_from(header)
        end = _FIELDS.size + fields[3]
        right = header[end : end + _SUM_BYTES] == self._sum(header[:end])
        return fields if right else None

    def _sum(self, fields: bytes) -> bytes:
        digest: bytes = self._hash(self.owner + fields).digest()
        return digest


def _encoded(key: Key) -> tuple[int, bytes]:
    """Return what a key is, and its bytes; 0 for one that no header can have."""
    kind, text = 0, b""
    if type(key) is int and key.bit_length() < 8 * _LONGEST_KEY // 3:
        kind, text = 1, b"%d" % key
    elif isinstance(key, bytes):
        kind, text = 2, key
    elif isinstance(key, str):
        kind, text = 3, key.encode("utf-8", "surrogatepass")
    return (kind, text) if len(text) <= _LONGEST_KEY else (0, b"")


def _decoded(kind: int, text: bytes) -> Key:
    if kind == 1:
        return int(text)
    if kind == 2:  # noqa: PLR2004 - as the module says
        return text
    return text.decode("utf-8", "surrogatepass") if kind else None
