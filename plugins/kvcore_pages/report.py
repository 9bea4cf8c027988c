"""The page that reports results: settings, tables, charts, regret and miss reasons."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from kvcore.errors import InputError
from kvcore.files import CutError, DamageError, as_path, decompressed, unreadable_reason
from kvcore.lazy import import_extra
from kvcore.progress import Progress, silent
from kvcore.serving.result import REQUESTS, SUMMARY
from kvcore.untrusted import WORKLOAD_EXPANSION, parse_json
from kvcore_cli.report.tables import counted
from kvcore_pages.report_documents import FORMS, DocumentResult
from kvcore_pages.report_parts import Document, Part, Result, of_replica
from kvcore_pages.report_runs import Run
from kvcore_pages.shell import Page, charting_library

__all__ = ["report_page"]

PARQUET = b"PAR1"
"""The first bytes of a table in Parquet."""

IN_FOLDERS = (SUMMARY, "plan.json", "results.json", "results.csv")
"""Files that make a folder a result, in the order of the search."""

SCHEMA = 1
"""The schema of every kind of document that is read here; each kind numbers its own."""

FAULTS = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError),
    csv.Error,
)
"""Exceptions of reading a document that lacks a field, or has another type there."""

FEW = 2
"""Largest number of results that the title names."""

RUN = {"ttft_s", "pool", "hit"}
"""Keys of the document of a run."""

OTHERS = (
    ("events lines header", "what `kvcore replay` says of a trace: give the trace itself"),
    ("event n t", "a line of a trace, but not its first: give the whole trace"),
    (
        "prompt_tokens bills",
        "a bill of an API's cache, of which there is no report: see `kvcore explain --price`",
    ),
    (
        "id arrival_s ttft_s",
        f"a {REQUESTS}: give the folder that `--out` wrote, with its {SUMMARY}",
    ),
    (
        "ttft_s hit replicas",
        "the summary of a cluster: give its trace, and --replica 0 for the report of one",
    ),
    (
        "timestamp input_length",
        "a workload: give what came of it, as `kvcore simulate FILE --out results`",
    ),
    (
        "schema run digest",
        "the journal of a sweep or a plan: give its table, or plan.json",
    ),
)
"""Keys of other documents, and what each of them seems to be, with what to give instead."""

NEEDED = (
    "give a folder that `kvcore simulate --out` wrote, a trace, or the JSON that compare, "
    "curve, sweep, plan, replay, explain, quality or size print with --json"
)


def report_page(
    results: Iterable[str | os.PathLike[str]],
    *,
    title: str | None = None,
    replica: int | str | None = None,
    progress: Progress = silent,
) -> bytes:
    """Return a page that reports results, with those of one kind side by side.

    Equal results under equal names give equal pages.

    Args:
        results: paths of folders that `simulate --out` or `run --out` wrote, of traces, and of
            the JSON documents and tables of other commands, each recognised by its content.
        title: title of the page; None: the names of the results, or their number.
        replica: the replica to report, in traces of clusters.
        progress: shows the progress of reading.

    Raises:
        InputError: a path is no result, or a document is damaged; the message names it.
        TraceError: a trace is damaged, or cut.
        PluginError: plotly is not installed; or polars, for a table in Parquet.
    """
    charting_library()  # That it is missing is told before traces are read.
    paths = [as_path(path) for path in results]
    read_results = [read_result(path, progress, replica) for path in paths]
    chosen = [*of_replica(replica), *([] if title is None else ["--title", title])]
    document = _document(read_results, [str(path) for path in paths], title, chosen)
    body = '<main id="report"></main>'
    data = {"report": document}
    return Page(document["title"], body, ["report.js"], ["report.css"], data).render()


def read_result(
    path: str | os.PathLike[str],
    progress: Progress = silent,
    replica: int | str | None = None,
) -> Result:
    """Read a result of any kind; in the trace of a cluster, that of a replica.

    Raises:
        InputError: the file is no result; the message says what it seems to be.
        TraceError: a trace is damaged, or cut.
        PluginError: a table in Parquet, and polars is not installed.
    """
    file, name = as_path(path), str(path)
    if file.is_dir():
        return _folder(file, progress)
    with _opened(file) as opened:
        is_parquet = opened.peek(len(PARQUET)).startswith(PARQUET)
        head = b"" if is_parquet else next(decompressed(opened, WORKLOAD_EXPANSION), b"")
    if is_parquet:
        polars = import_extra("polars", "a table in Parquet needs polars", "lab")
        try:
            rows = polars.read_parquet(file).to_dicts()
        except Exception as error:
            msg = f"{file}: a damaged table in Parquet: {error}"
            raise InputError(msg) from error
        return _read(name, _swept(rows))
    first = _first_line(head)
    if isinstance(first, dict) and first.get("event") == "HEADER":
        return Run.of_trace(file, progress, replica)
    if head.lstrip().startswith(b"{"):
        return _read(name, _parsed(file))
    columns: list[str] = next(_csv(head), [])
    if {"workload", "eviction", "error"} <= {*columns}:
        data = _whole(file)
        with _naming(name):
            rows = _cells(data)
        return _read(name, _swept(rows))
    msg = f"{file}: {_seems(head, columns)}; {NEEDED}"
    raise InputError(msg)


def _folder(folder: Path, progress: Progress) -> Result:
    """Read the result in a folder."""
    known = next((folder / name for name in IN_FOLDERS if (folder / name).is_file()), None)
    if known is None:
        msg = f"{folder}: a folder without any of {', '.join(IN_FOLDERS)}; {NEEDED}"
        raise InputError(msg)
    if known.name != SUMMARY:
        return read_result(known, progress)
    summary = _parsed(known)
    _check_schema(str(known), summary)
    with _naming(str(known)):
        return Run.read(folder, summary, progress)


@contextmanager
def _opened(file: Path) -> Iterator[io.BufferedReader]:
    """Open a file to read it; raise errors of that, and of decompressing it, as InputError."""
    try:
        with file.open("rb") as opened:
            yield opened
    except (CutError, DamageError) as error:
        remedy = ": write it again" if isinstance(error, CutError) else ""
        msg = f"{file}: {error}{remedy}"
        raise InputError(msg) from error
    except OSError as error:
        msg = f"{file}: cannot be read: {unreadable_reason(file, error)}"
        raise InputError(msg) from error


def _whole(file: Path) -> bytes:
    """Return a file, decompressed."""
    with _opened(file) as opened:
        return b"".join(decompressed(opened, WORKLOAD_EXPANSION))


def _first_line(text: bytes) -> Any:
    """Return the JSON value in the first line of a text; None if that is no JSON."""
    with suppress(ValueError):
        return parse_json(text.partition(b"\n")[0])
    return None


def _parsed(file: Path) -> Document:
    """Return the JSON object in a file.

    Raises:
        InputError: the document is cut off or damaged, or has lines of JSON objects.
    """
    text = _whole(file)
    try:
        document = parse_json(text)
    except ValueError as error:
        why, first = f"no whole JSON document ({error}): write it again", _first_line(text)
        msg = f"{file}: {_told(first) if isinstance(first, dict) else why}"
        raise InputError(msg) from error
    if not isinstance(document, dict):
        msg = f"{file}: JSON, but no object; {NEEDED}"
        raise InputError(msg)
    return document


def _read(name: str, document: Document) -> Result:
    """Return the result in a document.

    Raises:
        InputError: the document is of no known kind or of another schema, or lacks a field.
    """
    form = next((form for form in FORMS if form.keys <= document.keys()), None)
    if form is None and not document.keys() >= RUN:
        msg = f"{name}: {_told(document)}"
        raise InputError(msg)
    _check_schema(name, document)
    with _naming(name):
        if form is None:
            return Run(name=name, summary=document)
        return DocumentResult.read(name, document, form)


def _check_schema(name: str, document: Document) -> None:
    """Raise an InputError for a document of another schema."""
    if document.get("schema") != SCHEMA:
        msg = (
            f"{name}: schema {document.get('schema')!r:.40}, and {SCHEMA} is read here: write "
            "it again with this release"
        )
        raise InputError(msg)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raise errors in the fields of a document as an InputError that names the document."""
    try:
        yield
    except FAULTS as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        msg = (
            f"{name}: a damaged result, or one of another release ({why:.200}): write it again"
        )
        raise InputError(msg) from error


def _told(document: Document) -> str:
    """Return a sentence on a JSON object that is no result: its likely kind, and a remedy."""
    for keys, told in OTHERS:
        if {*keys.split()} <= document.keys():
            return f"it seems to be {told}"
    names = ", ".join(map(repr, [*document][:5])) or "nothing"
    return f"JSON that is no result known here (with {names:.120}); {NEEDED}"


def _seems(head: bytes, columns: Sequence[str]) -> str:
    """Return the likely kind of a file that is neither JSON nor a table of a sweep."""
    if not head:
        return "it is empty"
    if {"eviction", "options", "blocks"} <= {*columns}:
        return "the CSV of `kvcore compare` or `curve`, which leaves out what a report needs"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<svg")):
        return "it is a page or a picture"
    if head.startswith((b"\x89PNG", b"%PDF")):
        return "it is a picture"
    return "it is no result"


def _csv(data: bytes) -> Any:
    """Return a reader of the rows of a CSV, as `kvcore sweep` or a spreadsheet writes it."""
    # A spreadsheet may begin with a byte order mark, and quote each cell.
    return csv.reader(io.StringIO(data.decode("utf-8-sig", "replace"), newline=""))


def _cells(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of a sweep's CSV, with numbers and booleans; empty cells are None.

    Raises:
        ValueError: a row has more cells than the header, or fewer.
    """
    rows = _csv(data)
    columns, cells = next(rows), []
    for row in rows:
        if row and len(row) != len(columns):
            msg = f"line {rows.line_num} has {len(row)} cells, and the header {len(columns)}"
            raise ValueError(msg)
        if row:
            cells.append(dict(zip(columns, map(_value, row), strict=True)))
    return cells


def _value(text: str) -> Any:
    if not text:
        return None
    if text.lower() in ("true", "false"):  # A spreadsheet has them in capitals.
        return text.lower() == "true"
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text


def _swept(rows: list[dict[str, Any]]) -> Document:
    """Return the document of a sweep with these rows."""
    mode = "simulate" if rows and "goodput" in rows[0] else "compare"
    return {"schema": SCHEMA, "mode": mode, "cells": len(rows), "rows": rows}


def _document(
    results: Sequence[Result],
    paths: Sequence[str],
    title: str | None,
    options: Sequence[str],
) -> Document:
    """Return the data of the page for its script; `options` are those of its command."""
    labels = _labels(paths)
    parts = []
    for result, path in zip(results, paths, strict=True):
        with _naming(path):
            parts.append([*result.parts()])
    kinds: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        kinds.setdefault(result.kind, []).append(index)
    told: list[dict[str, Any]] = []
    for kind, indices in kinds.items():
        alike, names = [results[n] for n in indices], [labels[n] for n in indices]
        side: list[Part] = []
        if len(indices) > 1:
            with _naming(", ".join(paths[index] for index in indices)):
                side += alike[0].together(alike, names)
        if side:
            told.append({"title": f"{alike[0].plural} side by side", "parts": side})
        told += [{"title": f"{kind}: {labels[n]}", "parts": parts[n]} for n in indices]
    if title is None:
        few = len(labels) <= FEW
        title = f"Report: {' and '.join(labels) if few else counted(len(labels), 'result')}"
    return {
        "title": title,
        "about": f"Of {counted(len(results), 'result')}: {', '.join(labels)}.",
        "sections": [{"id": f"result-{n}", **section} for n, section in enumerate(told, 1)],
        "command": shlex.join(["kvcore", "report", *paths, *options]),
    }


def _labels(paths: Sequence[str]) -> list[str]:
    """Return the shortest distinct ends of paths; a repeated path gets the next free number."""
    parts = [Path(path).parts or (path,) for path in paths]
    lengths = range(1, max(map(len, parts), default=0) + 1)
    ends = ([str(Path(*path[-length:])) for path in parts] for length in lengths)
    labels = next((each for each in ends if len(set(each)) == len(set(paths))), [*paths])
    distinct: list[str] = []
    for label in labels:
        numbered = (f"{label} ({number})" for number in count(2))
        taken = {*distinct, *(other for other in labels if other != label)}
        distinct.append(next(each for each in chain([label], numbered) if each not in taken))
    return distinct
