"""A leaderboard: every policy in every cell of a panel, resumed, written and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

import attrs
import orjson

from kvcore.cache.layout import BlockLayout
from kvcore.distributions import version
from kvcore.errors import InputError, StorageError
from kvcore.plugins.manager import Plugins
from kvcore.progress import Progress, silent
from kvcore_judge.cells import Cell, CellResult, run_cell
from kvcore_judge.entries import Entry
from kvcore_judge.protocol import TIMED_SHARES, TUNED, Panel, Stream, cell_name, read_stream
from kvcore_judge.scores import Ratio, Score, interval, ratio_of, score_of
from kvcore_lab.workers import Call, call_all
from kvcore_replay.belady import Belady, Future

SCHEMA = 1

BASE = Entry("lru")
"""The policy to which others are compared."""


@attrs.frozen
class Column:
    """A stream and a pool size of a leaderboard, with what is the same for all policies."""

    stream: Stream
    share: int
    blocks: int
    optimum: int

    @property
    def name(self) -> str:
        """The name of its cells: stream and size in percent of the footprint."""
        return cell_name(self.stream.name, self.share)

    @property
    def timed(self) -> bool:
        """Whether its cells are served under a clock, too."""
        return self.stream.timed and self.share in TIMED_SHARES


def columns_of(stream: Stream, shares: Iterable[int]) -> list[Column]:
    """Return the columns of a stream, with the hits of the optimum in each pool."""
    read = read_stream(stream)
    future = Future.read(read.requests, BlockLayout("keys", read.key_tokens, read.key_tokens))
    columns = []
    for share in shares:
        blocks = read.pool(share)
        columns.append(Column(stream, share, blocks, sum(Belady().hits(future, blocks)[0])))
    return columns


@attrs.frozen(slots=False)
class Leaderboard:
    """The results of policies on a panel.

    Attributes:
        panel: the panel.
        columns: streams and pool sizes.
        entries: the policies, LRU first.
        about: name, options and source of each policy, by its text.
        results: the result of each cell, by the policy's text and the column's name.
        streams: digest, requests and footprint of each stream, by its name.
    """

    panel: Panel
    columns: Sequence[Column]
    entries: Sequence[Entry]
    about: Mapping[str, Mapping[str, Any]]
    results: Mapping[tuple[str, str], CellResult]
    streams: Mapping[str, Mapping[str, Any]]

    def ratios(self, entry: Entry) -> list[Ratio]:
        """Return the hits of a policy beside those of LRU and the optimum, by column."""
        tuned = self._tuned(entry.text)
        return [
            ratio_of(
                column.name,
                self.results[entry.text, column.name].total,
                self.results[BASE.text, column.name].total,
                column.optimum,
                tuned=column.stream.name in tuned,
            )
            for column in self.columns
        ]

    @cached_property
    def scores(self) -> dict[str, Score]:
        """The scores by the text of the policy, the best headline first."""
        scores = {entry.text: score_of(self.ratios(entry)) for entry in self.entries}
        order = sorted(scores, key=lambda text: (_number(scores[text]), text), reverse=True)
        return {text: scores[text] for text in order}

    def cost(self, entry: Entry) -> float:
        """Return the CPU time per request and eviction, over that of LRU in the same run."""
        return self._cpu(entry) / max(self._cpu(BASE), 1e-9)

    def _cpu(self, entry: Entry) -> float:
        results = [self.results[entry.text, column.name] for column in self.columns]
        work = sum(result.evicted + result.lookups for result in results)
        return sum(result.cpu_ns for result in results) / max(work, 1)

    def document(self) -> dict[str, Any]:
        """Return the leaderboard as a JSON object, which is the same on every machine."""
        return {
            "schema": SCHEMA,
            "version": version("kvcore"),
            "panel": self.panel.name,
            "streams": [{"name": name, **about} for name, about in self.streams.items()],
            "cells": [
                {"stream": column.stream.name, "share": column.share, "blocks": column.blocks,
                 "optimum": column.optimum}
                for column in self.columns
            ],
            "policies": [self._policy(text) for text in self.scores],
        }  # fmt: skip

    def _tuned(self, text: str) -> frozenset[str]:
        """Return the streams on which a policy was tuned."""
        return TUNED.get(self.about[text]["name"], frozenset())

    def _policy(self, text: str) -> dict[str, Any]:
        tuned = self._tuned(text)
        cells = []
        for column in self.columns:
            result, base = self.results[text, column.name], self.results[BASE.text, column.name]
            cells.append(
                {
                    "stream": column.stream.name,
                    "share": column.share,
                    "hits": result.total,
                    "lookups": result.lookups,
                    "evicted": result.evicted,
                    "evictions": result.evictions,
                    "saved_s": result.saved_s,
                    "interval": interval(result.hits, base.hits),
                    "tuned": column.stream.name in tuned,
                    "timed": result.timed,
                }
            )
        return {**self.about[text], "score": attrs.asdict(self.scores[text]), "cells": cells}


def _number(score: Score) -> float:
    return float(score.headline or score.all_cells or 0)


def make_leaderboard(
    panel: Panel,
    entries: Iterable[Entry],
    *,
    jobs: int = 1,
    journal: Path | None = None,
    progress: Progress = silent,
) -> Leaderboard:
    """Return the leaderboard of LRU and `entries`. Each cell is one replay.

    Args:
        panel: streams and pool sizes.
        entries: the policies.
        jobs: number of processes.
        journal: a file to which each finished cell is appended. Cells that it has already are
            not run again.
        progress: shows the number of cells that are done.

    Raises:
        InputError: a stream or a policy cannot be used.
        PolicyError: a policy failed, or answered what it must not.
    """
    listed = list(dict.fromkeys([BASE, *entries]))
    about = {entry.text: entry.describe() for entry in listed}
    columns: list[Column] = []
    streams: dict[str, dict[str, Any]] = {}
    for stream in panel.streams:
        read = read_stream(stream)
        streams[stream.name] = {
            "workload": stream.workload.partition(":path=")[0],
            "digest": read.digest,
            "requests": len(read.requests),
            "key_tokens": read.key_tokens,
            "footprint_blocks": read.blocks,
        }
        columns += columns_of(stream, panel.shares)
    pairs = [(entry, column) for column in columns for entry in listed]
    log = _Journal(journal, about, streams)
    results = {
        (entry.text, column.name): known
        for entry, column in pairs
        if (known := log.known(entry, column)) is not None
    }
    todo = [pair for pair in pairs if (pair[0].text, pair[1].name) not in results]
    with progress("judging", len(todo)) as tick, closing(log):
        for index, result in call_all([_call(*pair) for pair in todo], jobs):
            entry, column = todo[index]
            results[entry.text, column.name] = result
            log.append(entry, column, result)
            tick(1)
    return Leaderboard(panel, columns, listed, about, results, streams)


def _call(entry: Entry, column: Column) -> Call[CellResult]:
    cell = Cell(entry, column.stream, column.share)
    return Call(
        partial(run_cell, cell, timed=column.timed),
        f"policy {entry.text!r}",
        f"{entry.text} on {column.name}",
    )


class _Journal:
    """The finished cells of a leaderboard, one JSON object a line."""

    def __init__(
        self,
        path: Path | None,
        about: Mapping[str, Mapping[str, Any]],
        streams: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._about, self._streams = about, streams
        self._done: dict[str, Any] = {}
        self._file = None
        if path is None:
            return
        try:
            if path.exists():
                for line in path.read_bytes().splitlines():
                    self._read(path, line)
            self._file = path.open("ab")
        except OSError as error:
            msg = f"--resume {path}: {error}"
            raise InputError(msg) from error

    def _read(self, path: Path, line: bytes) -> None:
        try:
            row = orjson.loads(line)
            self._done[row["key"]] = CellResult(**row["result"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            if line.endswith(b"}"):
                msg = f"--resume {path}: a line is no finished cell; name another file"
                raise InputError(msg) from error
            # The last line of a run that was killed: its cell is run again.

    def _key(self, entry: Entry, column: Column) -> str:
        """Return what the result of a cell depends on, as a digest."""
        parts = [self._about[entry.text], self._streams[column.stream.name]]
        text = orjson.dumps([version("kvcore"), parts, column.blocks, column.timed])
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def known(self, entry: Entry, column: Column) -> CellResult | None:
        """Return the result of a cell that is in the file; None if it is not."""
        return self._done.get(self._key(entry, column))

    def append(self, entry: Entry, column: Column, result: CellResult) -> None:
        """Append a finished cell."""
        if self._file is None:
            return
        row = {"key": self._key(entry, column), "result": attrs.asdict(result)}
        try:
            self._file.write(b"\n" + orjson.dumps(row))
            self._file.flush()
        except OSError as error:
            msg = f"--resume {self._file.name}: {error}"
            raise StorageError(msg) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@attrs.frozen
class Checked:
    """A cell of a leaderboard that was run again.

    Attributes:
        policy, cell: names of the policy and of the cell.
        same: whether hits and evictions are those of the leaderboard.
        expected, found: hits and digest of the evictions, there and here.
    """

    policy: str
    cell: str
    expected: tuple[int, str]
    found: tuple[int, str]

    @property
    def same(self) -> bool:
        """Whether hits and evictions are those of the leaderboard."""
        return self.expected == self.found


def check_leaderboard(
    document: Mapping[str, Any], panel: Panel, cells: int, seed: int = 0
) -> Iterator[Checked]:
    """Run `cells` cells of a leaderboard again, drawn by `seed`, and yield what came out.

    Raises:
        InputError: the document is no leaderboard, or names policies or streams that are not
            here, or in another version.
    """
    streams = {stream.name: stream for stream in panel.streams}
    try:
        every = [(policy, cell) for policy in document["policies"] for cell in policy["cells"]]
        digests = {stream["name"]: stream["digest"] for stream in document["streams"]}
        drawn = Random(seed).sample(every, min(cells, len(every)))  # noqa: S311 - no secret
        for policy, cell in drawn:
            stream = streams[cell["stream"]]
            if read_stream(stream).digest != digests[stream.name]:
                msg = f"stream {stream.name!r} here is another one than in the leaderboard"
                raise InputError(msg)
            entry = Entry(policy["entry"])
            source = entry.describe()["source"]
            if source != policy["source"]:
                msg = (
                    f"policy {policy['entry']!r} here has the source digest {source}, and in "
                    f"the leaderboard {policy['source']}: it is another version"
                )
                raise InputError(msg)
            result = run_cell(Cell(entry, stream, cell["share"]))
            yield Checked(
                policy["entry"],
                cell_name(stream.name, cell["share"]),
                (cell["hits"], cell["evictions"]),
                (result.total, result.evictions),
            )
    except (KeyError, TypeError) as error:
        msg = f"this is no leaderboard of panel {panel.name!r}: {error!r} is missing"
        raise InputError(msg) from error


def built_in_entries() -> list[Entry]:
    """Return the installed policies that judge without options, but those that read ahead."""
    entries = map(Entry, Plugins().names("eviction"))
    return [entry for entry in entries if not entry.looks_ahead]
