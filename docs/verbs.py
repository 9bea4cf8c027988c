"""The pages of verbs: what `--help` prints, with links to the options that a page describes.

A table of `docs/reference` whose rows begin with options describes those of the verb in the
heading above, or of the verb that the page is named after. What it describes is a link on the
page of the verb. Any other option has its text on the first page that has it, and is a link on
the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import click

from kvcore_cli.main import known_verbs, loaded_verb

REFERENCE = Path(__file__).parent / "reference"

FLAG = re.compile(r"(?<![\w-])--[\w-]*\w")
MARKUP = re.compile(r"[\\*|_]")
HEADING = re.compile(r"#+ `kvcore ([^`]+)`$")
ROW = re.compile(r"\| (?=`-)(?P<names>(?:\\\||[^|])*) \| (?!as for )")

Said = dict[tuple[str, str], str]
"""Where an option is described, by what `--help` prints of it: name and text.

Without a name the text is a paragraph.
"""


def option_rows(page: str, lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the index of each row that describes options of a verb, and its anchors.

    A row that begins "as for" refers to another verb, and describes nothing.
    """
    verb = page if page in known_verbs() else None
    for index, line in enumerate(lines):
        if heading := HEADING.match(line):
            verb = heading[1]
        elif page == "cli" and line.startswith("## "):
            verb = "all"
        elif verb and (row := ROW.match(line)):
            yield (
                index,
                [f"{verb}{flag}".replace(" ", "-") for flag in FLAG.findall(row["names"])],
            )


def mark_options(page: str, text: str) -> str:
    """Return the text of a page of `docs/reference` with anchors in the rows of options."""
    lines = text.split("\n")
    for index, anchors in option_rows(page, lines):
        marks = "".join(f'<a id="{anchor}"></a>' for anchor in anchors)
        lines[index] = f"| {marks}{lines[index].removeprefix('| ')}"
    return "\n".join(lines)


@cache
def described() -> dict[str, str]:
    """Return the address of each row that describes an option, by its anchor."""
    return {
        anchor: f"../../docs/reference/{path.stem}.html#{anchor}"
        for path in sorted(REFERENCE.glob("*.md"))
        for _, anchors in option_rows(path.stem, path.read_text("utf-8").split("\n"))
        for anchor in anchors
    }


class HelpPage(click.HelpFormatter):
    """Writes the help page of a verb as reStructuredText; links can lead to its options.

    Attributes:
        lines: the lines so far.
    """

    def __init__(self, page: str, said: Said) -> None:
        """Begin `page`; options that are `said` are links, and others are added to them."""
        super().__init__(width=10_000)
        self.lines: list[str] = []
        self._page, self._said = page, said

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write how the verb is called."""
        del prefix
        self.lines += [f".. program:: {prog}", "", "::", "", f"   {prog} {args}", ""]

    def write_text(self, text: str) -> None:
        """Write paragraphs; one that begins with backspace keeps its lines."""
        for paragraph in text.split("\n\n"):
            if paragraph.startswith("\b\n"):
                title, *lines = paragraph[2:].splitlines()
                self.lines += [f"{title}:", "", *(f"   {line}" for line in lines), ""]
                continue
            line = " ".join(paragraph.split())
            word = line.partition(" ")[0]
            page = self._said.setdefault(("", line), self._page)
            is_link = word.isupper() and page != self._page  # an argument of another verb, too
            self.lines += [
                f"``{word}``: as for :doc:`{page}`." if is_link else literal(line),
                "",
            ]

    @contextmanager
    def section(self, name: str) -> Any:
        """Begin a section with a heading."""
        self.lines += [name, "-" * len(name), ""]
        yield

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        """Write links to options, and options, or the verbs of a group, with their texts."""
        del col_max, col_spacing
        links, lines = [], []
        for term, text in rows:
            flags = FLAG.findall(term)
            if flags == ["--help"]:
                continue
            if not flags:  # a verb of a group
                lines += [f":doc:`{term} <{self._page}-{term}>`: {literal(text)}", ""]
            elif address := self._address(term, text, flags):
                links.append(f"`{flags[0]} <{address}>`__")
            else:
                lines += [
                    f".. option:: {term.replace(' / ', ', ')}",
                    "",
                    f"   {literal(text)}",
                    "",
                ]
        if links or lines:
            self.lines += [", ".join(links), "", *lines]
        else:
            del self.lines[-3:]  # the heading of nothing but --help

    def _address(self, term: str, text: str, flags: list[str]) -> str:
        """Return where an option is described; an empty string if that is here."""
        words = self._page.split("-")[1:]
        verbs = ["-".join(words[:end]) for end in range(len(words), 0, -1)]
        anchors = [f"{verb}{flag}" for verb in [*verbs, "all"] for flag in flags]
        by_hand = next(
            (described()[anchor] for anchor in anchors if anchor in described()), None
        )
        here = f"{self._page}.html#cmdoption-{self._page}{flags[0][1:]}"
        address = by_hand or self._said.get((term, text), here)
        self._said.setdefault((term, text), address)
        return "" if address == here else address


def literal(text: str) -> str:
    """Return text of a help page with its code as such, and nothing else taken for markup."""
    parts = re.split(r"`([^`]+)`", text)
    parts[::2] = [FLAG.sub(r"``\g<0>``", MARKUP.sub(r"\\\g<0>", part)) for part in parts[::2]]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    return "".join(parts)


def verb_pages() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name, the title and the lines of the page of each verb."""
    said: Said = {}
    for verb in sorted(known_verbs(), key=lambda verb: (verb != "simulate", verb)):
        yield from _pages_of(f"kvcore {verb}", loaded_verb(verb), said)


def _pages_of(
    name: str, command: click.Command, said: Said
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the page of a verb and of those below it."""
    page, more, below = name.replace(" ", "-"), [], []
    formatter = HelpPage(page, said)
    with click.Context(command, info_name=name, **command.context_settings) as context:
        command.format_help(context, formatter)
    for path in sorted(REFERENCE.glob("*.md")):
        text = path.read_text("utf-8")
        if f"`{name}`\n\n" in text and path.stem == "cli":
            more.append(f"`the command line <../../docs/reference/cli.html#{page}>`__")
        elif name == f"kvcore {path.stem}" or f"\n    {name} " in text.partition("\n## ")[0]:
            more.append(f":doc:`/docs/reference/{path.stem}`")
    if isinstance(command, click.Group):
        for verb, command_below in command.commands.items():
            yield from _pages_of(f"{name} {verb}", command_below, said)
        names = [f"   {page}-{verb}" for verb in command.commands]
        below = [".. toctree::", "   :hidden:", "", *names, ""]
    # The search looks at the index first.
    index = f".. index:: ! {name}, ! {name.rpartition(' ')[2]}"
    links = f"More: {', '.join(more)}." * bool(more)
    yield page, f"``{name} --help``", [index, "", links, "", *formatter.lines, *below]
