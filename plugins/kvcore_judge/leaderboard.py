"""A leaderboard: every policy in every cell of a panel, resumed, written and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from random import Random
from typing import Any

import attrs
import orjson

from kvcore.cache.layout import BlockLayout
from kvcore.config.values import read_plugin
from kvcore.distributions import version
from kvcore.errors import InputError
from kvcore.plugins.manager import Plugins
from kvcore.plugins.options import takes_path
from kvcore.progress import Progress, silent
from kvcore.units import NS_PER_S
from kvcore_judge.cells import Cell, CellResult, run_cell
from kvcore_judge.entries import Entry
from kvcore_judge.protocol import TIMED_SHARES, TUNED, Panel, Stream, cell_name, read_stream
from kvcore_judge.scores import Ratio, Score, interval, ratio_of, score_of
from kvcore_lab.sweep.journal import Journal
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
    journal: Journal | None = None,
    progress: Progress = silent,
) -> Leaderboard:
    """Return the leaderboard of LRU and `entries`. Each cell is one replay.

    Args:
        panel: streams and pool sizes.
        entries: the policies.
        jobs: number of processes.
        journal: the journal to which each finished cell is appended. Cells that it has
            already are not run again.
        progress: shows the number of cells that are done.

    Raises:
        InputError: a stream, a policy or the journal cannot be used.
        PolicyError: a policy failed, or answered what it must not.
        StorageError: the disk is full.
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
    digests = [_digest(*pair, about, streams) for pair in pairs]
    with journal or nullcontext() as log:
        done = {} if log is None else log.results
        results = {
            (entry.text, column.name): CellResult(**done[digest])
            for (entry, column), digest in zip(pairs, digests, strict=True)
            if digest in done
        }
        todo = [index for index, digest in enumerate(digests) if digest not in done]
        calls = [_call(*pairs[index]) for index in todo]
        with progress("judging", len(todo)) as tick:
            for number, result in call_all(calls, jobs):
                entry, column = pairs[todo[number]]
                results[entry.text, column.name] = result
                if log is not None:
                    log.add(
                        digests[todo[number]],
                        {"policy": entry.text, "cell": column.name},
                        attrs.asdict(result),
                        result.cpu_ns / NS_PER_S,
                    )
                tick(1)
    return Leaderboard(panel, columns, listed, about, results, streams)


def _call(entry: Entry, column: Column) -> Call[CellResult]:
    cell = Cell(entry, column.stream, column.share)
    return Call(
        partial(run_cell, cell, timed=column.timed),
        f"policy {entry.text!r} on {column.name}",
    )


def _digest(
    entry: Entry,
    column: Column,
    about: Mapping[str, Mapping[str, Any]],
    streams: Mapping[str, Mapping[str, Any]],
) -> str:
    """Return what the result of a cell depends on, as a digest."""
    parts = [about[entry.text], streams[column.stream.name]]
    text = orjson.dumps([version("kvcore"), parts, column.blocks, column.timed])
    return hashlib.blake2b(text, digest_size=16).hexdigest()


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
    document: Mapping[str, Any],
    panel: Panel,
    cells: int,
    seed: int = 0,
    entries: Iterable[Entry] = (),
) -> Iterator[Checked]:
    """Run cells of a leaderboard again, and yield what came out.

    Args:
        document: the leaderboard, which may be anybody's.
        panel: streams and pool sizes.
        cells: number of cells, drawn by `seed`.
        seed: seed of the draw.
        entries: policies that are run though they are not installed, if the document has them.

    Raises:
        InputError: the document is no leaderboard, has no cells, or names policies or streams
            that are not here, or in another version.
    """
    streams = {stream.name: stream for stream in panel.streams}
    shares = {share: share for share in panel.shares}
    own = {entry.describe()["entry"]: entry for entry in entries}
    try:
        every = [(policy, cell) for policy in document["policies"] for cell in policy["cells"]]
        digests = {stream["name"]: stream["digest"] for stream in document["streams"]}
        drawn = Random(seed).sample(every, min(cells, len(every)))  # noqa: S311 - no secret
        if not drawn:
            msg = "the leaderboard has no cells that could be run again"
            raise InputError(msg)
        for policy, cell in drawn:
            stream, share = streams[cell["stream"]], shares[cell["share"]]
            if read_stream(stream).digest != digests[stream.name]:
                msg = f"stream {stream.name!r} here is another one than in the leaderboard"
                raise InputError(msg)
            entry = own.get(policy["entry"]) or _installed(policy["entry"])
            source = entry.describe()["source"]
            if source != policy["source"]:
                msg = (
                    f"policy {policy['entry']!r} here has the source digest {source}, and in "
                    f"the leaderboard {policy['source']}: it is another version"
                )
                raise InputError(msg)
            result = run_cell(Cell(entry, stream, share))
            yield Checked(
                policy["entry"],
                cell_name(stream.name, share),
                (cell["hits"], cell["evictions"]),
                (result.total, result.evictions),
            )
    except (KeyError, TypeError) as error:
        msg = f"this is no leaderboard of panel {panel.name!r}: {error!r} is missing"
        raise InputError(msg) from error


def _installed(text: str) -> Entry:
    """Return a policy that a leaderboard names.

    Raises:
        InputError: to build it would run or open a file that only the leaderboard names.
    """
    plugins, spec = Plugins(), read_plugin(str(text))
    if spec.name not in plugins.names("eviction") or any(
        takes_path(plugins.get("eviction", spec.name), option) for option in spec.options
    ):
        msg = (
            f"policy {text!r} is not installed, or reads files: none is run or opened because "
            "a leaderboard names it. Name it yourself: --policy FILE"
        )
        raise InputError(msg)
    return Entry(text)


def built_in_entries() -> list[Entry]:
    """Return the installed policies that judge without options, but those that read ahead."""
    entries = map(Entry, Plugins().names("eviction"))
    return [entry for entry in entries if not entry.looks_ahead]
