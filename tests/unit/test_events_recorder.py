"""From a subscriber to a file, with a stand-in for the subscriber."""

import pytest
from helpers.kv_events import batch, stored

from kvcore.kv_events import (
    Delivery,
    Received,
    RecordingReader,
    RecordingWriter,
    encode,
    record,
)


class Quiet:
    """Hears one batch and then nothing; reads the unfinished file at its third turn."""

    stopped = False

    def __init__(self, part):
        self.turns, self.part, self.seen = 0, part, None

    def items(self, seconds):
        """Yield what is heard within `seconds`, which must be no long time."""
        assert seconds <= 1
        self.turns += 1
        if self.turns == 1:
            yield Delivery(0, 0, encode(batch(stored(1, 2))))
        if self.turns == 3:
            self.seen = list(RecordingReader(self.part))
            self.stopped = True


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_quiet_stream_is_in_the_file(tmp_path, suffix):
    """A batch that nothing follows can soon be read, should the process be killed."""
    out = tmp_path / f"r.jsonl.{suffix}"
    quiet = Quiet(f"{out}.part")
    with RecordingWriter(out) as writer:
        tally = record(quiet, writer)
    assert quiet.seen == [Received(batch(stored(1, 2)), 0, 0)]
    assert (tally.batches, tally.stored) == (1, 2)
