"""Names of the release before: modules and names that have moved, and aliases."""

import runpy
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

import kvcore
from kvcore import moved

FILES = {
    "__init__.py": "",
    "__main__.py": "ran = __name__",
    "paging.py": "class Table: ...",
    "shapes/__init__.py": "",
    "shapes/sizes.py": "from kvcore_new.paging import Table",
}
TABLE = {
    "kvcore.old.paging": "kvcore_new.paging",
    "kvcore.old.shapes": "kvcore_new.shapes",
    "kvcore.old.shapes.lengths": "kvcore_new.shapes.sizes",
    "kvcore.trace.pages": "kvcore_new.paging",
    "kvcore.old:Table": "kvcore_new.paging:Table",
}
USES = [
    "from kvcore.old import Table",
    "from kvcore.old.paging import Table",
    "from kvcore.old.shapes.lengths import Table",
    "from kvcore.trace.pages import Table",
    "from kvcore.old import paging; Table = paging.Table",
    "import kvcore; Table = kvcore.old.Table",
    "import kvcore; Table = kvcore.old.shapes.lengths.Table",
    "import kvcore.trace; Table = kvcore.trace.pages.Table",
]
UNKNOWN = {
    "import kvcore.other": "No module named 'kvcore.other'",
    "import kvcore.old.other": "No module named 'kvcore.old.other'",
    "import kvcore.trace.other": "No module named 'kvcore.trace.other'",
    "import kvcore.twin.other": "No module named 'kvcore.twin.other'",
    "from kvcore.old import other": "cannot import name 'other' from 'kvcore.old'",
    "from kvcore.old.paging import other": "cannot import name 'other'",
    "import kvcore.old; kvcore.old.other": "module 'kvcore.old' has no attribute 'other'",
    "import kvcore.old.paging as old; old.__wrapped__": "no attribute '__wrapped__'",
}


@pytest.fixture
def _new(tmp_path, monkeypatch):
    """Make a package to which modules of kvcore have moved; stale folders are left."""
    for name, text in FILES.items():
        file = tmp_path / "kvcore_new" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    (tmp_path / "left" / "old" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kvcore, "__path__", [*kvcore.__path__, str(tmp_path / "left")])
    monkeypatch.setattr(moved, "TABLE", TABLE)
    monkeypatch.setattr(moved, "ALIASES", {"kvcore.twin": "kvcore_new"})
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.startswith(("kvcore.old", "kvcore.twin", "kvcore.trace.pages", "kvcore_new")):
            del sys.modules[name]
    for package, name in ((kvcore, "old"), (kvcore, "twin"), (kvcore.trace, "pages")):
        vars(package).pop(name, None)


def use(code):
    """Run code of a user, and return its variables."""
    variables = {}
    exec(compile(code, "user.py", "exec"), variables)  # noqa: S102 - an import is a statement
    return variables


@pytest.mark.usefixtures("_new")
@pytest.mark.parametrize("code", USES)
def test_a_former_name_is_that_of_today_with_one_notice(code):
    """However a user asks for a name, it is the object of today, with one FutureWarning."""
    with pytest.warns(FutureWarning, match=r"\.Table is kvcore_new\..*\.Table now") as notices:
        table = use(code)["Table"]
    use(code)
    assert table is import_module("kvcore_new.paging").Table
    assert [notice.filename for notice in notices] == ["user.py"]


@pytest.mark.usefixtures("_new")
@pytest.mark.parametrize("code", UNKNOWN)
def test_an_unknown_name_of_a_former_module_is_refused(code):
    """The error about a name that never was is that of any module."""
    with pytest.raises((ImportError, AttributeError), match=UNKNOWN[code]):
        use(code)


@pytest.mark.usefixtures("_new")
def test_a_former_module_loads_nothing():
    """The module of today is not loaded before one of its names is asked for."""
    use("import kvcore.old.paging as old; hasattr(old, '__wrapped__')")
    assert {"Table", "paging", "shapes"} <= {*dir(sys.modules["kvcore.old"])}
    assert find_spec("kvcore.old.shapes.lengths").origin == "kvcore_new.shapes.sizes"
    assert find_spec("kvcore.old.other") is None
    assert "kvcore_new" not in sys.modules


@pytest.mark.usefixtures("_new")
@pytest.mark.parametrize("code", [*USES, "import kvcore.twin"])
def test_a_former_name_of_a_missing_package_says_where_it_is(code, monkeypatch):
    """The error says which module has the name if its package is not installed."""
    monkeypatch.setitem(sys.modules, "kvcore_new", None)
    with pytest.raises(ImportError, match=r"kvcore\..* is in kvcore_new.*, which is not"):
        use(code)


@pytest.mark.usefixtures("_new")
def test_an_alias_is_the_module_itself():
    """Modules of a package with an alias are the same by both names, and keep their own."""
    table = use("from kvcore.twin.shapes.sizes import Table")["Table"]
    for name in ("", ".shapes", ".shapes.sizes", ".paging"):
        module = import_module(f"kvcore_new{name}")
        assert import_module(f"kvcore.twin{name}") is module
        assert module.__name__ == module.__spec__.name == f"kvcore_new{name}"
    assert table is kvcore.twin.paging.Table
    assert runpy.run_module("kvcore.twin", run_name="__main__")["ran"] == "__main__"


def test_names_of_today_do_not_read_the_table():
    """The list of verbs and a simulation do not load the table of former names."""
    code = """
import sys
from kvcore_cli.main import run
assert run(["--help"]) == run(["simulate", "--limit", "1"]) == 0
assert "kvcore.trace" in sys.modules
assert "kvcore.moved" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_former_modules_are_modules_of_today():
    """A module that moved is imported by its former name, and exists by that of today."""
    pytest.importorskip("kvcore_lab")
    for former, today in moved.TABLE.items():
        # The adapters of engines are distributions of their own.
        if ":" not in former and not today.startswith("kvcore_vllm"):
            assert import_module(former).__spec__.origin == today
            assert find_spec(today)


ROWS = {former: today for former, today in moved.TABLE.items() if ":" in former}


@pytest.mark.parametrize("former", ROWS)
def test_former_names_work_with_a_notice(former, monkeypatch):
    """A name that moved is the object of today, with one FutureWarning for its user."""
    pytest.importorskip("kvcore_lab")
    room, _, name = former.partition(":")
    module, _, attribute = ROWS[former].partition(":")
    monkeypatch.delitem(vars(import_module(room)), name, raising=False)
    told = f"{room}.{name} is {module}.{attribute} now"
    with pytest.warns(FutureWarning, match=told) as notices:
        value = getattr(import_module(room), name)
    assert value is getattr(import_module(module), attribute)
    assert [notice.filename for notice in notices] == [__file__]
