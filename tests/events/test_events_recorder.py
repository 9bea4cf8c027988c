"""Recording KV events to a file, with a fake subscriber."""

import gc
import sys

import pytest
from helpers.kv_events import batch, stored

from kvcore_events.formats import encode
from kvcore_events.recording import Lost, Received, RecordingReader, RecordingWriter, record
from kvcore_events.sequencer import BatchSequencer, Delivery

PAYLOAD = encode(batch(stored(1, 2)))


class Played:
    """A subscriber that yields the given items turn by turn, and is then stopped."""

    stopped, unread = False, 0

    def __init__(self, *turns, left=()):
        self.turns, self.left = list(turns), left

    def items(self, _):
        """Yield the items of the next turn."""
        yield from self.turns.pop(0)
        self.stopped = not self.turns

    def drain(self):
        """Yield the items that were received and not read."""
        yield from self.left


def batch_numbers(path):
    """Return the batch numbers in a recording, and whether it is complete."""
    reader = RecordingReader(path)
    return [item.seq for item in reader], reader.complete


class Quiet:
    """A subscriber with one batch, which reads the unfinished file at its third turn."""

    stopped, unread = False, 0

    def __init__(self, part):
        self.turns, self.part, self.seen = 0, part, None

    def items(self, seconds):
        """Yield a batch at the first turn; `seconds` must be short."""
        assert seconds <= 1
        self.turns += 1
        if self.turns == 1:
            yield Delivery(0, 0, encode(batch(stored(1, 2))))
        if self.turns == 3:
            self.seen = list(RecordingReader(self.part))
            self.stopped = True

    def drain(self):
        """Return an empty iterator."""
        return iter(())


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_single_batch_is_in_the_unfinished_file(tmp_path, suffix):
    """A batch can be read from the unfinished file, even if no other batch follows."""
    out = tmp_path / f"r.jsonl.{suffix}"
    quiet = Quiet(f"{out}.part")
    with RecordingWriter(out) as writer:
        tally = record(quiet, writer)
    assert quiet.seen == [Received(batch(stored(1, 2)), 0, 0)]
    assert (tally.batches, tally.stored) == (1, 2)


@pytest.mark.parametrize(("most", "written"), [(None, [0, 1, 2]), (2, [0, 1]), (1, [0])])
def test_received_batches_are_written_at_the_end(tmp_path, most, written):
    """Batches that are received but not read when a recording is stopped are in the file.

    No more batches are written than are asked for.
    """
    left = [Delivery(0, 1, PAYLOAD), Delivery(0, 2, PAYLOAD)]
    with RecordingWriter(tmp_path / "r.jsonl") as writer:
        record(Played([Delivery(0, 0, PAYLOAD)], left=left), writer, batches=most)
    assert batch_numbers(tmp_path / "r.jsonl") == (written, True)


def test_a_recording_ends_before_what_was_not_read_in_time(tmp_path):
    """Batches that came last and were not read are told, and are neither gaps nor missing."""
    played, told = Played([Delivery(0, 0, PAYLOAD)]), []
    played.unread = 75
    with RecordingWriter(tmp_path / "r.jsonl") as writer:
        tally = record(played, writer, warn=told.append)
    assert (tally.gaps, tally.missing) == (0, 0)
    assert batch_numbers(tmp_path / "r.jsonl") == ([0], True)
    assert told == [
        "75 messages that came last were not read in time: the recording ends before them"
    ]


def test_pieces_are_whole_and_continue_after_a_kill(tmp_path):
    """Each piece is a complete recording, and a later run continues their numbers.

    It counts a piece that a killed run has left.
    """
    part = tmp_path / "a.b-000004.jsonl.gz.part"
    for run in range(2):
        turns = ([Delivery(0, index, PAYLOAD)] for index in range(2))
        with RecordingWriter(tmp_path / "a.b.jsonl.gz", rotate_seconds=1e-9) as writer:
            record(Played(*turns), writer)
        assert writer.pieces == 2
        if not run:
            part.write_bytes(b"left by a kill")
    names = [f"a.b-00000{number}.jsonl.gz" for number in (1, 2, 5, 6)]
    assert sorted(tmp_path.iterdir()) == sorted([part, *map(tmp_path.joinpath, names)])
    assert [batch_numbers(tmp_path / name) for name in names] == [([0], True), ([1], True)] * 2


def test_a_piece_ends_at_its_size(tmp_path):
    """A piece that has its size is followed by the next, unless it has no batch."""
    with RecordingWriter(tmp_path / "r.jsonl", rotate_bytes=1) as writer:
        writer.flush()
        writer._sink.hexdigest()
        writer.rotate()
        writer.batch(batch(stored(1)), 0)
        writer.rotate()
    assert [path.name for path in tmp_path.iterdir()] == ["r-000001.jsonl"]


def test_an_exception_keeps_the_batches_in_the_part_file(tmp_path):
    """If a recording ends by an exception, its batches are in the `.part` file."""
    writer = RecordingWriter(tmp_path / "r.jsonl.gz")
    writer.batch(batch(stored(1)), 0)
    with pytest.raises(RuntimeError), writer:
        raise RuntimeError
    assert batch_numbers(tmp_path / "r.jsonl.gz.part") == ([0], False)


def test_a_line_that_readers_refuse_is_a_gap(tmp_path, monkeypatch):
    """A batch whose line is too long for readers is recorded as lost."""
    limits = {"_LONG_LINE": 0, "LONGEST_LINE": 300}
    for name, limit in limits.items():
        monkeypatch.setattr(f"kvcore.untrusted.{name}", limit)
    large = encode(batch(stored(*range(100))))
    with RecordingWriter(tmp_path / "r.jsonl") as writer:
        record(Played([Delivery(0, 0, large), Delivery(0, 1, PAYLOAD)]), writer)
    monkeypatch.undo()
    lost, received = RecordingReader(tmp_path / "r.jsonl")
    assert isinstance(lost, Lost)
    assert "the line is longer than 300 bytes" in lost.why
    assert received.seq == 1


def test_only_a_few_unread_events_are_reported_and_others_counted(tmp_path):
    """Of many events that cannot be read a few are reported, and the number of others."""
    warnings = []
    odd = encode(batch(*[stored(1)] * 20)).replace(b"BlockStored", b"BlockStowed")
    with RecordingWriter(tmp_path / "r.jsonl") as writer:
        record(Played([Delivery(0, 0, odd)]), writer, warn=warnings.append)
    assert len(warnings) == 6
    assert warnings[-1].endswith("an event cannot be read: and 15 others of the batch")


def test_memory_does_not_grow_with_time(tmp_path):
    """The memory of a recording does not grow with its batches, gaps and restarts."""
    sequencer, held = BatchSequencer(0), []

    def stream():
        for index in range(4000):
            yield from sequencer.receive(index % 700 + index % 7, PAYLOAD + b"")
            if index in (2000, 3999):
                gc.collect()
                held.append(sys.getallocatedblocks())

    with RecordingWriter(tmp_path / "r.jsonl") as writer:
        tally = record(Played(stream()), writer)
    assert tally.gaps > 100
    assert tally.restarts > 100
    assert held[1] - held[0] < 1000
