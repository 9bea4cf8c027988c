"""gzip and zstd: decompression in pieces, and errors for cut and damaged streams."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
import zstandard

from kvcore.files import CutError, DamageError, compressor, decompressed

LONG = b"".join(b"%d " % (n * n) for n in range(100_000))
PACK = {"gzip": gzip.compress, "zstd": zstandard.compress}


def read(data):
    """Return the content of `data`, and the error with which it ends, if any."""
    pieces = []
    try:
        pieces.extend(decompressed(io.BytesIO(data)))
    except (CutError, DamageError) as error:
        return b"".join(pieces), error
    return b"".join(pieces), None


@pytest.mark.parametrize("kind", PACK)
def test_content_is_read_as_written(kind):
    """Compressed and plain content, long or empty, is read as it was written."""
    for content in (LONG, b""):
        assert read(PACK[kind](content)) == (content, None)
        assert read(content) == (content, None)


@pytest.mark.parametrize("kind", PACK)
def test_consecutive_streams_decode_to_one_content(kind):
    """Many small members or frames in a row decode to the content of all."""
    pieces = [LONG[start : start + 1000] for start in range(0, 100_000, 1000)]
    assert read(b"".join(map(PACK[kind], pieces))) == (LONG[:100_000], None)


@pytest.mark.parametrize("zeros", [1, 511, 200_000])
def test_zeros_after_gzip_are_padding(zeros):
    """Zeros after a gzip member, as tapes and devices add them, are skipped, as gzip does."""
    packed = gzip.compress(LONG)
    assert read(packed + bytes(zeros)) == (LONG, None)
    assert read(packed + bytes(zeros) + packed) == (LONG + LONG, None)


@pytest.mark.parametrize("kind", PACK)
def test_a_cut_stream_is_read_up_to_the_cut(kind):
    """A stream that stops early yields what it has and then raises CutError."""
    packed = PACK[kind](LONG)
    content, error = read(packed[: len(packed) // 2])
    assert LONG.startswith(content)
    assert len(content) > len(LONG) // 4
    assert type(error) is CutError
    assert str(error) == f"the {kind} stream stops early"


@pytest.mark.parametrize("kind", PACK)
def test_data_that_ends_with_a_stream_is_not_cut(kind):
    """Data that ends with a whole stream is read without an error."""
    whole = PACK[kind](LONG)
    assert read(whole + PACK[kind](LONG)[:-1])[1] is not None
    assert read(whole) == (LONG, None)


@pytest.mark.parametrize("kind", PACK)
def test_other_bytes_behind_a_stream_are_damage(kind):
    """Other bytes behind a stream raise DamageError, not CutError."""
    content, error = read(PACK[kind](LONG) + b"more")
    assert content == LONG
    assert type(error) is DamageError
    assert str(error).startswith(f"the {kind} stream is damaged: ")


@pytest.mark.parametrize("name", ["rows.gz", "rows.jsonl.zst"])
def test_the_suffix_chooses_the_compression(name):
    """The suffix of a file chooses the compression; equal content makes equal bytes."""
    packed = []
    for _ in range(2):
        writer = compressor(Path(name))
        packed.append(writer.compress(LONG) + writer.finish())
    assert packed[0] == packed[1]
    assert read(packed[0]) == (LONG, None)


@pytest.mark.parametrize("name", ["rows.gz", "rows.zst"])
def test_synced_content_can_be_read(name):
    """Content up to a `sync` decodes without the rest, and the stream goes on after it."""
    writer = compressor(Path(name))
    first = writer.compress(LONG) + writer.sync()
    content, error = read(first)
    assert content == LONG
    assert type(error) is CutError
    assert read(first + writer.compress(LONG) + writer.finish()) == (LONG + LONG, None)


def test_files_with_other_suffixes_are_plain():
    """A file with another suffix is not compressed."""
    assert compressor(Path("rows.jsonl")) is None
