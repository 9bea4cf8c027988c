"""The sizes that keep kvcore readable: of the core, of signatures, of classes."""

import ast

from helpers.imports import CORE, ROOTS, parsed

LINES = {path: len(path.read_text("utf-8").splitlines()) for path in CORE.rglob("*.py")}
FILES = [path for root in ROOTS.values() for path in sorted(root.rglob("*.py"))]


def test_the_core_stays_small():
    """The core has at most 90 files and 23,600 lines, its serving loop 4,300 beside contracts.

    What makes them more is perhaps no contract, cache, loop, trace or configuration, and then
    of a package.
    """
    contracts = {"drafter.py", "latency.py", "router.py", "rules.py", "scheduler.py"}
    loop = [
        LINES[path]
        for path in LINES
        if path.parent == CORE / "serving" and path.name not in contracts
    ]
    assert len(LINES) <= 90
    assert sum(LINES.values()) <= 23_600
    assert sum(loop) <= 4_300


def test_no_public_function_has_more_than_12_parameters():
    """A function of more takes typed options; kernels of GPUs have no other way."""
    long = [
        f"{path.name}:{node.lineno} {node.name}"
        for path in FILES
        if "kernels" not in path.parts
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) > 12
    ]
    assert long == []


def attributes(cls):
    """Yield the attributes that instances of a class get in its own code."""
    for node in ast.walk(cls):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and getattr(node.value, "id", None) == "self":
            yield node.attr
    for node in cls.body:
        if isinstance(node, ast.AnnAssign):
            of_class = ast.unparse(node.annotation).startswith(("ClassVar", "Final"))
            if not of_class:
                yield ast.unparse(node.target)


def test_no_class_has_more_than_30_attributes():
    """A cluster of attributes is a class without a name."""
    large = [
        f"{path.name}:{node.lineno} {node.name}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and len({*attributes(node)}) > 30
    ]
    assert large == []
