"""Builds the sdist and the wheels, and tests each of them outside the checkout.

    python tests/helpers/wheels.py FOLDER [TAG]

writes into a folder, such as dist: the sdist; built from it, the wheel with the core in C for
this Python, a manylinux wheel on Linux; and the wheel in Python alone. Each is installed in its
own environment, where tests/project/test_smoke.py must pass. A tag must be that of the version.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "tests" / "project" / "test_smoke.py"


def run(*command, cwd=ROOT, **environment):
    """Run a command with variables of the environment; stop if it fails."""
    subprocess.run([*map(str, command)], cwd=cwd, env=os.environ | environment, check=True)


def build(folder):
    """Build all distributions; yield each with the core that it must have when installed."""
    with TemporaryDirectory() as built:
        run(sys.executable, "-m", "build", "--outdir", built)
        (sdist,) = Path(built).glob("*.tar.gz")
        (compiled,) = Path(built).glob("*.whl")
        yield sdist.rename(folder / sdist.name), "(loop in C)"
        if sys.platform == "linux":
            repair = ("-m", "auditwheel", "repair", "--wheel-dir", f"{built}/repaired")
            run(sys.executable, *repair, compiled)
            (compiled,) = Path(built, "repaired").glob("*.whl")
        yield compiled.rename(folder / compiled.name), "(loop in C)"
        pure = (sys.executable, "-m", "build", "--wheel", "--outdir", f"{built}/pure")
        run(*pure, KVCORE_PURE="1")
        (wheel,) = Path(built, "pure").glob("*-py3-none-any.whl")
        yield wheel.rename(folder / wheel.name), "(loop in Python"


def check(distribution, core):
    """Run the smoke tests where a distribution is installed, which uses `core`."""
    with TemporaryDirectory() as home:
        run(sys.executable, "-m", "venv", f"{home}/venv")
        scripts = Path(home, "venv", "Scripts" if os.name == "nt" else "bin")
        run(scripts / "python", "-m", "pip", "install", "--quiet", f"{distribution}[testing]")
        copyfile(SMOKE, Path(home, SMOKE.name))
        pytest = ("-I", "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
        run(scripts / "python", *pytest, SMOKE.name, cwd=home, KVCORE_SMOKE=core)


def main(folder, tag=None):
    """Build, test and name all distributions of this Python.

    Raises:
        SystemExit: a tag is given that is not `v` and the version.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if tag not in {None, f"v{version}"}:
        sys.exit(f"the tag is {tag}, the version in pyproject.toml is {version}")
    folder.mkdir(parents=True, exist_ok=True)
    for distribution, core in build(folder.resolve()):
        print(f"{distribution.name} {core}", flush=True)  # noqa: T201
        check(distribution, core)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
