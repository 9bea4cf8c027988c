"""Parts of a report, as JSON for its script: headings, sentences, tables and charts."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, cycle
from typing import Any, TypeAlias

import attrs

from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import NS_PER_S, format_number, format_seconds
from kvcore_cli.report.tables import share
from kvcore_replay.report.charts import POLICIES, as_percent, is_bound, policy_of
from kvcore_replay.report.whatif import config_text

Document: TypeAlias = Mapping[str, Any]
Part: TypeAlias = dict[str, Any]
"""A part of a page as JSON: its `kind`, and the fields that report.js reads for that kind."""

DASHES = ("solid", "dash", "dot")

COLOURS = ("blue", "orange", "green", "pink", "yellow", "sky", "grey")
"""Names of colours in shell.css, in the order of lines."""

PLACES = {name: place for place, name in enumerate(POLICIES[: len(COLOURS) - 1])}
"""The places among the colours of the policies that have one of them in plots too."""

MOST_ROWS = 24
"""Largest number of rows of the table with the numbers of a chart."""

QUANTILES = 200
"""Steps of the line of a distribution."""

UNRECORDED = (
    "The result does not say: it was written from Python, as a table, or by an earlier "
    "release. JSON that `kvcore` prints or writes has its command."
)
"""What a page says of a document without a command."""

REASONS = (
    "Missed tokens by reason",
    "Where prompts part from earlier ones",
    "Requests that lost most to evictions, and for which most was evicted",
)
"""Titles of the tables of miss reasons."""

PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
"""Rows of its table."""

WRITERS: Mapping[str, Callable[[float], str]] = {
    "s": format_seconds,
    "%": lambda share: f"{share:.1f}%",
    "": lambda value: f"{value:,}" if type(value) is int else format_number(value),
}
"""How a value is written, by its unit."""

UNITS: Mapping[Callable[[Any], str], tuple[str, float]] = {
    share: ("%", 100),
    as_percent: ("%", 100),
    format_seconds: ("s", 1),
}
"""The unit and the factor of the values of a panel, by the function that writes them."""

SPREAD = 4
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


@attrs.frozen
class Axis:
    """An axis of a chart.

    Attributes:
        title: what it shows; its unit too, where that is none of `WRITERS`.
        unit: one of `WRITERS`.
        log: whether it is logarithmic.
    """

    title: str
    unit: str = ""
    log: bool = False


@attrs.frozen
class Line:
    """A line of a chart.

    Attributes:
        name: label of the line.
        x, y: its points, by ascending `x`; a `y` of None is a gap.
        colour: one of `COLOURS`, `ink` or `soft`.
        dash: `solid`, `dash` or `dot`.
        step: whether a value holds until the next point.
        points: whether the points are marked.
        area: whether the area down to the line before is filled.
        label_at: index of the point beside which the name stands; -1: beside the last.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    dash: str = "solid"
    step: bool = False
    points: bool = False
    area: bool = False
    label_at: int = -1


def heading(text: str) -> Part:
    """Return a heading below that of the section."""
    return {"kind": "heading", "text": text}


def sentences(text: str, kind: str = "text") -> list[Part]:
    """Return each line of `text` as a paragraph of a kind.

    A page begins with each `warning` and each `answer` of its results; `notice` and `missing`
    say what to know of figures, and what lacks.
    """
    return [{"kind": kind, "text": line} for line in text.splitlines() if line]


def again(*commands: Sequence[str]) -> Iterator[Part]:
    """Yield the commands that make a result again; one without words is not known."""
    yield heading("How to make it again")
    known = [command(*words) for words in commands if words]
    yield from known or sentences(UNRECORDED, "missing")


def recorded(document: Document, *options: str) -> list[str]:
    """Return the command line that a document records, with `options`; empty without one.

    Raises:
        ValueError: what it records is no command line of kvcore.
    """
    words = document.get("command", [])
    if not words:
        return []
    if words[0] != "kvcore" or not all(isinstance(word, str) for word in words):
        msg = "its command is none of kvcore"
        raise ValueError(msg)
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *options, *words[end:]]


def of_replica(replica: int | str | None) -> list[str]:
    """Return the words of a command line that choose a replica; none for one server."""
    return [] if replica is None else ["--replica", str(replica)]


def command(*words: str) -> Part:
    """Return a command line, quoted for a shell."""
    return {"kind": "command", "text": shlex.join(words)}


def against(labels: Sequence[str]) -> list[str]:
    """Return the headers of results side by side, each but the first with its difference."""
    first, *others = labels
    return [first, *(header for label in others for header in (label, f"against {first}"))]


def table(
    caption: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Iterable[str] | None = None,
    *,
    folded: bool = False,
) -> list[Part]:
    """Return a table, or nothing without rows.

    `right` are the headers of columns that are flush right; None: all except the first. A
    reader opens one that is `folded`.
    """
    cells = [list(map(str, row)) for row in rows]
    flush = set(headers[1:] if right is None else right)
    columns = [index for index, header in enumerate(headers) if header in flush]
    part = {"kind": "table", "caption": caption, "headers": [*headers], "rows": cells}
    more = {"folded": True} if folded else {}
    return [{**part, "right": columns, **more}] if cells else []


def chart(
    title: str,
    about: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    *,
    top: float | None = None,
    marks: Iterable[tuple[float, str]] = (),
    numbers: Part | None = None,
) -> list[Part]:
    """Return a chart with its numbers as a table, or nothing without points.

    Args:
        title: heading of the chart.
        about: a sentence on the content of the chart, also for readers who cannot see it.
        x: the horizontal axis.
        y: the vertical axis.
        lines: the lines.
        top: end of the vertical axis; None: a little above the highest point.
        marks: values of `x` that get a vertical line, each with its label.
        numbers: the table; None: the values of the lines at up to `MOST_ROWS` of their points.
    """
    if x.log:
        lines = [_positive(line) for line in lines]
    drawn = [attrs.asdict(line) | {"x": [*line.x], "y": [*line.y]} for line in lines if line.x]
    if not drawn:
        return []
    if numbers is None:
        numbers = _numbers(x, y, lines)
    return [
        {
            "kind": "chart",
            "title": title,
            "about": about,
            "x": attrs.asdict(x),
            "y": attrs.asdict(y),
            "lines": drawn,
            "top": top,
            "marks": [{"at": x, "text": text} for x, text in marks],
            "numbers": numbers,
        }
    ]


def bars(
    title: str,
    about: str,
    names: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    written: Callable[[float], str],
) -> list[Part]:
    """Return a chart with a bar for each name and group, which `written` labels."""
    texts = {group: list(map(written, values)) for group, values in groups.items()}
    headers = ["", *groups]
    rows = [
        [name, *(texts[group][index] for group in groups)] for index, name in enumerate(names)
    ]
    series = [
        {"name": group, "values": [*values], "texts": texts[group], "colour": colour}
        for (group, values), colour in zip(groups.items(), cycle(COLOURS), strict=False)
    ]
    numbers = next(iter(table("", headers, rows)), None)
    shown = {"kind": "bars", "title": title, "about": about, "names": [*names]}
    return [{**shown, "series": series, "numbers": numbers}] if rows else []


def distributions(
    title: str, about: str, x: Axis, samples: Mapping[str, Iterable[float]], **more: Any
) -> list[Part]:
    """Return a chart of cumulative distributions: the share of samples at or below a value."""
    ordered = {name: sorted(values) for name, values in samples.items()}
    ordered = {name: values for name, values in ordered.items() if values}
    lines = []
    for index, (name, values) in enumerate(ordered.items()):
        steps = min(len(values), QUANTILES)
        ranks = [-(-step * len(values) // steps) for step in range(1, steps + 1)]
        shares = [100 * rank / len(values) for rank in ranks]
        # Names stand at different heights, so that similar lines do not hide them.
        height = (index + 1) / (len(ordered) + 1)
        colour = COLOURS[index % len(COLOURS)]
        label_at = min(int(height * steps), steps - 1)
        xs = [values[rank - 1] for rank in ranks]
        lines.append(Line(name, xs, shares, colour, step=True, label_at=label_at))
    write = WRITERS[x.unit]
    rows = [
        [f"{percent}%", *(write(v[-(-percent * len(v) // 100) - 1]) for v in ordered.values())]
        for percent in PERCENTS
    ]
    numbers_table = table("", ["requests at or below", *ordered], rows)
    y = Axis("requests at or below", "%")
    return chart(title, about, x, y, lines, top=100, numbers=numbers_table[0], **more)


def panel_lines(
    panel: Panel, colours: dict[str, int], after: str = "", turn: int = 0
) -> list[Line]:
    """Return the lines of a panel in distinct styles, and its bound.

    Args:
        panel: the panel.
        colours: places of the names among the colours, to which others are added.
        after: text after the names.
        turn: place of the first dash.
    """
    _, factor = UNITS.get(panel.text, ("", 1))
    lines = []
    for name in panel.lines:  # policies first have the colours that they have in plots
        own = PLACES.get(policy_of(name))
        if own is not None and own not in colours.values():
            colours.setdefault(name, own)
    for name, points in panel.lines.items():
        if points:
            if name not in colours:
                colours[name] = next(n for n in count() if n not in colours.values())
            row, column = divmod(colours[name], len(COLOURS))
            colour = "ink" if is_bound(name) else COLOURS[column]
            x, y = zip(*sorted(points), strict=True)
            shares = [factor * value for value in y]
            dash = DASHES[(row + turn) % len(DASHES)]
            lines.append(Line(f"{name}{after}", x, shares, colour, dash, points=True))
    if lines and panel.bound is not None:
        name, bound = panel.bound
        ends = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
        if ends[0] == ends[1]:
            ends = ends[0], 2 * ends[0]
        lines.append(Line(f"{name}{after}", ends, [factor * bound] * 2, "soft", "dash"))
    return lines


def panels(drawn: Chart, title: str) -> Iterator[Part]:
    """Yield the panels of a chart one below another: lines, or bars if the axis has one value.

    A single panel has the title; several have their labels, and the first of bars says of what.
    """
    about = drawn.title
    for panel in drawn.panels:
        label = panel.label if len(drawn.panels) > 1 or not title else title
        label = f"{label[0].upper()}{label[1:]}"
        values = {x for points in panel.lines.values() for x, _ in points}
        if len(values) > 1:
            low, high = min(values), max(values)
            x = Axis(drawn.across, log=drawn.logarithmic and low > 0 and high >= SPREAD * low)
            y = Axis(panel.label, UNITS.get(panel.text, ("", 1))[0])
            yield from chart(label, f"By {drawn.across}.", x, y, panel_lines(panel, {}))
        else:
            bound = {} if panel.bound is None else dict([panel.bound])
            heights = {name: points[0][1] for name, points in panel.lines.items() if points}
            heights |= bound if heights else {}
            group = {panel.label: [*heights.values()]}
            if any(heights.values()):  # none has host memory, for instance
                yield from bars(label, about, [*heights], group, panel.text)
                about = ""


def _positive(line: Line) -> Line:
    """Return a line without the points that a logarithmic axis cannot show."""
    left_out = bisect_right(line.x, 0)
    label_at = line.label_at if line.label_at < 0 else max(line.label_at - left_out, 0)
    return attrs.evolve(line, x=line.x[left_out:], y=line.y[left_out:], label_at=label_at)


def _numbers(x: Axis, y: Axis, lines: Sequence[Line]) -> Part | None:
    """Return the table of a chart: the values at points, and of steps those that hold."""
    xs = sorted({value for line in lines for value in line.x})
    if (last := len(xs) - 1) >= MOST_ROWS:
        xs = [xs[last * row // (MOST_ROWS - 1)] for row in range(MOST_ROWS)]

    def cell(line: Line, place: float) -> str:
        index = bisect_right(line.x, place) - 1
        if index < 0 or (line.x[index] != place and not line.step) or line.y[index] is None:
            return ""
        return WRITERS[y.unit](line.y[index])  # type: ignore[arg-type]  # as above

    rows = [[WRITERS[x.unit](place), *(cell(line, place) for line in lines)] for place in xs]
    return next(iter(table("", [x.title, *(line.name for line in lines)], rows)), None)


@attrs.frozen(kw_only=True, eq=False)
class Result(ABC):
    """Base class of the results that a report shows.

    Attributes:
        name: the file or folder.
        kind, plural: the title of one result, and of several.
    """

    name: str
    kind: str
    plural: str

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """Yield the parts of a report on one result."""

    @classmethod
    @abstractmethod
    def together(cls, results: Sequence[Result], labels: Sequence[str]) -> Iterator[Part]:
        """Yield the parts of a report that shows several results of this kind side by side."""


def shown(content: Iterable[Section | Part], *titles: str) -> Iterator[Part]:
    """Yield the parts for the sections of a report, with titles of its tables and charts."""
    names = iter(titles)
    for section in content:
        if isinstance(section, str):
            yield from sentences(section)
        elif isinstance(section, Table):
            yield from table(
                next(names, ""), section.headers, section.rows, section.flush_right
            )
        elif isinstance(section, Chart):
            yield from panels(section, next(names, ""))
        else:
            yield section


def settings(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of all settings of a run, its plugins with every option."""
    for name, value in fields.items():
        coefficients = name == "latency" and "options" not in value
        if name in NO_SETTINGS or coefficients or value in (None, [], {}):
            continue
        if name == "plugins":
            yield from ((kind, _wrappable(plugin)) for kind, plugin in value.items())
        elif name == "workload" and isinstance(value, Mapping):
            yield name, _wrappable({name: value[name] for name in ("name", "options")})
            yield "workload digest", str(value["digest"])
        elif name == "slo" and isinstance(value, Mapping):
            times = (f"{each}={ns / NS_PER_S:g} s" for each, ns in value.items() if ns)
            yield name, ", ".join(times)
        else:
            yield name.replace("_", " "), _wrappable(value)


def _wrappable(value: Any) -> str:
    """Return a setting as text, with spaces between options, at which lines may break."""
    text = config_text(value)
    return text.replace(",", ", ") if isinstance(value, Mapping) else text


NO_SETTINGS = ("n", "t", "event", "schema")
"""Fields of a header that are no settings."""
