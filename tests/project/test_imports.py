"""The imports of kvcore: the packages it loads, and the order of its own modules."""

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib import import_module

import pytest
from helpers.imports import CORE, ROOTS, file_of, imports, module_of, parsed, sources_of
from helpers.packages import may_import, package_of

import kvcore
from kvcore.config.options import mode_options
from kvcore.notebook import Shown
from kvcore.plugins.manager import KINDS, Plugins

HEAVY = [
    *("torch", "numpy", "numba", "pandas", "transformers"),
    *("click", "rich"),
    *("matplotlib", "plotly"),
    *("pytest", "hypothesis"),
    *("structlog", "kvcore_plugins"),
]

RARE = [
    *("msgspec", "structlog", "rich", "zstandard"),
    *("hashlib", "pickle", "shutil", "tempfile", "tomllib", "traceback"),
    *("difflib", "encodings.ascii", "locale", "logging", "random", "subprocess"),
    *("kvcore.api", "kvcore.config.files", "kvcore.trace.events", "kvcore.trace.writer"),
    *("kvcore.cache.checkpoint", "kvcore.cache.integrity", "kvcore.moved"),
    *("kvcore_plugins.workload.file_workload", "kvcore_plugins.workload.zipf"),
    *("kvcore_plugins.eviction.lfu", "kvcore_plugins.models"),
]
"""Modules that a simulation starts without: all that it does not use, and that takes time."""

START = """
import atexit, sys
from kvcore.__main__ import main

@atexit.register
def loaded():
    own = [name for name in sys.modules if name.startswith("kvcore")]
    names = [name for module in own for name in vars(sys.modules[module]).values()]
    classes = {c for c in names if isinstance(c, type) and "__attrs_attrs__" in vars(c)}
    print("loaded:", len(own), len(classes), *sys.modules, file=sys.stderr)

sys.argv = sys.argv[1:]
main()
"""
"""Code that runs a command line, and then prints what it has loaded and made."""

MOST_MODULES, MOST_CLASSES = 131, 20
"""Largest numbers of modules and of classes of attrs that a simulation starts with: a module
takes 0.3 million instructions and more, such a class 1.6, of some 410 in all."""

REQUEST = {"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1]}

FILES = {folder: sorted(folder.rglob("*.py")) for folder in ROOTS.values()}
NAMES = {
    path: path.relative_to(root.parent).as_posix()
    for root, paths in FILES.items()
    for path in paths
}
"""Paths of files from the folder of their package on, such as `kvcore_cli/main.py`."""

PACKAGES = [path for path in NAMES if path.name == "__init__.py"]
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


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Return the modules that a simulation of a file loads, and numbers of kvcore's own."""
    file = tmp_path_factory.mktemp("start") / "trace.jsonl"
    file.write_text(json.dumps(REQUEST), "utf-8")
    command = [sys.executable, "-c", START, "kvcore", "simulate", str(file)]
    run = subprocess.run(command, capture_output=True, check=True, text=True)
    _, _, words = run.stderr.rpartition("loaded: ")
    modules, classes, *names = words.split()
    return {*names}, int(modules), int(classes)


def test_a_simulation_loads_nothing_that_it_does_not_use(started):
    """`kvcore simulate` of a file of requests, without a trace, loads no rare module."""
    names, _, _ = started
    assert "kvcore_plugins.workload.mooncake" in names
    assert names.isdisjoint(RARE)


def test_a_simulation_makes_few_modules_and_classes(started):
    """The start of a simulation has no more modules of kvcore and classes of attrs than now."""
    _, modules, classes = started
    assert modules <= MOST_MODULES
    assert classes <= MOST_CLASSES


@pytest.fixture
def _alone(monkeypatch):
    """Make two names of the front door those of packages that are not installed."""
    for name in ("compare", "report_html"):
        monkeypatch.delitem(vars(kvcore), name, raising=False)
        monkeypatch.setitem(sys.modules, kvcore._PLACES[name], None)


@pytest.mark.usefixtures("_alone")
def test_a_name_of_a_missing_package_says_where_it_is():
    """A name of the front door says which module it is in, if that is not installed."""
    with pytest.raises(ImportError, match=r"kvcore\.compare is in kvcore_lab\.api, which"):
        _ = kvcore.compare


@pytest.mark.usefixtures("_alone")
def test_without_the_package_of_reports_a_result_is_shown_as_text():
    """A notebook gets no HTML of a result if the module that makes it is not installed."""
    assert Shown()._repr_html_() is None


def test_files_import_only_packages_above_theirs():
    """A file imports its own room or package, and those above it in `ORDER`.

    `kvcore/__init__.py`, the front door, names what packages below it have: the command
    line, which `python -m kvcore` runs, too.
    """
    wrong = {
        name
        for path, name in NAMES.items()
        for module in sources_of(path) | {module for module, _ in imports(path)}
        if module != "kvcore" and (file := file_of(module))
        if not may_import(name, NAMES[file])
    }
    assert wrong <= {"kvcore/__init__.py"}


FIELDS = {
    *("allocation", "clock", "shrink"),  # of the documents of all runs
    *("replicas", "view", "fail", "autoscale", "disaggregate"),  # of headers, which all read
    *KINDS,  # of plugins, whose contracts are in the core
}
"""Options of packages whose names are also those of fields, which the core has."""


def is_of_a_package(name):
    """Return True if the file of a name is not in the core."""
    return package_of(name).startswith("kvcore_")


def vocabulary():
    """Return the options, verbs and calls of packages, as the core would name them."""
    plugins = Plugins()
    options = {name for mode in plugins.modes().values() for name in mode_options(mode)}
    options.remove("dtype")  # which a config.json has
    verbs = {*plugins.verbs()} - {"size"}  # which errors on names of models advise
    calls = {name for name, module in kvcore._PLACES.items() if module.startswith("kvcore_")}
    calls.remove("recorded_config")  # which a former method of `RunConfig` names
    modules = {module_of(path) for path, name in NAMES.items() if is_of_a_package(name)}
    return {
        *(modules - {*KINDS.values()}),  # a hook has the name of a package
        *(f"config.{name}" for name in options),
        *(f"--{name.replace('_', '-')}" for name in options),
        *(options - FIELDS),
        *(f"kvcore {verb}" for verb in verbs),
        *(f"kvcore.{name}" for name in calls),
    }


def named_in(path):
    """Yield the options of a configuration, and what strings name, in a file, with its line."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
            yield f"config.{node.attr}", node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = re.findall(r"--[a-z][a-z-]+|kvcore [a-z]+|kvcore[a-z_.]+", node.value)
            yield from ((word, node.lineno) for word in [node.value, *words])


def test_the_core_names_nothing_of_packages():
    """No option, verb or call of a package is named in the core, in code or in a string."""
    pytest.importorskip("kvcore_lab")
    words = vocabulary()
    front = {CORE / "__init__.py", CORE / "moved.py"}
    named = {
        f"{name}:{line} {word}"
        for path, name in NAMES.items()
        if not is_of_a_package(name) and path not in front
        for word, line in named_in(path)
        if word in words
    }
    assert named == set()


@pytest.mark.parametrize("package", ROOTS.values(), ids=ROOTS)
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
        for path in FILES[ROOTS["kvcore_plugins"]]
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
    assert kinds.count(ast.Assign) <= 1 + ("former(__name__)" in path.read_text("utf-8"))
    assert kinds.count(ast.If) == (path in DEFERRED)


@pytest.mark.parametrize("path", DEFERRED, ids=lambda path: path.parent.name)
def test_deferred_imports_match_the_imports_for_types(path):
    """Each name comes from the module that the import for types names."""
    package = import_module(module_of(path))
    (both,) = (node for node in parsed(path).body if isinstance(node, ast.If))
    for node in both.body:
        module = import_module(node.module)
        for alias in node.names:
            assert getattr(package, alias.name) is getattr(module, alias.name)


@pytest.mark.parametrize("path", DEFERRED, ids=lambda path: path.parent.name)
def test_lazily_imported_names_exist(path):
    """Each lazily imported name exists and is listed; an unknown one raises AttributeError."""
    package = import_module(module_of(path))
    assert all(hasattr(package, name) for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
        _ = package.no_such_name


@pytest.mark.parametrize(
    ("name", "hint"), [("simluate", " (did you mean 'simulate'?)"), ("e", ""), ("__odd__", "")]
)
def test_a_misspelled_name_of_the_front_door_is_told_with_the_nearest(name, hint):
    """A name that kvcore lacks is told with the nearest one, if one is near."""
    with pytest.raises(AttributeError) as raised:
        getattr(kvcore, name)
    assert str(raised.value) == f"module 'kvcore' has no attribute {name!r}{hint}"
