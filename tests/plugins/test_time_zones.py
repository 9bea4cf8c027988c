"""Times without a zone: what they are read as, and the hour that comes twice."""

import json
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from kvcore.errors import InputError
from kvcore.plugins.manager import Plugins
from kvcore_plugins.workload import Chat, Lengths, Mooncake

BERLIN = ZoneInfo("Europe/Berlin")
CHANGE = datetime.fromisoformat("2026-10-25T00:00:00+00:00")
MINUTES = range(0, 180, 5)  # from 2:00, over the same hour again, to 4:00


def local(minutes):
    """Return a time of so many minutes after the first 2:00, as a log in Berlin has it."""
    return (
        (CHANGE + timedelta(minutes=minutes)).astimezone(BERLIN).strftime("%Y-%m-%d %H:%M:%S")
    )


def as_table(times):
    """Return a table of requests at these times."""
    return Lengths, "time,input,output\n" + "".join(f"{time},9,3\n" for time in times)


def as_two_columns(times):
    """Return a table whose dates and times of day are apart."""
    rows = "".join(f"{time.replace(' ', ',')},9,3\n" for time in times)
    return Lengths, "date,time,input,output\n" + rows


def as_chats(times):
    """Return a log of chats."""
    return Chat, "".join(
        json.dumps({"ts": time, "prompt": "hi there"}) + "\n" for time in times
    )


def as_keys(times):
    """Return a trace in Mooncake's format."""
    fields = {"input_length": 9, "output_length": 3, "hash_ids": []}
    return Mooncake, "".join(json.dumps({"timestamp": t} | fields) + "\n" for t in times)


FORMS = pytest.mark.parametrize("form", [as_table, as_two_columns, as_chats, as_keys])


def read(tmp_path, form, times, **options):
    """Return the minutes of arrivals, and the notes."""
    reader, text = form(times)
    path = tmp_path / "log"
    path.write_text(text)
    workload = reader(path, **options)
    return [request.arrival // (60 * 10**9) for request in workload], list(workload.notes)


@FORMS
def test_the_hour_that_comes_twice_is_told_apart(tmp_path, form):
    """With a zone, the rows of the repeated hour are at their times, as a note says."""
    minutes, notes = read(tmp_path, form, map(local, MINUTES), tz="Europe/Berlin")
    assert minutes == [*MINUTES]
    told = (
        "times of an hour that came twice in Europe/Berlin, told apart by the order of rows: 24"
    )
    assert told in notes


@pytest.mark.parametrize(
    "order", [[0, 20, 40, 37, 60, 80, 77, 125], [*reversed(range(0, 120, 5))]]
)
def test_late_rows_and_newest_first_are_told_apart_too(tmp_path, order):
    """A row that is late by minutes, or a file that begins with the latest, has its hour."""
    times = ["2026-10-25 03:00:00", *map(local, order)]
    minutes, _ = read(tmp_path, as_table, times[order[0] == 0 :], tz="Europe/Berlin")
    assert minutes[: len(order)] == sorted(order)


@FORMS
def test_times_without_a_zone_are_said_to_be_read_as_utc(tmp_path, form):
    """Without the option a note says so, and `tz=UTC` agrees with it."""
    times = ["2026-05-01 10:00:00", "2026-05-01 10:01:00"]
    minutes, notes = read(tmp_path, form, times)
    assert minutes == [0, 1]
    assert any(
        "without a zone are read as UTC: tz=ZONE says otherwise" in note for note in notes
    )
    _, notes = read(tmp_path, form, times, tz="UTC")
    assert not any("zone" in note for note in notes)


def test_times_with_a_zone_are_not_noted(tmp_path):
    """Texts with a zone need no option, and one that is given is said to change nothing."""
    times = ["2026-05-01 10:00:00Z", "2026-05-01 12:01:00+02:00"]
    minutes, notes = read(tmp_path, as_table, times)
    assert minutes == [0, 1]
    assert not any("zone" in note for note in notes)
    _, notes = read(tmp_path, as_table, times, tz="Europe/Berlin")
    assert "tz=Europe/Berlin changes nothing: no time in 'time' is without a zone" in notes


def test_a_jump_back_of_an_hour_is_named_as_a_clock_change(tmp_path):
    """Without a zone the jump is noted with its time; other jumps speak against it."""
    _, notes = read(tmp_path, as_table, map(local, MINUTES))
    assert any("go back by an hour at '2026-10-25 02:00:00'" in note for note in notes)
    late = [*map(local, MINUTES), "2026-10-25 00:10:00"]
    _, notes = read(tmp_path, as_table, late)
    assert not any("go back" in note for note in notes)


def test_a_clock_change_with_more_rows_than_are_sorted_is_named_in_the_error(tmp_path):
    """Where the repeated hour is too long to sort, the error says which option reads it."""
    times = [local(n / 10) for n in range(1200)]
    with pytest.raises(InputError, match=r"as at a clock change: tz=ZONE, such as"):
        read(tmp_path, as_table, times)
    minutes, _ = read(tmp_path, as_table, times, tz="Europe/Berlin")
    assert minutes == [n // 10 for n in range(1200)]


@pytest.mark.parametrize("name", ["lengths", "chat", "mooncake"])
@pytest.mark.parametrize("zone", ["Mars/Olympus", "../etc", ""])
def test_a_zone_that_is_none_is_refused(tmp_path, name, zone):
    """A name of no time zone is an error that says what one looks like."""
    with pytest.raises(InputError, match="must be a time zone such as Europe/Berlin"):
        Plugins().build("workload", f"{name}:path={tmp_path / 'x'},tz={zone}")


def test_a_zone_is_part_of_the_digest(tmp_path):
    """Requests at other times are another workload."""
    digests = set()
    for reader, text in (form(["2026-05-01 10:00:00"]) for form in (as_table, as_keys)):
        path = tmp_path / "log"
        path.write_text(text)
        digests |= {reader(path, tz=zone).digest for zone in (None, "Europe/Berlin", "UTC")}
    assert len(digests) == 6
