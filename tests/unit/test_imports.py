"""What importing kvcore brings in, and which room may import which."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
import kvcore_plugins

CORE = Path(kvcore.__file__).parent
BUILT_IN = Path(kvcore_plugins.__file__).parent

HEAVY = [
    *("torch", "numpy", "numba", "pandas", "transformers"),
    *("click", "rich"),
    *("matplotlib", "plotly"),
    *("pytest", "hypothesis"),
    *("structlog", "kvcore_plugins"),
]

LAYERS = [
    {"request"},
    {"plugins", "hookspecs"},
    {"models", "workloads"},
    {"cache"},
    {"trace"},
    {"serving"},
    {"engine"},
    {"config"},
    {"analysis", "kv_events"},
    {"report"},
    {"demo"},
    {"api"},
    {"cli", "__main__"},
    {"testing", "__init__"},
]
"""Rooms and single modules, lower ones first. What is not listed is below all of them."""


def imports(path):
    """Return the modules that the file at `path` imports, also inside functions.

    Those for the type checker alone are left out.
    """
    found, nodes = [], [ast.parse(path.read_text())]
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            found.append(node.module)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            nodes += ast.iter_child_nodes(node)
    return found


def layer(module):
    """Return how high the module or room of that name lies."""
    return next((rank for rank, names in enumerate(LAYERS, 1) if module in names), 0)


def sources(folder):
    """Return all Python files below `folder`."""
    return sorted(folder.rglob("*.py"))


def named(path):
    """Return a file's name for the test report."""
    return str(path.relative_to(CORE.parent))


@pytest.fixture(scope="module")
def loaded():
    """Return what `import kvcore` loads in a fresh process."""
    code = "import json, sys, kvcore; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return {name.split(".")[0] for name in json.loads(run.stdout)}


@pytest.mark.parametrize("package", HEAVY)
def test_import_is_light(loaded, package):
    """`import kvcore` loads nothing heavy, no test tool, and no plugin."""
    assert package not in loaded


@pytest.mark.parametrize("path", sources(CORE), ids=named)
def test_the_core_never_imports_the_plugins(path):
    """The built-ins come in through entry points, as anyone's do."""
    assert not [name for name in imports(path) if name.split(".")[0] == "kvcore_plugins"]


@pytest.mark.parametrize("path", sources(CORE), ids=named)
def test_rooms_import_downwards(path):
    """A module imports only its own room and those below it."""
    room, *_ = path.relative_to(CORE).with_suffix("").parts
    core = [name for name in imports(path) if name.startswith("kvcore.")]
    assert not [name for name in core if layer(name.split(".")[1]) > layer(room)]


@pytest.mark.parametrize("path", sources(BUILT_IN), ids=lambda path: path.stem)
def test_plugins_import_public_names_only(path):
    """A built-in sees of the core what anyone sees: public names of public modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcore."):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            assert not [name for name in names if name.startswith("_")]


@pytest.mark.parametrize(
    "path",
    [path for path in sources(CORE) + sources(BUILT_IN) if path.name == "__init__.py"],
    ids=lambda path: path.parent.name,
)
def test_packages_only_re_export(path):
    """An `__init__.py` has a docstring, imports and `__all__`, and nothing else."""
    kinds = [type(node) for node in ast.parse(path.read_text()).body]
    assert set(kinds) <= {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign}
    assert kinds.count(ast.Expr) <= 1
    assert kinds.count(ast.Assign) <= 1
