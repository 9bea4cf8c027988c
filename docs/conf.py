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
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import render_schemas
from interface import (
    FUNCTIONS,
    ROOT,
    docstring,
    homes,
    members,
    modules,
    private_bases,
    public,
)
from verbs import mark_options, verb_pages

from kvcore_cli.main import known_verbs
from kvcore_judge.site import write_site

RUNTIME = ROOT / ".tox" / "pyodide" / "node_modules" / "pyodide"
MADE = ROOT / "build" / "interface"

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
smartquotes_action = "qe"  # two hyphens are the begin of an option
default_role = "py:obj"  # a name between backticks in a docstring, which links if it can
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_custom_sections = [(name, "params_style") for name in ("Attributes", "Options")]

NAVIGATION: dict[tuple[Any, ...], str] = {}
"""The navigation of pages that no list of pages has, by folder and options of the theme."""

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
    for page, title, lines in verb_pages():
        write_page(page, title, *lines)
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
    linked = ", ".join(f":py:obj:`~{name}`" for name in elsewhere)
    tables = [*summary(classes), f"Also {linked}." * bool(linked), ""]
    intro = [f".. automodule:: {module}", "", ".. currentmodule:: None", ""]
    if "." not in module:
        intro[:1] = [f".. py:module:: {module}", "", "What is in it: :doc:`the map <map>`."]
    write_page(module, module, *intro, *tables, *lines)


def summary(names: Iterable[str]) -> list[str]:
    """Return a table of the first sentences of public names, which link to their pages."""
    rows = [f"   ~{name}" for name in names]
    return [".. autosummary::", "   :nosignatures:", "", *rows, ""] if rows else []


def contents(pages: Iterable[str]) -> list[str]:
    """Return the directive that puts pages below this one, beside each page."""
    return [".. toctree::", "   :hidden:", "", *(f"   {page}" for page in pages), ""]


def write_map() -> None:
    """Write the map: docstrings of packages, and a line for each room of the core."""
    layers = runpy.run_path(str(ROOT / "tests" / "helpers" / "packages.py"))
    rooms = {}
    for path in (ROOT / "kvcore").iterdir():
        room = path.is_dir() and (path / "__init__.py").exists()
        if room or (path.suffix == ".py" and path.name != "__init__.py"):
            rank = layers["RANK"][layers["package_of"](f"kvcore/{path.name}")]
            about = docstring(path).partition("\n")[0].removesuffix(".")
            name = f"kvcore.{path.stem}"
            title = f"`{name}`" if name in modules() else f"``{path.name}{'/' * room}``"
            rooms[-rank, path] = f"* {title}: {about}"
    packages = [
        ROOT / "plugins" / package
        for level in layers["ORDER"]
        for package in sorted(level)
        if (ROOT / "plugins" / package).exists()
    ]
    core = [*(rooms[key] for key in sorted(rooms)), ""]
    lines = ["kvcore", "-" * 6, docstring(ROOT / "kvcore"), "", *core]
    for package in packages:
        lines += [package.name, "-" * len(package.name), docstring(package), ""]
    write_page("map", "The map of the code", *lines)


def contents_of(index: str) -> dict[str, list[str]]:
    """Return the pages that the index of the pages links to, by section and group."""
    blocks: dict[str, list[str]] = {}
    section = title = ""
    for line in index.splitlines():
        if line.startswith("## "):
            section = title = line.removeprefix("## ")
        elif line.startswith("### "):
            title = f"{section}: {line[4].lower()}{line[5:]}"
        elif section:
            paths = [f"/docs/{link}".replace("/docs/../", "/") for link in PAGE.findall(line)]
            if paths:
                blocks[title] = list(dict.fromkeys([*blocks.get(title, ()), *paths]))
    return blocks


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Called when a page is read: put the pages of docs/README below the first page.

    Its sections are those of the site, so that the list of pages is written once.
    """
    made = "/build/interface"
    below: dict[str, list[str]] = {
        "docs/reference/api": [f"{made}/{module}" for module in modules()],
        "docs/reference/cli": [f"{made}/kvcore-{verb}" for verb in sorted(known_verbs())],
    }
    blocks = {"": below[page]} if page in below else {}
    if page == app.config.root_doc:
        blocks = contents_of((ROOT / "docs" / "README.md").read_text("utf-8"))
        blocks["Work on kvcore"] += [f"{made}/map", f"{made}/files"]
    if page.startswith("docs/reference/"):
        source[0] = mark_options(page.rpartition("/")[2], source[0])
    for title, pages in blocks.items():
        lines = ["```{toctree}", ":hidden:", f":caption: {title}" * bool(title), "", *pages]
        source[0] += "\n" + "\n".join([*lines, "```", ""])


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Called when a page is read: make links of full names of the interface."""
    if app.env.docname == "CHANGELOG" or app.env.docname.startswith("tests/"):
        app.env.metadata[app.env.docname]["nosearch"] = "True"  # it has words of every page
    for literal_node in list(document.findall(nodes.literal)):
        text = literal_node.astext()
        module, _, name = text.rpartition(".")
        if isinstance(literal_node.parent, (nodes.reference, pending_xref)):
            continue  # it is a link already
        domain, kind = "py", "obj"
        if module in modules() and name in public(module):
            definition = public(module)[name]
            target = f"{homes()[definition.module, definition.name]}.{name}"
        elif text in modules():
            target = text
        elif app.env.docname == "docs/reference/cli" and text in known_verbs():
            domain, kind, target = "std", "doc", f"/build/interface/kvcore-{text}"
        else:
            continue
        link = pending_xref(
            refdomain=domain,
            reftype=kind,
            reftarget=target,
            refdoc=app.env.docname,
            refexplicit=True,
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


@cache
def docstring_homes() -> dict[tuple[str, str], str]:
    """Return the full name of the first function or method with a name and a docstring."""
    first: dict[tuple[str, str], str] = {}
    for module in modules():
        for name, definition in public(module).items():
            page = f"{homes()[definition.module, definition.name]}.{name}"
            first.setdefault((name, definition.doc), page)
            for member in members(definition):
                text = ast.get_docstring(member) or ""
                first.setdefault((member.name, text), f"{page}.{member.name}")
    return first


def say_once(
    _app: Sphinx, _what: str, name: str, _object: Any, _: Any, lines: list[str]
) -> None:
    """Called with a docstring: one that another method of this name has is a link to that."""
    text = "\n".join(lines).strip()
    home = docstring_homes().get((name.rpartition(".")[2], text), name)
    if home != name:
        lines[:] = [f"As `{home}`."]


def skip_tests(_app: Sphinx, _what: str, name: str, *_: Any) -> bool | None:
    """Return True for the tests of a conformance kit, which are for pytest; else None."""
    return name.startswith("test_") or None


def share_navigation(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], _: Any
) -> None:
    """Called with each page, before the theme is: one that no list has shares its navigation.

    Nothing in it is marked as the current page: it is that of all such pages of a folder. The
    navigation takes most of the time of a page.
    """
    if not any(page in pages for pages in app.env.toctree_includes.values()):
        toctree, folder = context["toctree"], page.rpartition("/")[0]

        def shared(**options: Any) -> str:
            key = folder, *options.items()
            if key not in NAVIGATION:
                NAVIGATION[key] = toctree(**options)
            return NAVIGATION[key]

        context["toctree"] = shared


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
    app.connect("autodoc-process-docstring", say_once, priority=100)  # before others change it
    app.connect("autodoc-process-docstring", keep_lines)
    app.connect("autodoc-skip-member", skip_tests)
    app.connect("html-page-context", share_navigation, priority=400)
    app.connect("build-finished", add_front)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
