"""Tables of requests: CSV, rows of JSON, and the files of benchmarks and tracers."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, starmap
from pathlib import Path
from typing import Any

import attrs

from kvcore import InputError
from kvcore.untrusted import parse_digits
from kvcore.workloads import lines
from kvcore_plugins.csv_rows import split_row
from kvcore_plugins.workload.file_workload import FileWorkload
from kvcore_plugins.workload.mooncake import Mooncake
from kvcore_plugins.workload.rows import Row, in_words, parse_row
from kvcore_plugins.workload.times import HEAD, find_times

COLUMNAR = ("input_lens", "output_lens")
"""Lists of a result of `vllm bench serve`, by which it is recognised."""

_TEXTS = {
    "messages", "conversations", "conversation", "prompt", "input", "instructions",
    "text_input", "hash_ids", "chunk_hashes", "requests", "event", "event_type",
}  # fmt: skip
"""Fields of other formats: their rows have more than lengths."""

_ERRORS = {"error", "errors", "errormessage", "errormsg", "exception"}
_CODES = {"statuscode", "httpstatus", "httpstatuscode", "responsestatus"}
_CANCELLED = {"wascancelled", "cancelled", "canceled", "failed", "iserror"}
_SUCCESS = {"success", "successful", "succeeded"}
_BAD = {
    "error", "errored", "failed", "failure", "cancelled", "canceled", "timeout", "incomplete",
}  # fmt: skip
_NODES = {"error", "status"}  # objects whose names say more than those of their fields
_WORSE = 400
_SEPARATOR = re.compile(rb'"?sep=.?"?', re.IGNORECASE)
_MARKS = re.compile(rb"[\t;,]")
_NUMBER = re.compile(rb"\s*[-+]?[.\d]+\s*")
_SIGNS = re.compile("[^a-z0-9]")


def normal(name: str) -> str:
    """Return the name of a column in lower case, without signs: of a field its last part."""
    return _SIGNS.sub("", name.rpartition(".")[2].lower())


@attrs.define
class Table:
    """The rows of a file, and the names of their columns.

    Attributes:
        line: number of the line with the names.
        names: the columns. A field of an object in a JSON row is `object.field`.
        rows: returns the rows with the values of some columns at least.
        flat: whether no column is a field of an object in a row.
        objects: whether rows are objects, which may lack fields.
        in_memory: whether all rows are in memory, in any order.
    """

    line: int
    names: list[str]
    rows: Callable[[Sequence[str]], Iterator[Row]]
    flat: bool = True
    objects: bool = False
    in_memory: bool = False

    @property
    def failures(self) -> list[str]:
        """The columns that tell whether a request failed."""
        known = _ERRORS | _CODES | _CANCELLED | _SUCCESS | {"status"}
        return [name for name in self.names if normal(name) in known]


def read_table(path: Path) -> Table:
    """Return the rows of a file: of a table with a header, or of JSON objects.

    Raises:
        InputError: the file cannot be read, or its first line is neither.
    """
    source = _from_header(lines(path))
    line_number, line = next(source)
    if not line.lstrip().startswith(b"{"):
        return _csv(path, line_number, line, source)
    first = parse_row(path, line_number, line)
    if first.fields.keys() >= set(COLUMNAR):
        return _columnar(first, source)
    in_memory = "benchmarks" in first.fields
    parsed = chain([first], starmap(partial(parse_row, path), source))
    rows = (
        Row(path, row.line, flat(fields))
        for row in parsed
        for fields in requests_of(row.fields)
    )
    head = list(islice(rows, HEAD))
    names = list(dict.fromkeys(name for row in head for name in row.fields))
    is_flat = all("." not in name for name in names)
    return Table(
        line_number,
        names,
        lambda _: chain(head, rows),
        is_flat,
        objects=True,
        in_memory=in_memory,
    )


def _from_header(source: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file from the header on: without comments and `sep=;` before it.

    The last comment is the header itself if a row with a number follows.
    """
    above: list[tuple[int, bytes]] = []
    for first in source:
        if first[1].startswith(b"#"):
            above = [first]
        elif not _SEPARATOR.fullmatch(first[1].rstrip()):
            cells = [] if first[1].lstrip().startswith(b"{") else _MARKS.split(first[1].strip())
            numbers = any(map(_NUMBER.fullmatch, cells))
            yield from (*(above if numbers else ()), first)
            yield from source
            return
    yield from above or [first]


def row_ids(workload: FileWorkload | Mooncake) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the numbers of the rows of a file, each with its ids: fields that end in `id`."""
    by_line = isinstance(workload, FileWorkload) and workload.by_line
    rows: Iterator[Row]
    if not isinstance(workload, FileWorkload):
        rows = (Row(row.path, row.line, flat(row.fields)) for row in workload.rows())
    elif by_line:
        rows = _readable(workload.path)
    else:
        table = read_table(workload.path)
        rows = table.rows([name for name in table.names if _is_id(name)])
    for index, row in enumerate(rows):
        known = ((name, value) for name, value in row.fields.items() if value is not None)
        ids = {name: str(value) for name, value in known if _is_id(name)}
        yield row.line - 1 if by_line else index, ids


def _is_id(name: str) -> bool:
    return normal(name).endswith("id")


def _readable(path: Path) -> Iterator[Row]:
    """Yield the rows of JSON that can be read: chats leave out the others."""
    for number, line in lines(path):
        try:
            fields = parse_row(path, number, line).fields
        except InputError:
            continue
        yield Row(path, number, flat(fields))


def _csv(
    path: Path, line_number: int, line: bytes, source: Iterator[tuple[int, bytes]]
) -> Table:
    mark = _delimiter(line)
    header = _cells(path, line_number, line, mark)
    columns = len(header)

    def rows() -> Iterator[Row]:
        for line_number, line in source:  # noqa: PLR1704 - the header is done with
            if b'"' in line:
                cells = _cells(path, line_number, line, mark)
            else:
                text = line.decode(errors="replace")
                cells = [cell.strip() for cell in text.split(mark)]
            row = Row(path, line_number, dict(zip(header, cells, strict=False)))
            if len(cells) > columns:
                raise row.error(field=header[-1], expected="the last column", got=cells)
            yield row

    return Table(line_number, header, lambda _: rows())


def _columnar(result: Row, source: Iterator[tuple[int, bytes]]) -> Table:
    """Return the table of a JSON object whose fields are the columns."""
    for line_number, _ in source:
        msg = f"{result.path}:{line_number}: a second result: give a file for each"
        raise InputError(msg)
    lists = {name: value for name, value in result.fields.items() if type(value) is list}

    def rows(columns: Sequence[str]) -> Iterator[Row]:
        for name in columns:
            if len(lists[name]) != len(lists[columns[0]]):
                expected = f"{len(lists[columns[0]])} values, as {columns[0]!r} has"
                raise result.error(field=name, expected=expected, got=len(lists[name]))
        for index, cells in enumerate(zip(*(lists[name] for name in columns), strict=True)):
            fields = dict(zip(columns, map(str, cells), strict=True))
            yield Row(result.path, result.line, fields, f"[{index}].")

    return Table(result.line, list(lists), rows, flat=False, in_memory=True)


def requests_of(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects of requests in a JSON object: mostly the object itself.

    Others are results of GuideLLM (`benchmarks`), spans of OpenTelemetry (`resourceSpans`), and
    sessions of LLMServingSim (`sub_requests`).
    """
    if "benchmarks" in value:
        for benchmark in _objects(value["benchmarks"]):
            by_status = benchmark.get("requests")
            for status, requests in by_status.items() if type(by_status) is dict else ():
                yield from ({**request, "status": status} for request in _objects(requests))
    elif "resourceSpans" in value:
        for resource in _objects(value["resourceSpans"]):
            for scope in _objects(resource.get("scopeSpans")):
                yield from map(_span, _objects(scope.get("spans")))
    elif "sub_requests" in value:
        for turn, request in enumerate(_objects(value["sub_requests"])):
            yield {**value, "sub_requests": None, "turn": turn, **request}
    else:
        yield _span(value)


def _objects(values: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list; none if it is not a list."""
    return (
        (value for value in values if type(value) is dict) if type(values) is list else iter(())
    )


def _span(span: dict[str, Any]) -> dict[str, Any]:
    """Return a span of OTLP's JSON with its attributes as an object; other objects as such.

    There, attributes are pairs of `key` and `value`, an object such as `{"intValue": "3"}`.
    """
    if type(span.get("attributes")) is not list:
        return span
    attributes = {
        pair["key"]: next(iter(pair["value"].values()), None)
        for pair in _objects(span["attributes"])
        if type(pair.get("key")) is str and type(pair.get("value")) is dict
    }
    return {**span, "attributes": attributes}


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of an object and of those in it, by names such as `usage.input_tokens`.

    `{"value": 3, "unit": "tokens"}` is one value.
    """
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if type(value) is not dict or name in _NODES:
            values[prefix + name] = value
        elif value.keys() == {"value", "unit"}:
            values[prefix + name] = value["value"]
        else:
            values |= flat(value, f"{prefix}{name}.")
    return values


def has_texts(fields: dict[str, Any]) -> bool:
    """Return True if a flat row has a field of a format that knows more than lengths."""
    for name, value in fields.items():
        known = _TEXTS.intersection(name.split("."))
        if known and value and type(value) not in (int, float):
            return True
        # Messages under another name.
        if type(value) is list and value and type(value[0]) is dict and "content" in value[0]:
            return True
    return False


def has_failed(row: Row, columns: Sequence[str]) -> bool:
    """Return True if one of the columns, of `Table.failures`, says that the request failed."""
    return any(_is_failure(normal(name), row.fields.get(name)) for name in columns)


def _is_failure(name: str, value: Any) -> bool:
    text = in_words(value)
    if value is None or text in ("", "null", "none", "nan"):
        return False
    if name in _CODES:
        return (parse_digits(text) or 0) >= _WORSE
    if name == "status":
        if type(value) is dict:  # a span's: 2 is an error
            code = in_words(value.get("code", value.get("status_code")))
            return code == "2" or code.endswith("error")
        return text in _BAD or (parse_digits(text) or 0) >= _WORSE
    is_true = text not in ("false", "0", "no")
    return not is_true if name in _SUCCESS else is_true and bool(value)


def table_header(line: bytes) -> list[str]:
    """Return the names of columns in the first line of a table; none if it is not one."""
    try:
        header = _split(line, _delimiter(line))
    except csv.Error:
        return []
    return header if len(header) > 1 or find_times(tuple(header)) else []


def _delimiter(header: bytes) -> str:
    """Return the mark between the columns: a tab, semicolon or comma."""
    return next((mark for mark in "\t;" if mark.encode() in header), ",")


def _cells(path: Path, line_number: int, line: bytes, delimiter: str) -> list[str]:
    try:
        return _split(line, delimiter)
    except csv.Error as error:
        msg = f"{path}:{line_number}: not a row of a table: {error}"
        raise InputError(msg) from error


def _split(line: bytes, delimiter: str) -> list[str]:
    cells = split_row(line.decode(errors="replace"), delimiter, skip_spaces=True)
    return [cell.strip() for cell in cells]
