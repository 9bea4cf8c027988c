"""Mutation testing: one change of a room's code at a time, which its tests must notice.

Usage: python tests/helpers/mutants.py ROOM [COUNT] [SEED]

Changes are drawn from a seed, and each is tested in a process of its own:

    this process: libraries are loaded, kvcore is not
     ├── warmed: kvcore is loaded, the room's tests are collected
     │    ├── all tests run once: how long each computes, which functions it runs
     │    └── a process for each mutant in a function, which has the changed code
     └── a process for each mutant of code that runs at import, which loads the changed file
         in place of the one on disk

Each runs the tests that run the function, or all of them, until one fails. A mutant survives if
all of them pass, or as many as compute `TEST_SECONDS` together; a test that computes far longer
than without the mutant has noticed it.

The core in C is a twin of some of the code in Python, so it is switched off, except for the
files that call it, and for functions that no test runs without it: those that it calls.
Survivors that change nothing stand, with the reason, in `tests/data/equivalent_mutants.toml`,
and are counted apart.
"""

import ast
import builtins
import ctypes
import faulthandler
import gc
import importlib.abc
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from time import process_time
from types import CodeType, FunctionType

import attrs
import pytest

ROOT = Path(__file__).parents[2]
EQUIVALENT = ROOT / "tests" / "data" / "equivalent_mutants.toml"

PROPERTIES = "tests/core/properties"
VLLM_STEPS = "tests/core/golden/test_vllm_steps.py"
CLUSTER = "tests/cluster/test_cluster.py"
GROUPED_TRACES = "tests/replay/properties/test_grouped_traces.py"
ROOMS = {
    "cache": (
        ["kvcore/cache", "plugins/kvcore_plugins/cache_groups"],
        [
            *("tests/core/cache", "tests/plugins/test_cache_groups.py"),
            *("tests/plugins/test_cache_groups_serving.py", "tests/plugins/test_checkpoint.py"),
            *("tests/plugins/test_named_blocks.py", "tests/engine/test_compaction.py"),
            *("tests/tiers/test_tiers.py", "tests/tiers/test_prefetch.py", PROPERTIES),
            "tests/tiers/test_tier_option.py",
            "tests/plugins/golden/test_cache_groups.py",
            f"{VLLM_STEPS}::test_steps_of_cache_groups_are_those_of_vllm",
            f"{GROUPED_TRACES}::test_a_traced_run_is_the_same_run_and_is_checked",
            f"{GROUPED_TRACES}::test_a_traced_run_with_tiers_is_checked",
        ],
    ),
    "tiers": (
        ["plugins/kvcore_tiers"],
        [
            *("tests/tiers", "tests/engine/test_tiers_on_tensors.py"),
            *("tests/engine/test_tier_faults.py", "tests/replay/test_trace_tiers.py"),
            *("tests/replay/test_explain_tiers.py", "tests/replay/test_whatif_tiers.py"),
        ],
    ),
    "serving": (
        [
            *("kvcore/serving", "kvcore/workloads/arrivals.py"),
            *(f"plugins/kvcore_plugins/{name}.py" for name in ("load", "drafter/speculation")),
        ],
        [
            *("tests/core/serving", "tests/plugins/test_schedulers.py", PROPERTIES),
            *(
                "tests/plugins/test_cache_groups_serving.py",
                "tests/plugins/test_serving_load.py",
            ),
            *("tests/plugins/test_speculation_simulated.py", "tests/core/workloads"),
            "tests/lab/test_fragmentation.py",
            f"{CLUSTER}::test_a_replica_that_fails_while_verifying_drafts_leaks_no_blocks",
            "tests/tiers/test_tiers.py::test_fragmentation_counts_loaded_tokens",
            "tests/lab/test_shown.py::test_the_short_form_of_a_simulation_has_its_size",
        ],
    ),
    "online": (["plugins/kvcore_online"], ["tests/online"]),
}
"""The folders and files of each room, and its tests."""

CALLS_C = "native.py"
C_TESTS = ["tests/core/native"]
"""The name of the files that call the core in C, and the tests of these."""

TEST_SECONDS = 20.0
"""Seconds that the tests of a mutant compute without it; of slower tests, few notice more."""

PATIENCE = 20
"""Times as long as it computes without a mutant, and a second more, that a test may compute."""

END_WITH_PARENT = 1
"""Linux' name of the signal that a process gets when the one that has started it ends."""

COLLECTION_SECONDS = 100
LONGEST_TEST_SECONDS = 600
"""Limits of the collection of tests, and of a test without a mutant."""

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


@attrs.frozen
class Mutant:
    """A change of a file: the node with this index in it, and what is done to it."""

    path: Path
    index: int
    line: int
    change: str

    @property
    def file(self):
        """The path of the file in the repository."""
        return self.path.relative_to(ROOT).as_posix()

    def key(self):
        """Return what an entry of `EQUIVALENT` has of it."""
        lines = self.path.read_text().splitlines()
        return self.file, lines[self.line - 1].strip(), self.change

    def trees(self):
        """Return the syntax trees of the file as it is and with the change."""
        text = self.path.read_text()
        changed = _Mutator(self.index).visit(ast.parse(text))
        return ast.parse(text), ast.fix_missing_locations(changed)

    def functions(self):
        """Return the code of the functions with `def` that it changes, outer ones first."""
        codes = (compile(tree, str(self.path), "exec") for tree in self.trees())
        return [code for code in _changed(*codes) if _is_named(code)]


class _Mutator(ast.NodeTransformer):
    """Lists all changes of a file, and makes the one with an index.

    Annotations and texts are left as they are: no run depends on them.
    """

    def __init__(self, wanted=None):
        self.changes, self._wanted = [], wanted

    def _may(self, node, change):
        """Record a change; return True if it is to be made."""
        same = sum(
            line == node.lineno and other.removesuffix(" again") == change
            for line, other in self.changes
        )
        self.changes.append((node.lineno, change + " again" * min(same, 1)))
        return len(self.changes) - 1 == self._wanted

    def visit_arg(self, node):
        return node

    def visit_AnnAssign(self, node):
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node):
        node.body = [self.visit(statement) for statement in node.body]
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
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
        for index, operator in enumerate(node.ops):
            swap = SWAPS[type(operator)]
            if self._may(node, f"{type(operator).__name__} becomes {swap.__name__}"):
                node.ops[index] = swap()
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


def files(room):
    """Return the files of a room."""
    places = [ROOT / place for place in ROOMS[room][0]]
    return sorted(
        path for place in places for path in ([place] if place.suffix else place.rglob("*.py"))
    )


def mutants(room):
    """Return all mutants of a room."""
    made = []
    for path in files(room):
        mutator = _Mutator()
        mutator.visit(ast.parse(path.read_text()))
        made += [Mutant(path, index, *change) for index, change in enumerate(mutator.changes)]
    return made


def equivalent():
    """Return the keys of the mutants that change nothing."""
    entries = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {(entry["file"], entry["line"], entry["change"]) for entry in entries}


# Code of functions, replaced where they are.

RUN = "_functions_that_run"
"""The name of a set among the builtins."""


class _Marker(ast.NodeTransformer):
    """Has each function add its name, by `_identity`, to the set `RUN` when it is called."""

    def __init__(self, file):
        self._file = file

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        first = min(child.lineno for child in [node, *node.decorator_list])
        mark = ast.parse(f"{RUN}.add(({self._file!r}, {node.name!r}, {first}))").body
        node.body[bool(ast.get_docstring(node)) : 0] = mark
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - the name that `ast` calls


def _identity(code):
    """Return what names the function of a code object."""
    return code.co_filename, code.co_name, code.co_firstlineno


def _is_named(code):
    """Return True if a code object is that of a function with `def`.

    A lambda or a comprehension is made again by each run of the function around it.
    """
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def _functions(code):
    """Yield the code objects of functions with `def` in a code object."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if _is_named(inner):
                yield inner
            yield from _functions(inner)


def _mark(files):
    """Have the functions of files tell that they run; return the set that they tell it."""
    marked = []
    for path in files:
        tree = _Marker(str(path)).visit(ast.parse(path.read_text()))
        code = compile(ast.fix_missing_locations(tree), str(path), "exec")
        marked += _functions(code)
    _replace(marked)
    run = set()
    setattr(builtins, RUN, run)
    return run


def _own(code):
    """Return what a code object runs, without the code objects in it."""
    constants = [None if isinstance(value, CodeType) else value for value in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, repr(constants)


def _changed(before, after):
    """Return the code objects of functions that differ, outer ones first, as they are after.

    There are none where that of a module or a class differs: it runs at import.
    """
    in_function = before.co_flags & inspect.CO_OPTIMIZED
    if _own(before) != _own(after):
        return [after] if in_function else []
    for old, new in zip(before.co_consts, after.co_consts, strict=True):
        if isinstance(old, CodeType) and (codes := _changed(old, new)):
            return [after, *codes] if in_function else codes
    return []


def _replace(changed):
    """Give functions changed code, by `_identity`; return True if there are such functions."""
    codes = {_identity(code): code for code in changed}
    gc.unfreeze()
    functions = [
        function
        for function in gc.get_objects()
        if type(function) is FunctionType and _identity(function.__code__) in codes
    ]
    try:
        for function in functions:
            function.__code__ = codes[_identity(function.__code__)]
    except ValueError:  # it has other free variables
        return False
    return bool(functions)


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
        _, tree = self._mutant.trees()
        exec(compile(tree, str(self._mutant.path), "exec"), module.__dict__)  # noqa: S102


# Processes and tests.


def _forked(run, *arguments):
    """Return what a function returns in a process of its own; None if that ends otherwise."""
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
            with suppress(BaseException):
                pickle.dump(run(*arguments), answer)
                answer.flush()
                os._exit(0)
            os._exit(1)
        try:
            _, status = os.waitpid(child, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and what its tests have started
        answer.seek(0)
        return pickle.load(answer) if status == 0 else None  # noqa: S301 - our own


@attrs.define
class _Session:
    """A plugin of pytest: a function takes the place of the run of the collected tests."""

    run: Callable[[list], object]
    answer: object = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Call the function, if all tests could be collected."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not session.testsfailed:
            self.answer = self.run(session.items)
        return True

    @classmethod
    def start(cls, tests, run):
        """Return what `run` returns for the tests in these files and folders."""
        silent = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(silent, output)
        # Plugins of pytest are loaded before it: that is what the first fork is for.
        loaded = "ignore::pytest.PytestAssertRewriteWarning"
        options = ["-q", "-n0", "-p", "no:cacheprovider", "-W", loaded]
        session = cls(run)
        signal.setitimer(signal.ITIMER_PROF, COLLECTION_SECONDS)
        pytest.main([*options, "-m", "not network and not slow", *tests], plugins=[session])
        return session.answer


def _passes(item, following, seconds):
    """Return True if a test passes; end the process if it computes more than these seconds.

    The clock on the wall ends tests that only wait, later: other programs run beside them.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    faulthandler.dump_traceback_later(30 + 2 * seconds, exit=True, file=sys.__stderr__)
    failures = item.session.testsfailed
    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
    return item.session.testsfailed == failures


@attrs.define
class Coverage:
    """The tests of each function and their times, by a run without a mutant.

    Attributes:
        seconds: those that each test computes, by its name; tests that fail are left out.
        tests: names of the tests that run each function, by `_identity`.
    """

    seconds: dict[str, float] = attrs.field(factory=dict)
    tests: dict[tuple[str, str, int], set[str]] = attrs.field(factory=dict)

    def of(self, items, files):
        """Return the coverage of files by tests, which are run one after another."""
        run = _mark(files)
        for item, following in pairwise([*items, None]):
            run.clear()
            began = process_time()
            if _passes(item, following, LONGEST_TEST_SECONDS):
                self.seconds[item.nodeid] = process_time() - began
                for identity in run:
                    self.tests.setdefault(identity, set()).add(item.nodeid)
        return self

    def of_mutant(self, mutant):
        """Return the names of the tests that run the code of a mutant; all, if at import."""
        changed = mutant.functions()
        return self.tests.get(_identity(changed[-1]), ()) if changed else self.seconds

    def chosen(self, names):
        """Return those of some tests that are run, as many as fit into `TEST_SECONDS`.

        Half of the time is that of the fastest. For the rest, the fastest test of each file is
        taken first, then the second of each: slow tests may notice what quick ones cannot. They
        are run file by file, so that the tests of a file share its fixtures, and the file that
        takes the least time is the first: most mutants are noticed by many tests.
        """
        ranks, files, places, spent = Counter(), Counter(), {}, 0.0
        for name in sorted(self.seconds.keys() & names, key=self.seconds.__getitem__):
            file = name.partition("::")[0]
            spent += self.seconds[name]
            ranks[file] += spent >= TEST_SECONDS / 2
            places[name] = ranks[file], self.seconds[name], file
        known = sorted(places, key=places.__getitem__)
        spent = accumulate(map(self.seconds.__getitem__, known))
        known = [name for name, end in zip(known, spent, strict=True) if end < TEST_SECONDS]
        for _, seconds, file in map(places.__getitem__, known):
            files[file] += seconds
        return sorted(known, key=lambda name: (files[places[name][2]], *places[name][:0:-1]))

    def passing(self, items, names):
        """Return the names of those of some tests that pass."""
        return {name for name, passes in self._run(items, names) if passes}

    def all_pass(self, items, names):
        """Return True if the tests that are chosen of these pass."""
        return all(passes for _, passes in self._run(items, self.chosen(names)))

    def _run(self, items, names):
        """Yield name and outcome of tests, in the order of their names."""
        known = {item.nodeid: item for item in items}
        for item, following in pairwise([*map(known.__getitem__, names), None]):
            seconds = self.seconds[item.nodeid]
            yield item.nodeid, _passes(item, following, PATIENCE * (seconds + 1))


def _warmed(drawn, tests, files, tell):
    """Return the coverage of files by tests, and the mutants in functions that survive."""

    def run(items):
        coverage = _forked(Coverage().of, items, files)
        if coverage is None:
            return None
        runs = [coverage.seconds, *map(coverage.of_mutant, drawn)]
        used = {name: None for names in runs for name in coverage.chosen(names)}
        steady = _forked(coverage.passing, items, list(used))
        if steady is None:
            return None
        for name in used.keys() - steady:
            tell(f"left out, as it fails in another order: {name}")
            del coverage.seconds[name]
        core = importlib.import_module("kvcore.native").state()  # not built: `CALLS_C` survives
        seconds = sum(coverage.seconds.values())
        tell(f"{len(coverage.seconds)} tests, {seconds:.0f} s; the core runs {core}")
        survived = []
        for count, mutant in enumerate(drawn, 1):
            if _forked(_survives, mutant, items, coverage):
                survived.append(mutant)
                tell(f"survived: {mutant.file}:{mutant.line}: {mutant.change}")
            if count % 20 == 0:
                tell(f"{len(survived)} of {count} in functions survived")
        return coverage, survived

    return _Session.start(tests, run)


def _survives(mutant, items, coverage):
    """Return True if no test notices a mutant in a function."""
    return _replace(mutant.functions()) and coverage.all_pass(items, coverage.of_mutant(mutant))


def _survives_import(mutant, tests, coverage):
    """Return True if no test notices a mutant of code that runs at import."""
    importlib.import_module("kvcore")  # which puts a finder of its own first
    sys.meta_path.insert(0, _Finder(mutant))
    names = coverage.of_mutant(mutant)
    return _Session.start(tests, lambda items: coverage.all_pass(items, names))


def survivors(drawn, tests, files, tell):
    """Return those of some mutants of files that tests do not notice, and run or do not run."""
    inside = [mutant for mutant in drawn if mutant.functions()]
    warmed = _forked(_warmed, inside, tests, files, tell)
    assert warmed is not None, "the tests cannot be collected, or do not end"
    coverage, survived = warmed
    for mutant in drawn:
        if mutant not in inside and _forked(_survives_import, mutant, tests, coverage):
            survived.append(mutant)
            tell(f"survived: {mutant.file}:{mutant.line}: {mutant.change}")
    unrun = [mutant for mutant in survived if not coverage.of_mutant(mutant)]
    return [mutant for mutant in survived if mutant not in unrun], unrun


def main(room, count="200", seed="0"):
    """Draw mutants of a room, test them, and print those that survive."""
    os.environ.setdefault("KVCORE_SIMULATION", "48")
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    os.chdir(ROOT)
    terminal = os.fdopen(os.dup(1), "w")

    def tell(line):
        print(line, file=terminal, flush=True)

    made, known, tests = mutants(room), equivalent(), ROOMS[room][1]
    drawn = Random(int(seed)).sample(made, min(int(count), len(made)))
    left = [mutant for mutant in drawn if mutant.key() not in known]
    survived, same = [], len(drawn) - len(left)
    for pure in ("1", "0"):
        os.environ["KVCORE_PURE"] = pure
        part = [mutant for mutant in left if pure == "0" or mutant.path.name != CALLS_C]
        if part:
            files_of_c = C_TESTS * (pure == "0")
            run, unrun = survivors(part, tests + files_of_c, files(room), tell)
            left = [mutant for mutant in left if mutant in unrun or mutant not in part]
            survived += run
    survived += left
    tell(
        f"{room}: of {len(drawn)} mutants ({len(made)} are possible) "
        f"{len(drawn) - same - len(survived)} were noticed, {same} change nothing, "
        f"{len(survived)} survived; {sum(os.times()[:4]):.0f} s of CPU"
    )
    return len(survived)


if __name__ == "__main__":
    for _name in ("torch", "aiohttp.web", "zmq", "hypothesis", "openai", "numpy"):
        with suppress(ImportError):
            importlib.import_module(_name)
    sys.exit(main(*sys.argv[1:]) > 0)
