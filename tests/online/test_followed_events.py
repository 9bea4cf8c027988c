"""The router's view of caches by the KV events of servers, whatever these publish."""

# ruff: noqa: ARG001 - every scene takes all parts

import asyncio
import math
import random

import msgspec
import pytest
from helpers.online_scenes import sample, sentence
from helpers.upstreams import routed, until

from kvcore import Request
from kvcore.errors import InputError
from kvcore.request import block_keys
from kvcore_events.formats import encode
from kvcore_events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    UnparsedEvent,
)
from kvcore_events.publisher import Publisher
from kvcore_events.sequencer import Delivery
from kvcore_events.subscriber import Server
from kvcore_online import fleet as fleets
from kvcore_online.route_config import RouteConfig

pytest.importorskip("zmq", reason="needs pyzmq")
pytest.importorskip("aiohttp", reason="needs aiohttp")

pack = msgspec.msgpack.encode

STORED = ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU"]
HOSTILE = [
    b"",
    b"garbage",
    b"\xff" * 100,
    b"[" * 2_000,
    b"{}",
    b"null",
    b'{"event_id": 1, "data": null}',
    *(b"\x91" * levels + b"\x90" for levels in (23, 24, 25, 1_000, 100_000)),
    *(pack([time, [STORED], 0]) for time in (math.nan, math.inf, -math.inf, "now", None)),
    *(pack([1.0, [STORED], rank]) for rank in (-1, 2**63, "a", [])),
    *(pack([1.0, events, 0]) for events in (None, 5, [None], [[]], [["BlockStored"]], [5])),
    pack([1.0, [["BlockStored", [[]], None, [1, 2, 3, 4], 4]], 0]),
    pack([1.0, [["BlockStored", [2**64 - 1], -1, [-1, 2**64 - 1, 1, 1], 4]], 0]),
    pack([1.0, [["BlockStored", [1], None, ["a", [1, 2], None, 1], 4]], 0]),
    pack([1.0, [["BlockStored", [7], 7, [1, 2, 3, 4], 4]], 0]),
    pack([1.0, [["BlockRemoved", [9, 9, b"9", "9"]]], 0]),
    pack([1.0, [["AllBlocksCleared", 5, {}]], 0]),
    pack([1.0, [], 0])[:-1],
]
"""Payloads that are no batches, or batches of events that cannot be."""


def followed(scene, publisher):
    """Run a scene with a proxy that follows the events of a publisher."""

    async def run():
        table = {
            "url": "http://127.0.0.1:9",
            "kv_events": publisher.address,
            "block_size": 4,
        }
        options = {"view": "events", "key_tokens": 4, "replicas": [table]}
        async with asyncio.timeout(30), routed([], **options) as (proxy, _, _):
            assert await asyncio.to_thread(publisher.wait_for, 1, 10)
            await scene(proxy, proxy.fleet.dispatcher.view)

    asyncio.run(run())


TOKENS = (0, 1, 2, 3, 4, 5, 6, 7)


def block(**fields):
    """Return an event that stores two blocks of 4 tokens."""
    return BlockStored(**{"hashes": (1, 2), "tokens": TOKENS, "block_size": 4, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": 0},
        {"lora_name": "sql"},
        {"extra_keys": (("salt",), None)},
        {"extra_keys": (None, ("image",))},
        {"block_size": 8},
        {"block_size": 2},
        {"tokens": TOKENS[:4]},
        {"tokens": None},
        {"tokens": (*TOKENS[:7], -1)},
        {"tokens": (*TOKENS[:7], True)},
        {"tokens": (*TOKENS[:7], "a")},
        {"parent": 9},
    ],
)
def test_blocks_that_tokens_alone_do_not_name_have_no_keys(fields):
    """Blocks of adapters, salts, other sizes or unknown parents are none that a prompt hits."""
    assert fleets._ReportedBlocks(4).stored(block(**fields)) == []


def test_reported_blocks_have_the_keys_of_their_tokens():
    """A block has the key of its tokens after its parent's, until its server has removed it."""
    blocks = fleets._ReportedBlocks(4)
    first = blocks.stored(block(extra_keys=(None, None)))
    assert first == block_keys(TOKENS, 4)
    later = blocks.stored(block(hashes=(3,), parent=2, tokens=(9,) * 4))
    assert later == block_keys([*TOKENS, 9, 9, 9, 9], 4)[2:]
    events = (block(), block(hashes=(3,), parent=2, tokens=(9,) * 4))
    blocks.tracker.apply(EventBatch(ts=1.0, events=events), 0, 0)
    assert blocks.gone([1, 2, 3]) == []
    blocks.tracker.apply(EventBatch(ts=2.0, events=(BlockRemoved(hashes=(2,)),)), 1, 0)
    assert blocks.gone([1, 2, 7]) == first[1:]
    assert blocks.gone([2]) == []
    blocks.tracker.apply(EventBatch(ts=3.0, events=(BlockRemoved(hashes=(1, 3)),)), 2, 0)
    assert blocks.gone([1, 3]) == [first[0], *later]
    # Its parent is unknown by now.
    assert blocks.stored(block(hashes=(4,), parent=3, tokens=(9,) * 4)) == []


def stored(number):
    """Return the payload of a batch that stores one block."""
    event = BlockStored(hashes=(number,), tokens=(number,) * 4, block_size=4, medium="GPU")
    return encode(EventBatch(ts=1.0, events=(event,)))


def holds(view, number):
    """Return True if the view has the block of `stored`."""
    keys = block_keys([number] * 4, 4)
    request = Request(id=0, prompt_tokens=4, key_tokens=4, keys=keys)
    return bool(dict(view.find(request, 0)))


def test_no_payload_ends_the_follower_of_a_server():
    """After each hostile payload the view follows the next batch; what is lost is counted."""
    with Publisher("tcp://127.0.0.1:*") as publisher:

        async def scene(proxy, view):
            for index, payload in enumerate(HOSTILE, 100):
                publisher.publish(payload)
                publisher.publish(stored(index))
                await until(lambda number=index: holds(view, number))
            assert [thread.is_alive() for thread in view._threads] == [True]
            assert view._threads[0].daemon  # it does not keep a process that ends
            assert sample(proxy, "lost_batches_total") > len(HOSTILE) // 2
            assert sample(proxy, "restarts_total") == 0

        followed(scene, publisher)


def test_no_damage_of_a_payload_ends_the_follower():
    """A payload with any bytes changed, cut or doubled is a batch or a gap."""
    drawn = random.Random(1)
    whole = stored(5)
    with Publisher("tcp://127.0.0.1:*") as publisher:

        async def scene(proxy, view):
            for _ in range(300):
                data = bytearray(whole)
                for _ in range(drawn.choice([1, 1, 2, 8])):
                    data[drawn.randrange(len(data))] = drawn.randrange(256)
                publisher.publish(bytes(data[: drawn.choice([len(data), len(data), 9])]))
            publisher.publish(stored(6))
            await until(lambda: holds(view, 6))
            assert sample(proxy, "restarts_total") == 0

        followed(scene, publisher)


def test_a_follower_that_fails_starts_again_from_an_empty_cache(monkeypatch, capsys):
    """An unexpected error drops what is known of the replica, and the events are followed on.

    Until the address can be connected to again, that is tried at intervals.
    """
    monkeypatch.setattr(fleets, "PAUSE_SECONDS", 0.01)
    with Publisher("tcp://127.0.0.1:*") as publisher:

        async def scene(proxy, view):
            publisher.publish(stored(1))
            await until(lambda: holds(view, 1))
            decode, subscriber = fleets.decode, fleets.Subscriber
            refused = []

            def fail(_):
                monkeypatch.setattr(fleets, "decode", decode)
                raise ZeroDivisionError

            def refuse(server):
                if len(refused) == 2:
                    return subscriber(server)
                refused.append(server)
                msg = "address: the host cannot be found"
                raise InputError(msg)

            monkeypatch.setattr(fleets, "decode", fail)
            monkeypatch.setattr(fleets, "Subscriber", refuse)
            publisher.publish(stored(2))
            await until(lambda: not holds(view, 1))
            await until(lambda: len(refused) == 2)
            async with asyncio.timeout(20):
                number = 10
                while not holds(view, number):
                    number += 1
                    publisher.publish(stored(number))
                    await asyncio.sleep(0.05)
            assert sample(proxy, "restarts_total") >= 1

        followed(scene, publisher)
    printed = capsys.readouterr().err
    assert "the follower of replica 0 failed, and starts again" in printed
    assert "address: the host cannot be found" in printed


@pytest.fixture
def view():
    """Return a view of one server, which is not connected."""
    server = Server(address="tcp://127.0.0.1:9")
    calls = (lambda *_: None, lambda _: None, lambda *_: None)
    return fleets.FollowedEvents([server], 1, lambda: 0, *calls)


def blocks(sequence, count):
    """Return the item of a batch that stores a prompt of that many blocks of a token."""
    event = BlockStored(
        hashes=tuple(range(count)), tokens=tuple(range(count)), block_size=1, medium="GPU"
    )
    payload = encode(EventBatch(ts=1.0, events=(event,), dp_rank=0))
    return Delivery(rank=0, sequence=sequence, payload=payload)


def test_followers_end_with_their_view(view):
    """Once a view has stopped no thread follows; until then none keeps a process that ends."""

    async def scene():
        view.start()
        (follower,) = view._threads
        assert (follower.is_alive(), follower.daemon) == (True, True)
        await view.stop()
        assert not follower.is_alive()

    asyncio.run(scene())


def test_a_follower_that_connects_again_as_its_view_stops_ends(view, monkeypatch):
    """A subscription that is made just after `stop` has gone through all is stopped too."""
    monkeypatch.setattr(fleets, "PAUSE_SECONDS", 0)
    connect = fleets.Subscriber

    def late(server):
        asyncio.run(view.stop())
        return connect(server)

    with connect(view._servers[0]) as before:
        view._subscribers.append(before)
        monkeypatch.setattr(fleets, "Subscriber", late)
        with view._reconnected(0) as made:
            assert made.stopped


def test_a_large_batch_is_applied_in_small_parts(view):
    """The loop, which serves requests, applies few keys at a time, and all in the end."""
    parts = list(view._parts(0, blocks(0, 3 * fleets.PART_KEYS)))
    sizes = [len(keys) for *_, keys, _ in parts]
    assert sizes == [fleets.PART_KEYS] * 3


def test_a_follower_that_is_stopped_leaves_the_rest_of_its_batch(view):
    """The end does not wait until a large batch is applied."""
    asyncio.run(view.stop())
    view._read(0, blocks(0, fleets.PART_KEYS), loop=None)


def test_the_trace_is_complete_before_followers_have_ended(tmp_path, monkeypatch):
    """A follower that does not end, as one that looks up a host, holds up no trace."""
    path = tmp_path / "day.jsonl"
    table = {"url": "http://127.0.0.1:9", "kv_events": "tcp://127.0.0.1:9", "block_size": 4}
    options = {"view": "events", "key_tokens": 4, "trace": path}
    fleet = fleets.Fleet(RouteConfig.from_options([table], **options), lambda: 0)
    found = []

    async def stop():
        found.append(path.exists())

    monkeypatch.setattr(fleet._view, "stop", stop)
    asyncio.run(fleet.stop())
    assert found == [True]


def test_a_batch_looks_at_all_blocks_once_and_only_if_it_clears_some(view):
    """Clears of a rank that has no blocks cost no more than one; what is stored costs none."""
    life, keys = view._lives[0], block_keys(range(4), 1)
    assert list(life.changes(*view._decoded(0, blocks(0, 4)))) == [(keys, [])]
    clears = EventBatch(ts=2.0, events=(AllBlocksCleared(),) * 1_000, dp_rank=1)
    item = Delivery(rank=1, sequence=0, payload=encode(clears))
    assert list(life.changes(*view._decoded(0, item))) == [([], [])]


def test_gaps_of_a_server_are_told_and_not_kept(view, capsys):
    """A server that loses batches for ever takes no memory, and few lines."""
    for number in range(1_000):
        assert not list(view._parts(0, Delivery(rank=0, sequence=number, payload=b"garbage")))
    assert not view._lives[0].tracker.gaps
    lines = capsys.readouterr().err.splitlines()
    assert [sentence(line).partition(": it cannot be read")[0] for line in lines] == [
        f"kvcore: replica 0: batch {number}" for number in (0, 9, 99, 999)
    ]


def test_missing_batches_are_not_kept(view):
    """Of a server that leaves out every other batch, none of the gaps is remembered."""
    batch = encode(EventBatch(ts=1.0, events=(AllBlocksCleared(),)))
    for number in range(0, 20, 2):
        list(view._parts(0, Delivery(rank=0, sequence=number, payload=batch)))
        assert not view._lives[0].tracker.gaps


def test_what_is_lost_meanwhile_is_not_applied(view):
    """Parts of a batch that come after their replica has lost all blocks change nothing."""
    first, *later = view._parts(0, blocks(0, 2 * fleets.PART_KEYS))
    asyncio.run(view._apply(*first))
    view.lost(0, 0)
    for part in later:
        asyncio.run(view._apply(*part))
    request = Request(id=0, prompt_tokens=1, key_tokens=1, keys=block_keys([0], 1))
    assert not dict(view.find(request, 0))


def test_a_removed_block_after_a_gap_is_removed():
    """Events after a payload that cannot be read are applied: blocks go as they came."""
    with Publisher("tcp://127.0.0.1:*") as publisher:

        async def scene(proxy, view):
            publisher.publish(stored(1))
            await until(lambda: holds(view, 1))
            publisher.publish(b"garbage")
            removed = BlockRemoved(hashes=(1,), medium="GPU")
            publisher.publish(encode(EventBatch(ts=2.0, events=(removed,))))
            await until(lambda: not holds(view, 1))

        followed(scene, publisher)


@pytest.mark.parametrize(
    ("event", "found"),
    [
        (block(medium="GPU", block_size=8, hashes=(1,)), "blocks of 8 tokens"),
        (block(medium="GPU", tokens=TOKENS[:4]), "blocks without token ids"),
        (UnparsedEvent({"type": "BlockRemoved"}, ""), "events[0]: object missing required"),
    ],
)
def test_events_that_a_view_cannot_use_are_told_and_counted(event, found, capsys):
    """Events of another block size than the router's, or without tokens, are told and count."""
    with Publisher("tcp://127.0.0.1:*") as publisher:

        async def scene(proxy, view):
            for _ in range(3):
                publisher.publish(encode(EventBatch(ts=1.0, events=(event,))))
            publisher.publish(stored(6))
            await until(lambda: holds(view, 6))
            assert sample(proxy, "ignored_events_total") == 3

        followed(scene, publisher)
    lines = [line for line in capsys.readouterr().err.splitlines() if "are ignored" in line]
    assert len(lines) == 1
    assert f"127.0.0.1:9: KV events are ignored ({found}" in lines[0]
