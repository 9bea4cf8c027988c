"""The headers of blocks outside the process: they say what was written, or nothing."""

import pytest
from helpers.tiers import SIZE, blocks, data

from kvcore.cache.tiers import StoredBlock

pytest.importorskip("xxhash")

from kvcore_tiers.tier import _sealing
from kvcore_tiers.tier._sealing import HEADER_BYTES, Sealer

SEALER = Sealer(b"model", SIZE)
BLOCK = StoredBlock(7, 3, "key", b"c" * 16, b"p" * 16)
DATA = memoryview(data([BLOCK]))

LONGEST = HEADER_BYTES - 72 - 16
"""Bytes of the longest key in a header: it has 72 bytes of fields before, and a sum after."""


@pytest.mark.parametrize(
    ("key", "is_kept"),
    [
        (0, True), (-1, True), (10**LONGEST - 1, True), (10**LONGEST, False),
        (10**5000, False), (b"", True), (b"k" * LONGEST, True), (b"k" * (LONGEST + 1), False),
        ("", True), ("é" * (LONGEST // 2), True), ("é" * (LONGEST // 2 + 1), False),
        (True, False), (None, False), ((1, 2), False),
    ],
    ids=lambda value: f"{value!r:.20}" if type(value) is not int else hex(value)[:20],
)  # fmt: skip
def test_a_header_has_the_key_and_its_type(key, is_kept):
    """A header has any integer, bytes or text that fits, and None in place of other keys."""
    block = StoredBlock(7, 3, key, b"c" * 16, b"")
    header = SEALER.seal(block, DATA)
    assert len(header) <= HEADER_BYTES
    unsealed = SEALER.unseal(header)
    assert (unsealed.key, type(unsealed.key)) == (
        (key, type(key)) if is_kept else (None, type(None))
    )
    assert (unsealed.slot, unsealed.position, unsealed.chain) == (7, 3, b"c" * 16)


def test_a_damaged_header_says_nothing():
    """A header that is cut anywhere, or has a changed byte, is that of no block."""
    header = SEALER.seal(BLOCK, DATA)
    assert SEALER.unseal(header) == BLOCK
    assert SEALER.matches(BLOCK, header, DATA)
    cut = [header[:end] for end in range(len(header))]
    changed = [
        header[:index] + bytes([header[index] ^ 1]) + header[index + 1 :]
        for index in range(len(header))
    ]
    for damaged in cut + changed:
        assert SEALER.unseal(damaged) is None
        assert not SEALER.matches(BLOCK, damaged, DATA)


@pytest.mark.parametrize("magic", [b"KVB2", b"KVA1"])
def test_a_header_of_another_format_says_nothing(monkeypatch, magic):
    """An intact header of another version of the format is that of no block."""
    with monkeypatch.context() as patch:
        patch.setattr(_sealing, "_MAGIC", magic)
        header = SEALER.seal(BLOCK, DATA)
        assert SEALER.unseal(header) == BLOCK
    assert SEALER.unseal(header) is None


def test_a_header_matches_one_block_of_one_model():
    """A header matches a block in its slot and place with its K/V, and no other one."""
    header = SEALER.seal(BLOCK, DATA)
    for slot, position, chain in ((8, 3, b"c" * 16), (7, 4, b"c" * 16), (7, 3, b"d" * 16)):
        other = StoredBlock(slot, position, "key", chain, b"p" * 16)
        assert not SEALER.matches(other, header, DATA)
    assert not SEALER.matches(BLOCK, header, memoryview(data(blocks([0]))))
    for identity, size in ((b"another", SIZE), (b"model", SIZE + 1)):
        assert Sealer(identity, size).unseal(header) is None
