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
from kvcore_judge.protocol import (
    BUILT_IN,
    TIMED_SHARES,
    Panel,
    Stream,
    cell_name,
    find_panel,
    read_stream,
)
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
        """Return the CPU time per block looked up or evicted, over that of LRU in the run."""
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
        return Entry(text).tuned(self.panel, self.about[text]["name"])

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
    code = {entry.text: entry.code() for entry in listed}
    columns: list[Column] = []
    streams: dict[str, dict[str, Any]] = {}
    for stream in panel.streams:
        streams[stream.name] = _about(stream)
        columns += columns_of(stream, panel.shares)
    pairs = [(entry, column) for column in columns for entry in listed]
    digests = [
        _digest(about[entry.text], code[entry.text], streams[column.stream.name], column)
        for entry, column in pairs
    ]
    with journal or nullcontext() as log:
        done = {} if log is None else log.results
        results = {
            (entry.text, column.name): CellResult(**done[digest])
            for (entry, column), digest in zip(pairs, digests, strict=True)
            if digest in done
        }
        todo = [index for index, digest in enumerate(digests) if digest not in done]
        calls = [
            Call(
                partial(run_cell, Cell(entry, column.stream, column.share), timed=column.timed),
                f"policy {entry.text!r} on {column.name}",
            )
            for entry, column in (pairs[index] for index in todo)
        ]
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


def _about(stream: Stream) -> dict[str, Any]:
    """Return the workload of a stream, its digest, and its lengths."""
    read = read_stream(stream)
    return {
        "workload": stream.workload.partition(":path=")[0],
        "digest": read.digest,
        "requests": len(read.requests),
        "key_tokens": read.key_tokens,
        "footprint_blocks": read.blocks,
    }


def _digest(
    about: Mapping[str, Any], code: Mapping[str, str], stream: Mapping[str, Any], column: Column
) -> str:
    """Return what the result of a cell depends on, as a digest."""
    parts = [version("kvcore"), about, code, stream, column.blocks, column.timed]
    text = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def panel_of(document: Any, given: str | None) -> Panel:
    """Return the panel of a leaderboard.

    Args:
        document: the leaderboard, which may be anybody's.
        given: the panel that the caller names; None: that of the leaderboard, whose files are
            not opened.

    Raises:
        InputError: the panel is none of kvcore's, and none is given; or another one is given;
            or the schema of the leaderboard is another one than here.
    """
    named = document.get("panel") if isinstance(document, dict) else None
    if not isinstance(named, str):
        msg = "this is no leaderboard: it names no panel"
        raise InputError(msg)
    if given is None and named not in BUILT_IN:
        msg = f"its panel is that of a file, {named!r:.200}: give it by --panel FILE"
        raise InputError(msg)
    # A file may have another path here; what it says is compared by its cells and digests.
    if given not in (None, named) and (given in BUILT_IN or named in BUILT_IN):
        msg = f"--panel {given}: this leaderboard is of panel {named!r:.200}; leave out --panel"
        raise InputError(msg)
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        msg = (
            f"this leaderboard has schema {schema!r:.80}, and here is schema {SCHEMA}: check "
            "it with the version of kvcore that it names"
        )
        raise InputError(msg)
    return find_panel(given or named)


def check_scores(document: Mapping[str, Any], panel: Panel) -> None:
    """Compute scores and ranks of a leaderboard from its cells; raise if it has others.

    Args:
        document: the leaderboard, which may be anybody's.
        panel: streams and pool sizes.

    Raises:
        InputError: the document is no leaderboard of the panel, or has other scores or ranks
            than its cells give.
    """
    names, least = panel.names, None
    try:
        optimum = _of_cells(document["cells"], "optimum", names)
        policies = [
            (policy, _of_cells(policy["cells"], "hits", names))
            for policy in document["policies"]
        ]
        bases = [hits for policy, hits in policies if policy["entry"] == BASE.text]
        if len(bases) != 1:
            msg = f"the leaderboard has {len(bases)} policies {BASE.text!r}, and needs one"
            raise InputError(msg)
        (base,) = bases
        for policy, hits in policies:
            tuned = Entry(policy["entry"]).tuned(panel, policy["name"])
            ratios = [
                ratio_of(cell_name(stream, share), *numbers, tuned=stream in tuned)
                for (stream, share), *numbers in zip(names, hits, base, optimum, strict=True)
            ]
            score, said = score_of(ratios), policy["score"]
            for name, number in orjson.loads(orjson.dumps(attrs.asdict(score))).items():
                if said[name] != number:
                    msg = (
                        f"policy {policy['entry']!r:.200}: the leaderboard says {name}="
                        f"{said[name]!r:.80}, and its cells give {number!r}"
                    )
                    raise InputError(msg)
            if least is not None and _number(score) > least:
                msg = f"policy {policy['entry']!r:.200} ranks below one of a lower score"
                raise InputError(msg)
            least = _number(score)
    except (KeyError, TypeError) as error:
        msg = f"this is no leaderboard of panel {panel.name!r}: {error!r} is missing"
        raise InputError(msg) from error


def _of_cells(cells: Any, field: str, names: Sequence[tuple[str, int]]) -> list[int]:
    """Return a number of each cell of a panel, in the order of their names.

    Raises:
        InputError: there are other cells, or no whole numbers of 0 or more.
    """
    numbers = [cell[field] for cell in cells]
    if [(cell["stream"], cell["share"]) for cell in cells] != names:
        msg = f"the leaderboard has {field} of other cells than those of its panel"
        raise InputError(msg)
    if not all(type(number) is int and number >= 0 for number in numbers):
        msg = f"the leaderboard has {field} of cells that are no whole numbers of 0 or more"
        raise InputError(msg)
    return numbers


@attrs.frozen
class Checked:
    """A cell of a leaderboard that was run again.

    Attributes:
        policy, cell: names of the policy and of the cell.
        expected, found: its values, with those of its stream, there and here.
    """

    policy: str
    cell: str
    expected: Mapping[str, Any]
    found: Mapping[str, Any]

    @property
    def same(self) -> bool:
        """Whether the values are those of the leaderboard."""
        return not self.differing

    @property
    def differing(self) -> list[str]:
        """The names of the values that differ."""
        return [name for name, value in self.found.items() if self.expected[name] != value]


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
    own = [(entry.describe(), entry) for entry in entries]
    try:
        every = [(policy, cell) for policy in document["policies"] for cell in policy["cells"]]
        abouts = {stream["name"]: stream for stream in document["streams"]}
        beside = {(each["stream"], each["share"]): each for each in document["cells"]}
        drawn = Random(seed).sample(every, min(cells, len(every)))  # noqa: S311 - no secret
        if not drawn:
            msg = "the leaderboard has no cells that could be run again"
            raise InputError(msg)
        for policy, cell in drawn:
            stream, share = streams[cell["stream"]], shares[cell["share"]]
            about = _about(stream)
            if about["digest"] != abouts[stream.name]["digest"]:
                msg = f"stream {stream.name!r} here is another one than in the leaderboard"
                raise InputError(msg)
            # Files, and classes of one, may share a name: that which is alike is meant.
            alike = [entry for about, entry in own if about.items() <= policy.items()]
            alike += [entry for about, entry in own if about["entry"] == policy["entry"]]
            entry = alike[0] if alike else _installed(policy["entry"])
            described = entry.describe()
            source = described["source"]
            if source != policy["source"]:
                msg = (
                    f"policy {policy['entry']!r} here has the source digest {source}, and in "
                    f"the leaderboard {policy['source']}: it is another version"
                )
                raise InputError(msg)
            (column,) = columns_of(stream, [share])
            again = _again(panel, column, entry, described)
            found = {"name": described["name"], **again, **about}
            # Its text may name a file, which has another path here.
            del found["workload"]
            said = abouts[stream.name] | beside[stream.name, share] | cell
            said["name"] = policy["name"]
            yield Checked(
                policy["entry"], column.name, {name: said[name] for name in found}, found
            )
    except (KeyError, TypeError) as error:
        msg = f"this is no leaderboard of panel {panel.name!r}: {error!r} is missing"
        raise InputError(msg) from error


def _again(
    panel: Panel, column: Column, entry: Entry, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a policy in a cell; return its values as a document has them.

    LRU is run as well, with whose hits the interval is computed.
    """
    results = {
        (each.text, column.name): run_cell(
            Cell(each, column.stream, column.share), timed=column.timed and each == entry
        )
        for each in dict.fromkeys([BASE, entry])
    }
    board = Leaderboard(panel, [column], [entry], {entry.text: about}, results, {})
    document = orjson.loads(orjson.dumps(board.document()))
    return {**document["cells"][0], **document["policies"][0]["cells"][0]}


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
