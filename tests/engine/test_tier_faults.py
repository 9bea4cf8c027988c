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

from kvcore_engine import mover as engine_tiers
from kvcore_tiers.tier import disk, redis


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
    for index in range(step // 2, len(data), step):
        data[index] ^= 1 << index % 8
    path.write_bytes(data)


def swap(headers, slots):
    """Exchange the first two slots of a disk tier, K/V and headers."""
    for path, first, size in ((headers, 512, 512), (slots, 0, SLOT)):
        data = path.read_bytes()
        one, two = data[first : first + size], data[first + size : first + 2 * size]
        path.write_bytes(data[:first] + two + one + data[first + 2 * size :])


SLOT = tier_kills.SLOT
DAMAGE_OF_SLOTS = {
    "bits of K/V": lambda _, slots: flip(slots, SLOT),
    "one bit of K/V": lambda _, slots: flip(slots, 9 * SLOT),
    "cut slots": lambda _, slots: os.truncate(slots, 5 * SLOT + 3),
    "no slots": lambda _, slots: slots.unlink(),
    "zeros": lambda _, slots: slots.write_bytes(bytes(slots.stat().st_size)),
}
DAMAGE = DAMAGE_OF_SLOTS | {
    "bits of headers": lambda headers, _: flip(headers, 1024),
    "cut headers": lambda headers, _: os.truncate(headers, 512 * 7 + 9),
    "no headers": lambda headers, _: headers.unlink(),
    "places": swap,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_blocks_do_not_change_the_text(damage, tmp_path, plain):
    """Blocks damaged between two runs do not change the text of the second run.

    Blocks with damaged K/V are dropped when they are read; those with damaged headers, and
    the blocks after them, are not recovered.
    """
    written, first = served(disk_tier(tmp_path, write="through"))
    headers, slots = files(tmp_path)
    DAMAGE[damage](headers, slots)
    text, stats = served(disk_tier(tmp_path))
    assert written == text == plain
    if damage in DAMAGE_OF_SLOTS:
        assert stats.recovered == first.stored
        assert stats.dropped["corrupt"]
    else:
        assert stats.recovered < first.stored
        assert not any(stats.dropped.values())


@pytest.mark.parametrize("other", ["format", "model"])
def test_slots_of_another_format_or_model_are_not_used(other, tmp_path, monkeypatch, plain):
    """Files of another format or model are not used, even under the name of this model."""
    _, first = served(disk_tier(tmp_path, write="through"))
    old = files(tmp_path)
    if other == "format":
        monkeypatch.setattr(disk, "SCHEMA", disk.SCHEMA + 1)
    else:
        of = disk.DiskStore
        monkeypatch.setattr(
            disk, "DiskStore", lambda *args, sync: of(*args[:3], b"another model", sync=sync)
        )
    text, stats = served(disk_tier(tmp_path, write="through"))
    assert (text, stats.recovered) == (plain, 0)
    text, stats = served(disk_tier(tmp_path))
    assert (text, stats.recovered) == (plain, first.stored)
    for path in old:
        (new,) = {*tmp_path.glob(f"*{path.suffix}")} - {path}
        new.write_bytes(path.read_bytes())
    text, stats = served(disk_tier(tmp_path))
    assert (text, stats.recovered, sum(stats.dropped.values())) == (plain, 0, 0)
    assert len([*tmp_path.glob("*.damaged-1")]) == 2


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9])
def test_a_full_disk_does_not_change_the_text(after, tmp_path, monkeypatch, plain):
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
def test_a_killed_run_leaves_usable_blocks(tmp_path, plain):
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
def test_a_failing_redis_server_does_not_change_the_text(what, call, monkeypatch, plain):
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
        assert stats.dropped["failed"]
    else:
        assert stats.dropped["gone"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "failed"),
        (b"", "failed"),
        (b"?\r\n", "failed"),
        (b"$-1\r\n", "gone"),
        (b":1\r\n", "corrupt"),
        (b"*0\r\n", "gone"),
    ],
)
def test_invalid_answers_of_a_server_do_not_change_the_text(answer, reason, monkeypatch, plain):
    """A server whose answers are late, wrong or no Redis protocol does not change the text."""
    # In a pause all calls fail, so that what is dropped would depend on the machine's speed.
    monkeypatch.setattr(redis, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(redis, "LONGEST_PAUSE", 0.0)
    opens = redis.Redis.open

    def impatient(self, *arguments):
        store = opens(self, *arguments)
        pool = store._client.connection_pool
        pool.disconnect()
        pool.reset()
        pool.connection_kwargs["socket_timeout"] = 0.05
        return store

    if not answer:  # Only the first call, which tests the connection, is answered.
        monkeypatch.setattr(redis.Redis, "open", impatient)
    with answering(answer) as (url, asked):
        text, stats = served(tier("redis", url=url, timeout=60, call_timeout=60))
        assert text == plain
        assert asked
        assert stats.errors
        assert stats.dropped[reason]
        assert (stats.recovered, stats.hits) == (0, 0)
