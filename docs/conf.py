"""How `tox -e docs` makes the site: pages, commands, Python interface, map and JSON Schemas.

Sphinx reads the pages where they are, from the root of the repository, so that their links lead
to files outside docs/ too. What is made of the code is written as pages into build/interface: a
page for each verb, public module and public class, the map, the schemas, and the workbench if
Python for browsers is installed.
"""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import render_schemas
from interface import FUNCTIONS, ROOT, docstring, homes, modules, private_bases, public

from kvcore.cli.main import known_verbs, loaded_verb
from kvcore_judge.site import write_site

RUNTIME = ROOT / ".tox" / "pyodide" / "node_modules" / "pyodide"
MADE = ROOT / "build" / "interface"
REFERENCE = ROOT / "docs" / "reference"

project = "kvcore"
html_title = "kvcore"
html_theme = "furo"
html_copy_source = html_use_index = html_domain_indices = False
html_search_scorer = str(ROOT / "docs" / "search.js")
html_show_copyright = False
html_show_search_summary = False  # it reads the pages, which a browser refuses in a folder
root_doc = "README"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
include_patterns = [
    *("*.md", "docs/**.md", "examples/**.md", "kvcore/**.md", "plugins/**.md", "tests/**.md"),
    "build/interface/**.rst",
]
exclude_patterns = [".*"]
suppress_warnings = [
    "toc.not_included",  # examples and data are linked from pages, as in a checkout
    "misc.highlighting_failure",  # of CSV, which Pygments does not know
    "ref.python",  # several classes have an attribute of that name
]
myst_heading_anchors = 6
highlight_language = "none"  # lists of files in docstrings are no Python
default_role = "py:obj"  # a name between backticks in a docstring, which links if it can
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_custom_sections = [(name, "params_style") for name in ("Attributes", "Options")]

SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
MARKUP, FLAG = re.compile(r"[\\*|_]"), re.compile(r"(?<![\w-])--[\w-]*\w")
PAGE = re.compile(r"\]\(([^):#]+)\.md\)")


def write_page(name: str, *lines: str) -> None:
    """Write a page of reStructuredText with a title; other pages link to it by `name`."""
    title, *rest = lines
    path = MADE / f"{name}.rst"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([title, "=" * len(title), "", *rest, ""]), "utf-8")


def write_pages(app: Sphinx) -> None:
    """Called when Sphinx starts: write the pages that are made of the code."""
    del app
    for module in modules():
        write_module(module)
    for verb in known_verbs():
        write_verb(f"kvcore {verb}", loaded_verb(verb))
    write_map()
    render_schemas.main(MADE / "static" / "schemas")
    files = [f"schemas/{name}" for name in render_schemas.documents()]
    if any(RUNTIME.glob("msgspec-*.whl")):
        write_site(MADE / "static" / "workbench", RUNTIME)
        files.append("workbench/index.html")
    links = (f"* `{file} <../../{file}>`__" for file in files)
    write_page("files", "JSON Schemas, and the workbench", *links)


def write_module(module: str) -> None:
    """Write the page of a public module, and one for each class that is at home there."""
    classes, elsewhere, lines = [], [], []
    for name, definition in public(module).items():
        home = homes()[definition.module, definition.name]
        if home != module:
            elsewhere.append(f"{home}.{name}")
        elif isinstance(definition.node, FUNCTIONS):
            lines.append(f".. autofunction:: {module}.{name}")
        elif isinstance(definition.node, ast.ClassDef):
            classes.append(f"{module}.{name}")
            inherited = ["   :inherited-members:"] * bool(private_bases(definition))
            about = [f".. autoclass:: {module}.{name}", "   :members:", *inherited]
            write_page(f"{module}.{name}", name, f"In `{module}`.", "", *about)
        else:  # autodoc finds its text only in the module that assigns it
            lines.append(f".. autodata:: {definition.module}.{name}")
    tables = [*summary(classes), *summary(elsewhere)]
    intro = [f".. automodule:: {module}", "", ".. currentmodule:: None", ""]
    write_page(module, module, *intro, *tables, *lines)


def summary(names: Iterable[str]) -> list[str]:
    """Return a table of the first sentences of public names, which link to their pages."""
    rows = [f"   ~{name}" for name in names]
    return [".. autosummary::", "   :nosignatures:", "", *rows, ""] if rows else []


def contents(pages: Iterable[str]) -> list[str]:
    """Return the directive that puts pages below this one, beside each page."""
    return [".. toctree::", "   :hidden:", "", *(f"   {page}" for page in pages), ""]


class HelpPage(click.HelpFormatter):
    """Writes the help page of a verb as reStructuredText; links can lead to its options.

    Attributes:
        lines: the lines so far.
    """

    def __init__(self) -> None:
        super().__init__(width=10_000)
        self.lines: list[str] = []

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
            else:
                self.lines += [literal(" ".join(paragraph.split())), ""]

    @contextmanager
    def section(self, name: str) -> Any:
        """Begin a section with a heading."""
        self.lines += [name, "-" * len(name), ""]
        yield

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        """Write options, or the verbs of a group, with their texts."""
        del col_max, col_spacing
        for term, text in rows:
            head = f".. option:: {term}" if term.startswith("-") else f"``{term}``"
            self.lines += [head.replace(" / ", ", "), "", f"   {literal(text)}", ""]


def literal(text: str) -> str:
    """Return text of a help page with its code as such, and nothing else taken for markup."""
    parts = re.split(r"`([^`]+)`", text)
    parts[::2] = [FLAG.sub(r"``\g<0>``", MARKUP.sub(r"\\\g<0>", part)) for part in parts[::2]]
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    return "".join(parts)


def write_verb(name: str, command: click.Command) -> None:
    """Write the pages of a verb and of those below it: what `--help` prints, and a link."""
    formatter = HelpPage()
    with click.Context(command, info_name=name, **command.context_settings) as context:
        command.format_help(context, formatter)
    page, more, below = name.replace(" ", "-"), "", []
    if (REFERENCE / f"{name.partition(' ')[2]}.md").exists():
        more = f"More: :doc:`/docs/reference/{name.partition(' ')[2]}`."
    elif f"`{name}`\n" in (REFERENCE / "cli.md").read_text("utf-8"):
        more = f"More: `the command line <../../docs/reference/cli.html#{page}>`__."
    if isinstance(command, click.Group):
        for verb, command_below in command.commands.items():
            write_verb(f"{name} {verb}", command_below)
        below = contents(f"{page}-{verb}" for verb in command.commands)
    # The search looks at the index first.
    index = f".. index:: ! {name}, ! {name.rpartition(' ')[2]}"
    write_page(page, f"``{name} --help``", index, "", more, "", *formatter.lines, *below)


def write_map() -> None:
    """Write the map: docstrings of packages, and a line for each room of the core."""
    layers = runpy.run_path(str(ROOT / "tests" / "helpers" / "packages.py"))
    rooms = {}
    for path in (ROOT / "kvcore").iterdir():
        room = path.is_dir() and (path / "__init__.py").exists()
        if room or (path.suffix == ".py" and path.name != "__init__.py"):
            rank = layers["RANK"][layers["package_of"](f"kvcore/{path.name}")]
            about = docstring(path).partition("\n")[0].removesuffix(".")
            rooms[-rank, path] = f"    {path.name + '/' * room:17} {about}"
    packages = [
        ROOT / "plugins" / package
        for level in layers["ORDER"]
        for package in sorted(level)
        if (ROOT / "plugins" / package).exists()
    ]
    core = ["::", "", *(rooms[key] for key in sorted(rooms)), ""]
    lines = ["kvcore", "-" * 6, docstring(ROOT / "kvcore"), "", *core]
    for package in packages:
        lines += [package.name, "-" * len(package.name), docstring(package), ""]
    write_page("map", "The map of the code", *lines)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Called when a page is read: put the pages of docs/README below the first page.

    Its sections are those of the site, so that the list of pages is written once.
    """
    made = "/build/interface"
    below: dict[str, list[str]] = {
        "docs/reference/api": [f"{made}/{module}" for module in modules()],
        "docs/reference/cli": [f"{made}/kvcore-{verb}" for verb in sorted(known_verbs())],
    }
    blocks = [("", below[page])] if page in below else []
    if page == app.config.root_doc:
        index = (ROOT / "docs" / "README.md").read_text("utf-8")
        for title, text in SECTION.findall(index):
            linked = [f"/docs/{link}".replace("/docs/../", "/") for link in PAGE.findall(text)]
            blocks.append((title, list(dict.fromkeys(linked))))
        blocks[-1][1].extend([f"{made}/map", f"{made}/files"])
    for title, pages in blocks:
        lines = ["```{toctree}", ":hidden:", f":caption: {title}" * bool(title), "", *pages]
        source[0] += "\n" + "\n".join([*lines, "```", ""])


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Called when a page is read: make links of full names of the interface."""
    if app.env.docname == "CHANGELOG" or app.env.docname.startswith("tests/"):
        app.env.metadata[app.env.docname]["nosearch"] = "True"  # it has words of every page
    for literal_node in list(document.findall(nodes.literal)):
        module, _, name = literal_node.astext().rpartition(".")
        if isinstance(literal_node.parent, (nodes.reference, pending_xref)):
            continue  # it is a link already
        if module in modules() and name in public(module):
            definition = public(module)[name]
            target = f"{homes()[definition.module, definition.name]}.{name}"
        elif literal_node.astext() in modules():
            target = literal_node.astext()
        else:
            continue
        link = pending_xref(
            refdomain="py", reftype="obj", reftarget=target, refdoc=app.env.docname
        )
        literal_node.replace_self(link)
        link += literal_node


def keep_lines(
    _app: Sphinx, _what: str, _name: str, _object: Any, _: Any, lines: list[str]
) -> None:
    """Called with a docstring: a list of files, indented after a colon, keeps its lines."""
    for index in range(len(lines) - 2):
        is_head = lines[index].endswith(":") and not lines[index].endswith("::")
        if is_head and not lines[index + 1] and lines[index + 2].startswith("    "):
            lines[index] += ":"


def skip_tests(_app: Sphinx, _what: str, name: str, *_: Any) -> bool | None:
    """Return True for the tests of a conformance kit, which are for pytest; else None."""
    return name.startswith("test_") or None


def add_front(app: Sphinx, error: Exception | None) -> None:
    """Called when the site is written: servers show index.html for its folder."""
    if error is None:
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))
        shutil.copytree(MADE / "static", app.outdir, dirs_exist_ok=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called when Sphinx starts: pages are made by the functions above, many at once."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", add_contents)
    app.connect("doctree-read", link_names, priority=400)  # before references are resolved
    app.connect("autodoc-process-docstring", keep_lines)
    app.connect("autodoc-skip-member", skip_tests)
    app.connect("build-finished", add_front)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
