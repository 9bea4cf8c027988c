"""Runs commands at the same time, and then prints what each has printed.

    python tests/helpers/abreast.py mypy : sphinx-build ...

A colon stands between commands. The exit code is 1 if one of them fails.
"""

import sys
from itertools import groupby
from subprocess import PIPE, STDOUT, Popen


def main(words):
    """Run the commands of a command line; return the exit code."""
    commands = [[*group] for between, group in groupby(words, ":".__eq__) if not between]
    started = [Popen(command, stdout=PIPE, stderr=STDOUT, text=True) for command in commands]
    for command, process in zip(commands, started, strict=True):
        printed, _ = process.communicate()
        sys.stdout.write(f"{command[0]} ended with {process.returncode}\n{printed}")
    return int(any(process.returncode for process in started))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
