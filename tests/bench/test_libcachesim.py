"""LRU over spans against libcachesim's LRU in C, on the same blocks of 16 tokens.

libcachesim is GPL-3.0. It is measured as a peer and imported by this file only.
"""

from __future__ import annotations

import struct
from pathlib import Path
from time import perf_counter

import pytest
from bench.harness import POOL, bundled, cache_lru

peer = pytest.importorskip("libcachesim", reason="run `tox -e bench-libcachesim`")
RATIO = 32


def test_the_cache_is_faster_than_libcachesim(tmp_path: Path) -> None:
    """The cache handles more blocks a second than libcachesim's LRU reading a binary trace."""
    requests = bundled()
    trace = tmp_path / "blocks.bin"
    blocks = 0
    with trace.open("wb") as file:
        for request in requests:
            rows = [
                struct.pack("<IQIq", 0, key * RATIO + part, 1, -2)
                for key in request.keys
                for part in range(RATIO)
            ]
            blocks += len(rows)
            file.write(b"".join(rows))
    reader = peer.TraceReader(str(trace), peer.TraceType.ORACLE_GENERAL_TRACE)
    start = perf_counter()
    peer.LRU(POOL * RATIO).process_trace(reader)
    theirs = blocks / (perf_counter() - start)
    start = perf_counter()
    cache_lru(requests, RATIO, POOL * RATIO, ids=False)
    ours = blocks / (perf_counter() - start)
    print(
        f"\nblocks/s at block 16: libcachesim {theirs:,.0f}, kvcore {ours:,.0f}: "
        f"{ours / theirs:.1f} x"
    )
    assert ours > theirs
