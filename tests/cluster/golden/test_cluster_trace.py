"""The recorded trace of a small cluster, which shows any change of its decisions or lines."""

from __future__ import annotations

from hashlib import blake2b

from helpers.clusters import record_cluster

from kvcore import read_events

GOLDEN = {
    "HEADER": 1,
    "REQUEST": 30,
    "ROUTE": 32,
    "MISS": 32,
    "ALLOC": 64,
    "COMMIT": 32,
    "FIRST_TOKEN": 32,
    "FINISH": 30,
    "FREE": 30,
    "SPLIT": 13,
    "HIT": 28,
    "EVICT": 22,
    "FAIL": 1,
    "RETURN": 1,
}
DIGEST = "ec9f16e3f07d4ed0c3159edcf94d4723"


def test_a_small_cluster_writes_the_recorded_events(tmp_path):
    """Three replicas, of which one fails, write the recorded events.

    Compared are the number of events of each kind, and a digest of all lines between HEADER and
    END.
    """
    path = record_cluster(tmp_path / "trace.jsonl")
    *_, end = read_events(path)
    assert end.events == GOLDEN
    body = b"".join(path.read_bytes().splitlines(keepends=True)[1:-1])
    assert blake2b(body, digest_size=16).hexdigest() == DIGEST
