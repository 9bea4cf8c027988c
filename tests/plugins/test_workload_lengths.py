"""The workload `lengths`: tables of prompt and output lengths, and benchmark results."""

import json

import pytest

from kvcore.errors import InputError
from kvcore.plugins.manager import Plugins
from kvcore.units import INT64_LIMIT
from kvcore.workloads import recognise
from kvcore_plugins.workload import Azure, Chat, Lengths
from kvcore_plugins.workload.usage import UNKNOWN_PROMPTS

SERVEGEN = "request_id,timestamp,input_tokens,output_tokens"


def write(path, *rows):
    """Write the lines of a table."""
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize(
    ("header", "row"),
    [
        (SERVEGEN, "0,1.5,10,3"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens", "1.5,GPT-4,10,3,13"),
        ("arrived_at\tnum_prefill_tokens\tnum_decode_tokens", "1.5\t10\t3"),
        ("time;Input Length;Output Length;", "1.5;10;3;"),
        (',"arrival_time","prompt_len","output_len"', '0, "1.5","10","3"'),
    ],
)
def test_usual_columns_are_found(tmp_path, header, row):
    """Tables of ServeGen, BurstGPT, Vidur and similar ones need no column names."""
    path = write(tmp_path / "t", header, row)
    workload = recognise(path, [Azure, Lengths])
    assert isinstance(workload, Lengths)
    (request,) = workload
    assert (request.prompt_tokens, request.output_tokens) == (10, 3)


RESULT = {"model_id": "m", "input_lens": [10, 20], "output_lens": [3, 4]}
RESULT |= {"ttfts": [0.1, 0.2], "itls": [[0.1], []], "start_times": [7.5, 7.25]}


def result(path, **change):
    """Write the result of a benchmark with some changes."""
    path.write_text(json.dumps(RESULT | change))
    return path


def test_benchmark_results_of_vllm_are_read(tmp_path):
    """The lists of a vLLM benchmark result are columns, sorted by the time of sending."""
    workload = recognise(result(tmp_path / "r.json"), [Azure, Lengths])
    first, second = workload
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0, 20, 4)
    assert (second.arrival, second.prompt_tokens) == (250_000_000, 10)
    assert list(workload.notes) == [UNKNOWN_PROMPTS]


def test_failed_requests_of_a_benchmark_are_left_out(tmp_path):
    """Failed requests of a benchmark are omitted and counted in a note."""
    failed = result(tmp_path / "r.json", errors=["", "refused"], output_lens=[3, 0])
    workload = Lengths(failed)
    assert [request.prompt_tokens for request in workload] == [10]
    assert workload.notes == ["failed requests left out: 1", UNKNOWN_PROMPTS]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"output_lens": [1]}, "field 'output_lens': expected 2 values, as 'start_times' has"),
        ({"input_lens": [0, 1]}, r"field '\[0\].input_lens': expected .* at least 1"),
        ({"start_times": 7}, "no column that looks like 'time'; .* rate=REQUESTS_PER_SECOND"),
    ],
)
def test_bad_results_of_benchmarks_are_refused(tmp_path, change, complaint):
    """Lists of different lengths, impossible lengths and missing times raise InputError."""
    with pytest.raises(InputError, match=rf"r\.json:1: {complaint}"):
        list(Lengths(result(tmp_path / "r.json", **change)))


def test_several_results_are_refused(tmp_path):
    """A file with several benchmark results raises InputError."""
    path = result(tmp_path / "r.json")
    path.write_text(path.read_text() + "\n" + path.read_text())
    with pytest.raises(InputError, match=r"r\.json:2: a second result: give a file for each"):
        list(Lengths(path))


def test_a_table_without_times_arrives_at_a_rate(tmp_path):
    """A table without times arrives at random at `rate`, or all at once.

    A table with times refuses a rate.
    """
    path = write(tmp_path / "t.csv", "input,output", *["1,1"] * 400)
    assert isinstance(recognise(path, [Azure, Lengths]), Lengths)
    times = [request.arrival for request in Lengths(path, rate=20)]
    assert 16 * 10**9 < times[-1] < 24 * 10**9
    assert times != [request.arrival for request in Lengths(path, rate=20, seed=1)]
    assert [*Lengths(path, rate=1e-9)][-1].arrival > INT64_LIMIT  # for who serves it to refuse
    everything = Plugins().build("workload", f"lengths:path={path},rate=inf")
    assert {request.arrival for request in everything} == {0}
    path = write(tmp_path / "t.csv", SERVEGEN, "0,1.5,10,3")
    with pytest.raises(InputError, match=r"2: it has times \('timestamp'\): leave out rate=2"):
        list(Lengths(path, rate=2))


def test_columns_can_be_named(tmp_path):
    """Columns of other names can be given by options, in text as well."""
    path = write(tmp_path / "t.csv", "when,ctx,gen,who,chat", "0,7,5,ann,c1", "1,8,5,,")
    text = f"lengths:path={path},time=when,input=ctx,output=gen,tenant=who,session=chat"
    first, second = Plugins().build("workload", text)
    assert (first.prompt_tokens, first.output_tokens, first.tenant, first.session) == (
        7,
        5,
        "ann",
        "c1",
    )
    assert (second.tenant, second.session) == (None, None)


def test_sessions_and_tenants_are_found(tmp_path):
    """Usual columns of sessions and users are read, with numbers for names, and no loop."""
    path = write(tmp_path / "t.csv", f"{SERVEGEN},Session ID,user", "0,0,1,1,s,u")
    (request,) = Lengths(path)
    assert (request.session, request.tenant, request.after) == ("1", "1", None)


@pytest.mark.parametrize(
    ("unit", "times", "arrival"),
    [
        ("s", ("1711929600.0000001", "1711929600.5"), 499_999_900),
        ("ms", ("27482", "27483.25"), 1_250_000),
        ("us", ("0", "1e3"), 1_000_000),
        ("ns", ("5", "12"), 7),
        ("s", ("2024-05-10 00:00:00", "2024-05-10T00:00:00.25Z"), 250_000_000),
        ("s", ("2024-05-10 02:00:00+02:00", "2024-05-10 00:00:01.000001"), 1_000_001_000),
    ],
)
def test_times_are_read_exactly(tmp_path, unit, times, arrival):
    """Arrivals are exact to the last digit, and relative to the first row."""
    path = write(tmp_path / "t.csv", SERVEGEN, *(f"0,{time},1,1" for time in times))
    assert [request.arrival for request in Lengths(path, unit=unit)] == [0, arrival]


@pytest.mark.parametrize(
    ("header", "options"),
    [("date,time", {}), ("timestamp,date", {}), ("date,hour", {"time": "hour"})],
)
@pytest.mark.parametrize("date", ["2024-05-{:02}", "2024-05-{:02} 00:00:00"])
def test_a_date_and_a_time_of_day_are_one_time(tmp_path, header, options, date):
    """The time of a row counts from the date that another column has, and a note says so."""
    times = [(10, "9:59:59.5"), (10, "10:00"), (11, "00:00:00Z")]
    days = header.startswith("date")
    cells = [(date.format(day), time)[:: 1 if days else -1] for day, time in times]
    rows = [f"{first},{second},1,1" for first, second in cells]
    workload = Lengths(write(tmp_path / "t.csv", f"{header},isl,osl", *rows), **options)
    half = 500_000_000
    assert [request.arrival for request in workload] == [0, half, 28 * half * 3600 + half]
    name = header.replace("date", "").strip(",")
    told = [f"times are 'date' and {name!r} together", UNKNOWN_PROMPTS]
    assert list(workload.notes)[1:] == told


def test_a_time_of_day_without_its_date_is_refused(tmp_path):
    """A row whose date is missing has no time, and the error names both columns."""
    rows = ("2024-05-10,10:00:00,1,1", ",10:00:01,1,1")
    with pytest.raises(InputError, match=r"field 'time': .* and a date in 'date', got"):
        list(Lengths(write(tmp_path / "t.csv", "date,time,isl,osl", *rows)))


def test_dates_alone_and_columns_that_are_not_read_are_noted(tmp_path):
    """Notes say that requests of a day arrive at once, and which times were not read."""
    rows = ("2024-05-10,10:00 PM,1,1", "2024-05-10,11:00 PM,1,1")
    workload = Lengths(write(tmp_path / "t.csv", "date,time,isl,osl", *rows))
    assert [request.arrival for request in workload] == [0, 0]
    assert list(workload.notes)[1:] == [
        "dates without a time of day in 'date': all requests of a day arrive at its midnight",
        "'time' is not read, since it has others than times: '11:00 PM'",
        UNKNOWN_PROMPTS,
    ]


@pytest.mark.parametrize("read", [Chat, Lengths])
def test_a_given_unit_is_another_workload_than_one_that_is_found(tmp_path, read):
    """A digest tells each unit that is given from the one that is found, which may be any."""
    path = write(tmp_path / "t.csv", SERVEGEN, "0,1.5,10,3")
    units = [None, "s", "ms", "us", "ns"]
    assert len({read(path, unit=unit).digest for unit in units}) == len(units)


def test_whole_numbers_may_have_a_point(tmp_path):
    """A length such as 374.0, as data frames write it, is read as a whole number."""
    rows = ("0,0,374.0,44.", "1,1,374.00,2.00", "2,2,3740.000,374.0000")
    requests = Lengths(write(tmp_path / "t.csv", SERVEGEN, *rows))
    lengths = [(request.prompt_tokens, request.output_tokens) for request in requests]
    assert lengths == [(374, 44), (374, 2), (3740, 374)]


@pytest.mark.parametrize("count", ["1.000", "12.000", "374.000"])
def test_what_may_be_thousands_is_refused(tmp_path, count):
    """A length that is another number in other languages is refused, with both ways out."""
    path = write(tmp_path / "t.csv", SERVEGEN, f"0,0,{count},44")
    one = count.removesuffix(".000")
    with pytest.raises(InputError, match=rf"expected {one} or {one}\.0, or {one}000 if it is"):
        list(Lengths(path))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("0,soon,1,1", "field 'timestamp': expected a number, or a time such .*, got \"soon\""),
        ("0,1e99,1,1", "field 'timestamp': expected a number"),
        ("0,2,0,1", "field 'input_tokens': expected .* at least 1, got \"0\""),
        ("0,2,1.5,1", "field 'input_tokens': expected a whole number"),
        ("0,2,1,", "field 'output_tokens': expected .* at least 0, got \"\""),
        ("0,2,1", "field 'output_tokens': .* the field is missing"),
        ("0", "field 'timestamp': expected a number.* the field is missing"),
        ("0,9999-12-31,1,1", "field 'timestamp': expected a time less than 292 years after"),
        ("0,2,1,1,5", "field 'output_tokens': expected the last column"),
        ('0,2,"1,1', "not a row of a table: a quoted cell has no end on this line; a row is"),
    ],
)
def test_bad_field_is_named(tmp_path, row, complaint):
    """A bad field raises InputError with file, line, column and value."""
    path = write(tmp_path / "t.csv", SERVEGEN, "0,1.5,1,1", row)
    with pytest.raises(InputError, match=rf"t\.csv:3: {complaint}"):
        list(Lengths(path))


@pytest.mark.parametrize(
    ("header", "options", "complaint"),
    [
        ("when,input,output", {}, "no column that looks like 'time'; .* time=COLUMN"),
        (SERVEGEN, {"input": "ctx"}, "no column called 'ctx'; .* There are: request_id, time"),
        (SERVEGEN, {"tenant": "who"}, "no column called 'who'; name it by the option tenant"),
        ("0,0.1,0.5,Gamma,2.1,0.5", {}, "no column that looks like 'time'"),
        ("time,time,input,output", {}, "2 columns are called 'time'"),
    ],
)
def test_missing_columns_are_named(tmp_path, header, options, complaint):
    """A table without a required column raises InputError that names the column."""
    path = write(tmp_path / "t.csv", header, "1,1,1")
    with pytest.raises(InputError, match=rf"t\.csv:1: {complaint}"):
        list(Lengths(path, **options))


def test_a_table_without_rows_is_refused(tmp_path):
    """A table without rows raises InputError."""
    with pytest.raises(InputError, match="no rows after the header"):
        list(Lengths(write(tmp_path / "t.csv", SERVEGEN)))


@pytest.mark.parametrize(
    "line",
    [
        b"TIMESTAMP,ContextTokens,GeneratedTokens",
        b'{"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": [1]}',
        b'"time,input,output',
        b"\xff\xfe\x00",
    ],
)
def test_other_files_are_not_recognised(line):
    """Lines of other formats are not recognised, even with usual names in them."""
    assert not Lengths.recognises(line)
