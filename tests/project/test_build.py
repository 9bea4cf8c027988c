"""The modules that a wheel build compiles; `tox -e compiled` runs all tests with them."""

import shutil
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from kvcore.plugins import Plugin

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build():
    """Return the module of the build hook."""
    pytest.importorskip("hatchling")
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hook(build):
    """Return the build hook of a wheel."""
    return build.Compile(str(ROOT), {}, None, None, "dist", "wheel")


def test_a_wheel_is_pure_unless_asked_otherwise(hook, monkeypatch):
    """Without KVCORE_COMPILE, the build hook adds no dependency and no file."""
    monkeypatch.delenv("KVCORE_COMPILE", raising=False)
    assert hook.dependencies() == []
    data = {"force_include": {}}
    hook.initialize("standard", data)
    assert data == {"force_include": {}}


def test_an_editable_install_is_never_compiled(hook, monkeypatch):
    """An editable install is not compiled, even if KVCORE_COMPILE is set."""
    monkeypatch.setenv("KVCORE_COMPILE", "1")
    data = {"force_include": {}}
    hook.initialize("editable", data)
    assert data == {"force_include": {}}


def test_compiling_without_a_compiler_is_refused_with_advice(hook, monkeypatch):
    """Compiling without a compiler raises an error with what is missing and what to do."""
    monkeypatch.setenv("KVCORE_COMPILE", "1")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match=r"is not found: install one, or build without"):
        hook.initialize("standard", {"force_include": {}})


def test_no_compiled_module_has_a_plugin_class(build):
    """No compiled module has a plugin class: Python plugins could not derive from it."""
    assert build.MODULES
    for path in build.MODULES:
        module = import_module(path.removesuffix(".py").replace("/", "."))
        classes = [each for each in vars(module).values() if isinstance(each, type)]
        own = [each for each in classes if each.__module__ == module.__name__]
        assert not [each for each in own if issubclass(each, Plugin)]
