"""The imports of Python files, and the files of kvcore that they resolve to."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from helpers.packages import RANK

import kvcore
import kvcore_plugins

HELPERS = Path(__file__).parent
CORE = Path(kvcore.__file__).parent
BUILT_IN = Path(kvcore_plugins.__file__).parent
OTHERS = [name for name in sorted(RANK) if (BUILT_IN.parent / name / "__init__.py").is_file()]
ROOTS = {CORE.name: CORE, **{name: BUILT_IN.parent / name for name in OTHERS}}
"""The folders of the packages: the core, the built-in plugins, and those of other features."""


@cache
def parsed(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


def statements(tree):
    """Yield the statements below a node of a syntax tree, among them all imports."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from statements(node)


@cache
def imports(path):
    """Return the (module, name) pairs that the file at `path` imports.

    They include imports for types alone and those inside functions. The name is empty for
    `import module`.
    """
    pairs = []
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            pairs += [(node.module, alias.name) for alias in node.names]
    return pairs


@cache
def file_of(module):
    """Return the file of a module or package of kvcore or of these helpers; None for others."""
    parts = module.replace("kvcore.testing", "kvcore_testing").split(".")
    root = HELPERS if parts[0] == HELPERS.name else ROOTS.get(parts[0])
    if root is None:
        return None
    base = root.joinpath(*parts[1:])
    found = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in found if path.is_file()), None)


@cache
def source(module, name):
    """Return the module in which `name`, imported from `module`, is defined."""
    path = file_of(module)
    if path is None:
        return None
    if name and file_of(f"{module}.{name}"):
        return f"{module}.{name}"
    if path.name == "__init__.py":
        for origin, known in imports(path):
            if known == name and origin != module:
                return source(origin, name)
    return module


@cache
def sources_of(path):
    """Return the modules of the core and the built-ins on which the file at `path` depends."""
    return {source(module, name) for module, name in imports(path)} - {None}


def module_of(path):
    """Return the dotted name of the module at `path`."""
    root = next(root for root in ROOTS.values() if root in path.parents)
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def can_import(path):
    """Return True if all that the test at `path` and its helpers import is installed."""
    for module, name in imports(path):
        room = module.split(".")[0]
        if room == "helpers":
            installed = can_import(file_of(module) or file_of(f"{module}.{name}"))
        elif room.startswith("kvcore"):
            installed = source(module, name)
        else:
            installed = find_spec(room)
        if not installed:
            return False
    return True
