"""Batches of events are delivered in order, at most once, despite loss, replay and restart."""

from itertools import count, islice, pairwise, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore_events.sequencer import BatchSequencer, Delivery, Gap, ReplayFailed, Restart

STEPS = st.lists(
    st.sampled_from(
        ["received", "received", "received", "lost", "lost", "restart", "catch up"]
    ),
    max_size=60,
)


class Publisher:
    """A publisher that keeps its last batches, restarts, and whose replays may break off."""

    def __init__(self, keeps, draw=None):
        self.keeps, self.draw = keeps, draw
        self.life, self.kept = 0, []
        self.next = 0

    def publish(self):
        """Return a new batch: its number, and bytes that no other batch has."""
        batch = self.next, f"{self.life}/{self.next}".encode()
        self.next += 1
        self.kept = [*self.kept, batch][-self.keeps :]
        return batch

    def restart(self):
        """Drop all batches, and count from 0."""
        self.life, self.next, self.kept = self.life + 1, 0, []

    def replay(self, start):
        """Yield the kept batches from `start` on, some dropped, until the replay breaks off."""
        for batch in self.kept:
            if batch[0] >= start:
                fate = self.draw() if self.draw else "sent"
                if fate == "broken":
                    raise ReplayFailed(fate)
                if fate == "sent":
                    yield batch


def items_of_listener(steps, publisher, *, replay=True):
    """Return the items of a listener whose publisher goes through these steps."""
    sequencer = BatchSequencer(0, publisher.replay if replay else None)
    items = []
    for step in steps:
        if step == "restart":
            publisher.restart()
            sequencer.mark_disconnected()
        elif step == "catch up":
            items += sequencer.catch_up()
        else:
            batch = publisher.publish()
            if step == "received":
                items += sequencer.receive(*batch)
    return list(filter(None, items))


def lives(items):
    """Split the items of a listener at the restarts."""
    found = [[]]
    for item in items:
        if isinstance(item, Restart):
            found.append([])
        else:
            found[-1].append(item)
    return found


@given(steps=STEPS, keeps=st.integers(1, 8), replay=st.booleans(), data=st.data())
@settings(max_examples=200)
def test_no_batch_is_delivered_twice(steps, keeps, replay, data):
    """No batch is delivered twice, and batches and gaps cover all numbers between restarts."""
    fates = st.sampled_from(["sent", "sent", "sent", "dropped", "broken"])
    publisher = Publisher(keeps, lambda: data.draw(fates))
    items = items_of_listener(steps, publisher, replay=replay)
    payloads = [item.payload for item in items if isinstance(item, Delivery)]
    assert len(payloads) == len(set(payloads))
    for life in lives(items):
        expected = 0
        for item in life:
            first = item.first if isinstance(item, Gap) else item.sequence
            assert first == expected
            expected = (item.last if isinstance(item, Gap) else item.sequence) + 1
            assert expected > first


@given(steps=STEPS)
@settings(max_examples=200)
def test_complete_replays_leave_no_gap(steps):
    """There is no gap, and no batch missing, if replays have all batches."""
    publisher = Publisher(keeps=100)
    items = items_of_listener([*steps, "received"], publisher)
    assert not [item for item in items if isinstance(item, Gap)]
    last = max(life for life, _ in map(named, items))
    assert [n for life, n in map(named, items) if life == last] == list(range(publisher.next))


@given(steps=STEPS)
def test_every_visible_restart_is_reported(steps):
    """A restart is reported exactly when the numbers of batches begin again."""
    publisher = Publisher(keeps=100)
    items = items_of_listener(["received", *steps], publisher)
    seen = [named(item) for item in items if isinstance(item, Delivery)]
    back = 0
    for before, after in pairwise(seen):
        assert after[1] in (before[1] + 1, 0)
        back += after[1] <= before[1]
    assert len(lives(items)) == 1 + back


def named(item):
    """Return the life and the number in the bytes of a batch."""
    if not isinstance(item, Delivery):
        return -1, -1
    life, number = item.payload.split(b"/")
    return int(life), int(number)


def test_an_endless_replay_needs_bounded_memory(monkeypatch):
    """Only the last batches of a replay are remembered, to drop them if they also come live."""
    monkeypatch.setattr("kvcore_events.sequencer.MOST_REPLAYED", 5)
    publisher = Publisher(keeps=20)
    batches = [publisher.publish() for _ in range(20)]
    sequencer = BatchSequencer(0, publisher.replay)
    assert len(list(sequencer.catch_up())) == 20
    assert len(sequencer._replayed) == 5
    assert [item for batch in batches[-5:] for item in sequencer.receive(*batch)] == []


def test_a_batch_missing_in_a_replay_is_requested_again():
    """A batch that is missing in a replay after the last known one is requested again.

    A replay that has the last known batch must have the next, so it was dropped on the way.
    """
    publisher = Publisher(10)
    sequencer = BatchSequencer(0, publisher.replay)
    first = list(sequencer.receive(*publisher.publish()))
    _, last = publisher.publish(), publisher.publish()
    fates = iter(["sent", "dropped"])
    publisher.draw = lambda: next(fates, "sent")
    rest = list(filter(None, sequencer.receive(*last)))
    assert [item.sequence for item in first + rest] == [0, 1, 2]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(repeat((0, b"old")), id="before-the-last"),
        pytest.param(zip(count(3), repeat(None)), id="other-topic"),
    ],
)
def test_each_batch_of_a_replay_lets_its_reader_end(answer):
    """A batch that yields nothing else yields None, so that a reader can end within them."""
    sequencer = BatchSequencer(0, lambda _: (batch for batch in answer))
    sequencer._advance(2, b"a digest")
    assert list(islice(sequencer.catch_up(), 9)) == [None] * 9


READER = st.lists(
    st.sampled_from(["sent", "sent", "sent", "lost", "restart", "read", "read", "read all"]),
    max_size=80,
)


def read_late(steps, publisher):
    """Return the items of a listener that reads live batches late, and the batches it read."""
    waiting, read, items = [], [], []
    sequencer = BatchSequencer(0, publisher.replay)

    def read_next():
        batch = waiting[0]
        if batch is None:
            sequencer.mark_disconnected()
        else:
            read.append(batch[1])
            items.extend(filter(None, sequencer.receive(*batch)))
        waiting.pop(0)

    for step in [*steps, "read all"]:
        if step == "restart":
            publisher.restart()
            waiting.append(None)
        elif step in ("sent", "lost"):
            batch = publisher.publish()
            if step == "sent":
                waiting.append(batch)
        else:
            for _ in range(len(waiting) if step == "read all" else min(1, len(waiting))):
                read_next()
    return items, read


@given(steps=READER, keeps=st.integers(1, 8))
@settings(max_examples=500)
def test_a_late_reader_gets_each_batch_once(steps, keeps):
    """However late live batches are read: all are delivered, each once, in order.

    So none of them is told as lost, nor a restart that was none.
    """
    items, read = read_late(steps, Publisher(keeps))
    delivered = [item.payload for item in items if isinstance(item, Delivery)]
    assert delivered == sorted(set(delivered), key=lambda text: [*map(int, text.split(b"/"))])
    assert set(read) <= set(delivered)
    assert len(lives(items)) <= 1 + steps.count("restart")


@given(steps=READER)
@settings(max_examples=300)
def test_a_late_reader_misses_only_what_nobody_keeps(steps):
    """However late live batches are read: if the publisher keeps all, none is missing."""
    steps = [step for step in steps if step != "restart"]
    items, _ = read_late([*steps, "sent"], Publisher(keeps=100))
    assert [item.sequence for item in items] == list(range(len(items)))
    assert not [item for item in items if isinstance(item, Gap)]
