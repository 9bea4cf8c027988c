"""Tests that the pages on events and workloads have an entry for each option and field."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from kvcore.plugins.base import options_of
from kvcore_events.cli import record
from kvcore_events.recording import Tally
from kvcore_events.sequencer import Delivery, Gap, InvalidMessage, Restart
from kvcore_plugins.workload import Lengths, LMCache
from kvcore_replay.cli.export import export

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def section(page, title):
    """Return the text below a heading of a page of the reference."""
    text = (REFERENCE / page).read_text("utf-8")
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def entries(text):
    """Return the names in code in the first cells of tables."""
    cells = re.findall(r"^\| (`.*?) \|", text.replace(r"\|", "/"), re.MULTILINE)
    return {entry.split()[0] for cell in cells for entry in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("command", [export, record], ids=lambda command: command.name)
def test_each_option_has_an_entry(command):
    """Each option of the verb is in its table."""
    options = {name for option in command.params for name in option.opts if name[0] == "-"}
    assert options <= entries(section("cli.md", f"`kvcore {command.name}`"))


def test_each_count_of_a_recording_has_an_entry():
    """Each field of the JSON document of `record` is in its table."""
    fields = {field.name for field in attrs.fields(Tally)}
    assert fields < entries(section("cli.md", "`kvcore record`"))


def test_each_item_has_an_entry():
    """Each item that a subscriber yields is in a table, and the text names its fields."""
    text = section("kv-events.md", "Transport")
    items = (Delivery, Gap, Restart, InvalidMessage)
    assert entries(text) == {item.__name__ for item in items}
    assert not [f.name for item in items for f in attrs.fields(item) if f.name not in text]


@pytest.mark.parametrize("workload", [Lengths, LMCache], ids=lambda workload: workload.name)
def test_each_option_of_a_workload_has_an_entry(workload):
    """Each option of the workload is in its table."""
    options = {field.name for field in options_of(workload)}
    assert options <= entries(section("workloads.md", workload.name))
