"""Runs on tensors above a failing disk or server generate the text of a run without tiers."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tier_kills
from helpers.engine import compute
from helpers.redis_server import answering, running
from helpers.tier_kills import OPTIONS, disk_tier, sessions, tier

from kvcore.engine import tiers as engine_tiers
from kvcore_plugins.tier import disk, redis


@pytest.fixture(scope="module")
def plain():
    """Return the texts of a run without tiers."""
    return compute(sessions(), **OPTIONS).result.outputs


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(engine_tiers, "FIRST_PAUSE", 0.0)


def served(tiers):
    """Return the texts of a run with this tier, and the tier's statistics.

    Check that they agree with the DROP lines of the trace, by reason.
    """
    run = compute(sessions(), tiers=[tiers], **OPTIONS)
    (level,) = run.result.cache.tiers.levels
    dropped = {}
    for line in run.lines:
        if line["event"] == "DROP":
            dropped[line["reason"]] = dropped.get(line["reason"], 0) + line["blocks"]
    assert dropped == {reason: count for reason, count in level.stats.dropped.items() if count}
    return run.result.outputs, level.stats


def files(path):
    """Return the header file and the slot file of a disk tier."""
    return [next(path.glob(f"*.{suffix}")) for suffix in ("headers", "slots")]


def flip(path, step):
    """Flip a bit of every `step`th byte of a file."""
    data = bytearray(path.read_bytes())
    for at in range(step // 2, len(data), step):
        data[at] ^= 1 << at % 8
    path.write_bytes(data)


def swap(headers, slots):
    """Exchange the first two slots of a disk tier, K/V and headers."""
    for path, first, size in ((headers, 512, 512), (slots, 0, SLOT)):
        data = path.read_bytes()
        one, two = data[first : first + size], data[first + size : first + 2 * size]
        path.write_bytes(data[:first] + two + one + data[first + 2 * size :])


SLOT = tier_kills.SLOT
DAMAGE = {
    "bits of K/V": lambda _, slots: flip(slots, SLOT),
    "one bit of K/V": lambda _, slots: flip(slots, 9 * SLOT),
    "bits of headers": lambda headers, _: flip(headers, 1024),
    "cut slots": lambda _, slots: os.truncate(slots, 5 * SLOT + 3),
    "cut headers": lambda headers, _: os.truncate(headers, 512 * 7 + 9),
    "no slots": lambda _, slots: slots.unlink(),
    "no headers": lambda headers, _: headers.unlink(),
    "zeros": lambda _, slots: slots.write_bytes(bytes(slots.stat().st_size)),
    "places": swap,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_disk(damage, tmp_path, plain):
    """Blocks damaged between two runs do not change the text of the second run."""
    written, first = served(disk_tier(tmp_path, write="through"))
    headers, slots = files(tmp_path)
    damage(headers, slots)
    text, stats = served(disk_tier(tmp_path))
    assert written == text == plain
    assert stats.dropped.get("corrupt") or stats.recovered < first.stored


def test_slots_of_another_schema_or_model(tmp_path, monkeypatch, plain):
    """Files of another format, or of another model under this model's name, are not used."""
    served(disk_tier(tmp_path, write="through"))
    monkeypatch.setattr(disk, "SCHEMA", disk.SCHEMA + 1)
    text, stats = served(disk_tier(tmp_path, write="through"))
    assert (text, stats.recovered) == (plain, 0)
    one, two = tmp_path.glob("*.headers")
    for old, new in ((one, two), (one.with_suffix(".slots"), two.with_suffix(".slots"))):
        new.write_bytes(old.read_bytes())
    for schema in (disk.SCHEMA, disk.SCHEMA - 1):
        monkeypatch.setattr(disk, "SCHEMA", schema)
        text, stats = served(disk_tier(tmp_path))
        assert text == plain


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
def test_a_disk_that_fills_up(after, tmp_path, monkeypatch, plain):
    """A disk that fills up drops blocks as failed, and the run computes them again."""
    pwrite, calls = os.pwrite, 0

    def full(file, data, at):
        nonlocal calls
        calls += 1
        if calls > after + 2:  # The first two write the lock and the header.
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    text, stats = served(disk_tier(tmp_path))
    assert text == plain
    assert stats.errors
    assert stats.dropped["failed"]


@pytest.mark.slow
def test_killed_runs(tmp_path, plain):
    """A run killed at any write leaves blocks that the next run uses without dropping one."""
    tests = Path(tier_kills.__file__).parents[1]
    done = subprocess.check_output(
        [sys.executable, tier_kills.__file__, "runs", tmp_path],
        env=os.environ | {"PYTHONPATH": str(tests)},
    )
    killed = json.loads(done)
    assert len(killed) > 7
    assert killed[-1]["recovered"] > 50
    for run in killed:
        assert run["texts"] == [*map(list, plain.values())]
        assert not run["dropped"]


@pytest.mark.parametrize("call", [8, 15])
@pytest.mark.parametrize("what", ["stops", "restarts", "is flushed", "is full"])
def test_a_server_that_fails(what, call, monkeypatch, plain):
    """A Redis server that stops, restarts, is flushed or fills up does not change the text."""
    ask, calls = redis.RedisStore._ask, 0
    monkeypatch.setattr(redis, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(redis, "LONGEST_PAUSE", 0.0)
    with running() as server:

        def watched(self, commands):
            nonlocal calls
            calls += 1
            if calls == call:
                with server.client() as client:
                    if what == "is flushed":
                        client.flushall()
                    elif what == "is full":
                        client.config_set("maxmemory", 1)
                    else:
                        server.stop()
                        if what == "restarts":
                            server.start()
            return ask(self, commands)

        monkeypatch.setattr(redis.RedisStore, "_ask", watched)
        text, stats = served(tier("redis", url=server.url))
    assert text == plain
    assert calls > call
    if what in {"stops", "is full"}:
        assert stats.errors
    else:
        assert stats.dropped.get("gone") or stats.errors


@pytest.mark.parametrize("answer", [None, b"", b"?\r\n", b"$-1\r\n", b":1\r\n", b"*0\r\n"])
def test_a_server_that_answers_anything(answer, plain):
    """A server that answers no Redis protocol, or never, does not change the text."""
    with answering(answer) as (url, asked):
        text, stats = served(tier("redis", url=url, timeout=0.2))
        assert text == plain
        assert asked
        assert stats.errors or stats.dropped
