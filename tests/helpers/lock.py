"""Makes tests/locked.txt: every package that tox installs, with its version and its hashes.

    python tests/helpers/lock.py [WHEEL ...]

Runs `uv pip compile` on the extras of pyproject.toml and the packages that tox.ini names. Each
WHEEL is a further build of a locked version, as of torch for the CPU, whose hash is added.
"""

import configparser
import re
import subprocess
import sys
import tomllib
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "tests/locked.txt"

HEAD = """\
# Made by `tox run -e lock`, not by hand: the packages that tox installs, on all Pythons and
# systems, with the hashes that pip compares. It is kept, unlike all else that is made, so that
# a file that was changed where packages come from is refused.
"""


def required():
    """Return the packages that pyproject.toml and tox.ini name, as requirements."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", "utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    lines = [
        line
        for name in tox.sections()
        if tox.get(name, "constraints", fallback=True)
        for line in tox.get(name, "deps", fallback="").splitlines()
    ]
    lines += project["build-system"]["requires"] + project["project"]["dependencies"]
    for extra in project["project"]["optional-dependencies"].values():
        lines += extra
    return sorted({line for line in lines if line and not line.startswith("{")})


def locked():
    """Return the packages that have a version and hashes in the lock, as `name==version`."""
    entry = r"^(\S+==\S+) .*\\\n {4}--hash=sha256:[0-9a-f]{64}"
    return set(re.findall(entry, LOCK.read_text("utf-8"), re.MULTILINE))


def main(wheels):
    """Write the lock."""
    options = "--universal --generate-hashes --no-header --no-annotate --python-version 3.11"
    command = f"-m uv pip compile - -c constraints.txt --quiet {options}"
    compiled = subprocess.run(
        [sys.executable, *command.split()],
        input="\n".join(required()),
        text=True,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    for wheel in wheels:
        name, version, *_ = wheel.name.split("-")
        line = f"{name}=={version.partition('+')[0]} \\\n"
        assert line in compiled, f"{wheel.name}: the lock has another version"
        note = f"# The first hash is that of {wheel.name}.\n"
        digest = f"    --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()} \\\n"
        compiled = compiled.replace(line, note + line + digest)
    LOCK.write_text(HEAD + compiled, "utf-8")


if __name__ == "__main__":
    main([*map(Path, sys.argv[1:])])
