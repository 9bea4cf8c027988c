"""Render docs/reference/api.md from the docstrings of the public names.

    python docs/render_api.py

The sources are parsed, not imported: the page does not depend on the extras that are installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
COMMAND = "python docs/render_api.py"

ROOMS = (
    "kvcore",
    "kvcore.request",
    "kvcore.cache",
    "kvcore.serving",
    "kvcore.cluster",
    "kvcore.engine",
    "kvcore.tiers",
    "kvcore.trace",
    "kvcore.analysis",
    "kvcore.analysis.quality",
    "kvcore.analysis.sweep",
    "kvcore.bench",
    "kvcore.workloads",
    "kvcore.models",
    "kvcore.plugins",
    "kvcore.hosting",
    "kvcore.kv_events",
    "kvcore.config",
    "kvcore.pages",
    "kvcore.sections",
    "kvcore.testing",
    "kvcore.errors",
    "kvcore.units",
)
"""The packages and modules whose names are public, in the order of the page."""

HEAD = f"""# The Python interface

Every public name, by the package that it is imported from. This page is rendered from the
docstrings by `{COMMAND}`; a test compares it with them.

Times are integer nanoseconds unless a name or a sentence gives another unit; `_ps` in a name
stands for picoseconds. Lengths are in tokens, sizes and positions in blocks. The order in which
plugins are called is in [the callbacks of plugins](../explanation/callbacks.md).
"""

WIDTH = 92
"""Length above which a signature is written with one parameter a line."""

SECTIONS = ("Args", "Attributes", "Example", "Raises", "Returns", "Yields")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DATA_CLASSES = {"define", "frozen", "mutable", "dataclass"}
FIELD_BASES = {"Struct", "NamedTuple", "TypedDict"}


@dataclass(frozen=True)
class Module:
    """A parsed source file of the package.

    Attributes:
        name: dotted name of the module.
        package: whether it is the `__init__.py` of a package.
        source: its text.
        doc: its docstring.
        defined: the statements at its top level that define a name.
        docs: docstrings of the assigned names: the text that follows the assignment.
        imported: for each imported name, the module and the name in it.
        exported: the names in `__all__`, or None without one.
    """

    name: str
    package: bool
    source: str
    doc: str
    defined: dict[str, ast.stmt]
    docs: dict[str, str]
    imported: dict[str, tuple[str, str]]
    exported: tuple[str, ...] | None


@dataclass(frozen=True)
class Definition:
    """Where a public name is defined.

    Attributes:
        module: the module with the definition.
        name: the name in that module.
        node: the statement that defines it.
    """

    module: Module
    name: str
    node: ast.stmt

    @property
    def doc(self) -> str:
        """Return the docstring, empty if there is none."""
        if isinstance(self.node, (ast.ClassDef, *FUNCTIONS)):
            return ast.get_docstring(self.node) or ""
        return self.module.docs.get(self.name, "")


def code(node: ast.AST) -> str:
    """Return `node` as source, quoted and spaced as the formatter does."""
    text = ast.unparse(node).replace(" ** ", "**")
    return text if '"' in text else text.replace("'", '"')


def path_of(name: str) -> Path | None:
    """Return the file of a module or package of kvcore, or None if there is none."""
    base = ROOT.joinpath(*name.split("."))
    found = [base / "__init__.py", base.with_suffix(".py")]
    return next((path for path in found if path.is_file()), None)


@cache
def load(name: str) -> Module:
    """Parse the module or package `name`."""
    path = path_of(name)
    assert path is not None, name
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    defined, docs = definitions(tree.body)
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    listed = defined.pop("__all__", None)
    exported = tuple(ast.literal_eval(listed.value)) if isinstance(listed, ast.Assign) else None
    doc = ast.get_docstring(tree) or ""
    package = path.name == "__init__.py"
    return Module(name, package, source, doc, defined, docs, imported, exported)


def definitions(body: list[ast.stmt]) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """Return the statements in `body` that define names, and the texts after assignments."""
    defined: dict[str, ast.stmt] = {}
    docs: dict[str, str] = {}
    last: list[str] = []
    for node in body:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            defined.setdefault(node.name, node)
            last = []
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            last = [name for target in targets for name in names_in(target)]
            defined.update(dict.fromkeys(last, node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.update(dict.fromkeys(last, cleandoc(str(node.value.value))))
            last = []
        else:
            last = []
    return defined, docs


def names_in(target: ast.expr) -> list[str]:
    """Return the plain names that an assignment to `target` binds."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def resolve(module: Module, name: str) -> Definition | None:
    """Return the definition of `name` as seen in `module`; None if it is not in kvcore."""
    if name in module.defined:
        node = module.defined[name]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            return resolve(module, node.value.id)  # another name of the same object
        return Definition(module, name, node)
    source, original = module.imported.get(name, ("", ""))
    if not source.startswith("kvcore") or path_of(source) is None:
        return None
    return resolve(load(source), original)


def names_of(room: Module) -> tuple[str, ...]:
    """Return the public names of a room: `__all__`, or all that it defines in public."""
    if room.exported is not None:
        return room.exported
    return tuple(
        name
        for name, node in room.defined.items()
        if not name.startswith("_")
        and (isinstance(node, (ast.ClassDef, *FUNCTIONS)) or name in room.docs)
    )


@cache
def rooms() -> tuple[Module, ...]:
    """Return the rooms; a package that exports nothing is replaced by its public modules."""
    found = []
    for name in ROOMS:
        room = load(name)
        found.append(room)
        if room.package and not names_of(room):
            folder = ROOT.joinpath(*name.split("."))
            modules = sorted(folder.glob("[a-z]*.py"))
            found += [load(f"{name}.{path.stem}") for path in modules]
    return tuple(found)


def public() -> Iterator[tuple[Module, str, Definition]]:
    """Yield every public name with its room and its definition.

    Raises:
        LookupError: a name in `__all__` is not defined in kvcore.
    """
    for room in rooms():
        for name in names_of(room):
            definition = resolve(room, name)
            if definition is None:
                msg = f"{room.name}.{name} is public and not defined in kvcore"
                raise LookupError(msg)
            yield room, name, definition


@cache
def homes() -> dict[tuple[str, str], str]:
    """Return for each definition the full name under which it is described.

    That is the room around the module that defines it, else the first room with the name.
    """
    found: dict[tuple[str, str], str] = {}
    for within in (True, False):
        for room, name, definition in public():
            module = definition.module.name
            inside = module == room.name or (
                room.name != "kvcore" and module.startswith(f"{room.name}.")
            )
            if inside or not within:
                found.setdefault((module, definition.name), f"{room.name}.{name}")
    return found


def undocumented() -> list[str]:
    """Return the public names, and members of public classes, without a docstring."""
    missing = []
    for room, name, definition in public():
        if not definition.doc:
            missing.append(f"{room.name}.{name}")
        if isinstance(definition.node, ast.ClassDef):
            missing += [
                f"{room.name}.{name}.{member.name}"
                for member in members(definition)
                if isinstance(member, FUNCTIONS) and not ast.get_docstring(member)
            ]
    return sorted(set(missing))


def bases(definition: Definition) -> Iterator[Definition]:
    """Yield the base classes of a class that are defined in kvcore, nearest first."""
    assert isinstance(definition.node, ast.ClassDef)
    for base in definition.node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        found = resolve(definition.module, code(plain))
        if found is not None and isinstance(found.node, ast.ClassDef):
            yield found


def members(definition: Definition) -> list[ast.stmt]:
    """Return the public methods of a class, and its attributes with a text of their own.

    Methods of base classes that are not public themselves belong to it. Tests of a
    conformance kit are left out: they are for pytest.
    """
    assert isinstance(definition.node, ast.ClassDef)
    docs = definitions(definition.node.body)[1]
    found: dict[str, ast.stmt] = {}
    for node in definition.node.body:
        if isinstance(node, FUNCTIONS):
            required = any("abstractmethod" in code(d) for d in node.decorator_list)
            special = node.name.startswith("__") and required
            hidden = node.name.startswith("_") and not special
            if not hidden and not node.name.startswith("test_") and not is_setter(node):
                found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            for name in names_in(target):
                if name in docs and not name.startswith("_"):
                    found[name] = node
    for base in bases(definition):
        if (base.module.name, base.name) not in homes():
            for node in members(base):
                name = getattr(node, "name", None) or code(node)
                found.setdefault(name, node)
    return list(found.values())


def is_setter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if `node` sets or deletes a property."""
    marks = [code(decorator) for decorator in node.decorator_list]
    return any(mark.endswith((".setter", ".deleter")) for mark in marks)


def has_fields(node: ast.ClassDef) -> bool:
    """Return True if the constructor of a class is made from its annotated attributes."""
    marks = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    named = {code(mark).rpartition(".")[2] for mark in marks}
    based = {code(base).rpartition(".")[2] for base in node.bases}
    return bool(named & DATA_CLASSES or based & FIELD_BASES)


def fields(definition: Definition) -> dict[str, str]:
    """Return the parameters of a constructor that is made from fields, by name."""
    found: dict[str, str] = {}
    assert isinstance(definition.node, ast.ClassDef)
    for base in bases(definition):
        found.update(fields(base))
    own = has_fields(definition.node) or found
    for node in definition.node.body if own else ():
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, annotation = node.target.id, code(node.annotation)
        default = default_of(node.value)
        if default is None or name.startswith("_") or "ClassVar" in annotation:
            found.pop(name, None)
        else:
            found[name] = f"{name}: {annotation}{default and f' = {default}'}"
    return found


def default_of(value: ast.expr | None) -> str | None:
    """Return the default of a field: empty if it has none, None if it is no parameter."""
    if value is None:
        return ""
    text = code(value)
    if not isinstance(value, ast.Call) or not re.match(r"(\w+\.)?field\(", text):
        return text
    options = {option.arg: code(option.value) for option in value.keywords}
    if options.get("init") == "False":
        return None
    if "factory" in options or "default_factory" in options:
        return "..."
    default = options.get("default", "")
    return "..." if "Factory" in default else default


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters of a function as they are written, without `self` and `cls`."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    found = []
    for place, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
        if place == 0 and arg.arg in {"self", "cls"}:
            continue
        found.append(parameter(arg, default))
        if place + 1 == len(given.posonlyargs):
            found.append("/")
    if given.vararg:
        found.append(f"*{parameter(given.vararg, None)}")
    elif given.kwonlyargs:
        found.append("*")
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found += [parameter(arg, default) for arg, default in keywords]
    if given.kwarg:
        found.append(f"**{parameter(given.kwarg, None)}")
    return found


def parameter(arg: ast.arg, default: ast.expr | None) -> str:
    """Return one parameter with its annotation and default."""
    text = arg.arg if arg.annotation is None else f"{arg.arg}: {code(arg.annotation)}"
    if default is None:
        return text
    return f"{text} = {code(default)}" if arg.annotation else f"{text}={default}"


def call(name: str, given: list[str], returns: str = "") -> str:
    """Return a call with parameters, on one line if there is room for it."""
    line = f"{name}({', '.join(given)}){returns}"
    if len(line) <= WIDTH:
        return line
    rows = "".join(f"    {each},\n" for each in given)
    return f"{name}(\n{rows}){returns}"


def returned(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the arrow and the return type of a function."""
    return f" -> {code(node.returns)}" if node.returns else ""


def class_signature(definition: Definition) -> str:
    """Return the class with its base classes and, if it has parameters, how it is called."""
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    maker = constructor(definition)
    made = list(fields(definition).values())
    given = parameters(maker) if maker and not has_fields(node) else made
    above = ", ".join(code(base) for base in node.bases)
    line = f"class {node.name}({above})" if above else f"class {node.name}"
    return f"{line}\n\n{call(node.name, given)}" if given else line


def constructor(definition: Definition) -> ast.FunctionDef | None:
    """Return the `__init__` of a class or of the nearest base class that has one."""
    assert isinstance(definition.node, ast.ClassDef)
    for node in definition.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return node
    found = (constructor(base) for base in bases(definition))
    return next((node for node in found if node is not None), None)


def markdown(doc: str) -> str:
    """Return a docstring with its sections as lists."""
    lines: list[str] = []
    inside = False
    for line in doc.splitlines():
        title = line.removesuffix(":")
        if title in SECTIONS and line.endswith(":") and title != "Example":
            inside = True
            lines += [f"**{title}**", ""]
        elif inside and line and not line.startswith(" "):
            inside = False
            lines.append(line)
        elif inside and re.match(r" {4}\S", line):
            lines.append(entry(line.strip()))
        elif inside and line:
            lines.append("  " + line.strip())
        else:
            lines.append(line)
    return "\n".join(lines).strip()


def entry(line: str) -> str:
    """Return the first line of an entry of a section, as an item of a list."""
    names, colon, text = line.partition(": ")
    if not colon or not re.fullmatch(r"\*{0,2}[\w.]+(, \*{0,2}[\w.]+)*", names):
        return f"- {line}"
    shown = ", ".join(f"`{name}`" for name in names.split(", "))
    return f"- {shown}: {text}"


def indented(text: str) -> str:
    """Return `text` as the continuation of an item of a list."""
    return "\n".join(line and f"  {line}" for line in text.splitlines())


def render_member(node: ast.stmt, docs: dict[str, str]) -> str:
    """Return the entry of a method, property or attribute in the section of its class."""
    if not isinstance(node, FUNCTIONS):
        text = code(node)
        name = re.match(r"\w+", text)
        assert name is not None
        return f"- `{text}`\n\n{indented(markdown(docs[name[0]]))}"
    marks = {code(each).rpartition(".")[2] for each in node.decorator_list}
    if marks & {"property", "cached_property"}:
        signature = f"{node.name}{returned(node).replace(' ->', ':', 1)}"
    else:
        signature = f"{node.name}({', '.join(parameters(node))}){returned(node)}"
    kinds = {
        "abstractmethod": "must be written",
        "classmethod": "class method",
        "staticmethod": "static method",
    }
    notes = [text for mark, text in kinds.items() if mark in marks]
    note = f" ({', '.join(notes)})" if notes else ""
    doc = indented(markdown(ast.get_docstring(node) or ""))
    if len(signature) > WIDTH:
        shown = call(node.name, parameters(node), returned(node))
        return f"- `{node.name}`{note}\n\n{indented(fenced(shown))}\n\n{doc}"
    return f"- `{signature}`{note}\n\n{doc}"


def fenced(text: str) -> str:
    """Return a block of Python that is shown and not run."""
    return f"```py\n{text}\n```"


def render_definition(title: str, definition: Definition) -> str:
    """Return the section of a public name."""
    node, doc = definition.node, definition.doc
    parts = [f"### {title}"]
    if isinstance(node, ast.ClassDef):
        parts += [fenced(class_signature(definition)), markdown(doc)]
        maker = constructor(definition)
        made = (ast.get_docstring(maker) if maker in node.body else None) if maker else None
        if made and "\n" in made:
            parts.append(f"- the constructor\n\n{indented(markdown(made))}")
        docs = definitions(node.body)[1]
        for base in bases(definition):
            assert isinstance(base.node, ast.ClassDef)
            docs = definitions(base.node.body)[1] | docs
        described = [render_member(member, docs) for member in members(definition)]
        parts += ["**Members**", *described] if described else []
    elif isinstance(node, FUNCTIONS):
        signature = call(node.name, parameters(node), returned(node))
        parts += [fenced(signature), markdown(doc)]
    else:
        written = ast.get_source_segment(definition.module.source, node) or ""
        parts += [fenced(written), markdown(doc)]
    return "\n\n".join(part for part in parts if part)


def render_room(room: Module) -> str:
    """Return the section of a room: its docstring, links, and the names described in it."""
    links, parts = [], []
    for name in names_of(room):
        definition = resolve(room, name)
        assert definition is not None
        title = f"{room.name}.{name}"
        home = homes()[definition.module.name, definition.name]
        if home == title:
            parts.append(render_definition(title, definition))
        else:
            first = definition.doc.partition("\n")[0]
            links.append(f"- [`{name}`](#{anchor(home)}): {first}")
    head = [f"## {room.name}", markdown(room.doc), "\n".join(links)]
    return "\n\n".join(part for part in [*head, *parts] if part)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.replace(" ", "-")


def render() -> str:
    """Return the page."""
    return "\n\n".join([HEAD.strip(), *map(render_room, rooms())]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
