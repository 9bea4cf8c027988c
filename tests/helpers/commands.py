"""Functions that run `kvcore` in this process, and other programs beside a test."""

import json
import sys
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen, run

from kvcore_cli import main as frame


def run_here(*arguments, cwd=None):
    """Run `kvcore` in the folder `cwd`; return a CompletedProcess with its output as text.

    In this process that takes a tenth of the time of a process of its own.
    """
    words = list(map(str, arguments))
    # click writes bytes to what is below a text stream.
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with chdir(cwd or Path.cwd()), redirect_stdout(out), redirect_stderr(err):
        code = frame.run(words)
    output = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return CompletedProcess(words, code, *output)


def stdout_of(*arguments, cwd=None):
    """Run `kvcore`, require success and an empty stderr, and return stdout."""
    done = run_here(*arguments, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def json_of(*arguments, cwd=None):
    """Run `kvcore` with `--json`, require success, and return the document."""
    return json.loads(stdout_of(*arguments, "--json", cwd=cwd))


def error_of(*arguments, code=2, cwd=None):
    """Run `kvcore`, require this exit code and an empty stdout, and return stderr."""
    done = run_here(*arguments, cwd=cwd)
    assert (done.returncode, done.stdout) == (code, "")
    return done.stderr


def as_process(*arguments, **options):
    """Run `kvcore` as a process of its own, and return it with its output as text."""
    command = [sys.executable, "-m", "kvcore", *map(str, arguments)]
    return run(command, capture_output=True, text=True, check=False, **options)


def words_of(text):
    """Return the words of each line of a text, without the rules of tables."""
    return [line.split() for line in text.splitlines() if line.strip(" ─")]


OPEN = {"options", "packages"}
"""Fields whose objects have names that plugins and packages bring."""


def fields_of(document):
    """Return the names of all fields of a JSON document, at any depth but below `OPEN`."""
    if isinstance(document, dict):
        inner = [each for name, each in document.items() if name not in OPEN]
        return set(document).union(*map(fields_of, inner))
    return set().union(*map(fields_of, document)) if isinstance(document, list) else set()


@contextmanager
def running(command, **options):
    """Yield a process of another program, in text mode; kill it if the body fails.

    `Popen` alone would wait for its end, for ever.
    """
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
