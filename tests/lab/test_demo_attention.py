"""Attention of one head, computed by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvcore import InputError
from kvcore_lab.demo.one_head import WORKED_EXAMPLE, OneHead, head_sections

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_head_attention.py"


def rounded(numbers):
    """Return numbers rounded to three places."""
    return [round(number, 3) for number in numbers]


def test_every_step_equals_the_worked_example():
    """Scores, exponentials, their sum, weights and output are those computed by hand."""
    head = WORKED_EXAMPLE
    assert head.scores == [2, 1, 0, -1]
    assert rounded(head.exponentials) == [7.389, 2.718, 1, 0.368]
    assert round(head.total, 3) == 11.475
    assert rounded(head.weights) == [0.644, 0.237, 0.087, 0.032]
    assert rounded(head.output) == [7.711, 0]


@pytest.mark.parametrize(
    ("keys", "values", "problem"),
    [
        ([], [], "0 keys and 0 values"),
        ([[1, 2]], [], "1 keys and 0 values"),
        ([[1, 2], [1]], [[1], [1]], "each key must have 2 numbers"),
        ([[1, 2], [1, 2]], [[1], [1, 2]], "values must all have as many numbers"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_refused(keys, values, problem):
    """Keys and values that do not fit are refused with what is given and what would fit."""
    with pytest.raises(InputError, match=problem):
        OneHead([1, 2], keys, values)


def test_the_report_has_a_row_a_token_and_the_sums():
    """The report has a row for each token and one for the sums.

    From left to right: key, score, exponential, weight, value, weighted value.
    """
    _, table, _ = head_sections(WORKED_EXAMPLE)
    rows = table.rows
    assert len(rows) == 5
    assert rows[0] == ["0", "[2, 0]", "2", "7.389", "0.644", "[10, 0]", "[6.439, 0]"]
    assert rows[-1] == ["sum", "", "", "11.475", "1", "", "[7.711, 0]"]
    assert all(len(row) == 7 for row in rows)


def test_the_example_prints_the_steps(tmp_path):
    """`examples/one_head_attention.py` prints these numbers, and those of the next token."""
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    numbers = [line[44:].split() for line in done.stdout.splitlines()]
    assert numbers == [
        ["2", "1", "0", "-1"],
        ["7.389", "2.718", "1.000", "0.368"],
        ["11.475"],
        ["0.644", "0.237", "0.087", "0.032"],
        ["7.711", "0.000"],
        ["3.595", "1.618"],
    ]
