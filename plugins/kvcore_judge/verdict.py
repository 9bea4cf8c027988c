"""The verdict on a policy in a file: its rules, then its score on a panel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import gt
from typing import Any

import attrs

from kvcore.lazy import import_extra
from kvcore_judge.cells import Cell, CellResult, run_cell
from kvcore_judge.elsewhere import run_elsewhere
from kvcore_judge.entries import Entry
from kvcore_judge.leaderboard import BASE, columns_of
from kvcore_judge.protocol import Panel
from kvcore_judge.rules import (
    check_hears_no_future,
    check_is_deterministic,
    check_kit,
    check_reads_no_future,
)
from kvcore_judge.sandbox import BrokenRuleError, Limits, run_in_sandbox
from kvcore_judge.scores import Score, ratio_of, score_of

SCHEMA = 1


@attrs.frozen
class Verdict:
    """The verdict on a policy.

    Attributes:
        policy: name, options and digest of the source; empty if it cannot be built.
        rule: the rule that it breaks; empty if it breaks none.
        what: what it did.
        tests: tests of the kit that passed.
        score: its score; None if it breaks a rule.
        cells: hits by cell, beside those of LRU and of the optimum.
    """

    policy: dict[str, Any]
    rule: str = ""
    what: str = ""
    tests: int = 0
    score: Score | None = None
    cells: Sequence[dict[str, Any]] = ()

    @property
    def passed(self) -> bool:
        """Whether it breaks no rule."""
        return not self.rule

    def document(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return {"schema": SCHEMA, "passed": self.passed, **attrs.asdict(self)}


class Judge:
    """Judges policies on a panel, each in a process of its own.

    Streams and the cells of LRU and the optimum are made once, so that a program may judge
    thousands of policies by one judge.

    Args:
        panel: streams and pool sizes.
        limits: time and memory of a policy.
        kit: whether the kit of eviction policies is run.
        unsafe: whether policies are run where the kernel cannot refuse writes and connections.

    Raises:
        InputError: a stream cannot be used.
        PluginError: a package that the kit needs is not installed.
    """

    def __init__(
        self,
        panel: Panel,
        limits: Limits | None = None,
        *,
        kit: bool = True,
        unsafe: bool = False,
    ) -> None:
        self.panel = panel
        self._limits = limits or Limits()
        self._kit, self._unsafe = kit, unsafe
        if kit:
            for module in ("pytest", "hypothesis"):
                needed = "the kit of eviction policies needs pytest and hypothesis"
                instead = ", or leave it out by --no-kit (kit=False)"
                import_extra(module, needed, "testing", instead)
            import kvcore_testing  # noqa: F401, PLC0415 - here, since a sandbox reads no files
        # Which packages are kvcore's is read from files, too, and kept.
        BASE.describe()
        self._columns = [
            (column, run_cell(Cell(BASE, column.stream, column.share)))
            for stream in panel.streams
            for column in columns_of(stream, panel.shares)
        ]

    def judge(self, entry: Entry) -> Verdict:
        """Return the verdict on a policy.

        Raises:
            InputError: there is no such file or class, or no sandbox on this system.
        """
        if entry.path is None or not entry.path.is_file():
            entry.build()  # which says if there is none: the sandbox has rules on files
        about: dict[str, Any] = {}
        tests = 0
        try:
            about = self._sandboxed(entry.describe, dict[str, Any])
            if self._kit:
                tests = self._sandboxed(partial(check_kit, entry), int)
            played = self._sandboxed(partial(self._play, entry), list[CellResult])
            self._check_hits([result.total for result in played])
            self._check_other_hashes(entry, played)
        except BrokenRuleError as broken:
            return Verdict(about, broken.rule, broken.what, tests)
        ratios, cells = [], []
        tuned = entry.tuned(self.panel, about["name"])
        for (column, base), result in zip(self._columns, played, strict=True):
            numbers = result.total, base.total, column.optimum
            known = column.stream.name in tuned
            ratios.append(ratio_of(column.name, *numbers, tuned=known))
            cells.append(
                {
                    "stream": column.stream.name,
                    "share": column.share,
                    "hits": result.total,
                    "lru": base.total,
                    "optimum": column.optimum,
                    "evictions": result.evictions,
                    "tuned": known,
                }
            )
        return Verdict(about, tests=tests, score=score_of(ratios), cells=cells)

    def _sandboxed(self, function: Callable[[], Any], kind: Any) -> Any:
        return run_in_sandbox(function, kind, self._limits, unsafe=self._unsafe)

    def _check_hits(self, hits: Sequence[int]) -> None:
        """Raise BrokenRuleError for hits that no policy can have."""
        optima = [column.optimum for column, _ in self._columns]
        if len(hits) != len(optima) or any(map(gt, hits, optima)) or min(hits) < 0:
            what = (
                "its hits are none that a policy can have: it changes the cache that it is in"
            )
            raise BrokenRuleError(what, rule="contract")

    def _check_other_hashes(self, entry: Entry, played: Sequence[CellResult]) -> None:
        """Raise BrokenRuleError if it decides otherwise where text has other hashes."""
        middle = len(self.panel.shares) // 2
        cell = Cell(entry, self.panel.streams[0], self.panel.shares[middle])
        again = run_elsewhere(cell, self._limits, unsafe=self._unsafe)
        if again != played[middle].evictions:
            what = (
                f"on {cell.stream.name} in {played[middle].blocks:,} blocks it evicts in "
                "another order in an interpreter with another PYTHONHASHSEED: nothing may "
                "depend on the hashes of text, nor on the order of a set"
            )
            raise BrokenRuleError(what, rule="deterministic")

    def _play(self, entry: Entry) -> list[CellResult]:
        """Check the rules on the panel, and return the result of each cell."""
        stream, share = self.panel.streams[0], self.panel.shares[len(self.panel.shares) // 2]
        check_hears_no_future(entry)
        check_is_deterministic(Cell(entry, stream, share))
        check_reads_no_future(entry, stream, share)
        return [
            run_cell(Cell(entry, column.stream, column.share)) for column, _ in self._columns
        ]
