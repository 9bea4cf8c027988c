"""Runs in a report, one or side by side: the files of `simulate` and `run`, and traces."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, cycle, pairwise
from pathlib import Path
from typing import Any

import attrs

from kvcore.errors import InputError, TraceError
from kvcore.files import file_bytes
from kvcore.progress import Progress, silent
from kvcore.sections import Table
from kvcore.serving.result import REQUESTS, TRACE
from kvcore.units import NS_PER_S, format_seconds
from kvcore.untrusted import parse_json
from kvcore_cli.report.simulation import SimulationReport
from kvcore_cli.report.tables import counted, setup, share, slo_of, slo_times
from kvcore_lab.report.capacity import holding
from kvcore_lab.report.paging import paging_sections
from kvcore_pages.report_parts import (
    COLOURS,
    REASONS,
    Axis,
    Line,
    Part,
    Result,
    again,
    against,
    bars,
    chart,
    distributions,
    heading,
    of_replica,
    recorded,
    sentences,
    settings,
    shown,
    table,
)
from kvcore_replay.check.trace import check_trace
from kvcore_replay.gpu_cost import Cost
from kvcore_replay.misses.explain import explain
from kvcore_replay.misses.reasons import OF_POOLS, Explanation, Summary
from kvcore_replay.recorded_run import RunSummary, recorded_run
from kvcore_replay.report.billing import bill_sections
from kvcore_replay.report.misses import SummaryReport, spaced
from kvcore_replay.report.plots import Latencies
from kvcore_replay.report.whatif import run_rows
from kvcore_replay.savings import Savings
from kvcore_replay.state.replicas import ServerReader
from kvcore_replay.timeline import Series, Timeline

POINTS = 960
"""Points of a line over time."""

WINDOWS = 40
"""Number of windows of time for hits and evictions."""

SECONDS, OF_LOOKUPS = Axis("time", "s"), Axis("blocks looked up that hit", "%")


@attrs.frozen(eq=False)
class RecordedTrace:
    """A trace that was read.

    Attributes:
        file: path of the trace.
        replica: the replica of a cluster that was read; None: the trace is of one server.
        run: figures of its run; None if the calls of the cache were made by hand.
        explanation, misses: the reasons of misses, by prompt and in sum.
        timeline: the events over time.
    """

    file: str
    replica: int | str | None
    run: RunSummary | None
    explanation: Explanation
    misses: Summary
    timeline: Timeline

    @classmethod
    def read(
        cls,
        file: str | os.PathLike[str],
        progress: Progress = silent,
        replica: int | str | None = None,
    ) -> RecordedTrace:
        """Check a trace line by line, and read it; in a cluster, that of a replica.

        Raises:
            InputError: the file cannot be opened.
            TraceError: a line is damaged or contradicts what came before, or the file is cut.
        """
        name, size = Path(file).name, file_bytes(Path(file))
        if replica is None:
            for _ in ServerReader(file):  # which refuses the trace of a cluster
                break
        with progress(f"checking {name}", size) as tick:
            try:
                run = recorded_run(file, tick, replica)
            except InputError:  # calls that were made by hand
                run, report = None, check_trace(file)
                if not report.complete:
                    msg = f"{file}: incomplete: {report.cut_reason}"
                    raise TraceError(msg) from None
        with progress(f"explaining {name}", size) as tick:
            explanation = explain(file, replica=replica, tick=tick)
        with progress(f"reading {name}", size) as tick:
            timeline = Timeline.read(file, replica=replica, tick=tick)
        return cls(str(file), replica, run, explanation, explanation.summary(), timeline)

    @property
    def timed(self) -> bool:
        """Whether a clock ran."""
        return bool(self.timeline.header["mode"] != "untimed")

    @property
    def report(self) -> SummaryReport:
        """The report on its misses."""
        return SummaryReport.from_explanation(self.explanation, self.misses)

    @cached_property
    def series(self) -> tuple[list[float], Series]:
        """Times in seconds, and the state of the run at each of them, at most `POINTS`."""
        series = self.timeline.series.thinned(POINTS)
        return [ns / NS_PER_S for ns in series.time], series


@attrs.frozen(kw_only=True, eq=False)
class Run(Result):
    """A run: its summary and its requests, its trace, or both.

    Attributes:
        summary: the document in `summary.json`, or of `--json`; None: there is only a trace.
        refusal: reason of the first rejection; None without a rejected request.
        latencies: latencies of its requests; None if they are not known.
        trace: its trace; None if there is none.
    """

    kind: str = "Run"
    plural: str = "Runs"
    summary: Mapping[str, Any] | None = None
    refusal: str | None = None
    latencies: Latencies | None = None
    trace: RecordedTrace | None = None

    @classmethod
    def read(cls, folder: Path, summary: Mapping[str, Any], progress: Progress = silent) -> Run:
        """Read the files that `simulate` or `run` wrote to a folder beside its summary.

        Raises:
            InputError: a file is damaged, or the result of a cluster.
            TraceError: the trace is damaged, or cut.
        """
        if "replicas" in summary:
            msg = (
                f"{folder} is the result of a cluster: give the trace in it, {folder / TRACE}, "
                "and --replica 0 for the report of a replica"
            )
            raise InputError(msg)
        requests, trace = folder / REQUESTS, folder / TRACE
        latencies = Latencies.read(folder) if requests.is_file() else None
        refusal = None
        if summary["rejected"] and latencies is not None:
            rows = map(parse_json, requests.read_bytes().splitlines())
            refusal = next((row["reason"] for row in rows if row["reason"]), None)
        recorded = RecordedTrace.read(trace, progress) if trace.is_file() else None
        name = str(folder)
        return cls(
            name=name, summary=summary, refusal=refusal, latencies=latencies, trace=recorded
        )

    @classmethod
    def of_trace(
        cls, file: Path, progress: Progress = silent, replica: int | str | None = None
    ) -> Run:
        """Read a trace. Raises InputError and TraceError as `RecordedTrace.read` does."""
        trace = RecordedTrace.read(file, progress, replica)
        latencies = Latencies.from_timeline(trace.timeline) if trace.timed else None
        name = str(file) if replica is None else f"{file}, replica {replica}"
        return cls(name=name, latencies=latencies, trace=trace)

    @property
    def report(self) -> SimulationReport | None:
        """The report of the summary; None if the document does not describe the run."""
        config = None if self.summary is None else self.summary.get("config")
        if self.summary is None or config is None:
            return None
        measured = config.get("clock") == "wall"
        return SimulationReport(
            self.summary,
            config,
            refusal=self.refusal,
            clock="measured" if measured else "simulated",
            done="computed" if "clock" in config else "simulated",
        )

    @property
    def outcome(self) -> RunSummary | None:
        """The figures by which runs are compared."""
        summary = self.summary
        if summary is None:
            return None if self.trace is None else self.trace.run
        names = attrs.fields_dict(RunSummary).keys() & summary.keys() - {"config", "bill"}
        figures = {name: summary[name] for name in names}
        return RunSummary(
            **figures,
            config=summary.get("config", {}) | {"tiers": summary["tiers"]},
            slo_met=summary["slo"]["met"],
        )

    @property
    def timed(self) -> bool:
        """Whether a clock ran."""
        return self.trace is None or self.trace.timed

    @property
    def header(self) -> dict[str, Any]:
        """The settings of the run."""
        summary = self.summary
        if summary is None:
            assert self.trace is not None
            return self.trace.timeline.header
        pool = {name: summary["pool"][name] for name in ("blocks", "block_size")}
        run = {"count": summary["count"], **pool, "slo": slo_of(summary)}
        return {**summary.get("config", {}), **run}

    @property
    def samples(self) -> dict[str, list[float]]:
        """Seconds of requests, by the name of the measure."""
        return {} if self.latencies is None else self.latencies.samples

    @property
    def warning(self) -> str:
        """A caution: the run is saturated, or thrashes."""
        report = self.report
        if report is None or self.summary is None:
            return ""
        holds = (self.summary["saturation"] or {}).get("holds")
        holding_text = holding(holds) if holds is not None else ""
        return "\n".join(filter(None, (report.warning, holding_text, report.thrashing)))

    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one run."""
        report, trace = self.report, self.trace
        yield from sentences(self.warning, "warning")
        if report is not None:
            yield from sentences(report.headline)
        elif trace is not None:
            yield from sentences(trace.report.headline)
        yield from sentences(self._answer(), "answer")
        yield from sentences("\n".join((self.summary or {}).get("notes", ())), "notice")
        yield from self._figures()
        yield from self._over_time()
        yield from self._regret()
        yield heading("What was run")
        if report is None and self.summary is not None:
            told = "The summary does not say: `kvcore simulate --out` writes what was run too."
            yield from sentences(told, "missing")
        if report is not None or self.summary is None:
            yield from sentences(report.setup if report is not None else setup(self.header))
        rows = settings(self.header)
        yield from table("All settings", ["setting", "value"], rows, (), folded=True)
        yield from self._commands()

    def _answer(self) -> str:
        """Return sentences on what was served in time, what it cost, and what hits saved."""
        summary = self.summary
        if summary is None:
            return ""
        first, slo = summary["ttft_s"], slo_times(slo_of(summary)).replace(",", ", ")
        lines = []
        if first is not None:
            half, late = (format_seconds(first[rank]) for rank in ("p50", "p99"))
            lines.append(
                f"{share(summary['slo']['met'])} of the requests were served within the SLO "
                f"({slo}); first tokens came after {half} in the median, and after {late} in "
                "the 99th percentile."
            )
        if "cost" in summary:
            fields = {name: summary["cost"][name] for name in Cost._fields}
            lines.append(str(Cost(**fields)))
        if "savings" in summary:
            lines.append(str(Savings(**summary["savings"])))
        return "\n".join(lines)

    def _figures(self) -> Iterator[Part]:
        report, summary, latencies = self.report, self.summary, self.latencies
        if self.outcome is None and latencies is None:
            return
        yield heading("Figures")
        if report is not None and summary is not None:
            tables = [section for section in report.sections if isinstance(section, Table)]
            yield from shown(
                tables,
                "Times by mean and percentile",
                "Figures of the run",
                "Tiers below the pool",
                "How long blocks rest in the cache",
            )
            if "paged" in summary:
                _, *both = paging_sections(summary, summary["paged"], 0)
                yield from shown(both, "In one piece, and paged")
            if "bill" in summary:
                yield from shown(bill_sections(summary["bill"]))
            yield from sentences(report.closing)
        elif self.outcome is not None:
            rows = run_rows([self.outcome], timed=self.timed)
            yield from table("Figures of the run", ["figure", "value"], rows)
        marks = {} if latencies is None else latencies.expected
        yield from distributions(
            "Latency of requests",
            "The share of requests whose time is at most that, on a logarithmic scale.",
            Axis("time", "s", log=True),
            self.samples,
            marks=[
                (time, f"SLO: {name} {format_seconds(time)}") for name, time in marks.items()
            ],
        )
        if report is not None and latencies is None:
            told = "Give the folder that `--out` wrote for the distribution of these times."
            yield from sentences(told, "missing")

    def pool(self) -> tuple[Sequence[float], Sequence[float], Sequence[float], int]:
        """Return times in seconds, blocks in use then, blocks cached, and the pool's blocks."""
        if self.trace is not None:
            times, series = self.trace.series
            return times, series.private, series.cached, self.header["blocks"]
        assert self.summary is not None
        pool = self.summary["pool"]
        line = pool["timeline"]
        return line["t_s"], line["active"], line["cached"], pool["blocks"]

    def _over_time(self) -> Iterator[Part]:
        yield heading("Over time")
        times, used, cached, blocks = self.pool()
        both = [used_share + other for used_share, other in zip(used, cached, strict=True)]
        # A trace counts blocks of one sequence alone, a summary those of any running sequence.
        names = ("of one request alone", "shared or cached")
        if self.trace is None:
            names = ("of running requests", "cached")
        yield from chart(
            "The pool",
            f"Of {counted(blocks, 'block')}, those {names[0]} (below), and those {names[1]} "
            "(above them). What is left is free.",
            SECONDS,
            Axis("blocks"),
            [
                Line(names[0], times, used, "orange", step=True, area=True),
                Line(names[1], times, both, "blue", step=True, area=True),
            ],
            top=blocks,
        )
        if self.trace is not None:
            yield from _trace_over_time(self.trace)

    def _regret(self) -> Iterator[Part]:
        trace = self.trace
        if trace is None:
            yield heading("Regret and miss reasons")
            yield from sentences(
                "How far this is from the optimum, why prompts missed, and what happened at "
                "each moment, is in a trace, and this run has none here: run it with --out "
                "DIR, or with --trace FILE, and give that to `kvcore report` too.",
                "missing",
            )
            return
        summary, explanation = trace.misses, trace.explanation
        report = trace.report
        yield heading("Regret")
        yield from sentences(_regret(explanation, summary))
        went = {"hit": summary.hit_tokens}
        went |= {spaced(name): lost.tokens for name, lost in summary.categories.items()}
        went = {name: tokens for name, tokens in went.items() if tokens}
        yield from bars(
            "Where the prompt tokens went",
            "Prompt tokens that hit, and those that missed by the reason.",
            [*went],
            {"tokens": [*map(float, went.values())]},
            lambda tokens: f"{tokens:,.0f} ({share(tokens / (summary.prompt_tokens or 1))})",
        )
        ranked = sorted(
            explanation.requests.values(), key=lambda request: request.hit - request.optimum
        )
        yield from table(
            "Requests that lost most against the optimum",
            ["request", "prompt tokens", "hit", "in the optimum", "less"],
            [
                (
                    request.request,
                    *(f"{n:,}" for n in (request.tokens, request.hit, request.optimum)),
                    f"{request.optimum - request.hit:,}",
                )
                for request in ranked[:5]
                if request.optimum > request.hit
            ],
        )
        yield heading("Why prompts missed")
        yield from sentences(report.headline.splitlines()[-1])
        yield from shown([report.table], REASONS[0])
        if explanation.groups:
            yield from shown([report.groups], "Tokens that a cache group was short for")
        yield from shown([report.places, report.requests, report.notes], *REASONS[1:])

    def _commands(self) -> Iterator[Part]:
        in_folder = self.latencies is not None or self.trace is not None
        options = ("--out", "results") if in_folder else ("--json",)
        commands = [recorded(self.summary or {}, *options)]
        if self.trace is not None:
            file = self.trace.file
            fixed = self.trace.run is None or self.trace.timeline.header["mode"] == "wall"
            which = of_replica(self.trace.replica)
            commands += [
                ["kvcore", "whatif", file, *([] if fixed else ["--export", "again.jsonl.gz"])],
                ["kvcore", "explain", file, *which, "--summary"],
                ["kvcore", "view", file, *which, "--out", "view.html"],
            ]
        yield from again(*commands)

    @classmethod
    def together(cls, results: Sequence[Result], labels: Sequence[str]) -> Iterator[Part]:
        """Yield several runs side by side, and how others differ from the first."""
        runs = [run for run in results if isinstance(run, Run)]
        by_label = dict(zip(labels, runs, strict=True))
        outcomes = [run.outcome for run in runs]
        known = [outcome for outcome in outcomes if outcome is not None]
        if len(known) == len(runs):
            yield from sentences("\n".join(_verdicts(known, labels)))
        # A summary has other fields than a header, so that all would differ from those.
        traced = {label: run.trace for label, run in by_label.items() if run.trace is not None}
        headers = [run.header for run in runs]
        if len(traced) == len(runs) and any(run.summary is None for run in runs):
            headers = [trace.timeline.header for trace in traced.values()]
        settled = [dict(settings(header)) for header in headers]
        names = dict.fromkeys(chain.from_iterable(settled))
        rows = ([name, *(each.get(name, "") for each in settled)] for name in names)
        differ = [row for row in rows if len(set(row[1:])) > 1]
        yield from table("Settings that differ", ["setting", *labels], differ, ())
        if len(known) == len(runs):
            figures = run_rows(known, timed=all(run.timed for run in runs))
            yield from table("Figures", ["", *against(labels)], figures)
        for name in ("TTFT", "TPOT"):
            yield from distributions(
                f"{name} of requests",
                f"The share of requests whose {name} is at most that, on a logarithmic scale.",
                Axis(name, "s", log=True),
                {label: run.samples.get(name, []) for label, run in by_label.items()},
            )
        yield from _pools(by_label)
        yield from _over_traces(traced)


def _verdicts(outcomes: Sequence[RunSummary], labels: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on each run: its hits, its time to the first token, and its load."""
    base = (outcomes[0].ttft_s or {}).get("mean")
    for run, label in zip(outcomes, labels, strict=True):
        sentence = f"{label}: {share(run.hit['ratio']['token'])} of the prompt tokens hit"
        mean = (run.ttft_s or {}).get("mean")
        if mean is not None:
            sentence += f", and the first token comes after {format_seconds(mean)} on average"
            if base and run is not outcomes[0]:
                digits, before = 0 if mean >= 10 * base else 2, format_seconds(base)
                times = f"{mean / base:,.{digits}f} times the {before} of"
                same = format_seconds(mean) == before
                sentence += f", {'as in' if same else times} {labels[0]}"
        load = " SATURATED: its times tell how long the workload is." if run.saturated else ""
        yield f"{sentence}.{load}"


def _trace_over_time(trace: RecordedTrace) -> Iterator[Part]:
    """Yield the charts that need a trace."""
    timeline, (times, series) = trace.timeline, trace.series
    yield from chart(
        "Cache groups",
        "Blocks of each cache group, cached ones and those of running requests.",
        SECONDS,
        Axis("blocks"),
        _steps((f"group {name}", times, blocks) for name, blocks in series.groups.items()),
    )
    if trace.timed:
        yield from chart(
            "Requests",
            "Requests that wait, and those that were admitted and run.",
            SECONDS,
            Axis("requests"),
            [
                Line("waiting", times, series.waiting, "orange", step=True),
                Line("running", times, series.running, "blue", step=True),
            ],
        )
    window = max(1, (timeline.end - timeline.begin) // WINDOWS)
    recent, so_far = (_percents(series.hit_ratio(span)) for span in (window, None))
    yield from chart(
        "Hits",
        f"The share of looked-up blocks that hit, over the last "
        f"{format_seconds(window / NS_PER_S)} and over all the time before.",
        SECONDS,
        OF_LOOKUPS,
        [
            Line("of late", times, recent, "sky", step=True),
            Line("so far", times, so_far, "blue", step=True),
        ],
    )
    # To the end, also of a run that is shorter in ns than a multiple of the windows.
    length = timeline.end - timeline.begin
    edges = sorted({timeline.begin + length * step // WINDOWS for step in range(WINDOWS + 1)})
    counts = [
        timeline.series.evicted_blocks[bisect_right(timeline.series.time, edge) - 1]
        for edge in edges[1:]
    ]
    rates = [
        (after - before) * NS_PER_S / (upto - since)
        for (before, after), (since, upto) in zip(
            pairwise([0, *counts]), pairwise(edges), strict=True
        )
    ]
    yield from chart(
        "Evictions",
        "Blocks evicted a second, over windows of equal length.",
        SECONDS,
        Axis("blocks a second"),
        [Line("evicted", [e / NS_PER_S for e in edges], [*rates, None], "orange", step=True)]
        if any(rates)
        else [],
    )


def _percents(ratios: Sequence[float]) -> list[float | None]:
    """Return shares as percentages; None where they are NaN."""
    return [None if ratio != ratio else 100 * ratio for ratio in ratios]  # noqa: PLR0124


def _regret(explanation: Explanation, summary: Summary) -> str:
    """Return sentences on the distance between the hits of a trace and those of the optimum."""
    if explanation.groups:
        return "There is no optimum of a cache of groups to compare with."
    best = sum(request.optimum for request in explanation.requests.values())
    tokens, hit = summary.prompt_tokens, summary.hit_tokens
    lost = summary.categories["policy"]
    room = summary.categories["capacity"]
    whose = f"{explanation.cost.model} on one {explanation.cost.device}"
    ideal, real = (share(hits / tokens if tokens else None) for hits in (best, hit))
    told = (
        "With the same pool, perfect foresight, and one request after another, "
        f"{counted(best, 'token')} would have hit ({ideal}), in place of {hit:,} ({real})."
    )
    lines = [told]
    if loaded := summary.categories["loaded"].tokens:
        lines.append(f"Besides, {counted(loaded, 'token')} came from lower tiers.")
    if not lost.tokens and not room.tokens:
        return "\n".join([*lines, "Nothing that missed had been evicted."])
    lines.append(
        f"What {explanation.plugin('eviction')} evicted and the optimum would have kept: "
        f"{counted(lost.tokens, 'token')}, at least {format_seconds(lost.seconds)} of prefill "
        f"of {whose}. What the optimum would have lost as well, for lack of memory: "
        f"{counted(room.tokens, 'token')}, {format_seconds(room.seconds)}."
    )
    return "\n".join(lines)


def _steps(columns: Iterable[tuple[str, Sequence[float], Any]]) -> list[Line]:
    """Return a line of steps for each name, times and values, in colours by turns."""
    pairs = zip(columns, cycle(COLOURS), strict=False)
    return [Line(*column, colour, step=True) for column, colour in pairs]


def _pools(runs: Mapping[str, Run]) -> Iterator[Part]:
    """Yield the use of the pools over time; nothing if only some of the runs have traces."""
    traced = {run.trace is not None for run in runs.values()}
    if len(traced) > 1:
        return
    lines = []
    for label, run in runs.items():
        times, used, _, blocks = run.pool()
        lines.append((label, times, [100 * count / blocks for count in used]))
    whose = "of one request alone" if traced == {True} else "of running requests"
    about, y = f"The share of the pool's blocks that are {whose}.", Axis(f"blocks {whose}", "%")
    yield from chart("The pool", about, SECONDS, y, _steps(lines), top=100)


def _over_traces(traces: Mapping[str, RecordedTrace]) -> Iterator[Part]:
    """Yield the hits of several traces over time, and their misses by the reason."""
    if not traces:
        return
    lines = []
    for label, trace in traces.items():
        times, series = trace.series
        lines.append((label, times, _percents(series.hit_ratio())))
    about = "The share of looked-up blocks that hit so far."
    yield from chart("Hits", about, SECONDS, OF_LOOKUPS, _steps(lines))
    misses = {label: trace.misses for label, trace in traces.items()}
    names = [name for name in OF_POOLS if any(_tokens(each, name) for each in misses.values())]
    tokens = {
        label: [each.hit_tokens, *(_tokens(each, name) for name in names)]
        for label, each in misses.items()
    }
    headers = ["hit", *map(spaced, names)]
    yield from bars(
        "Where the prompt tokens went",
        "The share of the prompt tokens that hit, and of those that missed by the reason.",
        headers,
        {
            label: [100 * n / (misses[label].prompt_tokens or 1) for n in numbers]
            for label, numbers in tokens.items()
        },
        lambda percent: f"{percent:.1f}%",
    )
    rows = [
        [header, *(f"{n:,}" for n in numbers)]
        for header, *numbers in zip(headers, *tokens.values(), strict=True)
    ]
    title = "Prompt tokens that hit, and that missed by the reason"
    yield from table(title, ["", *misses], rows)


def _tokens(summary: Summary, category: str) -> int:
    """Return the tokens that missed for a reason, which only other traces may have."""
    lost = summary.categories.get(category)
    return 0 if lost is None else lost.tokens
