"""The subscriber to KV events over ZMQ: batches in order, replays, gaps and restarts."""

import math
import sys
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from threading import Event, Thread
from time import monotonic

import pytest
import zmq
from helpers.engine_wire import END, Engine, number

from kvcore.errors import InputError, PluginError
from kvcore_events.sequencer import Delivery, Gap, InvalidMessage, Restart
from kvcore_events.subscriber import Server, Subscriber

PATIENCE = 20


@pytest.fixture
def engine():
    """Yield an engine that publishes at free ports."""
    with Engine() as engine:
        yield engine


@pytest.fixture
def listen():
    """Yield a function that subscribes to an engine and waits until the engine knows."""
    with ExitStack() as stack:

        def listen(engine, **options):
            server = Server(**{"address": engine.address, "replay": engine.replay} | options)
            subscriber = stack.enter_context(Subscriber(server))
            engine.wait()
            return subscriber

        yield listen


@contextmanager
def router():
    """Yield a ROUTER socket that does not answer, and its address."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        yield socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def next_items(subscriber, count):
    """Return the next `count` items."""
    items = list(islice(subscriber.items(PATIENCE), count))
    assert len(items) == count
    return items


def restart(engine, subscriber):
    """Restart an engine, and wait until a subscriber has found it again."""
    engine.restart()
    # A subscriber subscribes again only while its items are read.
    for _ in range(PATIENCE * 100):
        assert not list(subscriber.items(0.01))
        if engine.pub.poll(0):
            break
    engine.wait()


def test_live_batches_come_in_order(engine, listen):
    """Batches that are published during a subscription are delivered in order."""
    subscriber = listen(engine)
    for payload in (b"a", b"b", b"c"):
        engine.publish(payload)
    items = next_items(subscriber, 3)
    assert [(item.sequence, item.payload) for item in items] == [
        (0, b"a"),
        (1, b"b"),
        (2, b"c"),
    ]


def test_earlier_batches_are_requested(engine, listen):
    """A late subscriber gets the batches that the publisher keeps, without a new batch."""
    engine.publish(b"a", sent=False)
    engine.publish(b"b", sent=False)
    assert next_items(listen(engine), 2) == [
        Delivery(0, 0, b"a", replayed=True),
        Delivery(0, 1, b"b", replayed=True),
    ]


def test_dropped_batches_are_requested(engine, listen):
    """Batches that were dropped on the way are requested again and delivered in order."""
    subscriber = listen(engine)
    engine.publish(b"a", sent=False)
    assert next_items(subscriber, 1) == [Delivery(0, 0, b"a", replayed=True)]
    for payload in (b"b", b"c"):
        engine.publish(payload, sent=False)
    engine.publish(b"d")
    items = next_items(subscriber, 3)
    assert [item.payload for item in items] == [b"b", b"c", b"d"]
    assert engine.requested == [0, 3, 0]


def test_a_batch_live_and_in_a_replay_is_delivered_once(engine, listen):
    """A batch that comes live and in a replay is delivered once."""
    subscriber = listen(engine)
    engine.publish(b"a", sent=False)
    for payload in (b"b", b"c", b"d"):
        engine.publish(payload)
    items = next_items(subscriber, 4)
    engine.publish(b"e")
    items += next_items(subscriber, 1)
    assert [item.sequence for item in items] == [0, 1, 2, 3, 4]
    assert not items[-1].replayed


def test_lost_batches_that_are_no_longer_kept_are_a_gap(listen):
    """Lost batches that the publisher no longer keeps are reported as a gap."""
    with Engine(buffer=2) as engine:
        for payload in (b"a", b"b", b"c"):
            engine.publish(payload, sent=False)
        gap, *rest = next_items(listen(engine), 3)
    assert gap == Gap(0, 0, 0, "the publisher does not have them any more")
    assert [item.payload for item in rest] == [b"b", b"c"]


def test_a_hole_in_a_replay_is_requested_again(engine, listen):
    """Batches that are missing in the middle of a replay are requested again."""
    engine.holes = [{1, 2}]
    for payload in (b"a", b"b", b"c", b"d"):
        engine.publish(payload, sent=False)
    items = next_items(listen(engine), 4)
    assert [item.sequence for item in items] == [0, 1, 2, 3]
    assert engine.requested == [0, 1]


def test_an_unanswered_replay_leaves_a_gap(engine, listen):
    """A replay address that does not answer leaves a gap, and live batches are delivered."""
    with router() as (_, replay):
        engine.publish(b"a", sent=False)
        subscriber = listen(engine, replay=replay, replay_timeout=0.01)
        engine.publish(b"b")
        gap, batch = next_items(subscriber, 2)
    reason = f"no answer from {replay} within 10 ms"
    assert (gap, batch) == (Gap(0, 0, 0, reason), Delivery(0, 1, b"b"))


@pytest.mark.parametrize("answer", [[b"what?"], [b"", b"short", b"x"], [b""] * 6])
def test_a_replay_of_garbage_leaves_a_gap(engine, listen, answer):
    """An invalid answer from the replay address leaves a gap with that reason."""
    with router() as (odd, replay):
        ended = Event()

        def respond():
            while not ended.is_set():
                if odd.poll(10):
                    odd.send_multipart([odd.recv_multipart()[0], *answer])

        engine.publish(b"a", sent=False)
        subscriber = listen(engine, replay=replay)
        engine.publish(b"b")
        thread = Thread(target=respond)
        thread.start()
        gap, _ = next_items(subscriber, 2)
        ended.set()
        thread.join()
    assert gap.reason == f"{replay} answered with something that is no batch"


@pytest.mark.parametrize("before", [1, 2], ids=["expected", "lower"])
def test_a_restart_is_reported_and_numbers_from_zero(engine, listen, before):
    """A restart is found whatever number its first live batch has, and numbers begin with 0."""
    subscriber = listen(engine)
    for payload in (b"a", b"b")[:before]:
        engine.publish(payload)
    next_items(subscriber, before)
    restart(engine, subscriber)
    engine.publish(b"c", sent=False)
    engine.publish(b"d")
    assert next_items(subscriber, 3) == [
        Restart(0, expected=before, sequence=before - 1),
        Delivery(0, 0, b"c", replayed=True),
        Delivery(0, 1, b"d", replayed=True),
    ]


def test_a_restart_before_any_live_batch_is_reported(engine, listen):
    """A restart is found when a replayed number comes live with other bytes."""
    for payload in (b"a", b"b"):
        engine.publish(payload, sent=False)
    subscriber = listen(engine)
    next_items(subscriber, 2)
    restart(engine, subscriber)
    engine.publish(b"c")
    assert next_items(subscriber, 2) == [Restart(0, 2, 0), Delivery(0, 0, b"c")]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"only"], "expected 3 frames (topic, number, payload), got 1"),
        ([b"", number(0), b"x", b"y"], "expected 3 frames (topic, number, payload), got 4"),
        ([b"", b"\0" * 7, b"x"], "expected a number of 8 bytes from 0 on, got 00000000000000"),
        ([b"", b"", b"x"], "expected a number of 8 bytes from 0 on, got none"),
        ([b"", END, b"x"], "expected a number of 8 bytes from 0 on, got ffffffffffffffff"),
        (
            [b"", b"\0" * 9, b"x"],
            "expected a number of 8 bytes from 0 on, got 9 bytes 0000000000000000...",
        ),
    ],
)
def test_garbage_is_reported_and_skipped(engine, listen, frames, reason):
    """A message that is not a batch is reported, and later batches are delivered."""
    subscriber = listen(engine)
    engine.pub.send_multipart(frames)
    engine.publish(b"a")
    items = next_items(subscriber, 2)
    assert InvalidMessage(0, reason) in items
    assert {item.payload for item in items if isinstance(item, Delivery)} == {b"a"}


def test_only_batches_of_the_topic_are_delivered(listen):
    """Only batches whose topic has the given prefix are delivered, live or replayed."""
    with Engine() as engine:
        for topic in (b"kv@a", b"other", b"kv@b"):
            engine.topic = topic
            engine.publish(topic, sent=False)
        subscriber = listen(engine, topic="kv")
        items = next_items(subscriber, 2)
        for topic in (b"other", b"kv@c"):
            engine.topic = topic
            engine.publish(topic)
        items += next_items(subscriber, 1)
    assert [item.payload for item in items] == [b"kv@a", b"kv@b", b"kv@c"]


def test_each_rank_numbers_its_own_batches():
    """Each rank publishes at the next address and numbers its own batches."""
    with (
        zmq.Context() as context,
        Engine("inproc://kv", "inproc://again", context=context) as first,
        Engine("inproc://kv_dp1", "inproc://again_dp1", context=context) as second,
    ):
        first.publish(b"a", sent=False)
        second.publish(b"b", sent=False)
        server = Server(address="inproc://kv", replay="inproc://again", ranks=2)
        with Subscriber(server, context) as subscriber:
            items = next_items(subscriber, 2)
    assert items == [
        Delivery(0, 0, b"a", replayed=True),
        Delivery(1, 0, b"b", replayed=True),
    ]


def test_items_ends_after_the_given_seconds(engine, listen):
    """`items` ends after the given seconds, even if nothing was received."""
    subscriber = listen(engine)
    begin = monotonic()
    assert list(subscriber.items(0.2)) == []
    assert 0.2 <= monotonic() - begin < PATIENCE


def test_stop_ends_items_during_a_replay(engine, listen):
    """`stop` ends `items`, even while it waits for a replay."""
    with router() as (silent, replay):

        def stop():
            silent.recv_multipart()
            subscriber.stop()

        subscriber = listen(engine, replay=replay, replay_timeout=PATIENCE)
        thread = Thread(target=stop)
        thread.start()
        assert list(subscriber.items()) == []
        thread.join()


@pytest.fixture
def local():
    """Yield an engine and a subscriber in one context, where batches arrive at once."""
    with (
        zmq.Context() as context,
        Engine("inproc://kv", "inproc://again", context=context) as it,
    ):
        server = Server(address="inproc://kv", queue_bytes=10_000)
        with Subscriber(server, context) as subscriber:
            it.wait()
            yield it, subscriber


def test_drain_yields_all_received_batches(local):
    """`drain` yields all received batches and leaves the subscriber stopped."""
    engine, subscriber = local
    for _ in range(50):
        engine.publish(b"x" * 1000)
    assert [item.sequence for item in subscriber.drain()] == list(range(50))
    assert subscriber.stopped


def test_batches_that_cannot_be_read_in_time_are_no_gap(local):
    """Received batches that cannot be read in time are counted, and are no gap."""
    engine, subscriber = local
    for _ in range(50):
        engine.publish(b"x" * 1000)
    assert list(subscriber.drain(0)) == [Delivery(0, 0, b"x" * 1000)]
    assert subscriber.unread


def test_the_batch_after_a_gap_is_read_or_counted(local):
    """A `drain` without time ends with the batch that shows a gap, and counts the others."""
    engine, subscriber = local
    for batch in range(8):
        engine.publish(b"x", sent=batch > 4)
    gap, batch = subscriber.drain(0)
    assert (gap.last, batch.sequence) == (4, 5)
    assert subscriber.unread == 2


def test_live_batches_that_wait_are_not_told_as_lost():
    """Batches that came live before a replay was asked for are delivered, kept or not."""
    with (
        zmq.Context() as context,
        Engine("inproc://kv", "inproc://again", buffer=2, context=context) as engine,
    ):
        server = Server(address=engine.address, replay=engine.replay)
        with Subscriber(server, context) as subscriber:
            engine.wait()
            for payload in (b"a", b"b", b"c", b"d"):
                engine.publish(payload)
            assert next_items(subscriber, 4) == [
                Delivery(0, n, payload) for n, payload in enumerate([b"a", b"b", b"c", b"d"])
            ]


@pytest.mark.parametrize(
    "options",
    [
        {"heartbeat": 40_000},
        {"heartbeat": math.inf},
        {"reconnect": 1e10},
        {"reconnect": math.inf},
        {"queue_bytes": 1, "ranks": 2},
    ],
)
def test_a_limit_that_no_socket_takes_is_refused(options):
    """Times beyond those of sockets, and a queue without room for a rank, are refused."""
    with pytest.raises(ValueError, match=r"32767|give 2 or more"):
        Server(address="tcp://127.0.0.1:5557", **options)


def test_a_subscriber_holds_few_batches_and_loses_none(local):
    """While its reader is busy a subscriber holds only a few batches, and loses none."""
    engine, subscriber = local
    for _ in range(50):
        engine.publish(b"x" * 1000)
    items = subscriber.items(PATIENCE)
    assert next(items).sequence == 0
    assert len(subscriber._streams[0].queue) < 10
    assert [item.sequence for item in islice(items, 49)] == list(range(1, 50))


@pytest.fixture
def endless():
    """Yield the address of a replay that never ends."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger, socket.sndhwm, socket.router_mandatory = 0, 10, 1
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        ended = Event()

        def answer():
            peer, count = socket.recv_multipart()[0], 0
            while not ended.is_set():
                if socket.poll(10, zmq.POLLOUT):
                    with suppress(zmq.ZMQError):
                        batch = [peer, b"", b"", number(count), b"x"]
                        socket.send_multipart(batch, zmq.NOBLOCK)
                        count += 1

        thread = Thread(target=answer)
        thread.start()
        yield f"tcp://127.0.0.1:{port}"
        ended.set()
        thread.join()


def test_items_ends_in_time_during_an_endless_replay(engine, listen, endless):
    """`items` ends in time during a replay, and the next call continues with it.

    At last `drain` yields the received batches that it has time for.
    """
    subscriber = listen(engine, replay=endless)
    begin = monotonic()
    calls = [list(subscriber.items(0.5)) for _ in range(4)]
    assert sum(map(bool, calls)) > 1
    items = [item for call in calls for item in call]
    assert items == [Delivery(0, n, b"x", replayed=True) for n in range(len(items))]
    items += subscriber.drain(0.1)
    assert monotonic() - begin < PATIENCE
    expected = 0
    for item in items:
        assert (item.first if isinstance(item, Gap) else item.sequence) == expected
        expected = (item.last if isinstance(item, Gap) else item.sequence) + 1


def test_an_unknown_host_is_refused_at_once(monkeypatch):
    """An unknown host is refused at once; ZMQ would look it up forever."""

    def unknown(*_):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    complaint = "'tcp://nowhere:5557': the host 'nowhere' cannot be found: Name or service"
    with pytest.raises(InputError, match=complaint):
        Subscriber(Server(address="tcp://nowhere:5557"))


def test_more_ranks_than_sockets_are_refused():
    """More ranks than sockets are refused with the first rank that cannot be opened."""
    with pytest.raises(
        InputError, match=r"cannot listen to rank \d+ at ipc://x_dp\d+: Too many"
    ):
        Subscriber(Server(address="ipc://x", ranks=99_999))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"address": "tcp://*:5557"}, "name the server's: tcp://127.0.0.1:5557"),
        ({"address": "tcp://h:70000"}, "there is no port 70000; the highest is 65535"),
    ],
)
def test_impossible_addresses_are_refused(options, complaint):
    """An address to which one cannot connect is refused with the reason."""
    with pytest.raises(InputError, match="address") as error:
        Subscriber(Server(**options))
    assert complaint in str(error.value)


def test_without_pyzmq_the_extra_is_named(monkeypatch):
    """Without pyzmq the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[events\]'"):
        Subscriber(Server(address="tcp://127.0.0.1:5557"))
