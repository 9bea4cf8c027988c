"""A cell in an interpreter of its own, in which text has other hashes than in this one.

The interpreter runs the policy as this one does, in a sandbox that it forks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import msgspec

from kvcore.errors import InputError
from kvcore_judge.cells import Cell, run_cell
from kvcore_judge.leaderboard import BASE
from kvcore_judge.sandbox import BrokenRuleError, Limits, run_in_sandbox

_SEEDS = "1", "2"


def run_elsewhere(cell: Cell, limits: Limits, *, unsafe: bool = False) -> str:
    """Run a cell in another interpreter; return the digest of its evictions.

    Raises:
        BrokenRuleError: the policy breaks a rule there.
        InputError: the stream, or the file of the policy, is not what it was.
    """
    own = os.environ.get("PYTHONHASHSEED")
    ran = subprocess.run(  # noqa: S603 - this module, in this Python
        # What is in the working folder is imported by neither, unless this one does.
        [sys.executable, "-P", "-m", __name__],
        input=pickle.dumps((cell, limits, unsafe)),
        stdout=subprocess.PIPE,
        check=True,
        env={
            **os.environ,
            "PYTHONHASHSEED": next(seed for seed in _SEEDS if seed != own),
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        },
    )
    form: Any = tuple[str | None, str, str, str | None]
    # Before the last line stands what packages print when they are imported.
    answer = ran.stdout.rpartition(b"\n")[2]
    result, rule, what, wrong = msgspec.json.decode(answer, type=form)
    if wrong is not None:
        raise InputError(wrong)
    if rule:
        raise BrokenRuleError(what, rule=rule)
    return str(result)


def _main() -> None:
    """Run the cell that standard input has, and write how it ended."""
    answer: tuple[Any, ...]
    cell, limits, unsafe = pickle.load(sys.stdin.buffer)  # noqa: S301 - from `run_elsewhere`
    try:
        # Streams and packages are read from files, which a sandbox refuses, and kept.
        BASE.describe()
        run_cell(attrs.evolve(cell, entry=BASE))
        digest = run_in_sandbox(lambda: run_cell(cell).evictions, str, limits, unsafe=unsafe)
        answer = digest, "", "", None
    except BrokenRuleError as broken:
        answer = None, broken.rule, broken.what, None
    except InputError as error:
        answer = None, "", "", str(error)
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer))


if __name__ == "__main__":
    _main()
