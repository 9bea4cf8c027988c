"""The workload `azure`: tables of times and lengths as Azure publishes them."""

import pytest

from kvcore.errors import InputError
from kvcore.workloads import recognise
from kvcore_plugins.workload import Azure, Lengths
from kvcore_plugins.workload.usage import UNKNOWN_PROMPTS

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"


def write(path, *rows, newline="\r\n"):
    """Write `rows` to `path`, with no newline after the last."""
    path.write_bytes(newline.join(rows).encode())
    return path


def test_arrivals_count_from_the_first_row(tmp_path):
    """Arrivals are exact to the last digit, and relative to the first row."""
    path = write(tmp_path / "t.csv", HEADER, ROW, "2023-11-16 18:16:00.0000001,396,109")
    first, second = Azure(path)
    assert (first.arrival, second.arrival) == (0, 13_319_410_100)
    assert (first.prompt_tokens, first.output_tokens) == (374, 44)
    assert (first.id, second.id) == (0, 1)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_file_may_have_either_line_end(tmp_path, newline):
    """A file may have either line end, with or without one after the last row."""
    for rows in ((HEADER, ROW), (HEADER, ROW, "")):
        (request,) = Azure(write(tmp_path / "t.csv", *rows, newline=newline))
        assert (request.prompt_tokens, request.output_tokens) == (374, 44)


@pytest.mark.parametrize(
    ("stamp", "gap"),
    [
        ("2024-05-10 00:00:00+00:00", 1_000_000_000),
        ("2024-05-10 00:00:00.009930", 990_070_000),
        ("2024-05-10 00:00:00.009930001+00", 990_069_999),
        ("20240510T000000.009930001Z", 990_069_999),
    ],
)
def test_times_in_other_notations_are_read(tmp_path, stamp, gap):
    """Times without a fraction, with six digits and with a UTC offset are read."""
    rows = f"{stamp},1,0", "2024-05-10 00:00:01.0000000,1,0"
    _, second = Azure(write(tmp_path / "t.csv", HEADER, *rows))
    assert second.arrival == gap


def test_rows_are_sorted_by_time(tmp_path):
    """Rows in another order are sorted with a note; columns may have any order."""
    rows = "44,2023-11-16 18:15:47,374", "9,2023-11-16 18:15:46.25,20"
    path = write(tmp_path / "t.csv", "GeneratedTokens,TIMESTAMP,ContextTokens", *rows)
    workload = recognise(path, [Azure, Lengths])
    first, second = workload
    assert (first.id, first.prompt_tokens, first.output_tokens) == (1, 20, 9)
    assert (first.arrival, second.arrival) == (0, 750_000_000)
    late = "rows that stood after later ones, sorted by 'TIMESTAMP': 1"
    assert workload.notes == [late, UNKNOWN_PROMPTS]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("yesterday,1,1", "field 'TIMESTAMP': expected a time such as .*, got \"yesterday\""),
        ("2023-13-16 18:15:47,1,1", "field 'TIMESTAMP': expected a time such as"),
        (f"{ROW[:27]},0,1", "field 'ContextTokens': expected .* at least 1, got \"0\""),
        (f"{ROW[:27]},many,1", "field 'ContextTokens': expected a whole number"),
        (f"{ROW[:27]},1,-1", "field 'GeneratedTokens': expected .* at least 0, got \"-1\""),
        (f"{ROW[:27]},1", "field 'GeneratedTokens': .* the field is missing"),
        (f"{ROW},9", "field 'GeneratedTokens': expected the last column, got \"44,9\""),
    ],
)
def test_bad_field_is_named(tmp_path, row, complaint):
    """A bad field raises InputError with file, line, column and value."""
    path = write(tmp_path / "t.csv", HEADER, ROW, row)
    with pytest.raises(InputError, match=rf"t\.csv:3: {complaint}"):
        list(Azure(path))
