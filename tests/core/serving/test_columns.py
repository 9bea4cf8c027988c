"""Columns of a log: the newest rows are in memory, older ones in a file, read as one list."""

from __future__ import annotations

import os
import pickle
from array import array
from copy import deepcopy

import hypothesis.strategies as st
import pytest
from helpers.jobs import job
from helpers.serving import Even, ask
from hypothesis import example, given

import kvcore
from kvcore import files
from kvcore.histogram import PERCENTS, nearest_rank
from kvcore.serving import Percentiles, stats
from kvcore.serving.stats import Column, RunLog, Times

ROWS = 4


@pytest.fixture(autouse=True, scope="module")
def _short():
    """Limit the rows in memory to four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "ROWS", ROWS)
        yield


def filled(cells, typecode=""):
    """Return a column of `cells`."""
    column = Column(typecode)
    column.extend(cells)
    return column


NAMES = ["a", 1, None, 2**70, "", "b", 3, 4, "c", None]
NUMBERS = [5, -1, 2**62, 0, 5, 7, -(2**62), 8, 9, 10]


@pytest.mark.parametrize(("cells", "typecode"), [(NAMES, ""), (NUMBERS, "q")])
@pytest.mark.parametrize("length", [0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 10])
def test_a_column_reads_as_its_list(cells, typecode, length):
    """A column reads as the list of its cells: iterated, indexed, sliced, counted, searched."""
    cells = cells[:length]
    column = filled(cells, typecode)
    assert len(column.newest) < ROWS
    assert list(column) == cells
    assert len(column) == length
    assert [column[row] for row in range(-length, length)] == cells + cells
    assert column[1:9:2] == cells[1:9:2]
    assert column[::-1] == cells[::-1]
    for cell in cells:
        assert column.count(cell) == cells.count(cell)
        assert column.index(cell) == cells.index(cell)


def test_appending_cells_equals_extending():
    """Appending one cell at a time gives the same column as `extend`."""
    column = Column("q")
    for length, number in enumerate(NUMBERS, 1):
        column.append(number)
        assert len(column.newest) == length % ROWS
    assert column == NUMBERS


def test_the_mean_gap_of_a_request_is_from_its_first_token_to_its_end():
    """The gaps of n tokens are n - 1; a request of one token, or without an end, has none."""
    gaps = stats.mean_gaps([5, 0, 3, -1], [25, 0, 3, -1], [3, 2, 1, 2])
    assert gaps == [10_000, 0, -1, -1]


def test_merged_gaps_are_those_of_both_runs():
    """Gaps of another run are added, those too that neither run has added up yet."""
    gaps, other = stats.TokenGaps(), stats.TokenGaps()
    gaps.pending.append((5, 0, 1, 1))
    other.pending.append((7, 0, 1, 2))
    gaps.merge(other)
    assert (gaps.count, gaps.percentiles(1).mean) == (3, 19 / 3)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_rows_of_a_log_that_come_as_columns_move_to_the_file(as_bytes):
    """A log takes rows as lists, or as bytes of integers, and keeps fewer than `ROWS`."""
    log = RunLog(1)
    for first in (0, ROWS):
        cells = {name: list(range(first, first + ROWS)) for name in log.columns()}
        if as_bytes:
            cells |= {
                name: array(column.newest.typecode, cells[name]).tobytes()
                for name, column in log.columns().items()
                if isinstance(column.newest, array)
            }
        log.extend(cells)
        for column in log.columns().values():
            assert column == list(range(first + ROWS))
            assert not column.newest


def test_rows_that_come_at_once_move_to_the_file():
    """A log keeps fewer than `ROWS` rows in memory, however many come at once."""
    log = RunLog(1)
    log.extend({name: list(range(3 * ROWS + 1)) for name in log.columns()})
    for column in log.columns().values():
        assert column == list(range(3 * ROWS + 1))
        assert len(column.newest) == 1


def test_requests_that_end_move_to_the_file():
    """A log keeps fewer than `ROWS` of the requests that have ended in memory."""
    log = RunLog(1)
    for now in range(ROWS + 1):
        log.ended(job(ask(now)), now)
    assert log.finish == log.ids == list(range(ROWS + 1))
    assert {len(column.newest) for column in log.columns().values()} == {1}


def sent(log):
    """Return a log as another process gets it."""
    return pickle.loads(pickle.dumps(log))  # noqa: S301 - stored by this test


@pytest.mark.parametrize("length", [2, ROWS, 3 * ROWS + 1])
@pytest.mark.parametrize("copied", [deepcopy, sent])
def test_a_log_is_copied_with_the_rows_of_its_file(length, copied):
    """A log can be copied and sent to another process, whose columns are of the same types."""
    log = RunLog(1)
    log.extend({name: list(range(length)) for name in log.columns()})
    for name, column in copied(log).columns().items():
        original = getattr(log, name)
        assert column == original
        assert type(column.newest) is type(original.newest)


def test_columns_are_equal_by_their_cells():
    """A column equals columns, lists and tuples with the same cells, and is not hashable."""
    column = filled(NUMBERS, "q")
    assert column == filled(NUMBERS)
    assert column == tuple(NUMBERS)
    assert column != NUMBERS[:-1]
    assert column != [*NUMBERS[:-1], 11]
    assert column != 5
    with pytest.raises(TypeError, match="unhashable"):
        hash(column)


@pytest.mark.parametrize("row", [10, -11])
def test_an_index_beyond_the_ends_raises_index_error(row):
    """An index beyond the ends raises IndexError with the length."""
    with pytest.raises(IndexError, match=f"row {row} of 10"):
        filled(NUMBERS, "q")[row]


def test_a_missing_cell_raises_value_error():
    """`index` of a cell that is in no row raises ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 - that of any sequence
        filled(NAMES).index("z")


def test_the_repr_has_the_first_cells_and_the_length():
    """The repr of a column has its first eight cells and its length."""
    assert repr(filled(NUMBERS)) == f"<Column of 10: {NUMBERS[:8]}>"


def full(*_):
    """Raise the error of a full disk."""
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_rows_in_memory(monkeypatch):
    """If the file cannot be written, a column keeps all rows in memory and reads the same."""
    monkeypatch.setattr(os, "pwrite", full)
    for column, cells in ((filled(NUMBERS, "q"), NUMBERS), (filled(NAMES), NAMES)):
        assert column == cells
        assert [type(part) for part in column._parts] == [bytes, bytes]


def test_all_columns_share_one_file():
    """All columns share one file, as a process may have few open.

    It is closed when the last column is gone.
    """
    first = files.Spool.shared()
    columns = filled(NUMBERS, "q"), filled(NAMES)
    assert {spool for column in columns for spool, *_ in column._parts} == {first}
    number = first._file.fileno()
    del first
    assert os.fstat(number)
    del columns
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_forked_process_has_its_own_file(monkeypatch):
    """A forked process gets its own file, as it would overwrite the rows of its parent."""
    parents = files.Spool.shared()
    monkeypatch.setattr(os, "getpid", lambda: parents.process + 1)
    assert files.Spool.shared() is not parents


SAMPLES = st.lists(
    st.one_of(st.integers(0, 30), st.integers(0, 10**15)), min_size=ROWS + 1, max_size=80
)


@given(SAMPLES, st.sampled_from([2, 16, 1 << 14]))
@example([*range(10)], 2)  # both buckets are divided again, and a rank is that of their border
def test_percentiles_of_many_samples_are_exact(samples, buckets):
    """Percentiles equal those of the sorted samples, whatever the number of buckets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "_BUCKETS", buckets)
        found = Percentiles.from_samples(Times(lambda: iter(samples)), 1)
    ordered = sorted(samples)
    ranked = [ordered[nearest_rank(percent, len(samples)) - 1] for percent in PERCENTS]
    assert found == Percentiles(sum(samples) / len(samples), *ranked)


def test_reports_do_not_depend_on_the_rows_in_memory(monkeypatch, tmp_path):
    """The summary, requests and files of a run do not depend on the rows kept in memory.

    Rejected requests are among them.
    """
    requests = [
        ask(f"r{index}", index * 10, prompt=9000 if index == 7 else 4 + index, output=3)
        for index in range(40)
    ]

    def outcome(name):
        cache = kvcore.KVCache(100, 4, accounting="tokens", key_tokens=4)
        run = kvcore.serving.simulate(requests, cache=cache, latency=Even())
        run.write(tmp_path / name)
        summary = {**run.summary(), "wall_s": 0}
        lines = (tmp_path / name / "requests.jsonl").read_bytes()
        return summary, run.requests, lines

    short = outcome("short")
    monkeypatch.setattr(stats, "ROWS", 1 << 16)
    assert short == outcome("long")
    assert short[1]["status"].count("rejected") == 1
