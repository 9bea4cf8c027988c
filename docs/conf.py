"""How `tox -e docs` renders the pages, and the Python interface from the docstrings.

Sphinx reads the pages where they are, from the root of the repository, so that their links lead
to files outside docs/ too. Each public module has a page of what it documents there.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
from interface import FUNCTIONS, ROOT, homes, modules, private_bases, public

STUBS = ROOT / "build" / "interface"
FIGURES = ROOT / "build" / "figures"

project = "kvcore"
html_title = "kvcore"
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    *("*.md", "docs/**.md", "examples/**.md", "kvcore/**.md", "plugins/**.md", "tests/**.md"),
    "build/interface/*.rst",
]
exclude_patterns = [".*"]
suppress_warnings = [
    "toc.not_included",  # pages are linked from one another, as in a checkout
    "misc.highlighting_failure",  # of CSV, which Pygments does not know
    "ref.python",  # several classes have an attribute of that name
]
myst_heading_anchors = 6
default_role = "py:obj"  # a name between backticks in a docstring, which links if it can
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_custom_sections = [(name, "params_style") for name in ("Attributes", "Options")]

PAGES = """
```{toctree}
:hidden:

docs/README
docs/reference/api
CHANGELOG
```
"""


def write_stubs(app: Sphinx) -> None:
    """Write the page of each public module: what is documented there, and links."""
    del app
    STUBS.mkdir(parents=True, exist_ok=True)
    for module in modules():
        links, lines = [], []
        for name, definition in public(module).items():
            home = homes()[definition.module, definition.name]
            if home != module:
                links.append(f"- `{home}.{name}`")
            elif isinstance(definition.node, FUNCTIONS):
                lines.append(f".. autofunction:: {module}.{name}")
            elif isinstance(definition.node, ast.ClassDef):
                lines += [f".. autoclass:: {module}.{name}", "   :members:"]
                if private_bases(definition):
                    lines.append("   :inherited-members:")
            else:  # autodoc finds its text only in the module that assigns it
                lines.append(f".. autodata:: {definition.module}.{name}")
        head = [module, "=" * len(module), f".. automodule:: {module}", ""]
        text = "\n".join([*head, *links, "", *lines, ""])
        (STUBS / f"{module}.rst").write_text(text, "utf-8")


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to the first page the links that stand beside each page."""
    if page == app.config.root_doc:
        source[0] += PAGES


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Make links of full names of the interface, and show figures as SVG if they are drawn."""
    for literal in list(document.findall(nodes.literal)):
        module, _, name = literal.astext().rpartition(".")
        if isinstance(literal.parent, (nodes.reference, pending_xref)):
            continue  # it is a link already
        if module in modules() and name in public(module):
            definition = public(module)[name]
            target = f"{homes()[definition.module, definition.name]}.{name}"
        elif literal.astext() in modules():
            target = literal.astext()
        else:
            continue
        link = pending_xref(
            refdomain="py", reftype="obj", reftarget=target, refdoc=app.env.docname
        )
        literal.replace_self(link)
        link += literal
    for image in document.findall(nodes.image):
        drawn = FIGURES / f"{Path(image['uri']).stem}.svg"
        if drawn.exists():
            image["uri"] = f"/{drawn.relative_to(ROOT)}"


def skip_tests(_app: Sphinx, _what: str, name: str, *_: Any) -> bool | None:
    """Return True for the tests of a conformance kit, which are for pytest; else None."""
    return name.startswith("test_") or None


def setup(app: Sphinx) -> None:
    """Called when Sphinx starts."""
    app.connect("builder-inited", write_stubs)
    app.connect("source-read", add_contents)
    app.connect("doctree-read", link_names, priority=400)  # before images are collected
    app.connect("autodoc-skip-member", skip_tests)
