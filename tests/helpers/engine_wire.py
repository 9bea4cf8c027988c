"""An engine that publishes KV events by ZeroMQ, written from the protocol.

It publishes by PUB, and replays batches by ROUTER. Batches can be lost on the way, and the
engine can die and start again at its addresses.
"""

from __future__ import annotations

from threading import Thread

import zmq

PATIENCE_MS = 20_000
END = b"\xff" * 8


def number(sequence):
    """Return the number of a batch in the bytes of the protocol."""
    return sequence.to_bytes(8, "big")


def unbind(socket, address):
    """Unbind `socket`, and wait until the address is free."""
    monitor = socket.get_monitor_socket(zmq.EVENT_CLOSED)
    socket.unbind(address)
    assert monitor.poll(PATIENCE_MS), f"{address} is still bound"
    socket.disable_monitor()
    monitor.close(linger=0)


class Engine:
    """An engine that publishes numbered payloads, and can replay the last `buffer` of them.

    `replay_frames` is 4, or 3 as in servers that leave the topic out.
    """

    def __init__(
        self,
        address="tcp://127.0.0.1:*",
        replay="tcp://127.0.0.1:*",
        *,
        topic=b"",
        buffer=10_000,
        replay_frames=4,
        context=None,
    ):
        self.context = context or zmq.Context()
        self.own = context is None
        self.address, self.replay = address, replay
        self.topic, self.buffer, self.replay_frames = topic, buffer, replay_frames
        self.requested = []
        self.holes = []
        self.start()

    def start(self):
        """Bind the sockets, and begin again with number 0 and nothing to replay."""
        self.kept, self.next = [], 0
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.bind(self.address)
        self.address = self.pub.last_endpoint.decode().rstrip("\0")
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(self.replay)
        self.replay = self.router.last_endpoint.decode().rstrip("\0")
        here, there = (self.context.socket(zmq.PAIR) for _ in range(2))
        here.bind(f"inproc://stop-{id(self)}-{id(self.pub)}")
        there.connect(f"inproc://stop-{id(self)}-{id(self.pub)}")
        self.stopper = here
        self.thread = Thread(target=self.answer, args=(self.router, there))
        self.thread.start()

    def die(self):
        """Stop the thread, and unbind the sockets."""
        self.stopper.send(b"")
        self.thread.join()
        self.stopper.close(linger=0)
        for socket, address in ((self.pub, self.address), (self.router, self.replay)):
            if address.startswith("tcp:"):
                unbind(socket, address)
            socket.close(linger=0)

    def restart(self):
        """Die, and start again at the same addresses."""
        self.die()
        self.start()

    def wait(self):
        """Wait for a subscriber."""
        assert self.pub.poll(PATIENCE_MS), "no subscriber"
        assert self.pub.recv().startswith(b"\x01")

    def publish(self, payload, *, sent=True):
        """Keep a batch for replays, and send it unless it is to be lost."""
        frame = number(self.next)
        self.next += 1
        self.kept = [*self.kept, (self.topic, frame, payload)][-self.buffer :]
        if sent:
            self.pub.send_multipart([self.topic, frame, payload])

    def answer(self, router, stopper):
        """Answer requests for replays until stopped; runs in a thread."""
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(stopper, zmq.POLLIN)
        while stopper not in dict(poller.poll()):
            client, _, start = router.recv_multipart()
            self.requested.append(int.from_bytes(start, "big"))
            missing = self.holes.pop(0) if self.holes else ()
            for batch in self.kept:
                if batch[1] >= start and int.from_bytes(batch[1], "big") not in missing:
                    router.send_multipart([client, b"", *batch[1 - self.replay_frames :]])
            router.send_multipart([client, b"", *[b"", END, b""][1 - self.replay_frames :]])
        stopper.close(linger=0)

    def __enter__(self):
        """Return the engine."""
        return self

    def __exit__(self, *_):
        """Stop the engine for good."""
        self.die()
        if self.own:
            self.context.term()
