"""The public names of kvcore: where they are defined, and digests of their signatures.

    python docs/interface.py

renews docs/interface.txt, the digests of the public modules and of the JSON Schemas. Sources of
modules are parsed, not imported.
"""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from inspect import cleandoc
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs" / "interface.txt"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Definition:
    """The statement that defines a name.

    Attributes:
        module: dotted name of the module with the statement.
        name: the name in that module.
        node: the statement.
        doc: its docstring; of an assignment the text below it.
    """

    module: str
    name: str
    node: ast.stmt
    doc: str


def listed() -> dict[str, str]:
    """Return the digest of each public module and schema, as docs/interface.txt has them."""
    lines = LIST.read_text("utf-8").splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def modules() -> list[str]:
    """Return the names of the public modules and packages, in the order of the list."""
    return [name for name in listed() if not name.endswith(".json")]


def docstring(path: Path) -> str:
    """Return the docstring of a module, or of a package at the path of its folder."""
    source = path / "__init__.py" if path.is_dir() else path
    return ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""


@cache
def parse(module: str) -> tuple[dict[str, Definition], dict[str, tuple[str, str]]]:
    """Return the definitions in a module, and for each name it imports: module and name."""
    folder = ROOT if module.partition(".")[0] == "kvcore" else ROOT / "plugins"
    base = folder.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    tree = ast.parse(path.read_text("utf-8"))
    defined: dict[str, Definition] = {}
    for node, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            defined[node.name] = Definition(
                module, node.name, node, ast.get_docstring(node) or ""
            )
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            text = ast.literal_eval(below.value) if _is_text(below) else ""
            for name in _assigned(node):
                defined[name] = Definition(module, name, node, text)
    for_types = [node for part in tree.body if isinstance(part, ast.If) for node in part.body]
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in [*tree.body, *for_types]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcore")
        for alias in node.names
    }
    return defined, imported


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the plain names that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [name.id for target in targets for name in ast.walk(target) if _is_name(name)]


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def find(module: str, name: str) -> Definition | None:
    """Return the definition of a name as seen in a module; None if it is not in kvcore."""
    defined, imported = parse(module)
    if name in imported:
        return find(*imported[name])
    definition = defined.get(name)
    if definition and isinstance(definition.node, ast.Assign):
        value = definition.node.value
        if isinstance(value, ast.Name):  # another name of the same object
            return find(module, value.id)
    return definition


def public(module: str) -> dict[str, Definition]:
    """Return the public names of a module: those in `__all__`, or all that it documents.

    Raises:
        LookupError: a name in `__all__` is not defined in kvcore.
    """
    defined = parse(module)[0]
    if "__all__" not in defined:
        return {
            name: definition
            for name, definition in defined.items()
            if not name.startswith("_") and definition.doc
        }
    names = ast.literal_eval(defined["__all__"].node.value)
    definitions = {name: find(module, name) for name in names}
    for name, definition in definitions.items():
        if definition is None:
            msg = f"{module}.{name} is public and not defined in kvcore"
            raise LookupError(msg)
    return definitions


@cache
def homes() -> dict[tuple[str, str], str]:
    """Return for each definition the public module whose page describes it.

    That is the one around the module that defines it, or else the first that has the name.
    """
    pages: dict[tuple[str, str], str] = {}
    for only_around in (True, False):
        for module in modules():
            for definition in public(module).values():
                around = f"{definition.module}.".startswith(f"{module}.") and module != "kvcore"
                if around or not only_around:
                    pages.setdefault((definition.module, definition.name), module)
    return pages


def undocumented() -> list[str]:
    """Return the public names, and methods of public classes, without a docstring."""
    missing = set()
    for module in modules():
        for name, definition in public(module).items():
            if not definition.doc:
                missing.add(f"{module}.{name}")
            missing |= {
                f"{module}.{name}.{member.name}"
                for member in getattr(definition.node, "body", ())
                if isinstance(definition.node, ast.ClassDef)
                and isinstance(member, FUNCTIONS)
                and not member.name.startswith("_")
                and not ast.get_docstring(member)
            }
    return sorted(missing)


def signatures(definition: Definition) -> Iterator[str]:
    """Yield what users of a name rely on: its statement, without docstrings and bodies.

    Of a class: its head, its fields, and its methods, with those of private base classes.
    """
    node = definition.node
    yield _head(node)
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(member, FUNCTIONS):
            shown = not member.name.startswith("_") or member.name.endswith("__")
        elif isinstance(member, ast.Assign):
            shown = not any(name.startswith("_") for name in _assigned(member))
        else:
            shown = isinstance(member, ast.AnnAssign)  # also a private one may be a parameter
        if shown:
            yield _head(member)
    for base in private_bases(definition):
        yield from signatures(base)


def members(definition: Definition) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the methods and properties of a class, and of its private base classes."""
    for member in getattr(definition.node, "body", ()):
        if isinstance(definition.node, ast.ClassDef) and isinstance(member, FUNCTIONS):
            yield member
    for base in private_bases(definition):
        yield from members(base)


def private_bases(definition: Definition) -> list[Definition]:
    """Return the base classes of a class that have no page: their methods are its own."""
    private = []
    for base in getattr(definition.node, "bases", ()):
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        above = find(definition.module, name)
        if above is not None and (above.module, above.name) not in homes():
            private.append(above)
    return private


def _head(node: ast.stmt) -> str:
    """Return a statement as source, a function or class without its body."""
    node = copy(node)
    if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
        node.body = [ast.Pass()]
    return ast.unparse(node).replace('"', "'")  # versions of Python quote f-strings differently


def digests() -> dict[str, str]:
    """Return the digest of each public module and schema, as the sources have them."""
    values = {}
    for module in modules():
        lines = [
            f"{name}: {line}"
            for name, definition in sorted(public(module).items())
            for line in signatures(definition)
        ]
        values[module] = _digest("\n".join(lines).encode())
    return values | {
        name: _digest(orjson.dumps(_of_all_versions(schema)))
        for name, schema in documents().items()
    }


def _of_all_versions(schema: Any) -> Any:
    """Return what all versions of msgspec say of a schema.

    Before 0.23 they leave out the names of the properties of a mapping, and the lines of a
    description keep the indent that its docstring has.
    """
    if isinstance(schema, dict):
        return {
            name: cleandoc(part) if name == "description" else _of_all_versions(part)
            for name, part in schema.items()
            if name != "propertyNames"
        }
    return [_of_all_versions(part) for part in schema] if isinstance(schema, list) else schema


def _digest(text: bytes) -> str:
    return sha256(text).hexdigest()[:12]


def documents() -> dict[str, Any]:
    """Return the JSON Schemas by the names of their files."""
    script = runpy.run_path(str(ROOT / "docs" / "render_schemas.py"))
    return script["documents"]()


def main() -> None:
    """Renew the list."""
    head = [line for line in LIST.read_text("utf-8").splitlines() if line.startswith("#")]
    lines = [f"{name} {digest}" for name, digest in digests().items()]
    LIST.write_text("\n".join([*head, *lines]) + "\n", "utf-8")


if __name__ == "__main__":
    main()
