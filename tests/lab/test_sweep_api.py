"""`kvcore.sweep`: the cells of a file, or of options, with and without a journal."""

import pytest

import kvcore
from kvcore import Request
from kvcore.workloads import RequestList
from kvcore_lab.sweep import Grid, Plan, sweep
from kvcore_lab.sweep.cells import CellRunner
from kvcore_lab.sweep.executors import ThisProcess

GRID = {"workload": "zipf:requests=40,prefixes=4", "eviction": ["lru", "mru"], "blocks": 60}


def test_options_and_a_file_give_the_same_rows(tmp_path):
    """The options of a sweep may be arguments, or stand in its file."""
    (tmp_path / "grid.toml").write_text(
        f'mode = "compare"\nworkload = "{GRID["workload"]}"\neviction = ["lru", "mru"]\n'
        "blocks = 60\n"
    )
    found = kvcore.sweep(mode="compare", **GRID)
    assert [row["eviction"] for row in found.rows] == ["lru", "mru"]

    def figures(result):
        return [(row["eviction"], row["hit_blocks"]) for row in result.rows]

    assert figures(kvcore.sweep(tmp_path / "grid.toml")) == figures(found)
    with pytest.raises(kvcore.InputError, match="leave blocks out"):
        kvcore.sweep(tmp_path / "grid.toml", blocks=60)


def test_a_journal_keeps_finished_cells(tmp_path):
    """With a journal, a second sweep runs nothing."""
    options = {"mode": "compare", "journal": tmp_path / "journal.jsonl", **GRID}
    assert kvcore.sweep(**options).ran == 2
    again = kvcore.sweep(**options)
    assert (again.found, again.ran) == (2, 0)


def test_requests_of_one_id_are_replayed_without_a_clock():
    """Two turns of a session may have one id where no clock tells them apart."""
    names = [n % 40 for n in range(80)]
    turns = RequestList([
        Request(id=name, session=str(name), keys=[name], prompt_tokens=16, key_tokens=16)
        for name in names
    ])  # fmt: skip
    (row,) = kvcore.sweep(mode="compare", workload=turns, blocks=60).rows
    assert (row["error"], row["hit_blocks"]) == (None, 40)


class Backwards:
    """An executor that runs the last task first."""

    def run(self, tasks):
        """Yield the outcomes of the tasks, the last first."""
        yield from map(CellRunner(), reversed([*tasks]))


def test_notes_come_in_the_order_of_the_cells():
    """Notes of a sweep on its cells do not depend on which of them ends first."""
    options = {
        "workload": "zipf:requests=9,prefix_tokens=9000",
        "model": ["llama-3-8b", "gpt2"],
    }
    notes = [
        sweep(Plan.from_grid(Grid(**options)), executor=each).notes
        for each in (ThisProcess(), Backwards())
    ]
    assert notes[0] == notes[1]
    assert ["gpt2" in note for note in notes[0]] == [False, True]
