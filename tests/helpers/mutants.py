"""Mutation testing: one change of a room's code at a time, which its tests must notice.

Usage: python tests/helpers/mutants.py ROOM [NUMBER] [SEED]

Changes are drawn from a seed. Each is tested in a process of its own, in which the changed file
is compiled in place of the one on disk; tests that pass have let the mutant survive. A process
that takes too long counts as one that has noticed.

Some mutants survive because nothing changes: an exception whose `super().__init__` is left out
has its text all the same, one byte more than needed is looked at again for the end of an event,
classes that are never compared may compare by value.
"""

# ruff: noqa: T201 - survivors are printed

import ast
import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import attrs

ROOT = Path(__file__).parents[2]

ROOMS = {
    "cache": ("kvcore/cache", ["tests/core/cache"]),
    "tiers": ("plugins/kvcore_tiers", ["tests/tiers"]),
    "serving": ("kvcore/serving", ["tests/core/serving"]),
    "online": ("plugins/kvcore_online", ["tests/online"]),
}
"""The files of each room, and its tests."""

SIMULATED = "tests/online/test_simulation.py"
COVERED = {
    "engine.py": [SIMULATED, "tests/online/test_server.py"],
    "fleet.py": [
        SIMULATED,
        "tests/online/test_proxy.py",
        "tests/online/test_followed_events.py",
    ],
    "metrics.py": ["tests/online/test_server.py"],
    "proxy.py": [
        SIMULATED,
        "tests/online/test_proxy.py",
        "tests/online/test_proxy_untrusted.py",
    ],
    "prompts.py": ["tests/online/test_proxy.py", "tests/online/test_hostile.py"],
    "route_config.py": ["tests/online/test_route_config.py", "tests/online/test_proxy.py"],
    "server.py": [SIMULATED, "tests/online/test_server.py"],
    "stored.py": ["tests/online/test_stored_blocks.py", "tests/online/test_server.py"],
    "traffic.py": [
        SIMULATED,
        "tests/online/test_proxy.py",
        "tests/online/test_proxy_untrusted.py",
    ],
}
"""The tests of files whose room has slow ones, those first that notice most."""

CPU_SECONDS = 240
WALL_SECONDS = 1_200
"""Limits of the tests of one mutant."""

SWAPS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@attrs.define
class Mutant:
    """A change of a file: the node with this index in it, and what is done to it."""

    path: Path
    index: int
    line: int
    what: str


class _Mutator(ast.NodeTransformer):
    """Lists all changes of a file, and makes the one with an index.

    Annotations and texts are left as they are: no run depends on them.
    """

    def __init__(self, wanted=None):
        self.found, self._wanted = [], wanted

    def _may(self, node, what):
        """Record a change; return True if it is to be made."""
        self.found.append((node.lineno, what))
        return len(self.found) - 1 == self._wanted

    def visit_arg(self, node):
        return node

    def visit_AnnAssign(self, node):
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node):
        node.body = [self.visit(each) for each in node.body]
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that `ast` calls

    def visit_If(self, node):
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node
        if self._may(node, "the condition is negated"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return self.generic_visit(node)

    def visit_Expr(self, node):
        calls = isinstance(node.value, (ast.Call, ast.Await))
        if calls and self._may(node, f"left out: {ast.unparse(node)[:60]}"):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_AugAssign(self, node):
        if self._may(node, f"left out: {ast.unparse(node)[:60]}"):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Compare(self, node):
        for place, operator in enumerate(node.ops):
            swap = SWAPS[type(operator)]
            if self._may(node, f"{type(operator).__name__} becomes {swap.__name__}"):
                node.ops[place] = swap()
        return self.generic_visit(node)

    def visit_BinOp(self, node):
        swap = SWAPS.get(type(node.op))
        if swap and self._may(node, f"{type(node.op).__name__} becomes {swap.__name__}"):
            node.op = swap()
        return self.generic_visit(node)

    def visit_BoolOp(self, node):
        swap = SWAPS[type(node.op)]
        if self._may(node, f"{type(node.op).__name__} becomes {swap.__name__}"):
            node.op = swap()
        return self.generic_visit(node)

    def visit_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            if self._may(node, f"{value} becomes {not value}"):
                return ast.Constant(not value)
        elif isinstance(value, int) and self._may(node, f"{value} becomes {value + 1}"):
            return ast.Constant(value + 1)
        return node


def mutants(room):
    """Return all mutants of a room."""
    made = []
    for path in sorted((ROOT / ROOMS[room][0]).rglob("*.py")):
        mutator = _Mutator()
        mutator.visit(ast.parse(path.read_text()))
        made += [Mutant(path, index, *found) for index, found in enumerate(mutator.found)]
    return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from changed code."""

    def __init__(self, mutant):
        self._mutant = mutant
        base = ROOT / "plugins" if "plugins" in mutant.path.parts else ROOT
        *folders, name = mutant.path.relative_to(base).with_suffix("").parts
        self._name = ".".join(folders if name == "__init__" else [*folders, name])

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        file = self._mutant.path
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self, submodule_search_locations=inside
        )

    def exec_module(self, module):
        tree = ast.parse(self._mutant.path.read_text())
        tree = ast.fix_missing_locations(_Mutator(self._mutant.index).visit(tree))
        exec(compile(tree, str(self._mutant.path), "exec"), module.__dict__)  # noqa: S102


def survives(mutant, room):
    """Return True if the tests of a mutant's file pass with it."""
    tests = (
        COVERED.get(mutant.path.name, ROOMS[room][1]) if room == "online" else ROOMS[room][1]
    )
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.meta_path.insert(0, _Finder(mutant))
        os._exit(_run(tests))
    return _wait(child) == 0


def _run(tests):
    """Run tests in order, and return the first exit code that is not 0."""
    import pytest  # noqa: PLC0415 - loaded before the fork

    os.chdir(ROOT)
    # Plugins of pytest are loaded before it: that is what the fork is for.
    loaded = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not network and not slow"]
    options += ["-W", loaded]
    try:
        return int(pytest.main([*options, *tests]))
    except BaseException:  # noqa: BLE001 - whatever a mutant does
        return 1


def _wait(child):
    """Wait for a process and its children; return its exit code."""
    until = time.monotonic() + WALL_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and time.monotonic() < until:
            time.sleep(0.1)
            continue
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
            return -1
        return os.waitstatus_to_exitcode(status)


def main(room, number="200", seed="0"):
    """Draw mutants of a room, test them, and print those that survive."""
    os.environ.setdefault("KVCORE_SIMULATION", "48")
    made = mutants(room)
    drawn = Random(int(seed)).sample(made, min(int(number), len(made)))
    same = attrs.evolve(drawn[0], index=-1)
    assert survives(same, room), "the tests fail without a mutant"
    survivors = 0
    for count, mutant in enumerate(drawn, 1):
        if survives(mutant, room):
            survivors += 1
            where = mutant.path.relative_to(ROOT)
            print(f"survived: {where}:{mutant.line}: {mutant.what}", flush=True)
        if count % 10 == 0 or count == len(drawn):
            print(
                f"{room}: {survivors} of {count} survived ({len(made)} are possible)",
                flush=True,
            )
    return survivors


if __name__ == "__main__":
    import pytest  # noqa: F401 - so that no process has to load them

    for _name in ("torch", "aiohttp.web", "zmq", "hypothesis", "openai", "numpy"):
        try:
            __import__(_name)
        except ImportError:
            continue
    sys.exit(main(*sys.argv[1:]) > 0)
