"""Statistics of block residency, rebuilt from handmade and damaged traces."""

from __future__ import annotations

import pytest
from helpers import traces

from kvcore import TraceError
from kvcore_replay.state.residency import rebuild_residency as residency


@pytest.mark.parametrize("event", ["HIT", "EVICT", "SPLIT", "COMMIT"])
def test_a_line_of_an_unknown_span_names_file_and_line(event, tmp_path):
    """A line about an unknown span or sequence raises TraceError with file and line."""
    lines = traces.lines(traces.record(tmp_path / "run.jsonl"))
    wrong = next(line for line in lines if line["event"] == event)
    wrong |= {"span": 999, "seq": 999} if event == "COMMIT" else {"span": 999}
    with pytest.raises(TraceError, match=rf"run\.jsonl:{wrong['n'] + 1}: {event}: no "):
        residency(traces.seal(tmp_path / "run.jsonl", lines))
