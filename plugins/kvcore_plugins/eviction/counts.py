"""Files of counts: what a policy that learns online has learned, for its next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import orjson

from kvcore import InputError
from kvcore.files import atomic_file

_FORMAT, _VERSION, _FILE_BYTES, _LIMIT = "kvcore counts", 1, 1 << 26, 1e12

Label: TypeAlias = tuple[int | str | None, ...]
"""What a row of counts is about."""

Tables: TypeAlias = dict[str, dict[Label, list[float]]]
"""Rows of counts by table and label."""


def write_counts(path: Path, policy: str, options: str, tables: Tables) -> None:
    """Write what `policy` has counted with `options` as JSON; the file is whole or absent."""
    rows = {name: list(table.items()) for name, table in tables.items()}
    head = {"format": _FORMAT, "version": _VERSION, "policy": policy, "options": options}
    with atomic_file(path) as file:
        file.write(orjson.dumps(head | {"tables": rows}).decode())


def read_counts(
    path: Path, policy: str, options: str, shapes: dict[str, tuple[int, int]]
) -> Tables:
    """Return the tables in a file of `write_counts`.

    Args:
        path: the file.
        policy: the policy that must have written it.
        options: the options that it must have had.
        shapes: by table, the length of its labels, and that of its rows. A table whose
            labels are empty has one row.

    Raises:
        InputError: the file has no such tables, or those of another policy or version.
    """
    document: Any = None
    try:
        with path.open("rb") as file:
            # A longer file is cut, and so no JSON either.
            document = orjson.loads(file.read(_FILE_BYTES))
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except ValueError:
        why = "has no counts"
    else:
        why = _difference(document, policy, options)
        if not why:
            try:
                tables = document["tables"]
                return {name: _table(tables[name], *shape) for name, shape in shapes.items()}
            except (KeyError, TypeError, ValueError):
                why = "is damaged"
    msg = f"{policy}: load={path} {why}; name a file of save= with {options}, or leave it out"
    raise InputError(msg)


def _difference(document: Any, policy: str, options: str) -> str:
    """Return in what `document` is not what `policy` writes with `options`, or nothing."""
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return "has no counts"
    written = [document.get(name) for name in ("policy", "version", "options")]
    if written != [policy, _VERSION, options]:
        return "is of {}, version {}, with {}".format(*written)
    return ""


def _table(rows: Any, label_size: int, row_size: int) -> dict[Label, list[float]]:
    """Return the rows by their labels.

    Raises:
        TypeError: something has the wrong type.
        ValueError: a label repeats, or a length or a count is wrong.
    """
    table = {tuple(label): row for label, row in rows}
    sound = (
        len(table) == len(rows)
        and (label_size or len(table) == 1)
        and all(
            len(label) == label_size
            and {*map(type, label)} <= {int, str, type(None)}
            and len(row) == row_size
            and all(type(count) in (int, float) and 0 <= count < _LIMIT for count in row)
            for label, row in table.items()
        )
    )
    if not sound:
        msg = "no rows of counts"
        raise ValueError(msg)
    return table
