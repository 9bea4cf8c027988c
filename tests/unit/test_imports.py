"""The imports of kvcore: the packages it loads, and the order of its own modules."""

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import kvcore
import kvcore_plugins

CORE = Path(kvcore.__file__).parent
BUILT_IN = Path(kvcore_plugins.__file__).parent
ROOTS = {root.name: root.parent for root in (CORE, BUILT_IN)}

HEAVY = [
    *("torch", "numpy", "numba", "pandas", "transformers"),
    *("click", "rich"),
    *("matplotlib", "plotly"),
    *("pytest", "hypothesis"),
    *("structlog", "kvcore_plugins"),
]

LAYERS = [
    {"errors"},
    {"units"},
    {"compiled"},
    {"distributions", "extras", "files", "histogram", "host", "lazy", "progress"},
    {"notebook"},
    {"request"},
    {"plugins"},
    {"models", "workloads"},
    {"cache"},
    {"trace", "tiers"},
    {"serving"},
    {"cluster"},
    {"engine"},
    {"config"},
    {"analysis", "bench", "hosting", "kv_events"},
    {"report"},
    {"demo"},
    {"api"},
    {"online", "pages"},
    {"cli", "testing"},
    {"__init__", "__main__"},
]
"""Packages and single modules by layer, the lowest first."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

PART_OF = {"hookspecs": "plugins"}
"""`hookspecs` is at the root, where authors of plugins look for it, but part of `plugins`."""

ALLOWED = {("__main__", "cli")}
"""Allowed upward imports: `python -m kvcore` runs the command line."""


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
    """Return the file of a module or package of the core or a built-in; None for others."""
    parts = module.split(".")
    if parts[0] not in ROOTS:
        return None
    base = ROOTS[parts[0]].joinpath(*parts)
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
    root = CORE.parent if CORE in path.parents else BUILT_IN.parent
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module):
    """Return the package of a module below kvcore, or the module itself."""
    _, *rest = module.split(".")
    first = rest[0] if rest else "__init__"
    return PART_OF.get(first, first)


FILES = {folder: sorted(folder.rglob("*.py")) for folder in (CORE, BUILT_IN)}
PACKAGES = [path for path in FILES[CORE] + FILES[BUILT_IN] if path.name == "__init__.py"]
DEFERRED = [path for path in PACKAGES if "import deferred" in path.read_text("utf-8")]
"""The packages whose modules are imported when their names are first used."""


@pytest.fixture(scope="module")
def loaded():
    """Return what `import kvcore` loads in a fresh process."""
    code = "import json, sys, kvcore; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return {name.split(".")[0] for name in json.loads(run.stdout)}


@pytest.mark.parametrize("package", HEAVY)
def test_importing_kvcore_is_light(loaded, package):
    """`import kvcore` loads no heavy package, no test tool, and no plugin."""
    assert package not in loaded


def test_the_core_never_imports_the_plugins():
    """No module of the core imports the built-in plugins, which load as entry points."""
    pairs = [(module_of(path), module) for path in FILES[CORE] for module, _ in imports(path)]
    assert [pair for pair in pairs if pair[1].split(".")[0] == "kvcore_plugins"] == []


def test_packages_import_only_lower_layers():
    """A module imports only its own package and packages of lower layers."""
    upward = []
    for path in FILES[CORE]:
        package = package_of(module_of(path))
        imported = {module for module, _ in imports(path) if file_of(module)}
        packages = {package_of(module) for module in imported | sources_of(path)}
        upward += [
            (module_of(path), other)
            for other in packages - {package, "__init__"}
            if RANK[other] >= RANK[package] and (package, other) not in ALLOWED
        ]
    assert upward == []


@pytest.mark.parametrize("package", [CORE, BUILT_IN], ids=lambda package: package.name)
def test_modules_import_without_cycles(package):
    """No module depends on itself through others, be it for types or inside functions.

    A name that a package re-exports counts as imported from the module that defines it.
    """
    modules = [path for path in FILES[package] if path.name != "__init__.py"]
    graph = {module_of(path): sources_of(path) - {module_of(path)} for path in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_plugins_import_public_names_only():
    """Built-in plugins import only public names of public modules of the core."""
    private = [
        (module_of(path), module, name)
        for path in FILES[BUILT_IN]
        for module, name in imports(path)
        if module.startswith("kvcore.")
        and any(part.startswith("_") for part in [*module.split("."), name])
    ]
    assert private == []


@pytest.mark.parametrize(
    "path",
    [path for path in PACKAGES if path.parent != CORE],
    ids=lambda path: path.parent.name,
)
def test_packages_only_re_export(path):
    """An `__init__.py` has only a docstring, imports and `__all__`, except kvcore's own.

    A package that imports lazily also has its imports where the type checker sees them.
    """
    kinds = [type(node) for node in parsed(path).body]
    assert set(kinds) <= {ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.If}
    assert kinds.count(ast.Expr) <= 1
    assert kinds.count(ast.Assign) <= 1
    assert kinds.count(ast.If) == (path in DEFERRED)


@pytest.mark.parametrize("path", DEFERRED, ids=lambda path: path.parent.name)
def test_deferred_imports_match_the_imports_for_types(path):
    """The names of `deferred` come from the modules that the imports for types name."""
    (both,) = (node for node in parsed(path).body if isinstance(node, ast.If))
    shown = {
        node.module.rpartition(".")[2]: " ".join(alias.name for alias in node.names)
        for node in both.body
    }
    assert ast.literal_eval(both.orelse[0].value.args[1]) == shown


@pytest.mark.parametrize("path", DEFERRED, ids=lambda path: path.parent.name)
def test_lazily_imported_names_exist(path):
    """Each lazily imported name exists and is listed; an unknown one raises AttributeError."""
    root = CORE.parent if CORE in path.parents else BUILT_IN.parent
    package = import_module(".".join(path.parent.relative_to(root).parts))
    assert all(hasattr(package, name) for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
        _ = package.no_such_name
