"""The border: what it decodes, what it refuses, and the table of its limits."""

import json
import re
import tomllib
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import untrusted
from kvcore.untrusted import (
    JSON_LEVELS,
    TOML_BYTES,
    TOML_LEVELS,
    escaped,
    fits_header,
    header_text,
    load_toml,
    parse_digits,
    parse_json,
    token_count,
)

ROOT = Path(__file__).parents[2]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text("ab\0\x1b\u2028é"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


LIMITS = """
a line of a file | LONGEST_LINE MOST_VALUES
the header of a trace | TRACE_HEADER_BYTES
JSON, from files, clients and servers | JSON_LEVELS
lists and objects in the JSON of clients and servers | MOST_VALUES
names in that JSON | MOST_NAMES
a TOML file | TOML_BYTES TOML_LEVELS
a compressed trace, expanded | TRACE_EXPANSION EXPANDED_BYTES
a compressed recording, expanded | RECORDING_EXPANSION EXPANDED_BYTES
lines of a recording | FREE_LINES BYTES_OF_LINE
a compressed workload file, expanded | WORKLOAD_EXPANSION EXPANDED_BYTES
requests of a compressed trace that is run again (a what-if) | FREE_REQUESTS BYTES_OF_REQUEST
blocks that the runs of a line stand for | MOST_RUN_BLOCKS
blocks in use at once | MOST_BLOCKS
entries in the tables of open forks | MOST_COPIES
keys of blocks in all tiers together | MOST_TIER_KEYS
blocks and spans named, each time counted | WORK WORK_OF_LINE
a payload of KV events | PAYLOAD_BYTES PAYLOAD_LEVELS
events, and texts, lists and maps, in such a payload | PAYLOAD_EVENTS PAYLOAD_OBJECTS
headers of a request to `serve` or `route` | MOST_HEADERS LONGEST_HEADER
tokens of a request by a server's count | MOST_TOKENS
the name of a session in a header or a body | LONGEST_SESSION
a `cache_salt` of a request to `serve` | LONGEST_SALT
an event in the stream of a server behind `route` | LONGEST_EVENT
the metrics of a server behind `route` | LONGEST_METRICS
the tokens of a prompt by such a server | LONGEST_TOKENS
"""
"""What the rows of the table in SECURITY.md limit, and their constants in the order shown."""


def without_limits(text, names):
    """Return the text of a row without the numbers that these constants have there."""
    for limit in (getattr(untrusted, name) for name in names.split()):
        power = f"2^{limit.bit_length() - 1} ({limit:,})"
        forms = (power, f"{limit >> 20} MiB", f"{limit:,}")
        text = text.replace(next(form for form in forms if form in text), "", 1)
    return text


def test_the_page_on_security_has_the_table_of_limits():
    """SECURITY.md prints the limits of the border, all of them, and no others."""
    page = (ROOT / "SECURITY.md").read_text("utf-8")
    table = page.partition("| limit | value |\n|---|---|\n")[2].partition("\n\n")[0]
    shown = dict(line.strip("| ").split(" | ") for line in table.splitlines())
    assert shown.pop("numbers in a trace") == "2^63 - 1"
    names = dict(line.split(" | ") for line in LIMITS.strip().splitlines())
    assert list(shown) == list(names)
    left = [without_limits(shown[what], names[what]) for what in names]
    assert not re.search(r"\d", str(left))
    known = {
        name for name, value in vars(untrusted).items() if type(value) is int and name[0] != "_"
    }
    assert known == set(" ".join(names.values()).split())


@given(JSON)
def test_json_is_what_was_written(value):
    """A document is read as the value that it was written from."""
    assert parse_json(json.dumps(value).encode()) == value


@given(st.binary(max_size=200) | st.text('[]{}":,0e-.\\u').map(str.encode))
def test_any_bytes_are_json_or_a_value_error(data):
    """Any bytes are a value that can be written again, or a ValueError."""
    try:
        value = parse_json(data)
    except ValueError:
        return
    orjson.dumps(value)


@pytest.mark.parametrize("pair", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
@given(levels=st.integers(1, 1_200))
def test_json_has_a_limited_depth(pair, levels):
    """JSON nested up to the limit is read; deeper it is refused, by any mix of brackets."""
    start, end = pair
    text = start * levels + "1" + end * levels
    if levels * start.count("[") + levels * start.count("{") <= JSON_LEVELS:
        orjson.dumps(parse_json(text.encode()))
    else:
        with pytest.raises(ValueError, match=r"nested|limit"):
            parse_json(text.encode())


def test_many_brackets_that_are_not_deep_are_read():
    """Brackets side by side, and within texts, do not count as levels."""
    wide = [[{"a": "[" * 300}]] * 300
    assert parse_json(json.dumps(wide).encode()) == wide


DEEP = f"nested more than {TOML_LEVELS} levels deep, which is the most"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = " + "[" * (TOML_LEVELS + 1) + "]" * (TOML_LEVELS + 1), DEEP),
        ("a = " + "[" * 200_000, DEEP),
        ("a = " + "[" * 5_000 + "]" * 5_000, DEEP),
        ("a = " + "{b = " * 5_000 + "1" + "}" * 5_000, DEEP),
        (".".join("a" * (TOML_LEVELS + 2)) + " = 1", DEEP),
        (".".join("a" * 100_000) + " = 1", DEEP),
        ("[" + ".".join("a" * (TOML_LEVELS + 2)) + "]", DEEP),
        ("a = 1\n" * 2, "Cannot overwrite a value"),
        ("a = ", "Invalid value"),
        ("a = '" + "x" * TOML_BYTES + "'", f"longer than {TOML_BYTES:,} bytes"),
        ("\udcff", "can't decode byte 0xff"),
    ],
    ids=range(11),
)
def test_toml_that_is_too_deep_or_too_long_is_a_value_error(tmp_path, text, problem):
    """TOML beyond a limit, or no TOML, is a ValueError, as each reader of TOML expects."""
    path = tmp_path / "a.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=problem):
        load_toml(path)


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(-9, 9) | st.text("a\n\té")))
def test_toml_is_what_tomllib_reads(tmp_path_factory, tables):
    """TOML within the limits is read as `tomllib` reads it."""
    path = tmp_path_factory.mktemp("toml") / "a.toml"
    path.write_text("".join(f"{key} = {json.dumps(table)}\n" for key, table in tables.items()))
    assert load_toml(path) == tomllib.loads(path.read_text("utf-8")) == tables


@given(st.binary(max_size=50))
def test_the_text_of_a_header_can_be_written(data):
    """The text of a header of any bytes can be written, and sent on."""
    text = header_text(data.decode("utf-8", "surrogateescape"))
    text.encode()
    orjson.dumps(text)
    assert fits_header(text)
    assert header_text(text) == text


@given(st.text())
def test_a_header_that_fits_is_passed_as_it_is(text):
    """The text of a header is changed only where it cannot be sent on."""
    assert (header_text(text) == text) == fits_header(text)


@given(st.integers() | st.floats() | st.text() | st.none() | st.booleans())
def test_a_count_of_tokens_can_be_added_up(value):
    """A count is a whole number whose sums over 2^22 requests fit into 64 bits, or None."""
    count = token_count(value)
    assert count is None or (type(count) is int and 0 <= count <= 2**40)
    if type(value) is int and 0 <= value <= 2**40:
        assert count == value


def test_the_readers_decode_by_the_border_alone():
    """No reader of files, requests or answers decodes JSON or TOML by itself."""
    own = {"orjson.loads(", "json.loads(", "tomllib.loads(", "tomllib.load("}
    rooms = [ROOT / "kvcore" / name for name in ("trace", "workloads", "config")]
    rooms += [ROOT / "plugins" / f"kvcore_{name}" for name in ("online", "events", "pages")]
    files = [path for room in rooms for path in room.rglob("*.py")]
    assert len(files) > 40
    found = {path.name: call for path in files for call in own if call in path.read_text()}
    assert found == {}
    assert "orjson.loads(" in Path(untrusted.__file__).read_text()


def test_toml_is_decoded_by_the_border_alone():
    """Only the border imports `tomllib`, and what reads the project of a plugin."""
    files = [path for room in ("kvcore", "plugins") for path in (ROOT / room).rglob("*.py")]
    own = {path.name for path in files if "import tomllib" in path.read_text("utf-8")}
    assert own == {"untrusted.py", "_installation.py"}


@given(st.text(st.characters(categories=["Cc", "Cs", "Ll", "Zl"])))
def test_an_escaped_text_can_be_printed(text):
    """An escaped text has no character that a terminal acts upon, or that UTF-8 lacks."""
    shown = escaped(text)
    shown.encode()
    assert all(character.isprintable() or character in "\t\n" for character in shown)


def test_digits_are_ascii_and_below_a_bound():
    """A number in digits is read; signs, other alphabets and endless numbers are none."""
    assert [*map(parse_digits, ("0", "007", "9" * 18))] == [0, 7, 10**18 - 1]
    refused = ("", "-1", "1.0", "1_0", " 1", "²", "١٢", "9" * 19, "1" * 5000)
    assert {*map(parse_digits, refused)} == {None}
