"""The publisher of KV events over ZMQ: live batches, replays, and waiting for subscribers."""

from collections import deque
from itertools import islice
from threading import Thread

import pytest
import zmq

from kvcore.errors import InputError
from kvcore_events.publisher import Publisher
from kvcore_events.sequencer import Delivery, Gap
from kvcore_events.subscriber import Server, Subscriber

PATIENCE = 20
FREE = "tcp://127.0.0.1:*"


class Receiver:
    """A subscriber on its own thread that receives `count` items of a publisher."""

    def __init__(self, publisher, count, **options):
        server = Server(address=publisher.address, replay=publisher.replay, **options)
        self.items = []
        self.thread = Thread(target=self.listen, args=(server, count))
        self.thread.start()

    def listen(self, server, count):
        """Receive the items and disconnect, on the thread."""
        with Subscriber(server) as subscriber:
            self.items += islice(subscriber.items(PATIENCE), count)

    def wait(self, publisher):
        """Return the received items when the subscriber has disconnected."""
        while publisher.subscribers:
            publisher.serve(0.01)
        self.thread.join()
        return self.items


def test_published_batches_are_received_in_order():
    """A subscriber receives earlier and later batches in order, each once."""
    with Publisher(FREE, FREE) as publisher:
        assert [publisher.publish(b"a"), publisher.publish(b"b")] == [0, 1]
        receiver = Receiver(publisher, 4)
        assert publisher.wait_for(1, PATIENCE)
        assert [publisher.publish(b"c"), publisher.publish(b"d")] == [2, 3]
        received = receiver.wait(publisher)
    assert [(item.sequence, item.payload) for item in received] == [
        (0, b"a"),
        (1, b"b"),
        (2, b"c"),
        (3, b"d"),
    ]


def test_batches_beyond_the_replay_buffer_are_a_gap():
    """Batches that the replay buffer no longer holds are reported as a gap."""
    with Publisher(FREE, FREE, buffer=2) as publisher:
        for payload in (b"a", b"b", b"c"):
            publisher.publish(payload)
        receiver = Receiver(publisher, 3)
        assert publisher.wait_for(1, PATIENCE)
        gap, *rest = receiver.wait(publisher)
    assert (gap.first, gap.last) == (0, 0)
    assert [item.payload for item in rest] == [b"b", b"c"]


def test_batches_are_kept_for_replays_up_to_a_number_of_bytes(monkeypatch):
    """Large batches are kept for replays up to a number of bytes, the newest of them."""
    monkeypatch.setattr("kvcore_events.publisher.BUFFER_BYTES", 8, raising=False)
    with Publisher(FREE, FREE) as publisher:
        for payload in (b"aaaa", b"bbbb", b"cccc", b"d" * 9, b"eeee"):
            publisher.publish(payload)
        receiver = Receiver(publisher, 2)
        assert publisher.wait_for(1, PATIENCE)
        gap, kept = receiver.wait(publisher)
    assert (gap.first, gap.last, kept.payload) == (0, 3, b"eeee")


def test_without_a_replay_address_earlier_batches_are_a_gap():
    """Without a replay address, earlier batches are reported as a gap."""
    with Publisher(FREE) as publisher:
        assert publisher.replay is None
        publisher.publish(b"a")
        receiver = Receiver(publisher, 2)
        assert publisher.wait_for(1, PATIENCE)
        publisher.publish(b"b")
        gap, batch = receiver.wait(publisher)
    assert gap == Gap(0, 0, 0, "there is no replay address to ask for them")
    assert batch == Delivery(0, 1, b"b")


def test_a_slow_subscriber_loses_nothing():
    """A slow subscriber receives all batches, far more than the queues hold."""
    with Publisher(FREE) as publisher:
        receiver = Receiver(publisher, 5_000, queue_bytes=1)
        assert publisher.wait_for(1, PATIENCE)
        deque(map(publisher.publish, [b"x" * 1000] * 5_000), maxlen=0)
        received = receiver.wait(publisher)
    assert [item.sequence for item in received] == list(range(5_000))


def test_a_subscriber_that_reads_nothing_keeps_no_batch_from_others():
    """Without waiting, a stalled subscriber loses its own batches: the publisher goes on."""
    with (
        Publisher(FREE, waits=False) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as stalled,
    ):
        stalled.rcvhwm, stalled.rcvbuf = 1, 4_096
        stalled.connect(publisher.address)
        stalled.subscribe(b"")
        assert publisher.wait_for(1, PATIENCE)
        batches = [b"x" * 1_000] * 20_000
        thread = Thread(target=deque, args=(map(publisher.publish, batches), 0), daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_replays_that_are_not_read_take_no_memory():
    """A client that asks and never reads gets what its queue has room for, and no more."""
    sent = []
    with Publisher(FREE, FREE, buffer=100) as publisher, zmq.Context() as context:
        deque(map(publisher.publish, [b"x" * 10_000] * 100), maxlen=0)
        send = publisher._router.send_multipart

        class Counted:
            def __getattr__(self, name):
                return getattr(router, name)

            def send_multipart(self, *message):
                send(*message)
                sent.append(message)

        router, publisher._router = publisher._router, Counted()
        with context.socket(zmq.DEALER) as asking:
            asking.rcvhwm, asking.rcvbuf, asking.linger = 1, 4_096, 0
            asking.connect(publisher.replay)
            for _ in range(400):
                asking.send_multipart([b"", bytes(8)])
            publisher.serve(1)
            assert 0 < len(sent) < 100 * 100


def test_a_malformed_replay_request_is_not_answered():
    """A malformed replay request is not answered; the next valid one is."""
    with (
        Publisher("inproc://live", "inproc://again", context=(context := zmq.Context())) as it,
        context,
        context.socket(zmq.DEALER) as asking,
    ):
        it.publish(b"a")
        asking.connect("inproc://again")
        for request in ([b"what?"], [b"", b"short"], [b"", b"\xff" * 8], [b"", bytes(8)]):
            asking.send_multipart(request)
        it.serve(0)
        assert asking.recv_multipart() == [b"", b"", bytes(8), b"a"]
        assert asking.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        assert not asking.poll(0)
        it.close()


def test_serve_all_waits_for_the_first_and_the_last_subscriber():
    """`serve_all` waits for the first subscriber and answers replays until the last leaves."""
    with Publisher(FREE, FREE) as publisher:
        receiver = Receiver(publisher, 3)
        assert publisher.serve_all(iter([b"a", b"b", b"c"])) == 3
        assert publisher.subscribers == 0
        receiver.thread.join()
    assert [item.payload for item in receiver.items] == [b"a", b"b", b"c"]


def test_wait_for_ends_without_a_subscriber():
    """`wait_for` returns False if no subscriber connects within the time."""
    with Publisher(FREE) as publisher:
        assert not publisher.wait_for(1, 0.01)


def test_an_address_in_use_is_refused():
    """An address that is in use is refused, and the error names it."""
    with (
        Publisher(FREE) as publisher,
        pytest.raises(InputError, match=f"cannot publish at {publisher.address}: Address"),
    ):
        Publisher(publisher.address)
