"""Reports as Markdown and as LaTeX, for pages and papers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvcore.sections import Section, Table

_LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "≈": r"$\approx$",
        "–": "--",
        "\0": "{}",
    }
)


def _text(
    sections: Sequence[Section], sentence: Callable[[str], str], table: Callable[[Table], str]
) -> str:
    """Return sections with blank lines between; charts and empty sections are left out."""
    parts: list[str] = []
    for section in sections:
        if isinstance(section, str):
            parts += (sentence(line) for line in section.splitlines() if line)
        elif isinstance(section, Table) and section.rows:
            parts.append(table(section))
    return "\n\n".join(parts)


def _markdown(text: str) -> str:
    """Escape the signs that Markdown reads otherwise; an underscore in a word is none."""
    return re.sub(r"^[-+#](?= )|[\\`*<|\[\]]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)


def _headers(table: Table) -> list[str]:
    """Return the headers of a table; one that there was has that before it, for its name."""
    headers: list[str] = []
    for header in map(str.strip, table.headers):
        headers.append(f"{headers[-1]}, {header}" if header in headers else header)
    return headers


def _markdown_table(table: Table) -> str:
    """Return a table with pipes."""

    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(_markdown(str(cell).strip()) for cell in cells)} |"

    rule = ["---:" if header in table.flush_right else "---" for header in table.headers]
    return "\n".join([line(_headers(table)), line(rule), *map(line, table.rows)])


def _latex(text: str) -> str:
    """Escape the signs that LaTeX reads otherwise; the two hyphens of an option are no dash."""
    return re.sub("-(?=-)", "-\0", text).translate(_LATEX)


def _latex_table(table: Table) -> str:
    """Return a `tabular`."""

    def line(cells: Sequence[object]) -> str:
        texts = (_latex(str(cell).strip()) for cell in cells)
        return f"{' & '.join(texts)} \\\\"

    columns = "".join("r" if header in table.flush_right else "l" for header in table.headers)
    return "\n".join(
        [
            f"\\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(_headers(table)),
            r"\midrule",
            *map(line, table.rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


markdown = partial(_text, sentence=_markdown, table=_markdown_table)
"""Return sentences and tables as Markdown."""

latex = partial(_text, sentence=_latex, table=_latex_table)
"""Return tables as LaTeX, with rules of `booktabs`, and sentences as paragraphs."""

MARKUPS: Mapping[str, Callable[[Sequence[Section]], str]] = {
    "markdown": markdown,
    "latex": latex,
}
