"""The digest of a class as it is in memory: of one that was typed in, or made by a function."""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from copyreg import dispatch_table
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from types import (
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    ModuleType,
    NoneType,
)
from typing import Any
from uuid import uuid4

from kvcore_lab.sweep.sources import packages, plugin_digests

ATOMS = (NoneType, bool, int, float, complex, str, bytes, EllipsisType)
"""Types of values that their representations name."""

VALUES = (tuple, frozenset, CodeType)
"""Types of values of which Python may keep one or several: they are told each time."""

INSTALLED = {"site-packages", "dist-packages"}
"""The folders of installed packages, of which an environment may have several."""

HEAP = 1 << 9
"""The flag of types that were made by running Python, `Py_TPFLAGS_HEAPTYPE`."""

UNSAID = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__"),
    *("__firstlineno__", "__static_attributes__", "__slotnames__", "_abc_impl"),
}
"""Attributes that Python gives a class, which say nothing of what it does."""

LOOKUPS = ("LOAD_GLOBAL", "LOAD_NAME")
"""The instructions that read names of a module."""


@cache
def class_digest(cls: type) -> str | None:
    """Return the digest of a class by what it runs; None for one of an installed package.

    That is the attributes and bases of the class, and the code, the defaults and the closures
    of its methods, with all of their modules that they name. A run may change these, so that a
    class keeps its digest until `cache_clear()`, which begins a sweep. With a value that cannot
    be pickled the digest is another one each time, so that no journal has it.
    """
    if _is_known(cls):
        return None
    state, seen = blake2b(digest_size=16), dict[int, int]()
    parts: list[Any]
    held: list[object] = []  # so that no two values have one id
    todo: list[object] = [cls]
    while todo:
        value = todo.pop()
        if type(value) in ATOMS:
            said, parts = repr(value), []
        elif type(value) not in VALUES and id(value) in seen:
            said, parts = f"again {seen[id(value)]}", []
        else:
            seen[id(value)] = len(held)
            held.append(value)
            said, parts = type(value).__qualname__, [*_parts(value)]
        state.update(f"{len(said)} {said} {len(parts)}\n".encode("utf-8", "surrogatepass"))
        todo += reversed(parts)
    return state.hexdigest()


@cache
def is_installed(module: str) -> bool:
    """Return True for a module of kvcore, of Python or of an installed package."""
    top = module.partition(".")[0]
    if top in {package.name for package in packages()}:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names
    standard = Path(file).is_relative_to(sysconfig.get_path("stdlib"))
    return standard or not INSTALLED.isdisjoint(Path(file).parts)


def _is_known(cls: type) -> bool:
    """Return True if the name of a class and of its module say what it is."""
    # What is run without the name of a module has that of `builtins`, as types of C have.
    nowhere = cls.__module__ == "builtins" and cls.__flags__ & HEAP
    return is_installed(cls.__module__) and not nowhere and "<locals>" not in cls.__qualname__


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of a value, in an order that is the same in every process."""
    if isinstance(value, type):
        return _of_class(value)
    if type(value) in PARTS:
        return PARTS[type(value)](value)
    wrapped = getattr(value, "__wrapped__", None)  # of a function with a cache
    return _pickled(value) if wrapped is None else (wrapped,)


def _of_class(cls: type) -> Iterable[Any]:
    if _is_known(cls):
        return cls.__module__, cls.__qualname__
    own = {
        name: value
        for name, value in vars(cls).items()
        if name not in UNSAID and not name.startswith("__attrs_")
    }
    return *cls.__bases__, own


def _of_code(code: CodeType) -> Iterable[Any]:
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_consts, code.co_exceptiontable, *names


def _of_function(function: FunctionType) -> Iterable[Any]:
    given = function.__closure__, function.__defaults__, function.__kwdefaults__
    known = function.__globals__
    if is_installed(str(known.get("__name__"))):
        return known["__name__"], function.__qualname__, *given
    read = {name: known[name] for name in sorted(known.keys() & {*_names(function.__code__)})}
    return function.__code__, *given, read, vars(function)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of its module that code reads, with that of the functions in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in LOOKUPS:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_module(module: ModuleType) -> Iterable[Any]:
    name = module.__name__
    ours = name in sys.modules and not is_installed(name)
    return (name, plugin_digests(name)) if ours else (name,)


def _of_cell(cell: CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _pickled(value: Any) -> Iterable[Any]:
    """Return the parts from which `pickle` would build a value, or what no value has again."""
    try:
        reduce = dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(2) if reduce is None else reduce(value)
    except Exception:  # noqa: BLE001  # whatever a class raises that cannot be pickled
        return (uuid4().hex,)
    if isinstance(reduced, str):
        return (reduced,)
    return [list(part) if isinstance(part, Iterator) else part for part in reduced]


PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    CodeType: _of_code,
    FunctionType: _of_function,
    ModuleType: _of_module,
    CellType: _of_cell,
    property: lambda value: (value.fget, value.fset, value.fdel),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    MappingProxyType: lambda value: (dict(value),),
    dict: lambda value: (part for item in value.items() for part in item),
    **dict.fromkeys((tuple, list), iter),
    **dict.fromkeys((set, frozenset), partial(sorted, key=repr)),
}
"""The parts of values, by types that `pickle` refuses or reads in no fixed order."""
