"""Renew the map in docs/contributing.md, which is made of docstrings.

    python docs/render_map.py

For the core it has a line for each room and module; for a package the whole docstring.
"""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contributing.md"
LAYERS = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "packages.py")))


def docstring(path: Path) -> str:
    """Return the docstring of a module, or of a package at the path of its folder."""
    source = path / "__init__.py" if path.is_dir() else path
    return ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""


def front_page(package: Path) -> str:
    """Return the docstring of a package below its folder. Markdown needs no second colon."""
    page = f"### {package.relative_to(ROOT)}\n\n{docstring(package)}\n\n"
    return page.replace("::\n", ":\n")


def tree() -> str:
    """Return a line for each room and module of the core. They import only those below them."""
    lines = {}
    for path in (ROOT / "kvcore").iterdir():
        room = path.is_dir() and (path / "__init__.py").exists()
        if room or (path.suffix == ".py" and path.name != "__init__.py"):
            rank = LAYERS.RANK[LAYERS.package_of(f"kvcore/{path.name}")]
            about = docstring(path).partition("\n")[0].removesuffix(".")
            lines[-rank, path] = f"    {path.name + '/' * room:17} {about}\n"
    return "".join(lines[key] for key in sorted(lines))


def text() -> str:
    """Return the page with the map that the docstrings make today."""
    packages = [
        front_page(ROOT / "plugins" / package)
        for level in LAYERS.ORDER
        for package in sorted(level)
        if (ROOT / "plugins" / package).exists()
    ]
    core = front_page(ROOT / "kvcore")
    before, _, rest = PAGE.read_text("utf-8").partition("### kvcore\n")
    after = rest.partition("\n## ")[2]
    return f"{before}{core}{tree()}\n{''.join(packages)}## {after}"


if __name__ == "__main__":
    PAGE.write_text(text(), "utf-8")
