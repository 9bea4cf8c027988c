"""Stand-ins for dependencies of engines; as a program, it installs engines without them."""

import os
import subprocess
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest


def required(package):
    """Skip the module of tests if the package of an engine is not installed."""
    if find_spec(package) is None:
        reason = f"{package} is not installed: `tox -e {package}` does so if the index has it"
        pytest.skip(reason, allow_module_level=True)


def stand_in(*modules, package=None):
    """Make imports of `modules`, and of modules inside them, return empty modules.

    Every name of such a module is an empty class. Use it for modules that are not called, or
    that need a GPU or a server.

    Args:
        modules: names of the modules.
        package: an engine's package whose files import empty modules for all missing ones.
    """
    sys.meta_path.insert(0, _Unused(modules))
    if package is not None:
        sys.meta_path.append(_Missing(package))


class _Anything(type):
    """The class of empty classes, whose every attribute is an empty class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(name)

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def _empty(name):
    """Return an empty class, whose instances return their first argument when called."""
    return _Anything(
        name,
        (),
        {
            "__init__": lambda *_args, **_options: None,
            "__call__": lambda self, *args, **_options: args[0] if args else self,
        },
    )


class _Unused(MetaPathFinder, Loader):
    """A finder that returns empty modules for unused ones."""

    def __init__(self, modules):
        self.modules = modules

    def find_spec(self, name, path=None, target=None):
        """Return an empty module if `name` is an unused module or lies in one."""
        known = any(name == module or name.startswith(f"{module}.") for module in self.modules)
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        """Return None, so that Python creates the module."""

    def exec_module(self, module):
        """Give the module an empty class for every name that is read."""

        def __getattr__(name):  # noqa: N807 - the hook of a module
            if name.startswith("__"):
                raise AttributeError(name)
            return _empty(name)

        module.__getattr__ = __getattr__


class _Missing(_Unused):
    """A finder that returns empty modules for what an engine imports and is not installed."""

    def find_spec(self, name, path=None, target=None):
        """Return an empty module if a file of the engine imports `name`."""
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        folder, _ = os.path.split(find_spec(self.modules).origin)
        wanted = frame is not None and frame.f_code.co_filename.startswith(folder + os.sep)
        if not wanted or name.startswith(self.modules):
            return None
        return ModuleSpec(name, self, is_package=True)


def install(requirement):
    """Install a package without dependencies; raise if that fails and the index has it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", requirement]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    output = done.stderr.strip() if done.returncode else "installed"
    print(f"{requirement}: {output.splitlines()[-1]}", file=sys.stderr)  # noqa: T201
    if done.returncode and "No matching distribution found" not in output:
        raise SystemExit(output)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        install(each)
