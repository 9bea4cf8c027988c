"""Run `kvcore` in this process, which takes a tenth of the time of a process of its own."""

from contextlib import chdir, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from subprocess import CompletedProcess

from kvcore.cli import main as frame


def run_here(*arguments, cwd=None):
    """Run a command line in the folder `cwd`; return what `subprocess.run` would, as text."""
    words = list(map(str, arguments))
    # click writes bytes to what is below a text stream.
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with chdir(cwd or Path.cwd()), redirect_stdout(out), redirect_stderr(err):
        code = frame.run(words)
    told = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return CompletedProcess(words, code, *told)
