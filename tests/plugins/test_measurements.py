"""Reading measured steps: columns by name, and errors with their position."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import InputError
from kvcore.serving import StepWork
from kvcore_plugins.latency.measured_steps import (
    LONGEST,
    SHORTEST,
    MeasuredStep,
    read_steps,
    write_steps,
)

HEADER = "prefill_tokens,decode_sequences,context_tokens,seconds"


@pytest.fixture
def read(tmp_path):
    """Return a function that reads the steps in a text."""

    def read(text):
        path = tmp_path / "steps.csv"
        path.write_text(text)
        return read_steps(path)

    return read


def test_each_row_is_a_step(read):
    """Each row is a step in picoseconds, exactly; blank lines are ignored."""
    assert read(f"{HEADER}\n512,0,0,0.0125\n\n0, 8, 16000, 5e-3\n1,0,0,8401.312572267") == [
        MeasuredStep(2, 512, 0, 0, 12_500_000_000),
        MeasuredStep(4, 0, 8, 16_000, 5_000_000_000),
        MeasuredStep(5, 1, 0, 0, 8_401_312_572_267_000),
    ]


@given(st.floats(SHORTEST, LONGEST))
def test_what_is_read_can_be_written_and_read_again(seconds):
    """Any time that a file may have is one that `write_steps` writes, to the nanosecond."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "steps.csv")
        path.write_text(f"{HEADER}\n512,0,0,{seconds!r}\n")
        (step,) = read_steps(path)
        with path.open("w") as file:
            write_steps(file, [step])
        (again,) = read_steps(path)
    assert 0 <= step.time - again.time < 1_000


def test_attended_pairs_default_to_one_chunk(read):
    """Without a column of attended pairs, prompt tokens are one chunk at a prompt's start."""
    (known,) = read("attended_pairs," + HEADER + "\n50,4,2,3,1\n")
    (unknown,) = read(f"{HEADER}\n4,2,3,1\n")
    assert (known.pairs, unknown.pairs) == (50, 1 + 2 + 3 + 4)


def test_work_in_windows_follows_from_the_attended_pairs():
    """The work per window follows from the chunk's distance to the start of its prompt.

    The number of attended pairs implies that distance.
    """
    step = MeasuredStep(2, 10, 4, 400, 1, pairs=55 + 10 * 100)
    assert step.work((None, 8, 103)) == StepWork(
        10, (1055, 80, 101 + 102 + 8 * 103), 4, (400, 32, 400)
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "a,b\n1,2\n",
            "steps.csv:1: column 'prefill_tokens' is missing; expected a header with ",
        ),
        (f"{HEADER},seconds\n", "steps.csv:1: column 'seconds' is there twice; expected"),
        (f"{HEADER}\n", "steps.csv: no rows after the header"),
        (f"{HEADER}\n1,2,3\n", "steps.csv:2: expected 4 cells, as in the header, got 3"),
        (f"{HEADER}\n1,2,3,4,5\n", "steps.csv:2: expected 4 cells, as in the header, got 5"),
        (f'{HEADER}\n1,2,3,"4\n', "steps.csv:2: not CSV in UTF-8: a quoted cell has no end"),
        (
            f"{HEADER}\n1,2,3,4\n-1,2,3,4\n",
            "steps.csv:3: prefill_tokens: expected a whole number",
        ),
        (f"{HEADER}\n1,2.5,3,4\n", "decode_sequences: expected a whole number, at least 0"),
        (f"{HEADER}\n1,2,{10**18},4\n", "context_tokens: expected a whole number"),
        (
            f"{HEADER}\n1,2,,4\n",
            "context_tokens: expected a whole number, at least 0 and below",
        ),
        (
            f"{HEADER}\n1,2,3,fast\n",
            "steps.csv:2: seconds: expected seconds, at least 1e-09 and",
        ),
        (f"{HEADER}\n1,2,3,0\n", "got '0'"),
        (f"{HEADER}\n1,2,3,-0.1\n", "got '-0.1'"),
        (f"{HEADER}\n1,2,3,nan\n", "got 'nan'"),
        (f"{HEADER}\n1,2,3,inf\n", "got 'inf'"),
        (f"{HEADER}\n1,2,3,9e-10\n", "at least 1e-09 and up to"),
        (f"{HEADER}\n1,2,3,1e9\n", "up to 1,000,000, such as 0.0125, got '1e9'"),
    ],
)
def test_wrong_files_are_refused_with_line_and_column(read, text, problem):
    """A wrong file raises InputError with the line, the column, and what was expected."""
    with pytest.raises(InputError) as caught:
        read(text)
    assert problem in str(caught.value)


def test_other_encodings_are_refused(tmp_path):
    """A file that is not UTF-8 raises InputError with the line."""
    path = tmp_path / "steps.csv"
    path.write_bytes(f"{HEADER}\n1,2,3,\xff\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"steps\.csv:2: not CSV in UTF-8"):
        read_steps(path)
